"""Key tiles of absorbed latent attention in shared memory, and the role that streams them there, by TMA.

A tile's 576 columns are four chunks of 128, which are V, too, and 64 that carry RoPE. Chunks have slots of
their own in a ring: each is free for another tile once it has been read.
"""

from tilewise.gpu.hopper.common.channel import Ring, make_ring
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    as_boxes,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    wait_for_previous_kernel,
)
from tilewise.gpu.hopper.common.guards import page_or_zero
from tilewise.gpu.hopper.decode.load import box_rows, load_pages
from tilewise.gpu.hopper.decode.rows import read_queries
from tilewise.gpu.hopper.decode.stream_k import make_schedule, split_at, worker_units

CHUNK = gl.constexpr(128)  # columns; with 256, ptxas finds too few registers for a product
CHUNKS = gl.constexpr(4)
ROPE = gl.constexpr(64)  # columns


@aggregate
class Keys:
    """The rings of key tiles. Tile i's chunks are uses 2 * i and 2 * i + 1 of each half's ring."""

    left: Ring  # KEY_SLOTS times [BLOCK_N, CHUNK]
    right: Ring
    rope: Ring  # STAGES times [BLOCK_N, ROPE]


@gluon.jit
def make_keys(dtype: gl.constexpr, cfg: gl.constexpr):
    """Two partitions release each chunk, one the RoPE columns."""
    chunk_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, CHUNK], dtype)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, ROPE], dtype)
    left = gl.allocate_shared_memory(dtype, [cfg.KEY_SLOTS, cfg.BLOCK_N, CHUNK], chunk_layout)
    right = gl.allocate_shared_memory(dtype, [cfg.KEY_SLOTS, cfg.BLOCK_N, CHUNK], chunk_layout)
    rope = gl.allocate_shared_memory(dtype, [cfg.STAGES, cfg.BLOCK_N, ROPE], rope_layout)
    return Keys(
        make_ring(left, cfg.KEY_SLOTS, 1, 2),
        make_ring(right, cfg.KEY_SLOTS, 1, 2),
        make_ring(rope, cfg.STAGES, 1, 1),
    )


@gluon.jit
def allocate_queries(dtype: gl.constexpr):
    """Memory of one tile of queries: (four chunks [64, CHUNK], RoPE [64, ROPE])."""
    chunk_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, CHUNK], dtype)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROPE], dtype)
    chunks = gl.allocate_shared_memory(dtype, [CHUNKS, 64, CHUNK], chunk_layout)
    rope = gl.allocate_shared_memory(dtype, [64, ROPE], rope_layout)
    return chunks, rope


@gluon.jit
def half_of(H: gl.constexpr, keys):
    """The ring of V's columns [256 H, 256 H + 256)."""
    if H == 0:
        ring = keys.left
    else:
        ring = keys.right
    return ring


@gluon.jit
def load_half_of_queries(H: gl.constexpr, q, queries, rope, use, split, sizes, cfg: gl.constexpr):
    """Publish half H of a split's queries, two chunks [64, CHUNK]; the first half with RoPE as well."""
    LEFT: gl.constexpr = 2 * H
    left = read_queries(q, LEFT * CHUNK, CHUNK, split, sizes, cfg)
    right = read_queries(q, (LEFT + 1) * CHUNK, CHUNK, split, sizes, cfg)
    if H == 0:
        last = read_queries(q, CHUNKS * CHUNK, ROPE, split, sizes, cfg)
    queries.acquire(use)
    queries.chunk(use, LEFT).store(left)
    queries.chunk(use, LEFT + 1).store(right)
    if H == 0:
        rope.store(last)
    fence_async_shared()  # the stores above are visible to wgmma
    queries.publish(use)


@gluon.jit
def load_columns(desc, ring, use, rows, first, BOXES: gl.constexpr):
    """Start TMA copies of boxes of a tile's columns, from `first` on, into one slot of a ring."""
    boxes = as_boxes(ring.tiles, ring.STAGES * BOXES, desc)
    slot = use % ring.STAGES
    ring.acquire(use)
    bar_full = ring.full.index(slot)
    mbarrier.expect(bar_full, BOXES * desc.block_type.nbytes)
    for box in gl.static_range(BOXES):
        coords = (rows[0], rows[1], rows[2], 0, first + box * ROPE)
        load_tile(desc, coords, bar_full, boxes.index(slot * BOXES + box))


@gluon.jit
def load_role(L: gl.constexpr, desc, keys, queries, cache, sizes, cfg: gl.constexpr):
    """Stream half L of the columns of the worker's key tiles. Page numbers are read a tile ahead."""
    wait_for_previous_kernel()
    schedule = make_schedule(cache, sizes, cfg, 1)
    unit, end = worker_units(schedule, sizes)
    use = 0  # tiles so far
    if unit < end:
        queries.wait(0)  # read behind the keys of all rings, they would arrive behind them: 6 us later
    while unit < end:
        split = split_at(unit, end, schedule, sizes, cfg, 1)
        ptr_table = cache.page_table
        if cfg.PAGE_SIZE > 0:
            ptr_table = cache.page_table + gl.cast(split.batch, gl.int64) * sizes.stride_page_table
        pages = load_pages(ptr_table, split.tile, split, cfg)
        for n in range(split.count):
            next_pages = load_pages(ptr_table, split.tile + n + 1, split, cfg)  # answered during a wait
            pages = page_or_zero(pages, sizes)
            rows = box_rows(0, pages, split, split.tile + n, sizes.rows_k, cfg)
            if L == 0:
                load_columns(desc, keys.rope, use + n, rows, CHUNKS * CHUNK, 1)
            for chunk in gl.static_range(2):
                columns = (2 * L + chunk) * CHUNK
                load_columns(desc, half_of(L, keys), 2 * (use + n) + chunk, rows, columns, CHUNK // ROPE)
            pages = next_pages
        use += split.count
        unit += split.units
