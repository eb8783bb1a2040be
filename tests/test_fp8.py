"""8-bit attention: its parts, its error, with and without rotation, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import reference
from tilewise.core import fp8

LENGTH, DIM = 1024, 128


def draw(outliers: float = 0.0, columns: int = 0) -> list[Tensor]:
    """q, k, v (1, rows, 2, 128): normal; some entries 10 times a normal number more; some columns times 8."""
    tensors = []
    for _ in range(3):
        x = torch.randn(1, LENGTH, 2, DIM)
        x += 10 * torch.randn_like(x) * (torch.rand_like(x) < outliers)
        x[..., :columns] *= 8
        tensors.append(x.bfloat16())
    return tensors


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def without_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds q and k as they are; what is rotated has products larger by the head size."""
    monkeypatch.setattr(fp8, "rotate", lambda x: x.float() * x.shape[-1] ** 0.5)


@pytest.mark.parametrize("dim", [1, 2, 64, 256])
def test_hadamard_is_orthogonal_and_its_signs_are_mixed(dim: int):
    h = fp8.hadamard(dim)
    assert torch.equal(h.abs(), torch.ones(dim, dim))
    assert torch.equal(h @ h.T, dim * torch.eye(dim))
    assert torch.equal(h, fp8.hadamard(dim))
    if dim >= 64:
        assert (h[:, 0] > 0).float().mean().sub(0.5).abs() < 0.2


def test_hadamard_of_other_sizes():
    for dim in (0, 96):
        with pytest.raises(ValueError, match=f"dim={dim} must be a power of two"):
            fp8.hadamard(dim)


@pytest.mark.parametrize("dim", [40, 64, 80, 192])
def test_rotation_changes_no_product(dim: int):
    q, k = torch.randn(2, 30, dim)
    products = fp8.rotate(q) @ fp8.rotate(k).T / fp8.padded_dim(dim)
    torch.testing.assert_close(products, q @ k.T, atol=1e-4, rtol=1e-4)


def test_a_rounded_number_is_within_a_sixteenth():
    x = torch.randn(2, 300, 40) * torch.tensor([1e-3, 1.0, 1e4, 1e30])[torch.randint(4, (2, 300, 1))]
    rounded = fp8.round_rows(x)
    mantissa, _ = torch.frexp(rounded.factors)
    assert rounded.factors.shape == (2, 3) and (mantissa == 0.5).all()  # powers of two
    largest = torch.stack([x[:, i : i + 128].abs().amax((1, 2)) for i in (0, 128, 256)], 1)
    assert (largest / rounded.factors <= 448).all() and (largest / rounded.factors > 224).all()
    smallest = 2.0**-10 * rounded.factors.repeat_interleave(128, 1)[:, :300, None]  # half of the smallest
    assert ((rounded.dequantize() - x).abs() <= torch.maximum(x.abs() / 16, smallest)).all()


def test_zeros_infinities_and_nan():
    x = torch.ones(640, 8)
    x[:128] = 0
    x[130], x[260, 3] = float("inf"), float("nan")
    x[384:512] = 1e-40
    assert fp8.round_rows(x).factors.isnan().tolist() == [False, True, True, False, False]
    assert fp8.round_rows(x).factors[0] == 1 and fp8.round_rows(x).dequantize()[512:].eq(1).all()
    assert fp8.round_rows(torch.zeros(0, 8)).factors.shape == (0,)


