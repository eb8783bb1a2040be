"""A machine that runs attention on recording arrays and counts what it moves and computes.

`Slow` holds matrices; `load` brings a part of one into fast memory (`Tile`), `store` writes registers back.
Nothing here knows a formula of `learn.io_model`: the algorithms below are written out loop by loop, and the
counts are those of the accesses and operations that really happened.
"""

from __future__ import annotations

from collections import Counter

import torch

NEG_INF = float("-inf")


class Tile:
    """A tile in fast memory: reading `.value` is an access of fast memory."""

    def __init__(self, machine, value, size):
        self.machine, self._value, self.size = machine, value, size

    @property
    def value(self):
        self.machine.fast_read += self._value.numel() * self.size
        return self._value


class Slow:
    """A matrix in slow memory."""

    def __init__(self, machine, name, value, size):
        self.machine, self.name, self.value, self.size = machine, name, value, size
        self.seen = {}

    def load(self, rows=slice(None)) -> Tile:
        part = self.value[rows]
        self._count(self.machine.reads, "read", rows, part)
        self.machine.fast_written += part.numel() * self.size
        return Tile(self.machine, part.clone(), self.size)

    def store(self, part, rows=slice(None)) -> None:
        self._count(self.machine.writes, "write", rows, part)
        self.value[rows] = part

    def _count(self, counts, what, rows, part):
        counts[self.name] += part.numel() * self.size
        seen = self.seen.setdefault(
            (self.machine.kernel, what), torch.zeros(self.value.shape, dtype=torch.bool)
        )
        before = int(seen.sum())
        seen[rows] = True
        self.machine.once_bytes += (int(seen.sum()) - before) * self.size


class Machine:
    def __init__(self, itemsize):
        self.itemsize, self.kernel = itemsize, 0
        self.reads, self.writes = Counter(), Counter()
        self.once_bytes = self.fast_read = self.fast_written = 0
        self.matmul_flops = self.vector_flops = self.special_ops = 0
        self.allocated = 0

    def place(self, name, value, size=None) -> Slow:
        return Slow(self, name, value.clone(), size or self.itemsize)

    def new(self, name, *shape, size=None, is_result=False) -> Slow:
        slow = Slow(self, name, torch.full(shape, float("nan"), dtype=torch.float64), size or self.itemsize)
        if not is_result:
            self.allocated += slow.value.numel() * slow.size
        return slow

    def launch(self):
        self.kernel += 1

    def matmul(self, a, b):
        assert a.shape[1] == b.shape[0]
        self.matmul_flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    def vector(self, result, times=1):
        """`result` took one operation an element, or `times`."""
        self.vector_flops += result.numel() * times
        return result

    def rowsum(self, x):
        self.vector_flops += x.numel()
        return x.sum(1)

    def rowmax(self, x):
        self.vector_flops += x.numel()
        return x.max(1).values

    def exp(self, x):
        self.special_ops += x.numel()
        return torch.exp(x)

    def log(self, x):
        self.special_ops += x.numel()
        return torch.log(x)

    def reciprocal(self, x):
        self.special_ops += x.numel()
        return torch.where(x == 0, 0.0, 1 / x)


def cut(length, block):
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def is_visible(shape, rows, cols):
    i = torch.arange(shape.seqlen_q)[rows, None] + shape.seqlen_k - shape.seqlen_q
    j = torch.arange(shape.seqlen_k)[None, cols]
    return j <= i if shape.causal else torch.ones(len(i), j.shape[1], dtype=torch.bool)


def finite(x):
    return torch.where(x == NEG_INF, 0.0, x)


def masked(machine, shape, s, rows, cols):
    return s.masked_fill(~is_visible(shape, rows, cols), NEG_INF)


