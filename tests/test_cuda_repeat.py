"""Repeated calls on a GPU: what was found for one call serves the next, wherever its tensors lie."""

from __future__ import annotations

import gc

import pytest
import torch

import tilewise
from tilewise import reference, repeat
from tilewise.testing import check_attention, compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def qkv(seqlen=200, dim=64):
    return [draw(2, seqlen, 4, dim) for _ in range(3)]


def check(out, q, k, v, **options):
    exact, baseline = (reference.attention(q, k, v, dtype=t, **options)[0] for t in (torch.float64, q.dtype))
    report = compare("out", out, exact, baseline)
    assert report.max_error <= report.max_budget, report


@pytest.fixture(params=["hopper", "triton"])
def backend(request):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    repeat.clear()
    return request.param


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_new_freed_and_reused_memory(backend, layout, dim):
    order = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    for n in range(6):
        tensors = qkv(dim=dim)
        given = [t.permute(order) for t in tensors]
        out = tilewise.attention(*given, causal=True, layout=layout, backend=backend)
        check(out.permute(order), *tensors, causal=True)
        if n % 2:
            del tensors, given, out
            gc.collect()
            torch.cuda.empty_cache()
    assert len(repeat._local.runs) == 1 and None not in repeat._local.runs.values()


def test_one_address_with_other_shapes_and_strides(backend):
    flat = draw(1 << 20)
    for seqlen, stride in ((100, 256), (100, 512), (200, 256), (64, 1024), (100, 256)):
        for _ in range(2):
            x = flat.as_strided((2, seqlen, 4, 64), (seqlen * stride, stride, 64, 1))
            check(tilewise.attention(x, x, x, backend=backend), x, x, x)


def test_gradients_of_repeated_calls(backend):
    for _ in range(3):
        q, k, v = qkv()
        check_attention(q, k, v, causal=True, backend=backend)


def test_second_derivatives_of_repeated_calls(backend):
    found = []
    torch.manual_seed(0)
    x = draw(1, 100, 2, 64).requires_grad_()
    for _ in range(3):
        out = tilewise.attention(x, x, x, backend=backend)
        (first,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.float().square().sum(), x)[0])
    assert torch.isfinite(found[0]).all() and found[0].abs().max() > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_streams_and_graphs(backend):
    q, k, v = qkv()
    stream = torch.cuda.Stream()
    for _ in range(2):
        tilewise.attention(q, k, v, backend=backend)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = tilewise.attention(q, k, v, backend=backend)
        stream.synchronize()
        check(out, q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewise.attention(q, k, v, backend=backend)
    for _ in range(3):
        q.copy_(draw(*q.shape))
        tilewise.attention(*qkv(), backend=backend)  # takes memory and a plan in between
        graph.replay()
        check(out, q, k, v)


def test_a_profiler_sees_repeated_launches(backend):
    from triton import knobs

    q, k, v = qkv()
    tilewise.attention(q, k, v, backend=backend)
    names = []

    def hook(metadata):
        names.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        out = tilewise.attention(q, k, v, backend=backend)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    check(out, q, k, v)
    assert names == ["attn_fwd_kernel"]


def test_offsets_are_read_once_and_not_in_a_graph(backend):
    starts = torch.tensor([0, 50, 50, 200], dtype=torch.int32, device="cuda")
    q, k, v = (t[0] for t in qkv())
    options = {"causal": True, "backend": backend}
    expected = tilewise.attention_varlen(q, k, v, starts, starts, 150, 150, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = tilewise.attention_varlen(q, k, v, starts, starts, 150, 150, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tilewise.attention_varlen(q, k, v, starts.clone(), starts.clone(), 150, 150, **options)
    graph.replay()
    assert torch.equal(found, expected)
    starts[1] = 60  # and the next is 50
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        tilewise.attention_varlen(q, k, v, starts, starts, 150, 150, **options)


def test_nothing_kept_holds_tensors(backend):
    x = draw(2, 4096, 8, 64)  # 8 MB
    tilewise.attention(x, x, x, backend=backend)
    del x
    gc.collect()
    before = torch.cuda.memory_allocated()
    leaves = [draw(2, 4096, 8, 64).requires_grad_() for _ in range(3)]
    for _ in range(2):
        tilewise.attention(*leaves, backend=backend).sum().backward()
        tilewise.attention(*(t.detach() for t in leaves), backend=backend)
    del leaves
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 1 << 20
