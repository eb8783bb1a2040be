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

from tilewise.gpu.hopper.common.arguments import Cache, Packing, Sizes
from tilewise.gpu.hopper.common.channel import Ring, make_tile_ring
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    as_blocks,
    fence_async_shared,
    gl,
    gluon,
    store_tile,
    wait_for_stores,
    wait_for_writes,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.guards import page_poison, reported_length
from tilewise.gpu.hopper.common.key_loads import coords, key_coords, load_keys, make_key_ring, read_pages
from tilewise.gpu.hopper.common.layouts import accumulator_layout, operand_layout, partial_layout, row_layout
from tilewise.gpu.hopper.common.products import product_of_chunks, rescaled
from tilewise.gpu.hopper.common.ranges import key_tiles, mask_left, mask_right, unvisited, visited
from tilewise.gpu.hopper.common.scheduler import (
    count_work_tiles,
    fetch_add,
    locate,
    make_work_ring,
    next_work,
    peek,
    send,
    send_end,
)
from tilewise.gpu.hopper.common.softmax import (
    LN_2,
    LOG2_E,
    Factors,
    exact_lse,
    exp2,
    finite_or_zero,
    log2,
    log2_parts,
    online_softmax,
    partial_sums,
    reciprocal,
    rescaled_sums,
    softcapped,
)


@aggregate
class Rings:
    """What the load role sends to the mma roles."""

    q: Ring
    k: Ring
    v: Ring
    work: Ring
    failures: gl.shared_memory_descriptor  # [2 * WARPGROUPS, 128] int32, sent back: whose rows failed
    smem_o: gl.shared_memory_descriptor  # the slots of q, which are the staging buffers of O


@gluon.jit
def load_role(q_desc, k_desc, v_desc, rings, counter, sizes, packing, cache, cfg: gl.constexpr):
    """Take work tiles and stream theirs: K first, then Q, then K and V alternately, one K ahead."""
    WARPGROUPS: gl.constexpr = cfg.WARPGROUPS
    ROWS: gl.constexpr = 64 // cfg.PACK
    num_work_tiles = count_work_tiles(sizes, packing)
    index = gl.program_id(0)
    older, newer = 0 * index - 1, 0 * index - 1  # the two work tiles before this one; -1: did not fail
    use = 0  # of the K and V rings
    work_use = 0  # of the work ring: work tiles so far
    current, is_exact = choose(older, newer, index, num_work_tiles, rings, work_use, cfg)
    while current >= 0:
        work = locate(current, sizes, packing, cache, cfg)
        tiles = key_tiles(work.row, ROWS * WARPGROUPS, work, sizes, cfg)
        head_k = work.head // sizes.group_size
        left = tiles.end - tiles.begin - 1
        j = visited(tiles, left, cfg)
        k_coords = key_coords(j, read_pages(j, work, sizes, cache, cfg), work, head_k, sizes, cfg)
        pages = read_pages(visited(tiles, gl.maximum(left - 1, 0), cfg), work, sizes, cache, cfg)
        load_keys(rings.k, use, k_desc, k_coords, work, head_k, sizes.rows_k, cfg.D_CHUNKS, cfg)
        send(rings.work, work_use, work, is_exact)
        for w in gl.static_range(WARPGROUPS):
            row = work.row + w * ROWS
            q_coords = coords(work.start_q, work.seqlen_q, row, work.head, work.batch, cfg.IS_PACKED)
            rings.q.load(work_use * WARPGROUPS + w, q_desc, q_coords, cfg.D_CHUNKS)
        while left > 0:
            v_coords = k_coords
            left -= 1
            k_coords = key_coords(visited(tiles, left, cfg), pages, work, head_k, sizes, cfg)
            pages = read_pages(visited(tiles, gl.maximum(left - 1, 0), cfg), work, sizes, cache, cfg)
            load_keys(rings.k, use + 1, k_desc, k_coords, work, head_k, sizes.rows_k, cfg.D_CHUNKS, cfg)
            load_keys(rings.v, use, v_desc, v_coords, work, head_k, sizes.rows_v, 1, cfg)
            use += 1
        ticket = fetch_add(counter, is_exact == 0)  # late, but answered while V waits for its slot
        load_keys(rings.v, use, v_desc, k_coords, work, head_k, sizes.rows_v, 1, cfg)
        use += 1
        work_use += 1
        older = gl.where(current == newer, -1, newer)
        newer = gl.where(is_exact == 0, current, -1)
        index = gl.where(is_exact == 0, next_work(ticket), index)
        current, is_exact = choose(older, newer, index, num_work_tiles, rings, work_use, cfg)
    send_end(rings.work, work_use, index, counter)


