"""Annotation runs with judges behind an endpoint, reward models and recorded labels: what is asked, paid for, stored and refused."""
import gc
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

import tiny
from alpaca_farm.core.data import preferences
from alpaca_farm import annotators
from alpaca_farm.annotators import annotate_pairs, AnnotatorsConfig, load_annotators
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.data.records import full_instruction, load_records
from alpaca_farm.core.ask.judge_configs import entry_model, judge_config_file, read_judge_config
from alpaca_farm.core.run.runs import read_summary
from alpaca_farm.core.ask.store import Store
from judge_server import judge_server

MODELS = ['gpt-3.5-turbo-16k-0613=judge', 'gpt-4-0314=judge', 'gpt-3.5-turbo-0301=judge', 'text-davinci-003=judge', 'gpt-4.1=judge']


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ('OPENAI_BASE_URL', 'OPENAI_API_BASE', 'OPENAI_ORG_ID'): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('OPENAI_API_KEY', 'test')
    monkeypatch.setattr('openai._base_client.MAX_RETRY_DELAY', .05)


def pairs(n):
    rng = np.random.default_rng(1)
    return [dict(instruction=f'Say word {i}.', input='now' if i % 2 else '', output_1='a'*int(rng.integers(1, 40)), output_2='b'*int(rng.integers(41, 80)))
            for i in range(n)]


def config(tmp_path, server, n=40, **more):
    file = tmp_path/'pairs.json'
    file.write_text(json.dumps(pairs(n)))
    configured = judge_config_file(more.get('annotators', 'chatgpt'))
    used = {entry_model(e) for e in read_judge_config(configured).values()} if configured else ()
    models = [m for m in MODELS if m.split('=')[0] in used]
    return AnnotatorsConfig(**dict(dict(out=str(tmp_path/'run'), outputs=str(file), annotators='chatgpt', models=models, base_url=server and server.url,
                                        store=str(tmp_path/'answers.sqlite'), label_flip=0., tries=3, timeout=5.), **more))


def again(cfg, **more): return AnnotatorsConfig(**{**vars(cfg), **more})


def test_a_run_with_a_paid_judge(tmp_path):
    "Labels in the pairs' own order, price, position bias, AlpacaEval's rows; nothing is asked twice, the fields of the caller are kept."
    (tmp_path/'prices.yaml').write_text('judge: [1, 2]')
    with judge_server(latency=.01) as server:
        cfg = config(tmp_path, server, prices=str(tmp_path/'prices.yaml'))
        annotators.run(cfg)
        rows, summary = load_records(cfg.out, 'preferences', 'preference'), read_summary(cfg.out)
        assert [r['preference'] for r in rows] == [2.]*40, 'the longer answer is the second'
        assert [(r['instruction'], r['input']) for r in rows] == [(p['instruction'], p['input']) for p in pairs(40)]
        assert summary['asked'] == 40 and summary['dollars'] > 0 and summary['unanswered'] == 0 and summary['first_low'] < .5 < summary['first_high']
        assert sum(r['price'] for r in rows) == pytest.approx(summary['dollars'], abs=1e-6) and all(r['time'] >= .01 for r in rows)
        theirs = json.loads((tmp_path/'run'/'annotations.json').read_text())
        assert theirs[1]['instruction'] == 'Say word 1.\n\nnow' and theirs[1]['preference'] == 2 and theirs[1]['raw_completion']
        annotators.run(again(cfg, out=str(tmp_path/'other'), label_flip=.25))
        assert len(server.requests()) == 40, 'the same questions were asked again'
        flipped = load_records(str(tmp_path/'other'), 'preferences', 'preference')
        assert 0 < sum(r['flipped'] for r in flipped) < 25 and all((r['preference'] == 1) == r['flipped'] for r in flipped)


def test_recorded_labels_come_back_as_they_were(tmp_path):
    "A run's labels, and AlpacaEval's annotations.json made of them, are annotators; merged inputs are found by their merged text."
    with judge_server() as server:
        cfg = config(tmp_path, server)
        annotators.run(cfg)
    for spec in (cfg.out, str(tmp_path/'run'/'preferences.json')):
        rows = annotate_pairs(pairs(40), load_annotators(spec, cfg))
        assert [r['preference'] for r in rows] == [2.]*40
    merged = [dict(p, instruction=full_instruction(p), input='') for p in pairs(40)] + pairs(40)
    assert [r['preference'] for r in annotate_pairs(merged, load_annotators(str(tmp_path/'run'/'annotations.json'), cfg))] == [2.]*80


