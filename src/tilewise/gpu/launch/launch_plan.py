"""Launch plans of GPU kernels: everything but the pointers. A cache hit is one look-up and one launch.

A plan is found by integers and dtypes alone: the problem, and each tensor's shape, strides and alignment. A
call that differs in any of them goes through Triton, which compiles only if it has to: not for a new length.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.signature import stand_in
from tilewise.gpu.launch.gpus import gpu_of

if TYPE_CHECKING:
    from tilewise.gpu.launch.launcher import BoundKernel

MAX_PLANS = 4096
MAX_ADDRESSES = 256  # of one tensor of a launch
ALIGNMENT = 16  # bytes: what Triton specializes pointers on

Tensors = tuple[Tensor | None, ...]
Addresses = Sequence[Any]  # of tensors, as integers; None where there is none
Fill = Callable[[Addresses], Any]


HAS_TRITON = importlib.util.find_spec("triton") is not None  # asking does not import it


@functools.cache
def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on CPU tensors (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Launch(NamedTuple):
    """A kernel, how many programs of it, and its arguments in order.

    Tensors may stand alone, one tuple deep, or as the base of a TMA descriptor. Those that are not the call's
    are the library's own and must live on.
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    num_warps: int
    num_stages: int | None = None
    maxnreg: int | None = None  # registers of a thread at most; of a warp-specialised kernel, at its start
    programs_y: int = 1  # second dimension of the grid
    launch_pdl: bool = False  # programmatic dependent launch: start before the kernel before has ended

    def options(self) -> dict[str, Any]:
        """Compiler options. Fused multiply-adds: the exponential's scale costs nothing."""
        if is_interpreted():
            return {}
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}
        options["launch_pdl"] = self.launch_pdl or None
        return {name: value for name, value in options.items() if value is not None} | {
            "enable_fp_fusion": True
        }


class Step(NamedTuple):
    """One launch of several: what `run` and `find` take besides the problem."""

    build: Callable[..., Launch]
    tensors: Tensors
    choices: tuple[Any, ...]
    fresh: Tensors


def run(
    build: Callable[..., Launch], problem: Any, tensors: Tensors, *choices: Any, fresh: Tensors = ()
) -> None:
    """Launch `build(problem, (*tensors, *fresh), *choices)` on the current stream.

    `build` may look at the shapes, strides, dtypes and devices of tensors, and at nothing else of them. Those
    of `fresh` must follow from all other arguments: tensors just allocated, which need no look.
    """
    run_steps(problem, (Step(build, tensors, choices, fresh),))


def run_steps(problem: Any, steps: Sequence[Step]) -> None:
    """`run` of each; one look at tensors that are the same tuple in several of them."""
    device = steps[0].tensors[0].get_device()  # type: ignore[union-attr]
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            run_steps(problem, steps)
        return
    seen: Tensors = ()
    signatures: tuple[Any, ...] = ()
    for step in steps:
        if step.tensors is not seen:
            seen, signatures = step.tensors, _signatures(step.tensors)
        _launch(problem, step, signatures)


def _launch(problem: Any, step: Step, signatures: tuple[Any, ...]) -> None:
    build, tensors, choices, fresh = step
    key = _key(problem, step, signatures)
    plan = _plans.get(key)
    if plan is not None:
        plan((*tensors, *fresh))
        return
    # aliases: one tensor may stand in two places, which are two pointers in the next call
    aliases = tuple(None if t is None else t.detach() for t in (*tensors, *fresh))
    launch = build(problem, aliases, *choices)
    compiled = start(launch) if launch.programs > 0 else None
    bound = None if compiled is None else bind(compiled, (launch.programs, launch.programs_y, 1))
    if bound is not None:
        if len(_plans) >= MAX_PLANS:
            del _plans[next(iter(_plans))]
        _plans[key] = LaunchPlan(launch, bound, aliases, lambda tensors: build(problem, tensors, *choices))


def find(problem: Any, step: Step) -> LaunchPlan | None:
    """The plan that `run` has made for such tensors; of `fresh` only those that are None matter."""
    return _plans.get(_key(problem, step, _signatures(step.tensors)))


def _key(problem: Any, step: Step, signatures: tuple[Any, ...]) -> Any:
    device, absent = step.tensors[0].get_device(), tuple([t is None for t in step.fresh])  # type: ignore[union-attr]
    return (step.build, problem, step.choices, device, absent, signatures)


def _signatures(tensors: Tensors) -> tuple[Any, ...]:
    return tuple(
        [None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNMENT) for t in tensors]
    )


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def _make_context_current() -> None:
    """Encoding a TMA descriptor needs a CUDA context, which a thread lacks until it calls CUDA's runtime."""
    if not _thread.has_context and torch.cuda.is_initialized():
        torch.cuda.mem_get_info()
        _thread.has_context = True


