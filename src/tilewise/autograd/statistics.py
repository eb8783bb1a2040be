"""Attention with statistics of its weights: a forward, a pass over the scores, and the gradients of both.

    tilewise::attention_statistics           (Inputs, Options, Aux, saves, backend) -> results, Measured
    tilewise::attention_statistics_backward  (dout, dlse, gradients of Measured, results, Inputs, Options,
                                              Aux, backend, needs_bias_gradient)    -> gradients

Compiled code calls the operators, plain eager code the same functions without them.
"""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import Tensor, library

from tilewise.autograd import functions, operators
from tilewise.autograd.operators import NUM_INPUTS, no_none, rebuild
from tilewise.autograd.second_order import place
from tilewise.core.checks import check_inputs
from tilewise.core.plan import Results, Watched
from tilewise.core.problem import Gradients, Inputs, Options, describe, of_gradient
from tilewise.core.signature import NoMemory, all_resolved, new_out, plain, resolved
from tilewise.core.statistics import NOTHING, SCHEMA, Aux, Measured, Statistics, check_aux, new_measured
from tilewise.core.torch_private import (
    compiles_here,
    is_batched,
    is_differentiated,
    is_fake,
    is_plain,
    own_dtypes,
    while_tracing,
)
from tilewise.core.values import check_values
from tilewise.dispatch import plans, statistics as dispatch
from tilewise.dispatch.plans import Entry
from tilewise.tiled import statistics as tiled

_disabled: Any = None  # `_attention` between graphs, made when it is wanted: it imports Triton
DIFFERENTIABLE = ("entropy", "expected_distance", "column_sum", "block_sum", "rows")
_NO_SECOND = (
    "a call with return_aux has no second derivatives: attention without it has, and so has the formula, "
    "tilewise.reference.attention_statistics"
)
_BREAKS = (
    "return_aux breaks the graph if it is no tilewise.Aux, is differentiated by torch.func or forward mode, "
    "or asks for the shapes that only values tell, block_sum or rows of packed sequences: fullgraph=False"
)
_NO_VALUES = (
    "block_sum and rows of packed sequences have shapes that values tell, which meta and fake tensors lack"
)
NUM_AUX = len(Aux().scalars())
_WATCHED = (
    "return_aux takes plain tensors: torch.func, forward mode and tensor subclasses have attention without "
    "statistics, and torch.autograd gives their gradients"
)


def attention(
    inputs: Inputs, options: Options, backend: str | None, aux: Aux, are_values_known: bool = False
) -> tuple[Tensor, Tensor, Statistics]:
    """out, lse and the statistics asked for. Differentiable once.

    Compiled code runs calls between its graphs whose statistics have shapes that only lengths' values tell.

    Args:
        are_values_known: as of `autograd.functions.attention`.

    Raises:
        ValueError, TypeError, NotImplementedError: see `check`.
    """
    options = functions.obeying_torch(options)
    call = inputs, options, backend, aux, are_values_known
    if not compiles_here():
        return _attention(*call)
    # What is no Aux is refused between graphs: of an error in traced code later calls fail too.
    if isinstance(aux, Aux) and _are_shapes_known(inputs, aux) and not is_differentiated():
        return _by_operator(inputs, options, backend, aux)
    _disable()
    return _disabled(*call)  # type: ignore[no-any-return]


def _are_shapes_known(inputs: Inputs, aux: Aux) -> bool:
    """Whether shapes tell those of the statistics."""
    return inputs.cu_seqlens_q is None or not (aux.block_sum or aux.rows)


@while_tracing
def _disable() -> None:
    global _disabled
    _disabled = torch.compiler.disable(_attention, reason=_BREAKS)


def _attention(
    inputs: Inputs, options: Options, backend: str | None, aux: Aux, are_values_known: bool
) -> tuple[Tensor, Tensor, Statistics]:
    entry, inputs = _entry(inputs, options, backend, aux)
    if entry is None:
        return _by_operator(inputs, options, backend, aux)
    problem = entry.plan.problem
    if problem.has_values and not are_values_known:
        check_values(problem, inputs, options)
    if problem.needs_grad:
        out, lse, *found = AttentionWithStatistics.apply(entry, options, backend, aux, *inputs)
        measured = Measured(*found)
    else:
        (out, lse, _), measured = _measured(entry, inputs, options, backend, aux)
    return out, lse, measured.asked(aux).answer(aux, lse)


