"""Decoding with a cache split over ranks, against the O(N^2) reference of the whole sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

CASES = str(Path(__file__).parent / "user_cases.py")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("sinks, softcap", [(False, 0.0), (True, 0.0), (False, 3.0)])
def test_steps(pool, world, sinks, softcap):
    pool.run(world, CASES, "decode", world, sinks, softcap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 3])
def test_sixteen_bits_are_rounded_once(pool, world, dtype):
    pool.run(world, CASES, "decode_in_16_bits", dtype)


def test_compiled_code(pool):
    pool.run(2, CASES, "compiled_steps")


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("change", ["value", "sinks", "heads", "head_dim_v", "cache"])
def test_ranks_that_disagree_all_raise(pool, change, is_paged):
    for message in pool.run(2, CASES, "decode_apart", change, is_paged):
        assert message is not None and ("on rank" in message or change == "cache"), message


def test_a_full_cache_of_the_owner_raises_on_all_ranks(pool):
    for message in pool.run(3, CASES, "overflow"):
        assert message is not None and ("max_seqlen" in message or "capacity" in message), message
