"core.stats against brute force, against alpaca-eval, and against its shipped leaderboards."
import csv, itertools, json, math
from pathlib import Path

import numpy as np
import pytest

from alpaca_farm.core import stats

DATA = Path(__file__).parents[2]/'shared'/'data'
recorded = pytest.mark.skipif(not (DATA/'alpaca_eval').exists(), reason='the recorded verdicts are not here')


@pytest.fixture
def rng(): return np.random.default_rng(0)


@pytest.mark.parametrize('kind', ['hard', 'ties', 'soft'])
def test_win_rate_is_alpaca_evals(kind, rng):
    metrics = pytest.importorskip('alpaca_eval.metrics')
    draw = dict(hard=lambda n: rng.choice([1., 2.], n), ties=lambda n: rng.choice([1., 1.5, 2.], n),
                soft=lambda n: rng.uniform(1, 2, n))[kind]
    for n in (2, 7, 805):
        p = draw(n)
        theirs, ours = metrics.pairwise_to_winrate(preferences=p.tolist()), stats.win_rate(p)
        assert {k: theirs[k] for k in ours} == pytest.approx(ours, abs=1e-9)


def verdicts(path: Path) -> list[float]:
    "Recorded preferences; 0 was once written for a tie, and failures are null."
    preferences = [r['preference'] for r in json.loads(path.read_text())]
    return [1.5 if p == 0 else p for p in preferences if p is not None and not math.isnan(p)]


@recorded
@pytest.mark.parametrize('model', ['alpaca-7b', 'alpaca-farm-ppo-human'])
@pytest.mark.parametrize('board', ['ae1', 'ae2'])
def test_shipped_leaderboards(model, board):
    rows = csv.DictReader((DATA/'alpaca_eval'/f'leaderboard_{board}.csv').open())
    shipped = {r['']: r for r in rows}[model]
    ours = stats.win_rate(verdicts(DATA/'alpaca_eval'/model/f'annotations_{board}.json'))
    assert {k: float(shipped[k]) for k in ours} == pytest.approx(ours, abs=1e-6)


@pytest.mark.parametrize('bad, row', [([1, 2, math.nan], 'row 2 is nan'), ([0], 'row 0 is 0'), ([2, 2.1], 'row 1 is 2.1')])
def test_what_is_no_preference_is_named(bad, row):
    with pytest.raises(ValueError, match=row): stats.win_rate(bad)
    with pytest.raises(ValueError, match='non-empty'): stats.win_rate([])


def test_bootstrap_covers():
    "About 95 of 100 intervals hold the true mean."
    hits = 0
    for seed in range(200):
        b = stats.bootstrap(np.random.default_rng(seed).exponential(size=200), n=300, seed=seed)
        hits += b.low < 1 < b.high
    assert 178 <= hits <= 198


def test_bootstrap_resamples_whole_rows(rng):
    "Columns of one row are drawn together: the interval of a difference of equal columns is a point."
    x = rng.normal(size=100)
    b = stats.bootstrap(np.stack([x, x], 1), lambda s, axis: s.mean(axis)[..., 0] - s.mean(axis)[..., 1])
    assert b == (0, 0, 0)
    assert stats.bootstrap(x, seed=1) == stats.bootstrap(x, seed=1) != stats.bootstrap(x, seed=2)


def test_spearman_is_scipys(rng):
    scipy = pytest.importorskip('scipy.stats')
    for _ in range(20):
        x, y = rng.integers(0, 6, 12), rng.integers(0, 6, 12)
        assert stats.spearman(x, y) == pytest.approx(scipy.spearmanr(x, y)[0])
    assert np.isnan(stats.spearman([1, 1], [1, 2]))


def test_spearman_interval_finds_the_order(rng):
    strength = np.linspace(0, 1, 6)
    a, b = (strength + rng.normal(size=(400, 6)) for _ in range(2))
    r = stats.spearman_interval(a, b, n=300)
    assert r.low > .8 and r.value == pytest.approx(1)
    assert stats.spearman_interval(a, -b, n=300).high < -.8


