"""Compile the 8-bit forward and its quantizing kernels for sm_90a without a GPU: see `compile_forward`.

python tests/hopper/compile_fp8.py [CASE ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.hopper import plan

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu_triton"))
from compile_kernels import Case, case_inputs, compiled_rows, print_rows

CASES = {
    "d64": Case(64, 64),
    "d80_fp16": Case(80, 80, torch.float16),
    "d128": Case(128, 128),
    "d128_causal": Case(128, 128, options={"causal": True}),
    "d192_128": Case(192, 128, options={"causal": True}),
    "d256": Case(256, 256),
    "d256_causal": Case(256, 256, options={"causal": True}),
    "window_softcap_sinks": Case(
        128,
        128,
        options={"window_left": 128, "window_right": 64, "softcap": 20.0},
        extras=("sinks",),
        kv_heads=2,
    ),
    "packed": Case(128, 128, options={"causal": True}, extras=("packed",)),
    "packed_d64": Case(64, 64, extras=("packed", "int64")),
    "int8_d64": Case(64, 64, options={"precision": "int8"}),
    "int8_d128_causal": Case(128, 128, options={"causal": True, "precision": "int8"}),
    "int8_d256": Case(256, 256, options={"precision": "int8"}),
    "int8_packed": Case(128, 128, options={"causal": True, "precision": "int8"}, extras=("packed",)),
}


def run(name: str, inputs: Inputs) -> None:
    problem = describe(inputs, Options(**{"precision": "fp8"} | CASES[name].options))
    plan.forward(problem, inputs)


def compile_case(name: str) -> list[dict[str, Any]]:
    return compiled_rows(name, lambda: run(name, case_inputs(CASES[name])), 90)


if __name__ == "__main__":
    print_rows(compile_case, CASES, sys.argv[1:])
