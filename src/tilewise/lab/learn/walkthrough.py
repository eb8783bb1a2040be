"""A whole worked example as sections to read: inputs, every step, the other ways, backward, update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import reference
from tilewise.lab.learn import trace as tracing
from tilewise.lab.learn.examples import Tensors, naive_softmax, weight_update
from tilewise.lab.learn.records import BackwardTrace, BlockSizes, Trace
from tilewise.lab.learn.show import Line, Section, backward_sections, forward_sections


class Settings(NamedTuple):
    """How to walk through: see `trace.forward` for the first four."""

    order: str = "fa2"
    normalize: str = "end"
    scale: float | None = None
    causal: bool = False
    learning_rate: float | None = None  # show a weight update after the backward pass
    without_max: bool = False  # first show the softmax that does not subtract the maximum


def walkthrough(tensors: Tensors, blocks: BlockSizes, settings: Settings) -> Iterator[Section]:
    """Sections in reading order; the backward pass is there when `tensors.dout` is."""
    query, key, value, dout = tensors
    named = zip("QKV", (query, key, value))
    inputs = [Line(name, "", t) for name, t in named]
    yield Section("inputs", inputs if dout is None else [*inputs, Line("dO", "", dout)])
    trace = tracing.forward(
        query,
        key,
        value,
        *blocks,
        order=settings.order,
        normalize=settings.normalize,
        scale=settings.scale,
        causal=settings.causal,
    )
    if settings.without_max:
        yield from _without_max(trace.scores())
    yield from forward_sections(trace)
    backward = None
    if dout is not None:
        scale, causal = settings.scale, settings.causal
        backward = tracing.backward(query, key, value, dout, *blocks, scale=scale, causal=causal)
    if backward is not None:
        yield from backward_sections(backward)
    yield _agreement(tensors, trace, backward)
    if backward is not None and settings.learning_rate is not None:
        yield _update(tensors, backward, settings.learning_rate)


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
    scale, causal, blocks = trace.scale, trace.causal, trace.blocks
    other_order = {"fa1": "fa2", "fa2": "fa1"}[trace.order]
    other_normalize = {"end": "each_step", "each_step": "end"}[trace.normalize]
    lines = []
    for name, order, normalize in (
        (f"normalize {other_normalize}", trace.order, other_normalize),
        (f"order {other_order}", other_order, trace.normalize),
    ):
        again = tracing.forward(
            query, key, value, *blocks, order=order, normalize=normalize, scale=scale, causal=causal
        )
        difference = largest_difference(trace, again)
        lines.append(Line(name, "m, l, acc and out of every step", f"{difference:.1e}"))
    one_head = [t[None, :, None] for t in (query, key, value)]
    out, _ = reference.attention(*one_head, scale=scale, causal=causal)
    lines.append(_compared("O", [out], [trace.out]))
    if backward is not None and dout is not None:
        expected = reference.attention_backward(dout[None, :, None], *one_head, scale=scale, causal=causal)
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
