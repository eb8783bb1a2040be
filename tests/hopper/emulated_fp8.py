"""Check the 8-bit forward kernel on the CPU, run by `emulator`, on the 8-bit numbers of `tilewise.fp8`.

It must be as near to float64 attention of these numbers as the same maths in PyTorch, which rounds weights to
8 bits as well.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import emulator
import torch

emulator.install()
emulator.TIMEOUT = 20.0

from fp8_blocks import exact_of_rounded

from tilewise.core.problem import AttentionProblem, Inputs, Options, describe
from tilewise.core.quantized import KINDS, inputs_of, round_tensor
from tilewise.gpu.hopper import plan
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.fp8 import launch as fp8_launch
from tilewise.gpu.launch import launch_plan
from tilewise.testing import compare
from tilewise.tiled import backend as tiled

# name: lengths of queries and keys (lists: packed), heads, key heads, head sizes, options
CASES: dict[str, tuple[Any, Any, int, int, int, int, dict[str, Any]]] = {
    "full": (300, 290, 4, 2, 128, 128, {}),
    "causal": (400, 400, 3, 3, 128, 128, {"causal": True}),
    "causal_d64": (400, 300, 3, 1, 64, 64, {"causal": True}),
    "d80": (150, 150, 2, 2, 80, 80, {}),
    "d192_128": (300, 300, 2, 2, 192, 128, {"causal": True}),
    "d256": (300, 300, 2, 2, 256, 256, {"causal": True}),
    "d256_full": (200, 600, 2, 1, 256, 256, {}),
    "steep": (300, 500, 2, 2, 64, 64, {"scale": 1.0}),
    "values": (300, 500, 2, 2, 64, 64, {"growing": 1.5}),  # blocks of V have other factors
    "more_queries": (300, 70, 2, 1, 64, 64, {"causal": True}),
    "window": (600, 580, 2, 1, 128, 128, {"window_left": 40, "window_right": 10}),
    "left_window": (300, 500, 1, 1, 64, 64, {"window_left": 20}),
    "softcap": (150, 150, 2, 1, 64, 64, {"softcap": 3.0, "causal": True}),
    "sinks": (200, 150, 4, 2, 64, 64, {"sinks": True, "causal": True}),
    "int8": (300, 290, 4, 2, 128, 128, {"precision": "int8"}),
    "int8_causal": (300, 300, 2, 2, 64, 64, {"causal": True, "precision": "int8", "growing": 1.5}),
    "int8_d256": (200, 300, 2, 1, 256, 256, {"precision": "int8"}),
    "in_blocks": (300, 200, 2, 1, 64, 64, {"causal": True, "in_blocks": True}),  # rounded ahead of the call
    "packed": ([100, 0, 70, 1, 200], [130, 20, 0, 7, 300], 2, 1, 64, 64, {}),
    "packed_causal": ([100, 129, 1, 300], [100, 200, 3, 290], 2, 2, 128, 128, {"causal": True}),
}


def in_blocks(problem: AttentionProblem, inputs: Inputs) -> tuple[AttentionProblem, Inputs]:
    """The same call of tensors that are in 8 bits already."""
    given = inputs_of(*(round_tensor(kind, t) for kind, t in zip(KINDS, inputs[:3])))
    return replace(problem, is_in_blocks=True), given


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def check(name: str) -> str:
    """The errors of out and lse."""
    lengths_q, lengths_k, heads, kv_heads, dim, dim_v, options = CASES[name]
    is_packed = isinstance(lengths_q, list)
    lead_q, lead_k = ((sum(n),) if is_packed else (1, n) for n in (lengths_q, lengths_k))
    options = dict(options)
    growing, is_in_blocks = options.pop("growing", 0.0), options.pop("in_blocks", False)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(*lead, h, d).bfloat16()
        for lead, h, d in ((lead_q, heads, dim), (lead_k, kv_heads, dim), (lead_k, kv_heads, dim_v))
    )
    if growing:
        v *= growing ** (torch.arange(lengths_k) // 64 * 2)[None, :, None, None]
    extras: dict[str, torch.Tensor] = {}
    if is_packed:
        both = [[0, *itertools.accumulate(lengths)] for lengths in (lengths_q, lengths_k)]
        # columns of one tensor, whose numbers do not lie side by side
        extras["cu_seqlens_q"], extras["cu_seqlens_k"] = (
            torch.tensor(both, dtype=torch.int32).T.contiguous().T
        )
    if options.pop("sinks", False):
        extras["sinks"] = torch.randn(heads)
    inputs = Inputs(q, k, v, **extras)
    problem = describe(inputs, Options(**{"precision": "fp8"} | options))
    found = plan.forward(*in_blocks(problem, inputs)) if is_in_blocks else plan.forward(problem, inputs)
    same_maths = tiled.forward(problem, inputs)
    exact = exact_of_rounded(problem, inputs)
    errors = []
    for part, a, e, b in zip(("out", "lse"), found, exact, same_maths, strict=True):
        assert torch.equal(a.isneginf(), e.isneginf()), name
        report = compare(part, a, e, b)
        errors.append(f"{report}")
        assert report.is_within, f"{name}: {report}"
    errors.append(f"of tiled: {rms(found[0] - same_maths[0]) / rms(found[0] - exact[0]):.3f} of the error")
    assert rms(found[0] - same_maths[0]) < 0.05 * rms(found[0] - exact[0]), (
        name
    )  # the same numbers are rounded
    return "; ".join(errors)


def main() -> None:
    launch_plan.start = lambda launched: emulator.start(launched, 2)
    host.num_sms = lambda index: 2  # type: ignore[assignment]
    host.scheduler_counter = lambda device: torch.zeros(2, dtype=torch.int32)
    fp8_launch.round_tensor = lambda problem, *given: round_tensor(*given, problem.precision)
    for case in emulator.chosen(CASES):
        print(f"{case}: {check(case)}", flush=True)


if __name__ == "__main__":
    main()
