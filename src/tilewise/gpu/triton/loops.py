"""Which tiles a program visits: by lengths, causal and window, or by the lists that functions leave.

Full tiles come first, those at an edge in a second loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def key_regions(i0, i1, seq, sizes, BLOCK_N: tl.constexpr):
    """Key tiles for queries [i0, i1): edge [lo, full_lo), full [full_lo, full_hi), edge [full_hi, hi).

    Full: every key of the tile is visible to every query. Tiles outside [lo, hi) are invisible.
    """
    return regions(i0, i1, seq.seqlen_k, seq.offset, sizes.window_left, sizes.window_right, BLOCK_N)


@triton.jit
def query_regions(j0, j1, seq, sizes, BLOCK_M: tl.constexpr):
    """Query tiles that see keys [j0, j1), in the same three regions as `key_regions`."""
    return regions(j0, j1, seq.seqlen_q, -seq.offset, sizes.window_right, sizes.window_left, BLOCK_M)


@triton.jit
def regions(first, end, length, offset, before, after, BLOCK: tl.constexpr):
    """The three regions among `length` rows: row r of [first, end) sees from r + offset - before on, to
    r + offset + after."""
    lo = first * 0
    full_lo = first * 0
    hi = length
    full_hi = length
    if before is not None:
        lo = tl.maximum(first + offset - before, 0) // BLOCK * BLOCK
        full_lo = tl.cdiv(tl.maximum(end - 1 + offset - before, 0), BLOCK) * BLOCK
    if after is not None:
        hi = tl.minimum(hi, end + offset + after)
        full_hi = tl.minimum(full_hi, first + offset + after + 1)
    full_hi = tl.maximum(tl.maximum(full_hi, 0) // BLOCK * BLOCK, lo)
    return lo, tl.minimum(full_lo, full_hi), full_hi, hi


class Loops(NamedTuple):
    """The ranges of a program's two loops, over full tiles and over those at an edge.

    `tile_start` says which tile is at a number n. The second loop counts as if the full tiles were not there.
    With `Visits` both count in the list of tiles.
    """

    starts: tuple[Any, Any]
    ends: tuple[Any, Any]
    list_start: Any  # in `visits.order`


@triton.jit
def tile_loops(
    regions, is_whole, tile, tiles, length, seq, sizes, extras, BLOCK: tl.constexpr, cfg: tl.constexpr
):
    """`Loops` of the program's own tile, one of `tiles`, over `length` rows in steps of BLOCK.

    There are no full tiles if some row or column of the program's own tile does not exist (is_whole): what is
    read of a mask or a bias in a full tile is not checked to lie inside of it. A mask function, of which no
    `Visits` are known, may hide keys in any tile.
    """
    lo, full_lo, full_hi, hi = regions
    if extras.visits is not None:
        visits = extras.visits
        heads = 1 + visits.per_head * (sizes.num_heads - 1)
        lists = tl.cdiv(tiles, visits.factor)  # of a head
        at = (seq.b * visits.per_batch * heads + seq.h * visits.per_head) * lists + tile // visits.factor
        at = at.to(tl.int64)
        full = tl.load(visits.counts + 2 * at) * visits.factor * BLOCK
        end = tl.load(visits.counts + 2 * at + 1) * visits.factor * BLOCK
        return Loops((full * 0, full), (full, end), at * tl.cdiv(tl.cdiv(length, BLOCK), visits.factor))
    else:
        if cfg.MASK is not None:
            full_hi = full_lo
        if extras.mask is not None or extras.bias is not None:
            full_hi = tl.where(is_whole, full_hi, full_lo)
        return Loops((full_lo, lo), (full_hi, hi - (full_hi - full_lo)), lo)


@triton.jit
def tile_start(n, loops, visits, BLOCK: tl.constexpr, IS_EDGE: tl.constexpr):
    """The first row of the tile at n in the loop over full tiles or, IS_EDGE, in the second one."""
    if visits is not None:
        n = n // BLOCK
        run = tl.load(visits.order + loops.list_start + n // visits.factor)
        n = (run * visits.factor + n % visits.factor) * BLOCK
    elif IS_EDGE:
        n = tl.where(n < loops.starts[0], n, n + (loops.ends[0] - loops.starts[0]))
    return n
