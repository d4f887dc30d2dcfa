"Statistics and votes: beside alpaca-eval and by hand."
import subprocess
import sys

import numpy as np
import pytest

from alpaca_farm.boards import simulation
from alpaca_farm.data.pairs import hash_uniform
from alpaca_farm.judging import stats


@pytest.fixture
def rng(): return np.random.default_rng(0)


@pytest.mark.parametrize('n', [2, 7, 805])
@pytest.mark.parametrize('kind', ['hard', 'ties', 'soft'])
def test_win_rate_is_alpaca_evals(kind, n, rng):
    metrics = pytest.importorskip('alpaca_eval.metrics')
    drawn = dict(hard=rng.choice([1., 2.], n), ties=rng.choice([1., 1.5, 2.], n),
                 soft=rng.uniform(1, 2, n))[kind]
    theirs = metrics.pairwise_to_winrate(preferences=drawn.tolist())
    for name, value in stats.win_rate(drawn).items():
        assert theirs[name] == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize('wrong', [0, np.nan])
def test_an_interval_of_what_is_no_preference_is_refused(wrong):
    "AlpacaEval's code for a tie, or no label."
    with pytest.raises(ValueError, match='row 60 .* must be from 1 to 2'):
        stats.win_rate_interval([1, 2]*30 + [wrong])


def test_a_coin_is_the_same_in_every_process():
    "No salted hash is involved."
    code = ('from alpaca_farm.data.pairs import hash_uniform\n'
            'print(repr(hash_uniform(3, "flip", "é", 1.5)))')
    said = [subprocess.check_output([sys.executable, '-c', code], text=True) for _ in range(2)]
    assert set(said) == {f"{hash_uniform(3, 'flip', 'é', 1.5)!r}\n"}


@pytest.mark.parametrize('replicates', [1, 3])
def test_a_resample_without_an_order_leaves_a_correlation_its_interval(replicates, rng):
    "Of two methods, which a judge of hard votes may make equal."
    first, second = (rng.random((2, replicates, 40, 2)) < [.5, .6]).astype(float)
    first[:, 0] = [0, 1]
    first[:, 1:, 1] = first[:, 1:, 0]
    second[:, :, 1] = np.maximum(second[:, :, 1], second[:, :, 0])
    found = stats.spearman_interval(first, second)
    assert -1 <= found.low < found.value == 1 == found.high or replicates > 1
    assert not np.isnan(found).any()
    equal = np.ones_like(first)
    assert np.isnan(stats.spearman_interval(equal, second)).all()


@pytest.mark.parametrize('replicates', [1, 3])
def test_a_missing_verdict_leaves_a_method_in_the_simulation(replicates, rng):
    "Its rates are of the verdicts that there are, and its differences of the requests of both."
    lead = dict(sft=1.5, a=1.6, b=1.7, c=1.8)
    judged = []
    for _ in range(replicates):
        own = {row: level + .1*rng.normal(size=80) for row, level in lead.items()}
        own |= {f'{row}_crowd': own[row] for row in 'abc'}
        own['a'][3] = np.nan   # also of a_crowd
        judged.append(dict(crowd=own, pool=own))
    tables = simulation.paired_tables(judged, {row: f'{row}_crowd' for row in 'abc'})
    table = simulation._simulation_table(tables, 0).set_index('method')
    assert not table.isna().any(axis=None)
    values = [np.nanmean(by['crowd']['a']) for by in judged]
    assert table.crowd['a'] == pytest.approx(100*np.mean(values) - 100)
    figures = simulation._correlations(tables, 0)
    assert figures['spearman_simulated_crowd'] == pytest.approx(1)
    found = simulation._method_differences(tables['crowd'], tables['names'])
    gaps = [np.nanmean(by['crowd']['b'] - by['crowd']['a']) for by in judged]
    row = found[(found.better == 'b') & (found.worse == 'a')].iloc[0]
    assert row.difference == pytest.approx(100*np.mean(gaps))
    assert row.low < row.difference < row.high


@pytest.mark.parametrize('values', [[.5, .5], [.1]*3, [[1., 1., 1.]]])
def test_differences_that_do_not_vary_are_not_clear(values):
    "Neither of two or three worlds nor of three requests: they say nothing of others."
    assert stats.compare_all(dict(lead=values))['lead'].holm == 1


def test_worlds_without_a_spread_of_differences_end_in_no_error():
    "As where a judge finds all answers equal."
    found = simulation._method_differences(np.full((2, 9, 2), 1.5), ['sft', 'a'])
    assert simulation._separation(found)['replicates_for_2_points'] == 2


def test_replicates_may_have_different_numbers_of_requests(rng):
    "As where prompts are left out that are too long: each counts the requests that it has."
    judged = []
    for requests in (50, 47):
        own = dict(sft=np.full(requests, 1.5), a=1.6 + .1*rng.normal(size=requests))
        own |= dict(a_crowd=own['a'])
        judged.append(dict(crowd=own, pool=own))
    tables = simulation.paired_tables(judged, dict(a='a_crowd'))
    gap = 100*np.mean([by['crowd']['a'].mean() for by in judged]) - 150
    found = simulation._method_differences(tables['crowd'], tables['names']).iloc[0]
    assert found.difference == pytest.approx(gap)
    table = simulation._simulation_table(tables, 0).set_index('method')
    assert table.crowd['a'] == pytest.approx(50 + gap)
    assert not table.isna().any(axis=None)
