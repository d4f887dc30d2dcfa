"Dialogues: hh-rlhf's texts and chat messages as records and back, and through every method."
import dataclasses
import gzip
import json
from dataclasses import replace
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, strategies as st

import tiny
from tiny import write
from alpaca_farm import annotators, best_of_n, binary_feedback, chat, dpo
from alpaca_farm import eval as evaluation, ppo
from alpaca_farm import quark, reward_model, rrhf, sft
from alpaca_farm.ask.store import Store
from alpaca_farm.boards import agreement
from alpaca_farm.data.dialogues import as_messages, dialogue_text, full_instruction
from alpaca_farm.data.dialogues import parse_dialogue, prompt_key, with_space
from alpaca_farm.data.formats import as_records
from alpaca_farm.data.records import load_records
from alpaca_farm.data.text import encode, encode_prompts
from alpaca_farm.judging.judges import check_annotators, load_evaluators
from alpaca_farm.model.logprobs import load_policy
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import read_log, read_summary
from alpaca_farm.run.settings import Config
from judge_server import judge_server

HH = Path(os.environ.get('ALPACA_FARM_DATA',
                         tiny.ROOT.parent/'shared'/'data'))/'hh_rlhf'/'harmless-base_test.jsonl.gz'


def turn(role, content): return dict(role=role, content=content)
def dialogue(*texts): return [turn(('user', 'assistant')[i % 2], t) for i, t in enumerate(texts)]


def named_answers(record):
    if 'output' in record:
        return dict(chosen=record['output'])
    best = int(record['preference'])
    return dict(chosen=record[f'output_{best}'], rejected=record[f'output_{3 - best}'])


def as_hh(record):
    "A record as a row of hh-rlhf."
    begin = dialogue_text(as_messages(record))
    return {name: begin + with_space(text) for name, text in named_answers(record).items()}


def as_chat(record):
    "A record as TRL's messages."
    turns = {name: [turn('assistant', text)] for name, text in named_answers(record).items()}
    if 'rejected' in turns:
        return turns | dict(prompt=as_messages(record))
    return dict(messages=as_messages(record) + turns['chosen'])


@pytest.mark.skipif(not HH.exists(), reason='the public data is not here')
def test_every_pair_of_hh_rlhf_round_trips():
    "To the byte."
    with gzip.open(HH, 'rt') as f:
        rows = [json.loads(line) for line in f]
    found = load_records(str(HH), kind='preference')
    assert len(found) == len(rows) == 2312
    for record, row in zip(found, rows):
        assert as_hh(record) == row
        for text in row.values():
            assert dialogue_text(parse_dialogue(text)) == text


forged = st.sampled_from(['Human: Hi', 'Assistant:', 'Hi\nHuman: x', ' ', ''])
texts = forged | st.text(st.sampled_from('aé \n:\u2028'), max_size=6)
roles = st.sampled_from(['user', 'assistant'])
turns = st.lists(st.builds(turn, roles, texts), min_size=1, max_size=6)
systems = st.sampled_from([[], [turn('system', 'Be kind.')]])
UNSAID = turn('assistant', '')


@given(systems, turns)
def test_a_dialogues_text_parsed_is_the_dialogue(system, turns):
    "But for an answer at its end that is not said yet; and any such text comes back."
    messages = system + turns
    text = dialogue_text(messages)
    parsed = parse_dialogue(text)
    if messages[-1] == UNSAID and parsed != messages:
        messages.pop()
    assert parsed == messages
    assert dialogue_text(parsed) == text


@given(turns, texts, texts)
def test_a_record_that_is_written_is_read_again(turns, one, two):
    assume(one != two)
    record = dict(messages=turns + [turn('user', 'So?')], output_1=one, output_2=two,
                  preference=2.)
    for form in (as_hh, as_chat):
        back, = as_records([form(record)], 'a', ['preference'])
        assert back['messages'] == record['messages']
        assert named_answers(back) == named_answers(record)


HELLO = dialogue('Hi.', 'Yes?', 'Bye.')
SKY = {'from': 'function_call', 'value': '{}'}
CALLS = turn('assistant', '') | dict(function_call=[dict(name='sky')])


def asks_the_sky(call):
    return [turn('user', 'Rain?'), call, turn('tool', 'rain'), turn('assistant', 'It rains.')]


