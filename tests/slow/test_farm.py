"""The farm: its table of runs, what it refuses, and its arithmetic over replicates."""
import itertools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from scipy.special import stdtrit

import tiny
from alpaca_farm import farm
from alpaca_farm.boards.simulation import _correlations, _method_differences, _separation
from alpaca_farm.boards.simulation import _simulation_table, method_groups
from alpaca_farm.farm import farm_jobs, FarmConfig, RUNS
from alpaca_farm.judging.stats import spearman
from alpaca_farm.run import jobs, progress, runs
from alpaca_farm.run.runs import methods, read_log, read_summary

COLUMNS = ('simulated', 'crowd', 'transfer')


def named(cfg, replicate=0):
    "A replicate's runs by name."
    return {j.out.rpartition('/')[2]: j for j in farm_jobs(cfg, replicate)}


LABELLERS = dict(pool='alpaca_farm.world:judge', crowd='alpaca_farm.world:crowd')


@pytest.mark.parametrize('replicate, folder, labellers', [
    (0, 'runs', LABELLERS), (0, 'runs', {}), (1, 'runs/seed_1', {})])
def test_the_table_says_what_a_run_reads_and_who_labels(replicate, folder, labellers):
    "Who learns from the crowd reads what the crowd has made; a replicate's has its own world's."
    made = named(FarmConfig(**labellers, device='cpu', seeds=2), replicate)
    assert {*made} == {*RUNS}
    for name, row in RUNS.items():
        job = made[name]
        assert job.out == f'{folder}/{name}'
        assert job.cost == row['cost']
        assert job.settings['device'] == 'cpu'
        assert job.settings['seed'] == replicate + row['settings'].get('seed', 0)
        for setting, run in row['reads'].items():
            assert job.settings[setting] == f'{folder}/{run}'
            assert RUNS[run]['labels'] in ('', row['labels'])
        if 'annotators' in row['settings']:
            own = f'{folder}/world/{row["labels"]}.json'
            assert job.settings['annotators'] == labellers.get(row['labels'], own)


def test_no_method_has_help_in_choosing_its_checkpoint():
    comparing = [name for name, row in methods().items() if 'annotators' in row['settings']]
    assert comparing == ['feedme', 'reward_conditioning']
    assert [row['method'] for row in RUNS.values() if row['method']] == [*methods()]*2


def test_all_rows_answer_at_temperature_1():
    others = set()
    made = named(FarmConfig())
    for name, job in made.items():
        for setting in ('temperature', 'eval_temperature'):
            if job.settings.get(setting, 1.) != 1.:
                others.add(name)
    assert others == {'sft_greedy'}
    assert made['best_of_n'].settings['samples'] == 'runs/eval_samples'


@pytest.fixture(scope='module')
def five():
    "Five replicates of five methods, of which the first two are as good; and their names."
    rng = np.random.default_rng(0)
    level = np.array([1.62, 1.615, 1.55, 1.5, 1.2])
    replicates = .006*rng.normal(size=(5, 1, 5))
    return level + replicates + .1*rng.normal(size=(5, 400, 5)), ['a', 'b', 'c', 'sft', 'base model']


def test_differences_of_methods_are_those_of_their_replicates(five):
    verdicts, names = five
    found = _method_differences(verdicts, names)
    row = found.set_index(['better', 'worse']).loc['a', 'c']
    each = 100*(verdicts[..., 0] - verdicts[..., 2]).mean(1)
    assert row.difference == pytest.approx(each.mean())
    assert row.sd == pytest.approx(each.std(ddof=1))
    assert row.clear
    # Student's t with four degrees of freedom
    assert row.high - row.difference >= 2.77*row.sd/5**.5
    groups = [sorted(g) for g in method_groups(found)]
    assert groups == [['a', 'b'], ['c'], ['sft'], ['base model']]


def test_how_many_replicates_two_points_need(five):
    "So many that four of five studies find them."
    verdicts, names = five
    found = _method_differences(verdicts, names)
    summary = _separation(found)
    spread = summary['spread_of_differences']
    assert spread == pytest.approx((found.sd**2).mean()**.5)
    def found_by(R, n=20_000):   # share of studies of R replicates
        studies = 2 + spread*np.random.default_rng(1).normal(size=(R, n))
        half = stdtrit(R - 1, .975)*studies.std(0, ddof=1)/R**.5
        return np.mean(studies.mean(0) > half)
    needed = summary['replicates_for_2_points']
    assert found_by(needed) > .79
    assert found_by(needed - 1) < .81
    assert _separation(_method_differences(verdicts[:1], names))['replicates_for_2_points'] is None


