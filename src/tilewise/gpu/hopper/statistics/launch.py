"""Host side of the second pass: what its kernels serve, their tiles, and their launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tilewise.core.plan import Results
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.statistics import GROUP, NOTHING, Aux, Measured
from tilewise.gpu.hopper.backward import launch as backward_launch
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import WARPGROUP_ROWS, Packing, Sizes, StreamConfig
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

BLOCK_QUERIES = 128  # of a tile in the sums of weights
KEYS_OF_A_SUM = 16  # of the kernel's block sums
SHARED_BYTES = 224 << 10  # of an SM, for tiles of queries and keys
CLASSES = 64  # of keys, by whose largest scores candidates are found
MOST_LARGEST = 32  # of a query, so that its candidates are few: 44 on random data
SHORTEST_LIST = 16  # of candidates: four of them hold those of k = 8 of random data, with room to spare


@dataclass(frozen=True, kw_only=True)
class StatisticsConfig(StreamConfig):
    """Compile-time choices of the kernels."""

    LATEST_FIRST: ClassVar[bool] = False  # in the order of the backward's work tiles
    DESCENDING: ClassVar[bool] = False

    BLOCK_M: int
    BLOCK_N: int
    D_CHUNKS: int
    D_CHUNK: int
    SLOTS: int  # of tiles that stay; two: the next work tile's are loaded early


class StatisticsPlan(NamedTuple):
    """Column sums, block sums and the largest weights: `Measured`. Deterministic.

    redo: does queries that have more candidates than lists hold; `gpu.triton.plan.redo_top_k`, given by who
    knows both backends.
    """

    problem: AttentionProblem
    aux: Aux
    redo: Callable[..., None] | None = None

    def run(self, inputs: Inputs, results: Results | None = None, *_: Tensor | None) -> Measured:
        assert results is not None and results.lse is not None
        problem, aux = self.problem, self.aux
        known = (results.lse, results.residual)
        lse, residual = (None if t is None else t.contiguous() for t in known)
        offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        cu_q, cu_k = (None if t is None else t.contiguous() for t in offsets)
        given = (host.tma_ready(inputs.query), host.tma_ready(inputs.key), lse, residual, cu_q, cu_k)
        found = NOTHING
        if aux.column_sum or aux.block_sum:
            columns, blocks = _sums(problem, aux, given)
            found = found._replace(column_sum=columns, block_sum=blocks)
        if aux.top_k:
            weights, keys, *lists = _largest(problem, aux.top_k, given)
            if self.redo is not None:
                self.redo(problem, inputs, (lse, residual), weights, keys, *lists)
            found = found._replace(top_weights=weights, top_keys=keys)
        return found


def unserved(problem: AttentionProblem, aux: Aux) -> str | None:
    """None if the kernels give the statistics of a request, else why not."""
    has_more = problem.mask_shape is not None or problem.bias_shape is not None or problem.has_alibi
    if has_more or problem.is_cached or problem.is_8_bit or problem.functions is not None:
        return "takes no mask, bias, ALiBi, functions, cache or 8-bit products in a second pass"
    if aux.last_rows is not None:
        return f"sums over all queries, not over last_rows={aux.last_rows}"
    if aux.top_k > MOST_LARGEST:
        return f"gives the {MOST_LARGEST} largest weights at most, not top_k={aux.top_k}"
    if aux.block_sum and (aux.block_sum % BLOCK_QUERIES or problem.is_packed):
        return f"sums blocks of multiples of {BLOCK_QUERIES}, not packed, not block_sum={aux.block_sum}"
    return None


def _sums(problem: AttentionProblem, aux: Aux, given: Tensors) -> tuple[Tensor | None, Tensor | None]:
    """Column sums (batch, heads, seqlen_k), packed (heads, total_k), and block sums."""
    cfg = statistics_config(problem, are_queries_streamed=True)
    query, key, *_, cu_q, cu_k = given
    assert query is not None and key is not None
    columns = blocks = None
    if aux.column_sum:
        lead = () if problem.is_packed else (problem.batch,)
        columns = query.new_empty((*lead, problem.num_heads, key.shape[-3]), dtype=torch.float32)
    if aux.block_sum:
        tiles_q, tiles_k = (-(-n // aux.block_sum) for n in (problem.seqlen_q, problem.seqlen_k))
        parts = (tiles_q, aux.block_sum // cfg.BLOCK_M, tiles_k, aux.block_sum // KEYS_OF_A_SUM)
        blocks = query.new_zeros((problem.batch, problem.num_heads, *parts), dtype=torch.float32)
    ordered = host.order_sequences(problem, cu_k, cu_q, cfg.BLOCK_N)
    fresh = (columns, blocks, *ordered, host.scheduler_counter(query.device))
    run(sums_launch, problem, given, cfg, aux.block_sum, fresh=fresh)
    if columns is not None and aux.column_sum == GROUP:
        columns = columns.unflatten(-2, (problem.num_kv_heads, problem.group_size)).sum(-2)
    return columns, None if blocks is None else blocks.sum((3, 5))


def _largest(problem: AttentionProblem, count: int, given: Tensors) -> tuple[Tensor, Tensor, Tensor, int]:
    """(weights, keys) of the `count` largest of each query, in lse's shape and `count`; (held, list_size)."""
    cfg = statistics_config(problem, are_queries_streamed=False)
    query, _, lse, residual, cu_q, cu_k = given
    assert query is not None and lse is not None
    list_size = max(SHORTEST_LIST, 1 << (count - 1).bit_length())
    lists = query.new_empty((lse.numel(), 4 * list_size), dtype=torch.int64)
    held = query.new_empty((lse.numel(), 4), dtype=torch.int32)
    weights = query.new_empty((*lse.shape, count), dtype=torch.float32)
    keys = query.new_empty((*lse.shape, count), dtype=torch.int64)
    ordered = host.order_sequences(problem, cu_q, cu_k, cfg.BLOCK_M)
    fresh = (lists, held, *ordered, host.scheduler_counter(query.device))
    run(candidates_launch, problem, given, cfg, count, list_size, fresh=fresh)
    run(select_launch, problem, (lse, residual), count, list_size, fresh=(lists, held, weights, keys))
    return weights, keys, held, list_size


