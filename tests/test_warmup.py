"""`warmup` runs what later calls need and leaves no trace but compiled code."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.dispatch import choice as dispatch


def test_forward_and_backward_are_called_and_nothing_else_changes(monkeypatch):
    called = []
    backend = dispatch.load("tiled")
    for name in ("forward", "backward"):
        original = getattr(backend, name)
        monkeypatch.setattr(backend, name, lambda *a, n=name, f=original, **k: called.append(n) or f(*a, **k))
    q, k, v = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 2, 9, 9, requires_grad=True)
    state = torch.get_rng_state()
    tilewise.warmup(q, k, v, bias=bias, dropout_p=0.5, causal=True, backend="tiled")
    assert called == ["forward", "backward"]
    assert q.grad is None and bias.grad is None and torch.equal(state, torch.get_rng_state())
    called.clear()
    with torch.no_grad():
        tilewise.warmup(q, k, v, return_lse=True, backend="tiled", backward=False)
        tilewise.warmup(q, k, v, return_lse=True, backend="tiled")
    assert called == ["forward", "forward", "backward"]


def test_packed():
    x = torch.randn(9, 2, 8)
    starts = torch.tensor([0, 4, 9])
    assert tilewise.warmup(x, x, x, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True) is None


def test_bad_input_is_refused_as_by_attention():
    x = torch.randn(1, 9, 2, 8)
    with pytest.raises(ValueError, match=r"softcap=-1\.0 must be 0"):
        tilewise.warmup(x, x, x, softcap=-1.0)
