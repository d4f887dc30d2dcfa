"""Several processes that share a run: the same losses, updates and answers as one process."""
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
from alpaca_farm import sft, world
from alpaca_farm.core.run import processes, runs
from alpaca_farm.core.run.files import read_json
from alpaca_farm.core.run.jobs import Job, run_jobs
from alpaca_farm.core.run.runs import read_log
from alpaca_farm.core.run.settings import TrainConfig
from alpaca_farm.rrhf import RRHFConfig
from alpaca_farm.core.run.paths import module_of
from safetensors.torch import load_file

TWO = dict(num_processes=2, device='cpu', dtype='float32')
METHODS = dict(reward_model={}, dpo=dict(loss_type='kto', held_out=7, eval_every=4), rrhf=dict(n=2, micro_batch_size=3), quark={}, ppo=dict(shared_value=True, micro_batch_size=3),
               binary_feedback={})
DIVIDED = dict(sharding='fsdp', micro_batch_size=3)   # layers divided among the processes
RUNS = {m: (m, more) for m, more in METHODS.items()} | {'sft divided': ('sft', DIVIDED), 'ppo divided': ('ppo', DIVIDED), 'dpo divided': ('dpo', DIVIDED),
                                                             'ppo with adapters': ('ppo', dict(lora_rank=4))}


def settings(notebook, base, out, **more):
    "Tiny settings of two processes."
    return tiny.settings(notebook, base, **{**TWO, 'out': str(out), **more})


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
    command = processes.ranks_command(TrainConfig(**TWO, out=str(folder/'x')), 'several', folder/'logs')
    environment = tiny.environment(**{processes.RANKS: '1', 'RUNS': str(folder/'runs.json'), 'PYTHONPATH': f'{tiny.ROOT}{os.pathsep}{tiny.ROOT}/tests'})
    stdin, held = os.pipe()   # closed in this process's end only: they end when it does
    done = subprocess.run(command[:command.index('several') + 1], cwd=tiny.ROOT, env=environment, stdin=stdin, capture_output=True, text=True)
    os.close(stdin), os.close(held)
    logs = ''.join(p.read_text() for p in folder.glob('logs/*/attempt_0/*/std*.log'))
    assert done.returncode == 0, done.stderr[-2000:] + logs[-4000:]
    return folder


@pytest.mark.parametrize('name', RUNS)
def test_two_processes_make_the_run_of_one(name, base, together, tmp_path):
    method, more = RUNS[name]
    module = importlib.import_module(module_of(method))
    module.train(tiny.config(module, **settings(method, base, tmp_path/'one', **more, num_processes=1)))
    assert_same_run(together/name, tmp_path/'one')


LONG = dict(epochs=12, checkpoint_every=1, eval_instances=4)


def ranks_of(pid):
    "The processes that share a run whose launcher has this id, by their number."
    import psutil
    found = {}
    for p in psutil.Process(pid).children(recursive=True):
        if 'alpaca_farm.sft' in p.cmdline() and (k := p.environ().get('RANK')): found[int(k)] = p
    return found


def started(base, out):
    "A run of two processes, some steps after its checkpoint: its launcher, and the two."
    before = len(read_log(out))
    p = tiny.spawn(tiny.command('sft', **settings('sft', base, out, **LONG, sharding='fsdp')))
    while len(read_log(out)) < before + 3 and p.poll() is None: time.sleep(.05)
    return p, ranks_of(p.pid)


