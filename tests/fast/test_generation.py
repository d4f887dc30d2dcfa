"""Sampling where layers are checkpointed, and by steps that a GPU can replay."""
import torch

import pytest

from alpaca_farm.model import generation
from alpaca_farm.model.generation import generate
from alpaca_farm.model.policy import Policy
from tiny import family, policy, ragged

torch.set_num_threads(1)


def tokens(answers): return [[s.tokens for s in x] for x in answers]


def test_checkpointing_changes_nothing():
    prompts = ragged(20)
    plain = generate(policy('llama'), prompts, 1, 12, 0)
    model = family('llama')
    model.gradient_checkpointing_enable()
    model.train()
    assert tokens(generate(Policy(model), prompts, 1, 12, 0)) == tokens(plain)


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
