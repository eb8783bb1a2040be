"""`flash_attn_with_kvcache` of both generations against one sequence at a time by the float64 reference."""

import numpy as np
import pytest
import torch

import tilewise
from tilewise import flash_attn_3, reference
from tilewise.cache.rotary import apply_rotary
from tilewise.flash_attn import flash_attn_func, flash_attn_with_kvcache

INF = float("inf")


def randn(*shape, grad=False):
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def rotate(x, cos, sin, positions, interleaved):
    """x (tokens, heads, dim) turned by complex multiplication."""
    pairs = cos.shape[1]
    z = torch.complex(cos, sin)[positions][:, None]
    out = x.clone()
    if interleaved:
        turned = torch.view_as_complex(x[..., : 2 * pairs].unflatten(-1, (-1, 2)).contiguous()) * z
        out[..., : 2 * pairs] = torch.view_as_real(turned).flatten(-2)
    else:
        turned = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * z
        out[..., :pairs], out[..., pairs : 2 * pairs] = turned.real, turned.imag
    return out


def cached_attention(
    q, rows, k_cache, v_cache, k=None, v=None, *, held, leftpad=None, rotary=None, interleaved=True,
    rotary_starts=None, alibi_slopes=None, **options,
):  # fmt: skip
    """Update the caches in place; return each sequence's (out, lse).

    Args:
        q, k, v: lists with one (tokens, heads, dim) tensor a sequence.
        rows: for each sequence, the (page, row) of every position of its cache.
        held: tokens in each sequence's cache before the call.
        options: those of the reference.
    """
    results = []
    local = options.get("causal") or options.get("window") not in (None, (None, None))
    for b, (query, place) in enumerate(zip(q, rows)):
        new = 0 if k is None else len(k[b])
        start = held[b] if rotary_starts is None else rotary_starts[b]
        for t in range(new):
            key = k[b][t : t + 1]
            if rotary is not None:
                key = rotate(key, *rotary, torch.tensor([start + t]), interleaved)
            k_cache[place[held[b] + t]] = key[0]
            v_cache[place[held[b] + t]] = v[b][t]
        if rotary is not None:
            steps = torch.arange(len(query)) if local else torch.zeros(len(query), dtype=torch.int64)
            query = rotate(query, *rotary, start + steps, interleaved)
        used = place[0 if leftpad is None else leftpad[b] : held[b] + new]
        keys = torch.stack([k_cache[p] for p in used]) if used else k_cache.new_empty(0, *k_cache.shape[2:])
        values = torch.stack([v_cache[p] for p in used]) if used else v_cache.new_empty(0, *v_cache.shape[2:])
        slopes = (
            alibi_slopes[b : b + 1] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        )
        out, lse = reference.attention(query[None], keys[None], values[None], alibi_slopes=slopes, **options)
        results.append((out[0], lse[0]))
    return results


def page_rows(table, page_size):
    """The (page, row) of every position, for each sequence of a page table."""
    return [[(int(page), row) for page in pages for row in range(page_size)] for pages in table]


def caches(shape):
    return randn(*shape), randn(*shape)


def check_cache_call(q, k_cache, v_cache, k, v, rows, held, expected, **options):
    """out, lse and the updated caches against the oracle."""
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    results = cached_attention(
        list(q), rows, expected_k, expected_v, None if k is None else list(k), None if v is None else list(v),
        held=held, **expected,
    )  # fmt: skip
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, return_softmax_lse=True, **options)
    assert torch.equal(v_cache, expected_v)
    torch.testing.assert_close(k_cache, expected_k, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out, torch.stack([o for o, _ in results]))
    expected_lse = torch.stack([l for _, l in results])
    torch.testing.assert_close(lse, expected_lse.masked_fill(expected_lse == -INF, INF))


MASKS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (3, 1)}, {"window": (3, 1)}),
    (
        {"causal": True, "window_size": (2, -1), "softcap": 3.0},
        {"causal": True, "window": (2, None), "softcap": 3.0},
    ),
]