def test_the_pool_of_thirteen(tmp_path):
    "AlpacaFarm's pool runs with its models mapped, batched prompts included; one client for all, weights, stable draws."
    with judge_server(latency=0.) as server:
        cfg = config(tmp_path, server, n=120, annotators='alpaca_farm', tries=2, weights=['gpt4_1=0', 'davinci003_1=5'])
        pool = load_annotators(cfg.annotators, cfg)
        assert len(pool.annotators) == 13 and len(annotators.api_clients(pool)) == 1
        who = [preferences.draw_annotator(pool, p) for p in pairs(600)]
        count = {a.name: who.count(i) for i, a in enumerate(pool.annotators)}
        assert count['gpt4_1'] == 0 and count['davinci003_1'] > 2*max(v for k, v in count.items() if k != 'davinci003_1')
        assert who[:100] == [preferences.draw_annotator(pool, p) for p in pairs(100)]
        with pytest.raises(ValueError, match='weights: nobody'): again(cfg, weights=['nobody=1'])
        with pytest.raises(ValueError, match='negative'): again(cfg, weights=['gpt4_1=-1'])
        one = ['gpt4_4', 'chatgpt_1', 'chatgpt_3', 'chatgpt_4', 'davinci003_4']   # one pair to a prompt, and "Output (b)" for an answer
        cfg = again(cfg, weights=[f'{a.name}={int(a.name in one)}' for a in pool.annotators])
        annotators.run(cfg)
        rows = load_records(cfg.out, 'preferences', 'preference')
        assert [r['preference'] for r in rows] == [2.]*120 and {r['annotator'] for r in rows} == set(one)
        assert len(server.requests()) == 120


def test_a_judge_that_samples_is_asked_anew_for_another_seed(tmp_path):
    "At temperature 0 another seed is answered from the store; above 0 it is another replicate of the judge's noise."
    with judge_server() as server:
        for spec, samples in (('chatgpt', False), ('alpaca_farm', True)):
            all_ = read_judge_config(judge_config_file(spec))
            weights = [f'{n}={int(n == "davinci003_4")}' for n in all_] if samples else []
            for k, (seed, asked) in enumerate(((0, 80), (1, 80*samples), (0, 0))):
                before = len(server.requests())
                annotators.run(config(tmp_path, server, out=str(tmp_path/f'{spec}{k}'), seed=seed, annotators=spec, both_orders=True, weights=weights))
                assert len(server.requests()) - before == asked, (spec, seed)


def test_failures_leave_the_run_open_and_are_asked_alone(tmp_path):
    with judge_server(faults={'500': {'p': 0, 'always_for': 'Say word [0-4]\\.'}}) as server:
        cfg = config(tmp_path, server)
        with pytest.raises(ValueError, match='35 of 40 pairs are labelled: 5 requests failed'): annotators.run(cfg)
        assert not read_summary(cfg.out) and len(load_records(cfg.out, 'preferences', 'preference')) == 35
        server.set(faults={})
        before = len(server.requests())
        annotators.run(cfg)
        assert len(server.requests()) - before == 5 and read_summary(cfg.out)['labels'] == 40


def test_what_cannot_be_answered_is_no_label(tmp_path, capsys):
    "A prompt that is too long, and an answer that is never a verdict: reported with their reasons, counted nowhere."
    with judge_server(faults={'context': {'p': 0, 'always_for': 'Say word 7\\.'}, 'refusal': {'p': 0, 'always_for': 'Say word 9\\.'}}) as server:
        cfg = config(tmp_path, server)
        annotators.run(cfg)
    assert read_summary(cfg.out)['labels'] == 38 and read_summary(cfg.out)['unanswered'] == 2
    lost = json.loads((tmp_path/'run'/'unanswered.json').read_text())
    assert [p['instruction'] for p in lost['pairs']] == ['Say word 7.', 'Say word 9.'] and 'context length' in lost['reasons'][0]
    assert len(lost['unread']) == 1 and lost['unread'][0]['said'] and 'no verdict on 2 of 40' in capsys.readouterr().out


