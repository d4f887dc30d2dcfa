"""One tiny world and the runs that stand on it, made once for all the tests of a session."""
import contextlib
import os
from types import SimpleNamespace

os.environ.update(OMP_NUM_THREADS='1', TOKENIZERS_PARALLELISM='false', HF_HUB_OFFLINE='1')
os.environ.pop('VIRTUAL_ENV', None)   # IPython warns of one that is active but not its own

import hypothesis
import pytest

import tiny

# the same examples each time, however busy the machine is
hypothesis.settings.register_profile('tests', deadline=None, derandomize=True,
                                     suppress_health_check=list(hypothesis.HealthCheck))
hypothesis.settings.load_profile('tests')

CHAIN = (('world', 'world', {}), ('sft', 'sft', {}),
         ('samples', 'best_of_n', dict(split='preference', reward_model='', max_instances=0)),
         ('annotators', 'annotators', {}), ('reward_model', 'reward_model', {}))


@pytest.fixture(scope='session', autouse=True)
def no_runs(tmp_path_factory):
    "The tests work in a folder with the notebooks of this checkout and without its runs."
    root = tmp_path_factory.mktemp('project')
    (root/'nbs').symlink_to(tiny.ROOT/'nbs')
    (root/'runs').mkdir()
    with contextlib.chdir(root):
        yield


@pytest.fixture(scope='session')
def base(tmp_path_factory):
    "Folder of the runs world, sft, samples, annotators and reward_model."
    folder = tmp_path_factory.mktemp('runs')
    for name, notebook, more in CHAIN:
        tiny.run(notebook, folder, folder/name, **more)
    return folder


@pytest.fixture(scope='session')
def models(base):
    "The tiny policy, a reward model, their tokenizer, prompts and sampled answers as token ids."
    from alpaca_farm.data.records import load_records
    from alpaca_farm.model.generation import generate
    from alpaca_farm.model.logprobs import load_policy, load_scalar
    from alpaca_farm.data.text import encode_prompts
    from alpaca_farm.sft import SFTConfig
    cfg = SFTConfig(**tiny.settings('sft', base))
    policy = load_policy(cfg.policy, cfg)
    tokenizer = policy.tokenizer
    scalar = load_scalar(str(base/'reward_model'), cfg)
    prompts = encode_prompts(load_records(str(base/'world'), 'eval', n=16), tokenizer)
    answers = [s.tokens for s, in generate(policy, prompts, max_new_tokens=20)]
    return SimpleNamespace(policy=policy, scalar=scalar, tokenizer=tokenizer, prompts=prompts,
                           answers=answers, cfg=cfg)
