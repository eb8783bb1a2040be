"""Functions of a call as kernels take them: what is compiled, and the captured tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.functions.evaluate import Buffers
from tilewise.core.functions.expression import decode
from tilewise.core.kept import kept_on_device
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.gpu.functions.source import KernelFunctions, kernel_functions


class Captured(NamedTuple):
    """What mask and score functions read: see `core.functions.captured`. `layout` is on the GPU here."""

    floats: Any
    integers: Any
    layout: Any
    errors: Any  # flags: an index is out of range


def layout_on(layout: Tensor | None, device: torch.device) -> Tensor | None:
    """The layout of captured tensors on a GPU."""
    return None if layout is None else _layout_on(tuple(layout.tolist()), device)


@kept_on_device(1024)
def _layout_on(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """A layout on a GPU, copied there once."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device=device)


def functions_of(problem: AttentionProblem, inputs: Inputs) -> KernelFunctions | None:
    """What is compiled of a call's functions; `inputs` as they are given, whose layout the host knows."""
    if problem.functions is None:
        return None
    layout = Buffers(None, None, inputs.captured_layout)
    shapes = tuple(shape for _, shape in layout.places(decode(problem.functions).tensors))
    extent = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
    return kernel_functions(problem.functions, shapes, extent)
