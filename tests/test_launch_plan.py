"""Launch plans, with a kernel that only records what it is given; nothing here needs a GPU."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.launch import launch_plan as plan, plan as call_plan
from tilewise.gpu.launch.entry import by_field, entry
from tilewise.gpu.triton.arguments import Ragged, Rows

pytest.importorskip("triton")


class Recorder:
    """Stands for a kernel before and after compilation."""

    def __init__(self):
        self.started, self.launched, self.encoded = [], [], []
        self.is_watched, self.is_bindable = False, True

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.started.append((grid, arguments)) or self


class Bound:
    """Stands for `CLaunch`."""

    def __init__(self, recorder, grid):
        self.recorder, self.grid = recorder, grid

    rest, takes_list = (), False

    def start(self, stream, *arguments):
        self.recorder.launched.append((self.grid, arguments))

    def current_stream(self, device):
        return 0

    def hooks(self):
        return self.recorder.is_watched, None

    def encode(self, index, descriptor):
        self.recorder.encoded.append((index, descriptor.base.data_ptr()))
        return [f"encoded {descriptor.base.data_ptr()}", *descriptor.shape]


@dataclass
class Descriptor:
    base: torch.Tensor | None
    shape: list[int]
    block_shape: list[int]


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "is_interpreted", lambda: False)
    monkeypatch.setattr(
        plan, "bind", lambda compiled, grid: Bound(compiled, grid) if compiled.is_bindable else None
    )
    return Recorder()


OWN = torch.zeros(2, dtype=torch.int32)  # a tensor of the library's, which is the same in every call


def build_with(recorder, programs=3):
    def build(problem, tensors):
        q, k, starts = tensors
        ragged = Ragged(starts, None, None, None, None, OWN)
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
    none = (*(None,) * 5, OWN.data_ptr())
    assert grid == (3, 1, 1)
    assert arguments == ((q.data_ptr(), 120, 24, 8), k.data_ptr(), none, "problem", 2.5)


def test_pointers_inside_of_a_tuple_are_filled_in(recorder):
    build, x = build_with(recorder), torch.zeros(2, 5, 3, 8)
    for _ in range(2):
        starts = torch.zeros(3, dtype=torch.int32)
        plan.run(build, "problem", (x, x, starts))
    assert recorder.launched[0][1][2] == (starts.data_ptr(), None, None, None, None, OWN.data_ptr())


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


def test_another_thread_may_remove_plans_while_one_makes_room(recorder, monkeypatch):
    x, build, others = torch.zeros(2, 5, 3, 8), build_with(recorder), []

    class Plans(dict):
        def __iter__(self):
            oldest_first = super().__iter__()
            if not others:
                others.append(threading.Thread(target=plan.clear))
                others[0].start()
                others[0].join(0.2)  # until it has come between, if it can
            return oldest_first

    monkeypatch.setattr(plan, "_plans", Plans())
    monkeypatch.setattr(plan, "MAX_PLANS", 2)
    for n in range(3):
        plan.run(build, n, (x, x, None))
    others[0].join()
    assert not plan._plans


def build_tma(recorder):
    def build(problem, tensors):
        q, out = tensors
        return plan.Launch(
            recorder, 2, (Descriptor(q, [2, 5], [1, 5]), out, Descriptor(out, [2, 5], [1, 5]), 7), 4
        )

    return build


def test_a_descriptor_is_encoded_once_for_each_address(recorder):
    build, tensors = build_tma(recorder), [torch.zeros(2, 5) for _ in range(4)]
    for n in (0, 1, 0, 1, 2, 0):
        plan.run(build, "problem", (tensors[n],), fresh=(tensors[3],))
        if n != 2:
            tensors[n].random_()  # what lives at an address does not matter
    out = tensors[3].data_ptr()
    expected = [
        (f"encoded {tensors[n].data_ptr()}", 2, 5, out, f"encoded {out}", 2, 5, 7) for n in (1, 0, 1, 2, 0)
    ]
    assert [arguments for _, arguments in recorder.launched] == expected
    # both are also encoded when the plan is made
    assert len(recorder.encoded) == 2 + 4 and len(set(recorder.encoded)) == 4


def test_addresses_are_bounded(recorder, monkeypatch):
    monkeypatch.setattr(call_plan, "MAX_ADDRESSES", 2)
    build, flat, out = build_tma(recorder), torch.zeros(200), torch.zeros(2, 5)
    views = [flat[n : n + 10].view(2, 5) for n in range(0, 160, 16)]
    for _ in range(2):
        for view in views:
            plan.run(build, "problem", (view,), fresh=(out,))
            if recorder.launched:
                assert recorder.launched[-1][1][0] == f"encoded {view.data_ptr()}"
    (kept,) = plan._plans.values()
    assert all(len(encoded) <= 2 for _, _, encoded in kept._descriptors)


def test_a_descriptor_keeps_no_tensor_alive(recorder):
    build, tensors = build_tma(recorder), [torch.zeros(2, 5) for _ in range(2)]
    storages = [weakref.ref(t.untyped_storage()) for t in tensors]
    for _ in range(2):
        plan.run(build, "problem", (tensors[0],), fresh=(tensors[1],))
    recorder.started.clear()
    recorder.launched.clear()
    del tensors
    assert [storage() for storage in storages] == [None, None]


def test_a_profiler_sees_triton_launch(recorder):
    build, x = build_with(recorder), torch.zeros(2, 5, 3, 8)
    for recorder.is_watched in (False, True, False):
        plan.run(build, "problem", (x, x, None))
    assert len(recorder.started) == 2 and len(recorder.launched) == 1
    assert recorder.started[1][1][1] is x


def test_what_cannot_be_bound_is_launched_by_triton(recorder):
    recorder.is_bindable = False
    x = torch.zeros(2, 5, 3, 8)
    for _ in range(3):
        plan.run(build_with(recorder), "problem", (x, x, None))
    assert len(recorder.started) == 3 and not plan._plans


def test_of_fresh_tensors_only_those_that_are_none_count(recorder):
    def build(problem, tensors):
        return plan.Launch(recorder, 1, tensors, 4)

    x, y = torch.zeros(2, 5), torch.zeros(5, 2)
    for fresh in ((x, None), (None, x), (y, None), (None, y)):
        plan.run(build, "problem", (x,), fresh=fresh)
    assert len(recorder.started) == 2 and len(recorder.launched) == 2
    assert plan.find("problem", plan.Step(build, (x,), (), (x, None))) is not None
    assert plan.find("problem", plan.Step(build, (x,), (), (x, x))) is None


def test_pages_made_of_8_bits_have_a_launch_for_each_dtype(monkeypatch):
    """What is written is fresh, so its dtype is no part of what tensors show."""
    pages = pytest.importorskip("tilewise.gpu.launch.eight_bit_pages")
    launched = []
    monkeypatch.setattr(pages, "run", lambda build, problem, tensors, fresh: launched.append(problem))
    make = {"device": "meta"}
    pool = torch.empty(6, 16, 2, 64, dtype=torch.float8_e4m3fn, **make)
    numbers = {"seqlens_k": torch.empty(2, dtype=torch.int32, **make)}
    numbers |= {"page_table": torch.empty(2, 3, dtype=torch.int32, **make)}
    numbers |= {name: torch.empty(6, 2, **make) for name in ("key_scale", "value_scale")}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        inputs = Inputs(torch.empty(2, 40, 4, 64, dtype=dtype, **make), pool, pool, **numbers)
        problem, made = pages.dequantized(describe(inputs, Options()), inputs)
        assert made.key.dtype == made.value.dtype == dtype and not problem.is_quantized
    assert len(set(launched)) == 3


@by_field
class Lengths(NamedTuple):
    rows: int
    stride: Any
    window: int | None


class Scales(NamedTuple):
    first: float
    second: float


def jit(do_not_specialize: list[str]):
    """In place of Triton's."""
    return lambda kernel: (kernel, do_not_specialize)


