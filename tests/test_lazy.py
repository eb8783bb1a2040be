"""Tensors whose memory does not hold their numbers: lazily negated, or all zeros."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import flash_attn, flash_attn_3
from tilewise.core.signature import is_lazy
from tilewise.dispatch import plans
from tilewise.integrations.sdpa import scaled_dot_product_attention

BACKENDS = ("llvm", "aten", "tiled", None)


def lazily(t):
    """The same numbers, negated once more than they are in memory."""
    t = torch._neg_view(t.detach().neg())
    assert is_lazy(t)
    return t


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.fixture(autouse=True)
def _fresh():
    plans.clear()


def test_the_imaginary_part_of_a_conjugate():
    value = torch.randn(1, 5, 2, dtype=torch.complex64).conj().imag.unsqueeze(-1)
    query, key = tensors((1, 3, 2, 8), (1, 5, 2, 8))
    expected, _ = tilewise.reference.attention(query, key, value)
    for _ in range(4):
        torch.testing.assert_close(
            tilewise.attention(query, key, value).double(), expected, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_after_calls_of_the_same_shapes(backend, name):
    given = dict(zip(("query", "key", "value"), tensors(*[(2, 5, 2, 8)] * 3)))
    for _ in range(4):  # calls of one kind become short
        expected = tilewise.attention(**given, backend=backend)
    for _ in range(3):
        found = tilewise.attention(**given | {name: lazily(given[name])}, backend=backend)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(tilewise.attention(**given, backend=backend), expected)


@pytest.mark.parametrize("backend", ["llvm", "tiled", None])
def test_optional_tensors(backend):
    query, key, value, bias = tensors(*[(1, 6, 4, 8)] * 3, (4, 6, 6))
    options = {"bias": bias, "alibi_slopes": torch.rand(4), "sinks": torch.randn(4)}
    expected = tilewise.attention(query, key, value, **options, backend=backend)
    for name, t in options.items():
        found = tilewise.attention(query, key, value, **options | {name: lazily(t)}, backend=backend)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("length", [1, 6, 40])
def test_gradients_of_out_and_lse(layout, length):
    shape = (1, length, 2, 8) if layout == "bshd" else (1, 2, length, 8)
    given = [t.requires_grad_() for t in tensors(*[shape] * 3)]
    dout = torch.randn(shape)
    dlse = torch.randn(1, 2, length)
    for return_lse in (False, True):
        for _ in range(4):
            found = tilewise.attention(*given, layout=layout, return_lse=return_lse)
            results, grads = (found, (dout, dlse)) if return_lse else ((found,), (dout,))
            lazy = [lazily(g) for g in grads]
            expected = torch.autograd.grad(results, given, grads, retain_graph=True)
            torch.testing.assert_close(torch.autograd.grad(results, given, lazy), expected)


def test_gradients_flow_through():
    x, key = tensors((1, 4, 2, 8), (1, 6, 2, 8))
    query = x.clone().requires_grad_()
    tilewise.attention(torch._neg_view(query), key, key).sum().backward()
    plain = x.clone().requires_grad_()
    tilewise.attention(-plain, key, key).sum().backward()
    torch.testing.assert_close(query.grad, plain.grad)


def test_offsets_of_packed_sequences():
    query, starts = torch.randn(7, 2, 8), torch.tensor([0, 3, 7])
    expected = tilewise.attention_varlen(query, query, query, starts, starts)
    found = tilewise.attention_varlen(query, query, query, lazily(starts), lazily(starts))
    torch.testing.assert_close(found, expected)


def test_cache():
    cos, sin = tilewise.rotary.rotary_tables(torch.arange(16), 8)
    query, key, value = tensors(*[(2, 3, 2, 8)] * 3)
    results = []
    for change in (lambda t: t, lazily):
        cache = tilewise.KVCache(2, 16, 2, 8, dtype=torch.float32)
        for _ in range(3):
            given = [change(t) for t in (query, key, value, cos, sin)]
            out = tilewise.attention_with_cache(
                given[0],
                cache,
                *given[1:3],
                rotary_cos=given[3],
                rotary_sin=given[4],
                sinks=change(torch.ones(2)),
            )
        results.append((out, cache.key, cache.value))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("face", [flash_attn, flash_attn_3])
def test_flash_attn_cache(face):
    query, key, value = tensors(*[(2, 1, 2, 8)] * 3)
    caches = tensors(*[(2, 16, 2, 8)] * 2)
    results = []
    for change in (lambda t: t.clone(), lazily):
        k_cache, v_cache = (change(t) for t in caches)
        lengths = change(torch.tensor([3, 5], dtype=torch.int32))
        out = face.flash_attn_with_kvcache(
            change(query), k_cache, v_cache, change(key), change(value), cache_seqlens=lengths
        )
        results.append((out, k_cache.resolve_neg(), v_cache.resolve_neg()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "face", [flash_attn.flash_attn_func, flash_attn_3.flash_attn_func, scaled_dot_product_attention]
)
def test_faces(face):
    given = tensors(*[(1, 4, 4, 8)] * 3)
    for _ in range(4):
        expected = face(*given)
        torch.testing.assert_close(face(*map(lazily, given)), expected)


def test_zeros_without_memory():
    query, key = tensors((1, 4, 2, 8), (1, 6, 2, 8))
    zeros = torch._efficientzerotensor((1, 6, 2, 8))
    for _ in range(3):
        assert not tilewise.attention(query, key, zeros).any()
    leaf = query.requires_grad_()
    (grad,) = torch.autograd.grad(
        tilewise.attention(leaf, key, key), leaf, torch._efficientzerotensor((1, 4, 2, 8))
    )
    assert not grad.any()
