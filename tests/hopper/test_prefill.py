"""The Hopper forward on caches against the float64 reference, on a Hopper GPU; skipped without one."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import caches
from backends import Backend
from tilewise import KVCache, PagedKVCache, attention_with_cache, reference
from tilewise.core.problem import Inputs, Options, describe
from tilewise.dispatch import choice as dispatch
from tilewise.flash_attn import flash_attn_with_kvcache
from tilewise.gpu.hopper.forward import launch
from tilewise.testing import compare

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA Hopper GPU")

LENGTHS = [1500, 0, 2900, 1, 257, 64]
RAGGED = [300, 5, 129, 1, 257, 0]  # queries of these sequences


class Cached:
    """Queries and a cache for them, as `caches` fills one; its keys and values."""

    def __init__(
        self,
        queries: int | list[int],
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (128, 128),
        page_size: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        lengths: list[int] = LENGTHS,
        sinks: bool = False,
        leftpad: list[int] | None = None,
    ) -> None:
        batch, capacity = len(lengths), max(256, -(-max(lengths) // 256) * 256)
        own = queries if isinstance(queries, list) else [queries] * batch
        self.ends, self.lengths = [0, *accumulate(own)], lengths
        self.leftpad = leftpad or [0] * batch
        q = torch.randn(self.ends[-1], heads[0], dims[0], device="cuda").to(dtype)
        self.k, self.v = (torch.randn(batch, capacity, heads[1], d, device="cuda").to(dtype) for d in dims)
        stored, extras = caches.cached([self.k, self.v], lengths, leftpad, page_size)
        if isinstance(queries, list):
            extras["cu_seqlens_q"] = torch.tensor(self.ends, dtype=torch.int32, device="cuda")
        else:
            q = q.view(batch, queries, *q.shape[1:])
        if sinks:
            extras["sinks"] = torch.randn(heads[0], device="cuda")
        self.inputs = Inputs(q, *stored, **extras)

    def check(self, out: Tensor, lse: Tensor, **options: Any) -> None:
        """By the project's rule, all sequences together."""
        out = out.flatten(0, -3)
        lse = lse.transpose(0, 1).flatten(1) if lse.ndim == 3 else lse
        q, sinks = self.inputs.query.flatten(0, -3), self.inputs.sinks
        for n, found in enumerate((out, lse)):
            exact, base = (
                torch.cat(
                    [
                        reference.attention(
                            q[None, start:end], self.k[b : b + 1, pad:length], self.v[b : b + 1, pad:length],
                            dtype=dtype, sinks=sinks, **options,
                        )[n][0]
                        for b, ((start, end), pad, length) in enumerate(
                            zip(pairwise(self.ends), self.leftpad, self.lengths)
                        )
                    ],
                    n,
                )
                for dtype in (torch.float64, out.dtype)
            )  # fmt: skip
            report = compare(("out", "lse")[n], found, exact, base)
            assert report.is_within, report

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        """The forward kernel's out and lse, checked."""
        left, right = options.get("window", (None, None))
        given = {name: value for name, value in options.items() if name != "window"}
        problem = describe(self.inputs, Options(window_left=left, window_right=right, **given))
        assert dispatch.choose(problem) == "hopper"
        out, lse = launch.forward(problem, self.inputs)
        self.check(out, lse, **options)
        return out, lse


