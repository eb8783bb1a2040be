"""Backward attention on the CPU, by recomputation of P from lse; five matrix products, no second pass.

A work item is one key head and one block of keys; its K, V, dK, dV stay in the thread's scratch while the
queries that see it go by, those of every query head that shares the key head. Where sequences or heads share
a bias whose gradient is wanted, an item takes the same block of all of them in turn, and adds up.

    k, v converted; dk, dv = 0                                               [key_block, head_dim]
    for each tile of queries:  q_t, do_t transposed; delta = rowsum(do * out) - dlse
        for each block_k keys:
            s_t  = k q_t (+ options);  p_t = exp(s_t - shift) factor          [block_k, block_q]
            dp_t = v do_t;             ds_t = p_t * (dp_t - delta)           [block_k, block_q]
            (dropout: dp_t = 0 in ds_t, and then p_t = 0, where dropped; the rest counts inverse_keep)
            dq_t += k^T ds_t                                                 [head_dim, block_q]
            dv   += p_t do;            dk += ds_t q                          [block_k, head_dim]
        dq of the tile += dq_t, after the previous block of keys has added its own

`backward_vectors` and `backward_bf16` have the step in the middle. The residual is what rounding left out of
lse: all of log(sum) where scores are huge. factor = exp(shift - lse - residual).

Each tile of queries has a ticket counter, and the items add to its dq in the order of their keys: the sums
are the same, bit for bit, on any number of threads. An item waits only for items with a smaller index,
which other threads already hold or have finished, so the wait ends. Sums in float32 stand in dq itself; of
those of a 16-bit dq half of the bits do, and the other half elsewhere, of the heads that are at work.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.cpu.dsl.bf16_products import tile_registers
from tilewise.cpu.dsl.control import claim, loop, when
from tilewise.cpu.dsl.lanes import fold_sums
from tilewise.cpu.dsl.memory import Rows
from tilewise.cpu.dsl.numerics import exp
from tilewise.cpu.dsl.vector import Scalar, Value, Var, fma, maximum, minimum, select
from tilewise.cpu.host.arguments import BLOCK_K
from tilewise.cpu.kernels.common.dropout import Dropout
from tilewise.cpu.kernels.common.products import at, products_of
from tilewise.cpu.kernels.common.scores import Scores
from tilewise.cpu.kernels.common.sums import add_in_turn, fill_zero, scale_rows, sum_bytes
from tilewise.cpu.kernels.common.tiles import (
    INF,
    Arguments,
    Head,
    KeyBlocks,
    Scratch,
    Shape,
    fitting,
    load_rows,
    round_up,
    store_rows,
    transpose_rows,
)

MOST_KEYS = 512  # of a block, which share each tile's loads and transposes: 3-6% faster than 256


class BackwardKernel:
    """The kernel's steps, in the order in which they run."""

    key_blocks: KeyBlocks
    scores: Scores

    def __init__(self, shape: Shape, args: Arguments) -> None:
        self.shape, self.args, self.config = shape, args, shape.config
        keys = shape.target.l2_bytes // 2 // self.key_bytes() // BLOCK_K * BLOCK_K  # half of L2
        self.key_block = min(MOST_KEYS, max(BLOCK_K, keys))
        self.scratch = scratch = Scratch(shape, args.thread_scratch())
        self.products = products_of(shape, args, scratch)
        self.dk, self.dv = (scratch.rows(self.key_block, width) for width in (shape.pad, shape.pad_v))
        self.dq = scratch.rows(round_up(shape.block_q, shape.rows), shape.pad)
        self.dq_t = scratch.rows(shape.pad, shape.block_q)
        statistics = (scratch.rows(1, shape.block_q) for _ in range(5))
        self.lse, self.factor, self.delta, self.dlse, self.norm = statistics
        self.reserve(scratch)
        self.dropout = Dropout(shape, args) if self.config.has_dropout else None

    def facts(self) -> dict[str, int]:
        shape = self.shape
        return {"key_block": self.key_block, "sum_bytes": sum_bytes(shape, shape.block_q)}

    def key_bytes(self) -> int:
        """Of K, V, dK and dV, and of K^T where it is a matrix of its own, for each key of a block."""
        shape, terms = self.shape, self.config.terms
        sums = shape.item * (shape.pad + shape.pad_v)
        return sums + (2 * terms * (2 * shape.pad + shape.pad_v) if terms else sums)

    def reserve(self, scratch: Scratch) -> None:
        """Room for the factors of a block of keys and a tile of queries."""
        shape, products = self.shape, self.products
        widths = shape.pad, shape.pad_v
        self.k, self.v = (products.left(scratch, self.key_block, width) for width in widths)
        self.k_t = products.transposed(self.k, scratch, self.key_block)
        self.q, self.do = (products.left(scratch, shape.block_q, width) for width in widths)
        self.q_t, self.do_t = (products.right(scratch, width, shape.block_q) for width in widths)
        self.qs, self.dos = (products.paired(rows, scratch, shape.block_q) for rows in (self.q, self.do))
        self.p, self.ds = (products.left(scratch, shape.block_k, shape.block_q) for _ in range(2))
        self.ds_right = products.paired(self.ds, scratch, shape.block_k)
        self.out, self.do_rows = (scratch.rows(shape.lanes, shape.pad_v) for _ in range(2))

    def shift_and_factor(self, lse: Value, residual: Value) -> tuple[Value, Value]:
        """exp(s - shift) * factor = exp(s - lse - residual); a shift of +inf makes that 0."""
        return lse, exp(-residual, self.shape.exp_degree)

    def step(self, head: Head, q0: Value, j0: Value, j: Value, end: Value) -> None:
        """The tile of queries from q0 on against the keys j0 + j + [0, end): add to dq_t, dv and dk."""
        raise NotImplementedError

    def run(self) -> None:
        args = self.args
        with tile_registers(self.scratch):
            of_group = args.owners * args.splits  # splits: blocks of keys of a head
            for item in claim(args.counter, args.items):
                group, place = item // of_group, item % of_group
                block, owner = place // args.owners, place % args.owners  # neighbours are different heads
                owner = owner + group * args.owners
                for s in loop(0, args.sharing):
                    batch = owner // args.own_heads + s // args.shared_heads
                    kv_head = owner % args.own_heads + s % args.shared_heads
                    self.attend_keys(batch, kv_head, block)

    def attend_keys(self, batch: Value, kv_head: Value, block: Value) -> None:
        """One block of keys of one key head against all queries that see some of it."""
        args, block_q = self.args, self.shape.block_q
        keys = Head(self.shape, args, batch, kv_head * args.group)
        j0 = block * args.split_keys
        n = minimum(args.split_keys, keys.seqlen_k - j0)
        with when(n > 0):
            self.load_keys(keys, j0, n)
            q0, q1 = keys.query_range(j0, j0 + n)
            for g in loop(0, args.group):
                head = Head(self.shape, args, batch, kv_head * args.group + g)
                first, end = q0 // block_q, (maximum(0, q1) + (block_q - 1)) // block_q
                for t in loop(first, end):  # the last first: a causal block of keys has that from its start
                    self.attend(head, first + (end - 1) - t, block, j0, n)
            self.store_keys(keys, j0, n)

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        shape, config, products = self.shape, self.config, self.products
        count = round_up(n, products.height)
        products.take(self.k, head.key_rows("k", j0), n, count, config.head_dim)
        products.take(self.v, head.key_rows("v", j0), n, count, config.head_dim_v)
        products.flip(self.k_t, self.k, count)
        for area in (self.dk, self.dv):
            fill_zero(shape, area, count)

    def attend(self, head: Head, t: Value, block: Value, j0: Value, n: Value) -> None:
        """One tile of queries against the item's keys."""
        block_q, block_k, q0 = self.shape.block_q, self.shape.block_k, t * self.shape.block_q
        k0, k1 = head.key_range(q0, minimum(q0 + block_q, head.seqlen_q))
        first, last = maximum(0, k0 - j0) & -self.products.height, minimum(k1 - j0, n)
        split = self.args.split_keys
        for place, is_last in self.tickets(head, q0, block, (k0 // split, (k1 - 1) // split)):
            fill_zero(self.shape, self.dq_t, self.shape.pad)
            begin, end = self.scores.visible(head, q0, block_q, j0, first, last)
            with when(begin < end):
                self.load_statistics(head, q0, self.load_queries(head, q0))
            for j in loop(first, last, block_k):
                begin, end = self.scores.visible(head, q0, block_q, j0 + j, 0, minimum(last - j, block_k))
                with when(begin < end):
                    for kernel in fitting(self, head, q0):
                        kernel.step(head, q0, j0, j, end)
            self.hand_over_dq(head, t, place, is_last)

    def add_query_gradients(self, c: Scalar, vectors: int, j: Value, keys: tuple[Scalar, Scalar]) -> None:
        """dq_t += k^T ds_t, of so many vectors of queries from c on and some of the keys from j on."""
        height = self.products.height
        for d in loop(0, round_up(self.config.head_dim, height), height):
            k_t, ds = at(self.k_t, d, j), at(self.ds_right, 0, c)
            self.products.add(self.dq_t.at(d, c), k_t, ds, keys, vectors)

    def add_key_gradients(self, queries: tuple[Scalar, Scalar], j: Value, end: Value) -> None:
        """dv += p do and dk += ds q, over the queries that see some of the keys j + [0, end)."""
        self.products.add_rows(self.dv.at(j, 0), self.p, self.dos, queries, end)
        self.products.add_rows(self.dk.at(j, 0), self.ds, self.qs, queries, end)

    def tickets(
        self, head: Head, q0: Value, block: Value, blocks: tuple[Value, Value]
    ) -> Iterator[tuple[Value, Value]]:
        """How many blocks of keys add to the tile's dq before this one, and whether it is the last; nothing
        if the functions hide all of it."""
        functions = self.scores.functions
        if functions is None or not functions.has_map:
            yield block - blocks[0], block.equals(blocks[1])
            return
        is_visited, place, is_last = functions.ticket(head, q0, block, blocks)
        with when(is_visited):
            yield place, is_last

    def load_queries(self, head: Head, q0: Value) -> Scalar:
        """q and do as the factors that they are; rowsum(do * out). How many rows, repeated ones included."""
        shape, products, dim = self.shape, self.products, self.config.head_dim_v
        n, step = head.seqlen_q - q0, products.step
        count = round_up(minimum(n, shape.block_q), step)
        products.take_queries(self.q_t, self.q, head.query_rows("q", q0), n, count)
        products.take(self.do, head.query_rows("do", q0), n, count, dim)
        products.turn(self.do_t, self.do, count)
        products.pair(self.qs, self.q, count)
        products.pair(self.dos, self.do, count)
        for i in loop(0, count, shape.lanes):
            for rows, name in ((self.out, "out"), (self.do_rows, "do")):
                load_rows(shape, rows, head.query_rows(name, q0 + i), n - i, shape.lanes, dim)
            self.store_delta(i, self.out, self.do_rows)
        return count

    def store_delta(self, i: Value, out: Rows, do: Rows) -> None:
        """delta = rowsum(do * out) of as many queries as there are lanes, from i on."""
        shape = self.shape
        sums = [Var(shape.constant(0.0)) for _ in range(shape.lanes)]
        for c in loop(0, shape.pad_v, shape.lanes):
            for r, total in enumerate(sums):
                x, y = (rows.at(0, c)[r, 0].load(shape.lanes) for rows in (out, do))
                total.set(fma(x, y, total))
        self.delta[0, i].store(fold_sums(sums))

    def load_statistics(self, head: Head, q0: Value, count: Scalar) -> None:
        """shift, factor, delta = rowsum(do * out) - dlse. Lanes past the end get p = 0."""
        config, n = self.config, head.seqlen_q - q0
        for i in loop(0, count):
            row = minimum(q0 + i, head.seqlen_q - 1)
            lse = head.statistic("lse", row).load()
            dlse = head.statistic("dlse", row).load()
            delta = self.delta[0, i].load() - dlse
            self.dlse[0, i].store(dlse)
            self.delta[0, i].store(delta)
            if config.has_sinks:
                head.statistic("delta", row).store(delta)
            self.factor[0, i].store(head.statistic("lse_residual", row).load())
            lse = select(lse.equals(-INF), INF, lse)  # no weights: p = exp(s - inf) = 0
            self.lse[0, i].store(select(i < n, lse, INF))
        for i in loop(0, count, self.shape.lanes):
            lse, residual = (area[0, i].load(self.shape.lanes) for area in (self.lse, self.factor))
            shift, factor = self.shift_and_factor(lse, residual)
            self.lse[0, i].store(shift)
            self.factor[0, i].store(factor)

    def hand_over_dq(self, head: Head, t: Value, place: Value, is_last: Value) -> None:
        """dq_t as rows, added to the tile's sum when `place` blocks of keys have."""
        shape, args, q0 = self.shape, self.args, t * self.shape.block_q
        transpose_rows(shape, self.dq, self.dq_t, shape.pad, shape.block_q)
        tile = (head.batch * args.num_heads + head.head) * args.tiles + t
        n = minimum(head.seqlen_q - q0, shape.block_q)
        add_in_turn(self, head.query_rows("dq", q0), tile, n, place, is_last)

    def dk_scale(self) -> Value:
        """What ds q is still to be multiplied by: a q that is cut has the scale, over the softcap."""
        if self.config.terms > 1 and not self.config.has_softcap:
            return self.shape.constant(1.0)
        return self.args.vector("softcap" if self.config.terms > 1 else "scale", self.shape)

    def store_keys(self, head: Head, j0: Value, n: Value) -> None:
        shape, config = self.shape, self.config
        scale_rows(shape, self.dk, n, self.dk_scale())
        if self.dropout is not None:
            scale_rows(shape, self.dv, n, self.dropout.inverse_keep)
        store_rows(shape, head.key_rows("dk", j0), self.dk, n, config.head_dim)
        store_rows(shape, head.key_rows("dv", j0), self.dv, n, config.head_dim_v)
