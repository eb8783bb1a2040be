"""Calls that differ from an earlier one in the values of their tensors only, forward and backward."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem
from tilewise.cpu.host import parallel
from tilewise.cpu.host.arguments import (
    ENTERED,
    EXPECTED,
    EXPECTED_WORDS,
    GIVEN,
    GIVEN_BACKWARD,
    GIVEN_RECOMPUTED,
    NOT_CUT,
    WORDS,
    Block,
    EntryConfig,
)
from tilewise.cpu.host.backward_plan import BackwardPlan, put_addresses_backward
from tilewise.cpu.host.compile import load
from tilewise.cpu.host.plans import CPU, OutputPlan, Plan, local, put_addresses

MODEL_BYTES = 1 << 16  # larger outputs belong to calls that last longer than an allocation
SHORT = 1 << 18  # multiply-adds, at most some 10 us: so long other threads may wait for Python's lock
FLOAT, BFLOAT = 2, 4  # DLPack's codes of types
ON_CPU = 1  # its code of this device
Gradients = tuple[Tensor, ...]
KEPT_ENTRIES = 256  # of backwards


class RepeatedForward:
    """Called with query, key and value like those it was made for, it gives out, or out and lse.

    `plan` serves such calls; `plan_uncut` makes the one for numbers that cannot be cut.
    """

    def __init__(
        self, plan: OutputPlan, plan_uncut: Callable[[], OutputPlan], given: Sequence[Tensor], layout: str,
        return_lse: bool,
    ) -> None:  # fmt: skip
        self._plan, self._plan_uncut, self._given = plan, plan_uncut, given
        self._new_out = allocator(plan.out_shape, plan.problem.dtype, layout)
        self._new_lse = allocator(plan.lse_shape, plan.problem.compute_dtype) if return_lse else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        out, lse = self._new_out(), None if self._new_lse is None else self._new_lse()
        self._plan.attend(query, key, value, out, lse)
        if self._plan.failed_to_cut:
            self._plan_uncut().attend(query, key, value, out, lse)
        return out if lse is None else (out, lse)

    @functools.cached_property
    def quick(self) -> Callable[..., Any] | None:
        """The same for any tensors of type `Tensor`: None if they are unlike those it was made for.

        In the thread that made the plan only. Where DLPack's exchange is missing there is no such way.
        """
        plan, new_out, new_lse = self._plan, self._new_out, self._new_lse
        entry = _entry(plan, GIVEN, self._given)
        if entry is None:
            return None
        words, enter = entry
        scratch, size = local.scratch, plan.scratch_bytes
        partial_offset, lse_offset = plan.partial_offset, plan.lse_offset

        def quick(query: Tensor, key: Tensor, value: Tensor) -> Any:
            out, lse = new_out(), None if new_lse is None else new_lse()
            base = scratch.address if size <= scratch.size else scratch.reserve(size)
            put_addresses(
                words, 0, 0, 0, id(query), id(key), id(value), out.data_ptr(),
                base + lse_offset if lse is None else lse.data_ptr(), base, base + partial_offset,
            )  # fmt: skip
            if not enter():
                return None
            return out if lse is None else (out, lse)

        return quick


class RepeatedBackward:
    """Called with query, key, value, out, lse and dout of a call, it gives the gradients of the first three;
    without out and lse where the problem is one whose backward takes the softmax again.

    `plan_for` finds the plan of a thread for tensors; `whole` serves where rows have to be copied.
    """

    def __init__(
        self, problem: AttentionProblem, layout: str, plan_for: Callable[..., BackwardPlan],
        whole: Callable[..., Gradients],
    ) -> None:  # fmt: skip
        rows_q = (problem.batch, problem.seqlen_q, problem.num_heads)
        rows_k = (problem.batch, problem.seqlen_k, problem.num_kv_heads)
        shapes = (*rows_q, problem.head_dim), (*rows_k, problem.head_dim), (*rows_k, problem.head_dim_v)
        self._new = [allocator(shape, problem.dtype, layout) for shape in shapes]
        self._plan_for, self._whole = plan_for, whole

    def __call__(self, *tensors: Tensor) -> Gradients:
        quick = local.quick_backwards.get((self, tensors[-1].stride()))
        if quick is not None:
            gradients = quick(*tensors)
            if gradients is not None:
                return gradients
        query, key, value, *results, dout = tensors
        out, lse = results or (None, None)
        if any(t.stride(-1) != 1 for t in (query, key, value)) or not (lse is None or lse.is_contiguous()):
            return self._whole(*tensors)
        gradients = tuple(new() for new in self._new)
        plan = self._plan_for(query, key, value)
        plan.differentiate(query, key, value, out, lse, dout, *gradients)
        if plan.failed_to_cut:
            uncut = self._plan_for(query, key, value, may_cut=False)
            uncut.differentiate(query, key, value, out, lse, dout, *gradients)
        elif dout.stride(-1) == 1 and (out is None or out.stride(-1) == 1):
            self._keep(plan, tensors)
        return gradients

    def _keep(self, plan: BackwardPlan, tensors: Sequence[Tensor]) -> None:
        """Let the next call of this thread try the quick way, which looks at the tensors itself."""
        zeros, dlse, dq_sum = plan.turn_offset, plan.dlse_offset, plan.sum_offset
        counted = (dq_sum - zeros) // 8
        names = GIVEN_BACKWARD if len(tensors) == len(GIVEN_BACKWARD) else GIVEN_RECOMPUTED
        entry = None if plan.has_unreached else _entry(plan, names, tensors, counted)
        if entry is None:
            return
        words, enter = entry
        scratch, size, new_dq, new_dk, new_dv = local.scratch, plan.scratch_bytes, *self._new

        def quick(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Gradients | None:
            out, lse, dout = rest if len(rest) == 3 else (None, None, *rest)
            dq, dk, dv = new_dq(), new_dk(), new_dv()
            base = scratch.address if size <= scratch.size else scratch.reserve(size)
            put_addresses_backward(
                words, 0, 0, 0, id(query), id(key), id(value), id(out), id(lse), base, 0, id(dout),
                base + dlse, dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), 0, 0, base + dq_sum, base + zeros,
            )  # fmt: skip
            return (dq, dk, dv) if enter() else None

        if len(local.quick_backwards) >= KEPT_ENTRIES:
            local.quick_backwards.clear()
        local.quick_backwards[self, tensors[-1].stride()] = quick


def _entry(
    plan: Plan, names: tuple[str, ...], given: Sequence[Tensor], zeros: int = 0
) -> tuple[Any, Callable[[], bool]] | None:
    """The words of a plan's call, into which the addresses of tensor objects of these names are put, and
    the function that then looks at them: whether they are like those given, and so the kernel has run.

    `zeros`: words at the address "turn" that it sets to 0 before.
    """
    fill = _fill_tensor()
    if not fill or not plan.items:
        return None
    block = Block()
    words, address, scratch = block.words, block.address, local.scratch
    ctypes.memmove(address, plan.block.address, 8 * WORDS)
    for n, t in enumerate(given):
        for place, word in enumerate(_expected_words(t), EXPECTED + n * EXPECTED_WORDS):
            words[place] = word
    threads, get_num_threads = torch.get_num_threads(), torch.get_num_threads
    is_short = plan.threads == 1 and plan.work <= SHORT
    block.update(exchange=fill, kernel=plan.kernel.address if is_short else 0, zeroed=zeros)
    enter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(load("entry", EntryConfig(names)).address)

    def run() -> bool:
        if get_num_threads() != threads:
            return False
        try:
            enter(address)
        except Exception:  # PyTorch's: a tensor that has no memory
            return False
        if not words[ENTERED]:
            return False
        if not is_short:
            parallel.run(plan.kernel, address, plan.threads)
            scratch.trim()
        return not words[NOT_CUT]

    return words, run


@functools.cache
def _fill_tensor() -> int:
    """The address of PyTorch's `dltensor_from_py_object_no_sync`, or 0 where it is missing or another one."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if type(capsule).__name__ != "PyCapsule":
        return 0
    kind = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    try:
        table = kind(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, b"dlpack_exchange_api")
    except ValueError:  # a capsule of another name
        return 0
    if ctypes.c_uint32.from_address(table).value != 1:  # the interface's major version
        return 0
    fill = (ctypes.c_void_p * 6).from_address(table)[5] or 0
    return fill if fill and _fills_what_is_expected(fill) else 0


