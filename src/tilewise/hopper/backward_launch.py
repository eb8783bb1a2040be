"""Host side of the Hopper backward: what it serves, and the launch of its three kernels."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.hopper import launch
from tilewise.hopper.backward_arguments import BLOCK_N, CHUNK, BackwardConfig
from tilewise.problem import AttentionProblem, Gradients, Inputs

MAX_HEAD_DIM = 128


def supports(problem: AttentionProblem) -> str | None:
    """None if the Hopper backward serves a problem that the forward serves, else why not."""
    if problem.head_dim > MAX_HEAD_DIM:
        return f"takes head sizes up to {MAX_HEAD_DIM} in the backward, not {problem.head_dim}"
    return None


class Scratch(NamedTuple):
    """Memory of one call beyond its inputs and outputs: 2 floats a row and dQ in float32."""

    tiles_q: int  # query tiles of a query head
    num_slots: int  # (batch, query head) pairs, or query heads if packed
    stats: Tensor  # (num_slots * tiles_q, 2 * BLOCK_M): lse in units of log2, delta
    dq: Tensor  # (num_slots * tiles_q * parts * 32, 128): each [64, 64] part in the order of its registers


def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    config: BackwardConfig | None = None,
) -> Gradients:
    """Gradients by recomputation from lse, each contiguous and in the dtype of its input."""
    cfg = config or backward_config(problem)
    tensors = tuple(launch._tma_ready(t) for t in (*inputs[:3], dout))
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs[:3])
    scratch = _make_scratch(problem, inputs, cfg)
    with torch.cuda.device(dq.device):
        _prepare(problem, inputs, cfg, scratch, (out, tensors[3]), lse.contiguous(), dlse)
        _launch_main(problem, inputs, cfg, scratch, tensors, (dk, dv))
        _finish(problem, inputs, cfg, scratch, dq)
    dsinks = None if inputs.sinks is None else _dsinks(problem, inputs.sinks, cfg, scratch)
    return Gradients(dq, dk, dv, None, dsinks)


@functools.lru_cache(maxsize=4096)
def backward_config(problem: AttentionProblem) -> BackwardConfig:
    """The tiles of a problem. Measurements are in docs/kernel-notes-hopper-backward.md."""
    visibility = problem.visibility()
    block_d = max(launch._padded(problem.head_dim), launch._padded(problem.head_dim_v))
    return BackwardConfig(
        BLOCK_M=128 if block_d == 64 else 64,
        BLOCK_D=block_d,
        Q_STAGES=3,
        DO_STAGES=2,
        IS_PACKED=problem.is_packed,
        HAS_LEFT=visibility.left is not None,
        HAS_RIGHT=visibility.right is not None,
        HAS_SOFTCAP=problem.softcap > 0,
        IS_DETERMINISTIC=problem.deterministic,
    )


def _make_scratch(problem: AttentionProblem, inputs: Inputs, cfg: BackwardConfig) -> Scratch:
    query = inputs.query
    if problem.is_packed:
        tiles_q, num_slots = query.shape[0] // cfg.BLOCK_M + problem.batch, problem.num_heads
    else:
        tiles_q, num_slots = -(-problem.seqlen_q // cfg.BLOCK_M), problem.batch * problem.num_heads
    tiles = tiles_q * num_slots
    make = functools.partial(torch.empty, dtype=torch.float32, device=query.device)
    return Scratch(
        tiles_q,
        num_slots,
        make(tiles, 2 * cfg.BLOCK_M),
        make(tiles * cfg.BLOCK_M * cfg.BLOCK_D // 128, 128),
    )


def _row_strides(t: Tensor) -> tuple[int, ...]:
    """(batch, row, head) strides; packed tensors have no batch."""
    return (0, *t.stride()[:2]) if t.ndim == 3 else t.stride()[:3]


def _prepare(
    problem: AttentionProblem,
    inputs: Inputs,
    cfg: BackwardConfig,
    scratch: Scratch,
    outputs: tuple[Tensor, Tensor],
    lse: Tensor,
    dlse: Tensor | None,
) -> None:
    from tilewise.hopper.backward_rows import attn_bwd_prepare_kernel

    out, dout = outputs
    attn_bwd_prepare_kernel[(scratch.tiles_q * scratch.num_slots,)](
        out,
        dout,
        lse,
        None if dlse is None else dlse.contiguous(),
        scratch.stats,
        scratch.dq,
        inputs.cu_seqlens_q,
        *_row_strides(out),
        *_row_strides(dout),
        scratch.tiles_q,
        problem.num_heads,
        problem.seqlen_q,
        lse.shape[-1],
        problem.batch,
        DIM=problem.head_dim_v,
        BLOCK_D=cfg.BLOCK_D,
        BLOCK_M=cfg.BLOCK_M,
    )


def _launch_main(
    problem: AttentionProblem,
    inputs: Inputs,
    cfg: BackwardConfig,
    scratch: Scratch,
    tensors: tuple[Tensor, ...],
    gradients: tuple[Tensor, Tensor],
) -> None:
    from tilewise.hopper.backward import attn_bwd_kernel

    query, key, value, dout = tensors
    is_packed = problem.is_packed
    visibility = problem.visibility()
    num_slots = problem.num_kv_heads * (1 if is_packed else problem.batch)
    num_tiles = -(-problem.seqlen_k // BLOCK_N)
    bound = key.shape[0] // BLOCK_N + problem.batch if is_packed else num_tiles
    swapped = inputs._replace(cu_seqlens_q=inputs.cu_seqlens_k, cu_seqlens_k=inputs.cu_seqlens_q)
    order, first_tile = launch._order_sequences(swapped, problem.batch, BLOCK_N)
    tile_q, tile_k = (cfg.BLOCK_M, 1, cfg.BLOCK_D), (BLOCK_N // 2, 1, cfg.BLOCK_D)
    softcap = problem.softcap
    attn_bwd_kernel[(min(launch._num_sms(query.device.index), bound * num_slots),)](
        launch._descriptor(query, tile_q, is_packed),
        launch._descriptor(key, tile_k, is_packed),
        launch._descriptor(value, tile_k, is_packed),
        launch._descriptor(dout, tile_q, is_packed),
        _flat_descriptor(scratch.dq, (CHUNK // 128, 128)),
        launch._descriptor(gradients[0], tile_k, is_packed),
        launch._descriptor(gradients[1], tile_k, is_packed),
        _flat_descriptor(scratch.stats, (1, 2 * cfg.BLOCK_M)),
        _turns(scratch, query.device) if cfg.IS_DETERMINISTIC else None,
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        order,
        first_tile,
        launch._counter(query.device),
        batch=problem.batch,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        group_size=problem.group_size,
        num_slots=num_slots,
        num_tiles=num_tiles,
        tiles_q=scratch.tiles_q,
        window_left=launch.UNBOUNDED if visibility.left is None else min(visibility.left, launch.UNBOUNDED),
        window_right=launch.UNBOUNDED if visibility.right is None else min(visibility.right, launch.UNBOUNDED),
        scale=problem.scale,
        scale_log2e=problem.scale * launch.LOG2_E,
        two_over_softcap_log2e=2 * launch.LOG2_E * problem.scale / softcap if softcap else 0.0,
        softcap_log2e=softcap * launch.LOG2_E,
        cfg=cfg,
        num_warps=4,
        maxnreg=168,
    )


def _finish(
    problem: AttentionProblem, inputs: Inputs, cfg: BackwardConfig, scratch: Scratch, dq: Tensor
) -> None:
    from tilewise.hopper.backward_rows import attn_bwd_finish_kernel

    parts = cfg.BLOCK_M * cfg.BLOCK_D // CHUNK
    attn_bwd_finish_kernel[(scratch.tiles_q * scratch.num_slots * parts,)](
        scratch.dq,
        dq,
        inputs.cu_seqlens_q,
        *_row_strides(dq),
        problem.scale,
        scratch.tiles_q,
        problem.num_heads,
        problem.seqlen_q,
        problem.batch,
        DIM=problem.head_dim,
        BLOCK_D=cfg.BLOCK_D,
        BLOCK_M=cfg.BLOCK_M,
    )


def _turns(scratch: Scratch, device: torch.device) -> Tensor:
    """How many key tiles have added to each query tile so far."""
    return torch.zeros(scratch.stats.shape[0], dtype=torch.int32, device=device)


def _flat_descriptor(t: Tensor, block: tuple[int, int]) -> Any:
    """TMA descriptor of a contiguous float32 matrix, copied as it lies in memory."""
    from tilewise.hopper.compat import TensorDescriptor, gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(t, list(t.shape), [t.shape[1], 1], list(block), layout)


def _dsinks(problem: AttentionProblem, sinks: Tensor, cfg: BackwardConfig, scratch: Scratch) -> Tensor:
    """-sum of p_sink * delta over all rows of a head; rows that do not exist have lse = +inf."""
    shape = (-1, problem.num_heads, scratch.tiles_q, 2, cfg.BLOCK_M)
    lse_log2, delta = scratch.stats.view(shape).unbind(3)
    p_sink = torch.exp2((sinks.float() * launch.LOG2_E)[:, None, None] - lse_log2)
    return (p_sink * delta).sum((0, 2, 3)).neg().to(sinks.dtype)