@pytest.mark.sample(24)
@pytest.mark.parametrize("options, expected", MASKS)
@pytest.mark.parametrize("new", [None, 0, 1, 4])
@pytest.mark.parametrize("kind", ["contiguous", "batch_idx", "paged"])
@pytest.mark.parametrize("rotary", [None, True, False])
def test_kvcache(options, expected, new, kind, rotary):
    batch, seqlen_q = 3, 4
    held, leftpad = [5, 0, 8], [2, 0, 7]
    options, expected = dict(options), dict(expected)
    if kind == "paged":
        k_cache, v_cache = caches((12, 3, 2, 8))
        table = torch.randperm(12)[:12].view(3, 4).to(torch.int32)
        rows = page_rows(table, 3)
        options["block_table"] = table
    else:
        k_cache, v_cache = caches((5, 12, 2, 8))
        index = torch.randperm(5)[:batch].to(torch.int32) if kind == "batch_idx" else torch.arange(batch)
        rows = page_rows(index[:, None], 12)
        if kind == "batch_idx":
            options["cache_batch_idx"] = index
    q = randn(batch, seqlen_q, 4, 8)
    k = v = None
    if new is not None:
        k, v = randn(batch, new, 2, 8), randn(batch, new, 2, 8)
        if rotary is not None:
            angle = torch.rand(20, 3, dtype=torch.float64) * 6
            options |= {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": rotary}
            expected |= {"rotary": (angle.cos(), angle.sin()), "interleaved": rotary}
    slopes = torch.rand(batch, 4)
    check_cache_call(
        q, k_cache, v_cache, k, v, rows, held, {**expected, "leftpad": leftpad, "alibi_slopes": slopes},
        cache_seqlens=int32(*held), cache_leftpad=int32(*leftpad),
        alibi_slopes=slopes, num_splits=2, **options,
    )  # fmt: skip


@pytest.mark.parametrize("face", [flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache])
def test_many_queries_that_stand_at_one_position(face):
    """Without causal or a window all queries are turned as the first, so the tables may end there."""
    q, k, v = randn(1, 9, 1, 8), randn(1, 1, 1, 8), randn(1, 1, 1, 8)
    cos, sin = randn(4, 2), randn(4, 2)
    k_cache, v_cache = randn(1, 4, 1, 8), randn(1, 4, 1, 8)
    before, options = k_cache.clone(), {"rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": 3}
    with pytest.raises(ValueError, match=r"rotary_cos\.shape\[0\]=4 must exceed position 11"):
        face(q, k_cache, v_cache, k, v, causal=True, **options)
    assert torch.equal(k_cache, before)
    out = face(q, k_cache, v_cache, k, v, **options)
    at = torch.full((9,), 3)
    exact, _ = reference.attention(rotate(q[0], cos, sin, at, True)[None], k_cache, v_cache)
    torch.testing.assert_close(out, exact)
    with pytest.raises(ValueError, match=r"rotary_cos\.shape\[0\]=3 must exceed position 3"):
        face(q, k_cache, v_cache, k, v, **options | {"rotary_cos": cos[:3], "rotary_sin": sin[:3]})


def test_kvcache_lengths_and_views():
    """cache_seqlens as an integer or left out; caches that are views; half precision."""
    k_cache, v_cache = (t[:, :, ::2] for t in caches((2, 9, 4, 8)))
    q, k, v = randn(2, 3, 2, 8), randn(2, 3, 2, 8), randn(2, 3, 2, 8)
    rows = page_rows(torch.arange(2)[:, None], 9)
    check_cache_call(q, k_cache, v_cache, k, v, rows, [6, 6], {"causal": True}, cache_seqlens=6, causal=True)
    check_cache_call(q, k_cache, v_cache, None, None, rows, [9, 9], {})
    check_cache_call(q, k_cache, v_cache, None, None, rows, [0, 0], {}, cache_seqlens=0)
    out = flash_attn_with_kvcache(q, k_cache, v_cache)
    for length in (9, np.int64(9)):
        assert torch.equal(out, flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length))

    half = [t.to(torch.bfloat16) for t in (q, k_cache, v_cache, k, v)]
    out = flash_attn_with_kvcache(*half, cache_seqlens=4, causal=True)
    assert out.dtype == torch.bfloat16 and torch.equal(half[1][:, 4:7], half[3])
    expected, _ = reference.attention(half[0], half[1][:, :7], half[2][:, :7], causal=True)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)


