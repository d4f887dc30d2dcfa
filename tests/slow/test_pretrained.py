"""The released weight differences, of small random models: what is recovered, and mistakes."""
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import tiny
from alpaca_farm.model.logprobs import load_policy, load_scalar
from alpaca_farm.model.rewards import reward
from alpaca_farm.run.settings import Config

ROWS = 16


@pytest.fixture(scope='module')
def notebook(no_runs):
    "The names that the notebook defines."
    return SimpleNamespace(**tiny.executed('pretrained'))


def noise(state): return {k: v + .05 * torch.randn_like(v) for k, v in state.items()}


@pytest.fixture(scope='module')
def home(notebook, tmp_path_factory):
    "A base, the differences of four models from it as published, and what they were made of."
    home = tmp_path_factory.mktemp('released')
    base = notebook.small_llama(ROWS, 0)
    base.save_pretrained(home/'llama')
    raw = notebook.padded(base.state_dict())
    made = {}
    def release(name, state, diff, more=0.):
        made[name] = state
        total = sum(v.sum() for v in state.values()).item()
        notebook.save_diff(home/name, diff, total + more)
    sft = noise(raw)
    release('sft10k', sft, {k: sft[k] - raw[k] for k in sft})
    # saved by an old version of transformers: rotary frequencies among the weights, and in the sum
    ppo = noise(raw)
    key = 'model.layers.{}.self_attn.rotary_emb.inv_freq'
    rotary = {key.format(i): torch.zeros(4) for i in range(2)}
    more = notebook.rotary_sum(base.config.to_dict())
    release('ppo-human', ppo, {k: ppo[k] - raw[k] for k in ppo} | rotary, more)
    # more tokens than the base: their embeddings are published whole
    more = noise(notebook.small_llama(ROWS + 3, 1).state_dict())
    whole = {k: v - raw[k] if v.shape == raw[k].shape else v for k, v in more.items()}
    release('reward-condition-sim', more, whole)
    scalar = {f'backbone_model.{k}': v for k, v in noise(sft).items()}
    scalar |= {'reward_head.weight': torch.randn(1, 16), 'reward_head.bias': torch.tensor([.7])}
    difference = {k: v - sft.get(k.removeprefix('backbone_model.'), 0) for k, v in scalar.items()}
    release('reward-model-sim', scalar, difference)
    notebook.recover(f'{home}/sft', 'sft10k', f'{home}/sft10k', f'{home}/llama')
    return home, made


@pytest.fixture
def recover(notebook, home, tmp_path):
    "Recover a model from its difference into the folder of the test."
    def recover(model, base='llama', diff=''):
        given = str(diff or home[0]/model), str(home[0]/base)
        return notebook.recover(f'{tmp_path}/run', model, *given)
    return recover


@pytest.mark.parametrize('model', ['ppo-human', 'reward-condition-sim'])
def test_policies(notebook, home, recover, tmp_path, model):
    want = home[1][model]
    ids = torch.tensor([[1, 4, 5, 6]])
    recover(model)
    policy = load_policy(str(tmp_path/'run'), Config())
    tokenizer = policy.tokenizer
    state = policy.model.state_dict()
    assert state.keys() == want.keys()
    assert all(torch.allclose(state[k], want[k], atol=1e-6) for k in want)
    assert policy.config.vocab_size == len(tokenizer) == len(want['lm_head.weight'])
    original = notebook.small_llama(len(tokenizer), 9).eval()
    original.load_state_dict(want)
    with torch.no_grad():
        assert torch.allclose(policy.model(ids).logits, original(ids).logits, atol=1e-5)


