"""The softmax of a tile in the decoding kernels, of a warpgroup's rows."""

from tilewise.gpu.hopper.common.compat import gl, gluon
from tilewise.gpu.hopper.common.ranges import hidden_rows, hide
from tilewise.gpu.hopper.common.softmax import (
    exp2,
    finite_or_zero,
    log2,
    online_softmax,
    reciprocal,
    softcapped,
)

LOG2_LARGEST = gl.constexpr(15.0)  # of weights of 8-bit values: float16 ends at 2^16


@gluon.jit
def has_edge(tile, split, sizes, cfg: gl.constexpr):
    """Whether some query of a split does not see all keys of a tile."""
    offset = split.seqlen_k - split.seqlen_q
    first = tile * cfg.BLOCK_N
    is_edge = first + cfg.BLOCK_N > split.seqlen_k
    if cfg.HAS_RIGHT:
        is_edge = is_edge | (first + (cfg.BLOCK_N - 1) > split.row + offset + sizes.window_right)
    if cfg.HIDES_PADDING:
        is_edge = is_edge | (first < hidden_rows(split, cfg))
    if cfg.HAS_LEFT:
        is_edge = is_edge | (first < split.row + (cfg.ROWS // cfg.PACK - 1) + offset - sizes.window_left)
    return is_edge


@gluon.jit
def first_row(W: gl.constexpr, cfg: gl.constexpr):
    """The first row of warpgroup W: 0, but where both read each tile."""
    return 16 * W if cfg.READERS == 2 else 0


@gluon.jit
def row_numbers(first, layout: gl.constexpr, cfg: gl.constexpr):
    """[64] numbers of the rows of a score tile, from `first` on. Of 8-bit pages each warp has the same 16."""
    rows = gl.arange(0, 64, layout)
    return first + (rows % 16 if cfg.HAS_SCALES else rows)


@gluon.jit
def distances(s, tile, first, split, cfg: gl.constexpr):
    """How far a query's position is after a key's, for scores s of a tile, of rows from `first` on."""
    by_row: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    positions = row_numbers(first, by_row, cfg) // cfg.PACK - tile * cfg.BLOCK_N
    positions += split.row + split.seqlen_k - split.seqlen_q
    if cfg.HAS_SCALES:
        positions -= gl.arange(0, 64, by_row) // 16 * s.shape[1]  # each warp has its own keys
    return positions[:, None] - gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]


@gluon.jit
def hide_of_warps(s, tile, first, split, sizes, cfg: gl.constexpr):
    """`hide` for rows and keys as warps have them."""
    distance = distances(s, tile, first, split, cfg)
    rows = row_numbers(first, gl.SliceLayout(1, s.type.layout), cfg)
    to_end = rows // cfg.PACK + split.row - split.seqlen_q
    is_visible = distance > to_end[:, None]
    if cfg.HIDES_PADDING:
        is_visible = is_visible & (distance <= (to_end + split.seqlen_k - hidden_rows(split, cfg))[:, None])
    if cfg.HAS_RIGHT:
        is_visible = is_visible & (distance >= -sizes.window_right)
    if cfg.HAS_LEFT:
        is_visible = is_visible & (distance <= sizes.window_left)
    return gl.where(is_visible, s, float("-inf"))


@gluon.jit
def softmax_step(
    s, m, l, tile, slope_log2, split, sizes, factors, cfg: gl.constexpr, first=0, unit=1.0, value_scale=1.0
):
    """Softmax of one tile of products s [64, keys]: (p, m, l, alpha). Only edge tiles are masked.

    Of 8-bit pages rows begin with `first`, s is in units of `unit` [64], and p is times value_scale [64].
    """
    scale_log2e = factors.scale_log2e
    if cfg.HAS_SCALES and (cfg.HAS_SOFTCAP or cfg.HAS_ALIBI):
        s = s * unit[:, None]
        unit = gl.full([64], 1.0, gl.float32, unit.type.layout)
    if cfg.HAS_SOFTCAP:
        s = softcapped(s, factors)
    if cfg.HAS_ALIBI:
        distance = gl.abs(distances(s, tile, first, split, cfg))
        s = s * scale_log2e - distance.to(gl.float32) * slope_log2[:, None]
        scale_log2e = 1.0
    if has_edge(tile, split, sizes, cfg):
        if cfg.HAS_SCALES:
            s = hide_of_warps(s, tile, first, split, sizes, cfg)
        else:
            s = hide(s, tile, split.row, split, sizes, cfg)
    if cfg.HAS_SCALES:
        p, m, alpha = scaled_softmax(s, m, unit * scale_log2e, value_scale)
        l = l * alpha + gl.sum(p, 1) * reciprocal(value_scale)
    else:
        p, m, alpha = online_softmax(s, m, scale_log2e)
        l = l * alpha + gl.sum(p, 1)
    return p, m, l, alpha


@gluon.jit
def scaled_softmax(s, m, scale, value_scale):
    """`online_softmax` of rows that have a scale each, with weights times value_scale.

    m is `LOG2_LARGEST` below the maximum: the largest weight is 2^15, and float16 holds others down to 2^-39
    of it. out and lse are the same for any m, as l and O are in units of 2^m.
    """
    log2_value = log2(value_scale)
    m_new = gl.maximum(m, gl.max(s, 1) * scale + log2_value - LOG2_LARGEST)
    m_finite = finite_or_zero(m_new)
    p = exp2(s * scale[:, None] + (log2_value - m_finite)[:, None])
    return p, m_new, exp2(m - m_finite)
