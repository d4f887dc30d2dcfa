"Coins that are the same in every process, and votes of a panel."
import subprocess
import sys

import numpy as np
from scipy.stats import binomtest

from alpaca_farm.judging import noise
from alpaca_farm.core.data.preferences import hash_uniform


def test_a_process_changes_nothing():
    "No salted hash is involved."
    code = ('from alpaca_farm.core.data.preferences import hash_uniform\n'
            'print(repr(hash_uniform(3, "flip", "é", 1.5)))')
    said = [subprocess.check_output([sys.executable, '-c', code], text=True) for _ in range(2)]
    assert set(said) == {f"{hash_uniform(3, 'flip', 'é', 1.5)!r}\n"}


def test_panel_follows_chances_and_weights():
    pairs = [dict(instruction=f'Say {i//2}.', output_1=f'{i}', output_2=f'No, {i}.')
             for i in range(3000)]
    chance = np.stack([np.full((2, 3000), .9), np.full((2, 3000), .2)])
    votes = noise.sample_votes(chance, pairs, votes=1, weights=[3, 1])
    assert binomtest(int((votes == 2).sum()), votes.size, .75*.9 + .25*.2).pvalue > .001
    again = noise.sample_votes(chance[:, :, ::-1], pairs[::-1], votes=1, weights=[3, 1])
    assert (again[:, ::-1] == votes).all()
