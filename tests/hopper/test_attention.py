"""The Hopper kernels against the float64 reference, on a Hopper GPU; skipped without one."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import reference
from tilewise.gpu.hopper.forward.launch import MANY_ROWS
from tilewise.testing import check_attention, compare

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA Hopper GPU")

HEAD_DIMS = [
    (64, 64),
    (80, 80),
    (96, 96),
    (112, 112),
    (128, 128),
    (160, 160),
    (192, 128),
    (192, 192),
    (256, 256),
]
# around the edges of a block of 128 or 256 queries and of a key tile of 64 or 128
EDGES = [1, 63, 64, 65, 127, 129, 191, 193, 257]


def draw(seqlen: int, heads: int, dim: int, batch: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(batch, seqlen, heads, dim, device="cuda").to(dtype)


def forward_reports(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """The forward alone, by the project's rule."""
    run = tilewise.attention_varlen if "cu_seqlens_q" in options else tilewise.attention
    out, lse = run(q, k, v, return_lse=True, backend="hopper", **options)
    batch = [(q, k, v)] if q.ndim == 3 else zip(*(t.split(1) for t in (q, k, v)), strict=True)
    parts = [  # one of a batch at a time: N x N numbers of float64
        [reference.attention(*one, dtype=t, **options) for t in (torch.float64, q.dtype)] for one in batch
    ]
    exact, baseline = (map(torch.cat, zip(*of_type, strict=True)) for of_type in zip(*parts, strict=True))
    for name, found, e, b in zip(("out", "lse"), (out, lse), exact, baseline, strict=True):
        report = compare(name, found, e, b)
        assert report.is_within, report


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_head_sizes(dims: tuple[int, int], causal: bool, dtype: torch.dtype):
    q, k, v = (draw(s, 2, d, dtype=dtype) for s, d in ((301, dims[0]), (458, dims[0]), (458, dims[1])))
    check_attention(q, k, v, causal=causal, backend="hopper")


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (100, 20)},
    "left window": {"window": (100, None)},
    "right window": {"window": (None, 30)},
    "causal window": {"window": (70, 0), "causal": True},
    "softcap": {"softcap": 5.0, "causal": True},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", [*OPTIONS, "sinks"])
def test_options(name: str, dim: int):
    options = {"sinks": torch.randn(4, device="cuda"), "causal": True} if name == "sinks" else OPTIONS[name]
    check_attention(draw(333, 4, dim), draw(517, 2, dim), draw(517, 2, dim), backend="hopper", **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("steepness", [4, 20, 60])
def test_scores_that_grow_from_tile_to_tile(steepness: int, dim: int, dtype: torch.dtype):
    """From 20 on, tiles of queries fail with a reference that stays, and are done again."""
    q, k, v = (draw(s, 4, dim, batch=12, dtype=dtype) for s in (700, 1500, 1500))
    for options in ({}, {"causal": True}, {"window": (300, 20)}):
        forward_reports(q * steepness, k, v, **options)


@pytest.mark.parametrize("window", [(300, 20), (310, 0), (290, 100)])
def test_sums_too_large_for_float16_that_a_masked_tile_scales_down(window: tuple[int, int]):
    q, k, v = (draw(700, 1, 64, dtype=torch.float16) for _ in range(3))
    q[..., 0], k[..., 0] = 8, 3.0 * (torch.arange(699, -1, -1, device="cuda") // 64)[:, None]
    q[..., 1:] *= 0.1
    forward_reports(q, k, v, window=window, scale=1.0)


@pytest.mark.parametrize("seqlen_q", EDGES)
@pytest.mark.parametrize("seqlen_k", EDGES)
def test_edges_of_tiles(seqlen_q: int, seqlen_k: int):
    for dim in (64, 128):
        q, k, v = draw(seqlen_q, 4, dim), draw(seqlen_k, 4, dim), draw(seqlen_k, 4, dim)
        check_attention(q, k, v, causal=True, backend="hopper", holds_mean=False)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_work_through_many_tiles(dims: tuple[int, int], causal: bool):
    """More tiles than a GPU has SMs, so that every ring goes round and round."""
    q, k, v = (draw(1100, 16, d, batch=6) for d in (dims[0], *dims))
    forward_reports(q, k, v, causal=causal)


@pytest.mark.parametrize("steepness", [1, 20])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (1500, 0)}, {"window": (None, 300), "softcap": 5.0}], ids=str
)
def test_four_warpgroups_in_a_block(options: dict[str, Any], steepness: int):
    """Head size 64 with many long rows, where some warpgroups skip tiles that others need."""
    q, k, v = draw(2117, 16, 64), draw(2230, 8, 64), draw(2230, 8, 64)
    assert q[..., 0].numel() >= MANY_ROWS
    forward_reports(q * steepness, k, v, **options)


