"""From scores to weights in the registers of a warpgroup of the Hopper forward: the softmax of a tile."""

from tilewise.gpu.hopper.common.biases import (
    hide_by_function,
    load_bias,
    penalty,
    poisoned_scores,
    scored,
    with_bias,
)
from tilewise.gpu.hopper.common.compat import gl, gluon, unhoisted
from tilewise.gpu.hopper.common.dropout import dropped, survivors
from tilewise.gpu.hopper.common.layouts import accumulator_layout, operand_layout, row_layout
from tilewise.gpu.hopper.common.products import rescaled
from tilewise.gpu.hopper.common.ranges import mask_left, mask_right
from tilewise.gpu.hopper.common.softmax import (
    LOG2_E,
    exp2,
    finite_or_zero,
    online_softmax,
    partial_sums,
    softcapped,
)
from tilewise.gpu.hopper.forward.watched import hidden_score, shifted, watch_scores, watch_weights
from tilewise.gpu.hopper.mask.visits import hide_by_bits, is_partial, is_seen_by_all, tile_of


@gluon.jit
def headroom(is_exact, cfg: gl.constexpr):
    """How far the reference lies above the maximum, in units of log2.

    Computed where it is used: over the loop it would take a register.
    """
    return gl.where(unhoisted(is_exact) != 0, 0.0, cfg.HEADROOM)