def standard(shape, q, k, v, scale, blocks):
    m = Machine(shape.itemsize)
    q, k, v = m.place("q", q), m.place("k", k), m.place("v", v)
    s = m.new("s", shape.seqlen_q, shape.seqlen_k)
    p = m.new("p", shape.seqlen_q, shape.seqlen_k)
    o = m.new("o", shape.seqlen_q, shape.dim_v, is_result=True)
    row_tiles, col_tiles = cut(shape.seqlen_q, blocks.block_q), cut(shape.seqlen_k, blocks.block_k)
    m.launch()
    q_fast, k_fast = q.load(), k.load()
    result = torch.empty_like(s.value)
    for rows in row_tiles:
        for cols in col_tiles:
            a, b = Tile(m, q_fast._value[rows], m.itemsize), Tile(m, k_fast._value[cols], m.itemsize)
            tile = m.vector(m.matmul(a.value, b.value.T) * scale)
            result[rows, cols] = masked(m, shape, tile, rows, cols)
    s.store(result)
    m.launch()
    x = s.load().value
    e = m.exp(m.vector(x - finite(m.rowmax(x))[:, None]))
    p.store(m.vector(e * m.reciprocal(m.rowsum(e))[:, None]))
    m.launch()
    p_fast, v_fast = p.load(), v.load()
    out = torch.zeros_like(o.value)
    for rows in row_tiles:
        for cols in col_tiles:
            a = Tile(m, p_fast._value[rows, cols], m.itemsize)
            b = Tile(m, v_fast._value[cols], m.itemsize)
            out[rows] += m.matmul(a.value, b.value)
    o.store(out)
    return m, o.value


def fa1(shape, q, k, v, scale, blocks):
    m = Machine(shape.itemsize)
    q, k, v = m.place("q", q), m.place("k", k), m.place("v", v)
    o = m.new("o", shape.seqlen_q, shape.dim_v, is_result=True)
    l, mx = m.new("l", shape.seqlen_q, size=4), m.new("m", shape.seqlen_q, size=4)
    m.launch()
    o.store(torch.zeros_like(o.value))
    l.store(torch.zeros_like(l.value))
    mx.store(torch.full_like(mx.value, NEG_INF))
    for cols in cut(shape.seqlen_k, blocks.block_k):
        k_j = v_j = None
        for rows in cut(shape.seqlen_q, blocks.block_q):
            if not is_visible(shape, rows, cols).any():
                continue
            if k_j is None:
                k_j, v_j = k.load(cols), v.load(cols)
            q_i, o_i, l_i, m_i = q.load(rows), o.load(rows), l.load(rows), mx.load(rows)
            s = masked(m, shape, m.vector(m.matmul(q_i.value, k_j.value.T) * scale), rows, cols)
            m_tile, m_old, l_old = m.rowmax(s), m_i.value, l_i.value
            p = m.exp(m.vector(s - finite(m_tile)[:, None]))
            m_new = m.vector(torch.maximum(m_old, m_tile))
            old = m.exp(m.vector(m_old - finite(m_new)))
            new = m.exp(m.vector(m_tile - finite(m_new)))
            kept, sum_new = m.vector(old * l_old), m.rowsum(p)
            l_new = m.vector(kept + m.vector(new * sum_new))
            inverse = m.reciprocal(l_new)
            a, b = m.vector(kept * inverse), m.vector(new * inverse)
            pv = m.matmul(p, v_j.value)
            out = m.vector(m.vector(o_i.value * a[:, None]) + m.vector(pv * b[:, None]))
            o.store(out, rows)
            l.store(l_new, rows)
            mx.store(m_new, rows)
    return m, o.value


