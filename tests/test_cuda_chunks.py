"""`attention_chunk` of the FlashAttention-3 functions on a GPU; skipped without one."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tilewise import reference
from tilewise.flash_attn_3 import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tilewise.testing import compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def draw(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def mask_of(seqlen_q, seqlen_k, chunk):
    query = torch.arange(seqlen_q, device="cuda")[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device="cuda")
    return ((query >= 0) & (query.div(chunk, rounding_mode="floor") == key // chunk))[None, None]


@contextmanager
def no_waiting():
    """Whatever waits for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k, chunk", [(1000, 1000, 256), (700, 1001, 300), (600, 400, 130)])
def test_forward_and_backward(seqlen_q, seqlen_k, chunk, causal):
    q, k, v = (draw(2, n, h, 128).requires_grad_() for n, h in [(seqlen_q, 8), (seqlen_k, 2), (seqlen_k, 2)])
    out = flash_attn_func(q, k, v, causal=causal, attention_chunk=chunk)
    dout = torch.randn_like(out)
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    options, results = {"causal": causal, "mask": mask_of(seqlen_q, seqlen_k, chunk)}, []
    with torch.no_grad():
        for dtype in (torch.float64, torch.bfloat16):
            forward = reference.attention(q, k, v, dtype=dtype, **options)[0]
            results.append(
                (forward, *reference.attention_backward(dout, q, k, v, dtype=dtype, **options)[:3])
            )
    for name, *tensors in zip(("out", "dq", "dk", "dv"), found, *results):
        report = compare(name, *tensors)
        assert report.is_within, report


def test_packed_offsets_are_read_once():
    q, k = draw(1500, 4, 64).requires_grad_(), draw(1900, 2, 64).requires_grad_()
    starts = [torch.tensor(t, device="cuda") for t in ([0, 700, 700, 1500], [0, 1000, 1200, 1900])]

    def run():
        out = flash_attn_varlen_func(q, k, k, *starts, 800, 1000, causal=True, attention_chunk=256)
        return out, *torch.autograd.grad(out.sum(), (q, k))

    first = run()
    with no_waiting():
        again = run()
    for a, b in zip(first, again):
        torch.testing.assert_close(a, b)


def cached(kind, capacity):
    """Caches of three sequences, what says where they are, and the same as (sequence, position, ...)."""
    if kind == "contiguous":
        k_cache, v_cache = draw(3, capacity, 2, 128), draw(3, capacity, 2, 128)
        return k_cache, v_cache, {}, (k_cache, v_cache)
    pages = capacity // 16
    k_cache, v_cache = draw(3 * pages, 16, 2, 128), draw(3 * pages, 16, 2, 128)
    table = torch.randperm(3 * pages, device="cuda").view(3, pages).int()
    return (
        k_cache,
        v_cache,
        {"page_table": table},
        [t[table.long()].flatten(1, 2) for t in (k_cache, v_cache)],
    )


@pytest.mark.parametrize("seqlen_q", [1, 4, 50])
@pytest.mark.parametrize("kind, capacity", [("contiguous", 2048), ("contiguous", 1999), ("paged", 2048)])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_graph_of_cached_attention_replays_with_new_lengths(kind, capacity, seqlen_q, is_padded):
    k_cache, v_cache, where, (keys, values) = cached(kind, capacity)
    q, lengths = draw(3, seqlen_q, 8, 128), torch.full((3,), capacity, dtype=torch.int32, device="cuda")
    pads = torch.zeros_like(lengths)
    if is_padded:
        where["cache_leftpad"] = pads

    def run():
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, causal=True, attention_chunk=512,
            return_softmax_lse=True, **where,
        )[:2]  # fmt: skip

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for held in ([1025, 1999, 514], [512, 1, 1027], [50, 0, 1536]):
        padding = [n // 3 if is_padded else 0 for n in held]
        lengths.copy_(torch.tensor(held))
        pads.copy_(torch.tensor(padding))
        graph.replay()
        for b, (length, pad) in enumerate(zip(held, padding)):
            used = [t[b : b + 1, pad:length] for t in (keys, values)]
            mask = mask_of(seqlen_q, length - pad, 512)
            exact, exact_lse = reference.attention(q[b : b + 1], *used, causal=True, mask=mask)
            base, base_lse = reference.attention(
                q[b : b + 1], *used, causal=True, mask=mask, dtype=torch.bfloat16
            )
            report = compare("out", out[b : b + 1], exact, base)
            assert report.max_error <= report.max_budget, report  # a mean of a few values says little
            report = compare("lse", lse[b : b + 1], exact_lse, base_lse)
            assert report.max_error <= report.max_budget, report


@pytest.mark.parametrize("seqlen_q", [1, 4, 50])
def test_eight_bits(seqlen_q):
    fp8, lengths = torch.float8_e4m3fn, torch.tensor([1025, 1999, 514], device="cuda", dtype=torch.int32)
    k_cache, v_cache = (draw(3, 2048, 2, 128).to(fp8) for _ in range(2))
    q, k, v = (draw(3, seqlen_q, heads, 128).to(fp8) for heads in (8, 2, 2))
    angle = torch.rand(2100, 32, device="cuda") * 6
    runs = []
    for device in ("cpu", "cuda"):
        tensors = [t.to(device) for t in (q, k_cache.clone(), v_cache.clone(), k, v)]
        out = flash_attn_with_kvcache(
            *tensors, cache_seqlens=(lengths - 50).to(device), rotary_cos=angle.cos().to(device),
            rotary_sin=angle.sin().to(device), causal=True, attention_chunk=512,
        )  # fmt: skip
        runs.append([t.float().cpu() for t in (out, *tensors[1:3])])
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=2e-2, atol=2e-2)
    assert torch.equal(runs[1][2], runs[0][2])
    torch.testing.assert_close(
        runs[1][1], runs[0][1], rtol=0.13, atol=2**-9
    )  # sines differ in their last bit


@pytest.mark.parametrize("seqlen_q", [1, 4, 50])
def test_cached_attention_waits_for_nothing(seqlen_q):
    k_cache, v_cache, where, _ = cached("paged", 2048)
    q, lengths = draw(3, seqlen_q, 8, 128), torch.full((3,), 1200, dtype=torch.int32, device="cuda")
    with no_waiting():
        out = flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, attention_chunk=512, **where
        )
    assert out.shape == q.shape
