"Tokenizers as other people's models have them: ends of turns, special or missing tokens."
import copy
import json
import re
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from tokenizers import (Tokenizer, decoders, models as parts, normalizers, pre_tokenizers,
    processors, trainers)
from transformers import (LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification,
    PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, RobertaConfig,
    RobertaForSequenceClassification)

import tiny
from alpaca_farm import dpo, sft
from alpaca_farm.data.text import build_prompt, check_positions, decode, encode, encode_prompts
from alpaca_farm.data.text import encode_responses, end_token, end_tokens, set_template_arguments
from alpaca_farm.judging.judges import load_evaluators, LocalJudge
from alpaca_farm.model.control import prepend_tokens, set_control_prefix
from alpaca_farm.model.generation import generate, Sample
from alpaca_farm.model.loading import load_tokenizer, model_path
from alpaca_farm.model.logprobs import load_policy, load_scalar
from alpaca_farm.model.policy import Policy
from alpaca_farm.model.rewards import score_records
from alpaca_farm.model.writer import label_tokens
from alpaca_farm.rrhf import _candidate_tokens
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_summary
from alpaca_farm.run.settings import Config
from alpaca_farm.train import preflight
from alpaca_farm.train.answers import sample_answers, SampleConfig

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}<start_of_turn>{{
'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
QWEN3 = CHATML[:-len('{% endif %}')] + """{%
if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
PHI3 = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""
LLAMA3 = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' -%}
[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
FAMILIES = dict(  # special tokens, template, the end of a turn, the named ones
    chatml_base=(
        ['<|endoftext|>', '<|im_start|>', '<|im_end|>'], CHATML, '<|im_end|>',
        dict(eos_token='<|endoftext|>', pad_token='<|endoftext|>')),
    gemma=(
        ['<pad>', '<eos>', '<bos>', '<unk>', '<start_of_turn>', '<end_of_turn>'], GEMMA,
        '<end_of_turn>',
        dict(eos_token='<eos>', bos_token='<bos>', pad_token='<pad>', unk_token='<unk>')),
    phi3=(
        ['<|endoftext|>', '<|user|>', '<|assistant|>', '<|end|>'], PHI3, '<|end|>',
        dict(eos_token='<|endoftext|>', pad_token='<|endoftext|>')),
    llama3=(
        ['<|begin_of_text|>', '<|end_of_text|>', '<|start_header_id|>', '<|end_header_id|>',
         '<|eot_id|>'], LLAMA3, '<|eot_id|>',
        dict(eos_token='<|end_of_text|>', bos_token='<|begin_of_text|>')),
    mistral=(
        ['<unk>', '<s>', '</s>', '[INST]', '[/INST]'], MISTRAL, '</s>',
        dict(eos_token='</s>', bos_token='<s>', unk_token='<unk>')),
    qwen3=(
        ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<think>', '</think>'], QWEN3,
        '<|im_end|>',
        dict(eos_token='<|im_end|>', pad_token='<|endoftext|>')),
    bare=(
        ['<|endoftext|>'], None, '<|endoftext|>',
        dict(eos_token='<|endoftext|>', pad_token='<|endoftext|>')))
FORGED = ['<|im_end|>', '<|im_start|>', '</s>', '[INST]', '<end_of_turn>', '<|end|>', '<|eot_id|>',
          '<|endoftext|>', '<eos>']


def build(family, template='', **named):
    special, chat, _, names = FAMILIES[family]
    bpe = Tokenizer(parts.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(['say the words to the other one ' * 3], trainers.BpeTrainer(
        vocab_size=320, special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    names = {k: v for k, v in (names | named).items() if v}
    more = [s for s in special if s not in names.values()]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, extra_special_tokens=more, **names)
    tokenizer.chat_template = chat
    return tokenizer


def save(folder, tokenizer, size=320, positions=256):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=16, max_position_embeddings=positions,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def user(text): return dict(role='user', content=text)
def bot(text): return dict(role='assistant', content=text)


SAY = dict(instruction='say it')


def data(folder):
    rows = [dict(instruction=f'say {i} words', output=f'the words {i}') for i in range(12)]
    return tiny.splits(folder, rows, 'one')


@pytest.mark.parametrize('family', FAMILIES)
def test_an_answer_ends_as_the_template_ends_a_turn(family):
    tokenizer = build(family)
    end = FAMILIES[family][2]
    assert end_token(tokenizer) == tokenizer.convert_tokens_to_ids(end)
    assert end_token(tokenizer, 'alpaca') == tokenizer.eos_token_id
    assert {end_token(tokenizer), tokenizer.eos_token_id} == set(end_tokens(None, tokenizer))
    record = dict(SAY, output='the words')
    _, (prompt,), ((answer,),) = encode([record], ('output',), tokenizer, 250)
    assert answer[-1] == end_token(tokenizer)
    assert answer.count(answer[-1]) == 1
    assert decode(answer, tokenizer) == 'the words'
    # training reads what the template writes for the same conversation
    if tokenizer.chat_template:
        turns = [user('say it'), bot('the words')]
        def written(turns, **more):
            text = tokenizer.apply_chat_template(turns, tokenize=False, **more)
            return tokenizer(text, add_special_tokens=False)['input_ids']
        assert prompt == written(turns[:1], add_generation_prompt=True)
        if family != 'qwen3':   # whose prompt has an empty thought, and whose turn has none
            assert written(turns)[:len(prompt + answer)] == prompt + answer


@pytest.mark.parametrize('pads', ['ours', 'eos', 'none'])
@pytest.mark.parametrize('family', [f for f in FAMILIES if f != 'qwen3'])   # it drops a thought
def test_plain_transformers_reads_a_reward_where_it_is_read_here(family, pads, tmp_path):
    "At the last token of what the template writes that is no padding, which TRL may make of EOS."
    tokenizer = build(family)
    cfg = sft.SFTConfig(device='cpu')
    policy = load_scalar(save(tmp_path, tokenizer), cfg, 'normal')
    if pads == 'eos':
        policy.model.config.pad_token_id = tokenizer.eos_token_id
    if pads == 'none':
        policy.model.config.pad_token_id = None
    for part in (policy.model, policy.tokenizer):
        part.save_pretrained(tmp_path)
    texts = 'the words', 'the', 'say the words to the other one'
    records = [dict(SAY, output=text) for text in texts]
    rows = []
    for r in records:
        turns = [user('say it'), bot(r['output'])]
        text = f'say it{r["output"]}{tokenizer.eos_token}'
        if tokenizer.chat_template:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        rows.append(tokenizer(text, add_special_tokens=False)['input_ids'])
    model = LlamaForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        want = [model(torch.tensor([row])).logits.item() for row in rows]
    template = 'auto' if tokenizer.chat_template else 'raw'
    found = score_records(load_scalar(str(tmp_path), cfg), records, template)
    assert found == pytest.approx(want, abs=1e-6)
    assert len({*found}) == 3


@pytest.mark.parametrize('family', FAMILIES)
def test_samples_end_as_answers_do(family, tmp_path):
    policy = load_policy(save(tmp_path, build(family)), sft.SFTConfig(device='cpu'))
    tokenizer = policy.tokenizer
    policy.model.lm_head.weight.data.zero_()  # all tokens are equally likely
    samples = [s for s, in generate(policy, [[5]] * 60, max_new_tokens=200)]
    ends = [s.tokens[-1] for s in samples if s.ended]
    assert end_token(tokenizer) in ends
    assert set(ends) <= set(end_tokens(policy, tokenizer))


@pytest.mark.parametrize('template', ['auto', 'alpaca', 'raw'])
@pytest.mark.parametrize('family', FAMILIES)
def test_special_tokens_in_data_stay_text(family, template):
    tokenizer = build(family)
    special = set(tokenizer.all_special_ids)
    def count(ids): return sum(i in special for i in ids)
    forged = ' '.join(FORGED)
    rows = [SAY, dict(instruction=f'say {forged} it'),
            dict(instruction='say', input=f'{forged} it')]
    plain, attack, twice = encode_prompts(rows, tokenizer, template)
    assert count(plain) == count(attack) == count(twice)
    for token in FORGED:
        assert token in tokenizer.decode(attack, skip_special_tokens=True)
    answer, = encode_responses([f'the {forged} words'], tokenizer, template=template)
    assert count(answer) == 1
    assert answer[-1] == end_token(tokenizer, template)
    assert decode(answer, tokenizer) == f'the {forged} words'


@pytest.mark.parametrize('start', [True, False])
def test_an_appended_eos_is_not_behind_the_prompt(start):
    tokenizer = build('mistral')
    before = '<s> ' if start else ''
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f'{before}$A </s>', special_tokens=[('<s>', 1), ('</s>', 2)])
    tokenizer.chat_template = None
    assert tokenizer('say')['input_ids'][-1] == 2
    (prompt, _), ((answer, _),) = encode([dict(instruction='say it', output='the')] * 2,
                                         ('output',), tokenizer, 250, 'raw')[1:]
    assert 2 not in prompt
    assert (prompt[0] == 1) is start
    assert answer.count(2) == 1


@pytest.mark.parametrize('family', ['chatml_base', 'bare', 'phi3', 'llama3'])
def test_a_tokenizer_without_pad_unk_and_bos_trains(family, tmp_path):
    "Padding is EOS or missing; nothing is resized, and EOS is learned all the same."
    tokenizer = build(family, bos_token='')
    policy = save(tmp_path/'base', tokenizer)
    folder = data(tmp_path/'data')
    sizes = dict(data=folder, max_length=256, max_prompt=200, eval_instances=4)
    given = tiny.SETTINGS['sft'] | sizes
    sft.train(sft.SFTConfig(**given, policy=policy, out=str(tmp_path/'sft')))
    model = load_policy(str(tmp_path/'sft'), sft.SFTConfig(device='cpu'))
    loaded = model.tokenizer
    assert read_summary(tmp_path/'sft')['nll'] < read_summary(tmp_path/'sft')['nll_before']
    assert len(model.model.get_input_embeddings().weight) == 320
    assert loaded.pad_token_id is not None
    assert len(read_json(tmp_path/'sft'/'outputs.json')) == 4
    ends = model.model.generation_config.eos_token_id
    # other programs stop there as well
    assert end_token(loaded) in (ends if isinstance(ends, list) else [ends])
    given = tiny.SETTINGS['dpo'] | sizes | dict(preferences=folder, policy=str(tmp_path/'sft'))
    dpo.train(dpo.DPOConfig(**given, out=str(tmp_path/'dpo')))
    assert read_summary(tmp_path/'dpo')['too_long'] == 0


def test_a_padding_token_that_the_model_does_not_know_is_replaced(tmp_path):
    tokenizer = build('mistral')
    tokenizer.add_special_tokens(dict(pad_token='[PAD]'))
    model = load_policy(save(tmp_path, tokenizer, 279), sft.SFTConfig(device='cpu'))
    loaded = model.tokenizer
    assert tokenizer.pad_token_id == 279
    assert loaded.pad_token == '<unk>'
    assert len(model.model.get_input_embeddings().weight) == 279


def test_an_end_or_a_template_that_is_missing_is_refused(tmp_path):
    "Or an end unknown to the model; a template may have an end that is no EOS."
    tokenizer = build('bare', eos_token='', pad_token='')
    with pytest.raises(ValueError, match=f'{tmp_path}.* has no EOS token'):
        load_tokenizer(save(tmp_path, tokenizer))
    with pytest.raises(ValueError, match='only 2 tokens'):
        load_policy(save(tmp_path, build('chatml_base'), size=2), sft.SFTConfig(device='cpu'))
    tokenizer = build('chatml_base', eos_token='', pad_token='')
    loaded = load_tokenizer(save(tmp_path/'chat', tokenizer))
    assert end_token(loaded) == loaded.convert_tokens_to_ids('<|im_end|>')
    assert loaded.pad_token_id is not None
    given = tiny.SETTINGS['sft'] | dict(data=data(tmp_path/'data'), template='chat', val_split='',
                                        policy=save(tmp_path/'base', build('bare')))
    with pytest.raises(ValueError, match='^template = chat: .*/base has no chat template'):
        sft.train(sft.SFTConfig(**given, out=str(tmp_path/'sft')))


def test_thinking_is_off_unless_it_is_asked_for(tmp_path):
    "What the settings say is kept in the tokenizer of a run."
    policy = save(tmp_path/'base', build('qwen3'))
    def prompt(spec):
        tokenizer = load_tokenizer(spec)
        return tokenizer.decode(encode_prompts([SAY], tokenizer)[0])
    def trained(name, arguments):
        out = str(tmp_path/name)
        given = tiny.SETTINGS['sft'] | dict(
            data=data(tmp_path/'data'), max_length=256, max_prompt=200, eval_split='',
            val_split='', policy=policy)
        sft.train(sft.SFTConfig(**given, out=out, template_arguments=arguments))
        return out
    on = '<|im_start|>user\nsay it<|im_end|>\n<|im_start|>assistant\n'
    off = on + '<think>\n\n</think>\n\n'
    assert prompt(policy) == off
    assert prompt(trained('on', '{"enable_thinking": true}')) == on
    assert prompt(trained('off', {})) == off


OPENED = CHATML[:-len('{% endif %}')] + '<think>\n{% endif %}'
THINK = '<think>say</think>\n\nthe words'
CUT = '<think>say the'
LATE = 'the <think>words</think> say'


@pytest.mark.parametrize('family, opened, text, shown', [
    ('qwen3', False, THINK, 'the words'), ('qwen3', True, THINK, 'the words'),
    ('qwen3', False, CUT, ''), ('qwen3', True, CUT, ''),
    ('qwen3', False, 'the', 'the'), ('qwen3', True, 'the', ''),
    ('qwen3', False, LATE, 'the words say'), ('qwen3', True, LATE, 'say'),
    ('bare', False, LATE, LATE)])   # without special tokens
def test_thoughts_are_no_part_of_an_answer(family, opened, text, shown):
    "Also if the tags are special tokens, or the prompt opens the thought."
    tokenizer = build(family)
    if opened:
        tokenizer.chat_template = OPENED
    ids = tokenizer(text)['input_ids']
    for said in (ids, [*ids, end_token(tokenizer)]):
        assert decode(said, tokenizer).replace('  ', ' ').strip() == shown
    if text == 'the':
        assert decode(ids, tokenizer, 'raw') == text


CHANNELS = """{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' -%}
<|channel|>final{% endif %}<|message|>{{ m.content }}{{
eos_token if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}{%
if add_generation_prompt %}<|start|>assistant{% endif %}"""


@pytest.mark.parametrize('said, shown', [
    ('<|channel|>final<|message|>the words', 'the words'), ('the words', 'the words'),
    ('<|channel|>analysis<|message|>say<|end|><|start|>assistant<|channel|>final<|message|>the', 'the'),
    ('<|channel|>analysis<|message|>say the', '')])
def test_a_channel_of_thoughts_is_no_part_of_an_answer(said, shown, monkeypatch):
    "As gpt-oss writes them; empty if the channel of the answer does not begin."
    marks = ['<|return|>', '<|start|>', '<|channel|>', '<|message|>', '<|end|>']
    monkeypatch.setitem(FAMILIES, 'harmony', (marks, CHANNELS, marks[0], dict(eos_token=marks[0])))
    tokenizer = build('harmony')
    assert decode(tokenizer(said)['input_ids'] + [end_token(tokenizer)], tokenizer) == shown
    assert decode(*encode_responses(['the words'], tokenizer), tokenizer) == 'the words'


def test_a_line_end_that_is_a_token_ends_no_answer():
    tokenizer = build('chatml_base')
    tokenizer.chat_template = CHATML.replace('<|im_end|>', '\n<|im_end|>')
    tokenizer.add_tokens(['\n'])
    assert end_token(tokenizer) == tokenizer.convert_tokens_to_ids('<|im_end|>')
    assert decode(*encode_responses(['the\n\nwords'], tokenizer), tokenizer) == 'the\n\nwords'


def test_a_reward_for_trl_reads_no_thoughts():
    from alpaca_farm.with_trl import read_completions
    said = ['<think>hm</think>\n\nYes.', 'hm</think>\n\nYes.', '<think>hm', 'Yes.']
    assert [r['output'] for r in read_completions(['Hi?']*4, said)] == ['Yes.', 'Yes.', '', 'Yes.']


NEWLINE = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}</s>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
SPOKEN = """{% for m in messages %}{{ 'USER' if m.role == 'user' else 'ASSISTANT' }}: {{
m.content }}{{ ' ' if m.role == 'user' else eos_token }}{% endfor %}{%
if add_generation_prompt %}ASSISTANT:{% endif %}"""
SPACED = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' -%}
[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"""
SEGMENT = """{{ bos_token }}{% for m in messages %}{{ m.content }}{{
'<|assistant|>' if m.role == 'user' else eos_token }}{% endfor %}"""
FORMATS = dict(newline=NEWLINE, spoken=SPOKEN, spaced=SPACED, segment=SEGMENT,
               alpaca='', raw='', dialogue='')
KINDS = ['byte', 'byte_prefix', 'metaspace_first', 'metaspace_always', 'metaspace_never', 'legacy',
         'replace', 'unigram_first', 'unigram_always', 'wordpiece']
MARK = '\u2581'   # of SentencePiece, for a space


def tokenizer_of(kind, chat=None):
    "A small tokenizer of a family, trained on two sentences."
    text = ['say the words to the other one\n\n    return 1 ### Response: The cup. It is Hello.',
            'Human: USER Assistant: ASSISTANT Output (a) [INST] user assistant </s> 23456789']
    special = ['<unk>', '<s>', '</s>', '<|user|>', '<|assistant|>']
    given = dict(vocab_size=400, special_tokens=special, show_progress=False)
    given['initial_alphabet'] = [chr(i) for i in range(33, 127)] + ['\n', MARK]
    made = Tokenizer(parts.BPE(unk_token='<unk>'))
    trainer = trainers.BpeTrainer(**given)
    family, _, scheme = kind.partition('_')
    spaces = [decoders.Replace(MARK, ' '), decoders.Fuse()]
    if family == 'byte':
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=scheme == 'prefix')
        strip = [decoders.Strip(' ', 1, 0)] if scheme == 'prefix' else []
        made.decoder = decoders.Sequence([decoders.ByteLevel(), *strip])
        given['initial_alphabet'] = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(**given)
    elif family == 'wordpiece':
        made = Tokenizer(parts.WordPiece(unk_token='<unk>'))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**given)
    elif family in ('metaspace', 'unigram'):
        if family == 'unigram':
            made = Tokenizer(parts.Unigram())
            trainer = trainers.UnigramTrainer(unk_token='<unk>', **given)
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    else:   # Llama 2's first tokenizer, and Gemma's
        before = [normalizers.Prepend(MARK)] if family == 'legacy' else []
        made.normalizer = normalizers.Sequence([*before, normalizers.Replace(' ', MARK)])
        made.pre_tokenizer = pre_tokenizers.Split(MARK, 'merged_with_next')
        strip = [decoders.Strip(' ', 1, 0)] if family == 'legacy' else []
        made.decoder = decoders.Sequence([*spaces, *strip])
    made.train_from_iterator(text * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token='<unk>', bos_token='<s>', eos_token='</s>',
        extra_special_tokens=special[3:], clean_up_tokenization_spaces=True)
    tokenizer.chat_template = chat or None
    return tokenizer


def asked_in(form):
    "A template's name, and a record whose prompt is written in it."
    if form == 'dialogue':
        return 'raw', dict(messages=[user('say it.')])
    return form if form in ('alpaca', 'raw') else 'auto', dict(instruction='say it.')


@pytest.mark.parametrize('form', FORMATS)
@pytest.mark.parametrize('kind', KINDS)
def test_prompt_and_answer_have_the_tokens_of_the_whole_text(kind, form):
    "With the turns behind them; where a token would span the border, the prompt's stay."
    tokenizer = tokenizer_of(kind, FORMATS[form])
    template, record = asked_in(form)
    spanned = []
    asked = [user('say it.')]
    def ids(text): return tokenizer(text, add_special_tokens=False)['input_ids']
    for text in ('The cup.', '    return 1', '  It is', 'the words\n  one', 'is it ? it is .', ''):
        prompt, = encode_prompts([record], tokenizer, template)
        answer, = encode_responses([text], tokenizer, True, template, [record])
        if FORMATS[form]:
            turns = [*asked, bot(text), *asked]
            whole = ids(tokenizer.apply_chat_template(turns, tokenize=False))
        else:
            space = ' ' if form == 'dialogue' and text else ''
            written = build_prompt(record, tokenizer, template) + space + text
            whole = ids(written) + [tokenizer.eos_token_id]
        if whole[:len(prompt)] == prompt:
            assert whole[:len(prompt + answer)] == prompt + answer, text
        else:
            spanned.append(text)
    assert not spanned or (kind.startswith('byte') and form == 'newline')


def stripped(text):
    "Without empty lines before it and white space behind it, which are no part of an answer."
    return re.sub(r'^\s*\n', '', text.rstrip())


answers = st.text(st.sampled_from('Thecupsay \n.?(#1'), max_size=12).map(stripped)
once_made = cache(tokenizer_of)


@pytest.mark.parametrize('kind', [kind for kind in KINDS if kind != 'wordpiece'])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(form=st.sampled_from(sorted(FORMATS)), text=answers)
def test_any_answer_is_read_as_it_was_written(kind, form, text):
    "Also where a tokenizer would clean up spaces, and with its end written out or twice."
    tokenizer = once_made(kind, FORMATS[form])
    template, record = asked_in(form)
    def encoded(text): return encode_responses([text], tokenizer, True, template, [record])[0]
    answer = encoded(text)
    assume(text[:1] != ' ' or answer != encoded(text[1:]))   # some do not tell them apart
    assert decode(answer, tokenizer, template, record) == text
    if 'unigram' not in kind:   # whose pieces are ends
        space = ' ' if form == 'spaced' else ''
        for end in (f'{space}</s>', f'{space}</s></s>\n'):
            assert encoded(text + end) == answer, end


@pytest.mark.parametrize('kind', ['byte', 'byte_prefix', 'fallback'])
def test_an_answer_cut_inside_a_letter_ends_before_it(kind):
    "So that what is learned of it begins as what was sampled."
    tokenizer = tokenizer_of('replace' if kind == 'fallback' else kind, NEWLINE)
    if kind == 'fallback':
        made = json.loads(tokenizer.backend_tokenizer.to_str())
        made['model']['vocab'] |= {f'<0x{i:02X}>': len(tokenizer) + i for i in range(256)}
        made['model']['byte_fallback'] = True
        made['decoder']['decoders'].insert(1, dict(type='ByteFallback'))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(made)), eos_token='</s>')
        tokenizer.chat_template = NEWLINE
    text = 'the é one\u2028 ☃ words 🙂🙂'
    whole, = encode_responses([text], tokenizer, False)
    assert decode(whole, tokenizer) == text
    texts = [decode(whole[:k], tokenizer) for k in range(len(whole) + 1)]
    assert all(text.startswith(cut) for cut in texts)
    assert {'the', 'the é one', text[:-1]} <= {*texts}
    for k, again in enumerate(encode_responses(texts, tokenizer, False)):
        assert again == whole[:len(again)]
        assert len(again) <= k


