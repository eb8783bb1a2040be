"""Tensors rounded to 8 bits ahead of the call, and 8-bit products of what a cache holds."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import flash_attn, flash_attn_3, reference
from tilewise.core import fp8
from tilewise.core.problem import Inputs, Options, describe
from tilewise.dispatch.capability import ROWS
from tilewise.fp8 import Quantized, quantize

CACHE = {"precision": "fp8", "causal": True}


def draw(*shape: int, heads: int = 4, dim_v: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q (..., heads, 64), k and v of half as many heads, some blocks of v a hundred times larger."""
    q, k, v = (torch.randn(*shape, h, d) for h, d in ((heads, 64), (heads // 2, 64), (heads // 2, dim_v)))
    v *= 100.0 ** (torch.arange(shape[-1]) // 100 % 2)[:, None, None]
    return [t.to(dtype) for t in (q, k, v)]


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (50, 20)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([9.0, 0.0, -3.0, 1.0])},
    "bias": {"bias": torch.randn(300, 300)},
    "mask": {"mask": torch.rand(300, 300) < 0.5},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i - j).abs() < 40},
}


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_as_rounding_in_the_call(name: str, precision: str):
    q, k, v = draw(2, 300, dim_v=40)
    expected = tilewise.attention(q, k, v, precision=precision, return_lse=True, **OPTIONS[name])
    found = tilewise.attention(*quantize(q, k, v, precision=precision), return_lse=True, **OPTIONS[name])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    by_head: Any = [t.transpose(1, 2) for t in (q, k, v)]
    by_head = quantize(*by_head, precision=precision, layout="bhsd")
    found = tilewise.attention(*by_head, layout="bhsd", **OPTIONS[name])
    assert torch.equal(found.transpose(1, 2), expected[0])


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["causal", "window", "softcap", "sinks"])
def test_options_against_the_formula_of_what_the_numbers_stand_for(name: str, precision: str):
    """What is left is the rounding of the weights: a sixteenth of each at most."""
    q8, k8, v8 = quantize(*draw(1, 300, heads=4), precision=precision)
    out, lse = tilewise.attention(q8, k8, v8, return_lse=True, **OPTIONS[name])
    given = [t.dequantize() for t in (q8, k8, v8)]
    exact, exact_lse = reference.attention(*given, **OPTIONS[name])
    bound, _ = reference.attention(*given[:2], given[2].abs(), **OPTIONS[name])
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-4, rtol=1e-5)
    smallest = 2.0**-18 * bound.amax()  # weights below are multiples of it
    assert ((out - exact).abs() <= bound / 16 * 1.05 + smallest + exact.abs() / 128).all()
    assert rms(out - exact) > 1e-3 * rms(exact)


def test_packed_sequences():
    q, k, v = draw(531, dtype=torch.half)
    starts = torch.tensor([0, 130, 130, 131, 531], dtype=torch.int32)
    expected = tilewise.attention_varlen(q, k, v, starts, starts, causal=True, precision="fp8")
    quantized = quantize(q, k, v, starts, starts)
    assert torch.equal(tilewise.attention_varlen(*quantized, starts, starts, causal=True), expected)
    again = starts.clone()
    assert torch.equal(tilewise.attention_varlen(*quantized, again, again, causal=True), expected)
    again[1] -= 1
    with pytest.raises(
        ValueError, match="cu_seqlens_k must be the offsets that the tensors were quantized with"
    ):
        tilewise.attention_varlen(*quantized, starts, again)


