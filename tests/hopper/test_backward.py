"""Gradients of the Hopper kernels against the float64 reference, on a Hopper GPU; skipped without one."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import reference
from tilewise.testing import check_attention, compare

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA Hopper GPU")

# around the edges of a tile of 64 or 128 queries and of 128 keys
EDGES = [1, 63, 65, 127, 128, 129, 257]
DIMS = [(64, 64), (80, 80), (96, 96), (112, 112), (128, 64), (128, 128), (136, 136), (192, 128), (256, 256)]


def draw(seqlen: int, heads: int, dim: int, batch: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(batch, seqlen, heads, dim, device="cuda").to(dtype)


@pytest.mark.parametrize("seqlen_q", EDGES)
@pytest.mark.parametrize("seqlen_k", EDGES)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_edges_of_tiles(seqlen_q: int, seqlen_k: int, dims: tuple[int, int]):
    q, k, v = draw(seqlen_q, 4, dims[0]), draw(seqlen_k, 2, dims[0]), draw(seqlen_k, 2, dims[1])
    for options in ({}, {"causal": True}, {"window": (50, 10)}):
        check_attention(q, k, v, backend="hopper", holds_mean=False, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_sizes_and_dtypes(dims: tuple[int, int], dtype: torch.dtype):
    q, k, v = (draw(n, 2, d, dtype=dtype) for n, d in ((301, dims[0]), (458, dims[0]), (458, dims[1])))
    for options in ({}, {"causal": True}, {"softcap": 5.0}):
        check_attention(q, k, v, backend="hopper", **options)


@pytest.mark.parametrize(
    "shape", [(1, 1000, 8, 8), (3, 500, 12, 12), (1, 700, 16, 2), (2, 300, 33, 33)], ids=str
)
@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_that_blocks_share(dim: int, shape: tuple[int, int, int, int]):
    """Fewer tiles of keys than SMs, and a few more."""
    batch, seqlen, heads, kv_heads = shape
    q, k, v = (draw(seqlen + n, h, dim, batch) for n, h in ((0, heads), (40, kv_heads), (40, kv_heads)))
    for options in ({}, {"causal": True}, {"softcap": 5.0}):
        check_attention(q, k, v, backend="hopper", **options)


def test_packed_sequences():
    lengths = [(5, 5), (300, 300), (1, 700), (64, 64), (129, 128), (0, 10), (700, 333), (17, 0)]
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(side)], dtype=torch.int32, device="cuda")
        for side in zip(*lengths, strict=True)
    )
    for dim, dim_v in ((64, 64), (128, 128), (192, 128), (192, 192)):
        if dim == 192:  # offsets may be either
            cu_q, cu_k = cu_q.long(), cu_k.long()
        q = torch.randn(int(cu_q[-1]), 4, dim, device="cuda").bfloat16()
        k, v = (torch.randn(int(cu_k[-1]), 2, d, device="cuda").bfloat16() for d in (dim, dim_v))
        check_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, backend="hopper")


def test_random_problems():
    random.seed(torch.seed())
    for _ in range(40):
        heads_k, dim = random.choice([1, 2]), random.choice([40, 64, 72, 128, 192, 256])
        q = draw(random.randint(1, 700), heads_k * random.choice([1, 2, 3]), dim, random.randint(1, 3))
        seqlen_k = random.randint(1, 900)
        k, v = (draw(seqlen_k, heads_k, dim, q.shape[0]) for _ in range(2))
        options: dict[str, Any] = {"causal": random.random() < 0.5}
        if random.random() < 0.4:
            options["window"] = (random.choice([None, random.randint(0, 300)]), random.randint(0, 100))
        if random.random() < 0.3:
            options["sinks"] = torch.randn(q.shape[2], device="cuda")
        check_attention(q, k, v, backend="hopper", holds_mean=False, **options)


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    return torch.autograd.grad(tilewise.attention(*leaves, **options), leaves, dout)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 50)}], ids=str)
def test_deterministic_mode_gives_the_same_bits(options: dict[str, Any], dims: tuple[int, int]):
    q, k, v, dout = (draw(3000, 8, d) for d in (*dims[:1], *dims, dims[1]))
    first = gradients(q, k, v, dout, deterministic=True, backend="hopper", **options)
    for _ in range(10):
        again = gradients(q, k, v, dout, deterministic=True, backend="hopper", **options)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("lengths", [(70, 900), (900, 70), (300, 300)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic_gradients(dim: int, lengths: tuple[int, int]):
    """With more keys than queries a window leaves whole tiles of keys that no query sees."""
    q, k, v = draw(lengths[0], 4, dim), draw(lengths[1], 2, dim), draw(lengths[1], 2, dim)
    for options in ({}, {"causal": True}, {"window": (50, 10)}, {"window": (50, None)}):
        check_attention(q, k, v, deterministic=True, backend="hopper", holds_mean=False, **options)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("lengths", [(301, 458), (8, 2000)], ids=str)
def test_rows_of_large_scores(lengths: tuple[int, int], dims: tuple[int, int]):
    """All keys of a row are equal, and integers, so that no product is rounded; few queries are decoded.

    Scores reach 2^30 to 2^31 in units of log2, where a float32 has steps of 128. Steps of 256, beyond, are
    more than its exponents can make up for: so columns from 96 on are 0.
    """
    query = torch.randint(-9, 10, (2, lengths[0], 4, dims[0]), device="cuda").bfloat16()
    query[..., 96:] = 0
    key = torch.randint(-9, 10, (2, 1, 2, dims[0]), device="cuda").bfloat16()
    key = key.expand(-1, lengths[1], -1, -1).contiguous()
    value, dout = draw(lengths[1], 2, dims[1]), draw(lengths[0], 4, dims[1])
    for options in ({}, {"causal": True}, {"deterministic": True}):
        for scale in (64.0, 2.0**20):
            found = gradients(query, key, value, dout, scale=scale, backend="hopper", **options)[2]
            exact, baseline = (
                reference.attention_backward(
                    dout, query, key, value, scale=scale, dtype=dtype, **options
                ).value
                for dtype in (torch.float64, torch.bfloat16)
            )
            report = compare("dvalue", found, exact, baseline)
            assert report.max_error <= report.max_budget, report


def test_large_logits_in_float16_have_finite_gradients():
    q, k, v, dout = (draw(500, 4, 128, dtype=torch.float16) for _ in range(4))
    assert all(g.isfinite().all() for g in gradients(20 * q, k, v, dout, causal=True, backend="hopper"))


@pytest.mark.parametrize("heads", [8, 18, 5])
def test_memory_beyond_gradients_is_one_float32_dq_and_three_floats_a_row(heads: int):
    """With 18 and 5 heads blocks share tiles of keys, up to two for each SM with a float32 dK and dV.

    Those of 18 fit into dq.
    """
    q, k, v, dout = (draw(4096, heads, 128) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = tilewise.attention(*leaves, backend="hopper")
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(out, leaves, dout)
    extra = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    splits = 2 * sms * 4 * 256 * 128 if heads == 5 else 0
    assert extra <= 4 * q.numel() + 12 * q.numel() // 128 + splits + (1 << 20)
