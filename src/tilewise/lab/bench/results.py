"""Result files: JSON with every sample and everything needed to know what was measured where.

`compare` says of two files of the same machine what got slower beyond the spread.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch

from tilewise.device import processor_name
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import BenchError

SCHEMA_VERSION = 1
KIND = "tilewise-bench"
PACKAGES = (
    "tilewise",
    "torch",
    "triton",
    "llvmlite",
    "numpy",
    "flash-attn",
    "xformers",
    "nvidia-cutlass-dsl",
)

# Environment variables that hold tilewise, PyTorch, and oneDNN below PyTorch to fewer instructions.
INSTRUCTION_SETS = ("TILEWISE_CPU_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
Results = dict[str, Any]
Entry = dict[str, Any]  # one peer on one case


def environment(device: str) -> dict[str, Any]:
    """Device, versions, commit, date and command line of this run."""
    return {
        "device": _cuda_device() if device == "cuda" else _cpu_device(),
        "threads": torch.get_num_threads(),
        "versions": _versions(device),
        "commit": _commit(),
        "source_sha256": _digest("."),
        "kernels_sha256": kernels_digest(device),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["tilewise", *sys.argv[1:]]),
    }


def _cpu_device() -> dict[str, Any]:
    return {
        "type": "cpu",
        "name": processor_name(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instruction_sets": {name: os.environ[name] for name in INSTRUCTION_SETS if name in os.environ},
    }


def _cuda_device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": _output("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def _versions(device: str) -> dict[str, str]:
    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    if device == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return versions


def _commit() -> str | None:
    """Of the checkout that holds this file, with "+changes" if it is not clean; None outside of one."""
    here = str(Path(__file__).parent)
    commit = _output("git", "-C", here, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + (
        "+changes" if _output("git", "-C", here, "status", "--porcelain", "--", here + "/../..") else ""
    )


def kernels_digest(device: str) -> str:
    """Of what decides results and speed of calls on "cpu" or "cuda": what another gave is out of date."""
    return _digest("core", "dispatch", "autograd", "cache", "tiled", "gpu" if device == "cuda" else "cpu")


def _digest(*folders: str) -> str:
    """Of the package's source files in these folders: names the code even where there is no checkout."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _output(*command: str) -> str | None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()


def save(results: Results, path: Path) -> None:
    """Write atomically: a run that is cut short leaves the cases it finished."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps(results, indent=1, ensure_ascii=False)
    numbers = r"\[[-+.\deE,\s]+\]"
    text = re.sub(numbers, lambda found: " ".join(found[0].split()), text)  # a round's samples on one line
    scratch.write_text(text + "\n")
    os.replace(scratch, path)


def load(path: Path | str) -> Results:
    """Read a result file."""
    try:
        results = json.loads(Path(path).read_text())
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BenchError(f"{path}: is not JSON: {error}") from error
    if not isinstance(results, dict) or results.get("kind") != KIND:
        raise BenchError(f"{path}: is not a result file of 'tilewise bench run'")
    if results.get("schema_version") != SCHEMA_VERSION:
        raise BenchError(
            f"{path}: schema_version={results.get('schema_version')} must be {SCHEMA_VERSION}: "
            "measure again with this version"
        )
    return results


def check_writable(path: Path) -> None:
    """Find out before a long run that its results could not be written."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BenchError(f"--json {path}: must be a file in a folder that exists and can be written to")


def case_of(record: dict[str, Any]) -> Case:
    return Case.from_json(record["case"])


def is_measured(entry: Entry | None) -> TypeGuard[Entry]:
    return entry is not None and entry["status"] == "ok"


def round_medians(entry: Entry) -> list[float]:
    """The median of each round, in seconds (bytes for a memory case)."""
    return [statistics.median(samples) for samples in entry["samples"]]


def median(entry: Entry) -> float:
    """The median of the rounds' medians."""
    return statistics.median(round_medians(entry))


def spread(entry: Entry) -> float:
    """(largest - smallest) / median of the rounds' medians."""
    medians = round_medians(entry)
    middle = statistics.median(medians)
    return (max(medians) - min(medians)) / middle if middle else 0.0


def ratio(slower: Entry, faster: Entry) -> float:
    """How many times faster `faster` is: the median over rounds of the ratio within a round.

    Peers take turns within a round, so a drift of the clock cancels.
    """
    pairs = list(zip(round_medians(slower), round_medians(faster)))
    return statistics.median(a / b for a, b in pairs)


def ceiling(results: Results, unit: str, dtype: str = "float32") -> float | None:
    """FLOP/s ("flops") or bytes/s ("bytes") that the run's own matmul or read reached at the median.

    Where the run measured a matmul of the dtype too, the faster counts.
    """
    names = {"flops": ("matmul", f"matmul-{dtype}"), "bytes": ("read",)}[unit]
    found = [results["ceilings"][name] for name in names if name in results.get("ceilings", {})]
    return max((c[unit] / statistics.median(c["samples"]) for c in found), default=None)


THRESHOLD = 0.02  # a change smaller than this is not reported, however small the spread


class Change(NamedTuple):
    """One peer on one case; `factor` is new / old time (or bytes), None if one of them has none."""

    case: str
    peer: str
    verdict: str  # "slower", "faster", "same", "broken", "fixed", "gone"
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
        return Change(case, peer, "fixed" if is_measured(new) else "same", None)
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
