"""Mask and score functions on tiles, in PyTorch operations: values, derivatives, kinds of tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.core.functions.captured import doubt, raise_if_wrong
from tilewise.core.functions.derivative import derivative, tangent
from tilewise.core.functions.evaluate import Evaluator, Values, add_at, times
from tilewise.core.functions.expression import decode
from tilewise.core.functions.interval import Blocks
from tilewise.core.functions.tile_map import FULL, PARTIAL, edges, tile_kinds
from tilewise.core.problem import AttentionProblem, Inputs

Tile = tuple[int, int, int, int]  # i0, i1, j0, j1


class SegmentFunctions:
    """The functions of some batch entries that have the same numbers of queries and keys."""

    def __init__(
        self, problem: AttentionProblem, inputs: Inputs, sequences: range, lengths: tuple[int, int],
        blocks: tuple[int, int],
    ) -> None:  # fmt: skip
        """blocks: queries and keys of a tile."""
        assert problem.functions is not None
        self.block_q, self.block_k = blocks
        self.functions = decode(problem.functions)
        self.buffers = inputs.captured
        self.dtype, self.device = problem.compute_dtype, inputs.query.device
        self.b, self.h = (self._points(n) for n in (sequences, range(problem.num_heads)))
        self.kinds = self._map(lengths)

    def _points(self, numbers: range) -> Blocks:
        points = torch.arange(numbers.start, numbers.stop, device=self.device)
        return Blocks(points, points, numbers.stop, 1)

    def _map(self, lengths: tuple[int, int]) -> Tensor:
        """EMPTY, PARTIAL or FULL of each tile, for all batch entries and heads together."""
        blocks = self.block_q, self.block_k
        spans = (self.b, self.h, *(edges(n, block, self.device) for n, block in zip(lengths, blocks)))
        counts = [len(span.first) for span in spans]
        shape = counts[2:]
        if 0 in counts:
            return torch.zeros(shape, dtype=torch.uint8, device="cpu")
        kinds = tile_kinds(self.functions, self.buffers, *spans).flatten(0, 1)
        low, high = kinds.amin(0), kinds.amax(0)
        kinds = torch.where(low == FULL, FULL, high.clamp(max=PARTIAL))
        return kinds.expand(shape).cpu()

    def visible_tiles(self, i0: int, k0: int, k1: int) -> list[tuple[int, int]]:
        """Those tiles of keys [k0, k1) of which some query of the tile from i0 on may see some key."""
        row, step = self.kinds[i0 // self.block_q].tolist(), self.block_k
        found = range(k0 // step, -(-k1 // step))
        return [(max(k0, n * step), min(k1, (n + 1) * step)) for n in found if row[n]]

    def is_full(self, tile: Tile) -> bool:
        return int(self.kinds[tile[0] // self.block_q, tile[2] // self.block_k]) == FULL


class FunctionTile:
    """One tile's functions, at its scores before them."""

    def __init__(self, segment: SegmentFunctions, by_head: Tensor, tile: Tile) -> None:
        """Applies them to the scores (batch, heads, rows, keys) in place."""
        self.segment, self.functions = segment, segment.functions
        i0, i1, j0, j1 = tile
        self.shape = by_head.shape
        rows, keys = (torch.arange(*ends, device=segment.device) for ends in ((i0, i1), (j0, j1)))
        indices = (
            segment.b.first.view(-1, 1, 1, 1), segment.h.first.view(1, -1, 1, 1),
            rows.view(1, 1, -1, 1), keys.view(1, 1, 1, -1),
        )  # fmt: skip
        score = None if self.functions.score is None else by_head.clone()
        self.values = Values(score, *indices, segment.dtype)
        forward = Evaluator(self.functions.graph, self.functions, segment.buffers, self.values)
        self._forward = forward
        if self.functions.score is not None:
            by_head.copy_(forward(self.functions.score))
            unsure = self._doubt(self.functions.score)
            if unsure is not None:  # whatever is read there, -inf is no answer: `check_indices` has one
                by_head.masked_fill_(unsure, 0.0)
        if self.functions.mask is not None and not segment.is_full(tile):
            visible, unsure = forward(self.functions.mask), self._doubt(self.functions.mask)
            by_head.masked_fill_(~(visible if unsure is None else visible | unsure), -torch.inf)

    def _doubt(self, root: int) -> Tensor | None:
        """Where a root depends on what wrong indices read."""
        graph = self.functions.graph.copy()
        unsure = doubt(graph, root, self.functions.guarded) if self.functions.guarded else None
        if unsure is None:
            return None
        evaluate = Evaluator(graph, self.functions, self.segment.buffers, self.values)
        evaluate.known, evaluate.positions = dict(self._forward.known), self._forward.positions
        return evaluate(unsure)

    def check_indices(self, by_head: Tensor) -> None:
        """Where a score that is visible, or could be, has read out of range: raise on a CPU, NaN on a GPU.

        Raises:
            IndexError: which tensor it is.
        """
        if by_head.is_cpu:
            raise_if_wrong(self._forward, by_head != -torch.inf)
            return
        for n in self.functions.guarded:  # to look would wait for the GPU
            wrong = self._forward.is_wrong(n)
            if wrong is not None:
                by_head.masked_fill_(wrong & (by_head != -torch.inf), torch.nan)

    def backward(self, ds: Tensor, total: Tensor | None) -> Tensor:
        """The gradient of the scores before the functions, from that after them, ds.

        total: the gradient of the captured floats that want one, float64, added to in place.
        """
        if self.functions.score is None:
            return ds
        found = derivative(self.functions)
        evaluate = self._evaluator(found.graph)
        by_head = ds.view(self.shape)
        for n, slope in found.loads.items() if total is not None else ():
            if self.functions.tensors[found.graph.nodes[n].value].wants_grad:
                add_at(total, evaluate.position(n), times(by_head, evaluate(slope)))  # type: ignore[arg-type]
        if found.slope is None:
            return torch.zeros_like(ds)
        return times(by_head, evaluate(found.slope)).view(ds.shape)

    def tangent(self, p: Tensor, s_dot: Tensor, dot_floats: Tensor | None) -> Tensor:
        """The tangent of the scores after the functions, from that before them; 0 where the weight is 0."""
        if self.functions.score is None:
            return s_dot
        found = tangent(self.functions, dot_floats is not None)
        self.values = self.values._replace(dot_score=s_dot.view(self.shape))
        self._tangent = found, self._evaluator(found.graph, dot_floats)
        value = self._tangent[1](found.value).expand(self.shape).reshape(p.shape)
        return torch.where(p == 0, 0.0, value)

    def second_backward(self, gs: Tensor, gs_dot: Tensor, total: Tensor | None) -> tuple[Tensor, Tensor]:
        """`backward` of scores and tangents: their cotangents before the functions, from those after them."""
        if self.functions.score is None:
            return gs, gs_dot
        first, (second, evaluate_second) = derivative(self.functions), self._tangent
        evaluate_first = self._evaluator(first.graph)
        shape, gs, gs_dot = gs.shape, gs.view(self.shape), gs_dot.view(self.shape)
        parts = (first, evaluate_first, gs), (second, evaluate_second, gs_dot)
        before = torch.zeros_like(gs)
        for found, evaluate, g in parts:
            for n, slope in found.loads.items() if total is not None else ():
                add_at(total, evaluate.position(n), times(g, evaluate(slope)))  # type: ignore[arg-type]
            if found.slope is not None:
                before = before + times(g, evaluate(found.slope))
        by_score = torch.zeros_like(gs) if first.slope is None else evaluate_first(first.slope)
        return before.view(shape), times(gs_dot, by_score).view(shape)

    def _evaluator(self, graph: object, dot_floats: Tensor | None = None) -> Evaluator:
        return Evaluator(graph, self.functions, self.segment.buffers, self.values, dot_floats)  # type: ignore[arg-type]
