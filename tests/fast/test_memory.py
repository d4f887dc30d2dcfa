"""What a run holds is bounded, and what is not needed is not held."""
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors.torch import load_file

from alpaca_farm import sft
from alpaca_farm.model import generation, logprobs as core_models, memory, rewards
from alpaca_farm.model.logprobs import load_policy, load_scalar
from alpaca_farm.run.runs import read_log, Run
from alpaca_farm.train import trainer as training
from alpaca_farm.train.answers import answering, load_split, sample_answers
from alpaca_farm.train.trainer import Trainer


def sft_config(base, **more): return tiny.config(sft, **tiny.settings('sft', base, **more))


def test_a_run_that_runs_out_of_memory_names_what_takes_less(base, monkeypatch, tmp_path):
    def full(policy, batch): raise torch.OutOfMemoryError('CUDA out of memory.')
    monkeypatch.setattr(sft, 'sft_loss', full)
    with pytest.raises(MemoryError, match='gradient_checkpointing'):
        sft.train(sft_config(base, out=str(tmp_path/'sft')))


def test_without_master_weights_all_is_in_the_compute_dtype(base, tmp_path, monkeypatch):
    "Weights, gradients, moments and files are in bfloat16, and the loss falls."
    seen = []
    class Recorded(Trainer):
        def save(self):
            states = self.optimizer.state.values()
            moments = [t for s in states for k, t in s.items() if k != 'step']
            seen.append({t.dtype for t in moments + self.parameters})
    monkeypatch.setattr(sft, 'Trainer', Recorded)
    cfg = sft_config(base, out=str(tmp_path/'sft'), master_weights=False, dtype='bfloat16',
                     device='cpu', checkpoint_every=1)
    sft.train(cfg)
    files = load_file(tmp_path/'sft/model/model.safetensors').values()
    assert seen
    for dtypes in (*seen, {t.dtype for t in files}):
        assert dtypes == {torch.bfloat16}
    assert read_log(cfg.out)[-1]['loss'] < read_log(cfg.out)[0]['loss']


def test_the_optimiser_is_freed_before_the_answers(base, tmp_path, monkeypatch):
    held = []
    trainers = []
    answer = sft.answer_eval_split
    class Recorded(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)
    def answered(*args):
        trainer, = trainers
        held.append((len(trainer.optimizer.state), {p.grad for p in trainer.parameters}))
        return answer(*args)
    monkeypatch.setattr(sft, 'Trainer', Recorded)
    monkeypatch.setattr(sft, 'answer_eval_split', answered)
    sft.train(sft_config(base, out=str(tmp_path/'sft')))
    assert held == [(0, {None})]


def test_forward_batch(base, monkeypatch):
    "It divides sampling, and changes none of the answers."
    sizes = []
    write = generation._write_batch
    results = []
    def written(model, prompts, rows, *args):
        sizes.append(len(rows))
        return write(model, prompts, rows, *args)
    monkeypatch.setattr(generation, '_write_batch', written)
    for n in (0, 3):
        cfg = sft_config(base, forward_batch=n)
        policy = load_policy(cfg.policy, cfg)
        results.append(sample_answers(policy, load_split(cfg, 'eval_split'), answering(cfg)))
    assert results[0] == results[1]
    assert sizes == [10, 3, 3, 3, 1]


@pytest.mark.parametrize('settings', [{}, dict(lora_rank=4)])
def test_micro_batches_keep_no_more_than_the_bound(base, tmp_path, monkeypatch, settings):
    "Without `micro_batch_size`, a step is divided so that what it keeps fits, with equal results."
    kept = []
    losses = {}
    def counted(policy, batch):
        sizes = {}
        def keep(x): return sizes.setdefault(x.untyped_storage().data_ptr(), x) is None or x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = loss(policy, batch)
        weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
        kept.append(sum(x.untyped_storage().nbytes()
                        for k, x in sizes.items() if k not in weights))
        return out
    loss = sft.sft_loss
    monkeypatch.setattr(sft, 'sft_loss', counted)
    each = memory.activation_bytes
    for part in (1, 5):
        bound = max(kept) / part if kept else 1e12
        def tokens(models, device): return bound / sum(map(each, models))
        monkeypatch.setattr(training, 'tokens_to_train', tokens)
        kept.clear()
        cfg = sft_config(base, out=str(tmp_path/f'{part}'), val_split='', **settings)
        sft.train(cfg)
        losses[part] = [r['loss'] for r in read_log(cfg.out)], max(kept), len(kept)
    (whole, most, n), (parts, few, more) = losses.values()
    assert parts == pytest.approx(whole, rel=1e-3)
    assert more > n
    assert few < most / 3   # a fifth, and the head's logits


def test_passes_without_gradients_are_bounded_in_tokens(base, monkeypatch):
    "In the precision of the run, also where a reward model has an adapter."
    seen = []
    states = core_models.hidden_states
    def recorded(model, ids, *args):
        seen.append((ids.numel(), torch.is_autocast_enabled('cpu')))
        return states(model, ids, *args)
    monkeypatch.setattr(core_models, 'hidden_states', recorded)
    records = [dict(instruction='say', output='word ' * (1 + i)) for i in range(40)]
    cfg = sft_config(base, dtype='bfloat16', device='cpu', lora_rank=4)
    model = load_scalar(str(base/'reward_model'), cfg, train=True)
    limits = memory.pass_limits
    for module in (rewards, core_models):
        monkeypatch.setattr(module, 'pass_limits', lambda *a: (limits(*a)[0], 500))
    rewards.score_records(model, records)
    assert all(n <= 500 and mixed for n, mixed in seen)
    assert len(seen) > 3


def test_four_bits_are_asked_for_of_a_package(base, monkeypatch):
    "As if it were not installed, and as if it were."
    cfg = sft_config(base, lora_rank=4, quantize=True, device='cpu', dtype='bfloat16')
    seen = {}
    def load_model(*args, **more):
        seen.update(more)
        raise InterruptedError('loaded')
    monkeypatch.setattr(core_models, 'load_model', load_model)
    for found, said in ((None, 'bitsandbytes'), (object(), 'loaded')):
        monkeypatch.setattr('alpaca_farm.model.loading.find_spec', lambda name, it=found: it)
        with pytest.raises((ImportError, InterruptedError), match=said):
            load_policy(cfg.policy, cfg, train=True)
    assert seen['quantization_config'].load_in_4bit
    assert seen['quantization_config'].bnb_4bit_compute_dtype == torch.bfloat16


def test_a_checkpoint_comes_before_ten_minutes_of_long_steps_are_lost(base, tmp_path, monkeypatch):
    "Steps of four minutes, of which the first begins in the fifth minute of the run."
    clock = [0.]
    saved = []
    class Slow(Trainer):
        def update(self, *args):
            clock[0] += 240
            return super().update(*args)
        def save(self): saved.append((self.step, clock[0]))
    monkeypatch.setattr(sft, 'Trainer', Slow)
    monkeypatch.setattr(training, 'time', SimpleNamespace(monotonic=lambda: clock[0]))
    start = Run.__init__
    def early(self, *args):
        start(self, *args)
        self.began = -240.
    monkeypatch.setattr(Run, '__init__', early)
    sft.train(sft_config(base, out=str(tmp_path/'sft'), val_split='', max_instances=60))
    assert saved == [(1, 240.), (3, 720.)]
