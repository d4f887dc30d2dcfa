"""What is seen before anything is trained or paid for: findings, first records, and runs' data."""
import shlex

import pytest

import tiny
from alpaca_farm.data.formats import ANNOTATOR_FIELDS, as_records
from alpaca_farm.data.shown import describe_columns, learned_texts
from alpaca_farm.look_at_data import collect_votes, count_tokens, find_odd, LookAtDataConfig
from alpaca_farm.look_at_data import read_parts, training_command
from alpaca_farm.run.files import read_json
from alpaca_farm.run.runs import _write_card, read_summary

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
    return [(f['split'], f['finding'], f['rows']) for f in
            find_odd(parts, lengths, LIMITS, tokenizer.all_special_tokens)]


CLEAN = [row(i) for i in range(20)]
WHOLE = [row(30), row(31)]   # beside which a fault stands, the last row that is read
PLANTED = {   # a finding, by what is planted behind the clean rows
    'longer than max_prompt = 60 tokens': [row(32, instruction='Which number? ' * 5)],
    'longer than max_new_tokens = 20 tokens': [row(32, output_2='It is a number. ' * 2)],
    'longer than max_length = 70 tokens': [row(32, instruction='x' * 55, output_1='It is 33, yes.')],
    '1 rows repeat another exactly': [row(3)],
    '1 rows have no label, or two equal answers': [row(32, preference=None)],
    'output_1 is empty in 1 of 21': [row(32, output_1='')],
    "output_2 is 'nan' in 1 of 21": [row(32, output_2='nan')],
    'output_1 is a list as text in 1 of 21': [row(32, output_1='["3", "4"]')],
    '1 prompts have `tools`, which the model is not shown': [row(32, tools=[dict(name='sky')])],
    'columns that no one reads: scene': [row(32, scene='In a town.')],
    '1 rows say that their answers were shown swapped': [row(32, shown_swapped='True')],
    "the annotators 'Ann', 'ann' count as different ones": [row(32, annotator='Ann')],
    '1 labels in `winner` contradict `preference`': [row(32, winner='model_b')],
    '1 dialogues have a turn': [dict(row(32), instruction=None, messages=[
        dict(role='user', content='Say:\n\nHuman: Hi.')])],
    '1 of 42 answers begin with their prompt': [row(32, output_1=row(32)['instruction'] + ' 3.')],
    '1 of 42 answers are cut off': [row(32, ended_1=False)],
    '1 of 42 answers end inside a character': [row(32, output_2='It is \ufffd')],
    '1 of 42 answers have a special token': [row(32, output_1='It is 33.</s>')],
    '1 of 21 rows say what another one says': [row(3, source='copied')],
    '1 prompts differ from another in white space only': [
        row(3, instruction=row(3)['instruction'].replace(' ', '  '), output_1='4.')],
    '1 of 21 labels are ties': [row(32, preference=1.5)],
    '1 of 1 chosen answers have the lower score': [row(32, score_chosen=1, score_rejected=2)],
    '1 of 20 pairs are labelled both ways': [row(3, preference=1.)],
    '1 votes are a second one of the same annotator': [row(3, time=2.)],
    '1 of 20 pairs have several votes; two are the same in 100%': [row(3, annotator='bob')],
    '1 of 20 pairs have several votes; two are the same in 0%': [   # as shown, whatever the order
        dict(row(3), output_1='It is 3!', output_2='It is 4.', annotator='bob')],
    'the first answer is better in 75% of the labels [60%, 86%]': [
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


def test_prompts_that_are_learned_and_measured_on_are_counted(tmp_path):
    "White space aside, of every split that is measured on."
    asked = [dict(instruction=' '.join(row(i)['instruction'].split(' ')) + '\n') for i in (3, 50)]
    found = odd(tmp_path, CLEAN, val=asked, eval=[dict(instruction='Name a fruit.'), asked[1]])
    assert ('val', '1 of 2 prompts are also in preferences', [0]) in found
    assert ('eval', '1 of 2 prompts are also in val', [1]) in found
    assert len(found) == 2


@pytest.mark.parametrize('field', ANNOTATOR_FIELDS)
def test_votes_are_those_of_different_people(field):
    rows = [row(1), row(1, time=3.), row(1, annotator='bob', preference=1.)]
    for r in rows:
        r[field] = r.pop('annotator')
    twice = collect_votes(rows)
    assert [p['votes'] for p in twice[0]] == [dict(ann=2., bob=1.)]
    assert twice[1] == [1]


@pytest.mark.parametrize('wrong', [2, -1, 'thumbs_up', None])
def test_labels_of_answers_that_are_none_are_found(tmp_path, wrong):
    "With the row and the field, as training refuses them; they are not said to be good or bad."
    rows = [dict(prompt=f'Say {i}.', completion='1.', label=k) for i, k in enumerate((1, 0, wrong))]
    found = [f[1] for f in odd(tmp_path, rows)]
    assert any("row 2: the field 'label' is" in text for text in found)
    said = as_read(rows, 'output')
    assert '0 = the answer is bad (1); 1 = the answer is good (1)' in said
    assert str(wrong) not in said


KINDS = dict(
    asked=([dict(prompt=r['instruction'], **{k: v for k, v in r.items() if k != 'instruction'})
            for r in CLEAN], 'dpo'),
    preference=(CLEAN, 'dpo'), pair=([{k: v for k, v in r.items() if k != 'preference'}
                                      for r in CLEAN], 'annotators'),
    output=([dict(instruction=f'Say {i}.', output=f'{i}.') for i in range(9)], 'sft'),
    label=([dict(prompt=f'Say {i}.', completion='1.', label=i < 4) for i in range(9)], 'dpo'),
    candidates=([dict(instruction=f'Say {i}.', output=['1.', '2.']) for i in range(9)],
                'annotators'),
    scores=([dict(instruction=f'Say {i}.', output=['1.', '2.'], scores=[1, i])
             for i in range(9)], 'dpo'),
    instruction=([dict(instruction=f'Say {i}.') for i in range(9)], 'best_of_n'))


@pytest.mark.parametrize('kind', KINDS)
def test_the_command_is_one_that_begins(base, tmp_path, kind):
    "Its settings are those of the notebook, and it reads the data."
    rows, method = KINDS[kind]
    file = tiny.write(tmp_path/'mine.json', rows)
    cfg = LookAtDataConfig(data=file, policy=str(base/'sft'), max_length=100)
    words = shlex.split(training_command(read_parts(file), cfg))
    assert words[1] == f'nbs/{method}.ipynb'
    given = tiny.given(words)
    tiny.check_settings(method, given)
    own = tiny.config(method, **given)
    assert file in vars(own).values()
    assert getattr(own, 'max_length', 100) == 100


def test_a_run_says_what_is_odd_and_leaves_it(base, tmp_path, capsys):
    out = tiny.run('look_at_data', base, tmp_path/'look').folder
    first = tiny.run('look_at_data', base, tmp_path/'first', max_instances=7)
    assert read_summary(first.folder)['records'] == dict(preferences=7)
    said = capsys.readouterr().out
    found = read_json(out/'findings.json')
    assert all(f'{f["split"]}: {f["finding"]}' in said for f in found)
    assert read_summary(out)['command'] in said
    assert (out/'lengths.png').exists()
    assert 'the first of 60 records, as the model reads it' in said
    cfg = tiny.config('look_at_data', **tiny.settings('look_at_data', base, out=str(out)))
    assert len(tiny.show_results('look_at_data', cfg)) > 2
    with pytest.raises(FileNotFoundError, match='there is no .*it holds calibration.json') as e:
        read_parts(str(base/'reward_model'))
    assert '\n' not in str(e.value)
    with pytest.raises(ValueError, match='^policy = .*name one'):
        LookAtDataConfig(policy='')


def as_read(rows, kind='preference'):
    return describe_columns(rows, as_records(rows, 'a.json', [kind]))


def test_columns_and_labels_are_told():
    "Which are used and which are not, and what each label was taken for."
    rows = [dict(prompt='a', response_a='b', response_b='c', winner=w, turn=1)
            for w in ('model_a', 'model_b', 'model_b', 'tie')]
    assert as_read(rows).splitlines() == [
        '4 rows; used: prompt, response_a, response_b, winner; not used: turn',
        '  labels winner: model_a = the first is better (1); model_b = the second is better (2); '
        'tie = both are as good (1)']
    coded = [dict(instruction='a', output_1='b', output_2='c', better=k) for k in (0, 1, 2, 2)]
    names = 'tie_first_second=better'
    said = describe_columns(coded, as_records(coded, 'a.json', ['preference'], names),
                            dict(better='tie_first_second'))
    assert 'labels better: 0 = both are as good (1); 1 = the first is better (1); 2' in said
    ours = [dict(instruction='a', output_1='b', output_2='c', better=1)]
    names = 'preference=better'
    said = describe_columns(ours, as_records(ours, 'a.json', ['preference'], names),
                            dict(better='preference'))
    assert 'output_2, better\n' in said
    assert 'not used' not in said
    talk = [[dict(role='user', content='a'), dict(role='assistant', content=text)] for text in 'bc']
    arena = [dict(conversation_a=talk[0], conversation_b=talk[1], winner='model_a', turn=1)]
    assert 'not used' not in as_read(arena)
    soft = [row(i, preference=1 + i/100) for i in range(100)]
    assert 'labels preference: both are as good (1); the first is better (50); the' in as_read(soft)
    assert as_read([dict(instruction='a', input='', output='b')], 'output') == ''


@pytest.mark.parametrize('p, better, name', [
    (1., 'b', 'better answer'), (2., 'c', 'better answer'), (1.2, 'b', 'better answer (by 80%)'),
    (1.5, 'b', 'answer 1'), (None, 'b', 'answer 1')])
def test_the_better_answer_is_shown_first(p, better, name):
    shown = learned_texts(dict(output_1='b', output_2='c', preference=p, ended_2=False))
    assert shown[0] == (name, better, better == 'b')
    assert len(shown) == 2


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
    "None of them is lost, and the card is gone with the last one."
    from datasets import load_dataset
    told = dict(sft=[dict(instruction='a', output='b')], val=[dict(instruction='a', output='c')],
                eval=[dict(instruction='a', output=None, id=1)],
                candidates=[dict(instruction='a', output=['b'])], config=dict(a=1), leads=[[1.]],
                more=[dict(text='a')], others=[dict(text='b')])
    folder = tmp_path/'run'
    for name, rows in told.items():
        tiny.write(folder/f'{name}.json', rows)
    _write_card(folder)
    card = (folder/'README.md').read_bytes()
    _write_card(folder)
    assert (folder/'README.md').read_bytes() == card
    read = {name: load_dataset(str(folder), name, cache_dir=str(tmp_path/'cache'))
            for name in ('default', 'eval', 'candidates', 'sft')}
    assert {name: sorted(splits) for name, splits in read.items()} == dict(
        default=['more', 'others'], eval=['eval'], candidates=['candidates'], sft=['sft', 'val'])
    for file in folder.glob('*.json'):
        file.unlink()
    _write_card(folder)
    assert not (folder/'README.md').exists()
    tiny.write(folder/'sft.json', told['sft'])
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
