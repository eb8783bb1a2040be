"""Differentiation of the operators: reverse mode, forward mode, vmap and torch.func.

Two `autograd.Function`s stand over one plan. `LeanAttention` serves plain eager code. `Attention`, whose
formulas compiled code shares, serves all that watches: torch.func, forward mode, vmap, higher gradients.
`autograd.second_order` has the second derivatives.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, library
from torch.compiler import is_compiling

from tilewise.autograd import operators
from tilewise.autograd.operators import NUM_INPUTS
from tilewise.autograd.second_order import (
    AttentionBackward,
    AttentionJvp,
    directions,
    place,
    with_captured,
)
from tilewise.autograd.vmap import fold_or_loop
from tilewise.core.checks import LEARNED_SLOPES, check_inputs
from tilewise.core.plan import Results
from tilewise.core.problem import Gradients, Inputs, Options, describe, in_layout
from tilewise.core.signature import LazyTensor, NoMemory, Request, all_resolved, resolved
from tilewise.core.torch_private import (
    are_transforms_active,
    between_graphs,
    forward_level,
    is_batched,
    is_differentiated,
    is_plain_eager,
    is_tracing,
    num_modes,
    plain_apply,
    while_tracing,
)
from tilewise.core.values import check_values
from tilewise.dispatch import choice, plans
from tilewise.dispatch.plans import Entry

LSE, NO_LSE = Request(), Request(lse=False)


class Server(Protocol):
    """What answers all calls in place of a backend, as `context_parallel` has one: see `served_by`."""

    def __call__(
        self, inputs: Inputs, options: Options, backend: str | None, request: Request, /
    ) -> tuple[Tensor, Any]:
        """out and lse."""

    def all_columns(self, mask: Tensor, /) -> Tensor:
        """What a mask of the keys of this rank says, of the keys of all ranks."""

    def refuse(self, error: Exception, /) -> None:
        """Tell other ranks, which wait for this call, that it is refused."""


_server: Server | None = None


class _Thread(threading.local):
    is_serving = False
    is_heard = False


_thread = _Thread()


@contextlib.contextmanager
def served_by(server: Server) -> Iterator[None]:
    """Inside, the server answers all calls, in every thread.

    Calls that the server itself makes are answered as ever.
    """
    global _server
    before, _server = _server, server
    try:
        yield
    finally:
        _server = before


def is_served() -> bool:
    """Whether a server answers calls of this thread."""
    return _server is not None and not _thread.is_serving


def all_columns(mask: Tensor) -> Tensor:
    """What a mask of the keys of this rank says, of the keys of all ranks if a server answers."""
    return mask if _server is None or _thread.is_serving else _server.all_columns(mask)


def is_unheard() -> bool:
    """Whether a server answers that is not yet told if this call is refused: `heard` has to make it."""
    return _server is not None and not _thread.is_serving and not _thread.is_heard


@between_graphs
def heard(face: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What a public function returns; if it refuses the call, the server is told."""
    unknown = arguments.pop("unknown", {})
    _thread.is_heard = True
    try:
        return face(**arguments, **unknown)
    except Exception as error:
        refuse(error)
        raise
    finally:
        _thread.is_heard = False


def refuse(error: Exception) -> None:
    """Tell the server's other ranks, which wait for this call, that it is refused: once for each error."""
    if _server is not None and not _thread.is_serving and not getattr(error, "is_told", False):
        error.is_told = True  # type: ignore[attr-defined]
        _server.refuse(error)


@between_graphs
def _served(*call: Any) -> tuple[Tensor, Any]:
    assert _server is not None
    _thread.is_serving = True
    try:
        return _server(*call)
    except Exception as error:
        error.is_told = True  # type: ignore[attr-defined]
        raise
    finally:
        _thread.is_serving = False


@while_tracing  # compiled code is guarded by both modes, but cannot trace the second
def _wants_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not (
        torch.is_deterministic_algorithms_warn_only_enabled()
    )


