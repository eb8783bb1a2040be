"""The Hopper decoding kernels against the float64 reference, on a Hopper GPU; skipped without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import caches
from tilewise import KVCache, attention_with_cache, reference
from tilewise.core.problem import Inputs, Options, describe
from tilewise.core.signature import Request
from tilewise.dispatch import plans
from tilewise.flash_attn import flash_attn_with_kvcache
from tilewise.gpu.hopper import plan
from tilewise.gpu.hopper.decode import launch as decode_launch
from tilewise.gpu.hopper.decode.arguments import DecodeConfig
from tilewise.testing import compare

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA Hopper GPU")

LENGTHS = [1500, 0, 5000, 1, 257, 64]


def cached(
    queries: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    lengths: list[int] = LENGTHS,
    leftpad: list[int] | None = None,
) -> tuple[Inputs, Tensor, Tensor]:
    """Queries and a cache for them, as `caches` fills one; its keys and values."""
    batch, capacity = len(lengths), -(-max(lengths) // 256) * 256
    q = torch.randn(batch, queries, heads[0], dims[0], device="cuda").to(dtype)
    k, v = (torch.randn(batch, capacity, heads[1], d, device="cuda").to(dtype) for d in dims)
    stored, where = caches.cached([k, v], lengths, leftpad, page_size)
    return Inputs(q, *stored, **where), k, v


def check(
    inputs: Inputs, k: Tensor, v: Tensor, config: dict[str, Any] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    left, right = options.pop("window", (None, None))
    problem = describe(inputs, Options(window_left=left, window_right=right, **options))
    assert decode_launch.supports(problem) is None
    cfg: DecodeConfig = replace(decode_launch.decode_config(problem), **(config or {}))
    out, lse = decode_launch.forward(decode_launch.KERNELS, problem, inputs, cfg)
    assert inputs.seqlens_k is not None
    lengths = inputs.seqlens_k.tolist()
    leftpad = [0] * len(lengths) if inputs.leftpad_k is None else inputs.leftpad_k.tolist()
    for b, (pad, length) in enumerate(zip(leftpad, lengths)):
        extras = {n: t for n in ("sinks", "alibi_slopes") if (t := getattr(inputs, n)) is not None}
        extras = {n: t[b : b + 1] if t.ndim == 2 else t for n, t in extras.items()}
        own = inputs.query[b : b + 1], k[b : b + 1, pad:length], v[b : b + 1, pad:length]
        exact, base = (
            reference.attention(*own, dtype=dtype, window=(left, right), **options, **extras)
            for dtype in (torch.float64, out.dtype)
        )
        assert compare("out", out[b : b + 1], exact[0], base[0]).is_within
        assert compare("lse", lse[b : b + 1], exact[1], base[1]).is_within
    return out, lse


@pytest.mark.parametrize("queries", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("heads", [(8, 2), (9, 3), (4, 4), (64, 1)], ids=str)
def test_queries_and_groups(queries: int, heads: tuple[int, int]):
    check(*cached(queries, heads, (128, 128)), causal=True)


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages(page_size: int, dim: int):
    check(*cached(3, (8, 2), (dim, dim), page_size), causal=True)


@pytest.mark.parametrize("page_size", [None, 8, 16, 64, 256])
@pytest.mark.parametrize("dim", [64, 128])
def test_left_padding(page_size: int | None, dim: int):
    inputs, k, v = cached(3, (8, 2), (dim, dim), page_size, leftpad=[77, 0, 4931, 0, 250, 64])
    check(inputs, k, v, causal=True)
    check(inputs, k, v, window=(300, 1))


def in_8_bits(inputs: Inputs) -> tuple[Inputs, Tensor, Tensor]:
    """Pages as float8_e4m3fn, with a scale for each page and head, and what keys and values they hold."""
    scales = [2.0 ** torch.randint(-3, 4, (len(t), t.shape[2]), device="cuda") for t in inputs[1:3]]
    pools, (k, v) = caches.in_8_bits(inputs[1:3], scales, inputs.page_table)
    given = dict(zip(("key", "value", "key_scale", "value_scale"), (*pools, *scales)))
    return inputs._replace(**given), k, v


@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (48, 32), (112, 96)], ids=str)
@pytest.mark.parametrize("page_size", [16, 32, 64, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_8_bit_pages(dims: tuple[int, int], page_size: int, dtype: torch.dtype):
    for queries in (1, 5, 40):
        check(*in_8_bits(cached(queries, (8, 2), dims, page_size, dtype)[0]), causal=True)


@pytest.mark.parametrize("dims", [(128, 128), (112, 96)], ids=str)
def test_8_bit_pages_of_several_tiles_of_rows_have_the_same_bits(dims: tuple[int, int]):
    """Their keys come from the L2 cache: without fences 2% of such launches had a wrong row."""
    for _ in range(40):
        inputs, _, _ = in_8_bits(cached(40, (8, 2), dims, 16)[0])
        problem = describe(inputs, Options(causal=True))
        cfg = decode_launch.decode_config(problem)
        calls = [decode_launch.forward(decode_launch.KERNELS, problem, inputs, cfg) for _ in range(25)]
        assert all(torch.equal(a, b) for call in calls[1:] for a, b in zip(calls[0], call))


@pytest.mark.parametrize("queries", [1, 7, 300])
@pytest.mark.parametrize("page_size", [16, 128])
def test_8_bit_pages_beside_each_other(page_size: int, queries: int):
    """Keys and values side by side, heads outside of tokens, as vLLM has them; no scale is a power of two."""
    inputs, k, v = in_8_bits(cached(queries, (8, 2), (128, 128), page_size)[0])
    pool = torch.cat((inputs.key, inputs.value), -1).transpose(1, 2).contiguous().transpose(1, 2)
    key, value = pool.split(128, -1)
    ones = torch.ones_like(inputs.key_scale)
    inputs = inputs._replace(key=key, value=value, key_scale=0.37 * ones, value_scale=2.9 * ones)
    k, v = (caches.in_rows(t.float() * f, inputs.page_table) for t, f in ((key, 0.37), (value, 2.9)))
    out, lse, _ = plans.attend(inputs, Options(causal=True), "hopper", Request())
    for b, length in enumerate(inputs.seqlens_k.tolist()):
        own = inputs.query[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length]
        exact, base = (
            reference.attention(own[0], *(t.to(d) for t in own[1:]), dtype=d, window=(None, 0))
            for d in (torch.float64, torch.bfloat16)
        )
        assert compare("out", out[b : b + 1], exact[0], base[0]).is_within
        assert compare("lse", lse[b : b + 1], exact[1], base[1]).is_within


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_queries_of_any_size_with_8_bit_pages(size: float):
    """They become float16 over powers of two."""
    inputs, k, v = in_8_bits(cached(3, (8, 2), (128, 128), 64)[0])
    check(inputs._replace(query=inputs.query * size), k, v, scale=0.1 / size)


@pytest.mark.parametrize("case", ["window", "softcap", "sinks", "alibi", "everything"])
def test_options_with_8_bit_pages(case: str):
    inputs, k, v = in_8_bits(cached(4, (8, 2), (128, 128), 64)[0])
    if case in ("sinks", "everything"):
        inputs = inputs._replace(sinks=torch.randn(8, device="cuda"))
    if case in ("alibi", "everything"):
        inputs = inputs._replace(alibi_slopes=torch.rand(len(LENGTHS), 8, device="cuda"))
    check(inputs, k, v, **OPTIONS[case])


@pytest.mark.parametrize("dims", [(64, 64), (80, 72), (96, 96), (128, 64), (24, 24), (80, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_head_sizes(dims: tuple[int, int], dtype: torch.dtype):
    check(*cached(2, (6, 2), dims, 16, dtype))


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (300, 1)},
    "causal_window": {"window": (70, 0)},
    "left_window": {"window": (1000, None)},
    "softcap": {"softcap": 3.0, "causal": True},
    "scale": {"scale": 0.3},
    "sinks": {"causal": True},
    "alibi": {"causal": True},
    "everything": {"window": (200, 0), "softcap": 5.0},
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("page_size", [None, 16])
def test_options(case: str, page_size: int | None):
    inputs, k, v = cached(4, (8, 2), (128, 128), page_size)
    if case in ("sinks", "everything"):
        inputs = inputs._replace(sinks=torch.randn(8, device="cuda"))
    if case in ("alibi", "everything"):
        inputs = inputs._replace(alibi_slopes=torch.rand(len(LENGTHS), 8, device="cuda"))
    check(inputs, k, v, **OPTIONS[case])


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("queries", [1, 8])
def test_many_sequences_of_different_lengths(queries: int, page_size: int | None):
    """So many that workers have several splits, and a segment's start counts."""
    lengths = [1 + 389 * n % 2500 for n in range(40)]
    inputs, k, v = cached(queries, (8, 2), (128, 128), page_size, lengths=lengths)
    check(inputs, k, v, causal=True)
    check(inputs, k, v, {"START_UNITS": 0}, window=(300, 0))


