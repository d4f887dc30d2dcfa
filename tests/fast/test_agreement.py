"Agreement of judges with people: formats, joins, measures by loops, and published anchors."
import csv
import gzip
import json
import math

import numpy as np
import pandas as pd
import pytest

import tiny
from alpaca_farm import world
from alpaca_farm.boards import agreement as A
from alpaca_farm.data.dialogues import dialogue_text
from alpaca_farm.data.pairs import hash_uniform, swap_outputs
from alpaca_farm.judging import measures as M
from alpaca_farm.judging.judges import read_recorded
from alpaca_farm.judging.label_files import recorded_verdicts
from alpaca_farm.judging.pools import annotator_preferences
from alpaca_farm.run.runs import read_summary
from alpaca_farm.world import embedded_pairs
from asking import key
from judge_server import judge_server

DATA = tiny.ROOT.parent/'shared'/'data'
with_data = pytest.mark.skipif(not DATA.is_dir(), reason='the public data is not here')
CFG = A.AgreementConfig()
LONGEST = 'alpaca_farm.boards.agreement:prefer_longer'


@with_data
def test_pandalm():
    "Left out, its 25 unreadable answers give another number than counted as ties, as published."
    sets = A.load_sets([str(DATA/'pandalm/testset-v1.json')])
    said = A.verdicts_of_judges([f'{DATA}/pandalm/gpt-3.5-turbo-testset-v1.json'], sets, CFG)
    people, out = A.agreement_board(sets, said, draws=20).itertuples()
    assert out.n == 999
    assert out.n_decided == 894
    assert out.n_unanswered == 25
    assert [round(x, 3) for x in (out.accuracy, out.decided, people.pairwise)] == [.716, .785, .92]
    ties = {k: v._replace(preferences=np.where(np.isnan(v.preferences) & v.shown, 1.5,
                                               v.preferences)) for k, v in said.items()}
    as_tie = A.agreement_board(sets, ties, draws=10).iloc[1]
    assert [round(x, 3) for x in (as_tie.accuracy, as_tie.decided)] == [.711, .774]


@with_data
def test_llmbar():
    sets = A.load_sets([f'{DATA}/llmbar/LLMBar_{s}.json' for s in ('Natural', 'Adversarial_*')])
    said = A.verdicts_of_judges([f'{DATA}/llmbar/judge_verdicts.csv#* Vanilla'], sets, CFG)
    table = A.agreement_board(sets, said, draws=10).set_index(['set', 'judge'])
    for name, published in (('Natural', (.955, .815, .805)), ('Adversarial', (.810, .270, .329))):
        found = [table.loc[(f'LLMBar_{name}', f'{j} Vanilla')].accuracy
                 for j in ('GPT-4', 'ChatGPT', 'LLaMA2')]
        assert found == pytest.approx(published, abs=5e-4)
    assert table.loc[('LLMBar_Adversarial', 'LLaMA2 Vanilla')].n_unanswered == 2


@with_data
def test_alpaca_eval_annotations_are_read_on_both_sides(capsys):
    own, theirs = (f'{DATA}/alpaca_eval/alpaca-7b/annotations_ae{k}.json' for k in (1, 2))
    sets = A.load_sets([own])
    votes = [v for p in sets['annotations_ae1'] for v in p['votes'].values()]
    assert votes.count(1.5) == 16   # stored as 0
    said, = A.verdicts_of_judges([own], sets, CFG).values()
    with open(own) as f:
        prices = [r['price_per_example'] for r in json.load(f)]
    assert said.price == pytest.approx(1000*np.mean([p for p in prices if p is not None]))
    itself = A.agreement_board(sets, {('annotations_ae1', 'itself'): said}, draws=10).iloc[1]
    assert itself.accuracy == 1
    assert itself.n_unanswered == 0
    other, = A.verdicts_of_judges([theirs], sets, CFG).values()   # another baseline: few in common
    assert other.shown.any(0).sum() == 5
    assert '5 of 805 labelled pairs' in capsys.readouterr().out
    with pytest.raises(ValueError, match='A soft label'):
        A.load_sets([theirs])


