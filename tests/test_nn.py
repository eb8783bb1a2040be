import pytest
import torch

import tilewise
from tilewise.nn import FlashAttention
from tilewise.rotary import apply_rotary, rotary_tables


def by_hand(layer, x, seed=None):
    """The layer from its weights, by the float64 reference; x is (batch, seqlen, d_model)."""
    h, g, d = layer.num_heads, layer.num_kv_heads, layer.head_dim
    qkv = layer.qkv_proj(x)
    q, k, v = (t.unflatten(-1, (-1, d)) for t in qkv.split((h * d, g * d, g * d), dim=-1))
    if layer.rope is not None:
        tables = rotary_tables(torch.arange(x.shape[1]), d, layer.rope, dtype=torch.float64)
        q, k = apply_rotary(q, *tables), apply_rotary(k, *tables)
    drop = {} if seed is None else {"dropout_p": layer.dropout, "dropout_seed": seed}
    out, _ = tilewise.reference.attention(q, k, v, causal=layer.causal, window=layer.window, **drop)
    return layer.out_proj(out.flatten(-2))


OPTIONS = [
    {},
    {"causal": True, "rope": 10000.0},
    {"num_kv_heads": 2, "causal": True, "window": (3, 0), "bias": False},
    {"num_kv_heads": 1, "window": (2, 4), "rope": 100.0},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_matches_the_reference_in_output_and_gradients(options):
    layer = FlashAttention(32, 4, **options).double()
    x = torch.randn(3, 11, 32, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(3, 11, 32, dtype=torch.float64)
    wanted = [x, *layer.parameters()]
    out, expected = layer(x), by_hand(layer, x)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out, wanted, dout), torch.autograd.grad(expected, wanted, dout)
    ):
        torch.testing.assert_close(ours, theirs)


def test_parameters():
    layer = FlashAttention(48, 6, 2)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {
        "qkv_proj.weight": (80, 48),
        "qkv_proj.bias": (80,),
        "out_proj.weight": (48, 48),
        "out_proj.bias": (48,),
    }
    assert all("bias" not in n for n, _ in FlashAttention(48, 6, bias=False).named_parameters())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_restart(options, dtype):
    layer = FlashAttention(32, 4, **options).double()
    lengths = [4, 0, 1, 9]
    x = torch.randn(sum(lengths), 32, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 4, 4, 5, 14], dtype=dtype)
    expected = torch.cat([by_hand(layer, part[None])[0] for part in x.split(lengths)])
    torch.testing.assert_close(layer(x, cu_seqlens=cu_seqlens), expected)


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.get("causal")])
def test_cache_continues(options):
    layer = FlashAttention(32, 4, **options).double().eval()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    cache = layer.new_cache(batch=2, max_seqlen=12)
    with torch.no_grad():
        parts = [layer(part, cache) for part in x.split([5, 1, 1, 3, 2], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), by_hand(layer, x))
    assert cache.lengths.tolist() == [12, 12]


def test_cache_with_sequences_of_different_lengths():
    layer = FlashAttention(32, 4, causal=True, rope=10000.0).double().eval()
    long, short = torch.randn(1, 9, 32, dtype=torch.float64), torch.randn(1, 6, 32, dtype=torch.float64)
    cache = layer.new_cache(batch=2, max_seqlen=10)
    with torch.no_grad():
        prompt = torch.zeros(2, 7, 32, dtype=torch.float64)
        prompt[0], prompt[1, :4] = long[0, :7], short[0, :4]
        layer(prompt, cache)
        cache.lengths[1] = 4  # the second prompt was padded at its end
        out = layer(torch.cat([long[:, 7:], short[:, 4:]]), cache)
        torch.testing.assert_close(out[0], by_hand(layer, long)[0, 7:])
        torch.testing.assert_close(out[1], by_hand(layer, short)[0, 4:])


