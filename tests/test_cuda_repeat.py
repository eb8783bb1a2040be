"""Repeated calls on a GPU: what was found for one call serves the next, wherever its tensors lie."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.dispatch import plans
from tilewise.testing import check_attention, compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def qkv(seqlen=200, dim=64):
    return [draw(2, seqlen, 4, dim) for _ in range(3)]


def check(out, q, k, v, **options):
    exact, baseline = (reference.attention(q, k, v, dtype=t, **options)[0] for t in (torch.float64, q.dtype))
    report = compare("out", out, exact, baseline)
    assert report.max_error <= report.max_budget, report


@pytest.fixture(params=["hopper", "triton"])
def backend(request):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    plans.clear()
    return request.param


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_new_freed_and_reused_memory(backend, layout, dim):
    order = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    for n in range(6):
        tensors = qkv(dim=dim)
        given = [t.permute(order) for t in tensors]
        out = tilewise.attention(*given, causal=True, layout=layout, backend=backend)
        check(out.permute(order), *tensors, causal=True)
        if n % 2:
            del tensors, given, out
            gc.collect()
            torch.cuda.empty_cache()
    assert len(plans.entries()) == 1


def test_one_address_with_other_shapes_and_strides(backend):
    flat = draw(1 << 20)
    for seqlen, stride in ((100, 256), (100, 512), (200, 256), (64, 1024), (100, 256)):
        for _ in range(2):
            x = flat.as_strided((2, seqlen, 4, 64), (seqlen * stride, stride, 64, 1))
            check(tilewise.attention(x, x, x, backend=backend), x, x, x)


def test_gradients_of_repeated_calls(backend):
    for _ in range(3):
        q, k, v = qkv()
        check_attention(q, k, v, causal=True, backend=backend)


def more_tensors(kind, seed):
    """Options of a call of `kind`, with tensors of its own, and the attention that takes them."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    if kind == "mask":
        mask = torch.rand(2, 1, 1, 200, device="cuda", generator=generator) < 0.7
        mask[..., 0] = True
        return tilewise.attention, {"mask": mask}
    if kind == "alibi":
        slopes = torch.rand(4, device="cuda", generator=generator)
        return tilewise.attention, {"alibi_slopes": slopes, "causal": True}
    if kind == "dropout":
        return tilewise.attention, {"dropout_p": 0.3, "generator": generator}
    ends = torch.randint(1, 400, (3,), device="cuda", generator=generator).sort().values.int()
    offsets = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), 400)])

    def attend(q, k, v, **options):
        packed = [t.flatten(0, 1) for t in (q, k, v)]
        return tilewise.attention_varlen(*packed, offsets, offsets, 400, 400, **options).view(q.shape)

    return attend, {"causal": True}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["mask", "alibi", "dropout", "packed"])
def test_repeated_calls_with_more_tensors(backend, kind, dim):
    for seed in (1, 2, 3, 4):
        tensors, dout = [t.requires_grad_() for t in qkv(dim=dim)], draw(2, 200, 4, dim)
        found = []
        for to, name in ((torch.bfloat16, backend), (torch.float32, "tiled")):
            attend, options = more_tensors(kind, seed)
            given = [t.to(to) for t in tensors]
            out = attend(*given, backend=name, **options)
            found.append([out, *torch.autograd.grad(out, given, dout.to(to))])
        for ours, exact in zip(*found, strict=True):
            assert (ours.float() - exact).norm() < 1e-2 * exact.norm()


