"Win rates corrected by people's labels: equal to PPI++, covered for few labels, never silent."
import math
import random

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

import tiny
from alpaca_farm import eval as ev, labelling, world
from alpaca_farm.ask.store import Store
from alpaca_farm.boards import compare
from alpaca_farm.boards.agreement import prefer_longer as longest
from alpaca_farm.boards.corrected import estimate_strata, explain_win_rate, judge_agreement
from alpaca_farm.boards.corrected import match_labels, people_difference, people_win_rate
from alpaca_farm.boards.corrected import plan_labels, ppi_mean
from alpaca_farm.boards.farm_board import _people_labels
from alpaca_farm.boards.judged import complete_preferences
from alpaca_farm.data.records import load_records
from alpaca_farm.judging.label_files import load_sets, recorded_verdicts
from alpaca_farm.judging.measures import people_votes
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_summary

DATA = tiny.ROOT.parent/'shared'/'data'


def people_and_judge(rate, flip, shape, seed=0):
    "Votes, and a judge that errs in a share `flip` of them; 1.5: a generous judge; 2: a soft one."
    u = np.random.default_rng(seed).random((2, *shape))
    y = (u[0] < rate).astype(float)
    if flip == 1.5:
        return y, np.maximum(y, u[1] < .1)
    if flip == 2:
        return y, np.clip(.3 + .4*y + norm.ppf(u[1])/5, 0, 1)
    return y, np.where(u[1] < flip, 1 - y, y)


def draw(y, f, n): return y[..., :n], f[..., :n], f[..., n:]


@pytest.mark.parametrize('flip', [0, .1, .5, .9, 1.5, 2])   # of weight 0, 1 and between
@pytest.mark.parametrize('n, N', [(12, 40), (60, 500)])
def test_the_estimate_is_that_of_ppi_plus_plus(flip, n, N):
    "Twin by the paper's formulas, for a batch of draws."
    y, f, others = draw(*people_and_judge(.4, flip, (3, N), seed=n), n)
    value, error, weight = ppi_mean(y, f, others)
    for k in range(3):
        spread = (1 + n/(N - n))*np.r_[f[k], others[k]].var(ddof=1)
        w = np.clip(np.mean((y[k] - y[k].mean())*(f[k] - f[k].mean()))/spread, 0, 1)
        assert weight[k] == pytest.approx(w)
        assert value[k] == pytest.approx(w*others[k].mean() + np.mean(y[k] - w*f[k]))
        want = math.sqrt(w*w*others[k].var()/(N - n) + (y[k] - w*f[k]).var()/n)
        assert error[k] == pytest.approx(want)


def test_numbers_of_the_authors_library_and_of_a_constant_judge():
    "Of ppi_python 0.2.3: `ppi_mean_ci` on five labels and six other verdicts, alpha .05."
    value, error, _ = ppi_mean([0., 1, 1, 0, 1], [0., 1, 1, 1, 1], [0., 1, 1, 1, 1, 0])
    ends = value + np.array([-1, 1])*norm.ppf(.975)*error
    assert ends == pytest.approx([0.16892292, 0.95107708], abs=1e-6)
    labels = np.arange(11) % 3 < 1
    for verdict in (.7, .9, 1):   # whose variance is at most a rounding error
        value, error, weight = ppi_mean(labels, np.full(11, verdict), np.full(31, verdict))
        assert weight == 0
        assert value == labels.mean()
        assert error == pytest.approx(labels.std()/math.sqrt(11))


def stratified(rate, draws, n=(15, 45), N=(600, 200), seed=0):
    "Strata, in which people's rate and the judge's error differ, and the mean over both."
    rates = (rate/2, min(1, 1.5*rate))
    parts = []
    for k in (0, 1):
        y, f = people_and_judge(rates[k], (.1, .3)[k], (draws, N[k]), seed=seed + k)
        parts.append(draw(y, f, n[k]))
    return parts, np.dot(rates, N)/sum(N)


