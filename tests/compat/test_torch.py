"""PyTorch's operators, served by tilewise: on the CPU here, by the same functions that serve CUDA.

PyTorch's CPU has no kernel for these operators, so registering ours there shows all of it: autograd's
formulas, which call the backward; the fakes, whose strides compiled code relies on; `varlen_attn`.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn

import tilewise
from tilewise import reference
from tilewise.compat import torch as compat_torch
from tilewise.testing import compare

ATEN = torch.ops.aten
FORWARDS = ("_scaled_dot_product_flash_attention", "_flash_attention_forward")


@pytest.fixture
def on_the_cpu():
    """The operators exchanged for CPU tensors."""
    handle = compat_torch.override("CPU")
    yield
    handle.remove()


def tensors(*shapes, dtype=torch.float32, grad=True):
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def flash(q, k, v, **options):
    return ATEN._scaled_dot_product_flash_attention(q, k, v, **options)


def exact(call, q, k, v, dout, **options):
    """`reference` in float64 and in the input's dtype: out, lse, dq, dk, dv."""
    found = []
    for dtype in (torch.float64, q.dtype):
        given = [t.detach() for t in (q, k, v)]
        out, lse = call(*given, dtype=dtype, **options)
        grads = reference.attention_backward(dout, *given, dtype=dtype, **options)
        found.append((out, lse, *grads[:3]))
    return found


def check(found, expected):
    """Within the budgets of `tilewise.testing`; gradients of few elements share the largest."""
    names = ("out", "lse", "dq", "dk", "dv")
    reports = [compare(n, t.detach(), *both) for n, t, *both in zip(names, found, *expected, strict=True)]
    shared = max(report.max_budget for report in reports[2:])
    for report in reports:
        budget = shared if report.name.startswith("d") else report.max_budget
        assert report.max_error <= budget, f"{report}, shared {shared:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_sdpa_operator_and_its_gradient(on_the_cpu, dtype, is_causal, kv_heads):
    q, k, v = tensors((2, 4, 37, 16), (2, kv_heads, 37, 16), (2, kv_heads, 37, 16), dtype=dtype)
    out, lse, starts_q, _, max_q, max_k, rng_state, _, mask = flash(q, k, v, is_causal=is_causal, scale=0.3)
    assert starts_q is None and (max_q, max_k) == (37, 37)
    assert rng_state.dtype == torch.uint64 and rng_state.shape == (2,) and mask.numel() == 0
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    turned = [t.transpose(1, 2) for t in (q, k, v, dout)]
    expected = exact(reference.attention, *turned, causal=is_causal, scale=0.3)
    check((out.transpose(1, 2), lse, *(g.transpose(1, 2) for g in grads)), expected)


def test_packed_operator_and_its_gradient(on_the_cpu):
    starts_q, starts_k = torch.tensor([0, 5, 5, 30]), torch.tensor([0, 9, 12, 30])
    q, k, v = tensors((30, 4, 8), (30, 2, 8), (30, 2, 8))
    scalars = (starts_q, starts_k, 25, 18, 0.0, True, False)
    out, lse, *_ = ATEN._flash_attention_forward(q, k, v, *scalars, window_size_left=7, window_size_right=-1)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    options = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "causal": True, "window": (7, None)}
    check((out, lse, *grads), exact(reference.attention, q, k, v, dout, **options))


def test_varlen_attn_of_packed_sequences(on_the_cpu):
    starts = torch.tensor([0, 5, 30], dtype=torch.int32)
    q, k, v = tensors((30, 2, 8), (30, 2, 8), (30, 2, 8), grad=False)
    out = varlen_attn(q, k, v, starts, starts, 25, 25, window_size=(-1, 0))
    expected = tilewise.attention_varlen(q, k, v, starts, starts, 25, 25, causal=True)
    torch.testing.assert_close(out, expected)
    used = torch.tensor([3, 20], dtype=torch.int32)
    try:
        out = varlen_attn(q, k, v, starts, starts, 25, 25, seqused_k=used)
    except TypeError:
        pytest.skip("this PyTorch has no used lengths")
    rows = torch.cat((torch.arange(3), torch.arange(5, 25)))
    ends = torch.tensor([0, 3, 23])
    expected = tilewise.attention_varlen(q, k[rows], v[rows], starts, ends, 25, 20)
    torch.testing.assert_close(out, expected)


def test_varlen_attn_of_pages(on_the_cpu):
    pages, table = tensors((6, 4, 2, 8), (6, 4, 2, 8), grad=False), torch.tensor([[5, 0], [2, 4]])
    (q,) = tensors((3, 2, 8), grad=False)
    starts, used = torch.tensor([0, 1, 3]), torch.tensor([6, 5])
    try:
        out = varlen_attn(
            q, *pages, starts.int(), None, 2, 8, window_size=(-1, 0), seqused_k=used.int(),
            block_table=table.int(),
        )  # fmt: skip
    except TypeError:
        pytest.skip("this PyTorch has no pages")
    for row, length, picked in ((slice(0, 1), 6, table[0]), (slice(1, 3), 5, table[1])):
        k, v = (t[picked].flatten(0, 1)[None, :length] for t in pages)
        expected = tilewise.attention(q[None, row], k, v, causal=True)
        torch.testing.assert_close(out[None, row], expected)


