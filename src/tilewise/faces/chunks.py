"""FlashAttention-3's `attention_chunk`: a query sees the keys of its own chunk of positions only.

Position 0 is a sequence's first key behind its left padding. Query i has position i + seqlen_k - seqlen_q:
the last query stands with the last key, and one before position 0 sees nothing. In its chunk a query sees
what causal and window leave it. Source: FlashAttention-3, `hopper/mask.h`, `col_limit_left_chunk`.

No mask is made: attention in chunks is attention of more and shorter sequences, the pieces.

    keys     0 . . . | C . . . | 2C . . . | 3C . .
    queries          |     q q | q  q q q | q  q q     the last query of a piece stands with its last key

So causal and window are aligned at the end of each piece as at the end of the whole. Pieces of packed
sequences are more offsets into the same tensors, pieces of a cache more rows of its page table. All that is
arithmetic on the device: no length is read.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tilewise.autograd import functions as autograd
from tilewise.core.checks import shown
from tilewise.core.problem import Inputs, Options, describe
from tilewise.core.torch_private import compiles_here
from tilewise.core.values import check_values, vouch_for
from tilewise.gpu.launch.launch_plan import HAS_TRITON

LONGEST_CHUNK = 1 << 30  # longer than any sequence; offsets of 32 bits hold it
FEW_QUERIES = 16  # what decoding kernels take, which packed queries do not reach
SMALLEST_PAGE = 16  # worth cutting a contiguous cache into


def chunk_of(attention_chunk: Any) -> Any:
    """The positions in a chunk, 0 for no chunks.

    Raises:
        TypeError, ValueError: it is not an integer of at least 0.
    """
    if not isinstance(attention_chunk, int | Integral | torch.SymInt):
        raise TypeError(f"attention_chunk={shown(attention_chunk)} must be an integer")
    if attention_chunk < 0:
        raise ValueError(f"attention_chunk={attention_chunk} must be 0 (off) or the positions in a chunk")
    if isinstance(attention_chunk, torch.SymInt):
        return attention_chunk
    return min(int(attention_chunk), LONGEST_CHUNK)


def attention(inputs: Inputs, options: Options, chunk: int) -> tuple[Tensor, Tensor]:
    """`tilewise.autograd.attention` in chunks of `chunk` positions; 0 is without.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument does not fit.
    """
    if chunk == 0:
        return autograd.attention(inputs, options, None)
    if autograd.is_served():  # the keys at hand are not all, so chunks cannot be told from them
        raise NotImplementedError("attention_chunk is not served inside of context_parallel")
    if not compiles_here():
        check_values(describe(inputs, options), inputs, options)
    if inputs.query.numel() == 0 or _is_one_chunk(inputs, options, chunk):
        return autograd.attention(inputs, options, None)
    if inputs.seqlens_k is not None:
        return _cached(inputs, options, chunk)
    return _dense(inputs, options, chunk) if inputs.cu_seqlens_q is None else _packed(inputs, options, chunk)


def _is_one_chunk(inputs: Inputs, options: Options, chunk: int) -> bool:
    """Whether the first chunk holds all keys, and no query that would see them stands before it."""
    query, key, is_cached = inputs.query, inputs.key, inputs.seqlens_k is not None
    longest_k: int | None = key.shape[1] if inputs.cu_seqlens_k is None else options.max_seqlen_k
    if inputs.page_table is not None:
        longest_k = inputs.page_table.shape[1] * key.shape[1]
    if longest_k is None or longest_k > chunk:
        return False
    most_q = 1 if is_cached else longest_k  # so many have a key each, if there are keys
    return options.causal or longest_k == 0 or (inputs.cu_seqlens_q is None and query.shape[1] <= most_q)


def _pieces(first: Tensor, end: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The (sequence, chunk) of `most` pieces, of which sequence b has the chunks [first[b], end[b]).

    Those left over are behind the end of the last sequence.
    """
    total = (end - first).cumsum(0)
    piece = torch.arange(most, device=first.device)
    sequence = torch.searchsorted(total, piece, right=True).clamp(max=first.shape[0] - 1)
    return sequence, end[sequence] - total[sequence] + piece


