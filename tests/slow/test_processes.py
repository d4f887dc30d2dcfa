"""Several processes that share a run: the same losses, updates and answers as one process."""
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import tiny
from alpaca_farm import sft
from alpaca_farm.core.run.files import lock_of, read_json
from alpaca_farm.core.run.paths import module_of
from alpaca_farm.core.run.processes import _check_ranks
from alpaca_farm.core.run.runs import read_log
from alpaca_farm.world import WorldConfig
from safetensors.torch import load_file

CPU = dict(device='cpu', dtype='float32')
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2']
METHODS = dict(reward_model={}, dpo=dict(loss_type='kto', held_out=7, eval_every=4), rrhf=dict(n=2, micro_batch_size=3), quark={}, ppo=dict(shared_value=True, micro_batch_size=3),
               binary_feedback={})
DIVIDED = dict(sharding='fsdp', micro_batch_size=3)   # layers divided among the processes
RUNS = {m: (m, more) for m, more in METHODS.items()} | {'sft measured': ('sft', dict(eval_split='', eval_every=2, max_instances=36)),
       'sft divided': ('sft', DIVIDED), 'ppo divided': ('ppo', DIVIDED), 'dpo divided': ('dpo', DIVIDED),
                                                             'ppo with adapters': ('ppo', dict(lora_rank=4))}


def settings(notebook, base, out, **more):
    "Tiny settings of a run on the CPU."
    return tiny.settings(notebook, base, **{**CPU, 'out': str(out), **more})


def assert_same_run(two, one):
    "The logs, weights and answers of two runs are equal within the error of float32."
    a, b = read_log(two), read_log(one)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b):
        assert x.keys() == y.keys()
        tied = {'accuracy'} if abs(x.get('margin', 1)) < 1e-5 else set()   # before DPO's first step every margin is 0 but for rounding
        for k in x.keys() - {'wall'} - tied: assert np.isclose(x[k], y[k], rtol=2e-3, atol=2e-4, equal_nan=True), (two, x['step'], k, x[k], y[k])
    weights = [load_file(f'{run}/model/model.safetensors') for run in (two, one)]
    assert weights[0].keys() == weights[1].keys()
    for k in weights[0]: assert (weights[0][k] - weights[1][k]).abs().max() < 2e-4, k
    answers = [[r['output'] for r in read_json(Path(run)/'outputs.json')] if (Path(run)/'outputs.json').exists() else [] for run in (two, one)]
    assert answers[0] == answers[1]


@pytest.fixture(scope='module')
def together(base, tmp_path_factory):
    "All methods, each by two processes that are started once, and each by one."
    folder = tmp_path_factory.mktemp('together')
    (folder/'runs.json').write_text(json.dumps({name: [m, settings(m, base, folder/name, **more)] for name, (m, more) in RUNS.items()}))
    environment = tiny.environment(RUNS=str(folder/'runs.json'), PYTHONPATH=f'{tiny.ROOT}{os.pathsep}{tiny.ROOT}/tests')
    done = subprocess.run([*TORCHRUN, '-m', 'several'], cwd=tiny.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.mark.parametrize('name', RUNS)
def test_two_processes_make_the_run_of_one(name, base, together, tmp_path):
    method, more = RUNS[name]
    module = importlib.import_module(module_of(method))
    module.train(tiny.config(module, **settings(method, base, tmp_path/'one', **more)))
    assert_same_run(together/name, tmp_path/'one')


LONG = dict(epochs=12, checkpoint_every=1, eval_instances=4)


def started(base, out):
    "A run of two processes, some steps after its checkpoint: its launcher, and the two."
    before = len(read_log(out))
    _, _, *module = tiny.command('sft', **settings('sft', base, out, **LONG, sharding='fsdp'))
    p = tiny.spawn([*TORCHRUN, '-m', *module])
    while len(read_log(out)) < before + 3 and p.poll() is None: time.sleep(.05)
    return p, {int(c.environ()['RANK']): c for c in psutil.Process(p.pid).children(recursive=True) if 'RANK' in c.environ()}


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
    from alpaca_farm.core.training import Trainer
    class Stop(Exception): pass
    save = Trainer.save
    def stop(self):
        save(self)
        if self.step == 7: raise Stop
    with monkeypatch.context() as m, pytest.raises(Stop):
        m.setattr(Trainer, 'save', stop)
        sft.train(tiny.config(sft, **settings('sft', base, tmp_path/'sft', **LONG)))
    lock_of((tmp_path/'sft').resolve()).release()
    started(base, tmp_path/'sft')[0].communicate()
    assert_same_run(tmp_path/'sft', undisturbed)


def test_what_cannot_be_shared_is_refused():
    for given, n, message in ((dict(device='cuda:1'), 2, 'auto'), (dict(batch_size=12), 13, 'batch_size = 12'), (dict(sharding='fsdp', dtype='float16'), 2, 'take ddp')):
        with pytest.raises(ValueError, match=message): _check_ranks(sft.SFTConfig(**given), n)
    with pytest.raises(ValueError, match='a single process'): _check_ranks(WorldConfig(), 2)


@pytest.mark.parametrize('end,closed', [('', True), ('raise ValueError', True), ('distributed.get_backend_config = lambda: "cuda:nccl"; raise ValueError', False)])
def test_a_process_closes_its_connections_before_it_ends(end, closed):
    "Unless an error ended it on GPUs, where NCCL waits for the others."
    code = ('import atexit, os; from torch import distributed; from alpaca_farm.core.run import processes\n'
            'from alpaca_farm.core.run.settings import HardwareConfig\n'
            'atexit.register(lambda: print("open" if distributed.is_initialized() else "closed"))\n'   # the last of the handlers
            'start = distributed.init_process_group\n'
            'distributed.init_process_group = lambda *a, **k: start(*a, **k, rank=0, world_size=1)\n'
            f'processes.join_ranks(HardwareConfig(device="cpu"))\n{end}')
    variables = dict(RANK='0', WORLD_SIZE='2', MASTER_ADDR='localhost', MASTER_PORT=str(*tiny.free_ports(1)))
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tiny.ROOT, env=tiny.environment(**variables)) as process:
        assert process.stdout.read().strip() == ('closed' if closed else 'open')
