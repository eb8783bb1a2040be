"""Attention backward for Hopper: a tile of 128 keys stays, its queries stream by; two warpgroups of 64 keys.

    P^T = exp(K Q^T - lse),  dP^T = V dO^T,  dS^T = P^T * (dP^T - delta)
    dV += P^T dO,  dK += dS^T Q,  dQ = dS K                       (five products, by recomputation from lse)

    role          warps   does
    load_role     1       takes tiles of keys; starts TMA copies of K, the first Q and dO, V, more Q and dO
    mma_role x 2  4 each  the five products by wgmma; dK and dV of its 64 keys stay in registers
    add_role      1       adds finished dQ to a float32 scratch tensor in global memory, by TMA

Scores are computed transposed, [keys, queries], so that P^T and dS^T feed dV += P^T dO and dK += dS^T Q from
registers. dQ needs the dS of both warpgroups: each leaves its half in shared memory and computes half of dQ
from both. One query tile, a step, and the next:

    wgmma        S  dP  |                    | dV  dQ  dK
    arithmetic          | P = exp(S)  dS     |         dQ out

dQ of a query tile is summed in memory by the CTAs that have its keys: see `adds`. Where tiles of keys don't
fill the last wave, several CTAs share one: see `splits`.

FlashAttention-2 (Dao, 2023), algorithm 2; transposed scores, the order of a step and the dQ warp as in
FlashAttention-3.
"""

