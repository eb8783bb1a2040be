"""Statistics of attention weights against the float64 reference, over every option that shapes them."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings, strategies as st
from torch import library
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise
import tilewise.nn
from tilewise import Aux, reference
from tilewise.autograd.functions import served_by
from tilewise.core.problem import Inputs, Options, describe
from tilewise.cpu.host import configs
from tilewise.cpu.host.arguments import Target
from tilewise.dispatch import plans
from tilewise.dispatch.statistics import NAMES, SERVES, Passes, table
from tilewise.testing import _rounding, compare

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EVERYTHING = Aux(
    lse=True, row_max=True, max_logit=True, entropy=True, column_sum=True, top_k=3, rows=(0, -1),
    block_sum=24, expected_distance=True,
)  # fmt: skip
SIZES = [1, 2, 7, 16, 31, 63, 130, 257, 600]  # around the edges of tiles


@st.composite
def requests(draw):
    column_sum = draw(st.sampled_from([False, True, "group"]))
    return Aux(
        lse=draw(st.booleans()),
        row_max=draw(st.booleans()),
        max_logit=draw(st.booleans()),
        entropy=draw(st.booleans()),
        column_sum=column_sum,
        last_rows=draw(st.sampled_from([None, 1, 20, 300])) if column_sum else None,
        top_k=draw(st.sampled_from([0, 1, 8, 64])),
        rows=draw(st.sampled_from([None, (0,), (-1, 0, -1)])),
        block_sum=draw(st.sampled_from([0, 1, 16, 50, 1000])),
        expected_distance=draw(st.booleans()),
    )


@st.composite
def problems(draw):
    """query, key and a random mixture of every option that shapes weights."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch, seqlen_q, seqlen_k = draw(st.integers(1, 2)), *(draw(st.sampled_from(SIZES)) for _ in "qk")
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, dtype = kv_heads * group, draw(st.sampled_from(DTYPES))
    head_dim = draw(st.sampled_from([1, 8, 17, 40]))
    options = {"causal": draw(st.booleans())}
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
        options["scale"] = draw(st.sampled_from([0.02, 1.0]))
    q, k = torch.randn(batch, seqlen_q, heads, head_dim), torch.randn(batch, seqlen_k, kv_heads, head_dim)
    return q.to(dtype), k.to(dtype), options


