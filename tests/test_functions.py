"""Mask and score functions against the reference, which calls the functions themselves."""

from __future__ import annotations

import math
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
from torch.nn import functional as nn

import tilewise
from tilewise import reference
from tilewise.core.functions import interval
from tilewise.core.functions.captured import check_indices, pack
from tilewise.core.functions.derivative import derivative
from tilewise.core.functions.evaluate import Buffers, Evaluator, Values
from tilewise.core.functions.operations import elementary
from tilewise.core.functions.tile_map import EMPTY, FULL, edges, tile_kinds
from tilewise.core.functions.trace import trace
from tilewise.flex_attention import create_block_mask
from tilewise.testing import check_attention

SEEN = create_block_mask(lambda b, h, i, j: j <= i, None, None, 6, 6, device="cpu")


def functions(table, slope, documents):
    def mask_mod(b, h, i, j):
        return (documents[i] == documents[j]) & (j <= i)

    def score_mod(score, b, h, i, j):
        return torch.tanh(score / 3 + table[h, (i - j).clamp(0, 19)]) * slope[h] * (b + 1)

    return {"mask_mod": mask_mod, "score_mod": score_mod}


def close(found, exact):
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


def test_gradients_with_other_options():
    documents = (torch.rand(300) < 1 / 50).cumsum(0)
    q, k, v = (torch.randn(2, 300, heads, 8, dtype=torch.double, requires_grad=True) for heads in (4, 2, 2))
    captured = tuple(torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((4, 20), (4,)))
    options = functions(*captured, documents) | {"softcap": 5.0}
    out, lse = tilewise.attention(q, k, v, return_lse=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v, *captured), (dout, dlse))
    with torch.no_grad():
        exact = reference.attention(q, k, v, **options)
        options |= {"captured": captured, "dlse": dlse}
        grads = reference.attention_backward(dout, q, k, v, **options)
    for ours, theirs in zip((out, lse, *found), (*exact, *grads[:3], *grads.captured), strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("backend", ["llvm", "tiled"])
def test_slopes_at_bounds_are_pytorchs(backend):
    """Where a clamp begins, at the foot of a ReLU, and far out on a sigmoid, whose exponential overflows.

    Beside them functions that are made of others.
    """
    zeros = torch.zeros(2, dtype=torch.double, requires_grad=True)
    far = torch.tensor([-800.0, 800.0], dtype=torch.double, requires_grad=True)

    def score_mod(s, b, h, i, j):
        return (
            torch.relu(s) + s.clamp(0, 3) + s.clamp(max=0) + s.clamp(min=zeros[h])
            + s * torch.sigmoid(s * 900) + torch.nn.functional.silu(s) + torch.tan(s / 9)
            + s * (torch.relu(zeros[h]) + zeros[h].clamp(0, 1) + torch.sigmoid(far[h]))
        )  # fmt: skip

    q, k, v = (torch.randn(1, 20, 2, 8, dtype=torch.double) for _ in range(3))
    q[:, :5] = 0  # scores of 0
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = tilewise.attention(*leaves, score_mod=score_mod, backend=backend)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (*leaves, zeros, far), dout)
    with torch.no_grad():
        exact = reference.attention_backward(dout, q, k, v, score_mod=score_mod, captured=(zeros, far))
    for ours, theirs in zip(found, (*exact[:3], *exact.captured), strict=True):
        close(ours, theirs)


PLACED = torch.tensor([-2.0, 0.5, 3.0])


def in_place(x):
    """What is written to is seen by all that hold it, but not by a clone."""
    y = z = x.clone()
    y += 1
    nn.relu(y, inplace=True)
    torch.exp_(w := x / 8)
    return z * w + x.clone().mul_(3)


def far(x):
    return torch.where(torch.isclose(x, x * 0 - math.inf), 9.0, 0.0)


