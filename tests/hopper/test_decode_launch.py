"""The host side of the Hopper decoding kernels, without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tilewise.core.problem import AttentionProblem, Inputs, Options, describe
from tilewise.gpu.hopper import plan
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.decode import launch as decode_launch, mla_launch as decode_mla_launch
from tilewise.gpu.hopper.forward import launch as forward_launch


def cached(
    queries: int = 1,
    heads: int = 4,
    dim: int = 64,
    page_size: int | None = None,
    keys: int = 512,
    is_8_bit: bool = False,
    **extras: Any,
) -> AttentionProblem:
    q = torch.empty(2, queries, heads, dim, dtype=torch.bfloat16, device="meta")
    lead = (2, keys) if page_size is None else (2 * keys // page_size, page_size)
    dtype = torch.float8_e4m3fn if is_8_bit else torch.bfloat16
    k, v = (torch.empty(*lead, 1, dim, dtype=dtype, device="meta") for _ in range(2))
    if is_8_bit:
        extras |= {name: torch.empty(lead[0], 1, device="meta") for name in ("key_scale", "value_scale")}
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    if page_size is not None:
        extras["page_table"] = torch.empty(2, keys // page_size, dtype=torch.int32, device="meta")
    return describe(Inputs(q, k, v, seqlens_k=lengths, **extras), Options(causal=True))


def test_what_is_served():
    leftpad = torch.empty(2, dtype=torch.int32, device="meta")
    padded = cached(leftpad_k=leftpad)
    for served in (cached(16), cached(heads=64), cached(page_size=16), cached(dim=128), padded):
        assert decode_launch.supports(served) is None
    for page_size, dim, pages in ((16, 128, 4), (64, 128, 2), (64, 48, 2), (256, 64, 1)):
        cfg = decode_launch.decode_config(problem := cached(page_size=page_size, dim=dim, is_8_bit=True))
        assert decode_launch.supports(problem) is None and cfg.HAS_SCALES and cfg.PAGES == cfg.BOXES == pages
    refused = {
        "head sizes to 128": cached(dim=256),
        "64 query heads": cached(heads=65),
        "powers of two": cached(page_size=4),
        "8-bit pages of at least 16 tokens, not 8": cached(page_size=8, is_8_bit=True),
        "8-bit pages for 32 query heads on a key head, not 33": cached(heads=33, page_size=64, is_8_bit=True),
        "multiples of 16, both above 64 or none, not (40, 40)": cached(page_size=64, dim=40, is_8_bit=True),
        "2 sequences of 8589934592": cached(heads=1, keys=1 << 33),
    }
    for reason, problem in refused.items():
        assert reason in (decode_launch.supports(problem) or "")


def dense(batch: int, queries: int, keys: int, heads: int, dim: int = 64) -> AttentionProblem:
    q, k = (torch.empty(batch, n, heads, dim, dtype=torch.bfloat16, device="meta") for n in (queries, keys))
    return describe(Inputs(q, k, k), Options())


def test_keys_are_split_without_a_cache_where_tiles_of_queries_are_few():
    for problem in (dense(4, 64, 16384, 8), dense(2, 77, 4096, 10), dense(2, 100, 1024, 8)):
        assert decode_launch.is_faster(problem) and plan.forward_kernels(problem) is not plan.FORWARD[-1]
    for problem in (dense(1, 512, 512, 32, 128), dense(1, 16384, 16384, 1), dense(2, 64, 64, 1)):
        assert not decode_launch.is_faster(problem) and plan.forward_kernels(problem) is plan.FORWARD[-1]


def test_short_keys_have_two_warpgroups():
    for keys, warpgroups in ((77, 2), (1023, 2), (1024, 4)):
        config = forward_launch.forward_config(dense(2, 4096, keys, 32))
        assert warpgroups == config.WARPGROUPS


def test_8_bit_pages_are_decoded_or_made_16_bits_for_the_forward():
    few, many = (cached(n, page_size=64, keys=4096, is_8_bit=True) for n in (16, 2000))
    assert plan.unserved_shape(few) is None and plan.unserved_shape(many) is None
    assert decode_launch.is_faster(few) and not decode_launch.is_faster(many)
    assert plan.unserved_shape(cached(2000, page_size=8, keys=4096, is_8_bit=True)) is None
    assert not plan.watches(many)


def test_more_queries_are_served_where_the_keys_are_worth_cutting():
    """Else the forward kernel has tiles of queries enough for all processors, or too little to do."""
    cases = ((16, 512), (17, 512), (17, 8192), (64, 8192), (2000, 8192))
    assert {case: decode_launch.is_faster(cached(case[0], keys=case[1])) for case in cases} == {
        (16, 512): True, (17, 512): False, (17, 8192): True, (64, 8192): True, (2000, 8192): False,
    }  # fmt: skip


@pytest.mark.parametrize("queries", [1, 4, 16])
def test_tiles_hold_whole_groups_and_an_even_number_of_slots(queries: int):
    cfg = decode_launch.decode_config(cached(queries, heads=12))
    assert cfg.ROWS % cfg.PACK == 0 and cfg.ROWS <= 64
    assert cfg.STAGES % cfg.WARPGROUPS == 0


@pytest.mark.parametrize(("queries", "heads"), [(1, 4), (16, 4), (17, 4), (5, 12), (6, 12), (40, 64)])
def test_row_tiles_are_known_at_compile_time(queries: int, heads: int):
    """Where a sequence's rows fit one tile, no program divides by their number."""
    problem = cached(queries, heads=heads)
    cfg = decode_launch.decode_config(problem)
    assert (decode_launch.row_tiles(problem, cfg) > 1) == cfg.HAS_ROW_TILES == (queries * heads > 64)