def start(launch: Launch) -> Any:
    """Launch through Triton, which compiles what is new; the compiled kernel, None if interpreted.

    For a GPU that is not here, only compile: None.
    """
    if stand_in() is not None:
        from tilewise.gpu.launch import launcher, triton_key

        triton_key.keep()
        launcher.compile_only(launch.kernel, launch.arguments, launch.options())
        return None
    _make_context_current()
    _use_kernel_folder()
    return launch.kernel[(launch.programs, launch.programs_y)](*launch.arguments, **launch.options())


@functools.cache
def _use_kernel_folder() -> None:
    """Have Triton look into `$TILEWISE_KERNELS` first; once, as it says when it can't."""
    if is_interpreted():
        return
    from tilewise.gpu.launch import kernel_folder, triton_key

    folder = None
    if given := os.environ.get("TILEWISE_KERNELS"):
        # PyTorch says which GPU it is: Triton would compile C to ask, before it can look into the folder
        folder = kernel_folder.use(Path(given), gpu_of(None).capability)
    triton_key.keep(folder)


def bind(compiled: Any, grid: tuple[int, int, int]) -> BoundKernel | None:
    """See `tilewise.gpu.launch.launcher`, which imports triton."""
    from tilewise.gpu.launch import launcher

    return launcher.bind(compiled, grid)


class LaunchPlan:
    """One launch of a compiled kernel for any tensors like those it was made with; keeps none of them.

    Attributes:
        start: launches on the current stream, with what `arguments` gave. Until it returns the tensors must
            stay allocated; their device must be the current one.
        is_watched: whether a profiler wants to be told of launches, of which `start` tells nobody.
    """

    def __init__(
        self, launch: Launch, bound: BoundKernel, tensors: Tensors, rebuild: Callable[[Tensors], Launch]
    ) -> None:
        self._rebuild = rebuild
        self.start = functools.partial(bound.launch, tensors[0].get_device())  # type: ignore[union-attr]
        self.is_watched = bound.is_watched
        self._arguments: list[Any] = []
        # positions of arguments that are filled in, and the indices of their tensors
        self._pointers: list[tuple[int, int]] = []
        self._descriptors: list[tuple[int, int, EncodedDescriptors]] = []
        self._tuples: list[tuple[int, Fill]] = []
        index_of = {id(t): n for n, t in enumerate(tensors) if t is not None}
        for argument in launch.arguments:
            argument = _address_of_own(argument, index_of)
            position, value = len(self._arguments), [argument]
            if is_descriptor(argument):
                encode = functools.partial(bound.encode, len(self._descriptors))
                index, encoded = index_of[id(argument.base)], EncodedDescriptors(argument, encode)
                self._descriptors.append((position, index, encoded))
                value = [None, *encode(argument)[1:]]
            elif isinstance(argument, Tensor):
                self._pointers.append((position, index_of[id(argument)]))
                value = [None]
            elif isinstance(argument, tuple):
                value = [tuple(_address_of_own(item, index_of) for item in argument)]
                if any(isinstance(item, Tensor) for item in value[0]):
                    self._tuples.append((position, _fill(value[0], index_of)))
                    value = [None]
            self._arguments += value

    def __call__(self, tensors: Tensors) -> None:
        """Launch on the current stream; the tensors' device must be the current one."""
        if self.is_watched():
            start(self._rebuild(tensors))
        else:
            self.start(self.arguments([None if t is None else t.data_ptr() for t in tensors]))

    def arguments(self, addresses: Addresses) -> list[Any]:
        """What `start` takes for tensors at these addresses."""
        arguments = self._arguments.copy()
        for position, index in self._pointers:
            arguments[position] = addresses[index]
        for position, index, encoded in self._descriptors:
            arguments[position] = encoded[addresses[index]]
        for position, fill in self._tuples:
            arguments[position] = fill(addresses)
        return arguments


_plans: dict[Any, LaunchPlan] = {}


def clear() -> None:
    """Forget all plans."""
    _plans.clear()


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
        _make_context_current()
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


def _fill(argument: tuple[Any, ...], index_of: dict[int, int]) -> Fill:
    """A function from all addresses to this argument, whose pointers are integers."""
    if not any(isinstance(item, Tensor) for item in argument[1:]):  # a pointer and its strides
        index, numbers = index_of[id(argument[0])], argument[1:]
        return lambda addresses: (addresses[index], *numbers)
    items = [(index_of[id(item)], None) if isinstance(item, Tensor) else (None, item) for item in argument]
    return lambda addresses: tuple([item if n is None else addresses[n] for n, item in items])