@gluon.jit
def softmax_step(
    W: gl.constexpr, s, m, l, watched, left, entry, words, has_seen, slope, bias, row, tiles, follows,
    is_exact, work, sizes, factors, extras, dtype: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Softmax of a finished tile of scores: (p as operand, m, l, watched, alpha, is_steady, has_seen).

    Steady: alpha is 1. Of a mask: the tile's entry and bits, and 1 if each row has seen a key before.

    `left` tiles are to come. out and lse are the same for any reference m, as p, l and O are in units of 2^m.
    Once each row has seen a key, m stays `headroom` above the maximum so far: no maximum to find or wait for,
    nothing to rescale. This is exact while nothing overflows or loses digits: see `failures`. Else the work
    tile has failed, and is done again with `is_exact`, where m is the running maximum; a steep tile follows
    it from the start.
    """
    if cfg.HAS_SOFTCAP:
        s = softcapped(s, factors)
    j = tile_of(entry, left, tiles, cfg)
    if cfg.SCORE is not None:
        if not cfg.HAS_SOFTCAP:
            s = s * extras.score_unit
        s, _, wrong = scored(s, row, j * cfg.BLOCK_N, False, work.head, work, extras, cfg)
    is_steady = (left < tiles.num_steady) & (follows == 0)
    if cfg.HAS_MASK:
        is_steady = (has_seen != 0) & (follows == 0)
        has_seen = has_seen | is_seen_by_all(W, entry, j, tiles, cfg)
    hidden, is_steady = hidden_score(is_steady, factors, cfg)
    if j >= tiles.full_end:  # only edge tiles are masked
        s = mask_right(s, j, row, work, sizes, cfg, hidden)
    if (cfg.HAS_LEFT or cfg.HIDES_PADDING) and j < tiles.full_begin:
        s = mask_left(s, j, row, work, sizes, cfg, hidden)
    if cfg.HAS_MASK and is_partial(W, entry):
        if cfg.MASK is not None:
            s = hide_by_function(s, row, j * cfg.BLOCK_N, False, work.head, work, extras, cfg, hidden)
        else:
            s = hide_by_bits(s, words, hidden)
    if cfg.IS_GUARDED:  # noqa: SIM102 - a branch of the kernel, in one of the compiler
        if gl.max(gl.max(wrong.to(gl.int32), 1), 0) != 0:
            s = poisoned_scores(s, row, j * cfg.BLOCK_N, work, extras, cfg)
    alpha = gl.full([64], 1.0, gl.float32, row_layout(cfg.BLOCK_N))
    start = row - work.seqlen_q + work.seqlen_k - j * cfg.BLOCK_N  # from the first key to the first query
    if is_steady:  # never with a bias or a function: see `FOLLOWS`
        watched = watch_scores(watched, s, cfg)
        x = s * factors.scale_log2e - m[:, None]  # [64, BLOCK_N]
        if cfg.HAS_ALIBI:
            x = x - penalty(s, start, slope)
        p = exp2(x)
        l = l + partial_sums(p)
        watched = watch_weights(watched, x, p, True, cfg)
    else:
        unit = factors.scale_log2e
        if cfg.SCORE is not None:
            unit = LOG2_E
        if cfg.HAS_ALIBI:
            s = s * unit - penalty(s, start, slope)
            unit = 1.0
        if cfg.HAS_BIAS:
            s = with_bias(s * unit, bias, dtype, cfg)
            unit = 1.0
        m_before = m
        p, m, alpha = online_softmax(s, m, unit, headroom(is_exact, cfg))
        if cfg.WATCHES:
            x = s * unit - finite_or_zero(m)[:, None]
            watched = watch_scores(shifted(watched, m_before, m, l, alpha, cfg), s, cfg)
            watched = watch_weights(watched, x, p, False, cfg)
        l = rescaled(l, alpha) + partial_sums(p)
    p = gl.convert_layout(p.to(dtype), operand_layout(cfg.BLOCK_DV))
    return p, m, l, watched, alpha, is_steady, has_seen


@gluon.jit
def surviving(tile, row, work, seed, extras, sizes, cfg: gl.constexpr):
    """Which weights of rows from `row` on survive dropout, if there is one; see `with_dropout`."""
    kept = 0
    if cfg.HAS_DROPOUT:
        heads = sizes.num_bh if cfg.IS_PACKED else sizes.num_bh // sizes.batch
        column = tile * cfg.BLOCK_N
        kept = survivors(row, column, work.batch, work.head, heads, seed, extras, cfg.BLOCK_N, False, cfg)
    return kept


@gluon.jit
def bias_of(tile, row, work, extras, cfg: gl.constexpr):
    """A tile's biases, if there are any: see `load_bias`."""
    N: gl.constexpr = cfg.BLOCK_N
    return load_bias(row, tile * N, work.batch, work.head, work.seqlen_q, work.seqlen_k, extras, N, cfg)


@gluon.jit
def with_dropout(p, kept, cfg: gl.constexpr):
    """A tile's P as operand, but 0 where dropout takes it."""
    if cfg.HAS_DROPOUT:
        p = gl.convert_layout(p, accumulator_layout(cfg.BLOCK_N), assert_trivial=True)
        p = gl.convert_layout(dropped(p, kept), operand_layout(cfg.BLOCK_DV))
    return p


@gluon.jit
def is_steep(s, m, factors, cfg: gl.constexpr):
    """1 if some row's first scores tell that its maximum will outgrow the reference m, which they have made.

    Their maximum is compared with the mean of the tile's last eight columns, masked or not; the first may
    hold a sink. The mean of all took a third as many instructions as a tile's softmax.
    """
    some = gl.sum(s.reshape([64, cfg.BLOCK_N // 8, 4, 2]), 3)  # what is not used below is not computed
    for _ in gl.static_range((cfg.BLOCK_N // 8).bit_length() - 1):
        _, some = some.reshape([64, 2, some.shape[1] // 2, 4]).permute([0, 2, 3, 1]).split()
    if cfg.HAS_SOFTCAP:
        some = softcapped(some * 0.5, factors) * 2.0
    mean = gl.sum(some.reshape([64, 4]), 1) * (0.125 * factors.scale_log2e)
    mean = gl.convert_layout(mean, row_layout(cfg.BLOCK_N), assert_trivial=True)
    return gl.max(gl.where(m - cfg.HEADROOM - mean > cfg.LARGEST_SPREAD, 1, 0), 0)