def _starts(cu_seqlens: Tensor, sequence: Tensor, row: Tensor) -> Tensor:
    """The offsets of pieces, each from a row of its sequence on; rows before and behind it are its ends."""
    row = row.clamp(min=0).minimum(cu_seqlens.diff()[..., sequence])
    return torch.cat((cu_seqlens[..., sequence] + row, cu_seqlens[..., -1:]), -1)


def _can_launch(inputs: Inputs) -> bool:
    """Whether `tilewise.gpu.triton.chunks` can do in one launch what else are dozens of operations."""
    return inputs.query.is_cuda and not compiles_here() and HAS_TRITON


# Packed and dense


def _packed(inputs: Inputs, options: Options, chunk: int, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Every query and key is in one of at most `most` pieces, some of which have no queries or no keys."""
    cu_seqlens_q, cu_seqlens_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    total_q, total_k = inputs.query.shape[0], inputs.key.shape[0]
    longest_q = total_q if options.max_seqlen_q is None else options.max_seqlen_q
    longest_k = total_k if options.max_seqlen_k is None else options.max_seqlen_k
    if most is None:
        batch = cu_seqlens_q.shape[0] - 1
        most = batch * max(-(-longest_k // chunk), -(-longest_q // chunk) + 1)
        most = min(most, (total_q + total_k) // chunk + 2 * batch)
    if _can_launch(inputs):
        from tilewise.gpu.triton.chunks import packed_starts

        starts_q, starts_k = packed_starts(cu_seqlens_q, cu_seqlens_k, chunk, most)
    else:
        starts_q, starts_k = _packed_starts(cu_seqlens_q, cu_seqlens_k, chunk, most)
    if not compiles_here():
        vouch_for(starts_q)
    options = options._replace(max_seqlen_q=min(chunk, longest_q), max_seqlen_k=min(chunk, longest_k))
    return autograd.attention(inputs._replace(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k), options, None)


def _packed_starts(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, chunk: int, most: int
) -> tuple[Tensor, Tensor]:
    """The offsets of the pieces of queries and keys; those left over are empty, at the end."""
    cu_seqlens = torch.stack((cu_seqlens_q, cu_seqlens_k))
    seqlen_q, seqlen_k = cu_seqlens.diff()
    offset = seqlen_k - seqlen_q  # position of the first query
    sequence, number = _pieces(offset.clamp(max=0) // chunk, (seqlen_k + chunk - 1) // chunk, most)
    position = number * chunk
    rows = torch.stack((position - offset[sequence], position))
    starts_q, starts_k = _starts(cu_seqlens, sequence, rows)
    return starts_q, starts_k


def _dense(inputs: Inputs, options: Options, chunk: int) -> tuple[Tensor, Tensor]:
    """As packed sequences: views where the strides of batch and sequence fold, else copies."""
    (batch, seqlen_q), seqlen_k = inputs.query.shape[:2], inputs.key.shape[1]
    number = torch.arange(batch + 1, device=inputs.query.device)
    packed = inputs._replace(
        query=inputs.query.flatten(0, 1),
        key=inputs.key.flatten(0, 1),
        value=inputs.value.flatten(0, 1),
        cu_seqlens_q=number * seqlen_q,
        cu_seqlens_k=number * seqlen_k,
    )
    options = options._replace(max_seqlen_q=seqlen_q, max_seqlen_k=seqlen_k)
    most = batch * (-(-seqlen_k // chunk) - min(0, seqlen_k - seqlen_q) // chunk)
    return _unpack(_packed(packed, options, chunk, most), batch)


def _unpack(packed: tuple[Tensor, Tensor], batch: int) -> tuple[Tensor, Tensor]:
    out, lse = packed
    return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


# Caches


def _cached(inputs: Inputs, options: Options, chunk: int) -> tuple[Tensor, Tensor]:
    inputs, parts = _in_pages(inputs, chunk)
    is_dense = inputs.cu_seqlens_q is None
    seqlen_q = inputs.query.shape[1]
    if is_dense and (seqlen_q == 1 or (options.causal and seqlen_q <= min(FEW_QUERIES, chunk))):
        return _few_queries(inputs, options, chunk, parts)
    inputs = _with_table(inputs, parts)
    if not is_dense:
        return _many_queries(inputs, options, chunk)
    batch = inputs.query.shape[0]
    packed = inputs._replace(
        query=inputs.query.flatten(0, 1),
        cu_seqlens_q=torch.arange(batch + 1, device=inputs.query.device) * seqlen_q,
    )
    return _unpack(_many_queries(packed, options._replace(max_seqlen_q=seqlen_q), chunk), batch)


def _in_pages(inputs: Inputs, chunk: int) -> tuple[Inputs, int]:
    """Keys and values in pages that divide the chunk, if those that there are can be cut into such; and into
    how many parts each was cut. The page table is still that of the whole ones."""
    page = inputs.key.shape[1]
    if compiles_here():  # sizes may be symbols, which have no common divisor
        return inputs, 1
    common = math.gcd(page, chunk)
    small = common & -common  # a power of two, which decoding kernels take
    folds = all(len(t) == 1 or t.stride(0) == page * t.stride(1) for t in inputs[1:3])
    if not (SMALLEST_PAGE <= small < page and folds):
        return inputs, 1
    parts = page // small
    return inputs._replace(
        key=inputs.key.unflatten(1, (parts, small)).flatten(0, 1),
        value=inputs.value.unflatten(1, (parts, small)).flatten(0, 1),
        key_scale=None if inputs.key_scale is None else inputs.key_scale.repeat_interleave(parts, 0),
        value_scale=None if inputs.value_scale is None else inputs.value_scale.repeat_interleave(parts, 0),
    ), parts


def _with_table(inputs: Inputs, parts: int) -> Inputs:
    table = inputs.page_table
    if table is None:
        table = torch.arange(len(inputs.key) // parts, dtype=torch.int32, device=inputs.key.device)[:, None]
    if parts > 1:
        part = torch.arange(parts, dtype=table.dtype, device=table.device)
        table = (table[:, :, None] * parts + part).flatten(1)
    return inputs._replace(page_table=table)


def _seqlens(inputs: Inputs) -> Tensor:
    """Each sequence's keys, without its left padding."""
    assert inputs.seqlens_k is not None
    return inputs.seqlens_k if inputs.leftpad_k is None else inputs.seqlens_k - inputs.leftpad_k


def _begin_with_pages(inputs: Inputs, chunk: int) -> bool:
    return inputs.leftpad_k is None and chunk % inputs.key.shape[1] == 0


def _width(inputs: Inputs, chunk: int, longest: int, columns: int) -> int:
    """Pages that hold `longest` keys from the beginning of a chunk on, of a table of so many columns."""
    return min(columns, -(-longest // inputs.key.shape[1]) + (0 if _begin_with_pages(inputs, chunk) else 1))


def _see(inputs: Inputs, sequence: Tensor, number: Tensor, end: Tensor, chunk: int, longest: int) -> Inputs:
    """A row of the page table for each piece, which sees its sequence from chunk `number` up to `end`."""
    table, page = inputs.page_table, inputs.key.shape[1]
    assert table is not None
    position = number.clamp(min=0) * chunk
    count = (end - position).clamp(min=0)
    start = position if inputs.leftpad_k is None else position + inputs.leftpad_k[sequence]
    width = _width(inputs, chunk, longest, table.shape[1])
    column = start[:, None] // page + torch.arange(width, device=table.device)
    leftpad = None
    if not _begin_with_pages(inputs, chunk):
        leftpad = torch.where(count > 0, start % page, 0)  # a row's unused pages may be none
        count = leftpad + count
    page_table = table[sequence[:, None], column.clamp(max=table.shape[1] - 1)]
    return inputs._replace(page_table=page_table, leftpad_k=leftpad, seqlens_k=count)


def _few_queries(inputs: Inputs, options: Options, chunk: int, parts: int) -> tuple[Tensor, Tensor]:
    """Queries of one chunk or of two, by the kernels for decoding.

    All see the keys from the first chunk on: right for those of the first, which are causal. For those of the
    second there is a piece without the first chunk; it is empty where no query needs it.
    """
    batch = inputs.query.shape[0]
    if _can_launch(inputs):
        pieces, is_second = _few_pieces_at_once(inputs, chunk, parts)
    else:
        pieces, is_second = _few_pieces(_with_table(inputs, parts), chunk)
    if is_second is None:
        return autograd.attention(pieces, options, None)
    out, lse = autograd.attention(pieces._replace(query=inputs.query.repeat(2, 1, 1, 1)), options, None)
    is_second = is_second[..., None]  # (batch, seqlen_q, 1)
    out = torch.where(is_second[..., None], out[batch:], out[:batch])
    return out, torch.where(is_second.mT, lse[batch:], lse[:batch])


def _few_pieces(inputs: Inputs, chunk: int) -> tuple[Inputs, Tensor | None]:
    """A piece of each sequence from its first query's chunk on. For several queries one more, from the last
    query's chunk on, and which queries are of it, (batch, seqlen_q)."""
    batch, seqlen_q = inputs.query.shape[:2]
    sequence, seqlen_k = torch.arange(batch, device=inputs.query.device), _seqlens(inputs)
    first = (seqlen_k - seqlen_q).clamp(min=0) // chunk
    if seqlen_q == 1:
        return _see(inputs, sequence, first, seqlen_k, chunk, chunk), None
    last = (seqlen_k - 1).clamp(min=0) // chunk
    end = torch.cat((seqlen_k, torch.where(last > first, seqlen_k, 0)))
    pieces = _see(inputs, sequence.repeat(2), torch.cat((first, last)), end, chunk, chunk + seqlen_q - 1)
    position = (seqlen_k - seqlen_q)[:, None] + torch.arange(seqlen_q, device=inputs.query.device)
    return pieces, position >= ((first + 1) * chunk)[:, None]


def _few_pieces_at_once(inputs: Inputs, chunk: int, parts: int) -> tuple[Inputs, Tensor | None]:
    """`_few_pieces` in one launch, from the page table of whole pages."""
    from tilewise.gpu.triton.chunks import Cut, few_queries

    assert inputs.seqlens_k is not None
    seqlen_q, page = inputs.query.shape[1], inputs.key.shape[1]
    columns = parts * (1 if inputs.page_table is None else inputs.page_table.shape[1])
    width = _width(inputs, chunk, chunk + seqlen_q - 1, columns)
    cut = Cut(seqlen_q, chunk, page, parts, width, not _begin_with_pages(inputs, chunk))
    made = few_queries(inputs.seqlens_k, inputs.leftpad_k, inputs.page_table, cut)
    pieces = inputs._replace(page_table=made.page_table, leftpad_k=made.leftpad_k, seqlens_k=made.seqlens_k)
    return pieces, made.is_second


def _many_queries(inputs: Inputs, options: Options, chunk: int) -> tuple[Tensor, Tensor]:
    """A piece for each chunk that packed queries of a sequence stand in."""
    cu_seqlens_q, seqlen_k, total = inputs.cu_seqlens_q, _seqlens(inputs), len(inputs.query)
    assert cu_seqlens_q is not None
    longest = total if options.max_seqlen_q is None else options.max_seqlen_q
    batch = len(cu_seqlens_q) - 1
    most = min(batch * ((longest - 2) // chunk + 2), total // chunk + 2 * batch)
    offset = seqlen_k - cu_seqlens_q.diff()  # position of the first query
    sequence, number = _pieces(offset // chunk, (seqlen_k + chunk - 1) // chunk, most)
    starts = _starts(cu_seqlens_q, sequence, number * chunk - offset[sequence])
    end = seqlen_k[sequence].minimum((number + 1) * chunk)
    pieces = _see(inputs, sequence, number, end, chunk, longest=chunk)._replace(cu_seqlens_q=starts)
    return autograd.attention(pieces, options._replace(max_seqlen_q=min(chunk, longest)), None)
