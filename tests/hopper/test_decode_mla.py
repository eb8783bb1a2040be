"""Decoding of absorbed latent attention on a Hopper GPU against the float64 reference; else skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import caches
from tilewise import KVCache, PagedKVCache, attention_with_cache, reference
from tilewise.core.problem import Inputs, Options, describe
from tilewise.dispatch import choice as dispatch
from tilewise.gpu.hopper import plan
from tilewise.gpu.hopper.decode import mla_launch as decode_mla_launch
from tilewise.testing import compare

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA Hopper GPU")

LENGTHS = [1500, 0, 3000, 1, 257, 64]
DIM, DIM_V = decode_mla_launch.HEAD_DIMS


def cached(
    queries: int,
    heads: int,
    page_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    lengths: list[int] = LENGTHS,
) -> tuple[Inputs, Tensor]:
    """Queries and a cache for them, as `caches` fills one; its keys."""
    batch, capacity = len(lengths), -(-max(lengths) // 256) * 256
    q = torch.randn(batch, queries, heads, DIM, device="cuda").to(dtype)
    k = torch.randn(batch, capacity, 1, DIM, device="cuda").to(dtype)
    (stored,), where = caches.cached([k], lengths, page_size=page_size)
    return Inputs(q, stored, stored[..., :DIM_V], **where), k


def check(inputs: Inputs, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    left, right = options.pop("window", (None, None))
    problem = describe(inputs, Options(window_left=left, window_right=right, **options))
    assert decode_mla_launch.supports(problem) is None
    out, lse = plan.forward(problem, inputs)
    assert inputs.seqlens_k is not None
    for b, length in enumerate(inputs.seqlens_k.tolist()):
        own = inputs.query[b : b + 1], k[b : b + 1, :length], k[b : b + 1, :length, :, :DIM_V]
        exact, base = (
            reference.attention(*own, dtype=dtype, window=(left, right), sinks=inputs.sinks, **options)
            for dtype in (torch.float64, out.dtype)
        )
        assert compare("out", out[b : b + 1], exact[0], base[0]).is_within
        assert compare("lse", lse[b : b + 1], exact[1], base[1]).is_within
    return out, lse


@pytest.mark.parametrize("queries", [1, 2, 4, 16])
@pytest.mark.parametrize("heads", [1, 16, 24, 64, 96, 128])
def test_queries_and_heads(queries: int, heads: int):
    check(*cached(queries, heads), causal=True)


@pytest.mark.parametrize("page_size", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_pages(page_size: int, dtype: torch.dtype):
    check(*cached(2, 16, page_size, dtype), causal=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": (300, 1)},
    "left_window": {"window": (1000, None)},
    "softcap": {"softcap": 3.0, "causal": True},
    "scale": {"scale": 0.3},
    "sinks": {"causal": True},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str):
    inputs, k = cached(4, 16, 64)
    if case == "sinks":
        inputs = inputs._replace(sinks=torch.randn(16, device="cuda"))
    check(inputs, k, **OPTIONS[case])


@pytest.mark.parametrize("heads", [16, 128])
def test_many_sequences_of_different_lengths(heads: int):
    """So many that workers have several splits, and a segment's start counts."""
    check(*cached(1, heads, 64, lengths=[1 + 389 * n % 2500 for n in range(40)]), causal=True)


def test_workers_with_whole_segments():
    check(*cached(1, 128, lengths=[777] * 64), causal=True)


def test_the_same_bits_every_time():
    inputs, k = cached(2, 128)
    first = check(inputs, k, causal=True)
    problem = describe(inputs, Options(causal=True))
    for _ in range(20):
        for a, b in zip(first, plan.forward(problem, inputs), strict=True):
            assert torch.equal(a, b)


def test_a_graph_replays_with_other_lengths():
    """Steps of generation, captured once: every replay appends a token and sees one key more."""
    cache = KVCache(2, 600, 1, DIM, head_dim_v=DIM_V, dtype=torch.bfloat16, device="cuda", value_in_key=True)
    q, k = (torch.randn(2, 1, h, DIM, device="cuda").bfloat16() for h in (16, 1))
    cache.append(torch.randn(2, 300, 1, DIM, device="cuda").bfloat16())
    attention_with_cache(q, cache, k, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_with_cache(q, cache, k, backend="hopper")
    for step in range(70):
        k.normal_()
        graph.replay()
        length = 302 + step
        own = cache.key[:, :length], cache.value[:, :length]
        exact, base = (reference.attention(q, *own, dtype=d)[0] for d in (torch.float64, q.dtype))
        assert compare("out", out, exact, base).is_within


def test_who_serves():
    """Small pages go to the Triton kernels."""
    q = torch.randn(1, 1, 16, DIM, device="cuda").bfloat16()
    for page_size, backend in ((64, "hopper"), (16, "triton")):
        cache = PagedKVCache(
            1024 // page_size, page_size, 1, DIM, head_dim_v=DIM_V, dtype=q.dtype, device="cuda",
            max_seqlen=512, value_in_key=True,
        )  # fmt: skip
        cache.allocate()
        cache.append(torch.randn(1, 300, 1, DIM, device="cuda").bfloat16())
        batch = cache.reserve(None, 0)
        call = {"seqlens_k": batch.lengths, "page_table": batch.page_table}
        problem = describe(Inputs(q, cache.key, cache.value, **call), Options())
        assert dispatch.choose(problem) == backend
