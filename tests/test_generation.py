"""Sampling: the text of `model.generate`, true log-probs, and answers that do not depend on their batch."""
import logging

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from alpaca_farm.core.functional import token_logprobs
from alpaca_farm.core.model.generation import choose_token, generate, uniform_stream

torch.set_num_threads(1)
logging.getLogger('transformers').setLevel(logging.ERROR)


def tiny(kind=LlamaForCausalLM, config=LlamaConfig, seed=0, **k):
    "An untrained model with weights so large that its distributions are far from uniform; token 2 ends an answer."
    torch.manual_seed(seed)
    size = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128) if config is GPT2Config else dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        max_position_embeddings=128, tie_word_embeddings=False)
    model = kind(config(vocab_size=60, bos_token_id=1, eos_token_id=2, pad_token_id=0, **size, **k)).eval()
    for p in model.parameters(): p.data = p.data*6 if p.ndim == 2 else p.data
    return model


def ragged(count, longest=20, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 60, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def padded(rows, left=True, extra=0):
    width = max(map(len, rows)) + extra
    pad = [[0]*(width - len(r)) for r in rows]
    ids = [p + r if left else r + p for p, r in zip(pad, rows)]
    mask = [[0]*len(p) + [1]*len(r) if left else [1]*len(r) + [0]*len(p) for p, r in zip(pad, rows)]
    return torch.tensor(ids), torch.tensor(mask)


@torch.no_grad()
def transformers_answers(model, prompts, steps):
    ids, mask = padded(prompts)
    rows = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=steps, do_sample=False)
    return [r[:r.index(2) + 1] if 2 in r else r for r in rows[:, ids.shape[1]:].tolist()]


def tokens(answers): return [[s.tokens for s in x] for x in answers]


@pytest.mark.parametrize('seed', range(4))
def test_greedy_is_generate(seed):
    model, prompts = tiny(seed=seed), ragged(40, seed=seed)
    want = transformers_answers(model, prompts, 30)
    assert 0 < sum(len(w) < 30 for w in want)  # some end early, or little is tested
    for batch_size in (7, 64):
        assert [x for x, in tokens(generate(model, None, prompts, 1, 30, 0, batch_size=batch_size))] == want


@pytest.mark.parametrize('model', [
    dict(attn_implementation='eager'), dict(kind=GPT2LMHeadModel, config=GPT2Config),
    dict(kind=MistralForCausalLM, config=MistralConfig, sliding_window=6)], ids=['eager', 'gpt2', 'sliding'])
def test_greedy_is_generate_for_other_models(model):
    model, prompts = tiny(**model), ragged(30)
    assert [x for x, in tokens(generate(model, None, prompts, 1, 30, 0, batch_size=16))] == transformers_answers(model, prompts, 30)


