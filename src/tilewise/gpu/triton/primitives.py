"""What every attention kernel here is made of: tensors, tiles, regions, scores, the softmax step, dropout.

A kernel takes a handful of named tuples. `None` in one of them leaves no trace in the compiled kernel, so
a plain causal call compiles to a plain kernel. `cfg` holds every other compile-time choice. Lengths are
never specialized: a new sequence length runs the kernel that is already compiled.

Kernel names: `i` is a query's position and `j` a key's, each inside its own sequence; a score tile is
[BLOCK_M queries, BLOCK_N keys] and starts at (i0, j0). `i` and `j` are 2-D so that the same code serves
a transposed tile.

Scores that reach an exponential are plain products s where the scale is folded into the exponential
(cfg.IS_FOLDED), and else natural logits. Only their difference from a row's maximum or lse is taken to log2
units: a logit of -1e9 there would be rounded to a multiple of 128.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.core.dropout import ROUNDS
from tilewise.gpu.functions.operations import poisoned, tanh
from tilewise.gpu.launch.exact import LOG2E, shift_and_low, two_product, two_sum
from tilewise.gpu.triton.arguments import STAT_ROWS
from tilewise.gpu.triton.tiles import dot_rows

STAT_BLOCK = tl.constexpr(STAT_ROWS)
DROPOUT_ROUNDS = tl.constexpr(ROUNDS)
LN2 = tl.constexpr(0.6931471805599453)

# ---- programmatic dependent launch


@triton.jit
def let_next_kernel_start(cfg: tl.constexpr):
    """The next kernel's programs may start once all of this kernel's have called this or ended."""
    if cfg.HAS_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_kernel_before(cfg: tl.constexpr):
    """Until the kernel before has ended and all that it wrote can be read."""
    if cfg.HAS_PDL:
        tl.extra.cuda.gdc_wait()


# ---- row statistics


@triton.jit
def stat_start(b, h, q_start, sizes, ragged):
    """Offset of a head's first lse: (batch, heads, seqlen_q), or packed (heads, total_q)."""
    head = h.to(tl.int64)
    if ragged.cu_seqlens_q is None:
        head += b.to(tl.int64) * sizes.num_heads
    return head * sizes.seqlen_q + q_start


@triton.jit
def load_lse(lse_ptr, residual_ptr, at, exists, BLOCK_M: tl.constexpr):
    """(lse, residual) [BLOCK_M] of rows; inf, so that p = 0, where there are none."""
    lse = tl.load(lse_ptr + at, mask=exists, other=float("inf"))
    residual = tl.zeros((BLOCK_M,), tl.float32)
    if residual_ptr is not None:
        residual += tl.load(residual_ptr + at, mask=exists, other=0.0)
    return lse, residual


@triton.jit
def sink_weight(sinks, h, lse, residual):
    """(p, log2 p) of a head's sink in rows, p = 0 where lse is -inf."""
    log2_p = ((tl.load(sinks + h).to(tl.float32) - lse) - residual) * LOG2E
    return tl.where(lse == float("-inf"), 0.0, tl.exp2(log2_p)), log2_p


@triton.jit
def padded_stat_start(b, h, q_start, sizes, ragged):
    """Offset of a head's first row of statistics: every sequence starts and ends with a STAT_BLOCK."""
    if ragged.cu_seqlens_q is None:
        block = (b * sizes.num_heads + h).to(tl.int64) * tl.cdiv(sizes.seqlen_q, STAT_BLOCK)
    else:  # numbered as by `packed_tile`
        blocks_per_head = sizes.seqlen_q // STAT_BLOCK + sizes.batch
        block = h.to(tl.int64) * blocks_per_head + q_start // STAT_BLOCK + b
    return block * STAT_BLOCK


@triton.jit
def load_stat(ptr, i0, BLOCK_M: tl.constexpr):
    """[BLOCK_M] of shift, low or delta; low is inf in padding, so that p = 0. Wide loads without a mask."""
    return tl.load(ptr + tl.multiple_of(i0, BLOCK_M) + tl.arange(0, BLOCK_M))


# ---- scores


@triton.jit
def score_ptrs(x, i, j, seq):
    """Pointers to the entries (i, j) of a score-shaped tensor, in 64 bits."""
    head = seq.b.to(tl.int64) * x.stride_batch + seq.h.to(tl.int64) * x.stride_head
    column = (j + seq.first_col).to(tl.int64)
    return x.ptr + head + i.to(tl.int64) * x.stride_row + column * x.stride_col


