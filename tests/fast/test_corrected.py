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
from alpaca_farm.boards.corrected import correct_mean, explain_differences, explain_win_rate
from alpaca_farm.boards.corrected import judge_agreement, judge_labelled, label_columns
from alpaca_farm.boards.corrected import match_labels, people_difference
from alpaca_farm.boards.corrected import people_win_rate, PeopleLabels, plan_labels, ppi_mean
from alpaca_farm.boards.farm_board import _people_labels
from alpaca_farm.boards.judged import judge_all
from alpaca_farm.boards.leaderboards import leaderboard, leaderboard_figure
from alpaca_farm.data.records import load_records
from alpaca_farm.judging.label_files import load_sets, recorded_verdicts
from alpaca_farm.judging.measures import people_votes
from alpaca_farm.judging.pools import mean_preferences, preferences_over
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_summary
from published import llmbar_verdicts, pandalm_verdicts

DATA = tiny.ROOT.parent/'shared'/'data'


def errs(share):
    "A judge that is wrong on a share of people's votes."
    return lambda y, u: np.where(u < share, 1 - y, y)


def soft(y, u): return np.clip(.3 + .4*y + norm.ppf(u)/5, 0, 1)


def people_and_judge(rate, judge, shape, seed=0):
    "People's votes, and those of a judge, which sees them and a number between 0 and 1."
    u = np.random.default_rng(seed).random((2, *shape))
    y = (u[0] < rate).astype(float)
    return y, judge(y, u[1])


def draw(y, f, n): return y[..., :n], f[..., :n], f[..., n:]


@pytest.mark.parametrize('judge', [errs(0), errs(.9), soft])   # of weight 1, 0 and between
@pytest.mark.parametrize('n, N', [(12, 40), (60, 500)])
def test_the_estimate_is_that_of_ppi_plus_plus(judge, n, N):
    "Twin by the paper's formulas, for a batch of draws."
    batch = draw(*people_and_judge(.4, judge, (3, N), seed=n), n)
    for y, f, others, value, error, weight in zip(*batch, *ppi_mean(*batch)):
        covariance = np.mean((y - y.mean())*(f - f.mean()))
        variance = np.r_[f, others].var(ddof=1)
        w = np.clip(covariance/(variance*(1 + n/(N - n))), 0, 1)
        assert weight == pytest.approx(w)
        assert value == pytest.approx(w*others.mean() + np.mean(y - w*f))
        want = w*w*others.var()/(N - n) + (y - w*f).var()/n
        assert error**2 == pytest.approx(want)


def test_numbers_of_the_authors_library():
    "Of ppi_python 0.2.3: `ppi_mean_ci` on five labels and six other verdicts, alpha .05."
    value, error, _ = ppi_mean([0., 1, 1, 0, 1], [0., 1, 1, 1, 1], [0., 1, 1, 1, 1, 0])
    half = norm.ppf(.975)*error
    assert value - half == pytest.approx(0.16892292, abs=1e-6)
    assert value + half == pytest.approx(0.95107708, abs=1e-6)


@pytest.mark.parametrize('verdict', [.7, .9, 1])   # whose variance is at most a rounding error
def test_a_judge_that_always_says_the_same_has_no_weight(verdict):
    labels = np.arange(11) % 3 < 1
    value, error, weight = ppi_mean(labels, np.full(11, verdict), np.full(31, verdict))
    assert weight == 0
    assert value == labels.mean()
    assert error == pytest.approx(labels.std()/math.sqrt(11))


@pytest.mark.parametrize('share, least, most', [(.5, 95, 115), (.2, 130, 200), (0, 350, 700)])
def test_worth_is_between_nothing_and_all(share, least, most):
    y, f = people_and_judge(.4, errs(share), (200, 800))
    assert least < np.mean(correct_mean(*draw(y, f, 100)).worth) < most


def test_where_all_is_labelled_no_judge_is_needed():
    y, _ = people_and_judge(.4, errs(0), (30,))
    everything = correct_mean(y, y, y[:0])
    assert everything.rate == everything.labels
    assert everything.worth == pytest.approx(30)


