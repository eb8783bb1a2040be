"""What plans of calls ask for: kernels write nothing behind it."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.cpu.host.pool import Pool, pool

CANARIES = 1 << 14


class GuardedPool(Pool):
    """Exactly as much as is asked for, and canaries behind it."""

    def grow(self, size):
        self.release()
        self.memory = torch.full((size + 64 + CANARIES,), 7, dtype=torch.uint8)
        self.size, self.address = size, -(-self.memory.data_ptr() // 64) * 64

    def overwritten(self):
        end = self.address - self.memory.data_ptr() + self.size
        return int((self.memory[max(0, end) :] != 7).sum())


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setattr(pool, "__class__", GuardedPool)
    pool.release()  # an earlier call's may be larger
    yield pool
    monkeypatch.undo()
    pool.release()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k"),
    [(8, 12, 12, 1, 100), (1000, 1, 1, 1, 70), (3, 32, 4, 1, 900), (2, 8, 2, 5, 300), (2, 3, 3, 77, 211)],
)
def test_nothing_behind_the_scratch_is_written(guarded, dtype, batch, heads, kv_heads, seqlen_q, seqlen_k):
    """A single split of decoding counts its tickets too: 8 bytes a head."""
    q = torch.randn(batch, heads, seqlen_q, 64, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(batch, kv_heads, seqlen_k, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    out = tilewise.attention(q, k, v, causal=True, layout="bhsd", backend="llvm")
    assert guarded.overwritten() == 0
    guarded.release()
    out.sum().backward()
    assert guarded.overwritten() == 0


def test_a_long_backward_without_keys():
    q = torch.randn(3, 260, 4, 128, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(3, 0, 1, 128, dtype=torch.bfloat16)
    (dq,) = torch.autograd.grad(tilewise.attention(q, k, k, backend="llvm").sum(), q)
    assert not dq.any()
