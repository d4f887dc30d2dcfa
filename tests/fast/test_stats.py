"Statistics and votes: beside alpaca-eval and by hand."
import subprocess
import sys

import numpy as np
import pytest

from alpaca_farm.data.pairs import hash_uniform
from alpaca_farm.judging import stats

@pytest.fixture
def rng(): return np.random.default_rng(0)


@pytest.mark.parametrize('n', [2, 7, 805])
@pytest.mark.parametrize('kind', ['hard', 'ties', 'soft'])
def test_win_rate_is_alpaca_evals(kind, n, rng):
    metrics = pytest.importorskip('alpaca_eval.metrics')
    drawn = dict(hard=rng.choice([1., 2.], n), ties=rng.choice([1., 1.5, 2.], n),
                 soft=rng.uniform(1, 2, n))[kind]
    theirs = metrics.pairwise_to_winrate(preferences=drawn.tolist())
    for name, value in stats.win_rate(drawn).items():
        assert theirs[name] == pytest.approx(value, abs=1e-9)


def test_a_coin_is_the_same_in_every_process():
    "No salted hash is involved."
    code = ('from alpaca_farm.data.pairs import hash_uniform\n'
            'print(repr(hash_uniform(3, "flip", "é", 1.5)))')
    said = [subprocess.check_output([sys.executable, '-c', code], text=True) for _ in range(2)]
    assert set(said) == {f"{hash_uniform(3, 'flip', 'é', 1.5)!r}\n"}
