"""What is compiled for a problem: its options, the width of a tile, and which registers the products use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tilewise.core.functions.expression import decode
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.host.compile import current_target

KINDS = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
BF16_PRODUCTS = ("amx", "avx512_bf16", "neon_bf16")  # instruction sets that multiply bfloat16
CUTTING = ("amx",)  # and those so fast at it that float32 and float16 are cut into bfloat16 numbers
VECTORS = 3  # of a tile of queries; with products of bfloat16 a tile has so many queries, by terms:
BF16_FORWARD = {1: (16, 32), 2: (32,), 3: (32,)}  # numbers are cut for 32 queries or more
BF16_BACKWARD = {1: (32, 64, 128), 2: (32, 64), 3: (32, 64)}
CUT = {torch.float32: 3, torch.float16: 2}  # terms of bfloat16, for products in tile registers
# The fewest queries, keys and keys of a window that make up for cutting. One rule for forward and backward:
# the backward's weights add up to 1 only if its scores are the forward's to the last bit.
CUT_FEWEST = {torch.float32: (209, 128, 24), torch.float16: (32, 32, 1)}
FEW_HEADS, FEW_HEADS_QUERIES = 4, 2  # fewer want twice as many queries: many threads would cut the same keys
MOST_QUERIES = 16  # of decoding
DECODE_ROWS = 32  # at most: queries times the heads that share a key head; of each part of a forward's
MOST_ROWS = 128  # of a forward, in at most 8 parts
BF16_TOO_SHORT = 16  # queries and keys: a backward of so few takes 0.4 to 0.8 of the time without


def is_decoding(problem: AttentionProblem, is_backward: bool = False) -> bool:
    """Few queries that share each key: the head dimension then fills the lanes better than they do."""
    has_backward = is_backward or problem.needs_grad
    if problem.dropout_p > 0:
        return False
    is_of_tiles = problem.is_packed or problem.bias_needs_grad or problem.functions is not None
    if has_backward and is_of_tiles:
        return False  # a backward has tiles, and its scores are to be the forward's to the last bit
    rows = problem.seqlen_q * problem.group_size
    most = MOST_QUERIES if problem.seqlen_k >= 512 and rows <= DECODE_ROWS else 12
    return problem.seqlen_q <= most and 0 < rows <= (DECODE_ROWS if has_backward else MOST_ROWS)


def heads_of_part(problem: AttentionProblem) -> int:
    """Query heads whose rows a decoding kernel takes at once: of parts as alike as can be."""
    group, most = problem.group_size, max(1, DECODE_ROWS // max(1, problem.seqlen_q))
    return max(1, -(-group // max(1, -(-group // most))))


def _has_score_options(problem: AttentionProblem) -> bool:
    """Whether functions, a mask or a bias have a say in each score."""
    options = problem.functions, problem.mask_shape, problem.bias_shape
    return any(option is not None for option in options)


def decode_config(problem: AttentionProblem, inputs: Inputs, may_cut: bool = True) -> Config:
    rows = problem.seqlen_q * heads_of_part(problem)
    rows = rows if rows < 3 else -(-rows // 4) * 4
    has_tiles = current_target().isa == "amx" and has_bf16_products(problem)
    terms = int(may_cut and has_tiles and not _has_score_options(problem))
    return replace(_config(problem, inputs, 1, terms), rows=rows)


def forward_config(
    problem: AttentionProblem, inputs: Inputs, may_cut: bool = True, statistics: tuple[str, ...] = ()
) -> Config:
    config = _tile_config(problem, inputs, BF16_FORWARD, _terms(problem, may_cut))
    if config.terms != CUT[torch.float16]:  # whose scores are less exact than statistics are to be
        config = replace(config, statistics=statistics)
    keys = 128 if problem.seqlen_k <= 128 else 256
    if (
        not config.terms
        or problem.has_packed_keys
        or config.functions
        or problem.seqlen_k > min(keys, 2 * problem.head_dim_v)
    ):
        return config
    return replace(config, key_block=keys)  # P is transposed, which costs less than V


def backward_config(problem: AttentionProblem, inputs: Inputs, may_cut: bool = True) -> Config:
    is_short = max(problem.seqlen_q, problem.seqlen_k) <= BF16_TOO_SHORT
    if problem.functions is not None and decode(problem.functions).wants_grad:
        # Only the kernel that computes in vectors adds these gradients up.
        return replace(_config(problem, inputs, VECTORS), functions=problem.functions)
    return _tile_config(problem, inputs, BF16_BACKWARD, 0 if is_short else _terms(problem, may_cut))


def statistics_config(
    problem: AttentionProblem, inputs: Inputs, statistics: tuple[str, ...], top_k: int
) -> Config:
    config = _tile_config(problem, inputs, BF16_FORWARD, int(has_bf16_products(problem)))
    return replace(config, head_dim_v=1, has_dropout=False, statistics=statistics, top_k=top_k)


def _terms(problem: AttentionProblem, may_cut: bool) -> int:
    """`Config.terms`: those of numbers that are cut, 1 where they are bfloat16 already, 0 without AMX."""
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
    problem: AttentionProblem, inputs: Inputs, bf16_queries: Mapping[int, tuple[int, ...]], terms: int
) -> Config:
    """Of a kernel whose tiles of queries are, with products of bfloat16, as wide as suits their number."""
    if not terms:
        return _config(problem, inputs, VECTORS)
    lanes = current_target().vector_bytes // problem.compute_dtype.itemsize
    wide_enough = (n for n in bf16_queries[terms] if 0 < problem.seqlen_q <= n)
    return _config(problem, inputs, next(wide_enough, bf16_queries[terms][-1]) // lanes, terms)


def has_bf16_products(problem: AttentionProblem) -> bool:
    """Whether numbers are multiplied as bfloat16, which they are, and scaled after the maximum is taken."""
    return current_target().isa in BF16_PRODUCTS and problem.dtype == torch.bfloat16 and problem.scale > 0


def _config(problem: AttentionProblem, inputs: Inputs, vectors: int, terms: int = 0) -> Config:
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
        functions="" if problem.functions is None else decode(problem.functions).without_gradients().text,
        has_dropout=problem.dropout_p > 0,
        wide=("out",) if problem.has_wide_results else (),  # a backward's are its gradients
        is_partial=problem.is_partial,
        page_size=problem.page_size or 0,
        has_leftpad=problem.is_paged and problem.has_leftpad,
        terms=terms,
    )
