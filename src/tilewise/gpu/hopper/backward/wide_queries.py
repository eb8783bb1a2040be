"""dQ for head sizes over 128: 128 queries stay, keys stream by; see `wide`.

role            warps   does
load_role       1       takes tiles of queries; starts TMA copies of Q, dO and of each key tile's K and V
query_role x 2  4 each  S = Q K^T, dP = dO V^T, dS = P * (dP - delta), dQ += dS K for 64 queries

It runs beside the end of the kernel of the keys, of which it needs nothing: that one has waited for the row
statistics before it lets this one start.
"""

from tilewise.gpu.hopper.backward.arguments import BackwardSizes
from tilewise.gpu.hopper.backward.ranges import scratch_tile
from tilewise.gpu.hopper.backward.scores import capped, opaque_zero, pinned
from tilewise.gpu.hopper.backward.slim import store_chunks
from tilewise.gpu.hopper.common.channel import Ring, make_tile_ring
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    gl,
    gluon,
    pingpong_arrive,
    pingpong_wait,
    specialize,
    wait_for_previous_kernel,
    wait_for_stores,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.key_loads import keys_at, queries_at
from tilewise.gpu.hopper.common.layouts import operand_layout, row_layout
from tilewise.gpu.hopper.common.products import (
    accumulate_chunks,
    await_chunks,
    product,
    product_of_chunks,
    scaled,
    store_wide,
    zero_chunks,
)
from tilewise.gpu.hopper.common.ranges import hide, key_tiles
from tilewise.gpu.hopper.common.scheduler import (
    count_work_tiles,
    fetch_add,
    l2_swizzled,
    locate_tile,
    make_work_ring,
    next_work,
    receive,
    send,
    send_end,
)
from tilewise.gpu.hopper.common.softmax import exp2
from tilewise.gpu.launch.entry import entry


@aggregate
class Channels:
    """All that the roles exchange; shapes are of one bh."""

    work: Ring
    q: Ring  # [64, D_CHUNK] x CHUNKS, a slot for each warpgroup
    do: Ring  # [64, BLOCK_DV], likewise
    k: Ring  # [BLOCK_N, D_CHUNK] x CHUNKS
    v: Ring  # [BLOCK_N, BLOCK_DV]


@gluon.jit
def last_first(index, num_tiles, num_bh, l2_swizzle, cfg: gl.constexpr):
    return l2_swizzled(index, num_tiles, num_bh, l2_swizzle, True)


@gluon.jit
def locate_queries(index, sizes, packing, cfg: gl.constexpr):
    """The work tile of an index: `row` is the first of 128 queries. The last (longest, causal) come first."""
    heads, l2_swizzle = sizes.num_bh * sizes.group_size, sizes.l2_swizzle * sizes.group_size
    return locate_tile(index, heads, l2_swizzle, 128, last_first, sizes, packing, cfg)


@gluon.jit
def load_role(q_desc, k_desc, v_desc, do_desc, counter, ch, sizes, packing, cfg: gl.constexpr):
    """Take work tiles and stream theirs: Q, dO, then K and V alternately."""
    num_work_tiles = count_work_tiles(sizes, packing) * sizes.group_size
    index = gl.program_id(0)
    work_use = 0  # of the work ring
    use = 0  # key tiles so far
    while index < num_work_tiles:
        work = locate_queries(index, sizes, packing, cfg)
        send(ch.work, work_use, work)
        for w in gl.static_range(2):
            row_coords = queries_at(work.row + w * 64, work.head, work, cfg)
            ch.q.load(work_use * 2 + w, q_desc, row_coords, cfg.D_CHUNKS)
            ch.do.load(work_use * 2 + w, do_desc, row_coords, 1)
        tiles = key_tiles(work.row, 128, work, sizes, cfg)
        head = work.head // sizes.group_size
        for j in range(tiles.begin, tiles.end):
            row_coords = keys_at(j * cfg.BLOCK_N, head, work, cfg)
            ch.k.load(use, k_desc, row_coords, cfg.D_CHUNKS)
            ch.v.load(use, v_desc, row_coords, 1)
            use += 1
        index = next_work(fetch_add(counter))
        work_use += 1
    send_end(ch.work, work_use, index, counter)
    wait_for_previous_kernel()  # dK and dV are written: who waits for this kernel relies on it


