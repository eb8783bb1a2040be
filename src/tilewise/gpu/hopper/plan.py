"""The one entry of the Hopper kernels: which plan serves a call."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.core.plan import Plan, Results, Saves
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import Signature, in_order
from tilewise.gpu.hopper.backward import launch as backward_launch, wide_launch
from tilewise.gpu.hopper.decode import launch as decode_launch, mla_launch
from tilewise.gpu.hopper.forward import launch
from tilewise.gpu.launch.launch_plan import Step, find
from tilewise.gpu.launch.plan import (
    Again,
    Given,
    GpuPlan,
    again_backward,
    again_forward,
    allocator,
)


def plan(problem: AttentionProblem, signature: Signature) -> Plan:
    """Dense calls without optional tensors, and few queries to a cache, are launched again as they were."""
    if signature.direction == "backward":
        again = functools.partial(_again_backward, problem)
        return GpuPlan(problem, signature, _backward, again, _given_to_backward)
    _, residual, order = signature.request
    first = functools.partial(_forward, order=order, residual=residual)
    if problem.precision != "fp8" and (
        problem.head_dim > launch.MAX_HEAD_DIM or decode_launch.is_faster(problem)
    ):
        again = functools.partial(_again_decode, problem, order, residual)
        return GpuPlan(problem, signature, first, again, _given_to_decode)
    again = functools.partial(_again_forward, problem, order, residual)
    return GpuPlan(problem, signature, first, again, _given_to_forward)


def saves(problem: AttentionProblem) -> Saves:
    return Saves(residual=problem.precision != "fp8")


def _forward(problem: AttentionProblem, inputs: Inputs, order: str, residual: bool) -> Results:
    out, *rest = launch.forward(problem, inputs, order=order, residual=residual)
    return Results(in_order(out, order), *rest)


def _given_to_forward(inputs: Inputs) -> Given | None:
    return None if any(t is not None for t in inputs[3:]) else inputs[:3]


def _again_forward(problem: AttentionProblem, order: str, residual: bool, given: Given) -> Again | None:
    if any(launch.tma_ready(t) is not t for t in given) or problem.precision == "fp8":
        return None
    config = launch.forward_config(problem)

    def steps(given: Given, new: Given) -> list[Step]:
        out, lse, rest, counter = new
        tensors = (*given, None, None, None, None, None)
        return [Step(launch.forward_launch, tensors, (config,), (out, lse, rest, None, None, counter))]

    return again_forward(problem, order, residual, given, steps, launch.shared_counter)


def _given_to_decode(inputs: Inputs) -> tuple[Any, ...] | None:
    used = decode_launch.CachedTensors._fields
    if any(t is not None for name, t in inputs._asdict().items() if name not in used):
        return None
    return tuple(getattr(inputs, name) for name in used)


def _again_decode(problem: AttentionProblem, order: str, residual: bool, given: Any) -> Again | None:
    is_latent = problem.head_dim > launch.MAX_HEAD_DIM
    room: Any = mla_launch if is_latent else decode_launch
    config = room.mla_config(problem) if is_latent else room.decode_config(problem)
    query = given[0]
    few_pieces = mla_launch.MANY_PIECES if is_latent else decode_launch.FEW_PIECES
    workers = decode_launch.num_workers(problem, config, query.device, few_pieces)
    rows = decode_launch.GROUP_ROWS if config.WHOLE_PAGES else 1
    tensors = decode_launch.CachedTensors(*given)
    if is_latent:
        tensors = tensors._replace(value=tensors.key)
    ready = decode_launch.cached_tensors(Inputs(**tensors._asdict()), rows)
    if any(a is not b for a, b in zip(ready, tensors)):  # something is copied first
        return None
    new = decode_launch.new_tensors(problem, config, workers, residual)
    stand_ins = [None if n is None else query for n in new]  # plans are found by what is given
    plans: list[Any] = [
        find(s.build, problem, s.tensors, *s.choices, fresh=s.fresh)
        for s in room.steps(config, workers, tensors, stand_ins)
    ]
    if None in plans:
        return None
    allocators = [None if n is None else allocator(query, *n) for n in new]

    def again(given: Any) -> Results:
        tensors = decode_launch.CachedTensors(*given)
        fresh = [None if allocate is None else allocate() for allocate in allocators]
        for found, step in zip(plans, room.steps(config, workers, tensors, fresh)):
            found((*step.tensors, *step.fresh))
        out, *rest = fresh[-3:]
        assert out is not None
        return Results(in_order(out, order), *rest)

    return again


def _backward(
    problem: AttentionProblem, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    assert results.out is not None and results.lse is not None
    given = (results.out, results.lse, dout, dlse)
    return backward_launch.backward(problem, inputs, *given, residual=results.residual)


def _given_to_backward(
    inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None
) -> Sequence[Tensor] | None:
    if dlse is not None or any(t is not None for t in inputs[3:]):
        return None
    return (*inputs[:3], *results, dout)  # type: ignore[return-value]


def _again_backward(problem: AttentionProblem, given: Given) -> Again | None:
    *tensors, lse, residual, dout = given
    is_ready = all(launch.tma_ready(t) is t for t in (*tensors, dout))
    if not is_ready or not all(t is None or t.is_contiguous() for t in (lse, residual)):
        return None
    if problem.head_dim > backward_launch.NARROW:
        wide = wide_launch.wide_config(problem)
        steps = functools.partial(wide_launch.steps, problem, wide)
        stats = backward_launch.stats_shape(problem, wide)
        return again_backward(problem, given, steps, [stats], launch.shared_counters)
    config = backward_launch.backward_config(problem)
    division = backward_launch.divide(problem, config, launch.num_sms(torch.cuda.current_device()))
    steps = functools.partial(backward_launch.steps, problem, config, division)
    scratch = backward_launch.scratch_shapes(problem, config, division)
    return again_backward(problem, given, steps, scratch, launch.shared_counter)
