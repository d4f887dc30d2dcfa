"""The same records from every format; what is damaged or odd is told by file, row and field."""
import csv
import datetime
import decimal
import gzip
import io
import json
import re
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings, strategies as st

import published
from alpaca_farm.data.dialogues import prompt_key
from alpaca_farm.data.formats import CODES, FIELDS, Reader, READERS
from alpaca_farm.data.records import _read_candidates, check_records, load_records, read_rows
from alpaca_farm.data.text import encode
from alpaca_farm.judging.judges import read_recorded
from alpaca_farm.judging.label_files import load_sets, recorded_verdicts
from alpaca_farm.look_at_data import find_odd, read_parts
from alpaca_farm.run.files import read_json, write_json
from alpaca_farm.run.runs import Run
from alpaca_farm.train.preflight import preflight
from published import ASK, KINDS, MORE, rated, RED, safe, say, strength, vote, WRONG
from tiny import write

ROWS = [dict(instruction=f'Say "{i}",\nplease: café \u2028 {i}.', input='' if i % 2
             else f'line\n{i}', output=f' {i}, ok\t', extra=str(i))
        for i in range(5)]
PAIRS = [dict(instruction=f'Say {i}.', input='', output_1='a', output_2=f'b{i}',
              preference=1. + i/4) for i in range(5)]


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


FORMATS = dict(json=as_json, jsonl=as_lines, csv=as_csv, tsv=as_tsv, parquet=as_parquet)
FORMATS |= {f'{k}.gz': lambda rows, f=f: gzip.compress(f(rows)) for k, f in FORMATS.items()}


@pytest.mark.parametrize('suffix', FORMATS)
@pytest.mark.parametrize('rows, kind', [(ROWS, 'output'), (PAIRS, 'preference')])
def test_every_format_gives_the_same_records(tmp_path, suffix, rows, kind):
    (tmp_path/f'sft.{suffix}').write_bytes(FORMATS[suffix](rows))
    for spec in (tmp_path, tmp_path/f'sft.{suffix}'):
        assert load_records(str(spec), 'sft', kind) == rows
        assert load_records(str(spec), 'sft', kind, 2) == rows[:2]


LONG = [dict(instruction='Say it.', output='x'*200_000)]
BREAKS = [dict(instruction='one\u2028two\x85three', input='', output='a\u2029b')]


@pytest.mark.parametrize('name, content, rows', [
    ('lines.json', as_lines(ROWS), ROWS), ('list.jsonl', as_json(ROWS), ROWS),
    ('breaks.jsonl', json.dumps(BREAKS[0], ensure_ascii=False).encode() + b'\n', BREAKS),
    ('mark.csv', b'\xef\xbb\xbf' + as_csv(ROWS), ROWS),
    ('windows.jsonl', as_lines(ROWS).replace(b'\n', b'\r\n') + b'\r\n\r\n', ROWS),
    ('long.csv', as_csv(LONG), [dict(r, input='') for r in LONG])])
def test_files_as_other_programs_write_them(tmp_path, name, content, rows):
    "Line separators in a text, a byte order mark, line ends of Windows, a long field."
    (tmp_path/name).write_bytes(content)
    assert load_records(str(tmp_path/name), kind='output') == rows


def test_a_saved_dataset(tmp_path):
    from datasets import Dataset, DatasetDict
    train = Dataset.from_list(PAIRS[:3])
    test = Dataset.from_list(PAIRS[3:])
    train.save_to_disk(tmp_path/'one')
    DatasetDict(train=train, test=test).save_to_disk(tmp_path/'both')
    for name, split, rows in (('one', 'any', PAIRS[:3]), ('both', 'train', PAIRS[:3]),
                              ('both', 'preferences', PAIRS[:3]), ('both', 'eval', PAIRS[3:])):
        assert load_records(str(tmp_path/name), split, 'preference') == rows
    with pytest.raises(FileNotFoundError, match='no val.json'):
        load_records(str(tmp_path/'both'), 'val')
    next((tmp_path/'one').glob('*.arrow')).write_bytes(b'nothing')
    with pytest.raises(ValueError, match='one: not a valid dataset'):
        load_records(str(tmp_path/'one'), '', 'preference')


@pytest.mark.parametrize('inner', ['', 'data/'])
@pytest.mark.parametrize('suffix', ['parquet', 'jsonl.gz'])
def test_shards_of_the_hub(tmp_path, inner, suffix):
    for i, rows in enumerate((ROWS[:3], ROWS[3:])):
        path = tmp_path/f'{inner}train-0000{i}-of-00002.{suffix}'
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(FORMATS[suffix](rows))
    (path.parent/f'test-00000-of-00001.{suffix}').write_bytes(FORMATS[suffix](ROWS[:1]))
    assert load_records(str(tmp_path), 'train', 'output') == ROWS
    assert load_records(str(tmp_path), 'test', 'output') == ROWS[:1]
    with pytest.raises(FileNotFoundError, match=f'it holds {inner}test-00000-of-00001'):
        load_records(str(tmp_path), 'val')
    path.unlink()
    with pytest.raises(ValueError, match='1 of 2 shards are there'):
        load_records(str(tmp_path), 'train')


@pytest.mark.parametrize('inner', ['', 'data/', 'main/', 'main/data/'])
def test_a_folder_as_it_was_downloaded_from_the_hub(tmp_path, inner):
    "With the hub's names of splits, a README and a cache, perhaps in a configuration."
    files = dict(train_prefs=PAIRS, train_sft=ROWS[:2], train_gen=ROWS[2:3], test=ROWS[3:])
    for name, rows in files.items():
        path = tmp_path/f'{inner}{name}-00000-of-00001.parquet'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(as_parquet(rows))
    (tmp_path/'README.md').write_text('---\nlicense: mit\n---\n')
    write(tmp_path/'.cache/huggingface.json', [])
    spec = str(tmp_path)
    for name in ('preference', 'preferences'):
        assert load_records(spec, name, 'preference') == PAIRS
    assert load_records(spec, ('candidates', 'preferences'), 'preference') == PAIRS
    found = dict(sft=ROWS[:2], unlabeled=ROWS[2:3], eval=ROWS[3:], outputs=ROWS[3:])
    for name, rows in found.items():
        assert load_records(spec, name, 'output') == rows
    with pytest.raises(FileNotFoundError, match='there is no val.json'):
        load_records(spec, 'val')
    if 'main' not in inner:
        return
    write(tmp_path/'other/test.json', ROWS[:1])
    with pytest.raises(FileNotFoundError, match='main.*test-.*other/test.json.*one of these'):
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


