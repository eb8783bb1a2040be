"""Weights summed over tiles of any size, when lse is known: one program a tile of one head, no atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.gpu.launch.entry import entry
from tilewise.gpu.triton.arguments import Extras, Sequence, Sizes, Source
from tilewise.gpu.triton.primitives import exponentials, load_lse, softmax_stats, stat_start, tile_scores
from tilewise.gpu.triton.tiles import load_keys, load_tile, row_base, sequence_rows


@entry(triton.jit)
def attn_block_sum_kernel(
    q, k: Source, lse_ptr, residual_ptr, block_ptr, block: int, blocks_q: int, blocks_k: int,
    ragged, extras: Extras, factors, sizes: Sizes,
    cfg: tl.constexpr,
):  # fmt: skip
    """block_ptr (batch, heads, blocks_q, blocks_k), which holds 0: blocks that nobody sees are left alone."""
    QK: tl.constexpr = cfg.QK
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    pid = tl.program_id(0)
    column, row, bh = pid % blocks_k, pid // blocks_k % blocks_q, pid // blocks_k // blocks_q
    h, b = bh % sizes.num_heads, bh // sizes.num_heads
    q_start, rows, k_start, keys, first_col = sequence_rows(b, sizes, ragged)
    seq = Sequence(b, h, rows, keys, keys - rows, first_col)
    first_i = row * block
    end_i = tl.minimum(first_i + block, rows)
    first_j = column * block - first_col.to(tl.int32)  # of the sequence's own keys
    end_j = tl.minimum(first_j + block, keys)
    first_j = tl.maximum(first_j, 0)
    if sizes.window_left is not None:
        first_j = tl.maximum(first_j, first_i + seq.offset - sizes.window_left)
    if sizes.window_right is not None:
        end_j = tl.minimum(end_j, end_i + seq.offset + sizes.window_right)
    if (first_i >= end_i) | (first_j >= end_j):
        return

    total = tl.zeros([BLOCK_M], tl.float32)
    for i0 in range(first_i, end_i, BLOCK_M):
        i = i0 + tl.arange(0, BLOCK_M)
        at = stat_start(b, h, q_start, sizes, ragged) + i
        q_tile = load_tile(q, row_base(q, b, h, q_start), i0, rows, BLOCK_M, QK, True)
        lse, residual = load_lse(lse_ptr, residual_ptr, at, i < end_i, BLOCK_M)
        shift, low = softmax_stats(lse, residual, factors, cfg)
        for j0 in range(first_j, end_j, BLOCK_N):
            k_tile = load_keys(k, j0, k_start, seq, ragged, sizes, cfg, QK, True)
            j = (j0 + tl.arange(0, BLOCK_N))[None, :]
            s = tile_scores(
                q_tile, k_tile, i[:, None], j, seq, extras, sizes, factors, cfg, True
            )  # [BLOCK_M, BLOCK_N]
            p = exponentials(s, shift[:, None], low[:, None], factors, cfg)
            total += tl.sum(tl.where(j < end_j, p, 0.0), 1)
    tl.store(block_ptr + pid.to(tl.int64), tl.sum(total, 0))
