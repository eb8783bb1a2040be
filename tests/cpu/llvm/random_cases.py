"""Random attention problems, and what the float64 reference says about them.

`python tests/cpu/llvm/random_cases.py 5000 [first seed [decoding | mixed]]` checks so many cases; the
tests run some.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # as a script: tests share backends.py

from backends import Backend
from tilewise import reference
from tilewise.core.problem import AttentionProblem, Gradients, Inputs, Options, describe, spans
from tilewise.testing import FEW, ErrorReport, compare
from tilewise.tiled import backend as tiled

llvm = Backend("llvm")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEAD_DIMS = (1, 3, 8, 16, 20, 33, 40, 64, 64, 72, 80, 96, 128, 192)
CASES_A_KERNEL = 25
MIXED = 50  # cases of a kind in a row, one time in five of few queries
LENGTHS = (0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 95, 97, 127, 128, 130, 193, 260, 400)


@dataclass(frozen=True)
class Case:
    """One call, and how to say it to the reference, one sequence at a time."""

    seed: int
    inputs: Inputs
    options: Options
    dout: Tensor
    dlse: Tensor

    @property
    def problem(self) -> AttentionProblem:
        return describe(self.inputs, self.options)


def draw(seed: int) -> Case:
    """A random problem: shapes, dtype, memory layout and options.

    What is compiled into a kernel changes every CASES_A_KERNEL seeds, so that a long run tests more than
    it compiles.
    """
    kernel_rng, rng = random.Random(seed // CASES_A_KERNEL), random.Random(seed)
    torch.manual_seed(seed)
    dtype = kernel_rng.choice(DTYPES)
    kv_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4))
    heads, batch = kv_heads * group, rng.choice((1, 1, 2, 3))
    dim = kernel_rng.choice(HEAD_DIMS)
    dim_v = dim if kernel_rng.random() < 0.7 else kernel_rng.choice(HEAD_DIMS)
    softcap = kernel_rng.choice((0.0, 0.0, 0.0, 2.0, 30.0))
    has_mask, has_bias, has_alibi, has_sinks = (kernel_rng.random() < 0.25 for _ in range(4))
    bias_dtype = dtype if kernel_rng.random() < 0.7 else kernel_rng.choice(DTYPES)
    has_dbias, is_paged = kernel_rng.random() < 0.5, kernel_rng.random() < 0.2
    has_dropout = kernel_rng.random() < 0.25
    seqlen_q, seqlen_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
    if rng.random() < 0.4:
        seqlen_k = seqlen_q
    kind = "paged" if is_paged else rng.choice(("dense", "dense", "dense", "packed", "cached"))
    scores: dict[str, Any] = {}
    if kind == "packed":
        lengths = [[rng.choice(LENGTHS[:-4]) for _ in range(batch)] for _ in range(2)]
        inputs = _packed(rng, lengths, heads, kv_heads, dim, dim_v, dtype)
        seqlen_q = int(inputs.cu_seqlens_q.diff().max())
        seqlen_k = int(inputs.cu_seqlens_k.diff().max())
    else:
        q = _tensor(rng, (batch, seqlen_q, heads, dim), dtype)
        k = _tensor(rng, (batch, seqlen_k, kv_heads, dim), dtype)
        v = _tensor(rng, (batch, seqlen_k, kv_heads, dim_v), dtype)
        inputs = Inputs(q, k, v)
        if kind in ("cached", "paged"):
            inputs = _ragged(rng, inputs)
        if kind == "paged" and seqlen_k:
            inputs = _into_pages(rng, inputs)
            seqlen_k = inputs.page_table.shape[1] * inputs.key.shape[1]
    full = (batch, heads, seqlen_q, seqlen_k)
    if has_mask:
        scores["mask"] = torch.rand(_broadcast(rng, full)) < rng.choice((0.2, 0.8))
    if has_bias:
        scores["bias"] = torch.randn(_broadcast(rng, full)).to(bias_dtype)
        scores["bias"].requires_grad_(has_dbias and not is_paged)
    if has_alibi:
        scores["alibi_slopes"] = torch.rand((heads,) if rng.random() < 0.5 else (batch, heads)) * 0.3
    if has_sinks:
        scores["sinks"] = torch.randn(heads).to(dtype)
    options = Options(
        causal=rng.random() < 0.4,
        window_left=rng.choice((None, None, None, 0, 5, 40, 200)),
        window_right=rng.choice((None, None, None, 0, 3, 50)),
        softcap=softcap,
        scale=rng.choice((None, None, 0.3)),
        dropout_p=rng.choice((0.1, 0.5, 0.9)) if has_dropout else 0.0,
    )
    if has_dropout:
        scores["dropout_seed"] = torch.randint(2**63 - 1, ())
    inputs = inputs._replace(**scores)
    rows = inputs.query.shape[:-1]
    dout = _tensor(rng, (*rows, dim_v), dtype)
    lse_shape = (heads, rows[0]) if kind == "packed" else (batch, heads, rows[1])
    dlse = torch.randn(lse_shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return Case(seed, inputs, options, dout, dlse)


def draw_decoding(seed: int) -> Case:
    """A random problem of few queries, for which the decoding kernels are meant."""
    kernel_rng, rng = random.Random(seed // 10), random.Random(seed)
    torch.manual_seed(seed)
    dtype, dim = kernel_rng.choice(DTYPES), kernel_rng.choice((*HEAD_DIMS, 128, 256, 576))
    dim_v = dim if kernel_rng.random() < 0.6 else kernel_rng.choice(HEAD_DIMS)
    group = kernel_rng.choice((1, 2, 4, 4, 8))
    seqlen_q = kernel_rng.choice([n for n in range(1, 17) if n * group <= 32])
    parts_rng = random.Random(f"parts {seed // 10}")
    if parts_rng.random() < 0.25:  # more rows, forward in parts
        group, seqlen_q = parts_rng.choice(((37, 1), (71, 1), (16, 3), (9, 5), (13, 6), (8, 12), (16, 8)))
    softcap = kernel_rng.choice((0.0, 0.0, 0.0, 2.0, 30.0))
    has_alibi, has_sinks, is_paged = (kernel_rng.random() < 0.25 for _ in range(3))
    kv_heads, batch = rng.choice((1, 1, 2, 3, 8)), rng.choice((1, 1, 2, 3))
    heads, seqlen_k = kv_heads * group, rng.choice((*LENGTHS, 700, 1100, 2100, 2500))
    q = _tensor(rng, (batch, seqlen_q, heads, dim), dtype)
    k = _tensor(rng, (batch, seqlen_k, kv_heads, dim), dtype)
    inputs = Inputs(q, k, _tensor(rng, (batch, seqlen_k, kv_heads, dim_v), dtype))
    packed_rng = random.Random(f"side by side {seed}")
    if is_paged or rng.random() < 0.5:
        inputs = _ragged(rng, inputs)
    elif packed_rng.random() < 0.4:
        lengths = [[packed_rng.randint(0, n) for _ in range(batch)] for n in (seqlen_q, seqlen_k)]
        inputs = _packed(packed_rng, lengths, heads, kv_heads, dim, dim_v, dtype)
    if is_paged and seqlen_k:
        inputs = _into_pages(rng, inputs)
    if has_alibi:
        slopes = torch.rand((heads,) if rng.random() < 0.5 else (batch, heads)) * 0.3
        inputs = inputs._replace(alibi_slopes=slopes)
    if has_sinks:
        inputs = inputs._replace(sinks=torch.randn(heads).to(dtype))
    pages = inputs.page_table
    capacity = seqlen_k if pages is None else pages.shape[1] * inputs.key.shape[1]
    inputs = _with_mask_or_bias(seed, inputs, (batch, heads, seqlen_q, capacity))
    options = Options(
        causal=rng.random() < 0.6,
        window_left=rng.choice((None, None, None, 0, 5, 40, 200)),
        window_right=rng.choice((None, None, 0, 3, 50)),
        softcap=softcap,
        scale=rng.choice((None, None, 0.3)),
    )
    rows = inputs.query.shape[:-1]
    dout = _tensor(rng, (*rows, dim_v), dtype)
    lse_shape = (heads, rows[0]) if inputs.cu_seqlens_q is not None else (batch, heads, seqlen_q)
    dlse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(seed, inputs, options, dout, torch.randn(lse_shape, dtype=dlse_dtype))


def _with_mask_or_bias(seed: int, inputs: Inputs, full: tuple[int, ...]) -> Inputs:
    """Sometimes."""
    kernel_rng, rng = random.Random(f"options {seed // 10}"), random.Random(f"options {seed}")
    if kernel_rng.random() < 0.3:
        is_shown = torch.rand(_broadcast(rng, full)) < rng.choice((0.2, 0.8))
        is_shown[..., : rng.randint(0, full[-1])] = False  # whole blocks, where no dimension is shared
        inputs = inputs._replace(mask=is_shown)
    if kernel_rng.random() < 0.3:
        bias = torch.randn(_broadcast(rng, full)).to(kernel_rng.choice((inputs.query.dtype, *DTYPES)))
        inputs = inputs._replace(bias=bias)
    return inputs


def draw_mixed(seed: int) -> Case:
    """Either, in turns."""
    return draw_decoding(seed) if seed // MIXED % 5 == 4 else draw(seed)


def _ragged(rng: random.Random, inputs: Inputs) -> Inputs:
    """Each sequence with its own number of keys, and sometimes with keys to leave out in front."""
    batch, seqlen_k = inputs.key.shape[:2]
    lengths = torch.tensor([rng.randint(0, seqlen_k) for _ in range(batch)], dtype=torch.int32)
    pads = torch.tensor([rng.randint(0, int(n)) for n in lengths], dtype=torch.int32)
    return inputs._replace(seqlens_k=lengths, leftpad_k=pads if rng.random() < 0.5 else None)


def _tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers, in one of the memory layouts that callers have."""
    how = rng.choice(("dense", "dense", "heads first", "slice"))
    if how == "slice":  # of a wider last dimension, as the parts of a packed projection are
        return torch.randn((*shape[:-1], shape[-1] + 3)).to(dtype)[..., 1 : 1 + shape[-1]]
    if how == "heads first":
        order = [*range(len(shape) - 3), len(shape) - 2, len(shape) - 3]
        return torch.randn([shape[i] for i in order] + [shape[-1]]).to(dtype).transpose(-2, -3)
    return torch.randn(shape).to(dtype)