def hold(found, query, key, aux, of_forward=(), **options):
    """Every statistic within the error rule, and stricter: the formula in float32 (float64) sets the budget
    of all but those that have a forward's own error, which is held to the inputs' precision. Scores may be
    off by a rounding of the products that cancel in them."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    exact = reference.attention_statistics(query, key, aux, **options)
    baseline, of_inputs = (
        reference.attention_statistics(query, key, aux, dtype=d, **options) for d in (dtype, query.dtype)
    )
    scale = options.get("scale", query.shape[-1] ** -0.5)
    norms = [t.double().norm(dim=-1).max().item() if t.numel() else 0.0 for t in (query, key)]
    score = 1 + scale * norms[0] * norms[1]
    for name in NAMES:
        base = of_inputs if name in ("lse", "column_sum", "block_sum", *of_forward) else baseline
        results = [getattr(s, name) for s in (found, exact, base)]
        assert (results[0] is not None) == aux.asks(name), name
        if not aux.asks(name):
            continue
        if name == "top_k":
            hold_keys(query, key, aux, found.top_k, exact.top_k, score, options)
            results = [t.weights for t in results]
        report = compare(name, *results)
        size = max([1.0, *results[1][results[1].isfinite()].abs().flatten().tolist()])
        budget = max(report.max_budget, _rounding(dtype) * score * size)
        assert report.max_error <= budget, f"{report}, at most {budget:.2e} by scores"


def hold_keys(query, key, aux, found, exact, score, options):
    """The keys of the k largest weights, each once; of nearly equal weights either."""
    assert found.keys.shape == exact.keys.shape and found.keys.dtype == torch.int64
    assert torch.equal(found.keys == -1, exact.keys == -1)
    assert torch.equal(found.weights == 0, found.weights.masked_fill(found.keys == -1, 0) == 0)
    differ = found.keys != exact.keys
    tolerance = _rounding(found.weights.dtype) * score
    assert ((found.weights - exact.weights)[differ].abs() <= tolerance).all()
    ordered = found.keys.sort(-1).values
    assert ((ordered[..., 1:] > ordered[..., :-1]) | (ordered[..., 1:] == -1)).all(), "a key came twice"
    if "cu_seqlens_q" not in options and differ.any():
        every = Aux(rows=tuple(range(query.shape[1])))
        weights = reference.attention_statistics(query, key, every, **options).rows
        own = weights.gather(-1, found.keys.clamp(min=0))
        assert ((own - exact.weights)[differ].abs() <= tolerance).all(), "another key's weight"


@settings(max_examples=15)
@given(problems(), requests())
def test_every_mixture_of_options(problem, aux):
    query, key, options = problem
    found = tilewise.attention_statistics(query, key, aux, backend="tiled", **options)
    hold(found, query, key, aux, **options)


@settings(max_examples=3)  # each compiles a kernel
@given(problems(), requests())
def test_after_the_forward_that_is_fastest(problem, aux):
    query, key, options = problem
    hold(tilewise.attention_statistics(query, key, aux, **options), query, key, aux, **options)


@settings(max_examples=3)
@given(problems(), requests(), st.booleans())
def test_by_machine_code(problem, aux, is_alone):
    """On several threads, where heads are cut into parts; all at once, or one statistic alone."""
    query, key, options = problem
    names = [name for name in aux.names if name != "rows"]
    aux = aux.only(names[:1] if is_alone else names)
    hold(
        tilewise.attention_statistics(query, key, aux, backend="llvm", **options), query, key, aux, **options
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_tiles_by_machine_code(threads):
    """Chunks of several tiles, parts of several chunks, a window that skips blocks; empty and hidden rows."""
    q, k = torch.randn(1, 1000, 2, 8), torch.randn(1, 700, 1, 8)
    aux = Aux(row_max=True, entropy=True, column_sum=True, last_rows=900, block_sum=70, top_k=4)
    options = {"causal": True, "window": (300, None), "softcap": 5.0}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = tilewise.attention_statistics(q, k, aux, backend="llvm", **options)
    finally:
        torch.set_num_threads(before)
    hold(found, q, k, aux, **options)
    assert (found.row_max[:, :, :300] == float("-inf")).all() and not found.entropy[:, :, :300].any()


@pytest.mark.parametrize("size", [1, 50, 330, 3000])
def test_blocks_that_chunks_of_queries_share(size):
    """One head in several chunks on two threads: neighbours add to the same blocks, whatever their size."""
    q, k = torch.randn(1, 2100, 1, 8), torch.randn(1, 260, 1, 8)
    aux = Aux(block_sum=size)
    hold(tilewise.attention_statistics(q, k, aux, backend="llvm"), q, k, aux)


def passes(query, key, aux, **options):
    """The statistics that each second pass of a call gives, by backend."""
    plans.clear()
    tilewise.attention_statistics(query, key, aux, **options)
    entries = [e for e in plans.entries() if e.signature.direction == "statistics"]
    assert len(entries) <= 1
    found = {}
    for entry in entries:
        parts = entry.plan.plans if isinstance(entry.plan, Passes) else (entry.plan,)
        found |= {name: part.aux.names for name, part in zip(entry.backend.split(", "), parts, strict=True)}
    return found


def test_each_statistic_comes_from_the_first_backend_that_has_it():
    q = torch.randn(1, 40, 2, 8)
    assert passes(q, q, Aux(lse=True, max_logit=True, entropy=True)) == {}  # the forward has them
    found = passes(q, q, Aux(entropy=True, column_sum=True, last_rows=3, rows=(0,), top_k=1))
    assert found == {"llvm": ("column_sum", "top_k"), "tiled": ("rows",)}
    decoding = passes(q[:, :1], q, Aux(max_logit=True))  # few queries have a forward of their own
    assert decoding == {"llvm": ("max_logit",)}
    assert passes(q, q, Aux(entropy=True), backend="tiled") == {"tiled": ("entropy",)}


@pytest.mark.parametrize(("dtype", "gives"), [(torch.float32, True), (torch.float16, False)])
def test_a_forward_whose_scores_are_float16_s_gives_no_statistics(dtype, gives, monkeypatch):
    """AMX multiplies float16 as two bfloat16 terms, without the product of the small ones."""
    amx = Target("amx", 64, 8, "", "")
    monkeypatch.setattr(configs, "current_target", lambda: amx)
    q = torch.zeros(1, 300, 8, 16, dtype=dtype)
    config = configs.forward_config(
        describe(Inputs(q, q, q), Options()), Inputs(q, q, q), statistics=("entropy",)
    )
    assert config.terms > 1 and config.statistics == (("entropy",) if gives else ())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_forward_gives(dtype):
    """Maxima do not count sinks, entropies do; rows without keys, rows of one outcome; before dropout."""
    q, k = torch.randn(2, 150, 4, 24).to(dtype), torch.randn(2, 140, 2, 24).to(dtype)
    mask, aux = torch.rand(2, 1, 150, 140) > 0.2, Aux(row_max=True, max_logit=True, entropy=True)
    mask[:, :, 7] = False
    options = {"mask": mask, "sinks": torch.tensor([9.0, -9.0, 0.0, 40.0]), "causal": True}
    _, found = tilewise.attention(q, k, k, dropout_p=0.5, return_aux=aux, backend="llvm", **options)
    hold(found, q, k, aux, **options)
    assert (found.row_max[:, :, 7] == float("-inf")).all() and not found.entropy[:, :, 7].any()
    _, found = tilewise.attention(100 * q, k, k, return_aux=aux, backend="llvm")
    hold(found, 100 * q, k, aux)
    assert found.entropy.min() >= 0


@settings(max_examples=3)
@given(problems(), requests(), st.data())
def test_packed_sequences(problem, aux, data):
    query, key, options = problem
    query, key = query.flatten(0, 1), key.flatten(0, 1)
    batch = data.draw(st.integers(1, 3))

    def offsets(total):
        cuts = sorted(data.draw(st.lists(st.integers(0, total), min_size=batch - 1, max_size=batch - 1)))
        return torch.tensor([0, *cuts, total], dtype=torch.int32)

    cu_q, cu_k = offsets(len(query)), offsets(len(key))
    longest_q, longest_k = int(cu_q.diff().max()), int(cu_k.diff().max())
    for name in ("mask", "bias"):
        if name in options:
            shape = options[name].shape
            shape = (1, shape[1], *(1 if n == 1 else m for n, m in zip(shape[2:], (longest_q, longest_k))))
            options[name] = torch.randn(shape) > -0.5 if name == "mask" else torch.randn(shape)
    if options.get("alibi_slopes") is not None:
        options["alibi_slopes"] = options["alibi_slopes"].reshape(-1)[: query.shape[1]]
    options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    found = tilewise.attention_statistics(query, key, aux, **options)
    hold(found, query, key, aux, **options)
    value = torch.randn(len(key), key.shape[1], 1).to(key.dtype)  # of the kernel that is compiled already
    _, lse, again = tilewise.attention_varlen(query, key, value, return_lse=True, return_aux=aux, **options)
    if aux.entropy:
        torch.testing.assert_close(again.entropy, found.entropy, rtol=1e-4, atol=1e-4)
    assert not aux.lse or torch.equal(again.lse, lse)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_beside_the_output(layout):
    q, k, v = torch.randn(2, 50, 4, 16), torch.randn(2, 60, 2, 16), torch.randn(2, 60, 2, 8)
    given = [t.transpose(1, 2) if layout == "bhsd" else t for t in (q, k, v)]
    options = {"causal": True, "dropout_p": 0.5, "layout": layout}
    torch.manual_seed(3)
    plain = tilewise.attention(*given, **options)
    torch.manual_seed(3)
    out, lse, aux = tilewise.attention(*given, return_lse=True, return_aux=EVERYTHING, **options)
    assert torch.equal(out, plain) and torch.equal(lse, aux.lse)
    hold(aux, q, k, EVERYTHING, causal=True)  # of the weights before dropout
    out, aux = tilewise.attention(*given, layout=layout, return_aux=Aux(entropy=True))
    assert aux.lse is None and aux.entropy.shape == (2, 4, 50)


@pytest.mark.parametrize("is_paged", [False, True])
def test_of_a_cache(is_paged):
    lengths, new = (70, 13), 5
    q, keys = torch.randn(2, new, 4, 16), [torch.randn(n, 2, 16) for n in lengths]
    options = {"window": (40, None), "softcap": 4.0, "sinks": torch.randn(4), "alibi_slopes": torch.rand(4)}
    if is_paged:
        cache = tilewise.PagedKVCache(12, 16, 2, 16, dtype=torch.float32)
        sequences = [cache.allocate() for _ in lengths]
    else:
        cache = tilewise.KVCache(2, 96, 2, 16, dtype=torch.float32)
    if is_paged:
        for s, k in zip(sequences, keys):
            x = k[None, :-new]
            tilewise.attention_with_cache(x.repeat_interleave(2, 2), cache, x, x, batch=[s])
    else:
        for n, k in enumerate(keys):
            cache.key[n, : len(k) - new] = k[:-new]
        cache.lengths.copy_(torch.tensor(lengths) - new)
    last = torch.stack([k[-new:] for k in keys])
    _, aux = tilewise.attention_with_cache(q, cache, last, last, return_aux=EVERYTHING, **options)
    again = tilewise.attention_statistics(q, cache, EVERYTHING, causal=True, **options)
    capacity = aux.column_sum.shape[-1]
    assert capacity >= (80 if is_paged else 96) and aux.rows.shape == (2, 4, 2, capacity)
    for n, k in enumerate(keys):
        of_one = tilewise.Statistics(
            **{f.name: _entry(getattr(aux, f.name), n, len(k), f.name) for f in fields(aux)}
        )
        hold(of_one, q[n : n + 1], k[None], _without_max_logit(EVERYTHING), causal=True, **options)
        assert not aux.column_sum[n, :, len(k) :].any() and not aux.rows[n, :, :, len(k) :].any()
    for name in NAMES:
        for a, b in zip(_tensors(getattr(aux, name)), _tensors(getattr(again, name))):
            torch.testing.assert_close(a, b)


def _tensors(statistic):
    return (statistic,) if isinstance(statistic, torch.Tensor) else tuple(statistic)


def _without_max_logit(aux):
    return Aux(**{f.name: getattr(aux, f.name) for f in fields(aux) if f.name != "max_logit"})


def _entry(statistic, n, seqlen_k, name):
    """The part of one sequence, without the capacity beyond its keys."""
    if name == "max_logit":
        return None
    if name == "top_k":
        return type(statistic)(*(t[n : n + 1] for t in statistic))
    part = statistic[n : n + 1]
    if name in ("column_sum", "rows"):
        return part[..., :seqlen_k]
    return part[..., : -(-seqlen_k // EVERYTHING.block_sum)] if name == "block_sum" else part


def test_rows_that_see_nothing():
    mask = torch.ones(1, 1, 4, 6, dtype=torch.bool)
    mask[:, :, 1] = False
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 6, 2, 8)
    aux = tilewise.attention_statistics(q, k, EVERYTHING, mask=mask)
    assert (aux.lse[:, :, 1] == float("-inf")).all() and (aux.row_max[:, :, 1] == float("-inf")).all()
    assert not aux.entropy[:, :, 1].any() and not aux.expected_distance[:, :, 1].any()
    assert (aux.top_k.keys[:, :, 1] == -1).all() and not aux.top_k.weights[:, :, 1].any()
    assert (aux.argmax[:, :, 1] == -1).all() and (aux.argmax[:, :, 0] >= 0).all()
    assert aux.column_sum.sum(-1).round().eq(3).all()
    sinks = torch.randn(2)
    aux = tilewise.attention_statistics(q, k, EVERYTHING, mask=mask, sinks=sinks)
    assert torch.allclose(aux.lse[0, :, 1], sinks) and not aux.entropy[:, :, 1].any()  # one outcome: the sink


@pytest.mark.parametrize("shape", [(0, 3, 2), (1, 0, 2), (1, 3, 0)])
def test_nothing_at_all(shape):
    batch, seqlen, heads = shape
    q = torch.randn(batch, seqlen, heads, 8)
    aux = tilewise.attention_statistics(q, q, Aux(max_logit=True, entropy=True, top_k=2, block_sum=4))
    assert aux.max_logit.tolist() == [float("-inf")] * heads and aux.entropy.shape == (batch, heads, seqlen)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 5, 64])
def test_of_equal_scores_the_lower_key_comes_first(dtype, k):
    """Scores of a few small integers, so that many are equal, exactly so in every dtype."""
    q = torch.randint(-1, 2, (1, 40, 2, 4)).to(dtype)
    key = torch.randint(-1, 2, (1, 700, 1, 4)).to(dtype)
    aux = Aux(top_k=k)
    found, exact = (
        f(q, key, aux, causal=True, scale=0.5)
        for f in (tilewise.attention_statistics, reference.attention_statistics)
    )
    assert torch.equal(found.top_k.keys, exact.top_k.keys)


@pytest.mark.parametrize("backend", [None, "tiled"])
def test_maxima_show_a_score_that_is_no_number(backend):
    q, k = torch.randn(2, 1, 20, 2, 8)
    q[0, 3, 1, 5] = torch.nan
    aux = Aux(row_max=True, max_logit=True)
    _, watched = tilewise.attention(q, k, k, causal=True, return_aux=aux, backend=backend)
    for found in (watched, tilewise.attention_statistics(q, k, aux, causal=True, backend=backend)):
        assert found.row_max.isnan().nonzero().tolist() == [[0, 1, 3]]
        assert found.max_logit.isnan().tolist() == [False, True]


def test_huge_scores_keep_their_weights():
    """An lse of 1e4 has lost three digits of the weights; the residual has them."""
    q, k = 60 * torch.randn(1, 40, 1, 64), 60 * torch.randn(1, 50, 1, 64)
    k = k + 200
    aux = tilewise.attention_statistics(q, k, Aux(column_sum=True, rows=(3,)))
    torch.testing.assert_close(aux.column_sum.sum(-1), torch.tensor([[40.0]]), rtol=1e-5, atol=0)
    torch.testing.assert_close(aux.rows.sum(-1), torch.ones(1, 1, 1), rtol=1e-5, atol=0)


DIFFERENTIABLE = ("entropy", "column_sum", "expected_distance", "block_sum", "rows")


def _leaves(seqlen_q, seqlen_k, heads=4, kv_heads=2):
    shapes = ((1, seqlen_q, heads, 3), (1, seqlen_k, kv_heads, 3), (1, heads, 1, seqlen_k), (heads,))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("column_sum", [True, "group"])
def test_gradients(column_sum):
    mask = torch.rand(1, 1, 5, 7) > 0.3
    mask[:, :, 2] = False
    aux = Aux(
        entropy=True, column_sum=column_sum, last_rows=3, expected_distance=True, block_sum=2, rows=(1, -1)
    )

    def statistics(q, k, bias, sinks):
        options = {"bias": bias, "sinks": sinks, "mask": mask, "softcap": 2.0, "causal": True}
        out, lse, found = tilewise.attention(q, k, k, return_lse=True, return_aux=aux, **options)
        return out, lse, *(getattr(found, name) for name in DIFFERENTIABLE)

    assert torch.autograd.gradcheck(statistics, _leaves(5, 7))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_across_tiles(name):
    """Each alone, over several tiles of queries and keys, against autograd of the formula."""
    leaves = _leaves(300, 1100)
    request = {"rows": (0, 280, -1), "block_sum": 96}.get(name, True)
    aux = Aux(**{name: request})
    options = {"window": (700, 3), "softcap": 5.0}
    found, exact = (
        getattr(f(leaves[0], leaves[1], aux, bias=leaves[2], sinks=leaves[3], **options), name)
        for f in (tilewise.attention_statistics, reference.attention_statistics)
    )
    weight = torch.randn_like(exact)
    for a, b in zip(*(torch.autograd.grad((s * weight).sum(), leaves) for s in (found, exact))):
        torch.testing.assert_close(a, b)


def test_gradients_of_packed_and_float32():
    q, k = (torch.randn(90, 2, 8, requires_grad=True) for _ in range(2))
    starts = torch.tensor([0, 20, 20, 90])
    aux = Aux(entropy=True, column_sum=True, last_rows=4)
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
    losses = []
    for f in (tilewise.attention_statistics, reference.attention_statistics):
        found = f(q, k, aux, **options)
        losses.append(found.entropy.sum() + found.column_sum.square().sum())
    for a, b in zip(*(torch.autograd.grad(loss, (q, k)) for loss in losses)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_has_no_gradient_says_so():
    q = torch.randn(1, 9, 2, 8, requires_grad=True)
    aux = tilewise.attention_statistics(q, q, EVERYTHING)
    assert not aux.row_max.requires_grad and not aux.max_logit.requires_grad
    assert not aux.top_k.weights.requires_grad and aux.lse.requires_grad
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(aux.entropy.sum(), q, create_graph=True)


@pytest.mark.parametrize("aux", [EVERYTHING, Aux(entropy=True, column_sum=True)], ids=["all", "two"])
def test_is_the_same_from_run_to_run(aux):
    q = torch.randn(2, 300, 4, 32)
    first, second = (tilewise.attention_statistics(q, q, aux, causal=True) for _ in range(2))
    for name in aux.names:
        for a, b in zip(_tensors(getattr(first, name)), _tensors(getattr(second, name))):
            assert torch.equal(a, b), name


COMPILED = {
    "everything": Aux(
        lse=True, row_max=True, max_logit=True, entropy=True, column_sum="group", last_rows=3, top_k=2,
        rows=(0, -1), block_sum=4, expected_distance=True,
    ),
    "one": Aux(max_logit=True),
    "gradient": Aux(entropy=True, row_max=True),
}  # fmt: skip


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("aux", COMPILED.values(), ids=COMPILED)
def test_compiled_code_has_it_in_its_graph(aux, is_dynamic):
    """Statistics and all gradients, whether the loss takes statistics or not."""

    def measure(q, k, v, bias):
        out, found = tilewise.attention(q, k, v, causal=True, bias=bias, return_aux=aux)
        return [out, *(t for name in aux.names for t in _tensors(getattr(found, name)))]

    torch._dynamo.reset()
    compiled = torch.compile(measure, backend="aot_eager", fullgraph=True, dynamic=is_dynamic)
    for n in (20, 33):
        q, k, v = (torch.randn(2, n, heads, 16, requires_grad=True) for heads in (4, 2, 2))
        given = (q, k, v, torch.randn(1, 4, n, n, requires_grad=True))
        for last in (1, None):  # out alone, or statistics too
            answers = [f(*given) for f in (measure, compiled)]
            torch.testing.assert_close(*answers)
            assert [t.requires_grad for t in answers[0]] == [t.requires_grad for t in answers[1]]
            losses = (sum(t.cos().sum() for t in a[:last] if t.requires_grad) for a in answers)
            torch.testing.assert_close(*(torch.autograd.grad(loss, given) for loss in losses))
        with torch.no_grad():
            torch.testing.assert_close(measure(*given), compiled(*given))


def test_one_graph_serves_all_lengths():
    """Also those that are multiples of what is found first, 64."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    ask = Aux(max_logit=True)
    compiled = torch.compile(
        lambda q: tilewise.attention_statistics(q, q, ask).max_logit,
        backend=counter, fullgraph=True, dynamic=True,
    )  # fmt: skip
    graphs = []
    for n in (20, 64, 130):
        q = torch.randn(2, n, 4, 16)
        torch.testing.assert_close(compiled(q), tilewise.attention_statistics(q, q, ask).max_logit)
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1, graphs


