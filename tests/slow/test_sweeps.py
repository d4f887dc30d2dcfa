"""Sweeps, and the places where jobs run: this machine, a Ray cluster, submitit."""
import functools
import time
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
import tiny
from alpaca_farm.run import jobs
from alpaca_farm.run.jobs import Job, run_jobs
from alpaca_farm.run.runs import read_log, read_summary


def test_a_sweep_makes_every_run_once_and_ends_in_a_table(base, tmp_path):
    fixed, out = tiny.settings('reward_model', base), str(tmp_path/'s')
    fixed.pop('learning_rate')
    made = [jobs.sweep('reward_model', dict(learning_rate=[.001, .003]), out, 1, **fixed)
            for _ in range(2)]
    assert list(made[0].learning_rate) == [.001, .003] and made[0].accuracy.between(0, 1).all()
    assert made[0].equals(made[1]) and len([*tmp_path.glob('s/*/summary.json')]) == 2


@pytest.mark.parametrize('name, grid, more, message', [
    ('reward_model', dict(epochs=2), {}, 'int'), ('reward_model', dict(seed=[0]), dict(seed=1), 'seed'),
    ('reward_model', dict(seed=[0]), dict(gpus=99), 'gpus'),
    ('reward_model', dict(seed='12'), {}, 'list'), ('pppo', dict(seed=[0]), {}, 'pppo'),
    ('reward_model', dict(seed=[0]), dict(place='mars'), 'mars')])
def test_an_invalid_sweep_starts_nothing(base, tmp_path, name, grid, more, message):
    given = {k: v for k, v in tiny.settings('reward_model', base).items() if k not in grid} | more
    with pytest.raises((TypeError, ValueError), match=message):
        jobs.sweep(name, grid, str(tmp_path/'s'), **given)
    assert not (tmp_path/'s').exists()


def test_jobs_get_gpus_of_their_own(monkeypatch):
    started = []
    def submit(*args):
        started.append(args[-1]['CUDA_VISIBLE_DEVICES'])
        future = Future()
        Timer(.3, future.set_result, [None]).start()
        return future
    monkeypatch.setattr(jobs, 'start_process', submit)
    monkeypatch.setattr(jobs, '_gpu_names', lambda: ['4', '5', '7'])
    assert run_jobs([Job(name, 'toy') for name in 'abc'], gpus=2) == []
    assert started == ['4,5']*3   # one after the other
    started.clear()
    assert run_jobs([Job(name, 'toy') for name in 'abcd'], gpus=1) == []
    assert {*started[:3]} == {'4', '5', '7'}


def test_an_interrupted_table_ends_its_jobs(base, tmp_path, monkeypatch):
    given = tiny.settings('sft', base, epochs=200)
    def sleep(seconds):
        time.sleep(seconds)
        if read_log(str(tmp_path/'run')): raise KeyboardInterrupt
    monkeypatch.setattr(jobs, 'time', SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt): run_jobs([Job(str(tmp_path/'run'), 'sft', given)])
    before = len(read_log(str(tmp_path/'run')))
    time.sleep(1)
    assert len(read_log(str(tmp_path/'run'))) == before and not read_summary(tmp_path/'run')


def test_submitit_runs_a_chain(base, tmp_path, monkeypatch):
    pytest.importorskip('submitit')
    monkeypatch.setitem(jobs.JOB_PLACES, 'local', functools.partial(jobs.slurm, cluster='local'))
    labels, model, bad = (str(tmp_path/name) for name in ('labels', 'model', 'bad'))
    given = tiny.settings('reward_model', base, preferences=labels)
    table = [Job(model, 'reward_model', given, [labels]),
             Job(labels, 'annotators', tiny.settings('annotators', base)),
             Job(bad, 'annotators', tiny.settings('annotators', base, outputs=''))]
    failed, = run_jobs(table, place='local')
    assert 'bad.ipynb, cell ' in failed
    assert read_summary(model)['accuracy'] >= 0 and read_summary(labels)


AGENTS = ('metrics_agent_port', 'metrics_export_port', 'dashboard_agent_listen_port',
          'runtime_env_agent_port')


def test_jobs_of_a_cluster_survive_the_loss_of_a_machine(base, tmp_path, monkeypatch):
    ray = pytest.importorskip('ray')
    from ray.cluster_utils import Cluster as Machines
    machines = Machines()
    try:
        for _ in range(2):   # on a busy computer Ray's own agents take too long to choose ports
            ports = dict(zip(AGENTS, tiny.free_ports(len(AGENTS))))
            machines.add_node(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False,
                              include_log_monitor=False, **ports)
    except Exception as e:
        machines.shutdown()
        if 'timed out during startup' in str(e): pytest.skip('too busy: a raylet waits 15 seconds')
        raise
    lost = machines.list_all_nodes()[1]
    monkeypatch.setenv('RAY_ADDRESS', machines.address)
    try:
        assert len(jobs.ray_cluster(0, gpus=0).slots) == 2
        with pytest.raises(ValueError, match='gpus'): jobs.ray_cluster(0, gpus=1)
        given = tiny.settings('sft', base, epochs=25, checkpoint_every=1, eval_instances=4)
        table = [Job(str(tmp_path/f's{k}'), 'sft', given | dict(seed=k)) for k in range(2)]
        def sleep(seconds):
            nonlocal lost
            time.sleep(seconds)
            if lost and all(len(read_log(j.out)) > 3 for j in table):
                lost = machines.remove_node(lost, allow_graceful=False)
        monkeypatch.setattr(jobs, 'time', SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        assert run_jobs(table, place='ray') == []
    finally:
        ray.shutdown()
        machines.shutdown()
    assert lost is None
    for j in table:
        steps = [r['step'] for r in read_log(j.out)]
        assert steps == list(range(1, len(steps) + 1)) and (Path(j.out)/'summary.json').exists()