@pytest.mark.parametrize("face", [flash_attn, flash_attn_3])
@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_flash_attn(face: ModuleType, precision: str):
    quantized, options = quantize(*draw(2, 60), precision=precision), {"causal": True, "window_size": (40, 0)}
    expected = tilewise.attention(*quantized, causal=True, window=(40, 0))
    assert torch.equal(face.flash_attn_func(*quantized, **options), expected)

    starts = torch.tensor([0, 13, 31], dtype=torch.int32)
    quantized = quantize(*draw(31), starts, starts, precision=precision)
    expected = tilewise.attention_varlen(*quantized, starts, starts, causal=True)
    assert torch.equal(face.flash_attn_varlen_func(*quantized, starts, starts, 18, 18, causal=True), expected)
    with pytest.raises(ValueError, match="cu_seqlens_q must be the offsets"):
        face.flash_attn_varlen_func(*quantized, starts // 2 * 2, starts, 18, 18)


@pytest.mark.parametrize("shape", [(2, 300), (3, 1), (1, 128), (2, 0), (0, 5)], ids=str)
def test_what_the_numbers_stand_for(shape: tuple[int, ...]):
    given = draw(*shape, dim_v=40)
    for x, quantized in zip(given, quantize(*given), strict=True):
        found = quantized.dequantize()
        assert quantized.shape == x.shape == found.shape and quantized.dtype == torch.bfloat16
        assert found.numel() == 0 or rms(found - x) < 0.04 * rms(x)
        mantissa, _ = torch.frexp(quantized.scale)
        assert (mantissa == 0.5).all() and quantized.blocks.dtype == torch.float8_e4m3fn
        blocks = shape[0] * -(-shape[1] // 128)
        assert quantized.scale.shape == quantized.blocks.shape[:2] == (x.shape[2], blocks)


def test_autocast_rounds_no_rotation():
    inputs = draw(2, 300)
    plain = quantize(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = quantize(*inputs)
        numbers = [t.dequantize() for t in plain]
    assert all(torch.equal(a.blocks.float(), b.blocks.float()) for a, b in zip(found, plain, strict=True))
    assert all(torch.equal(a, b.dequantize()) for a, b in zip(numbers, plain, strict=True))


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e4])
def test_integers_are_multiples_of_the_block_s_largest_over_127(magnitude: float):
    x = magnitude * torch.randn(2, 300, 64)
    x[0, 128:256], x[1, 5, 3] = 0, float("nan")
    values, factors = fp8.round_rows(x, torch.int8)
    assert values.dtype == torch.int8 and factors.isnan().tolist() == [[False] * 3, [True, False, False]]
    torch.testing.assert_close(
        factors[0], torch.tensor([x[0, :128].abs().max(), 127, x[0, 256:].abs().max()]) / 127
    )
    rounded = fp8.round_rows(x, torch.int8).dequantize()
    assert ((rounded - x)[0].abs() <= factors[0].repeat_interleave(128)[:300, None] * 0.50001).all()
    assert rounded[1, :128].isnan().all() and values[0, :128].abs().max() == 127


def test_a_value_s_block_is_transposed_with_keys_in_their_order():
    v = torch.arange(128.0).remainder(16).view(1, 128, 1, 1).expand(1, 128, 1, 64).half()
    _, _, value = quantize(v, v, v)
    order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    expected = torch.tensor(order, dtype=torch.float) / value.scale.item()
    assert torch.equal(value.blocks[0, 0, 5].float().view(8, 16), expected.expand(8, 16))


def test_in_compiled_code_and_explained():
    q, k, v = draw(1, 200)
    quantized = quantize(q, k, v)
    expected = tilewise.attention(*quantized, causal=True)

    def run(q: Quantized, k: Quantized, v: Quantized) -> Tensor:
        return tilewise.attention(q, k, v, causal=True) * 2

    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(*quantized), expected * 2)
    found, plain = tilewise.explain(*quantized, causal=True), tilewise.explain(q, k, v, precision="fp8")
    assert found.backend == plain.backend == "tiled" and plain.backward_backend == "llvm"
    assert found.bytes < 0.8 * plain.bytes


class TestCaches:
    @pytest.mark.parametrize("precision", ["fp8", "int8"])
    @pytest.mark.parametrize("kind", ["contiguous", "pages of 16", "pages of 256"])
    def test_keys_of_16_bits_are_rounded_as_in_a_call_without_one(self, kind: str, precision: str):
        q, k, v = draw(1, 300)
        options = CACHE | {"precision": precision}
        cache: Any = tilewise.KVCache(1, 400, 2, 64, dtype=torch.bfloat16)
        if kind != "contiguous":
            cache = tilewise.PagedKVCache(40, int(kind.split()[-1]), 2, 64, dtype=torch.bfloat16)
            cache.allocate()
        tilewise.attention_with_cache(q[:, :170], cache, k[:, :170], v[:, :170], **options)
        found = tilewise.attention_with_cache(q[:, 170:], cache, k[:, 170:], v[:, 170:], **options)
        assert torch.equal(found, tilewise.attention(q[:, 170:], k, v, **options))

    @pytest.mark.parametrize("precision", ["fp8", "int8"])
    @pytest.mark.parametrize("page_size", [16, 64, 128, 256])
    def test_8_bit_pages_are_taken_as_they_stand(self, page_size: int, precision: str):
        q, k, v = draw(1, 300)
        cache = tilewise.PagedKVCache(40, page_size, 2, 64, dtype=torch.float8_e4m3fn)
        cache.allocate()
        out = tilewise.attention_with_cache(q, cache, k, v, **CACHE | {"precision": precision})
        plain = tilewise.attention_with_cache(q, cache, causal=True)  # weights and q are not rounded
        assert 0.01 * rms(plain) < rms(out - plain) < 0.06 * rms(plain)
        assert rms(out - reference.attention(q, k, v, causal=True)[0]) < 0.08 * rms(plain)

    def test_packed_queries_in_pages(self):
        q, k, v = draw(1, 300)
        cache = tilewise.PagedKVCache(40, 64, 2, 64, dtype=torch.bfloat16)
        batch = cache.reserve([cache.allocate(), cache.allocate()], [100, 200])
        found = tilewise.attention_with_cache(q[0], cache, k[0], v[0], batch=batch, **CACHE)
        parts = [
            tilewise.attention(q[:, s], k[:, s], v[:, s], **CACHE)[0] for s in (slice(100), slice(100, 300))
        ]
        assert torch.equal(found, torch.cat(parts))


