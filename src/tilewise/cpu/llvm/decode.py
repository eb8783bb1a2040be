"""Attention of a few queries to many keys, at the speed of memory.

With few queries, query lanes would stay empty: here the head dimension stands in lanes, and the queries of
all heads that share a key head (the rows) read each key once. A work item is one key head and one split of
its keys:

    for each block of 64 keys:  k, v converted                                  [BLOCK_K, head_dim]
        for each row:
            s     = k q (+ softcap, ALiBi, visibility), 16 keys at a time       [BLOCK_K]
            m_new = max(m, max(s));  c = exp(m - m_new);  p = exp(s - m_new)
            l     = c l + sum(p);    acc = c acc + p v                          [head_dim_v]
    partial (m, l, acc) -> memory; the item that finishes a head last merges its splits, in their order

Splits depend on the problem alone and are merged first to last, so the result is the same, bit for bit, on
any number of threads.
"""

from __future__ import annotations

from tilewise.cpu.llvm.arguments import Config
from tilewise.cpu.llvm.compile import Target
from tilewise.cpu.llvm.control import claim, loop, when
from tilewise.cpu.llvm.memory import Ptr, Rows, prefetch
from tilewise.cpu.llvm.numerics import exp, log, quotient, tanh
from tilewise.cpu.llvm.tiles import (
    BLOCK_K,
    INF,
    Arguments,
    Head,
    Scratch,
    Shape,
    lane_chunks,
    load_rows,
    outer_sums,
    store_rows,
)
from tilewise.cpu.llvm.vector import (
    Value,
    Var,
    absolute,
    across,
    fma,
    fold_sums,
    function,
    int32,
    iota,
    maximum,
    minimum,
    select,
    splat,
    to_float,
)

MAX_ROWS = 32  # queries times the query heads of a key head
BLOCK_BYTES = 8 << 10  # of K, and of V: both stay in L1 while all rows use them
AHEAD = 64  # keys between a prefetch and its use


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """LLVM IR of the kernel, and the sizes its caller needs."""
    shape = Shape(config, target)
    with function("decode") as emitter:
        kernel = DecodeKernel(shape, Arguments(emitter))
        kernel.run()
        facts = {"scratch_bytes": kernel.scratch.bytes, "partial_bytes": kernel.partial_width * shape.item}
        return emitter.finish(), facts


