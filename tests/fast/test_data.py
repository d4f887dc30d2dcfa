"""The same records from every format; what is damaged or odd is told by file, row and field."""
import csv
import datetime
import gzip
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import published
import tiny
from alpaca_farm.best_of_n import choose_best, score_candidates
from alpaca_farm.data.dialogues import as_messages, prompt_key
from alpaca_farm.data.formats import CODES, FIELDS, READERS
from alpaca_farm.data.records import _read_candidates, check_records, distinct, each_answer
from alpaca_farm.data.records import load_records, read_rows, select_candidates
from alpaca_farm.data.text import answer_batches, collate, encode
from alpaca_farm.judging.judges import read_recorded, RecordedLabels
from alpaca_farm.judging.label_files import load_sets, recorded_verdicts
from alpaca_farm.look_at_data import find_odd, read_parts
from alpaca_farm.reward_model import margins
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.run.runs import Run
from alpaca_farm.train.labelled import hold_out
from published import KINDS, rated, RED, safe, vote, WRONG
from tiny import write

ROWS = [dict(instruction=f'Say "{i}",\nplease: café \u2028 {i}.', input='' if i % 2
             else f'line\n{i}', output=f' {i}, ok\t', extra=str(i))
        for i in range(5)]
PAIRS = [dict(instruction=f'Say {i}.', input='', output_1='a', output_2=f'b{i}',
              preference=1. + i/4) for i in range(5)]
ANY = 'preference', 'pair', 'candidates', 'output'


def as_csv(rows, **more):
    f = io.StringIO()
    table = csv.DictWriter(f, rows[0], **more)
    table.writeheader()
    table.writerows(rows)
    return f.getvalue().encode()


def as_tsv(rows): return as_csv(rows, delimiter='\t')
def as_lines(rows): return '\n'.join(json.dumps(r) for r in rows).encode()
def as_json(rows): return json.dumps(rows, indent=1).encode()


def as_parquet(rows):
    f = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f)
    return f.getvalue()


def packed(form):
    "The same format, gzipped."
    return lambda rows: gzip.compress(form(rows), mtime=0)


FORMATS = dict(json=as_json, jsonl=as_lines, csv=as_csv, tsv=as_tsv, parquet=as_parquet)
for name, form in [*FORMATS.items()]:
    FORMATS[f'{name}.gz'] = packed(form)


def put(path, rows):
    "Write records in the format that the file's name says; returns the path as text."
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = path.name.partition('.')[2]
    path.write_bytes(FORMATS[suffix](rows))
    return str(path)


def preferences(path, **more):
    return [r['preference'] for r in load_records(str(path), kind='preference', **more)]


def votes(path):
    "The votes on each pair of a file of labels, by name."
    pairs, = load_sets([str(path)]).values()
    return [p['votes'] for p in pairs]


def recorded_judge(path): return recorded_verdicts(path, '', {})


def fails(name, *parts):
    "A refusal in one line that names the file, and then each of the parts."
    pattern = '.*'.join([re.escape(name), *parts])
    return pytest.raises((ValueError, FileNotFoundError), match=f'{pattern}[^\n]*$')


# what is written is read

often = settings(max_examples=150, deadline=None, derandomize=True, database=None)
texts = st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\r\0'), max_size=8)
asked = dict(instruction=texts.filter(str.strip), input=texts)
written = st.fixed_dictionaries(asked | dict(output=texts, extra=st.sampled_from('7a')))
labelled_pair = st.fixed_dictionaries(asked | dict(
    output_1=texts.map('a{}'.format), output_2=texts.map('b{}'.format),
    preference=st.sampled_from([1., 1.25, 1.5, 2.])))


@pytest.fixture(scope='session')
def folder(tmp_path_factory): return tmp_path_factory.mktemp('generated')


@often
@given(kind=st.sampled_from(['output', 'preference']), suffix=st.sampled_from(sorted(FORMATS)),
       data=st.data())
def test_every_format_gives_the_same_records(folder, kind, suffix, data):
    "From the file and from its folder, all of them or the first."
    record = written if kind == 'output' else labelled_pair
    rows = data.draw(st.lists(record, min_size=1, max_size=4, unique_by=repr))
    file = put(folder/suffix/f'sft.{suffix}', rows)
    for spec in (str(folder/suffix), file):
        assert load_records(spec, 'sft', kind) == rows
        assert load_records(spec, 'sft', kind, 2) == rows[:2]


LONG = [dict(instruction='Say it.', input='', output='x'*200_000)]
BREAKS = [dict(instruction='one\u2028two\x85three', input='', output='a\u2029b')]
AS_WRITTEN = {   # by other programs: a file's content, and the records in it
    'list.jsonl': (as_json(ROWS), ROWS),
    'breaks.jsonl': (json.dumps(BREAKS[0], ensure_ascii=False).encode() + b'\n', BREAKS),
    'empty_rows.csv': (as_csv([*ROWS, dict.fromkeys(ROWS[0], ''), {}]), ROWS),
    'mark.csv': (b'\xef\xbb\xbf' + as_csv(ROWS), ROWS),
    'windows.jsonl': (as_lines(ROWS).replace(b'\n', b'\r\n') + b'\r\n\r\n', ROWS),
    'long.csv': (as_csv(LONG), LONG),
    'a.ndjson': (as_lines(ROWS), ROWS),
    'a.JSONL.GZ': (gzip.compress(as_lines(ROWS)), ROWS)}


@pytest.mark.parametrize('name', AS_WRITTEN)
def test_files_as_other_programs_write_them(tmp_path, name):
    "Line separators in a text, a byte order mark, line ends of Windows, a long field."
    content, rows = AS_WRITTEN[name]
    (tmp_path/name).write_bytes(content)
    assert load_records(str(tmp_path/name), kind='output') == rows


