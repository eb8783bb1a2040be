"""Statistics of the weights that the forward gives in its own pass, by thread: [64, 4] of each, or 0.

    largest = max of the scores,  weighted = sum of p x, of p = exp2(x)      entropy = log2 l - weighted / l

x and p count from the reference m, as l does; it has no headroom, which would cost entropy digits. A head's
largest score is m + log2 of the largest p, which `largest` has then: positive numbers, so that their bits
compare as integers, of which the GPU takes three at once.
"""

from tilewise.gpu.hopper.common.compat import bits_of, float_of, gl, gluon
from tilewise.gpu.hopper.common.layouts import partial_layout
from tilewise.gpu.hopper.common.products import beside, rescaled
from tilewise.gpu.hopper.common.softmax import columns_of_thread, log2, reciprocal

LOWEST = gl.constexpr(-1e4)  # of x where p is 0
# Of a hidden score, where -inf would make p x NaN: the score in units of log2; its product, which
# float32 bounds; and the smallest scale for which that bound is still far below any score.
FAR_BELOW = gl.constexpr(-1e30)
LEAST_PRODUCT = gl.constexpr(-3e38)
SMALLEST_SCALE = gl.constexpr(1e-30)


@gluon.jit
def nothing_watched(cfg: gl.constexpr):
    """(largest, weighted) of no keys."""
    largest, weighted = 0, 0
    if cfg.HAS_ROW_MAX:
        largest = gl.full([64, 4], float("-inf"), gl.float32, partial_layout())
    if cfg.HAS_MAX_LOGIT:
        largest = gl.full([64, 4], 0.0, gl.float32, partial_layout())
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
    if cfg.HAS_ROW_MAX:
        columns = columns_of_thread(s)
        for n in gl.static_range(s.shape[1] // 4):
            largest = gl.maximum(largest, columns[n])
    return largest, weighted


@gluon.jit
def watch_weights(watched, x, p, is_steady: gl.constexpr, cfg: gl.constexpr):
    """What is watched, with a tile's weights. If it is steady, no x is -inf."""
    largest, weighted = watched
    if cfg.HAS_MAX_LOGIT:
        bits, columns = bits_of(largest), columns_of_thread(bits_of(p))
        for n in gl.static_range(p.shape[1] // 4):
            bits = gl.maximum(bits, columns[n])
        largest = float_of(bits)
    if cfg.HAS_ENTROPY:
        if not is_steady:
            x = gl.maximum(x, LOWEST)
        exponents, weights = columns_of_thread(x), columns_of_thread(p)
        for n in gl.static_range(p.shape[1] // 4):
            weighted = weighted + weights[n] * exponents[n]
    return largest, weighted


@gluon.jit
def shifted(watched, m_before, m, l, alpha, cfg: gl.constexpr):
    """What is watched when the reference moves from m_before to m, with the l of before."""
    largest, weighted = watched
    if cfg.HAS_MAX_LOGIT:
        largest = rescaled(largest, alpha)
    if cfg.HAS_ENTROPY:
        step = beside(m_before - m, l)
        weighted = rescaled(gl.where(l == 0.0, 0.0, weighted + step * l), alpha)
    return largest, weighted


@gluon.jit
def max_logits(largest, m, row, work):
    """[4]: by warp, the largest score of rows that exist, in units of log2.

    No less than m, which without headroom is a score: of p that are infinite or NaN it alone says anything.
    """
    by_row: gl.constexpr = gl.SliceLayout(1, partial_layout())
    above = gl.where(largest < float("inf"), gl.maximum(log2(largest), 0.0), 0.0)
    scores = beside(m, largest) + above
    exists = row + gl.arange(0, 64, by_row)[:, None] < work.seqlen_q
    scores = gl.where(exists, scores, float("-inf"))
    return gl.max(gl.max(scores.reshape([4, 16, 4]), 2), 1)


@gluon.jit
def have_nan(m, l, row, work):
    """[4]: by warp, whether a score of rows that exist is NaN, and none of the row is infinite."""
    by_row: gl.constexpr = gl.SliceLayout(1, partial_layout())
    is_finite = beside(m, l) < float("inf")
    exists = row + gl.arange(0, 64, by_row)[:, None] < work.seqlen_q
    found = gl.where(exists & is_finite & (l != l), 1, 0)
    return gl.max(gl.max(found.reshape([4, 16, 4]), 2), 1) > 0
