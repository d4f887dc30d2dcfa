"""Which farm the saved outputs of each notebook are from, and that texts say what they show."""
import re
import shutil
from pathlib import Path

import pytest
from traitlets.config import Config

import tiny
import outputs
from alpaca_farm.run.files import read_json, write_json
from outputs import code_mark, farm_mark, is_slow, notebook_paths, OutputsConfig, save_outputs

RECORD = tiny.ROOT/'nbs'/'outputs.json'


def name_of(path): return path.with_suffix('').as_posix().rpartition('/nbs/')[2]


def shows_runs(path):
    return any(is_slow(c) and c.get('outputs') for c in read_json(path)['cells'])


def test_saved_outputs_are_recorded_and_from_one_farm():
    record = read_json(RECORD)
    paths = [p for p in notebook_paths() if shows_runs(p)]
    assert set(record) == {name_of(p) for p in notebook_paths()}
    farms = {name_of(p): record[name_of(p)]['farm'] for p in paths}
    assert '' not in farms.values() and len(set(farms.values()) - {'own', 'older'}) == 1, farms
    for path in paths:   # what is of older worlds says so at its head
        head = ''.join(read_json(path)['cells'][0]['source'])
        assert (farms[name_of(path)] == 'older') == ('**older worlds**' in head), path


def values(text):
    "The numbers in a text."
    return [float(x.replace(',', '')) for x in re.findall(r'\d[\d,]*(?:\.\d+)?', text)]


def texts(path):
    "The texts and tables in a notebook's saved outputs."
    shown = [o for c in read_json(path)['cells'] for o in c.get('outputs', [])]
    found = [o.get('text', '') for o in shown]
    found += [v for o in shown for k, v in o.get('data', {}).items() if k.startswith('text/')]
    return [re.sub('<style.*?</style>', '', ''.join(t), flags=re.S) for t in found]


def saved(path): return {v for text in texts(path) for v in values(text)}


def quoted(text):
    "The decimals and percentages of a text that are not of a paper, nor 95 % intervals or chance."
    parts = re.split(r'\n\n|\n(?=[*-] )', re.sub(r'\$[^$]*\$|`[^`]*`|95 %|50 %', '', text))
    ours = [p for p in parts if not re.search('AlpacaFarm|[Pp]aper|published|et al', p)]
    return re.findall(r'(?<![\w.])(?:\d+\.\d+|[\d.]+(?= %))', '\n'.join(ours))


def missing(numbers, known):
    "Those of some numbers that are none of the known ones, rounded."
    def close(x, v): return abs(v - float(x)) <= .5001*10**-len(x.partition('.')[2])
    return [x for x in numbers if not any(close(x, v) or close(x, 100*v) for v in known)]


RESULTS = [p for p in notebook_paths() if shows_runs(p)]


def linked(text, folder):
    "The numbers in the saved outputs of the notebooks that a text links."
    links = re.findall(r'\(([\w./]+\.ipynb)\)', text)
    return set().union(*(saved(folder/link) for link in links))


@pytest.mark.parametrize('path', RESULTS, ids=lambda p: p.stem)
def test_numbers_below_runs_are_in_saved_outputs(path):
    "Those in the prose after the first run: of this notebook, or one linked."
    cells = read_json(path)['cells']
    first = next(i for i, c in enumerate(cells) if is_slow(c) and 'in_short' not in str(c))
    said = [''.join(c['source']) for c in cells[first:] if c['cell_type'] == 'markdown']
    text = '\n\n'.join(said).partition('## Try it')[0]
    assert missing(quoted(text), saved(path) | linked(text, path.parent)) == []