WHOLE = {  # of any number, in PyTorch and here
    "addcdiv": lambda x: torch.addcdiv(x, x, x * x + 1, value=0.5),
    "addcmul": lambda x: torch.addcmul(x * x, x, x, value=0.5),
    "asin": lambda x: torch.asin(x / (1.1 + x.abs())),
    "acos": lambda x: torch.arccos(x / (1.1 + x.abs())),
    "acosh": lambda x: torch.acosh(x * x + 1.1),
    "arctan2": lambda x: torch.arctan2(x, 1 - x),
    "atan": torch.atan,
    "atanh": lambda x: torch.atanh(x / (1.1 + x.abs())),
    "bucketize": lambda x: x * (torch.bucketize(x, PLACED) + 3 * torch.bucketize(x, PLACED, right=True)),
    "celu": lambda x: nn.celu(x, 2.0),
    "clamps": lambda x: torch.clamp_max(x.clamp_min(-1.0), 2.0),
    "copysign": lambda x: torch.copysign(x * x, x),
    "elu": lambda x: nn.elu(x, 1.3),
    "entr": lambda x: torch.special.entr(x * x + 0.1),
    "erfcx": lambda x: torch.special.erfcx(x.abs()) + torch.erfc(x),
    "exp2": lambda x: torch.exp2(x / 8) + torch.log2(x * x + 1) + torch.logaddexp2(x, x / 2 + 1),
    "float_power": lambda x: torch.float_power(x * x + 1, 2) + torch.round(x, decimals=1),
    "fmod": lambda x: torch.fmod(x, 0.7) + x % -1.3,
    "fmax": lambda x: torch.fmax(x, x * x / 2) + torch.fmin(x, 1 - x),
    "gelu": lambda x: nn.gelu(x) + nn.gelu(x, approximate="tanh"),
    "hard": lambda x: nn.hardtanh(x) + nn.hardsigmoid(x) + nn.hardswish(x) + nn.relu6(x),
    "hypot": lambda x: torch.hypot(x, 1 - x),
    "in_place": in_place,
    "isclose": lambda x: torch.where(torch.isclose(x, x.round(), atol=0.1), x, 2.0) + far(x),
    "isin": lambda x: torch.where(torch.isin(x, PLACED), x * 2, x),
    "where": lambda x: PLACED[0].where(x < 0, x.where(x > 3, x * x)).where(torch.isfinite(x), 7),
    "leaky_relu": lambda x: nn.leaky_relu(x) + nn.threshold(x, 0.2, 0.5),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "logaddexp": lambda x: torch.logaddexp(x, x / 2 + 1),
    "logit": lambda x: torch.logit(0.5 + x / (3 + 3 * x.abs())),
    "logs": lambda x: torch.log10(x * x + 1) + torch.xlogy(x, x * x + 1),
    "logsigmoid": nn.logsigmoid,
    "mish": nn.mish,
    "ndtr": lambda x: torch.special.ndtr(x) + torch.special.log_ndtr(x),
    "nan_to_num": lambda x: torch.nan_to_num(torch.where(x < -5, math.nan, x), 2.0) * torch.frac(x),
    "searchsorted": lambda x: x * torch.searchsorted(PLACED, x, side="right"),
    "selu": nn.selu,
    "shrinks": lambda x: nn.softshrink(x) + nn.hardshrink(x, 0.2) + nn.tanhshrink(x),
    "sinc": lambda x: torch.sinc(x) + torch.special.xlog1py(x, x * x) + torch.special.expit(x),
    "sinh": lambda x: torch.sinh(x / 4) * torch.cosh(x / 8) + torch.asinh(x),
    "softplus": lambda x: nn.softplus(x) + nn.softplus(x, beta=2.0, threshold=3.0),
    "softsign": lambda x: nn.softsign(x).mul_(2).type(x.dtype) + torch.deg2rad(x).squeeze(),
}


@pytest.mark.parametrize("function", WHOLE.values(), ids=WHOLE)
def test_what_is_put_together_is_as_exact_as_pytorchs(function):
    """Values and slopes in float32 and float64, of large numbers too, and where two parts meet."""
    x = torch.cat([torch.linspace(-12, 12, 997), torch.tensor([0.0, 30, -30, 90, -90, *range(-6, 7), 0.5])])

    def of_pytorch(dtype):
        y = x.to(dtype).requires_grad_()
        found = function(y)
        return found.detach(), torch.autograd.grad(found.sum(), y)[0]

    def own(dtype):
        found = trace(None, lambda s, b, h, i, j: function(s))
        graph, value, slope, _ = derivative(found.functions)
        zero = torch.zeros((), dtype=torch.long)
        values = Values(x.to(dtype), zero, zero, zero, zero, dtype)
        evaluate = Evaluator(graph, found.functions, pack(found, values.score[None, None]), values)
        return evaluate(value), evaluate(slope)

    for ours, single, exact in zip(own(torch.float32), of_pytorch(torch.float32), of_pytorch(torch.float64)):
        errors = [((t - exact).abs() / exact.abs().clamp(min=1)).max() for t in (ours, single)]
        assert errors[0] <= max(2 * errors[1], 3e-7)
    for ours, exact in zip(own(torch.float64), of_pytorch(torch.float64)):
        torch.testing.assert_close(ours.expand_as(exact), exact, rtol=1e-7, atol=1e-8)


EDGES = [0.0, 1e-30, 1e-8, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 9.1, 27.0, 89.0, 1e4, 1e30, math.inf]
EDGES = torch.tensor([*EDGES, *(-x for x in EDGES if x), math.nan])


def tables(xs, dtype, function):
    """The value and the slopes of a function of numbers at xs, and PyTorch's in that dtype."""
    ours, theirs = ([x.detach().to(dtype).requires_grad_() for x in xs] for _ in range(2))
    found, n = trace(None, lambda s, b, h, i, j: function(*(t[i] for t in ours))), len(xs[0])
    graph, value, _, loads = derivative(found.functions)
    zero = torch.zeros((), dtype=torch.long)
    values = Values(torch.zeros(n, dtype=dtype), zero, zero, torch.arange(n), zero, dtype)
    buffers = pack(found, torch.zeros(0, dtype=dtype))
    slopes = [torch.zeros(n, dtype=dtype) for _ in xs]
    evaluate = Evaluator(graph, found.functions, buffers, values)
    for load, slope in loads.items():
        place = next(n for n, t in enumerate(ours) if t is found.tensors[graph.nodes[load].value])
        slopes[place] = slopes[place] + evaluate(slope).detach()
    exact = function(*theirs)
    return (evaluate(value).detach(), *slopes), (exact.detach(), *torch.autograd.grad(exact.sum(), theirs))


