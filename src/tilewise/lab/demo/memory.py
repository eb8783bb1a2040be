"""How much memory a call needs beyond what it returns, and how much there is."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

HOW = {
    "cpu": "every allocation of PyTorch's allocator during one call in a fresh thread, recorded by "
    "torch.profiler and replayed to the peak, less the output and the gradients",
    "cuda": "torch.cuda.max_memory_allocated during one call, less the output and the gradients",
}
ASSUMED_FREE = 2 << 30  # bytes, where the system does not tell

Call = Callable[[], tuple[Tensor, ...]]


def peak_extra(call: Call, device: torch.device) -> tuple[tuple[Tensor, ...], int]:
    """What `call` returns, and the bytes it held at its peak beyond that."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        results = call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        # In a fresh thread, because a backend may keep scratch for its thread's next call: it counts too.
        with ThreadPoolExecutor(max_workers=1) as thread:
            results, peak = thread.submit(_record, call).result()
    return results, max(0, peak - sum(t.nbytes for t in results))


def _record(call: Call) -> tuple[tuple[Tensor, ...], int]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with _no_stderr(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        results = call()
    return results, _replay(profile)


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """The profiler logs each start and stop to file descriptor 2; torch's import fixes whether it does."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _replay(profile: torch.profiler.profile) -> int:
    """The largest sum of allocated less freed bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken now: on the CPU without swapping, and within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        except (AttributeError, ValueError, OSError):
            return ASSUMED_FREE
    return min(free, _container_bytes())


def _container_bytes() -> int:
    """What the control group leaves, in either version's files; a huge number if there is no limit."""
    versions = (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    )
    root = Path("/sys/fs/cgroup")
    for limit, used in versions:
        try:
            return int((root / limit).read_text()) - int((root / used).read_text())
        except (OSError, ValueError):
            continue
    return 1 << 62
