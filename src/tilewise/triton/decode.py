"""Decoding kernel: few queries against many keys, at the speed of memory (split-KV, "flash decoding").

The rows of one score tile are all queries of all heads that share a key head, so each key is read once:
row r is query r // GROUP_SIZE of head kv_head * GROUP_SIZE + r % GROUP_SIZE. Keys are cut into tiles, and the
tiles of all (sequence, key head, row tile) segments stand in one line of which every worker takes an equal stretch:

    segment      0               1          2
    tiles    | . . . . . . . | . . . . | . . . . . . |
    worker   |   0   |   1   |   2   |   3   |  4  |        a piece: what one worker does of one segment

    whole segment:  out and lse
    piece of one:   normalized out (float32) and lse to memory, at index segment + worker, which is unique;
                    the worker that finishes a segment's last piece merges them, in the order of the keys:
                    out = sum_p exp(lse_p - lse) out_p,  lse = log(sum_p exp lse_p [+ exp sink])

The plan is arithmetic on the lengths, done by every program for itself: nothing is read by the host, so a CUDA
graph replays with new lengths. Source: Dao et al., "Flash-Decoding" (2023); the line of tiles: Osama et al.,
"Stream-K" (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.triton.arguments import DecodeSizes, Extras, Place
from tilewise.triton.primitives import LN2, LOG2E, exponentials, scores_log2

# ---- the plan: which tiles a worker takes


@triton.jit
def sequence_keys(b, sizes, ragged):
    """(first key row, keys, first key of those that some query sees) of sequences b, scalar or vector."""
    exists = b < sizes.batch
    k_start = b * 0
    seqlen_k = b * 0 + sizes.seqlen_k
    if ragged.seqlens_k is not None:  # a wrong length must not read outside of the cache
        held = tl.load(ragged.seqlens_k + b, mask=exists, other=0).to(tl.int32)
        seqlen_k = tl.minimum(tl.maximum(held, 0), seqlen_k)
    if ragged.leftpad_k is not None:
        k_start = tl.load(ragged.leftpad_k + b, mask=exists, other=0).to(tl.int32)
        seqlen_k = tl.maximum(seqlen_k - k_start, 0)
    lo = b * 0
    if sizes.window_left is not None:
        lo = tl.maximum(seqlen_k - sizes.seqlen_q - sizes.window_left, 0)
    return k_start, seqlen_k, lo


@triton.jit
def tile_counts(sizes, ragged, cfg: tl.constexpr):
    """(tiles of one segment of each sequence [BLOCK_B], their segments' ends on the line [BLOCK_B]).

    A sequence without keys has one tile, in which nothing is visible: so somebody writes its rows.
    """
    b = tl.arange(0, cfg.BLOCK_B)
    _, seqlen_k, lo = sequence_keys(b, sizes, ragged)
    tiles = tl.maximum(tl.cdiv(seqlen_k, cfg.BLOCK_N) - lo // cfg.BLOCK_N, 1)
    tiles = tl.where(b < sizes.batch, tiles, 0)
    return tiles, tl.cumsum(tiles * sizes.segments, 0)


@triton.jit
def sequence_at(unit, tiles, ends, cfg: tl.constexpr):
    """(sequence that tile `unit` of the line belongs to, its first unit, tiles of each of its segments)."""
    is_before = ends <= unit
    b = tl.sum(is_before.to(tl.int32), 0)
    start = tl.max(tl.where(is_before, ends, 0), 0)
    index = tl.arange(0, cfg.BLOCK_B)
    return b, start, tl.sum(tl.where(index == b, tiles, 0), 0)


# ---- tiles of keys


@triton.jit
def key_places(b, row, mask, ragged, sizes, cfg: tl.constexpr):
    """(batch entry or page, row in it) of rows [BLOCK_N] of one sequence."""
    if cfg.PAGE_SIZE > 0:
        table = ragged.page_table + b.to(tl.int64) * sizes.stride_page_table
        entry = tl.load(table + row // cfg.PAGE_SIZE, mask=mask, other=0).to(tl.int64)
        row = row % cfg.PAGE_SIZE
    else:
        entry = b.to(tl.int64)
    return entry, row.to(tl.int64)


@triton.jit
def load_columns(
    ptrs, mask, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, IS_EDGE: tl.constexpr
):
    """Columns [FIRST, FIRST + WIDTH) of the rows at ptrs, zero beyond DIM, and where mask is False if IS_EDGE."""
    column = FIRST + tl.arange(0, WIDTH)[None, :]
    if IS_EDGE:
        tile = tl.load(ptrs[:, None] + column, mask=mask[:, None] & (column < DIM), other=0.0)
    elif FIRST + WIDTH > DIM:
        tile = tl.load(ptrs[:, None] + column, mask=column < DIM, other=0.0)
    else:
        tile = tl.load(ptrs[:, None] + column)
    return tile


@triton.jit
def load_keys(
    x, scale, entry, row, kv_head, mask, q, sizes, cfg: tl.constexpr,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Columns of a tile of keys or values [BLOCK_N, WIDTH] in the queries' dtype."""
    ptrs = x.ptr + entry * x.stride_batch + row * x.stride_row + kv_head * x.stride_head
    tile = load_columns(ptrs, mask, FIRST, WIDTH, DIM, IS_EDGE)
    if scale is not None:  # a power of two, so the product is exact
        factor = tl.load(scale + entry * sizes.num_kv_heads + kv_head, mask=mask, other=0.0)
        tile = (tile.to(tl.float32) * factor[:, None]).to(q.dtype)
    return tile


# ---- one piece


@triton.jit
def softmax_step(s, m, l, factors, cfg: tl.constexpr, AXIS: tl.constexpr):
    """`primitives.online_softmax` with the keys along AXIS."""
    m_tile = tl.max(s, AXIS)
    if cfg.IS_FOLDED:
        m_tile = m_tile * (factors.scale * LOG2E)
    m_new = tl.maximum(m, m_tile)
    m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
    correction = tl.exp2(m - m_finite)
    p = exponentials(s, tl.expand_dims(m_finite, AXIS), factors, cfg)
    return p, correction, m_new, l * correction + tl.sum(p, AXIS)


@triton.jit
def decode_step(
    acc, m, l, q, q_rest, k, v, i, t, kv_head, k_start, place, ragged, scales, extras, sizes, factors,
    cfg: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Fold key tile t into (acc, m, l). IS_EDGE=False promises that every row sees every key of it."""
    offs_n = t * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)
    mask_n = offs_n < place.seqlen_k
    entry, row = key_places(place.b, k_start + offs_n, mask_n, ragged, sizes, cfg)
    key_scale, value_scale = scales
    k_tile = load_keys(
        k, key_scale, entry, row, kv_head, mask_n, q, sizes, cfg, 0, cfg.BLOCK_D, cfg.HEAD_DIM, IS_EDGE
    )  # [BLOCK_N, BLOCK_D]
    if cfg.IS_SHARED:
        v_tile = k_tile
    else:
        v_tile = load_keys(
            v, value_scale, entry, row, kv_head, mask_n, q, sizes, cfg, 0, cfg.BLOCK_DV, cfg.HEAD_DIM_V, IS_EDGE
        )  # [BLOCK_N, BLOCK_DV]
    if cfg.BLOCK_REST > 0:
        k_rest = load_keys(
            k, key_scale, entry, row, kv_head, mask_n, q, sizes, cfg, cfg.BLOCK_D, cfg.BLOCK_REST, cfg.HEAD_DIM,
            IS_EDGE,
        )  # fmt: skip
    if cfg.IS_TRANSPOSED:
        s = tl.dot(k_tile, tl.trans(q), input_precision=cfg.PRECISION)  # [BLOCK_N, BLOCK_M]
        if cfg.BLOCK_REST > 0:
            s = tl.dot(k_rest, tl.trans(q_rest), s, input_precision=cfg.PRECISION)
        s, _ = scores_log2(s, i[None, :], offs_n[:, None], place, extras, sizes, factors, cfg, IS_EDGE)
        p, correction, m, l = softmax_step(s, m, l, factors, cfg, 0)
        acc = acc * correction[None, :]
        acc = tl.dot(tl.trans(v_tile), p.to(v_tile.dtype), acc, input_precision=cfg.PRECISION)
    else:
        s = tl.dot(q, tl.trans(k_tile), input_precision=cfg.PRECISION)  # [BLOCK_M, BLOCK_N]
        if cfg.BLOCK_REST > 0:
            s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision=cfg.PRECISION)
        s, _ = scores_log2(s, i[:, None], offs_n[None, :], place, extras, sizes, factors, cfg, IS_EDGE)
        p, correction, m, l = softmax_step(s, m, l, factors, cfg, 1)
        acc = acc * correction[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=cfg.PRECISION)
    return acc, m, l


# ---- results


@triton.jit
def store_rows(acc, m, l, out, lse_ptr, sinks, b, i, h, exists, sizes, cfg: tl.constexpr, IS_TRANSPOSED: tl.constexpr):
    """out and lse of rows (i, h), the sink joining last."""
    if sinks is not None:
        sink = tl.load(sinks + h, mask=exists, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        correction = tl.exp2(m - m_new)
        l = l * correction + tl.exp2(sink - m_new)
        m = m_new
    else:
        correction = tl.zeros_like(m) + 1.0
    factor = tl.where(l == 0.0, 0.0, correction / l)
    ptrs = out.ptr + b.to(tl.int64) * out.stride_batch + i.to(tl.int64) * out.stride_row + h * out.stride_head
    store_matrix(ptrs, acc, factor, exists, cfg, IS_TRANSPOSED)
    stat = (b.to(tl.int64) * sizes.num_heads + h) * sizes.seqlen_q + i
    tl.store(lse_ptr + stat, (m + tl.log2(l)) * LN2, mask=exists)  # -inf where nothing was seen


@triton.jit
def store_matrix(ptrs, acc, factor, exists, cfg: tl.constexpr, IS_TRANSPOSED: tl.constexpr):
    """acc * factor to the rows at ptrs; acc is [rows, BLOCK_DV], or transposed."""
    offs_dv = tl.arange(0, cfg.BLOCK_DV)
    if IS_TRANSPOSED:
        mask = exists[None, :] & (offs_dv < cfg.HEAD_DIM_V)[:, None]
        tl.store(ptrs[None, :] + offs_dv[:, None], (acc * factor[None, :]).to(ptrs.dtype.element_ty), mask=mask)
    else:
        mask = exists[:, None] & (offs_dv < cfg.HEAD_DIM_V)[None, :]
        tl.store(ptrs[:, None] + offs_dv[None, :], (acc * factor[:, None]).to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def merge_pieces(
    partial, partial_lse, first, count, out, lse_ptr, sinks, b, kv_head, row0, start, sizes, cfg: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """out and lse of rows [start, start + ROWS) of a segment from its pieces [first, first + count)."""
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    offs_dv = tl.arange(0, cfg.BLOCK_DV)
    exists_dv = (offs_dv < cfg.HEAD_DIM_V)[None, None, :]
    offs_m = start + tl.arange(0, ROWS)
    r = row0 + offs_m
    row_exists = (r < sizes.seqlen_q * cfg.GROUP_SIZE) & (offs_m < cfg.ROWS)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_DV), tl.float32)
    for p in range(0, count, PIECES):
        offs_p = p + tl.arange(0, PIECES)
        piece = (first + offs_p[:, None]) * cfg.ROWS + offs_m[None, :]  # [PIECES, ROWS]
        exists = (offs_p < count)[:, None] & row_exists[None, :]
        # .cg: other multiprocessors wrote them, so not from this one's own cache
        part_lse = tl.load(partial_lse + piece, mask=exists, other=float("-inf"), cache_modifier=".cg")
        ptrs = partial + piece[:, :, None] * cfg.HEAD_DIM_V + offs_dv[None, None, :]
        part = tl.load(ptrs, mask=exists[:, :, None] & exists_dv, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(part_lse, 0))
        m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        correction = tl.exp2(m - m_finite)
        weight = tl.exp2(part_lse - m_finite[None, :])
        acc = acc * correction[:, None] + tl.sum(part * weight[:, :, None], 0)
        l = l * correction + tl.sum(weight, 0)
        m = m_new
    i = r // cfg.GROUP_SIZE
    h = kv_head * cfg.GROUP_SIZE + r % cfg.GROUP_SIZE
    store_rows(acc, m, l, out, lse_ptr, sinks, b, i, h, row_exists, sizes, cfg, False)


@triton.jit(do_not_specialize=DecodeSizes._fields)
def attn_decode_merge_kernel(
    partial, partial_lse, out, lse_ptr, ragged, sinks,
    batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, stride_page_table, window_left, window_right,
    row_tiles, segments, workers, least,
    ROWS: tl.constexpr, PIECES: tl.constexpr, HAS_PDL: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Rows of the segments that several workers share. Grid: (batch * segments * ceil(cfg.ROWS / ROWS),)."""
    sizes = DecodeSizes(
        batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, stride_page_table, window_left, window_right,
        row_tiles, segments, workers, least,
    )  # fmt: skip
    ROW_BLOCKS: tl.constexpr = (cfg.ROWS + ROWS - 1) // ROWS
    slot = tl.program_id(0) // ROW_BLOCKS
    b = slot // sizes.segments
    segment = slot % sizes.segments
    tiles, ends = tile_counts(sizes, ragged, cfg)
    index = tl.arange(0, cfg.BLOCK_B)
    tiles_b = tl.sum(tl.where(index == b, tiles, 0), 0)
    share = tl.maximum(tl.cdiv(tl.max(ends, 0), sizes.workers), sizes.least)
    first_unit = tl.max(tl.where(index < b, ends, 0), 0) + segment * tiles_b
    first = first_unit // share
    count = (first_unit + tiles_b - 1) // share - first + 1
    if HAS_PDL:
        tl.extra.cuda.gdc_wait()
    if count > 1:
        merge_pieces(
            partial, partial_lse, (slot + first).to(tl.int64), count, out, lse_ptr, sinks, b,
            (segment // sizes.row_tiles).to(tl.int64), segment % sizes.row_tiles * cfg.BLOCK_M,
            tl.program_id(0) % ROW_BLOCKS * ROWS, sizes, cfg, ROWS, PIECES,
        )  # fmt: skip


@triton.jit(do_not_specialize=DecodeSizes._fields)
def attn_decode_kernel(
    q, k, v, out, lse_ptr, partial, partial_lse, arrived, ragged, scales, mask, bias, alibi, sinks, factors,
    batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, stride_page_table, window_left, window_right,
    row_tiles, segments, workers, least,
    cfg: tl.constexpr,
):  # fmt: skip
    """One worker's stretch of the line. Grid: (workers,).

    partial: float32 [pieces, ROWS, head_dim_v]; partial_lse: [pieces, ROWS], log2 units; arrived: int32, 0 for
    every segment before and after.
    """
    extras = Extras(mask, bias, alibi, None, None)
    sizes = DecodeSizes(
        batch, num_heads, num_kv_heads, seqlen_q, seqlen_k, stride_page_table, window_left, window_right,
        row_tiles, segments, workers, least,
    )  # fmt: skip
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_DV: tl.constexpr = cfg.BLOCK_DV
    worker = tl.program_id(0)
    tiles, ends = tile_counts(sizes, ragged, cfg)
    total = tl.max(ends, 0)
    share = tl.maximum(tl.cdiv(total, sizes.workers), sizes.least)
    unit = worker * share
    end = tl.minimum(unit + share, total)
    offs_m = tl.arange(0, BLOCK_M)
    if cfg.HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    while unit < end:
        b, first_unit, tiles_b = sequence_at(unit, tiles, ends, cfg)
        k_start, seqlen_kb, lo = sequence_keys(b, sizes, ragged)
        segment = (unit - first_unit) // tiles_b
        first_unit += segment * tiles_b
        t = unit - first_unit
        count = tl.minimum(tiles_b - t, end - unit)
        kv_head = (segment // sizes.row_tiles).to(tl.int64)

        row0 = segment % sizes.row_tiles * BLOCK_M
        r = row0 + offs_m
        row_exists = r < sizes.seqlen_q * cfg.GROUP_SIZE
        i = r // cfg.GROUP_SIZE
        h = kv_head * cfg.GROUP_SIZE + r % cfg.GROUP_SIZE
        q_ptrs = q.ptr + b.to(tl.int64) * q.stride_batch + i.to(tl.int64) * q.stride_row + h * q.stride_head
        q_tile = load_columns(q_ptrs, row_exists, 0, cfg.BLOCK_D, cfg.HEAD_DIM, True)  # [BLOCK_M, BLOCK_D]
        q_rest = q_tile
        if cfg.BLOCK_REST > 0:
            q_rest = load_columns(q_ptrs, row_exists, cfg.BLOCK_D, cfg.BLOCK_REST, cfg.HEAD_DIM, True)
        h_tile = h[None, :] if cfg.IS_TRANSPOSED else h[:, None]
        place = Place(b, h_tile, sizes.seqlen_q, seqlen_kb, seqlen_kb - sizes.seqlen_q, k_start)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)
        if cfg.IS_TRANSPOSED:
            acc = tl.zeros((BLOCK_DV, BLOCK_M), tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        t += lo // cfg.BLOCK_N
        edge = t
        if cfg.HAS_FULL:
            edge = full_tiles(seqlen_kb, sizes, cfg)
        edge = tl.minimum(tl.maximum(edge, t), t + count)
        for tile in range(t, edge):
            acc, m, l = decode_step(
                acc, m, l, q_tile, q_rest, k, v, i, tile, kv_head, k_start, place, ragged, scales, extras,
                sizes, factors, cfg, False,
            )  # fmt: skip
        for tile in range(edge, t + count):
            acc, m, l = decode_step(
                acc, m, l, q_tile, q_rest, k, v, i, tile, kv_head, k_start, place, ragged, scales, extras,
                sizes, factors, cfg, True,
            )  # fmt: skip

        if count == tiles_b:
            store_rows(acc, m, l, out, lse_ptr, sinks, b, i, h, row_exists, sizes, cfg, cfg.IS_TRANSPOSED)
        else:
            slot = b * sizes.segments + segment
            piece = (slot + worker).to(tl.int64) * cfg.ROWS + offs_m
            is_row = row_exists & (offs_m < cfg.ROWS)
            tl.store(partial_lse + piece, m + tl.log2(l), mask=is_row)  # -inf where nothing was seen
            factor = 1.0 / tl.where(l == 0.0, 1.0, l)
            store_matrix(partial + piece * cfg.HEAD_DIM_V, acc, factor, is_row, cfg, cfg.IS_TRANSPOSED)
            if arrived is not None:
                tl.debug_barrier()  # every thread's part is written before the arrival is announced
                first = first_unit // share
                pieces = (first_unit + tiles_b - 1) // share - first + 1
                if tl.atomic_add(arrived + slot, 1, sem="acq_rel") == pieces - 1:
                    tl.store(arrived + slot, 0)
                    for start in range(0, cfg.ROWS, cfg.MERGE_ROWS):
                        merge_pieces(
                            partial, partial_lse, (slot + first).to(tl.int64), pieces, out, lse_ptr, sinks, b,
                            kv_head, row0, start, sizes, cfg, cfg.MERGE_ROWS, cfg.MERGE_PIECES,
                        )  # fmt: skip
        unit += count


@triton.jit
def full_tiles(seqlen_k, sizes, cfg: tl.constexpr):
    """Tiles from key 0 on whose every key every row sees; 0 with a left window."""
    full = seqlen_k
    if sizes.window_right is not None:
        full = tl.minimum(full, seqlen_k - sizes.seqlen_q + 1 + sizes.window_right)
    if sizes.window_left is not None:
        full = seqlen_k * 0
    return tl.maximum(full, 0) // cfg.BLOCK_N
