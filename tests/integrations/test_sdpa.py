"""`scaled_dot_product_attention` against `torch.nn.functional`'s, to the letter, and the reference."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import tilewise
from tilewise import reference
from tilewise.integrations.sdpa import scaled_dot_product_attention
from tilewise.testing import compare

NEG_INF = float("-inf")


def randn(*shape, grad=True):
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def same_as_torch(q, k, v, **options):
    """Values and every gradient, a float mask's among them, equal torch's (by its formula in ATen)."""
    ours = scaled_dot_product_attention(q, k, v, **options)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(q, k, v, **options)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)
    wanted = [t for t in (q, k, v, options.get("attn_mask")) if t is not None and t.requires_grad]
    dout = torch.randn_like(theirs)
    for a, b in zip(torch.autograd.grad(ours, wanted, dout), torch.autograd.grad(theirs, wanted, dout)):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b)
    return ours


def test_signature():
    *parameters, unknown = inspect.signature(scaled_dot_product_attention).parameters.values()
    assert unknown.kind is inspect.Parameter.VAR_KEYWORD  # refused with what was meant
    assert [(p.name, p.default) for p in parameters] == [
        ("query", inspect.Parameter.empty),
        ("key", inspect.Parameter.empty),
        ("value", inspect.Parameter.empty),
        ("attn_mask", None),
        ("dropout_p", 0.0),
        ("is_causal", False),
        ("scale", None),
        ("enable_gqa", False),
    ]
    assert tilewise.scaled_dot_product_attention is scaled_dot_product_attention


@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -1.0])
def test_plain(scale):
    same_as_torch(randn(2, 3, 7, 8), randn(2, 3, 5, 8), randn(2, 3, 5, 8), scale=scale)


@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (2, 1, 3), (2, 2, 1, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dim_v", [8, 5])
def test_leading_dimensions(leading, is_causal, dim_v):
    """From two dimensions to six; empty ones; another head size of the values."""
    q, k, v = randn(*leading, 4, 8), randn(*leading, 6, 8), randn(*leading, 6, dim_v)
    same_as_torch(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((3, 8), (2, 5, 8), (2, 5, 8)),
        ((2, 3, 8), (5, 8), (5, 8)),
        ((2, 4, 3, 8), (4, 5, 8), (5, 8)),
        ((1, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
        ((2, 1, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
        ((2, 4, 3, 8), (2, 1, 5, 8), (1, 4, 5, 8)),
        ((3, 1, 4, 3, 8), (2, 4, 5, 8), (1, 2, 1, 5, 8)),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_broadcasting(q, k, v, is_causal):
    same_as_torch(randn(*q), randn(*k), randn(*v), is_causal=is_causal)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(5, 5), (3, 8), (8, 3), (1, 6), (6, 1), (0, 4), (4, 0)])
@pytest.mark.parametrize("dim_v", [8, 3])
def test_causal_is_aligned_top_left(seqlen_q, seqlen_k, dim_v):
    q, k, v = randn(2, 2, seqlen_q, 8), randn(2, 2, seqlen_k, 8), randn(2, 2, seqlen_k, dim_v)
    out = same_as_torch(q, k, v, is_causal=True)
    if seqlen_q and seqlen_k:
        torch.testing.assert_close(out[:, :, 0], v[:, :, 0])


MASK_SHAPES = {
    4: [
        (4, 6),
        (1, 6),
        (4, 1),
        (1, 1),
        (3, 4, 6),
        (3, 1, 6),
        (2, 3, 4, 6),
        (2, 1, 4, 6),
        (1, 3, 1, 1),
        (2, 1, 1, 6),
    ],
    3: [(4, 6), (1, 6), (3, 4, 6), (1, 4, 6), (3, 1, 1)],
    2: [(4, 6), (1, 6), (4, 1)],
    5: [
        (4, 6),
        (3, 4, 6),
        (2, 3, 4, 6),
        (2, 1, 1, 6),
        (5, 2, 3, 4, 6),
        (5, 1, 1, 4, 1),
        (1, 1, 3, 4, 6),
        (1, 2, 1, 1, 6),
    ],
}
LEADING = {2: (), 3: (3,), 4: (2, 3), 5: (5, 2, 3)}
MASKS = [(rank, shape) for rank, shapes in MASK_SHAPES.items() for shape in shapes]


@pytest.mark.parametrize("rank, shape", MASKS)
def test_bool_mask(rank, shape):
    lead = LEADING[rank]
    mask = torch.rand(shape) > 0.4
    same_as_torch(randn(*lead, 4, 8), randn(*lead, 6, 8), randn(*lead, 6, 5), attn_mask=mask)


@pytest.mark.parametrize("rank, shape", MASKS)
def test_float_mask_and_its_gradient(rank, shape):
    lead = LEADING[rank]
    same_as_torch(randn(*lead, 4, 8), randn(*lead, 6, 8), randn(*lead, 6, 5), attn_mask=randn(*shape))


def test_mask_of_fewer_than_two_dimensions():
    """torch's formula refuses these; they broadcast as any tensor does."""
    q, k, v = randn(2, 3, 4, 8), randn(2, 3, 6, 8), randn(2, 3, 6, 8)
    row = randn(6)
    torch.testing.assert_close(
        scaled_dot_product_attention(q, k, v, row),
        F.scaled_dot_product_attention(q, k, v, row.expand(4, 6)),
    )
    assert not scaled_dot_product_attention(q, k, v, torch.tensor(False)).any()


