"""Host side of the Hopper forward for many queries: the tiles of a problem, and the launch of its kernel.

Nothing here depends on lengths at compile time, so a new sequence length or batch size runs the kernels
that are already compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.signature import new_out
from tilewise.core.statistics import largest_of_heads
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import (
    WARPGROUP_ROWS,
    Cache,
    ForwardConfig,
    MaskMap,
    Packing,
    RowTargets,
)
from tilewise.gpu.hopper.common.functions import compiled_functions, source_of
from tilewise.gpu.hopper.mask.tile_map import tile_map
from tilewise.gpu.launch.launch_plan import Launch, Step, Tensors, run_steps

BOX_COLUMNS = 64  # of pages smaller than a tile: in shared memory these columns of all rows are together
# Of a row's weights, by thread: no P of 16 bits overflows, and four of them have a normal reciprocal.
LARGEST_SUM = {torch.float16: 2.0**15, torch.bfloat16: 2.0**123}
# As much as costs no digit: of float16 below 2^-14, of weights 2^-62 times the largest, of O: see `failures`.
HEADROOM = {torch.float16: 6.0, torch.bfloat16: 64.0}
# Normal scores whose maximum in a tile is so far above their mean outgrow the largest sum within 64k keys; in
# float16 a spike in the first tile tells of others.
LARGEST_SPREAD = {torch.float16: 16.0, torch.bfloat16: 225.0}
SMALL = (*Inputs._fields[3:8], "sinks")  # offsets, lengths, left padding and pages; these are read densely
NOTHING_ASKED = (None,) * 3  # row_max, entropy, max_logit of a forward without statistics
MANY_ROWS = 1 << 16  # of queries: two tiles of four warpgroups for nearly each of 132 SMs


def forward(
    problem: AttentionProblem,
    inputs: Inputs,
    order: str = "bshd",
    residual: bool = False,
    statistics: Collection[str] = (),
) -> tuple[Tensor, ...]:
    """out (like query, head_dim_v) and lse float32 (batch, heads, seqlen_q), packed (heads, total_q).

    And, if asked for, what rounding took from lse, row_max and entropy, in its shape, and max_logit (heads,).
    """
    cfg = (watched_config if statistics else forward_config)(problem, *statistics)
    given = ready(problem, inputs)
    query = given.query
    *batch, rows, heads, _ = query.shape
    out = new_out(query, problem.head_dim_v, order, problem.out_dtype)
    lse = query.new_empty((*batch, heads, rows), dtype=torch.float32)
    rounded, row_max, entropy = (
        lse.new_empty(lse.shape) if is_wanted else None
        for is_wanted in (residual, cfg.HAS_ROW_MAX, cfg.HAS_ENTROPY)
    )
    max_logit = lse.new_full((problem.num_heads,), float("-inf")) if cfg.HAS_MAX_LOGIT else None
    found = (out, lse, rounded, row_max, entropy, max_logit)
    ordered = host.new_order(problem, held_keys(given))
    mask, extras = map_of(problem, inputs, cfg), host.extras_of(problem, inputs)
    counter = host.scheduler_counter(query.device)
    run_steps(problem, steps(cfg, given, found, ordered, counter, mask, extras))
    if "max_logit" in statistics and row_max is not None:
        max_logit = largest_of_heads(row_max)
    named = {"row_max": row_max, "entropy": entropy, "max_logit": max_logit}
    return tuple(t for t in (out, lse, rounded, *map(named.get, statistics)) if t is not None)


def ready(problem: AttentionProblem, inputs: Inputs) -> Inputs:
    """The inputs as the kernel takes them, but for those that `map_of` and `host.extras_of` give."""
    keys_ready = host.keys_ready if problem.is_cached else host.tma_ready
    small = {name: t.contiguous() for name in SMALL if (t := getattr(inputs, name)) is not None}
    query, key, value = host.tma_ready(inputs.query), keys_ready(inputs.key), keys_ready(inputs.value)
    return inputs._replace(query=query, key=key, value=value, **small)


def held_keys(inputs: Inputs) -> Tensor | None:
    """How many keys each sequence has: lengths of a cache, or offsets; None if all have as many."""
    return inputs.cu_seqlens_k if inputs.seqlens_k is None else inputs.seqlens_k


def steps(
    cfg: ForwardConfig,
    given: Inputs,
    found: Tensors,
    ordered: Tensors,
    counter: Tensor,
    mask: MaskMap,
    extras: Tensors,
) -> list[Step]:
    """The launches. `found` are out, lse, and residual, row_max, entropy and max_logit, or None."""
    tensors = (*given[:3], given.sinks, *given[3:8], *extras)
    fresh = (*found, *ordered, counter, *mask[:2])
    return [
        *host.order_steps(given.cu_seqlens_q, held_keys(given), cfg.BLOCK_M // cfg.PACK, ordered),
        Step(forward_launch, tensors, (cfg, mask[2:]), fresh),
    ]


def map_of(problem: AttentionProblem, inputs: Inputs, cfg: ForwardConfig) -> MaskMap:
    """The map of a call's mask, or of none."""
    if not cfg.HAS_MASK:
        return MaskMap()
    lengths = (problem.seqlen_q, problem.seqlen_k)
    return tile_map(source_of(problem, inputs), *lengths, cfg.WARPGROUPS, cfg.BLOCK_N)