@pytest.mark.parametrize("name", [*elementary._FORMULAS])
def test_formulas_are_as_exact_as_pytorchs(name):
    """Which stand in kernels; here in PyTorch's operations, of numbers large and small."""
    of_two = name in ("mod", "floordiv")
    function = {"mod": torch.remainder, "floordiv": torch.floor_divide}.get(name) or (
        getattr(torch.special if name == "erfcx" else torch, name)
    )
    near = torch.linspace(-12, 12, 997)
    xs = [torch.cat([EDGES, near]), torch.cat([EDGES, near.flip(0) * 0.7])][: 1 + of_two]
    if of_two:
        pairs = torch.cartesian_prod(EDGES, EDGES)
        xs = [torch.cat([x, pair]) for x, pair in zip(xs, pairs.T)]
    for dtype, error in ((torch.float32, 4e-7), (torch.float64, 4e-15)):
        found = trace(None, lambda s, b, h, i, j: function(*(x[i] for x in xs)))
        graph = found.functions.graph
        root = elementary.formulas(graph)[found.functions.score]
        i, zero = torch.arange(len(xs[0])), torch.zeros((), dtype=torch.long)
        buffers = pack(found, torch.zeros(0, dtype=dtype))
        ours = Evaluator(graph, found.functions, buffers, Values(None, zero, zero, i, zero, dtype))(root)
        exact = function(*(x.double() for x in xs)).to(dtype)
        if of_two and dtype == torch.float32:  # whose rest float64 has of other numbers
            exact = function(*xs)
        usual = exact.abs() < 1e37 if name == "erfcx" else ~(xs[0] / xs[-1]).isinf() | (xs[-1] == 0)
        torch.testing.assert_close(ours[usual], exact[usual], rtol=error, atol=1e-37, equal_nan=True)


EXTREMES = {  # functions that are put together of others, at numbers that one of these can't hold
    "acos": torch.acos, "acosh": torch.acosh, "asin": torch.asin, "asinh": torch.asinh, "cosh": torch.cosh,
    "atanh": lambda x: torch.atanh(x.clamp(-1, 1)), "atan2": torch.atan2, "hypot": torch.hypot,
    "entr": lambda x: torch.special.entr(torch.where(x == 0, 1.0, x)),
    "logit": lambda x: torch.logit(x.abs().clamp(max=1)),
    "softshrink": nn.softshrink, "xlogy": torch.xlogy,
}  # fmt: skip


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_are_pytorchs(name):
    """Values, and slopes where PyTorch's don't overflow."""
    xs = torch.cartesian_prod(EDGES, EDGES).T if name in ("atan2", "hypot", "xlogy") else EDGES[None]
    (value, *slopes), (exact, *exact_slopes) = tables(xs, torch.float32, EXTREMES[name])
    torch.testing.assert_close(value, exact, rtol=2e-6, atol=1e-7, equal_nan=True)
    usual = ((xs == 0) | ((xs.abs() > 1e-9) & (xs.abs() < 1e9))).all(0) & ~exact.isnan()
    for ours, theirs in zip(slopes, exact_slopes):
        known = usual & ~theirs.isnan()
        torch.testing.assert_close(ours[known], theirs[known], rtol=2e-6, atol=1e-7)


def test_functions_of_integers_and_bounds_of_nan():
    """Integers become floats before they are multiplied; a bound of NaN leaves no number."""
    large = torch.tensor([3 * 10**9, 5 * 10**9, -(2**62), 7])
    bounds = torch.tensor([1.0, math.nan, 0.5, -1.0])
    q = torch.zeros(1, 4, 1, 8)
    for function in (
        lambda i: torch.asinh(large[i]), lambda i: torch.hypot(large[i], bounds[i * 0]),
        lambda i: torch.logaddexp(large[i], bounds[0]) * 1e-9, lambda i: torch.copysign(large[i], bounds[3]),
        lambda i: torch.clamp(bounds[0] * 3, max=bounds[i]), lambda i: torch.clamp(bounds[0], min=bounds[i]),
        lambda i: large[i].masked_fill(i > 1, 2.5),
    ):  # fmt: skip
        _, lse = tilewise.attention(
            q, q[:, :1], q[:, :1], backend="tiled", return_lse=True,
            score_mod=lambda s, b, h, i, j, f=function: torch.nan_to_num(f(i), nan=-5.0),
        )  # fmt: skip
        exact = torch.nan_to_num(function(torch.arange(4)).float(), nan=-5.0)
        torch.testing.assert_close(lse[0, 0], exact, rtol=1e-6, atol=1e-6)


def test_tables_by_functions_of_tensors():
    x, embedding, one = torch.randn(1, 40, 2, 8), torch.nn.Embedding(40, 2), torch.randn(2)
    found, exact = (
        tilewise.attention(x, x, x, score_mod=score_mod)
        for score_mod in (
            lambda s, b, h, i, j: s + embedding((i - j).clamp(0))[h] + torch.gather(one, 0, h),
            lambda s, b, h, i, j: s + embedding.weight[(i - j).clamp(0), h] + one[h],
        )
    )
    assert torch.equal(found, exact)
    with pytest.raises(NotImplementedError, match=r"a table of all results before the call.*line.*bucketize"):
        tilewise.attention(x, x, x, mask_mod=lambda b, h, i, j: torch.bucketize(j, torch.arange(200)) < i)


