"""What the plans of GPU calls launch, first and later, by launches that only record; this needs no GPU."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

import tilewise
from test_host_path import body_lines, functions_entered
from tilewise.core.plan import FunctionPlan, Results, Saves
from tilewise.core.problem import Inputs, Options, describe, describe_signature, in_layout
from tilewise.core.signature import Request, Signature, look
from tilewise.dispatch import plans
from tilewise.gpu.launch import launch_plan, plan as gpu_plan

LEAST_ADDRESS = 1 << 22  # of a process; the other integers of these launches are smaller
DEVICE = torch.device("cuda", 0)  # what signatures say; the tensors are on the CPU


class Recorder:
    """Stands for Triton's launches: keeps kernels, grids and arguments, with addresses for tensors."""

    def __init__(self):
        self.launches, self.is_profiled, self.is_captured, self.compiled = [], False, False, 0
        self.alive = []  # tensors of launches, whose memory none that comes later may have

    def start(self, launch):
        arguments = []
        self.alive.append(launch)
        for argument in launch.fields:
            if gpu_plan.is_descriptor(argument):
                arguments += encoded(argument)
            elif isinstance(argument, tuple):
                arguments.append(tuple(map(address, argument)))
            else:
                arguments.append(address(argument))
        self.compiled += 1
        self.launches.append((launch.kernel, (launch.programs, launch.programs_y, 1), arguments))
        return launch.kernel

    def holding(self, call):
        """A method that takes tensors, which then live on."""

        def hold(owner, tensors):
            self.alive.append(tensors)
            return call(owner, tensors)

        return hold

    def bind(self, kernel, grid):
        return Bound(self, kernel, grid)

    def forget(self):
        """Nothing has been launched before."""
        launch_plan.clear()
        self.compiled = 0

    def take(self, tensors):
        """The launches since the last time, with names for addresses: places in `tensors`, then in order."""
        names = {t.data_ptr(): place for place, t in enumerate(tensors) if t is not None}

        def named(x):
            if isinstance(x, (tuple, list)):
                return [named(item) for item in x]
            is_address = isinstance(x, int) and x >= LEAST_ADDRESS
            return names.setdefault(x, f"scratch {len(names)}") if is_address else x

        launches, self.launches = named(self.launches), []
        return launches


class Bound:
    """Stands for `CLaunch`."""

    def __init__(self, recorder, kernel, grid):
        self.recorder, self.kernel, self.grid = recorder, kernel, grid

    rest, takes_list = (), True

    def start(self, stream, arguments):
        self.recorder.launches.append((self.kernel, self.grid, arguments))

    def current_stream(self, device):
        return 0

    def hooks(self):
        return self.recorder.is_profiled, None

    def encode(self, index, descriptor):
        return encoded(descriptor)


def address(argument):
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def encoded(descriptor):
    numbers = *descriptor.shape, *descriptor.strides
    return [(descriptor.base.data_ptr(), *numbers, *descriptor.block_shape), *numbers]


