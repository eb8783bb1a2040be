"""dK and dV for head sizes up to 192/128: 128 keys stay, queries stream by; see `backward_wide`.

Each of two warpgroups has 64 keys, whose dK and dV take 96 + 64 registers of a thread. A query tile, a step:

    wgmma       |             | dP  dV  | dK  next S |
    arithmetic  | P = exp(S)  |     dS  |            |

The warpgroups start products in turn, so that those of one run under the arithmetic of the other.

role           warps   does
load_role      1       draws tiles of keys; starts TMA copies of the first Q and dO, K, V, more Q and dO
keys_role x 2  4 each  the four products for 64 keys
"""

from tilewise.gpu.hopper.backward.arguments import BackwardSizes, ScoreFactors
from tilewise.gpu.hopper.backward.ranges import locate_keys, next_tile, query_tiles, scratch_tile
from tilewise.gpu.hopper.backward.scores import opaque_zero, pinned, probabilities, score_gradient
from tilewise.gpu.hopper.backward.wide import stats_of
from tilewise.gpu.hopper.common.arguments import Packing
from tilewise.gpu.hopper.common.channel import Ring, make_tile_ring, make_tiles
from tilewise.gpu.hopper.common.compat import (
    HOLDS_NEXT_S,
    aggregate,
    as_block,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    pass_turn,
    start_next_kernel,
    store_tile,
    take_turn,
    wait_for_previous_kernel,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.key_loads import coords
from tilewise.gpu.hopper.common.layouts import accumulator_layout, operand_layout
from tilewise.gpu.hopper.common.products import accumulate_parts, await_parts, product, scaled, zero_parts
from tilewise.gpu.hopper.common.schedule import count_work, draw, drawn, finish, make_work_ring, receive, send


@aggregate
class Channels:
    """All that the roles exchange; shapes are of one slot."""

    work: Ring
    k: Ring  # [64, PART_WIDTH] x PARTS of warpgroup 0, then of 1
    v: Ring  # [64, BLOCK_DV] x 2, likewise
    q: Ring  # [BLOCK_M, PART_WIDTH] x PARTS; `do` and `stats` arrive on the same barrier
    do: gl.shared_memory_descriptor  # [1, BLOCK_M, 1, BLOCK_DV] or packed [1, 1, ...] beside each q
    stats: (
        gl.shared_memory_descriptor
    )  # [1, 4 * BLOCK_M] float32 beside each q: lse in log2 units, delta, shift


@gluon.jit
def load_role(q_desc, k_desc, v_desc, do_desc, stats_desc, counter, ch, sizes, packing, cfg: gl.constexpr):
    """Draw tiles of keys and stream theirs: K, V, and Q and dO of each query tile of the group's heads."""
    wait_for_previous_kernel()  # the row statistics are there
    start_next_kernel()  # it needs them, too, and SMs that have nothing left to do
    num_work = count_work(sizes, packing)
    index = gl.program_id(0)
    turn = 0
    use = 0  # query tiles so far
    while index < num_work:
        work = locate_keys(index, sizes, packing, cfg)
        send(ch.work, turn, work)
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        tile = tiles.begin
        head = work.head * sizes.group_size
        for step in range(tiles.count() * sizes.group_size):
            load_queries(use, head, tile, q_desc, do_desc, stats_desc, work, ch, sizes, cfg)
            if step == 0:  # after the first queries, whose slot is free while the last keys are worked on
                load_keys(ch.k, turn, k_desc, cfg.PARTS, work, cfg)
                load_keys(ch.v, turn, v_desc, 1, work, cfg)
            use += 1
            head, tile = next_tile(head, tile, tiles)
        index = drawn(draw(counter))
        turn += 1
    finish(ch.work, turn, index, counter)


@gluon.jit
def load_queries(use, head, tile, q_desc, do_desc, stats_desc, work, ch, sizes, cfg: gl.constexpr):
    """Start TMA copies of Q, dO and the row statistics of a query tile, on one barrier."""
    PARTS: gl.constexpr = cfg.PARTS
    BYTES: gl.constexpr = PARTS * q_desc.block_type.nbytes + do_desc.block_type.nbytes
    slot = use % cfg.STAGES
    ch.q.acquire(use)
    bar_q = ch.q.full.index(slot)
    mbarrier.expect(bar_q, BYTES + stats_desc.block_type.nbytes)
    place = coords(work.start_q, work.seqlen_q, tile * cfg.BLOCK_M, head, work.batch, cfg.IS_PACKED)
    for part in gl.static_range(PARTS):
        load_tile(q_desc, place[:-1] + (part * cfg.PART_WIDTH,), bar_q, ch.q.part(use, part))  # noqa: RUF005
    load_tile(stats_desc, [scratch_tile(work, head, tile, sizes, cfg), 0], bar_q, ch.stats.index(slot))
    load_tile(do_desc, place, bar_q, ch.do.index(slot))


@gluon.jit
def load_keys(ring, turn, desc, PARTS: gl.constexpr, work, cfg: gl.constexpr):
    """Start TMA copies of a tile of keys or values: 64 rows for each warpgroup, on one barrier."""
    WIDTH: gl.constexpr = desc.block_shape[-1]
    ring.acquire(turn)
    bar_full = ring.full.index(0)
    mbarrier.expect(bar_full, 2 * PARTS * desc.block_type.nbytes)
    for w in gl.static_range(2):
        row = work.row + w * 64
        place = coords(work.start_k, work.seqlen_k, row, work.head, work.batch, cfg.IS_PACKED)
        for part in gl.static_range(PARTS):
            part_place = place[:-1] + (part * WIDTH,)  # noqa: RUF005
            load_tile(desc, part_place, bar_full, ring.part(turn, w * PARTS + part))


@gluon.jit
def start_s(W: gl.constexpr, zero, use, ch, cfg: gl.constexpr):
    """Start S^T = K Q^T [64, BLOCK_M] of a query tile that has arrived."""
    PARTS: gl.constexpr = cfg.PARTS
    s = gl.full([64, cfg.BLOCK_M], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_M))
    for part in gl.static_range(PARTS):
        k = ch.k.tiles.index(W * PARTS + part + zero).reshape([64, cfg.PART_WIDTH])
        q = ch.q.part(use, part).reshape([cfg.BLOCK_M, cfg.PART_WIDTH])
        s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def outputs(use, ch, cfg: gl.constexpr):
    """dO [BLOCK_M, BLOCK_DV] of a use."""
    return ch.do.index(use % cfg.STAGES).reshape([cfg.BLOCK_M, cfg.BLOCK_DV])


