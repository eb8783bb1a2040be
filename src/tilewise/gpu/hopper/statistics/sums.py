"""Sums of the weights over queries, when lse is known: a tile of keys stays, its queries stream by.

    P^T = exp(K Q^T - lse - residual),  column sums = P^T over all queries,  block sums = P^T over tiles

    role             warps   does
    load_role        1       takes tiles of keys of a query head; starts TMA copies of K and Q into rings
    sum_role x 2, 4  4 each  S^T by wgmma, exponentials and sums in registers, of its 64 keys

A warpgroup does one thing after the other; the others' products run meanwhile. Each sum is one warpgroup's:
no atomics, the same bits every time.
"""

from tilewise.gpu.hopper.backward.ranges import locate_keys, mask_transposed, query_tiles
from tilewise.gpu.hopper.backward.scores import capped
from tilewise.gpu.hopper.common.arguments import Sizes
from tilewise.gpu.hopper.common.channel import Ring, make_tile_ring, skip
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    gl,
    gluon,
    specialize,
    wait_for_previous_kernel,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.key_loads import keys_at, queries_at
from tilewise.gpu.hopper.common.layouts import accumulator_layout, partial_layout
from tilewise.gpu.hopper.common.products import awaited_product
from tilewise.gpu.hopper.common.scheduler import (
    count_work_tiles,
    fetch_add,
    make_work_ring,
    next_work,
    number_of,
    peek,
    send,
    send_end,
)
from tilewise.gpu.hopper.common.softmax import LOG2_E, exp2, partial_sums
from tilewise.gpu.launch.entry import entry


@aggregate
class Rings:
    """What the load role sends to the sum roles."""

    k: Ring  # tiles of 64 keys, one for each warpgroup
    q: Ring  # tiles of BLOCK_M queries, for all
    work: Ring
    # [2 * WARPGROUPS, BLOCK_M]: for each, of two tiles of queries, so that none is stored while it is read
    lse: gl.shared_memory_descriptor


@gluon.jit
def load_role(q_desc, k_desc, counter, rings, sizes, packing, cfg: gl.constexpr):
    """Take work tiles and stream theirs."""
    WARPGROUPS: gl.constexpr = cfg.WARPGROUPS
    num_work_tiles = count_work_tiles(sizes, packing)
    index = gl.program_id(0)
    use = 0  # of the ring of queries
    work_use = 0
    while index < num_work_tiles:
        work = locate_keys(index, sizes, packing, cfg)
        send(rings.work, work_use, work)
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        head_k = work.head // sizes.group_size
        for w in gl.static_range(WARPGROUPS):
            at = keys_at(work.row + w * 64, head_k, work, cfg)
            rings.k.load(WARPGROUPS * work_use + w, k_desc, at, cfg.D_CHUNKS)
        for tile in range(tiles.begin, tiles.end):
            rings.q.load(use, q_desc, queries_at(tile * cfg.BLOCK_M, work.head, work, cfg), cfg.D_CHUNKS)
            use += 1
        index = next_work(fetch_add(counter))
        work_use += 1
    send_end(rings.work, work_use, index, counter)


@gluon.jit
def load_lse(tile, first, work, lse_ptr, residual_ptr, cfg: gl.constexpr):
    """[BLOCK_M]: lse of a tile of queries in units of log2, the first of the head at `first`.

    It is inf, so that weights are 0, in rows that do not exist or see nothing.
    """
    row = tile * cfg.BLOCK_M + gl.arange(0, cfg.BLOCK_M, gl.BlockedLayout([1], [32], [4], [0]))
    exists = row < work.seqlen_q
    lse = gl.load(lse_ptr + first + row, mask=exists, other=float("inf"))
    lse = gl.where(lse == float("-inf"), float("inf"), lse)
    if residual_ptr is not None:
        lse += gl.load(residual_ptr + first + row, mask=exists, other=0.0)
    return lse * LOG2_E