@triton.jit
def load_scores(x, i, j, seq, IS_EDGE: tl.constexpr):
    """A tile of a score-shaped tensor, zero where it does not exist; a 0 that is not used if x is None.

    To be called before the tile's products, which then hide the time that it takes.
    """
    if x is None:
        return i * 0
    else:
        ptrs = score_ptrs(x, i, j, seq)
        if IS_EDGE:
            exists = (i < seq.seqlen_q) & (j < seq.seqlen_k) & (j >= 0)
            return tl.load(ptrs, mask=exists, other=0)
        else:
            return tl.load(ptrs)


@triton.jit
def store_scores(x, tile, i, j, seq, IS_EDGE: tl.constexpr):
    """Write a tile of a score-shaped tensor where it exists."""
    exists = None
    if IS_EDGE:
        exists = (i < seq.seqlen_q) & (j < seq.seqlen_k) & (j >= 0)
    tl.store(score_ptrs(x, i, j, seq), tile.to(x.ptr.dtype.element_ty), mask=exists)


@triton.jit
def logits(s, i, j, seq, extras, sizes, factors, cfg: tl.constexpr, IS_EDGE: tl.constexpr, bias, mask):
    """(scores with every option applied, tanh of the capped ones, slope, scores before the score function).

    From the plain products s = q k^T.
    Still without the scale if cfg.IS_FOLDED (`exponentials` then applies it). -inf where the key is not
    visible. IS_EDGE=False promises that lengths, window and a mask function hide nothing in this tile. `bias`
    and `mask` are what `load_scores` gives for those of extras; `slope` is the score function's derivative.
    """
    t = s
    unit = 1.0
    if cfg.HAS_SOFTCAP:
        t = tanh(s * (factors.scale / factors.softcap), s.dtype == tl.float32 and cfg.PRECISION != "tf32")
        s = t * factors.softcap
    else:
        if cfg.IS_FOLDED:
            unit = 1.0 / factors.scale
        else:
            s = s * factors.scale
    if extras.bias is not None:
        s += bias.to(tl.float32)
    if extras.alibi is not None:
        slope = tl.load(extras.alibi.ptr + seq.b * extras.alibi.stride_batch + seq.h).to(tl.float32)
        s -= tl.abs(i + seq.offset - j).to(tl.float32) * (slope * unit)
    slope_of_score = s
    before = s
    wrong = s != s
    if cfg.SCORE is not None:
        s, slope_of_score, wrong = cfg.SCORE(s, i, j, seq, extras.captured)
        s = tl.where(i < seq.seqlen_q, s, float("-inf"))  # rows that do not exist: of 0 it may be anything
    if extras.mask is not None:
        s = tl.where(mask != 0, s, float("-inf"))
    if IS_EDGE:
        s = tl.where(visible_pairs(i, j, seq, sizes), s, float("-inf"))
        if cfg.MASK is not None:
            visible, wrong_in_mask = cfg.MASK(i, j, seq, extras.captured)
            s = tl.where(visible, s, float("-inf"))
            if cfg.IS_GUARDED:
                s = poisoned(s, wrong_in_mask, i, seq, extras.captured)
    if cfg.IS_GUARDED and cfg.SCORE is not None:
        s = poisoned(s, wrong, i, seq, extras.captured)
    return s, t, slope_of_score, before


@triton.jit
def tile_scores(a, b, i, j, seq, extras, sizes, factors, cfg: tl.constexpr, IS_EDGE: tl.constexpr):
    """Scores of every row of tile a and every row of tile b, with all options; i and j: their positions."""
    bias = load_scores(extras.bias, i, j, seq, IS_EDGE)
    mask = load_scores(extras.mask, i, j, seq, IS_EDGE)
    s, _, _, _ = logits(dot_rows(a, b, cfg), i, j, seq, extras, sizes, factors, cfg, IS_EDGE, bias, mask)
    return s


@triton.jit
def before_function(ds, slope, cfg: tl.constexpr):
    """The gradient of scores before the score function, from that behind it; 0 from 0, as at hidden keys."""
    if cfg.HAS_SLOPE:
        return tl.where(ds == 0.0, 0.0, ds * slope)
    else:
        return ds