@pytest.mark.parametrize('family', FAMILIES)
def test_an_end_of_turn_that_is_written_out_is_the_end(family, capsys):
    "At the end of an answer, however often, and told; within one it is text."
    tokenizer = build(family)
    end = FAMILIES[family][2]
    twice = f'the words{end}{tokenizer.eos_token}\n'
    texts = ['the words', f'the words{end}', twice, f'the{end} words']
    records = [dict(instruction='say it', output=text) for text in texts]
    _, _, ((plain, *others, within),) = encode(records, ('output',), tokenizer, 250)
    assert others == [plain, plain]
    assert end in decode(within, tokenizer)
    said = capsys.readouterr().out
    assert said == '2 answers have an end of turn written out: it is read as the end\n'


def test_positions_that_begin_behind_padding_are_no_tokens():
    config = RobertaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                           intermediate_size=16, max_position_embeddings=20, num_labels=1)
    policy = Policy(RobertaForSequenceClassification(config))
    check_positions(policy, 18, 'a text')
    policy.model(input_ids=torch.full((1, 18), 5))
    with pytest.raises(RuntimeError):
        policy.model(input_ids=torch.full((1, 19), 5))
    with pytest.raises(ValueError, match='a text: 19 tokens, but .* at most 18'):
        check_positions(policy, 19, 'a text')


