"""`attention_chunk` against the float64 reference with the mask written out: query and key share a chunk."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tilewise import reference
from tilewise.flash_attn_3 import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tilewise.integrations import chunks
from tilewise.testing import compare

INF = float("inf")
OPTIONS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (3, 1)}, {"window": (3, 1)}),
    (
        {"causal": True, "window_size": (2, -1), "softcap": 3.0},
        {"causal": True, "window": (2, None), "softcap": 3.0},
    ),
]
LENGTHS = [(7, 7), (4, 9), (9, 4), (1, 10), (1, 1), (6, 12), (13, 13), (5, 0)]
CHUNKS = [1, 3, 4, 5, 12, 100]


def randn(*shape, grad=False, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=grad)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def mask_of(seqlen_q, seqlen_k, chunk):
    query = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    return (query >= 0) & (query.div(chunk, rounding_mode="floor") == key // chunk)


def exact(q, k, v, chunk, **options):
    """(seqlen, heads, dim) tensors of one sequence: out and lse, with the mask in full."""
    mask = mask_of(len(q), len(k), chunk)[None, None]
    out, lse = reference.attention(q[None], k[None], v[None], mask=mask, **options)
    return out[0], lse[0]


def same(ours, theirs, tensors=()):
    """out, lse, and their gradients."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    if tensors:
        directions = [torch.randn_like(ours[0]), torch.randn_like(ours[1])]
        seen = [lse.masked_fill(lse == -INF, 0.0) for lse in (ours[1], theirs[1])]
        pairs = zip(
            torch.autograd.grad((ours[0], seen[0]), tensors, directions, allow_unused=True),
            torch.autograd.grad((theirs[0], seen[1]), tensors, directions, allow_unused=True),
        )
        for a, b in pairs:
            torch.testing.assert_close(a, b)


@pytest.mark.sample(16)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", LENGTHS)
@pytest.mark.parametrize("options, expected", OPTIONS)
def test_dense(options, expected, seqlen_q, seqlen_k, chunk):
    q, k, v = (
        randn(2, n, h, d, grad=True) for n, h, d in [(seqlen_q, 4, 8), (seqlen_k, 2, 8), (seqlen_k, 2, 5)]
    )
    ours = flash_attn_func(q, k, v, attention_chunk=chunk, return_attn_probs=True, **options)
    assert ours[0].shape == (2, seqlen_q, 4, 5) and ours[1].shape == (2, 4, seqlen_q)
    theirs = reference.attention(q, k, v, mask=mask_of(seqlen_q, seqlen_k, chunk)[None, None], **expected)
    same(ours, theirs, (q, k, v) if seqlen_k else ())


def test_a_chunk_that_holds_all_is_none():
    q, k = randn(2, 6, 4, 8), randn(2, 9, 2, 8)
    assert torch.equal(flash_attn_func(q, k, k, attention_chunk=9), flash_attn_func(q, k, k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("chunk", [31, 64, 130])
def test_dense_within_the_error_rule(dtype, chunk):
    q, k, v = (randn(2, n, h, 64, dtype=dtype, grad=True) for n, h in [(201, 4), (230, 2), (230, 2)])
    out = flash_attn_func(q, k, v, causal=True, attention_chunk=chunk)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    options = {"causal": True, "mask": mask_of(201, 230, chunk)[None, None]}
    results = []
    for precision in (torch.float64, dtype):
        forward = reference.attention(q, k, v, dtype=precision, **options)[0]
        backward = reference.attention_backward(dout, q, k, v, dtype=precision, **options)
        results.append((forward.detach(), *backward[:3]))
    for name, found, right, base in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), *results):
        report = compare(name, found, right, base)
        holds = report.max_error <= report.max_budget if dtype == torch.float32 else report.is_within
        assert holds, report  # the mean of float32 depends on the order of a few sums


def test_qkvpacked():
    qkv = randn(2, 11, 3, 4, 8, grad=True)
    ours = flash_attn_qkvpacked_func(qkv, causal=True, attention_chunk=4, return_attn_probs=True)
    mask = mask_of(11, 11, 4)[None, None]
    same(ours, reference.attention(*qkv.unbind(2), causal=True, mask=mask), (qkv,))


