"""Attention backward for Hopper: a tile of 128 keys stays, its queries stream by; two warpgroups of 64 keys.

    P^T = exp(K Q^T - lse),  dP^T = V dO^T,  dS^T = P^T * (dP^T - delta)
    dV += P^T dO,  dK += dS^T Q,  dQ = dS K                       (five products, by recomputation from lse)

    role          warps   does
    load_role     1       draws tiles of keys; starts TMA copies of K and V, then of Q and dO tile by tile
    mma_role x 2  4 each  the five products by wgmma; dK and dV of its 64 keys stay in registers
    add_role      1       adds finished parts of dQ to a float32 scratch tensor in global memory, by TMA

Scores are computed transposed, [keys, queries], so that P^T and dS^T feed dV += P^T dO and dK += dS^T Q from
registers. dQ needs the dS of both warpgroups: each leaves its half in shared memory and computes half of dQ
from both. One query tile, a step, and the next:

    wgmma        S  dP  |                    | dV  dQ  dK
    arithmetic          | P = exp(S)  dS     |         dQ out

FlashAttention-2 (Dao, 2023), algorithm 2; transposed scores, the order of a step and the dQ warp as in
FlashAttention-3.
"""

from tilewise.hopper.arguments import Packing
from tilewise.hopper.backward_arguments import BackwardSizes, ScoreFactors
from tilewise.hopper.backward_ranges import locate_keys, query_tiles, scratch_tile, turn_of_keys
from tilewise.hopper.backward_scores import opaque_zero, pinned, probabilities, score_gradient, weights
from tilewise.hopper.channel import Ring, make_tile_ring, make_tiles
from tilewise.hopper.compat import (
    add_tile,
    aggregate,
    as_block,
    as_blocks,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    meet,
    store_tile,
    wait_for_stores,
    wait_for_writes,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.hopper.forward import coords
from tilewise.hopper.layouts import accumulator_layout, operand_layout
from tilewise.hopper.schedule import Work, draw, drawn, leave, make_work_ring, receive, send

UNSPECIALIZED = BackwardSizes._fields


@aggregate
class Channels:
    """All that the roles exchange; shapes are of one slot."""

    work: Ring
    k: Ring  # two parts [64, BLOCK_D], one for each warpgroup
    v: Ring  # likewise
    q: Ring  # [BLOCK_M, BLOCK_D]; `do` and `stats` arrive on the same barrier
    do: gl.shared_memory_descriptor  # [1, BLOCK_M, 1, BLOCK_D] or packed [1, 1, ...] beside each q
    dq: Ring  # [32, 128] float32, a slot for each warpgroup: half of a tile's dQ in the order of registers
    stats: gl.shared_memory_descriptor  # [1, 2 * BLOCK_M] float32 beside each q: lse in units of log2, delta
    ds: gl.shared_memory_descriptor  # [64, BLOCK_M]: dS^T for two query tiles, of warpgroup 0, then of 1

    @gluon.constexpr_function
    def __init__(self, work, k, v, q, do, dq, stats, ds):
        self.work = work
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.dq = dq
        self.stats = stats
        self.ds = ds


@gluon.jit
def make_channels(q_desc, k_desc, v_desc, do_desc, dq_desc, stats_desc, cfg: gl.constexpr):
    """d = 128: K 32 + V 32 + 3 x (Q 16 + dO 16) + dS 2 x 16 + dQ 32 = 224 KB of 227.

    d = 64: 2 x (K 16 + V 16) + 2 x (Q 16 + dO 16) + dS 2 x 32 + dQ 32 = 224 KB, and 2 KB of stats.
    """
    dtype: gl.constexpr = q_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, cfg.BLOCK_M], dtype)
    ds = gl.allocate_shared_memory(dtype, [4, 64, cfg.BLOCK_M], ds_layout)
    stats_shape: gl.constexpr = [cfg.Q_STAGES] + stats_desc.block_shape  # noqa: RUF005
    stats = gl.allocate_shared_memory(gl.float32, stats_shape, stats_desc.layout)
    return Channels(
        make_work_ring(3),
        make_tile_ring(k_desc, cfg.K_STAGES, 2, 2),
        make_tile_ring(v_desc, cfg.K_STAGES, 2, 2),
        make_tile_ring(q_desc, cfg.Q_STAGES, 1, 2),
        make_tiles(do_desc, cfg.Q_STAGES),
        make_tile_ring(dq_desc, 2, 1, 1),
        stats,
        ds,
    )