def test_a_saved_dataset(tmp_path):
    from datasets import Dataset, DatasetDict
    train = Dataset.from_list(PAIRS[:3])
    test = Dataset.from_list(PAIRS[3:])
    train.save_to_disk(tmp_path/'one')
    DatasetDict(train=train, test=test).save_to_disk(tmp_path/'both')
    assert load_records(str(tmp_path/'one'), 'any', 'preference') == PAIRS[:3]
    for split, rows in dict(train=PAIRS[:3], preferences=PAIRS[:3], eval=PAIRS[3:]).items():
        assert load_records(str(tmp_path/'both'), split, 'preference') == rows
    with fails('val.json'):
        load_records(str(tmp_path/'both'), 'val')
    next((tmp_path/'one').glob('*.arrow')).write_bytes(b'nothing')
    with fails('one'):
        load_records(str(tmp_path/'one'), '', 'preference')


@pytest.mark.parametrize('inner', ['', 'data/', 'main/', 'main/data/'])
def test_a_folder_as_it_was_downloaded_from_the_hub(tmp_path, inner):
    "With the hub's names of splits, shards, a README and a cache, perhaps in a configuration."
    files = dict(train_sft=ROWS[:2], train_gen=ROWS[2:3], test=ROWS[3:])
    for name, rows in files.items():
        put(tmp_path/f'{inner}{name}-00000-of-00001.parquet', rows)
    put(tmp_path/f'{inner}train_prefs-00000-of-00002.jsonl.gz', PAIRS[:3])
    second = put(tmp_path/f'{inner}train_prefs-00001-of-00002.jsonl.gz', PAIRS[3:])
    (tmp_path/'README.md').write_text('---\nlicense: mit\n---\n')
    write(tmp_path/'.cache/huggingface.json', [])
    spec = str(tmp_path)
    for name in ('preference', 'preferences', ('candidates', 'preferences')):
        assert load_records(spec, name, 'preference') == PAIRS
    found = dict(sft=ROWS[:2], unlabeled=ROWS[2:3], eval=ROWS[3:], outputs=ROWS[3:])
    for name, rows in found.items():
        assert load_records(spec, name, 'output') == rows
    with fails('val.json'):
        load_records(spec, 'val')
    Path(second).unlink()
    with fails('', '1 of 2 shards'):
        load_records(spec, 'preference')
    if 'main' in inner:
        write(tmp_path/'other/test.json', ROWS[:1])
        with fails('main', 'test-', 'other/test.json'):
            load_records(spec, 'eval')
        assert load_records(str(tmp_path/'other'), 'eval') == ROWS[:1]


def test_alpacafarms_repository_in_a_folder(tmp_path):
    for k in ('human', 'noisy_multi', 'gpt4'):
        write(tmp_path/f'alpaca_{k}_preference.json', [dict(PAIRS[0], by=k)])
    write(tmp_path/'alpaca_farm_evaluation.json', ROWS[:1])
    write(tmp_path/'alpaca_instructions/sft.json', ROWS[1:])
    noisy, = load_records(str(tmp_path), 'preferences', 'preference')
    assert noisy == dict(PAIRS[0], by='noisy_multi')
    assert load_records(str(tmp_path), 'eval', 'output') == ROWS[:1]
    assert load_records(str(tmp_path), 'sft', 'output') == ROWS[1:]


# shapes of a record

def user(text): return dict(role='user', content=text)
def bot(text): return dict(role='assistant', content=text)


def turned(*said):
    "A dialogue that the user begins."
    return [(user, bot)[i % 2](text) for i, text in enumerate(said)]


USER = user('Hi.')
BOT = bot('Yes?')
END = bot('So long.')
OTHER = bot('What?')
TALK = turned('Hi.', 'Yes?', 'Bye.')
SYSTEM = dict(role='system', content='Be kind.')
IN_PARTS = user([dict(type='text', text='Hi.')])
SHARE = dict(conversations=[{'from': 'system', 'value': ''}, {'from': 'human', 'value': 'Hi.'},
                            {'from': 'gpt', 'value': 'Yes?'}])
ASKED = dict(  # the same prompt in every format, without its system turn
    alpaca=dict(instruction='Hi.', input='', output='Yes?'), SHARE=SHARE,
    chat=dict(messages=[USER, BOT]),
    trl=dict(prompt='Hi.', completion='Yes?'),
    pair=dict(instruction='Hi.', output_1='Yes?', output_2='What?', preference=1),
    chosen=dict(prompt='Hi.', chosen='Yes?', rejected='What?'),
    orca=dict(question='Hi.', chosen='Yes?', rejected='What?'),
    hh=dict(chosen='\n\nHuman: Hi.\n\nAssistant: Yes?',
            rejected='\n\nHuman: Hi.\n\nAssistant: No.'),
    turns=dict(chosen=[USER, BOT], rejected=[USER, OTHER]),
    rrhf=dict(query='Hi.', responses=['Yes?', 'What?'], scores=[1, 0]),
    votes=vote('model_a'),
    rated=rated(RED, WRONG))


def without_prompt(record):
    prompt = 'messages', 'instruction', 'history', 'context'
    return {k: v for k, v in record.items() if k not in prompt}


SO = turned('So?', 'Yes.')


@pytest.mark.parametrize('format', ASKED)
@pytest.mark.parametrize('column, before', [   # a part of the prompt, and the turns that it adds
    (dict(system='Be kind.'), [SYSTEM]), (dict(system_prompt='Be kind.'), [SYSTEM]),
    (dict(system=' ', system_prompt=None, history=[], context=None), []),
    (dict(history=[['So?', 'Yes.']]), SO)])