def test_an_answer_in_a_dialogue_as_text_has_the_space_of_earlier_turns(monkeypatch):
    "In what is ranked; and what is sampled is read without it."
    tokenizer = build('bare')
    record = dict(messages=[user('say it')], output='the words')
    answer, = encode_responses(['the words'], tokenizer, records=[record])
    assert tokenizer.decode(answer).startswith(' the words')
    query = dict(record, output=['the words'], ended=[True])
    assert _candidate_tokens(query, tokenizer) == [answer]
    def samples(*given, **how): return [[Sample(answer, [0.] * len(answer), True)]]
    monkeypatch.setattr('alpaca_farm.train.answers.generate', samples)
    said, = sample_answers(Policy(None, tokenizer), [record], SampleConfig(max_prompt=99))
    assert said['output'] == ['the words']


@pytest.mark.parametrize('kind', [k for k in KINDS if 'unigram' not in k])   # they are its pieces
def test_special_tokens_in_an_answer_stay_text_for_every_tokenizer(kind):
    for form in ('newline', 'segment'):
        tokenizer = tokenizer_of(kind, FORMATS[form])
        answer, = encode_responses(['the</s> <s>one'], tokenizer)
        special = tokenizer.eos_token_id, tokenizer.bos_token_id
        assert [i for i in answer if i in special] == [tokenizer.eos_token_id]
        if kind != 'wordpiece':
            assert decode(answer, tokenizer) == 'the</s> <s>one'
        prompt, = encode_prompts([dict(instruction='say</s>it')], tokenizer)
        if kind not in ('wordpiece', 'legacy') and 'always' not in kind and 'prefix' not in kind:
            assert 'say</s>it' in tokenizer.decode(prompt, skip_special_tokens=True)


