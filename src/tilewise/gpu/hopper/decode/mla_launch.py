"""Host side of decoding of absorbed latent attention for Hopper; see `decode.launch`."""

from __future__ import annotations

import functools

from tilewise.core.problem import AttentionProblem
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import WARPGROUP_ROWS, Cache
from tilewise.gpu.hopper.decode.arguments import DecodeTargets, MlaConfig
from tilewise.gpu.hopper.decode.launch import (
    FEW_QUERIES,
    MAX_BATCH,
    MIN_KEYS,
    USUAL_SMS,
    Kernels,
    decode_sizes,
    options,
    power_of_two,
    too_many_units,
)
from tilewise.gpu.launch.launch_plan import Launch, Tensors

HEAD_DIMS = (576, 512)
BLOCK_N = 64
FEW_SPLITS = 16  # as in `decode.launch`; starts cost more here, where queries are large


def supports(problem: AttentionProblem) -> str | None:
    """None if the kernel serves a cache of these head sizes, but for what `dispatch.capability` refuses."""
    if not problem.is_value_in_key:
        return f"takes head sizes {HEAD_DIMS} only where the values are the keys' first columns"
    if problem.is_packed or problem.seqlen_q > FEW_QUERIES:
        return f"takes caches for 1 to {FEW_QUERIES} queries a sequence only"
    if problem.seqlen_k < MIN_KEYS or problem.batch > MAX_BATCH:
        return f"takes caches for at least {MIN_KEYS} keys and at most {MAX_BATCH} sequences"
    if problem.num_kv_heads != 1 or problem.num_heads % head_blocks(problem):
        return (
            f"takes head sizes {HEAD_DIMS} for one key head and query heads in equal blocks of at most "
            f"{WARPGROUP_ROWS}, not {problem.num_heads} on {problem.num_kv_heads}"
        )
    if problem.page_size is not None and problem.page_size % BLOCK_N:
        return f"takes head sizes {HEAD_DIMS} in pages of {BLOCK_N} or a multiple, not {problem.page_size}"
    if problem.is_quantized or problem.has_leftpad:
        return "takes neither 8-bit pages nor left padding"
    if problem.has_alibi:
        return f"takes head sizes {HEAD_DIMS} without mask, bias, ALiBi and dropout only"
    return too_many_units(problem, mla_config(problem))


def is_latent(problem: AttentionProblem) -> bool:
    """Whether keys are absorbed latent vectors, with the values in them."""
    return (problem.head_dim, problem.head_dim_v) == HEAD_DIMS


def head_blocks(problem: AttentionProblem) -> int:
    """Blocks of query heads, each of at most the rows of a warpgroup."""
    return -(-problem.num_heads // WARPGROUP_ROWS)


def _mla_launch(problem: AttentionProblem, tensors: Tensors, cfg: MlaConfig, workers: int) -> Launch:
    from tilewise.gpu.hopper.decode.mla import attn_decode_mla_kernel

    query, key, _, lengths, _, table = tensors[:6]
    arguments = (
        query,
        host.descriptor(key, (cfg.BOX_ROWS, 1, cfg.BOX_WIDTH), True),
        DecodeTargets(*tensors[9:]),
        Cache(lengths, table, host.errors_of(problem, query)),
        decode_sizes(problem, cfg, workers, query, key, table=table),
        host.factors(problem),
        cfg,
    )
    kernel = attn_decode_mla_kernel
    return Launch(kernel, workers, arguments, num_warps=4, maxnreg=cfg.maxnreg, launch_pdl=True)


@functools.lru_cache(maxsize=4096)
def mla_config(problem: AttentionProblem) -> MlaConfig:
    """The tiles of a problem. Measurements are in docs/kernels-hopper.md."""
    pack = problem.num_heads // head_blocks(problem)
    rows = min(WARPGROUP_ROWS // pack, problem.seqlen_q) * pack
    segments = problem.batch * head_blocks(problem)
    # a merging program holds up to 8192 numbers; 132 splits are three times 48 as they are three times 64
    merge_splits = min(48, power_of_two(USUAL_SMS // segments))
    merge_columns = 128 if merge_splits > 16 else 512
    merge_rows = max(1, min(4, 8192 // (merge_splits * merge_columns)))
    return MlaConfig(
        BLOCK_N=BLOCK_N,
        STAGES=2,
        CONSUMER_REGISTERS=168,
        PRODUCER_REGISTERS=32,
        SCORE_REGISTERS=144,
        KEY_SLOTS=4,
        BLOCK_D=problem.head_dim,
        BLOCK_DV=problem.head_dim_v,
        BOX_ROWS=BLOCK_N,
        BOX_WIDTH=64,
        MERGE_ROWS=merge_rows,
        MERGE_SPLITS=merge_splits,
        MERGE_COLUMNS=merge_columns,
        **options(problem, pack, rows),
    )


KERNELS = Kernels(mla_config, _mla_launch, FEW_SPLITS)
