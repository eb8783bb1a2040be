"""What becomes of scores in the registers of a warpgroup: ALiBi and biases, in units of log2; functions.

A bias that kernels can't read where it lies is copied first, by `copy_bias_kernel`.
"""

import triton
import triton.language as tl

from tilewise.gpu.functions.operations import poisoned
from tilewise.gpu.hopper.common.arguments import Place
from tilewise.gpu.hopper.common.compat import float_pair, gl, gluon, halves
from tilewise.gpu.hopper.common.layouts import accumulator_layout, along
from tilewise.gpu.hopper.common.softmax import LOG2_E
from tilewise.gpu.launch.entry import entry


@gluon.jit
def load_slope(batch, head, extras, cfg: gl.constexpr):
    """The ALiBi slope of a head in units of log2, if there is one."""
    slope = 0.0
    if cfg.HAS_ALIBI:
        slope = gl.load(extras.slopes + batch * extras.slopes_stride + head).to(gl.float32) * LOG2_E
    return slope


@gluon.jit
def penalty(s, start, slope):
    """[64, N]: slope * |start + row - column|, which ALiBi takes from scores s.

    A thread has two rows, whose part is computed once, and columns that the compiler knows.
    """
    x = s.reshape([64, s.shape[1] // 8, 4, 2])
    layout: gl.constexpr = x.type.layout
    rows = (start + gl.arange(0, 64, along(0, layout, 4)))[:, None, None, None]
    eights = 8 * gl.arange(0, x.shape[1], along(1, layout, 4))[None, :, None, None]
    firsts = 2 * gl.arange(0, 4, along(2, layout, 4))[None, None, :, None]
    columns = eights + gl.arange(0, 2, along(3, layout, 4))[None, None, None, :]
    distance = gl.abs((rows - firsts).to(gl.float32) * slope - columns.to(gl.float32) * slope)
    return gl.convert_layout(distance.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def load_bias(row, column, batch, head, rows, columns, extras, N: gl.constexpr, cfg: gl.constexpr):
    """[64, N // 8, 4] pairs of neighbouring columns' biases, if there is one, from (row, column) on.

    row, rows: the first, and how many there are. The bias of rows beyond them means nothing, that of columns
    beyond is 0. A thread has two rows' pairs, as `with_bias` wants them. BIAS_OF_ROWS: each row has one pair.
    BIAS_OF_DISTANCES: where the pairs of the tile's first entry lie; they are read when they are added.
    """
    pairs = 0
    first = gl.cast(batch, gl.int64) * extras.bias_batch + gl.cast(head, gl.int64) * extras.bias_head
    if cfg.BIAS_OF_DISTANCES:
        pairs = extras.bias + (first + (column - row))
    elif cfg.HAS_BIAS:
        tile = gl.full([64, N], 0.0, gl.float32, accumulator_layout(N)).reshape([64, N // 8, 4, 2])
        layout: gl.constexpr = gl.SliceLayout(3, tile.type.layout)
        i = gl.minimum(row + gl.arange(0, 64, along(0, layout, 3)), rows - 1)
        eights = 4 * gl.arange(0, N // 8, along(1, layout, 3))
        threads = gl.arange(0, 4, along(2, layout, 3))
        j = column // 2 + eights[None, :, None] + threads[None, None, :]
        row_places = (i.to(gl.int64) * extras.bias_row)[:, None, None]
        places = row_places + j
        if cfg.BIAS_OF_ROWS:
            found = gl.load(extras.bias + first + row_places) + 0 * j
        elif column + N <= columns:
            found = gl.load(extras.bias + first + places)
        else:
            found = gl.load(extras.bias + first + places, mask=j < (columns + 1) // 2, other=0)
        pairs = found
    return pairs


@gluon.jit
def with_bias(x, pairs, dtype: gl.constexpr, cfg: gl.constexpr):
    """x [64, N] in units of log2 plus the biases of a tile. Those of distances are in such units.

    They are in float32, twice as large, and near, as few numbers serve a tile: read no earlier than needed.
    """
    y = x.reshape([64, x.shape[1] // 8, 4, 2])
    if cfg.BIAS_OF_DISTANCES:
        layout: gl.constexpr = gl.SliceLayout(3, y.type.layout)
        row = gl.arange(0, 64, along(0, layout, 3))[:, None, None]
        eights = 8 * gl.arange(0, x.shape[1] // 8, along(1, layout, 3))[None, :, None]
        firsts = 2 * gl.arange(0, 4, along(2, layout, 3))[None, None, :]
        low, high = float_pair(gl.load(pairs + (eights + firsts - row)))
        y = y + gl.convert_layout(gl.join(low, high), y.type.layout, assert_trivial=True)
    else:
        low, high = halves(pairs, dtype)
        y = y + gl.convert_layout(gl.join(low, high), y.type.layout, assert_trivial=True) * LOG2_E
    return gl.convert_layout(y.reshape(x.shape), x.type.layout, assert_trivial=True)


@gluon.jit
def positions(x, row, column, is_transposed: gl.constexpr):
    """(queries, keys) of a tile x [64, N] from (row, column) on: [64, 1] and [1, N].

    is_transposed: rows are keys, so that keys come as [64, 1].
    """
    i = (row + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout)))[:, None]
    j = (column + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout)))[None, :]
    if is_transposed:
        queries, keys = j, i
    else:
        queries, keys = i, j
    return queries, keys


@gluon.jit
def hide_by_function(
    x, row, column, is_transposed: gl.constexpr, head, work, extras, cfg: gl.constexpr, hidden=float("-inf")
):  # fmt: skip
    """x [64, N] with `hidden` where the inlined mask function hides a key; the rest as in `positions`."""
    queries, keys = positions(x, row, column, is_transposed)
    place = Place(work.batch, head, work.seqlen_q, work.seqlen_k)
    visible, _ = cfg.MASK(queries, keys, place, extras.captured)
    return gl.where(visible, x, hidden)


@gluon.jit
def scored(x, row, column, is_transposed: gl.constexpr, head, work, extras, cfg: gl.constexpr):
    """What the inlined score function makes of scaled scores x [64, N]; the rest as in `positions`.

    Returns (scores, their derivative by x, where an index into a captured tensor is out of range).
    """
    queries, keys = positions(x, row, column, is_transposed)
    place = Place(work.batch, head, work.seqlen_q, work.seqlen_k)
    return cfg.SCORE(x, queries, keys, place, extras.captured)


@gluon.jit
def poisoned_scores(s, row, column, work, extras, cfg: gl.constexpr):
    """Scores, hidden or not, with NaN for each visible one whose index is wrong: in a branch that is rare.

    No index depends on the score, so it is found again from scores that are changed and masked.
    """
    queries, _ = positions(s, row, column, False)
    _, _, wrong = scored(s, row, column, False, work.head, work, extras, cfg)
    return poisoned(s, wrong, queries, work, extras.captured)


@entry(triton.jit)
def copy_bias_kernel(
    source, target, stride_batch, stride_head, stride_row, stride_column,
    heads: int, rows: int, columns: int, eights: int, least: int, most: int, TILE: tl.constexpr,
):  # fmt: skip
    """target (batch, heads, rows, 8 * eights) = source, and 0 behind its columns: rows that kernels can read.

    Either rows or columns of source may lie side by side in memory. Tiles without an entry whose
    column - row is from `least` to `most` are left as they are: the backward looks at no score there.
    Plain Triton, bound by memory. Grid: (tiles of columns * tiles of rows * heads * batch,).
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
