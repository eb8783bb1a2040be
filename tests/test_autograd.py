"""Derivatives of every kind, and the transforms that ask for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, library
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import reference
from tilewise.core.functions.call import with_functions
from tilewise.core.problem import Inputs, Options
from tilewise.rotary import apply_rotary, rotary_tables

CASES = [
    {},
    {"causal": True},
    {"window": (2, 1)},
    {"softcap": 1.5, "bias": True},
    {"sinks": True, "causal": True},
    {"dropout_p": 0.3, "alibi_slopes": torch.rand(4, dtype=torch.float64)},
    {"mask": torch.rand(1, 1, 4, 6) > 0.4, "bias": True, "sinks": True, "softcap": 2.0, "dropout_p": 0.2},
]
ids = ["+".join(case) or "full" for case in CASES]


def differentiable(case, backend=None):
    """A function of the differentiable tensors of a case, and float64 values for them."""
    torch.manual_seed(3)

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    leaves = [leaf(2, 4, 4, 3), leaf(2, 6, 2, 3), leaf(2, 6, 2, 2)]
    names = [name for name in ("bias", "sinks") if name in case]
    leaves += [leaf(1, 4, 4, 6) if name == "bias" else leaf(4) for name in names]
    fixed = {name: option for name, option in case.items() if name not in names}

    def function(q, k, v, *rest):
        generator = torch.Generator().manual_seed(5) if case.get("dropout_p") else None
        return tilewise.attention(
            q, k, v, return_lse=True, generator=generator, backend=backend, **fixed, **dict(zip(names, rest))
        )

    return function, leaves


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_first_derivatives(case):
    function, leaves = differentiable(case)
    assert gradcheck(function, leaves, check_batched_grad=True, check_forward_ad=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_second_derivatives(case):
    function, leaves = differentiable(case)
    assert gradgradcheck(function, leaves)


def test_packed_and_empty_rows_have_both_derivatives():
    q, k, v = (torch.randn(7, heads, 3, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    cu_q, cu_k = torch.tensor([0, 5, 5, 7]), torch.tensor([0, 2, 4, 7])

    def function(q, k, v):
        return tilewise.attention_varlen(q, k, v, cu_q, cu_k, causal=True, window=(2, None))

    assert gradcheck(function, (q, k, v))
    assert gradgradcheck(function, (q, k, v))


def test_aten_first_and_second_derivatives():
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def function(q, k, v):
        return tilewise.attention(q, k, v, causal=True, backend="aten")

    assert gradcheck(function, (q, k, v))
    assert gradgradcheck(function, (q, k, v))


@pytest.mark.sample(3)
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
@pytest.mark.parametrize("backend", [None, "llvm", "tiled"])
def test_slopes_are_learned(backend, shape):
    q, k, v = (torch.randn(2, n, h, 8, dtype=torch.float64) for n, h in ((20, 4), (31, 2), (31, 2)))
    leaves = [t.requires_grad_() for t in (q, k, v, torch.rand(shape, dtype=torch.float64))]
    options = {"causal": True, "softcap": 3.0, "alibi_slopes": leaves[3]}
    options["score_mod"] = lambda score, b, h, i, j: score * torch.cos(score + h)
    out, (exact, *_) = (
        tilewise.attention(q, k, v, backend=backend, **options),
        reference.attention(q, k, v, **options),
    )
    dout = torch.randn_like(out)
    grads = zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(exact, leaves, dout), strict=True)
    for found, expected in ((out, exact), *grads):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_slopes_of_packed_sequences_are_learned():
    q, k, v = (torch.randn(30, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([0, 11, 30])
    out = tilewise.attention_varlen(q, k, v, ends, ends, alibi_slopes=slopes)
    parts = [
        tilewise.attention(*(t[None, a:b] for t in (q, k, v)), alibi_slopes=slopes)[0]
        for a, b in ((0, 11), (11, 30))
    ]
    expected = torch.cat(parts)
    for a, b in zip(
        *(torch.autograd.grad(o.square().sum(), (slopes, q)) for o in (out, expected)), strict=True
    ):
        torch.testing.assert_close(a, b)
    with pytest.raises(
        NotImplementedError, match=r"alibi_slopes.requires_grad=True has a gradient in attention"
    ):
        tilewise.attention_varlen(q, k, v, ends, ends.clone(), alibi_slopes=slopes)


def small(dtype=torch.float64):
    torch.manual_seed(11)
    return [torch.randn(2, 5, 2, 4, dtype=dtype) for _ in range(3)]


def loss(q, k, v):
    return tilewise.attention(q, k, v, causal=True, softcap=3.0).square().sum()


def test_func_grad_and_hessian():
    q, k, v = small()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    for found, exact in zip(torch.func.grad(loss, (0, 1, 2))(q, k, v), expected):
        torch.testing.assert_close(found, exact)

    def by_formula(q):
        s = torch.einsum("bihd,bjhd->bhij", q, k) / 2
        s = 3 * torch.tanh(s / 3)
        s = s.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
        return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v).square().sum()

    exact = torch.func.hessian(by_formula)(q)
    torch.testing.assert_close(torch.func.hessian(lambda q: loss(q, k, v))(q), exact)


def captured(q, k, v, slopes, bias):
    return tilewise.attention(
        q, k, v, bias=bias, return_lse=True,
        mask_mod=lambda b, h, i, j: i + 1 >= j, score_mod=lambda s, b, h, i, j: s - s * slopes[h] * (i - j),
    )  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, "functions"], ids=[*ids, "functions"])
def test_reverse_over_forward_mode(case):
    """Of inputs and tangents, as the gradient's own derivative has it."""
    if case == "functions":
        _, leaves = differentiable({"bias": True})
        function, leaves = captured, [*leaves[:3], torch.rand(4, dtype=torch.float64), leaves[3]]
    else:
        function, leaves = differentiable(case)
    leaves = tuple(t.detach() for t in leaves)
    tangents = tuple(torch.randn_like(t) for t in leaves)
    weights = [torch.randn_like(t) for t in function(*leaves)]

    def weighted(*outputs):
        return sum((w * t).sum() for w, t in zip(weights, outputs))

    def by_forward(leaves, tangents):
        return weighted(*torch.func.jvp(function, leaves, tangents)[1])

    def by_gradient(leaves, tangents):
        grads = torch.func.grad(lambda leaves: weighted(*function(*leaves)))(leaves)
        return sum((t * g).sum() for t, g in zip(tangents, grads))

    found, expected = (torch.func.grad(f, (0, 1))(leaves, tangents) for f in (by_forward, by_gradient))
    torch.testing.assert_close(found, expected)
    assert all(t.any() for t in expected[0])


