"""Forward attention on the CPU: O = softmax(S) V tile by tile, as machine code.

A work item is one head and `tiles` tiles of queries. For each block of 64 keys, K and V are converted
once and all tiles of the item use them:

    for each tile:  q_t = scale * q, transposed;  m, l, acc_t = -inf, 0, 0
    for each block of keys:                                   k, v converted     [BLOCK_K, head_dim]
        for each tile:
            s_t   = k q_t (+ softcap, bias, ALiBi, mask)                         [BLOCK_K, block_q]
            m_new = max(m, max over keys of s_t);  c = 2^(m - m_new);  p_t = 2^(s_t - m_new)
            l     = c l + sum over keys of p_t;    acc_t = c acc_t + v^T p_t     [head_dim_v, block_q]
    for each tile:  out = acc_t^T / l;  lse = ln 2 (m + log2 l)

The block grid starts at key 0 for every item, so a tile's result depends neither on the number of tiles
in its item nor on which thread computes it.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.cpu.llvm.arguments import Config
from tilewise.cpu.llvm.compile import Target
from tilewise.cpu.llvm.tiles import (
    BLOCK_K,
    INF,
    LN_2,
    LOG2_E,
    Arguments,
    Head,
    Scores,
    Scratch,
    Shape,
    load_rows,
    outer_sums,
    round_up,
    store_rows,
    transpose_rows,
)
from tilewise.cpu.llvm.vector import (
    Rows,
    Value,
    Var,
    as_kind,
    claim,
    exp2,
    fma,
    function,
    log2,
    loop,
    maximum,
    minimum,
    select,
    splat,
    when,
)


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """LLVM IR of the kernel, and the sizes a caller needs."""
    shape = Shape(config, target)
    with function("forward") as emitter:
        args = Arguments(emitter)
        scratch = Scratch(shape, args.thread_scratch())
        areas = Areas.take(shape, scratch)
        first_tile = scratch.bytes
        tile_bytes = Tile(shape, scratch).bytes
        attn_fwd_kernel(shape, args, areas, first_tile, tile_bytes)
        ir_text = emitter.finish()
    return ir_text, {"block_q": shape.block_q, "scratch_bytes": first_tile, "tile_bytes": tile_bytes}


class Areas(NamedTuple):
    """One thread's scratch, beside the state of its tiles."""

    base: Scratch
    k: Rows  # [BLOCK_K, head_dim]
    v: Rows  # [BLOCK_K, head_dim_v]
    p: Rows  # s_t, then p_t [BLOCK_K, block_q]
    rows: Rows  # queries on their way in, out on its way out [block_q, max(head_dim, head_dim_v)]
    scores: Scores

    @staticmethod
    def take(shape: Shape, scratch: Scratch) -> Areas:
        return Areas(
            scratch,
            scratch.rows(BLOCK_K, shape.pad),
            scratch.rows(BLOCK_K, shape.pad_v),
            scratch.rows(BLOCK_K, shape.block_q),
            scratch.rows(shape.block_q, max(shape.pad, shape.pad_v)),
            Scores(shape, scratch),
        )


class Tile:
    """State of one tile of queries, kept in scratch between blocks of keys."""

    def __init__(self, shape: Shape, scratch: Scratch) -> None:
        start = scratch.bytes
        self.q_t = scratch.rows(shape.pad, shape.block_q)  # scaled
        self.acc_t = scratch.rows(shape.pad_v, shape.block_q)  # running output, not normalized
        self.m = scratch.rows(1, shape.block_q)  # running maximum, in units of log 2
        self.l = scratch.rows(1, shape.block_q)  # running sum of exponentials
        self.bytes = scratch.bytes - start
