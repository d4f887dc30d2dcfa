"""What the course's functions are tried on, and the faults that students make in them.

A fault is a sentence with a wrong function, which is made from the right one. A submission that
returns what a wrong function returns has this fault. `tests/slow/test_course.py` holds that no two
of a function's faults return the same, and tries each sentence on code that a student could write.
"""
import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from alpaca_farm.judging.stats import bootstrap


@dataclass
class Check:
    "How a submitted function is compared with the right one."
    cases: list                                # arguments of each call
    tolerance: float                           # share of the size of a result; 0: equal
    faults: dict                               # sentence: makes a wrong function of the right one
    about: list = field(default_factory=list)  # of each case, what is special about it


def randn(*shape, seed=0): return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def masks():
    "Answers of differing length behind prompts of differing length."
    mask = torch.zeros(4, 9)
    for row, (start, end) in enumerate([(0, 9), (2, 6), (1, 8), (3, 4)]): mask[row, start:end] = 1
    return mask


SIGN = 'a minus sign is lost: what training makes small would have to be made large'
MEAN = 'it is one mean, and each {} has a loss of its own'
SUM = 'it is one sum, and each {} has a loss of its own'


def of_all(each: str) -> dict:
    "Faults of a loss of which all values became one number."
    return {MEAN.format(each): lambda f: lambda *x: f(*x).mean(),
            SUM.format(each): lambda f: lambda *x: f(*x).sum()}


pairwise_loss = Check([(randn(6), randn(6, seed=1)), (randn(3)*20, randn(3, seed=1)*20)], 1e-3, {
    SIGN: lambda f: lambda c, r: -f(c, r),
    'chosen and rejected have changed places': lambda f: lambda c, r: f(r, c),
    'the logarithm is missing': lambda f: lambda c, r: -torch.sigmoid(c - r),
    'it is the probability of a wrong order, not minus the logarithm of that of the right one':
        lambda f: lambda c, r: torch.sigmoid(r - c),
    'the rejected answer\'s score is not used': lambda f: lambda c, r: f(c, 0*r),
    'the two scores are added, and one must be taken from the other': lambda f: (
        lambda c, r: f(c, -r))} | of_all('pair'))


def some_candidates():
    "Records with six answers, of which neither order, length nor alphabet tells the best."
    texts = ['c', 'aa', 'f', 'eee', 'b', 'd']
    return [dict(instruction=f'{k}', output=texts, ended=[True]*6, scores=randn(6, seed=k).tolist())
            for k in range(2, 7)]


def same_place(rows):
    "The place of the first record's best answer, for all records."
    best = int(np.argmax(rows[0]['scores']))
    return [dict(output=r['output'][best]) for r in rows]


choose_best = Check([(some_candidates(),)], 0, {
    'it takes the worst answer': lambda f: lambda rows: f(
        [dict(r, scores=[-s for s in r['scores']]) for r in rows]),
    'it takes the first answer, whatever the scores': lambda f: lambda rows: [
        dict(output=r['output'][0]) for r in rows],
    'it takes the last answer, whatever the scores': lambda f: lambda rows: [
        dict(output=r['output'][-1]) for r in rows],
    'it takes the longest answer, whatever the scores': lambda f: lambda rows: [
        dict(output=max(r['output'], key=len)) for r in rows],
    'it takes the answer that is last in the alphabet, not that of the highest score':
        lambda f: lambda rows: [dict(output=max(r['output'])) for r in rows],
    'it takes the place of the first record\'s best answer for all records':
        lambda f: same_place,
    'it returns answers, and must return records with the answer as `output`': lambda f: (
        lambda rows: [r['output'] for r in f(rows)]),
    'it returns scores, and must return records with the answer as `output`': lambda f: (
        lambda rows: [max(r['scores']) for r in rows]),
    'it returns all answers of a record': lambda f: lambda rows: rows})


def gae_with(taken=-1., ahead=1., later=1., back=1., mask_next=True, mask_returns=True,
             shift=-1):
    "A wrong sum of advantages; the arguments are factors of its terms, as they should be."
    def wrong(rewards, values, mask, gamma, lam):
        inside = values*mask
        following = torch.roll(inside if mask_next else values, shift, 1)
        following[:, shift] = 0
        delta = (rewards + ahead*gamma*following + taken*values)*mask
        advantages = torch.zeros_like(delta)
        after = torch.zeros(len(delta))
        for t in reversed(range(delta.shape[1])):
            after = (delta[:, t] + later*gamma*lam*after)*mask[:, t]
            advantages[:, t] = after
        return advantages, advantages + back*(inside if mask_returns else values)
    return lambda f: wrong


