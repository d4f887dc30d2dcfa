"Agreement of judges with people: formats, joins, measures by loops, and published anchors."
import itertools
import math

import numpy as np
import pandas as pd
import pytest

import tiny
from alpaca_farm import world
from alpaca_farm.boards import agreement as A
from alpaca_farm.data.pairs import swap_outputs
from alpaca_farm.judging.judges import read_recorded
from alpaca_farm.judging.label_files import load_sets, recorded_verdicts
from alpaca_farm.judging.measures import cast_votes, judge_measures, pair_traits, people_votes
from alpaca_farm.judging.pools import annotator_preferences
from alpaca_farm.judging.stats import wilson
from alpaca_farm.run.files import read_json
from alpaca_farm.world import embedded_pairs
from asking import key
from judge_server import judge_server
from published import llmbar_verdicts, pandalm_verdicts

DATA = tiny.ROOT.parent/'shared'/'data'
with_data = pytest.mark.skipif(not DATA.is_dir(), reason='the public data is not here')
CFG = A.AgreementConfig()
LONGEST = 'alpaca_farm.boards.agreement:prefer_longer'


def published(row, *fields):
    "Measures of a row of the board, in the published number of digits."
    return [round(getattr(row, field), 3) for field in fields]


@with_data
def test_pandalm():
    "Left out, its 25 unreadable answers give another number than counted as ties, as published."
    sets = A.load_sets([f'{DATA}/pandalm/testset-v1.json'])
    said = {('testset-v1', 'GPT-3.5'): pandalm_verdicts(DATA/'pandalm')}
    people, judge = A.agreement_board(sets, said, draws=20).itertuples()
    assert judge.n == 999
    assert judge.n_decided == 894
    assert judge.n_unanswered == 25
    assert published(judge, 'accuracy', 'decided') == [.716, .785]
    assert published(people, 'pairwise') == [.92]
    (which, verdicts), = said.items()
    unread = np.isnan(verdicts.preferences) & verdicts.shown
    ties = verdicts._replace(preferences=np.where(unread, 1.5, verdicts.preferences))
    judge = A.agreement_board(sets, {which: ties}, draws=10).iloc[1]
    assert published(judge, 'accuracy', 'decided') == [.711, .774]


def one_vote(given, orders):
    "A judge that was asked about each pair in one order, as votes: (1, 2, pairs)."
    votes = np.full((1, 2, len(given)), np.nan)
    votes[0, orders, np.arange(len(given))] = given
    return votes


def test_a_vote_is_not_copied_and_counts_whichever_order_was_asked():
    "Of two votes, one differs from the other in 2 x .8 x .2 of the pairs."
    rng = np.random.default_rng(0)
    pairs = [dict(instruction=str(i), input='', output_1='a', output_2='b') for i in range(2000)]
    traits = pair_traits(pairs)
    people = rng.choice([1., 2.], (4, 2000))
    twice = 1. + (rng.random((1, 2, 2000)) < .8)
    assert judge_measures(twice, people, traits)['variance'] == pytest.approx(.32, abs=.03)
    contrary = 3 - people[0]
    stored, exchanged, either = (judge_measures(one_vote(contrary, orders), people, traits)
                                 for orders in (0, 1, rng.integers(2, size=2000)))
    assert math.isnan(stored['variance'])
    assert stored['alpha'] < -.05
    assert exchanged['alpha'] == either['alpha'] == stored['alpha']


@with_data
def test_llmbar(tmp_path):
    sets = A.load_sets([f'{DATA}/llmbar/LLMBar_Natural.json',
                        f'{DATA}/llmbar/LLMBar_Adversarial_*.json'])
    file = llmbar_verdicts(DATA/'llmbar', 'Vanilla', tmp_path)
    said = A.verdicts_of_judges([file], sets, CFG)
    row = A.agreement_board(sets, said, draws=10).set_index(['set', 'judge']).loc
    table = dict(LLMBar_Natural=(.955, .815, .805), LLMBar_Adversarial=(.810, .270, .329))
    for name, figures in table.items():
        for judge, figure in zip(('GPT-4', 'ChatGPT', 'LLaMA2'), figures):
            assert row[name, f'{judge} Vanilla'].accuracy == pytest.approx(figure, abs=5e-4)
    assert row['LLMBar_Adversarial', 'LLaMA2 Vanilla'].n_unanswered == 2


