"""Statistics of the weights: a second pass over Q K^T, when lse is known, that forgets each tile.

    p = exp(s - lse - residual)
    row_max  = max over keys of s
    total    = sum over keys of p                       1, but for the error of lse
    entropy  = sum over keys of -p log p, over total, plus log total
    distance = sum over keys of p |i - j|, over total
    column_sum = sum over queries of p

Rows are walked as in the forward, one program a tile of queries; columns as for dk, one program a tile of
keys, so that no sum needs atomics: the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.gpu.launch.entry import entry
from tilewise.gpu.triton.arguments import Extras, Sequence, Sizes, Source
from tilewise.gpu.triton.loops import key_regions, query_regions, tile_loops, tile_start
from tilewise.gpu.triton.primitives import (
    LN2,
    exponentials,
    load_lse,
    log2_unit,
    scale_of,
    sink_weight,
    softmax_stats,
    stat_start,
    tile_scores,
)
from tilewise.gpu.triton.tiles import (
    load_keys,
    load_source,
    load_tile,
    packed_tile,
    program_tile,
    query_tile,
    row_base,
    sequence_rows,
)


@entry(triton.jit)
def attn_row_statistics_kernel(
    q, k: Source, lse_ptr, residual_ptr, row_max_ptr, entropy_ptr, distance_ptr,
    ragged, extras: Extras, factors, sizes: Sizes,
    cfg: tl.constexpr,
):  # fmt: skip
    """What belongs to BLOCK_M queries of one head; what is None is not wanted. Grid: as of the forward."""
    QK: tl.constexpr = cfg.QK
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    HAS_ENTROPY: tl.constexpr = entropy_ptr is not None
    HAS_DISTANCE: tl.constexpr = distance_ptr is not None
    i0, q_start, k_start, seq = query_tile(sizes, ragged, BLOCK_M)
    if i0 >= seq.seqlen_q:
        return

    i = i0 + tl.arange(0, BLOCK_M)
    exists = i < seq.seqlen_q
    at = stat_start(seq.b, seq.h, q_start, sizes, ragged) + i
    q_tile = load_tile(q, row_base(q, seq.b, seq.h, q_start), i0, seq.seqlen_q, BLOCK_M, QK, True)
    lse, residual = load_lse(lse_ptr, residual_ptr, at, exists, BLOCK_M)
    shift, low = softmax_stats(lse, residual, factors, cfg)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    entropy = tl.zeros((BLOCK_M,), tl.float32)  # in bits until the end
    distance = tl.zeros((BLOCK_M,), tl.float32)
    if extras.sinks is not None:
        p_sink, log2_p_sink = sink_weight(extras.sinks, seq.h, lse, residual)
        total += p_sink
        entropy -= tl.where(total > 0.0, total * log2_p_sink, 0.0)

    i1 = tl.minimum(i0 + BLOCK_M, seq.seqlen_q)
    loops = tile_loops(
        key_regions(i0, i1, seq, sizes, BLOCK_N), i1 == i0 + BLOCK_M, 0, 0, 0,
        seq, sizes, extras, BLOCK_N, cfg,
    )  # fmt: skip
    for IS_EDGE in tl.static_range(2):  # full tiles, then those at an edge
        for n in range(loops.starts[IS_EDGE], loops.ends[IS_EDGE], BLOCK_N):
            j0 = tile_start(n, loops, extras.visits, BLOCK_N, IS_EDGE)
            k_tile = load_keys(k, j0, k_start, seq, ragged, sizes, cfg, QK, IS_EDGE)
            j = (j0 + tl.arange(0, BLOCK_N))[None, :]
            s = tile_scores(
                q_tile, k_tile, i[:, None], j, seq, extras, sizes, factors, cfg, IS_EDGE
            )  # [BLOCK_M, BLOCK_N]
            row_max = tl.maximum(row_max, tl.max(s, 1))
            if HAS_ENTROPY or HAS_DISTANCE:
                log2_p = (s - shift[:, None]) * log2_unit(factors, cfg) - low[:, None]
                p = tl.exp2(log2_p)
                total += tl.sum(p, 1)
                if HAS_ENTROPY:
                    entropy -= tl.sum(tl.where(p > 0.0, p * log2_p, 0.0), 1)
                if HAS_DISTANCE:
                    distance += tl.sum(p * tl.abs(i[:, None] + seq.offset - j).to(tl.float32), 1)

    total = tl.where(total == 0.0, 1.0, total)
    if row_max_ptr is not None:
        if cfg.IS_FOLDED:
            row_max = row_max * scale_of(factors)
        tl.store(row_max_ptr + at, row_max, mask=exists)
    if HAS_ENTROPY:
        tl.store(entropy_ptr + at, (entropy / total + tl.log2(total)) * LN2, mask=exists)
    if HAS_DISTANCE:
        tl.store(distance_ptr + at, distance / total, mask=exists)


@entry(triton.jit)
def attn_column_sum_kernel(
    q: Source, k: Source, lse_ptr, residual_ptr, column_ptr, column_batch, column_head, last_rows: int,
    IS_OF_GROUP: tl.constexpr, ragged, extras: Extras, factors, sizes: Sizes,
    cfg: tl.constexpr,
):  # fmt: skip
    """Sums of BLOCK_N keys of one key head, for each query head or, IS_OF_GROUP, over those that share it.

    column_ptr has a place for every key; its strides of a batch entry and of a head are given. Only the
    last `last_rows` queries of a sequence count.
    """
    QK: tl.constexpr = cfg.QK
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    num_kv_heads = sizes.num_heads // cfg.GROUP_SIZE
    tile, bh = program_tile(sizes, False)
    kv_head = bh % num_kv_heads
    b = bh // num_kv_heads
    if ragged.cu_seqlens_k is not None:
        b, tile = packed_tile(tile, ragged.cu_seqlens_k, sizes.batch, BLOCK_N)
    q_start, seqlen_q, k_start, seqlen_k, first_col = sequence_rows(b, sizes, ragged)
    j0 = tile * BLOCK_N
    if j0 >= seqlen_k:
        return

    first_row = tl.maximum(seqlen_q - last_rows, 0)
    j = j0 + tl.arange(0, BLOCK_N)
    seq = Sequence(b, kv_head * cfg.GROUP_SIZE, seqlen_q, seqlen_k, seqlen_k - seqlen_q, first_col)
    k_tile = load_keys(k, j0, k_start, seq, ragged, sizes, cfg, QK, True)
    target = column_ptr + b.to(tl.int64) * column_batch + k_start + j
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for member in range(cfg.GROUP_SIZE):
        h = kv_head * cfg.GROUP_SIZE + member
        seq = Sequence(b, h, seqlen_q, seqlen_k, seqlen_k - seqlen_q, first_col)
        j1 = tl.minimum(j0 + BLOCK_N, seqlen_k)
        lo, full_lo, full_hi, hi = query_regions(j0, j1, seq, sizes, BLOCK_M)
        lo = tl.maximum(lo, first_row // BLOCK_M * BLOCK_M)
        full_lo = tl.maximum(full_lo, tl.cdiv(first_row, BLOCK_M) * BLOCK_M)
        loops = tile_loops(
            (lo, full_lo, tl.maximum(full_hi, full_lo), hi), j1 == j0 + BLOCK_N, 0, 0, 0,
            seq, sizes, extras, BLOCK_M, cfg,
        )  # fmt: skip
        for IS_EDGE in tl.static_range(2):  # full tiles, then those at an edge
            for n in range(loops.starts[IS_EDGE], loops.ends[IS_EDGE], BLOCK_M):
                i0 = tile_start(n, loops, extras.visits, BLOCK_M, IS_EDGE)
                q_tile = load_source(q, b, h, q_start, i0, seqlen_q, BLOCK_M, QK, IS_EDGE)
                i = i0 + tl.arange(0, BLOCK_M)
                at = stat_start(b, h, q_start, sizes, ragged) + i
                counts = (i >= first_row) & (i < seqlen_q)
                lse, residual = load_lse(lse_ptr, residual_ptr, at, counts, BLOCK_M)
                shift, low = softmax_stats(lse, residual, factors, cfg)
                s = tile_scores(
                    k_tile, q_tile, i[None, :], j[:, None], seq, extras, sizes, factors, cfg, IS_EDGE
                )  # [BLOCK_N, BLOCK_M]
                sums += tl.sum(exponentials(s, shift[None, :], low[None, :], factors, cfg), 1)
        if not IS_OF_GROUP:
            tl.store(target + h.to(tl.int64) * column_head, sums, mask=j < seqlen_k)
            sums = tl.zeros((BLOCK_N,), tl.float32)
    if IS_OF_GROUP:
        tl.store(target + kv_head.to(tl.int64) * column_head, sums, mask=j < seqlen_k)
