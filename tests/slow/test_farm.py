"""The farm: its table of runs, what it refuses, and its arithmetic over replicates."""
import dataclasses
import importlib
import json
import sys
import time
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import tiny
from alpaca_farm import farm, world
from alpaca_farm.annotators import AnnotatorsConfig, load_annotators
from alpaca_farm.boards.farm_board import chosen_answers, parts_table
from alpaca_farm.boards.simulation import (correlations, method_differences, method_groups,
                                           separation,
                                           simulation_table, vote_agreements)
from alpaca_farm.core.data.records import load_records
from alpaca_farm.core.run import progress, runs
from alpaca_farm.core.run.inputs import methods
from alpaca_farm.core.run.paths import module_of
from alpaca_farm.core.run.runs import read_log, read_summary
from alpaca_farm.core.stats import spearman
from alpaca_farm.embedded import criteria
from alpaca_farm.farm import farm_jobs, FarmConfig, population, RUNS
from alpaca_farm.judging.agreement import embedded_pairs
from alpaca_farm.judging.noise import flip_share, preference_probabilities, sample_votes

COLUMNS = ('simulated', 'crowd', 'transfer')


def named(cfg, replicate=0):
    "A replicate's runs by name."
    return {j.out.rpartition('/')[2]: j for j in farm_jobs(cfg, replicate)}


@pytest.mark.parametrize('given, message', [
    (dict(size='huge'), 'choose from'), (dict(size='no/such/file.yaml'), 'no/such/file.yaml'),
    (dict(seeds=0), 'seeds'), (dict(workers=-1), 'workers'), (dict(gold='gold'), 'gold'),
    (dict(crowd='alpaca_farm.world:nobody'), 'nobody'),
    (dict(held_out='no/such.json'), 'no/such.json'),
    (dict(pool='no_such_module:pool'), 'no_such_module')])
def test_nonsense_is_refused_before_any_run(given, message):
    with pytest.raises((ValueError, OSError), match=message): FarmConfig(**given)


def test_the_table_says_what_a_run_reads_and_who_labels():
    "Runs read runs of their replicate; those of the crowd read what the crowd has made."
    cfg = FarmConfig(pool='alpaca_farm.world:judge', crowd='alpaca_farm.world:gold', device='cpu',
                     seeds=2)
    for k, folder in enumerate(('runs', 'runs/seed_1')):
        jobs = named(cfg, k)
        assert set(jobs) == set(RUNS)
        assert {n for j in jobs.values() for n in j.needs} <= {j.out for j in jobs.values()}
        for name, row in RUNS.items():
            job = jobs[name]
            assert job.out == f'{folder}/{name}' and job.settings['device'] == 'cpu'
            reads = {k: f'{folder}/{v}' for k, v in row['reads'].items()}
            assert job.settings.items() >= reads.items()
            assert job.settings['seed'] == k + row['settings'].get('seed',
                                                                   0) and job.cost == row['cost']
            sources = {RUNS[r]['labels'] for r in row['reads'].values()} - {''}
            assert sources <= {row['labels']}
            asked = dict(pool='alpaca_farm.world:judge',
                         crowd='alpaca_farm.world:gold').get(row['labels'])
            if 'annotators' in row['settings']: assert job.settings['annotators'] == asked
    comparing = [name for name, row in methods().items() if 'annotators' in row['settings']]
    assert comparing == ['feedme',
                         'reward_conditioning']  # no method has help in choosing its checkpoint
    assert [row['method'] for row in RUNS.values() if row['method']] == [*methods()]*2