def test_numbers_of_the_readme_are_in_the_notebooks_linked_beside_them():
    "Those of a paragraph; a table's stand in what the paragraph above it links."
    known = set()
    text = (tiny.ROOT/'README.md').read_text()
    names = (r'[Pp]ython [\d.]+ to [\d.]+|Apache-[\d.]+|\[[^]]*, \d{4}\]\([^)]*\)|'
             r'\]\(http[^)]*\)|\| paper')
    text = re.sub(names, '', text)
    for paragraph in text.split('\n\n'):
        if paragraph.startswith('|'):   # its first numbers are minutes
            known = known | {v/60 for v in known}
        else:
            known = linked(paragraph, tiny.ROOT) or known
        assert missing(quoted(paragraph), known) == []


TRY_IT = tiny.ROOT/'nbs'/'studies'/'try_it.ipynb'
TRIED = [p for p in notebook_paths()
         if '"## Try it' in p.read_text() and p.parent.name != 'studies']


@pytest.mark.parametrize('path', TRIED, ids=lambda p: p.stem)
def test_numbers_under_try_it_are_those_of_its_runs(path):
    "Each is in a row of the study that makes the commands below it, of a default, or linked."
    shown = {}
    for row in re.findall('<tr>.*?</tr>', ''.join(texts(TRY_IT)), re.S):
        cells = re.findall('<td[^>]*>(.*?)</td>', row, re.S)
        if cells:
            shown.setdefault(cells[1], set()).update(values(' '.join(cells[2:])))
    cells = [''.join(c['source']) for c in read_json(path)['cells']]
    text = next(t for t in cells if t.startswith('## Try it'))
    rated = re.search(r'nbs/eval.ipynb .*outputs: \[(.*?)\]', text)   # the command that shows them
    if rated:
        assert {*re.findall(r'-p out (runs/\w+)', text)} <= {*rated[1].split(', ')}
    else:
        assert len(quoted(text)) > 2 or path.stem == 'reward_model'   # which has no answers
    for row in re.findall(r'^\|.*`\w+` \|.*', text, re.M):   # of a table, with the run's name
        known = set().union(*(shown[run] for run in re.findall(r'`(\w+)` \|', row)))
        assert quoted(row)
        assert missing(quoted(row), known) == []
    parts = re.split(r'((?:^ *papermill (?:.*\\\n)*.*\n?)+)', text, flags=re.M)
    for said, commands in zip(parts[::2], parts[1::2], strict=False):
        runs = {path.stem, *re.findall(r'(?:nbs|-p out runs)/(\w+)', commands)}
        known = set().union(*(shown.get(run, set()) for run in runs))
        assert missing(quoted(said), known | linked(said, path.parent)) == []


