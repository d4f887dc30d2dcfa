"What decide chooses by, beside draws from the prior."
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit, logit, softmax

import tiny
from alpaca_farm import decide
from alpaca_farm.boards import regret
from alpaca_farm.data.pairs import swap_outputs
from alpaca_farm.judging.duels import hold_duels, pair_rates
from alpaca_farm.judging.pools import Pool
from alpaca_farm.worlds.folder import World


def test_judge_and_duels_beside_draws_from_the_prior():
    "What is believed is the prior's draws, weighted by how likely the votes are."
    rng = np.random.default_rng(0)
    judge = np.array([.7, .6, .55])
    rates = np.array([[.5, .4, .3, .5], [.6, .5, .3, .8], [.7, .7, .5, .5], [.5, .2, .5, .5]])
    counts = np.array([[0, 5, 10, 0], [5, 0, 20, 10], [10, 20, 0, 0], [0, 10, 0, 0]])
    prior = regret.believe_judge(logit((judge*1000 + .5)/1001))
    component = rng.choice(len(prior.weights), 400_000, p=prior.weights)
    roots = np.linalg.cholesky(prior.covariances)
    truth = prior.means[component] + (roots[component] @ rng.normal(size=(400_000, 3, 1)))[..., 0]
    strengths = np.insert(truth, 0, 0., 1)
    evidence = np.zeros(len(truth))
    for one, other in combinations(range(4), 2):
        chance = expit(strengths[:, one] - strengths[:, other])
        n = regret._WORTH*counts[one, other]
        won = n*rates[one, other]
        evidence += won*np.log(chance) + (n - won)*np.log(1 - chance)
    weights = softmax(evidence)
    found = regret.weigh_duels(rates, counts, np.eye(4), judge, 1000)
    assert found.mean() == pytest.approx(weights @ truth, abs=.06)
    drawn = regret.draw_win_rates(found, 20_000)
    by_weight = regret.chances(expit(strengths[rng.choice(len(truth), 20_000, p=weights)]))
    assert regret.chances(drawn)[0] == pytest.approx(by_weight[0], abs=.03)


def test_one_judge_in_twenty_is_contradicted_by_chance():
    "Nine equal methods, whose answers are lucky or not: an answer meets eight others."
    contradicted = []
    answers = np.arange(9)[:, None].repeat(400, 1)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        luck = .6*rng.normal(size=(9, 400))
        chance = expit(luck[:, None] - luck[None])

        def ask(duels): return (rng.random(len(duels)) < chance[tuple(duels[:, :3].T)]).astype(float)
        found = hold_duels(answers, 720, ask, 'order', seed=seed)
        rates, counts = pair_rates(found, answers)
        *_, p = regret.judge_in_duels(rates, counts, np.eye(9), np.full(9, .5))
        contradicted.append(p[1:] < .05)
    assert .02 < np.mean(contradicted) < .075


def test_methods_that_have_not_met_are_not_compared():
    rates = np.array([[.5, .4, np.nan], [.6, .5, np.nan], [np.nan, np.nan, .5]])
    counts = np.array([[0, 10, 0], [10, 0, 0], [0, 0, 0]])
    by_judge, by_people, p = regret.judge_in_duels(
        rates, counts, np.eye(3), np.array([.5, .6, .7]))
    assert by_people == pytest.approx([.4, .6, 0]) and p[2] == 1
    beliefs = regret.weigh_duels(rates, counts, np.eye(3), np.array([.6, .7]), 100)
    assert np.isfinite(beliefs.mean()).all()


def test_equal_answers_know_a_rate_better():
    "Half of the answers are equal: the same votes are then about half of the rate."
    rates, half = np.array([[.5, .4], [.6, .5]]), np.array([[1., .5], [.5, 1.]])
    counts = np.array([[0, 10], [10, 0]])
    spreads = []
    for equal in (np.eye(2), half):
        drawn = regret.draw_win_rates(regret.weigh_duels(rates, counts, equal, np.array([.6]), 100))
        spreads.append(drawn[:, 1].std())
    assert spreads[1] < .8*spreads[0]


