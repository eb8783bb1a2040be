"""Check the backward kernels on the CPU, run by `emulator`: a line a case, up to the first error.

The launch code runs unchanged; the small Triton kernels before and after the main one are written out here.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
from typing import Any

import emulator
import torch

emulator.install()

from tilewise import reference
from tilewise.core.dropout import with_origin
from tilewise.core.plan import Results
from tilewise.core.problem import Inputs, Options
from tilewise.gpu.hopper import plan
from tilewise.gpu.hopper.backward import launch as backward_launch, slim as backward_slim
from tilewise.gpu.hopper.backward.arguments import LARGE_LSE, FinishSizes, RowSizes, Splits
from tilewise.gpu.hopper.common import biases, functions, host
from tilewise.gpu.hopper.common.host import LOG2_E
from tilewise.gpu.launch import launch_plan

PROGRAMS = 3  # as many as there are SMs
# name: lengths of queries and keys (lists: packed), heads, key heads, head sizes, options
CASES = {
    "full": (130, 200, 2, 2, 128, 128, {}),
    "causal": (200, 200, 1, 1, 128, 128, {"causal": True}),
    "causal_d64": (300, 260, 2, 1, 64, 64, {"causal": True}),
    "more_keys": (70, 300, 1, 1, 128, 128, {"causal": True}),
    "more_queries": (300, 70, 1, 1, 64, 64, {"causal": True}),
    "window": (300, 280, 1, 1, 128, 128, {"window_left": 40, "window_right": 10}),
    "window_hides_keys": (65, 400, 1, 1, 64, 64, {"window_left": 20, "window_right": 0}),
    "softcap": (150, 150, 2, 1, 64, 64, {"softcap": 3.0, "causal": True}),
    "small_heads": (100, 130, 1, 1, 80, 40, {"causal": True}),
    "deterministic": (200, 300, 1, 1, 128, 128, {"deterministic": True}),
    "deterministic_groups": (300, 260, 3, 1, 64, 64, {"deterministic": True, "causal": True}),
    "deterministic_window": (400, 400, 2, 1, 64, 64, {
        "deterministic": True, "causal": True, "window_left": 90,
    }),
    "deterministic_causal": (260, 420, 2, 1, 128, 128, {"deterministic": True, "causal": True}),
    # most keys seen by no query, worked on before the others, and after them
    "deterministic_unseen": (70, 600, 1, 1, 128, 128, {"deterministic": True, "window_left": 50}),
    "deterministic_unseen_causal": (70, 600, 2, 1, 64, 64, {
        "deterministic": True, "causal": True, "window_left": 20,
    }),
    # the last round's tiles in splits: units that end inside of a tile, with it, and of several tiles
    # all keys equal, and scores so large that a float32 lse has lost the sum
    "large": (130, 200, 2, 2, 128, 128, {"large": 2.0**20, "causal": True}),
    "large_d64": (260, 140, 2, 1, 64, 64, {"large": 2.0**24, "causal": True}),
    "large_window": (200, 200, 1, 1, 64, 64, {"large": 2.0**20, "window_left": 40, "window_right": 10}),
    "large_softcap": (100, 140, 1, 1, 128, 128, {"large": 2.0**26, "softcap": 2.0**22}),
    "large_packed": ([100, 0, 70, 1], [130, 20, 0, 7], 2, 1, 64, 64, {"large": 2.0**20}),
    "large_deterministic": (200, 200, 1, 1, 128, 128, {"large": 2.0**20, "deterministic": True}),
    "large_splits": (700, 500, 2, 2, 64, 64, {"large": 2.0**20}),
    "large_wide": (100, 140, 1, 1, 256, 256, {"large": 2.0**20}),
    "large_slim": (100, 200, 1, 1, 192, 128, {"large": 2.0**20, "causal": True}),
    "splits": (700, 500, 2, 2, 64, 64, {}),
    "splits_of_one_tile": (900, 100, 1, 1, 128, 128, {}),
    "splits_in_dq": (1100, 200, 2, 2, 64, 64, {}),
    "splits_of_groups": (200, 600, 6, 2, 128, 64, {"softcap": 5.0}),
    "splits_of_few_queries": (1, 400, 5, 1, 40, 40, {}),
    # causal, the longest tiles in parts
    "splits_causal": (250, 250, 1, 1, 128, 128, {"causal": True}),
    "splits_causal_groups": (330, 260, 6, 1, 64, 40, {"causal": True}),
    "splits_causal_of_one_tile": (128, 100, 8, 1, 128, 128, {"causal": True, "softcap": 4.0}),
    "splits_of_more_queries": (500, 200, 3, 1, 64, 64, {"window_right": 30}),
    "packed": ([100, 0, 70, 1], [130, 20, 0, 7], 2, 1, 64, 64, {}),
    "packed_causal": ([100, 129, 1], [100, 200, 3], 2, 2, 128, 128, {"causal": True}),
    "wide": (130, 200, 2, 1, 256, 256, {"causal": True}),
    "wide_window": (200, 150, 2, 2, 192, 128, {"window_left": 40, "window_right": 10}),
    "slim_packed": ([100, 0, 170, 1], [130, 20, 0, 7], 2, 1, 192, 128, {"causal": True}),
    "slim_softcap": (100, 270, 2, 2, 160, 100, {"softcap": 3.0, "causal": True}),
    "wide_softcap": (100, 140, 1, 1, 160, 160, {"softcap": 3.0}),
    "wide_packed": ([100, 0, 70, 1], [130, 20, 0, 7], 2, 1, 256, 256, {"causal": True}),
    "packed_deterministic": ([100, 129, 1], [100, 200, 3], 2, 1, 128, 128, {
        "causal": True, "deterministic": True,
    }),
    "mask_random": (200, 150, 4, 2, 128, 128, {"mask": "random"}),
    "mask_padding": (300, 400, 2, 2, 64, 64, {"mask": "padding"}),
    "mask_left_padding_causal": (300, 300, 4, 2, 64, 64, {"mask": "left_padding", "causal": True}),
    "mask_prefix": (300, 300, 2, 2, 128, 128, {"mask": "prefix", "softcap": 3.0}),
    "mask_blocks": (520, 700, 4, 2, 64, 64, {"mask": "blocks"}),
    "mask_blocks_causal": (260, 400, 2, 1, 128, 128, {"mask": "blocks", "causal": True}),
    "mask_blocks_window": (500, 650, 2, 2, 64, 64, {
        "mask": "blocks", "window_left": 200, "window_right": 30,
    }),
    "mask_rows": (300, 200, 2, 2, 64, 40, {"mask": "rows"}),
    "dropout": (130, 200, 2, 2, 128, 128, {"dropout_p": 0.1}),
    "dropout_causal": (300, 260, 2, 1, 64, 64, {"dropout_p": 0.5, "causal": True}),
    "dropout_part": (130, 200, 2, 1, 64, 64, {"dropout_p": 0.3, "dropout_step": 16}),
    "dropout_softcap": (150, 150, 2, 1, 64, 40, {"dropout_p": 0.3, "softcap": 3.0, "window_left": 60}),
    "dropout_splits": (700, 500, 2, 2, 64, 64, {"dropout_p": 0.8}),
    "dropout_packed": ([100, 0, 70, 1], [130, 20, 0, 7], 4, 2, 128, 128, {"dropout_p": 0.4}),
    "dropout_deterministic": (260, 420, 2, 1, 128, 128, {
        "dropout_p": 0.2, "deterministic": True, "causal": True,
    }),
    "alibi": (300, 290, 4, 2, 128, 128, {"alibi": 1}),
    "alibi_causal": (300, 260, 2, 1, 64, 64, {"alibi": 1, "causal": True, "softcap": 3.0}),
    "alibi_packed": ([100, 0, 70, 1], [130, 20, 0, 7], 4, 2, 64, 64, {"alibi": 2, "dropout_p": 0.4}),
    "alibi_splits": (700, 500, 2, 2, 64, 64, {"alibi": 1}),
    "mask_alibi": (300, 300, 4, 2, 64, 64, {"alibi": 1, "mask": "blocks", "causal": True}),
    "bias": (300, 290, 4, 2, 128, 128, {"bias": "full"}),
    "bias_odd_causal": (301, 260, 2, 1, 64, 64, {"bias": "heads", "causal": True}),
    "bias_of_keys": (200, 200, 2, 1, 64, 40, {"bias": "keys", "softcap": 3.0, "alibi": 1}),
    "bias_of_all_queries": (201, 330, 4, 2, 64, 64, {"bias": "all_queries", "causal": True}),
    "bias_of_all_keys": (301, 200, 2, 1, 128, 128, {"bias": "all_keys", "window_left": 90}),
    "bias_of_heads": (130, 140, 2, 2, 64, 64, {"bias": "one"}),
    "bias_hides": (200, 330, 2, 2, 64, 64, {"bias": "hides", "dropout_p": 0.2}),
    "bias_splits": (700, 500, 2, 2, 64, 64, {"bias": "transposed"}),
    "distances": (300, 290, 4, 2, 128, 128, {"distances": True}),
    "distances_causal_d64": (400, 301, 3, 1, 64, 64, {"distances": True, "causal": True}),
    "score": (300, 290, 4, 2, 128, 128, {"score": True}),
    "score_causal_d64": (400, 301, 3, 1, 64, 64, {"score": True, "causal": True}),
    "score_packed": ([100, 0, 70, 200], [130, 20, 0, 300], 4, 1, 128, 128, {"score": True, "causal": True}),
    "score_mask_dropout": (100, 330, 2, 2, 128, 128, {
        "score": True, "mask": "blocks", "softcap": 3.0, "dropout_p": 0.3,
    }),
    "inlined": (300, 450, 4, 2, 128, 128, {"inlined": True}),
    "inlined_causal_d64": (400, 401, 3, 1, 64, 64, {"inlined": True, "causal": True}),
    "inlined_score": (300, 290, 2, 1, 128, 128, {"inlined": True, "score": True, "dropout_p": 0.3}),
    "distances_mask": (100, 330, 2, 2, 128, 128, {"distances": True, "mask": "blocks", "softcap": 3.0}),
    "mask_bias": (300, 300, 4, 2, 128, 128, {"bias": "full", "mask": "blocks", "window_right": 30}),
    "mask_dropout": (300, 300, 4, 2, 64, 64, {"dropout_p": 0.2, "mask": "blocks", "causal": True}),
    "mask_large": (200, 200, 2, 1, 64, 64, {"mask": "blocks", "large": 2.0**20}),
    "mask_nothing": (150, 200, 2, 2, 64, 64, {"mask": "nothing"}),
}  # fmt: skip
# with gradients in float32, too
WIDE = {
    "full", "small_heads", "deterministic_causal", "splits", "splits_in_dq", "splits_causal_groups", "packed",
    "wide", "wide_packed", "slim_packed", "slim_softcap",
}  # fmt: skip


def check(name: str) -> float:
    """Largest error of dq, dk and dv relative to their largest value."""
    lengths_q, lengths_k, heads, kv_heads, dim, dim_v, options = CASES[name]
    options = dict(options)
    large = options.pop("large", 0.0)
    is_packed = isinstance(lengths_q, list)
    lead_q, lead_k = ((sum(n),) if is_packed else (1, n) for n in (lengths_q, lengths_k))
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(*lead, h, d).bfloat16()
        for lead, h, d in (
            (lead_q, heads, dim),
            (lead_k, kv_heads, dim),
            (lead_k, kv_heads, dim_v),
            (lead_q, heads, dim_v),
        )
    )
    if large:  # integers, whose products no sum rounds
        q, k = q.round(), k.round().narrow(-3, 0, 1).expand(k.shape).contiguous()
        options["scale"] = large
    packing = {}
    if is_packed:
        for side, lengths in (("q", lengths_q), ("k", lengths_k)):
            packing[f"cu_seqlens_{side}"] = torch.tensor(
                [0, *itertools.accumulate(lengths)], dtype=torch.int32
            )
    if "mask" in options:
        packing["mask"] = emulator.draw_mask(options.pop("mask"), lengths_q, lengths_k, heads)
    if "bias" in options:
        packing["bias"] = emulator.draw_bias(options.pop("bias"), lengths_q, lengths_k, heads).bfloat16()
    if "alibi" in options:
        rows = (len(lengths_q) if is_packed else 1,) * (options.pop("alibi") - 1)
        packing["alibi_slopes"] = torch.rand(*rows, heads)
    if "dropout_p" in options:
        seed = torch.tensor(2**62 + 4321)
        is_part = "dropout_step" in options
        packing["dropout_seed"] = with_origin(seed, 48, 1 << 20, 13, 9) if is_part else seed
    inputs, mask_mod, score_mod = Inputs(q, k, v, **packing), None, None
    if options.pop("distances", False):
        score_mod, packing["bias"] = emulator.draw_distances(lengths_q, lengths_k, heads)
    if options.pop("score", False):
        score_mod = emulator.draw_score(*(max(n) if is_packed else n for n in (lengths_q, lengths_k)), heads)
    functions.MOST_BITS = 1 << 29
    if options.pop("inlined", False):  # instead of bits
        mask_mod, functions.MOST_BITS = emulator.draw_documents(lengths_q, lengths_k), 0
    problem, inputs = emulator.as_kernels_see(
        inputs, Options(**options), mask_mod, score_mod, host.transposed_pairs_of_distances
    )
    visibility = problem.visibility()
    window = (visibility.left, visibility.right)
    plain = {"window": window, "softcap": problem.softcap, "dropout_p": problem.dropout_p} | packing
    if large:
        plain["scale"] = large
    if "score" in name:
        plain["score_mod"] = score_mod
    if mask_mod is not None:
        plain["mask_mod"] = mask_mod
    if "splits" in name:
        cfg = backward_launch.backward_config(problem)
        division = backward_launch.divide(problem, cfg, PROGRAMS)
        assert division.splits
        assert bool(backward_launch.late_tiles(problem, cfg, division)) == ("in_dq" in name)
    out, lse = reference.attention(q, k, v, **plain)
    high = lse.float()
    residual = torch.where(high.isfinite(), lse - high.double(), 0).float() if large else None
    known = Results(out.bfloat16(), high, residual)
    exact = reference.attention_backward(dout, q, k, v, **plain)
    grads = plan.backward(problem, inputs, known, dout, None)
    error = largest_error(grads, exact, large)
    if name in WIDE:
        wide = plan.backward(dataclasses.replace(problem, has_wide_results=True), inputs, known, dout, None)
        for ours, usual in zip(wide[:3], grads[:3], strict=True):
            assert ours.dtype == torch.float32 and not torch.equal(ours, ours.bfloat16().float()), name
            # dQ may be added in another order
            torch.testing.assert_close(ours, usual.float(), rtol=2**-8, atol=1e-5)
    if large:
        known = known._replace(residual=None)
        assert largest_error(plan.backward(problem, inputs, known, dout, None), exact, large) > 5e-2, name
    return error


def largest_error(found: Any, exact: Any, large: float) -> float:
    """Relative to the largest value of each; that of q nearly cancels where all keys are equal."""
    first = 1 if large else 0
    assert all(a.isfinite().all() for a in found[:3])
    pairs = zip(found[first:3], exact[first:3], strict=True)
    return max(((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in pairs)


def start(launched: launch_plan.Launch) -> None:
    """In place of a launch on a GPU."""
    if launched.kernel in (prepare, finish):
        launched.kernel(*launched.arguments)
    else:
        emulator.start(launched, PROGRAMS)


def prepare(
    out: Any, do: Any, lse: Any, residual: Any, dlse: None, stats: Any, shifts: Any, semaphores: Any,
    cu_seqlens_q: Any, sizes: RowSizes, scale: float, keep: float | None, *constants: Any,
) -> None:  # fmt: skip
    """What attn_bwd_prepare_kernel writes."""
    *_, block, has_large, _ = constants
    tiles_q, num_heads, seqlen_q, *_ = sizes
    delta = (out[0].double() * do[0].double()).sum(-1).transpose(-1, -2) * (keep or 1.0)
    rows_of_stats = stats.shape[1] // block
    rows = torch.zeros(4, stats.shape[0] // (num_heads * tiles_q), num_heads, tiles_q * block).double()
    rows[0] = float("inf")
    lse = torch.where(lse == -float("inf"), float("inf"), lse.double())
    lse = lse if residual is None else lse + residual.double()
    for a, b, tile in sequences(cu_seqlens_q, seqlen_q, block):
        rows[0, ..., tile * block : tile * block + b - a] = lse[..., a:b]
        rows[1, ..., tile * block : tile * block + b - a] = delta[..., a:b]
    rows = rows.view(4, -1, block)
    finite = torch.where(rows[0].isfinite(), rows[0], 0)
    is_large = (finite.abs() > LARGE_LSE).any(-1, keepdim=True) & has_large
    shift = torch.where(is_large, (finite - 133.0 - finite.abs() * 2**-20) / scale, 0).float()
    rows[0] = (rows[0] - scale * shift.double()) * LOG2_E
    rows[2], rows[3] = shift, float("nan")
    if shifts is not None:
        shifts.copy_(shift.flatten())
    stats.copy_(rows[:rows_of_stats].transpose(0, 1).reshape(stats.shape))
    if semaphores is not None:
        semaphores.zero_()


def finish(
    sums: Any, semaphores: Any, first_tile: Any, dq: Any, cu_seqlens_q: Any, scale: float, sizes: FinishSizes,
    dk: Any, dv: Any, splits: Splits, dim: int, dim_v: int, columns: int, block: int, is_early: bool,
    is_evenly_split: bool,
) -> None:  # fmt: skip
    """What attn_bwd_finish_kernel writes, and what it waits for."""
    tiles_q, num_heads, seqlen_q, batch, seqlen_k, group_size, key_tiles, num_tiles, _ = sizes
    slots = num_heads * (batch if cu_seqlens_q is None else 1)
    assert num_tiles == slots * tiles_q
    claims, ends = semaphores[:num_tiles], semaphores[num_tiles:][: slots // group_size]
    key_tiles = key_tiles if first_tile is None else int(first_tile[-1])
    shares = torch.full_like(ends, key_tiles if is_early else 0)
    if splits.sums is not None:
        steps = 0 if is_evenly_split else tiles_q * group_size
        keys = (dk, dv, splits.sums, seqlen_k, splits.border, splits.unit, key_tiles)
        finish_keys(*keys, num_heads // group_size, steps, dim, dim_v, columns, shares)
    assert (ends == shares).all()
    sums.view(len(claims), -1)[claims == 0] = 0  # whoever comes first stores
    parts = in_rows(sums, 64)
    rows = parts.view(-1, 128, 64)
    if block == 64:
        rows = parts.view(-1, 2, 64, 64).transpose(1, 2)
    rows = rows.reshape(-1, num_heads, tiles_q * block, columns).transpose(1, 2) * scale
    starts = sequences(cu_seqlens_q, seqlen_q, block)
    found = torch.cat([rows[:, t * block : t * block + b - a] for a, b, t in starts], 1)[..., :dim]
    dq[0].copy_(found.view(dq[0].shape))


def finish_keys(
    dk: Any, dv: Any, sums: Any, seqlen_k: int, border: int, unit: int, key_tiles: int, kv_heads: int,
    steps: int, dim: int, dim_v: int, columns: int, shares: torch.Tensor,
) -> None:  # fmt: skip
    """dK and dV of shared tiles from their splits: units of steps, or `unit` parts of the first tiles."""
    slots = len(shares)
    sums = sums.view(-1)[: sums.numel() // (256 * columns) * 256 * columns].view(-1, 256 * columns)
    for number in range(border, key_tiles * slots) if steps else range(border):
        slot, tile = divmod(number, key_tiles) if steps else divmod(number, slots)[::-1]
        numbers = list(range(number * unit, number * unit + unit))
        if steps:
            shares[slot] += steps - 1  # a shared tile counts as its steps
            first = (number - border) * steps
            starts = {first, *(s for s in range(first, first + steps) if s % unit == 0)}
            numbers = [start // unit + number - border for start in sorted(starts)]
        parts = in_rows(sums[numbers].sum(0), columns).view(2, 2, 64, columns)  # NaN where nobody stored
        for part, (grad, width) in enumerate(((dk, dim), (dv, dim_v))):
            here = grad[slot // kv_heads, tile * 128 : min(tile * 128 + 128, seqlen_k), slot % kv_heads]
            here.copy_(parts[:, part].reshape(128, columns)[: len(here), :width])


def in_rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Parts [64, columns] of what lies in the order of registers."""
    return x.view(-1, columns // 8, 4, 8, 4, 2, 2).permute(0, 2, 5, 3, 1, 4, 6).reshape(-1, 64, columns)


def sequences(cu_seqlens: torch.Tensor | None, seqlen: int, block: int) -> list[tuple[int, int, int]]:
    """(first row, row after the last, first tile) of each sequence."""
    if cu_seqlens is None:
        return [(0, seqlen, 0)]
    return [(a, b, a // block + n) for n, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist()))]


def main() -> None:
    kernels = types.SimpleNamespace(attn_bwd_prepare_kernel=prepare, attn_bwd_finish_kernel=finish)
    sys.modules["tilewise.gpu.hopper.backward.rows"] = kernels  # type: ignore[assignment]
    functions.helpers = emulator.plain_helpers  # type: ignore[assignment]
    biases.poisoned = emulator.plain(biases.poisoned)
    launch_plan.start = start
    host.num_sms = lambda index: PROGRAMS  # type: ignore[assignment]
    host.scheduler_counter = lambda device, number=0: torch.zeros(2, dtype=torch.int32)
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    for case in emulator.chosen(CASES):
        for holds_next_s in (True, False) if "slim" in case else (True,):
            backward_slim.HOLDS_NEXT_S = holds_next_s
            error = check(case)
            print(f"{case}: {error:.1e}", flush=True)
            assert error < 2e-2, case


if __name__ == "__main__":
    main()