@gluon.jit
def query_role(W: gl.constexpr, dq_desc, stats, ch, sizes, factors, cfg: gl.constexpr):
    """Warpgroup W: dQ of 64 queries of every work tile."""
    dtype: gl.constexpr = ch.q.tiles.dtype
    IS_V_LATE: gl.constexpr = cfg.V_STAGES == 1  # a tile's V arrives when its S is done, not before
    work_use = 0  # of the work ring
    use = 0
    if W == 1:
        pingpong_arrive(W)  # 0 begins
    work, _ = receive(ch.work, work_use)
    while work.row >= 0:
        row = work.row + W * 64
        tiles = key_tiles(work.row, 128, work, sizes, cfg)
        own = key_tiles(row, 64, work, sizes, cfg)
        lse, delta, shift, has_shift = load_stats(row, stats, work, sizes, cfg)
        own_use = work_use * 2 + W
        ch.q.wait(own_use)
        ch.do.wait(own_use)
        dq = zero_chunks(cfg)
        ch.k.wait(use)
        ch.v.wait(use)
        s = start_s(W, opaque_zero(work_use), use, ch, cfg)
        dp = start_dp(W, opaque_zero(work_use), use, ch, cfg)
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        ch.v.release(use)
        p, slope = weights(s, lse, shift, has_shift, tiles.begin, row, own, work, sizes, factors, cfg)
        ds = pinned((p * slope * (dp - delta[:, None])).to(dtype))
        for j in range(tiles.begin + 1, tiles.end):
            ch.k.wait(use + 1)
            if not IS_V_LATE:
                ch.v.wait(use + 1)
            pingpong_wait(W)
            dq = start_dq(ds, dq, use, ch, cfg)  # first: the K after the next waits for this bh
            s = start_s(W, opaque_zero(j), use + 1, ch, cfg)
            if not IS_V_LATE:
                dp = start_dp(W, opaque_zero(j), use + 1, ch, cfg)
            pingpong_arrive(W)
            dq = await_chunks(dq, cfg.D_CHUNKS + (0 if IS_V_LATE else 1), cfg)
            ch.k.release(use)
            s = warpgroup_mma_wait(0 if IS_V_LATE else 1, deps=(s,))
            p, slope = weights(s, lse, shift, has_shift, j, row, own, work, sizes, factors, cfg)
            if IS_V_LATE:
                ch.v.wait(use + 1)
                pingpong_wait(W)
                dp = start_dp(W, opaque_zero(j), use + 1, ch, cfg)
                pingpong_arrive(W)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ch.v.release(use + 1)
            ds = pinned((p * slope * (dp - delta[:, None])).to(dtype))
            use += 1
        dq = scaled(await_chunks(start_dq(ds, dq, use, ch, cfg), 0, cfg), factors.scale)
        ch.k.release(use)
        use += 1
        ch.do.release(own_use)
        if cfg.WIDE_COLUMNS > 0:
            start = work.start_q if cfg.IS_PACKED else work.batch * sizes.seqlen_q
            heads = (sizes.num_bh if cfg.IS_PACKED else sizes.num_bh // sizes.batch) * sizes.group_size
            for i in gl.static_range(len(dq)):
                store_wide(
                    dq_desc, dq[i], row, work.seqlen_q, start, work.head, heads, i * cfg.D_CHUNK,
                    cfg.WIDE_COLUMNS,
                )  # fmt: skip
        else:
            row_coords = queries_at(row, work.head, work, cfg)
            store_chunks(dq, dq_desc, ch.q.tiles, own_use % 2 * cfg.D_CHUNKS, row_coords)
            wait_for_stores(0)  # the tiles have been read
        ch.q.release(own_use)
        work_use += 1
        work, _ = receive(ch.work, work_use)


@gluon.jit
def load_stats(row, stats, work, sizes, cfg: gl.constexpr):
    """(lse in units of log2, delta, shift, whether there is one) of 64 rows; see `scores.weights`.

    Those past the end have lse = +inf, so that their P is 0.
    """
    i = gl.arange(0, 64, row_layout(cfg.BLOCK_N))
    tile = scratch_tile(work, work.head, row // 64, sizes, cfg)
    ptrs = stats + tile * 256 + i
    exists = row + i < work.seqlen_q
    lse = gl.load(ptrs, mask=exists, other=float("inf"))
    delta = gl.load(ptrs + 64, mask=exists, other=0.0)
    shift = gl.load(ptrs + 128, mask=exists, other=0.0)
    return lse, delta, shift, gl.max(gl.abs(shift), 0) > 0.0


@gluon.jit
def start_s(W: gl.constexpr, zero, use, ch, cfg: gl.constexpr):
    """Start S = Q K^T [64, BLOCK_N] of a key tile that has arrived."""
    return product_of_chunks(ch.q, W + zero, ch.k, use, cfg.BLOCK_N, cfg)


@gluon.jit
def start_dp(W: gl.constexpr, zero, use, ch, cfg: gl.constexpr):
    """Start dP = dO V^T [64, BLOCK_N]."""
    do = ch.do.tiles.index(W + zero).reshape([64, cfg.BLOCK_DV])
    v = ch.v.chunk(use, 0).reshape([cfg.BLOCK_N, cfg.BLOCK_DV])
    return product(do, v.permute((1, 0)))


@gluon.jit
def start_dq(ds, dq, use, ch, cfg: gl.constexpr):
    """Start dQ += dS K."""
    return accumulate_chunks(gl.convert_layout(ds, operand_layout(cfg.D_CHUNK)), ch.k, use, dq, cfg)


@gluon.jit
def weights(s, lse, shift, has_shift, j, row, own, work, sizes, factors, cfg: gl.constexpr):
    """(P [64, BLOCK_N], derivative of the softcap) of finished products."""
    x, unit, slope = capped(s, factors, cfg)
    if cfg.HAS_LARGE_LSE and has_shift:
        x = x - shift[:, None]
    x = x * unit - lse[:, None]
    if (j < own.full_begin) | (j >= own.full_end):
        x = hide(x, j, row, work, sizes, cfg)
    return exp2(x), slope


@entry(gluon.jit)
def attn_bwd_wide_queries_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, stats, packing, counter, sizes: BackwardSizes, factors,
    cfg: gl.constexpr,
):  # fmt: skip
    """dQ of every tile of 128 queries; `num_tiles` counts those. dq_desc is dq itself if in float32."""
    ch = Channels(
        make_work_ring(2),
        make_tile_ring(q_desc, 2, cfg.D_CHUNKS, 1),
        make_tile_ring(do_desc, 2, 1, 1),
        make_tile_ring(k_desc, cfg.K_STAGES, cfg.D_CHUNKS, 2),
        make_tile_ring(v_desc, cfg.V_STAGES, 1, 2),
    )
    specialize(
        (query_role, (dq_desc, stats, ch, sizes, factors, cfg)),
        (load_role, (q_desc, k_desc, v_desc, do_desc, counter, ch, sizes, packing, cfg)),
        cfg,
    )
