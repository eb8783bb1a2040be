"""Bad input: one clear line that names the argument, its value and what is right; nothing corrupted."""

from __future__ import annotations

import inspect
import warnings

import numpy as np
import pytest
import torch

import tilewise
from tilewise import flash_attn, flex_attention
from tilewise.core.problem import Inputs, Options, describe
from tilewise.core.values import check_values
from tilewise.merge import merge
from tilewise.rotary import apply_rotary, rotary_tables


def x(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


Q, KV, BATCH_3 = x(2, 4, 6, 8), x(2, 5, 3, 8), x(3, 5, 3, 8)

NESTED = torch.nested.as_nested_tensor([x(3, 3, 8), x(5, 3, 8)], layout=torch.strided)
JAGGED = torch.nested.nested_tensor([x(3, 3, 8), x(5, 3, 8)], layout=torch.jagged)

ATTENTION = {
    "query is no tensor": (dict(query=[1.0]), TypeError, "query=list must be a torch.Tensor"),
    "rank": (dict(query=x(4, 6, 8)), ValueError, r"query.shape=(4, 6, 8) has 3 dimensions, must have 4"),
    "key rank": (dict(key=x(5, 8)), ValueError, "key.shape=(5, 8) has 2 dimensions, must have 4"),
    "batch": (dict(key=BATCH_3, value=BATCH_3), ValueError, "key.shape[0]=3 (batch) must equal query.shape[0]=2"),
    "head_dim": (dict(key=x(2, 5, 3, 9)), ValueError, "key.shape[-1]=9 (head_dim) must equal query.shape[-1]=8"),
    "head_dim 0": (dict(query=x(2, 4, 6, 0)), ValueError, "query.shape[-1]=0 (head_dim) must be between 1 and 576"),
    "head_dim 577": (dict(value=x(2, 5, 3, 577)), ValueError, "value.shape[-1]=577 (head_dim) must be between 1"),
    "value length": (dict(value=x(2, 4, 3, 8)), ValueError, "value.shape=(2, 4, 3, 8) must equal key.shape=(2, 5, 3, 8)"),
    "SDPA's order": (
        dict(query=x(2, 6, 128, 8), key=x(2, 3, 100, 8), value=x(2, 3, 100, 8)), ValueError,
        "query heads 128 must be divisible by KV heads 100; tensors (batch, heads, seqlen, head_dim) want layout='bhsd'",
    ),
    "padding mask": (
        dict(mask=x(2, 5).bool()), ValueError, "of padding (batch, seqlen_k) pass mask[:, None, None, :]",
    ),
    "heads": (dict(query=x(2, 4, 5, 8)), ValueError, "query heads 5 must be divisible by KV heads 3"),
    "no KV heads": (
        dict(key=x(2, 5, 0, 8), value=x(2, 5, 0, 8)), ValueError, "query heads 6 must be divisible by KV heads 0",
    ),
    "integers": (dict(query=Q.int()), TypeError, "query.dtype=torch.int32 must be float64, float32"),
    "mixed dtypes": (dict(key=KV.double()), TypeError, "key.dtype=torch.float64 must equal query.dtype=torch.float32"),
    "mixed devices": (dict(key=KV.to("meta")), ValueError, "key.device=meta must equal query.device=cpu"),
    "window": (dict(window=(-1, 0)), ValueError, "window=(-1, 0) must be (left, right), each None or an integer of at least 0: None is unbounded, as -1 is in flash-attn"),
    "window length": (dict(window=(1,)), ValueError, "window=(1,) must be (left, right)"),
    "window type": (dict(window=(1.5, 0)), ValueError, "window=(1.5, 0) must be (left, right)"),
    "sparse": (dict(query=Q.to_sparse()), TypeError, "query.layout=torch.sparse_coo must be torch.strided: pass to_dense"),
    "sparse mask": (dict(mask=x(4, 5).bool().to_sparse()), TypeError, "mask.layout=torch.sparse_coo must be torch.strided"),
    "sparse bias": (dict(bias=x(4, 5).to_sparse()), TypeError, "bias.layout=torch.sparse_coo must be torch.strided"),
    "array": (dict(sinks=np.zeros(6)), TypeError, "sinks=ndarray must be a torch.Tensor"),
    "nested": (dict(key=JAGGED), TypeError, "key is nested of layout=torch.jagged, must not be nested: attention_varlen takes"),
    "nested, padded": (dict(key=NESTED), TypeError, "key is nested of layout=torch.strided, must not be nested"),
    "generator": (dict(generator=3), TypeError, "generator=3 must be None or a torch.Generator"),
    "softcap": (dict(softcap=-1.0), ValueError, "softcap=-1.0 must be 0 (off) or a positive finite number"),
    "softcap nan": (dict(softcap=float("nan")), ValueError, "softcap=nan must be 0 (off) or a positive"),
    "softcap too small": (dict(softcap=1e-300), ValueError, "softcap=1e-300 must be 0 (off) or at least 1e-20"),
    "softcap too large": (dict(softcap=1e300), ValueError, "softcap=1e+300 must be at most 3.4e+38"),
    "scale too large": (dict(scale=-1e39), ValueError, "scale=-1e+39 must be at most 3.4e+38"),
    "scale of many bits": (dict(scale=10**400), ValueError, "scale=1000000000000000000000"),
    "softcap of many bits": (dict(softcap=10**400), ValueError, "softcap=1000000000000000000000"),
    "causal 2": (dict(causal=2), TypeError, "causal=2 must be True or False"),
    "causal nan": (dict(causal=float("nan")), TypeError, "causal=nan must be True or False"),
    "dropout 1": (dict(dropout_p=1.0), ValueError, "dropout_p=1.0 must be in [0, 1)"),
    "dropout negative": (dict(dropout_p=-0.1), ValueError, "dropout_p=-0.1 must be in [0, 1)"),
    "scale nan": (dict(scale=float("nan")), ValueError, "scale=nan must be a finite number"),
    "scale inf": (dict(scale=float("inf")), ValueError, "scale=inf must be a finite number"),
    "scale in a list": (dict(scale=[1.0]), TypeError, "scale=[1.0] must be a number"),
    "scale in a tensor": (dict(scale=torch.tensor(0.5)), TypeError, "scale=tensor(0.5000) must be a number"),
    "a tensor of many numbers": (dict(softcap=x(9, 9)), TypeError, "softcap=tensor([[0., 0., 0., 0., 0., 0., 0., 0., 0.], [0., "),
    "softcap True": (dict(softcap=True), TypeError, "softcap=True must be a number"),
    "scale True": (dict(scale=True), TypeError, "scale=True must be a number"),
    "softcap None": (dict(softcap=None), TypeError, "softcap=None must be a number"),
    "dropout in a string": (dict(dropout_p="0.1"), TypeError, "dropout_p='0.1' must be a number"),
    "causal in a string": (dict(causal="no"), TypeError, "causal='no' must be True or False"),
    "causal in a list": (dict(causal=[True]), TypeError, "causal=[True] must be True or False"),
    "deterministic": (dict(deterministic=[1]), TypeError, "deterministic=[1] must be True or False"),
    "precision in a list": (dict(precision=["ieee"]), TypeError, "precision=['ieee'] must be a string"),
    "backend in a list": (dict(backend=["tiled"]), TypeError, "backend=['tiled'] must be None or a string"),
    "precision": (dict(precision="fp16"), ValueError, "precision='fp16' must be 'ieee', 'tf32', 'fp8' or 'int8'"),
    "layout": (dict(layout="sbhd"), ValueError, "layout='sbhd' must be 'bshd' or 'bhsd'"),
    "backend": (dict(backend="cuda9"), ValueError, "backend='cuda9' must be None or one of"),
    "mask dtype": (dict(mask=x(2, 6, 4, 5)), TypeError, "mask.dtype=torch.float32 must be torch.bool"),
    "mask shape": (
        dict(mask=x(2, 6, 4, 6).bool()), ValueError, "mask.shape=(2, 6, 4, 6) must be broadcastable to (batch, heads",
    ),
    "mask rank": (dict(mask=x(1, 2, 6, 4, 5).bool()), ValueError, "mask.shape=(1, 2, 6, 4, 5) must be broadcastable"),
    "mask without heads": (
        dict(mask=x(2, 4, 5).bool()), ValueError, "(batch, heads, seqlen_q, seqlen_k)=(2, 6, 4, 5); of (batch, seqlen_q, seqlen_k) pass mask[:, None]",
    ),
    "mask function": (dict(mask=lambda b, h, i, j: j <= i), TypeError, "mask=function must be a torch.Tensor: pass a function as mask_mod"),
    "mask type": (dict(mask=[True]), TypeError, "mask=list must be a torch.Tensor"),
    "bias dtype": (dict(bias=x(4, 5).long()), TypeError, "bias.dtype=torch.int64 must be a floating-point dtype"),
    "bias in 8 bits": (dict(bias=x(4, 5).to(torch.float8_e5m2)), TypeError, "bias.dtype=torch.float8_e5m2 must be"),
    "bias shape": (dict(bias=x(3, 4, 5)), ValueError, "bias.shape=(3, 4, 5) must be broadcastable to"),
    "bias device": (dict(bias=x(4, 5).to("meta")), ValueError, "bias.device=meta must equal query.device=cpu"),
    "sinks": (dict(sinks=x(3)), ValueError, "sinks.shape=(3,) must be (heads,)=(6,)"),
    "slopes": (dict(alibi_slopes=x(2, 3)), ValueError, "alibi_slopes.shape=(2, 3) must be (heads,)=(6,) or"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name):
    change, error, message = ATTENTION[name]
    call = {"query": Q, "key": KV, "value": KV, **change}
    with pytest.raises(error) as caught:
        tilewise.attention(call.pop("query"), call.pop("key"), call.pop("value"), **call)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_autocast_casts_nothing_and_the_error_says_so():
    """As where rotary embedding has made query and key float32, and value comes from a product."""
    half = KV.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="as autocast does not"):
        tilewise.attention(Q, KV, half)
    with pytest.raises(TypeError, match=r"must equal query\.dtype=torch\.float32$"):
        tilewise.attention(Q, KV, half)


def test_a_mask_of_two_meanings_is_told_which_was_taken():
    """(batch, seqlen_k) is as large as (seqlen_q, seqlen_k)."""
    q, mask = torch.randn(5, 5, 2, 8), torch.eye(5).cumsum(0) > 0
    with pytest.warns(UserWarning, match=r"mask.shape=\(5, 5\) is taken as \(seqlen_q, seqlen_k\)"):
        out = tilewise.attention(q, q, q, mask=mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(tilewise.attention(q, q, q, mask=mask[None, None]), out)
        assert not torch.equal(tilewise.attention(q, q, q, mask=mask[:, None, None, :]), out)
        tilewise.attention(q[:3], q[:3], q[:3], mask=mask)


def test_a_backend_asked_for_by_name_refuses_and_names_what_serves():
    with pytest.raises(NotImplementedError, match=r"backend='aten' has no window; .*'tiled' would serve"):
        tilewise.attention(KV, KV, KV, window=(1, 1), backend="aten")
    bias = x(1, 1, 5, 5).requires_grad_()
    with pytest.raises(NotImplementedError, match="backend='aten' has no bias gradient"):
        tilewise.attention(KV, KV, KV, bias=bias, backend="aten")


T = torch.tensor
VARLEN = {
    "starts late": (dict(cu_seqlens_q=T([1, 6])), ValueError, "cu_seqlens_q=[1, ..., 6] must start at 0 and end at total=6"),
    "ends early": (dict(cu_seqlens_k=T([0, 5])), ValueError, "cu_seqlens_k=[0, ..., 5] must start at 0 and end at total=7"),
    "ends late": (dict(cu_seqlens_k=T([0, 9])), ValueError, "cu_seqlens_k=[0, ..., 9] must start at 0 and end at"),
    "decreases": (
        dict(cu_seqlens_q=T([0, 4, 3, 6]), cu_seqlens_k=T([0, 4, 5, 7])), ValueError,
        "cu_seqlens_q[2]=3 must be at least cu_seqlens_q[1]=4",
    ),
    "lengths differ": (dict(cu_seqlens_q=T([0, 3, 6])), ValueError, "cu_seqlens_k.shape=(2,) must equal cu_seqlens_q.shape=(3,)"),
    "float offsets": (dict(cu_seqlens_q=T([0.0, 6.0])), TypeError, "cu_seqlens_q.dtype=torch.float32 must be int32 or int64"),
    "no offsets": (dict(cu_seqlens_q=None), TypeError, "cu_seqlens_q=NoneType must be a torch.Tensor"),
    "offsets rank": (dict(cu_seqlens_q=T([[0, 6]])), ValueError, "cu_seqlens_q.shape=(1, 2) must be (batch + 1,)"),
    "float max_seqlen": (dict(max_seqlen_q=6.0), TypeError, "max_seqlen_q=6.0 must be an integer"),
    "max_seqlen": (dict(max_seqlen_q=5), ValueError, "max_seqlen_q=5 must be at least the longest sequence, 6"),
    "rank": (dict(query=x(1, 6, 2, 8)), ValueError, "query.shape=(1, 6, 2, 8) has 4 dimensions, must have 3"),
    "mask": (dict(mask=x(1, 1, 6, 3).bool()), ValueError, "mask.shape=(1, 1, 6, 3) must cover the longest sequence: (6, 7)"),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["llvm", "tiled", None])
@pytest.mark.parametrize("bound", [2**31, 2**33, 2**63, 2**64, 10**40])
def test_a_window_longer_than_any_sequence_is_none(backend, bound):
    query = torch.randn(1, 5, 2, 8, requires_grad=True)
    for window, same in (((bound, None), {}), ((bound, 0), {"causal": True}), ((None, bound), {})):
        found, expected = (
            tilewise.attention(query, query, query, backend=backend, **options)
            for options in ({"window": window}, same)
        )
        assert torch.equal(found, expected)
        assert torch.autograd.grad(found.sum(), query)[0].isfinite().all()


NUMBERS_OF_NUMPY = [
    {"scale": 1 / np.sqrt(16), "softcap": np.float64(3), "dropout_p": np.float64(0)},
    {"scale": np.float32(0.5)}, {"softcap": np.int32(3)}, {"window": (np.int64(2), None)},
    {"causal": np.True_}, {"deterministic": np.True_},
]  # fmt: skip


@pytest.mark.parametrize("options", NUMBERS_OF_NUMPY, ids=str)
def test_numbers_of_numpy_in_compiled_code(options):
    """Which has arrays for them. One of float64 is a constant of its graphs, others break them."""
    x = torch.randn(2, 1, 9, 2, 16)
    for fullgraph in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda q: tilewise.attention(q, q, q, **options), backend="aot_eager", fullgraph=fullgraph
        )
        if fullgraph and len(options) == 1:
            with pytest.raises(
                torch._dynamo.exc.Unsupported, match=r"of NumPy's torch\.\w+ is an array.*\(\)"
            ):
                compiled(x[0])
        else:
            for q in x:
                torch.testing.assert_close(compiled(q), tilewise.attention(q, q, q, **options))


@pytest.mark.parametrize("scale", [0.0, -0.2])
def test_a_scale_that_turns_scores_around(scale):
    """PyTorch's kernel masks first: minus infinity times 0 is no number."""
    query = torch.randn(1, 7, 1, 8)
    expected, _ = tilewise.reference.attention(query, query, query, causal=True, scale=scale)
    for backend in ("llvm", "tiled", None):
        found = tilewise.attention(query, query, query, causal=True, scale=scale, backend=backend)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="backend='aten' masks before it scales"):
        tilewise.attention(query, query, query, causal=True, scale=scale, backend="aten")