@gluon.jit
def choose(older, newer, index, num_work_tiles, rings, work_use, cfg: gl.constexpr):
    """(the next work tile, is_exact): again, exactly, the last but one if it failed; else new; -1 at the end.

    At the end the outcome of the last one is waited for as well.
    """
    is_exact = has_failed(older, rings, work_use, cfg)
    current = gl.where(is_exact > 0, older, index)
    if current >= num_work_tiles:
        is_exact = has_failed(newer, rings, work_use + 1, cfg)
        current = gl.where(is_exact > 0, newer, -1)
    return current, is_exact


@gluon.jit
def has_failed(index, rings, work_use, cfg: gl.constexpr):
    """1 if the work tile that the slot of `work_use` last held has failed for some warpgroup, else 0."""
    WARPGROUPS: gl.constexpr = cfg.WARPGROUPS
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    result = 0 * index
    if index >= 0:
        rings.work.acquire(work_use)
        for w in gl.static_range(WARPGROUPS):
            flags = rings.failures.index(work_use % 2 * WARPGROUPS + w).load(layout)
            result = gl.maximum(result, gl.max(flags, 0))
    return result


@gluon.jit
def scores(q_ring, q_use, k_ring, use, cfg: gl.constexpr):
    """Start S = Q K^T on the tensor cores, once the use's K has arrived."""
    k_ring.wait(use)
    return product_of_chunks(q_ring, q_use, k_ring, use, cfg.BLOCK_N, cfg)  # [64, BLOCK_N]


@gluon.jit
def accumulate(p, v_ring, use, acc, cfg: gl.constexpr):
    """Start O += P V, once the use's V has arrived."""
    v_ring.wait(use)
    v = v_ring.chunk(use, 0).reshape([cfg.BLOCK_N, cfg.BLOCK_DV])
    return warpgroup_mma(p, v, acc, is_async=True)  # [64, BLOCK_DV]


@gluon.jit
def softmax_step(
    s, m, l, left, row, tiles, is_exact, work, sizes, factors, dtype: gl.constexpr, cfg: gl.constexpr
):
    """Softmax of a finished tile of scores: (p as operand, m, l, alpha, is_steady). Steady: alpha is 1.

    `left` tiles are to come. out and lse are the same for any reference m, as p, l and O are in units of 2^m.
    Once each row has seen a key, m stays: no maximum to find or wait for, nothing to rescale. This is exact
    while nothing overflows, hence while l <= LARGEST_SUM and O is finite. Else the work tile has failed, and
    is done again with is_exact, where m is the running maximum.
    """
    if cfg.HAS_SOFTCAP:
        s = softcapped(s, factors)
    j = visited(tiles, left, cfg)
    if j >= tiles.full_end:  # only edge tiles are masked
        s = mask_right(s, j, row, work, sizes, cfg)
    if cfg.HAS_LEFT and j < tiles.full_begin:
        s = mask_left(s, j, row, work, sizes, cfg)
    is_steady = (left < tiles.num_steady) & (is_exact == 0)
    alpha = gl.full([64], 1.0, gl.float32, row_layout(cfg.BLOCK_N))
    if is_steady:
        p = exp2(s * factors.scale_log2e - m[:, None])  # [64, BLOCK_N]
        l = l + partial_sums(p)
    else:
        p, m, alpha = online_softmax(s, m, factors.scale_log2e)
        l = rescaled_sums(l, alpha) + partial_sums(p)
    p = gl.convert_layout(p.to(dtype), operand_layout(cfg.BLOCK_DV))
    return p, m, l, alpha, is_steady