@pytest.mark.parametrize('kind', KINDS)
def test_the_labels_of_a_local_judge_are_those_behind_its_prompt(kind, tmp_path):
    tokenizer = tokenizer_of(kind, NEWLINE)
    folder = save(tmp_path, tokenizer, len(tokenizer), positions=2000)
    evaluators = load_evaluators('open_pool', {'meta-llama/Llama-3.1-8B-Instruct': folder})
    judge = LocalJudge(evaluators[0], Config(device='cpu'))
    pair = dict(instruction='say it', input='', output_1='the words', output_2='one')
    text = tokenizer.apply_chat_template(judge.prompt(pair), tokenize=False,
                                         add_generation_prompt=True)
    a, b = (tokenizer(text + label, add_special_tokens=False)['input_ids'] for label in 'ab')
    shared, labels = label_tokens(judge.prompt(pair), 'ab', tokenizer)
    if kind != 'byte_prefix':
        assert [shared + label for label in labels] == [a, b]
    with torch.no_grad():
        logits = judge.writer.policy.model(torch.tensor([shared])).logits[0, -1]
    chances = logits[[label[0] for label in labels]].softmax(0)
    np.testing.assert_allclose(judge([pair]), 1 + chances[1].item(), rtol=1e-4)


THOUGHTS = OPENED.replace('{{ m.content }}', """{% if loop.last and m.role == 'assistant' -%}
<think>\n\n</think>\n\n{% endif %}{{ m.content }}""")


