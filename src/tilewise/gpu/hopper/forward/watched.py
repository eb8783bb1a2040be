"""Statistics of the weights that the forward gives in its own pass, by thread: [64, 4] of each, or 0.

    largest = max of the scores s,  weighted = sum of p s      entropy = lse - scale * weighted / l

p counts from the reference m, which may lie above the maximum, as l does.
"""

from tilewise.gpu.hopper.common.compat import gl, gluon
from tilewise.gpu.hopper.common.layouts import partial_layout
from tilewise.gpu.hopper.common.softmax import partial_sums, rescaled_sums

LOWEST = gl.constexpr(-1e30)  # of s where p is 0


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
def watch(watched, s, p, hides, cfg: gl.constexpr):
    """(largest, weighted) with one more tile. `hides`: whether some scores are -inf."""
    largest, weighted = watched
    if cfg.HAS_ROW_MAX:
        of_tile = gl.max(gl.max(s.reshape([64, s.shape[1] // 8, 4, 2]), 3), 1)
        largest = gl.maximum(largest, gl.convert_layout(of_tile, partial_layout(), assert_trivial=True))
    if cfg.HAS_ENTROPY:
        if hides:
            s = gl.maximum(s, LOWEST)
        weighted = weighted + partial_sums(p * s)
    return largest, weighted


@gluon.jit
def rescaled_watched(watched, alpha, cfg: gl.constexpr):
    """(largest, weighted) when the reference moves: see `rescaled_sums`."""
    largest, weighted = watched
    if cfg.HAS_ENTROPY:
        weighted = rescaled_sums(weighted, alpha)
    return largest, weighted