def test_every_replicate_has_a_crowd_of_its_own():
    "Labels and board of a replicate are those of the populations in its own world's files."
    for k, folder in enumerate(('runs', 'runs/seed_1')):
        jobs = named(FarmConfig(seeds=2), k)
        for run, who in dict(annotators='pool', annotators_crowd='crowd', feedme='pool',
                             feedme_crowd='crowd').items():
            assert jobs[run].settings['annotators'] == f'{folder}/world/{who}.json', run
        assert population(FarmConfig(), 'held_out',
                          folder) == f'{folder}/world/held_out_crowd.json'
    # for seed 0
    drawn = {f'alpaca_farm.world:{who}' for who in ('crowd', 'held_out_crowd', 'pool',
                                                    'length_biased')}
    for job in farm_jobs(FarmConfig(seeds=2), 1) + farm_jobs(FarmConfig()):
        module = importlib.import_module(module_of(job.notebook))
        kind = next(v for k,
                    v in vars(module).items() if k.endswith('Config') and v.__module__
                    == module.__name__)
        given = {f.name: f.default for f in dataclasses.fields(kind)} | job.settings
        assert not drawn & {v for v in given.values() if isinstance(v, str)}, job.out


def test_a_population_is_named_by_its_file(base):
    "The annotators of a world's files are its module's; who labels and who judges differ."
    pairs = load_records(str(base/'annotators'), 'preferences', 'preference')
    read = {who: load_annotators(str(base/'world'/f'{who}.json'), AnnotatorsConfig())
            for who in ('crowd', 'held_out_crowd', 'pool')}
    for who, group in read.items():
        assert group(pairs) == pytest.approx(getattr(world, who)(pairs)), who
    assert flip_share(-1, str(base/'world'/'pool.json')) == .25
    assert flip_share(-1, str(base/'annotators'/'preferences.json')) == 0
    assert not {a.weights for a in read['crowd'].annotators} & {
        a.weights for a in read['held_out_crowd'].annotators}


def test_all_rows_answer_at_temperature_1():
    jobs = {name: j.settings for name, j in named(FarmConfig()).items()}
    other = {n for n,
             s in jobs.items() if {s.get('temperature', 1.), s.get('eval_temperature', 1.)} != {
                 1.}}
    assert other == {'sft_greedy'} and jobs['best_of_n']['samples'] == 'runs/eval_samples'


def test_groups_of_methods_over_replicates():
    "Differences, groups and the replicates that two points need, by hand."
    rng = np.random.default_rng(0)
    level, names = np.array([1.62, 1.615, 1.55, 1.5, 1.2]), ['a', 'b', 'c', 'sft', 'base model']
    five = level + .006*rng.normal(size=(5, 1, 5)) + .1*rng.normal(size=(5, 400, 5))
    found = method_differences(five, names).set_index(['better', 'worse'])
    each = 100*(five[..., 0] - five[..., 2]).mean(1)
    row = found.loc['a', 'c']
    assert (row.difference,
            row.sd) == pytest.approx((each.mean(), each.std(ddof=1)))
    assert row.clear and len(found) == 10
    assert row.high - row.difference >= 2.77*row.sd/5**.5
    assert [sorted(g) for g in method_groups(found.reset_index())] == [['a', 'b'], ['c'], ['sft'],
                                                                       ['base model']]
    summary = separation(found.reset_index())
    assert summary['groups'] == 4
    assert summary['spread_of_differences'] == pytest.approx((found.sd**2).mean()**.5)
    needed = summary['replicates_for_2_points']
    student = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
    def half(R): return student[R]*summary['spread_of_differences']/R**.5
    assert half(needed) <= 2 < half(needed - 1)
    assert separation(method_differences(five[:1], names))['replicates_for_2_points'] is None
    table = {c: 1.5 + rng.normal(size=(1, 40, 5)) for c in COLUMNS} | dict(
        names=['base model', 'sft', 'a', 'b', 'c'])
    apart = table | {c: table[c] - 50*(np.arange(5) == 0) for c in COLUMNS}
    assert correlations(apart, 0) == correlations(table, 0)


