"""The 8-bit kernels against float64 attention of the same 8-bit numbers; skipped without a Hopper GPU.

The budget is the project's: twice the largest and 1.1 times the mean error of the same maths in PyTorch,
which rounds weights to 8 bits too, and multiplies 8-bit numbers of q and k on the same tensor cores.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from backends import Backend
from tilewise.core.problem import Inputs, Options, describe
from tilewise.core.quantized import round_tensor
from tilewise.fp8 import quantize
from tilewise.testing import compare
from tilewise.tiled import backend as tiled

sys.path.insert(0, str(Path(__file__).parent))
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA Hopper GPU")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiples of 1/64: sums of a rotation are exact in any order, and so round to the same 8 bits."""
    return ((64 * torch.randn(*shape, device="cuda")).round() / 64).to(dtype)


def hold(inputs: Inputs, **options: Any) -> None:
    from fp8_blocks import exact_of_rounded, of_torch_products

    from tilewise.gpu.hopper import plan

    problem = describe(inputs, Options(**{"precision": "fp8"} | options))
    assert Backend("hopper").supports(problem) is None
    exact = exact_of_rounded(problem, inputs)
    # Tensor cores sum integers exactly, as float32 does.
    maths = of_torch_products if problem.precision == "fp8" else tiled.forward
    baseline = maths(problem, inputs)
    for part, a, e, b in zip(("out", "lse"), plan.forward(problem, inputs), exact, baseline, strict=True):
        report = compare(part, a, e, b)
        assert report.is_within, report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_head_sizes(dims: tuple[int, int], causal: bool, dtype: torch.dtype):
    q, k, v = (draw(2, s, 4, d, dtype=dtype) for s, d in ((701, dims[0]), (858, dims[0]), (858, dims[1])))
    hold(Inputs(q, k[:, :, :2], v[:, :, :2]), causal=causal)


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_left": 100, "window_right": 20},
    "left window": {"window_left": 100},
    "causal window": {"window_left": 70, "causal": True},
    "softcap": {"softcap": 5.0, "causal": True},
    "steep": {"scale": 1.0},
}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", [*OPTIONS, "sinks"])
def test_options(name: str, dim: int):
    q, k, v = draw(2, 633, 4, dim), draw(2, 717, 2, dim), draw(2, 717, 2, dim)
    sinks = draw(4) if name == "sinks" else None
    hold(Inputs(q, k, v, sinks=sinks), **OPTIONS.get(name, {}))


@pytest.mark.parametrize("seqlen_q", [1, 63, 65, 127, 129, 193, 257])
@pytest.mark.parametrize("seqlen_k", [1, 127, 128, 129, 257])
@pytest.mark.parametrize("causal", [False, True])
def test_edges_of_tiles(seqlen_q: int, seqlen_k: int, causal: bool):
    q, k, v = draw(2, seqlen_q, 4, 128), draw(2, seqlen_k, 4, 128), draw(2, seqlen_k, 4, 128)
    out, lse = tilewise.attention(q, k, v, causal=causal, precision="fp8", return_lse=True, backend="hopper")
    expected = tilewise.attention(q, k, v, causal=causal, precision="fp8", return_lse=True, backend="tiled")
    torch.testing.assert_close(out, expected[0], atol=0.1, rtol=0.1)
    torch.testing.assert_close(lse, expected[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_packed_sequences(dim: int, causal: bool):
    lengths_q, lengths_k = [100, 0, 700, 1, 200, 333], [130, 20, 0, 700, 300, 333]
    starts = [
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device="cuda")
        for n in (lengths_q, lengths_k)
    ]
    q, k, v = (draw(sum(n), h, dim) for n, h in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2)))
    hold(Inputs(q, k, v, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1]), causal=causal)


def test_blocks_work_through_many_tiles():
    q, k, v = (draw(6, 1100, 16, 128) for _ in range(3))
    for causal in (False, True):
        hold(Inputs(q, k, v), causal=causal)


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_rounded_as_defined(dim: int):
    from tilewise.gpu.hopper.fp8 import launch as fp8_launch

    x = draw(2, 384, 3, dim)
    problem = describe(Inputs(x, x, x), Options(precision="fp8"))
    for kind in ("query", "key", "value"):
        found, expected = fp8_launch.round_tensor(problem, kind, x, None), round_tensor(kind, x)
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(found.blocks.float(), expected.blocks.float())


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tensors_that_come_in_8_bits(dim: int, precision: str):
    q, k, v = draw(2, 300, 4, dim), draw(2, 400, 2, dim), draw(2, 400, 2, dim)
    options = {"causal": True, "backend": "hopper"}
    expected = tilewise.attention(q, k, v, precision=precision, **options)
    assert torch.equal(tilewise.attention(*quantize(q, k, v, precision=precision), **options), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_integers(dim: int, causal: bool):
    q, k, v = draw(2, 701, 4, dim), draw(2, 858, 2, dim), draw(2, 858, 2, dim)
    hold(Inputs(q, k, v), causal=causal, precision="int8")


def test_what_is_not_finite_reaches_no_other_sequence():
    q, k, v = (draw(2, 300, 2, 128) for _ in range(3))
    q[0, 5], k[0, 280], v[0, 290] = float("nan"), float("inf"), float("nan")
    out = tilewise.attention(q, k, v, precision="fp8", backend="hopper")
    assert out[0].isnan().all() and out[1].isfinite().all()