def test_kvcache_decoding_equals_one_causal_call():
    x = [randn(2, 10, heads, 8) for heads in (4, 2, 2)]
    k_cache, v_cache = caches((2, 10, 2, 8))
    parts = [
        flash_attn_with_kvcache(*(t[:, n : n + 1] if t is x[0] else t for t in (x[0], k_cache, v_cache)),
                                x[1][:, n : n + 1], x[2][:, n : n + 1], cache_seqlens=n, causal=True)
        for n in range(10)
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(parts, dim=1), flash_attn_func(*x, causal=True))


def test_kvcache_has_no_gradient():
    q, k, v = randn(1, 1, 2, 8, grad=True), randn(1, 1, 2, 8, grad=True), randn(1, 1, 2, 8, grad=True)
    k_cache, v_cache = caches((1, 4, 2, 8))
    assert not flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=1).requires_grad
    assert not k_cache.requires_grad and torch.equal(k_cache[:, 1], k[:, 0])


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD_CALLS = [
    ({"cache_seqlens": int32(3, 7)}, "2 new tokens do not fit: cache_seqlens[1]=7 of capacity 8"),
    ({"cache_seqlens": 7}, "cache_seqlens[0]=7"),
    ({"cache_seqlens": int32(3, -1)}, "cache_seqlens[1]=-1"),
    ({"cache_seqlens": int32(3, 9)}, "cache_seqlens[1]=9"),
    ({"cache_seqlens": int32(3)}, "cache_seqlens.shape=(1,)"),
    ({"cache_seqlens": None}, "cache_seqlens=None"),
    ({"cache_batch_idx": int32(0, 3)}, "cache_batch_idx=[0, 3]"),
    ({"cache_batch_idx": int32(-1, 2)}, "cache_batch_idx=[-1, 2]"),
    ({"cache_batch_idx": int32(1, 1)}, "cache_batch_idx=[1, 1] must not name a sequence twice"),
    ({"cache_batch_idx": int32(0)}, "cache_batch_idx.shape=(1,)"),
    ({"cache_leftpad": int32(0, 6)}, "cache_leftpad[1]=6"),
    ({"cache_leftpad": int32(-1, 0)}, "cache_leftpad[0]=-1"),
    ({"block_table": int32([0], [3])}, "block_table[1]=[3]"),
    ({"block_table": int32([-1], [1])}, "block_table[0]=[-1]"),
    ({"block_table": int32([0])}, "block_table.shape=(1, 1)"),
    ({"block_table": int32([0], [1]), "cache_batch_idx": int32(0, 2)}, "cache_batch_idx=[0, 2]"),
    ({"v": None}, "k and v"),
    ({"k": randn(2, 2, 1, 8)}, "k.shape=(2, 2, 1, 8) must be (2, seqlen_new, 2, 8)"),
    ({"v": randn(2, 3, 2, 8)}, "v.shape=(2, 3, 2, 8)"),
    ({"k": randn(1, 2, 2, 8)}, "k.shape=(1, 2, 2, 8)"),
    ({"q": randn(4, 2, 2, 8)}, "k_cache.shape[0]=3"),
    ({"q": randn(2, 2, 3, 8)}, "query heads 3"),
    ({"q": randn(2, 2, 8)}, "q.shape=(2, 2, 8)"),
    ({"q": randn(2, 2, 2, 7)}, "key.shape[-1]=8"),
    ({"rotary_cos": torch.ones(9, 4)}, "rotary_cos and rotary_sin"),
    ({"rotary_cos": torch.ones(9, 5), "rotary_sin": torch.ones(9, 5)}, "rotary_cos.shape=(9, 5)"),
    ({"rotary_cos": torch.ones(3, 2), "rotary_sin": torch.ones(3, 2)}, "rotary_cos.shape[0]=3"),
    (
        {"rotary_cos": torch.ones(9, 2).to("meta"), "rotary_sin": torch.ones(9, 2)},
        "rotary_cos.device=meta must equal q.device=cpu",
    ),
    ({"rotary_cos": torch.ones(9, 2), "rotary_sin": torch.ones(9, 2), "k": None, "v": None}, "rotary_cos"),
    ({"window_size": (1,)}, "window_size=(1,)"),
    ({"softmax_scale": float("inf")}, "scale=inf"),
    ({"alibi_slopes": torch.ones(3)}, "alibi_slopes.shape=(3,)"),
    ({"v_cache": randn(3, 7, 2, 8)}, "v_cache.shape=(3, 7, 2, 8)"),
    ({"k_cache": randn(3, 8, 8, 2).mT}, "k_cache.stride(-1)=2"),
]  # fmt: skip
BAD_TYPES = [
    ({"cache_seqlens": torch.tensor([1.0, 2.0])}, "cache_seqlens"),
    ({"block_table": torch.ones(2, 1)}, "block_table"),
    ({"cache_seqlens": [1, 2]}, "cache_seqlens"),
    ({"k": torch.ones(2, 2, 2, 8), "v": torch.ones(2, 2, 2, 8)}, "k.dtype=torch.float32"),
    ({"q": torch.ones(2, 2, 2, 8)}, "k_cache.dtype=torch.float64 must equal q.dtype=torch.float32"),
    ({"k_cache": None}, "k_cache=NoneType"),
    ({"rotary_cos": torch.ones(9, 2), "rotary_sin": torch.ones(9, 2).int()}, "rotary_sin.dtype=torch.int32"),
]


