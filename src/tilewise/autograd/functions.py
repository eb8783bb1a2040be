"""Differentiation of the operators: reverse mode, twice, forward mode, vmap and torch.func.

Two `autograd.Function`s stand over one plan. `LeanAttention` serves plain eager code. `Attention`, whose
formulas compiled code shares, serves all that watches: torch.func, forward mode, vmap, higher gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, library

from tilewise.autograd import operators
from tilewise.autograd.operators import NUM_INPUTS, NUM_OPTIONS
from tilewise.core.checks import check_tensors
from tilewise.core.functions.expression import decode
from tilewise.core.lazy import all_resolved, resolved
from tilewise.core.plan import Results
from tilewise.core.problem import Gradients, Inputs, Options, describe
from tilewise.core.signature import LazyTensor, NoMemory, Request
from tilewise.core.torch_private import is_batched, is_plain_eager, plain_apply, wants_deterministic
from tilewise.core.values import check_values
from tilewise.dispatch import choice, plans
from tilewise.dispatch.plans import Entry

_NEEDED = ("query", "key", "value")
_BATCHED_BY_FOLDING = {"query", "key", "value", "mask", "bias"}
_NO_LSE, _LSE = Request(lse=False), Request()
_server: Callable[..., tuple[Tensor, Any]] | None = None


@contextlib.contextmanager
def served_by(server: Callable[..., tuple[Tensor, Any]] | None) -> Iterator[None]:
    """Inside, `server(inputs, options, backend, order, wants_lse)` answers all calls, in every thread."""
    global _server
    before, _server = _server, server
    try:
        yield
    finally:
        _server = before


def is_served() -> bool:
    """Whether another than this process's devices answers calls."""
    return _server is not None


def obeying_torch(options: Options) -> Options:
    """The options, deterministic if `torch.use_deterministic_algorithms(True)` asks for it.

    With warn_only=True it does not: as in PyTorch's own attention, the faster gradient is kept.
    """
    if options.deterministic is False and wants_deterministic():
        return options._replace(deterministic=True)
    return options


def attention(
    inputs: Inputs,
    options: Options,
    backend: str | None,
    order: str = "bshd",
    wants_lse: bool = True,
    are_values_known: bool = False,
    entry: Entry | None = None,
) -> tuple[Tensor, Any]:
    """out and lse, differentiable: the one entry that the public API calls.

    Args:
        order: of out's memory, see `tilewise.core.signature.Request`.
        wants_lse: lse may be None if not.
        are_values_known: lengths and pages come from a cache that has checked them itself.
        entry: what `check` has found for these very tensors.

    Raises:
        ValueError, TypeError: see `core.problem.describe` and `core.values.check_values`.
        NotImplementedError: see `dispatch.choice.choose`.
    """
    options = obeying_torch(options)
    if _server is not None:
        return _server(inputs, options, backend, order, wants_lse)
    if entry is None:
        if not is_plain_eager(inputs.query):
            return _watched_attention(inputs, options, backend, order)
        request = _LSE if wants_lse else _NO_LSE
        if order != "bshd":
            request = Request(wants_lse, order=order)
        try:
            entry = plans.forward_plan(inputs, options, backend, request)
        except LazyTensor:
            inputs = Inputs(*all_resolved(inputs))
            entry = plans.forward_plan(inputs, options, backend, request)
        except NoMemory:
            return _watched_attention(inputs, options, backend, order)
    problem = entry.plan.problem
    if problem.has_values and not are_values_known:
        check_values(problem, inputs, options)
    if not problem.needs_grad:
        return plans.run(entry, inputs)[:2]  # type: ignore[no-any-return]
    found = _apply_lean(entry, options, backend, wants_lse, *inputs)
    return found if wants_lse else (found, None)


def check(inputs: Inputs, options: Options, backend: str | None, wants_lse: bool = True) -> Entry | None:
    """Raise what `attention` would, but for values; the plan, if plain eager code has one."""
    if is_plain_eager(inputs.query):
        with contextlib.suppress(LazyTensor, NoMemory):
            return plans.forward_plan(inputs, options, backend, _LSE if wants_lse else _NO_LSE)
    check_tensors(**{name: t for name, t in inputs._asdict().items() if t is not None or name in _NEEDED})
    choice.choose(describe(inputs, options), backend)
    return None


def _watched_attention(
    inputs: Inputs, options: Options, backend: str | None, order: str
) -> tuple[Tensor, Tensor]:
    """By the operator, where something has to see it."""
    if torch.compiler.is_compiling():
        saves = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        return torch.ops.tilewise.attention(*inputs, *options, order, saves, backend)[:2]  # type: ignore[no-any-return]
    check(inputs, options, backend)
    return Attention.apply(*inputs, *options, order, True, backend)[:2]  # type: ignore[no-any-return]


