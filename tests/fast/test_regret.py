"Regret: beside loops over draws, and cases with a known answer."
import math

import numpy as np
import pytest

from alpaca_farm.boards.regret import at_random, BY_LABELS, by_corrected, by_halving, by_votes
from alpaca_farm.boards.regret import draw_labels, halving_plan, regret_table, regrets
from alpaca_farm.boards.regret import weigh_votes

NAMES = ['sft', 'a', 'b', 'c', 'd']


def toy(level, N=120, noise=.1, seed=0):
    "A judge and a crowd, (methods, instructions), of methods at these levels."
    rng = np.random.default_rng(seed)
    crowd = np.clip(np.array(level)[:, None] + noise*rng.normal(size=(len(level), N)), 0, 1)
    return np.clip(crowd + noise*rng.normal(size=crowd.shape), 0, 1), crowd


LEVELS = [.5, .55, .65, .45, .6]
WORLDS = [toy(LEVELS, seed=k) for k in range(3)]


def test_regret_of_a_known_table():
    "What is always kept loses its distance from the best; a random pick the mean of the trained."
    lost = regrets(WORLDS, NAMES, [40], draws=30)
    for k, (_, crowd) in enumerate(WORLDS):
        value = 100*crowd.mean(1)
        for name, v in zip(NAMES[1:], value[1:]):
            assert lost[f'always {name}', 0][k] == pytest.approx(value.max() - v)
        assert lost['at random', 0][k] == pytest.approx(value.max() - value[1:].mean())
        assert lost['never train', 0][k] == pytest.approx(value.max() - value[0])
    assert lost['votes', 40].shape == (3, 30) and all((p >= -1e-9).all() for p in lost.values())


def test_sft_is_kept_where_nothing_beats_it():
    "It is at a half by definition, however its own answers were judged."
    judge, crowd = toy([.5, .3, .2], noise=0.)
    judge[0] = .1
    lost = regrets([(judge, crowd)]*2, ['sft', 'a', 'b'], [100], draws=50)
    assert lost["the judge's board", 0] == pytest.approx(0)
    assert all(lost[rule, 100].mean() < .5 for rule in BY_LABELS)


@pytest.mark.parametrize('rule', BY_LABELS)
def test_without_noise_the_best_is_found(rule):
    "Every vote is the same, so that one label of each tells all, or thirty where they may err."
    sure = [(np.full((4, 90), .5), np.repeat([[.5], [0], [1], [0]], 90, 1))]*2
    n = 90 if rule == 'judge and votes' else 9
    assert regrets(sure, NAMES[:4], [n], draws=20)[rule, n] == pytest.approx(0)
    few, many = (regrets([toy(LEVELS, 4000, seed=1)]*2, NAMES, [n], draws=100)[rule, n].mean()
                 for n in (40, 12_000))
    assert many < .2 and many < few


def halving_slowly(votes, labels):
    "The means of those left after each round, by a loop; None where two are equal."
    left, n, rounds = list(range(1, len(votes))), 0, math.ceil(math.log2(len(votes) - 1))
    for _ in range(rounds):
        n += labels//(rounds*len(left))
        means = {m: votes[m, :n].mean() for m in left}
        if len(set(means.values())) < len(left): return None
        left = sorted(left, key=means.get, reverse=True)[:(len(left) + 1)//2]
    return left[0] if means[left[0]] > .5 else 0


def test_rules_beside_loops():
    drawn = draw_labels(*toy(LEVELS, 800), draws=300)
    votes, corrected = by_votes(drawn, 170), by_corrected(drawn, 170)
    kept = by_halving(drawn, 1600).argmax(1)
    compared = 0
    for d in range(300):
        means = [.5, *(drawn.votes[d, m, :42].mean() for m in range(1, 5))]
        assert votes[d] == pytest.approx(means)
        y, f, rest = drawn.votes[d, 1, :42], drawn.judge[d, 1, :42], drawn.judge[d, 1, 42:]
        spread = (1 + 42/758)*np.var(drawn.judge[d, 1], ddof=1)
        weight = np.clip(np.cov(y, f, ddof=0)[0, 1]/spread, 0, 1)
        assert corrected[d, 1] == pytest.approx(y.mean() + weight*(rest.mean() - f.mean()))
        slow = halving_slowly(drawn.votes[d], 1600)
        if slow is None: continue
        compared += 1
        assert kept[d] == slow
    assert compared > 100
    assert at_random(drawn, 0).tolist() == [0, 1, 1, 1, 1]


def test_draws_keep_votes_and_verdicts_of_an_instruction_together():
    "In one order for all methods; the share of votes is their chance."
    judge, crowd = toy(LEVELS)
    drawn = draw_labels(judge, crowd, draws=400)
    for d in range(3):
        order = [int(np.flatnonzero(judge[1] == v)[0]) for v in drawn.judge[d, 1]]
        assert sorted(order) == list(range(120))
        assert (drawn.judge[d] == judge[:, order]).all() and (drawn.crowd[d] == crowd[:, order]).all()
    assert drawn.votes.mean((0, 2)) == pytest.approx(crowd.mean(1), abs=.01)


def test_intervals_are_over_replicates_and_draws():
    "The paired difference to the judge's board is that of each replicate."
    lost = regrets(WORLDS, NAMES, [40], draws=60)
    row = regret_table(lost).set_index(['rule', 'labels']).loc[('votes', 40)]
    each = lost['votes', 40].mean(1)
    gain = (lost["the judge's board", 0] - lost['votes', 40]).mean(1)
    assert row.regret == pytest.approx(each.mean())
    assert row.less_than_judge == pytest.approx(gain.mean())
    assert row.regret_high - row.regret >= 4.3*each.std(ddof=1)/3**.5 - 1e-9


@pytest.mark.parametrize('worlds, labels, message', [
    (WORLDS[:1], 40, 'there is one: make the farm with seeds 3'), (WORLDS, 3, '4 methods take 8')])
def test_one_replicate_or_too_few_labels_are_refused(worlds, labels, message):
    with pytest.raises(ValueError, match=message): regrets(worlds, NAMES, [labels])


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


def test_halving_asks_for_no_more_than_there_is():
    assert halving_plan(4, 200, 1000) == [(4, 25), (2, 75)]
    assert halving_plan(4, 200, 40) == [(4, 25), (2, 40)]
    for methods in (1, 2, 5, 9):
        plan, spent, before = halving_plan(methods, 300, 10**6), 0, 0
        for left, n in plan: spent, before = spent + left*(n - before), n
        assert spent <= 300
