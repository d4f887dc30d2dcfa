"Cascades: the recorded anchors, and the guarantee."
import numpy as np
import pytest

import tiny
from alpaca_farm import agreement as A, cascade_thresholds as T, cascades as C
from alpaca_farm.annotators import load_annotators
from alpaca_farm.core.files import read_json
from alpaca_farm.core.runs import read_summary
from judge_server import judge_server

DATA = tiny.ROOT.parent/'shared'/'data'/'llmbar'
CFG = C.CascadeConfig()


@pytest.mark.skipif(not DATA.is_dir(), reason='the public data is not here')
def test_recorded_cascades():
    "The published count has an unreadable verdict as wrong and does not escalate it; ours hands it over, and leaves out what nobody answers."
    sets = A.load_sets([str(DATA/f'{file}.json') for file in ('Processed_MT-Bench', 'Processed_LLMEval^2')])
    said = A.verdicts_of_judges([f'{DATA}/judge_verdicts.csv#*GPT* Vanilla_NoRules'], sets, CFG)
    for file, published, gpt4, left_out in (('Processed_MT-Bench', (.713, .795, .42), .810, (.795, .42)),
                                            ('Processed_LLMEval^2', (.703, .767, .28), .755, (.787, .30))):
        p = np.array([T.mean_preference(said[file, f'{j} Vanilla_NoRules'].preferences) for j in ('ChatGPT', 'GPT-4')])
        votes, who = T.count_votes(sets[file]), T.answering_judge(T.confidence(p), T.on_contradiction(2))
        gold = T.majority_vote(votes)
        found = C.cascade_rates(T.cascade_verdicts(p, who), who, votes, np.array([1., 10.]))
        alone = [np.nansum(T.correct_verdicts(T.preferred_side(q), gold))/200 for q in p]
        assert (alone[0], found['decided']*found['coverage'], (T.confidence(p[0]) == .5).mean()) == pytest.approx(published, abs=6e-3)
        assert alone[1] == pytest.approx(gpt4)
        assert (found['decided'], found['escalated']) == pytest.approx(left_out, abs=6e-3) and found['cost'] == pytest.approx(1 + 10*found['escalated'])


EVERY_OTHER = T.GRID[::2]


def without_stop(trust, correct, target, level, least, grid):
    "What `fixed_sequence` is not: the loosest threshold that is rejected, whatever was not on the way."
    who = np.array([T.answering_judge(trust, t) for t in grid])
    given = np.vstack([correct, np.zeros(who.shape[1])])
    n, k = (who < len(trust)).sum(1), given[who, np.arange(who.shape[1])].sum(1)
    ok = np.array(grid)[(n >= least) & (T.p_values(k, n, target) <= level)]
    return float(ok.min()) if len(ok) else np.inf


def missed(rule, right_at, n=1000, draws=2000):
    "How often a rule chooses a threshold at which fewer than nine in ten verdicts are right, for a judge right at confidence c with probability right_at(c)."
    rng, fine, bad = np.random.default_rng(0), np.linspace(.5, 1, 20_001), 0
    true = {t: right_at(fine[fine >= t]).mean() for t in EVERY_OTHER}
    for _ in range(draws):
        c = rng.uniform(.5, 1, (1, n))
        t = rule(c, (rng.random((1, n)) < right_at(c)).astype(float), .9, .1, 50, EVERY_OTHER)
        bad += t < np.inf and true[t] < .9
    return bad/draws


WORLDS = dict(flat=lambda c: np.full(c.shape, .9 - 1e-9), falling=lambda c: np.where(c > .75, .92, .8), rising=lambda c: .6 + .4*(2*c - 1))


@pytest.mark.parametrize('world', WORLDS)
def test_the_guarantee_holds(world):
    draws = 2000 if world == 'flat' else 600
    assert missed(T.fixed_sequence, WORLDS[world], draws=draws) <= .1 + 2*(.09/draws)**.5


def test_the_guarantee_is_of_the_stop():
    "Without it, the same draws are far off."
    assert missed(without_stop, WORLDS['flat'], draws=300) > .2


@pytest.mark.parametrize('n', [50, 200, 1000])
def test_p_values_are_exact(n):
    "A threshold that only just misses the target is passed with a probability of at most the level; one right answer fewer, and it would be more."
    from scipy.stats import binom
    k = np.arange(n + 1)
    def passed(ok): return binom.pmf(k, n, .9)[ok].sum()
    enough = T.p_values(k, n, .9) <= .1
    assert passed(enough) <= .1 < passed(np.r_[enough[1:], True])