class LeanAttention(torch.autograd.Function):
    """Attention in plain eager code, from its plan: a fraction of the cost of `Attention`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        entry: Entry,
        options: Options,
        backend: str | None,
        wants_lse: bool,
        *tensors: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        results: Results = plans.run(entry, Inputs(*tensors))  # type: ignore[arg-type]
        ctx.call = options, backend, entry.plan.problem.bias_needs_grad
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *results)
        assert results.out is not None
        return (results.out, results.lse) if wants_lse else results.out  # type: ignore[return-value]

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * (4 + NUM_INPUTS)
        saved = ctx.saved_tensors  # once: checkpointing computes them anew each time
        inputs, results = Inputs(*saved[:NUM_INPUTS]), Results(*saved[NUM_INPUTS:])
        options, backend, needs_bias_gradient = ctx.call
        is_watched = _is_watched(dout, dlse)
        if dout is None:
            dout = torch.zeros_like(results.out)  # type: ignore[arg-type]
        if is_watched:
            arguments = (dout, dlse, *results, *inputs, *options, backend, needs_bias_gradient)
            grads = AttentionBackward.apply(*arguments)
        else:
            dout, dlse = resolved(dout), resolved(dlse)
            arguments = (dout, dlse, options, backend, needs_bias_gradient)
            grads = plans.differentiate(inputs, results, *arguments)
        return (None, None, None, None, *_place(inputs, grads, needs_bias_gradient))


_apply_lean = plain_apply(LeanAttention)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, residual = (*inputs[:NUM_INPUTS], *output)
    bias = Inputs(*inputs[:NUM_INPUTS]).bias
    ctx.save_for_backward(*tensors, residual if residual.numel() else None)
    *options, _, _, backend = inputs[NUM_INPUTS:]
    ctx.scalars = (*options, backend)
    ctx.num_scalars = len(inputs) - NUM_INPUTS
    ctx.bias_needs_grad = bias is not None and bias.requires_grad
    ctx.mark_non_differentiable(residual)
    ctx.set_materialize_grads(False)


def differentiate(
    backward: Callable[..., tuple[Tensor, ...]], ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of `attention`'s arguments, `backward` being the operator or its Function."""
    *tensors, out, lse, residual = ctx.saved_tensors
    none = (None,) * ctx.num_scalars
    if dout is None and dlse is None:
        return (*(None,) * NUM_INPUTS, *none)
    if dout is None:
        dout = torch.zeros_like(out)
    grads = backward(dout, dlse, out, lse, residual, *tensors, *ctx.scalars, ctx.bias_needs_grad)
    return (*_place(Inputs(*tensors), grads, ctx.bias_needs_grad), *none)


def save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[: 5 + NUM_INPUTS])
    *ctx.scalars, ctx.bias_needs_grad = inputs[5 + NUM_INPUTS :]
    ctx.set_materialize_grads(False)


