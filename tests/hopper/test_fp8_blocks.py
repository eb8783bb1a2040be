"""What the 8-bit kernels are compared with is the tiles' result, but for how a GPU sums its products."""

from __future__ import annotations

import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.core.problem import Inputs, Options, describe
from tilewise.tiled import backend as tiled

sys.path.insert(0, str(Path(__file__).parent))
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "left window": {"window_left": 50, "causal": True},
    "softcap": {"softcap": 5.0, "causal": True},
    "steep": {"scale": 1.0, "window_right": 30},
}


def in_float32(q: Tensor, q_factors: Tensor, k: Tensor, k_factors: Tensor) -> Tensor:
    q_factors, k_factors = (t.double().repeat_interleave(128) for t in (q_factors, k_factors))
    return (q.float() @ k.float().T) * q_factors[: len(q), None] * k_factors[: len(k)]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_products_in_float32_give_the_result_of_the_tiles(
    name: str, is_packed: bool, monkeypatch: pytest.MonkeyPatch
):
    import fp8_blocks

    monkeypatch.setattr(fp8_blocks, "torch_product", in_float32)
    lengths = ([40, 0, 130, 1], [300, 20, 0, 140]) if is_packed else ([150] * 2, [300] * 2)
    q, k, v = (torch.randn(sum(n), h, 64).bfloat16() for n, h in zip((*lengths, lengths[1]), (4, 2, 2)))
    v[:128] *= 50  # blocks of different factors
    starts = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in lengths]
    inputs = Inputs(q, k, v, *starts, sinks=torch.randn(4))
    if not is_packed:
        q, k, v = (t.unflatten(0, (2, -1)) for t in (q, k, v))
        inputs = Inputs(q, k, v, sinks=inputs.sinks)
    problem = describe(inputs, Options(precision="fp8", **OPTIONS[name]))
    found, expected = fp8_blocks.of_torch_products(problem, inputs), tiled.forward(problem, inputs)
    difference = (found[0] - expected[0]).float().norm() / expected[0].float().norm()
    assert difference < 1e-3  # few weights round to another side
    torch.testing.assert_close(found[1].float(), expected[1], atol=1e-4, rtol=1e-5)
