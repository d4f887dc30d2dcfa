"Statistics and votes: beside alpaca-eval and by hand."
import json
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import binomtest

import tiny
from alpaca_farm.boards.compare import _win_rate_table
from alpaca_farm.boards.judged import judge_all
from alpaca_farm.boards.leaderboards import leaderboard
from alpaca_farm.core import stats
from alpaca_farm.core.data.preferences import hash_uniform
from alpaca_farm.judging.measures import sample_votes

DATA = tiny.ROOT.parent/'shared'/'data'
recorded = pytest.mark.skipif(not (DATA/'alpaca_eval').exists(), reason='no recorded verdicts')


@pytest.fixture
def rng(): return np.random.default_rng(0)


@pytest.mark.parametrize('kind', ['hard', 'ties', 'soft'])
def test_win_rate_is_alpaca_evals(kind, rng):
    metrics = pytest.importorskip('alpaca_eval.metrics')
    for n in (2, 7, 805):
        p = dict(hard=rng.choice([1., 2.], n), ties=rng.choice([1., 1.5, 2.], n),
                 soft=rng.uniform(1, 2, n))[kind]
        theirs, ours = metrics.pairwise_to_winrate(preferences=p.tolist()), stats.win_rate(p)
        assert {k: theirs[k] for k in ours} == pytest.approx(ours, abs=1e-9)


@pytest.mark.parametrize('preference, rate, low, high', [(2, 100, 56.6, 100), (1, 0, 0, 43.4),
                                                         (1.5, 50, 28.8, 71.2)])
def test_five_equal_preferences_leave_much_open_on_every_board(preference, rate, low, high):
    def judge(pairs): return [preference if p['output_2'] == 'b' else 3 - preference for p in pairs]
    own, other = ([dict(instruction=f'Say {i}.', output=text) for i in range(5)] for text in 'ba')
    board = leaderboard(judge_all(dict(own=own), other, dict(j=judge)), dict(own=own), 'other')
    table = _win_rate_table(dict(other=other, own=own), judge)
    for row in (board.loc[0, ['j', 'j_low', 'j_high']], table.loc[0, ['win_rate', 'low', 'high']]):
        assert row.tolist() == pytest.approx([rate, low, high], abs=.05)


def test_agreement_with_missing_votes():
    votes = np.array([[1, 1, np.nan], [1, 2, np.nan], [np.nan, 2, 1]])
    # item 0: two agree; item 1: the 1 sees 2, 2, each 2 sees a tie; item 2: one vote only
    assert stats.agreement(votes) == pytest.approx((1 + 1 + 0 + .5 + .5)/5)


@recorded
def test_pandalms_people():
    "PandaLM's three people, leave-one-out and pairwise (0 is a tie there)."
    rows = json.loads((DATA/'pandalm'/'testset-v1.json').read_text())
    votes = np.array([[int(r[f'annotator{k}']) or 1.5 for r in rows] for k in (1, 2, 3)])
    pairwise = [np.mean(votes[i] == votes[j]) for i, j in combinations(range(3), 2)]
    assert pairwise == pytest.approx([.913, .929, .918], abs=2e-3)
    assert stats.agreement(votes) == pytest.approx(np.mean(pairwise), abs=1e-9)


def test_a_coin_is_the_same_in_every_process():
    "No salted hash is involved."
    code = ('from alpaca_farm.core.data.preferences import hash_uniform\n'
            'print(repr(hash_uniform(3, "flip", "é", 1.5)))')
    said = [subprocess.check_output([sys.executable, '-c', code], text=True) for _ in range(2)]
    assert set(said) == {f"{hash_uniform(3, 'flip', 'é', 1.5)!r}\n"}


def test_panel_follows_chances_and_weights():
    pairs = [dict(instruction=f'Say {i//2}.', output_1=f'{i}', output_2=f'No, {i}.')
             for i in range(3000)]
    chance = np.stack([np.full((2, 3000), .9), np.full((2, 3000), .2)])
    votes = sample_votes(chance, pairs, votes=1, weights=[3, 1])
    assert binomtest(int((votes == 2).sum()), votes.size, .75*.9 + .25*.2).pvalue > .001
    again = sample_votes(chance[:, :, ::-1], pairs[::-1], votes=1, weights=[3, 1])
    assert (again[:, ::-1] == votes).all()
