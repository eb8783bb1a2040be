"""Attention backward for Hopper, head sizes over 128: dK, dV and dQ no longer fit one CTA, so two kernels.

    P^T = exp(K Q^T - lse),  dP^T = V dO^T,  dS^T = P^T * (dP^T - delta)
    dV += P^T dO,  dK += dS^T Q                attn_bwd_wide_keys_kernel: 64 keys stay, queries stream by
                                               (up to 192/128 `slim`: 128 keys)
    dQ += dS K                                 attn_bwd_wide_queries_kernel: 128 queries stay, keys stream by

Seven products instead of five, and in return no additions in global memory: the same bits every time.

The first kernel is a pipeline of two warpgroups, each with one accumulator of [64 keys, head size]:

    load_role --K, Q, dO--> weight_role: S^T, P^T, dV += P^T dO
              --V, Q, dO--> ........................P^T.......> gradient_role: dP^T, dS^T, dK += dS^T Q

In its weight role, one product of the last tile runs under the arithmetic of the next.
The second is a forward without the softmax: each of two warpgroups has 64 queries and their dQ. They start
products alternately (ping-pong), so that those of one run under the arithmetic of the other.
"""

from tilewise.gpu.hopper.backward.arguments import BackwardSizes
from tilewise.gpu.hopper.backward.loads import store_wide_keys
from tilewise.gpu.hopper.backward.ranges import locate_keys, next_tile, query_tiles, scratch_tile
from tilewise.gpu.hopper.backward.scores import pinned, probabilities, score_gradient
from tilewise.gpu.hopper.common.channel import Ring, make_ring, make_tile_ring, make_tiles
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    as_blocks,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    start_next_kernel,
    store_tile,
    wait_for_previous_kernel,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.key_loads import keys_at, queries_at
from tilewise.gpu.hopper.common.layouts import accumulator_layout, operand_layout
from tilewise.gpu.hopper.common.products import (
    accumulate_chunks,
    await_chunks,
    awaited_product,
    product,
    scaled,
    zero_chunks,
)
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
    """All that the roles exchange; shapes are of one slot. `work` has a reader in each warpgroup."""

    work: Ring
    q: Ring  # [BLOCK_M, D_CHUNK] x CHUNKS; `stats` arrives on the same barrier
    do: Ring  # [BLOCK_M, BLOCK_DV]
    k: Ring  # [64, D_CHUNK] x CHUNKS
    v: Ring  # [64, BLOCK_DV]
    weight: Ring  # [64, BLOCK_M]: P^T, from one warpgroup to the other
    # [1, 4 * BLOCK_M] float32 beside each q: lse in log2 units, delta, shift
    stats: gl.shared_memory_descriptor


@gluon.jit
def load_role(q_desc, k_desc, v_desc, do_desc, stats_desc, counter, ch, sizes, packing, cfg: gl.constexpr):
    """Take work tiles and stream theirs: K, V, and Q and dO of each query tile of the group's heads."""
    wait_for_previous_kernel()  # the row statistics are there
    start_next_kernel()  # it needs them, too, and SMs that have nothing left to do
    num_work_tiles = count_work_tiles(sizes, packing)
    index = gl.program_id(0)
    work_use = 0  # of the work ring
    use = 0  # query tiles so far
    while index < num_work_tiles:
        work = locate_keys(index, sizes, packing, cfg)
        send(ch.work, work_use, work)
        k_coords = keys_at(work.row, work.head, work, cfg)
        ch.k.load(work_use, k_desc, k_coords, cfg.D_CHUNKS)
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        tile = tiles.begin
        head = work.head * sizes.group_size
        for step in range(tiles.count() * sizes.group_size):
            row_coords = queries_at(tile * cfg.BLOCK_M, head, work, cfg)
            ch.q.load(use, q_desc, row_coords, cfg.D_CHUNKS, stats_desc.block_type.nbytes)
            scratch, slot = scratch_tile(work, head, tile, sizes, cfg), use % cfg.STAGES
            load_tile(stats_desc, [scratch, 0], ch.q.full.index(slot), ch.stats.index(slot))
            if step == 0:
                ch.v.load(work_use, v_desc, k_coords, 1)
            ch.do.load(use, do_desc, row_coords, 1)
            use += 1
            head, tile = next_tile(head, tile, tiles)
        index = next_work(fetch_add(counter))
        work_use += 1
    send_end(ch.work, work_use, index, counter)


