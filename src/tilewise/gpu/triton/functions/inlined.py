"""What kernels do about mask and score functions, beside calling them."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.core.device_errors import INDEX

INDEX_FLAG = tl.constexpr(INDEX)


@triton.jit
def poisoned(s, wrong, i, seq, captured):
    """NaN in the place of visible scores that functions have read out of range for, which is reported."""
    is_bad = (wrong != 0) & (s != float("-inf")) & (i < seq.seqlen_q)  # a bit, interpreted too
    tl.store(captured.errors + INDEX_FLAG + is_bad.to(tl.int32) * 0, 1, mask=is_bad)
    return tl.where(is_bad, float("nan"), s)


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
