"""Sweeps: jobs for every combination of settings, here and on a Ray cluster."""
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import tiny
from alpaca_farm.core.run import jobs as launch
from alpaca_farm.core.run.jobs import Job, run_jobs
from alpaca_farm.core.run.runs import read_log
from alpaca_farm.core.run.sweeps import Cluster, sweep, sweep_command, _sweep_jobs


def test_a_sweep_makes_every_run_once_and_ends_in_a_table_and_a_figure(base, tmp_path, capfd):
    fixed = tiny.settings('reward_model', base)
    fixed.pop('learning_rate')
    command = [sys.executable, '-m', 'alpaca_farm.core.run.sweeps', 'reward_model', '--out', str(tmp_path/'s'), '--workers', '1',
               '-g', 'learning_rate', '0.001', '0.003', *(x for k, v in fixed.items() for x in ('-p', k, str(v)))]
    done = subprocess.run(command, cwd=tiny.ROOT, env=tiny.environment(), capture_output=True, text=True)
    assert done.returncode == 0 and 'learning_rate-0.003' in done.stdout, done.stdout + done.stderr
    table = pd.read_csv(tmp_path/'s'/'table.csv')
    assert list(table.learning_rate) == [.001, .003] and table.accuracy.between(0, 1).all() and (tmp_path/'s'/'figure.png').stat().st_size > 5000
    before = {p: p.stat().st_mtime for p in tmp_path.glob('s/*/summary.json')}
    again = sweep('reward_model', dict(learning_rate=[.001, .003]), str(tmp_path/'s'), **fixed)
    assert len(before) == 2 and before == {p: p.stat().st_mtime for p in before} and again.accuracy.tolist() == table.accuracy.tolist()


def test_a_figure_where_runs_are_missing(monkeypatch, tmp_path, capsys):
    from alpaca_farm.core.run import sweeps
    table = pd.DataFrame(dict(run=list('pqr'), rule=['a', 'c', 'b'], beta=[1, 1, 2], accuracy=[.5, .6, .7]))
    ax = sweeps._sweep_figure(table, dict(rule=['a', 'b', 'c'], beta=[1, 2]), 'rewrd').axes[0]
    drawn = [dict(zip('acb', bars.lines[0].get_ydata())) for bars in ax.containers]
    assert ax.get_ylabel() == 'accuracy' and [t.get_text() for t in ax.get_xticklabels() if t.get_text()] == list('acb')
    assert [{k: v for k, v in line.items() if v == v} for line in drawn] == [dict(a=.5, c=.6), dict(b=.7)]
    monkeypatch.setattr(sweeps, '_sweep_jobs', lambda *_, **__: [])
    monkeypatch.setattr(sweeps, 'run_jobs', lambda jobs, **_: ['b failed'])
    monkeypatch.setattr(sweeps, '_sweep_table', lambda *_: table)
    with pytest.raises(RuntimeError, match='b failed'): sweep('reward_model', dict(rule=['a', 'b', 'c'], beta=[1, 2]), str(tmp_path), show='rewrd')
    assert 'show = rewrd: the runs have run, rule, beta, accuracy' in capsys.readouterr().out


def test_an_invalid_sweep_starts_nothing(base, tmp_path, capsys):
    given = tiny.settings('reward_model', base)
    for grid, more, message in ((dict(lr=[1.]), {}, 'lr is not a setting'), (dict(epochs=[]), {}, 'at least one value'), (dict(epochs=2), {}, 'at least one value'),
                                (dict(epochs=[1, 1]), {}, 'would be named'), (dict(policy=['a/b', 'a.b']), {}, 'policy'), (dict(epochs=[0]), {}, 'epochs = 0'),
                                (dict(out=['a']), {}, 'out cannot vary'), (dict(seed=[0]), dict(gpus=99), 'this machine has 0')):
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
            sweep('reward_model', grid, str(tmp_path/'s'), **more, **{k: v for k, v in given.items() if k not in grid})
    for name, message in (('pppo', 'no notebook of that name'), ('../ppo', 'no notebook of that name'), ('judges', 'makes no run')):
        with pytest.raises(ValueError, match=message): sweep(name, dict(seed=[0]))
    with pytest.raises(SystemExit): sweep_command(['reward_model', '-g', 'seed', '0', '-g', 'seed', '1', '--out', str(tmp_path/'s')])
    assert 'name each setting once' in capsys.readouterr().err
    with pytest.raises(SystemExit): sweep_command(['reward_model', '-g', 'seed', '0', '-p', 'policy', 'no/such/folder'])
    assert 'there is no such file or folder' in capsys.readouterr().err
    assert not (tmp_path/'s').exists()


def test_jobs_get_gpus_of_their_own(monkeypatch):
    started, lasts = [], ['sh', '-c', 'sleep .3']
    def start(notebook, out, settings, variables):
        started.append((out, variables['CUDA_VISIBLE_DEVICES'].split(',')))
        return subprocess.Popen(lasts)
    monkeypatch.setattr(launch, 'start_notebook', start)
    monkeypatch.setattr(launch, '_gpu_names', lambda: ['4', '5', '7'])
    jobs = [Job(name, 'toy', gpus=n) for name, n in (('a', 1), ('b', 2), ('c', 2))]
    assert run_jobs(jobs, 3) == []
    assert {g for name, gpus in started[:2] for g in gpus} == {'4', '5', '7'} and len(started[-1][1]) == 2   # c waits for two that are free


AGENTS = 'metrics_agent_port', 'metrics_export_port', 'dashboard_agent_listen_port', 'runtime_env_agent_port'


def test_jobs_of_a_cluster_survive_the_loss_of_a_machine(base, tmp_path):
    ray = pytest.importorskip('ray')
    from ray.cluster_utils import Cluster as Machines
    machines = Machines()
    try:
        for _ in range(2):
            ports = dict(zip(AGENTS, tiny.free_ports(len(AGENTS))))   # on a busy computer Ray's own agents take too long to choose theirs
            machines.add_node(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False, include_log_monitor=False, **ports)
    except Exception as e:
        machines.shutdown()
        if 'timed out during startup' in str(e): pytest.skip('this computer is too busy: a raylet waits 15 seconds for its agents')
        raise
    lost = machines.list_all_nodes()[1]
    try:
        place = Cluster(machines.address)
        assert place.workers == 2
        with pytest.raises(ValueError, match='no machine of the cluster'): place.check([Job('a', 'toy', gpus=1)])
        given = tiny.settings('sft', base, epochs=25, checkpoint_every=1, eval_instances=4)
        jobs = _sweep_jobs('sft', dict(seed=[0, 1]), str(tmp_path/'s'), **given)
        def watch():
            nonlocal lost
            if lost and all(len(read_log(j.out)) > 3 for j in jobs): lost = machines.remove_node(lost, allow_graceful=False)
        assert run_jobs(jobs, place=place, watch=watch) == []
    finally:
        ray.shutdown()
        machines.shutdown()
    assert lost is None
    for j in jobs:
        steps = [r['step'] for r in read_log(j.out)]
        assert steps == list(range(1, len(steps) + 1)) and (Path(j.out)/'summary.json').exists()
