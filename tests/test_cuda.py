"""The public functions on a GPU; skipped without one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import library

import tilewise
from tilewise import PagedKVCache, flash_attn_3, reference
from tilewise.cache import paged, step
from tilewise.core.problem import Inputs, Options
from tilewise.rotary import rotary_tables
from tilewise.testing import check_attention, compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.fixture(params=[None, "triton"])
def backend(request):
    """What serves by default, and the kernels that serve every GPU."""
    return request.param


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "softcap": {"softcap": 5.0, "causal": True},
    "sinks": {"sinks": (4,)},
    "bias": {"bias": (1, 4, 300, 1)},
    "full bias": {"bias": (2, 4, 300, 333)},
    "mask": {"mask": (2, 1, 300, 333)},
    "alibi": {"alibi_slopes": (2, 4), "causal": True},
    "dropout": {"dropout_p": 0.2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, dtype):
    torch.manual_seed(0)
    options = {
        key: torch.randn(o, device="cuda") if isinstance(o, tuple) and key != "window" else o
        for key, o in OPTIONS[name].items()
    }
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options[
            "alibi_slopes"
        ].abs()  # negative slopes reward distance without bound
    if "mask" in options:
        options["mask"] = options["mask"] > -0.5
    q, k, v = (draw(2, n, h, 64, dtype=dtype) for n, h in ((300, 4), (333, 2), (333, 2)))
    check_attention(q, k, v, holds_mean=dtype != torch.float32, **options)


def test_packed_and_cached():
    starts = torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")
    q, k, v = (draw(300, h, 64) for h in (4, 2, 2))
    check_attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    x = draw(2, 40, 2, 64)
    cache = tilewise.KVCache(2, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
    outs = [tilewise.attention_with_cache(t, cache, t, t) for t in x.split([30, 5, 1, 4], 1)]
    exact, _ = reference.attention(x, x, x, causal=True)
    base, _ = reference.attention(x, x, x, causal=True, dtype=torch.bfloat16)
    assert compare("out", torch.cat(outs, 1), exact, base).is_within


def test_bad_values_are_refused():
    x = draw(10, 2, 64)
    with pytest.raises(ValueError, match="must start at 0 and end at total=10"):
        bad = torch.tensor([0, 9], device="cuda")
        tilewise.attention_varlen(x, x, x, bad, bad)


def test_triton_serves_by_default():
    x = draw(1, 128, 2, 64, dtype=torch.float32)
    assert tilewise.explain(x, x, x, causal=True).backend == "triton"


def test_opcheck_and_compile():  # in float32 by the Triton kernels
    q, k, v = (draw(2, 64, 2, 64, dtype=torch.float32).requires_grad_() for _ in range(3))
    scalars = (*Options(causal=True), None)
    inputs = Inputs(q, k, v)
    arguments = (*inputs, *Options(causal=True), "bshd", True, None)
    library.opcheck(torch.ops.tilewise.attention.default, arguments)
    out, lse, _ = (t.detach() for t in torch.ops.tilewise.attention(*arguments))
    library.opcheck(
        torch.ops.tilewise.attention_backward.default,
        (torch.randn_like(out), None, out, lse, None, *inputs, *scalars, False),
    )

    def loss(q, k, v):
        return tilewise.attention(q * 2, k, v, causal=True).square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(q, k, v), q)[0],
        torch.autograd.grad(loss(q, k, v), q)[0],
        rtol=1e-4,
        atol=1e-5,
    )


def test_second_derivatives_agree_with_the_cpu():
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))

    def second(device):
        leaves = [t.to(device).requires_grad_() for t in (q, k, v)]
        out = tilewise.attention(*leaves, causal=True, softcap=2.0)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    for found, exact in zip(second("cuda"), second("cpu")):
        torch.testing.assert_close(found.cpu(), exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": (40, 0)}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
def test_packed_queries_with_pages(dtype, options, page_size):
    """Chunks of prompts and single tokens of three sequences, in one row."""
    cache = tilewise.PagedKVCache(64, page_size, 2, 64, dtype=dtype, device="cuda")
    chunks = [[100, 7, 0], [150, 60, 149], [50, 10, 1], [1, 1, 1], [0, 2, 130]]
    tensors = [[draw(sum(n), h, 64, dtype=dtype) for h in (4, 2, 2)] for n in zip(*chunks)]
    sequences = [cache.allocate() for _ in tensors]
    outs: list[list[torch.Tensor]] = [[], [], []]
    fed = [0, 0, 0]
    for counts in chunks:
        parts = [[t[a : a + n] for t in ts] for ts, a, n in zip(tensors, fed, counts)]
        batch = cache.reserve(sequences, counts)
        q, k, v = (torch.cat(p) for p in zip(*parts))
        out = tilewise.attention_with_cache(q, cache, k, v, batch=batch, backend="triton", **options)
        for own, part in zip(outs, out.split(counts)):
            own.append(part)
        fed = [a + n for a, n in zip(fed, counts)]
    for (q, k, v), own in zip(tensors, outs):
        exact, _ = reference.attention(q[None], k[None], v[None], causal=True, **options)
        base, _ = reference.attention(q[None], k[None], v[None], causal=True, dtype=dtype, **options)
        report = compare("out", torch.cat(own)[None], exact, base)
        assert report.is_within, report


@pytest.mark.parametrize("has_rotary", [False, True])
@pytest.mark.parametrize("page_size", [16, 128])
def test_eight_bit_pages_are_written_as_by_pytorch(page_size, has_rotary, monkeypatch):
    """A prompt and some steps, by the kernels and by PyTorch's operations: the same bits without rotation."""
    tokens = [
        [torch.randn(3, n, heads, 128, device="cuda").bfloat16() for heads in (8, 2, 2)]
        for n in (300, 1, 1, 9)
    ]
    tables = rotary_tables(torch.arange(400, device="cuda"), 128) if has_rotary else (None, None)
    found = []
    for is_by_kernels in (True, False):
        if not is_by_kernels:
            for module in (paged, step):
                monkeypatch.setattr(module, "has_kernels", lambda t: False)
        cache = PagedKVCache(200, page_size, 2, 128, dtype=torch.float8_e4m3fn, device="cuda")
        for _ in range(3):
            cache.allocate()
        outs = [
            tilewise.attention_with_cache(
                q, cache, k, v, causal=True, rotary_cos=tables[0], rotary_sin=tables[1]
            )
            for q, k, v in tokens
        ]
        found.append((cache, outs))
    (ours, outs), (theirs, others) = found
    for name in ("key", "value", "key_scale", "value_scale"):
        if not (has_rotary and name.startswith("key")):
            assert torch.equal(getattr(ours, name).float(), getattr(theirs, name).float()), name
    for out, other in zip(outs, others):
        torch.testing.assert_close(out, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_eight_bit_caches_of_flash_attention_3(kind):
    """The same on a GPU as on the CPU, and the caches equal bit for bit."""
    fp8, shape = torch.float8_e4m3fn, (80, 16, 2, 64) if kind == "paged" else (2, 640, 2, 64)
    generator = torch.Generator().manual_seed(3)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    caches = [rand(*shape).to(fp8) for _ in range(2)]
    q, k, v = (rand(2, 3, heads, 64).to(fp8) for heads in (8, 2, 2))
    options = {f"{name}_descale": rand(2, 2).abs() for name in "qkv"}
    options["cache_seqlens"] = torch.tensor([500, 37], dtype=torch.int32)
    if kind == "paged":
        options["page_table"] = torch.randperm(80, generator=generator).int().view(2, 40)
    runs = []
    for device in ("cpu", "cuda"):
        k_cache, v_cache = (t.clone().to(device) for t in caches)
        own = {name: t.to(device) for name, t in options.items()}
        out = flash_attn_3.flash_attn_with_kvcache(
            q.to(device), k_cache, v_cache, k.to(device), v.to(device), causal=True, **own
        )
        runs.append([t.float().cpu() for t in (out, k_cache, v_cache)])
    torch.testing.assert_close(runs[1][0], runs[0][0], rtol=2e-2, atol=2e-2)
    assert torch.equal(runs[1][1], runs[0][1]) and torch.equal(runs[1][2], runs[0][2])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"bias": (1, 4, 300, 300)}, {"sinks": (4,)}], ids=str)