@triton.jit
def visible_pairs(i, j, seq, sizes):
    """Whether length and window let query i see key j."""
    visible = (j < seq.seqlen_k) & (j >= 0)
    if sizes.window_left is not None:
        visible = visible & (j >= i + seq.offset - sizes.window_left)
    if sizes.window_right is not None:
        visible = visible & (j <= i + seq.offset + sizes.window_right)
    return visible


@triton.jit
def log2_unit(factors, cfg: tl.constexpr):
    """What scores are multiplied by to be in log2 units."""
    if cfg.IS_FOLDED:
        return scale_of(factors) * LOG2E
    else:
        return LOG2E


@triton.jit
def scale_of(factors):
    """The scale as a float32, which under the interpreter is a number of Python's."""
    return tl.zeros((), tl.float32) + factors.scale


@triton.jit
def exponentials(s, shift, low, factors, cfg: tl.constexpr):
    """p = exp(logits - lse) of scores s, for rows' `softmax_stats`.

    s - shift is exact where p is not tiny: what is left of scores and lse of any size is small.
    """
    return tl.exp2((s - shift) * log2_unit(factors, cfg) - low)


@triton.jit
def softmax_stats(lse, residual, factors, cfg: tl.constexpr):
    """(shift, low) of rows for `exponentials`; p = 0 where lse is inf. Both are 0 where it is -inf."""
    is_finite = tl.abs(lse) < float("inf")
    finite = tl.where(is_finite, lse, 0.0)
    if cfg.IS_FOLDED:
        shift, low = shift_and_low(finite, residual, scale_of(factors))
    else:
        shift, low = finite, residual * LOG2E
    return shift, tl.where(is_finite | (lse == float("-inf")), low, lse)


@triton.jit
def sink_maximum(sink, cfg: tl.constexpr):
    """m of a row that has seen a key of logit `sink`."""
    if cfg.IS_FOLDED:
        return sink.to(tl.float32) * LOG2E
    else:
        return sink.to(tl.float32)


@triton.jit
def exp_difference(m, m_new, cfg: tl.constexpr):
    """exp of the difference of two maxima."""
    if cfg.IS_FOLDED:
        return tl.exp2(m - m_new)
    else:
        return tl.exp2((m - m_new) * LOG2E)


@triton.jit
def exact_lse(m, l, factors, cfg: tl.constexpr):
    """(lse, residual) of a maximum and a sum of exponentials: -inf and 0 where nothing was seen.

    Folded, m is in log2 units, rounded: m = scale * log2(e) * shift + what two floats hold, and lse is
    scale * shift plus that and the sum's logarithm.
    """
    m = tl.where(m == float("-inf"), 0.0, m)
    if cfg.IS_FOLDED:
        scale_log2e = log2_unit(factors, cfg)
        shift = m / scale_log2e
        high, low = two_product(shift, scale_log2e)
        rest = (((m - high) - low) + tl.log2(l)) * LN2
        high, low = two_product(shift, scale_of(factors))
    else:
        rest = tl.log2(l) * LN2
        high, low = m, 0.0
    high, lower = two_sum(high, rest)
    low += lower
    lse = high + low
    return tl.where(l == 0.0, float("-inf"), lse), tl.where(l == 0.0, 0.0, (high - lse) + low)


@triton.jit
def online_softmax(s, m, l, factors, cfg: tl.constexpr, AXIS: tl.constexpr):
    """(p, correction, m, l) after one more tile of scores with its keys along AXIS: 1, or 0 if transposed.

    m and l are the running maximum (folded: in log2 units) and sum of exponentials; what was summed under
    the old maximum is worth `correction` of its value now. A row that saw only -inf keeps m = -inf and l = 0.
    """
    m_tile = tl.max(s, AXIS)
    if cfg.IS_FOLDED:
        m_tile = m_tile * log2_unit(factors, cfg)  # the scale is positive, so it commutes with the maximum
    m_new = tl.maximum(m, m_tile)
    m_finite = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf would be NaN
    correction = exp_difference(m, m_finite, cfg)
    if cfg.IS_FOLDED:  # rounded once, or `exact_lse` would not be that of these p
        p = tl.exp2(tl.fma(s, log2_unit(factors, cfg), -tl.expand_dims(m_finite, AXIS)))
    else:
        p = exp_difference(s, tl.expand_dims(m_finite, AXIS), cfg)
    return p, correction, m_new, l * correction + tl.sum(p, AXIS)


# ---- dropout


