"Bradley-Terry and head to head against brute force."
from itertools import combinations

import numpy as np
import pytest

from alpaca_farm.boards import rankings as rk

def played(strengths, n, seed=0, missing=0.):
    "Records of soft preferences on every pair of models, some without a verdict."
    rng, out = np.random.default_rng(seed), []
    for i in range(n):
        for a, b in combinations(range(len(strengths)), 2):
            p = 1/(1 + np.exp(strengths[a] - strengths[b] + rng.normal()))
            preference = None
            if rng.uniform() >= missing: preference = float(rng.choice([1 + p, 1., 2., 1.5]))
            out.append(dict(instruction=f'Say {i}.', generator_1=f'm{a}', generator_2=f'm{b}',
                            preference=preference))
    return out


def test_games_are_the_loop():
    records = played([0, 1, -1], 20, missing=.2)
    of = rk.games(records)
    want = np.zeros((20, 3, 3))
    for r in records:
        i, a, b = int(r['instruction'][4:-1]), int(r['generator_1'][1]), int(r['generator_2'][1])
        if r['preference'] is not None:
            want[i, a, b] += 2 - r['preference']
            want[i, b, a] += r['preference'] - 1
    assert of.names == ['m0', 'm1', 'm2'] and of.points == pytest.approx(want)
    turned = [dict(r, generator_1=r['generator_2'], generator_2=r['generator_1'],
                   preference=r['preference'] and 3 - r['preference']) for r in records]
    again = rk.games(turned)
    at = [again.names.index(m) for m in of.names]
    assert again.points[:, at][:, :, at] == pytest.approx(of.points)


@pytest.mark.parametrize('tie', [0, .1, 3])
def test_strengths_are_the_optimum(tie):
    "scipy on the likelihood as it is written."
    from scipy.optimize import minimize
    w = np.random.default_rng(0).uniform(.5, 20, (6, 6))*(1 - np.eye(6))
    w[0, 3:] = w[3:, 0] = 0                                                      # not all have met
    met = (w + w.T > 0)*tie/2
    def loss(s):
        return -sum((w + met)[a, b]*-np.log1p(np.exp(s[b] - s[a])) for a in range(6)
                    for b in range(6)) + s.sum()**2
    want = minimize(loss, np.zeros(6), tol=1e-10).x
    assert rk.bradley_terry(w, tie) == pytest.approx(want, abs=1e-4)


def test_head_to_head_is_the_loop():
    records = played([0, 1, -1], 30, missing=.3)
    tables = rk.head_to_head(rk.games(records))
    for a, b in combinations(('m0', 'm1', 'm2'), 2):
        p = [r['preference'] for r in records if (r['generator_1'], r['generator_2']) == (a, b)
             and r['preference'] is not None]
        assert tables['n'].loc[a, b] == len(p)
        assert tables['win_rate'].loc[b, a] == pytest.approx(100*np.mean(np.array(p) - 1))
        assert tables['win_rate'].loc[a, b] + tables['win_rate'].loc[b, a] == pytest.approx(100)
        assert tables['low'].loc[a, b] < tables['win_rate'].loc[a, b] < tables['high'].loc[a, b]
    assert len(rk.matrix_figure(tables['win_rate'], ['m1', 'm0', 'm2']).axes) == 2