@pytest.mark.parametrize("backend", ["llvm", "aten", "tiled", None])
def test_flags_may_be_integers(backend):
    query = torch.randn(1, 5, 2, 8)
    tilewise.attention(query, query, query, causal=1, backend=backend)
    tilewise.attention(query, query, query, causal=np.True_, backend=backend)
    with pytest.raises(TypeError, match=r"sinks=ndarray must be a torch\.Tensor"):  # after an equal call
        tilewise.attention(query, query, query, causal=1, sinks=np.zeros(2), backend=backend)
    assert describe(Inputs(query, query, query), Options(causal=1)).causal is True


def test_a_longest_sequence_beyond_all_tokens():
    query, starts = torch.randn(6, 2, 8), T([0, 2, 6])
    for backend in ("llvm", "tiled"):
        found = tilewise.attention_varlen(query, query, query, starts, starts, 2**64, 2**64, backend=backend)
        expected = tilewise.attention_varlen(query, query, query, starts, starts, backend=backend)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", VARLEN)
def test_varlen(name):
    change, error, message = VARLEN[name]
    call = {
        "query": x(6, 2, 8),
        "key": x(7, 2, 8),
        "cu_seqlens_q": T([0, 6]),
        "cu_seqlens_k": T([0, 7]),
    } | change
    names = ("query", "key", "key", "cu_seqlens_q", "cu_seqlens_k")
    options = {name: option for name, option in call.items() if name not in names}
    with pytest.raises(error) as caught:
        tilewise.attention_varlen(*(call[name] for name in names), **options)
    assert message in str(caught.value)


