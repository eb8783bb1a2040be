"""Statistics of the weights that the forward gives in its own pass, by thread: [64, 4] of each, or 0.

    largest = max of the scores,  weighted = sum of p x, of p = exp2(x)      entropy = log2 l - weighted / l

x and p count from the reference m, as l does; it has no headroom, which would cost entropy digits.
"""

from tilewise.gpu.hopper.common.compat import gl, gluon
from tilewise.gpu.hopper.common.layouts import partial_layout
from tilewise.gpu.hopper.common.softmax import reciprocal, rescaled_sums

LOWEST = gl.constexpr(-1e4)  # of x where p is 0
FAR_BELOW = gl.constexpr(-1e30)  # in units of log2: a hidden score whose p is 0, and p x as well
SMALLEST_SCALE = gl.constexpr(1e-30)  # for which the product that is as far below is finite
LEAST_PRODUCT = gl.constexpr(-3e38)


@gluon.jit
def nothing_watched(cfg: gl.constexpr):
    """(largest, weighted) of no keys."""
    largest, weighted = 0, 0
    if cfg.HAS_ROW_MAX or cfg.HAS_MAX_LOGIT:
        largest = gl.full([64, 4], float("-inf"), gl.float32, partial_layout())
    if cfg.HAS_ENTROPY:
        weighted = gl.full([64, 4], 0.0, gl.float32, partial_layout())
    return largest, weighted


@gluon.jit
def hidden_score(is_steady, factors, cfg: gl.constexpr):
    """(what a hidden score becomes, is_steady): -inf, but with an entropy a finite number in a steady tile.

    So that p x is 0 there, which costs nothing.
    """
    hidden = float("-inf")
    if cfg.HAS_ENTROPY:
        is_steady = is_steady & (factors.scale_log2e >= SMALLEST_SCALE)
        finite = gl.maximum(FAR_BELOW * reciprocal(factors.scale_log2e), LEAST_PRODUCT)
        hidden = gl.where(is_steady, finite, float("-inf"))
    return hidden, is_steady


@gluon.jit
def watch_scores(watched, s, cfg: gl.constexpr):
    """What is watched, with a tile's scores. Before its weights, so that no register holds both."""
    largest, weighted = watched
    if cfg.HAS_ROW_MAX or cfg.HAS_MAX_LOGIT:
        of_tile = gl.convert_layout(gl.max(by_thread(s), 2), partial_layout(), assert_trivial=True)
        largest = gl.maximum(largest, of_tile)
    return largest, weighted


@gluon.jit
def by_thread(x):
    """x [64, N] as [64, 4, N // 4]: the columns of one thread side by side, to be reduced one after the other."""
    return x.reshape([64, x.shape[1] // 8, 4, 2]).permute([0, 2, 1, 3]).reshape([64, 4, x.shape[1] // 4])


@gluon.jit
def watch_weights(watched, x, p, is_steady: gl.constexpr, cfg: gl.constexpr):
    """What is watched, with a tile's weights. If it is steady, no x is -inf."""
    largest, weighted = watched
    if cfg.HAS_ENTROPY:
        if not is_steady:
            x = gl.maximum(x, LOWEST)
        of_tile = gl.sum(by_thread(p * x), 2)
        weighted = weighted + gl.convert_layout(of_tile, partial_layout(), assert_trivial=True)
    return largest, weighted


@gluon.jit
def shifted(watched, m_before, m, l, alpha, cfg: gl.constexpr):
    """What is watched when the reference moves from m_before to m, with the l of before."""
    largest, weighted = watched
    if cfg.HAS_ENTROPY:
        by_row: gl.constexpr = gl.SliceLayout(1, partial_layout())
        step = gl.convert_layout(m_before - m, by_row, assert_trivial=True)[:, None]
        weighted = rescaled_sums(gl.where(l == 0.0, 0.0, weighted + step * l), alpha)
    return largest, weighted


@gluon.jit
def existing(largest, row, work):
    """largest [64, 4], -inf in rows that do not exist."""
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, partial_layout()))[:, None]
    return gl.where(rows < work.seqlen_q, largest, float("-inf"))

