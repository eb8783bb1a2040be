"""The load role of the decoding kernel: key tiles of a worker's splits into rings, by TMA.

The load warps work on alternate tiles, each on its keys and values: pages of 16 need 8 copies. A full page of
head size 128 takes one copy of keys and one of values, with both halves of its columns, since tiles of small
pages lie in shared memory 8 rows by 8 rows. Page numbers are read a tile ahead.
"""

from tilewise.gpu.hopper.common.compat import (
    as_boxes,
    as_boxes_by_rows,
    as_pages,
    gl,
    gluon,
    load_tile,
    mbarrier,
    wait_for_previous_kernel,
)
from tilewise.gpu.hopper.common.guards import page_or_zero
from tilewise.gpu.hopper.common.ranges import hidden_rows, tile_origin
from tilewise.gpu.hopper.decode.stream_k import make_schedule, split_at, worker_units


@gluon.jit
def load_pages(ptr_table, tile, split, cfg: gl.constexpr):
    """Numbers of PAGE_LANES pages from key tile `tile` on; 0 for those beyond the sequence's.

    They are not looked at here, where that would wait for them.
    """
    page = gl.arange(0, cfg.PAGE_LANES, gl.BlockedLayout([1], [32], [1], [0]))
    if cfg.PAGE_SIZE > 0:
        row = tile_origin(split, cfg)
        held = (row + split.seqlen_k + (cfg.PAGE_SIZE - 1)) // cfg.PAGE_SIZE
        page += (row + tile * cfg.BLOCK_N) // cfg.PAGE_SIZE
        page = gl.load(ptr_table + page, mask=page < held, other=0).to(gl.int32)
    return page


