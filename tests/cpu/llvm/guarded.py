"""Tensors that end, or start, at a page that may not be touched: an access out of bounds ends the process.

`python tests/cpu/llvm/guarded.py COUNT` runs random problems on such tensors, their outputs included.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import random
import sys
from unittest import mock

import random_cases
import torch
from torch import Tensor

from tilewise.cpu.host import backward_plan, call_plan, pool

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded_empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, at_end: bool
) -> Tensor:
    """An uninitialized tensor whose memory touches a guard page at its end or at its start."""
    elements = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if math.prod(shape) else 0
    size = elements * dtype.itemsize
    pages = max(1, -(-size // PAGE))
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (address, address + (pages + 1) * PAGE):
        assert _libc.mprotect(guard, PAGE, 0) == 0
    start = (pages + 1) * PAGE - size if at_end else PAGE
    if not size:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=elements, offset=start)
    return flat.as_strided(shape, stride)


def guarded(t: Tensor | None, at_end: bool) -> Tensor | None:
    if t is None:
        return None
    copy = guarded_empty(t.shape, t.stride(), t.dtype, at_end)
    return copy.copy_(t.detach()).requires_grad_(t.requires_grad)


def run(case: random_cases.Case, at_end: bool) -> None:
    if random_cases.llvm.supports(case.problem):
        return
    problem = case.problem
    inputs = random_cases.Inputs(*(guarded(t, at_end) for t in case.inputs))
    if inputs.bias is not None:
        inputs = inputs._replace(bias=inputs.bias.detach())

    real_empty = torch.empty

    def empty_strided(shape, stride, dtype, device=None):
        return guarded_empty(shape, stride, dtype, at_end)

    def empty(shape, dtype=torch.float32, device=None):
        if device == "meta":
            return real_empty(shape, device="meta")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return guarded_empty(shape, stride, dtype, at_end)

    def zeros(shape, dtype, device=None):
        return empty(shape, dtype).zero_()

    pool.pool.block = None  # fresh scratch, guarded too
    patches = {"empty_strided": empty_strided, "empty": empty, "zeros": zeros}
    stand_in = mock.Mock(wraps=torch, **patches)
    stand_in.uint8, stand_in.int32, stand_in.int64, stand_in.Tensor = (
        torch.uint8,
        torch.int32,
        torch.int64,
        Tensor,
    )
    modules = (backward_plan, call_plan, pool)
    with contextlib.ExitStack() as patched:
        for module in modules:
            patched.enter_context(mock.patch.object(module, "torch", stand_in))
        patched.enter_context(mock.patch.object(call_plan, "empty_strided_cpu", empty_strided))
        out, lse, residual = random_cases.llvm.results(problem, inputs)
        if not problem.is_paged:
            dout, dlse = guarded(case.dout, at_end), guarded(case.dlse, at_end)
            random_cases.llvm.backward(problem, inputs, out, lse, dout, dlse, residual)


if __name__ == "__main__":
    torch.set_num_threads(2)
    first = random.SystemRandom().randrange(1 << 20)
    print(f"seeds {first} on", flush=True)
    for seed in range(first, first + 7 * int(sys.argv[1]), 7):
        draw = random_cases.draw_decoding if seed % 5 in (1, 2) else random_cases.draw
        run(draw(seed), at_end=seed % 2 == 0)
    print("no access out of bounds")
