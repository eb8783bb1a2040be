"""The counts of `io_model` against a machine that runs each algorithm and counts, and against the trace."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import simulator
import torch

from tilewise import reference
from tilewise.core.mask import Visibility
from tilewise.lab.learn import io_model
from tilewise.lab.learn.io_model import Shape
from tilewise.lab.learn.records import BlockSizes
from tilewise.learn import trace

COUNTS = ("once_bytes", "fast_read", "fast_written", "matmul_flops", "vector_flops", "special_ops")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def draw(seed: int, *, causal: bool | None = None) -> tuple[Shape, BlockSizes]:
    source = random.Random(seed)
    shape = Shape(
        seqlen_q=source.randint(1, 23),
        seqlen_k=source.randint(1, 23),
        head_dim=source.randint(1, 5),
        head_dim_v=source.randint(1, 5),
        itemsize=source.choice([2, 4, 8]),
        causal=source.random() < 0.5 if causal is None else causal,
    )
    return shape, BlockSizes(source.randint(1, 9), source.randint(1, 9))


def inputs(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        normal(shape.seqlen_q, shape.head_dim),
        normal(shape.seqlen_k, shape.head_dim),
        normal(shape.seqlen_k, shape.dim_v),
    )


def expected(shape: Shape, q, k, v, scale):
    one_head = [t[None, :, None] for t in (q, k, v)]
    out, lse = reference.attention(*one_head, scale=scale, causal=shape.causal)
    return out[0, :, 0], lse[0, 0]


def gradients(shape: Shape, do, q, k, v, scale):
    one_head = [t[None, :, None] for t in (q, k, v)]
    grads = reference.attention_backward(do[None, :, None], *one_head, scale=scale, causal=shape.causal)
    return [t[0, :, 0] for t in (grads.query, grads.key, grads.value)]


def same_counts(cost: io_model.Cost, machine: simulator.Machine) -> None:
    assert dict(cost.reads) == {name: count for name, count in machine.reads.items() if count}
    assert dict(cost.writes) == {name: count for name, count in machine.writes.items() if count}
    found = {name: getattr(machine, name) for name in COUNTS}
    assert {name: getattr(cost, name) for name in COUNTS} == found
    assert cost.extra_bytes == machine.allocated
    assert cost.slow_bytes == sum(machine.reads.values()) + sum(machine.writes.values())


@pytest.mark.parametrize("seed", range(30))
def test_standard(seed):
    shape, blocks = draw(seed)
    q, k, v = inputs(shape)
    machine, out = simulator.standard(shape, q, k, v, 0.7, blocks)
    torch.testing.assert_close(out, expected(shape, q, k, v, 0.7)[0])
    same_counts(io_model.standard(shape, blocks), machine)


@pytest.mark.parametrize("seed", range(40))
def test_fa1(seed):
    shape, _ = draw(seed)
    sram = random.Random(seed).randint(shape.itemsize, 100 * shape.itemsize)
    blocks = io_model.sram_blocks(shape, sram)
    q, k, v = inputs(shape)
    machine, out = simulator.fa1(shape, q, k, v, 0.7, blocks)
    torch.testing.assert_close(out, expected(shape, q, k, v, 0.7)[0])
    cost = io_model.fa1(shape, sram)
    same_counts(cost, machine)
    walk = trace.forward(q, k, v, *blocks, order="fa1", normalize="each_step", causal=shape.causal)
    assert in_bytes(walk.loads(), shape) == cost.reads
    assert in_bytes(walk.stores(), shape) == cost.writes


@pytest.mark.parametrize("seed", range(40))
def test_fa2(seed):
    shape, blocks = draw(seed)
    q, k, v = inputs(shape)
    machine, out, lse = simulator.fa2(shape, q, k, v, 0.7, blocks)
    torch.testing.assert_close(out, expected(shape, q, k, v, 0.7)[0])
    torch.testing.assert_close(lse, expected(shape, q, k, v, 0.7)[1])
    cost = io_model.fa2(shape, blocks)
    same_counts(cost, machine)
    walk = trace.forward(q, k, v, *blocks, causal=shape.causal)
    assert in_bytes(walk.loads(), shape) == cost.reads
    assert in_bytes(walk.stores(), shape) == cost.writes


def in_bytes(elements: Counter[str], shape: Shape) -> dict[str, int]:
    """Statistics are float32, matrices have the inputs' size."""
    statistics = ("l", "m", "lse")
    counts = {n: count * (4 if n in statistics else shape.itemsize) for n, count in elements.items()}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("seed", range(30))
