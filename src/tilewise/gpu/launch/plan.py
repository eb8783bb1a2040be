"""Plans of GPU launches: the first call of a signature makes its launches, later ones only start them.

The first call goes through `first`, which readies tensors, allocates, and has Triton compile what is new. The
second looks whether launches follow from addresses alone. If so, `again` does them from then on: allocations,
the launches' arguments by the addresses of their tensors, and their start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.plan import FunctionPlan, Results, answer_in, fitted, in_bshd
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import Request, Signature, contiguous_strides, named, stand_in
from tilewise.gpu.launch.launch_plan import LaunchPlan, Step, find

MAX_ADDRESSES = 128  # calls whose arguments are kept: more than most models have layers
SCRATCH_ALIGNMENT = 512  # bytes: where PyTorch's allocator would let a tensor start
# Tensors besides query, key and value of calls that are launched again; decoding takes others, too.
REPEATED = {"cu_seqlens_q", "cu_seqlens_k", "mask", "alibi_slopes", "dropout_seed"}
Given = Sequence[Any]  # tensors; None where there is none
Give = Callable[..., Given]  # what `Again` takes, of the arguments of a plan's `run`
Again = Callable[[Given], Any]  # None: the first way has to serve
More = Callable[[Given], tuple[Tensor | None, ...]]  # what launches take besides, of each call anew


class GpuPlan:
    """See the module.

    Args:
        first: takes inputs and, in a backward, results, dout and dlse.
        find_again: from the tensors of a call like one that has gone the first way, in "bshd", what serves it
            and later ones, in any layout, as only addresses count; None if nothing does.
        give: the tensors of a call that `find_again`'s answer takes; None if calls have others.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        signature: Signature,
        first: Callable[..., Any],
        find_again: Callable[[Given], Again | None],
        give: Give | None,
    ) -> None:
        self.problem, self.layout, self._find_again, self._give = problem, signature.layout, find_again, give
        self._first = fitted(FunctionPlan(problem, first), signature).run
        tensors = [t for t in named((*signature.inputs, *signature.results)) if t is not None]
        may_repeat = give is not None and stand_in() is None  # else there is nothing to launch again
        self._may_repeat = may_repeat and all(
            t.misalignment == 0 and t.device.type == "cuda" for t in tensors
        )
        self._device = tensors[0].device.index
        self._again: Again | None = None
        self._is_first, self._is_second = True, False

    def run(
        self,
        inputs: Inputs,
        results: Results | None = None,
        dout: Tensor | None = None,
        dlse: Tensor | None = None,
    ) -> Any:
        arguments = (inputs,) if results is None else (inputs, results, dout, dlse)
        if (self._again is not None or self._is_second) and torch.cuda.current_device() == self._device:
            found = self._launch_again(arguments)
            if found is not None:
                return found
        found = self._first(*arguments)
        if self._is_first:
            self._is_first, self._is_second = False, self._may_repeat
        return found

    def _launch_again(self, arguments: tuple[Any, ...]) -> Any:
        """None where the first way has to serve."""
        assert self._give is not None
        given = self._give(*arguments)
        if self._is_second and not torch.cuda.is_current_stream_capturing():
            self._is_second = False
            # views, as the same tensor may have been given twice; of a mask, as what was made of it is kept
            views = [None if t is None else t[...] for t in self._give(*in_bshd(self.layout, *arguments))]
            self._again = self._find_again(views)
        return None if self._again is None else answer_in(self.layout, self._again(given))


def present(signature: Signature) -> set[str]:
    """The names of the inputs that a signature has besides query, key and value."""
    pairs = zip(Inputs._fields[3:], signature.inputs[3:], strict=True)
    return {name for name, t in pairs if t is not None}


def given_to_forward(signature: Signature) -> Give | None:
    """query, key and value; with all others behind them if there are some, of `REPEATED` alone."""
    others = present(signature)
    if not others:
        return itemgetter(slice(3))
    return tuple if others <= REPEATED else None


def given_to_backward(signature: Signature) -> Give | None:
    """query, key, value, out, lse, residual, dout, and what `given_to_forward` has behind the first three."""
    to_forward, (*_, dlse) = given_to_forward(signature), signature.results
    if to_forward is None or dlse is not None:
        return None

    def give(inputs: Inputs, results: Results, dout: Tensor, dlse: None) -> Given:
        first, second, third, *others = to_forward(inputs)
        return (first, second, third, *results, dout, *others)

    return give


def inputs_among(given: Given) -> Inputs:
    """The inputs among what `given_to_backward` gives."""
    return Inputs(*given[:3], *given[7:])


def function_plan(
    problem: AttentionProblem,
    request: Request,
    forward: Callable[..., Results],
    backward: Callable[..., Gradients],
) -> FunctionPlan:
    """Of calls with functions: what kernels read of captured tensors is looked at in every call."""

    def run(problem: AttentionProblem, inputs: Inputs, *results: Any) -> Results | Gradients:
        if results:
            return backward(problem, inputs, *results)
        return forward(problem, inputs, request.order, request.residual)

    return FunctionPlan(problem, run)


class Location(NamedTuple):
    """Where a tensor of a launch lies: in which of the call's, how many bytes from its beginning."""

    tensor: int
    offset: int = 0