def obeying_torch(options: Options) -> Options:
    """The options, deterministic if `torch.use_deterministic_algorithms(True)` asks for it.

    With warn_only=True it does not: as in PyTorch's own attention, the faster gradient is kept.
    """
    if options.deterministic is False and _wants_deterministic():
        return options._replace(deterministic=True)
    return options


def attention(
    inputs: Inputs,
    options: Options,
    backend: str | None,
    request: Request = LSE,
    layout: str = "bshd",
    are_values_known: bool = False,
    entry: Entry | None = None,
) -> tuple[Tensor, Any]:
    """out and lse, differentiable: the one entry that the public API calls.

    Args:
        request: lse may be None if it is not asked for.
        layout: of query, key, value and out.
        are_values_known: lengths and pages come from a cache that has checked them itself.
        entry: what `check` has found for these very tensors.

    Raises:
        ValueError, TypeError: see `core.problem.describe` and `core.values.check_values`.
        NotImplementedError: see `dispatch.choice.choose`.
    """
    if torch.are_deterministic_algorithms_enabled():
        options = obeying_torch(options)
    if _server is not None and is_served():
        return _in_bshd(_served, layout, inputs, options, backend, request)
    if entry is None:
        # A transform, a mode or forward differentiation has to see the operator: `is_plain_eager`, but for
        # types, which a plan knows of its tensors; written out, as a call of Python's would take its time.
        if is_compiling() or are_transforms_active() or num_modes() or is_tracing() or forward_level() >= 0:
            return _in_bshd(_watched_attention, layout, inputs, options, backend, request)
        try:
            entry = plans.forward_plan(inputs, options, backend, request, layout)
        except LazyTensor:
            inputs = Inputs(*all_resolved(inputs))
            entry = plans.forward_plan(inputs, options, backend, request, layout)
        except NoMemory:
            return _in_bshd(_watched_attention, layout, inputs, options, backend, request)
    if entry.has_values and not are_values_known:
        check_values(entry.plan.problem, inputs, options)
    if not entry.needs_grad:
        results = plans.run(entry, inputs)
        return results.out, results.lse
    found = _apply_lean(entry, request.lse, *inputs)
    return found if request.lse else (found, None)


def _in_bshd(
    function: Callable[..., tuple[Tensor, Any]], layout: str, inputs: Inputs, *call: Any
) -> tuple[Tensor, Any]:
    """What takes (batch, seqlen, heads, dim), for another layout."""
    if layout == "bshd":
        return function(inputs, *call)
    out, lse = function(in_layout(inputs, layout), *call)
    return out.transpose(1, 2), lse


def check(inputs: Inputs, options: Options, backend: str | None, request: Request = LSE) -> Entry | None:
    """Raise what `attention` would, but for values; the plan, if plain eager code has one."""
    options = obeying_torch(options)
    if is_plain_eager(inputs.query):
        with contextlib.suppress(LazyTensor, NoMemory):
            return plans.forward_plan(inputs, options, backend, request)
    check_inputs(inputs)
    choice.choose(describe(inputs, options), backend)
    return None


def _watched_attention(
    inputs: Inputs, options: Options, backend: str | None, request: Request
) -> tuple[Tensor, Tensor]:
    """By the operator, where something has to see it."""
    if is_compiling() and not is_differentiated():
        saves = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        return torch.ops.tilewise.attention(  # type: ignore[no-any-return]
            *inputs, *operators.scalars(options), request.order, saves, backend
        )[:2]
    return _by_function(inputs, options, backend, request)


@between_graphs  # as operators have neither forward mode nor derivatives inside of a transform
def _by_function(
    inputs: Inputs, options: Options, backend: str | None, request: Request
) -> tuple[Tensor, Tensor]:
    check(inputs, options, backend)
    return Attention.apply(*inputs, *options, request.order, True, backend)[:2]  # type: ignore[no-any-return]


