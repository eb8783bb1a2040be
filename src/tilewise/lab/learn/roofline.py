"""Which resource binds a call on a machine, and the time that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewise.device import Device
from tilewise.lab.bench.cases import Case
from tilewise.lab.learn.io_model import Cost
from tilewise.lab.learn.machines import Machine

MATMUL, VECTOR, SPECIAL = "matrix products", "vector arithmetic", "special functions"


@dataclass(frozen=True)
class Prediction:
    """Seconds that each resource needs on its own. No run is faster than the largest of them.

    Example:
        >>> Prediction({"matrix products": 2e-3, "HBM": 1e-3}).bound
        'matrix products'
    """

    times: Mapping[str, float]

    @property
    def bound(self) -> str:
        return max(self.times, key=lambda resource: self.times[resource])

    @property
    def seconds(self) -> float:
        return max(self.times.values())

    @property
    def one_after_the_other(self) -> float:
        """Seconds if nothing overlapped."""
        return sum(self.times.values())


def predict(cost: Cost, machine: Machine) -> Prediction:
    """Time of a `io_model` cost, all cores at work.

    A machine with a cache between the tiles and main memory serves repeated loads from it: main memory moves
    `once_bytes`, the cache every byte that the loops load and store. Without one, main memory moves it all.

    Example:
        >>> from tilewise.learn import io_model, machines
        >>> shape = io_model.Shape(4096, 4096, 128, num_heads=16, batch=4)
        >>> h200 = machines.MACHINES["H200"]
        >>> predict(io_model.standard(shape), h200).bound, predict(io_model.fa2(shape), h200).bound
        ('HBM', 'matrix products')
    """
    times = {
        MATMUL: cost.matmul_flops / machine.device.flops_per_second,
        VECTOR: cost.vector_flops / machine.vector_per_second,
        SPECIAL: cost.special_ops / machine.special_per_second,
    }
    fast, cache = machine.fast_level, machine.cache
    if fast.bytes_per_second is not None:
        times[fast.name] = cost.fast_read / fast.bytes_per_second
    if cache is not None and cache.bytes_per_second is not None:
        times[cache.name] = cost.slow_bytes / cache.bytes_per_second
    times[machine.memory.name] = memory_bytes(cost, machine) / machine.device.bytes_per_second
    return Prediction(times)


def memory_bytes(cost: Cost, machine: Machine) -> int:
    """What main memory moves: each element once in each kernel if there is a cache, else every load."""
    return cost.slow_bytes if machine.cache is None else cost.once_bytes


def memory_intensity(cost: Cost, machine: Machine) -> float:
    """FLOPs of matrix products for each byte that main memory moves: where the roofline has the algorithm."""
    return cost.matmul_flops / memory_bytes(cost, machine)


def is_compute_bound(intensity: float, device: Device) -> bool:
    """Whether a kernel of `intensity` FLOPs a byte sits right of the roofline's ridge.

    Example:
        >>> from tilewise.lab.learn.machines import MACHINES
        >>> is_compute_bound(1.0, MACHINES["A100"].device)
        False
    """
    return intensity >= device.balance


def attainable(intensity: float, device: Device) -> float:
    """FLOP/s at that intensity: the roof."""
    return min(device.flops_per_second, intensity * device.bytes_per_second)


def softmax_intensity(itemsize: int = 2) -> float:
    """FLOPs a byte of a softmax kernel on its own: 4 a score, which is read once and written once."""
    return 4 / (2 * itemsize)


def least(case: Case, machine: Machine | None, device: Device) -> Prediction:
    """The bound of a benchmark case: visible pairs only, each tensor moved once.

    `machine` adds its special functions: one exponential a visible pair, in either direction.
    """
    times = {
        MATMUL: case.flops() / device.flops_per_second,
        "HBM" if machine is not None else "memory": least_bytes(case) / device.bytes_per_second,
    }
    if machine is not None:
        times[SPECIAL] = case.visible_pairs() / machine.special_per_second
    return Prediction(times)


def least_bytes(case: Case) -> int:
    """Every input read once and every output written once; lse is float32.

    The backward reads Q, K, V, O, dO and lse and writes dQ, dK and dV.
    """
    size = case.torch_dtype.itemsize
    queries = case.num_heads * sum(n for n, _ in case.sequences)
    keys = case.num_kv_heads * sum(n for _, n in case.sequences)
    d, dv = case.head_dim, case.head_dim_v
    forward = (queries + keys) * (d + dv) * size + queries * 4
    if case.direction == "forward":
        return forward
    return forward + (queries * (d + dv) + keys * (d + dv)) * size
