"""Attention with statistics of its weights: a forward, a pass over the scores, and the gradients of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.autograd.functions import is_served
from tilewise.autograd.operators import NUM_INPUTS
from tilewise.autograd.second_order import place
from tilewise.core.checks import check_inputs
from tilewise.core.plan import Results, Watched
from tilewise.core.problem import Gradients, Inputs, Options, describe, of_gradient
from tilewise.core.signature import NoMemory, all_resolved, resolved
from tilewise.core.statistics import Aux, Measured, Statistics, check_aux
from tilewise.core.torch_private import is_batched, is_plain_eager, own_dtypes, while_tracing
from tilewise.core.values import check_values
from tilewise.dispatch import plans, statistics as dispatch
from tilewise.dispatch.plans import Entry
from tilewise.tiled import statistics as tiled

_disabled: Any = None  # `_attention` between graphs, made when it is wanted: it imports Triton
_DIFFERENTIABLE = {"entropy", "expected_distance", "column_sum", "block_sum", "rows"}
_WATCHED = (
    "return_aux takes plain eager tensors: torch.func, forward mode, torch.compile and tensor subclasses "
    "have attention without statistics, and torch.autograd gives their gradients"
)


def attention(
    inputs: Inputs, options: Options, backend: str | None, aux: Aux, are_values_known: bool = False
) -> tuple[Tensor, Tensor, Statistics]:
    """out, lse and the statistics asked for. Differentiable once. Compiled code runs it between its graphs.

    Args:
        are_values_known: as of `autograd.functions.attention`.

    Raises:
        ValueError, TypeError, NotImplementedError: see `check`.
    """
    call = inputs, options, backend, aux, are_values_known
    if not torch.compiler.is_compiling():
        return _attention(*call)
    _disable()
    return _disabled(*call)  # type: ignore[no-any-return]


@while_tracing
def _disable() -> None:
    global _disabled
    _disabled = torch.compiler.disable(_attention, reason="return_aux breaks the graph: fullgraph=False")


def _attention(
    inputs: Inputs, options: Options, backend: str | None, aux: Aux, are_values_known: bool
) -> tuple[Tensor, Tensor, Statistics]:
    if is_served():
        raise NotImplementedError("return_aux is not served inside of context_parallel: return_lse is")
    entry, inputs = _entry(inputs, options, backend, aux)
    problem = entry.plan.problem
    if problem.has_values and not are_values_known:
        check_values(problem, inputs, options)
    if problem.needs_grad:
        out, lse, *found = AttentionWithStatistics.apply(entry, options, backend, aux, *inputs)
        measured = Measured(*found)
    else:
        (out, lse, _), measured = _measured(entry, inputs, options, backend, aux)
    return out, lse, measured.answer(aux, lse)


def check(inputs: Inputs, options: Options, backend: str | None, aux: Aux) -> None:
    """Raise what `attention` would, but for values.

    Raises:
        ValueError, TypeError: the call is wrong, or the request does not fit it.
        NotImplementedError: the backend asked for does not serve the call or the request, or a transform
            watches it.
    """
    _entry(inputs, options, backend, aux)


def _entry(inputs: Inputs, options: Options, backend: str | None, aux: Aux) -> tuple[Entry, Inputs]:
    """The forward's plan, and the inputs with their numbers in memory."""
    check_aux(aux)
    check_inputs(inputs)
    if not is_plain_eager(inputs.query):
        raise NotImplementedError(_WATCHED)
    if aux.needs_pass and backend is not None:  # before what the forward needs: the caller may have no values
        problem = describe(inputs, options)
        given = dispatch.given_by_forward(backend, problem, aux)
        dispatch.choose(problem, aux.only([name for name in aux.names if name not in given]), backend)
    inputs = Inputs(*all_resolved(inputs))
    try:
        entry = plans.forward_plan(inputs, options, backend, dispatch.request(aux))
    except NoMemory as error:
        raise NotImplementedError(_WATCHED) from error
    aux.check(entry.plan.problem)
    return entry, inputs


def _measured(
    entry: Entry, inputs: Inputs, options: Options, backend: str | None, aux: Aux
) -> tuple[Results, Measured]:
    forward: Results | Watched = plans.run(entry, inputs)
    found = dispatch.measure(inputs, forward, options, backend, aux)
    return forward.results if isinstance(forward, Watched) else forward, found


class AttentionWithStatistics(torch.autograd.Function):
    """out, lse and the fields of `Measured`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, entry: Entry, options: Options, backend: str | None, aux: Aux, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        results, found = _measured(entry, inputs, options, backend, aux)
        ctx.call = options, backend, aux, entry.plan.problem.bias_needs_grad
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *results)
        fixed = (t for name, t in found._asdict().items() if t is not None and name not in _DIFFERENTIABLE)
        ctx.mark_non_differentiable(*fixed)
        return results.out, results.lse, *found

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "a call with return_aux has no second derivatives: attention without it has, and so has the "
                "formula, tilewise.reference.attention_statistics"
            )
        if any(map(is_batched, (dout, dlse, *grads))):
            raise NotImplementedError(
                "a call with return_aux takes no batched gradients (is_grads_batched=True, or vectorize=True "
                "of torch.autograd.functional): attention without it does"
            )
        saved = ctx.saved_tensors
        inputs, results = Inputs(*saved[:NUM_INPUTS]), Results(*saved[NUM_INPUTS:])
        options, backend, aux, needs_bias_gradient = ctx.call
        total = Gradients(None, None, None)  # type: ignore[arg-type]
        if dout is not None or dlse is not None:
            dout = torch.zeros_like(results.out) if dout is None else resolved(dout)  # type: ignore[arg-type]
            arguments = (dout, resolved(dlse), options, backend, needs_bias_gradient)
            total = plans.differentiate(inputs, results, *arguments)  # type: ignore[arg-type]
        if any(g is not None for g in grads):
            assert results.lse is not None
            problem = of_gradient(describe(inputs, options))
            with own_dtypes(problem.device_type):
                asked = Measured(*grads)  # type: ignore[arg-type]
                found = tiled.backward(problem, inputs, results.lse, results.residual, aux, asked)
            total = Gradients(*(_sum(a, b) for a, b in zip(total, found)))  # type: ignore[arg-type]
        return (None, None, None, None, *place(inputs, total, needs_bias_gradient))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
