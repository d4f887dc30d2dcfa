"Labels in files of other tools: what counts, for whom, and how often."
import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

import tiny
from alpaca_farm import decide
from alpaca_farm.annotators import annotate_pairs
from alpaca_farm.auto_annotations import alpaca_leaderboard
from alpaca_farm.boards.agreement import verdicts_of_judges
from alpaca_farm.boards.text import taste_scorer, word_scorer
from alpaca_farm.data.pairs import PAIR_FIELDS
from alpaca_farm.judging.duels import check_drawn
from alpaca_farm.judging.judges import load_annotators, read_recorded, RecordedLabels
from alpaca_farm.judging.label_files import load_sets, recorded_verdicts
from alpaca_farm.labelling import MethodDuels

PAIR = dict(instruction='q', input='', output_1='a', output_2='b')
SETS = dict(s=[dict(PAIR, votes=dict(x=1.))])


@pytest.mark.parametrize('mark', [dict(status='discarded'), dict(was_cancelled='true')])
def test_discarded_votes_are_no_labels(tmp_path, mark):
    rows = [dict(PAIR, preference=1, annotator='x'), dict(PAIR, preference=2, annotator='y', **mark)]
    file = tiny.write(tmp_path/'labels.json', rows)
    assert RecordedLabels(read_recorded(file))([PAIR]) == [1.]


def test_votes_by_name_are_labels(tmp_path):
    file = tiny.write(tmp_path/'labels.json', [dict(PAIR, votes=dict(x=1, y=2, z=2))])
    assert RecordedLabels(read_recorded(file))([PAIR]) == [pytest.approx(5/3)]


def test_votes_count_beside_an_empty_preference(tmp_path):
    "As data frames fill it where there is no majority."
    file = tiny.write(tmp_path/'labels.json', [dict(PAIR, preference=None, votes=dict(x=1, y=2))])
    (pair,), = load_sets([file]).values()
    assert pair['votes'] == dict(x=1, y=2)


def test_labels_in_a_folder_with_brackets(tmp_path, monkeypatch):
    "In the path of a file, and in the folder in which a pattern is looked for."
    folder = tmp_path/'[2026] labels'
    folder.mkdir()
    row = dict(instruction='Why?', output_1='a', output_2='b', preference=1)
    file = tiny.write(folder/'people.json', [row])
    monkeypatch.chdir(folder)
    for spec in (file, 'people.json', 'peop*.json', f'{tmp_path}/*/peop*.json'):
        (pair,), = load_sets([spec]).values()
        assert pair['votes'] == dict(people=1)


def test_a_column_judge_names_judges(tmp_path):
    rows = [dict(PAIR, preference=1, judge='gpt'), dict(PAIR, preference=2, judge='claude'),
            dict(PAIR, preference=2, judge='claude', annotator=None)]
    found = recorded_verdicts(tiny.write(tmp_path/'verdicts.json', rows), '', SETS)
    assert {judge for _, judge in found} == {'gpt', 'claude'}


def test_brackets_in_a_name_are_no_pattern(tmp_path, monkeypatch):
    "Of a file, of the folder of all paths, and of a judge."
    folder = tmp_path/'my[1]'
    folder.mkdir()
    for name in 'ab':
        tiny.write(folder/f'{name}[2].json', [dict(PAIR, preference=1, judge=f'{name}[3]')])
    monkeypatch.chdir(folder)
    assert [len(load_sets([spec]).popitem()[1]) for spec in ('a[2].json', '*.json')] == [1, 1]
    assert [*recorded_verdicts('a[2].json', 'a[3]', SETS)] == [('s', 'a[3]')]


def test_no_judge_is_called_people(tmp_path):
    "The board's row of those who voted has this name."
    file = tiny.write(tmp_path/'people.json', [dict(PAIR, preference=2)])
    with pytest.raises(ValueError, match='called people'):
        verdicts_of_judges([file], SETS, None)


def test_the_last_vote_of_a_person_counts_in_a_decision(tmp_path):
    rows = [dict(PAIR, preference=vote, annotator='x') for vote in (1, 2)]
    known = decide._known_labels(tiny.write(tmp_path/'labels.json', rows))
    assert [r['preference'] for r in known] == [2.]


def test_labels_of_the_check_count_once_without_drawn(tmp_path, monkeypatch):
    "A table program has kept the request, the answers and the label only."
    def said(answer):
        return [dict(instruction=f'{i}?', input='', output=[f'{answer}{i}']) for i in range(80)]
    monkeypatch.setattr(decide, 'read_answers', lambda *a, **k: said('t'))
    cfg = SimpleNamespace(labels='', budget=200, runs='r', seed=0)
    first, _ = decide._first_pairs(cfg, said('s'))
    rows = [{k: pair[k] for k in PAIR_FIELDS} | dict(preference=2) for pair in first]
    cfg.labels = tiny.write(tmp_path/'labels.json', rows)
    assert decide._first_pairs(cfg, said('s')) == (first, [])


def test_a_duel_with_its_input_in_the_instruction_is_kept():
    "As AlpacaEval writes requests."
    pair = dict(PAIR, input='Haus', drawn='duel')
    label = dict(PAIR, instruction='q\n\nHaus', preference=1., drawn='duel')
    duels = object.__new__(MethodDuels)
    duels.elsewhere = [label]
    assert duels.votes_elsewhere([pair]) == [label]
    check_drawn([label], [pair], '')


