"""Host side of the decoding kernels: which calls they serve, and their launch.

Nothing here reads a length: a CUDA graph of a decoding step replays with other lengths.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.problem import AttentionProblem
from tilewise.triton.arguments import DecodeConfig, DecodeSizes
from tilewise.tuning_table import DecodeTile, decode_tile

if TYPE_CHECKING:
    from tilewise.triton.launch import _Call

MAX_QUERIES = 16
MIN_KEYS = 256  # below, the general kernel has as much to read as to compute
MERGE_ELEMENTS = 4096  # of the tile of pieces that a merging program holds


def serves(problem: AttentionProblem) -> bool:
    """Few queries to many keys, without dropout: what these kernels are made for."""
    is_short = 0 < problem.seqlen_q <= MAX_QUERIES and problem.seqlen_k >= MIN_KEYS
    return is_short and not problem.is_packed and problem.dropout_p == 0 and problem.num_heads > 0


def forward(call: _Call, tile: DecodeTile | None = None) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, heads, head_dim_v) and lse float32 (batch, heads, seqlen_q)."""
    from tilewise.triton.decode import attn_decode_kernel, attn_decode_merge_kernel

    problem, inputs = call.problem, call.inputs
    query, device = inputs.query, inputs.query.device
    tile = tile or _tile(problem, device)
    cfg = _config(problem, tile, _is_shared(inputs.key, inputs.value))
    rows = problem.seqlen_q * problem.group_size
    row_tiles = -(-rows // cfg.BLOCK_M)
    segments = problem.num_kv_heads * row_tiles
    workers = _processors(device) * tile.workers
    pieces = problem.batch * segments + workers
    out = query.new_empty((*query.shape[:-1], problem.head_dim_v))
    lse = torch.empty(call.stat_shape, dtype=torch.float32, device=device)
    partial = torch.empty((pieces, cfg.ROWS, problem.head_dim_v), dtype=torch.float32, device=device)
    partial_lse = torch.empty((pieces, cfg.ROWS), dtype=torch.float32, device=device)
    visibility, table = problem.visibility(), inputs.page_table
    sizes = DecodeSizes(
        batch=problem.batch,
        num_heads=problem.num_heads,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        stride_page_table=0 if table is None else table.shape[1],
        window_left=visibility.left,
        window_right=visibility.right,
        row_tiles=row_tiles,
        segments=segments,
        workers=workers,
    )
    ragged, extras = call.ragged(), call.extras()
    call.launch(
        attn_decode_kernel,
        (workers,),
        (
            *(call.rows(t) for t in inputs[:3]),
            partial,
            partial_lse,
            ragged,
            *extras[:3],
            call.factors(),
            *sizes,
        ),
        {"cfg": cfg},
        {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    )
    merge_rows = 1 if problem.batch * segments * cfg.ROWS <= 4 * _processors(device) else min(cfg.BLOCK_M, 16)
    merge_pieces = max(1, MERGE_ELEMENTS // (merge_rows * cfg.BLOCK_DV))
    call.launch(
        attn_decode_merge_kernel,
        (problem.batch * segments, -(-cfg.ROWS // merge_rows)),
        (partial, partial_lse, call.rows(out), lse, ragged, extras.sinks, *sizes),
        {"cfg": cfg, "MERGE_ROWS": merge_rows, "MERGE_PIECES": merge_pieces},
        {"num_warps": 4, **({"launch_pdl": True} if cfg.HAS_PDL else {})},
    )
    return out, lse


def _is_shared(key: Tensor, value: Tensor) -> bool:
    """The values are a view of the keys' first columns (absorbed MLA): one load serves both."""
    same_place = key.data_ptr() == value.data_ptr() and key.stride()[:3] == value.stride()[:3]
    return same_place and value.shape[-1] <= key.shape[-1]


@functools.lru_cache(maxsize=4096)
def _config(problem: AttentionProblem, tile: DecodeTile, is_shared: bool) -> Any:
    rows = problem.seqlen_q * problem.group_size
    block_m = min(tile.block_m, max(16, _power_of_two(rows)))
    block_d, rest = _parts(problem.head_dim)
    block_dv = max(16, _power_of_two(problem.head_dim_v))
    adds_to_scores = problem.softcap > 0 or problem.bias_shape is not None or problem.has_alibi
    return DecodeConfig(
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        ROWS=min(rows, block_m),
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=block_d,
        BLOCK_REST=rest,
        BLOCK_DV=block_dv,
        BLOCK_B=max(16, _power_of_two(problem.batch)),
        GROUP_SIZE=problem.group_size,
        PAGE_SIZE=problem.page_size or 0,
        HAS_SOFTCAP=problem.softcap > 0,
        IS_FOLDED=problem.scale > 0 and not adds_to_scores,
        IS_SHARED=is_shared and block_d == block_dv == problem.head_dim_v,
        IS_TRANSPOSED=tile.is_transposed,
        HAS_PDL=tile.has_pdl,
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


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _tile(problem: AttentionProblem, device: torch.device) -> DecodeTile:
    if device.type != "cuda":
        return DecodeTile(16, 16, 1, 4, 1)
    return decode_tile(problem.dtype == torch.float32, max(problem.head_dim, problem.head_dim_v))
