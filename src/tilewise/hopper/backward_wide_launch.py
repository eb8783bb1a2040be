"""Host side of the Hopper backward for head sizes over 128: row statistics, then dK and dV, then dQ."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.hopper.backward_arguments import WideBackwardConfig
from tilewise.hopper.backward_launch import (
    flat_descriptor,
    kernel_sizes,
    order_sequences,
    prepare_launch,
    query_tiles_of,
    score_factors,
    sinks_gradient,
)
from tilewise.hopper.launch import descriptor, num_sms, scheduler_counter, tma_ready
from tilewise.launch_plan import Launch, Tensors, run
from tilewise.problem import AttentionProblem, Gradients, Inputs

QUERIES = 128  # of a tile of the queries kernel: 64 for each of two warpgroups


def backward(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Gradients by recomputation from lse; the same bits every time. Scratch memory: 2 floats a row."""
    cfg = wide_config(problem)
    query, key, value, out, dout = (tma_ready(t) for t in (*inputs[:3], out, dout))
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs[:3])
    slots = problem.num_heads * (1 if problem.is_packed else problem.batch)
    tiles = slots * query_tiles_of(problem, query.shape[-3], cfg)
    stats = torch.empty(tiles, 2 * cfg.BLOCK_M, dtype=torch.float32, device=query.device)
    cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    dlse = None if dlse is None else dlse.contiguous()
    run(prepare_launch, problem, (out, dout, lse.contiguous(), dlse, cu_q), cfg, fresh=(stats, None))
    counter = scheduler_counter(query.device)
    packing = (cu_q, cu_k, *order_sequences(problem, cu_k, cu_q, cfg.BLOCK_N))
    run(keys_launch, problem, (query, key, value, dout, dk, dv, stats, *packing, counter), cfg)
    packing = (cu_q, cu_k, *order_sequences(problem, cu_q, cu_k, QUERIES))
    run(queries_launch, problem, (query, key, value, dout, dq, stats, *packing, counter), cfg)
    dsinks = None if inputs.sinks is None else sinks_gradient(problem, inputs.sinks, stats, cfg)
    return Gradients(dq, dk, dv, None, dsinks)


def wide_config(problem: AttentionProblem) -> WideBackwardConfig:
    """d = 256: K + V + 2 x (Q + dO + P) = 64 + 2 x 72 = 208 KB; 2 x (Q + dO + K) + V = 224 KB of 227.

    192/128: K + V + 3 x (Q + dO) + 2 x P = 40 + 120 + 16 = 176 KB; 2 x (Q + dO + V) + 3 x K = 184 KB.
    """
    visibility = problem.visibility()
    block_dv = 128 if problem.head_dim_v <= 128 else 256
    is_slim = problem.head_dim <= 192 and block_dv == 128
    parts, width = (3, 64) if is_slim else (1, 256)
    stages = (3, 3, 2) if is_slim else (2, 2, 1)
    return WideBackwardConfig(
        BLOCK_M=64,
        BLOCK_N=64,
        PARTS=parts,
        PART_WIDTH=width,
        BLOCK_DV=block_dv,
        STAGES=stages[0],
        K_STAGES=stages[1],
        V_STAGES=stages[2],
        IS_PACKED=problem.is_packed,
        HAS_LEFT=visibility.left is not None,
        HAS_RIGHT=visibility.right is not None,
        HAS_SOFTCAP=problem.softcap > 0,
    )


def keys_launch(problem: AttentionProblem, tensors: Tensors, cfg: WideBackwardConfig) -> Launch:
    from tilewise.hopper.backward_wide import attn_bwd_wide_keys_kernel

    query, key, value, dout, dk, dv, stats, *others = tensors
    assert query is not None and key is not None
    is_packed = problem.is_packed
    sizes = kernel_sizes(problem, query.shape[-3], -(-problem.seqlen_k // cfg.BLOCK_N), cfg)
    qk, v = (64, 1, cfg.PART_WIDTH), (64, 1, cfg.BLOCK_DV)
    arguments = (
        *(descriptor(t, tile, is_packed) for t, tile in ((query, qk), (key, qk), (value, v), (dout, v))),
        *(descriptor(t, (64, 1, cfg.STORE_WIDTH), is_packed) for t in (dk, dv)),
        flat_descriptor(stats, (1, 2 * cfg.BLOCK_M)),
        *others,
        *sizes,
        *score_factors(problem),
        cfg,
    )
    most_tiles = key.shape[0] // cfg.BLOCK_N + problem.batch if is_packed else sizes.num_tiles
    programs = min(num_sms(query.device.index), most_tiles * sizes.num_slots)
    return Launch(attn_bwd_wide_keys_kernel, programs, arguments, num_warps=4, maxnreg=cfg.maxnreg)


def queries_launch(problem: AttentionProblem, tensors: Tensors, cfg: WideBackwardConfig) -> Launch:
    from tilewise.hopper.backward_wide_queries import attn_bwd_wide_queries_kernel

    query, key, value, dout, dq, *others = tensors
    assert query is not None
    is_packed = problem.is_packed
    sizes = kernel_sizes(problem, query.shape[-3], -(-problem.seqlen_q // QUERIES), cfg)
    qk, v = (64, 1, cfg.PART_WIDTH), (64, 1, cfg.BLOCK_DV)
    tiles = ((query, qk), (key, qk), (value, v), (dout, v), (dq, qk))
    descriptors = (descriptor(t, tile, is_packed) for t, tile in tiles)
    arguments = (*descriptors, *others, *sizes, *score_factors(problem), cfg)
    most_tiles = query.shape[0] // QUERIES + problem.batch if is_packed else sizes.num_tiles
    programs = min(num_sms(query.device.index), most_tiles * sizes.num_slots * problem.group_size)
    return Launch(attn_bwd_wide_queries_kernel, programs, arguments, num_warps=4, maxnreg=cfg.maxnreg)
