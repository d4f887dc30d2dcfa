"""A copy of the log elsewhere: wandb offline, TensorBoard; neither can stop a run."""
import struct
import subprocess

import pytest

import tiny
from alpaca_farm import sft
from alpaca_farm.core.run import trackers
from alpaca_farm.core.run.paths import notebook_path
from alpaca_farm.core.run.runs import read_log, read_summary


def settings(base, out, **more): return tiny.settings('sft', base, out=str(out), **more)


def events(folder):
    "What TensorBoard reads of a run."
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    found = EventAccumulator(str(folder/'tensorboard'), size_guidance=dict(tensors=0, scalars=0, images=0))
    found.Reload()
    return found


def test_tensorboard_has_the_log_and_the_samples(base, tmp_path):
    pytest.importorskip('tensorboard')
    given = settings(base, tmp_path/'sft', tracker='tensorboard')
    subprocess.run(tiny.papermill(notebook_path('sft'), tmp_path/'sft.ipynb', **given), cwd=tiny.ROOT, env=tiny.environment(), check=True, capture_output=True)
    found, log = events(tmp_path/'sft'), read_log(tmp_path/'sft')
    assert [(e.step, e.value) for e in found.Scalars('loss')] == [(r['step'], pytest.approx(r['loss'], rel=1e-6)) for r in log]
    texts = {name: found.Tensors(name)[0].tensor_proto.string_val[0].decode() for name in found.Tags()['tensors']}
    assert '"batch_size"' in texts['settings/text_summary'] and '**' in texts['samples/text_summary']


def test_a_run_that_goes_on_leaves_out_what_it_repeats(base, tmp_path, monkeypatch):
    pytest.importorskip('tensorboard')
    cfg = sft.SFTConfig(**settings(base, tmp_path/'a', tracker='tensorboard', eval_split='', checkpoint_every=2))
    update = sft.Trainer.update
    def killed(self, *args):
        if self.step == 4: raise KeyboardInterrupt
        return update(self, *args)
    monkeypatch.setattr(sft.Trainer, 'update', killed)
    with pytest.raises(KeyboardInterrupt): sft.train(cfg)
    monkeypatch.setattr(sft.Trainer, 'update', update)
    sft.train(cfg)
    assert [e.step for e in events(tmp_path/'a').Scalars('loss')] == [r['step'] for r in read_log(tmp_path/'a')]


def wandb_records(data):
    "The records of a .wandb file: a head of 7 bytes, then LevelDB's log format, blocks of 32 kB with parts of records."
    at, whole = 7, b''
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack('<HB', data[at + 4:at + 7])
        whole, at = whole + data[at + 7:at + 7 + size], at + 7 + size
        if kind in (1, 4):   # a full record, or the last part of one
            yield whole
            whole = b''


def test_wandb_offline_has_the_log_and_the_samples(base, tmp_path):
    pytest.importorskip('wandb')
    from wandb.proto import wandb_internal_pb2
    subprocess.run(tiny.command('sft', **settings(base, tmp_path/'sft', tracker='wandb')), cwd=tiny.ROOT, check=True, capture_output=True,
                   env=tiny.environment(WANDB_MODE='offline', WANDB_SILENT='true'))
    file, = (tmp_path/'sft').rglob('*.wandb')
    steps, keys = [], set()
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof('record_type') != 'history': continue
        names = {'.'.join(i.nested_key) or i.key for i in record.history.item}
        keys |= names
        if 'loss' in names: steps.append(record.history.step.num)
    assert steps == [r['step'] for r in read_log(tmp_path/'sft')] and any(k.startswith('samples') for k in keys), keys


class Broken:
    "A tracker whose service is gone at some call."
    def __init__(self, at): self.at = at
    def __getattr__(self, name):
        def call(*_):
            if name == self.at: raise ConnectionError('gone\nand more')
        return call


@pytest.mark.parametrize('at', ['start', 'log', 'log_table', 'finish'])
def test_a_tracker_that_fails_never_stops_a_run(base, tmp_path, monkeypatch, capsys, at):
    def start(*_):
        if at == 'start': raise OSError('no network\nand more')
        return Broken(at)
    monkeypatch.setattr(trackers, '_start_tracker', start)
    monkeypatch.setattr(trackers, 'find_spec', lambda name: True)
    sft.train(sft.SFTConfig(**settings(base, tmp_path/'a', tracker='wandb', max_instances=24)))
    said = capsys.readouterr().out
    assert read_summary(tmp_path/'a') and said.count('tracker = wandb failed and is left out') == 1 and 'and more' not in said


def test_a_missing_package_is_named_before_any_work(base, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, 'find_spec', lambda name: None)
    with pytest.raises(ModuleNotFoundError, match='tracker = tensorboard: pip install tensorboard'):
        sft.train(sft.SFTConfig(**settings(base, tmp_path/'a', tracker='tensorboard')))
    assert not (tmp_path/'a').exists()
