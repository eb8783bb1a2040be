"""Rows whose scores are all huge: what is saved for the backward does not lose the sum.

log(sum exp S) is a maximum plus the log of a sum. Beside a maximum of 1e9 a float32 has no room for that.
"""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.cpu import aten
from tilewise.testing import check_attention, compare

LOWEST = torch.finfo(torch.float32).min
# What float16's baseline can hold. float64 is held to itself: beside 1e6 scores are rounded to steps so fine
# that one of thousands falls on either side by chance; 1e9 makes that rare.
FILLS = {torch.float16: [-6e4, 6e4], torch.float64: [-1e9, LOWEST, 1e9]}


def qkv(seqlen_q, seqlen_k, dtype=torch.float32, heads=4, kv_heads=2, dim=24):
    shapes = (seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads)
    return [torch.randn(1, n, h, dim).to(dtype) for n, h in shapes]


def some_rows(fill, seqlen_q, seqlen_k):
    """A bias of which every third row is `fill`."""
    bias = torch.zeros(1, 1, seqlen_q, seqlen_k)
    bias[:, :, ::3] = fill
    return bias


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["llvm", "tiled"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 290), (40, 50)])
def test_a_bias_on_whole_rows(seqlen_q, seqlen_k, backend, dtype):
    for fill in FILLS.get(dtype, [-1e9, LOWEST, 1e6]):
        bias = some_rows(fill, seqlen_q, seqlen_k)
        for options in ({}, {"causal": True, "dropout_p": 0.2}, {"sinks": torch.randn(4), "softcap": 5.0}):
            tensors = qkv(seqlen_q, seqlen_k, dtype)
            check_attention(*tensors, bias=bias, backend=backend, holds_mean=False, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["llvm", "tiled"])
def test_packed_sequences(backend, dtype):
    q, k, v = (t[0] for t in qkv(100, 300, dtype))
    cu_q, cu_k = torch.tensor([0, 40, 41, 100]), torch.tensor([0, 70, 200, 300])
    options = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "bias": some_rows(-1e9, 59, 130)}
    check_attention(q, k, v, backend=backend, holds_mean=False, causal=True, **options)


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["llvm", "tiled", "aten"])
@pytest.mark.parametrize("seqlen_q", [2, 6, 90])
@pytest.mark.parametrize("seqlen_k", [12, 90, 600])
def test_products_that_are_large(seqlen_k, seqlen_q, backend, dtype):
    """All keys of a row are equal, so that its weights are too, and integers, so that no product is rounded.

    Few queries, few keys, many of both: each has kernels of its own.
    """
    query = torch.randint(-9, 10, (1, seqlen_q, 2, 16)).to(dtype)
    key = torch.randint(-9, 10, (1, 1, 2, 16)).to(dtype).expand(-1, seqlen_k, -1, -1)
    value = torch.randn(1, seqlen_k, 2, 16).to(dtype)
    for scale in (64.0, 2.0**20, -(2.0**30)):
        if backend == "aten" and scale < 0:
            continue  # refused
        reports = differences(query, key, value, backend, scale)
        assert all(report.is_within for report in reports), "\n".join(map(str, reports))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["llvm", "tiled"])
@pytest.mark.parametrize("seqlen_q", [2, 90])
def test_a_scale_that_rounds_large_products(seqlen_q, backend, dtype):
    """Each query gives out the value of its largest score."""
    q, k, v = (torch.randn(1, n, 2, 16).to(dtype) for n in (seqlen_q, 90, 90))
    v.requires_grad_()
    for scale in (1e8 / 3, 1e11 / 3, 1e28 / 3):
        best = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()).argmax(-1)
        chosen = torch.nn.functional.one_hot(best, 90).to(dtype)  # (batch, heads, queries, keys)
        out = tilewise.attention(q, k, v, scale=scale, backend=backend)
        assert torch.equal(out, torch.einsum("bhij,bjhd->bihd", chosen, v))
        (dv,) = torch.autograd.grad(out.sum(), v)
        assert torch.equal(dv, chosen.sum(2)[..., None].transpose(1, 2).expand_as(v))


