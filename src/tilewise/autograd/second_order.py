"""Second derivatives: of the backward in both modes, and of forward mode in reverse mode.

Whatever would be a derivative more raises: a derivative that is missing must not pass for zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

import torch
from torch import Tensor, library

from tilewise.autograd import operators
from tilewise.autograd.operators import NUM_INPUTS, NUM_TANGENTS
from tilewise.autograd.vmap import fold_or_loop, loop
from tilewise.core.functions.expression import decode
from tilewise.core.problem import Gradients, Inputs, Options


def directions(dots: Inputs) -> list[Tensor | None]:
    """The tangents of what has gradients."""
    return [getattr(dots, name) for name in Gradients._fields]


def present(inputs: Inputs, tangents: Sequence[Tensor | None], has_bias: bool) -> list[Tensor | None]:
    """Tangents or gradients of what `Gradients` has, None for those that do not exist."""
    q, k, v, bias, sinks, captured = tangents
    bias = bias if has_bias and inputs.bias is not None else None
    floats = inputs.captured_floats
    if floats is None or captured is None or captured.shape != floats.shape:  # empty: nobody wants it
        captured = None
    return [q, k, v, bias, None if inputs.sinks is None else sinks, captured]


def place(inputs: Inputs, grads: Sequence[Tensor | None], has_bias: bool) -> Inputs:
    """The gradients in the places of `Inputs`."""
    q, k, v, bias, sinks, captured = present(inputs, grads, has_bias)
    return Inputs(q, k, v, bias=bias, sinks=sinks, captured_floats=captured)  # type: ignore[arg-type]


def with_captured(scalars: tuple[Any, ...]) -> tuple[Any, ...]:
    """Options and backend of a call with functions, all of whose captured floats get a gradient."""
    options = Options(*scalars[:-1])
    assert options.functions is not None
    return (*options._replace(functions=decode(options.functions).with_gradients().text), scalars[-1])


def save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[: 5 + NUM_INPUTS])
    *ctx.scalars, ctx.bias_needs_grad = inputs[5 + NUM_INPUTS :]
    ctx.set_materialize_grads(False)


def differentiate_twice(
    double_backward: Callable[..., tuple[Tensor, ...]], ctx: Any, *tangents: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of `attention_backward`'s arguments, by the operator or its Function."""
    dout, dlse, *results_and_tensors = ctx.saved_tensors
    inputs = Inputs(*results_and_tensors[3:])
    g_dout, g_dlse, *grads = double_backward(
        *present(inputs, tangents, ctx.bias_needs_grad), dout, dlse, *results_and_tensors, *ctx.scalars
    )
    # out and lse are functions of the inputs: their part is already in the gradients of the inputs.
    leading = (g_dout, None if dlse is None else g_dlse, None, None, None)
    return (*leading, *place(inputs, tuple(grads), has_bias=True), *(None,) * (len(ctx.scalars) + 1))


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
        rest = (*results_and_tensors, *ctx.scalars)
        grads = AttentionDoubleBackward.apply(*directions(dots), dout, dlse, *rest)[2:]
        if dout_dot is None and dlse_dot is None:
            return operators.wanted(Gradients(*grads), Options(*ctx.scalars[:-1]), ctx.bias_needs_grad)
        dout_dot = torch.zeros_like(results_and_tensors[0]) if dout_dot is None else dout_dot
        linear = AttentionBackward.apply(dout_dot, dlse_dot, *rest, ctx.bias_needs_grad)
        return tuple(a + b if b.numel() else b for a, b in zip(grads, linear))

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return differentiate_twice(AttentionDoubleBackward.apply, ctx, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return fold_or_loop(AttentionBackward.apply, 5, info, in_dims, arguments)


class AttentionJvp(torch.autograd.Function):
    """`tilewise::attention_jvp`: the tangents of out and lse, differentiable in reverse mode."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.tilewise.attention_jvp(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        end = NUM_TANGENTS + 3 + NUM_INPUTS
        ctx.save_for_backward(*inputs[:end])
        ctx.scalars = inputs[end:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor | None, g_lse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """<g_out, out.> + <g_lse, lse.> equals <tangents, backward(g_out, g_lse)>: it is linear in the
        tangents, and its gradient by the inputs is the double backward."""
        saved = ctx.saved_tensors
        tangents, (out, *results), tensors = (
            saved[:NUM_TANGENTS], saved[NUM_TANGENTS : NUM_TANGENTS + 3], saved[NUM_TANGENTS + 3 :],
        )  # fmt: skip
        none = (None,) * len(ctx.scalars)
        if g_out is None and g_lse is None:
            return (*(None,) * len(saved), *none)
        g_out = torch.zeros_like(out) if g_out is None else g_out
        rest = (g_out, g_lse, out, *results, *tensors)
        inputs = Inputs(*tensors)
        of_tangents: Sequence[Tensor | None] = (None,) * NUM_TANGENTS
        if any(ctx.needs_input_grad[:NUM_TANGENTS]):
            of_tangents = _backward_as_wanted(rest, ctx.scalars, inputs, Gradients(*tangents))
        grads = AttentionDoubleBackward.apply(*tangents, *rest, *ctx.scalars)[2:]
        return (*of_tangents, None, None, None, *place(inputs, grads, has_bias=True), *none)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Never:
        raise NotImplementedError(
            "attention has no forward mode over forward mode (jvp of jvp, jacfwd of jacfwd): the same second "
            "derivatives come from torch.func.hessian, which is jacfwd(jacrev), and from jvp of grad; "
            "there are no third ones"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return loop(AttentionJvp.apply, info, in_dims, arguments)


def _backward_as_wanted(
    arguments: tuple[Tensor | None, ...], scalars: tuple[Any, ...], inputs: Inputs, tangents: Gradients
) -> list[Tensor | None]:
    """The backward's gradients of all that has a tangent, whether or not it requires a gradient itself."""
    if tangents.captured_floats is not None:
        scalars = with_captured(scalars)
    has_bias = tangents.bias is not None
    grads = AttentionBackward.apply(*arguments, *scalars, has_bias)
    found = present(inputs, grads, has_bias)
    return [None if tangent is None else grad for tangent, grad in zip(tangents, found)]


def _refuse_third(ctx: Any, *grads: Any) -> Never:
    raise NotImplementedError(
        "attention has no third derivatives: tilewise.reference.attention, the O(N^2) formula, has all. Of "
        "torch.autograd.functional, hvp takes one; vhp, the same product, takes none"
    )


class AttentionDoubleBackward(torch.autograd.Function):
    """`tilewise::attention_double_backward`: where derivatives end."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return torch.ops.tilewise.attention_double_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = jvp = staticmethod(_refuse_third)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return loop(AttentionDoubleBackward.apply, info, in_dims, arguments)


library.register_autograd(
    "tilewise::attention_backward",
    lambda ctx, *grads: differentiate_twice(torch.ops.tilewise.attention_double_backward, ctx, *grads),
    setup_context=save_backward,
    lib=operators.operators,
)
library.register_autograd("tilewise::attention_double_backward", _refuse_third, lib=operators.operators)