def test_a_cache_under_autocast():
    layer, x = FlashAttention(32, 4, 2, causal=True, rope=10000.0).eval(), torch.randn(2, 7, 32)
    cache = layer.new_cache(2, 8, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        parts = [layer(part, cache) for part in x.split([5, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), atol=0.03, rtol=0.03)


def test_dropout_in_training_only():
    layer = FlashAttention(32, 4, dropout=0.5).double()
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    torch.manual_seed(3)
    out = layer(x)
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, ())
    torch.testing.assert_close(out, by_hand(layer, x, seed))
    assert not torch.allclose(out, by_hand(layer, x))
    torch.testing.assert_close(layer.eval()(x), by_hand(layer, x))


def test_half_precision_and_state_dict():
    layer = FlashAttention(32, 4, 2, causal=True, rope=10000.0)
    copy = FlashAttention(32, 4, 2, causal=True, rope=10000.0).double()
    copy.load_state_dict(layer.state_dict())
    x = torch.randn(2, 20, 32)
    out = layer.to(torch.bfloat16)(x.to(torch.bfloat16))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), copy(x.double()), atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((30, 4), {}, "d_model=30"),
        ((32, 0), {}, "num_heads=0"),
        ((32, 4, 3), {}, "num_kv_heads=3"),
        ((32, 4), {"dropout": 1.0}, "dropout=1.0"),
        ((32, 4), {"rope": 0.0}, "rope=0.0"),
        ((12, 4), {"rope": 10.0}, "head_dim d_model / num_heads=3"),
        ((32, 4), {"window": (-1, 2)}, "window=(-1, 2)"),
    ],
)
def test_bad_construction(arguments, options, message):
    with pytest.raises(ValueError) as error:
        FlashAttention(*arguments, **options)
    assert message in str(error.value)


def test_a_misspelt_option():
    with pytest.raises(TypeError, match="no argument of FlashAttention: did you mean causal"):
        FlashAttention(32, 4, casual=True)


def test_bad_calls():
    layer = FlashAttention(32, 4, causal=True, dropout=0.1)
    x, cache = torch.randn(2, 3, 32), layer.new_cache(2, 8)

    def refused(message, *arguments, error=ValueError, **named):
        with pytest.raises(error) as raised:
            layer(*arguments, **named)
        assert message in str(raised.value)
        assert cache.lengths.tolist() == [0, 0] and not cache.key.any()

    refused("x.shape=(2, 3, 31)", x[..., :31])
    refused("x.shape=(3, 32)", x[0])
    refused("x.shape=(2, 3, 32)", x, cu_seqlens=torch.tensor([0, 3]))
    refused("cu_seqlens.shape=(1, 2)", x[0], cu_seqlens=torch.tensor([[0, 3]]))
    refused("cu_seqlens_q=[0, ..., 2]", x[0], cu_seqlens=torch.tensor([0, 2]))
    refused("cu_seqlens_q[2]=1", x[0], cu_seqlens=torch.tensor([0, 2, 1, 3]))
    refused("dropout=0.1", x, cache)
    layer.eval()
    refused("torch.no_grad()", x, cache)
    with torch.no_grad():
        refused("cu_seqlens must be None", x[0], cache, torch.tensor([0, 3]))
        refused("KVCache", x, {}, error=TypeError)
        refused("(2, 4, 8)", x[:1], cache)
        refused("(2, 4, 8)", x, FlashAttention(32, 4, 2).new_cache(2, 8))
        refused("max_seqlen=8", x.repeat(1, 3, 1), cache)


def test_compiles_in_one_graph():
    layer = FlashAttention(16, 2, causal=True, rope=10000.0)
    x = torch.randn(1, 6, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_positions_restart_and_continue():
    """Rotary scores see distances alone, so only the positions themselves can show this."""
    layer, x = FlashAttention(8, 2, rope=10000.0), torch.zeros(7, 8)
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    assert layer._positions(x, None, cu_seqlens).tolist() == [0, 1, 2, 0, 1, 2, 3]
    cache = layer.new_cache(2, 9)
    cache.lengths += torch.tensor([4, 0])
    assert layer._positions(torch.zeros(2, 3, 8), cache, None).tolist() == [[4, 5, 6], [0, 1, 2]]


def test_padding_is_not_seen():
    layer = FlashAttention(32, 4).eval()
    x, is_token = torch.randn(2, 9, 32), torch.arange(9) < torch.tensor([9, 5])[:, None]
    out = layer(x, mask=is_token[:, None, None, :])
    torch.testing.assert_close(out[1:, :5], layer(x[1:, :5]))
    cache = layer.new_cache(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, cache, mask=is_token[:, None, None, :]), out)
    with pytest.raises(ValueError, match=r"mask\.shape"):
        layer(x, mask=is_token)


def test_a_cache_under_autocast_is_told_its_dtype():
    layer = tilewise.nn.FlashAttention(16, 2).eval()
    cache, x = layer.new_cache(1, 8), torch.randn(1, 3, 16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(TypeError, match=r"new_cache\(..., dtype=torch.bfloat16\)"):
            layer(x, cache)
        layer(x, layer.new_cache(1, 8, dtype=torch.bfloat16))
