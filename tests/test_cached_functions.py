"""Mask and score functions with caches: a step says what the whole sequence says."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.flex_attention import create_block_mask

HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 8, 60
BACKENDS = ("tiled", "llvm")


def functions():
    documents = (torch.rand(LENGTH) < 1 / 15).cumsum(0)
    slopes = torch.rand(HEADS, dtype=torch.double)

    def mask_mod(b, h, i, j):
        return (documents[i] == documents[j]) & ((i - j) % (b + 2) != 1)

    def score_mod(s, b, h, i, j):
        return torch.tanh(s) - slopes[h] * (i - j)

    return {"mask_mod": mask_mod, "score_mod": score_mod}


def sequences(batch):
    return [
        torch.randn(batch, LENGTH, heads, DIM, dtype=torch.double) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def close(found, exact):
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_chunks_and_decoding(backend):
    """Also through a block mask, which is longer than the cache's sequences."""
    (q, k, v), options = sequences(2), functions()
    out, lse = reference.attention(q, k, v, causal=True, **options)
    long = create_block_mask(lambda b, h, i, j: i // 7 != j // 9, None, None, 99, 99, device="cpu")
    own, score_mod = options["mask_mod"], options["score_mod"]
    both = lambda b, h, i, j: own(b, h, i, j) & (i // 7 != j // 9)  # noqa: E731
    blocked = reference.attention(q, k, v, causal=True, mask_mod=both, score_mod=score_mod)[0]
    cache = tilewise.KVCache(2, LENGTH + 5, KV_HEADS, DIM, dtype=torch.double)
    start = 0
    for n in (20, 1, 3, 1, 35):
        new = slice(start, start + n)
        found = tilewise.attention_with_cache(
            q[:, new], cache, k[:, new], v[:, new], return_lse=True, backend=backend, **options
        )
        close(found[0], out[:, new])
        close(found[1], lse[:, :, new])
        again = tilewise.attention_with_cache(q[:, new], cache, block_mask=long, backend=backend, **options)
        close(again, blocked[:, new])
        start += n


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_queries_than_a_sequence_has_tokens(backend):
    """Its last query is aligned with its last token; those before its first one see nothing."""
    cache = tilewise.KVCache(2, 8, 1, DIM, dtype=torch.double)
    cache.append(*(torch.randn(2, 6, 1, DIM, dtype=torch.double) for _ in range(2)))
    cache.lengths = torch.tensor([6, 2], dtype=torch.int32)
    q = torch.randn(2, 4, 1, DIM, dtype=torch.double)
    option = tilewise.attention_with_cache(q, cache, window=(0, 0), backend=backend)
    mask_mod = lambda b, h, i, j: i == j  # noqa: E731
    found = tilewise.attention_with_cache(q, cache, mask_mod=mask_mod, backend=backend)
    close(found[0], option[0])
    close(found[1, 2:], option[1, 2:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_of_sequences_of_several_lengths(backend):
    """Packed, in an order that is not that of the pages; then one token of each, unpacked."""
    (q, k, v), options = sequences(2), functions()
    out = reference.attention(q, k, v, causal=True, **options)[0]
    cache = tilewise.PagedKVCache(16, 16, KV_HEADS, DIM, dtype=torch.double)
    names = [cache.allocate() for _ in range(2)]
    at = [0, 0]
    for new in ([20, 0], [1, 30], [1, 1], [17, 8]):
        step = cache.reserve(names, new)
        rows = [slice(a, a + n) for a, n in zip(at, new)]
        tokens = [torch.cat([t[n, r] for n, r in enumerate(rows)]) for t in (q, k, v)]
        found = tilewise.attention_with_cache(
            tokens[0], cache, *tokens[1:], batch=step, backend=backend, **options
        )
        close(found, torch.cat([out[n, r] for n, r in enumerate(rows)]))
        at = [r.stop for r in rows]
    assert at == [39, 39]
    found = tilewise.attention_with_cache(
        q[:, 39:40], cache, k[:, 39:40], v[:, 39:40], batch=names, backend=backend, **options
    )
    close(found, out[:, 39:40])


def test_gradients_of_query_and_captured_tensors():
    q, k, v = (t[:1] for t in sequences(1))
    slopes = torch.rand(HEADS, dtype=torch.double, requires_grad=True)
    options = {"score_mod": lambda s, b, h, i, j: s * torch.cos(slopes[h] * (i - j))}
    cache = tilewise.KVCache(1, LENGTH, KV_HEADS, DIM, dtype=torch.double)
    cache.append(k, v)
    query = q[:, -3:].clone().requires_grad_()
    out = tilewise.attention_with_cache(query, cache, **options)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (query, slopes), dout)
    whole = torch.cat([torch.zeros_like(q[:, :-3]), dout], 1)
    with torch.no_grad():
        exact = reference.attention_backward(whole, q, k, v, causal=True, captured=(slopes,), **options)
    close(found[0], exact.query[:, -3:])
    close(found[1], exact.captured[0])


def test_statistics_and_explain():
    (q, k, v), options = sequences(1), functions()
    cache = tilewise.KVCache(1, LENGTH, KV_HEADS, DIM, dtype=torch.double)
    cache.append(k, v)
    aux = tilewise.Aux(entropy=True, row_max=True)
    found = tilewise.attention_statistics(q[:, -2:], cache, aux, causal=True, **options)
    exact = reference.attention_statistics(q, k, aux, causal=True, **options)
    close(found.entropy, exact.entropy[:, :, -2:])
    close(found.row_max, exact.row_max[:, :, -2:])
    explained = tilewise.explain(q[:, -2:], cache, **options)
    assert explained.backend == "llvm" and explained.problem.functions is not None


def test_a_refused_step_changes_nothing():
    """An index that never fits, and a block mask that is too short, are told before a token is stored."""
    q, k, v = (t[:, :9] for t in sequences(1))
    short = create_block_mask(lambda b, h, i, j: j <= i, None, None, 8, 8, device="cpu")
    contiguous = tilewise.KVCache(1, LENGTH, KV_HEADS, DIM, dtype=torch.double)
    paged = tilewise.PagedKVCache(4, 16, KV_HEADS, DIM, dtype=torch.double)
    paged.allocate()
    for cache in (contiguous, paged):
        before = cache.key.clone()
        with pytest.raises(ValueError, match=r"block_mask is of lengths \(8, 8\), .* at least \(9, 9\)"):
            tilewise.attention_with_cache(q, cache, k, v, block_mask=short)
        with pytest.raises(IndexError, match=r"must be .* less than 3 \(line .*test_cached_functions.py"):
            tilewise.attention_with_cache(
                q, cache, k, v, mask_mod=lambda b, h, i, j: torch.ones(3)[i + 3] > 0
            )
        assert torch.equal(cache.key, before)
    assert contiguous.lengths.tolist() == [0] and paged.length(paged.sequences[0]) == 0
    with pytest.raises(
        IndexError, match=r"index [3-8] in dimension 0 .* is out of range \(line .*torch.ones"
    ):
        tilewise.attention_with_cache(
            q, contiguous, k, v, mask_mod=lambda b, h, i, j: torch.ones(3)[i] > 0
        )  # fmt: skip


@pytest.mark.parametrize("is_paged", [False, True], ids=["contiguous", "paged"])
def test_an_index_out_of_range_leaves_the_cache_as_it_was(is_paged):
    """Which only the run finds, when the new tokens have been written."""
    x, table = torch.randn(1, 3, 1, 4), torch.zeros(5)
    if is_paged:
        cache = tilewise.PagedKVCache(2, 16, 1, 4, dtype=torch.float32)
        cache.append(x, x, [cache.allocate()])
    else:
        cache = tilewise.KVCache(1, 8, 1, 4, dtype=torch.float32)
        cache.append(x, x)
    with pytest.raises(IndexError, match="index 5 in dimension 0"):
        tilewise.attention_with_cache(x, cache, x, x, score_mod=lambda s, b, h, i, j: s + table[j])
    assert (cache.length(0) if is_paged else cache.lengths.tolist()) == (3 if is_paged else [3])
    found = tilewise.attention_with_cache(x, cache, x, x)
    both = torch.cat([x, x], 1)
    torch.testing.assert_close(found, tilewise.attention(x, both, both, causal=True))
