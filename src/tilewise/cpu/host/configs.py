"""What is compiled for a problem: its options, the width of a tile, and which registers the products use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.host.compile import current_target

KINDS = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
# Speed of a tile of 1, 2 or 3 query vectors, full, relative to 3: fewer accumulators hide less latency.
VECTOR_SPEED = {1: 0.7, 2: 0.93, 3: 1.0}
BF16_PRODUCTS = ("amx", "avx512_bf16")  # instruction sets that multiply bfloat16
CUTTING = ("amx",)  # and those so fast at it that float32 and float16 are cut into bfloat16 numbers
# query vectors of a tile with products of bfloat16, by pieces
BF16_FORWARD = {1: (1, 2), 2: (2,), 3: (2,)}  # numbers are cut for 32 queries or more
BF16_BACKWARD = {1: (2, 4, 8), 2: (2, 4), 3: (2, 4)}
CUT = {torch.float32: 3, torch.float16: 2}  # pieces of bfloat16, for products in tile registers
# The fewest queries, keys and keys of a window that make up for cutting. One rule for forward and backward:
# the backward's weights add up to 1 only if its scores are the forward's to the last bit.
CUT_FEWEST = {torch.float32: (209, 128, 24), torch.float16: (32, 32, 1)}
FEW_HEADS, FEW_HEADS_QUERIES = 4, 2  # fewer want twice as many queries: many threads would cut the same keys
KEY_BLOCK = 128  # of the forward in vectors; a call of up to twice as many keys has one block of them
DECODE_ROWS = 32  # at most: queries times the heads that share a key head
SHORT_KEYS = 32  # at most
RECOMPUTED_ROWS = 24  # at most: of a backward that takes the softmax again
NARROW_WORK = 1 << 14  # multiply-adds of a product
FORK_WORK = 1 << 18  # multiply-adds in the time of a fork and a join
BF16_TOO_SHORT = 16  # queries and keys: a backward of so few takes 0.4 to 0.8 of the time without


def is_decoding(problem: AttentionProblem) -> bool:
    """Few queries that share each key: the head dimension then fills the lanes better than they do."""
    most = 12 if problem.seqlen_k < 512 else 16
    if problem.seqlen_k <= SHORT_KEYS:  # tiles of queries, and more so tile registers, help the forward more
        most = 6 if has_bf16_products(problem) else 8
    return _has_few_rows(problem, DECODE_ROWS) and problem.seqlen_q <= most


def _has_few_rows(problem: AttentionProblem, most: int) -> bool:
    if problem.is_packed or problem.mask_shape or problem.bias_shape or problem.dropout_p > 0:
        return False
    return 0 < problem.seqlen_q * problem.group_size <= most


def decode_config(problem: AttentionProblem, inputs: Inputs, may_cut: bool = True) -> Config:
    rows = problem.seqlen_q * problem.group_size
    rows = rows if rows < 3 else -(-rows // 4) * 4
    pieces = int(may_cut and current_target().isa == "amx" and has_bf16_products(problem))
    return replace(_config(problem, inputs, 1, pieces), rows=rows)


def decode_backward_config(problem: AttentionProblem, inputs: Inputs) -> Config:
    return replace(decode_config(problem, inputs), pieces=0)


def short_config(problem: AttentionProblem, inputs: Inputs, direction: str) -> Config:
    work = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k * problem.head_dim
    is_narrow = work <= NARROW_WORK
    return replace(decode_config(problem, inputs), pieces=0, short=direction, is_narrow=is_narrow)


def recomputes(problem: AttentionProblem) -> bool:
    """A few queries and keys that are all at hand at once: the backward then needs neither out nor lse."""
    is_other = (
        problem.has_sinks or problem.softcap or problem.is_cached or problem.is_paged or problem.is_partial
    )
    return problem.seqlen_k <= SHORT_KEYS and not is_other and _has_few_rows(problem, RECOMPUTED_ROWS)


def is_short(problem: AttentionProblem) -> bool:
    """Whether the forward is also one of `short.py`."""
    return recomputes(problem) and is_decoding(problem)


def forward_config(
    problem: AttentionProblem, inputs: Inputs, may_cut: bool = True, threads: int = 1
) -> Config:
    config = _tile_config(problem, inputs, BF16_FORWARD, _pieces(problem, may_cut), threads)
    keys = KEY_BLOCK if problem.seqlen_k <= KEY_BLOCK else 2 * KEY_BLOCK
    if config.pieces:  # with small heads it costs less to turn V around than P
        is_one_block = problem.seqlen_k <= min(keys, 2 * problem.head_dim_v) and not problem.has_packed_keys
    else:
        is_one_block = KEY_BLOCK < problem.seqlen_k <= keys
    return replace(config, key_block=keys) if is_one_block else config


def backward_config(problem: AttentionProblem, inputs: Inputs, may_cut: bool = True) -> Config:
    is_short = max(problem.seqlen_q, problem.seqlen_k) <= BF16_TOO_SHORT
    return _tile_config(problem, inputs, BF16_BACKWARD, 0 if is_short else _pieces(problem, may_cut))


def statistics_config(
    problem: AttentionProblem, inputs: Inputs, statistics: tuple[str, ...], threads: int
) -> Config:
    config = _config(problem, inputs, _vectors(problem, threads))
    return replace(config, head_dim_v=1, has_dropout=False, statistics=statistics)


def _pieces(problem: AttentionProblem, may_cut: bool) -> int:
    """`Config.pieces`: those of numbers that are cut, 1 where they are bfloat16 already, 0 without AMX."""
    if problem.dtype in CUT and current_target().isa in CUTTING and problem.scale > 0:
        queries, keys, window = CUT_FEWEST[problem.dtype]
        if problem.dtype == torch.float32 and problem.batch * problem.num_heads < FEW_HEADS:
            queries *= FEW_HEADS_QUERIES
        seen = problem.visibility()
        is_wide = seen.left is None or seen.right is None or seen.left + 1 + seen.right >= window
        is_long = problem.seqlen_q >= queries and problem.seqlen_k >= keys and is_wide
        return CUT[problem.dtype] if may_cut and is_long else 0
    return int(has_bf16_products(problem))


def _tile_config(
    problem: AttentionProblem,
    inputs: Inputs,
    bf16_vectors: Mapping[int, tuple[int, ...]],
    pieces: int,
    threads: int = 1,
) -> Config:
    """Of a kernel whose tiles of queries are as wide as suits their number."""
    if not pieces:
        return _config(problem, inputs, _vectors(problem, threads))
    lanes = current_target().vector_bytes // problem.compute_dtype.itemsize
    wide_enough = (v for v in bf16_vectors[pieces] if 0 < problem.seqlen_q <= v * lanes)
    return _config(problem, inputs, next(wide_enough, bf16_vectors[pieces][-1]), pieces)


def has_bf16_products(problem: AttentionProblem) -> bool:
    """Whether numbers are multiplied as bfloat16, which they are, and scaled after the maximum is taken."""
    return current_target().isa in BF16_PRODUCTS and problem.dtype == torch.bfloat16 and problem.scale > 0


def _config(problem: AttentionProblem, inputs: Inputs, vectors: int, pieces: int = 0) -> Config:
    return Config(
        kind=KINDS[problem.dtype],
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        vectors=vectors,
        has_softcap=problem.softcap > 0,
        has_alibi=problem.has_alibi,
        has_sinks=problem.has_sinks,
        has_mask=problem.mask_shape is not None,
        bias_kind="" if inputs.bias is None else KINDS[inputs.bias.dtype],
        row_scores=tuple(name for name in ("mask", "bias") if _is_of_rows(getattr(inputs, name))),
        has_dropout=problem.dropout_p > 0,
        is_partial=problem.is_partial,
        page_size=problem.page_size or 0,
        has_leftpad=problem.is_paged and problem.has_leftpad,
        pieces=pieces,
    )


def _is_of_rows(t: Tensor | None) -> bool:
    """Whether a mask or bias is broadcast over keys."""
    return t is not None and t.shape[3] == 1


def waiting_share(threads: int, is_even: bool) -> float:
    """How long a thread waits for the last one, in work items: many never run at one speed."""
    return max(0.0, 1 - (2 if is_even else 1) / threads)


def _vectors(problem: AttentionProblem, threads: int) -> int:
    """Query vectors of a tile: 3, of which the last may have fewer, or fewer where that takes less time.

    Threads may share the tiles of a head. The width of a tile changes no bit of its rows where all of its
    queries see the same keys; elsewhere it does not depend on the threads.
    """
    seen = problem.visibility()
    threads = threads if seen.left is None and seen.right is None else 1
    heads = problem.batch * problem.num_heads
    lanes = current_target().vector_bytes // problem.compute_dtype.itemsize
    all_vectors = -(-problem.seqlen_q // lanes)
    vector_work = lanes * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)

    def time(vectors: int) -> float:
        tiles, rest = divmod(all_vectors, vectors)
        last = rest if vectors == 3 else vectors
        one_tile = vectors / VECTOR_SPEED[vectors]
        one_head = tiles * one_tile + (last / VECTOR_SPEED[last] if rest else 0.0)
        used = min(threads, heads * -(-all_vectors // vectors))
        is_even = heads % used == 0 or (rest == 0 and heads * tiles % used == 0)
        waiting = one_tile * waiting_share(used, is_even)
        forking = FORK_WORK / vector_work if used > 1 else 0.0
        return heads * one_head / used + waiting + forking

    return min(VECTOR_SPEED, key=time) if all_vectors and heads and vector_work else 3