def test_gradients_of_captured_tensors_that_have_tangents():
    """Of what is not linear in out: the gradient of out by such a tensor is then a part of it."""
    q, k, v = small()
    leaves = torch.rand(2, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    along = torch.randn_like(leaves[0])

    def by_forward(attend, slopes, shift):
        def f(slopes):
            out = attend(
                q, k, v, causal=True, alibi_slopes=slopes, score_mod=lambda s, b, h, i, j: s * shift[j]
            )
            return out.square().sum()

        return torch.func.jvp(f, (slopes,), (along,))[1]

    def formula(*inputs, **options):
        return reference.attention(*inputs, **options)[0]

    found, expected = (
        torch.func.grad(by_forward, (1, 2))(attend, *leaves) for attend in (tilewise.attention, formula)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"mask_mod": lambda b, h, i, j: i >= j}], ids=["full", "mask_mod"])
def test_a_derivative_that_is_missing_is_not_zero(options):
    q, k, v = torch.randn(3, 1, 4, 1, 2, dtype=torch.float64)

    def f(x):
        return tilewise.attention(x, k, v, **options).square().sum()

    def formula(x):
        return tilewise.reference.attention(x, k, v, **options)[0].square().sum()

    def along(f):
        return lambda x: torch.func.jvp(f, (x,), (k,))[1]

    jacrev, jacfwd, hessian = torch.func.jacrev, torch.func.jacfwd, torch.func.hessian
    torch.testing.assert_close(torch.func.grad(along(f))(q), torch.func.grad(along(formula))(q))
    torch.testing.assert_close(jacrev(jacfwd(f))(q), hessian(f)(q))
    for twice in (along(along(f)), jacfwd(jacfwd(f))):
        with pytest.raises(NotImplementedError, match=r"forward mode over forward mode.*torch.func.hessian"):
            twice(q)
    for thrice in (jacfwd(hessian(f)), jacrev(hessian(f)), jacrev(jacrev(jacrev(f)))):
        with pytest.raises(NotImplementedError, match="no third"):
            thrice(q)
    assert along(along(along(formula)))(q).abs() > 0


