"""What the roles of the Hopper backward exchange through shared memory, and the role that fills it by TMA.

Tiles of queries and of keys share four slots. Head sizes up to 64: two for each. Up to 128 a slot holds Q and
dO of one query tile, or K, and only V has a buffer of its own. Queries have three slots. The next tile of
keys takes the one that is free next, while the last queries of the tile before are still worked on; the slot
of the old keys then goes to the queries. Load and mma roles follow the same integer, the state:

    bits 0-1, 2-3, 4-5    slots of the next query tiles, in order
    bits 6-7              slot of the keys
    bits 8-11             parity of each slot's phase
"""

from tilewise.gpu.hopper.backward.ranges import next_queries, query_tiles, scratch_tile, staggered
from tilewise.gpu.hopper.backward.splits import (
    count_indices,
    first_index,
    locate_split,
    next_index,
    queries_of,
)
from tilewise.gpu.hopper.common.channel import Ring, make_ring, make_tile_ring, make_tiles
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    as_tiles,
    gl,
    gluon,
    load_tile,
    mbarrier,
    wait_for_previous_kernel,
)
from tilewise.gpu.hopper.common.key_loads import keys_at, queries_at
from tilewise.gpu.hopper.common.products import store_wide
from tilewise.gpu.hopper.common.scheduler import make_work_ring, send, send_end
from tilewise.gpu.hopper.mask.steps import head_and_tile, step_entry, walk_of

FIRST_STATE = gl.constexpr(0b11_10_01_00)


@aggregate
class Channels:
    """All that the roles exchange."""

    work: Ring
    slots: Ring  # of `query_buffer` and `key_buffer`
    v: Ring  # two tiles [64, BLOCK_D], one for each warpgroup
    dq: gl.shared_memory_descriptor  # [32, 128] float32 a warpgroup: half of dQ, in the order of registers
    stats: gl.shared_memory_descriptor  # [1, 2 * BLOCK_M] float32 for each slot: lse in units of log2, delta
    ds: gl.shared_memory_descriptor  # [64, BLOCK_M]: dS^T for two query tiles, of warpgroup 0, then of 1


@gluon.jit
def make_channels(q_desc, v_desc, dq_desc, stats_desc, cfg: gl.constexpr):
    """d = 128: 4 x 32 + V 32 + dS 2 x 16 + dQ 32 = 224 KB of 227.

    d = 64: 2 x (Q 16 + dO 16) + 2 x (K 16 + V 16) + dS 2 x 32 + dQ 32 = 224 KB, and 2 KB of stats.
    """
    dtype: gl.constexpr = q_desc.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, cfg.BLOCK_M], dtype)
    ds = gl.allocate_shared_memory(dtype, [4, 64, cfg.BLOCK_M], ds_layout)
    stats = make_tiles(stats_desc, 4 if cfg.K_STAGES == 1 else 2)
    BUFFERS: gl.constexpr = 8 if cfg.K_STAGES == 1 else 6
    return Channels(
        make_work_ring(3),
        make_ring(make_tiles(q_desc, BUFFERS), 4, 2, 2),
        make_tile_ring(v_desc, cfg.K_STAGES, 2, 2),
        make_tiles(dq_desc, 2),
        stats,
        ds,
    )


@gluon.jit
def query_buffer(ch, slot, n):
    """Q (n = 0) or dO (1) of a slot: a box of the descriptor, [BLOCK_M, BLOCK_D]."""
    return ch.slots.tiles.index(2 * slot + n)


@gluon.jit
def key_buffer(ch, slot, w, cfg: gl.constexpr):
    """K of warpgroup w in a slot: a box as those of V, [64, BLOCK_D]."""
    buffers = as_tiles(ch.slots.tiles, 8 if cfg.K_STAGES == 1 else 12, ch.v.tiles.index(0))
    return buffers.index(2 * slot + w + (0 if cfg.K_STAGES == 1 else 4))


@gluon.jit
def to_next_queries(state, cfg: gl.constexpr):
    """The state in which the next query tile's slot is at the front."""
    if cfg.K_STAGES == 1:
        moved = (state & 0xFC0) | ((state >> 2) & 0xF) | ((state & 3) << 4)
    else:
        moved = (state & 0xFF0) | ((state >> 2) & 3) | ((state & 3) << 2)
    return moved


@gluon.jit
def to_next_keys(state, cfg: gl.constexpr):
    """The state in which the next tile of keys has its slot."""
    if cfg.K_STAGES == 1:
        moved = (state & 0xF00) | ((state >> 2) & 0x3F) | ((state & 3) << 6)
    else:
        moved = state ^ 0x40
    return moved


@gluon.jit
def query_slot(state):
    return state & 3


@gluon.jit
def key_slot(state):
    return (state >> 6) & 3


