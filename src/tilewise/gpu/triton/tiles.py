"""Tiles of rows: how they are read, multiplied and written.

A tile is a tuple of one matrix [rows, columns] or of two, where the columns of a head are cut; see `Columns`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.gpu.triton.guards import is_page


@triton.jit
def row_base(x, b, h, start):
    """Pointer to row `start` of one head; every product in 64 bits."""
    return x.ptr + b.to(tl.int64) * x.stride_batch + start * x.stride_row + h.to(tl.int64) * x.stride_head


@triton.jit
def tile_ptrs(x, base, first_row, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers [BLOCK, BLOCK_D] to rows from first_row on. Inside a tile, 32-bit offsets are enough."""
    start = (tl.zeros((), tl.int64) + first_row) * x.stride_row
    rows = tl.arange(0, BLOCK)[:, None] * x.stride_row
    return base + start + (rows + tl.arange(0, BLOCK_D)[None, :])


@triton.jit
def tile_mask(first_row, num_rows, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK, BLOCK_D] or a shape that broadcasts to it: True for the rows and columns that exist."""
    row = (first_row + tl.arange(0, BLOCK)).to(tl.uint32)  # a row before the first is a large one
    mask = (row < num_rows.to(tl.uint32))[:, None]
    if DIM < BLOCK_D:
        mask = mask & (tl.arange(0, BLOCK_D) < DIM)[None, :]
    return mask


@triton.jit
def load_part(
    x, base, first_row, num_rows,
    BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """[BLOCK, BLOCK_D], zero beyond num_rows and DIM. IS_EDGE=False promises that every row exists."""
    ptrs = tile_ptrs(x, base, first_row, BLOCK, BLOCK_D)
    if IS_EDGE:
        mask = tile_mask(first_row, num_rows, BLOCK, DIM, BLOCK_D)
        tile = tl.load(ptrs, mask=mask, other=0.0)
    elif DIM < BLOCK_D:
        tile = tl.load(ptrs, mask=(tl.arange(0, BLOCK_D) < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def load_tile(
    x, base, first_row, num_rows,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """The tile as one part or two, see `Columns`; padded like `load_part`."""
    first = load_part(x, base, first_row, num_rows, BLOCK, COLUMNS.DIM, COLUMNS.FIRST, IS_EDGE)
    if COLUMNS.REST == 0:
        return (first,)
    else:
        base += COLUMNS.FIRST
        dim: tl.constexpr = COLUMNS.DIM - COLUMNS.FIRST
        return first, load_part(x, base, first_row, num_rows, BLOCK, dim, COLUMNS.REST, IS_EDGE)


@triton.jit
def load_source(
    source, b, h, start, first_row, num_rows,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """`load_tile` of rows start + [first_row, first_row + BLOCK) of one head.

    A box is zero beyond its tensor, whatever IS_EDGE says.
    """
    FIRST: tl.constexpr = COLUMNS.FIRST
    REST: tl.constexpr = COLUMNS.REST
    if source.desc is None:
        base = row_base(source.rows, b, h, start)
        return load_tile(source.rows, base, first_row, num_rows, BLOCK, COLUMNS, IS_EDGE)
    else:
        row, head = first_row, h
        if source.desc.block_shape[1] == 1:
            row, head = h, first_row
        first = source.desc.load([b, row, head, 0]).reshape(BLOCK, FIRST)
        if REST == 0:
            return (first,)
        else:
            return first, source.desc_rest.load([b, row, head, FIRST]).reshape(BLOCK, REST)


@triton.jit
def zero_tile(BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    FIRST: tl.constexpr = COLUMNS.FIRST
    REST: tl.constexpr = COLUMNS.REST
    first = tl.zeros((BLOCK, FIRST), tl.float32)
    if REST == 0:
        return (first,)
    else:
        return first, tl.zeros((BLOCK, REST), tl.float32)


@triton.jit
def scaled_tile(tile, factor):
    if len(tile) == 1:
        return (tile[0] * factor,)
    else:
        return tile[0] * factor, tile[1] * factor


@triton.jit
def dot_rows(a, b, cfg: tl.constexpr):
    """a b^T: the product of every row of tile a with every row of tile b."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=cfg.PRECISION)
    if len(a) > 1:
        product = tl.dot(a[1], tl.trans(b[1]), product, input_precision=cfg.PRECISION)
    return product


@triton.jit
def add_weighted_rows(acc, weights, tile, cfg: tl.constexpr):
    """acc + weights tile."""
    weights = weights.to(tile[0].dtype)
    first = tl.dot(weights, tile[0], acc[0], input_precision=cfg.PRECISION)
    if len(tile) == 1:
        return (first,)
    else:
        return first, tl.dot(weights, tile[1], acc[1], input_precision=cfg.PRECISION)


@triton.jit
def store_tile(x, base, first_row, num_rows, tile, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    store_part(x, base, first_row, num_rows, tile[0], BLOCK, COLUMNS.DIM, COLUMNS.FIRST)
    if len(tile) > 1:
        dim: tl.constexpr = COLUMNS.DIM - COLUMNS.FIRST
        store_part(x, base + COLUMNS.FIRST, first_row, num_rows, tile[1], BLOCK, dim, COLUMNS.REST)


@triton.jit
def store_part(
    x, base, first_row, num_rows, tile, BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    ptrs = tile_ptrs(x, base, first_row, BLOCK, BLOCK_D)
    mask = tile_mask(first_row, num_rows, BLOCK, DIM, BLOCK_D)
    tl.store(ptrs, tile.to(x.ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_paged(
    x, base, table, first_row, j0, seqlen_k, sizes,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Like `load_tile` at an edge, each row found through its page."""
    j = j0 + tl.arange(0, BLOCK)
    row = first_row + j
    page = tl.load(table + row // PAGE_SIZE, mask=j < seqlen_k, other=0).to(tl.int64)
    exists = is_page(page, sizes)[:, None]
    ptrs = (base + page * x.stride_batch + row % PAGE_SIZE * x.stride_row)[:, None]
    FIRST: tl.constexpr = COLUMNS.FIRST
    REST: tl.constexpr = COLUMNS.REST
    mask = exists & tile_mask(j0, seqlen_k, BLOCK, COLUMNS.DIM, FIRST)
    first = tl.load(ptrs + tl.arange(0, FIRST)[None, :], mask=mask, other=0.0)
    if REST == 0:
        return (first,)
    else:
        mask = exists & tile_mask(j0, seqlen_k, BLOCK, COLUMNS.DIM - FIRST, REST)
        return first, tl.load(ptrs + FIRST + tl.arange(0, REST)[None, :], mask=mask, other=0.0)


@triton.jit
def load_keys(
    source, j0, k_start, place, ragged, sizes,
    cfg: tl.constexpr, COLUMNS: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Rows [j0, j0 + BLOCK_N) of key or value, zero beyond the sequence."""
    kv_head = place.h // cfg.GROUP_SIZE
    if cfg.PAGE_SIZE > 0:
        x = source.rows
        base = x.ptr + kv_head.to(tl.int64) * x.stride_head
        table = ragged.page_table + place.b.to(tl.int64) * sizes.stride_page_table
        tile = load_paged(
            x, base, table, k_start, j0, place.seqlen_k, sizes, cfg.PAGE_SIZE, cfg.BLOCK_N, COLUMNS
        )
    else:
        tile = load_source(
            source, place.b, kv_head, k_start, j0, place.seqlen_k, cfg.BLOCK_N, COLUMNS, IS_EDGE
        )
    return tile
