"""Sweeps: jobs for every combination of settings, here and on a Ray cluster."""
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import tiny
from alpaca_farm.core.run import jobs
from alpaca_farm.core.run.jobs import Job, run_jobs
from alpaca_farm.core.run.runs import read_log


def test_a_sweep_makes_every_run_once_and_ends_in_a_table(base, tmp_path):
    fixed, out = tiny.settings('reward_model', base), str(tmp_path/'s')
    fixed.pop('learning_rate')
    options = [x for k, v in fixed.items() for x in ('-p', k, str(v))]
    command = [sys.executable, '-m', 'alpaca_farm.core.run.jobs', 'reward_model', '--out', out,
               '--workers', '1', '-g', 'learning_rate', '0.001', '0.003', *options]
    subprocess.run(command, cwd=tiny.ROOT, env=tiny.environment(), check=True, capture_output=True)
    table = pd.read_csv(tmp_path/'s'/'table.csv')
    assert list(table.learning_rate) == [.001, .003] and table.accuracy.between(0, 1).all()
    before = {p: p.stat().st_mtime for p in tmp_path.glob('s/*/summary.json')}
    again = jobs.sweep('reward_model', dict(learning_rate=[.001, .003]), out, **fixed)
    assert len(before) == 2 and before == {p: p.stat().st_mtime for p in before}
    assert again.accuracy.tolist() == table.accuracy.tolist()


@pytest.mark.parametrize('grid, message', [
    (dict(epochs=2), 'at least one value'), (dict(out=['a']), 'out cannot vary'),
    (dict(epochs=[0]), 'epochs = 0'), (dict(seed=[0], gpus=99), 'this machine has 0')])
def test_an_invalid_sweep_starts_nothing(base, tmp_path, grid, message):
    given = tiny.settings('reward_model', base)
    given = {k: v for k, v in given.items() if k not in grid} | dict(gpus=grid.pop('gpus', 0))
    with pytest.raises((ValueError, TypeError), match=message):
        jobs.sweep('reward_model', grid, str(tmp_path/'s'), **given)
    assert not (tmp_path/'s').exists()


@pytest.mark.parametrize('args, message', [
    (['pppo', '-g', 'seed', '0'], 'no notebook'), (['judges', '-g', 'seed', '0'], 'no run'),
    (['reward_model', '-g', 'seed', '0', '-g', 'seed', '1'], 'name each setting once'),
    (['reward_model', '-g', 'seed', '0', '-p', 'policy', 'no/such/folder'], 'policy')])
def test_an_invalid_command_is_one_line(capsys, args, message):
    with pytest.raises(SystemExit): jobs.sweep_command(args)
    assert message in capsys.readouterr().err.strip().split('\n')[-1]


def test_a_command_gives_lists(monkeypatch):
    "That vary and that all runs have; of one setting that is a list, and one that may be."
    made = []
    def sweep(grid, notebook, out, workers, gpus, address, **fixed):
        made.extend(jobs._sweep_jobs(notebook, grid, 's', **fixed))
        return pd.DataFrame()
    monkeypatch.setattr(jobs, 'sweep', sweep)
    jobs.sweep_command(['ppo', '-g', 'betas', '[.9, .99]', '[.8, .95]', '-p', 'seed', '3',
                        '-g', 'reward_model', 'json:dumps', '[json:dumps, json:loads]'])
    assert [job.settings['betas'] for job in made] == [[.9, .99]]*2 + [[.8, .95]]*2
    rewards = [job.settings['reward_model'] for job in made[:2]]
    assert rewards == ['json:dumps', ['json:dumps', 'json:loads']]
    for words in (['a'], ['a', 'b']):
        jobs.sweep_command(['rrhf', '-g', 'seed', '0', '-p', 'sources', *words])
        assert made[-1].settings == dict(seed=0, sources=words)


def test_jobs_get_gpus_of_their_own(monkeypatch):
    started = []
    def start(notebook, out, settings, variables):
        started.append(variables['CUDA_VISIBLE_DEVICES'].split(','))
        process = multiprocessing.Process(target=time.sleep, args=(.3,))
        process.start()
        return process
    monkeypatch.setattr(jobs, 'start_notebook', start)
    monkeypatch.setattr(jobs, '_gpu_names', lambda: ['4', '5', '7'])
    table = [Job(name, 'toy', gpus=n) for name, n in (('a', 1), ('b', 2), ('c', 2))]
    assert run_jobs(table, 3) == []
    assert {g for gpus in started[:2] for g in gpus} == {'4', '5', '7'}
    assert len(started[-1]) == 2   # c waits for two that are free


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
    try:
        place = jobs.Cluster(machines.address)
        assert place.workers == 2
        with pytest.raises(ValueError, match='no machine'): place.check([Job('a', 'toy', gpus=1)])
        given = tiny.settings('sft', base, epochs=25, checkpoint_every=1, eval_instances=4)
        table = jobs._sweep_jobs('sft', dict(seed=[0, 1]), str(tmp_path/'s'), **given)
        def sleep(seconds):
            nonlocal lost
            time.sleep(seconds)
            if lost and all(len(read_log(j.out)) > 3 for j in table):
                lost = machines.remove_node(lost, allow_graceful=False)
        monkeypatch.setattr(jobs, 'time', SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        assert run_jobs(table, place=place) == []
    finally:
        ray.shutdown()
        machines.shutdown()
    assert lost is None
    for j in table:
        steps = [r['step'] for r in read_log(j.out)]
        assert steps == list(range(1, len(steps) + 1)) and (Path(j.out)/'summary.json').exists()
