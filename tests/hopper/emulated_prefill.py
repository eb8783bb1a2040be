"""Check the forward kernel on caches on the CPU, by `emulator`: one line a case, fails on the first error.

Rows of a sequence whose length, left padding or pages are wrong are NaN, and `check_errors` raises.
"""

from __future__ import annotations

import itertools
from typing import Any

import emulator
import torch
from emulated_decode import cached, check_reported  # which installs the emulator

from tilewise import reference
from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.forward import launch
from tilewise.gpu.launch import launch_plan

LENGTHS = [300, 0, 1, 517, 130]
# name: queries (of all sequences, or a list: packed), heads, key heads, head sizes, page size, options
CASES: dict[str, tuple[int | list[int], int, int, int, int, int | None, dict[str, Any]]] = {
    "causal": (150, 2, 2, 128, 128, None, {"causal": True}),
    "full_d64": (130, 2, 1, 64, 64, None, {}),
    "long_d64": (300, 3, 1, 64, 64, None, {"lengths": [517, 420]}),
    "few_queries": (20, 8, 2, 64, 64, None, {"causal": True}),
    "one_sequence": (200, 2, 1, 128, 128, None, {"causal": True, "lengths": [700]}),
    "packed": ([100, 5, 0, 129, 1], 2, 2, 128, 128, None, {"causal": True}),
    "packed_grouped": ([40, 3, 1, 129, 0], 8, 2, 64, 64, None, {"causal": True}),
    "d192_128": (140, 2, 2, 192, 128, None, {"causal": True}),
    "wrong_lengths": (140, 2, 1, 64, 64, None, {"lengths": [900, -3, 768], "wrong": {0: None, 1: None}}),
    "wrong_pages": (70, 2, 1, 64, 64, 16, {"causal": True, "wrong": {0: (0, -1), 3: (20, 241)}}),
    "wrong_pages_packed": ([20, 3, 1, 9, 0], 4, 2, 128, 128, 64, {"wrong": {3: (8, 1 << 30)}}),
    "steep": (200, 2, 2, 64, 64, None, {"scale": 8.0}),
    "pages_of_8": (70, 2, 1, 64, 64, 8, {"causal": True}),
    "pages_of_16": ([70, 17, 1, 150, 4], 4, 2, 128, 128, 16, {"causal": True}),
    "pages_of_16_d64": (130, 2, 1, 64, 64, 16, {}),
    "pages_of_16_d256": (70, 2, 2, 256, 256, 16, {}),
    "pages_of_32_d192_128": (130, 2, 2, 192, 128, 32, {"causal": True, "lengths": [700, 333]}),
    "pages_of_64": (140, 2, 1, 128, 128, 64, {"causal": True}),
    "pages_of_128": (140, 2, 1, 128, 128, 128, {"causal": True}),
    "pages_of_256": ([100, 5, 0, 129, 1], 2, 1, 128, 128, 256, {"causal": True}),
    "pages_of_256_d80": (70, 2, 1, 80, 40, 256, {}),
    "window": (150, 2, 1, 128, 128, 16, {"window_left": 70, "window_right": 1}),
    "left_window": (90, 2, 1, 64, 64, 128, {"window_left": 100}),
    "softcap_sinks": (90, 4, 2, 64, 64, 16, {"softcap": 3.0, "causal": True, "sinks": True}),
    "alibi": (140, 4, 2, 64, 64, None, {"alibi": True, "causal": True}),
    "alibi_pages": ([40, 3, 1, 129, 0], 8, 2, 128, 128, 16, {"alibi": True}),
    "left_padding": (150, 2, 2, 128, 128, None, {"causal": True, "leftpad": [77, 0, 1, 500, 3]}),
    "left_padding_long": (300, 3, 1, 64, 64, None, {"lengths": [768, 768], "leftpad": [9, 766]}),
    "left_padding_window": (90, 2, 1, 64, 64, 128, {"window_left": 100, "leftpad": [250, 0, 0, 3, 120]}),
    "left_padding_float16": (150, 2, 1, 64, 64, 64, {
        "float16": True, "lengths": [768, 100], "causal": True, "leftpad": [70, 90],
    }),
    "left_padding_alibi": (140, 4, 2, 64, 64, 64, {"alibi": True, "leftpad": [65, 0, 1, 70, 60]}),
    "left_padding_pages_of_8": (70, 2, 1, 64, 64, 8, {"causal": True, "leftpad": [299, 0, 0, 130, 57]}),
    "left_padding_pages_of_16": ([70, 17, 1, 150, 4], 4, 2, 128, 128, 16, {
        "causal": True, "leftpad": [17, 0, 0, 515, 49],
    }),
    "left_padding_pages_of_256": (70, 2, 1, 128, 128, 256, {"sinks": True, "leftpad": [256, 0, 1, 390, 40]}),
    "wrong_left_padding": (140, 2, 1, 64, 64, None, {
        "leftpad": [301, 0, -1, 516, 64], "wrong": {0: None, 2: None},
    }),
    "wrong_left_padding_in_pages": ([20, 3, 1, 9, 30], 4, 2, 128, 128, 16, {
        "leftpad": [-7, 3, 1, 200, 20], "wrong": {0: None, 1: None, 3: (20, 900)},
    }),
    "by_head": (140, 2, 2, 64, 64, 64, {"causal": True, "by_head": True}),
}  # fmt: skip