USER = dict(role='user', content='Hi.')
BOT = dict(role='assistant', content='Yes?')
TALK = [USER, BOT, dict(role='user', content='Bye.')]
TEXT = 'Human: Hi.\n\nAssistant: Yes?\n\nHuman: Bye.\n\nAssistant:'
KIND = 'System: Be kind.\n\nHuman: Hi.\n\nAssistant:'
SYSTEM = dict(role='system', content='Be kind.')
END = dict(role='assistant', content='So long.')
OTHER = dict(role='assistant', content='What?')
SHARE = dict(conversations=[{'from': 'system', 'value': ''}, {'from': 'human', 'value': 'Hi.'},
                            {'from': 'gpt', 'value': 'Yes?'}])


@pytest.mark.parametrize('row, instruction, output', [
    (dict(prompt=[USER], completion=[BOT]), 'Hi.', 'Yes?'),
    (dict(prompt=TALK, completion=[END]), TEXT, 'So long.'),
    (dict(prompt='Hi.', completion='Yes?', label=True), 'Hi.', 'Yes?'),
    (dict(messages=TALK + [END]), TEXT, 'So long.'), (SHARE, 'Hi.', 'Yes?'),
    (dict(messages=[SYSTEM, USER, BOT]), KIND, 'Yes?'),
    (dict(messages=[dict(role='user', content=[dict(type='text', text='Hi.')]), BOT]), 'Hi.',
     'Yes?'),
    (dict(prompt='Hi.', messages=[USER, BOT], chosen=[USER, BOT], rejected=[USER, OTHER]), 'Hi.',
     'Yes?'),
    (dict(prompt=[USER], completion=[USER, BOT]), 'Hi.', 'Yes?'),
    (dict(instruction='Hi.', input='', output='Yes?', text='### all of it'), 'Hi.', 'Yes?')])
def test_shapes_of_demonstrations(tmp_path, row, instruction, output):
    found, = load_records(write(tmp_path/'a.json', [row]), kind='output')
    assert (*prompt_key(found), found['output']) == (instruction, '', output)
    assert ('messages' in found) == any(isinstance(v, list) for v in row.values())
    assert found.get('label') is row.get('label')
    assert found.get('text') == row.get('text')


def dialogue(*turns): return dict(chosen=[*turns, BOT], rejected=[*turns, OTHER])


SPACED = [*TALK[:2], dict(TALK[2], content='Bye. ')]


@pytest.mark.parametrize('row, instruction, answers', [
    (dict(dialogue(USER), prompt='Hi.\n'), 'Hi.\n', ''),
    (dict(dialogue(*TALK), prompt=SPACED), TEXT.replace('Bye.', 'Bye. '), ''),
    (dict(dialogue(USER), prompt=[SYSTEM, USER]), KIND, ''),
    (dict(dialogue(SYSTEM, USER), prompt='Hi.'), KIND, ''),
    (dict(prompt=TEXT, chosen=f'{TEXT} Yes?', rejected=f'{TEXT} What?'), TEXT, ''),
    (dict(prompt=TALK, chosen=[BOT], rejected=[OTHER]), TEXT, ''),
    (dict(chosen=[USER, BOT], rejected=[USER, OTHER, USER, END]), 'Hi.',
     '\n\nHuman: Hi.\n\nAssistant: So long.'),
    (dict(chosen=f'\n\n{TEXT} Yes?', rejected=f'\n\n{TEXT} What?'), TEXT, ''),
    (dict(instruction='Hi.', chosen='Yes?', rejected='What?'), 'Hi.', '')])
def test_shapes_of_preferences(tmp_path, row, instruction, answers):
    found, = load_records(write(tmp_path/'a.json', [row]), kind='preference')
    best = int(found['preference'])
    read = prompt_key(found)[0], found[f'output_{best}'], found[f'output_{3 - best}']
    assert read == (instruction, 'Yes?', f'What?{answers}')
    is_dialogue = (isinstance(row.get('prompt'), list) or {*row} == {'chosen', 'rejected'}
                   or instruction.strip() != 'Hi.')
    assert ('messages' in found) == is_dialogue


ASKED = dict(  # the same prompt in every format, without its system turn
    alpaca=dict(instruction='Hi.', input='', output='Yes?'), SHARE=SHARE,
    chat=dict(messages=[USER, BOT]), trl=dict(prompt='Hi.', completion='Yes?'),
    pair=dict(instruction='Hi.', output_1='Yes?', output_2='What?', preference=1),
    chosen=dict(prompt='Hi.', chosen='Yes?', rejected='What?'),
    orca=dict(question='Hi.', chosen='Yes?', rejected='What?'),
    hh=dict(chosen='\n\nHuman: Hi.\n\nAssistant: Yes?',
            rejected='\n\nHuman: Hi.\n\nAssistant: No.'),
    turns=dict(chosen=[USER, BOT], rejected=[USER, OTHER]),
    rrhf=dict(query='Hi.', responses=['Yes?', 'What?'], scores=[1, 0]),
    votes=published.vote('model_a'), rated=rated(RED, WRONG))


@pytest.mark.parametrize('column', ['system', 'system_prompt'])
@pytest.mark.parametrize('format', ASKED)
def test_a_system_column_is_the_first_turn_in_every_format(tmp_path, format, column):
    row = ASKED[format]
    kinds = ('preference', 'pair', 'candidates', 'output')
    columns = 'instruction=question' if format == 'orca' else ''
    def read(**more):
        path = write(tmp_path/'a.json', [row | more])
        if 'output_1' in row:
            assert load_sets([path])['a'][0].get('messages') == (
                [SYSTEM, USER] if more.get(column) == 'Be kind.' else None)
        return load_records(path, kind=kinds, columns=columns)[0]
    plain = read()
    asked = [m for m in plain.get('messages') or [dict(role='user', content=prompt_key(plain)[0])]]
    for text, first in (('Be kind.', [SYSTEM]), (' ', []), (None, [])):
        found = read(**{column: text})
        assert prompt_key(found) == prompt_key(dict(messages=first + asked))
        kept = {k: v for k, v in plain.items() if k not in ('messages', 'instruction')}
        assert {k: v for k, v in found.items() if k not in ('messages', 'instruction')} == kept