@pytest.mark.parametrize('R', [2, 3, 5])
@pytest.mark.parametrize('between, common', [(.02, .25), (.06, .25), (.06, 0.)])
def test_intervals_over_replicates_cover(R, between, common):
    "600 studies whose replicates differ, on common instructions or on their own: 95 % intervals cover, and those of stacked or averaged replicates do not."
    rng, N, K = np.random.default_rng(R), 120, 600
    v = rng.normal(0, between, (R, 1, K)) + rng.normal(0, common, (1, N, K)) + rng.normal(0, .25, (R, N, K))
    def covered(i): return np.mean((i.low <= 0) & (0 <= i.high))
    found = stats.replicate_interval(v, n=200, seed=1)
    assert .92 <= covered(found) <= .985 and found.value == pytest.approx(v.mean((0, 1)))
    if between == .06: assert max(covered(stats.bootstrap(w, n=200)) for w in (v.reshape(-1, K), v.mean(0))) < .85


def test_replicates_without_variance_of_their_own_and_one_alone(rng):
    "Replicates that are copies have the interval of one; one replicate has that over instructions; the level counts."
    x = rng.normal(size=300)
    one, copies = stats.bootstrap(x), stats.replicate_interval([x, x, x])
    assert stats.replicate_interval([x]) == one and stats.replicate_interval(x[None, :, None]).low == pytest.approx(one.low)
    assert copies == pytest.approx(one, abs=.01)
    wide, narrow = (stats.replicate_interval([x, x + 1], level=level) for level in (.95, .5))
    assert wide.high - wide.value == pytest.approx(12.706/2, rel=.01) and narrow.high - narrow.value == pytest.approx(.5, rel=.02)
    means = stats.replicate_interval([[1.], [2.], [4.5]])                       # where only means are comparable: Student's t
    assert means.high - means.low == pytest.approx(2*4.3027*np.std([1, 2, 4.5], ddof=1)/3**.5, rel=1e-4)


def test_spearman_over_replicates(rng):
    "The mean of the replicates' correlations, within -1 and 1; wider than over the stacked instructions."
    strength = np.linspace(0, .5, 8)
    a, b = (strength + .1*rng.normal(size=(3, 1, 8)) + rng.normal(size=(3, 200, 8)) for _ in range(2))
    r, stacked = stats.spearman_interval(a, b, n=200), stats.spearman_interval(a.reshape(-1, 8), b.reshape(-1, 8), n=200)
    each = [float(stats.spearman(x.mean(0), y.mean(0))) for x, y in zip(a, b)]
    assert r.value == pytest.approx(np.mean(each)) and -1 <= r.low <= r.value <= r.high <= 1
    assert r.high - r.low > stacked.high - stacked.low
    with pytest.raises(ValueError, match='not shape'): stats.spearman_interval(a[0, 0], b[0, 0])


def test_agreement_is_alpaca_evals(rng):
    "Odd numbers of votes, so that no mode has to be drawn."
    pd, analyze = pytest.importorskip('pandas'), pytest.importorskip('alpaca_eval.analyze')
    people, judge = rng.choice([1., 2.], (4, 30)), rng.choice([1., 2.], (3, 30))
    def frame(votes):
        rows = [dict(instruction=str(i), output_1='a', output_2='b', preference=v[i], annotator='x', index=j)
                for i in range(30) for j, v in enumerate(votes)]
        return pd.DataFrame(rows)
    analyzer = analyze.Analyzer(gold_crossannotations=frame(people), gold_annotations=frame(people[:1]), n_annotators=4)
    theirs = analyzer.agreement_of_annotations(frame(people), annotations_2=None, n_majority_vote_1=1, n_majority_vote_2=3)
    assert stats.agreement(people) == pytest.approx(theirs['score'])
    three = analyze.Analyzer(gold_crossannotations=frame(people[:3]), gold_annotations=frame(people[:1]), n_annotators=3)
    assert stats.bias(judge, people[:3]) == pytest.approx(three.estimate_bias(frame(judge)))
    assert stats.variance(people) == pytest.approx(1 - theirs['score'])