@gluon.jit
def finish_step(
    W: gl.constexpr, s, dv, zero, tile, key, own, work, use, ch, sizes, factors, cfg: gl.constexpr
):
    """(dS^T as operand, dV + P^T dO) of a query tile whose S^T is there."""
    dtype: gl.constexpr = ch.do.dtype
    stats = stats_of(use, ch, cfg)
    p, weight = probabilities(s, stats, None, tile, key, own, work, sizes, factors, dtype, cfg)
    v = ch.v.tiles.index(W + zero).reshape([64, cfg.BLOCK_DV])
    do = outputs(use, ch, cfg)
    p = pinned(gl.convert_layout(p, operand_layout(cfg.BLOCK_DV)))
    take_turn(W)
    if HOLDS_NEXT_S:
        dp = product(v, do.permute((1, 0)))
        dv = warpgroup_mma(p, do, dv, is_async=True)
        pass_turn(W)
        dp = warpgroup_mma_wait(1, deps=(dp,))  # P^T dO may still run
    else:  # dP takes registers only when P is complete
        dv = warpgroup_mma(p, do, dv, is_async=True)
        dp = product(v, do.permute((1, 0)))
        pass_turn(W)
        dv, dp = warpgroup_mma_wait(0, deps=(dv, dp))
    ds = pinned(score_gradient(weight, dp, stats, dtype, cfg))
    dv = warpgroup_mma_wait(0, deps=(dv,))
    return gl.convert_layout(ds, operand_layout(cfg.PART_WIDTH)), dv


