"""The one entry of the Hopper kernels: what they serve, and which of them a call takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.plan import FunctionPlan, Plan, Results, Saves, Watched
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import Request, Signature, in_order
from tilewise.gpu.functions.distances import Arrange, as_bias
from tilewise.gpu.hopper.backward import launch as backward_launch, wide_launch
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import MaskMap, TransposedMap
from tilewise.gpu.hopper.common.functions import as_served, unserved_functions
from tilewise.gpu.hopper.decode import launch as decode_launch, mla_launch
from tilewise.gpu.hopper.forward import launch as forward_launch
from tilewise.gpu.hopper.fp8 import launch as fp8_launch
from tilewise.gpu.hopper.statistics.launch import StatisticsPlan
from tilewise.gpu.launch.gpus import gpu_of
from tilewise.gpu.launch.launch_plan import Step, again_backward, again_forward
from tilewise.gpu.launch.plan import (
    Again,
    Give,
    Given,
    GpuPlan,
    function_plan,
    given_to_backward,
    given_to_forward,
    inputs_among,
    nothing,
    present,
)

MAX_HEAD_DIM = 256  # but for latent attention
NOTHING = (None,) * 8  # in place of a mask's map, and what `host.extras_of` gives


def plan(problem: AttentionProblem, signature: Signature) -> Plan:
    """Calls with the tensors of `IN_FORWARDS`, and decoding, are launched again as they were."""
    if signature.direction == "statistics":
        return StatisticsPlan(problem, signature.aux)  # type: ignore[return-value]
    given, problem = problem, as_served(problem)
    if signature.request.statistics and watches(problem):
        return FunctionPlan(problem, functools.partial(_watched, signature.request))
    if given.functions is not None:
        calls = (_forward, host.pairs_of_distances), (backward, host.transposed_pairs_of_distances)
        both = (functools.partial(_of_functions, given, *call) for call in calls)
        return function_plan(problem, signature.request, *both)
    if signature.direction == "backward":
        again = functools.partial(_again_backward, problem)
        return GpuPlan(problem, signature, backward, again, given_to_backward(signature))
    residual, order = signature.request.residual, signature.request.order
    kernels = forward_kernels(problem)
    first = functools.partial(_forward, order=order, residual=residual)
    again = functools.partial(kernels.again, problem, order, residual)
    return GpuPlan(problem, signature, first, again, kernels.given(signature))


def saves(problem: AttentionProblem) -> Saves:
    return Saves(residual=True)


# ---- what is served


def missing_device(problem: AttentionProblem) -> str | None:
    """None on a Hopper GPU, else what is asked for."""
    if problem.device_type != "cuda" or torch.version.hip is not None or gpu_of(None).capability != (9, 0):
        return "runs on NVIDIA Hopper GPUs (compute capability 9.0) only"
    return None


def unserved_shape(problem: AttentionProblem) -> str | None:
    """None if one of the Hopper kernels takes what `dispatch.capability` does not refuse, else why not."""
    sizes = (problem.head_dim, problem.head_dim_v)
    has_other_sizes = any(d % 8 or d > MAX_HEAD_DIM for d in sizes)
    is_latent = problem.is_cached and mla_launch.is_latent(problem)
    if (has_other_sizes or problem.head_dim_v > max(64, problem.head_dim)) and not is_latent:
        return (
            f"takes head sizes that are multiples of 8 up to {MAX_HEAD_DIM}, that of V no larger, not {sizes}"
        )
    if reason := unserved_functions(problem):
        return reason
    lengths = (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads)
    if max(lengths) >= host.UNBOUNDED:
        return f"takes lengths below {host.UNBOUNDED}"
    if is_latent:
        return mla_launch.supports(problem)
    if problem.is_cached and (decode_launch.has_few_queries(problem) or decode_launch.is_faster(problem)):
        return decode_launch.supports(problem)
    # 8-bit pages are made 16 bits first, in no pages
    return None if problem.is_quantized else host.unserved_pages(problem)


def watches(problem: AttentionProblem) -> bool:
    """Whether the forward gives row_max, max_logit and entropy in its own pass."""
    problem = as_served(problem)
    return forward_kernels(problem) is FORWARD[-1] and forward_launch.watches(problem)


# ---- which kernels serve: first calls, and calls that are launched again


class Kernels(NamedTuple):
    """Kernels of the forward, what they serve, and how a call is launched first and again."""

    serve: Callable[[AttentionProblem], bool]
    first: Callable[[AttentionProblem, Inputs, str, bool], tuple[Tensor, ...]]
    again: Callable[[AttentionProblem, str, bool, Given], Again | None]
    given: Callable[[Signature], Give | None]  # what `again` takes of calls; None: they are always first ones


def forward_kernels(problem: AttentionProblem) -> Kernels:
    """Those that serve a problem."""
    return next(kernels for kernels in FORWARD if kernels.serve(problem))


class BackwardKernels(NamedTuple):
    """Those of the backward, likewise."""

    serve: Callable[[AttentionProblem], bool]
    first: Callable[[AttentionProblem, Inputs, Results, Tensor, Tensor | None], Gradients]
    again: Callable[[AttentionProblem, Given], Again | None]  # of tensors that TMA takes as they are


def backward_kernels(problem: AttentionProblem) -> BackwardKernels:
    """Those that serve a problem."""
    return next(kernels for kernels in BACKWARD if kernels.serve(problem))


def forward(
    problem: AttentionProblem, inputs: Inputs, order: str = "bshd", residual: bool = False
) -> tuple[Tensor, ...]:
    """out (like query, head_dim_v) and lse float32 (batch, heads, seqlen_q), packed (heads, total_q).

    And, if asked for, what rounding took from lse, in its shape; kernels of 8 bits have none.
    """
    return forward_kernels(problem).first(problem, inputs, order, residual)


def backward(
    problem: AttentionProblem, inputs: Inputs, known: Results, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Gradients by recomputation from lse + residual, each contiguous."""
    return backward_kernels(problem).first(problem, inputs, known, dout, dlse)


