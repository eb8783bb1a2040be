"""Host side of the decoding kernels: which calls they serve, and their launches.

Nothing here reads a length: a CUDA graph of a decoding step replays with other lengths.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.gpu.launch.gpus import gpu_of
from tilewise.gpu.launch.launch_plan import (
    Launch,
    Step,
    Tensors,
    again_forward,
    is_interpreted,
    run_steps,
)
from tilewise.gpu.launch.plan import Again, Given
from tilewise.gpu.triton.arguments import Columns, DecodeConfig
from tilewise.gpu.triton.call import Call, gpu_capability, launchable, padded
from tilewise.gpu.triton.tuning_table import DecodeTile, decode_tile

MAX_QUERIES = 16
MIN_KEYS = 256  # below, the general kernel has as much to read as to compute
MERGE_ELEMENTS = 4096  # of the splits that a merging program holds at a time

_N = len(Inputs._fields)
MASK = Inputs._fields.index("mask")  # what comes before it, kernels take as it is


def serves(problem: AttentionProblem) -> bool:
    """Few queries to many keys."""
    is_short = 0 < problem.seqlen_q <= MAX_QUERIES and problem.seqlen_k >= MIN_KEYS
    if problem.dtype == torch.float32 and max(problem.head_dim, problem.head_dim_v) > 256:
        return False  # sums of so many products in one chain are off by more than the error rule allows
    if problem.is_quantized and not is_interpreted() and gpu_capability(torch.device("cuda")) < (8, 9):
        return False  # without float8 numbers
    is_plain = problem.dropout_p == 0 and problem.functions is None
    return is_short and not problem.is_packed and is_plain and problem.num_heads > 0


def forward(
    problem: AttentionProblem, inputs: Inputs, tile: DecodeTile | None = None, residual: bool = False
) -> tuple[Tensor, ...]:
    """out (batch, seqlen_q, heads, head_dim_v) and lse float32 (batch, heads, seqlen_q).

    And, if asked for, what rounding took from lse, in its shape.
    """
    inputs = launchable(inputs)
    query = inputs.query
    out = query.new_empty((*query.shape[:-1], problem.head_dim_v), dtype=problem.out_dtype)
    lse = query.new_empty((problem.batch, problem.num_heads, problem.seqlen_q), dtype=torch.float32)
    rest = (lse.new_empty(lse.shape),) if residual else ()
    if problem.batch == 0:
        return out, lse, *rest
    cuts = _cuts(problem, tile or _tile(problem, query.device), query.device)
    partial = [lse.new_empty(shape) for shape in _splits(problem, cuts)]
    fresh = (out, lse, *(rest or (None,)), *partial)
    run_steps(problem, _steps(inputs, cuts, fresh))
    return out, lse, *rest


def again(problem: AttentionProblem, order: str, residual: bool, given: Given) -> Again | None:
    """What `forward` does with the tensors of `Inputs`, if it need not copy what comes before the mask."""
    inputs = Inputs(*given)
    is_ready = all(a is b for a, b in zip(launchable(inputs)[:MASK], given[:MASK], strict=True))
    if not is_ready or problem.batch == 0:
        return None
    cuts = _cuts(problem, _tile(problem, inputs.query.device), inputs.query.device)

    def more(given: Given) -> tuple[Tensor | None, ...]:
        return launchable(Inputs(*given))[MASK:]

    def steps(given: Given, new: Given) -> list[Step]:
        return _steps(Inputs(*given[:MASK], *new[6:]), cuts, new[:6])

    scratch = _splits(problem, cuts)
    return again_forward(problem, order, residual, given, steps, more, scratch, stores_in_order=False)


def _splits(problem: AttentionProblem, cuts: Cuts) -> list[tuple[int, ...]]:
    """Shapes of what segments give: O, m and l."""
    rows = (problem.batch * cuts.segments + cuts.workers) * cuts.rows
    return [(rows, problem.head_dim_v), (rows,), (rows,)]


def _steps(inputs: Inputs, cuts: Cuts, fresh: Given) -> list[Step]:
    return [Step(launch, inputs, (cuts,), tuple(fresh)) for launch in (_decode_launch, _merge_launch)]


class Cuts(NamedTuple):
    """How a call is cut: see `tilewise.gpu.triton.decode`."""

    tile: DecodeTile
    rows: int  # of a row tile
    segments: int  # of each sequence
    workers: int


@functools.lru_cache(maxsize=4096)
def _cuts(problem: AttentionProblem, tile: DecodeTile, device: torch.device) -> Cuts:
    all_rows = problem.seqlen_q * problem.group_size
    row_tiles = -(-all_rows // tile.block_m)
    segments = problem.num_kv_heads * row_tiles
    most = problem.batch * segments * -(-problem.seqlen_k // tile.block_n)
    workers = min(_processors(device) * tile.workers, most)
    return Cuts(tile, min(all_rows, tile.block_m), segments, workers)


def _decode_launch(problem: AttentionProblem, tensors: Tensors, cuts: Cuts) -> Launch:
    from tilewise.gpu.triton.decode import attn_decode_kernel

    call, (_, _, _, *splits) = Call(problem, tensors[:_N]), tensors[_N:]
    cfg, tile = _config(call, cuts), cuts.tile
    arguments = (
        *map(call.rows, call.inputs[:3]),
        *splits,
        call.ragged(),
        (call.inputs.key_scale, call.inputs.value_scale),
        call.extras()._replace(sinks=None),  # those are merged
        call.factors(),
        call.sizes(),
        *(cuts.segments, cuts.workers, cfg),
    )
    resources = (tile.num_warps, tile.num_stages)
    return Launch(attn_decode_kernel, cuts.workers, arguments, *resources, launch_pdl=cfg.HAS_PDL)


def _merge_launch(problem: AttentionProblem, tensors: Tensors, cuts: Cuts) -> Launch:
    from tilewise.gpu.triton.decode import attn_decode_merge_kernel

    call, (out, lse, residual, *splits) = Call(problem, tensors[:_N]), tensors[_N:]
    cfg = _config(call, cuts)
    segments = problem.batch * cuts.segments
    is_small = segments * cuts.rows <= 4 * _processors(call.inputs.query.device)
    rows = 1 if is_small else min(cfg.BLOCK_M, 16)
    arguments = (
        *splits,
        call.rows(out),
        *(lse, residual),
        call.ragged(),
        call.inputs.sinks,
        call.factors(),
        call.sizes(),
        *(cuts.segments, cuts.workers),
        *(rows, max(1, MERGE_ELEMENTS // (rows * cfg.V.FIRST)), cfg),
    )
    grid = {"programs": segments, "programs_y": -(-cuts.rows // rows)}
    return Launch(attn_decode_merge_kernel, arguments=arguments, num_warps=4, launch_pdl=cfg.HAS_PDL, **grid)


def _config(call: Call, cuts: Cuts) -> DecodeConfig:
    problem, common = call.problem, call.config(cuts.tile)
    dim_v = problem.head_dim_v
    v = Columns(dim_v, padded(dim_v), 0)
    return DecodeConfig(
        **vars(common) | {"BLOCK_M": padded(cuts.rows), "V": v},
        ROWS=cuts.rows,
        BLOCK_B=padded(problem.batch),
        IS_SHARED=problem.is_value_in_key and dim_v == v.FIRST == common.QK.FIRST,
        IS_TRANSPOSED=cuts.tile.is_transposed,
    )


def _tile(problem: AttentionProblem, device: torch.device) -> DecodeTile:
    if is_interpreted():
        return DecodeTile(16, 16, 1, 4, 1)
    return _table_tile(problem, gpu_capability(device))


@functools.lru_cache(maxsize=4096)
def _table_tile(problem: AttentionProblem, capability: tuple[int, int]) -> DecodeTile:
    return decode_tile(
        capability,
        problem.dtype == torch.float32,
        max(problem.head_dim, problem.head_dim_v),
        problem.seqlen_q * problem.group_size,
        problem.batch * problem.num_kv_heads * problem.seqlen_k,
        problem.is_paged,
        problem.is_value_in_key,
        problem.is_quantized,
    )


def _processors(device: torch.device) -> int:
    return 3 if is_interpreted() else gpu_of(device.index).num_sms
