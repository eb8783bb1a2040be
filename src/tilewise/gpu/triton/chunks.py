"""Where attention in chunks of positions cuts its sequences: packed ones, or few queries of a cache.

The arithmetic is that of `tilewise.integrations.chunks`, which says why; there it takes dozens of operations,
here one launch. A cut is made for each call, so that a CUDA graph replays with other lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.gpu.launch.entry import entry
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run
from tilewise.gpu.triton.call import has_pdl

BLOCK = 512  # pages that a program writes at a time
BLOCK_B = 128  # sequences that a program looks at at a time


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
    run(_few_launch, cut, given, fresh=made)
    return made


def packed_starts(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, chunk: int, most: int) -> tuple[Tensor, Tensor]:
    """The offsets (most + 1,) of the pieces of packed sequences; those left over are empty, at the end."""
    starts = torch.empty(2, most + 1, dtype=torch.int32, device=cu_seqlens_q.device).unbind()
    tensors = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    run(_packed_launch, (chunk, most), tensors, fresh=starts)
    return starts  # type: ignore[return-value]


def _packed_launch(cut: tuple[int, int], tensors: Tensors) -> Launch:
    (chunk, most), cu_seqlens_q = cut, tensors[0]
    assert cu_seqlens_q is not None
    is_early = has_pdl(cu_seqlens_q.device)
    arguments = (*tensors, len(cu_seqlens_q) - 1, chunk, BLOCK_B, is_early)
    return Launch(packed_starts_kernel, most + 1, arguments, 4, launch_pdl=is_early)


def _few_launch(cut: Cut, tensors: Tensors) -> Launch:
    seqlens_k, _, page_table, rows, *_ = tensors
    assert seqlens_k is not None and rows is not None
    is_early = has_pdl(seqlens_k.device)
    columns = 1 if page_table is None else page_table.shape[1]
    numbers = (len(seqlens_k), columns * cut.parts, *cut[:5])
    block_q = triton.next_power_of_2(cut.seqlen_q)
    arguments = (*tensors, *numbers, BLOCK, block_q, is_early)
    return Launch(few_queries_kernel, len(rows), arguments, 4, launch_pdl=is_early)


@entry(triton.jit)
def few_queries_kernel(
    seqlens_k, leftpad_k, page_table, rows, counts, leftpads, is_second,
    batch: int, columns: int, seqlen_q: int, chunk: int, page: int, parts: int, width: int,
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


@triton.jit
def bounds(cu_seqlens_q, cu_seqlens_k, b, batch, chunk):
    """(first query row, seqlen_q, first key row, seqlen_k, first chunk, end of the chunks) of sequences b.

    Its chunks hold every query and every key. All is 0 where there is no such sequence.
    """
    exists = b < batch
    start_q = tl.load(cu_seqlens_q + b, mask=exists, other=0).to(tl.int32)
    start_k = tl.load(cu_seqlens_k + b, mask=exists, other=0).to(tl.int32)
    seqlen_q = tl.load(cu_seqlens_q + b + 1, mask=exists, other=0).to(tl.int32) - start_q
    seqlen_k = tl.load(cu_seqlens_k + b + 1, mask=exists, other=0).to(tl.int32) - start_k
    queries_before = tl.maximum(seqlen_q - seqlen_k, 0)  # position 0
    first = 0 - (queries_before + chunk - 1) // chunk
    return start_q, seqlen_q, start_k, seqlen_k, first, (seqlen_k + chunk - 1) // chunk


@entry(triton.jit)
def packed_starts_kernel(
    cu_seqlens_q, cu_seqlens_k, starts_q, starts_k, batch: int, chunk: int,
    BLOCK_B: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (pieces + 1,). A piece's sequence is the number of those whose pieces all come before it."""
    piece = tl.program_id(0)
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # until offsets that the kernel before wrote can be read
    sequence = piece * 0
    before = piece * 0  # pieces of the sequences before
    total = piece * 0
    for b0 in range(0, batch, BLOCK_B):
        b = b0 + tl.arange(0, BLOCK_B)
        _, _, _, _, first, end = bounds(cu_seqlens_q, cu_seqlens_k, b, batch, chunk)
        ends = total + tl.cumsum(end - first, 0)
        is_before = (ends <= piece) & (b < batch)
        sequence += tl.sum(is_before.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), 0))
        total += tl.sum(end - first, 0)
    b = tl.minimum(sequence, batch - 1)
    start_q, seqlen_q, start_k, seqlen_k, first, end = bounds(cu_seqlens_q, cu_seqlens_k, b, batch, chunk)
    position = tl.where(sequence < batch, first + piece - before, end) * chunk
    row_q = tl.minimum(tl.maximum(position - seqlen_k + seqlen_q, 0), seqlen_q)
    row_k = tl.minimum(tl.maximum(position, 0), seqlen_k)
    tl.store(starts_q + piece, start_q + row_q)
    tl.store(starts_k + piece, start_k + row_k)