@pytest.fixture
def recorder(monkeypatch):
    pytest.importorskip("triton")
    recorder = Recorder()
    for backend in ("hopper", "triton"):
        importlib.import_module(f"tilewise.gpu.{backend}.plan")
    monkeypatch.setattr(launch_plan, "_plans", {})
    monkeypatch.setattr(launch_plan, "start", recorder.start)
    monkeypatch.setattr(launch_plan, "bind", recorder.bind)
    for owner, name in ((gpu_plan.LaunchPlan, "__call__"), (gpu_plan.PlannedLaunches, "start")):
        monkeypatch.setattr(owner, name, recorder.holding(getattr(owner, name)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorder.is_captured)
    stand_ins = {
        "num_sms": lambda index: 132,
        "raw_stream": lambda index: 0,
        "gpu_capability": lambda device: (9, 0),
        "has_pdl": lambda device: True,
        "_processors": lambda device: 132,
    }
    gpu = [module for name, module in list(sys.modules.items()) if name.startswith("tilewise.gpu.")]
    for module in gpu:
        for name, stand_in in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    return recorder


def on_gpu(tensors, grad_enabled=False):
    """What `look` would say of them on a GPU, as aligned as its allocator makes them."""
    seen = look(tensors, grad_enabled)
    return tuple(None if t is None else t._replace(device=DEVICE, misalignment=0) for t in seen)


def plan_of(backend, options, request, inputs, results=(), layout="bshd"):
    """Of calls in a layout; `inputs` and `results` are in "bshd"."""
    direction = "backward" if results else "forward"
    signature = Signature(
        direction, on_gpu(inputs), on_gpu(results), False, options, backend, request, False, 1, layout
    )
    module = importlib.import_module(f"tilewise.gpu.{backend}.plan")
    return module.plan(describe_signature(signature), signature)


def counted(plan):
    """The plan, and a list that grows with each call that goes the first way."""
    first, calls = plan._first, []
    plan._first = lambda *arguments: calls.append(1) or first(*arguments)
    return plan, calls


def draw(dims, seqlens, axes, padding):
    """query, key, value, out, lse, residual, dout; rows are `padding` elements longer than they seem."""
    shapes = (2, seqlens[0], 4), (2, seqlens[1], 2), (2, seqlens[1], 2), (2, seqlens[0], 4)
    q, k, v, out = (
        torch.zeros(*shape, dim + padding, dtype=torch.bfloat16)[..., :dim]
        for shape, dim in zip(shapes, (dims[0], dims[0], dims[1], dims[1]), strict=True)
    )
    if axes == "bhsd":
        q, k, v, out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, out))
    lse = torch.zeros(2, 4, seqlens[0])
    return q, k, v, out, lse, lse.clone(), out.clone()


