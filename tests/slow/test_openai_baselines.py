"Reference answers from an endpoint that fails on demand: each is paid for once, in its place."
import json
from dataclasses import replace

import pytest

from alpaca_farm.core.data.records import load_records
from alpaca_farm.judging.openai_baselines import (baseline_request, BASELINES,
    OpenaiBaselinesConfig, run)
from asking import key, summary
from judge_server import digest, judge_server, prompt_text


def config(tmp_path, server=None, n=30, baseline='gpt-4-0314', **more):
    data = tmp_path/'eval.json'
    data.write_text(json.dumps([dict(instruction=f'Say word {i}.', input='loudly' * (i % 2),
                                     dataset='own') for i in range(n)]))
    usual = dict(out=str(tmp_path/'run'), data=str(data), baseline=baseline, tries=2,
                 store=str(tmp_path/'a.sqlite'), base_url=server.url if server else '',
                 models=[f'{b}=judge' for b in BASELINES])
    return OpenaiBaselinesConfig(**usual | more)


def wanted(cfg, model='judge'):
    "What the server says to each instruction: the hash of what it was sent."
    return [f'Word {digest(prompt_text(baseline_request(r, cfg, model)))[:8]}.'
            for r in load_records(cfg.data)]


def answers(cfg): return [r['output'] for r in load_records(cfg.out, 'outputs', 'output')]
def server_of(**options): return judge_server(template=' Word {hash}.\n', **options)


@pytest.mark.parametrize('baseline', ['text-davinci-003', 'gpt-4-0314'])
@pytest.mark.parametrize('model', ['judge', 'text-davinci-003'])
def test_what_is_sent(tmp_path, baseline, model):
    "As a chat and as a completion, in the order of instructions."
    with server_of() as server:
        cfg = config(tmp_path, server, baseline=baseline, models=[f'{baseline}={model}'])
        run(cfg)
        path, = {r['path'] for r in server.requests()}
    assert answers(cfg) == wanted(cfg, model)
    for row, record in zip(load_records(cfg.out, 'outputs'), load_records(cfg.data)):
        assert row['generator'] == model and all(row[k] == v for k, v in record.items())
    assert path == ('/v1/chat/completions' if model == 'judge' else '/v1/completions')


def test_any_model_by_its_name(tmp_path):
    "It is asked the instruction itself; what it thought before it answered is left out."
    with judge_server(template='<think>\nHm.\n</think>\n\nWord {hash}.') as server:
        cfg = config(tmp_path, server, n=3, baseline='my/model.gguf', models=[])
        run(cfg)
        assert {r['model'] for r in server.requests()} == {'my/model.gguf'}
    assert answers(cfg) == wanted(cfg, 'my/model.gguf')
    user, = baseline_request(load_records(cfg.data)[1], cfg, cfg.baseline)['messages']
    assert user == dict(role='user', content='Say word 1.\n\nloudly')
    assert {r['generator'] for r in load_records(cfg.out, 'outputs')} == {'my/model.gguf'}


def test_several_samples_other_seeds_and_cut_answers(tmp_path):
    with server_of() as server:
        cfg = config(tmp_path, server, n=4)
        run(cfg)
        samples = replace(cfg, out=str(tmp_path/'samples'), n=3, max_tokens=3, seed=1)
        run(samples)
        assert server.counts()['ok'] == 4 + 12, 'a sample of its own each'
        run(replace(samples, out=str(tmp_path/'more'), n=5, max_instances=2))
        assert server.counts()['ok'] == 16 + 4, 'three of five were there'
    rows = load_records(samples.out, 'candidates', 'candidates')
    assert [len(r['output']) for r in rows] == [3]*4 and summary(samples)['ended'] == 0
    assert answers(samples) == [r['output'][0] for r in rows]


def test_no_key_and_no_baseline(tmp_path, monkeypatch):
    monkeypatch.delenv('OPENAI_API_KEY')
    with pytest.raises(ValueError, match='OPENAI_API_KEY'): run(config(tmp_path))
    with pytest.raises(ValueError, match='baseline = '): run(config(tmp_path, baseline=''))


@pytest.mark.parametrize('model, decoding, fields', [
    ('m', ['max_tokens=77', 'top_p=0.5'], dict(temperature=.7, max_tokens=77, top_p=.5)),
    ('gpt-5', ['reasoning_effort=low'],
     dict(max_completion_tokens=300 + 4096, reasoning_effort='low'))])
def test_decoding_changes_the_request(tmp_path, model, decoding, fields):
    cfg = config(tmp_path, decoding=decoding)
    request = baseline_request(dict(instruction='Say.'), cfg, model)
    assert {k: v for k, v in request.items() if k not in ('model', 'messages')} == fields
