"What would fail after the training fails before it: nothing is trained, logged or lost."
import json
import shutil

import pytest

import tiny
from alpaca_farm import ppo, sft
from alpaca_farm.model.logprobs import load_policy, load_scalar
from alpaca_farm.model.rewards import reward
from alpaca_farm.train import trainer as training

METHODS = 'sft', 'dpo', 'binary_feedback', 'rrhf', 'ppo', 'quark'
@pytest.fixture
def refused(base, tmp_path, monkeypatch):
    "A check that a run ends with a message before its first step."
    def step(*_, **__): raise AssertionError('a step was made')
    monkeypatch.setattr(training.Trainer, 'update', step)
    def holds(name, message, error=ValueError, **given):
        with pytest.raises(error, match=message):
            tiny.run(name, base, tmp_path/'out', **given)
        assert not (tmp_path/'out').exists()
    return holds


def test_a_policy_is_no_reward_model(base, refused):
    "Its head would be random."
    cfg = sft.SFTConfig(device='cpu')
    for load in (lambda: load_scalar(str(base/'sft'), cfg), lambda: reward(str(base/'sft'), cfg)):
        with pytest.raises(ValueError, match=f"{base}/sft holds a policy"):
            load()
    with pytest.raises(ValueError, match='a reward model, not a policy'):
        load_policy(str(base/'reward_model'), cfg)


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
    assert not capsys.readouterr().out
    assert value.score.weight.any()


CONTRADICTIONS = dict(   # of a generation_config; the last is refused by transformers itself
    greedy=dict(do_sample=False, temperature=.6, top_p=.9), unset=dict(temperature=.7, top_k=20),
    beams=dict(length_penalty=2., early_stopping=True),
    cache=dict(use_cache=False, cache_implementation='hybrid'),
    several=dict(do_sample=False, num_return_sequences=4))


@pytest.fixture
def policy_that(base, tmp_path):
    "Makes a policy with settings of generation, which knows the end of a turn or does not."
    def make(knows_end=True, **settings):
        folder = tmp_path/f'that_{len([*tmp_path.iterdir()])}'
        shutil.copytree(base/'sft'/'model', folder)
        file = folder/'generation_config.json'
        ends = json.loads(file.read_text())['eos_token_id']
        tiny.write(file, dict(eos_token_id=ends if knows_end else 0, pad_token_id=0) | settings)
        return str(folder)
    return make


@pytest.mark.parametrize('kind', CONTRADICTIONS)
@pytest.mark.parametrize('name, more', [('sft', {}), ('sft', dict(lora_rank=2)),
                                        ('binary_feedback', {}), ('quark', dict(lora_rank=2))])
def test_a_model_that_can_be_read_can_be_saved_or_is_refused_first(
        base, tmp_path, policy_that, capsys, kind, name, more):
    "Whether an end of turns, tokens of control or nothing is added to what it has."
    for knows in (True, False):
        policy = policy_that(knows, **CONTRADICTIONS[kind])
        out = tmp_path/f'{name}_{knows}'
        def run(): return tiny.run(name, base, out, policy=policy, **more)
        if kind == 'several':
            with pytest.raises(ValueError, match='num_return_sequences'):
                run()
            assert not out.exists()
            continue
        run()
        assert f'{policy}: its generation_config.json contradicts' in capsys.readouterr().out
        saved = load_policy(str(out), sft.SFTConfig(device='cpu')).model.generation_config
        saved.validate(strict=True)
        assert not {*CONTRADICTIONS[kind]} & {*saved.to_diff_dict()}


@pytest.mark.parametrize('part', ['PreTrainedTokenizerFast', 'LlamaConfig'])
@pytest.mark.parametrize('name', [*METHODS, 'reward_model'])
def test_what_cannot_be_saved_is_refused_before_training(refused, monkeypatch, name, part):
    import transformers
    def cannot(*_, **__): raise TypeError('a set is not JSON serializable')
    monkeypatch.setattr(getattr(transformers, part), 'save_pretrained', cannot)
    refused(name, 'a model trained from it could not be saved .*not JSON')
