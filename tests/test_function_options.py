"""Functions that say what options say are served as the options: the same plan, results and gradients."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import tilewise
from tilewise.dispatch import plans
from tilewise.flex_attention import create_block_mask, flex_attention, noop_mask
from tilewise.testing import check_attention

FEW = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
BIAS = torch.randn(2, 4, 50, 50)
DOCUMENTS = torch.arange(50) // 12
AHEAD = {  # spellings of j <= i + c
    "j <= i + c": lambda i, j, c: j <= i + c,
    "i >= j - c": lambda i, j, c: i >= j - c,
    "i + c >= j": lambda i, j, c: c + i >= j,
    "i - j >= -c": lambda i, j, c: i - j >= -c,
    "j - i < c + 1": lambda i, j, c: j - i < c + 1,
    "not j > i + c": lambda i, j, c: ~(j > i + c),
    "not -c > i - j": lambda i, j, c: torch.logical_not(-c > i - j),
    "2 * j - i - c <= j": lambda i, j, c: 2 * j - i - c <= j,
    "float(j - i) <= c + .5": lambda i, j, c: (j - i).float() <= c + 0.5,
    "torch.le": lambda i, j, c: torch.le(torch.sub(j, i), c),
}
JOINED = {
    "and": operator.and_,
    "torch": torch.logical_and,
    "not or": lambda a, b: ~(~a | ~b),
    "swapped": lambda a, b: b & a,
    "twice": lambda a, b: a & b & a,
}


@st.composite
def windows(draw):
    """(mask_mod, what says it, left, right), None where a side is free."""
    left, right = (draw(st.none() | st.integers(-3, 12)) for _ in range(2))
    ahead, behind = (draw(st.sampled_from(sorted(AHEAD))) for _ in range(2))
    joined = draw(st.sampled_from(sorted(JOINED)))
    strict = draw(st.booleans())

    def mask_mod(b, h, i, j):
        terms = [] if right is None else [AHEAD[ahead](i, j, right)]
        terms += [] if left is None else [AHEAD[behind](j, i, left)]
        if left == right is not None and strict:
            return (i - j).abs() < left + 1
        return JOINED[joined](*terms) if len(terms) == 2 else (*terms, noop_mask(b, h, i, j))[0]

    return mask_mod, left, right


@FEW
@given(
    windows(), st.integers(1, 9), st.integers(1, 9), st.booleans(),
    st.tuples(*[st.none() | st.integers(0, 5)] * 2),
)  # fmt: skip
def test_windows_in_any_spelling(drawn, seqlen_q, seqlen_k, causal, window):
    """With the user's own; those that no option says are left alone."""
    mask_mod, left, right = drawn
    q, k = torch.zeros(1, seqlen_q, 1, 4), torch.zeros(1, seqlen_k, 1, 4)
    shift = seqlen_k - seqlen_q
    is_said = (left is None or left + shift >= 0) and (right is None or right - shift >= 0)
    found = tilewise.explain(q, k, k, mask_mod=mask_mod, causal=causal, window=window).problem
    assert (found.functions is None) == is_said
    visible = found.visibility().tile_mask(0, seqlen_q, 0, seqlen_k)
    own = tilewise.explain(q, k, k, causal=causal, window=window).problem.visibility()
    exact = own.tile_mask(0, seqlen_q, 0, seqlen_k)
    if is_said:
        i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
        exact = exact & mask_mod(torch.zeros(()), torch.zeros(()), i, j)
    assert torch.equal(visible, exact)


def causal(b, h, i, j):
    return i >= j


def window(b, h, i, j):
    return (i >= j) & (i - j < 7)


def documents(b, h, i, j):
    return DOCUMENTS[i] == DOCUMENTS[j]