@pytest.mark.parametrize('said', [.05, .95])
def test_many_votes_overrule_a_very_wrong_judge(said):
    "All methods are as good as SFT, and the estimate does not run away from the judge's rates."
    rates = np.full((4, 4), .5)
    found = regret.weigh_duels(rates, 60*(1 - np.eye(4)), np.eye(4), np.full(3, said), 1000)
    assert expit(found.mean()) == pytest.approx(.5, abs=.03)


def test_equal_answers_do_not_check_a_judge(tmp_path, monkeypatch):
    "Neither of the pairs that are drawn nor of those labelled before."
    sft = [dict(instruction=f'{i}?', input='', output='Yes.') for i in range(90)]
    again = [dict(r, output='Yes.' if i % 2 else 'No.') for i, r in enumerate(sft)]
    monkeypatch.setattr(decide, 'read_answers', lambda *_, **__: again)
    pairs = [dict(instruction='Say.', input='', output_1='a', output_2=text, preference=1.5)
             for text in ('a', 'b')]
    cfg = decide.DecideConfig(labels=tiny.write(tmp_path/'labels.json', pairs), budget=100)
    first, known = decide._first_pairs(cfg, sft)
    assert len(first) == 30
    assert {p['output_2'] for p in first + known} == {'No.', 'b'}


def test_a_missing_verdict_leaves_a_pair_out_of_a_decision():
    agreed, said = decide._judge_check(np.repeat([1., np.nan], [12, 3]), np.ones(15))
    assert agreed.value == 1
    assert 'of 12 labels' in said
    rng = np.random.default_rng(0)
    verdicts = rng.random((60, 1))
    verdicts[0] = np.nan
    answers = {row: [dict(instruction=f'{i}?', output=row) for i in range(60)] for row in ('sft', 'a')}
    board = decide.Board(answers, verdicts, pd.DataFrame(dict(length=[9], kl=[1]), ['a']))
    found, _ = decide._ask_duels(board, 20, lambda pairs: 1.*(rng.random(len(pairs)) < .6), 0)
    table, _ = decide._decision_table(board, found)
    assert not table.drop(columns=['length', 'kl']).isna().any(axis=None)
    row = table.set_index('second').loc['a']
    assert row.win_rate == pytest.approx(100*verdicts[1:].mean())


def test_votes_of_several_people_on_a_pair_check_a_judge_as_one_label(tmp_path):
    "Their mean, in whichever order the answers stand."
    rows = []
    for k in range(3):
        pair = dict(instruction=f'Say {k}.', input='', output_1='a', output_2='b')
        rows += [dict(pair, preference=2.)]*2 + [dict(swap_outputs(pair), preference=2.)]
    known = decide._known_labels(tiny.write(tmp_path/'labels.json', rows))
    assert [r['preference'] for r in known] == [pytest.approx(5/3)]*3


class Paid:
    "A judge behind an endpoint, some of whose answers are missing."
    client = SimpleNamespace(tally=SimpleNamespace(open='the budget of $1.00 is reached'))
    asked = 0

    def __call__(self, pairs):
        Paid.asked += len(pairs)
        return [np.nan]*len(pairs)


def test_a_paid_pool_votes_once_on_a_pair_of_the_check_which_waits_for_its_votes(
        tmp_path, monkeypatch):
    pairs = [dict(instruction=f'{i}?', input='', output_1='a', output_2='b', preference=1)
             for i in range(40)]
    cfg = decide.DecideConfig(labels=tiny.write(tmp_path/'labels.json', pairs))
    sft = [dict(r, output='a') for r in pairs]
    stands_in = dict(_print_runs_time=None, _make=(), farm_world=World(''), read_answers=sft,
                     load_annotators=Pool('paid', [Paid(), Paid(), Paid()]))
    for name, value in stands_in.items():
        monkeypatch.setattr(decide, name, lambda *_, value=value, **__: value)
    with pytest.raises(ValueError, match='run again for the rest'):
        decide.run(cfg)
    assert Paid.asked == 40