CALLS = {
    "full": Options(),
    "causal": Options(causal=True, deterministic=True),
    "window": Options(window_left=20, softcap=3.0),
}


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("order", ["bshd", "bhsd"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_later_calls_launch_what_the_first_does(backend, order, dims, call, recorder):
    options, seqlens = CALLS[call], (100, 130)
    for has_residual in (False, True):
        for padding in (0, 8, 4):  # rows of 16-byte multiples, or not: then copied first, each time
            found = []
            q, k, v, *saved = draw(dims, seqlens, order, padding)
            forward = plan_of(backend, options, Request(True, has_residual, order), Inputs(q, k, v))
            out, lse, residual, dout = saved
            results = Results(out, lse, residual if has_residual else None)
            backward = plan_of(backend, options, Request(), Inputs(q, k, v), (*results, dout, None))
            recorder.forget()
            for recorder.is_profiled in (False, False, True):
                q, k, v, out, lse, residual, dout = draw(dims, seqlens, order, padding)
                new = forward.run(Inputs(q, k, v))
                launched = recorder.take((q, k, v, *new))
                assert (new.residual is not None) == has_residual and new.out.shape == out.shape
                assert (new.out.transpose(1, 2) if order == "bhsd" else new.out).is_contiguous()
                results = Results(out, lse, residual if has_residual else None)
                grads = backward.run(Inputs(q, k, v), results, dout, None)[:3]
                found.append(launched + recorder.take((q, k, v, *results, dout, *grads)))
                assert all(g.shape == t.shape and g.dtype == t.dtype for g, t in zip(grads, (q, k, v)))
            is_copied = padding == 4 and backend == "hopper"
            is_readied = is_copied and order == "bshd"
            assert [plan._again is None for plan in (forward, backward)] == [is_readied] * 2
            assert len(found[0]) >= 4 and found[1] == found[0] and (is_copied or found[2] == found[0])
            assert recorder.compiled == 2 * len(found[0])  # the first call, and the one that is profiled


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_calls_in_another_layout_launch_the_same(backend, recorder):
    found = []
    for layout in ("bshd", "bhsd"):
        q, k, v, out, lse, residual, dout = draw((64, 64), (100, 130), "bshd", 0)
        inputs, results = Inputs(q, k, v), Results(out, lse, residual)
        forward = plan_of(backend, Options(), Request(True, True), inputs, layout=layout)
        backward = plan_of(backend, Options(), Request(), inputs, (*results, dout, None), layout)
        if layout == "bhsd":
            inputs, results = in_layout(inputs, layout), results._replace(out=out.transpose(1, 2))
            dout = dout.transpose(1, 2)
        recorder.forget()
        for _ in range(3):
            new, grads = forward.run(inputs), backward.run(inputs, results, dout, None)[:3]
            found.append(recorder.take((*inputs, *results, dout, *new, *grads)))
            assert new.out.shape == results.out.shape and new.out.stride() == results.out.stride()
            assert all(g.shape == t.shape and g.stride() == t.stride() for g, t in zip(grads, inputs))
        assert forward.layout == layout and forward._again is not None and backward._again is not None
    assert len(found[0]) >= 4 and all(launched == found[0] for launched in found)


def test_few_queries_in_another_layout_launch_the_same(recorder):
    """A profiler has launches made anew from their tensors."""
    shapes, found = ((2, 1, 4, 64), (2, 1024, 2, 64), (2, 1024, 2, 64)), []
    for layout in ("bshd", "bhsd"):
        plan = None
        recorder.forget()
        for recorder.is_profiled in (False, False, False, True):
            inputs = Inputs(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes))
            plan = plan or plan_of("hopper", Options(), Request(), inputs, layout=layout)
            inputs = in_layout(inputs, layout)
            new = plan.run(inputs)
            found.append(recorder.take((*inputs, *new)))
        assert plan._again is not None
    assert len(found[0]) == 2 and all(launched == found[0] for launched in found)


SHAPING = {  # options, and shapes of tensors with their dtypes
    "padding": (Options(), {"mask": ((2, 1, 1, 130), torch.bool)}),
    "mask": (Options(causal=True), {"mask": ((1, 4, 100, 130), torch.bool)}),
    "dropout": (Options(dropout_p=0.1), {"dropout_seed": ((), torch.int64)}),
    "bias": (Options(causal=True), {"bias": ((1, 4, 100, 130), torch.bfloat16)}),
    "alibi": (Options(causal=True), {"alibi_slopes": ((4,), torch.float32)}),
    "all": (
        Options(dropout_p=0.5, window_left=50),
        {
            "mask": ((2, 4, 100, 1), torch.bool),
            "dropout_seed": ((), torch.int64),
            "alibi_slopes": ((2, 4), torch.float32),
        },
    ),
    "packed": (Options(causal=True), {}),
    "packed dropout": (Options(dropout_p=0.1), {"dropout_seed": ((), torch.int64)}),
}


def draw_with_more(call, dim):
    """Options, inputs, results and dout of a call of `SHAPING`; tensors of its own."""
    options, shapes = SHAPING[call]
    q, k, v, out, lse, residual, dout = draw((dim, dim), (100, 130), "bshd", 0)
    more = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    if "packed" in call:
        q, k, v, out, dout = (t.flatten(0, 1) for t in (q, k, v, out, dout))
        lse, residual = (t.transpose(0, 1).flatten(1) for t in (lse, residual))
        more |= {f"cu_seqlens_{name}": torch.zeros(4, dtype=torch.int32) for name in "qk"}
        options = options._replace(max_seqlen_q=90, max_seqlen_k=120)
    inputs, results = Inputs(q, k, v, **more), Results(out, lse, residual)
    return options, inputs, results, dout


WITH_MORE = [(call, dim) for call in SHAPING for dim in (64, 128)] + [("packed", 256)]


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("call, dim", WITH_MORE)
def test_later_calls_with_more_tensors_launch_what_the_first_does(backend, call, dim, recorder):
    """Each call has tensors of its own: a mask is scanned, and the kernels read that scan.

    Backward, a bias is transposed; by the second call twice, as its launches are planned with one.
    """
    found, compiled = [], []
    for recorder.is_profiled in (False, False, False, True):
        options, inputs, results, dout = draw_with_more(call, dim)
        if not found:
            forward = plan_of(backend, options, Request(True, True), inputs)
            backward = plan_of(backend, options, Request(), inputs, (*results, dout, None))
            (forward, firsts), (backward, firsts_back) = counted(forward), counted(backward)
            recorder.forget()
        new = forward.run(inputs)
        assert [t.shape for t in new] == [t.shape for t in results]
        launched = recorder.take((*inputs, *new))
        grads = backward.run(inputs, results, dout, None)[:3]
        launched += recorder.take((*inputs, *results, dout, *grads))
        found.append(launched)
        compiled.append(recorder.compiled)
    scans = orders = 0
    if backend == "hopper":
        scans = 4 * (inputs.mask is not None) + (inputs.bias is not None)
        orders = (2 + (dim > 128)) * ("packed" in call)
    has_two = backend == "triton" and dim > 128  # kernels for dk and dv
    assert len(found[0]) == 4 + has_two + scans + orders
    assert found[2] == found[3] == found[0]
    assert found[1] == found[0] or (inputs.bias is not None and len(found[1]) == len(found[0]) + 1)
    assert len(firsts) == len(firsts_back) == 2  # the first call, and the one that is profiled
    assert compiled[0] == compiled[1] == compiled[2] >= 4


def same_but_for_addresses(planned, launched):
    if isinstance(launched, list):
        return len(planned) == len(launched) and all(map(same_but_for_addresses, planned, launched))
    return planned == launched or (isinstance(planned, (int, str)) and str(launched).startswith("scratch"))


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("call, dim", WITH_MORE)
def test_a_call_without_memory_has_the_launches_of_a_first_call(backend, call, dim, recorder):
    """By it a first call's kernels are compiled; the calls after that find the plan as it was."""
    options, inputs, results, dout = draw_with_more(call, dim)
    forward = plan_of(backend, options, Request(True, True), inputs)
    backward = plan_of(backend, options, Request(), inputs, (*results, dout, None))
    for plan, given in ((forward, (inputs,)), (backward, (inputs, results, dout, None))):
        recorder.take(())
        plan.run(*(launch_plan._without_memory(t, dout.device) for t in given))
        planned = recorder.take(())
        recorder.forget()  # on a GPU nothing has been launched
        plan.run(*given)
        launched = recorder.take(())
        assert launched and same_but_for_addresses(planned, launched)
        plan.run(*given)
        assert plan._again is not None


def test_kernels_are_compiled_side_by_side_once_for_all_lengths(monkeypatch):
    compiled, on_gpu = [], SimpleNamespace(is_cuda=True, device=DEVICE)
    monkeypatch.setattr(launch_plan, "compile_together", lambda *call: compiled.append(call))
    monkeypatch.setattr(plans, "_kinds", set())

    def call(seqlen, query=on_gpu, backend="hopper", **options):
        x = torch.zeros(1, seqlen, 2, 64, dtype=torch.bfloat16)
        mask = torch.zeros(1, 1, 1, seqlen, dtype=torch.bool)
        problem = describe(Inputs(x, x, x, mask=mask), Options(**options))
        plan = FunctionPlan(problem, lambda *given: given)
        signature = SimpleNamespace(direction="forward", request=Request())
        entry = plans.Entry(plan, signature, backend, Saves())
        for _ in range(2):
            assert plans.run(entry, Inputs(query, x, x))
        return len(compiled)

    assert call(100, query=torch.zeros(1)) == 0 and call(100, backend="tiled") == 0
    assert [call(100), call(200), call(100, causal=True), call(300, causal=True)] == [1, 1, 2, 2]


def test_a_mask_of_other_values_is_scanned_again(recorder):
    q, k, v, *_ = draw((64, 64), (100, 130), "bshd", 0)
    mask = torch.ones(2, 1, 1, 130, dtype=torch.bool)
    forward = plan_of("hopper", Options(), Request(), Inputs(q, k, v, mask=mask))
    counts = []
    for is_written in (False, False, True, False):
        if is_written:
            mask[0, 0, 0, 7] = False
        forward.run(Inputs(q, k, v, mask=mask))
        counts.append(len(recorder.take(())))
    assert counts == [3, 1, 3, 1]


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("dim", [64, 192])
def test_a_tensor_given_twice_is_not_taken_for_one(backend, dim, recorder):
    x = torch.zeros(1, 300, 2, dim, dtype=torch.bfloat16)
    lse = torch.zeros(1, 2, 300)
    results = Results(x, lse, None)
    backward = plan_of(backend, Options(), Request(), Inputs(x, x, x), (*results, x, None))
    backward.run(Inputs(x, x, x), results, x, None)
    recorder.take(())
    q, k, v, out, dout = (torch.zeros_like(x) for _ in range(5))
    found = []
    for run in (
        backward.run,
        plan_of(backend, Options(), Request(), Inputs(q, k, v), (out, lse, None, dout, None)).run,
    ):
        grads = run(Inputs(q, k, v), Results(out, lse, None), dout, None)[:3]
        found.append(recorder.take((q, k, v, out, lse, dout, *grads)))
    assert found[0] == found[1]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "shape", [(2, 4, 100, 130), (1, 4, 100, 130), (2, 1, 1, 130), (1, 4, 100, 1)], ids=str
)
def test_hopper_leaves_the_gradient_of_a_bias_to_another_kernel(shape, layout, recorder, monkeypatch):
    """It starts when the kernel of row statistics has ended: nobody between the two has waited for that.

    A bias that has more than one query is transposed first.
    """
    monkeypatch.setattr("tilewise.gpu.hopper.plan.missing_device", lambda problem: None)
    launches = []
    monkeypatch.setattr(launch_plan, "start", launches.append)
    q, k, v, out, lse, residual, dout = draw((64, 64), (100, 130), "bshd", 0)
    inputs = Inputs(q, k, v, bias=torch.zeros(shape, dtype=q.dtype))
    results = Results(out, lse, residual)
    if layout == "bhsd":
        inputs = inputs._replace(query=q.transpose(1, 2), key=k.transpose(1, 2), value=v.transpose(1, 2))
        results, dout = results._replace(out=out.transpose(1, 2)), dout.transpose(1, 2)
    seen = on_gpu(inputs), on_gpu((*results, dout, None))
    for needs_gradient in (False, True):
        launches.clear()
        call = (Options(causal=True), "hopper", Request(), needs_gradient, 1, layout)
        entry = plans._make_backward(Signature("backward", *seen, False, *call))
        grads = plans.run(entry, inputs, results, dout, None)
        assert [g.shape for g in grads[:3]] == [t.shape for t in inputs[:3]]
        modules = [launch.kernel.__module__.split(".")[2] for launch in launches]
        assert modules == ["hopper"] * (3 + (shape[2] > 1)) + ["triton"] * 2 * needs_gradient
        assert (launches[0].kernel.__name__ == "copy_bias_kernel") == (shape[2] > 1)
    assert grads.bias.shape == shape and grads.bias.dtype == q.dtype
    assert launches[-1].kernel.__name__ == "attn_bwd_dbias_kernel"
    assert not any(launch.launch_pdl for launch in launches[-2:])


