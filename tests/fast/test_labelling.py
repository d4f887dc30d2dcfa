"""People label pairs: blind, in a fair order, with nothing lost, whatever the kernel does."""
import json
import random
import signal
import subprocess
import sys

import tiny
import pytest

from alpaca_farm import decide, labelling, world
from alpaca_farm.ask.store import Store
from alpaca_farm.data.pairs import PAIR_FIELDS
from alpaca_farm.data.records import load_records
from alpaca_farm.labelling import _person_sees_swapped, LabellingConfig
from alpaca_farm.labelling import DuelQueue, LabellingPage, LabellingQueue, MethodDuels
from alpaca_farm.judging.label_files import load_sets
from alpaca_farm.judging.stats import Interval
from alpaca_farm.labelling import person_labels
from alpaca_farm.run.runs import read_summary
from alpaca_farm.worlds.folder import World

SECRETS = dict(generator_1='SECRET-a', generator_2='SECRET-b', scores=['SECRET', 1.],
               preference=2., annotator='SECRET-c')


def drawn(n, seed=0):
    "Pairs of answers of the embedded world, with fields that a labeller must not see."
    rng = random.Random(seed)
    out = []
    while len(out) < n:
        spec = world.sample_request(rng)
        one, two = (world.Author(skill).answer(spec, rng) for skill in (.3, .8))
        pair = dict(world.render(spec), output_1=one, output_2=two, **SECRETS)
        if len(one) != len(two):
            out.append(pair)
    return out


def page_of(pairs, path, person='Ann', key_delay=0., **more):
    return LabellingPage(LabellingQueue(pairs, Store(path), person, **more), key_delay)


def simulate_person(page, judge, n):
    "A judge labels at most n pairs, through the page's buttons."
    for _ in range(n):
        if page.pair:
            page.buttons[f'{judge([page.pair])[0]:.0f}'].click()


def longer(ps): return [1. if len(p['output_1']) > len(p['output_2']) else 2. for p in ps]
def labels(page, pairs, person='Ann'): return person_labels(page.queue.store, pairs, person)
def verdicts(rows): return [r['preference'] for r in rows]


def own_order(pair, verdict):
    "What Ann says of a pair with a verdict on what she is shown."
    return 3 - verdict if _person_sees_swapped(pair, 'Ann') else verdict


def test_blind_and_escaped(tmp_path):
    "Nothing the widget holds tells who wrote an answer, and markup in an answer does nothing."
    pairs = drawn(20)
    pairs[0].update(output_1='<img src=x onerror=alert(1)>', input='"><b onload=x>',
                    output_2='</div><script>kernel()</script>&lt;')
    page = page_of(pairs, tmp_path/'a.sqlite', '<i>Ann')
    seen = []
    widgets = page.view, page.head, page.body, page.script, *page.buttons.values()
    while page.pair:
        assert 'SECRET' not in json.dumps([w.get_state() for w in widgets], default=str)
        seen.append(page.body.value)
        assert all(labelling.html.escape(page.pair[k]) in seen[-1] for k in PAIR_FIELDS)
        assert seen[-1].count('<') == 2*6 + 4   # six boxes and two numbers, nothing of the pair's
        assert '<i>' not in page.head.value
        page.press_key('1')
    assert len(seen) == 20


def test_keys_buttons_and_their_verdicts(tmp_path):
    "A key too early was meant for the pair before."
    pairs = drawn(6)
    hasty = page_of(pairs, tmp_path/'a.sqlite', key_delay=30.)
    hasty.press_key('1'); hasty.buttons['2'].click()
    assert len(hasty.queue) == 6
    assert len(hasty.queue.store) == 0
    page = page_of(pairs, tmp_path/'a.sqlite')
    page.press_key('1')
    for key in '200s':
        page.buttons[key].click()
    for key in ('x', ' ', '12', '2'):
        page.press_key(key)   # the first three are no keys
    assert page.pair is None
    assert 'Nothing is left' in page.body.value
    page.press_key('1')
    rows = labels(page, pairs)
    labelled = pairs[:4] + pairs[5:]
    assert verdicts(rows) == list(map(own_order, labelled, (1, 2, 1.5, 1.5, 2)))
    assert [r['output_1'] for r in rows] == [p['output_1'] for p in labelled]
    assert all(r['annotator'] == 'Ann' and r['time'] >= 0 and 'scores' in r for r in rows)


