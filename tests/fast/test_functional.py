"""Each pure function against a brute-force twin in float64; padding and chunks do not matter."""
import math
import random
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import pad

from alpaca_farm.core.functional import (
    KL_KINDS, gae, kl_estimate, masked_mean, masked_var, masked_whiten, selected_logprobs,
    token_logprobs)

torch.set_num_threads(1)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(a, b, tol=1e-12):
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def masks(rows, length, seed=0):
    "One unbroken stretch per row, some of them empty, some full."
    rng = random.Random(seed)
    out = torch.zeros(rows, length, dtype=torch.long)
    for r in range(2, rows):
        start = rng.randrange(length)
        out[r, start:rng.randint(start, length)] = 1
    out[1] = 1
    return out


def logprob(logits, token, temperature=1.0):
    return logits[token]/temperature - math.log(sum(math.exp(z/temperature) for z in logits))


@pytest.mark.parametrize('temperature', [1.0, 0.7, 3.0])
def test_token_logprobs(temperature):
    logits, tokens = randn(3, 5, 11)*5, torch.arange(15).view(3, 5) % 11
    want = [[logprob(z, k, temperature) for z, k in zip(*row)]
            for row in zip(logits.tolist(), tokens.tolist())]
    same(token_logprobs(logits, tokens, temperature), want)
    z = logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, tokens, temperature), z)


