"""Compile the Hopper decoding kernels for sm_90a without a GPU, and print what ptxas says of them, as JSON.

    python tests/hopper/compile_decode.py [CASE ...]

The launch code runs unchanged on meta tensors; only the last step, the launch, is replaced by a compilation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tilewise.core.problem import Options, describe
from tilewise.gpu.hopper import plan

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu_triton"))
from compile_kernels import Case, case_inputs, compiled_rows, print_rows

CAUSAL = {"causal": True}
CASES = {
    "d128": Case(128, 128, options=CAUSAL, extras=("lengths",), seqlen_q=1, heads=8),
    "d128_q8": Case(128, 128, options=CAUSAL, extras=("lengths",), seqlen_q=8, heads=8, kv_heads=2),
    "one_sequence": Case(128, 128, options=CAUSAL, extras=("lengths",), seqlen_q=1, heads=8, batch=1),
    "one_sequence_paged": Case(128, 128, options=CAUSAL, extras=("paged",), seqlen_q=1, heads=8, batch=1),
    "many_sequences": Case(128, 128, options=CAUSAL, extras=("lengths",), seqlen_q=1, batch=256),
    "d64_paged": Case(64, 64, torch.float16, CAUSAL, ("paged",), seqlen_q=1, kv_heads=2),
    "d128_paged": Case(128, 128, options=CAUSAL, extras=("paged",), seqlen_q=2, kv_heads=2),
    "left_padding": Case(128, 128, options=CAUSAL, extras=("lengths", "leftpad"), seqlen_q=1, heads=8),
    "left_padding_d64_paged": Case(
        64, 64, torch.float16, CAUSAL, ("paged", "leftpad"), seqlen_q=1, kv_heads=2, page_size=64
    ),
    "left_padding_d128_paged": Case(
        128, 128, options=CAUSAL, extras=("paged", "leftpad"), seqlen_q=2, kv_heads=2
    ),
    "8_bits_left_padding": Case(
        128, 128, options=CAUSAL, extras=("paged", "8 bits", "leftpad"), seqlen_q=1, kv_heads=1, page_size=64
    ),
    "8_bits": Case(
        128, 128, options=CAUSAL, extras=("paged", "8 bits"), seqlen_q=1, kv_heads=1, page_size=64
    ),
    "8_bits_d64": Case(
        64, 64, torch.float16, CAUSAL, ("paged", "8 bits"), seqlen_q=4, kv_heads=2, page_size=128
    ),
    "8_bits_small_pages": Case(
        128, 128, options=CAUSAL, extras=("paged", "8 bits"), seqlen_q=1, kv_heads=1, page_size=16
    ),
    "8_bits_many_rows": Case(
        112, 128, options=CAUSAL, extras=("paged", "8 bits"), seqlen_q=5, heads=6, kv_heads=1, page_size=64
    ),
    "8_bits_everything": Case(
        128,
        112,
        options={"window_left": 128, "window_right": 0, "softcap": 20.0},
        extras=("paged", "8 bits", "sinks", "alibi"),
        seqlen_q=2,
        page_size=256,
    ),
    "d80_window_softcap_sinks_alibi": Case(
        80,
        72,
        options={"window_left": 128, "window_right": 0, "softcap": 20.0},
        extras=("lengths", "sinks", "alibi"),
        seqlen_q=4,
        heads=6,
        kv_heads=2,
    ),
    "dense": Case(128, 128, seqlen_q=8, seqlen_k=4096),
    "latent": Case(576, 512, options=CAUSAL, extras=("lengths",), seqlen_q=1, heads=16, kv_heads=1),
    "latent_128_heads": Case(
        576, 512, torch.float16, CAUSAL, ("lengths",), seqlen_q=2, heads=128, kv_heads=1
    ),
    "latent_paged": Case(576, 512, options=CAUSAL, extras=("paged",), seqlen_q=2, heads=16, kv_heads=1),
}


def compile_case(name: str) -> list[dict[str, Any]]:
    inputs = case_inputs(CASES[name])
    if name.startswith("latent"):
        if inputs.page_table is not None:
            inputs = inputs._replace(key=inputs.key.new_empty(64, 64, 1, 576))
        inputs = inputs._replace(value=inputs.key[..., :512])
    problem = describe(inputs, Options(**CASES[name].options))
    return compiled_rows(name, lambda: plan.forward(problem, inputs, residual=not problem.is_cached), 90)


if __name__ == "__main__":
    print_rows(compile_case, CASES, sys.argv[1:])