def test_labels_nobody_is_asked_for(tmp_path):
    "AlpacaFarm's cheaper noise: half of the pairs get a coin, half of the price is saved, and the summary says so."
    with judge_server() as server:
        cfg = config(tmp_path, server, n=200, label_flip=.25, ask_flipped=False)
        annotators.run(cfg)
        summary, rows = read_summary(cfg.out), load_records(cfg.out, 'preferences', 'preference')
        assert summary['unasked'] == sum(r['annotator'] == 'coin' for r in rows) == 200 - len(server.requests())
        assert summary['flip_low'] < .25 < summary['flip_high'] and {r['flipped'] for r in rows} == {None, False}
        assert .15 < np.mean([r['preference'] == 1 for r in rows]) < .35
        with pytest.raises(ValueError, match='label_flip'): again(cfg, label_flip=.6)


def test_both_orders_of_a_judge_that_likes_the_first(tmp_path):
    "It contradicts itself on every pair: ties, each of two answers paid for."
    with judge_server(template='Output (a)') as server:
        cfg = config(tmp_path, server, both_orders=True)
        annotators.run(cfg)
        summary = read_summary(cfg.out)
        assert len(server.requests()) == 80 and summary['ties'] == 1. and summary['first'] == 1. and summary['consistent'] == 0.


def test_the_batch_api(tmp_path, capsys):
    "Half the price; a file for each model and kind of request."
    (tmp_path/'prices.yaml').write_text('judge: [1, 2]\nother: [1, 2]\nmy-instruct: [1, 2]')
    with judge_server(batch_seconds=.3) as server:
        models = ['gpt-4-0314=judge', 'gpt-3.5-turbo-0301=other', 'text-davinci-003=my-instruct']
        one = ['gpt4_4', 'chatgpt_1', 'davinci003_4']   # a chat with one model, a chat with another, a completion
        weights = [f'{n}={int(n in one)}' for n in read_judge_config(judge_config_file('alpaca_farm'))]
        cfg = config(tmp_path, server, batch=True, prices=str(tmp_path/'prices.yaml'), annotators='alpaca_farm', models=models, weights=weights)
        annotators.run(cfg)
        assert read_summary(cfg.out)['labels'] == 40 and 'within a day' in capsys.readouterr().out
        assert sum('batch' in r for r in server.requests()) == 40
        assert sum(r['path'] == '/v1/batches' and r['method'] == 'POST' for r in server.requests()) == 3
        full = again(cfg, out=str(tmp_path/'full'), store=str(tmp_path/'full.sqlite'), batch=False)
        annotators.run(full)
        assert read_summary(full.out)['dollars'] == pytest.approx(2*read_summary(cfg.out)['dollars'], rel=.01)


def test_what_a_batch_did_not_answer_is_asked_again(tmp_path):
    "Server errors and expired lines leave the run open; the next one sends these alone, and waits for them."
    with judge_server(batch_seconds=.2, faults={'500': {'p': 0, 'always_for': 'Say word [0-4]\\.'}, 'timeout': {'p': 0, 'always_for': 'Say word [5-6]\\.'}}) as server:
        cfg = config(tmp_path, server, batch=True)
        with pytest.raises(ValueError, match='33 of 40 pairs are labelled: 7 requests failed'): annotators.run(cfg)
        server.set(faults={})
        annotators.run(cfg)
        assert read_summary(cfg.out)['labels'] == 40 and sum('batch' in r for r in server.requests()) == 47


WAITS = '''
import sys, json
from alpaca_farm.annotators import AnnotatorsConfig, run
run(AnnotatorsConfig(**json.loads(sys.argv[1])))
'''


def test_a_batch_outlives_its_process(tmp_path):
    with judge_server(batch_seconds=4.) as server:
        (tmp_path/'prices.yaml').write_text('judge: [1, 2]')
        cfg = config(tmp_path, server, batch=True, prices=str(tmp_path/'prices.yaml'))
        started = subprocess.Popen([sys.executable, '-c', WAITS, json.dumps(vars(cfg))], env=tiny.environment(), stdout=subprocess.DEVNULL)
        while not any(r['path'] == '/v1/batches' and r['method'] == 'POST' for r in server.requests()):
            assert started.poll() is None
            time.sleep(.05)
        time.sleep(.2)
        started.send_signal(signal.SIGKILL); started.wait()
        with pytest.raises(ValueError, match='under way in the batch'): annotators.run(replace(cfg, batch=False))
        time.sleep(4)
        annotators.run(replace(cfg, batch=False))   # its answers are read without the setting too, at a batch's price
        assert read_summary(cfg.out)['labels'] == 40
        assert sum('batch' in r for r in server.requests()) == 40, 'the batch was sent again'
        full = replace(cfg, batch=False, out=str(tmp_path/'full'), store=str(tmp_path/'full.sqlite'))
        annotators.run(full)
        assert read_summary(full.out)['dollars'] == pytest.approx(2*read_summary(cfg.out)['dollars'], rel=.01)
        assert sum(r['price'] for r in read_json(f'{cfg.out}/preferences.json')) == pytest.approx(read_summary(cfg.out)['dollars'], abs=1e-6)


