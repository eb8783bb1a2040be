"""Online softmax on a warpgroup's registers. Scores are in units of log2, so that exp is one exp2."""

from tilewise.hopper.compat import aggregate, gl, gluon


@gluon.jit
def exp2(x):
    """2 to the x by the special-function unit; exp2(-inf) = 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def softcapped(s, factors):
    """softcap * tanh(scale * s / softcap), in units of log2; tanh x = 1 - 2 / (1 + exp 2x)."""
    denominator = 1.0 + exp2(s * factors.two_over_softcap_log2e)
    return factors.softcap_log2e * (1.0 - 2.0 / denominator)


@aggregate
class Factors:
    """Scalars of the scores. `scale_log2e` turns a product, or a capped score, into units of log2."""

    scale_log2e: gl.tensor
    two_over_softcap_log2e: gl.tensor
    softcap_log2e: gl.tensor

    @gluon.constexpr_function
    def __init__(self, scale_log2e, two_over_softcap_log2e, softcap_log2e):
        self.scale_log2e = scale_log2e
        self.two_over_softcap_log2e = two_over_softcap_log2e
        self.softcap_log2e = softcap_log2e


@gluon.jit
def finite_or_zero(m):
    """m, but 0 where every score so far is -inf, so that exp2(s - m) is 0 and not NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def online_softmax(s, m, l, scale_log2e):
    """(p, m, l, alpha) after one more tile of scores.

    m is the running maximum in units of log2, l the running sum of p = exp2(s * scale - m), and alpha what
    earlier sums must be multiplied by: exp2(m_before - m).
    """
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2e)
    m_finite = finite_or_zero(m_new)
    alpha = exp2(m - m_finite)
    p = exp2(s * scale_log2e - m_finite[:, None])  # [64, BLOCK_N]
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


# What a score may exceed the reference of its row by, in units of log2, before the reference follows it
LAG = gl.constexpr(8.0)


@gluon.jit
def lagging_softmax(s, m, l, scale_log2e):
    """(p, m, l, alpha, has_grown): as `online_softmax`, but m follows the maximum only when it lags by LAG.

    out and lse are the same for any m: p, l and acc are in units of 2^m, and no p exceeds 2^8, so nothing
    overflows, in float16 neither. So exponentials need not wait for the maximum, and while no row of the
    warpgroup grows, alpha is 1 and has_grown False. A row that has seen no key follows the first it sees.
    """
    m_tile = gl.max(s, 1) * scale_log2e
    p = exp2(s * scale_log2e - finite_or_zero(m)[:, None])  # [64, BLOCK_N]
    has_grown = gl.max((m_tile > m + LAG).to(gl.int32), 0) > 0
    alpha = gl.full([64], 1.0, gl.float32, m.type.layout)
    if has_grown:
        m_new = gl.maximum(m, m_tile)
        m_finite = finite_or_zero(m_new)
        alpha = exp2(m - m_finite)
        p = exp2(s * scale_log2e - m_finite[:, None])
        l = l * alpha
        m = m_new
    return p, m, l + gl.sum(p, 1), alpha, has_grown