def test_a_graph_replays_forward_and_backward_with_new_values(backend, options, dim):
    extras = {name: draw(*shape).requires_grad_() for name, shape in options.items()}
    leaves = [draw(2, 300, 4, dim).requires_grad_() for _ in range(3)]
    given = [*leaves, *extras.values(), draw(2, 300, 4, dim)]

    def run():
        out = tilewise.attention(*leaves, causal=True, deterministic=True, backend=backend, **extras)
        return [out, *torch.autograd.grad(out, given[:-1], given[-1])]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        with torch.no_grad():
            for t in given:
                t.copy_(draw(*t.shape))
        expected = run()
        for t in captured:
            t.detach().fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


REPEATED = {  # head size, options; shapes of tensors stand for random ones
    "options": (64, {"causal": True, "bias": (1, 4, 1, 333), "sinks": (4,), "dropout_p": 0.1}),
    "d64": (64, {"causal": True}),
    "d128": (128, {}),
    "d256": (256, {"causal": True}),
    "bias": (128, {"bias": (2, 4, 300, 333)}),
    "bias of all sequences": (64, {"bias": (1, 4, 300, 333)}),
    "bias of all heads": (64, {"bias": (1, 1, 300, 333), "window": (100, 20)}),
}


@pytest.mark.parametrize("name", REPEATED)
def test_the_same_bits_in_20_runs(name):
    dim, options = REPEATED[name]
    q, k, v = (draw(2, n, h, dim).requires_grad_() for n, h in ((300, 4), (333, 2), (333, 2)))
    extras = {key: draw(*options[key]).requires_grad_() for key in ("bias", "sinks") if key in options}
    dout = draw(2, 300, 4, dim)

    def run():
        seed = torch.Generator("cuda").manual_seed(5) if "dropout_p" in options else None
        out = tilewise.attention(
            q, k, v, **options | extras, generator=seed, deterministic=True, backend="triton"
        )
        return [out, *torch.autograd.grad(out, (q, k, v, *extras.values()), dout)]

    first = run()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