PAST = [['Hi.', 'Yes?']]


@pytest.mark.parametrize('format', ['alpaca', 'trl', 'pair', 'chosen', 'rrhf'])
@pytest.mark.parametrize('suffix', ['json', 'csv'])
@pytest.mark.parametrize('part, instruction, context', [
    (dict(history=PAST), TEXT, ''), (dict(history=TALK[:2]), TEXT, ''),
    (dict(history=PAST[0]), TEXT, ''), (dict(history='Human: Hi.\n\nAssistant: Yes?'), TEXT, ''),
    *[({name: 'It rains.'}, 'Bye.', 'It rains.') for name in ('context', 'passage', 'document')],
    (dict(history=[], context=None), 'Bye.', '')])
def test_a_part_of_the_prompt_in_another_column_is_read(
        tmp_path, format, suffix, part, instruction, context):
    "Earlier turns and passages, in every format, also where people's votes are read."
    row = {k: 'Bye.' if v == 'Hi.' else v for k, v in ASKED[format].items()} | part
    if suffix == 'csv':
        row = {k: json.dumps(v) if type(v) is list else v for k, v in row.items()}
    if suffix == 'csv' and format == 'rrhf':
        return
    path = tmp_path/f'a.{suffix}'
    path.write_bytes(FORMATS[suffix]([row]))
    kinds = 'preference', 'pair', 'candidates', 'output'
    assert prompt_key(load_records(str(path), kind=kinds)[0]) == (instruction, context)
    if format in ('pair', 'chosen'):
        assert prompt_key(load_sets([str(path)])['a'][0]) == (instruction, context)


def test_a_vote_on_a_turn_is_of_the_rounds_until_then(tmp_path):
    both = {f'conversation_{s}': [ASK, say(a), MORE, say(b)] for s, a, b in
            (('a', 'Red.', 'Elm.'), ('b', 'Blue.', 'Oak.'))}
    rows = [vote(w) | both | dict(turn=k, judge='Ann') for k, w in ((1, 'model_a'), (2, 'model_b'))]
    path = write(tmp_path/'a.json', rows)
    one, two = load_records(path, kind='preference')
    assert one['output_1'] == 'Red.'
    assert one['preference'] == 1
    assert two['preference'] == 2
    assert two['output_1'] == 'Red.\n\nHuman: Another?\n\nAssistant: Elm.'
    assert [p['votes'] for p in load_sets([path])['a']] == [dict(Ann=1), dict(Ann=2)]


NAMED = ['first', 'second', 'tie'], ['model_a', 'model_b', 'both_bad'], ['tie', '[[A]]', 'B>A']


@pytest.mark.parametrize('form', ['parquet', 'saved', 'jsonl'])
@pytest.mark.parametrize('names', NAMED)
def test_names_of_classes_say_which_answer_is_meant(tmp_path, form, names):
    from datasets import ClassLabel, Dataset
    rows = [dict(PAIRS[i], preference=k) for i, k in enumerate((0, 1, 2, 1))]
    held = Dataset.from_list(rows).cast_column('preference', ClassLabel(names=names))
    path = tmp_path/f'a.{form}'
    if form == 'saved':
        held.save_to_disk(path)
    if form == 'parquet':
        held.to_parquet(path)
    if form == 'jsonl':
        path.write_bytes(as_lines([dict(r, preference=names[r['preference']])
                                   for r in rows]))
    first, second, tie = (1., 2., 1.5) if names[2] != 'B>A' else (1.5, 1., 2.)
    wanted = [first, second, tie, second]
    assert [r['preference'] for r in load_records(str(path), '', 'preference')] == wanted
    if form == 'saved':
        return
    assert [p['votes']['people'] for p in load_sets([str(path)])['a']] == wanted


@pytest.mark.parametrize('code, wanted', [('first_second_tie', [1., 2., 1.5]),
                                          ('tie_first_second', [1.5, 1., 2.])])
@pytest.mark.parametrize('suffix', ['jsonl', 'csv', 'parquet'])
def test_the_numbers_0_1_2_need_a_code(tmp_path, capsys, suffix, code, wanted):
    "In every file and wherever labels are read, but where the format says that 0 is a tie."
    path = str(tmp_path/f'a.{suffix}')
    def put(rows): (tmp_path/f'a.{suffix}').write_bytes(FORMATS[suffix](rows))
    rows = [dict(PAIRS[i], preference=i) for i in range(3)]
    readers = (lambda: load_records(path, kind='preference'), lambda: load_sets([path]),
               lambda: read_recorded(path), lambda: recorded_verdicts(path, '', {}))
    for labels in (rows, rows[::2], rows[:1], rows[:2]):
        put(labels)
        for read in readers:
            with pytest.raises(ValueError, match='labels are 0.*first_second_tie'):
                read()
    put(rows)
    found = load_records(path, kind='preference', columns=f'{code} = preference')
    assert [r['preference'] for r in found] == wanted
    put([{code if k == 'preference' else k: v for k, v in r.items()} for r in rows])
    assert [r['preference'] for r in load_records(path, kind='preference')] == wanted
    assert [p['votes']['gold'] for p in load_sets([path])['a']] == wanted
    capsys.readouterr()
    put([dict(r, price_per_example=.1) for r in rows])   # AlpacaEval's
    assert [r['preference'] for r in load_records(path, kind='preference')] == [1.5, 1, 2]
    assert 'labels preference: 0 = both are as good (1)' in capsys.readouterr().out


@pytest.mark.parametrize('value, read', [
    (datetime.datetime(2026, 11, 28, 12), '2026-11-28T12:00:00'), (float('nan'), None),
    (datetime.date(2026, 11, 28), '2026-11-28'), (datetime.time(9), '09:00:00'),
    (datetime.timedelta(1), '1 day, 0:00:00'), (float('-inf'), None),
    (decimal.Decimal('1.5'), 1.5), (b'caf\xc3\xa9', 'café'),
    (dict(at=[datetime.date(2026, 1, 2)]), dict(at=['2026-01-02'])), (b'\xff', KeyError)])