@pytest.fixture(scope='module')
def undisturbed(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp('one')/'sft'
    sft.train(tiny.config(sft, **settings('sft', base, folder, **LONG, num_processes=1)))
    return folder


def test_a_lost_process_ends_all_and_one_process_goes_on(base, undisturbed, tmp_path):
    p, ranks = started(base, tmp_path/'sft')
    ranks[1].kill()
    text = p.communicate()[0]
    assert p.returncode and 'process 1: killed by signal 9' in text.strip().split('\n')[-1], text
    p, ranks = started(base, tmp_path/'sft')
    os.kill(p.pid, signal.SIGKILL)
    p.wait()
    until = time.time() + 20
    while any(r.is_running() and r.status() != 'zombie' for r in ranks.values()): assert time.time() < until; time.sleep(.1)
    done = len(read_log(tmp_path/'sft'))
    sft.train(tiny.config(sft, **settings('sft', base, tmp_path/'sft', **LONG, num_processes=1)))
    assert 3 < done < read_json(tmp_path/'sft'/'config.json')['steps']
    assert_same_run(tmp_path/'sft', undisturbed)


def test_two_processes_go_on_from_the_checkpoint_of_one(base, undisturbed, tmp_path, monkeypatch, capfd):
    from alpaca_farm.core.training import Trainer
    class Stop(Exception): pass
    save = Trainer.save
    def stop(self):
        save(self)
        if self.step == 7: raise Stop
    given = settings('sft', base, tmp_path/'sft', **LONG, sharding='fsdp')
    with monkeypatch.context() as m, pytest.raises(Stop):
        m.setattr(Trainer, 'save', stop)
        sft.train(tiny.config(sft, **given | dict(num_processes=1)))
    runs.unlock((tmp_path/'sft').resolve())
    assert run_jobs([Job(given.pop('out'), 'sft', given)], 1) == []   # from a notebook
    assert_same_run(tmp_path/'sft', undisturbed)
    assert sft.train(tiny.config(sft, **given, out=str(tmp_path/'sft'))).answered and 'finished already' in capfd.readouterr().out   # and nothing is launched


def test_no_setting_is_taken_for_one_of_the_launcher():
    from torch.distributed.run import parse_args
    cfg = RRHFConfig(n=3, num_processes=2, learning_rate=1e-5, betas=[.9, .99], template='alpaca', columns='instruction=question')
    command = processes.ranks_command(cfg, 'alpaca_farm.rrhf', 'logs')
    assert parse_args(command[3:]).training_script == 'alpaca_farm.rrhf' and not any('columns' in part for part in command)


def test_what_cannot_be_shared_is_refused_before_anything_is_started(base, tmp_path, monkeypatch):
    for given, message in ((dict(nodes=2), 'host:port'), (dict(rendezvous='here:1'), 'host:port'), (dict(num_processes=0), 'at least 1'),
                           (dict(device='cuda:1'), 'auto'), (dict(num_processes=13), 'batch_size = 12'), (dict(sharding='zero'), 'fsdp'),
                           (dict(sharding='fsdp', dtype='float16'), 'take ddp')):
        with pytest.raises(ValueError, match=message): sft.train(tiny.config(sft, **settings('sft', base, tmp_path/'x', **given)))
    with pytest.raises(ValueError, match='leave it at 1'): world.train(world.WorldConfig(num_processes=2, out=str(tmp_path/'x')))
    monkeypatch.setattr(processes, 'uses_gpu', lambda cfg: True)
    with pytest.raises(ValueError, match='this machine has 0'): sft.train(tiny.config(sft, **settings('sft', base, tmp_path/'x')))
    monkeypatch.undo()
    def train(cfg): return cfg   # another one than the module's
    with pytest.raises(ValueError, match='nbdev_export'): runs.start(tiny.config(sft, **settings('sft', base, tmp_path/'x')), train)
    assert not (tmp_path/'x').exists()


@pytest.mark.parametrize('end,closed', [('', True), ('raise ValueError', True), ('distributed.get_backend_config = lambda: "cuda:nccl"; raise ValueError', False)])
def test_a_process_closes_its_connections_before_it_ends(end, closed):
    "Unless an error ended it on GPUs, where NCCL waits for the others."
    code = ('import atexit; from torch import distributed; from alpaca_farm.core.run.processes import HardwareConfig, join_ranks\n'
            'atexit.register(lambda: print("open" if distributed.is_initialized() else "closed"))\n'   # the last of the handlers
            f'join_ranks(HardwareConfig(device="cpu"))\n{end}')
    port = str(*tiny.free_ports(1))
    variables = {processes.RANKS: '1', 'RANK': '0', 'WORLD_SIZE': '1', 'MASTER_ADDR': 'localhost', 'MASTER_PORT': port}
    with subprocess.Popen([sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tiny.ROOT, env=tiny.environment(**variables)) as process:
        assert process.stdout.read().strip() == ('closed' if closed else 'open')