def test_integers_of_numpy_may_be_asked_for_in_compiled_code():
    q, ask = torch.randn(1, 20, 2, 8), Aux(top_k=np.int64(2), column_sum=True, last_rows=np.int64(3))
    compiled = torch.compile(lambda q: tilewise.attention_statistics(q, q, ask).column_sum, backend="eager")
    torch.testing.assert_close(compiled(q), tilewise.attention_statistics(q, q, ask).column_sum)
    assert Aux(block_sum=np.int32(4)) == Aux(block_sum=4)


def test_compiled_calls_refuse_what_eager_calls_do():
    q = torch.randn(1, 20, 2, 8)
    compiled = torch.compile(lambda ask: tilewise.attention(q, q, q, return_aux=ask), backend="eager")
    with pytest.raises(TypeError, match=r"return_aux='entropy' must be a tilewise\.Aux"):
        compiled("entropy")
    compiled(Aux(entropy=True))
    with served_by(mock.Mock()), pytest.raises(NotImplementedError, match="context_parallel"):
        compiled(Aux(entropy=True))


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("aux", COMPILED.values(), ids=COMPILED)
def test_tensors_without_values_have_shapes_and_dtypes(kind, aux):
    def measure(device):
        """What shows of out, statistics and gradients."""
        q, k, v = (
            torch.zeros(2, 9, heads, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
            for heads in (4, 2, 2)
        )
        out, found = tilewise.attention(q, k, v, causal=True, return_aux=aux)
        tensors = [out, *(t for name in aux.names for t in _tensors(getattr(found, name)))]
        grads = torch.autograd.grad(sum(t.sum() for t in tensors if t.requires_grad), (q, k, v))
        return [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in (*tensors, *grads)]

    with FakeTensorMode() if kind == "fake" else contextlib.nullcontext():
        found = measure("meta" if kind == "meta" else "cpu")
    assert found == measure("cpu")


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_what_tensors_without_values_are_told(kind):
    device = "meta" if kind == "meta" else "cpu"
    with FakeTensorMode() if kind == "fake" else contextlib.nullcontext():
        cache = tilewise.KVCache(2, 32, 2, 8, dtype=torch.float32, device=device)
        q, starts = torch.zeros(2, 9, 2, 8, device=device), torch.tensor([0, 7, 9], device=device)
        _, found = tilewise.attention_with_cache(q, cache, q, q, return_aux=Aux(entropy=True))
        assert found.entropy.shape == (2, 2, 9)
        for wrong, error, message in (
            ({"window": (-1, 0)}, ValueError, "window"),
            ({"scale": True}, TypeError, "scale=True"),
            ({"return_aux": Aux(rows=(9,))}, ValueError, r"rows=\(9,\) must be in"),
            ({"backend": "hopper"}, NotImplementedError, "backend='hopper'"),
        ):
            with pytest.raises(error, match=message):
                tilewise.attention(q, q, q, **{"return_aux": Aux(entropy=True), **wrong})
        with pytest.raises(NotImplementedError, match="block_sum and rows of packed sequences"):
            tilewise.attention_varlen(q[0], q[0], q[0], starts, starts, return_aux=Aux(block_sum=4))


def test_while_another_thread_compiles(monkeypatch):
    """PyTorch says that it is compiling in all threads, also to those that run."""
    q, ask = torch.randn(1, 20, 2, 8), Aux(entropy=True)
    cache = tilewise.KVCache(1, 32, 2, 8, dtype=torch.float32)
    alone = tilewise.attention(q, q, q, causal=True, return_aux=ask)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    for out, found in (
        tilewise.attention(q, q, q, causal=True, return_aux=ask),
        tilewise.attention_with_cache(q, cache, q, q, return_aux=ask),
    ):
        torch.testing.assert_close((out, found.entropy), (alone[0], alone[1].entropy))


def test_compiled_packed_calls():
    """Only values tell how large sums of blocks are: those break the graph."""
    q, starts = torch.randn(20, 2, 8, requires_grad=True), torch.tensor([0, 7, 20])

    def measure(q, aux):
        out, found = tilewise.attention_varlen(q, q, q, starts, starts, return_aux=aux)
        return [out, *(t for name in aux.names for t in _tensors(getattr(found, name)))]

    few, blocks = Aux(entropy=True, column_sum=True, top_k=1), Aux(block_sum=4)
    whole = torch.compile(measure, backend="eager", fullgraph=True)
    torch.testing.assert_close(whole(q, few), measure(q, few))
    torch.testing.assert_close(torch.compile(measure, backend="eager")(q, blocks), measure(q, blocks))
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="block_sum or rows of packed sequences: fullgraph=False"
    ):
        whole(q, blocks)