def test_in_place_operator_writes_into_out(on_the_cpu):
    q, k, v = tensors((1, 5, 2, 8), (1, 7, 2, 8), (1, 7, 2, 8), grad=False)
    out = torch.full_like(q, float("nan"))
    scalars = (None, None, 5, 7, 0.0, True, False)
    lse = compat_torch.forward_inplace(out, q, k, v, *scalars)
    expected, expected_lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close((out, lse), (expected, expected_lse))


def test_dropout_of_the_backward_is_the_forwards(on_the_cpu):
    """out is linear in value: <dout, out> is <dvalue, value> if both dropped the same weights."""
    q, k, v = tensors((1, 2, 24, 8), (1, 2, 24, 8), (1, 2, 24, 8))
    out, *_ = flash(q, k, v, dropout_p=0.5)
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, dout)
    assert not torch.allclose(out, flash(q, k, v)[0])
    torch.testing.assert_close((dv * v).sum(), (out * dout).sum(), atol=1e-3, rtol=1e-4)


LAYOUTS = list(itertools.permutations(range(3)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_those_of_pytorchs_fakes(on_the_cpu, layout):
    """Batch, heads and sequence in any order in memory: compiled code relies on the fakes' strides."""
    q, k, v = tensors((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8))
    places = [layout.index(n) for n in range(3)]
    q, k, v = (t.detach().permute(*layout, 3).contiguous().permute(*places, 3) for t in (q, k, v))
    real = flash(q, k, v)
    dout = torch.randn_like(real[0])
    scalars = (*real[2:6], 0.0, False, *real[6:8])
    grads = ATEN._scaled_dot_product_flash_attention_backward(dout, q, k, v, *real[:2], *scalars)
    fake = ATEN._scaled_dot_product_flash_attention(*(t.to("meta") for t in (q, k, v)))
    assert real[0].stride() == torch.empty_like(q, device="meta").stride() == fake[0].stride()
    assert real[1].stride() == fake[1].stride() and real[1].shape == fake[1].shape
    assert [g.stride() for g in grads] == [torch.empty_like(t).stride() for t in (q, k, v)]


@pytest.mark.parametrize("is_used_in_part", [False, True])
def test_strides_of_packed_sequences(on_the_cpu, is_used_in_part):
    """Heads outermost in memory."""
    q, k, v = (t.detach().transpose(0, 1) for t in tensors((2, 10, 8), (2, 10, 8), (2, 10, 8)))
    starts = torch.tensor([0, 3, 10], dtype=torch.int32)
    used = torch.tensor([2, 4], dtype=torch.int32) if is_used_in_part else None
    given = (q, k, v, starts, starts, used)
    real, fake = (
        ATEN._flash_attention_forward(*ts[:5], 7, 7, 0.0, False, False, seqused_k=ts[5])
        for ts in (given, [None if t is None else t.to("meta") for t in given])
    )
    assert real[0].stride() == torch.empty_like(q, device="meta").stride() == fake[0].stride()
    assert real[1].stride() == fake[1].stride() and real[1].shape == fake[1].shape


def test_compiled_code(on_the_cpu):
    """A packed projection, whose views have gaps; forward and backward in one compiled graph."""
    torch._dynamo.reset()

    def model(x):
        q, k, v = x.unflatten(-1, (3, 2, 8)).unbind(2)
        out, *_ = flash(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return out.transpose(1, 2).flatten(2).sin()

    (x,) = tensors((2, 9, 48))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    grads = [torch.autograd.grad(f(x).square().sum(), x)[0] for f in (compiled, model)]
    torch.testing.assert_close(*grads)


def test_refusals():
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 4), grad=False)
    with pytest.raises(ValueError, match=r"value.shape\[-1\]=4 must equal query.shape\[-1\]=8"):
        compat_torch.sdpa_forward(q, k, v)
    with pytest.raises(NotImplementedError, match="return_debug_mask=True"):
        compat_torch.sdpa_forward(q, k, k, return_debug_mask=True)


def test_an_older_torch_is_named(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(NotImplementedError, match=r"torch 2\.9\.1 .* 2\.11"):
        compat_torch.register()


def test_activation_is_undone():
    """Of CUDA: bookkeeping that needs no GPU."""

    def has_kernels():
        return [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in FORWARDS]

    before = has_kernels()
    compat_torch.register()
    compat_torch.register()
    assert "tilewise" in list_flash_attention_impls() and current_flash_attention_impl() is None
    activate_flash_attention_impl("tilewise")
    try:
        assert current_flash_attention_impl() == "tilewise" and all(has_kernels())
        activate_flash_attention_impl("tilewise")  # twice is once
        assert all(has_kernels())
    finally:
        restore_flash_attention_impl()
    assert current_flash_attention_impl() is None and has_kernels() == before
