"""FlashAttention-3's 8-bit form: float8_e4m3fn tensors, and factors for each sequence and KV head.

Where a kernel has 8-bit products, the numbers are put into its blocks as they stand, and weights are rounded
to 8 bits too. Elsewhere products are of bfloat16, which holds every 8-bit number: a score is q k q_descale
k_descale, so both factors go to q; v_descale goes to out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.fp8 import FP8
from tilewise.core.problem import AttentionProblem, Inputs, Options, describe
from tilewise.core.quantized import KINDS, arrange, inputs_of
from tilewise.core.torch_private import compiles_here
from tilewise.dispatch.capability import refusal


class Descale(NamedTuple):
    """What the numbers in q, k and v are to be multiplied by: float32 (batch, KV heads), None for 1."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None

    def is_needed(self, q: Tensor, k: Tensor, cu_seqlens: Tensor | None = None) -> bool:
        """Whether q is 8-bit. Whatever else is wrong with q and k is left to the checks of all calls.

        Raises:
            ValueError, TypeError: a factor does not fit.
        """
        is_fp8 = isinstance(q, Tensor) and q.dtype == FP8
        for name, t in zip(self._fields, self):
            if t is None:
                continue
            if not is_fp8:
                dtype = q.dtype if isinstance(q, Tensor) else type(q).__name__
                raise ValueError(f"{name}_descale must be None: q is {dtype}, not float8_e4m3fn")
            if not isinstance(t, Tensor) or t.dtype != torch.float32:
                raise TypeError(f"{name}_descale must be a float32 tensor")
            if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
                raise TypeError(f"cu_seqlens_q={type(cu_seqlens).__name__} must be a torch.Tensor")
            rank = 4 if cu_seqlens is None else 3
            if not isinstance(k, Tensor) or q.ndim != rank or k.ndim < 3 or not k.shape[-2]:
                continue  # refused by the checks of all calls
            if q.shape[-2] % k.shape[-2]:
                raise ValueError(f"query heads {q.shape[-2]} must be divisible by KV heads {k.shape[-2]}")
            batch = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
            if tuple(t.shape) != (batch, k.shape[-2]) or t.device != q.device:
                raise ValueError(
                    f"{name}_descale.shape={tuple(t.shape)} must be (batch, KV heads)=({batch}, "
                    f"{k.shape[-2]}), on {q.device}"
                )
        return is_fp8

    def in_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, *cu_seqlens: Tensor | None
    ) -> tuple[Inputs, Options] | None:
        """The call with 8-bit products, None where no kernel has them; v's factor is left to `output`.

        Args:
            q, k, v: float8_e4m3fn, (batch, seqlen, heads, dim) or packed.
            cu_seqlens: of q and of k, packed.
        """
        are_8_bit = all(isinstance(t, Tensor) and t.dtype == FP8 for t in (q, k, v))
        if not are_8_bit or not all(isinstance(n, Tensor) for n in cu_seqlens):
            return None  # refused by the checks of all calls
        if compiles_here():
            return None
        options = options._replace(precision="fp8", deterministic=False)
        offsets = cu_seqlens or (None, None)
        shapes = Inputs(*(t.new_empty(1, dtype=torch.bfloat16).expand(t.shape) for t in (q, k, v)), *offsets)
        if not has_kernels(describe(shapes, options)):
            return None
        factor = self.of_scores()
        if factor is not None:
            factor = factor.repeat_interleave(q.shape[-2] // k.shape[-2], 1)
        arranged = (
            arrange(kind, t, scale, torch.bfloat16, n)
            for kind, t, scale, n in zip(KINDS, (q, k, v), (factor, None, None), (*offsets, offsets[1]))
        )
        inputs = inputs_of(*arranged)
        return inputs._replace(cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1]), options

    def of_scores(self) -> Tensor | None:
        """q's factor times k's."""
        return self.q if self.k is None else self.k if self.q is None else self.q * self.k

    def query(self, q: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """q in bfloat16, times its factor and k's."""
        return _times(q, self.of_scores(), cu_seqlens)

    def output(self, out: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """out times v's factor."""
        return _times(out, self.v, cu_seqlens)


def has_kernels(problem: AttentionProblem) -> bool:
    """Whether a kernel multiplies 8-bit numbers in this call."""
    return refusal("hopper", problem) is None


NO_FACTORS = Descale(None, None, None)


def _times(x: Tensor, factor: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """x (batch, seqlen, heads, dim), or packed (total, heads, dim), in bfloat16."""
    if factor is None or x.ndim != (4 if cu_seqlens is None else 3) or not factor.shape[1]:
        return x.detach().to(torch.bfloat16)
    factor = factor.detach().repeat_interleave(x.shape[-2] // factor.shape[1], 1)  # (batch, heads)
    if cu_seqlens is None:
        factor = factor[:, None]
    else:
        token = torch.arange(len(x), device=x.device)
        factor = factor[torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(max=len(factor) - 1)]
    return (x.detach().float() * factor[..., None]).to(torch.bfloat16)


def as_bfloat16(name: str, t: Tensor) -> Tensor:
    """The same numbers.

    Raises:
        TypeError: they are not 8-bit, as q is.
    """
    if not isinstance(t, Tensor) or t.dtype != FP8:
        dtype = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name} is {dtype}, must be float8_e4m3fn as q is")
    return t.detach().to(torch.bfloat16)


def to_fp8(t: Tensor) -> Tensor:
    """The nearest 8-bit numbers; what is beyond the largest becomes it, as GPUs convert."""
    largest = torch.finfo(FP8).max
    return t.clamp(-largest, largest).to(FP8)
