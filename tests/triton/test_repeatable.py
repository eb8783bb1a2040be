"""A repeated call of the Triton backend is one launch of the kernel that is there; this needs no GPU."""

from __future__ import annotations

import os

import pytest
import torch

from tilewise import launch_plan
from tilewise.problem import Inputs, Options, describe

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the compiler's side of triton", allow_module_level=True)

from tilewise.triton import call, launch


@pytest.fixture
def log(monkeypatch):
    """What is started through Triton, and the arguments of what is launched again."""
    started, launched = [], []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: launched.append(arguments)

    monkeypatch.setattr(launch_plan, "start", lambda launch: started.append(launch) or Compiled())
    monkeypatch.setattr(launch_plan, "_plans", {})
    monkeypatch.setattr(call, "gpu_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what CPU tensors have
    return started, launched


def qkv(offset=0):
    flat = torch.zeros(3 * 2 * 9 * 4 * 64 + 1)
    return [t.view(2, 9, 4, 64) for t in flat[offset : offset + 3 * 2 * 9 * 4 * 64].chunk(3)]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_one_launch_on_new_outputs(log, layout):
    started, launched = log
    inputs = Inputs(*qkv())
    repeat = launch.repeatable(describe(inputs, Options(causal=True)), inputs, layout, True)
    order = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    for _ in range(3):
        tensors = [t.permute(order) for t in qkv()]
        out, lse = repeat(*tensors)
        assert out.permute(order).is_contiguous() and lse.shape == (2, 4, 9) and lse.dtype == torch.float32
    assert len(started) == 1 and len(launched) == 2
    addresses = [argument[0] for argument in launched[-1][:4]] + [launched[-1][4]]
    assert addresses == [t.data_ptr() for t in (*tensors, out, lse)]


def test_other_alignment_takes_another_kernel(log):
    started, launched = log
    inputs = Inputs(*qkv())
    repeat = launch.repeatable(describe(inputs, Options()), inputs, "bshd", False)
    for offset in (0, 1, 0, 1):
        repeat(*qkv(offset))
    assert len(started) == 2 and len(launched) == 2


def test_what_draws_or_copies_is_not_repeated(log):
    q, k, v = qkv()
    seeded = Inputs(q, k, v, dropout_seed=torch.tensor(1))
    assert launch.repeatable(describe(seeded, Options(dropout_p=0.5)), seeded, "bshd", False) is None
    gapped = Inputs(*(torch.zeros(2, 9, 4, 128)[..., ::2] for _ in range(3)))
    assert launch.repeatable(describe(gapped, Options()), gapped, "bshd", False) is None
