"""Work items that are splits of the keys, and how their results become one: what decoding kernels share.

A work item is one split of the keys, for one key head or for several whose keys lie side by side; the rows of
a key head are the queries of all heads that share it. Many rows are cut into parts, some heads each, which
count as key heads of an item: they read a block of keys one after the other. An item keeps acc, m and l, and

    partial (m, l, acc) -> memory; the item that finishes last merges the splits, in their order

Splits depend on the problem alone and are merged first to last, so the result is the same, bit for bit, on
any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilewise.cpu.dsl.control import claim, loop, when
from tilewise.cpu.dsl.lanes import first_lane
from tilewise.cpu.dsl.memory import Ptr, Rows
from tilewise.cpu.dsl.numerics import exp, log_sum_exp, quotient, tanh
from tilewise.cpu.dsl.vector import (
    Operand,
    Scalar,
    Value,
    Var,
    absolute,
    as_kind,
    fma,
    maximum,
    minimum,
    select,
    splat,
)
from tilewise.cpu.host.arguments import BLOCK_K
from tilewise.cpu.kernels.common.tiles import (
    INF,
    Arguments,
    Head,
    KeyBlocks,
    Scratch,
    Shape,
    store_rows,
)

ITEM_HEADS = 8  # key heads of a work item at most


@dataclass(frozen=True)
class Block:
    """Keys j0 + [0, n) of one head of a work item whose keys end at `end`."""

    j0: Scalar
    n: Value
    end: Value
    head: Operand


class SplitKernel:
    """The steps around a kernel's own: `reserve`, `load_queries`, `visit_blocks` and `statistics`."""

    key_blocks: KeyBlocks = ((BLOCK_K, BLOCK_K),)
    m_rows: int  # vectors of m, and of l, that a key head takes

    def __init__(self, shape: Shape, args: Arguments) -> None:
        self.shape, self.args, self.config = shape, args, shape.config
        self.scratch = scratch = Scratch(shape, args.thread_scratch())
        self.rows = self.acc_rows = self.config.rows
        lanes = shape.lanes
        areas = self.reserve(scratch)
        self.correction = scratch.rows(self.rows, lanes)
        self.state = [(scratch.rows(ITEM_HEADS * count, width), count) for count, width in areas]
        self.select_head(0)
        self.partial_width = shape.pad_v + 2 * lanes  # acc, m, l of one row

    def facts(self) -> dict[str, int]:
        return {"partial_bytes": self.partial_width * self.shape.item, "item_heads": ITEM_HEADS}

    def reserve(self, scratch: Scratch) -> list[tuple[int, int]]:
        """Room for what comes in; how many rows of what width a head's q, acc, m and l take."""
        raise NotImplementedError

    def load_queries(self, head: Head, rows: Value) -> None:
        """q of all rows."""
        raise NotImplementedError

    def visit_blocks(self, batch: Value, part: Value, begin: Value, end: Value) -> None:
        """acc, m and l of all heads of an item, from the keys [begin, end)."""
        raise NotImplementedError

    def statistics(self, r: Value) -> tuple[Value, Value]:
        """m and l of row r, in all lanes."""
        raise NotImplementedError

    def select_head(self, h: Scalar) -> None:
        """From here on it is about key head h of the item: its q, acc, m and l."""
        self.q, self.acc, self.m, self.l = (area.at(h * count, 0) for area, count in self.state)

    def run(self) -> None:
        args = self.args
        for item in claim(args.counter, args.items):
            first, count = item // args.splits, args.num_kv_heads * args.parts
            batch, part = first * args.item_heads // count, first * args.item_heads % count
            head = self.head_of_part(batch, part)
            with when(head.seqlen_q > 0):  # as of some packed sequences
                self.visit_item(item, head, part)

    def visit_item(self, item: Value, head: Head, part: Value) -> None:
        """Its parts begin with `part`, whose first head is given."""
        args, batch = self.args, head.batch
        heads, first, split = args.item_heads, item // args.splits, item % args.splits
        for _, own in self.each_head(batch, part):
            self.start(own, self.rows_of(own))
        k0, k1 = head.key_range(0, head.seqlen_q)
        begin = maximum(k0 & -BLOCK_K, split * args.split_keys)
        end = minimum(k1, (split + 1) * args.split_keys)
        self.visit_blocks(batch, part, begin, end)
        for h, own in self.each_head(batch, part):
            self.store_partial(item * heads + h, self.rows_of(own))
        ticket = args.ptr("ticket", "i64")[first]
        is_last = ticket.fetch_add(1, "acq_rel").equals(args.splits - 1)
        with when(args.splits.equals(1) | is_last):  # the ticket of a single split may hold anything
            for h, own in self.each_head(batch, part):
                for r in loop(0, self.rows_of(own)):
                    self.merge(self.query_head(own, r), r, first * args.splits * heads + h)

    def each_head(self, batch: Value, part: Value) -> Iterator[tuple[Value, Head]]:
        """The first heads of the parts of an item, from `part` on; a part's state is at hand meanwhile."""
        for h in loop(0, self.args.item_heads):
            self.select_head(h)
            yield h, self.head_of_part(batch, part + h)

    def head_of_part(self, batch: Value, part: Value) -> Head:
        """The first head of a part of a key head's rows."""
        args = self.args
        first = part // args.parts * args.group + part % args.parts * args.part_heads
        return Head(self.shape, args, batch, first)

    def rows_of(self, head: Head) -> Value:
        """Rows of the part that starts with a head: the last one may have fewer."""
        left = self.args.group - head.head % self.args.group
        return head.seqlen_q * minimum(self.args.part_heads, left)

    def query_head(self, head: Head, r: Value) -> Head:
        """The query head of row r; its query is r % seqlen_q."""
        return Head(self.shape, self.args, head.batch, head.head + r // head.seqlen_q)

    def start(self, head: Head, rows: Value) -> None:
        shape = self.shape
        self.load_queries(head, rows)
        for r in loop(0, self.acc_rows):
            for c in loop(0, shape.pad_v, shape.lanes):
                self.acc[r, c].store(shape.constant(0.0))
        for r in loop(0, self.m_rows):
            self.m[r, 0].store(shape.constant(-INF))
            self.l[r, 0].store(shape.constant(0.0))

    def query_rows(self, head: Head, name: str) -> Callable[[Value], Ptr]:
        """Where row r of q, out, do or dq is."""
        return lambda r: self.query_head(head, r).query_rows(name, 0)(r % head.seqlen_q)

    def slope_of(self, head: Head) -> Value | None:
        return splat(head.negative_slope(), self.shape.lanes) if self.config.has_alibi else None

    def with_options(
        self, s: Value, distance: Value, slope: Value | None, bias: Value | None = None
    ) -> tuple[Value, Value | None]:
        """Scores from products q k, so far apart, with ALiBi's slope; the softcap's derivative."""
        shape, config, args = self.shape, self.config, self.args
        derivative = None
        if config.has_softcap:
            s, derivative = tanh(s, shape.exp_degree)
            s = s * args.vector("softcap", shape)
        if bias is not None:
            s = s + bias
        if config.has_alibi:
            assert slope is not None
            s = fma(absolute(as_kind(distance, shape.kind)), slope, s)
        return s, derivative

    def partial(self, item: Value, r: Value) -> Rows:
        base = self.args.ptr("partial", self.shape.kind)[(item * self.rows + r) * self.partial_width]
        return Rows(base, self.partial_width)

    def store_partial(self, item: Value, rows: Value) -> None:
        shape = self.shape
        for r in loop(0, rows):
            partial = self.partial(item, r)
            self.store_sums(partial, r)
            m, l = self.statistics(r)
            partial[0, shape.pad_v].store(m)
            partial[0, shape.pad_v + shape.lanes].store(l)

    def store_sums(self, partial: Rows, r: Value) -> None:
        """acc of row r."""
        for c in loop(0, self.shape.pad_v, self.shape.lanes):
            partial[0, c].store(self.acc[r, c].load(self.shape.lanes))

    def merge(self, head: Head, r: Value, first: Value) -> None:
        """out and lse of row r from its splits (and the sink), in the order of the keys."""
        shape, args = self.shape, self.args
        lanes, has_sink = shape.lanes, self.config.has_sinks
        m = Var(head.sink() if has_sink else shape.constant(-INF))
        for split in loop(0, args.splits):
            m.set(maximum(m, self.partial(first + split * args.item_heads, r)[0, shape.pad_v].load(lanes)))
        m_finite = select(m.equals(-INF), 0.0, m)
        l = Var(exp(head.sink() - m_finite, shape.exp_degree) if has_sink else shape.constant(0.0))
        for c in loop(0, shape.pad_v, lanes):
            self.acc[0, c].store(shape.constant(0.0))
        for split in loop(0, args.splits):
            partial = self.partial(first + split * args.item_heads, r)
            weight = exp(partial[0, shape.pad_v].load(lanes) - m_finite, shape.exp_degree)
            l.set(fma(partial[0, shape.pad_v + lanes].load(lanes), weight, l))
            for c in loop(0, shape.pad_v, lanes):
                self.acc[0, c].store(fma(partial[0, c].load(lanes), weight, self.acc[0, c].load(lanes)))
        is_empty = l.equals(0.0)
        inverse = select(is_empty, 0.0, 1.0 / l)
        for c in loop(0, shape.pad_v, lanes):
            self.acc[0, c].store(quotient(self.acc[0, c].load(lanes), l, inverse))
        i = r % head.seqlen_q
        lse, residual = log_sum_exp(m, l)
        head.store_lse(i, first_lane(lse), first_lane(residual))
        store_rows(shape, head.query_rows("out", i), self.acc, 1, self.config.head_dim_v)
