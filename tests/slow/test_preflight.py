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
def table(records): return {'score': 1., 'length': 2.}
def two(records): return [(1., len(r['output'])) for r in records]
def silent(pairs): return [float('nan')]*len(pairs)


@pytest.mark.parametrize('name', ['ppo', 'quark', 'rrhf', 'best_of_n'])
def test_a_reward_that_fails_is_named_first(refused, name):
    spec = f'{__name__}:broken'
    refused(name, rf"reward_model = '{spec}' failed .*KeyError: 'price'", reward_model=spec)


@pytest.mark.parametrize('spec', ['table', 'two'])
def test_a_reward_of_another_shape_is_named_first(refused, spec):
    spec = f'{__name__}:{spec}'
    refused('ppo', f"reward_model = '{spec}' .*Let it give a list, a number", reward_model=spec)


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
        policy, out = policy_that(knows, **CONTRADICTIONS[kind]), tmp_path/f'{name}_{knows}'
        def run(): return tiny.run(name, base, out, policy=policy, **more)
        if kind == 'several':
            with pytest.raises(ValueError, match='num_return_sequences'): run()
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
    refused(name, 'what is trained from it could not be saved .*not JSON')
