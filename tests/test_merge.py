"""Parts of the keys put together give what one call gives."""

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.core.problem import Inputs, Options
from tilewise.core.signature import Request
from tilewise.dispatch import plans
from tilewise.merge import merge
from tilewise.testing import compare

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [[20], [1, 19], [7, 0, 13], [5] * 4])
def test_parts_give_the_whole(dtype, split):
    q, k, v = (torch.randn(2, n, h, 8).to(dtype) for n, h in ((60, 4), (20, 2), (20, 2)))
    sinks = torch.randn(4)
    parts = [
        tilewise.attention(q, *part, sinks=sinks if n == 0 else None, return_lse=True)
        for n, part in enumerate(zip(k.split(split, 1), v.split(split, 1)))
    ]
    out, lse = merge([(o.float(), s) for o, s in parts])
    exact, base = (reference.attention(q, k, v, sinks=sinks, dtype=d) for d in (torch.float64, dtype))
    rounding = torch.finfo(dtype).eps  # each part was rounded once
    assert (out - exact[0]).abs().max() <= rounding * v.abs().max() + 2 * (base[0] - exact[0]).abs().max()
    assert compare(
        "lse", lse, exact[1], reference.attention(q, k, v, sinks=sinks, dtype=torch.float32)[1]
    ).is_within
    assert merge(parts)[0].dtype == dtype


def test_parts_with_a_large_lse_are_a_mean():
    """float32 has steps of 1/16 at 1e6, so that exp(lse of the parts - lse of all) would not add up to 1."""
    out, lse = torch.full((1, 5, 2, 8), 3.0), torch.tensor([1e2, 1e4, 1e6, 1e8, -1e6]).expand(1, 2, 5)
    merged, _ = merge([(out, lse), (out, lse + 0.25), (out, lse - 0.5)])
    torch.testing.assert_close(merged, out, rtol=1e-6, atol=0)


def test_packed_parts_and_queries_that_see_nothing():
    q = torch.randn(5, 2, 8, dtype=torch.float64)
    k = torch.randn(9, 2, 8, dtype=torch.float64)
    starts = torch.tensor([0, 2, 5])
    keys = torch.tensor([0, 9, 9])  # the second sequence has none
    whole = tilewise.attention_varlen(q, k, k, starts, keys, return_lse=True)
    halves = [
        tilewise.attention_varlen(
            q, part, part, starts, torch.tensor([0, len(part), len(part)]), return_lse=True
        )
        for part in k.split([4, 5])
    ]
    out, lse = merge(halves)
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])
    assert (out[2:] == 0).all() and (lse[:, 2:] == float("-inf")).all()


def test_gradients_flow_through_out_and_lse():
    q, k = (torch.randn(1, n, 1, 4, dtype=torch.float64, requires_grad=True) for n in (2, 6))

    def both(q, k):
        return merge([tilewise.attention(q, part, part, return_lse=True) for part in k.split(3, 1)])

    assert torch.autograd.gradcheck(both, (q, k))


def test_gradients_of_queries_that_see_nothing():
    q, k = (torch.randn(1, n, 1, 4, dtype=torch.float64, requires_grad=True) for n in (3, 4))
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1]], dtype=torch.bool)  # none, one part, both

    def merged(q, k):
        parts = zip(k.split(2, 1), mask.split(2, 1))
        return merge(
            [tilewise.attention(q, part, part, mask=own[None, None], return_lse=True) for part, own in parts]
        )

    out, lse = merged(q, k)
    assert (out[:, 0] == 0).all() and (lse[..., 0] == float("-inf")).all()
    found = torch.autograd.grad(out.sum() + lse[..., 1:].sum(), (q, k))
    whole, whole_lse = tilewise.attention(q, k, k, mask=mask[None, None], return_lse=True)
    for a, b in zip(found, torch.autograd.grad(whole.sum() + whole_lse[..., 1:].sum(), (q, k))):
        torch.testing.assert_close(a, b)


def test_parts_that_do_not_fit():
    out, lse = torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 3)
    for parts in ([], [(out, lse.transpose(1, 2))], [(out, lse), (out[:, :2], lse[..., :2])]):
        with pytest.raises(ValueError, match="parts"):
            merge(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, dim", [(1, 300, 64), (3, 2000, 128), (20, 20, 16), (300, 290, 80)]
)
@pytest.mark.parametrize("backend", ["llvm", "tiled", "triton", "hopper"])
def test_a_wide_out_rounds_to_the_usual_one(backend, seqlen_q, seqlen_k, dim, dtype):
    if (backend == "triton" and not torch.cuda.is_available()) or (backend == "hopper" and not IS_HOPPER):
        pytest.skip("needs a GPU")
    device = "cuda" if backend in ("triton", "hopper") else "cpu"
    draw = [
        torch.randn(2, n, h, dim, device=device) for n, h in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2))
    ]
    dense = Inputs(*(t.to(dtype) for t in draw))
    starts = [torch.arange(0, 3 * n, n, dtype=torch.int32, device=device) for n in (seqlen_q, seqlen_k)]
    packed = Inputs(*(t.flatten(0, 1) for t in dense[:3]), *starts)
    for inputs in (dense, packed):
        for _ in range(2):  # on a GPU the second is launched in another way
            narrow, wide = (
                plans.attend(inputs, Options(causal=True), backend, Request(wide=w)) for w in (False, True)
            )
            assert wide.out.dtype == torch.float32 and torch.equal(wide.out.to(dtype), narrow.out)
            assert not torch.equal(wide.out, narrow.out.float()) and torch.equal(wide.lse, narrow.lse)
