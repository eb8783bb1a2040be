"""What the roles of the Hopper forward exchange through shared memory, and the role that fills it by TMA.

A work tile that fails is done again, exactly: the mma roles send back whose rows failed, and `choose` takes
the last but one again before a new one.
"""

from tilewise.gpu.hopper.common.channel import Ring
from tilewise.gpu.hopper.common.compat import aggregate, gl, gluon
from tilewise.gpu.hopper.common.key_loads import key_coords, load_keys, queries_at, read_pages
from tilewise.gpu.hopper.common.ranges import key_tiles
from tilewise.gpu.hopper.common.scheduler import (
    count_work_tiles,
    fetch_add,
    locate,
    next_work,
    send,
    send_end,
)
from tilewise.gpu.hopper.mask.visits import entry_at, tile_of, visits_of


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
def load_role(q_desc, k_desc, v_desc, rings, counter, sizes, packing, cache, mask, cfg: gl.constexpr):
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
        visits = visits_of(tiles, work, mask, cfg)
        left = visits.count - 1
        j = tile_of(entry_at(left, visits, tiles, mask, cfg), left, tiles, cfg)
        next_left = gl.maximum(left - 1, 0)
        entry = entry_at(next_left, visits, tiles, mask, cfg)  # a tile ahead, as page numbers are
        k_coords = key_coords(j, read_pages(j, work, sizes, cache, cfg), work, head_k, sizes, cfg)
        pages = read_pages(tile_of(entry, next_left, tiles, cfg), work, sizes, cache, cfg)
        load_keys(rings.k, use, k_desc, k_coords, work, head_k, sizes.rows_k, cfg.D_CHUNKS, cfg)
        send(rings.work, work_use, work, is_exact)
        for w in gl.static_range(WARPGROUPS):
            q_coords = queries_at(work.row + w * ROWS, work.head, work, cfg)
            rings.q.load(work_use * WARPGROUPS + w, q_desc, q_coords, cfg.D_CHUNKS)
        while left > 0:
            v_coords = k_coords
            left -= 1
            k_coords = key_coords(tile_of(entry, left, tiles, cfg), pages, work, head_k, sizes, cfg)
            next_left = gl.maximum(left - 1, 0)
            entry = entry_at(next_left, visits, tiles, mask, cfg)
            pages = read_pages(tile_of(entry, next_left, tiles, cfg), work, sizes, cache, cfg)
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
