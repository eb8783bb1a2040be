import inspect

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.core.dropout import keep_mask, rate
from tilewise.faces import flash_attn_call
from tilewise.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

INF = float("inf")
REQUIRED = inspect.Parameter.empty
COMMON = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]
VARLEN = [(n, REQUIRED) for n in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
SIGNATURES = {  # of flash_attn/flash_attn_interface.py, version 2.8
    flash_attn_func: [("q", REQUIRED), ("k", REQUIRED), ("v", REQUIRED), *COMMON],
    flash_attn_qkvpacked_func: [("qkv", REQUIRED), *COMMON],
    flash_attn_kvpacked_func: [("q", REQUIRED), ("kv", REQUIRED), *COMMON],
    flash_attn_varlen_func: [
        ("q", REQUIRED), ("k", REQUIRED), ("v", REQUIRED), *VARLEN, *COMMON, ("block_table", None),
    ],
    flash_attn_varlen_qkvpacked_func: [
        ("qkv", REQUIRED), ("cu_seqlens", REQUIRED), ("max_seqlen", REQUIRED), *COMMON,
    ],
    flash_attn_varlen_kvpacked_func: [("q", REQUIRED), ("kv", REQUIRED), *VARLEN, *COMMON],
    flash_attn_with_kvcache: [
        ("q", REQUIRED), ("k_cache", REQUIRED), ("v_cache", REQUIRED), ("k", None), ("v", None),
        ("rotary_cos", None), ("rotary_sin", None), ("cache_seqlens", None), ("cache_batch_idx", None),
        ("cache_leftpad", None), ("block_table", None), ("softmax_scale", None), ("causal", False),
        ("window_size", (-1, -1)), ("softcap", 0.0), ("rotary_interleaved", True), ("alibi_slopes", None),
        ("num_splits", 0), ("return_softmax_lse", False),
    ],
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signature(function):
    *parameters, unknown = inspect.signature(function).parameters.values()
    assert unknown.kind is inspect.Parameter.VAR_KEYWORD  # refused with what was meant
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[function]
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
    assert getattr(tilewise.flash_attn, function.__name__) is function


def randn(*shape, grad=False):
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


# flash-attn's arguments, and the reference's for the same thing.
OPTIONS = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"window_size": (3, -1)}, {"window": (3, None)}),
    ({"window_size": (-1, 2)}, {"window": (None, 2)}),
    ({"window_size": (4, 2), "causal": True}, {"window": (4, 2), "causal": True}),
    ({"softcap": 2.0, "softmax_scale": 0.7}, {"softcap": 2.0, "scale": 0.7}),
    ({"softcap": -1.0, "deterministic": True}, {}),
]


def compare(ours, theirs, inputs, reference_lse):
    """out, lse (+inf for a query without keys) and the gradients of both."""
    out, lse, s_dmask = ours
    assert s_dmask.numel() == 0
    torch.testing.assert_close(out, theirs)
    torch.testing.assert_close(lse, reference_lse.masked_fill(reference_lse == -INF, INF))
    dout = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(theirs, inputs, dout)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(7, 7), (4, 9), (9, 4)])
@pytest.mark.parametrize("options, expected", OPTIONS)
def test_dense(seqlen_q, seqlen_k, options, expected):
    q, k, v = (
        randn(2, seqlen_q, 4, 8, grad=True),
        randn(2, seqlen_k, 2, 8, grad=True),
        randn(2, seqlen_k, 2, 8, grad=True),
    )
    slopes = torch.rand(2, 4)
    out, lse = reference.attention(q, k, v, alibi_slopes=slopes, **expected)
    ours = flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True, **options)
    compare(ours, out, (q, k, v), lse)
    assert torch.equal(flash_attn_func(q, k, v, alibi_slopes=slopes, **options), ours[0])
    if seqlen_q > seqlen_k and "causal" in options:
        empty = seqlen_q - seqlen_k
        assert not ours[0][:, :empty].any() and (ours[1][..., :empty] == INF).all()

    kv = torch.stack([k, v], dim=2).detach().requires_grad_()
    packed = flash_attn_kvpacked_func(q, kv, alibi_slopes=slopes, return_attn_probs=True, **options)
    out, lse = reference.attention(q, *kv.unbind(2), alibi_slopes=slopes, **expected)
    compare(packed, out, (q, kv), lse)


