"""Which farm the saved outputs of each notebook are from."""
import json
import shutil

import pytest

import tiny
from alpaca_farm.core.run import outputs
from alpaca_farm.core.run.files import read_json, write_json
from alpaca_farm.core.run.outputs import (
    _code_mark, _execute, _is_slow, _notebook_paths, OutputsConfig, save_outputs)

RECORD = tiny.ROOT/'nbs'/'outputs.json'


def name_of(path): return path.with_suffix('').as_posix().rpartition('/nbs/')[2]


def shows_runs(path):
    return any(_is_slow(c) and c['outputs'] for c in read_json(path)['cells'] if c['cell_type'] == 'code')


def test_every_notebook_is_recorded():
    assert set(read_json(RECORD)) == {name_of(p) for p in _notebook_paths()}


def test_saved_outputs_are_from_one_farm():
    farms = {name_of(p): read_json(RECORD)[name_of(p)]['farm'] for p in _notebook_paths() if shows_runs(p)}
    unknown = sorted(name for name, farm in farms.items() if not farm)
    if unknown: pytest.skip(f'saved before farms were recorded (make outputs records them): {", ".join(unknown)}')
    assert len(set(farms.values())) == 1, json.dumps(farms, indent=1)


@pytest.fixture
def project(tmp_path, monkeypatch):
    "A project with two small notebooks, one of which has a slow cell with an output and a cell that fails on demand."
    (tmp_path/'nbs').mkdir()
    shutil.copy(tiny.ROOT/'settings.ini', tmp_path)
    cell = lambda text, out='': dict(cell_type='code', execution_count=None, id=str(abs(hash(text)))[:8], metadata={}, source=text.splitlines(True),
                                     outputs=[dict(output_type='stream', name='stdout', text=[out])] if out else [])
    for name, texts in dict(one=[('x = 2', ''), ('#| slow\nprint("run")', 'kept\n'), ('print(x + 1)', '')], two=[('1/0', '')]).items():
        nb = dict(cells=[cell(*t) for t in texts], metadata=dict(kernelspec=dict(display_name='python3', language='python', name='python3')), nbformat=4, nbformat_minor=5)
        write_json(tmp_path/'nbs'/f'{name}.ipynb', nb)
    write_json(tmp_path/'runs'/'farm'/'config.json', dict(fingerprint='abc'))
    monkeypatch.setattr(outputs, 'root', lambda: tmp_path)
    monkeypatch.setattr(outputs, 'at_root', lambda path: tmp_path/path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(path):
    return [''.join(o['text']) for c in read_json(path)['cells'] for o in c['outputs']]


def test_demonstrations_alone_keep_the_outputs_of_runs(project):
    path = project/'nbs'/'one.ipynb'
    save_outputs(OutputsConfig(notebooks=['one'], slow=False))
    assert texts(path) == ['kept\n', '3\n'] and read_json(project/'nbs'/'outputs.json')['one'] == dict(farm='', code=_code_mark(path))
    save_outputs(OutputsConfig(notebooks=['one']))
    assert texts(path) == ['run\n', '3\n'] and read_json(project/'nbs'/'outputs.json')['one']['farm'] == 'abc'


def test_the_settings_of_kept_results_are_kept(project):
    "Beside the figures of a run with other settings, the defaults would be wrong."
    path = project/'nbs'/'one.ipynb'
    nb = read_json(path)
    nb['cells'].append(dict(nb['cells'][1], id='settings', source=['class C: collect = dict\n', 'cfg = C.collect(globals())\n', 'print("defaults")']))
    write_json(path, nb)
    save_outputs(OutputsConfig(notebooks=['one'], slow=False))
    assert texts(path) == ['kept\n', '3\n', 'kept\n']
    save_outputs(OutputsConfig(notebooks=['one']))
    assert texts(path) == ['run\n', '3\n', 'defaults\n']


def test_a_notebook_shows_the_run_that_the_farm_has_made(project):
    "With the settings that the run was given; the source stays as it is."
    path = project/'nbs'/'one.ipynb'
    nb = read_json(path)
    nb['cells'][0]['metadata'] = dict(tags=['parameters'])
    write_json(path, nb)
    write_json(project/'runs'/'one'/'config.json', dict(notebook='one', fingerprint='', given=dict(x=7)))
    save_outputs(OutputsConfig(notebooks=['one']))
    assert texts(path) == ['run\n', '8\n'] and ''.join(read_json(path)['cells'][0]['source']) == 'x = 2'


def test_one_that_takes_too_long_does_not_end_the_others(project, monkeypatch):
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    seen = []
    def execute(path, *_):
        seen.append(path.stem)
        raise (CellTimeoutError if len(seen) == 1 else DeadKernelError)('gone')
    monkeypatch.setattr(outputs, '_execute', execute)
    with pytest.raises(RuntimeError, match='one: CellTimeoutError\ntwo: DeadKernelError'): save_outputs(OutputsConfig())


def test_a_notebook_that_fails_is_named_and_left_as_it_was(project):
    before = (project/'nbs'/'two.ipynb').read_text()
    with pytest.raises(RuntimeError, match='two: ZeroDivisionError'): save_outputs(OutputsConfig())
    assert (project/'nbs'/'two.ipynb').read_text() == before and set(read_json(project/'nbs'/'outputs.json')) == {'one'}
    with pytest.raises(Exception, match='ZeroDivisionError'): _execute(project/'nbs'/'two.ipynb', True, 60)