def test_a_clock_that_goes_back_turns_no_label(tmp_path, monkeypatch):
    "Undo takes back the last label, also after reopening."
    pairs = drawn(4)
    clock = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(labelling.time, 'time', lambda: next(clock))
    page = page_of(pairs, tmp_path/'a.sqlite')
    given = []
    while page.pair:
        given.append('12'[len(given) % 2])
        page.press_key(given[-1])
    for queue in (page.queue, page_of(pairs, tmp_path/'a.sqlite').queue):
        rows = person_labels(queue.store, pairs, 'Ann')
        assert verdicts(rows) == [own_order(p, float(k)) for p, k in zip(pairs, given)]
        assert all(r['time'] >= 0 for r in rows)
    for left in range(1, 5):
        queue = page_of(pairs, tmp_path/'a.sqlite').queue
        assert queue.undo_label()
        assert queue.remaining() == [*range(4 - left, 4)]


WORKER = '''
import sys; sys.path.insert(0, {tests!r})
from test_labelling import drawn, page_of, longer, simulate_person
page = page_of(drawn(400), {store!r})
while page.pair: simulate_person(page, longer, 1); print(len(page.queue), flush=True)
'''


@pytest.mark.slow
def test_killed_in_the_middle_nothing_is_lost(tmp_path):
    "Three times kill -9 while a person labels: all that was shown as done is there, once."
    pairs = drawn(400)
    store = tmp_path/'a.sqlite'
    left = 400
    env = tiny.environment(PYTHONPATH=tiny.PATHS)
    code = WORKER.format(tests=str(tiny.ROOT/'tests'/'fast'), store=str(store))
    worker = [sys.executable, '-c', code]
    for wait in (15, 40, 3):
        with subprocess.Popen(worker, stdout=subprocess.PIPE, text=True, env=env) as p:
            for _ in range(wait):
                left = int(p.stdout.readline())
            p.send_signal(signal.SIGKILL)
        page = page_of(pairs, store)
        assert len(page.queue) <= left
        assert page.queue.next_pair()[0] == 400 - len(page.queue)
        left = len(page.queue)
        rows = labels(page, pairs)
        assert len(rows) == 400 - left == len(page.queue.store), 'a pair was asked twice, or lost'
        assert verdicts(rows) == longer(pairs[:len(rows)])


def test_a_label_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    page = page_of(drawn(3), tmp_path/'a.sqlite')
    was = page.pair
    def full(*args, **kwargs): raise OSError('the disk is full')
    monkeypatch.setattr(page.queue.store, 'put', full)
    page.press_key('1')
    assert 'Not recorded: the disk is full' in page.head.value
    assert page.pair == was
    assert len(page.queue) == 3
    monkeypatch.undo()
    page.press_key('1')
    assert len(page.queue) == 2


def settings(tmp_path, pairs, **more):
    out, outputs, store = (tmp_path/name for name in ('run', 'pairs.json', 'a.sqlite'))
    outputs.write_text(json.dumps(pairs))
    return LabellingConfig(out=str(out), outputs=str(outputs), store=str(store), **more)


def test_two_people_one_store_one_run(tmp_path):
    "The run follows the labels there are; those of others and judges' answers are not theirs."
    pairs = drawn(12)
    cfg = settings(tmp_path, pairs)
    assert labelling.run(cfg).folder == tmp_path/'run'
    assert read_summary(cfg.out)['labels'] == 0
    assert json.loads((tmp_path/'run'/'preferences.json').read_text()) == []
    Store(cfg.store).put(b'x'*32, dict(model='judge', prompt='{"kind": "label"'), dict(text='a'))
    for person, n in (('Ann', 12), ('Bob', 5)):
        simulate_person(page_of(pairs, cfg.store, person), longer, n)
    labelling.run(cfg)
    rows = load_records(cfg.out, 'preferences', 'preference')
    assert [r['annotator'] for r in rows] == ['Ann']*12 + ['Bob']*5
    assert 'SECRET-c' not in str(rows)
    assert verdicts(rows) == longer(pairs) + longer(pairs[:5])
    one = settings(tmp_path, pairs, person='Bob')
    labelling.run(one)
    assert len(load_records(one.out, 'preferences', 'preference')) == 5
    assert labelling.labelling_widget(cfg) is None
    assert type(labelling.labelling_widget(one)).__name__ == 'VBox'


