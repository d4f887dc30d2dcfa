"""A copy of the log elsewhere: wandb offline, TensorBoard; neither can stop a run."""
import struct
import subprocess

import pytest

import tiny
from alpaca_farm import sft
from alpaca_farm.core.run import runs
from alpaca_farm.core.run.runs import read_log, read_summary


def settings(base, out, **more): return tiny.settings('sft', base, out=str(out), **more)


def test_tensorboard_has_the_log_once(base, tmp_path, monkeypatch):
    "A run that goes on leaves out what it repeats."
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    cfg = sft.SFTConfig(**settings(base, tmp_path/'a', tracker='tensorboard', checkpoint_every=2))
    update = sft.Trainer.update
    def killed(self, *args):
        if self.step == 4: raise KeyboardInterrupt
        return update(self, *args)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(sft.Trainer, 'update', killed)
        sft.train(cfg)
    sft.train(cfg)
    sizes = dict(tensors=0, scalars=0, images=0)
    found = EventAccumulator(str(tmp_path/'a'/'tensorboard'), size_guidance=sizes)
    found.Reload()
    logged = {r['step']: r['loss'] for r in read_log(tmp_path/'a')}
    assert {e.step: e.value for e in found.Scalars('loss')} == pytest.approx(logged, rel=1e-6)
    def text(name): return found.Tensors(name)[0].tensor_proto.string_val[0].decode()
    assert '"batch_size"' in text('settings/text_summary')


def wandb_records(data):
    "Of a .wandb file: 7 bytes, then LevelDB's log, blocks of 32 kB with parts of records."
    at, whole = 7, b''
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack('<HB', data[at + 4:at + 7])
        whole += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):   # a full record, or the last part of one
            yield whole
            whole = b''


def test_wandb_offline_has_the_log(base, tmp_path):
    pytest.importorskip('wandb')
    from wandb.proto import wandb_internal_pb2
    command = tiny.command('sft', **settings(base, tmp_path/'sft', tracker='wandb'))
    subprocess.run(command, cwd=tiny.ROOT, check=True, capture_output=True,
                   env=tiny.environment(WANDB_MODE='offline', WANDB_SILENT='true'))
    file, = (tmp_path/'sft').rglob('*.wandb')
    steps = []
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof('record_type') != 'history': continue
        names = {'.'.join(i.nested_key) or i.key for i in record.history.item}
        if 'loss' in names: steps.append(record.history.step.num)
    assert steps == [r['step'] for r in read_log(tmp_path/'sft')]


class Broken:
    "A tracker whose service is gone at some call."
    def __init__(self, at): self.at = at
    def __getattr__(self, name):
        def call(*_):
            if name == self.at: raise ConnectionError('gone\nand more')
        return call


@pytest.mark.parametrize('at', ['start', 'log', 'finish'])
def test_a_tracker_that_fails_never_stops_a_run(base, tmp_path, monkeypatch, capsys, at):
    def start(*_):
        if at == 'start': raise OSError('no network\nand more')
        return Broken(at)
    monkeypatch.setattr(runs, '_start_tracker', start)
    monkeypatch.setattr(runs, 'find_spec', lambda name: True)
    sft.train(sft.SFTConfig(**settings(base, tmp_path/'a', tracker='wandb', max_instances=24)))
    said = capsys.readouterr().out
    assert read_summary(tmp_path/'a') and said.count('tracker = wandb failed') == 1
    assert 'and more' not in said


def test_a_missing_package_is_named_before_any_work(base, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'find_spec', lambda name: None)
    with pytest.raises(ModuleNotFoundError, match='tracker = tensorboard: pip install'):
        sft.train(sft.SFTConfig(**settings(base, tmp_path/'a', tracker='tensorboard')))
    assert not (tmp_path/'a').exists()