@pytest.mark.parametrize("backend", [None, "tiled"])
def test_third_derivatives_by_autograd_are_refused(backend):
    q, k, v = (t.requires_grad_() for t in small())
    g = tilewise.attention(q, k, v, backend=backend).square().sum()
    for _ in range(2):
        (g,) = torch.autograd.grad(g.square().sum(), q, create_graph=True)
    for leaf in (q, k):
        with pytest.raises(NotImplementedError, match="no third derivatives: tilewise"):
            torch.autograd.grad(g.square().sum(), leaf, retain_graph=True)


def test_hessian_vector_products_of_autograd_functional():
    q, k, v = small()
    f = lambda attend: lambda q: attend(q, k, v).pow(3).sum()  # noqa: E731
    along = torch.randn_like(q)
    with pytest.raises(NotImplementedError, match="hvp takes one; vhp, the same product, takes none"):
        torch.autograd.functional.hvp(f(tilewise.attention), q, along)
    _, found = torch.autograd.functional.vhp(f(tilewise.attention), q, along)
    formula = f(lambda *x: tilewise.reference.attention(*x)[0])
    torch.testing.assert_close(found, torch.autograd.functional.hvp(formula, q, along)[1])


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 1, 2)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"bias": True}, {"sinks": True}, {"packed": True}])
def test_vmap_is_a_loop(dims, options):
    torch.manual_seed(2)
    packed = "packed" in options
    shape = (6, 2, 4) if packed else (2, 5, 2, 4)
    stacked = []
    for dim in dims:
        t = torch.randn(3, *shape)
        stacked.append(t[0] if dim is None else t.movedim(0, dim).contiguous())
    extra = {"bias": torch.randn(3, 1, 2, 5, 5), "sinks": torch.randn(3, 2)}
    name = next((n for n in extra if n in options), None)
    cu = torch.tensor([0, 2, 6])

    def function(q, k, v, e):
        named = {name: e} if name else {}
        if packed:
            return tilewise.attention_varlen(q, k, v, cu, cu, causal=True)
        return tilewise.attention(q, k, v, causal=options.get("causal", False), **named)

    def summed(q, k, v, e):
        return function(q, k, v, e).square().sum()

    e = extra.get(name, torch.zeros(3, 1))
    found = torch.func.vmap(function, in_dims=(*dims, 0))(*stacked, e)
    gradients = torch.func.vmap(torch.func.grad(summed, argnums=(0, 1, 2)), in_dims=(*dims, 0))(*stacked, e)
    for n in range(3):
        row = [t if dim is None else t.select(dim, n) for t, dim in zip(stacked, dims)]
        torch.testing.assert_close(found[n], function(*row, e[n]))
        for found_gradient, expected in zip(
            gradients, torch.func.grad(summed, argnums=(0, 1, 2))(*row, e[n])
        ):
            torch.testing.assert_close(found_gradient[n], expected, rtol=1e-4, atol=1e-5)


def test_vmap_of_nothing():
    """Folded into the batch, and by the loop."""
    q, sinks = torch.randn(0, 2, 5, 2, 4), torch.randn(0, 2)
    for function, given in (
        (lambda q: tilewise.attention(q, q, q), (q,)),
        (lambda q, sinks: tilewise.attention(q, q, q, sinks=sinks), (q, sinks)),
    ):
        assert torch.func.vmap(function)(*given).shape == q.shape
        summed = torch.func.grad(lambda *given: function(*given).sum())  # noqa: B023
        assert torch.func.vmap(summed)(*given).shape == q.shape
    no_keys = torch.randn(1, 0, 2, 4)
    hessian = torch.func.hessian(lambda k: tilewise.attention(q.new_ones(1, 1, 2, 4), k, k).sum())(no_keys)
    assert hessian.shape == (*no_keys.shape, *no_keys.shape)


def test_values_that_are_keys_in_a_transform():
    """Whose tensors do not say whose memory they share."""
    q, k = torch.randn(3, 1, 5, 2, 4), torch.randn(3, 1, 5, 2, 4)

    def function(q, k):
        return tilewise.attention(q, k, k[..., :2], causal=True)

    found = torch.func.vmap(function)(q, k)
    gradient = torch.func.grad(lambda k: function(q[0], k).square().sum())(k[0])
    leaf = k[0].clone().requires_grad_()
    out = function(q[0], leaf)
    torch.testing.assert_close(found[0], out)
    torch.testing.assert_close(gradient, torch.autograd.grad(out.square().sum(), leaf)[0])


class Tagged(torch.Tensor):
    """A subclass, as packages for images have."""


