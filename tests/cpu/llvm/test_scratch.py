"""What plans of calls ask for: kernels write nothing behind it."""

from __future__ import annotations

import sys

import pytest
import torch

import tilewise
from tilewise.cpu.host import call_plan
from tilewise.cpu.host.pool import ThreadBlock, pool

CANARIES = 1 << 14


class GuardedBlock(ThreadBlock):
    """Exactly as much scratch as is asked for, and canaries behind it."""

    def grow(self, size):
        self.release()
        self.memory = torch.full((size + 64 + CANARIES,), 7, dtype=torch.uint8)
        self.size, self.scratch = size, -(-self.memory.data_ptr() // 64) * 64

    def overwritten(self):
        end = self.scratch - self.memory.data_ptr() + self.size
        return int((self.memory[max(0, end) :] != 7).sum())


@pytest.fixture
def guarded():
    pool.block = GuardedBlock()
    yield pool.block
    pool.block = None


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


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_call_from_within_a_call(is_packed):
    """As a signal handler or a finalizer makes one, at any line: each has its own arguments and scratch."""

    def call(length):
        torch.manual_seed(length)
        q, k, v = (torch.randn(length, 2, 16) for _ in range(3))
        starts = torch.tensor([0, length // 2, length])
        if is_packed:
            return tilewise.attention_varlen(q, k, v, starts, starts, causal=True, backend="llvm")
        mask = torch.rand(length, length) > 0.3
        return tilewise.attention(*(t[None] for t in (q, k, v)), mask=mask, backend="llvm")

    expected, other, wrong = call(40), call(200), []

    def at_each_line(frame, event, _):
        if frame.f_code.co_filename == call_plan.__file__:
            sys.settrace(None)
            wrong.append(not torch.equal(call(200), other))
            sys.settrace(at_each_line)
        return at_each_line

    sys.settrace(at_each_line)
    try:
        found = call(40)
    finally:
        sys.settrace(None)
    assert torch.equal(found, expected) and len(wrong) > 20 and not any(wrong)
