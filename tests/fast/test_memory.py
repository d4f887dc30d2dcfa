"""What a run needs is estimated before it starts; what is not needed is not held."""
import sys

import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alpaca_farm import ppo, sft
from alpaca_farm.core.model.adapters import add_adapter, lora_config, own_weights
from alpaca_farm.core.model import generation, loading, memory, models
from alpaca_farm.core.model.generation import generate
from alpaca_farm.core.model.models import load_policy
from alpaca_farm.core.run.settings import HardwareConfig, TrainConfig
from alpaca_farm.core.training import adamw, Trainer

SHAPE = dict(vocab_size=1000, hidden_size=256, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4, intermediate_size=688)


def test_weights_gradients_and_moments_are_exact():
    config = LlamaConfig(**SHAPE)
    model, cfg = LlamaForCausalLM(config), TrainConfig()
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    n, parts = memory._memory_parts(config, cfg, 4)
    assert n == sum(p.numel() for p in model.parameters())
    assert parts['weights'] == size(model.parameters()) == parts['gradients']
    assert parts['moments'] == size(s[k] for s in optimizer.state.values() for k in ('exp_avg', 'exp_avg_sq'))
    half = memory._memory_parts(config, TrainConfig(master_weights=False), 2)[1]
    assert half['weights'] * 2 == parts['weights'] and half['moments'] * 2 == parts['moments']
    with pytest.MonkeyPatch.context() as m:
        m.setattr(memory, 'rank', lambda: (0, 8))
        fsdp = memory._memory_parts(config, TrainConfig(sharding='fsdp'), 4)[1]
    assert [parts[k] / fsdp[k] for k in parts] == [1, 8, 8]
    adapted = add_adapter(model, 'policy', lora_config(TrainConfig(lora_rank=8)))
    lora = memory._memory_parts(config, TrainConfig(lora_rank=8), 4)[1]
    assert lora['gradients'] == size(own_weights(adapted).values())


def test_a_run_that_cannot_fit_is_refused_before_it_loads_anything(base, monkeypatch, tmp_path):
    "PPO's value model, which comes after its policy, is in the policy's forecast."
    monkeypatch.setattr(memory, '_available_bytes', lambda device: 1e5)
    monkeypatch.setattr(loading, 'check_memory', lambda *args: memory.check_memory(*args, smallest=0))
    cfg = tiny.config(ppo, **tiny.settings('ppo', base))
    assert 'attn_implementation' in loading.loading_options(cfg.policy, cfg, True, checked=False)
    monkeypatch.setattr(models, 'load_model', None)
    cfg = tiny.config(sft, **tiny.settings('sft', base, out=str(tmp_path/'sft')))
    with pytest.raises(MemoryError, match='the run needs more than'): sft.train(cfg)
    assert not (tmp_path/'sft').exists()


def test_memory_that_torch_keeps_is_free(monkeypatch):
    for name, value in dict(mem_get_info=(10, 80), memory_reserved=60, memory_allocated=5).items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert memory._available_bytes(torch.device('cuda')) == 65


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
    from alpaca_farm.core.run.runs import read_log
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
    update = generation._GrowingLayer.update
    def recorded(self, *args, **kwargs):
        keys, values = update(self, *args, **kwargs)
        dtypes.update((keys.dtype, values.dtype))
        return keys, values
    monkeypatch.setattr(generation._GrowingLayer, 'update', recorded)
    for dtype in ('float32', 'bfloat16'):
        with autocast(HardwareConfig(device='cpu', dtype=dtype)): generate(models.policy, models.tokenizer, models.prompts[:4], max_new_tokens=6)
        assert dtypes == {getattr(torch, dtype)}
        dtypes.clear()


def test_forward_batch(base, models, monkeypatch):
    "The setting divides sampling, scoring and log-probs, and changes none of their results but for float ties."
    from alpaca_farm.core.answers import answering, load_split, sample_answers
    from alpaca_farm.core.model.models import response_logprobs
    sizes, written = [], generation._write_batch
    monkeypatch.setattr(generation, '_write_batch', lambda model, prompts, rows, *args: (sizes.append(len(rows)), written(model, prompts, rows, *args))[1])
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
