"""A policy sampled by a server: the same answers after every update, and a clear error where the two differ."""
from pathlib import Path

import numpy as np
import pytest
import torch
from openai import OpenAI

import tiny
from lora_server import lora_server
from alpaca_farm import best_of_n, ppo
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.model.adapters import state_of
from alpaca_farm.core.model.generation import generate
from alpaca_farm.core.model.models import load_policy
from alpaca_farm.core.run.runs import read_log, read_summary
from alpaca_farm.core.model.served import adapter_mark, logprob_gap, use_sampler
from alpaca_farm.core.data.text import encode_prompts
from alpaca_farm.ppo import PPOConfig


def config(base, out, url, **more): return PPOConfig(**tiny.settings('ppo', base, out=str(out), lora_rank=4, sampler=url, **more))


def policy_of(cfg, folder):
    policy, tokenizer = load_policy(cfg.policy, cfg, train=True)
    use_sampler(policy, cfg, folder)
    prompts = encode_prompts(load_records(cfg.data, 'eval', n=5), tokenizer)
    return policy, tokenizer, prompts


def move(policy, seed, scale=.3):
    "Change the adapter's weights in place, as an optimiser does."
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            if p.requires_grad: p.add_(scale*torch.randn(p.shape, generator=g))


def here(policy, *args, **more):
    "Samples of this process."
    state = state_of(policy)
    sampler, state.sampler = state.sampler, None
    try: return generate(policy, *args, **more)
    finally: state.sampler = sampler


def texts(samples): return [[s.tokens for s in group] for group in samples]


@pytest.fixture
def folder(base): return str(base/'sft'/'model')


def test_greedy_answers_are_equal_after_every_update(base, folder, tmp_path):
    with lora_server(folder) as server:
        policy, tokenizer, prompts = policy_of(config(base, tmp_path/'ppo', server.url), tmp_path/'ppo')
        greedy, before, names = dict(max_new_tokens=16, temperature=0.), [], []
        for version in range(3):
            served, local = generate(policy, tokenizer, prompts, **greedy), here(policy, tokenizer, prompts, **greedy)
            assert texts(served) == texts(local) and [[s.ended for s in g] for g in served] == [[s.ended for s in g] for g in local]
            for a, b in zip(served, local): np.testing.assert_allclose(a[0].logprobs, b[0].logprobs, atol=1e-4)
            assert texts(served) not in before, 'the update changes the answers'
            before.append(texts(served))
            name, = server.model.adapters
            assert name not in names and name.endswith(adapter_mark(policy)), 'a new name for every version, the last one unloaded'
            names.append(name)
            loads = sum(path.endswith('/load_lora_adapter') for path, _ in server.model.log)
            generate(policy, tokenizer, prompts, **greedy)
            assert sum(path.endswith('/load_lora_adapter') for path, _ in server.model.log) == loads == version + 1, 'the same weights are sent once'
            move(policy, version)
        base_answers = generate(state_of(policy).before, tokenizer, prompts, **greedy)
        assert texts(base_answers) == before[0] and state_of(state_of(policy).before).sampler is None


def test_samples_have_the_log_probs_of_this_process(base, folder, tmp_path):
    with lora_server(folder) as server:
        policy, tokenizer, prompts = policy_of(config(base, tmp_path/'ppo', server.url), tmp_path/'ppo')
        move(policy, 0)
        samples = generate(policy, tokenizer, prompts, n=3, max_new_tokens=12, temperature=.7, seed=4)
        assert [len(g) for g in samples] == [3]*5 and texts(samples) == texts(generate(policy, tokenizer, prompts, n=3, max_new_tokens=12, temperature=.7, seed=4))
        assert texts(samples) != texts(generate(policy, tokenizer, prompts, n=3, max_new_tokens=12, temperature=.7, seed=5))
        flat = [s for g in samples for s in g]
        written = [s.tokens for s in flat], [s.logprobs for s in flat]
        assert logprob_gap(policy, [p for p in prompts for _ in range(3)], *written, .7) < 1e-5
        assert {b['n'] for p, b in server.model.log if p.endswith('completions') and b['max_tokens'] == 12} == {3}


def test_a_start_over_hands_over_anew_and_removes_what_was_left(base, folder, tmp_path):
    with lora_server(folder) as server:
        cfg = config(base, tmp_path/'ppo', server.url)
        policy, tokenizer, prompts = policy_of(cfg, tmp_path/'ppo')
        move(policy, 0)
        first = texts(generate(policy, tokenizer, prompts, max_new_tokens=8, temperature=0.))
        left, = server.model.adapters
        again, _, _ = policy_of(cfg, tmp_path/'ppo')    # the process before was killed
        assert server.model.adapters == []
        move(again, 0)
        assert texts(generate(again, tokenizer, prompts, max_new_tokens=8, temperature=0.)) == first and server.model.adapters == [left], 'the same weights, the same name'
        move(again, 1)
        generate(again, tokenizer, prompts, max_new_tokens=8, temperature=0.)
        assert server.model.adapters != [left] and len(server.model.adapters) == 1


