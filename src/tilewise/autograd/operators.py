"""PyTorch operators: schemas, kernels and fakes. `tilewise.autograd` makes them differentiable.

    tilewise::attention                  (Inputs, Options, backend)                            -> out, lse
    tilewise::attention_backward         (dout, dlse, out, lse, Inputs, ..., bias_needs_grad)  -> gradients
    tilewise::attention_double_backward  (tangents, dout, dlse, out, lse, Inputs, ...)         -> gradients
    tilewise::attention_jvp              (tangents, out, lse, Inputs, Options, backend)        -> tangents

An operator takes tensors and scalars only, so `Inputs` and `Options` travel flattened and are rebuilt
inside; backends and plans are chosen there, out of sight of tracing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, library

from tilewise.core.checks import refuse_gradient
from tilewise.core.eager import is_plain_eager
from tilewise.core.problem import AttentionProblem, Gradients, Inputs, Options, describe, validate
from tilewise.core.values import check_values
from tilewise.dispatch import choice as dispatch
from tilewise.tiled import second_order

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqlens_k, "
    "Tensor? leftpad_k, Tensor? page_table, Tensor? mask, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? dropout_seed, Tensor? key_scale, Tensor? value_scale"
)
_OPTIONS = (
    "bool causal, SymInt? window_left, SymInt? window_right, float softcap, float dropout_p, float? scale, "
    "bool deterministic, SymInt? max_seqlen_q, SymInt? max_seqlen_k, str precision, str? backend"
)
_N = len(Inputs._fields)

operators = library.Library("tilewise", "DEF")
operators.define(f"attention({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)")
operators.define(
    f"attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_INPUTS}, {_OPTIONS}, "
    "bool bias_needs_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
operators.define(
    "attention_double_backward(Tensor?[] tangents, Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
    f"{_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
operators.define(
    f"attention_jvp(Tensor?[] tangents, Tensor out, Tensor lse, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)"
)


def launch(problem: AttentionProblem, inputs: Inputs, name: str) -> tuple[Tensor, Tensor]:
    """Run the named backend."""
    with _own_dtypes(problem.device_type):
        return dispatch.load(name).forward(problem, inputs)


def launch_backward(
    problem: AttentionProblem,
    inputs: Inputs,
    backend: str | None,
    bias_needs_grad: bool,
    out: Tensor | None,
    lse: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Run the backward of the backend asked for, or of the one that is chosen.

    out and lse may be None where it `recomputes`; lse is that of these keys, not of more.
    """
    refuse_gradient(problem.precision)
    problem = _with_gradients(problem, bias_needs_grad, dlse is not None)
    name = dispatch.choose(problem, backend, is_backward=True)
    with _own_dtypes(problem.device_type):
        return dispatch.load(name).backward(problem, inputs, out, lse, dout, dlse)


def recomputes(problem: AttentionProblem, backend: str | None) -> bool:
    """Whether the backward of a dense problem without optional tensors needs neither out nor lse."""
    module = dispatch.load(dispatch.choose(_with_gradients(problem, False, False), backend, is_backward=True))
    return hasattr(module, "recomputes") and module.recomputes(problem)


