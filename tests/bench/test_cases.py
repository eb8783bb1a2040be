"""The suites are what they say, and work is counted as the formulas say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tilewise.lab.bench.cases import Case, decode, dense, packed
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.inputs.masks import MASKS, document_lengths
from tilewise.lab.bench.suites import SUITES, find_suite


def all_cases(name: str, quick: bool) -> list[Case]:
    return list(SUITES[name].build(quick, SUITES[name].device or "cpu"))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", SUITES)
def test_names_are_unique_and_cases_survive_json(name, quick):
    cases = all_cases(name, quick)
    assert cases
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_quick_is_smaller():
    for name in SUITES:
        assert len(all_cases(name, True)) <= len(all_cases(name, False))
    assert len(all_cases("cpu", True)) < len(all_cases("cpu", False))


def test_headline_holds_16k_tokens_a_batch():
    cases = all_cases("headline", False)
    for case in cases:
        assert case.dtype == "bfloat16" and case.batch * case.seqlen_q == 16384
    shapes = {(c.head_dim, c.head_dim_v, c.num_heads, c.seqlen_q, c.causal, c.direction) for c in cases}
    for causal in (False, True):
        for direction in ("forward", "backward"):
            for n in (512, 1024, 2048, 4096, 8192, 16384):
                assert (64, 64, 32, n, causal, direction) in shapes
                assert (128, 128, 16, n, causal, direction) in shapes
            for n in (4096, 16384):
                assert (256, 256, 8, n, causal, direction) in shapes
                assert (192, 128, 16, n, causal, direction) in shapes


def test_decode_spans_lengths_batches_heads_and_pages():
    cases = all_cases("decode", False)
    assert {case.seqlen_q for case in cases} == {1, 2, 4, 8}
    assert {case.page_size for case in cases} == {None, 16, 64, 256}
    assert {(32, 8), (64, 8)} <= {(case.num_heads, case.num_kv_heads) for case in cases}
    assert min(c.seqlen_k for c in cases) == 2048 and max(c.seqlen_k for c in cases) == 131072
    assert min(c.batch for c in cases) == 1 and max(c.batch for c in cases) == 128


def test_window_and_gqa():
    assert {c.window for c in all_cases("window", False)} == {(128, 0), (1024, 0)}
    assert {c.seqlen_q for c in all_cases("window", False)} == {8192, 65536}
    assert {(c.num_heads, c.num_kv_heads) for c in all_cases("gqa", False)} == {(64, 8)}


@pytest.mark.parametrize(
    "case",
    [
        dense("forward", "float32", 64, 4, 2, 40),
        dense("forward", "float32", 64, 4, 2, 40, causal=True),
        dense("forward", "float32", 64, 4, 2, 40, window=(7, 0)),
        dense("forward", "float32", 64, 4, 2, 40, window=(7, 3)),
        decode("float32", (8, 2), 3, 50, 4),
        packed("forward", "float32", 64, 4, (5, 17, 1), True),
    ],
    ids=lambda case: case.name,
)
def test_visible_pairs_are_those_of_a_mask_written_out(case):
    total = 0
    for seqlen_q, seqlen_k in case.sequences:
        distance = torch.arange(seqlen_k)[None] - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if case.causal:
            seen &= distance <= (0 if case.window is None else case.window[1])
        if case.window is not None:
            seen &= distance >= -case.window[0]
        total += int(seen.sum()) * case.num_heads
    assert case.visible_pairs() == total


@pytest.mark.parametrize("name", MASKS)
def test_visible_pairs_are_those_of_the_dense_mask(name):
    case = replace(dense("forward", "float32", 64, 4, 3, 1024), mask=name)
    mask = MASKS[name](case, "cpu").dense(case, "cpu")
    assert case.visible_pairs() == 4 * int(mask.expand(3, 1, 1024, 1024).sum())
    assert 0.05 < case.visible_pairs() / (4 * 3 * 1024**2) < 0.8


def test_flops_and_bytes():
    forward = dense("forward", "bfloat16", 128, 16, 4, 4096)
    assert forward.flops() == 4 * 4 * 16 * 4096 * 4096 * 128
    backward = dense("backward", "bfloat16", 128, 16, 4, 4096)
    assert backward.flops() == 2.5 * forward.flops()
    causal = dense("forward", "bfloat16", 128, 16, 4, 4096, causal=True)
    assert causal.flops() == 4 * 4 * 16 * (4096 * 4097 // 2) * 128
    mla = dense("forward", "bfloat16", 192, 16, 4, 4096, head_dim_v=128)
    assert mla.flops() == 2 * 4 * 16 * 4096 * 4096 * (192 + 128)
    assert decode("bfloat16", (32, 8), 16, 8192).cache_bytes() == 2 * 16 * 8192 * 8 * 128 * 2


def test_document_lengths_are_seeded_and_long_tailed():
    lengths = document_lengths(65536, seed=0)
    assert sum(lengths) == 65536
    assert lengths == document_lengths(65536, seed=0) != document_lengths(65536, seed=1)
    assert max(lengths) > 4 * sorted(lengths)[len(lengths) // 2]
    assert sum(document_lengths(2000, seed=3, longest=500)) == 2000
    assert max(document_lengths(2000, seed=3, longest=500)) <= 500


def test_unknown_suite():
    with pytest.raises(BenchError, match=r"suite 'fast' is unknown, must be one of cpu, headline"):
        find_suite("fast")