def new_cache(filled=6):
    cache = tilewise.KVCache(2, 8, 3, 4, dtype=torch.float32)
    cache.append(torch.randn(2, filled, 3, 4), torch.randn(2, filled, 3, 4))
    return cache


CACHE = {
    "overflow": (dict(key=x(2, 3, 3, 4), value=x(2, 3, 3, 4)), ValueError, "key.shape[1]=3 new tokens do not fit: a sequence holds 6 of max_seqlen=8"),
    "batch": (dict(key=x(1, 1, 3, 4), value=x(1, 1, 3, 4)), ValueError, "key.shape=(1, 1, 3, 4) must be (2, new_tokens, 3, 4) for this cache"),
    "by head": (
        dict(key=x(2, 3, 1, 4), value=x(2, 3, 1, 4)), ValueError,
        "for this cache; (batch, heads, new_tokens, dim) wants layout='bhsd', or transpose(1, 2)",
    ),
    "tokens": (dict(key=x(2, 1, 3, 4), value=x(2, 2, 3, 4)), ValueError, "value.shape[1]=2 (new tokens) must equal key.shape[1]=1"),
    "dtype": (dict(key=x(2, 1, 3, 4).double(), value=x(2, 1, 3, 4)), TypeError, "key.dtype=torch.float64 must equal the cache's dtype"),
    "only a key": (dict(key=x(2, 1, 3, 4)), TypeError, "value=NoneType must be a torch.Tensor"),
    "gradient": (dict(key=x(2, 1, 3, 4).requires_grad_(), value=x(2, 1, 3, 4)), ValueError, "key.requires_grad=True must be False: a cache keeps no history, call under torch.no_grad()"),
    "query": (dict(query=x(2, 1, 3, 5), key=x(2, 1, 3, 4), value=x(2, 1, 3, 4)), ValueError, "key.shape[-1]=4 (head_dim) must equal query.shape[-1]=5"),
    "option": (dict(softcap=-1.0, key=x(2, 1, 3, 4), value=x(2, 1, 3, 4)), ValueError, "softcap=-1.0"),
    "precision": (dict(precision="fp16"), ValueError, "precision='fp16' must be 'ieee', 'tf32', 'fp8' or 'int8'"),
    "layout": (dict(layout="no"), ValueError, "layout='no'"),
    "backend": (dict(backend="no", key=x(2, 1, 3, 4), value=x(2, 1, 3, 4)), ValueError, "backend='no'"),
    "refusal": (dict(backend="aten", key=x(2, 1, 3, 4), value=x(2, 1, 3, 4)), NotImplementedError, "backend='aten' has no caches"),
    "no cache": (dict(cache=3), TypeError, "cache=int must be a tilewise.KVCache"),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHE)
