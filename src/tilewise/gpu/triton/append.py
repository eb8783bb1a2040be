"""New tokens into a cache, rotated by their positions on the way, in one launch for query, key and value.

A program handles one token and BLOCK_H heads of one of the three tensors. Pair (a, b) of a head becomes
(a cos - b sin, a sin + b cos): each coordinate is x cos + partner sin, with a minus for the first of a pair.
The launch also counts the tokens, which would take another one as long; where each sequence has one, that is
easy if a program handles all of it. On Hopper and newer it starts early,
as `hopper.decode` does, and so does the attention behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewise.core.device_errors import LENGTH, PAGE, error_flags
from tilewise.gpu.launch.entry import by_field, entry
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run
from tilewise.gpu.triton.call import has_pdl

BLOCK_H = tl.constexpr(16)
PAGE_FLAG, LENGTH_FLAG = tl.constexpr(PAGE), tl.constexpr(LENGTH)
WHOLE_TOKEN = 1024  # columns, of all blocks of heads together, that one program may hold


class Tokens(NamedTuple):
    """Where new tokens go: slots and positions, or what each sequence holds, in its entry or by its pages."""

    slots: Tensor | None  # (tokens,) rows of the storage, -1 for none. Without lengths, None: in their order
    positions: Tensor | None  # (tokens,)
    lengths: Tensor | None  # (batch,) before these tokens
    page_table: Tensor | None = None  # (batch, pages)
    new_lengths: Tensor | None = None  # (batch,) written: lengths with these tokens; may be `lengths` itself
    arrivals: Tensor | None = None  # (batch,) int32 zeros, zeros again afterwards; only if it is


def append(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    key_storage: Tensor,
    value_storage: Tensor | None,
    tokens: Tokens,
    rotary: tuple[Tensor, Tensor, bool] | None,
) -> Tensor:
    """Write key and value, and return query rotated like key (query itself without rotary).

    Args:
        query, key, value: (batch, new_tokens, heads, dim) or (tokens, heads, dim), last dimension contiguous.
        key_storage, value_storage: (entries, rows, heads, dim), contiguous: pages, or a sequence each.
        rotary: (cos, sin, interleaved), tables (positions, rotary_dim / 2) of any strides.
    """
    rotated = query.new_empty(query.shape) if rotary else None
    cos, sin, is_interleaved = rotary or (None, None, False)
    *token_tensors, cos, sin = (None if t is None else t.contiguous() for t in (*tokens, cos, sin))
    tokens = Tokens(*token_tensors)
    tensors = (key, value, query if rotary else None, rotated, key_storage, value_storage, *tokens, cos, sin)
    run(_launch, is_interleaved, tensors)
    return query if rotated is None else rotated


def _launch(is_interleaved: bool, tensors: Tensors) -> Launch:
    key, value, query, rotated, key_storage, value_storage, *token_tensors, cos, sin = tensors
    tokens = Tokens(*token_tensors)
    table = tokens.page_table
    assert key is not None and key_storage is not None
    new_tokens = key.shape[1] if key.ndim == 4 else 1
    blocks = [0 if t is None else triton.cdiv(t.shape[-2], BLOCK_H.value) for t in (query, key, value)]
    columns = max(16, *(triton.next_power_of_2(t.shape[-1]) for t in (key, query, value) if t is not None))
    counts = tokens.arrivals is not None
    is_whole = counts and new_tokens == 1 and sum(blocks) * columns <= WHOLE_TOKEN
    entries, rows = key_storage.shape[:2]
    table_rows, pages = 0 if cos is None else len(cos), 0 if table is None else table.shape[1]
    read = (tokens.slots, tokens.positions, tokens.lengths, table, error_flags(key.device), cos, sin)
    where = Where(*read, new_tokens, entries, rows, table_rows, pages)
    arguments = (
        *(_heads(t) for t in (query, key, value, rotated)),
        *(_flat(t) for t in (key_storage, value_storage)),
        *(where, tokens.new_lengths, tokens.arrivals),
        *blocks,
        columns,
        0 if cos is None else 2 * cos.shape[1],
        is_interleaved,
        is_early := has_pdl(key.device),
        is_whole,
    )
    programs = key.shape[:-2].numel() * (1 if is_whole else sum(blocks))
    return Launch(append_kernel, programs, arguments, 4, 1, launch_pdl=is_early)


class Heads(NamedTuple):
    """Heads of one tensor: batch, token and head strides in elements; the last dimension is contiguous."""

    ptr: Tensor
    stride_batch: int
    stride_token: int
    stride_head: int
    heads: int
    dim: int


def _heads(t: Tensor | None) -> Heads | None:
    if t is None:
        return None
    strides = t.stride() if t.ndim == 4 else (t.stride(0), 0, *t.stride()[1:])
    return Heads(t, *strides[:3], *t.shape[-2:])


def _flat(t: Tensor | None) -> Heads | None:
    """The storage's rows, numbered through all its entries."""
    return None if t is None else Heads(t, t.stride(1), 0, t.stride(2), *t.shape[-2:])


