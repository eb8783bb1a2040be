"""Slower means slower beyond the spread."""

from __future__ import annotations

import pytest

from tilewise.lab.bench.cases import dense
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.results import compare, summarize

CASE = dense("forward", "float32", 64, 1, 1, 1000)


def verdict(results_of, old, new):
    before = results_of((CASE, {"tilewise": old}))
    after = results_of((CASE, {} if new is None else {"tilewise": new}))
    (change,) = compare(before, after)
    return change


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([1.0, 1.01, 1.02], [1.1, 1.11, 1.12], "slower"),
        ([1.0, 1.05, 1.15], [1.1, 1.14, 1.2], "same"),  # rounds overlap: within the spread
        ([1.0, 1.001, 1.002], [1.01, 1.011, 1.012], "same"),  # beyond the spread, but under 2%
        ([1.1, 1.11, 1.12], [1.0, 1.01, 1.02], "faster"),
        ([1.0, 1.0, 1.0], "out of memory", "broken"),
        ("out of memory", [1.0, 1.0, 1.0], "fixed"),
        ("out of memory", "out of memory", "same"),
        ([1.0, 1.0, 1.0], None, "gone"),
    ],
)
def test_verdicts(results_of, old, new, expected):
    change = verdict(results_of, old, new)
    assert change.verdict == expected
    assert change.is_regression == (expected in ("slower", "broken"))


def test_factor_is_new_over_old(results_of):
    assert verdict(results_of, [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]).factor == 2.0


def test_summary_tells_the_worst_first(results_of):
    other = dense("forward", "float32", 64, 1, 1, 2000)
    old = results_of((CASE, {"tilewise": [1.0] * 3, "flex": [1.0] * 3}), (other, {"tilewise": [1.0] * 3}))
    new = results_of((CASE, {"tilewise": [1.2] * 3, "flex": [0.5] * 3}), (other, {"tilewise": [3.0] * 3}))
    lines = summarize(old, new, compare(old, new)).splitlines()
    assert lines[0].startswith(f"slower  {other.name} tilewise: 3.000 ×")
    assert lines[1].startswith(f"slower  {CASE.name} tilewise: 1.200 ×")
    assert lines[2].startswith(f"faster  {CASE.name} flex")
    assert lines[3] == "3 compared: 2 slower, 1 faster"


def test_other_devices_are_pointed_out(results_of):
    old, new = results_of((CASE, {"flex": [1.0]})), results_of((CASE, {"flex": [1.0]}))
    new["device"] = {"type": "cpu", "name": "Another CPU"}
    assert summarize(old, new, compare(old, new)).startswith("Different devices: Test CPU and Another CPU.")


def test_nothing_in_common(results_of):
    other = dense("forward", "float32", 64, 1, 1, 2000)
    with pytest.raises(BenchError, match="no case in common"):
        compare(results_of((CASE, {"flex": [1.0]})), results_of((other, {"flex": [1.0]})))
