"""PyTorch's own CPU flash kernel, where it computes exactly the same problem."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.core.plan import FunctionPlan, Plan, Results, Saves
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import Signature, rows_dense


def plan(problem: AttentionProblem, signature: Signature) -> Plan:
    """One call of PyTorch's operator."""
    if signature.direction == "backward":
        return FunctionPlan(problem, backward)
    return FunctionPlan(problem, forward)


def saves(problem: AttentionProblem) -> Saves:
    return Saves()


def forward(problem: AttentionProblem, inputs: Inputs) -> Results:
    """out and lse."""
    q, k, v = (rows_dense(t).transpose(1, 2) for t in inputs[:3])
    attn_mask = _additive_mask(inputs)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, problem.causal, attn_mask=attn_mask, scale=problem.scale
    )
    if attn_mask is not None:  # the kernel reports lse = 0 for a query that sees no key
        lse = lse.masked_fill((attn_mask == float("-inf")).all(-1), float("-inf"))
    return Results(out.transpose(1, 2).contiguous(), lse.contiguous())


def backward(
    problem: AttentionProblem, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Gradients of query, key and value; dlse is None."""
    out, lse, _ = results
    assert out is not None and lse is not None
    q, k, v, out, dout = (rows_dense(t).transpose(1, 2) for t in (*inputs[:3], out, dout))
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
