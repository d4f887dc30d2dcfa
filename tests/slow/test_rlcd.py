"""Preference data without people: tasks are data; one file, however a run is divided."""
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tiny
from judge_server import judge_server
from alpaca_farm import rlcd, wombat, world
from alpaca_farm.ask.client import ApiConfig
from alpaca_farm.data.pairs import swap_outputs
from alpaca_farm.data.records import load_records
from alpaca_farm.model.logprobs import load_policy
from alpaca_farm.model.writer import LocalWriter, ServedWriter, Written
from alpaca_farm.rlcd import _task_file, read_task, RLCDConfig
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_summary

TASKS = sorted((tiny.ROOT/'nbs'/'recipes'/'tasks').glob('*.yaml'))
ANYTHING = str(tiny.ROOT/'tests'/'data'/'task.yaml')
FILES = ('items.json', 'preferences.json', 'preferences.csv')


def test_shipped_tasks():
    tasks = [read_task(str(p)) for p in TASKS]
    assert [t.name for t in tasks] == [p.stem for p in TASKS]
    assert [_task_file(t.name) for t in tasks] == TASKS
    for t in tasks:
        assert all(p['positive'] != p['negative'] for p in t.contrast)
        assert t.compare
        sizes = [[len(p[side].split()) for side in ('positive', 'negative')] for p in t.contrast]
        assert max(abs(a - b) for a, b in sizes) <= 5, f'{t.name}: phrases of unlike length'


TALK = dict(messages=[dict(role='user', content='Hi'), dict(role='assistant', content='Hello.'),
                      dict(role='user', content='Bye')])


def made(base, out, **more):
    rlcd.run(RLCDConfig(**tiny.settings('rlcd', base, out=str(out), **more)))
    return [(Path(out)/name).read_bytes() for name in FILES if (Path(out)/name).exists()]


def pairs(out): return read_json(Path(out)/'preferences.json')
def outputs(rows): return [(r['output_1'], r['output_2']) for r in rows]
def labels(rows): return np.array([r['preference'] for r in rows])


@pytest.fixture(scope='module')
def whole(base, tmp_path_factory):
    "The folder of a run of rlcd over all 60 prompts, and its files."
    out = tmp_path_factory.mktemp('rlcd')/'rlcd'
    return out, made(base, out)


def test_run(base, whole):
    out, files = whole
    rows = pairs(out)
    items = read_json(out/'items.json')
    summary = read_summary(out)
    assert len(files) == 3
    assert len(items) == summary['prompts'] == 60
    assert len(rows) == summary['made'] == 60 - summary['skipped'] > 40
    assert summary['labels'] == 0
    assert summary['retries'] == sum(i['retries'] for i in items)
    for reason, count in Counter(i['reason'] for i in items).items():
        assert reason == '' or summary[f'skipped_{reason}'] == count
    prompts = load_records(str(base/'world'), 'preference')
    by = {i['index']: i for i in items}
    for r in rows:
        positive, negative = rlcd._sided_answers(by[r['index']])
        assert r[f'output_{r["preference"]:.0f}'] == positive != negative
        assert r['instruction'] == prompts[r['index']]['instruction']
    assert set(labels(rows)) == {1., 2.}
    assert load_records(str(out), 'preferences', 'preference') == rows
    assert rlcd.run(RLCDConfig(**tiny.settings('rlcd', base, out=str(out)))).done


@pytest.mark.parametrize('where', ['_write_rlcd_csv', '_item_figures'])
def test_killed_after_the_last_chunk(base, whole, tmp_path, monkeypatch, where):
    "Nothing that a restart needs is removed before the run has finished."
    def die(*_): raise KeyboardInterrupt
    with monkeypatch.context() as m:
        m.setattr(rlcd, where, die)
        with pytest.raises(KeyboardInterrupt):
            made(base, tmp_path/'run')
    assert made(base, tmp_path/'run') == whole[1]
    assert not list((tmp_path/'run').rglob('*.jsonl*'))[1:]


