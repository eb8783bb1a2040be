"""Key tiles of absorbed latent attention in shared memory, and the role that streams them there, by TMA.

A tile's 576 columns are four parts of 128, which are V, too, and the rest, which carry the rotary
positions. Parts have slots of their own in a ring: each is free for another tile once it has been read.
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
from tilewise.gpu.hopper.decode.load import box_place, load_pages
from tilewise.gpu.hopper.decode.plan import make_line, piece_at, worker_units
from tilewise.gpu.hopper.decode.rows import read_queries

PART = gl.constexpr(128)  # columns; with 256, ptxas finds too few registers for a product of the wide kernel
PARTS = gl.constexpr(4)
REST = gl.constexpr(64)  # columns


@aggregate
class Keys:
    """The rings of key tiles. Tile i's parts are uses 2 * i and 2 * i + 1 of each half's ring."""

    left: Ring  # KEY_SLOTS times [BLOCK_N, PART]
    right: Ring
    rest: Ring  # STAGES times [BLOCK_N, REST]


@gluon.jit
def make_keys(dtype: gl.constexpr, CONSUMERS: gl.constexpr, cfg: gl.constexpr):
    """CONSUMERS partitions release each part, one the rest."""
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, PART], dtype)
    rest_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, REST], dtype)
    left = gl.allocate_shared_memory(dtype, [cfg.KEY_SLOTS, cfg.BLOCK_N, PART], part_layout)
    right = gl.allocate_shared_memory(dtype, [cfg.KEY_SLOTS, cfg.BLOCK_N, PART], part_layout)
    rest = gl.allocate_shared_memory(dtype, [cfg.STAGES, cfg.BLOCK_N, REST], rest_layout)
    return Keys(
        make_ring(left, cfg.KEY_SLOTS, 1, CONSUMERS),
        make_ring(right, cfg.KEY_SLOTS, 1, CONSUMERS),
        make_ring(rest, cfg.STAGES, 1, 1),
    )


@gluon.jit
def allocate_queries(dtype: gl.constexpr, cfg: gl.constexpr):
    """Memory of one tile of queries: (four parts [BLOCK_M, PART], the rest [BLOCK_M, REST])."""
    part_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_M, PART], dtype)
    rest_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_M, REST], dtype)
    parts = gl.allocate_shared_memory(dtype, [PARTS, cfg.BLOCK_M, PART], part_layout)
    rest = gl.allocate_shared_memory(dtype, [cfg.BLOCK_M, REST], rest_layout)
    return parts, rest


@gluon.jit
def half_of(H: gl.constexpr, keys):
    """The ring of V's columns [256 H, 256 H + 256)."""
    if H == 0:
        ring = keys.left
    else:
        ring = keys.right
    return ring


@gluon.jit
def load_half_of_queries(H: gl.constexpr, q, queries, rest, use, piece, sizes, cfg: gl.constexpr):
    """Publish half H of a piece's queries, two parts [BLOCK_M, PART]; the first one with the rest of them."""
    LEFT: gl.constexpr = 2 * H
    left = read_queries(q, LEFT * PART, cfg.BLOCK_M, PART, piece, sizes, cfg)
    right = read_queries(q, (LEFT + 1) * PART, cfg.BLOCK_M, PART, piece, sizes, cfg)
    if H == 0:
        last = read_queries(q, PARTS * PART, cfg.BLOCK_M, REST, piece, sizes, cfg)
    queries.acquire(use)
    queries.part(use, LEFT).store(left)
    queries.part(use, LEFT + 1).store(right)
    if H == 0:
        rest.store(last)
    fence_async_shared()  # the stores above are visible to wgmma
    queries.publish(use)


@gluon.jit
def load_columns(desc, ring, use, place, first, BOXES: gl.constexpr):
    """Start TMA copies of boxes of a tile's columns, from `first` on, into one slot of a ring."""
    boxes = as_boxes(ring.tiles, ring.STAGES * BOXES, desc)
    slot = use % ring.STAGES
    ring.acquire(use)
    bar_full = ring.full.index(slot)
    mbarrier.expect(bar_full, BOXES * desc.block_type.nbytes)
    for box in gl.static_range(BOXES):
        coords = (1 << 30, place[0], place[1], 0, first + box * REST)
        load_tile(desc, coords, bar_full, boxes.index(slot * BOXES + box))


@gluon.jit
def load_role(L: gl.constexpr, desc, keys, queries, seqlens_k, page_table, sizes, cfg: gl.constexpr):
    """Stream half L of the columns of the worker's key tiles. Page numbers are read a tile ahead."""
    wait_for_previous_kernel()
    line = make_line(seqlens_k, sizes, cfg, 1)
    unit, end = worker_units(line, sizes)
    use = 0  # tiles so far
    if unit < end:
        queries.wait(0)  # read behind the keys of all rings, they would arrive behind them: 6 us later
    while unit < end:
        piece = piece_at(unit, end, line, sizes, cfg, 1)
        ptr_table = page_table
        held = 0
        if cfg.PAGE_SIZE > 0:
            ptr_table = page_table + gl.cast(piece.batch, gl.int64) * sizes.stride_page_table
            held = (piece.seqlen_k + (cfg.PAGE_SIZE - 1)) // cfg.PAGE_SIZE
        pages = load_pages(ptr_table, piece.tile, held, cfg)
        for n in range(piece.count):
            next_pages = load_pages(ptr_table, piece.tile + n + 1, held, cfg)  # answered during a wait
            pages = page_or_zero(pages, sizes)
            place = box_place(0, pages, piece, piece.tile + n, sizes.rows_k, cfg)
            if L == 0:
                load_columns(desc, keys.rest, use + n, place, PARTS * PART, 1)
            for part in gl.static_range(2):
                columns = (2 * L + part) * PART
                load_columns(desc, half_of(L, keys), 2 * (use + n) + part, place, columns, PART // REST)
            pages = next_pages
        use += piece.count
        unit += piece.units
