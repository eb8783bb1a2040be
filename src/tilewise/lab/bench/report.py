"""Markdown tables from result files: one row a case, ratios, geometric means."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from tilewise.lab.bench import results
from tilewise.lab.bench.cases import SHORT_DTYPES
from tilewise.lab.bench.results import Entry, Results, is_measured

Record = dict[str, Any]


def is_ours(peer: str) -> bool:
    return peer.split(":")[0] == "tilewise"


def work(record: Record) -> tuple[str, int]:
    """("flops" or "bytes", how many)."""
    return ("bytes", record["bytes"]) if "bytes" in record else ("flops", record["flops"])


def speed(record: Record, entry: Entry) -> float:
    """FLOP/s or bytes/s at the median."""
    return work(record)[1] / results.median(entry)


def peer_names(found: Results) -> list[str]:
    return list(dict.fromkeys(name for record in found["cases"] for name in record["peers"]))


def subject(found: Results) -> str | None:
    """The peer whose ratios are reported: the first form of tilewise in the run."""
    return next((name for name in peer_names(found) if is_ours(name)), None)


def best_peer(record: Record) -> str | None:
    """The fastest peer that is not tilewise."""
    taken = {name: seconds(record, name) for name in record["peers"] if not is_ours(name)}
    known = {name: value for name, value in taken.items() if value is not None}
    return min(known, key=lambda name: known[name], default=None)


def seconds(record: Record, name: str) -> float | None:
    """Measured, or what a recorded ratio makes of the measured peer that it is to."""
    entry = record["peers"].get(name)
    if entry is not None and entry["status"] == "recorded":
        base = seconds(record, entry["ratio_to"])
        return None if base is None else base / entry["ratio"]
    return results.median(entry) if is_measured(entry) else None


def ratio_to(record: Record, name: str | None, other: str | None) -> float | None:
    """How many times faster peer `name` is than `other` on this case."""
    if name is None or other is None:
        return None
    one, two = (record["peers"].get(peer) for peer in (name, other))
    if is_measured(one) and is_measured(two):
        return results.ratio(two, one)
    own, others = seconds(record, name), seconds(record, other)
    return None if own is None or others is None else others / own


def geometric_mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.geometric_mean(present) if present else None


def cell(record: Record, entry: Entry | None) -> str:
    """One peer on one case in words: speed and spread, or why there is none."""
    if entry is None:
        return "not asked for"
    if entry["status"] == "recorded":
        return f"{entry['ratio']:.2f} × {entry['ratio_to']}"
    if not is_measured(entry):
        return f"{entry['status']} ({entry['reason']})"
    if record["case"]["kind"] == "memory":
        return f"{results.median(entry) / 2**20:.1f} MiB"
    scale, unit = scale_and_unit([record])
    return f"{number(speed(record, entry) / scale)} {unit} {_half_range(entry)}"


def tables(found: Results, reference: Results | None = None) -> str:
    """Markdown: a heading, what was measured how, and a table for each kind of case."""
    lines = [f"## {found['suite']}: {found['device']['name']}", "", provenance(found), ""]
    notes: list[str] = []
    for title, records in groups(found["cases"]).items():
        lines += [f"### {title}", ""]
        if records[0]["case"]["kind"] == "memory":
            lines += memory_table(records, peer_names(found), notes)
        elif "world" in found:
            lines += _efficiency_table(found, records, notes)
        else:
            lines += _speed_table(found, records, reference, notes)
        lines.append("")
    if reference is not None:
        lines += [f"Recorded elsewhere: {_where(reference)}. {reference.get('recorded', '')}".strip(), ""]
    lines += [f"[{number}] {note}  " for number, note in enumerate(notes, 1)]
    lines += [f"Not measured: {name}: {reason}.  " for name, reason in found["unavailable"].items()]
    if found["not_run"]:
        lines.append(f"Out of time, not run: {', '.join(found['not_run'])}.")
    return "\n".join(lines).rstrip() + "\n"


def provenance(found: Results) -> str:
    """Where, when, with what and how, in a sentence or two."""
    versions = found["versions"]
    with_what = [f"torch {versions.get('torch', '?')}"]
    with_what += [f"{name} {versions[name]}" for name in ("triton", "cudnn", "tilewise") if name in versions]
    parts = [_where(found), ", ".join(with_what)]
    if found["device"]["type"] == "cpu":
        parts.append("one thread's CPU time" if found.get("thread_time") else f"{found['threads']} threads")
    elif found["device"].get("driver"):
        parts.append(f"driver {found['device']['driver']}")
    if found.get("commit"):
        parts.append(f"commit {found['commit'][:12]}")
    elif found.get("source_sha256"):
        parts.append(f"sources {found['source_sha256'][:12]}")
    parts.append(f"{found['rounds']} rounds" + (", quick" if found["quick"] else ""))
    if found.get("graph"):
        parts.append("in CUDA graphs")
    if not found.get("complete", True):
        parts.append("cut short, not every case was run")
    said = "; ".join(parts) + "."
    limits = []
    for ceiling in found.get("ceilings", {}).values():
        unit = "flops" if "flops" in ceiling else "bytes"
        value = ceiling[unit] / statistics.median(ceiling["samples"])
        limits.append(f"{ceiling['what']} {with_unit(value, unit)}")
    return said + (f" Ceilings in the same run: {', '.join(limits)}." if limits else "")


def _where(found: Results) -> str:
    return f"{found['device']['name']}, {found['date'][:10]}"


def groups(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by kind, direction and dtype, under a title each."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        case = record["case"]
        kind = {"dense": "", "varlen": "packed documents, ", "decode": "decoding, "}.get(case["kind"], "")
        if case["kind"] == "memory":
            title = f"peak extra memory, {case['direction']}, {SHORT_DTYPES[case['dtype']]}, MiB"
        else:
            what = "" if case["kind"] == "decode" else f"{case['direction']}, "
            title = f"{kind}{what}{SHORT_DTYPES[case['dtype']]}"
        groups.setdefault(title, []).append(record)
    return groups


def _speed_table(
    found: Results, records: list[Record], reference: Results | None, notes: list[str]
) -> list[str]:
    ours, names = subject(found), _peers_of(found, records)
    scale, unit = scale_and_unit(records)
    limit = results.ceiling(found, work(records[0])[0], records[0]["case"]["dtype"])
    header = [f"case ({unit})", *names, "best peer"]
    header += [] if ours is None else [f"{ours} / best peer", "of ceiling"]
    base = None if reference is None else reference_base(reference)
    if base is not None:
        header += [f"{ours or 'best peer'} / {base}", f"recorded elsewhere / {base}"]
    rows = []
    for record in records:
        best = best_peer(record)
        row = [record["name"]]
        row += [_table_cell(record, name, scale, notes) for name in names]
        row.append(best or "–")
        if ours is not None:
            row += [times(ratio_to(record, ours, best)), _share(record, ours, limit)]
        if base is not None and reference is not None:
            row += [times(ratio_to(record, ours or best, base)), _recorded(reference, record, base)]
        rows.append(row)
    means = _mean_row(records, names, ours)
    if base is not None and reference is not None:
        means += [times(geometric_mean(ratio_to(r, ours or best_peer(r), base) for r in records))]
        best_recorded = recorded_mean(reference, records, base)
        means += ["" if best_recorded is None else f"best peer {best_recorded:.2f}"]
    rows.append(means)
    return markdown(header, rows)


def _efficiency_table(found: Results, records: list[Record], notes: list[str]) -> list[str]:
    """Time of one device / time, and on GPUs / their number; on a CPU one process has the threads of all.

    Where one device does one rank's work, its time counts as many times as there are ranks.
    """
    devices = found["world"] if found["device"]["type"] == "cuda" else 1
    names = [name for name in _peers_of(found, records) if name != "one-device"]
    rows = []
    for record in records:
        alone = record["peers"].get("one-device")
        row = [record["name"]]
        row.append(f"{number(results.median(alone) * 1e3)} ms" if is_measured(alone) else "–")
        for name in names:
            entry = record["peers"].get(name)
            if is_measured(alone) and is_measured(entry):
                efficiency = results.ratio(alone, entry) / float(entry.get("ranks") or devices)
                row.append(f"{efficiency:.3f} ({number(results.median(entry) * 1e3)} ms)")
            else:
                row.append(_table_cell(record, name, 1.0, notes))
        rows.append(row)
    ranks = f"{found['world']} ranks" if found["world"] > 1 else "one rank's work"
    return markdown([f"case (efficiency of {ranks})", "one device", *names], rows)


def _peers_of(found: Results, records: list[Record]) -> list[str]:
    return [name for name in peer_names(found) if any(name in record["peers"] for record in records)]


def _table_cell(record: Record, name: str, scale: float, notes: list[str]) -> str:
    entry = record["peers"].get(name)
    if is_measured(entry) and record["case"]["kind"] == "memory":
        return f"{results.median(entry) / 2**20:.1f}"
    if is_measured(entry):
        return f"{number(speed(record, entry) / scale)} {_half_range(entry)}"
    if entry is not None and entry["status"] == "recorded":
        return cell(record, entry)
    note = f"{name}: {cell(record, entry)}"
    if note not in notes:
        notes.append(note)
    word = "–" if entry is None or entry["status"] == "refused" else entry["status"].upper()
    return f"{word} [{notes.index(note) + 1}]"


def _mean_row(records: list[Record], names: list[str], ours: str | None) -> list[str]:
    """How much faster tilewise is than each peer; without it, each peer's share of the best."""
    row = [f"geometric mean, {ours} / peer" if ours else "geometric mean, peer / best"]
    for name in names:
        if ours is not None:
            mean = None if name == ours else geometric_mean(ratio_to(r, ours, name) for r in records)
        else:
            mean = geometric_mean(ratio_to(r, name, best_peer(r)) for r in records)
        row.append(times(mean))
    row.append("")
    if ours is not None:
        row += [times(geometric_mean(ratio_to(r, ours, best_peer(r)) for r in records)), ""]
    return row