def reversed_gae(f):
    def wrong(r, v, m, gamma, lam):
        delta = (r + gamma*F.pad((v*m)[:, 1:], (0, 1)) - v)*m
        advantages = f(delta.flip(1), 0*v, m.flip(1), gamma, lam)[0].flip(1)
        return advantages, advantages + v*m
    return wrong


gae = Check(
    [(randn(4, 9), randn(4, 9, seed=1), torch.ones(4, 9), 1., 1.),
     (randn(4, 9), randn(4, 9, seed=1), masks(), 1., 1.),
     (randn(4, 9), randn(4, 9, seed=1), masks(), .9, .8)], 1e-3, {
        'it is reversed: the sum runs from the first token to each, not from each to the last':
            reversed_gae,
        'padding and prompts count: nothing outside of the mask may': lambda f: (
            lambda r, v, m, g, l: f(r, v, torch.ones_like(m), g, l)),
        'the value behind an answer\'s last token counts, and must be 0': gae_with(mask_next=False),
        'the returns are not 0 outside of the mask': gae_with(mask_returns=False),
        'the values are not masked: they count outside of the answers': gae_with(
            mask_next=False, mask_returns=False),
        'a minus sign is lost: the value was expected, so it is taken away in delta':
            gae_with(taken=1.),
        'both values in delta have the wrong sign': gae_with(taken=1., ahead=-1.),
        'the value of the next state has the wrong sign in delta': gae_with(ahead=-1.),
        'the value of the next state is missing in delta': gae_with(ahead=0.),
        'the value of this state is missing in delta: it was expected, and is taken away':
            gae_with(taken=0.),
        'the value of the state before stands in delta for that of the next': gae_with(shift=1),
        'it is delta alone: what comes later is not added': gae_with(later=0.),
        'what comes later has the wrong sign: it is added': gae_with(later=-1.),
        'lambda is missing': lambda f: lambda r, v, m, g, l: f(r, v, m, g, 1.),
        'gamma is missing': lambda f: lambda r, v, m, g, l: f(r, v, m, 1., l),
        'a minus sign stands where a plus should: returns are advantages plus values':
            gae_with(back=-1.),
        'the values are missing in the returns': gae_with(back=0.),
        'both signs of the values are lost, in delta and in the returns': lambda f: (
            lambda r, v, m, g, l: f(r, -v, m, g, l)),
        'the advantages have the wrong sign': lambda f: lambda r, v, m, g, l: (
            -f(r, v, m, g, l)[0], v*m - f(r, v, m, g, l)[0]),
        'advantages and returns have changed places': lambda f: lambda *x: f(*x)[::-1],
        'the returns are missing: advantages and returns are asked for': lambda f: (
            lambda *x: f(*x)[0])},
    ['no padding', 'padding, and gamma and lambda 1', 'padding, gamma .9 and lambda .8'])


def ratio(new, old): return (new - old).exp()


def clipped(new, old, e): return ratio(new, old).clamp(1 - e, 1 + e)


ppo_policy_loss = Check(
    [(randn(3, 5), randn(3, 5, seed=1), randn(3, 5, seed=2), .2)], 1e-3, {
        SIGN: lambda f: lambda *x: -f(*x),
        'it takes the larger gain, and must take the smaller one': lambda f: (
            lambda n, o, a, e: -torch.maximum(ratio(n, o)*a, clipped(n, o, e)*a)),
        'the minus sign is lost, and the larger gain is taken': lambda f: (
            lambda n, o, a, e: torch.maximum(ratio(n, o)*a, clipped(n, o, e)*a)),
        'nothing is clipped': lambda f: lambda n, o, a, e: -ratio(n, o)*a,
        'the unclipped gain is missing, so that a wrong step is never taken back': lambda f: (
            lambda n, o, a, e: -clipped(n, o, e)*a),
        'the ratio is clipped from above only': lambda f: (
            lambda n, o, a, e: -torch.minimum(ratio(n, o)*a, ratio(n, o).clamp(max=1 + e)*a)),
        'the gain is clipped, and the ratio must be': lambda f: (
            lambda n, o, a, e: -torch.minimum(ratio(n, o)*a, (ratio(n, o)*a).clamp(1 - e, 1 + e))),
        'the ratio is upside down': lambda f: lambda n, o, a, e: f(o, n, a, e),
        'the ratio is the exponential of the difference of log-probs': lambda f: (
            lambda n, o, a, e: -torch.minimum((n - o)*a, (n - o).clamp(1 - e, 1 + e)*a)),
        'the ratio is that of log-probs, and must be that of probabilities': lambda f: (
            lambda n, o, a, e: -torch.minimum(n/o*a, (n/o).clamp(1 - e, 1 + e)*a)),
        'the advantages are not used': lambda f: (
            lambda n, o, a, e: -torch.minimum(ratio(n, o), clipped(n, o, e)))} | of_all('token'))

