"""Host side of the Hopper backward for head sizes over 128: row statistics, then dK and dV, then dQ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.core.plan import Results
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.gpu.hopper.backward.arguments import WideBackwardConfig
from tilewise.gpu.hopper.backward.launch import (
    has_large_lse,
    kernel_sizes,
    new_gradients,
    prepare_launch,
    ready_tensors,
    score_factors,
    sinks_gradient,
    stats_shape,
    wide_columns,
)
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import Packing
from tilewise.gpu.launch.launch_plan import Launch, Step, Tensors, run_steps

QUERIES = 128  # of a tile of the queries kernel: 64 for each of two warpgroups


def backward(
    problem: AttentionProblem, inputs: Inputs, known: Results, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Gradients by recomputation from lse + residual; the same bits every time. Scratch: 4 floats a row."""
    cfg = wide_config(problem)
    given, optional = ready_tensors(inputs, known, dout, dlse)
    query = inputs.query
    dq, dk, dv = new_gradients(problem, inputs)
    stats = query.new_empty(stats_shape(problem, cfg, query.shape[-3]), dtype=torch.float32)
    new = (dq, dk, dv, stats, *(host.scheduler_counter(query.device, n) for n in range(2)))
    ordered = [t for offsets in inputs[3:5] for t in host.new_order(problem, offsets)]
    run_steps(problem, steps(cfg, given, new, (*optional, *ordered)))
    return Gradients(dq, dk, dv, None, sinks_gradient(problem, inputs.sinks, stats, None, cfg))


def steps(
    cfg: WideBackwardConfig,
    given: Sequence[Tensor | None],
    new: Sequence[Tensor],
    optional: Tensors,
) -> list[Step]:
    """The launches; `new` are dq, dk, dv, the row statistics and two `scheduler_counter`s.

    The last two start early: one gets ready while statistics are written; the other needs nothing of it and
    takes the SMs that it leaves idle. `optional` are dlse, the sequences' offsets, `new_order` of keys and of
    queries.
    """
    query, key, value, out, lse, residual, dout = given
    dq, dk, dv, stats, counter, counter_q = new
    dlse, cu_q, cu_k, order_k, first_k, order_q, first_q = optional
    tensors = (query, key, value, dout, cu_q, cu_k)
    return [
        *host.order_steps(cu_k, cu_q, keys_config(cfg).BLOCK_N, (order_k, first_k)),
        *host.order_steps(cu_q, cu_k, QUERIES, (order_q, first_q)),
        Step(prepare_launch, (out, dout, lse, residual, dlse, cu_q), (cfg,), (stats, None, None)),
        Step(keys_launch, tensors, (keys_config(cfg),), (dk, dv, stats, order_k, first_k, counter)),
        Step(queries_launch, tensors, (cfg,), (dq, stats, order_q, first_q, counter_q)),
    ]


def wide_config(problem: AttentionProblem) -> WideBackwardConfig:
    """d = 256: K + V + 2 x (Q + dO + P) = 64 + 2 x 72 = 208 KB; 2 x (Q + dO + K) + V = 224 KB of 227.

    192/128: K + V + 3 x (Q + dO) = 80 + 120 = 200 KB; 2 x (Q + dO + V) + 3 x K = 184 KB.
    """
    block_dv = 128 if problem.head_dim_v <= 128 else 256
    is_slim = problem.head_dim <= 192 and block_dv == 128
    chunks, width = (3, 64) if is_slim else (1, 256)
    stages = (3, 3, 2) if is_slim else (2, 2, 1)
    return WideBackwardConfig(
        BLOCK_M=64,
        BLOCK_N=64,
        D_CHUNKS=chunks,
        D_CHUNK=width,
        BLOCK_DV=block_dv,
        CONSUMER_REGISTERS=240,
        STAGES=stages[0],
        K_STAGES=stages[1],
        V_STAGES=stages[2],
        HAS_LARGE_LSE=has_large_lse(problem),
        **wide_columns(problem),
        **host.options(problem),
    )


def keys_config(cfg: WideBackwardConfig) -> WideBackwardConfig:
    """The same for the keys kernel: 128 keys a tile where their dK and dV fit the registers."""
    return dataclasses.replace(cfg, BLOCK_N=128) if cfg.IS_SLIM else cfg


def keys_launch(problem: AttentionProblem, tensors: Tensors, cfg: WideBackwardConfig) -> Launch:
    if cfg.IS_SLIM:
        from tilewise.gpu.hopper.backward.slim import attn_bwd_slim_keys_kernel as kernel
    else:
        from tilewise.gpu.hopper.backward.wide import attn_bwd_wide_keys_kernel as kernel

    query, key, value, dout, cu_q, cu_k, dk, dv, stats, *ordered, counter = tensors
    assert query is not None and key is not None
    is_packed = problem.is_packed
    sizes = kernel_sizes(problem, query.shape[-3], -(-problem.seqlen_k // cfg.BLOCK_N), cfg)
    qk, v = (64, 1, cfg.D_CHUNK), (64, 1, cfg.BLOCK_DV)
    # columns of dK and dV that are stored at a time, each through a tile that is no longer needed
    stored = ((dk, qk), (dv, v)) if cfg.IS_SLIM else ((dk, (64, 1, 128)), (dv, (64, 1, 128)))
    arguments = (
        *(host.descriptor(t, tile, is_packed) for t, tile in ((query, qk), (key, qk), (value, v), (dout, v))),
        *(t if cfg.WIDE_COLUMNS else host.descriptor(t, tile, is_packed) for t, tile in stored),
        host.flat_descriptor(stats, (1, cfg.STATS * cfg.BLOCK_M)),
        *(Packing(cu_q, cu_k, *ordered), counter),
        sizes,
        score_factors(problem),
    )
    work_tiles = host.most_tiles(problem, key.shape[-3], cfg.BLOCK_N) * sizes.num_bh
    return host.persistent(kernel, query.device, work_tiles, arguments, cfg)


def queries_launch(problem: AttentionProblem, tensors: Tensors, cfg: WideBackwardConfig) -> Launch:
    from tilewise.gpu.hopper.backward.wide_queries import attn_bwd_wide_queries_kernel

    query, key, value, dout, cu_q, cu_k, dq, stats, *ordered, counter = tensors
    assert query is not None
    is_packed = problem.is_packed
    sizes = kernel_sizes(problem, query.shape[-3], -(-problem.seqlen_q // QUERIES), cfg)
    qk, v = (64, 1, cfg.D_CHUNK), (64, 1, cfg.BLOCK_DV)
    tiles = ((query, qk), (key, qk), (value, v), (dout, v), (dq, qk))
    descriptors = (
        t if t is dq and cfg.WIDE_COLUMNS else host.descriptor(t, tile, is_packed) for t, tile in tiles
    )
    packing = Packing(cu_q, cu_k, *ordered)
    arguments = (*descriptors, stats, packing, counter, sizes, score_factors(problem))
    work_tiles = host.most_tiles(problem, query.shape[-3], QUERIES) * sizes.num_bh * problem.group_size
    return host.persistent(attn_bwd_wide_queries_kernel, query.device, work_tiles, arguments, cfg)
