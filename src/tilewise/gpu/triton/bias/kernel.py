"""The gradient of a broadcast bias: ds of `backward`, summed over whatever one entry of the bias serves.

dbias += p * (dp - delta)      attn_bwd_dbias_kernel: a tile of the bias, or a diagonal of such tiles

A bias that nothing shares has its ds written by the kernel of dq.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.gpu.launch.entry import entry
from tilewise.gpu.triton.arguments import BiasSizes, Extras, Sequence, Sizes, Source
from tilewise.gpu.triton.loops import key_regions
from tilewise.gpu.triton.primitives import (
    before_function,
    exponentials,
    keep_entries,
    keep_tile,
    load_scores,
    load_stat,
    logits,
    padded_stat_start,
    score_ptrs,
    store_scores,
    visible_pairs,
    wait_for_kernel_before,
)
from tilewise.gpu.triton.tiles import dot_rows, load_source, sequence_rows


@entry(triton.jit)
def attn_bwd_dbias_kernel(
    q: Source, k: Source, v: Source, do: Source, shift_ptr, low_ptr, delta_ptr, dbias,
    ragged, extras: Extras, factors, sizes: Sizes, shares: BiasSizes,
    ROWS_BROADCAST: tl.constexpr, COLS_BROADCAST: tl.constexpr, OF_DISTANCES: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """One tile of one split of dbias (splits * bias_batch, ...), summed over a share of what the tile serves.

    Grid: (splits * bias_batch * bias_heads * tiles_m * tiles_n,). No N x N memory: where bias is broadcast,
    its gradient is summed in registers.

    OF_DISTANCES: the tiles that lie as far off the main diagonal are one; dbias (splits * bias_batch,
    bias_heads, tiles_m, BLOCK_M + BLOCK_N) has its distances, the first that of its lower left corner.
    """
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    pid = tl.program_id(0)
    tile_n = pid % shares.tiles_n
    tile_m = pid // shares.tiles_n % shares.tiles_m
    head = pid // (shares.tiles_n * shares.tiles_m)
    bias_h = head % shares.bias_heads
    bias_b = head // shares.bias_heads % shares.bias_batch
    split = head // (shares.bias_heads * shares.bias_batch)
    iterations = shares.loop_batch * shares.loop_heads * shares.loop_rows * shares.loop_cols

    IS_PACKED: tl.constexpr = ragged.cu_seqlens_q is not None
    IS_CACHED: tl.constexpr = ragged.seqlens_k is not None
    # What a tile sees is the same in every iteration: they need no branch, so that their loads overlap.
    IS_UNIFORM: tl.constexpr = not (
        ROWS_BROADCAST or COLS_BROADCAST or IS_PACKED or IS_CACHED or cfg.MASK is not None
    )
    i0, col0 = tile_m * BLOCK_M, tile_n * BLOCK_N
    if OF_DISTANCES:  # the first diagonal has the last tile of queries and the first one of keys
        i0 = (tl.cdiv(shares.bias_rows, BLOCK_M) - 1 - tile_m) * BLOCK_M
    i = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    c = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first = split * shares.per_split
    last = tl.minimum(first + shares.per_split, iterations)
    if IS_UNIFORM:
        count = 1  # tiles of a sequence and head
        if OF_DISTANCES:
            above = tl.cdiv(tl.maximum(-i0, 0), BLOCK_N)  # tiles of keys that have no query here
            i0, col0 = i0 + above * BLOCK_N, above * BLOCK_N
            count = tl.minimum(tl.cdiv(sizes.seqlen_q - i0, BLOCK_N), shares.loop_cols - above)
        q_start, k_start, _j0, seq, is_seen = dbias_tile_rows(i0, col0, bias_b, bias_h, ragged, sizes, cfg)
        last = tl.minimum(last, tl.where(is_seen, count * shares.loop_batch * shares.loop_heads, 0))
        rows, columns = i0 + tl.arange(0, BLOCK_M)[:, None], col0 + tl.arange(0, BLOCK_N)[None, :]
        if i0 + BLOCK_M <= shares.bias_rows and col0 + BLOCK_N <= shares.bias_cols:
            bias_tile = load_scores(extras.bias, rows, columns, seq, False)
        else:
            bias_tile = load_scores(extras.bias, rows, columns, seq, True)
        for n in range(first, last):
            ahead, rest = n % count * BLOCK_N, n // count
            b, h = bias_b + rest // shares.loop_heads, bias_h + rest % shares.loop_heads
            acc += dbias_step(
                q, k, v, do, shift_ptr, low_ptr, delta_ptr, bias_tile, i0 + ahead, col0 + ahead,
                q_start, k_start, Sequence(b, h, sizes.seqlen_q, sizes.seqlen_k, seq.offset, seq.first_col),
                ragged, extras, sizes, factors, cfg, OF_DISTANCES,
            )  # fmt: skip
        if not OF_DISTANCES:
            acc = tl.where(visible_pairs(i, c, seq, sizes), acc, 0.0)
    else:
        for n in range(first, last):
            col = tile_n + n % shares.loop_cols  # either the tile is 0 or the loop has one iteration
            row = n // shares.loop_cols % shares.loop_rows * BLOCK_M + i0
            rest = n // (shares.loop_cols * shares.loop_rows)
            if OF_DISTANCES:
                row += col * BLOCK_N
            b, h = bias_b + rest // shares.loop_heads, bias_h + rest % shares.loop_heads
            q_start, k_start, j0, seq, is_seen = dbias_tile_rows(row, col * BLOCK_N, b, h, ragged, sizes, cfg)
            if is_seen & (row >= 0):
                offs_i = (row + tl.arange(0, BLOCK_M))[:, None]
                offs_j = (j0 + tl.arange(0, BLOCK_N))[None, :]
                bias_tile = load_scores(extras.bias, offs_i, offs_j, seq, True)
                acc += dbias_step(
                    q, k, v, do, shift_ptr, low_ptr, delta_ptr, bias_tile, row, j0,
                    q_start, k_start, seq, ragged, extras, sizes, factors, cfg, True,
                )  # fmt: skip

    if ROWS_BROADCAST:
        acc = tl.sum(acc, 0, keep_dims=True)
        i = tl.zeros((1, 1), tl.int32)
    if COLS_BROADCAST:
        acc = tl.sum(acc, 1, keep_dims=True)
        c = tl.zeros((1, 1), tl.int32)
    wait_for_kernel_before(cfg)
    own = Sequence(split * shares.bias_batch + bias_b, bias_h, shares.bias_rows, shares.bias_cols, 0, 0)
    if OF_DISTANCES:
        store_distances(dbias, acc, tile_m, own, BLOCK_M, BLOCK_N)
    elif (tile_m + 1) * BLOCK_M <= shares.bias_rows and (tile_n + 1) * BLOCK_N <= shares.bias_cols:
        store_scores(dbias, acc, i, c, own, False)  # without masks, in wide stores
    else:
        store_scores(dbias, acc, i, c, own, True)


@triton.jit
def store_distances(dbias, acc, diagonal, own, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write the sums of a tile over entries with the same column - row, from 1 - BLOCK_M on."""
    for n in tl.static_range(1 + BLOCK_N // BLOCK_M):
        distance = n * BLOCK_M + tl.arange(0, BLOCK_M)
        column = distance[None, :] + 1 - BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        is_inside = (column >= 0) & (column < BLOCK_N)
        found = tl.gather(acc, tl.where(is_inside, column, 0), 1)
        total = tl.sum(tl.where(is_inside, found, 0.0), 0, keep_dims=True)
        ptrs = score_ptrs(dbias, tl.full((1, 1), diagonal, tl.int32), distance[None, :], own)
        tl.store(ptrs, total.to(dbias.ptr.dtype.element_ty))


@triton.jit
def dbias_tile_rows(i0, col0, b, h, ragged, sizes, cfg: tl.constexpr):
    """(q_start, k_start, j0, seq, whether anything is seen) for queries from i0, bias columns from col0.

    j0 may be negative, and need not be aligned: columns count from before a cache's padding.
    """
    q_start, seqlen_q, k_start, seqlen_k, first_col = sequence_rows(b, sizes, ragged)
    j0 = (col0 - first_col).to(tl.int32)
    seq = Sequence(b, h, seqlen_q, seqlen_k, seqlen_k - seqlen_q, first_col)
    i1 = tl.minimum(i0 + cfg.BLOCK_M, seqlen_q)
    lo, _full_lo, _full_hi, hi = key_regions(i0, i1, seq, sizes, cfg.BLOCK_N)
    return q_start, k_start, j0, seq, (i0 < seqlen_q) & (j0 < hi) & (j0 + cfg.BLOCK_N > lo)


@triton.jit
def dbias_step(
    q, k, v, do, shift_ptr, low_ptr, delta_ptr, bias_tile, i0, j0, q_start, k_start, seq,
    ragged, extras, sizes, factors, cfg: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """ds of queries [i0, i0 + BLOCK_M) and keys [j0, j0 + BLOCK_N), 0 where there is no such query.

    IS_EDGE: 0 also where length or window hide the key; otherwise it may be anything there.
    """
    QK: tl.constexpr = cfg.QK
    V: tl.constexpr = cfg.V
    b, h, kv_head = seq.b, seq.h, seq.h // cfg.GROUP_SIZE
    first_stat = padded_stat_start(b, h, q_start, sizes, ragged)
    i = (i0 + tl.arange(0, cfg.BLOCK_M))[:, None]
    j = (j0 + tl.arange(0, cfg.BLOCK_N))[None, :]
    q_tile = load_source(q, b, h, q_start, i0, seq.seqlen_q, cfg.BLOCK_M, QK, True)
    k_tile = load_source(k, b, kv_head, k_start, j0, seq.seqlen_k, cfg.BLOCK_N, QK, True)
    do_tile = load_source(do, b, h, q_start, i0, seq.seqlen_q, cfg.BLOCK_M, V, True)
    v_tile = load_source(v, b, kv_head, k_start, j0, seq.seqlen_k, cfg.BLOCK_N, V, True)
    shift = load_stat(shift_ptr + first_stat, i0, cfg.BLOCK_M)
    low = load_stat(low_ptr + first_stat, i0, cfg.BLOCK_M)
    delta = load_stat(delta_ptr + first_stat, i0, cfg.BLOCK_M)
    mask = load_scores(extras.mask, i, j, seq, True)
    s = dot_rows(q_tile, k_tile, cfg)  # [BLOCK_M, BLOCK_N]
    dp = dot_rows(do_tile, v_tile, cfg)
    s, _t, slope, _before = logits(s, i, j, seq, extras, sizes, factors, cfg, IS_EDGE, bias_tile, mask)
    p = exponentials(s, shift[:, None], low[:, None], factors, cfg)
    if extras.dropout_seed is not None:
        if ragged.leftpad_k is None:
            keep = keep_tile(i0, j0, seq, extras, sizes, cfg)
        else:
            keep = keep_entries(i, j, seq, extras, sizes, cfg)
        dp = tl.where(keep, dp * factors.keep, 0.0)
    return before_function(p * (dp - delta[:, None]), slope, cfg)
