"""The public functions against the float64 reference, over shapes, options and dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import tilewise
from tilewise import reference
from tilewise.flash_attn import flash_attn_func
from tilewise.testing import check_attention, compare

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@st.composite
def problems(draw):
    """A dense call with a random mixture of every option; sizes around tile edges and degenerate ones."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    size = st.sampled_from([1, 2, 3, 7, 16, 31, 63, 130])
    batch, seqlen_q, seqlen_k = draw(st.integers(1, 3)), draw(size), draw(size)
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    head_dim, head_dim_v = draw(st.sampled_from([1, 3, 8, 17, 40])), draw(st.sampled_from([1, 5, 8, 33]))
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(["bshd", "bhsd"]))

    def tensor(seqlen, h, d):
        shape = (batch, seqlen, h, d) if layout == "bshd" else (batch, h, seqlen, d)
        return torch.randn(shape).to(dtype)

    options = {"layout": layout, "causal": draw(st.booleans())}
    bound = st.one_of(st.none(), st.integers(0, 70))
    shapes = st.tuples(*(st.sampled_from([1, n]) for n in (batch, heads, seqlen_q, seqlen_k)))
    if draw(st.booleans()):
        options["window"] = (draw(bound), draw(bound))
    if draw(st.booleans()):
        options["mask"] = torch.rand(draw(shapes)) > 0.3
    if draw(st.booleans()):
        options["bias"] = torch.randn(draw(shapes))
    if draw(st.booleans()):
        options["alibi_slopes"] = 0.2 * torch.rand((heads,) if draw(st.booleans()) else (batch, heads))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 3.0, 30.0]))
    if draw(st.booleans()):
        options["sinks"] = torch.randn(heads)
    if draw(st.booleans()):
        options["dropout_p"] = draw(st.sampled_from([0.1, 0.5]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.02, 1.0]))
    qkv = (
        tensor(seqlen_q, heads, head_dim),
        tensor(seqlen_k, kv_heads, head_dim),
        tensor(seqlen_k, kv_heads, head_dim_v),
    )
    return qkv, options


@given(problems())
def test_every_mixture_of_options(problem):
    qkv, options = problem
    check_attention(*qkv, holds_mean=False, **options)


@given(problems(), st.data())
def test_packed_sequences(problem, data):
    (q, k, v), options = problem
    if options.pop("layout") == "bhsd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    batch = data.draw(st.integers(1, 4))

    def offsets(total):
        cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=batch - 1, max_size=batch - 1)))
        return torch.tensor([0, *cuts, total], dtype=torch.int32)

    cu_q, cu_k = offsets(len(q)), offsets(len(k))
    longest_q, longest_k = int(cu_q.diff().max()), int(cu_k.diff().max())
    for name, dtype in (("mask", torch.bool), ("bias", torch.float32)):
        if name in options:  # shaped for the longest sequence
            shape = [
                1 if n == 1 else m
                for n, m in zip(options[name].shape, (batch, q.shape[1], longest_q, longest_k))
            ]
            options[name] = (torch.rand(shape) > 0.3) if dtype is torch.bool else torch.randn(shape)
    if options.get("alibi_slopes") is not None:
        options["alibi_slopes"] = 0.2 * torch.rand(batch, q.shape[1])
    check_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, holds_mean=False, **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (100, None)},
        {"window": (64, 64)},
        {"softcap": 10.0},
        {"sinks": True},
        {"causal": True, "dropout_p": 0.2},
    ],
    ids=lambda o: "+".join(o) or "full",
)
def test_several_tiles_meet_the_error_rule(dtype, options):
    torch.manual_seed(len(options) + dtype.itemsize)
    q, k, v = torch.randn(1, 700, 4, 64), torch.randn(1, 777, 2, 64), torch.randn(1, 777, 2, 64)
    options = {name: torch.randn(4) if name == "sinks" else o for name, o in options.items()}
    check_attention(*(t.to(dtype) for t in (q, k, v)), **options)