@with_data
def test_alpaca_eval_annotations_are_read_on_both_sides():
    own = f'{DATA}/alpaca_eval/alpaca-7b/annotations_ae1.json'
    theirs = f'{DATA}/alpaca_eval/alpaca-7b/annotations_ae2.json'
    sets = A.load_sets([own])
    votes = [v for p in sets['annotations_ae1'] for v in p['votes'].values()]
    assert votes.count(1.5) == 16   # stored as 0
    said, = A.verdicts_of_judges([own], sets, CFG).values()
    prices = [r['price_per_example'] for r in read_json(own)]
    assert said.price == pytest.approx(1000*np.mean([p for p in prices if p is not None]))
    itself = A.agreement_board(sets, {('annotations_ae1', 'itself'): said}, draws=10).iloc[1]
    assert itself.accuracy == 1
    assert itself.n_unanswered == 0
    with pytest.raises(ValueError, match='soft label'):
        A.load_sets([theirs])


def unread(shown): return [math.nan if i % 6 else 1. for i in range(len(shown))]
def half(shown): return [math.nan if i % 2 else 1. for i in range(len(shown))]


PAIR = dict(instruction='q', output_1='a', output_2='b')


def test_a_judge_that_leaves_most_unread_is_left_out(capsys):
    "83 % of its comparisons: those that it answered say nothing about the others."
    sets = dict(s=embedded_pairs(60))
    said = A.verdicts_of_judges([f'{__name__}:unread', f'{__name__}:half', LONGEST], sets, CFG)
    assert [name for _, name in said] == ['half', 'longest']
    told = capsys.readouterr().out
    assert 'unread on s: left out' in told
    assert 'half: no label on 60 of 120' in told
    with pytest.raises(ValueError, match='no pair to measure'):
        A.verdicts_of_judges([f'{__name__}:unread'], sets, CFG)


def labelled(pairs, label, name=lambda i: 'Ann'):
    "Preference records of pairs, without their votes."
    rows = []
    for i, p in enumerate(pairs):
        row = {k: p[k] for k in ('instruction', 'input', 'output_1', 'output_2')}
        rows.append(dict(row, preference=float(label(p)), annotator=name(i)))
    return rows


def write(folder, rows):
    tiny.write(folder/'preferences.json', rows)
    return str(folder)


def longest(pair): return A.prefer_longer([pair])[0]
def first_vote(pair): return pair['votes']['vote 1']
def by_longest(i): return 'longest'
def by_bo(i): return 'Bo'
def by_three(i): return f'judge {i % 3}'


def test_a_second_judge_of_the_same_name_is_refused(tmp_path):
    "Such as a file of its own labels."
    pairs = embedded_pairs(40)
    file = write(tmp_path/'run', labelled(pairs, longest, by_longest))
    with pytest.raises(ValueError, match='second judge called longest'):
        A.verdicts_of_judges([LONGEST, file], dict(s=pairs), CFG)


@pytest.mark.slow
def test_agreement_counts_pairs_with_two_votes_and_says_how_many(tmp_path, capsys):
    "One person's votes and two of another: agreement is of two pairs, and has no interval."
    pairs = embedded_pairs(60)
    rows = labelled(pairs, first_vote) + labelled(pairs[:2], first_vote, by_bo)
    labels = write(tmp_path/'labels', rows)
    out = tmp_path/'out'
    A.run(A.AgreementConfig(out=str(out), sets=[labels], judges=[LONGEST], draws=20))
    assert 'labels: 2 of 60 pairs have two votes' in capsys.readouterr().out
    board = pd.read_csv(out/'leaderboard.csv')
    assert board.n.tolist() == [60, 60]
    assert board.n_agreement.tolist() == [2, 2]
    assert board.agreement[0] == 1
    assert board.agreement_low.isna().all()
    assert not math.isnan(board.accuracy_low[1])
    full = A.agreement_board(dict(s=pairs), {}, draws=20).iloc[0]
    assert full.n_agreement == 60
    assert full.agreement_low < full.agreement


