"""Tiles of rows: which ones a program works on, how they are read, multiplied and written.

A tile is a tuple of one matrix [rows, columns] or of two, where the columns of a head are cut; see `Columns`.

What kernels do about lengths and page numbers that lead outside of a cache (`core.device_errors`): a sequence
of a wrong length has no keys, and a page that is none is not read. What is added to the sums of exponentials
is then NaN, and so are out and lse. `ragged.errors` is None where there is no cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.core.device_errors import LENGTH, PAGE
from tilewise.gpu.triton.arguments import Sequence

PAGE_FLAG, LENGTH_FLAG = tl.constexpr(PAGE), tl.constexpr(LENGTH)
BLOCK_PAGES = tl.constexpr(128)

# ---- which rows a program works on


@triton.jit
def program_tile(sizes, REVERSED: tl.constexpr):
    """(tile, bh) of this program: `l2_swizzle` (batch, head) pairs at a time, whose keys stay in L2.

    REVERSED starts with the last tiles, which see the most keys when attention is causal.
    """
    pid = tl.program_id(0)
    per_swizzle = sizes.l2_swizzle * sizes.num_tiles
    first = pid // per_swizzle * sizes.l2_swizzle
    width = tl.minimum(sizes.l2_swizzle, sizes.num_bh - first)
    tile = pid % per_swizzle // width
    bh = first + pid % per_swizzle % width
    if REVERSED:
        tile = sizes.num_tiles - 1 - tile
    return tile, bh


@triton.jit
def packed_tile(tile, cu_seqlens, num_sequences, BLOCK: tl.constexpr):
    """(sequence, tile within it) for tile `tile` of a packed tensor of total // BLOCK + num_sequences tiles.

    Sequence n owns the tiles from cu_seqlens[n] // BLOCK + n on: always enough, at most one unused.
    """
    n = tile * 0
    end = n + num_sequences
    while end - n > 1:
        middle = (n + end) // 2
        is_after = tl.load(cu_seqlens + middle) // BLOCK + middle > tile
        end = tl.where(is_after, middle, end)
        n = tl.where(is_after, n, middle)
    return n, tile - (tl.load(cu_seqlens + n) // BLOCK + n).to(tl.int32)


@triton.jit
def sequence_rows(b, sizes, ragged):
    """(first query row, seqlen_q, first key row, seqlen_k, first mask column) of sequence b."""
    q_start = tl.zeros((), tl.int64)
    k_start = tl.zeros((), tl.int64)
    seqlen_q = sizes.seqlen_q
    seqlen_k = sizes.seqlen_k
    if ragged.cu_seqlens_q is not None:
        q_start = tl.load(ragged.cu_seqlens_q + b).to(tl.int64)
        seqlen_q = (tl.load(ragged.cu_seqlens_q + b + 1) - q_start).to(tl.int32)
    if ragged.cu_seqlens_k is not None:
        k_start = tl.load(ragged.cu_seqlens_k + b).to(tl.int64)
        seqlen_k = (tl.load(ragged.cu_seqlens_k + b + 1) - k_start).to(tl.int32)
    if ragged.errors is not None:
        first, seqlen_k, _ = cached_rows(b, b >= 0, sizes, ragged)
        k_start = first.to(tl.int64)
    first_col = k_start
    if ragged.cu_seqlens_k is not None:  # each packed sequence has its columns from 0 on
        first_col = k_start * 0
    return q_start, seqlen_q, k_start, seqlen_k, first_col


@triton.jit
def query_tile(sizes, ragged, BLOCK_M: tl.constexpr):
    """(i0, q_start, k_start, seq) of this program's tile of queries; there is none if i0 >= seqlen_q."""
    tile, bh = program_tile(sizes, REVERSED=sizes.window_right is not None)
    h = bh % sizes.num_heads
    b = bh // sizes.num_heads
    if ragged.cu_seqlens_q is not None:
        b, tile = packed_tile(tile, ragged.cu_seqlens_q, sizes.batch, BLOCK_M)
    q_start, seqlen_q, k_start, seqlen_k, first_col = sequence_rows(b, sizes, ragged)
    seq = Sequence(b, h, seqlen_q, seqlen_k, seqlen_k - seqlen_q, first_col)
    return tile * BLOCK_M, q_start, k_start, seq


# ---- lengths and pages of a cache


@triton.jit
def cached_rows(b, exists, sizes, ragged):
    """(first key row, keys, whether the numbers say so rightly) of sequences b, scalar or vector.

    There are no keys where the length or the left padding is wrong.
    """
    k_start = b * 0
    end = b * 0 + sizes.seqlen_k
    fits = end >= 0
    if ragged.seqlens_k is not None:
        held = tl.load(ragged.seqlens_k + b, mask=exists, other=0)
        fits = (held >= 0) & (held <= sizes.seqlen_k)
        end = tl.where(fits, held, 0).to(tl.int32)
    if ragged.leftpad_k is not None:
        pad = tl.load(ragged.leftpad_k + b, mask=exists, other=0)
        fits = fits & (pad >= 0) & (pad <= end)
        k_start = tl.where(fits, pad, 0).to(tl.int32)
        end = tl.where(fits, end, 0)
    return k_start, end - k_start, fits