@pytest.fixture
def project(tmp_path, monkeypatch):
    "Two small notebooks: one with a slow cell, settings and their outputs, one that fails."
    shutil.copy(tiny.ROOT/'settings.ini', tmp_path)
    def cell(text, out='', *tags):
        outputs = [dict(output_type='stream', name='stdout', text=[out])] if out else []
        return dict(cell_type='code', execution_count=None, id=f'c{len(text)}', outputs=outputs,
                    metadata=dict(tags=list(tags)), source=text.splitlines(True))
    shown = 'class C: collect = dict\ncfg = C.collect(globals())\nprint("defaults")'
    one = [cell('x = 2', '', 'parameters'), cell('#| slow\nprint("run")', 'kept\n'),
           cell('print(x + 1)'), cell(shown, 'kept\n')]
    kernel = dict(display_name='python3', language='python', name='python3')
    for name, cells in dict(one=one, two=[cell('1/0')]).items():
        nb = dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)
        write_json(tmp_path/'nbs'/f'{name}.ipynb', nb)
    write_json(tmp_path/'runs'/'farm'/'config.json', dict(notebook='farm', fingerprint='abc'))
    monkeypatch.setattr(outputs, 'root', lambda: tmp_path)
    monkeypatch.setattr(outputs, 'at_root', lambda path: tmp_path/path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(path):
    return [''.join(o['text']) for c in read_json(path)['cells'] for o in c.get('outputs', [])]


@pytest.mark.slow
def test_outputs_of_runs_and_their_settings_are_kept_or_made_anew(project):
    "A notebook shows the run that the farm has made, with its settings; its source stays."
    path = project/'nbs'/'one.ipynb'
    record = project/'nbs'/'outputs.json'
    save_outputs(OutputsConfig(notebooks=['one'], slow=False))
    assert shown(path) == ['kept\n', '3\n', 'kept\n']
    assert read_json(record)['one'] == dict(farm='', code=code_mark(path))
    made = dict(notebook='one', fingerprint='', given=dict(x=7))
    write_json(project/'runs'/'one'/'config.json', made)
    save_outputs(OutputsConfig(notebooks=['one']))
    assert shown(path) == ['run\n', '8\n', 'defaults\n']
    assert read_json(record)['one']['farm'] == 'abc'
    for name, mark in {'one.ipynb': 'abc', 'studies/one.ipynb': 'own'}.items():
        assert farm_mark(project/'nbs'/name, project/'runs'/'farm') == mark
    assert ''.join(read_json(path)['cells'][0]['source']) == 'x = 2'


@pytest.mark.slow
def test_a_notebook_that_fails_is_named_and_left_as_it_was(project):
    before = (project/'nbs'/'two.ipynb').read_text()
    with pytest.raises(RuntimeError, match='two: ZeroDivisionError'):
        save_outputs(OutputsConfig())
    assert (project/'nbs'/'two.ipynb').read_text() == before
    assert set(read_json(project/'nbs'/'outputs.json')) == {'one'}


def test_saving_in_jupyterlab_changes_the_sources_of_a_notebook_only(monkeypatch, tmp_path):
    "Neither metadata nor outputs, which are saved in runs/ by `make lab` once cells were executed."
    shutil.copytree(tiny.ROOT/'.jupyter', tmp_path/'.jupyter')
    for name in ('outputs.json', 'sft.ipynb', 'start.ipynb', 'recipes/method.ipynb'):
        (tmp_path/'nbs'/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tiny.ROOT/'nbs'/name, tmp_path/'nbs'/name)
    shutil.copy(tiny.ROOT/'settings.ini', tmp_path)
    (tmp_path/'runs').mkdir()
    monkeypatch.chdir(tmp_path)
    c = Config()
    exec(open('.jupyter/jupyter_lab_config.py').read(), dict(get_config=lambda: c))

    def saved(path, edit=lambda cells: None):
        nb = read_json(path)
        nb['metadata']['language_info'] = dict(name='python')
        nb['metadata']['kernelspec']['display_name'] = 'Python 3 (ipykernel)'
        edit(nb['cells'])
        model = dict(type='notebook', content=nb)
        c.ContentsManager.pre_save_hook(model=model, path=path, contents_manager=None)
        return nb

    def run(cells):
        for cell in cells:
            if cell['cell_type'] == 'code':
                output = dict(output_type='stream', name='stdout', text='now\n')
                cell |= dict(outputs=[output], execution_count=7)
        cells[0]['source'] = ['# Another title']
        cells.append(dict(cells[-1], id='new', cell_type='markdown', source=['More.']))

    tour = 'nbs/start.ipynb'
    other = 'nbs/own.ipynb'
    for path in ('nbs/sft.ipynb', tour):
        assert saved(path) == read_json(path)
    assert not list(Path('runs').iterdir())
    first, *cells, last = saved(tour, run)['cells']
    assert first['source'] == ['# Another title']
    assert last['source'] == ['More.']
    assert cells == read_json(tour)['cells'][1:]
    assert {*shown('runs/start.ipynb')} == {'now\n'}
    shutil.copy(tour, other)   # a notebook of one's own keeps what it shows
    assert saved(other, run)['cells'][1]['outputs'][0]['text'] == 'now\n'
    template = 'nbs/recipes/method.ipynb'
    assert saved(template, run)['cells'][1:-1] == read_json(template)['cells'][1:]