def test_rows_are_their_numbers():
    """A few numbers together, as coordinates or a basis; a distance of 0 has no slope."""
    place, weight = (torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((20, 2), (2, 3)))
    place.data[3] = place.data[5]
    x, centre, ends = (
        torch.randn(1, 20, 2, 8, dtype=torch.double),
        torch.rand(3).double(),
        torch.tensor([7, 20]),
    )

    def rows(s, b, h, i, j):
        apart = (place[i] - place[j]).norm()
        near = (weight[h, :] * torch.exp(-((apart - centre) ** 2))).sum(-1)
        first, second = place[i]
        return torch.where(
            (i < ends).sum() == (j < ends).sum(), s + near + first * second, s - torch.amax(place[j].abs(), 0)
        )

    def numbers(s, b, h, i, j):
        square = (place[i, 0] - place[j, 0]) ** 2 + (place[i, 1] - place[j, 1]) ** 2
        apart = torch.where(square == 0, 0, torch.sqrt(torch.where(square == 0, 1, square)))
        near = sum(weight[h, n] * torch.exp(-((apart - centre[n]) ** 2)) for n in range(3))
        largest = torch.maximum(place[j, 0].abs(), place[j, 1].abs())
        return torch.where((i < 7) == (j < 7), s + near + place[i, 0] * place[i, 1], s - largest)

    found, exact = (
        torch.autograd.grad(
            tilewise.attention(x, x, x, score_mod=f, backend="tiled").square().sum(), (place, weight)
        )
        for f in (rows, numbers)
    )
    for ours, theirs in zip(found, exact):
        close(ours, theirs)
    seen = {
        "mask_mod": lambda b, h, i, j: (
            torch.stack([i >= j, i - j < 9]).all() & (place[i] @ place[j] > -1e9).any()
        )
    }
    close(tilewise.attention(x, x, x, **seen, backend="tiled"), tilewise.attention(x, x, x, window=(8, 0)))


def test_packed_sequences_count_from_their_start():
    q, k, v = (torch.randn(30, 2, 8, dtype=torch.double) for _ in range(3))
    starts = torch.tensor([0, 7, 7, 30])
    options = {"mask_mod": lambda b, h, i, j: (i - j) % (b + 2) == 0, "score_mod": None}
    given = (q, k, v)
    out = tilewise.attention_varlen(*given, starts, starts, mask_mod=options["mask_mod"])
    exact, _ = reference.attention(*given, cu_seqlens_q=starts, cu_seqlens_k=starts, **options)
    close(out, exact)


def test_derivatives_of_both_orders():
    q, k, v = (torch.randn(1, 4, 2, 3, dtype=torch.double, requires_grad=True) for _ in range(3))
    table, slope = (torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((2, 20), (2,)))

    def call(q, k, v, table, slope):
        return tilewise.attention(q, k, v, **functions(table, slope, torch.zeros(4).long()), return_lse=True)

    arguments = (q, k, v, table, slope)
    assert torch.autograd.gradcheck(call, arguments, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, arguments, fast_mode=True)


@pytest.mark.parametrize("backend", [None, "tiled"])
def test_slopes_of_powers(backend):
    powers = torch.tensor([1.5, 0.0], dtype=torch.double, requires_grad=True)
    q, k, v = (torch.randn(1, 20, 2, 8, dtype=torch.double) for _ in range(3))
    q[:, :5] = 0  # scores of 0
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for score_mod, captured in (
        (lambda s, b, h, i, j: (s.abs() + 1) ** 0.5, ()),
        (lambda s, b, h, i, j: s**0 + s**1 + s**3 + (s.abs() + 1) ** -1, ()),
        (lambda s, b, h, i, j: torch.relu(s) ** powers[h], (powers,)),
    ):
        out = tilewise.attention(*leaves, score_mod=score_mod, backend=backend)
        dout = torch.randn_like(out)
        found = torch.autograd.grad(out, (*leaves, *captured), dout)
        with torch.no_grad():
            exact = reference.attention_backward(dout, q, k, v, score_mod=score_mod, captured=captured)
        for ours, theirs in zip(found, (*exact[:3], *exact.captured), strict=True):
            close(ours, theirs)


def any_width(low, high, size):
    """What `interval._runs` gives while a graph is captured, where a GPU may not be waited for."""
    return [1 << n for n in range(size.bit_length())], size