@gluon.jit
def load_role(q_desc, k_desc, v_desc, do_desc, stats_desc, counter, ch, sizes, packing, cfg: gl.constexpr):
    """Draw work and stream its tiles: K, then Q and dO of each query tile of each head of the group."""
    if cfg.IS_PACKED:
        num_work = gl.load(packing.first_tile + sizes.batch) * sizes.num_slots
    else:
        num_work = sizes.num_tiles * sizes.num_slots
    index = gl.program_id(0)
    turn = 0  # tiles of keys so far
    use = 0  # of the q and do rings: query tiles so far
    while index < num_work:
        work = locate_keys(index, sizes, packing, cfg)
        send(ch.work, turn, work)
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        tile = tiles.begin
        head = work.head * sizes.group_size
        # queries first: their slot is free while the last tile of keys is still worked on
        load_queries(use, head, tile, q_desc, do_desc, stats_desc, work, ch, sizes, cfg)
        load_keys(ch.k, turn, k_desc, work, cfg)
        load_keys(ch.v, turn, v_desc, work, cfg)
        use += 1
        for _ in range(1, tiles.count() * sizes.group_size):
            head, tile = next_tile(head, tile, tiles)
            load_queries(use, head, tile, q_desc, do_desc, stats_desc, work, ch, sizes, cfg)
            use += 1
        index = drawn(draw(counter))
        turn += 1
    nothing = 0 * index
    send(ch.work, turn, Work(nothing - 1, nothing, nothing, nothing, nothing, nothing, nothing))
    leave(counter)


@gluon.jit
def next_tile(head, tile, tiles):
    """(head, tile) of the next query tile: after a head's last, the first of the group's next head."""
    is_last = tile + 1 == tiles.end
    return gl.where(is_last, head + 1, head), gl.where(is_last, tiles.begin, tile + 1)


@gluon.jit
def query_coords(head, tile, work, cfg: gl.constexpr):
    """TMA coordinates of a query tile."""
    return coords(work.start_q, work.seqlen_q, tile * cfg.BLOCK_M, head, work.batch, cfg.IS_PACKED)


@gluon.jit
def load_queries(use, head, tile, q_desc, do_desc, stats_desc, work, ch, sizes, cfg: gl.constexpr):
    """Start TMA copies of Q, dO and the row statistics of a query tile, on one barrier."""
    ch.q.acquire(use)
    bar_q = ch.q.full.index(use % cfg.Q_STAGES)
    mbarrier.expect(bar_q, 2 * q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
    place = query_coords(head, tile, work, cfg)
    load_tile(q_desc, place, bar_q, ch.q.part(use, 0))
    scratch = scratch_tile(work, head, tile, sizes, cfg)
    load_tile(stats_desc, [scratch, 0], bar_q, ch.stats.index(use % cfg.Q_STAGES))
    load_tile(do_desc, place, bar_q, ch.do.index(use % cfg.Q_STAGES))


@gluon.jit
def load_keys(ring, turn, desc, work, cfg: gl.constexpr):
    """Start TMA copies of a tile of keys or values: a half for each warpgroup, on one barrier."""
    ring.acquire(turn)
    bar_full = ring.full.index(turn % cfg.K_STAGES)
    mbarrier.expect(bar_full, 2 * desc.block_type.nbytes)
    for w in gl.static_range(2):
        row = work.row + w * 64
        place = coords(work.start_k, work.seqlen_k, row, work.head, work.batch, cfg.IS_PACKED)
        load_tile(desc, place, bar_full, ring.part(turn, w))


@gluon.jit
def start_product(W: gl.constexpr, keys, queries, use, part, cfg: gl.constexpr):
    """Start S^T = K Q^T or dP^T = V dO^T [64, BLOCK_M] of a query tile that has arrived."""
    zeros = gl.full([64, cfg.BLOCK_M], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_M))
    k = keys.tiles.index(W + part).reshape([64, cfg.BLOCK_D])
    q = queries.index(use % cfg.Q_STAGES).reshape([cfg.BLOCK_M, cfg.BLOCK_D])
    return warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def start_sum(operand, queries, gradient, use, cfg: gl.constexpr):
    """Start dV += P^T dO or dK += dS^T Q [64, BLOCK_D]; the left operand is in registers."""
    q = queries.index(use % cfg.Q_STAGES).reshape([cfg.BLOCK_M, cfg.BLOCK_D])
    return warpgroup_mma(operand, q, gradient, is_async=True)