@pytest.mark.parametrize("aux", COMPILED.values(), ids=COMPILED)
def test_operators_are_as_pytorch_wants_them(aux):
    given = Inputs(*(torch.randn(2, 10, 2, 8, requires_grad=True) for _ in range(3)))
    arguments = (*given, *Options(causal=True), *aux.scalars(), True, None)
    library.opcheck(torch.ops.tilewise.attention_statistics.default, arguments)
    assert Aux.of(aux.scalars()) == aux


def test_watched_calls_are_refused():
    q = torch.randn(1, 20, 2, 8)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda q: tilewise.attention_statistics(q, q, Aux(entropy=True)).entropy.sum())(q)

    def tangent(q):
        return torch.func.jvp(
            lambda q: tilewise.attention_statistics(q, q, Aux(entropy=True)).entropy, (q,), (q,)
        )

    for function in (tangent, torch.compile(tangent, backend="aot_eager")):
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            function(q)
    out, found = tilewise.attention(q.requires_grad_(), q, q, return_aux=Aux(entropy=True))
    for t in (out, found.entropy):
        with pytest.raises(NotImplementedError, match="takes no batched gradients"):
            torch.autograd.grad(t, q, torch.ones(3, *t.shape), is_grads_batched=True)


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"top_k": 65}, ValueError, "top_k=65 must be between 0 and 64"),
        ({"top_k": None}, TypeError, "top_k=None must be an integer"),
        ({"block_sum": None}, TypeError, "block_sum=None must be an integer"),
        ({"top_k": 2.0}, TypeError, "top_k=2.0 must be an integer"),
        ({"top_k": True}, TypeError, "top_k=True must be an integer"),
        ({"block_sum": -1}, ValueError, "block_sum=-1 must be between 0 and 4611686018427387904"),
        ({"block_sum": 2**63}, ValueError, "block_sum=9223372036854775808 must be between 0 and"),
        ({"entropy": "yes"}, TypeError, "entropy='yes' must be True or False"),
        ({"column_sum": "head"}, ValueError, "column_sum='head' must be True, False or 'group'"),
        ({"last_rows": 3}, ValueError, "last_rows=3 must be None without column_sum"),
        ({"last_rows": 0, "column_sum": True}, ValueError, "last_rows=0 must be at least 1"),
        ({"rows": 3}, TypeError, "rows=3 must be a tuple of integers"),
        ({"rows": ()}, ValueError, "rows=\\(\\) must name at least one query"),
    ],
)
def test_wrong_requests(request_, error, message):
    with pytest.raises(error, match=message):
        Aux(**request_)


