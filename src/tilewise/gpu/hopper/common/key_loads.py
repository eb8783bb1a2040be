"""Where the forward finds tiles of keys and values: in a tensor, or in a cache with or without pages.

A tile of a cache takes one TMA copy, or with pages smaller than a tile one for each page and 64 columns. Page
numbers are read a tile ahead.
"""

from tilewise.gpu.hopper.common.channel import make_ring, make_tile_ring
from tilewise.gpu.hopper.common.compat import as_boxes, gl, gluon, load_tile, mbarrier
from tilewise.gpu.hopper.common.guards import page_or_zero
from tilewise.gpu.hopper.common.ranges import tile_origin


@gluon.jit
def coords(start, length, row, head, batch, IS_PACKED: gl.constexpr, bound=1 << 30):
    """TMA coordinates of rows from `row` on of one sequence; rows past its end are zeros, or not stored.

    A packed tensor's descriptor has two more dimensions, whose strides cancel to (start + row) while their
    bound stops at the sequence's end: 2^30 * (2^34 - stride) + (start + length) * stride wraps around.
    With 0 as bound rows before `length` are zeros, and none after it.
    """
    if IS_PACKED:
        found = (bound, start + length, bound - length + row, head, 0)
    else:
        found = (batch, row, head, 0)  # type: ignore[assignment]
    return found


@gluon.jit
def queries_at(row, head, work, cfg: gl.constexpr):
    """`coords` of queries from `row` on, of the sequence of a work tile."""
    return coords(work.start_q, work.seqlen_q, row, head, work.batch, cfg.IS_PACKED)


@gluon.jit
def keys_at(row, head, work, cfg: gl.constexpr):
    """Those of keys."""
    return coords(work.start_k, work.seqlen_k, row, head, work.batch, cfg.IS_PACKED)


@gluon.jit
def make_key_ring(desc, WIDTH: gl.constexpr, CHUNKS: gl.constexpr, cfg: gl.constexpr):
    """A ring of tiles [BLOCK_N, WIDTH], CHUNKS of them side by side."""
    if cfg.BOXES == 1:
        ring = make_tile_ring(desc, cfg.STAGES, CHUNKS, cfg.WARPGROUPS)
    else:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, WIDTH], desc.dtype)
        tiles = gl.allocate_shared_memory(desc.dtype, [cfg.STAGES * CHUNKS, cfg.BLOCK_N, WIDTH], layout)
        ring = make_ring(tiles, cfg.STAGES, CHUNKS, cfg.WARPGROUPS)
    return ring


@gluon.jit
def read_pages(j, work, sizes, cache, cfg: gl.constexpr):
    """Numbers of the pages of key tile j, if several one a lane; 0 for those past the sequence's end."""
    if cfg.PAGE_SIZE == 0:
        pages = work.batch
    else:
        origin = tile_origin(work, cfg)
        n = (origin + j * cfg.BLOCK_N) // cfg.PAGE_SIZE
        if cfg.BOXES > 1:
            n = n + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        held = (origin + work.seqlen_k + (cfg.PAGE_SIZE - 1)) // cfg.PAGE_SIZE
        ptr_table = cache.page_table + gl.cast(work.batch, gl.int64) * sizes.stride_page_table
        pages = gl.load(ptr_table + n, mask=n < held, other=0).to(gl.int32)
    return pages


@gluon.jit
def key_coords(j, pages, work, head, sizes, cfg: gl.constexpr):
    """Where key tile j is: TMA coordinates, or of a cache (its first row in its sequence, pages)."""
    if cfg.IS_CACHED:
        if cfg.PAGE_SIZE > 0:  # not where they are read, which would wait for them
            pages = page_or_zero(pages, sizes)
        found = (tile_origin(work, cfg) + j * cfg.BLOCK_N, pages)
    else:
        found = keys_at(j * cfg.BLOCK_N, head, work, cfg)
    return found


@gluon.jit
def load_keys(ring, use, desc, at, work, head, rows, CHUNKS: gl.constexpr, cfg: gl.constexpr):
    """Acquire a slot and start TMA copies of a tile of keys or values; a cache's entry has `rows` rows."""
    if not cfg.IS_CACHED:
        ring.load(use, desc, at, CHUNKS)
    elif cfg.BOXES == 1:
        ring.load(use, desc, box_coords(at[0], at[1], work, head, rows, cfg), CHUNKS)
    else:
        BOXES: gl.constexpr = cfg.BOXES
        COLUMNS: gl.constexpr = CHUNKS * ring.tiles.shape[2] // desc.block_shape[-1]  # boxes side by side
        boxes = as_boxes(ring.tiles, cfg.STAGES * COLUMNS * BOXES, desc)
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        ring.acquire(use)
        slot = use % cfg.STAGES
        bar_full = ring.full.index(slot)
        mbarrier.expect(bar_full, COLUMNS * BOXES * desc.block_type.nbytes)
        TOGETHER: gl.constexpr = min(4, BOXES)
        # a count that the compiler does not know keeps this a loop, which else takes registers that spill
        for first in range(0, gl.minimum(rows, 1) * BOXES, TOGETHER):
            for i in gl.static_range(TOGETHER):
                page = gl.sum(gl.where(lane == first + i, at[1], 0), 0)
                box = box_coords(at[0] + (first + i) * cfg.BOX_ROWS, page, work, head, rows, cfg)
                for column in gl.static_range(COLUMNS):
                    column_box = box[:-1] + (column * desc.block_shape[-1],)  # noqa: RUF005
                    smem = boxes.index((slot * COLUMNS + column) * BOXES + first + i)
                    load_tile(desc, column_box, bar_full, smem)


@gluon.jit
def box_coords(row, entry, work, head, rows, cfg: gl.constexpr):
    """TMA coordinates of a box of a cache's tile, from a row of its sequence on, which lies in an entry.

    Padding and rows past the end are zeros.
    """
    end, bound = tile_origin(work, cfg) + work.seqlen_k, 1 << 30
    if cfg.HIDES_PADDING:  # a box with padding does not have the end: see `hidden_rows`
        end = gl.where(row < work.start_k, work.start_k, end)
        bound = gl.where(row < work.start_k, 0, 1 << 30)
    if cfg.PAGE_SIZE > 0:
        first = row & -cfg.PAGE_SIZE  # of the page
        end = gl.maximum(gl.minimum(end, row + cfg.BOX_ROWS) - first, 0)
        row = row - first
    return coords(entry * rows, end, row, head, 0, True, bound)
