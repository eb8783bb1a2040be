"""Two result files of the same machine: what got slower beyond the spread."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.report import is_measured
from tilewise.lab.bench.results import Results, round_medians

THRESHOLD = 0.02  # a change smaller than this is not reported, however small the spread


class Change(NamedTuple):
    """One peer on one case; `factor` is new / old time (or bytes), None if one of them has none."""

    case: str
    peer: str
    verdict: str  # "slower", "faster", "same", "broken", "mended", "gone"
    factor: float | None
    note: str = ""

    @property
    def is_regression(self) -> bool:
        return self.verdict in ("slower", "broken")


def compare(old: Results, new: Results, threshold: float = THRESHOLD) -> list[Change]:
    """Every peer of every case of `old`, judged.

    "slower" means that the fastest round of the new run is slower than the slowest round of the old one
    (so the rounds do not overlap), and that the medians differ by more than `threshold`.

    Raises:
        BenchError: the files share no case.
    """
    after = {record["name"]: record["peers"] for record in new["cases"]}
    changes = []
    for record in old["cases"]:
        if record["name"] not in after:
            continue
        for peer, entry in record["peers"].items():
            found = after[record["name"]].get(peer)
            changes.append(_judge(record["name"], peer, entry, found, threshold))
    if not changes:
        raise BenchError("the two files have no case in common")
    return changes


def _judge(case: str, peer: str, old: dict, new: dict | None, threshold: float) -> Change:
    if new is None:
        return Change(case, peer, "gone", None, "not in the new run")
    if not is_measured(old):
        return Change(case, peer, "mended" if is_measured(new) else "same", None)
    if not is_measured(new):
        return Change(case, peer, "broken", None, f"{new['status']}: {new.get('reason', '')}")
    before, after = round_medians(old), round_medians(new)
    factor = statistics.median(after) / max(statistics.median(before), 1e-30)
    if min(after) > max(before) and factor > 1 + threshold:
        return Change(case, peer, "slower", factor)
    if max(after) < min(before) and factor < 1 / (1 + threshold):
        return Change(case, peer, "faster", factor)
    return Change(case, peer, "same", factor)


def summarize(old: Results, new: Results, changes: list[Change]) -> str:
    """The changes worth reading, worst first, and a count of all."""
    lines = []
    if old["device"]["name"] != new["device"]["name"]:
        lines.append(f"Different devices: {old['device']['name']} and {new['device']['name']}.")
    told = [change for change in changes if change.verdict != "same"]
    for change in sorted(told, key=lambda c: (not c.is_regression, -(c.factor or float("inf")))):
        what = change.note if change.factor is None else f"{change.factor:.3f} × the time"
        lines.append(f"{change.verdict:7} {change.case} {change.peer}: {what}".rstrip(": "))
    counts = {v: sum(c.verdict == v for c in changes) for v in dict.fromkeys(c.verdict for c in changes)}
    lines.append(f"{len(changes)} compared: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return "\n".join(lines)