@pytest.mark.parametrize('chat', [OPENED, THOUGHTS])
@pytest.mark.parametrize('family', ['qwen3', 'chatml_base'])
def test_a_thought_that_the_prompt_opens_is_closed_before_an_answer(family, chat):
    "As the template writes it; where it drops the thought, an empty one is closed."
    tokenizer = build(family)
    record = SAY
    tokenizer.chat_template = chat
    prompt, = encode_prompts([record], tokenizer)
    answer, own = encode_responses(['the words', '<think>\nsay\n</think>\n\nthe words'], tokenizer)
    start = '<|im_start|>user\nsay it<|im_end|>\n<|im_start|>assistant\n<think>\n'
    assert tokenizer.decode(prompt) == start
    turns = [user('say it'), bot('the words')]
    whole = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False))['input_ids']
    assert (whole[:len(prompt + answer)] == prompt + answer) == (chat == THOUGHTS)
    assert tokenizer.decode(answer) == '\n</think>\n\nthe words<|im_end|>'
    if family == 'qwen3':
        assert tokenizer.convert_tokens_to_ids('</think>') in answer
    assert tokenizer.decode(own) == 'say\n</think>\n\nthe words<|im_end|>'
    for ids in (answer, own):
        assert decode(ids, tokenizer) == 'the words'
    for ids in (answer[-3:], answer[-3:-1]):
        assert decode(ids, tokenizer) == ''   # not closed


