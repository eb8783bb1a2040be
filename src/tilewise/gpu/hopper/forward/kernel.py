"""Attention forward for Hopper: one producer warp feeds two or four warpgroups of 64 query rows each.

    S = scale * Q K^T,  P = exp(S - m),  O = P V / l,  lse = m + log l          (one pass, online softmax)

    role             warps   does
    load_role        1       takes work tiles; starts TMA copies of Q, K and V into rings
    mma_role x 2, 4  4 each  S by wgmma, softmax in registers, O by wgmma with P as register operand; stores O

                 load_role                       mma_role (each warpgroup, on its own 64 rows)
    K ring   --> K[j+1] ----------------------->  S' = Q K[j+1]^T     issued before the next line ...
    V ring   --> V[j]   ----------------------->  O += P V[j]         ... so that this runs under ...
                                                  P' = softmax(S')    ... this

The order of key tiles is that of `ranges.visited`. The warpgroups run free of each other: while one computes
exponentials the others have the tensor cores. Where two CTAs share an SM, that is enough, and a warpgroup
does one thing after the other. FlashAttention-3 (Shah et al., 2024), section 3.
"""

from tilewise.gpu.hopper.common.arguments import Extras, MaskMap, RowTargets, Sizes
from tilewise.gpu.hopper.common.biases import load_slope
from tilewise.gpu.hopper.common.channel import make_tile_ring, skip
from tilewise.gpu.hopper.common.compat import (
    as_blocks,
    gl,
    gluon,
    specialize,
    wait_for_previous_kernel,
    wait_for_stores,
    wait_for_writes,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.dropout import load_seed
from tilewise.gpu.hopper.common.guards import WRONG_START, page_poison, reported_length
from tilewise.gpu.hopper.common.key_loads import make_key_ring
from tilewise.gpu.hopper.common.layouts import accumulator_layout, partial_layout, row_layout
from tilewise.gpu.hopper.common.products import awaited_product, rescaled
from tilewise.gpu.hopper.common.ranges import MANY_TILES, key_tiles, unvisited
from tilewise.gpu.hopper.common.scheduler import make_work_ring, peek
from tilewise.gpu.hopper.forward.epilogue import failures, store_rows
from tilewise.gpu.hopper.forward.loads import Rings, load_role
from tilewise.gpu.hopper.forward.scores import (
    bias_of,
    headroom,
    is_steep,
    softmax_step,
    surviving,
    with_dropout,
)
from tilewise.gpu.hopper.forward.watched import nothing_watched
from tilewise.gpu.hopper.mask.visits import entry_at, load_bits, tile_of, visits_of
from tilewise.gpu.launch.entry import entry


@gluon.jit
def accumulate(p, v_ring, use, acc, cfg: gl.constexpr):
    """Start O += P V, once the use's V has arrived."""
    v_ring.wait(use)
    v = v_ring.chunk(use, 0).reshape([cfg.BLOCK_N, cfg.BLOCK_DV])
    return warpgroup_mma(p, v, acc, is_async=True)  # [64, BLOCK_DV]


@gluon.jit
def poison(work, tiles, sizes, cache, cfg: gl.constexpr):
    """0, or NaN where the cache's length, its padding or a page of a warpgroup's tiles is wrong."""
    of_pages = page_poison(cache, work, tiles.begin, tiles.end, sizes, 2, 4, cfg)
    return of_pages + reported_length(work.start_k == WRONG_START, cache.errors)


@gluon.jit
def skip_both(k_ring, v_ring, use, count):
    """`skip` in both rings, tile by tile: the load role fills them in turn."""
    for _ in range(count):
        skip(k_ring, use, 1)
        use = skip(v_ring, use, 1)
    return use


@gluon.jit
def own_visits(tiles, all_tiles, work, mask, cfg: gl.constexpr):
    """(tiles of the CTA before and after those of a warpgroup, its visits). By a mask it visits all."""
    before, after = unvisited(tiles, all_tiles, cfg)
    if cfg.HAS_MASK:
        visits = visits_of(all_tiles, work, mask, cfg)
        before, after = 0, 0
    else:
        visits = visits_of(tiles, work, mask, cfg)
    return before, after, visits


@gluon.jit
def mma_role(
    W: gl.constexpr, o_desc, targets, sinks, rings, sizes, factors, cache, mask, extras, cfg: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: its 64 rows of every work tile."""
    WARPGROUPS: gl.constexpr = cfg.WARPGROUPS
    ROWS: gl.constexpr = 64 // cfg.PACK
    HAS_SPARE_SLOT: gl.constexpr = cfg.Q_SLOTS >= 2 * WARPGROUPS
    dtype: gl.constexpr = rings.q.tiles.dtype
    seed = load_seed(extras, cfg)
    use = 0  # of the K and V rings
    work_use = 0  # of the work ring
    work, is_exact = peek(rings.work, work_use)
    while work.row >= 0:
        row = work.row + W * ROWS
        all_tiles = key_tiles(work.row, ROWS * WARPGROUPS, work, sizes, cfg)
        tiles = key_tiles(row, ROWS, work, sizes, cfg)
        before, after, visits = own_visits(tiles, all_tiles, work, mask, cfg)
        use = skip_both(rings.k, rings.v, use, before)
        slope = load_slope(work.batch, work.head, extras, cfg)
        q_use = work_use * WARPGROUPS + W
        rings.q.wait(q_use)

        left = visits.count - 1  # tiles yet to visit
        entry = entry_at(left, visits, all_tiles, mask, cfg)
        words = load_bits(W, entry, visits, mask, cfg)
        j = tile_of(entry, left, tiles, cfg)
        kept = surviving(j, row, work, seed, extras, sizes, cfg)
        bias = bias_of(j, row, work, extras, cfg)
        s = awaited_product(rings.q, q_use, rings.k, use, cfg.BLOCK_N, cfg)  # S = Q K^T [64, BLOCK_N]
        s = warpgroup_mma_wait(0, deps=(s,))
        rings.k.release(use)
        if HAS_SPARE_SLOT and work_use > 0:
            wait_for_stores(0)  # the previous tile's O has left shared memory
            rings.q.release(q_use - WARPGROUPS)
        m = gl.full([64], float("-inf"), gl.float32, row_layout(cfg.BLOCK_N))
        l = gl.full([64, 4], 0.0, gl.float32, partial_layout())
        watched = nothing_watched(cfg)
        if cfg.IS_CACHED:
            l += poison(work, tiles, sizes, cache, cfg)
        acc = gl.full([64, cfg.BLOCK_DV], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_DV))  # O before 1 / l
        p, m, l, watched, _, _, has_seen = softmax_step(
            W, s, m, l, watched, left, entry, words, 0 * left, slope, bias, row, tiles, 1, is_exact, work,
            sizes, factors, extras, dtype, cfg,
        )  # fmt: skip
        follows = is_exact
        if left >= MANY_TILES:
            follows = gl.maximum(is_exact, is_steep(s, m, factors, cfg))
        if cfg.FOLLOWS:
            follows = 0 * left + 1
        entry = entry_at(gl.maximum(left - 1, 0), visits, all_tiles, mask, cfg)
        while left > 0:
            left -= 1
            current = entry
            words = load_bits(W, current, visits, mask, cfg)  # under the products
            entry = entry_at(gl.maximum(left - 1, 0), visits, all_tiles, mask, cfg)
            j = tile_of(current, left, tiles, cfg)
            bias = bias_of(j, row, work, extras, cfg)
            p = with_dropout(p, kept, cfg)
            if cfg.DRAWS_EARLY:
                kept = surviving(j, row, work, seed, extras, sizes, cfg)
            if cfg.IS_OVERLAPPED:
                s = awaited_product(rings.q, q_use, rings.k, use + 1, cfg.BLOCK_N, cfg)  # [64, BLOCK_N]
                acc = accumulate(p, rings.v, use, acc, cfg)  # [64, BLOCK_DV]
                if not cfg.DRAWS_EARLY:
                    kept = surviving(j, row, work, seed, extras, sizes, cfg)
                s = warpgroup_mma_wait(1, deps=(s,))  # P V may still run
            else:
                acc = warpgroup_mma_wait(0, deps=(accumulate(p, rings.v, use, acc, cfg),))
                rings.v.release(use)
                s = awaited_product(rings.q, q_use, rings.k, use + 1, cfg.BLOCK_N, cfg)
                kept = surviving(j, row, work, seed, extras, sizes, cfg)
                s = warpgroup_mma_wait(0, deps=(s,))
            rings.k.release(use + 1)
            p_next, m, l, watched, alpha, is_steady, has_seen = softmax_step(
                W, s, m, l, watched, left, current, words, has_seen, slope, bias, row, tiles, follows,
                is_exact, work, sizes, factors, extras, dtype, cfg,
            )  # fmt: skip
            if cfg.IS_OVERLAPPED:
                acc = warpgroup_mma_wait(0, deps=(acc,))  # p and V have been read
                rings.v.release(use)
            if not is_steady:
                acc = rescaled(acc, alpha)
            p = p_next
            use += 1
        p = with_dropout(p, kept, cfg)
        acc = warpgroup_mma_wait(0, deps=(accumulate(p, rings.v, use, acc, cfg),))
        rings.v.release(use)
        use = skip_both(rings.k, rings.v, use + 1, after)
        flags = failures(m, l, acc, dtype, cfg)
        rings.failures.index(work_use % 2 * WARPGROUPS + W).store(flags)
        if is_exact != 0:
            wait_for_writes()  # of the attempt that failed: this one's must come after
        smem_o = rings.smem_o.index(q_use % cfg.Q_SLOTS * cfg.O_TILES)
        store_rows(
            acc, m, l, watched, smem_o, row, work, o_desc, targets, sinks, sizes, factors,
            is_exact, headroom(is_exact, cfg), extras, cfg,
        )  # fmt: skip
        if not HAS_SPARE_SLOT:  # the load role may wait for this slot before it loads what we need next
            wait_for_stores(0)
            rings.q.release(q_use)
        rings.work.release(work_use)
        work_use += 1
        work, is_exact = peek(rings.work, work_use)
    wait_for_stores(0)


@entry(gluon.jit)
def attn_fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, targets: RowTargets, sinks, packing, counter, cache, sizes: Sizes,
    factors, mask: MaskMap, extras: Extras, cfg: gl.constexpr,
):  # fmt: skip
    """out and `targets` of every query tile. o_desc is out itself where that is in float32."""
    if cfg.HAS_MAX_LOGIT:
        wait_for_previous_kernel()  # which has filled max_logit
    N: gl.constexpr = cfg.WARPGROUPS
    q_ring = make_tile_ring(q_desc, cfg.Q_SLOTS, cfg.Q_CHUNKS, 1)
    k_ring = make_key_ring(k_desc, cfg.D_CHUNK, cfg.D_CHUNKS, cfg)
    v_ring = make_key_ring(v_desc, cfg.BLOCK_DV, 1, cfg)
    smem_o = q_ring.tiles
    if cfg.WIDE_COLUMNS == 0:
        smem_o = as_blocks(q_ring.tiles, cfg.Q_SLOTS * cfg.O_TILES, o_desc)
    failures = gl.allocate_shared_memory(gl.int32, [2 * N, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rings = Rings(q_ring, k_ring, v_ring, make_work_ring(N), failures, smem_o)
    specialize(
        (mma_role, (o_desc, targets, sinks, rings, sizes, factors, cache, mask, extras, cfg)),
        (load_role, (q_desc, k_desc, v_desc, rings, counter, sizes, packing, cache, mask, cfg)),
        cfg,
    )
