"""Backward kernels: gradients by recomputation from lse. Without atomics, so bit for bit repeatable, but for
those of captured tensors: see `gpu/functions/sums`.

    delta = rowsum(dO * O) - dlse                           attn_bwd_prepare_kernel, and dsinks
    p  = exp(s - lse - residual),  dp = dO v^T,  ds = p * (dp - delta)
    dv += p^T dO,  dk += ds^T q                             attn_bwd_dkdv_kernel: a key tile, over queries
    dq += ds k                                              attn_bwd_dq_kernel: a query tile, over keys
    dbias = ds where nothing shares the bias, else          see `bias.kernel`

The tiles of the second kernel are transposed, so that p^T and ds^T are left operands, held in registers.

Where the GPU can, a kernel starts while the one before still ends (`wait_for_kernel_before`). The first after
attn_bwd_prepare_kernel reads what that writes and waits at its start. Those that follow start after that, and
wait at their end, so that none ends before all that came before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.gpu.launch.entry import entry
from tilewise.gpu.triton.arguments import Extras, Sequence, Sizes, Source
from tilewise.gpu.triton.loops import key_regions, query_regions, tile_loops, tile_start
from tilewise.gpu.triton.primitives import (
    STAT_BLOCK,
    before_function,
    exponentials,
    keep_tile,
    let_next_kernel_start,
    load_lse,
    load_scores,
    load_stat,
    logits,
    padded_stat_start,
    sink_weight,
    softmax_stats,
    stat_start,
    store_scores,
    wait_for_kernel_before,
)
from tilewise.gpu.triton.tiles import (
    add_weighted_rows,
    dot_rows,
    load_keys,
    load_source,
    load_tile,
    packed_tile,
    program_tile,
    query_tile,
    row_base,
    scaled_tile,
    sequence_rows,
    store_tile,
    zero_tile,
)


@entry(triton.jit)
def attn_bwd_prepare_kernel(
    out, do, lse_ptr, residual_ptr, dlse_ptr, shift_ptr, low_ptr, delta_ptr, dsinks_ptr,
    ragged, sinks, factors, sizes: Sizes,
    cfg: tl.constexpr,
):  # fmt: skip
    """One block of shift, low and delta of one head, and its share of dsinks (bh, tiles).

    shift and low are such that `exponentials` gives 0 in rows that see nothing and in padding.
    """
    V: tl.constexpr = cfg.V
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    let_next_kernel_start(cfg)
    tile, bh = program_tile(sizes, False)
    h = bh % sizes.num_heads
    b = bh // sizes.num_heads
    part = bh.to(tl.int64) * sizes.num_tiles + tile
    if ragged.cu_seqlens_q is not None:
        b, tile = packed_tile(tile, ragged.cu_seqlens_q, sizes.batch, STAT_BLOCK)
    q_start, seqlen_q, _k_start, _seqlen_k, _first_col = sequence_rows(b, sizes, ragged)
    first = stat_start(b, h, q_start, sizes, ragged)
    first_padded = padded_stat_start(b, h, q_start, sizes, ragged)
    o_base = row_base(out, b, h, q_start)
    do_base = row_base(do, b, h, q_start)

    dsink = tl.zeros((BLOCK_M,), tl.float32)
    for i0 in range(tile * STAT_BLOCK, (tile + 1) * STAT_BLOCK, BLOCK_M):
        i = i0 + tl.arange(0, BLOCK_M)
        exists = i < seqlen_q
        o_tile = load_tile(out, o_base, i0, seqlen_q, BLOCK_M, V, True)
        do_tile = load_tile(do, do_base, i0, seqlen_q, BLOCK_M, V, True)
        delta = tl.sum(o_tile[0].to(tl.float32) * do_tile[0].to(tl.float32), 1)
        if V.REST > 0:
            delta += tl.sum(o_tile[1].to(tl.float32) * do_tile[1].to(tl.float32), 1)
        if dlse_ptr is not None:
            delta -= tl.load(dlse_ptr + first + i, mask=exists, other=0.0)
        lse, residual = load_lse(lse_ptr, residual_ptr, first + i, exists, BLOCK_M)
        shift, low = softmax_stats(lse, residual, factors, cfg)
        tl.store(shift_ptr + first_padded + i, shift)
        tl.store(low_ptr + first_padded + i, low)
        tl.store(delta_ptr + first_padded + i, delta)
        if sinks is not None:
            p_sink, _ = sink_weight(sinks, h, lse, residual)
            dsink -= p_sink * delta
    if sinks is not None:
        tl.store(dsinks_ptr + part, tl.sum(dsink, 0))


@entry(triton.jit)
def attn_bwd_dkdv_kernel(
    q: Source, k, v, do: Source, dk, dv, shift_ptr, low_ptr, delta_ptr,
    ragged, extras: Extras, factors, sizes: Sizes, cfg: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of dk and dv of one key head, summed over the query heads that share it.

    A gradient that is None is left out: wide heads take one at a time, in tiles twice as large.
    """
    QK: tl.constexpr = cfg.QK
    V: tl.constexpr = cfg.V
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    IS_SECOND: tl.constexpr = dk is None  # after dk's kernel, which has waited for the rows' statistics
    if not IS_SECOND:
        wait_for_kernel_before(cfg)
    let_next_kernel_start(cfg)
    num_kv_heads = sizes.num_heads // cfg.GROUP_SIZE
    tile, bh = program_tile(sizes, False)
    kv_head = bh % num_kv_heads
    b = bh // num_kv_heads
    if ragged.cu_seqlens_q is not None:
        b, tile = packed_tile(tile, ragged.cu_seqlens_k, sizes.batch, BLOCK_N)
    q_start, seqlen_q, k_start, seqlen_k, first_col = sequence_rows(b, sizes, ragged)
    j0 = tile * BLOCK_N
    if j0 >= seqlen_k:
        if IS_SECOND:
            wait_for_kernel_before(cfg)
        return

    k_base = row_base(k, b, kv_head, k_start)
    v_base = row_base(v, b, kv_head, k_start)
    k_tile = load_tile(k, k_base, j0, seqlen_k, BLOCK_N, QK, True)  # [BLOCK_N, head_dim]
    v_tile = load_tile(v, v_base, j0, seqlen_k, BLOCK_N, V, True)
    dk_acc = zero_tile(BLOCK_N, QK)
    dv_acc = zero_tile(BLOCK_N, V)
    for member in range(cfg.GROUP_SIZE):
        h = kv_head * cfg.GROUP_SIZE + member
        seq = Sequence(b, h, seqlen_q, seqlen_k, seqlen_k - seqlen_q, first_col)
        j1 = tl.minimum(j0 + BLOCK_N, seqlen_k)
        loops = tile_loops(
            query_regions(j0, j1, seq, sizes, cfg.BLOCK_M), j1 == j0 + BLOCK_N, tile,
            tl.cdiv(seqlen_k, BLOCK_N), seqlen_q, seq, sizes, extras, cfg.BLOCK_M, cfg,
        )  # fmt: skip
        for IS_EDGE in tl.static_range(2):  # full tiles, then those at an edge
            for n in range(loops.starts[IS_EDGE], loops.ends[IS_EDGE], cfg.BLOCK_M):
                i0 = tile_start(n, loops, extras.visits, cfg.BLOCK_M, IS_EDGE)
                dk_acc, dv_acc = dkdv_step(
                    dk_acc, dv_acc, k_tile, v_tile, q, do, shift_ptr, low_ptr, delta_ptr, i0, j0, q_start,
                    seq, ragged, extras, sizes, factors, cfg, IS_EDGE, dk is not None, dv is not None,
                )  # fmt: skip
    if IS_SECOND:
        wait_for_kernel_before(cfg)
    if dk is not None:
        dk_base = row_base(dk, b, kv_head, k_start)
        store_tile(dk, dk_base, j0, seqlen_k, scaled_tile(dk_acc, factors.scale), BLOCK_N, QK)
    if dv is not None:
        dv_base = row_base(dv, b, kv_head, k_start)
        store_tile(dv, dv_base, j0, seqlen_k, scaled_tile(dv_acc, factors.keep), BLOCK_N, V)