@gluon.jit
def stats_of(use, ch, cfg: gl.constexpr):
    return ch.stats.index(use % cfg.STAGES).reshape([4 * cfg.BLOCK_M])


@gluon.jit
def weight_role(dv_desc, ch, sizes, factors, cfg: gl.constexpr):
    """P^T of every query tile, for the gradient role, and dV += P^T dO."""
    dtype: gl.constexpr = ch.do.tiles.dtype
    work_use = 0  # of the work ring
    use = 0
    work, _ = receive(ch.work, work_use)
    while work.row >= 0:
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        tile = tiles.begin
        dv = gl.full([64, cfg.BLOCK_DV], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_DV))
        ch.k.wait(work_use)
        s = awaited_product(ch.k, work_use, ch.q, use, cfg.BLOCK_M, cfg)  # S^T = K Q^T [64, BLOCK_M]
        s = warpgroup_mma_wait(0, deps=(s,))
        p = stage_weight(s, tile, tiles, use, work, ch, sizes, factors, dtype, cfg)
        for _ in range(1, tiles.count() * sizes.group_size):
            s = awaited_product(ch.k, work_use, ch.q, use + 1, cfg.BLOCK_M, cfg)
            dv = start_dv(p, dv, use, ch, cfg)
            s = warpgroup_mma_wait(1, deps=(s,))  # P^T dO may still run
            tile += 1
            if tile == tiles.end:
                tile = tiles.begin
            p = stage_weight(s, tile, tiles, use + 1, work, ch, sizes, factors, dtype, cfg)
            dv = warpgroup_mma_wait(0, deps=(dv,))
            ch.do.release(use)
            use += 1
        dv = warpgroup_mma_wait(0, deps=(start_dv(p, dv, use, ch, cfg),))
        ch.do.release(use)
        use += 1
        if cfg.WIDE_COLUMNS > 0:
            store_wide_keys(dv_desc, dv, 0, work, sizes, 0, cfg.WIDE_COLUMNS_V, cfg)
        else:
            store_keys((dv,), dv_desc, ch.k.chunk(work_use, 0), work, cfg)
        ch.k.release(work_use)
        work_use += 1
        work, _ = receive(ch.work, work_use)


@gluon.jit
def start_dv(p, dv, use, ch, cfg: gl.constexpr):
    """Start dV += P^T dO [64, BLOCK_DV], once dO has arrived."""
    ch.do.wait(use)
    do = ch.do.chunk(use, 0).reshape([cfg.BLOCK_M, cfg.BLOCK_DV])
    return warpgroup_mma(p, do, dv, is_async=True)


@gluon.jit
def stage_weight(s, tile, tiles, use, work, ch, sizes, factors, dtype: gl.constexpr, cfg: gl.constexpr):
    """P^T [64, BLOCK_M] of finished products as operand; the gradient role gets the weight of dS^T."""
    stats = stats_of(use, ch, cfg)
    p, weight = probabilities(s, stats, None, tile, work.row, tiles, work, sizes, factors, None, dtype, cfg)
    ch.weight.acquire(use)
    ch.weight.chunk(use, 0).store(weight)
    ch.weight.publish(use)
    ch.q.release(use)
    return pinned(gl.convert_layout(p, operand_layout(cfg.BLOCK_DV)))