from tilewise.gpu.hopper.backward.adds import DQ_EMPTY, DQ_FULL, add_role
from tilewise.gpu.hopper.backward.arguments import BackwardSizes, Splits
from tilewise.gpu.hopper.backward.loads import (
    FIRST_STATE,
    await_slot,
    key_buffer,
    key_coords,
    key_slot,
    load_role,
    make_channels,
    query_buffer,
    query_slot,
    store_wide_keys,
    to_next_keys,
    to_next_queries,
)
from tilewise.gpu.hopper.backward.ranges import Step, mirrored, next_queries, query_tiles, staggered
from tilewise.gpu.hopper.backward.scores import (
    in_16_bits,
    opaque_zero,
    pinned,
    probabilities,
    score_gradient,
    weights,
)
from tilewise.gpu.hopper.backward.splits import queries_of, store_split
from tilewise.gpu.hopper.common.arguments import Extras, TransposedMap
from tilewise.gpu.hopper.common.biases import load_bias, load_slope
from tilewise.gpu.hopper.common.compat import (
    as_blocks,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    store_tile,
    sync_warpgroups,
    wait_for_own_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.dropout import load_seed, survivors
from tilewise.gpu.hopper.common.layouts import accumulator_layout, operand_layout
from tilewise.gpu.hopper.common.products import product
from tilewise.gpu.hopper.common.scheduler import receive
from tilewise.gpu.hopper.mask.steps import head_and_tile, load_step_bits, step_entry, walk_of
from tilewise.gpu.launch.entry import entry


@gluon.jit
def start_product(keys, queries, cfg: gl.constexpr):
    """Start S^T = K Q^T or dP^T = V dO^T [64, BLOCK_M] of tiles that have arrived."""
    q = queries.reshape([cfg.BLOCK_M, cfg.BLOCK_D])
    return product(keys.reshape([64, cfg.BLOCK_D]), q.permute((1, 0)))


@gluon.jit
def start_sum(operand, queries, gradient, step, cfg: gl.constexpr):
    """Start dV += P^T dO or dK += dS^T Q [64, BLOCK_D]; the left operand is in registers.

    The first step of a tile of keys does not look at what the one before has left there.
    """
    q = queries.reshape([cfg.BLOCK_M, cfg.BLOCK_D])
    return warpgroup_mma(operand, q, gradient, use_acc=step > 0, is_async=True)


@gluon.jit
def as_operand(x, cfg: gl.constexpr):
    """x [64, BLOCK_M] in 16 bits, as register operand."""
    return pinned(gl.convert_layout(x, operand_layout(cfg.BLOCK_D)))


@gluon.jit
def start_queries(W: gl.constexpr, use, keys, ch, cfg: gl.constexpr):
    """Start this warpgroup's half of dQ = dS K; both have staged their dS^T."""
    HALF: gl.constexpr = cfg.BLOCK_D * cfg.BLOCK_M // 128
    slot = use % 2
    dq = gl.full([64, HALF], 0.0, gl.float32, accumulator_layout(HALF))
    for w in gl.static_range(2):
        ds = ch.ds.index(w * 2 + slot)
        k = key_buffer(ch, keys, w, cfg).reshape([64, cfg.BLOCK_D])
        if cfg.BLOCK_M == 64:  # columns [W * HALF, W * HALF + HALF) of all queries
            k = k.slice(W * HALF, HALF, 1)
        else:  # all columns of queries [W * 64, W * 64 + 64)
            ds = ds.slice(W * 64, 64, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=w > 0, is_async=True)  # [64, HALF]
    return dq


@gluon.jit
def stage_dq(W: gl.constexpr, dq, zero, ch):
    """Stage dQ [64, 64] for the add role in the order of registers: each thread stores 16 bytes at a time."""
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([32, 128])
    ch.dq.index(W + zero).store(dq)


@gluon.jit
def stats_of(slot, ch, cfg: gl.constexpr):
    return ch.stats.index(slot).reshape([2 * cfg.BLOCK_M])


@gluon.jit
def start_step(
    W: gl.constexpr, step, use, work_use, slot, last, keys, at, tile, key, own, work, ch, sizes, factors,
    extras, cfg: gl.constexpr,
):  # fmt: skip
    """(P^T, the weight of dS^T, dP^T that may still run) of a query tile that has arrived.

    What the step before has staged is published, if there was one.
    """
    stats = stats_of(slot, ch, cfg)
    v = ch.v.tiles.index(work_use % cfg.K_STAGES * 2 + W)
    s = start_product(key_buffer(ch, keys, W, cfg), query_buffer(ch, slot, 0), cfg)
    if step == 0:
        ch.v.wait(work_use)
    if cfg.HAS_SOFTCAP or cfg.HAS_BIAS or cfg.SCORE is not None:  # whose arithmetic needs the registers of dP
        publish_step(W, use, last, ch)
        s = warpgroup_mma_wait(0, deps=(s,))
        p, weight = probabilities(
            s, stats, at, tile, key, own, work, sizes, factors, extras, ch.ds.dtype, cfg
        )
        dp = start_product(v, query_buffer(ch, slot, 1), cfg)
    else:  # float32 weights: no need to widen P again, element by element
        dp = start_product(v, query_buffer(ch, slot, 1), cfg)
        publish_step(W, use, last, ch)
        s = warpgroup_mma_wait(1, deps=(s,))
        p, _ = weights(s, stats, at, tile, key, own, work, sizes, factors, extras, ch.ds.dtype, cfg)
        weight = p
    return p, weight, dp


@gluon.jit
def publish_step(W: gl.constexpr, use, last, ch):
    """Publish what a step has staged, its half of dQ, and release a slot that is no longer needed.

    The slot is that of its query tile, or after the last one of a tile of keys that of K. The warpgroup's
    warps wait for each other here: the products of the next step run meanwhile, and TMA reads dQ while
    shared memory has least to do.
    """
    fence_async_shared()  # the stores of dQ are visible to the TMA addition
    named_barrier_arrive(DQ_FULL + W, use)
    wait_for_own_stores()  # dK and dV of the tile before have left their staging buffers, K and dS
    mbarrier.arrive(ch.slots.empty.index(last), count=1, pred=use > 0)


@gluon.jit
def stage_ds(W: gl.constexpr, weight, p, dp, use, slot, ch, cfg: gl.constexpr):
    """dS^T [64, BLOCK_M] of finished products, as register operand and in shared memory for dQ."""
    ds = pinned(score_gradient(weight, p, dp, stats_of(slot, ch, cfg), ch.ds.dtype, cfg))
    ch.ds.index(W * 2 + use % 2).store(ds)
    return gl.convert_layout(ds, operand_layout(cfg.BLOCK_D))


@gluon.jit
def mma_role(
    W: gl.constexpr, dk_desc, dv_desc, shifts, ch, sizes, factors, splits, mask, extras, cfg: gl.constexpr
):  # fmt: skip
    """Warpgroup W: dK and dV of 64 keys of every work tile, and half of its dQ."""
    seed = load_seed(extras, cfg)
    work_use = 0  # of the work ring
    use = 0  # query tiles so far
    last = 0  # the slot that the next step gives back
    work, start = receive(ch.work, work_use)
    state = 0 * work.row + FIRST_STATE
    dk = gl.full([64, cfg.BLOCK_D], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_D))
    dv = gl.full([64, cfg.BLOCK_D], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_D))
    while work.row >= 0:
        key = work.row + W * 64
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        own = query_tiles(key, 64, work, sizes, cfg)
        head, tile, steps, spread = queries_of(start, work, tiles, sizes, splits, cfg)
        walk = walk_of(work, tiles, spread, mask, sizes, cfg)
        entry = 0 * tile
        if cfg.HAS_MASK:
            steps = walk.count
            entry = step_entry(0, walk, mask)
        kept = surviving(head, tile, spread, entry, tiles, key, work, seed, extras, sizes, cfg)
        state = to_next_keys(state, cfg)
        state = await_slot(state, key_slot(state), ch)
        for step in range(steps):
            zero = opaque_zero(step)
            keys = key_slot(state) + zero
            slot = query_slot(state)
            state = to_next_queries(await_slot(state, slot, ch), cfg)
            has_hidden, words = 0, 0
            if cfg.HAS_MASK:
                head, tile = head_and_tile(entry, work, sizes)
                has_hidden = entry >> W & 1
                if cfg.MASK is None:
                    words = load_step_bits(W, entry, head, tile, work, mask, sizes, cfg)
                entry = step_entry(step + 1, walk, mask)  # there when the next step begins
            slope = load_slope(work.batch, head, extras, cfg)
            query = staggered(tile, tiles, spread, cfg) * cfg.BLOCK_M
            bias = load_bias(
                key, query, work.batch, head, work.seqlen_k, work.seqlen_q, extras, cfg.BLOCK_M, cfg
            )
            at = Step(shifts, head, tile, spread, tiles, has_hidden, words, kept, slope, bias)
            visited = mirrored(tile, tiles, cfg)
            p, weight, dp = start_step(
                W, step, use, work_use, slot, last, keys, at, visited, key, own, work, ch, sizes, factors,
                extras, cfg,
            )  # fmt: skip
            dp = warpgroup_mma_wait(0, deps=(dp,))
            ds = stage_ds(W, weight, p, dp, use, slot, ch, cfg)
            p = as_operand(in_16_bits(p, ch.ds.dtype, cfg) if p.dtype == gl.float32 else p, cfg)
            dv = start_sum(p, query_buffer(ch, slot, 1), dv, step, cfg)
            fence_async_shared()  # the stores of dS are visible to wgmma
            sync_warpgroups()
            ch.v.release(work_use, step == steps - 1)  # early, so that the next is there in time
            dq = start_queries(W, use, keys, ch, cfg)
            dk = start_sum(ds, query_buffer(ch, slot, 0), dk, step, cfg)
            if cfg.HAS_DROPOUT:  # of the next step, under the products of this one
                next_head, next_tile = next_queries(head, tile, tiles, work, sizes, cfg)
                kept = surviving(
                    next_head, next_tile, spread, entry, tiles, key, work, seed, extras, sizes, cfg
                )
            dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))  # dK still runs
            # the last dQ has been read. As late as can be: TMA is slow at that
            named_barrier_sync(DQ_EMPTY + W, use)
            stage_dq(W, dq, zero, ch)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            head, tile = next_queries(head, tile, tiles, work, sizes, cfg)
            use += 1
            last = slot
        mbarrier.arrive(ch.slots.empty.index(last), count=1)
        last = key_slot(state)
        if cfg.HAS_DROPOUT:
            dv = dv * extras.inverse_keep
        if cfg.IS_SPLIT and start >= 0:
            store_split(W, start, dk * factors.scale, dv, sizes, splits, cfg)
        elif cfg.WIDE_COLUMNS > 0:
            store_wide_keys(dk_desc, dk * factors.scale, W, work, sizes, 0, cfg.WIDE_COLUMNS, cfg)
            store_wide_keys(dv_desc, dv, W, work, sizes, 0, cfg.WIDE_COLUMNS_V, cfg)
        else:
            row_coords = key_coords(W, work, cfg)
            store_keys(
                W, dk * factors.scale, dv, last, opaque_zero(use), row_coords, dk_desc, dv_desc, ch, cfg
            )
        work_use += 1
        work, start = receive(ch.work, work_use)
    fence_async_shared()
    named_barrier_arrive(DQ_FULL + W, use)
    named_barrier_sync(DQ_EMPTY + W, use)
    wait_for_own_stores()


