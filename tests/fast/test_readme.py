"""What the pages and notebooks tell people to type works: snippets, commands, links."""
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from papermill import inspect_notebook

import tiny
from alpaca_farm.data.records import load_records
from alpaca_farm.run.runs import read_summary
from alpaca_farm.run.settings import refuse_unknown

PAGES = {p.name: p.read_text()
         for p in (tiny.ROOT/'README.md', *sorted((tiny.ROOT/'nbs').glob('*.md')))}
MARKDOWN = list(PAGES)
for p in sorted((tiny.ROOT/'nbs').rglob('*.ipynb')):
    if p.parent.name != '.ipynb_checkpoints':
        PAGES[p.stem] = '\n\n'.join(''.join(c['source'])
                                    for c in json.loads(p.read_text())['cells'] if c['cell_type']
                                    == 'markdown')
README = PAGES['README.md']
MAKEFILE = (tiny.ROOT/'Makefile').read_text()
FILE = re.compile(r'`((?:nbs|tests|tools|alpaca_farm)/[\w/.-]+\.\w+)`')
FENCE = re.compile(r'^ *```(\w*)\n(.*?)^ *```', re.S | re.M)


def commands(text):
    "The shell commands of a page: in blocks without a language, and between backticks."
    blocks = [b for language, b in FENCE.findall(text) if language in ('', 'sh', 'bash')]
    lines = [l for b in blocks for l in b.replace('\\\n', ' ').split('\n')]
    lines += re.findall(r'`([^`\n]+)`', FENCE.sub('', text))
    ours = r' *(make|papermill|(OMP_NUM_THREADS=1 )?python -m|torchrun|mkdir -p runs) '
    return [l.strip() for l in lines
            if re.match(ours, l) and '...' not in l and 'my_method' not in l]


def check_settings(notebook, settings):
    "TypeError for a setting that the notebook does not have, or a value of another type."
    path = next((tiny.ROOT/'nbs').rglob(f'{notebook}.ipynb'))
    if 'default_exp' in path.read_text():
        return tiny.check_settings(notebook, settings)
    refuse_unknown(notebook, settings, list(inspect_notebook(str(path))))   # it exports nothing


def check(command):
    "An error if a command of a page cannot be right."
    command = re.sub(r'^mkdir -p runs && ', '', command)
    def said(m): return subprocess.check_output(m[1], shell=True, text=True, cwd=tiny.ROOT).strip()
    command = re.sub(r'\$\((python -c "[^"]*")\)', said, command)
    words = shlex.split(command, comments=True)
    if words[0] == 'source': return
    if words[0] == 'make':
        assert all(re.search(rf'^{re.escape(w)}:', MAKEFILE, re.M)
                   for w in words[1:] if '=' not in w)
    elif words[0] == 'papermill':
        path = tiny.ROOT/words[1]
        assert path.is_file()
        assert words[2].endswith('.ipynb')
        check_settings(path.stem, tiny.given(words))
    else:
        module = next(w for w in words[words.index('-m') + 1:] if not w.startswith('-'))
        if not module.startswith('alpaca_farm.'):
            return importlib.import_module(module)
        options = words[words.index(module) + 1:]
        if options and not options[0].startswith('-'):
            first = tiny.config_class(module.rpartition('.')[2]).positional
            options.insert(0, f'--{first}')
        if '-f' in options:
            file = tiny.ROOT/options.pop(options.index('-f') + 1)
            options.remove('-f')
            if file.exists():
                check_settings(module.rpartition('.')[2], yaml.safe_load(file.read_text()))
        settings = {k.removeprefix('--'): yaml.safe_load(v) if v[0] in '[{' else v
                    for k, v in zip(options[::2], options[1::2])}
        check_settings(module.rpartition('.')[2], settings)


@pytest.mark.parametrize('page', [name for name, text in PAGES.items() if commands(text)])
def test_commands_have_notebooks_targets_and_settings(page):
    wrong = {}
    for command in commands(PAGES[page]):
        try:
            check(command)
        except Exception as e:
            wrong[command] = repr(e)
    assert wrong == {}
    if page == 'README.md':
        assert len(commands(README)) >= 10