def repeatable_backward(
    problem: AttentionProblem, backend: str | None, layout: str
) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of query, key and value as a function of query, key, value, out, lse (neither if it
    `recomputes`) and dout, all in the caller's layout, for a dense problem without optional tensors."""

    def whole(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *results, dout = rest
        out, lse = results or (None, None)
        if layout == "bhsd":
            query, key, value, dout = (t.transpose(1, 2) for t in (query, key, value, dout))
            out = None if out is None else out.transpose(1, 2)
        inputs = Inputs(query, key, value)
        grads = launch_backward(problem, inputs, backend, False, out, lse, dout, None)[:3]
        return tuple(t.transpose(1, 2) for t in grads) if layout == "bhsd" else grads

    backward_problem = _with_gradients(problem, False, False)
    module = dispatch.load(dispatch.choose(backward_problem, backend, is_backward=True))
    make = getattr(module, "repeatable_backward", None)
    return whole if make is None else make(backward_problem, layout, whole)


def _own_dtypes(device_type: str) -> AbstractContextManager[Any]:
    """Outside of autocast, which would change the dtypes of the products that a backend is made of."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _rebuild(arguments: Sequence[Any]) -> tuple[Inputs, Options, str | None]:
    tensors, scalars, backend = arguments[:_N], arguments[_N:-1], arguments[-1]
    return Inputs(*tensors), Options(*scalars), backend


def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, options, backend = _rebuild(arguments)
    problem = describe(inputs, options)
    check_values(problem, inputs, options)
    return launch(problem, inputs, dispatch.choose(problem, backend))


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, options, _ = _rebuild(arguments)
    validate(inputs, options)
    query, dtype = inputs.query, inputs.query.dtype
    lse_dtype = dtype if dtype == torch.float64 else torch.float32
    batch, (seqlen, heads) = query.shape[:-3], query.shape[-3:-1]
    lse_shape = (*batch, heads, seqlen)
    out = query.new_empty((*query.shape[:-1], inputs.value.shape[-1]))
    return out, query.new_empty(lse_shape, dtype=lse_dtype)


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    inputs, options, backend = _rebuild(arguments[:-1])
    problem, bias_needs_grad = describe(inputs, options), arguments[-1]
    grads = launch_backward(problem, inputs, backend, bias_needs_grad, out, lse, dout, dlse)
    return _no_none(grads if bias_needs_grad else grads._replace(bias=None), dout)


@functools.lru_cache(maxsize=4096)
def _with_gradients(problem: AttentionProblem, of_bias: bool, of_lse: bool) -> AttentionProblem:
    return replace(problem, bias_needs_grad=of_bias, lse_needs_grad=of_lse)


def _attention_backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    inputs, _, _ = _rebuild(arguments[:-1])
    grads = _empty_gradients(inputs)
    return _no_none(grads if arguments[-1] else grads._replace(bias=None), dout)


def _empty_gradients(inputs: Inputs) -> Gradients:
    fresh = (None if t is None else t.new_empty(t.shape) for t in (*inputs[:3], inputs.bias, inputs.sinks))
    return Gradients(*fresh)  # type: ignore[arg-type]


def _no_none(tensors: Any, like: Tensor) -> tuple[Tensor, ...]:
    """An operator returns tensors only: an empty one stands for None."""
    return tuple(like.new_empty(0) if t is None else t for t in tensors)


def _attention_double_backward(
    tangents: list[Tensor | None],
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    inputs, options, _ = _rebuild(arguments)
    problem = describe(inputs, options)
    directions = _fill_tangents(inputs, tangents)
    with _own_dtypes(problem.device_type):
        grads = second_order.double_backward(problem, inputs, out, lse, dout, dlse, directions)
    return _no_none(grads, dout)


def _attention_double_backward_fake(
    tangents: list[Tensor | None],
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    inputs, _, _ = _rebuild(arguments)
    return _no_none((torch.empty_like(out), torch.empty_like(lse), *_empty_gradients(inputs)), dout)


def _attention_jvp(
    tangents: list[Tensor | None], out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    inputs, options, _ = _rebuild(arguments)
    refuse_gradient(options.precision)
    problem, directions = describe(inputs, options), _fill_tangents(inputs, tangents)
    with _own_dtypes(problem.device_type):
        return second_order.jvp(problem, inputs, out, lse, directions)


def _attention_jvp_fake(
    tangents: list[Tensor | None], out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out), torch.empty_like(lse)


def _fill_tangents(inputs: Inputs, tangents: list[Tensor | None]) -> Gradients:
    """Tangents of query, key, value, bias and sinks; a missing one of the first three is zero."""
    filled = [torch.zeros_like(t) if d is None else d for t, d in zip(inputs[:3], tangents[:3])]
    return Gradients(*filled, *tangents[3:])


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (_attention, _attention_fake),
    "attention_backward": (_attention_backward, _attention_backward_fake),
    "attention_double_backward": (_attention_double_backward, _attention_double_backward_fake),
    "attention_jvp": (_attention_jvp, _attention_jvp_fake),
}


def call(name: str, tensor: Tensor, *arguments: Any) -> Any:
    """The operator `name`, without PyTorch's dispatcher where nothing has to see it and there are values."""
    if is_plain_eager(tensor) and not tensor.is_meta:
        return _KERNELS[name][0](tensor, *arguments)
    return getattr(torch.ops.tilewise, name)(tensor, *arguments)


for _name, (_kernel, _fake) in _KERNELS.items():
    operators.impl(_name, _kernel, "CompositeExplicitAutograd")
    library.register_fake(f"tilewise::{_name}", _fake, lib=operators)