@gluon.jit
def page_of(pages, n, cfg: gl.constexpr):
    """pages[n]: over 32 lanes that sum is one instruction."""
    index = gl.arange(0, cfg.PAGE_LANES, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(gl.where(index == n, pages, 0), 0)


@gluon.jit
def load_whole_pages(ring, use, desc, pages, kv_head, rows_per_page, cfg: gl.constexpr):
    """Start TMA copies of one tile of keys or values of which every row exists, a page at a time."""
    PAGES: gl.constexpr = cfg.PAGES
    buffers = as_pages(ring.tiles, cfg.STAGES * PAGES, desc)
    ring.acquire(use)
    slot = use % ring.STAGES
    bar_full = ring.full.index(slot)
    mbarrier.expect(bar_full, PAGES * desc.block_type.nbytes)
    for n in gl.static_range(PAGES):
        box_coords = (page_of(pages, n, cfg) * (rows_per_page // 8), kv_head, 0, 0, 0)
        load_tile(desc, box_coords, bar_full, buffers.index(slot * PAGES + n))


@gluon.jit
def load_box(
    boxes, bar_full, slot, n, desc, pages, split, tile, rows_per_entry, COLUMNS: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Start TMA copies of a tile's box n along its keys; rows past the sequence's end become zeros."""
    BOXES: gl.constexpr = cfg.BOXES
    at = box_rows(n, pages, split, tile, rows_per_entry, cfg)
    for column in gl.static_range(COLUMNS):
        if cfg.WHOLE_PAGES:
            box = (slot * BOXES + n) * COLUMNS + column
        else:
            box = (slot * COLUMNS + column) * BOXES + n
        box_coords = (at[0], at[1], at[2], split.kv_head, column * cfg.BOX_WIDTH)
        load_tile(desc, box_coords, bar_full, boxes.index(box))


@gluon.jit
def box_rows(n, pages, split, tile, rows_per_entry, cfg: gl.constexpr):
    """TMA coordinates of box n of a tile along its keys: they end it where the sequence ends.

    Or begin it where padding ends. See `key_loads.coords`.
    """
    origin, bound = tile_origin(split, cfg), 1 << 30
    row = origin + tile * cfg.BLOCK_N + n * cfg.BOX_ROWS
    end = origin + split.seqlen_k
    if cfg.HIDES_PADDING:  # a box with padding does not have the end: see `hidden_rows`
        end = gl.where(row < split.start_k, split.start_k, end)
        bound = gl.where(row < split.start_k, 0, 1 << 30)
    end = gl.minimum(end, row + cfg.BOX_ROWS)
    if cfg.PAGE_SIZE == 0:
        entry = split.batch
    else:
        entry = page_of(pages, n * cfg.PAGES // cfg.BOXES, cfg)
        end = end - row // cfg.PAGE_SIZE * cfg.PAGE_SIZE
        row = row % cfg.PAGE_SIZE
    end = gl.maximum(end, 0)
    return bound, entry * rows_per_entry + end, bound - end + row


@gluon.jit
def load_boxes(ring, use, desc, pages, split, tile, rows_per_entry, sizes, cfg: gl.constexpr):
    """Start TMA copies of one tile of keys or values, box by box."""
    BOXES: gl.constexpr = cfg.BOXES
    COLUMNS: gl.constexpr = ring.tiles.shape[2] // cfg.BOX_WIDTH  # boxes side by side
    COUNT: gl.constexpr = cfg.STAGES * COLUMNS * BOXES
    ring.acquire(use)
    slot = use % ring.STAGES
    bar_full = ring.full.index(slot)
    mbarrier.expect(bar_full, COLUMNS * BOXES * desc.block_type.nbytes)
    if cfg.WHOLE_PAGES:
        boxes = as_boxes_by_rows(ring.tiles, COUNT, desc)
        # Only a sequence's last tile comes here, or one with padding. A count that the compiler does not know
        # keeps this a loop: unrolled, its instructions cost 0.2 us at 1 x 8k.
        for n in range(gl.minimum(sizes.workers, 1) * BOXES):
            load_box(boxes, bar_full, slot, n, desc, pages, split, tile, rows_per_entry, COLUMNS, cfg)
    else:
        boxes = as_boxes(ring.tiles, COUNT, desc)
        for n in gl.static_range(BOXES):
            load_box(boxes, bar_full, slot, n, desc, pages, split, tile, rows_per_entry, COLUMNS, cfg)


@gluon.jit
def load_tiles(k, v, use, pages, split, tile, smem, sizes, cfg: gl.constexpr):
    """Start TMA copies of one tile of keys and of values; k and v are (descriptor, that of whole pages)."""
    is_whole = (tile + 1) * cfg.BLOCK_N <= split.seqlen_k
    if cfg.HIDES_PADDING:
        is_whole = is_whole & (tile * cfg.BLOCK_N >= hidden_rows(split, cfg))
    if cfg.WHOLE_PAGES and is_whole:
        load_whole_pages(smem.k, use, k[1], pages, split.kv_head, sizes.rows_k, cfg)
        load_whole_pages(smem.v, use, v[1], pages, split.kv_head, sizes.rows_v, cfg)
    else:
        load_boxes(smem.k, use, k[0], pages, split, tile, sizes.rows_k, sizes, cfg)
        load_boxes(smem.v, use, v[0], pages, split, tile, sizes.rows_v, sizes, cfg)


@gluon.jit
def load_role(L: gl.constexpr, k, v, cache, smem, sizes, cfg: gl.constexpr):
    """Stream every LOADERS-th tile of the worker's."""
    wait_for_previous_kernel()
    schedule = make_schedule(cache, sizes, cfg, 1)
    unit, end = worker_units(schedule, sizes)
    use = 0  # of the rings
    while unit < end:
        split = split_at(unit, end, schedule, sizes, cfg, 1)
        ptr_table = cache.page_table
        if cfg.PAGE_SIZE > 0:
            ptr_table = cache.page_table + gl.cast(split.batch, gl.int64) * sizes.stride_page_table
        first = (L - use) & (cfg.LOADERS - 1)
        pages = load_pages(ptr_table, split.tile + first, split, cfg)
        for n in range(first, split.count, cfg.LOADERS):
            tile = split.tile + n
            next_pages = load_pages(ptr_table, tile + cfg.LOADERS, split, cfg)  # answered during a wait
            pages = page_or_zero(pages, sizes)
            load_tiles(k, v, use + n, pages, split, tile, smem, sizes, cfg)
            pages = next_pages
        use += split.count
        unit += split.units