def test_a_part_of_the_prompt_in_another_column_is_read_in_every_format(
        tmp_path, format, column, before):
    columns = 'instruction=question' if format == 'orca' else ''
    def read(**more):
        path = write(tmp_path/'a.json', [ASKED[format] | more])
        return load_records(path, kind=ANY, columns=columns)[0]
    plain = read()
    found = read(**column)
    assert prompt_key(found) == prompt_key(dict(messages=before + as_messages(plain)))
    assert without_prompt(found) == without_prompt(plain)
    if format == 'pair':
        pairs, = load_sets([str(tmp_path/'a.json')]).values()
        assert pairs[0].get('messages') == (before + [USER] if before else None)


# labels and their codes

def test_names_of_classes_say_which_answer_is_meant(tmp_path):
    "In Parquet, in a saved dataset, and as words."
    from datasets import ClassLabel, Dataset
    names = ['second', 'tie', 'first']
    wanted = [2., 1.5, 1., 1.5]
    rows = [dict(PAIRS[i], preference=k) for i, k in enumerate((0, 1, 2, 1))]
    held = Dataset.from_list(rows).cast_column('preference', ClassLabel(names=names))
    held.save_to_disk(tmp_path/'saved')
    held.to_parquet(tmp_path/'a.parquet')
    put(tmp_path/'b.jsonl', [dict(r, preference=names[r['preference']]) for r in rows])
    for file in ('saved', 'a.parquet', 'b.jsonl'):
        assert preferences(tmp_path/file) == wanted
    for file in ('a.parquet', 'b.jsonl'):
        assert [v['people'] for v in votes(tmp_path/file)] == wanted


@pytest.mark.parametrize('suffix', ['jsonl', 'csv', 'parquet'])
def test_the_numbers_0_1_2_need_a_code(tmp_path, suffix):
    "In every file and wherever labels are read, but where the format says that 0 is a tie."
    path = tmp_path/f'a.{suffix}'
    rows = [dict(PAIRS[i], preference=i) for i in range(3)]
    put(path, rows)
    for read in (preferences, votes, read_recorded, recorded_judge):
        with fails(path.name, 'first_second_tie'):
            read(str(path))
    assert preferences(path, columns='first_second_tie = preference') == [1, 2, 1.5]
    put(path, [dict(instruction=f'{i}', output_1='a', output_2='b', tie_first_second=i)
               for i in range(3)])
    assert preferences(path) == [1.5, 1, 2]
    assert [v['gold'] for v in votes(path)] == [1.5, 1, 2]
    put(path, [dict(r, price_per_example=.1) for r in rows])   # AlpacaEval's
    assert preferences(path) == [1.5, 1, 2]


def test_all_labels_of_a_file_tell_their_code_if_only_the_first_are_read(tmp_path):
    path = str(tmp_path/'a.json')
    rows = [dict(PAIRS[i], preference=i) for i in range(3)]
    put(tmp_path/'a.json', [dict(r, price_per_example=.1) for r in rows])   # AlpacaEval's
    assert preferences(path, n=2) == [1.5, 1]
    assert len(read_parts(path, n=2)[0].records) == 2
    put(tmp_path/'a.json', [rows[1], dict(rows[2], preference=0)])   # 0 and 1: the second, the first
    for read in (preferences, read_parts):
        with fails('a.json', 'labels are 0, 1'):
            read(path, n=1)


def test_what_is_read_can_be_written(tmp_path):
    "Whatever stands in a column that no one reads."
    held = dict(at=[datetime.date(2026, 1, 2)], took=datetime.timedelta(1))
    rows = read_rows(put(tmp_path/'a.parquet', [dict(r, other=held) for r in PAIRS]))
    write_json(tmp_path/'b.json', rows)
    read = dict(at=['2026-01-02'], took='1 day, 0:00:00')
    assert rows == [dict(r, other=read) for r in PAIRS]
    assert read_json(tmp_path/'b.json') == rows


def test_a_column_of_bytes_that_are_no_text_is_left_out_and_told(tmp_path, capsys):
    path = put(tmp_path/'a.parquet', [dict(r, other=b'\xff') for r in PAIRS])
    assert read_rows(path) == PAIRS
    assert f"{path}: the column 'other'" in capsys.readouterr().out


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
def test_published_sets_become_preferences(tmp_path, capsys, kind, suffix):
    "Written again, they are the same; their votes are read of whoever gave them."
    rows, wanted, said = KINDS[kind]
    path = put(tmp_path/f'a.{suffix}', rows)
    found = load_records(path, 'preferences', ('preference',))
    assert said in capsys.readouterr().out
    for r, for_blue in zip(found, wanted, strict=True):
        assert {r['output_1'], r['output_2']} == {'Red.', 'Blue.'}
        assert prompt_key(r) == ('Name a colour.', '')
        assert r['preference'] == (for_blue if r['output_2'] == 'Blue.' else 3 - for_blue)
    if 'model_a' in rows[0]:
        assert found[0]['generator_1'] == 'one'
    if 'HelpSteer' in kind:
        strengths = [r['strength'] for r in found[:2]]
        assert strengths == ([3, 1] if kind[-1] == '3' else [3, 2])
    assert load_records(write(tmp_path/'again.json', found), kind='preference') == found
    put(tmp_path/f'a.{suffix}', [dict(r, annotator=f'person {i}') for i, r in enumerate(rows)])
    given = [v for pair in votes(path) for v in pair.values()]
    assert len(given) == len(wanted)
    assert set(given) <= {1, 1.5, 2}


def test_which_of_two_labels_is_read_can_be_said(tmp_path):
    path = write(tmp_path/'a.json', [safe(0, 1)])
    assert preferences(path, columns='better_response_id=safer_response_id') == [2]


