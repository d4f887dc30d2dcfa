"""Pleasantries by example; variety by brute force."""
from itertools import combinations

import numpy as np
import pytest

from alpaca_farm.boards.text import _count_pleasantries, _distinct


@pytest.mark.parametrize('text, n', [
    ('Certainly: the cave. Take care!', 2), ('Hey, it is red.', 0),
    ("I'd be happy to help! That's a great question. It rains.", 2),
    ('I hope this helps! Please feel free to ask. Thank you for your question.', 3),
    ('SURE, why not? Be kind. You are welcome. Good luck!', 3),
    ('I am sure. Surely not. Sure enough, it rained. I hope it rains.', 0),
    ('The course is long, of course. Thank you for the flowers. What a day.', 0)])
def test_pleasantries(text, n): assert _count_pleasantries(text) == n


@pytest.mark.parametrize('n', [1, 2])
@pytest.mark.parametrize('answers', [
    ['a b a', 'b c'], ['a a a a b'], ['x y', 'x y', 'y x z'], ['A, b! a', "don't do it", '']])
def test_distinct_by_brute_force(answers, n):
    words = [a.lower().replace(',', '').replace('!', '').split() for a in answers]
    grams = [tuple(w[i:i + n]) for w in words for i in range(len(w) - n + 1)]
    for m in range(1, len(grams) + 1):
        every = [len({grams[i] for i in rows})/m for rows in combinations(range(len(grams)), m)]
        assert _distinct(answers, n, m) == pytest.approx(np.mean(every), abs=1e-12)
    assert np.isnan(_distinct(answers, n, len(grams) + 1))