def test_lora_and_checkpointing_change_nothing():
    from peft import LoraConfig, get_peft_model
    prompts, plain = ragged(20), tokens(generate(tiny(), None, ragged(20), 1, 12, 0))
    model = get_peft_model(tiny(), LoraConfig(r=4, target_modules=['q_proj', 'v_proj'], init_lora_weights=False)).eval()
    assert [x for x, in tokens(generate(model, None, prompts, 1, 12, 0))] == transformers_answers(model, prompts, 12)
    with model.disable_adapter(): assert tokens(generate(model, None, prompts, 1, 12, 0)) == plain
    model = tiny()
    model.gradient_checkpointing_enable()
    model.train()
    assert tokens(generate(model, None, prompts, 1, 12, 0)) == plain and model.training


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_sampled_logprobs_are_those_of_a_second_reading(temperature):
    model, prompts = tiny(), ragged(12)
    with torch.no_grad():
        for p, samples in zip(prompts, generate(model, None, prompts, 4, 20, temperature, batch_size=16)):
            for s in samples:
                logits = model(torch.tensor([p + s.tokens])).logits[0, len(p) - 1:-1]
                want = token_logprobs(logits, torch.tensor(s.tokens), temperature)
                torch.testing.assert_close(torch.tensor(s.logprobs), want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_logprobs_do_not_depend_on_padding_or_batch():
    model, prompts = tiny(), ragged(12)
    texts = [p + s.tokens for p, (s,) in zip(prompts, generate(model, None, prompts, 1, 20))]
    def score(rows, left, extra):
        ids, mask = padded(rows, left, extra)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        logp = token_logprobs(logits[:, :-1], ids[:, 1:])
        return [x[(m[1:]*m[:-1]).bool()] for x, m in zip(logp, mask)]
    alone = [score([t], False, 0)[0] for t in texts]
    for left in (True, False):
        for extra in (0, 7):
            for rows in (slice(None), slice(3, 7)):
                for a, b in zip(score(texts[rows], left, extra), alone[rows]):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_samples_do_not_depend_on_their_batch_but_for_ties():
    model, prompts = tiny(), ragged(256, seed=9)
    alone, together = (generate(model, None, prompts, 1, 20, batch_size=b) for b in (4, 64))
    shuffled = generate(model, None, prompts[::-1] + ragged(20, seed=3), 1, 20)[:256][::-1]
    for other in (together, shuffled):
        differ = sum(a.tokens != b.tokens for (a,), (b,) in zip(alone, other))
        assert differ <= 3, f'{differ} of 256 samples differ'


def test_n_and_length_and_order_do_not_change_a_sample():
    model, prompts = tiny(), ragged(10)
    many = generate(model, None, prompts, 8, 20)
    few = generate(model, None, prompts[::-1], 3, 12, batch_size=5)[::-1]
    assert [[s[:12] for s in x[:3]] for x in tokens(many)] == tokens(few)
    a, _, b = generate(model, None, [prompts[0], prompts[1], prompts[0]], 2, 20)
    assert tokens([a]) == tokens([many[0][:2]]) and a != b
    assert tokens(generate(model, None, prompts, 1, 20, seed=1)) != tokens([x[:1] for x in many])


def test_shared_prefill_samples_the_models_distribution():
    model, prompt, count = tiny(), [7, 8, 9], 4000
    with torch.no_grad(): probs = (model(torch.tensor([prompt])).logits[0, -1]/3).softmax(-1).numpy()
    for answers in (generate(model, None, [prompt], count, 1, 3.)[0],
                    [s for s, in generate(model, None, [prompt]*count, 1, 1, 3.)]):
        counts = np.bincount([s.tokens[0] for s in answers], minlength=60)
        chi2 = ((counts - count*probs)**2/(count*probs)).sum()
        assert chi2 < 59 + 4*(2*59)**.5


def test_ends():
    class Tokenizer: eos_token_id = 17
    model = tiny()
    model.generation_config.eos_token_id = [2, 30]
    seen = set()
    for s, in generate(model, Tokenizer(), ragged(60), 1, 30):
        ends = [t in (2, 17, 30) for t in s.tokens]
        assert ends == [False]*(len(ends) - 1) + [s.ended] and len(s.logprobs) == len(s.tokens) <= 30
        assert s.ended or len(s.tokens) == 30
        seen.add(s.tokens[-1])
    assert {2, 17, 30} <= seen
    model.generation_config.eos_token_id = None
    assert all(len(s.tokens) == 30 and not s.ended for s, in generate(model, None, ragged(10), 1, 30))


def test_filters():
    logits = torch.tensor([.2, .5, .3]).log().expand(1000, 3)
    u = (torch.arange(1000) + .5)/1000
    def counts(**k): return torch.bincount(choose_token(logits, u, **k)[0], minlength=3).tolist()
    assert counts() == [200, 500, 300]
    assert counts(top_k=1) == counts(top_p=.4) == [0, 1000, 0]
    assert counts(top_k=2) == counts(top_p=.6) == [0, 625, 375]
    torch.testing.assert_close(choose_token(logits[:1], u[:1], top_k=1)[1].exp(), torch.tensor([.5]))  # of the policy itself


def test_streams():
    assert (uniform_stream(3, [1, 2], 0, 5, 9)[:4] == uniform_stream(3, [1, 2], 0, 5, 4)).all()
    u = np.concatenate([uniform_stream(0, [p], 0, k, 40) for p in range(50) for k in range(10)])
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - .5) < .01 and abs(u.std() - 12**-.5) < .01


def test_faults_are_named():
    model = tiny()
    assert generate(model, None, []) == []
    for name, value in dict(n=0, max_new_tokens=0, temperature=-1, top_p=0, top_k=-1, batch_size=-1).items():
        with pytest.raises(ValueError, match=f'{name} = {value}'): generate(model, None, [[5]], **{name: value})
    for prompts, message in (([[5], []], 'prompt 1 is empty'), ([[60]], 'its tokenizer'), ([[5]*120], 'max_position_embeddings')):
        with pytest.raises(ValueError, match=message): generate(model, None, prompts, max_new_tokens=20)
    model.lm_head.weight.data.fill_(float('nan'))
    with pytest.raises(ValueError, match='not finite'): generate(model, None, [[5]], max_new_tokens=2)


def test_training_mode_comes_back_even_after_a_fault():
    model = tiny().train()
    model.lm_head.eval()
    with pytest.raises(RuntimeError, match='stop'):
        def stop(done, total): raise RuntimeError('stop')
        generate(model, None, [[5]], max_new_tokens=2, progress=stop)
    assert model.training and model.model.training and not model.lm_head.training


def test_progress():
    seen = []
    generate(tiny(), None, ragged(10), 3, 2, batch_size=8, progress=lambda *a: seen.append(a))
    assert seen == [(8, 30), (16, 30), (24, 30), (30, 30)]