@pytest.mark.parametrize("is_captured", [False, True])
def test_tile_map_agrees_with_every_element(is_captured, monkeypatch):
    starts = torch.rand(96) < 1 / 20
    starts[48:] = torch.arange(48) == 0  # one of half the tokens, so that some tiles are full and some empty
    documents = starts.cumsum(0)

    def mask(b, h, i, j):
        """Of indices that are computed, and so of unknown width."""
        return (documents[95 - i] == documents[95 - j]) & (j <= i)

    found, runs = trace(mask, None), mock.Mock(wraps=any_width if is_captured else interval._runs)
    monkeypatch.setattr(interval, "_runs", runs)
    one, blocks = edges(1, 1), edges(96, 8)
    kinds = tile_kinds(
        found.functions, Buffers(None, documents, torch.tensor([0, 96])), one, one, blocks, blocks
    )
    i, j = torch.arange(96)[:, None], torch.arange(96)
    tiles = mask(0, 0, i, j).view(12, 8, 12, 8)
    some, every = tiles.any(3).any(1), tiles.all(3).all(1)
    assert not some[kinds[0, 0] == EMPTY].any() and every[kinds[0, 0] == FULL].all()
    assert (kinds == EMPTY).sum() > 66 and (kinds == FULL).any() and runs.called


def test_ranges_of_many_tiles_are_not_gathered(monkeypatch):
    """A table of distances, of which each tile reads few: they would be many times the tiles."""
    near, sizes = torch.rand(2 * 2048) < 0.5, []
    gathered = interval._gathered
    monkeypatch.setattr(interval, "MAX_GATHERED", 1 << 12)
    monkeypatch.setattr(interval, "_gathered", lambda *given: sizes.append(given) or gathered(*given))
    found = trace(lambda b, h, i, j: near[i - j + 2048], None)
    one, blocks = edges(1, 1), edges(2048, 16)
    numbers = Buffers(None, near.long(), torch.tensor([0, len(near)]))
    kinds = tile_kinds(found.functions, numbers, one, one, blocks, blocks)[0, 0]
    i, j = torch.arange(2048)[:, None], torch.arange(2048)
    tiles = near[i - j + 2048].view(128, 16, 128, 16)
    assert torch.equal(kinds == EMPTY, ~tiles.any(3).any(1)) and not sizes


def test_tiles_of_numbers_that_float32_rounds():
    """The map's float64 knows 0.7, 2 ** 24 + 1 and exp(101); float32 has others."""
    x = torch.randn(1, 40, 1, 4)
    i, j = torch.arange(40)[:, None], torch.arange(40)
    table, large, zeros = torch.full((40,), 0.7), torch.full((40,), 2**24 + 1), torch.zeros(40)
    for mask_mod in (
        lambda b, h, i, j: table[j] >= 0.7,
        lambda b, h, i, j: table[j] == 0.7,
        lambda b, h, i, j: (large[j].float() > 2.0**24) | (i == j),
        lambda b, h, i, j: (torch.exp(zeros[j] + 100) - torch.exp(zeros[j] + 101) < 0) | (i == j),
    ):
        mask = mask_mod(0, 0, i, j).expand(40, 40)
        for backend in ("llvm", "tiled"):
            found = tilewise.attention(x, x, x, mask_mod=mask_mod, backend=backend)
            torch.testing.assert_close(found, tilewise.attention(x, x, x, mask=mask))


def test_new_values_and_closures_are_seen():
    x = torch.randn(1, 6, 1, 4)
    x = x.double()

    def band(width, factor):
        return {"mask_mod": lambda b, h, i, j: (i - j).abs() <= width, "score_mod": lambda s, *_: s * factor}

    for width in (1, 2):
        options = band(width, torch.full((), float(width)))
        close(tilewise.attention(x, x, x, **options), reference.attention(x, x, x, **options)[0])


def test_what_a_function_asks_tensors_for_is_seen():
    """Shapes and numbers that become constants; attributes of a function, and of modules that it imports."""
    x = torch.randn(1, 12, 1, 4, dtype=torch.double)
    settings = sys.modules["settings_of_a_test"] = types.ModuleType("settings_of_a_test")

    def masks(n):
        table, flag = torch.arange(n), torch.tensor(n > 5)

        def imports(b, h, i, j):
            import settings_of_a_test

            return i - j < settings_of_a_test.width

        settings.width = with_attribute.width = n
        return (
            lambda b, h, i, j: j < table.shape[0],
            lambda b, h, i, j: j < len(table),
            lambda b, h, i, j: table[j % table.size(0)] < n // 2,
            lambda b, h, i, j: j <= table.max().item(),
            lambda b, h, i, j: torch.bucketize(j.contiguous(), table) < 5,
            lambda b, h, i, j: j <= i if flag else j >= i,
            imports,
            with_attribute,
        )

    def with_attribute(b, h, i, j):
        return i - j < with_attribute.width

    for n in (4, 9):
        for mask_mod in masks(n):
            close(
                tilewise.attention(x, x, x, mask_mod=mask_mod),
                reference.attention(x, x, x, mask_mod=mask_mod)[0],
            )
    for row in (torch.ones(2), torch.ones(3)):
        found = tilewise.attention(
            x, x, x, mask_mod=lambda b, h, i, j, row=row: j < torch.dot(row, row * (j >= 0))
        )
        close(found, tilewise.attention(x, x, x, mask=torch.arange(12).expand(12, 12) < len(row)))