def online(m, shape, q_tile, k, v, key_tiles, rows, scale, mask_shape=None):
    """One query tile over key tiles; returns acc, l, m in registers. `q_tile` is loaded on first use."""
    q_i, state = None, None
    for cols in key_tiles:
        if mask_shape is not None and not is_visible(mask_shape, rows, cols).any():
            continue
        if q_i is None:
            q_i = q_tile()
        k_j, v_j = k.load(cols), v.load(cols)
        s = m.vector(m.matmul(q_i.value, k_j.value.T) * scale)
        if mask_shape is not None:
            s = masked(m, mask_shape, s, rows, cols)
        if state is None:
            n = len(s)
            state = torch.zeros(n, shape.dim_v, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
            state = (*state, torch.full((n,), NEG_INF, dtype=torch.float64))
        acc, l, m_old = state
        m_new = m.vector(torch.maximum(m_old, m.rowmax(s)))
        c = m.exp(m.vector(m_old - finite(m_new)))
        p = m.exp(m.vector(s - finite(m_new)[:, None]))
        l = m.vector(m.vector(c * l) + m.rowsum(p))
        acc = m.vector(acc * c[:, None]) + m.matmul(p, v_j.value)
        state = acc, l, m_new
    return state


def finish(m, acc, l, m_row):
    out = m.vector(acc * m.reciprocal(l)[:, None])
    return out, m.vector(m_row + m.log(l))


def fa2(shape, q, k, v, scale, blocks):
    m = Machine(shape.itemsize)
    q, k, v = m.place("q", q), m.place("k", k), m.place("v", v)
    out = m.new("out", shape.seqlen_q, shape.dim_v, is_result=True)
    lse = m.new("lse", shape.seqlen_q, size=4)
    m.launch()
    for rows in cut(shape.seqlen_q, blocks.block_q):
        tiles = cut(shape.seqlen_k, blocks.block_k)
        state = online(m, shape, lambda rows=rows: q.load(rows), k, v, tiles, rows, scale, shape)
        n = len(out.value[rows])
        if state is None:
            state = torch.zeros(n, shape.dim_v, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
            state = (*state, torch.full((n,), NEG_INF, dtype=torch.float64))
        o_i, lse_i = finish(m, *state)
        out.store(o_i, rows)
        lse.store(lse_i, rows)
    return m, out.value, lse.value


def backward_storing(shape, q, k, v, do, p, scale, blocks):
    m = Machine(shape.itemsize)
    m.allocated += p.numel() * shape.itemsize  # kept since the forward
    q, k, v, do, p = (m.place(name, x) for name, x in zip(("q", "k", "v", "do", "p"), (q, k, v, do, p)))
    n, nk = shape.seqlen_q, shape.seqlen_k
    dp, ds = m.new("dp", n, nk), m.new("ds", n, nk)
    dq = m.new("dq", n, shape.head_dim, is_result=True)
    dk = m.new("dk", nk, shape.head_dim, is_result=True)
    dv = m.new("dv", nk, shape.dim_v, is_result=True)
    row_tiles, col_tiles = cut(n, blocks.block_q), cut(nk, blocks.block_k)

    def product(a, a_of, b, b_of, to, outer, inner):
        """to[i] = sum over j of a_of(a, i, j) b_of(b, i, j), every operand tile read from fast memory."""
        result = torch.zeros_like(to.value)
        for i in outer:
            for j in inner:
                x, y = Tile(m, a_of(a, i, j), m.itemsize), Tile(m, b_of(b, i, j), m.itemsize)
                result[i] += m.matmul(x.value, y.value)
        return result

    m.launch()
    a, b = p.load()._value, do.load()._value
    dv.store(product(a, lambda x, i, j: x[j, i].T, b, lambda x, i, j: x[j], dv, col_tiles, row_tiles))
    m.launch()
    a, b = do.load()._value, v.load()._value
    result = torch.empty_like(dp.value)
    for rows in row_tiles:
        for cols in col_tiles:
            x, y = Tile(m, a[rows], m.itemsize), Tile(m, b[cols], m.itemsize)
            result[rows, cols] = m.matmul(x.value, y.value.T)
    dp.store(result)
    m.launch()
    a, b = p.load().value, dp.load().value
    delta = m.rowsum(m.vector(a * b))
    ds.store(m.vector(a * m.vector(b - delta[:, None])))
    m.launch()
    a, b = ds.load()._value, k.load()._value
    dq.store(
        m.vector(
            scale * product(a, lambda x, i, j: x[i, j], b, lambda x, i, j: x[j], dq, row_tiles, col_tiles)
        )
    )
    m.launch()
    a, b = ds.load()._value, q.load()._value
    dk.store(
        m.vector(
            scale * product(a, lambda x, i, j: x[j, i].T, b, lambda x, i, j: x[j], dk, col_tiles, row_tiles)
        )
    )
    return m, dq.value, dk.value, dv.value


def backward_recompute(shape, q, k, v, o, do, lse, scale, blocks):
    m = Machine(shape.itemsize)
    m.allocated += lse.numel() * 4
    names = ("q", "k", "v", "o", "do")
    q, k, v, o, do = (m.place(name, x) for name, x in zip(names, (q, k, v, o, do)))
    n, nk, d, dim_v = shape.seqlen_q, shape.seqlen_k, shape.head_dim, shape.dim_v
    lse, delta = m.place("lse", lse, 4), m.new("delta", n, size=4)
    dq_sum = m.new("dq_sum", n, d, size=4)
    dq, dk = m.new("dq", n, d, is_result=True), m.new("dk", nk, d, is_result=True)
    dv = m.new("dv", nk, dim_v, is_result=True)
    m.launch()
    delta.store(m.rowsum(m.vector(o.load().value * do.load().value)))
    dq_sum.store(torch.zeros_like(dq_sum.value))
    m.launch()
    for cols in cut(nk, blocks.block_k):
        k_j = v_j = None
        count = len(k.value[cols])
        dk_j = torch.zeros(count, d, dtype=torch.float64)
        dv_j = torch.zeros(count, dim_v, dtype=torch.float64)
        for rows in cut(n, blocks.block_q):
            if not is_visible(shape, rows, cols).any():
                continue
            if k_j is None:
                k_j, v_j = k.load(cols), v.load(cols)
            q_i, do_i, lse_i, delta_i = q.load(rows), do.load(rows), lse.load(rows), delta.load(rows)
            dq_i = dq_sum.load(rows)
            s = masked(m, shape, m.vector(m.matmul(q_i.value, k_j.value.T) * scale), rows, cols)
            p = m.exp(m.vector(s - finite(lse_i.value)[:, None]))
            dv_j = dv_j + m.matmul(p.T, do_i.value)
            dp = m.matmul(do_i.value, v_j.value.T)
            ds = m.vector(p * m.vector(dp - delta_i.value[:, None]))
            dq_sum.store(dq_i.value + m.matmul(ds, k_j.value), rows)
            dk_j = dk_j + m.matmul(ds.T, q_i.value)
        dk.store(m.vector(dk_j * scale) if k_j is not None else dk_j, cols)
        dv.store(dv_j, cols)
    m.launch()
    dq.store(m.vector(dq_sum.load().value * scale))
    return m, dq.value, dk.value, dv.value


def decode(shape, q, k, v, scale, splits, block_k):
    """`q` holds the rows of every query head of a group."""
    m = Machine(shape.itemsize)
    q, k, v = m.place("q", q), m.place("k", k), m.place("v", v)
    rows, dim_v = q.value.shape[0], shape.dim_v
    out = m.new("out", rows, dim_v, is_result=True)
    lse = m.new("lse", rows, size=4)
    tiles = cut(shape.seqlen_k, block_k)
    share = -(-len(tiles) // splits)
    parts = [tiles[start : start + share] for start in range(0, len(tiles), share)]
    m.launch()
    if len(parts) == 1:
        o, statistics = finish(m, *online(m, shape, q.load, k, v, tiles, None, scale))
        out.store(o)
        lse.store(statistics)
        return m, out.value, lse.value
    part, part_lse = m.new("part", len(parts), rows, dim_v, size=4), m.new("lse", len(parts), rows, size=4)
    for index, mine in enumerate(parts):
        o, statistics = finish(m, *online(m, shape, q.load, k, v, mine, None, scale))
        part.store(o, index)
        part_lse.store(statistics, index)
    m.launch()
    o, statistics = part.load().value, part_lse.load().value
    m.vector_flops += statistics.numel()
    top = statistics.max(0).values
    weight = m.exp(m.vector(statistics - top))
    m.vector_flops += weight.numel()
    total = weight.sum(0)
    weighed = m.vector(o * weight[:, :, None])
    m.vector_flops += weighed.numel()
    out.store(m.vector(weighed.sum(0) * m.reciprocal(total)[:, None]))
    lse.store(m.vector(top + m.log(total)))
    return m, out.value, lse.value
