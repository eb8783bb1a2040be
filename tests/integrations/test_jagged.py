"""Nested tensors in `scaled_dot_product_attention`: each sequence against torch's on its own."""

import pytest
import torch
import torch.nn.functional as F

from tilewise import scaled_dot_product_attention

LENGTHS = [5, 1, 17, 8]


def nested(lengths, heads, dim):
    """(batch, heads, ragged seqlen, dim), float64, of a packed tensor that takes the gradient."""
    values = torch.randn(sum(lengths), heads, dim, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return values, torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)


def each(values, lengths):
    """The sequences one by one, (1, heads, seqlen, dim)."""
    return [t.transpose(0, 1)[None] for t in values.split(lengths)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads_k", "dim_v"), [(4, 16), (2, 16), (4, 9)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_each_sequence_by_itself(is_causal, heads_k, dim_v, scale):
    lengths_k = LENGTHS if is_causal else [3, 7, 4, 1]
    shapes = [(LENGTHS, 4, 16), (lengths_k, heads_k, 16), (lengths_k, heads_k, dim_v)]
    values, tensors = zip(*(nested(*shape) for shape in shapes))
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": heads_k != 4}
    out = scaled_dot_product_attention(*tensors, **options)
    assert out.layout == torch.jagged and out.shape[:2] == (4, 4) and out.shape[3] == dim_v
    assert out.shape[2] == tensors[0].shape[2]  # ragged as the query is
    sequences = zip(*(each(t, shape[0]) for t, shape in zip(values, shapes)))
    expected = torch.cat(
        [F.scaled_dot_product_attention(*s, **options)[0].transpose(0, 1) for s in sequences]
    )
    packed = out.transpose(1, 2).values()
    torch.testing.assert_close(packed, expected)
    dout = torch.randn_like(packed)
    ours, theirs = (torch.autograd.grad(t, values, dout) for t in (packed, expected))
    torch.testing.assert_close(ours, theirs)


def test_arithmetic_with_the_query():
    """The result adds to what it came from, as a residual connection wants."""
    values, x = nested(LENGTHS, 2, 8)
    out = x + scaled_dot_product_attention(x, x, x, is_causal=True)
    assert out.transpose(1, 2).values().shape == values.shape


def test_rows_that_belong_to_no_sequence():
    values = torch.randn(12, 2, 8, dtype=torch.float64)
    values[3], values[5:8] = float("nan"), float("nan")
    values.requires_grad_()
    x = torch.nested.nested_tensor_from_jagged(
        values, torch.tensor([0, 4, 8, 12]), lengths=torch.tensor([3, 1, 4])
    ).transpose(1, 2)
    out = scaled_dot_product_attention(x, x, x)
    (found,) = torch.autograd.grad(out.values().sin().sum(), values)
    expected = []
    for a, b in zip(out.unbind(), (values[0:3], values[4:5], values[8:12])):
        b = b.transpose(0, 1)[None]
        expected.append(F.scaled_dot_product_attention(b, b, b)[0])
        torch.testing.assert_close(a, expected[-1])
    (gradient,) = torch.autograd.grad(sum(t.sin().sum() for t in expected), values)
    torch.testing.assert_close(found, gradient)


def test_bad_input():
    _, x = nested(LENGTHS, 4, 16)
    _, other = nested([6, 1, 17, 7], 4, 16)
    _, grouped = nested(LENGTHS, 2, 16)
    dense = torch.zeros(4, 4, 17, 16, dtype=torch.float64)
    mask = torch.ones(17, 17, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"key \(layout=torch.strided\) must be nested"):
        scaled_dot_product_attention(x, dense, dense)
    with pytest.raises(TypeError, match=r"query is nested of layout=torch.strided.*layout=torch.jagged"):
        scaled_dot_product_attention(*[torch.nested.nested_tensor([torch.zeros(4, 6, 16)])] * 3)
    with pytest.raises(TypeError, match=r"value \(list\) must be nested"):
        scaled_dot_product_attention(x, x, [1.0])
    with pytest.raises(ValueError, match=r"query.shape=.* must be \(batch, heads, ragged seqlen, dim\)"):
        scaled_dot_product_attention(*(3 * [x.transpose(1, 2)]))
    with pytest.raises(NotImplementedError, match="attn_mask of nested tensors: attention_varlen takes"):
        scaled_dot_product_attention(x, x, x, mask)
    with pytest.raises(ValueError, match=r"key.shape\[1\]=2 \(heads\) must equal query.shape\[1\]=4"):
        scaled_dot_product_attention(x, grouped, grouped)
    with pytest.raises(ValueError, match="value must have the sequence lengths of key"):
        scaled_dot_product_attention(x, x, other)
    with pytest.raises(ValueError, match="key must have the sequence lengths of query with is_causal=True"):
        scaled_dot_product_attention(x, other, other, is_causal=True)
