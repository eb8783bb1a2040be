"""Triton kernels that read a boolean mask, or ask a function, and write its tile map: see `tile_map`."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.gpu.hopper.common.arguments import FLAG_BITS, WARPGROUP_ROWS, Place
from tilewise.gpu.launch.entry import entry

ROWS = tl.constexpr(WARPGROUP_ROWS)
SHIFT = tl.constexpr(FLAG_BITS)
FLAGS = tl.constexpr((1 << FLAG_BITS) - 1)


@entry(triton.jit)
def scan_mask_kernel(
    mask, states, bits, stride_b: int, stride_h: int, stride_row, stride_key,
    heads: int, row_tiles: int, rows: int, keys: int, key_tiles: int,
    WARPGROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """bits and state of one tile of WARPGROUPS * 64 rows and BLOCK_N keys.

    mask is uint8. Rows past the end see every key, so that they hold no tile back. A state is the flags of an
    entry of the map, and above them whether some row sees some key.
    """
    number = tl.program_id(0)
    tile_k, map_row = number % key_tiles, number // key_tiles
    tile_q, bh = map_row % row_tiles, map_row // row_tiles
    row = tile_q * (WARPGROUPS * ROWS) + tl.arange(0, WARPGROUPS * ROWS)
    key = tile_k * BLOCK_N + tl.arange(0, BLOCK_N)
    first = mask + (bh // heads).to(tl.int64) * stride_b + (bh % heads).to(tl.int64) * stride_h
    offsets = row.to(tl.int64)[:, None] * stride_row + key.to(tl.int64)[None, :] * stride_key
    exists = (row < rows)[:, None] & (key < keys)[None, :]
    seen = (tl.load(first + offsets, mask=exists, other=1) != 0).to(tl.int32)
    eights = tl.reshape(seen, [WARPGROUPS * ROWS, BLOCK_N // 8, 4, 2])
    bit = 2 * tl.arange(0, BLOCK_N // 8)[:, None, None] + tl.arange(0, 2)[None, None, :]
    words = tl.sum(tl.sum(eights << bit[None, :, :, :], 3), 1)  # [rows, 4]
    store_tile(words, row < rows, keys - tile_k * BLOCK_N, number, states, bits, WARPGROUPS, BLOCK_N)


@entry(triton.jit)
def scan_function_kernel(
    captured, states, bits, seqlen_q: int, seqlen_k: int, heads: int, row_tiles: int, rows: int, columns: int,
    column_tiles: int,
    WARPGROUPS: tl.constexpr, BLOCK_N: tl.constexpr, IS_TRANSPOSED: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """`scan_mask_kernel` of a mask function, MASK, with queries as rows or, transposed, keys.

    Each thread builds whole words, so no reduction over columns is needed.
    """
    number = tl.program_id(0)
    tile, map_row = number % column_tiles, number // column_tiles
    tile_r, bh = map_row % row_tiles, map_row // row_tiles
    row = (tile_r * (WARPGROUPS * ROWS) + tl.arange(0, WARPGROUPS * ROWS))[:, None]
    seq = Place(bh // heads, bh % heads, seqlen_q, seqlen_k)
    words = tl.zeros([WARPGROUPS * ROWS, 4], tl.int32)
    for bit in range(BLOCK_N // 4):
        column = (tile * BLOCK_N + bit // 2 * 8 + bit % 2 + 2 * tl.arange(0, 4))[None, :]
        if IS_TRANSPOSED:
            visible, _ = MASK(column, row, seq, captured)
        else:
            visible, _ = MASK(row, column, seq, captured)
        seen = tl.where((row < rows) & (column < columns), (visible != 0).to(tl.int32), 1)
        words |= seen << bit
    row_exists = tl.reshape(row < rows, [WARPGROUPS * ROWS])
    store_tile(words, row_exists, columns - tile * BLOCK_N, number, states, bits, WARPGROUPS, BLOCK_N)


@triton.jit
def store_tile(
    words, row_exists, keys, number, states, bits, WARPGROUPS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The bits and the state of the tile of that number, of whose keys the first `keys` exist.

    words: [rows, 4], bits of visible keys, and of rows and keys past the end.
    """
    thread = tl.arange(0, 4)[None, :]
    place = tl.arange(0, WARPGROUPS * ROWS)[:, None] * 4 + thread
    tl.store(bits + number.to(tl.int64) * (WARPGROUPS * ROWS * 4) + place, words.to(bits.dtype.element_ty))

    bit = tl.arange(0, BLOCK_N // 4)[:, None]
    key_exists = bit // 2 * 8 + bit % 2 + 2 * thread < keys
    real = tl.sum(key_exists.to(tl.int32) << bit, 0)[None, :]  # [1, 4], the bits of keys
    # [1, 4], all bits that a word has
    full = tl.sum(tl.full([BLOCK_N // 4, 4], 1, tl.int32) << bit, 0)[None, :]
    sees_all = tl.reshape(tl.min((words == full).to(tl.int32), 1), [WARPGROUPS, ROWS])
    seen = tl.max((words & real != 0).to(tl.int32), 1)
    sees_some = tl.reshape(seen, [WARPGROUPS, ROWS])
    w = tl.arange(0, WARPGROUPS)
    flags = tl.sum((1 - tl.min(sees_all, 1)) << w, 0) + tl.sum(tl.min(sees_some, 1) << (WARPGROUPS + w), 0)
    is_visited = tl.max(seen * row_exists.to(tl.int32), 0)
    tl.store(states + number, flags + (is_visited << SHIFT))


@entry(triton.jit)
def list_tiles_kernel(states, tiles, key_tiles: int, BLOCK: tl.constexpr):
    """One row of the map: how many tiles are visited before each, and the entries of those that are."""
    map_row = tl.program_id(0).to(tl.int64)
    before = tiles + map_row * (2 * key_tiles + 1)
    entries = before + key_tiles + 1
    count = 0
    for start in range(0, key_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        state = tl.load(states + map_row * key_tiles + tile, mask=tile < key_tiles, other=0)
        is_visited = state >> SHIFT
        number = count + tl.cumsum(is_visited, 0) - is_visited
        tl.store(before + tile, number, mask=tile < key_tiles)
        flags = state & FLAGS
        tl.store(entries + number, (tile << SHIFT) + flags, mask=is_visited > 0)
        count += tl.sum(is_visited, 0)
    tl.store(before + key_tiles, count)


@entry(triton.jit)
def list_queries_kernel(
    states, lists, stride_b: int, stride_h: int, stride_tile: int, heads: int, group: int, key_tiles: int,
    tiles_q: int, BLOCK_M: tl.constexpr, offset: int, window_left: int, window_right: int,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The query tiles of all heads of a group that a tile of keys visits, by mask, window and causal mask.

    states: of the transposed mask. A list is its length, then entries: head_of_group * tiles_q + tile above
    the flags.
    """
    row = tl.program_id(0)
    tile_k, bh = row % key_tiles, row // key_tiles
    first = lists + row.to(tl.int64) * (1 + group * tiles_q)
    first_key = tile_k * (2 * ROWS)
    last_key = first_key + (2 * ROWS - 1)
    count = 0
    for g in range(group):
        map_row = bh // heads * stride_b + (bh % heads * group + g) * stride_h + tile_k * stride_tile
        own = states + map_row.to(tl.int64) * tiles_q
        for start in range(0, tiles_q, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            state = tl.load(own + tile, mask=tile < tiles_q, other=0)
            position = tile * BLOCK_M + offset  # of the first query among the keys
            is_inside = first_key <= position + (BLOCK_M - 1) + window_right
            is_inside = is_inside & (last_key >= position - window_left)
            is_visited = tl.where(is_inside, state >> SHIFT, 0)
            number = count + tl.cumsum(is_visited, 0) - is_visited
            entry = ((g * tiles_q + tile) << SHIFT) + (state & FLAGS)
            tl.store(first + 1 + number, entry, mask=is_visited > 0)
            count += tl.sum(is_visited, 0)
    tl.store(first, count)
