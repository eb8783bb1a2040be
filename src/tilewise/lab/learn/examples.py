"""Small worked examples that circulate in explanations of FlashAttention, as data.

Where an explanation gives logits and no queries, the query is 1 and the keys are the logits, with scale 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

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

    summary = f"{seqlen_q} queries, {seqlen_k} keys, head size {head_dim}, seed {seed}"
    inputs = rows(seqlen_q), rows(seqlen_k), rows(seqlen_k)
    return Example("random", summary, *inputs, block_q=2, block_k=2, scale=head_dim**-0.5)


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


def _from_logits(*logits: float) -> tuple[Rows, Rows]:
    """A query and keys with q k^T equal to the logits."""
    return ((1.0,),), tuple((x,) for x in logits)


_ALL = (
    Example(
        "tiling-4x4",
        "four tokens, head size 4, tiles of 2 x 2: forward, backward, one weight update",
        query=((1, 0, 1, 0), (0, 1, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0)),
        key=((1, 0, 0, 0), (0, 1, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1)),
        value=((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16)),
        block_q=2,
        block_k=2,
        dout=((1, 1, 1, 1), (0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0)),
        learning_rate=0.1,
    ),
    Example(
        "by-hand-1x6",
        "one query with logits 1 2 3 6 2 1 in two tiles of three keys; the maximum rises in the second",
        *_from_logits(1, 2, 3, 6, 2, 1),
        value=tuple((float(n), float(n)) for n in range(1, 7)),
        block_q=1,
        block_k=3,
    ),
    Example(
        "scores-2-5-3",
        "one query with logits 2 5 | 3: the second tile leaves the maximum alone; V = I shows the softmax",
        *_from_logits(2, 5, 3),
        value=_identity(3),
        block_q=1,
        block_k=2,
    ),
    Example(
        "overflow-100-90-80",
        "logits whose exponentials leave float32; V = I shows the softmax",
        *_from_logits(100, 90, 80),
        value=_identity(3),
        block_q=1,
        block_k=1,
        without_max=True,
        digits=6,
    ),
    Example(
        "underflow-100-200-300",
        "logits -100 -200 -300, whose exponentials vanish in float32; V = I shows the softmax",
        *_from_logits(-100, -200, -300),
        value=_identity(3),
        block_q=1,
        block_k=1,
        without_max=True,
        digits=6,
    ),
)

EXAMPLES = {example.name: example for example in _ALL}
