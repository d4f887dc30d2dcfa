"""Numbers that must not depend on padding, on the batch, or on micro-batches."""
import copy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

import tiny
from alpaca_farm.core.model.models import hidden_states, logprobs, values
from alpaca_farm.core.model.policy import Policy
from alpaca_farm.core.run.runs import read_log
from alpaca_farm.core.data.text import collate

torch.set_num_threads(1)


@pytest.fixture(scope='module', params=['llama', 'gpt2'])
def sharp(request, models):
    "A policy and a scalar model whose weights are large enough for attention to matter."
    size = len(models.tokenizer)
    config = GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=4, n_positions=256,
                        pad_token_id=0, num_labels=1)
    torch.manual_seed(0)
    kinds = (GPT2LMHeadModel, GPT2ForSequenceClassification)
    if request.param == 'gpt2':
        policy, scalar = (Policy(kind(config).eval()) for kind in kinds)
        scalar.score = scalar.model.score
    else: policy, scalar = map(copy.deepcopy, (models.policy, models.scalar))
    for p in [*policy.model.parameters(), *scalar.model.parameters()]:
        if p.ndim == 2: p.data *= 5
    return SimpleNamespace(**dict(vars(models), policy=policy, scalar=scalar))


def near(a, b): torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)


def batch_of(models, rows, side, extra=0):
    "A batch of examples, padded by as much more on a side; the padding token is 0."
    b = collate([models.prompts[i] for i in rows], [models.answers[i] for i in rows], 0, side)
    room = (extra, 0) if side == 'left' else (0, extra)
    return {k: torch.nn.functional.pad(t, room) for k, t in b.items()}


def test_gradients_do_not_see_padding(sharp):
    def grads(side, extra):
        sharp.policy.model.zero_grad()
        logprobs(sharp.policy, batch_of(sharp, range(16), side, extra)).sum().backward()
        return torch.cat([p.grad.flatten() for p in sharp.policy.model.parameters()])
    wanted = grads('right', 0)
    for side, extra in (('left', 0), ('left', 23), ('right', 23)):
        torch.testing.assert_close(grads(side, extra), wanted, rtol=1e-4,
                                   atol=1e-4*wanted.abs().max().item())
    sharp.policy.model.zero_grad()


@torch.no_grad()
def test_what_follows_does_not_matter(sharp):
    "A token's log-prob and value know nothing of later tokens."
    b, start = batch_of(sharp, [0], 'right'), len(sharp.prompts[0])
    on = b['response'].bool()
    logp, value = logprobs(sharp.policy, b, .7)[on], values(sharp.scalar, b)[on]
    short = {k: t[:, :start + 3] for k, t in b.items()}
    near(logprobs(sharp.policy, short, .7)[0, -3:], logp[:3])
    for t in (0, 2):   # the state in which a token is chosen has not seen that token
        before = {k: b[k][:, :start + t] for k in ('ids', 'mask')}
        near(sharp.scalar.score(hidden_states(sharp.scalar, **before))[0, -1, 0], value[t])


# Adam divides by the size of a gradient: keep rounding noise below what it divides by
STEADY = dict(adam_eps=1e-4)
SHORT = dict(sft=dict(max_instances=40, val_split='', eval_split=''), reward_model={},
             dpo=dict(max_instances=40, eval_split=''),
             # with seed 0, rounding changes one sampled token
             ppo=dict(annotators='', ppo_epochs=2, save_every=0, seed=1))
SHORT |= {'dpo kto': SHORT['dpo'] | dict(loss_type='kto'),
          'dpo simpo': SHORT['dpo'] | dict(loss_type='simpo', beta=2.)}


@pytest.mark.parametrize('name', SHORT)
def test_accumulation(base, tmp_path, name):
    "A batch of 8 in one pass, in eight, and in uneven parts: the same losses and weights."
    notebook, logs, weights = name.split()[0], [], []
    for micro in (8, 1, 3):
        more = SHORT[name] | STEADY | dict(batch_size=8, micro_batch_size=micro)
        out = tiny.run(notebook, base, tmp_path/str(micro)/notebook, **more).folder
        logs.append(read_log(out))
        weights.append(load_file(out/'model'/'model.safetensors'))
    start = load_file(base/('world' if notebook == 'sft' else 'sft')/'model'/'model.safetensors')
    moved = max((weights[0][k] - start[k]).abs().max().item() for k in start if k in weights[0])
    assert moved > 5e-4 and len(logs[0]) >= 3
    for log, weight in zip(logs[1:], weights[1:]):
        for k, w in weights[0].items(): torch.testing.assert_close(weight[k], w, rtol=0, atol=1e-5)
        for a, b in zip(logs[0], log, strict=True):
            assert a.keys() == b.keys()
            for k in a.keys() - {'wall'}:
                assert a[k] == pytest.approx(b[k], rel=2e-4, abs=2e-5), (a['step'], k)