def opposite(rows): return [dict(r, preference=3 - r['preference']) for r in rows]
def turned(rows): return [swap_outputs(r) for r in opposite(rows)]


AGAIN = dict(same=(list, 'repeat'), other=(opposite, 'differ from'), turned=(turned, 'repeat'))


@pytest.mark.parametrize('again', AGAIN)
@pytest.mark.parametrize('form', ['annotator', 'annotator_index', 'judge', 'completed_by', 'votes'])
def test_a_vote_that_stands_twice_in_a_file_is_one_persons(tmp_path, capsys, form, again):
    "As in an export with each annotation twice: nobody agrees with themselves."
    rows = []
    for i in range(12):   # two persons who never agree
        asked = PAIR | dict(instruction=f'q{i}')
        rows.append(asked | dict(preference=1. + i % 2, annotator='person 0'))
        rows.append(asked | dict(preference=2. - i % 2, annotator='person 1'))
    repeat, said = AGAIN[again]
    def named(r):
        if form == 'votes':
            return r | dict(votes={r['annotator']: r['preference']})
        return {form if k == 'annotator' else k: v for k, v in r.items()}
    def measured(rows):
        sets = A.load_sets([tiny.write(tmp_path/f'{len(rows)}.json', [named(r) for r in rows])])
        people = A.agreement_board(sets, {}, draws=10).iloc[0]
        return people[['n', 'n_agreement', 'agreement', 'pairwise', 'alpha']].tolist()
    once = measured(rows)
    assert once[3] == 0
    assert measured(rows + repeat(rows)) == once
    assert f'24 votes {said}' in capsys.readouterr().out


def test_measures_of_a_part_are_those_of_the_part_alone(tmp_path, capsys):
    "A pool's labels of 60 pairs, people's of 30, 20 in common, some in the other order."
    pairs = embedded_pairs(70)
    voted = labelled(pairs[40:], first_vote)
    voted[1::2] = turned(voted[1::2])
    sets = A.load_sets([write(tmp_path/'people', voted)])
    pool = write(tmp_path/'pool', labelled(pairs[:60], longest, by_three))
    verdicts, = A.verdicts_of_judges([pool], sets, CFG).values()
    said = capsys.readouterr().out
    assert '20 of 30 labelled pairs have a verdict' in said
    assert '20 of 60' in said
    used = verdicts.shown.any(0)
    fields = 'preferences', 'unanswered', 'shown'
    parts = {k: getattr(verdicts, k)[..., used] for k in fields}
    def measured(pairs, verdicts):
        said = {('people', 'pool'): verdicts}
        return A.agreement_board(dict(people=pairs), said, draws=20).iloc[1]
    part = measured([p for p, s in zip(sets['people'], used) if s], verdicts._replace(**parts))
    whole = measured(sets['people'], verdicts)
    assert whole.n == 20
    for k in ('accuracy', 'alpha', 'longer_diff', 'accuracy_low', 'n', 'n_decided'):
        assert whole[k] == pytest.approx(part[k], nan_ok=True), k


@pytest.fixture
def server():
    with judge_server() as server:
        yield server


def paid(tmp_path, server, **more):
    (tmp_path/'prices.yaml').write_text('judge: [1000, 1000]')
    return A.AgreementConfig(
        judges=['chatgpt'], models=['gpt-3.5-turbo-0301=judge'], base_url=server.url,
        out=str(tmp_path/'out'), store=str(tmp_path/'answers.sqlite'),
        prices=str(tmp_path/'prices.yaml'), sets=['alpaca_farm.world:embedded_pairs'],
        max_instances=20, draws=10, **more)


