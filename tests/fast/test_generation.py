"""Sampling where a model has an adapter or its layers are checkpointed."""
import numpy as np
import torch

import pytest

from alpaca_farm.model import generation
from alpaca_farm.model.generation import generate
from alpaca_farm.model.control import add_tokens
from alpaca_farm.model.policy import add_adapter, lora_config, merge, Policy
from alpaca_farm.run.settings import HardwareConfig
from alpaca_farm.train.labelled import hold_out
from alpaca_farm.train.trainer import batches
from tiny import family, letters, policy, ragged

torch.set_num_threads(1)


def tokens(answers): return [[s.tokens for s in x] for x in answers]


@pytest.mark.slow
def test_lora_and_checkpointing_change_nothing():
    "With an adapter the answers are those of the merged model."
    from peft import LoraConfig, get_peft_model
    def greedy(model): return tokens(generate(Policy(model), ragged(20), 1, 12, 0))
    plain = greedy(family('llama'))
    config = LoraConfig(r=4, target_modules=['q_proj', 'v_proj'], init_lora_weights=False)
    model = get_peft_model(family('llama'), config).eval()
    adapted = greedy(model.get_base_model())
    with model.disable_adapter():
        assert greedy(model.get_base_model()) == plain != adapted
    assert greedy(model.merge_and_unload()) == adapted
    model = family('llama')
    model.gradient_checkpointing_enable()
    model.train()
    assert greedy(model) == plain


@pytest.mark.parametrize('name', ['llama', 'gemma3_text'])   # whose table multiplies
def test_new_tokens_of_an_adapter_are_those_of_the_merged_model(name):
    new = Policy(family(name, .1, vocab_size=260), letters())
    new = add_adapter(new, 'policy', lora_config(HardwareConfig(lora_rank=2)))
    ids = torch.tensor([[5, *add_tokens(new, ['<a>', '<b>']), 6]])
    with torch.no_grad(), new.on():
        logits = new.model(ids).logits
        torch.testing.assert_close(merge(new)(ids).logits, logits)


@pytest.mark.parametrize('prompts', [ragged(20), [[5] * 9, [6] * 9]], ids=['padded', 'alike'])
def test_steps_that_a_gpu_can_replay_give_the_same_samples(monkeypatch, prompts):
    "Buffers grow several times, and rows are dropped; without padding the mask is needed as well."
    def sample(): return generate(policy('llama'), prompts, 2, 60)
    expected = sample()
    write = generation._write_batch
    compute = generation._FixedStep.compute
    steps = []
    monkeypatch.setattr(generation, '_write_batch', lambda *args: write(*args[:-1], True))
    monkeypatch.setattr(generation._FixedStep, 'compute',
                        lambda self, state: steps.append(compute(self, state)))
    found = sample()
    assert len(steps) > 40
    assert tokens(found) == tokens(expected)
    for a, b in zip(sum(found, []), sum(expected, [])):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_a_seed_from_numpy_is_that_seed():
    seed = np.int64(3)
    prompts = ragged(2)
    assert generate(policy('llama'), prompts, 1, 4, seed=seed) == generate(
        policy('llama'), prompts, 1, 4, seed=3)
    assert batches([1]*9, 2, seed=seed) == batches([1]*9, 2, seed=3)
    records = [dict(instruction=str(i)) for i in range(9)]
    assert hold_out(records, 2, seed) == hold_out(records, 2, 3)


def test_the_smallest_nucleus_is_the_likeliest_token():
    prompts = ragged(3)
    greedy = generate(policy('llama'), prompts, 1, 4, 0)
    assert tokens(generate(policy('llama'), prompts, 1, 4, top_p=0.)) == tokens(greedy)


def test_a_model_that_waits_for_its_figures_is_sampled_without_a_graph(monkeypatch):
    "Another error of a step is none of these, and is raised."
    model = policy('llama')
    assert generation.can_be_fixed(model)
    def waits(self, state): raise RuntimeError('called a synchronizing CUDA operation')
    monkeypatch.setattr(generation._FixedStep, 'compute', waits)
    assert not generation.can_be_fixed(model)
    def fails(self, state): raise RuntimeError('no such kernel')
    monkeypatch.setattr(generation._FixedStep, 'compute', fails)
    with pytest.raises(RuntimeError, match='no such kernel'): generation.can_be_fixed(model)
