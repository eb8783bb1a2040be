"""The gate before the stopwatch: a peer's numbers against the float64 reference, on a slice.

Of every checked sequence, one KV head with the query heads that share it: the output in blocks of rows
at the start, at the end and at a random place; gradients whole, since each key's gradient is a sum over
all queries. Which rows and heads is drawn anew for every run. Masks are written out here again, so that
the gate does not share an error with the tile arithmetic.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import reference
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.inputs.options import BIASES, DROPOUT_P, GATED, SOFTCAP, CaseOption
from tilewise.lab.bench.inputs.statistics import STATISTICS, formula
from tilewise.lab.bench.peer import Data

# ||out - reference|| / ||reference|| of a slice; standard attention computed in the dtype itself has
# 4e-3 (bfloat16), 6e-4 (float16) and 4e-7 (float32), its gradients a little more.
LIMITS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 1e-2, "float16": 1.5e-3}
GRADIENT_FACTOR = 2.0
ROW_FACTOR = 8.0  # the worst row may be this much worse than the slice
BLOCK = 64  # rows of a checked output block
CHUNK = 512  # rows a reference pass of the gradients
DROPOUT_LIMIT = 0.4  # of the squared distance from outputs without dropout, the mean of hundreds of rows


class Verdict(NamedTuple):
    """`error` and `limit` are of the tensor that came nearest to its limit; `fault` is None if all passed."""

    error: float
    limit: float
    fault: str | None


class _Sequence(NamedTuple):
    """One sequence and one KV head: (rows, heads, dim) views, canonical and of the peer's results."""

    query: Tensor
    key: Tensor
    value: Tensor
    dout: Tensor | None
    mask: Tensor | None  # (seqlen_q, seqlen_k) of a case that has one
    bias: Tensor | None  # (heads, seqlen_q, seqlen_k) of a case that has one, or ALiBi
    option: CaseOption
    results: dict[str, Tensor]


def check(case: Case, data: Data, results: dict[str, Tensor], out_limit: float | None = None) -> Verdict:
    """Compare `results` ("out", and for a backward case "dq", "dk", "dv") with the reference.

    Every result is canonical: (batch, seqlen, heads, dim), or packed (total, heads, dim). `out_limit` is a
    peer's own, None the dtype's.
    """
    names = ["out"] if case.direction == "forward" else ["out", "dq", "dk", "dv"]
    shapes = {"out": (*data.query.shape[:-1], case.head_dim_v), "dq": data.query.shape,
              "dk": data.key.shape, "dv": data.value.shape}  # fmt: skip
    for name in names:
        if results[name].shape != shapes[name]:
            return Verdict(float("inf"), 0.0, f"{name} has shape {tuple(results[name].shape)}")
        if not bool(torch.isfinite(results[name]).all()):
            return Verdict(float("inf"), 0.0, f"{name} holds values that are not finite")
    source = random.Random(data.seed)
    worst = Verdict(0.0, 1.0, None)
    for index in _sequences_to_check(case, source):
        sequence = _slice(case, data, results, index, source.randrange(case.num_kv_heads))
        if case.option == "dropout":
            return _judge_dropout(case, sequence)
        for name, found, exact in _compare(case, sequence, source):
            limit = out_limit or LIMITS[case.dtype]
            limit *= 1 if name == "out" else GRADIENT_FACTOR
            worst = _worse(worst, _judge(name, found, exact, limit, len(sequence.key)))
            if worst.fault is not None:
                return worst
    if any(name in STATISTICS for name in results):
        return _worse(worst, _check_statistics(case, data, results, source.randrange(case.num_heads)))
    return worst


def _worse(a: Verdict, b: Verdict) -> Verdict:
    return b if b.fault is not None or b.error / b.limit > a.error / a.limit else a