@pytest.mark.parametrize('rate', [.1, .5])
def test_strata_are_weighted_by_their_known_shares(rate):
    parts, truth = stratified(rate, 1500)
    c = estimate_strata(parts)
    each = [ppi_mean(*p)[0] for p in parts]
    assert c.rate.value == pytest.approx(np.clip(.75*each[0] + .25*each[1], 0, 1))
    assert c.labels.value == pytest.approx(.75*parts[0][0].mean(-1) + .25*parts[1][0].mean(-1))
    for i in (c.rate, c.labels):
        assert .94 < np.mean((i.low <= truth) & (truth <= i.high))
        assert ((0 <= i.low) & (i.low <= i.high) & (i.high <= 1)).all()
    one = estimate_strata(parts[:1])     # a single stratum: no matter how it is called
    alone = estimate_strata([[x[0] for x in parts[0]]])
    assert one.labels.low[0] == pytest.approx(alone.labels.low)


def test_worth_is_between_nothing_and_all():
    for flip, least, most in ((.5, 95, 115), (.2, 130, 200), (0, 350, 700)):
        y, f = people_and_judge(.4, flip, (200, 800))
        assert least < np.mean(estimate_strata([draw(y, f, 100)]).worth) < most
    y = people_and_judge(.4, 0, (30,))[0]
    everything = estimate_strata([(y, y, y[:0])])          # all labelled: no judge is needed
    assert everything.rate == everything.labels
    assert everything.worth == pytest.approx(30)


@pytest.mark.parametrize('agreement', [.7, .9])
def test_the_plan_for_two_policies_is_what_200_draws_needed(agreement):
    "The half-width, with as many labels as are forecast for it, with and without the judge."
    N = 6000
    within = .04
    rng = np.random.default_rng(0)
    g = (rng.random((200, N, 2)) < [.6, .45]).astype(float)
    y = np.where(rng.random(g.shape) < agreement, g, 1 - g)
    assert judge_agreement(g, y) == pytest.approx(agreement, abs=.01)
    plan = plan_labels(g[0], agreement, within)
    f, y = ((1 + x[..., 1] - x[..., 0])/2 for x in (g, y))
    for n, used in ((plan.with_judge, True), (plan.without, False)):
        c = estimate_strata([draw(y, f, math.ceil(n))])
        interval = c.rate if used else c.labels
        assert np.mean(interval.high - interval.low) == pytest.approx(within, rel=.04)
    assert plan.with_judge < plan.without
    assert plan_labels(g[0, :500, 0], agreement).with_judge == math.inf


# labels of people and the answers they belong to

PROMPTS = [dict(instruction=f'Say {i}.', input='' if i % 3 else str(i)) for i in range(80)]
REFERENCES = [dict(p, output=['x'*9, 'y'*(i + 1)]) for i, p in enumerate(PROMPTS)]
MINE = [dict(p, output='o'*(2 + i % 17)) for i, p in enumerate(PROMPTS)]


def silent(pairs): return [np.nan]*len(pairs)


def label(i, vote, which=0, turned=False, **more):
    "A person's vote for my answer (1) or against (0), on the pair in either order."
    texts = [REFERENCES[i]['output'][which], MINE[i]['output']]
    one, two = texts[::-1] if turned else texts
    vote = 1 + (1 - vote if turned else vote)
    return dict(PROMPTS[i], output_1=one, output_2=two, preference=vote, annotator='Ann') | more


def file_of(folder, rows, name='labels'): return tiny.write(folder/f'{name}.json', rows)


def match(folder, rows, outputs=MINE, references=REFERENCES):
    return match_labels(file_of(folder, rows), dict(mine=(outputs, references)))['mine']


