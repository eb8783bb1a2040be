"""Results over disjoint sets of keys put together, up to six at a time, in one pass over memory.

Each operand holds some rows of the target. With log-sum-exps they are weighted as in `core.merge`:

    lse = log(sum_p exp(lse_p)),   out = sum_p exp(lse_p - lse) out_p

Without, they are added, as gradients are. Sums are in float32 and rounded once. The target may be an operand:
a program reads its rows before it writes them, in all of its warps.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewise.gpu.launch.entry import by_field, entry
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

MOST = 6  # operands of a launch
FEW = 3  # or so many: two kernels in all
BLOCK_T = 32  # tokens of a program


Operand = tuple[int, Tensor, Tensor | None]  # first row, out (batch, tokens, heads, dim), lse


def combine(target: Tensor, lse: Tensor | None, operands: tuple[Operand, ...], start: int, stop: int) -> None:
    """Write rows [start, stop) of target and lse. Rows that no operand holds become 0, lse -inf.

    Args:
        target: (batch, tokens, heads, dim), its last dimension contiguous.
        lse: (batch, heads, tokens) float32, or None: the operands are added.
        operands: one to MOST, each the first of its rows, out and lse of these.
    """
    count = FEW if len(operands) <= FEW else MOST
    spans = [(first, first + out.shape[1]) for first, out, _ in operands] + [(0, 0)] * (MOST - len(operands))
    padded = operands + operands[:1] * (MOST - len(operands))  # the first again, without rows
    tensors = [_dense(t) for _, *results in padded for t in results]
    run(_launch, (start, stop, *spans), (target, lse, *tensors), count)


def _dense(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _launch(problem: tuple[int, int, tuple[int, int]], tensors: Tensors, count: int) -> Launch:
    start, stop, *spans = problem
    target, lse, *rest = tensors
    assert target is not None
    batch, _, heads, dim = target.shape
    blocks = triton.cdiv(stop - start, BLOCK_T)
    arguments = (
        _pointers(target, lse),
        *(Part(_pointers(*rest[2 * n : 2 * n + 2]), *span) for n, span in enumerate(spans)),
        *(start, stop, heads, blocks),
        *(dim, BLOCK_T, triton.next_power_of_2(dim), count),
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


@by_field
class Part(NamedTuple):
    """One of what is summed: it has rows `start` to `stop` of the target's."""

    rows: Pointers
    start: int
    stop: int


def _pointers(out: Tensor | None, lse: Tensor | None) -> Pointers:
    assert out is not None
    batch, token, head, _ = out.stride()
    lse_batch, lse_head = (0, 0) if lse is None else lse.stride()[:2]
    return Pointers(out, batch, token, head, lse, lse_batch, lse_head)


@entry(triton.jit)
def combine_kernel(
    target, a: Part, b: Part, c: Part, d: Part, e: Part, f: Part,
    start: int, stop: int, heads: int, blocks: int,
    DIM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Grid: (batch * heads * blocks,), blocks of BLOCK_T rows. Operands behind the first COUNT have none."""
    operands = (a, b, c, d, e, f)
    bh = tl.program_id(0) // blocks
    batch = (bh // heads).to(tl.int64)
    head = (bh % heads).to(tl.int64)
    row = start + tl.program_id(0) % blocks * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    m = tl.full([BLOCK_T], float("-inf"), tl.float32)
    if target.lse is not None:
        for n in tl.static_range(COUNT):
            exists = (row >= operands[n].start) & (row < tl.minimum(operands[n].stop, stop))
            m = tl.maximum(m, load_lse(operands[n].rows, batch, head, row - operands[n].start, exists))
        m = tl.where(m == float("-inf"), 0.0, m)  # -inf - -inf would be NaN
    total = tl.zeros([BLOCK_T], tl.float32)
    out = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for n in tl.static_range(COUNT):
        exists = (row >= operands[n].start) & (row < tl.minimum(operands[n].stop, stop))
        rows = load_rows(operands[n].rows, batch, head, row - operands[n].start, exists, DIM, BLOCK_D)
        if target.lse is not None:
            p = tl.exp(load_lse(operands[n].rows, batch, head, row - operands[n].start, exists) - m)
            total += p
            rows = p[:, None] * rows
        out += rows
    tl.debug_barrier()  # all warps have read what any of them overwrites, if the target is an operand
    if target.lse is not None:
        out = out * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
        lse = tl.where(total == 0.0, float("-inf"), m + tl.log(total))
        lse_ptr = target.lse + batch * target.lse_stride_batch + head * target.lse_stride_head
        tl.store(lse_ptr + row, lse, mask=row < stop)
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