def test_a_batch_whose_name_was_lost_is_found_by_its_file(tmp_path):
    with judge_server(batch_seconds=1.) as server:
        cfg = config(tmp_path, server, batch=True)
        started = subprocess.Popen([sys.executable, '-c', WAITS, json.dumps(vars(cfg))], env=tiny.environment(), stdout=subprocess.DEVNULL)
        while not any(r['path'] == '/v1/batches' and r['method'] == 'POST' for r in server.requests()): time.sleep(.02)
        time.sleep(.2)
        started.kill(); started.wait()
        store = Store(cfg.store)
        store.run('update batches set name = null'); store.close()
        annotators.run(cfg)
        assert read_summary(cfg.out)['labels'] == 40 and sum('batch' in r for r in server.requests()) == 40


def test_a_full_disk_stops_with_what_there_is(tmp_path, monkeypatch):
    "SQLite's own error for a disk that fills after 20 answers; what was stored is used by the next run."
    put = Store.put
    def filling(self, *args):
        if len(self) >= 20: self.run(f"pragma max_page_count = {self.run('pragma page_count')[0][0]}")
        return put(self, *args)
    with judge_server() as server:
        cfg = config(tmp_path, server, n=200)
        monkeypatch.setattr(Store, 'put', filling)
        with pytest.raises(ValueError, match='the disk is full. What is stored is safe'): annotators.run(cfg)
        monkeypatch.setattr(Store, 'put', put)
        stored, asked = len(Store(cfg.store)), len(server.requests())
        assert 20 <= stored < 200 and asked - stored <= cfg.concurrency
        annotators.run(cfg)
        assert read_summary(cfg.out)['labels'] == 200 and len(server.requests()) == asked + 200 - stored


