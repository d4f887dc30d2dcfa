"""A policy sampled by a server: the same answers after every update, or a clear error."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from openai import OpenAI

import tiny
from lora_server import lora_server
from alpaca_farm import ppo
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.model.generation import generate
from alpaca_farm.core.model.models import load_policy, load_reference
from alpaca_farm.core.model.policy import own_weights
from alpaca_farm.core.run.runs import read_log
from alpaca_farm.core.model.served import _adapter_mark, _logprob_gap, use_sampler
from alpaca_farm.core.data.text import encode_prompts
from alpaca_farm.ppo import PPOConfig


def config(base, out, url, **more):
    return PPOConfig(**tiny.settings('ppo', base, out=str(out), lora_rank=4, sampler=url, **more))


def policy_of(base, folder, url):
    "A policy with an adapter and five prompts; `url`: of its server."
    cfg = config(base, folder, url)
    policy = load_policy(cfg.policy, cfg, train=True)
    use_sampler(policy, cfg, folder)
    return policy, encode_prompts(load_records(cfg.data, 'eval', n=5), policy.tokenizer)


def move(policy, seed, scale=.3):
    "Change the adapter's weights in place, as an optimiser does."
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in own_weights(policy).values(): p.add_(scale*torch.randn(p.shape, generator=g))


def here(policy, *args, **more):
    "Samples of this process."
    return generate(replace(policy, sampler=None), *args, **more)


def texts(samples): return [[s.tokens for s in group] for group in samples]


@pytest.fixture
def folder(base): return str(base/'sft'/'model')


def test_greedy_answers_are_equal_after_every_update(base, folder, tmp_path):
    "Every version has a name of its own, is sent once, and replaces the last one."
    with lora_server(folder) as server:
        policy, prompts = policy_of(base, tmp_path/'ppo', server.url)
        given, before, names = (prompts, 1, 16, 0.), [], []
        def loads(): return sum('/load_lora_adapter' in path for path, _ in server.model.log)
        for version in range(3):
            served, local = generate(policy, *given), here(policy, *given)
            assert texts(served) == texts(local) not in before
            for (a,), (b,) in zip(served, local):
                assert a.ended == b.ended
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
            before.append(texts(served))
            name, = server.model.adapters
            assert name not in names and name.endswith(_adapter_mark(policy))
            names.append(name)
            generate(policy, *given)
            assert loads() == version + 1
            move(policy, version)
        reference = load_reference(policy, config(base, tmp_path/'ppo', server.url))
        assert texts(generate(reference, *given)) == before[0]
        assert reference.sampler is None


def test_samples_have_the_log_probs_of_this_process(base, folder, tmp_path):
    with lora_server(folder) as server:
        policy, prompts = policy_of(base, tmp_path/'ppo', server.url)
        move(policy, 0)
        def sampled(seed): return generate(policy, prompts, 3, 12, .7, seed=seed)
        samples = sampled(4)
        assert [len(g) for g in samples] == [3]*5
        assert texts(samples) == texts(sampled(4)) != texts(sampled(5))
        flat = [s for g in samples for s in g]
        written = [s.tokens for s in flat], [s.logprobs for s in flat]
        assert _logprob_gap(policy, [p for p in prompts for _ in range(3)], *written, .7) < 1e-5
        assert {b['n'] for path, b in server.model.log if path.endswith('/completions')} == {3}


def test_a_start_over_hands_over_anew_and_removes_what_was_left(base, folder, tmp_path):
    with lora_server(folder) as server:
        policy, prompts = policy_of(base, tmp_path/'ppo', server.url)
        given = prompts, 1, 8, 0.
        move(policy, 0)
        first = texts(generate(policy, *given))
        left, = server.model.adapters
        again, _ = policy_of(base, tmp_path/'ppo', server.url)
        assert server.model.adapters == []
        move(again, 0)
        assert texts(generate(again, *given)) == first
        assert server.model.adapters == [left], 'the same weights, the same name'
        move(again, 1)
        generate(again, *given)
        assert server.model.adapters != [left] and len(server.model.adapters) == 1


@pytest.mark.parametrize('given, message', [
    (dict(stale=True), 'as it is now'), (dict(ids=False), 'no token ids'),
    (dict(lora=False), '--enable-lora')])
def test_a_server_that_does_not_follow_is_found_out(base, folder, tmp_path, given, message):
    with lora_server(folder, **given) as server:
        policy, prompts = policy_of(base, tmp_path/'ppo', server.url)
        move(policy, 0)
        with pytest.raises(RuntimeError, match=message):
            generate(policy, prompts, max_new_tokens=8)


def test_another_model_and_a_server_that_is_gone(base, tmp_path, monkeypatch):
    "Said before any work, and without a key; the judges' key is not sent."
    monkeypatch.setattr('time.sleep', lambda s: None)
    monkeypatch.setenv('OPENAI_API_KEY', 'of the judges')
    monkeypatch.setenv('VLLM_API_KEY', 'a1B2'*8)
    with lora_server(str(base/'world'/'model')) as server:
        for p in server.model.model.parameters(): p.data.mul_(1.2)
        with pytest.raises(RuntimeError, match='serve the model'):
            ppo.train(config(base, tmp_path/'ppo', server.url))
        policy, prompts = policy_of(base, tmp_path/'b', server.url)
        sampler = policy.sampler
        assert 'judges' not in str(sampler.client.auth_headers)
        with pytest.raises(RuntimeError, match='404.*not found') as e:
            sampler.request('/key', key='a1B2'*8)
        assert 'a1B2' not in str(e.value)
    sampler.client = OpenAI(base_url=server.url, api_key='none')   # a new connection
    with pytest.raises(RuntimeError, match=f'sampler = {server.url}/load_lora'):
        generate(policy, prompts, max_new_tokens=4)
    with pytest.raises(RuntimeError, match=f'sampler = {server.url}/models'):
        ppo.train(config(base, tmp_path/'c', server.url))
    assert not (tmp_path/'ppo').exists() and not (tmp_path/'c').exists()


def test_ppo_with_a_served_sampler(base, folder, tmp_path):
    with lora_server(folder) as server:
        run = ppo.train(config(base, tmp_path/'ppo', server.url, learning_rate=.02))
        log = read_log(run.folder)
        assert len(log) == 3 and log[0]['kl'] == pytest.approx(0, abs=1e-4)
        assert all(r['first_ratio'] == pytest.approx(1, abs=1e-5) for r in log)
        loaded = [b['lora_name'] for p, b in server.model.log if p.endswith('/load_lora_adapter')]
        assert len(loaded) == len(set(loaded)) >= 3 and len(server.model.adapters) == 1
        asked = {b['model'] for p, b in server.model.log if p.endswith('completions')}
        assert asked >= {*loaded[:3]}
