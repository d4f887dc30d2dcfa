"""Crowd, pool and sizes of the real world; `slow/test_notebooks.py` makes its farm whole."""
import numpy as np

from alpaca_farm import real


def test_a_crowd_sees_what_the_pool_overlooks():
    words = real.WordModel(['the cat sat on the mat', 'the dog ran'])
    right = 'The cat sat.'
    wrong = 'The cat sat on the mat and the dog ran there. ' * 3
    asked = [f'Why? {real.CONDITIONS[c][0]}' for c in ('short', 'sentence')]
    pairs = [dict(instruction=i, output_1=wrong, output_2=right) for i in asked]
    crowd, pool = (real.sample_judges(n, words, seed=3) for n in ('crowd', 'pool'))
    assert np.mean(crowd(pairs)) > np.mean(pool(pairs)) > 1
    assert real.sample_judges('crowd', words, 3)(pairs) == crowd(pairs)


def test_texts_of_one_likelihood_have_the_unit_one():
    assert real.WordModel(['a cat sat'], ['a cat']*7).sd == 1


def test_no_word_is_taken_for_a_count():
    "What may follow two words has a probability of at most 1, also behind *before* and *pair*."
    texts = ['the pan before the meal and the pair of pans before the pair', 'the pair the pan before the cat']
    words = real.WordModel(texts)
    known = {w for text in texts for w in text.split()}
    for v in known:
        for u in ('', *known):
            assert sum(words.probability(u, v, w) for w in known) <= 1 + 1e-9
