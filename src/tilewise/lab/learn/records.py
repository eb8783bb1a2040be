"""What a trace holds: one record for each tile, the state at the end, and the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewise.core.mask import TileKind
from tilewise.lab.learn import show

NEG_INF = float("-inf")


class BlockSizes(NamedTuple):
    """Rows of a query tile and rows of a key tile."""

    block_q: int
    block_k: int


class Tile(NamedTuple):
    """One tile of the score matrix: its place in the grid and its queries and keys."""

    i: int
    j: int
    rows: range  # queries
    cols: range  # keys
    kind: TileKind


@dataclass(frozen=True, eq=False)
class Step:
    """One tile of the forward pass. Tensors are float64; block_q and block_k are the tile's own sizes."""

    tile: Tile
    s: Tensor  # scores [block_q, block_k], scaled; -inf where a key is not visible
    m_tile: Tensor  # this tile's row maximum [block_q]
    m_old: Tensor  # running maximum before [block_q]
    m: Tensor  # running maximum after [block_q]
    correction: Tensor  # exp(m_old - m) [block_q]
    p: Tensor  # local exponentials exp(s - m) [block_q, block_k]
    l_old: Tensor  # running sum before [block_q]
    l: Tensor  # running sum after [block_q]
    kept: Tensor  # running output as `normalize` keeps it [block_q, head_dim_v]
    normalize: str
    loads: Mapping[str, int]  # elements read from slow memory for this step
    stores: Mapping[str, int]  # elements written to slow memory by this step

    @property
    def acc(self) -> Tensor:
        """The running output, not normalized [block_q, head_dim_v]."""
        return self.kept if self.normalize == "end" else self.kept * self.l[:, None]

    @property
    def out(self) -> Tensor:
        """The running output, normalized over the keys seen so far; 0 for a row that has seen none."""
        return self.kept if self.normalize == "each_step" else divide(self.kept, self.l[:, None])

    @property
    def p_tile(self) -> Tensor:
        """Exponentials under the tile's own maximum, exp(s - m_tile): Algorithm 1, line 10."""
        return torch.exp(self.s - finite(self.m_tile)[:, None])

    @property
    def tile_correction(self) -> Tensor:
        """exp(m_tile - m): takes `p_tile` to `p` (Algorithm 1, lines 11 and 12). 0 for a row without keys."""
        return torch.exp(self.m_tile - finite(self.m))


@dataclass(frozen=True, eq=False)
class Final:
    """One query tile at the end: what was kept, the last division (if any is left), out and lse."""

    i: int
    rows: range
    m: Tensor  # [block_q]
    l: Tensor  # [block_q]
    kept: Tensor  # [block_q, head_dim_v]
    out: Tensor  # [block_q, head_dim_v]
    lse: Tensor  # m + log(l) [block_q]
    loads: Mapping[str, int]
    stores: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Trace:
    """A forward pass: `steps` in the order they ran, `finals` by query tile, and the result.

    `str()` prints every step. A query that sees no key has out 0 and lse -inf.
    """

    out: Tensor  # (seqlen_q, head_dim_v)
    lse: Tensor  # (seqlen_q,), natural log
    steps: tuple[Step, ...]
    finals: tuple[Final, ...]
    skipped: tuple[Tile, ...]  # tiles that no query of theirs can see: never loaded
    initial_stores: Mapping[str, int]  # elements written before the first step
    shape: tuple[int, int]  # (seqlen_q, seqlen_k)
    blocks: BlockSizes
    order: str
    normalize: str
    scale: float
    causal: bool

    def step(self, i: int, j: int) -> Step:
        """The step of query tile `i` and key tile `j`; KeyError if it was skipped or does not exist."""
        return _find(self.steps, i, j)

    def scores(self) -> Tensor:
        """The score tiles put together (seqlen_q, seqlen_k); -inf where not visible."""
        return _assemble(self.steps, "s", self.shape, NEG_INF)

    def weights(self) -> Tensor:
        """softmax of `scores()` (seqlen_q, seqlen_k), from the final lse; 0 for a query without keys."""
        return torch.exp(self.scores() - finite(self.lse)[:, None])

    def loads(self) -> Counter[str]:
        """Elements read from slow memory, by tensor."""
        loads = [*(step.loads for step in self.steps), *(final.loads for final in self.finals)]
        return sum(map(Counter, loads), Counter())

    def stores(self) -> Counter[str]:
        """Elements written to slow memory, by tensor."""
        stores = [*(step.stores for step in self.steps), *(final.stores for final in self.finals)]
        return sum(map(Counter, stores), Counter(self.initial_stores))

    def __str__(self) -> str:
        return show.as_text(show.forward_sections(self))


@dataclass(frozen=True, eq=False)
class BackwardStep:
    """One tile of the backward pass. Gradients are the sums so far, after this tile."""

    tile: Tile
    s: Tensor  # scores, recomputed [block_q, block_k]
    p: Tensor  # exp(s - lse) [block_q, block_k]
    dp: Tensor  # dO V^T [block_q, block_k]
    ds: Tensor  # p * (dp - delta) [block_q, block_k]
    dq: Tensor  # of this query tile, so far [block_q, head_dim]
    dk: Tensor  # of this key tile, so far [block_k, head_dim]
    dv: Tensor  # of this key tile, so far [block_k, head_dim_v]


@dataclass(frozen=True, eq=False)
class BackwardTrace:
    """A backward pass: `steps` in the order they ran, delta = rowsum(dO * O) and the gradients.

    `str()` prints every step. `forward` is the pass whose out and lse it uses.
    """

    dq: Tensor  # (seqlen_q, head_dim)
    dk: Tensor  # (seqlen_k, head_dim)
    dv: Tensor  # (seqlen_k, head_dim_v)
    delta: Tensor  # D of the paper (seqlen_q,)
    steps: tuple[BackwardStep, ...]
    forward: Trace

    def step(self, i: int, j: int) -> BackwardStep:
        """The step of query tile `i` and key tile `j`; KeyError if it was skipped or does not exist."""
        return _find(self.steps, i, j)

    def assemble(self, name: str) -> Tensor:
        """The tiles of "p", "dp" or "ds" put together (seqlen_q, seqlen_k); 0 where a tile was skipped."""
        return _assemble(self.steps, name, self.forward.shape, 0.0)

    def __str__(self) -> str:
        return show.as_text(show.backward_sections(self))


AnyStep = TypeVar("AnyStep", Step, BackwardStep)


def as_slice(span: range) -> slice:
    return slice(span.start, span.stop)


def finite(statistic: Tensor) -> Tensor:
    """-inf -> 0, so that exp(-inf - statistic) is 0 and not NaN."""
    return statistic.masked_fill(statistic == NEG_INF, 0.0)


def divide(acc: Tensor, l: Tensor) -> Tensor:
    """acc / l, and 0 where nothing was summed."""
    return acc / l.masked_fill(l == 0, 1.0)


def _find(steps: Sequence[AnyStep], i: int, j: int) -> AnyStep:
    for step in steps:
        if (step.tile.i, step.tile.j) == (i, j):
            return step
    raise KeyError(f"no step for tile ({i}, {j})")


def _assemble(steps: Sequence[AnyStep], name: str, shape: tuple[int, int], fill: float) -> Tensor:
    matrix = torch.full(shape, fill, dtype=torch.float64)
    for step in steps:
        matrix[as_slice(step.tile.rows), as_slice(step.tile.cols)] = getattr(step, name)
    return matrix
