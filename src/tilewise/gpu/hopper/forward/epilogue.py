"""The end of the forward: whether a work tile has failed, and storing O and lse."""

from tilewise.gpu.hopper.common.compat import fence_async_shared, gl, gluon, store_tile
from tilewise.gpu.hopper.common.key_loads import queries_at
from tilewise.gpu.hopper.common.layouts import row_layout
from tilewise.gpu.hopper.common.products import beside, rescaled, store_wide
from tilewise.gpu.hopper.common.softmax import (
    LN_2,
    LOG2_E,
    exact_lse,
    exp2,
    finite_or_zero,
    log2,
    log2_parts,
    partial_sums,
    reciprocal,
)
from tilewise.gpu.hopper.forward.watched import have_nan, max_logits

SMALLEST_SUM = gl.constexpr(2.0**-100)  # of O's sizes, by thread: below 2^-126 float32 loses digits
LARGEST_REFERENCE = gl.constexpr(2.0**29)  # rounded by up to 32


@gluon.jit
def failures(m, l, acc, dtype: gl.constexpr, cfg: gl.constexpr):
    """[128] flags, one a thread: 1 if sums of its rows are too large, or O is too large or small for float32.

    Or if m is so large that its rounding, in units of log2, reaches half of the headroom: P might vanish.
    See `softmax_step`.
    """
    failed = gl.where(l <= cfg.LARGEST_SUM, 0, 1)  # [64, 4]
    m = beside(gl.abs(m), l)
    failed = gl.where((m < LARGEST_REFERENCE) | (m == float("inf")), failed, 1)
    if dtype == gl.bfloat16:  # values of float16 are neither so large nor so small
        sizes = partial_sums(gl.abs(acc))
        is_fine = (l == 0.0) | ((sizes >= SMALLEST_SUM) & (sizes < float("inf")))
        failed = gl.where(is_fine, failed, 1)
    return gl.max(failed.reshape([4, 2, 8, 4]), 1).reshape([128])