def _check_statistics(case: Case, data: Data, results: dict[str, Tensor], head: int) -> Verdict:
    """Of one head of a batch of one: each statistic from float64 weights, made in blocks of rows."""
    query = data.query[0, :, head].double()
    key = data.key[0, :, head // (case.num_heads // case.num_kv_heads)].double()
    parts = []
    for start in range(0, len(query), CHUNK):
        seen = key[: start + CHUNK] if case.causal else key
        s = (query[start : start + CHUNK] @ seen.mT * case.head_dim**-0.5)[None, None]
        if case.causal:
            hidden = torch.ones(s.shape[2:], dtype=torch.bool, device=s.device).triu(start + 1)
            s.masked_fill_(hidden, -torch.inf)
        parts.append(formula(case.statistics, s, torch.softmax(s, -1)))
    worst = Verdict(0.0, 1.0, None)
    for name in parts[0]:
        of_rows = [part[name] for part in parts]
        if name in ("column_sum", "block_sum"):  # of the keys that each block of rows sees
            width = of_rows[-1].shape[-1]
            of_rows = [F.pad(t, (0, width - t.shape[-1])) for t in of_rows]
        exact = _JOINED.get(name, lambda t: torch.cat(t, 2))(of_rows)
        found = results[name].double()
        found = found[head : head + 1] if name == "max_logit" else found[0, head][None, None]
        error, limit = float((found - exact).norm() / exact.norm()), LIMITS[case.dtype]
        fault = None if error <= limit else f"{name} is off by {error:.1e} of its norm, limit {limit:.1e}"
        worst = _worse(worst, Verdict(error, limit, fault))
        if fault is not None:
            break
    return worst


# What blocks of rows make of the whole; else they follow each other.
_JOINED: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "max_logit": lambda t: torch.stack(t).amax(0),
    "column_sum": lambda t: torch.stack(t).sum(0),
}


def _sequences_to_check(case: Case, source: random.Random) -> list[int]:
    if case.kind == "varlen":
        by_length = sorted(range(len(case.lengths)), key=lambda n: case.lengths[n])
        return [by_length[0], by_length[-1], source.randrange(len(case.lengths))]
    if case.direction == "forward":
        return sorted({case.batch - 1, source.randrange(case.batch)})
    return [source.randrange(case.batch)]


def _slice(case: Case, data: Data, results: dict[str, Tensor], index: int, kv_head: int) -> _Sequence:
    group = case.num_heads // case.num_kv_heads
    heads_q, heads_k = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
    start = sum(case.lengths[:index])

    def cut(t: Tensor, heads: slice) -> Tensor:
        rows = t[start : start + case.lengths[index]] if case.kind == "varlen" else t[index]
        return rows[:, heads]

    return _Sequence(
        cut(data.query, heads_q),
        cut(data.key, heads_k),
        cut(data.value, heads_k),
        None if data.dout is None else cut(data.dout, heads_q),
        _rows_of_mask(case, data, index),
        data.option.bias[0, heads_q].detach() if case.option in ("alibi", *BIASES) else None,
        data.option,
        {
            name: cut(t, heads_k if name in ("dk", "dv") else heads_q)
            for name, t in results.items()
            if name not in STATISTICS
        },
    )


def _rows_of_mask(case: Case, data: Data, index: int) -> Tensor | None:
    if not case.mask or data.mask is None:
        return None
    return data.mask.expand(case.batch, 1, case.seqlen_q, -1)[index, 0]


def _compare(case: Case, s: _Sequence, source: random.Random) -> list[tuple[str, Tensor, Tensor]]:
    """(name, found, exact) for every result of one sequence."""
    pairs = []
    length = len(s.query)
    for start in sorted({0, max(0, length - BLOCK), source.randrange(max(1, length - BLOCK + 1))}):
        rows = slice(start, min(start + BLOCK, length))
        keys, options = _visible(case, s, rows)
        found, inputs = s.results["out"][rows], (s.query[None, rows], s.key[None, keys], s.value[None, keys])
        pairs.append(("out", found, reference.attention(*inputs, **options)[0][0]))
    if s.dout is None:
        return pairs
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in s[:3])
    for start in range(0, length, CHUNK):
        rows = slice(start, min(start + CHUNK, length))
        keys, options = _visible(case, s, rows)
        inputs = (s.query[None, rows], s.key[None, keys], s.value[None, keys])
        gradients = reference.attention_backward(s.dout[None, rows], *inputs, **options)
        dq[rows] = gradients.query[0]
        dk[keys] += gradients.key[0]
        dv[keys] += gradients.value[0]
    return [*pairs, *((name, s.results[name], t) for name, t in (("dq", dq), ("dk", dk), ("dv", dv)))]