def test_votes_are_averaged_over_the_pairs_of_an_instruction(tmp_path):
    "Of people, orders and references; an input may be a part of the instruction, as AlpacaEval's."
    rows = [label(i, i % 2, turned=i % 3 == 0, drawn='random') for i in range(11)]
    merged = dict(rows[3], instruction='Say 3.\n\n3', input='')
    more = [label(0, 1, which=1), label(1, .5, annotator='Bo'), label(4, 0, annotator='Bo')]
    own = match(tmp_path, rows[:3] + [merged] + rows[4:] + more)
    want = {i: float(i % 2) for i in range(11)} | {0: .5, 1: .75}
    assert {i: v for i, v in enumerate(own.votes) if not np.isnan(v)} == want
    assert own.drawn is None
    assert match(tmp_path, rows).drawn == 'random'
    assert not own.same.any()


def test_the_same_answer_twice_is_a_half_that_needs_no_label(tmp_path):
    references = [dict(p, output='x'*9) for p in PROMPTS]
    outputs = [dict(r, output=r['output'] if i % 4 == 0 else 'better') for i, r in
               enumerate(references)]
    rows = [dict(PROMPTS[i], output_1='x'*9, output_2='better', preference=2 - i % 2,
                 drawn='random') for i in range(40) if i % 4]
    own = match(tmp_path, rows, outputs, references)
    judged = complete_preferences(outputs, references, longest)
    c = people_win_rate(judged, own)
    has = ~np.isnan(own.votes)
    assert own.same.sum() == 20
    assert has.sum() == 30
    assert c.rate.value == pytest.approx(.25*50 + .75*100*own.votes[has].mean())
    gap = people_difference((judged, own), (judged, own))
    assert gap.value == 0
    assert gap.low == -gap.high