def sums_launch(problem: AttentionProblem, tensors: Tensors, cfg: StatisticsConfig, block_sum: int) -> Launch:
    """`block_sum`, from which the strides of blocks follow, tells launches apart."""
    from tilewise.gpu.hopper.statistics.sums import attn_weight_sums_kernel

    query, key, lse, residual, cu_q, cu_k, columns, blocks, order, first_tile, counter = tensors
    assert query is not None and key is not None
    num_tiles = -(-problem.seqlen_k // cfg.BLOCK_N)
    num_bh = backward_launch.query_bh(problem)
    sizes = _sizes(problem, query, key, num_tiles, backward_launch.l2_swizzle(problem, num_bh))
    if blocks is not None:
        sizes = sizes._replace(rows_k=blocks.stride(1), rows_v=blocks.stride(3))
    factors = backward_launch.score_factors(problem)
    arguments = (
        host.descriptor(query, (cfg.BLOCK_M, 1, cfg.D_CHUNK), problem.is_packed),
        host.descriptor(key, (WARPGROUP_ROWS, 1, cfg.D_CHUNK), problem.is_packed),
        *(lse, residual, columns, blocks, Packing(cu_q, cu_k, order, first_tile), counter),
        sizes,
        factors._replace(scale=problem.softcap or problem.scale),
    )
    work_tiles = host.most_tiles(problem, key.shape[-3], cfg.BLOCK_N) * num_bh
    return host.persistent(attn_weight_sums_kernel, query.device, work_tiles, arguments, cfg)


def candidates_launch(
    problem: AttentionProblem, tensors: Tensors, cfg: StatisticsConfig, count: int, list_size: int
) -> Launch:
    from tilewise.gpu.hopper.statistics.largest import attn_candidates_kernel

    query, key, _, _, cu_q, cu_k, lists, held, order, first_tile, counter = tensors
    assert query is not None and key is not None
    num_tiles, num_bh = -(-problem.seqlen_q // cfg.BLOCK_M), backward_launch.query_bh(problem)
    fitting = max(1, host.L2_SWIZZLE_BYTES // max(1, 2 * problem.seqlen_k * problem.head_dim))
    swizzle = host.l2_swizzle_size(num_bh // problem.group_size, fitting)
    arguments = (
        host.descriptor(query, (WARPGROUP_ROWS, 1, cfg.D_CHUNK), problem.is_packed),
        host.descriptor(key, (cfg.BLOCK_N, 1, cfg.D_CHUNK), problem.is_packed),
        *(lists, held, Packing(cu_q, cu_k, order, first_tile), counter),
        _sizes(problem, query, key, num_tiles, swizzle * problem.group_size),
        host.factors(problem),
        *(count, list_size),
    )
    work_tiles = host.most_tiles(problem, query.shape[-3], cfg.BLOCK_M) * num_bh
    return host.persistent(attn_candidates_kernel, query.device, work_tiles, arguments, cfg)


def select_launch(problem: AttentionProblem, tensors: Tensors, count: int, list_size: int) -> Launch:
    from tilewise.gpu.hopper.statistics.select import select_largest_kernel

    lse, residual, lists, held, weights, keys = tensors
    assert lse is not None
    unit = 1.0 if problem.softcap > 0 else problem.scale
    arguments = (lists, held, lse, residual, weights, keys, lse.numel(), unit * host.LOG2_E, count, list_size)
    return Launch(select_largest_kernel, -(-lse.numel() // 32), arguments, num_warps=4, launch_pdl=True)


def _sizes(problem: AttentionProblem, query: Tensor, key: Tensor, num_tiles: int, l2_swizzle: int) -> Sizes:
    visibility = problem.visibility()
    return Sizes(
        batch=problem.batch,
        seqlen_q=query.shape[-3],
        seqlen_k=key.shape[-3],
        group_size=problem.group_size,
        num_bh=backward_launch.query_bh(problem),
        num_tiles=num_tiles,
        l2_swizzle=l2_swizzle,
        window_left=host.edge(visibility.left),
        window_right=host.edge(visibility.right),
    )


def statistics_config(problem: AttentionProblem, are_queries_streamed: bool) -> StatisticsConfig:
    """The tiles of a problem: four warpgroups on an SM hide what is not a product."""
    visibility = problem.visibility()
    width = 128 if -(-problem.head_dim // 64) % 2 == 0 else 64
    chunks = -(-problem.head_dim // width)
    warpgroups = 4 if chunks * width <= 128 else 2
    rows, stays = BLOCK_QUERIES if are_queries_streamed else CLASSES, WARPGROUP_ROWS * warpgroups
    row_bytes = 2 * chunks * width
    slots = 2 if chunks * width <= 64 else 1
    return StatisticsConfig(
        BLOCK_M=rows if are_queries_streamed else stays,
        BLOCK_N=stays if are_queries_streamed else rows,
        WARPGROUPS=warpgroups,
        D_CHUNKS=chunks,
        D_CHUNK=width,
        CONSUMER_REGISTERS=112 if warpgroups == 4 else 240,
        STAGES=min(4, (SHARED_BYTES - slots * stays * row_bytes) // (rows * row_bytes)),
        SLOTS=slots,
        IS_PACKED=problem.is_packed,
        HAS_LEFT=visibility.left is not None,
        HAS_RIGHT=visibility.right is not None,
        HAS_SOFTCAP=problem.softcap > 0,
    )
