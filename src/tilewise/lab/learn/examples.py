"""Small worked examples that circulate in explanations of FlashAttention, and how they are walked through.

Where an explanation gives logits and no queries, the query is 1 and the keys are the logits, with scale 1.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import reference
from tilewise.core.checks import shown
from tilewise.lab.learn import trace as tracing
from tilewise.lab.learn.records import BackwardTrace, BlockSizes, Trace
from tilewise.lab.learn.show import Line, Section, backward_sections, counted, forward_sections

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Example:
    """Inputs of one example and how it is cut; `tensors()` gives them in float64.

    Example:
        >>> EXAMPLES["by-hand-1x6"].tensors().key.T.tolist()
        [[1.0, 2.0, 3.0, 6.0, 2.0, 1.0]]
    """

    name: str
    summary: str
    query: Rows
    key: Rows
    value: Rows
    block_q: int
    block_k: int
    dout: Rows | None = None  # gradient of the output, where the example has a backward pass
    learning_rate: float | None = None  # of its weight update, with the identity as layer input
    without_max: bool = False  # also show the softmax that does not subtract the maximum
    scale: float = 1.0
    digits: int = 4  # that show what the example is about

    def tensors(self) -> Tensors:
        def tensor(rows: Rows) -> Tensor:
            return torch.tensor(rows, dtype=torch.float64)

        dout = None if self.dout is None else tensor(self.dout)
        return Tensors(tensor(self.query), tensor(self.key), tensor(self.value), dout)


class Tensors(NamedTuple):
    query: Tensor  # (seqlen_q, head_dim)
    key: Tensor  # (seqlen_k, head_dim)
    value: Tensor  # (seqlen_k, head_dim_v)
    dout: Tensor | None  # (seqlen_q, head_dim_v)


def random_example(seqlen_q: int, seqlen_k: int, head_dim: int, seed: int = 0) -> Example:
    """Standard normal inputs in tiles of 2 x 2, with the usual scale 1 / sqrt(head_dim)."""
    generator = torch.Generator().manual_seed(seed)

    def rows(length: int) -> Rows:
        normal = torch.randn(length, head_dim, generator=generator, dtype=torch.float64)
        return tuple(tuple(row) for row in normal.tolist())

    summary = f"{_sizes(seqlen_q, seqlen_k, head_dim)}, seed {seed}"
    inputs = rows(seqlen_q), rows(seqlen_k), rows(seqlen_k)
    return Example("random", summary, *inputs, block_q=2, block_k=2, scale=head_dim**-0.5)


def _sizes(queries: int, keys: int, head_dim: int) -> str:
    return f"{counted(queries, 'query', 'queries')}, {counted(keys, 'key')}, head_dim {head_dim}"


LARGEST = 64  # rows and columns: everything is printed


def own_example(q: str, k: str, v: str) -> Example:
    """Matrices of one's own, each as text ("1,0;0,1") or a file, in tiles of 2 x 2.

    Raises:
        ValueError: a matrix cannot be read, or they do not fit together; the message names the option.
    """
    query, key, value = (matrix(name, text) for name, text in (("--q", q), ("--k", k), ("--v", v)))
    if len(key[0]) != len(query[0]):
        raise ValueError(
            f"--k has {len(key[0])} columns (head_dim), must have as many as --q: {len(query[0])}"
        )
    if len(value) != len(key):
        raise ValueError(f"--v has {len(value)} rows (keys), must have as many as --k: {len(key)}")
    summary = _sizes(len(query), len(key), len(query[0]))
    return Example("own", summary, query, key, value, block_q=2, block_k=2, scale=len(query[0]) ** -0.5)


def matrix(name: str, text: str) -> Rows:
    """Rows of numbers from text, rows apart by ";", or from a file .csv, .npy or .pt.

    Raises:
        ValueError: it cannot be read, is no matrix, is too large or has a number that is not finite.

    Example:
        >>> matrix("--q", "1,0; 0.5,1")
        ((1.0, 0.0), (0.5, 1.0))
    """
    read = READERS.get(Path(text).suffix.lower(), _from_text)
    try:
        rows = tuple(tuple(map(float, row)) for row in read(text))
    except OSError as error:
        raise ValueError(f"{name} {text}: {error.strerror or error}") from None
    except (ValueError, TypeError, AttributeError, EOFError, RuntimeError, pickle.UnpicklingError):
        wanted = "numbers as 1,0;0,1 or a file .csv, .npy or .pt that holds a matrix"
        raise ValueError(f"{name} must be {wanted}; got {shown(text)}") from None
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"{name} must have rows of one length; got {[len(row) for row in rows]}")
    if not (1 <= len(rows) <= LARGEST and 1 <= len(rows[0]) <= LARGEST):
        limits = f"1 to {LARGEST} rows and columns, because every number is printed"
        raise ValueError(f"{name} must have {limits}; got {len(rows)} x {len(rows[0])}")
    if not all(math.isfinite(x) for row in rows for x in row):
        raise ValueError(f"{name} must have finite numbers only")
    return rows


def _from_text(text: str) -> list[list[str]]:
    return [row.split(",") for row in text.strip(" ;\n").split(";")]


def _from_npy(path: str) -> Any:
    import numpy as np

    return np.load(path, allow_pickle=False).tolist()


READERS: dict[str, Callable[[str], Any]] = {
    ".csv": lambda path: [row.split(",") for row in Path(path).read_text().splitlines() if row.strip()],
    ".npy": _from_npy,
    ".pt": lambda path: torch.load(path, weights_only=True).tolist(),
}


def naive_softmax(logits: Tensor, flush_subnormal: bool = False) -> Tensor:
    """exp(x) / sum(exp(x)) over the last dimension in x's dtype, without subtracting the maximum.

    Args:
        logits: (..., n), floating.
        flush_subnormal: round exponentials below the smallest normal number to 0, as GPU code compiled
            with fast-math does. CPUs keep them by default.

    Example:
        >>> naive_softmax(torch.tensor([100.0, 90.0, 80.0]))
        tensor([nan, nan, 0.])
    """
    e = torch.exp(logits)
    if flush_subnormal:
        e = torch.where(e < torch.finfo(e.dtype).tiny, 0.0, e)
    return e / e.sum(-1, keepdim=True)


def weight_update(weight: Tensor, layer_input: Tensor, gradient: Tensor, learning_rate: float) -> Tensor:
    """One step of gradient descent on W, where X W had the given gradient: W - rate * X^T gradient.

    Args:
        weight: (d_in, d_out).
        layer_input: X (seqlen, d_in).
        gradient: of X W, (seqlen, d_out).
    """
    return weight - learning_rate * layer_input.mT @ gradient


def _identity(n: int) -> Rows:
    return tuple(tuple(float(i == j) for j in range(n)) for i in range(n))


def _of_logits(
    name: str, summary: str, logits: tuple[float, ...], value: Rows | None = None, **others: Any
) -> Example:
    """A query and keys with q k^T equal to the logits; without a value it is I, which shows the softmax."""
    key = tuple((x,) for x in logits)
    value = _identity(len(key)) if value is None else value
    return Example(name, summary, ((1.0,),), key, value, block_q=1, **others)


_BEYOND_FLOAT32: dict[str, Any] = {"block_k": 1, "without_max": True, "digits": 6}
_ALL = (
    Example(
        "tiling-4x4",
        "four tokens, head_dim 4, tiles of 2 x 2: forward, backward, one weight update",
        query=((1, 0, 1, 0), (0, 1, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0)),
        key=((1, 0, 0, 0), (0, 1, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1)),
        value=((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16)),
        block_q=2,
        block_k=2,
        dout=((1, 1, 1, 1), (0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0)),
        learning_rate=0.1,
    ),
    _of_logits(
        "by-hand-1x6",
        "one query with logits 1 2 3 6 2 1 in two tiles of three keys; the maximum rises in the second",
        (1, 2, 3, 6, 2, 1),
        block_k=3,
        value=tuple((float(n), float(n)) for n in range(1, 7)),
    ),
    _of_logits(
        "scores-2-5-3",
        "one query with logits 2 5 | 3: the second tile leaves the maximum alone; V = I shows the softmax",
        (2, 5, 3),
        block_k=2,
    ),
    _of_logits(
        "overflow-100-90-80",
        "logits whose exponentials leave float32; V = I shows the softmax",
        (100, 90, 80),
        **_BEYOND_FLOAT32,
    ),
    _of_logits(
        "underflow-100-200-300",
        "logits -100 -200 -300, whose exponentials vanish in float32; V = I shows the softmax",
        (-100, -200, -300),
        **_BEYOND_FLOAT32,
    ),
)

EXAMPLES = {example.name: example for example in _ALL}


def walkthrough(
    example: Example, tensors: Tensors, blocks: BlockSizes, order: str, normalize: str, causal: bool
) -> Iterator[Section]:
    """Sections in reading order; the backward pass is there when `tensors.dout` is."""
    query, key, value, dout = tensors
    inputs = [Line(name, "", t) for name, t in zip("QKV", tensors[:3])]
    yield Section("inputs", inputs if dout is None else [*inputs, Line("dO", "", dout)])
    options: dict[str, Any] = {"scale": example.scale, "causal": causal}
    trace = tracing.forward(query, key, value, *blocks, order=order, normalize=normalize, **options)
    if example.without_max:
        yield from _without_max(trace.scores())
    yield from forward_sections(trace)
    backward = None
    if dout is not None:
        backward = tracing.backward(query, key, value, dout, *blocks, **options)
        yield from backward_sections(backward)
    yield _agreement(tensors, trace, backward)
    if backward is not None and example.learning_rate is not None:
        yield _update(tensors, backward, example.learning_rate)


def largest_difference(a: Trace, b: Trace) -> float:
    """Over all tiles of two traces: how far m, l, acc and out are apart at the most, step by step."""
    difference = (a.out - b.out).abs().max().item()
    for step in a.steps:
        other = b.step(step.tile.i, step.tile.j)
        for name in ("m", "l", "acc", "out"):
            x, y = getattr(step, name), getattr(other, name)
            difference = max(difference, torch.where(x == y, 0.0, (x - y).abs()).max().item())  # -inf == -inf
    return difference


def _agreement(tensors: Tensors, trace: Trace, backward: BackwardTrace | None) -> Section:
    query, key, value, dout = tensors
    options: dict[str, Any] = {"scale": trace.scale, "causal": trace.causal}
    other_order = {"fa1": "fa2", "fa2": "fa1"}[trace.order]
    other_normalize = {"end": "each_step", "each_step": "end"}[trace.normalize]
    lines = []
    for name, order, normalize in (
        (f"normalize {other_normalize}", trace.order, other_normalize),
        (f"order {other_order}", other_order, trace.normalize),
    ):
        again = tracing.forward(query, key, value, *trace.blocks, order=order, normalize=normalize, **options)
        difference = largest_difference(trace, again)
        lines.append(Line(name, "m, l, acc and out of every step", f"{difference:.1e}"))
    one_head = [t[None, :, None] for t in (query, key, value)]
    out, _ = reference.attention(*one_head, **options)
    lines.append(_compared("O", [out], [trace.out]))
    if backward is not None and dout is not None:
        expected = reference.attention_backward(dout[None, :, None], *one_head, **options)
        gradients = [backward.dq, backward.dk, backward.dv]
        lines.append(_compared("dQ, dK, dV", [expected.query, expected.key, expected.value], gradients))
    return Section("the same numbers another way: largest difference", lines)


def _compared(names: str, expected: list[Tensor], ours: list[Tensor]) -> Line:
    worst = max((a[0, :, 0] - b).abs().max().item() for a, b in zip(expected, ours))
    return Line("standard attention", f"{names}, with the whole of S and P stored", f"{worst:.1e}")


def _without_max(logits: Tensor) -> list[Section]:
    x = logits.float()
    e = torch.exp(x)
    without = [
        Line("s", "in float32", x),
        Line("exp(s)", "largest float32 is 3.4028e+38", e),
        Line("sum", "", e.sum(-1)),
        Line("exp(s) / sum", "", naive_softmax(x)),
        Line(
            "the same",
            "subnormal numbers (below 1.1755e-38) flushed to 0",
            naive_softmax(x, flush_subnormal=True),
        ),
    ]
    shifted = x - x.amax(-1, keepdim=True)
    e = torch.exp(shifted)
    with_max = [
        Line("s - max", "in float32", shifted),
        Line("exp(s - max)", "the largest is 1, so the sum is at least 1", e),
        Line("sum", "", e.sum(-1)),
        Line("softmax", "", e / e.sum(-1, keepdim=True)),
    ]
    return [
        Section("softmax without subtracting the maximum", without),
        Section("softmax with the maximum subtracted", with_max),
    ]


def _update(tensors: Tensors, backward: BackwardTrace, learning_rate: float) -> Section:
    """The layer input is the identity, so that the weights are Q, K and V themselves."""
    gradients = zip("QKV", tensors[:3], (backward.dq, backward.dk, backward.dv))
    lines = []
    for name, weight, gradient in gradients:
        layer_input = torch.eye(len(weight), dtype=weight.dtype)
        updated = weight_update(weight, layer_input, gradient, learning_rate)
        lines.append(Line(f"W_{name}", f"{name} - {learning_rate:g} X^T d{name}", updated))
    return Section("weight update, with X = I: W_Q = Q, W_K = K, W_V = V", lines)
