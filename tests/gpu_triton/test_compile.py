"""Every kernel compiles for sm_80, sm_90 and sm_100 without a GPU; headline shapes do not spill."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

Row = dict[str, Any]
Compiler = Callable[..., list[Row]]
SCRIPT = "compile_kernels.py"
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
HEADLINE = ("d64", "d64_causal", "d128", "d128_causal", "d256_causal")
REST = (
    *("d128_fp16_gqa_window", "mla_192_128", "absorbed_576_512", "d40", "float32_d64", "float32_d256"),
    *("d512", "d256_mask_dropout", "d512_mask_dropout"),
    *("float32_d80", "float32_128_80", "float32_d128", "float32_everything"),
    *(
        "tf32_d64",
        "tf32_d128",
        "tf32_d256",
        "tf32_everything",
        "everything",
        "dropout_part",
        "dropout_odd_part",
        "packed",
        "cache",
        "paged",
        "paged_8_bits",
    ),
    *("functions_mask", "functions_d64", "functions_d128", "functions_packed", "functions_elementary"),
    *("learned_d64", "learned_d128"),
)
DECODING = (
    *("decode_d64", "decode_d128", "decode_long", "decode_rows", "decode_rows_paged", "decode_d256"),
    *("decode_float32", "decode_absorbed", "decode_absorbed_paged", "decode_576_512", "decode_everything"),
    *("decode_8_bits", "decode_8_bits_fp16_d64", "decode_8_bits_absorbed"),
    "decode_8_bits_float32",
)
# Bytes of registers that may spill: with headline shapes; with every option or very wide heads.
FEW, SOME = 64, 1024
# The most that Triton 3.6, 3.7, 3.8 or 3.9 spills for any capability: every case was compiled by each.
MEASURED = {
    # Outside of the loop over full tiles; faster than any tile without spills. 0 with Triton 3.9.
    ("d128_causal", "attn_bwd_dkdv_kernel"): 224,
    ("learned_d64", "attn_bwd_dq_kernel"): 1840,  # sm_100 with 3.6; 640 with 3.9
    # float32 cut in three, with 3.8; still several times faster than without
    ("float32_d64", "attn_fwd_kernel"): 1552,
    ("float32_d128", "attn_fwd_kernel"): 1540,
    ("float32_d128", "attn_bwd_dkdv_kernel"): 1028,
    ("float32_d128", "attn_bwd_dq_kernel"): 1276,
    ("float32_everything", "attn_fwd_kernel"): 2016,
    ("float32_everything", "attn_bwd_dq_kernel"): 1612,
    ("decode_rows", "attn_decode_kernel"): 1392,  # sm_100 with 3.8; 1012 with 3.9
}
# Kernels of a backward that start before the one before has ended.
EARLY = ("attn_bwd_dkdv_kernel", "attn_bwd_dq_kernel", "attn_bwd_dbias_kernel")


def check(rows: list[Row], capability: int) -> None:
    for row in rows:
        is_headline = row["case"] in HEADLINE and row["case"] != "d256_causal"
        assert row["shared_bytes"] <= SHARED_BYTES[capability], row
        assert row["cut_operands"] == 0, row
        limit = MEASURED.get((row["case"], row["kernel"]), FEW if is_headline else SOME)
        assert row["spill_bytes"] <= limit, row
        if row["kernel"] in EARLY:
            assert row["waits_for_kernel_before"] == (capability >= 90), row
        if is_headline and "prepare" not in row["kernel"]:
            assert row["matrix_instructions"] > 0, row
            assert (row["warpgroup_instructions"] > 0) == (capability >= 90), row


@pytest.mark.sample(1)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_compile_and_hardly_spill(
    capability: int, compiled_by: Compiler, request: pytest.FixtureRequest
):
    """A headline shape, or one with options or of another size, and one of decoding."""
    draw = random.Random(request.config.option.sample)
    drawn = [draw.choice(draw.choice((HEADLINE, REST))), draw.choice(DECODING)]
    names = (*drawn, "combine", "take", "write")
    rows = compiled_by(SCRIPT, str(capability), *names)
    rows = [row for row in rows if row["kernel"] != "dequantize_kernel"]  # ahead of others, for old GPUs
    kernels = {case: sum(row["case"] == case for row in rows) for case in names}
    assert kernels[drawn[0]] >= (8 if drawn[0] in HEADLINE else 1) and sum(kernels.values()) == len(rows)
    assert [kernels[name] for name in names[1:]] == [2, 6, 4, 3]
    merging = [row for row in rows if row["case"] == "combine"]
    assert all(row["barriers"] for row in merging)  # between reading a target and writing it
    check(rows, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_case_compiles(capability: int, compiled_by: Compiler):
    rows = compiled_by(SCRIPT, str(capability), *HEADLINE, *REST, *DECODING)
    assert {row["case"] for row in rows} == {*HEADLINE, *REST, *DECODING}
    check(rows, capability)


def test_a_new_length_does_not_compile(compiled_by: Compiler):
    rows = compiled_by(SCRIPT, "90", "lengths")
    assert rows == [{"attn_fwd_kernel": 1, "attn_bwd_dkdv_kernel": 1, "attn_bwd_dq_kernel": 1}]