@entry(jit)
def answer_kernel(out, lengths: Lengths, scales: Scales, count: int, LAST: float):
    """What the parameters hold."""
    return out, lengths, lengths.rows, scales, count, LAST


def test_a_kernel_is_given_the_fields_of_tuples():
    kernel, integers = answer_kernel
    names = ["out", "lengths_rows", "lengths_stride", "lengths_window", "scales", "count", "LAST"]
    assert list(inspect.signature(kernel).parameters) == names
    assert integers == ["lengths_rows", "lengths_window", "count"]  # a stride is specialized on
    given = ("out", Lengths(3, 4, None), Scales(0.5, 2.0), 7, 1.0)
    assert plan.Launch(kernel, 1, given, 4).fields == ["out", 3, 4, None, Scales(0.5, 2.0), 7, 1.0]
    out, lengths, *rest = kernel(*plan.Launch(kernel, 1, given, 4).fields)
    assert isinstance(lengths, Lengths) and (out, lengths, *rest) == (*given[:2], 3, *given[2:])


def test_a_kernel_lies_where_it_is_written():
    kernel, _ = answer_kernel
    lines, first = inspect.getsourcelines(kernel)
    own = Path(__file__).read_text().splitlines(keepends=True)
    assert (
        lines[-1]
        == own[first + len(lines) - 2]
        == "    return out, lengths, lengths.rows, scales, count, LAST\n"
    )
    assert kernel.__doc__ == "What the parameters hold." and kernel.__module__ == __name__