def duel_settings(tmp_path, **more):
    "Three methods, the third of which writes the longest answers."
    files = []
    for k in range(3):
        rows = [dict(instruction=f'Say {i}.', output='x'*(1 + (i + k) % 2 + 2*(k == 2)))
                for i in range(60)]
        files.append(tmp_path/f'method_{k}.json')
        files[-1].write_text(json.dumps(rows))
    return LabellingConfig(out=str(tmp_path/'duels'), methods=list(map(str, files)), budget=20,
                           store=str(tmp_path/'a.sqlite'), **more)


def test_a_skipped_duel_is_a_half_for_both_and_counts_in_the_budget(tmp_path):
    "On one page, which goes on with the next round."
    cfg = duel_settings(tmp_path)
    page = LabellingPage(DuelQueue(MethodDuels(cfg), 'Ann'), 0)
    page.press_key('s')
    simulate_person(page, longer, 30)
    _, pairs, votes = MethodDuels(cfg).hold()
    assert len(pairs) == 20
    assert [*votes[0].values()] == [.5]
    labelling.run(cfg)
    summary = read_summary(cfg.out)
    assert (summary['labels'], summary['skipped']) == (19, 1)


def test_votes_given_elsewhere_take_the_schedule_on(tmp_path):
    "Whoever labels to_label.json gets the next round; a vote on another duel is refused."
    cfg = duel_settings(tmp_path)
    rows = []
    for _ in range(2):
        labelling.run(cfg)
        waiting = json.loads((tmp_path/'duels'/'to_label.json').read_text())
        assert len(waiting) == 10
        rows += [dict(p, preference=v, annotator='Cy') for p, v in zip(waiting, longer(waiting))]
        (tmp_path/'votes.json').write_text(json.dumps(rows))
        cfg = duel_settings(tmp_path, labels=str(tmp_path/'votes.json'))
    labelling.run(cfg)
    summary = read_summary(cfg.out)
    assert [summary[k] for k in ('best', 'labels', 'people')] == [cfg.methods[2], 20, 1]
    labels = load_records(cfg.out, 'preferences', 'preference')
    assert len(labels) == 20 and {r['annotator'] for r in labels} == {'Cy'}
    rows[0]['output_1'] += 'y'
    (tmp_path/'votes.json').write_text(json.dumps(rows))
    with pytest.raises(ValueError, match='labels = .*votes.json.*method_'):
        labelling.run(cfg)


def test_a_label_of_ones_own_replaces_what_others_said_of_the_pair(tmp_path):
    "Read back as a label of people, whatever votes stand in the file."
    pairs = [dict(p, votes=dict(p1=1, p2=1), status='discarded') for p in drawn(3)]
    page = page_of(pairs, tmp_path/'a.sqlite')
    while page.pair: page.press_key('2')
    rows = labels(page, pairs)
    path = tiny.write(tmp_path/'labels.json', rows)
    (read,) = load_sets([path]).values()
    assert [p['votes'] for p in read] == [{'Ann': label} for label in verdicts(rows)]


def test_a_label_after_others_were_dropped_from_the_store_is_the_last(tmp_path):
    pairs = drawn(3)
    page = page_of(pairs, tmp_path/'a.sqlite')
    while page.pair: page.press_key('1')
    store = page.queue.store
    (key, *_), *_ = store.run('select hex(key) from requests')
    store.drop(key)
    queue = page_of(pairs, tmp_path/'a.sqlite').queue
    i = min(set(range(3)) - {*queue.remaining()})
    swapped = _person_sees_swapped(pairs[i], 'Ann')
    queue.record_label(i, swapped, None, undone=True)
    queue.record_label(i, swapped, 2.)
    said = {r['instruction']: r['preference'] for r in labels(page, pairs)}
    assert said[pairs[i]['instruction']] == own_order(pairs[i], 2.)


