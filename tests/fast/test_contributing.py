"""What contributing.md adds is added to the letter, in a copy of the project, and put to use."""
import ast
import json
import re
import shutil
import subprocess
import sys

import pytest
import yaml

import tiny
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_summary


def blocks(heading):
    "Language and text of each code block under a heading of the page."
    page = (tiny.ROOT/'nbs'/'contributing.md').read_text()
    section = page.split(f'\n## {heading}\n')[1].split('\n## ')[0]
    return re.findall(r'^```(\w+)\n(.*?)^```', section, re.M | re.S)


def add(root, language, block):
    "Put a block where its first line says: `# FILE`, or `# FILE, behind NAME`, which it defines."
    if language == 'sh':
        return subprocess.run(['bash', '-ec', block], cwd=root, check=True)
    place, text = block.split('\n', 1)
    file, _, name = place.removeprefix('# ').partition(', behind ')
    path = root/file
    if not name:
        path.write_text(text)
    elif path.suffix == '.ipynb':
        notebook = json.loads(path.read_text())
        sources = [''.join(c['source']) for c in notebook['cells']]
        at = next(i for i, s in enumerate(sources) if re.search(rf'^{name} = ', s, re.M))
        cell = dict(cell_type='code', execution_count=None, id='00000001', metadata={}, outputs=[],
                    source=f'#| export\n{text}')
        notebook['cells'].insert(at + 1, cell)
        path.write_text(json.dumps(notebook))
    else:
        lines = path.read_text().splitlines(True)
        if path.suffix == '.yaml':
            end = next(i for i, line in enumerate(lines, 1) if line.startswith(f'{name}:'))
        else:
            end = next(s.end_lineno for s in ast.parse(''.join(lines)).body
                       if isinstance(s, ast.Assign) and s.targets[0].id == name)
        path.write_text(''.join([*lines[:end], text, *lines[end:]]))


def run(root, *words):
    "What Python says in a copy of the project."
    done = subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True,
                          env=tiny.environment(PYTHONPATH=str(root)))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def project(tmp_path_factory):
    "A copy with everything that the page adds."
    root = tmp_path_factory.mktemp('contributed')/'project'
    skipped = shutil.ignore_patterns('__pycache__', '.ipynb_checkpoints')
    for name in ('alpaca_farm', 'nbs', 'tests', 'tools'):
        shutil.copytree(tiny.ROOT/name, root/name, ignore=skipped)
    for name in ('settings.ini', 'README.md', 'pytest.ini'):
        shutil.copy(tiny.ROOT/name, root)
    for heading in ('A method', 'A preference loss', 'An advantage', 'A judge',
                    'A format of files'):
        for block in blocks(heading):
            add(root, *block)
    run(root, '-c', 'from nbdev.doclinks import nbdev_export; nbdev_export()')
    return root


@pytest.mark.slow
def test_a_loss_and_an_advantage_train_and_have_their_values(project):
    "By the tests that every one of the table passes, which train the tiny model."
    said = run(project, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', 'tests/fast/test_dpo.py',
               'tests/fast/test_losses.py', '-k', 'squared_hinge or median')
    assert int(re.search(r'(\d+) passed', said)[1]) >= 9, said


@pytest.mark.slow
def test_a_method_has_the_form_of_one_and_trains(project, base, tmp_path):
    said = run(project, '-m', 'pytest', '-q', '-p', 'no:cacheprovider',
               'tests/fast/test_contracts.py', '-k', 'my_method or one_thing')
    assert int(re.search(r'(\d+) passed', said)[1]) >= 8, said
    pairs = read_json(base/'annotators'/'preferences.json')
    pairs = [dict(r, question=r.pop('instruction')) for r in pairs]
    settings = tiny.settings('dpo', base, out=str(tmp_path/'run'), eval_split='',
                             preferences=tiny.write(tmp_path/'pairs.json', pairs),
                             columns='instruction=question')
    for name in ('beta', 'max_prompt'):
        del settings[name]
    said = run(project, '-m', 'alpaca_farm.my_method', *tiny.command('dpo', **settings)[3:])
    assert read_summary(tmp_path/'run')['labels'] > 0
    assert 'the first of 60 records' in said and 'max_prompt' in said
    assert 'my_method' in yaml.safe_load((project/'nbs/recipes/farm.yaml').read_text())['methods']


@pytest.mark.slow
def test_a_method_names_its_inputs_and_the_model_of_its_size(project):
    said = run(project, '-c', 'from alpaca_farm.my_method import MyMethodConfig as cfg; '
                              'print(*cfg.inputs, "by", *cfg.sized_by)')
    assert said.split() == ['preferences', 'policy', 'data', 'by', 'policy']


LISTED = """
import sys
from alpaca_farm import dpo, ppo
from alpaca_farm.run.settings import from_args
sys.stderr = sys.stdout
for cls, setting in ((dpo.DPOConfig, '--loss_type'), (ppo.PPOConfig, '--advantage')):
    for words in (['--help'], [setting, 'none']):
        try: from_args(cls, words)
        except SystemExit: pass
"""


@pytest.mark.slow
def test_they_are_listed_where_a_name_is_chosen(project):
    "By `--help`, and by the refusal of another name."
    said = ' '.join(run(project, '-c', LISTED).split())
    for name, text in dict(squared_hinge='the hinge, squared', median='the median answer').items():
        assert f'{name}: {text}' in said
        assert re.search(rf"'none': it must be [^:]*'{name}'", said), said


READ = """
import json, sys
from alpaca_farm.annotators import AnnotatorsConfig
from alpaca_farm.data.records import load_records
from alpaca_farm.judging.judges import load_annotators
pairs = load_records(sys.argv[1], 'preference', 'preference')
cfg = AnnotatorsConfig(annotators='longer by 3')
print(json.dumps([pairs[0]['preference'], *load_annotators(cfg.annotators, cfg)(pairs)]))
try: load_records(sys.argv[2], 'preference', 'preference')
except ValueError as e: print(e)
try: AnnotatorsConfig(annotators='shorter')
except ValueError as e: print(e)
"""


@pytest.mark.slow
def test_a_format_and_a_judge_are_read_by_name(project, tmp_path):
    rows = [dict(title=f'Question {i}', best=best, worst='three') for i, best in
            enumerate(['four', 'a longer one', 'at'])]
    (tmp_path/'threads.json').write_text(json.dumps(rows))
    (tmp_path/'bad.json').write_text(json.dumps([dict(rows[0], best=3)]))
    said = run(project, '-c', READ, str(tmp_path/'threads.json'), str(tmp_path/'bad.json'))
    labels, bad, unknown = said.splitlines()[-3:]
    assert json.loads(labels) == [2, 1.5, 2, 1]
    assert 'bad.json' in bad
    assert 'row 0' in bad
    assert 'the longer answer, by so many letters (longer by 20)' in unknown
