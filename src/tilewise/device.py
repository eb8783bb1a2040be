"""What a device can do at best, the two numbers a roofline needs, and what its processor is called."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Device:
    """Peak arithmetic rate and memory bandwidth; `source` says where the numbers come from."""

    name: str
    flops_per_second: float
    bytes_per_second: float
    source: str

    @property
    def balance(self) -> float:
        """FLOPs per byte at which arithmetic and memory take equally long."""
        return self.flops_per_second / self.bytes_per_second


DATASHEET = (
    Device("A100", 312e12, 2.0e12, "datasheet, 16-bit tensor cores"),
    Device("H100", 989e12, 3.35e12, "datasheet, 16-bit tensor cores"),
    Device("H200", 989e12, 4.8e12, "datasheet, 16-bit tensor cores"),
)


@functools.lru_cache(maxsize=16)
def device_for(device: torch.device, dtype: torch.dtype) -> Device:
    """The device a tensor is on: from its datasheet if known, otherwise measured (about 0.1 s, once)."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known in DATASHEET:
            if known.name in name and dtype in (torch.bfloat16, torch.float16):
                return known
        return _measure(name, device, dtype)
    threads = torch.get_num_threads()
    # Half types are computed in float32 on the CPU.
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    return _measure(f"{device.type.upper()}, {threads} threads", device, compute)


def _measure(name: str, device: torch.device, dtype: torch.dtype) -> Device:
    size = 4096 if device.type == "cuda" else 768
    a = torch.rand(size, size, device=device).to(dtype)
    block = torch.rand((256 if device.type == "cuda" else 16) << 20, device=device)
    matmul = best_time(lambda: a @ a, device)
    copy = best_time(lambda: block.clone(), device)
    return Device(name, 2 * size**3 / matmul, 2 * block.nbytes / copy, "measured: matmul and copy")


def processor_name() -> str:
    """The CPU's model name, or what the platform says of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def best_time(run: Callable[[], object], device: torch.device, repeats: int = 4) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