@pytest.mark.parametrize('chances', [[.8], [.8, .6], [.9, .7, .6], [.8, .65, .7, .6]])
def test_votes_of_few_unsure_judges_beside_all_votes_there_could_be(chances):
    "Four votes, by turns in a random order; people all prefer the second answer."
    pair = dict(input='', output_1='a', output_2='b', votes=dict.fromkeys('ABC', 2.))
    pairs = [dict(pair, instruction=f'Say {i}.') for i in range(6000)]
    given = np.empty((len(chances), 2, len(pairs)))
    given[:] = 1 + np.array(chances)[:, None, None]
    found = judge_measures(cast_votes(given, pairs), people_votes(pairs), pair_traits(pairs))
    missed = []
    errors = []
    for order in itertools.permutations(chances):
        for votes in itertools.product((0, 1), repeat=4):
            four = zip(votes, itertools.cycle(order))
            weight = math.prod(p if vote else 1 - p for vote, p in four)
            missed.append(weight*(1 - (np.sign(sum(votes) - 2) + 1)/2))
            differ = [vote != (sum(votes) - vote > 1.5) for vote in votes]
            errors.append(weight*np.mean(differ))
    orders = math.factorial(len(chances))
    assert found['bias'] == pytest.approx(sum(missed)/orders, abs=.02)
    assert found['variance'] == pytest.approx(sum(errors)/orders, abs=.02)
    assert found['accuracy'] == pytest.approx(np.mean(chances), abs=.02)


def test_a_judge_behind_an_endpoint_has_a_price_and_a_time(tmp_path, server):
    sets = dict(s=embedded_pairs(12))
    said, = A.verdicts_of_judges(['chatgpt'], sets, paid(tmp_path, server)).values()
    assert said.how == 'live'
    assert said.preferences.shape == (1, 2, 12)
    assert {*said.preferences.ravel()} <= {1., 2.}
    assert said.price > 0
    assert said.time > 0


def test_a_reached_budget_is_no_result(tmp_path, server):
    "The run stops, what was answered is stored, and the next run asks for the rest alone."
    with pytest.raises(ValueError, match='chatgpt, 20 pairs in both orders: .*budget'):
        A.run(paid(tmp_path, server, budget=1.))
    assert 0 < len(server.requests()) < 40
    assert not (tmp_path/'out'/'leaderboard.csv').exists()
    A.run(paid(tmp_path, server))
    assert len(server.requests()) == 40


def test_a_judge_is_not_measured_on_what_it_has_learned_from(capsys, monkeypatch):
    "Of one pair it is left out, and altogether where it has learned from all of them."
    pairs = embedded_pairs(12)
    keys = [A.prompt_key(p) for p in pairs]
    judges = dict(world=world.judge, longer=A.prefer_longer)
    learned = dict(world={keys[0]}, longer={*keys})
    monkeypatch.setattr(A, 'load_annotators', lambda spec, cfg: judges[spec])
    monkeypatch.setattr(A, '_learned_prompts', learned.get)
    said = A.verdicts_of_judges(['world', 'longer'], dict(s=pairs), CFG)
    verdicts = said['s', world.judge.name]
    assert len(said) == 1
    assert verdicts.shown.all(0).tolist() == [k != keys[0] for k in keys]
    assert '12 of 12 pairs are left out' in capsys.readouterr().out
    with pytest.raises(ValueError, match='no pair to measure'):
        A.verdicts_of_judges(['longer'], dict(s=pairs), CFG)


# what is wrong or odd in a file

LABEL = PAIR | dict(preference=1, annotator='j', input='', price=.1, time=1)
GOOD = dict(   # rows by what is read
    labels=[
        PAIR | dict(preference=1, annotator='j', input='', idx=1, generator_1='m'),
        PAIR | dict(votes=dict(p=1)),
        dict(input='q', output_1='a', output_2='b', label=1),
        dict(idx=1, instruction='q', input='', response1='a', response2='b', annotator1=1)],
    recorded=[PAIR | dict(preference=1, input='')],
    verdicts=[LABEL])
TOY = dict(s=[PAIR | dict(votes=dict(p=1))])


def read_labels(file): return A.load_sets([file])
def read_verdicts(file): return recorded_verdicts(file, '', TOY)