def differentiate_twice(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of `attention_backward`'s arguments."""
    dout, dlse, *results_and_tensors = ctx.saved_tensors
    inputs = Inputs(*results_and_tensors[3:])
    g_dout, g_dlse, *grads = torch.ops.tilewise.attention_double_backward(
        *_present(inputs, tangents, ctx.bias_needs_grad), dout, dlse, *results_and_tensors, *ctx.scalars
    )
    # out and lse are functions of the inputs: their part is already in the gradients of the inputs.
    leading = (g_dout, None if dlse is None else g_dlse, None, None, None)
    return (*leading, *_place(inputs, tuple(grads), has_bias=True), *(None,) * (len(ctx.scalars) + 1))


def _directions(dots: Inputs) -> list[Tensor | None]:
    """The tangents of what has gradients."""
    return [getattr(dots, name) for name in Gradients._fields]


def _present(inputs: Inputs, tangents: tuple[Tensor | None, ...], has_bias: bool) -> list[Tensor | None]:
    """Tangents or gradients of what `Gradients` has, None for those that do not exist."""
    q, k, v, bias, sinks, captured = tangents
    bias = bias if has_bias and inputs.bias is not None else None
    floats = inputs.captured_floats
    if floats is None or captured is None or captured.shape != floats.shape:  # empty: nobody wants it
        captured = None
    return [q, k, v, bias, None if inputs.sinks is None else sinks, captured]


def _place(inputs: Inputs, grads: tuple[Tensor | None, ...], has_bias: bool) -> Inputs:
    """The gradients in the places of `Inputs`."""
    q, k, v, bias, sinks, captured = _present(inputs, grads, has_bias)
    return Inputs(q, k, v, bias=bias, sinks=sinks, captured_floats=captured)  # type: ignore[arg-type]


class Attention(torch.autograd.Function):
    """`tilewise::attention` for torch.func and whatever else watches."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return operators.call("attention", *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        save(ctx, inputs, output)
        ctx.save_for_forward(*ctx.to_save)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return differentiate(_eager_backward, ctx, dout, dlse)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        *tensors, out, lse, residual = ctx.saved_tensors
        dots = Inputs(*tangents[:NUM_INPUTS])  # type: ignore[arg-type]
        directions = _directions(dots)
        arguments = (*directions, out, lse, residual, *tensors, *ctx.scalars)
        return (*torch.ops.tilewise.attention_jvp(*arguments), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return _vmap(Attention.apply, 0, info, in_dims, arguments)


def _eager_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """The gradients; differentiable themselves where that is asked for."""
    if _is_watched(dout, dlse):
        return AttentionBackward.apply(dout, dlse, *arguments)
    return operators.call("attention_backward", dout, dlse, *arguments)


def _is_watched(dout: Tensor | None, dlse: Tensor | None) -> bool:
    """Whether a backward has to be differentiable itself, or a transform has to see it."""
    given = dlse if dout is None else dout
    assert given is not None
    return torch.is_grad_enabled() or is_batched(dout) or is_batched(dlse) or not is_plain_eager(given)


class AttentionBackward(torch.autograd.Function):
    """`tilewise::attention_backward` for eager code and torch.func."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return torch.ops.tilewise.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        save_backward(ctx, inputs, output)
        ctx.save_for_forward(*inputs[: 5 + NUM_INPUTS])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Second derivatives are symmetric, so the tangent by the inputs is their double backward; the
        backward is linear in dout and dlse, so the tangent by those is the backward itself."""
        dout, dlse, *results_and_tensors = ctx.saved_tensors
        dout_dot, dlse_dot = tangents[:2]
        dots = Inputs(*tangents[5 : 5 + NUM_INPUTS])  # type: ignore[arg-type]
        directions = _directions(dots)
        rest = (*results_and_tensors, *ctx.scalars)
        grads = torch.ops.tilewise.attention_double_backward(*directions, dout, dlse, *rest)[2:]
        if dout_dot is None and dlse_dot is None:
            grads = Gradients(*grads)
            unwanted = {} if ctx.bias_needs_grad else {"bias": grads.query.new_empty(0)}
            functions = Options(*ctx.scalars[:-1]).functions
            if functions is None or not decode(functions).wants_grad:
                unwanted["captured_floats"] = grads.query.new_empty(0)
            return tuple(grads._replace(**unwanted))  # type: ignore[arg-type]
        dout_dot = torch.zeros_like(results_and_tensors[0]) if dout_dot is None else dout_dot
        linear = AttentionBackward.apply(dout_dot, dlse_dot, *rest, ctx.bias_needs_grad)
        return tuple(a + b if b.numel() else b for a, b in zip(grads, linear))

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return differentiate_twice(ctx, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return _vmap(AttentionBackward.apply, 5, info, in_dims, arguments)


def _vmap(
    function: Callable[..., tuple[Tensor, ...]],
    leading: int,
    info: Any,
    in_dims: tuple[int | None, ...],
    arguments: tuple[Any, ...],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the new dimension into the batch where the problem is dense; otherwise run one by one.

    `leading` arguments (dout, dlse, out, lse, residual) come before `Inputs`; each has a batch dimension.
    """
    inputs, dims = arguments[leading : leading + NUM_INPUTS], in_dims[leading : leading + NUM_INPUTS]
    folds = all(
        t is None or (name in _BATCHED_BY_FOLDING and t.ndim == 4 + (dim is not None))
        for name, t, dim in zip(Inputs._fields, inputs, dims)
    )
    query = Inputs(*inputs).query
    batch = query.movedim(dims[0], 0).shape[1] if dims[0] is not None else query.shape[0]
    tensors, tensor_dims = arguments[: leading + NUM_INPUTS], in_dims[: leading + NUM_INPUTS]
    stacked = [_stack(t, dim, info.batch_size) for t, dim in zip(tensors, tensor_dims)]
    folds = folds and all(t is None or t.shape[1] == batch for t in stacked)
    options = arguments[leading + NUM_INPUTS : leading + NUM_INPUTS + NUM_OPTIONS]
    folds = folds and Options(*options).functions is None  # which may ask for the batch entry
    if folds:
        folded = [None if t is None else t.flatten(0, 1) for t in stacked]
        results = function(*folded, *arguments[leading + NUM_INPUTS :])
        outputs = [
            r.unflatten(0, (info.batch_size, batch)) if r.ndim > 1 else r.expand(info.batch_size, -1)
            for r in results
        ]
    else:
        rows = [
            function(*(None if t is None else t[n] for t in stacked), *arguments[leading + NUM_INPUTS :])
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
    lambda ctx, dout, dlse, _: differentiate(torch.ops.tilewise.attention_backward, ctx, dout, dlse),
    setup_context=save,
    lib=operators.operators,
)
library.register_autograd(
    "tilewise::attention_backward", differentiate_twice, setup_context=save_backward, lib=operators.operators
)


def _loop_vmap(name: str) -> None:
    """vmap of an operator: run one by one and stack."""
    operator = getattr(torch.ops.tilewise, name)

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        def pick(t: Any, dim: Any, n: int) -> Any:
            return t if dim is None else t.select(dim, n)

        rows = [
            operator(*(pick(t, dim, n) for t, dim in zip(arguments, in_dims))) for n in range(info.batch_size)
        ]
        outputs = tuple(torch.stack(column) for column in zip(*rows))
        return outputs, (0,) * len(outputs)

    library.register_vmap(f"tilewise::{name}", rule, lib=operators.operators)


_loop_vmap("attention_jvp")
_loop_vmap("attention_double_backward")