@pytest.mark.parametrize(
    "change, message, error",
    [(*case, ValueError) for case in BAD_CALLS] + [(*case, TypeError) for case in BAD_TYPES],
)
def test_kvcache_errors_write_nothing(change, message, error):
    k_cache, v_cache = caches((3, 8, 2, 8))
    arguments = {
        "q": randn(2, 2, 2, 8), "k_cache": k_cache, "v_cache": v_cache, "k": randn(2, 2, 2, 8),
        "v": randn(2, 2, 2, 8), "cache_seqlens": int32(1, 2),
    } | change  # fmt: skip
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(error) as raised:
        flash_attn_with_kvcache(**arguments)
    assert message in str(raised.value)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


# The form of FlashAttention-3


def pieces(t, counts):
    return list(t.split(counts))


@pytest.mark.sample(16)
@pytest.mark.parametrize("options, expected", MASKS)
@pytest.mark.parametrize("query_counts", [[2, 2, 2], [3, 0, 5]])
@pytest.mark.parametrize("new_counts", [[2, 2, 2], [1, 4, 0], None])
@pytest.mark.parametrize("kind", ["contiguous", "batch_idx", "paged"])
def test_fa3_packed(options, expected, query_counts, new_counts, kind):
    """Packed queries and new keys, another head size of the values, and rotary starts of one's own."""
    held, leftpad, starts = [5, 0, 8], [2, 0, 7], [1, 9, 3]
    if kind == "paged":
        k_cache, v_cache = randn(12, 3, 2, 8), randn(12, 3, 2, 5)
        table = torch.randperm(12).view(3, 4)
        rows, where = page_rows(table, 3), {"page_table": table}
    else:
        k_cache, v_cache = randn(4, 12, 2, 8), randn(4, 12, 2, 5)
        index = torch.randperm(4)[:3] if kind == "batch_idx" else torch.arange(3)
        rows, where = page_rows(index[:, None], 12), {"cache_batch_idx": index} if kind == "batch_idx" else {}
    q, expected = randn(sum(query_counts), 4, 8), dict(expected)
    k = v = None
    if new_counts is not None:
        k, v = randn(sum(new_counts), 2, 8), randn(sum(new_counts), 2, 5)
        angle = torch.rand(20, 4, dtype=torch.float64) * 6
        where |= {
            "cu_seqlens_k_new": int32(0, *new_counts).cumsum(0), "rotary_cos": angle.cos(),
            "rotary_sin": angle.sin(), "rotary_interleaved": False, "rotary_seqlens": int32(*starts),
        }  # fmt: skip
        expected |= {"rotary": (angle.cos(), angle.sin()), "interleaved": False, "rotary_starts": starts}
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    results = cached_attention(
        pieces(q, query_counts), rows, expected_k, expected_v,
        None if k is None else pieces(k, new_counts), None if v is None else pieces(v, new_counts),
        held=held, leftpad=leftpad, **expected,
    )  # fmt: skip
    out, lse, *rest = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=int32(*held), cache_leftpad=int32(*leftpad),
        cu_seqlens_q=int32(0, *query_counts).cumsum(0), max_seqlen_q=5, return_softmax_lse=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=True, sm_margin=4, **where, **options,
    )  # fmt: skip
    torch.testing.assert_close(k_cache, expected_k, rtol=1e-12, atol=1e-12)
    assert torch.equal(v_cache, expected_v)
    torch.testing.assert_close(out, torch.cat([o for o, _ in results]))
    torch.testing.assert_close(lse, torch.cat([l for _, l in results], dim=1))
    assert [t.numel() for t in rest] == [0, 0]