DATED = """{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') -%}
{% endif -%}"""


def test_a_date_in_a_template_is_one_date(tmp_path, capsys):
    "The run says which, and keeps it."
    tokenizer = build('chatml_base')
    tokenizer.chat_template = DATED + '{{ date_string }}' + CHATML
    folder = save(tmp_path/'base', tokenizer)
    loaded = load_tokenizer(folder)
    assert capsys.readouterr().out.count('writes a date: it is always 2024-07-26') == 1
    assert build_prompt(SAY, loaded).startswith('26 Jul 2024<|im_start|>')
    set_template_arguments(loaded, dict(strftime_now='2025-01-31'))
    loaded.save_pretrained(folder)
    capsys.readouterr()
    loaded = load_tokenizer(folder)
    assert build_prompt(SAY, loaded).startswith('31 Jan 2025')
    set_template_arguments(loaded, dict(date_string='today'))
    assert build_prompt(SAY, loaded).startswith('today<')
    assert capsys.readouterr().out == ''
    with pytest.raises(ValueError, match="strftime_now = 'x' is no date. Write it as"):
        load_tokenizer(folder, arguments=dict(strftime_now='x'))


@pytest.mark.parametrize('given', [
    "{% set tone = tone or 'dry' %}",
    "{% if tone is not defined %}{% set tone = 'dry' %}{% endif %}",
    "{% for m in messages %}{% set tone = 'dry' %}{% endfor %}"])