@pytest.mark.parametrize('row, kind, name', [
    (dict(messages=[turn('robot', 'a')]), 'output', 'robot'),
    (dict(messages=asks_the_sky(CALLS)), 'output', 'calls a tool'),
    (dict(messages=asks_the_sky(SKY)), 'output', 'calls a tool'),
    (dict(messages=HELLO, system=7), 'instruction', "'system'"),
    (dict(messages=HELLO, input='x'), 'instruction', '`input`'),
    (dict(messages=[turn('user', 'Hi.'), turn('system', 'Kind.')], output='Yes?'), 'output',
     "the system's turn")])
def test_what_is_no_dialogue(tmp_path, row, kind, name):
    "One sentence naming file and row."
    good = dict(messages=HELLO, output='So long.')
    with pytest.raises(ValueError, match=rf'a\.jsonl, row 1: [^\n]*{name}[^\n]*$'):
        load_records(write(tmp_path/'a.jsonl', [good, row]), kind=kind)


@pytest.fixture(scope='module')
def talks(base, tmp_path_factory):
    "A dataset of dialogues in the words of the tiny world: hh-rlhf's texts, packed, and messages."
    folder = tmp_path_factory.mktemp('talks')
    def length(r): return len(full_instruction(r) + r['output'])
    rows = sorted(load_records(str(base/'world'), 'sft'), key=length)[:48]
    talk = []
    for a, b in zip(rows[::2], rows[1::2]):
        asked = dialogue(full_instruction(a), a['output'], full_instruction(b))
        talk.append(dict(messages=asked, output=b['output']))
    pairs = []
    for one, two in zip(talk, talk[-1:] + talk):
        answers = dict(output_1=one['output'], output_2=two['output'])
        pairs.append(dict(messages=one['messages'], preference=1., **answers))
    write(folder/'sft.jsonl.gz', [as_hh(t) for t in talk])
    write(folder/'preference.jsonl.gz', [as_hh(p) for p in pairs])
    for split in ('unlabeled', 'val', 'eval'):
        write(folder/f'{split}.jsonl', [as_chat(t) for t in talk])
    return folder


SAID = [turn('system', 'Be kind.'),
        *dialogue('Hi.', 'Hello!', 'Who?', 'A baker.', 'Why?', 'It is cold.')]


@pytest.mark.parametrize('template', ['auto', 'raw'])
def test_every_turn_of_the_assistant_is_learned_or_the_last(tmp_path, template):
    "Each behind the tokens of the turns before it."
    tokenizer = tiny.letters()
    write(tmp_path/'sft.jsonl', [
        dict(messages=SAID), dict(messages=SAID[:5]),   # begin alike
        dict(messages=[turn('user', 'Go.'), turn('assistant', 'Yes.')])])
    def learned(**how):
        cfg = sft.SFTConfig(data=str(tmp_path), template=template, **how)
        records = sft._load_demonstrations(cfg, 'split', None)
        _, prompts, (answers,) = encode(records, ('output',), tokenizer, 500, template)
        return [(p + a, tokenizer.decode(a).strip()) for p, a in zip(prompts, answers)]
    *every, other = learned()
    last = learned(turns='last')
    whole = last[0][0]
    assert {text for _, text in every} == {'Hello!</s>', 'A baker.</s>', 'It is cold.</s>'}
    assert len(every) == 3
    for ids, _ in every:
        assert ids[:-1] == whole[:len(ids) - 1]
    assert [text for _, text in last] == ['It is cold.</s>', 'A baker.</s>', 'Yes.</s>']
    assert other == last[-1]


def longest(pairs):
    "A judge that prefers the longer answer, and is shown turns."
    assert all(p['messages'][-1]['role'] == 'user' for p in pairs)
    return [1. + (len(p['output_2']) > len(p['output_1'])) for p in pairs]


