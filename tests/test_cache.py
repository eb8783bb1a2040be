"""The contiguous cache: chunks give what the whole sequence gives."""

import copy
import io
import pickle

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.autograd import functions as autograd
from tilewise.core.problem import Inputs, Options
from tilewise.testing import compare


@pytest.mark.parametrize("chunks", [[9], [4, 5], [1] * 9, [6, 1, 1, 1]])
@pytest.mark.parametrize("options", [{}, {"window": (3, None)}, {"softcap": 2.0}, {"sinks": torch.randn(4)}])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_prefill_chunks_and_decoding_equal_one_causal_call(chunks, options, layout):
    q, k, v = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 5)
    exact, exact_lse = reference.attention(q, k, v, causal=True, **options)
    base, base_lse = reference.attention(q, k, v, causal=True, dtype=torch.float32, **options)
    cache = tilewise.KVCache(2, 16, 2, 8, head_dim_v=5, dtype=torch.float32)
    outs, lses = [], []
    for q_chunk, k_chunk, v_chunk in zip(*(t.split(chunks, 1) for t in (q, k, v))):
        parts = (q_chunk, k_chunk, v_chunk)
        if layout == "bhsd":
            parts = tuple(t.transpose(1, 2) for t in parts)
        out, lse = tilewise.attention_with_cache(
            parts[0], cache, *parts[1:], layout=layout, return_lse=True, **options
        )
        outs.append(out if layout == "bshd" else out.transpose(1, 2))
        lses.append(lse)
    assert cache.lengths.tolist() == [9, 9]
    assert compare("out", torch.cat(outs, 1), exact, base).is_within
    assert compare("lse", torch.cat(lses, 2), exact_lse, base_lse).is_within


def test_sequences_of_different_lengths():
    cache = tilewise.KVCache(3, 12, 1, 4, dtype=torch.float64)
    k, v = torch.randn(3, 12, 1, 4, dtype=torch.float64), torch.randn(3, 12, 1, 4, dtype=torch.float64)
    cache.append(k[:, :7], v[:, :7])
    cache.lengths.copy_(torch.tensor([7, 0, 4]))
    q, new_k, new_v = (torch.randn(3, 2, 1, 4, dtype=torch.float64) for _ in range(3))
    out = tilewise.attention_with_cache(q, cache, new_k, new_v)
    assert cache.lengths.tolist() == [9, 2, 6]
    for n, held in enumerate([7, 0, 4]):
        own_k, own_v = (
            torch.cat([k[n : n + 1, :held], new_k[n : n + 1]], 1),
            torch.cat([v[n : n + 1, :held], new_v[n : n + 1]], 1),
        )
        exact, _ = reference.attention(q[n : n + 1], own_k, own_v, causal=True)
        torch.testing.assert_close(out[n : n + 1], exact)


def test_attending_without_appending_and_without_causal():
    cache = tilewise.KVCache(1, 8, 2, 4, dtype=torch.float32)
    k = torch.randn(1, 5, 2, 4)
    cache.append(k, k)
    q = torch.randn(1, 3, 2, 4)
    exact, _ = reference.attention(q, k, k)
    torch.testing.assert_close(
        tilewise.attention_with_cache(q, cache, causal=False).double(), exact, rtol=1e-5, atol=1e-6
    )
    assert cache.lengths.tolist() == [5]


@pytest.mark.parametrize("is_paged", [False, True])
def test_queries_before_the_new_keys_are_refused(is_paged):
    q, k = torch.randn(1, 9, 2, 8), torch.randn(1, 5, 2, 8)
    kind = tilewise.PagedKVCache if is_paged else tilewise.KVCache
    cache = kind(*((4, 16) if is_paged else (1, 16)), 2, 8, dtype=torch.float32)
    if is_paged:
        cache.allocate()
    message = r"query.shape\[1\]=9 must be at most key.shape\[1\]=5, the new tokens"
    with pytest.raises(ValueError, match=message):
        tilewise.attention_with_cache(q, cache, k, k)
    assert tilewise.attention_with_cache(q[:, :2], cache, k, k).shape == (1, 2, 2, 8)


def test_an_empty_cache_sees_nothing():
    cache = tilewise.KVCache(1, 8, 2, 4, dtype=torch.float32)
    out, lse = tilewise.attention_with_cache(torch.randn(1, 1, 2, 4), cache, return_lse=True)
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_memory_and_reset():
    cache = tilewise.KVCache(2, 16, 3, 8, head_dim_v=4, dtype=torch.bfloat16)
    assert cache.memory_bytes() == 2 * 16 * 3 * (8 + 4) * 2
    cache.append(torch.ones(2, 5, 3, 8, dtype=torch.bfloat16), torch.ones(2, 5, 3, 4, dtype=torch.bfloat16))
    storage = cache.key.data_ptr()
    cache.reset()
    assert cache.lengths.tolist() == [0, 0] and cache.key.data_ptr() == storage


