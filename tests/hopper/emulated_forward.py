"""Check the forward kernel on the CPU, run by `emulator`: prints one line a case, fails on the first error.

Two programs share all tiles, so that every ring goes round many times: a deadlock is a wait without end.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import emulator
import torch

emulator.install()
emulator.TIMEOUT = 20.0

from tilewise import reference
from tilewise.core.dropout import with_origin
from tilewise.core.problem import AttentionProblem, Inputs, Options
from tilewise.core.statistics import Aux, largest_of_heads
from tilewise.gpu.hopper.common import biases, functions, host
from tilewise.gpu.hopper.forward import kernel, launch
from tilewise.gpu.launch import launch_plan
from tilewise.tiled import backend as tiled, statistics as tiled_statistics

# name: lengths of queries and keys (lists: packed), heads, key heads, head sizes, options
CASES: dict[str, tuple[Any, Any, int, int, int, int, dict[str, Any]]] = {
    "full": (300, 290, 4, 2, 128, 128, {}),
    "causal": (400, 400, 3, 3, 128, 128, {"causal": True}),
    "causal_d64": (400, 300, 3, 1, 64, 64, {"causal": True}),
    "long_d64": (700, 650, 3, 1, 64, 64, {}),
    "long_causal_d64": (2100, 2100, 1, 1, 64, 64, {"causal": True}),
    "long_steep_d64": (800, 700, 2, 2, 64, 64, {"scale": 8.0}),
    "d80": (150, 150, 2, 2, 80, 80, {}),
    "d192_128": (300, 300, 4, 4, 192, 128, {"causal": True}),
    "d192": (300, 200, 4, 4, 192, 192, {}),
    "d256_128": (300, 200, 4, 2, 256, 128, {"softcap": 3.0, "sinks": True}),
    "d256": (300, 300, 5, 5, 256, 256, {"causal": True}),
    "large": (200, 300, 2, 2, 128, 128, {"scale": 3e5, "causal": True}),
    "large_sinks": (200, 300, 2, 1, 64, 64, {"scale": 3e5, "sinks": True}),
    # references that rounding moves by 62 of the headroom of 64: rows of 204, 217, 230 and 243 would vanish
    "large_references": (300, 200, 2, 2, 128, 128, {"scale": 2.0**22, "equal_keys": True}),
    "tiny_scale": (100, 100, 1, 1, 64, 64, {"scale": 1e-38}),
    "steep": (500, 700, 2, 2, 64, 64, {"scale": 4.0}),  # large sums
    "steeper": (500, 400, 2, 2, 64, 64, {"scale": 20.0}),  # sums grow too large: all is done again, exactly
    "steeper_long": (100, 1200, 2, 2, 64, 64, {"scale": 20.0}),  # the maximum is followed from the start
    "steeper_long_causal": (1000, 1000, 1, 1, 64, 64, {"scale": 20.0, "causal": True}),
    "steep_packed": ([100, 0, 70, 200], [130, 20, 0, 300], 2, 1, 128, 128, {"scale": 4.0}),
    # sums that are too large for float16
    "ramp": (700, 700, 1, 1, 64, 64, {"window_left": 300, "window_right": 20, "scale": 1.0, "ramp": 3.0}),
    # references of which the far tile's, which comes first, is large enough: nothing is done again
    "ramp_both_ends": (300, 1300, 2, 1, 128, 128, {"scale": 1.0, "ramp": 0.2}),
    "ramp_both_ends_causal": (1300, 1300, 1, 1, 64, 64, {"scale": 1.0, "ramp": 0.2, "causal": True}),
    "ramp_both_ends_packed": ([100, 0, 1100], [130, 20, 1200], 2, 1, 64, 64, {
        "scale": 1.0, "ramp": 0.15, "causal": True,
    }),
    # sums that are small enough, but not for values that large
    "large_values": (256, 256, 2, 2, 64, 64, {"scale": 1.0, "ramp": 3.0, "largest_value": 2.0**110}),
    # and values so small that what is far below the reference would be lost
    "small_values": (256, 256, 2, 2, 64, 64, {"largest_value": 2.0**-70}),
    "smaller_values": (200, 300, 2, 1, 128, 128, {"largest_value": 2.0**-110, "causal": True}),
    "steep_causal": (500, 500, 5, 5, 128, 128, {"scale": 1.0, "causal": True}),
    "more_queries": (300, 70, 2, 1, 64, 64, {"causal": True}),
    "window": (600, 580, 2, 1, 128, 128, {"window_left": 40, "window_right": 10}),
    "negative": (300, 700, 2, 1, 64, 64, {"negative": True, "causal": True}),  # as all scores are
    "window_d64": (2500, 2500, 1, 1, 64, 64, {"window_left": 100, "window_right": 0}),
    "left_window": (300, 500, 1, 1, 64, 64, {"window_left": 20}),
    "softcap": (150, 150, 2, 1, 64, 64, {"softcap": 3.0, "causal": True}),
    "sinks": (200, 150, 4, 2, 64, 64, {"sinks": True, "causal": True}),
    "few_queries": (5, 400, 8, 2, 128, 128, {"causal": True}),
    "packed": ([100, 0, 70, 1, 200], [130, 20, 0, 7, 300], 2, 1, 64, 64, {}),
    "packed_causal": ([100, 129, 1], [100, 200, 3], 2, 2, 128, 128, {"causal": True}),
    "mask_full": (300, 290, 4, 2, 128, 128, {"mask": "random"}),
    "mask_padding": (300, 400, 2, 2, 128, 128, {"mask": "padding"}),
    "mask_left_padding_causal": (300, 300, 2, 1, 64, 64, {"mask": "left_padding", "causal": True}),
    "mask_prefix": (400, 400, 2, 2, 64, 64, {"mask": "prefix"}),
    "mask_prefix_d256": (300, 300, 2, 2, 256, 256, {"mask": "prefix"}),
    "mask_blocks": (520, 700, 4, 2, 128, 128, {"mask": "blocks"}),
    "mask_blocks_d64": (520, 700, 3, 3, 64, 64, {"mask": "blocks", "causal": True}),
    "mask_blocks_window": (500, 650, 2, 2, 64, 64, {
        "mask": "blocks", "window_left": 200, "window_right": 30,
    }),
    "mask_rows": (300, 200, 2, 2, 128, 128, {"mask": "rows", "sinks": True, "softcap": 3.0}),
    "mask_few_queries": (5, 400, 8, 2, 128, 128, {"mask": "random", "causal": True}),
    "mask_more_queries": (300, 70, 2, 1, 64, 64, {"mask": "blocks", "causal": True}),
    "mask_steep": (500, 700, 2, 2, 64, 64, {"mask": "blocks", "scale": 20.0}),
    "dropout": (300, 290, 4, 2, 128, 128, {"dropout_p": 0.1}),
    "dropout_causal_d64": (400, 300, 3, 1, 64, 64, {"dropout_p": 0.5, "causal": True}),
    "dropout_long_d64": (700, 650, 3, 1, 64, 64, {"dropout_p": 0.8, "sinks": True}),
    "dropout_d256": (300, 200, 4, 2, 256, 128, {"dropout_p": 0.3, "softcap": 3.0}),
    "dropout_part": (200, 290, 2, 1, 64, 64, {"dropout_p": 0.3, "dropout_step": 16}),
    "dropout_packed": ([100, 0, 70, 1, 200], [130, 20, 0, 7, 300], 4, 1, 64, 64, {"dropout_p": 0.4}),
    "dropout_few_queries": (5, 400, 8, 2, 128, 128, {"dropout_p": 0.2, "causal": True}),
    "dropout_steep": (500, 400, 2, 2, 64, 64, {"dropout_p": 0.1, "scale": 20.0}),  # done again
    "alibi": (300, 290, 4, 2, 128, 128, {"alibi": 1}),
    "alibi_causal_d64": (400, 300, 4, 2, 64, 64, {"alibi": 1, "causal": True}),
    "alibi_long_causal_d64": (2100, 2100, 1, 1, 64, 64, {"alibi": 1, "causal": True}),
    "alibi_few_queries": (5, 400, 8, 2, 128, 128, {"alibi": 1, "causal": True, "softcap": 3.0}),
    "alibi_packed": ([100, 0, 70, 1, 200], [130, 20, 0, 7, 300], 4, 1, 64, 64, {"alibi": 2}),
    "mask_alibi_window": (300, 500, 2, 2, 64, 64, {
        "mask": "blocks", "alibi": 1, "window_left": 200, "window_right": 30,
    }),
    "bias": (300, 290, 4, 2, 128, 128, {"bias": "full"}),
    "bias_odd_causal_d64": (400, 301, 3, 1, 64, 64, {"bias": "heads", "causal": True}),
    "bias_of_keys": (300, 200, 2, 1, 64, 64, {"bias": "keys", "softcap": 3.0, "sinks": True}),
    "bias_of_all_queries": (201, 330, 4, 2, 64, 64, {"bias": "all_queries", "causal": True}),
    "bias_of_all_keys": (301, 200, 2, 1, 128, 128, {"bias": "all_keys", "window_left": 90}),
    "bias_of_heads": (130, 140, 2, 2, 64, 64, {"bias": "one", "sinks": True}),
    "bias_hides": (200, 330, 2, 2, 64, 64, {"bias": "hides", "dropout_p": 0.2}),
    "bias_d256": (300, 200, 2, 2, 256, 256, {"bias": "transposed", "alibi": 1}),
    "distances": (300, 290, 4, 2, 128, 128, {"distances": True}),
    "distances_causal_d64": (400, 301, 3, 1, 64, 64, {"distances": True, "causal": True}),
    "distances_one_head": (64, 260, 1, 1, 64, 64, {"distances": True}),
    "distances_few_queries": (5, 400, 8, 2, 128, 128, {"distances": True, "dropout_p": 0.2, "softcap": 3.0}),
    "distances_steep_window": (300, 70, 2, 2, 64, 64, {
        "distances": True, "mask": "blocks", "scale": 20.0, "window_left": 60,
    }),
    "score": (300, 290, 4, 2, 128, 128, {"score": True}),
    "score_causal_d64": (400, 301, 3, 1, 64, 64, {"score": True, "causal": True}),
    "score_packed": ([100, 0, 70, 200], [130, 20, 0, 300], 4, 1, 64, 64, {"score": True, "causal": True}),
    "score_few_queries_many_keys": (5, 1100, 4, 2, 128, 128, {"score": True, "softcap": 3.0}),
    "score_few_queries": (5, 400, 8, 2, 128, 128, {"score": True, "dropout_p": 0.2, "softcap": 3.0}),
    "score_mask_steep_d256": (200, 170, 2, 2, 256, 256, {
        "score": True, "mask": "blocks", "scale": 9.0, "sinks": True,
    }),
    "inlined": (500, 650, 4, 2, 128, 128, {"inlined": True}),
    "inlined_causal_d64": (400, 401, 3, 1, 64, 64, {"inlined": True, "causal": True}),
    "inlined_score": (300, 290, 2, 1, 128, 128, {"inlined": True, "score": True, "window_left": 200}),
    "mask_bias": (300, 500, 2, 2, 128, 128, {"mask": "blocks", "bias": "full", "window_left": 200}),
    "mask_dropout_window": (300, 500, 2, 2, 64, 64, {
        "mask": "blocks", "dropout_p": 0.3, "window_left": 200, "window_right": 30,
    }),
    "mask_nothing": (150, 200, 2, 2, 64, 64, {"mask": "nothing"}),
}  # fmt: skip


# whose forward is asked for statistics of its weights as well
WIDE = {"causal", "d80", "steeper", "few_queries", "packed", "d192_128"}  # with out in float32, too
WATCHED = {
    "full", "causal", "negative", "long_d64", "steeper", "ramp", "steeper_long_causal",
    "large_sinks", "more_queries", "window_d64", "left_window", "softcap", "sinks", "few_queries", "packed",
    "mask_blocks_window", "mask_rows", "mask_steep", "mask_nothing", "d256_128",
}  # fmt: skip


def check_watched(problem: AttentionProblem, inputs: Inputs, expected: tuple[torch.Tensor, ...]) -> float:
    """Largest error of row_max and entropy; max_logit is the largest row_max.

    What else the forward gives is as without row_max, and but for rounding as without the others.
    """
    found = launch.forward(problem, inputs, "bshd", True, ("row_max",))
    assert all(map(torch.equal, found[:3], expected))
    row_max, found = found[3], launch.forward(problem, inputs, "bshd", True, ("row_max", "entropy"))
    assert torch.equal(row_max, found[3])
    assert (found[0] - expected[0]).abs().amax() <= expected[0].abs().amax() * 2**-7
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)
    for statistics in (("max_logit",), ("max_logit", "entropy")):
        max_logit = launch.forward(problem, inputs, "bshd", True, statistics)[3]
        torch.testing.assert_close(max_logit, largest_of_heads(row_max), atol=1e-6, rtol=1e-6)
    query, key = inputs.query, inputs.key
    exact_lse = tiled.forward(*_exact(problem, inputs))[1]
    exact = tiled_statistics.measure(
        *_exact(problem, inputs), exact_lse, None, Aux(row_max=True, entropy=True)
    )
    errors = []
    for a, e in zip(found[3:], exact[:2]):
        assert torch.equal(a.isinf(), e.isinf())
        size = max(1.0, problem.scale * query.abs().amax().item() * key.abs().amax().item())
        errors.append((a.double() - e).masked_fill(e.isinf(), 0.0).abs().amax().item() / size)
    return max(errors)


def check_extremes(problem: AttentionProblem, inputs: Inputs) -> None:
    """A score that is infinite or NaN shows in its head's max_logit, and in no other's."""
    query, key = inputs.query.clone(), inputs.key.clone()
    query[0, 30, 1, 3], query[0, 200, 2], key[0, 100, 2] = math.nan, 1e30, 1e30
    inputs = inputs._replace(query=query, key=key)
    for statistics in (("max_logit",), ("max_logit", "entropy")):
        max_logit = launch.forward(problem, inputs, "bshd", True, statistics)[3]
        assert max_logit.isnan().tolist() == [False, True, False]
        assert max_logit.isinf().tolist() == [False, False, True]


def _exact(problem: AttentionProblem, inputs: Inputs) -> tuple[AttentionProblem, Inputs]:
    names = ("query", "key", "value", "sinks")
    doubled = {name: getattr(inputs, name).double() for name in names if getattr(inputs, name) is not None}
    inputs = inputs._replace(**doubled)
    return dataclasses.replace(problem, dtype=torch.float64), inputs


def check(name: str) -> float:
    """Largest error of out and lse relative to their largest value."""
    lengths_q, lengths_k, heads, kv_heads, dim, dim_v, options = CASES[name]
    is_packed = isinstance(lengths_q, list)
    lead_q, lead_k = ((sum(n),) if is_packed else (1, n) for n in (lengths_q, lengths_k))
    options = dict(options)
    ramp, largest_value = options.pop("ramp", 0.0), options.pop("largest_value", 0.0)
    dtype = torch.float16 if ramp and not largest_value else torch.bfloat16
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(*lead, h, d).to(dtype)
        for lead, h, d in ((lead_q, heads, dim), (lead_k, kv_heads, dim), (lead_k, kv_heads, dim_v))
    )
    if options.pop("equal_keys", False):  # and integers, whose products no sum rounds
        q[..., 0], q[..., 1:], k[...] = torch.randint(200, 250, q.shape[:-1]), 0, 1
    if options.pop("negative", False):
        q, k = q.abs(), -k.abs()
    if ramp:  # scores grow by 8 * ramp from 64 keys to the next, in the order of visits
        visits = torch.arange(k.shape[-3]) // 64
        q[..., 0], k[..., 0] = 8, ramp * (visits.flip(0) if "window_left" in options else visits)[:, None]
        q[..., 1:] *= 0.1
    if largest_value:
        v *= largest_value / v.abs().max()
    extras: dict[str, torch.Tensor] = {}
    if is_packed:
        for side, lengths in (("q", lengths_q), ("k", lengths_k)):
            extras[f"cu_seqlens_{side}"] = torch.tensor(
                [0, *itertools.accumulate(lengths)], dtype=torch.int32
            )
    if options.pop("sinks", False):
        extras["sinks"] = torch.randn(heads)
    if "mask" in options:
        extras["mask"] = emulator.draw_mask(options.pop("mask"), lengths_q, lengths_k, heads)
    if "bias" in options:
        kind = options.pop("bias")
        extras["bias"] = emulator.draw_bias(kind, lengths_q, lengths_k, heads).to(dtype)
    if "alibi" in options:  # one row of slopes, or one for each sequence
        rows = (len(lengths_q) if is_packed else 1,) * (options.pop("alibi") - 1)
        extras["alibi_slopes"] = torch.rand(*rows, heads)
    if "dropout_p" in options:
        seed = torch.tensor(2**62 + 4321)
        is_part = "dropout_step" in options
        extras["dropout_seed"] = with_origin(seed, 48, 1 << 20, 13, 9) if is_part else seed
    inputs, mask_mod, score_mod = Inputs(q, k, v, **extras), None, None
    if options.pop("distances", False):
        score_mod, extras["bias"] = emulator.draw_distances(lengths_q, lengths_k, heads)
    if options.pop("score", False):
        score_mod = emulator.draw_score(*(max(n) if is_packed else n for n in (lengths_q, lengths_k)), heads)
    functions.MOST_BITS = 1 << 29
    if options.pop("inlined", False):  # instead of bits
        mask_mod, functions.MOST_BITS = emulator.draw_documents(lengths_q, lengths_k), 0
    problem, inputs = emulator.as_kernels_see(
        inputs, Options(**options), mask_mod, score_mod, host.pairs_of_distances
    )
    failed.clear()
    out, lse, residual = launch.forward(problem, inputs, residual=True)  # though the tiles be few
    assert name not in (DONE_ONCE if any(failed) else DONE_AGAIN), name
    if name == "causal":
        check_extremes(problem, inputs)
    if name in WIDE:
        has_wide = dataclasses.replace(problem, has_wide_results=True)
        wide, *rest = launch.forward(has_wide, inputs, residual=True)
        assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), out)
        assert all(map(torch.equal, rest, (lse, residual)))
    watched_error = check_watched(problem, inputs, (out, lse, residual)) if name in WATCHED else 0.0
    if "large" in name and "values" not in name:
        assert not torch.equal(residual, torch.zeros_like(residual))
    visibility = problem.visibility()
    exact_out, exact_lse = reference.attention(
        q,
        k,
        v,
        scale=problem.scale,
        window=(visibility.left, visibility.right),
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        mask_mod=mask_mod,
        score_mod=score_mod if "score" in name else None,
        **extras,
    )
    assert torch.equal(lse.isneginf(), exact_lse.isneginf()), name
    seen = exact_lse.isfinite()
    assert (residual[seen].abs() <= lse[seen].abs() * 2.0**-23).all() and not residual[~seen].any(), name
    # to the rounding of products and of the sum
    spread = (problem.scale * (q.abs().amax() * k.abs().amax() * dim).item() * 2**-22) + 2e-6
    assert ((lse.double() + residual - exact_lse)[seen].abs() <= spread).all(), name
    pairs = ((out, exact_out), (lse[seen], exact_lse[seen]))
    errors = [(a.double() - b).abs().amax() / b.abs().amax() for a, b in pairs if b.any()]
    assert seen.any() or not out.any(), name
    return max((error.item() for error in errors), default=0.0) + watched_error


DONE_AGAIN = {"steeper", "ramp"}  # as rows outgrow their reference
DONE_ONCE = {"full", "ramp_both_ends", "ramp_both_ends_causal", "ramp_both_ends_packed"}
failed: list[int] = []  # 1 for each warpgroup's rows of a work tile that failed, else 0


def record_failures(failures: Any) -> Any:
    """The kernel's function, whose findings are kept in `failed`."""

    def recorded(*arguments: Any) -> Any:
        flags = failures(*arguments)
        failed.append(int(flags.max()))
        return flags

    return recorded


def main() -> None:
    functions.helpers = emulator.plain_helpers  # type: ignore[assignment]
    biases.poisoned = emulator.plain(biases.poisoned)
    kernel.failures = record_failures(kernel.failures)
    launch_plan.start = lambda launched: emulator.start(launched, 2)
    host.num_sms = lambda index: 2  # type: ignore[assignment]
    launch.MANY_ROWS = 1500  # four warpgroups in the cases called long
    host.scheduler_counter = lambda device: torch.zeros(2, dtype=torch.int32)
    for case in emulator.chosen(CASES):
        error = check(case)
        print(f"{case}: {error:.1e}", flush=True)
        assert error < 1e-2, case


if __name__ == "__main__":
    main()
