"""Machines as data: what each can compute and move, level by level, and this CPU measured."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewise.device import DATASHEET, Device, best_time, device_for

KIB, MIB = 1024, 1024**2
F32 = 4  # bytes


@dataclass(frozen=True)
class Level:
    """One level of memory. `units` copies of `bytes` each; `bytes_per_second` is of all units together."""

    name: str
    bytes: int
    units: int
    bytes_per_second: float | None  # None: not published
    latency_cycles: int | None  # None: not measured
    source: str

    @property
    def total_bytes(self) -> int:
        return self.bytes * self.units


@dataclass(frozen=True)
class Machine:
    """A processor: its roofline (`device`), its slower arithmetic, and its memory from fast to slow.

    Example:
        >>> MACHINES["H100"].device.balance > 295
        True
    """

    name: str
    device: Device  # matrix products and main memory
    vector_per_second: float  # multiplies, adds and comparisons outside matrix products, each counted as one
    special_per_second: float  # exponentials, logarithms and reciprocals
    cores: int
    clock_hz: float | None
    levels: tuple[Level, ...]
    fast: str  # the level that tiles live in

    def level(self, name: str) -> Level:
        return next(level for level in self.levels if level.name == name)

    @property
    def fast_level(self) -> Level:
        return self.level(self.fast)

    @property
    def cache(self) -> Level | None:
        """The level between the tiles and main memory, if there is one: it serves loads that are repeated."""
        between = self.levels[self.levels.index(self.fast_level) + 1 : -1]
        return between[-1] if between else None

    @property
    def memory(self) -> Level:
        """Main memory: the slowest and largest level."""
        return self.levels[-1]


ONE_THREAD = (1 << 15) - 64  # numbers that PyTorch leaves to one thread: waiting for others takes longer
SMALLEST_TIMED = 256 * KIB  # a copy within less is over before PyTorch's own overhead
SPECIAL_PER_CLOCK = 16  # a multiprocessor's, from 8.0 to 9.0: CUDA programming guide, arithmetic throughput
SHARED_BYTES_PER_CLOCK = 128  # a multiprocessor's: 32 banks of 4 bytes
L2_BYTES_PER_CLOCK = 5120  # the GPU's: A100 whitepaper
LATENCY = "rough, not measured here; the H200's taken to be the H100's"


@dataclass(frozen=True)
class _Gpu:
    """What datasheets and whitepapers give; rates by clock follow from it."""

    cores: int
    matmul_flops_per_clock: int  # a core's, 16-bit inputs, dense
    vector_tflops: float  # float32 outside the tensor cores, a fused multiply-add counted as two
    shared_kib: int  # that one block can have
    l2_mib: int
    memory_gb: int
    l2_cycles: int
    memory_cycles: int


_GPUS = {
    "A100": _Gpu(108, 2048, 19.5, 163, 40, 80, 260, 470),
    "H100": _Gpu(132, 4096, 66.9, 227, 50, 80, 260, 480),
    "H200": _Gpu(132, 4096, 66.9, 227, 50, 141, 260, 480),
}


def _gpu(device: Device, gpu: _Gpu) -> Machine:
    cores = gpu.cores
    clock = device.flops_per_second / (cores * gpu.matmul_flops_per_clock)
    shared, l2 = cores * SHARED_BYTES_PER_CLOCK * clock, L2_BYTES_PER_CLOCK * clock
    late, hbm = f"latency: {LATENCY}", device.bytes_per_second
    levels = (
        Level("registers", 256 * KIB, cores, None, 1, "65 536 of 32 bits in each multiprocessor"),
        Level("shared", gpu.shared_kib * KIB, cores, shared, 30, f"128 bytes a clock; {late}"),
        Level("L2", gpu.l2_mib * MIB, 1, l2, gpu.l2_cycles, f"5120 bytes a clock; {late}"),
        Level("HBM", gpu.memory_gb * 10**9, 1, hbm, gpu.memory_cycles, f"{device.source}; {late}"),
    )
    special = cores * SPECIAL_PER_CLOCK * clock
    vector = gpu.vector_tflops * 1e12 / 2
    return Machine(device.name, device, vector, special, cores, clock, levels, "shared")


MACHINES = {device.name: _gpu(device, _GPUS[device.name]) for device in DATASHEET}


def find_machine(name: str) -> Machine:
    """A machine of `MACHINES` by name, whatever its case; "cpu" measures this one (about a second).

    Raises:
        ValueError: there is none of that name.
    """
    if name.lower() == "cpu":
        return this_cpu()
    for known, machine in MACHINES.items():
        if known.lower() == name.lower():
            return machine
    raise ValueError(f"device must be one of {', '.join(MACHINES)} or cpu, got {name!r}")


@functools.lru_cache(maxsize=1)
def this_cpu() -> Machine:
    """This processor: cache sizes as the system reports them, rates measured with PyTorch's operations."""
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    caches = _cache_sizes()
    levels = [
        Level(
            f"L{n}",
            size,
            1 if n == 3 else threads,
            _copy_rate(size) if n == 3 else threads * _core_copy_rate(size),
            None,
            "rate measured: copy of half of it",
        )
        if size >= SMALLEST_TIMED
        else Level(f"L{n}", size, threads, None, None, "too small to time from Python")
        for n, size in sorted(caches.items())
    ]
    device = device_for(cpu, torch.float32)
    assert device is not None  # only meta tensors have none
    levels.append(Level("memory", _memory_bytes(), 1, device.bytes_per_second, None, device.source))
    x, y = torch.rand(2, ONE_THREAD)
    vector = threads * x.numel() / best_time(lambda: torch.add(x, y, out=y), cpu, repeats=200)
    special = threads * x.numel() / best_time(lambda: torch.exp(x, out=y), cpu, repeats=200)
    fast = "L2" if 2 in caches else levels[0].name
    return Machine(device.name, device, vector, special, threads, None, tuple(levels), fast)


