"""dK and dV for head sizes up to 192/128: 128 keys stay, queries stream by; see `wide`.

Each of two warpgroups has 64 keys, whose dK and dV take 96 + 64 registers of a thread. A query tile, a step:

    wgmma       |             | dP  dV  | dK  next S |
    arithmetic  | P = exp(S)  |     dS  |            |

The warpgroups start products alternately (ping-pong): those of one run under the arithmetic of the other.

role           warps   does
load_role      1       takes tiles of keys; starts TMA copies of the first Q and dO, K, V, more Q and dO
keys_role x 2  4 each  the four products for 64 keys
"""

from tilewise.gpu.hopper.backward.arguments import BackwardSizes
from tilewise.gpu.hopper.backward.loads import key_coords, store_wide_keys
from tilewise.gpu.hopper.backward.ranges import locate_keys, next_tile, query_tiles, scratch_tile
from tilewise.gpu.hopper.backward.scores import opaque_zero, pinned, probabilities, score_gradient
from tilewise.gpu.hopper.backward.wide import stats_of
from tilewise.gpu.hopper.common.channel import Ring, make_tile_ring, make_tiles
from tilewise.gpu.hopper.common.compat import (
    HOLDS_NEXT_S,
    aggregate,
    as_block,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    pingpong_arrive,
    pingpong_wait,
    specialize,
    start_next_kernel,
    store_tile,
    wait_for_previous_kernel,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.key_loads import queries_at
from tilewise.gpu.hopper.common.layouts import accumulator_layout, operand_layout
from tilewise.gpu.hopper.common.products import accumulate_chunks, await_chunks, product, scaled, zero_chunks
from tilewise.gpu.hopper.common.scheduler import (
    count_work_tiles,
    fetch_add,
    make_work_ring,
    next_work,
    receive,
    send,
    send_end,
)
from tilewise.gpu.launch.entry import entry


@aggregate
class Channels:
    """All that the roles exchange; shapes are of one slot."""

    work: Ring
    k: Ring  # [64, D_CHUNK] x CHUNKS of warpgroup 0, then of 1
    v: Ring  # [64, BLOCK_DV] x 2, likewise
    q: Ring  # [BLOCK_M, D_CHUNK] x CHUNKS; `do` and `stats` arrive on the same barrier
    do: gl.shared_memory_descriptor  # [1, BLOCK_M, 1, BLOCK_DV] or packed [1, 1, ...] beside each q
    # [1, 4 * BLOCK_M] float32 beside each q: lse in log2 units, delta, shift
    stats: gl.shared_memory_descriptor


@gluon.jit
def load_role(q_desc, k_desc, v_desc, do_desc, stats_desc, counter, ch, sizes, packing, cfg: gl.constexpr):
    """Take work tiles and stream theirs: K, V, and Q and dO of each query tile of the group's heads."""
    MORE_BYTES: gl.constexpr = stats_desc.block_type.nbytes + do_desc.block_type.nbytes
    wait_for_previous_kernel()  # the row statistics are there
    start_next_kernel()  # it needs them, too, and SMs that have nothing left to do
    num_work_tiles = count_work_tiles(sizes, packing)
    index = gl.program_id(0)
    work_use = 0  # of the work ring
    use = 0  # query tiles so far
    while index < num_work_tiles:
        work = locate_keys(index, sizes, packing, cfg)
        send(ch.work, work_use, work)
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        tile = tiles.begin
        head = work.head * sizes.group_size
        for step in range(tiles.count() * sizes.group_size):
            row_coords = queries_at(tile * cfg.BLOCK_M, head, work, cfg)
            ch.q.load(use, q_desc, row_coords, cfg.D_CHUNKS, MORE_BYTES)
            scratch, slot = scratch_tile(work, head, tile, sizes, cfg), use % cfg.STAGES
            bar_q = ch.q.full.index(slot)
            load_tile(stats_desc, [scratch, 0], bar_q, ch.stats.index(slot))
            load_tile(do_desc, row_coords, bar_q, ch.do.index(slot))
            if step == 0:  # after the first queries, whose slot is free while the last keys are worked on
                first, second = key_coords(0, work, cfg), key_coords(1, work, cfg)
                ch.k.load_halves(work_use, k_desc, first, second, cfg.D_CHUNKS)
                ch.v.load_halves(work_use, v_desc, first, second, 1)
            use += 1
            head, tile = next_tile(head, tile, tiles)
        index = next_work(fetch_add(counter))
        work_use += 1
    send_end(ch.work, work_use, index, counter)


@gluon.jit
def start_s(W: gl.constexpr, zero, use, ch, cfg: gl.constexpr):
    """Start S^T = K Q^T [64, BLOCK_M] of a query tile that has arrived."""
    CHUNKS: gl.constexpr = cfg.D_CHUNKS
    s = gl.full([64, cfg.BLOCK_M], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_M))
    for chunk in gl.static_range(CHUNKS):
        k = ch.k.tiles.index(W * CHUNKS + chunk + zero).reshape([64, cfg.D_CHUNK])
        q = ch.q.chunk(use, chunk).reshape([cfg.BLOCK_M, cfg.D_CHUNK])
        s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=chunk > 0, is_async=True)
    return s


