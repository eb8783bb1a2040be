"""Compiling ahead: all kernels of a call and of its backward at once, in threads.

Which they are, the plans themselves say, run on tensors without memory. So the first training step waits for
the kernel that takes longest, not for one after another.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.core.plan import Plan, Results
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.signature import Signature, Tensors, TensorSignature, named, stand_in, standing_in
from tilewise.gpu.launch import launch_plan
from tilewise.gpu.launch.gpus import gpu_of
from tilewise.gpu.launch.launch_plan import Launch

_known: set[AttentionProblem] = set()  # whose kernels have been compiled ahead, of any lengths


def compile_ahead(
    problem: AttentionProblem, signature: Signature, tensors: Tensors, make: Callable[[], list[Plan]]
) -> None:
    """Start to compile what calls like this will launch, if there are several kernels that may be new.

    Calls that differ in lengths alone have the same kernels, or nearly: this looks at the first of them.

    Args:
        signature: of the call, in "bshd".
        tensors: of `Inputs`.
        make: plans of the forward and, if there is one, of the backward.
    """
    if problem.device_type != "cuda" or stand_in() is not None or torch.cuda.is_current_stream_capturing():
        return
    kind = _without_lengths(problem)
    if kind not in _known:
        _known.add(kind)
        launches = launches_of(signature, tensors, make)
        if len(launches) > 1:
            _compile(launches, torch.cuda.current_device())


def launches_of(signature: Signature, tensors: Tensors, make: Callable[[], list[Plan]]) -> list[Launch]:
    """Of a forward and a backward; not all if they depend on numbers."""
    given = Inputs(*map(_without_memory, named(signature.inputs), tensors))
    with torch.no_grad(), standing_in(gpu_of(None)), launch_plan.collected() as launches:
        forward, *backward = make()
        try:
            found = forward.run(given)
            for plan in backward:
                assert isinstance(found, Results) and found.out is not None
                plan.run(given, found, torch.empty_like(found.out))
        except (NotImplementedError, RuntimeError):  # PyTorch's, where a number is asked for
            pass
    return launches


def _without_memory(seen: TensorSignature | None, given: Tensor | None) -> Any:
    """A tensor like one on a GPU."""
    if seen is None or seen.device.type == "cpu":
        return given
    return torch.empty_strided(seen.shape, seen.strides, dtype=seen.dtype, device="meta")


def _compile(launches: list[Launch], device: int) -> None:
    """In threads, but one after another those of one kernel, as two may be the same."""
    by_kernel: dict[int, list[Launch]] = {}
    for launch in launches:
        by_kernel.setdefault(id(launch.kernel), []).append(launch)

    def work(own: list[Launch]) -> None:
        torch.cuda.set_device(device)
        for launch in own:
            launch_plan.prepare(launch)

    pool = ThreadPoolExecutor(min(len(by_kernel), os.cpu_count() or 1), "tilewise compiles")
    for kernel, own in by_kernel.items():
        launch_plan.await_before(kernel, pool.submit(work, own))
    pool.shutdown(wait=False)


def _without_lengths(problem: AttentionProblem) -> AttentionProblem:
    shapes = (problem.mask_shape, problem.bias_shape)
    mask, bias = (None if shape is None else tuple(min(n, 2) for n in shape) for shape in shapes)
    captured = min(problem.num_captured, 1)
    problem = replace(problem, mask_shape=mask, bias_shape=bias, num_captured=captured)
    return replace(problem, batch=1, seqlen_q=1, seqlen_k=1)