def test_pairs_of_one_instruction_are_tested_once():
    "50 instructions with six pairs that are right together (correlation .5): the guarantee holds with one pair of each, and not with all."
    rng, bad = np.random.default_rng(0), {True: 0, False: 0}
    for _ in range(300):
        a = np.repeat(rng.beta(.9, .1, 60), 6)                       # mean .9, to the digit
        p, about, part = 1.5 + (rng.random(360) < a - 1e-9)*.4 - .2, np.repeat(np.arange(60), 6), np.repeat(np.arange(60) >= 5, 6).astype(int)
        for once in bad:
            f = T.fit_cascade(p[None], np.full(360, 2.), part, .9, .1, 20, about if once else None)
            bad[once] += f.threshold < np.inf
    assert bad[True]/300 <= .1 + 2*(.09/300)**.5 and bad[False]/300 > .2


def test_a_test_needs_labels_and_agreement():
    sure = np.linspace(1, .5, 300)[None]
    assert T.fixed_sequence(sure, np.ones((1, 300)), .9, .1) == .5
    assert T.fixed_sequence(sure, np.zeros((1, 300)), .9, .1) == np.inf
    assert T.fixed_sequence(sure, np.ones((1, 300)), .9, .1, least=301) == np.inf
    hole = np.ones((1, 300)); hole[0, 60:160] = 0
    assert T.fixed_sequence(sure, hole, .9, .1) > .8     # what comes after the first failure is not looked at


def test_judges_without_verdicts_are_passed_over():
    p = np.array([[np.nan, 1.2, np.nan], [1.9, 1., np.nan]])
    who = T.answering_judge(T.confidence(p), .7)
    assert who.tolist() == [1, 0, 2]
    np.testing.assert_equal(T.cascade_verdicts(p, who), [2, 1, np.nan])
    assert C.cascade_cost(who, [1, 10]).tolist() == [11, 1, 11]


def test_a_cascade_saves_calls_and_can_be_read_back(tmp_path):
    cfg = C.CascadeConfig(out=str(tmp_path/'out'), sets=['alpaca_farm.agreement:embedded_pairs'], target=.85, labelled=.6)
    C.run(cfg)
    found, saved = read_summary(tmp_path/'out'), read_json(tmp_path/'out'/'cascade.json')
    assert found['careless_decided'] < found['judge_decided'] and saved['threshold'] == found['threshold']
    assert found['cascade_one_person'] < found['cascade_decided'] and 0 < found['cascade_answered_of_divided'] < found['cascade_coverage']
    assert found['cascade_decided_low'] < found['cascade_decided'] < found['cascade_decided_high']
    cascade, pairs = C.load_cascade(tmp_path/'out'), A.embedded_pairs(50, seed=5)
    said = np.array(cascade(pairs))
    assert set(np.nan_to_num(said)) <= {0., 1., 2.} and cascade.seen[0] == 50 and 0 < cascade.seen[1] < 50
    assert C.run(cfg).done


def test_a_cascade_of_hard_judges():
    def place(pairs): return [1.]*len(pairs)
    def short(pairs): return [1. + (len(p['output_2']) < len(p['output_1'])) for p in pairs]
    pairs = [dict(instruction='x', input='', output_1='aa', output_2='a'), dict(instruction='x', input='', output_1='a', output_2='aa')]
    cascade = C.Cascade([place, short], T.on_contradiction(2))
    assert cascade(pairs) == [2., 1.] and cascade.seen == [2, 2]
    np.testing.assert_equal(C.Cascade([place, place], .9)(pairs), [np.nan]*2)
    assert C.Cascade([place, place], T.on_contradiction(2))(pairs) == [1.5]*2


def test_requests_left_open_are_no_abstention(tmp_path, monkeypatch):
    "Neither for a cascade that is called, nor for one that is fitted; with the rest answered both go on."
    monkeypatch.setenv('OPENAI_API_KEY', 'test')
    (tmp_path/'prices.yaml').write_text('judge: [1000, 1000]')
    with judge_server(template='Output ({letter})') as server:
        run = dict(out=str(tmp_path/'out'), sets=['alpaca_farm.agreement:embedded_pairs'], judges=['chatgpt', 'alpaca_farm.world:judge'], target=.7, least=5, max_instances=60,
                   base_url=server.url, store=str(tmp_path/'answers.sqlite'), prices=str(tmp_path/'prices.yaml'), models=['gpt-3.5-turbo-0301=judge'])
        poor = C.CascadeConfig(budget=1., **run)
        with pytest.raises(ValueError, match='is reached'): C.Cascade([load_annotators('chatgpt', poor)], .5)(A.embedded_pairs(60))
        with pytest.raises(ValueError, match='is reached'): C.run(poor)
        assert not (tmp_path/'out'/'cascade.json').exists() and len(server.requests()) < 120
        C.run(C.CascadeConfig(**run))
        assert len(server.requests()) == 120 and read_summary(tmp_path/'out')['chatgpt_coverage'] == 1