@pytest.mark.parametrize('chunk', [0, 1, 3, 17, 100])
@pytest.mark.parametrize('scale, cap', [(1., 0.), (.5, 0.), (2., 3.)])
def test_selected_logprobs(chunk, scale, cap):
    def plain(h, w, b):
        z = (h @ w.T + b)*scale
        return cap*torch.tanh(z/cap) if cap else z
    def grads(f):
        shapes = (17, 6), (23, 6), (23,)
        parts = [randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
        logp = f(*parts)
        (logp*randn(17, seed=2)).sum().backward()
        return logp.detach(), *(p.grad for p in parts)
    tokens = torch.arange(17)
    ours = grads(lambda h, w, b: selected_logprobs(h, w, tokens, 0.7, chunk, b, scale, cap))
    theirs = grads(lambda *parts: token_logprobs(plain(*parts), tokens, 0.7))
    for a, b in zip(ours, theirs): same(a, b)


def test_selected_logprobs_of_frozen_parts():
    tokens = torch.arange(5)
    for frozen in (0, 1):
        parts = [randn(5, 4), randn(9, 4, seed=1)]
        parts[1 - frozen].requires_grad_()
        selected_logprobs(*parts, tokens, chunk=2).sum().backward()
        assert parts[frozen].grad is None and parts[1 - frozen].grad.abs().sum() > 0
    with torch.no_grad(): assert not selected_logprobs(*parts, tokens).requires_grad


def test_selected_logprobs_holds_one_chunk_of_logits():
    rows, words, chunk, largest = 300, 500, 32, 0
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            nonlocal largest
            out = f(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor): largest = max(largest, out.numel())
            return out
    h, w = torch.randn(rows, 8, requires_grad=True), torch.randn(words, 8, requires_grad=True)
    with Watch(): selected_logprobs(h, w, torch.arange(rows), chunk=chunk).sum().backward()
    assert largest == chunk*words


def test_selected_logprobs_of_a_capped_head_at_a_large_vocabulary():
    "384 rows of 256,000 words: 0.4 GB of logits, of which autograd would hold several copies."
    code = """
import resource, torch
from alpaca_farm.core.functional import selected_logprobs
torch.set_num_threads(1)
h, w = torch.randn(384, 4, requires_grad=True), torch.randn(256_000, 4, requires_grad=True)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/2**20
before = peak()
b = torch.zeros(256_000)
selected_logprobs(h, w, torch.arange(384), 1., 0, b, scale=.5, cap=30.).sum().backward()
print(peak() - before)
"""
    p = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert float(p.stdout) < .45, p.stdout


def test_wrong_shapes_and_settings_are_named():
    with pytest.raises(ValueError, match='response positions'):
        selected_logprobs(randn(2, 3, 4), randn(5, 4), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(ValueError, match='temperature = 0'):
        token_logprobs(randn(2, 3), torch.arange(2), 0)
    with pytest.raises(ValueError, match='k4'): kl_estimate(randn(2), randn(2), 'k4')


def test_masked_statistics():
    x, mask = randn(6, 8), masks(6, 8)
    values = [v for row, keep in zip(x.tolist(), mask.tolist()) for v, k in zip(row, keep) if k]
    mean = sum(values)/len(values)
    same(masked_mean(x, mask), mean)
    same(masked_var(x, mask), sum((v - mean)**2 for v in values)/len(values))
    rows = [sum(v*k for v, k in zip(*r))/max(1, sum(r[1])) for r in zip(x.tolist(), mask.tolist())]
    same(masked_mean(x, mask, 1), rows)
    assert masked_mean(x, torch.zeros(6, 8)) == 0


@pytest.mark.parametrize('shift', [True, False])
def test_masked_whiten(shift):
    x, mask = randn(6, 8)*3 + 2, masks(6, 8)
    white = masked_whiten(x, mask, shift)
    mean, std = masked_mean(x, mask), masked_var(x, mask).sqrt()
    for b in range(6):
        for t in range(8):
            want = (x[b, t] - mean)/math.sqrt(std**2 + 1e-8) + (0 if shift else mean)
            same(white[b, t], want if mask[b, t] else 0.)
    same(masked_mean(white, mask), 0 if shift else mean, 1e-9)
    same(masked_var(white, mask), 1, 1e-7)


def test_padding_never_counts():
    "More padding on either side, filled with anything, changes nothing."
    x, mask = randn(6, 8), masks(6, 8)
    for left, right, fill in ((0, 3, math.nan), (4, 0, math.inf), (2, 5, 1e30)):
        wide = pad(torch.where(mask.bool(), x, fill), (left, right), value=fill)
        m = pad(mask, (left, right))
        cut = slice(left, left + 8)
        for f in (masked_mean, masked_var): same(f(wide, m), f(x, mask))
        same(masked_whiten(wide, m)[:, cut], masked_whiten(x, mask))
        for a, b in zip(gae(wide, wide*2, m, .9, .8), gae(x, x*2, mask, .9, .8)):
            same(a[:, cut], b)


def test_kl_kinds():
    formulas = dict(
        k1=lambda d: d, clamp=lambda d: max(d, 0), abs=abs, k2=lambda d: d*d/2,
        k3=lambda d: math.exp(-d) - 1 + d,
        js=lambda d: (math.exp(-d)*-d - (1 + math.exp(-d))*math.log((1 + math.exp(-d))/2))/2)
    assert set(formulas) == set(KL_KINDS)
    a, b = randn(50)*2, randn(50, seed=1)*2
    for kind, f in formulas.items():
        same(kl_estimate(a, b, kind), [f(d) for d in (a - b).tolist()], 1e-11)
        if kind != 'k1': assert (kl_estimate(a, b, kind) >= 0).all()


@pytest.mark.parametrize('gamma,lam', [(1, 1), (1, .95), (.9, .5), (.99, 0), (0, 1)])
def test_gae(gamma, lam):
    rewards, values, mask = randn(40, 12), randn(40, 12, seed=1), masks(40, 12)
    adv, ret = gae(rewards, values, mask, gamma, lam)
    for b in range(40):
        positions = [t for t in range(12) if mask[b, t]]
        ahead = ahead_value = 0.
        for t in reversed(positions):
            r, v = rewards[b, t].item(), values[b, t].item()
            ahead = r + gamma*ahead_value - v + gamma*lam*ahead
            ahead_value = v
            same(adv[b, t], ahead)
            same(ret[b, t], ahead + v)
    assert (adv[mask == 0] == 0).all() and (ret[mask == 0] == 0).all()
