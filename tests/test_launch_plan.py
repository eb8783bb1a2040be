"""Launch plans, with a kernel that only records what it is given; nothing here needs a GPU or triton."""

from __future__ import annotations

import pytest
import torch

from tilewise import launch_plan as plan
from tilewise.triton.arguments import Ragged, Rows


class Recorder:
    """Stands for a kernel before and after compilation."""

    def __init__(self):
        self.started, self.launched = [], []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.started.append((grid, arguments)) or Compiled(self)


class Compiled:
    def __init__(self, recorder):
        self.recorder = recorder

    def __getitem__(self, grid):
        return lambda *arguments: self.recorder.launched.append((grid, arguments))


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "is_interpreted", lambda: False)
    return Recorder()


def build_with(recorder, programs=3):
    def build(problem, tensors):
        q, k, starts = tensors
        ragged = Ragged(starts, None, None, None, None)
        return plan.Launch(recorder, programs, (Rows(q, *q.stride()[:3]), k, ragged, problem, 2.5), 4, 2)

    return build


def test_a_repeated_call_fills_in_addresses(recorder):
    build = build_with(recorder)
    x = torch.zeros(2, 5, 3, 8)
    plan.run(build, "problem", (x, x, None))
    assert len(recorder.started) == 1 and recorder.started[0][0] == (3, 1)
    q, k = torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3, 8)
    plan.run(build, "problem", (q, k, None))
    assert len(recorder.started) == 1
    (grid, arguments), *_ = recorder.launched
    none = (None,) * 5
    assert grid == (3, 1, 1)
    assert arguments == ((q.data_ptr(), 120, 24, 8), k.data_ptr(), none, "problem", 2.5)


def test_pointers_inside_of_a_tuple_are_filled_in(recorder):
    build, x = build_with(recorder), torch.zeros(2, 5, 3, 8)
    for _ in range(2):
        starts = torch.zeros(3, dtype=torch.int32)
        plan.run(build, "problem", (x, x, starts))
    assert recorder.launched[0][1][2] == (starts.data_ptr(), None, None, None, None)


def test_what_differs_gets_a_plan_of_its_own(recorder):
    build, flat = build_with(recorder), torch.zeros(1000)

    def view(offset=0, stride=8, dtype=torch.float32):
        return flat.to(dtype).as_strided((2, 5, 3, 8), (240, 24, stride, 1), offset)

    x = view()
    variants = [x, view(offset=1), view(stride=16), view(dtype=torch.bfloat16), x[:1]]
    for t in variants:
        plan.run(build, "problem", (t, x, None))
    plan.run(build, "another problem", (x, x, None))
    assert len(recorder.started) == len(variants) + 1 and not recorder.launched


def test_no_tensor_is_kept_alive(recorder):
    import weakref

    x = torch.zeros(2, 5, 3, 8)
    storage = weakref.ref(x.untyped_storage())
    build = build_with(recorder)
    plan.run(build, "problem", (x, x, None))
    recorder.started.clear()
    del x
    assert storage() is None


def test_nothing_is_launched_for_no_programs(recorder):
    x = torch.zeros(2, 0, 3, 8)
    plan.run(build_with(recorder, programs=0), "problem", (x, x, None))
    assert not recorder.started and not plan._plans


def test_plans_are_bounded(recorder, monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 2)
    x = torch.zeros(2, 5, 3, 8)
    for n in range(5):
        plan.run(build_with(recorder), n, (x, x, None))
    assert len(plan._plans) <= 2
