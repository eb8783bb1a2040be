"""Peak extra memory of one call: what it needs beyond its inputs, outputs and gradients.

On a GPU, PyTorch's allocator keeps the peak. On the CPU the only witness that sees every allocation,
also those of C++ kernels and of generated code, is the kernel's count of resident pages; so each
measurement is a process of its own that makes the inputs, warms up on a small problem (thread pools,
library scratch), resets the peak, calls once and reads the growth of the peak: a second call would find
the scratch memory that the first one keeps. glibc is told to give freed blocks back at once, or pages that
it keeps would hide what a call allocates.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import Refusal
from tilewise.lab.bench.peer import Data
from tilewise.lab.bench.peers import find_peers
from tilewise.lab.demo.memory import peak_extra

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
WARM_UP_LENGTH = 512


def method(device: str) -> str:
    if device == "cuda":
        return "growth of torch.cuda.max_memory_allocated during a call, less outputs and gradients"
    return "growth of a fresh process's peak resident set (VmHWM) during one call, less outputs and gradients"


def measure(case: Case, peer_name: str, data: Data) -> int:
    """Bytes at the peak of a call beyond inputs, outputs and gradients."""
    if data.device == "cuda":
        return _measure_cuda(case, peer_name, data)
    request = json.dumps(
        {"case": case.to_json(), "peer": peer_name, "seed": data.seed, "threads": torch.get_num_threads()}
    )
    finished = subprocess.run(
        [sys.executable, "-m", "tilewise.lab.bench.memory", request],
        capture_output=True,
        text=True,
        env={**os.environ, **ALLOCATOR},
    )
    if finished.returncode != 0:
        last = finished.stderr.strip().splitlines()[-1:] or [f"status {finished.returncode}"]
        raise RuntimeError(f"the measuring process failed: {last[0]}")
    answer = json.loads(finished.stdout.splitlines()[-1])
    if answer["refused"] is not None:
        raise Refusal(answer["refused"])
    return answer["bytes"]


def _measure_cuda(case: Case, peer_name: str, data: Data) -> int:
    (peer,) = find_peers([peer_name])
    prepared = peer.prepare(case, data, peer.layouts(case)[0])
    with prepared.context():
        prepared.call()  # compilation and workspaces that stay
        return peak_extra(lambda: _tensors(prepared.call()), torch.device("cuda"))[1]


def _tensors(results: Any) -> tuple[torch.Tensor, ...]:
    """What a call returned: out, or out and gradients."""
    return (results,) if isinstance(results, torch.Tensor) else (results[0], *results[1])


def _measure_here(case: Case, peer_name: str, seed: int) -> int:
    """In the fresh process."""
    (peer,) = find_peers([peer_name])
    layout = peer.layouts(case)[0]
    small = dataclasses.replace(case, seqlen_q=WARM_UP_LENGTH, seqlen_k=WARM_UP_LENGTH)
    data = Data(case, "cpu", seed)
    for _ in range(2):
        warm = peer.prepare(small, Data(small, "cpu", seed), layout)
        with warm.context():
            warm.call()
    prepared = peer.prepare(case, data, layout)
    with prepared.context():
        before = _reset_peak()
        kept = sum(t.nbytes for t in _tensors(prepared.call()))
        return max(0, _status("VmHWM") - before - kept)


def _reset_peak() -> int:
    """Make the present resident size the peak, and return it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        peak, present = _status("VmHWM"), _status("VmRSS")
    except OSError as error:
        raise Refusal("this system does not let a process measure its own peak memory") from error
    if peak - present > 1 << 20:
        raise Refusal("this system does not let a process reset its peak memory")
    return peak


def _status(field: str) -> int:
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(request: str) -> None:
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    answer: dict[str, Any] = {"bytes": None, "refused": None}
    try:
        answer["bytes"] = _measure_here(Case.from_json(asked["case"]), asked["peer"], asked["seed"])
    except (Refusal, NotImplementedError) as refusal:
        answer["refused"] = str(refusal)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