def test_the_same_bits_in_20_runs_of_packed_and_cached_attention():
    starts = torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")
    packed = [draw(300, h, 64).requires_grad_() for h in (4, 2, 2)]
    dout, query = draw(300, 4, 64), draw(2, 1, 4, 64)
    cached = [draw(2, 1000, 2, 64) for _ in range(2)]

    def run():
        offsets = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        out = tilewise.attention_varlen(*packed, **offsets, causal=True, backend="triton")
        cache = tilewise.KVCache(2, 1024, 2, 64, dtype=torch.bfloat16, device="cuda")
        cache.append(*cached)
        decoded = tilewise.attention_with_cache(query, cache, backend="triton")
        return [out, *torch.autograd.grad(out, packed, dout), decoded]

    first = run()
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, run()))


def test_a_plan_serves_other_tensors():
    """The first call's tensors are one; those of the second have the same strides but differ."""
    x = draw(1, 200, 2, 64)
    check_attention(x, x, x, causal=True)
    check_attention(*(draw(1, 200, 2, 64) for _ in range(3)), causal=True)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_repeated_calls(layout, dropout_p):
    """The second call of a kind goes straight to its plan; dropout draws anew."""
    order = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    outs = []
    x = draw(2, 150, 2, 64).permute(order)
    for _ in range(3):
        outs.append(tilewise.attention(x, x, x, causal=True, layout=layout, dropout_p=dropout_p))
    q, k, v = (draw(2, 150, 2, 64) for _ in range(3))
    out, lse = tilewise.attention(*(t.permute(order) for t in (q, k, v)), layout=layout, return_lse=True)
    exact, exact_lse = reference.attention(q, k, v)
    torch.testing.assert_close(out.permute(order).double(), exact, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)
    assert torch.equal(outs[1], outs[2]) == (dropout_p == 0)
    gapped = draw(2, 150, 2, 128)[..., ::2].permute(order)
    for _ in range(2):
        tight = tilewise.attention(*[gapped.contiguous()] * 3, layout=layout)
        assert torch.equal(tilewise.attention(gapped, gapped, gapped, layout=layout), tight)