@pytest.mark.parametrize('given, message', [
    (dict(stale=True), 'as it is now'), (dict(ids=False), 'no token ids'),
    (dict(lora=False), '--enable-lora')])
def test_a_server_that_does_not_follow_is_found_out(base, folder, tmp_path, given, message):
    with lora_server(folder, **given) as server:
        policy, tokenizer, prompts = policy_of(config(base, tmp_path/'ppo', server.url), tmp_path/'ppo')
        move(policy, 0)
        with pytest.raises(RuntimeError, match=message): generate(policy, tokenizer, prompts, max_new_tokens=8)


def test_another_model_and_a_server_that_is_gone(base, tmp_path, monkeypatch):
    monkeypatch.setattr('time.sleep', lambda s: None)
    monkeypatch.setenv('OPENAI_API_KEY', 'of the judges')
    monkeypatch.setenv('VLLM_API_KEY', 'a1B2'*8)
    with lora_server(str(base/'world'/'model')) as server:
        for p in server.model.model.parameters(): p.data.mul_(1.2)   # another model of the same shape
        cfg = config(base, tmp_path/'ppo', server.url)
        with pytest.raises(RuntimeError, match='serve the model that `policy` names'): ppo.train(cfg)
        policy, tokenizer, prompts = policy_of(cfg, tmp_path/'b')
        sampler = state_of(policy).sampler
        assert 'judges' not in str(sampler.client.auth_headers)
        with pytest.raises(RuntimeError, match='404.*not found') as e: sampler.request('/key', key='a1B2'*8)
        assert 'a1B2' not in str(e.value)
    sampler.client = OpenAI(base_url=server.url, api_key='none', max_retries=1)   # the old connections are still served
    with pytest.raises(RuntimeError, match=f'sampler = {server.url}/completions'):
        generate(policy, tokenizer, prompts, max_new_tokens=4)
    with pytest.raises(RuntimeError, match=f'sampler = {server.url}/models'):
        ppo.train(config(base, tmp_path/'c', server.url))
    assert not (tmp_path/'ppo').exists() and not (tmp_path/'c').exists(), 'said before any work'


def test_answers_without_a_token_are_passed_over(models):
    "Some servers leave the end token out."
    from alpaca_farm.core.model import served
    own = served._own_logprobs(models.policy, models.prompts[:2], models.answers[:2], 1.)
    told = [([], []), *zip(models.answers[:2], own)]
    sampler = served.ServedSampler('http://here', Path('run'))
    sampler.check(models.policy, [models.prompts[5], *models.prompts[:2]], told, 1.)
    sampler.check(models.policy, models.prompts[:1], told[:1], 1.)
    with pytest.raises(RuntimeError, match='policy'): sampler.check(models.policy, models.prompts[:3], told, 1.)


def test_ppo_with_a_served_sampler(base, folder, tmp_path):
    with lora_server(folder) as server:
        run = ppo.train(config(base, tmp_path/'ppo', server.url, learning_rate=.02))
        log = read_log(run.folder)
        assert len(log) == 3 and log[0]['kl'] == pytest.approx(0, abs=1e-4) and all(r['first_ratio'] == pytest.approx(1, abs=1e-5) for r in log)
        loaded = [b['lora_name'] for p, b in server.model.log if p.endswith('/load_lora_adapter')]
        assert len(loaded) == len(set(loaded)) >= 3 and len(server.model.adapters) == 1
        assert {b['model'] for p, b in server.model.log if p.endswith('completions')} >= {*loaded[:3]} and read_summary(run.folder)['kl'] >= -1


def test_best_of_n_with_a_served_sampler(base, folder, tmp_path):
    with lora_server(folder) as server:
        given = tiny.settings('best_of_n', base, out=str(tmp_path/'a'), max_instances=4, sampler=server.url)
        run = best_of_n.run(best_of_n.BestOfNConfig(**given))
        rows = load_records(str(run.folder), 'candidates', 'candidates')
        assert len(rows) == 4 and all(len(r['output']) == 2 for r in rows) and server.model.adapters == []


def test_what_a_server_cannot_follow_is_refused(base, tmp_path):
    from alpaca_farm.quark import QuarkConfig
    for given, message in ((dict(lora_rank=0), 'sampler: a server follows an adapter, not a whole model. Set lora_rank'), (dict(sampler='localhost:8000'), 'write the endpoint, such as http')):
        with pytest.raises(ValueError, match=message): PPOConfig(**tiny.settings('ppo', base, out=str(tmp_path), **dict(dict(sampler='http://x/v1', lora_rank=4), **given)))
    with pytest.raises(ValueError, match='quark samples in its own process'): QuarkConfig(**tiny.settings('quark', base, out=str(tmp_path), sampler='http://x/v1', lora_rank=4))