# ---- the forward


def _forward(problem: AttentionProblem, inputs: Inputs, order: str, residual: bool) -> Results:
    out, *rest = forward(problem, inputs, order, residual)
    return Results(in_order(out, order), *rest)


def _of_functions(
    given: AttentionProblem, call: Callable[..., Any], arrange: Arrange, problem: AttentionProblem,
    inputs: Inputs, *rest: Any,
) -> Any:  # fmt: skip
    """A call whose score function has become a bias; `given` has it still."""
    return call(problem, as_bias(given, inputs, arrange)[1], *rest)


def _watched(request: Request, problem: AttentionProblem, inputs: Inputs) -> Watched:
    asked = request.order, request.residual, request.statistics
    out, lse, *more = forward_launch.forward(problem, inputs, *asked)
    residual = more.pop(0) if request.residual else None
    found = dict(zip(request.statistics, more, strict=True))
    return Watched(Results(in_order(out, request.order), lse, residual), **found)


def _never_again(problem: AttentionProblem, order: str, residual: bool, given: Given) -> None:
    return None


def needs_readying(inputs: Inputs) -> bool:
    """Whether kernels take something else in place of some inputs: a mask's map, pairs of biases."""
    return any(t is not None for t in (inputs.mask, inputs.bias, inputs.alibi_slopes, inputs.dropout_seed))


def _again_forward(problem: AttentionProblem, order: str, residual: bool, given: Given) -> Again | None:
    inputs = Inputs(*given)
    if any(a is not b for a, b in zip(forward_launch.ready(problem, inputs), inputs)):  # something is copied
        return None
    config = forward_launch.forward_config(problem)
    strides = forward_launch.map_of(problem, inputs, config)[2:]
    scratch = host.order_shapes(problem, forward_launch.held_keys(inputs))

    def readied(given: Given) -> tuple[Tensor | None, ...]:
        inputs = Inputs(*given)
        return (*forward_launch.map_of(problem, inputs, config)[:2], *host.extras_of(problem, inputs))

    def steps(given: Given, new: Given) -> list[Step]:
        found = (*new[:3], *forward_launch.NOTHING_ASKED)
        ordered, (counter, *others) = tuple(new[3:][: len(scratch)]), new[3 + len(scratch) :]
        tiles, bits, *extras = others or NOTHING
        mask = MaskMap(tiles, bits, *strides)
        return forward_launch.steps(
            config, Inputs(*given), found, ordered or (None, None), counter, mask, tuple(extras)
        )

    more = readied if needs_readying(inputs) else nothing
    return again_forward(problem, order, residual, given, steps, more, scratch, counters=1)


def _given_cached(signature: Signature) -> Give | None:
    used = decode_launch.CachedTensors._fields
    return attrgetter(*used) if present(signature) <= set(used) else None


def _again_decode(
    kernels: decode_launch.Kernels, problem: AttentionProblem, order: str, residual: bool, given: Given
) -> Again | None:
    config, tensors = kernels.config(problem), decode_launch.CachedTensors(*given)
    ready = decode_launch.cached_tensors(Inputs(**tensors._asdict()), config)
    if any(a is not b for a, b in zip(ready, tensors)):  # something is copied first
        return None
    workers = decode_launch.num_workers(problem, config, given[0].device, kernels.few_splits)
    new = decode_launch.new_tensors(problem, config, workers, residual)
    scratch = [n[0] for n in new[3:] if n is not None]

    def steps(given: Given, fresh: Given) -> Sequence[Step]:
        fresh = (*fresh, None)[: len(new)]  # None for what a residual alone needs
        return decode_launch.steps(kernels, config, workers, decode_launch.CachedTensors(*given), fresh)

    return again_forward(problem, order, residual, given, steps, nothing, scratch, stores_in_order=False)


