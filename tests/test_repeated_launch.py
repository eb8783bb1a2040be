"""What a repeated GPU call allocates and launches, with launches that only record; this needs no GPU."""

from __future__ import annotations

import importlib

import pytest
import torch

import tilewise
from tilewise.core.problem import Inputs, Options, describe
from tilewise.dispatch import choice as dispatch
from tilewise.gpu.launch import launch_plan
from tilewise.gpu.launch.repeated_launch import repeatable

LEAST_ADDRESS = 1 << 22  # of a process; the other integers of these launches are smaller


class Plan:
    """Stands for a `LaunchPlan`."""

    def __init__(self):
        self.launched, self.profiler_wants = [], False

    def __call__(self, tensors):
        self.start(self.arguments([None if t is None else t.data_ptr() for t in tensors]))

    def is_watched(self):
        return self.profiler_wants

    def arguments(self, addresses):
        return list(addresses)

    def start(self, arguments):
        self.launched.append(arguments)

    def seen_as(self, layout):
        return self


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("shape", [(2, 9, 4, 64), (1, 1, 4, 64), (3, 5, 1, 64), (1, 5, 1, 8)])
def test_new_outputs_and_one_launch(layout, shape):
    axes = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    inputs = Inputs(*(torch.zeros(*shape[:3], dim) for dim in (64, 64, 40)))
    problem = describe(inputs, Options())
    plan = Plan()
    launched = plan.launched
    run = repeatable(problem, inputs.query, layout, True, plan, lambda q, k, v, *new: (v, k, q, None, *new))
    results = []
    for plan.profiler_wants in (False, True):
        q, k, v = (torch.zeros(*shape[:3], dim).permute(axes) for dim in (64, 64, 40))
        out, lse = run(q, k, v)
        assert launched[-1] == [None if t is None else t.data_ptr() for t in (v, k, q, None, out, lse)]
        whole = torch.empty(*shape[:3], 40).permute(axes)
        assert out.shape == whole.shape and out.stride() == whole.stride() and out.dtype == q.dtype
        assert lse.shape == (shape[0], shape[2], shape[1]) and lse.is_contiguous()
        assert lse.dtype == torch.float32
        results += [out, lse]
    assert len({t.data_ptr() for t in results}) == 4 and len(launched) == 2
    only_out = repeatable(problem, inputs.query, layout, False, plan, lambda *tensors: tensors)
    assert isinstance(only_out(q, k, v), torch.Tensor)
    plan.profiler_wants, launches = False, len(launched)
    misaligned = torch.zeros(q.numel() + 1)[1:].view(q.shape)
    assert run(misaligned, k, v) is None and len(launched) == launches


class Recorder:
    """Stands for Triton's launches: keeps kernels, grids and arguments, with addresses for tensors."""

    def __init__(self):
        self.launches, self.is_profiled = [], False

    def start(self, launch):
        arguments = []
        for argument in launch.arguments:
            if launch_plan.is_descriptor(argument):
                arguments += encoded(argument)
            elif isinstance(argument, tuple):
                arguments.append(tuple(map(address, argument)))
            else:
                arguments.append(address(argument))
        self.launches.append((launch.kernel, (launch.programs, launch.programs_y, 1), arguments))
        return launch.kernel

    def bind(self, kernel, grid):
        return Bound(self, kernel, grid)

    def take(self, tensors):
        """The launches since the last time, with names for addresses: places in `tensors`, then in order."""
        names = {t.data_ptr(): place for place, t in enumerate(tensors)}

        def named(x):
            if isinstance(x, (tuple, list)):
                return [named(item) for item in x]
            is_address = isinstance(x, int) and x >= LEAST_ADDRESS
            return names.setdefault(x, f"scratch {len(names)}") if is_address else x

        launches, self.launches = named(self.launches), []
        return launches


class Bound:
    """Stands for `launcher.BoundKernel`."""

    def __init__(self, recorder, kernel, grid):
        self.recorder, self.kernel, self.grid = recorder, kernel, grid

    def launch(self, device, arguments):
        self.recorder.launches.append((self.kernel, self.grid, arguments))

    def encode(self, index, descriptor):
        return encoded(descriptor)

    def is_watched(self):
        return self.recorder.is_profiled


def address(argument):
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def encoded(descriptor):
    numbers = *descriptor.shape, *descriptor.strides
    return [(descriptor.base.data_ptr(), *numbers, *descriptor.block_shape), *numbers]