def differences(query, key, value, backend, scale):
    """The gradient of value by a backend against the formula."""
    leaves = [t.detach().clone().requires_grad_() for t in (query, key, value)]
    out = tilewise.attention(*leaves, scale=scale, backend=backend)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)[2]
    formulas = [
        reference.attention_backward(dout, query, key, value, scale=scale, dtype=dtype).value
        for dtype in (torch.float64, query.dtype)
    ]
    return [compare("dvalue", found, *formulas)]


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_calls_that_are_repeated(repeats, layout):
    """A later call goes from the tensors straight to the kernels, forward and backward."""
    query, key = (torch.randint(-9, 10, (1, 1, 70, 16)).float() for _ in range(2))
    key = key[:, :, :1].expand(-1, -1, 70, -1).contiguous()
    value = torch.randn(1, 1, 70, 16)
    if layout == "bshd":
        query, key, value = (t.transpose(1, 2).contiguous() for t in (query, key, value))
    for _ in range(repeats):
        leaf = value.clone().requires_grad_()
        out = tilewise.attention(query, key, leaf, scale=2.0**20, layout=layout)
        (found,) = torch.autograd.grad(out.sum(), leaf)
        torch.testing.assert_close(found, torch.ones_like(value))


def small_problem():
    """Scores of 1e9 and a little, in float64."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, n, 2, 3, dtype=torch.float64, requires_grad=True) for n in (4, 6, 6)]
    return leaves, torch.full((1, 1, 4, 1), 2.0**40, dtype=torch.float64)


@pytest.mark.parametrize("backend", ["llvm", "tiled", "aten"])
def test_second_derivatives_and_tangents(backend):
    """A constant on all scores of a row changes no derivative, of either order, but for their rounding."""
    leaves, constant = small_problem()
    directions = tuple(torch.randn_like(t) for t in leaves)

    def derivatives(bias):
        def attend(*tensors):
            return tilewise.attention(*tensors, bias=bias, backend=backend)

        first = torch.autograd.grad(attend(*leaves).sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        detached = tuple(t.detach() for t in leaves)
        return [*first, *second, torch.func.jvp(attend, detached, directions)[1]]

    for a, b in zip(derivatives(constant.expand(1, 1, 4, 6).contiguous()), derivatives(None), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_compiled_and_mapped():
    q, k, v = qkv(30, 40)
    bias = torch.full((1, 1, 30, 40), -1e9)

    def loss(value):
        return tilewise.attention(q, k, value, bias=bias).sum()

    leaf = v.clone().requires_grad_()
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(leaf), leaf)
    mapped = torch.func.vmap(torch.func.grad(loss))(v[None])[0]
    for found in (torch.func.grad(loss)(v), compiled, mapped):
        torch.testing.assert_close(found, torch.full_like(v, 30 * 2 / 40))


def test_pytorch_kernel_serves_only_where_lse_is_small():
    q, k, v = qkv(64, 64, torch.bfloat16, kv_heads=4)
    limit = aten.MOST_LOSS[torch.bfloat16] * 2**24
    for size, serves in ((limit / 4, True), (limit * 4, False)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = tilewise.attention(
            *leaves, bias=torch.full((1, 1, 64, 64), size), backend="aten", return_lse=True
        )
        assert (lse.abs() > limit).any() != serves
        dv = torch.autograd.grad(out.sum(), leaves)[2]
        weights = torch.softmax((q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1)) * 24**-0.5, -1)
        if serves:
            torch.testing.assert_close(dv[..., 0].float(), weights.sum(2).mT, rtol=0.03, atol=0.03)
        else:
            torch.testing.assert_close(dv.float().sum(1), torch.full((1, 4, 24), 64.0), rtol=0.01, atol=0.0)