def test_agreement_with_missing_votes():
    votes = np.array([[1, 1, np.nan], [1, 2, np.nan], [np.nan, 2, 1]])
    # item 0: two that agree; item 1: the 1 sees 2, 2, each 2 sees a tie of 1 and 2; item 2: one vote only
    assert stats.agreement(votes) == pytest.approx((1 + 1 + 0 + .5 + .5)/5)
    with pytest.raises(ValueError, match='at least two votes'): stats.agreement(votes[:1])


@recorded
def test_pandalms_people():
    "PandaLM's three people, leave-one-out and pairwise (0 is a tie there)."
    rows = json.loads((DATA/'pandalm'/'testset-v1.json').read_text())
    votes = np.array([[{0: 1.5}.get(int(r[f'annotator{k}']), int(r[f'annotator{k}'])) for r in rows] for k in (1, 2, 3)])
    pairwise = [np.mean(votes[i] == votes[j]) for i, j in itertools.combinations(range(3), 2)]
    assert pairwise == pytest.approx([.913, .929, .918], abs=2e-3)
    assert stats.agreement(votes) == pytest.approx(np.mean(pairwise), abs=1e-9)    # of two others, the mode is either


@pytest.mark.parametrize('ties', [False, True])
def test_best_of_n_is_the_mean_over_subsets(ties, rng):
    s, g = rng.normal(size=9), rng.normal(size=9)
    if ties: s = s.round()
    for n in range(1, 10):
        brute = []
        for subset in map(list, itertools.combinations(range(9), n)):
            top = s[subset].max()
            brute.append(np.mean([g[i] for i in subset if s[i] == top]))
        assert stats.best_of_n_value(s, g, n) == pytest.approx(np.mean(brute), abs=1e-12)
    assert stats.best_of_n_weights(s, 4).sum() == pytest.approx(1)


def test_best_of_n_rows_are_independent(rng):
    s, g = rng.normal(size=(2, 3, 7)).round(), rng.normal(size=(2, 3, 7))
    apart = [[stats.best_of_n_value(s[i, j], g[i, j], 3) for j in range(3)] for i in range(2)]
    assert np.allclose(stats.best_of_n_value(s, g, 3), apart)


def test_large_pools_stay_finite():
    w = stats.order_weights(12_600, 6000)
    assert np.isfinite(w).all() and w.sum() == pytest.approx(1) and w[-1] == pytest.approx(6000/12_600)


def test_kl_of_best_of_n():
    assert stats.kl_best_of_n([1, 2, 16]) == pytest.approx([0, math.log(2) - .5, math.log(16) - 15/16])


@pytest.mark.parametrize('form', ['best_of_n', 'rl'])
def test_curve_fits_are_least_squares(form, rng):
    d = np.linspace(0, 4, 15)
    r = stats.overoptimization_curve(d, 1.1, .3, form) + .1*rng.normal(size=15)
    columns = np.stack([d, -d**2 if form == 'best_of_n' else -d*np.log(np.maximum(d, 1e-300))], 1)
    assert stats.fit_overoptimization(d, r, form) == pytest.approx(np.linalg.lstsq(columns, r, rcond=None)[0])
    with pytest.raises(ValueError, match='form'): stats.fit_overoptimization(d, r, 'bon')
    with pytest.raises(ValueError, match='0 or more'): stats.fit_overoptimization(-d, r, form)


def test_wilson_at_the_ends():
    assert stats.wilson(0, 20).low == 0 and stats.wilson(20, 20).high == pytest.approx(1)
    assert stats.wilson(50, 100) == pytest.approx((.5, .4038, .5962), abs=1e-4)
    with pytest.raises(ValueError): stats.wilson(3, 2)