@gluon.jit
def as_operand(x, cfg: gl.constexpr):
    """x [64, BLOCK_M] in 16 bits, as register operand."""
    return pinned(gl.convert_layout(x, operand_layout(cfg.BLOCK_D)))


@gluon.jit
def start_queries(W: gl.constexpr, use, part, ch, cfg: gl.constexpr):
    """Start this warpgroup's half of dQ = dS K; both have left their dS^T."""
    HALF: gl.constexpr = cfg.BLOCK_D * cfg.BLOCK_M // 128
    slot = use % 2
    dq = gl.full([64, HALF], 0.0, gl.float32, accumulator_layout(HALF))
    for w in gl.static_range(2):
        ds = ch.ds.index(w * 2 + slot)
        k = ch.k.tiles.index(w + part).reshape([64, cfg.BLOCK_D])
        if cfg.BLOCK_M == 64:  # columns [W * HALF, W * HALF + HALF) of all queries
            k = k.slice(W * HALF, HALF, 1)
        else:  # all columns of queries [W * 64, W * 64 + 64)
            ds = ds.slice(W * 64, 64, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)  # [64, HALF]
    return dq


@gluon.jit
def leave_dq(W: gl.constexpr, dq, use, zero, ch):
    """Leave dQ [64, 64] for the add role in the order of registers: each thread stores 16 bytes at a time.

    The slot was acquired before dV started: a wait between the start of a product with a register operand
    and its end would make ptxas run all products one by one.
    """
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([32, 128])
    ch.dq.tiles.index(W + zero).store(dq)


@gluon.jit
def stats_of(use, ch, cfg: gl.constexpr):
    return ch.stats.index(use % cfg.Q_STAGES).reshape([2 * cfg.BLOCK_M])


@gluon.jit
def start_step(
    W: gl.constexpr, use, has_last, part, tile, key, own, work, ch, sizes, factors, cfg: gl.constexpr
):
    """(P^T, the weight of dS^T, dP^T that may still run) of a query tile that has arrived.

    What the step before has left is passed on, if there was one.
    """
    stats = stats_of(use, ch, cfg)
    s = start_product(W, ch.k, ch.q.tiles, use, part, cfg)
    if cfg.HAS_SOFTCAP:  # whose arithmetic needs the registers of dP
        pass_on(W, use - 1, has_last, ch)
        s = warpgroup_mma_wait(0, deps=(s,))
        p, weight = probabilities(s, stats, tile, key, own, work, sizes, factors, ch.ds.dtype, cfg)
        dp = start_product(W, ch.v, ch.do, use, part, cfg)
    else:  # float32 weights: no need to widen P again, element by element
        dp = start_product(W, ch.v, ch.do, use, part, cfg)
        pass_on(W, use - 1, has_last, ch)
        s = warpgroup_mma_wait(1, deps=(s,))
        p, _ = weights(s, stats, tile, key, own, work, sizes, factors, cfg)
        weight = p
    return p, weight, dp