@pytest.mark.parametrize("options, expected", OPTIONS)
def test_qkvpacked(options, expected):
    qkv = randn(2, 9, 3, 4, 8, grad=True)
    out, lse = reference.attention(*qkv.unbind(2), **expected)
    compare(flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options), out, (qkv,), lse)


LENGTHS_Q, LENGTHS_K = [5, 0, 9, 1], [8, 3, 4, 0]


def offsets(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@pytest.mark.parametrize("options, expected", OPTIONS)
def test_varlen(options, expected):
    q, k, v = randn(15, 4, 8, grad=True), randn(15, 2, 8, grad=True), randn(15, 2, 8, grad=True)
    slopes = torch.rand(4, 4)
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    expected = {**expected, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "alibi_slopes": slopes}
    options = {**options, "alibi_slopes": slopes, "return_attn_probs": True}
    ours = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 8, **options)
    assert ours[1].shape == (4, 15)
    out, lse = reference.attention(q, k, v, **expected)
    compare(ours, out, (q, k, v), lse)

    kv = torch.stack([k, v], dim=1).detach().requires_grad_()
    packed = flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 9, 8, **options)
    out, lse = reference.attention(q, *kv.unbind(1), **expected)
    compare(packed, out, (q, kv), lse)


@pytest.mark.parametrize("options, expected", OPTIONS)
def test_varlen_qkvpacked(options, expected):
    qkv, starts = randn(15, 3, 4, 8, grad=True), offsets(LENGTHS_Q, torch.int64)
    ours = flash_attn_varlen_qkvpacked_func(qkv, starts, 9, return_attn_probs=True, **options)
    out, lse = reference.attention(*qkv.unbind(1), cu_seqlens_q=starts, cu_seqlens_k=starts, **expected)
    compare(ours, out, (qkv,), lse)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_block_table(causal, monkeypatch):
    q, pages_k, pages_v = (
        randn(15, 4, 8, grad=True),
        randn(9, 3, 2, 8, grad=True),
        randn(9, 3, 2, 8, grad=True),
    )
    table = torch.tensor([[4, 0, 7], [2, -1, 99], [4, 6, 0], [99, 99, 99]], dtype=torch.int32)
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)

    def gather(pages):
        rows = [pages[table[b, : -(-n // 3)].long()].flatten(0, 1)[:n] for b, n in enumerate(LENGTHS_K)]
        return torch.cat(rows)

    ours = flash_attn_varlen_func(
        q, pages_k, pages_v, cu_q, cu_k, 9, 8, causal=causal, return_attn_probs=True, block_table=table
    )
    out, lse = reference.attention(
        q, gather(pages_k), gather(pages_v), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=causal
    )
    compare(ours, out, (q, pages_k, pages_v), lse)
    arguments = (q, pages_k, pages_v, cu_q, cu_k, 9, 8)
    with torch.no_grad(), monkeypatch.context() as patch:  # nothing is copied then
        patch.setattr(flash_attn_call, "gather_pages", None)
        read = flash_attn_varlen_func(*arguments, causal=causal, return_attn_probs=True, block_table=table)
    torch.testing.assert_close(read[0], ours[0])
    torch.testing.assert_close(read[1], ours[1])

    for bad, message in [(9, "block_table[0]=[4, 9, 7]"), (-1, "block_table[0]=[4, -1, 7]")]:
        wrong = table.clone()
        wrong[0, 1] = bad
        with pytest.raises(ValueError) as error:
            flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 9, 8, block_table=wrong)
        assert message in str(error.value)
    with pytest.raises(ValueError, match=r"block_table\.shape"):
        flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k[0], 9, 8, block_table=table)
    with pytest.raises(ValueError, match="holds 6 tokens, not 8"):
        flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 9, 8, block_table=table[:, :2])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout(causal, packed):
    """The weights that S_dmask shows are those that made the output, and flash-attn's sign rule holds."""
    if packed:
        q, k, v = randn(15, 4, 8, grad=True), randn(15, 2, 8, grad=True), randn(15, 2, 8, grad=True)
        cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
        where = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        arguments = (q, k, v, cu_q, cu_k, 9, 8)
        function, shape = flash_attn_varlen_func, (4, 4, 9, 8)
    else:
        q, k, v = randn(3, 6, 4, 8, grad=True), randn(3, 5, 2, 8, grad=True), randn(3, 5, 2, 8, grad=True)
        where, arguments, function, shape = {}, (q, k, v), flash_attn_func, (3, 4, 6, 5)
    slopes = torch.rand(shape[0], 4)
    torch.manual_seed(11)
    out, lse, s_dmask = function(
        *arguments, dropout_p=0.4, causal=causal, alibi_slopes=slopes, return_attn_probs=True
    )
    torch.manual_seed(11)
    seed = torch.randint(2**63 - 1, ())
    options = {"causal": causal, "alibi_slopes": slopes, **where}
    expected, expected_lse = reference.attention(q, k, v, dropout_p=0.4, dropout_seed=seed, **options)
    dout = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse.masked_fill(expected_lse == -INF, INF))
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected, (q, k, v), dout)
    ):
        torch.testing.assert_close(a, b)

    assert s_dmask.shape == shape and s_dmask.dtype == q.dtype
    keep = keep_mask(seed, 0.4, range(shape[0]), 4, 0, shape[2], 0, shape[3])
    assert (s_dmask[~keep] <= 0).all() and (s_dmask[keep] >= 0).all() and (s_dmask < 0).any()
    values = v.repeat_interleave(2, dim=-2)
    for n in range(shape[0]):
        rows_q = slice(cu_q[n], cu_q[n + 1]) if packed else n
        rows_k = slice(cu_k[n], cu_k[n + 1]) if packed else n
        kept = s_dmask[n].clamp(min=0) / (1 - rate(0.4))
        kept = kept[:, : out[rows_q].shape[0], : values[rows_k].shape[0]]
        torch.testing.assert_close((kept @ values[rows_k].transpose(0, 1)).transpose(0, 1), out[rows_q])


