"""Host side of the Hopper backward for head sizes up to 128: the launches of its three kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.core.dropout import rate
from tilewise.core.plan import Results
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.gpu.hopper.backward.arguments import (
    DQ_TILE,
    MOST_SOFTCAP,
    BackwardConfig,
    BackwardSizes,
    Division,
    FinishSizes,
    RowSizes,
    ScoreFactors,
    Splits,
    WideBackwardConfig,
)
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import Packing, TransposedMap
from tilewise.gpu.hopper.common.functions import compiled_functions, source_of
from tilewise.gpu.hopper.mask.tile_map import transposed_map
from tilewise.gpu.launch.launch_plan import Launch, Step, Tensors, run_steps

MAX_HEAD_DIM = 128  # that one kernel has dK, dV and dQ of

Config = BackwardConfig | WideBackwardConfig


def backward(
    problem: AttentionProblem, inputs: Inputs, known: Results, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Gradients by recomputation from lse + residual, each contiguous."""
    cfg = backward_config(problem)
    division = divide(problem, cfg, host.num_sms(inputs.query.device.index))
    given, optional = ready_tensors(inputs, known, dout, dlse)
    query = given[0]
    assert query is not None
    dq, dk, dv = new_gradients(problem, inputs)
    *sums, semaphores = scratch_shapes(problem, cfg, division, query.shape[-3])
    scratch = [query.new_empty(shape, dtype=torch.float32) for shape in sums]
    if late_tiles(problem, cfg, division):
        scratch.append(dq.view(-1).view(torch.float32))
    scratch.append(query.new_empty(semaphores, dtype=torch.int32))
    ordered = host.new_order(problem, inputs.cu_seqlens_q)
    optional = (*optional, *ordered, *host.extras_of(problem, inputs, True))
    new = (dq, dk, dv, *scratch, host.scheduler_counter(query.device))
    mask = map_of(problem, inputs, cfg)
    run_steps(problem, steps(cfg, division, given, new, optional, mask))
    return Gradients(dq, dk, dv, None, sinks_gradient(problem, inputs.sinks, scratch[0], scratch[1], cfg))


def new_gradients(problem: AttentionProblem, inputs: Inputs) -> list[Tensor]:
    """Memory of dq, dk and dv."""
    return [t.new_empty(t.shape, dtype=problem.gradient_dtype(t.dtype)) for t in inputs[:3]]


