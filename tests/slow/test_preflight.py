"What would fail after the training fails before it: nothing is trained, logged or lost."
import importlib
import json
import shutil

import pytest

import tiny
from alpaca_farm import binary_feedback, dpo, ppo, quark, rrhf, sft
from alpaca_farm.core.model import generation
from alpaca_farm.core import training
from alpaca_farm.core.model.models import load_policy, load_scalar
from alpaca_farm.core.model.rewards import reward
from alpaca_farm.world import LENGTH
from alpaca_farm.core.run.paths import module_of

ONLINE = dict(ppo=ppo, quark=quark)
ALL = dict(sft=sft, dpo=dpo, binary_feedback=binary_feedback, rrhf=rrhf, **ONLINE)
WORLD = 'alpaca_farm.world:pool'
REAL = [dict(instruction=f'What is the capital of country {i}?',
             output=f'Its capital is city {i}.') for i in range(20)]


def refused(module, base, tmp_path, monkeypatch, error, message, **given):
    "The run ends with this message before its first step."
    def step(*_, **__): raise AssertionError('a step was made')
    monkeypatch.setattr(training.Trainer, 'update', step)
    name = module.__name__.split('.')[-1]
    given = tiny.settings(name, base, out=str(tmp_path/'out')) | given
    with pytest.raises(error, match=message): tiny.main(module)(tiny.config(module, **given))
    assert not (tmp_path/'out').exists()


def dataset(folder, rows):
    folder.mkdir()
    for split in ('sft', 'unlabeled', 'val', 'eval'):
        (folder/f'{split}.json').write_text(json.dumps(rows))


@pytest.mark.parametrize('name', [*ALL, 'expert_iteration'])
def test_a_missing_eval_split_is_named_first(base, tmp_path, monkeypatch, name):
    shutil.copytree(base/'world', tmp_path/'data',
                    ignore=shutil.ignore_patterns('eval.json', 'model'))
    refused(importlib.import_module(module_of(name)), base, tmp_path, monkeypatch,
            FileNotFoundError,
            r"eval_split = 'eval': .*no eval\.json in it; it holds .*or none with eval_split empty", data=str(tmp_path/'data'))


@pytest.mark.parametrize('name', ['sft', 'ppo', 'binary_feedback'])
def test_a_missing_val_split_is_named_first(base, tmp_path, monkeypatch, name):
    shutil.copytree(base/'world', tmp_path/'data',
                    ignore=shutil.ignore_patterns('val.json', 'model'))
    refused(ALL[name], base, tmp_path, monkeypatch, FileNotFoundError, "val_split = 'val': ",
            data=str(tmp_path/'data'),
            **dict(annotators=WORLD) if name == 'ppo' else {})


@pytest.mark.parametrize('name', ['ppo', 'quark', 'binary_feedback'])
def test_the_worlds_judge_refuses_other_data_first(base, tmp_path, monkeypatch, name):
    dataset(tmp_path/'data', REAL)
    more = {} if name == 'binary_feedback' else dict(reward_model=f'{__name__}:length',
                                                     annotators=WORLD)
    refused(ALL[name], base, tmp_path, monkeypatch, ValueError,
            "annotators = 'alpaca_farm.world:pool' .*not a request of the embedded world",
            data=str(tmp_path/'data'), **more)


def length(records): return [float(len(r['output'])) for r in records]


def broken(records): return [r['price'] for r in records]


def silent(pairs): return [float('nan')]*len(pairs)


@pytest.mark.parametrize('name', ['ppo', 'quark', 'rrhf', 'best_of_n'])
def test_a_reward_that_fails_is_named_first(base, tmp_path, monkeypatch, name):
    refused(importlib.import_module(module_of(name)), base, tmp_path, monkeypatch, ValueError,
            rf"reward_model = '{__name__}:broken' failed on a first answer \(KeyError: 'price'\)",
            reward_model=f'{__name__}:broken')


def test_a_judge_without_verdicts_is_named_first(base, tmp_path, monkeypatch):
    refused(ppo, base, tmp_path, monkeypatch, ValueError,
            f"annotators = '{__name__}:silent' failed", annotators=f'{__name__}:silent')


