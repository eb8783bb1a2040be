"""Rows of tensors, of which some lie in the memory of other GPUs, put together in one pass.

A kernel reads them where they are, as no copy engine reads rows that do not follow each other: some heads of
each token, or the tokens of many documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from tilewise.gpu.launch.entry import entry
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

MOST = 16  # sources
BLOCK = 8192  # elements of a program: in 16 bits 64 bytes of each of its threads are on their way at once
NUM_WARPS = 8  # with 4 a thread has twice as many addresses: 2.8 TB/s instead of 3.6 on an H200
MOST_ROWS, MOST_COLUMNS = 64, 2048  # of a block; short rows would fill it with addresses


def take(target: Tensor, sources: Sequence[Tensor], which: Tensor, row: Tensor) -> None:
    """target[i, c] = sources[which[i, c]][row[i, c]].

    Args:
        target: (tokens, parts, batch, heads, dim).
        sources: up to MOST of (rows, batch, heads, dim), alike but for rows. Of both, a row's heads and dim
            are dense.
        which, row: (tokens, parts) int32, of any strides.
    """
    run(_launch, (), (target, which, row, *sources))


def _launch(problem: tuple[()], tensors: Tensors) -> Launch:
    target, which, row, *sources = tensors
    assert target is not None and which is not None and row is not None and sources[0] is not None
    tokens, parts, batch, heads, dim = target.shape
    width = heads * dim
    columns = min(triton.next_power_of_2(width), MOST_COLUMNS)
    rows = min(BLOCK // columns, MOST_ROWS)
    blocks = triton.cdiv(tokens * parts, rows)
    arguments = (
        (target, *target.stride()[:3]), tuple(sources), *sources[0].stride()[:2], (which, *which.stride()),
        (row, *row.stride()), tokens * parts, parts, blocks, width, rows, columns, len(sources),
    )  # fmt: skip
    return Launch(take_kernel, batch * blocks, arguments, NUM_WARPS)


@entry(triton.jit)
def take_kernel(
    target, sources, source_row, source_batch, which, row, count: int, parts, blocks: int,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """Grid: (batch * blocks,), blocks of ROWS tokens and parts. Tensors come with their strides in elements.

    A block's rows are spread over all tokens, so that ranks do not read of the same rank at the same time.
    No row of the target is written by two programs, and none is read: nothing has to be waited for.
    """
    target_ptr, target_token, target_part, target_batch = target
    which_ptr, which_token, which_part = which
    row_ptr, row_token, row_part = row
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    n = tl.program_id(0) % blocks + tl.arange(0, ROWS) * blocks
    exists = n < count
    token, part = (n // parts).to(tl.int64), n % parts
    source = tl.load(which_ptr + token * which_token + part * which_part, mask=exists, other=0)
    at = tl.load(row_ptr + token * row_token + part * row_part, mask=exists, other=0).to(tl.int64)
    base = tl.where(exists, sources[0], sources[0])  # [ROWS] pointers, all to the first source
    for s in tl.static_range(1, SOURCES):
        base = tl.where(source == s, sources[s], base)
    base += at * source_row + batch * source_batch
    to = target_ptr + token * target_token + part * target_part + batch * target_batch
    for first in tl.static_range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        mask = exists[:, None] & (column < WIDTH)[None, :]
        tl.store(
            to[:, None] + column[None, :], tl.load(base[:, None] + column[None, :], mask=mask), mask=mask
        )