def test_equal_methods_are_rarely_apart():
    "Of 45 differences of ten equal methods one is clear in most studies; Holm's in 1 of 20."
    clear = []
    grouped = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        equal = 1.5 + .025*rng.normal(size=(5, 1, 10)) + .1*rng.normal(size=(5, 12, 10))
        found = _method_differences(equal, list('abcdefghij'))
        clear.append(found.clear.any())
        grouped.append(len(method_groups(found)) > 1)
    assert np.mean(clear) > .6
    assert np.mean(grouped) < .12


@pytest.fixture(scope='module')
def three():
    "What three kinds of judges say in three replicates of three methods."
    rng = np.random.default_rng(0)
    judged = {column: 1.5 + .1*rng.normal(size=(3, 40, 3)) for column in COLUMNS}
    return judged | dict(names=['sft', 'a', 'b'])


def test_spread_over_replicates(three):
    row = _simulation_table(three, 0).set_index('method').loc['b']
    means = 100*(three['crowd'][..., 2].mean(1) - 1)
    assert row.crowd == pytest.approx(means.mean())
    assert row.crowd_sd == pytest.approx(means.std(ddof=1))
    assert row.replicates == 3
    # Student's t with two degrees of freedom
    assert row.crowd_high - row.crowd >= 4.3*row.crowd_sd/3**.5
    one = three | {column: three[column][:1] for column in COLUMNS}
    assert 'crowd_sd' not in _simulation_table(one, 0)


def test_correlations_are_means_over_replicates(three):
    found = _correlations(three, 0)
    each = []
    for simulated, crowd in zip(three['simulated'], three['crowd']):
        each.append(float(spearman(simulated.mean(0), crowd.mean(0))))
    assert found['spearman_simulated_crowd'] == pytest.approx(np.mean(each))
    assert found['gaining'] == 0
    assert 'spearman_simulated_crowd_gaining' not in found


