"The world of `contributing.md` on which the tiny farm runs whole; worlds that lack something."
import importlib
import json
import re
import sys

import pandas as pd
import pytest

import tiny
from alpaca_farm import farm
from alpaca_farm.farm import farm_jobs, FarmConfig
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.run.runs import methods, read_summary

SIZES = dict(sft=800, preference=60, unlabeled=40, val=10, eval=20)


@pytest.fixture(scope='module')
def sums(no_runs, tmp_path_factory):
    "The folder of the page's world."
    page = (tiny.ROOT/'nbs'/'contributing.md').read_text()
    code = re.search(r'## A world\n.*?```python\n(.*?)```', page, re.S)[1]
    assert len(code.splitlines()) < 120
    folder = tmp_path_factory.mktemp('sums')
    (folder/'sums_world.py').write_text(code)
    sys.path.insert(0, str(folder))
    importlib.import_module('sums_world').make(str(folder/'world'), SIZES)
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop('sums_world')


def test_a_world_of_one_file_runs_on_the_whole_farm(sums, monkeypatch, capsys):
    monkeypatch.setattr(farm, 'run_jobs', lambda jobs, **_: tiny.run_here(jobs))
    monkeypatch.setattr('alpaca_farm.run.jobs.run_jobs', tiny.run_here)
    (sums/'tiny.json').write_text(json.dumps(tiny.FARM))
    cfg = FarmConfig(world=str(sums/'world'), size=str(sums/'tiny.json'), device='cpu')
    run = farm.run(cfg)
    assert cfg.runs == f'{cfg.world}_runs'
    assert str(run.folder) == f'{cfg.runs}/farm'
    board = pd.read_csv(run.folder/'leaderboard.csv', index_col='method')
    trained = {f'{m}{end}' for m in methods() for end in ('', '_crowd')}
    ways = {'likeliest of 4', 'longest of 4', 'best of 4 by the utility', 'bag of words',
            'bag of words_crowd', 'words x asker', 'words x asker_crowd'}
    rows = trained | ways | {'sft', 'base model', 'greedy SFT', 'an expert'}
    assert rows <= {*board.index} <= rows | {'one suffix for all'}
    assert {'crowd', 'pool', 'utility'} < {*board}
    assert (board.loc[[*trained], 'labels'] > 0).all()
    assert board.utility.idxmax() in ('an expert', 'best of 4 by the utility')
    parts = pd.read_csv(run.folder/'parts.csv')
    assert {*parts.part} == {'right', 'digits', 'length', 'utility'}
    compared = {*pd.read_csv(run.folder/'simulation.csv').method} - {'one suffix for all'}
    assert compared == {'base model', 'sft', *methods()}
    assert ' has no ' not in capsys.readouterr().out
    flips = [read_json(f'{cfg.runs}/annotators{end}/config.json')['settings']['label_flip']
             for end in ('', '_crowd')]
    assert flips == [.1, 0]
    assert 'crowd_groups' in read_summary(run.folder)


def test_a_world_without_a_crowd_has_no_runs_on_its_labels(sums, tmp_path):
    "Nor SFT where its policy is given, nor what reads a run that is left out."
    for file in (sums/'world').glob('*.json'):
        (tmp_path/file.name).write_bytes(file.read_bytes())
    content = dict(base='', policy=str(sums/'world'/'model'), crowd='', sizes=dict(candidates=None))
    write_json(tmp_path/'world.json', read_json(tmp_path/'world.json') | content)
    jobs = {j.out.rpartition('/')[2]: j for j in farm_jobs(FarmConfig(world=str(tmp_path)))}
    assert not {'world', 'sft', 'base', 'rrhf', 'dpo_crowd', 'annotators_crowd'} & {*jobs}
    assert jobs['dpo'].settings['policy'] == content['policy']
    assert jobs['dpo'].settings['data'] == str(tmp_path)
    assert {need for j in jobs.values() for need in j.needs} <= {j.out for j in jobs.values()}
