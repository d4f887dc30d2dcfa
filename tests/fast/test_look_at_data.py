"""What is seen before anything is trained or paid for: findings, first records, and runs' data."""
import shlex

import pytest

import tiny
from alpaca_farm.data.formats import as_records
from alpaca_farm.data.shown import describe_columns, learned_texts
from alpaca_farm.look_at_data import find_odd, LookAtDataConfig, read_parts
from alpaca_farm.look_at_data import training_command
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import _write_card, read_summary
from alpaca_farm.train.preflight import count_tokens

LIMITS = dict(max_prompt=60, max_new_tokens=20, max_length=70)


def row(i, **more):
    asked = dict(instruction=f'Which number comes after {i}?', input='')
    both = dict(output_1=f'It is {i + 1}.', output_2=f'It is {i}!', preference=1. + i % 2)
    return asked | both | dict(annotator='ann') | more


def odd(folder, rows, **files):
    "What is found in a file of labels, and in others beside it, by split."
    tokenizer = tiny.letters()
    for name, others in dict(preferences=rows, **files).items():
        tiny.write(folder/f'{name}.json', others)
    parts = read_parts(str(folder))
    lengths = [count_tokens(part.records, tokenizer) for part in parts]
    found = find_odd(parts, lengths, LIMITS, tokenizer.all_special_tokens)
    return [(f['split'], f['finding'], f['rows']) for f in found]


CLEAN = [row(i) for i in range(20)]
PLANTED = {   # a finding, by what is planted behind the clean rows
    'longer than max_new_tokens = 20 tokens': [row(32, output_2='It is a number. ' * 2)],
    'longer than max_length = 70 tokens': [row(32, instruction='x' * 55, output_1='It is 33, yes.')],
    '1 rows repeat another exactly': [row(3)],
    '1 rows have no label, or two equal answers': [row(32, preference=None)],
    '2 rows have no label, or two equal answers': [row(32, preference=None)]*2,
    '2 rows repeat another exactly': [row(3, preference='b'), row(3, preference='2')],
    '1 prompts have `tools`, which the model is not shown': [row(32, tools=[dict(name='sky')])],
    '1 rows say that their answers were shown swapped': [row(32, shown_swapped='True')],
    '1 of 21 labels are ties': [row(32, preference=1.5)],
    'the first answer is better in 75 % of the labels [60, 86]': [
        row(40 + i, preference=1.) for i in range(20)]}


def test_nothing_is_found_in_clean_data(tmp_path):
    others = dict(val=[dict(instruction=f'Name a fruit {i}.') for i in range(3)])
    assert odd(tmp_path, CLEAN, **others) == []


@pytest.mark.parametrize('text', PLANTED)
def test_each_fault_is_found_and_counted(tmp_path, text):
    found = odd(tmp_path, CLEAN + PLANTED[text])
    said, = [f for f in found if text in f[1]]
    assert said[0] == 'preferences'
    assert all(r in (3, 20) for r in said[2])


IGNORED = {   # rows whose first has no answer, or no label, and what is said of the others
    'an answer': [dict(instruction='a'), dict(instruction='b', output='c')],
    'an answer,': [dict(prompt='a', completion=None), dict(prompt='b', completion='c')],
    'a label': [row(1) | dict(preference=None), row(2)]}
del IGNORED['a label'][0]['preference']


@pytest.mark.parametrize('what', IGNORED)
def test_answers_and_labels_that_are_ignored_are_told(tmp_path, what):
    said, = [f for f in odd(tmp_path, IGNORED[what]) if 'ignored' in f[1]]
    assert said[1].startswith(f'1 rows have {what}')


def test_prompts_that_are_learned_and_measured_on_are_counted(tmp_path):
    "White space aside, of every split that is measured on."
    learned = dict(instruction=row(3)['instruction'] + '\n')
    chosen_on = dict(instruction='Name a stone.')
    found = odd(tmp_path, CLEAN, val=[learned, chosen_on], eval=[chosen_on])
    assert found == [('val', '1 of 2 prompts are also in preferences', [0]),
                     ('eval', '1 of 1 prompts are also in val', [0])]


