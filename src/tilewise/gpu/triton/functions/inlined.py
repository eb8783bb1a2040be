"""What kernels do about mask and score functions, beside calling them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def before_function(ds, slope, cfg: tl.constexpr):
    """The gradient of scores before the score function, from that behind it; 0 from 0, as at hidden keys."""
    if cfg.HAS_SLOPE:
        return tl.where(ds == 0.0, 0.0, ds * slope)
    else:
        return ds


# ---- which tiles functions leave


@triton.jit
def visited_tiles(b, h, tile, rows, sizes, visits):
    """(row of `visits.order`, full tiles, tiles) of a program's tile, in tiles of its loop."""
    heads = 1 + visits.per_head * (sizes.num_heads - 1)
    rows = tl.cdiv(rows, visits.factor)
    row = ((b * visits.per_batch * heads + h * visits.per_head) * rows + tile // visits.factor).to(tl.int64)
    full = tl.load(visits.counts + 2 * row) * visits.factor
    return row, full, tl.load(visits.counts + 2 * row + 1) * visits.factor


@triton.jit
def visited_tile(n, row, columns, visits):
    """The n-th tile of a row."""
    columns = tl.cdiv(columns, visits.factor)
    run = tl.load(visits.order + row * columns + n // visits.factor)
    return run * visits.factor + n % visits.factor
