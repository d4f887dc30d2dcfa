"""The released weight differences, made here of small random models: what is recovered, and every mistake that users reported."""
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny

from alpaca_farm.core.model.models import load_policy, load_scalar
from alpaca_farm.core.model.rewards import reward
from alpaca_farm.core.run.settings import Config
from alpaca_farm.pretrained import RELEASED, PretrainedConfig, rotary_sum, run

ROWS = 16
WORDS = ['<unk>', '<s>', '</s>', *'abcdefghijklm', '[PAD]', '<reward_0>', '<reward_1>']


def llama(rows, seed, layers=2, size=16):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=rows, hidden_size=size, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
                                        max_position_embeddings=64, bos_token_id=1, eos_token_id=2))


def padded(state):
    "With the embeddings of a padding token, as AlpacaFarm adds it."
    return {k: torch.cat([v, v.mean(0, keepdim=True)]) if k in ('model.embed_tokens.weight', 'lm_head.weight') else v for k, v in state.items()}


def save_tokenizer(folder, n):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    lm = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS[:n])}, unk_token='<unk>'))
    lm.pre_tokenizer = pre_tokenizers.Whitespace()
    lm.post_processor = processors.TemplateProcessing('<s> $A', special_tokens=[('<s>', 1)])
    PreTrainedTokenizerFast(tokenizer_object=lm, unk_token='<unk>', bos_token='<s>', eos_token='</s>', pad_token='[PAD]').save_pretrained(folder)


def publish(folder, diff, config, total):
    folder.mkdir(parents=True)
    half = len(diff) // 2
    for i, keys in enumerate((list(diff)[:half], list(diff)[half:]), 1):
        save_file({k: diff[k].clone() for k in keys}, folder/f'pytorch_model-{i:05}-of-00002.safetensors')
    index = {k: f'pytorch_model-{1 + (i >= half):05}-of-00002.bin' for i, k in enumerate(diff)}
    (folder/'pytorch_model.bin.index.json').write_text(json.dumps(dict(weight_map=index)))
    (folder/'model_sum.txt').write_text(str(total))
    (folder/'config.json').write_text(json.dumps(config))
    save_tokenizer(folder, diff[next(k for k in diff if 'embed_tokens' in k)].shape[0])


def noise(state): return {k: v + .05 * torch.randn_like(v) for k, v in state.items()}


def total_of(state): return sum(v.sum() for v in state.values()).item()


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "A base, the differences of four models from it as they were published, and what they were made of."
    home = tmp_path_factory.mktemp('released')
    base = llama(ROWS, 0)
    base.save_pretrained(home/'llama')
    config, raw, made = base.config.to_dict() | dict(vocab_size=ROWS + 1), padded(base.state_dict()), {}
    sft = made['sft10k'] = noise(raw)
    publish(home/'sft10k', {k: sft[k] - raw[k] for k in sft}, config, total_of(sft))
    # saved by an old version of transformers: rotary frequencies among the weights, and in the sum
    ppo, rotary = noise(raw), {f'model.layers.{i}.self_attn.rotary_emb.inv_freq': torch.zeros(4) for i in range(2)}
    made['ppo-human'] = ppo
    publish(home/'ppo-human', {k: ppo[k] - raw[k] for k in ppo} | rotary, config, total_of(ppo) + rotary_sum(config))
    # more tokens than the base: their embeddings are published whole
    more = made['reward-condition-sim'] = noise(llama(ROWS + 3, 1).state_dict())
    publish(home/'reward-condition-sim', {k: v - raw[k] if v.shape == raw[k].shape else v for k, v in more.items()}, config, total_of(more))
    scalar = {f'backbone_model.{k}': v for k, v in noise(sft).items()}
    scalar |= {'reward_head.weight': torch.randn(1, 16), 'reward_head.bias': torch.tensor([.7])}
    made['reward-model-sim'] = scalar
    difference = {k: v - sft.get(k.removeprefix('backbone_model.'), 0) for k, v in scalar.items()}
    publish(home/'reward-model-sim', difference, dict(model_type='reward_model', vocab_size=ROWS + 1), total_of(scalar))
    run(PretrainedConfig(out=f'{home}/sft', diff=f'{home}/sft10k', base=f'{home}/llama'))
    return home, made


def recovered(home, model, out, base='llama', **more):
    return run(PretrainedConfig(out=str(out), model=model, diff=str(home/model), base=str(home/base), **more)).path('model')


@pytest.mark.parametrize('model', ['sft10k', 'ppo-human', 'reward-condition-sim'])
def test_policies(home, tmp_path, model):
    home, made = home
    recovered(home, model, tmp_path/'run')
    policy, tokenizer = load_policy(str(tmp_path/'run'), Config())
    state = policy.state_dict()
    assert state.keys() == made[model].keys() and all(torch.allclose(state[k], v, atol=1e-6) for k, v in made[model].items())
    assert policy.config.vocab_size == len(tokenizer) == made[model]['lm_head.weight'].shape[0]
    with torch.no_grad():
        ids = torch.tensor([[1, 4, 5, 6]])
        original = llama(len(tokenizer), 9).eval()
        original.load_state_dict(made[model])
        assert torch.allclose(policy(ids).logits, original(ids).logits, atol=1e-5)


