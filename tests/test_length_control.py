"Length-controlled win rates: planted effects, the published values, what is left out."
import json
from pathlib import Path

import numpy as np
import pytest

from alpaca_farm import length_control as lc

DATA = Path(__file__).parents[2]/'shared'/'data'/'alpaca_eval'
N = 805


def planted(levels, effect, shift, hard, seed=0):
    "Votes of a judge with a known length effect: preferences, lengths, baseline."
    rng = np.random.default_rng(seed)
    base = rng.integers(200, 1200, N)
    length = np.maximum(base + np.reshape(shift, (-1, 1)) + rng.normal(0, 300, (len(levels), N)), 1)
    z = np.reshape(levels, (-1, 1)) + effect*lc.tilt(base, length) - hard
    return 1. + (rng.uniform(size=z.shape) < lc.sigmoid(z)), length, base


def test_regression_is_sklearns():
    linear = pytest.importorskip('sklearn.linear_model')
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 3)), rng.uniform(size=200)
    theirs = linear.LogisticRegression(C=.25, fit_intercept=False, tol=1e-9).fit(
        np.vstack([x, x]), np.repeat([1, 0], 200), sample_weight=np.r_[y, 1 - y]).coef_[0]
    assert lc.logistic(x, y, [.5]*3) == pytest.approx(theirs, abs=1e-5)


def test_planted_length_effect_is_taken_out():
    "Ten models on hard and easy instructions, some four times nearer to the truth than the raw rates; intervals that hold."
    levels, shift = np.linspace(-2, 1.5, 10), np.random.default_rng(2).permutation(np.linspace(-400, 400, 10))
    errors, raw, held = [], [], []
    for seed in range(5):
        hard = np.random.default_rng(100 + seed).normal(size=N)
        p, length, base = planted(levels, -1., shift, hard, seed)
        board, truth = lc.length_controlled(p, length, base), 100*lc.sigmoid(levels[:, None] - hard).mean(1)
        errors.append(np.abs(board.length_controlled_winrate - truth)); raw.append(np.abs(100*(p - 1).mean(1) - truth))
        held.append((board.lc_low < truth) & (truth < board.lc_high))
    assert np.mean(errors) < 2.5 < np.mean(raw)/2.5 and np.mean(held) >= .84
    assert (board.terms == 'length, difficulty').all() and (board.lc_standard_error > 0).all()


def test_talking_more_gains_nothing_at_equal_length():
    "The same model, plain and verbose, under a judge that pays for length: far apart raw, together when controlled."
    raw, controlled, held = [], [], []
    for seed in range(10):
        p, length, base = planted([.3, .3], -1., [0, 250], 0., seed)
        board = lc.length_controlled(p, length, base)
        raw.append(np.diff(100*(p - 1).mean(1))), controlled.append(np.diff(board.length_controlled_winrate))
        held.append((board.lc_low < 100*lc.sigmoid(.3)) & (100*lc.sigmoid(.3) < board.lc_high))
    assert np.mean(raw) > 10 and abs(np.mean(controlled)) < 2.5 and np.mean(held) >= .85


def test_interval_covers():
    hits = 0
    for seed in range(60):
        p, length, base = planted([.4], -.8, [150], 0., seed)
        fit = lc.controlled(p[0], lc.tilt(base, length[0]))
        hits += fit['lc_low'] < 100*lc.sigmoid(.4) < fit['lc_high']
    assert 52 <= hits <= 60


def test_identical_models_and_turned_sides():
    p, length, base = planted([.5], -1., [200], 0.)
    t = lc.tilt(base, length[0])
    same = lc.controlled(np.full(N, 1.5), np.zeros(N))
    assert [same[k] for k in ('length_controlled_winrate', 'lc_low', 'lc_high')] == pytest.approx([50]*3)
    one, other = lc.controlled(p[0], t), lc.controlled(3 - p[0], -t)
    assert one['length_controlled_winrate'] == pytest.approx(100 - other['length_controlled_winrate'], abs=1e-3)


