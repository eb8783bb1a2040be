"""How much attention moves and computes: exact counts from the loops of each algorithm.

The machine has two levels: slow memory (HBM) that holds the matrices, and fast memory (SRAM) that tiles are
loaded into. Sums, maxima and accumulators of a tile live in registers, which are free. Every load from slow
memory is counted where the loop makes it.

    reads, writes    bytes between slow memory and the chip, by tensor
    once_bytes       the same if each kernel moved each element once, as a large cache would have it
    fast_written     bytes put into fast memory by those loads
    fast_read        bytes that arithmetic reads from fast memory: both operands of a product of tiles, except
                     a tile that was just computed and is still in registers
    matmul_flops     2 for each multiply-add of a matrix product; masked entries of a visited tile count
    vector_flops     multiplies, adds, subtractions and comparisons elsewhere
    special_ops      exponentials, logarithms and reciprocals

Statistics (m, l, lse, delta) and the running dQ are float32, everything else has the inputs' size.

    standard            S = Q K^T | P = softmax(S) | O = P V: three kernels, each reading its inputs once
    fa1                 FlashAttention, Algorithm 1: keys outer, queries inner
    fa2                 FlashAttention-2, Algorithm 1: queries outer, keys inner
    backward_storing    FlashAttention, Algorithm 3: from a stored P, five kernels
    backward_recompute  FlashAttention-2, Algorithm 2: P again from lse, keys outer, queries inner
    decode              few queries against many keys, the keys split among workers, then a merge
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewise.lab.learn.counts import Asymptotic, Cost, Shape, Tally
from tilewise.lab.learn.records import BlockSizes
from tilewise.lab.learn.trace import paper_block_sizes

F32 = 4  # bytes
BLOCKS = BlockSizes(128, 128)


def standard(shape: Shape, blocks: BlockSizes = BLOCKS) -> Cost:
    """Three kernels with S and P in slow memory. Nothing is skipped under a causal mask.

    `blocks` are the tiles that the products are computed in, which decides what they read from fast memory.

    Example:
        >>> cost = standard(Shape(4096, 4096, 64))
        >>> cost.writes["s"] + cost.reads["s"] + cost.writes["p"] + cost.reads["p"] == 4 * 4096**2 * 2
        True
    """
    t, e = Tally(), shape.itemsize
    n, k, d, dv = shape.seqlen_q, shape.seqlen_k, shape.head_dim, shape.dim_v
    rows_cols = n * -(-k // blocks.block_k), k * -(-n // blocks.block_q)  # rows (columns) over all tiles
    t.load(e, q=n * d, k=k * d)
    t.fast_read += (rows_cols[0] + rows_cols[1]) * d * e
    t.matmul_flops += 2 * n * k * d
    t.vector_flops += n * k  # scale
    t.store(e, s=n * k)

    t.load(e, s=n * k)
    t.fast_read += n * k * e
    t.vector_flops += 4 * n * k  # max, subtract, sum, multiply by 1 / sum
    t.special_ops += n * k + n  # exp; 1 / sum
    t.store(e, p=n * k)

    t.load(e, p=n * k, v=k * dv)
    t.fast_read += (n * k + rows_cols[1] * dv) * e
    t.matmul_flops += 2 * n * k * dv
    t.store(e, o=n * dv)
    return t.cost("standard", _heads(shape), 2 * n * k * e, None, _stored(shape))


def fa1(shape: Shape, sram_bytes: int) -> Cost:
    """FlashAttention for a fast memory of `sram_bytes`, in the block sizes that the paper gives.

    m, l and O of a query tile are read and written again for every key tile; O is normalized each time.
    """
    e, f = shape.itemsize, F32
    blocks = sram_blocks(shape, sram_bytes)
    t, d, dv = Tally(), shape.head_dim, shape.dim_v
    n = shape.seqlen_q
    t.store(e, o=n * dv)
    t.store(f, l=n, m=n)
    for cols, rows, visits in _key_outer(shape, blocks):
        if visits == 0:
            continue
        t.load(e, k=cols * d, v=cols * dv)
        t.load(e, q=rows * d, o=rows * dv)
        t.load(f, l=rows, m=rows)
        t.fast_read += (rows * d + visits * cols * d) * e  # s = q k^T
        t.fast_read += visits * cols * dv * e  # p v, p in registers
        t.fast_read += rows * dv * e + 2 * rows * f  # o, l, m
        _scores(t, rows * cols, d, dv)
        t.vector_flops += 8 * rows  # m, both differences, l (3), both factors of O
        t.special_ops += 3 * rows  # exp(m_old - m), exp(m_tile - m), 1 / l
        t.vector_flops += 3 * rows * dv  # O = a O + b (p v)
        t.store(e, o=rows * dv)
        t.store(f, l=rows, m=rows)
    seen, keys = _touched(shape, blocks)
    t.once = e * (seen * d + keys * (d + dv)) + (seen + n) * (dv * e + 2 * f)
    sram = (blocks.block_q + blocks.block_k) * (d + dv) * e + 2 * blocks.block_q * f
    return t.cost("fa1", _heads(shape), 2 * n * f, sram, _tiled(shape, sram_bytes // e))


def fa2(shape: Shape, blocks: BlockSizes = BLOCKS) -> Cost:
    """FlashAttention-2's order: a query tile is finished in one go and its state never leaves the chip."""
    t, e, f = Tally(), shape.itemsize, F32
    d, dv, n = shape.head_dim, shape.dim_v, shape.seqlen_q
    for rows, cols, visits in _query_outer(shape, blocks):
        if visits:
            t.load(e, q=rows * d, k=cols * d, v=cols * dv)
            _online_softmax(t, rows, cols, visits, d, dv, e)
        _divide(t, rows, dv)
        t.store(e, out=rows * dv)
        t.store(f, lse=rows)
    seen, keys = _touched(shape, blocks)
    t.once = e * (seen * d + keys * (d + dv) + n * dv) + n * f
    return t.cost("fa2", _heads(shape), n * f, _sram(shape, blocks), _tiled(shape, _sram(shape, blocks) // e))


def backward_storing(shape: Shape, blocks: BlockSizes = BLOCKS) -> Cost:
    """Gradients from a P that the forward stored: five kernels, dP and dS in slow memory as well."""
    t, e = Tally(), shape.itemsize
    n, k, d, dv = shape.seqlen_q, shape.seqlen_k, shape.head_dim, shape.dim_v
    rows, cols = n * -(-k // blocks.block_k), k * -(-n // blocks.block_q)  # over all tiles
    t.load(e, p=n * k, do=n * dv)  # dV = P^T dO
    t.store(e, dv=k * dv)
    t.fast_read += (n * k + rows * dv) * e
    t.load(e, do=n * dv, v=k * dv)  # dP = dO V^T
    t.store(e, dp=n * k)
    t.fast_read += (rows + cols) * dv * e
    t.load(e, p=n * k, dp=n * k)  # dS = P * (dP - rowsum(P * dP))
    t.store(e, ds=n * k)
    t.fast_read += 2 * n * k * e
    t.load(e, ds=n * k, k=k * d)  # dQ = scale dS K
    t.store(e, dq=n * d)
    t.fast_read += (n * k + cols * d) * e
    t.load(e, ds=n * k, q=n * d)  # dK = scale dS^T Q
    t.store(e, dk=k * d)
    t.fast_read += (n * k + rows * d) * e
    t.matmul_flops += 2 * n * k * (2 * d + 2 * dv)
    t.vector_flops += 4 * n * k + (n + k) * d
    return t.cost("backward_storing", _heads(shape), 3 * n * k * e, None, _stored(shape))


def backward_recompute(shape: Shape, blocks: BlockSizes = BLOCKS) -> Cost:
    """Gradients from lse alone: delta first, then every tile of P again, dQ summed in slow memory."""
    t, e, f = Tally(), shape.itemsize, F32
    n, d, dv = shape.seqlen_q, shape.head_dim, shape.dim_v
    t.load(e, o=n * dv, do=n * dv)  # delta = rowsum(dO * O)
    t.fast_read += 2 * n * dv * e
    t.vector_flops += 2 * n * dv
    t.store(f, delta=n, dq_sum=n * d)  # dQ starts from 0
    for cols, rows, visits in _key_outer(shape, blocks):
        if visits:
            t.load(e, k=cols * d, v=cols * dv, q=rows * d, do=rows * dv)
            t.load(f, lse=rows, delta=rows, dq_sum=rows * d)
            once = 2 * rows * d + 2 * rows * dv  # q: s and dk; do: dv and dp
            t.fast_read += (once + visits * cols * (2 * d + dv)) * e  # k: s and dq; v: dp
            t.fast_read += (2 * rows + rows * d) * f
            t.matmul_flops += 2 * rows * cols * (3 * d + 2 * dv)
            t.vector_flops += 4 * rows * cols  # scale, - lse, - delta, p *
            t.special_ops += rows * cols
            t.store(f, dq_sum=rows * d)
            t.vector_flops += cols * d  # scale dk
        t.store(e, dk=cols * d, dv=cols * dv)
    t.load(f, dq_sum=n * d)
    t.fast_read += n * d * f
    t.vector_flops += n * d
    t.store(e, dq=n * d)
    seen, keys = _touched(shape, blocks)
    delta = 2 * n * dv * e + n * (1 + d) * f
    main = e * (seen * (d + dv) + (keys + shape.seqlen_k) * (d + dv)) + f * seen * (2 + 2 * d)
    t.once = delta + main + n * d * (f + e)
    sram = (blocks.block_q + blocks.block_k) * (d + dv) * e + blocks.block_q * (d + 2) * f
    extra = 2 * n * f + n * d * f
    return t.cost("backward_recompute", _heads(shape), extra, sram, _tiled(shape, sram // e))


def decode(shape: Shape, splits: int = 1, block_k: int = 128) -> Cost:
    """A few new queries against a cache: one worker for each KV head and each of `splits` parts of the keys.

    The query heads of a group share the tiles of their KV head. With more than one part, each worker writes
    its output and lse in float32 and a second kernel merges them.
    """
    if splits < 1:
        raise ValueError(f"splits must be at least 1, got {splits}")
    t, e, f = Tally(), shape.itemsize, F32
    d, dv = shape.head_dim, shape.dim_v
    rows = shape.num_heads // shape.kv_heads * shape.seqlen_q
    parts = _split(shape.seqlen_k, splits, block_k)
    for cols, visits in parts:
        t.load(e, q=rows * d, k=cols * d, v=cols * dv)
        _online_softmax(t, rows, cols, visits, d, dv, e)
        _divide(t, rows, dv)
        t.store(e if len(parts) == 1 else f, **{"out" if len(parts) == 1 else "part": rows * dv})
        t.store(f, lse=rows)
    if len(parts) > 1:
        n = len(parts)
        t.load(f, part=n * rows * dv, lse=n * rows)
        t.fast_read += n * rows * (dv + 1) * f
        t.vector_flops += rows * (3 * n + 1) + rows * dv * (
            2 * n + 1
        )  # max, subtract, sum, lse; weigh, divide
        t.special_ops += rows * (n + 2)
        t.store(e, out=rows * dv)
        t.store(f, lse=rows)
    t.once = sum(t.reads.values()) + sum(t.writes.values()) - (len(parts) - 1) * rows * d * e  # q
    extra = rows * f + (len(parts) * rows * (dv + 1) * f if len(parts) > 1 else 0)
    sram = (rows * d + block_k * (d + dv)) * e
    linear = Asymptotic("N d", shape.seqlen_k * d)
    return t.cost("decode", shape.batch * shape.kv_heads, extra, sram, linear)


def sram_blocks(shape: Shape, sram_bytes: int) -> BlockSizes:
    """The paper's block sizes for a fast memory of so many bytes, at most the sequence."""
    if sram_bytes < shape.itemsize:
        raise ValueError(
            f"sram_bytes must be at least one element of {shape.itemsize} bytes, got {sram_bytes}"
        )
    blocks = paper_block_sizes(sram_bytes // shape.itemsize, max(shape.head_dim, shape.dim_v))
    return BlockSizes(min(blocks.block_q, shape.seqlen_q), min(blocks.block_k, shape.seqlen_k))


def _heads(shape: Shape) -> int:
    return shape.batch * shape.num_heads


def _stored(shape: Shape) -> Asymptotic:
    n, k, d = shape.seqlen_q, shape.seqlen_k, shape.head_dim
    return Asymptotic("N d + N²", k * d + n * k)


def _tiled(shape: Shape, sram_elements: int) -> Asymptotic:
    n, k, d = shape.seqlen_q, shape.seqlen_k, shape.head_dim
    return Asymptotic("N² d² / M", n * k * d * d / sram_elements)


def _sram(shape: Shape, blocks: BlockSizes) -> int:
    d, dv = shape.head_dim, shape.dim_v
    return (blocks.block_q * d + blocks.block_k * (d + dv)) * shape.itemsize


def _query_outer(shape: Shape, blocks: BlockSizes) -> Iterator[tuple[int, int, int]]:
    """For each query tile: its rows, the keys of the tiles that it visits, and how many tiles those are."""
    for q0 in range(0, shape.seqlen_q, blocks.block_q):
        q1 = min(q0 + blocks.block_q, shape.seqlen_q)
        span = shape.visibility.key_range(q0, q1)
        yield q1 - q0, *_whole_tiles(*span, blocks.block_k, shape.seqlen_k)


def _key_outer(shape: Shape, blocks: BlockSizes) -> Iterator[tuple[int, int, int]]:
    """For each key tile: its columns, the queries of the tiles that visit it, how many tiles those are."""
    for k0 in range(0, shape.seqlen_k, blocks.block_k):
        k1 = min(k0 + blocks.block_k, shape.seqlen_k)
        span = shape.visibility.query_range(k0, k1)
        yield k1 - k0, *_whole_tiles(*span, blocks.block_q, shape.seqlen_q)


def _touched(shape: Shape, blocks: BlockSizes) -> tuple[int, int]:
    """Queries and keys that are loaded at all: those of the tiles that are visited."""
    queries = sum(rows for rows, _, visits in _query_outer(shape, blocks) if visits)
    return queries, sum(cols for cols, _, visits in _key_outer(shape, blocks) if visits)


def _whole_tiles(start: int, end: int, block: int, length: int) -> tuple[int, int]:
    """Rows (or columns) of the tiles that [start, end) touches, and how many tiles."""
    if start >= end:
        return 0, 0
    first, last = start // block, -(-end // block)
    return min(last * block, length) - first * block, last - first


def _split(seqlen_k: int, splits: int, block_k: int) -> list[tuple[int, int]]:
    """(keys, tiles) of each worker; workers without keys do not run."""
    tiles = -(-seqlen_k // block_k)
    share = -(-tiles // splits) * block_k
    spans = [min(share, seqlen_k - k0) for k0 in range(0, seqlen_k, share)]
    return [(cols, -(-cols // block_k)) for cols in spans]


def _scores(t: Tally, pairs: int, d: int, dv: int) -> None:
    """s = scale q k^T, its maximum, p = exp(s - max), its sum, p v."""
    t.matmul_flops += 2 * pairs * (d + dv)
    t.vector_flops += 4 * pairs  # scale, max, subtract, sum
    t.special_ops += pairs


def _online_softmax(t: Tally, rows: int, cols: int, visits: int, d: int, dv: int, size: int) -> None:
    """A query tile of `rows` against `visits` key tiles that have `cols` keys together."""
    t.fast_read += (visits * rows * d + cols * (d + dv)) * size  # p in registers
    _scores(t, rows * cols, d, dv)
    t.vector_flops += visits * rows * (4 + dv)  # m, m_old - m, c l + sum; c acc
    t.special_ops += visits * rows  # exp(m_old - m)


def _divide(t: Tally, rows: int, dv: int) -> None:
    """out = acc * (1 / l), lse = m + log(l)."""
    t.vector_flops += rows * (dv + 1)
    t.special_ops += 2 * rows