def test_rlaif_keeps_soft_labels(base, tmp_path):
    "The order matters where one is asked, and not where both are."
    made(base, tmp_path/'one', method='rlaif')
    made(base, tmp_path/'both', method='rlaif', both_orders=True)
    one = pairs(tmp_path/'one')
    both = pairs(tmp_path/'both')
    assert outputs(one) == outputs(both)
    assert {r['annotator'] for r in both} == {'self'}
    found = labels(both)
    assert ((1 < found) & (found < 2)).all()
    assert len(set(found)) > 30
    cfg = RLCDConfig(**tiny.settings('rlcd', base, out=str(tmp_path/'x')))
    writer = LocalWriter(load_policy(str(base/'world'), cfg), cfg)
    judge = rlcd.SelfJudge(writer, read_task(ANYTHING), False)
    swapped = [swap_outputs(r) for r in both]
    by_hand = (np.array(judge(both)) + 3 - np.array(judge(swapped)))/2
    np.testing.assert_allclose(found, by_hand, atol=1e-5)
    assert np.abs(found - labels(one)).max() > 1e-3
    assert read_summary(tmp_path/'one')['labels'] == len(one)


def test_only_a_run_with_the_tasks_phrases_is_rescored(base, whole, tmp_path):
    made(base, tmp_path/'rlaif', method='rlaif')
    task = read_task(ANYTHING)
    fewer = task.model_copy(update=dict(contrast=[]))
    for samples, of in ((whole[0], fewer), (tmp_path/'rlaif', task)):
        given = dict(method='rlcd_rescore', samples=str(samples), out=str(tmp_path/'x'))
        with pytest.raises(ValueError, match='method = rlcd'):
            rlcd._stored_items(RLCDConfig(**tiny.settings('rlcd', base, **given)), of)


class HalfWriter:
    "Ends its positive answers, at their token or a stop, and no negative one."
    def write(self, prompts, keys, stop):
        found = []
        for i, side, _ in keys:
            if side:
                found.append(Written(' Answer and', False))
            elif i:
                found.append(Written(' Answer.\n\nHuman: So?', False))
            else:
                found.append(Written(' Answer 0.', True))
        return found


def test_demonstrations_are_good_answers_and_all_say_which_were_cut_off(base, tmp_path):
    "Where a bad answer is imitated, it is one that was cut off."
    cfg = RLCDConfig(**tiny.settings('rlcd', base, out='x'))
    items = rlcd._write_items(HalfWriter(), read_task(ANYTHING), {0: TALK, 1: TALK}, cfg)
    answers = []
    for r in rlcd._label_items(items, None, cfg):
        best = int(r['preference'])
        assert r[f'ended_{best}'] is True
        assert r[f'ended_{3 - best}'] is False
        answers.append((r[f'output_{best}'], r[f'output_{3 - best}']))
    good, bad = zip(*answers)
    turned = [dict(i, positive=3 - i['positive']) for i in items]
    for name, rows, want, ended in (('good', items, good, True), ('bad', turned, bad, False)):
        tiny.write(tmp_path/'run'/'items.json', rows)
        made(base, tmp_path/name, method='context_distillation', samples=str(tmp_path/'run'))
        read = load_records(str(tmp_path/name), 'sft', 'output')
        assert [(r['output'], r['ended']) for r in read] == [(text, ended) for text in want]
        assert not (tmp_path/name/'preferences.json').exists()


def test_a_served_model(base, tmp_path):
    """Behind an endpoint: completions with a seed of their own for each answer, asked once; the
    same pairs can be judged by the model."""
    with judge_server(template='I say {hash}') as server:
        served = dict(policy='', served='base', base_url=server.url, max_instances=12,
                      store=str(tmp_path/'answers.sqlite'))
        made(base, tmp_path/'one', **served)
        asked = server.requests()
        rows = pairs(tmp_path/'one')
        assert len(asked) == 24
        assert {r['path'] for r in asked} == {'/v1/completions'}
        assert len(rows) == 12
        assert all(t.startswith('I say') for p in outputs(rows) for t in p)
        made(base, tmp_path/'two', **served)
        assert pairs(tmp_path/'two') == rows
        assert len(server.requests()) == 24
        server.set(labels='AB')
        rescore = dict(method='rlcd_rescore', samples=str(tmp_path/'one'))
        made(base, tmp_path/'judged', **rescore, **served)
        assert len(server.requests()) == 36
        for r, was in zip(pairs(tmp_path/'judged'), rows, strict=True):
            assert 1 < r['preference'] < 2
            assert r == was | dict(preference=r['preference'], annotator='self')