@pytest.fixture
def recorder(monkeypatch):
    pytest.importorskip("triton")
    recorder, counter = Recorder(), torch.zeros(2, dtype=torch.int32)
    names = ("forward.launch", "backward.launch", "backward.wide_launch")  # all before any is patched
    modules = [importlib.import_module(f"tilewise.gpu.hopper.{name}") for name in names]
    monkeypatch.setattr(launch_plan, "_plans", {})
    monkeypatch.setattr(launch_plan, "start", recorder.start)
    monkeypatch.setattr(launch_plan, "bind", recorder.bind)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    for module in modules:
        monkeypatch.setattr(module, "num_sms", lambda index: 132)
        monkeypatch.setattr(module, "scheduler_counter", lambda device, number=0: counter, raising=False)
    call = importlib.import_module("tilewise.gpu.triton.call")
    monkeypatch.setattr(call, "gpu_capability", lambda device: (9, 0))
    call.table_tile.cache_clear()
    yield recorder
    call.table_tile.cache_clear()


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "options",
    [Options(), Options(causal=True, deterministic=True), Options(window_left=20, softcap=3.0)],
    ids=["full", "causal", "window"],
)
def test_a_repeated_backward_launches_what_the_first_does(backend, layout, dims, options, recorder):
    module = dispatch.load(backend)
    axes = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    shapes = (2, 100, 4, dims[0]), (2, 130, 2, dims[0]), (2, 130, 2, dims[1]), (2, 100, 4, dims[1])

    def draw(padding=0):
        q, k, v, out = (
            torch.zeros(*s[:3], s[3] + padding, dtype=torch.bfloat16)[..., : s[3]] for s in shapes
        )
        return *(t.permute(axes) for t in (q, k, v, out)), torch.zeros(2, 4, 100), out.permute(axes).clone()

    def whole(*tensors):
        q, k, v, out, lse, dout = (t.permute(axes) if t.ndim == 4 else t for t in tensors)
        wholes.append(tensors)
        grads = module.backward(problem, Inputs(q, k, v), out, lse, dout, None)[:3]
        return tuple(t.permute(axes) for t in grads)

    wholes = []
    problem = describe(Inputs(*(t.permute(axes) for t in draw()[:3])), options)
    backward = module.repeatable_backward(problem, layout, whole)
    for padding in (0, 8, 4):  # rows of 16-byte multiples, or not: copied first by the whole path
        found = []
        for recorder.is_profiled in (False, False, True):
            given = draw(padding)
            grads = backward(*given)
            found.append(recorder.take((*given, *grads)))
            for t, grad in zip(given[:3], grads, strict=True):
                assert grad.shape == t.shape and grad.dtype == t.dtype and grad.permute(axes).is_contiguous()
        is_copied = padding == 4 and backend == "hopper"
        assert len(found[0]) >= 3 and len(wholes) == (3 if is_copied else 2)  # the first, and the profiled
        if not is_copied:
            assert found[1] == found[0] and found[2] == found[0]
        wholes.clear()
    misaligned = [torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape) for t in draw()]
    backward(*misaligned)
    assert len(wholes) == 1


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("dim", [64, 192])
def test_a_tensor_given_twice_is_not_taken_for_one(backend, dim, recorder):
    module = dispatch.load(backend)

    def draw():
        return torch.zeros(1, 300, 2, dim, dtype=torch.bfloat16)

    def whole(q, k, v, out, lse, dout):
        return module.backward(problem, Inputs(q, k, v), out, lse, dout, None)[:3]

    x, lse = draw(), torch.zeros(1, 2, 300)
    problem = describe(Inputs(x, x, x), Options())
    backward = module.repeatable_backward(problem, "bshd", whole)
    backward(x, x, x, x, lse, x)
    recorder.take(())
    q, k, v, out, dout = (draw() for _ in range(5))
    given = (q, k, v, out, lse, dout)
    by_plans, by_whole = (recorder.take((*given, *function(*given))) for function in (backward, whole))
    assert by_plans == by_whole


@pytest.mark.parametrize("seqlen", [2000, 500])
def test_pieces_lie_in_dq_where_they_fit(seqlen, recorder, monkeypatch):
    """Five of 64 KB, from 3 SMs that share 2 of 8 tiles of keys."""
    from tilewise.gpu.hopper.backward import launch as backward_launch

    monkeypatch.setattr(backward_launch, "num_sms", lambda index: 3)

    def draw(seqlen):
        return torch.zeros(1, seqlen, 4, 64, dtype=torch.bfloat16)

    def whole(q, k, v, out, lse, dout):
        return backward_launch.backward(problem, Inputs(q, k, v), out, lse, dout, None)[:3]

    given = *(draw(n) for n in (seqlen, 200, 200, seqlen)), torch.zeros(1, 4, seqlen), draw(seqlen)
    problem = describe(Inputs(*given[:3]), Options())
    backward = backward_launch.repeatable(problem, "bshd", whole)
    for _ in range(2):
        grads = backward(*given)
        _, main, finish = (arguments for _, _, arguments in recorder.take((*given, *grads)))
        key_sums, late = main[-2], finish[-7]
        assert key_sums in finish
        # 327680 bytes are 640 rows of dq: 5 tiles of each head
        assert (key_sums == len(given), late) == ((True, 5) if seqlen == 2000 else (False, 0))