def test_what_is_used_and_left_out_is_told(tmp_path, capsys):
    path = write(tmp_path/'a.json', ROWS + ROWS[:2])
    assert load_records(path, kind='output') == ROWS
    used, left_out = capsys.readouterr().out.splitlines()
    assert used == f'{path}: 7 rows; used: instruction, input, output; not used: extra'
    assert '2 exact duplicates' in left_out


# what cannot be read

HALF = [published.texts('model_a', True), published.texts('model_b', True)]
HALF[1]['response_b'] = r'["Elm \udc00."]'
LEFT = [   # a file's name, its content, and what is said of it
    ('vote.json', as_json([vote('model_c')]), 'row 0'),
    ('one.json', as_json([dict(vote('tie'), conversation_a='Red.')]), 'row 0'),
    ('a.xlsx', b'PK', 'not read'),
    ('b.csv', b'instruction,output\nSay,ok\na\n', "row 1: .*'output'"),
    ('f.jsonl', packed(as_lines)(ROWS), 'gzip'),
    ('c.csv', b'PK\x03\x04\xff', 'a spreadsheet'),
    ('g.json', as_parquet(ROWS), 'Parquet'),
    ('d.csv', 'instruction,output\n'.encode('utf-16'), 'UTF-16'),
    ('e.csv', b'instruction;output\nWhy?;So.\n', "separated by ';'")]
for suffix, form in FORMATS.items():
    LEFT.append((f'votes.{suffix}', form(HALF), 'row 1: half'))
WRONG_FIELDS = dict(   # of a pair, and what is said of each
    preference=[[], 3, 'many', 10**400], instruction=['  '], output_2=[None], win2_prob=['x'],
    ended_2=['perhaps', 3, [None]])
for field, values in WRONG_FIELDS.items():
    for value in values:
        wrong = [PAIRS[0], dict(PAIRS[1], **{field: value})]
        LEFT.append(('pair.json', as_json(wrong), f"row 1: .*'{field}'"))


@pytest.mark.parametrize('name, content, message', LEFT)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path/name).write_bytes(content)
    with fails(name, message):
        load_records(str(tmp_path/name), kind=ANY)
    with fails(name, message):
        _read_candidates(str(tmp_path/name))


def load_candidates(path): return load_records(path, kind='candidates')
def test_scores_of_candidates_may_be_written_as_texts(tmp_path):
    row = dict(instruction='Why?', output=['a', 'b'], scores=['10', 2])
    query, = _read_candidates(write(tmp_path/'good.json', [row]))
    assert query['scores'] == [10., 2.]
    for read in _read_candidates, load_candidates:
        with pytest.raises(ValueError, match="bad.json, row 0.*'high'"):
            read(write(tmp_path/'bad.json', [row | dict(scores=[1, 'high'])]))
        for name, value in dict(scores=3, source='ab', ended=True, logprob='12').items():
            with pytest.raises(ValueError, match=f"few.json, row 0.*{name}.*one value for each"):
                read(write(tmp_path/'few.json', [row | {name: value}]))


@pytest.mark.parametrize('read', [load_records, _read_candidates, read_recorded, votes,
                                  recorded_judge])
@pytest.mark.parametrize('suffix', ['json', 'jsonl'])
def test_a_row_that_is_no_object_is_refused_by_every_reader(tmp_path, read, suffix):
    (tmp_path/f'a.{suffix}').write_bytes(FORMATS[suffix]([PAIRS[0], 7, PAIRS[2]]))
    with fails(f'a.{suffix}, row 1: '):
        read(str(tmp_path/f'a.{suffix}'))


@pytest.mark.parametrize('name', ['a.json.gz', 'a.csv.gz'])
def test_a_file_that_unpacks_to_more_than_the_memory_holds_is_refused(
        tmp_path, monkeypatch, name):
    memory = SimpleNamespace(available=4*10**6)
    monkeypatch.setattr('alpaca_farm.data.records.virtual_memory', lambda: memory)
    path = put(tmp_path/name, [dict(ROWS[0], output='a'*n) for n in (900_000, 90_000)])
    assert len(load_records(path, kind='output')) == 2
    memory.available -= 10**5
    with fails(name, '975,000 bytes'):
        load_records(path, kind='output')


# what is odd

def dialogue(*turns): return dict(chosen=[*turns, BOT], rejected=[*turns, OTHER])


SPACED = turned('Hi.', 'Yes?', 'Bye. ')
P = dict(instruction='Why?', output_1='a', output_2='b', preference=1)
Q = dict(prompt='Why?', chosen='yes', rejected='no')
ASKS = dict(instruction='Why?', output='So.')
DONE = turned('Hi.', 'Yes?', 'Why?')
GUESSED = turned('Why?', 'Guess.', 'Why?')
LONE = {'from': 'gpt', 'value': 'x'}   # an answer of ShareGPT's preferences
OTHER_ONE = {'from': 'gpt', 'value': 'y'}
HH_ASKED = '\n\nHuman: Hi.\n\nAssistant: Yes?\n\nHuman: Bye.\n\nAssistant:'
WINDOWS = HH_ASKED.replace('\n', '\r\n')
VOTED = dict(conversation_a=turned('Why?', 'a'), conversation_b=turned('Why?', 'b'))
ONE_TURN = dict(conversations=[{'from': 'human', 'value': 'Why?'}],
                chosen={'from': 'gpt', 'value': 'x'}, rejected={'from': 'gpt', 'value': 'y'})