def check(inputs: Inputs, options: Options, backend: str | None, aux: Aux) -> None:
    """Raise what `attention` would, but for values. In compiled code operators do, before anything runs.

    Raises:
        ValueError, TypeError: the call is wrong, or the request does not fit it.
        NotImplementedError: the backend asked for does not serve the call or the request, or a transform
            watches it.
    """
    if not compiles_here():  # asked here: where a graph breaks this may be traced by itself
        _entry(inputs, functions.obeying_torch(options), backend, aux)


def _entry(inputs: Inputs, options: Options, backend: str | None, aux: Aux) -> tuple[Entry | None, Inputs]:
    """The forward's plan, None where there are shapes alone, and the inputs with their numbers in memory."""
    if functions.is_served():
        raise NotImplementedError("return_aux is not served inside of context_parallel: return_lse is")
    check_aux(aux)
    check_inputs(inputs)
    if not (is_plain(inputs.query) or is_fake(inputs.query)):  # another thread may compile
        raise NotImplementedError(_WATCHED)
    if aux.needs_pass and backend is not None:  # before what the forward needs: the caller may have no values
        problem = describe(inputs, options)
        given = dispatch.given_by_forward(backend, problem, aux)
        dispatch.choose(problem, aux.only([name for name in aux.names if name not in given]), backend)
    inputs = Inputs(*all_resolved(inputs))
    try:
        entry = plans.forward_plan(inputs, options, backend, dispatch.request(aux))
    except NoMemory as error:
        if not (inputs.query.is_meta or is_fake(inputs.query)):
            raise NotImplementedError(_WATCHED) from error
        if not _are_shapes_known(inputs, aux):
            raise NotImplementedError(_NO_VALUES) from error
        functions.check(inputs, options, backend)
        return None, inputs
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
        fixed = (t for name, t in found._asdict().items() if t is not None and name not in DIFFERENTIABLE)
        ctx.mark_non_differentiable(*fixed)
        return results.out, results.lse, *found

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(_NO_SECOND)
        if any(map(is_batched, (dout, dlse, *grads))):
            raise NotImplementedError(
                "a call with return_aux takes no batched gradients (is_grads_batched=True, or vectorize=True "
                "of torch.autograd.functional): attention without it does"
            )
        saved = ctx.saved_tensors
        inputs, results = Inputs(*saved[:NUM_INPUTS]), Results(*saved[NUM_INPUTS:])
        options, backend, aux, needs_bias_gradient = ctx.call
        total = _gradients(
            inputs, results, dout, dlse, Measured(*grads), options, backend, aux, needs_bias_gradient
        )
        return (None, None, None, None, *place(inputs, total, needs_bias_gradient))


def _gradients(
    inputs: Inputs, results: Results, dout: Tensor | None, dlse: Tensor | None, asked: Measured,
    options: Options, backend: str | None, aux: Aux, needs_bias_gradient: bool,
) -> Gradients:  # fmt: skip
    """Of out and lse by the backward, of statistics in tiles; `asked` are those of the latter."""
    assert results.out is not None and results.lse is not None
    total = Gradients(None, None, None)  # type: ignore[arg-type]
    if dout is not None or dlse is not None:
        dout = torch.zeros_like(results.out) if dout is None else resolved(dout)
        arguments = (dout, resolved(dlse), options, backend, needs_bias_gradient)
        total = plans.differentiate(inputs, results, *arguments)  # type: ignore[arg-type]
    if any(g is not None for g in asked):
        problem = of_gradient(describe(inputs, options))
        with own_dtypes(problem.device_type):
            found = tiled.backward(problem, inputs, results.lse, results.residual, aux, asked)
        total = Gradients(*(_sum(a, b) for a, b in zip(total, found)))  # type: ignore[arg-type]
    return total


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


# ---- the operators


def _by_operator(
    inputs: Inputs, options: Options, backend: str | None, aux: Aux
) -> tuple[Tensor, Tensor, Statistics]:
    saves = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    arguments = (*inputs, *operators.scalars(options), *aux.scalars(), saves, backend)
    out, lse, _, *found = torch.ops.tilewise.attention_statistics(*arguments)
    return out, lse, Measured(*found).answer(aux, lse)