@pytest.mark.parametrize('page', ['README.md', 'data.md', 'gpus.md'])
def test_papermill_knows_the_settings_of_its_commands(page):
    "It calls a setting that is not in the parameters cell unknown, as if it had no effect."
    for command in commands(PAGES[page]):
        if not command.startswith('papermill'):
            continue
        words = shlex.split(command, comments=True)
        assert {*tiny.given(words)} <= {*inspect_notebook(str(tiny.ROOT/words[1]))}, command


@pytest.mark.parametrize('page', MARKDOWN)
def test_snippets_run_and_links_and_named_files_are_there(page):
    for language, block in FENCE.findall(PAGES[page]):
        if language == 'python' and not re.match('# .*, behind ', block):   # test_contributing's
            exec(block, {})
        if language == 'yaml':
            yaml.safe_load(block)
        if language == 'diff':   # of DPO: lines that are there, and lines that can be added
            before, after = (''.join(l[1:] for l in block.splitlines(True) if l[0] != sign)
                             for sign in '+-')
            source = (tiny.ROOT/'alpaca_farm'/'dpo.py').read_text()
            assert source.count(before) == 1
            compile(source.replace(before, after), 'dpo.py', 'exec')
    folder = tiny.ROOT if page == 'README.md' else tiny.ROOT/'nbs'
    links = [l.partition('#')[0] for l in re.findall(r'\]\(([^)]+)\)', PAGES[page])
             if not l.startswith('http')]
    assert [l for l in links if not (folder/l).exists()] == []
    if page != 'CHANGES.md':   # which names files that are gone
        made = {'nbs/my_method.ipynb', 'tests/fast/test_my_method.py'}
        named = {*FILE.findall(PAGES[page])} - made
        assert [f for f in named if not (tiny.ROOT/f).exists()] == []


LINKED = re.compile(r'\[`([\w.]+)`\]\((?:nbs/)?([\w/]+)\.ipynb\)')   # a name, and a notebook
QUANTITY = re.compile(r'(?<![\w.-])\d[\d.]*(?: %)?(?: \[[^]]*\])?')   # with its interval


def test_the_readme_can_be_finished():
    "It has 1,500 to 1,900 words, and no paragraph has over 90, nor over three quantities."
    assert 1500 <= len(README.split()) <= 1900
    text = FENCE.sub('', README)
    for paragraph in re.split(r'\n\n|\n(?=- )', text):
        if paragraph.startswith('|'):
            continue
        assert len(paragraph.split()) <= 90, paragraph
        said = re.sub(r'\]\([^)]*\)|, \d{4}|\d+(?= : )', '', paragraph)
        assert len(QUANTITY.findall(said)) <= 3, paragraph


@pytest.mark.parametrize('page', MARKDOWN)
def test_names_that_are_links_are_defined_where_they_lead(page):
    "`Trainer.update` is looked up in the module of the notebook, and must be public there."
    lost = []
    for name, notebook in LINKED.findall(PAGES[page]):
        if name == notebook.rpartition('/')[2]:
            continue   # the notebook itself
        module = importlib.import_module('alpaca_farm.' + notebook.replace('/', '.'))
        outer, _, inner = name.partition('.')
        if outer not in module.__all__ or inner and not hasattr(getattr(module, outer), inner):
            lost.append(name)
    assert lost == []
    if page == 'architecture.md':
        assert len(LINKED.findall(PAGES[page])) > 80


def test_binder_installs_the_torch_of_the_constraints():
    pinned = re.search(r'^torch==(\S+)$', (tiny.ROOT/'constraints.txt').read_text(), re.M)[1]
    assert f'torch=={pinned}+cpu' in (tiny.ROOT/'.binder'/'requirements.txt').read_text().split()


