"""Statistics of the weights that the forward gives in its own pass, by thread: [64, 4] of each, or 0.

    largest = max of the scores,  weighted = sum of p x, of p = exp2(x)      entropy = log2 l - weighted / l

x and p count from the reference m, as l does; it has no headroom, which would cost entropy digits.
"""

from tilewise.gpu.hopper.common.compat import gl, gluon
from tilewise.gpu.hopper.common.layouts import partial_layout
from tilewise.gpu.hopper.common.softmax import partial_sums, rescaled_sums

LOWEST = gl.constexpr(-1e4)  # of x where p is 0


@gluon.jit
def nothing_watched(cfg: gl.constexpr):
    """(largest, weighted) of no keys."""
    largest, weighted = 0, 0
    if cfg.HAS_ROW_MAX:
        largest = gl.full([64, 4], float("-inf"), gl.float32, partial_layout())
    if cfg.HAS_ENTROPY:
        weighted = gl.full([64, 4], 0.0, gl.float32, partial_layout())
    return largest, weighted


@gluon.jit
def watch(watched, s, x, p, hides, cfg: gl.constexpr):
    """(largest, weighted) with one more tile. `hides`: whether some scores are -inf."""
    largest, weighted = watched
    if cfg.HAS_ROW_MAX:
        of_tile = gl.max(gl.max(s.reshape([64, s.shape[1] // 8, 4, 2]), 3), 1)
        largest = gl.maximum(largest, gl.convert_layout(of_tile, partial_layout(), assert_trivial=True))
    if cfg.HAS_ENTROPY:
        if hides:
            x = gl.maximum(x, LOWEST)
        weighted = weighted + partial_sums(p * x)
    return largest, weighted


@gluon.jit
def shifted(watched, m_before, m, l, alpha, cfg: gl.constexpr):
    """(largest, weighted) when the reference moves from m_before to m, with the l of before."""
    largest, weighted = watched
    if cfg.HAS_ENTROPY:
        by_row: gl.constexpr = gl.SliceLayout(1, partial_layout())
        step = gl.convert_layout(m_before - m, by_row, assert_trivial=True)[:, None]
        weighted = rescaled_sums(gl.where(l == 0.0, 0.0, weighted + step * l), alpha)
    return largest, weighted
