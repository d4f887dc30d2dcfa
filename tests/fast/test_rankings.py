"Bradley-Terry against a general optimiser."
import numpy as np
import pytest

from alpaca_farm.boards import rankings as rk


@pytest.mark.parametrize('tie', [0, .1, 3])
def test_strengths_are_the_optimum(tie):
    "scipy on the likelihood as it is written."
    from scipy.optimize import minimize
    w = np.random.default_rng(0).uniform(.5, 20, (6, 6))*(1 - np.eye(6))
    w[0, 3:] = w[3:, 0] = 0   # not all have met
    met = (w + w.T > 0)*tie/2
    def loss(s):
        return -sum((w + met)[a, b]*-np.log1p(np.exp(s[b] - s[a])) for a in range(6)
                    for b in range(6)) + s.sum()**2
    want = minimize(loss, np.zeros(6), tol=1e-10).x
    assert rk.bradley_terry(w, tie) == pytest.approx(want, abs=1e-4)
