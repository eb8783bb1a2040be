"""Host side of the sums of weights: what they serve, tiles, and the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tilewise.core.plan import Results
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.statistics import GROUP, NOTHING, Aux, Measured
from tilewise.gpu.hopper.backward import launch as backward_launch
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import Sizes
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

KEYS_OF_A_SUM = 16  # of the kernel's block sums
SHARED_BYTES = 224 << 10  # for tiles of queries and keys


@dataclass(frozen=True)
class SumsConfig:
    """Compile-time choices of the kernel. What `BackwardConfig` has too means the same."""

    BLOCK_M: ClassVar[int] = 128
    BLOCK_N: ClassVar[int] = 128
    IS_DETERMINISTIC: ClassVar[bool] = False  # tiles of keys wait for no others
    LATEST_FIRST: ClassVar[bool] = False
    DESCENDING: ClassVar[bool] = False

    D_CHUNKS: int
    D_CHUNK: int
    STAGES: int  # tiles of queries in flight
    K_SLOTS: int  # of keys; two: the next work tile's are loaded early
    IS_PACKED: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_SOFTCAP: bool

    @property
    def maxnreg(self) -> int:
        """Registers of each thread at the start: an SM's, over 3 warpgroups (a single warp counts as one)."""
        return 65536 // (3 * 128) // 8 * 8


class StatisticsPlan(NamedTuple):
    """Column and block sums: `Measured`. Deterministic."""

    problem: AttentionProblem
    aux: Aux

    def run(self, inputs: Inputs, results: Results | None = None, *_: Tensor | None) -> Measured:
        assert results is not None and results.lse is not None
        problem, aux = self.problem, self.aux
        query, key = inputs.query, inputs.key
        columns = blocks = None
        lead = () if problem.is_packed else (problem.batch,)
        if aux.column_sum:
            columns = query.new_empty((*lead, problem.num_heads, key.shape[-3]), dtype=torch.float32)
        if aux.block_sum:
            tiles_q, tiles_k = (-(-n // aux.block_sum) for n in (problem.seqlen_q, problem.seqlen_k))
            parts = (tiles_q, aux.block_sum // SumsConfig.BLOCK_M, tiles_k, aux.block_sum // KEYS_OF_A_SUM)
            blocks = query.new_zeros((problem.batch, problem.num_heads, *parts), dtype=torch.float32)
        _sum(problem, inputs, results, columns, blocks)
        if columns is not None and aux.column_sum == GROUP:
            columns = columns.unflatten(-2, (problem.num_kv_heads, problem.group_size)).sum(-2)
        return NOTHING._replace(column_sum=columns, block_sum=None if blocks is None else blocks.sum((3, 5)))


def unserved(problem: AttentionProblem, aux: Aux) -> str | None:
    """None if the kernel gives the sums of a request, else why not."""
    has_more = problem.mask_shape is not None or problem.bias_shape is not None or problem.has_alibi
    if has_more or problem.is_cached or problem.is_8_bit or problem.functions is not None:
        return "sums weights without a mask, bias, ALiBi, functions, caches or 8-bit products"
    if aux.last_rows is not None:
        return "sums the weights of all queries, not of last_rows"
    if aux.block_sum and (aux.block_sum % SumsConfig.BLOCK_M or problem.is_packed):
        return f"sums blocks of multiples of {SumsConfig.BLOCK_M}, not packed: not block_sum={aux.block_sum}"
    return None


def _sum(
    problem: AttentionProblem, inputs: Inputs, results: Results, columns: Tensor | None, blocks: Tensor | None
) -> None:
    """Fill columns (batch, heads, seqlen_k), packed (heads, total_k), and blocks of 128 queries and 16 keys."""
    cfg = sums_config(problem)
    query, key = host.tma_ready(inputs.query), host.tma_ready(inputs.key)
    offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    cu_q, cu_k = (None if t is None else t.contiguous() for t in offsets)
    lse, residual = (None if t is None else t.contiguous() for t in (results.lse, results.residual))
    ordered = host.order_sequences(problem, cu_k, cu_q, cfg.BLOCK_N)
    fresh = (columns, blocks, *ordered, host.scheduler_counter(query.device))
    run(sums_launch, problem, (query, key, lse, residual, cu_q, cu_k), cfg, fresh=fresh)


def sums_launch(problem: AttentionProblem, tensors: Tensors, cfg: SumsConfig) -> Launch:
    from tilewise.gpu.hopper.statistics.sums import attn_weight_sums_kernel

    query, key, lse, residual, cu_q, cu_k, columns, blocks, order, first_tile, counter = tensors
    assert query is not None and key is not None
    visibility = problem.visibility()
    num_bh = problem.num_heads * (1 if problem.is_packed else problem.batch)
    num_tiles = -(-problem.seqlen_k // cfg.BLOCK_N)
    sizes = Sizes(
        batch=problem.batch,
        seqlen_q=query.shape[-3],
        seqlen_k=key.shape[-3],
        group_size=problem.group_size,
        num_bh=num_bh,
        num_tiles=num_tiles,
        l2_swizzle=backward_launch.l2_swizzle(problem, num_bh),
        window_left=host.edge(visibility.left),
        window_right=host.edge(visibility.right),
        rows_k=0 if blocks is None else blocks.stride(1),
        rows_v=0 if blocks is None else blocks.stride(3),
        stride_page_table=0,
        num_pages=0,
    )
    factors = backward_launch.score_factors(problem)
    arguments = (
        host.descriptor(query, (cfg.BLOCK_M, 1, cfg.D_CHUNK), problem.is_packed),
        host.descriptor(key, (cfg.BLOCK_N // 2, 1, cfg.D_CHUNK), problem.is_packed),
        *(lse, residual, columns, blocks, cu_q, cu_k, order, first_tile, counter),
        *sizes,
        *factors._replace(scale=problem.softcap or problem.scale),
        cfg,
    )
    most = key.shape[0] // cfg.BLOCK_N + problem.batch if problem.is_packed else num_tiles
    programs = min(host.num_sms(query.device.index), most * num_bh)
    return Launch(attn_weight_sums_kernel, programs, arguments, num_warps=4, maxnreg=cfg.maxnreg)


def sums_config(problem: AttentionProblem) -> SumsConfig:
    """The tiles of a problem."""
    visibility = problem.visibility()
    width = 128 if -(-problem.head_dim // 64) % 2 == 0 else 64
    chunks = -(-problem.head_dim // width)
    tile_bytes = 2 * SumsConfig.BLOCK_M * chunks * width
    slots = 2 if tile_bytes <= 32 << 10 else 1
    return SumsConfig(
        D_CHUNKS=chunks,
        D_CHUNK=width,
        STAGES=min(4, SHARED_BYTES // tile_bytes - slots),
        K_SLOTS=slots,
        IS_PACKED=problem.is_packed,
        HAS_LEFT=visibility.left is not None,
        HAS_RIGHT=visibility.right is not None,
        HAS_SOFTCAP=problem.softcap > 0,
    )
