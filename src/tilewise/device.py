"""What a device can do at best: the two numbers a roofline needs. And what its processor is called."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch


@dataclass(frozen=True)
class Device:
    """Arithmetic rate and memory bandwidth; `source` says where they come from.

    `is_measured`: the fastest of some calls reached them. A kernel may be faster, the more so where other
    programs were running.
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    source: str
    is_measured: bool = False

    @property
    def balance(self) -> float:
        """FLOPs per byte at which arithmetic and memory take equally long."""
        return self.flops_per_second / self.bytes_per_second


DATASHEET = (
    Device("A100", 312e12, 2.0e12, "datasheet, 16-bit tensor cores"),
    Device("H100", 989e12, 3.35e12, "datasheet, 16-bit tensor cores"),
    Device("H200", 989e12, 4.8e12, "datasheet, 16-bit tensor cores"),
)
HALF = (torch.bfloat16, torch.float16)
# Of square matrices. Large ones are the fastest on a quiet machine; small ones find a pause on a busy one.
SIZES = {"cpu": (256, 768, 1536), "cuda": (4096, 8192)}
# What CPU kernels multiply, and how many such products make one: tile registers know bfloat16 alone.
CPU_PRODUCTS = {
    torch.float64: ((torch.float64, 1),),
    torch.float32: ((torch.float32, 1), (torch.bfloat16, 6)),
    torch.float16: ((torch.float32, 1), (torch.bfloat16, 3)),
    torch.bfloat16: ((torch.float32, 1), (torch.bfloat16, 1)),
}
BLOCK = {"cpu": 16 << 20, "cuda": 256 << 20}  # float32 numbers, which no cache holds


def device_for(device: torch.device, dtype: torch.dtype, precision: str = "ieee") -> Device | None:
    """The device a tensor is on: from its datasheet if known, otherwise measured (about a second, once).

    None for meta tensors, which no device computes with.

    Args:
        dtype: of the inputs.
        precision: of the products: see `tilewise.attention`.
    """
    if device.type == "meta":
        return None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known in DATASHEET:
            found = _tensor_cores(known, dtype, precision) if known.name in name else None
            if found is not None:
                return found
        return _measure(name, device, ((dtype, 1),), 0)
    threads = torch.get_num_threads()
    return _measure(f"{device.type.upper()}, {threads} threads", device, CPU_PRODUCTS[dtype], threads)


def _tensor_cores(known: Device, dtype: torch.dtype, precision: str) -> Device | None:
    """With the rate of the products that inputs and precision ask for; None if the datasheet has none."""
    if dtype in HALF:
        if precision not in ("fp8", "int8") or known.name == "A100":
            return known
        factor, kind = 2.0, "8-bit"
    elif dtype == torch.float32 and precision == "tf32":
        factor, kind = 0.5, "TF32"
    else:
        return None
    flops = factor * known.flops_per_second
    return replace(known, flops_per_second=flops, source=f"datasheet, {kind} tensor cores")


@functools.lru_cache(maxsize=16)
def _measure(
    name: str, device: torch.device, products: tuple[tuple[torch.dtype, int], ...], threads: int
) -> Device:
    """The fastest of several matrix products, and of a copy and a sum; `threads` is part of the key."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    draw = functools.partial(torch.rand, device=device, generator=torch.Generator(device).manual_seed(0))
    flops = 0.0
    for dtype, count in products:
        for size in SIZES[kind]:
            a, b = (draw(size, size).to(dtype) for _ in range(2))
            repeats = max(4, (1 << 30) // size**3)
            rate = 2 * size**3 / count / best_time(functools.partial(torch.mm, a, b), device, repeats)
            if rate < flops / 50:
                break  # a dtype that this processor has no instructions for: larger ones take seconds
            flops = max(flops, rate)
    source, target = (draw(BLOCK[kind]) for _ in range(2))
    copy = 2 * source.nbytes / best_time(lambda: target.copy_(source), device)
    read = source.nbytes / best_time(source.sum, device)
    what = "measured: the fastest of some matrix products, copies and sums"
    return Device(name, flops, max(copy, read), what, is_measured=True)


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
