"""Options of benchmark cases that change the scores or the weights: what each peer is given for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.lab.bench.errors import Refusal

if TYPE_CHECKING:
    from tilewise.lab.bench.cases import Case

OPTIONS = ("alibi", "bias", "softcap", "dropout")
GATED = "gated"  # scores times a number of each query and key
FUNCTION_OPTIONS = ("alibi", "softcap", "relative", GATED)
LEARNED = "learned"  # a relative bias whose table gets a gradient: of backward cases
RELATIVE = ("relative", LEARNED)
FUNCTIONS_ALONE = (*RELATIVE, GATED)  # that no option says
BIAS_GRADIENT = "bias-gradient"  # a dense bias that gets one: of backward cases
BIASES = ("bias", BIAS_GRADIENT, *RELATIVE)
REACH = 128  # tokens, beyond which a relative bias is the same
SOFTCAP = 30.0
DROPOUT_P = 0.1
ALL = slice(None)


@dataclass(frozen=True, eq=False)
class CaseOption:
    """The option of a dense case of as many queries as keys; `case.option` is one of these, or ""."""

    case: Case
    device: str
    seed: int

    @functools.cached_property
    def slopes(self) -> Tensor:
        """ALiBi's (heads,) float32."""
        n = self.case.num_heads
        return torch.pow(2.0, -8.0 * torch.arange(1, n + 1, device=self.device) / n)

    @functools.cached_property
    def table(self) -> Tensor:
        """The relative bias (heads, 2 REACH + 1) float32, by distance."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        shape = self.case.num_heads, 2 * REACH + 1
        table = torch.randn(shape, device=self.device, generator=generator)
        return table.requires_grad_(self.case.option == LEARNED)

    @property
    def distances(self) -> Tensor:
        """Of the table, the column for each query and key: int64 (seqlen_q, seqlen_k)."""
        i, j = (torch.arange(n, device=self.device) for n in (self.case.seqlen_q, self.case.seqlen_k))
        return (i[:, None] - j).clamp(-REACH, REACH) + REACH

    @functools.cached_property
    def gates(self) -> tuple[Tensor, Tensor]:
        """Of queries and keys, float32."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        lengths = self.case.seqlen_q, self.case.seqlen_k
        rows, columns = (torch.randn(n, device=self.device, generator=generator) / 2 for n in lengths)
        return rows, columns

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """What gets gradients beside query, key and value."""
        if self.case.option == BIAS_GRADIENT:
            return (self.bias,)
        return (self.table,) if self.case.option == LEARNED else ()

    @functools.cached_property
    def bias(self) -> Tensor:
        """What is added to the scores (1, heads, seqlen_q, seqlen_k), in the case's dtype."""
        case, dtype = self.case, self.case.torch_dtype
        if case.option == "alibi":
            i, j = (torch.arange(n, device=self.device) for n in (case.seqlen_q, case.seqlen_k))
            distance = (i[:, None] - j).abs().to(dtype)
            return -self.slopes.to(dtype)[:, None, None] * distance[None, None]
        if case.option in RELATIVE:
            return self.table[:, self.distances][None]
        shape = 1, case.num_heads, case.seqlen_q, case.seqlen_k
        generator = torch.Generator(self.device).manual_seed(self.seed)
        bias = torch.randn(shape, dtype=dtype, device=self.device, generator=generator)
        return bias.requires_grad_(case.option == BIAS_GRADIENT)

    def tilewise(self) -> dict[str, Any]:
        """Arguments of `tilewise.attention`."""
        match self.case.option:
            case "alibi":
                return {"alibi_slopes": self.slopes}
            case name if name in BIASES:
                return {"bias": self.bias}
            case "softcap":
                return {"softcap": SOFTCAP}
            case "dropout":
                return {"dropout_p": DROPOUT_P}
        return {}

    def flash_attn(self) -> dict[str, Any]:
        """Arguments of flash-attn 2, which has tilewise's names for them."""
        if self.case.option in BIASES:
            raise Refusal("flash-attn takes no bias")
        return self.tilewise()

    def sdpa(self) -> dict[str, Any]:
        """Arguments of PyTorch's function; a bias has the causal mask in it."""
        if self.case.option == "softcap":
            raise Refusal("PyTorch's function has no softcap")
        if self.case.option == "dropout":
            return {"dropout_p": DROPOUT_P, "is_causal": self.case.causal}
        if not self.case.causal:
            return {"attn_mask": self.bias}
        hidden = torch.ones(self.bias.shape[2:], dtype=torch.bool, device=self.device).triu(1)
        return {"attn_mask": self.bias.masked_fill(hidden, float("-inf"))}

    def gate(self, queries: slice = ALL, keys: slice = ALL) -> Callable[..., Tensor]:
        """The score function of GATED, for some queries and keys, whose positions count from their first."""
        rows, columns = self.gates[0][queries], self.gates[1][keys]
        return lambda s, b, h, i, j: s * (1 + rows[i] * columns[j])

    def score_mod(self) -> Callable[..., Tensor] | None:
        """FlexAttention's function."""
        match self.case.option:
            case "dropout":
                raise Refusal("FlexAttention has no dropout")
            case "alibi":
                slopes = self.slopes
                return lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()
            case "bias" | "bias-gradient":
                bias = self.bias[0]
                return lambda s, b, h, i, j: s + bias[h, i, j]
            case "relative" | "learned":
                table = self.table
                return lambda s, b, h, i, j: s + table[h, (i - j).clamp(-REACH, REACH) + REACH]
            case "gated":
                return self.gate()
            case "softcap":
                return lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP)
        return None
