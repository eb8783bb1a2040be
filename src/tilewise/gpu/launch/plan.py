"""Plans of GPU calls: the first call of a signature makes its launches, later ones only start them.

The first call goes through `first`, which readies tensors, allocates, and has Triton compile what is new. The
second looks whether launches follow from addresses alone. If so, `again` does them from then on: allocations,
the launches' arguments by the addresses of their tensors, and their start. All that runs then is here;
`gpu.launch.launch_plan` makes launches.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.plan import FunctionPlan, Results, fitted, in_bshd
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import Request, Signature, contiguous_strides, stand_in
from tilewise.core.torch_private import raw_stream

if TYPE_CHECKING:
    from tilewise.gpu.launch.triton_private import CLaunch

META = torch.device("meta")
MAX_CALLS = 128  # whose arguments are kept: more than most models have layers
MAX_ADDRESSES = 256  # of one tensor of a launch
# Tensors besides query, key and value of calls that are launched again; decoding takes others, too.
IN_BACKWARDS = {"cu_seqlens_q", "cu_seqlens_k", "mask", "bias", "alibi_slopes", "dropout_seed"}
IN_FORWARDS = {*IN_BACKWARDS, "seqlens_k", "leftpad_k", "page_table", "sinks"}
Given = Sequence[Any]  # tensors; None where there is none
Give = Callable[..., Given]  # what `Again` takes, of the arguments of a plan's `run`
Again = Callable[[Given], Any]  # `Results` or `Gradients` in "bshd"; None: the first way has to serve
More = Callable[[Given], tuple[Tensor | None, ...]]  # what launches take besides, of each call anew
Addresses = Sequence[Any]  # of tensors, as integers; None where there is none


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
        tensors = [t for t in (*signature.inputs, *signature.results) if t is not None]
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
        if self._is_first and not inputs.query.is_meta:
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
        found = None if self._again is None else self._again(given)
        if found is None or self.layout == "bshd":
            return found
        return type(found)(*[t if t is None or t.ndim != 4 else t.transpose(1, 2) for t in found])


def present(signature: Signature) -> set[str]:
    """The names of the inputs that a signature has besides query, key and value."""
    pairs = zip(Inputs._fields[3:], signature.inputs[3:], strict=True)
    return {name for name, t in pairs if t is not None}


def given_to_forward(signature: Signature) -> Give | None:
    """query, key and value; with all others behind them if there are some, of `IN_FORWARDS` alone."""
    others = present(signature)
    if not others:
        return itemgetter(slice(3))
    return tuple if others <= IN_FORWARDS else None


def given_to_backward(signature: Signature) -> Give | None:
    """query, key, value, out, lse, residual, dout, and what `given_to_forward` has behind the first three."""
    to_forward, (*_, dlse) = given_to_forward(signature), signature.results
    if to_forward is None or dlse is not None or not present(signature) <= IN_BACKWARDS:
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


def nothing(given: Given) -> tuple[Tensor | None, ...]:
    """The `More` of launches that take no others."""
    return ()


class Location(NamedTuple):
    """Where a tensor of a launch lies: in which of the call's, how many bytes from its beginning."""

    tensor: int
    offset: int = 0


class PlannedLaunches(dict[tuple[int, ...], Any]):
    """The launches of a call by the addresses of its tensors: plans, and all arguments of each."""

    def __init__(self, plans: Sequence[tuple[LaunchPlan, Sequence[Location | None]]], are_kept: bool) -> None:
        """`plans`: each with the locations of its tensors. are_kept: arguments, as addresses come again."""
        self._plans, self._are_kept = plans, are_kept
        self.is_watched = plans[0][0].is_watched  # then the first way has to serve

    def __missing__(self, addresses: tuple[int, ...]) -> list[tuple[LaunchPlan, tuple[Any, ...]]]:
        if len(self) >= MAX_CALLS:
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
            plan.start(plan.current_stream(plan.device), *arguments)


def planned_call(
    planned: PlannedLaunches,
    result: Callable[..., Any],
    allocators: Sequence[Callable[[], Tensor] | None],
    more: More,
    there: Callable[[Given], Sequence[Tensor]],
) -> Again:
    """All that a call does whose launches follow from addresses.

    Args:
        allocators: of what launches write, None for None; the first three make the result.
        more: what launches take besides.
        there: those of all tensors, given, allocated and more, that are not None.
    """

    def again(given: Given) -> Any:
        if planned.is_watched():
            return None
        made = [None if allocate is None else allocate() for allocate in allocators]
        planned.start(there((*given, *made, *more(given))))
        return result(*made[:3])

    return again


_COUNTERS: dict[tuple[int, int, int], Tensor] = {}


