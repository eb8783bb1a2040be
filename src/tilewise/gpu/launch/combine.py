"""Results over disjoint sets of keys put together, up to three at a time, in one pass over memory.

Each operand holds some rows of the target. With log-sum-exps they are weighted as in `core.merge`:

    lse = log(sum_p exp(lse_p)),   out = sum_p exp(lse_p - lse) out_p

Without, they are added, as gradients are. Sums are in float32 and rounded once. The target may be an operand:
a program reads its rows before it writes them.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

MOST = 3  # operands of a launch
BLOCK_T = 32  # tokens of a program


class Operand(NamedTuple):
    """Rows [start, start + tokens) of the target."""

    start: int
    out: Tensor  # (batch, tokens, heads, dim)
    lse: Tensor | None  # (batch, heads, tokens)


def combine(target: Tensor, lse: Tensor | None, operands: tuple[Operand, ...], start: int, stop: int) -> None:
    """Write rows [start, stop) of target and lse. Rows that no operand holds become 0, lse -inf.

    Args:
        target: (batch, tokens, heads, dim), its last dimension contiguous.
        lse: (batch, heads, tokens) float32, or None: the operands are added.
        operands: at least one.
    """
    missing = MOST - len(operands)  # the kernel takes all: the first again, without rows
    spans = [(o.start, o.start + o.out.shape[1]) for o in operands] + [(0, 0)] * missing
    tensors = [t for o in operands + operands[:1] * missing for t in (_dense(o.out), _dense(o.lse))]
    run(_launch, (start, stop, *spans), (target, lse, *tensors))


def _dense(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _launch(problem: tuple[int, int, tuple[int, int]], tensors: Tensors) -> Launch:
    start, stop, *spans = problem
    target, lse, *rest = tensors
    assert target is not None
    batch, _, heads, dim = target.shape
    blocks = triton.cdiv(stop - start, BLOCK_T)
    arguments = (
        _pointers(target, lse),
        *(_pointers(*rest[n : n + 2]) for n in range(0, 2 * MOST, 2)),
        *(start, stop, *(row for span in spans for row in span), heads, blocks),
        *(dim, BLOCK_T, triton.next_power_of_2(dim)),
    )
    return Launch(combine_kernel, batch * heads * blocks, arguments, 4)


class Pointers(NamedTuple):
    """A tensor (batch, tokens, heads, dim) and its lse (batch, heads, tokens), with strides in elements."""

    out: Tensor
    stride_batch: int
    stride_token: int
    stride_head: int
    lse: Tensor | None
    lse_stride_batch: int
    lse_stride_head: int


def _pointers(out: Tensor | None, lse: Tensor | None) -> Pointers:
    assert out is not None
    batch, token, head, _ = out.stride()
    lse_batch, lse_head = (0, 0) if lse is None else lse.stride()[:2]
    return Pointers(out, batch, token, head, lse, lse_batch, lse_head)


_ROWS = [f"{name}_{end}" for name in "abc" for end in ("start", "stop")]


@triton.jit(do_not_specialize=["start", "stop", *_ROWS, "heads", "blocks"])
def combine_kernel(
    target, a, b, c, start, stop, a_start, a_stop, b_start, b_stop, c_start, c_stop, heads, blocks,
    DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (batch * heads * blocks,), blocks of BLOCK_T rows."""
    bh = tl.program_id(0) // blocks
    batch = (bh // heads).to(tl.int64)
    head = (bh % heads).to(tl.int64)
    row = start + tl.program_id(0) % blocks * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    in_a = (row >= a_start) & (row < tl.minimum(a_stop, stop))
    in_b = (row >= b_start) & (row < tl.minimum(b_stop, stop))
    in_c = (row >= c_start) & (row < tl.minimum(c_stop, stop))
    out_a = load_rows(a, batch, head, row - a_start, in_a, DIM, BLOCK_D)  # [BLOCK_T, BLOCK_D]
    out_b = load_rows(b, batch, head, row - b_start, in_b, DIM, BLOCK_D)
    out_c = load_rows(c, batch, head, row - c_start, in_c, DIM, BLOCK_D)
    if target.lse is not None:
        lse_a = load_lse(a, batch, head, row - a_start, in_a)  # [BLOCK_T]
        lse_b = load_lse(b, batch, head, row - b_start, in_b)
        lse_c = load_lse(c, batch, head, row - c_start, in_c)
        m = tl.maximum(tl.maximum(lse_a, lse_b), lse_c)
        m = tl.where(m == float("-inf"), 0.0, m)  # -inf - -inf would be NaN
        p_a, p_b, p_c = tl.exp(lse_a - m), tl.exp(lse_b - m), tl.exp(lse_c - m)
        total = p_a + p_b + p_c
        scale = tl.where(total == 0.0, 0.0, 1.0 / total)
        p_a, p_b, p_c = p_a * scale, p_b * scale, p_c * scale
        out = p_a[:, None] * out_a + p_b[:, None] * out_b + p_c[:, None] * out_c
        lse = tl.where(total == 0.0, float("-inf"), m + tl.log(total))
        lse_ptr = target.lse + batch * target.lse_stride_batch + head * target.lse_stride_head
        tl.store(lse_ptr + row, lse, mask=row < stop)
    else:
        out = out_a + out_b + out_c
    column = tl.arange(0, BLOCK_D)
    mask = (row < stop)[:, None] & (column < DIM)[None, :]
    ptr = target.out + batch * target.stride_batch + head * target.stride_head
    ptrs = ptr + row.to(tl.int64)[:, None] * target.stride_token + column[None, :]
    tl.store(ptrs, out.to(target.out.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(x, batch, head, row, exists, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [rows, BLOCK_D] of an operand in float32, 0 where it has none."""
    column = tl.arange(0, BLOCK_D)
    ptr = x.out + batch * x.stride_batch + head * x.stride_head
    ptrs = ptr + row.to(tl.int64)[:, None] * x.stride_token + column[None, :]
    mask = exists[:, None] & (column < DIM)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_lse(x, batch, head, row, exists):
    """lse of rows, -inf where the operand has none."""
    ptr = x.lse + batch * x.lse_stride_batch + head * x.lse_stride_head
    return tl.load(ptr + row, mask=exists, other=float("-inf"))
