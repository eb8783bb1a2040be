"""The k largest weights of each query and their keys, when lse is known.

A program has a tile of queries and walks their keys upwards. Each query keeps its k largest scores so far,
in no order. While some query's tile of scores holds one that beats its smallest, the largest of the tile
takes that one's place. Keys ascend, so of equal scores the lower key stays. In the end they are put in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.gpu.launch.entry import entry
from tilewise.gpu.triton.arguments import Extras, Sizes, Source
from tilewise.gpu.triton.loops import key_regions
from tilewise.gpu.triton.primitives import (
    exponentials,
    load_lse,
    log2_unit,
    sink_weight,
    softmax_stats,
    stat_start,
    tile_scores,
    wait_for_kernel_before,
)
from tilewise.gpu.triton.tiles import load_keys, load_tile, query_tile, row_base

BEYOND = tl.constexpr((1 << 31) - 1)  # a key or column that there is none of


@entry(triton.jit)
def attn_top_k_kernel(
    q, k: Source, lse_ptr, residual_ptr, weight_ptr, key_ptr, held_ptr, list_size: int,
    COUNT: tl.constexpr, PADDED: tl.constexpr, ragged, extras: Extras, factors, sizes: Sizes,
    cfg: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_M queries of one head; weight_ptr and key_ptr have COUNT entries a query.

    PADDED: a power of two, COUNT at least. Grid: as of the forward. held_ptr: None, or how many candidates
    the four lists of each query held, of which the largest have been taken; then only tiles with a list that
    was too short, of list_size, are done.
    """
    QK: tl.constexpr = cfg.QK
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    if held_ptr is not None:
        wait_for_kernel_before(cfg)  # which has stored the largest of the candidates
    i0, q_start, k_start, seq = query_tile(sizes, ragged, BLOCK_M)
    if i0 >= seq.seqlen_q:
        return

    row = i0 + tl.arange(0, BLOCK_M)
    exists = row < seq.seqlen_q
    at = stat_start(seq.b, seq.h, q_start, sizes, ragged) + row
    if held_ptr is not None:
        lists = at.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
        held = tl.load(held_ptr + lists, mask=exists[:, None], other=0)
        if tl.max(tl.max(held, 1), 0) <= list_size:
            return

    q_tile = load_tile(q, row_base(q, seq.b, seq.h, q_start), i0, seq.seqlen_q, BLOCK_M, QK, True)
    lse, residual = load_lse(lse_ptr, residual_ptr, at, exists, BLOCK_M)
    shift, low = softmax_stats(lse, residual, factors, cfg)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if extras.sinks is not None:
        p, _ = sink_weight(extras.sinks, seq.h, lse, residual)
        total += p

    column = tl.arange(0, PADDED)[None, :]
    no_place = tl.where(column < COUNT, float("-inf"), float("inf"))  # columns from COUNT on are never beaten
    best = tl.zeros((BLOCK_M, PADDED), tl.float32) + no_place
    keys = tl.full((BLOCK_M, PADDED), -1, tl.int32)
    i1 = tl.minimum(i0 + BLOCK_M, seq.seqlen_q)
    lo, _full_lo, _full_hi, hi = key_regions(i0, i1, seq, sizes, BLOCK_N)  # all tiles are taken as edges
    i = row[:, None]
    for j0 in range(lo, hi, BLOCK_N):
        k_tile = load_keys(k, j0, k_start, seq, ragged, sizes, cfg, QK, True)
        j = (j0 + tl.arange(0, BLOCK_N))[None, :]
        s = tile_scores(q_tile, k_tile, i, j, seq, extras, sizes, factors, cfg, True)  # [BLOCK_M, BLOCK_N]
        total += tl.sum(exponentials(s, shift[:, None], low[:, None], factors, cfg), 1)
        best, keys = take_largest(best, keys, s, j)

    total = tl.where(total == 0.0, 1.0, total)
    store_in_order(
        best, keys, shift, low, total, weight_ptr, key_ptr, at, exists, seq.first_col, factors,
        cfg, COUNT, PADDED,
    )  # fmt: skip


@triton.jit
def take_largest(best, keys, s, j):
    """The largest scores of `best` [BLOCK_M, PADDED] and the tile s, and their keys."""
    column = tl.arange(0, best.shape[1])[None, :]
    least = tl.min(best, 1)
    largest = tl.max(s, 1)
    while tl.max((largest > least).to(tl.int32), 0) > 0:
        beats = (largest > least)[:, None]
        key = tl.min(tl.where(s == largest[:, None], j, BEYOND), 1)[:, None]
        # Of equal smallest ones the highest key goes; of places that are still free, any.
        is_least = best == least[:, None]
        last = tl.max(tl.where(is_least, keys, -2), 1)[:, None]
        place = tl.min(tl.where(is_least & (keys == last), column, BEYOND), 1)[:, None]
        goes = beats & (column == place)
        best = tl.where(goes, largest[:, None], best)
        keys = tl.where(goes, key, keys)
        s = tl.where(beats & (j == key), float("-inf"), s)
        least = tl.min(best, 1)
        largest = tl.max(s, 1)
    return best, keys


@triton.jit
def store_in_order(
    best, keys, shift, low, total, weight_ptr, key_ptr, at, exists, first_key, factors,
    cfg: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Weights, largest first, of equal ones the lower key first; keys count from the batch entry's first."""
    column = tl.arange(0, PADDED)[None, :]
    best = tl.where(column < COUNT, best, float("-inf"))
    is_left = (column < COUNT) & exists[:, None]
    for n in range(COUNT):
        score = tl.max(tl.where(is_left, best, float("-inf")), 1)
        candidate = is_left & (best == score[:, None])
        key = tl.min(tl.where(candidate, keys, BEYOND), 1)
        place = tl.min(tl.where(candidate & (keys == key[:, None]), column, BEYOND), 1)
        is_left = is_left & (column != place[:, None])
        weight = tl.exp2((score - shift) * log2_unit(factors, cfg) - low) / total
        is_none = score == float("-inf")
        tl.store(weight_ptr + at * COUNT + n, tl.where(is_none, 0.0, weight), mask=exists)
        found = tl.where(is_none, -1, key.to(tl.int64) + first_key)
        tl.store(key_ptr + at * COUNT + n, found, mask=exists)