@with_data
def test_hh_rlhf():
    file = DATA/'hh_rlhf'/'harmless-base_test.jsonl.gz'
    pairs, = A.load_sets([str(file)]).values()
    with gzip.open(file, 'rt') as f:
        rows = [json.loads(line) for line in f]
    assert len(pairs) == len(rows) == 2312
    assert .45 < np.mean([p['votes']['gold'] == 1 for p in pairs]) < .55
    for p, r in zip(pairs, rows):
        chosen, rejected = [p['output_1'], p['output_2']][::1 if p['votes']['gold'] == 1 else -1]
        shown = dialogue_text(p['messages']).strip()
        for k, text in (('chosen', chosen), ('rejected', rejected)):
            assert r[k].strip().removeprefix(shown).strip() == text.strip()


def measured(judge, pairs):
    votes = M.cast_votes(A.ask_judge(judge, pairs).preferences, pairs)
    return M.judge_measures(votes, M.people_votes(pairs), M.pair_traits(pairs))


def test_order_and_chance_are_told_apart():
    "A probability that ignores the order is consistent, and varies; coins vary half as much."
    pairs = embedded_pairs(400)
    def soft(shown): return [1.7 if p['output_1'] < p['output_2'] else 1.3 for p in shown]
    def coins(shown):
        texts = [(p['instruction'], p['output_1'], p['output_2']) for p in shown]
        return [1. + (hash_uniform('z', *text) < .5) for text in texts]
    one, two, first = (measured(f, pairs) for f in (soft, coins, lambda shown: [1.]*len(shown)))
    assert one['consistency'] == 1
    assert .3 < one['variance'] < .45
    assert [two['consistency'], two['variance']] == pytest.approx([.5, .25], abs=.06)
    assert first['consistency'] == 0
    assert first['first'] == 1
    assert .4 < first['variance'] < .6


def test_a_missing_verdict_is_counted_and_left_out(tmp_path, capsys):
    "Of some, one or all pairs; the other judges have their rows."
    pairs = embedded_pairs(50)
    def shaky(shown): return [math.nan if len(p['output_1']) % 3 == 0 else 1. for p in shown]
    def mute(shown): return [math.nan]*len(shown)
    def nearly(shown): return [1.] + mute(shown[1:])
    judged = {('s', f.__name__): A.ask_judge(f, pairs)
              for f in (shaky, mute, nearly, A.prefer_longer)}
    row = A.agreement_board(dict(s=pairs), judged, draws=10).set_index('judge').loc
    missing = np.isnan(judged['s', 'shaky'].preferences).sum()
    assert [row[k].n_unanswered for k in ('shaky', 'mute', 'nearly')] == [missing, 100, 98]
    assert 'nearly: no verdict on 98 of 100 questions (98.0%)' in capsys.readouterr().out
    assert missing
    assert row['shaky']['first'] == 1
    assert row['shaky'].consistency == 0
    assert [math.isnan(row[k].accuracy) for k in ('mute', 'nearly')] == [True, False]
    assert math.isnan(row['nearly'].spearman)
    assert row['prefer_longer'].consistency == 1
    rows = [PAIR | dict(instruction=f'q{i}') for i in range(4)]   # of a file, too
    file = tiny.write(tmp_path/'j.json', [r | dict(preference=1 if i else None)
                                          for i, r in enumerate(rows)])
    recorded_verdicts(file, '', dict(s=[dict(r, votes=dict(p=1), row=i)
                                        for i, r in enumerate(rows)]))
    assert 'j on s: no verdict on 1 of 4 questions (25.0%)' in capsys.readouterr().out


def labelled(pairs, label, name=lambda i: 'Ann'):
    "Preference records of pairs, without their votes."
    return [dict(instruction=p['instruction'], input=p['input'], output_1=p['output_1'],
                 output_2=p['output_2'], preference=float(label(p)), annotator=name(i))
            for i, p in enumerate(pairs)]


def write(folder, rows):
    tiny.write(folder/'preferences.json', rows)
    return str(folder)


def longest(pair): return A.prefer_longer([pair])[0]
def first_vote(pair): return pair['votes']['vote 1']


