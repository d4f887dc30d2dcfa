"Cascades: the recorded anchors, and the guarantee."
import numpy as np
import pytest

import tiny
from alpaca_farm import agreement as A, cascades as C
from alpaca_farm.core.runs import read_json, read_summary

DATA = tiny.ROOT.parent/'shared'/'data'/'llmbar'
CFG = C.CascadeConfig()


@pytest.mark.skipif(not DATA.is_dir(), reason='the public data is not here')
@pytest.mark.parametrize('file, published, gpt4', [('Processed_MT-Bench', (.713, .795, .42), .810), ('Processed_LLMEval^2', (.703, .767, .28), .755)])
def test_recorded_cascade(file, published, gpt4):
    sets = A.named_sets([str(DATA/f'{file}.json')])
    said = A.judged_by([f'{DATA}/judge_verdicts.csv#{j} Vanilla_NoRules' for j in ('ChatGPT', 'GPT-4')], sets, CFG)
    p = np.array([C.opinion(said[file, f'{j} Vanilla_NoRules'].preferences) for j in ('ChatGPT', 'GPT-4')])
    gold, who = C.majority(sets[file]), C.settle(C.confidence(p), C.on_contradiction(2))
    found = C.report(C.answers(p, who), who, gold, np.array([1., 10.]))
    alone = [np.nansum(C.right(C.side(q), gold))/200 for q in p]           # the published numbers count an unreadable verdict as wrong,
    escalated = (C.confidence(p[0]) == .5).mean()                          # and do not ask the next judge about it
    assert (alone[0], found['agreement']*found['coverage'], escalated) == pytest.approx(published, abs=6e-3) and alone[1] == pytest.approx(gpt4)
    assert found['n'] == 200 and found['cost'] == pytest.approx(1 + 10*found['escalated'])


@pytest.mark.parametrize('slope', [0., .5])
def test_the_guarantee_holds(slope):
    "Judges that are overconfident, right more often where they are surer or not: the target is missed in at most the stated share of fits."
    rng, target, level = np.random.default_rng(1), .8, .2
    def drawn(n):
        c = rng.uniform(.5, 1, (2, n))
        chance = np.stack([.75 + slope*(c[0] - .75), .79 + slope*(c[1] - .75)])
        ok = rng.random((2, n)) < chance
        return np.where(ok, 1 + c, 2 - c), np.full(n, 2.)                  # people always say 2
    world, gold = drawn(20_000)
    missed, answered = 0, 0
    for _ in range(250):
        p, y = drawn(400)
        f = C.fit(p, y, np.arange(400) % 2, target, level, 30)
        if f.threshold == np.inf: continue
        who = C.settle(np.array([C.trusted(q, k) for q, k in zip(world, f.curves)]), f.threshold)
        r = C.right(C.answers(world, who), gold)
        answered += 1
        missed += np.nanmean(r) < target - .004         # what 20,000 pairs cannot tell
    assert missed/250 <= level + 2*(level*(1 - level)/250)**.5
    if slope: assert answered > 50


def test_a_test_needs_labels_and_agreement():
    sure = np.linspace(1, .5, 300)[None]
    assert C.fixed_sequence(sure, np.ones((1, 300)), .9, .1) == .5
    assert C.fixed_sequence(sure, np.zeros((1, 300)), .9, .1) == np.inf
    assert C.fixed_sequence(sure, np.ones((1, 300)), .9, .1, least=301) == np.inf
    hole = np.ones((1, 300)); hole[0, 60:160] = 0
    assert C.fixed_sequence(sure, hole, .9, .1) > .8     # what comes after the first failure is not looked at


def test_judges_without_verdicts_are_passed_over():
    p = np.array([[np.nan, 1.2, np.nan], [1.9, 1., np.nan]])
    who = C.settle(C.confidence(p), .7)
    assert who.tolist() == [1, 0, 2]
    np.testing.assert_equal(C.answers(p, who), [2, 1, np.nan])
    assert C.paid(who, [1, 10]).tolist() == [11, 1, 11]


def test_a_cascade_saves_calls_and_can_be_read_back(tmp_path):
    cfg = C.CascadeConfig(out=str(tmp_path/'out'), sets=['alpaca_farm.agreement:embedded'], target=.85, labelled=.6)
    C.train(cfg)
    found, saved = read_summary(tmp_path/'out'), read_json(tmp_path/'out'/'cascade.json')
    assert found['careless_agreement'] < found['judge_agreement'] and saved['threshold'] == found['threshold']
    cascade, pairs = C.load_cascade(tmp_path/'out'), A.embedded(50, seed=5)
    said = np.array(cascade(pairs))
    assert set(np.nan_to_num(said)) <= {0., 1., 2.} and cascade.asked[0] == 50 and 0 < cascade.asked[1] < 50
    assert C.train(cfg).done


def test_a_cascade_of_hard_judges():
    def place(pairs): return [1.]*len(pairs)
    def short(pairs): return [1. + (len(p['output_2']) < len(p['output_1'])) for p in pairs]
    pairs = [dict(instruction='x', input='', output_1='aa', output_2='a'), dict(instruction='x', input='', output_1='a', output_2='aa')]
    cascade = C.Cascade([place, short], C.on_contradiction(2))
    assert cascade(pairs) == [2., 1.] and cascade.asked == [2, 2]
    np.testing.assert_equal(C.Cascade([place, place], .9)(pairs), [np.nan]*2)
    assert C.Cascade([place, place], C.on_contradiction(2))(pairs) == [1.5]*2