def _fills_what_is_expected(fill: int) -> bool:
    """Whether the struct of a small tensor is what `entry.py` will look for."""
    t, words = torch.empty(3, 3, dtype=torch.bfloat16, device=CPU)[1:].t(), (ctypes.c_int64 * 6)()
    status = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(fill)(
        t, ctypes.addressof(words)
    )
    if status or (words[0], *words[1:3]) != (t.data_ptr(), *_expected_words(t)[:2]):
        return False
    sizes, strides = ((ctypes.c_int64 * 2).from_address(address) for address in words[3:5])
    return (*sizes, *strides) == _expected_words(t)[2:] and words[5] == 0


def _expected_words(t: Tensor) -> tuple[int, ...]:
    """What DLPack says of a tensor: device, dimensions and type, sizes, strides."""
    code = BFLOAT if t.dtype == torch.bfloat16 else FLOAT
    kind = code | t.dtype.itemsize * 8 << 8 | 1 << 16
    return ON_CPU, t.ndim | kind << 32, *t.shape, *t.stride()


def allocator(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "bshd") -> Callable[[], Tensor]:
    """Makes new tensors, contiguous as `shape` says, seen in a layout. Cheapest is `empty_like` of a model,
    which has memory of its own for a moment."""
    model = torch.empty(shape, dtype=dtype, device="meta")
    if layout == "bhsd":
        model = model.transpose(1, 2)
    new = functools.partial(torch.empty_strided, model.shape, model.stride(), dtype=dtype, device=CPU)
    if math.prod(shape) * dtype.itemsize > MODEL_BYTES:
        return new
    model = new()
    model.untyped_storage().resize_(0)
    return functools.partial(torch.empty_like, model)
