"""What a call would do: the backend and why, work, traffic and the bound that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewise.api import Window, canonical_inputs, window_bounds
from tilewise.core.problem import AttentionProblem, Inputs, Options, describe, spans
from tilewise.core.values import check_values
from tilewise.device import Device, device_for
from tilewise.dispatch import choice as dispatch


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`.

    Attributes:
        backend: the backend that serves the forward.
        backward_backend: the one that serves the backward.
        reasons: for every backend, why it does not serve the call; None if it would.
        flops: of the forward: 2 for each multiply-add of the visible (query, key) pairs.
        bytes: the least the forward must move: each input read once, each output written once.
        device: the ceilings used.
        seconds: the larger of flops and bytes over their ceilings: no kernel runs faster.
        bound: "compute" or "memory", whichever that is.
    """

    backend: str
    backward_backend: str
    reasons: dict[str, str | None]
    flops: int
    bytes: int
    device: Device
    problem: AttentionProblem

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / max(1, self.bytes)

    @property
    def bound(self) -> str:
        return "compute" if self.intensity >= self.device.balance else "memory"

    @property
    def seconds(self) -> float:
        return max(self.flops / self.device.flops_per_second, self.bytes / self.device.bytes_per_second)

    def __str__(self) -> str:
        p, d = self.problem, self.device
        gflops, gbytes = d.flops_per_second / 1e9, d.bytes_per_second / 1e9
        rows = [
            f"attention {p.batch} x {p.seqlen_q} queries x {p.seqlen_k} keys, "
            f"{p.num_heads}/{p.num_kv_heads} heads of {p.head_dim}/{p.head_dim_v}, {p.dtype}".replace(
                "torch.", ""
            ),
            f"backend    {self.backend} (backward: {self.backward_backend})",
        ]
        rows += [f"           not {name}: {why}" for name, why in self.reasons.items() if why is not None]
        rows += [
            f"work       {self.flops / 1e9:.4g} GFLOP, {self.bytes / 1e6:.4g} MB: "
            f"{self.intensity:.4g} FLOP/byte",
            f"ceilings   {d.name}: {gflops:.4g} GFLOP/s, {gbytes:.4g} GB/s, "
            f"balance {d.balance:.3g} FLOP/byte ({d.source})",
            f"bound      {self.bound}: at least {self.seconds * 1e3:.4g} ms",
        ]
        return "\n".join(rows)


def explain(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Explanation:
    """Say which backend `attention` would use and why, and what bounds its time. Computes no attention.

    Args:
        query, key, value, options: as `tilewise.attention`; with `cu_seqlens_q` and `cu_seqlens_k`, as
            `tilewise.attention_varlen`.

    Raises:
        ValueError, TypeError, NotImplementedError: as the call itself would.

    Example:
        >>> import torch
        >>> x = torch.zeros(1, 128, 2, 64)
        >>> explanation = explain(x, x, x, window=(16, 0))
        >>> explanation.flops, explanation.bytes
        (1044480, 263168)
    """
    inputs, call, backend = _canonical(query, key, value, **options)
    problem = describe(inputs, call)
    check_values(problem, inputs, call)
    return Explanation(
        backend=dispatch.choose(problem, backend),
        backward_backend=dispatch.choose(problem, backend, is_backward=True),
        reasons=dispatch.refusals(problem),
        flops=_flops(problem, inputs),
        bytes=_bytes(problem, inputs),
        device=device_for(query.device, query.dtype),
        problem=problem,
    )


def _canonical(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    precision: str = "ieee",
    return_lse: bool = False,
    backend: str | None = None,
    **tensors: Any,
) -> tuple[Inputs, Options, str | None]:
    inputs = canonical_inputs(query, key, value, dropout_p=dropout_p, **tensors)
    inputs = inputs._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    bounds = window_bounds(window)
    options = Options(causal, *bounds, softcap, dropout_p, scale, deterministic, precision=precision)
    return inputs, options, backend


def _flops(problem: AttentionProblem, inputs: Inputs) -> int:
    pairs = sum(problem.visibility(s.q1 - s.q0, s.k1 - s.k0).visible_pairs() for s in spans(problem, inputs))
    return 2 * (problem.head_dim + problem.head_dim_v) * problem.num_heads * pairs


def _bytes(problem: AttentionProblem, inputs: Inputs) -> int:
    queries = inputs.query.numel() // problem.head_dim
    out = queries * problem.head_dim_v * problem.dtype.itemsize
    lse = queries * problem.compute_dtype.itemsize
    return sum(t.numel() * t.element_size() for t in inputs if t is not None) + out + lse
