"""From products to weights and their gradients, in the registers of a warpgroup."""

from tilewise.gpu.hopper.backward.ranges import load_shift, mask_transposed, staggered
from tilewise.gpu.hopper.common.biases import hide_by_function, penalty, scored, with_bias
from tilewise.gpu.hopper.common.compat import gl, gluon
from tilewise.gpu.hopper.common.dropout import marked
from tilewise.gpu.hopper.common.softmax import LOG2_E, exp2, tanh_of_scores
from tilewise.gpu.hopper.mask.visits import hide_by_bits


@gluon.jit
def opaque_zero(x):
    """0, which the compiler can't tell. Added to the index of a tile that never moves, it keeps the tile's
    matrix descriptors from being hoisted out of the loop, where they took registers: 488 bytes of spills
    without it, 112 with it.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pinned(x):
    """x of 16 bits an element, converted and packed where this stands.

    The compiler would move the conversion: back, where unpacked values take registers, or down between the
    products that have x as register operand. Those then no longer form one group, and every later wait for a
    number of groups waits for more than it should.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def capped(s, factors, cfg: gl.constexpr):
    """(scores, their unit in units of log2, derivative of the softcap) of finished products."""
    unit, slope = factors.scale_log2e, 1.0
    if cfg.HAS_SOFTCAP:
        s = tanh_of_scores(s, factors)
        unit, slope = factors.softcap_log2e, 1.0 - s * s
    return s, unit, slope


@gluon.jit
def has_shift(stats):
    """Whether some row of the tile has a large lse; see `rows.attn_bwd_prepare_kernel`."""
    first = stats.slice(0, 1, 0).load(gl.BlockedLayout([1], [32], [4], [0]))
    return gl.max(first, 0) > 128.0


@gluon.jit
def weights(
    s, stats, at, tile, key, own, work, sizes, factors, extras, dtype: gl.constexpr, cfg: gl.constexpr
):
    """(P^T in float32, derivative of softcap and score function) of finished products s [64 keys, BLOCK_M].

    Weights that are dropped are negative: so `as_operand` makes 0 of them, and their size is there for dS^T.
    Where lse is large, scores lose a shift first: their difference is exact. That is rare, so in a branch.
    `at`: a `Step`, which the kernels of wide heads do not need.
    """
    columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    x, unit, derivative = capped(s, factors, cfg)
    shift_unit = 1.0
    if cfg.SCORE is not None:
        query = staggered(at.number, at.tiles, at.spread, cfg) * cfg.BLOCK_M
        shift_unit, unit = extras.score_unit, LOG2_E
        x, of_score, _ = scored(x * shift_unit, key, query, True, at.head, work, extras, cfg)
        derivative = derivative * of_score
        if query + cfg.BLOCK_M > work.seqlen_q:  # rows that do not exist: of 0 it may be anything
            exists = query + gl.arange(0, cfg.BLOCK_M, columns) < work.seqlen_q
            x = gl.where(exists[None, :], x, float("-inf"))
    if cfg.HAS_LARGE_LSE and has_shift(stats):
        x = x - load_shift(stats, at, work, columns, sizes, cfg)[None, :] * shift_unit
    lse = stats.slice(0, cfg.BLOCK_M, 0).load(columns)
    x = x * unit - lse[None, :]
    if cfg.HAS_ALIBI:
        query = staggered(at.number, at.tiles, at.spread, cfg) * cfg.BLOCK_M + work.seqlen_k - work.seqlen_q
        x = x - penalty(x, key - query, at.slope)
    if cfg.HAS_BIAS:
        x = with_bias(x, at.bias, dtype, cfg)
    if (tile < own.full_begin) | (tile >= own.full_end):
        x = mask_transposed(x, tile, key, work, sizes, cfg)
    if cfg.HAS_MASK:  # noqa: SIM102 - `at` may be None
        if at.has_hidden != 0:
            if cfg.MASK is not None:
                query = staggered(at.number, at.tiles, at.spread, cfg) * cfg.BLOCK_M
                x = hide_by_function(x, key, query, True, at.head, work, extras, cfg)
            else:
                x = hide_by_bits(x, at.words)
    p = exp2(x)
    if cfg.HAS_DROPOUT:
        p = marked(p, at.kept)
    return p, derivative


@gluon.jit
def in_16_bits(p, dtype: gl.constexpr, cfg: gl.constexpr):
    """Weights in 16 bits; those that are dropped, which are negative, are 0."""
    rounded = p.to(dtype)
    if cfg.HAS_DROPOUT:
        ASM: gl.constexpr = _clamped(dtype)
        rounded = gl.inline_asm_elementwise(ASM, "=r,r,r", [p], dtype=rounded.dtype, is_pure=True, pack=2)
    return rounded


@gluon.constexpr_function
def _clamped(dtype):
    return f"cvt.rn.relu.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def probabilities(
    s, stats, at, tile, key, own, work, sizes, factors, extras, dtype: gl.constexpr, cfg: gl.constexpr
):
    """(P^T for dV, P^T times the derivative for dS^T) of finished products, in 16 bits: see `weights`."""
    p, derivative = weights(s, stats, at, tile, key, own, work, sizes, factors, extras, dtype, cfg)
    p_16bit = pinned(in_16_bits(p, dtype, cfg))
    weight = p_16bit
    if cfg.HAS_SLOPE:  # which may be negative, and infinite at hidden keys
        weight = gl.where(p == 0.0, 0.0, gl.abs(p) * derivative).to(dtype)
    elif cfg.HAS_SOFTCAP:
        weight = (p * derivative).to(dtype)
    elif cfg.HAS_DROPOUT:
        weight = p.to(dtype)
    return p_16bit, weight


@gluon.jit
def score_gradient(weight, p, dp, stats, dtype: gl.constexpr, cfg: gl.constexpr):
    """dS^T = weight * (dP^T - delta) [64 keys, BLOCK_M]; weights of 16 bits are widened here, not before.

    p: the weights for dV. Where dropout takes one it is 0, and `weight` negative, but for a slope's sign.
    """
    delta = stats.slice(cfg.BLOCK_M, cfg.BLOCK_M, 0).load(gl.SliceLayout(0, dp.type.layout))
    if weight.dtype != gl.float32:
        weight = pinned(weight).to(gl.float32)
    if cfg.HAS_DROPOUT:  # times inverse_keep: the statistics have delta / inverse_keep
        if cfg.HAS_SLOPE:
            ds = gl.where(p == 0.0, 0.0, weight) * dp - weight * delta[None, :]
        else:
            ds = gl.maximum(weight, 0.0) * dp - gl.abs(weight) * delta[None, :]
    else:
        ds = weight * (dp - delta[None, :])
    return ds.to(dtype)
