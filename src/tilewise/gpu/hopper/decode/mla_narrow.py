"""Decoding of absorbed latent attention for Hopper, of so few rows that they are columns of the products.

    role          warps   does
    mma_role x 2  4 each  S^T = K Q^T, half of its columns each; softmax of all; O^T of half of V's columns
    load_role x 2 1 each  half of the columns of the key tiles into rings: `mla_load`

wgmma computes 64 rows, used or not. As its rows are keys here, and columns of V, 16 heads take a quarter of
the time that they take in `decode.mla`, so that a tile has hardly arrived when its memory is free for the
next: the kernel is bound by memory. Each half of a tile's columns, K and V, has one reader.
"""

from tilewise.gpu.hopper.common.arguments import UNSPECIALIZED_DECODE_SIZES, DecodeSizes
from tilewise.gpu.hopper.common.channel import Ring, make_ring
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    start_next_kernel,
    sync_warpgroups,
    wait_for_previous_kernel,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.guards import split_poison
from tilewise.gpu.hopper.common.layouts import accumulator_layout
from tilewise.gpu.hopper.common.softmax import exp2, finite_or_zero, softcapped
from tilewise.gpu.hopper.decode.kernel import has_edge
from tilewise.gpu.hopper.decode.mla_load import (
    CHUNK,
    CHUNKS,
    Keys,
    allocate_queries,
    half_of,
    load_half_of_queries,
    load_role,
    make_keys,
)
from tilewise.gpu.hopper.decode.rows import store_columns, store_lse, store_split_columns, store_split_lse
from tilewise.gpu.hopper.decode.stream_k import make_schedule, split_at, split_index, worker_units


@aggregate
class Shared:
    """Shared memory of a CTA."""

    keys: Keys
    queries: Ring  # one tile of four chunks [BLOCK_M, CHUNK]; its barriers count `queries_rope`, too
    queries_rope: gl.shared_memory_descriptor  # [BLOCK_M, ROPE]
    weights: gl.shared_memory_descriptor  # P^T [2, BLOCK_N, BLOCK_M], of each warpgroup
    sums: gl.shared_memory_descriptor  # S^T [2 * 2, BLOCK_N, BLOCK_M] of half the columns, likewise


@gluon.jit
def make_shared(dtype: gl.constexpr, cfg: gl.constexpr):
    """2 x 5 x 16 KB and 3 x 8 KB of keys, 18 KB of queries, 4 KB of P, 16 KB of S: 222 KB of 227 KB."""
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, cfg.BLOCK_M], dtype)
    queries, queries_rope = allocate_queries(dtype, cfg)
    weights = gl.allocate_shared_memory(dtype, [2, cfg.BLOCK_N, cfg.BLOCK_M], p_layout)
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [4, cfg.BLOCK_N, cfg.BLOCK_M], sums_layout)
    return Shared(
        make_keys(dtype, 1, cfg),
        make_ring(queries, 1, CHUNKS, 2, 2),
        queries_rope,
        weights,
        sums,
    )


# ---- the mma roles


@gluon.jit
def scores(W: gl.constexpr, smem, use, cfg: gl.constexpr):
    """S^T = K Q^T [BLOCK_N, BLOCK_M] of a tile, half of the columns by the other warpgroup."""
    half, rope = half_of(W, smem.keys), smem.keys.rope
    s = gl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_M))
    if W == 0:
        rope.wait(use)
        q = smem.queries_rope.permute((1, 0))
        s = warpgroup_mma(rope.chunk(use, 0), q, s, is_async=True)
    for n in gl.static_range(2):
        q = smem.queries.chunk(0, 2 * W + n).permute((1, 0))
        half.wait(2 * use + n)
        s = warpgroup_mma(half.chunk(2 * use + n, 0), q, s, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    if W == 0:
        rope.release(use)
    # two slots: who stores into this one again has passed a barrier after the other has read it
    sums = smem.sums
    sums.index(use % 2 * 2 + W).store(s)
    sync_warpgroups()
    return s + sums.index(use % 2 * 2 + 1 - W).load(s.type.layout)


@gluon.jit
def hide(s, tile, split, sizes, cfg: gl.constexpr):
    """s^T with -inf where a query does not see a key."""
    layout: gl.constexpr = s.type.layout
    keys = tile * cfg.BLOCK_N + gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(1, layout))
    rows = gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, layout))
    position = split.row + rows // cfg.PACK + (split.seqlen_k - split.seqlen_q)
    last = 0 * position + (split.seqlen_k - 1)
    if cfg.HAS_RIGHT:
        last = gl.minimum(position + sizes.window_right, last)
    s = gl.where(keys[:, None] <= last[None, :], s, float("-inf"))
    if cfg.HAS_LEFT:
        s = gl.where(keys[:, None] >= (position - sizes.window_left)[None, :], s, float("-inf"))
    return s


