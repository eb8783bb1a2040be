"""Calls on a GPU that were made before: allocations and launches, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.launch_plan import ALIGNMENT, LaunchPlan, Step, Tensors, find
from tilewise.problem import AttentionProblem, Inputs

MAX_STRIDES = 64  # kinds of strides that one call's backward is kept for
Whole = Callable[..., tuple[Tensor, ...]]


class CachedTensors(NamedTuple):
    """What a call with a cache attends with if it may be repeated: see `tilewise.problem.Inputs`."""

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
    arrange: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensors],
) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """A function of query, key and value in the caller's layout, which must be like those of the plan.

    Args:
        query: like those of the calls to come, (batch, seqlen_q, num_heads, head_dim).
        plan: what launches the kernel.
        arrange: all tensors of the launch, from query, key, value, out and lse.
    """
    batch, seqlen, heads = query.shape[:-1]
    new_out = allocator(query, (batch, seqlen, heads, problem.head_dim_v), query.dtype, layout)
    new_lse = allocator(query, (batch, heads, seqlen), torch.float32)
    plan = plan.seen_as(layout)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        out, lse = new_out(), new_lse()
        plan(arrange(query, key, value, out, lse))  # which reads addresses only
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
    ) -> None:
        """
        Args:
            whole: does the same by the whole path.
            steps: all launches, from the tensors of a call, and dq, dk, dv and scratch.
            scratch: shapes of float32 tensors that only the launches use.
            is_taken: whether kernels read a tensor (batch, seqlen, heads, dim) where it lies.
        """
        self._problem, self._layout, self._whole = problem, layout, whole
        self._steps, self._scratch, self._is_taken = steps, scratch, is_taken
        self._plans: dict[Any, list[LaunchPlan]] = {}  # empty: such tensors take the whole path
        self._new: list[Callable[[], Tensor]] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> tuple[Tensor, ...]:
        given = (query, key, value, out, lse, dout)
        strides = (query.stride(), key.stride(), value.stride(), out.stride(), lse.stride(), dout.stride())
        addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr() | dout.data_ptr()
        if (addresses | lse.data_ptr()) % ALIGNMENT or query.get_device() != torch.cuda.current_device():
            return self._whole(*given)
        plans = self._plans.get(strides)
        if plans is None:
            return self._first(strides, given)
        if not plans:
            return self._whole(*given)
        new = [make() for make in self._new]
        for plan, step in zip(plans, self._steps(given, new), strict=True):
            plan((*step.tensors, *step.fresh))  # which reads addresses only
        return tuple(new[:3])

    def _first(self, strides: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        grads = self._whole(*given)
        query, lse = given[0], given[4]
        shapes = [tuple(self._canonical(t).shape) for t in grads]
        self._new = [allocator(query, shape, query.dtype, self._layout) for shape in shapes]
        self._new += [allocator(query, shape, torch.float32) for shape in self._scratch]
        if len(self._plans) >= MAX_STRIDES:
            self._plans.clear()
        self._plans[strides] = []
        canonical = [self._canonical(t) for t in given]
        if lse.is_contiguous() and all(self._is_taken(t) for t in canonical if t is not lse):
            scratch = [lse for _ in self._scratch]  # any tensor: plans are found by what is given
            steps = self._steps(canonical, [*map(self._canonical, grads), *scratch])
            found = [find(s.build, self._problem, s.tensors, *s.choices, fresh=s.fresh) for s in steps]
            if None not in found:
                self._plans[strides] = [plan.seen_as(self._layout) for plan in found if plan is not None]
        return grads

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
