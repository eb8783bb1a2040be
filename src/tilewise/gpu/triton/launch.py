"""The Triton backend: what it serves, and which kernels a forward and a backward launch.

Nothing here depends on lengths at compile time, so a new sequence length or batch size runs the kernels
that are already compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.functions.expression import decode
from tilewise.core.plan import Results as Known
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import new_out
from tilewise.gpu.functions import distances
from tilewise.gpu.functions.distances import as_bias
from tilewise.gpu.functions.source import wanted_tensors
from tilewise.gpu.launch.launch_plan import Launch, Step, Tensors, run, run_steps
from tilewise.gpu.triton import launch_decode
from tilewise.gpu.triton.arguments import STAT_ROWS, ScoreTensor
from tilewise.gpu.triton.bias.launch import shared_dbias, unshared_dbias
from tilewise.gpu.triton.call import (
    GIVEN,
    Call,
    Results,
    distances_as_bias,
    launchable,
    table_tile,
    with_dense_rows,
)
from tilewise.gpu.triton.functions.visits import visits
from tilewise.gpu.triton.tuning_table import KernelTile

SHORT_QUERY = 16


class BiasGradient(NamedTuple):
    """What is left to this backend by one that has no gradient of a bias."""

    bias: Tensor | None
    captured_floats: Tensor | None  # whose numbers are a bias of distances


Tiles = dict[str, KernelTile]


def forward(
    problem: AttentionProblem,
    inputs: Inputs,
    tile: KernelTile | None = None,
    order: str = "bshd",
    residual: bool = False,
) -> tuple[Tensor, ...]:
    """out (like query, head_dim_v) and lse float32 (batch, heads, seqlen_q), packed (heads, total_q).

    And, if asked for, what rounding took from lse, in its shape.
    """
    if problem.is_quantized and (tile is not None or not launch_decode.serves(problem)):
        from tilewise.gpu.launch.eight_bit_pages import dequantized

        problem, inputs = dequantized(problem, inputs)
    if tile is None and launch_decode.serves(problem):
        return launch_decode.forward(problem, inputs, residual=residual)
    problem, inputs = as_bias(problem, inputs, distances_as_bias)
    given, inputs = inputs, launchable(inputs)
    query = inputs.query
    *batch, seqlen, heads, _ = query.shape
    out = new_out(query, problem.head_dim_v, order, problem.out_dtype)
    lse = query.new_empty((*batch, heads, seqlen), dtype=torch.float32)
    rest = (lse.new_empty(lse.shape),) if residual else ()
    results = Results(out, lse, *rest)
    if problem.functions is not None:
        tile = tile or _forward_tile(Call(problem, inputs))
        visited, counts = visits(problem, given, tile.block_m, tile.block_n)
        results = results._replace(order=visited, counts=counts)
    run(forward_launch, problem, inputs, tile, fresh=results)
    return out, lse, *rest


def _forward_tile(call: Call) -> KernelTile:
    is_short = not call.problem.is_packed and call.problem.seqlen_q <= SHORT_QUERY
    return call.tile("forward_short" if is_short else "forward")


def forward_launch(problem: AttentionProblem, tensors: Tensors, tile: KernelTile | None) -> Launch:
    from tilewise.gpu.triton.forward import attn_fwd_kernel

    call = Call(problem, tensors)
    tile = tile or _forward_tile(call)
    arguments = (
        call.rows(call.inputs.query),
        *(call.source(t, tile.block_n, tile.has_tma) for t in call.inputs[1:3]),
        *(call.rows(call.results.out), call.results.lse, call.results.residual),
    )
    return call.launch_tiled(attn_fwd_kernel, tile, arguments)


def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    known: Known,
    dout: Tensor,
    dlse: Tensor | None,
    tiles: Tiles | None = None,
) -> Gradients:
    """Gradients by recomputation from lse + residual; the same bits every time."""
    call = (problem, inputs)
    problem, inputs = as_bias(problem, inputs, distances_as_bias)
    tiles, given_inputs, inputs = tiles or {}, inputs, launchable(inputs)
    query, key, value = inputs[:3]
    # rows outside a cache's sequences are never visited
    fresh = torch.zeros if problem.is_cached else torch.empty
    dk, dv = (fresh(t.shape, dtype=problem.gradient_dtype(t.dtype), device=t.device) for t in (key, value))
    dq = query.new_empty(query.shape, dtype=problem.gradient_dtype(query.dtype))
    given = _readable(known, dout, dlse)
    dbias, dcaptured = unshared_dbias(problem, inputs), _new_dcaptured(problem, inputs)
    results = Results(*given, *new_statistics(problem, given[1]), dq, dk, dv, dbias, dcaptured)
    steps = backward_steps(problem, inputs, results, tiles, given_inputs)
    run_steps(problem, steps)
    if problem.bias_needs_grad and dbias is None:
        dbias = shared_dbias(problem, inputs, results, tiles.get("dbias"))
    dsinks = results.dsinks
    if dsinks is not None:
        dsinks = dsinks.sum(-1 if problem.is_packed else (0, 2)).to(inputs.sinks.dtype)  # type: ignore[union-attr]
    if problem.bias_of_distances:
        dcaptured = None if dbias is None else distances.gradient(*call, dbias)
        dbias = None
    return Gradients(dq, dk, dv, dbias, dsinks, dcaptured)


def bias_gradient(
    problem: AttentionProblem, inputs: Inputs, known: Known, dout: Tensor, dlse: Tensor | None
) -> BiasGradient:
    """That of the bias, or of what makes a bias of distances, beside a backward without it.

    The same bits every time.
    """
    call = (problem, inputs)
    problem, inputs = as_bias(problem, inputs, distances_as_bias)
    inputs = launchable(inputs)
    given = _readable(known, dout, dlse)
    results = Results(*given, *new_statistics(problem, given[1]))
    run_steps(problem, [_step((*inputs, *given), _prepare_launch, results)])
    dbias = shared_dbias(problem, inputs, results, None, is_early=False)
    if problem.bias_of_distances:
        return BiasGradient(None, distances.gradient(*call, dbias))
    return BiasGradient(dbias, None)


def _readable(
    known: Known, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """The first of `Results` as kernels can read them."""
    out, lse, residual = known
    assert out is not None and lse is not None
    residual, dlse = (None if t is None else t.contiguous() for t in (residual, dlse))
    return with_dense_rows(out), lse.contiguous(), residual, with_dense_rows(dout), dlse


def new_statistics(problem: AttentionProblem, lse: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """shift, low and delta, and the summands of dsinks."""
    *heads, rows = padded_rows(problem, lse.shape)
    shift, low, delta = lse.new_empty(3, *heads, rows)
    return shift, low, delta, lse.new_empty(*heads, rows // STAT_ROWS) if problem.has_sinks else None


def padded_rows(problem: AttentionProblem, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of shift, low and delta for an lse: rows in blocks of STAT_ROWS."""
    *heads, seqlen = shape
    blocks = seqlen // STAT_ROWS + problem.batch if problem.is_packed else -(-seqlen // STAT_ROWS)
    return (*heads, blocks * STAT_ROWS)