@pytest.mark.parametrize("precision", ["ieee", "fp8"])
def test_packed_calls_of_other_lengths_are_planned_anew(precision, recorder):
    """As many sequences, which fill as many slots of 128 rows: their number is the kernel's argument."""
    from tilewise.gpu.hopper.forward import launch

    options = Options(max_seqlen_q=400, max_seqlen_k=400, precision=precision)
    for total in (700, 705, 690, 700):
        q, k, v = (torch.zeros(total, 4, 64, dtype=torch.bfloat16) for _ in range(3))
        starts = torch.tensor([0, 350, total], dtype=torch.int32)
        inputs = Inputs(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)
        out, lse = launch.forward(describe(inputs, options), inputs)
        assert out.shape[0] == lse.shape[1] == total
        assert total in recorder.launches[-1][2]


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(100, 100), (3, 2048)], ids=["many", "few"])
def test_repeated_forwards_of_other_layouts_can_be_profiled(seqlen_q, seqlen_k, recorder, monkeypatch):
    from tilewise.gpu.hopper.forward import launch

    monkeypatch.setattr(launch.decode_launch, "is_faster", lambda problem: problem.seqlen_q < 16)
    q, k, v = (torch.zeros(2, n, 4, 64, dtype=torch.bfloat16) for n in (seqlen_q, seqlen_k, seqlen_k))
    problem = describe(Inputs(q, k, v), Options())
    out, lse = launch.forward(problem, Inputs(q, k, v))
    first = recorder.take((q, k, v, out, lse))
    for layout, axes in (("bshd", (0, 1, 2, 3)), ("bhsd", (0, 2, 1, 3))):
        run = launch.repeatable(problem, Inputs(q, k, v), layout, True)
        for recorder.is_profiled in (False, True):
            given = [t.clone().permute(axes) for t in (q, k, v)]
            assert recorder.take((*given, *run(*given))) == first


@pytest.fixture
def cached(recorder, monkeypatch):
    """Cached calls take the Hopper kernels; how many took the whole path."""
    from tilewise import repeat_cached
    from tilewise.autograd import functions as autograd
    from tilewise.cache import step as cached_step
    from tilewise.dispatch import choice as dispatch
    from tilewise.gpu.triton import append
    from tilewise.integrations import kv_cache_call

    wholes, attention = [], autograd.attention
    monkeypatch.setattr(autograd, "attention", lambda *call: wholes.append(call) or attention(*call))
    monkeypatch.setattr(repeat_cached, "_found", {})
    monkeypatch.setattr(repeat_cached, "_is_on_gpu", lambda t: True)
    monkeypatch.setattr(dispatch, "choose", lambda *call, **further: "hopper")
    for module in (autograd, kv_cache_call):  # lengths were not written
        monkeypatch.setattr(module, "check_values", lambda *call: None)
    monkeypatch.setattr(cached_step.Step, "_is_fusible", lambda self, query, key, rotary: True)
    monkeypatch.setattr(kv_cache_call, "_is_fusible", lambda *call: call[3] is not None)
    monkeypatch.setattr(append, "has_pdl", lambda device: True)
    return wholes


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def new_tokens(kind, batch, heads, dim):
    """Keyword arguments: new key and value, and rotary tables if wanted."""
    if kind == "attends":
        return {}
    tables = {} if kind == "appends" else {"rotary_cos": zeros(512, 32), "rotary_sin": zeros(512, 32)}
    return {"key": zeros(batch, 1, heads, dim), "value": zeros(batch, 1, heads, dim)} | tables


