"""Rows whose scores are all huge: lse and its residual give the sum that a float32 lse has lost."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import reference
from tilewise.core.plan import Results
from tilewise.core.problem import Inputs, Options, describe
from tilewise.testing import compare

triton = pytest.importorskip("triton")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (IS_INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from tilewise.gpu.triton import launch, launch_decode  # noqa: E402

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
LOWEST = torch.finfo(torch.float32).min
LONG, LONGER = (21, 37) if IS_INTERPRETED else (301, 458)
ROUNDS_TWICE = IS_INTERPRETED and triton.__version__.startswith(("3.6", "3.7", "3.8"))
FEW = (3, 260)  # queries and keys of the decoding kernels
NAMES = ("query", "key", "value", "bias", "sinks")


def draw(seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = (seqlen_q, 2), (seqlen_k, 1), (seqlen_k, 1)
    return [torch.randn(1, n, h, 16, device=DEVICE).to(dtype) for n, h in shapes]


def over_budget(inputs: Inputs, residual: bool = True, **options: Any) -> list[str]:
    """Gradients that are worse than PyTorch's formula in the inputs' precision, twice its largest error."""
    problem = describe(inputs, Options(**options))
    torch.manual_seed(0)
    with torch.no_grad():
        out, lse, *rest = launch.forward(problem, inputs, residual=residual)
        dout = torch.randn_like(out)
        found = launch.backward(problem, inputs, Results(out, lse, *rest), dout, None)
    extras = {name: getattr(inputs, name) for name in ("bias", "sinks")}
    extras |= {f"cu_seqlens_{side}": getattr(inputs, f"cu_seqlens_{side}") for side in "qk"}
    exact, baseline = (
        reference.attention_backward(dout, *inputs[:3], **extras, **options, dtype=dtype)
        for dtype in (torch.float64, inputs.query.dtype)
    )
    reports = [
        compare(name, a, getattr(exact, name), getattr(baseline, name))
        for name in NAMES
        if (a := getattr(found, name)) is not None
    ]
    largest = max(report.max_budget for report in reports)  # two sinks: a baseline is exact by luck
    budgets = {report.name: report.max_budget for report in reports} | {"sinks": largest}
    return [str(report) for report in reports if report.max_error > budgets[report.name]]


def filled(rows: int, columns: int, fill: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A bias of which every third row is `fill`."""
    bias = torch.zeros(1, 2, rows, columns, device=DEVICE, dtype=dtype)
    bias[:, :, ::3] = fill
    return bias.requires_grad_()


@pytest.mark.sample(1)
@pytest.mark.parametrize("fill", [-1e9, LOWEST, 1e6])
@pytest.mark.parametrize("lengths", [(LONG, LONGER), FEW], ids=str)
# the interpreter multiplies the bits of bfloat16
@pytest.mark.parametrize("dtype", [torch.float32, *([] if IS_INTERPRETED else [torch.bfloat16])], ids=str)
def test_a_bias_on_whole_rows(dtype: torch.dtype, lengths: tuple[int, int], fill: float):
    tensors = draw(*lengths, dtype)
    inputs = Inputs(*tensors, bias=filled(*lengths, fill))
    assert launch_decode.serves(describe(inputs, Options())) == (lengths == FEW)
    assert not over_budget(inputs)
    if abs(fill) > 1e6:  # there PyTorch's formula loses as much
        assert over_budget(inputs, residual=False)
    sinks = torch.randn(2, device=DEVICE)
    assert not over_budget(inputs._replace(sinks=sinks), softcap=5.0, causal=True)


def test_packed_sequences():
    q, k, v = (t[0] for t in draw(LONG, LONGER, torch.float32))
    cu_q, cu_k = (torch.tensor([0, 8, 9, n], device=DEVICE, dtype=torch.int32) for n in (len(q), len(k)))
    bias = filled(len(q) - 9, len(k) - 9, -1e9)
    inputs = Inputs(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, bias=bias)
    assert not over_budget(inputs, causal=True)


@pytest.mark.skipif(ROUNDS_TWICE, reason="Triton's interpreter has fused products from 3.9 on")
@pytest.mark.sample(1)
@pytest.mark.parametrize("scale", [64.0, 2.0**20, -(2.0**30)])
@pytest.mark.parametrize("lengths", [(LONG, LONGER), FEW], ids=str)
def test_products_that_are_large(lengths: tuple[int, int], scale: float):
    """All keys of a row are equal, and integers, so that no product is rounded."""
    query, key, value = draw(*lengths, torch.float32)
    query = torch.randint(-9, 10, query.shape, device=DEVICE).float()
    key = torch.randint(-9, 10, key[:, :1].shape, device=DEVICE).float().expand(key.shape).contiguous()
    inputs = Inputs(query, key, value)
    assert not [line for line in over_budget(inputs, scale=scale) if line.startswith("value")]
    if abs(scale) > 64:
        assert over_budget(inputs, residual=False, scale=scale)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"scale": 1e-35}], ids=str)
def test_the_residual_is_what_rounding_took(options: dict[str, Any]):
    for lengths in ((LONG, LONGER), FEW):
        query, key, value = draw(*lengths, torch.float32)
        inputs = Inputs(300 * query, key[:, :1].expand(key.shape).contiguous(), value)
        _, lse, residual = launch.forward(describe(inputs, Options(**options)), inputs, residual=True)
        exact = reference.attention(*inputs[:3], **options)[1]
        assert (residual.double().abs() <= lse.double().abs() * 2.0**-23).all()
        of_products = 2.0**-22 * 16 * exact.abs().max()
        assert ((lse.double() + residual) - exact).abs().max() <= of_products + 1e-6
        plain = launch.forward(describe(inputs, Options(**options)), inputs)
        assert len(plain) == 2 and torch.equal(plain[1], lse)
