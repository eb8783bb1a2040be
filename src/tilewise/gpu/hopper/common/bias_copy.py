"""A bias copied into rows that kernels can read. Plain Triton, bound by memory."""

import triton
import triton.language as tl

INTEGERS = ("heads", "rows", "columns", "eights", "least", "most")


@triton.jit(do_not_specialize=INTEGERS)
def copy_bias_kernel(
    source, target, stride_batch, stride_head, stride_row, stride_column,
    heads, rows, columns, eights, least, most, TILE: tl.constexpr,
):  # fmt: skip
    """target (batch, heads, rows, 8 * eights) = source, and 0 behind its columns.

    Either rows or columns of source may lie side by side in memory. Tiles without an entry whose
    column - row is from `least` to `most` are left as they are: the backward looks at no score there.
    Grid: (tiles of columns * tiles of rows * heads * batch,).
    """
    padded = 8 * eights  # so that the compiler knows how rows are aligned
    row_tiles, column_tiles = tl.cdiv(rows, TILE), tl.cdiv(padded, TILE)
    number = tl.program_id(0)
    first_column = number % column_tiles * TILE
    first_row = number // column_tiles % row_tiles * TILE
    bh = number // (column_tiles * row_tiles)
    ahead = first_column - first_row
    if (ahead + TILE > least) & (ahead - TILE < most):
        row = (first_row + tl.arange(0, TILE))[:, None]
        column = (first_column + tl.arange(0, TILE))[None, :]
        source += (bh // heads).to(tl.int64) * stride_batch + (bh % heads).to(tl.int64) * stride_head
        target += bh.to(tl.int64) * rows * padded
        offsets = row.to(tl.int64) * stride_row + column.to(tl.int64) * stride_column
        if (first_row + TILE <= rows) & (first_column + TILE <= columns):  # in vectors
            x = tl.load(source + offsets)
        else:
            x = tl.load(source + offsets, mask=(row < rows) & (column < columns), other=0.0)
        tl.store(target + row.to(tl.int64) * padded + column, x, mask=(row < rows) & (column < padded))
