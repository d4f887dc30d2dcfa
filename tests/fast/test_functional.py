"""What the notebook's twins do not show: the memory that is held."""
import torch

from alpaca_farm.model.functional import selected_logprobs

torch.set_num_threads(1)


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
