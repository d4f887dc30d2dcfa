"""Settings so small that a run takes a second or two; used by the tests; every path is given."""
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINERS = ('world', 'sft', 'best_of_n', 'reward_model', 'ppo', 'dpo', 'rrhf', 'quark', 'binary_feedback')  # modules whose runs can be interrupted
SAMPLING = dict(max_new_tokens=12, max_prompt=110, eval_instances=10)
SETTINGS = dict(
    world=dict(prose=400, sft=60, preference=60, unlabeled=60, val=20, eval=30, vocab_size=600, hidden_size=32, layers=1,
               heads=2, ffn=48, batch_size=16, learning_rate=3e-3),
    sft=dict(batch_size=12, learning_rate=1e-3, max_length=128, **SAMPLING),
    best_of_n=dict(n=2, max_instances=30, chunk=10, **{k: v for k, v in SAMPLING.items() if k != 'eval_instances'}),
    annotators=dict(label_flip=.25),
    reward_model=dict(batch_size=8, held_out=12, epochs=1, learning_rate=1e-3, max_length=128),
    dpo=dict(batch_size=8, epochs=1, beta=.1, learning_rate=1e-3, max_length=128, **SAMPLING),
    expert_iteration=dict(n=2, max_instances=16, epochs=1, batch_size=8, learning_rate=1e-3, max_length=128, val_instances=8, **SAMPLING),
    binary_feedback=dict(batch_size=8, learning_rate=1e-3, max_length=128, token_times=2, held_out=12, eval_every=4, val_instances=8, **SAMPLING),
    rrhf=dict(k=4, batch_size=8, epochs=1, learning_rate=1e-3, max_length=128, save_every=0, **SAMPLING),
    quark=dict(steps=3, rollouts=16, batch_size=8, updates=3, token_times=2, missing_eos='', learning_rate=1e-3, val_instances=8, eval_every=2, save_every=2,
               checkpoint_every=1, **SAMPLING),
    ppo=dict(steps=3, rollouts=16, batch_size=8, ppo_epochs=2, learning_rate=1e-3, value_learning_rate=1e-3, val_instances=8,
             eval_every=2, save_every=2, checkpoint_every=1, **SAMPLING))


def settings(notebook, base, **more):
    "Tiny settings of a notebook whose inputs are the runs in the folder `base`."
    runs = {k: str(base/k) for k in ('world', 'sft', 'samples', 'annotators', 'reward_model')}
    inputs = dict(
        world={}, sft=dict(data=runs['world'], policy=runs['world']),
        best_of_n=dict(data=runs['world'], policy=runs['sft'], reward_model=runs['reward_model']),
        annotators=dict(outputs=runs['samples']), reward_model=dict(preferences=runs['annotators'], policy=runs['sft']),
        dpo=dict(preferences=runs['annotators'], policy=runs['sft'], data=runs['world']),
        expert_iteration=dict(policy=runs['sft'], reward_model=runs['reward_model'], data=runs['world']),
        binary_feedback=dict(preferences=runs['annotators'], policy=runs['sft'], data=runs['world']),
        rrhf=dict(candidates=[runs['samples'], runs['world'] + '/preference.json'], policy=runs['sft'], data=runs['world'], reward_model=runs['reward_model'],
                  perplexity_model=runs['world']),
        quark=dict(policy=runs['sft'], reward_model=runs['reward_model'], data=runs['world']),
        ppo=dict(policy=runs['sft'], reward_model=runs['reward_model'], data=runs['world']))
    return SETTINGS[notebook] | inputs[notebook] | more


def config(module, **given):
    "The configuration of a notebook's module."
    return next(v for k, v in vars(module).items() if k.endswith('Config') and v.__module__ == module.__name__)(**given)


def main(module):
    "The function of a module that makes its run: `train`, or `run` where nothing is trained."
    return getattr(module, 'run', None) or module.train


def run_here(jobs, *_):
    "`run_jobs` in this process."
    for job in jobs:
        module = importlib.import_module(f'alpaca_farm.{job.notebook}')
        main(module)(config(module, out=job.out, **job.settings))
    return []


def command(notebook, **given):
    "The command line of a run."
    options = [x for k, v in given.items() for x in (f'--{k}', json.dumps(v) if isinstance(v, list) else str(v))]
    return [sys.executable, '-m', f'alpaca_farm.{notebook}', *options]


def papermill(notebook, executed, **given):
    "The command line of a papermill run."
    options = [x for k, v in given.items()
            for x in (('-y', f'{k}: {json.dumps(v)}') if isinstance(v, list) else ('-p', k, str(v)))]
    return [sys.executable, '-m', 'papermill', str(notebook), str(executed), *options, '--no-progress-bar', '--log-level',
            'ERROR', '-k', 'python3']


def environment(**more):
    return dict(os.environ, OMP_NUM_THREADS='1', TOKENIZERS_PARALLELISM='false', HF_HUB_OFFLINE='1',
                PYDEVD_DISABLE_FILE_VALIDATION='1', **more)


def spawn(command, cwd=ROOT, **more):
    return subprocess.Popen(command, cwd=cwd, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)