@pytest.mark.parametrize('agreement', [.7, .9])
def test_the_plan_for_two_policies_is_what_200_draws_needed(agreement):
    "The half-width, with as many labels as are forecast for it, with and without the judge."
    within = .04
    rng = np.random.default_rng(0)
    g = (rng.random((200, 6000, 2)) < [.6, .45]).astype(float)
    y = np.where(rng.random(g.shape) < agreement, g, 1 - g)
    assert judge_agreement(g, y) == pytest.approx(agreement, abs=.01)
    plan = plan_labels(g[0], agreement, within)
    def second_over_first(x): return (1 + x[..., 1] - x[..., 0])/2
    def estimate(n):
        return correct_mean(*draw(second_over_first(y), second_over_first(g), math.ceil(n)))
    for interval in (estimate(plan.with_judge).rate, estimate(plan.without).labels):
        assert np.mean(interval.high - interval.low) == pytest.approx(within, rel=.04)
    assert plan.with_judge < plan.without
    assert plan_labels(g[0, :500, 0], agreement).with_judge == math.inf


# labels of people and the answers they belong to

PROMPTS = [dict(instruction=f'Say {i}.', input='' if i % 3 else str(i)) for i in range(80)]
REFERENCES = [dict(p, output=['x'*9, 'y'*(i + 1)]) for i, p in enumerate(PROMPTS)]
MINE = [dict(p, output='o'*(2 + i % 17)) for i, p in enumerate(PROMPTS)]


def label(i, vote, which=0, turned=False, **more):
    "A person's vote for my answer (1) or against (0), on the pair in either order."
    other = REFERENCES[i]['output'][which]
    mine = MINE[i]['output']
    shown = dict(output_1=other, output_2=mine, preference=1 + vote)
    if turned:
        shown = dict(output_1=mine, output_2=other, preference=2 - vote)
    return dict(PROMPTS[i], **shown, annotator='Ann') | more


def file_of(folder, rows, name='labels'): return tiny.write(folder/f'{name}.json', rows)


def match(folder, rows, outputs=MINE, references=REFERENCES):
    return match_labels(file_of(folder, rows), dict(mine=(outputs, references)))['mine']


def test_votes_are_averaged_over_the_pairs_of_an_instruction(tmp_path):
    "Of people, orders and references; an input may be a part of the instruction, as AlpacaEval's."
    rows = [label(i, i % 2, turned=i % 3 == 0, drawn='random') for i in range(11)]
    assert match(tmp_path, rows).drawn == 'random'
    rows[3] |= dict(instruction='Say 3.\n\n3', input='')
    more = [label(0, 1, which=1), label(1, .5, annotator='Bo'), label(4, 0, annotator='Bo')]
    own = match(tmp_path, rows + more)
    want = [.5, .75] + [i % 2 for i in range(2, 11)] + [np.nan]*69
    np.testing.assert_equal(own.votes, want)
    assert own.drawn is None
    assert not own.same.any()


def test_a_judge_compares_the_pairs_that_people_have_labelled(tmp_path):
    "Where a request has others: here people vote as the judge does, on one reference of two or three."
    rows = []
    for i, (mine, reference) in enumerate(zip(MINE[:40], REFERENCES)):
        won = len(mine['output']) - len(reference['output'][0])
        rows.append(label(i, (np.sign(won) + 1)/2, drawn='random'))
    own = match(tmp_path, rows)
    assert judge_agreement(JUDGED[:40] - 1, own.votes[:40]) < .9
    beside = judge_labelled(own, lambda pairs: mean_preferences(longest, pairs))
    np.testing.assert_equal([*beside.judged.values()], 1 + own.votes[:40])
    assert people_win_rate(JUDGED, beside).worth > 1.2*people_win_rate(JUDGED, own).worth
    assert people_difference((JUDGED, beside), (JUDGED, beside)).value == 0

    # the half of an equal answer counts as one of three, whatever is labelled
    thrice = [dict(r, output=[*r['output'], 'o'*(2 + i % 17)]) for i, r in enumerate(REFERENCES)]
    partly = match(tmp_path, rows, references=thrice)
    np.testing.assert_allclose(partly.votes[:40], 1/6 + own.votes[:40]*2/3)
    again = judge_labelled(partly, lambda pairs: mean_preferences(longest, pairs))
    np.testing.assert_allclose([*again.judged.values()], 1 + partly.votes[:40])