def test_what_is_not_finite_stays_in_its_blocks():
    q, k, v = draw()
    k[0, 300], v[0, 700] = float("nan"), float("inf")
    out = tilewise.attention(q, k, v, precision="fp8", window=(0, 0))
    bad = out.isnan().any(-1).any(-1)[0]
    assert bad[300] and bad[700] and not bad[:256].any() and not bad[768:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_of_normal_numbers(dtype: torch.dtype):
    q, k, v = (t.to(dtype) for t in draw())
    exact, exact_lse = reference.attention(q, k, v)
    out, lse = tilewise.attention(q, k, v, precision="fp8", return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert 0.02 < rms(out - exact) / rms(exact) < 0.08  # of 16-bit products: 0.002
    assert (lse - exact_lse).abs().max() < 0.1


@pytest.mark.parametrize(("given", "gain"), [({"outliers": 1e-3}, 1.5), ({"columns": 2}, 3.0)], ids=str)
def test_rotation_lowers_the_error_of_outliers(given: dict[str, Any], gain: float, monkeypatch):
    q, k, v = draw(**given)
    exact, _ = reference.attention(q, k, v)
    rotated = rms(tilewise.attention(q, k, v, precision="fp8") - exact)
    without_rotation(monkeypatch)
    assert rms(tilewise.attention(q, k, v, precision="fp8") - exact) > gain * rotated


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.05},
    "sinks": {"sinks": torch.zeros(2)},
    "bias": {"bias": torch.ones(LENGTH, LENGTH)},
    "mask": {"mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str):
    q, k, v = draw()
    exact, exact_lse = reference.attention(q, k, v, **OPTIONS[name])
    out, lse = tilewise.attention(q, k, v, precision="fp8", return_lse=True, **OPTIONS[name])
    assert rms(out - exact) < 0.08 * rms(exact)
    assert (lse - exact_lse).abs().max() < 0.5


def test_packed_sequences_are_rounded_apart():
    lengths = [130, 0, 1, 400]
    starts = torch.tensor([0, 130, 130, 131, 531], dtype=torch.int32)
    q, k, v = (torch.randn(531, heads, 80).half() for heads in (4, 2, 2))
    out = tilewise.attention_varlen(q, k, v, starts, starts, causal=True, precision="fp8")
    parts = [t.split(lengths) for t in (q, k, v)]
    for n, rows in enumerate(out.split(lengths)):
        if len(rows):
            one = tilewise.attention(*(part[n][None] for part in parts), causal=True, precision="fp8")
            assert torch.equal(rows, one[0])


def test_rows_without_keys():
    q, k, v = draw()
    out, lse = tilewise.attention(q, k[:, :5], v[:, :5], causal=True, precision="fp8", return_lse=True)
    assert out[:, : LENGTH - 5].eq(0).all() and lse[..., : LENGTH - 5].isneginf().all()
    assert out[:, LENGTH - 5 :].ne(0).any(-1).all() and lse[..., LENGTH - 5 :].isfinite().all()


@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.parametrize("name", ["causal", "softcap", "sinks"])
def test_gradients_are_the_formula_s_with_the_weights_of_the_forward(name: str, backend: str | None):
    options = OPTIONS[name]
    inputs = [t[:, :300].clone().requires_grad_() for t in draw()]
    out, lse = tilewise.attention(*inputs, precision="fp8", return_lse=True, backend=backend, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    expected = straight_through(*inputs, out, lse, dout, dlse, options)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.bfloat16 and rms(a - b) < 0.01 * rms(b)
    exact = reference.attention_backward(dout, *inputs, dlse=dlse, **options)
    for a, b in zip(found, exact[:3], strict=True):
        assert rms(a - b) < 0.1 * rms(b)


def straight_through(*tensors: Any) -> list[Tensor]:
    """dq, dk, dv in float64 from q, k, v, out and lse (batch, rows, heads, dim): P = exp(S - lse)."""
    *tensors, lse, dout, dlse, options = tensors
    q, k, v, out, do = (t.detach().double().transpose(1, 2) for t in (*tensors, dout))
    s, cap, tanh = q @ k.mT * DIM**-0.5, options.get("softcap", 0.0), 0.0
    if cap:
        tanh = torch.tanh(s / cap)
        s = cap * tanh
    p = torch.exp(s - lse.detach().double()[..., None])
    p = p.tril() if options.get("causal") else p
    delta = (do * out).sum(-1) - dlse
    ds = p * (do @ v.mT - delta[..., None]) * (1 - tanh**2) * DIM**-0.5
    return [t.transpose(1, 2) for t in (ds @ k, ds.mT @ q, p.mT @ do)]


def test_compiled_and_transformed_gradients():
    x = draw()[0][:, :50, :1]

    def run(q: Tensor) -> Tensor:
        return tilewise.attention(q, x, x, precision="fp8").float().square().sum()

    y = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(run(y), y)
    assert torch.equal(torch.func.grad(run)(x), expected)
    compiled = torch.compile(run, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(y), y)[0], expected)


class TestRefused:
    def test_dtypes(self):
        x = torch.ones(1, 4, 1, 64)
        with pytest.raises(TypeError, match=r"query\.dtype=torch\.float32 must be bfloat16 or float16"):
            tilewise.attention(x, x, x, precision="fp8")

    def test_forward_mode_and_second_derivatives(self):
        x = torch.ones(1, 4, 1, 64, dtype=torch.half)

        def run(q: Tensor) -> Tensor:
            return tilewise.attention(q, x, x, precision="fp8").float().square().sum()

        message = "precision='fp8' has gradients in reverse mode, once"
        for transform in (torch.func.hessian, lambda run: lambda q: torch.func.jvp(run, (q,), (q,))):
            with pytest.raises(NotImplementedError, match=message):
                transform(run)(x)
        y = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(run(y), y, create_graph=True)
        with pytest.raises(NotImplementedError, match=message):
            gradient.sum().backward()

    @pytest.mark.parametrize("backend", ["llvm", "aten"])
    def test_other_backends(self, backend: str):
        x = torch.ones(1, 4, 1, 64, dtype=torch.half)
        with pytest.raises(NotImplementedError, match=f"'{backend}' has no 8-bit products; 'tiled'"):
            tilewise.attention(x, x, x, precision="fp8", backend=backend)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_default_dtype_changes_nothing(default, precision):
    q = torch.randn(1, 40, 2, 48).bfloat16()
    expected, before = tilewise.attention(q, q, q, precision=precision), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(tilewise.attention(q, q, q, precision=precision), expected)
        assert fp8.hadamard(64).dtype == fp8.rotate(q).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
