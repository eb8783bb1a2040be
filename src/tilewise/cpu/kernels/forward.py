"""Forward attention on the CPU: O = softmax(S) V tile by tile, as machine code.

A work item is one head and `tiles` tiles of queries. Blocks of keys are converted once, some at a time, and
all tiles of the item use them:

    for each tile:  q_t = scale * q, transposed;  m, l, acc_t = -inf, 0, 0
    for some blocks of keys:                                  k, v^T converted   [load_k, head_dim]
        for each tile, and each block:
            s_t   = k q_t (+ softcap, bias, ALiBi, mask)                         [block_k, block_q]
            m_new = max(m, max over keys of s_t);  c = exp(m - m_new);  p_t = exp(s_t - m_new)
            l     = c l + sum over keys of p_t;    (p_t = 0 where dropped)
            acc_t = c acc_t + v^T p_t                                            [head_dim_v, block_q]
    for each tile:  out = acc_t^T / l;  lse = m + log l

`common.products` multiplies, in vectors or in bfloat16, to which P is rounded then. Scores without options
leave the scale of bfloat16's products to the exponential.

Statistics of the weights that are wanted come with it: the largest score, and the entropy

            e     = c (e + l (m - m_new)) + sum over keys of p_t (s_t - m_new)   of the old l
    entropy = log l - e / l                                              of which no term is negative

The block grid starts at key 0 for every item, so a tile's result depends neither on the number of tiles
in its item nor on which thread computes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tilewise.cpu.dsl.bf16_products import tile_registers
from tilewise.cpu.dsl.control import claim, loop, when
from tilewise.cpu.dsl.memory import Ptr
from tilewise.cpu.dsl.numerics import FLOAT32_DEGREE, exp, log, log_sum_exp, quotient
from tilewise.cpu.dsl.vector import Operand, Scalar, Value, Var, as_int, fma, maximum, minimum, select
from tilewise.cpu.kernels.common.dropout import GROUP, Dropout, TileDropout
from tilewise.cpu.kernels.common.products import Matrix, Products, at, products_of
from tilewise.cpu.kernels.common.scores import Scores
from tilewise.cpu.kernels.common.sums import fill_zero
from tilewise.cpu.kernels.common.tiles import (
    INF,
    Arguments,
    Head,
    KeyBlocks,
    Scratch,
    Shape,
    fitting,
    round_up,
    store_rows,
    transpose_rows,
)

LEAST = 1e4  # the exponential of -LEAST is 0 in every type
Sums = tuple[list[Var], list[Var]]


class Sharing(NamedTuple):
    """Of converted keys and values."""

    most_tiles: int  # that go through the same ones
    converting: int  # costs as much as so many queries
    l2_share: int  # the part of the L2 cache that is converted at a time; 0: one block


SHARING = Sharing(16, 8, 0), Sharing(32, 60, 4), Sharing(32, 24, 8)  # by terms: 0, 1, several


class Tile:
    """One tile of queries; its state stays in scratch between blocks of keys."""

    def __init__(self, products: Products, shape: Shape, base: Ptr, q0: Scalar) -> None:
        self.q0 = q0  # its first query
        self.scratch = Scratch(shape, base)
        self.q_t = products.right(self.scratch, shape.pad, shape.block_q)
        self.reserve(shape)

    def reserve(self, shape: Shape) -> None:
        self.acc_t = self.scratch.rows(shape.pad_v, shape.block_q)  # running output, not normalized
        self.m = self.scratch.rows(1, shape.block_q)  # running maximum
        self.l = self.scratch.rows(1, shape.block_q)  # running sum of exponentials
        of_weights = [self.scratch.rows(1, shape.block_q) for _ in shape.config.statistics]
        self.found = dict(zip(shape.config.statistics, of_weights))


class ForwardKernel:
    """The kernel's steps, in the order in which they run."""

    # Of large heads in bfloat16 acc comes and goes less often; of small ones P and s_t stay in L1.
    key_blocks: KeyBlocks = (128, 128), (128, 256), (64, 128), (64, 256)
    make_tile = Tile

    def __init__(self, shape: Shape, args: Arguments) -> None:
        self.shape, self.args = shape, args
        self.has_entropy = "entropy" in shape.config.statistics
        if self.has_entropy:
            shape.exp_degree = max(shape.exp_degree, FLOAT32_DEGREE)  # it stays float32 of 16-bit inputs too
        self.sharing = SHARING[min(shape.config.terms, 2)]
        self.scratch = scratch = Scratch(shape, args.thread_scratch())
        self.products = products_of(shape, args, scratch)
        self.q = self.products.left(scratch, shape.block_q, shape.pad)
        self.reserve(scratch)
        self.scores = Scores(shape, scratch)
        self.scale, self.rest = self.products.scales(self.scores.has_options)
        self.dropout = Dropout(shape, args) if shape.config.has_dropout else None
        self.tile_bytes = self.make_tile(self.products, shape, scratch.base, 0).scratch.bytes

    def facts(self) -> dict[str, int]:
        return {
            "tile_bytes": self.tile_bytes,
            "most_tiles": self.sharing.most_tiles,
            "converting": self.sharing.converting,
        }

    def reserve(self, scratch: Scratch) -> None:
        """Room for the keys that are converted together, one block's weights, and what leaves."""
        shape, products, blocks = self.shape, self.products, 1
        if share := self.sharing.l2_share:
            key_bytes = 2 * shape.config.terms * (shape.pad + shape.pad_v)
            blocks = max(1, shape.target.l2_bytes // share // (key_bytes * shape.block_k))
        self.load_k = blocks * shape.block_k
        self.k = products.left(scratch, self.load_k, shape.pad)
        self.v_t = products.left_t(scratch, blocks * shape.pad_v, shape.block_k)
        self.s_t = scratch.rows(shape.block_k, shape.block_q)
        self.p_t = products.over(self.s_t, scratch, shape.block_k)
        self.rows = scratch.rows(round_up(shape.block_q, shape.rows), shape.pad_v)  # out leaving
        self.residual = scratch.rows(1, shape.block_q)

    def run(self) -> None:
        with tile_registers(self.scratch):
            self.visit_items()

    def visit_items(self) -> None:
        args = self.args
        heads = args.items // args.chunks
        for item in claim(args.counter, args.items):
            batch_head, chunk = item % heads, args.chunks - 1 - item // heads  # longest first
            self.visit(self.head_of(batch_head), *self.queries(chunk))

    def head_of(self, batch_head: Value) -> Head:
        args = self.args
        return Head(self.shape, args, batch_head // args.num_heads, batch_head % args.num_heads)

    def queries(self, chunk: Value) -> tuple[Value, Value]:
        """Those of a chunk of `tiles` tiles, which a sequence may be too short for."""
        rows = self.args.tiles * self.shape.block_q
        return chunk * rows, (chunk + 1) * rows

    def visit(self, head: Head, q0: Value, q1: Value) -> None:
        """The queries [q0, q1) that there are: some tiles, of which q0 starts one."""
        block_q, load_k = self.shape.block_q, self.load_k
        q1 = minimum(head.seqlen_q, q1)
        with when(q0 < q1):
            tiles = (q1 - q0 + (block_q - 1)) // block_q
            for t in loop(0, tiles):
                self.start(head, self.tile(q0, t))
            k0, k1 = head.key_range(q0, q1)
            for j0 in loop(k0 & -load_k, k1, load_k):
                n = self.visible(head, q0, tiles, j0, minimum(k1 - j0, load_k))
                with when(n > 0):
                    self.load_keys(head, j0, n)
                    for t in loop(0, tiles):
                        tile = self.tile(q0, t)
                        for kernel in fitting(self, head, tile.q0):
                            kernel.attend(head, tile, j0)
                    self.leave_keys(head, j0, n)
            for t in loop(0, tiles):
                self.finish(head, self.tile(q0, t))

    def leave_keys(self, head: Head, j0: Value, n: Value) -> None:
        """What is to be done when all tiles have seen the keys j0 + [0, n)."""

    def visible(self, head: Head, q0: Value, tiles: Value, j0: Value, n: Value) -> Value:
        """How many of the keys j0 + [0, n) to bring for an item's tiles: 0 if all are hidden from all."""
        if not self.scores.may_hide_tiles:
            return n
        last, block_q = Var(as_int(0)), self.shape.block_q
        for t in loop(0, tiles):
            begin, end = self.scores.visible(head, q0 + t * block_q, block_q, j0, as_int(0), n)
            last.set(select(begin < end, maximum(last, end), last))
        return Value(last.raw)

    def tile(self, q0: Value, t: Value) -> Tile:
        base = self.scratch.base[self.scratch.bytes][t * self.tile_bytes]
        return self.make_tile(self.products, self.shape, base, q0 + t * self.shape.block_q)

    def start(self, head: Head, tile: Tile) -> None:
        """q_t; m, l, acc = -inf, 0, 0, or the state after the sink."""
        shape = self.shape
        self.load_queries(head, tile)
        for c in shape.columns():
            tile.m[0, c].store(head.sink() if shape.config.has_sinks else shape.constant(-INF))
            tile.l[0, c].store(shape.constant(1.0 if shape.config.has_sinks else 0.0))
            for name, area in tile.found.items():
                area[0, c].store(shape.constant(-INF if name == "row_max" else 0.0))
        fill_zero(shape, tile.acc_t, shape.pad_v)

    def load_queries(self, head: Head, tile: Tile) -> None:
        source, n = head.query_rows("q", tile.q0), head.seqlen_q - tile.q0
        self.products.take_queries(tile.q_t, self.q, source, n, self.shape.block_q)

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        """k and v^T, block by block, of the keys j0 + [0, n)."""
        shape, count = self.shape, round_up(n, self.products.height)
        self.products.take(self.k, head.key_rows("k", j0), n, count, shape.config.head_dim)
        for j in self.blocks(0, n):
            rest = minimum(n - j, shape.block_k)
            self.products.take_t(self.values(j), head.key_rows("v", j0 + j), rest, shape.config.head_dim_v)

    def blocks(self, first: Scalar, last: Scalar) -> Iterable[Scalar]:
        """Where the blocks start, of those that are converted together, between two keys of them."""
        return loop(first, last, self.shape.block_k) if self.load_k > self.shape.block_k else (0,)

    def values(self, j: Scalar) -> Matrix:
        """v^T of the block at key j of those that are converted."""
        return at(self.v_t, j // self.shape.block_k * self.shape.pad_v, 0)

    def attend(self, head: Head, tile: Tile, j0: Value) -> None:
        """Fold the converted keys that the tile can see into its running softmax, block by block."""
        shape = self.shape
        k0, k1 = head.key_range(tile.q0, minimum(tile.q0 + shape.block_q, head.seqlen_q))
        first, last = maximum(0, k0 - j0) & -shape.block_k, minimum(k1 - j0, self.load_k)
        for j in self.blocks(first, last):
            begin = maximum(0, k0 - (j0 + j)) & -self.products.height
            end = minimum(k1 - (j0 + j), shape.block_k)
            begin, end = self.scores.visible(head, tile.q0, shape.block_q, j0 + j, begin, end)
            with when(begin < end):
                self.attend_block(head, tile, j0, j, (begin, end))

    def attend_block(self, head: Head, tile: Tile, j0: Value, j: Scalar, keys: tuple[Value, Value]) -> None:
        """Fold some keys of the block at j0 + j into the tile's running softmax."""
        shape = self.shape
        m = [tile.m[0, c].load(shape.lanes) for c in shape.columns()]
        self.scores.load(head, tile.q0, j0 + j, keys[1])
        scores = self.scores.at(head, tile.q0, j0 + j)
        highest = scores.of_keys(self.products, at(self.k, j, 0), tile.q_t, self.s_t, keys, self.scale)
        highest = [x if self.rest is None else x * self.rest for x in highest]
        m_new = [maximum(old, x) for old, x in zip(m, highest)]
        m_finite = [select(x.equals(-INF), 0.0, x) for x in m_new]  # exp(-inf - -inf) would be NaN
        correction = [exp(old - new, shape.exp_degree) for old, new in zip(m, m_finite)]
        dropout = self.dropout.at(shape, head, tile.q0, j0 + j) if self.dropout else None
        l, e = self.weigh(m_finite, dropout, *keys)
        self.watch(tile, m, m_finite, highest, correction, e)
        for v, c in enumerate(shape.columns()):
            tile.m[0, c].store(m_new[v])
            tile.l[0, c].store(fma(tile.l[0, c].load(shape.lanes), correction[v], l[v]))
        self.add_values(head, tile, self.values(j), correction, *keys)

    def watch(
        self, tile: Tile, m: Sequence[Operand], m_new: Sequence[Operand],
        highest: Sequence[Operand], correction: Sequence[Operand], e: Sequence[Operand],
    ) -> None:  # fmt: skip
        """Fold a block's largest scores and sums of p (s - m_new) into the tile's, before l changes."""
        for v, c in enumerate(self.shape.columns()):
            old = {name: area[0, c].load(self.shape.lanes) for name, area in tile.found.items()}
            if "row_max" in old:
                tile.found["row_max"][0, c].store(maximum(old["row_max"], highest[v]))
            if "entropy" in old:
                step = select(m[v].equals(-INF), 0.0, m[v] - m_new[v])
                before = fma(tile.l[0, c].load(self.shape.lanes), step, old["entropy"])
                tile.found["entropy"][0, c].store(fma(before, correction[v], e[v]))

    def weigh(self, m: list[Value], dropout: TileDropout | None, first: Value, n: Value) -> Sums:
        """p_t = exp(s_t - m), and the block's sums over keys: one chain over all keys would err more.

        The sums are of all weights, and for the entropy of p times what p is the exponential of; then those
        that are dropped become 0.
        """
        shape, products = self.shape, self.products
        l, e = ([Var(shape.constant(0.0)) for _ in shape.columns()] for _ in range(2))
        for j in loop(first, round_up(n, products.height), GROUP):  # beyond n: p = 0
            kept = dropout and dropout.kept(j, GROUP)
            for v, c in enumerate(shape.columns()):
                s = [self.s_t.at(j, c)[r, 0].load(shape.lanes) for r in range(GROUP)]
                # rounded as m was, or beside scores over 1e9 the difference would be noise
                x = [s_r - m[v] if self.rest is None else s_r * self.rest - m[v] for s_r in s]
                p = [products.power(x_r) for x_r in x]
                l[v].set(l[v] + ((p[0] + p[1]) + (p[2] + p[3])))
                if self.has_entropy:
                    for p_r, x_r in zip(p, x):
                        e[v].set(weighted(p_r, x_r, e[v]))
                if kept:
                    p = [select(masks[v], p_r, 0.0) for masks, p_r in zip(kept, p)]
                products.put(self.p_t, j, c, p)
        return l, e

    def add_values(
        self, head: Head, tile: Tile, v_t: Matrix, correction: list[Value], first: Value, n: Value
    ) -> None:
        """acc_t = correction * acc_t + v^T p_t over the keys [first, n) of the block."""
        shape, products, height = self.shape, self.products, self.products.height
        for d in loop(0, round_up(shape.config.head_dim_v, height), height):
            acc_t, rows = tile.acc_t.at(d, 0), at(v_t, d, 0)
            products.add(acc_t, rows, self.p_t, (first, n), shape.vectors, correction)

    def divide(self, tile: Tile, c: int) -> tuple[Value, Value]:
        """What the output of the queries from c on is divided by, and its inverse, or 0 for 0."""
        l: Value = tile.l[0, c].load(self.shape.lanes)
        if self.dropout is not None:
            l = l / self.dropout.inverse_keep
        return l, select(l.equals(0.0), 0.0, 1.0 / l)

    def finish(self, head: Head, tile: Tile) -> None:
        """out = acc / l and lse; a query that saw no key has l = 0 and gets out 0, lse -inf."""
        shape = self.shape
        n = minimum(head.seqlen_q - tile.q0, shape.block_q)
        for c in shape.columns():
            l, m = tile.l[0, c].load(shape.lanes), tile.m[0, c].load(shape.lanes)
            if self.has_entropy:  # 0 for a query that saw no key
                e = tile.found["entropy"][0, c]
                entropy = maximum(0.0, log(l)[0] - e.load(shape.lanes) / l)
                e.store(select(l.equals(0.0), 0.0, entropy))
            lse, residual = log_sum_exp(m, l)
            tile.m[0, c].store(lse)
            self.residual[0, c].store(residual)
        for i in loop(0, n):
            head.store_lse(tile.q0 + i, tile.m[0, i].load(), self.residual[0, i].load())
            for name, area in tile.found.items():
                head.statistic(name, tile.q0 + i).store(area[0, i].load())
        self.write_out(head, tile, n)

    def write_out(self, head: Head, tile: Tile, n: Value) -> None:
        shape = self.shape
        for c in shape.columns():
            l, inverse = self.divide(tile, c)
            for d in loop(0, shape.pad_v):
                acc = tile.acc_t[d, c]
                acc.store(quotient(acc.load(shape.lanes), l, inverse))
        transpose_rows(shape, self.rows, tile.acc_t, shape.pad_v, shape.block_q)
        store_rows(shape, head.query_rows("out", tile.q0), self.rows, n, shape.config.head_dim_v)


def weighted(p: Operand, x: Operand, total: Operand) -> Value:
    """total + p x, where p is the exponential of x; 0 is added where x is -inf."""
    return fma(p, maximum(-LEAST, x), total)