@pytest.mark.parametrize('wrong', [2, -1, 'thumbs_up', None])
def test_labels_of_answers_that_are_none_are_found(tmp_path, wrong):
    "With the row and the field, as training refuses them; they are not said to be good or bad."
    rows = [dict(prompt=f'Say {i}.', completion='1.', label=k) for i, k in enumerate((1, 0, wrong))]
    found = [f[1] for f in odd(tmp_path, rows)]
    assert any("row 2: the field 'label' is" in text for text in found)
    said = as_read(rows, 'output')
    assert '0 = the answer is bad (1); 1 = the answer is good (1)' in said
    assert str(wrong) not in said


def without(rows, field): return [{k: v for k, v in r.items() if k != field} for r in rows]


ASKED = [dict(instruction=f'Say {i}.') for i in range(9)]
TWO = [dict(r, output=['1.', '2.']) for r in ASKED]
LIKED = [dict(prompt=f'Say {i}.', completion='1.', label=i < 4) for i in range(9)]
PROMPTED = [dict(r, prompt=r['instruction']) for r in CLEAN]
KINDS = dict(   # data, and the notebook that learns from it
    asked=(without(PROMPTED, 'instruction'), 'dpo'),
    preference=(CLEAN, 'dpo'),
    pair=(without(CLEAN, 'preference'), 'annotators'),
    output=([dict(r, output='1.') for r in ASKED], 'sft'),
    label=(LIKED, 'dpo'),
    candidates=(TWO, 'annotators'),
    scores=([dict(r, scores=[1, i]) for i, r in enumerate(TWO)], 'dpo'),
    instruction=(ASKED, 'best_of_n'))


@pytest.mark.parametrize('kind', KINDS)
def test_the_command_is_one_that_begins(base, tmp_path, kind):
    "Its settings are those of the notebook, and it reads the data."
    rows, method = KINDS[kind]
    file = tiny.write(tmp_path/'mine.json', rows)
    given = dict(max_length=100, max_instances=7, template_arguments=dict(enable_thinking=True))
    cfg = LookAtDataConfig(data=file, policy=str(base/'sft'), **given)
    words = shlex.split(training_command(read_parts(file), cfg))
    assert words[1] == f'nbs/{method}.ipynb'
    written = tiny.given(words)
    if method == 'annotators':   # whom only the user can name
        assert written['annotators'] == 'my_module:my_judge'
        written['annotators'] = 'alpaca_farm.boards.agreement:prefer_longer'
    tiny.check_settings(method, written)
    own = tiny.config(method, **written)
    assert file in vars(own).values()
    for name, value in given.items():
        assert getattr(own, name, value) == value


def test_the_command_reads_the_split_that_was_looked_at(base, tmp_path):
    for name in ('train', 'mine'):
        file = tiny.write(tmp_path/f'{name}.json', KINDS['preference'][0])
    cfg = LookAtDataConfig(data=str(tmp_path), split='mine', policy=str(base/'sft'))
    words = shlex.split(training_command(read_parts(cfg.data, cfg.split), cfg))
    assert tiny.given(words)['preferences'] == file


def test_a_run_says_what_is_odd_and_leaves_it(base, tmp_path, capsys):
    out = tiny.run('look_at_data', base, tmp_path/'look', max_instances=50).folder
    said = capsys.readouterr().out
    for f in read_json(out/'findings.json'):
        assert f'{f["split"]}: {f["finding"]}' in said
    assert read_summary(out)['command'] in said
    assert read_summary(out)['records'] == dict(preferences=50)
    assert (out/'lengths.png').exists()
    assert 'the first of 50 records, as the model reads it' in said
    cfg = tiny.config('look_at_data', **tiny.settings('look_at_data', base, out=str(out)),
                      max_instances=50)
    assert len(tiny.show_results('look_at_data', cfg)) > 2


def test_what_cannot_be_looked_at_is_refused(base):
    with pytest.raises(FileNotFoundError, match='calibration.json[^\n]*$'):
        read_parts(str(base/'reward_model'))
    with pytest.raises(ValueError, match='^policy'):
        LookAtDataConfig(policy='')


def as_read(rows, kind='preference', **codes):
    "What is said of records, whose columns are perhaps labels in a code."
    columns = ','.join(f'{code}={column}' for column, code in codes.items())
    return describe_columns(rows, as_records(rows, 'a.json', [kind], columns), codes)