@pytest.mark.parametrize("bound", [2**31 - 1, 2**35])
def test_positions_and_a_window_fit_32_bits(bound: int):
    problem = dataclasses.replace(cached(), causal=False, window_left=bound, window_right=bound)
    sizes = decode_launch.decode_sizes(problem, decode_launch.decode_config(problem), 2)
    assert max(sizes.window_left, sizes.window_right) + sizes.seqlen_k < 2**30


def test_small_pages_are_read_whole():
    """Where a page takes several boxes of 64 columns otherwise: not at head size 64, not for large pages."""
    whole = {
        (dim, page_size): decode_launch.decode_config(cached(dim=dim, page_size=page_size)).WHOLE_PAGES
        for dim in (64, 128)
        for page_size in (16, 64)
    }
    assert whole == {(64, 16): False, (64, 64): False, (128, 16): True, (128, 64): False}


def test_pages_between_others_are_copied_unless_their_rows_line_up():
    pages = torch.empty(4, 20, 2, 128, dtype=torch.bfloat16)
    of_16 = pages[:, :16]
    assert host.keys_ready(of_16) is of_16
    assert host.keys_ready(of_16, 8) is not of_16
    aligned = torch.empty(4, 32, 2, 128, dtype=torch.bfloat16)[:, :16]
    assert host.keys_ready(aligned, 8) is aligned


def test_workers_cut_even_lines_evenly():
    """Whole segments, or a few workers on each; never many fewer than there are multiprocessors."""
    assert {line: decode_launch.even_workers(line, 132) for line in (128, 32, 512, 264)} == {
        128: 128, 32: 128, 512: 128, 264: 132,
    }  # fmt: skip
    for line in (1, 8, 12, 96, 120):
        assert decode_launch.even_workers(line, 132) == 132


def latent(
    queries: int = 1, heads: int = 16, page_size: int | None = 64, is_view: bool = True, **extras: Any
):
    """A cache of absorbed latent attention: the values are the keys' first columns."""
    dim, dim_v = decode_mla_launch.HEAD_DIMS
    q = torch.empty(2, queries, heads, dim, dtype=torch.bfloat16, device="meta")
    lead = (2, 512) if page_size is None else (1024 // page_size, page_size)
    key = torch.empty(*lead, 1, dim, dtype=torch.bfloat16, device="meta")
    value = key[..., :dim_v] if is_view else torch.empty(*lead, 1, dim_v, dtype=q.dtype, device="meta")
    lengths = torch.empty(2, dtype=torch.int32, device="meta")
    if page_size is not None:
        extras["page_table"] = torch.empty(2, 512 // page_size, dtype=torch.int32, device="meta")
    return describe(Inputs(q, key, value, seqlens_k=lengths, **extras), Options(causal=True))


def test_what_is_served_of_latent_attention():
    for served in (
        latent(),
        latent(16, 128),
        latent(page_size=None),
        latent(page_size=256),
        latent(heads=96),
    ):
        assert decode_mla_launch.supports(served) is None
    refused = {
        "the keys' first columns": latent(is_view=False),
        "1 to 16 queries": latent(17),
        "not 130": latent(heads=130),
        "not 16": latent(page_size=16),
        "left padding": latent(leftpad_k=torch.empty(2, dtype=torch.int32, device="meta")),
        "ALiBi": latent(alibi_slopes=torch.empty(16, device="meta")),
    }
    for reason, problem in refused.items():
        assert reason in (decode_mla_launch.supports(problem) or "")


@pytest.mark.parametrize(("heads", "pack", "blocks"), [(16, 16, 1), (64, 64, 1), (96, 48, 2), (128, 64, 2)])
def test_heads_of_latent_attention_in_equal_blocks(heads: int, pack: int, blocks: int):
    problem = latent(2, heads)
    cfg = decode_mla_launch.mla_config(problem)
    assert (cfg.PACK, decode_mla_launch.head_blocks(problem)) == (pack, blocks)
    assert decode_launch.segments(problem, cfg) == blocks * -(-2 // (cfg.ROWS // pack))


def test_values_in_keys_are_known_by_their_place():
    key = torch.zeros(2, 300, 1, 576)
    query = torch.zeros(2, 1, 4, 576)
    values = {key[..., :512]: True, key[..., 64:]: False, key[..., :512].clone(): False, key: False}
    for value, is_value_in_key in values.items():
        assert describe(Inputs(query, key, value), Options()).is_value_in_key == is_value_in_key
