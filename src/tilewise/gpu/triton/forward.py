"""Forward kernel: one program computes BLOCK_M rows of the output of one head.

    m, l, acc = -inf, 0, 0
    for each tile of keys that the rows can see:            full ones without a mask, then the edges
        s = q k^T                                           [BLOCK_M, BLOCK_N]
        m' = max(m, rowmax s),  c = exp(m - m'),  p = exp(s - m')
        l  = c l + rowsum p,    acc = c acc + p v
    out = acc / l,  lse = m + log l

FlashAttention-2's loop order (Dao 2023, section 3.1); nothing but out and lse is written, and for a
backward the residual: what rounding took from lse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.gpu.launch.entry import entry
from tilewise.gpu.triton.arguments import Extras, Sizes, Source
from tilewise.gpu.triton.loops import key_regions, tile_loops, tile_start
from tilewise.gpu.triton.primitives import (
    exact_lse,
    keep_tile,
    online_softmax,
    sink_maximum,
    stat_start,
    tile_scores,
)
from tilewise.gpu.triton.tiles import (
    add_weighted_rows,
    length_poison,
    load_keys,
    load_tile,
    page_poison,
    query_tile,
    row_base,
    scaled_tile,
    store_tile,
    zero_tile,
)


@entry(triton.jit)
def attn_fwd_kernel(
    q, k: Source, v: Source, out, lse_ptr, residual_ptr, ragged, extras: Extras, factors, sizes: Sizes,
    cfg: tl.constexpr,
):  # fmt: skip
    """Rows of out, lse and, unless that is None, residual. Grid: (tiles * bh,), see `program_tile`."""
    QK: tl.constexpr = cfg.QK
    V: tl.constexpr = cfg.V
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    i0, q_start, k_start, seq = query_tile(sizes, ragged, BLOCK_M)
    if i0 >= seq.seqlen_q:
        return

    q_base = row_base(q, seq.b, seq.h, q_start)
    q_tile = load_tile(q, q_base, i0, seq.seqlen_q, BLOCK_M, QK, True)
    acc = zero_tile(BLOCK_M, V)
    if extras.sinks is not None:  # the state after a key of logit `sink` and value 0
        m = tl.zeros((BLOCK_M,), tl.float32) + sink_maximum(tl.load(extras.sinks + seq.h), cfg)
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    else:
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)

    i1 = tl.minimum(i0 + BLOCK_M, seq.seqlen_q)
    regions = key_regions(i0, i1, seq, sizes, BLOCK_N)
    loops = tile_loops(
        regions, i1 == i0 + BLOCK_M, i0 // BLOCK_M, tl.cdiv(seq.seqlen_q, BLOCK_M), seq.seqlen_k,
        seq, sizes, extras, BLOCK_N, cfg,
    )  # fmt: skip
    for IS_EDGE in tl.static_range(2):  # full tiles, then those at an edge
        for n in range(loops.starts[IS_EDGE], loops.ends[IS_EDGE], BLOCK_N):
            j0 = tile_start(n, loops, extras.visits, BLOCK_N, IS_EDGE)
            acc, m, l = forward_step(
                acc, m, l, q_tile, k, v, i0, j0, k_start, seq, ragged, extras, sizes, factors, cfg, IS_EDGE
            )

    if ragged.errors is not None:
        l += length_poison(seq.b, sizes, ragged)
        if cfg.PAGE_SIZE > 0:
            l += page_poison(seq.b, k_start + regions[0], k_start + regions[3], sizes, ragged, cfg)
    i = i0 + tl.arange(0, BLOCK_M)
    lse, residual = exact_lse(m, l, factors, cfg)
    first_stat = stat_start(seq.b, seq.h, q_start, sizes, ragged)
    tl.store(lse_ptr + first_stat + i, lse, mask=i < seq.seqlen_q)
    if residual_ptr is not None:
        tl.store(residual_ptr + first_stat + i, residual, mask=i < seq.seqlen_q)
    acc = scaled_tile(acc, (factors.keep / tl.where(l == 0.0, 1.0, l))[:, None])
    out_base = row_base(out, seq.b, seq.h, q_start)
    store_tile(out, out_base, i0, seq.seqlen_q, acc, BLOCK_M, V)


@triton.jit
def forward_step(
    acc, m, l, q_tile, k, v, i0, j0, k_start, seq, ragged, extras, sizes, factors,
    cfg: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys and values into (acc, m, l)."""
    QK: tl.constexpr = cfg.QK
    V: tl.constexpr = cfg.V
    k_tile = load_keys(k, j0, k_start, seq, ragged, sizes, cfg, QK, IS_EDGE)
    i = (i0 + tl.arange(0, cfg.BLOCK_M))[:, None]
    j = (j0 + tl.arange(0, cfg.BLOCK_N))[None, :]
    s = tile_scores(q_tile, k_tile, i, j, seq, extras, sizes, factors, cfg, IS_EDGE)  # [BLOCK_M, BLOCK_N]
    p, correction, m, l = online_softmax(s, m, l, factors, cfg, 1)
    if extras.dropout_seed is not None:
        p = tl.where(keep_tile(i0, j0, seq, extras, sizes, cfg), p, 0.0)
    v_tile = load_keys(v, j0, k_start, seq, ragged, sizes, cfg, V, IS_EDGE)
    acc = scaled_tile(acc, correction[:, None])
    acc = add_weighted_rows(acc, p, v_tile, cfg)  # [BLOCK_M, head_dim_v]
    return acc, m, l
