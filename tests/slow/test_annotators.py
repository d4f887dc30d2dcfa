"Annotation runs with judges behind an endpoint, on this machine, and from files."
import gc
from dataclasses import replace

import numpy as np
import pytest

from alpaca_farm.annotators import annotate_pairs, run
from alpaca_farm.data.dialogues import full_instruction
from alpaca_farm.judging.judges import api_clients, load_annotators
from alpaca_farm.judging.pools import draw_annotator
from alpaca_farm.run.files import read_json
from asking import annotation, key, labels, pairs, prices, summary, weights_of
from judge_server import judge_server


def given(cfg): return [r['preference'] for r in labels(cfg)]


def test_a_run_with_a_paid_judge(tmp_path):
    "Labels in the pairs' own order, price, bias, AlpacaEval's rows; nothing is asked twice."
    with judge_server(latency=.01) as server:
        cfg = annotation(tmp_path, server, prices=prices(tmp_path))
        run(cfg)
        rows = labels(cfg)
        result = summary(cfg)
        assert given(cfg) == [2.]*40, 'the longer answer is the second'
        assert [{k: r[k] for k in p} for r, p in zip(rows, pairs(40))] == pairs(40)
        assert result['asked'] == 40
        assert result['dollars'] > 0 == result['unanswered']
        assert result['first_low'] < .5 < result['first_high']
        assert sum(r['price'] for r in rows) == pytest.approx(result['dollars'], abs=1e-6)
        assert all(r['time'] >= .01 for r in rows)
        theirs = read_json(f'{cfg.out}/annotations.json')[1]
        assert theirs['instruction'] == 'Say word 1.\n\nnow'
        assert theirs['raw_completion']
        other = replace(cfg, out=str(tmp_path/'other'), label_flip=.25)
        run(other)
        assert len(server.requests()) == 40, 'the same questions were asked again'
        flipped = [r['flipped'] for r in labels(other)]
        assert 0 < sum(flipped) < 25
        assert [y == 1 for y in given(other)] == flipped
    merged = [dict(p, instruction=full_instruction(p), input='') for p in pairs(40)]
    for file in ('', '/preferences.json', '/annotations.json'):   # its labels are annotators
        recorded = annotate_pairs(pairs(40) + merged, load_annotators(cfg.out + file, cfg))
        assert [r['preference'] for r in recorded] == [2.]*80


def test_the_pool_of_thirteen(tmp_path):
    "AlpacaFarm's pool with its models mapped: one client for all, and weights."
    with judge_server() as server:
        cfg = annotation(tmp_path, server, n=120, annotators='alpaca_farm',
                         weights=['gpt4_1=0', 'davinci003_1=5'])
        pool = load_annotators(cfg.annotators, cfg)
        assert len(pool.annotators) == 13
        assert len(api_clients(pool)) == 1
        who = [draw_annotator(pool, p) for p in pairs(600)]
        count = {a.name: who.count(i) for i, a in enumerate(pool.annotators)}
        assert count['gpt4_1'] == 0
        assert count.pop('davinci003_1') > 2*max(count.values())
        one = 'gpt4_4', 'chatgpt_1', 'chatgpt_3', 'chatgpt_4', 'davinci003_4'   # pair to a prompt
        cfg = replace(cfg, weights=weights_of('alpaca_farm', *one))
        run(cfg)
        assert given(cfg) == [2.]*120
        assert {r['annotator'] for r in labels(cfg)} == set(one)
        assert len(server.requests()) == 120


SAMPLES = dict(annotators='alpaca_farm', weights=weights_of('alpaca_farm', 'davinci003_4'))


@pytest.mark.parametrize('judge, totals', [
    (dict(annotators='chatgpt'), [80, 80, 80]), (SAMPLES, [80, 160, 160])])
def test_a_judge_that_samples_is_asked_anew_for_another_seed(tmp_path, judge, totals):
    with judge_server() as server:
        for k, seed in enumerate((0, 1, 0)):
            out = str(tmp_path/f'{k}')
            run(annotation(tmp_path, server, out=out, seed=seed, both_orders=True, **judge))
            assert len(server.requests()) == totals[k]


def test_failures_leave_the_run_open_and_are_asked_alone(tmp_path):
    with judge_server(faults={'500': {'p': 0, 'always_for': 'Say word [0-4]\\.'}}) as server:
        cfg = annotation(tmp_path, server)
        with pytest.raises(ValueError, match='35 of 40'):
            run(cfg)
        assert not summary(cfg)
        assert len(labels(cfg)) == 35
        server.set(faults={})
        run(cfg)
        assert summary(cfg)['labels'] == 40
        assert server.counts()['ok'] == 40


def test_what_cannot_be_answered_is_no_label(tmp_path):
    "A prompt that is too long, and an answer that is never a verdict."
    faults = {'context': {'p': 0, 'always_for': 'Say word 7\\.'},
              'refusal': {'p': 0, 'always_for': 'Say word 9\\.'}}
    with judge_server(faults=faults) as server:
        cfg = annotation(tmp_path, server)
        run(cfg)
    assert summary(cfg)['labels'] == 38
    assert summary(cfg)['unanswered'] == 2
    lost = read_json(f'{cfg.out}/unanswered.json')
    assert [p['instruction'] for p in lost['pairs']] == ['Say word 7.', 'Say word 9.']
    assert 'context length' in lost['reasons'][0]
    assert lost['unread'][0]['said']


def test_labels_nobody_is_asked_for(tmp_path):
    "AlpacaFarm's cheaper noise: half of the pairs get a coin, and half of the price is saved."
    with judge_server() as server:
        cfg = annotation(tmp_path, server, n=200, label_flip=.25, ask_flipped=False)
        run(cfg)
        coins = sum(r['annotator'] == 'coin' for r in labels(cfg))
        assert summary(cfg)['unasked'] == coins == 200 - len(server.requests())
    assert 'flip_rate' not in summary(cfg)   # nobody knows which coins are wrong
    assert .15 < np.mean(np.array(given(cfg)) == 1) < .35


def test_a_damaged_store_is_said_and_left(tmp_path):
    with judge_server() as server:
        cfg = annotation(tmp_path, server, n=120)
        run(cfg)
        gc.collect()   # an open connection would write the damaged file when it closes
        file = tmp_path/'answers.sqlite'
        damaged = file.read_bytes()[:file.stat().st_size//2]
        for p in tmp_path.glob('answers.sqlite-*'):
            p.unlink()
        file.write_bytes(damaged)
        with pytest.raises((ValueError, OSError), match='damaged|malformed'):
            run(replace(cfg, out=str(tmp_path/'other')))
        assert file.read_bytes() == damaged
        assert len(server.requests()) == 120


@pytest.mark.parametrize('more, message', [
    (dict(base_url='http://127.0.0.1:9/v1'), '127.0.0.1:9'),
    (dict(base_url=''), 'OPENAI_API_KEY')])
def test_what_cannot_be_asked_is_refused(tmp_path, monkeypatch, more, message):
    monkeypatch.delenv('OPENAI_API_KEY')
    with pytest.raises(ValueError, match=message):
        run(annotation(tmp_path, None, **more))