MEANT = {   # a row, and fields of what is read
    'no scores': (dict(Q, score_chosen='', score_rejected=''), dict(better='yes')),
    'higher score': (dict(Q, score_chosen=8, score_rejected=7), dict(better='yes')),
    'equal scores': (dict(Q, score_chosen='7', score_rejected=7), dict(preference=1.5)),
    'scores as text': (dict(ASKS, output=['a', 'b'], scores=['3', '10']), dict(better='b')),
    'answers of digits': (dict(Q, chosen='2', rejected='1'), dict(better='2')),
    'one message': (ONE_TURN, dict(better='x', messages=DONE[2:])),
    'one message as JSON': ({k: json.dumps(v) for k, v in ONE_TURN.items()},
                            dict(better='x', messages=DONE[2:])),
    'one message in a list': (dict(conversations=DONE[2:], chosen=[LONE], rejected=[OTHER_ONE]),
                              dict(better='x', messages=DONE[2:])),
    'line ends of Windows': (dict(chosen=f'{WINDOWS} So long.', rejected=f'{WINDOWS} What?'),
                             dict(messages=TALK, better='So long.', worse='What?')),
    'an answer behind line ends of Windows': (dict(prompt=WINDOWS, completion='So long.'),
                                              dict(messages=TALK, output='So long.')),
    'spaces behind the colon': (dict(prompt=HH_ASKED, chosen=' So long.', rejected='  What?'),
                                dict(messages=TALK, better='So long.', worse='What?')),
    'a completion behind the colon': (dict(prompt=HH_ASKED, completion=' So long.'),
                                      dict(messages=TALK, output='So long.')),
    'two answers behind the colon': (dict(P, instruction=HH_ASKED, output_1=' a', output_2=' b'),
                                     dict(messages=TALK, better='a', worse='b')),
    'an answer in two turns': (dict(messages=[USER, BOT, END]),
                               dict(messages=[USER], output='Yes?\n\nSo long.')),
    'the first of the turns as a prompt': (dict(prompt='Hi.', messages=[*TALK, END]),
                                           dict(messages=TALK, output='So long.')),
    'prompt and its turns': (dict(dialogue(*TALK), prompt=SPACED),
                             dict(messages=SPACED, better='Yes?', worse='What?')),
    'prompt with a system turn': (dict(dialogue(USER), prompt=[SYSTEM, USER]),
                                  dict(messages=[SYSTEM, USER], better='Yes?')),
    'dialogues with a system turn': (dict(dialogue(SYSTEM, USER), prompt='Hi.'),
                                     dict(messages=[SYSTEM, USER], better='Yes?')),
    'a longer dialogue': (dict(chosen=[USER, BOT], rejected=[USER, OTHER, USER, END]),
                          dict(worse='What?\n\nHuman: Hi.\n\nAssistant: So long.')),
    'two answers after one': (
        dict(vote('model_b'), conversation_a=turned('Hi.', 'Yes?', 'Bye.', 'a'),
             conversation_b=turned('Hi.', 'What?', 'Bye.', 'b')),
        dict(messages=[USER], better='What?\n\nHuman: Bye.\n\nAssistant: b')),
    'no column of prompts': (dict(instruction='Hi.', chosen='Yes?', rejected='No.'),
                             dict(instruction='Hi.', better='Yes?', worse='No.')),
    'turns and an answer in a turn': (dict(prompt=TALK, completion=[END]),
                                      dict(messages=TALK, output='So long.')),
    'content in parts': (dict(messages=[IN_PARTS, BOT]), dict(messages=[USER], output='Yes?')),
    'turns as text': (dict(prompt=json.dumps(DONE), completion='So.'), dict(messages=DONE)),
    'chat as text': (dict(messages=json.dumps(turned('Why?', 'So.'))), dict(output='So.')),
    'an answer of JSON': (dict(prompt='List them.', completion='[{"name": "Bo"}]'),
                          dict(output='[{"name": "Bo"}]')),
    'an answer of JSON with a field of messages': (
        dict(ASKS, output='[{"from": "Paris", "to": "Rome"}]'),
        dict(output='[{"from": "Paris", "to": "Rome"}]')),
    'an answer of JSON beside a conversation': (dict(ONE_TURN, chosen='{"a": 1}', rejected='no'),
                                                dict(better='{"a": 1}', worse='no')),
    'history with the question': (dict(ASKS, history=[['Hi.', 'Yes?'], ['Why?', None]]),
                                  dict(messages=DONE)),
    'history with the answer': (dict(ASKS, history=[['Hi.', 'Yes?'], ['Why?', 'So.']]),
                                dict(messages=DONE)),
    'history behind a system turn': (dict(messages=[SYSTEM, USER, BOT], history=SO),
                                     dict(messages=[SYSTEM, *SO, USER])),
    'history of the question': (dict(ASKS, history=[['Why?', None]]), dict(instruction='Why?')),
    'asked again': (dict(ASKS, history=[['Why?', 'Guess.']]), dict(messages=GUESSED)),
    'empty cell': (dict(ASKS, system_prompt='NaN'), dict(instruction='Why?'))}


@pytest.mark.parametrize('name', MEANT)
def test_odd_data_is_read_as_it_is_meant(tmp_path, name):
    row, wanted = MEANT[name]
    found, = load_records(write(tmp_path/'a.json', [row]), kind=('preference', 'output'))
    if 'preference' in found:
        best = round(found['preference'])
        found |= dict(better=found[f'output_{best}'], worse=found[f'output_{3 - best}'])
    assert found | wanted == found


ASKED_ALONE = {   # a row of a file of prompts, and fields of what is read
    'the first turn beside the dialogue': (dict(prompt='Hi.', messages=[*TALK, END]),
                                           dict(messages=TALK)),
    'a label that is no verdict': (dict(prompt='2 + 2?', label='4'), dict(label='4')),
    'lists of an arena': (published.texts('model_a', True), dict(messages=[published.ASK]))}