def test_fa3_rows_of_a_page_table():
    """Five sequences have pages, three are called, in any order; new tokens go to their pages."""
    k_cache, v_cache = randn(20, 3, 2, 8), randn(20, 3, 2, 5)
    table, index = torch.randperm(20).view(5, 4), torch.tensor([4, 0, 3])
    q, k, v = randn(3, 2, 4, 8), randn(3, 2, 2, 8), randn(3, 2, 2, 5)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    results = cached_attention(
        q, page_rows(table[index], 3), expected_k, expected_v, k, v, held=[5, 0, 9], causal=True
    )
    out = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=int32(5, 0, 9), page_table=table, cache_batch_idx=index,
        causal=True,
    )  # fmt: skip
    assert torch.equal(k_cache, expected_k) and torch.equal(v_cache, expected_v)
    torch.testing.assert_close(out, torch.stack([o for o, _ in results]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_fa3_rotary_of_queries_alone(causal, interleaved):
    """The cache holds rotated keys already: q takes rotary_seqlens on, all of it the first without a mask."""
    k_cache, v_cache = randn(2, 9, 2, 8), randn(2, 9, 2, 8)
    before = k_cache.clone()
    q, starts, angle = randn(2, 3, 4, 8), [4, 6], torch.rand(12, 3, dtype=torch.float64) * 6
    out = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, rotary_cos=angle.cos(), rotary_sin=angle.sin(), cache_seqlens=int32(7, 9),
        rotary_seqlens=int32(*starts), rotary_interleaved=interleaved, causal=causal,
    )  # fmt: skip
    assert torch.equal(k_cache, before)
    for b, (start, length) in enumerate(zip(starts, (7, 9))):
        at = angle[start : start + 3] if causal else angle[start : start + 1].expand(3, -1)
        turned = apply_rotary(q[b], at.cos(), at.sin(), interleaved=interleaved)
        expected = tilewise.attention(
            turned[None], k_cache[b : b + 1, :length], v_cache[b : b + 1, :length], causal=causal
        )
        torch.testing.assert_close(out[b : b + 1], expected)


def test_fa3_rotary_starts_without_a_rotation():
    """They are not read: a caller may give them with every call."""
    q, cache, held = randn(2, 3, 4, 8), randn(2, 9, 2, 8), int32(7, 9)
    given = flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=held, rotary_seqlens=held)
    assert torch.equal(given, flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=held))