def test_a_handful_is_five_models_that_differ():
    hard = np.random.default_rng(1).normal(size=N)
    p, length, base = planted([-.5, 0, .3, .6, 1.], -.5, [0]*5, hard)
    assert (lc.length_controlled(p, length, base).terms == 'length, difficulty').all()
    four = lc.length_controlled(np.vstack([p[:4], np.full(N, 1.5)]), length, base)     # the reference against itself does not count
    assert four.terms.str.contains('no difficulty with fewer than 5').all()
    assert four.lc_standard_error.isna().all() and four.difficulty_effect.isna().all() and (four.lc_low < four.lc_high)[:4].all()


def test_certain_wins_stay_finite():
    length, base = np.full(N, 500) + np.arange(N), np.full(N, 300)
    for always, low, high in ((2., 99, 100), (1., 0, 1)):
        fit = lc.controlled(np.full(N, always), lc.tilt(base, length))
        assert low <= fit['lc_low'] <= fit['length_controlled_winrate'] <= fit['lc_high'] <= high


def test_missing_verdicts_are_left_to_the_others():
    hard = np.random.default_rng(1).normal(size=N)
    p, length, base = planted([-.5, 0, .3, .6, 1.], -.5, [0]*5, hard)
    p[0, ::3] = np.nan
    board = lc.length_controlled(p, length, base, list('abcde'))
    assert np.isfinite(board[['length_controlled_winrate', 'lc_low', 'lc_high']].to_numpy()).all()
    p[0] = np.nan
    with pytest.raises(ValueError, match='a has no verdict'): lc.length_controlled(p, length, base, list('abcde'))
    p[0] = 3.
    with pytest.raises(ValueError, match='row 0 is 3'): lc.length_controlled(p, length, base)
    p[0], length[2, 7] = 1.5, np.nan
    with pytest.raises(ValueError, match='c, instruction 7: there is a verdict but no length'): lc.length_controlled(p, length, base, list('abcde'))


def test_annotations_are_joined_by_instruction():
    rows = [dict(instruction=f'Say {i}.', output_1='x'*10, output_2='y'*(i + 1), preference=1 + i % 2) for i in range(6)]
    tables = lc.from_annotations(dict(a=rows, b=rows[::-1], c=[dict(rows[4], preference=None)]))
    assert (tables['preferences'][0] == tables['preferences'][1]).all() and np.isnan(tables['preferences'][2]).all()
    assert tables['lengths'][2, 4] == 5 and np.isnan(tables['lengths'][2]).sum() == 5
    with pytest.raises(ValueError, match='b: rows 0 and 6 annotate the same'): lc.from_annotations(dict(a=rows, b=rows + rows[:1]))


@pytest.mark.skipif(not DATA.exists(), reason='the recorded verdicts are not here')
@pytest.mark.parametrize('board, tolerance', [('ae2', 2.5), ('ae1', 2.5)])
def test_published_values(board, tolerance):
    "Two models, no difficulty: within 2.5 points of the shipped leaderboard, which lies in our intervals. All 805 rows are kept."
    import pandas as pd
    shipped = pd.read_csv(DATA/f'leaderboard_{board}.csv', index_col=0).length_controlled_winrate
    recorded = {m: json.loads((DATA/m/f'annotations_{board}.json').read_text()) for m in ('alpaca-7b', 'alpaca-farm-ppo-human')}
    tied = {m: [dict(r, preference=r['preference'] or 1.5) for r in rows] for m, rows in recorded.items()}   # 0 was once written for a tie
    tables = lc.from_annotations(tied)
    assert tables['preferences'].shape == (2, 805) and not np.isnan(tables['preferences']).any()
    ours = lc.length_controlled(**tables)
    for m in recorded:
        row = ours.loc[m]
        print(f'{board} {m}: published {shipped[m]:.2f}, ours {row.length_controlled_winrate:.2f} [{row.lc_low:.2f}, {row.lc_high:.2f}]')
        assert abs(row.length_controlled_winrate - shipped[m]) < tolerance and row.lc_low < shipped[m] < row.lc_high
    assert ours.terms.str.contains('no difficulty').all()
