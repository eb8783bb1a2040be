"""Check the 8-bit forward kernel on the CPU, run by `emulator`, on the 8-bit numbers of `tilewise.fp8`.

It must be as near to float64 attention of these numbers as the same maths in PyTorch, whose weights are rounded
to 8 bits as well.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import emulator
import torch

emulator.install()
emulator.TIMEOUT = 20.0

from tilewise import fp8, launch_plan, reference  # noqa: E402
from tilewise.cpu import tiled  # noqa: E402
from tilewise.hopper import fp8_launch, launch  # noqa: E402
from tilewise.problem import AttentionProblem, Inputs, Options, describe  # noqa: E402
from tilewise.testing import compare  # noqa: E402

# name: lengths of queries and keys (lists: packed), heads, key heads, head sizes, options
CASES: dict[str, tuple[Any, Any, int, int, int, int, dict[str, Any]]] = {
    "full": (300, 290, 4, 2, 128, 128, {}),
    "causal": (400, 400, 3, 3, 128, 128, {"causal": True}),
    "causal_d64": (400, 300, 3, 1, 64, 64, {"causal": True}),
    "d80": (150, 150, 2, 2, 80, 80, {}),
    "d192_128": (300, 300, 2, 2, 192, 128, {"causal": True}),
    "d256": (300, 300, 2, 2, 256, 256, {"causal": True}),
    "d256_full": (200, 600, 2, 1, 256, 256, {}),
    "steep": (300, 500, 2, 2, 64, 64, {"scale": 1.0}),
    "values": (300, 500, 2, 2, 64, 64, {"growing": 1.5}),  # blocks of V have other factors
    "more_queries": (300, 70, 2, 1, 64, 64, {"causal": True}),
    "window": (600, 580, 2, 1, 128, 128, {"window_left": 40, "window_right": 10}),
    "left_window": (300, 500, 1, 1, 64, 64, {"window_left": 20}),
    "softcap": (150, 150, 2, 1, 64, 64, {"softcap": 3.0, "causal": True}),
    "sinks": (200, 150, 4, 2, 64, 64, {"sinks": True, "causal": True}),
    "packed": ([100, 0, 70, 1, 200], [130, 20, 0, 7, 300], 2, 1, 64, 64, {}),
    "packed_causal": ([100, 129, 1, 300], [100, 200, 3, 290], 2, 2, 128, 128, {"causal": True}),
}


def stored_keys() -> torch.Tensor:
    """The key of each position of a slot of V^T, from its definition: column 8c + 2t + b is column 4t + 2c + b."""
    keys = torch.arange(fp8.BLOCK_ROWS)
    first, c, t, b = keys // 16 * 16, keys % 16 // 8, keys % 8 // 2, keys % 2
    return torch.empty_like(keys).index_put((first + 4 * t + 2 * c + b,), keys)


def round_tensor(
    problem: AttentionProblem, t: torch.Tensor, cu_seqlens: torch.Tensor | None, is_value: bool
) -> fp8_launch.Rounded:
    """In place of the quantizing kernels: `tilewise.fp8`, put into slots."""
    heads, dim = t.shape[-2:]
    if cu_seqlens is None:
        per_sequence = -(-t.shape[1] // fp8.BLOCK_ROWS)
        sequences = [(t[b], b * per_sequence) for b in range(len(t))]
        slots = len(t) * per_sequence
    else:
        starts = cu_seqlens.tolist()
        sequences = [(t[i:j], i // fp8.BLOCK_ROWS + b) for b, (i, j) in enumerate(itertools.pairwise(starts))]
        slots = len(t) // fp8.BLOCK_ROWS + problem.batch
    width = fp8.padded_dim(dim)
    values = torch.zeros(heads, slots, fp8.BLOCK_ROWS, width).to(fp8.FP8)
    factors = torch.ones(heads, slots)
    for x, slot in sequences:
        x = x.transpose(0, 1).float()
        rounded = fp8.quantize(torch.nn.functional.pad(x, (0, width - dim)) if is_value else fp8.rotate(x))
        count = rounded.factors.shape[-1]
        rows = torch.zeros(heads, count * fp8.BLOCK_ROWS, width)
        rows[:, : x.shape[1]] = rounded.values.float()
        values[:, slot : slot + count] = rows.view(heads, count, fp8.BLOCK_ROWS, width).to(fp8.FP8)
        factors[:, slot : slot + count] = rounded.factors
    if is_value:
        values = values.view(torch.uint8)[:, :, stored_keys()].transpose(2, 3).contiguous().view(fp8.FP8)
    return fp8_launch.Rounded(values, factors)


def check(name: str) -> str:
    """The errors of out and lse."""
    lengths_q, lengths_k, heads, kv_heads, dim, dim_v, options = CASES[name]
    is_packed = isinstance(lengths_q, list)
    lead_q, lead_k = ((sum(n),) if is_packed else (1, n) for n in (lengths_q, lengths_k))
    options = dict(options)
    growing = options.pop("growing", 0.0)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(*lead, h, d).bfloat16()
        for lead, h, d in ((lead_q, heads, dim), (lead_k, kv_heads, dim), (lead_k, kv_heads, dim_v))
    )
    if growing:
        v *= growing ** (torch.arange(lengths_k) // 64 * 2)[None, :, None, None]
    extras: dict[str, torch.Tensor] = {}
    if is_packed:
        for side, lengths in (("q", lengths_q), ("k", lengths_k)):
            extras[f"cu_seqlens_{side}"] = torch.tensor(
                [0, *itertools.accumulate(lengths)], dtype=torch.int32
            )
    if options.pop("sinks", False):
        extras["sinks"] = torch.randn(heads)
    inputs = Inputs(q, k, v, **extras)
    problem = describe(inputs, Options(**options, precision="fp8"))
    found = launch.forward(problem, inputs)
    same_maths = tiled.forward(problem, inputs)
    exact = exact_of_rounded(problem, inputs)
    errors = []
    for part, a, e, b in zip(("out", "lse"), found, exact, same_maths, strict=True):
        assert torch.equal(a.isneginf(), e.isneginf()), name
        report = compare(part, a, e, b)
        errors.append(f"{report}")
        assert report.is_within, f"{name}: {report}"
    return "; ".join(errors)


def exact_of_rounded(problem: AttentionProblem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention of the numbers that the 8-bit ones stand for."""
    tensors = [t.double() for t in inputs[:3]]
    for segment in tiled.segments(problem, inputs):
        rows = [segment.rows_q, segment.rows_k, segment.rows_k]
        views = [t[r].transpose(0, 1) if problem.is_packed else t[0].transpose(0, 1) for t, r in zip(inputs[:3], rows)]
        for n, x in enumerate(fp8.rounded_operands(*views)):
            if n == 0 or n == 1:
                width = x.shape[-1]
                if tensors[n].shape[-1] != width:
                    tensors[n] = torch.zeros(*tensors[n].shape[:-1], width, dtype=torch.float64)
            target = tensors[n][rows[n]] if problem.is_packed else tensors[n][0]
            target.copy_(x.transpose(0, 1))
    visibility = problem.visibility()
    extras = {
        name: getattr(inputs, name)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "sinks")
        if getattr(inputs, name) is not None
    }
    return reference.attention(
        *tensors, scale=problem.scale, window=(visibility.left, visibility.right), softcap=problem.softcap, **extras
    )


def main() -> None:
    launch_plan.start = lambda launched: emulator.start(launched, 2)
    launch.num_sms = lambda index: 2  # type: ignore[assignment]
    launch.scheduler_counter = lambda device: torch.zeros(2, dtype=torch.int32)
    fp8_launch.round_tensor = round_tensor
    for case in sys.argv[1:] or CASES:
        print(f"{case}: {check(case)}", flush=True)


if __name__ == "__main__":
    main()