def test_what_is_read_can_be_written(tmp_path, capsys, value, read):
    "Whatever stands in a column that no one reads."
    path = tmp_path/'a.parquet'
    path.write_bytes(as_parquet([dict(r, other=value) for r in PAIRS]))
    rows = read_rows(path)
    write_json(tmp_path/'b.json', rows)
    assert read_json(tmp_path/'b.json') == rows == [
        r if read is KeyError else dict(r, other=read) for r in PAIRS]
    told = f"{path}: the column 'other' holds bytes that are no text" in capsys.readouterr().out
    assert told == (read is KeyError)


def test_a_reader_is_added_by_name(tmp_path, monkeypatch):
    "And is named, with its columns, where a file has none of them."
    def forum(row, title, best, worst):
        return dict(instruction=title.strip(), output_1=worst, output_2=best, preference=2.)
    columns = 'title', 'best', 'worst'
    monkeypatch.setitem(READERS, 'forum', Reader('a forum', 'preference', columns, forum))
    path = write(tmp_path/'a.json', [dict(title=' Hi.', best='Yes?', worst='What?', votes=3)])
    found, = load_records(path, kind='preference')
    assert found == dict(instruction='Hi.', input='', output_1='What?', output_2='Yes?',
                         preference=2., votes=3)
    with pytest.raises(ValueError, match=r'a.json, row 0: no row of a forum \(AttributeError'):
        load_records(write(tmp_path/'a.json', [dict(title=7, best='', worst='')]))
    with pytest.raises(ValueError, match=r"'output_1' is missing; .*SHP \(his.*a forum \(title"):
        load_records(write(tmp_path/'a.json', [dict(instruction='Hi.', answer='')]), kind='pair')


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
def test_published_sets_become_preferences(tmp_path, capsys, kind, suffix):
    rows, preferences, said = KINDS[kind]
    (tmp_path/f'a.{suffix}').write_bytes(FORMATS[suffix](rows))
    found = load_records(str(tmp_path/f'a.{suffix}'), 'preferences', ('preference',))
    def for_blue(r): return r['preference'] if r['output_2'] == 'Blue.' else 3 - r['preference']
    assert [for_blue(r) for r in found] == preferences
    assert all({r['output_1'], r['output_2']} == {'Red.', 'Blue.'} for r in found)
    assert {prompt_key(r) for r in found} == {('Name a colour.', '')}
    assert said in capsys.readouterr().out
    if 'model_a' in rows[0]:
        assert found[0]['generator_1'] == 'one'
    if 'HelpSteer' in kind:
        assert [r['strength'] for r in found][:2] == [3, 2 - (kind[-1] == '3')]
    again = load_records(write(tmp_path/'again.json', found), kind='preference')
    assert again == found
    named = [dict(r, annotator=f'person {i}') for i, r in enumerate(rows)]
    (tmp_path/f'a.{suffix}').write_bytes(FORMATS[suffix](named))
    votes = [v for p in load_sets([str(tmp_path/f'a.{suffix}')])['a'] for v in p['votes'].values()]
    assert len(votes) == len(preferences)
    assert set(votes) <= {1, 1.5, 2}


def test_what_published_sets_leave_open(tmp_path):
    def read(*rows, columns=''):
        return load_records(write(tmp_path/'a.json', rows), kind='preference', columns=columns)
    # both models saw their own first answer: it belongs to the dialogue only where it is shared
    for first, turns in (('Green.', 3), ('Red.', 1)):
        r, = read(vote('model_b') | {f'conversation_{s}': [ASK, say(a), MORE, say(s)] for s, a in
                                     (('a', 'Green.'), ('b', first))})
        assert len(r['messages']) == turns
        assert r['output_2'].endswith('b')
    r, = read(safe(0, 1), columns='better_response_id=safer_response_id')
    assert r['preference'] == 2
    r, = _read_candidates(write(tmp_path/'b.json', [rated(RED, WRONG)]))
    assert r['scores'] == [8., 1.]
    assert r['source'] == ['red.', 'blue.']
    own = [dict(q='Hi.', a='Yes?', b=f'{v}', score=v) for v in (-1, 0, 1)]
    ours = 'instruction=q,output_1=a,output_2=b,'
    found = read(*own, columns=f'{ours}preference_strength=score')
    assert [r['preference'] for r in found] == [1, 1.5, 2]
    with pytest.raises(ValueError, match='row 0: labels is -1'):
        read(*own, columns=f'{ours}labels=score')
    for values in ((-1, 0, 1), (0, 1), (-3, 1), (.2, .8), (-1, 1, 2), (2, -1)):
        rows = [dict(own[0], b=str(v), score=v) for v in values]
        (tmp_path/'b.csv').write_bytes(as_csv(rows))
        for file in (write(tmp_path/'b.json', rows), str(tmp_path/'b.csv')):
            with pytest.raises(ValueError, match=rf'{re.escape(file)}.*preference_strength'):
                load_records(file, kind='preference', columns=f'{ours}preference=score')
    (tmp_path/'c.json').write_text(json.dumps(
        [dict(instruction='q', output_1='a', output_2=f'{v}', preference=v) for v in (-1, 1, 2)]))
    with pytest.raises(ValueError, match='c.json: the labels are -1, 1, 2, in an unknown code'):
        load_sets([str(tmp_path/'c.json')])
    for row in (strength(4), vote('model_c'), dict(vote('tie'), conversation_a='Red.')):
        with pytest.raises(ValueError, match='a.json, row 0'):
            read(row)