@pytest.mark.parametrize("kind", ["attends", "appends", "turns"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": (100, 0), "softcap": 5.0}, {"sinks": zeros(8)}, {"alibi_slopes": torch.zeros(8)}],
    ids=["plain", "window", "sinks", "alibi"],
)
def test_a_repeated_cached_call_launches_what_the_first_does(options, is_paged, kind, recorder, cached):
    found = []
    for recorder.is_profiled in (False, False, True):
        if is_paged:
            cache = tilewise.PagedKVCache(16, 64, 2, 128, dtype=torch.bfloat16)
            for _ in range(3):
                cache.append(zeros(1, 290, 2, 128), zeros(1, 290, 2, 128), [cache.allocate()])
        else:
            cache = tilewise.KVCache(3, 512, 2, 128, dtype=torch.bfloat16)
            cache.append(zeros(3, 290, 2, 128), zeros(3, 290, 2, 128))
        query, new = zeros(3, 1, 8, 128), new_tokens(kind, 3, 2, 128)
        out, lse = tilewise.attention_with_cache(query, cache, **new, **options, return_lse=True)
        found.append(recorder.take((query, cache.key, cache.value, out, lse)))
        if is_paged:
            assert [cache.length(s) for s in cache.sequences] == [290 + bool(new)] * 3
        elif new:
            assert cache.held() == [291] * 3
    assert len(found[0]) == 2 + (kind != "attends")
    assert found[0] == found[1] == found[2]
    assert len(cached) == 1


@pytest.mark.parametrize("kind", ["attends", "appends", "turns"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "pages"])
def test_a_repeated_call_of_flash_attn_launches_what_the_first_does(is_paged, kind, recorder, cached):
    from tilewise.flash_attn import flash_attn_with_kvcache

    found = []
    for recorder.is_profiled in (False, False, True):
        query, lengths = zeros(3, 1, 8, 128), torch.tensor([5, 300, 0], dtype=torch.int32)
        key, value = (zeros(*((24, 64) if is_paged else (4, 512)), 2, 128) for _ in range(2))
        table = torch.arange(24, dtype=torch.int32).view(3, 8) if is_paged else None
        new = {{"key": "k", "value": "v"}.get(n, n): t for n, t in new_tokens(kind, 3, 2, 128).items()}
        given = {"cache_seqlens": lengths, "block_table": table, "causal": True, "return_softmax_lse": True}
        out, lse, *_ = flash_attn_with_kvcache(query, key, value, **new, **given)
        found.append(recorder.take((query, key, value, lengths, out, lse)))
    assert len(found[0]) == 2 + (kind != "attends")
    assert found[0] == found[1] == found[2]
    assert len(cached) == 1


def test_repeated_latent_calls(recorder, cached):
    found = []
    for recorder.is_profiled in (False, False, True):
        cache = tilewise.KVCache(2, 512, 1, 576, head_dim_v=512, dtype=torch.bfloat16, value_in_key=True)
        query = zeros(2, 1, 16, 576)
        out, lse = tilewise.attention_with_cache(query, cache, return_lse=True)
        found.append(recorder.take((query, cache.key, out, lse)))
    assert len(found[0]) == 2 and found[0] == found[1] == found[2]
    assert len(cached) == 1


def test_what_is_not_repeated(recorder, cached):
    """Other sizes, strides and options are other calls; with a mask, bias or gradient none is kept."""
    from tilewise import repeat_cached

    def call(query, capacity=512, **options):
        cache = tilewise.KVCache(2, capacity, 2, 128, dtype=torch.bfloat16)
        tilewise.attention_with_cache(query, cache, **options)
        return len(repeat_cached._found)

    query = zeros(2, 1, 8, 128)
    assert call(query) == call(query) == 1 and len(cached) == 1
    assert call(zeros(2, 2, 8, 128)) == 2
    assert call(zeros(2, 1, 8, 256)[..., :128]) == 3
    assert call(query, 1024) == 4
    assert call(query, scale=0.5) == 5
    assert call(query.half().to(torch.bfloat16).requires_grad_()) == 5
    assert call(zeros(2 * 8 * 128 + 1)[1:].view(2, 1, 8, 128)) == 5  # not aligned
    wholes = len(cached)
    with pytest.raises(TypeError, match="scale"):
        call(query, scale="half")
    with pytest.raises(ValueError, match="window"):
        call(query, window=(1, -2))
    with pytest.raises(ValueError, match="query"):
        call(query[:1])
    assert len(cached) == wholes
    call(query)
    assert len(cached) == wholes


def test_queries_that_are_copied_first_are_not_repeated(recorder, cached):
    from tilewise.flash_attn import flash_attn_with_kvcache

    key = zeros(3, 512, 2, 128)
    lengths = torch.tensor([5, 300, 0], dtype=torch.int32)
    for _ in range(3):
        query = zeros(3, 1, 128, 8).transpose(2, 3)
        flash_attn_with_kvcache(query, key, key.clone(), cache_seqlens=lengths, causal=True)
        assert query.data_ptr() not in recorder.launches[-2][2]  # the decoding kernel reads a copy
    assert len(cached) == 3