@gluon.jit
def keys_role(W: gl.constexpr, dk_desc, dv_desc, ch, sizes, factors, cfg: gl.constexpr):
    """Warpgroup W: dK and dV of 64 keys of every tile that the load role draws."""
    turn = 0
    use = 0  # query tiles so far
    if W == 1:
        pass_turn(W)  # 0 begins
    work = receive(ch.work, turn)
    while work.row >= 0:
        key = work.row + W * 64
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        own = query_tiles(key, 64, work, sizes, cfg)
        tile = tiles.begin
        dk = zero_parts(cfg)
        dv = gl.full([64, cfg.BLOCK_DV], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_DV))
        ch.k.wait(turn)
        ch.q.wait(use)
        s = warpgroup_mma_wait(0, deps=(start_s(W, opaque_zero(turn), use, ch, cfg),))
        ch.v.wait(turn)
        for step in range(1, tiles.count() * sizes.group_size):
            zero = opaque_zero(step)
            ds, dv = finish_step(W, s, dv, zero, tile, key, own, work, use, ch, sizes, factors, cfg)
            ch.q.wait(use + 1)  # not while dK runs: a loop would make ptxas run all products one by one
            take_turn(W)
            dk = accumulate_parts(ds, ch.q, use, dk, cfg)
            if not HOLDS_NEXT_S:
                dk = await_parts(dk, 0, cfg)
            s = start_s(W, zero, use + 1, ch, cfg)
            pass_turn(W)
            dk = await_parts(dk, cfg.PARTS, cfg)  # S^T of the next may still run
            ch.q.release(use)
            s = warpgroup_mma_wait(0, deps=(s,))
            tile += 1
            if tile == tiles.end:
                tile = tiles.begin
            use += 1
        zero = opaque_zero(use)
        ds, dv = finish_step(W, s, dv, zero, tile, key, own, work, use, ch, sizes, factors, cfg)
        dk = scaled(await_parts(accumulate_parts(ds, ch.q, use, dk, cfg), 0, cfg), factors.scale)
        ch.q.release(use)
        use += 1
        place = coords(work.start_k, work.seqlen_k, key, work.head, work.batch, cfg.IS_PACKED)
        store_parts(dk, dk_desc, ch.k.tiles, W * cfg.PARTS + zero, place)
        store_parts((dv,), dv_desc, ch.v.tiles, W + zero, place)
        wait_for_stores(0)  # the tiles have been read
        ch.k.release(turn)
        ch.v.release(turn)
        turn += 1
        work = receive(ch.work, turn)


@gluon.jit
def store_parts(parts, desc, tiles, first, place):
    """Start TMA copies of dK or dV of 64 keys, through tiles that are no longer needed."""
    WIDTH: gl.constexpr = desc.block_shape[-1]
    for i in gl.static_range(len(parts)):
        tile = as_block(tiles.index(first + i), desc)
        tile.reshape([64, WIDTH]).store(parts[i].to(desc.dtype))
    fence_async_shared()  # the stores above are visible to the TMA copies
    for i in gl.static_range(len(parts)):
        store_tile(desc, place[:-1] + (i * WIDTH,), as_block(tiles.index(first + i), desc))  # noqa: RUF005


@gluon.jit(do_not_specialize=BackwardSizes._fields)
def attn_bwd_slim_keys_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, stats_desc,
    cu_seqlens_q, cu_seqlens_k, order, first_tile, counter,
    batch, seqlen_q, seqlen_k, group_size, num_slots, num_tiles, section, tiles_q,
    window_left, window_right, scale, scale_log2e, two_over_softcap_log2e, softcap_log2e, cfg: gl.constexpr,
):  # fmt: skip
    """dK and dV of every tile of 128 keys; the integers are those of `BackwardSizes`."""
    sizes = BackwardSizes(
        batch, seqlen_q, seqlen_k, group_size, num_slots, num_tiles, section, tiles_q,
        window_left, window_right,
    )  # fmt: skip
    packing = Packing(cu_seqlens_q, cu_seqlens_k, order, first_tile)
    factors = ScoreFactors(scale, scale_log2e, two_over_softcap_log2e, softcap_log2e)
    ch = Channels(
        make_work_ring(2),
        make_tile_ring(k_desc, 1, 2 * cfg.PARTS, 2),
        make_tile_ring(v_desc, 1, 2, 2),
        make_tile_ring(q_desc, cfg.STAGES, cfg.PARTS, 2),
        make_tiles(do_desc, cfg.STAGES),
        make_tiles(stats_desc, cfg.STAGES),
    )
    gl.warp_specialize(
        [
            (keys_role, (0, dk_desc, dv_desc, ch, sizes, factors, cfg)),
            (keys_role, (1, dk_desc, dv_desc, ch, sizes, factors, cfg)),
            (load_role, (q_desc, k_desc, v_desc, do_desc, stats_desc, counter, ch, sizes, packing, cfg)),
        ],
        [4, 1],
        [cfg.MMA_REGISTERS, cfg.LOAD_REGISTERS],
    )