@triton.jit
def is_page(page, sizes):
    return (page >= 0) & (page < sizes.num_pages)


@triton.jit
def length_poison(b, sizes, ragged):
    """0, or NaN for a sequence of a wrong length, which is reported."""
    _, _, fits = cached_rows(b, b >= 0, sizes, ragged)
    if not fits:
        tl.store(ragged.errors + LENGTH_FLAG, 1)
    return tl.where(fits, 0.0, float("nan"))


@triton.jit
def page_poison(b, first_row, end_row, sizes, ragged, cfg: tl.constexpr):
    """0, or NaN if a page of rows [first_row, end_row) of sequence b is none, which is reported.

    After the rows were read: their page numbers are in the nearest cache then.
    """
    table = ragged.page_table + b.to(tl.int64) * sizes.stride_page_table
    end = tl.cdiv(end_row, cfg.PAGE_SIZE)
    wrong = tl.zeros((BLOCK_PAGES,), tl.int32)
    for n in range(first_row // cfg.PAGE_SIZE, end, BLOCK_PAGES):
        at = n + tl.arange(0, BLOCK_PAGES)
        page = tl.load(table + at, mask=at < end, other=0)
        wrong += ((at < end) & (is_page(page, sizes) == 0)).to(tl.int32)
    fits = tl.max(wrong, 0) == 0
    if not fits:
        tl.store(ragged.errors + PAGE_FLAG, 1)
    return tl.where(fits, 0.0, float("nan"))


# ---- reading, multiplying and writing


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
def load_chunk(
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
    """The tile as one chunk or two, see `Columns`; padded like `load_chunk`."""
    first = load_chunk(x, base, first_row, num_rows, BLOCK, COLUMNS.DIM, COLUMNS.FIRST, IS_EDGE)
    if COLUMNS.REST == 0:
        return (first,)
    else:
        base += COLUMNS.FIRST
        dim: tl.constexpr = COLUMNS.DIM - COLUMNS.FIRST
        return first, load_chunk(x, base, first_row, num_rows, BLOCK, dim, COLUMNS.REST, IS_EDGE)


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
    store_chunk(x, base, first_row, num_rows, tile[0], BLOCK, COLUMNS.DIM, COLUMNS.FIRST)
    if len(tile) > 1:
        dim: tl.constexpr = COLUMNS.DIM - COLUMNS.FIRST
        store_chunk(x, base + COLUMNS.FIRST, first_row, num_rows, tile[1], BLOCK, dim, COLUMNS.REST)


@triton.jit
def store_chunk(
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
    exists = is_page(page, sizes)[:, None] & tile_mask(j0, seqlen_k, BLOCK, 1, 1)
    ptrs = (base + page * x.stride_batch + row % PAGE_SIZE * x.stride_row)[:, None]
    return load_rows(ptrs, exists, COLUMNS)


@triton.jit
def load_rows(ptrs, exists, COLUMNS: tl.constexpr):
    """Rows at ptrs as one chunk or two, see `Columns`; zero where they do not exist. Both are [rows, 1]."""
    first = load_columns(ptrs, exists, COLUMNS.DIM, COLUMNS.FIRST)
    if COLUMNS.REST == 0:
        return (first,)
    else:
        dim: tl.constexpr = COLUMNS.DIM - COLUMNS.FIRST
        return first, load_columns(ptrs + COLUMNS.FIRST, exists, dim, COLUMNS.REST)


@triton.jit
def load_columns(ptrs, exists, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    column = tl.arange(0, BLOCK_D)[None, :]
    if DIM < BLOCK_D:
        exists = exists & (column < DIM)
    return tl.load(ptrs + column, mask=exists, other=0.0)


@triton.jit
def load_keys(
    source, j0, k_start, seq, ragged, sizes,
    cfg: tl.constexpr, COLUMNS: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Rows [j0, j0 + BLOCK_N) of key or value, zero beyond the sequence."""
    kv_head = seq.h // cfg.GROUP_SIZE
    if cfg.PAGE_SIZE > 0:
        x = source.rows
        base = x.ptr + kv_head.to(tl.int64) * x.stride_head
        table = ragged.page_table + seq.b.to(tl.int64) * sizes.stride_page_table
        tile = load_paged(
            x, base, table, k_start, j0, seq.seqlen_k, sizes, cfg.PAGE_SIZE, cfg.BLOCK_N, COLUMNS
        )
    else:
        tile = load_source(source, seq.b, kv_head, k_start, j0, seq.seqlen_k, cfg.BLOCK_N, COLUMNS, IS_EDGE)
    return tile
