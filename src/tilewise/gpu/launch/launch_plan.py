"""Launches of GPU kernels, and the plans of launches that are found again: everything but the pointers.

A plan is found by integers and dtypes alone: the problem, and each tensor's shape, strides and alignment. A
call that differs in any of them goes through Triton, which compiles only if it has to: not for a new length.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.kept import lock_for_forks
from tilewise.core.plan import Results
from tilewise.core.problem import AttentionProblem, Gradients
from tilewise.core.signature import ALIGNMENT, in_order, stand_in
from tilewise.gpu.launch.entry import fields_of
from tilewise.gpu.launch.gpus import gpu_of
from tilewise.gpu.launch.plan import (
    Again,
    Given,
    LaunchPlan,
    Location,
    More,
    PlannedLaunches,
    allocator,
    make_context_current,
    planned_call,
    scheduler_counter,
)

if TYPE_CHECKING:
    from tilewise.gpu.launch.triton_private import CLaunch

MAX_PLANS = 4096
SCRATCH_ALIGNMENT = 512  # bytes: where PyTorch's allocator would let a tensor start

Tensors = tuple[Tensor | None, ...]


HAS_TRITON = importlib.util.find_spec("triton") is not None  # asking does not import it


@functools.cache
def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on CPU tensors (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Launch(NamedTuple):
    """A kernel, how many programs of it, and its arguments in order.

    Tensors may stand alone, one tuple deep (two, if the outer one is `entry.by_field`), or as the base of a
    TMA descriptor. Those that are not the call's are the library's own and must live on.
    """

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    num_warps: int
    num_stages: int | None = None
    maxnreg: int | None = None  # registers of a thread at most; of a warp-specialised kernel, at its start
    programs_y: int = 1  # second dimension of the grid
    launch_pdl: bool = False  # programmatic dependent launch: start before the kernel before has ended

    @property
    def fields(self) -> list[Any]:
        """The arguments as the compiled kernel takes them."""
        return fields_of(self.arguments)

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
        if plan.is_watched():
            start(build(problem, (*tensors, *fresh), *choices))
        else:
            plan((*tensors, *fresh))
        return
    # aliases: one tensor may stand in two places, which are two pointers in the next call
    aliases = tuple(None if t is None else t.detach() for t in (*tensors, *fresh))
    launch = build(problem, aliases, *choices)
    compiled = start(launch) if launch.programs > 0 else None
    bound = None if compiled is None else bind(compiled, (launch.programs, launch.programs_y, 1))
    if bound is not None:
        made = LaunchPlan(bound, launch.fields, aliases)
        with _lock:
            if len(_plans) >= MAX_PLANS:
                del _plans[next(iter(_plans))]
            _plans[key] = made


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


def start(launch: Launch) -> Any:
    """Launch through Triton, which compiles what is new; the compiled kernel, None if interpreted.

    For a GPU that is not here, and in `compile_together`, only compile: None.
    """
    if stand_in() is None:
        make_context_current()
        _use_kernel_folder()
    if stand_in() is None and not _thread.is_compiling:
        return launch.kernel[(launch.programs, launch.programs_y)](*launch.fields, **launch.options())
    from tilewise.gpu.launch import launcher, triton_key

    if stand_in() is not None:
        triton_key.keep()
    launcher.compile_only(launch.kernel, launch.fields, launch.options())
    return None


class _Thread(threading.local):
    is_compiling = False


_thread = _Thread()


def compile_together(call: Callable[..., Any], query: Tensor, *given: Any) -> None:
    """Compile side by side what `call(*given)` will launch on query's GPU.

    The call is made with tensors without memory in place of those on the GPU, and launches nothing. What it
    can't do then, or can't compile, is left to the real call.
    """
    if is_interpreted():
        return
    if (device := query.get_device()) >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            compile_together(call, query, *given)
        return
    from tilewise.gpu.launch import launcher

    with launcher.compiling_together(leaves_errors=True), contextlib.suppress(Exception):
        _thread.is_compiling = True
        try:
            call(*(_without_memory(value, query.device) for value in given))
        finally:
            _thread.is_compiling = False


def _without_memory(value: Any, device: torch.device) -> Any:
    """A tensor on the device, or those of a named tuple, as tensors on the meta device that look the same."""
    if isinstance(value, tuple):
        return type(value)(*(_without_memory(item, device) for item in value))
    if isinstance(value, Tensor) and value.device == device:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


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


def bind(compiled: Any, grid: tuple[int, int, int]) -> CLaunch | None:
    """A compiled kernel with what launches it; None if only Triton can."""
    from tilewise.gpu.launch.triton_private import c_launch

    return c_launch(compiled, grid)


_plans: dict[Any, LaunchPlan] = {}
_lock = lock_for_forks()  # of who changes it


def clear() -> None:
    """Forget all plans."""
    with _lock:
        _plans.clear()


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
    more: More,
    scratch: Sequence[tuple[int, ...]] = (),
    counters: int = 0,
    stores_in_order: bool = True,
) -> Again | None:
    """A forward of query, key and value, the first three of `given`.

    Args:
        residual: whether what rounding took from lse is asked for.
        steps: all launches, from `given`, and out, lse, residual or None, scratch, the counters and `more`.
        more: other tensors that a call's launches take, from what is given.
        scratch: shapes of tensors of 4-byte numbers that only the launches use; one allocation for all.
        counters: how many `scheduler_counter`s they take.
        stores_in_order: they store out in any order; else as "bshd", from which another is copied.
    """
    query = given[0]
    *batch, seqlen, heads = query.shape[:-1]
    stored = order if stores_in_order else "bshd"
    new_out = allocator(query, (*query.shape[:-1], problem.head_dim_v), problem.out_dtype, stored)
    new_lse = allocator(query, (*batch, heads, seqlen), torch.float32)
    new = [new_out, new_lse, new_lse if residual else None]

    def copied(out: Tensor, *rest: Tensor | None) -> Results:
        return Results(in_order(out, order), *rest)

    result = Results if stored == order else copied
    return _again(problem, given, steps, more, new, result, scratch, counters)


def again_backward(
    problem: AttentionProblem,
    given: Given,
    steps: Callable[[Given, Given], Sequence[Step]],
    scratch: Sequence[tuple[int, ...]],
    more: More,
    counters: int = 0,
) -> Again | None:
    """A backward of query, key, value, out, lse, residual and dout, the first seven of `given`.

    Args:
        steps: all launches, from `given`, and dq, dk, dv, scratch, the counters and `more`.
        scratch, more, counters: as in `again_forward`.
    """
    new_grads = [allocator(given[0], t.shape, problem.gradient_dtype(t.dtype)) for t in given[:3]]
    return _again(problem, given, steps, more, new_grads, Gradients, scratch, counters)


def _again(
    problem: AttentionProblem,
    given: Given,
    steps: Callable[[Given, Given], Sequence[Step]],
    more: More,
    of_result: Sequence[Callable[[], Tensor] | None],
    result: Callable[..., Any],
    scratch: Sequence[tuple[int, ...]],
    counters: int,
) -> Again | None:
    """What allocates the three tensors of a result and all else, starts the launches, gives the result."""
    shared = [functools.partial(scheduler_counter, given[0].device, n) for n in range(counters)]
    allocators = [*of_result, *shared]
    sizes = [-(-4 * math.prod(shape) // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for shape in scratch]
    *offsets, size = itertools.accumulate(sizes, initial=0)
    buffers = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in scratch]
    if scratch:
        allocators.append(allocator(given[0], (size // 4,), torch.float32))
    made, others = [None if allocate is None else allocate() for allocate in allocators], more(given)
    tensors = (*given, *made, *others)
    places = [n for n, t in enumerate(tensors) if t is not None]
    there: Callable[[Given], Sequence[Tensor]] = itemgetter(*places)
    locations: dict[int, Any] = {id(t): Location(n) for n, t in enumerate(there(tensors))}
    if scratch:
        memory = locations[id(made.pop())].tensor
        locations |= {id(t): Location(memory, offset) for t, offset in zip(buffers, offsets, strict=True)}
    locations[id(None)] = None
    planned = plan_steps(problem, steps(given, [*made[:3], *buffers, *made[3:], *others]), locations)
    if planned is None:
        return None
    return planned_call(planned, result, allocators, more, there)