def backward_steps(
    problem: AttentionProblem,
    inputs: Inputs,
    results: Results,
    tiles: Tiles,
    given_inputs: Inputs | None = None,
) -> list[Step]:
    """The launches of a backward but for the bias: row statistics, dk and dv, dq.

    Args:
        inputs: as `launchable` gives them.
        given_inputs: with functions, those that they are evaluated by.
    """
    given, device = (*inputs, *results[:GIVEN]), inputs.query.device

    def step(build: Callable[..., Launch], results: Results, name: str, tile: KernelTile | None) -> Step:
        if problem.functions is None or given_inputs is None:
            return _step(given, build, results, tile)
        by_key = name != "dq"
        adds_captured = not by_key and wanted_tensors(problem.functions)
        tile = tile or table_tile("dq_captured" if adds_captured else name, problem, device)
        assert tile is not None
        order, counts = visits(problem, given_inputs, tile.block_m, tile.block_n, by_key)
        results = results._replace(order=order, counts=counts)
        return _step(given, build, results, tile)

    steps = [_step(given, _prepare_launch, results)]
    dk_tile, dv_tile = (tiles.get(n) or table_tile(n, problem, device) for n in ("dk", "dv"))
    if dk_tile is None or dv_tile is None or "dkdv" in tiles:
        steps.append(step(_dkdv_launch, results, "dkdv", tiles.get("dkdv")))
    else:
        steps.append(step(_dkdv_launch, results._replace(dv=None), "dk", dk_tile))
        steps.append(step(_dkdv_launch, results._replace(dk=None), "dv", dv_tile))
    return [*steps, step(_dq_launch, results, "dq", tiles.get("dq"))]