def test_binder_makes_the_assignment_that_the_course_opens():
    made = tiny.ROOT/'.binder'/'postBuild'
    assert os.access(made, os.X_OK)
    path = made.read_text().split()[-1]
    assert f'?labpath={path.replace("/", "%2F")})' in PAGES['course.md']


def test_the_list_of_notebooks_is_complete():
    listed = set(re.findall(r'\(([\w/]+\.ipynb)\)', PAGES['notebooks.md']))
    there = {str(p.relative_to(tiny.ROOT/'nbs')) for p in (tiny.ROOT/'nbs').rglob('*.ipynb')
             if p.parent.name != '.ipynb_checkpoints'}
    assert there - listed == set()


def test_from_a_model_and_prompts_alone_to_a_board(base, tmp_path, monkeypatch):
    "The commands of data.md, on a tiny model that is nobody's run."
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copytree(base/'sft'/'model', tmp_path/'my'/'model')
    prompts = [dict(instruction=r['instruction'], input=r['input'])
               for r in load_records(str(base/'world'), 'unlabeled', 'instruction', 40)]
    (tmp_path/'my'/'prompts.json').write_text(json.dumps(prompts[:30]))
    (tmp_path/'my'/'eval.json').write_text(json.dumps(prompts[30:]))
    (tmp_path/'my_module.py').write_text('''
def my_judge(pairs): return [2. - (len(p["output_1"]) > len(p["output_2"])) for p in pairs]''')
    def here(value):
        if isinstance(value, list):
            return list(map(here, value))
        return str(tmp_path/value) if '/' in str(value) else value
    made = []
    for words in map(shlex.split, commands(PAGES['data.md'])):
        name = Path(words[1]).stem
        given = dict(max_instances=0) | {k: here(v) for k, v in tiny.given(words).items()}
        cfg = tiny.config(name, **tiny.SETTINGS.get(name, {}) | given)
        made.append(tiny.main(name)(cfg).folder)
    assert [f.name for f in made] == ['pairs', 'before', 'mine', 'my_dpo', 'my_board', 'look']
    labels = json.loads((made[2]/'preferences.json').read_text())
    assert len(labels) > 20
    for r in labels:
        lead = len(r['output_1']) - len(r['output_2'])
        assert not lead or r['preference'] == 2 - (lead > 0)
    board = (made[4]/'leaderboard.csv').read_text()
    assert 'my_dpo' in board
    assert read_summary(made[4])


COMING = PAGES['coming_from.md']
SCRIPTS = """
sft.sh reward_modeling.sh rlhf_ppo.sh best_of_n.py expiter.sh rlhf_quark.sh dpo.sh
oai_baselines.py recover_model_weights run_best_of_n run_decode run_rerank annotate_pairs
annotate_samples annotate_head2head alpaca_leaderboard simulate_preference_data.py
consolidate_preference_data.py convert_llama7b_to_alpacafarm_format.py
evaluate_reward_model_human_agreement.py format_input_prompts.py postprocess.py
evaluate_outputs.py gpt4_compare.py format_context_distillation_training_data.py rlaif rlcd_rescore
response_gen.sh split_files.py scoring_responses.sh make_data.py train.sh train_wombat7b.sh
train_wombat7b_gpt4.sh clean_gpt4_compare.py single_sentence_inference.py apply_delta.py
recover_wombat_7b.sh""".split()


@pytest.mark.parametrize('command', [c for c in commands(COMING) if c.startswith('papermill')],
                         ids=lambda c: c.split()[2])
def test_commands_beside_theirs_are_within_bounds(command):
    "The settings fit each other too; what they read need not be there."
    words = shlex.split(command)
    name = words[1].rpartition('/')[2].removesuffix('.ipynb')
    if name == 'pretrained':
        return   # it exports nothing, and has no bounds
    cls = tiny.config_class(name)
    inputs = {*cls.inputs} - {'annotators'}
    said = tiny.given(words)
    settings = {k: v for k, v in said.items() if k not in inputs or not v}
    if said.get('samples'):
        settings['samples'] = 'nbs'
    if 'rrhf' in settings:
        settings['rrhf'] = [s for s in settings['rrhf'] if not s.startswith('policy=')]
    cls(**settings)


