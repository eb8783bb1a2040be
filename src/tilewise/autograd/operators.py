"""PyTorch operators: schemas, kernels and fakes. `autograd.functions` makes them differentiable.

    tilewise::attention                  (Inputs, Options, order, saves, backend)    -> out, lse, residual
    tilewise::attention_backward         (dout, dlse, results, Inputs, Options, backend,
                                          needs_bias_gradient)                       -> gradients
    tilewise::attention_double_backward  (tangents, dout, dlse, results, Inputs, Options, backend)
                                                                                     -> gradients
    tilewise::attention_jvp              (tangents, results, Inputs, Options, backend) -> tangents

`autograd.statistics` has those of calls with `return_aux`.

An operator takes tensors and scalars only, so `Inputs` and `Options` travel flattened and are rebuilt inside;
backends and plans are found there, out of sight of tracing. No argument is a list: PyTorch's older vmap
(`is_grads_batched`) does not look into lists. `residual` is empty where no backward wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, library

from tilewise.core.checks import refuse_other_derivatives
from tilewise.core.functions.expression import decode
from tilewise.core.plan import Results
from tilewise.core.problem import Gradients, Inputs, Options, describe
from tilewise.core.signature import Request, all_resolved, new_out, plain
from tilewise.core.torch_private import PLAIN_TYPES, is_plain_eager, number, own_dtypes
from tilewise.dispatch import plans
from tilewise.tiled import second_order


def _optional(names: Iterable[str]) -> str:
    return ", ".join(f"Tensor? {name}" for name in names)


INPUTS = f"Tensor query, Tensor key, Tensor value, {_optional(Inputs._fields[3:])}"
OPTIONS = (
    "bool causal, SymInt? window_left, SymInt? window_right, float softcap, float dropout_p, float? scale, "
    "bool deterministic, SymInt? max_seqlen_q, SymInt? max_seqlen_k, str precision, "
    "str? functions, int dropout_step"
)
_TANGENTS = _optional(f"dot_{name}" for name in Gradients._fields)
_GRADIENTS = "Tensor dout, Tensor? dlse"
RESULTS = "Tensor out, Tensor lse, Tensor? residual"
NUM_INPUTS, NUM_OPTIONS, NUM_TANGENTS = len(Inputs._fields), len(Options._fields), len(Gradients._fields)

operators = library.Library("tilewise", "DEF")
operators.define(
    f"attention({INPUTS}, {OPTIONS}, str order, bool saves, str? backend) -> (Tensor, Tensor, Tensor)"
)
operators.define(
    f"attention_backward({_GRADIENTS}, {RESULTS}, {INPUTS}, {OPTIONS}, str? backend, "
    "bool needs_bias_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
operators.define(
    f"attention_double_backward({_TANGENTS}, {_GRADIENTS}, {RESULTS}, {INPUTS}, {OPTIONS}, str? backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
operators.define(
    f"attention_jvp({_TANGENTS}, {RESULTS}, {INPUTS}, {OPTIONS}, str? backend) -> (Tensor, Tensor)"
)


def rebuild(arguments: Sequence[Any]) -> tuple[Inputs, Options, tuple[Any, ...]]:
    """`Inputs`, `Options`, and what follows them."""
    end = NUM_INPUTS + NUM_OPTIONS
    return Inputs(*arguments[:NUM_INPUTS]), Options(*arguments[NUM_INPUTS:end]), tuple(arguments[end:])


def scalars(options: Options) -> tuple[Any, ...]:
    """The options as an operator takes them from compiled code."""
    return tuple(map(number, options._fields, options))


def _attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, options, (order, saves, backend) = rebuild(tuple(map(plain, arguments)))
    out, lse, residual = plans.attend(inputs, options, backend, Request(residual=saves, order=order))
    assert out is not None and lse is not None
    if not saves:
        return out, lse, lse.new_empty(0)
    return out, lse, torch.zeros_like(lse) if residual is None else residual


def _attention_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, options, (order, saves, _) = rebuild(arguments)
    problem, query = describe(inputs, options), inputs.query
    *batch, seqlen, heads, _ = query.shape
    lse = query.new_empty((*batch, heads, seqlen), dtype=problem.compute_dtype)
    return new_out(query, inputs.value.shape[-1], order), lse, lse.new_empty(lse.shape if saves else 0)


def _attention_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, residual: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    inputs, options, (backend, needs_bias_gradient) = rebuild(tuple(map(plain, arguments)))
    dout, dlse, *found = map(plain, (dout, dlse, out, lse, residual))
    grads = plans.differentiate(inputs, Results(*found), dout, dlse, options, backend, needs_bias_gradient)
    return wanted(grads, options, needs_bias_gradient)


def _attention_backward_fake(dout: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, options, (_, needs_bias_gradient) = rebuild(arguments[4:])
    return wanted(empty_gradients(inputs), options, needs_bias_gradient)


def wanted(grads: Gradients, options: Options, needs_bias_gradient: bool) -> tuple[Tensor, ...]:
    """As `attention_backward` returns them."""
    if options.functions is None or not decode(options.functions).wants_grad:
        grads = grads._replace(captured_floats=None)
    return no_none(grads if needs_bias_gradient else grads._replace(bias=None), grads.query)


def empty_gradients(inputs: Inputs) -> Gradients:
    differentiable = (*inputs[:3], inputs.bias, inputs.sinks, inputs.captured_floats)
    fresh = (None if t is None else t.new_empty(t.shape) for t in differentiable)
    return Gradients(*fresh)  # type: ignore[arg-type]


def no_none(tensors: Any, like: Tensor) -> tuple[Tensor, ...]:
    """An operator returns tensors only: an empty one stands for None."""
    return tuple(like.new_empty(0) if t is None else t for t in tensors)


def _attention_double_backward(*arguments: Any) -> tuple[Tensor, ...]:
    tangents, (dout, dlse, *results) = arguments[:NUM_TANGENTS], arguments[NUM_TANGENTS : NUM_TANGENTS + 5]
    inputs, options, _ = rebuild(arguments[NUM_TANGENTS + 5 :])
    refuse_other_derivatives(options.precision)
    problem = describe(inputs, options)
    directions = _fill_tangents(inputs, tangents)
    out, lse, residual = results
    with own_dtypes(problem.device_type):
        g_dout, g_dlse, grads = second_order.double_backward(
            problem, inputs, out, lse, dout, dlse, directions, residual
        )
    return no_none((g_dout, g_dlse, *grads), dout)


def _attention_double_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    dout, _, out, lse, _ = arguments[NUM_TANGENTS : NUM_TANGENTS + 5]
    inputs, _, _ = rebuild(arguments[NUM_TANGENTS + 5 :])
    return no_none((torch.empty_like(out), torch.empty_like(lse), *empty_gradients(inputs)), dout)


def _attention_jvp(*arguments: Any) -> tuple[Tensor, Tensor]:
    tangents, (out, lse, residual) = arguments[:NUM_TANGENTS], arguments[NUM_TANGENTS : NUM_TANGENTS + 3]
    inputs, options, _ = rebuild(arguments[NUM_TANGENTS + 3 :])
    refuse_other_derivatives(options.precision)
    problem, directions = describe(inputs, options), _fill_tangents(inputs, tangents)
    with own_dtypes(problem.device_type):
        return second_order.jvp(problem, inputs, out, lse, directions, residual)


def _attention_jvp_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse, _ = arguments[NUM_TANGENTS : NUM_TANGENTS + 3]
    return torch.empty_like(out), torch.empty_like(lse)


def _fill_tangents(inputs: Inputs, tangents: Sequence[Tensor | None]) -> Gradients:
    """Tangents of what has gradients; a missing one of the first three is zero."""
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
    others = (type(t) in PLAIN_TYPES for t in arguments if isinstance(t, Tensor))
    if is_plain_eager(tensor) and not tensor.is_meta and all(others):
        return _KERNELS[name][0](*all_resolved((tensor, *arguments)))
    return getattr(torch.ops.tilewise, name)(tensor, *arguments)


def register(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """The kernel of an operator, for all devices, and what it gives without values."""
    operators.impl(name, kernel, "CompositeExplicitAutograd")
    library.register_fake(f"tilewise::{name}", fake, lib=operators)


for _name, _functions in _KERNELS.items():
    register(_name, *_functions)