def test_what_is_used_and_left_out_is_told(tmp_path, capsys):
    def said(rows, kind):
        load_records(write(tmp_path/'a.json', rows), kind=kind)
        return capsys.readouterr().out
    where = tmp_path/'a.json'
    assert said(ROWS + [dict(ROWS[0], extra='x')], 'output') == (
        f'{where}: 6 rows; used: instruction, input, output; not used: extra\n')
    assert said(PAIRS, 'preference') == (
        f'{where}: 5 rows; used: instruction, input, output_1, output_2, preference\n'
        '  labels preference: 1.0 = the first is better (1); 1.25 = the first is better (1); 1.5 = '
        'both are as good (1); 1.75 = the second is better (1); 2.0 = the second is better (1)\n')
    assert load_records(write(tmp_path/'a.json', ROWS + ROWS[:2]), kind='output') == ROWS
    assert 'a.json: 2 exact duplicates are left out' in capsys.readouterr().out
    missing = [dict(p, preference=l) for p, l in zip(PAIRS, (1, 2, 1.5, None, ''))]
    assert '2 pairs have no label' in said(missing, 'preference')
    equal = [dict(PAIRS[0], output_2='a')]*3
    for rows, why in (([], 'no records$'), (equal, 'no records: 3 pairs have two equal answers'),
                      ([dict(PAIRS[0], preference=None)], 'no records: 1 pairs have no label')):
        with pytest.raises(ValueError, match=why):
            said(rows, 'preference')


HALF = [published.texts('model_a', True), published.texts('model_b', True)]
HALF[1]['response_b'] = r'["Elm \udc00."]'


@pytest.mark.parametrize('name, content, message', [
    ('a.jsonl', b'{"instruction": "a"}\n{"instruction": "b", "x": ["\\uDE00"]}', 'row 1: half'),
    *[(f'votes.{suffix}', form(HALF), 'row 1: half') for suffix, form in FORMATS.items()],
    ('numbers.json', b'[{"instruction": "a", "output": "b"}, 7]', 'row 1: a record is expected'),
    *[('pair.json', as_json([PAIRS[0], dict(PAIRS[1], preference=wrong)]), message) for
      wrong, message in (([], r"'preference' is \[\]"), (3, 'row 1: .*is 3'), ('many', "'many'"),
                         (10**400, 'row 1: .*is 10000'))],
    *[('row.json', as_json([PAIRS[0], dict(PAIRS[1], **{field: wrong})]), f"row 1: .*'{field}' is")
      for field, wrong in (('instruction', '  '), ('output_2', None))],
    ('rlcd.json', as_json([PAIRS[0], dict(PAIRS[1], win2_prob='x')]),
     "row 1: 'win2_prob' is 'x', not a number"),
    *[('ended.json', as_json([PAIRS[0], dict(PAIRS[1], ended_2=wrong)]),
       "row 1: the field 'ended_2' is .* not true or false") for wrong in ('perhaps', 3, [None])],
    ('a.json', b'['*200000 + b']'*200000, 'not valid JSON'), ('a.xlsx', b'PK', 'is not read'),
    ('b.csv', b'instruction,output\nSay,ok\na\n', "row 1: the field 'output'"),
    ('b.json.gz', gzip.compress(b'caf\xe9', mtime=0), 'byte 3 is not UTF-8'),
    ('c.jsonl.gz', b'no gzip', 'cannot be read'), ('e.parquet', b'no parquet', ''),
    ('d.jsonl.gz', gzip.compress(as_json(ROWS), mtime=0)[:-12], 'cannot be read')])
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path/name).write_bytes(content)
    kinds = 'preference', 'pair', 'candidates', 'output'
    for read in (load_records, _read_candidates):
        more = dict(kind=kinds) if read is load_records else {}
        with pytest.raises(ValueError, match=rf'{re.escape(name)}.*{message}') as error:
            read(str(tmp_path/name), **more)
        assert '\n' not in str(error.value)


def turned(*said): return [dict(role=('user', 'assistant')[i % 2], content=t)
                           for i, t in enumerate(said)]


P = dict(instruction='Why?', output_1='a', output_2='b', preference=1)
Q = dict(prompt='Why?', chosen='yes', rejected='no')
ASKS = dict(instruction='Why?', output='So.')
DONE = turned('Hi.', 'Yes?', 'Why?')
WEIGHTED = [*DONE, dict(role='assistant', content='So.', weight=0)]
VOTED = dict(conversation_a=turned('Why?', 'a'), conversation_b=turned('Why?', 'b'))
ZERO = [dict(P, price_per_example=1, output_2=f'{i}', preference=i % 2) for i in range(4)]
TOOLS = [DONE[0], dict(role='tool', content='rain'), DONE[2]]


