"""Tables and figures that explanations of FlashAttention commonly print, computed exactly.

`shows` holds a figure that is right as printed; `slip` one that is not, with what it should read and why.
"""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.lab.learn import io_model, kv_memory, roofline
from tilewise.lab.learn.io_model import Shape
from tilewise.lab.learn.machines import MACHINES, MIB

KIB, GIB = 1024, 1024**3
A100, H100 = MACHINES["A100"], MACHINES["H100"]


def reads_as(value: float, printed: str) -> bool:
    decimals = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


def shows(value: float, printed: str) -> None:
    assert reads_as(value, printed), f"{value} does not read {printed}"


def slip(value: float, *, printed: str, exact: str) -> None:
    shows(value, exact)
    assert not reads_as(value, printed), f"{value} does read {printed}: no slip"


def test_score_matrix_sizes():
    """The usual column 0.5 MB, 8 MB, 134 MB, 2.1 GB, 34 GB changes its unit halfway: MiB first, then MB."""
    sizes = {n: kv_memory.score_matrix_bytes(n) for n in (512, 2048, 8192, 32768, 131072)}
    shows(sizes[512] / MIB, "0.5")
    shows(sizes[512] / 1e6, "0.5")
    slip(sizes[2048] / 1e6, printed="8.0", exact="8.4")
    shows(sizes[2048] / MIB, "8")
    shows(sizes[8192] / 1e6, "134")
    slip(sizes[8192] / MIB, printed="134", exact="128")
    shows(sizes[32768] / 1e9, "2.1")
    slip(sizes[32768] / GIB, printed="2.1", exact="2.0")
    shows(sizes[131072] / 1e9, "34")
    slip(sizes[131072] / GIB, printed="34", exact="32")
    assert [n * n for n in sizes] == [262_144, 4_194_304, 67_108_864, 1_073_741_824, 17_179_869_184]


def test_score_matrix_against_fast_memory():
    size = kv_memory.score_matrix_bytes(4096)
    shows(size / MIB, "32")
    slip(size / 1e6, printed="32", exact="34")
    assert size > 170 * 192 * KIB
    # A context of 100k tokens: 20 GB for one head, "terabytes" only for more than 50 heads together.
    shows(kv_memory.score_matrix_bytes(100_000) / 1e12, "0.02")
    assert 50 * kv_memory.score_matrix_bytes(100_000) == 1e12
    # A sequence of 512, said to fit the L2 cache: 262k numbers in 512 KiB, 1/80 of it.
    assert kv_memory.score_matrix_bytes(512) * 80 == A100.level("L2").bytes


def test_balance_points():
    shows(A100.device.balance, "156")
    shows(H100.device.balance, "295")
    assert (A100.device.flops_per_second, H100.device.flops_per_second) == (312e12, 989e12)
    assert (A100.device.bytes_per_second, H100.device.bytes_per_second) == (2.0e12, 3.35e12)


def test_softmax_alone():
    """Said to be 4 operations a number, 2 bytes in and 2 bytes out: 1 FLOP a byte."""
    # In our count the kernel has a fifth operation, the multiplication by 1 / sum, and the exponential apart.
    n = 4096
    cost = io_model.standard(Shape(n, n, 64))
    products = 2 * 2 * n * n * 64
    assert cost.matmul_flops == products
    assert cost.vector_flops == (1 + 4) * n * n and cost.special_ops == n * n + n


def test_exponentials_are_slower_than_is_often_said():
    """19.5 TFLOP/s is the A100's float32 rate of multiply-adds; exponentials have 16 a clock and core."""
    assert A100.vector_per_second * 2 == 19.5e12
    shows(A100.device.flops_per_second / 19.5e12, "16")
    slip(A100.device.flops_per_second / A100.special_per_second, printed="16", exact="128")
    shows(H100.special_per_second / 1e12, "3.9")  # often rounded to 4
    shows(H100.device.flops_per_second / H100.special_per_second, "256")  # often "about 250"


def test_memory_levels():
    total = A100.cores * 192 * KIB  # shared memory and L1 are one
    shows(total / 1e6, "21")
    shows(total / MIB, "20")
    shows(A100.level("shared").bytes_per_second / 1e12, "19.5")  # "about 19"
    shows(A100.level("shared").bytes_per_second / A100.device.bytes_per_second, "10")
    assert A100.level("registers").bytes == 256 * KIB
    # "400 times smaller" than 80 GB is neither one core's fast memory nor all of it.
    slip(80e9 / (192 * KIB), printed="400", exact="406901")
    slip(80e9 / total, printed="400", exact="3768")


