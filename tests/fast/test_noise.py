"Label noise and the measurement of annotators."
import random, subprocess, sys

import numpy as np
import pytest
from scipy.stats import binomtest

from alpaca_farm.judging import noise
from alpaca_farm.core.data.preferences import hash_uniform
from alpaca_farm.core.stats import agreement


def some(n=2000):
    return [dict(instruction=f'Say {i//2}.', input='', output_1=f'{i}', output_2=f'No, {i}.',
                 preference=1 + i % 2) for i in range(n)]


def consistent(k, n, p): return binomtest(int(k), n, p).pvalue > .001


@pytest.mark.parametrize('p', [.05, .25, .5])
def test_the_rate_is_what_was_asked_for(p):
    rows = some(4000)
    noised, rate = noise.flip_labels(rows, p)
    changed = sum(a['preference'] != b['preference'] for a, b in zip(rows, noised))
    assert rate.value == changed/4000 and consistent(changed, 4000, p)


def test_the_coin_belongs_to_the_pair():
    rows = some()
    by_pair = {r['output_1']: r for r in noise.flip_labels(rows, .25)[0]}
    shuffled = random.Random(0).sample(rows, len(rows))
    assert all(r == by_pair[r['output_1']] for r in noise.flip_labels(shuffled, .25)[0])
    assert all(r == by_pair[r['output_1']] for r in noise.flip_labels(rows[500:600], .25)[0])
    assert noise.flip_labels(rows, .25, seed=1)[0] != noise.flip_labels(rows, .25)[0]


def test_a_process_changes_nothing():
    "No salted hash is involved."
    code = ('from alpaca_farm.core.data.preferences import hash_uniform\n'
            'print(repr(hash_uniform(3, "flip", "é", 1.5)))')
    said = [subprocess.check_output([sys.executable, '-c', code], text=True) for _ in range(2)]
    assert set(said) == {f"{hash_uniform(3, 'flip', 'é', 1.5)!r}\n"}


def test_pairs_of_one_instruction_are_flipped_apart():
    coins = noise.flip_mask(some(8000), .25).reshape(-1, 2)
    assert consistent(coins.all(1).sum(), len(coins), .25**2)


def test_ties_soft_labels_and_rows_stay_whole():
    bare = dict(instruction='a', output_1='x')
    rows = [dict(bare, output_2='y', preference=p, price=3) for p in (1.5, 1.8, 1.)]
    rows[0]['input'] = rows[1]['input'] = ''
    out, rate = noise.flip_labels(rows, 1)
    assert [r['preference'] for r in out] == pytest.approx([1.5, 1.2, 2])
    assert all(r['price'] == 3 for r in out)
    assert [r['preference'] for r in rows] == [1.5, 1.8, 1.]   # the caller's rows are not touched
    same = [dict(bare, input='', output_2='x', preference=2)]
    assert noise.flip_labels(same, 1)[0] == same
    wrong = [rows[1], dict(rows[1], preference=0)]
    with pytest.raises(ValueError, match='row 1'): noise.flip_labels(wrong, .1)
    with pytest.raises(ValueError, match='p = -0.1'): noise.flip_labels(rows, -.1)
    with pytest.raises(ValueError, match="'output_2'"): noise.flip_mask([bare], .1)


def test_agreement_falls_on_the_line():
    rng = np.random.default_rng(0)
    pairs, people = some(4000), rng.choice([1., 2.], (1, 4000)).repeat(3, 0)
    votes = np.where(rng.random((4, 4000)) < .8, people[:1], 3 - people[:1])
    a = agreement(votes, people)
    for p in (.1, .25, .4):
        flips = [noise.flip_mask(pairs, p, seed) for seed in range(4)]
        found = agreement(np.where(flips, 3 - votes, votes), people)
        assert found == pytest.approx(.5 + (a - .5)*(1 - 2*p), abs=.015)


def test_panel_follows_chances_and_weights():
    pairs = some(3000)
    chance = np.stack([np.full((2, 3000), .9), np.full((2, 3000), .2)])
    votes = noise.sample_votes(chance, pairs, votes=1, weights=[3, 1])
    assert consistent((votes == 2).sum(), votes.size, .75*.9 + .25*.2)
    again = noise.sample_votes(chance[:, :, ::-1], pairs[::-1], votes=1, weights=[3, 1])
    assert (again[:, ::-1] == votes).all()


def test_preferences_for_length_lists_and_position():
    texts = ('a'*50, 'b'), ('a', '- b\n- c' + 'c'*40), ('a', 'bb')
    pairs = [dict(output_1=one, output_2=two) for one, two in texts]
    length = noise.length_sign(pairs)
    assert noise.feature_preference([1, 2, 2], length) == 1
    assert noise.feature_preference([2, 1, 2], length) == 0
    assert np.isnan(noise.feature_preference([1.5, 1.5, 1], length))
    assert noise.feature_preference([[1, 2, 2]]*2, noise.list_sign(pairs)) == 1
    def first(pairs): return [1.3]*len(pairs)
    found = noise.preference_probabilities(first, pairs)[0]
    assert found == pytest.approx(np.repeat([[.3], [.7]], 3, 1))


def test_an_annotator_of_weight_0_never_votes():
    pairs = [dict(instruction=str(i), output_1='a', output_2='b') for i in range(9)]
    chance = np.stack([np.ones((2, 9)), np.zeros((2, 9))])
    votes = noise.sample_votes(chance, pairs, 4, 0, [1., 0.])
    assert (votes == noise.sample_votes(chance[:1], pairs, 4)).all()
