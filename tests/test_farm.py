"""The farm: its table of runs, what it refuses, and its arithmetic over replicates."""
import numpy as np
import pytest

from alpaca_farm.core.build import methods, recipe
from alpaca_farm.core.stats import spearman
from alpaca_farm.farm import annotator_settings, correlations, farm_jobs, FarmConfig, simulation_table


@pytest.mark.parametrize('given, message', [
    (dict(size='huge'), 'choose from'), (dict(size='no/such/file.yaml'), 'no/such/file.yaml'), (dict(seeds=0), 'at least 1'), (dict(workers=-1), 'at least 0'),
    (dict(people='alpaca_farm.world:nobody'), 'nobody'), (dict(pool='no_such_module:pool'), 'no_such_module'), (dict(gold='gold'), 'gold')])
def test_nonsense_is_refused_before_any_run(given, message):
    with pytest.raises((ValueError, OSError), match=message): FarmConfig(**given)


def test_a_file_of_sizes(tmp_path):
    file = tmp_path/'mine.yaml'
    file.write_text('ppo: {steps: 4}\nrloo: {steps: 5}\ncandidates: {n: 3}')
    jobs = {j.out: j.settings for j in farm_jobs(FarmConfig(size=str(file)))}
    default = {j.out: j.settings for j in farm_jobs(FarmConfig())}
    assert jobs['runs/ppo_people'] == default['runs/ppo_people'] | dict(steps=4)    # every run of the notebook
    assert jobs['runs/rloo']['steps'] == 5 and jobs['runs/candidates']['n'] == 3    # one run, before its notebook
    assert jobs['runs/dpo'] == default['runs/dpo']
    file.write_text('{"expert_iteratoin": {"n": 2}}')
    with pytest.raises(ValueError, match="mine.yaml: 'expert_iteratoin' is not a notebook.* 'expert_iteration'"):
        FarmConfig(size=str(file))


def test_annotators_follow_the_labels():
    jobs = {j.out: j.settings for j in farm_jobs(FarmConfig(pool='alpaca_farm.world:judge', people='alpaca_farm.world:gold', device='cpu'))}
    choosing = [name for name, row in methods().items() if row['annotators']]
    assert {'ppo', 'rloo', 'quark', 'feedme', 'reward_conditioning'} <= set(choosing)
    for run in ('annotators', *choosing, 'ppo_free'):
        assert jobs[f'runs/{run}']['annotators'] == 'alpaca_farm.world:judge', run
        if run != 'ppo_free': assert jobs[f'runs/{run}_people']['annotators'] == 'alpaca_farm.world:gold', run
    assert {s['device'] for s in jobs.values()} == {'cpu'}
    assert all(annotator_settings(run, FarmConfig()) == {} for run in ('dpo', 'dpo_people', 'dpo_low', 'base', 'ppo_judge_free', 'annotators_judge'))


def test_a_method_is_a_row_of_the_table():
    jobs = {j.out: j for j in farm_jobs(FarmConfig())}
    for method, row in methods().items():
        for suffix in ('', '_people'):
            job, labels = jobs[f'runs/{method}{suffix}'], dict(reward_model='reward_model', preferences='annotators')[row['learns_from']]
            reads = row['reads'] | dict(data='world', policy='sft') | {row['learns_from']: labels + suffix}
            assert job.notebook == row['notebook'] == recipe(method)[0] and job.cost == row['cost']
            assert {k: job.settings[k] for k in reads} == {k: f'runs/{v}' for k, v in reads.items()}
            assert job.settings.items() >= row['settings'].items()
        measured = jobs['runs/overoptimization'].settings['policies']
        assert (f'runs/{method}' in measured) == row['checkpoints']


def test_every_replicate_is_a_farm_of_its_own():
    first, second = (farm_jobs(FarmConfig(seeds=2), k) for k in (0, 1))
    made = {j.out for j in second}
    assert all(j.out.startswith('runs/seed_1/') and set(j.needs) <= made for j in second)
    study = {'overoptimization', 'bank', 'ppo_free', 'ppo_judge_free', 'dpo_low', 'annotators_judge', 'reward_model_judge'}
    assert {j.out.split('/')[-1] for j in first} - {j.out.split('/')[-1] for j in second} == study
    seeds = [{j.out.split('/')[-1]: j.settings['seed'] for j in jobs} for jobs in (first, second)]
    assert all(seeds[1][n] == seeds[0][n] + 1 for n in seeds[1])


def test_spread_over_replicates():
    rng = np.random.default_rng(0)
    columns = ('simulated', 'human', 'transfer')
    each = [dict(names=['sft', 'a', 'b'], **{c: 1.5 + .1*rng.normal(size=(40, 3)) for c in columns}) for _ in range(3)]
    row = simulation_table(each, 0).set_index('method').loc['b']
    means = [100*(t['human'][:, 2].mean() - 1) for t in each]
    assert row.human == pytest.approx(np.mean(means)) and row.human_sd == pytest.approx(np.std(means, ddof=1)) and row.replicates == 3
    alone = simulation_table(each[:1], 0).set_index('method').loc['b']
    assert 'human_sd' not in alone and alone.replicates == 1
    assert row.human_high - row.human >= 4.3*row.human_sd/3**.5                     # Student's t with two degrees of freedom, and what the instructions add
    r = correlations(each, 0)
    assert r['spearman_simulated_human_2'] == pytest.approx(float(spearman(each[2]['simulated'].mean(0), each[2]['human'].mean(0))))
    assert r['spearman_simulated_human'] == pytest.approx(np.mean([r[f'spearman_simulated_human_{k}'] for k in range(3)]))
    assert not any(k[-1].isdigit() for k in correlations(each[:1], 0))
