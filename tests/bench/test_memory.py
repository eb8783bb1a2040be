"""Peak memory is measured, and what is known is measured right."""

from __future__ import annotations

import sys

import pytest

from tilewise.lab.bench import memory
from tilewise.lab.bench.cases import decode, dense
from tilewise.lab.bench.errors import Refusal
from tilewise.lab.bench.peer import Data

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 2**20


def measure(case, peer):
    return memory.measure(case, peer, Data(case, "cpu", 0))


def test_standard_attention_needs_its_two_score_matrices():
    case = dense("forward", "float32", 64, 4, 1, 2048, kind="memory")
    scores = 4 * 2048 * 2048 * 4
    assert 2 * scores - 2 * MIB < measure(case, "standard") < 2 * scores + 2 * MIB


@pytest.mark.slow
def test_the_tiles_need_far_less_and_no_more_for_twice_the_length():
    short, long = (
        measure(dense("forward+backward", "float32", 64, 4, 1, n, kind="memory"), "tilewise:tiled")
        for n in (2048, 4096)
    )
    assert 0 < short < 48 * MIB
    assert long < 1.5 * short + 8 * MIB


def test_refusals_reach_the_caller():
    case = decode("float32", (4, 2), 1, 256, page_size=16)
    with pytest.raises(Refusal, match="has no page tables"):
        measure(case, "standard")


def test_a_process_that_fails_says_why():
    case = dense("forward", "float32", 64, 4, 1, 64, kind="memory")
    with pytest.raises(RuntimeError, match="peer 'nobody' is unknown"):
        measure(case, "nobody")


def test_an_earlier_peak_is_forgotten():
    block = bytearray(64 * MIB)
    del block
    assert memory._status("VmHWM") >= memory._status("VmRSS")
    assert abs(memory._reset_peak() - memory._status("VmRSS")) < 4 * MIB