@gluon.jit
def await_slot(state, slot, ch):
    """Wait until the slot's tile has arrived. The state of its next phase."""
    mbarrier.wait(ch.slots.full.index(slot), (state >> (slot + 8)) & 1)
    return state ^ (256 << slot)


@gluon.jit
def acquire_slot(state, slot, ch):
    """Wait until the slot is free. The barrier of its phase, and the state of its next one."""
    mbarrier.wait(ch.slots.empty.index(slot), (state >> (slot + 8)) & 1 ^ 1)
    return ch.slots.full.index(slot), state ^ (256 << slot)


@gluon.jit
def load_role(
    q_desc, k_desc, v_desc, do_desc, stats_desc, counter, ch, sizes, packing, splits, mask, cfg: gl.constexpr
):
    """Take work tiles and stream theirs: K, V, and Q and dO of each query tile of each head of the group."""
    num_work_tiles = count_indices(sizes, packing, splits, cfg)
    index = first_index(gl.program_id(0), splits, cfg)
    work_use = 0  # of the work ring: tiles of keys so far
    state = 0 * index + FIRST_STATE
    while index < num_work_tiles:
        work, start = locate_split(index, sizes, packing, splits, cfg)
        send(ch.work, work_use, work, start)
        tiles = query_tiles(work.row, cfg.BLOCK_N, work, sizes, cfg)
        head, tile, steps, spread = queries_of(start, work, tiles, sizes, splits, cfg)
        state = load_keys(state, k_desc, work, ch, cfg)
        if work_use == 0:
            wait_for_previous_kernel()  # the row statistics are there
        walk = walk_of(work, tiles, spread, mask, sizes, cfg)
        first_head, first = head, staggered(tile, tiles, spread, cfg)
        if cfg.HAS_MASK:
            steps = walk.count
            first_head, first = head_and_tile(step_entry(0, walk, mask), work, sizes)
        state = load_queries(state, first_head, first, q_desc, do_desc, stats_desc, work, ch, sizes, cfg)
        first, second = key_coords(0, work, cfg), key_coords(1, work, cfg)
        ch.v.load_halves(work_use, v_desc, first, second, 1)  # last, as its slot is the last to be free
        for step in range(1, steps):
            head, tile = next_queries(head, tile, tiles, work, sizes, cfg)
            next_head, visited = head, staggered(tile, tiles, spread, cfg)
            if cfg.HAS_MASK:
                next_head, visited = head_and_tile(step_entry(step, walk, mask), work, sizes)
            state = load_queries(state, next_head, visited, q_desc, do_desc, stats_desc, work, ch, sizes, cfg)
        index = next_index(index, steps, num_work_tiles, splits, counter, cfg)
        work_use += 1
    send_end(ch.work, work_use, index, counter)


@gluon.jit
def load_queries(state, head, tile, q_desc, do_desc, stats_desc, work, ch, sizes, cfg: gl.constexpr):
    """Start TMA copies of Q, dO and the row statistics of a query tile, on one barrier."""
    slot = query_slot(state)
    bar_full, state = acquire_slot(state, slot, ch)
    mbarrier.expect(bar_full, 2 * q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
    row_coords = queries_at(tile * cfg.BLOCK_M, head, work, cfg)
    load_tile(q_desc, row_coords, bar_full, query_buffer(ch, slot, 0))
    scratch = scratch_tile(work, head, tile, sizes, cfg)
    load_tile(stats_desc, [scratch, 0], bar_full, ch.stats.index(slot))
    load_tile(do_desc, row_coords, bar_full, query_buffer(ch, slot, 1))
    return to_next_queries(state, cfg)


@gluon.jit
def load_keys(state, k_desc, work, ch, cfg: gl.constexpr):
    """Start TMA copies of a tile of keys: a half for each warpgroup, on one barrier."""
    state = to_next_keys(state, cfg)
    slot = key_slot(state)
    bar_full, state = acquire_slot(state, slot, ch)
    mbarrier.expect(bar_full, 2 * k_desc.block_type.nbytes)
    for w in gl.static_range(2):
        load_tile(k_desc, key_coords(w, work, cfg), bar_full, key_buffer(ch, slot, w, cfg))
    return state


@gluon.jit
def key_coords(w, work, cfg: gl.constexpr):
    """TMA coordinates of the keys of warpgroup w."""
    return keys_at(work.row + w * 64, work.head, work, cfg)


@gluon.jit
def store_wide_keys(
    target, sums, w, work, sizes, FIRST: gl.constexpr, COLUMNS: gl.constexpr, cfg: gl.constexpr
):
    """Store columns from FIRST on of a gradient of the keys of warpgroup w in float32: see `store_wide`."""
    start = work.start_k if cfg.IS_PACKED else work.batch * sizes.seqlen_k
    heads = sizes.num_bh if cfg.IS_PACKED else sizes.num_bh // sizes.batch
    store_wide(target, sums, work.row + w * 64, work.seqlen_k, start, work.head, heads, FIRST, COLUMNS)
