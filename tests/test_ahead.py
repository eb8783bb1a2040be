"""Kernels that are compiled ahead of a call: which they are, and that their launch waits for them."""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import Future

import pytest
import torch

from tilewise.core.plan import Results
from tilewise.core.problem import Inputs, Options, describe_signature
from tilewise.core.signature import Request, Signature, look
from tilewise.gpu.launch import ahead, launch_plan
from tilewise.gpu.launch.gpus import GPUS
from tilewise.gpu.launch.launch_plan import Launch

pytest.importorskip("triton")
DEVICE = torch.device("cuda", 0)  # what signatures say; the tensors are on the CPU

CALLS = {
    "plain": (Options(causal=True), {}),
    "mask": (Options(), {"mask": ((2, 1, 100, 130), torch.bool)}),
    "dropout": (Options(dropout_p=0.1), {"dropout_seed": ((), torch.int64)}),
    "packed": (Options(causal=True, max_seqlen_q=90, max_seqlen_k=90), {}),
}


@pytest.fixture
def gpu(monkeypatch):
    """One that only tells what it is."""
    for name in ("ahead", "gpus"):
        module = importlib.import_module(f"tilewise.gpu.launch.{name}")
        monkeypatch.setattr(module, "gpu_of", lambda index: GPUS["h100"])
    monkeypatch.setattr(ahead, "_known", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)


def a_call(name):
    options, shapes = CALLS[name]
    sizes = ((256, 4), (256, 2)) if name == "packed" else ((2, 100, 4), (2, 130, 2))
    q, k = (torch.zeros(*size, 64, dtype=torch.bfloat16) for size in sizes)
    more = {field: torch.zeros(shape, dtype=dtype) for field, (shape, dtype) in shapes.items()}
    if name == "packed":
        more |= {f"cu_seqlens_{side}": torch.zeros(4, dtype=torch.int32) for side in "qk"}
    return Inputs(q, k, torch.zeros_like(k), **more), options


def signature_of(inputs, options, direction="forward"):
    seen = tuple(None if t is None else (*t[:3], DEVICE, 0, *t[5:]) for t in look(inputs, False))
    request = Request(True, True)
    return Signature(direction, seen, (), False, options, None, request, False, threads=1)


def plans_of(backend, signature):
    module, problem = importlib.import_module(f"tilewise.gpu.{backend}.plan"), describe_signature(signature)
    return [module.plan(problem, signature._replace(direction=way)) for way in ("forward", "backward")]


def shown(launch):
    """A launch, with dtypes in place of tensors."""

    def plain(argument):
        if isinstance(argument, torch.Tensor):
            return argument.dtype
        if launch_plan.is_descriptor(argument):
            return argument.base.dtype, *argument.shape, *argument.strides, *argument.block_shape
        return [plain(item) for item in argument] if isinstance(argument, tuple) else argument

    arguments = [plain(argument) for argument in launch.arguments]
    return launch.kernel.__name__, launch.programs, launch.programs_y, launch.options(), arguments


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_launches_are_those_of_the_call(backend, name, gpu, monkeypatch):
    inputs, options = a_call(name)
    signature = signature_of(inputs, options)
    found = ahead.launches_of(signature, inputs, lambda: plans_of(backend, signature))

    launched = []
    monkeypatch.setattr(launch_plan, "start", launched.append)
    monkeypatch.setattr(launch_plan, "_plans", {})
    with monkeypatch.context() as patch:
        for module in ("hopper.common.host", "launch.gpus"):
            owner = importlib.import_module(f"tilewise.gpu.{module}")
            patch.setattr(owner, "stand_in", lambda: GPUS["h100"])
        forward, backward = plans_of(backend, signature)
        results = forward.run(inputs)
        assert isinstance(results, Results)
        backward.run(inputs, results, torch.zeros_like(results.out))
    assert [*map(shown, found)] == [*map(shown, launched)] and len(found) >= 4


def test_calls_that_differ_in_lengths_are_looked_at_once(gpu, monkeypatch):
    looked, compiled = [], []
    monkeypatch.setattr(ahead, "launches_of", lambda *given: looked.append(given) or [None, None])
    monkeypatch.setattr(ahead, "_compile", lambda launches, device: compiled.append(device))
    for length, window in ((100, None), (200, None), (100, 8)):
        q = torch.zeros(1, length, 2, 64, dtype=torch.bfloat16)
        signature = signature_of(Inputs(q, q, q), Options(window_left=window))
        ahead.compile_ahead(describe_signature(signature), signature, Inputs(q, q, q), list)
    assert len(looked) == len(compiled) == 2


def test_a_launch_waits_for_what_prepares_it():
    events = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: events.append("launched")

    kernel, preparation, waits = Kernel(), Future(), threading.Event()
    launch_plan.await_before(id(kernel), preparation)
    launch = Launch(kernel, 1, (), num_warps=4)

    def start():
        waits.set()
        launch_plan.start(launch)

    thread = threading.Thread(target=start)
    thread.start()
    waits.wait()
    thread.join(0.1)
    events.append("prepared")
    preparation.set_exception(RuntimeError("the launch itself will say so"))
    thread.join()
    launch_plan.start(launch)
    assert events == ["prepared", "launched", "launched"]
