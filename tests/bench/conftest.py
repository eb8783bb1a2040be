"""Result files made by hand, with known ratios."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewise.lab.bench.cases import Case


@pytest.fixture
def results_of() -> Callable[..., dict[str, Any]]:
    """A result file from (case, {peer: seconds of each round, or a reason to refuse}) pairs."""

    def build(*rows: tuple[Case, dict[str, Any]], **fields: Any) -> dict[str, Any]:
        records = []
        for case, peers in rows:
            record: dict[str, Any] = {"name": case.name, "case": case.to_json(), "peers": {}}
            record |= {"bytes": case.cache_bytes()} if case.kind == "decode" else {"flops": case.flops()}
            for name, told in peers.items():
                if isinstance(told, str):
                    record["peers"][name] = {"status": "refused", "reason": told}
                elif isinstance(told, dict):
                    record["peers"][name] = told
                else:
                    record["peers"][name] = {"status": "ok", "samples": [[seconds] for seconds in told]}
            records.append(record)
        return {
            "schema_version": 1,
            "kind": "tilewise-bench",
            "suite": "cpu",
            "quick": False,
            "rounds": 3,
            "device": {"type": "cpu", "name": "Test CPU"},
            "threads": 2,
            "versions": {"torch": "2.13.0", "tilewise": "0.1.0"},
            "commit": "0123456789abcdef",
            "date": "2026-11-21T10:00:00+00:00",
            "ceilings": {
                "matmul": {"what": "a matmul", "flops": 100e9, "samples": [1.0, 1.0, 5.0]},
                "read": {"what": "a read", "bytes": 20e9, "samples": [1.0]},
            },
            "unavailable": {"flash-attn-2": "flash-attn needs a GPU"},
            "cases": records,
            "not_run": [],
            **fields,
        }

    return build