def test_strides_of_sharded_parameters(backend):
    """Slices of one flat buffer, at odd offsets: addresses are not aligned, rows are not contiguous."""
    flat = draw(3 * 2 * 100 * 4 * 72 + 7)
    for offset in (0, 1, 7):
        views = flat[offset : offset + 2 * 100 * 3 * 4 * 72].view(2, 100, 3, 4, 72).unbind(2)
        check_attention(*(t[..., :64] for t in views), causal=True, backend=backend)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_replays_dropout(is_reentrant):
    from torch.utils.checkpoint import checkpoint

    q, k, v = (draw(1, 130, 2, 64).requires_grad_() for _ in range(3))

    def gradients(is_checkpointed):
        def call(*qkv):
            return tilewise.attention(*qkv, causal=True, dropout_p=0.3)

        torch.manual_seed(3)
        out = checkpoint(call, q, k, v, use_reentrant=is_reentrant) if is_checkpointed else call(q, k, v)
        return (
            torch.autograd.grad(out.float().square().sum(), (q, k, v)) if not is_reentrant else backward(out)
        )

    def backward(out):  # reentrant checkpointing knows .backward() only
        for t in (q, k, v):
            t.grad = None
        out.float().square().sum().backward()
        return [t.grad for t in (q, k, v)]

    for a, b in zip(gradients(False), gradients(True)):
        assert torch.equal(a, b)


def test_func_grad_is_autograd(backend):
    q, k, v = (draw(1, 90, 2, 64) for _ in range(3))

    def loss(*qkv):
        out = tilewise.attention(*qkv, causal=True, deterministic=True, backend=backend)
        return out.float().square().sum()

    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    found = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    expected = torch.autograd.grad(loss(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nested_tensors_are_packed_ones():
    lengths, x = torch.tensor([0, 300, 301, 500], device="cuda"), draw(500, 4, 64).requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(x, lengths).transpose(1, 2)
    out = tilewise.scaled_dot_product_attention(nested, nested, nested, is_causal=True)
    found = out.transpose(1, 2).values()
    expected = tilewise.attention_varlen(x, x, x, lengths, lengths, causal=True)
    assert torch.equal(found, expected)
    check_attention(*(3 * [x[301:][None]]), causal=True)
    grads = (torch.autograd.grad(t.square().sum(), x)[0] for t in (found, expected))
    torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)  # dq is summed in no fixed order


def test_tf32_is_close_and_ieee_exact():
    q, k, v = (draw(1, 257, 2, 128, dtype=torch.float32).requires_grad_() for _ in range(3))
    exact, _ = reference.attention(q, k, v, causal=True)
    errors = {}
    for precision in ("ieee", "tf32"):
        out = tilewise.attention(q, k, v, causal=True, precision=precision)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        wanted = reference.attention_backward(2 * out.detach(), q, k, v, causal=True)
        pairs = [(out, exact), *zip(grads, wanted[:3])]
        errors[precision] = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
    assert errors["ieee"] < 2e-6 < errors["tf32"] < 3e-3


def test_nothing_compiles_after_a_warmup():
    from tilewise.gpu.triton.backward import attn_bwd_dkdv_kernel, attn_bwd_dq_kernel
    from tilewise.gpu.triton.forward import attn_fwd_kernel

    def variants():
        kernels = (attn_fwd_kernel, attn_bwd_dkdv_kernel, attn_bwd_dq_kernel)
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    x = draw(1, 64, 6, 96)
    tilewise.warmup(x, x, x, window=(40, 0), backend="triton")
    before = variants()
    for batch, seqlen in ((1, 100), (3, 1000)):
        q = draw(batch, seqlen, 6, 96).requires_grad_()
        tilewise.attention(q, q, q, window=(40, 0), backend="triton").sum().backward()
    assert variants() == before


@needs_two_gpus
def test_another_device(backend):
    expected = forward_and_backward("cuda", backend)
    for _ in range(3):  # through Triton, then by the plan
        found = forward_and_backward("cuda:1", backend)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


@needs_two_gpus
def test_two_devices_at_once(backend):
    expected = forward_and_backward("cuda", backend)
    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(forward_and_backward, f"cuda:{i % 2}", backend) for i in range(40)]
        for result in results:
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(result.result(), expected, strict=True))