@by_field
class Where(NamedTuple):
    """What tells a token's slot and position: `Tokens`, in a kernel; and the tables of its rotation."""

    slots: Any
    positions: Any
    lengths: Any
    page_table: Any
    errors: Any
    cos: Any
    sin: Any
    new_tokens: int
    entries: int  # of the storage
    rows: int  # of an entry
    table_rows: int
    pages: int


@entry(triton.jit)
def append_kernel(
    q, k, v, q_out, k_out, v_out, where: Where, new_lengths, arrivals,
    Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr, IS_EARLY: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens * BLOCKS,)."""
    BLOCKS: tl.constexpr = 1 if IS_WHOLE else Q_BLOCKS + K_BLOCKS + V_BLOCKS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    b = token // where.new_tokens
    n = token % where.new_tokens
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # until what the kernel before wrote can be read
    held = 0
    if where.lengths is not None and new_lengths is not None:
        held = tl.load(where.lengths + b)
    count = tl.where(held < 0, 0, where.new_tokens)  # a wrong length stays one
    if IS_WHOLE:
        move_token(
            q, k, v, q_out, k_out, v_out, where, b,
            Q_BLOCKS, K_BLOCKS, V_BLOCKS, BLOCK_D, ROTARY_DIM, IS_INTERLEAVED,
        )  # fmt: skip
    elif block < K_BLOCKS:
        move(k, k_out, where, b, n, block, True, BLOCK_D, ROTARY_DIM, IS_INTERLEAVED)
    elif block < K_BLOCKS + V_BLOCKS:
        if v is not None:
            move(v, v_out, where, b, n, block - K_BLOCKS, True, BLOCK_D, 0, IS_INTERLEAVED)
    else:
        if q is not None:
            block -= K_BLOCKS + V_BLOCKS
            move(q, q_out, where, b, n, block, False, BLOCK_D, ROTARY_DIM, IS_INTERLEAVED)
    if where.lengths is not None and new_lengths is not None:
        if arrivals is not None:
            tl.debug_barrier()  # all threads have read the length that is to change
            if IS_WHOLE:
                tl.store(new_lengths + b, held + count)
            elif tl.atomic_add(arrivals + b, 1) == where.new_tokens * BLOCKS - 1:
                tl.store(arrivals + b, 0)
                tl.store(new_lengths + b, held + count)
        else:
            if (n == 0) & (tl.program_id(0) % BLOCKS == 0):
                tl.store(new_lengths + b, held + count)


@triton.jit
def move(
    x, out, where, b, n, block,
    TO_STORAGE: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads of one token into the storage, or queries to their like.

    Nothing waits for the length before their loads have started.
    """
    tile = load_heads(x, b, n, block, BLOCK_D)
    slot, position = find(where, b, n)
    tile = rotate(tile, x, b, n, block, where, position, BLOCK_D, ROTARY_DIM, IS_INTERLEAVED)
    if TO_STORAGE:
        if slot >= 0:
            store_heads(out, slot, 0, block, tile, BLOCK_D)
    else:
        store_heads(out, b, n, block, tile, BLOCK_D)