def memory_table(records: list[Record], names: list[str], notes: list[str]) -> list[str]:
    rows = [[r["name"], *(_table_cell(r, name, 1.0, notes) for name in names)] for r in records]
    return markdown(["case (MiB)", *names], rows)


def reference_base(reference: Results) -> str:
    """The peer that a reference file's ratios are to."""
    for record in reference["cases"]:
        for name, entry in record["peers"].items():
            if entry["status"] == "recorded":
                return entry["ratio_to"]
            if name == "sdpa-cudnn" and is_measured(entry):
                return name
    return "sdpa-flash"


def _recorded(reference: Results, record: Record, base: str) -> str:
    """Every peer's ratio to the base as the reference file has it, best first."""
    ranked = sorted(_recorded_ratios(reference, record, base).items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.2f}" for name, value in ranked) or "–"


def _recorded_ratios(reference: Results, record: Record, base: str) -> dict[str, float]:
    match = next((r for r in reference["cases"] if r["name"] == record["name"]), None)
    if match is None:
        return {}
    ratios = {name: ratio_to(match, name, base) for name in match["peers"] if name != base}
    return {name: value for name, value in ratios.items() if value is not None}


def recorded_mean(reference: Results, records: list[Record], base: str) -> float | None:
    """The best recorded ratio of each case that the reference has (the base's own 1 counts): their mean."""
    found = [_recorded_ratios(reference, record, base) for record in records]
    return geometric_mean(max([1.0, *ratios.values()]) for ratios in found if ratios)


def _share(record: Record, name: str, limit: float | None) -> str:
    entry = record["peers"].get(name)
    return f"{speed(record, entry) / limit:.0%}" if limit and entry and is_measured(entry) else "–"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def scale_and_unit(records: Sequence[Record]) -> tuple[float, str]:
    if work(records[0])[0] == "bytes":
        return 1e9, "GB/s"
    speeds = [speed(r, e) for r in records for e in r["peers"].values() if is_measured(e)]
    return (1e12, "TFLOP/s") if speeds and max(speeds) >= 2e12 else (1e9, "GFLOP/s")


def _half_range(entry: Entry) -> str:
    """Half of what lies between the slowest and the fastest round."""
    percent = results.spread(entry) * 50
    return f"±{percent:.{0 if percent >= 9.95 else 1}f}%"


def number(value: float) -> str:
    """Three digits or so."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def with_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{number(value / 1e9)} GB/s"
    return f"{number(value / 1e12)} TFLOP/s" if value >= 2e12 else f"{number(value / 1e9)} GFLOP/s"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" + "---:|" * (len(header) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]