@pytest.mark.parametrize("which", [(0, 1, 2), (0,), (1,), (3,)])
def test_tensors_of_a_subclass(which):
    """Any argument may be one; the results then are."""
    leaves = [torch.randn(1, 5, 2, 4, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(2, requires_grad=True))

    def derivatives(*given):
        out, lse = tilewise.attention(*given[:3], sinks=given[3], causal=True, return_lse=True)
        first = torch.autograd.grad(out.square().sum() + lse.sum(), leaves, create_graph=True)
        return out, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    found = derivatives(*(t.as_subclass(Tagged) if n in which else t for n, t in enumerate(leaves)))
    assert type(found[0]) is Tagged
    for t, expected in zip(found, derivatives(*leaves), strict=True):
        torch.testing.assert_close(t.as_subclass(torch.Tensor), expected)
    with torch.no_grad():
        given = [t.as_subclass(Tagged) for t in leaves[:3]]
        cache = tilewise.KVCache(1, 8, 2, 4, dtype=torch.float32)
        cached = tilewise.attention_with_cache(given[0], cache, *given[1:])
        torch.testing.assert_close(cached, tilewise.attention(*given, causal=True))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_draws_dropout(randomness):
    q, *_ = small(torch.float32)
    stacked = torch.stack([q] * 3)
    torch.manual_seed(3)
    found = torch.vmap(lambda q: tilewise.attention(q, q, q, dropout_p=0.5), randomness=randomness)(stacked)
    assert found.shape == stacked.shape and not torch.equal(found[0], tilewise.attention(q, q, q))
    assert torch.equal(found[0], found[1]) == torch.equal(found[1], found[2]) == (randomness == "same")


@pytest.mark.parametrize("packed", [False, True])
def test_forward_mode_of_alibi_slopes(packed):
    q, k, v = small()
    slopes, cu = torch.rand(2, dtype=torch.float64), torch.tensor([0, 2, 5])

    def f(q, slopes):
        if packed:
            return tilewise.attention_varlen(q[0], k[0], v[0], cu, cu, causal=True, alibi_slopes=slopes)
        return tilewise.attention(q, k, v, softcap=2.0, alibi_slopes=slopes)

    torch.testing.assert_close(torch.func.jacfwd(f, 1)(q, slopes), torch.func.jacrev(f, 1)(q, slopes))
    stacked = torch.stack([slopes, 2 * slopes])
    found = torch.func.jvp(lambda q: torch.func.vmap(lambda s: f(q, s))(stacked), (q,), (k,))[1]
    for n in range(2):
        torch.testing.assert_close(found[n], torch.func.jvp(lambda q: f(q, stacked[n]), (q,), (k,))[1])  # noqa: B023
    leaves = q.requires_grad_(), slopes.requires_grad_()
    assert torch.autograd.gradcheck(f, leaves, check_forward_ad=True)


def test_forward_mode_of_alibi_slopes_is_refused_with_a_cache():
    q, *_ = small(torch.float32)
    cache = tilewise.KVCache(*q.shape, dtype=q.dtype)
    with dual_level():
        slopes = make_dual(torch.rand(q.shape[2]), torch.ones(q.shape[2]))
        with pytest.raises(
            NotImplementedError, match="alibi_slopes with a tangent has a gradient in attention,"
        ):
            tilewise.attention_with_cache(q, cache, q, q, alibi_slopes=slopes)


@pytest.mark.parametrize("mode", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_checkpointing_with_dropout(mode):
    q, k, v = (t.requires_grad_() for t in small(torch.float32))

    def dropped(q, k, v):
        return tilewise.attention(q, k, v, dropout_p=0.4).square().sum()

    torch.manual_seed(1)
    expected = torch.autograd.grad(dropped(q, k, v), (q, k, v))
    torch.manual_seed(1)
    checkpoint(dropped, q, k, v, **mode).backward()
    for t, exact in zip((q, k, v), expected):
        torch.testing.assert_close(t.grad, exact)


COMPILED = [
    {},
    {"causal": True, "window": (3, None), "softcap": 2.0},
    {"bias": torch.randn(1, 2, 5, 5), "sinks": torch.randn(2)},
    {"mask": torch.rand(2, 1, 5, 5) > 0.3},
]


@pytest.mark.parametrize("options", COMPILED, ids=lambda o: "+".join(o) or "full")
def test_compiled_without_a_graph_break(options):
    q, k, v = (t.requires_grad_() for t in small(torch.float32))

    def function(q, k, v):
        out, lse = tilewise.attention(q * 2, k, v, return_lse=True, **options)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(q, k, v), (q, k, v))
    for found, exact in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), expected):
        torch.testing.assert_close(found, exact)