def test_the_default_dtype_and_layouts_are_seen():
    x, default = torch.randn(1, 12, 1, 4, dtype=torch.double), torch.get_default_dtype()

    def by_dtype(b, h, i, j):
        return j <= i if torch.get_default_dtype() == torch.float32 else j >= i

    def by_table(table):
        return lambda b, h, i, j: table[j] > 0

    try:
        for dtype, window in ((torch.float32, (None, 0)), (torch.float64, (0, None))):
            torch.set_default_dtype(dtype)
            found = tilewise.attention(x, x, x, mask_mod=by_dtype)
            close(found, tilewise.attention(x, x, x, window=window))
    finally:
        torch.set_default_dtype(default)
    tilewise.attention(x, x, x, mask_mod=by_table(torch.ones(12)))
    with pytest.raises(TypeError, match=r"sparse.*dense.*line"):
        tilewise.attention(x, x, x, mask_mod=by_table(torch.ones(12).to_sparse()))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask_mod": lambda b, h, i: i > 0}, TypeError, "must take"),
        ({"score_mod": lambda s, b, h, i, j: j <= i}, TypeError, "returns a bool, must return a score"),
        ({"mask_mod": lambda b, h, i, j: i * 0.5}, TypeError, "returns a float, must return a bool"),
        ({"mask_mod": lambda b, h, i, j: i > 0 and j > 0}, TypeError, "branch.*test_functions.py"),
        (
            {"score_mod": lambda s, b, h, i, j: torch.fft.fft(s)},
            NotImplementedError,
            "fft.*test_functions.py",
        ),
        ({"mask_mod": lambda b, h, i, j: torch.ones(3)[i + 9] > 0}, IndexError, "index 9.*test_functions.py"),
        (
            {"mask_mod": lambda b, h, i, j: torch.ones(3)[i] > 0},
            IndexError,
            r"index 3 in dimension 0 of a captured .* \(3,\) is out of range \(line .*test_functions.py",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s + torch.ones(6, 4)[i, j - i]},
            IndexError,
            r"index [45] in dimension 1 of a captured .* \(6, 4\) is out of range \(line .*j - i",
        ),
        ({"mask_mod": lambda b, h, i, j: i < 10**30}, TypeError, "10+ must be an integer of 64 bits.*line"),
        ({"mask_mod": lambda b, h, i, j: (i + 1) ** -1 > 0}, TypeError, "no negative power.*line"),
        ({"mask_mod": lambda b, h, i, j: i % 0 > 0}, TypeError, "division by 0.*line"),
        ({"mask_mod": lambda b, h, i, j: i // 0 > 0}, TypeError, "division by 0.*line"),
        ({"mask_mod": lambda b, h, i, j: torch.ones(6).to_sparse()[i] > 0}, TypeError, "sparse.*dense.*line"),
        (
            {"mask_mod": lambda b, h, i, j: torch.max(i) > 0},
            NotImplementedError,
            "max takes two tensors.*line",
        ),
        ({"mask_mod": lambda b, h, i, j: i.min(0) > 0}, NotImplementedError, "min takes two tensors.*line"),
        ({"mask_mod": lambda b, h, i, j: i.item() > 0}, TypeError, "no value while the function is traced"),
        ({"score_mod": lambda s, b, h, i, j: s + math.log(i + 1)}, TypeError, "torch's functions for math's"),
        ({"mask_mod": lambda b, h, i, j: [True, False][h]}, TypeError, "tensors for lists and dicts.*line"),
        ({"mask_mod": lambda b, h, i, j: {0: True}[h]}, TypeError, "tensors for lists and dicts.*line"),
        (
            {"score_mod": lambda s, b, h, i, j: s + torch.ones(6, 30)[i] @ torch.ones(6, 30)[j]},
            TypeError,
            r"captured tensor of shape \(6, 30\) must be indexed down to one number.*at most 16.*line",
        ),
        (
            {"score_mod": lambda s, b, h, i, j: s + torch.ones(6, 6, 3)[i].mean()},
            TypeError,
            r"captured tensor of shape \(6, 6, 3\) must be indexed down to one number.*line",
        ),
        ({"score_mod": lambda s, b, h, i, j: s + torch.ones(6, 3)[i]}, TypeError, "row of 3 numbers.*line"),
        ({"score_mod": lambda s, b, h, i, j: s if torch.ones(6, 3)[i] else -s}, TypeError, "branch.*line"),
        ({"score_mod": lambda s, b, h, i, j: s + torch.ones(6)[i > j]}, TypeError, "not a bool.*line"),
        ({"mask_mod": lambda b, h, i, j: (i > j) << (i < j)}, TypeError, "no two bools.*line"),
        ({"score_mod": lambda s, b, h, i, j: torch.zeros(2).add_(s)}, TypeError, "can't be written to.*line"),
        (
            {"score_mod": lambda s, b, h, i, j: s + nn.embedding(i, torch.ones(6, 2), padding_idx=0)[0]},
            NotImplementedError,
            "embedding takes an index and a table.*line",
        ),
        ({"score_mod": lambda s, b, h, i, j: None}, TypeError, "it returns a NoneType, must.*line"),
        ({"score_mod": lambda s, b, h, i, j: (s, i)}, TypeError, "it returns a tuple, must return one"),
        ({"mask_mod": torch.ones(6, 6) > 0}, TypeError, r"must be a function of \(b, h,.*: pass it as mask$"),
        ({"score_mod": torch.ones(6, 6)}, TypeError, r"must be a function of \(score,.*: pass it as bias$"),
        ({"mask_mod": SEEN}, TypeError, r"must be a function of \(b, h,.*: pass it as block_mask$"),
        (
            {"score_mod": lambda s, b, h, i, j: torch.dot(s, s)},
            NotImplementedError,
            "'dot': .*append them.*line",
        ),
        ({"score_mod": lambda s, b, h, i, j: s.view(1)}, TypeError, "'view': .*single numbers.*line"),
        ({"score_mod": lambda s, b, h, i, j: s * s.detach()}, TypeError, "compute before the call.*line"),
        (
            {"mask_mod": lambda b, h, i, j: i.foo() > 0},
            TypeError,
            "a mask or score function has no operation 'foo'",
        ),
    ],
)
def test_errors_name_the_line(options, error, message):
    x = torch.randn(1, 6, 1, 4)
    with pytest.raises(error, match=message):
        tilewise.attention(x, x, x, **options, backend="tiled")