def test_recorded_votes_of_an_annotation_run(tmp_path):
    "A judge's label file and the judge itself, asked in the same order, agree."
    pairs = embedded_pairs(40)
    sets = dict(s=[dict(p, row=i) for i, p in enumerate(pairs)])
    file = write(tmp_path/'run', labelled(pairs, longest, lambda i: 'longest'))
    live, recorded = (A.verdicts_of_judges([spec], sets, CFG)['s', 'longest'].preferences[0, 0]
                      for spec in (LONGEST, file))
    assert (live == recorded).all()
    assert [p['votes']['longest'] for p in A.load_sets([file])['run']] == live.tolist()
    with pytest.raises(ValueError, match='a second judge called longest'):
        A.verdicts_of_judges([LONGEST, file], sets, CFG)


@pytest.mark.slow
def test_agreement_counts_pairs_with_two_votes_and_says_how_many(tmp_path, capsys):
    "One person's votes and two of another: agreement is of two pairs, and has no interval."
    pairs = embedded_pairs(60)
    rows = labelled(pairs, first_vote) + labelled(pairs[:2], first_vote, lambda i: 'Bo')
    labels = write(tmp_path/'labels', rows)
    out = tmp_path/'out'
    A.run(A.AgreementConfig(out=str(out), sets=[labels], judges=[LONGEST], draws=20))
    assert 'labels: 2 of 60 pairs have two votes or more' in capsys.readouterr().out
    for who in ('people', 'longest'):
        counts = [read_summary(out)[f'labels_{who}_{k}'] for k in ('n', 'n_agreement')]
        assert counts == [60, 2]
    with open(out/'leaderboard.csv', newline='') as f:
        people, judge = csv.DictReader(f)
    assert people['agreement'] == '1.0000'
    assert people['agreement_low'] == ''
    assert judge['agreement_low'] == '' != judge['accuracy_low']
    full = A.agreement_board(dict(s=pairs), {}, draws=20).iloc[0]
    assert full.n_agreement == 60
    assert full.agreement_low < full.agreement


@pytest.mark.parametrize('again', ['same', 'other', 'turned'])
@pytest.mark.parametrize('form', ['annotator', 'annotator_index', 'judge', 'completed_by', 'votes'])
def test_a_vote_that_stands_twice_in_a_file_is_one_persons(tmp_path, capsys, form, again):
    "As in an export with each annotation twice: nobody agrees with themselves."
    rows = [PAIR | dict(instruction=f'q{i}', preference=1. + (i + k) % 2, annotator=f'person {k}')
            for i in range(12) for k in range(2)]   # who never agree
    more = [dict(r, preference=3 - r['preference']) for r in rows]
    more = dict(same=rows, other=more, turned=list(map(swap_outputs, more)))[again]
    def named(r):
        if form == 'votes':
            return r | dict(votes={r['annotator']: r['preference']})
        return {form if k == 'annotator' else k: v for k, v in r.items()}
    found = []
    for k, given in enumerate((rows, rows + more)):
        sets = A.load_sets([tiny.write(tmp_path/f'{again}{k}.json', list(map(named, given)))])
        row = A.agreement_board(sets, {}, draws=10).iloc[0]
        found.append((row.n, row.n_agreement, row.agreement, row.pairwise, row.alpha))
    assert found[0] == found[1]
    assert found[0][3] == 0
    said = dict(same='repeat', other='differ from', turned='repeat')[again]
    assert f'24 votes {said} one of the same person on the same pair' in capsys.readouterr().out


def test_votes_without_a_name_are_one_persons(tmp_path, capsys):
    rows = [PAIR | dict(instruction=f'q{i}', preference=1) for i in range(4)]
    pairs, = A.load_sets([tiny.write(tmp_path/'a.json', rows + rows)]).values()
    assert [p['votes'] for p in pairs] == [dict(people=1)]*4
    assert '4 votes repeat one of somebody unnamed' in capsys.readouterr().out
    for k in 'bc':
        tiny.write(tmp_path/f'{k}.json', [r | dict(annotator='Ann') for r in rows])
    pairs, = A.load_sets([str(tmp_path/'[bc].json')]).values()   # of two files
    assert [p['votes'] for p in pairs] == [dict(Ann=1)]*4


