"""Host side of the decoding kernel: which calls it serves, and its launch.

Nothing here reads a length: a CUDA graph of a decoding step replays with other lengths.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.problem import AttentionProblem, Inputs
from tilewise.triton.arguments import DecodeConfig, DecodeSizes
from tilewise.triton.call import Call, launchable
from tilewise.launch_plan import Launch, Tensors, run
from tilewise.tuning_table import DecodeTile, decode_tile

MAX_QUERIES = 16
MIN_KEYS = 256  # below, the general kernel has as much to read as to compute
MERGE_ELEMENTS = 4096  # of the tile of pieces that is merged at a time
CAPTURED_COUNTERS = 1 << 18  # zeros for the kernels of captured graphs, 1 MB

_N = len(Inputs._fields)


def serves(problem: AttentionProblem) -> bool:
    """Few queries to many keys, without dropout: what the kernel is made for."""
    is_short = 0 < problem.seqlen_q <= MAX_QUERIES and problem.seqlen_k >= MIN_KEYS
    return is_short and not problem.is_packed and problem.dropout_p == 0 and problem.num_heads > 0


def forward(problem: AttentionProblem, inputs: Inputs, tile: DecodeTile | None = None) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, heads, head_dim_v) and lse float32 (batch, heads, seqlen_q)."""
    inputs = launchable(inputs)
    query = inputs.query
    out = query.new_empty((*query.shape[:-1], problem.head_dim_v))
    lse = query.new_empty((problem.batch, problem.num_heads, problem.seqlen_q), dtype=torch.float32)
    if problem.batch == 0:
        return out, lse
    tile = tile or _tile(problem, query.device)
    cuts = _cuts(problem, tile, query.device)
    slots = cuts.pieces * cuts.rows
    partial = query.new_empty(slots * (problem.head_dim_v + 1), dtype=torch.float32)
    arrived = _counters(query.device, problem.batch * cuts.segments)
    tensors = (*inputs, out, lse, partial[slots:], partial[:slots], arrived)
    if tile.merge:
        tensors = (*tensors[:-1], None)
    run(_launch, problem, tensors, tile, cuts, _is_shared(inputs.key, inputs.value))
    if tile.merge:
        run(_merge_launch, problem, tensors, tile, cuts)
    return out, lse


class Cuts(NamedTuple):
    """How a call is cut: see `tilewise.triton.decode`."""

    rows: int  # of a row tile
    row_tiles: int
    segments: int  # of each sequence
    workers: int
    pieces: int  # at most


