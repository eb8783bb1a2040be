"""One tile of scores with its options: softcap, bias, ALiBi, functions, mask, which keys a query sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.cpu.dsl.control import either, loop, when
from tilewise.cpu.dsl.lanes import any_lane, fold_sums
from tilewise.cpu.dsl.memory import Ptr, Rows, prefetch_row
from tilewise.cpu.dsl.numerics import tanh
from tilewise.cpu.dsl.vector import (
    Operand,
    Scalar,
    Value,
    Var,
    absolute,
    as_int,
    as_kind,
    constants,
    fma,
    int32,
    maximum,
    minimum,
    select,
    splat,
)
from tilewise.cpu.kernels.common.functions import KernelFunctions
from tilewise.cpu.kernels.common.sums import add_row
from tilewise.cpu.kernels.common.tiles import (
    INF,
    Grid,
    Head,
    Scratch,
    Shape,
    load_score_row,
    round_up,
    transpose_rows,
)

BYTES_AT_ONCE = 32  # of a mask


class Scores:
    """What finishes a kernel's scores: mask and bias, which come from memory, and functions.

    `with_slopes`: in a backward; areas for the derivatives of softcap and score function, None where 1.
    """

    def __init__(self, shape: Shape, scratch: Scratch, with_slopes: bool = False) -> None:
        self.shape, self.config = shape, shape.config
        config = self.config
        self.functions = KernelFunctions(shape, scratch, with_slopes) if config.functions else None
        has_score_function = self.functions is not None and self.functions.score is not None
        others = config.has_softcap or config.has_alibi or config.has_mask or config.bias_kind
        self.has_options = bool(has_score_function or others)  # more than a scale and what hides scores
        self.skips_masked = config.has_mask and not config.key_block  # one block is soon done
        self.cap_slope = None
        if with_slopes and config.has_softcap:
            self.cap_slope = scratch.rows(shape.block_k, shape.block_q)
        self.function_slope = self.functions.slopes if self.functions else None
        areas = {"mask": self.config.has_mask, "bias": bool(self.config.bias_kind)}
        self.areas = {
            name: scratch.rows(shape.block_k, shape.block_q) for name, used in areas.items() if used
        }
        self.by_query = scratch.rows(shape.block_q if self.areas else 0, shape.block_k)

    def load(self, head: Head, q0: Scalar, j0: Value, n: Value) -> None:
        """Bring this tile's part of mask and bias into scratch, transposed like the scores."""
        shape, rows, lanes = self.shape, self.by_query, self.shape.lanes
        for name, area in self.areas.items():
            kind = "bool" if name == "mask" else self.config.bias_kind
            step = getattr(head.args, f"{name}_j")  # 1, or 0 where all keys have the same number
            last = head.seqlen_q - 1 - q0
            for i in loop(0, shape.block_q):
                row = head.score_row(name, kind, q0 + minimum(i, last), j0)
                ahead = row[step * shape.block_k]  # asked for, as rows lie far apart: nothing else does
                prefetch_row(ahead, shape.block_k)
                load_score_row(shape, rows.at(i, 0), row, step, n)
            transpose_rows(shape, area, rows, shape.block_q, round_up(n, lanes))

    def add_gradient(self, head: Head, ds_t: Rows, q0: Value, j0: Value, begin: Scalar, end: Value) -> None:
        """dbias[q0:, j0 + begin : j0 + end] += ds, transposed back."""
        shape, rows, lanes, args = self.shape, self.by_query, self.shape.lanes, head.args
        kind = self.config.dbias_kind
        with either(args.dbias_i.equals(0)) as (one_row, own_rows):
            with one_row:
                for j in loop(0, shape.block_k, lanes):
                    keys = [[ds_t.at(j, c)[r, 0].load(lanes) for c in shape.columns()] for r in range(lanes)]
                    rows[0, j].store(fold_sums([sum(of_key[1:], of_key[0]) for of_key in keys]))
                add_row(shape, head.score_row("dbias", kind, q0, j0), rows, begin, end)
            with own_rows:
                transpose_rows(shape, rows, ds_t, shape.block_k, shape.block_q)
                for i in loop(0, minimum(shape.block_q, head.seqlen_q - q0)):
                    row = head.score_row("dbias", kind, q0 + i, j0)
                    add_row(shape, row, rows.at(i, 0), begin, end)

    @property
    def may_hide_tiles(self) -> bool:
        return self.skips_masked or (self.functions is not None and self.functions.has_map)

    def visible(
        self, head: Head, q0: Scalar, queries: int, j0: Value, first: Scalar, n: Value
    ) -> tuple[Any, Value]:
        """The keys j0 + [first, n), without those at both ends that functions hide from so many queries from
        q0 on; none, which is n <= first, where the mask hides all of them."""
        if self.functions is not None and self.functions.has_map:
            first, n = self.functions.visible(head, q0, j0, first, n)
        if self.skips_masked:
            n = select(self._is_unmasked(head, q0, queries, j0, first, n), n, as_int(first))
        return first, n

    def _is_unmasked(self, head: Head, q0: Scalar, queries: int, j0: Value, first: Scalar, n: Value) -> Value:
        """Whether the mask lets one of the queries see one of the keys j0 + [first, n)."""
        found, step = Var(as_int(0)), head.args.mask_j
        for i in loop(0, minimum(queries, head.seqlen_q - q0)):
            with when(found.equals(0)):
                row = head.score_row("mask", "u8", q0 + i, j0)
                found.set(any_byte(row[first * step], select(step.equals(0), 1, n - first)))
        return found > 0

    def at(self, head: Head, q0: Scalar, j0: Value) -> TileScores:
        return TileScores(self, head, q0, j0)