@pytest.mark.parametrize("options, expected", MASKS)
def test_fa3_dense(options, expected):
    k_cache, v_cache = randn(2, 9, 2, 8), randn(2, 9, 2, 5)
    q, k, v = randn(2, 3, 4, 8), randn(2, 3, 2, 8), randn(2, 3, 2, 5)
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    rows = page_rows(torch.arange(2)[:, None], 9)
    results = cached_attention(q, rows, expected_k, expected_v, k, v, held=[4, 4], **expected)
    out = flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=4, **options)
    assert torch.equal(k_cache, expected_k) and torch.equal(v_cache, expected_v)
    torch.testing.assert_close(out, torch.stack([o for o, _ in results]))


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_fa3_qv(kind):
    """Scores with the latent values of the cache, new tokens included."""
    table = torch.randperm(6).view(2, 3) if kind == "paged" else None
    k_cache, v_cache = (randn(6, 3, 1, d) if kind == "paged" else randn(2, 9, 1, d) for d in (8, 5))
    rows = page_rows(torch.arange(2)[:, None] if table is None else table, 9 if table is None else 3)
    q, qv, k, v = randn(2, 3, 4, 8), randn(2, 3, 4, 5), randn(2, 3, 1, 8), randn(2, 3, 1, 5)
    both = torch.cat([k_cache, v_cache], -1)
    results = cached_attention(
        torch.cat([q, qv], -1),
        rows,
        both,
        v_cache.clone(),
        torch.cat([k, v], -1),
        v,
        held=[4, 6],
        causal=True,
    )
    out = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, qv, cache_seqlens=int32(4, 6), page_table=table, causal=True
    )
    torch.testing.assert_close(out, torch.stack([o for o, _ in results]))
    torch.testing.assert_close(torch.cat([k_cache, v_cache], -1), both)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "batch_idx"])
