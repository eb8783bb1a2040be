"""The role of the Hopper backward that adds dQ of query tiles in memory, by TMA.

dQ of a query tile is summed by the CTAs that have its keys. Each tile has a semaphore, 0 at first. Who adds 1
and finds 0 stores, and adds STORED once that is in memory; who finds less than STORED waits for it, then
adds. Deterministic, the semaphore gives the order. A counter for each key head tells the next kernel when all
of a head's dQ is there.
"""

from tilewise.gpu.hopper.backward.ranges import (
    bh_counter,
    dq_order,
    mirrored,
    next_queries,
    query_tiles,
    scratch_tile,
    staggered,
)
from tilewise.gpu.hopper.backward.splits import queries_of
from tilewise.gpu.hopper.common.compat import (
    add_tile,
    gl,
    gluon,
    named_barrier_arrive,
    named_barrier_sync,
    start_next_kernel,
    store_tile,
    wait_for_previous_kernel,
    wait_for_stores,
    wait_for_writes,
)
from tilewise.gpu.hopper.common.scheduler import fetch_add, fetched, receive
from tilewise.gpu.hopper.mask.steps import head_and_tile, step_entry, walk_of

DQ_FULL = gl.constexpr(9)  # + W: named barrier, warpgroup W has staged its half of dQ
DQ_EMPTY = gl.constexpr(11)  # + W: its staging buffer has been read
STORED = gl.constexpr(1 << 24)  # in the semaphore of a query tile's dQ: its first summand is in memory


@gluon.jit
def add_role(dq_desc, semaphores, ch, sizes, splits, mask, cfg: gl.constexpr):
    """Add each query tile's dQ to the scratch tensor, half of it from each warpgroup.

    Nobody writes zeros: the first to claim a query tile, or deterministic the first in order, stores.
    """
    wait_for_previous_kernel()  # its counters are there
    if cfg.ENDS_UNEVENLY:
        start_next_kernel()  # its programs run on SMs that have nothing left to do
    use = 0
    work, start = receive(ch.work, use, 1)
    while work.row >= 0:
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        head, tile, steps, spread = queries_of(start, work, tiles, sizes, splits, cfg)
        scratch = scratch_tile(work, head, staggered(tile, tiles, spread, cfg), sizes, cfg)
        walk = walk_of(work, tiles, spread, mask, sizes, cfg)
        if cfg.HAS_MASK:
            steps = walk.count
            scratch = scratch_of_step(0, walk, work, mask, sizes, cfg)
        if not cfg.IS_DETERMINISTIC:
            ticket = fetch_add(semaphores + scratch, IS_ACQUIRE=True)
        for step in range(steps):
            semaphore = semaphores + scratch
            if cfg.IS_DETERMINISTIC:
                order = dq_order(mirrored(tile, tiles, cfg), work, sizes, cfg)
                await_semaphore(semaphore, order)
            else:
                order = fetched(ticket)
                if (order > 0) & (order < STORED):
                    await_semaphore(semaphore, STORED)
            for w in gl.static_range(2):
                named_barrier_sync(DQ_FULL + w)
                write_dq(dq_desc, (scratch * 2 + w) * 32, ch.dq.index(w), order)
            head, tile = next_queries(head, tile, tiles, work, sizes, cfg)
            scratch = scratch_tile(work, head, staggered(tile, tiles, spread, cfg), sizes, cfg)
            if cfg.HAS_MASK:
                scratch = scratch_of_step(step + 1, walk, work, mask, sizes, cfg)
            if not cfg.IS_DETERMINISTIC:  # early: the answer comes while this tile is read
                ticket = fetch_add(semaphores + scratch, step + 1 < steps, IS_ACQUIRE=True)
            for w in gl.static_range(2):
                wait_for_stores(1 - w)
                named_barrier_arrive(DQ_EMPTY + w)
            if cfg.IS_DETERMINISTIC:
                wait_for_writes()
                gl.atomic_add(semaphore, gl.where(order < 0, 0, 1), sem="release")
            elif order == 0:
                wait_for_writes()  # in memory, before others are told so
                gl.atomic_add(semaphore, STORED, sem="release")
        if cfg.ENDS_UNEVENLY:
            wait_for_writes()
            done = gl.where(start < 0, 1, steps)  # a tile's splits add up to all of its steps
            gl.atomic_add(bh_counter(semaphores, work, sizes, cfg), done, sem="release")
        use += 1
        work, start = receive(ch.work, use, 1)


@gluon.jit
def scratch_of_step(number, walk, work, mask, sizes, cfg: gl.constexpr):
    """Where the query tile of a step by a mask lies in the scratch tensors."""
    head, tile = head_and_tile(step_entry(number, walk, mask), work, sizes)
    return scratch_tile(work, head, tile, sizes, cfg)


@gluon.jit
def write_dq(dq_desc, row, smem, order):
    """Start copying half a dQ tile to memory: stored if nobody was there before, or added."""
    if order == 0:
        store_tile(dq_desc, [row, 0], smem)
    elif order > 0:  # deterministic, -1: no query sees these keys, and perhaps nobody has stored yet
        add_tile(dq_desc, [row, 0], smem)


@gluon.jit
def await_semaphore(semaphore, least):
    """Wait for others, each of which has started already: no deadlock.

    Whoever has claimed a tile waits for nobody before it stores. In order: CTAs take work tiles in it.
    """
    now = gl.atomic_add(semaphore, 0, sem="acquire")
    while now < least:
        now = gl.atomic_add(semaphore, 0, sem="acquire")