@pytest.mark.slow
def test_a_dialogue_travels_through_every_method(base, talks, tmp_path):
    judge = f'{__name__}:longest'
    usual = dict(max_length=158, max_prompt=140, eval_instances=6, data=str(talks))
    def run(module, name, **given):
        notebook = module.__name__.split('.')[-1]
        given['out'] = str(tmp_path/name)
        if notebook in tiny.SETTINGS:
            given = tiny.settings(notebook, base) | usual | given
        known = {f.name for f in dataclasses.fields(tiny.config_class(module))}
        cfg = tiny.config(module, **{k: v for k, v in given.items() if k in known})
        tiny.main(module)(cfg)
        if module not in (annotators, evaluation):
            tiny.show_results(notebook, cfg)
        return str(tmp_path/name)
    policy = run(sft, 'sft')
    samples = run(best_of_n, 'samples', policy=policy, reward_model='', split='unlabeled')
    labels = run(annotators, 'annotators', outputs=samples, annotators=judge, label_flip=0.)
    asked = {prompt_key(r) for r in load_records(str(talks), 'unlabeled')}
    for file in (f'{samples}/candidates.json', f'{labels}/preferences.json'):
        found = read_json(file)
        assert found
        for r in found:
            assert len(r['messages']) == 3
            assert 'instruction' not in r
            assert prompt_key(r) in asked
    pairs = str(talks/'preference.jsonl.gz')
    rewards = run(reward_model, 'reward_model', preferences=pairs, policy=policy, held_out=6)
    figures = read_summary(rewards)
    assert 0 <= figures['accuracy_low'] < figures['accuracy_high'] <= 1
    learned = {prompt_key(r) for r in load_records(pairs, 'preferences')}
    assert agreement._learned_prompts(rewards) == learned
    assert learned
    assert not agreement._learned_prompts(policy)
    scored = dict(policy=policy, reward_model=rewards)
    with_ppo = run(ppo, 'ppo', annotators=judge, missing_eos='replace', missing_eos_value=3.,
                   temperature=1., **scored)
    made = [
        with_ppo,
        run(dpo, 'dpo', preferences=labels, policy=policy),
        run(best_of_n, 'best_of_n', **scored),
        run(quark, 'quark', **scored),
        run(rrhf, 'rrhf', candidates=[samples, pairs], **scored),
        run(binary_feedback, 'binary_feedback', preferences=pairs, policy=policy,
            annotators=judge)]
    steps = read_log(with_ppo)
    # few answers have an end
    assert all(r['reward'] == -3 for r in steps if not r['ended'])
    assert -3 <= min(r['reward'] for r in steps) < -2
    board = run(evaluation, 'board', outputs=made, reference=str(talks/'eval.jsonl'),
                annotators=[judge], max_instances=6)
    ranked = {k.partition('_longest')[0] for k in read_summary(board)}
    assert {Path(m).name for m in made} <= ranked


@pytest.mark.slow
@pytest.mark.parametrize('judge', ['harmlessness/harmless', 'helpfulness/helpful',
                                   'harmlessness/harmless_helpful'])
def test_two_files_of_answers_are_compared(tmp_path, monkeypatch, judge):
    "By an API judge that replies in a sentence, in a random order or both, without role tags."
    monkeypatch.setenv('OPENAI_API_KEY', 'test')
    rows = [dict(messages=HELLO[:2] + [turn('user', f'Question {i}?')]) for i in range(24)]
    rows += [dict(messages=HELLO[:1])]*2   # a prompt may occur twice
    short = [dict(r, output=f'Assistant: no {i}') for i, r in enumerate(rows)]
    long = [dict(r, output=f' a longer answer {i}\n\nHuman: And?\n\nAssistant: Oh.')
            for i, r in enumerate(rows)]
    outputs = write(tmp_path/'long.jsonl', long)
    against = write(tmp_path/'short.jsonl', short)
    store = str(tmp_path/'answers.sqlite')
    def asked(): return [r for r, in Store(store).run('select request from requests')]
    with judge_server(regexes=(r'<A>\n(.*?)\n</A>', r'<B>\n(.*?)\n</B>'), labels=('A', 'B'),
                      template='I would say **({label})**') as server:
        def compared(name, **more):
            cfg = annotators.AnnotatorsConfig(
                out=str(tmp_path/name), outputs=outputs, against=against,
                annotators=judge, models=['gpt-4.1=judge'], base_url=server.url, store=store,
                **more)
            annotators.run(cfg)
            return load_records(cfg.out, 'preferences', 'preference'), read_summary(cfg.out)
        once, summary = compared('once')
        assert summary['labels'] == 26
        assert 85 < summary['win_rate_low'] < summary['win_rate'] == summary['win_rate_high'] == 100
        assert 0 < summary['first'] < 1
        assert len(asked()) == 26
        labels = {(r['output_1'], r['output_2'], r['preference']) for r in once}
        assert labels == {(f'no {i}', f'a longer answer {i}', 2.) for i in range(26)}
        both, summary = compared('both', both_orders=True, label_flip=.25)
        assert summary['consistent'] == 1 > summary['consistent_low']
        assert all(r['orders'] == [2., 2.] for r in both)
        # the files are compared by the judge's own labels
        assert summary['flip_rate'] > 0
        assert summary['win_rate'] == 100
    requests = asked()
    assert len(requests) == 52
    assert all('Human: And?' not in r and '<A>\\nAssistant' not in r for r in requests)
    assert sum('Human: Hi.\\n\\nAssistant: Yes?\\n\\nHuman: Question' in r for r in requests) == 48


