"""PyTorch's own CPU flash kernel, where it computes exactly the same problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Gradients, Inputs


def supports(problem: AttentionProblem) -> str | None:
    """None where the kernel covers the problem exactly, otherwise the reason it does not."""
    refusals = {
        "runs on the CPU only": problem.device_type != "cpu",
        "has no 8-bit products": problem.precision == "fp8",
        "has no packed sequences": problem.is_packed,
        "has no caches or pages": problem.is_cached or problem.is_paged,
        "has no window": problem.has_window,
        "has no softcap": problem.softcap > 0,
        "has no sinks": problem.has_sinks,
        "has no ALiBi": problem.has_alibi,
        "has no reproducible dropout": problem.dropout_p > 0,
        "needs head_dim == head_dim_v": problem.head_dim != problem.head_dim_v,
        "aligns causal masks top-left": problem.causal and problem.seqlen_q != problem.seqlen_k,
        "takes a mask or a bias, not both": problem.mask_shape is not None and problem.bias_shape is not None,
        "has no bias gradient": problem.bias_needs_grad,
        "has no lse gradient": problem.lse_needs_grad,
        "fails on empty tensors": 0
        in (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads, problem.num_kv_heads),
    }
    return next((reason for reason, applies in refusals.items() if applies), None)


def is_faster(problem: AttentionProblem, is_backward: bool) -> bool:
    """Whether this kernel beats the PyTorch tiles. Measured on 2 cores, torch 2.13: always in float32 and
    bfloat16; in float16 only the forward of short sequences (its float16 products are not vectorized)."""
    if problem.dtype != torch.float16:
        return True
    return not is_backward and problem.seqlen_q * problem.seqlen_k < 256 * 256


def beats_llvm(problem: AttentionProblem, is_backward: bool) -> bool:
    """Whether this kernel beats the generated ones: in the long full backward in bfloat16 on AMD's processors
    with dot products (AVX-512 BF16), twice as fast there as multiply-adds. Measured as the generated kernels'
    time over this one's: 1.06 and 1.15 there for 2048 keys and 0.85 for 512; on Intel's 0.5 to 0.7.
    """
    if problem.dtype != torch.bfloat16 or problem.mask_shape is not None or problem.bias_shape is not None:
        return False
    is_long = min(problem.seqlen_q, problem.seqlen_k) >= 1024
    return is_backward and is_long and not problem.causal and _has_fast_dot_products()


def _has_fast_dot_products() -> bool:
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # newer PyTorch only
    is_amd = "AMD" in str(capabilities.get("cpu_name"))
    return is_amd and torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse, as `tilewise.tiled.backend.forward`."""
    q, k, v = (t.transpose(1, 2) for t in inputs[:3])
    attn_mask = _additive_mask(inputs)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, problem.causal, attn_mask=attn_mask, scale=problem.scale
    )
    if attn_mask is not None:  # the kernel reports lse = 0 for a query that sees no key
        lse = lse.masked_fill((attn_mask == float("-inf")).all(-1), float("-inf"))
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def repeatable(
    problem: AttentionProblem, inputs: Inputs, layout: str, return_lse: bool
) -> Callable[[Tensor, Tensor, Tensor], Any] | None:
    """A function of query, key and value in the caller's layout, for calls that differ in nothing else."""
    if inputs.mask is not None or inputs.bias is not None:
        return None
    attend = torch._scaled_dot_product_flash_attention_for_cpu
    options: dict[str, Any] = {"is_causal": problem.causal, "scale": problem.scale}

    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        if layout == "bshd":
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        out, lse = attend(query, key, value, **options)
        out = out.transpose(1, 2).contiguous()
        out = out.transpose(1, 2) if layout == "bhsd" else out
        return (out, lse.contiguous()) if return_lse else out

    return run


def backward(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Gradients of query, key and value; dlse must be None."""
    q, k, v, out, dout = (t.transpose(1, 2) for t in (*inputs[:3], out, dout))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse.masked_fill(lse == float("-inf"), 0.0), 0.0, problem.causal,
        attn_mask=_additive_mask(inputs), scale=problem.scale,
    )  # fmt: skip
    return Gradients(*(g.transpose(1, 2).contiguous() for g in grads))


def _additive_mask(inputs: Inputs) -> Tensor | None:
    dtype = inputs.query.dtype
    if inputs.bias is not None:
        return inputs.bias.to(dtype)
    if inputs.mask is None:
        return None
    zero = torch.zeros((), dtype=dtype, device=inputs.mask.device)
    return torch.where(inputs.mask, zero, float("-inf"))