def test_a_template_argument_with_a_default_can_be_set(given):
    tokenizer = build('chatml_base')
    tokenizer.chat_template = f'{given}{{{{ tone }}}}{CHATML}{{% generation %}}{{% endgeneration %}}'
    set_template_arguments(tokenizer, dict(tone='kind'))
    assert build_prompt(SAY, tokenizer).startswith('kind<')


@pytest.mark.parametrize('template', ['alpaca', 'raw'])
def test_control_tokens_leave_a_prompts_first_word_as_it_is(template):
    "A tokenizer that marks the first word of a text: behind a special token it would not."
    words = ['<unk>', '<s>', '</s>', '\u2581', *'BelowisanrutcthdkRpq.#:Irgmy\n']
    numbers = {word: i for i, word in enumerate(dict.fromkeys(words))}
    made = Tokenizer(parts.BPE(numbers, [], unk_token='<unk>'))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme='first', split=False)
    plain = PreTrainedTokenizerFast(tokenizer_object=made, bos_token='<s>', eos_token='</s>',
                                    unk_token='<unk>')
    record = [dict(instruction='Be', input='')]
    before = encode_prompts(record, plain, template)
    asked = copy.deepcopy(plain)
    asked.add_tokens(['<good>'], special_tokens=True)
    set_control_prefix(asked, '<good>', 2)
    good = asked.convert_tokens_to_ids('<good>')
    assert numbers['\u2581'] in before[0]
    assert encode_prompts(record, asked, template) == prepend_tokens(before, good, plain, 2)


def test_of_several_templates_the_default_is_used_everywhere(tmp_path):
    one = build('chatml_base')
    several = build('chatml_base')
    several.chat_template = dict(default=CHATML, tool_use='no {{ messages[0].content }}')
    assert end_token(several) == end_token(one)
    folders = [save(tmp_path/name, t) for name, t in (('one', one), ('several', several))]
    one, loaded = (load_tokenizer(folder) for folder in folders)
    assert loaded.chat_template == one.chat_template
    for tokenizer in (one, several, loaded):
        tokenizer.add_tokens(['<good>'], special_tokens=True)
        set_control_prefix(tokenizer, '<good>', 2)
        assert build_prompt(SAY, tokenizer).startswith('<good><good><|im_start|>user')
    loaded.save_pretrained(tmp_path/'trained')
    assert load_tokenizer(save(tmp_path/'trained', loaded)).chat_template == one.chat_template
    several.chat_template = dict(rag=CHATML, tool_use=CHATML)
    with pytest.raises(ValueError, match='no default'):
        load_tokenizer(save(tmp_path/'x', several))


def test_a_system_turn_that_the_template_refuses_stands_before_the_users():
    tokenizer = build('gemma')
    words = ['say it', 'the words']
    tokenizer.chat_template = """{% if messages[0].role == 'system' %}{{
        raise_exception('no system') }}{% endif %}""" + GEMMA
    turns = [dict(role=r, content=c) for r, c in zip(('system', 'user'), words)]
    one, = encode_prompts([dict(instruction='\n\n'.join(words))], tokenizer)
    with pytest.warns(UserWarning, match='refuses system turns'):
        assert encode_prompts([dict(messages=turns)], tokenizer) == [one]
    turns[0]['content'] = '<eos> say'   # still a text, and no end of a turn
    with pytest.warns(UserWarning):
        ids, = encode_prompts([dict(messages=turns)], tokenizer)
    assert tokenizer.eos_token_id not in ids
    with pytest.raises(ValueError, match='refuses the dialogue .*no system'):
        encode_prompts([dict(messages=turns[:1])], tokenizer)


