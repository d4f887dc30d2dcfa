"""What the notebook's twins do not show: scaled and frozen heads, and the memory that is held."""
import torch

from alpaca_farm.core.functional import selected_logprobs
from tiny import randn

torch.set_num_threads(1)


def test_selected_logprobs_of_frozen_parts():
    tokens = torch.arange(5)
    for frozen in (0, 1):
        parts = [randn(5, 4), randn(9, 4, seed=1)]
        parts[1 - frozen].requires_grad_()
        selected_logprobs(*parts, tokens, chunk=2).sum().backward()
        assert parts[frozen].grad is None
        assert parts[1 - frozen].grad.abs().sum() > 0
    with torch.no_grad():
        assert not selected_logprobs(*parts, tokens).requires_grad


def test_selected_logprobs_holds_one_chunk_of_logits():
    rows = 300
    words = 500
    chunk = 32
    largest = 0
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            nonlocal largest
            out = f(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out
    h = torch.randn(rows, 8, requires_grad=True)
    w = torch.randn(words, 8, requires_grad=True)
    for more in ({}, dict(scale=.5, cap=30.)):   # a capped head, too
        with Watch():
            selected_logprobs(h, w, torch.arange(rows), chunk=chunk, **more).sum().backward()
        assert largest == chunk*words
