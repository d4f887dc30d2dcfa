"""The same records from every format, splits of folders, and names of the hub."""
import csv
import gzip
import json

import pytest

from alpaca_farm.core.data import find_file, load_records, prompt_key
from alpaca_farm.core.settings import looks_like_hub

ROWS = [dict(instruction=f'Say "{i}",\nplease: café \u2028 {i}.', input='' if i % 2 else f'line\n{i}', output=f' {i}, ok\t', extra=str(i))
        for i in range(5)]
PAIRS = [dict(instruction=f'Say {i}.', input='', output_1='a', output_2=f'b{i}', preference=1. + i/4) for i in range(5)]


def as_csv(rows):
    import io
    f = io.StringIO()
    w = csv.DictWriter(f, rows[0])
    w.writeheader(); w.writerows(rows)
    return f.getvalue().encode()


def as_lines(rows): return '\n'.join(json.dumps(r) for r in rows).encode()


def as_parquet(rows):
    import io
    import pyarrow
    import pyarrow.parquet
    f = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), f)
    return f.getvalue()


def as_json(rows): return json.dumps(rows, indent=1).encode()


FORMATS = dict(json=as_json, jsonl=as_lines, csv=as_csv, parquet=as_parquet)
FORMATS |= {f'{k}.gz': lambda rows, f=f: gzip.compress(f(rows)) for k, f in FORMATS.items() if k != 'parquet'}


@pytest.mark.parametrize('suffix', FORMATS)
@pytest.mark.parametrize('rows, kind', [(ROWS, 'output'), (PAIRS, 'preference')])
def test_every_format_gives_the_same_records(tmp_path, suffix, rows, kind):
    (tmp_path/f'sft.{suffix}').write_bytes(FORMATS[suffix](rows))
    for spec in (tmp_path, tmp_path/f'sft.{suffix}'):
        assert load_records(str(spec), 'sft', kind) == rows
        assert load_records(str(spec), 'sft', kind, 2) == rows[:2]


def test_unescaped_line_separators_in_json_lines(tmp_path):
    "U+2028 and its like are text, not the end of a line."
    rows = [dict(instruction='one\u2028two\x85three', input='', output='a\u2029b')]
    (tmp_path/'a.jsonl').write_text(json.dumps(rows[0], ensure_ascii=False) + '\n', encoding='utf-8')
    assert load_records(str(tmp_path/'a.jsonl'), kind='output') == rows


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path):
    "Spreadsheets save UTF-8 with one."
    (tmp_path/'a.csv').write_bytes(b'\xef\xbb\xbf' + as_csv(ROWS))
    assert load_records(str(tmp_path/'a.csv'), kind='output') == ROWS


def test_windows_line_ends(tmp_path):
    (tmp_path/'a.jsonl').write_bytes(as_lines(ROWS).replace(b'\n', b'\r\n') + b'\r\n\r\n')
    assert load_records(str(tmp_path/'a.jsonl')) == ROWS


def test_input_may_be_missing_or_null(tmp_path):
    (tmp_path/'a.json').write_text(json.dumps([dict(instruction='a'), dict(instruction='b', input=None)]))
    assert [r['input'] for r in load_records(str(tmp_path/'a.json'))] == ['', '']
    assert prompt_key(dict(instruction='a')) == prompt_key(dict(instruction='a', input=None)) == ('a', '')


def test_candidates(tmp_path):
    rows = [dict(instruction='a', input='', output=['x', 'y'], scores=[1., 2.])]
    (tmp_path/'candidates.json').write_text(json.dumps(rows))
    assert load_records(str(tmp_path), 'candidates', 'candidates') == rows


def test_splits(base):
    sizes = dict(sft=60, preference=60, unlabeled=60, val=20, eval=30)
    splits = {name: load_records(str(base/'world'), name, 'output') for name in sizes}
    assert {k: len(v) for k, v in splits.items()} == sizes
    prompts = [prompt_key(r) for rows in splits.values() for r in rows]
    assert len(set(prompts)) == len(prompts)  # no request in two splits


def test_a_folder_says_what_it_holds(base, tmp_path):
    with pytest.raises(FileNotFoundError, match=r'no test\.json in it; it holds .*eval\.json, .*val\.json'): find_file(str(base/'world'), 'test')
    with pytest.raises(FileNotFoundError, match='no data file'): find_file(str(tmp_path), 'eval')
    with pytest.raises(FileNotFoundError, match='no such file or folder'): find_file(str(tmp_path/'lost'), 'eval')


@pytest.mark.parametrize('name, is_hub', [
    ('tatsu-lab/alpaca', True), ('a/b', True), ('nbs/nothing', False), ('no/such/folder', False), ('no/such.json', False), ('data', False),
    ('./a/b', False), ('../data', False), ('~/data', False), ('/tmp/data', False), ('a/', False), ('', False)])
def test_hub_names(name, is_hub):
    assert looks_like_hub(name) == is_hub