@gluon.jit
def finish_step(
    W: gl.constexpr, s, dv, zero, tile, key, own, work, use, ch, sizes, factors, cfg: gl.constexpr
):
    """(dS^T as operand, dV + P^T dO) of a query tile whose S^T is there."""
    dtype: gl.constexpr = ch.do.dtype
    stats = stats_of(use, ch, cfg)
    p, weight = probabilities(s, stats, None, tile, key, own, work, sizes, factors, None, dtype, cfg)
    v = ch.v.tiles.index(W + zero).reshape([64, cfg.BLOCK_DV])
    do = ch.do.index(use % cfg.STAGES).reshape([cfg.BLOCK_M, cfg.BLOCK_DV])
    p = pinned(gl.convert_layout(p, operand_layout(cfg.BLOCK_DV)))
    pingpong_wait(W)
    if HOLDS_NEXT_S:
        dp = product(v, do.permute((1, 0)))
        dv = warpgroup_mma(p, do, dv, is_async=True)
        pingpong_arrive(W)
        dp = warpgroup_mma_wait(1, deps=(dp,))  # P^T dO may still run
    else:  # dP takes registers only when P is complete
        dv = warpgroup_mma(p, do, dv, is_async=True)
        dp = product(v, do.permute((1, 0)))
        pingpong_arrive(W)
        dv, dp = warpgroup_mma_wait(0, deps=(dv, dp))
    ds = pinned(score_gradient(weight, weight, dp, stats, dtype, cfg))
    dv = warpgroup_mma_wait(0, deps=(dv,))
    return gl.convert_layout(ds, operand_layout(cfg.D_CHUNK)), dv


@gluon.jit
def keys_role(W: gl.constexpr, dk_desc, dv_desc, ch, sizes, factors, cfg: gl.constexpr):
    """Warpgroup W: dK and dV of 64 keys of every work tile."""
    work_use = 0  # of the work ring
    use = 0  # query tiles so far
    if W == 1:
        pingpong_arrive(W)  # 0 begins
    work, _ = receive(ch.work, work_use)
    while work.row >= 0:
        key = work.row + W * 64
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        own = query_tiles(key, 64, work, sizes, cfg)
        tile = tiles.begin
        dk = zero_chunks(cfg)
        dv = gl.full([64, cfg.BLOCK_DV], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_DV))
        ch.k.wait(work_use)
        ch.q.wait(use)
        s = warpgroup_mma_wait(0, deps=(start_s(W, opaque_zero(work_use), use, ch, cfg),))
        ch.v.wait(work_use)
        for step in range(1, tiles.count() * sizes.group_size):
            zero = opaque_zero(step)
            ds, dv = finish_step(W, s, dv, zero, tile, key, own, work, use, ch, sizes, factors, cfg)
            ch.q.wait(use + 1)  # not while dK runs: a loop would make ptxas run all products one by one
            pingpong_wait(W)
            dk = accumulate_chunks(ds, ch.q, use, dk, cfg)
            if not HOLDS_NEXT_S:
                dk = await_chunks(dk, 0, cfg)
            s = start_s(W, zero, use + 1, ch, cfg)
            pingpong_arrive(W)
            dk = await_chunks(dk, cfg.D_CHUNKS, cfg)  # S^T of the next may still run
            ch.q.release(use)
            s = warpgroup_mma_wait(0, deps=(s,))
            tile += 1
            if tile == tiles.end:
                tile = tiles.begin
            use += 1
        zero = opaque_zero(use)
        ds, dv = finish_step(W, s, dv, zero, tile, key, own, work, use, ch, sizes, factors, cfg)
        dk = scaled(await_chunks(accumulate_chunks(ds, ch.q, use, dk, cfg), 0, cfg), factors.scale)
        ch.q.release(use)
        use += 1
        if cfg.WIDE_COLUMNS > 0:
            for i in gl.static_range(len(dk)):
                store_wide_keys(dk_desc, dk[i], W, work, sizes, i * cfg.D_CHUNK, cfg.WIDE_COLUMNS, cfg)
            store_wide_keys(dv_desc, dv, W, work, sizes, 0, cfg.WIDE_COLUMNS_V, cfg)
        else:
            row_coords = key_coords(W, work, cfg)
            store_chunks(dk, dk_desc, ch.k.tiles, W * cfg.D_CHUNKS + zero, row_coords)
            store_chunks((dv,), dv_desc, ch.v.tiles, W + zero, row_coords)
            wait_for_stores(0)  # the tiles have been read
        ch.k.release(work_use)
        ch.v.release(work_use)
        work_use += 1
        work, _ = receive(ch.work, work_use)


@gluon.jit
def store_chunks(chunks, desc, tiles, first, row_coords):
    """Start TMA copies of 64 rows of a gradient, through tiles that are no longer needed."""
    WIDTH: gl.constexpr = desc.block_shape[-1]
    for i in gl.static_range(len(chunks)):
        tile = as_block(tiles.index(first + i), desc)
        tile.reshape([64, WIDTH]).store(chunks[i].to(desc.dtype))
    fence_async_shared()  # the stores above are visible to the TMA copies
    for i in gl.static_range(len(chunks)):
        store_tile(desc, row_coords[:-1] + (i * WIDTH,), as_block(tiles.index(first + i), desc))  # noqa: RUF005


@entry(gluon.jit)
def attn_bwd_slim_keys_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, stats_desc, packing, counter,
    sizes: BackwardSizes, factors, cfg: gl.constexpr,
):  # fmt: skip
    """dK and dV of every tile of 128 keys. dk_desc and dv_desc are dk and dv themselves if in float32."""
    ch = Channels(
        make_work_ring(2),
        make_tile_ring(k_desc, 1, 2 * cfg.D_CHUNKS, 2),
        make_tile_ring(v_desc, 1, 2, 2),
        make_tile_ring(q_desc, cfg.STAGES, cfg.D_CHUNKS, 2),
        make_tiles(do_desc, cfg.STAGES),
        make_tiles(stats_desc, cfg.STAGES),
    )
    specialize(
        (keys_role, (dk_desc, dv_desc, ch, sizes, factors, cfg)),
        (load_role, (q_desc, k_desc, v_desc, do_desc, stats_desc, counter, ch, sizes, packing, cfg)),
        cfg,
    )