@pytest.mark.parametrize(
    "backend, dtype",
    [
        ("llvm", torch.float32),
        ("tiled", torch.float32),
        ("aten", torch.float64),
    ],
)
def test_each_backend_by_name(backend, dtype):
    n = 600 if backend == "tiled" else 300  # two tiles of keys
    q, k, v = (torch.randn(2, n, 4, 32, dtype=dtype) for _ in range(3))
    for options in ({}, {"causal": True}, {"mask": torch.rand(2, 1, n, n) > 0.5}):
        check_attention(q, k, v, backend=backend, lse_gradient=backend != "aten", **options)


@pytest.mark.parametrize("backend", ["llvm", "aten", "tiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_of_float32_is_not_rounded_to_16_bits(dtype, backend):
    """Of which float16 would make infinity here, and bfloat16 steps of 512."""
    q, k, v = (torch.randn(1, 40, 2, 16, dtype=dtype) for _ in range(3))
    bias = 100000 + torch.randn(1, 2, 40, 40)
    out = tilewise.attention(q, k, v, bias=bias, backend=backend)
    expected = tilewise.attention(q.float(), k.float(), v.float(), bias=bias, backend="tiled")
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_aten_is_pytorchs_own(dtype):
    """Whose gradients exceed the error rule on some processors."""
    q, k, v = (torch.randn(2, 300, 4, 32, dtype=dtype, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    for options in ({}, {"causal": True}, {"mask": torch.rand(2, 1, 300, 300) > 0.5}):
        found = tilewise.attention(q, k, v, backend="aten", **options)
        bhsd = (t.transpose(1, 2) for t in (q, k, v))
        given = {"is_causal": options.get("causal", False), "attn_mask": options.get("mask")}
        expected = torch.nn.functional.scaled_dot_product_attention(*bhsd, **given).transpose(1, 2)
        torch.testing.assert_close(found, expected)
        grads, theirs = (torch.autograd.grad(out, (q, k, v), dout) for out in (found, expected))
        torch.testing.assert_close(grads, theirs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("head_dims", [(1, 1), (576, 512), (512, 576), (96, 64), (67, 3)])
def test_head_sizes(head_dims):
    head_dim, head_dim_v = head_dims
    q, k = torch.randn(1, 9, 2, head_dim), torch.randn(1, 11, 1, head_dim)
    check_attention(q, k, torch.randn(1, 11, 1, head_dim_v), causal=True)


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (1, 1, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_and_single_dimensions(shape, dtype):
    batch, seqlen_q, seqlen_k = shape
    q = torch.randn(batch, seqlen_q, 2, 8).to(dtype)
    k, v = (torch.randn(batch, seqlen_k, 2, 8).to(dtype) for _ in range(2))
    check_attention(q, k, v)
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and lse.shape == (batch, 2, seqlen_q)
    if seqlen_k == 0:
        assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize("shape", [(2, 4, 5, 1), (2, 4, 5, 0), (1, 1, 1, 1)])
@pytest.mark.parametrize("backend", [None, "tiled"])
def test_a_bias_where_there_are_no_keys_has_gradient_0(monkeypatch, backend, shape):
    backward_plan = pytest.importorskip("tilewise.cpu.host.backward_plan")
    monkeypatch.setattr(
        backward_plan, "new_large", lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype)
    )
    q, k = torch.randn(2, 5, 4, 8, requires_grad=True), torch.randn(2, 0, 2, 8)
    bias = torch.randn(shape, requires_grad=True)
    tilewise.attention(q, k, k, bias=bias, backend=backend).sum().backward()
    assert (q.grad == 0).all() and (bias.grad == 0).all()


def test_no_heads():
    x = torch.randn(2, 3, 0, 8)
    assert tilewise.attention(x, x, x).shape == (2, 3, 0, 8)
    key = torch.randn(2, 5, 1, 8)
    assert tilewise.attention(x, key, key).shape == (2, 3, 0, 8)


def test_strided_views_are_not_copied(monkeypatch):
    qkv = torch.randn(2, 50, 3, 4, 16)
    q, k, v = qkv.unbind(2)
    for t in (q, k, v):
        monkeypatch.setattr(type(t), "contiguous", _fail, raising=True)
        break
    out = tilewise.attention(q, k, v, backend="tiled")
    monkeypatch.undo()
    exact, _ = reference.attention(q, k, v)
    assert compare("out", out, exact, exact.float()).is_within
    x = torch.randn(2, 50, 16, 4).transpose(2, 3)  # last dimension not contiguous: served by a copy
    exact, _ = reference.attention(x, x, x)
    assert compare("out", tilewise.attention(x, x, x), exact, exact.float()).is_within


def _fail(*_args, **_kwargs):
    raise AssertionError("a contiguous copy was made")


def test_out_is_ordered_by_token():
    q = torch.randn(2, 4, 50, 16)
    out = tilewise.attention(q, q, q, layout="bhsd")
    assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (0, 0)}, {"sinks": torch.randn(2)}])
def test_rows_that_see_nothing(options):
    """More queries than keys: the first rows are empty. They give 0, -inf (or the sink) and no gradient."""
    q = torch.randn(1, 9, 2, 8, requires_grad=True)
    k = torch.randn(1, 4, 2, 8)
    out, lse = tilewise.attention(q, k, k, return_lse=True, **{"causal": True, **options})
    assert (out[:, :5] == 0).all()
    expected = options.get("sinks", torch.full((2,), float("-inf")))
    assert torch.equal(lse[0, :, :5], expected[:, None].expand(2, 5))
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert (dq[:, :5] == 0).all() and dq.isfinite().all()


def test_extreme_logits_give_no_nan():
    q, k, v = (torch.randn(1, 40, 2, 16) for _ in range(3))
    exact, _ = reference.attention(q * 1e4, k, v, scale=1.0)
    assert torch.allclose(tilewise.attention(q * 1e4, k, v, scale=1.0).double(), exact, atol=1e-5)
    hidden = torch.full((1, 1, 40, 40), -1e9)
    out = tilewise.attention(q, k, v, bias=hidden)
    assert out.isfinite().all()
    out, lse = tilewise.attention(q, k, v, mask=torch.zeros(1, 1, 40, 40, dtype=torch.bool), return_lse=True)
    assert (out == 0).all() and (lse == float("-inf")).all()
    out = tilewise.attention(q, k, v, bias=torch.full((1, 1, 40, 40), float("-inf")))
    assert (out == 0).all()


@pytest.mark.parametrize("backend", ["llvm", "aten", "tiled"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("n", [5, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_inf_propagate_as_in_standard_attention(dtype, n, bad, where, backend):
    qkv = [torch.randn(1, n, 2, 16).to(dtype) for _ in range(3)]
    qkv[1][0, :2, 1, 3] = torch.tensor([1.0, -1.0])  # an infinite query has scores of both signs
    qkv[where][0, n // 2, 1, 3] = bad
    q, k, v = (t.float().transpose(1, 2) for t in qkv)
    standard = torch.softmax(q @ k.mT / 4, -1) @ v
    out = tilewise.attention(*qkv, backend=backend).transpose(1, 2).float()
    assert torch.equal(out.isnan(), standard.isnan())
    assert torch.equal(out.isinf(), standard.isinf())
    finite, atol = standard.isfinite(), 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(out[finite], standard[finite], rtol=1e-4, atol=atol)


def test_same_seed_same_dropout():
    q = torch.randn(1, 64, 2, 16)
    runs = [
        tilewise.attention(q, q, q, dropout_p=0.5, generator=torch.Generator().manual_seed(s))
        for s in (1, 1, 2)
    ]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    torch.manual_seed(3)
    a = tilewise.attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(a, tilewise.attention(q, q, q, dropout_p=0.5))


def test_gradients_are_equal_bit_for_bit():
    q, k, v = (torch.randn(2, 600, 4, 64, requires_grad=True) for _ in range(3))
    runs = []
    for _ in range(3):
        out = tilewise.attention(q, k, v, causal=True, window=(300, None), deterministic=True)
        runs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


def test_the_longest_length_may_be_a_tensor():
    x, starts = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])
    found = tilewise.attention_varlen(x, x, x, starts, starts, starts.diff().max(), starts.diff().max())
    assert torch.equal(found, tilewise.attention_varlen(x, x, x, starts, starts, 4, 4))


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", ["llvm", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_mask_and_a_bias_that_are_broadcast_over_keys(backend, dtype):
    q, k, v = (torch.randn(2, n, h, 24).to(dtype) for n, h in ((150, 4), (230, 2), (230, 2)))
    for heads, rows in ((1, 150), (4, 1), (4, 150)):
        mask, bias = torch.rand(2, 1, 150, 1) > 0.3, 3 * torch.randn(1, heads, rows, 1)
        check_attention(q, k, v, mask=mask, backend=backend, holds_mean=False, causal=True)
        with torch.no_grad():
            out, lse = tilewise.attention(q, k, v, mask=mask, bias=bias, return_lse=True, backend=backend)
        for name, found, of in (("out", out, 0), ("lse", lse, 1)):
            exact, base = (
                reference.attention(q, k, v, mask=mask, bias=bias, dtype=d)[of]
                for d in (torch.float64, dtype)
            )
            assert compare(name, found, exact, base).is_within


@pytest.mark.parametrize("backend", [None, "tiled"])
def test_a_longest_length_beyond_all_memory(backend):
    """It is a bound: nothing is allocated for so many keys."""
    x, starts = torch.randn(10, 2, 8, requires_grad=True), torch.tensor([0, 4, 10])
    mask, found = torch.rand(1, 1, 10, 1) > 0.3, []
    for longest in (10, 2**40):
        out = tilewise.attention_varlen(x, x, x, starts, starts, 10, longest, mask=mask, backend=backend)
        found.append((out, *torch.autograd.grad(out.sum(), x)))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_windows_in_numpy_integers():
    q = torch.randn(1, 9, 2, 8)
    exact = tilewise.attention(q, q, q, window=(2, 1))
    left, right = np.int64(2), np.int32(1)
    assert torch.equal(tilewise.attention(q, q, q, window=(left, right)), exact)
    assert torch.equal(flash_attn_func(q, q, q, window_size=(left, right)), exact)


@pytest.mark.parametrize("options", [{}, {"causal": True, "sinks": torch.ones(4, device="meta")}])
def test_meta_tensors_have_shapes_and_gradients(options):
    q, k = (torch.empty(2, 9, heads, 8, device="meta", requires_grad=True) for heads in (4, 2))
    v = torch.empty(2, 9, 2, 5, device="meta")
    out, lse = tilewise.attention(q, k, v, return_lse=True, **options)
    assert out.is_meta and out.shape == (2, 9, 4, 5) and lse.shape == (2, 4, 9)
    (out.sum() + lse.sum()).backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape
    assert tilewise.attention(v, v, v, causal=True).shape == v.shape


@pytest.mark.parametrize("backend", ["llvm", "aten", "tiled"])
def test_a_mask_and_causality_that_together_leave_no_key(backend):
    q, k, v = (torch.randn(2, 5, 2, 8) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2, :3] = False
    out, lse = tilewise.attention(q, k, v, mask=mask, causal=True, return_lse=True, backend=backend)
    assert (out[:, 2] == 0).all() and out.isfinite().all()
    assert torch.equal(lse == float("-inf"), (torch.arange(5) == 2).expand_as(lse))


@pytest.mark.parametrize("backend", ["llvm", "tiled"])
def test_queries_whose_numbers_share_memory(backend):
    """PyTorch orders what is computed from them as it likes: dq of `tiled` was no view of its rows."""
    windows = torch.randn(40).as_strided((1, 1, 4, 16), (0, 0, 1, 1))
    k, v = (torch.randn(1, 5, 2, 16, requires_grad=True) for _ in range(2))
    grads = []
    for q in (windows.clone(memory_format=torch.contiguous_format), windows):
        out = tilewise.attention(q.requires_grad_(), k, v, backend=backend)
        grads.append(torch.autograd.grad(out.sum(), (q, k, v)))
    torch.testing.assert_close(*grads)
