"""The released weight differences, of small random models: what is recovered, and mistakes."""
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
from alpaca_farm.pretrained import PretrainedConfig, rotary_sum, run

ROWS = 16
WORDS = ['<unk>', '<s>', '</s>', *'abcdefghijklm', '[PAD]', '<reward_0>', '<reward_1>']


def llama(rows, seed, layers=2, size=16):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=rows, hidden_size=size, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2))


def padded(state):
    "With the embeddings of a padding token, as AlpacaFarm adds it."
    more = {k: torch.cat([state[k], state[k].mean(0, keepdim=True)])
            for k in ('model.embed_tokens.weight', 'lm_head.weight')}
    return state | more


def save_tokenizer(folder, n):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    vocab = {w: i for i, w in enumerate(WORDS[:n])}
    lm = Tokenizer(models.WordLevel(vocab, unk_token='<unk>'))
    lm.pre_tokenizer = pre_tokenizers.Whitespace()
    lm.post_processor = processors.TemplateProcessing('<s> $A', special_tokens=[('<s>', 1)])
    special = dict(unk_token='<unk>', bos_token='<s>', eos_token='</s>', pad_token='[PAD]')
    PreTrainedTokenizerFast(tokenizer_object=lm, **special).save_pretrained(folder)


def publish(folder, diff, config, total):
    "A difference as it is published, in two files, but in safetensors."
    folder.mkdir(parents=True)
    half = len(diff) // 2
    for i, keys in enumerate((list(diff)[:half], list(diff)[half:]), 1):
        file = folder/f'pytorch_model-{i:05}-of-00002.safetensors'
        save_file({k: diff[k].clone() for k in keys}, file)
    (folder/'model_sum.txt').write_text(str(total))
    (folder/'config.json').write_text(json.dumps(config))
    save_tokenizer(folder, len(diff[next(k for k in diff if 'embed_tokens' in k)]))


def noise(state): return {k: v + .05 * torch.randn_like(v) for k, v in state.items()}


def total_of(state): return sum(v.sum() for v in state.values()).item()


@pytest.fixture(scope='module')
def home(tmp_path_factory):
    "A base, the differences of four models from it as published, and what they were made of."
    home, base = tmp_path_factory.mktemp('released'), llama(ROWS, 0)
    base.save_pretrained(home/'llama')
    config = base.config.to_dict() | dict(vocab_size=ROWS + 1)
    raw, made = padded(base.state_dict()), {}
    def release(name, state, diff, more=0., config=config):
        made[name] = state
        publish(home/name, diff, config, total_of(state) + more)
    sft = noise(raw)
    release('sft10k', sft, {k: sft[k] - raw[k] for k in sft})
    # saved by an old version of transformers: rotary frequencies among the weights, and in the sum
    ppo, key = noise(raw), 'model.layers.{}.self_attn.rotary_emb.inv_freq'
    rotary = {key.format(i): torch.zeros(4) for i in range(2)}
    release('ppo-human', ppo, {k: ppo[k] - raw[k] for k in ppo} | rotary, rotary_sum(config))
    # more tokens than the base: their embeddings are published whole
    more = noise(llama(ROWS + 3, 1).state_dict())
    whole = {k: v - raw[k] if v.shape == raw[k].shape else v for k, v in more.items()}
    release('reward-condition-sim', more, whole)
    scalar = {f'backbone_model.{k}': v for k, v in noise(sft).items()}
    scalar |= {'reward_head.weight': torch.randn(1, 16), 'reward_head.bias': torch.tensor([.7])}
    difference = {k: v - sft.get(k.removeprefix('backbone_model.'), 0) for k, v in scalar.items()}
    release('reward-model-sim', scalar, difference, config=dict(model_type='reward_model'))
    run(PretrainedConfig(out=f'{home}/sft', diff=f'{home}/sft10k', base=f'{home}/llama'))
    return home, made


def recovered(home, model, out, base='llama', **more):
    given = dict(diff=str(home/model), base=str(home/base)) | more
    return run(PretrainedConfig(out=str(out), model=model, **given)).path('model')


@pytest.mark.parametrize('model', ['sft10k', 'ppo-human', 'reward-condition-sim'])
def test_policies(home, tmp_path, model):
    (home, made), ids = home, torch.tensor([[1, 4, 5, 6]])
    recovered(home, model, tmp_path/'run')
    policy, tokenizer = load_policy(str(tmp_path/'run'), Config())
    state, want = policy.state_dict(), made[model]
    assert state.keys() == want.keys()
    assert all(torch.allclose(state[k], want[k], atol=1e-6) for k in want)
    assert policy.config.vocab_size == len(tokenizer) == len(want['lm_head.weight'])
    original = llama(len(tokenizer), 9).eval()
    original.load_state_dict(want)
    with torch.no_grad():
        assert torch.allclose(policy(ids).logits, original(ids).logits, atol=1e-5)


