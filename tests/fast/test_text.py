"""Pleasantries by example; variety by brute force."""
from itertools import combinations

import numpy as np
import pytest

from alpaca_farm.boards.text import count_pleasantries, distinct


@pytest.mark.parametrize('text, n', [
    ('Certainly: the cave. Take care!', 2), ('Of course! It is red.', 1), ('Hey, it is red.', 0),
    ("I'd be happy to help! Here are two.", 1), ("That's a great question. It rains.", 1),
    ('Thank you for your question.', 1),
    ('I hope this helps! Please feel free to ask.', 2), ('Do not hesitate to write.', 1), ('You are welcome.', 1),
    ('SURE, why not?', 1),
    ('Sure enough, it rained.', 0), ('I am sure.', 0), ('The course is long, of course.', 0), ('Surely not.', 0),
    ('I hope it rains.', 0),
    ('Thank you for the flowers.', 0), ('If you have eggs, use them.', 0), ('Be kind. Good luck!', 1),
    ('What a day.', 0)])
def test_pleasantries(text, n): assert count_pleasantries(text) == n


@pytest.mark.parametrize('n', [1, 2])
@pytest.mark.parametrize('answers', [
    ['a b a', 'b c'], ['a a a a b'], ['x y', 'x y', 'y x z'], ['A, b! a', "don't do it", '']])
def test_distinct_by_brute_force(answers, n):
    words = [a.lower().replace(',', '').replace('!', '').split() for a in answers]
    grams = [tuple(w[i:i + n]) for w in words for i in range(len(w) - n + 1)]
    for m in range(1, len(grams) + 1):
        every = [len({grams[i] for i in rows})/m for rows in combinations(range(len(grams)), m)]
        assert distinct(answers, n, m) == pytest.approx(np.mean(every), abs=1e-12)
    assert np.isnan(distinct(answers, n, len(grams) + 1))
