"""Calls on a GPU that were made before: allocations and launches, and nothing else."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.gpu.launch.launch_plan import ALIGNMENT, LaunchPlan, Step, find

MAX_STRIDES = 64  # kinds of strides that one call's backward is kept for
MAX_ADDRESSES = 128  # calls of one kind whose arguments are kept: more than most models have layers
Whole = Callable[..., tuple[Tensor, ...]]
Shared = Callable[[torch.device], tuple[Tensor, ...]]


class Place(NamedTuple):
    """Where a tensor of a launch lies: in which tensor of the call, how many bytes from its beginning."""

    tensor: int
    offset: int = 0


class PlannedLaunches(dict[tuple[int, ...], list[tuple[LaunchPlan, list[Any]]]]):
    """The launches of a call by the addresses of its tensors: plans, and all arguments of each.

    There are none where a tensor is not aligned as those were that the plans were made with.
    """

    def __init__(self, plans: Sequence[tuple[LaunchPlan, Sequence[Place | None]]]) -> None:
        """`plans`: each with the places of its tensors."""
        self._plans = plans

    def __missing__(self, addresses: tuple[int, ...]) -> list[tuple[LaunchPlan, list[Any]]]:
        if len(self) >= MAX_ADDRESSES:
            self.clear()
        launches = []
        if all(address % ALIGNMENT == 0 for address in addresses):
            for plan, places in self._plans:
                placed = [None if p is None else addresses[p.tensor] + p.offset for p in places]
                launches.append((plan, plan.arguments(placed)))
        self[addresses] = launches
        return launches

    def is_watched(self) -> bool:
        """Whether a profiler wants to be told of launches, which only plans that are called do."""
        return self._plans[0][0].is_watched()


class CachedTensors(NamedTuple):
    """What a call with a cache attends with if it may be repeated: see `tilewise.core.problem.Inputs`."""

    query: Tensor
    key: Tensor
    value: Tensor
    seqlens_k: Tensor | None
    page_table: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


Attend = Callable[[CachedTensors], tuple[Tensor, Tensor]]


def repeatable(
    problem: AttentionProblem,
    query: Tensor,
    layout: str,
    return_lse: bool,
    plan: LaunchPlan,
    arrange: Callable[..., tuple[Any, ...]],
    shared: Shared = lambda device: (),
) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """A function of query, key and value in the caller's layout, which must be like those of the plan.

    Args:
        query: like those of the calls to come, (batch, seqlen_q, num_heads, head_dim).
        plan: what launches the kernel.
        arrange: all tensors of the launch, from query, key, value, out, lse and what is shared.
        shared: tensors that the current stream's launches share.
    """
    batch, seqlen, heads = query.shape[:-1]
    new_out = allocator(query, (batch, seqlen, heads, problem.head_dim_v), query.dtype, layout)
    new_lse = allocator(query, (batch, heads, seqlen), torch.float32)
    plan = plan.seen_as(layout)
    places = [Place(n) for n in range(5 + len(shared(query.device)))]
    planned = PlannedLaunches([(plan, arrange(*places))])

    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        out, lse = new_out(), new_lse()
        tensors = (query, key, value, out, lse, *shared(query.device))
        if planned.is_watched():
            plan(arrange(*tensors))
            return (out, lse) if return_lse else out
        launches = planned[tuple([t.data_ptr() for t in tensors])]
        if not launches:
            return None
        launches[0][0].start(launches[0][1])
        return (out, lse) if return_lse else out

    return run


class RepeatedBackward:
    """The gradients of query, key and value from them, out, lse and dout, all in the caller's layout.

    The first call with tensors of some strides takes the whole path, whose launch plans later ones use.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        layout: str,
        whole: Whole,
        steps: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Step]],
        scratch: Sequence[tuple[int, ...]],
        is_taken: Callable[[Tensor], bool],
        shared: Shared = lambda device: (),
    ) -> None:
        """
        Args:
            whole: does the same by the whole path.
            steps: all launches, from the tensors of a call, and dq, dk, dv, scratch and what is shared.
            scratch: shapes of tensors of 4-byte numbers that only the launches use; one allocation for all.
            is_taken: whether kernels read a tensor (batch, seqlen, heads, dim) where it lies.
            shared: tensors that the current stream's launches share.
        """
        self._problem, self._layout, self._whole = problem, layout, whole
        self._steps, self._scratch, self._is_taken, self._shared = steps, scratch, is_taken, shared
        sizes = [4 * math.prod(shape) for shape in scratch]
        *self._offsets, self._bytes = itertools.accumulate(map(_aligned, sizes), initial=0)
        self._launches: dict[Any, PlannedLaunches | None] = {}  # by strides; None: these take the whole path
        self._new: list[Callable[[], Tensor]] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor, ...]:
        strides = (query.stride(), key.stride(), value.stride(), out.stride(), lse.stride(), dout.stride())
        planned = self._launches.get(strides)
        is_elsewhere = query.get_device() != torch.cuda.current_device()
        if planned is None or is_elsewhere or planned.is_watched():
            return self._by_whole_path(strides, (query, key, value, out, lse, dout))
        dq, dk, dv, scratch = [make() for make in self._new]
        tensors = (query, key, value, out, lse, dout, dq, dk, dv, scratch, *self._shared(query.device))
        launches = planned[tuple([t.data_ptr() for t in tensors])]
        if not launches:
            return self._whole(*tensors[:6])
        for plan, arguments in launches:
            plan.start(arguments)
        return dq, dk, dv

    def _by_whole_path(self, strides: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The first time with these strides, keep what it has planned."""
        grads = self._whole(*given)
        query, lse = given[0], given[4]
        is_aligned = all(t.data_ptr() % ALIGNMENT == 0 for t in given)
        if strides in self._launches or not is_aligned or query.get_device() != torch.cuda.current_device():
            return grads
        shapes = [tuple(self._canonical(t).shape) for t in grads]
        self._new = [allocator(query, shape, query.dtype, self._layout) for shape in shapes]
        self._new.append(allocator(query, (self._bytes // 4,), torch.float32))
        if len(self._launches) >= MAX_STRIDES:
            self._launches.clear()
        self._launches[strides] = None
        # views, as the same tensor may have been given twice
        canonical = [self._canonical(t.detach()) for t in given]
        if lse.is_contiguous() and all(self._is_taken(t) for t in canonical if t.ndim == 4):
            scratch = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in self._scratch]
            new = [*map(self._canonical, grads), *scratch, *self._shared(query.device)]
            self._launches[strides] = self._find(canonical, new)
        return grads

    def _find(self, given: list[Tensor], new: list[Tensor]) -> PlannedLaunches | None:
        """What the whole path has planned; None if a plan is missing."""
        scratch = 9  # after given, dq, dk, dv
        parts = [Place(scratch, offset) for offset in self._offsets]
        shared = [Place(scratch + 1 + n) for n in range(len(new) - 3 - len(parts))]
        places: dict[int, Place | None] = {id(None): None}
        places |= zip(map(id, (*given, *new)), (*map(Place, range(scratch)), *parts, *shared), strict=True)
        found = []
        for step in self._steps(given, new):
            plan = find(step.build, self._problem, step.tensors, *step.choices, fresh=step.fresh)
            if plan is None:
                return None
            found.append((plan, [places[id(t)] for t in (*step.tensors, *step.fresh)]))
        return PlannedLaunches(found)

    def _canonical(self, t: Tensor) -> Tensor:
        return t.transpose(1, 2) if self._layout == "bhsd" and t.ndim == 4 else t


def repeatable_cached(
    problem: AttentionProblem,
    inputs: Inputs,
    given: CachedTensors,
    steps: Callable[[CachedTensors, Sequence[Tensor]], Sequence[Step]],
    new: Sequence[tuple[Sequence[int], torch.dtype]],
) -> Attend | None:
    """What attends for cached calls that differ in values only; None where a tensor has to be copied first.

    Args:
        given: the tensors of `inputs` as the kernels take them.
        steps: all launches, from the tensors of a call and new ones.
        new: shapes and dtypes of those: scratch, out and lse.
    """
    if any(t is not getattr(inputs, name) for name, t in given._asdict().items()):
        return None
    stand_ins = [given.query for _ in new]  # plans are found by what is given
    plans = [find(s.build, problem, s.tensors, *s.choices, fresh=s.fresh) for s in steps(given, stand_ins)]
    if None in plans:
        return None
    allocators = [allocator(given.query, shape, dtype) for shape, dtype in new]

    def attend(tensors: CachedTensors) -> tuple[Tensor, Tensor]:
        fresh = [allocate() for allocate in allocators]
        for plan, step in zip(plans, steps(tensors, fresh)):
            plan((*step.tensors, *step.fresh))  # type: ignore[misc]  # which reads addresses only
        return fresh[-2], fresh[-1]

    return attend


def without_cache(attend: Attend, layout: str, return_lse: bool) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """The same as a function of query, key and value in the caller's layout, all keys of which count."""

    def run(*given: Tensor) -> Any:
        query, key, value = (t.transpose(1, 2) for t in given) if layout == "bhsd" else given
        out, lse = attend(CachedTensors(query, key, value, None))
        out = out.transpose(1, 2) if layout == "bhsd" else out
        return (out, lse) if return_lse else out

    return run


def allocator(
    like: Tensor, shape: Sequence[int], dtype: torch.dtype, layout: str = "bshd"
) -> Callable[[], Tensor]:
    """Makes new tensors, contiguous as `shape` says, seen in a layout."""
    if layout == "bhsd":
        batch, seqlen, heads, dim = shape
        order, stride = (batch, heads, seqlen, dim), (seqlen * heads * dim, dim, heads * dim, 1)
        return functools.partial(torch.empty_strided, order, stride, dtype=dtype, device=like.device)
    # one element, seen as a whole tensor: `empty_like` is the cheapest way to allocate another
    return functools.partial(torch.empty_like, like.new_empty((), dtype=dtype).expand(*shape))


def _aligned(size: int) -> int:
    """Bytes of a tensor, up to where PyTorch would let the next one start."""
    return -(-size // 512) * 512
