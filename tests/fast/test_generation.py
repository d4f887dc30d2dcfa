"""Sampling: adapters, log-probs, ends, and answers that do not depend on their batch."""
import logging

import numpy as np
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from alpaca_farm.core.model.generation import generate

torch.set_num_threads(1)
logging.getLogger('transformers').setLevel(logging.ERROR)


def tiny(kind=LlamaForCausalLM, config=LlamaConfig, seed=0, **k):
    "An untrained model with large weights: distributions far from uniform; 2 ends an answer."
    torch.manual_seed(seed)
    size = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128) if config is GPT2Config else dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=128, tie_word_embeddings=False)
    special = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = kind(config(vocab_size=60, **special, **size, **k)).eval()
    for p in model.parameters(): p.data = p.data*6 if p.ndim == 2 else p.data
    return model


def ragged(count, longest=20, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 60, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def padded(rows, left=True, extra=0):
    width = max(map(len, rows)) + extra
    pad = [[0]*(width - len(r)) for r in rows]
    ids = [p + r if left else r + p for p, r in zip(pad, rows)]
    ones = [[1]*len(r) for r in rows]
    mask = [p + r if left else r + p for p, r in zip(pad, ones)]
    return torch.tensor(ids), torch.tensor(mask)


@torch.no_grad()
def transformers_answers(model, prompts, steps):
    ids, mask = padded(prompts)
    rows = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=steps,
                          do_sample=False)
    return [r[:r.index(2) + 1] if 2 in r else r for r in rows[:, ids.shape[1]:].tolist()]


def tokens(answers): return [[s.tokens for s in x] for x in answers]


def test_lora_and_checkpointing_change_nothing():
    from peft import LoraConfig, get_peft_model
    prompts, plain = ragged(20), tokens(generate(tiny(), None, ragged(20), 1, 12, 0))
    config = LoraConfig(r=4, target_modules=['q_proj', 'v_proj'], init_lora_weights=False)
    model = get_peft_model(tiny(), config).eval()
    found = [x for x, in tokens(generate(model, None, prompts, 1, 12, 0))]
    assert found == transformers_answers(model, prompts, 12)
    with model.disable_adapter(): assert tokens(generate(model, None, prompts, 1, 12, 0)) == plain
    model = tiny()
    model.gradient_checkpointing_enable()
    model.train()
    assert tokens(generate(model, None, prompts, 1, 12, 0)) == plain and model.training


def test_samples_do_not_depend_on_their_batch_but_for_ties():
    model, prompts = tiny(), ragged(256, seed=9)
    alone, together = (generate(model, None, prompts, 1, 20, batch_size=b) for b in (4, 64))
    shuffled = generate(model, None, prompts[::-1] + ragged(20, seed=3), 1, 20)[:256][::-1]
    for other in (together, shuffled):
        differ = sum(a.tokens != b.tokens for (a,), (b,) in zip(alone, other))
        assert differ <= 3, f'{differ} of 256 samples differ'