def random_rows(n=40, **more):
    coins = np.random.default_rng(0).random(80)
    return [label(i, int(coins[i] < .6), drawn='random') | more for i in range(0, 80, 80//n)]


@pytest.mark.parametrize('rows, message', [
    ([dict(r, input='other') for r in random_rows()], 'labels on 0 of its 80'),
    (random_rows(8), '8 of its 80 instructions, besides 0 with equal answers, and a correction needs 10'),
    ([{k: v for k, v in r.items() if k != 'output_1'} for r in random_rows()], 'output_1'),
    ([dict(r, preference=1.3) for r in random_rows()], 'a person votes 1, 2'),
    (random_rows(drawn='length'), 'some instructions of mine have several'),
    ([], 'the file holds no records')])
def test_bad_labels_are_named_before_anybody_is_asked(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        match(tmp_path, rows)


def test_what_makes_a_correction_doubtful_is_said(tmp_path, capsys):
    judged = complete_preferences(MINE, REFERENCES, longest)
    def report(rows): return ' '.join(explain_win_rate('mine', 'longest', judged,
                                                        match(tmp_path, rows)))
    plain = report(random_rows())
    assert 'nan' not in plain
    assert 'drawn at random' not in plain
    assert 'random draw' not in plain
    assert 'corrected by 40 labels' in plain
    assert 'more than the 80 instructions' in plain
    assert 'do not say that they were drawn at random' in report(random_rows(drawn=None))
    won = np.flatnonzero(judged > 1.5).tolist()
    one_side = report([label(i, 1, drawn='random') for i in won])
    assert 'no random draw looks like this' in one_side
    equal = report([dict(r, preference=2) for r in random_rows()])
    assert 'all 40 labels are equal' in equal
    assert 'nan' not in equal
    match(tmp_path, random_rows() + [dict(label(3, 1), instruction='Of another file.')])
    said = capsys.readouterr().out
    assert "1 of 41 labelled pairs are not among those judged (such as 'Of" in said
    with pytest.raises(ValueError, match='verdict on 0 of 40 labelled'):
        people_win_rate(np.full(80, np.nan), match(tmp_path, random_rows()))
    partly = np.where(np.arange(80) % 4 == 0, np.nan, judged)    # on half of the labelled
    assert not np.isnan(np.r_[people_win_rate(partly, match(tmp_path, random_rows())).rate]).any()


def test_strata_must_be_those_that_were_drawn_from(tmp_path):
    "By length they are known from the texts, by verdict from the judge that the draw was by."
    references = [dict(p, output='x'*9) for p in PROMPTS]
    judged = complete_preferences(MINE, references, longest)
    rows = [label(i, i % 2, turned=i % 3 == 0) for i in range(0, 80, 2)]
    rows = [dict(r, drawn=by, stratum=int(np.sign(len(r['output_2']) - len(r['output_1']))))
            for by in ('length', 'verdict') for r in rows]
    for by in ('length', 'verdict'):
        own = match(tmp_path, [r for r in rows if r['drawn'] == by], references=references)
        f = judged - 1
        has = ~np.isnan(own.votes)
        sides = np.sign(judged - 1.5)
        parts = [(own.votes[s & has], f[s & has], f[s & ~has])
                 for s in (sides == k for k in (-1, 0, 1))]
        assert people_win_rate(judged, own).rate.value == pytest.approx(
            100*estimate_strata(parts).rate.value)
        with pytest.raises(ValueError, match='not in the stratum'):
            people_win_rate(judged, own._replace(stratum=-own.stratum))
    none = np.where(sides == 1, np.nan, own.votes)
    with pytest.raises(ValueError, match='none in one of the strata'):
        people_win_rate(judged, own._replace(votes=none))


# where a user meets it

@pytest.fixture(scope='module')
def answers(tmp_path_factory):
    "Files of answers by two authors of the embedded world to 90 instructions."
    folder = tmp_path_factory.mktemp('answers')
    rng = random.Random(0)
    rows = {}
    while len(rows) < 90:
        spec = world.sample_request(rng)
        prompt = world.render(spec)
        said = [world.Author(s).answer(spec, rng) for s in (.3, .8, .5)]
        rows[prompt['instruction']] = prompt, said
    for k, name in enumerate(('reference', 'skilled', 'middling')):
        file_of(folder, [dict(p, output=texts[k]) for p, texts in rows.values()], name)
    return folder


def crowd_labels(answers, outputs, folder, against='reference', draw=30, **more):
    "A run of labelling: one member of the crowd labels what is drawn, through the page."
    cfg = labelling.LabellingConfig(
        out=str(folder/f'labels_{outputs}'), outputs=str(answers/f'{outputs}.json'), draw=draw,
        against=against and str(answers/f'{against}.json'), store=str(folder/'l.sqlite'), **more)
    page = labelling.LabellingPage(labelling.LabellingQueue(
        labelling.pairs_to_label(cfg), Store(cfg.store), 'Ann'), key_delay=0)
    while page.pair:
        page.buttons['2' if world.crowd.annotators[0]([page.pair])[0] > 1.5 else '1'].click()
    labelling.run(cfg)
    return cfg.out


@pytest.mark.slow
def test_papermill_corrects_a_board_by_labels(answers, tmp_path):
    "From a draw over a labelling page to the columns of the board, as a user types it."
    labels = f'{crowd_labels(answers, "skilled", tmp_path)}/preferences.json'
    assert {r['drawn'] for r in read_json(labels)} == {'random'}
    assert len(read_json(labels)) == 30
    out = tmp_path/'out'
    run = tiny.spawn(tiny.papermill(
        tiny.ROOT/'nbs'/'eval.ipynb', tmp_path/'eval.ipynb', out=out, labels=labels,
        outputs=[str(answers/'skilled.json')], reference=answers/'reference.json',
        annotators=['alpaca_farm.world:pool']))
    output = run.communicate()[0]   # a line of progress, where that took ten seconds
    assert run.returncode == 0
    assert 'Error' not in output
    board = pd.read_csv(out/'leaderboard.csv').set_index('method')
    own = match_labels(labels, dict(m=(read_json(answers/'skilled.json'),
                                       read_json(answers/'reference.json'))))['m']
    judged = np.array(read_json(out/'preferences.json')['pool']['skilled'])
    c = people_win_rate(judged, own)
    row = board.loc['skilled']
    names = ['corrected', 'corrected_low', 'corrected_high', 'labels_alone', 'worth']
    assert row[names].tolist() == pytest.approx([*c.rate, c.labels.value, c.worth], abs=1e-3)
    assert row.n_labels == 30
    assert not board.filter(regex='corr|label|worth').isna().any(axis=None)
    assert board.loc['reference', [*names[:2], 'n_labels']].tolist() == [50, 50, 0]
    said = read_json(out/'corrections.json')
    assert f'corrected by 30 labels {c.rate.value:.1f}' in said[0]
    assert '+-5 points' in said[2]
    assert read_summary(out)['skilled_corrected'] == pytest.approx(c.rate.value, abs=1e-3)
    assert (out/'leaderboard.png').exists()


def test_two_policies_on_the_same_instructions(answers, tmp_path, capsys):
    "Their labels may come from one file; what is said of the difference is the paired one."
    rows = [r for m in ('skilled', 'middling')
            for r in read_json(f'{crowd_labels(answers, m, tmp_path)}/preferences.json')]
    labels = file_of(tmp_path, rows)
    cfg = ev.EvalConfig(out=str(tmp_path/'out'), reference=str(answers/'reference.json'),
                        outputs=[str(answers/f'{m}.json') for m in ('skilled', 'middling')],
                        annotators=['alpaca_farm.world:pool'], labels=labels)
    ev.run(cfg)
    assert 'middling minus skilled' in capsys.readouterr().out
    references = read_json(answers/'reference.json')
    judged = read_json(tmp_path/'out'/'preferences.json')
    known = match_labels(labels, {m: (read_json(answers/f'{m}.json'), references)
                                  for m in ('skilled', 'middling')})
    both = [(np.array(judged['pool'][m]), own) for m, own in known.items()]
    has = ~np.isnan(both[0][1].votes + both[1][1].votes)
    assert has.sum() == 30           # one draw of instructions for both
    f, y = ((1 + b - a)/2 for a, b in zip(*([p, own.votes] for p, own in both)))
    gap = people_difference(*both)
    assert gap.value == pytest.approx(200*ppi_mean(y[has], f[has], f[~has])[0] - 100)
    assert gap.low < gap.value < gap.high


def test_compare_and_the_farm_take_labels(answers, tmp_path, capsys):
    for name in ('middling', 'skilled'):
        (tmp_path/name).mkdir()
        (tmp_path/name/'outputs.json').write_bytes((answers/f'{name}.json').read_bytes())
        config = dict(notebook='sft', settings=dict(out=name), fingerprint=name, inputs={})
        file_of(tmp_path/name, config, 'config')
        file_of(tmp_path/name, {}, 'summary')
    labels = crowd_labels(answers, 'skilled', tmp_path, against='middling')
    cfg = compare.CompareConfig(out=str(tmp_path/'out'), labels=labels,
                                folders=[str(tmp_path/m) for m in ('middling', 'skilled')],
                                annotators='alpaca_farm.world:pool')
    compare.run(cfg)
    row = pd.read_csv(tmp_path/'out'/'win_rates.csv').iloc[0]
    assert row.corrected_low < row.corrected < row.corrected_high
    assert row.n_labels == 30
    assert 'skilled over middling' in capsys.readouterr().out
    assert 'skilled_over_middling_corrected' in read_summary(cfg.out)
    # of the farm's rows those that have labels
    rows = {name: load_records(str(answers/f'{file}.json'), kind='output')
            for name, file in dict(sft='middling', dpo='skilled').items()}
    found = _people_labels(labels, rows | dict(ppo=[dict(r, output='No.') for r in rows['sft']]))
    assert [*found] == ['dpo']
    assert np.isfinite(found['dpo'].votes).sum() == 30


@pytest.mark.parametrize('strata', ['', 'length', 'verdict'])
def test_a_draw_is_random_and_says_so(answers, tmp_path, strata):
    "Of any part of a file; more labels add to it; small strata are drawn from more than others."
    pairs = [dict(p, output_1=a['output'], output_2=b['output'], preference=1 + (i % 9 > 0))
             for i, (p, a, b) in enumerate(zip(*(read_json(answers/f'{n}.json') for n in (
                 'reference', 'reference', 'skilled'))))]
    file = file_of(tmp_path, [{k: v for k, v in p.items() if k != 'output'} for p in pairs])
    def drawn(n, seed=0, **more): return labelling.pairs_to_label(
        labelling.LabellingConfig(outputs=file, draw=n, seed=seed, **(dict(strata=strata) | more)))
    few, more = ({r['instruction'] for r in drawn(n)} for n in (30, 50))
    assert few < more
    assert {r['instruction'] for r in drawn(30, seed=1)} != few
    assert {r['drawn'] for r in drawn(30)} == {strata or 'random'}
    if strata == 'verdict':
        sides = [r['stratum'] for r in drawn(30)]
        # ten of those that it prefers are too few
        assert sides.count(-1) == 10
        assert sides.count(1) == 27
    places = [[p['instruction'] for p in pairs].index(r['instruction']) for r in drawn(30)]
    assert places != sorted(places)
    file = file_of(tmp_path, [dict(p, output_2=p['output_2'] + x) for p in pairs for x in '!?'])
    if strata:
        with pytest.raises(ValueError, match='several pairs'):
            drawn(30)
    else:
        assert len(drawn(30)) == 60


# people's labels of public data

PUBLIC = dict(pandalm=('testset-v1.json', 'gpt-3.5-turbo-testset-v1.json', ''),
              llmbar=('LLMBar_*.json', 'judge_verdicts.csv', 'GPT-4 Metrics_Reference'))


def public(folder, labelled, verdicts, name):
    "Labelled pairs, a judge's preferences in all orders that it has, and people's mean votes."
    sets = load_sets([str(DATA/folder/labelled)])
    found, = recorded_verdicts(str(DATA/folder/verdicts), name, sets).values()
    pairs, = sets.values()
    judge = found.preferences[0, found.shown.any(1)].mean(0)
    return pairs, judge, np.nanmean(people_votes(pairs), 0)


@pytest.mark.skipif(not (DATA/'pandalm').exists(), reason='no public labels')
@pytest.mark.parametrize('n', [50, 100])
@pytest.mark.parametrize('data', ['pandalm', 'llmbar', 'alpaca_eval'])
def test_labels_of_public_data_are_recovered_from_a_part(data, n):
    "A judge's rate corrected by a part of the labels is that of all of them, 500 draws."
    if data == 'alpaca_eval':    # whose labels are those of its second judge
        kinds = [{r['instruction']: r['preference'] or 1.5 for r in read_json(
            DATA/data/'alpaca-7b'/f'annotations_{k}.json')} for k in ('ae1', 'ae2')]
        judge, y = (np.array([k[t] for t in kinds[0]], dtype=float) for k in kinds)
    else:
        pairs, judge, y = public(data, *PUBLIC[data])
    known = ~np.isnan(judge + y)
    f, y = judge[known] - 1, y[known] - 1
    order = np.argsort(np.random.default_rng(0).random((500, len(y))), axis=1)
    c = estimate_strata([draw(y[order], f[order], n)])
    error = c.rate.value - y.mean()
    assert abs(error.mean()) < 4*error.std()/math.sqrt(500)
    assert np.mean((c.rate.low <= y.mean()) & (y.mean() <= c.rate.high)) > .93
    assert abs(error.mean()) < abs(f.mean() - y.mean())     # the judge's own error
    worth = np.median(c.worth)/n
    assert worth == pytest.approx(dict(pandalm=1.44, llmbar=1.85, alpaca_eval=1)[data], abs=.15)