@gluon.jit
def gradient_role(dk_desc, ch, sizes, factors, cfg: gl.constexpr):
    """dS^T of every query tile, and dK += dS^T Q."""
    work_use = 0  # of the work ring
    use = 0
    work, _ = receive(ch.work, work_use)
    while work.row >= 0:
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        dk = zero_chunks(cfg)
        v = ch.v.chunk(work_use, 0).reshape([64, cfg.BLOCK_DV])
        ch.v.wait(work_use)
        dp = warpgroup_mma_wait(0, deps=(start_dp(v, use, ch, cfg),))
        ch.do.release(use)
        ds = take_weight(dp, use, ch, cfg)
        for _ in range(1, tiles.count() * sizes.group_size):
            dk = accumulate_chunks(ds, ch.q, use, dk, cfg)  # first: the Q after the next waits for this slot
            dp = start_dp(v, use + 1, ch, cfg)
            dk = await_chunks(dk, 1, cfg)
            ch.q.release(use)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ch.do.release(use + 1)
            ds = take_weight(dp, use + 1, ch, cfg)
            use += 1
        dk = await_chunks(accumulate_chunks(ds, ch.q, use, dk, cfg), 0, cfg)
        ch.q.release(use)
        use += 1
        dk = scaled(dk, factors.scale)
        if cfg.WIDE_COLUMNS > 0:
            store_wide_keys(dk_desc, dk[0], 0, work, sizes, 0, cfg.WIDE_COLUMNS, cfg)
        else:
            store_keys(dk, dk_desc, ch.v.chunk(work_use, 0), work, cfg)
        ch.v.release(work_use)
        work_use += 1
        work, _ = receive(ch.work, work_use)


@gluon.jit
def start_dp(v, use, ch, cfg: gl.constexpr):
    """Start dP^T = V dO^T [64, BLOCK_M] of a query tile, once its dO has arrived."""
    ch.do.wait(use)
    do = ch.do.chunk(use, 0).reshape([cfg.BLOCK_M, cfg.BLOCK_DV])
    return product(v, do.permute((1, 0)))


@gluon.jit
def take_weight(dp, use, ch, cfg: gl.constexpr):
    """dS^T [64, BLOCK_M] as operand, from finished dP^T and the weight role's P^T."""
    ch.weight.wait(use)
    ch.q.wait(use)  # delta came with it
    weight = ch.weight.chunk(use, 0).load(accumulator_layout(cfg.BLOCK_M))
    ch.weight.release(use)
    ds = score_gradient(weight, weight, dp, stats_of(use, ch, cfg), weight.dtype, cfg)
    return pinned(gl.convert_layout(ds, operand_layout(cfg.D_CHUNK)))


@gluon.jit
def store_keys(chunks, desc, smem, work, cfg: gl.constexpr):
    """Store dK or dV of 64 keys, a descriptor's columns at a time, through a tile no longer needed."""
    WIDTH: gl.constexpr = desc.block_shape[-1]
    tile = as_blocks(smem, smem.numel // (64 * WIDTH), desc).index(0)
    slices = chunks
    if chunks[0].shape[1] > WIDTH:
        slices = chunks[0].reshape([64, 2, WIDTH]).permute([0, 2, 1]).split()
    row_coords = keys_at(work.row, work.head, work, cfg)
    for i in gl.static_range(len(slices)):  # one after the other, all through the same tile
        tile.reshape([64, WIDTH]).store(slices[i].to(desc.dtype))
        fence_async_shared()  # the stores above are visible to the TMA copy
        store_tile(desc, row_coords[:-1] + (i * WIDTH,), tile)  # noqa: RUF005
        wait_for_stores(0)  # the tile has been read


@entry(gluon.jit)
def attn_bwd_wide_keys_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, stats_desc, packing, counter,
    sizes: BackwardSizes, factors, cfg: gl.constexpr,
):  # fmt: skip
    """dK and dV of every tile of 64 keys. dk_desc and dv_desc are dk and dv themselves if in float32."""
    dtype: gl.constexpr = q_desc.dtype
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, cfg.BLOCK_M], dtype)
    ch = Channels(
        make_work_ring(2),
        make_tile_ring(q_desc, cfg.STAGES, cfg.D_CHUNKS, 2),
        make_tile_ring(do_desc, cfg.STAGES, 1, 2),
        make_tile_ring(k_desc, 1, cfg.D_CHUNKS, 1),
        make_tile_ring(v_desc, 1, 1, 1),
        make_ring(gl.allocate_shared_memory(dtype, [2, 64, cfg.BLOCK_M], weight_layout), 2, 1, 1),
        make_tiles(stats_desc, cfg.STAGES),
    )
    gl.warp_specialize(
        [
            (weight_role, (dv_desc, ch, sizes, factors, cfg)),
            (gradient_role, (dk_desc, ch, sizes, factors, cfg)),
            (load_role, (q_desc, k_desc, v_desc, do_desc, stats_desc, counter, ch, sizes, packing, cfg)),
        ],
        cfg.WARPS,
        cfg.REGISTERS,
    )
