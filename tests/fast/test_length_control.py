"Length-controlled win rates: turned sides, and what is left out. Published ones: `test_eval`."
import numpy as np
import pytest

from alpaca_farm.boards import length_control as lc

N = 805


def planted(levels, effect, shift, hard):
    "Votes of a judge with a known length effect: preferences, lengths, baseline."
    rng = np.random.default_rng(0)
    base = rng.integers(200, 1200, N)
    length = np.maximum(base + shift + rng.normal(0, 300, (len(levels), N)), 1)
    z = np.reshape(levels, (-1, 1)) + effect*lc.length_term(base, length) - hard
    votes = 1. + (rng.uniform(size=z.shape) < lc.sigmoid(z))
    return votes, length, base


def test_turned_sides():
    votes, length, base = planted([.5], -1., 200, 0.)
    term = lc.length_term(base, length[0])
    one = lc.controlled_win_rate(votes[0], term)['length_controlled_winrate']
    other = lc.controlled_win_rate(3 - votes[0], -term)['length_controlled_winrate']
    assert one == pytest.approx(100 - other, abs=1e-3)


def test_the_difficulty_may_be_a_list():
    votes, term, hard = [1, 2, 2], [0, .1, 0], [.5, -.5, 0]
    found = lc.controlled_win_rate(votes, term, hard)
    assert found == lc.controlled_win_rate(votes, term, np.array(hard))


def test_five_models_show_the_difficulty_but_not_four_and_the_reference_itself():
    "Missing verdicts are left out, and those that are none are named."
    hard = np.random.default_rng(1).normal(size=N)
    votes, length, base = planted([-.5, 0, .3, .6, 1.], -.5, 0, hard)
    def board(votes): return lc.length_controlled(votes, length, base, list('abcde'))
    votes[0, ::3] = np.nan
    five = board(votes)
    assert {*five.difficulty} == {'board'}
    assert (five.lc_low < five.lc_high).all()
    votes[4] = 1.5
    assert {*board(votes).difficulty} == {'no'}
    votes[0] = 3.
    with pytest.raises(ValueError, match='row 0'):
        board(votes)


def test_requests_that_are_equally_hard_leave_the_difficulty_out():
    "As two requests on each of which three of six models win."
    votes = 1 + np.eye(2)[[0, 1]*3]
    board = lc.length_controlled(votes, np.full((6, 2), 9), [9, 9], list('abcdef'))
    assert {*board.difficulty} == {'no'}
    assert board.length_controlled_winrate.tolist() == pytest.approx([50]*6)