def test_gradients_reach_the_query():
    cache = tilewise.KVCache(1, 8, 1, 4, dtype=torch.float64)
    k = torch.randn(1, 4, 1, 4, dtype=torch.float64)
    q = torch.randn(1, 2, 1, 4, dtype=torch.float64, requires_grad=True)
    out = tilewise.attention_with_cache(q, cache, k, k)
    dout = torch.randn_like(out)
    expected = reference.attention_backward(dout, q, k, k, causal=True).query
    torch.testing.assert_close(torch.autograd.grad(out, q, dout)[0], expected)


def test_left_padding_alone_and_paged_gradients():
    """Each sequence's keys lie in pages, some shared; gradients of shared pages add up."""
    k, v = torch.randn(4, 3, 2, 3, dtype=torch.float64), torch.randn(4, 3, 2, 2, dtype=torch.float64)
    q = torch.randn(2, 2, 4, 3, dtype=torch.float64)
    table, lengths = torch.tensor([[2, 0, 1], [2, 3, 3]]), torch.tensor([8, 5])
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def paged(q, k, v):
        inputs = Inputs(q, k, v, page_table=table, seqlens_k=lengths)
        return autograd.attention(inputs, Options(causal=True, softcap=2.0), None)[0]

    def gathered(q, k, v):
        rows = []
        for n in range(2):
            own = [t[table[n]].flatten(0, 1)[None, : lengths[n]] for t in (k, v)]
            rows.append(tilewise.attention(q[n : n + 1], *own, causal=True, softcap=2.0))
        return torch.cat(rows)

    torch.testing.assert_close(paged(*leaves), gathered(*leaves))
    dout = torch.randn(2, 2, 4, 2, dtype=torch.float64)
    for found, exact in zip(
        torch.autograd.grad(paged(*leaves), leaves, dout),
        torch.autograd.grad(gathered(*leaves), leaves, dout),
    ):
        torch.testing.assert_close(found, exact)
    assert torch.autograd.gradgradcheck(paged, leaves)

    x = torch.randn(2, 6, 2, 4)
    inputs = Inputs(x, x, x, seqlens_k=torch.tensor([6, 6]), leftpad_k=torch.tensor([0, 4]))
    out, _ = autograd.attention(inputs, Options(), None)
    exact, _ = reference.attention(x[1:], x[1:, 4:], x[1:, 4:])
    torch.testing.assert_close(out[1:].double(), exact, rtol=1e-5, atol=1e-6)


def check_continues(cache, held, x):
    """What a step appends lands behind the tokens held, and is seen."""
    lengths = [n + x.shape[1] for n in held]
    out = tilewise.attention_with_cache(x, cache, x, None if cache.value_in_key else x)
    assert out.shape == (*x.shape[:3], cache.value.shape[-1])
    for n, (start, end) in enumerate(zip(held, lengths)):
        for rows in (cache.key, cache.value):
            assert torch.equal(rows[n, start:end], x[n, ..., : rows.shape[-1]])
        assert not cache.key[n, end:].any()
    assert cache.lengths.tolist() == lengths


def test_a_cache_copied_or_given_lengths_in_inference_mode():
    x = torch.randn(2, 3, 2, 4)
    cache = tilewise.KVCache(2, 8, 2, 4, dtype=torch.float32)
    pages = tilewise.PagedKVCache(4, 16, 2, 4, dtype=torch.float32)
    with torch.inference_mode():
        cache, pages = copy.deepcopy(cache), pickle.loads(pickle.dumps(pages))
        cache.lengths = torch.tensor([0, 0], dtype=torch.int32)
    check_continues(cache, [0, 0], x)
    pages.append(x[:1], x[:1], [pages.allocate()])
    assert torch.equal(pages.gather(0)[1], x[0])