@gluon.jit
def poison(work, tiles, sizes, cache, cfg: gl.constexpr):
    """0, or NaN where the cache's length or a page of a warpgroup's tiles is wrong."""
    of_pages = page_poison(
        cache.page_table, cache.errors, work.batch, work.seqlen_k, tiles.begin, tiles.end, sizes, 2, 4, cfg
    )
    return of_pages + reported_length(work.start_k > 0, cache.errors)


@gluon.jit
def skip(k_ring, v_ring, use, count):
    """Release tiles that other warpgroups need and this one does not."""
    for _ in range(count):
        k_ring.wait(use)
        k_ring.release(use)
        v_ring.wait(use)
        v_ring.release(use)
        use += 1
    return use


@gluon.jit
def mma_role(
    W: gl.constexpr,
    o_desc,
    lse_ptr,
    residual_ptr,
    sinks,
    rings,
    sizes,
    factors,
    cache,
    cfg: gl.constexpr,
):
    """Warpgroup W: its 64 rows of every work tile."""
    WARPGROUPS: gl.constexpr = cfg.WARPGROUPS
    ROWS: gl.constexpr = 64 // cfg.PACK
    HAS_SPARE_SLOT: gl.constexpr = cfg.Q_SLOTS >= 2 * WARPGROUPS
    dtype: gl.constexpr = o_desc.dtype
    use = 0  # of the K and V rings
    work_use = 0  # of the work ring
    work, is_exact = peek(rings.work, work_use)
    while work.row >= 0:
        row = work.row + W * ROWS
        all_tiles = key_tiles(work.row, ROWS * WARPGROUPS, work, sizes, cfg)
        tiles = key_tiles(row, ROWS, work, sizes, cfg)
        before, after = unvisited(tiles, all_tiles, cfg)
        use = skip(rings.k, rings.v, use, before)
        q_use = work_use * WARPGROUPS + W
        rings.q.wait(q_use)

        left = tiles.end - tiles.begin - 1  # tiles yet to visit
        s = warpgroup_mma_wait(0, deps=(scores(rings.q, q_use, rings.k, use, cfg),))
        rings.k.release(use)
        if HAS_SPARE_SLOT and work_use > 0:
            wait_for_stores(0)  # the previous tile's O has left shared memory
            rings.q.release(q_use - WARPGROUPS)
        m = gl.full([64], float("-inf"), gl.float32, row_layout(cfg.BLOCK_N))
        l = gl.full([64, 4], 0.0, gl.float32, partial_layout())
        if cfg.IS_CACHED:
            l += poison(work, tiles, sizes, cache, cfg)
        acc = gl.full([64, cfg.BLOCK_DV], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_DV))  # O before 1 / l
        p, m, l, _, _ = softmax_step(s, m, l, left, row, tiles, 1, work, sizes, factors, dtype, cfg)
        while left > 0:
            left -= 1
            if cfg.IS_OVERLAPPED:
                s = scores(rings.q, q_use, rings.k, use + 1, cfg)  # [64, BLOCK_N]
                acc = accumulate(p, rings.v, use, acc, cfg)  # [64, BLOCK_DV]
                s = warpgroup_mma_wait(1, deps=(s,))  # P V may still run
            else:
                acc = warpgroup_mma_wait(0, deps=(accumulate(p, rings.v, use, acc, cfg),))
                rings.v.release(use)
                s = warpgroup_mma_wait(0, deps=(scores(rings.q, q_use, rings.k, use + 1, cfg),))
            rings.k.release(use + 1)
            p_next, m, l, alpha, is_steady = softmax_step(
                s, m, l, left, row, tiles, is_exact, work, sizes, factors, dtype, cfg
            )
            if cfg.IS_OVERLAPPED:
                acc = warpgroup_mma_wait(0, deps=(acc,))  # p and V have been read
                rings.v.release(use)
            if not is_steady:
                acc = rescaled(acc, alpha)
            p = p_next
            use += 1
        acc = warpgroup_mma_wait(0, deps=(accumulate(p, rings.v, use, acc, cfg),))
        rings.v.release(use)
        use = skip(rings.k, rings.v, use + 1, after)
        flags = failures(l, acc, is_exact, dtype, cfg)
        rings.failures.index(work_use % 2 * WARPGROUPS + W).store(flags)
        if is_exact != 0:
            wait_for_writes()  # of the attempt that failed: this one's must come after
        smem_o = rings.smem_o.index(q_use % cfg.Q_SLOTS * cfg.O_TILES)
        store_rows(acc, m, l, smem_o, row, work, o_desc, lse_ptr, residual_ptr, sinks, sizes, factors, cfg)
        if not HAS_SPARE_SLOT:  # the load role may wait for this slot before it loads what we need next
            wait_for_stores(0)
            rings.q.release(q_use)
        rings.work.release(work_use)
        work_use += 1
        work, is_exact = peek(rings.work, work_use)
    wait_for_stores(0)


