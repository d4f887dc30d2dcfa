"A bench of two tiny worlds: a loss, an outside policy, and the nulls on one board."
import shutil

import pandas as pd
import pytest

import tiny
from alpaca_farm import bench, farm
from alpaca_farm.bench import BenchConfig
from alpaca_farm.run.files import read_json
from alpaca_farm.run.paths import notebook_path
from alpaca_farm.run.runs import read_summary

NULLS = {'sft', 'shuffled labels', 'bag of words', 'words x asker', 'best without labels',
         'greedy SFT'}


@pytest.fixture
def mine(no_runs, tmp_path, monkeypatch):
    "Settings of a bench of two tiny worlds, whose runs are made in this process."
    monkeypatch.setattr(farm, 'run_jobs', lambda jobs, **_: tiny.run_here(jobs))
    monkeypatch.setattr('alpaca_farm.run.jobs.run_jobs', tiny.run_here)
    tiny.write(tmp_path/'tiny.json', dict(tiny.FARM, annotators_crowd=None, base=None))
    return dict(worlds=2, runs=str(tmp_path/'worlds'), size=str(tmp_path/'tiny.json'),
                device='cpu')


def test_methods_stand_beside_dpo_ppo_and_the_nulls(mine, tmp_path, capsys):
    "DPO's own loss, of the same seed, is DPO."
    made = bench.run(BenchConfig(**mine, method='sigmoid', out=str(tmp_path/'same')))
    table = pd.read_csv(made.folder/'differences.csv').set_index('row')
    assert {'dpo', 'ppo', *NULLS} <= {*table.index}
    assert table.loc['dpo', ['difference', 'sd', 'detectable']].abs().max() < .002   # rounding
    line = read_json(made.folder/'row.json')
    assert line in capsys.readouterr().out
    page = (tiny.ROOT/'nbs'/'bench_results.md').read_text()
    head = next(row for row in page.splitlines() if row.startswith('| method'))
    assert line.count('|') == head.count('|')

    world = tmp_path/'worlds'/'world'
    written = (world.stat().st_mtime_ns, *(p.stat().st_mtime_ns for p in world.iterdir()))
    for k, place in enumerate(('', 'seed_1/')):   # DPO's policies, as if from elsewhere
        shutil.copytree(tmp_path/'worlds'/f'{place}dpo'/'model', tmp_path/'mine'/str(k))
    given = dict(mine, method=str(tmp_path/'mine'/'{world}'), out=str(tmp_path/'outside'))
    made = bench.run(BenchConfig(**given))
    table = pd.read_csv(made.folder/'differences.csv').set_index('row')
    assert abs(table.difference['dpo']) < 40
    rates = pd.read_csv(made.folder/'win_rates.csv')
    kl = rates[rates.method == f'*{given["method"]}'].kl
    assert kl.notna().tolist() == [True, True]   # from SFT, as of the methods
    jobs = bench.method_jobs(BenchConfig(**given))
    assert [job.settings['reference'] for job in jobs] == [
        str(tmp_path/'worlds'/place/'sft') for place in ('', 'seed_1')]
    both = bench.compare_methods({name: str(tmp_path/name) for name in ('same', 'outside')})
    kinds = dict(zip(both.row, both.kind, strict=True))
    assert kinds.items() >= dict(same='loss', outside='policy', ppo='method', sft='null').items()
    assert read_summary(made.folder)['worlds'] == 2
    again = (world.stat().st_mtime_ns, *(p.stat().st_mtime_ns for p in world.iterdir()))
    assert again == written   # the worlds are made once
    assert tiny.run_notebook(notebook_path('bench'), tmp_path/'bench.ipynb', given)[0] == 0
    assert rates.groupby('method').size().loc[['dpo', 'shuffled labels']].tolist() == [2, 2]


def test_another_generator_of_worlds_is_another_version(mine, tmp_path, monkeypatch):
    cfg = BenchConfig(**mine)
    folder = tmp_path/'worlds'/'world'
    for place in (folder, tmp_path/'worlds'/'seed_1'/'world'):
        place.mkdir(parents=True)
    for split in ('sft', 'preference', 'unlabeled', 'val', 'eval'):
        tiny.write(folder/f'{split}.json', [dict(instruction='a')])
        tiny.write(tmp_path/'worlds'/'seed_1'/'world'/f'{split}.json', [dict(instruction='b')])
    found = bench.world_checksum(str(folder))
    known = dict(version=3, checksums={1000: found, 1001: 'another'})
    monkeypatch.setattr(bench, '_frozen', lambda: known)
    with pytest.raises(ValueError, match='version 3'):
        bench._check_frozen(bench.worlds_farm(cfg))
    known['checksums'].pop(1001)
    bench._check_frozen(bench.worlds_farm(cfg))