def test_a_model_that_cannot_write_is_named_first(base, tmp_path, monkeypatch):
    def cannot(*_): raise ValueError('Model takes no past_key_values')
    monkeypatch.setattr(generation, 'check_sampling', cannot)
    refused(sft, base, tmp_path, monkeypatch, ValueError, 'past_key_values')


@pytest.mark.parametrize('name', ALL)
def test_lengths_beyond_the_models_positions_are_named_first(base, tmp_path, monkeypatch, name):
    refused(ALL[name], base, tmp_path, monkeypatch, ValueError,
            rf'max_prompt \+ max_new_tokens: {110 + LENGTH} tokens, but .* reads at most {LENGTH}',
            max_new_tokens=LENGTH)
    if name in ONLINE: return
    refused(ALL[name], base, tmp_path, monkeypatch, ValueError,
            f'max_length: {LENGTH + 1} tokens, but .* reads at most {LENGTH}',
            max_length=LENGTH + 1)


def test_a_reward_models_lengths_are_checked_first(base, tmp_path, monkeypatch):
    from alpaca_farm import reward_model
    refused(reward_model, base, tmp_path, monkeypatch, ValueError,
            f'max_length: {LENGTH + 1} tokens', max_length=LENGTH + 1)
    refused(reward_model, base, tmp_path, monkeypatch, ValueError,
            'held_out = 500 leaves 0 of 60 pairs', held_out=500)


def test_more_than_a_fifth_too_long_is_an_error(base, tmp_path, monkeypatch):
    "It used to be left out, down to the last pair; the message has a limit that works."
    refused(dpo, base, tmp_path, monkeypatch, ValueError,
            r'of 60 examples are longer than max_length = 30 tokens\. Set max_length to \d+',
            max_length=30)
    refused(ppo, base, tmp_path, monkeypatch, ValueError,
            r'prompts are longer than max_prompt = 5 tokens\. Set max_prompt to', max_prompt=5)


def test_the_worlds_answer_limit_is_no_default_for_longer_answers(base, tmp_path, monkeypatch):
    rows = [dict(r, output=r['output']*20) for r in REAL]
    dataset(tmp_path/'data', rows)
    refused(sft, base, tmp_path, monkeypatch, ValueError,
            r'answers in the data are longer than max_new_tokens = 56 tokens\. Set max_new_tokens to',
            data=str(tmp_path/'data'), max_new_tokens=56, max_prompt=70)


def test_a_policy_is_no_reward_model(base, tmp_path, monkeypatch):
    "Its head would be random."
    cfg = sft.SFTConfig(device='cpu')
    for load in (lambda: load_scalar(str(base/'sft'), cfg), lambda: reward(str(base/'sft'), cfg)):
        with pytest.raises(ValueError, match=f"{base}/sft holds a policy, not a reward model"):
            load()
    with pytest.raises(ValueError, match='holds a reward model, not a policy'):
        load_policy(str(base/'reward_model'), cfg)
    refused(ppo, base, tmp_path, monkeypatch, ValueError, 'not a reward model',
            reward_model=str(base/'sft'))


def test_a_value_model_with_another_vocabulary_starts_from_the_policy(base, models, tmp_path,
    capsys):
    shutil.copytree(base/'reward_model'/'model', tmp_path/'other')
    text = json.loads((tmp_path/'other'/'tokenizer.json').read_text())
    vocab = text['model']['vocab']
    a, b = [t for t, i in vocab.items() if i in (300, 301)]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path/'other'/'tokenizer.json').write_text(json.dumps(text))
    value = ppo.value_model(
        ppo.PPOConfig(**tiny.settings('ppo', base, reward_model=str(tmp_path/'other'))),
        models.policy)
    assert 'another vocabulary than the policy' in capsys.readouterr().out
    assert not value.score.weight.any()
    value = ppo.value_model(ppo.PPOConfig(**tiny.settings('ppo', base)), models.policy)
    assert not capsys.readouterr().out and value.score.weight.any()
