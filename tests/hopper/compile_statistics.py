"""Compile the Hopper kernels of the second pass for sm_90a, as `compile_forward`.

python tests/hopper/compile_statistics.py [CASE ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tilewise.core.plan import Results
from tilewise.core.problem import Options, describe
from tilewise.core.statistics import Aux
from tilewise.gpu.hopper.statistics.launch import StatisticsPlan
from tilewise.gpu.triton.plan import redo_top_k

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu_triton"))
from compile_kernels import Case, case_inputs, compiled_rows, print_rows

CASES = {
    "d64": Case(64, 64, kv_heads=2),
    "d96_fp16": Case(96, 96, torch.float16),
    "d128_causal": Case(128, 128, options={"causal": True}),
    "d128_window_softcap": Case(128, 128, options={"window_left": 100, "window_right": 0, "softcap": 20.0}),
    "d192_128_causal": Case(192, 128, options={"causal": True}),
    "d256": Case(256, 256),
    "packed": Case(128, 128, options={"causal": True}, extras=("packed",)),
}


def compile_case(name: str) -> list[dict[str, Any]]:
    inputs = case_inputs(CASES[name])
    problem = describe(inputs, Options(**CASES[name].options))
    rows = inputs.query.shape[:-2]
    shape = (problem.num_heads, *rows) if problem.is_packed else (rows[0], problem.num_heads, rows[1])
    lse = torch.empty(shape, device="meta")
    aux = Aux(column_sum=True, block_sum=0 if problem.is_packed else 256, top_k=8)
    plan = StatisticsPlan(problem, aux, redo_top_k)
    return compiled_rows(name, lambda: plan.run(inputs, Results(None, lse, lse)), 90)


if __name__ == "__main__":
    print_rows(compile_case, CASES, sys.argv[1:])