SCALES = ("key_scale", "value_scale")
STEPS = {  # options, more tensors of a step, and backends that serve it by decoding
    "plain": (Options(causal=True), {}, ("hopper", "triton")),
    "window": (Options(window_left=100, softcap=5.0), {}, ("hopper", "triton")),
    "sinks": (Options(causal=True), {"sinks": ((8,), torch.float32)}, ("hopper", "triton")),
    "alibi": (Options(causal=True), {"alibi_slopes": ((8,), torch.float32)}, ("hopper", "triton")),
    "8 bits": (Options(causal=True), dict.fromkeys(SCALES, ((16, 2), torch.float32)), ("hopper", "triton")),
    "mask": (Options(), {"mask": ((3, 1, 1, 512), torch.bool)}, ("triton",)),
    "left padding": (Options(causal=True), {"leftpad_k": ((3,), torch.int32)}, ("hopper", "triton")),
}


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("step, backend", [(step, b) for step, found in STEPS.items() for b in found[2]])
def test_later_steps_of_a_cache_launch_what_the_first_does(step, backend, is_paged, order, recorder):
    """The queries are a slice of queries, keys and values: one token's stride says more than its shape."""
    options, shapes, _ = STEPS[step]
    is_8_bit = step == "8 bits"
    is_paged = is_paged or is_8_bit

    def inputs():
        q = torch.zeros(3, 1, 3 * 8, 128, dtype=torch.bfloat16)[:, :, :8]
        shape = (16, 64, 2, 128) if is_paged else (3, 512, 2, 128)
        dtype = torch.float8_e4m3fn if is_8_bit else torch.bfloat16
        k, v = (torch.zeros(shape, dtype=dtype) for _ in range(2))
        table = torch.zeros(3, 8, dtype=torch.int32) if is_paged else None
        lengths = torch.full((3,), 290, dtype=torch.int32)
        more = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        return Inputs(q, k, v, seqlens_k=lengths, page_table=table, **more)

    for has_residual in (False, True):
        request, found = Request(residual=has_residual, order=order), []
        plan, firsts = counted(plan_of(backend, options, request, inputs()))
        recorder.forget()
        for recorder.is_profiled in (False, False, True):
            given = inputs()
            out, lse, residual = plan.run(given)
            assert out.shape == given.query.shape and lse.shape == (3, 8, 1)
            assert (residual is not None) == has_residual
            assert (out.transpose(1, 2) if order == "bhsd" else out).is_contiguous()
            found.append(recorder.take((*given, out, lse, residual)))
        assert len(found[0]) == 2 and found[0] == found[1] == found[2]
        assert recorder.compiled == 4 and len(firsts) == 2  # the first call, and the one that is profiled