def test_reward_model(home, tmp_path):
    "Its scores are AlpacaFarm's: head and bias on the last token of the text, which has no end."
    (home, made), place = home, str(tmp_path/'rm')
    recovered(home, 'reward-model-sim', place, 'sft')
    records = [dict(instruction='a b c', input='', output=o) for o in ('d e', 'f', 'g h i j')]
    state = {k.removeprefix('backbone_model.'): v for k, v in made['reward-model-sim'].items()}
    head, bias = (state.pop(f'reward_head.{k}') for k in ('weight', 'bias'))
    original = llama(ROWS + 1, 9).eval()
    original.load_state_dict(state)
    _, tokenizer = load_scalar(place, Config())
    for record, score in zip(records, reward(place, Config(), 'raw')(records)):
        text = f'{record["instruction"]} {record["output"]}'
        ids = tokenizer(text, return_tensors='pt')['input_ids']
        with torch.no_grad(): last = original.model(ids).last_hidden_state[0, -1]
        assert score == pytest.approx((last @ head[0] + bias[0]).item(), abs=1e-4)
    with pytest.raises(ValueError, match='holds a reward model'): load_policy(place, Config())
    with pytest.raises(ValueError, match='recovered sft10k'):
        recovered(home, 'reward-model-sim', tmp_path/'wrong')


def test_a_run_killed_before_its_summary_is_written_is_made_again(home, tmp_path):
    for _ in range(2):
        weights = next(recovered(home[0], 'sft10k', tmp_path/'run').glob('*.safetensors'))
        (tmp_path/'run'/'summary.json').unlink()
    assert weights.exists()


def break_file(folder, how):
    file = next(folder.glob('*-00002-*.safetensors'))
    if how == 'shard': file.unlink()
    if how == 'pickles':
        for f in folder.glob('*.safetensors'): f.rename(f.with_suffix('.bin'))
    if how == 'no sum': (folder/'model_sum.txt').unlink()
    if how == 'tokenizer': [f.unlink() for f in folder.glob('*token*')]
    if how == 'changed': save_file({k: v + .1 for k, v in load_file(file).items()}, file)


@pytest.mark.parametrize('how, words', [
    ('shard', 'published sum'), ('pickles', '.bin'), ('no sum', 'Download it whole'),
    ('tokenizer', 'Download it whole'), ('changed', 'published sum')])
def test_a_broken_difference_stops(home, tmp_path, how, words):
    shutil.copytree(home[0]/'sft10k', tmp_path/'diff')
    break_file(tmp_path/'diff', how)
    with pytest.raises(ValueError, match=words):
        recovered(home[0], 'sft10k', tmp_path/'run', diff=str(tmp_path/'diff'))
    assert not (tmp_path/'run'/'model').exists() and not list(tmp_path.rglob('.alpaca_farm-*'))


@pytest.mark.parametrize('base, words', [
    ('other', 'not Llama 2'), ('large', 'published sum'), ('wide', 'another size'),
    ('more', 'another size'), ('difference', 'Recover it first'), ('gpt', 'no weight')])
def test_a_wrong_base_is_named(home, tmp_path, base, words):
    place = tmp_path/'base'
    if base == 'difference': shutil.copytree(home[0]/'sft10k', place)
    elif base == 'gpt':
        from transformers import GPT2Config, GPT2LMHeadModel
        config = GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2)
        GPT2LMHeadModel(config).save_pretrained(place)
    else:
        changed = dict(large=dict(layers=3), wide=dict(size=32), more=dict(rows=ROWS + 4))
        llama(**dict(rows=ROWS, seed=5) | changed.get(base, {})).save_pretrained(place)
    with pytest.raises(ValueError, match=words):
        recovered(home[0], 'sft10k', tmp_path/'run', base=place)
    assert not (tmp_path/'run'/'model').exists()


def test_a_difference_is_no_model(home):
    hub = 'tatsu-lab/alpaca-farm-ppo-human-wdiff', 'GanjinZero/wombat-7b-delta'
    for spec in (str(home[0]/'sft10k'), *hub):
        with pytest.raises(ValueError, match='nbs/pretrained.ipynb'): load_policy(spec, Config())


def test_the_command_that_converts_pickles(home, tmp_path):
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
    recovered(home[0], 'sft10k', tmp_path/'run', diff=str(diff))
    assert load_policy(str(tmp_path/'run'), Config())[0].config.vocab_size == ROWS + 1