def packed_exact(q, k, v, cu_q, cu_k, chunk, used_q=None, used_k=None, **options):
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0)]
    for b in range(len(cu_q) - 1):
        (q0, q1), (k0, k1) = cu_q[b : b + 2].tolist(), cu_k[b : b + 2].tolist()
        stop_q = q1 if used_q is None else q0 + used_q[b]
        stop_k = k1 if used_k is None else k0 + used_k[b]
        out, lse = exact(q[q0:stop_q], k[k0:stop_k], v[k0:stop_k], chunk, **options)
        outs += [out, out.new_zeros(q1 - stop_q, *out.shape[1:])]
        lses += [lse, lse.new_full((len(lse), q1 - stop_q), -INF)]
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.sample(12)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("options, expected", OPTIONS)
def test_varlen(options, expected, chunk, used):
    """Every alignment at random, sequences without queries or without keys among them."""
    counts_q, counts_k = torch.randint(0, 14, (2, 9))
    counts_q[:4], counts_k[:4] = torch.tensor([5, 0, 13, 0]), torch.tensor([0, 7, 13, 0])
    cu_q, cu_k = (torch.cat((int32(0), counts.cumsum(0).int())) for counts in (counts_q, counts_k))
    q, k, v = randn(int(cu_q[-1]), 4, 8, grad=True), *(randn(int(cu_k[-1]), 2, d, grad=True) for d in (8, 5))
    used_q, used_k = (
        [int(torch.randint(0, n + 1, ())) for n in counts.tolist()] for counts in (counts_q, counts_k)
    )
    ours = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 13, 13, *((int32(*used_q), int32(*used_k)) if used else ()),
        attention_chunk=chunk, return_attn_probs=True, **options,
    )  # fmt: skip
    theirs = packed_exact(q, k, v, cu_q, cu_k, chunk, *((used_q, used_k) if used else ()), **expected)
    same(ours, theirs, (q, k, v))


def test_nothing_is_copied_and_no_mask_is_made(monkeypatch):
    calls = []
    attention = chunks.autograd.attention
    monkeypatch.setattr(chunks.autograd, "attention", lambda *a: calls.append(a) or attention(*a))
    q, k, v = (randn(2, 512, 2, 8) for _ in range(3))
    flash_attn_func(q, k, v, causal=True, attention_chunk=100)
    ((inputs, options, _),) = calls
    assert [t.data_ptr() for t in inputs[:3]] == [t.data_ptr() for t in (q, k, v)]
    assert inputs.mask is None and inputs.bias is None
    assert inputs.cu_seqlens_q.tolist() == [0, 100, 200, 300, 400, 500, 512, 612, 712, 812, 912, 1012, 1024]
    assert (options.max_seqlen_q, options.max_seqlen_k) == (100, 100)


def eight_bit(*shape):
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def test_every_derivative():
    q, k, v = (randn(2, n, h, 4, grad=True) for n, h in [(5, 2), (7, 1), (7, 1)])

    def function(q, k, v):
        return flash_attn_func(q, k, v, causal=True, attention_chunk=3)

    assert gradcheck(function, (q, k, v), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, (q, k, v))
    many = randn(3, 2, 5, 2, 4)
    mapped = torch.vmap(lambda q: function(q, k, v))(many)
    torch.testing.assert_close(mapped, torch.stack([function(q, k, v) for q in many]))


def test_eight_bits():
    q, k, v, scales = (
        eight_bit(2, 9, 4, 8),
        eight_bit(2, 11, 2, 8),
        eight_bit(2, 11, 2, 8),
        torch.rand(3, 2, 2) + 0.5,
    )
    wide = scales[0].double().repeat_interleave(2, 1)[:, None, :, None]
    theirs, _ = reference.attention(
        q.double() * wide, k.double() * scales[1][:, None, :, None], v.double() * scales[2][:, None, :, None],
        causal=True, mask=mask_of(9, 11, 4)[None, None],
    )  # fmt: skip
    out = flash_attn_func(q, k, v, None, True, None, *scales, attention_chunk=4)
    torch.testing.assert_close(out.double(), theirs, rtol=2e-2, atol=2e-2)


