"The bench of methods: what is refused before any world is made, and what a comparison finds."
import re

import numpy as np
import pandas as pd
import pytest
import torch

from alpaca_farm import bench
from alpaca_farm.bench import BenchConfig, compare_methods, detectable, differences, plan
from alpaca_farm.dpo import Loss
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.run.settings import from_args


def squared_hinge(h, beta): return torch.relu(1 - beta*h)**2


def linear(h, beta=.1): return -beta*h


def above_median(group): return group - group.median(1, keepdim=True).values


OWN = Loss('of mean log-probs', squared_hinge, mean=True)


@pytest.mark.parametrize('name, kind, run', [
    ('squared_hinge', 'loss', 'dpo'), ('linear', 'loss', 'dpo'), ('OWN', 'loss', 'dpo'),
    ('above_median', 'advantage', 'rloo')])
def test_a_function_is_told_apart_by_what_it_takes(name, kind, run):
    planned = plan(f'{__name__}:{name}', {})
    assert (planned.kind, planned.run) == (kind, run)
    assert [*planned.settings.values()] == [f'{__name__}:{name}']


def test_an_advantage_of_one_s_own_takes_the_place_of_rloo_s(tmp_path):
    "PPO refuses the two beside each other."
    own = dict(advantage_function=f'{__name__}:above_median')
    cfg = BenchConfig(method=own['advantage_function'], worlds=2, runs=str(tmp_path))
    for job in bench.method_jobs(cfg):
        named = {k: v for k, v in job.settings.items() if k.startswith('advantage')}
        assert named == own


def test_hidden_worlds_have_the_seed_of_the_environment(monkeypatch):
    monkeypatch.delenv('ALPACA_FARM_BENCH_SEED', raising=False)
    with pytest.raises(ValueError, match='ALPACA_FARM_BENCH_SEED'):
        BenchConfig(hidden=True)
    monkeypatch.setenv('ALPACA_FARM_BENCH_SEED', '77')
    cfg = BenchConfig(hidden=True)
    farm = bench.worlds_farm(cfg)
    assert (farm.seed, farm.seeds, farm.runs) == (77, 6, 'runs/bench_hidden')
    assert '77' not in str(vars(cfg))


def test_runs_have_the_dtype_that_is_asked_for_and_policies_any_folder(tmp_path):
    for k in range(2):
        (tmp_path/'a{b}'/str(k)).mkdir(parents=True)
    method = str(tmp_path/'a{b}'/'{world}')
    jobs = bench.method_jobs(bench.BenchConfig(method=method, worlds=2, dtype='bfloat16'))
    assert [job.settings['policy'] for job in jobs] == [method.replace('{world}', k) for k in '01']
    assert {job.settings['dtype'] for job in jobs} == {'bfloat16'}


def test_the_first_word_of_the_command_is_the_method():
    cfg = from_args(BenchConfig, ['ipo', '--worlds', '4', '--settings', '{"beta": 0.1}'])
    assert (cfg.method, cfg.worlds, cfg.settings) == ('ipo', 4, dict(beta=.1))
    assert from_args(BenchConfig, ['--worlds', '4']).method == ''


def test_a_difference_over_worlds_has_the_interval_of_t():
    lead = np.random.default_rng(0).normal(2, 1.5, 12)
    table = pd.DataFrame(dict(world=range(12), dpo=50., new=50 + lead))
    rates = table.melt('world', var_name='method', value_name='crowd')
    found = differences(rates, 'new').set_index('row').loc['dpo']
    half = 2.201*lead.std(ddof=1)/12**.5   # t of 11 degrees of freedom
    mean = lead.mean()
    wanted = [mean - half, mean, mean + half]
    assert [found.low, found.difference, found.high] == pytest.approx(wanted, abs=1e-3)
    assert found.detectable == pytest.approx(detectable(lead.std(ddof=1), 12))