READ = dict(labels=read_labels, recorded=read_recorded, verdicts=read_verdicts)
CASES = [('verdicts', LABEL, LABEL | dict(price='x'), 'price')]
for kind, rows in GOOD.items():   # what is read, a good row, a wrong one, and what names the fault
    for good in rows:
        CASES += [(kind, good, 7, 'record'), (kind, good, None, 'record')]
        for field in good:
            dialogue = field == 'instruction' and 'output_1' in good   # a list would be one
            value = None if dialogue else [1]
            CASES.append((kind, good, good | {field: value}, f"'{field}'"))


@pytest.mark.parametrize('kind, good, wrong, name', CASES)
def test_a_wrong_value_names_file_row_and_field(tmp_path, kind, good, wrong, name):
    "In one line, whatever the format: labelled pairs, a judge's verdicts, labels as an annotator."
    file = tiny.write(tmp_path/'some.json', [good, wrong])
    with pytest.raises(ValueError) as e:
        READ[kind](file)
    assert f'{file}, row 1' in str(e.value)
    assert name in str(e.value)
    assert '\n' not in str(e.value)


def voted(vote=1, who='Ann', **more): return PAIR | dict(preference=vote, annotator=who) | more
def asked_in(row, **more): return {k: v for k, v in row.items() if k != 'instruction'} | more


TURNS = [dict(role='user', content='p'), dict(role='assistant', content='r'),
         dict(role='user', content='q')]
SEA = 'The sea is deep.'
ODD_SETS = {   # rows, and the votes on each pair
    'label': ([voted(who='p', input='sea', label=2)], [dict(p=1)]),
    'case': ([voted(), voted(who='ann')], [dict(Ann=1, ann=1)]),
    'swapped': ([voted(swapped=True), voted(2, 'Bo', shown_swapped='True')], [dict(Ann=1, Bo=2)]),
    'not swapped': ([voted(swapped=False)], [dict(Ann=1)]),
    'passage': ([voted(input='word', passage=SEA)], [dict(Ann=1)]),
    'read passage': ([voted(passage=SEA)], [dict(Ann=1)]),
    'images': ([voted(images=['a.png'])], [dict(Ann=1)]),
    'prompt': ([asked_in(voted(2), prompt='q'), asked_in(voted(2, 'Bo'), prompt='q')],
               [dict(Ann=2, Bo=2)])}
REPEATED = {   # two rows of one person, or of one who was left out; what is said
    'space': ([voted(), voted(who='Ann ')], '1 votes repeat'),
    'names of votes': ([PAIR | dict(votes={'Ann ': 1}), PAIR | dict(votes=dict(Ann=1))],
                       '1 votes repeat'),
    'number': ([voted(who=1), voted(who='1.0')], '1 votes repeat'),
    'discarded': ([voted(), voted(2, 'Bo', status='discarded')], '1 votes were discarded'),
    'cancelled': ([voted(), voted(2, 'Bo', was_cancelled=True)], '1 votes were discarded'),
    'dialogue': ([voted(messages=TURNS), asked_in(voted(2, messages=TURNS))], '1 votes differ'),
    'answered dialogue': ([voted(messages=TURNS[2:] + TURNS[1:2]), voted()], '1 votes repeat'),
    'one turn': ([voted(messages=TURNS[2:]), voted()], '1 votes repeat')}


@pytest.mark.parametrize('name', ODD_SETS)
def test_odd_sets_are_read_as_meant(tmp_path, capsys, name):
    rows, votes = ODD_SETS[name]
    file = tiny.write(tmp_path/'odd.json', rows)
    pairs = A.load_sets([file])['odd']
    assert [p['votes'] for p in pairs] == votes
    assert capsys.readouterr().out == ''
    assert recorded_verdicts(file, '', dict(s=pairs))


@pytest.mark.parametrize('name', REPEATED)
def test_a_vote_that_counts_once_is_told(tmp_path, capsys, name):
    rows, told = REPEATED[name]
    pair, = A.load_sets([tiny.write(tmp_path/'odd.json', rows)])['odd']
    assert len(pair['votes']) == 1
    assert told in capsys.readouterr().out