def _copy_rate(size: int) -> float:
    """Bytes a second, read and written, of a copy that fills half of a cache (32 MiB of a larger one)."""
    source = torch.rand(min(size, 64 * MIB) // 4 // F32)
    target = torch.empty_like(source)
    seconds = best_time(lambda: target.copy_(source), torch.device("cpu"), repeats=50)
    return 2 * source.nbytes / seconds


def _core_copy_rate(size: int) -> float:
    """Bytes a second, read and written, of one core's copy that fills half of its cache, part by part."""
    sources = torch.rand(max(1, size // 4 // F32 // ONE_THREAD), ONE_THREAD)
    pairs = list(zip(sources, torch.empty_like(sources)))

    def copy() -> None:
        for source, target in pairs:
            target.copy_(source)

    return 2 * sources.nbytes / best_time(copy, torch.device("cpu"), repeats=200)


def _cache_sizes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[int, int]:
    """Bytes of the data cache of each level; empty where the system does not say."""
    sizes = {}
    for folder in root.glob("index*"):
        try:
            kind, level, size = ((folder / name).read_text().strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        if kind != "Instruction" and size.endswith("K"):
            sizes[int(level)] = int(size[:-1]) * KIB
    return sizes


def _memory_bytes(path: Path = Path("/proc/meminfo")) -> int:
    """Of main memory; 0 where the system does not say."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("MemTotal")), 0)


PREFIXES = "kMGTPEZYRQ"


def human_bytes(count: float) -> str:
    """Decimal units, three digits.

    Example:
        >>> human_bytes(34359738368)
        '34.4 GB'
    """
    if count < 1000:
        return f"{count:.0f} B"
    power = min(len(PREFIXES), int(math.log10(count) // 3))
    if round(count / 1000**power, 1) >= 1000 and power < len(PREFIXES):
        power += 1
    value = count / 1000**power
    return f"{value:.{0 if value >= 99.95 else 1}f} {PREFIXES[power - 1]}B"
