"""Launch plans of GPU kernels: everything but the pointers. A repeated call is one look-up and one launch.

A plan is found by integers and dtypes alone: the problem, and each tensor's shape, strides and alignment. A
call that differs in any of them goes through Triton, which compiles only if it has to: not for a new length.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_PLANS = 4096
ALIGNMENT = 16  # bytes: what Triton specializes pointers on

Tensors = tuple[Tensor | None, ...]
Fill = Callable[[Tensors, list[int | None]], Any]


@functools.cache
def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on CPU tensors (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Launch(NamedTuple):
    """A kernel, how many programs of it, and its arguments in order.

    Tensors may stand alone, one tuple deep, or as the base of a TMA descriptor.
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    num_warps: int
    num_stages: int | None = None
    maxnreg: int | None = None  # registers a thread has at the start of a warp-specialised kernel
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


def run(build: Callable[..., Launch], problem: Any, tensors: Tensors, *choices: Any) -> None:
    """Launch `build(problem, tensors, *choices)` on the first tensor's device and the current stream.

    `build` may look at the shapes, strides, dtypes and devices of tensors, and at nothing else of them.
    """
    device = tensors[0].get_device()  # type: ignore[union-attr]
    key = (build, problem, device, choices, *map(_signature, tensors))
    plan = _plans.get(key)
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run(build, problem, tensors, *choices)
    if plan is not None:
        return plan(tensors)
    # aliases: one tensor may stand in two places, which are two pointers in the next call
    aliases = tuple(None if t is None else t.detach() for t in tensors)
    launch = build(problem, aliases, *choices)
    compiled = start(launch) if launch.programs > 0 else None
    if compiled is not None:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = LaunchPlan(launch, compiled, aliases)
    return None


def start(launch: Launch) -> Any:
    """Launch through Triton, which compiles what is new; the compiled kernel, None if interpreted."""
    return launch.kernel[(launch.programs, launch.programs_y)](*launch.arguments, **launch.options())


class LaunchPlan:
    """One launch of a compiled kernel for any tensors like those it was made with; keeps none of them."""

    def __init__(self, launch: Launch, compiled: Any, tensors: Tensors) -> None:
        self._run = compiled[(launch.programs, launch.programs_y, 1)]
        self._arguments = list(launch.arguments)
        self._fills: list[tuple[int, Fill]] = []
        places = {id(t): n for n, t in enumerate(tensors) if t is not None}
        for position, argument in enumerate(launch.arguments):
            items = argument if isinstance(argument, tuple) else (argument,)
            if is_descriptor(argument) or any(isinstance(item, Tensor) for item in items):
                self._arguments[position] = None
                self._fills.append((position, _fill(argument, places)))

    def __call__(self, tensors: Tensors) -> None:
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        arguments = self._arguments.copy()
        for position, fill in self._fills:
            arguments[position] = fill(tensors, addresses)
        self._run(*arguments)


_plans: dict[Any, LaunchPlan] = {}


class Descriptor(NamedTuple):
    """What a launcher reads of a TMA descriptor; made without the checks that its like has passed before."""

    base: Tensor | None
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any  # of Gluon's
    padding: str


def _signature(t: Tensor | None) -> Any:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() % ALIGNMENT)


def is_descriptor(argument: Any) -> bool:
    """Whether an argument is a TMA descriptor made on the host."""
    return hasattr(argument, "block_shape")


def _fill(argument: Any, places: dict[int, int]) -> Fill:
    """A function from all tensors and their addresses to this argument."""
    if isinstance(argument, Tensor):
        place = places[id(argument)]
        return lambda _, addresses: addresses[place]
    if is_descriptor(argument):
        place = places[id(argument.base)]
        layout = getattr(argument, "layout", None)
        rest = (argument.shape, argument.strides, argument.block_shape, layout, argument.padding)
        argument.base = None
        return lambda tensors, _: Descriptor(tensors[place], *rest)
    if not any(isinstance(item, Tensor) for item in argument[1:]):  # a pointer and its strides
        place, numbers = places[id(argument[0])], tuple(argument[1:])
        return lambda _, addresses: (addresses[place], *numbers)
    slots = [(places[id(item)], None) if isinstance(item, Tensor) else (None, item) for item in argument]
    return lambda _, addresses: tuple(item if n is None else addresses[n] for n, item in slots)