class TestRefused:
    def check(self, error: type[Exception], message: str, *given: Any, **options: Any) -> None:
        with pytest.raises(error, match=re.escape(message)):
            tilewise.attention(*given, **options)

    def test_wrong_tensors(self):
        q, k, v = draw(1, 20, dim_v=64)
        q8, k8, v8 = quantize(q, k, v)
        self.check(TypeError, "key=Tensor must be Quantized, as the others are", q8, k, v8)
        self.check(ValueError, "key was quantized as a value", q8, v8, k8)
        self.check(ValueError, "precision='tf32' must be 'fp8'", q8, k8, v8, precision="tf32")
        self.check(ValueError, "precision='int8' must be 'fp8'", q8, k8, v8, precision="int8")
        integers = quantize(q, k, v, precision="int8")
        self.check(TypeError, "key.blocks.dtype=torch.int8 must equal", q8, integers[1], v8)
        with pytest.raises(ValueError, match="precision='ieee' must be 'fp8' or 'int8'"):
            quantize(q, k, v, precision="ieee")
        self.check(ValueError, "layout='hbsd' must be", q8, k8, v8, layout="hbsd")
        k9 = Quantized(**vars(k8) | {"is_rotated": False})
        self.check(ValueError, "query.is_rotated=True must equal key.is_rotated=False", q8, k9, v8)
        with pytest.raises(TypeError, match=r"query\.dtype=torch\.float32 must be bfloat16 or float16"):
            quantize(q.float(), k.float(), v.float())
        with pytest.raises(TypeError, match="query=Quantized must be"):
            tilewise.attention_with_cache(q8, tilewise.KVCache(1, 40, 2, 64, dtype=torch.half))

    def test_flash_attn_in_parts(self):
        quantized, starts = quantize(*draw(20), *[torch.tensor([0, 7, 20])] * 2), torch.tensor([0, 7, 20])
        for options in ({"attention_chunk": 5}, {"seqused_k": torch.tensor([3, 4])}):
            with pytest.raises(NotImplementedError, match="take no Quantized tensors"):
                flash_attn_3.flash_attn_varlen_func(*quantized, starts, starts, 13, 13, **options)

    def test_wrong_offsets(self):
        q, k, v = (t.squeeze(0) for t in draw(1, 20))
        right = torch.tensor([0, 7, 20])
        with pytest.raises(ValueError, match=re.escape("cu_seqlens_q=[0, ..., 30] must start at 0")):
            quantize(q, k, v, torch.tensor([0, 7, 30]), right)
        with pytest.raises(ValueError, match="offsets never decrease"):
            quantize(q, k, v, right, torch.tensor([0, 25, 20]))

    def test_backends(self):
        quantized = quantize(*draw(1, 20))
        for backend in ("llvm", "aten"):
            message = f"backend={backend!r} has no 8-bit products; 'tiled' would serve"
            self.check(NotImplementedError, message, *quantized, backend=backend)

    def test_caches_by_kernels(self):
        q, k, v = draw(1, 20)
        cached = Inputs(q, k, v, seqlens_k=torch.tensor([20]))
        problem = describe(cached, Options(precision="fp8"))
        (row,) = (row for row in ROWS if row.feature == "8-bit products with a cache")
        assert row.applies(problem) and not row.applies(describe(cached, Options()))
        refusing = {name for row in ROWS if row.applies(problem) for name in row.reasons}
        assert "hopper" in row.reasons and {"hopper", "triton", "llvm", "aten"} <= refusing

    def test_gradients(self):
        quantized = quantize(*draw(1, 20))
        bias = torch.zeros(20, 20, requires_grad=True)
        self.check(NotImplementedError, "Quantized tensors give no gradients", *quantized, bias=bias)


def test_dropped_weights_do_not_overflow():
    """Kept weights count 1 / (1 - p): they are rounded before that, not beyond the largest 8-bit number."""
    q, k, v = draw(1, 200)
    out = tilewise.attention(q, k, v, precision="fp8", dropout_p=0.75)
    assert out.isfinite().all() and fp8.round_weights(torch.ones(1)) == 1