def test_compiled_with_dynamic_shapes_packing_and_dropout():
    compiled = torch.compile(tilewise.attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (5, 9, 33):
        q = torch.randn(2, seqlen, 2, 4)
        torch.testing.assert_close(compiled(q, q, q, causal=True), tilewise.attention(q, q, q, causal=True))
    packed = torch.compile(tilewise.attention_varlen, fullgraph=True, backend="aot_eager")
    x, cu = torch.randn(9, 2, 4), torch.tensor([0, 4, 9])
    torch.testing.assert_close(packed(x, x, x, cu, cu), tilewise.attention_varlen(x, x, x, cu, cu))
    q = torch.randn(1, 40, 2, 4)
    dropped = torch.compile(
        lambda q: tilewise.attention(q, q, q, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    assert dropped(q).isfinite().all() and not torch.equal(dropped(q), tilewise.attention(q, q, q))


class WithBuffers(torch.nn.Module):
    """Mask, bias and rotary tables, whose sizes are constants where those of inputs are symbols."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.rand(5, 5) > 0.3)
        self.bias = torch.nn.Parameter(torch.randn(1, 2, 5, 5))
        cos, sin = rotary_tables(torch.arange(5), 4)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x):
        x = apply_rotary(x, self.cos, self.sin)
        x = tilewise.attention(x, x, x, mask=self.mask, bias=self.bias).transpose(1, 2)
        return tilewise.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)


def test_compiled_with_sizes_of_which_some_are_symbols():
    module, x = WithBuffers(), torch.randn(2, 5, 2, 4)
    compiled = torch.compile(module, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(x), module(x))


def test_compiling_a_bad_call_is_an_error():
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 2, 8)
    with pytest.raises(Exception, match="must be divisible"):
        torch.compile(tilewise.attention, fullgraph=True, backend="aot_eager")(q, k, k)


@pytest.mark.slow
def test_inductor_runs_the_operators(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # its cache does not know the schemas
    q, k, v = (t.requires_grad_() for t in small(torch.float32))
    compiled = torch.compile(loss, fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(q, k, v), q)[0], torch.autograd.grad(loss(q, k, v), q)[0]
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("bhsd", [False, True])
def test_opcheck(bhsd):
    q, k, v = small()
    if bhsd:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    bias, sinks = torch.randn(1, 2, 5, 5, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    slopes = torch.randn(2, dtype=torch.float64)
    for t in (q, k, v, bias, sinks, slopes):
        t.requires_grad_()
    inputs, options = with_functions(
        Inputs(q, k, v, bias=bias, sinks=sinks), Options(causal=True, softcap=2.0),
        lambda b, h, i, j: i != j + 1, lambda s, b, h, i, j: s + slopes[h] * (i - j),
    )  # fmt: skip
    for saves in (True, False):
        for order in ("bshd", "bhsd"):
            arguments = (*inputs, *options, order, saves, None)
            library.opcheck(
                torch.ops.tilewise.attention.default,
                arguments if saves else tuple(t.detach() if isinstance(t, Tensor) else t for t in arguments),
            )
    results = [t.detach() for t in torch.ops.tilewise.attention(*inputs, *options, "bshd", True, None)]
    dout, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    scalars = (*options, None)
    library.opcheck(
        torch.ops.tilewise.attention_backward.default, (dout, dlse, *results, *inputs, *scalars, True)
    )
    tangents = [torch.randn_like(t) for t in (q, k, v, bias, sinks, slopes)]
    detached = Inputs(*(None if t is None else t.detach() for t in inputs))
    library.opcheck(
        torch.ops.tilewise.attention_double_backward.default,
        (*tangents, dout, dlse, *results, *detached, *scalars),
    )
    library.opcheck(torch.ops.tilewise.attention_jvp.default, (*tangents, *results, *detached, *scalars))


def test_derivatives_in_batches():
    """By PyTorch's older vmap: gradients of gradients and forward mode, of everything that has them."""
    bias, sinks = torch.randn(1, 2, 1, 5, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (*small(), bias, sinks)]

    def attend(query, key, value, bias, sinks):
        return tilewise.attention(query, key, value, bias=bias, sinks=sinks, return_lse=True)

    every = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert gradcheck(attend, leaves, fast_mode=True, **every)
    assert gradgradcheck(attend, leaves, fast_mode=True, check_fwd_over_rev=True, check_batched_grad=True)


def test_opcheck_packed():
    x, cu = torch.randn(9, 2, 4, requires_grad=True), torch.tensor([0, 4, 9])
    inputs = Inputs(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu)
    arguments = (*inputs, *Options(causal=True), "bshd", True, None)
    library.opcheck(torch.ops.tilewise.attention.default, arguments)


def test_gradients_come_in_the_dtype_of_their_input():
    q, k, v = (torch.randn(1, 6, 2, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 1, 6, 6, requires_grad=True)
    out = tilewise.attention(q, k, v, bias=bias)
    grads = torch.autograd.grad(out.sum(), (q, k, v, bias))
    assert [g.dtype for g in grads] == [torch.bfloat16] * 3 + [torch.float32]


@pytest.mark.parametrize("backend", [None, "llvm", "aten", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(backend, dtype):
    """A kernel's own products keep their dtypes: forward, backward and twice, inside of autocast or after."""
    leaves = [torch.randn(1, 70, 2, 32).to(dtype).requires_grad_() for _ in range(3)]
    dout = torch.randn(1, 70, 2, 32).to(dtype)

    def results(autocast_backward):
        out, lse = tilewise.attention(*leaves, causal=True, backend=backend, return_lse=True)
        with torch.autocast("cpu", enabled=autocast_backward):
            first = torch.autograd.grad(out, leaves, dout, create_graph=True)
            second = torch.autograd.grad([g.float().square().sum() for g in first], leaves)
        with torch.no_grad():
            repeated = [tilewise.attention(*leaves, causal=True, backend=backend) for _ in range(2)]
        return [out, lse, *first, *second, *repeated]

    expected = results(False)
    for autocast_backward in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = results(autocast_backward)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_backend_without_a_gradient_of_lse_refuses_it():
    """Its backward of out alone would leave it out."""
    q, k, v = (torch.randn(1, 9, 2, 16, requires_grad=True) for _ in range(3))
    out, lse = tilewise.attention(q, k, v, return_lse=True, backend="aten")
    torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    with pytest.raises(NotImplementedError, match="'aten' has no lse gradient; 'llvm' or"):
        torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))


FORWARD = {
    "jvp": lambda f, x, dot: torch.func.jvp(f, (x,), (dot,))[1],
    "dual": lambda f, x, dot: along_dual(f, x, dot),
    "hessian": lambda f, x, _: torch.func.hessian(lambda x: f(x).square().sum())(x),
    "vmap_jvp": lambda f, x, dot: torch.func.vmap(lambda dot: torch.func.jvp(f, (x,), (dot,))[1])(dot[None]),
    "vmap_grad": lambda f, x, _: torch.func.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x[None]),
}


def along_dual(f, x, dot):
    with dual_level():
        return unpack_dual(f(make_dual(x, dot))).tangent


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("which", FORWARD)
def test_derivatives_and_compiled_code(which, is_inside):
    """Operators have no forward mode: compiled code has to leave the call to what has."""
    q, k, v = small()

    def f(q):
        return tilewise.attention(q, k, v, causal=True)

    expected = FORWARD[which](f, q, v)
    torch.compiler.reset()
    compiled = torch.compile(f, backend="aot_eager")
    torch.testing.assert_close(compiled(q), f(q))  # which is not what a transform is to find
    if is_inside:
        found = torch.compile(lambda q, v: FORWARD[which](f, q, v), backend="aot_eager")(q, v)
    else:
        found = FORWARD[which](compiled, q, v)
    torch.testing.assert_close(found, expected)
    with pytest.raises(Exception, match=r"_by_function|functorch"):
        torch.compile(lambda q, v: FORWARD[which](f, q, v), backend="aot_eager", fullgraph=True)(q, v)


def test_slopes_are_learned_by_a_transform_in_compiled_code():
    q, k, v = small()

    def gradient(slopes):
        return torch.func.grad(lambda s: tilewise.attention(q, k, v, alibi_slopes=s).square().sum())(slopes)

    slopes = torch.rand(2, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(gradient, backend="aot_eager")(slopes), gradient(slopes))


def test_compiled_autograd_of_an_eager_call():
    """It traces what it meets, and breaks its graph at what it cannot."""
    q, k, v = (t.requires_grad_() for t in small())
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    torch.compiler.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        found = loss(q, k, v)
        torch.compile(lambda: found.backward(), backend="aot_eager")()
    torch.testing.assert_close([t.grad for t in (q, k, v)], list(expected))
