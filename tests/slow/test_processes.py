"""Several processes that share a run: the same losses, updates and answers as one process."""
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import tiny
from alpaca_farm import sft, world
from alpaca_farm.run.files import lock_of, read_json, unlock
from alpaca_farm.run.processes import _check_ranks
from alpaca_farm.run.runs import read_log
from safetensors.torch import load_file

CPU = dict(device='cpu', dtype='float32')
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']
RUNS = {   # by a name that begins with the method
    'reward_model': {},
    'dpo': dict(loss_type='kto', held_out=7, eval_every=4),
    'rrhf': dict(n=2, micro_batch_size=3),
    'quark': {},
    'ppo': dict(micro_batch_size=3),
    'binary_feedback': {},
    'sft measured': dict(eval_split='', eval_every=2, max_instances=36),
    'ppo with adapters': dict(lora_rank=4)}


def settings(notebook, base, out, **more):
    "Tiny settings of a run on the CPU."
    return tiny.settings(notebook, base, **dict(CPU, out=str(out)) | more)


def run_of(name, base, out):
    "The method of a run of RUNS and its settings."
    method = name.split()[0]
    return method, settings(method, base, out, **RUNS[name])


def answers(run):
    file = Path(run)/'outputs.json'
    return [r['output'] for r in read_json(file)] if file.exists() else []


def assert_same_log(two, one):
    a = read_log(two)
    b = read_log(one)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b):
        assert x.keys() == y.keys()
        left_out = {'wall'}
        if abs(x.get('margin', 1)) < 1e-5:   # before DPO's first step, all are 0 but for rounding
            left_out.add('accuracy')
        for k in x.keys() - left_out:
            close = np.isclose(x[k], y[k], rtol=2e-3, atol=2e-4, equal_nan=True)
            assert close, (two, x['step'], k, x[k], y[k])


def assert_same_run(two, one):
    "The logs, weights and answers of two runs are equal within the error of float32."
    assert_same_log(two, one)
    a, b = (load_file(f'{run}/model/model.safetensors') for run in (two, one))
    assert a.keys() == b.keys()
    for k in a:
        assert (a[k] - b[k]).abs().max() < 2e-4, k
    assert answers(two) == answers(one)


@pytest.fixture(scope='module')
def together(base, tmp_path_factory):
    "All methods, each by two processes that are started once, and each by one."
    folder = tmp_path_factory.mktemp('together')
    runs = folder/'runs.json'
    runs.write_text(json.dumps({name: run_of(name, base, folder/name) for name in RUNS}))
    env = tiny.environment(RUNS=str(runs), PYTHONPATH=tiny.PATHS)
    done = subprocess.run([*TORCHRUN, '-m', 'several'], capture_output=True, text=True,
                          cwd=tiny.ROOT, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.mark.parametrize('name', RUNS)
def test_two_processes_make_the_run_of_one(name, base, together, tmp_path):
    method, given = run_of(name, base, tmp_path/'one')
    tiny.main(method)(tiny.config(method, **given))
    assert_same_run(together/name, tmp_path/'one')


LONG = dict(epochs=12, checkpoint_every=1, eval_instances=4)


def started(base, out):
    "A run of two processes, some steps after its checkpoint: its launcher, and the two."
    before = len(read_log(out))
    _, _, *module = tiny.command('sft', **settings('sft', base, out, **LONG))
    p = tiny.spawn([*TORCHRUN, '-m', *module])
    while len(read_log(out)) < before + 3 and p.poll() is None:
        time.sleep(.05)
    children = psutil.Process(p.pid).children(recursive=True)
    return p, {int(c.environ()['RANK']): c for c in children if 'RANK' in c.environ()}


@pytest.fixture(scope='module')
def undisturbed(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp('one')/'sft'
    sft.train(tiny.config(sft, **settings('sft', base, folder, **LONG)))
    return folder


def test_a_lost_process_ends_all_and_one_process_goes_on(base, undisturbed, tmp_path):
    p, ranks = started(base, tmp_path/'sft')
    ranks[1].kill()
    text = p.communicate()[0]
    assert p.returncode and 'Signal 9' in text, text
    assert not any(r.is_running() and r.status() != 'zombie' for r in ranks.values())
    done = len(read_log(tmp_path/'sft'))
    sft.train(tiny.config(sft, **settings('sft', base, tmp_path/'sft', **LONG)))
    assert 3 <= done < read_json(tmp_path/'sft'/'config.json')['steps']
    assert_same_run(tmp_path/'sft', undisturbed)


def test_two_processes_go_on_from_the_checkpoint_of_one(base, undisturbed, tmp_path, monkeypatch):
    from alpaca_farm.train.trainer import Trainer
    class Stop(Exception): pass
    save = Trainer.save
    def stop(self):
        save(self)
        if self.step == 7:
            raise Stop
    with monkeypatch.context() as m, pytest.raises(Stop):
        m.setattr(Trainer, 'save', stop)
        sft.train(tiny.config(sft, **settings('sft', base, tmp_path/'sft', **LONG)))
    unlock(lock_of((tmp_path/'sft').resolve()/'run'))
    started(base, tmp_path/'sft')[0].communicate()
    assert_same_run(tmp_path/'sft', undisturbed)


def test_what_cannot_be_shared_is_refused(monkeypatch):
    with pytest.raises(ValueError, match='batch_size'):
        _check_ranks(sft.SFTConfig(batch_size=12), 13)
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(ValueError, match='a single process'):
        world.train(world.WorldConfig())


JOINED = '''
import atexit
from torch import distributed
from alpaca_farm.run import processes
from alpaca_farm.run.settings import HardwareConfig
def said(): return print('open' if distributed.is_initialized() else 'closed')
atexit.register(said)   # the last of the handlers
start = distributed.init_process_group
distributed.init_process_group = lambda *a, **k: start(*a, **k, rank=0, world_size=1)
processes.join_ranks(HardwareConfig(device='cpu'))
'''
ON_GPUS = 'distributed.get_backend_config = lambda: "cuda:nccl"; '


@pytest.mark.parametrize('end, closed', [
    ('', True), ('raise ValueError', True), (ON_GPUS + 'raise ValueError', False)])
def test_a_process_closes_its_connections_before_it_ends(end, closed):
    "Unless an error ended it on GPUs, where NCCL waits for the others."
    env = tiny.environment(RANK='0', WORLD_SIZE='2', MASTER_ADDR='localhost', MASTER_PORT='0')
    done = subprocess.run([sys.executable, '-c', JOINED + end], capture_output=True, text=True,
                          cwd=tiny.ROOT, env=env)
    assert done.stdout.strip() == ('closed' if closed else 'open')
