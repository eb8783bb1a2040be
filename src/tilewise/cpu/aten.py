"""PyTorch's own CPU flash kernel, where it computes exactly the same problem."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tilewise.core.plan import FunctionPlan, Plan, Results, Retry, Saves
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import Request, Signature, in_order, rows_dense
from tilewise.core.torch_private import cpu_backward, cpu_forward

# The most that the rounding of lse may put into a weight, relative: a quarter of what rounding the weight to
# the type does; in float32 and float64 more, since scores of 2^10 are themselves rounded as coarsely.
MOST_LOSS = {
    torch.float32: 2.0**-14, torch.float64: 2.0**-46, torch.bfloat16: 2.0**-10, torch.float16: 2.0**-13,
}  # fmt: skip


def plan(problem: AttentionProblem, signature: Signature) -> Plan:
    """One call of PyTorch's operator."""
    if signature.direction == "backward":
        return FunctionPlan(problem, backward)
    return FunctionPlan(problem, functools.partial(forward, request=signature.request))


def saves(problem: AttentionProblem) -> Saves:
    return Saves(residual=True)


def _loses_digits(problem: AttentionProblem, lse: Tensor) -> bool:
    """Whether lse is so large that weights exp(s - lse) are off by more than `MOST_LOSS`: half a unit in the
    last place of lse, as the kernel has no residual of it."""
    if not lse.numel():
        return False
    low, high = torch.aminmax(lse)
    limit = MOST_LOSS[problem.dtype] / torch.finfo(lse.dtype).eps * 2
    return bool(torch.maximum(-low, high) > limit)


def forward(problem: AttentionProblem, inputs: Inputs, request: Request) -> Results | Retry:
    """out and lse; the residual of lse has to be made elsewhere where a backward needs it."""
    q, k, v = (rows_dense(t).transpose(1, 2) for t in inputs[:3])
    attn_mask = _additive_mask(inputs)
    out, lse = cpu_forward(q, k, v, 0.0, problem.causal, attn_mask=attn_mask, scale=problem.scale)
    if request.residual and _loses_digits(problem, lse):
        return Retry("tiled")
    if attn_mask is not None:  # the kernel reports lse = 0 for a query that sees no key
        lse = lse.masked_fill(_sees_nothing(attn_mask, problem), float("-inf"))
    if ((lse == 0) | lse.isposinf()).any():  # which it reports, with out = 0, for scores that are NaN or inf
        return Retry("tiled")
    lse = lse.contiguous()
    out = in_order(out.transpose(1, 2).contiguous(), request.order)
    return Results(out, lse, torch.zeros_like(lse) if request.residual else None)


def backward(
    problem: AttentionProblem, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None
) -> Gradients | Retry:
    """Gradients of query, key and value; dlse is None."""
    out, lse, _ = results
    assert out is not None and lse is not None
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    if _loses_digits(problem, lse):
        return Retry("tiled")
    q, k, v, out, dout = (rows_dense(t).transpose(1, 2) for t in (*inputs[:3], out, dout))
    grads = cpu_backward(
        dout, q, k, v, out, lse, 0.0, problem.causal,
        attn_mask=_additive_mask(inputs), scale=problem.scale,
    )  # fmt: skip
    return Gradients(*(g.transpose(1, 2).contiguous() for g in grads))


def _sees_nothing(attn_mask: Tensor, problem: AttentionProblem) -> Tensor:
    """Which queries the mask, and causality, leave no key: (batch or 1, heads or 1, seqlen_q)."""
    is_seen = attn_mask != float("-inf")
    first = torch.where(is_seen.any(-1), is_seen.byte().argmax(-1), problem.seqlen_k)
    last = torch.arange(problem.seqlen_q, device="cpu") if problem.causal else problem.seqlen_k - 1
    return first > last


def _additive_mask(inputs: Inputs) -> Tensor | None:
    dtype = inputs.query.dtype
    if inputs.bias is not None:
        is_wider = dtype.itemsize == 2 and inputs.bias.dtype != dtype  # such scores are in float32
        return inputs.bias.to(torch.float32 if is_wider else dtype)
    if inputs.mask is None:
        return None
    zero = torch.zeros((), dtype=dtype, device=inputs.mask.device)
    return torch.where(inputs.mask, zero, float("-inf"))