def test_float32_mask_with_half_inputs():
    q, k, v = (torch.randn(2, 3, 9, 16).to(torch.bfloat16) for _ in range(3))
    mask = torch.randn(9, 9)
    out = scaled_dot_product_attention(q, k, v, mask)
    expected, _ = reference.attention(q, k, v, bias=mask, layout="bhsd")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_fully_masked_rows_are_zero(kind):
    """And so are their gradients; torch gives NaN gradients for the float mask's, so values only there."""
    q, k, v = randn(2, 3, 4, 8), randn(2, 3, 6, 8), randn(2, 3, 6, 8)
    mask = torch.rand(2, 1, 4, 6) > 0.4
    mask[0, 0, 2], mask[1, 0, :] = False, False
    if kind == "float":
        mask = torch.zeros(2, 1, 4, 6, dtype=torch.float64).masked_fill(~mask, NEG_INF)
    out = scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, mask))
    assert not out[0, :, 2].any() and not out[1].any()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert not dq[0, :, 2].any() and not any(g[1].any() for g in (dq, dk, dv))
    assert all(g.isfinite().all() for g in (dq, dk, dv))


@pytest.mark.parametrize(
    "heads, heads_k, heads_v", [(8, 2, 2), (8, 1, 1), (8, 8, 8), (8, 2, 4), (12, 4, 6), (4, 4, 1)]
)
@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_grouped_queries(heads, heads_k, heads_v, leading):
    q = randn(*leading, heads, 5, 8)
    k, v = randn(*leading, heads_k, 7, 8), randn(*leading, heads_v, 7, 6)
    same_as_torch(q, k, v, enable_gqa=True)
    same_as_torch(q, k, v, enable_gqa=True, is_causal=True)
    same_as_torch(q, k, v, enable_gqa=True, attn_mask=randn(heads, 5, 7))


def test_strided_inputs():
    qkv = torch.randn(2, 7, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
    ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours, theirs)
    dout = torch.randn_like(theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, qkv, dout), torch.autograd.grad(theirs, qkv, dout))
    q = randn(2, 3, 8, 7).mT  # the last dimension is not contiguous
    same_as_torch(q, *(t.detach().requires_grad_() for t in (k[:, :3], v[:, :3])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(dtype):
    q, k, v = (torch.randn(2, 3, 70, 16).to(dtype) for _ in range(3))
    expected, _ = reference.attention(q, k, v, causal=True, layout="bhsd")
    ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert ours.dtype == dtype
    budget = 2 * (theirs.double() - expected).abs().max() + 8 * torch.finfo(torch.float32).eps
    assert (ours.double() - expected).abs().max() <= budget


def test_dropout():
    """Reproducible from torch's seed, scaled so that the mean stays, applied without any training flag."""
    q, k, v = randn(2, 3, 6, 8), randn(2, 3, 5, 8), randn(2, 3, 5, 8)
    torch.manual_seed(5)
    out = scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    torch.manual_seed(5)
    seed = torch.randint(2**63 - 1, ())
    expected, _ = reference.attention(q, k, v, dropout_p=0.4, dropout_seed=seed, layout="bhsd")
    torch.testing.assert_close(out, expected)
    same_as_torch(q, k, v, dropout_p=1.0)


def test_compiles_in_one_graph():
    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))
    mask = torch.randn(6, 6)

    def both(q, k, v):
        masked = scaled_dot_product_attention(q, k, v, mask)
        return scaled_dot_product_attention(q, k, v, is_causal=True) + masked

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), both(q, k, v))


def test_one_graph_serves_all_batches_of_three_dimensions():
    counter = CompileCounter()
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend=counter)
    for batch in (2, 3, 5, 8):
        q, k, v = randn(batch, 6, 8), randn(batch, 5, 8), randn(1, 5, 8)
        torch.testing.assert_close(compiled(q, k, v), scaled_dot_product_attention(q, k, v))
    assert counter.frame_count == 2  # the second is for all that follow


@pytest.mark.parametrize("mask", [None, torch.randn(6, 6), torch.rand(6, 6) > 0.3])
def test_autocast(mask):
    """As torch's: keys that a rotary embedding left in float32 meet values in bfloat16."""
    q, k, v = (torch.randn(2, 3, 6, 8) for _ in range(3))
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    rounded = (t.bfloat16().double() for t in (q, k, v))
    is_float = mask is not None and mask.dtype != torch.bool
    exact = torch.nn.functional.scaled_dot_product_attention(
        *rounded, mask.bfloat16().double() if is_float else mask
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v.bfloat16(), mask)
        for function in (scaled_dot_product_attention, scaled_dot_product_attention, compiled):
            found = function(q, k, v.bfloat16(), mask)
            assert found.dtype == torch.bfloat16 and compare("out", found, exact, expected).is_within
        assert scaled_dot_product_attention(q.double(), k.double(), v.double()).dtype == torch.float64
    assert scaled_dot_product_attention(q, k, v).dtype == torch.float32


