"Every parameter file has settings that exist, with values of their types."
from concurrent.futures import Future

import pytest
import tiny
import yaml

from alpaca_farm.farm import farm_jobs, FarmConfig
from alpaca_farm.run.runs import methods, recipes
from tiny import config_class as config_of

RECIPES = tiny.ROOT/'nbs'/'recipes'


def fits(notebook: str, settings: dict):
    tiny.check_settings(notebook, settings)
    config = config_of(notebook)   # and within their bounds
    config(**{k: v for k, v in settings.items() if k not in config.inputs})


SETS = ('llama_7b', 'gpu_24gb', 'h200')
FILES = sorted(p for d in (*SETS, 'rlcd') for p in (RECIPES/d).rglob('*.yaml'))
NOTEBOOKS = dict(wombat='rrhf', wombat_pool='wombat', context_distillation='sft',
                 generate='best_of_n', feedme='binary_feedback',
                 reward_conditioning='binary_feedback')


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(RECIPES)))
def test_settings_exist(path):
    fits(NOTEBOOKS.get(path.stem, path.stem), yaml.safe_load(path.read_text()))


@pytest.mark.parametrize('folder', [*SETS, 'h200/1b'])
def test_every_set_has_every_method(folder):
    "A set's runs name each other: no recipe reads a run that none makes."
    found = {p.stem: read(p) for p in (RECIPES/folder).glob('*.yaml')}
    assert {NOTEBOOKS.get(n, n) for n in found} >= {
        'sft', 'reward_model', 'best_of_n', 'expert_iteration', 'ppo', 'dpo', 'quark', 'rrhf',
        'binary_feedback'}
    made = {r['out'] for r in found.values()} | {'runs/base7b'}
    for name, recipe in found.items():
        for key in ('policy', 'reward_model'):
            needed = str(recipe.get(key, ''))
            assert not needed.startswith('runs/') or needed in made, (name, key)


# AlpacaFarm's launchers and dataclasses; RRHF's launcher. What is not there is ours.
ADAM = dict(betas=[.9, .999], max_grad_norm=1., weight_decay=0., seed=42, dtype='bfloat16')
HF = dict(ADAM, adam_eps=1e-8, lr_schedule='cosine', warmup=.03, micro_batch_size=1,
          max_length=512)
ASKED = dict(eval_temperature=.7, eval_top_p=.9)   # how its methods answer
RL = dict(ADAM, **ASKED, adam_eps=1e-5, lr_schedule='linear', steps=390, rollouts=512,
          max_prompt=192, max_new_tokens=300, temperature=1., top_p=1., micro_batch_size=2,
          save_every=20, split='unlabeled', template='alpaca')
BON = dict(n=16, temperature=1., top_p=.9, max_new_tokens=300, template='alpaca')
NOISY = 'tatsu-lab/alpaca_farm:alpaca_noisy_multi_preference'
PUBLISHED = dict(
    sft=dict(HF, **ASKED, epochs=3, batch_size=128, learning_rate=2e-5, eval_every=100,
             split='sft', val_split='val', template='alpaca'),
    reward_model=dict(HF, epochs=1, batch_size=16, learning_rate=3e-6, held_out=500,
                      preferences=NOISY, template='alpaca'),
    dpo=dict(HF, **ASKED, epochs=2, batch_size=64, learning_rate=1e-6, beta=.1, held_out=500,
             eval_every=100, preferences=NOISY, template='alpaca'),
    expert_iteration=dict(HF, **BON, **ASKED, epochs=3, batch_size=128, learning_rate=2e-5,
                          split='unlabeled', rounds=1),
    best_of_n=dict(BON, split='eval'),
    ppo=dict(RL, batch_size=256, ppo_epochs=2, learning_rate=1e-5, value_learning_rate=1e-5,
             kl_coef=.0067, kl_kind='clamp', standardise=False, clip=.2,
             value_clip=.2, vf_coef=.1, gamma=1., lam=1., whiten_rewards=True, missing_eos=''),
    quark=dict(RL, learning_rate=3e-6, kl_coef=.05, entropy_coef=0., num_quantiles=4,
               best_quantile_only=True, clear_pool=True, updates=1, missing_eos=''),
    feedme=dict(HF, **ASKED, preferences=NOISY, method='feedme'),
    reward_conditioning=dict(HF, **ASKED, preferences=NOISY, method='reward_conditioning'),
    rrhf=dict(HF, epochs=3, batch_size=64, learning_rate=2e-5, rrhf_weight=1., k=6, n=4,
              decoding='beam', groups=4, diversity_penalty=1., save_every=100,
              max_new_tokens=128, max_length=320, template='raw'),
    wombat=dict(HF, epochs=3, batch_size=64, learning_rate=2e-5, rrhf_weight=1., k=5,
                save_every=100, template='alpaca'))


@pytest.mark.parametrize('name', PUBLISHED)
def test_papers_values_are_the_papers(name):
    recipe = read(RECIPES/'llama_7b'/f'{name}.yaml')
    config = config_of(NOTEBOOKS.get(name, name))()
    for setting, value in PUBLISHED[name].items():
        assert recipe.get(setting, getattr(config, setting)) == value, setting
    if 'steps' in recipe:
        assert round(recipe['warmup']*recipe['steps']) == 5


def test_the_table_of_runs_and_the_farm_give_settings_that_exist():
    "A misspelt or moved setting would otherwise show after hours, when its run starts."
    for job in farm_jobs(FarmConfig()):
        fits(job.notebook, job.settings)
    for name, row in recipes().items():
        fits(row['notebook'], row['settings'] | row['reads'])
        assert set(row['reads'].values()) <= set(recipes()), name
    # a notebook of a method's name has the method's settings as defaults, but for what it measures
    for name, row in methods().items():
        assert row['notebook'] != name or {*row['settings']} <= {'held_out'}


def test_what_a_recipe_reads_is_built_first(tmp_path, monkeypatch):
    "The reward model of a judge needs that judge's labels, no default of its notebook."
    from alpaca_farm.run import runs as build
    made = []
    monkeypatch.setattr(build, 'is_fresh', lambda path: str(path) in made)
    monkeypatch.setattr(build, 'at_root', lambda path: tmp_path/path)

    def start(notebook, out, settings):
        future = Future()
        future.set_result(None)
        made.append(out)
        (tmp_path/f'{out}.txt').write_text('')
        return future
    monkeypatch.setattr(build, 'start_notebook', start)
    (tmp_path/'runs').mkdir()
    notebook, settings = build.recipe('runs/rloo_free_judge')
    build.build(notebook, 'runs/rloo_free_judge', **settings)
    assert made[0] == 'runs/world'   # which has the judge's file
    assert made[1:] == ['runs/annotators_judge', 'runs/reward_model_judge', 'runs/rloo_free_judge']


def test_a_farm_of_a_few_methods_makes_what_they_read():
    "Named as papermill's -p gives them; the rest is not made."
    jobs = {job.out.removeprefix('runs/') for job in farm_jobs(FarmConfig(methods='[ppo, dpo]'))}
    assert {'ppo', 'ppo_crowd', 'dpo', 'reward_model', 'references'} <= jobs
    assert not jobs & {'quark', 'rrhf_crowd', 'best_of_n'}


def read(path): return yaml.safe_load(path.read_text())