@gluon.jit
def pass_on(W: gl.constexpr, use, when, ch):
    """Hand over what a step has left: its part of dQ, and its query tile, which is no longer needed.

    The warpgroup's warps wait for each other here: the products of the next step run meanwhile.
    """
    fence_async_shared()  # the stores of dQ are visible to the TMA addition
    ch.dq.publish(2 * use + W, when)
    ch.q.release(use, when)


@gluon.jit
def leave_ds(W: gl.constexpr, weight, dp, use, ch, cfg: gl.constexpr):
    """dS^T [64, BLOCK_M] of finished products, as register operand and in shared memory for dQ."""
    ds = pinned(score_gradient(weight, dp, stats_of(use, ch, cfg), ch.ds.dtype, cfg))
    ch.ds.index(W * 2 + use % 2).store(ds)
    return gl.convert_layout(ds, operand_layout(cfg.BLOCK_D))


@gluon.jit
def mma_role(W: gl.constexpr, dk_desc, dv_desc, ch, sizes, factors, cfg: gl.constexpr):
    """Warpgroup W: dK and dV of 64 keys of every tile that the load role draws, and half of its dQ."""
    turn = 0
    use = 0  # query tiles so far
    work = receive(ch.work, turn)
    while work.row >= 0:
        key = work.row + W * 64
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        own = query_tiles(key, 64, work, sizes, cfg)
        dk = gl.full([64, cfg.BLOCK_D], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_D))
        dv = gl.full([64, cfg.BLOCK_D], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_D))
        tile = tiles.begin
        head = work.head * sizes.group_size
        ch.k.wait(turn)
        ch.v.wait(turn)
        # dK and dV of the last tile have left the memory that dS and dQ need now. One thread started their
        # stores and waits for them; a barrier of the warpgroup, part of this call, holds back the others
        wait_for_stores(0)
        for step in range(tiles.count() * sizes.group_size):
            zero = opaque_zero(step)
            part = turn % cfg.K_STAGES * 2 + zero
            ch.q.wait(use)
            p, weight, dp = start_step(W, use, step > 0, part, tile, key, own, work, ch, sizes, factors, cfg)
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = leave_ds(W, weight, dp, use, ch, cfg)
            p = as_operand(p.to(ch.ds.dtype), cfg)
            ch.dq.acquire(2 * use + W)  # late, as the last dQ is still read; but not while dV or dK runs
            dv = start_sum(p, ch.do, dv, use, cfg)
            fence_async_shared()  # the stores of dS are visible to wgmma
            meet()
            dq = start_queries(W, use, part, ch, cfg)
            dk = start_sum(ds, ch.q.tiles, dk, use, cfg)
            dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))  # dK still runs
            leave_dq(W, dq, use, zero, ch)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            head, tile = next_tile(head, tile, tiles)
            use += 1
        pass_on(W, use - 1, True, ch)
        zero = opaque_zero(use)
        place = coords(work.start_k, work.seqlen_k, key, work.head, work.batch, cfg.IS_PACKED)
        meet()  # both have computed their last dQ from dS
        store_keys(dk * factors.scale, own_ds(W, zero, ch, dk_desc, cfg), dk_desc, place)
        if cfg.BLOCK_D == 64:  # room for both
            store_keys(dv, own_ds(W, zero + 1, ch, dv_desc, cfg), dv_desc, place)
        else:
            ch.dq.acquire(2 * use + W)
            store_keys(dv, as_block(ch.dq.tiles.index(W + zero), dv_desc), dv_desc, place)
        ch.k.release(turn)  # here, so that TMA has the stores before the next loads
        ch.v.release(turn)
        turn += 1
        work = receive(ch.work, turn)
    wait_for_stores(0)