@pytest.mark.parametrize('name', ASKED_ALONE)
def test_prompts_are_read_from_files_that_hold_more(tmp_path, name):
    row, wanted = ASKED_ALONE[name]
    found, = load_records(write(tmp_path/'a.json', [row]))
    assert found | wanted == found


def named_answers(one, two, chosen, rejected):
    "Rows whose label is said to be a text, and which name it."
    return Q | {one: 'text', two: 'text'} | dict(chosen=chosen, rejected=rejected)


WEIGHTED = [*DONE, dict(role='assistant', content='So.', weight=0)]
LISTED = dict(Q, chosen=str(turned('Why?', 'a')), rejected=str(turned('Why?', 'b')))
OTHERS = dict(Q, chosen=turned('How?', 'a'), rejected=turned('How?', 'b'))
ZERO = [dict(P, price_per_example=1, output_2=f'{i}', preference=i % 2) for i in range(4)]
BREAK = [dict(P, output_1='a\nb'), dict(P, output_1='a\r\nb')]
NAMES = 'response_1', 'response_2'
TOLD = [   # rows, and what is said when they are read or looked at
    (named_answers(*NAMES, *NAMES), 'the name of an answer'),
    (named_answers(*NAMES, 1, 2), 'the name of an answer'),
    (named_answers('response_a', 'response_b', 'model_B', 'model_A'), 'the name of an answer'),
    (LISTED, "'chosen' holds a list as text"),
    (OTHERS, 'prompt differs from the first turn'),
    (dict(chosen='\n\nHuman: a\n\nAssistant: b', rejected='\n\nHuman: c\n\nAssistant: b'),
     'no turn of the assistant in common'),
    (dict(Q, instruction='Use French.'), '`instruction` beside the prompt'),
    (dict(prompt='Use French.', messages=[*TALK, END]), '`prompt` beside the prompt'),
    (dict(chosen=LONE, rejected=OTHER_ONE), 'prompt=question'),
    (dict(chosen=LONE), 'an answer alone'),
    (ZERO, 'labels are 0, 1,'),
    (dict(VOTED, winner='model_a', turn=3), 'turn is 3'),
    (BREAK, '1 of 2 rows say what another one says'),
    (dict(system='Be kind.', question='Why?', chosen='x', rejected='y'), 'prompt=question'),
    (dict(Q, rejected=None), "'rejected'"),
    (dict(instruction='Why?', output=['a', 'b'], scores=['good', 'bad']), '`scores`'),
    (dict(ASKS, history=[['Hi.', None]]), "'history'"),
    (dict(messages=WEIGHTED), 'weight 0'),
    (dict(messages=[*WEIGHTED, *DONE]), 'weight 0'),
    (dict(messages=[dict(DONE[0], images=['x']), DONE[1]]), '`images`'),
    (dict(messages=[dict(DONE[0], context=['x']), DONE[1]]), '`context`'),
    ([dict(PAIRS[0], output_2='a')]*3, '3 pairs have two equal answers')]


def said_of(path, columns=''):
    "What a refusal says, or what is found when the data is looked at."
    try:
        load_records(path, kind=('preference', 'output', 'instruction'), columns=columns)
        return str(find_odd(read_parts(path, '', columns), [{}], {}))
    except ValueError as e:
        return str(e)


@pytest.mark.parametrize('rows, message', TOLD)
def test_odd_data_is_told(tmp_path, rows, message):
    assert message in said_of(write(tmp_path/'a.json', rows if isinstance(rows, list) else [rows]))


def test_a_column_is_not_named_as_another_that_is_there(tmp_path):
    path = write(tmp_path/'a.json', [dict(P, question='How?')])
    assert "'question'" in said_of(path, 'instruction=question')


def test_a_file_of_prompts_need_not_have_the_columns_that_are_named_for_answers(tmp_path):
    "One setting names the columns of the preferences and of the prompts that are answered at the end."
    named = 'prompt=q,chosen=good,rejected=bad'
    for row in (dict(q='Why?'), dict(ASKS)):
        path = write(tmp_path/'a.json', [row])
        found, = load_records(path, columns=named)
        assert prompt_key(found) == ('Why?', '')
        with fails('a.json, row 0', "columns names '(q|good)'"):
            load_records(path, kind='preference', columns=named)
    with fails('a.json, row 0', "columns names 'q'"):
        load_records(write(tmp_path/'a.json', [dict(question='Why?')]), columns=named)


def test_a_turn_of_a_tool_is_nothing_odd(tmp_path):
    turns = [DONE[0], dict(role='tool', content='rain'), DONE[2]]
    assert said_of(write(tmp_path/'a.json', [dict(messages=turns)])) == '[]'


@pytest.mark.parametrize('more', [
    dict(output=END['content']), dict(output=['So long.', 'No.']), dict(
        output_1='a', output_2='b', preference=1., label=True)])
def test_answers_to_the_prompts_of_a_set_of_pairs_are_no_pairs_of_it(tmp_path, more):
    "The dialogues of TRL's preferences, which are asked without their answers, and then answered."
    pair = dict(prompt=TALK, chosen=[BOT], rejected=[OTHER])
    prompt, = load_records(write(tmp_path/'a.json', [pair]))
    for fields, kind in ((more, ANY), (more, 'instruction'), ({}, 'instruction')):
        found, = load_records(write(tmp_path/'b.json', [prompt | fields]), kind=kind)
        assert found == prompt | fields


# what methods make of it