def test_partial_overlap_is_used_and_counted(tmp_path, capsys):
    "A pool's labels of 60 pairs, people's of 30, 20 in common, some in the other order."
    pairs = embedded_pairs(70)
    said = labelled(pairs[:60], longest, lambda i: f'judge {i % 3}')
    voted = [swap_outputs(r) | dict(preference=3 - r['preference']) if i % 2 else r
             for i, r in enumerate(labelled(pairs[40:], first_vote))]
    pool = write(tmp_path/'pool', said)
    people = write(tmp_path/'people', voted)
    A.run(A.AgreementConfig(out=str(tmp_path/'out'), sets=[people], judges=[pool], draws=20))
    assert '20 of 30 labelled pairs have a verdict, and 20 of 60' in capsys.readouterr().out
    found = read_summary(tmp_path/'out')
    assert found['people_people_n'] == 30
    assert found['people_pool_n'] == 20
    right = [1 - abs(longest(p) - first_vote(p)) for p in pairs[40:60]]   # a tie is half right
    assert found['people_pool_accuracy'] == pytest.approx(np.mean(right))
    full = A.load_sets([people])
    each = A.verdicts_of_judges([f'{pool}#judge*'], full, CFG)   # by name, each is a judge
    assert [int(v.shown.any(0).sum()) for v in each.values()] == [6, 7, 7]
    one, = A.verdicts_of_judges([pool], full, CFG).values()
    used = one.shown.any(0)
    parts = {k: getattr(one, k)[..., used] for k in ('preferences', 'unanswered', 'shown')}
    sub = dict(people=[p for p, s in zip(full['people'], used) if s])
    both, alone = (A.agreement_board(s, {('people', 'pool'): v}, draws=20)
                   for s, v in ((full, one), (sub, one._replace(**parts))))
    for k in ('accuracy', 'alpha', 'longer_diff', 'accuracy_low', 'n', 'n_decided'):
        assert both[k][1] == pytest.approx(alone[k][1], nan_ok=True), k
    with pytest.raises(ValueError, match='match no pair in people'):
        A.verdicts_of_judges([write(tmp_path/'few', said[:40])], full, CFG)


@pytest.fixture
def server():
    with judge_server() as server:
        yield server


def paid(tmp_path, server, **more):
    (tmp_path/'prices.yaml').write_text('judge: [1000, 1000]')
    return A.AgreementConfig(judges=['chatgpt'], base_url=server.url, out=str(tmp_path/'out'),
                             sets=['alpaca_farm.world:embedded_pairs'],
                             store=str(tmp_path/'answers.sqlite'), max_instances=20, draws=10,
                             prices=str(tmp_path/'prices.yaml'),
                             models=['gpt-3.5-turbo-0301=judge'], **more)


def test_a_judge_behind_an_endpoint_has_a_price_and_a_time(tmp_path, server):
    pairs = embedded_pairs(12)
    said, = A.verdicts_of_judges(['chatgpt'], dict(s=pairs), paid(tmp_path, server)).values()
    assert said.how == 'live'
    assert said.preferences.shape == (1, 2, 12)
    assert said.price > 0
    assert said.time > 0
    assert set(said.preferences.ravel()) <= {1., 2.}
    with pytest.raises(ValueError, match='models: gpt-4 is none of'):
        A.AgreementConfig(judges=['chatgpt'], models=['gpt-4=x'])


def test_a_reached_budget_is_no_result(tmp_path, server):
    "The run stops, what was answered is stored, and the next run asks for the rest alone."
    with pytest.raises(ValueError, match='chatgpt, 20 pairs in both orders: .*budget'):
        A.run(paid(tmp_path, server, budget=1.))
    assert 0 < len(server.requests()) < 40
    assert not (tmp_path/'out'/'leaderboard.csv').exists()
    A.run(paid(tmp_path, server))
    assert len(server.requests()) == 40


def test_a_judge_without_a_pair_is_left_out(capsys, monkeypatch):
    "Here since it has learned from all of them, or from one."
    pairs = embedded_pairs(12)
    keys = [A.prompt_key(p) for p in pairs]
    judges = dict(world=world.judge, longer=A.prefer_longer)
    learned = dict(world=set(keys[:1]), longer=set(keys))
    monkeypatch.setattr(A, 'load_annotators', lambda spec, cfg: judges[spec])
    monkeypatch.setattr(A, '_learned_prompts', learned.get)
    found = A.verdicts_of_judges(['world', 'longer'], dict(s=pairs), CFG)
    (_, name), verdicts = *found, *found.values()
    assert name == world.judge.name
    assert verdicts.shown.all(0).tolist() == [k != keys[0] for k in keys]
    assert '12 of 12 pairs are left out' in capsys.readouterr().out
    with pytest.raises(ValueError, match='no pair to measure any of them'):
        A.verdicts_of_judges(['longer'], dict(s=pairs), CFG)