PACKED = {"cu_seqlens_q": ((3,), torch.int32)}
LENGTHS = {"seqlens_k": ((2,), torch.int32)}
PAGES = LENGTHS | {"page_table": ((2, 8), torch.int32)}
MANY_QUERIES = {  # options, and more tensors, of forwards that are no decoding
    "sinks": (Options(causal=True), {"sinks": ((4,), torch.float32)}),
    "bias": (Options(), {"bias": ((2, 4, 100, 130), torch.bfloat16)}),
    "bias that is copied": (Options(), {"bias": ((2, 4, 100, 131), torch.bfloat16)}),
    "packed with sinks": (Options(max_seqlen_q=90), PACKED | {"sinks": ((4,), torch.float32)}),
    "lengths": (Options(causal=True), LENGTHS),
    "pages": (Options(causal=True), PAGES),
    "packed queries, lengths": (Options(causal=True, max_seqlen_q=90), PACKED | LENGTHS),
    "packed queries, pages": (Options(causal=True, max_seqlen_q=90), PACKED | PAGES),
    "left padding": (Options(causal=True), LENGTHS | {"leftpad_k": ((2,), torch.int32)}),
    "left padding, pages": (Options(causal=True), PAGES | {"leftpad_k": ((2,), torch.int32)}),
    "sinks, pages": (Options(window_left=70), PACKED | PAGES | {"sinks": ((4,), torch.float32)}),
}


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("call", MANY_QUERIES)
def test_later_forwards_with_more_tensors_launch_what_the_first_does(call, backend, recorder):
    options, shapes = MANY_QUERIES[call]
    found, plan = [], None
    for recorder.is_profiled in (False, False, False, True):
        more = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        keys = (16, 64) if "page_table" in more else (2, 131 if call.endswith("copied") else 130)
        q, k, v = (torch.zeros(*n, 64, dtype=torch.bfloat16) for n in ((2, 100, 4), (*keys, 2), (*keys, 2)))
        if "cu_seqlens_q" in more:
            q = q.flatten(0, 1)
            if "seqlens_k" not in more:
                k, v, more["cu_seqlens_k"] = k.flatten(0, 1), v.flatten(0, 1), more["cu_seqlens_q"].clone()
        inputs = Inputs(q, k, v, **more)
        if plan is None:
            plan, firsts = counted(plan_of(backend, options, Request(True, True), inputs))
        out, lse, residual = plan.run(inputs)
        found.append(recorder.take((*inputs, out, lse, residual)))
    assert found[0] and found[0] == found[2] == found[3]
    assert len(found[1]) == len(found[0]) + (
        call.endswith("copied") and backend == "hopper"
    )  # it looks first
    assert len(firsts) == 2  # the first call, and the one that is profiled


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_call_that_a_graph_captures_is_not_the_one_that_looks(backend, recorder):
    """It would scan and sort anew for what is known from shapes, and the graph would repeat that."""
    q, k, v, *_ = draw((64, 64), (100, 130), "bshd", 0)
    inputs = Inputs(q, k, v, mask=torch.ones(2, 1, 1, 130, dtype=torch.bool))
    plan, firsts = counted(plan_of(backend, Options(), Request(), inputs))
    counts = []
    for recorder.is_captured in (False, True, True, False, True):
        plan.run(inputs)
        counts.append(len(firsts))
    assert counts == [1, 2, 3, 3, 3]