@functools.lru_cache(maxsize=4096)
def watched_config(problem: AttentionProblem, *statistics: str) -> ForwardConfig:
    """Of a forward that is asked for statistics. Where heads share a tile, row_max gives max_logit."""
    cfg, has_entropy = forward_config(problem), "entropy" in statistics
    of_heads = "max_logit" in statistics and "row_max" not in statistics and cfg.PACK == 1
    return dataclasses.replace(
        cfg,
        HAS_ROW_MAX=not of_heads and statistics != ("entropy",),
        HAS_MAX_LOGIT=of_heads,
        HAS_ENTROPY=has_entropy,
        HEADROOM=0.0 if of_heads or has_entropy else cfg.HEADROOM,
    )


def watches(problem: AttentionProblem) -> bool:
    """Whether the kernel gives row_max, max_logit and entropy: of scores that are products alone."""
    return not (problem.has_alibi or problem.bias_shape is not None or problem.has_score_function)


def forward_launch(
    problem: AttentionProblem, tensors: Tensors, cfg: ForwardConfig, mask_strides: tuple[int, ...]
) -> Launch:
    from tilewise.gpu.hopper.forward.kernel import attn_fwd_kernel

    query, key, value, sinks, cu_q, cu_k, lengths, leftpad, table, *rest = tensors
    *extras, out, lse, residual, row_max, entropy, max_logit, order, first_tile, counter, tiles, bits = rest
    statistics = (row_max, entropy, max_logit)
    assert query is not None
    key_bytes = 2 * (problem.head_dim + problem.head_dim_v)
    sizes = host.work_sizes(problem, cfg, query.shape[0], key_bytes)
    if key is not None and cfg.IS_CACHED:
        sizes = sizes._replace(rows_k=host.rows_per_entry(key), rows_v=host.rows_per_entry(value))
        sizes = sizes._replace(stride_page_table=0 if table is None else table.shape[1], num_pages=len(key))
    rows, width = (WARPGROUP_ROWS // cfg.PACK, cfg.PACK), cfg.D_CHUNK if cfg.BOXES == 1 else BOX_COLUMNS
    width_v = cfg.BLOCK_DV if cfg.BOXES == 1 else BOX_COLUMNS
    arguments = (
        host.descriptor(query, (*rows, cfg.D_CHUNK), problem.is_packed),
        host.descriptor(key, (cfg.BOX_ROWS, 1, width), cfg.IS_ORDERED),
        host.descriptor(value, (cfg.BOX_ROWS, 1, width_v), cfg.IS_ORDERED),
        out if problem.has_wide_results else host.descriptor(out, (*rows, cfg.BLOCK_DV), problem.is_packed),
        # lse: to be left alone there
        RowTargets(lse, lse if residual is None else residual, int(residual is not None), *statistics),
        *(sinks, Packing(cu_q, cu_k, order, first_tile), counter),
        Cache(lengths, table, host.errors_of(problem, query), leftpad_k=leftpad),
        sizes,
        host.factors(problem),
        MaskMap(tiles, bits, *mask_strides),
        host.extras(problem, *extras),
    )
    most = host.most_tiles(problem, query.shape[-3], cfg.BLOCK_M // cfg.PACK)
    bh = sizes.num_bh * (problem.batch if cfg.IS_CACHED and not problem.is_packed else 1)
    return host.persistent(attn_fwd_kernel, query.device, most * bh, arguments, cfg, cfg.HAS_MAX_LOGIT)


@functools.lru_cache(maxsize=4096)
def forward_config(problem: AttentionProblem) -> ForwardConfig:
    """The tiles of a problem. Measurements are in docs/kernels-hopper.md."""
    width = 128 if -(-problem.head_dim // 64) % 2 == 0 else 64
    block_dv = max(64, 1 << (problem.head_dim_v - 1).bit_length())
    block_n, warpgroups, stages, q_slots, registers, ctas = _tile(problem, block_dv)
    producer_registers = 24
    if 0 < (problem.page_size or 0) < block_n:  # copies of several pages side by side
        wide = (232, 40) if block_n == 128 else (224, 56)
        registers, producer_registers = wide if registers == 240 else (registers, 32)
    return ForwardConfig(
        BLOCK_N=block_n,
        WARPGROUPS=warpgroups,
        STAGES=stages,
        Q_SLOTS=q_slots,
        CONSUMER_REGISTERS=registers,
        PRODUCER_REGISTERS=producer_registers,
        CTAS_PER_SM=ctas,
        D_CHUNKS=-(-problem.head_dim // width),
        D_CHUNK=width,
        BLOCK_DV=block_dv,
        HEADROOM=HEADROOM[problem.dtype],
        LARGEST_SUM=LARGEST_SUM[problem.dtype],
        LARGEST_SPREAD=LARGEST_SPREAD[problem.dtype],
        BOTH_ENDS_FIRST=problem.dtype == torch.float16 and _has_plain_scores(problem),
        PACK=_pack(problem),
        WIDE_COLUMNS=problem.head_dim_v if problem.has_wide_results else 0,
        HAS_SINKS=problem.has_sinks,
        BIAS_OF_ROWS=problem.bias_shape is not None and problem.bias_shape[3] == 1,
        IS_GUARDED=compiled_functions(problem).is_guarded,
        **host.options(problem),
    )


def _tile(problem: AttentionProblem, block_dv: int) -> tuple[int, int, int, int, int, int]:
    """(BLOCK_N, WARPGROUPS, STAGES, Q_SLOTS, CONSUMER_REGISTERS, CTAS_PER_SM); shared memory is 227 KB.

    Head size 64 needs four warpgroups on an SM to hide what is not a product. In one CTA they share keys,
    and have registers to overlap their own products and softmax; in two CTAs they are free of each other,
    which is worth more where tiles of queries are short or few, or keys.
    """
    window = host.window_size(problem)
    is_causal = problem.visibility().right is not None
    if problem.head_dim <= 64:
        is_short = problem.seqlen_k < 1024 or (is_causal and problem.seqlen_k <= 2048)
        is_short = is_short or window <= 1024 or problem.is_packed
        has_more = problem.mask_shape is not None or problem.bias_shape is not None
        is_short = is_short or has_more or problem.has_score_function or problem.dropout_p > 0
        if is_short or problem.batch * problem.num_heads * problem.seqlen_q < MANY_ROWS:
            return 64, 2, 4, 4, 104, 2  # twice 4 x 8 KB of Q, 4 x 16 KB of K and V: 192 KB
        return 64, 4, 8, 8, 112, 1  # 8 x 8 KB of Q, 8 x 16 KB of K and V: 192 KB
    # size 128: 4 x 16 KB of Q, 2 x 64 KB: 192 KB; 192/128: 2 x 32 KB, 2 x 80 KB: 224 KB; 256/128 would be 256
    if block_dv <= 128 and problem.head_dim <= 192:
        block_n, stages = (64, 4) if window <= 512 else (128, 2)
        return block_n, 2, stages, 4 if problem.head_dim <= 128 else 2, 240, 1
    return 64, 2, 2, 2, 240, 1  # 2 x 32 KB of Q, 2 x 64 KB of K and V: 192 KB; 256/128: 160 KB


def _pack(problem: AttentionProblem) -> int:
    """Query heads that share a tile: all of a key head's where queries may be too few to fill one."""
    group = problem.group_size
    fits = 1 < group <= WARPGROUP_ROWS and group & (group - 1) == 0
    is_plain = _has_plain_scores(problem) and problem.dropout_p == 0
    may_be_few = problem.seqlen_q <= WARPGROUP_ROWS or (problem.is_packed and problem.is_cached)
    return group if fits and may_be_few and is_plain else 1


def _has_plain_scores(problem: AttentionProblem) -> bool:
    """Whether nothing is added to scores, and a window alone hides some."""
    has_more = problem.bias_shape is not None or problem.has_alibi or problem.has_score_function
    return problem.mask_shape is None and not has_more
