"""Whether many threads find work: counted by playing the work items, for more cores than this machine has."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tilewise.core.mask import Visibility
from tilewise.core.problem import Inputs, Options, describe
from tilewise.core.signature import Request, Signature, look
from tilewise.cpu.host import backward_plan, compile as kernels
from tilewise.cpu.host.backward_plan import BackwardPlan
from tilewise.cpu.host.forward_plan import ForwardPlan
from tilewise.cpu.host.plan import PackedPlan, plan
from tilewise.dispatch import plans
from tilewise.lab.bench import cases, suites
from tilewise.testing import check_attention

FINEST = 64  # keys of a backward's work item: fewer are never worth the conversion of all queries
CONVERTING = 8  # of a tile's queries in a backward, in keys


@pytest.fixture
def without_code(monkeypatch, tmp_path):
    """What plans read of a kernel is known before it is compiled."""
    machine = replace(kernels.current_target(), cpu="of many cores", l2_bytes=1 << 20)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "target", lambda wanted="": machine)
    monkeypatch.setattr(kernels, "generate", lambda *_: b"")
    monkeypatch.setattr(kernels, "_kernel", lambda name, code, facts, _: kernels.Kernel(0, None, facts))


def make_plan(case: cases.Case, threads: int):
    def new(heads: int, n: int, dim: int) -> torch.Tensor:
        shape = (sum(case.lengths), heads, dim) if case.lengths else (case.batch, n, heads, dim)
        return torch.empty(shape, dtype=case.torch_dtype)

    starts = torch.tensor([0, *case.lengths]).cumsum(0).int() if case.lengths else None
    q = new(case.num_heads, case.seqlen_q, case.head_dim)
    k, v = (new(case.num_kv_heads, case.seqlen_k, dim) for dim in (case.head_dim, case.head_dim_v))
    inputs = Inputs(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)
    left, right = case.window or (None, None)
    problem = describe(inputs, Options(causal=case.causal, window_left=left, window_right=right))
    out = new(case.num_heads, case.seqlen_q, case.head_dim_v)
    lse = q[..., 0].float().movedim(-1, -2).contiguous()
    results = (out, lse, lse, out, None) if case.direction == "backward" else ()
    signature = Signature(
        case.direction, look(inputs, False), look(results, False), False, Options(), "llvm",
        Request(residual=True), False, threads,
    )  # fmt: skip
    found = plan(problem, signature)
    return found.plan_of(max(case.lengths)) if isinstance(found, PackedPlan) else found


@functools.cache
def pairs(seen: Visibility, q0: int, q1: int, k0: int, k1: int) -> int:
    """Queries [q0, q1) and keys [k0, k1) that see each other."""
    ranges = (seen.key_range(q, q + 1) for q in range(q0, q1))
    return sum(max(0, min(end, k1) - max(start, k0)) for start, end in ranges)


class Play:
    """Threads that take the work items of a call, each the next one when it is free."""

    def __init__(self, plan, case: cases.Case, threads: int) -> None:
        self.facts, self.case, self.free = plan.kernel.facts, case, [0.0] * threads
        self.lengths, self.worked, division = case.sequences, 0.0, plan.division
        if division is None:
            longest = max(n for n, _ in self.lengths)
            division = plan.divide(*[longest] * (1 if isinstance(plan, ForwardPlan) else 2))
        self.items, self.words, self.done = division.items, division.words, {}
        steps = {ForwardPlan: self.forward, BackwardPlan: self.backward}.get(type(plan), self.split)
        for item in range(self.items):
            now = heapq.heappop(self.free)
            for work, tile in steps(item):
                now = max(now + work, self.done.get(tile, 0.0))  # the keys before have added to its dq
                self.worked += work
                self.done[tile] = now
            heapq.heappush(self.free, now)

    @property
    def busy(self) -> float:
        """The share of all threads' time until the last item is done."""
        return self.worked / (len(self.free) * max(self.free))

    def forward(self, item: int) -> Iterator[tuple[float, object]]:
        chunk, head = divmod(item, self.items // self.words["chunks"])
        n, size = self.lengths[head // self.case.num_heads], self.words["tiles"] * self.facts["block_q"]
        q0 = (self.words["chunks"] - 1 - chunk) * size
        q1 = min(n[0], q0 + size)
        if q0 < q1:
            k0, k1 = self.seen(n).key_range(q0, q1)
            yield pairs(self.seen(n), q0, q1, 0, n[1]) + self.facts["converting"] * max(0, k1 - k0), item

    def backward(self, item: int) -> Iterator[tuple[float, object]]:
        block, owner = divmod(item, self.items // self.words["splits"])
        n, split = self.lengths[owner // self.case.num_kv_heads], self.words["split_keys"]
        for q0 in range(0, n[0], self.facts["block_q"]):
            q1 = min(n[0], q0 + self.facts["block_q"])
            if work := pairs(self.seen(n), q0, q1, block * split, min(n[1], (block + 1) * split)):
                yield work + CONVERTING * (q1 - q0), (owner, q0)

    def split(self, item: int) -> Iterator[tuple[float, object]]:
        yield 1.0, item

    def seen(self, n: tuple[int, int]) -> Visibility:
        left, right = self.case.window or (None, 0 if self.case.causal else None)
        return Visibility(*n, left, right)


def shapes() -> list[cases.Case]:
    """Of the benchmark's CPU suite, with one head size and without float16, and of models' layers."""
    suite = (c for c in suites._cpu(False, "cpu") if c.dtype != "float16")
    layers = (
        cases.dense(direction, "bfloat16", 64, heads, batch, n, causal=True)
        for direction in ("forward", "backward")
        for heads, batch, n in ((12, 4, 512), (32, 1, 1100), (16, 1, 2048), (14, 1, 3000))
    )
    return [*(c for c in suite if c.kind != "dense" or c.head_dim == 64), *layers]


@pytest.mark.parametrize("threads", [16, 64])
@pytest.mark.usefixtures("without_code")
def test_no_shape_leaves_half_of_the_threads_idle(threads, monkeypatch):
    monkeypatch.setattr(backward_plan, "CORES", threads)
    idle, kept = [], []
    for case in shapes():
        kept.append(make_plan(case, threads))  # while a plan lives, its kernel is not built again
        play = Play(kept[-1], case, threads)
        finest = sum(-(-n // FINEST) for _, n in case.sequences) * case.num_kv_heads
        if case.direction == "backward" and finest < threads:
            assert play.items == finest  # no finer
        elif play.busy < 0.5:
            idle.append(f"{case.name}: {play.items} items, {play.busy:.2f}")
    assert not idle, "\n".join(idle)


@pytest.mark.usefixtures("without_code")
def test_on_few_cores_items_have_many_keys(monkeypatch):
    """Each item converts all queries: 8 items are enough for 4 cores, and 128 keys for each."""
    for cores, heads, items in (
        (2, 4, 8),
        (4, 4, 8),
        (4, 8, 8),
        (4, 1, 4),
        (5, 1, 8),
        (16, 4, 32),
        (16, 8, 32),
    ):
        monkeypatch.setattr(backward_plan, "CORES", cores)
        case = cases.dense("backward", "float32", 64, heads, 1, 512)
        assert make_plan(case, 2).division.items == items, (cores, heads)
    monkeypatch.setattr(backward_plan, "CORES", 64)
    for heads, n, keys in ((2, 333, FINEST), (32, 197, FINEST), (64, 197, 128), (128, 197, 256)):
        case = cases.dense("backward", "float32", 64, heads, 1, n)
        assert make_plan(case, 2).division.words["split_keys"] == keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"causal": True}, {"mask_mod": lambda b, h, i, j: (i - j) % 90 < 40}])
def test_many_small_items_meet_the_error_budget(dtype, options, monkeypatch):
    monkeypatch.setattr(backward_plan, "CORES", 64)
    plans.clear()
    q, k, v = (torch.randn(1, n, heads, 40).to(dtype) for n, heads in ((203, 4), (333, 2), (333, 2)))
    check_attention(q, k, v, backend="llvm", **options)
    plans.clear()