@gluon.jit
def thread_sums(W: gl.constexpr, s, use, tile, key, own, work, rings, sizes, factors, cfg: gl.constexpr):
    """[64, 4]: sums of P^T of finished products, each over the queries of one thread."""
    s, unit, _ = capped(s, factors, cfg)
    if (tile < own.full_begin) | (tile >= own.full_end):
        s = mask_transposed(s, tile, key, work, sizes, cfg)
    lse = rings.lse.index(2 * W + use % 2).load(gl.SliceLayout(0, accumulator_layout(cfg.BLOCK_M)))
    return partial_sums(exp2(s * unit - lse[None, :]))


@gluon.jit
def store_blocks(block_ptr, sums, tile, key, bh, work, sizes):
    """Store the sums of 16 keys, one for each warp, and a tile of queries; `launch._sums` adds up."""
    by_warp = gl.sum(gl.sum(sums.reshape([4, 16, 4]), 2), 1)
    keys = key // 16 + gl.arange(0, 4, by_warp.type.layout)
    place = bh * sizes.rows_k + tile * sizes.rows_v
    gl.store(block_ptr + place + keys, by_warp, mask=keys * 16 < work.seqlen_k)


@gluon.jit
def sum_role(
    W: gl.constexpr, lse_ptr, residual_ptr, column_ptr, block_ptr, rings, sizes, factors, cfg: gl.constexpr
):  # fmt: skip
    """Warpgroup W: the sums of 64 keys of every work tile."""
    use = 0  # of the ring of queries
    work_use = 0
    work, _ = peek(rings.work, work_use)
    while work.row >= 0:
        key = work.row + W * 64
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        own = query_tiles(key, 64, work, sizes, cfg)
        bh = number_of(work, sizes, cfg)
        first = bh * sizes.seqlen_q + work.start_q
        k_use = cfg.WARPGROUPS * work_use + W
        use = skip(rings.q, use, own.begin - tiles.begin)
        rings.k.wait(k_use)
        total = gl.full([64, 4], 0.0, gl.float32, partial_layout())
        lse = load_lse(own.begin, first, work, lse_ptr, residual_ptr, cfg)
        for tile in range(own.begin, own.end):
            rings.lse.index(2 * W + use % 2).store(lse)
            s = awaited_product(rings.k, k_use, rings.q, use, cfg.BLOCK_M, cfg)  # S^T [64, BLOCK_M]
            lse = load_lse(tile + 1, first, work, lse_ptr, residual_ptr, cfg)
            s = warpgroup_mma_wait(0, deps=(s,))
            rings.q.release(use)
            sums = thread_sums(W, s, use, tile, key, own, work, rings, sizes, factors, cfg)
            total += sums
            if block_ptr is not None:
                store_blocks(block_ptr, sums, tile, key, bh, work, sizes)
            use += 1
        rings.k.release(k_use)
        use = skip(rings.q, use, tiles.end - own.end)
        if column_ptr is not None:
            total = gl.sum(total, 1)
            row = key + gl.arange(0, 64, gl.SliceLayout(1, partial_layout()))
            place = bh * sizes.seqlen_k + work.start_k
            gl.store(column_ptr + place + row, total, mask=row < work.seqlen_k)
        rings.work.release(work_use)
        work_use += 1
        work, _ = peek(rings.work, work_use)


@entry(gluon.jit)
def attn_weight_sums_kernel(
    q_desc, k_desc, lse_ptr, residual_ptr, column_ptr, block_ptr, packing, counter, sizes: Sizes, factors,
    cfg: gl.constexpr,
):  # fmt: skip
    """Sums of every tile of keys of each query head; what is None is not wanted.

    Of `sizes` num_bh counts query heads, whose seqlen_k is that of column_ptr's rows, and whose
    rows_k and rows_v are block_ptr's strides of a bh and of a tile of queries.
    """
    wait_for_previous_kernel()
    N: gl.constexpr = cfg.WARPGROUPS
    rings = Rings(
        make_tile_ring(k_desc, N * cfg.SLOTS, cfg.D_CHUNKS, 1),
        make_tile_ring(q_desc, cfg.STAGES, cfg.D_CHUNKS, N),
        make_work_ring(N),
        gl.allocate_shared_memory(gl.float32, [2 * N, cfg.BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    specialize(
        (sum_role, (lse_ptr, residual_ptr, column_ptr, block_ptr, rings, sizes, factors, cfg)),
        (load_role, (q_desc, k_desc, counter, rings, sizes, packing, cfg)),
        cfg,
    )
