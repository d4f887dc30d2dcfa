"""What the notebooks propose under "Try it" works: every command, made small, in the tiny world."""
import importlib
import json
import re
import shlex

import pytest
import yaml

import tiny
from alpaca_farm.core.run.paths import module_of
from alpaca_farm.core.run.runs import read_summary

METHODS = ('sft', 'reward_model', 'best_of_n', 'expert_iteration', 'ppo', 'dpo', 'quark', 'rrhf',
           'binary_feedback', 'rlcd')
SMALL = dict(steps=2, n=3, k=3, epochs=1, rounds=2, max_instances=32, ppo_epochs=3)


def proposed(name):
    "The commands in the last section of a method's notebook, as settings."
    cells = json.loads((tiny.ROOT/f'nbs/{name}.ipynb').read_text())['cells']
    text = next(t for t in (''.join(c['source']) for c in cells) if t.startswith('## Try it'))
    for command in re.findall(r'^    (papermill .*)$', text, re.M):
        words = shlex.split(command)
        assert words[1] == f'nbs/{name}.ipynb' and set(words[3::3]) == {'-p'}
        given = {k: yaml.safe_load(v) for k, v in zip(words[4::3], words[5::3])}
        assert words[2] == f'{given.pop("out")}.ipynb'
        yield given


@pytest.mark.parametrize('name, given', [(n, given) for n in METHODS for given in proposed(n)])
def test_proposed_runs_are_made(base, tmp_path, name, given):
    small = {k: min(v, SMALL[k]) if k in SMALL else v for k, v in given.items()}
    runs = dict(samples='samples', candidates='samples')   # of the farm, and of the tiny world
    small |= {k: str(base/runs.get(k, k)) for k, v in small.items() if str(v).startswith('runs/')}
    if name == 'best_of_n': small |= dict(n=2, split='preference')
    module = importlib.import_module(module_of(name))
    if 'samples' in small and name == 'rlcd':   # those of a run of its own
        small['samples'] = str(tmp_path/'samples')
        tiny.main(module)(tiny.config(module, **tiny.settings(name, base, out=small['samples'])))
    given = tiny.settings(name, base, out=str(tmp_path/name)) | small
    assert read_summary(tiny.main(module)(tiny.config(module, **given)).folder)


def test_every_method_proposes_two_or_three():
    assert {len(list(proposed(name))) for name in METHODS} <= {2, 3}
