"""The quantizing kernels of Hopper against `tilewise.fp8`, by Triton's interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.gpu.hopper.common import host

    monkeypatch.setattr(host, "num_sms", lambda index: 2)  # so that a program has several slots


STARTS = [0, 100, 100, 250, 500]


def problem_of(t: torch.Tensor, cu_seqlens: torch.Tensor | None, precision: str = "fp8"):
    from tilewise.core.problem import Inputs, Options, describe

    inputs = Inputs(t, t, t, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    return describe(inputs, Options(precision=precision))


def draw(dim: int, is_packed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Two integers in a row, times a power of two: their sums have 4 bits, which nobody has to round.

    The interpreter rounds to 8 bits wrongly, and its products are wrong in bfloat16.
    """
    rows = (500,) if is_packed else (2, 300)
    column = torch.rand(*rows, 6, dim).argsort(-1)
    integers = torch.randint(-7, 8, (*rows, 6, dim)) * (column < 2)
    t = (integers * 2.0 ** torch.randint(-4, 5, (*rows, 1, 1))).half()
    return t[..., 2:4, :], offsets() if is_packed else None


def offsets() -> torch.Tensor:
    """STARTS, which do not lie side by side."""
    return torch.tensor([[n, -1] for n in STARTS], dtype=torch.int32)[:, 0]


@pytest.mark.sample(10)
@pytest.mark.parametrize("kind", ["query", "key", "value"])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dim", [40, 64, 128, 192, 256])
def test_rounded_as_defined(dim: int, is_packed: bool, kind: str):
    from tilewise.core.quantized import round_tensor
    from tilewise.gpu.hopper.fp8 import launch as fp8_launch

    t, cu_seqlens = draw(dim, is_packed)
    found = fp8_launch.round_tensor(problem_of(t, cu_seqlens), kind, t, cu_seqlens)
    expected = round_tensor(kind, t, cu_seqlens)
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.blocks.float(), expected.blocks.float())
    assert torch.equal(found.dequantize(), expected.dequantize())


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", ["query", "key"])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dim", [40, 64, 256])
def test_integers_as_defined(dim: int, is_packed: bool, kind: str):
    """But where the order of sums decides what is nearest."""
    from tilewise.core.quantized import round_tensor
    from tilewise.gpu.hopper.fp8 import launch as fp8_launch

    t = torch.randn(*((500,) if is_packed else (2, 300)), 2, dim).half()
    t[..., 130:200, :, :] = 0
    cu_seqlens = offsets() if is_packed else None
    found = fp8_launch.round_tensor(problem_of(t, cu_seqlens, "int8"), kind, t, cu_seqlens)
    expected = round_tensor(kind, t, cu_seqlens, "int8")
    assert found.blocks.dtype == torch.int8
    torch.testing.assert_close(found.scale, expected.scale)
    difference = (found.blocks.int() - expected.blocks.int()).abs()
    assert difference.max() <= 1 and difference.float().mean() < 1e-3


def test_what_is_not_finite_has_a_factor_of_nan():
    from tilewise.gpu.hopper.fp8 import launch as fp8_launch

    t = torch.ones(1, 512, 1, 64).half()
    t[0, 5], t[0, 130, 0, 3], t[0, 256:384] = float("nan"), float("inf"), 0
    factors = fp8_launch.round_tensor(problem_of(t, None), "value", t, None).scale
    assert factors.isnan().tolist() == [[True, True, False, False]] and factors[0, 2] == 1