@pytest.mark.parametrize(
    "draw",
    [
        lambda s: torch.rand(()),
        lambda s: torch.randn(6)[0],
        lambda s: torch.randint(2, ()),
        lambda s: torch.empty(()).uniform_(),
        lambda s: torch.rand_like(s),
        lambda s: nn.dropout(s, 0.5),
    ],
)
def test_random_numbers_are_refused(draw):
    """A trace would draw one for all scores of all calls."""
    x = torch.randn(1, 6, 1, 4)
    with pytest.raises(NotImplementedError, match=r"random numbers.*dropout_p.*line .*test_functions.py"):
        tilewise.attention(x, x, x, score_mod=lambda s, b, h, i, j: s + draw(s))


@pytest.mark.parametrize(
    "minus",
    [
        lambda i, j: (i > j) - (i < j),
        lambda i, j: 1 - (i > j),
        lambda i, j: torch.sub(i, i > j),
        lambda i, j: i - True,
        lambda i, j: -(i > j),
    ],
)
def test_minus_takes_no_booleans(minus):
    """As PyTorch has it, which tells a bool from a number where a kernel would not."""
    x = torch.randn(1, 6, 1, 4)
    with pytest.raises(RuntimeError, match="bool tensor"):
        minus(torch.tensor(1), torch.tensor(2))
    with pytest.raises(TypeError, match=r"minus takes no bool.*int\(\) \(line .*test_functions.py"):
        tilewise.attention(x, x, x, score_mod=lambda s, b, h, i, j: s + minus(i, j))


def test_a_kernel_names_the_line_too():
    x, table = torch.randn(1, 6, 1, 4), torch.ones(3)
    with pytest.raises(IndexError, match=r"shape \(3,\) is out of range \(line .*test_functions.py"):
        tilewise.attention(x, x, x, mask_mod=lambda b, h, i, j: table[i] > 0, backend="llvm")


def test_wrong_indices_make_no_tile_empty():
    """But where it is empty whatever they read."""
    keep = torch.arange(64) < 63  # the nearest place to those behind it hides
    one, blocks = edges(1, 1), edges(128, 16)
    for mask_mod, kind in ((lambda b, h, i, j: keep[j], 1), (lambda b, h, i, j: (j < 64) & keep[j], EMPTY)):
        found = trace(mask_mod, None)
        kinds = tile_kinds(check_indices(found, (1, 1, 1, 128)), pack(found, keep), one, one, one, blocks)
        assert kinds.flatten().tolist() == [FULL] * 3 + [1] + [kind] * 4
    x = torch.randn(1, 900, 1, 8)
    with pytest.raises(IndexError, match="out of range"):
        tilewise.attention(x, x, x, mask_mod=lambda b, h, i, j: keep[j], backend="llvm")


KEEP, PLACES = torch.arange(40) % 39 > 0, torch.arange(60)  # wrong indices read an end
LOWEST = torch.where(KEEP, 0.0, -math.inf)


def hidden_by(known):
    """Functions that hide keys by what they read, where `known(j)`; the other keys whatever that is."""
    return [
        {"mask_mod": lambda b, h, i, j: known(j) & KEEP[PLACES[j]]},
        {"mask_mod": lambda b, h, i, j: ~(~known(j) | ~KEEP[PLACES[j]])},
        {"mask_mod": lambda b, h, i, j: torch.where(known(j), KEEP.int()[PLACES[j]], 0) * known(j) > 0},
        {"score_mod": lambda s, b, h, i, j: s + torch.where(known(j), LOWEST[PLACES[j]], -math.inf)},
        {"score_mod": lambda s, b, h, i, j: torch.where(known(j) & KEEP[PLACES[j]], s * s, -math.inf)},
    ]


@pytest.mark.parametrize("backend", ["tiled", "llvm"])
@pytest.mark.parametrize("queries", [60, 2])
def test_a_wrong_index_cannot_hide_its_own_key(backend, queries):
    x, beside = torch.randn(1, 60, 1, 8), torch.arange(60).expand(queries, 60) < 40
    some = slice(None) if backend == "tiled" else slice(None, None, 3)  # others take seconds to compile
    wrong, right = hidden_by(lambda j: j >= 0)[some], hidden_by(lambda j: j < 40)[some]
    for options in wrong:
        with pytest.raises(IndexError, match=r"\(40,\) is out of range \(line .*test_functions.py"):
            tilewise.attention(x[:, :queries], x, x, backend=backend, **options)
    for options in (*right, {**wrong[0], "mask": beside}):
        assert tilewise.attention(x[:, :queries], x, x, backend=backend, **options).isfinite().all()


