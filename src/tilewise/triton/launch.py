"""Host side of the Triton backend: what it serves, and the launch of its kernels.

Nothing here depends on lengths at compile time, so a new sequence length or batch size runs the kernels
that are already compiled.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from tilewise.problem import AttentionProblem, Gradients, Inputs
from tilewise.triton import launch_decode
from tilewise.triton.arguments import (
    BiasSizes,
    Extras,
    Factors,
    KernelConfig,
    Ragged,
    Rows,
    ScoreTensor,
    Sizes,
    Slopes,
)
from tilewise.tuning_table import KernelTile, kernel_tile

FLOAT32_PRECISION = "ieee"  # or "tf32": ten bits of mantissa at the speed of the matrix units

# Heads are worked through in sections whose keys and values (or queries) stay in the L2 cache together.
SECTION_BYTES = 24 << 20

# dbias: partial sums are worth this much memory for parallelism; programs enough to fill a large GPU.
PARTIAL_BIAS_BYTES = 64 << 20
ENOUGH_PROGRAMS = 1024

SHORT_QUERY = 16


@functools.cache
def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on CPU tensors (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def supports(problem: AttentionProblem) -> str | None:
    """None if the Triton kernels serve the problem, else why not."""
    if not _is_installed():
        return "the package triton is not installed"
    if problem.device_type != "cuda" and not (is_interpreted() and problem.device_type == "cpu"):
        return f"Triton kernels run on GPUs, not on device type {problem.device_type!r}"
    if problem.dtype == torch.float64:
        return "float64 is not supported, only float32, bfloat16 and float16 are"
    return None


def forward(
    problem: AttentionProblem, inputs: Inputs, tile: KernelTile | None = None
) -> tuple[Tensor, Tensor]:
    """out (like query, head_dim_v) and lse float32 (batch, heads, seqlen_q), packed (heads, total_q)."""
    from tilewise.triton.forward import attn_fwd_kernel

    call = _Call(problem, inputs)
    if tile is None and launch_decode.serves(problem):
        return launch_decode.forward(call)
    query = call.inputs.query
    out = query.new_empty((*query.shape[:-1], problem.head_dim_v))
    lse = torch.empty(call.stat_shape, dtype=torch.float32, device=query.device)
    is_short = not problem.is_packed and problem.seqlen_q <= SHORT_QUERY
    tile = tile or _tile("forward_short" if is_short else "forward", problem, query.device)
    num_tiles = call.tiles_q(tile.block_m)
    key_bytes = call.seqlen_k * (problem.head_dim + problem.head_dim_v) * query.element_size()
    section = problem.group_size * max(1, SECTION_BYTES // max(1, key_bytes))
    call.run(
        attn_fwd_kernel,
        tile,
        num_tiles * call.slots_q,
        (
            call.rows(query),
            call.rows(call.inputs.key),
            call.rows(call.inputs.value),
            call.rows(out),
            lse,
            call.ragged(),
            *call.extras(),
            call.factors(),
            *call.sizes(num_tiles, call.slots_q, section),
        ),
    )
    return out, lse


def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    tiles: dict[str, KernelTile] | None = None,
) -> Gradients:
    """Gradients by recomputation from lse, each in the dtype of its input; the same bits every time."""
    call = _Call(problem, inputs)
    tiles = tiles or {}
    dout, lse = call.last_dim_contiguous(dout), lse.contiguous()
    delta = _delta(call, out, dout, dlse)
    query, key, value = call.inputs[:3]
    dq = query.new_empty(query.shape)
    # rows outside a cache's sequences are never visited
    fresh = torch.zeros if problem.is_cached else torch.empty
    dk, dv = (fresh(t.shape, dtype=t.dtype, device=t.device) for t in (key, value))
    _dkdv(call, dout, lse, delta, dk, dv, tiles.get("dkdv"))
    _dq(call, dout, lse, delta, dq, tiles.get("dq"))
    dbias = _dbias(call, dout, lse, delta, tiles.get("dbias")) if problem.bias_needs_grad else None
    dsinks = None if inputs.sinks is None else _dsinks(call, lse, delta)
    return Gradients(dq, dk, dv, dbias, dsinks)


def warmup(problem: AttentionProblem, device: torch.device | str = "cuda") -> None:
    """Compile what a call like `problem` needs, by a call on one short sequence.

    Serves dense problems without masks or biases; others compile at their first call.
    """
    from dataclasses import replace

    if supports(problem) is not None or problem.is_packed or problem.is_paged:
        return
    length = min(problem.seqlen_q, 32)
    small = replace(problem, batch=1, seqlen_q=length, seqlen_k=32, is_cached=False)
    make = functools.partial(torch.zeros, dtype=problem.dtype, device=device)
    inputs = Inputs(
        make(1, length, problem.num_heads, problem.head_dim),
        make(1, 32, problem.num_kv_heads, problem.head_dim),
        make(1, 32, problem.num_kv_heads, problem.head_dim_v),
        sinks=make(problem.num_heads) if problem.has_sinks else None,
        dropout_seed=torch.zeros((), dtype=torch.int64, device=device) if problem.dropout_p > 0 else None,
    )
    out, lse = forward(small, inputs)
    if problem.needs_grad:
        backward(small, inputs, out, lse, out, None)


class _Call:
    """One call's tensors and numbers in the form that the kernels take."""

    def __init__(self, problem: AttentionProblem, inputs: Inputs) -> None:
        self.problem = problem
        query, key, value = (self.last_dim_contiguous(t) for t in inputs[:3])
        self.inputs = inputs._replace(query=query, key=key, value=value)
        self.is_packed = problem.is_packed
        self.seqlen_q = query.shape[0] if self.is_packed else problem.seqlen_q
        self.seqlen_k = key.shape[0] if problem.has_packed_keys else problem.seqlen_k
        rows = (self.seqlen_q,) if self.is_packed else (problem.batch, self.seqlen_q)
        self.stat_shape = (*rows[:-1], problem.num_heads, rows[-1])
        self.slots_q = problem.num_heads * (1 if self.is_packed else problem.batch)
        self.slots_k = problem.num_kv_heads * (1 if self.is_packed else problem.batch)

    def last_dim_contiguous(self, t: Tensor) -> Tensor:
        """t, or a copy if its last dimension has gaps or a tile of its rows would span 2^31."""
        row = t.stride(0 if t.ndim == 3 else 1)
        is_fine = (t.shape[-1] == 1 or t.stride(-1) == 1) and row < 1 << 23
        return t if is_fine else t.contiguous()

    def tiles_q(self, block: int) -> int:
        return self.seqlen_q // block + self.problem.batch if self.is_packed else -(-self.seqlen_q // block)

    def tiles_k(self, block: int) -> int:
        return self.seqlen_k // block + self.problem.batch if self.is_packed else -(-self.seqlen_k // block)

    def rows(self, t: Tensor) -> Any:
        strides = t.stride() if 1 not in t.shape else _canonical_strides(t)
        return Rows(t, 0, strides[0], strides[1]) if t.ndim == 3 else Rows(t, *strides[:3])

    def ragged(self) -> Any:
        i = self.inputs
        tensors = (i.cu_seqlens_q, i.cu_seqlens_k, i.seqlens_k, i.leftpad_k, i.page_table)
        return Ragged(*(None if t is None else t.contiguous() for t in tensors))

    def extras(self) -> Any:
        i, device = self.inputs, self.inputs.query.device

        def score_tensor(t: Tensor | None) -> Any:
            if t is None:
                return None
            return ScoreTensor(t, *_canonical_strides(t))

        slopes = None
        if i.alibi_slopes is not None:
            table = i.alibi_slopes.contiguous()
            slopes = Slopes(table, table.stride(0) if table.ndim == 2 else 0)
        mask = None if i.mask is None else i.mask.view(torch.uint8)
        sinks = None if i.sinks is None else i.sinks.contiguous()
        uses_seed = self.problem.dropout_p > 0 and i.dropout_seed is not None
        seed = i.dropout_seed.to(device) if uses_seed else None  # type: ignore[union-attr]
        return Extras(score_tensor(mask), score_tensor(i.bias), slopes, sinks, seed)

    def sizes(self, num_tiles: int, num_slots: int, section: int) -> Any:
        problem = self.problem
        visibility = problem.visibility()
        threshold = int(problem.dropout_p * 2**32)
        table = self.inputs.page_table
        return Sizes(
            batch=problem.batch,
            num_heads=problem.num_heads,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            stride_page_table=0 if table is None else table.shape[1],
            window_left=visibility.left,
            window_right=visibility.right,
            dropout_threshold=threshold - (1 << 32) if threshold >= 1 << 31 else threshold,
            num_tiles=num_tiles,
            num_slots=num_slots,
            section=section,
        )

    def factors(self) -> Any:
        return Factors(self.problem.scale, self.problem.softcap, 1.0 / (1.0 - self.problem.dropout_p))

    def run(self, kernel: Any, tile: KernelTile, programs: int, args: tuple, **constants: bool) -> None:
        """Launch one program for each unit of work, on the tensors' own device and current stream."""
        if programs == 0:
            return
        cfg = _config(self.problem, tile)
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        self.launch(kernel, (programs,), args, {**constants, "cfg": cfg}, options)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple, constants: dict[str, Any], options: dict[str, Any]
    ) -> None:
        """Launch a grid of programs on the tensors' own device and current stream."""
        # fused multiply-adds: the exponential's scale costs nothing
        options = {} if is_interpreted() else {**options, "enable_fp_fusion": True}
        device = self.inputs.query.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                kernel[grid](*args, **constants, **options)
        else:
            kernel[grid](*args, **constants, **options)