@pytest.fixture
def compared(tmp_path):
    """A function that writes comparisons in twelve worlds, by method: points that it is above DPO,
    on average and by world. PPO is 5 points above DPO, and no label at all 6 below."""
    levels = np.random.default_rng(0).normal(57, 4, 12)
    luck = np.random.default_rng(1).normal(size=12)
    luck = 1.5*(luck - luck.mean())/luck.std(ddof=1)

    def write(shift=0, **leads):
        for method, lead in leads.items():
            above = {'dpo': 0, 'ppo': 5, 'shuffled labels': luck - 6, f'*{method}': lead + luck}
            table = pd.DataFrame({row: levels + shift + more for row, more in above.items()})
            table = table.rename_axis('world').reset_index()
            settings = dict(notebook='bench', fingerprint='', settings=dict(method=method))
            write_json(tmp_path/method/'config.json', settings)
            rates = table.melt('world', var_name='method', value_name='crowd')
            rates.to_csv(tmp_path/method/'win_rates.csv', index=False)
        return {method: str(tmp_path/method) for method in leads}
    return write


def test_losses_are_compared_with_dpo_and_advantages_with_ppo_each_among_all(compared):
    "A loss 1.1 points above DPO is clear alone, and not among six; 4 points are."
    losses = compared(hinge=0, robust=.1, ipo=.2, kto=.3, sigmoid=1.1, simpo=-4)
    advantages = compared(rloo=1, grpo=5)
    table = compare_methods(losses | advantages).set_index(['minus', 'row'])
    loss = table.loc['dpo', 'sigmoid']
    assert loss.low > 0 and not loss.clear
    assert loss.difference == pytest.approx(1.1)
    assert loss.detectable == pytest.approx(1.3, abs=.4)
    assert table.clear['dpo', 'simpo']
    assert table.difference['ppo', 'rloo'] == pytest.approx(-4)
    assert table.clear['ppo', 'rloo'] and not table.clear['ppo', 'grpo']
    assert table.difference['dpo', 'shuffled labels'] == pytest.approx(-6)
    assert table.difference['dpo', 'ppo'] == -table.difference['ppo', 'dpo'] == pytest.approx(5)
    assert table.kind.value_counts().to_dict() == dict(loss=6, advantage=2, null=2, method=2)
    alone = compare_methods(dict(alone=losses['sigmoid'])).set_index('row')
    assert alone.clear['alone']


def test_comparisons_in_other_worlds_are_refused(compared):
    folders = compared(hinge=0) | compared(ipo=0, shift=1)
    with pytest.raises(ValueError, match='ipo.*same worlds'):
        compare_methods(folders)


def test_shuffled_labels_are_the_same_labels_on_other_pairs(tmp_path):
    pairs = [dict(instruction=str(k), output_1='a', output_2='b', preference=1 + k % 2)
             for k in range(200)]
    (tmp_path/'annotators').mkdir()
    write_json(tmp_path/'annotators'/'preferences.json', pairs)
    target = tmp_path/'shuffled'/'preferences.json'
    target.parent.mkdir()
    bench._shuffle_labels(str(tmp_path/'annotators'), str(target), 3)
    found = read_json(target)
    same = np.mean([a['preference'] == b['preference'] for a, b in zip(pairs, found)])
    assert .35 < same < .65
    assert [dict(p, preference=0) for p in found] == [dict(p, preference=0) for p in pairs]
    assert sorted(p['preference'] for p in found) == sorted(p['preference'] for p in pairs)


@pytest.mark.parametrize('method, settings, name', [
    ('dpo', dict(bta=1), 'bta'), ('sigmoid', dict(bta=1), 'bta'), ('dpo', dict(seed=3), 'seed'),
    ('x/{run}/{world}', {}, 'x/{run}/0')])
def test_what_cannot_be_compared_is_refused_before_any_world_is_made(method, settings, name):
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=re.escape(name)):
        plan(method, settings)