@triton.jit
def move_token(
    q, k, v, q_out, k_out, v_out, where, b,
    Q_BLOCKS: tl.constexpr, K_BLOCKS: tl.constexpr, V_BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """All heads of a sequence's only new token: `move`, with all loads under way before the first store."""
    keys = load_blocks(k, b, K_BLOCKS, BLOCK_D)
    values = load_blocks(v, b, V_BLOCKS, BLOCK_D)
    queries = load_blocks(q, b, Q_BLOCKS, BLOCK_D)
    slot, position = find(where, b, 0)
    keys = turn_blocks(keys, k, b, where, position, K_BLOCKS, BLOCK_D, ROTARY_DIM, IS_INTERLEAVED)
    queries = turn_blocks(queries, q, b, where, position, Q_BLOCKS, BLOCK_D, ROTARY_DIM, IS_INTERLEAVED)
    if slot >= 0:
        for block in tl.static_range(K_BLOCKS):
            store_heads(k_out, slot, 0, block, keys[block], BLOCK_D)
        for block in tl.static_range(V_BLOCKS):
            store_heads(v_out, slot, 0, block, values[block], BLOCK_D)
    for block in tl.static_range(Q_BLOCKS):
        store_heads(q_out, b, 0, block, queries[block], BLOCK_D)


@triton.jit
def load_blocks(x, b, BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Heads of a sequence's only token, a tile for each block of them."""
    tiles = ()
    for block in tl.static_range(BLOCKS):
        tiles = tiles + (load_heads(x, b, 0, block, BLOCK_D),)  # type: ignore[assignment] # noqa: RUF005
    return tiles


@triton.jit
def turn_blocks(
    tiles, x, b, where, position,
    BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    rotated = ()
    for block in tl.static_range(BLOCKS):
        tile = rotate(tiles[block], x, b, 0, block, where, position, BLOCK_D, ROTARY_DIM, IS_INTERLEAVED)
        rotated = rotated + (tile,)  # type: ignore[assignment] # noqa: RUF005
    return rotated


@triton.jit
def find(where, b, n):
    """(row of the storage or -1, position in the rotary tables) of token n of sequence b.

    -1 for padding, and where a length or a page leads outside of the storage, which is reported.
    """
    if where.lengths is not None:
        held = tl.load(where.lengths + b).to(tl.int64)
        position = held + n
        fits = (held >= 0) & (position < where.rows)
        entry = b
        if where.page_table is not None:
            fits = (held >= 0) & (position < where.pages.to(tl.int64) * where.rows)
            at = tl.where(fits, position // where.rows, 0)
            entry = tl.load(where.page_table + b * where.pages + at, mask=fits, other=0).to(tl.int64)
        if not fits:
            tl.store(where.errors + LENGTH_FLAG, 1)
        is_entry = (entry >= 0) & (entry < where.entries)
        if not is_entry:
            tl.store(where.errors + PAGE_FLAG, 1)
        slot = tl.where(fits & is_entry, entry * where.rows + position % where.rows, -1)
    else:
        token = b * where.new_tokens + n
        position = tl.load(where.positions + token)
        slot = token.to(tl.int64)
        if where.slots is not None:
            slot = tl.load(where.slots + token).to(tl.int64)
        if (slot < -1) | (slot >= where.entries.to(tl.int64) * where.rows):
            tl.store(where.errors + PAGE_FLAG, 1)
            slot = slot * 0 - 1
    return slot, tl.minimum(tl.maximum(position, 0), where.table_rows - 1)  # padding has none


@triton.jit
def head_pointers(x, b, n, block):
    """(pointers to BLOCK_H heads, which of them exist)."""
    head = tl.arange(0, BLOCK_H).to(tl.int64) + block * BLOCK_H  # heads may lie a long sequence apart
    return x.ptr + b * x.stride_batch + n * x.stride_token + head * x.stride_head, head < x.heads


@triton.jit
def load_heads(x, b, n, block, BLOCK_D: tl.constexpr):
    """Heads [BLOCK_H, BLOCK_D] of one token."""
    ptrs, exists = head_pointers(x, b, n, block)
    column = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (column < x.dim)[None, :]
    return tl.load(ptrs[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def rotate(
    tile, x, b, n, block, where, position,
    BLOCK_D: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The heads that were loaded, their first ROTARY_DIM coordinates rotated."""
    if ROTARY_DIM > 0:
        ptrs, exists = head_pointers(x, b, n, block)
        column = tl.arange(0, BLOCK_D)
        HALF: tl.constexpr = ROTARY_DIM // 2
        if IS_INTERLEAVED:
            pair = column // 2
            partner = column ^ 1
            is_first = column % 2 == 0
        else:
            pair = column % HALF
            is_first = column < HALF
            partner = tl.where(is_first, column + HALF, column - HALF)
        is_rotated = column < ROTARY_DIM
        mask = exists[:, None] & ((column < x.dim) & is_rotated)[None, :]
        other = tl.load(ptrs[:, None] + partner[None, :], mask=mask, other=0.0)
        entry = position.to(tl.int64) * HALF + pair
        c = tl.load(where.cos + entry, mask=is_rotated, other=1.0).to(tl.float32)
        s = tl.load(where.sin + entry, mask=is_rotated, other=0.0).to(tl.float32)
        signed = tl.where(is_first, -s, s)
        rotated = tile.to(tl.float32) * c[None, :] + other.to(tl.float32) * signed[None, :]
        tile = rotated.to(tile.dtype)
    return tile


@triton.jit
def store_heads(x, b, n, block, tile, BLOCK_D: tl.constexpr):
    ptrs, exists = head_pointers(x, b, n, block)
    column = tl.arange(0, BLOCK_D)
    mask = exists[:, None] & (column < x.dim)[None, :]
    tl.store(ptrs[:, None] + column[None, :], tile, mask=mask)
