"""Machines, predictions and the comparison with measurements."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tilewise.lab.bench import cases, results
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.learn import io_model, machines, roofline
from tilewise.lab.learn.io_model import Shape
from tilewise.lab.learn.machines import MACHINES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", MACHINES)
def test_machine_is_consistent(name):
    machine = machines.find_machine(name.lower())
    assert machine.name == name
    bandwidths = [level.bytes_per_second for level in machine.levels if level.bytes_per_second]
    assert bandwidths == sorted(bandwidths, reverse=True) and len(bandwidths) == 3
    latencies = [level.latency_cycles for level in machine.levels]
    assert latencies == sorted(latencies)
    sizes = [level.total_bytes for level in machine.levels[1:]]
    assert sizes == sorted(sizes)
    assert machine.memory.bytes_per_second == machine.device.bytes_per_second
    assert 1.3e9 < machine.clock_hz < 2e9
    assert machine.fast_level.name == "shared" and machine.cache.name == "L2"


def test_this_cpu_is_measured():
    machine = machines.find_machine("cpu")
    assert machine.clock_hz is None
    assert min(machine.vector_per_second, machine.special_per_second) > 1e6
    assert machine.device.flops_per_second > machine.vector_per_second
    assert "measured" in machine.memory.source
    for level in machine.levels[:-1]:
        assert level.bytes_per_second is None or level.bytes_per_second > 1e8
    prediction = roofline.predict(io_model.fa2(Shape(512, 512, 64)), machine)
    assert {roofline.MATMUL, roofline.SPECIAL, "memory"} <= set(prediction.times)
    assert 0 < prediction.seconds < 10


def test_caches_of_a_system_that_says_nothing(tmp_path):
    assert machines._cache_sizes(tmp_path) == {}
    assert machines._memory_bytes(tmp_path / "meminfo") == 0


def test_unknown_machine():
    with pytest.raises(ValueError, match="device must be one of A100, H100, H200 or cpu, got 'B200'"):
        machines.find_machine("B200")


@pytest.mark.parametrize(
    "count, text", [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_999, "1.0 MB"), (1e15, "1.0 PB")]
)
def test_human_bytes(count, text):
    assert machines.human_bytes(count) == text


@pytest.mark.parametrize("name", MACHINES)
def test_what_binds(name):
    """Storing the scores is bound by memory, tiles by matrix products, decoding by memory."""
    machine = MACHINES[name]
    shape = Shape(8192, 8192, 128, num_heads=32)
    assert roofline.predict(io_model.standard(shape), machine).bound == "HBM"
    assert roofline.predict(io_model.backward_storing(shape), machine).bound == "HBM"
    assert roofline.predict(io_model.fa2(shape), machine).bound == roofline.MATMUL
    assert (
        roofline.predict(io_model.decode(Shape(1, 65536, 128, num_heads=32, num_kv_heads=8)), machine).bound
        == "HBM"
    )


def test_exponentials_nearly_bind_heads_of_64_on_hopper():
    """2 (64 + 64) FLOPs a score take 0.2588 ps of the tensor cores, one exponential 0.2589 ps."""
    cost = io_model.fa2(Shape(8192, 8192, 64, num_heads=32))
    times = roofline.predict(cost, MACHINES["H200"]).times
    assert times[roofline.SPECIAL] > times[roofline.MATMUL] > 0.98 * times[roofline.SPECIAL]


def test_prediction_arithmetic():
    cost = io_model.fa2(Shape(1000, 3000, 64, num_heads=3))
    machine = MACHINES["A100"]
    prediction = roofline.predict(cost, machine)
    assert prediction.times[roofline.MATMUL] == cost.matmul_flops / 312e12
    assert prediction.times["HBM"] == cost.once_bytes / 2e12
    assert prediction.times["L2"] == cost.slow_bytes / machine.cache.bytes_per_second
    assert prediction.seconds == max(prediction.times.values()) <= prediction.one_after_the_other
    device = machine.device
    assert roofline.attainable(device.balance, device) == device.flops_per_second
    assert roofline.attainable(1.0, device) == device.bytes_per_second
    assert not roofline.is_compute_bound(device.balance * 0.99, device)
    assert roofline.memory_intensity(cost, machine) == cost.matmul_flops / cost.once_bytes
    for algorithm in (io_model.standard, io_model.fa2, io_model.backward_storing, io_model.decode):
        cost = algorithm(Shape(1000, 3000, 64, num_heads=3))
        speed = cost.matmul_flops / roofline.predict(cost, machine).seconds
        assert speed <= roofline.attainable(roofline.memory_intensity(cost, machine), device) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_least_is_below_every_loop(seed):
    """No loop moves fewer bytes or computes less than the bound of the same case."""
    source = random.Random(seed)
    direction = source.choice(["forward", "backward"])
    case = cases.dense(
        direction,
        "bfloat16",
        source.choice([64, 128]),
        4,
        2,
        source.randint(1, 3000),
        causal=source.random() < 0.5,
    )
    shape = Shape(case.seqlen_q, case.seqlen_k, case.head_dim, num_heads=4, batch=2, causal=case.causal)
    loop = io_model.fa2(shape) if direction == "forward" else io_model.backward_recompute(shape)
    machine = MACHINES["H200"]
    bound, found = roofline.least(case, machine, machine.device), roofline.predict(loop, machine)
    for resource in (roofline.MATMUL, roofline.SPECIAL, "HBM"):
        assert bound.times[resource] <= found.times[resource]
    if direction == "forward" and not case.causal:
        assert roofline.least_bytes(case) == loop.once_bytes


def test_measured_h200_is_never_faster_than_its_bound():
    files = sorted(RESULTS.glob("h200*.json")) + sorted(RESULTS.glob("recorded/h200*.json"))
    points = roofline.load_points(files)
    assert points and {p.device.name for p in points} == {"H200"}
    too_fast = [p for p in points if p.share > 1]
    assert not too_fast
    assert max(p.share for p in points) > 0.5


def test_measured_cases_stand_under_the_roof():
    points = roofline.load_points([RESULTS / "h200-headline-quick-2026-11-28.json"])
    ours = [p for p in points if p.peer == "tilewise"]
    for p in ours:
        assert p.flops / p.seconds <= roofline.attainable(p.flops / p.bytes, p.device)


def test_measured_cpu_uses_the_ceilings_of_its_run():
    (path,) = RESULTS.glob("cpu-[0-9]*.json")
    found = results.load(path)
    points = roofline.points(found)
    assert points[0].prediction.times[roofline.MATMUL] == pytest.approx(
        found["cases"][0]["flops"] / results.ceiling(found, "flops")
    )
    assert roofline.compared(points)[0][0] == found["cases"][0]["name"]


def test_plot(tmp_path):
    points = roofline.load_points(sorted(RESULTS.glob("h200*.json")))
    path = tmp_path / "plot.svg"
    roofline.measured_over_predicted(points, path)
    assert path.read_text().startswith("<?xml") and path.stat().st_size > 10_000
    with pytest.raises(BenchError, match="no measured case"):
        roofline.measured_over_predicted([], path)
    with pytest.raises(BenchError, match="--plot"):
        roofline.measured_over_predicted(points, tmp_path / "missing" / "plot.svg")
    costs = [io_model.standard(Shape(1024, 1024, 64)), io_model.fa2(Shape(1024, 1024, 64))]
    roofline.under_the_roof(costs, MACHINES["H100"], path)
    drawn = path.read_text()
    assert "H100: balance 295" in drawn and "standard: HBM" in drawn and "fa2: " in drawn


def test_results_without_limits():
    found = {"device": {"name": "unknown"}, "ceilings": {}, "cases": []}
    with pytest.raises(BenchError, match="its limits are unknown"):
        roofline.points(found)
