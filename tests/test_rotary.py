import pytest
import torch

from tilewise.rotary import apply_rotary, rotary_tables


def turn(x, positions, base, rotary_dim, interleaved):
    """The definition, by complex numbers: coordinate pairs times exp(i * angle)."""
    pairs = rotary_dim // 2
    if interleaved:
        a, b = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    else:
        a, b = x[..., :pairs], x[..., pairs:rotary_dim]
    angle = positions[..., None].double() / base ** (torch.arange(pairs).double() * 2 / rotary_dim)
    z = torch.complex(a.double(), b.double()) * torch.polar(torch.ones_like(angle), angle)[..., None, :]
    out = x.double().clone()
    if interleaved:
        out[..., 0:rotary_dim:2], out[..., 1:rotary_dim:2] = z.real, z.imag
    else:
        out[..., :pairs], out[..., pairs:rotary_dim] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 6, 10])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_definition(interleaved, rotary_dim, per_sequence):
    x = torch.randn(3, 5, 2, 10, dtype=torch.float64)
    positions = torch.randint(0, 5000, (3, 5) if per_sequence else (5,))
    cos, sin = rotary_tables(positions, rotary_dim, 500.0, dtype=torch.float64)
    out = apply_rotary(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(
        out, turn(x, positions, 500.0, rotary_dim, interleaved), rtol=1e-12, atol=1e-12
    )
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


def test_packed_tokens():
    x, positions = torch.randn(7, 2, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 0, 1])
    cos, sin = rotary_tables(positions, 8, dtype=torch.float64)
    torch.testing.assert_close(apply_rotary(x, cos, sin), turn(x, positions, 10000.0, 8, False))


def test_products_depend_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(i, j):
        tables = [rotary_tables(torch.tensor([p]), 16, dtype=torch.float64) for p in (i, j)]
        return (apply_rotary(q, *tables[0]) * apply_rotary(k, *tables[1])).sum()

    torch.testing.assert_close(score(3, 10), score(1003, 1010))
    assert not torch.isclose(score(3, 10), score(3, 11))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_rounding(dtype):
    x = torch.randn(1, 9, 2, 32).to(dtype)
    positions = torch.arange(100_000, 100_009)
    out = apply_rotary(x, *rotary_tables(positions, 32))
    assert out.dtype == dtype
    expected = turn(x, positions, 10000.0, 32, False)
    bound = torch.finfo(dtype).eps * expected.abs().amax() + 1e-6
    assert (out.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient(interleaved):
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = rotary_tables(torch.arange(3), 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda t: apply_rotary(t, cos, sin, interleaved=interleaved), x)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rotary_tables(torch.arange(3), 5), "rotary_dim=5"),
        (lambda: rotary_tables(torch.arange(3), 0), "rotary_dim=0"),
        (lambda: rotary_tables(torch.arange(3), 4, base=-1.0), "base=-1.0"),
        (
            lambda: apply_rotary(torch.ones(1, 3, 1, 4), torch.ones(3, 3), torch.ones(3, 3)),
            "cos.shape=(3, 3)",
        ),
        (
            lambda: apply_rotary(torch.ones(1, 3, 1, 4), torch.ones(3, 2), torch.ones(3, 1)),
            "sin.shape=(3, 1)",
        ),
        (lambda: apply_rotary(torch.ones(1, 3, 1, 4), torch.ones(4, 2), torch.ones(4, 2)), "cos[:seqlen]"),
        (lambda: apply_rotary(torch.ones(3, 1, 4), torch.ones(2, 3, 2), torch.ones(2, 3, 2)), "broadcast"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)
