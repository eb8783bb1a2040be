"""Decoding kernels: few queries against many keys, at the speed of memory (split-KV, "flash decoding").

The rows of one score tile are all queries of a GQA group, so each key is read once:
row r is query r // GROUP_SIZE of head kv_head * GROUP_SIZE + r % GROUP_SIZE. Keys are cut into tiles. The
tiles of all (sequence, key head, row tile) segments form one schedule. All workers have equal shares of it:

    segment      0               1          2
    tiles    | . . . . . . . | . . . . | . . . . . . |
    worker   |   0   |   1   |   2   |   3   |  4  |        a split: what one worker does of one segment

    attn_decode_kernel        split -> normalized out (float32), m and l, at index segment + worker: unique
    attn_decode_merge_kernel  l = sum_p l_p exp(m_p - m) [+ exp(sink - m)],  lse = m + log l
                              out = sum_p l_p exp(m_p - m) / l out_p

Every program computes the schedule from the lengths: the host reads nothing, and a CUDA graph replays with
new lengths. Sources: Dao et al., "Flash-Decoding" (2023); for the schedule Osama et al., "Stream-K" (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.gpu.launch.entry import entry
from tilewise.gpu.triton.arguments import Extras, Sequence, Sizes
from tilewise.gpu.triton.primitives import (
    exact_lse,
    exp_difference,
    let_next_kernel_start,
    online_softmax,
    sink_maximum,
    tile_scores,
    wait_for_kernel_before,
)
from tilewise.gpu.triton.tiles import cached_rows, is_page, length_poison, load_rows, page_poison

# ---- the schedule: which tiles a worker takes


@triton.jit
def sequence_keys(b, sizes, ragged):
    """(first key row, keys, first key that some query sees) of sequences b, scalar or vector."""
    k_start, seqlen_k, _ = cached_rows(b, b < sizes.batch, sizes, ragged)
    lo = b * 0
    if sizes.window_left is not None:
        lo = tl.maximum(seqlen_k - sizes.seqlen_q - sizes.window_left, 0)
    return k_start, seqlen_k, lo


@triton.jit
def tile_counts(segments, sizes, ragged, cfg: tl.constexpr):
    """(tiles of each of a sequence's segments [BLOCK_B], the end of them all in the schedule [BLOCK_B])."""
    b = tl.arange(0, cfg.BLOCK_B)
    _, seqlen_k, lo = sequence_keys(b, sizes, ragged)
    tiles = tl.where(b < sizes.batch, tl.cdiv(seqlen_k, cfg.BLOCK_N) - lo // cfg.BLOCK_N, 0)
    return tiles, tl.cumsum(tiles * segments, 0)


@triton.jit
def sequence_at(unit, tiles, ends, cfg: tl.constexpr):
    """(sequence of tile `unit` of the schedule, its first unit, tiles of each of its segments)."""
    is_before = ends <= unit
    b = tl.sum(is_before.to(tl.int32), 0)
    start = tl.max(tl.where(is_before, ends, 0), 0)
    index = tl.arange(0, cfg.BLOCK_B)
    return b, start, tl.sum(tl.where(index == b, tiles, 0), 0)


# ---- tiles in memory


@triton.jit
def key_rows(b, row, mask, ragged, sizes, cfg: tl.constexpr):
    """(batch entry or page, row in it, whether it may be read) of rows [BLOCK_N] of one sequence."""
    if cfg.PAGE_SIZE > 0:
        table = ragged.page_table + b.to(tl.int64) * sizes.stride_page_table
        entry = tl.load(table + row // cfg.PAGE_SIZE, mask=mask, other=0).to(tl.int64)
        mask = mask & is_page(entry, sizes)
        row = row % cfg.PAGE_SIZE
    else:
        entry = b.to(tl.int64)
    return entry, row.to(tl.int64), mask


@triton.jit
def load_keys(
    x, scale, entry, row, kv_head, mask, dtype: tl.constexpr, sizes,
    cfg: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values [BLOCK_N, columns] in the queries' dtype."""
    ptrs = x.ptr + entry * x.stride_batch + row * x.stride_row + kv_head * x.stride_head
    tile = load_rows(ptrs[:, None], mask[:, None], COLUMNS)
    if scale is not None:  # a power of two, so the product is exact
        num_kv_heads = sizes.num_heads // cfg.GROUP_SIZE
        factor = tl.load(scale + entry * num_kv_heads + kv_head, mask=mask, other=0.0)[:, None]
        first = (tile[0].to(tl.float32) * factor).to(dtype)
        if COLUMNS.REST == 0:
            tile = (first,)
        else:
            tile = first, (tile[1].to(tl.float32) * factor).to(dtype)
    return tile


# ---- one split


@triton.jit
def decode_step(
    acc, m, l, q, k, v, i, t, kv_head, k_start, seq, ragged, scales, extras, sizes, factors,
    cfg: tl.constexpr,
):  # fmt: skip
    """Fold key tile t into (acc, m, l). A compare for each score is free beside the reading of its key."""
    QK: tl.constexpr = cfg.QK
    V: tl.constexpr = cfg.V
    offs_n = t * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)
    mask_n = offs_n < seq.seqlen_k
    entry, row, mask_n = key_rows(seq.b, k_start + offs_n, mask_n, ragged, sizes, cfg)
    key_scale, value_scale = scales
    k_tile = load_keys(k, key_scale, entry, row, kv_head, mask_n, q[0].dtype, sizes, cfg, QK)
    if cfg.IS_SHARED:
        v_tile = k_tile[0]
    else:
        v_tile = load_keys(v, value_scale, entry, row, kv_head, mask_n, q[0].dtype, sizes, cfg, V)[0]
    KEYS: tl.constexpr = 0 if cfg.IS_TRANSPOSED else 1  # the axis of a score tile that has them
    i, j = tl.expand_dims(i, KEYS), tl.expand_dims(offs_n, 1 - KEYS)
    if cfg.IS_TRANSPOSED:
        s = tile_scores(k_tile, q, i, j, seq, extras, sizes, factors, cfg, True)  # [BLOCK_N, BLOCK_M]
    else:
        s = tile_scores(q, k_tile, i, j, seq, extras, sizes, factors, cfg, True)  # [BLOCK_M, BLOCK_N]
    p, correction, m, l = online_softmax(s, m, l, factors, cfg, KEYS)
    acc = acc * tl.expand_dims(correction, KEYS)
    p = p.to(v_tile.dtype)
    if cfg.IS_TRANSPOSED:
        acc = tl.dot(tl.trans(v_tile), p, acc, input_precision=cfg.PRECISION)  # [head_dim_v, BLOCK_M]
    else:
        acc = tl.dot(p, v_tile, acc, input_precision=cfg.PRECISION)  # [BLOCK_M, head_dim_v]
    return acc, m, l


@triton.jit
def store_split(partial, partial_m, partial_l, split, exists, acc, m, l, cfg: tl.constexpr):
    """Normalized out [rows, head_dim_v], maximum and sum of one split's rows.

    Their lse in one number would be of use only where it is small: of 1e9 a float holds no log l.
    """
    tl.store(partial_m + split, m, mask=exists)  # -inf where nothing was seen
    tl.store(partial_l + split, l, mask=exists)
    COLUMNS: tl.constexpr = 0 if cfg.IS_TRANSPOSED else 1  # the axis of acc that has them
    column = tl.arange(0, cfg.V.FIRST)
    ptrs = partial + tl.expand_dims(split, COLUMNS) * cfg.V.DIM + tl.expand_dims(column, 1 - COLUMNS)
    mask = tl.expand_dims(exists, COLUMNS) & tl.expand_dims(column < cfg.V.DIM, 1 - COLUMNS)
    tl.store(ptrs, acc * tl.expand_dims(1.0 / tl.where(l == 0.0, 1.0, l), COLUMNS), mask=mask)


@entry(triton.jit)
def attn_decode_kernel(
    q, k, v, partial, partial_m, partial_l, ragged, scales, extras: Extras, factors, sizes: Sizes,
    segments: int, workers: int, cfg: tl.constexpr,
):  # fmt: skip
    """One worker's share of the schedule. Grid: (workers,).

    segments: of each sequence, its key heads times the tiles of rows that one has.
    partial: float32 [splits, ROWS, head_dim_v]; partial_m and partial_l: [splits, ROWS].
    """
    QK: tl.constexpr = cfg.QK
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_DV: tl.constexpr = cfg.V.FIRST
    worker = tl.program_id(0)
    row_tiles = tl.cdiv(sizes.seqlen_q * cfg.GROUP_SIZE, BLOCK_M)
    wait_for_kernel_before(cfg)
    let_next_kernel_start(cfg)  # the merging kernel, up to its own wait
    tiles, ends = tile_counts(segments, sizes, ragged, cfg)
    total = tl.max(ends, 0)
    share = tl.cdiv(total, workers)
    unit = worker * share
    end = tl.minimum(unit + share, total)
    offs_m = tl.arange(0, BLOCK_M)
    while unit < end:
        b, first_unit, tiles_b = sequence_at(unit, tiles, ends, cfg)
        k_start, seqlen_kb, lo = sequence_keys(b, sizes, ragged)
        segment = (unit - first_unit) // tiles_b
        t = (unit - first_unit) % tiles_b
        count = tl.minimum(tiles_b - t, end - unit)
        kv_head = (segment // row_tiles).to(tl.int64)

        r = segment % row_tiles * BLOCK_M + offs_m
        row_exists = r < sizes.seqlen_q * cfg.GROUP_SIZE
        i = r // cfg.GROUP_SIZE
        h = kv_head * cfg.GROUP_SIZE + r % cfg.GROUP_SIZE
        q_ptrs = q.ptr + b.to(tl.int64) * q.stride_batch + i.to(tl.int64) * q.stride_row + h * q.stride_head
        q_tile = load_rows(q_ptrs[:, None], row_exists[:, None], QK)  # [BLOCK_M, head_dim]
        h_tile = h[None, :] if cfg.IS_TRANSPOSED else h[:, None]
        seq = Sequence(b, h_tile, sizes.seqlen_q, seqlen_kb, seqlen_kb - sizes.seqlen_q, k_start)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)
        if cfg.IS_TRANSPOSED:
            acc = tl.zeros((BLOCK_DV, BLOCK_M), tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        t += lo // cfg.BLOCK_N
        for tile in range(t, t + count):
            acc, m, l = decode_step(
                acc, m, l, q_tile, k, v, i, tile, kv_head, k_start, seq, ragged, scales, extras,
                sizes, factors, cfg,
            )  # fmt: skip
        if cfg.PAGE_SIZE > 0:
            end_row = k_start + tl.minimum((t + count) * cfg.BLOCK_N, seqlen_kb)
            l += page_poison(b, k_start + t * cfg.BLOCK_N, end_row, sizes, ragged, cfg)
        split = (b.to(tl.int64) * segments + segment + worker) * cfg.ROWS + offs_m
        exists = row_exists & (offs_m < cfg.ROWS)
        store_split(partial, partial_m, partial_l, split, exists, acc, m, l, cfg)
        unit += count


@entry(triton.jit)
def attn_decode_merge_kernel(
    partial, partial_m, partial_l, out, lse_ptr, residual_ptr, ragged, sinks, factors, sizes: Sizes,
    segments: int, workers: int, MERGE_ROWS: tl.constexpr, MERGE_SPLITS: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """out, lse and, unless that is None, residual of MERGE_ROWS rows of a segment.

    Grid: (segments of all, tiles of rows).
    """
    BLOCK_DV: tl.constexpr = cfg.V.FIRST
    row_tiles = tl.cdiv(sizes.seqlen_q * cfg.GROUP_SIZE, cfg.BLOCK_M)
    let_next_kernel_start(cfg)
    b = tl.program_id(0) // segments
    segment = tl.program_id(0) % segments
    # The first kernel started this one after its own wait, so the lengths are there to be read.
    tiles, ends = tile_counts(segments, sizes, ragged, cfg)
    index = tl.arange(0, cfg.BLOCK_B)
    tiles_b = tl.sum(tl.where(index == b, tiles, 0), 0)
    share = tl.maximum(tl.cdiv(tl.max(ends, 0), workers), 1)
    first_unit = tl.max(tl.where(index < b, ends, 0), 0) + segment * tiles_b
    worker = first_unit // share
    last = tl.where(tiles_b > 0, (first_unit + tiles_b - 1) // share + 1, worker)

    offs_m = tl.program_id(1) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    r = segment % row_tiles * cfg.BLOCK_M + offs_m
    row_exists = (r < sizes.seqlen_q * cfg.GROUP_SIZE) & (offs_m < cfg.ROWS)
    i = r // cfg.GROUP_SIZE
    h = segment // row_tiles * cfg.GROUP_SIZE + r % cfg.GROUP_SIZE
    offs_dv = tl.arange(0, BLOCK_DV)
    exists_dv = offs_dv < cfg.V.DIM
    m = tl.full((MERGE_ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((MERGE_ROWS,), tl.float32)
    if sinks is not None:
        m = sink_maximum(tl.load(sinks + h, mask=row_exists, other=0.0), cfg)
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    if ragged.errors is not None:
        l += length_poison(b, sizes, ragged)
    acc = tl.zeros((MERGE_ROWS, BLOCK_DV), tl.float32)
    wait_for_kernel_before(cfg)  # until every split is written
    for p in range(worker, last, MERGE_SPLITS):
        w = p + tl.arange(0, MERGE_SPLITS)
        split = (b.to(tl.int64) * segments + segment + w[:, None]) * cfg.ROWS + offs_m[None, :]
        exists = (w < last)[:, None] & row_exists[None, :]  # [MERGE_SPLITS, MERGE_ROWS]
        split_m = tl.load(partial_m + split, mask=exists, other=float("-inf"))
        split_l = tl.load(partial_l + split, mask=exists, other=0.0)
        ptrs = partial + split[:, :, None] * cfg.V.DIM + offs_dv[None, None, :]
        split_out = tl.load(ptrs, mask=exists[:, :, None] & exists_dv[None, None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(split_m, 0))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        correction = exp_difference(m, m_finite, cfg)
        weight = split_l * exp_difference(split_m, m_finite[None, :], cfg)
        acc = acc * correction[:, None] + tl.sum(split_out * weight[:, :, None], 0)
        l = l * correction + tl.sum(weight, 0)
        m = m_new
    acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    out_ptrs = out.ptr + b.to(tl.int64) * out.stride_batch + i.to(tl.int64) * out.stride_row
    out_ptrs += h * out.stride_head
    out_mask = row_exists[:, None] & exists_dv[None, :]
    tl.store(out_ptrs[:, None] + offs_dv[None, :], acc.to(out.ptr.dtype.element_ty), mask=out_mask)
    stat = (b.to(tl.int64) * sizes.num_heads + h) * sizes.seqlen_q + i
    lse, residual = exact_lse(m, l, factors, cfg)
    tl.store(lse_ptr + stat, lse, mask=row_exists)
    if residual_ptr is not None:
        tl.store(residual_ptr + stat, residual, mask=row_exists)