@gluon.jit
def failures(l, acc, is_exact, dtype: gl.constexpr, cfg: gl.constexpr):
    """[128] flags, one a thread: 1 if sums of its rows are too large, or O overflowed; see `softmax_step`."""
    sums = l
    if dtype == gl.bfloat16:  # values of float16 are too small for an O that overflows
        sums = sums + partial_sums(acc) * 0.0  # NaN if one of acc is infinite
    failed = gl.where((sums <= cfg.LARGEST_SUM) | (is_exact != 0), 0, 1)  # [64, 4]
    return gl.max(failed.reshape([4, 2, 8, 4]), 1).reshape([128])


@gluon.jit
def store_rows(
    acc, m, l, smem_o, row, work, o_desc, lse_ptr, residual_ptr, sinks, sizes, factors, cfg: gl.constexpr
):
    """Normalize, and store O (staged in the slot of Q, which is no longer needed) and lse."""
    factor = store_lse(m, l, row, work, lse_ptr, residual_ptr, sinks, sizes, factors, cfg)
    acc = rescaled(acc, factor)  # [64, BLOCK_DV]
    smem_o.reshape([64, cfg.BLOCK_DV]).store(acc.to(o_desc.dtype))
    store_staged(o_desc, smem_o, row, work, cfg)


@gluon.jit
def store_lse(m, l, row, work, lse_ptr, residual_ptr, sinks, sizes, factors, cfg: gl.constexpr):
    """Store lse, and if asked its residual; what O is to be multiplied by: 0 in rows that see no key."""
    l = gl.convert_layout(gl.sum(l, 1), row_layout(cfg.BLOCK_N), assert_trivial=True)
    rows = gl.arange(0, 64, row_layout(cfg.BLOCK_N))
    position = row + rows // cfg.PACK
    head = work.head + rows % cfg.PACK
    inside = position < work.seqlen_q
    factor = gl.full([64], 1.0, gl.float32, row_layout(cfg.BLOCK_N))
    if cfg.HAS_SINKS:
        sink_log2 = gl.load(sinks + head).to(gl.float32) * LOG2_E
        m_with_sink = gl.maximum(m, sink_log2)
        m_finite = finite_or_zero(m_with_sink)
        factor = exp2(m - m_finite)
        l = l * factor + exp2(sink_log2 - m_finite)
        m = m_with_sink
    if cfg.IS_PACKED:
        stat = head.to(gl.int64) * sizes.seqlen_q + work.start_q + position
    else:
        heads = sizes.num_bh if cfg.IS_CACHED else sizes.num_bh // sizes.batch
        num_heads = heads * cfg.PACK
        stat = (work.batch * num_heads + head).to(gl.int64) * sizes.seqlen_q + position
    if factors is None:  # 8-bit: the maximum is followed, so l is at most the number of keys
        lse = (m + log2(l)) * LN_2
    elif residual_ptr is None:
        whole, log2_rest = log2_parts(l)
        lse = ((m + whole) + log2_rest) * LN_2
    else:
        lse, residual = exact_lse(m, l, factors)
        gl.store(residual_ptr + stat, residual, mask=inside)
    gl.store(lse_ptr + stat, lse, mask=inside)
    return gl.where(l == 0.0, 0.0, factor * reciprocal(l))