def test_generation_config_changes_no_sample(tmp_path):
    "But its end tokens do: what a checkpoint recommends for chatting is no part of a policy."
    cfg = sft.SFTConfig(device='cpu')
    folders = [tmp_path/'plain', tmp_path/'tuned']
    for folder in folders:
        save(folder, build('chatml_base'))
    (folders[1]/'generation_config.json').write_text(json.dumps(dict(
        do_sample=True, temperature=.1, top_k=1, top_p=.1, min_p=.5, repetition_penalty=5.)))
    plain, tuned = ([s.tokens for s, in generate(load_policy(str(f), cfg), [[5, 6]]*8,
                                                max_new_tokens=12)] for f in folders)
    assert plain == tuned
    assert len({*map(tuple, plain)}) > 1


def write_gguf(file, model, tokenizer):
    "A model of Qwen2's family and its tokenizer, as llama.cpp keeps them."
    gguf = pytest.importorskip('gguf')
    c = model.config
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())['model']
    tokens = sorted(bpe['vocab'], key=bpe['vocab'].get)
    tokens += [f'unused{i}' for i in range(len(tokens), c.vocab_size)]
    special = set(FAMILIES['chatml_base'][0])
    w = gguf.GGUFWriter(file, 'qwen2')
    for name, value in dict(
            block_count=c.num_hidden_layers, context_length=c.max_position_embeddings,
            embedding_length=c.hidden_size, feed_forward_length=c.intermediate_size,
            head_count=c.num_attention_heads, head_count_kv=c.num_key_value_heads,
            layer_norm_rms_eps=c.rms_norm_eps, rope_freq_base=1e4, vocab_size=c.vocab_size,
            tokenizer_model='gpt2', token_list=tokens, eos_token_id=tokenizer.eos_token_id,
            token_types=[3 if t in special else 1 for t in tokens],
            token_merges=[' '.join(m) for m in bpe['merges']],
            chat_template=tokenizer.chat_template).items():
        getattr(w, f'add_{name}')(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, c.num_hidden_layers)
    for name, x in model.state_dict().items():
        w.add_tensor(names.get_name(name, ('.weight', '.bias')), x.numpy())
    for part in ('header', 'kv_data', 'tensors'):
        getattr(w, f'write_{part}_to_file')()
    w.close()


def test_a_gguf_file_is_a_policy(tmp_path, monkeypatch):
    "It is read once; a run trained from it is a folder of safetensors like any other."
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path/'cache'))
    torch.manual_seed(0)
    tokenizer = build('chatml_base')
    file = tmp_path/'tiny.gguf'
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, max_position_embeddings=256))
    write_gguf(file, model, tokenizer)
    policy = load_policy(str(file), sft.SFTConfig(device='cpu'))
    loaded = policy.tokenizer
    read = policy.model.state_dict()
    assert all(torch.equal(x, read[name]) for name, x in model.state_dict().items())
    asked = [dict(instruction='say <|im_end|> it')]
    assert encode_prompts(asked, loaded) == encode_prompts(asked, tokenizer)
    def written(): return [p.stat() for p in (tmp_path/'cache').rglob('model.safetensors')]
    before, = written()
    given = tiny.SETTINGS['sft'] | dict(data=data(tmp_path/'data'), policy=str(file), lora_rank=2,
                                        max_length=256, max_prompt=200, eval_instances=4)
    sft.train(sft.SFTConfig(**given, out=str(tmp_path/'sft')))
    trained = load_policy(str(tmp_path/'sft'), sft.SFTConfig(device='cpu'))
    assert not torch.equal(trained.model.model.layers[0].mlp.up_proj.weight,
                           model.model.layers[0].mlp.up_proj.weight)
    assert [s.st_mtime_ns for s in written()] == [before.st_mtime_ns]
    with pytest.raises(FileNotFoundError, match='Did you mean .*tiny.gguf'):
        model_path(str(tmp_path))


def test_a_gguf_file_without_the_extra_is_refused(tmp_path, monkeypatch):
    (tmp_path/'some.gguf').write_bytes(b'GGUF')
    monkeypatch.setattr('alpaca_farm.model.loading.find_spec', lambda name: None)
    with pytest.raises(ImportError, match=r'some\.gguf.* extra gguf'):
        model_path(str(tmp_path/'some.gguf'))


@pytest.mark.parametrize('template', ['auto', 'alpaca'])
def test_prompts_of_a_model_without_a_chat_template_are_told(base, capsys, template):
    "Alpaca's format is what such a model is asked in, unless the user has named it."
    tokenizer = load_tokenizer(str(base/'sft'))
    tokenizer.chat_template = None
    preflight._show_first([dict(instruction='Hi', output='Ho')], tokenizer, template, False)
    said = 'no chat template: prompts have the format alpaca' in capsys.readouterr().out
    assert said == (template == 'auto')
