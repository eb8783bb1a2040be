"""Check the decoding kernels on the CPU, run by `emulator`: prints one line a case, fails on the first error.

Workers are few, so that splits end anywhere.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import emulator
import torch

emulator.install()
emulator.TIMEOUT = 20.0
sys.path.insert(0, str(Path(__file__).parents[1]))

from caches import cached, in_8_bits
from tilewise import reference
from tilewise.cache.quantized_pages import LEAST_EXPONENT
from tilewise.core.device_errors import check_errors
from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.decode import (
    launch as decode_launch,
    mla_launch as decode_mla_launch,
    stream_k,
)
from tilewise.gpu.launch import launch_plan

LENGTHS = [300, 0, 1, 517, 64]
LATENT = decode_mla_launch.HEAD_DIMS  # one vector a key, whose first columns are the value
# name: queries, heads, key heads, head sizes, page size, workers, options
CASES: dict[str, tuple[int, int, int, int, int, int | None, int, dict[str, Any]]] = {
    "causal": (1, 8, 2, 128, 128, None, 3, {"causal": True}),
    "many_workers": (1, 2, 1, 128, 128, None, 40, {"causal": True}),
    "one_sequence": (2, 2, 2, 64, 64, None, 3, {"causal": True}),
    "one_worker": (4, 2, 2, 64, 64, None, 1, {"causal": True}),
    "full": (3, 6, 2, 64, 64, None, 5, {}),
    "odd_sizes": (5, 3, 1, 80, 40, None, 4, {"causal": True}),
    "two_row_tiles": (16, 12, 2, 64, 64, None, 5, {"causal": True, "lengths": [300, 517]}),
    "many_queries": (40, 4, 2, 64, 64, 16, 5, {"causal": True}),
    "pages_of_16": (2, 4, 2, 128, 128, 16, 4, {"causal": True}),
    "pages_of_8": (1, 4, 2, 64, 64, 8, 4, {"causal": True}),
    "one_sequence_in_pages": (2, 4, 2, 128, 128, 16, 5, {"causal": True, "lengths": [517]}),
    "one_sequence_in_large_pages": (1, 4, 1, 64, 64, 64, 3, {"window_left": 200, "lengths": [700]}),
    "equal_lengths": (2, 4, 2, 128, 128, 16, 7, {"causal": True, "lengths": [300, 300, 300]}),
    "pages_of_256": (2, 4, 2, 64, 64, 256, 4, {}),
    "8_bits": (1, 8, 2, 128, 128, 64, 3, {"causal": True, "8 bits": True}),
    "8_bits_pages_of_16": (1, 8, 1, 128, 128, 16, 3, {"causal": True, "8 bits": True}),
    "8_bits_large_pages": (3, 8, 2, 128, 128, 256, 7, {"causal": True, "8 bits": True, "size": 1e30}),
    "8_bits_d64": (2, 8, 2, 64, 64, 128, 5, {"window_left": 70, "8 bits": True, "size": 1e-30}),
    "8_bits_d48": (2, 4, 2, 48, 48, 64, 40, {"softcap": 3.0, "sinks": True, "8 bits": True}),
    "8_bits_many_rows": (16, 4, 1, 64, 64, 64, 4, {"causal": True, "8 bits": True}),
    "8_bits_32_heads": (1, 24, 1, 128, 128, 64, 4, {"causal": True, "8 bits": True}),
    "8_bits_alibi": (16, 4, 1, 128, 112, 64, 4, {"alibi": True, "causal": True, "8 bits": True}),
    "8_bits_small_weights": (1, 4, 1, 64, 64, 64, 3, {"8 bits": True, "lengths": [700], "sink": True}),
    "8_bits_least_scale": (2, 4, 1, 64, 64, 16, 1, {"8 bits": True, "least": True}),
    "8_bits_wrong_pages": (1, 4, 1, 64, 64, 64, 9, {"8 bits": True, "wrong": {3: (8, 1 << 30), 4: (0, -1)}}),
    "window": (4, 4, 2, 128, 128, 16, 6, {"window_left": 70, "window_right": 1}),
    "left_window": (1, 2, 2, 64, 64, None, 3, {"window_left": 130}),
    "softcap": (1, 4, 2, 64, 64, None, 3, {"softcap": 3.0, "causal": True}),
    "no_lengths": (2, 4, 2, 64, 64, None, 3, {"dense": True, "causal": True}),
    "sinks": (2, 4, 2, 64, 64, None, 3, {"sinks": True, "causal": True}),
    "alibi": (3, 4, 2, 128, 128, None, 3, {"alibi": True, "causal": True}),
    "alibi_softcap": (3, 4, 1, 64, 64, 64, 3, {"alibi": True, "softcap": 5.0}),
    "left_padding": (2, 4, 2, 128, 128, None, 5, {"causal": True, "leftpad": [77, 0, 1, 500, 3]}),
    "left_padding_one_sequence": (1, 2, 1, 64, 64, None, 3, {"lengths": [700], "leftpad": [130]}),
    "left_padding_window": (4, 4, 2, 64, 64, 16, 6, {
        "window_left": 70, "window_right": 1, "leftpad": [250, 0, 0, 3, 20],
    }),
    "left_padding_alibi": (3, 4, 2, 128, 128, 64, 3, {
        "alibi": True, "sinks": True, "leftpad": [70, 0, 1, 63, 60],
    }),
    "left_padding_pages_of_8": (1, 4, 2, 64, 64, 8, 4, {"leftpad": [299, 0, 0, 130, 57]}),
    "left_padding_pages_of_16": (2, 4, 2, 128, 128, 16, 4, {"causal": True, "leftpad": [17, 0, 0, 515, 49]}),
    "left_padding_pages_of_64": (2, 4, 2, 128, 128, 64, 9, {"leftpad": [120, 0, 1, 513, 5]}),
    "left_padding_pages_of_256": (2, 4, 2, 64, 64, 256, 4, {"causal": True, "leftpad": [256, 0, 1, 390, 40]}),
    "left_padding_8_bits": (1, 8, 2, 128, 128, 64, 3, {"8 bits": True, "leftpad": [77, 0, 1, 515, 9]}),
    "left_padding_8_bits_pages_of_16": (16, 4, 1, 64, 64, 16, 4, {
        "causal": True, "8 bits": True, "leftpad": [31, 0, 0, 130, 50],
    }),
    "wrong_left_padding": (1, 4, 2, 64, 64, None, 3, {
        "leftpad": [301, 0, -1, 516, 64], "wrong": {0: None, 2: None},
    }),
    "wrong_left_padding_in_pages": (2, 4, 2, 128, 128, 16, 5, {
        "leftpad": [-7, 3, 1, 200, 20], "wrong": {0: None, 1: None, 3: (20, 900)},
    }),
    "wrong_lengths": (2, 4, 2, 128, 128, None, 5, {
        "lengths": [300, 769, -1, 517], "wrong": {1: None, 2: None},
    }),
    "wrong_lengths_sinks": (1, 4, 2, 64, 64, 16, 3, {"sinks": True, "lengths": [-9, 99], "wrong": {0: None}}),
    "wrong_pages": (2, 4, 2, 128, 128, 16, 5, {"causal": True, "wrong": {0: (18, -1), 3: (0, 240 + 1)}}),
    "wrong_pages_of_64": (1, 4, 1, 64, 64, 64, 40, {"wrong": {3: (8, 1 << 30), 4: (0, -(1 << 31))}}),
    "latent_wrong": (1, 16, 1, *LATENT, 64, 5, {"wrong": {0: (4, 61), 3: (2, -5)}}),
    "latent_heads_wrong": (1, 96, 1, *LATENT, 64, 5, {
        "lengths": [1, 999, 130], "wrong": {1: None, 2: (2, 37)},
    }),
    "latent": (1, 16, 1, *LATENT, None, 3, {"causal": True}),
    "latent_one_worker": (4, 16, 1, *LATENT, None, 1, {"causal": True, "lengths": [130, 0, 65]}),
    "latent_many_workers": (3, 8, 1, *LATENT, 64, 40, {"causal": True, "lengths": [517, 1]}),
    "latent_head_blocks": (2, 96, 1, *LATENT, 64, 7, {"causal": True, "lengths": [130, 65]}),
    "latent_row_tiles": (5, 16, 1, *LATENT, 256, 4, {"window_left": 100, "lengths": [300, 65]}),
    "latent_sinks": (1, 12, 1, *LATENT, None, 3, {"sinks": True, "softcap": 3.0}),
}  # fmt: skip


def check_reported(is_wrong: bool) -> None:
    """`check_errors` raises if and only if something was wrong."""
    try:
        check_errors()
    except ValueError:
        assert is_wrong
    else:
        assert not is_wrong


def check(name: str) -> float:
    """Largest error of out and lse relative to their largest value."""
    queries, heads, kv_heads, dim, dim_v, page_size, workers, options = CASES[name]
    host.num_sms = lambda index: workers  # type: ignore[assignment]
    torch.manual_seed(0)
    options = dict(options)
    is_dense = options.pop("dense", False)
    capacity = 1100 if is_dense else 768
    all_lengths = [capacity] * 2 if is_dense else options.pop("lengths", LENGTHS)
    has_sink, has_least = options.pop("sink", False), options.pop("least", False)
    wrong, is_8_bit, size = options.pop("wrong", {}), options.pop("8 bits", False), options.pop("size", 1.0)
    batch = len(all_lengths)
    q = torch.randn(batch, queries, heads, dim).bfloat16() * size
    if size != 1:
        options["scale"] = dim**-0.5 / size
    is_latent = (dim, dim_v) == LATENT
    k, v = (torch.randn(batch, capacity, kv_heads, d).bfloat16() for d in (dim, dim_v))
    if is_latent:
        v = k[..., :dim_v]
    if has_sink:  # a first key that has nearly all weight, and no value: the others have 2^-26 each
        q, k, v = torch.ones_like(q), torch.zeros_like(k), torch.full_like(v, 400.0)
        k[:, 0], v[:, 0] = 26 * 0.6931 / dim**0.5, 0.0
    leftpad = options.pop("leftpad", None)
    stored, extras = cached([k, v], all_lengths, leftpad, page_size)
    if is_dense:
        extras = {}
    if is_8_bit:
        powers = [torch.randint(-2, 3, (len(stored[0]), kv_heads)).mul(not has_sink) for _ in stored]
        if has_least:
            powers[1][::3] = LEAST_EXPONENT
        scales = [2.0**n for n in powers]
        stored, (k, v) = in_8_bits(stored, scales, extras["page_table"])
        extras |= {"key_scale": scales[0], "value_scale": scales[1]}
    for b, place in wrong.items():
        if place is not None:
            extras["page_table"][b, place[0]] = place[1]
    if is_latent:
        stored[1] = stored[0][..., :dim_v]
    own: dict[str, torch.Tensor] = {}
    if options.pop("sinks", False):
        own["sinks"] = torch.randn(heads)
    if options.pop("alibi", False):
        own["alibi_slopes"] = torch.rand(batch, heads)
    problem = describe(inputs := Inputs(q, *stored, **extras, **own), Options(**options))
    kernels = decode_mla_launch if is_latent else decode_launch
    assert kernels.supports(problem) is None
    cfg = kernels.KERNELS.config(problem)
    out, lse, residual = decode_launch.forward(kernels.KERNELS, problem, inputs, cfg, residual=True)
    finite = lse.isfinite()
    assert (residual[finite].abs() <= lse[finite].abs() * 2.0**-23).all() and residual[finite].any(), name
    check_reported(bool(wrong))
    visibility = problem.visibility()
    worst = 0.0
    for b, (pad, length) in enumerate(zip(leftpad or [0] * batch, all_lengths)):
        if b in wrong:
            assert out[b].isnan().all() and lse[b].isnan().all(), f"{name}: sequence {b}"
            continue
        mine = own | {n: t[b : b + 1] for n, t in own.items() if t.ndim == 2}
        exact_out, exact_lse = reference.attention(
            q[b : b + 1], k[b : b + 1, pad:length], v[b : b + 1, pad:length], scale=problem.scale,
            softcap=problem.softcap, window=(visibility.left, visibility.right), **mine,
        )  # fmt: skip
        assert torch.equal(lse[b : b + 1].isneginf(), exact_lse.isneginf()), name
        seen = exact_lse.isfinite()
        for ours, exact in ((out[b : b + 1], exact_out), (lse[b : b + 1][seen], exact_lse[seen])):
            if exact.numel():
                worst = max(
                    worst, ((ours.double() - exact).abs().max() / exact.abs().max().clamp(1e-3)).item()
                )
        assert worst == worst, f"{name}: NaN in sequence {b}"
    return worst


def check_quotient() -> float:
    """Largest error of numbers at and around exact quotients."""
    torch.manual_seed(0)
    b = torch.cat([torch.arange(1, 300), torch.randint(1, 1 << 22, (4000,))])[:, None]
    exact = torch.cat([torch.arange(200), torch.randint(0, 1 << 19, (300,))])[None, :]
    a = torch.cat([exact * b, exact * b + b - 1])
    b = torch.cat([b, b])
    a, b = (t.int() for t in torch.broadcast_tensors(torch.where(a < 1 << 31, a, b), b))
    return (stream_k.quotient(a, b) - a // b).abs().max().item()


def main() -> None:
    launch_plan.start = lambda launched: emulator.start(launched, launched.programs)
    for case in emulator.chosen([*CASES, "quotient"]):
        start = time.monotonic()
        error = check_quotient() if case == "quotient" else check(case)
        print(f"{case}: {error:.1e} in {time.monotonic() - start:.1f} s", flush=True)
        assert error < 1e-2, case


if __name__ == "__main__":
    main()