@pytest.mark.parametrize("stages", [2, 4])
def test_stages(stages: int):
    check(*cached(3, (8, 2), (128, 128)), {"STAGES": stages}, causal=True)


def test_many_sequences():
    lengths = torch.randint(0, 900, (200,)).tolist()
    check(*cached(1, (4, 1), (128, 128), lengths=lengths), causal=True)


@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("batch", [16, 4])
def test_workers_with_whole_segments(queries: int, batch: int):
    """128 segments of one length, which 128 workers store without the merging kernel, and 32."""
    check(*cached(queries, (32, 8), (128, 128), lengths=[1111] * batch), causal=True)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_new_tokens(page_size: int | None, dtype: torch.dtype):
    """One launch writes them where they belong and hands the lengths with them to the attention behind it."""
    inputs, k, v = cached(2, (8, 2), (128, 128), page_size, lengths=[max(n, 2) for n in LENGTHS])
    held = (inputs.seqlens_k - 2).to(dtype)
    new = [torch.randn(len(LENGTHS), 2, 2, 128, device="cuda").bfloat16() for _ in range(2)]
    out = flash_attn_with_kvcache(
        inputs.query, inputs.key, inputs.value, *new, cache_seqlens=held, causal=True,
        block_table=inputs.page_table,
    )  # fmt: skip
    for b, start in enumerate(held.tolist()):
        own = [t[b : b + 1, : start + 2].clone() for t in (k, v)]
        for t, tokens in zip(own, new, strict=True):
            t[0, start:] = tokens[b]
        exact, base = (
            reference.attention(inputs.query[b : b + 1], *own, causal=True, dtype=d)[0]
            for d in (torch.float64, out.dtype)
        )
        assert compare("out", out[b : b + 1], exact, base).is_within


def test_the_same_bits_every_time():
    inputs, k, v = cached(2, (8, 2), (128, 128), 16)
    first = check(inputs, k, v, causal=True)
    problem = describe(inputs, Options(causal=True))
    for _ in range(20):
        for a, b in zip(first, plan.forward(problem, inputs), strict=True):
            assert torch.equal(a, b)


def test_a_graph_replays_with_other_lengths():
    """Steps of generation, captured once: every replay appends a token and sees one key more."""
    cache = KVCache(3, 600, 2, 64, dtype=torch.bfloat16, device="cuda")
    q, k, v = (torch.randn(3, 1, h, 64, device="cuda").bfloat16() for h in (4, 2, 2))
    cache.append(*(torch.randn(3, 300, 2, 64, device="cuda").bfloat16() for _ in range(2)))
    attention_with_cache(q, cache, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_with_cache(q, cache, k, v)
    for step in range(100):
        assert cache.lengths.tolist() == [301 + step] * 3
        k.normal_()
        v.normal_()
        graph.replay()
        length = 302 + step
        own = cache.key[:, :length], cache.value[:, :length]
        exact, base = (reference.attention(q, *own, dtype=d)[0] for d in (torch.float64, q.dtype))
        assert compare("out", out, exact, base).is_within