def test_cache_is_unchanged(name):
    change, error, message = CACHE[name]
    cache = new_cache()
    before = [t.clone() for t in (cache.key, cache.value, cache.lengths)]
    call = {"query": x(2, 1, 3, 4), "cache": cache, **change}
    with pytest.raises(error) as caught:
        tilewise.attention_with_cache(call.pop("query"), call.pop("cache"), **call)
    assert message in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, (cache.key, cache.value, cache.lengths)))


@pytest.mark.parametrize(
    "bad", [dict(batch=-1), dict(head_dim=0), dict(max_seqlen=2.5), dict(dtype=torch.int8)]
)
def test_cache_sizes(bad):
    sizes = dict(batch=1, max_seqlen=4, num_kv_heads=1, head_dim=4, dtype=torch.float32) | bad
    name = next(iter(bad))
    with pytest.raises((ValueError, TypeError), match=f"{name}="):
        tilewise.KVCache(**sizes)


PAGED = {
    "page too large": (
        dict(page_table=T([[0, 5], [1, 2]])),
        "page_table[0]=[0, 5] must index pages in [0, 5)",
    ),
    "page negative": (
        dict(page_table=T([[0, -1], [1, 2]])),
        "page_table[0]=[0, -1] must index pages in [0, 5)",
    ),
    "length": (
        dict(seqlens_k=T([9, 1])),
        "seqlens_k[0]=9 must satisfy 0 <= leftpad <= length <= capacity=8: these are the cache's lengths",
    ),
    "leftpad": (dict(leftpad_k=T([0, 3])), "leftpad_k[1]=3, seqlens_k[1]=2 must satisfy"),
    "table shape": (dict(page_table=T([0, 1])), "page_table.shape=(2,) must be (batch=2, pages a sequence)"),
    "no lengths": (dict(seqlens_k=None), "seqlens_k=None must give each sequence's length"),
    "lengths shape": (dict(seqlens_k=T([1, 2, 3])), "seqlens_k.shape=(3,) must be (batch,)=(2,)"),
}