def test_qv():
    q, k, v, qv = randn(1, 7, 4, 8), randn(1, 9, 2, 8), randn(1, 9, 2, 5), randn(1, 7, 4, 5)
    theirs = exact(torch.cat((q, qv), -1)[0], torch.cat((k, v), -1)[0], v[0], 4, causal=True)[0]
    torch.testing.assert_close(flash_attn_func(q, k, v, None, True, qv, attention_chunk=4)[0], theirs)


# Caches


def rows_of(table, page_size):
    return [[(int(page), row) for page in pages for row in range(page_size)] for pages in table]


def cache_of(kind, capacity, page, dims=(8, 5)):
    """k_cache, v_cache, each sequence's rows, and the arguments that say where they are; three sequences."""
    if kind == "paged":
        pages = -(-capacity // page)
        table = torch.randperm(3 * pages + 2)[: 3 * pages].view(3, pages).int()
        return *(randn(3 * pages + 2, page, 2, d) for d in dims), rows_of(table, page), {"page_table": table}
    index = torch.randperm(4)[:3].int() if kind == "batch_idx" else torch.arange(3)
    where = {"cache_batch_idx": index} if kind == "batch_idx" else {}
    return *(randn(4, capacity, 2, d) for d in dims), rows_of(index[:, None], capacity), where


def cached_exact(q, k_cache, v_cache, rows, lengths, leftpad, chunk, **options):
    """Lists of each sequence's out and lse."""
    results = []
    for query, place, length, pad in zip(q, rows, lengths, leftpad):
        used = place[pad:length]
        keys, values = (
            torch.stack([t[p] for p in used]) if used else t.new_empty(0, *t.shape[2:])
            for t in (k_cache, v_cache)
        )
        results.append(exact(query.double(), keys.double(), values.double(), chunk, **options))
    return [list(column) for column in zip(*results)]


@pytest.mark.sample(20)
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(
    "kind, capacity, page",
    [
        ("contiguous", 21, 0),
        ("contiguous", 48, 0),
        ("batch_idx", 64, 0),
        ("paged", 24, 4),
        ("paged", 27, 3),
        ("paged", 64, 32),
    ],
)
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 18])
@pytest.mark.parametrize("options, expected", OPTIONS)
@pytest.mark.parametrize("chunk", [4, 6, 16, 17])
def test_kvcache(options, expected, kind, capacity, page, seqlen_q, is_padded, chunk):
    """Lengths and left padding at random: queries in one chunk, in several, and before the first key."""
    k_cache, v_cache, rows, where = cache_of(kind, capacity, page)
    lengths = [capacity, *torch.randint(0, capacity + 1, (2,)).tolist()]
    leftpad = [int(torch.randint(0, n + 1, ())) if is_padded else 0 for n in lengths]
    q = randn(3, seqlen_q, 4, 8)
    out, lse, *_ = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=int32(*lengths), attention_chunk=chunk, return_softmax_lse=True,
        cache_leftpad=int32(*leftpad) if is_padded else None, **where, **options,
    )  # fmt: skip
    outs, lses = cached_exact(q, k_cache, v_cache, rows, lengths, leftpad, chunk, **expected)
    same((out, lse), (torch.stack(outs), torch.stack(lses)))


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    "kind, capacity, page", [("contiguous", 40, 0), ("batch_idx", 64, 0), ("paged", 40, 5), ("paged", 64, 16)]
)
@pytest.mark.parametrize("counts", [[3, 0, 9], [1, 1, 1], [20, 2, 1]])
@pytest.mark.parametrize("longest", [20, None])
@pytest.mark.parametrize("options, expected", OPTIONS)
@pytest.mark.parametrize("chunk", [4, 6, 16])
def test_kvcache_packed(options, expected, kind, capacity, page, counts, longest, chunk):
    k_cache, v_cache, rows, where = cache_of(kind, capacity, page)
    lengths, leftpad = [capacity, 7, 30], [3, 7, 0]
    q = randn(sum(counts), 4, 8)
    out, lse, *_ = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=int32(*lengths), cache_leftpad=int32(*leftpad),
        cu_seqlens_q=int32(0, *counts).cumsum(0), max_seqlen_q=longest, attention_chunk=chunk,
        return_softmax_lse=True, **where, **options,
    )  # fmt: skip
    outs, lses = cached_exact(q.split(counts), k_cache, v_cache, rows, lengths, leftpad, chunk, **expected)
    same((out, lse), (torch.cat(outs), torch.cat(lses, 1)))


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_takes_new_tokens_and_turns_them(kind, causal):
    """With chunks, q takes positions one after the other whether causal or not, as with a window."""
    k_cache, v_cache, rows, where = cache_of(kind, 32, 4)
    q, k, v = randn(3, 5, 4, 8), randn(3, 5, 2, 8), randn(3, 5, 2, 5)
    held, angle = [9, 0, 14], torch.rand(40, 4, dtype=torch.float64) * 6
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=int32(*held), rotary_cos=angle.cos(), rotary_sin=angle.sin(),
        rotary_interleaved=False, causal=causal, attention_chunk=8, **where,
    )  # fmt: skip

    def turn(x, start):
        z = torch.polar(torch.ones_like(angle), angle)[start : start + len(x), None]
        turned = torch.complex(x[..., :4], x[..., 4:]) * z
        return torch.cat((turned.real, turned.imag), -1)

    for b, start in enumerate(held):
        stored = torch.stack([k_cache[p] for p in rows[b][start : start + 5]])
        torch.testing.assert_close(stored, turn(k[b], start))
    turned = [turn(x, start) for x, start in zip(q, held)]
    outs, _ = cached_exact(turned, k_cache, v_cache, rows, [n + 5 for n in held], [0] * 3, 8, causal=causal)
    torch.testing.assert_close(out, torch.stack(outs))