masked_mean = Check([(randn(4, 9), masks())], 1e-3, {
    'it is unmasked: padding counts': lambda f: lambda x, m: x.mean(),
    'the sum is masked, but divided by all places': lambda f: lambda x, m: (x*m).mean(),
    'it is a sum: it is not divided by the number of places that count': lambda f: (
        lambda x, m: (x*m).sum()),
    'the sum is that of all places, divided by those that count': lambda f: (
        lambda x, m: x.sum()/m.sum()),
    'it is divided by the number of rows, not of the places that count': lambda f: (
        lambda x, m: (x*m).sum()/len(x)),
    'it is the mean of the rows\' means: each place that counts weighs the same': lambda f: (
        lambda x, m: ((x*m).sum(1)/m.sum(1)).mean()),
    'each row has a mean of its own, and one mean over all is asked for': lambda f: (
        lambda x, m: (x*m).sum(1)/m.sum(1))})

dpo_loss = Check([(randn(6), randn(6, seed=1), randn(6, seed=2), randn(6, seed=3), .3)], 1e-3, {
    SIGN: lambda f: lambda *x: -f(*x),
    'chosen and rejected have changed places': lambda f: lambda a, b, c, d, t: f(b, a, d, c, t),
    'the reference is missing': lambda f: lambda a, b, c, d, t: f(a, b, 0*c, 0*d, t),
    'the policy is missing': lambda f: lambda a, b, c, d, t: f(0*a, 0*b, c, d, t),
    'the reference has the wrong sign, or its two log-probs have changed places': lambda f: (
        lambda a, b, c, d, t: f(a, b, d, c, t)),
    'a minus sign is lost: what the rejected answer has gained is taken away': lambda f: (
        lambda a, b, c, d, t: f(a, -b, c, -d, t)),
    'the rejected answer is not used': lambda f: lambda a, b, c, d, t: f(a, 0*b, c, 0*d, t),
    'beta is missing': lambda f: lambda a, b, c, d, t: f(a, b, c, d, 1.),
    'beta divides, and must multiply': lambda f: lambda a, b, c, d, t: f(a, b, c, d, 1/t),
    'beta multiplies the loss, and must multiply what is in the sigmoid': lambda f: (
        lambda a, b, c, d, t: t*f(a, b, c, d, 1.)),
    'the logarithm is missing': lambda f: (
        lambda a, b, c, d, t: -torch.sigmoid(t*(a - c - b + d)))} | of_all('pair'))


def replaced(scores, values, n):
    "The value of the best of n when a sample may be drawn more than once."
    sorted_values = np.take_along_axis(values, scores.argsort(-1), -1)
    size = scores.shape[-1]
    weights = (np.arange(1, size + 1)/size)**n - (np.arange(size)/size)**n
    return (sorted_values*weights).sum(-1)


def top_n(scores, values, n):
    "The mean value of the n samples with the highest scores."
    return np.take_along_axis(values, scores.argsort(-1)[:, -n:], -1).mean(-1)


best_of_n_value = Check(
    [(randn(3, 6).double().numpy(), randn(3, 6, seed=1).double().numpy(), n) for n in (1, 2, 4)],
    1e-3, {
        'it takes the best value, which nobody knows, not that of the best score':
            lambda f: lambda s, v, n: f(v, v, n),
        'it takes the lowest score': lambda f: lambda s, v, n: f(-s, v, n),
        'it looks at the first n samples only': lambda f: (
            lambda s, v, n: [b[:n][a[:n].argmax()] for a, b in zip(s, v)]),
        'n is missing: it takes the best of all samples': lambda f: (
            lambda s, v, n: f(s, v, s.shape[-1])),
        'n is missing: it is the mean of all values': lambda f: lambda s, v, n: v.mean(-1),
        'it is the mean score, not the mean value': lambda f: lambda s, v, n: f(s, s, n),
        'it is the mean of the n best samples, and one of them is chosen': lambda f: top_n,
        'samples are drawn with repetition: a choice has n different ones': lambda f: replaced,
        'it is a sum over all choices, not their mean': lambda f: (
            lambda s, v, n: math.comb(s.shape[-1], n)*f(s, v, n)),
        'it is one mean, and each prompt has a value of its own': lambda f: (
            lambda *x: f(*x).mean())},
    ['n 1', 'n 2', 'n 4'])