@pytest.mark.parametrize('n', [1, 3])
def test_words_are_learned_from_few_pairs(n):
    pairs = [dict(PAIR, output_1='a b', output_2='c d e', preference=2.)]*n
    for scorer in word_scorer(pairs), taste_scorer(pairs, lambda record: ''):
        low, high = scorer([dict(PAIR, output='a b'), dict(PAIR, output='c d e')])
        assert low < high


def test_ties_and_pairs_without_a_label_teach_no_words():
    rows = [dict(PAIR, output_1='a', output_2='b', preference=p) for p in (1.5, None, 2.)]
    assert word_scorer(rows)([dict(PAIR, output='b')])[0] > 0
    with pytest.raises(ValueError, match='nothing to learn'):
        word_scorer(rows[:2])


@pytest.mark.parametrize('row', [dict(instruction='q', output=None), dict(prompt='q', output='b')])
def test_a_row_without_texts_is_named(row):
    with pytest.raises(ValueError, match='row 0'):
        alpaca_leaderboard([row], 'alpaca_farm.boards.agreement:prefer_longer', caching_path=None,
                           reference_outputs=[dict(instruction='q', output='a')])


def test_a_missing_verdict_is_left_out_of_group_wins():
    group_wins = pytest.importorskip('alpaca_farm.with_trl').group_wins
    def judge(pairs):
        open_ = {'x', 'y'}
        return [np.nan if {p['output_1'], p['output_2']} == open_ else 1.5 for p in pairs]
    answers = [dict(instruction='q', input='', output=text) for text in 'axyz']
    assert group_wins(answers, judge) == [.5]*4


def test_files_may_be_named_by_a_path(tmp_path):
    file = tmp_path/'labels.json'
    tiny.write(file, [dict(PAIR, preference=2, annotator='x')])
    assert load_annotators(file, None)([PAIR]) == [2.]
    sets = load_sets([file])
    assert [*sets] == ['labels']
    assert [*recorded_verdicts(file, '', sets)] == [('labels', 'x')]


def test_labels_of_a_judge_who_left_some_out_are_recorded_labels():
    def unsure(pairs): return [np.nan if 'a' in p.values() else 2. for p in pairs]
    pairs = [PAIR, dict(PAIR, output_1='b', output_2='c')]
    found = RecordedLabels(annotate_pairs(pairs, unsure))(pairs)
    assert np.isnan(found[0]) and not np.isnan(found[1])
    both = [dict(PAIR, preference=p) for p in (np.nan, 2.)]   # as a table has them
    assert RecordedLabels(both)([PAIR]) == [2.]


def test_a_judge_takes_the_place_of_people_who_discarded_their_votes(tmp_path):
    "And of what they said, and took."
    def second(pairs): return [2.]*len(pairs)
    old = dict(PAIR, status='discarded', votes=dict(x=1), judge='x', price_per_example=9.)
    rows = annotate_pairs([old], second, both_orders=True)
    assert read_recorded(tiny.write(tmp_path/'labels.json', rows))[0].keys() == {
        *PAIR_FIELDS, 'preference', 'annotator', 'orders'}


def test_votes_by_name_may_be_words(tmp_path):
    "As `load_sets` reads them."
    file = tiny.write(tmp_path/'labels.json', [dict(PAIR, votes=dict(x='model_b', y='tie', z=''))])
    assert RecordedLabels(read_recorded(file))([PAIR]) == [1.75]


@pytest.mark.parametrize('column', ['worker', 'annotator_id', 'completed_by'])
def test_several_labellers_are_several_judges(tmp_path, column):
    "Whatever the column of their names; a table program writes numbers as it likes."
    rows = [dict(PAIR, preference=1, **{column: 7}), dict(PAIR, preference=1, **{column: '7.0'}),
            dict(PAIR, preference=2, **{column: 8})]
    found = recorded_verdicts(tiny.write(tmp_path/'verdicts.json', rows), '', SETS)
    assert {judge for _, judge in found} == {'7', '8'}


def test_discarded_verdicts_count_nowhere(tmp_path):
    rows = [dict(PAIR, preference=1, annotator='x', status='discarded'),
            dict(PAIR, preference=2, annotator='y')]
    assert {*recorded_verdicts(tiny.write(tmp_path/'v.json', rows), '', SETS)} == {('s', 'y')}


def test_a_table_may_hold_dialogues_beside_plain_requests(tmp_path):
    "Whose cells in the other's column are empty."
    dialogue = json.dumps([dict(role='user', content='Hi.')])
    pairs = [dict(PAIR, messages=''), dict(PAIR, instruction='', messages=dialogue)]
    rows = [[*pair.values(), 1] for pair in pairs]
    path = tmp_path/'labels.csv'
    with path.open('w', newline='') as file:
        csv.writer(file).writerows([[*pairs[0], 'preference'], *rows])
    asked = [PAIR, dict(PAIR, messages=json.loads(dialogue))]
    assert RecordedLabels(read_recorded(path))(asked) == [1., 1.]