@pytest.mark.parametrize("kind, capacity", [("contiguous", 64), ("contiguous", 45), ("paged", 64)])
@pytest.mark.parametrize("seqlen_q", [1, 3, 20])
def test_kvcache_of_eight_bits(kind, capacity, seqlen_q):
    k_cache, v_cache, rows, where = cache_of(kind, capacity, 16)
    k_cache, v_cache = k_cache.to(torch.float8_e4m3fn), v_cache.to(torch.float8_e4m3fn)
    q, lengths, scales = eight_bit(3, seqlen_q, 4, 8), [45, 33, 17], torch.rand(3, 3, 2) + 0.5
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=int32(*lengths), q_descale=scales[0], k_descale=scales[1],
        v_descale=scales[2], causal=True, attention_chunk=16, **where,
    )  # fmt: skip
    wide = [s.double().repeat_interleave(2, 1)[:, None, :, None] for s in (scales[0] * scales[1], scales[2])]
    outs, _ = cached_exact(q.double() * wide[0], k_cache, v_cache, rows, lengths, [0] * 3, 16, causal=True)
    torch.testing.assert_close(out.double(), torch.stack(outs) * wide[1], rtol=2e-2, atol=2e-2)


def test_kvcache_decoding_equals_one_call():
    x = [randn(2, 21, heads, 8) for heads in (4, 2, 2)]
    k_cache, v_cache = randn(2, 21, 2, 8), randn(2, 21, 2, 8)
    steps = [
        flash_attn_with_kvcache(
            x[0][:, n : n + 1], k_cache, v_cache, x[1][:, n : n + 1], x[2][:, n : n + 1], cache_seqlens=n,
            causal=True, attention_chunk=6,
        )
        for n in range(21)
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(steps, 1), flash_attn_func(*x, causal=True, attention_chunk=6))


def test_kvcache_with_unused_pages_that_are_none():
    k_cache, v_cache = randn(5, 4, 2, 8), randn(5, 4, 2, 8)
    table = int32([0, 1, -1, -1], [2, 3, 4, 10**9])
    for seqlen_q in (1, 3, 9):
        q = randn(2, seqlen_q, 4, 8)
        for chunk in (4, 6, 8):
            out = flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=int32(6, 12), page_table=table, causal=True,
                attention_chunk=chunk,
            )  # fmt: skip
            outs, _ = cached_exact(
                q, k_cache, v_cache, rows_of(table, 4), [6, 12], [0, 0], chunk, causal=True
            )
            torch.testing.assert_close(out, torch.stack(outs))