@gluon.jit
def surviving(head, number, spread, entry, tiles, key, work, seed, extras, sizes, cfg: gl.constexpr):
    """Which weights of 64 keys survive dropout, if there is one, in the query tile of a step."""
    kept = 0
    if cfg.HAS_DROPOUT:
        tile = staggered(number, tiles, spread, cfg)
        if cfg.HAS_MASK:
            head, tile = head_and_tile(entry, work, sizes)
        heads = (sizes.num_bh if cfg.IS_PACKED else sizes.num_bh // sizes.batch) * sizes.group_size
        column = tile * cfg.BLOCK_M
        kept = survivors(key, column, work.batch, head, heads, seed, extras, cfg.BLOCK_M, True, cfg)
    return kept


@gluon.jit
def store_keys(W: gl.constexpr, dk, dv, keys, zero, row_coords, dk_desc, dv_desc, ch, cfg: gl.constexpr):
    """Start copying dK and dV [64, BLOCK_D], staged in K and dS; rows past the end are cut."""
    BLOCKS: gl.constexpr = 2 * cfg.BLOCK_M // cfg.BLOCK_D  # of a descriptor, in the dS^T of a warpgroup
    sync_warpgroups()  # both have computed their last dQ from dS and K
    dk_buffer = key_buffer(ch, keys + zero, W, cfg)
    dk_buffer.reshape(dk.shape).store(dk.to(dk_desc.dtype))
    dv_buffer = as_blocks(ch.ds, 2 * BLOCKS, dv_desc).index(W * BLOCKS + zero)
    dv_buffer.reshape(dv.shape).store(dv.to(dv_desc.dtype))
    fence_async_shared()  # the stores above are visible to the TMA copies
    store_tile(dk_desc, row_coords, dk_buffer)
    store_tile(dv_desc, row_coords, dv_buffer)


@entry(gluon.jit)
def attn_bwd_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, stats_desc, shifts, semaphores,
    packing, counter, sizes: BackwardSizes, factors, splits: Splits, mask: TransposedMap, extras: Extras,
    cfg: gl.constexpr,
):  # fmt: skip
    """dK and dV of every key tile, and dQ / scale summed in float32.

    dk_desc and dv_desc are dk and dv themselves where those are in float32.
    """
    ch = make_channels(q_desc, v_desc, dq_desc, stats_desc, cfg)
    gl.warp_specialize(
        [
            (mma_role, (0, dk_desc, dv_desc, shifts, ch, sizes, factors, splits, mask, extras, cfg)),
            (mma_role, (1, dk_desc, dv_desc, shifts, ch, sizes, factors, splits, mask, extras, cfg)),
            (
                load_role,
                (q_desc, k_desc, v_desc, do_desc, stats_desc, counter, ch, sizes, packing, splits, mask, cfg),
            ),
            (add_role, (dq_desc, semaphores, ch, sizes, splits, mask, cfg)),
        ],
        [4, 1, 1],
        [cfg.MMA_REGISTERS, cfg.LOAD_REGISTERS, cfg.LOAD_REGISTERS],
    )