@pytest.mark.parametrize('row, message', [
    (voted(status='discarded'), 'discarded'),
    (voted(messages=TURNS, instruction='x'), 'row 0: .*`messages`')])
def test_a_set_whose_votes_cannot_be_read_is_refused(tmp_path, row, message):
    with pytest.raises(ValueError, match=f'{message}[^\n]*$'):
        A.load_sets([tiny.write(tmp_path/'odd.json', [row])])


def test_a_judge_cannot_move_the_pairs():
    pairs = embedded_pairs(6)
    before = list(pairs)
    def sorting(shown):
        shown.sort(key=lambda p: p['output_1'])
        return [1.]*len(shown)
    annotator_preferences(pairs, sorting)
    assert all(a is b for a, b in zip(pairs, before))


def in_order(shown): return pd.Series([1., 2, 1, 2, 1, 2])
def moved(shown): return pd.Series([1., 2, 1, 2, 1, 2], index=[3, 0, 1, 2, 5, 4])
def test_verdicts_whose_order_is_unknown_are_refused():
    pairs = embedded_pairs(6)
    assert annotator_preferences(pairs, in_order).tolist() == [1, 2, 1, 2, 1, 2]
    with pytest.raises(ValueError, match='index'):
        annotator_preferences(pairs, moved)


def first_shown(shown): return [1.]*len(shown)
def test_alpha_is_the_same_in_whichever_order_a_file_has_the_answers():
    "Of a judge who always prefers what is shown first."
    pairs = [dict(p, votes=dict(a=1 + i % 2, b=1.)) for i, p in enumerate(embedded_pairs(60))]
    found = []
    for rows in pairs, [swap_outputs(p) | dict(votes={k: 3 - v for k, v in p['votes'].items()}) for p in pairs]:
        preferences = np.stack([first_shown(rows), 3 - np.array(first_shown(rows))])[None]
        measures = judge_measures(cast_votes(preferences, rows), people_votes(rows), pair_traits(rows))
        found.append(measures['alpha'])
    assert found[0] == pytest.approx(found[1])


def test_a_person_is_not_compared_with_their_own_votes(tmp_path):
    "Labellers who vote at random agreed with the people, themselves among them, in 85 %."
    rng = np.random.default_rng(0)
    rows = []
    for i in range(300):
        pair = dict(instruction=f'{i}?', output_1='a', output_2='b')
        rows += [dict(pair, preference=int(rng.integers(1, 3)), annotator=who) for who in 'xyz']
    file = tiny.write(tmp_path/'labels.json', rows)
    sets = load_sets([file])
    board = A.agreement_board(sets, A.verdicts_of_judges([file], sets, None), draws=10)
    people, *judges = board.to_dict('records')
    assert people['n_agreement'] == 300
    assert [judge['judge'] for judge in judges] == [*'xyz']
    for judge in judges: assert .4 < judge['accuracy'] < .6


def test_nobody_is_paid_to_compare_equal_answers():
    "A judge that takes the first of two was as inconsistent on them as on others."
    asked = []
    def first(pairs):
        asked.extend(pairs)
        return [1.]*len(pairs)
    pairs = [dict(instruction='q', input='', output_1='a', output_2=text) for text in 'ab']
    found = A.ask_judge(first, pairs)
    assert found.preferences[0].T.tolist() == [[1.5, 1.5], [1., 2.]]
    assert [p['output_1'] for p in asked] == ['a', 'b']


def test_a_share_of_few_pairs_has_the_interval_of_few():
    "In three of 200 pairs a single answer has a list, and it always wins."
    pairs = [dict(instruction=f'Say {i}.', input='', output_1='No.', output_2='Yes.',
                  votes=dict(Ann=1. + i % 2)) for i in range(200)]
    for pair in pairs[:3]: pair.update(output_2='1. a\n2. b', votes=dict(Ann=2.))
    board = A.agreement_board(dict(toy=pairs), {}, draws=20)
    assert [*board[['list', 'list_low', 'list_high']].iloc[0]] == pytest.approx([*wilson(3, 3)])
