"""A plan serves exactly the calls that its signature describes."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise.core.signature import contiguous_strides, look
from tilewise.dispatch import plans


@pytest.mark.sample(1)
@pytest.mark.parametrize("tensor", ["query", "key", "value", "mask", "bias", "alibi_slopes", "sinks"])
@pytest.mark.parametrize("backend", ["llvm", "aten", "tiled", ""])
def test_what_was_called_before_does_not_matter(run_script, backend, tensor):
    if backend == "aten" and tensor in ("alibi_slopes", "sinks"):
        pytest.skip("aten refuses them")
    *wrong, count = run_script("signature_pairs.py", backend, tensor)
    assert not wrong, "\n".join(wrong)
    assert int(count.split()[0]) > 20


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float64, torch.bfloat16)])
def test_a_backward_reads_its_own_bias(dtypes):
    """Many rows: a kernel for another dtype would read beyond the end."""
    x = torch.randn(1, 600, 2, 32, requires_grad=True)
    bias = torch.randn(1, 2, 600, 600)
    first, second = (bias.to(dtype) for dtype in dtypes)

    def gradient(b):
        return torch.autograd.grad(tilewise.attention(x, x, x, bias=b).square().sum(), x)[0]

    gradient(first)
    found = gradient(second)
    plans.clear()
    assert torch.equal(found, gradient(second))
    rounded = gradient(second.float())
    torch.testing.assert_close(found, rounded, rtol=1e-4, atol=1e-4)


def test_a_look_has_all_that_a_plan_may_read():
    t = torch.randn(3, 8)[:, 1:].requires_grad_()
    (seen,) = look([t], True)
    assert (seen.shape, seen.strides, seen.dtype) == ((3, 7), (8, 1), torch.float32)
    assert (seen.misalignment, seen.needs_grad, seen.device.type) == (t.data_ptr() % 16, True, "cpu")
    assert not look([t], False)[0].needs_grad


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 0, 4), (1, 5, 1)])
def test_contiguous_strides_are_torchs(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()