@triton.jit
def keep_tile(i0, j0, seq, extras, sizes, cfg: tl.constexpr):
    """True [BLOCK_M, BLOCK_N] where a weight survives, see `core.dropout`: a call serves 4 x 4 of them.

    i0 and j0 must be multiples of 16. Joined words beside a mask's bytes make Triton 3.6 and 3.7 take weights
    for numbers of 4 bits, whose products need 32 rows: of 16, both operands' order is wrong.
    """
    has_16_rows: tl.constexpr = extras.mask is not None and (cfg.BLOCK_M == 16 or cfg.BLOCK_N == 16)
    if cfg.DROPOUT_STEP == 1 or has_16_rows:
        i, j = (i0 + tl.arange(0, cfg.BLOCK_M))[:, None], (j0 + tl.arange(0, cfg.BLOCK_N))[None, :]
        keep = keep_entries(i, j, seq, extras, sizes, cfg)
    else:
        i0, j0 = in_whole_call(i0, j0, extras, cfg)
        keep = keep_squares(i0, j0, seq, extras, sizes, cfg, cfg.BLOCK_M, cfg.BLOCK_N)
    return keep


@triton.jit
def in_whole_call(i, j, extras, cfg: tl.constexpr):
    """Queries and keys as dropout numbers them: the call may be a part of a larger one."""
    if cfg.DROPOUT_STEP != 0:
        i += tl.load(extras.dropout_seed + 1).to(tl.int32)
        j += tl.load(extras.dropout_seed + 2).to(tl.int32)
    return i, j


@triton.jit
def keep_squares(i0, j0, seq, extras, sizes, cfg: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    call_i = (i0 // 4 + tl.arange(0, BLOCK_M // 4))[:, None]
    call_j = (j0 // 4 + tl.arange(0, BLOCK_N // 4))[None, :]
    w0, w1, w2, w3 = dropout_words(call_i, call_j, seq, extras, sizes, cfg)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [BLOCK_M // 4, BLOCK_N // 4, 2, 2]: word 2 * c + d
    words = tl.reshape(words, (BLOCK_M // 16, 4, BLOCK_N // 16, 4, 2, 2))
    words = tl.reshape(tl.permute(words, (0, 1, 4, 2, 3, 5)), (BLOCK_M // 16, 1, 8, BLOCK_N // 16, 1, 8))
    e, f = tl.arange(0, 2)[None, :, None, None, None, None], tl.arange(0, 2)[None, None, None, None, :, None]
    return tl.reshape(is_kept(words, 2 * e + f, sizes), (BLOCK_M, BLOCK_N))


@triton.jit
def keep_entries(i, j, seq, extras, sizes, cfg: tl.constexpr):
    """The same decision entry by entry, for any i and j: 16 times the work of `keep_squares`."""
    i, j = in_whole_call(i, j, extras, cfg)
    call_i, call_j = i // 16 * 4 + i % 8 // 2, j // 16 * 4 + j % 8 // 2
    w0, w1, w2, w3 = dropout_words(call_i, call_j, seq, extras, sizes, cfg)
    even, odd = tl.where(j % 2 == 0, w0, w1), tl.where(j % 2 == 0, w2, w3)
    return is_kept(tl.where(i % 2 == 0, even, odd), i // 8 % 2 * 2 + j // 8 % 2, sizes)


@triton.jit
def dropout_words(call_i, call_j, seq, extras, sizes, cfg: tl.constexpr):
    seed = tl.load(extras.dropout_seed)
    head = seq.b * sizes.num_heads + seq.h
    if cfg.DROPOUT_STEP != 0:
        first, num_heads = tl.load(extras.dropout_seed + 3), tl.load(extras.dropout_seed + 4)
        head = (first + seq.b * num_heads + seq.h).to(tl.int32)
    c0 = (call_j + call_i * 0).to(tl.uint32)
    c1 = (call_i + call_j * 0).to(tl.uint32)
    c2 = c0 * 0 + (seed & 0xFFFFFFFF).to(tl.uint32)
    c3 = c0 * 0 + ((seed >> 32).to(tl.uint32) ^ head.to(tl.uint32))
    return tl.philox(0, c0, c1, c2, c3, DROPOUT_ROUNDS)


@triton.jit
def is_kept(words, byte, sizes):
    """Whether the byte of that number survives."""
    return ((words >> (8 * byte).to(tl.uint32)) & 255) >= sizes.dropout_threshold.to(tl.uint32)