def test_good_and_bad_answers_are_read_from_a_table(tmp_path):
    "KTO's, in columns of other names, by both methods that learn from them."
    from alpaca_farm import binary_feedback, dpo
    rows = [dict(q=f'Hi {i}.', completion='Yes?', label=i % 2 == 0) for i in range(10)]
    given = dict(preferences=put(tmp_path/'kto.csv', rows), columns='prompt=q')
    found, fields, labels = dpo.read_labels(dpo.DPOConfig(loss_type='kto', **given))
    assert found[1]['instruction'] == 'Hi 1.'
    assert fields == ('output',)
    assert labels[:3] == [[1.], [0.], [1.]]
    cfg = binary_feedback.BinaryFeedbackConfig(**given)
    learn, aside, n = binary_feedback._load_feedback(cfg)
    assert sorted(r['good'] for r in learn + aside) == [0.]*5 + [1.]*5
    assert n == 8
    assert len(aside) == 2


CUT = 'A cup and a hat and a'
WHOLE = 'No.'
LONG_ANSWER = 'A cup.'
ENDS = {CUT: False, WHOLE: True, LONG_ANSWER: True}


def first_is_longer(pairs): return [1. + (len(p['output_1']) < len(p['output_2'])) for p in pairs]


@pytest.fixture(scope='module')
def labelled(base, tmp_path_factory):
    "Labels of pairs of samples, some cut off at their longest length."
    from alpaca_farm import annotators
    folder = tmp_path_factory.mktemp('cut')
    rows = []
    for i in range(16):
        answers = [LONG_ANSWER, CUT, WHOLE][i % 2:]
        ended = [ENDS[text] for text in answers]
        rows.append(dict(instruction=f'Name thing {i}.', input='', output=answers, ended=ended))
    cfg = annotators.AnnotatorsConfig(
        out=str(folder/'run'), outputs=write(folder/'samples.json', rows), label_flip=0.,
        annotators=f'{__name__}:first_is_longer')
    annotators.run(cfg)
    found = load_records(cfg.out, 'preferences', 'preference')
    assert {*ENDS} <= {r[f'output_{k}'] for r in found for k in (1, 2)}
    return found


def ends(rows, tokenizer):
    "Of each text, whether an end is behind it in the token ids: in all of them alike."
    eos = tokenizer.eos_token_id
    found = {}
    for ids in rows:
        assert ids.count(eos) == (ids[-1] == eos)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert found.setdefault(text, eos in ids) == (eos in ids)
    return found


@pytest.mark.parametrize('suffix', FORMATS)
def test_no_end_is_learned_behind_an_answer_that_was_cut_off(
        base, models, labelled, tmp_path, suffix):
    "By every method, from labels in every kind of file; and the labels become candidates."
    from alpaca_farm import binary_feedback, dpo, reward_model, rrhf
    tokenizer = models.tokenizer
    path = put(tmp_path/f'labels.{suffix}', labelled)
    more = dict(preferences=path, max_length=100)
    for loss in dpo.LOSSES:
        smoothing = dict(label_smoothing=.1) if loss == 'robust' else {}
        cfg = dpo.DPOConfig(loss_type=loss, **smoothing, **more)
        data = dpo.LabelledAnswers(cfg, tokenizer, *dpo.read_labels(cfg))
        assert ends(sum(data.answers, []), tokenizer) == ENDS
    cfg = reward_model.RewardModelConfig(policy=str(base/'sft'), **more)
    pairs, aside, _ = reward_model.load_preference_pairs(Run(cfg, dict(settings={})))
    assert ends(sum(pairs['answers'], []), tokenizer) == ENDS
    learn, aside, _ = binary_feedback._load_feedback(binary_feedback.BinaryFeedbackConfig(**more))
    _, _, (answers,) = encode(learn + aside, ('output',), tokenizer, 100)
    assert ends(answers, tokenizer) == ENDS
    answers = []
    for query in _read_candidates(path):
        assert query['ended'] == [ENDS[text] for text in query['output']]
        answers += rrhf._candidate_tokens(query, tokenizer)
    assert ends(answers, tokenizer) == ENDS
    pairs, = load_sets([path]).values()
    for p in pairs:
        assert p['ended_1'] == ENDS[p['output_1']]
        assert p['ended_2'] == ENDS[p['output_2']]


def test_answers_of_which_nothing_is_known_have_ended(labelled, models, tmp_path):
    "Also in a file where only some are known."
    from alpaca_farm import dpo
    plain = [{k: v for k, v in r.items() if 'ended' not in k} for r in labelled[:8]]
    for rows in (plain, [dict(r, ended_1=None, ended_2='') for r in plain]):
        cfg = dpo.DPOConfig(preferences=write(tmp_path/'a.json', rows))
        data = dpo.LabelledAnswers(cfg, models.tokenizer, *dpo.read_labels(cfg))
        assert all(ends(sum(data.answers, []), models.tokenizer).values())


def test_what_a_file_says_of_other_answers_is_not_said_of_the_samples(base, tmp_path):
    "Prompts from a set of candidates or labels are sampled, labelled and read again."
    told = dict(source='web', scores=[3], generator='gpt', votes=dict(ann=1), judge='ann',
                win2_prob=.9, status='discarded', price='$3', kept='x')
    prompts = write(tmp_path/'prompts.json', [dict(r, **told) for r in ROWS])
    tiny.run('best_of_n', base, tmp_path/'samples', data=prompts, reward_model='')
    query, *_ = _read_candidates(str(tmp_path/'samples'))
    assert query['source'] == ['samples']*2
    assert query['kept'] == 'x'
    tiny.run('annotators', base, tmp_path/'labels', outputs=str(tmp_path/'samples'), label_flip=0,
             annotators=f'{__name__}:first_is_longer')
    for r in load_records(str(tmp_path/'labels'), 'preferences', 'preference'):
        assert [r['preference']] == first_is_longer([r])
    assert {*sum(map(list, votes(tmp_path/'labels')), [])} == {'first_is_longer'}


# any bytes, any records