@pytest.mark.parametrize('rows, kind, columns, wanted', [
    ([dict(Q, score_chosen=s, score_rejected=t)], 'preference', '', dict(preference=p))
    for s, t, p in (('', '', 2), (None, None, 2), ('7', 7, 1.5), ('nan', 'nan', 2), (8, 7, 2))] + [
    (dict(P, question='How?'), 'preference', 'instruction=question', "'question' as 'instruction', w"),
    (dict(ASKS, input='', context='It rains.'), 'output', 'input=context', dict(input='It rains.')),
    *[(Q | {k: 'text' for k in names} | dict(chosen=one, rejected=two), 'preference', '',
       'the name of an answer') for names, one, two in (
        (('response_1', 'response_2'), 'response_1', 'response_2'), (('a', 'b'), 'b', 'a'),
        (('response_1', 'response_2'), 1, 2), (('response_a', 'response_b'), 'model_B', 'model_A'))],
    (dict(Q, chosen='2', rejected='1'), 'preference', '', dict(instruction='Why?')),
    (dict(Q, chosen=str(turned('Why?', 'a')), rejected=str(turned('Why?', 'b'))), 'preference', '',
     "column 'chosen' holds a list as text"),
    (dict(prompt=json.dumps(DONE), completion='So.'), 'output', '', dict(messages=DONE)),
    (dict(messages=json.dumps(turned('Why?', 'So.'))), 'output', '', dict(output='So.')),
    (dict(prompt='List them.', completion='[{"name": "Bo"}]'), 'output', '',
     dict(output='[{"name": "Bo"}]')),
    (dict(ASKS, output='["a", "b"]'), 'output', '', 'output is a list as text in 1 of 1'),
    *[(dict(ASKS, history=[['Hi.', 'Yes?'], *more]), 'output', '', dict(messages=DONE))
      for more in ([['Why?', None]], [['Why?', 'So.']], [])],
    (dict(ASKS, history=[['Why?', None]]), 'output', '', dict(instruction='Why?')),
    (dict(ASKS, history=[['Hi.', None]]), 'output', '', "'history': an answer is empty"),
    (dict(ASKS, history=[['Why?', 'Guess.']]), 'output', '',
     dict(messages=turned('Why?', 'Guess.', 'Why?'))),
    (dict(Q, chosen=turned('How?', 'a'), rejected=turned('How?', 'b')), 'preference', '',
     'prompt differs from the first turn'),
    (dict(messages=turned('Hi.', 'Yes?'), instruction='Use French.'), 'candidates', '',
     '`instruction` beside the prompt'),
    (dict(Q, instruction='Use French.'), 'preference', '', '`instruction` beside the prompt'),
    (dict(P, messages=DONE), 'preference', '', dict(messages=DONE, preference=1)),
    (dict(P, messages=DONE[:1]), 'preference', '', 'the `instruction` is'),
    (ZERO, 'preference', '', 'labels are 0, 1, in an unknown code'),
    (ZERO + [dict(ZERO[0], preference=-1)], 'preference', '', 'labels are -1, 0, 1, in an unknown'),
    *[(dict(P, win2_prob=.75, **more), 'preference', '', dict(preference=1.75))
      for more in ({}, dict(topic='x'))],
    (dict(VOTED, winner='model_a', turn=3), 'preference', '', 'turn is 3, of 1 rounds'),
    (dict(messages=WEIGHTED), 'output', '', 'the answer has weight 0'),
    *[(dict(messages=[dict(DONE[0], **{k: ['x']}), DONE[1]]), 'output', '', f'has `{k}`, which the')
      for k in ('images', 'documents', 'context')],
    *[(dict(ASKS, system_prompt=cell), 'output', '', dict(instruction='Why?'))
      for cell in ('NaN', 'null', 'N/A')],
    (dict(ASKS, output='N/A'), 'output', '', "output is 'n/a' in 1 of 1"),
    (dict(instruction='Why?', output=['a', 'b'], rank=[1, 2]), 'candidates', 'scores=rank',
     'of ranks the lowest is the best'),
    (dict(instruction='Why?', output=['a', 'b', 'c'], place=[1, 3, 2]), 'candidates',
     'scores=place', 'Are they ranks'),
    (dict(P, winner='model_b'), 'preference', '', '1 labels in `winner` contradict'),
    (dict(P, preference='A', overall_preference=3), 'preference', '', 'in `overall_preference` con'),
    ([dict(P, output_1='a\nb'), dict(P, output_1='a\r\nb')], 'preference', '', '1 of 2 rows say what another one says'),
    (dict(system='Be kind.', question='Why?', chosen='x', rejected='y'), 'preference', '',
     'as in prompt=question'),
    (dict(Q, rejected=None), 'preference', '', "the field 'rejected' is empty"),
    (dict(conversations=[{'from': 'human', 'value': 'Why?'}], chosen={'from': 'gpt', 'value': 'x'},
          rejected={'from': 'gpt', 'value': 'y'}), 'preference', '', dict(messages=DONE[2:])),
    (dict(instruction='Why?', output=['a', 'b'], scores=['3', '10']), 'preference', '',
     dict(score_chosen=10.)),
    (dict(instruction='Why?', output=['a', 'b'], scores=['good', 'bad']), 'preference', '',
     "`scores` are .*not numbers"),
    (dict(messages=TOOLS), 'instruction', '', r'^\[\]$')])
def test_odd_data_is_read_as_it_is_meant_or_told(tmp_path, rows, kind, columns, wanted):
    path = write(tmp_path/'a.json', rows if isinstance(rows, list) else [rows])
    found = []
    said = ''
    try:
        found = load_records(path, kind=kind, columns=columns)
        if isinstance(wanted, str):
            said = str(find_odd(read_parts(path, '', columns), [{}], {}))
    except ValueError as e:
        said = str(e)
    if isinstance(wanted, str):
        assert re.search(wanted, said)
        return
    best = found[0].get('preference')
    if 'chosen' in (rows if isinstance(rows, dict) else rows[0]) and best in (1, 2):
        assert found[0][f'output_{best:.0f}'] in ('yes', '2', 'x')
        wanted = {k: v for k, v in wanted.items() if k != 'preference'}
    assert {k: found[0][k] for k in wanted} == wanted


@pytest.mark.parametrize('name, content, wanted', [
    ('a.JSONL', as_lines(ROWS), ROWS), ('a.ndjson', as_lines(ROWS), ROWS),
    ('a.JSONL.GZ', gzip.compress(as_lines(ROWS)), ROWS),
    ('a.jsonl', gzip.compress(as_lines(ROWS), mtime=0), 'it is packed by gzip'),
    ('a.json.gz', gzip.compress(gzip.compress(b'[]', mtime=0), mtime=0), 'it is packed by gzip'),
    ('a.csv', b'PK\x03\x04\xff', 'it is a spreadsheet'), ('a.json', as_parquet(ROWS), 'Parquet'),
    ('b.csv', 'instruction,output\n'.encode('utf-16'), 'it is UTF-16'),
    ('a.csv', b'instruction;output\nWhy?;So.\n', "separated by ';'"),
    ('c.csv', b'instruction\toutput\nWhy?\tSo.\n', 'separated by')])
def test_a_file_is_read_as_what_it_is_or_named(tmp_path, name, content, wanted):
    (tmp_path/name).write_bytes(content)
    def read(): return load_records(str(tmp_path/name), kind='output')
    if isinstance(wanted, list):
        assert read() == wanted
    else:
        with pytest.raises(ValueError, match=rf'{name}.*{wanted}'):
            read()


def test_a_file_that_unpacks_to_more_than_the_memory_holds_is_refused(tmp_path, monkeypatch):
    memory = SimpleNamespace(available=4*10**6)
    monkeypatch.setattr('alpaca_farm.data.records.virtual_memory', lambda: memory)
    rows = [dict(ROWS[0], output='a'*n) for n in (900_000, 90_000)]
    for name in ('a.json.gz', 'a.csv.gz'):
        (tmp_path/name).write_bytes(gzip.compress(FORMATS[name[2:-3]](rows)))
        assert len(load_records(str(tmp_path/name), kind='output')) == 2
        memory.available -= 10**5
        with pytest.raises(ValueError, match=f'{name}: it unpacks to more than 975,000 bytes'):
            load_records(str(tmp_path/name), kind='output')
        memory.available += 10**5


