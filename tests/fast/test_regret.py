"What decide spends labels by: beside draws from the prior, and within the budget."
import numpy as np
import pytest

from alpaca_farm.boards.regret import halving_plan, weigh_votes


def test_judge_and_votes_beside_draws_from_the_prior():
    "The mean and covariance are those of prior draws, weighted by how likely the votes are."
    rng = np.random.default_rng(0)
    judge, rates, counts = np.array([.7, .6, .55]), np.array([.5, .62, .6]), np.array([8, 30, 0])
    spreads = np.linspace(.005, .15, 16)
    prior = np.exp(-(spreads/.05)**2/2)
    s = rng.choice(spreads, (400_000, 1), p=prior/prior.sum())
    truth = judge + .1*rng.normal(size=s.shape) + s*rng.normal(size=(len(s), 3))
    weights = np.exp(-2*(counts*(rates - truth)**2).sum(1))
    mean = weights @ truth/weights.sum()
    off = truth - mean
    found, covariance = weigh_votes(rates, counts, judge)
    assert found == pytest.approx(mean, abs=.002)
    assert covariance == pytest.approx((weights[:, None]*off).T @ off/weights.sum(), abs=3e-4)
    several = weigh_votes(np.tile(rates, (2, 1)), np.tile(counts, (2, 1)), judge)
    assert several[0][1] == pytest.approx(found) and several[1].shape == (2, 3, 3)


@pytest.mark.parametrize('methods', [1, 2, 5, 9])
def test_halving_asks_for_no_more_than_there_is(methods):
    spent = before = 0
    for left, n in halving_plan(methods, 300, 10**6):
        spent += left*(n - before)
        before = n
    assert spent <= 300
