"Every parameter file has settings that exist, with values of their types."
import importlib
import typing
from pathlib import Path

import pytest
import yaml

from alpaca_farm.core.build import methods
from alpaca_farm.core.settings import Config, as_type

RECIPES = Path(__file__).parents[1]/'nbs'/'recipes'


def config_of(notebook: str):
    module = importlib.import_module(f'alpaca_farm.{notebook}')
    return next(v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Config) and v.__module__ == module.__name__)


def fits(notebook: str, settings: dict):
    kinds = typing.get_type_hints(config_of(notebook))
    for name, value in settings.items():
        assert name in kinds, f'{notebook} has no setting {name}'
        as_type(name, value, kinds[name])


@pytest.mark.parametrize('path', sorted([*RECIPES.glob('llama_7b/*.yaml'), *RECIPES.glob('rlcd/*.yaml')]), ids=lambda p: f'{p.parent.name}/{p.stem}')
def test_paper_settings(path):
    notebook = dict(wombat='rrhf', wombat_pool='wombat', context_distillation='sft', generate='best_of_n')
    fits(notebook.get(path.stem, path.stem), yaml.safe_load(path.read_text()))


def test_named_runs():
    for name, settings in yaml.safe_load((RECIPES/'runs.yaml').read_text()).items():
        fits(settings.pop('notebook'), settings)
        assert not (RECIPES.parent/f'{name}.ipynb').exists()


def test_methods():
    for name, row in methods().items():
        fits(row['notebook'], row['settings'] | row['reads'] | {row['learns_from']: ''} | (dict(annotators='') if row['annotators'] else {}))


def test_the_papers_methods_are_answered_alike():
    "Wherever AlpacaFarm's settings answer an evaluation split; best-of-n's answers are its samples."
    papers = {p.stem: yaml.safe_load(p.read_text()) for p in RECIPES.glob('llama_7b/*.yaml') if p.stem not in ('rrhf', 'wombat', 'wombat_pool')}
    answering = {n: (s.get('eval_temperature'), s.get('eval_top_p')) for n, s in papers.items() if n not in ('best_of_n', 'reward_model')}
    assert len(answering) == 6 and set(answering.values()) == {(.7, .9)}
    defaults = {(c.eval_temperature, c.eval_top_p) for c in map(config_of, papers) if hasattr(c, 'eval_temperature')}
    assert defaults == {(1., 1.)}


def test_papers_values_are_the_papers():
    ppo = yaml.safe_load((RECIPES/'llama_7b'/'ppo.yaml').read_text())
    assert (ppo['rollouts'], ppo['batch_size'], ppo['ppo_epochs'], ppo['kl_coef'], ppo['learning_rate']) == (512, 256, 2, .0067, 1e-5)