@pytest.mark.parametrize("group", [1, 2, 8, 3])
@pytest.mark.parametrize("seqlen_q", [1, 5, 64, 300])
def test_grouped_queries(group: int, seqlen_q: int):
    q, k, v = draw(seqlen_q, 2 * group, 128), draw(777, 2, 128), draw(777, 2, 128)
    check_attention(q, k, v, causal=True, backend="hopper", holds_mean=False)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 10)}], ids=str)
def test_packed_sequences(dim: int, options: dict[str, Any]):
    """Offsets are int64 at head size 64, int32 at the others."""
    lengths = [(5, 5), (300, 300), (1, 700), (64, 64), (129, 128), (0, 10), (700, 333), (17, 0)]
    cu_q, cu_k = (
        torch.tensor([0, *accumulate(side)], dtype=torch.int64 if dim == 64 else torch.int32, device="cuda")
        for side in zip(*lengths, strict=True)
    )
    q = torch.randn(int(cu_q[-1]), 4, dim, device="cuda").bfloat16()
    k, v = (torch.randn(int(cu_k[-1]), 2, dim, device="cuda").bfloat16() for _ in range(2))
    check_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, backend="hopper", **options)


def test_a_sequence_never_sees_its_neighbours_nan():
    cu = torch.tensor([0, 100, 200], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(200, 2, 64, device="cuda").bfloat16() for _ in range(3))
    k[100:], v[100:] = float("nan"), float("nan")
    out = tilewise.attention_varlen(q, k, v, cu, cu, backend="hopper")
    assert out[:100].isfinite().all()
    assert out[100:].isnan().all()


def test_layouts_without_copies_give_the_same_bits():
    q, k, v = (draw(333, 4, 128) for _ in range(3))
    expected = tilewise.attention(q, k, v, causal=True, backend="hopper")
    qh, kh, vh = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    by_head = tilewise.attention(qh, kh, vh, causal=True, layout="bhsd", backend="hopper")
    assert torch.equal(by_head.transpose(1, 2), expected)
    fused = torch.stack((q, k, v), 2)
    assert torch.equal(tilewise.attention(*fused.unbind(2), causal=True, backend="hopper"), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_twenty_runs_give_the_same_bits(causal: bool):
    q, k, v = (draw(2000, 8, 128) for _ in range(3))
    first = tilewise.attention(q, k, v, causal=causal, return_lse=True, backend="hopper")
    for _ in range(20):
        again = tilewise.attention(q, k, v, causal=causal, return_lse=True, backend="hopper")
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_random_problems():
    random.seed(torch.seed())
    for _ in range(60):
        dim = random.choice([64, 72, 128, 192, 256])
        heads_k = random.choice([1, 2])
        q = draw(random.randint(1, 700), heads_k * random.choice([1, 2, 3, 4]), dim, random.randint(1, 3))
        seqlen_k = random.randint(1, 900)
        k, v = (draw(seqlen_k, heads_k, dim, q.shape[0]) for _ in range(2))
        options: dict[str, Any] = {"causal": random.random() < 0.5}
        if random.random() < 0.4:
            options["window"] = (random.choice([None, random.randint(0, 300)]), random.randint(0, 100))
        if random.random() < 0.2:
            options["softcap"] = random.uniform(1, 30)
        if random.random() < 0.2:
            options["sinks"] = torch.randn(q.shape[2], device="cuda")
        forward_reports(q, k, v, **options)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_special_values_propagate(value: float):
    q, k, v = (draw(200, 2, 64) for _ in range(3))
    k[0, 150, 0] = value
    out = tilewise.attention(q, k, v, causal=True, backend="hopper")
    exact, _ = reference.attention(q, k, v, causal=True)
    assert torch.equal(out.isnan(), exact.isnan())
    assert out[0, :150].isfinite().all()


def test_cuda_graph_replays_with_new_values():
    q, k, v = (draw(500, 4, 64) for _ in range(3))
    tilewise.attention(q, k, v, causal=True, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewise.attention(q, k, v, causal=True, backend="hopper")
    for _ in range(3):
        q.normal_()
        graph.replay()
        assert torch.equal(out, tilewise.attention(q, k, v, causal=True, backend="hopper"))


def test_what_it_does_not_take_is_refused_by_name():
    q = draw(64, 2, 64)
    with pytest.raises(NotImplementedError, match=r"hopper.*bias.*triton"):
        tilewise.attention(q, q, q, bias=torch.zeros(1, 1, 64, 64, device="cuda"), backend="hopper")
    with pytest.raises(NotImplementedError, match=r"hopper.*float32"):
        tilewise.attention(*(q.float(),) * 3, backend="hopper")