def test_other_backends_refuse():
    x = torch.randn(1, 6, 1, 4)
    with pytest.raises(NotImplementedError, match=r"mask or score functions; .*'tiled' would serve"):
        tilewise.attention(x, x, x, mask_mod=lambda b, h, i, j: j != i, backend="aten")


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_stay_in_budget(dtype):
    documents = (torch.rand(150) < 1 / 40).cumsum(0)
    q, k, v = (torch.randn(2, 150, heads, 16).to(dtype) for heads in (4, 2, 2))
    options = functions(torch.randn(4, 20), torch.rand(4), documents)
    check_attention(q, k, v, **options, softcap=20.0)


def test_compiled_models():
    """The graph breaks at the call: the compiled rest, results and gradients are those of eager mode."""
    layer, slope = torch.nn.Linear(8, 24).double(), torch.ones(2, dtype=torch.double, requires_grad=True)

    def model(x):
        q, k, v = layer(x).view(1, -1, 3, 2, 4).unbind(2)
        options = {
            "mask_mod": lambda b, h, i, j: j <= i, "score_mod": lambda s, b, h, i, j: s - slope[h] * (i - j)
        }  # fmt: skip
        return tilewise.attention(q, k, v, **options).flatten(2).sin()

    for length in (20, 31):
        x = torch.randn(1, length, 8, dtype=torch.double)
        results = []
        for run in (model, torch.compile(model, backend="aot_eager")):
            out = run(x)
            results.append((out, *torch.autograd.grad(out.sum(), (*layer.parameters(), slope))))
        for ours, theirs in zip(*results, strict=True):
            close(ours, theirs)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_added"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def test_transforms():
    """vmap over queries, over captured tensors; torch.func's gradients."""
    x, slopes = torch.randn(3, 1, 9, 2, 4, dtype=torch.double), torch.randn(3, 2, dtype=torch.double)

    def call(x, slope):
        return tilewise.attention(
            x, x, x, mask_mod=lambda b, h, i, j: j <= i, score_mod=lambda s, b, h, i, j: s * slope[h]
        )  # fmt: skip

    one_by_one = torch.stack([call(*pair) for pair in zip(x, slopes)])
    close(torch.vmap(call)(x, slopes), one_by_one)
    found = torch.func.grad(lambda s: call(x[0], s).sin().sum())(slopes[0])
    leaf = slopes[0].clone().requires_grad_()
    close(found, torch.autograd.grad(call(x[0], leaf).sin().sum(), leaf)[0])


def test_a_first_call_imports_no_compiler():
    """It takes seconds."""
    code = (
        "import sys, torch, tilewise; x = torch.ones(1, 4, 1, 4); "
        "n = torch.arange(4); tilewise.attention(x, x, x, mask_mod=lambda b, h, i, j: n[j] <= n[i]); "
        "assert not {'torch._dynamo.convert_frame', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_windows_across_many_tiles():
    """The first visible key is in the middle of a tile of the map."""
    q, k, v = (
        torch.randn(1, *n, 8, dtype=torch.double, requires_grad=True) for n in ((600, 2), (999, 1), (999, 1))
    )
    options = {
        "mask_mod": lambda b, h, i, j: ((i + j) % 3 != h) & ((j // 256 + i // 200) % 3 != 1),
        "score_mod": lambda s, b, h, i, j: s + (i - j) * 0.125, "window": (300, 50),
    }  # fmt: skip
    out = tilewise.attention(q, k, v, **options)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), dout)
    with torch.no_grad():
        exact, _ = reference.attention(q, k, v, **options)
        grads = reference.attention_backward(dout, q, k, v, **options)
    for ours, theirs in zip((out, *found), (exact, *grads[:3]), strict=True):
        close(ours, theirs)


def test_a_method_of_an_object_that_changes_is_asked_again():
    factors = {"score": 0.0}
    read, q = factors.get, torch.randn(1, 4, 1, 8)

    def scaled(s, b, h, i, j):
        return s * read("score")

    before = tilewise.attention(q, q, q, score_mod=scaled)
    factors["score"] = 1.0
    after = tilewise.attention(q, q, q, score_mod=scaled)
    torch.testing.assert_close(after, tilewise.attention(q, q, q))
    assert not torch.equal(after, before)


def test_a_map_without_numbers_is_made():
    """Of a call that is only compiled, here by ranges of indices that a tensor holds."""
    documents, blocks = torch.zeros(99, dtype=torch.int64), torch.zeros(13, dtype=torch.int64)
    found = trace(lambda b, h, i, j: documents[blocks[i // 8]] == documents[j], None)
    numbers = pack(found, torch.zeros(1))
    numbers = Buffers(numbers.floats, numbers.integers.to("meta"), numbers.layout)
    spans = (edges(n, block, "meta") for n, block in ((1, 1), (1, 1), (99, 16), (99, 16)))
    assert tile_kinds(check_indices(found, (1, 1, 99, 99)), numbers, *spans).shape == (1, 1, 7, 7)
