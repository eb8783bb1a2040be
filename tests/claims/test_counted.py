"""Claims that need no clock: their values against formulas of their own."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.lab.claims import report
from tilewise.lab.claims.claim import CLAIMS, Setting

CPU = Setting("cpu")
COUNTED = {name: claim for name, claim in CLAIMS.items() if claim.is_counted}


@pytest.fixture(scope="module")
def measured():
    return {name: claim.measure(CPU) for name, claim in COUNTED.items()}


def test_what_does_not_hold_says_why_and_what_holds_does_not(measured):
    for name, claim in COUNTED.items():
        assert claim.holds(measured[name].value) != bool(claim.why), name
        assert len(report.line(claim, measured[name]._asdict())) == len(report.HEADER)


def test_they_are_the_same_wherever_they_are_measured(measured):
    """Asked for a GPU, they are counted all the same."""
    for name, claim in COUNTED.items():
        if name != "fp8-error":
            assert claim.measure(Setting("cuda")) == measured[name], name


def test_score_matrices(measured):
    sizes = {
        "512": (512, 1e6),
        "2k": (2048, 1e6),
        "4k": (4096, 2**20),
        "8k": (8192, 1e6),
        "32k": (32768, 1e9),
    }
    for name, (tokens, unit) in sizes.items():
        assert measured[f"score-{name}"].value == pytest.approx(2 * tokens**2 / unit)
    assert measured["score-100k"].value == pytest.approx(2e10 / 1e12)
    assert measured["score-100k-memory"].value == pytest.approx(32 * 2e10 / 80e9)
    assert measured["score-time"].value == pytest.approx(8192**2 * 32 * 2 / 2e12 * 1e3)
    assert measured["score-time-model"].value == pytest.approx(32 * 8192**2 * 32 * 2 / 2e12 * 1e3)
    assert measured["round-trips"].value == 2 and "4 passes" in measured["round-trips"].note
    assert measured["l2-bert"].value == pytest.approx(2 * 512**2 * 16 * 56 / (40 * 2**20))
    assert measured["sram-256"].value == pytest.approx(2 * 256**2 / (163 * 1024))
    assert measured["tile-sram"].value == (128 + 64 + 64) * 128 * 2 / 1024


def test_bytes_of_the_forward(measured):
    """K and V move for each tile of 128 queries, all others once; standard attention moves S and P twice."""
    n, d = 4096, 64
    standard, tiled = 2 * (4 * n * n + 4 * n * d), 2 * (2 * n * d + n // 128 * 2 * n * d) + 4 * n
    assert measured["io-forward"].value == measured["io-8-10"].value == pytest.approx(standard / tiled)
    wider = [2 * (4 * 32768**2 + 4 * 32768 * d) for d in (64, 128)]
    assert measured["order-standard"].value == pytest.approx(wider[1] / wider[0])


def test_second_order_against_the_first(measured):
    """Head size 64, 96 KiB: keys in tiles of 192 and queries of 64, or both in tiles of 256."""
    found = []
    for n, d, key_tile, query_tile, side in (
        (2048, 64, 192, 64, 256),
        (2048, 128, 96, 96, 128),
        (4096, 64, 192, 64, 256),
        (4096, 128, 96, 96, 128),
    ):
        assert key_tile == 96 * 1024 // 2 // (4 * d) and query_tile == min(key_tile, d)
        visits = math.ceil(n / key_tile) * n  # rows, over all tiles
        first = 2 * 2 * n * d + 2 * n * d + 8 * n + visits * (3 * 2 * d + 16)
        second = 2 * (2 * n * d + n // side * 2 * n * d) + 4 * n
        arithmetic = 5 * n * n + visits * (11 + 3 * d), 5 * n * n + n // side * n * (5 + d) + n * (d + 3)
        found.append((first / second, arithmetic[0] / arithmetic[1]))
    assert measured["fa2-bytes"].value == pytest.approx(min(x for x, _ in found))
    assert measured["fa2-flops"].value == pytest.approx(min(x for _, x in found))


def test_caches(measured):
    assert measured["kv-token-70b"].value == 2 * 8 * 128 * 2 / 1024
    assert (measured["gqa-saving"].value, measured["mqa-saving"].value) == (8, 64)
    assert measured["kv-work-again"].value == sum(range(1, 101))
    assert measured["kv-work-cached"].value == 100


def test_datasheets(measured):
    clock = 312e12 / (108 * 2048)
    assert measured["speed-sram"].value == pytest.approx(108 * 128 * clock / 1e12)
    assert measured["speed-l2"].value == pytest.approx(5120 * clock / 1e12)
    assert measured["sram-faster"].value == pytest.approx(108 * 128 * clock / 2e12)
    assert measured["sram-smaller"].value == pytest.approx(80e9 / (108 * 163 * 1024))
    assert measured["vector-a100"].value == pytest.approx(312 / 19.5)
    assert measured["exp-a100"].value == pytest.approx(108 * 16 * clock / 1e12)
    assert measured["vector-h100"].value == pytest.approx(4096 / 16)
    assert measured["fp8-peak"].value == 2
    assert measured["share-fa3"].value == pytest.approx(100 * 740 / 989)
    assert measured["softmax-intensity"].value == pytest.approx(5 / 4, rel=1e-3)
    n, d = 2048, 64
    assert measured["memory-bound"].value == pytest.approx(4 * n * n * d / (8 * n * n + 8 * n * d))
    assert measured["compute-bound"].value == pytest.approx(4 * n * n * d / (8 * n * d + 4 * n))


def test_four_tokens_by_autograd(measured):
    q = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]]).double().requires_grad_()
    k = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]).double().requires_grad_()
    v = torch.arange(1.0, 17.0).view(4, 4).double().requires_grad_()
    dout = torch.tensor([[1.0], [0.0], [1.0], [0.0]]).double().expand(4, 4)
    weights = torch.softmax(q @ k.T, -1)
    dq, dk, dv = torch.autograd.grad(weights @ v, (q, k, v), dout)
    assert measured["4x4-p00"].value == pytest.approx(weights[0, 0].item())
    assert measured["4x4-sum"].value == pytest.approx((q @ k.T)[0].sub(2).exp().sum().item())
    wrong = {  # of each row, what is claimed and is not what the number rounds to
        "4x4-dq": (dq[2, :2], (-3.14, 3.14)),
        "4x4-tile-out": ((1 * v[0] + math.exp(-1) * v[1])[2:3], (5.57,)),
        "4x4-dv": (dv[:0, 0], ()),
        "4x4-dk": (dk[:0, 0], ()),
    }
    for name, (values, claimed) in wrong.items():
        said = [
            f"{value:.4f} for {number:.2f}" for value, number in zip(values.tolist(), claimed, strict=True)
        ]
        assert measured[name].value == COUNTED[name].claimed - len(said), name
        assert all(text in measured[name].note for text in said), name


def test_one_query_by_softmax(measured):
    logits, values = torch.tensor([1.0, 2, 3, 6, 2, 1]).double(), torch.arange(1.0, 7.0).double()
    e = (logits - 6).exp()
    expected = {
        "1x6-sum": e.sum(), "1x6-acc": e @ values, "1x6-out": logits.softmax(0) @ values,
        "1x6-sum-1": (logits[:3] - 3).exp().sum(), "1x6-out-1": (logits[:3] - 3).exp() @ values[:3],
        "1x6-local-sum": e[3:].sum(), "1x6-local-out": e[3:] @ values[3:], "1x6-correction": math.exp(-3),
        "1x6-old-sum": e[:3].sum(), "1x6-old-out": e[:3] @ values[:3],
    }  # fmt: skip
    for name, value in expected.items():
        assert measured[name].value == pytest.approx(float(value)), name
    assert measured["1x6-terms"].value == 1 and measured["1x6-weights"].value == 6


def test_softmax_in_float32(measured):
    assert measured["exp-largest"].value == pytest.approx(128 * math.log(2))
    assert measured["exp-smallest"].value == pytest.approx(-149 * math.log(2))
    assert measured["overflow"].value == 1 and measured["underflow"].value == 0
    assert "nan, nan, nan" in measured["underflow"].note
    assert measured["safe-weight"].value == pytest.approx(1 / (1 + math.exp(-10) + math.exp(-20)))