def test_labels_are_of_who_gave_them_whoever_a_file_has_named(tmp_path):
    "Two people who labelled a judge's pairs counted as one vote of the judge."
    pairs = [dict(p, judge='gpt-4', annotator_id=7) for p in drawn(3)]
    rows = []
    for person in ('Ann', 'Bob'):
        page = page_of(pairs, tmp_path/'a.sqlite', person)
        while page.pair: page.press_key('1')
        rows += labels(page, pairs, person)
    (read,) = load_sets([tiny.write(tmp_path/'labels.json', rows)]).values()
    assert [{*p['votes']} for p in read] == [{'Ann', 'Bob'}]*3


def test_the_mean_of_duels_labelled_elsewhere_counts_each_person_once(tmp_path):
    "Three people elsewhere counted as one beside a person here, who was counted twice."
    cfg = duel_settings(tmp_path)
    labelling.run(cfg)
    pair = json.loads((tmp_path/'duels'/'to_label.json').read_text())[0]
    rows = [dict(pair, preference=1, annotator=name) for name in ('Ann', 'Bob', 'Cy')]
    cfg = duel_settings(tmp_path, labels=tiny.write(tmp_path/'votes.json', rows))
    duels = MethodDuels(cfg)
    assert [len(duels.to_label(person)) for person in ('Ann', 'Dee')] == [9, 9]
    for person in ('Dee', 'Ann'):
        queue = LabellingQueue([pair], duels.store, person)
        i, swapped = queue.next_pair()
        queue.record_label(i, swapped, 1. if swapped else 2.)
    _, _, votes = duels.hold()
    assert votes[0] == dict(Ann=0., Bob=1., Cy=1., Dee=0.)
    labelling.run(cfg)
    labels = load_records(cfg.out, 'preferences', 'preference')
    assert sorted((r['annotator'], r['preference']) for r in labels) == [
        ('Ann', 2.), ('Bob', 1.), ('Cy', 1.), ('Dee', 2.)]


def test_a_pair_that_stands_twice_in_a_file_is_labelled_once(tmp_path):
    pair = drawn(1)[0]
    exchanged = pair | dict(output_1=pair['output_2'], output_2=pair['output_1'])
    cfg = settings(tmp_path, [pair, exchanged])
    page = page_of(labelling.pairs_to_label(cfg), cfg.store)
    page.press_key('1')
    assert not page.pair
    labelling.run(cfg)
    assert read_summary(cfg.out)['labels'] == 1


def test_a_decision_goes_on_after_a_skipped_pair(tmp_path, monkeypatch):
    "It waited for ever for a label that nobody was asked for again."
    def said(answer):
        return [dict(instruction=f'{i}?', input='', output=[f'{answer}{i}']) for i in range(30)]
    stands_in = dict(_print_runs_time=None, _make=(), farm_world=World(''), read_answers=said('s'))
    for name, value in stands_in.items():
        monkeypatch.setattr(decide, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(decide, 'load_annotators', lambda *_: longer)
    monkeypatch.setattr(decide, '_check_pair', lambda answer, sft: decide.bare_prompt(sft) | dict(
        output_1=sft['output'][0], output_2='t', generator_1='sft', drawn='random'))
    found = []
    def check(_, votes):
        found.extend(votes)
        return Interval(.4, .3, .5), 'no better than a coin'
    monkeypatch.setattr(decide, '_judge_check', check)

    cfg = settings(tmp_path, decide._first_pairs(decide.DecideConfig(budget=30), said('s'))[0])
    page = page_of(labelling.pairs_to_label(cfg), cfg.store)
    page.press_key('s')
    while page.pair: page.press_key('1')
    labelling.run(cfg)
    with pytest.raises(ValueError, match='no better than a coin'):
        decide.run(decide.DecideConfig(budget=30, labels=cfg.out))
    assert len(found) == 9
    assert found.count(.5) == 1
    assert len(load_records(cfg.out, 'preferences', 'preference')) == 8
