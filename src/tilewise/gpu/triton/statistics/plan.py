"""The pass of the Triton kernels over the scores of a call whose lse is known."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.plan import Results
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.statistics import GROUP, Aux, Measured, new_measured
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run
from tilewise.gpu.triton.call import Call, launchable

ALL_ROWS = (1 << 31) - 1


class StatisticsPlan(NamedTuple):
    """All but single rows of weights: `Measured`. Deterministic."""

    problem: AttentionProblem
    aux: Aux

    def run(self, inputs: Inputs, results: Results | None = None, *_: Tensor | None) -> Measured:
        assert results is not None and results.lse is not None
        problem, aux = self.problem, self.aux
        found = new_measured(aux, problem, inputs)
        if problem.is_quantized:
            from tilewise.gpu.launch.eight_bit_pages import dequantized

            problem, inputs = dequantized(problem, inputs)
        inputs = launchable(inputs)
        known = (None if t is None else t.contiguous() for t in (results.lse, results.residual))
        tensors = (*inputs, None, *known)
        if not (inputs.query.numel() and inputs.key.numel()):
            return found
        of_rows = found.row_max, found.entropy, found.expected_distance
        if any(t is not None for t in of_rows):
            run(_row_launch, problem, tensors, fresh=of_rows)
        if found.column_sum is not None:
            last_rows = ALL_ROWS if aux.last_rows is None else min(aux.last_rows, ALL_ROWS)
            choices = last_rows, aux.column_sum == GROUP
            run(_column_launch, problem, tensors, *choices, fresh=(found.column_sum,))
        if found.block_sum is not None:
            run(_block_launch, problem, tensors, aux.block_sum, fresh=(found.block_sum,))
        if found.top_keys is not None:
            largest = found.top_weights, found.top_keys, None
            run(_top_k_launch, problem, tensors, aux.top_k, fresh=largest)
        return found


def redo_top_k(
    problem: AttentionProblem,
    inputs: Inputs,
    known: tuple[Tensor | None, Tensor | None],
    weights: Tensor,
    keys: Tensor,
    held: Tensor,
    list_size: int,
) -> None:
    """The largest weights of queries whose lists of candidates were too short, in place.

    Args:
        known: lse and residual.
        held: how many candidates each query's four lists of list_size held, or would have held.
    """
    tensors = (*launchable(inputs), None, *known)
    run(_top_k_launch, problem, tensors, keys.shape[-1], list_size, fresh=(weights, keys, held))


def _row_launch(problem: AttentionProblem, tensors: Tensors) -> Launch:
    from tilewise.gpu.triton.statistics.kernels import attn_row_statistics_kernel

    *known, row_max, entropy, distance = tensors
    call = Call(problem, tuple(known))
    tile = call.tile("forward")
    arguments = (
        call.rows(call.inputs.query),
        call.source(call.inputs.key, tile.block_n, tile.has_tma),
        *(call.results.lse, call.results.residual, row_max, entropy, distance),
    )
    return call.launch_tiled(attn_row_statistics_kernel, tile, arguments)


def _column_launch(problem: AttentionProblem, tensors: Tensors, last_rows: int, is_of_group: bool) -> Launch:
    from tilewise.gpu.triton.statistics.kernels import attn_column_sum_kernel

    *known, columns = tensors
    assert columns is not None
    call = Call(problem, tuple(known))
    tile = call.tile("dkdv")
    strides = (0, columns.stride(0)) if problem.has_packed_keys else columns.stride()[:2]
    arguments = (
        call.source(call.inputs.query, tile.block_m, tile.has_tma),
        call.source(call.inputs.key),
        *(call.results.lse, call.results.residual, columns, *strides, last_rows, is_of_group),
    )
    return call.launch_tiled(attn_column_sum_kernel, tile, arguments, by_key=True)


def _block_launch(problem: AttentionProblem, tensors: Tensors, size: int) -> Launch:
    from tilewise.gpu.triton.statistics.blocks import attn_block_sum_kernel

    *known, blocks = tensors
    assert blocks is not None
    call = Call(problem, tuple(known))
    arguments = (
        call.rows(call.inputs.query),
        call.source(call.inputs.key),
        *(call.results.lse, call.results.residual, blocks, size, *blocks.shape[2:]),
        *(call.ragged(), call.extras(), call.factors(), call.sizes()),
    )
    return call.launch(attn_block_sum_kernel, call.tile("forward"), blocks.numel(), arguments)


def _top_k_launch(problem: AttentionProblem, tensors: Tensors, count: int, list_size: int = 0) -> Launch:
    """The largest weights of all queries, or of those whose lists of candidates were too short."""
    from tilewise.gpu.triton.statistics.largest import attn_top_k_kernel

    *known, weights, keys, held = tensors
    call = Call(problem, tuple(known))
    # Products on the plain arithmetic units leave few registers to the weights that are kept.
    is_plain = (problem.dtype, problem.precision) == (torch.float32, "ieee")
    tile = call.tile("forward_short" if is_plain else "forward")
    arguments = (
        call.rows(call.inputs.query),
        call.source(call.inputs.key, tile.block_n, tile.has_tma),
        *(call.results.lse, call.results.residual, weights, keys, held),
        *(list_size, count, 1 << (count - 1).bit_length()),
    )
    return call.launch_tiled(attn_top_k_kernel, tile, arguments, is_early=held is not None)