@gluon.jit
def softmax_step(s, m, sums, tile, split, sizes, factors, cfg: gl.constexpr):
    """Softmax of one tile of products s^T: (p, m, sums, alpha); l is the sum of `sums` over the keys."""
    if cfg.HAS_SOFTCAP:
        s = softcapped(s, factors)
    if has_edge(tile, split, sizes, cfg):
        s = hide(s, tile, split, sizes, cfg)
    m_new = gl.maximum(m, gl.max(s, 0) * factors.scale_log2e)
    m_finite = finite_or_zero(m_new)
    alpha = exp2(m - m_finite)
    p = exp2(s * factors.scale_log2e - m_finite[None, :])
    return p, m_new, sums * alpha[None, :] + p, alpha


@gluon.jit
def mma_role(W: gl.constexpr, q, targets, cache, smem, sizes, factors, cfg: gl.constexpr):
    """Half W of O^T, and all of S^T."""
    half, weights = half_of(W, smem.keys), smem.weights.index(W)
    layout: gl.constexpr = accumulator_layout(cfg.BLOCK_M)
    wait_for_previous_kernel()
    if W == 0:
        start_next_kernel()
    schedule = make_schedule(cache.seqlens_k, sizes, cfg, 4)
    unit, end = worker_units(schedule, sizes)
    use = 0  # tiles so far
    splits = 0
    while unit < end:
        split = split_at(unit, end, schedule, sizes, cfg, 4)
        load_half_of_queries(W, q, smem.queries, smem.queries_rope, splits, split, sizes, cfg)
        smem.queries.wait(splits)
        m = gl.full([cfg.BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
        sums = gl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, gl.float32, layout)
        sums += split_poison(cache, split, sizes, cfg)
        left = gl.full([CHUNK, cfg.BLOCK_M], 0.0, gl.float32, layout)
        right = left
        for n in range(split.count):
            first = 2 * (use + n)  # use of the half's ring
            s = scores(W, smem, use + n, cfg)  # [BLOCK_N, BLOCK_M]
            p, m, sums, alpha = softmax_step(s, m, sums, split.tile + n, split, sizes, factors, cfg)
            weights.store(p.to(weights.dtype))
            fence_async_shared()  # the stores above are visible to wgmma
            left, right = left * alpha[None, :], right * alpha[None, :]
            v_left, v_right = half.chunk(first, 0), half.chunk(first + 1, 0)  # [BLOCK_N, CHUNK]
            left = warpgroup_mma(v_left.permute((1, 0)), weights, left, is_async=True)
            right = warpgroup_mma(v_right.permute((1, 0)), weights, right, is_async=True)
            left, right = warpgroup_mma_wait(0, deps=(left, right))  # [CHUNK, BLOCK_M]
            half.release(first)
            half.release(first + 1)
        smem.queries.release(splits)
        l = gl.sum(sums, 0)
        store_half(W, targets, left, right, m, l, split, sizes, factors, cfg)
        use += split.count
        splits += 1
        unit += split.units


@gluon.jit
def store_half(W: gl.constexpr, targets, left, right, m, l, split, sizes, factors, cfg: gl.constexpr):
    """Half W of a split's rows from O^T that l divides; the first half's warpgroup also stores lse."""
    inverse = 1.0 / gl.where(l == 0.0, 1.0, l)
    index = split_index(split.batch, split.segment, gl.program_id(0), sizes)
    if cfg.STORES_WHOLE and split.is_whole:
        for n in gl.static_range(2):
            acc = ((left, right)[n] * inverse[None, :]).permute((1, 0))
            store_columns(targets.out, acc, (2 * W + n) * CHUNK, split.batch, split.segment, 0, sizes, cfg)
        if W == 0:
            store_lse(targets, m, l, split.batch, split.segment, 0, sizes, factors, cfg)
    else:
        for n in gl.static_range(2):
            acc = ((left, right)[n] * inverse[None, :]).permute((1, 0))
            store_split_columns(targets.partial, acc, (2 * W + n) * CHUNK, index, split, sizes, cfg)
        if W == 0:
            store_split_lse(targets, m, l, index, split, sizes, cfg)


@gluon.jit(do_not_specialize=UNSPECIALIZED_DECODE_SIZES)
def attn_decode_mla_narrow_kernel(
    q, k_desc, targets, cache,
    batch, num_heads, seqlen_q, seqlen_k, segments, row_tiles, workers, window_left, window_right,
    stride_q_batch, stride_q_row, stride_q_head, stride_slopes, stride_page_table, num_pages, rows_k, rows_v,
    factors, cfg: gl.constexpr,
):  # fmt: skip
    """One worker's share of the schedule; arguments as of the kernel in `decode.mla`."""
    sizes = DecodeSizes(
        batch, num_heads, seqlen_q, seqlen_k, segments, row_tiles, workers, window_left, window_right,
        stride_q_batch, stride_q_row, stride_q_head, stride_slopes, stride_page_table, num_pages,
        rows_k, rows_v,
    )  # fmt: skip
    smem = make_shared(k_desc.dtype, cfg)
    gl.warp_specialize(
        [
            (mma_role, (0, q, targets, cache, smem, sizes, factors, cfg)),
            (mma_role, (1, q, targets, cache, smem, sizes, factors, cfg)),
            (load_role, (0, k_desc, smem.keys, smem.queries, cache, sizes, cfg)),
            (load_role, (1, k_desc, smem.keys, smem.queries, cache, sizes, cfg)),
        ],
        [4, 1, 1],
        cfg.REGISTERS,
    )