def ready_tensors(
    inputs: Inputs, known: Results, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensors, Tensors]:
    """(query, key, value, out, lse, residual, dout), (dlse, offsets of queries and of keys) for kernels."""
    assert known.out is not None
    query, key, value, out, dout = (host.tma_ready(t) for t in (*inputs[:3], known.out, dout))
    small = (*known[1:], dlse, inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    lse, residual, *optional = (None if t is None else t.contiguous() for t in small)
    return (query, key, value, out, lse, residual, dout), tuple(optional)


def map_of(problem: AttentionProblem, inputs: Inputs, cfg: BackwardConfig) -> TransposedMap:
    """The map of a call's mask, or of none."""
    if not cfg.HAS_MASK:
        return TransposedMap()
    return transposed_map(problem, source_of(problem, inputs), cfg.BLOCK_M)


def steps(
    cfg: BackwardConfig,
    division: Division,
    given: Sequence[Tensor | None],
    new: Sequence[Tensor],
    optional: Tensors,
    mask: TransposedMap,
) -> list[Step]:
    """The launches; `new` are dq, dk, dv, `scratch_shapes` and `scheduler_counter`.

    `optional` are dlse, the sequences' offsets, `new_order` and `extras_of`.
    """
    query, key, value, out, lse, residual, dout = given
    dq, dk, dv, stats, shifts, dq_sum, *splits, semaphores, counter = new
    key_sums = splits[0] if splits else dq if division.splits else None
    dlse, cu_q, cu_k, *ordered = optional[:5]
    main = (query, key, value, dout, cu_q, cu_k, *optional[5:])
    fresh = (dk, dv, stats, shifts, dq_sum, semaphores, *ordered, counter, key_sums, *mask[:2])
    return [
        *host.order_steps(cu_k, cu_q, cfg.BLOCK_N, tuple(ordered)),
        Step(prepare_launch, (out, dout, lse, residual, dlse, cu_q), (cfg,), (stats, shifts, semaphores)),
        Step(main_launch, main, (cfg, division, mask[2:]), fresh),
        Step(finish_launch, (dq, cu_q), (cfg, division), (dq_sum, semaphores, ordered[1], dk, dv, key_sums)),
    ]


@functools.lru_cache(maxsize=4096)
def backward_config(problem: AttentionProblem) -> BackwardConfig:
    """The tiles of a problem. Measurements are in docs/kernels-hopper.md."""
    block_d = 64 if max(problem.head_dim, problem.head_dim_v) <= 64 else 128
    return BackwardConfig(
        BLOCK_M=128 if block_d == 64 else 64,
        BLOCK_N=128,
        BLOCK_D=block_d,
        K_STAGES=2 if block_d == 64 else 1,
        IS_DETERMINISTIC=problem.deterministic,
        LATEST_FIRST=latest_first(problem, block_d),
        BIAS_OF_ROWS=problem.bias_shape is not None and problem.bias_shape[2] == 1,
        HAS_SLOPE=compiled_functions(problem).has_slope,
        HAS_LARGE_LSE=has_large_lse(problem),
        **wide_columns(problem),
        **host.options(problem),
    )


def wide_columns(problem: AttentionProblem) -> dict[str, Any]:
    """The columns of gradients that are in float32."""
    dims = {"WIDE_COLUMNS": problem.head_dim, "WIDE_COLUMNS_V": problem.head_dim_v}
    return dims if problem.has_wide_results else {}


def has_large_lse(problem: AttentionProblem) -> bool:
    """Whether lse may be too large for one float."""
    has_more = problem.has_alibi or problem.bias_shape is not None or problem.has_score_function
    return has_more or not 0 < problem.softcap <= MOST_SOFTCAP


def latest_first(problem: AttentionProblem, block_d: int) -> bool:
    """Whether tiles of keys visit queries from the last on: deterministic and causal, where dQ has an order.

    So the first tiles, which have most to do, come first, and are the first to add to each query tile. Those
    after them start a step late; but without groups, a tile of head size 64 is only a step shorter than the
    one before, and what is lost at the start is lost to the end.
    """
    visibility = problem.visibility()
    is_causal = visibility.right is not None and visibility.left is None
    return problem.deterministic and is_causal and (block_d == 128 or problem.group_size > 1)


def query_bh(problem: AttentionProblem) -> int:
    """(batch, query head) pairs, or query heads if packed."""
    return problem.num_heads * (1 if problem.is_packed else problem.batch)


def stats_shape(problem: AttentionProblem, cfg: Config, rows: int) -> tuple[int, int]:
    """(tiles, rows * BLOCK_M): see `rows.attn_bwd_prepare_kernel`. `rows` of the query tensor."""
    tiles = query_bh(problem) * host.most_tiles(problem, rows, cfg.BLOCK_M)
    return tiles, cfg.STATS * cfg.BLOCK_M


def scratch_shapes(
    problem: AttentionProblem, cfg: BackwardConfig, division: Division, rows: int
) -> list[tuple[int, ...]]:
    """Memory of one call. Float32: `stats_shape`, what scores of each row lose where lse is large; dQ, dK and
    dV of splits as registers lie.

    Then int32: the semaphore of each query tile's dQ; of each (batch, key head), tiles of keys whose dQ is
    there; how many programs have reduced shared tiles.
    """
    stats = stats_shape(problem, cfg, rows)
    dq = (stats[0] * cfg.BLOCK_M * cfg.BLOCK_D // 128, 128)
    semaphores = (stats[0] + query_bh(problem) + 1,)
    has_own = division.splits and not late_tiles(problem, cfg, division)
    return [
        stats,
        (stats[0] * stats[1] // 2,),
        dq,
        *([(division.splits, 2 * cfg.BLOCK_N * cfg.BLOCK_D)] if has_own else []),
        semaphores,
    ]


def late_tiles(problem: AttentionProblem, cfg: BackwardConfig, division: Division) -> int:
    """How many query tiles of each head, from the first sequence's first one on, have splits in their dq.

    Splits take the memory of dq, which nobody needs before they are reduced, if they fit; 0 if not.
    """
    row_bytes = problem.gradient_dtype(problem.dtype).itemsize * problem.num_heads * problem.head_dim
    rows = -(-division.splits * 8 * cfg.BLOCK_N * cfg.BLOCK_D // max(1, row_bytes))
    if rows > problem.batch * problem.seqlen_q:
        return 0
    sequences, rows = divmod(rows, max(1, problem.seqlen_q))
    return sequences * host.most_tiles(problem, problem.seqlen_q, cfg.BLOCK_M) + -(-rows // cfg.BLOCK_M)


@functools.lru_cache(maxsize=4096)
def divide(problem: AttentionProblem, cfg: BackwardConfig, sms: int) -> Division:
    """Which tiles of keys CTAs share, if that saves time: those of a last, incomplete wave.

    Causal, the longest ones where tiles are few. With a window none is long. Deterministic, dQ has an order;
    packed, the host does not know the lengths.
    """
    tiles = -(-problem.seqlen_k // cfg.BLOCK_N) * problem.num_kv_heads * problem.batch
    query_tiles = -(-problem.seqlen_q // cfg.BLOCK_M)
    steps, shared = query_tiles * problem.group_size, tiles % sms
    if cfg.HAS_RIGHT:
        return divide_causal(problem, cfg, sms)
    if problem.is_packed or not cfg.STAGGERED or steps * shared == 0:
        return Division(tiles)
    unit = -(-shared * steps // sms)
    units = -(-shared * steps // unit)
    # In steps, as measured: a unit stores twice. Splits are stored and read in float32. The idle SMs of the
    # last wave would have converted that much of dQ.
    cost = 1 + (units + shared) * cfg.BLOCK_D / 8192 + query_bh(problem) * query_tiles / 300
    if steps - unit <= cost:
        return Division(tiles)
    whole = tiles - shared
    return Division(whole + units, shared, units + shared, whole, unit)


def divide_causal(problem: AttentionProblem, cfg: BackwardConfig, sms: int) -> Division:
    """Tiles in up to four splits each, if each SM has at most one; but whole if some split would be empty."""
    bh = problem.num_kv_heads * problem.batch
    tiles = -(-problem.seqlen_k // cfg.BLOCK_N)
    visibility = problem.visibility()
    query_tiles = -(-problem.seqlen_q // cfg.BLOCK_M)
    is_plain = visibility.left is None and not (problem.is_packed or cfg.IS_DETERMINISTIC or cfg.HAS_MASK)
    is_small = bh * tiles * query_tiles > 0 and bh * tiles <= sms and l2_swizzle(problem, bh) == bh
    if not (is_plain and is_small):
        return Division(tiles * bh)
    ahead = problem.seqlen_k - problem.seqlen_q + (visibility.right or 0)  # keys that the first query sees
    lengths = [
        problem.group_size * max(1, query_tiles - max(0, key - ahead) // cfg.BLOCK_M)
        for key in range(0, tiles * cfg.BLOCK_N, cfg.BLOCK_N)
    ]
    shared = {n: bh * sum(length >= n for length in lengths) for n in range(1, 5)}

    def time(splits: int) -> float:
        """In steps, as measured: the longest split or an SM's share, and the ends of all splits."""
        longest = max(lengths[0] / splits, bh * sum(lengths) / sms)
        return longest + shared[splits] * splits * cfg.BLOCK_D / 3200 if splits > 1 else lengths[0]

    splits = min(range(1, min(4, lengths[0], 2 * sms // (bh * tiles)) + 1), key=time)
    if splits == 1:
        return Division(tiles * bh)
    long = shared[splits]
    return Division(tiles * bh + long * (splits - 1), long, long * splits, long, splits)


def prepare_launch(problem: AttentionProblem, tensors: Tensors, cfg: Config) -> Launch:
    from tilewise.gpu.hopper.backward.rows import attn_bwd_prepare_kernel

    out, dout, lse, residual, dlse, cu_seqlens_q, stats, shifts, semaphores = tensors
    assert out is not None and dout is not None and lse is not None and stats is not None
    tiles_q = host.most_tiles(problem, out.shape[-3], cfg.BLOCK_M)
    sizes = RowSizes(tiles_q, problem.num_heads, problem.seqlen_q, problem.batch, lse.shape[-1])
    pointers = (lse, residual, dlse, stats, shifts, semaphores, cu_seqlens_q)
    keep = 1 - rate(problem.dropout_p) if problem.dropout_p > 0 else None
    floats = (problem.softcap or problem.scale, keep)
    arguments = ((out, *row_strides(out)), (dout, *row_strides(dout)), *pointers, sizes, *floats)
    columns = cfg.BLOCK_D if isinstance(cfg, BackwardConfig) else cfg.BLOCK_DV
    constants = (problem.head_dim_v, columns, cfg.BLOCK_M, cfg.HAS_LARGE_LSE, True)
    return Launch(attn_bwd_prepare_kernel, stats.shape[0], (*arguments, *constants), num_warps=8)


def main_launch(
    problem: AttentionProblem,
    tensors: Tensors,
    cfg: BackwardConfig,
    division: Division,
    mask_strides: tuple[int, ...],
) -> Launch:
    from tilewise.gpu.hopper.backward.kernel import attn_bwd_kernel

    query, key, value, dout, cu_q, cu_k, *rest = tensors
    extras, rest = rest[:6], rest[6:]
    dk, dv, stats, shifts, dq, semaphores, *ordered, counter, key_sums, mask_lists, mask_bits = rest
    assert query is not None and key is not None
    cfg = dataclasses.replace(cfg, IS_SPLIT=division.splits > 0)
    is_packed = problem.is_packed
    sizes = kernel_sizes(problem, query.shape[-3], -(-problem.seqlen_k // cfg.BLOCK_N), cfg)
    rows, keys = (cfg.BLOCK_M, 1, cfg.BLOCK_D), (cfg.BLOCK_N // 2, 1, cfg.BLOCK_D)
    arguments = (
        *(host.descriptor(t, tile, is_packed) for t, tile in ((query, rows), (key, keys), (value, keys))),
        host.descriptor(dout, rows, is_packed),
        host.flat_descriptor(dq, (DQ_TILE // 128, 128)),
        *(t if cfg.WIDE_COLUMNS else host.descriptor(t, keys, is_packed) for t in (dk, dv)),
        host.flat_descriptor(stats, (1, 2 * cfg.BLOCK_M)),
        *(shifts, semaphores, Packing(cu_q, cu_k, *ordered), counter),
        sizes,
        score_factors(problem),
        Splits(division.border, division.unit, key_sums),
        TransposedMap(mask_lists, mask_bits, *mask_strides),
        host.extras(problem, *extras),
    )
    work_tiles = division.work_tiles
    if is_packed:
        work_tiles = host.most_tiles(problem, key.shape[0], cfg.BLOCK_N) * sizes.num_bh
    return host.persistent(attn_bwd_kernel, query.device, work_tiles, arguments, cfg)


def kernel_sizes(problem: AttentionProblem, rows: int, num_tiles: int, cfg: Config) -> BackwardSizes:
    """The integers of a kernel that works on num_tiles tiles of each bh; `rows` is the query tensor's."""
    visibility = problem.visibility()
    num_bh = problem.num_kv_heads * (1 if problem.is_packed else problem.batch)
    return BackwardSizes(
        batch=problem.batch,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        group_size=problem.group_size,
        num_bh=num_bh,
        num_tiles=num_tiles,
        l2_swizzle=l2_swizzle(problem, num_bh),
        tiles_q=host.most_tiles(problem, rows, cfg.BLOCK_M),
        window_left=host.edge(visibility.left),
        window_right=host.edge(visibility.right),
    )


def l2_swizzle(problem: AttentionProblem, num_bh: int) -> int:
    """How many (batch, key head) pairs have their tiles interleaved: causal, as many as fit the L2 cache.

    The tiles that have least to do then come last, and the SMs end at the same time. The query heads of a
    group are worked on one after another.
    """
    visibility = problem.visibility()
    if visibility.right is None or visibility.left is not None:
        return 1
    row_bytes = 2 * (problem.head_dim + problem.head_dim_v)
    rows = max(problem.seqlen_q, problem.seqlen_k)
    return host.l2_swizzle_size(num_bh, max(1, host.L2_SWIZZLE_BYTES // (rows * row_bytes)))


def finish_launch(
    problem: AttentionProblem, tensors: Tensors, cfg: BackwardConfig, division: Division
) -> Launch:
    from tilewise.gpu.hopper.backward.rows import attn_bwd_finish_kernel

    dq, cu_seqlens_q, sums, semaphores, first_tile, dk, dv, key_sums = tensors
    assert sums is not None and dq is not None
    tiles_q = host.most_tiles(problem, dq.shape[-3], cfg.BLOCK_M)
    key_tiles = -(-problem.seqlen_k // cfg.BLOCK_N)
    num_tiles = query_bh(problem) * tiles_q
    lengths = (problem.seqlen_q, problem.batch, problem.seqlen_k)
    numbers = (problem.group_size, key_tiles, num_tiles, late_tiles(problem, cfg, division))
    sizes = FinishSizes(tiles_q, problem.num_heads, *lengths, *numbers)
    arguments = (
        *(sums, semaphores, first_tile, (dq, *row_strides(dq)), cu_seqlens_q, gradient_scale(problem), sizes),
        *(dk, dv, Splits(division.border, division.unit, key_sums)),
        *(problem.head_dim, problem.head_dim_v, cfg.BLOCK_D, cfg.BLOCK_M),
        *(cfg.ENDS_UNEVENLY, cfg.HAS_RIGHT),
    )
    programs = sums.numel() // DQ_TILE
    if division.splits:  # and of each shared tile, dK and dV of 64 keys x 16 columns
        programs += division.shared * cfg.BLOCK_D // 4
    return Launch(attn_bwd_finish_kernel, programs, arguments, num_warps=4, launch_pdl=cfg.ENDS_UNEVENLY)


def row_strides(t: Tensor) -> tuple[int, ...]:
    """(batch, row, head) strides; packed tensors have no batch."""
    return (0, *t.stride()[:2]) if t.ndim == 3 else t.stride()[:3]


def gradient_scale(problem: AttentionProblem) -> float:
    """What turns sums of ds into dq and dk; with dropout ds counts 1 / inverse_keep."""
    return problem.scale / (1 - rate(problem.dropout_p))


def score_factors(problem: AttentionProblem) -> ScoreFactors:
    scale, softcap = problem.scale, problem.softcap
    two_over_softcap = 2 * host.LOG2_E * scale / softcap if softcap > 0 else 0.0
    return ScoreFactors(gradient_scale(problem), scale * host.LOG2_E, two_over_softcap, softcap * host.LOG2_E)


def sinks_gradient(
    problem: AttentionProblem, sinks: Tensor | None, stats: Tensor, shifts: Tensor | None, cfg: Config
) -> Tensor | None:
    """-sum of p_sink * delta over all rows of a head; rows that do not exist have lse = +inf."""
    if sinks is None:
        return None
    bh = query_bh(problem)
    stats = stats.view(-1, problem.num_heads, stats.shape[0] // bh, cfg.STATS, cfg.BLOCK_M)
    lse_log2, delta, *rest = stats.unbind(3)
    shifts = rest[0] if shifts is None else shifts.view(lse_log2.shape)
    shifts = shifts * (problem.softcap or problem.scale)
    p_sink = torch.exp2((sinks.float()[:, None, None] - shifts) * host.LOG2_E - lse_log2)
    dsinks = (p_sink * delta).sum((0, 2, 3)).neg() / (1 - rate(problem.dropout_p))
    return dsinks.to(sinks.dtype)