@triton.jit
def dkdv_step(
    dk_acc, dv_acc, k_tile, v_tile, q, do, shift_ptr, low_ptr, delta_ptr, i0, j0, q_start,
    seq, ragged, extras, sizes, factors,
    cfg: tl.constexpr, IS_EDGE: tl.constexpr, HAS_DK: tl.constexpr, HAS_DV: tl.constexpr,
):  # fmt: skip
    """Add the part of queries [i0, i0 + BLOCK_M). Tiles here are [BLOCK_N keys, BLOCK_M queries].

    Rows beyond seqlen_q have q = do = 0 and low = inf, so p = 0; columns beyond seqlen_k are never stored.
    """
    QK: tl.constexpr = cfg.QK
    V: tl.constexpr = cfg.V
    first_stat = padded_stat_start(seq.b, seq.h, q_start, sizes, ragged)
    q_tile = load_source(q, seq.b, seq.h, q_start, i0, seq.seqlen_q, cfg.BLOCK_M, QK, IS_EDGE)
    i = (i0 + tl.arange(0, cfg.BLOCK_M))[None, :]
    j = (j0 + tl.arange(0, cfg.BLOCK_N))[:, None]
    bias = load_scores(extras.bias, i, j, seq, IS_EDGE)
    mask = load_scores(extras.mask, i, j, seq, IS_EDGE)
    s = dot_rows(k_tile, q_tile, cfg)  # [BLOCK_N, BLOCK_M]
    s, t, slope, _before = logits(s, i, j, seq, extras, sizes, factors, cfg, IS_EDGE, bias, mask)
    shift = load_stat(shift_ptr + first_stat, i0, cfg.BLOCK_M)
    low = load_stat(low_ptr + first_stat, i0, cfg.BLOCK_M)
    p = exponentials(s, shift[None, :], low[None, :], factors, cfg)
    do_tile = load_source(do, seq.b, seq.h, q_start, i0, seq.seqlen_q, cfg.BLOCK_M, V, IS_EDGE)
    kept = p
    if extras.dropout_seed is not None:
        keep = tl.trans(keep_tile(i0, j0, seq, extras, sizes, cfg))
        kept = tl.where(keep, p, 0.0)
    if HAS_DK:
        dp = dot_rows(v_tile, do_tile, cfg)
    if HAS_DV:
        dv_acc = add_weighted_rows(dv_acc, kept, do_tile, cfg)
    if HAS_DK:
        if extras.dropout_seed is not None:
            dp = tl.where(keep, dp * factors.keep, 0.0)
        delta = load_stat(delta_ptr + first_stat, i0, cfg.BLOCK_M)
        ds = before_function(p * (dp - delta[None, :]), slope, cfg)
        if cfg.HAS_SOFTCAP:
            ds = ds * (1.0 - t * t)
        dk_acc = add_weighted_rows(dk_acc, ds, q_tile, cfg)
    return dk_acc, dv_acc