PAIR = dict(instruction='q', output_1='a', output_2='b')


WRONG_LABELS = [   # of a good row, the field that is changed, and what it becomes
    (PAIR | dict(preference=1), dict(output_1=[1], input=5, idx=[1], preference=[], annotator={},
                                     instruction=None, generator_1=[2])),
    (PAIR | dict(votes=dict(p=1)), dict(votes=[1], output_2=3, stratum=[1])),
    (dict(input='q', output_1='a', output_2='b', label=1), dict(input=1, label=[], output_1=None)),
    (dict(idx=1, instruction='q', input='', response1='a', response2='b', annotator1=1),
     dict(idx=[1], response1=7, annotator1={}, instruction=5, input=[1]))]
WRONG_RECORDS = [(PAIR | dict(preference=1), dict(output_1=[1], input=5, preference=[]))]
WRONG_VERDICTS = [
    (dict(dataset='d/e', item=0, judge='j', strategy='s', swapped=0, winner=1, gold=1),
     dict(dataset=[1], item=[0], judge={}, strategy=[2], swapped=2, winner='x', gold=[1])),
    (dict(dataset='d/e', item=0, judge='j', strategy='s', swapped=0, winner=1, gold=1),
     dict(item='x', swapped='no')),
    (dict(idx=1, gpt_result=1), dict(idx=[1], gpt_result={})),
    (PAIR | dict(preference=1, annotator='j', price=.1, time=1),
     dict(annotator=[1], preference=[], price='x', time=[1], output_1=5, input=[1]))]


def rows_of(what):
    "A file's two rows, the second one wrong, and the field that is."
    for good, wrong in what:
        for field, value in wrong.items():
            yield [good, good | {field: value}], field
        yield [good, 7], 'a record is expected, not 7'
        yield [good, None], 'a record is expected, not None'
        yield [7, good], 'a record is expected, not 7'


@pytest.mark.parametrize('kind', ['labels', 'verdicts', 'recorded'])
def test_a_wrong_value_names_file_row_and_field(tmp_path, kind):
    "In one line, whatever the format: labelled pairs, a judge's verdicts, labels as an annotator."
    sets = dict(s=[PAIR | dict(votes=dict(p=1), row=0, source='d_e', idx=1)])
    read = dict(labels=lambda file: A.load_sets([file]), recorded=read_recorded,
                verdicts=lambda file: recorded_verdicts(file, '', sets))[kind]
    what = dict(labels=WRONG_LABELS, verdicts=WRONG_VERDICTS, recorded=WRONG_RECORDS)[kind]
    file = tmp_path/'some.json'
    for rows, field in rows_of(what):
        file.write_text(json.dumps(rows))
        with pytest.raises(ValueError) as e:
            read(str(file))
        at = f'{file}, row {int(rows[0] != 7)}'
        assert at in str(e.value)
        assert field in str(e.value)
        assert '\n' not in str(e.value)
    file.write_text(json.dumps([what[0][0]]))
    read(str(file))


def unread(shown): return [math.nan if i % 6 else 1. for i, _ in enumerate(shown)]


def half(shown): return [math.nan if i % 2 else 1. for i, _ in enumerate(shown)]


def test_a_judge_that_leaves_most_unread_is_left_out(capsys):
    "83 % of its comparisons: those that it answered say nothing about the others."
    sets = dict(s=embedded_pairs(60))
    said = A.verdicts_of_judges([f'{__name__}:unread', f'{__name__}:half', LONGEST], sets, CFG)
    assert [name for _, name in said] == ['half', 'longest']
    assert 'unread on s: left out, since most comparisons' in capsys.readouterr().out
    with pytest.raises(ValueError, match='no pair to measure any of them on'):
        A.verdicts_of_judges([f'{__name__}:unread'], sets, CFG)


def voted(vote=1, who='Ann', **more): return PAIR | dict(preference=vote, annotator=who) | more