class PlannedLaunches(dict[tuple[int, ...], list[tuple[LaunchPlan, list[Any]]]]):
    """The launches of a call by the addresses of its tensors: plans, and all arguments of each."""

    def __init__(self, plans: Sequence[tuple[LaunchPlan, Sequence[Location | None]]], are_kept: bool) -> None:
        """`plans`: each with the locations of its tensors. are_kept: arguments, as addresses come again."""
        self._plans, self._are_kept = plans, are_kept
        self.is_watched = plans[0][0].is_watched  # then the first way has to serve

    def __missing__(self, addresses: tuple[int, ...]) -> list[tuple[LaunchPlan, list[Any]]]:
        if len(self) >= MAX_ADDRESSES:
            self.clear()
        launches = []
        for plan, locations in self._plans:
            absolute = [None if p is None else addresses[p.tensor] + p.offset for p in locations]
            launches.append((plan, plan.arguments(absolute)))
        if self._are_kept:
            self[addresses] = launches
        return launches

    def start(self, tensors: Sequence[Tensor]) -> None:
        """Start them all, with tensors that are as aligned as those they were planned with."""
        for plan, arguments in self[tuple([t.data_ptr() for t in tensors])]:
            plan.start(arguments)


def plan_steps(
    problem: AttentionProblem, steps: Sequence[Step], locations: dict[int, Location | None]
) -> PlannedLaunches | None:
    """What the first call has planned for steps, by the locations of their tensors; None if it has not."""
    found = []
    for step in steps:
        plan = find(problem, step)
        if plan is None:
            return None
        found.append((plan, [locations[id(t)] for t in (*step.tensors, *step.fresh)]))
    # Packed calls have other totals in each step: 24 layers' arguments, not needed again, would be 120 KiB.
    return PlannedLaunches(found, not problem.is_packed)


def again_forward(
    problem: AttentionProblem,
    order: str,
    residual: bool,
    given: Given,
    steps: Callable[[Given, Given], Sequence[Step]],
    more: More = lambda given: (),
) -> Again | None:
    """A forward of query, key and value, the first three of `given`.

    Args:
        residual: whether what rounding took from lse is asked for.
        steps: all launches, from `given`, and out, lse, residual or None, and `more`.
        more: tensors that a call's launches read or share with others, from what is given.
    """
    query = given[0]
    *batch, seqlen, heads = query.shape[:-1]
    new_out = allocator(query, (*query.shape[:-1], problem.head_dim_v), problem.out_dtype, order)
    new_lse = allocator(query, (*batch, heads, seqlen), torch.float32)
    new = [new_out, new_lse, new_lse if residual else lambda: None]
    return _again(problem, given, steps, more, new, Results)


def again_backward(
    problem: AttentionProblem,
    given: Given,
    steps: Callable[[Given, Given], Sequence[Step]],
    scratch: Sequence[tuple[int, ...]],
    more: More = lambda given: (),
) -> Again | None:
    """A backward of query, key, value, out, lse, residual and dout, the first seven of `given`.

    Args:
        steps: all launches, from `given`, and dq, dk, dv, scratch and `more`.
        scratch: shapes of tensors of 4-byte numbers that only the launches use; one allocation for all.
        more: as in `again_forward`.
    """
    query = given[0]
    sizes = [-(-4 * math.prod(shape) // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for shape in scratch]
    *offsets, size = itertools.accumulate(sizes, initial=0)
    new = [allocator(query, t.shape, t.dtype) for t in given[:3]]
    new.append(allocator(query, (size // 4,), torch.float32))
    buffers = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in scratch]
    return _again(problem, given, steps, more, new, Gradients, list(zip(buffers, offsets, strict=True)))


def _again(
    problem: AttentionProblem,
    given: Given,
    steps: Callable[[Given, Given], Sequence[Step]],
    more: More,
    allocators: Sequence[Callable[[], Tensor | None]],
    result: Callable[..., Any],
    buffers: Sequence[tuple[Tensor, int]] = (),
) -> Again | None:
    """What makes tensors by `allocators`, starts the launches, and answers with a result of the first three.

    buffers: what launches take in place of the last of these tensors, and at which offsets it lies there.
    """
    made, others = [allocate() for allocate in allocators], more(given)
    tensors = (*given, *made, *others)
    places = [n for n, t in enumerate(tensors) if t is not None]
    there: Callable[[Given], Sequence[Tensor]] = itemgetter(*places)
    locations: dict[int, Any] = {id(t): Location(n) for n, t in enumerate(there(tensors))}
    if buffers:
        locations |= {id(t): Location(locations[id(made[-1])].tensor, offset) for t, offset in buffers}
    locations[id(None)] = None
    new = [*made[:3], *(t for t, _ in buffers), *others]
    planned = plan_steps(problem, steps(given, new), locations)
    if planned is None:
        return None

    def again(given: Given) -> Any:
        if planned.is_watched():
            return None
        made = [allocate() for allocate in allocators]
        planned.start(there((*given, *made, *more(given))))
        return result(*made[:3])

    return again


def allocator(
    like: Tensor, shape: Sequence[int], dtype: torch.dtype, order: str = "bshd"
) -> Callable[[], Tensor]:
    """Makes new tensors, contiguous as `shape` says or, if (batch, seqlen, heads, dim), in an order."""
    shape, strides, device = tuple(shape), contiguous_strides(shape), like.device
    if order == "bhsd" and len(shape) == 4:
        _, seqlen, heads, dim = shape
        strides = (heads * seqlen * dim, dim, seqlen * dim, 1)
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)