@pytest.mark.parametrize("name", PAGED)
def test_pages(name):
    change, message = PAGED[name]
    tensors = {"page_table": T([[0, 4], [1, 2]]), "seqlens_k": T([7, 2])} | change
    inputs = Inputs(x(2, 1, 2, 8), x(5, 4, 2, 8), x(5, 4, 2, 8), **tensors)
    with pytest.raises(ValueError) as caught:
        check_values(describe(inputs, Options()), inputs, Options())
    assert message in str(caught.value)


def test_left_padding_wants_lengths():
    inputs = Inputs(x(2, 1, 2, 8), x(2, 4, 2, 8), x(2, 4, 2, 8), leftpad_k=T([0, 3]))
    with pytest.raises(ValueError, match="seqlens_k=None must give each sequence's length"):
        describe(inputs, Options())


def test_unused_page_entries_may_hold_anything():
    inputs = Inputs(
        x(1, 1, 2, 8), x(5, 4, 2, 8), x(5, 4, 2, 8), page_table=T([[3, -1, 99]]), seqlens_k=T([4])
    )
    check_values(describe(inputs, Options()), inputs, Options())


CACHE_OF_ONE = tilewise.PagedKVCache(2, 16, 1, 4, dtype=torch.float32)
ELSEWHERE = {
    "layer width": (lambda: tilewise.nn.FlashAttention("16", 2), ValueError, "d_model='16' must be an integer"),
    "layer heads": (lambda: tilewise.nn.FlashAttention(16, 2.5), ValueError, "num_heads=2.5 must be an integer"),
    "layer dropout": (lambda: tilewise.nn.FlashAttention(16, 2, dropout=None), TypeError, "dropout=None must be a number"),
    "layer base": (lambda: tilewise.nn.FlashAttention(16, 2, rope="x"), TypeError, "rope='x' must be a number"),
    "layer base True": (lambda: tilewise.nn.FlashAttention(16, 2, rope=True), TypeError, "rope=True must be a number"),
    "flash-attn causal for scale": (lambda: flash_attn.flash_attn_func(KV, KV, KV, 0.1, True), TypeError, "softmax_scale=True must be a number"),
    "paged by head": (
        lambda: CACHE_OF_ONE.append(x(2, 1, 3, 4), x(2, 1, 3, 4)), ValueError, "wants layout='bhsd'",
    ),
    "reference": (lambda: tilewise.reference.attention(KV, KV, KV, casual=True), TypeError, "casual=True is no argument of attention: did you mean causal?"),
    "layer input": (lambda: tilewise.nn.FlashAttention(16, 2)(None), TypeError, "x=NoneType must be a torch.Tensor"),
    "warmup": (lambda: tilewise.warmup(Q, None, KV), TypeError, "key=NoneType must be a torch.Tensor"),
    "warmup dtype": (lambda: tilewise.warmup(Q.int(), KV, KV), TypeError, "query.dtype=torch.int32 must be float64"),
    "rotary dtype": (lambda: rotary_tables(T([0]), 8, dtype=3), TypeError, "dtype=3 must be a floating-point dtype"),
    "rotary rank": (lambda: apply_rotary(T(1.0), x(4, 4), x(4, 4)), ValueError, "x.shape=() must be (..., seqlen"),
    "parts": (lambda: merge(T([1, 2])), ValueError, "parts=tensor([1, 2]) must hold at least one (out, lse)"),
    "part": (lambda: merge([3]), TypeError, "parts[0]=3 must be a tuple (out, lse)"),
    "lse flag": (lambda: tilewise.attention(KV, KV, KV, return_lse=Q), TypeError, "return_lse=tensor("),
    "flash-attn flag": (lambda: flash_attn.flash_attn_func(KV, KV, KV, return_attn_probs=Q), TypeError, "return_attn_probs=tensor("),
    "flash-attn held": (
        lambda: flash_attn.flash_attn_with_kvcache(KV, KV, KV, cache_seqlens=2**63), ValueError,
        "cache_seqlens=9223372036854775808 must be between 0 and the capacity 5",
    ),
    "positions": (lambda: rotary_tables([0, 1], 8), TypeError, "positions=list must be a torch.Tensor"),
    "rotary size": (lambda: rotary_tables(T([0]), "8"), TypeError, "rotary_dim='8' must be a number"),
    "rotary input": (lambda: apply_rotary([1.0], Q, Q), TypeError, "x=list must be a torch.Tensor"),
    "sequence": (lambda: CACHE_OF_ONE.free([0]), ValueError, "sequence=[0] is not in the cache"),
    "into": (lambda: CACHE_OF_ONE.reserve([], [], into=3), TypeError, "into=3 must be None or what reserve() returned"),
    "page size": (lambda: tilewise.PagedKVCache(2, x(2), 1, 4, dtype=torch.float32), ValueError, "page_size=tensor([0., 0.])"),
    "longest": (
        lambda: tilewise.attention_varlen(x(6, 2, 8), x(7, 2, 8), x(7, 2, 8), T([0, 6]), T([0, 7]), T([6, 6])), TypeError,
        "max_seqlen_q=tensor([6, 6]) must be an integer",
    ),
    "flash-attn scale": (lambda: flash_attn.flash_attn_func(KV, KV, KV, 0.0, "1"), TypeError, "softmax_scale='1' must be a number"),
    "flash-attn length": (
        lambda: flash_attn.flash_attn_varlen_func(*[x(6, 2, 8)] * 3, T([0, 6]), T([0, 6]), T([6, 6]), 6), TypeError,
        "max_seqlen_q=tensor([6, 6]) must be an integer",
    ),
    "flash-attn tables": (
        lambda: flash_attn.flash_attn_with_kvcache(KV, KV, KV, KV[:, :0], KV[:, :0], T(1.0), T(1.0), 5), ValueError,
        "rotary_cos.shape=() and rotary_sin.shape=() must both be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE)
def test_elsewhere(name):
    call, error, message = ELSEWHERE[name]
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_explain_refuses_what_the_call_would():
    with pytest.raises(ValueError, match="softcap=-1"):
        tilewise.explain(KV, KV, KV, softcap=-1)


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_with_cache", "explain"])
def test_a_misspelt_option_is_told_which_was_meant(name):
    function = getattr(tilewise, name)
    arguments = {"attention_varlen": [KV] * 5, "attention_with_cache": [KV, None]}.get(name, [KV] * 3)
    of = "attention" if name == "explain" else name
    with pytest.raises(TypeError, match=f"sofcap=1 is no argument of {of}: did you mean softcap"):
        function(*arguments, sofcap=1)
    with pytest.raises(TypeError, match=f"^zzz=1 is no argument of {of}: it has query, "):
        function(*arguments, zzz=1)


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        ("attention", "softmax_scale", "did you mean scale?"),
        ("attention", "is_causal", "did you mean causal (bottom-right aligned)?"),
        ("attention", "window_size", "did you mean window, (left, right) with None for unbounded?"),
        ("attention", "sliding_window", "did you mean window, (keys before, keys after) each query?"),
        ("attention", "logits_soft_cap", "did you mean softcap?"),
        ("attention", "attn_mask", "did you mean mask (True = attend), or bias for additive scores?"),
        ("attention", "attention_mask", "did you mean mask (True = attend)"),
        ("attention", "key_padding_mask", "did you mean mask, as mask[:, None, None, :] with True = attend?"),
        ("attention_with_cache", "k", "did you mean key?"),
        ("attention", "s_aux", "did you mean sinks?"),
        ("attention", "enable_gqa", "leave it out, as key and value may always have fewer heads"),
        (
            "attention",
            "cu_seqlens",
            "packed sequences are attention_varlen's, with cu_seqlens_q and cu_seqlens_k",
        ),
        (
            "attention_with_cache",
            "cu_seqlens",
            "packed sequences are attention_varlen's, with cu_seqlens_q and cu_seqlens_k, or cache.reserve's",
        ),
        ("attention_varlen", "cu_seqlens", "did you mean cu_seqlens_q?"),
        ("attention_with_cache", "rotary_cosine", "did you mean rotary_cos?"),
    ],
)
def test_a_name_from_elsewhere_is_told_the_name_here(function, name, hint):
    arguments = {"attention_varlen": [KV] * 5, "attention_with_cache": [KV, None]}.get(function, [KV] * 3)
    with pytest.raises(TypeError) as caught:
        getattr(tilewise, function)(*arguments, **{name: 1})
    assert str(caught.value).startswith(f"{name}=1 is no argument of {function}: {hint}")