@pytest.mark.parametrize("value_in_key", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_cache_made_in_inference_mode(value_in_key, where):
    x = torch.randn(2, 3, 2, 4)
    with torch.inference_mode():
        cache = tilewise.KVCache(2, 8, 2, 4, value_in_key=value_in_key, dtype=torch.float32)
        pages = tilewise.PagedKVCache(4, 16, 2, 4, value_in_key=value_in_key, dtype=torch.float32)
        check_continues(cache, [0, 0], x)
    with torch.inference_mode(where == "inside"):
        check_continues(cache, [3, 3], x)
        pages.append(x[:1], None if value_in_key else x[:1], [pages.allocate()])
        assert torch.equal(pages.gather(0)[1], x[0])


def test_lengths_that_the_caller_replaces_or_changes():
    x = torch.randn(2, 1, 2, 4)
    cache = tilewise.KVCache(2, 8, 2, 4, dtype=torch.float32)
    cache.lengths = torch.tensor([5, 3], dtype=torch.int32)
    check_continues(cache, [5, 3], x)
    cache.key.zero_()
    cache.lengths -= 2
    check_continues(cache, [4, 2], x)
    cache.key.zero_()
    cache.lengths = torch.tensor(5, dtype=torch.int32).expand(2)  # which can't be counted in place
    check_continues(cache, [5, 5], x)
    cache.key.zero_()
    other, lengths = tilewise.KVCache(2, 8, 2, 4, dtype=torch.float32), torch.tensor([1, 2])
    cache.lengths = other.lengths = lengths  # as of two layers, which both count
    other.append(x, x)
    check_continues(cache, [1, 2], x)
    cache.key.zero_()
    assert lengths.tolist() == [1, 2] and "lengths=[2, 3]" in repr(other)
    with torch.inference_mode():
        cache.lengths = torch.tensor([1, 6], dtype=torch.int32)
        check_continues(cache, [1, 6], x)
        cache.key.zero_()
        cache.lengths.fill_(2)
        check_continues(cache, [2, 2], x)


@pytest.mark.parametrize(
    ("lengths", "error", "match"),
    [
        ([1, 2], TypeError, "lengths of list"),
        (torch.tensor([1.0, 2.0]), TypeError, "lengths of torch.float32"),
        (torch.tensor([3]), ValueError, r"lengths.shape=\(1,\) must be \(batch,\)=\(2,\)"),
        (torch.tensor(3), ValueError, r"lengths.shape=\(\)"),
        (torch.tensor([1, 2], device="meta"), ValueError, "lengths.device=meta"),
    ],
)
def test_lengths_that_are_none(lengths, error, match):
    cache = tilewise.KVCache(2, 8, 2, 4, dtype=torch.float32)
    with pytest.raises(error, match=match):
        cache.lengths = lengths
    check_continues(cache, [0, 0], torch.randn(2, 1, 2, 4))


def by_torch_save(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("value_in_key", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_torch_save, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_are_caches_of_their_own(duplicate, value_in_key):
    x, token = torch.randn(2, 5, 2, 4), torch.randn(2, 1, 2, 4)
    cache = tilewise.KVCache(2, 8, 2, 4, head_dim_v=3, value_in_key=value_in_key, dtype=torch.float32)
    pages = tilewise.PagedKVCache(4, 16, 2, 4, head_dim_v=3, value_in_key=value_in_key, dtype=torch.float32)
    value = None if value_in_key else x[..., :3]
    cache.append(x, value)
    pages.append(x[:1], None if value_in_key else value[:1], [pages.allocate()])
    own = duplicate(cache)
    own.lengths.fill_(2)  # roll back, as after one append: no more changes than the original has seen
    own.append(token, None if value_in_key else token[..., :3])
    assert own.lengths.tolist() == [3, 3] and cache.lengths.tolist() == [5, 5]
    assert torch.equal(own.key[:, 2:3], token) and torch.equal(own.value[:, 2:3], token[..., :3])
    assert torch.equal(cache.key[:, :5], x) and torch.equal(cache.value[:, :5], x[..., :3])
    other = duplicate(pages)
    other.append(token[:1], None if value_in_key else token[:1, ..., :3], [0])
    assert (other.length(0), pages.length(0)) == (6, 5)
    assert torch.equal(other.gather(0)[1][5:], token[0, ..., :3])


def test_reprs():
    cache = tilewise.KVCache(2, 16, 4, 8, dtype=torch.float32)
    cache.append(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, 8))
    sizes = "num_kv_heads=4, head_dim=8, dtype=torch.float32, device='cpu'"
    assert repr(cache) == f"KVCache(batch=2, max_seqlen=16, {sizes}): lengths=[3, 3]"
    paged = tilewise.PagedKVCache(5, 16, 4, 8, head_dim_v=6, dtype=torch.float32)
    paged.reserve([paged.allocate()], [20])
    sizes = sizes.replace("head_dim=8", "head_dim=8, head_dim_v=6")
    assert repr(paged) == f"PagedKVCache(num_pages=5, page_size=16, {sizes}): sequences=[0], free_pages=3"
