"""A small byte-level GPT whose attention is passed in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.cache.rotary import apply_rotary, rotary_tables
from tilewise.lab.demo.methods import Method
from tilewise.lab.demo.scale import Scale

NUM_BYTES = 256


class GPT(nn.Module):
    """Pre-norm transformer with rotary positions; all layers are bias-free.

    `forward` returns hidden states (batch, seqlen, width); `logits` turns them into (..., 256).
    """

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.head_dim = scale.head_dim
        self.embedding = nn.Embedding(NUM_BYTES, scale.width)
        self.blocks = nn.ModuleList(Block(scale.width, scale.heads) for _ in range(scale.layers))
        self.norm = nn.RMSNorm(scale.width)
        self.logits = nn.Linear(scale.width, NUM_BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, attends: Sequence[Method], start: int = 0) -> Tensor:
        """tokens (batch, seqlen), the first at position `start`; one attention function a layer."""
        x = self.embedding(tokens)
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        turn = rotary_tables(positions, self.head_dim)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, attend, turn)
        return self.norm(x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, attend: Method, turn: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        x = x + self.out(attend(apply_rotary(q, *turn), apply_rotary(k, *turn), v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))