@gluon.jit
def store_staged(o_desc, smem_o, row, work, cfg: gl.constexpr):
    """Start the TMA copy of a tile of O from its staging buffer, which all threads have just stored."""
    fence_async_shared()  # the stores are visible to the TMA copy below
    store_tile(o_desc, coords(work.start_q, work.seqlen_q, row, work.head, work.batch, cfg.IS_PACKED), smem_o)


@gluon.jit(do_not_specialize=Sizes._fields)
def attn_fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, residual_ptr, sinks,
    cu_seqlens_q, cu_seqlens_k, order, first_tile, counter,
    seqlens_k, page_table, errors,
    batch, seqlen_q, seqlen_k, group_size, num_bh, num_tiles, l2_swizzle, window_left, window_right,
    rows_k, rows_v, stride_page_table, num_pages, scale_log2e, two_over_softcap_log2e, softcap_log2e,
    scale, cfg: gl.constexpr,
):  # fmt: skip
    """out, lse and, unless that is None, residual of every query tile; integers: `Sizes`."""
    sizes = Sizes(
        batch, seqlen_q, seqlen_k, group_size, num_bh, num_tiles, l2_swizzle, window_left, window_right,
        rows_k, rows_v, stride_page_table, num_pages,
    )  # fmt: skip
    packing = Packing(cu_seqlens_q, cu_seqlens_k, order, first_tile)
    cache = Cache(seqlens_k, page_table, errors)
    factors = Factors(scale_log2e, two_over_softcap_log2e, softcap_log2e, scale)
    N: gl.constexpr = cfg.WARPGROUPS
    q_ring = make_tile_ring(q_desc, cfg.Q_SLOTS, cfg.Q_CHUNKS, 1)
    k_ring = make_key_ring(k_desc, cfg.D_CHUNK, cfg.D_CHUNKS, cfg)
    v_ring = make_key_ring(v_desc, cfg.BLOCK_DV, 1, cfg)
    smem_o = as_blocks(q_ring.tiles, cfg.Q_SLOTS * cfg.O_TILES, o_desc)
    failures = gl.allocate_shared_memory(gl.int32, [2 * N, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rings = Rings(q_ring, k_ring, v_ring, make_work_ring(N), failures, smem_o)
    MMA_REGISTERS: gl.constexpr = cfg.CONSUMER_REGISTERS
    if N == 2:
        gl.warp_specialize(
            [
                (mma_role, (0, o_desc, lse_ptr, residual_ptr, sinks, rings, sizes, factors, cache, cfg)),
                (mma_role, (1, o_desc, lse_ptr, residual_ptr, sinks, rings, sizes, factors, cache, cfg)),
                (load_role, (q_desc, k_desc, v_desc, rings, counter, sizes, packing, cache, cfg)),
            ],
            [4, 1],
            [MMA_REGISTERS, cfg.PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (mma_role, (0, o_desc, lse_ptr, residual_ptr, sinks, rings, sizes, factors, cache, cfg)),
                (mma_role, (1, o_desc, lse_ptr, residual_ptr, sinks, rings, sizes, factors, cache, cfg)),
                (mma_role, (2, o_desc, lse_ptr, residual_ptr, sinks, rings, sizes, factors, cache, cfg)),
                (mma_role, (3, o_desc, lse_ptr, residual_ptr, sinks, rings, sizes, factors, cache, cfg)),
                (load_role, (q_desc, k_desc, v_desc, rings, counter, sizes, packing, cache, cfg)),
            ],
            [4, 4, 4, 1],
            [MMA_REGISTERS, MMA_REGISTERS, MMA_REGISTERS, cfg.PRODUCER_REGISTERS],
        )