def test_the_same_answer_twice_is_a_half_of_the_corrected_rate(tmp_path):
    "And makes no difference between two policies."
    nine = [dict(p, output='x'*9) for p in PROMPTS]
    outputs = [dict(r, output='better' if i % 4 else r['output']) for i, r in enumerate(nine)]
    pair = dict(output_1='x'*9, output_2='better')
    rows = [dict(PROMPTS[i], preference=2 - i % 2, **pair) for i in range(40) if i % 4]
    own = match(tmp_path, rows, outputs, nine)
    judged = preferences_over(outputs, nine, longest)
    rate = people_win_rate(judged, own).rate.value
    assert rate == pytest.approx(.25*50 + .75*100*np.nanmean(own.votes))
    gap = people_difference((judged, own), (judged, own))
    assert gap.value == 0
    assert gap.low == -gap.high


def random_rows(n=40, **more):
    coins = np.random.default_rng(0).random(80)
    return [label(i, int(coins[i] < .6), drawn='random') | more for i in range(0, 80, 80//n)]


@pytest.mark.parametrize('rows, message', [
    (random_rows(input='other'), 'labels on 0 of its 80'),
    (random_rows(8), '8 of its 80 requests')])
def test_too_few_labels_are_named_before_anybody_is_asked(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        match(tmp_path, rows)


JUDGED = preferences_over(MINE, REFERENCES, longest)
ONE_SIDE = [label(i, 1, drawn='random') for i in np.flatnonzero(JUDGED > 1.5)]


@pytest.mark.parametrize('rows, doubt', [
    (random_rows(drawn=None), 'do not say that they were drawn at random'),
    (ONE_SIDE, 'no random draw looks like this'),
    (random_rows(preference=2), 'all 40 labels are equal')])
def test_what_makes_a_correction_doubtful_is_said_and_only_then(tmp_path, rows, doubt):
    def said(rows): return ' '.join(explain_win_rate('m', 'j', JUDGED, match(tmp_path, rows)))
    assert doubt in said(rows)
    assert 'nan' not in said(rows)
    sound = said(random_rows())
    assert doubt not in sound
    assert 'corrected by 40 labels' in sound
    assert 'more than the 80 requests' in sound


def test_labels_of_other_answers_are_told(tmp_path, capsys):
    match(tmp_path, random_rows() + [dict(label(3, 1), instruction='Of another file.')])
    assert "1 of 41 labelled pairs are not among those judged (such as 'Of" in capsys.readouterr().out


def test_labels_on_what_the_judge_left_out_do_not_count(tmp_path):
    own = match(tmp_path, random_rows())
    with pytest.raises(ValueError, match='0 of 40 labelled'):
        people_win_rate(np.full(80, np.nan), own)
    partly = np.where(np.arange(80) % 4 == 0, np.nan, JUDGED)    # on half of the labelled
    assert np.isfinite(people_win_rate(partly, own).rate).all()


# where a user meets it

NAMES = 'reference', 'skilled', 'middling'
SKILLS = .3, .8, .5
POOL = 'alpaca_farm.world:pool'


@pytest.fixture(scope='module')
def answers(tmp_path_factory):
    "Files of answers by authors of the embedded world to 90 instructions."
    folder = tmp_path_factory.mktemp('answers')
    rng = random.Random(0)
    authors = [world.Author(skill) for skill in SKILLS]
    rows = {}
    while len(rows) < 90:
        spec = world.sample_request(rng)
        prompt = world.render(spec)
        rows[prompt['instruction']] = [dict(prompt, output=a.answer(spec, rng)) for a in authors]
    for name, said in zip(NAMES, zip(*rows.values())):
        file_of(folder, said, name)
    return folder


def file_for(answers, name): return str(answers/f'{name}.json')


def crowd_labels(answers, outputs, folder, against='reference'):
    "The file of a labelling run: one of the crowd labels 30 pairs that are drawn, on the page."
    cfg = labelling.LabellingConfig(
        out=str(folder/f'labels_{outputs}'), outputs=file_for(answers, outputs), draw=30,
        against=file_for(answers, against), store=str(folder/'l.sqlite'))
    pairs = labelling.pairs_to_label(cfg)
    queue = labelling.LabellingQueue(pairs, Store(cfg.store), 'Ann')
    page = labelling.LabellingPage(queue, key_delay=0)
    person = world.crowd.annotators[0]
    while page.pair:
        vote, = person([page.pair])
        page.buttons['2' if vote > 1.5 else '1'].click()
    labelling.run(cfg)
    return f'{cfg.out}/preferences.json'


def test_a_board_is_corrected_by_labels_of_two_policies(answers, tmp_path, capsys):
    "From draws over labelling pages to the columns of the board, and the paired difference."
    mine = 'skilled', 'middling'
    rows = []
    for name in mine:
        rows += read_json(crowd_labels(answers, name, tmp_path))
    assert [r['drawn'] for r in rows] == ['random']*60
    labels = file_of(tmp_path, rows)
    reference = file_for(answers, 'reference')
    out = tmp_path/'out'
    ev.run(ev.EvalConfig(
        out=str(out), reference=reference, annotators=[POOL], labels=labels,
        outputs=[file_for(answers, name) for name in mine]))
    assert 'middling minus skilled' in capsys.readouterr().out
    judged = read_json(out/'preferences.json')['pool']
    one, two = (np.array(judged[name]) for name in mine)
    answered = {name: (read_json(file_for(answers, name)), read_json(reference)) for name in mine}
    skilled, middling = match_labels(labels, answered).values()

    board = pd.read_csv(out/'leaderboard.csv').set_index('method')
    assert not board.filter(regex='corr|label|worth').isna().any(axis=None)
    c = people_win_rate(one, skilled)
    found = board.loc['skilled'][['corrected', 'corrected_low', 'corrected_high', 'labels_alone',
                                  'worth', 'n_labels']]
    assert found.tolist() == pytest.approx([*c.rate, c.labels.value, c.worth, 30], abs=1e-3)
    itself = board.loc['reference']
    assert itself[['corrected', 'corrected_low', 'n_labels']].tolist() == [50, 50, 0]
    said = ' '.join(read_json(out/'corrections.json'))
    assert f'corrected by 30 labels {c.rate.value:.1f}' in said
    assert '+-5 points' in said
    assert read_summary(out)['skilled_corrected'] == pytest.approx(c.rate.value, abs=1e-3)

    f = (1 + two - one)/2
    y = (1 + middling.votes - skilled.votes)/2
    has = ~np.isnan(y)
    assert has.sum() == 30           # one draw of instructions for both
    gap = people_difference((one, skilled), (two, middling))
    assert gap.value == pytest.approx(200*ppi_mean(y[has], f[has], f[~has])[0] - 100)
    assert gap.low < gap.value < gap.high


def test_compare_takes_labels(answers, tmp_path, capsys):
    folders = []
    for name in ('middling', 'skilled'):
        folder = tmp_path/name
        folder.mkdir()
        folders.append(str(folder))
        config = dict(notebook='sft', settings=dict(out=name), fingerprint=name, inputs={})
        file_of(folder, read_json(file_for(answers, name)), 'outputs')
        file_of(folder, config, 'config')
        file_of(folder, {}, 'summary')
    labels = crowd_labels(answers, 'skilled', tmp_path, against='middling')
    out = tmp_path/'out'
    compare.run(compare.CompareConfig(out=str(out), labels=labels, folders=folders, annotators=POOL))
    row = pd.read_csv(out/'win_rates.csv').iloc[0]
    assert row.corrected_low < row.corrected < row.corrected_high
    assert row.n_labels == 30
    assert 'skilled over middling' in capsys.readouterr().out
    assert 'skilled_over_middling_corrected' in read_summary(out)


def test_compare_leaves_out_a_request_without_a_verdict(capsys):
    def silent(pairs): return [np.nan if p['instruction'] == 'Say 3.' else v
                               for p, v in zip(pairs, longest(pairs))]
    row, = compare._win_rate_table(dict(a=REFERENCES, b=MINE), silent).to_dict('records')
    assert row['instructions'] == 79
    assert row['win_rate'] == pytest.approx(100*np.delete(JUDGED - 1, 3).mean())
    assert 'b over a: no label on 1 of 80 requests' in capsys.readouterr().out


def test_a_farm_takes_labels_of_some_of_its_rows(answers, tmp_path):
    labels = crowd_labels(answers, 'skilled', tmp_path, against='middling')
    sft = load_records(file_for(answers, 'middling'), kind='output')
    dpo = load_records(file_for(answers, 'skilled'), kind='output')
    ppo = [dict(r, output='No.') for r in sft]
    labelled = {r['instruction'] for r in read_json(labels)[:3]}
    rloo = [mine if mine['instruction'] in labelled else other for mine, other in zip(dpo, ppo)]
    rows = dict(sft=sft, dpo=dpo, ppo=ppo, rloo=rloo)
    found = _people_labels(labels, rows)
    assert np.isfinite(found['dpo'].votes).sum() == 30
    assert _people_labels(labels, dict(sft=sft, ppo=ppo, rloo=rloo)) == {}

    judged = judge_all(rows, sft, dict(longest=longest))
    board = leaderboard(judged, rows, 'sft', labels=found).set_index('method')
    assert board.loc['sft', ['corrected', 'corrected_low', 'n_labels']].tolist() == [50, 50, 0]
    assert board.loc['dpo', 'n_labels'] == 30
    unlabelled = board.loc[['ppo', 'rloo']]
    assert unlabelled.filter(regex='corrected|alone|worth').isna().all(axis=None)
    assert unlabelled.n_labels.tolist() == [0, 3]
    leaderboard_figure(board.reset_index())


def test_a_draw_is_random_and_says_so(tmp_path):
    "And takes all pairs of a request."
    pairs = [dict(r, output_1='a', output_2='b') for r in PROMPTS]
    file = file_of(tmp_path, pairs)
    def drawn(n, seed=0):
        return labelling.pairs_to_label(labelling.LabellingConfig(outputs=file, draw=n, seed=seed))
    def asked(pairs): return [r['instruction'] for r in pairs]
    some = drawn(30)
    assert {*asked(some)} != {*asked(drawn(30, seed=1))}
    assert {r['drawn'] for r in some} == {'random'}
    places = [asked(pairs).index(text) for text in asked(some)]
    assert places != sorted(places)
    file_of(tmp_path, [dict(p, output_2=end) for p in pairs for end in '!?'])
    assert len(drawn(30)) == 60


# people's labels of public data

def public(name, folder):
    "A judge's preferences of labelled pairs in all orders that it has, and people's mean votes."
    sets = load_sets([f'{DATA}/{name}/{dict(pandalm="testset-v1", llmbar="LLMBar_*")[name]}.json'])
    if name == 'pandalm': found = pandalm_verdicts(DATA/name)
    else:
        file = llmbar_verdicts(DATA/name, 'Metrics_Reference', folder)
        found, = recorded_verdicts(file, 'GPT-4 *', sets).values()
    pairs, = sets.values()
    return found.preferences[0, found.shown.any(1)].mean(0), np.nanmean(people_votes(pairs), 0)


WORTH = dict(pandalm=1.44, llmbar=1.85)   # of a label, in labels


@pytest.mark.skipif(not (DATA/'pandalm').exists(), reason='no public labels')
@pytest.mark.parametrize('n', [50, 100])
@pytest.mark.parametrize('data', WORTH)
def test_labels_of_public_data_are_recovered_from_a_part(tmp_path, data, n):
    "A judge's rate corrected by a part of the labels is that of all of them, 500 draws."
    judge, people = public(data, tmp_path)
    known = ~np.isnan(judge + people)
    f = judge[known] - 1
    y = people[known] - 1
    order = np.argsort(np.random.default_rng(0).random((500, len(y))), axis=1)
    c = correct_mean(*draw(y[order], f[order], n))
    error = c.rate.value - y.mean()
    covered = (c.rate.low <= y.mean()) & (y.mean() <= c.rate.high)
    assert abs(error.mean()) < 4*error.std()/math.sqrt(500)
    assert covered.mean() > .93
    assert abs(error.mean()) < abs(f.mean() - y.mean())     # the judge's own error
    assert np.median(c.worth)/n == pytest.approx(WORTH[data], abs=.15)


def half_equal(rng, rate=.9, requests=805, labels=200, errors=.15):
    "A judge's preferences and people's labels where half of the answers are the same."
    same = rng.random(requests) < .5
    vote = (rng.random(requests) < rate).astype(float)
    judged = np.where(rng.random(requests) < errors, 1 - vote, vote)
    votes = np.full(requests, np.nan)
    drawn = rng.choice(np.flatnonzero(~same), labels, replace=False)
    votes[drawn] = vote[drawn]
    return np.where(same, 1.5, 1 + judged), PeopleLabels(votes, 'random', same)


def test_an_interval_with_equal_answers_is_about_all_requests_of_the_kind():
    "The win rate of all such requests is 100 (.5 x .5 + .5 x .9); the share of equal ones varies."
    rng = np.random.default_rng(0)
    found = [people_win_rate(*half_equal(rng)).rate for _ in range(400)]
    held = [i.low <= 70 <= i.high for i in found]
    assert np.mean(held) == pytest.approx(.95, abs=.03)


def test_answers_that_both_policies_share_with_the_reference_are_no_labels():
    "Half of the answers are equal; where they differ, people and judge always prefer the second."
    same = np.arange(100) % 2 == 0
    votes = np.where(same | (np.arange(100) > 60), np.nan, 1.)
    def policy(vote): return np.where(same, 1.5, 1 + vote), PeopleLabels(vote*votes, None, same)
    found = people_difference(policy(0), policy(1))
    assert found.value == pytest.approx(50) and found.low < 50 < found.high


def test_a_forecast_of_labels_counts_no_equal_answers():
    "As many labels as it names suffice, and are labels of different answers alone."
    rng = np.random.default_rng(1)
    report = explain_win_rate('mine', 'judge', *half_equal(rng, requests=1600, errors=.1))
    assert not any('no random draw' in line for line in report)
    (needed,) = [int(line.split(' take ')[1].split()[0]) for line in report if '+-2 points' in line]
    widths = []
    for _ in range(20):
        low, high = people_win_rate(*half_equal(rng, .9, 1600, needed, errors=.1)).rate[1:]
        widths.append((high - low)/2)
    assert 1.5 < np.mean(widths) < 2.05


def test_a_row_with_labels_and_few_verdicts_is_not_corrected():
    "As one with few labels; a label without a verdict is not counted."
    rng = np.random.default_rng(2)
    preferences, people = half_equal(rng, requests=100, labels=20)
    labelled = np.flatnonzero(~np.isnan(people.votes))
    preferences[labelled[:12]] = np.nan
    columns = label_columns(preferences, people)
    assert columns['n_labels'] == 8
    assert math.isnan(columns['corrected'])


def test_a_forecast_for_a_difference_counts_no_equal_answers():
    "With nine of ten answers equal it takes a small part of the labels, and not more than there are."
    rng = np.random.default_rng(3)
    needed = []
    for equal in (0., .9):
        same = rng.random(12000) < equal
        judged, labels = {}, {}
        for name in 'ab':
            vote = (rng.random(12000) < .6).astype(float)
            judged[name] = np.where(same, 1.5, 1 + np.where(rng.random(12000) < .2, 1 - vote, vote))
            votes = np.where(same | (np.arange(12000) > 6000), np.nan, vote)
            labels[name] = PeopleLabels(votes, 'random', same)
        plan, = [line for line in explain_differences(judged, labels) if 'b minus a: +-2' in line]
        needed.append(int(plan.split(' take ')[1].split()[0]))
    assert needed[1] < needed[0]/5


def test_compare_stops_where_the_labelled_pairs_are_not_answered(answers, tmp_path, monkeypatch):
    "As a board does: the budget ended at the pairs that people labelled."
    def refuse(judge, what):
        if 'labelled pairs' in what: raise ValueError(f'{what}: the budget of $1 is reached')
    monkeypatch.setattr(compare, 'check_all_answered', refuse)
    pair = dict(instruction='Say.', input='', output_1='a', output_2='b')
    known = PeopleLabels(np.ones(80), 'random', np.zeros(80, bool), {0: ([pair], 0.)})
    monkeypatch.setattr(compare, 'match_labels', lambda *_: {'b over a': known})
    with pytest.raises(ValueError, match='1 labelled pairs'):
        compare._win_rate_table(dict(a=REFERENCES, b=MINE), lambda pairs: [1.]*len(pairs), labels='x')


def test_compare_refuses_a_run_that_is_named_twice(tmp_path):
    with pytest.raises(ValueError, match='each once'):
        compare.CompareConfig(folders=[str(tmp_path)]*2)
