"""Dropout that can be recomputed tile by tile: a counter-based generator (Philox 4x32-10).

The decision for one attention weight is a pure function of (seed, sequence, head, query, key), so the
forward, the backward and the reference agree without storing a mask, whatever the tile size, the
backend or the packing. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch

ROUNDS = 10
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
LOW32 = 0xFFFFFFFF


def philox4x32(
    seed: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> list[torch.Tensor]:
    """Four 32-bit words (as int64 tensors) for each 128-bit counter (c0, c1, c2, c3), ten rounds.

    int64 products wrap modulo 2^64, so a shift and a mask give the exact high and low words.
    """
    key_a, key_b = seed & LOW32, (seed >> 32) & LOW32
    for _ in range(ROUNDS):
        product_a, product_b = c0 * ROUND_A, c2 * ROUND_B
        c0 = ((product_b >> 32) & LOW32) ^ c1 ^ key_a
        c2 = ((product_a >> 32) & LOW32) ^ c3 ^ key_b
        c1, c3 = product_b & LOW32, product_a & LOW32
        key_a, key_b = (key_a + KEY_A) & LOW32, (key_b + KEY_B) & LOW32
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def keep_mask(
    seed: torch.Tensor,
    dropout_p: float,
    sequences: range,
    num_heads: int,
    q0: int,
    q1: int,
    k0: int,
    k1: int,
) -> torch.Tensor:
    """Boolean [len(sequences), num_heads, q1 - q0, k1 - k0]: True where the weight survives.

    Key `j` takes word `j % 4` of the counter (j // 4, query, sequence * num_heads + head, 0) and
    survives when that word is at least `dropout_p * 2^32`.
    """
    device = seed.device
    groups = torch.arange(k0 // 4, (k1 + 3) // 4, device=device)
    query = torch.arange(q0, q1, device=device)[:, None]
    head = torch.arange(sequences.start * num_heads, sequences.stop * num_heads, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = philox4x32(int(seed), groups, query, head[:, None, None], zero)
    random = torch.stack(words, dim=-1).flatten(-2)[..., k0 - k0 // 4 * 4 :][..., : k1 - k0]
    keep = random >= int(dropout_p * 2**32)
    return keep.view(len(sequences), num_heads, q1 - q0, k1 - k0)