def test_backward_storing(seed):
    shape, blocks = draw(seed)
    q, k, v = inputs(shape)
    do = normal(shape.seqlen_q, shape.dim_v)
    lse = expected(shape, q, k, v, 0.7)[1]
    s = (0.7 * q @ k.T).masked_fill(
        ~simulator.is_visible(shape, slice(0, shape.seqlen_q), slice(0, shape.seqlen_k)), float("-inf")
    )
    p = torch.exp(s - simulator.finite(lse)[:, None])
    machine, *found = simulator.backward_storing(shape, q, k, v, do, p, 0.7, blocks)
    for ours, right in zip(found, gradients(shape, do, q, k, v, 0.7), strict=True):
        torch.testing.assert_close(ours, right)
    same_counts(io_model.backward_storing(shape, blocks), machine)


@pytest.mark.parametrize("seed", range(40))
def test_backward_recompute(seed):
    shape, blocks = draw(seed)
    q, k, v = inputs(shape)
    do = normal(shape.seqlen_q, shape.dim_v)
    out, lse = expected(shape, q, k, v, 0.7)
    machine, *found = simulator.backward_recompute(shape, q, k, v, out, do, lse, 0.7, blocks)
    for ours, right in zip(found, gradients(shape, do, q, k, v, 0.7), strict=True):
        torch.testing.assert_close(ours, right)
    same_counts(io_model.backward_recompute(shape, blocks), machine)


@pytest.mark.parametrize("seed", range(40))
def test_decode(seed):
    drawn, blocks = draw(seed, causal=False)
    source = random.Random(seed)
    group, queries, splits = source.randint(1, 4), source.randint(1, 3), source.randint(1, 6)
    shape = Shape(
        queries, drawn.seqlen_k, drawn.head_dim, drawn.head_dim_v, group, 1, itemsize=drawn.itemsize
    )
    q, k, v = inputs(Shape(group * queries, drawn.seqlen_k, drawn.head_dim, drawn.head_dim_v))
    machine, out, lse = simulator.decode(shape, q, k, v, 0.7, splits, blocks.block_k)
    right = expected(Shape(group * queries, drawn.seqlen_k, 1), q, k, v, 0.7)
    torch.testing.assert_close(out, right[0])
    torch.testing.assert_close(lse, right[1])
    same_counts(io_model.decode(shape, splits, blocks.block_k), machine)


ALGORITHMS = {
    "standard": io_model.standard,
    "fa1": lambda shape: io_model.fa1(shape, 1000),
    "fa2": io_model.fa2,
    "backward_storing": io_model.backward_storing,
    "backward_recompute": io_model.backward_recompute,
    "decode": lambda shape: io_model.decode(shape, splits=3),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_batch_and_heads_multiply(name):
    one = ALGORITHMS[name](Shape(300, 700, 64))
    many = ALGORITHMS[name](Shape(300, 700, 64, num_heads=6, batch=2))
    assert many.slow_bytes == 12 * one.slow_bytes
    assert many.extra_bytes == 12 * one.extra_bytes
    assert many.asymptotic.elements == 12 * one.asymptotic.elements
    assert (many.intensity, many.sram_bytes) == (one.intensity, one.sram_bytes)
    for count in COUNTS:
        assert getattr(many, count) == 12 * getattr(one, count)


def test_long_sequences_are_counted_in_no_time():
    shape = Shape(2**20, 2**20, 128, causal=True)
    cost = io_model.fa2(shape)
    assert cost.matmul_flops > 4 * 128 * shape.pairs
    assert shape.pairs == Visibility(2**20, 2**20, None, 0).visible_pairs()


def test_tiles_move_less_the_more_fits():
    """Slow traffic of Algorithm 1 falls as 1 / M while d^2 < M < N d, within the constants of its loops."""
    shape = Shape(8192, 8192, 64)
    costs = [io_model.fa1(shape, kib * 1024) for kib in (32, 64, 128)]
    for small, large in itertools.pairwise(costs):
        assert 1.8 < small.slow_bytes / large.slow_bytes < 2.05
        assert small.asymptotic.elements == 2 * large.asymptotic.elements
    ratios = [cost.slow_bytes / shape.itemsize / cost.asymptotic.elements for cost in costs]
    assert max(ratios) / min(ratios) < 1.1


def test_asymptotic_forms_bound_the_counts_from_both_sides():
    for n in (1024, 4096, 16384):
        shape = Shape(n, n, 64)
        for cost in (io_model.standard(shape), io_model.backward_storing(shape), io_model.fa2(shape)):
            ratio = cost.slow_bytes / shape.itemsize / cost.asymptotic.elements
            assert 1 < ratio < 16, (cost.algorithm, ratio)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shape(0, 1, 1), "seqlen_q must be at least 1, got 0"),
        (lambda: Shape(1, 1, 1, num_heads=3, num_kv_heads=2), "multiple of num_kv_heads=2, got 3"),
        (
            lambda: io_model.fa1(Shape(1, 1, 1), 1),
            "sram_bytes must be at least one element of 2 bytes, got 1",
        ),
        (lambda: io_model.decode(Shape(1, 1, 1), splits=0), "splits must be at least 1, got 0"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
