"""Launches kernels by Triton and by a plan, over a libcuda that records; run by test_launcher.py.

Names of Triton's in $HIDDEN are as if it had none.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

sys.path.append(str(Path(__file__).parents[1]))
from hidden_names import import_without

HIDDEN = os.environ.get("HIDDEN", "").split()
import_without("gpu.launch.triton_private", HIDDEN)

from tilewise.gpu.launch import launch_plan  # noqa: E402
from tilewise.gpu.launch.launch_plan import Launch  # noqa: E402
from tilewise.gpu.triton.arguments import Ragged, Rows  # noqa: E402

BYTES = {"i1": 1, "i32": 4, "i64": 8, "fp32": 4}


class Driver(nvidia.CudaDriver):
    """Triton's own driver for a Hopper GPU, without PyTorch's CUDA."""

    stream = 16

    def __init__(self):
        self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
        self.get_device_capability = lambda *_: (9, 0)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda _: Driver.stream

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@triton.jit
def rows_kernel(x, lse, ragged, factor, count, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    row = tl.program_id(0) * x.stride_row
    values = tl.load(x.ptr + row + offs, mask=offs < count) * factor
    if ragged.cu_seqlens_k is not None:
        values += tl.load(ragged.cu_seqlens_k)
    tl.store(lse + row + offs, values, mask=offs < count)


@gluon.jit
def tiles_kernel(desc_x, out, desc_y, count, SCALE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs = gl.arange(0, 128, layout)
    gl.store(out + offs, (offs * SCALE).to(gl.float32), mask=offs < count)


def libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def int_of(name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(libcuda(), name)


def sizes_of(types) -> list[int]:
    """Bytes of each parameter of a kernel with these argument types."""
    sizes = []
    for kind in types:
        if isinstance(kind, tuple):
            sizes += sizes_of(kind)
        elif kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            sizes += [128, *[4] * rank, *[8] * rank]
        elif kind != "constexpr":
            sizes.append(8 if kind[0] == "*" else BYTES[kind])
    return sizes


def given(compiled, launch, *arguments) -> tuple:
    """What the kernel is given by `launch(*arguments)`: its parameters, grid and stream."""
    sizes = sizes_of(compiled.src.signature.values())
    int_of("num_sizes").value = len(sizes)
    (ctypes.c_int * 256).in_dll(libcuda(), "sizes")[: len(sizes)] = sizes
    before = int_of("launches").value
    launch(*arguments)
    assert int_of("launches").value == before + 1
    parameters = bytes((ctypes.c_ubyte * sum(sizes)).in_dll(libcuda(), "parameters"))
    int_of("num_sizes").value = 0
    return (
        parameters,
        tuple((ctypes.c_uint * 2).in_dll(libcuda(), "grid")),
        ctypes.c_void_p.in_dll(libcuda(), "stream").value,
    )


def rows_launch(problem, tensors) -> Launch:
    x, starts, lse = tensors
    rows, ragged = Rows(x, 0, x.stride(0), 1), Ragged(None, starts, None, None, None)
    return Launch(rows_kernel, 3, (rows, lse, ragged, 0.5, x.shape[1], 16), 4, programs_y=2)


def tiles_launch(problem, tensors) -> Launch:
    x, y, out = tensors
    layout = gl.NVMMASharedLayout.get_default_for([8, 64], gl.bfloat16)
    desc = [TensorDescriptor(t, list(t.shape), list(t.stride()), [8, 64], layout) for t in (x, y)]
    return Launch(tiles_kernel, 5, (desc[0], out, desc[1], 100, 3), 4)


def draw(build) -> tuple:
    if build is rows_launch:
        return torch.zeros(4, 16), torch.zeros(3, dtype=torch.int32), torch.zeros(4, 16)
    return *(torch.zeros(16, 64, dtype=torch.bfloat16) for _ in range(2)), torch.zeros(128)


def check(build, encodings: list[int]) -> None:
    """`encodings`: of TMA descriptors in each launch by the plan."""
    sets, kernels, found, start = [draw(build) for _ in range(3)], [], [], launch_plan.start
    launch_plan.start = lambda launch: kernels.append(start(launch)) or kernels[-1]
    launch_plan.run(build, "problem", sets[0])
    for n, Driver.stream in ((1, 16), (0, 32), (2, 32), (1, 16)):
        by_triton = given(kernels[0], start, build("problem", sets[n]))
        before = int_of("encoded").value
        by_plan = given(kernels[0], launch_plan.run, build, "problem", sets[n])
        found.append(int_of("encoded").value - before)
        assert by_plan == by_triton and by_plan[1:] == (by_plan[1], Driver.stream), build.__name__
    if HIDDEN:  # Triton launches each time
        assert len(kernels) == 5 and not launch_plan._plans
    else:
        assert len(kernels) == 1 and found == encodings
    launch_plan.start = start


if __name__ == "__main__":
    driver.set_active(Driver())
    check(rows_launch, [0, 0, 0, 0])
    check(tiles_launch, [2, 2, 2, 0])
    print("equal with triton", triton.__version__)