def test_wrong_calls_leave_the_cache_as_it_was():
    q, cache = torch.randn(1, 3, 2, 8), tilewise.KVCache(1, 8, 2, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"rows=\(3,\) must be in \[-3, 3\)"):
        tilewise.attention_with_cache(q, cache, q, q, return_aux=Aux(rows=(3,)))
    with pytest.raises(TypeError, match=r"return_aux='entropy' must be a tilewise\.Aux"):
        tilewise.attention_with_cache(q, cache, q, q, return_aux="entropy")
    with pytest.raises(NotImplementedError, match=r"backend='aten' does not give entropy; .*'tiled'"):
        tilewise.attention(q, q, q, return_aux=Aux(entropy=True), backend="aten")
    assert cache.lengths.tolist() == [0]
    with pytest.raises(TypeError, match="did you mean causal"):
        tilewise.attention_statistics(q, q, Aux(), casual=True)
    with pytest.raises(ValueError, match="layout='xyz' must be"):
        tilewise.attention_statistics(q, cache, Aux(entropy=True), layout="xyz")
    with pytest.raises(ValueError, match="batch must be None"):
        tilewise.attention_statistics(q, q, Aux(entropy=True), batch=[0])


def test_the_table_names_every_statistic():
    assert set(SERVES["tiled"]) == set(NAMES) and all(served <= set(NAMES) for served in SERVES.values())
    assert all(f"`{name}`" in table() for name in NAMES)
    page = Path(__file__).parents[1] / "docs" / "statistics.md"
    assert f"begin -->\n{table()}\n<!-- statistics: end" in page.read_text()