def check(name: str) -> float:
    """Largest error of out and lse relative to their largest value."""
    queries, heads, kv_heads, dim, dim_v, page_size, options = CASES[name]
    torch.manual_seed(0)
    options, capacity = dict(options), 768
    by_head = options.pop("by_head", False)
    given, wrong = options.pop("lengths", LENGTHS), options.pop("wrong", {})
    held = [min(max(n, 0), capacity) for n in given]
    batch = len(given)
    own_q = queries if isinstance(queries, list) else [queries] * batch
    ends = [0, *itertools.accumulate(own_q)]
    dtype = torch.float16 if options.pop("float16", False) else torch.bfloat16
    q = torch.randn(ends[-1], heads, dim).to(dtype)
    k, v = (torch.randn(batch, capacity, kv_heads, d).to(dtype) for d in (dim, dim_v))
    leftpad = options.pop("leftpad", None)
    stored, extras = cached([k, v], given, leftpad, page_size)
    for b, place in wrong.items():
        if place is not None:
            extras["page_table"][b, place[0]] = place[1]
    if by_head:
        stored = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in stored]
    if isinstance(queries, list):
        extras["cu_seqlens_q"] = torch.tensor(ends, dtype=torch.int64)
    sinks = {"sinks": torch.randn(heads)} if options.pop("sinks", False) else {}
    slopes = torch.rand(batch, heads) if options.pop("alibi", False) else None
    shaped = q if isinstance(queries, list) else q.view(batch, queries, heads, dim)
    inputs = Inputs(shaped, *stored, **extras, **sinks, alibi_slopes=slopes)
    problem = describe(inputs, Options(**options))
    out, lse = launch.forward(problem, inputs)  # however few the tiles are
    check_reported(bool(wrong))
    out = out.flatten(0, -3)
    if lse.ndim == 3:
        lse = lse.transpose(0, 1).flatten(1)
    visibility, worst = problem.visibility(), 0.0
    starts = leftpad or [0] * batch
    for b, (start, end) in enumerate(itertools.pairwise(ends)):
        if start == end:
            continue
        if b in wrong:
            assert out[start:end].isnan().all() and lse[:, start:end].isnan().all(), f"{name}: sequence {b}"
            continue
        exact_out, exact_lse = reference.attention(
            q[None, start:end], *(t[b : b + 1, starts[b] : held[b]] for t in (k, v)), scale=problem.scale,
            softcap=problem.softcap, window=(visibility.left, visibility.right), **sinks,
            alibi_slopes=None if slopes is None else slopes[b : b + 1],
        )  # fmt: skip
        own_lse = lse[None, :, start:end]
        assert torch.equal(own_lse.isneginf(), exact_lse.isneginf()), name
        seen = exact_lse.isfinite()
        for ours, exact in ((out[None, start:end], exact_out), (own_lse[seen], exact_lse[seen])):
            if exact.numel():
                error = (ours.double() - exact).abs().max() / exact.abs().max().clamp(1e-3)
                assert error == error, f"{name}: NaN in sequence {b}"
                worst = max(worst, error.item())
    return worst


def main() -> None:
    launch_plan.start = lambda launched: emulator.start(launched, 2)
    host.num_sms = lambda index: 2  # type: ignore[assignment]
    launch.MANY_ROWS = 1500  # four warpgroups in the case called long
    host.scheduler_counter = lambda device: torch.zeros(2, dtype=torch.int32)
    for case in emulator.chosen(CASES):
        error = check(case)
        print(f"{case}: {error:.1e}", flush=True)
        assert error < 1e-2, case


if __name__ == "__main__":
    main()