X = torch.ones(2, 3, 4, 8)
ERRORS = [
    (
        lambda: scaled_dot_product_attention(X, X, X, torch.ones(4, 4), is_causal=True),
        ValueError,
        "is_causal=True",
    ),
    (lambda: scaled_dot_product_attention(X[0, 0, 0], X, X), ValueError, "query.shape=(8,)"),
    (lambda: scaled_dot_product_attention(X, X, None), TypeError, "value=NoneType"),
    (lambda: scaled_dot_product_attention(X, X, X, [1]), TypeError, "attn_mask=list"),
    (
        lambda: scaled_dot_product_attention(X, X, X, torch.ones(4, 4, dtype=torch.int32)),
        TypeError,
        "attn_mask.dtype",
    ),
    (
        lambda: scaled_dot_product_attention(X, X, X, torch.ones(4, 4).to(torch.float8_e5m2)),
        TypeError,
        "attn_mask.dtype=torch.float8_e5m2",
    ),
    (lambda: scaled_dot_product_attention(X, X, X, torch.ones(5, 4)), ValueError, "attn_mask.shape=(5, 4)"),
    (
        lambda: scaled_dot_product_attention(X, X, X, torch.ones(3, 1, 4, 4)),
        ValueError,
        "attn_mask.shape=(3, 1, 4, 4)",
    ),
    (
        lambda: scaled_dot_product_attention(X[0], X[0], X[0], torch.ones(1, 3, 4, 4)),
        ValueError,
        "attn_mask.shape",
    ),
    (lambda: scaled_dot_product_attention(X, X[:, :2], X[:, :2]), ValueError, "unless enable_gqa=True"),
    (
        lambda: scaled_dot_product_attention(X, X[:, :2], X[:, :2], enable_gqa=True),
        ValueError,
        "key.shape[-3]=2",
    ),
    (lambda: scaled_dot_product_attention(X, X, X[:, :2], enable_gqa=True), ValueError, "value.shape[-3]=2"),
    (
        lambda: scaled_dot_product_attention(X, X, X, dropout_p=1.5),
        ValueError,
        "dropout_p=1.5 must be in [0, 1]",
    ),
    (
        lambda: scaled_dot_product_attention(*[torch.zeros(2, 4, 6, 8)] * 3, torch.ones(2, 6).bool()),
        ValueError,
        "(2, 4, 6, 6); of padding (batch, seqlen_k) pass attn_mask[:, None, None, :]",
    ),
    (lambda: scaled_dot_product_attention(X, X, X, dropout_p=-0.1), ValueError, "dropout_p=-0.1"),
    (lambda: scaled_dot_product_attention(X, X.double(), X), TypeError, "key.dtype"),
    (lambda: scaled_dot_product_attention(X, X[..., :7], X), ValueError, "key.shape[-1]=7"),
    (lambda: scaled_dot_product_attention(X, X, X[:, :, :3]), ValueError, "value.shape"),
    (lambda: scaled_dot_product_attention(X, X, X, scale=float("nan")), ValueError, "scale=nan"),
]


@pytest.mark.parametrize("call, error, message", ERRORS)
def test_errors(call, error, message):
    """Of this library's kind, and RuntimeErrors as PyTorch's own."""
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)
    assert isinstance(raised.value, RuntimeError)


@pytest.mark.parametrize("seqlen", [1, 5, 80])
@pytest.mark.parametrize("by_head", [True, False])
def test_out_has_the_memory_order_of_query(by_head, seqlen):
    q, k, v = (torch.randn(2, 3, seqlen, 16) for _ in range(3))
    if not by_head:
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for mask in (None, torch.zeros(seqlen, seqlen)):
        out = scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(out, expected)
        assert (out if by_head else out.transpose(1, 2)).is_contiguous()
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)(q, k, v)
    assert compiled.stride() == out.stride()


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("seqlens", [(5, 5), (4, 9), (9, 4)])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias_is_its_mask(make, seqlens):
    """Queries that see no key give 0 here, NaN in PyTorch."""
    q, (k, v) = torch.randn(2, 3, seqlens[0], 8), torch.randn(2, 2, 3, seqlens[1], 8)
    bias = make(*seqlens)
    found = tilewise.scaled_dot_product_attention(q, k, v, bias)
    expected = tilewise.scaled_dot_product_attention(q, k, v, bias._materialize())
    torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert tilewise.scaled_dot_product_attention(q, k, v, bias).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="is_causal=True must be False"):
        tilewise.scaled_dot_product_attention(q, k, v, bias, is_causal=True)
    with pytest.raises(ValueError, match="is a causal bias of"):
        tilewise.scaled_dot_product_attention(q[:, :, 1:], k, v, bias)
