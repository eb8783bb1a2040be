"""Host side of the 8-bit forward: tensors are rounded by one kernel each, or come so, and multiplied."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tilewise.core import fp8
from tilewise.core.kept import kept_on_device
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.quantized import KINDS, Quantized, num_blocks
from tilewise.core.signature import rows_dense
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import WARPGROUP_ROWS, FP8Config, Packing, Scales
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (like query, head_dim_v) and lse float32 (batch, heads, seqlen_q), packed (heads, total_q)."""
    offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    cu_q, cu_k = (None if t is None else t.contiguous() for t in offsets)
    values, factors = [], []
    for kind, t, cu_seqlens in zip(KINDS, inputs[:3], (cu_q, cu_k, cu_k)):
        if problem.is_in_blocks:
            blocks, scale = getattr(inputs, f"{kind}_blocks"), getattr(inputs, f"{kind}_scale")
        else:
            rounded = round_tensor(problem, kind, t, cu_seqlens)
            blocks, scale = rounded.blocks, rounded.scale
        values.append(blocks.contiguous())
        factors.append(scale.contiguous())
    query = inputs.query
    out = query.new_empty((*query.shape[:-1], problem.head_dim_v), dtype=problem.dtype)
    *batch, rows, heads, _ = query.shape
    lse = query.new_empty((*batch, heads, rows), dtype=torch.float32)
    cfg = forward_config(problem)
    sinks = None if inputs.sinks is None else inputs.sinks.contiguous()
    ordered = host.order_sequences(problem, cu_q, cu_k, cfg.BLOCK_M)
    tensors = (*values, *factors, sinks, cu_q, cu_k)
    fresh = (out, lse, *ordered, host.scheduler_counter(out.device))
    run(_forward_launch, problem, tensors, cfg, out.shape[0], fresh=fresh)  # blocks do not say how many rows
    return out, lse


def round_tensor(problem: AttentionProblem, kind: str, t: Tensor, cu_seqlens: Tensor | None) -> Quantized:
    """A 16-bit tensor in blocks; a query or key is rotated."""
    t = rows_dense(t)
    is_value, (heads, dim) = kind == "value", t.shape[-2:]
    count, width = num_blocks(t.shape, cu_seqlens), fp8.padded_dim(dim)
    shape = (width, fp8.BLOCK_ROWS) if is_value else (fp8.BLOCK_ROWS, width)  # V is transposed
    dtype = fp8.FP8 if is_value else fp8.OPERANDS[problem.precision]
    blocks = torch.empty((heads, count, *shape), dtype=dtype, device=t.device)
    factors = torch.empty((heads, count), dtype=torch.float32, device=t.device)
    matrix = None if is_value else _matrix(width, t.dtype, t.device)
    offsets = None if cu_seqlens is None else cu_seqlens.contiguous()
    run(_quantize_launch, problem, (t, matrix, offsets), kind, fresh=(blocks, factors))
    return Quantized(blocks, factors, tuple(t.shape), t.dtype, kind, not is_value, cu_seqlens)


@kept_on_device(64)
def _matrix(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return fp8.hadamard(dim, device="cpu").to(dtype).to(device)


def _quantize_launch(problem: AttentionProblem, tensors: Tensors, kind: str) -> Launch:
    from tilewise.gpu.hopper.fp8.quantize import quantize_rows_kernel, quantize_values_kernel

    t, matrix, cu_seqlens, values, factors = tensors
    assert t is not None and factors is not None
    heads, blocks = factors.shape
    width = fp8.padded_dim(t.shape[-1])
    # seqlen, and the strides of batch, rows and heads
    strides = (t.shape[1], *t.stride()[:3]) if cu_seqlens is None else (0, 0, *t.stride()[:2])
    where = (cu_seqlens, problem.batch, *strides, t.shape[-1])
    if matrix is None:
        arguments = (t, values, factors, *where, width, cu_seqlens is not None)
        warps = 16 if width > 128 else 8
        return Launch(quantize_values_kernel, blocks, arguments, num_warps=warps, programs_y=heads)
    # warps, tiles in flight or at work, and CTAs an SM, by measurement; packed, Triton loads none ahead
    warps, stages, ctas = {64: (4, 3, 3), 128: (8, 4, 1), 256: (8, 2, 1)}[width]
    if cu_seqlens is not None:
        ctas = 4  # or as many as fit
    programs = min(host.num_sms(t.device.index) * ctas, blocks * heads)
    flags = (kind == "query", cu_seqlens is not None)
    arguments = (t, matrix, values, factors, *where, blocks, heads, width, *flags, stages)
    return Launch(quantize_rows_kernel, programs, arguments, num_warps=warps)


def _forward_launch(problem: AttentionProblem, tensors: Tensors, cfg: FP8Config, rows: int) -> Launch:
    """rows: of out's first dimension, which packed are all queries."""
    from tilewise.gpu.hopper.fp8.kernel import attn_fwd_fp8_kernel

    q, k, v, q_scale, k_scale, v_scale, *rest = tensors
    sinks, cu_q, cu_k, out, lse, *ordered, counter = rest
    assert q is not None and k is not None and v is not None and out is not None
    heads, blocks, rows_q, width = q.shape
    box = (1, WARPGROUP_ROWS, width)  # of Q: of one warpgroup
    sizes = host.work_sizes(problem, cfg, rows, cfg.HEAD_DIM + cfg.BLOCK_DV)
    arguments = (
        host.box_descriptor(q, (heads, blocks * rows_q, width), (blocks * rows_q * width, width, 1), box),
        *(host.box_descriptor(t, t.shape, t.stride(), (1, 1, *t.shape[2:])) for t in (k, v)),
        host.descriptor(out, (WARPGROUP_ROWS, 1, cfg.BLOCK_DV), problem.is_packed),
        *(lse, sinks, Packing(cu_q, cu_k, *ordered), counter),
        Scales(q_scale, k_scale, v_scale, q.shape[1], k.shape[1]),
        sizes,
        host.factors(problem),
    )
    most = host.most_tiles(problem, rows if problem.is_packed else problem.seqlen_q, cfg.BLOCK_M)
    work_tiles = most * sizes.num_bh
    return host.persistent(attn_fwd_fp8_kernel, out.device, work_tiles, arguments, cfg, is_early=False)


@functools.lru_cache(maxsize=4096)
def forward_config(problem: AttentionProblem) -> FP8Config:
    """The tiles of a problem. Measurements are in docs/kernels-hopper.md."""
    head_dim, block_dv = fp8.padded_dim(problem.head_dim), fp8.padded_dim(problem.head_dim_v)
    is_wide = max(head_dim, block_dv) > 128
    # 2 x 64 KB of K and V, 2 x 32 KB of Q and O; 3 x 32 KB and 6 x 16 KB: 192 KB both
    warpgroups, stages, q_slots, registers = (2, 2, 2, 240) if is_wide else (3, 3, 6, 160)
    return FP8Config(
        WARPGROUPS=warpgroups,
        STAGES=stages,
        Q_SLOTS=q_slots,
        CONSUMER_REGISTERS=registers,
        HEAD_DIM=head_dim,
        BLOCK_DV=block_dv,
        HAS_SINKS=problem.has_sinks,
        HAS_INTEGERS=problem.precision == "int8",
        **host.options(problem),
    )