@entry(triton.jit)
def attn_bwd_dq_kernel(
    q, k: Source, v: Source, do, dq, dbias, dcaptured, shift_ptr, low_ptr, delta_ptr,
    ragged, extras: Extras, factors, sizes: Sizes,
    cfg: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of dq of one head, and of dbias unless that is None: zeros where nothing is visible."""
    QK: tl.constexpr = cfg.QK
    V: tl.constexpr = cfg.V
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    let_next_kernel_start(cfg)
    i0, q_start, k_start, seq = query_tile(sizes, ragged, BLOCK_M)
    if i0 >= seq.seqlen_q:
        wait_for_kernel_before(cfg)
        return

    q_base = row_base(q, seq.b, seq.h, q_start)
    do_base = row_base(do, seq.b, seq.h, q_start)
    first_stat = padded_stat_start(seq.b, seq.h, q_start, sizes, ragged)
    q_tile = load_tile(q, q_base, i0, seq.seqlen_q, BLOCK_M, QK, True)
    do_tile = load_tile(do, do_base, i0, seq.seqlen_q, BLOCK_M, V, True)
    shift = load_stat(shift_ptr + first_stat, i0, BLOCK_M)
    low = load_stat(low_ptr + first_stat, i0, BLOCK_M)
    delta = load_stat(delta_ptr + first_stat, i0, BLOCK_M)
    dq_acc = zero_tile(BLOCK_M, QK)
    i1 = tl.minimum(i0 + BLOCK_M, seq.seqlen_q)
    loops = tile_loops(
        key_regions(i0, i1, seq, sizes, cfg.BLOCK_N), i1 == i0 + BLOCK_M, i0 // BLOCK_M,
        tl.cdiv(seq.seqlen_q, BLOCK_M), seq.seqlen_k, seq, sizes, extras, cfg.BLOCK_N, cfg,
    )  # fmt: skip
    for IS_EDGE in tl.static_range(2):  # full tiles, then those at an edge
        for n in range(loops.starts[IS_EDGE], loops.ends[IS_EDGE], cfg.BLOCK_N):
            j0 = tile_start(n, loops, extras.visits, cfg.BLOCK_N, IS_EDGE)
            dq_acc = dq_step(
                dq_acc, q_tile, do_tile, shift, low, delta, k, v, dbias, dcaptured, i0, j0, k_start,
                seq, ragged, extras, sizes, factors, cfg, IS_EDGE,
            )  # fmt: skip
    wait_for_kernel_before(cfg)
    dq_base = row_base(dq, seq.b, seq.h, q_start)
    store_tile(dq, dq_base, i0, seq.seqlen_q, scaled_tile(dq_acc, factors.scale), BLOCK_M, QK)


@triton.jit
def dq_step(
    dq_acc, q_tile, do_tile, shift, low, delta, k, v, dbias, dcaptured, i0, j0, k_start,
    seq, ragged, extras, sizes, factors, cfg: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Add the part of keys [j0, j0 + BLOCK_N). Tiles here are [BLOCK_M queries, BLOCK_N keys]."""
    QK: tl.constexpr = cfg.QK
    V: tl.constexpr = cfg.V
    k_tile = load_keys(k, j0, k_start, seq, ragged, sizes, cfg, QK, IS_EDGE)
    v_tile = load_keys(v, j0, k_start, seq, ragged, sizes, cfg, V, IS_EDGE)
    i = (i0 + tl.arange(0, cfg.BLOCK_M))[:, None]
    j = (j0 + tl.arange(0, cfg.BLOCK_N))[None, :]
    bias = load_scores(extras.bias, i, j, seq, IS_EDGE)
    mask = load_scores(extras.mask, i, j, seq, IS_EDGE)
    s = dot_rows(q_tile, k_tile, cfg)  # [BLOCK_M, BLOCK_N]
    dp = dot_rows(do_tile, v_tile, cfg)
    s, t, slope, before = logits(s, i, j, seq, extras, sizes, factors, cfg, IS_EDGE, bias, mask)
    p = exponentials(s, shift[:, None], low[:, None], factors, cfg)
    if extras.dropout_seed is not None:
        keep = keep_tile(i0, j0, seq, extras, sizes, cfg)
        dp = tl.where(keep, dp * factors.keep, 0.0)
    ds = p * (dp - delta[:, None])
    if dcaptured is not None:
        cfg.ADD_CAPTURED(dcaptured, ds, before, i, j, i0, j0, seq, extras.captured)
    ds = before_function(ds, slope, cfg)
    if dbias is not None:
        store_scores(dbias, ds, i, j, seq, IS_EDGE)
    if cfg.HAS_SOFTCAP:
        ds = ds * (1.0 - t * t)
    return add_weighted_rows(dq_acc, ds, k_tile, cfg)
