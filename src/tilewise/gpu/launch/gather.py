"""Rows of tensors, of which some lie in the memory of other GPUs, put together in one pass.

A kernel reads them where they are, as no copy engine reads rows that do not follow each other: some heads of
each token, or the tokens of many documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

MOST = 8  # sources
BLOCK = 8192  # elements of a program
MOST_COLUMNS = 2048


def gather(target: Tensor, sources: Sequence[Tensor], which: Tensor, row: Tensor) -> None:
    """target[i, c] = sources[which[i, c]][row[i, c]].

    Args:
        target: (tokens, parts, batch, heads, dim).
        sources: up to MOST of (rows, batch, heads, dim), alike but for rows. Of both, a row's heads and dim
            are dense.
        which, row: (tokens, parts) int32, contiguous.
    """
    tensors = (target, which, row, *sources)
    run(_launch, (), tensors)


def _launch(problem: tuple[()], tensors: Tensors) -> Launch:
    target, which, row, *sources = tensors
    assert target is not None and which is not None and sources[0] is not None
    tokens, parts, batch, heads, dim = target.shape
    width = heads * dim
    columns = min(triton.next_power_of_2(width), MOST_COLUMNS)
    rows = BLOCK // columns
    arguments = (
        target, *target.stride()[:3], tuple(sources), *sources[0].stride()[:2], which, row,
        *(tokens * parts, parts), width, rows, columns, len(sources),
    )  # fmt: skip
    return Launch(gather_kernel, triton.cdiv(tokens * parts, rows), arguments, 4, programs_y=batch)


@triton.jit(do_not_specialize=["count"])
def gather_kernel(
    target, stride_token, stride_part, stride_batch, sources, source_row, source_batch, which, row, count,
    parts, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of ROWS tokens and parts, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) + tl.arange(0, ROWS) * tl.num_programs(0)  # of all sources at any time
    exists = n < count
    source = tl.load(which + n, mask=exists, other=0)
    at = tl.load(row + n, mask=exists, other=0).to(tl.int64) * source_row + batch * source_batch
    base = tl.where(source >= 0, sources[0], sources[0])  # [ROWS]
    for s in tl.static_range(1, SOURCES):
        base = tl.where(source == s, sources[s], base)
    to = (n // parts).to(tl.int64) * stride_token + (n % parts) * stride_part + batch * stride_batch
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (column < WIDTH)[None, :]
        found = tl.load((base + at)[:, None] + column[None, :], mask=mask)
        tl.store(target + to[:, None] + column[None, :], found, mask=mask)