def _judge_dropout(case: Case, s: _Sequence) -> Verdict:
    """Masks differ from peer to peer: outputs lie about as far from those without dropout as they should.

    A weight P that is dropped with probability p, or divided by 1 - p, has the variance P² p / (1 - p).
    Gradients are not looked at.
    """
    rows = slice(max(0, len(s.query) - CHUNK), len(s.query))
    keys, options = _visible(case, s, rows)
    query, key, value = (t.double().transpose(0, 1) for t in (s.query[rows], s.key[keys], s.value[keys]))
    scores = query @ key.mT * query.shape[-1] ** -0.5  # (query heads, rows, keys)
    if options["mask"] is not None:
        scores = scores.masked_fill(~options["mask"][0], float("-inf"))
    weights = torch.softmax(scores, -1)
    expected = weights.square() @ value.square().sum(-1, keepdim=True) * (DROPOUT_P / (1 - DROPOUT_P))
    found = (s.results["out"][rows].double().transpose(0, 1) - weights @ value).square().sum(-1, keepdim=True)
    error = abs(float((found / expected).mean()) - 1)
    fault = None if error <= DROPOUT_LIMIT else f"dropout moves out by {error + 1:.2f} times what it should"
    return Verdict(error, DROPOUT_LIMIT, fault)


def _visible(case: Case, s: _Sequence, rows: slice) -> tuple[slice, dict[str, Any]]:
    """The keys that the rows can see, and the reference's options for them."""
    keys, mask = _visible_keys(case, s, rows)
    bias = None if s.bias is None else s.bias[None, :, rows, keys].double()
    softcap = SOFTCAP if case.option == "softcap" else 0.0
    score_mod = s.option.gate(rows, keys) if case.option == GATED else None
    return keys, {"mask": mask, "bias": bias, "softcap": softcap, "score_mod": score_mod}


def _visible_keys(case: Case, s: _Sequence, rows: slice) -> tuple[slice, Tensor | None]:
    """The keys, and the mask among them (1, 1, rows, keys) or None."""
    seqlen_q, seqlen_k, device = len(s.query), len(s.key), s.query.device
    if s.mask is not None:
        return slice(0, seqlen_k), s.mask[None, None, rows]
    left, right = case.window if case.window is not None else (seqlen_k, 0 if case.causal else seqlen_k)
    offset = seqlen_k - seqlen_q
    first = max(0, rows.start + offset - left)
    last = max(first + 1, min(seqlen_k, rows.stop + offset + right))
    distance = (
        torch.arange(first, last, device=device)[None, :]
        - torch.arange(rows.start, rows.stop, device=device)[:, None]
        - offset
    )
    visible = (distance >= -left) & (distance <= right)
    return slice(first, last), None if bool(visible.all()) else visible[None, None]


def _judge(name: str, found: Tensor, exact: Tensor, limit: float, seqlen_k: int) -> Verdict:
    """Normal inputs give outputs and gradients of about 1 / sqrt(keys); where the exact values are far
    smaller (a query with one key has no gradient), errors are measured against a tenth of that."""
    difference = found.double() - exact
    least = 0.1 * (exact.numel() / seqlen_k) ** 0.5
    error = float(difference.norm() / exact.norm().clamp(min=least))
    rows = exact.norm(dim=-1)
    floor = max(float(rows.square().mean().sqrt()), 0.1 * (exact.shape[-1] / seqlen_k) ** 0.5)
    worst_row = float((difference.norm(dim=-1) / rows.clamp(min=floor)).max())
    if not error <= limit:
        return Verdict(error, limit, f"{name} is off by {error:.1e} of its norm, limit {limit:.1e}")
    if not worst_row <= ROW_FACTOR * limit:
        return Verdict(
            error, limit, f"a row of {name} is off by {worst_row:.1e}, limit {ROW_FACTOR * limit:.1e}"
        )
    return Verdict(error, limit, None)