def test_the_parts_of_the_utility_add_up():
    "The sum of the parts is the difference in utility; of several replicates, their mean."
    pairs = embedded_pairs(30)
    ask = [dict(instruction=p['instruction'], input=p['input']) for p in pairs]
    sft = [dict(r, output=[p['output_1'], 'Sure,']) for r, p in zip(ask, pairs)]
    mine = [dict(r, output=p['output_2']) for r, p in zip(ask, pairs)][::-1]
    table = parts_table([dict(sft=sft, mine=mine)]).set_index('part').difference
    def u(texts):
        return np.array(criteria.utility([dict(r, output=t) for r, t in zip(ask, texts)]))
    one, other = ([p[f'output_{k}'] for p in pairs] for k in (1, 2))
    want = (u(other) - (u(one) + u(['Sure,']*30))/2).mean()
    assert table['utility'] == pytest.approx(want)
    assert table.drop('utility').sum() == pytest.approx(want)
    two = parts_table([dict(sft=sft, mine=mine, lost=mine),
                       dict(sft=sft, mine=[dict(r, output='Sure,') for r in ask])])
    assert set(two.method) == {'mine'} and (two.low <= two.difference).all()
    samples = [dict(r, output=[a, b, 'Sure, thank you.'], ended=[True]*3) for r, a,
               b in zip(ask, one, other)]
    chosen = chosen_answers(samples)
    assert [r['output'] for r in chosen['longest of 3']] == [
        max(s['output'], key=lambda o: len(o.split())) for s in samples]
    best = np.max([u([s['output'][k] for s in samples]) for k in range(3)], 0)
    assert criteria.utility(chosen['best of 3 by the utility']) == best.tolist()


def test_agreement_is_one_vote_against_three(tmp_path):
    "One vote against the majority of three others, by counting; two votes are the same less often."
    pairs = embedded_pairs(500)
    (tmp_path/'annotators').mkdir()
    rows = [{k: v for k, v in p.items() if k != 'votes'} | dict(preference=1) for p in pairs]
    (tmp_path/'annotators'/'preferences.json').write_text(json.dumps(rows))
    found = vote_agreements(str(tmp_path), dict(crowd=world.crowd, pool=world.pool), seed=3)
    crowd, pool = (sample_votes(preference_probabilities(j, pairs), pairs, 4, s)
                   for j, s in ((world.crowd, 3), (world.pool, 3 + 10**6)))
    def majority(v, others):
        return np.mean([a == np.median(np.delete(o, k)) for column, o in zip(v.T, others.T)
                        for k in range(4) for a in ([column[k]] if v is others else column)])
    assert found['crowd_agreement'] == pytest.approx(majority(crowd, crowd))
    assert found['pool_agreement'] == pytest.approx(majority(pool, crowd))
    two = np.mean([a == b for column in crowd.T for a, b in combinations(column, 2)])
    assert found['crowd_two_votes'] == pytest.approx(two, abs=.04)
    assert found['crowd_agreement'] > found['crowd_two_votes'] + .015


def test_spread_over_replicates():
    rng = np.random.default_rng(0)
    three = {c: 1.5 + .1*rng.normal(size=(3, 40, 3)) for c in COLUMNS} | dict(
        names=['sft', 'a', 'b'])
    one = three | {c: three[c][:1] for c in COLUMNS}
    row = simulation_table(three, 0).set_index('method').loc['b']
    means = 100*(three['crowd'][..., 2].mean(1) - 1)
    assert row.crowd == pytest.approx(means.mean())
    assert row.crowd_sd == pytest.approx(means.std(ddof=1)) and row.replicates == 3
    alone = simulation_table(one, 0).set_index('method').loc['b']
    assert 'crowd_sd' not in alone and alone.replicates == 1
    # Student's t with two degrees of freedom
    assert row.crowd_high - row.crowd >= 4.3*row.crowd_sd/3**.5
    r = correlations(three, 0)
    assert r['spearman_simulated_crowd_2'] == pytest.approx(
        float(spearman(*(three[c][2].mean(0) for c in COLUMNS[:2]))))
    assert r['spearman_simulated_crowd'] == pytest.approx(
        np.mean([r[f'spearman_simulated_crowd_{k}'] for k in range(3)]))
    assert not any(k[-1].isdigit() for k in correlations(one, 0))


@pytest.fixture
def two_jobs(base, tmp_path):
    "Two runs of some seconds in a script that starts both: (their folders, its command)."
    folders = [str(tmp_path/name) for name in ('one', 'two')]
    given = {f: tiny.settings('sft', base, epochs=12, checkpoint_every=5, val_split='',
                              eval_split='') for f in folders}
    script = ('from alpaca_farm.core.run.jobs import Job, run_jobs\n'
              f'print(run_jobs([Job(f, "sft", given) for f, given in {given!r}.items()], 2))')
    return folders, [sys.executable, '-c', script]


