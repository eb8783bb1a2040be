"""Every number of tiled attention, tile by tile, from the very steps that the `tiled` backend runs.

Nothing is computed a second way here: a tile's arithmetic is `tiled.backend.online_softmax_step` forward, and
`recompute_step` and `gradient_step` backward. This module only walks the tiles in one of two orders, keeps
the state between visits and writes down what went in and what came out:

    "fa1"  keys outer, queries inner (FlashAttention, Algorithm 1): m, l and O of each query tile wait in
           slow memory between visits.
    "fa2"  queries outer, keys inner (FlashAttention-2, Algorithm 1): a query tile is finished in one go.

and keeps the running output in one of two ways:

    "each_step"  O is normalized after each tile (FlashAttention, Algorithm 1, line 12)
    "end"        acc = l * O, divided by l once
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewise.core.mask import TileKind, Visibility
from tilewise.core.problem import Inputs, Options, describe
from tilewise.lab.learn.records import (
    NEG_INF,
    BackwardStep,
    BackwardTrace,
    BlockSizes,
    Final,
    Step,
    Tile,
    Trace,
    as_slice,
    divide,
)
from tilewise.tiled import backend as tiled
from tilewise.tiled.tiles import shift_and_factor

ORDERS = ("fa1", "fa2")
NORMALIZE = ("each_step", "end")


def paper_block_sizes(sram_size: int, head_dim: int) -> BlockSizes:
    """Block sizes for a fast memory of `sram_size` elements (not bytes).

    FlashAttention, Algorithm 1, line 1: B_c = ceil(M / 4d) keys and B_r = min(ceil(M / 4d), d) queries.

    Example:
        >>> paper_block_sizes(sram_size=1000, head_dim=64)
        BlockSizes(block_q=4, block_k=4)
    """
    for name, size in (("sram_size", sram_size), ("head_dim", head_dim)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    block_k = -(-sram_size // (4 * head_dim))
    return BlockSizes(min(block_k, head_dim), block_k)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_q: int,
    block_k: int,
    *,
    order: str = "fa2",
    normalize: str = "end",
    scale: float | None = None,
    causal: bool = False,
) -> Trace:
    """Trace softmax(scale * Q K^T) V, one head, in float64 on the CPU.

    Args:
        query: (seqlen_q, head_dim), any floating dtype, any device.
        key: (seqlen_k, head_dim).
        value: (seqlen_k, head_dim_v).
        block_q: queries in a tile; the last tile may be smaller. `paper_block_sizes` gives both.
        block_k: keys in a tile.
        order: "fa1" (keys outer) or "fa2" (queries outer).
        normalize: "each_step" or "end".
        scale: None is 1 / sqrt(head_dim).
        causal: the last query is aligned with the last key; tiles above the diagonal are skipped.

    Raises:
        ValueError, TypeError: naming the argument, its value and what is right.

    Example:
        >>> query, key = torch.ones(1, 1), torch.tensor([[2.0], [5.0], [3.0]])
        >>> trace = forward(query, key, torch.eye(3), block_q=1, block_k=2, scale=1.0)
        >>> [round(float(step.l), 4) for step in trace.steps]
        [1.0498, 1.1851]
    """
    for name, choice, choices in (("order", order, ORDERS), ("normalize", normalize, NORMALIZE)):
        if choice not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {choice!r}")
    operands = _operands(query, key, value, block_q, block_k, scale, causal)
    walk = _ForwardWalk(operands, order, normalize)
    tiles = operands.tiles(order)
    steps = tuple(walk.step(tile) for tile in tiles if tile.kind is not TileKind.EMPTY)
    finals = tuple(walk.final(i, rows) for i, rows in enumerate(operands.query_tiles()))
    seqlen_q, seqlen_k, dim_v = len(operands.q), len(operands.k), operands.v.shape[1]
    return Trace(
        out=torch.cat([operands.v.new_zeros(0, dim_v), *(final.out for final in finals)]),
        lse=torch.cat([operands.v.new_zeros(0), *(final.lse for final in finals)]),
        steps=steps,
        finals=finals,
        skipped=tuple(tile for tile in tiles if tile.kind is TileKind.EMPTY),
        initial_stores={"o": seqlen_q * dim_v, "l": seqlen_q, "m": seqlen_q} if order == "fa1" else {},
        shape=(seqlen_q, seqlen_k),
        blocks=operands.blocks,
        order=order,
        normalize=normalize,
        scale=operands.scale,
        causal=causal,
    )


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dout: Tensor,
    block_q: int,
    block_k: int,
    *,
    scale: float | None = None,
    causal: bool = False,
) -> BackwardTrace:
    """Trace the gradients of softmax(scale * Q K^T) V by recomputation from lse.

    The walk is that of `tiled`: queries outer, keys inner. Arguments as for `forward`, and

    Args:
        dout: gradient of the output (seqlen_q, head_dim_v).

    Example:
        >>> query, key, value = torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([[1.0], [3.0]])
        >>> trace = backward(query, key, value, torch.ones(1, 1), block_q=1, block_k=1)
        >>> trace.assemble("ds").round(decimals=9).tolist()
        [[-0.5, 0.5]]
    """
    trace = forward(query, key, value, block_q, block_k, scale=scale, causal=causal)
    shape = tuple(trace.out.shape)
    if dout.shape != shape:
        raise ValueError(f"dout must have the output's shape {shape}, got {tuple(dout.shape)}")
    operands = _operands(query, key, value, block_q, block_k, scale, causal)
    do = dout.detach().to("cpu", torch.float64)
    delta, scale = (do * trace.out).sum(-1), operands.scale
    # dq lacks its factor of scale, as in `tiled`
    sums = dq, dk, dv = tuple(torch.zeros_like(t) for t in (operands.q, operands.k, operands.v))

    def step(tile: Tile) -> BackwardStep:
        rows, cols = as_slice(tile.rows), as_slice(tile.cols)
        q, k, v = operands.q[None, rows], operands.k[None, cols], operands.v[None, cols]
        dq_tile, dk_tile, dv_tile = (t[None, part] for t, part in zip(sums, (rows, cols, cols)))
        shift, factor = shift_and_factor(trace.lse[rows][None, :, None])
        s = operands.scores(tile)
        p, dp = tiled.recompute_step(s.clone(), v, shift, do[None, rows], dv_tile, None, factor)
        recorded_dp = dp[0].clone()
        ds = tiled.gradient_step(p, dp, delta[None, rows, None], q, k, dq_tile, dk_tile)
        so_far = (dq_tile[0] * scale, dk_tile[0].clone(), dv_tile[0].clone())
        return BackwardStep(tile, s[0], p[0], recorded_dp, ds[0], *so_far)

    steps = tuple(step(done.tile) for done in trace.steps)
    return BackwardTrace(dq * scale, dk, dv, delta, steps, trace)


@dataclass(frozen=True, eq=False)
class _Operands:
    """float64 inputs, and how they are cut."""

    q: Tensor  # times the scale
    k: Tensor
    v: Tensor
    blocks: BlockSizes
    visibility: Visibility
    scale: float

    def query_tiles(self) -> list[range]:
        return _cut(len(self.q), self.blocks.block_q)

    def tiles(self, order: str) -> list[Tile]:
        """Every tile of the score matrix, in the order of the walk."""
        queries = list(enumerate(self.query_tiles()))
        keys = list(enumerate(_cut(len(self.k), self.blocks.block_k)))
        if order == "fa1":
            return [self._tile(i, j, rows, cols) for j, cols in keys for i, rows in queries]
        return [self._tile(i, j, rows, cols) for i, rows in queries for j, cols in keys]

    def _tile(self, i: int, j: int, rows: range, cols: range) -> Tile:
        kind = self.visibility.tile_kind(rows.start, rows.stop, cols.start, cols.stop)
        return Tile(i, j, rows, cols, kind)

    def scores(self, tile: Tile) -> Tensor:
        """[1, block_q, block_k]: the tile functions of `tiled` want a batch dimension."""
        s = torch.bmm(self.q[None, as_slice(tile.rows)], self.k[None, as_slice(tile.cols)].mT)
        if tile.kind is TileKind.EDGE:
            rows, cols = tile.rows, tile.cols
            mask = self.visibility.tile_mask(rows.start, rows.stop, cols.start, cols.stop, s.device)
            s.masked_fill_(~mask, NEG_INF)
        return s


@dataclass(eq=False)
class _ForwardWalk:
    """The state of every query tile between visits, and the traffic of a visit."""

    operands: _Operands
    order: str
    normalize: str
    state: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # i -> m, l, kept
    resident: tuple[str, int] | None = None  # the outer loop's tile, in fast memory since its first visit

    def step(self, tile: Tile) -> Step:
        s, v = self.operands.scores(tile), self.operands.v[None, as_slice(tile.cols)]
        m_old, l_old, kept = self._state(tile.i, tile.rows)
        acc = kept * l_old if self.normalize == "each_step" else kept.clone()
        new = tiled.online_softmax_step(s.clone(), v, m_old, l_old, acc)
        kept = divide(new.acc, new.l) if self.normalize == "each_step" else new.acc
        self.state[tile.i] = new.m, new.l, kept
        loads, stores = self._traffic(tile)
        return Step(
            tile=tile,
            s=s[0],
            m_tile=new.m_tile[0, :, 0],
            m_old=m_old[0, :, 0],
            m=new.m[0, :, 0],
            correction=new.correction[0, :, 0],
            p=new.p[0],
            l_old=l_old[0, :, 0],
            l=new.l[0, :, 0],
            kept=kept[0],
            normalize=self.normalize,
            loads=loads,
            stores=stores,
        )

    def final(self, i: int, rows: range) -> Final:
        m, l, kept = self._state(i, rows)
        out = kept if self.normalize == "each_step" else divide(kept, l)
        lse = m + torch.log(l)
        loads: dict[str, int] = {}
        stores: dict[str, int] = {}
        if self.order == "fa2":
            stores = {"out": out.numel(), "lse": lse.numel()}
        elif self.normalize == "end":  # O, l and m are in slow memory already; the division is still owed
            loads, stores = {"o": out.numel(), "l": l.numel()}, {"o": out.numel()}
        return Final(i, rows, m[0, :, 0], l[0, :, 0], kept[0], out[0], lse[0, :, 0], loads, stores)

    def _state(self, i: int, rows: range) -> tuple[Tensor, Tensor, Tensor]:
        if i not in self.state:
            m = self.operands.q.new_full((1, len(rows), 1), NEG_INF)
            kept = self.operands.v.new_zeros(1, len(rows), self.operands.v.shape[1])
            self.state[i] = m, torch.zeros_like(m), kept
        return self.state[i]

    def _traffic(self, tile: Tile) -> tuple[dict[str, int], dict[str, int]]:
        """Elements this visit moves: the inner loop's tile always, the outer loop's when it is new."""
        dim, dim_v = self.operands.q.shape[1], self.operands.v.shape[1]
        query = {"q": len(tile.rows) * dim}
        keys = {"k": len(tile.cols) * dim, "v": len(tile.cols) * dim_v}
        outer = ("j", tile.j) if self.order == "fa1" else ("i", tile.i)
        is_new, self.resident = outer != self.resident, outer
        if self.order == "fa2":
            return (query | keys if is_new else keys), {}
        state = {"o": len(tile.rows) * dim_v, "l": len(tile.rows), "m": len(tile.rows)}
        return (keys | query | state if is_new else query | state), state  # Algorithm 1, lines 6, 8, 12, 13


def _operands(
    query: Tensor, key: Tensor, value: Tensor, block_q: int, block_k: int, scale: float | None, causal: bool
) -> _Operands:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 2:
            raise ValueError(f"{name} must be 2-D (seqlen, head_dim), got shape {tuple(tensor.shape)}")
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size}")
    one_head = Inputs(*(t.detach()[None, :, None] for t in (query, key, value)))
    problem = describe(one_head, Options(causal=causal, scale=scale))  # checks dtypes, shapes and scale
    q, k, v = (t.detach().to("cpu", torch.float64) for t in (query, key, value))
    blocks = BlockSizes(block_q, block_k)
    return _Operands(q * problem.scale, k, v, blocks, problem.visibility(), problem.scale)


def _cut(length: int, block: int) -> list[range]:
    return [range(start, min(start + block, length)) for start in range(0, length, block)]
