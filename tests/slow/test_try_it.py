"""What the notebooks propose under "Try it" works: every command, small, in the tiny world."""
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

import tiny
from alpaca_farm.run.runs import read_summary

METHODS = ('sft', 'reward_model', 'best_of_n', 'expert_iteration', 'ppo', 'dpo', 'quark', 'rrhf',
           'binary_feedback', 'rlcd', 'wombat')
SMALL = dict(steps=2, n=3, k=3, epochs=1, rounds=2, max_instances=32, ppo_epochs=3)
STANDS_FOR = dict(eval_samples='samples', reward_model_crowd='reward_model', ppo='world')


def proposed(name):
    "The commands in the last section of a method's notebook, as notebooks and settings."
    cells = json.loads((tiny.ROOT/f'nbs/{name}.ipynb').read_text())['cells']
    text = next(t for t in (''.join(c['source']) for c in cells) if t.startswith('## Try it'))
    for command in re.findall(r'^ *(papermill .*)$', text.replace('\\\n', ' '), re.M):
        words = shlex.split(command)
        given = {k: yaml.safe_load(v) if v and isinstance(v, str) else v
                 for k, v in tiny.given(words).items()}
        if 'out' not in given:
            continue   # the command that compares them
        assert words[2] == f'{given["out"]}.ipynb'
        yield Path(words[1]).stem, given


@pytest.mark.parametrize('name', METHODS)
def test_proposed_runs_are_made(base, tmp_path, name):
    def place(v):   # a run of an earlier command, or one of the tiny world
        if isinstance(v, list):
            return [place(x) for x in v]
        if not str(v).startswith('runs/'):
            return v
        made = tmp_path/Path(v).name
        return str(made if made.exists() else base/STANDS_FOR.get(made.name, made.name))

    commands = list(proposed(name))
    assert len(commands) > 1
    for notebook, given in commands:
        out = str(tmp_path/Path(given.pop('out')).name)
        given = {k: min(v, SMALL[k]) if k in SMALL else place(v) for k, v in given.items()}
        if 'samples' in given and notebook == 'best_of_n':
            given |= dict(n=2, split='preference')
        if notebook in tiny.SETTINGS:
            given = tiny.settings(notebook, base, **given)
        assert read_summary(tiny.main(notebook)(tiny.config(notebook, out=out, **given)).folder)