def _statistics(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options, (*scalars, saves, backend) = rebuild(tuple(map(plain, arguments)))
    aux = Aux.of(scalars)
    entry, inputs = _entry(inputs, options, backend, aux)
    assert entry is not None
    if entry.plan.problem.has_values:
        check_values(entry.plan.problem, inputs, options)
    (out, lse, residual), found = _measured(entry, inputs, options, backend, aux)
    assert out is not None and lse is not None
    if not saves:
        residual = None
    elif residual is None:
        residual = torch.zeros_like(lse)
    return out, *no_none((lse, residual, *found.asked(aux)), lse)


def _statistics_fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options, (*scalars, saves, _) = rebuild(arguments)
    problem, aux = describe(inputs, options), Aux.of(scalars)
    aux.check(problem)
    query = inputs.query
    *batch, seqlen, heads, _ = query.shape
    lse = query.new_empty((*batch, heads, seqlen), dtype=problem.compute_dtype)
    found = new_measured(aux.only(set(aux.names) - {"max_logit"}), problem, inputs)
    if aux.max_logit:  # not found of row_max, which would ask whether a length is a multiple of `FOLD`
        found = found._replace(max_logit=lse.new_empty(heads))
    residual = lse.new_empty(lse.shape) if saves else None
    return new_out(query, inputs.value.shape[-1], "bshd"), *no_none((lse, residual, *found), lse)


def _statistics_backward(dout: Tensor | None, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    dout, dlse, *arguments = map(plain, (dout, dlse, *arguments))  # type: ignore[assignment]
    of_statistics, results = arguments[: len(DIFFERENTIABLE)], arguments[len(DIFFERENTIABLE) :][:3]
    inputs, options, rest = rebuild(arguments[len(DIFFERENTIABLE) + 3 :])
    *scalars, backend, needs_bias_gradient = rest
    asked = NOTHING._replace(**dict(zip(DIFFERENTIABLE, of_statistics)))
    aux = Aux.of(scalars)
    call = (options, backend, aux, needs_bias_gradient)
    grads = _gradients(inputs, Results(*results), dout, dlse, asked, *call)
    return operators.wanted(grads, options, needs_bias_gradient)


def _statistics_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, options, rest = rebuild(arguments[2 + len(DIFFERENTIABLE) + 3 :])
    return operators.wanted(operators.empty_gradients(inputs), options, rest[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    functions.save(ctx, inputs, output[:3])
    *scalars, _, backend = inputs[NUM_INPUTS:]
    ctx.scalars = (*scalars, backend)
    aux, pairs = Aux.of(scalars[-NUM_AUX:]), zip(Measured._fields, output[3:], strict=True)
    fixed = (t for name, t in pairs if name not in DIFFERENTIABLE or not aux.asks(name))
    ctx.mark_non_differentiable(output[2], *fixed)


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None, *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, residual = ctx.saved_tensors
    none = (None,) * ctx.num_scalars
    given = Measured(*grads)._asdict()
    of_statistics = [given[name] for name in DIFFERENTIABLE]
    if all(g is None for g in (dout, dlse, *of_statistics)):
        return (*(None,) * NUM_INPUTS, *none)
    found = torch.ops.tilewise.attention_statistics_backward(
        dout, dlse, *of_statistics, out, lse, residual, *tensors, *ctx.scalars, ctx.bias_needs_grad
    )
    return (*place(Inputs(*tensors), found, ctx.bias_needs_grad), *none)


def _refuse_second(ctx: Any, *grads: Any) -> Never:
    raise NotImplementedError(_NO_SECOND)


_of_statistics = ", ".join(f"Tensor? d_{name}" for name in DIFFERENTIABLE)
_tensors = ", ".join(["Tensor"] * (3 + len(Measured._fields)))
operators.operators.define(
    f"attention_statistics({operators.INPUTS}, {operators.OPTIONS}, {SCHEMA}, bool saves, str? backend) "
    f"-> ({_tensors})"
)
operators.operators.define(
    f"attention_statistics_backward(Tensor? dout, Tensor? dlse, {_of_statistics}, {operators.RESULTS}, "
    f"{operators.INPUTS}, {operators.OPTIONS}, {SCHEMA}, str? backend, bool needs_bias_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
operators.register("attention_statistics", _statistics, _statistics_fake)
operators.register("attention_statistics_backward", _statistics_backward, _statistics_backward_fake)
library.register_autograd(
    "tilewise::attention_statistics", _differentiate, setup_context=_save, lib=operators.operators
)
library.register_autograd("tilewise::attention_statistics_backward", _refuse_second, lib=operators.operators)