def ppi_cases():
    cases = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        y = 1.*(rng.random(60) < .5)
        f, rest = .2*y + .8*rng.random(60), .1 + .8*rng.random(200)
        cases.append((y, f, rest))
    return cases


def weighted(y, f, rest, w):
    "The corrected rate with another weight: mean, error, weight."
    error = math.sqrt(w**2*rest.var()/len(rest) + (y - w*f).var()/len(y))
    return y.mean() + w*(rest.mean() - f.mean()), error, w


def undivided(y, f, rest, w): return math.sqrt(w**2*rest.var() + (y - w*f).var())


def without_size(y, f, rest):
    return np.clip(np.cov(y, f)[0, 1]/np.concatenate([f, rest]).var(), 0, 1)


def ppi_fault(change):
    "What a change of (mean, error, weight) and the right function's arguments makes wrong."
    return lambda f: lambda y, j, rest: change(*f(y, j, rest), y, j, rest)


ppi_mean = Check(ppi_cases(), .04, {
    'the correction has the wrong sign': ppi_fault(
        lambda mean, error, w, y, f, rest: (2*y.mean() - mean, error, w)),
    'the judge is not used: these are the labels alone': lambda f: (
        lambda y, j, rest: f(y, j, rest[:0])),
    'the weight is 1 whatever the judge is worth': lambda f: (
        lambda y, j, rest: weighted(y, j, rest, 1.)),
    'the factor 1 + n/M is missing in the weight': lambda f: (
        lambda y, j, rest: weighted(y, j, rest, without_size(y, j, rest))),
    'the error is that of one instruction: its variance is not divided by their number': ppi_fault(
        lambda mean, error, w, y, f, rest: (mean, undivided(y, f, rest, w), w)),
    'the error is a variance: its root is missing': ppi_fault(
        lambda mean, error, w, y, f, rest: (mean, error**2, w)),
    'the error is half the width of the interval, and must be one standard error': ppi_fault(
        lambda mean, error, w, y, f, rest: (mean, 1.96*error, w)),
    'the error is that of the labels alone: the judge makes it smaller': ppi_fault(
        lambda mean, error, w, y, f, rest: (mean, y.std()/math.sqrt(len(y)), w)),
    'the weight stands before the error': ppi_fault(
        lambda mean, error, w, y, f, rest: (mean, w, error))})


def paired(seed=0):
    rng = np.random.default_rng(seed)
    easy = 30*rng.random(200)
    return easy + 40 + 10*rng.random(200), easy + 38 + 10*rng.random(200)


def ends(scale):
    "The mean difference, and ends that are too near or too far."
    def wrong(a, b):
        mean, low, high = bootstrap(a - b)
        return mean, mean - scale*(mean - low), mean + scale*(high - mean)
    return wrong


def unpaired(a, b):
    half = 1.96*math.sqrt((a.var() + b.var())/len(a))
    return a.mean() - b.mean(), a.mean() - b.mean() - half, a.mean() - b.mean() + half


difference = Check([paired(seed) for seed in range(2)], .2, {
    'it is second minus first': lambda f: lambda a, b: f(b, a),
    'it is not paired: the spread is that of two independent means': lambda f: unpaired,
    'the ends are one standard error away, which is 68 %': lambda f: ends(1/1.96),
    'the spread is that of single answers, not of their mean': lambda f: (
        lambda a, b: ends(math.sqrt(len(a)))(a, b)),
    'the ends have changed places': lambda f: lambda a, b: (f(a, b)[0], *f(a, b)[:0:-1]),
    'the mean stands between its ends, and must stand first': lambda f: lambda a, b: (
        f(a, b)[1], f(a, b)[0], f(a, b)[2]),
    'the distance to the ends is returned, not the ends': lambda f: lambda a, b: (
        f(a, b)[0], f(a, b)[0] - f(a, b)[1], f(a, b)[2] - f(a, b)[0])})

CHECKS = dict(pairwise_loss=pairwise_loss, choose_best=choose_best, gae=gae,
              ppo_policy_loss=ppo_policy_loss, masked_mean=masked_mean, dpo_loss=dpo_loss,
              best_of_n_value=best_of_n_value, ppi_mean=ppi_mean, difference=difference)