class DecodeKernel:
    """The kernel's steps, in the order in which they run."""

    def __init__(self, shape: Shape, args: Arguments) -> None:
        self.shape, self.args, self.config = shape, args, shape.config
        self.scratch = scratch = Scratch(shape, args.thread_scratch())
        lanes = shape.lanes
        row_bytes = max(shape.pad, shape.pad_v) * shape.item
        self.block_k = block_k = max(lanes, min(BLOCK_K, BLOCK_BYTES // row_bytes // lanes * lanes))
        self.k, self.v = scratch.rows(block_k, shape.pad), scratch.rows(block_k, shape.pad_v)
        self.q = scratch.rows(MAX_ROWS, shape.pad)  # scaled
        self.acc = scratch.rows(MAX_ROWS, shape.pad_v)
        self.m, self.l = scratch.rows(MAX_ROWS, lanes), scratch.rows(MAX_ROWS, lanes)  # m: all lanes alike
        self.p = scratch.rows(MAX_ROWS, block_k)  # s until the exponential is taken
        self.m_new, self.correction = scratch.rows(MAX_ROWS, lanes), scratch.rows(MAX_ROWS, lanes)
        self.partial_width = shape.pad_v + 2 * lanes  # acc, m, l of one row

    def run(self) -> None:
        args = self.args
        for item in claim(args.counter, args.items):
            batch_head, split = item // args.splits, item % args.splits
            batch, kv_head = batch_head // args.num_kv_heads, batch_head % args.num_kv_heads
            head = Head(self.shape, args, batch, kv_head * args.group)
            rows = head.seqlen_q * args.group
            self.start(head, rows)
            k0, k1 = head.key_range(0, head.seqlen_q)
            begin = maximum(k0 & -BLOCK_K, split * args.split_keys)
            end = minimum(k1, (split + 1) * args.split_keys)
            for j0 in loop(begin, end, self.block_k):
                n = minimum(end - j0, self.block_k)
                k, v = self.load_keys(head, j0, n, end)
                for r in loop(0, rows):
                    self.score_row(self.query_head(head, r), r, k, j0, n, (rows, end))
                for r in loop(0, rows):
                    self.weigh_row(head, r, j0, n, (rows, end))
                for r in loop(0, rows):
                    self.add_values(r, v, n)
            self.store_partial(item, rows)
            turn = args.ptr("turn", "i64")[batch_head]
            with when(turn.fetch_add(1, "acq_rel").equals(args.splits - 1)):
                turn.store_release(0)  # for the next call
                for r in loop(0, rows):
                    self.merge(self.query_head(head, r), r, batch_head)

    def query_head(self, head: Head, r: Value) -> Head:
        """The query head of row r; its query is r % seqlen_q."""
        return Head(self.shape, self.args, head.batch, head.head + r // head.seqlen_q)

    def start(self, head: Head, rows: Value) -> None:
        shape, factor = self.shape, self.args.vector("q_factor", self.shape)

        def source(r: Value) -> Ptr:
            return self.query_head(head, r).query_rows("q", 0)(r % head.seqlen_q)

        load_rows(shape, self.q, source, rows, rows, self.config.head_dim)
        for r in loop(0, rows):
            for c in loop(0, shape.pad, shape.lanes):
                self.q[r, c].store(self.q[r, c].load(shape.lanes) * factor)
            for c in loop(0, shape.pad_v, shape.lanes):
                self.acc[r, c].store(shape.constant(0.0))
            self.m[r, 0].store(shape.constant(-INF))
            self.l[r, 0].store(shape.constant(0.0))

    def load_keys(self, head: Head, j0: Value, n: Value, end: Value) -> tuple[Rows, Rows]:
        """k and v of the block: converted into scratch, or read where they lie when one row uses them."""
        shape, config = self.shape, self.config
        count = (n + (shape.lanes - 1)) & -shape.lanes
        blocks = []
        for name, area, fill, dim in (
            ("k", self.k, count, config.head_dim),
            ("v", self.v, n, config.head_dim_v),
        ):
            rows = head.key_rows(name, j0)
            if config.is_direct:
                area = Rows(rows(0), getattr(self.args, f"{name}_n"))
            else:
                load_rows(shape, area, rows, n, fill, dim)
            blocks.append(area)
        return blocks[0], blocks[1]

    def fetch(self, head: Head, name: str, r: Value, j: Value, ahead: tuple[Value, Value]) -> None:
        """Ask for row r's share, of `ahead[0]` rows, of the keys that lie AHEAD of j + [0, lanes)."""
        rows, end = ahead
        lanes, dim = self.shape.lanes, self.config.head_dim if name == "k" else self.config.head_dim_v
        source = head.key_rows(name, 0)
        share = (lanes + (rows - 1)) // rows
        for key in loop(share * r, minimum(share * (r + 1), lanes)):
            later = source(minimum(j + key + AHEAD, end - 1))
            for c in range(0, dim, 64 // later.item):
                prefetch(later[c])

    def score_row(
        self, head: Head, r: Value, k: Rows, j0: Value, n: Value, ahead: tuple[Value, Value]
    ) -> None:
        """s of row r against one block of keys, and the new maximum."""
        shape = self.shape
        largest = Var(self.m[r, 0].load(shape.lanes))
        for j in loop(0, n, shape.lanes):
            self.fetch(head, "k", r, j0 + j, ahead)
            s = self.scores(head, r, k, j0, j, n)
            self.p[r, j].store(s)
            largest.set(maximum(largest, s))
        self.m_new[r, 0].store(largest)

    def weigh_row(self, head: Head, r: Value, j0: Value, n: Value, ahead: tuple[Value, Value]) -> None:
        """p = exp(s - m), l and m of row r. (A loop of its own: rows overlap, chains of one row do not.)"""
        shape = self.shape
        m_new = across(self.m_new[r, 0].load(shape.lanes), maximum)
        m_finite = select(m_new.equals(-INF), 0.0, m_new)  # exp(-inf - -inf) would be NaN
        correction = exp(self.m[r, 0].load(shape.lanes) - m_finite, shape.exp_degree)
        l = Var(self.l[r, 0].load(shape.lanes) * correction)
        for j in loop(0, n, shape.lanes):
            self.fetch(head, "v", r, j0 + j, ahead)
            p = exp(self.p[r, j].load(shape.lanes) - m_finite, shape.exp_degree)
            self.p[r, j].store(p)
            l.set(l + p)
        self.m[r, 0].store(m_new)
        self.l[r, 0].store(l)
        self.correction[r, 0].store(correction)

    def add_values(self, r: Value, v: Rows, n: Value) -> None:
        """acc = correction * acc + p v of row r."""
        shape = self.shape
        correction = self.correction[r, 0].load(shape.lanes)
        for c, count, vectors in lane_chunks(shape, shape.pad_v, 8):
            for column in loop(c, c + count * vectors * shape.lanes, vectors * shape.lanes):
                (pv,) = outer_sums(shape, 1, vectors, n, self.p.at(r, 0), v.at(0, column))
                for x, part in enumerate(pv):
                    acc = self.acc[r, column][x * shape.lanes]
                    acc.store(fma(acc.load(shape.lanes), correction, part))

    def scores(self, head: Head, r: Value, k: Rows, j0: Value, j: Value, n: Value) -> Value:
        """Scores of row r for the keys j0 + j + [0, lanes): one key a lane, -inf where not visible."""
        shape, config, args = self.shape, self.config, self.args
        dots = [Var(shape.constant(0.0)) for _ in range(shape.lanes)]
        corner = k.at(j, 0)
        key_rows = [
            k[minimum(j + key, n - 1), 0] if config.is_direct else corner[key, 0]
            for key in range(shape.lanes)
        ]
        for c in loop(0, shape.pad, shape.lanes):
            q = self.q[r, c].load(shape.lanes)
            for key_row, dot in zip(key_rows, dots):
                dot.set(fma(key_row[c].load(shape.lanes), q, dot))
        s = fold_sums(dots)
        if config.has_softcap:
            s = tanh(s, shape.exp_degree)[0] * args.vector("softcap", shape)
        i = r % head.seqlen_q
        key = splat(int32(j0 + j), shape.lanes) + iota(shape.lanes)
        if config.has_alibi:
            distance = to_float(key - splat(int32(i + head.offset), shape.lanes), shape.kind)
            s = fma(absolute(distance), splat(head.negative_slope(), shape.lanes), s)
        k0, k1 = head.key_range(i, i + 1)
        is_visible = (key >= splat(int32(k0), shape.lanes)) & (key < splat(int32(k1), shape.lanes))
        return select(is_visible, s, -INF)

    def partial(self, item: Value, r: Value) -> Rows:
        base = self.args.ptr("partial", self.shape.kind)[(item * MAX_ROWS + r) * self.partial_width]
        return Rows(base, self.partial_width)

    def store_partial(self, item: Value, rows: Value) -> None:
        shape = self.shape
        for r in loop(0, rows):
            partial = self.partial(item, r)
            for c in loop(0, shape.pad_v, shape.lanes):
                partial[0, c].store(self.acc[r, c].load(shape.lanes))
            partial[0, shape.pad_v].store(self.m[r, 0].load(shape.lanes))
            l = self.l[r, 0].load(shape.lanes)
            partial[0, shape.pad_v + shape.lanes].store(across(l, lambda a, b: a + b))

    def merge(self, head: Head, r: Value, batch_head: Value) -> None:
        """out and lse of row r from its splits (and the sink), in the order of the keys."""
        shape, args = self.shape, self.args
        lanes, has_sink = shape.lanes, self.config.has_sinks
        m = Var(head.sink() if has_sink else shape.constant(-INF))
        first = batch_head * args.splits
        for split in loop(0, args.splits):
            m.set(maximum(m, self.partial(first + split, r)[0, shape.pad_v].load(lanes)))
        m_finite = select(m.equals(-INF), 0.0, m)
        l = Var(exp(head.sink() - m_finite, shape.exp_degree) if has_sink else shape.constant(0.0))
        for c in loop(0, shape.pad_v, lanes):
            self.acc[0, c].store(shape.constant(0.0))
        for split in loop(0, args.splits):
            partial = self.partial(first + split, r)
            weight = exp(partial[0, shape.pad_v].load(lanes) - m_finite, shape.exp_degree)
            l.set(fma(partial[0, shape.pad_v + lanes].load(lanes), weight, l))
            for c in loop(0, shape.pad_v, lanes):
                self.acc[0, c].store(fma(partial[0, c].load(lanes), weight, self.acc[0, c].load(lanes)))
        is_empty = l.equals(0.0)
        inverse = select(is_empty, 0.0, 1.0 / l)
        for c in loop(0, shape.pad_v, lanes):
            self.acc[0, c].store(quotient(self.acc[0, c].load(lanes), l, inverse))
        i = r % head.seqlen_q
        self.p[0, 0].store(select(is_empty, m, m + log(l)))
        head.statistic("lse", i).store(self.p[0, 0].load())
        store_rows(shape, head.query_rows("out", i), self.acc, 1, self.config.head_dim_v)
