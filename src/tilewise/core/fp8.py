"""8-bit attention with incoherent processing: what `precision="fp8"` and `"int8"` compute, in PyTorch.

    q' = q H,  k' = k H            H: random signs times a Hadamard matrix, entries +-1, H H^T = d I
    q8, k8, v8 = e4m3(q'), e4m3(k'), e4m3(v)                  with a factor for each 128 rows of a head
    "int8": q8, k8 = int8(q'), int8(k')
    S  = scale / d * q8 k8^T       (in exact arithmetic q' k'^T = d q k^T: the rotation changes nothing)
    O  = e4m3(P) v8 / l,           P = exp(S - m), l = sum P and all else in float32

float8_e4m3fn numbers have 4 significant bits: rounding has a relative error of up to 1/16. Where columns with
numbers much larger than the others meet in q and in k, a score's error is that of few products; the rotation
spreads them over all columns. FlashAttention-3 (Shah et al., 2024), section 3.3; QuIP (Chee et al., 2023).

Rotated numbers are about normal, the largest of a block some 4.5 times their RMS. Integers, whose steps are
all equal, then err by 1.0% of it in RMS and e4m3 by 2.6%. Weights span many powers of two, so they are e4m3.
SageAttention (Zhang et al., 2024) has integers for q and k.

Example:
    >>> _ = torch.manual_seed(0)
    >>> x, y = torch.randn(2, 64, 128)
    >>> x[:, 0] *= 30; y[:, 0] *= 30
    >>> def error(a, b, factor):
    ...     products = round_rows(a).dequantize() @ round_rows(b).dequantize().T / factor
    ...     return (products - x @ y.T).square().mean().sqrt()
    >>> bool(error(rotate(x), rotate(y), 128) < 0.3 * error(x, y, 1))
    True
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.torch_private import own_dtypes

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of float8_e4m3fn: 0.875 * 2^9
# Of a page's scale: kernels sum up to 2^38 over it in float32, of 2^23 weights of up to 2^15.
LEAST_EXPONENT = -90
LARGEST_INTEGER = 127.0
OPERANDS = {"fp8": FP8, "int8": torch.int8}  # of Q K^T, by the precision
BLOCK_ROWS = 128
SMALLEST_FACTOR = 2.0**-126
WEIGHT_FACTOR = 2.0**8  # of the largest weight: those down to 2^-14 of it keep all their bits


class Rounded(NamedTuple):
    """8-bit numbers and what each block of 128 rows is to be multiplied by."""

    values: Tensor  # float8_e4m3fn or int8 (..., rows, dim)
    factors: Tensor  # float32 (..., ceil(rows / 128))

    def dequantize(self) -> Tensor:
        """The numbers that these stand for, float32."""
        factors = self.factors.repeat_interleave(BLOCK_ROWS, -1)[..., : self.values.shape[-2]]
        return self.values.float() * factors[..., None]


def padded_dim(dim: int) -> int:
    """The head_dim that is rotated, and that kernels compute with: a power of two of at least 64."""
    return max(64, 1 << (dim - 1).bit_length())


def hadamard(dim: int, device: torch.device | str | None = None) -> Tensor:
    """H (dim, dim), float32: the rows of Sylvester's Hadamard matrix, each with a sign drawn once for all.

    Args:
        dim: a power of two.

    Raises:
        ValueError: dim is none.

    Example:
        >>> h = hadamard(4)
        >>> torch.equal(h @ h.T, 4 * torch.eye(4))
        True
    """
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"dim={dim} must be a power of two")
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (dim, 1), generator=torch.Generator().manual_seed(dim), device="cpu") * 2 - 1
    return (signs * matrix).to(device)


def rotate(x: Tensor) -> Tensor:
    """x H in float32: x (..., dim), filled up with zeros to `padded_dim(dim)` columns, which are returned.

    Products of two rotated vectors are `padded_dim(dim)` times those of the vectors.

    Example:
        >>> x = torch.eye(64)[:2]
        >>> rotate(x).abs().unique(), rotate(x) @ rotate(x).T
        (tensor([1.]), tensor([[64.,  0.],
                [ 0., 64.]]))
    """
    dim = padded_dim(x.shape[-1])
    x = torch.nn.functional.pad(x.float(), (0, dim - x.shape[-1]))
    with own_dtypes(x.device.type):
        return x @ hadamard(dim, x.device)


def round_rows(x: Tensor, dtype: torch.dtype = FP8) -> Rounded:
    """x (..., rows, dim) in 8 bits, with a factor for each 128 rows.

    float8_e4m3fn: a factor is the least power of two that brings the block to at most 448, so it rounds
    nothing itself. Numbers keep 4 significant bits; those below 2^-14 of the block's largest become multiples
    of less than 2^-16 of it. int8: a factor is the block's largest magnitude over 127, and numbers become
    multiples of it.

    A block with a NaN or an infinity has the factor NaN; one of zeros 1.

    Example:
        >>> x = torch.tensor([[1.0, 17.0, 1000.0]])
        >>> values, factors = round_rows(x)
        >>> values.tolist(), factors
        ([[0.25, 4.0, 256.0]], tensor([4.]))
    """
    rows = x.shape[-2]
    x = x.float()
    largest = torch.nn.functional.pad(x.abs(), (0, 0, 0, -rows % BLOCK_ROWS))
    largest = largest.unflatten(-2, (-1, BLOCK_ROWS)).amax((-2, -1))  # NaN if one is
    if dtype == torch.int8:
        factors = largest / torch.full_like(largest, LARGEST_INTEGER)  # on GPUs / 127 is * (1 / 127)
    else:
        mantissa, exponent = torch.frexp(largest)
        exponent = exponent - 9 + (mantissa > LARGEST / 2**9).int()
        factors = torch.ldexp(torch.ones_like(largest), exponent)
    factors = factors.clamp(min=SMALLEST_FACTOR)
    factors = torch.where(largest == 0, 1.0, torch.where(largest.isfinite(), factors, float("nan")))
    inverses = factors.reciprocal().repeat_interleave(BLOCK_ROWS, -1)[..., :rows, None]
    if dtype == torch.int8:  # the nearest to the exact product, as a fused multiply-add gives
        values = (x.double() * inverses).nan_to_num(0.0).round()
    else:
        values = x * inverses
    return Rounded(values.to(dtype), factors)


def round_weights(p: Tensor) -> Tensor:
    """Weights, at most 1, as the second product takes them: times 256 in 8 bits, over 256.

    Example:
        >>> round_weights(torch.tensor([1.0, 0.3, 1e-6])).tolist()
        [1.0, 0.3125, 0.0]
    """
    return (p * WEIGHT_FACTOR).to(FP8).to(p.dtype) / WEIGHT_FACTOR