def _delta(call: _Call, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """delta = rowsum(dO * O) - dlse, float32, shaped like lse."""
    from tilewise.triton.backward import attn_bwd_delta_kernel

    delta = torch.empty(call.stat_shape, dtype=torch.float32, device=out.device)
    block = 32 if call.problem.head_dim_v > 256 else 128
    tile = KernelTile(block, 16, 4, 1)
    num_tiles = -(-call.seqlen_q // block)
    args = (
        call.rows(call.last_dim_contiguous(out)),
        call.rows(dout),
        delta,
        None if dlse is None else dlse.contiguous(),
        *call.sizes(num_tiles, call.slots_q, call.slots_q),
    )
    call.run(attn_bwd_delta_kernel, tile, num_tiles * call.slots_q, args)
    return delta


def _dkdv(
    call: _Call, dout: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, tile: KernelTile | None
) -> None:
    from tilewise.triton.backward import attn_bwd_dkdv_kernel

    problem, inputs = call.problem, call.inputs
    tile = tile or _tile("dkdv", problem, dk.device)
    num_tiles = call.tiles_k(tile.block_n)
    per_query = problem.group_size * (problem.head_dim + problem.head_dim_v) * dk.element_size()
    section = max(1, SECTION_BYTES // max(1, call.seqlen_q * per_query))
    tensors = (inputs.query, inputs.key, inputs.value, dout, dk, dv)
    args = (
        *(call.rows(t) for t in tensors),
        lse,
        delta,
        call.ragged(),
        *call.extras(),
        call.factors(),
        *call.sizes(num_tiles, call.slots_k, section),
    )
    call.run(attn_bwd_dkdv_kernel, tile, num_tiles * call.slots_k, args)


def _dq(call: _Call, dout: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, tile: KernelTile | None) -> None:
    from tilewise.triton.backward import attn_bwd_dq_kernel

    problem, inputs = call.problem, call.inputs
    tile = tile or _tile("dq", problem, dq.device)
    num_tiles = call.tiles_q(tile.block_m)
    key_bytes = call.seqlen_k * (problem.head_dim + problem.head_dim_v) * dq.element_size()
    section = problem.group_size * max(1, SECTION_BYTES // max(1, key_bytes))
    tensors = (inputs.query, inputs.key, inputs.value, dout, dq)
    args = (
        *(call.rows(t) for t in tensors),
        lse,
        delta,
        call.ragged(),
        *call.extras(),
        call.factors(),
        *call.sizes(num_tiles, call.slots_q, section),
    )
    call.run(attn_bwd_dq_kernel, tile, num_tiles * call.slots_q, args)


def _dbias(call: _Call, dout: Tensor, lse: Tensor, delta: Tensor, tile: KernelTile | None) -> Tensor:
    """Gradient of the bias in its own shape and dtype: float32 sums over parts, added in a fixed order."""
    from tilewise.triton.backward import attn_bwd_dbias_kernel

    problem, inputs = call.problem, call.inputs
    bias = inputs.bias
    assert bias is not None
    tile = tile or _tile("dbias", problem, bias.device)
    batch, heads, rows, cols = bias.shape
    tiles_m, tiles_n = -(-rows // tile.block_m), -(-cols // tile.block_n)
    loop_batch = problem.batch if batch == 1 else 1
    loop_heads = problem.num_heads if heads == 1 else 1
    loop_rows = -(-problem.seqlen_q // tile.block_m) if rows == 1 else 1
    loop_cols = -(-problem.seqlen_k // tile.block_n) if cols == 1 else 1
    iterations = loop_batch * loop_heads * loop_rows * loop_cols
    one_part = batch * heads * tiles_m * tiles_n
    affordable = PARTIAL_BIAS_BYTES // max(1, 4 * bias.numel())
    parts = max(1, min(iterations, affordable, ENOUGH_PROGRAMS // max(1, one_part)))
    per_part = max(1, -(-iterations // parts))
    parts = max(1, -(-iterations // per_part))
    partial = torch.empty((parts, *bias.shape), dtype=torch.float32, device=bias.device)
    args = (
        *(call.rows(t) for t in (inputs.query, inputs.key, inputs.value, dout)),
        lse,
        delta,
        partial,
        call.ragged(),
        *call.extras(),
        call.factors(),
        *call.sizes(0, 0, 0),
        *BiasSizes(
            batch, heads, rows, cols, loop_batch, loop_heads, loop_rows, loop_cols, tiles_m, tiles_n, per_part
        ),
    )
    call.run(
        attn_bwd_dbias_kernel,
        tile,
        parts * one_part,
        args,
        ROWS_BROADCAST=rows == 1,
        COLS_BROADCAST=cols == 1,
    )
    return (partial[0] if parts == 1 else partial.sum(0)).to(bias.dtype)


def _dsinks(call: _Call, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum of p_sink * delta over all rows of a head."""
    sinks = call.inputs.sinks
    assert sinks is not None
    p_sink = torch.exp(sinks.float()[:, None] - lse)
    p_sink = torch.where(lse == float("-inf"), 0.0, p_sink)  # an absent sink in a row that sees no key
    total = (p_sink * delta).sum(-1 if call.is_packed else (0, 2))
    return total.neg().to(sinks.dtype)


def _canonical_strides(t: Tensor) -> tuple[int, ...]:
    """t's strides, 0 where the size is one: there any number may stand, and must not cause a compilation."""
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride()))


@functools.lru_cache(maxsize=4096)
def _config(problem: AttentionProblem, tile: KernelTile) -> Any:
    adds_to_scores = problem.softcap > 0 or problem.bias_shape is not None or problem.has_alibi
    return KernelConfig(
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        HEAD_DIM=problem.head_dim,
        HEAD_DIM_V=problem.head_dim_v,
        BLOCK_D=_padded(problem.head_dim),
        BLOCK_DV=_padded(problem.head_dim_v),
        GROUP_SIZE=problem.group_size,
        PAGE_SIZE=problem.page_size or 0,
        HAS_SOFTCAP=problem.softcap > 0,
        IS_FOLDED=problem.scale > 0 and not adds_to_scores,
        PRECISION=FLOAT32_PRECISION,
    )


def _padded(head_dim: int) -> int:
    return max(16, 1 << (head_dim - 1).bit_length())


def _tile(kernel: str, problem: AttentionProblem, device: torch.device) -> KernelTile:
    if is_interpreted():
        return KernelTile(16, 16, 4, 1)
    return _measured_tile(kernel, problem, _capability(device))


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability; other vendors' GPUs take the portable tiles."""
    return (8, 0) if torch.version.hip else torch.cuda.get_device_capability(device)


@functools.lru_cache(maxsize=4096)
def _measured_tile(kernel: str, problem: AttentionProblem, capability: tuple[int, int]) -> KernelTile:
    padded = max(_padded(problem.head_dim), _padded(problem.head_dim_v))
    has_tensors = problem.mask_shape is not None or problem.bias_shape is not None or problem.has_alibi
    has_extras = has_tensors or problem.softcap > 0 or problem.dropout_p > 0
    return kernel_tile(kernel, capability, problem.dtype == torch.float32, padded, has_extras)
