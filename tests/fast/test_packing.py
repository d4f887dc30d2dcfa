"Packed batches: numbers are those of each sequence alone, for each family of models."
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import tiny
import alpaca_farm.model.logprobs as core_models
import alpaca_farm.model.packing as core_packing
from alpaca_farm.data.text import collate, rollout_batch
from alpaca_farm.model.logprobs import before, hidden_states, sequence_logprobs
from alpaca_farm.model.packing import attention_window, pack, packed_states, position_wise
from alpaca_farm.model.packing import reads_packed
from alpaca_farm.model.policy import checkpoint_layers
from tiny import alone, ANSWERS, PROMPTS

torch.set_num_threads(1)
# attention of their own, the eager kernel, recurrent layers
PADDED = 'falcon', 'gemma2', 'falcon_h1', 'lfm2'
PACKS = [name for name in tiny.FAMILIES if name not in PADDED]
# whose last layer is computed whole, wherever states are read
FINISHED = 'gpt2', 'gpt_neox', 'opt', 'phi', 'mixtral', 'qwen3_moe'


@pytest.mark.parametrize('name', PACKS)
@pytest.mark.parametrize('side', ['left', 'right', 'rollout'])
def test_states_of_packed_batches(name, side):
    model = tiny.policy(name)
    assert reads_packed(model)
    batch = batch_of(PROMPTS, ANSWERS, side)
    packed = pack(**batch, window=attention_window(model))
    assert packed.ids.numel() < .5*batch['ids'].numel()
    with torch.no_grad():
        states = hidden_states(model, **batch)
        for i, (p, a) in enumerate(zip(PROMPTS, ANSWERS)):
            wanted = alone(model, p, a)
            near(states[i][batch['mask'][i].bool()], wanted, wanted.std())
        unfinished = reads_the_same(model, batch, states)
    assert unfinished == bool(position_wise(model))
    assert unfinished == (name not in FINISHED)


def near(found, wanted, scale):
    "Equal up to rounding, which is in proportion to the states."
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4*scale.item())


def reads_the_same(model, batch, states):
    "States before answers' tokens are of a finished last layer; whether others are not."
    read = before(batch['response'])
    some = hidden_states(model, **batch, read=read)
    near(some[read.bool()], states[read.bool()], states.std())
    others = (read == 0) & batch['mask'].bool()
    return not torch.allclose(some[others], states[others], atol=1e-3)


@pytest.mark.parametrize('name', dict.fromkeys([*PADDED, *tiny.UNPACKED]))
def test_other_families_read_padded_batches(name):
    model = tiny.policy(name, **tiny.UNPACKED.get(name, {}))
    assert not reads_packed(model) or attention_window(model) == 0
    batch = collate(PROMPTS, ANSWERS, 0)
    with torch.no_grad():
        states = hidden_states(model, **batch)
        reads_the_same(model, batch, states)
        for i in (0, 1, 7):
            torch.testing.assert_close(states[i][batch['mask'][i].bool()],
                                       alone(model, PROMPTS[i], ANSWERS[i]), rtol=1e-3, atol=1e-3)


def test_a_window_of_attention_is_no_shorter_than_a_row():
    model = tiny.policy('mistral', sliding_window=8)
    assert attention_window(model) == 8
    batch = collate(PROMPTS, ANSWERS, 0)
    assert pack(**batch, window=8) is None
    with torch.no_grad():
        states = hidden_states(model, **batch)[-1]
    wanted = alone(model, PROMPTS[-1], ANSWERS[-1])
    near(states, wanted, wanted.std())


def test_the_trial_is_made_in_full_precision(monkeypatch):
    mixed = []
    def states(model, packed):
        return mixed.append(torch.is_autocast_enabled('cpu')) or packed_states(model, packed)
    monkeypatch.setattr(core_packing, 'packed_states', states)
    with torch.autocast('cpu', torch.bfloat16):
        assert reads_packed(tiny.policy('llama'))
    assert mixed == [False]


@pytest.mark.parametrize('checkpointed', [False, True])
def test_gradients(checkpointed, monkeypatch):
    "Packed or padded, with a last layer of all positions or of those that are read."
    model = tiny.policy('llama')
    batch = collate(PROMPTS, ANSWERS, 0)
    assert reads_packed(model)
    if checkpointed:
        checkpoint_layers(model.model)
    weights = torch.linspace(-1, 1, len(PROMPTS))

    def gradients(packs, parts):
        monkeypatch.setattr(core_models, 'reads_packed', lambda model: packs)
        monkeypatch.setattr(core_models, 'position_wise', lambda model: parts)
        model.model.zero_grad()
        (weights*sequence_logprobs(model, batch)).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.model.parameters()])
    wanted = gradients(False, [])
    parts = position_wise(model)
    for packs in (False, True):
        found = gradients(packs, parts)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4*wanted.abs().max().item())


PROMPT = st.lists(st.integers(3, 5), min_size=1, max_size=4)
ANSWER = st.lists(st.integers(3, 9), max_size=12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(PROMPT, ANSWER), min_size=1, max_size=12),
       st.sampled_from(['left', 'right', 'rollout']))
def test_each_row_holds_its_sequence(rows, side):
    "In the list and in attention's rows, where prompts are shared and answers are not."
    prompts = [p for p, _ in rows]
    answers = [a for _, a in rows]
    assume(any(answers))
    batch = batch_of(prompts, answers, side)
    packed = pack(**batch)
    tokens = sum(map(len, answers)) + sum(map(len, {tuple(p) for p in prompts}))
    if tokens > .95*batch['ids'].numel():
        assert packed is None
        return
    assert packed.ids.shape == packed.positions.shape == (1, tokens)
    for i, (p, a) in enumerate(rows):
        numbers = packed.rows[0, 0, i]
        n = len(p + a)
        assert (numbers[n:] == tokens).all()
        assert numbers[:n].equal(packed.index[i][batch['mask'][i].bool()])
        assert packed.ids[0, numbers[:n]].tolist() == p + a
        assert packed.positions[0, numbers[:n]].tolist() == list(range(n))


def batch_of(prompts, answers, side):
    "Padded to the left, to the right, or on both sides as a rollout."
    if side == 'rollout':
        return rollout_batch(prompts, answers, 0)
    return collate(prompts, answers, 0, side)