def test_second_derivatives_of_repeated_calls(backend):
    found = []
    torch.manual_seed(0)
    x = draw(1, 100, 2, 64).requires_grad_()
    for _ in range(3):
        out = tilewise.attention(x, x, x, backend=backend)
        (first,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.float().square().sum(), x)[0])
    assert torch.isfinite(found[0]).all() and found[0].abs().max() > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_streams_and_graphs(backend):
    q, k, v = qkv()
    stream = torch.cuda.Stream()
    for _ in range(2):
        tilewise.attention(q, k, v, backend=backend)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = tilewise.attention(q, k, v, backend=backend)
        stream.synchronize()
        check(out, q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewise.attention(q, k, v, backend=backend)
    for _ in range(3):
        q.copy_(draw(*q.shape))
        tilewise.attention(*qkv(), backend=backend)  # takes memory and a plan in between
        graph.replay()
        check(out, q, k, v)


def test_a_profiler_sees_repeated_launches(backend):
    from triton import knobs

    q, k, v = qkv()
    tilewise.attention(q, k, v, backend=backend)
    names = []

    def hook(metadata):
        names.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        out = tilewise.attention(q, k, v, backend=backend)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    check(out, q, k, v)
    assert names == ["attn_fwd_kernel"]


def test_offsets_are_read_once_and_not_in_a_graph(backend):
    starts = torch.tensor([0, 50, 50, 200], dtype=torch.int32, device="cuda")
    q, k, v = (t[0] for t in qkv())
    options = {"causal": True, "backend": backend}
    expected = tilewise.attention_varlen(q, k, v, starts, starts, 150, 150, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = tilewise.attention_varlen(q, k, v, starts, starts, 150, 150, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tilewise.attention_varlen(q, k, v, starts.clone(), starts.clone(), 150, 150, **options)
    graph.replay()
    assert torch.equal(found, expected)
    starts[1] = 60  # and the next is 50
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        tilewise.attention_varlen(q, k, v, starts, starts, 150, 150, **options)


def test_nothing_kept_holds_tensors(backend):
    x = draw(2, 4096, 8, 64)  # 8 MB
    tilewise.attention(x, x, x, backend=backend)
    del x
    gc.collect()
    before = torch.cuda.memory_allocated()
    leaves = [draw(2, 4096, 8, 64).requires_grad_() for _ in range(3)]
    for _ in range(2):
        tilewise.attention(*leaves, backend=backend).sum().backward()
        tilewise.attention(*(t.detach() for t in leaves), backend=backend)
    del leaves
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 1 << 20


@pytest.fixture
def made():
    """The plans that a test has made."""
    plans.clear()
    return plans.entries


def check_rows(out, lse, q, keys, values, **options):
    """out and lse of sequence b, whose keys and values are the lists' entry b."""
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        own = q[b : b + 1], k[None], v[None]
        exact, base = (
            reference.attention(*own, causal=True, dtype=t, **options) for t in (torch.float64, q.dtype)
        )
        for name, found, right, rough in zip(("out", "lse"), (out[b : b + 1], lse[b : b + 1]), exact, base):
            report = compare(name, found, right, rough)
            assert report.max_error <= report.max_budget, report


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.mark.parametrize("extra", ["none", "sinks", "alibi", "rotary"])
@pytest.mark.parametrize("kind", ["rows", "pages16", "pages256"])
@pytest.mark.parametrize("dim", [64, 128])
def test_repeated_steps_of_a_cache(backend, dim, kind, extra, made):
    """Sequences of other lengths grow by tokens of other addresses, and every step is right."""
    held, capacity, page = [300, 77, 512], 640, 0 if kind == "rows" else int(kind[5:])
    tables = tilewise.rotary.rotary_tables(torch.arange(capacity, device="cuda"), dim)
    options = {"sinks": {"sinks": draw(8)}, "alibi": {"alibi_slopes": draw(8).float().abs()}}.get(extra, {})
    if page:
        cache = tilewise.PagedKVCache(
            3 * capacity // page + 8, page, 2, dim, dtype=torch.bfloat16, device="cuda"
        )
        for _ in held:
            cache.allocate()
    else:
        cache = tilewise.KVCache(3, capacity, 2, dim, dtype=torch.bfloat16, device="cuda")
    keys, values = ([draw(n, 2, dim) for n in held] for _ in range(2))
    if page:
        cache.append(keys, values)
    else:
        for b, n in enumerate(held):
            cache.key[b, :n], cache.value[b, :n] = keys[b], values[b]
        cache.lengths.copy_(torch.tensor(held))
    kept = []
    for _ in range(5):
        q, k, v = draw(3, 2, 8, dim), draw(3, 2, 2, dim), draw(3, 2, 2, dim)
        options = {name: t.clone() for name, t in options.items()}
        kept.append((q, k, v, options))  # so that addresses differ
        given = dict(zip(("rotary_cos", "rotary_sin"), tables)) if extra == "rotary" else {}
        given["backend"] = backend
        out, lse = tilewise.attention_with_cache(q, cache, k, v, **given, **options, return_lse=True)
        if extra == "rotary":
            first = torch.tensor([len(own) for own in keys], device="cuda")
            at = first[:, None] + torch.arange(2, device="cuda")
            q, k = (tilewise.rotary.apply_rotary(x, *(t[at] for t in tables)) for x in (q, k))
        keys, values = (
            [torch.cat([old, x[b]]) for b, old in enumerate(own)] for own, x in ((keys, k), (values, v))
        )
        check_rows(out, lse, q, keys, values, **options)
    assert len(made()) == 1


@needs_hopper
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "pages"])
def test_repeated_calls_of_flash_attn(is_paged, made):
    from tilewise.flash_attn import flash_attn_with_kvcache

    for _ in range(4):
        q, lengths = draw(3, 4, 8, 128), torch.randint(0, 1025, (3,), dtype=torch.int32, device="cuda")
        shape = (3 * 16, 64) if is_paged else (5, 1024)
        key, value = draw(*shape, 2, 128), draw(*shape, 2, 128)
        table = torch.randperm(48, device="cuda").view(3, 16).int() if is_paged else None
        whole = [t[table.long()].flatten(1, 2) if is_paged else t for t in (key, value)]
        own = [[t[b, :length] for b, length in enumerate(lengths.tolist())] for t in whole]
        for t in whole if not is_paged else ():
            for b, length in enumerate(lengths.tolist()):
                t[b, length:] = torch.nan
        out, lse, *_ = flash_attn_with_kvcache(
            q, key, value, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True
        )
        check_rows(out, lse.masked_fill(lse == torch.inf, -torch.inf), q, *own)
    assert len(made()) == 1


@needs_hopper
def test_repeated_latent_decoding(made):
    for n in (300, 1000, 4000):
        cache = tilewise.KVCache(
            2, 4096, 1, 576, head_dim_v=512, dtype=torch.bfloat16, device="cuda", value_in_key=True
        )
        k = draw(2, n, 1, 576)
        cache.append(k)
        q = draw(2, 1, 16, 576)
        out, lse = tilewise.attention_with_cache(q, cache, return_lse=True)
        check_rows(out, lse, q, k, k[..., :512])
    assert len(made()) == 1


@needs_hopper
def test_a_refused_repeated_step_leaves_the_cache(made):
    cache = tilewise.KVCache(1, 300, 2, 64, dtype=torch.bfloat16, device="cuda")
    cache.append(draw(1, 298, 2, 64), draw(1, 298, 2, 64))
    step = [draw(1, 1, 8, 64), cache, draw(1, 1, 2, 64), draw(1, 1, 2, 64)]
    for _ in range(2):
        tilewise.attention_with_cache(*step)
    before = cache.key.clone(), cache.value.clone()
    with pytest.raises(ValueError, match="do not fit"):
        tilewise.attention_with_cache(*step)
    assert cache.lengths.tolist() == [300] and len(made()) == 1
    assert torch.equal(cache.key, before[0]) and torch.equal(cache.value, before[1])
    query = step[0].clone().requires_grad_()  # takes the whole path
    for _ in range(2):
        out = tilewise.attention_with_cache(query, cache)
        (grad,) = torch.autograd.grad(out.float().square().sum(), query)
        assert grad.abs().max() > 0 and torch.isfinite(grad).all()


@needs_hopper
def test_a_graph_of_a_repeated_step(made):
    cache = tilewise.KVCache(2, 600, 2, 128, dtype=torch.bfloat16, device="cuda")
    keys, values = draw(2, 300, 2, 128), draw(2, 300, 2, 128)
    cache.append(keys, values)
    q, k, v = draw(2, 1, 8, 128), draw(2, 1, 2, 128), draw(2, 1, 2, 128)

    def step():
        return tilewise.attention_with_cache(q, cache, k, v, return_lse=True)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
            keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
    torch.cuda.current_stream().wait_stream(stream)
    assert len(made()) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    assert len(made()) == 1
    for _ in range(3):
        for t in (q, k, v):
            t.copy_(draw(*t.shape))
        graph.replay()
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
        check_rows(out, lse, q, keys, values)


@needs_hopper
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_repeated_calls_of_few_queries(layout):
    plans.clear()
    order = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    for _ in range(4):
        q, k, v = draw(2, 3, 8, 128), draw(2, 2000, 2, 128), draw(2, 2000, 2, 64)
        given = [t.permute(order) for t in (q, k, v)]
        check(tilewise.attention(*given, causal=True, layout=layout).permute(order), q, k, v, causal=True)
        check_attention(q, k, v, causal=True)


TENSORS = {"hopper": ("query", "key", "value", "sinks")}
TENSORS["triton"] = (*TENSORS["hopper"], "mask", "bias", "alibi_slopes")


@pytest.mark.parametrize(
    ("backend", "tensor"), [(backend, tensor) for backend in TENSORS for tensor in TENSORS[backend]]
)
def test_what_was_called_before_does_not_matter(run_script, backend, tensor):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    *wrong, count = run_script("signature_pairs.py", backend, tensor)
    assert not wrong, "\n".join(wrong)
    assert int(count.split()[0]) > 10


def test_a_thread_that_has_made_no_other_cuda_call(backend):
    """The plan is another thread's; the addresses are new."""
    given = [qkv() for _ in range(4)]
    results = [tilewise.attention(*given[0], causal=True, backend=backend)]

    def run(tensors):
        results.append(tilewise.attention(*tensors, causal=True, backend=backend))

    for tensors in given[1:]:
        thread = threading.Thread(target=run, args=(tensors,))
        thread.start()
        thread.join()
    for out, tensors in zip(results, given, strict=True):
        check(out, *tensors, causal=True)
