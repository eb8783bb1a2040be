"""Forward attention on the CPU: O = softmax(S) V tile by tile, as machine code.

A work item is one head and `tiles` tiles of queries. For each block of keys, K and V are converted once and
all tiles of the item use them:

    for each tile:  q_t = scale * q, transposed;  m, l, acc_t = -inf, 0, 0
    for each block of keys:                                   k, v converted     [block_k, head_dim]
        for each tile:
            s_t   = k q_t (+ softcap, bias, ALiBi, mask)                         [block_k, block_q]
            m_new = max(m, max over keys of s_t);  c = exp(m - m_new);  p_t = exp(s_t - m_new)
            l     = c l + sum over keys of p_t;    (p_t = 0 where dropped)
            acc_t = c acc_t + v^T p_t                                            [head_dim_v, block_q]
    for each tile:  out = acc_t^T / l;  lse = m + log l

Statistics of the weights that are wanted come with it: the largest score, and the entropy

            e     = c (e + l (m - m_new)) + sum over keys of p_t (s_t - m_new)   of the old l
    entropy = log l - e / l                                              of which no term is negative

The block grid starts at key 0 for every item, so a tile's result depends neither on the number of tiles
in its item nor on which thread computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.cpu.dsl.control import claim, loop, when
from tilewise.cpu.dsl.memory import Ptr
from tilewise.cpu.dsl.numerics import FLOAT32_DEGREE, exp, log, log_sum_exp, quotient
from tilewise.cpu.dsl.vector import Operand, Scalar, Value, Var, as_int, fma, like, maximum, minimum, select
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.host.compile import Target
from tilewise.cpu.kernels.common.dropout import GROUP, Dropout, TileDropout
from tilewise.cpu.kernels.common.scores import Scores
from tilewise.cpu.kernels.common.tiles import (
    INF,
    Arguments,
    Head,
    KeyBlocks,
    Scratch,
    Shape,
    build_kernel,
    fitting,
    load_rows,
    narrowed,
    outer_sums,
    round_up,
    store_rows,
    transpose_rows,
)

LEAST = 1e4  # the exponential of -LEAST is 0 in every type
Sums = tuple[list[Var], list[Var]]


class Tile:
    """One tile of queries; its state stays in scratch between blocks of keys."""

    def __init__(self, shape: Shape, base: Ptr, q0: Scalar) -> None:
        self.q0 = q0  # its first query
        self.scratch = Scratch(shape, base)
        height = shape.config.terms * shape.pad // 2 if shape.config.has_bf16_products else shape.pad
        self.q_t = self.scratch.rows(height, shape.block_q)  # scaled, or pairs as they are
        self.acc_t = self.scratch.rows(shape.pad_v, shape.block_q)  # running output, not normalized
        self.m = self.scratch.rows(1, shape.block_q)  # running maximum
        self.l = self.scratch.rows(1, shape.block_q)  # running sum of exponentials
        of_weights = [self.scratch.rows(1, shape.block_q) for _ in shape.config.statistics]
        self.found = dict(zip(shape.config.statistics, of_weights))


class ForwardKernel:
    """The kernel's steps, in the order in which they run."""

    name = "forward"
    make_tile: type[Tile] = Tile
    key_blocks: KeyBlocks = ((128, 128),)
    most_tiles = 16  # tiles that share one converted K/V block
    converting = 8  # K and V costs as much as so many queries
    unit = 1.0  # of scores and their maximum
    k: Any  # Rows; with tile registers, lists of their terms
    v: Any = None  # nothing where only scores are wanted
    p_t: Any

    def __init__(self, shape: Shape, args: Arguments) -> None:
        self.shape, self.args = shape, args
        self.has_entropy = "entropy" in shape.config.statistics
        if self.has_entropy:
            shape.exp_degree = max(shape.exp_degree, FLOAT32_DEGREE)  # it stays float32 of 16-bit inputs too
        self.key_group = shape.rows  # keys whose scores are computed together
        self.load_k = shape.block_k  # keys that are converted together
        self.scratch = scratch = Scratch(shape, args.thread_scratch())
        self.reserve(scratch)
        height = round_up(shape.block_q, shape.rows)
        self.rows = scratch.rows(height, max(shape.pad, shape.pad_v))  # q coming in, out leaving
        self.residual = scratch.rows(1, shape.block_q)
        self.scores = Scores(shape, scratch)
        self.dropout = Dropout(shape, args) if shape.config.has_dropout else None
        self.narrow = narrowed(self, 2) if shape.vectors == 3 else None
        self.tile_bytes = self.make_tile(shape, scratch.base, 0).scratch.bytes

    def facts(self) -> dict[str, int]:
        return {
            "tile_bytes": self.tile_bytes, "most_tiles": self.most_tiles, "converting": self.converting,
        }  # fmt: skip

    def reserve(self, scratch: Scratch) -> None:
        """Room for one block of keys."""
        shape = self.shape
        self.k = scratch.rows(shape.block_k, shape.pad)
        self.v = scratch.rows(shape.block_k, shape.pad_v)
        self.p_t = scratch.rows(shape.block_k, shape.block_q)  # s_t until the exponential is taken

    def run(self) -> None:
        args, block_q, load_k = self.args, self.shape.block_q, self.load_k
        heads = args.items // args.chunks
        for item in claim(args.counter, args.items):
            batch_head, chunk = item % heads, args.chunks - 1 - item // heads  # longest first
            head = Head(self.shape, args, batch_head // args.num_heads, batch_head % args.num_heads)
            q0 = chunk * args.tiles * block_q
            q1 = minimum(head.seqlen_q, q0 + args.tiles * block_q)
            tiles = (maximum(0, q1 - q0) + (block_q - 1)) // block_q
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
            for t in loop(0, tiles):
                self.finish(head, self.tile(q0, t))

    def visible(self, head: Head, q0: Value, tiles: Value, j0: Value, n: Value) -> Value:
        """How many of the keys j0 + [0, n) to bring for an item's tiles: 0 if all are hidden from all."""
        if not self.scores.may_hide_tiles:
            return n
        last, block_q = Var(as_int(0)), self.shape.block_q
        for t in loop(0, tiles):
            begin, end = self.scores.visible(head, q0 + t * block_q, block_q, j0, as_int(0), n)
            last.set(select(begin < end, maximum(last, end), last))
        return Value(last.raw)

    def tile(self, q0: Value, t: Value) -> Any:
        base = self.scratch.base[self.scratch.bytes][t * self.tile_bytes]
        return self.make_tile(self.shape, base, q0 + t * self.shape.block_q)

    def start(self, head: Head, tile: Tile) -> None:
        """q_t; m, l, acc = -inf, 0, 0, or the state after the sink."""
        shape = self.shape
        self.load_queries(head, tile)
        for c in shape.columns():
            tile.m[0, c].store(head.sink() if shape.config.has_sinks else shape.constant(-INF))
            tile.l[0, c].store(shape.constant(1.0 if shape.config.has_sinks else 0.0))
            for name, area in tile.found.items():
                area[0, c].store(shape.constant(-INF if name == "row_max" else 0.0))
        for d in loop(0, shape.pad_v):
            for c in shape.columns():
                tile.acc_t[d, c].store(shape.constant(0.0))

    def load_queries(self, head: Head, tile: Tile) -> None:
        """Transpose and scale the queries."""
        shape, n = self.shape, head.seqlen_q - tile.q0
        load_rows(shape, self.rows, head.query_rows("q", tile.q0), n, shape.block_q, shape.config.head_dim)
        factor = self.args.vector("q_factor", shape)
        transpose_rows(shape, tile.q_t, self.rows, shape.block_q, shape.pad, factor)

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        shape, config = self.shape, self.shape.config
        count = (n + (shape.rows - 1)) & -shape.rows
        load_rows(shape, self.k, head.key_rows("k", j0), n, count, config.head_dim)
        if self.v is not None:
            load_rows(shape, self.v, head.key_rows("v", j0), n, n, config.head_dim_v)

    def attend(self, head: Head, tile: Tile, j0: Value) -> None:
        """Fold the keys of one block that the tile can see into its running softmax."""
        shape = self.shape
        k0, k1 = head.key_range(tile.q0, minimum(tile.q0 + shape.block_q, head.seqlen_q))
        first, n = maximum(0, k0 - j0) & -self.key_group, minimum(k1 - j0, shape.block_k)
        first, n = self.scores.visible(head, tile.q0, shape.block_q, j0, first, n)
        with when(first < n):
            m = [tile.m[0, c].load(shape.lanes) for c in shape.columns()]
            highest = self.score_keys(head, tile, j0, first, n)
            m_new = [maximum(old, x) for old, x in zip(m, highest)]
            m_finite = [select(x.equals(-INF), 0.0, x) for x in m_new]  # exp(-inf - -inf) would be NaN
            correction = [exp((old - new) * self.unit, shape.exp_degree) for old, new in zip(m, m_finite)]
            dropout = self.dropout.at(shape, head, tile.q0, j0) if self.dropout else None
            l, e = self.weigh(m_finite, dropout, first, n)
            self.watch(tile, m, m_finite, highest, correction, e)
            for v, c in enumerate(shape.columns()):
                tile.m[0, c].store(m_new[v])
                tile.l[0, c].store(fma(tile.l[0, c].load(shape.lanes), correction[v], l[v]))
            self.add_values(head, tile, correction, first, n)

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
                step = select(m[v].equals(-INF), 0.0, (m[v] - m_new[v]) * self.unit)
                before = fma(tile.l[0, c].load(self.shape.lanes), step, old["entropy"])
                tile.found["entropy"][0, c].store(fma(before, correction[v], e[v] * self.unit))

    def score_keys(self, head: Head, tile: Tile, j0: Value, first: Value, n: Value) -> Sequence[Operand]:
        """s_t = k q_t with every option, into p_t; their maximum over keys."""
        shape, head_dim = self.shape, self.shape.config.head_dim
        self.scores.load(head, tile.q0, j0, n)
        scores = self.scores.at(head, tile.q0, j0)
        highest = [Var(shape.constant(-INF)) for _ in shape.columns()]
        for j in loop(first, n, shape.rows):
            s = outer_sums(shape, shape.rows, shape.vectors, head_dim, self.k.at(j, 0), tile.q_t)
            scores.apply(s, j)
            for r in range(shape.rows):
                for v, c in enumerate(shape.columns()):
                    self.p_t.at(j, c)[r, 0].store(s[r][v])
                    highest[v].set(maximum(highest[v], s[r][v]))
        return highest

    def weigh(self, m: list[Value], dropout: TileDropout | None, first: Value, n: Value) -> Sums:
        """p_t = exp(s_t - m), and the block's sums over keys: one chain over all keys would err more.

        The sums are of all weights; then those that are dropped become 0.
        """
        shape = self.shape
        l, e = self.new_sums()
        for j in loop(first, n, GROUP):  # what is beyond n is hidden: p = 0
            for v, c in enumerate(shape.columns()):
                cells = [self.p_t.at(j, c)[r, 0] for r in range(GROUP)]
                x = [cell.load(shape.lanes) - m[v] for cell in cells]
                p = [exp(x_r, shape.exp_degree) for x_r in x]
                for cell, p_r in zip(cells, p):
                    cell.store(p_r)
                l[v].set(l[v] + ((p[0] + p[1]) + (p[2] + p[3])))
                if self.has_entropy:
                    for p_r, x_r in zip(p, x):
                        e[v].set(weighted(p_r, x_r, e[v]))
        if dropout is not None:
            for j in loop(first, n, GROUP):
                for r, masks in enumerate(dropout.kept(j, GROUP)):
                    for kept, c in zip(masks, shape.columns()):
                        cell = self.p_t.at(j, c)[r, 0]
                        cell.store(select(kept, cell.load(shape.lanes), 0.0))
        return l, e

    def new_sums(self) -> Sums:
        """0, for sums over keys of p and, for the entropy, of p times what p is the exponential of."""
        columns = self.shape.columns()
        l, e = ([Var(self.shape.constant(0.0)) for _ in of] for of in (columns, columns * self.has_entropy))
        return l, e

    def add_values(self, head: Head, tile: Tile, correction: list[Value], first: Value, n: Value) -> None:
        """acc_t = correction * acc_t + v^T p_t over the keys [first, n) of the block."""
        shape = self.shape
        for d in loop(0, round_up(shape.config.head_dim_v, shape.rows), shape.rows):
            v_t, p_t = self.v.at(first, d).T, self.p_t.at(first, 0)
            pv = outer_sums(shape, shape.rows, shape.vectors, n - first, v_t, p_t)  # [rows, block_q]
            for r in range(shape.rows):
                for v, c in enumerate(shape.columns()):
                    acc = tile.acc_t.at(d, c)[r, 0]
                    acc.store(fma(acc.load(shape.lanes), correction[v], pv[r][v]))

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
            self.finish_statistics(tile, c, l)
            lse, residual = log_sum_exp(m, l, self.unit)
            tile.m[0, c].store(lse)
            self.residual[0, c].store(residual)
        for i in loop(0, n):
            head.store_lse(tile.q0 + i, tile.m[0, i].load(), self.residual[0, i].load())
            for name, area in tile.found.items():
                head.statistic(name, tile.q0 + i).store(area[0, i].load())
        self.write_out(head, tile, n)

    def finish_statistics(self, tile: Tile, c: int, l: Value) -> None:
        """In natural units. A query that saw no key has maximum -inf and entropy 0."""
        for name, area in tile.found.items():
            cell = area[0, c]
            x = cell.load(self.shape.lanes)
            if name == "entropy":
                cell.store(select(l.equals(0.0), 0.0, maximum(0.0, log(l)[0] - x / l)))
            else:
                cell.store(x * self.unit)

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
    return fma(p, maximum(like(-LEAST, x), x), total)


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """See `build_kernel`."""
    return build_kernel(ForwardKernel, config, target)
