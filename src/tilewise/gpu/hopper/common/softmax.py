"""Online softmax on a warpgroup's registers. Scores are in units of log2, so that exp is one exp2."""

from tilewise.gpu.hopper.common.compat import gl, gluon
from tilewise.gpu.hopper.common.layouts import partial_layout

LOG2_E = gl.constexpr(1.4426950408889634)  # log2(e): natural units to units of log2
LN_2_REST = gl.constexpr(-1.904654299957768e-09)  # of ln 2, what float32 rounds away
LN_2 = gl.constexpr(0.6931471805599453)  # and back


@gluon.jit
def exp2(x):
    """2 to the x by the special-function unit; exp2(-inf) = 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def log2(x):
    """Logarithm by the special-function unit, to 2^-22 of itself or of 1; log2(0) = -inf."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """1 / x by the special-function unit, to its last bit."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def rounded_product(x, y):
    """x * y, which the compiler fuses into no sum."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def multiply_add(x, y, z):
    """x * y + z, rounded once."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def two_product(x, y):
    """(x * y rounded, what rounding took)."""
    high = rounded_product(x, y)
    return high, multiply_add(x, y, -high)


@gluon.jit
def two_sum(a, b):
    """(a + b rounded, what rounding took). Knuth, The Art of Computer Programming 4.2.2."""
    s = a + b
    b_in_s = s - a
    return s, (a - (s - b_in_s)) + (b - b_in_s)


@gluon.jit
def tanh_of_scores(s, factors):
    """tanh(scale * s / softcap), as tanh x = 1 - 2 / (1 + exp 2x)."""
    return 1.0 - 2.0 / (1.0 + exp2(s * factors.two_over_softcap_log2e))


@gluon.jit
def softcapped(s, factors):
    """softcap * tanh(scale * s / softcap), in units of log2."""
    return factors.softcap_log2e * tanh_of_scores(s, factors)


@gluon.jit
def finite_or_zero(m):
    """m, but 0 where every score so far is -inf, so that exp2(s - m) is 0 and not NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def log2_parts(l):
    """(integer, rest) that add up to log2(l), as exact for a large l as for one near 1; 0 and -inf for 0."""
    whole = gl.where(l == 0.0, 0.0, log2(l)).to(gl.int32).to(gl.float32)
    return whole, log2(l * exp2(-whole))


@gluon.jit
def exact_lse(m, l, factors, headroom=0.0):
    """(lse, residual) of a reference in units of log2 and a sum of exponentials: -inf and 0 if it saw no key.

    lse + residual is the log-sum-exp to 2^-45. m = headroom + scale_log2e * shift + what two floats hold; lse
    is scale * shift plus that, headroom, an integer, and the sum's logarithm.
    """
    whole, log2_rest = log2_parts(l)
    whole += headroom
    m, lost = two_sum(finite_or_zero(m), -headroom)
    log2_rest += lost
    shift = m * reciprocal(factors.scale_log2e)
    high, low = two_product(shift, factors.scale_log2e)
    rest = (((m - high) - low) + log2_rest) * LN_2
    high, low = two_product(shift, factors.scale)
    high, lower = two_sum(high, rest)
    of_whole, lowest = two_product(whole, LN_2)
    high, lost = two_sum(high, of_whole)
    low += lower + lost + lowest + whole * LN_2_REST
    lse = high + low
    return gl.where(l == 0.0, float("-inf"), lse), gl.where(l == 0.0, 0.0, (high - lse) + low)


@gluon.jit
def partial_sums(p):
    """[64, 4] sums of a tile's rows, each over the columns of one thread."""
    sums = gl.sum(gl.sum(p.reshape([64, p.shape[1] // 8, 4, 2]), 3), 1)
    return gl.convert_layout(sums, partial_layout(), assert_trivial=True)


@gluon.jit
def columns_of_thread(x):
    """x [64, N] as a tuple of [64, 4], the N // 4 columns that a thread has of its rows.

    For sums and maxima one after the other: a compiler's tree of them would need registers for all.
    """
    parts = (x.reshape([64, x.shape[1] // 8, 4, 2]).permute([0, 2, 1, 3]).reshape([64, 4, x.shape[1] // 4]),)
    for level in gl.static_range((x.shape[1] // 4).bit_length() - 1):
        halves = ()
        for n in gl.static_range(1 << level):
            y = parts[n].reshape([64, 4, 2, parts[n].shape[2] // 2]).permute([0, 1, 3, 2])
            halves = halves + y.split()  # type: ignore[assignment]
        parts = halves  # type: ignore[assignment]
    columns = ()
    for n in gl.static_range(x.shape[1] // 4):
        column = gl.convert_layout(parts[n].reshape([64, 4]), partial_layout(), assert_trivial=True)
        columns = columns + (column,)  # type: ignore[assignment]  # noqa: RUF005
    return columns


@gluon.jit
def online_softmax(s, m, scale_log2e, headroom=0.0):
    """(p, m, alpha) after one more tile of scores.

    m is `headroom` above the running maximum in units of log2, p = exp2(s * scale - m), and alpha what
    earlier sums of p must be multiplied by: exp2(m_before - m).
    """
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2e + headroom)
    m_finite = finite_or_zero(m_new)
    alpha = exp2(m - m_finite)
    p = exp2(s * scale_log2e - m_finite[:, None])  # [64, BLOCK_N]
    return p, m_new, alpha
