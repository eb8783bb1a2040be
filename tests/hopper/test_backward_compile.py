"""The Hopper backward compiles for sm_90a without a GPU, within registers and shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.hopper.backward.launch import backward_config, divide, l2_swizzle

pytest.importorskip("triton")

Compiler = Callable[..., list[dict[str, Any]]]
SHARED_BYTES = 227 << 10
# Outside of the loop, or a few a tile of thousands of cycles. A softcap keeps one tile more in registers; so
# does a bias beside dropout, as Triton 3.6 orders them, and a score function beside both, as 3.8 does.
SPILL_BYTES = {  # functions have addresses of 64 bits; inlined masks in partial tiles alone
    "guarded": 480, "inlined_function_d64": 960, "inlined": 320, "score_mask": 656, "score": 192,
    "softcap": 400, "dbias_dropout": 256, "mask_dropout": 192, "d256": 64, "d192": 128, "d": 128,
}  # fmt: skip
AROUND = (
    "attn_bwd_prepare_kernel", "attn_bwd_finish_kernel", "order_sequences_kernel", "scan_mask_kernel",
    "scan_function_kernel", "list_queries_kernel", "attn_bwd_dbias_kernel", "copy_bias_kernel",
)  # fmt: skip


def test_configurations_stay_within_registers_and_shared_memory(compiled_by: Compiler):
    rows = compiled_by("compile_backward.py", draw=1)
    assert rows
    for row in rows:
        if row["kernel"] != "attn_bwd_finish_kernel":  # early or not by what is before it
            assert row["is_early"] == (row["kernel"] not in AROUND), row
        assert row["shared_bytes"] <= SHARED_BYTES, row
        assert not row["is_serialized"], row
        if row["kernel"] != "attn_bwd_dbias_kernel":  # in a backward of Triton's it starts early
            assert row["waits_for_kernel_before"] == row["is_early"], row
        if row["kernel"] in AROUND:
            # no loop is in it, and ptxas prefers more blocks an SM: it keeps to 32 registers, or to 80
            # a function is asked once a map, of as many scores as registers hold
            assert row["spill_bytes"] <= (256 if row["kernel"] == "scan_function_kernel" else 32), row
        else:
            limit = next(limit for part, limit in SPILL_BYTES.items() if part in row["case"])
            assert row["spill_bytes"] <= limit, row
            assert row["warpgroup_instructions"] >= 64, row


@pytest.mark.parametrize("kv_heads", [64, 8])
def test_a_section_holds_as_many_key_heads_with_groups_as_without(kv_heads: int):
    """16 MB: eight heads' queries of 4096 tokens, as those of a group are worked on one after another."""
    q, k = (torch.empty(4, 4096, h, 128, dtype=torch.bfloat16, device="meta") for h in (64, kv_heads))
    slots = 4 * kv_heads
    assert l2_swizzle(describe(Inputs(q, k, k), Options(causal=True)), slots) == 8
    for options in (Options(), Options(causal=True, window_left=100)):
        assert l2_swizzle(describe(Inputs(q, k, k), options), slots) == 1


@pytest.mark.parametrize("dim", [64, 128])
def test_blocks_share_the_tiles_of_the_last_round_where_that_saves_time(dim: int):
    sms = 132
    shared: dict[str, list[int]] = {"full": [], "causal": []}
    for batch, heads, group, seqlen in itertools.product((1, 3), (1, 5, 16), (1, 4), (1, 100, 2000, 16384)):
        q, k = (
            torch.empty(batch, seqlen, n, dim, dtype=torch.bfloat16, device="meta")
            for n in (heads * group, heads)
        )
        tiles = batch * heads * -(-seqlen // 128)
        for options in (Options(), Options(causal=True), Options(deterministic=True)):
            problem = describe(Inputs(q, k, k), options)
            division = divide(problem, backward_config(problem), sms)
            if not division.splits:
                assert division == (tiles, 0, 0, 0, 1)
                continue
            counts = "causal" if options == Options(causal=True) else "full"
            shared[counts].append(tiles)
            border, unit = division.border, division.unit
            assert options != Options(deterministic=True) and division.shared <= sms
            assert division.splits <= 2 * sms
            if counts == "causal":
                assert division.work_tiles == tiles + border * (unit - 1) and border == division.shared
                continue
            units = division.shared * group * -(-seqlen // backward_config(problem).BLOCK_M) / unit
            assert border % sms == 0 and border + division.shared == tiles
            assert units <= division.work_tiles - border < units + 1
    assert min(shared["full"]) < sms < max(shared["full"]) and shared["causal"]