symbols = st.text('[]{}",:\\ud83abc01\n\t ', max_size=60)


def read_or_refuse(path, read=read_rows, **more):
    "What a file holds, None when it is refused by name; any other error is a failure."
    try:
        return read(str(path), **more)
    except ValueError as e:
        assert path.name in str(e)
        assert '\n' not in str(e)


@pytest.mark.slow
@often
@given(suffix=st.sampled_from(sorted(FORMATS) + ['xlsx']), gzipped=st.booleans(),
       content=st.binary(max_size=60) | symbols.map(str.encode))
@example('json', False, b'[' * 900 + b']' * 900)
@example('json', False, b'[' * 100_000)
@example('csv', False, b'a,b\n"')
def test_any_bytes_are_rows_or_refused_by_name(folder, suffix, gzipped, content):
    if gzipped and suffix.endswith('gz'):
        content = gzip.compress(content)
    (folder/f'any.{suffix}').write_bytes(content)
    rows = read_or_refuse(folder/f'any.{suffix}')
    assert rows is None or isinstance(rows, list)


@pytest.mark.slow
@often
@given(suffix=st.sampled_from(sorted(FORMATS)), where=st.floats(0, .999), cut=st.integers(0, 12),
       inserted=st.binary(max_size=4))
def test_a_damaged_file_is_rows_or_refused_by_name(folder, suffix, where, cut, inserted):
    content = FORMATS[suffix](PAIRS)
    at = int(where*len(content))
    file = folder/f'damaged.{suffix}'
    file.write_bytes(content[:at] + inserted + content[at + cut:])
    for r in read_or_refuse(file, load_records, kind='preference') or ():
        assert isinstance(r['output_1'], str)
        assert 1 <= r['preference'] <= 2


COLUMNS = {'instruction', 'input', 'output', 'output_1', 'output_2', 'preference', 'x', 'win2_prob'}
COLUMNS |= {*CODES}
for reader in READERS.values():
    COLUMNS |= {*reader.columns}
columns = st.sampled_from(sorted(COLUMNS))
roles = st.sampled_from(['user', 'assistant', 'gpt', 'human', ''])
message = st.dictionaries(st.sampled_from(['role', 'from', 'content', 'value']), roles | texts)
messages = st.lists(message, max_size=4)
atoms = st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | texts


def nested(inner): return st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2)


values = st.recursive(atoms, nested, max_leaves=4)
row = st.dictionaries(columns, messages | values, max_size=6)


@pytest.mark.slow
@often
@given(rows=st.lists(row | values, max_size=3), kind=st.sampled_from(sorted(FIELDS)))
def test_any_records_are_valid_or_refused_by_name(folder, rows, kind):
    (folder/'rows.json').write_text(json.dumps(rows))
    found = read_or_refuse(folder/'rows.json', load_records, kind=kind)
    if found is not None:
        assert check_records(found, kind, 'again') == found
        assert len(found) <= len(rows)


NUMBERS = [dict(instruction='Say 1.', output='1', label='0.1'), dict(instruction='Say 2.', output='2', label='0.9')]
def test_numbers_may_be_texts_as_in_a_csv_file(tmp_path):
    "Labels of single answers, and margins."
    assert [r['label'] for r in load_records(write(tmp_path/'a.json', NUMBERS), kind='output')] == [.1, .9]
    assert margins([dict(P, lead='0.5')], name='lead') == [.5]
    for bad in ('-1', 'nan', 'x', None):
        with pytest.raises(ValueError, match='lead'):
            margins([dict(P, lead=bad)], name='lead')


@pytest.mark.parametrize('true, false', [(True, False), ('True', 'False'), ('1', '0'), ('yes', 'no'), (1, '')])
def test_what_is_held_out_may_be_said_in_texts(true, false):
    rows = [dict(instruction=f'Say {i}.', held_out=true if i < 4 else false) for i in range(20)]
    assert hold_out(rows, -1, 0)[1] == [*range(4)]


def test_what_is_known_of_each_sample_stays_with_it():
    "Also where a file says nothing of ends."
    sampled = dict(instruction='Say.', output=['a', 'a', 'bc'], logprob=[-1, -1, -3])
    kept = select_candidates(sampled, distinct(sampled['output'])[0])
    assert [r['logprob'] for r in each_answer([kept])] == [-1, -3]
    best, = choose_best(score_candidates([kept], lambda records: [len(r['output']) for r in records]))
    assert (best['output'], best['ended']) == ('bc', True)


@pytest.mark.parametrize('kind', [list, tuple, np.array, torch.tensor])
def test_tokens_may_stand_in_any_sequence(kind):
    batch = collate([kind([1, 2])], [(3, 4)], 0)
    assert batch['ids'].tolist() == [[1, 2, 3, 4]]
    assert batch['response'].tolist() == [[0, 0, 1, 1]]


def test_prompts_without_responses_are_no_batch():
    for make in lambda *given: collate(*given, 0), lambda *given: list(answer_batches(*given, 9)):
        with pytest.raises(ValueError, match='shorter'):
            make([[1], [2]], [[3]])


def test_a_label_is_found_whatever_ends_the_lines(tmp_path):
    "As a table program saves people's labels of answers with several lines."
    answers = dict(instruction='Say.', input='', output_1='a\nb', output_2='c')
    labels = write(tmp_path/'labels.json', [dict(answers, output_1='a\r\nb', preference=2)])
    assert RecordedLabels(read_recorded(labels))([answers]) == [2.]
    (pairs,) = load_sets([write(tmp_path/'people.json', [dict(answers, votes=dict(a=1))])]).values()
    (verdicts,) = recorded_verdicts(labels, '', dict(people=pairs)).values()
    assert verdicts.preferences.ravel().tolist().count(2.) == 1