def _packed(
    rng: random.Random,
    lengths: list[list[int]],
    heads: int,
    kv_heads: int,
    dim: int,
    dim_v: int,
    dtype: torch.dtype,
) -> Inputs:
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in lengths)
    q = _tensor(rng, (int(cu_q[-1]), heads, dim), dtype)
    k = _tensor(rng, (int(cu_k[-1]), kv_heads, dim), dtype)
    v = _tensor(rng, (int(cu_k[-1]), kv_heads, dim_v), dtype)
    return Inputs(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def _into_pages(rng: random.Random, inputs: Inputs) -> Inputs:
    """The same keys and values, scattered over pages."""
    batch, capacity = inputs.key.shape[:2]
    size = rng.choice((1, 6, 16, 128))
    pages = -(-capacity // size)
    table = torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages)
    scattered = []
    for t in (inputs.key, inputs.value):
        padded = torch.full((batch, pages * size, *t.shape[2:]), float("nan"), dtype=t.dtype)
        padded[:, :capacity] = t
        store = torch.empty((batch * pages, size, *t.shape[2:]), dtype=t.dtype)
        store[table.flatten().long()] = padded.view(batch * pages, size, *t.shape[2:])
        scattered.append(store)
    return inputs._replace(key=scattered[0], value=scattered[1], page_table=table)


def _broadcast(rng: random.Random, full: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if rng.random() < 0.35 else n for n in full)


def gathered(inputs: Inputs) -> Inputs:
    """The same call without pages."""
    if inputs.page_table is None:
        return inputs
    rows = [t[inputs.page_table.long()].flatten(1, 2) for t in (inputs.key, inputs.value)]
    return inputs._replace(key=rows[0], value=rows[1], page_table=None)


def expected(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Gradients]:
    """out, lse and gradients by the formula in `dtype`, sequence by sequence."""
    inputs, options = gathered(case.inputs), case.options
    is_packed = inputs.cu_seqlens_q is not None
    q, k, v = inputs.query, inputs.key, inputs.value
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    lse = torch.zeros(case.dlse.shape, dtype=dtype)
    dq, dk, dv = (torch.zeros(t.shape, dtype=dtype) for t in (q, k, v))
    dbias = None if inputs.bias is None else torch.zeros(inputs.bias.shape, dtype=dtype)
    dsinks = None if inputs.sinks is None else torch.zeros(inputs.sinks.shape, dtype=dtype)
    for n, span in enumerate(spans(describe(inputs, options), inputs)):
        rows_q, rows_k = slice(span.q0, span.q1), slice(span.k0, span.k1)

        def part(t: Tensor, rows: slice, n: int = n) -> Tensor:
            return t[None, rows] if is_packed else t[n : n + 1, rows]

        own: dict[str, Any] = {
            "causal": options.causal,
            "window": (options.window_left, options.window_right),
            "softcap": options.softcap,
            "scale": options.scale,
            "sinks": inputs.sinks,
            "dropout_p": options.dropout_p,
            "dropout_seed": inputs.dropout_seed,
            "first_sequence": n,
            "dtype": dtype,
        }
        columns = slice(0, span.k1 - span.k0) if is_packed else rows_k
        cut = (slice(n, n + 1), slice(None), slice(0, span.q1 - span.q0), columns)
        for name in ("mask", "bias"):
            t = getattr(inputs, name)
            own[name] = None if t is None else t.detach()[_own_axes(t, cut)]
        slopes = inputs.alibi_slopes
        own["alibi_slopes"] = slopes if slopes is None or slopes.ndim == 1 else slopes[n : n + 1]
        tensors = part(q, rows_q), part(k, rows_k), part(v, rows_k)
        lse_rows = lse[None, :, rows_q] if is_packed else lse[n : n + 1]
        dlse = case.dlse[None, :, rows_q] if is_packed else case.dlse[n : n + 1]
        part_out, part_lse = reference.attention(*tensors, **own)
        part(out, rows_q)[:], lse_rows[:] = part_out, part_lse
        dlse = dlse.masked_fill(part_lse == float("-inf"), 0.0)
        g = reference.attention_backward(part(case.dout, rows_q), *tensors, dlse=dlse, **own)
        part(dq, rows_q)[:], part(dk, rows_k)[:], part(dv, rows_k)[:] = g.query, g.key, g.value
        if dbias is not None:
            dbias[_own_axes(dbias, cut)] += g.bias
        if dsinks is not None:
            dsinks += g.sinks
    return out, lse, Gradients(dq, dk, dv, dbias, dsinks)


def _own_axes(t: Tensor, cut: tuple[slice, ...]) -> tuple[slice, ...]:
    return tuple(slice(None) if size == 1 else rows for size, rows in zip(t.shape, cut))


def check(case: Case) -> list[str]:
    """What is wrong with this backend's answer; empty when all is within budget.

    The budget is that of `tilewise.testing`: the formula in PyTorch and the input's precision. Where the
    exact gradient nearly cancels, recomputing P from a rounded lse costs more, in any implementation; a
    gradient may then be as far off as that of the same algorithm in PyTorch (`tilewise.tiled.backend`).
    """
    problem, inputs = case.problem, case.inputs
    reason = llvm.supports(problem)
    if reason is not None:
        return [] if "gradient of a bias" in reason and problem.bias_needs_grad else [f"refused: {reason}"]
    inputs = inputs._replace(bias=None if inputs.bias is None else inputs.bias.detach())
    out, lse = llvm.forward(problem, inputs)
    exact, baseline = expected(case, torch.float64), expected(case, inputs.query.dtype)
    reports = [_compare("out", out, exact[0], baseline[0]), _compare("lse", lse, exact[1], baseline[1])]
    if not problem.is_paged:
        names = ["query", "key", "value"] + ["bias"] * problem.bias_needs_grad + ["sinks"] * problem.has_sinks
        # a backward's forward may have another kernel
        out, lse, residual = llvm.results(replace(problem, needs_grad=True), inputs)
        grads = llvm.backward(problem, inputs, out, lse, case.dout, case.dlse, residual)
        triples = [tuple(getattr(g, name) for g in (grads, exact[2], baseline[2])) for name in names]
        gradients = [_compare(f"d{name}", *triple) for name, triple in zip(names, triples)]
        if not all(report.is_within for report in gradients):
            tiles = tiled.backward(problem, inputs, out, lse, case.dout, case.dlse, residual)
            same = [_compare("", t[0], t[1], getattr(tiles, name)) for name, t in zip(names, triples)]
            largest = max(report.max_budget for report in (*gradients, *same))
            gradients = [
                replace(
                    mine,
                    max_budget=largest if _is_few(t[1]) else max(mine.max_budget, other.max_budget),
                    mean_budget=largest if _is_few(t[1]) else max(mine.mean_budget, other.mean_budget),
                )
                for mine, other, t in zip(gradients, same, triples)
            ]
        reports += gradients
    return [f"seed {case.seed}: {report}" for report in reports if not report.is_within]


def _is_few(exact: Tensor) -> bool:
    """Whether so few elements count (rows without keys are 0 on all sides) that a baseline may be lucky."""
    return int(exact.count_nonzero()) < FEW


def _compare(name: str, found: Tensor, exact: Tensor, baseline: Tensor) -> ErrorReport:
    report = compare(name, found, exact, baseline)
    return replace(report, mean_budget=report.max_budget) if _is_few(exact) else report


def check_threads(compute: Callable[[], Sequence[Tensor]], counts: Sequence[int] = (1, 2, 5, 2)) -> None:
    """Any number of threads gives the same bits."""
    before, results = torch.get_num_threads(), []
    try:
        for threads in counts:
            torch.set_num_threads(threads)
            results.append(compute())
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], found, strict=True))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    kind = {"decoding": draw_decoding, "mixed": draw_mixed}.get(sys.argv[-1], draw)
    torch.use_deterministic_algorithms(True)  # fills uninitialized memory with NaN
    failures = 0
    for seed in range(first, first + count):
        for line in check(kind(seed)):
            failures += 1
            print(line, flush=True)
        if (seed - first + 1) % 250 == 0:
            print(f"{seed - first + 1} cases, {failures} failures", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