@pytest.fixture
def kernels(monkeypatch):
    """Kernels of Triton's, compiled for a GPU that is not here: two, and one that can't be compiled."""
    import triton
    import triton.language as tl

    from tilewise.gpu.launch import triton_private

    monkeypatch.setattr(triton.runtime.driver, "_active", triton_private.CompileOnlyDriver((9, 0)))
    monkeypatch.setattr(plan, "is_interpreted", lambda: False)

    @triton.jit
    def first(x):
        tl.store(x, 1.0)

    @triton.jit
    def second(x):
        tl.store(x, 2.0)

    @triton.jit
    def wrong(x):
        tl.static_assert(False, "is wrong")

    return first, second, wrong


@pytest.fixture
def threads(kernels, monkeypatch):
    """Where two kernels are compiled, each of which waits for the other: in turn they would never meet."""
    both, found = threading.Barrier(2, timeout=10), set()

    def listen(**compilation):
        found.add(threading.get_ident())
        both.wait()

    monkeypatch.setattr(sys.modules["triton"].knobs.compilation, "listener", listen)
    return found


def launch(x, *kernels):
    for kernel in kernels:
        plan.run(lambda _, tensors, of=kernel: plan.Launch(of, 1, tensors, 1), "problem", (x,))


def compile_together(*kernels, given=None):
    """As in a first call of several launches."""

    def call(x):
        assert x.is_meta
        launch(x, *kernels)
        if given is not None:
            given.append(x.tolist())

    x = torch.zeros(16)
    plan.compile_together(call, x, x)


def all_compiled(kernel):
    return [type(found).__name__ for cache in kernel.device_caches.values() for found in cache[0].values()]


def test_kernels_of_a_first_call_are_compiled_side_by_side(kernels, threads):
    first, second, _ = kernels
    compile_together(first, second)
    assert all_compiled(first) == all_compiled(second) == ["CompiledKernel"]
    compile_together(first, second)
    assert len(threads) == 2 and threading.get_ident() not in threads
    assert len(threads.intersection(thread.ident for thread in threading.enumerate())) == 0


def test_kernels_for_a_gpu_that_is_not_here_are_compiled_side_by_side(kernels, threads):
    from tilewise.gpu.launch import gpus, launcher

    found = []
    with launcher.compiling_for(gpus.GPUS["h200"], found.append):
        launch(torch.empty(16, device="meta"), *kernels[:2])
    assert [compiled.metadata.name for compiled in found] == ["first", "second"] and len(threads) == 2
    with (
        pytest.raises(Exception, match="is wrong"),
        launcher.compiling_for(gpus.GPUS["h200"], found.append),
    ):
        launch(torch.empty(16, device="meta"), kernels[2])
    assert len(found) == 2


def test_what_can_not_be_compiled_is_left_to_its_launch(kernels):
    first, second, wrong = kernels
    given = []
    compile_together(wrong, first, given=given)  # nor can what tensors hold be known
    assert all_compiled(first) == ["CompiledKernel"] and all_compiled(wrong) == [] and not given
    for _ in range(2):
        with pytest.raises(Exception, match="is wrong"):
            wrong.warmup(torch.zeros(16), grid=(1,), enable_fp_fusion=True)
    compile_together(second)
    assert all_compiled(second) == ["CompiledKernel"]


def test_an_interrupt_leaves_nothing_half_compiled(kernels, monkeypatch):
    first, second, _ = kernels

    def listen(**compilation):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["triton"].knobs.compilation, "listener", listen)
    with pytest.raises(KeyboardInterrupt):
        compile_together(first, second)
    monkeypatch.undo()
    assert all_compiled(first) == all_compiled(second) == []
