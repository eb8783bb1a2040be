"""The oracle against plain softmax attention and autograd, and its backward against its forward."""

import pytest
import torch

from tilewise import reference, testing
from tilewise.testing import check_attention, compare

OPTIONS = [
    {},
    {"causal": True},
    {"window": (3, 1)},
    {"softcap": 1.5, "scale": 0.7},
    {"sinks": "sinks"},
    {"bias": "bias"},
    {"alibi_slopes": "slopes", "causal": True},
    {"mask": "mask", "bias": "bias", "sinks": "sinks", "softcap": 2.0, "dropout_p": 0.3},
]


def plain(q, k, v, *, visible=None, bias=None, softcap=0.0, scale=None, sinks=None):
    """Softmax attention on (batch, seqlen, heads, dim), written with torch.softmax."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s if bias is None else s + bias
    s = s if visible is None else s.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1)
    p = p if sinks is None else p[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", p, v), torch.logsumexp(s, -1)


def draw(seqlen_q=5, seqlen_k=7):
    torch.manual_seed(torch.initial_seed() % 1000 + 1)
    q = torch.randn(2, seqlen_q, 4, 6, dtype=torch.float64)
    k = torch.randn(2, seqlen_k, 2, 6, dtype=torch.float64)
    v = torch.randn(2, seqlen_k, 2, 3, dtype=torch.float64)
    return q, k, v


@pytest.mark.parametrize("name", ["full", "causal", "window", "softcap", "bias", "sinks", "alibi"])
def test_forward_is_softmax_attention(name):
    q, k, v = draw()
    i, j = torch.arange(5)[:, None] + 2, torch.arange(7)
    bias, sinks, slopes = torch.randn(2, 4, 5, 7).double(), torch.randn(4).double(), torch.rand(4).double()
    ours, theirs = {
        "full": ({}, {}),
        "causal": ({"causal": True}, {"visible": j <= i}),
        "window": ({"window": (2, 1)}, {"visible": (j >= i - 2) & (j <= i + 1)}),
        "softcap": ({"softcap": 0.8, "scale": 0.3}, {"softcap": 0.8, "scale": 0.3}),
        "bias": ({"bias": bias}, {"bias": bias}),
        "sinks": ({"sinks": sinks}, {"sinks": sinks}),
        "alibi": ({"alibi_slopes": slopes}, {"bias": -slopes[:, None, None] * (i - j).abs()}),
    }[name]
    out, lse = reference.attention(q, k, v, **ours)
    expected_out, expected_lse = plain(q, k, v, **theirs)
    torch.testing.assert_close(out, expected_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "full")
def test_backward_is_the_derivative_of_forward(options):
    q, k, v = (t.requires_grad_() for t in draw())
    named = {
        "sinks": torch.randn(4, dtype=torch.float64, requires_grad=True),
        "bias": torch.randn(1, 4, 5, 7, dtype=torch.float64, requires_grad=True),
        "slopes": torch.rand(4, dtype=torch.float64),
        "mask": torch.rand(2, 1, 5, 7) > 0.4,
    }
    options = {name: named.get(o, o) if isinstance(o, str) else o for name, o in options.items()}
    options |= {"dropout_seed": torch.tensor(7), "cu_seqlens_q": None, "cu_seqlens_k": None}
    out, lse = reference.attention(q, k, v, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    leaves = {"query": q, "key": k, "value": v}
    leaves |= {name: options[name] for name in ("bias", "sinks") if name in options}
    expected = torch.autograd.grad((out, lse), tuple(leaves.values()), (dout, dlse))
    found = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    for name, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(getattr(found, name), gradient, rtol=1e-10, atol=1e-11)


def test_a_row_that_sees_nothing():
    q, k, v = draw(seqlen_q=5, seqlen_k=3)
    out, lse = reference.attention(q, k, v, causal=True)
    assert (out[:, :2] == 0).all() and (lse[:, :, :2] == float("-inf")).all()
    assert out[:, 2:].isfinite().all() and lse[:, :, 2:].isfinite().all()
    sinks = torch.randn(4, dtype=torch.float64)
    out, lse = reference.attention(q, k, v, causal=True, sinks=sinks)
    assert (out[:, :2] == 0).all()
    torch.testing.assert_close(lse[:, :, 0], sinks.expand(2, 4))


def test_packed_is_each_sequence_alone():
    q, k, v = (torch.randn(9, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    cu_q, cu_k = torch.tensor([0, 2, 2, 9]), torch.tensor([0, 4, 6, 9])
    out, lse = reference.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    for q0, q1, k0, k1 in [(0, 2, 0, 4), (2, 9, 6, 9)]:
        own_out, own_lse = reference.attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], causal=True)
        torch.testing.assert_close(out[q0:q1], own_out[0])
        torch.testing.assert_close(lse[:, q0:q1], own_lse[0])


def test_unknown_options_are_refused():
    q, k, v = draw()
    with pytest.raises(TypeError, match="casual"):
        reference.attention(q, k, v, casual=True)


# ---- what `tilewise.testing` finds


def test_a_baseline_that_overflows_allows_no_error():
    exact = torch.linspace(1, 2, 50, dtype=torch.float64)
    found, baseline = exact.float(), exact.float()
    baseline[7] = float("inf")
    assert compare("x", found, exact, baseline).is_within
    found[3] += 1e-3
    assert not compare("x", found, exact, baseline).is_within


def test_a_gradient_that_is_missing_is_an_error(monkeypatch):
    x, bias = torch.randn(1, 5, 2, 8), torch.randn(1, 1, 5, 5)
    assert len(check_attention(x, x, x, bias=bias)) == 6
    attention = testing.attention
    monkeypatch.setattr(testing, "attention", lambda *a, bias, **b: attention(*a, bias=bias.detach(), **b))
    with pytest.raises(RuntimeError, match="not have been used"):
        check_attention(x, x, x, bias=bias)
