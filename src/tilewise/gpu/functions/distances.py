"""Score functions of the distance as kernels see them: a bias whose rows are one another's, shifted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.core.functions.distances import DistanceBias, captured_gradient, distance_bias, numbers
from tilewise.core.kept import kept
from tilewise.core.problem import AttentionProblem, Inputs

Arrange = Callable[[AttentionProblem, Tensor], Tensor]


@functools.lru_cache(maxsize=4096)
def with_bias_of_distances(problem: AttentionProblem) -> AttentionProblem:
    """The problem as kernels see it: with a bias (batch or 1, heads or 1, seqlen_q, seqlen_k) in the place of
    its score function, if that adds a number of the distance. Else the problem itself.
    """
    found = of_distances(problem)
    if found is None:
        return problem
    batch, heads = problem.batch if found.by_batch else 1, problem.num_heads if found.by_head else 1
    return replace(
        problem,
        functions=found.rest,
        bias_shape=(batch, heads, problem.seqlen_q, problem.seqlen_k),
        bias_dtype=torch.float32,
        bias_of_distances=True,
        bias_needs_grad=found.functions.wants_grad,
    )


def of_distances(problem: AttentionProblem) -> DistanceBias | None:
    """What a problem's score function adds at each distance; None if it is no such function."""
    if problem.bias_shape is not None or problem.is_cached:
        return None
    return distance_bias(problem.functions)


def as_bias(problem: AttentionProblem, inputs: Inputs, arrange: Arrange) -> tuple[AttentionProblem, Inputs]:
    """`with_bias_of_distances`, and inputs that have its numbers in the place of the bias.

    arrange: makes of `numbers` what kernels read; kept, with the same captured tensors, for the next call.
    """
    found = of_distances(problem)
    if found is None:
        return problem, inputs
    buffers, device = inputs.captured, inputs.query.device
    layout = () if buffers.layout is None else tuple(buffers.layout.tolist())
    given = [t for t in buffers[:2] if t is not None]
    choices = (found.functions.plain_text, problem.extent, layout, arrange)

    def make() -> Tensor:
        return arrange(problem, numbers(found, buffers, problem.extent, device))

    inputs = inputs._replace(bias=kept(given, choices, make, device))
    if found.rest is None:
        inputs = inputs._replace(captured_floats=None, captured_integers=None, captured_layout=None)
    return with_bias_of_distances(problem), inputs


def gradient(problem: AttentionProblem, inputs: Inputs, dnumbers: Tensor) -> Tensor:
    """That of the captured floats, from that of the numbers; of the call as it was given."""
    found = of_distances(problem)
    assert found is not None
    return captured_gradient(found, inputs.captured, problem.extent, dnumbers)