def test_labels_in_a_code_are_told():
    rows = [dict(instruction='a', output_1='b', output_2='c', better=k) for k in (0, 1, 2, 2)]
    said = as_read(rows, better='tie_first_second')
    assert 'labels better: 0 = both are as good (1); 1 = the first is better (1); 2' in said
    said = as_read(rows[1:2], better='preference')
    assert 'output_2, better\n' in said
    assert 'not used' not in said


def test_columns_of_an_arenas_dialogues_are_all_used():
    asked = dict(role='user', content='a')
    one, two = ([asked, dict(role='assistant', content=text)] for text in 'bc')
    row = dict(conversation_a=one, conversation_b=two, winner='model_a', turn=1)
    assert 'not used' not in as_read([row])


def test_soft_labels_are_told_by_the_better_answer():
    soft = [row(i, preference=1 + i/100) for i in range(100)]
    said = as_read(soft)
    assert 'labels preference: both are as good (1); the first is better (50); the' in said


@pytest.mark.parametrize('p, name', [(1., 'better answer'), (1.5, 'answer 1'), (None, 'answer 1')])
def test_the_first_answer_is_shown_first_unless_the_other_is_better(p, name):
    shown = learned_texts(dict(output_1='b', output_2='c', preference=p))
    assert shown[0] == (name, 'b', True)


RUNS = {'world': {'': ['eval', 'preference', 'sft', 'unlabeled', 'val'], 'labelled': ['labelled']},
        'annotators': {'': ['preferences']}, 'sft': {'': ['outputs']},
        'samples': {'': ['candidates'], 'outputs': ['outputs']}}


@pytest.mark.parametrize('name', RUNS)
def test_datasets_reads_what_a_run_leaves(base, tmp_path, name):
    "All splits, each with all its rows; what is not data is not read."
    from datasets import load_dataset
    for config, splits in RUNS[name].items():
        read = load_dataset(str(base/name), config or None, cache_dir=str(tmp_path))
        assert sorted(read) == splits
        for split in splits:
            rows = read_json(base/name/f'{split}.json')
            assert len(read[split]) == len(rows)
            assert {*read[split][0]} >= {*rows[0]}
            assert read[split][-1]['instruction'] == rows[-1]['instruction']


def test_files_of_other_columns_or_types_are_no_splits_of_each_other(tmp_path):
    "None of them is lost; a card of one's own stays."
    from datasets import load_dataset
    told = dict(
        sft=[dict(instruction='a', output='b')],
        val=[dict(instruction='a', output='c')],
        eval=[dict(instruction='a', output=None, id=1)],
        candidates=[dict(instruction='a', output=['b'])],
        config=dict(a=1),
        leads=[[1.]],
        more=[dict(text='a')],
        others=[dict(text='b')])
    folder = tmp_path/'run'
    for name, rows in told.items():
        tiny.write(folder/f'{name}.json', rows)
    _write_card(folder)
    card = (folder/'README.md').read_bytes()
    _write_card(folder)
    assert (folder/'README.md').read_bytes() == card
    wanted = dict(default=['more', 'others'], eval=['eval'], candidates=['candidates'],
                  sft=['sft', 'val'])
    for name, splits in wanted.items():
        read = load_dataset(str(folder), name, cache_dir=str(tmp_path/'cache'))
        assert sorted(read) == splits
    (folder/'README.md').write_text('# Mine')
    _write_card(folder)
    assert (folder/'README.md').read_text() == '# Mine'


def test_a_sampled_answer_is_not_said_to_be_learned(base, tmp_path, capsys):
    "Though the instructions stand beside demonstrations; the tokens of the template are seen."
    tiny.run('best_of_n', base, tmp_path/'run', max_instances=4)
    said = capsys.readouterr().out
    assert 'the first of 4 records' in said
    assert "<sep>'\n  its answer is sampled, until '</s>'" in said
    assert 'learned' not in said
    assert said.count('the first of') == 1


def test_labels_that_nothing_reads_are_not_called_used(base, tmp_path, capsys):
    "A column `label` beside two answers; `held_out` is read."
    rows = [dict(r, label=i % 2, held_out=i < 3) for i, r in enumerate(KINDS['pair'][0])]
    out = tiny.run('look_at_data', base, tmp_path/'look', data=tiny.write(tmp_path/'a.json', rows))
    said = capsys.readouterr().out
    assert 'not used: label' in said
    assert 'the answer is good' not in said
    assert 'to have it labelled' in said
