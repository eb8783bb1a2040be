"""Where the gradient of a bias goes: written beside dq, or summed over what shares the bias."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.gpu.launch.launch_plan import Launch, Step, Tensors, run_steps
from tilewise.gpu.triton.arguments import BiasSizes, ScoreTensor
from tilewise.gpu.triton.call import GIVEN, Call, Results, table_tile
from tilewise.gpu.triton.tuning_table import KernelTile

# Partial sums are worth this much memory for parallelism; programs enough to fill a large GPU.
PARTIAL_BIAS_BYTES = 64 << 20
ENOUGH_PROGRAMS = 1024


def unshared_dbias(problem: AttentionProblem, inputs: Inputs) -> Tensor | None:
    """Zeros for the kernel of dq to write to, where each entry of the bias serves one pair; else None."""
    full = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    is_shared = problem.is_packed or problem.bias_of_distances or problem.bias_shape != full
    if is_shared or not problem.bias_needs_grad:
        return None
    bias, sees = inputs.bias, problem.visibility()
    assert bias is not None
    is_visited = not problem.is_cached and (sees.left, sees.right, problem.functions) == (None, None, None)
    return (torch.empty if is_visited else torch.zeros)(bias.shape, dtype=bias.dtype, device=bias.device)


def shared_dbias(
    problem: AttentionProblem,
    inputs: Inputs,
    results: Results,
    tile: KernelTile | None,
    is_early: bool = True,
) -> Tensor:
    """Gradient of the bias in its own shape: float32 sums, over splits in a fixed order.

    Of a bias of distances that of its numbers, in the shape of `core.functions.distances.numbers`.
    is_early: between the kernel of row statistics and this one stands another, which has waited.
    """
    bias = inputs.bias
    assert bias is not None and problem.bias_shape is not None
    if problem.bias_of_distances and 0 in (problem.seqlen_q, problem.seqlen_k):  # there are no tiles
        return bias.new_zeros(*problem.bias_shape[:2], max(0, problem.seqlen_q + problem.seqlen_k - 1))
    tile = tile or table_tile("dbias", problem, bias.device)
    assert tile is not None
    splits, sizes = _bias_sizes(problem, problem.bias_shape, tile)
    asked = problem.gradient_dtype(bias.dtype)
    dtype = asked if splits == 1 else torch.float32  # one split is the result, rounded as it is stored
    batch, *shape = problem.bias_shape
    if problem.bias_of_distances:
        shape = [shape[0], sizes.tiles_m, tile.block_m + tile.block_n]
    partial = torch.empty((splits * batch, *shape), dtype=dtype, device=bias.device)
    given = (*inputs, *results[:GIVEN])
    choices = (tile, sizes, is_early)
    fresh = results._replace(dbias=partial)[GIVEN:]
    run_steps(problem, [Step(_dbias_launch, given, choices, fresh)])
    if partial.is_meta:  # nobody reads it; see `core.functions.distances.numbers`
        return bias.new_empty(problem.bias_shape, dtype=asked)
    total = partial if splits == 1 else partial.view(splits, batch, *shape).sum(0).to(asked)
    return _summed_by_distance(problem, total, tile.block_m) if problem.bias_of_distances else total


def _summed_by_distance(problem: AttentionProblem, diagonals: Tensor, block: int) -> Tensor:
    """Sums by distance, of those of diagonals of tiles (…, diagonals, distances of a tile): they overlap.

    The next diagonal begins `block` distances after the one before.
    """
    *lead, count, width = diagonals.shape
    blocks = diagonals.view(*lead, count, width // block, block)
    total = diagonals.new_zeros(*lead, count + width // block - 1, block)
    for n in range(width // block):
        total[..., n : n + count, :] += blocks[..., n, :]
    first = -(-problem.seqlen_q // block) * block - problem.seqlen_q  # of the rows that fill up a tile
    return total.flatten(-2)[..., first : first + problem.seqlen_q + problem.seqlen_k - 1]


@functools.lru_cache(maxsize=4096)
def _bias_sizes(problem: AttentionProblem, shape: tuple[int, ...], tile: KernelTile) -> tuple[int, BiasSizes]:
    """(splits, sizes): how the sums of a broadcast bias's gradient are split over programs."""
    batch, heads, rows, cols = shape
    tiles_m, tiles_n = -(-rows // tile.block_m), -(-cols // tile.block_n)
    loop_batch = problem.batch if batch == 1 else 1
    loop_heads = problem.num_heads if heads == 1 else 1
    loop_rows = -(-problem.seqlen_q // tile.block_m) if rows == 1 else 1
    loop_cols = -(-problem.seqlen_k // tile.block_n) if cols == 1 else 1
    programs, numbers = ENOUGH_PROGRAMS, rows * cols
    if problem.bias_of_distances:  # a program has a diagonal of tiles, some of which are short
        assert tile.block_n % tile.block_m == 0
        loop_rows, loop_cols = 1, tiles_n
        tiles_m, tiles_n = tiles_m + (tiles_n - 1) * (tile.block_n // tile.block_m), 1
        programs, numbers = 8 * ENOUGH_PROGRAMS, tiles_m * (tile.block_m + tile.block_n)
    iterations = loop_batch * loop_heads * loop_rows * loop_cols
    one_split = batch * heads * tiles_m * tiles_n
    affordable = PARTIAL_BIAS_BYTES // max(1, 4 * batch * heads * numbers)
    splits = max(1, min(iterations, affordable, programs // max(1, one_split)))
    per_split = max(1, -(-iterations // splits))
    splits = max(1, -(-iterations // per_split))
    loops = (loop_batch, loop_heads, loop_rows, loop_cols)
    return splits, BiasSizes(batch, heads, rows, cols, *loops, tiles_m, tiles_n, per_split)


def _dbias_launch(
    problem: AttentionProblem,
    tensors: Tensors,
    tile: KernelTile,
    sizes: BiasSizes,
    is_early: bool,
) -> Launch:
    from tilewise.gpu.triton.bias.kernel import attn_bwd_dbias_kernel

    call = Call(problem, tensors)
    r = call.results
    assert r.dbias is not None
    programs = r.dbias.shape[0] * sizes.bias_heads * sizes.tiles_m * sizes.tiles_n
    arguments = (
        call.source(call.inputs.query, tile.block_m, tile.has_tma, tile.is_left_shared),
        *(call.source(t, tile.block_n, tile.has_tma) for t in call.inputs[1:3]),
        call.source(r.dout, tile.block_m, tile.has_tma, tile.is_left_shared),
        *(r.shift, r.low, r.delta, ScoreTensor(r.dbias, *r.dbias.stride())),
        call.ragged(),
        call.extras(),
        call.factors(),
        call.sizes(),
        sizes,
        *(n == 1 and not problem.bias_of_distances for n in (sizes.bias_rows, sizes.bias_cols)),
        problem.bias_of_distances,
    )
    return call.launch(attn_bwd_dbias_kernel, tile, programs, arguments, is_early=is_early)
