"""What few queries of a cache see in chunks of positions, as rows of page tables, in one launch.

The arithmetic is that of `tilewise.integrations.chunks`, which takes a dozen operations for it and says why.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.launch_plan import Launch, Tensors, is_interpreted, run
from tilewise.triton.call import gpu_capability

BLOCK = 512  # pages that a program writes at a time


class Cut(NamedTuple):
    """Numbers of one cut."""

    seqlen_q: int
    chunk: int
    page: int  # size of the pages that the rows are of
    parts: int  # of them in a page of the table
    width: int  # of a row
    has_leftpad: bool  # chunks may begin within a page


class Pieces(NamedTuple):
    """One piece of every sequence, and for more than one query a second one of every sequence behind them."""

    page_table: Tensor  # (pieces, width) int32
    seqlens_k: Tensor  # (pieces,) int32
    leftpad_k: Tensor | None  # (pieces,) int32
    is_second: Tensor | None  # (batch, seqlen_q) bool: queries of the second pieces


def few_queries(seqlens_k: Tensor, leftpad_k: Tensor | None, page_table: Tensor | None, cut: Cut) -> Pieces:
    """The pieces of each sequence's last `seqlen_q` positions.

    Args:
        seqlens_k, leftpad_k: (batch,) of the cache.
        page_table: (batch, pages) of it; None where sequence b is page b.
    """
    batch, device = len(seqlens_k), seqlens_k.device
    pieces = batch if cut.seqlen_q == 1 else 2 * batch
    made = Pieces(
        torch.empty(pieces, cut.width, dtype=torch.int32, device=device),
        torch.empty(pieces, dtype=torch.int32, device=device),
        torch.empty(pieces, dtype=torch.int32, device=device) if cut.has_leftpad else None,
        None if cut.seqlen_q == 1 else torch.empty(batch, cut.seqlen_q, dtype=torch.bool, device=device),
    )
    given = tuple(None if t is None else t.contiguous() for t in (seqlens_k, leftpad_k, page_table))
    run(_launch, cut, given, fresh=made)
    return made


def _launch(cut: Cut, tensors: Tensors) -> Launch:
    seqlens_k, _, page_table, rows, *_ = tensors
    assert seqlens_k is not None and rows is not None
    is_early = not is_interpreted() and gpu_capability(seqlens_k.device) >= (9, 0)
    columns = 1 if page_table is None else page_table.shape[1]
    numbers = (len(seqlens_k), columns * cut.parts, *cut[:5])
    block_q = triton.next_power_of_2(cut.seqlen_q)
    arguments = (*tensors, *numbers, BLOCK, block_q, is_early)
    return Launch(few_queries_kernel, len(rows), arguments, 4, launch_pdl=is_early)


@triton.jit(do_not_specialize=["batch", "columns", "seqlen_q", "chunk", "page", "parts", "width"])
def few_queries_kernel(
    seqlens_k, leftpad_k, page_table, rows, counts, leftpads, is_second,
    batch, columns, seqlen_q, chunk, page, parts, width,
    BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (pieces,). columns: pages of a sequence, of size `page`."""
    piece = tl.program_id(0)
    b = piece % batch
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # until lengths that the kernel before wrote can be read
    seqlen = tl.load(seqlens_k + b).to(tl.int32)
    start = seqlen * 0
    if leftpad_k is not None:
        start = tl.load(leftpad_k + b).to(tl.int32)
        seqlen -= start
    first = tl.maximum(seqlen - seqlen_q, 0) // chunk
    last = tl.maximum(seqlen - 1, 0) // chunk
    number = tl.where(piece < batch, first, last)
    count = tl.maximum(seqlen - number * chunk, 0)
    count = tl.where((piece < batch) | (last > first), count, 0)
    start += number * chunk
    for n0 in range(0, width, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        column = tl.minimum(start // page + n, columns - 1)
        entry = b
        if page_table is not None:
            table = page_table + b.to(tl.int64) * (columns // parts)
            entry = tl.load(table + column // parts, mask=n < width, other=0)
        entry = (entry * parts + column % parts).to(tl.int32)
        tl.store(rows + piece.to(tl.int64) * width + n, entry, mask=n < width)
    if leftpads is not None:
        leftpad = tl.where(count > 0, start % page, 0)
        tl.store(leftpads + piece, leftpad)
        count += leftpad
    tl.store(counts + piece, count)
    if is_second is not None:
        i = tl.arange(0, BLOCK_Q)
        is_behind = seqlen - seqlen_q + i >= (first + 1) * chunk
        queries = tl.where(piece < batch, seqlen_q, 0)  # once for each sequence
        tl.store(is_second + b * seqlen_q + i, is_behind, mask=i < queries)