def test_the_farm_runs_where_its_address_says(monkeypatch, tmp_path):
    places, asked = [], []
    monkeypatch.setattr(farm, 'machines', lambda *where: places.append(where) or 'a cluster')
    monkeypatch.setattr(farm, 'run_jobs',
                        lambda jobs, name, place: asked.append(place) or ['made: nothing'])
    cfg = FarmConfig(address='ray://head:10001', workers=3, runs=str(tmp_path/'runs'))
    with pytest.raises(RuntimeError, match='made: nothing'): farm.run(cfg)
    assert places == [('ray://head:10001', 3)] and asked == ['a cluster']


def gone(processes, seconds):
    "Whether all have ended within some seconds; where nobody collects an orphan it remains as a zombie."
    running = lambda p: p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    until = time.time() + seconds
    while (left := [p for p in processes if running(p)]) and time.time() < until: time.sleep(.05)
    return not left


def test_jobs_end_with_their_parent_and_a_restart_goes_on(two_jobs):
    "kill -9 of the process that starts the jobs, in the middle: none of them outlives it, and the restart at once ends well."
    folders, command = two_jobs
    parent = tiny.spawn(command)
    until = time.time() + 150
    while not all(len(read_log(f)) > 5 for f in folders):
        assert time.time() < until and parent.poll() is None; time.sleep(.1)
    started = psutil.Process(parent.pid).children(recursive=True)
    forks = [p for p in started if p.ppid() != parent.pid]
    assert len(forks) == 2, 'the server is a child of the parent, the jobs are its children'
    parent.kill()
    again = tiny.spawn(command)
    assert gone(forks, 1) and gone(started, 30)   # the server ends when nobody needs it
    assert again.communicate()[0].strip().split('\n')[-1] == '[]'
    for f in folders:
        assert read_summary(f) and [r['step'] for r in read_log(f)] == list(range(1, 61))


def test_a_restart_waits_for_what_still_writes(tmp_path, capsys, monkeypatch):
    "A line says so; after some seconds it is an error."
    holder = 'import sys; from alpaca_farm.core.run.runs import lock; from pathlib import Path; import time\nlock(Path(sys.argv[1])); print(1, flush=True); time.sleep({})'
    for seconds, patience in ((1, 20.), (30, .3)):
        other = tiny.spawn([sys.executable, '-c', holder.format(seconds), str(tmp_path/'run')])
        assert other.stdout.readline() == '1\n'
        if seconds == 1: runs.lock(tmp_path/'run', patience)
        else:
            with pytest.raises(RuntimeError, match='another process is writing'):
                runs.lock(tmp_path/'run', patience)
        assert 'waiting for it to end' in capsys.readouterr().out
        other.kill(); other.wait()
        if seconds == 1: runs.lock_of(tmp_path/'run').release()


def test_a_bar_and_a_curve_only_where_a_person_has_the_notebook_open(monkeypatch):
    "At most one update a second, small for a long run; under papermill the line alone."
    for session, kinds in (('nbs/ppo.ipynb', {'text/plain', 'text/html'}), (None, {'text/plain'})):
        monkeypatch.delenv('JPY_SESSION_NAME', raising=False)
        if session: monkeypatch.setenv('JPY_SESSION_NAME', session)
        show, updates = progress.Progress('ppo', 20_000), []
        show.handle = SimpleNamespace(update=lambda data, raw: updates.append(data))
        for step in range(1, 20_001): show(step, 'reward 0.5', .5 + step % 7)
        assert 2 <= len(updates) <= 20 and set(updates[-1]) == kinds
        assert updates[-1]['text/plain'] == 'ppo 20000/20000 reward 0.5'
        if session:
            assert '<polyline' in updates[-1]['text/html'] and 'value="20000"' in updates[-1][
                'text/html'] and len(updates[-1]['text/html']) < 8000
