"""The timeline keeps the kernel's protocol: nothing is read before it arrives or after it is overwritten."""

from __future__ import annotations

import itertools

import pytest

from tilewise.lab.learn.machines import MACHINES
from tilewise.lab.learn.pipeline import Pipeline, Span, Timeline

VARIANTS = [
    Pipeline(head_dim, block_n, warpgroups, stages, overlap, ping_pong, key_tiles)
    for (head_dim, block_n), warpgroups, stages, overlap, ping_pong, key_tiles in itertools.product(
        ((64, 128), (128, 128), (256, 64)), (1, 2, 3), (1, 2, 4), (True, False), (True, False), (1, 2, 9)
    )
]


@pytest.fixture(scope="module")
def timelines() -> list[Timeline]:
    return [variant.run() for variant in VARIANTS]


def one(timeline: Timeline, lane: str, kind: str, tile: int) -> Span:
    (span,) = (s for s in timeline.spans if (s.lane, s.kind, s.tile) == (lane, kind, tile))
    return span


def groups(timeline: Timeline) -> list[str]:
    return [f"warpgroup {w}" for w in range(timeline.pipeline.warpgroups)]


def test_all_the_work_is_done_once(timelines):
    for timeline in timelines:
        tiles = range(timeline.pipeline.key_tiles)
        for lane, j in itertools.product(groups(timeline), tiles):
            for kind in ("Q K", "softmax", "P V"):
                one(timeline, lane, kind, j)
        for j in tiles:
            one(timeline, "producer", "copy K", j)
            one(timeline, "producer", "copy V", j)


def test_units_do_one_thing_at_a_time(timelines):
    for timeline in timelines:
        for kinds in (("Q K", "P V"), ("softmax", "rescale")):
            spans = sorted((s for s in timeline.spans if s.kind in kinds), key=lambda s: s.start)
            for before, after in itertools.pairwise(spans):
                assert after.start >= before.end - 1e-6


def test_order_within_a_warpgroup(timelines):
    for timeline in timelines:
        for lane, j in itertools.product(groups(timeline), range(timeline.pipeline.key_tiles)):
            scores, softmax, product = (one(timeline, lane, kind, j) for kind in ("Q K", "softmax", "P V"))
            assert one(timeline, "producer", "copy K", j).end <= scores.start + 1e-6
            assert one(timeline, "producer", "copy V", j).end <= product.start + 1e-6
            assert scores.end <= softmax.start + 1e-6 and softmax.end <= product.start + 1e-6
            if j > 0:
                before = one(timeline, lane, "P V", j - 1)
                assert (scores.start < before.end) == timeline.pipeline.overlap


def test_a_slot_is_overwritten_only_when_every_warpgroup_has_read_it(timelines):
    for timeline in timelines:
        stages = timeline.pipeline.stages
        for j in range(stages, timeline.pipeline.key_tiles):
            for lane in groups(timeline):
                assert (
                    one(timeline, lane, "Q K", j - stages).end
                    <= one(timeline, "producer", "copy K", j).start + 1e-6
                )
                assert (
                    one(timeline, lane, "P V", j - stages).end
                    <= one(timeline, "producer", "copy V", j).start + 1e-6
                )


def test_ping_pong_takes_turns(timelines):
    for timeline in timelines:
        if timeline.pipeline.ping_pong:
            for kind in ("Q K", "P V"):
                lanes = [s.lane for s in sorted(timeline.spans, key=lambda s: s.start) if s.kind == kind]
                assert lanes == groups(timeline) * timeline.pipeline.key_tiles


def test_overlap_helps_two_warpgroups():
    """With the kernel's tiles, starting the next scores first keeps the tensor cores busier."""
    with_overlap, without = (Pipeline(128, 128, 2, 2, overlap=x, key_tiles=32).run() for x in (True, False))
    assert with_overlap.tensor_core_use > without.tensor_core_use + 0.2


def test_durations_come_from_the_machine():
    pipeline = Pipeline(128, 128, 2, 2)
    clock = MACHINES["H200"].clock_hz
    per_core = MACHINES["H200"].device.flops_per_second / 132
    assert pipeline.product_cycles / clock == pytest.approx(2 * 64 * 128 * 128 / per_core)
    assert pipeline.product_cycles == pytest.approx(512)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_kernels_configuration(head_dim):
    import torch

    from tilewise.core.problem import Inputs, Options, describe
    from tilewise.gpu.hopper.forward.launch import forward_config

    x = torch.empty(2, 8192, 16, head_dim, dtype=torch.bfloat16, device="meta")
    config = forward_config(describe(Inputs(x, x, x), Options()))
    pipeline = Pipeline.of_kernel(head_dim)
    assert (pipeline.block_n, pipeline.warpgroups, pipeline.stages) == (
        config.BLOCK_N,
        config.WARPGROUPS,
        config.STAGES,
    )
    assert pipeline.overlap and not pipeline.ping_pong


def test_bad_input():
    with pytest.raises(ValueError, match="stages must be at least 1, got 0"):
        Pipeline(128, 128, 2, 0)