def _few_queries(serve: Callable[[AttentionProblem], bool], kernels: decode_launch.Kernels) -> Kernels:
    """Kernels of split-KV."""

    def first(problem: AttentionProblem, inputs: Inputs, order: str, residual: bool) -> tuple[Tensor, ...]:
        return decode_launch.forward(kernels, problem, inputs, kernels.config(problem), residual)

    return Kernels(serve, first, functools.partial(_again_decode, kernels), _given_cached)


def _of_8_bit_pages(
    problem: AttentionProblem, inputs: Inputs, order: str, residual: bool
) -> tuple[Tensor, ...]:
    from tilewise.gpu.launch.eight_bit_pages import dequantized

    return forward_launch.forward(*dequantized(problem, inputs), order, residual)


# The first that serve a problem, each with what speaks for it: times of one H200, see docs/kernels-hopper.md.
FORWARD = (
    # 8-bit products are asked for: no other kernel has them
    Kernels(
        lambda problem: problem.is_8_bit,
        lambda problem, inputs, order, residual: fp8_launch.forward(problem, inputs),
        _never_again,
        given_to_forward,
    ),
    # one warpgroup has S, two half of O each: 16 x 8k keys, 128 heads: 171 -> 88 us
    _few_queries(mla_launch.is_latent, mla_launch.KERNELS),
    # up to 16 queries cost about one; 64 on 1 x 8k keys: 82.9 -> 29.7 us, but on 16 x 8k slower
    _few_queries(decode_launch.is_faster, decode_launch.KERNELS),
    # bound by arithmetic, so that one pass that makes 16 bits of the pages costs little
    Kernels(lambda problem: problem.is_quantized, _of_8_bit_pages, _never_again, given_to_forward),
    # of head size 128, 1.18 to 1.47 times cuDNN's speed
    Kernels(lambda problem: True, forward_launch.forward, _again_forward, given_to_forward),
)


# ---- the backward


def _again_backward(problem: AttentionProblem, given: Given) -> Again | None:
    *tensors, lse, residual, dout = given[:7]
    offsets = inputs_among(given)[3:5]
    is_ready = all(host.tma_ready(t) is t for t in (*tensors, dout))
    if not is_ready or not all(t is None or t.is_contiguous() for t in (lse, residual, *offsets)):
        return None
    return backward_kernels(problem).again(problem, given)


def _again_narrow(problem: AttentionProblem, given: Given) -> Again | None:
    config = backward_launch.backward_config(problem)
    division = backward_launch.divide(problem, config, host.num_sms(torch.cuda.current_device()))
    strides = backward_launch.map_of(problem, inputs_among(given), config)[2:]
    shapes = backward_launch.scratch_shapes(problem, config, division, given[0].shape[-3])
    of_order = host.order_shapes(problem, inputs_among(given).cu_seqlens_q)
    scratch = [*of_order, *shapes]

    def readied(given: Given) -> tuple[Tensor | None, ...]:
        inputs = inputs_among(given)
        return (*backward_launch.map_of(problem, inputs, config)[:2], *host.extras_of(problem, inputs, True))

    def steps(given: Given, new: Given) -> list[Step]:
        # of what is neither gradients nor order; of the counter
        first, end = 3 + len(of_order), 4 + len(scratch)
        tiles, bits, *extras = new[end:] or NOTHING
        optional = (None, *inputs_among(given)[3:5], *(new[3:first] or (None, None)), *extras)
        mask, own = TransposedMap(tiles, bits, *strides), [*new[:3], *new[first:end]]
        return backward_launch.steps(config, division, given[:7], own, optional, mask)

    more = readied if needs_readying(inputs_among(given)) else nothing
    return again_backward(problem, given, steps, scratch, more, counters=1)


def _again_wide(problem: AttentionProblem, given: Given) -> Again | None:
    """Of kernels that take no mask, slopes or dropout."""
    config = wide_launch.wide_config(problem)
    of_order = 2 * host.order_shapes(problem, inputs_among(given).cu_seqlens_q)
    scratch = [*of_order, backward_launch.stats_shape(problem, config, given[0].shape[-3])]

    def steps(given: Given, new: Given) -> list[Step]:
        first = 3 + len(of_order)
        optional = (None, *inputs_among(given)[3:5], *(new[3:first] or (None,) * 4))
        return wide_launch.steps(config, given[:7], [*new[:3], *new[first:]], optional)

    return again_backward(problem, given, steps, scratch, nothing, counters=2)


BACKWARD = (  # the first that serve a problem
    # dK and dV of 128 keys exceed the registers: two kernels, seven products for five
    BackwardKernels(
        lambda problem: problem.head_dim > backward_launch.MAX_HEAD_DIM, wide_launch.backward, _again_wide
    ),
    # of head size 128, 1.17 to 1.33 times cuDNN's speed
    BackwardKernels(lambda problem: True, backward_launch.backward, _again_narrow),
)
