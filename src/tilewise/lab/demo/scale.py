"""How large the demo is on each kind of device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Scale:
    """Every size of one run.

    Attributes:
        lengths: sequence lengths of the table, its heads, head_dim and dtype.
        checked_rows: queries in each of the three slices that are compared with float64.
        seconds, samples: a method is timed until it has used so much time or has so many samples.
    """

    layers: int
    heads: int
    head_dim: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    prompt: int
    new_tokens: int
    lengths: tuple[int, ...]
    table_heads: int
    table_head_dim: int
    table_dtype: torch.dtype
    checked_rows: int = 32
    seconds: float = 0.25
    samples: int = 7

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


CPU = Scale(
    layers=3, heads=4, head_dim=32, context=512, batch=4, steps=160, learning_rate=2e-3,
    prompt=64, new_tokens=448,
    lengths=(512, 1024, 2048, 4096, 8192, 16384), table_heads=4, table_head_dim=64, table_dtype=torch.float32,
)  # fmt: skip

CUDA = Scale(
    layers=6, heads=6, head_dim=64, context=1024, batch=8, steps=300, learning_rate=6e-4,
    prompt=64, new_tokens=960,
    lengths=(1024, 2048, 4096, 8192, 16384, 32768), table_heads=16, table_head_dim=128,
    table_dtype=torch.bfloat16,
)  # fmt: skip

QUICK = Scale(
    layers=2, heads=2, head_dim=32, context=64, batch=4, steps=12, learning_rate=4e-3,
    prompt=16, new_tokens=24,
    lengths=(128, 256), table_heads=2, table_head_dim=64, table_dtype=torch.float32,
    checked_rows=16, seconds=0.1, samples=5,
)  # fmt: skip


def scale_for(device: torch.device, quick: bool) -> Scale:
    if quick:
        return QUICK
    return CUDA if device.type == "cuda" else CPU