def through(slopes: Rows | None, ds: Value, r: Scalar, c: Scalar) -> Value:
    """Gradients of some scores times the slopes of what made these, which are at [r, c] on; 0 from 0."""
    if slopes is None:
        return ds
    return select(ds.equals(0.0), ds, ds * slopes[r, c].load(ds.type.count))


class TileScores:
    """Applies the options to rows of one score tile."""

    def __init__(self, scores: Scores, head: Head, q0: Scalar, j0: Value) -> None:
        self.scores, self.shape, self.config = scores, scores.shape, scores.config
        shape, args = self.shape, head.args
        self.head, self.j0 = head, j0
        first = q0 + head.offset  # the position of the tile's first query among the keys
        last_key = head.seqlen_k - 1
        lane = [constants(range(shape.lanes)) + c for c in shape.columns()]
        self.lane_lo = [x + int32(first - args.left) for x in lane]
        self.lane_hi = [minimum(x + int32(first + args.right), int32(last_key, shape.lanes)) for x in lane]
        self.inner_lo = first + (shape.block_q - 1) - args.left  # keys [inner_lo, inner_hi] are seen by all
        self.inner_hi = minimum(first + args.right, last_key)
        self.position = [x + int32(first) for x in lane]
        if self.config.has_softcap:
            self.softcap = args.vector("softcap", shape)
        if self.config.has_alibi:
            self.slope = splat(head.negative_slope(), shape.lanes)
        functions = scores.functions
        self.functions = functions.at(shape, head, q0, j0) if functions is not None else None
        self.has_mask_function = functions is not None and functions.mask is not None

    def apply(self, s: Grid, j: Value) -> None:
        """Products q k of keys j0 + [j, j + rows) -> scores, in place; -inf where not visible.

        A backward's areas get their rows from j on: of a softcap 1 - tanh^2, of a score function its slope.
        """
        shape, config, j_key = self.shape, self.config, self.j0 + j
        slope_of_cap, scope = self.scores.cap_slope, None
        for r, row in enumerate(s):
            for v, x in enumerate(row):
                if config.has_softcap:
                    t, slope = tanh(x, shape.exp_degree)
                    if slope_of_cap is not None:
                        slope_of_cap.at(j, v * shape.lanes)[r, 0].store(slope)
                    x.set(t * self.softcap)
                if "bias" in self.scores.areas:
                    x.set(x + self._option("bias", j, r, v))
                if config.has_alibi:
                    distance = as_kind(self.position[v] - int32(j_key + r), shape.kind)
                    x.set(fma(absolute(distance), self.slope, x))
        if self.functions is not None and self.functions.owner.score is not None:
            scope = self.functions.apply_score(s, j)
        if config.has_mask:
            for r, row in enumerate(s):
                for v, x in enumerate(row):
                    x.set(select(self._option("mask", j, r, v) > 0.0, x, -INF))
        with when(self.is_edge(j)):
            self.hide(s, j)
        if scope is not None and self.functions is not None:
            self.functions.report(s, scope, self.functions.owner.unsure_score, self._others(j))

    def of_keys(
        self, products: Any, k: list[Rows], q_t: list[Rows], s_t: Rows, keys: tuple[Value, Value],
        scale: Operand | None,
    ) -> list[Value]:  # fmt: skip
        """s_t = k q_t of the keys [first, n), `finish`ed; their maximum over keys."""
        shape, dim = self.shape, self.config.head_dim
        highest = [Var(shape.constant(-INF)) for _ in shape.columns()]
        for j in loop(*keys, products.height):
            products.multiply(s_t.at(j, 0), [part.at(j, 0) for part in k], q_t, (0, dim), shape.vectors)
            for r in loop(j, j + products.height, shape.rows) if products.height > shape.rows else (j,):
                self.finish(s_t.at(r, 0), r, scale)
                for i in range(shape.rows):
                    for v, c in enumerate(shape.columns()):
                        highest[v].set(maximum(highest[v], s_t.at(r, 0)[i, c].load(shape.lanes)))
        return [Value(x.raw) for x in highest]

    def finish(self, s_t: Rows, j: Value, scale: Operand | None) -> None:
        """Products of the keys [j, j + rows) at s_t -> scores with their options, in place.

        `scale`: None where there are no options and the exponential has the scale, or where queries had it.
        """
        if self.scores.has_options or scale is not None:
            s = self._loaded(s_t, scale)
            self.apply(s, j)
            self._store(s_t, s)
        else:
            with when(self.is_edge(j)):
                s = self._loaded(s_t, None)
                self.hide(s, j)
                self._store(s_t, s)

    def _loaded(self, s_t: Rows, factor: Operand | None) -> Grid:
        shape = self.shape
        cells = [[s_t[r, c].load(shape.lanes) for c in shape.columns()] for r in range(shape.rows)]
        return [[Var(x if factor is None else x * factor) for x in row] for row in cells]

    def _store(self, s_t: Rows, s: Grid) -> None:
        for r, row in enumerate(s):
            for c, x in zip(self.shape.columns(), row):
                s_t[r, c].store(x)

    def is_edge(self, j: Value) -> Value:
        """Whether some query does not see all of the keys j0 + [j, j + rows)."""
        j_key = self.j0 + j
        is_edge = (j_key < self.inner_lo) | (j_key + (self.shape.rows - 1) > self.inner_hi)
        if self.functions is not None and self.has_mask_function:
            is_edge = is_edge | self.functions.is_partial(j)
        return is_edge

    def hide(self, s: Grid, j: Value) -> None:
        """-inf where a query does not see one of the keys j0 + [j, j + rows): window, ends, mask function."""
        for r, row in enumerate(s):
            for v, x in enumerate(row):
                key = int32(self.j0 + j + r, self.shape.lanes)
                is_visible = (key >= self.lane_lo[v]) & (key <= self.lane_hi[v])
                x.set(select(is_visible, x, -INF))
        if self.functions is not None and self.has_mask_function:
            with when(self.functions.is_partial(j)):
                scope = self.functions.hide(s, j)
                self.functions.report(s, scope, self.functions.owner.unsure_mask, self._others(j))

    def _others(self, j: Value) -> Callable[[int, int], Value]:
        """What the options but functions let vector v see of the key j0 + j + r: window, ends, mask."""

        def seen(r: int, v: int) -> Value:
            key = int32(self.j0 + j + r, self.shape.lanes)
            found = (key >= self.lane_lo[v]) & (key <= self.lane_hi[v])
            return found & (self._option("mask", j, r, v) > 0.0) if self.config.has_mask else found

        return seen

    def _option(self, name: str, j: Value, r: int, v: int) -> Value:
        shape = self.shape
        return self.scores.areas[name].at(j, v * shape.lanes)[r, 0].load(shape.lanes)


def any_byte(row: Ptr, n: Value) -> Value:
    """Not 0 where one of n bytes is not."""
    found = Var(as_int(0))
    with either(n < BYTES_AT_ONCE) as (few, many):
        with few:
            for j in loop(0, n):
                found.set(found | row[j].load())
        with many:
            last = n - BYTES_AT_ONCE
            total = Var(row[last].load_bytes(BYTES_AT_ONCE))
            for j in loop(0, last, BYTES_AT_ONCE):
                total.set(total | row[j].load_bytes(BYTES_AT_ONCE))
            found.set(select(any_lane(total.equals(0) ^ 1), 1, found))
    return Value(found.raw)