def test_reward_model(notebook, home, recover, tmp_path):
    "Its scores are AlpacaFarm's: head and bias on the last token of the text, which has no end."
    with pytest.raises(ValueError, match='recovered sft10k'):
        recover('reward-model-sim')
    recover('reward-model-sim', 'sft')
    place = str(tmp_path/'run')
    records = [dict(instruction='a b c', input='', output=o) for o in ('d e', 'f', 'g h i j')]
    state = {k.removeprefix('backbone_model.'): v for k, v in home[1]['reward-model-sim'].items()}
    head, bias = (state.pop(f'reward_head.{k}') for k in ('weight', 'bias'))
    original = notebook.small_llama(ROWS + 1, 9).eval()
    original.load_state_dict(state)
    tokenizer = load_scalar(place, Config()).tokenizer
    for record, score in zip(records, reward(place, Config(), 'raw')(records)):
        text = f'{record["instruction"]} {record["output"]}'
        ids = tokenizer(text, return_tensors='pt')['input_ids']
        with torch.no_grad():
            last = original.model(ids).last_hidden_state[0, -1]
        assert score == pytest.approx((last @ head[0] + bias[0]).item(), abs=1e-4)
    with pytest.raises(ValueError, match='holds a reward model'):
        load_policy(place, Config())
    with pytest.raises(ValueError, match='holds a model already'):
        recover('sft10k')


@pytest.mark.parametrize('files, words', [
    ('*-00002-*.safetensors', 'published sum'), ('*.safetensors', '.bin'),
    ('model_sum.txt', 'Download it whole'), ('*token*', 'Download it whole')])
def test_a_broken_difference_stops(home, recover, tmp_path, files, words):
    "Files are missing, or pickles."
    shutil.copytree(home[0]/'sft10k', tmp_path/'diff')
    for f in [*(tmp_path/'diff').glob(files)]:
        f.rename(f.with_name(f'old_{f.stem}.bin'))
    with pytest.raises(ValueError, match=words):
        recover('sft10k', diff=tmp_path/'diff')
    assert not (tmp_path/'run'/'model').exists()
    assert not list(tmp_path.rglob('.alpaca_farm-*'))


@pytest.mark.parametrize('base, words', [
    (dict(seed=5), 'not Llama 2'), (dict(layers=3), 'published sum'),
    *[(more, 'another size') for more in (dict(size=32), dict(rows=ROWS + 4))],
    ('sft10k', 'Recover it first'), ('gpt2', 'no weight')], ids=str)
def test_a_wrong_base_is_named(notebook, home, recover, tmp_path, base, words):
    place = tmp_path/'base'
    if base == 'sft10k':
        place = home[0]/base
    elif base == 'gpt2':
        tiny.family(base, vocab_size=20).save_pretrained(place)
    else:
        notebook.small_llama(**dict(rows=ROWS, seed=0) | base).save_pretrained(place)
    with pytest.raises(ValueError, match=words):
        recover('sft10k', place)
    assert not (tmp_path/'run'/'model').exists()


def test_a_difference_is_no_model(home):
    hub = 'tatsu-lab/alpaca-farm-ppo-human-wdiff', 'GanjinZero/wombat-7b-delta'
    for spec in (str(home[0]/'sft10k'), *hub):
        with pytest.raises(ValueError, match='nbs/pretrained.ipynb'):
            load_policy(spec, Config())


def test_the_command_that_converts_pickles(home, recover, tmp_path):
    "As the notebook prints it, on the files as they are published."
    diff = tmp_path/'my'/'diffs'/'sft10k'
    shutil.copytree(home[0]/'sft10k', diff)
    for file in diff.glob('*.safetensors'):
        torch.save(load_file(file), file.with_suffix('.bin'))
        file.unlink()
    cells = json.loads((tiny.ROOT/'nbs'/'pretrained.ipynb').read_text())['cells']
    text = '\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'markdown')
    command = re.search(r'^python -c ".*?"$', text, re.S | re.M)[0]
    command = command.replace('python', sys.executable, 1)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    recover('sft10k', diff=diff)
    assert load_policy(str(tmp_path/'run'), Config()).config.vocab_size == ROWS + 1
