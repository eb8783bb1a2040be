"""Differentiation of the operators: reverse mode, twice, forward mode, vmap and torch.func.

Compiled code calls the operators themselves, whose autograd formulas AOTAutograd traces. Eager code goes
through two `autograd.Function`s that use the same formulas, because only those work under torch.func.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, library
from torch._C._functorch import is_legacy_batchedtensor, unwrap_if_dead

from tilewise.autograd import operators as ops
from tilewise.core.eager import is_plain_eager
from tilewise.core.problem import AttentionProblem, Inputs, Options, describe
from tilewise.core.values import check_values
from tilewise.dispatch import choice as dispatch

_N = len(Inputs._fields)
_BATCHED_BY_FOLDING = {"query", "key", "value", "mask", "bias"}


def attention(
    inputs: Inputs, options: Options, backend: str | None, are_values_known: bool = False
) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable: the one entry that the public API calls.

    `are_values_known`: lengths and pages come from a cache that has checked them itself.

    Raises:
        ValueError, TypeError: see `tilewise.core.problem.describe` and `tilewise.core.values.check_values`.
        NotImplementedError: see `tilewise.dispatch.choose`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.tilewise.attention(*inputs, *options, backend)
    problem = describe(inputs, options)
    name = dispatch.choose(problem, backend)
    if not problem.needs_grad and is_plain_eager(inputs.query) and not inputs.query.is_meta:
        if not are_values_known:
            check_values(problem, inputs, options)
        return ops.launch(problem, inputs, name)
    return Attention.apply(*inputs, *options, backend)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    bias = Inputs(*inputs[:_N]).bias
    ctx.save_for_backward(*inputs[:_N], *output)
    ctx.scalars = inputs[_N:]
    ctx.bias_needs_grad = bias is not None and bias.requires_grad
    ctx.set_materialize_grads(False)


def differentiate(
    backward: Callable[..., tuple[Tensor, ...]], ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of `attention`'s arguments, `backward` being the operator or its Function."""
    *tensors, out, lse = ctx.saved_tensors
    none = (None,) * len(ctx.scalars)
    if dout is None and dlse is None:
        return (*(None,) * _N, *none)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = backward(dout, dlse, out, lse, *tensors, *ctx.scalars, ctx.bias_needs_grad)
    return (*_place(Inputs(*tensors), grads, ctx.bias_needs_grad), *none)


def save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[: 4 + _N])
    *ctx.scalars, ctx.bias_needs_grad = inputs[4 + _N :]
    ctx.set_materialize_grads(False)