@pytest.mark.parametrize("dim", [64, 256])
def test_offsets_with_gaps_are_copied_for_every_kernel(dim, recorder):
    q, k, v, out, lse, residual, dout = draw((dim, dim), (100, 130), "bshd", 0)
    q, k, v, out, dout = (t.flatten(0, 1) for t in (q, k, v, out, dout))
    lse, residual = (t.transpose(0, 1).flatten(1) for t in (lse, residual))
    offsets = torch.zeros(3, 4, dtype=torch.int32)[:, 0]
    inputs = Inputs(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    options = Options(max_seqlen_q=90, max_seqlen_k=120)
    results = Results(out, lse, residual)
    for plan, rest in (
        (plan_of("hopper", options, Request(True, True), inputs), ()),
        (plan_of("hopper", options, Request(), inputs, (*results, dout, None)), (results, dout, None)),
    ):
        for _ in range(3):
            plan.run(inputs, *rest)
            launched, recorder.launches = recorder.launches, []
            assert len(launched) >= 2
            assert not any(offsets.data_ptr() in arguments for _, _, arguments in launched)


@pytest.mark.parametrize("dims", [(576, 512), (128, 128)], ids=str)
def test_values_are_read_from_keys_only_where_they_lie(dims, recorder):
    """Also of meta tensors, which all have the address 0: what is compiled ahead is what is launched."""
    from tilewise.core.problem import describe
    from tilewise.gpu.triton import launch_decode

    q, k, v = (
        torch.empty(1, n, 1, d, device="meta") for n, d in ((1, dims[0]), (512, dims[0]), (512, dims[1]))
    )
    for value, is_in_key in ((v, False), (k[..., : dims[1]], dims[0] > dims[1])):
        inputs = Inputs(q, k, value)
        launch_decode.forward(describe(inputs, Options()), inputs)
        (_, _, arguments), _ = recorder.launches
        assert is_in_key == arguments[-1].IS_SHARED
        recorder.launches = []


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("face", [tilewise.attention, tilewise.scaled_dot_product_attention])
def test_a_hit_passes_four_files(face, backend, requires_grad, recorder, monkeypatch):
    """Up to the C function that launches, where tensors lie where those of an earlier call did."""

    def allocator(*arguments):
        t = gpu_plan.allocator(*arguments)()
        return lambda: t.detach()

    monkeypatch.setattr(launch_plan, "allocator", allocator)
    monkeypatch.setattr(plans, "look", lambda tensors, _: on_gpu(tensors, requires_grad))
    monkeypatch.setattr(plans, "choose", lambda *_, **__: backend)
    plans.clear()
    q, k, v = (torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16, requires_grad=requires_grad) for _ in range(3))
    for _ in range(3):
        face(q, k, v)
    recorder.take(())
    entered = functions_entered(lambda: face(q, k, v))
    assert len(recorder.take(())) == 1
    assert len({code.co_filename for code in entered}) <= 4, sorted(c.co_filename for c in entered)
    assert body_lines(entered) <= 150
    plans.clear()
