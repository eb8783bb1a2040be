"""8-bit attention as peers: what rounds in the call, and what is given tensors in 8 bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import tilewise
from tilewise.core.checks import EIGHT_BIT
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import Refusal
from tilewise.lab.bench.peer import Data, Peer, Prepared, as_is, prepare_call

LIMIT = 0.08  # of the norm of out: of normal numbers it is off by 0.05
QUANTIZED = "-quantized"


class EightBit(Peer):
    """`precision`, with rounding in the timed call or, `is_quantized`, before it."""

    limit = LIMIT

    def __init__(self, precision: str, is_quantized: bool) -> None:
        self.precision, self.is_quantized = precision, is_quantized
        self.name = f"tilewise-{precision}{QUANTIZED if is_quantized else ''}"

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        is_plain = not (case.option or case.mask or case.has_functions)
        if case.kind not in ("dense", "varlen") or case.direction != "forward" or not is_plain:
            raise Refusal("8-bit products are timed in plain dense and packed forwards")
        if case.dtype not in ("bfloat16", "float16"):
            raise Refusal("8-bit products are of float16 and bfloat16 tensors")
        options: dict[str, Any] = {"window": case.window, "causal": case.causal and case.window is None}
        attend_tensors, offsets, lengths = tilewise.attention, (), ()
        if case.kind == "varlen":
            attend_tensors = tilewise.attention_varlen  # type: ignore[assignment]
            offsets, lengths = (data.offsets, data.offsets), (max(case.lengths),) * 2  # type: ignore[assignment]
        if self.is_quantized:
            from tilewise.fp8 import quantize

            given = quantize(data.query, data.key, data.value, *offsets, precision=self.precision)

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attend_tensors(*given, *offsets, *lengths, **options)  # type: ignore[no-any-return]
        else:
            options["precision"] = self.precision

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return attend_tensors(q, k, v, *offsets, *lengths, **options)  # type: ignore[no-any-return]

        return prepare_call(case, (data.query, data.key, data.value), None, attend, as_is)


def eight_bit_peers() -> dict[str, Peer]:
    """By name: they are measured if they are asked for."""
    peers = [EightBit(precision, is_quantized) for precision in EIGHT_BIT for is_quantized in (False, True)]
    return {peer.name: peer for peer in peers}
