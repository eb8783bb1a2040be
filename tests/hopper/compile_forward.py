"""Compile the Hopper forward for sm_90a without a GPU, and print what ptxas says of each case, as JSON.

    python tests/hopper/compile_forward.py [CASE ...]

The launch code runs unchanged on meta tensors; only the last step, the launch, is replaced by a compilation.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewise.core.functions.call import with_functions
from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.functions.distances import as_bias
from tilewise.gpu.hopper import plan
from tilewise.gpu.hopper.common import functions, host
from tilewise.gpu.hopper.common.functions import as_served
from tilewise.gpu.hopper.forward import launch
from tilewise.gpu.hopper.mask import tile_map

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu_triton"))
from compile_kernels import Case, case_inputs, compiled_rows, print_rows

CASES = {
    "d64": Case(64, 64),
    "d64_long": Case(64, 64, heads=32, seqlen_q=4096, seqlen_k=4096),
    "d64_causal": Case(64, 64, options={"causal": True}),
    "d64_causal_long": Case(64, 64, options={"causal": True}, heads=32, seqlen_q=4096, seqlen_k=4096),
    "d64_long_window": Case(
        64, 64, options={"window_left": 4096, "window_right": 0}, heads=32, seqlen_q=8192, seqlen_k=8192
    ),
    "d64_narrow_window": Case(64, 64, options={"window_left": 128, "window_right": 0}),
    "d64_wide_window": Case(
        64, 64, options={"window_left": 511, "window_right": 0}, seqlen_q=4096, seqlen_k=4096
    ),
    "d80": Case(80, 80),
    "d96": Case(96, 96),
    "d112_fp16": Case(112, 112, torch.float16),
    "d128": Case(128, 128),
    "d128_causal": Case(128, 128, options={"causal": True}),
    "d128_float32_out": Case(128, 128, options={"causal": True}),
    "d80_float32_out": Case(80, 80, extras=("packed",)),
    "d160": Case(160, 160),
    "d192": Case(192, 192),
    "d192_128_causal": Case(192, 128, options={"causal": True}),
    "d256": Case(256, 256),
    "d256_128": Case(256, 128),
    "d256_64_causal": Case(256, 64, options={"causal": True}),
    "d256_128_softcap_sinks": Case(256, 128, options={"softcap": 20.0}, extras=("sinks",), kv_heads=2),
    "d256_causal": Case(256, 256, options={"causal": True}),
    "window_softcap_sinks": Case(
        128,
        128,
        options={"window_left": 128, "window_right": 64, "softcap": 20.0},
        extras=("sinks",),
        kv_heads=2,
    ),
    "mask_d64": Case(64, 64, extras=("mask",), kv_heads=2),
    "mask_d64_causal": Case(64, 64, torch.float16, {"causal": True}, ("mask",), heads=32, seqlen_q=4096),
    "mask_d128": Case(128, 128, extras=("mask",), kv_heads=2),
    "function_d64": Case(64, 64, options={"causal": True}),
    "inlined_function_d64_causal": Case(64, 64, options={"causal": True}),
    "inlined_function_d128": Case(128, 128, torch.float16),
    "mask_d128_window_softcap_sinks": Case(
        128, 128, options={"window_left": 600, "window_right": 64, "softcap": 20.0}, extras=("mask", "sinks")
    ),
    "mask_d192_128_causal": Case(192, 128, options={"causal": True}, extras=("mask",)),
    "mask_d256": Case(256, 256, extras=("mask",)),
    "dropout_d64": Case(64, 64, options={"dropout_p": 0.1}),
    "dropout_d64_causal_long": Case(
        64, 64, torch.float16, {"dropout_p": 0.1, "causal": True}, heads=32, seqlen_q=4096, seqlen_k=4096
    ),
    "dropout_d128_causal": Case(128, 128, options={"dropout_p": 0.1, "causal": True}),
    "dropout_d128_part": Case(128, 128, options={"dropout_p": 0.1, "dropout_step": 16}),
    "dropout_d128_mask_softcap": Case(
        128, 128, options={"dropout_p": 0.1, "softcap": 20.0}, extras=("mask", "sinks"), kv_heads=2
    ),
    "dropout_d256_packed": Case(256, 256, options={"dropout_p": 0.1, "causal": True}, extras=("packed",)),
    "alibi_d64_long": Case(64, 64, extras=("alibi",), heads=32, seqlen_q=4096, seqlen_k=4096),
    "alibi_d128_causal": Case(128, 128, torch.float16, {"causal": True}, ("alibi",), kv_heads=2),
    "alibi_d128_dropout_softcap": Case(
        128, 128, options={"dropout_p": 0.1, "softcap": 20.0, "causal": True}, extras=("alibi", "mask")
    ),
    "alibi_d256": Case(256, 256, options={"causal": True}, extras=("alibi", "sinks")),
    "bias_d64": Case(64, 64, extras=("bias",)),
    "bias_d128_causal": Case(128, 128, torch.float16, {"causal": True}, ("bias",)),
    "bias_of_rows_d128": Case(128, 128, extras=("bias",)),
    "bias_d128_dropout_softcap": Case(
        128, 128, options={"dropout_p": 0.1, "softcap": 20.0, "causal": True}, extras=("bias", "mask")
    ),
    "bias_d256": Case(256, 256, options={"causal": True}, extras=("bias", "alibi")),
    "distances_d64_causal": Case(64, 64, options={"causal": True}),
    "distances_d128": Case(128, 128, torch.float16),
    "distances_d128_dropout_softcap": Case(
        128, 128, options={"dropout_p": 0.1, "softcap": 20.0, "causal": True}, extras=("mask",)
    ),
    "distances_d256": Case(256, 256, options={"causal": True}),
    "score_d64_causal": Case(64, 64, torch.float16, {"causal": True}),
    "score_d128": Case(128, 128),
    "score_d128_causal": Case(128, 128, options={"causal": True}, kv_heads=2),
    "score_d128_mask_dropout_softcap": Case(
        128, 128, options={"dropout_p": 0.1, "softcap": 20.0, "causal": True}, extras=("mask", "sinks")
    ),
    "score_d256": Case(256, 256, options={"causal": True}),
    "guarded_score_of_pairs_d128_causal": Case(128, 128, options={"causal": True}),
    "watched_d64_long": Case(64, 64, heads=32, seqlen_q=4096, seqlen_k=4096),
    "watched_max_d64_long": Case(64, 64, heads=32, seqlen_q=4096, seqlen_k=4096),
    "watched_max_d128_causal": Case(128, 128, options={"causal": True}, kv_heads=2),
    "watched_max_d256": Case(256, 256, torch.float16, {"causal": True}),
    "watched_d128_causal": Case(128, 128, options={"causal": True}, kv_heads=2),
    "watched_d128_mask_softcap": Case(128, 128, options={"softcap": 20.0}, extras=("mask", "sinks")),
    "watched_d256": Case(256, 256, torch.float16, {"causal": True}),
    "packed": Case(128, 128, options={"causal": True}, extras=("packed",)),
    "packed_int64": Case(64, 64, extras=("packed", "int64")),
    "cache_d64": Case(64, 64, options={"causal": True}, extras=("lengths",)),
    "cache_d64_long": Case(64, 64, extras=("lengths",), heads=32, seqlen_q=4096, seqlen_k=4096),
    "cache_d128": Case(128, 128, options={"causal": True}, extras=("lengths",)),
    "cache_d128_packed": Case(
        128, 128, options={"causal": True}, extras=("lengths", "packed_queries"), kv_heads=2
    ),
    "cache_d256": Case(256, 256, extras=("lengths",)),
    "pages_of_8_d64": Case(64, 64, torch.float16, {"causal": True}, ("paged",), page_size=8),
    "pages_of_16_d64": Case(64, 64, options={"causal": True}, extras=("paged",), kv_heads=2),
    "pages_of_16_d64_long": Case(64, 64, extras=("paged",), heads=32, seqlen_q=4096),
    "pages_of_256_d64": Case(64, 64, extras=("paged", "packed_queries"), page_size=256),
    "pages_of_16_d128": Case(128, 128, options={"causal": True}, extras=("paged", "packed_queries")),
    "pages_of_64_d128": Case(128, 128, options={"causal": True}, extras=("paged",), page_size=64),
    "pages_of_128_d128": Case(128, 128, options={"causal": True}, extras=("paged",), page_size=128),
    "pages_of_16_window_softcap_sinks": Case(
        128, 128, options={"window_left": 128, "window_right": 0, "softcap": 20.0}, extras=("paged", "sinks")
    ),
    "pages_of_16_d192_128": Case(192, 128, options={"causal": True}, extras=("paged",)),
    "pages_of_16_d256": Case(256, 256, extras=("paged",)),
    "left_padding_d64": Case(64, 64, options={"causal": True}, extras=("lengths", "leftpad")),
    "left_padding_d128": Case(128, 128, options={"causal": True}, extras=("lengths", "leftpad")),
    "left_padding_pages_of_16_d64": Case(
        64, 64, options={"causal": True}, extras=("paged", "leftpad"), kv_heads=2
    ),
    "left_padding_pages_of_16_d128": Case(
        128, 128, options={"causal": True}, extras=("paged", "packed_queries", "leftpad")
    ),
    "left_padding_pages_of_256_window": Case(
        128, 128, options={"window_left": 128, "window_right": 0}, extras=("paged", "leftpad"), page_size=256
    ),
    "left_padding_pages_of_128_d256": Case(256, 256, extras=("paged", "leftpad"), page_size=128),
    "few_queries": Case(128, 128, options={"causal": True}, heads=8, kv_heads=1, seqlen_q=4),
}


def without_numbers(source: Any, is_transposed: bool, warpgroups: int, block_n: int) -> Any:
    """In place of a map by intervals, which meta tensors have no numbers for."""
    rows, columns = source.lengths[::-1] if is_transposed else source.lengths
    rows = -(-rows // (64 * warpgroups))
    states = torch.empty(rows * -(-columns // block_n), dtype=torch.int32, device=source.device)
    return tile_map.Scan(states, None, 1, rows, (0, 0, 1))


tile_map._by_intervals = without_numbers


def with_documents(inputs: Inputs, options: Options) -> tuple[Inputs, Options]:
    """A mask function that reads a tensor, queries and keys in documents."""
    documents = torch.empty(inputs.query.shape[1], dtype=torch.int64, device=inputs.query.device)
    return with_functions(inputs, options, lambda b, h, i, j: documents[i] == documents[j], None)


def with_distances(inputs: Inputs, options: Options) -> tuple[Inputs, Options]:
    """A score function that reads a number for each head and distance."""
    table = torch.empty(inputs.query.shape[2], 65, device=inputs.query.device, requires_grad=True)
    return with_functions(
        inputs, options, None, lambda s, b, h, i, j: s + table[h, (j - i).clamp(-32, 32) + 32]
    )


def with_score(inputs: Inputs, options: Options, of_pairs: bool) -> tuple[Inputs, Options]:
    """A score function that reads numbers of rows and columns, or of both together, and has a slope."""
    (batch, seqlen_q, heads), seqlen_k = inputs.query.shape[:3], inputs.key.shape[1]
    device = inputs.query.device
    rows, columns = torch.empty(heads, seqlen_q, device=device), torch.empty(batch, seqlen_k, device=device)
    table = torch.empty(heads, seqlen_q // 16, 64, device=device)
    index = torch.empty(seqlen_q, seqlen_k, dtype=torch.int32, device=device)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if of_pairs:
            return s + table[h, i // 16, index[i, j]]
        return s * rows[h, i] + torch.where(i - j > 100, columns[b, j], 0.0)

    return with_functions(inputs, options, None, score_mod)


def compile_case(name: str) -> list[dict[str, Any]]:
    inputs = case_inputs(CASES[name])
    options = Options(**CASES[name].options)
    if "of_rows" in name:
        inputs = inputs._replace(bias=inputs.bias[..., :1])
    functions.MOST_BITS = 0 if "inlined" in name else 1 << 29
    launch.forward_config.cache_clear()  # which depends on it
    if "function" in name:
        inputs, options = with_documents(inputs, options)
    if "distances" in name:
        inputs, options = with_distances(inputs, options)
    if "score" in name:
        inputs, options = with_score(inputs, options, "pairs" in name)
    problem = describe(inputs, options)
    inputs = as_bias(problem, inputs, host.pairs_of_distances)[1]
    problem = replace(as_served(problem), has_wide_results="float32_out" in name)
    if "watched" in name:
        statistics = ("max_logit" if "max" in name else "row_max", "entropy")
        return compiled_rows(
            name, lambda: launch.forward(problem, inputs, residual=True, statistics=statistics), 90
        )
    return compiled_rows(name, lambda: plan.forward(problem, inputs, residual=not problem.is_cached), 90)


if __name__ == "__main__":
    print_rows(compile_case, CASES, sys.argv[1:])