@functools.lru_cache(maxsize=4096)
def _cuts(problem: AttentionProblem, tile: DecodeTile, device: torch.device) -> Cuts:
    all_rows = problem.seqlen_q * problem.group_size
    rows = min(all_rows, tile.block_m)
    row_tiles = -(-all_rows // tile.block_m)
    segments = problem.num_kv_heads * row_tiles
    most = problem.batch * segments * -(-problem.seqlen_k // (tile.block_n * tile.least))
    workers = max(1, min(_processors(device) * tile.workers, most))
    return Cuts(rows, row_tiles, segments, workers, problem.batch * segments + workers)


def _launch(
    problem: AttentionProblem, tensors: Tensors, tile: DecodeTile, cuts: Cuts, is_shared: bool
) -> Launch:
    from tilewise.triton.decode import attn_decode_kernel

    call = Call(problem, tensors[:_N])
    inputs, (out, *work) = call.inputs, tensors[_N:]
    visibility, table = problem.visibility(), inputs.page_table
    sizes = DecodeSizes(
        batch=problem.batch,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        stride_page_table=0 if table is None else table.shape[1],
        window_left=visibility.left,
        window_right=visibility.right,
        row_tiles=cuts.row_tiles,
        segments=cuts.segments,
        workers=cuts.workers,
        least=tile.least,
    )
    mask, bias, alibi, sinks, _ = call.extras()
    arguments = (
        *map(call.rows, (*inputs[:3], out)),
        *work,
        call.ragged(),
        (inputs.key_scale, inputs.value_scale),
        *(mask, bias, alibi, sinks),
        call.factors(),
        *sizes,
        _config(problem, tile, cuts, is_shared),
    )
    return Launch(
        attn_decode_kernel, cuts.workers, arguments, tile.num_warps, tile.num_stages, tile.max_registers
    )


def _merge_launch(problem, tensors, tile, cuts):
    from tilewise.triton.decode import attn_decode_merge_kernel

    call = Call(problem, tensors[:_N])
    inputs, (out, lse, partial, partial_lse, _) = call.inputs, tensors[_N:]
    visibility, table = problem.visibility(), inputs.page_table
    sizes = DecodeSizes(
        batch=problem.batch,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        stride_page_table=0 if table is None else table.shape[1],
        window_left=visibility.left,
        window_right=visibility.right,
        row_tiles=cuts.row_tiles,
        segments=cuts.segments,
        workers=cuts.workers,
        least=tile.least,
    )
    cfg = _config(problem, tile, cuts, False)
    slots = problem.batch * cuts.segments
    rows = 1
    while rows < min(cuts.rows, 16) and slots * -(-cuts.rows // rows) > 1024: rows *= 2
    pieces = max(1, min(64, 8192 // (rows * cfg.BLOCK_DV)))
    arguments = (partial, partial_lse, call.rows(out), lse, call.ragged(), inputs.sinks, *sizes, rows, pieces, tile.merge == 2, cfg)
    return Launch(attn_decode_merge_kernel, slots * -(-cuts.rows // rows), arguments, 4, 1)


def _is_shared(key: Tensor, value: Tensor) -> bool:
    """The values are a view of the keys' first columns (absorbed MLA): one load serves both."""
    same_place = key.data_ptr() == value.data_ptr() and key.stride()[:3] == value.stride()[:3]
    return same_place and value.shape[-1] <= key.shape[-1]


def _config(problem: AttentionProblem, tile: DecodeTile, cuts: Cuts, is_shared: bool) -> DecodeConfig:
    block_m = max(16, _power_of_two(cuts.rows))
    block_d, rest = _parts(problem.head_dim)
    block_dv = max(16, _power_of_two(problem.head_dim_v))
    merge_rows = min(16, _power_of_two(cuts.rows))
    adds_to_scores = problem.softcap > 0 or problem.bias_shape is not None or problem.has_alibi
    return DecodeConfig(
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        ROWS=cuts.rows,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_REST=rest,
        BLOCK_DV=block_dv,
        BLOCK_B=_power_of_two(problem.batch),
        GROUP_SIZE=problem.group_size,
        PAGE_SIZE=problem.page_size or 0,
        HAS_SOFTCAP=problem.softcap > 0,
        IS_FOLDED=problem.scale > 0 and not adds_to_scores,
        IS_SHARED=is_shared and block_d == block_dv == problem.head_dim_v,
        IS_TRANSPOSED=tile.is_transposed,
        MERGE_ROWS=merge_rows,
        MERGE_PIECES=max(1, tile.merge_elements // (merge_rows * block_dv)),
        HAS_PDL=tile.merge == 2,
        HAS_FULL=tile.full,
        PRECISION="ieee",
    )


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _parts(head_dim: int) -> tuple[int, int]:
    """Columns as one power of two, or as two where that pads less: 576 = 512 + 64."""
    whole = max(16, _power_of_two(head_dim))
    first = whole // 2
    rest = max(16, _power_of_two(head_dim - first)) if head_dim > first else 0
    return (first, rest) if first >= 16 and first + rest < whole else (whole, 0)


def _tile(problem: AttentionProblem, device: torch.device) -> DecodeTile:
    if device.type != "cuda":
        return DecodeTile(16, 16, 1, 4, 1)
    rows = problem.seqlen_q * problem.group_size
    return decode_tile(problem.dtype == torch.float32, max(problem.head_dim, problem.head_dim_v), rows)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _counters(device: torch.device, count: int) -> Tensor:
    """Zeros that no other running kernel counts with; every kernel leaves them zero.

    Kernels of one stream follow each other and share theirs. One in a captured graph, which may replay on any
    stream, keeps its own for good.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    captured = _captured.get(device)
    if torch.cuda.is_current_stream_capturing():
        if captured is None or captured.taken + count > CAPTURED_COUNTERS:
            return torch.zeros(count, dtype=torch.int32, device=device)
        captured.taken += count
        return captured.zeros[captured.taken - count : captured.taken]
    if captured is None:
        _captured[device] = Captured(torch.zeros(CAPTURED_COUNTERS, dtype=torch.int32, device=device))
    key = device, torch.cuda.current_stream(device).cuda_stream
    zeros = _by_stream.get(key)
    if zeros is None or len(zeros) < count:
        zeros = _by_stream[key] = torch.zeros(_power_of_two(count), dtype=torch.int32, device=device)
    return zeros


@dataclass
class Captured:
    """Counters for captured graphs, and how many are taken."""

    zeros: Tensor
    taken: int = 0


_captured: dict[torch.device, Captured] = {}
_by_stream: dict[tuple[torch.device, int], Tensor] = {}