@pytest.mark.parametrize('read', [load_records, _read_candidates, read_recorded,
                                  lambda file: load_sets([file]),
                                  lambda file: recorded_verdicts(file, '', {})])
def test_a_row_that_is_no_object_is_refused_by_every_reader(tmp_path, read):
    for suffix in ('json', 'jsonl'):
        path = tmp_path/f'a.{suffix}'
        path.write_bytes(FORMATS[suffix]([PAIRS[0], 7, PAIRS[2]]))
        with pytest.raises(ValueError, match=rf'a.{suffix}, row 1: '):
            read(str(path))


def test_methods_read_columns_of_other_names(tmp_path):
    "Their own in `columns`, and KTO's in a CSV file; one run reads several files."
    ours = write(tmp_path/'ours.json', ROWS[:1])
    assert load_records(ours, columns='instruction=q, output=a') == ROWS[:1]
    with pytest.raises(ValueError, match='columns = '):
        load_records(ours, columns='question')
    from alpaca_farm import binary_feedback, dpo
    rows = [dict(q=f'Hi {i}.', a='Yes?', b='What?', preference=2) for i in range(4)]
    cfg = dpo.DPOConfig(preferences=write(tmp_path/'pairs.json', rows),
                        columns='instruction=q,output_1=a,output_2=b')
    assert dpo.read_labels(cfg)[0][0]['output_1'] == 'What?'
    path = tmp_path/'kto.csv'
    rows = [dict(prompt=f'Hi {i}.', completion='Yes?', label=i % 2 == 0) for i in range(10)]
    path.write_bytes(as_csv(rows))
    found, fields, labels = dpo.read_labels(dpo.DPOConfig(preferences=str(path), loss_type='kto'))
    assert found[1]['instruction'] == 'Hi 1.'
    assert fields == ('output',)
    assert labels[:3] == [[1.], [0.], [1.]]
    cfg = binary_feedback.BinaryFeedbackConfig(preferences=str(path))
    learn, aside, n = binary_feedback._load_feedback(cfg)
    assert sorted(r['good'] for r in learn + aside) == [0.]*5 + [1.]*5
    assert n == 8
    assert len(aside) == 2


def test_prompts_that_two_splits_share_are_counted(tmp_path, capsys):
    "Of the data, and of labels that another file holds."
    from alpaca_farm import dpo, rrhf, sft
    def said(cls, **files):
        for name, rows in files.items():
            write(tmp_path/f'{name}.json', rows)
        preflight(cls(data=str(tmp_path), **given), ())
        return capsys.readouterr().out
    given = {}
    apart = dict(sft=ROWS[:2], val=ROWS[2:3], eval=ROWS[3:])
    assert 'are also in' not in said(sft.SFTConfig, **apart)
    told = said(sft.SFTConfig, **apart | dict(val=ROWS[1:3], eval=ROWS[2:]))
    assert f'{tmp_path}: 1 of 2 prompts of val are also in sft' in told
    assert f'{tmp_path}: 1 of 3 prompts of eval are also in val' in told
    labels = [dict(r, output_1='a', output_2='b', preference=1) for r in ROWS]
    given = dict(preferences=write(tmp_path/'labels.json', labels[3:]))
    assert f'2 of 3 prompts of eval are also in {given["preferences"]}' in said(dpo.DPOConfig)
    given = dict(preferences=write(tmp_path/'others.json', labels[:2]))
    assert 'are also in' not in said(dpo.DPOConfig)
    given = dict(candidates=write(tmp_path/'labels2.json', labels[4:]), n=0)
    assert '1 of 3 prompts of eval are also in' in said(rrhf.RRHFConfig)


CUT = 'A cup and a hat and a'
WHOLE = 'No.'
LONG_ANSWER = 'A cup.'


def first_is_longer(pairs): return [1. + (len(p['output_1']) < len(p['output_2'])) for p in pairs]


@pytest.fixture(scope='module')
def labelled(base, tmp_path_factory):
    "Labels of pairs of samples, some cut off at their longest length."
    from alpaca_farm import annotators
    folder = tmp_path_factory.mktemp('cut')
    rows = [dict(instruction=f'Name thing {i}.', input='', output=[LONG_ANSWER, CUT, WHOLE][i % 2:],
                 ended=[True, False, True][i % 2:]) for i in range(16)]
    cfg = annotators.AnnotatorsConfig(
        out=str(folder/'run'), outputs=write(folder/'samples.json', rows), label_flip=0.,
        annotators=f'{__name__}:first_is_longer')
    annotators.run(cfg)
    found = load_records(cfg.out, 'preferences', 'preference')
    assert {CUT, WHOLE, LONG_ANSWER} <= {r[f'output_{k}'] for r in found for k in (1, 2)}
    return found


def ends(rows, tokenizer):
    "Of each text, whether an end is behind it in the token ids."
    eos = tokenizer.eos_token_id
    pairs = {(tokenizer.decode(ids, skip_special_tokens=True), eos in ids) for ids in rows}
    assert all(ids.count(eos) == (ids[-1] == eos) for ids in rows)
    return dict(pairs) if len(dict(pairs)) == len(pairs) else pairs


ENDS = {CUT: False, WHOLE: True, LONG_ANSWER: True}