def test_drop_ins_tell_which_option_was_meant():
    faces = [
        tilewise.scaled_dot_product_attention,
        flex_attention.flex_attention,
        flex_attention.create_block_mask,
    ]
    for module in (tilewise.flash_attn, tilewise.flash_attn_3):
        faces += [getattr(module, name) for name in module.__all__]
    for face in faces:
        options = list(inspect.signature(face).parameters.values())[:-1]
        required = [None for p in options if p.default is p.empty]
        name = options[-1].name
        with pytest.raises(
            TypeError, match=f"^{name}s=1 is no argument of {face.__name__}: did you mean {name}.$"
        ):
            face(*required, **{f"{name}s": 1})


@pytest.mark.parametrize(
    ("face", "name", "meant"),
    [
        (tilewise.scaled_dot_product_attention, "casual", "is_causal"),
        (tilewise.scaled_dot_product_attention, "causal", "is_causal"),
        (tilewise.scaled_dot_product_attention, "mask", "attn_mask"),
        (tilewise.scaled_dot_product_attention, "softmax_scale", "scale"),
        (tilewise.flash_attn.flash_attn_func, "casual", "causal"),
        (tilewise.flash_attn_3.flash_attn_func, "scale", "softmax_scale"),
        (tilewise.flash_attn_3.flash_attn_func, "sliding_window", "window_size"),
        (flex_attention.flex_attention, "mask_mod", "block_mask"),
    ],
)  # fmt: skip
def test_drop_ins_have_names_of_their_own(face, name, meant):
    with pytest.raises(TypeError) as caught:
        face(KV, KV, KV, **{name: 1})
    assert str(caught.value) == f"{name}=1 is no argument of {face.__name__}: did you mean {meant}?"


