"""Measuring claims one by one, and the file that keeps what was measured."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilewise.lab.bench import results
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.claims.claim import CLAIMS, Claim, Setting

KIND = "tilewise-claims"
Results = dict[str, Any]


def chosen(pattern: str | None, setting: Setting) -> list[Claim]:
    """Claims whose name a regular expression finds, and that this device can show."""
    try:
        found = [c for c in CLAIMS.values() if pattern is None or re.search(pattern, c.name)]
    except re.error as error:
        raise BenchError(f"--filter {pattern!r} is not a regular expression: {error}") from error
    served = [c for c in found if not c.is_training and (setting.is_gpu or not c.needs_gpu)]
    if not served:
        raise BenchError(f"--filter {pattern!r} leaves none of {', '.join(CLAIMS)} for {setting.device}")
    return served


def training(name: str) -> Claim:
    names = [c.name for c in CLAIMS.values() if c.is_training]
    if name not in names:
        raise BenchError(f"--train {name!r} must be one of {', '.join(names)}")
    return CLAIMS[name]


def load(path: Path) -> Results:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise BenchError(f"{path} holds no claims")
    return found


def run(
    claims: list[Claim], setting: Setting, path: Path | None, report: Callable[[Claim, Results], None]
) -> Results:
    """Measure each claim; after each, write the file and call `report` with its row.

    Rows that the file has already are not measured again, but for those that could not be measured and
    trainings, which go on from their checkpoints. What is counted is not in it.

    Raises:
        BenchError: the file is of other sources or another device, or its folder is not there.
    """
    found: Results = {"kind": KIND, **results.environment(setting.device), "rows": {}}
    if path is not None and path.exists():
        before = load(path)
        if other := [key for key in ("source_sha256", "device") if before[key] != found[key]]:
            raise BenchError(f"{path} is of another {' and '.join(other)}: name a new file")
        found["rows"] = before["rows"]
    elif path is not None and not path.parent.is_dir():
        raise BenchError(f"{path}: there is no folder {path.parent}")
    for claim in claims:
        row = found["rows"].get(claim.name)
        if row is None or "refused" in row or claim.is_training:
            row = found["rows"][claim.name] = measured(claim, setting)
            if path is not None:
                results.save(found | {"rows": _kept(found["rows"])}, path)
        report(claim, row)
    return found


def _kept(rows: Results) -> Results:
    """Without what is counted, which is the same on any machine and never read from a file; in six digits."""
    timed = {name: row for name, row in rows.items() if name not in CLAIMS or not CLAIMS[name].is_counted}
    return json.loads(json.dumps(timed), parse_float=lambda digits: float(f"{float(digits):.6g}"))  # type: ignore[no-any-return]


def measured(claim: Claim, setting: Setting) -> Results:
    """The row of a claim; why not, where it cannot be measured."""
    start = time.perf_counter()
    try:
        found = claim.measure(setting)
    except (BenchError, torch.OutOfMemoryError) as error:
        return {"refused": str(error).splitlines()[0]}
    row = found._asdict() | {"seconds": round(time.perf_counter() - start, 1)}
    return {key: value for key, value in row.items() if value is not None}
