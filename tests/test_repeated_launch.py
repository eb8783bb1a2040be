"""What a repeated GPU call allocates and launches, with a plan that records; this needs no GPU."""

from __future__ import annotations

import pytest
import torch

from tilewise.problem import Inputs, Options, describe
from tilewise.repeated_launch import repeatable


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("shape", [(2, 9, 4, 64), (1, 1, 4, 64), (3, 5, 1, 64), (1, 5, 1, 8)])
def test_new_outputs_and_one_launch(layout, shape):
    axes = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    inputs = Inputs(*(torch.zeros(*shape[:3], dim) for dim in (64, 64, 40)))
    problem = describe(inputs, Options())
    launched = []
    run = repeatable(
        problem, inputs.query, layout, True, launched.append, lambda q, k, v, *new: (v, k, q, None, *new)
    )
    results = []
    for _ in range(2):
        q, k, v = (torch.zeros(*shape[:3], dim).permute(axes) for dim in (64, 64, 40))
        out, lse = run(q, k, v)
        assert [id(t) for t in launched[-1]] == [id(t) for t in (v, k, q, None, out, lse)]
        whole = torch.empty(*shape[:3], 40).permute(axes)
        assert out.shape == whole.shape and out.stride() == whole.stride() and out.dtype == q.dtype
        assert lse.shape == (shape[0], shape[2], shape[1]) and lse.is_contiguous()
        assert lse.dtype == torch.float32
        results += [out, lse]
    assert len({t.data_ptr() for t in results}) == 4 and len(launched) == 2
    only_out = repeatable(problem, inputs.query, layout, False, launched.append, lambda *tensors: tensors)
    assert isinstance(only_out(q, k, v), torch.Tensor)
