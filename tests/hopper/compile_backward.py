"""Compile the Hopper backward kernels without a GPU, and print what ptxas and the disassembler say, as JSON.

    python tests/hopper/compile_backward.py [CASE ...]

The launch code runs unchanged on meta tensors; only the last step, the launch, is replaced by a compilation.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tilewise import launch_plan
from tilewise.hopper import backward_launch, backward_wide_launch
from tilewise.launch_plan import Launch
from tilewise.problem import Inputs, Options, describe

# name: head sizes of QK and V, dtype, packed, options
CASES: dict[str, tuple[int, int, torch.dtype, bool, dict[str, Any]]] = {
    "d64": (64, 64, torch.bfloat16, False, {}),
    "d64_causal": (64, 64, torch.bfloat16, False, {"causal": True}),
    "d128": (128, 128, torch.bfloat16, False, {}),
    "d128_causal": (128, 128, torch.float16, False, {"causal": True}),
    "d80": (80, 80, torch.bfloat16, False, {}),
    "d96_window": (96, 96, torch.bfloat16, False, {"window_left": 100, "window_right": 10}),
    "d128_softcap": (128, 128, torch.bfloat16, False, {"softcap": 20.0, "causal": True}),
    "d64_softcap": (64, 40, torch.float16, False, {"softcap": 20.0}),
    "d128_packed": (128, 128, torch.bfloat16, True, {"causal": True}),
    "d160": (160, 160, torch.bfloat16, False, {}),
    "d192_causal": (192, 192, torch.float16, True, {"causal": True}),
    "d256": (256, 256, torch.bfloat16, False, {}),
    "d192_128": (192, 128, torch.bfloat16, False, {}),
    "d192_128_softcap": (192, 128, torch.bfloat16, False, {"softcap": 20.0, "causal": True}),
    "d192_128_causal": (192, 128, torch.float16, True, {"causal": True}),
    "d64_deterministic": (64, 64, torch.bfloat16, True, {"deterministic": True, "window_left": 9}),
}


class CompileOnlyDriver:
    """Stands where Triton asks which GPU there is."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_case(name: str) -> list[dict[str, Any]]:
    dim, dim_v, dtype, is_packed, options = CASES[name]
    make = functools.partial(torch.empty, device="meta")
    lead = (1024,) if is_packed else (2, 512)
    offsets = torch.int64 if dtype == torch.float16 else torch.int32  # both compile
    cu_seqlens = make(3, dtype=offsets) if is_packed else None
    query, key = make(*lead, 4, dim, dtype=dtype), make(*lead, 2, dim, dtype=dtype)
    value, out = make(*lead, 2, dim_v, dtype=dtype), make(*lead, 4, dim_v, dtype=dtype)
    inputs = Inputs(query, key, value, cu_seqlens, cu_seqlens)
    lse = make(*((4, 1024) if is_packed else (2, 4, 512)), dtype=torch.float32)
    reports: list[dict[str, Any]] = []

    def compile_instead(launch: Launch) -> None:
        compiled = launch.kernel.warmup(*launch.arguments, grid=(launch.programs,), **launch.options())
        early = {"is_early": launch.launch_pdl, "waits": "griddepcontrol.wait" in compiled.asm["ptx"]}
        reports.append({"case": name, "kernel": launch.kernel.__name__} | early | report(compiled))

    launch_plan.start = compile_instead
    for module in (backward_launch, backward_wide_launch):
        module.num_sms = lambda index: 132
        module.scheduler_counter = lambda device: make(2, dtype=torch.int32)
    problem = describe(inputs, Options(**options))
    backward_launch.backward(problem, inputs, out, lse, out, lse)
    return reports


def report(compiled: Any) -> dict[str, Any]:
    """Registers, spills, shared memory and matrix instructions of a compiled kernel."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        ptxas = get_ptxas(90)
        command = [getattr(ptxas, "path", ptxas), "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "spill_bytes": int(re.search(r"(\d+) bytes spill stores", said)[1]),  # type: ignore[index]
        "shared_bytes": compiled.metadata.shared,
        "serialized": "wgmma.mma_async instructions are serialized" in said,
        "hgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
    }


def main() -> None:
    triton.runtime.driver.set_active(CompileOnlyDriver())
    for name in sys.argv[1:] or CASES:
        for row in compile_case(name):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
