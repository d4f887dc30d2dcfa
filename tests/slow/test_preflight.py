"What would fail after the training fails before it: nothing is trained, logged or lost."
import json
import shutil

import pytest

import tiny
from alpaca_farm import ppo, sft
from alpaca_farm.core.model import generation
from alpaca_farm.core import training
from alpaca_farm.core.model.models import load_policy, load_scalar
from alpaca_farm.core.model.rewards import reward
from alpaca_farm.world import LENGTH

METHODS = 'sft', 'dpo', 'binary_feedback', 'rrhf', 'ppo', 'quark'
WORLD = 'alpaca_farm.world:pool'
REAL = [dict(instruction=f'What is the capital of country {i}?',
             output=f'Its capital is city {i}.') for i in range(20)]


@pytest.fixture
def refused(base, tmp_path, monkeypatch):
    "A check that a run ends with a message before its first step."
    def step(*_, **__): raise AssertionError('a step was made')
    monkeypatch.setattr(training.Trainer, 'update', step)
    def holds(name, message, error=ValueError, **given):
        with pytest.raises(error, match=message): tiny.run(name, base, tmp_path/'out', **given)
        assert not (tmp_path/'out').exists()
    return holds


@pytest.mark.parametrize('name, split', [
    *((name, 'eval') for name in (*METHODS, 'expert_iteration')),
    *((name, 'val') for name in ('sft', 'ppo', 'binary_feedback'))])
def test_a_missing_split_is_named_first(base, refused, tmp_path, name, split):
    left_out = shutil.ignore_patterns(f'{split}.json', 'model')
    shutil.copytree(base/'world', tmp_path/'data', ignore=left_out)
    more = dict(annotators=WORLD) if (name, split) == ('ppo', 'val') else {}
    refused(name, rf"{split}_split = '{split}': .*no {split}\.json", FileNotFoundError,
            data=str(tmp_path/'data'), **more)


@pytest.mark.parametrize('name', ['ppo', 'quark', 'binary_feedback'])
def test_the_worlds_judge_refuses_other_data_first(refused, tmp_path, name):
    more = dict(reward_model=f'{__name__}:length', annotators=WORLD)
    if name == 'binary_feedback': del more['reward_model']
    refused(name, f"annotators = '{WORLD}' .*not a request of the embedded world",
            data=tiny.splits(tmp_path/'data', REAL), **more)


def length(records): return [float(len(r['output'])) for r in records]
def broken(records): return [r['price'] for r in records]
def silent(pairs): return [float('nan')]*len(pairs)


@pytest.mark.parametrize('name', ['ppo', 'quark', 'rrhf', 'best_of_n'])
def test_a_reward_that_fails_is_named_first(refused, name):
    spec = f'{__name__}:broken'
    refused(name, rf"reward_model = '{spec}' failed .*KeyError: 'price'", reward_model=spec)


def test_a_judge_without_verdicts_is_named_first(refused):
    spec = f'{__name__}:silent'
    refused('ppo', f"annotators = '{spec}' failed", annotators=spec)


def test_a_model_that_cannot_write_is_named_first(refused, monkeypatch):
    def cannot(*_): raise ValueError('Model takes no past_key_values')
    monkeypatch.setattr(generation, 'check_sampling', cannot)
    refused('sft', 'past_key_values')


@pytest.mark.parametrize('name', [*METHODS, 'reward_model'])
def test_lengths_beyond_the_models_positions_are_named_first(refused, name):
    if name != 'reward_model':
        refused(name, rf'max_new_tokens: {110 + LENGTH} tokens, but .* at most {LENGTH}',
                max_new_tokens=LENGTH)
    if name not in ('ppo', 'quark'):
        refused(name, f'max_length: {LENGTH + 1} tokens', max_length=LENGTH + 1)


def test_what_is_too_long_or_too_few_is_an_error_with_a_limit_that_works(refused, tmp_path):
    refused('reward_model', 'held_out = 500 leaves too few of 60', held_out=500)
    refused('dpo', r'of 60 examples are .*max_length = 30 .*Set max_length to \d+', max_length=30)
    refused('ppo', 'prompts are .*max_prompt = 5 tokens.* Set max_prompt to', max_prompt=5)
    long = tiny.splits(tmp_path/'data', [dict(r, output=r['output']*20) for r in REAL])
    refused('sft', 'examples are longer than max_length = 128 .*Set max_length to', data=long,
            max_prompt=70)


def test_a_policy_is_no_reward_model(base, refused):
    "Its head would be random."
    cfg = sft.SFTConfig(device='cpu')
    for load in (lambda: load_scalar(str(base/'sft'), cfg), lambda: reward(str(base/'sft'), cfg)):
        with pytest.raises(ValueError, match=f"{base}/sft holds a policy"): load()
    with pytest.raises(ValueError, match='a reward model, not a policy'):
        load_policy(str(base/'reward_model'), cfg)
    refused('ppo', 'not a reward model', reward_model=str(base/'sft'))


def test_another_vocabularys_value_model_starts_from_the_policy(base, models, tmp_path, capsys):
    shutil.copytree(base/'reward_model'/'model', tmp_path/'other')
    text = json.loads((tmp_path/'other'/'tokenizer.json').read_text())
    vocab = text['model']['vocab']
    a, b = [t for t, i in vocab.items() if i in (300, 301)]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path/'other'/'tokenizer.json').write_text(json.dumps(text))
    given = tiny.settings('ppo', base, reward_model=str(tmp_path/'other'))
    value = ppo.value_model(ppo.PPOConfig(**given), models.policy)
    assert 'another vocabulary than the policy' in capsys.readouterr().out
    assert not value.score.weight.any()
    value = ppo.value_model(ppo.PPOConfig(**tiny.settings('ppo', base)), models.policy)
    assert not capsys.readouterr().out and value.score.weight.any()