def test_traffic_at_8192():
    """32 heads: 4.3 GB, 2.1 ms at 2 TB/s for one way; 32 layers make 69 ms, not "70 or more"."""
    size = kv_memory.score_matrix_bytes(8192, num_heads=32)
    shows(size / 1e9, "4.3")
    one_way = size / A100.device.bytes_per_second
    shows(one_way * 1e3, "2.1")
    slip(32 * one_way * 1e3, printed="70", exact="69")
    cost = io_model.standard(Shape(8192, 8192, 128, num_heads=32))
    assert sum(cost.reads[x] + cost.writes[x] for x in "sp") == 4 * size  # S and P, each written and read
    shows(roofline.predict(cost, A100).times["HBM"] * 1e3, "8.7")


def test_traffic_orders():
    """O(N^2 d) for standard attention, as some tables have it, is too much; N d + N^2 it is."""
    for n in (1024, 4096):
        cost = io_model.standard(Shape(n, n, 64))
        assert cost.slow_bytes / 2 < 4.3 * cost.asymptotic.elements
        assert cost.slow_bytes / 2 < n * n * 64 / 14
    # N = 2048, d = 64, M = 96 KiB: M counts numbers in the theorem, 49 152 of two bytes.
    cost = io_model.fa1(Shape(2048, 2048, 64), 96 * KIB)
    assert cost.asymptotic.elements == 2048**2 * 64**2 / 49_152
    stored = io_model.standard(Shape(2048, 2048, 64))
    assert stored.asymptotic.elements == 2048 * 64 + 2048**2
    shows(stored.asymptotic.elements / cost.asymptotic.elements, "12")  # "24" takes M in bytes
    # The loops of Algorithm 1 move 14 times what the theorem has without constants: 3.5 times less in all.
    shows(cost.slow_bytes / 2 / cost.asymptotic.elements, "14.0")
    shows(stored.slow_bytes / cost.slow_bytes, "3.5")


def test_cache_of_llama_2_70b():
    """10.5 GB takes 32 KB as 32 000 bytes; 32 768 make 10.7 GB, 10 GiB. The model shares heads: an eighth."""
    model = kv_memory.MODELS["llama-2-70b"]
    every = model.with_every_head()
    assert every.numbers_per_token * 2 == 32 * KIB
    slip(every.cache_bytes(4096) / 1e9, printed="10.5", exact="10.7")
    shows(32_000 * 80 * 4096 / 1e9, "10.5")
    assert every.cache_bytes(4096) == 10 * GIB
    shows(model.cache_bytes(4096) / 1e9, "1.3")
    assert model.sharing == 8


def test_sharing_of_heads():
    """8 to 32 times less with shared heads; one key head for all 71 of Falcon's makes it 71."""
    assert kv_memory.MODELS["llama-2-70b"].sharing == 8
    assert kv_memory.MODELS["falcon-7b"].sharing == 71
    assert kv_memory.MODELS["llama-3.1-405b"].sharing == 16
    assert kv_memory.MODELS["llama-2-7b"].sharing == 1


def test_generating_100_tokens():
    assert kv_memory.projections(100, cached=False) == sum(range(1, 101)) == 5050
    assert kv_memory.projections(100, cached=True) == 100


def test_tiles_of_8_by_8():
    from tilewise.learn import trace

    x = torch.randn(8, 2)
    walk = trace.forward(x, x, x, 2, 2)
    assert len(walk.steps) == 16 and all(step.s.numel() == 4 for step in walk.steps)


def test_range_of_float32():
    largest, smallest = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    shows(math.log(largest), "88.7")
    slip(-math.log(smallest), printed="88", exact="87")  # below, subnormal numbers go on
    x = torch.tensor([-88.0, -103.9, -104.0])
    assert (torch.exp(x) > 0).tolist() == [True, True, False]


@pytest.mark.parametrize(("n", "tiled"), [(512, 2), (4096, 2), (16384, 2)])
def test_extra_memory_of_tiles_is_linear(n, tiled):
    stored, kept = io_model.standard(Shape(n, n, 64)), io_model.fa2(Shape(n, n, 64))
    assert stored.extra_bytes == 2 * n * n * 2
    assert kept.extra_bytes == 4 * n