@gluon.jit
def store_rows(
    acc, m, l, watched, smem_o, row, work, o_desc, targets, sinks, sizes, factors, is_exact, headroom, extras,
    cfg: gl.constexpr,
):  # fmt: skip
    """Normalize, and store O (staged in the slot of Q, which is no longer needed), lse and statistics."""
    if cfg.WATCHES:
        store_watched(m, l, watched, row, work, targets, sinks, sizes, factors, is_exact, cfg)
    factor = store_lse(m, l, row, work, targets, sinks, sizes, factors, cfg, headroom)
    if cfg.HAS_DROPOUT:
        factor = factor * extras.inverse_keep
    acc = rescaled(acc, factor)  # [64, BLOCK_DV]
    if cfg.WIDE_COLUMNS > 0:
        start = work.start_q if cfg.IS_PACKED else work.batch * sizes.seqlen_q
        heads = (sizes.num_bh if cfg.IS_ORDERED else sizes.num_bh // sizes.batch) * cfg.PACK
        store_wide(o_desc, acc, row, work.seqlen_q, start, work.head, heads, 0, cfg.WIDE_COLUMNS, cfg.PACK)
    else:
        smem_o.reshape([64, cfg.BLOCK_DV]).store(acc.to(o_desc.dtype))
        store_staged(o_desc, smem_o, row, work, cfg)


@gluon.jit
def row_places(row, work, sizes, cfg: gl.constexpr):
    """(places in lse, heads, whether they exist) of a warpgroup's rows."""
    rows = gl.arange(0, 64, row_layout(cfg.BLOCK_N))
    position = row + rows // cfg.PACK
    head = work.head + rows % cfg.PACK
    if cfg.IS_PACKED:
        stat = head.to(gl.int64) * sizes.seqlen_q + work.start_q + position
    else:
        heads = sizes.num_bh if cfg.IS_CACHED else sizes.num_bh // sizes.batch
        num_heads = heads * cfg.PACK
        stat = (work.batch * num_heads + head).to(gl.int64) * sizes.seqlen_q + position
    return stat, head, position < work.seqlen_q


@gluon.jit
def store_watched(m, l, watched, row, work, targets, sinks, sizes, factors, is_exact, cfg: gl.constexpr):
    """Store the statistics of a warpgroup's rows: see `watched`. A sink counts as one outcome more."""
    largest, weighted = watched
    stat, head, inside = row_places(row, work, sizes, cfg)
    if cfg.HAS_ROW_MAX:
        row_max = gl.convert_layout(gl.max(largest, 1), row_layout(cfg.BLOCK_N), assert_trivial=True)
        gl.store(targets.row_max + stat, row_max * factors.scale, mask=inside)
    if cfg.HAS_MAX_LOGIT:
        of_warps = max_logits(largest, m, row, work)
        heads = work.head + 0 * gl.arange(0, 4, of_warps.type.layout)
        gl.atomic_max(targets.max_logit + heads, of_warps * LN_2)
        # Sums of a first attempt may be NaN because they overflowed. NaN stays, whatever other warps add.
        is_nan = have_nan(m, l, row, work) & (is_exact != 0)
        gl.store(targets.max_logit + heads, of_warps + float("nan"), mask=is_nan)
    if cfg.HAS_ENTROPY:
        l = gl.convert_layout(gl.sum(l, 1), row_layout(cfg.BLOCK_N), assert_trivial=True)
        weighted = gl.convert_layout(gl.sum(weighted, 1), row_layout(cfg.BLOCK_N), assert_trivial=True)
        if cfg.HAS_SINKS:
            sink = gl.load(sinks + head).to(gl.float32) * LOG2_E
            with_sink = finite_or_zero(gl.maximum(m, sink))
            factor, of_sink = exp2(m - with_sink), exp2(sink - with_sink)
            weighted = gl.where(l == 0.0, 0.0, weighted + (m - with_sink) * l) * factor
            weighted += gl.where(of_sink == 0.0, 0.0, of_sink * (sink - with_sink))
            l = l * factor + of_sink
        entropy = (log2(l) - weighted * reciprocal(l)) * LN_2
        gl.store(targets.entropy + stat, gl.where(l == 0.0, 0.0, entropy), mask=inside)


@gluon.jit
def store_lse(m, l, row, work, targets, sinks, sizes, factors, cfg: gl.constexpr, headroom=0.0):
    """Store lse, and if asked its residual; what O is to be multiplied by: 0 in rows that see no key."""
    l = gl.convert_layout(gl.sum(l, 1), row_layout(cfg.BLOCK_N), assert_trivial=True)
    stat, head, inside = row_places(row, work, sizes, cfg)
    factor = gl.full([64], 1.0, gl.float32, row_layout(cfg.BLOCK_N))
    if cfg.HAS_SINKS:
        sink_log2 = gl.load(sinks + head).to(gl.float32) * LOG2_E
        m_with_sink = gl.maximum(m, sink_log2)
        m_finite = finite_or_zero(m_with_sink)
        factor = exp2(m - m_finite)
        l = l * factor + exp2(sink_log2 - m_finite)
        m = m_with_sink
    if factors is None:  # 8-bit: the maximum is followed, so l is at most the number of keys
        lse = (m + log2(l)) * LN_2
    else:
        whole, rest = log2_parts(l)
        lse = (m + (whole + rest)) * LN_2
        if targets.has_residual != 0:
            lse, residual = exact_lse(m, l, factors, headroom)
            gl.store(targets.residual + stat, residual, mask=inside)
    gl.store(targets.lse + stat, lse, mask=inside)
    return gl.where(l == 0.0, 0.0, factor * reciprocal(l))


@gluon.jit
def store_staged(o_desc, smem_o, row, work, cfg: gl.constexpr):
    """Start the TMA copy of a tile of O from its staging buffer, which all threads have just stored."""
    fence_async_shared()  # the stores are visible to the TMA copy below
    store_tile(o_desc, queries_at(row, work.head, work, cfg), smem_o)