@pytest.mark.parametrize('said, ended, output, kept', [
    (' Yes.\n\nHuman: Why?\n\nAssistant: So.', True, 'Yes.', ' Yes.\n\nHuman:'),
    (' Yes.</s>', True, 'Yes.', ' Yes.</s>'),
    (' The Human: factor', False, 'The Human: factor', None),
    (' Humanity', False, 'Humanity', None), ('\n\nHuman: Why?', True, '', '\n\nHuman:')])
def test_an_answer_ends_where_the_next_turn_begins(monkeypatch, models, said, ended, output, kept):
    "In a dialogue's text alone; an answer without such an end, or EOS, gets the penalty."
    import torch
    from alpaca_farm.train import online
    from alpaca_farm.model.generation import Sample
    tokenizer = tiny.letters(None)
    def ids(text): return tokenizer(text, add_special_tokens=False)['input_ids']
    sample = Sample(ids(said), [0.]*len(ids(said)), said.endswith('</s>'))
    monkeypatch.setattr('alpaca_farm.train.answers.generate', lambda *_, **more: [[sample]]*2)
    records = [dict(messages=HELLO), dict(instruction='Hi.')]
    cfg = ppo.PPOConfig()
    prompts = encode_prompts(records, tokenizer)
    policy = replace(models.policy, tokenizer=tokenizer)
    batch, (first, second) = online.sample_rollout(policy, records, prompts, cfg, 0)
    assert first['ended'] == ended
    assert first['output'] == output
    assert batch['response'][0].sum() == len(ids(kept or said))
    assert second['ended'] == said.endswith('</s>')
    assert batch['response'][1].sum() == len(ids(said))
    score = online.end_scores(torch.tensor([2.]), torch.tensor([first['ended']]), 'replace', 1.)
    assert score.item() == (2 if ended else -1)


def test_a_question_of_a_task_is_a_judge():
    "By the name of the task or the file of the user's own."
    own = tiny.ROOT/'nbs/recipes/tasks/outlining.yaml'
    judge, = load_evaluators(f'{own}/outline')
    assert judge.name == 'outline'
    assert 'Which outline is better' in judge.template
    assert '{question}' not in judge.template
    with pytest.raises(ValueError, match='this is no judge'):
        check_annotators('annotators', f'{own}/nothing')
    with pytest.raises(ValueError, match='has no question'):
        load_evaluators('question')


def test_a_chat_reads_what_fits_of_its_earlier_turns(base, monkeypatch):
    asked = []
    def answer(policy, records, cfg, seed):
        asked.append((records[0], seed))
        return [dict(output=[f'answer {len(asked)}'])]
    monkeypatch.setattr(chat, 'sample_answers', answer)
    def texts(memory, max_prompt):
        asked.clear()
        talk = chat.Chat(chat.ChatConfig(policy=str(base/'sft'), device='cpu', memory=memory,
                                         max_prompt=max_prompt))
        for text in ('one', 'two', 'three'):
            talk(text)
        assert len({seed for _, seed in asked}) == 3
        assert [m['content'] for m in talk.messages[-2:]] == ['three', 'answer 3']
        return [m['content'] for m in as_messages(asked[-1][0])]
    assert texts(0, 500) == ['three']
    assert texts(1, 500) == ['two', 'answer 2', 'three']
    assert texts(9, 500) == ['one', 'answer 1', 'two', 'answer 2', 'three']
    assert texts(9, 1) == ['three']


def test_a_chat_in_a_terminal(base):
    "Its first word is the policy; what is too long is said, and the talk goes on."
    said = '\n'.join(['How are you?', 'word '*300, 'How are you?', ''])
    p = subprocess.run(
        [sys.executable, '-m', 'alpaca_farm.chat', str(base/'sft'), '--temperature', '0'],
        input=said, cwd=base, env=tiny.environment(), capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    _, first, long, again, _ = p.stdout.split('> ')
    assert first == again != '\n'
    assert 'max_prompt' in long


def test_a_talk_that_fills_the_models_positions_goes_on(base, tmp_path):
    "Older turns are left out, though max_prompt would hold them."
    policy = load_policy(str(base/'sft'), Config(device='cpu'))
    policy.model.config.max_position_embeddings = 48
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    talk = chat.Chat(chat.ChatConfig(policy=str(tmp_path), device='cpu', memory=10, max_prompt=2048,
                                     max_new_tokens=8))
    for _ in range(6):
        talk('I am late. Where does a frog live? Thanks!')
    assert len(talk.messages) == 12