SAID = {  # functions, and the options that say the same where there are as many queries as keys
    "causal": ({"mask_mod": causal}, {"causal": True}),
    "causal beside causal": ({"mask_mod": causal, "causal": True}, {"causal": True}),
    "window": ({"mask_mod": window}, {"window": (6, 0)}),
    "two sides": ({"mask_mod": lambda b, h, i, j: (j - i).abs() <= 5}, {"window": (5, 5)}),
    "window beside causal": (
        {"mask_mod": lambda b, h, i, j: j > i - 5, "causal": True}, {"causal": True, "window": (4, None)},
    ),
    "all": ({"mask_mod": noop_mask, "score_mod": lambda s, *_: s}, {}),
    "hidden scores": (
        {"score_mod": lambda s, b, h, i, j: torch.where(i < j, -float("inf"), s)}, {"causal": True},
    ),
    "hidden keys": (
        {"score_mod": lambda s, b, h, i, j: torch.where((i >= j) & (j != 4), s, -float("inf"))},
        {"mask_mod": lambda b, h, i, j: j != 4, "causal": True},
    ),
    "hidden documents": (
        {
            "score_mod": lambda s, b, h, i, j: torch.where(
                i < j, -float("inf"), torch.where(documents(b, h, i, j), s - SLOPES[h] * (i - j), -torch.inf)
            )
        },
        {"mask_mod": documents, "causal": True, "alibi_slopes": SLOPES},
    ),
    "softcap": ({"score_mod": lambda s, *_: 20 * torch.tanh(s / 20)}, {"softcap": 20.0}),
    "softcap by a factor": (
        {"score_mod": lambda s, *_: torch.tanh((1 / 2.5) * s) * 2.5}, {"softcap": 2.5},
    ),
    "ALiBi": (
        {"score_mod": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs()}, {"alibi_slopes": SLOPES},
    ),
    "ALiBi, negative": (
        {"score_mod": lambda s, b, h, i, j: abs(j - i).float() * SLOPES[h] + s}, {"alibi_slopes": -SLOPES},
    ),
    "ALiBi, causal": (
        {"mask_mod": causal, "score_mod": lambda s, b, h, i, j: s + SLOPES[h] * (j - i)},
        {"causal": True, "alibi_slopes": SLOPES},
    ),
    "ALiBi, computed": (
        {
            "score_mod": lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 4.0 / 4)),
            "window": (9, 0),
        },
        {"window": (9, 0), "alibi_slopes": SLOPES},
    ),
    "ALiBi of one slope": (
        {"score_mod": lambda s, b, h, i, j: s - 0.5 * (i - j).abs()},
        {"alibi_slopes": torch.full((4,), 0.5)},
    ),
    "ALiBi of batch and head": (
        {"score_mod": lambda s, b, h, i, j: s - (i - j).abs() * SLOPES.expand(2, 4)[b, h]},
        {"alibi_slopes": SLOPES.expand(2, 4)},
    ),
    "bias": ({"score_mod": lambda s, b, h, i, j: s + BIAS[b, h, i, j]}, {"bias": BIAS[..., :37, :37]}),
    "bias of keys": (
        {"score_mod": lambda s, b, h, i, j: BIAS[b, 1, 3, j] + s},
        {"bias": BIAS[:, 1, 3, :37][:, None, None]},
    ),
    "bias beside a mask function": (
        {"mask_mod": documents, "score_mod": lambda s, b, h, i, j: s + BIAS[b, h, i, j]},
        {"mask_mod": documents, "bias": BIAS[..., :37, :37]},
    ),
    "bias in another order": (
        {"score_mod": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs() + BIAS[0][h, j, i]},
        {"bias": BIAS[:1, :, :37, :37].mT, "alibi_slopes": SLOPES},
    ),
    "all together": (
        {"mask_mod": window, "score_mod": lambda s, b, h, i, j: (s / 3).tanh() * 3 + -(i - j) * SLOPES[h]},
        {"window": (6, 0), "softcap": 3.0, "alibi_slopes": SLOPES},
    ),
}  # fmt: skip


COMPUTED = ("ALiBi, computed", "ALiBi of one slope")