def test_the_farm_runs_where_its_place_says(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(farm, 'run_jobs', lambda jobs, **where: asked.append(where) or ['no'])
    cfg = FarmConfig(place='ray', workers=3, runs=str(tmp_path/'runs'))
    with pytest.raises(RuntimeError, match='no'):
        farm.run(cfg)
    assert asked == [dict(workers=3, name='farm', place='ray')]


def wait_for_end(processes):
    "Until all have ended; an orphan may remain as a zombie."
    def running(p): return p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    while any(map(running, processes)):
        time.sleep(.05)


def test_jobs_end_with_their_parent_and_a_restart_goes_on(base, tmp_path):
    "None of two runs outlives the process that starts them."
    folders = [str(tmp_path/name) for name in ('one', 'two')]
    given = tiny.settings('sft', base, epochs=12, checkpoint_every=5, val_split='', eval_split='')
    script = ('from alpaca_farm.run.jobs import Job, run_jobs\n'
              f'print(run_jobs([Job(f, "sft", {given!r}) for f in {folders!r}], 2))')
    command = [sys.executable, '-c', script]
    parent = tiny.spawn(command)
    while not any(len(read_log(f)) > 5 for f in folders):   # of 60, while the other may still load
        assert parent.poll() is None
        time.sleep(.02)
    started = psutil.Process(parent.pid).children(recursive=True)
    servers = {p.pid for p in started if p.ppid() == parent.pid}
    forks = [p for p in started if p.ppid() in servers]   # and not what a job starts in its turn
    assert len(forks) == 2, 'the server is a child of the parent, the jobs are its children'
    parent.kill()
    wait_for_end(started)   # the server writes nothing; it ends when nobody needs it
    assert not any(read_summary(f) for f in folders)
    assert tiny.spawn(command).communicate()[0].strip().split('\n')[-1] == '[]'
    for f in folders:
        assert [r['step'] for r in read_log(f)] == list(range(1, 61))


HOLDER = '''
import pathlib, signal, sys
from alpaca_farm.run.runs import _lock
_lock(pathlib.Path(sys.argv[1]))
print(1, flush=True)
signal.pause()   # until it is killed
'''


def test_a_restart_waits_for_what_still_writes(tmp_path, monkeypatch):
    "A line says so."
    run = tmp_path/'run'
    said = []
    with tiny.spawn([sys.executable, '-c', HOLDER, str(run)]) as other:
        def say(text):
            said.append(text)
            other.kill()
        monkeypatch.setattr(runs, 'print', say, raising=False)
        assert other.stdout.readline() == '1\n'
        runs._lock(run, patience=-1)   # as long as it takes
        runs.unlock(runs.lock_of(run/'run'))
    assert len(said) == 1
    assert 'waiting for it to end' in said[0]


@pytest.mark.parametrize('session', ['nbs/ppo.ipynb', ''])
def test_a_curve_only_where_a_person_has_the_notebook_open(monkeypatch, session):
    "At most one update a second, small for a long run; under papermill the line alone."
    if session:
        monkeypatch.setenv('JPY_SESSION_NAME', session)
    else:
        monkeypatch.delenv('JPY_SESSION_NAME', raising=False)
    clock = itertools.count(0., 1e-3)   # 20 seconds in all
    monkeypatch.setattr(progress, 'time', SimpleNamespace(monotonic=lambda: next(clock)))
    show = progress.Progress('ppo', 20_000)
    updates = []
    show.handle = SimpleNamespace(update=lambda data, raw: updates.append(data))
    for step in range(1, 20_001):
        show(step, 'reward 0.5', .5 + step % 7)
    assert len(updates) in (20, 21)
    assert updates[-1]['text/plain'] == 'ppo 20000/20000 reward 0.5'
    drawn = updates[-1].get('text/html', '')
    assert ('<polyline' in drawn) == bool(session)
    assert len(drawn) < 8000


class Clock:
    "A time that passes only where one sleeps."
    def __init__(self):
        self.now = 1000.

    def monotonic(self): return self.now

    def time(self): return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize('factor, logs', [(1., False), (5., False), (8., True)])
def test_the_time_left_learns_from_the_runs(tmp_path, monkeypatch, capfd, factor, logs):
    "Two at a time, of ten declared seconds that are `factor` times as many; best with a log."
    clock = Clock()
    seconds = 10*factor
    shown = []
    ends = {}
    def submit(f, notebook, output, *_):
        end = ends[output.stem] = clock.now + seconds
        return SimpleNamespace(done=lambda: clock.now >= end, exception=lambda: None)
    def share(job):
        end = ends.get(Path(job.out).name)
        return 1 - (end - clock.now)/seconds if logs and end else 0.
    def show(self, step, text='', value=None, left=None):
        shown.append((clock.now - 1000, left))
    monkeypatch.setattr(jobs, 'time', clock)
    monkeypatch.setattr(progress, 'time', clock)
    monkeypatch.setattr(jobs, '_share_done', share)
    monkeypatch.setattr(progress.Progress, '__call__', show)
    monkeypatch.setitem(jobs.JOB_PLACES, 'toys', lambda workers, gpus: jobs.Place(submit, [{}, {}]))
    monkeypatch.delenv('JPY_SESSION_NAME', raising=False)
    table = [jobs.Job(str(tmp_path/f'run_{k}'), 'sft') for k in range(12)]
    assert jobs.run_jobs(table, name='toys', place='toys') == []
    whole = clock.now - 1000
    assert whole == pytest.approx(6*seconds, rel=.1)
    first = .02 if logs else .4   # where it has begun to be right
    for passed, left in shown:
        if first < passed/whole < .98:
            near = pytest.approx(whole - passed, rel=.3, abs=3*factor)
            assert left == near, passed
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 12
    assert lines[0].startswith(f'toys 2/12: run_0 took {seconds:.0f} s, ')
    assert lines[-1] == f'toys 12/12: run_11 took {seconds:.0f} s'


def test_a_run_that_ends_is_told_where_there_is_no_terminal(base, tmp_path):
    "From a notebook that papermill executes, whose output goes to a file; one killed leaves others."
    import nbformat
    given = tiny.settings('annotators', base)
    (tmp_path/'kill.py').write_text('import os, signal\n'
                                    'def judge(pairs): os.kill(os.getpid(), signal.SIGKILL)')
    table = dict(whole=given, killed=given | dict(annotators='kill:judge'))
    table = {str(tmp_path/name): settings for name, settings in table.items()}
    code = ('from alpaca_farm.run.jobs import Job, run_jobs\n'
            f'run_jobs([Job(f, "annotators", given) for f, given in {table!r}.items()], 2, "toys")')
    cells = [nbformat.v4.new_code_cell(code)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path/'a.ipynb')
    process = tiny.spawn(tiny.papermill(tmp_path/'a.ipynb', tmp_path/'b.ipynb'),
                         PYTHONPATH=f'{tiny.PATHS}{os.pathsep}{tmp_path}')
    lines = process.communicate()[0].splitlines()
    ended = [line for line in lines if line.startswith('toys ') and ' took ' in line]
    assert process.returncode == 0
    assert len(ended) == 2
    assert any('whole took' in line and 'FAILED' not in line for line in ended)
    assert any('killed took' in line and 'its process was killed' in line for line in ended)
    assert read_summary(tmp_path/'whole')
