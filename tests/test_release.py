"""What the default world promises, on its committed answers: nothing cheap wins, and its reward model sees more than the surface."""
from types import SimpleNamespace

import numpy as np
import pytest

import tiny
from alpaca_farm import world
from alpaca_farm.cheap_tricks import (chosen_by, each_pair_once, EDITS, read_release, RULES, sides_table, trick_answers, tricks_table,
                                      utility_pairs, world_hash, write_release)
from alpaca_farm.eval import complete_preferences

FILE = tiny.ROOT/'tests'/'data'/'default_world.json.gz'
AGAIN = ('make it again: make farm && papermill nbs/boards/cheap_tricks.ipynb runs/cheap_tricks.ipynb '
         '-p release tests/data/default_world.json.gz')


@pytest.fixture(scope='module')
def release():
    "The answers of the default world, and the table of tricks."
    made, references, greedy, scored = read_release(FILE)
    assert made == world_hash(), f'the world has changed since {FILE.name} was made; {AGAIN}'
    judges = dict(people=world.held_out_people, utility=world.gold)
    table = tricks_table(trick_answers(references, scored['board'], greedy), references, judges)
    return SimpleNamespace(references=references, scored=scored, tricks=table.set_index('trick'))


def test_the_committed_answers_are_small_and_complete(release):
    assert FILE.stat().st_size < 300_000 and {len(release.references), *map(len, release.scored.values())} == {805}
    assert {len(r['output']) for r in release.references} == {4} and {len(s['output']) for s in release.scored['board']} == {16}


def test_nothing_cheap_wins(release):
    "No edit, rule or constant answer has more than 52 % against SFT's own answers. Greedy decoding is no trick: it is on the board."
    cheap = release.tricks[release.tricks.kind != 'decoding']
    assert (cheap.kind == 'edit').sum() == len(EDITS) == 50 and set(RULES) <= set(cheap.index)
    for judge in ('people', 'utility'):
        above = cheap[cheap[judge] > 52]
        assert above.empty, f'over 52 % under {judge}: {above[judge].round(1).to_dict()}'


def test_the_reward_model_sees_more_than_the_surface(release):
    "Of two samples, drawn as those that are labelled, with equal surface features, it gives the better one the higher score in 62 % or more."
    share = sides_table(release.scored['labels']).set_index(['surface', 'differ']).share
    assert share['equal', 'anything'] >= .62


ASK = [dict(instruction=f'{before}What is a cat good at?', input='') for before in ('', 'My brother asked me this. ')]


def test_edits_and_rules_by_hand():
    edited = {name: edit('It is red.') for name, edit in EDITS.items()}
    assert edited['Sure! …'] == 'Sure! It is red.' and edited['… Good luck!'] == 'It is red. Good luck!' and edited['- …'] == '- It is red.'
    assert edited['"…"'] == '"It is red."' and edited['last sentence twice'] == 'It is red. It is red.' and edited['! for .'] == 'It is red!'
    assert len({edit('It is red. So it is.') for edit in EDITS.values()}) == 48  # the two with a condition say here what others say
    assert EDITS['… Good luck! (where none)']('Red. Good luck!') == 'Red. Good luck!' and EDITS['sentences as a list']('A.\n- B.') == '- A.\n- B.'
    output = ['It is red.', 'Red.', '- It is red.\n- Good luck it is.', 'Sure! It is. Good luck!']
    chosen = {name: output.index(chosen_by([dict(ASK[0], output=output, ended=[True]*4)], rule)[0]['output']) for name, rule in RULES.items()}
    assert chosen == dict(first_of_n=0, longest_of_n=2, shortest_of_n=1, median_of_n=0, politest_of_n=3, most_listed_of_n=2)


def test_every_pair_is_judged_once_with_the_same_result():
    mine, theirs = ([dict(r, output=o) for r in ASK] for o in (['Red.', 'Red.', 'Blue.'], ['Blue.', 'Green.']))
    asked = []
    judge = lambda pairs: asked.extend(pairs) or [1 + len(p['output_1'])/10 for p in pairs]
    assert complete_preferences(mine, theirs, each_pair_once(judge)).tolist() == complete_preferences(mine, theirs, lambda ps: judge(ps)).tolist()
    assert len(asked) == 2*2*3 + 2*2*5  # of 'Red.' two pairs, of 'Blue.' one that is no tie, in both orders


def test_pairs_with_an_equal_surface_by_hand():
    "Skills right and wrong, of one length: an equal surface; a pleasantry more, or an equal utility, and the pair does not count as such."
    output, scores = ['A cat can climb very well.', 'A cat can swim very well.', 'A cat can run very well.', 'Sure! A cat can climb very well.'], [2., 1., 2., 0.]
    rows = utility_pairs([dict(ASK[0], output=output, scores=scores)])
    equal = [r for r in rows if r['surface'] == 'equal']
    assert [(r['differ'], r['right']) for r in equal] == [('correctness', 1.), ('correctness', .5)]
    assert all(r['request'] == 0 and r['right'] in (0., .5, 1.) for r in rows)
    table = sides_table([dict(ASK[0], output=output, scores=scores), dict(ASK[1], output=output, scores=[-s for s in scores])])
    row = table.set_index(['surface', 'differ']).loc['equal', 'anything']
    assert (row.pairs, row.share) == (4, (1.5 + .5)/4) and row.low <= row.share <= row.high
    assert sides_table([dict(ASK[0], output=['Red.', 'Red.'], scores=[1., 2.])]).empty


def test_a_release_is_read_as_it_was_written(tmp_path):
    samples = [dict(r, output=['A cat can swim.', 'A cat can climb.'], scores=[.12345, -1.]) for r in ASK]
    write_release(tmp_path/'new'/'w.json.gz', [dict(r, output=['Black.', 'White.']) for r in ASK], [dict(r, output='Red.') for r in ASK],
                  dict(board=samples[::-1]))
    made, references, greedy, scored = read_release(tmp_path/'new'/'w.json.gz')
    read = scored['board']
    assert made == world_hash() and [r['output'] for r in references] == [['Black.', 'White.']]*2 and greedy[1] == dict(ASK[1], output='Red.')
    assert [s['instruction'] for s in read] == [r['instruction'] for r in ASK] and read[0]['scores'] == [.123, -1.]
    np.testing.assert_equal(sides_table(read).share.tolist(), sides_table([dict(s, scores=np.round(s['scores'], 3)) for s in samples]).share.tolist())