def differentiate_twice(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of `attention_backward`'s arguments."""
    dout, dlse, out, lse, *tensors = ctx.saved_tensors
    inputs = Inputs(*tensors)
    g_dout, g_dlse, *grads = torch.ops.tilewise.attention_double_backward(
        _present(inputs, tangents, ctx.bias_needs_grad), dout, dlse, out, lse, *tensors, *ctx.scalars
    )
    # out and lse are functions of the inputs: their part is already in the gradients of the inputs.
    leading = (g_dout, None if dlse is None else g_dlse, None, None)
    return (*leading, *_place(inputs, tuple(grads), has_bias=True), *(None,) * (len(ctx.scalars) + 1))


def _present(inputs: Inputs, tangents: tuple[Tensor | None, ...], has_bias: bool) -> list[Tensor | None]:
    """Tangents or gradients of query, key, value, bias and sinks, None for those that do not exist."""
    q, k, v, bias, sinks = tangents
    bias = bias if has_bias and inputs.bias is not None else None
    return [q, k, v, bias, None if inputs.sinks is None else sinks]


def _place(inputs: Inputs, grads: tuple[Tensor, ...], has_bias: bool) -> Inputs:
    """The gradients of query, key, value, bias and sinks in the places of `Inputs`."""
    q, k, v, bias, sinks = _present(inputs, grads, has_bias)
    return Inputs(q, k, v, bias=bias, sinks=sinks)  # type: ignore[arg-type]


class Attention(torch.autograd.Function):
    """`tilewise::attention` for eager code and torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return ops.call("attention", *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        save(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:_N], *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return differentiate(_eager_backward, ctx, dout, dlse)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        *tensors, out, lse = ctx.saved_tensors
        dots = Inputs(*tangents[:_N])  # type: ignore[arg-type]
        directions = [dots.query, dots.key, dots.value, dots.bias, dots.sinks]
        return torch.ops.tilewise.attention_jvp(directions, out, lse, *tensors, *ctx.scalars)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return _vmap(Attention.apply, 0, info, in_dims, arguments)


def _eager_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """The gradients; differentiable themselves where that is asked for."""
    if _is_watched(dout, dlse):
        return AttentionBackward.apply(dout, dlse, *arguments)
    return ops.call("attention_backward", dout, dlse, *arguments)


def _is_watched(dout: Tensor, dlse: Tensor | None) -> bool:
    """Whether a backward has to be differentiable itself, or a transform has to see it."""
    is_batched = is_legacy_batchedtensor(dout) or (dlse is not None and is_legacy_batchedtensor(dlse))
    return is_batched or torch.is_grad_enabled() or not is_plain_eager(dout)


@dataclass(frozen=True)
class RepeatedCall:
    """A dense call without optional tensors that was made before: see `tilewise.repeat`.

    `forward` and `backward` take and give tensors as the caller has them.
    """

    forward: Callable[[Tensor, Tensor, Tensor], Any]  # out, lse; out alone if nobody wants lse
    problem: AttentionProblem
    options: Options
    backend: str | None
    layout: str
    return_lse: bool
    recomputes: bool  # in the backward, which then needs neither out nor lse

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        query, key, value = unwrap_if_dead(query), unwrap_if_dead(key), unwrap_if_dead(value)
        return _apply_repeated(self, query, key, value)

    @functools.cached_property
    def quick(self) -> Callable[..., Any] | None:
        """The same by the forward's own `quick`: None for tensors unlike those of the call."""
        forward = getattr(self.forward, "quick", None)
        return None if forward is None else functools.partial(_apply_repeated, replace(self, forward=forward))

    @functools.cached_property
    def backward(self) -> Callable[..., tuple[Tensor, ...]]:
        """Found by the first backward, whose kernels a forward need not load."""
        return ops.repeatable_backward(self.problem, self.backend, self.layout)

    def watched_backward(
        self, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The gradients where something has to see them made, or lse has one."""
        query, key, value, *results = saved
        if self.layout == "bhsd":
            query, key, value = (t.transpose(1, 2) for t in (query, key, value))
            dout = None if dout is None else dout.transpose(1, 2)
        arguments = (*Inputs(query, key, value), *self.options, self.backend)
        if self.recomputes:
            with torch.no_grad():
                out, lse = ops.call("attention", *arguments)
        else:
            out, lse = results
            out = out.transpose(1, 2) if self.layout == "bhsd" else out
        dout = torch.zeros_like(out) if dout is None else dout
        grads = _eager_backward(dout, dlse, out, lse, *arguments, False)[:3]
        return tuple(t.transpose(1, 2) for t in grads) if self.layout == "bhsd" else grads


class RepeatedAttention(torch.autograd.Function):
    """`Attention` for a repeated call in eager code, which costs a fraction of the general Function."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: RepeatedCall, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        found = call.forward(query, key, value)
        if found is None:
            return None
        ctx.call = call
        ctx.set_materialize_grads(False)
        if call.recomputes:
            ctx.save_for_backward(query, key, value)
            return found
        out, lse = found
        ctx.save_for_backward(query, key, value, out, lse)
        return found if call.return_lse else out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None
        call, saved = ctx.call, ctx.saved_tensors
        if dout is not None and dlse is None and not _is_watched(dout, dlse):
            return (None, *call.backward(*saved, dout))
        return (None, *call.watched_backward(saved, dout, dlse))


# What `apply` ends in. It takes 2 us more to look for transforms, which repeated calls are free of.
_apply_repeated = super(torch.autograd.Function, RepeatedAttention).apply
# The node's own `apply` looks for `backward` each time, 1 us.
RepeatedAttention._backward_cls.apply = RepeatedAttention.backward  # type: ignore[attr-defined]


class AttentionBackward(torch.autograd.Function):
    """`tilewise::attention_backward` for eager code and torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return torch.ops.tilewise.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        save_backward(ctx, inputs, output)
        ctx.save_for_forward(*inputs[: 4 + _N])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Second derivatives are symmetric, so the tangent by the inputs is their double backward; the
        backward is linear in dout and dlse, so the tangent by those is the backward itself."""
        dout, dlse, out, lse, *tensors = ctx.saved_tensors
        dout_dot, dlse_dot = tangents[:2]
        dots = Inputs(*tangents[4 : 4 + _N])  # type: ignore[arg-type]
        directions = [dots.query, dots.key, dots.value, dots.bias, dots.sinks]
        rest = (out, lse, *tensors, *ctx.scalars)
        grads = torch.ops.tilewise.attention_double_backward(directions, dout, dlse, *rest)[2:]
        if dout_dot is None and dlse_dot is None:
            return tuple(grads) if ctx.bias_needs_grad else (*grads[:3], grads[3].new_empty(0), grads[4])
        dout_dot = torch.zeros_like(out) if dout_dot is None else dout_dot
        linear = AttentionBackward.apply(dout_dot, dlse_dot, *rest, ctx.bias_needs_grad)
        return tuple(a + b if b.numel() else b for a, b in zip(grads, linear))

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return differentiate_twice(ctx, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return _vmap(AttentionBackward.apply, 4, info, in_dims, arguments)


def _vmap(
    function: Callable[..., tuple[Tensor, ...]],
    leading: int,
    info: Any,
    in_dims: tuple[int | None, ...],
    arguments: tuple[Any, ...],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the new dimension into the batch where the problem is dense; otherwise run one by one.

    `leading` arguments (dout, dlse, out, lse) come before `Inputs` and always have a batch dimension.
    """
    inputs, dims = arguments[leading : leading + _N], in_dims[leading : leading + _N]
    folds = all(
        t is None or (name in _BATCHED_BY_FOLDING and t.ndim == 4 + (dim is not None))
        for name, t, dim in zip(Inputs._fields, inputs, dims)
    )
    query = Inputs(*inputs).query
    batch = query.movedim(dims[0], 0).shape[1] if dims[0] is not None else query.shape[0]
    tensors, tensor_dims = arguments[: leading + _N], in_dims[: leading + _N]
    stacked = [_stack(t, dim, info.batch_size) for t, dim in zip(tensors, tensor_dims)]
    folds = folds and all(t is None or t.shape[1] == batch for t in stacked)
    if folds:
        folded = [None if t is None else t.flatten(0, 1) for t in stacked]
        results = function(*folded, *arguments[leading + _N :])
        outputs = [
            r.unflatten(0, (info.batch_size, batch)) if r.ndim > 1 else r.expand(info.batch_size, -1)
            for r in results
        ]
    else:
        rows = [
            function(*(None if t is None else t[n] for t in stacked), *arguments[leading + _N :])
            for n in range(info.batch_size)
        ]
        outputs = [torch.stack(column) for column in zip(*rows)]
    return tuple(outputs), (0,) * len(outputs)


def _stack(t: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The mapped dimension first; a tensor without one is repeated as a view."""
    if t is None:
        return None
    return t.movedim(dim, 0) if dim is not None else t.expand(size, *t.shape)


library.register_autograd(
    "tilewise::attention",
    lambda ctx, dout, dlse: differentiate(torch.ops.tilewise.attention_backward, ctx, dout, dlse),
    setup_context=save,
    lib=ops.operators,
)
library.register_autograd(
    "tilewise::attention_backward", differentiate_twice, setup_context=save_backward, lib=ops.operators
)


def _loop_vmap(name: str) -> None:
    """vmap of an operator whose first argument is a list of tangents: run one by one and stack."""
    operator = getattr(torch.ops.tilewise, name)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        def pick(t: Any, dim: Any, n: int) -> Any:
            if isinstance(t, list):
                return [pick(item, item_dim, n) for item, item_dim in zip(t, dim)]
            return t if dim is None else t.select(dim, n)

        rows = [
            operator(*(pick(t, dim, n) for t, dim in zip(arguments, in_dims))) for n in range(info.batch_size)
        ]
        outputs = tuple(torch.stack(column) for column in zip(*rows))
        return outputs, (0,) * len(outputs)

    library.register_vmap(f"tilewise::{name}", rule, lib=ops.operators)


_loop_vmap("attention_jvp")
_loop_vmap("attention_double_backward")