def test_fa3_eight_bits(kind, is_packed):
    """8-bit caches that take 8-bit tokens, read where they lie, with factors for sequences and key heads."""
    table = torch.randperm(6).view(2, 3) if kind == "paged" else None
    index = torch.tensor([2, 0]) if kind == "batch_idx" else None
    shape = (6, 3, 2) if kind == "paged" else (3, 9, 2)
    k_cache, v_cache = (torch.randn(*shape, d).to(torch.float8_e4m3fn) for d in (8, 5))
    rows = (
        page_rows(table, 3)
        if kind == "paged"
        else page_rows((torch.arange(2) if index is None else index)[:, None], 9)
    )
    q, k, v = (torch.randn(2, 3, heads, d).to(torch.float8_e4m3fn) for heads, d in ((4, 8), (2, 8), (2, 5)))
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    held = [4, 6]
    k64, v64 = k_cache.double(), v_cache.double()
    wide = (scales[0] * scales[1]).double().repeat_interleave(2, 1)[:, None, :, None]
    results = cached_attention(
        q.double() * wide, rows, k64, v64, k.double(), v.double(), held=held, causal=True
    )
    expected = (
        torch.stack([o for o, _ in results]) * scales[2].double().repeat_interleave(2, 1)[:, None, :, None]
    )
    packing = {"cu_seqlens_q": int32(0, 3, 6), "max_seqlen_q": 3} if is_packed else {}
    out = flash_attn_3.flash_attn_with_kvcache(
        q.flatten(0, 1) if is_packed else q, k_cache, v_cache, k, v, cache_seqlens=int32(*held),
        page_table=table, cache_batch_idx=index, causal=True, q_descale=scales[0], k_descale=scales[1],
        v_descale=scales[2], **packing,
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double().view_as(expected), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(k_cache.double(), k64) and torch.equal(v_cache.double(), v64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_fa3_rotary_of_eight_bits(is_packed, causal, tables):
    """Turned in float32; k is stored rounded, q is not rounded to 8 bits."""
    fp8, held = torch.float8_e4m3fn, [4, 6]
    k_cache, v_cache = torch.randn(2, 12, 2, 8).to(fp8), torch.randn(2, 12, 2, 5).to(fp8)
    q, k, v = (torch.randn(2, 3, heads, d).to(fp8) for heads, d in ((4, 8), (2, 8), (2, 5)))
    angle, scales = torch.rand(20, 3) * 6, [torch.rand(2, 2) + 0.5 for _ in range(3)]
    cos, sin = angle.cos().to(tables), angle.sin().to(tables)
    options = {f"{name}_descale": scale for name, scale in zip("qkv", scales)} | {"causal": causal}
    if is_packed:
        options |= {"cu_seqlens_q": int32(0, 3, 6), "max_seqlen_q": 3}
    out = flash_attn_3.flash_attn_with_kvcache(
        q.flatten(0, 1) if is_packed else q, k_cache, v_cache, k, v, cache_seqlens=int32(*held),
        rotary_cos=cos, rotary_sin=sin, **options,
    )  # fmt: skip
    wide = [s.double().repeat_interleave(2, 1)[..., None] for s in (scales[0] * scales[1], scales[2])]
    for b, start in enumerate(held):
        turned = rotate(k[b].double(), cos.double(), sin.double(), torch.arange(start, start + 3), True)
        stored = k_cache[b, start : start + 3].double()
        assert ((stored - turned).abs() <= turned.abs() / 16 + 2**-10).all()  # half a unit of 3 bits
        assert torch.equal(stored[..., 6:], k[b, :, :, 6:].double())
        positions = start + torch.arange(3) * causal
        query = rotate(q[b].double(), cos.double(), sin.double(), positions, True) * wide[0][b]
        keys, values = (t[b : b + 1, : start + 3].double() for t in (k_cache, v_cache))
        expected, _ = reference.attention(query[None], keys, values, causal=causal)
        found = out.view(2, 3, 4, 5)[b].double()
        torch.testing.assert_close(found, expected[0] * wide[1][b], rtol=2e-2, atol=2e-2)


def test_fa3_rotary_of_eight_bits_ends_at_the_largest_number():
    fp8 = torch.float8_e4m3fn
    k_cache, x = torch.zeros(1, 2, 1, 2).to(fp8), torch.full((1, 1, 1, 2), 448.0).to(fp8)
    half = torch.full((2, 1), 0.5**0.5)
    flash_attn_3.flash_attn_with_kvcache(
        x, k_cache, k_cache.clone(), x, x, cache_seqlens=0, rotary_cos=half, rotary_sin=half
    )
    assert k_cache[0, 0, 0].float().tolist() == [0.0, 448.0]


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_fa3_one_tensor_of_other_bits(name, is_fp8):
    """The error names the argument that differs from q; of q itself, the first cache."""
    tensors = {
        "q": randn(1, 2, 2, 8), "k_cache": randn(1, 8, 2, 8), "v_cache": randn(1, 8, 2, 8),
        "k": randn(1, 2, 2, 8), "v": randn(1, 2, 2, 8),
    }  # fmt: skip
    arguments = {
        key: t.to(torch.float8_e4m3fn if (key == name) == is_fp8 else torch.bfloat16)
        for key, t in tensors.items()
    }
    before = arguments["k_cache"].clone()
    with pytest.raises(TypeError, match=rf"^{'k_cache' if name == 'q' else name}.dtype=.* must equal"):
        flash_attn_3.flash_attn_with_kvcache(**arguments, cache_seqlens=3)
    assert torch.equal(arguments["k_cache"].float(), before.float())


def test_fa3_qv_too_wide_writes_nothing():
    k_cache, v_cache = randn(1, 8, 1, 200), randn(1, 8, 1, 400)
    before = k_cache.clone()
    with pytest.raises(ValueError, match="600"):
        flash_attn_3.flash_attn_with_kvcache(
            randn(1, 1, 1, 200), k_cache, v_cache, randn(1, 1, 1, 200), randn(1, 1, 1, 400),
            randn(1, 1, 1, 400), cache_seqlens=2,
        )  # fmt: skip
    assert torch.equal(k_cache, before)


def test_fa3_a_wrong_head_size_with_qv_writes_nothing():
    k_cache, v_cache = randn(1, 8, 1, 6), randn(1, 8, 1, 4)
    before = k_cache.clone()
    with pytest.raises(ValueError, match="must equal"):
        flash_attn_3.flash_attn_with_kvcache(
            randn(1, 1, 1, 8), k_cache, v_cache, randn(1, 1, 1, 6), randn(1, 1, 1, 4), randn(1, 1, 1, 4),
            cache_seqlens=2,
        )  # fmt: skip
    assert torch.equal(k_cache, before)


FA3_BAD_CALLS = [
    ({"qv": randn(5, 2, 7)}, ValueError, "qv of shape (5, 2, 7)"),
    ({"qv": 3}, TypeError, "qv=int"),
    ({"k_descale": torch.ones(2, 2)}, ValueError, "k_descale must be None: q is torch.float64"),
    ({"attention_chunk": -4}, ValueError, "attention_chunk=-4"),
    ({"cu_seqlens_q": int32(0, 2, 4)}, ValueError, "cu_seqlens_q=[0, 2, 4]"),
    ({"cu_seqlens_q": int32(0, 6, 5)}, ValueError, "cu_seqlens_q=[0, 6, 5]"),
    ({"cu_seqlens_q": int32(1, 2, 5)}, ValueError, "cu_seqlens_q=[1, 2, 5]"),
    ({"cu_seqlens_q": torch.tensor([0.0, 5.0])}, TypeError, "cu_seqlens_q"),
    ({"cu_seqlens_q": None}, ValueError, "q.shape=(5, 2, 8)"),
    ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q=2"),
    ({"cu_seqlens_k_new": int32(0, 2, 4)}, ValueError, "cu_seqlens_k_new=[0, 2, 4]"),
    ({"cu_seqlens_k_new": int32(0, 3)}, ValueError, "cu_seqlens_k_new has 1 sequences"),
    ({"cu_seqlens_k_new": None}, ValueError, "k.shape=(3, 2, 8)"),
    ({"cache_seqlens": int32(1, 7)}, ValueError, "cache_seqlens[1]=7"),
    ({"page_table": int32([0], [9])}, ValueError, "page_table[1]=[9]"),
    ({"rotary_seqlens": int32(1)}, ValueError, "rotary_seqlens.shape=(1,)"),
    ({"k": None, "v": None}, ValueError, "cu_seqlens_k_new must be None"),
    (
        {
            "k": None,
            "v": None,
            "cu_seqlens_k_new": None,
            "rotary_cos": randn(9, 4),
            "rotary_sin": randn(9, 4),
        },
        ValueError,
        "rotary_cos must be None",
    ),
    (
        {"page_table": int32([0], [1], [2]), "cache_batch_idx": int32(0, 3)},
        ValueError,
        "cache_batch_idx=[0, 3] must index the cache's 3",
    ),
    ({"page_table": int32([0], [1], [2])}, ValueError, "page_table.shape=(3, 1)"),
]


@pytest.mark.parametrize("change, error, message", FA3_BAD_CALLS)
def test_fa3_errors_write_nothing(change, error, message):
    k_cache, v_cache = caches((3, 8, 2, 8))
    arguments = {
        "q": randn(5, 2, 8), "k_cache": k_cache, "v_cache": v_cache, "k": randn(3, 2, 8), "v": randn(3, 2, 8),
        "cache_seqlens": int32(1, 2), "cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k_new": int32(0, 1, 3),
    } | change  # fmt: skip
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(error) as raised:
        flash_attn_3.flash_attn_with_kvcache(**arguments)
    assert message in str(raised.value)
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])