def test_empty():
    q, k = randn(0, 5, 2, 8), randn(0, 5, 2, 8)
    assert flash_attn_func(q, k, k, attention_chunk=2).shape == q.shape
    q, k = randn(2, 0, 2, 8), randn(2, 5, 2, 8)
    assert flash_attn_func(q, k, k, attention_chunk=2).shape == q.shape
    q, starts = randn(0, 2, 8), int32(0)
    assert flash_attn_varlen_func(q, q, q, starts, starts, 0, 0, attention_chunk=2).shape == q.shape
    q, k = randn(2, 3, 2, 8), randn(2, 0, 2, 8)
    assert not flash_attn_with_kvcache(q, k, k, attention_chunk=2).any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_compiled(is_packed, is_dynamic):
    """Forward and backward, traced in one graph."""

    def function(q, k):
        if is_packed:
            flat = q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1)
            starts = torch.arange(3) * q.shape[1], torch.arange(3) * k.shape[1]
            lengths = q.shape[1], k.shape[1]
            return flash_attn_varlen_func(*flat, *starts, *lengths, causal=True, attention_chunk=4).view_as(q)
        return flash_attn_func(q, k, k, causal=True, attention_chunk=4)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=is_dynamic)
    for seqlen_q, seqlen_k in [(9, 11), (12, 13)][: 1 + is_dynamic]:
        q, k = randn(2, seqlen_q, 4, 8, grad=True), randn(2, seqlen_k, 2, 8, grad=True)
        out = compiled(q, k)
        mask = mask_of(seqlen_q, seqlen_k, 4)[None, None]
        theirs, _ = reference.attention(q, k, k, causal=True, mask=mask)
        same((out, out.sum()), (theirs, theirs.sum()), (q, k))


@pytest.mark.sample(2)
@pytest.mark.parametrize("seqlen_q", [1, 3, 20])
def test_kvcache_compiled(seqlen_q):
    def function(q, k_cache, v_cache, lengths, **where):
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, causal=True, attention_chunk=16, **where
        )

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for kind, capacity in [("contiguous", 64), ("paged", 48)]:
        k_cache, v_cache, rows, where = cache_of(kind, capacity, 16)
        q, lengths = randn(3, seqlen_q, 4, 8), [40, 17, 3]
        out = compiled(q, k_cache, v_cache, int32(*lengths), **where)
        outs, _ = cached_exact(q, k_cache, v_cache, rows, lengths, [0] * 3, 16, causal=True)
        torch.testing.assert_close(out, torch.stack(outs))


@pytest.mark.parametrize("chunk, error", [(-1, ValueError), (2.0, TypeError), (None, TypeError)])
def test_bad_chunks(chunk, error):
    q, starts, cache = randn(1, 4, 2, 8), int32(0, 4), randn(1, 9, 2, 8)
    before = cache.clone()
    for function, arguments in [
        (flash_attn_func, (q, q, q)),
        (flash_attn_qkvpacked_func, (randn(1, 4, 3, 2, 8),)),
        (flash_attn_varlen_func, (q[0], q[0], q[0], starts, starts, 4, 4)),
        (flash_attn_with_kvcache, (q, cache, cache, q, q, None, None, None, 2)),
    ]:
        with pytest.raises(error) as raised:
            function(*arguments, attention_chunk=chunk)
        assert f"attention_chunk={chunk}" in str(raised.value)
    assert torch.equal(cache, before)


def test_other_errors_are_those_without_chunks():
    q, k = randn(1, 4, 3, 8), randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="query heads 3"):
        flash_attn_func(q, k, k, attention_chunk=2)
    x = randn(6, 2, 8)
    with pytest.raises(ValueError, match=r"cu_seqlens_q=\[0, ..., 5\]"):
        flash_attn_varlen_func(x, x, x, int32(0, 5), int32(0, 6), 6, 6, attention_chunk=2)
    with pytest.raises(ValueError, match="max_seqlen_k=3"):
        flash_attn_varlen_func(x, x, x, int32(0, 6), int32(0, 6), 6, 3, attention_chunk=2)
