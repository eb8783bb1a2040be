import inspect

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.flash_attn_3 import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

INF = float("inf")
REQUIRED = inspect.Parameter.empty
DESCALE = [("q_descale", None), ("k_descale", None), ("v_descale", None)]
SIGNATURES = {  # of hopper/flash_attn_interface.py
    flash_attn_qkvpacked_func: [
        ("qkv", REQUIRED), ("softmax_scale", None), ("causal", False), *DESCALE, ("window_size", (-1, -1)),
        ("attention_chunk", 0), ("softcap", 0.0), ("deterministic", False), ("num_heads_q", None),
        ("sm_margin", 0), ("return_attn_probs", False),
    ],
    flash_attn_func: [
        ("q", REQUIRED), ("k", REQUIRED), ("v", REQUIRED), ("softmax_scale", None), ("causal", False),
        ("qv", None), *DESCALE, ("window_size", (-1, -1)), ("attention_chunk", 0), ("softcap", 0.0),
        ("num_splits", 1), ("pack_gqa", None), ("deterministic", False), ("sm_margin", 0),
        ("return_attn_probs", False),
    ],
    flash_attn_varlen_func: [
        ("q", REQUIRED), ("k", REQUIRED), ("v", REQUIRED), ("cu_seqlens_q", REQUIRED),
        ("cu_seqlens_k", REQUIRED), ("max_seqlen_q", REQUIRED), ("max_seqlen_k", REQUIRED),
        ("seqused_q", None), ("seqused_k", None), ("softmax_scale", None), ("causal", False), ("qv", None),
        *DESCALE, ("window_size", (-1, -1)), ("attention_chunk", 0), ("softcap", 0.0), ("num_splits", 1),
        ("pack_gqa", None), ("deterministic", False), ("sm_margin", 0), ("return_attn_probs", False),
    ],
    flash_attn_with_kvcache: [
        ("q", REQUIRED), ("k_cache", REQUIRED), ("v_cache", REQUIRED), ("k", None), ("v", None), ("qv", None),
        ("rotary_cos", None), ("rotary_sin", None), ("cache_seqlens", None), ("cache_batch_idx", None),
        ("cache_leftpad", None), ("page_table", None), ("cu_seqlens_q", None), ("cu_seqlens_k_new", None),
        ("max_seqlen_q", None), ("rotary_seqlens", None), *DESCALE, ("softmax_scale", None),
        ("causal", False), ("window_size", (-1, -1)), ("attention_chunk", 0), ("softcap", 0.0),
        ("rotary_interleaved", True), ("scheduler_metadata", None), ("num_splits", 0), ("pack_gqa", None),
        ("sm_margin", 0), ("return_softmax_lse", False),
    ],
    flash_attn_combine: [
        ("out_partial", REQUIRED), ("lse_partial", REQUIRED), ("out", None), ("out_dtype", None),
    ],
    get_scheduler_metadata: [
        ("batch_size", REQUIRED), ("max_seqlen_q", REQUIRED), ("max_seqlen_k", REQUIRED),
        ("num_heads_q", REQUIRED), ("num_heads_kv", REQUIRED), ("headdim", REQUIRED),
        ("cache_seqlens", REQUIRED), ("qkv_dtype", torch.bfloat16), ("headdim_v", None),
        ("cu_seqlens_q", None), ("cu_seqlens_k_new", None), ("cache_leftpad", None), ("page_size", None),
        ("max_seqlen_k_new", 0), ("causal", False), ("window_size", (-1, -1)), ("attention_chunk", 0),
        ("has_softcap", False), ("num_splits", 0), ("pack_gqa", None), ("sm_margin", 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signature(function):
    *parameters, unknown = inspect.signature(function).parameters.values()
    assert unknown.kind is inspect.Parameter.VAR_KEYWORD  # refused with what was meant
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[function]
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
    assert getattr(tilewise.flash_attn_3, function.__name__) is function


def randn(*shape, grad=False):
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


OPTIONS = [
    ({}, {}),
    ({"causal": True, "deterministic": True}, {"causal": True}),
    ({"window_size": (3, -1), "num_splits": 4, "pack_gqa": False}, {"window": (3, None)}),
    ({"window_size": (4, 2), "causal": True, "sm_margin": 8}, {"window": (4, 2), "causal": True}),
    ({"softcap": 2.0, "softmax_scale": 0.7}, {"softcap": 2.0, "scale": 0.7}),
]


def compare(ours, theirs, inputs):
    """out and lse, and the gradients of out."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    dout = torch.randn_like(ours[0])
    for a, b in zip(torch.autograd.grad(ours[0], inputs, dout), torch.autograd.grad(theirs[0], inputs, dout)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(7, 7), (4, 9), (9, 4)])
@pytest.mark.parametrize("options, expected", OPTIONS)
def test_dense(seqlen_q, seqlen_k, options, expected):
    q, k, v = (
        randn(2, n, h, d, grad=True) for n, h, d in [(seqlen_q, 4, 8), (seqlen_k, 2, 8), (seqlen_k, 2, 5)]
    )
    ours = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    compare(ours, reference.attention(q, k, v, **expected), (q, k, v))
    out = flash_attn_func(q, k, v, **options)
    assert isinstance(out, torch.Tensor) and torch.equal(out, ours[0])
    if seqlen_q > seqlen_k and options.get("causal"):
        empty = seqlen_q - seqlen_k
        assert not out[:, :empty].any() and (ours[1][..., :empty] == -INF).all()


@pytest.mark.parametrize("options, expected", [OPTIONS[0], OPTIONS[1], OPTIONS[4]])
def test_qkvpacked(options, expected):
    options = {**options, "return_attn_probs": True}
    qkv = randn(2, 9, 3, 4, 8, grad=True)
    ours = flash_attn_qkvpacked_func(qkv, **options)
    compare(ours, reference.attention(*qkv.unbind(2), **expected), (qkv,))
    qkv = randn(2, 9, 8, 8, grad=True)
    ours = flash_attn_qkvpacked_func(qkv, num_heads_q=4, **options)
    compare(ours, reference.attention(*qkv.split([4, 2, 2], dim=2), **expected), (qkv,))


CU_Q = torch.tensor([0, 5, 5, 14, 15], dtype=torch.int32)
CU_K = torch.tensor([0, 8, 11, 15, 15], dtype=torch.int32)


def packed():
    return randn(15, 4, 8, grad=True), randn(15, 2, 8, grad=True), randn(15, 2, 5, grad=True)


@pytest.mark.parametrize("options, expected", OPTIONS)
def test_varlen(options, expected):
    q, k, v = packed()
    ours = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 9, 8, return_attn_probs=True, **options)
    assert ours[1].shape == (4, 15)
    theirs = reference.attention(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, **expected)
    compare(ours, theirs, (q, k, v))


@pytest.mark.parametrize("used_q", [None, [5, 0, 4, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("used_k", [None, [3, 3, 0, 0]])
@pytest.mark.parametrize("options, expected", OPTIONS)
def test_varlen_used(used_q, used_k, options, expected):
    """Rows behind the used ones are not seen and get no result; causal aligns the used ends."""
    q, k, v = packed()
    ours = flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, 9, 8,
        None if used_q is None else torch.tensor(used_q, dtype=torch.int32),
        None if used_k is None else torch.tensor(used_k),
        return_attn_probs=True, **options,
    )  # fmt: skip
    outs, lses = [torch.zeros(0, 4, 5)], [torch.zeros(4, 0)]
    for b in range(4):
        q0, q1, k0, k1 = *CU_Q[b : b + 2].tolist(), *CU_K[b : b + 2].tolist()
        stop_q = q1 if used_q is None else q0 + used_q[b]
        stop_k = k1 if used_k is None else k0 + used_k[b]
        parts = q[None, q0:stop_q], k[None, k0:stop_k], v[None, k0:stop_k]
        out, lse = reference.attention(*parts, **expected)
        outs += [out[0], out.new_zeros(q1 - stop_q, 4, 5)]
        lses += [lse[0], lse.new_full((4, q1 - stop_q), -INF)]
    compare(ours, (torch.cat(outs), torch.cat(lses, dim=1)), (q, k, v))


def refused(error, message, function, *arguments, **options):
    with pytest.raises(error) as raised:
        function(*arguments, **options)
    assert message in str(raised.value)


def eight_bit(*shape):
    """float8_e4m3fn numbers, and the same in float64."""
    t = torch.randn(*shape).to(torch.float8_e4m3fn)
    return t, t.double()


@pytest.mark.parametrize("given", ["none", "k", "all"])
def test_eight_bits(given):
    """Scores and values times each sequence's and KV head's factors."""
    (q, q64), (k, k64), (v, v64) = eight_bit(2, 3, 4, 8), eight_bit(2, 5, 2, 8), eight_bit(2, 5, 2, 6)
    ones = torch.ones(2, 2)
    q_scale, k_scale, v_scale = (
        torch.rand(2, 2) + 0.5 if given == "all" or given == name else ones for name in "qkv"
    )
    wide = q_scale.double().repeat_interleave(2, 1)[:, None, :, None]
    exact = reference.attention(
        q64 * wide, k64 * k_scale[:, None, :, None], v64 * v_scale[:, None, :, None], causal=True
    )
    scales = {f"{name}_descale": t for name, t in zip("qkv", (q_scale, k_scale, v_scale)) if t is not ones}
    out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **scales)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), exact[1], rtol=2e-2, atol=2e-2)
    starts = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 10])
    flat = (t.flatten(0, 1) for t in (q, k, v))
    packed = flash_attn_varlen_func(*flat, *starts, 3, 5, causal=True, **scales)
    torch.testing.assert_close(packed.double(), exact[0].flatten(0, 1), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_eight_bit_products_where_a_kernel_has_them(causal, monkeypatch):
    """As FlashAttention-3 computes: the numbers as they stand, weights rounded to a sixteenth."""
    monkeypatch.setattr("tilewise.faces.fp8.has_kernels", lambda problem: True)
    (q, q64), (k, k64), (v, v64) = (
        eight_bit(2, 150, 4, 64),
        eight_bit(2, 200, 2, 64),
        eight_bit(2, 200, 2, 40),
    )
    scales = {f"{name}_descale": torch.rand(2, 2) + 0.5 for name in "qkv"}
    scales["k_descale"][0, 1], scales["q_descale"][1, 0], scales["v_descale"][1] = (
        -0.7,
        0,
        torch.tensor([-2.0, 0]),
    )
    q64, k64, v64 = (
        t * scale.double().repeat_interleave(t.shape[2] // 2, 1)[:, None, :, None]
        for t, scale in zip((q64, k64, v64), scales.values())
    )
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True, **scales)
    exact, exact_lse = reference.attention(q64, k64, v64, causal=causal)
    bound, _ = reference.attention(q64, k64, v64.abs(), causal=causal)
    assert out[1, :, 2:].eq(0).all()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-5)
    assert ((out - exact).abs() <= bound / 16 + exact.abs() / 256 + bound.amax() * 2**-18).all()
    assert (out - exact).square().mean() > 1e-4 * exact.square().mean()  # rounded they are
    starts = torch.tensor([0, 150, 300]), torch.tensor([0, 200, 400])
    flat = (t.flatten(0, 1) for t in (q, k, v))
    packed = flash_attn_varlen_func(*flat, *starts, 150, 200, causal=causal, **scales)
    assert torch.equal(packed, out.flatten(0, 1))


def test_eight_bits_that_do_not_fit():
    q, (f, _), scale = torch.ones(1, 3, 2, 8), eight_bit(1, 3, 2, 8), torch.ones(1, 2)
    refused(
        ValueError, "q_descale must be None: q is torch.float32", flash_attn_func, q, q, q, q_descale=scale
    )
    refused(ValueError, "k_descale.shape=(1, 3)", flash_attn_func, f, f, f, k_descale=torch.ones(1, 3))
    refused(TypeError, "v_descale must be a float32", flash_attn_func, f, f, f, v_descale=scale.double())
    refused(TypeError, "k is torch.float32", flash_attn_func, f, q, q)
    heads = "query heads 3 must be divisible by KV heads 2"
    refused(ValueError, heads, flash_attn_func, eight_bit(1, 3, 3, 8)[0], f, f, q_descale=scale)
    refused(ValueError, "query.shape=(3, 2, 8)", flash_attn_func, f[0], f, f, q_descale=scale)
    refused(TypeError, "k is NoneType", flash_attn_func, f, None, f, q_descale=scale)
    refused(NotImplementedError, "qv must be None", flash_attn_func, f, f, f, qv=f)


def test_the_longest_length_may_be_a_tensor():
    x, starts = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])
    longest = starts.diff().max()
    found = flash_attn_varlen_func(x, x, x, starts, starts, longest, longest)
    assert torch.equal(found, flash_attn_varlen_func(x, x, x, starts, starts, 4, 4))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_qv_adds_scores_with_the_values(scale):
    q, k, v, qv = randn(1, 3, 4, 8), randn(1, 5, 2, 8), randn(1, 5, 2, 6), randn(1, 3, 4, 6)
    tensors = [t.requires_grad_() for t in (q, k, v, qv)]
    keys, values = (t.repeat_interleave(2, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) + torch.einsum("bihd,bjhd->bhij", qv, values)
    weights = torch.softmax(scores * (14**-0.5 if scale is None else scale), -1)
    expected = torch.einsum("bhij,bjhd->bihd", weights, values)
    out = flash_attn_func(q, k, v, scale, qv=qv)
    torch.testing.assert_close(out, expected)
    grad = randn(*out.shape)
    for ours, exact in zip(
        torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad)
    ):
        torch.testing.assert_close(ours, exact)
    starts = torch.tensor([0, 3]), torch.tensor([0, 5])
    packed = flash_attn_varlen_func(q[0], k[0], v[0], *starts, 3, 5, softmax_scale=scale, qv=qv[0])
    torch.testing.assert_close(packed, expected[0])


def test_errors():
    q, starts = torch.ones(1, 3, 2, 8), torch.tensor([0, 3])
    refused(ValueError, "qv of shape (1, 3, 2, 7)", flash_attn_func, q, q, q, qv=torch.ones(1, 3, 2, 7))
    refused(ValueError, "window_size=None", flash_attn_func, q, q, q, window_size=None)
    refused(ValueError, "qkv.shape=(1, 3, 2, 2, 8)", flash_attn_qkvpacked_func, torch.ones(1, 3, 2, 2, 8))
    refused(ValueError, "num_heads_q=None", flash_attn_qkvpacked_func, torch.ones(1, 3, 6, 8))
    refused(ValueError, "num_heads_q=3", flash_attn_qkvpacked_func, torch.ones(1, 3, 6, 8), num_heads_q=3)

    def varlen(**used):
        return flash_attn_varlen_func(q[0], q[0], q[0], starts, starts, 3, 3, **used)

    refused(ValueError, "seqused_q[0]=4", varlen, seqused_q=torch.tensor([4]))
    refused(ValueError, "seqused_k[0]=-1", varlen, seqused_k=torch.tensor([-1]))
    refused(ValueError, "seqused_k must be a (batch,)=(1,)", varlen, seqused_k=torch.tensor([1, 1]))
    refused(TypeError, "seqused_k.dtype=torch.float32", varlen, seqused_k=torch.tensor([1.0]))


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_combine_parts_of_the_keys(out_dtype):
    """Three parts, of which a query sees one, two or none; in the layout that flash-attn has."""
    q, k, v = randn(2, 3, 4, 8), randn(2, 9, 2, 8), randn(2, 9, 2, 5)
    mask = torch.rand(2, 4, 3, 9) < 0.5
    mask[:, :, 1] = False
    mask[..., :4] &= torch.arange(4)[:, None, None] != 2
    cuts = [slice(0, 4), slice(4, 5), slice(5, 9)]
    parts = [tilewise.attention(q, k[:, c], v[:, c], mask=mask[..., c], return_lse=True) for c in cuts]
    outs, lses = (torch.stack(t) for t in zip(*parts))
    out, lse = flash_attn_combine(outs, lses.transpose(-1, -2), out_dtype=out_dtype)
    expected, expected_lse = reference.attention(q, k, v, mask=mask, dtype=torch.float64)
    assert out.dtype == (out_dtype or torch.float64)
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if out_dtype else {}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(lse, expected_lse.transpose(1, 2))
    place = torch.empty_like(out)
    assert flash_attn_combine(outs, lses.transpose(-1, -2), place, out_dtype)[0] is place
    assert torch.equal(place, out)


def test_combine_refuses_what_does_not_fit():
    out, lse = torch.zeros(2, 1, 3, 4, 8), torch.zeros(2, 1, 3, 4)
    with pytest.raises(ValueError, match=r"lse_partial\.shape=\(2, 1, 4, 3\) must be \(parts, batch"):
        flash_attn_combine(out, lse.transpose(-1, -2))
    with pytest.raises(ValueError, match=r"out of shape \(1, 3, 4, 8\) and torch.float32 must be .*bfloat16"):
        flash_attn_combine(out, lse, torch.empty(1, 3, 4, 8), torch.bfloat16)


def test_scheduler_metadata_is_what_the_call_takes():
    q, cache, held = randn(1, 1, 2, 8), randn(1, 6, 2, 8), torch.tensor([5])
    metadata = get_scheduler_metadata(1, 1, 6, 2, 2, 8, held)
    out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=held, scheduler_metadata=metadata)
    torch.testing.assert_close(out, tilewise.attention(q, cache[:, :5], cache[:, :5]))


def test_windows_may_be_tensors():
    q, k, v = randn(1, 7, 2, 8), randn(1, 9, 2, 8), randn(1, 9, 2, 8)
    expected = flash_attn_func(q, k, v, window_size=(3, -1))
    parts = (torch.tensor(3), torch.tensor([-1], dtype=torch.int32))
    for window in (parts, torch.tensor([3, -1])):
        assert torch.equal(flash_attn_func(q, k, v, window_size=window), expected)
    both, whole = torch.tensor([1, 2]), torch.tensor(2.0)
    for bad in ((whole, -1), (both, -1), whole, both[:1], both.float(), both[None]):
        with pytest.raises(ValueError, match="window_size="):
            flash_attn_func(q, k, v, window_size=bad)