@gluon.jit
def own_ds(W: gl.constexpr, zero, ch, desc, cfg: gl.constexpr):
    """The shared memory of this warpgroup's dS^T as a block of a descriptor."""
    BLOCKS: gl.constexpr = 2 * cfg.BLOCK_M // cfg.BLOCK_D  # in the dS^T of a warpgroup
    return as_blocks(ch.ds, 2 * BLOCKS, desc).index(W * BLOCKS + zero)


@gluon.jit
def store_keys(gradient, smem, desc, place):
    """Start a TMA copy of dK or dV [64, BLOCK_D] through shared memory; rows past the end are cut."""
    smem.reshape(gradient.shape).store(gradient.to(desc.dtype))
    fence_async_shared()  # the stores above are visible to the TMA copy
    store_tile(desc, place, smem)


@gluon.jit
def add_role(dq_desc, turns, ch, sizes, cfg: gl.constexpr):
    """Add each query tile's dQ to the scratch tensor, half of it from each warpgroup."""
    turn = 0
    use = 0
    work = receive(ch.work, turn, 1)
    while work.row >= 0:
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        tile = tiles.begin
        head = work.head * sizes.group_size
        for _ in range(tiles.count() * sizes.group_size):
            scratch = scratch_tile(work, head, tile, sizes, cfg)
            if cfg.IS_DETERMINISTIC:
                own_turn = turn_of_keys(tile, work, sizes, cfg)
                await_turn(turns + scratch, own_turn)
            for w in gl.static_range(2):
                ch.dq.wait(2 * use + w)
                add_tile(dq_desc, [(scratch * 2 + w) * 32, 0], ch.dq.tiles.index(w))
            for w in gl.static_range(2):
                wait_for_stores(1 - w)  # the slot has been read
                ch.dq.release(2 * use + w)
            if cfg.IS_DETERMINISTIC:
                wait_for_writes()
                gl.atomic_add(turns + scratch, gl.where(own_turn < 0, 0, 1), sem="release")
            use += 1
            head, tile = next_tile(head, tile, tiles)
        turn += 1
        work = receive(ch.work, turn, 1)


@gluon.jit
def await_turn(ptr, turn):
    """Wait until `turn` others have added. They started earlier: work is drawn in order, so no deadlock."""
    now = gl.atomic_add(ptr, 0, sem="acquire")
    while now < turn:
        now = gl.atomic_add(ptr, 0, sem="acquire")


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attn_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, stats_desc, turns,
    cu_seqlens_q, cu_seqlens_k, order, first_tile, counter,
    batch, seqlen_q, seqlen_k, group_size, num_slots, num_tiles, section, tiles_q,
    window_left, window_right, scale, scale_log2e, two_over_softcap_log2e, softcap_log2e, cfg: gl.constexpr,
):  # fmt: skip
    """dK and dV of every key tile, and dQ / scale summed in float32; the integers are `BackwardSizes`."""
    sizes = BackwardSizes(
        batch, seqlen_q, seqlen_k, group_size, num_slots, num_tiles, section, tiles_q,
        window_left, window_right,
    )  # fmt: skip
    packing = Packing(cu_seqlens_q, cu_seqlens_k, order, first_tile)
    factors = ScoreFactors(scale, scale_log2e, two_over_softcap_log2e, softcap_log2e)
    ch = make_channels(q_desc, k_desc, v_desc, do_desc, dq_desc, stats_desc, cfg)
    gl.warp_specialize(
        [
            (mma_role, (0, dk_desc, dv_desc, ch, sizes, factors, cfg)),
            (mma_role, (1, dk_desc, dv_desc, ch, sizes, factors, cfg)),
            (load_role, (q_desc, k_desc, v_desc, do_desc, stats_desc, counter, ch, sizes, packing, cfg)),
            (add_role, (dq_desc, turns, ch, sizes, cfg)),
        ],
        [4, 1, 1],
        [cfg.MMA_REGISTERS, cfg.LOAD_REGISTERS, cfg.LOAD_REGISTERS],
    )