class LeanAttention(torch.autograd.Function):
    """Attention in plain eager code, from its plan: a fraction of the cost of `Attention`."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, entry: Entry, wants_lse: bool, *tensors: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        results: Results = plans.run(entry, Inputs(*tensors))  # type: ignore[arg-type]
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *results)
        assert results.out is not None
        return (results.out, results.lse) if wants_lse else results.out  # type: ignore[return-value]

    @staticmethod
    @between_graphs
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * (2 + NUM_INPUTS)
        saved = ctx.saved_tensors  # once: checkpointing computes them anew each time
        inputs, results = Inputs(*saved[:NUM_INPUTS]), Results(*saved[NUM_INPUTS:])
        signature, needs_bias_gradient = ctx.entry.signature, ctx.entry.plan.problem.bias_needs_grad
        layout, rest = signature.layout, (signature.options, signature.backend, needs_bias_gradient)
        is_watched = _is_watched(dout, dlse)
        if dout is None:
            dout = torch.zeros_like(results.out)  # type: ignore[arg-type]
        if is_watched:
            grads = _watched_backward(layout, inputs, results, dout, dlse, *rest)
        else:
            dout, dlse = resolved(dout), resolved(dlse)
            grads = plans.differentiate(inputs, results, dout, dlse, *rest, layout=layout)
        return (None, None, *place(inputs, grads, needs_bias_gradient))


def _watched_backward(
    layout: str, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None, options: Options,
    *rest: Any,
) -> Gradients:  # fmt: skip
    """By the Function that has derivatives itself."""
    out, *others = results
    assert out is not None
    if layout != "bshd":
        inputs, out, dout = in_layout(inputs, layout), out.transpose(1, 2), dout.transpose(1, 2)
    grads = AttentionBackward.apply(dout, dlse, out, *others, *inputs, *options, *rest)
    return in_layout(Gradients(*grads), layout)


_apply_lean = plain_apply(LeanAttention)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, (out, lse, residual) = Inputs(*inputs[:NUM_INPUTS]), output
    ctx.save_for_backward(*tensors, out, lse, residual if residual.numel() else None)
    *options, _, _, backend = inputs[NUM_INPUTS:]
    ctx.scalars = (*options, backend)
    ctx.num_scalars = len(inputs) - NUM_INPUTS
    ctx.bias_needs_grad = tensors.bias is not None and tensors.bias.requires_grad
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
    return (*place(Inputs(*tensors), grads, ctx.bias_needs_grad), *none)


class Attention(torch.autograd.Function):
    """`tilewise::attention` for torch.func and whatever else watches."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return operators.call("attention", *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        save(ctx, inputs, output)
        ctx.save_for_forward(*ctx.to_save)
        floats = Inputs(*inputs[:NUM_INPUTS]).captured_floats
        if floats is not None and floats.requires_grad:  # of an outer transform, which the trace has not seen
            ctx.scalars = with_captured(ctx.scalars)

    @staticmethod
    @between_graphs
    def backward(  # type: ignore[override]
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return differentiate(_eager_backward, ctx, dout, dlse)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        *tensors, out, lse, residual = ctx.saved_tensors
        of_inputs = Inputs(*tangents[:NUM_INPUTS])  # type: ignore[arg-type]
        if of_inputs.alibi_slopes is not None:
            raise NotImplementedError(f"alibi_slopes with a tangent {LEARNED_SLOPES}")
        dots = directions(of_inputs)
        return (*AttentionJvp.apply(*dots, out, lse, residual, *tensors, *ctx.scalars), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return fold_or_loop(Attention.apply, 0, info, in_dims, arguments)


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


library.register_autograd(
    "tilewise::attention",
    lambda ctx, dout, dlse, _: differentiate(torch.ops.tilewise.attention_backward, ctx, dout, dlse),
    setup_context=save,
    lib=operators.operators,
)