TURNS = [dict(role='user', content='p'), dict(role='assistant', content='r'),
         dict(role='user', content='q')]
ASKED = {k: v for k, v in voted(2).items() if k != 'instruction'} | dict(prompt='q')
ODD_SETS = {   # rows; the votes on each pair, or the error; what is told
    'label': ([voted(who='p', input='sea', label=2)], [dict(p=1)], ''),
    'label alone': ([PAIR | dict(input='sea', label=2)], 'row 0: .* Call the vote `preference`', ''),
    'space': ([voted(), voted(who='Ann ')], [dict(Ann=1)], '1 votes repeat'),
    'case': ([voted(), voted(who='ann')], [dict(Ann=1, ann=1)], ''),
    'number': ([voted(who=1), voted(who='1.0')], [{'1': 1}], '1 votes repeat'),
    'names of votes': ([PAIR | dict(votes={'Ann ': 1}), PAIR | dict(votes=dict(Ann=1))],
                       [dict(Ann=1)], '1 votes repeat'),
    'discarded': ([voted(), voted(2, 'Bo', status='discarded')], [dict(Ann=1)], '1 votes were disc'),
    'cancelled': ([voted(), voted(2, 'Bo', was_cancelled=True)], [dict(Ann=1)], '1 votes were disc'),
    'all discarded': ([voted(status='discarded')], 'votes were discarded', ''),
    'swapped': ([voted(swapped=True), voted(2, 'Bo', shown_swapped='True')], [dict(Ann=1, Bo=2)],
                ''),
    'not swapped': ([voted(swapped=False)], [dict(Ann=1)], ''),
    'passage': ([voted(input='word', passage='The sea is deep.')], [dict(Ann=1)], ''),
    'read passage': ([voted(passage='The sea is deep.')], [dict(Ann=1)], ''),
    'images': ([voted(images=['a.png'])], [dict(Ann=1)], ''),
    'other dialogue': ([voted(messages=TURNS, instruction='x')], "row 0: .* Keep one of them", ''),
    'dialogue': ([voted(messages=TURNS), {k: v for k, v in voted(2, messages=TURNS).items()
                                          if k != 'instruction'}], [dict(Ann=2)], '1 votes differ'),
    'answered dialogue': ([voted(messages=TURNS[2:] + TURNS[1:2]), voted()], [dict(Ann=1)],
                          '1 votes repeat'),
    'one turn': ([voted(messages=TURNS[2:]), voted()], [dict(Ann=1)], '1 votes repeat'),
    'prompt': ([ASKED, ASKED | dict(annotator='Bo')], [dict(Ann=2, Bo=2)], '')}


@pytest.mark.parametrize('name', ODD_SETS)
def test_odd_sets_are_read_as_meant_or_told(tmp_path, capsys, name):
    rows, votes, told = ODD_SETS[name]
    file = tiny.write(tmp_path/'odd.json', rows)
    if isinstance(votes, str):
        with pytest.raises(ValueError, match=votes) as e:
            A.load_sets([file])
        assert '\n' not in str(e.value)
        return
    pairs = A.load_sets([file])['odd']
    assert [p['votes'] for p in pairs] == votes
    said = capsys.readouterr().out
    assert told in said if told else said == ''
    if 'votes' not in rows[0]:
        assert recorded_verdicts(file, '', dict(s=pairs))


def test_a_judge_cannot_move_the_pairs():
    "Nor give verdicts whose order, or number for each pair, is not known."
    pairs = embedded_pairs(6)
    before = list(pairs)
    def sorting(shown):
        shown.sort(key=lambda p: p['output_1'])
        return [1.]*len(shown)
    annotator_preferences(pairs, sorting)
    assert all(a is b for a, b in zip(pairs, before))
    def series(index): return lambda shown: pd.Series([1., 2, 1, 2, 1, 2], index=index)
    assert annotator_preferences(pairs, series(range(6))).tolist() == [1, 2, 1, 2, 1, 2]
    for wrong, message in ((series([3, 0, 1, 2, 5, 4]), 'a Series whose index is not 0, 1, 2'),
                           (lambda shown: np.ones((6, 1)), r'of shape \(6, 1\) for 6 pairs')):
        with pytest.raises(ValueError, match=message):
            annotator_preferences(pairs, wrong)