def test_every_command_of_their_readmes_is_in_the_table():
    theirs = ' '.join(row.split('|')[1] for row in COMING.splitlines() if row.startswith('|'))
    assert [s for s in SCRIPTS if s not in theirs] == []
    assert len([c for c in commands(COMING) if c.startswith('papermill')]) >= 30


@pytest.mark.parametrize('heading', re.findall(r'^### (.*): `([a-z_ ]+)`$', COMING, re.M),
                         ids=lambda h: h[0])
def test_settings_beside_their_options_exist(heading):
    "Every `name` and `name: value` on the right is a setting of the heading's notebooks."
    title, notebooks = heading
    table = COMING.split(f'### {title}: ')[1].split('\n#')[0]
    rows = [r.split('|')[2] for r in table.splitlines() if r.startswith('| ')
            and not r.startswith(('| TRL', '| AlpacaFarm |', '| RRHF |'))]
    values = {'auto', 'k1', 'grpo'}   # no settings there
    if ' ' in notebooks:
        values |= {'data', 'preferences', 'candidates'}
    named = [[n for n in re.findall(r'`([a-z_]+(?:: [^`]+)?)`', r) if n not in values]
             for r in rows]
    assert any(named)
    for notebook in notebooks.split():
        for names in named:
            pairs = dict(n.partition(': ')[::2] for n in names)
            refuse_unknown(notebook, pairs, [*tiny.config_class(notebook).__dataclass_fields__])
            given = {k: v if '=' in v else yaml.safe_load(v) for k, v in pairs.items() if v}
            tiny.config(notebook, **given)   # values are in their bounds


TRL = yaml.safe_load((tiny.ROOT/'tests'/'data'/'trl.yaml').read_text())
SIGNATURES = """
import importlib, inspect, json, sys
from transformers import TrainingArguments
usual, found = {*inspect.signature(TrainingArguments).parameters}, {}
for name in sys.argv[1:]:
    module, _, kind = name.rpartition('.')
    own = inspect.signature(getattr(importlib.import_module(module), kind)).parameters
    found[name] = ' '.join(sorted({*own} - usual))
print(json.dumps(found))"""


@pytest.mark.slow
@pytest.mark.parametrize('version', TRL)
def test_the_record_of_trls_settings_is_right(version):
    "Beside the TRL that `make bench` has installed."
    folder = tiny.ROOT/'runs'/'bench'/f'trl-{version}'
    if not folder.exists():
        pytest.skip(f'no TRL {version} here')
    command = [sys.executable, '-c', SIGNATURES, *TRL[version]]
    said = subprocess.check_output(command, env=tiny.environment(PYTHONPATH=str(folder)), text=True)
    assert json.loads(said.splitlines()[-1]) == TRL[version]


@pytest.mark.parametrize('heading, table', re.findall(
    r'^### (.*)\n((?:.|\n)*?)(?=^#|\Z)', COMING.split('\n## TRL')[1], re.M), ids=lambda t: t[:20])
def test_names_on_the_side_of_trl_are_its(heading, table):
    "`name` and `name=value`: of the configuration and trainer in the heading, or of any."
    from transformers import TrainingArguments
    allowed = {*inspect.signature(TrainingArguments).parameters, 'num_processes', 'margin'}
    own = re.findall(r'(\w+)Config', heading)
    for classes in TRL.values():
        for name, settings in classes.items():
            kind = re.sub(r'.*\.|Config$|Trainer$', '', name)
            if not own or kind in [*own, 'ScriptArguments']:
                allowed.update(settings.split())
    cells = ' '.join(re.sub(r'\(.*?\)', '', row.split(' | ')[0]) for row in table.splitlines())
    assert {*re.findall(r'`([a-z]\w*)(?:=[^`]*)?`', cells)} - allowed == set()