@pytest.mark.parametrize('harm', ['header', 'middle', 'cut'])
def test_a_damaged_store_is_said_and_left(tmp_path, harm):
    with judge_server() as server:
        cfg = config(tmp_path, server, n=120)
        annotators.run(cfg)
        file = tmp_path/'answers.sqlite'
        gc.collect()   # an open connection would write the damaged file when it closes
        bytes_ = bytearray(file.read_bytes())
        if harm == 'cut': bytes_ = bytes_[:len(bytes_)//2]
        else:
            at = 0 if harm == 'header' else 4096
            bytes_[at:at + 8000] = np.random.default_rng(0).bytes(8000)
        for p in tmp_path.glob('answers.sqlite-*'): p.unlink()
        file.write_bytes(bytes_)
        with pytest.raises((ValueError, OSError), match='damaged|malformed'): annotators.run(again(cfg, out=str(tmp_path/'other')))
        if harm != 'middle': assert file.read_bytes() == bytes_, 'the damaged file was changed'   # there it is seen only when it is read
        assert len(server.requests()) == 120


def test_no_server_and_no_key_are_said(tmp_path, monkeypatch):
    nowhere = config(tmp_path, None, base_url='http://127.0.0.1:9/v1')
    with pytest.raises(ValueError, match='no answer from 127.0.0.1:9'): annotators.run(nowhere)
    monkeypatch.delenv('OPENAI_API_KEY')
    with pytest.raises(ValueError, match='OPENAI_API_KEY'): annotators.run(replace(nowhere, base_url=''))


@pytest.mark.parametrize('more, message', [
    (dict(annotators='alpaca_eval_gtp4'), 'Did you mean alpaca_eval_gpt4'), (dict(annotators='claude'), 'OpenAI-compatible'),
    (dict(models=['gpt-4']), 'old=new'), (dict(annotators='no_module:f'), 'no module')])
def test_what_cannot_be_asked_is_refused(tmp_path, more, message):
    with pytest.raises((ValueError, ModuleNotFoundError), match=message):
        annotators.run(config(tmp_path, None, base_url='http://localhost:1/v1', **more))


def test_a_structured_verdict(tmp_path):
    "Our own judge: a strict schema is sent, and JSON that keeps to it comes back."
    with judge_server(regexes=(r'<first>\n(.*?)\n</first>', r'<second>\n(.*?)\n</second>')) as server:
        cfg = config(tmp_path, server, annotators='structured')
        annotators.run(cfg)
        assert {r['preference'] for r in load_records(cfg.out, 'preferences', 'preference')} == {2.}
        stored = Store(cfg.store).run('select request from requests')[0][0]
        assert json.loads(stored)['response_format']['json_schema']['strict']


def test_a_reward_model_and_a_local_model_as_judges(tmp_path):
    "By their folders, without an endpoint: Bradley and Terry's probabilities, and the probabilities of labels."
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
    words = {c: i for i, c in enumerate(['<pad>', '</s>', *map(chr, range(32, 127)), '\n'])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token=' ')), pad_token='<pad>', eos_token='</s>')
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split('', 'isolated')
    small = LlamaConfig(vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                        max_position_embeddings=900, initializer_range=.5, pad_token_id=0, num_labels=1)
    for name, kind in (('judge', LlamaForCausalLM), ('reward', LlamaForSequenceClassification)):
        kind(small).save_pretrained(tmp_path/name); tokenizer.save_pretrained(tmp_path/name)
    cfg = config(tmp_path, None, base_url='', annotators=str(tmp_path/'reward'))
    annotators.run(cfg)
    rows = load_records(cfg.out, 'preferences', 'preference')
    from alpaca_farm.core.model.rewards import reward
    of = reward(str(tmp_path/'reward'), cfg)
    better = np.subtract(*(np.array(of([dict(p, output=p[k]) for p in rows])) for k in ('output_2', 'output_1')))
    assert [r['expected'] - 1 for r in rows] == pytest.approx(1/(1 + np.exp(-better)), abs=1e-4)
    local = again(cfg, out=str(tmp_path/'local'), annotators='open_pool', models=[f'{m}={tmp_path/"judge"}' for m in (
        'meta-llama/Llama-3.1-8B-Instruct', 'Qwen/Qwen2.5-7B-Instruct', 'mistralai/Mistral-7B-Instruct-v0.3')])
    annotators.run(local)
    assert {r['annotator'] for r in load_records(local.out, 'preferences', 'preference')} > {'llama_strict', 'qwen_letter'}
    with pytest.raises(ValueError, match='needs a prompt'): load_annotators(str(tmp_path/'judge'), cfg)
    with pytest.raises(ValueError, match='cannot use a local model'):
        annotators.run(again(cfg, out=str(tmp_path/'no'), annotators='alpaca_eval_gpt4', models=[f'gpt-4={tmp_path/"judge"}']))


@pytest.mark.parametrize('spec', ['my_module:judge', 'labels.json'])
def test_only_the_worlds_labels_are_flipped_by_default(tmp_path, monkeypatch, spec):
    "A user's own judge and recorded labels stay as they are."
    monkeypatch.setitem(sys.modules, 'my_module', sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], 'judge', lambda pairs: [1. + (p['output_1'] < p['output_2']) for p in pairs], raising=False)
    (tmp_path/'pairs.json').write_text(json.dumps(pairs(200)))
    (tmp_path/'labels.json').write_text(json.dumps([dict(p, preference=2) for p in pairs(200)]))
    cfg = AnnotatorsConfig(out=str(tmp_path/'run'), outputs=str(tmp_path/'pairs.json'), annotators=spec if ':' in spec else str(tmp_path/spec))
    annotators.run(cfg)
    rows = load_records(cfg.out, 'preferences', 'preference')
    assert {r['preference'] for r in rows} == {2.} and not any(r['flipped'] for r in rows) and read_summary(cfg.out)['flip_rate'] == 0


@pytest.mark.parametrize('given, said', [(['the first']*2, "gave 'the first'"), ([3, 1], 'preference of row 0 is 3'), ([1], 'gave 1 preferences for 2'), ([[1], [2]], 'gave 2')])
def test_a_judge_that_gives_no_preferences_is_named(given, said):
    def my_judge(pairs): return given
    with pytest.raises(ValueError, match=f'my_judge.*{said}'): preferences.annotator_preferences(pairs(2), my_judge)