@needs_two_gpus
@pytest.mark.parametrize("is_paged", [False, True], ids=["contiguous", "paged"])
def test_a_cache_on_another_device(backend, is_paged):
    expected = append_and_decode("cuda", backend, is_paged)
    for _ in range(3):
        found = append_and_decode("cuda:1", backend, is_paged)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


def append_and_decode(device, backend, is_paged):
    """Four steps of one token after 300."""
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(2, 304, 2, 64, generator=generator).bfloat16().to(device)
    options = {"dtype": torch.bfloat16, "device": device}
    if is_paged:
        cache = tilewise.PagedKVCache(64, 16, 2, 64, **options)
        placed = {"batch": [cache.allocate(), cache.allocate()]}
    else:
        cache, placed = tilewise.KVCache(2, 512, 2, 64, **options), {}
    return [
        tilewise.attention_with_cache(x, cache, x, x, **placed, backend=backend)
        for x in given.split([300, 1, 1, 1, 1], 1)
    ]


def forward_and_backward(device, backend):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 512, 4, 64, generator=generator).bfloat16().to(device) for _ in range(4)]
    leaves = [t.requires_grad_() for t in given[:3]]
    out = tilewise.attention(*leaves, causal=True, deterministic=True, backend=backend)
    return [out, *torch.autograd.grad(out, leaves, given[3])]


def test_another_stream(backend):
    expected = forward_and_backward("cuda", backend)
    stream = torch.cuda.Stream()
    for _ in range(3):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = forward_and_backward("cuda", backend)
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_dropout_is_the_cpu_mask():
    q, k, v = (torch.randn(1, 100, 2, 32) for _ in range(3))
    seed = torch.tensor(99)
    inputs = Inputs(q, k, v, dropout_seed=seed)
    scalars = (*Options(dropout_p=0.3), "bshd", False, None)
    cpu, *_ = torch.ops.tilewise.attention(*inputs, *scalars)
    gpu, *_ = torch.ops.tilewise.attention(*(None if t is None else t.cuda() for t in inputs), *scalars)
    torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_paged", [False, True])
@torch.no_grad()
def test_compiled_steps_are_captured_in_cuda_graphs(is_paged):
    """mode="reduce-overhead" writes to caches, also to another one, and lengths are read in each replay."""
    from torch._dynamo.utils import counters

    def call(cache, batch, q, k, v):
        return tilewise.attention_with_cache(q, cache, k, v, batch=batch)

    def make():
        if not is_paged:
            return tilewise.KVCache(2, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
        cache = tilewise.PagedKVCache(16, 16, 2, 64, max_seqlen=64, dtype=torch.bfloat16, device="cuda")
        cache.allocate(), cache.allocate()
        return cache

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for _ in range(2):
        caches, batches = [make(), make()], [None, None]
        for _ in range(20):
            if is_paged:
                batches = [c.reserve(c.sequences, 1, into=b) for c, b in zip(caches, batches)]
            q, k, v = (draw(2, 1, heads, 64) for heads in (4, 2, 2))
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(caches[0], batches[0], q, k, v).clone()
            assert torch.equal(found, call(caches[1], batches[1], q, k, v))
        assert torch.equal(caches[0].key, caches[1].key)
    assert counters["inductor"]["cudagraph_skips"] == 0
