"Statistics and votes: beside alpaca-eval and by hand."
import json
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest

import tiny
from alpaca_farm.data.pairs import hash_uniform
from alpaca_farm.judging import stats

DATA = tiny.ROOT.parent/'shared'/'data'
recorded = pytest.mark.skipif(not (DATA/'alpaca_eval').exists(), reason='no recorded verdicts')


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


@recorded
def test_pandalms_people():
    "PandaLM's three people, leave-one-out and pairwise (0 is a tie there)."
    rows = json.loads((DATA/'pandalm'/'testset-v1.json').read_text())
    votes = []
    for k in (1, 2, 3):
        votes.append([int(r[f'annotator{k}']) or 1.5 for r in rows])
    votes = np.array(votes)
    pairwise = [np.mean(one == other) for one, other in combinations(votes, 2)]
    assert pairwise == pytest.approx([.913, .929, .918], abs=2e-3)
    assert stats.agreement(votes) == pytest.approx(np.mean(pairwise), abs=1e-9)


def test_a_coin_is_the_same_in_every_process():
    "No salted hash is involved."
    code = ('from alpaca_farm.data.pairs import hash_uniform\n'
            'print(repr(hash_uniform(3, "flip", "é", 1.5)))')
    said = [subprocess.check_output([sys.executable, '-c', code], text=True) for _ in range(2)]
    assert set(said) == {f"{hash_uniform(3, 'flip', 'é', 1.5)!r}\n"}
