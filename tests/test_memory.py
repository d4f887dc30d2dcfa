"""What is not needed is not held in memory, and in no higher precision."""
import sys

import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alpaca_farm import sft
from alpaca_farm.core.model import generation, models
from alpaca_farm.core.model.generation import generate
from alpaca_farm.core.model.loading import rows_per_pass
from alpaca_farm.core.model.models import load_policy
from alpaca_farm.core.run.settings import HardwareConfig, TrainConfig
from alpaca_farm.core.training import adamw, Trainer


def test_rows_of_a_pass_on_a_gpu_are_what_its_memory_holds(monkeypatch):
    "Memory that torch keeps of tensors that are gone is free: 65 of 80 GB."
    for name, value in dict(mem_get_info=(10e9, 80e9), memory_reserved=60e9, memory_allocated=5e9).items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=256, num_hidden_layers=5, num_attention_heads=4))
    monkeypatch.setattr(LlamaForCausalLM, 'device', torch.device('cuda'))
    token = 4 * 28 * 256
    assert rows_per_pass(model, 10_000, 1, cached=False) == int(.6 * 65e9 / (token * 10_000))
    assert rows_per_pass(model, 10_000, 1) == int(.6 * 65e9 / ((token + 4 * 2.5 * 2 * 5 * 256) * 10_000))


def test_without_master_weights_all_is_in_the_compute_dtype(base, tmp_path):
    "Weights, gradients, moments and files are in bfloat16, and the loss falls."
    seen = []
    class Recorded(Trainer):
        def save(self):
            seen.append({t.dtype for s in self.optimizer.state.values() for k, t in s.items() if k != 'step'} | {p.dtype for p in self.parameters})
    cfg = tiny.config(sft, **tiny.settings('sft', base, out=str(tmp_path/'sft'), master_weights=False, dtype='bfloat16', device='cpu', checkpoint_every=1))
    original, sft.Trainer = sft.Trainer, Recorded
    try: sft.train(cfg)
    finally: sft.Trainer = original
    assert seen and all(s == {torch.bfloat16} for s in seen)
    from safetensors.torch import load_file
    assert {t.dtype for t in load_file(tmp_path/'sft/model/model.safetensors').values()} == {torch.bfloat16}
    from alpaca_farm.core.run.runs import read_log, read_summary
    assert read_log(cfg.out)[-1]['loss'] < read_log(cfg.out)[0]['loss']


def test_the_optimiser_is_freed_before_the_answers(base, tmp_path, monkeypatch):
    sizes, trainers = [], []
    original = sft.answer_eval_split
    class Recorded(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)
    monkeypatch.setattr(sft, 'Trainer', Recorded)
    monkeypatch.setattr(sft, 'answer_eval_split', lambda *args: (sizes.append((len(trainers[0].optimizer.state), sum(p.grad is not None for p in trainers[0].parameters))), original(*args))[1])
    sft.train(tiny.config(sft, **tiny.settings('sft', base, out=str(tmp_path/'sft'))))
    assert sizes == [(0, 0)]


def test_the_cache_is_in_the_precision_of_the_forward_pass(models, monkeypatch):
    from alpaca_farm.core.model.models import autocast
    dtypes = set()
    update = generation.GrowingLayer.update
    def recorded(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        dtypes.update((keys.dtype, values.dtype))
        return keys, values
    monkeypatch.setattr(generation.GrowingLayer, 'update', recorded)
    for dtype in ('float32', 'bfloat16'):
        with autocast(HardwareConfig(device='cpu', dtype=dtype)): generate(models.policy, models.tokenizer, models.prompts[:4], max_new_tokens=6)
        assert dtypes == {getattr(torch, dtype)}
        dtypes.clear()


def test_forward_batch(base, models, monkeypatch):
    "The setting divides sampling, scoring and log-probs, and changes none of their results but for float ties."
    from alpaca_farm.core.answers import answering, load_split, sample_answers
    from alpaca_farm.core.model.models import response_logprobs
    sizes, written = [], generation.write_batch
    monkeypatch.setattr(generation, 'write_batch', lambda model, prompts, rows, *args: (sizes.append(len(rows)), written(model, prompts, rows, *args))[1])
    results = []
    for n in (0, 3):
        cfg = tiny.config(sft, **tiny.settings('sft', base, forward_batch=n))
        policy, tokenizer = load_policy(cfg.policy, cfg)
        results.append((sample_answers(policy, tokenizer, load_split(cfg, 'eval_split'), answering(cfg)), response_logprobs(policy, models.prompts, models.answers, tokenizer.pad_token_id)))
    assert [r['output'] for r in results[0][0]] == [r['output'] for r in results[1][0]]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-4)
    assert sizes == [10, 3, 3, 3, 1]


def test_what_is_not_installed_is_named(base, monkeypatch):
    import importlib.util
    cfg = tiny.config(sft, **tiny.settings('sft', base, lora_rank=4, quantize=True))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name, *args: None if name == 'bitsandbytes' else find(name, *args))
    monkeypatch.setitem(sys.modules, 'bitsandbytes.optim', None)
    with pytest.raises(ImportError, match='pip install bitsandbytes'): load_policy(cfg.policy, cfg, train=True)
    with pytest.raises(ImportError, match='pip install bitsandbytes'): adamw([dict(params=[torch.zeros(1)])], TrainConfig(optimizer='adamw_8bit'))


def test_four_bits_are_asked_for(base, monkeypatch):
    "With the import of bitsandbytes mocked: how the frozen weights are loaded. Nothing of this was measured."
    import importlib.util
    find, seen = importlib.util.find_spec, {}
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name, *args: object() if name == 'bitsandbytes' else find(name, *args))
    class Stop(Exception): pass
    def load_model(kind, spec, dtype, *fresh, **more):
        seen.update(more)
        raise Stop
    monkeypatch.setattr(models, 'load_model', load_model)
    cfg = tiny.config(sft, **tiny.settings('sft', base, lora_rank=4, quantize=True, device='cpu', dtype='bfloat16'))
    with pytest.raises(Stop): load_policy(cfg.policy, cfg, train=True)
    assert seen['quantization_config'].load_in_4bit and seen['quantization_config'].bnb_4bit_compute_dtype == torch.bfloat16