def test_an_earlier_model_is_set_aside_once(home, tmp_path):
    for dtype in ('float32', 'bfloat16'): recovered(home[0], 'sft10k', tmp_path/'run', dtype=dtype)
    assert sorted(p.name for p in tmp_path.glob('run*')) == ['run', 'run~1'] and (tmp_path/'run~1'/'model').is_dir()


def test_reward_model(home, tmp_path):
    "Its scores are AlpacaFarm's: head and bias on the last token of the text, which has no end."
    home, made = home
    recovered(home, 'reward-model-sim', tmp_path/'rm', 'sft')
    records = [dict(instruction='a b c', input='', output=o) for o in ('d e', 'f', 'g h i j')]
    scores = reward(str(tmp_path/'rm'), Config(), 'raw')(records)
    state = {k.removeprefix('backbone_model.'): v for k, v in made['reward-model-sim'].items()}
    original = llama(ROWS + 1, 9).eval()
    original.load_state_dict({k: v for k, v in state.items() if not k.startswith('reward_head')})
    _, tokenizer = load_scalar(str(tmp_path/'rm'), Config())
    for record, score in zip(records, scores):
        ids = tokenizer(f'{record["instruction"]} {record["output"]}', return_tensors='pt')['input_ids']
        with torch.no_grad(): last = original.model(ids).last_hidden_state[0, -1]
        assert abs(score - (last @ state['reward_head.weight'][0] + state['reward_head.bias'][0]).item()) < 1e-4
    with pytest.raises(ValueError, match='holds a reward model'): load_policy(str(tmp_path/'rm'), Config())


def break_file(folder, how):
    file = next(folder.glob('*-00002-*.safetensors'))
    if how == 'shard': file.unlink()
    if how == 'pickles':
        for f in folder.glob('*.safetensors'): f.rename(f.with_suffix('.bin'))
    if how == 'no sum': (folder/'model_sum.txt').unlink()
    if how == 'tokenizer': [f.unlink() for f in folder.glob('*token*')]
    if how == 'changed':
        state = load_file(file)
        save_file({k: v + .1 for k, v in state.items()}, file)


@pytest.mark.parametrize('how, words', [('shard', 'the published sum is'), ('pickles', 'a .bin can execute code'), ('no sum', 'Download it whole'),
                                        ('tokenizer', 'Download it whole'), ('changed', 'the published sum is')])
def test_a_broken_difference_stops(home, tmp_path, how, words):
    shutil.copytree(home[0]/'sft10k', tmp_path/'diff')
    break_file(tmp_path/'diff', how)
    with pytest.raises(ValueError, match=words):
        run(PretrainedConfig(out=str(tmp_path/'run'), diff=str(tmp_path/'diff'), base=str(home[0]/'llama')))
    assert not (tmp_path/'run'/'model').exists() and not list(tmp_path.rglob('.alpaca_farm-*'))


@pytest.mark.parametrize('base, words', [
    ('other', 'base must be the first LLaMA 7B, not Llama 2 and no fine-tuned model'), ('large', 'the published sum is'), ('wide', 'another size'),
    ('more', 'another model, or another size'), ('difference', 'this is a difference too'), ('gpt', 'base has no weight')])
def test_a_wrong_base_is_named(home, tmp_path, base, words):
    place = tmp_path/'base'
    if base == 'difference': shutil.copytree(home[0]/'sft10k', place)
    elif base == 'gpt':
        from transformers import GPT2Config, GPT2LMHeadModel
        GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2)).save_pretrained(place)
    else:
        model = llama(ROWS + 4 if base == 'more' else ROWS, 5, 3 if base == 'large' else 2, 32 if base == 'wide' else 16)
        model.save_pretrained(place)
    with pytest.raises(ValueError, match=words): run(PretrainedConfig(out=str(tmp_path/'run'), diff=str(home[0]/'sft10k'), base=str(place)))
    assert not (tmp_path/'run'/'model').exists()


def test_a_reward_model_on_the_wrong_base(home, tmp_path):
    with pytest.raises(ValueError, match='base must be the recovered sft10k'): recovered(home[0], 'reward-model-sim', tmp_path/'run')


def test_a_difference_is_no_model(home):
    for spec in (str(home[0]/'sft10k'), 'tatsu-lab/alpaca-farm-ppo-human-wdiff', 'GanjinZero/wombat-7b-delta'):
        with pytest.raises(ValueError, match='recover the model with nbs/pretrained.ipynb'): load_policy(spec, Config())


def test_the_released_models():
    assert len(RELEASED) == 11 and {n for n, base in RELEASED.items() if base == 'sft10k'} == {'reward-model-sim', 'reward-model-human'}


def test_the_command_that_converts_pickles(home, tmp_path):
    "As the notebook prints it, on the files as they are published."
    diff = tmp_path/'my'/'diffs'/'sft10k'
    shutil.copytree(home[0]/'sft10k', diff)
    for file in diff.glob('*.safetensors'):
        torch.save(load_file(file), file.with_suffix('.bin'))
        file.unlink()
    cells = json.loads((tiny.ROOT/'nbs'/'pretrained.ipynb').read_text())['cells']
    text = '\n'.join(''.join(c['source']) for c in cells if c['cell_type'] == 'markdown')
    command = re.search(r'^python -c ".*?"$', text, re.S | re.M)[0].replace('python', sys.executable, 1)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    run(PretrainedConfig(out=str(tmp_path/'run'), diff=str(diff), base=str(home[0]/'llama')))
    assert load_policy(str(tmp_path/'run'), Config())[0].config.vocab_size == ROWS + 1