def _step(given: Tensors, build: Callable[..., Launch], results: Results, *choices: Any) -> Step:
    """A backward kernel's launch; `given` are the inputs and what comes first in `results`."""
    return Step(build, given, choices, results[GIVEN:])


def _prepare_launch(problem: AttentionProblem, tensors: Tensors) -> Launch:
    from tilewise.gpu.triton.backward import attn_bwd_prepare_kernel

    call = Call(problem, tensors)
    r, blocks = call.results, call.tiles_q(STAT_ROWS)
    is_wide = problem.head_dim_v * problem.dtype.itemsize > 512  # bytes of a row; 128 of them would spill
    tile = KernelTile(32 if is_wide else STAT_ROWS, 16, 4, 1)
    arguments = (
        call.rows(r.out),
        call.rows(r.dout),
        *(r.lse, r.residual, r.dlse, r.shift, r.low, r.delta, r.dsinks),
        call.ragged(),
        call.inputs.sinks,
        call.factors(),
        call.sizes(blocks, call.bh_q, call.bh_q),
    )
    return call.launch(attn_bwd_prepare_kernel, tile, blocks * call.bh_q, arguments)


def _dkdv_launch(problem: AttentionProblem, tensors: Tensors, tile: KernelTile | None) -> Launch:
    from tilewise.gpu.triton.backward import attn_bwd_dkdv_kernel

    call = Call(problem, tensors)
    r, tile = call.results, tile or call.tile("dkdv")
    arguments = (
        call.source(call.inputs.query, tile.block_m, tile.has_tma),
        *map(call.rows, call.inputs[1:3]),
        call.source(r.dout, tile.block_m, tile.has_tma),
        *(*map(call.rows, (r.dk, r.dv)), r.shift, r.low, r.delta),
    )
    return call.launch_tiled(attn_bwd_dkdv_kernel, tile, arguments, by_key=True, is_early=True)


def _dq_launch(problem: AttentionProblem, tensors: Tensors, tile: KernelTile | None) -> Launch:
    from tilewise.gpu.triton.backward import attn_bwd_dq_kernel

    wanted = wanted_tensors(problem.functions)
    call = Call(problem, tensors, wanted)
    r, tile = call.results, tile or call.tile("dq")
    arguments = (
        call.rows(call.inputs.query),
        *(call.source(t, tile.block_n, tile.has_tma) for t in call.inputs[1:3]),
        *map(call.rows, (r.dout, r.dq)),
        None if r.dbias is None else ScoreTensor(r.dbias, *r.dbias.stride()),
        r.dcaptured if wanted else None,
        *(r.shift, r.low, r.delta),
    )
    return call.launch_tiled(attn_bwd_dq_kernel, tile, arguments, is_early=True)


def _new_dcaptured(problem: AttentionProblem, inputs: Inputs) -> Tensor | None:
    """Zeros for the kernel of dq to add the gradients of captured tensors to, if one of them wants it."""
    floats = inputs.captured_floats
    if floats is None or problem.functions is None or not decode(problem.functions).wants_grad:
        return None
    return floats.new_zeros(floats.shape)