def test_a_misspelt_option_in_compiled_code():
    for fullgraph in (True, False):
        call = torch.compile(tilewise.attention, fullgraph=fullgraph, backend="aot_eager")
        with pytest.raises(Exception, match=r"casual.* is no argument of attention: did you mean causal"):
            call(KV, KV, KV, casual=True)


def test_offsets_on_a_gpu_are_read_again_only_if_something_changed(monkeypatch):
    """Reading them waits for the GPU. A problem says where it is; its tensors may be anywhere."""
    from dataclasses import replace

    from tilewise.core import values

    q, k, starts = torch.ones(6, 2, 8), torch.ones(9, 2, 8), torch.tensor([0, 2, 6])
    ends = torch.tensor([0, 3, 9])
    reads, read = [], values._check_cu_seqlens
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        values, "_check_cu_seqlens", lambda *arguments: reads.append(arguments[0]) or read(*arguments)
    )

    def check(cu_seqlens_q=starts, cu_seqlens_k=ends, **options):
        inputs = Inputs(q, k, k, cu_seqlens_q, cu_seqlens_k)
        problem = replace(describe(inputs, Options(**options)), device_type="cuda")
        reads.clear()
        values.check_values(problem, inputs, Options(**options))
        return len(reads)

    assert [check() for _ in range(3)] == [2, 0, 0]
    assert [check(max_seqlen_q=4), check(max_seqlen_q=4), check()] == [2, 0, 2]
    assert check(cu_seqlens_k=ends.clone()) == 2
    ends[1] = 4
    assert [check(), check()] == [2, 0]
    starts[1] = 7
    for _ in range(2):
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            check()
    starts[1] = 2
    with torch.inference_mode():
        unversioned = torch.tensor([0, 2, 6])
    assert [check(unversioned) for _ in range(2)] == [2, 2]
