"""Compile the Hopper backward kernels without a GPU, and print what ptxas says of each, as JSON.

    python tests/hopper/compile_backward.py [CASE ...]

The launch code runs unchanged on meta tensors; only the last step, the launch, is replaced by a compilation.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewise.core.plan import Results
from tilewise.core.problem import Options, describe
from tilewise.dispatch import plans
from tilewise.gpu.functions.distances import as_bias
from tilewise.gpu.hopper import plan
from tilewise.gpu.hopper.backward import launch as backward_launch
from tilewise.gpu.hopper.common import functions, host
from tilewise.gpu.hopper.common.functions import as_served

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "gpu_triton"))
from compile_forward import with_distances, with_documents, with_score
from compile_kernels import Case, case_inputs, compiled_rows, print_rows

# name: head sizes of QK and V, dtype, packed, options. Whole: 16 tiles of keys fill the SMs. In dq: with
# its splits
CASES: dict[str, tuple[int, int, torch.dtype, bool, dict[str, Any]]] = {
    "d64": (64, 64, torch.bfloat16, False, {}),
    "d64_whole": (64, 64, torch.bfloat16, False, {}),
    "d128_whole": (128, 128, torch.bfloat16, False, {}),
    "d64_causal": (64, 64, torch.bfloat16, False, {"causal": True}),
    "d128": (128, 128, torch.bfloat16, False, {}),
    "d128_in_dq": (128, 128, torch.bfloat16, False, {}),
    "d128_causal_whole": (128, 128, torch.float16, False, {"causal": True}),
    "d128_causal": (128, 128, torch.float16, False, {"causal": True}),
    "d80": (80, 80, torch.bfloat16, False, {}),
    "d96_window": (96, 96, torch.bfloat16, False, {"window_left": 100, "window_right": 10}),
    "d128_softcap": (128, 128, torch.bfloat16, False, {"softcap": 20.0, "causal": True}),
    "d64_softcap": (64, 40, torch.float16, False, {"softcap": 20.0}),
    "d128_packed": (128, 128, torch.bfloat16, True, {"causal": True}),
    "mask_d64": (64, 64, torch.bfloat16, False, {}),
    "mask_d64_causal": (64, 64, torch.float16, False, {"causal": True}),
    "mask_d128": (128, 128, torch.bfloat16, False, {}),
    "function_d64": (64, 64, torch.bfloat16, False, {"causal": True}),
    "inlined_function_d64": (64, 64, torch.bfloat16, False, {"causal": True}),
    "inlined_function_d128": (128, 128, torch.float16, False, {"causal": True}),
    "mask_d128_window_softcap": (
        128,
        128,
        torch.bfloat16,
        False,
        {"window_left": 100, "window_right": 10, "softcap": 20.0},
    ),
    "dropout_d64": (64, 64, torch.bfloat16, False, {"dropout_p": 0.1}),
    "dropout_d64_softcap": (64, 64, torch.float16, True, {"dropout_p": 0.1, "softcap": 20.0}),
    "dropout_d128_part": (128, 128, torch.bfloat16, False, {"dropout_p": 0.1, "dropout_step": 16}),
    "dropout_d128_causal": (128, 128, torch.bfloat16, False, {"dropout_p": 0.1, "causal": True}),
    "dropout_d128_deterministic": (
        128,
        128,
        torch.bfloat16,
        False,
        {"dropout_p": 0.1, "deterministic": True, "window_left": 99},
    ),
    "alibi_d64": (64, 64, torch.bfloat16, False, {}),
    "alibi_d128_causal": (128, 128, torch.bfloat16, False, {"causal": True}),
    "alibi_mask_dropout_softcap_d128": (
        128,
        128,
        torch.float16,
        False,
        {"causal": True, "softcap": 20.0, "dropout_p": 0.1},
    ),
    "bias_d64": (64, 64, torch.bfloat16, False, {}),
    "bias_d128_causal": (128, 128, torch.bfloat16, False, {"causal": True}),
    "dbias_d64_causal": (64, 64, torch.float16, False, {"causal": True}),  # with the kernel beside
    "dbias_dropout_d128": (128, 128, torch.bfloat16, False, {"dropout_p": 0.1}),
    "bias_of_rows_d64": (64, 64, torch.bfloat16, False, {"causal": True}),
    "bias_mask_dropout_softcap_d128": (
        128,
        128,
        torch.float16,
        False,
        {"causal": True, "softcap": 20.0, "dropout_p": 0.1},
    ),
    "distances_d64_causal": (64, 64, torch.bfloat16, False, {"causal": True}),
    "distances_gradient_d128": (128, 128, torch.float16, False, {"causal": True, "deterministic": True}),
    "distances_dropout_softcap_d128": (128, 128, torch.bfloat16, False, {"softcap": 20.0, "dropout_p": 0.1}),
    "score_d64_causal": (64, 64, torch.bfloat16, False, {"causal": True}),
    "score_d128": (128, 128, torch.float16, False, {}),
    "score_d128_causal": (128, 128, torch.bfloat16, False, {"causal": True}),
    "score_mask_dropout_softcap_d128": (128, 128, torch.bfloat16, False, {"softcap": 20.0, "dropout_p": 0.1}),
    "guarded_score_of_pairs_d128": (128, 128, torch.bfloat16, False, {"causal": True}),
    "mask_dropout_d128": (128, 128, torch.bfloat16, False, {"dropout_p": 0.1}),
    "d128_float32": (128, 128, torch.bfloat16, False, {"causal": True}),
    "d80_float32": (80, 40, torch.float16, True, {"deterministic": True}),
    "d256_float32": (256, 256, torch.bfloat16, False, {"causal": True}),
    "d192_128_float32": (192, 128, torch.bfloat16, False, {"causal": True}),
    "d160": (160, 160, torch.bfloat16, False, {}),
    "d192_causal": (192, 192, torch.float16, True, {"causal": True}),
    "d256": (256, 256, torch.bfloat16, False, {}),
    "d256_128_softcap": (256, 128, torch.bfloat16, False, {"softcap": 20.0}),
    "d192_128": (192, 128, torch.bfloat16, False, {}),
    "d192_128_softcap": (192, 128, torch.bfloat16, False, {"softcap": 20.0, "causal": True}),
    "d192_128_causal": (192, 128, torch.float16, True, {"causal": True}),
    "d64_deterministic": (64, 64, torch.bfloat16, True, {"deterministic": True, "window_left": 9}),
    "d128_deterministic": (128, 128, torch.bfloat16, False, {"deterministic": True, "causal": True}),
}


def compile_case(name: str) -> list[dict[str, Any]]:
    dim, dim_v, dtype, is_packed, options = CASES[name]
    offsets = ("int64",) if dtype == torch.float16 else ()  # both compile
    extras = ("packed", *offsets) if is_packed else tuple(n for n in ("mask", "alibi", "bias") if n in name)
    seqlen_q = 1 << 15 if "in_dq" in name else 512
    inputs = case_inputs(Case(dim, dim_v, dtype, options, extras=extras, kv_heads=2, seqlen_q=seqlen_q))
    if "of_rows" in name:
        inputs = inputs._replace(bias=inputs.bias[:, :, :1])
    out = inputs.query.new_empty((*inputs.query.shape[:-1], dim_v))
    lse = out.new_empty((4, 1024) if is_packed else (2, 4, seqlen_q), dtype=torch.float32)
    asked = Options(**options)
    functions.MOST_BITS = 0 if "inlined" in name else 1 << 29
    backward_launch.backward_config.cache_clear()  # which depends on it
    if "function" in name:
        inputs, asked = with_documents(inputs, asked)
    if "distances" in name:
        inputs, asked = with_distances(inputs, asked)
    if "score" in name:
        inputs, asked = with_score(inputs, asked, "pairs" in name)
    problem = describe(inputs, asked)
    inputs_given = inputs
    inputs = as_bias(problem, inputs, host.transposed_pairs_of_distances)[1]
    problem = replace(as_served(problem), has_wide_results="float32" in name)
    known = Results(out, lse, lse)

    def run() -> None:
        if "dbias" in name or "gradient" in name:
            plans.differentiate(inputs_given, known, out, lse, asked, "hopper", True)
        else:
            plan.backward(problem, inputs, known, out, lse)

    return compiled_rows(name, run, 90, 4 if "whole" in name else 132)


if __name__ == "__main__":
    print_rows(compile_case, CASES, sys.argv[1:])