def test_statistics_and_their_gradients_with_functions():
    q, k, v = (torch.randn(2, 37, 4, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    table = torch.randn(80, dtype=torch.float64, requires_grad=True)
    document = torch.randint(0, 3, (37,)).sort().values
    options = {
        "mask_mod": lambda b, h, i, j: (document[i] == document[j]) & (j <= i),
        "score_mod": lambda s, b, h, i, j: s * 0.5 + table[i - j + 37],
        "softcap": 3.0,
    }
    aux = Aux(entropy=True, column_sum=True, rows=(3, -1), block_sum=8, expected_distance=True, row_max=True)
    _, found = tilewise.attention(q, k, v, return_aux=aux, **options)
    expected = reference.attention_statistics(q, k, aux, **options)
    sums = []
    for answer in (found, expected):
        terms = (answer.entropy, answer.column_sum, answer.rows, answer.block_sum, answer.expected_distance)
        sums.append(sum((t.sin() * (n + 1)).sum() for n, t in enumerate(terms)))
    torch.testing.assert_close(found.row_max, expected.row_max)
    for name in aux.names:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-11, atol=1e-11)
    for a, b in zip(*(torch.autograd.grad(total, (q, k, table)) for total in sums)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    without_values = tilewise.attention_statistics(q, k, aux, **options)
    for name in aux.names:
        torch.testing.assert_close(getattr(without_values, name), getattr(found, name))
    cache = tilewise.KVCache(2, 40, 4, 16, dtype=torch.float64)
    cache.append(k.detach(), v.detach())  # positions in the sequence are those of the queries then
    with torch.no_grad():
        cached = tilewise.attention_statistics(q, cache, aux, **options)
    for name in aux.names:
        of_keys = name in ("column_sum", "rows")
        found_here = getattr(cached, name)[..., :37] if of_keys else getattr(cached, name)
        torch.testing.assert_close(found_here, getattr(found, name))


def test_a_backend_without_a_statistic_says_so_first():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(
        NotImplementedError, match=r"backend='aten' does not give entropy; .*'tiled' would serve"
    ):
        tilewise.attention_statistics(q, q, Aux(entropy=True), backend="aten")
    found, expected = (
        tilewise.attention_statistics(q, q, Aux(lse=True), backend=b).lse for b in ("aten", "tiled")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_packed", [False, True])
def test_of_a_layer(is_packed):
    layer = tilewise.nn.FlashAttention(32, 4, 2, causal=True, rope=1e4).eval()
    x = torch.randn(9, 32) if is_packed else torch.randn(1, 9, 32)
    call = {"cu_seqlens": torch.tensor([0, 4, 9])} if is_packed else {}
    out, aux = layer(x, return_aux=Aux(entropy=True), **call)
    assert torch.equal(out, layer(x, **call)) and aux.entropy.shape[-2:] == (4, 9)
    cache = layer.new_cache(1, 16)
    with torch.no_grad():
        rows = x[:4][None] if is_packed else x
        _, of_cache = layer(rows, cache, return_aux=Aux(entropy=True))
    torch.testing.assert_close(of_cache.entropy, aux.entropy[..., : rows.shape[1]].view_as(of_cache.entropy))
