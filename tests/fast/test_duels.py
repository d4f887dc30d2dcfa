"Duels between methods: what is drawn, what it costs, and what the votes are taken for."
import numpy as np
import pytest

from alpaca_farm.data.pairs import pair_up
from alpaca_farm.judging.duels import duel_interval, duel_records, hold_duels, number_answers
from alpaca_farm.judging.duels import needed_votes, pair_rates

RNG = np.random.default_rng(0)
CHOICES = RNG.integers(0, 4, (6, 200))
ANSWERS = (CHOICES[:, None] == CHOICES[None]).argmax(1)   # the first method with the same text


def coins(chance=.5, seed=0):
    rng = np.random.default_rng(seed)
    return lambda duels: rng.random(len(duels)) < chance


def better(duels):
    "The higher number of a text always wins."
    one, other, request = duels[:, :3].T
    return CHOICES[one, request] > CHOICES[other, request]


@pytest.mark.parametrize('design', ['best', 'order', 'reference'])
@pytest.mark.parametrize('budget', [6, 101, 10**5])
def test_drawn_within_the_budget_on_different_answers_and_once(design, budget):
    found = hold_duels(ANSWERS, budget, coins(), design)
    assert len(found.asked) <= budget
    one, other, request, number = found.asked.T
    texts = {*zip(request, ANSWERS[one, request], ANSWERS[other, request])}
    assert len(texts) == len(found.asked), 'two texts are voted on once'
    assert (ANSWERS[one, request] < ANSWERS[other, request]).all()
    for later in range(1, number.max() + 1):
        assert not {*request[number == later]} & {*request[number < later]}, 'requests are new'
    if budget == 101: assert len(found.asked) == budget
    if design == 'reference': assert (found.drawn[:, :2] == 0).any(1).all()
    if design == 'best': assert len(found.methods) == 2
    else: assert sorted(found.methods) == [*range(6)]


def test_all_votes_give_the_rates_with_equal_answers_as_half():
    found = hold_duels(ANSWERS, 10**5, better, 'order')
    rates, counts = pair_rates(found, ANSWERS)
    for one in range(6):
        for other in range(6):
            won = np.sign(CHOICES[one] - CHOICES[other])/2 + .5
            assert rates[one, other] == pytest.approx(won.mean())
            if one != other: assert counts[one, other] == (won != .5).sum()
    value, low, high = duel_interval(found, ANSWERS, 4, 1)
    assert low < value < high and value == pytest.approx(rates[4, 1])


def test_methods_without_a_difference_need_no_vote():
    same = np.zeros((3, 20), int)
    found = hold_duels(same, 50, coins())
    assert len(found.asked) == 0 and found.complete()
    assert tuple(duel_interval(found, same, 0, 1)) == (.5, .5, .5)
    assert needed_votes(0., .25) == np.inf   # for an order that there is not


def test_a_duel_shows_what_a_board_compares():
    "In a dialogue without spaces at the ends and later turns, so that its labels are found there."
    asked = dict(messages=[dict(role='user', content='Hi.')])
    said = dict(a='Yes.\n', b=' No.\n\nHuman: And then?', c='Yes.')
    answers = {name: [dict(asked, output=text)] for name, text in said.items()}
    assert number_answers([*answers.values()]).tolist() == [[0], [1], [0]]
    duel, = duel_records(np.array([[0, 1, 0, 0]]), answers)
    pair, = pair_up(answers['b'], answers['a'])
    assert (duel['output_1'], duel['output_2']) == (pair['output_1'], pair['output_2']) == ('Yes.', 'No.')