@pytest.mark.parametrize('suffix', FORMATS)
def test_no_end_is_learned_behind_an_answer_that_was_cut_off(
        base, models, labelled, tmp_path, suffix):
    "By every method, from labels in every kind of file; and the labels become candidates."
    from alpaca_farm import binary_feedback, dpo, reward_model, rrhf
    path = tmp_path/f'labels.{suffix}'
    tokenizer = models.tokenizer
    path.write_bytes(FORMATS[suffix](labelled))
    more = dict(preferences=str(path), max_length=100)
    for loss in dpo.DPOConfig.__annotations__['loss_type'].__args__:
        smoothing = dict(label_smoothing=.1) if loss == 'robust' else {}
        cfg = dpo.DPOConfig(loss_type=loss, **smoothing, **more)
        data = dpo.LabelledAnswers(cfg, tokenizer, *dpo.read_labels(cfg))
        assert ends(sum(data.answers, []), tokenizer) == ENDS
    cfg = reward_model.RewardModelConfig(policy=str(base/'sft'), **more)
    pairs, aside, _ = reward_model.load_preference_pairs(Run(cfg, dict(settings={})))
    assert ends(sum(pairs['answers'], []), tokenizer) == ENDS
    learn, aside, _ = binary_feedback._load_feedback(binary_feedback.BinaryFeedbackConfig(**more))
    def rows(records): return encode(records, ('output',), tokenizer, 100)[2][0]
    assert ends(rows(learn + aside), tokenizer) == ENDS
    queries = _read_candidates(str(path))
    assert all(dict(zip(q['output'], q['ended'])).items() <= ENDS.items() for q in queries)
    ids = [ids for q in queries for ids in rrhf._candidate_tokens(q, tokenizer)]
    assert ends(ids, tokenizer) == ENDS
    pairs, = load_sets([str(path)]).values()
    assert all(p[f'ended_{k}'] == ENDS[p[f'output_{k}']] for p in pairs for k in (1, 2))


def test_answers_of_which_nothing_is_known_have_ended(labelled, models, tmp_path):
    "Also in a file where only some are known."
    from alpaca_farm import dpo
    plain = [{k: v for k, v in r.items() if 'ended' not in k} for r in labelled[:8]]
    for rows in (plain, [dict(r, ended_1=None, ended_2='') for r in plain]):
        cfg = dpo.DPOConfig(preferences=write(tmp_path/'a.json', rows))
        data = dpo.LabelledAnswers(cfg, models.tokenizer, *dpo.read_labels(cfg))
        assert set(ends(sum(data.answers, []), models.tokenizer).values()) == {True}


often = settings(max_examples=150, deadline=None, derandomize=True, database=None)
texts = st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\r\0'), max_size=8)


@pytest.fixture(scope='session')
def folder(tmp_path_factory): return tmp_path_factory.mktemp('generated')


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
@given(suffix=st.sampled_from(sorted(FORMATS) + ['xlsx']), packed=st.booleans(),
       content=st.binary(max_size=60) | symbols.map(str.encode))
@example('json', False, b'[' * 900 + b']' * 900)
@example('json', False, b'[' * 100_000)
@example('csv', False, b'a,b\n"')
def test_any_bytes_are_rows_or_refused_by_name(folder, suffix, packed, content):
    if packed and suffix.endswith('gz'):
        content = gzip.compress(content)
    (folder/f'any.{suffix}').write_bytes(content)
    rows = read_or_refuse(folder/f'any.{suffix}')
    assert rows is None or isinstance(rows, list)


@pytest.mark.slow
@often
@given(suffix=st.sampled_from(sorted(FORMATS)), where=st.floats(0, .999), cut=st.integers(0, 12),
       put=st.binary(max_size=4))
def test_a_damaged_file_is_rows_or_refused_by_name(folder, suffix, where, cut, put):
    content = FORMATS[suffix](PAIRS)
    at = int(where*len(content))
    (folder/f'damaged.{suffix}').write_bytes(content[:at] + put + content[at + cut:])
    rows = read_or_refuse(folder/f'damaged.{suffix}', load_records, kind='preference')
    for r in rows or ():
        assert isinstance(r['output_1'], str)
        assert 1 <= r['preference'] <= 2


OURS = {'instruction', 'input', 'output', 'output_1', 'output_2', 'preference', 'x'}
COLUMNS = {c for r in READERS.values() for c in r.columns} | {'win2_prob'}
columns = st.sampled_from(sorted(COLUMNS | {*CODES} | OURS))
roles = st.sampled_from(['user', 'assistant', 'gpt', 'human', ''])
message = st.dictionaries(st.sampled_from(['role', 'from', 'content', 'value']), roles | texts)
messages = st.lists(message, max_size=4)
values = st.recursive(st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | texts,
                      lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=2),
                      max_leaves=4)


@pytest.mark.slow
@often
@given(rows=st.lists(st.dictionaries(columns, messages | values, max_size=6) | values, max_size=3),
       kind=st.sampled_from(sorted(FIELDS)))
def test_any_records_are_valid_or_refused_by_name(folder, rows, kind):
    (folder/'rows.json').write_text(json.dumps(rows))
    found = read_or_refuse(folder/'rows.json', load_records, kind=kind)
    if found is not None:
        assert check_records(found, kind, 'again') == found
    assert len(found or ()) <= len(rows)


demonstration = st.fixed_dictionaries(
    dict(instruction=texts.filter(str.strip), input=texts, output=texts))


@often
@given(rows=st.lists(demonstration, min_size=1, max_size=4, unique_by=repr),
       suffix=st.sampled_from(sorted(FORMATS)))
def test_any_texts_are_read_back(folder, rows, suffix):
    (folder/f'texts.{suffix}').write_bytes(FORMATS[suffix](rows))
    assert load_records(str(folder/f'texts.{suffix}'), kind='output') == rows


@pytest.mark.parametrize('pairs', ['candidates', 'scored', 'against'])
def test_pairs_say_which_answer_was_cut_off(tmp_path, pairs):
    "Of candidates, by scores or not, and of two files of answers."
    from alpaca_farm.annotators import AnnotatorsConfig
    from alpaca_farm.judging.judges import load_pairs
    ask = dict(instruction='Name a thing.', input='')
    many = dict(ask, output=[CUT, WHOLE], ended=[False, True])
    more = {}
    if pairs == 'scored':
        path = write(tmp_path/'a.json', [dict(many, scores=[2., 1.])])
        found = load_records(path, kind='preference')
        assert found[0][f'output_{found[0]["preference"]:.0f}'] == CUT
    else:
        if pairs == 'against':
            more = dict(against=write(tmp_path/'b.json', [dict(ask, output=CUT, ended=False)]))
            many = dict(ask, output=WHOLE, ended=True)
        found = load_pairs(AnnotatorsConfig(outputs=write(tmp_path/'a.json', [many]), **more))
    for k in (1, 2):
        assert found[0][f'ended_{k}'] == (found[0][f'output_{k}'] == WHOLE)
    assert 'ended' not in found[0]