@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_plan_is_that_of_the_option(name, dtype):
    functions, options = SAID[name]
    if name in COMPUTED:
        options = options | {"alibi_slopes": options["alibi_slopes"].to(dtype)}
    q, k, v = (torch.randn(2, 37, heads, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    plans.clear()
    expected = tilewise.attention(q, k, v, **options, return_lse=True)
    torch.autograd.backward(expected, [torch.ones_like(t) for t in expected])
    known = {entry.signature for entry in plans.entries()}
    out = tilewise.attention(q, k, v, **functions, return_lse=True)
    torch.autograd.backward(out, [torch.ones_like(t) for t in out])
    assert {entry.signature for entry in plans.entries()} == known
    found = tilewise.explain(q, k, v, **functions)
    assert found.problem == tilewise.explain(q, k, v, **options).problem
    assert bool(found.from_functions) == ("as the functions say" in str(found))
    assert bool(found.from_functions) == (name not in ("all", "causal beside causal"))
    check_attention(q.detach(), k.detach(), v.detach(), **functions)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [(33, 50), (50, 33)])
@pytest.mark.parametrize("name", SAID)
def test_unequal_lengths(name, lengths, dtype):
    """Positions count from the first query, not to the last."""
    n, m = lengths
    q, k, v = (torch.randn(2, *size, 8, dtype=dtype) for size in ((n, 4), (m, 2), (m, 2)))
    check_attention(q, k, v, **SAID[name][0], backend="tiled")


STAYS = {
    "another scale": {"score_mod": lambda s, *_: 20 * torch.tanh(s / 20.5)},
    "its inverse": {"score_mod": lambda s, *_: 2 * torch.tanh(2.0 / (s.abs() + 1))},
    "no scale": {"score_mod": lambda s, *_: 2 * torch.tanh(s)},
    "of the absolute": {"score_mod": lambda s, *_: 2 * torch.tanh(s.abs() / 2)},
    "sum": {"score_mod": lambda s, b, h, i, j: 2 * torch.tanh(s + SLOPES[h])},
    "two softcaps": {"score_mod": lambda s, *_: 2 * torch.tanh(s / 2), "softcap": 3.0},
    "softcap after a bias": {
        "score_mod": lambda s, *_: 2 * torch.tanh(s / 2), "bias": torch.randn(1, 4, 37, 37),
    },
    "softcap after ALiBi": {"score_mod": lambda s, *_: 2 * torch.tanh(s / 2), "alibi_slopes": SLOPES},
    "softcap of ALiBi": {
        "score_mod": lambda s, b, h, i, j: 2 * torch.tanh((s - SLOPES[h] * (i - j).abs()) / 2)
    },
    "two ALiBis": {"score_mod": lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j), "alibi_slopes": SLOPES},
    "not causal": {"score_mod": lambda s, b, h, i, j: s - SLOPES[h] * (i - j)},
    "another distance": {"score_mod": lambda s, b, h, i, j: s - SLOPES[h] * abs(i - j + 1)},
    "another sum": {"score_mod": lambda s, b, h, i, j: s - SLOPES[h] * abs(i + j)},
    "another head": {"score_mod": lambda s, b, h, i, j: s - SLOPES[h - 1] * abs(i - j)},
    "more slopes": {"score_mod": lambda s, b, h, i, j: s - torch.cat([SLOPES, SLOPES])[h] * abs(i - j)},
    "whole slopes": {"score_mod": lambda s, b, h, i, j: s - torch.arange(4)[h] * abs(i - j)},
    "a diagonal": {"score_mod": lambda s, b, h, i, j: s + BIAS[0, 0, i, i]},
    "a bias, shifted": {"score_mod": lambda s, b, h, i, j: s + BIAS[0, 0, i, j + 1]},
    "two biases": {"score_mod": lambda s, b, h, i, j: s + BIAS[b, h, i, j] + BIAS[0, 0, j, i]},
    "a bias, subtracted": {"score_mod": lambda s, b, h, i, j: s - BIAS[b, h, i, j]},
    "a bias beside a bias": {
        "score_mod": lambda s, b, h, i, j: s + BIAS[b, h, i, j], "bias": torch.randn(1, 4, 37, 37),
    },
    "of the batch": {"score_mod": lambda s, b, h, i, j: s - (b + 1) * abs(i - j)},
    "of the query": {"score_mod": lambda s, b, h, i, j: s - i * abs(i - j)},
    "subtracted": {"score_mod": lambda s, b, h, i, j: SLOPES[h] * abs(i - j) - s},
    "or": {"mask_mod": lambda b, h, i, j: (j <= i) | (i - j < 3)},
    "not and": {"mask_mod": lambda b, h, i, j: ~((j > i) & (i - j < 3))},
    "far": {"mask_mod": lambda b, h, i, j: abs(i - j) >= 3},
    "future": {"mask_mod": lambda b, h, i, j: j > i},
    "of the head": {"mask_mod": lambda b, h, i, j: i - j <= h},
    "an absolute number": {"mask_mod": lambda b, h, i, j: (i - i + 3).abs() <= i - j},
    "steep": {"mask_mod": lambda b, h, i, j: j <= 2 * i},
    "of keys": {"mask_mod": lambda b, h, i, j: j <= 20},
    "hidden by their scores": {"score_mod": lambda s, b, h, i, j: torch.where(s > 0, s, -float("inf"))},
    "exchanged": {"score_mod": lambda s, b, h, i, j: torch.where(i >= j, s, -9.0)},
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_other_functions_stay(name):
    q, k, v = (torch.randn(2, 37, heads, 8) for heads in (4, 2, 2))
    found = tilewise.explain(q, k, v, **STAYS[name])
    assert found.problem.functions is not None and not found.from_functions
    check_attention(q, k, v, **STAYS[name], backend="tiled")


def test_what_is_left_stays():
    """The window is an option, also of a block mask made here; the rest is a function, which errors name."""
    documents = (torch.rand(80) < 1 / 20).cumsum(0)

    def mask_mod(b, h, i, j):
        return (i - j < 30) & (documents[i] == documents[j]) & ((i >= j) & (j != 5))

    def score_mod(s, b, h, i, j):
        return torch.where(i - j <= 25, s * 2, -float("inf"))

    q, k, v = (torch.randn(2, 80, heads, 8, dtype=torch.double) for heads in (4, 2, 2))
    functions = {"mask_mod": mask_mod, "score_mod": score_mod}
    found = tilewise.explain(q, k, v, **functions)
    assert found.from_functions == ("window=(25, 0)",) and "the rest stays a function" in str(found)
    check_attention(q, k, v, **functions)
    blocks = create_block_mask(mask_mod, None, None, 80, 80, device="cpu", BLOCK_SIZE=16)
    assert tilewise.explain(q, k, v, block_mask=blocks).from_functions == ("window=(29, 0)",)
    bhsd = [t.transpose(1, 2) for t in (q, k, v)]
    out = flex_attention(*bhsd, block_mask=blocks, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(out, tilewise.attention(q, k, v, mask_mod=mask_mod))
    documents = documents[:60]
    with pytest.raises(IndexError, match=r"out of range .*test_function_options.py.*documents\[i\]"):
        tilewise.attention(q, k, v, mask_mod=mask_mod)


def test_packed_sequences():
    """Queries and keys that are cut alike have one position; others keep the function."""
    q, k, v = (torch.randn(60, heads, 8, dtype=torch.double) for heads in (4, 2, 2))
    starts = torch.tensor([0, 7, 7, 60])
    functions = SAID["all together"][0]
    call = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    assert tilewise.explain(q, k, v, **call, **functions).problem.functions is None
    check_attention(q, k, v, **call, **functions, backend="tiled")
    by_batch = torch.rand(3, 4, dtype=torch.double)
    per_sequence = {"score_mod": lambda s, b, h, i, j: s - by_batch[b, h] * (i - j).abs()}
    assert tilewise.explain(q, k, v, **call, **per_sequence).from_functions == ("alibi_slopes",)
    check_attention(q, k, v, **call, **per_sequence, backend="tiled")
    call["cu_seqlens_k"] = torch.tensor([0, 20, 21, 60])
    assert not tilewise.explain(q, k, v, **call, **functions).from_functions
    check_attention(q, k, v, **call, **functions, backend="tiled")


def test_slopes_that_are_learned_stay():
    """In reverse and forward mode; without gradients they are the option."""
    slopes = SLOPES.double().requires_grad_()
    q, k, v = (torch.randn(1, 9, 4, 8, dtype=torch.double) for _ in range(3))

    def call(slopes):
        penalty = {"score_mod": lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()}
        return tilewise.attention(q, k, v, **penalty, backend="tiled")

    assert torch.autograd.gradcheck(call, slopes, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, slopes, fast_mode=True)
    torch.func.vmap(torch.func.jacrev(call))(slopes.detach().expand(2, 4))
    with torch.no_grad():
        option = tilewise.attention(q, k, v, alibi_slopes=slopes, backend="tiled")
        assert torch.equal(call(slopes), option)


def test_wrong_options_are_named_still():
    x = torch.randn(1, 6, 4, 8)
    with pytest.raises(TypeError, match="causal="):
        tilewise.attention(x, x, x, causal="yes", mask_mod=causal)
    with pytest.raises(TypeError, match="softcap="):
        tilewise.attention(x, x, x, softcap=torch.zeros(2), score_mod=lambda s, *_: 2 * torch.tanh(s / 2))


def test_backends_without_functions_serve_what_they_have():
    x = torch.randn(1, 6, 1, 4)
    out = tilewise.attention(x, x, x, mask_mod=causal, backend="aten")
    assert torch.equal(out, tilewise.attention(x, x, x, causal=True, backend="aten"))


def test_slopes_of_the_heads_number_beside_a_captured_mask():
    """The slopes are computed for the option; the mask that is left reads its tensor."""
    x, documents = torch.randn(1, 40, 4, 16, dtype=torch.float64), torch.arange(40) // 15
    found = tilewise.attention(
        x, x, x,
        mask_mod=lambda b, h, i, j: (documents[i] == documents[j]) & (j <= i),
        score_mod=lambda s, b, h, i, j: s - torch.exp2(-(h + 1.0)) * (i - j),
    )  # fmt: skip
    slopes = torch.exp2(-torch.arange(1.0, 5.0)).double()
    mask = documents[:, None] == documents
    torch.testing.assert_close(
        found, tilewise.attention(x, x, x, causal=True, mask=mask, alibi_slopes=slopes)
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("sign", [1, -1])
def test_slopes_in_8_bits(sign, dtype):
    """PyTorch does not negate them."""
    x, slopes = torch.randn(1, 9, 4, 8), SLOPES.to(dtype)
    found = tilewise.attention(
        x, x, x, score_mod=lambda s, b, h, i, j: s + sign * (slopes[h] * (i - j).abs())
    )
    torch.testing.assert_close(found, tilewise.attention(x, x, x, alibi_slopes=-sign * SLOPES))
