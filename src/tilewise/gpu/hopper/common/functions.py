"""Mask and score functions in the Hopper kernels.

A tile map is made of a mask function as of a mask. Its bits are an eighth of a byte for each score that the
function says something of. Where there were more than `MOST_BITS` of them, the map is that of intervals, and
the attention kernels inline the function for partial tiles. A score function that adds a number of each
distance is a bias; any other is inlined, too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.functions.evaluate import Buffers
from tilewise.core.functions.expression import decode
from tilewise.core.functions.tile_map import hiding_numbers
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.gpu.functions.captured import layout_on
from tilewise.gpu.functions.distances import with_bias_of_distances
from tilewise.gpu.functions.source import Helpers, KernelFunctions, helpers, kernel_functions
from tilewise.gpu.launch.launch_plan import Tensors

MOST_BITS = 1 << 29  # 64 MiB: one mask of 23k x 23k tokens
MOST_TILES = 1 << 24  # of a map, 192 MiB: one mask of 370k x 370k tokens, of each query head of a group
SMALLEST_TILE = 128 * 64


def unserved_functions(problem: AttentionProblem) -> str | None:
    """None if a problem has no functions, or those that the kernels take, else why not."""
    if problem.functions is None:
        return None
    if problem.is_cached:
        return "takes no functions with a cache"
    served = with_bias_of_distances(problem)
    has_mask = served.functions is not None and decode(served.functions).mask is not None
    if problem.is_packed and (has_mask or served.bias_of_distances):
        return "takes mask functions and score functions of the distance in dense calls only"
    if not has_mask:
        return None
    problem = served
    if problem.mask_shape is not None:
        return "takes a mask or a mask function, not both"
    batch, heads, *lengths = _shape(problem)
    scores = math.prod((batch, problem.group_size if heads == 1 else heads, *lengths))
    if scores > MOST_TILES * SMALLEST_TILE:
        return f"takes mask functions of up to {MOST_TILES * SMALLEST_TILE} different scores, not {scores}"
    return None


class MaskFunction(NamedTuple):
    """A mask function in a call: it hides what a mask (batch, heads, seqlen_q, seqlen_k) of it would."""

    kernel: KernelFunctions
    shape: tuple[int, int, int, int]  # 1 where it does not depend on the index
    lengths: tuple[int, int]
    extent: tuple[int, int, int, int]  # of the call
    buffers: Buffers
    captured: Tensors  # floats, integers, layout on the GPU
    is_inlined: bool  # by the attention kernels: it has no bits
    device: torch.device
    numbers: tuple[Tensor, ...]  # of the captured ones, those that say what is hidden
    layout: tuple[int, ...]


def source_of(problem: AttentionProblem, inputs: Inputs) -> Tensor | MaskFunction:
    """What hides scores in a call: its mask or its mask function."""
    if inputs.mask is not None:
        return inputs.mask
    functions = decode(problem.functions or "").mask_only
    buffers = inputs.captured
    device, lengths = inputs.query.device, (problem.seqlen_q, problem.seqlen_k)
    hiding = hiding_numbers(functions, buffers)
    kernel = kernel_functions(functions.text)
    captured, is_inlined = captured_of(inputs), inlines_mask(problem)
    return MaskFunction(
        kernel, _shape(problem), lengths, problem.extent, buffers, captured, is_inlined, device, *hiding
    )


def inlines_mask(problem: AttentionProblem) -> bool:
    """Whether kernels inline a problem's mask function, which would have too many bits."""
    has_mask = problem.functions is not None and decode(problem.functions).mask is not None
    return has_mask and math.prod(_shape(problem)) > MOST_BITS


def captured_of(inputs: Inputs) -> Tensors:
    """What functions read, as the kernels take it: floats, integers, layout on the GPU."""
    layout = layout_on(inputs.captured_layout, inputs.query.device)
    return inputs.captured_floats, inputs.captured_integers, layout


def compiled_functions(problem: AttentionProblem) -> Helpers:
    """What kernels inline of a problem's functions."""
    if not (problem.has_score_function or inlines_mask(problem)):
        return Helpers()
    functions = decode(problem.functions or "")
    return helpers(kernel_functions((functions if inlines_mask(problem) else functions.score_only).text))


def as_served(problem: AttentionProblem) -> AttentionProblem:
    """The problem as kernels see it: with a mask of the shape that its mask function needs, and a bias of
    what its score function adds, if that is a number of each distance."""
    problem = with_bias_of_distances(problem)
    if problem.functions is None or decode(problem.functions).mask is None:
        return problem
    return replace(problem, mask_shape=_shape(problem))


def _shape(problem: AttentionProblem) -> tuple[int, int, int, int]:
    """Of the smallest mask that hides what a problem's function does."""
    needs = decode(problem.functions or "").mask_only.hides_by
    sizes = {"b": problem.batch, "h": problem.num_heads, "i": problem.seqlen_q, "j": problem.seqlen_k}
    batch, heads, rows, columns = (n if name in needs else 1 for name, n in sizes.items())
    return batch, heads, rows, columns