def test_half_precision_lse_is_float32():
    q, k, v = (torch.randn(2, 33, 4, 16).to(torch.bfloat16) for _ in range(3))
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    expected, expected_lse = reference.attention(q, k, v, causal=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)


def test_compiles_in_one_graph():
    qkv, starts = torch.randn(15, 3, 2, 8), offsets(LENGTHS_Q)

    def both(qkv):
        dense = flash_attn_qkvpacked_func(qkv[None], causal=True, return_attn_probs=True)
        return *dense, flash_attn_varlen_qkvpacked_func(qkv, starts, 9, causal=True)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(qkv)
    for a, b in zip(compiled, both(qkv)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda q: flash_attn_qkvpacked_func(q), "qkv.shape=(2, 3, 2, 8)"),
        (lambda q: flash_attn_kvpacked_func(q, q[:, :, None]), "kv.shape=(2, 3, 1, 2, 8)"),
        (lambda q: flash_attn_varlen_qkvpacked_func(q[:, :2], offsets([2]), 2), "qkv.shape=(2, 2, 2, 8)"),
        (lambda q: flash_attn_func(q, q, q, window_size=3), "window_size=3"),
        (lambda q: flash_attn_func(q, q, q, window_size=(1, 2, 3)), "window_size=(1, 2, 3)"),
        (lambda q: flash_attn_func(q, q, q, window_size=(1.5, 2)), "window_size=(1.5, 2)"),
        (lambda q: flash_attn_func(q, q, q, dropout_p=1.0), "dropout_p=1.0"),
        (lambda q: flash_attn_func(q, q, q, softmax_scale=float("nan")), "scale=nan"),
        (lambda q: flash_attn_func(q, q, q, softcap=float("nan")), "softcap=nan"),
        (lambda q: flash_attn_func(q, q, q, alibi_slopes=torch.ones(3)), "alibi_slopes.shape=(3,)"),
        (lambda q: flash_attn_func(q, q[:1], q[:1]), "key.shape[0]=1"),
        (lambda q: flash_attn_varlen_func(*[q[0]] * 3, offsets([2]), offsets([3]), 3, 3), "cu_seqlens_q"),
        (lambda q: flash_attn_varlen_func(*[q[0]] * 3, offsets([3]), offsets([3]), 2, 3), "max_seqlen_q=2"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError) as error:
        call(torch.randn(2, 3, 2, 8))
    assert message in str(error.value)


def test_a_tensor_is_asked_for():
    with pytest.raises(TypeError, match="qkv=list"):
        flash_attn_qkvpacked_func([1.0])
    for bad in (None, [0, 3]):
        with pytest.raises(TypeError, match="cu_seqlens_k"):
            flash_attn_varlen_func(*[torch.ones(3, 1, 8)] * 3, offsets([3]), bad, 3, 3)
