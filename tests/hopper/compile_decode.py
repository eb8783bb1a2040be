"""Compile the Hopper decoding kernels for sm_90a without a GPU, and print what ptxas says of them, as JSON.

    python tests/hopper/compile_decode.py [CASE ...]

The launch code runs unchanged on meta tensors; only the last step, the launch, is replaced by a compilation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from tilewise import launch_plan
from tilewise.hopper import launch
from tilewise.problem import Options, describe

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
from compile_kernels import Case, CompileOnlyDriver, case_inputs, report

CAUSAL = {"causal": True}
CASES = {
    "d128": Case(128, 128, options=CAUSAL, extras=("lengths",), seqlen_q=1, heads=8),
    "d128_q8": Case(128, 128, options=CAUSAL, extras=("lengths",), seqlen_q=8, heads=8, kv_heads=2),
    "one_sequence": Case(128, 128, options=CAUSAL, extras=("lengths",), seqlen_q=1, heads=8, batch=1),
    "one_sequence_paged": Case(128, 128, options=CAUSAL, extras=("paged",), seqlen_q=1, heads=8, batch=1),
    "many_sequences": Case(128, 128, options=CAUSAL, extras=("lengths",), seqlen_q=1, batch=256),
    "d64_paged": Case(64, 64, torch.float16, CAUSAL, ("paged",), seqlen_q=1, kv_heads=2),
    "d128_paged": Case(128, 128, options=CAUSAL, extras=("paged",), seqlen_q=2, kv_heads=2),
    "d80_window_softcap_sinks_alibi": Case(
        80,
        72,
        options={"window_left": 128, "window_right": 0, "softcap": 20.0},
        extras=("lengths", "sinks", "alibi"),
        seqlen_q=4,
        heads=6,
        kv_heads=2,
    ),
}


def compile_case(name: str) -> list[dict[str, Any]]:
    case = CASES[name]
    reports: list[dict[str, Any]] = []

    def compile_instead(started: launch_plan.Launch) -> None:
        compiled = started.kernel.warmup(*started.arguments, **started.options(), grid=(1,))
        row = {"case": name, "kernel": started.kernel.__name__, "has_hgmma": "HGMMA" in compiled.asm["sass"]}
        reports.append(row | report(compiled, 90))

    launch_plan.start = compile_instead
    launch.num_sms = lambda index: 132  # type: ignore[assignment]
    inputs = case_inputs(case)
    launch.forward(describe(inputs, Options(**case.options)), inputs)
    return reports


def main() -> None:
    triton.runtime.driver.set_active(CompileOnlyDriver(90))
    for name in sys.argv[1:] or list(CASES):
        for row in compile_case(name):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