def scheduler_counter(device: torch.device, number: int = 0) -> Tensor:
    """Two zeros for a launch's scheduler, which leaves them zero again.

    Launches of one stream follow each other, so they share a pair; a captured graph owns its own. Kernels
    that run side by side take pairs of other numbers.
    """
    if device == META or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device.index, raw_stream(device.index), number)
    found = _COUNTERS.get(key)
    if found is None:
        found = _COUNTERS[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return found


def allocator(
    like: Tensor, shape: Sequence[int], dtype: torch.dtype, order: str = "bshd"
) -> Callable[[], Tensor]:
    """Makes new tensors, contiguous as `shape` says or, if (batch, seqlen, heads, dim), in an order."""
    shape, strides, device = tuple(shape), contiguous_strides(shape), like.device
    if order == "bhsd" and len(shape) == 4:
        _, seqlen, heads, dim = shape
        strides = (heads * seqlen * dim, dim, seqlen * dim, 1)
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def make_context_current() -> None:
    """Encoding a TMA descriptor needs a CUDA context, which a thread lacks until it calls CUDA's runtime."""
    if not _thread.has_context and torch.cuda.is_initialized():
        torch.cuda.mem_get_info()
        _thread.has_context = True


class LaunchPlan:
    """One launch of a compiled kernel for any tensors like those it was made with; keeps none of them.

    Attributes:
        start: a function in C that launches on a stream, its first argument, with what `arguments` gave.
            Until it returns the tensors must stay allocated; their device must be the current one.
        device: the number of that device.
        current_stream: of a device by its number, as `start` takes it.
    """

    def __init__(self, bound: CLaunch, arguments: Sequence[Any], tensors: Sequence[Tensor | None]) -> None:
        """`arguments`: in the order of the kernel, of tensors of these or of the library's own."""
        self.device: int = tensors[0].get_device()  # type: ignore[union-attr]
        self.start, self.current_stream, self._hooks = bound.start, bound.current_stream, bound.hooks
        self._rest, self._takes_list = bound.rest, bound.takes_list
        self._arguments: list[Any] = []
        # positions of arguments that are filled in, and the indices of their tensors
        self._pointers: list[tuple[int, int]] = []
        self._descriptors: list[tuple[int, int, EncodedDescriptors]] = []
        self._tuples: list[tuple[int, Callable[[Addresses], Any]]] = []
        index_of = {id(t): n for n, t in enumerate(tensors) if t is not None}
        for argument in arguments:
            kind, position = type(argument), len(self._arguments)
            if kind is int or argument is None:  # as most are
                self._arguments.append(argument)
                continue
            argument = _address_of_own(argument, index_of)
            value = [argument]
            if isinstance(argument, Tensor):
                self._pointers.append((position, index_of[id(argument)]))
                value = [None]
            elif isinstance(argument, tuple):
                value = [tuple([_address_of_own(item, index_of) for item in argument])]
                if any(isinstance(item, Tensor) for item in value[0]):
                    self._tuples.append((position, _fill(value[0], index_of)))
                    value = [None]
            elif is_descriptor(argument):
                encode = functools.partial(bound.encode, len(self._descriptors))
                index, encoded = index_of[id(argument.base)], EncodedDescriptors(argument, encode)
                self._descriptors.append((position, index, encoded))
                value = [None, *encode(argument)[1:]]
            self._arguments += value

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch on the current stream; the tensors' device must be the current one."""
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        self.start(self.current_stream(self.device), *self.arguments(addresses))

    def is_watched(self) -> bool:
        """Whether a profiler wants to be told of launches: Triton's own launch does, `start` does not."""
        enter, leave = self._hooks()
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    def arguments(self, addresses: Addresses) -> tuple[Any, ...]:
        """What `start` takes behind the stream, for tensors at these addresses."""
        arguments = self._arguments.copy()
        for position, index in self._pointers:
            arguments[position] = addresses[index]
        for position, index, encoded in self._descriptors:
            arguments[position] = encoded[addresses[index]]
        for position, fill in self._tuples:
            arguments[position] = fill(addresses)
        return (*self._rest, arguments) if self._takes_list else (*self._rest, *arguments)


class EncodedDescriptors(dict[int, Any]):
    """A TMA descriptor for each address that a tensor has had.

    All else that is encoded is the plan's own, so that what was made for an address stays right whatever
    lives there.
    """

    def __init__(self, descriptor: Any, encode: Callable[[Any], list[Any]]) -> None:
        self._encode = encode
        self._descriptor = copy.copy(descriptor)
        self._descriptor.base = None

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_ADDRESSES:
            self.clear()
        make_context_current()
        descriptor = copy.copy(self._descriptor)
        descriptor.base = Address(address)
        encoded = self[address] = self._encode(descriptor)[0]
        return encoded


class Address(NamedTuple):
    """Stands for a tensor of which only the address is asked."""

    value: int

    def data_ptr(self) -> int:
        return self.value


def is_descriptor(argument: Any) -> bool:
    """Whether an argument is a TMA descriptor made on the host."""
    return hasattr(argument, "block_shape")


def _address_of_own(item: Any, index_of: dict[int, int]) -> Any:
    """The address in place of a tensor that is the library's own, which stays; anything else as it is."""
    return item.data_ptr() if isinstance(item, Tensor) and id(item) not in index_of else item


def _fill(argument: tuple[Any, ...], index_of: dict[int, int]) -> Callable[[Addresses], Any]:
    """A function from all addresses to this argument, whose pointers are integers."""
    if not any(isinstance(item, Tensor) for item in argument[1:]):  # a pointer and its strides
        index, numbers = index_of[id(argument[0])], argument[1:]
        return lambda addresses: (addresses[index], *numbers)
    items = [(index_of[id(item)], None) if isinstance(item, Tensor) else (None, item) for item in argument]
    return lambda addresses: tuple([item if n is None else addresses[n] for n, item in items])
