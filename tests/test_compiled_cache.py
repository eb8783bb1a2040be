"""Steps of a cache in compiled code: one graph, no matter how many tokens the cache holds."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tilewise
from tilewise import flash_attn, flash_attn_3
from tilewise.rotary import rotary_tables

STEPS = (5, 1, 1, 1, 3, 1, 1, 1, 1)
COS, SIN = rotary_tables(torch.arange(64), 8)


def compile_whole(function):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def step(new_tokens):
    return [torch.randn(2, new_tokens, heads, 8) for heads in (4, 2, 2)]


@pytest.fixture(autouse=True)
def _no_earlier_graphs():
    torch._dynamo.reset()


@pytest.mark.parametrize("aux", [None, tilewise.Aux(entropy=True, column_sum=True, max_logit=True)])
@pytest.mark.parametrize("is_paged", [False, True])
@torch.no_grad()
def test_attention_with_cache(is_paged, aux):
    def call(cache, batch, q, k, v):
        out, lse, *found = tilewise.attention_with_cache(
            q, cache, k, v, batch=batch, rotary_cos=COS, rotary_sin=SIN, return_lse=True, return_aux=aux
        )
        return [out, lse, *(getattr(a, name) for a in found for name in aux.names)]

    if is_paged:
        caches = [tilewise.PagedKVCache(8, 16, 2, 8, dtype=torch.float32) for _ in range(2)]
        for cache in caches:
            cache.allocate(), cache.allocate()
    else:
        caches = [tilewise.KVCache(2, 32, 2, 8, dtype=torch.float32) for _ in range(2)]
    compiled, counter = compile_whole(call)
    for new_tokens in STEPS:
        tensors = step(new_tokens)
        found, exact = (
            function(cache, cache.reserve(None, new_tokens) if is_paged else None, *tensors)
            for function, cache in zip((compiled, call), caches)
        )
        torch.testing.assert_close(found, exact)
    assert counter.frame_count <= 3  # the first shape, one token, any number of them
    assert torch.equal(caches[0].key, caches[1].key) and torch.equal(caches[0].value, caches[1].value)
    if not is_paged:
        assert caches[0].lengths.tolist() == [sum(STEPS)] * 2
        tensors = step(1)
        torch.testing.assert_close(*(call(cache, None, *tensors) for cache in caches))


@torch.no_grad()
def test_statistics_where_a_function_breaks_the_graph():
    def call(cache, q, k, v):
        out, found = tilewise.attention_with_cache(
            q, cache, k, v, score_mod=lambda s, b, h, i, j: 2 * s, return_aux=tilewise.Aux(entropy=True)
        )
        return out, found.entropy

    caches = [tilewise.KVCache(2, 32, 2, 8, dtype=torch.float32) for _ in range(2)]
    compiled = torch.compile(call, backend="eager")
    for new_tokens in STEPS[:3]:
        tensors = step(new_tokens)
        torch.testing.assert_close(compiled(caches[0], *tensors), call(caches[1], *tensors))


@pytest.mark.parametrize("is_copied", [False, True])
def test_storage_is_static_as_pytorch_marks_it(is_copied):
    """Else mode="reduce-overhead" captures no graph that writes to it."""
    caches = [
        tilewise.KVCache(2, 32, 2, 8, dtype=torch.float32),
        tilewise.KVCache(2, 32, 2, 8, head_dim_v=4, dtype=torch.float32, value_in_key=True),
        tilewise.PagedKVCache(8, 16, 2, 8, dtype=torch.float32),
        tilewise.PagedKVCache(8, 16, 2, 8, dtype=torch.float8_e4m3fn),
    ]
    if is_copied:
        caches = copy.deepcopy(caches)
    marked = torch.zeros(1)
    torch._dynamo.mark_static_address(marked, guard=False)
    for cache in caches:
        written = [t for t in vars(cache).values() if isinstance(t, torch.Tensor)]
        assert len(written) >= 2
        assert all(vars(t).items() >= vars(marked).items() for t in written)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("version", "kind"), [(2, "contiguous"), (2, "batch_idx"), (3, "paged")])
def test_flash_attn_with_kvcache(version, kind):
    face = flash_attn if version == 2 else flash_attn_3
    extra = {
        "contiguous": {},
        "batch_idx": {"cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32)},
        "paged": {"page_table": torch.tensor([[0, 2], [3, 1]])},
    }[kind]

    def call(q, k, v, k_cache, v_cache, held):
        return face.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=COS,
            rotary_sin=SIN,
            cache_seqlens=held,
            causal=True,
            **extra,
        )

    caches = [torch.randn(4, 16, 2, 8) for _ in range(2)]
    others = [t.clone() for t in caches]
    compiled, counter = compile_whole(call)
    held = torch.tensor([3, 0], dtype=torch.int32)
    for new_tokens in STEPS[:6]:
        tensors = step(new_tokens)
        torch.testing.assert_close(compiled(*tensors, *caches, held), call(*tensors, *others, held))
        held = held + new_tokens
    assert all(torch.equal(a, b) for a, b in zip(caches, others))
    assert counter.frame_count <= 3


@torch.no_grad()
def test_one_graph_serves_all_batches():
    compiled, counter = compile_whole(flash_attn.flash_attn_with_kvcache)
    for batch in (2, 3, 5, 8):
        q, k, v = (torch.randn(batch, 1, heads, 8) for heads in (4, 2, 2))
        cache, lengths = torch.randn(2, batch, 16, 2, 8), torch.arange(batch, dtype=torch.int32)
        found, expected = (
            call(q, *kept, k, v, cache_seqlens=lengths)
            for call, kept in ((compiled, cache.clone()), (flash_attn.flash_attn_with_kvcache, cache))
        )
        torch.testing.assert_close(found, expected)
    assert counter.frame_count == 2  # the second is for all that follow


def test_a_layer_with_its_cache():
    layer = tilewise.nn.FlashAttention(16, 2, causal=True, rope=1e4).eval()
    caches = [layer.new_cache(2, 16) for _ in range(2)]
    compiled, counter = compile_whole(layer)
    with torch.no_grad():
        for new_tokens in (4, 1, 1, 1):
            x = torch.randn(2, new_tokens, 16)
            torch.testing.assert_close(compiled(x, caches[0]), layer(x, caches[1]))
    assert counter.frame_count <= 3


@torch.no_grad()
def test_reset_in_a_graph():
    """Sequences begin again; the host reads their lengths where it knew them."""

    def begin(cache, q, k, v):
        cache.reset()
        return tilewise.attention_with_cache(q, cache, k, v)

    caches = [tilewise.KVCache(2, 32, 2, 8, dtype=torch.float32) for _ in range(2)]
    compiled, _ = compile_whole(begin)
    for new_tokens in (5, 3, 1):
        tensors = step(new_tokens)
        torch.testing.assert_close(*(f(cache, *tensors) for f, cache in zip((begin, compiled), caches)))
        assert caches[1].held() == caches[1].lengths.tolist() == [new_tokens] * 2


@torch.no_grad()
def test_one_graph_resets_caches_of_all_batches():
    compiled, counter = compile_whole(tilewise.KVCache.reset)
    for batch in (2, 3, 5, 8):
        cache = tilewise.KVCache(batch, 4, 2, 8, dtype=torch.float32)
        cache.append(torch.ones(batch, 1, 2, 8), torch.ones(batch, 1, 2, 8))
        compiled(cache)
        assert cache.held() == [0] * batch
    assert counter.frame_count == 2


@pytest.fixture
def _another_thread_compiles():
    """From PyTorch 2.13 on `torch.compiler.is_compiling()` is True then, in this thread too."""
    has_begun, may_end = threading.Event(), threading.Event()

    def wait(graph, _):
        has_begun.set()
        assert may_end.wait(60)
        return graph.forward

    with ThreadPoolExecutor() as threads:
        compiled = threads.submit(torch.compile(torch.sin, backend=wait), torch.ones(1))
        assert has_begun.wait(60)
        yield
        may_end.set()
        compiled.result()


@pytest.mark.usefixtures("_another_thread_compiles")
@torch.no_grad()
def test_eager_calls_check_while_another_thread_compiles():
    cache = tilewise.KVCache(2, 6, 2, 8, dtype=torch.float32)
    tilewise.attention_with_cache(step(5)[0], cache, *step(5)[1:])
    key, (q, k, v) = cache.key.clone(), step(2)
    with pytest.raises(ValueError, match="2 new tokens do not fit"):
        tilewise.attention_with_cache(q, cache, k, v)
    torch.testing.assert_close(cache.key, key)

    k_cache = key.clone()
    with pytest.raises(ValueError, match="cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, k_cache, k, v, cache_seqlens=5)
    torch.testing.assert_close(k_cache, key)

    pages = tilewise.PagedKVCache(8, 16, 2, 8, dtype=torch.float32)
    batch = pages.reserve([pages.allocate(), pages.allocate()], [2, 2])
    pages.free(0)
    with pytest.raises(ValueError, match="out of date"):
        tilewise.attention_with_cache(q, pages, k, v, batch=batch)
