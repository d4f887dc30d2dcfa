"Attention kernels: the same numbers, packed and padded; which mask reaches a kernel."
import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tiny
from alpaca_farm.data.text import collate
from alpaca_farm.model import loading
from alpaca_farm.model.generation import generate
from alpaca_farm.model.logprobs import hidden_states, load_policy
from alpaca_farm.model.packing import _register_rows, reads_packed
from alpaca_farm.run.settings import HardwareConfig
from tiny import alone, ANSWERS, PROMPTS

BATCH = collate(PROMPTS, ANSWERS, 0)


def states_are_those_of_single_rows(model, batch=BATCH):
    with torch.no_grad():
        states = hidden_states(model, **batch)
        for i, (p, a) in enumerate(zip(PROMPTS, ANSWERS)):
            wanted = alone(model, p, a)
            torch.testing.assert_close(states[i][batch['mask'][i].bool()], wanted, rtol=1e-3,
                                       atol=1e-3*wanted.std().item())


def watched(monkeypatch, kind, attend):
    "The arguments of each call of a kernel, which `attend` stands for."
    calls = []
    def kernel(module, query, key, value, attention_mask, **more):
        calls.append(dict(more, mask=attention_mask, shape=tuple(query.shape),
                          mixed=torch.is_autocast_enabled('cpu')))
        return attend(module, query, key, value, attention_mask, **more)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, kind, kernel)
    return calls


def flash(module, query, key, value, _, scaling=None, sliding_window=None, **more):
    "Flash attention in plain PyTorch: causal, within a window."
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    near = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    if sliding_window:
        near = near.triu(1 - sliding_window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=near,
                                          scale=scaling).transpose(1, 2), None


@pytest.fixture
def unregistered():
    "Kernels that nothing has replaced yet."
    _register_rows.cache_clear()
    yield
    _register_rows.cache_clear()


@pytest.mark.parametrize('kind', ['sdpa', 'flash_attention_2', 'flash_attention_4'])
@pytest.mark.parametrize('family', ['llama', 'qwen3', 'gpt_neox', 'mistral', 'phi3'])
def test_attention_gets_causal_rows(family, kind, unregistered, monkeypatch):
    "Without a mask; the rest of a layer has every token once. Flash attention applies windows."
    more = dict(sliding_window=5) if family == 'mistral' and kind != 'sdpa' else {}
    model = tiny.policy(family, **more)
    model.model.double()
    model.config._attn_implementation = kind
    calls = watched(monkeypatch, kind, flash)
    read = []
    assert reads_packed(model)
    calls.clear()
    def reads(module, args, out): read.append(out.shape[:2])
    hook = model.model.base_model.get_input_embeddings().register_forward_hook(reads)
    with torch.no_grad():
        hidden_states(model, **BATCH)
    hook.remove()
    assert read == [(1, sum(map(len, {tuple(p) for p in PROMPTS})) + sum(map(len, ANSWERS)))]
    longest = max(len(p + a) for p, a in zip(PROMPTS, ANSWERS))
    assert len(calls) == 2
    for c in calls:
        assert c['mask'] is None
        assert 'position_ids' not in c
        assert (c['shape'][0], c['shape'][2]) == (len(PROMPTS), longest)
    states_are_those_of_single_rows(model)


def test_flash_attention_is_given_16_bits(unregistered, monkeypatch):
    "Also where weights in float32 are evaluated outside of autocast."
    model = tiny.policy('llama')
    other = tiny.policy('llama')
    model.config._attn_implementation = 'flash_attention_2'
    calls = watched(monkeypatch, 'flash_attention_2', flash)
    with torch.no_grad():
        states, wanted = (hidden_states(m, **BATCH)[BATCH['mask'].bool()] for m in (model, other))
    assert calls
    assert all(c['mixed'] for c in calls)
    assert states.dtype == torch.float32
    assert 0 < (states - wanted).abs().max() < .1*wanted.std()


def loaded(folder, attention):
    return load_policy(str(folder), HardwareConfig(device='cpu', attention=attention))


def test_a_run_asks_for_its_kernel(tmp_path):
    "At loading; sampling uses one that takes a mask, and gives the same answers."
    tiny.family('llama', vocab_size=260).save_pretrained(tmp_path)
    tiny.letters().save_pretrained(tmp_path)
    written = []
    for kind, used in (('auto', 'sdpa'), ('eager', 'eager')):
        model = loaded(tmp_path, kind)
        assert model.config._attn_implementation == used
        samples = generate(model, PROMPTS, max_new_tokens=8, temperature=0)
        written.append([s.tokens for s, in samples])
        assert model.config._attn_implementation == used
    assert written[0] == written[1]


def test_what_is_missing_is_named(tmp_path):
    tiny.family('bloom').save_pretrained(tmp_path)
    for kind, word in (('flash_attention_2', 'flash-attn'),
                       ('flash_attention_4', 'flash-attn-4'),
                       ('flex_attention', 'BloomForCausalLM')):
        with pytest.raises(ValueError, match=f"attention = '{kind}'.*{word}"):
            loaded(tmp_path, kind)


@pytest.mark.parametrize('family, dtype, kind',
                         [('llama', 'auto', 'flash_attention_2'), ('llama', 'float32', None),
                          ('bloom', 'auto', None)])
def test_automatic_choice_on_a_gpu(family, dtype, kind, tmp_path, monkeypatch):
    tiny.family(family).save_pretrained(tmp_path)
    monkeypatch.setattr('transformers.utils.is_flash_attn_2_available', lambda: True)
    monkeypatch.setattr('torch.cuda.is_available', lambda: True)
    assert loading._attention_of(str(tmp_path), HardwareConfig(device='cuda', dtype=dtype)) == kind
    assert loading._attention_of(str(tmp_path),
                                HardwareConfig(device='cpu', dtype='bfloat16')) is None