@pytest.mark.parametrize("page_size", [None, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [17, 300, RAGGED], ids=str)
def test_queries_and_pages(queries: int | list[int], dim: int, page_size: int | None):
    Cached(queries, (8, 2), (dim, dim), page_size).run(causal=True)


@pytest.mark.parametrize("heads", [(8, 2), (9, 3), (4, 4), (64, 1)], ids=str)
@pytest.mark.parametrize("queries", [20, RAGGED], ids=str)
def test_groups(queries: int | list[int], heads: tuple[int, int]):
    Cached(queries, heads).run(causal=True)


@pytest.mark.parametrize("dims", [(80, 72), (96, 96), (128, 64), (192, 128), (256, 256), (40, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
def test_head_sizes(dims: tuple[int, int], dtype: torch.dtype, page_size: int | None):
    Cached(200, (4, 2), dims, page_size, dtype).run(causal=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": (300, 1)},
    "causal window": {"window": (70, 0)},
    "left window": {"window": (1000, None)},
    "softcap": {"softcap": 3.0, "causal": True},
    "scale": {"scale": 0.3},
    "sinks": {"causal": True},
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("page_size", [None, 16, 128])
@pytest.mark.parametrize("queries", [150, RAGGED], ids=str)
def test_options(case: str, page_size: int | None, queries: int | list[int]):
    Cached(queries, page_size=page_size, sinks=case == "sinks").run(**OPTIONS[case])


@pytest.mark.parametrize("page_size", [None, 8, 16, 64, 256])
@pytest.mark.parametrize("queries", [150, RAGGED], ids=str)
def test_left_padding(page_size: int | None, queries: int | list[int]):
    cached = Cached(queries, (8, 2), page_size=page_size, leftpad=[77, 0, 2833, 0, 250, 64])
    cached.run(causal=True)
    cached.run(window=(300, 1))


def test_many_sequences_with_one_token_and_one_with_many():
    lengths = [1 + 389 * n % 2500 for n in range(60)]
    Cached([1] * 59 + [700], (8, 2), page_size=16, lengths=lengths).run(causal=True)


@pytest.mark.parametrize("page_size", [None, 64])
def test_four_warpgroups_in_a_block(page_size: int | None):
    """Head size 64 with many long rows."""
    cached = Cached(2117, (16, 8), (64, 64), page_size, lengths=[2117, 3000])
    cached.run()
    cached.run(window=(1500, 0))


@pytest.mark.parametrize("page_size", [None, 16])
def test_the_same_bits_every_time(page_size: int | None):
    cached = Cached(RAGGED, (8, 2), page_size=page_size)
    first = cached.run(causal=True)
    for _ in range(20):
        again = cached.run(causal=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("page_size", [None, 16, 256])
def test_new_tokens_by_flash_attn(page_size: int | None):
    cached = Cached(130, (8, 2), page_size=page_size, lengths=[n + 130 for n in LENGTHS])
    held = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    new = [torch.randn(len(LENGTHS), 130, 2, 128, device="cuda").bfloat16() for _ in range(2)]
    q, k, v = cached.inputs[:3]
    out, lse = flash_attn_with_kvcache(
        q, k, v, *new, cache_seqlens=held, causal=True, block_table=cached.inputs.page_table,
        return_softmax_lse=True,
    )  # fmt: skip
    for b, start in enumerate(held.tolist()):
        for t, tokens in zip((cached.k, cached.v), new, strict=True):
            t[b, start : start + 130] = tokens[b]
    cached.check(out, lse, causal=True)


@pytest.mark.parametrize("is_paged", [False, True])
def test_a_prompt_in_chunks_is_the_prompt(is_paged: bool):
    """Of three chunks every query attends to all tokens so far, as in one pass."""
    q, k, v = (torch.randn(1, 1000, h, 128, device="cuda").bfloat16() for h in (4, 2, 2))
    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    cache = PagedKVCache(8, 256, 2, 128, **sizes) if is_paged else KVCache(1, 1024, 2, 128, **sizes)
    if isinstance(cache, PagedKVCache):
        cache.allocate()
    cuts = (0, 500, 517, 1000)
    chunks = [
        attention_with_cache(*(t[:, a:b] for t in (q,)), cache, k[:, a:b], v[:, a:b])
        for a, b in pairwise(cuts)
    ]
    exact, base = (reference.attention(q, k, v, causal=True, dtype=d)[0] for d in (torch.float64, q.dtype))
    assert compare("out", torch.cat(chunks, 1), exact, base).is_within


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("queries", [100, RAGGED], ids=str)
def test_a_graph_replays_with_other_lengths(queries: int | list[int], page_size: int | None):
    cached = Cached(queries, (8, 2), page_size=page_size, lengths=[1500, 600, 2900, 1100, 257, 640])
    problem = describe(cached.inputs, Options(causal=True))
    launch.forward(problem, cached.inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = launch.forward(problem, cached.inputs)
    for lengths in ([1500, 600, 2900, 1100, 257, 640], [0, 600, 130, 1, 257, 64], [1, 2, 3, 500, 0, 640]):
        cached.inputs.seqlens_k.copy_(torch.tensor(lengths))  # type: ignore[union-attr]
        cached.lengths = lengths
        graph.replay()
        cached.check(out, lse, causal=True)


def test_gradients_of_queries_come_from_another_backend():
    cached = Cached(40, lengths=[300, 200])
    q = cached.inputs.query.requires_grad_()
    lengths = torch.tensor([300, 200], device="cuda", dtype=torch.int32)
    cache = KVCache(2, 512, 2, 128, dtype=torch.bfloat16, device="cuda")
    cache.key.copy_(cached.inputs.key)
    cache.value.copy_(cached.inputs.value)
    cache.lengths = lengths
    out = attention_with_cache(q, cache)
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_what_it_does_not_take_is_refused_by_name():
    pages = torch.empty(6, 24, 2, 128, dtype=torch.bfloat16, device="cuda")
    lengths = torch.tensor([100], dtype=torch.int32, device="cuda")
    table = torch.arange(6, dtype=torch.int32, device="cuda")[None]
    q = torch.empty(1, 50, 4, 128, dtype=torch.bfloat16, device="cuda")
    problem = describe(Inputs(q, pages, pages, seqlens_k=lengths, page_table=table), Options())
    assert "page sizes" in (Backend("hopper").supports(problem) or "")
