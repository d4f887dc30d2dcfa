"""What the notebook's twins do not show: scaled and frozen heads, and the memory that is held."""
import subprocess
import sys

import torch

from alpaca_farm.core.functional import selected_logprobs, token_logprobs

torch.set_num_threads(1)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_selected_logprobs_of_a_scaled_head():
    h, w, b = (randn(*size, seed=i).requires_grad_()
               for i, size in enumerate([(7, 4), (9, 4), (9,)]))
    tokens = torch.arange(7)
    def ours(h, w, b): return selected_logprobs(h, w, tokens, .7, 3, b, scale=.5)
    torch.testing.assert_close(ours(h, w, b), token_logprobs((h @ w.T + b)*.5, tokens, .7))
    assert torch.autograd.gradcheck(ours, (h, w, b))


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


def test_whitening_does_not_enlarge_rounding():
    "Equal numbers become 0, or stay what they are where their mean is kept."
    from alpaca_farm.core.functional import masked_whiten
    for value in (.1, 1000.1, -1e6/7):
        x, mask = torch.full((7, 9), value), torch.arange(9) < torch.arange(1, 8)[:, None]
        for around in (x, torch.where(torch.arange(9) % 2 < 1, x*(1 + 2e-7), x)):
            assert not masked_whiten(around, mask).any()
            kept = masked_whiten(around, mask, shift_mean=False)
            torch.testing.assert_close(kept, x*mask, rtol=1e-6, atol=0)