def test_dialogue_pages():
    from alpaca_farm.worlds.embedded.grammar import is_held_out, parse
    rng = random.Random(0)
    pages = [world.dialogue_page(world.WorldConfig(), world.WRITTEN, rng) for _ in range(1500)]
    answers = [p.split('\n\nAssistant') for p in pages if '\n\nAssistant' in p]
    assert 800 < len(answers) < 1000
    skill = {who: [] for who in world.DESCRIBED}
    for asked, answer in answers:
        who, _, said = answer.partition(': ')
        instruction = asked.removeprefix('\n\nHuman: ')
        assert not is_held_out(parse(instruction))   # what is held out is not asked here
        record = dict(instruction=instruction.replace('\n\n', ' '), output=said)
        skill[who.strip(' ()')] += world.utility([record])
    means = {who: np.mean(u) for who, u in skill.items()}
    assert means['a careful author'] > means[''] + .4 > means['a careless author'] + .8
    assert means['an expert'] > means['a beginner'] + 1
    chosen = Counter(p[-3] for p in pages if p.endswith(').'))
    assert set(chosen) == {'A', 'B'}
    assert abs(chosen['A'] - chosen['B']) < 120


def test_the_default_world_has_no_dialogues(base, tmp_path):
    "Its files are those without the setting; with it only the model and its tokenizer differ."
    plain = base/'world'
    own = tmp_path/'w'
    world.train(world.WorldConfig(**tiny.settings('world', base, out=str(own), dialogues=200)))
    for split in (*world.SPLITS, 'crowd', 'pool'):
        assert (own/f'{split}.json').read_bytes() == (plain/f'{split}.json').read_bytes()
    a, b = ((f/'model'/'tokenizer.json').read_bytes() for f in (own, plain))
    assert a != b
    assert read_summary(own)['prose_tokens'] > read_summary(plain)['prose_tokens']


def test_wombat_rates_the_answers_of_several_models(base, tmp_path):
    """A file for each model; one request for each prompt, three where no rating can be read, and
    as many by a later run."""
    prompts = load_records(str(base/'world'), 'unlabeled', n=6)
    out = tmp_path/'wombat'
    for name, rows in dict(a=prompts, b=prompts, c=prompts[:5]).items():
        answered = [dict(r, output=f'Text of {name}.', generator=name) for r in rows]
        tiny.write(tmp_path/f'{name}.json', answered)
    files = [str(tmp_path/f'{name}.json') for name in 'abca']   # a text counts once
    given = dict(out=str(out), candidates=files, rater='judge', store=str(tmp_path/'a.sqlite'))
    with judge_server() as server:
        server.set(template='I cannot rate them.')
        with pytest.raises(ValueError, match='none of its ratings can be read'):
            wombat.run(wombat.WombatConfig(base_url=server.url, **given))
        assert len(server.requests()) == 6*3
        server.set(template='1: 5 5 5 5\n2: 3 3 3 3\n3: 1 2 1 1')
        wombat.run(wombat.WombatConfig(base_url=server.url, **given))
        assert len(server.requests()) == 6*3 + 5 + 3
    pool = read_json(out/'candidates.json')
    summary = read_summary(out)
    assert [q['instruction'] for q in pool] == [r['instruction'] for r in prompts[:5]]
    for q in pool:
        assert q['source'] == ['a', 'b', 'c']
        assert [q['scores'][i] for i in wombat._rating_order(q, 0)] == [20., 12., 5.]
    assert summary['queries'] == summary['labels'] == 5
    assert summary['unrated'] == 1


def test_a_label_that_is_not_shown_is_asked_for_again_by_a_later_run(tmp_path):
    prompts = [f'Say {i}. Answer: (' for i in range(5)]
    fault = dict(nologprobs=1.)
    with judge_server(labels=('A', 'B'), faults=fault) as server:
        cfg = ApiConfig(base_url=server.url, store=str(tmp_path/'a.sqlite'))
        writer = ServedWriter('judge', cfg)
        for _ in range(2):
            assert np.isnan(writer.choose(prompts, 'AB')).all()
        assert len(server.requests()) == 5
        server.set(faults={})
        assert not np.isnan(ServedWriter('judge', cfg).choose(prompts, 'AB')).any()
        assert len(server.requests()) == 10
