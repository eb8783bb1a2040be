"""Attention in 8 bits: tensors rounded ahead of the call, and the steps of `precision="fp8"` as functions.

    q8, k8, v8 = quantize(q, k, v)
    out = tilewise.attention(q8, k8, v8, causal=True)

is `attention(q, k, v, causal=True, precision="fp8")`, bit for bit; the rounding is done once for many calls.
`tilewise.core.fp8` has the formulas, `tilewise.core.quantized` the layout.
"""

from __future__ import annotations

from torch import Tensor

from tilewise.api import to_bshd
from tilewise.core.checks import EIGHT_BIT, check_tensors, shown
from tilewise.core.fp8 import hadamard, padded_dim, rotate, round_rows, round_weights
from tilewise.core.problem import AttentionProblem, Inputs, Options, describe
from tilewise.core.quantized import KINDS, Quantized, round_tensor
from tilewise.core.values import check_values
from tilewise.dispatch.capability import refusal

__all__ = ["Quantized", "hadamard", "padded_dim", "quantize", "rotate", "round_rows", "round_weights"]


def quantize(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    precision: str = "fp8",
    layout: str = "bshd",
) -> tuple[Quantized, Quantized, Quantized]:
    """query, key and value in 8 bits, with a scale for each 128 rows of a head; query and key rotated.

    On a Hopper GPU one Triton kernel each reads a tensor once, rotates, rounds and writes it, values
    transposed as the attention kernel reads them. Elsewhere PyTorch operations give the same numbers, but for
    the order of sums.

    Args:
        query, key, value: bfloat16 or float16, as `tilewise.attention` takes them in `layout`; with offsets
            packed, as `tilewise.attention_varlen` takes them.
        precision: "fp8", or "int8" for a query and a key in integers, with less error.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) offsets of packed sequences, also of the call that follows.

    Returns:
        Three `Quantized`, without gradients. A block with a NaN or an infinity has the scale NaN.

    Raises:
        ValueError, TypeError: the tensors do not fit together, or offsets are wrong.

    Source: Shah et al., FlashAttention-3 (2024), section 3.3.

    Example:
        >>> import torch, tilewise
        >>> q, k, v = torch.randn(3, 1, 200, 2, 64).bfloat16()
        >>> out = tilewise.attention(*quantize(q, k, v), causal=True)
        >>> torch.equal(out, tilewise.attention(q, k, v, causal=True, precision="fp8"))
        True
    """
    check_tensors(query=query, key=key, value=value)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if precision not in EIGHT_BIT:
        raise ValueError(f"precision={shown(precision)} must be 'fp8' or 'int8'")
    given = [t.detach() for t in to_bshd(layout, query=query, key=key, value=value)]
    inputs = Inputs(given[0], given[1], given[2], cu_seqlens_q, cu_seqlens_k)
    options = Options(precision=precision)
    problem = describe(inputs, options)
    if problem.device_type != "meta":
        check_values(problem, inputs, options)
    offsets = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)
    q, k, v = (_quantized(problem, kind, t, n) for kind, t, n in zip(KINDS, inputs[:3], offsets))
    return q, k, v


def _quantized(problem: AttentionProblem, kind: str, t: Tensor, cu_seqlens: Tensor | None) -> Quantized:
    if refusal("hopper", problem) is None:
        from tilewise.gpu.hopper.fp8 import launch

        return launch.round_tensor(problem, kind, t, cu_seqlens)
    return round_tensor(kind, t, cu_seqlens, problem.precision)
