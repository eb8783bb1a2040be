"""Pages of 8 bits: a scale for each page and head, a power of two."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.cache.pages import PagedBatch
from tilewise.core.fp8 import LARGEST, LEAST_EXPONENT


def dequantized(pages: Tensor, scale: Tensor) -> Tensor:
    """(..., page_size, heads, dim) in float32 from 8 bits and scales (..., heads)."""
    return pages.to(scale.dtype) * scale[..., None, :, None]


def write_quantized(storage: Tensor, scale: Tensor, new: Tensor, slots: Tensor, batch: PagedBatch) -> None:
    """Quantize each written page anew with the smallest power of two that holds all its tokens.

    Tokens held before keep their bits unless the scale grows. Infinity, which e4m3 does not have, is NaN.
    """
    pages, page_size = batch.written.long(), storage.shape[1]
    content = dequantized(storage[pages], scale[pages])  # (written pages, page_size, heads, dim)
    row = torch.arange(page_size, device=storage.device)
    content = torch.where((row < batch.kept[:, None])[..., None, None], content, 0.0)
    place = torch.empty(len(storage), dtype=torch.int64, device=storage.device)
    place[pages] = torch.arange(len(pages), device=storage.device)
    content[place[slots // page_size], slots % page_size] = new.to(content.dtype)
    content.masked_fill_(content.isinf(), torch.nan)
    largest = content.abs().nan_to_num(0.0).amax((1, 3))
    mantissa, exponent = torch.frexp(largest / torch.full_like(largest, LARGEST))  # GPUs: x / 448 is inexact
    exponent = (exponent - (mantissa == 0.5).int()).clamp(min=LEAST_EXPONENT)
    power = torch.where(mantissa == 0, 1.0, torch.ldexp(torch.ones_like(mantissa), exponent))
    storage[pages] = (content / power[:, None, :, None]).to(storage.dtype)
    scale[pages] = power
