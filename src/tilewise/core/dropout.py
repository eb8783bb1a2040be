"""Dropout that can be recomputed tile by tile: a counter-based generator (Philox 4x32-7).

The decision for one attention weight is a pure function of (seed, sequence, head, query, key), so the
forward, the backward and the reference agree without storing a mask, whatever the tile size, the
backend or the packing. A call of the generator gives 16 bytes, and a byte decides one weight: so p is rounded
to a multiple of 1/256 (`rate`), and what survives is divided by 1 minus that. Seven rounds are the fewest
that passed all of TestU01's BigCrush. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011).

The 16 weights of a call are those of queries 2a, 2a + 1, 2a + 8 and 2a + 9 and keys 2b, 2b + 1, 2b + 8 and
2b + 9 (a, b < 4) of a square of 16 queries and 16 keys: of tensor cores' accumulators, [queries, keys] or
transposed, two threads hold such a group, and each needs two of the four words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.core.kept import integers_on

SQUARE = 16  # queries and keys whose weights share calls of the generator
ROUNDS = 7
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
LOW32 = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """A weight survives if its byte is at least this: 1 to 255, and 0 only for p = 0."""
    return min(max(round(256 * dropout_p), 1), 255) if dropout_p > 0 else 0


def rate(dropout_p: float) -> float:
    """The probability of dropping a weight: p rounded to a multiple of 1/256, neither 0 nor 1 unless p is.

    >>> rate(0.25), rate(0.1), rate(1e-9)
    (0.25, 0.1015625, 0.00390625)
    """
    return threshold(dropout_p) / 256


def with_origin(seed: Tensor, query: int, key: int, head: int, num_heads: int) -> Tensor:
    """A seed for a part of a larger call, whose weights get that call's decisions: (5,) int64.

    Args:
        seed: () int64, of the larger call.
        query, key: what the part's first query and first key are there, each in its sequence.
        head: what the part's first head is there: sequence * num_heads + head.
        num_heads: of the larger call.
    """
    return torch.cat((seed.view(1), integers_on((query, key, head, num_heads), seed.device)))


def philox4x32(
    key: int, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, rounds: int = ROUNDS
) -> list[torch.Tensor]:
    """Four 32-bit words (as int64 tensors) for each 128-bit counter (c0, c1, c2, c3) and a 64-bit key.

    int64 products wrap modulo 2^64, so a shift and a mask give the exact high and low words.
    """
    key_a, key_b = key & LOW32, (key >> 32) & LOW32
    for _ in range(rounds):
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

    Query 16 A + 8 e + 2 a + c and key 16 B + 8 f + 2 b + d take, of the counter (4 B + b, 4 A + a, seed's low
    word, seed's high word ^ (sequence * num_heads + head)) and key 0, byte 2 e + f of word 2 c + d.
    A seed `with_origin` says what the first query, key and head count as.
    """
    device = seed.device
    number, query, key, head, heads = seed.tolist() if seed.ndim else (int(seed), 0, 0, 0, num_heads)
    q0, q1, k0, k1 = q0 + query, q1 + query, k0 + key, k1 + key
    sequence = torch.arange(sequences.start, sequences.stop, device=device)[:, None]
    head = (head + sequence * heads + torch.arange(num_heads, device=device)).flatten()
    low, high = number & LOW32, (number >> 32) & LOW32
    first_q, first_k = q0 // 16, k0 // 16
    calls_q = torch.arange(4 * first_q, 4 * -(-q1 // 16), device=device)[:, None]
    calls_k = torch.arange(4 * first_k, 4 * -(-k1 // 16), device=device)
    words = philox4x32(0, calls_k, calls_q, torch.full_like(calls_k, low), head[:, None, None] ^ high)
    shifts = 8 * torch.arange(4, device=device)
    survives = (torch.stack(words, -1)[..., None] >> shifts) & 255 >= threshold(dropout_p)
    shape = (len(head), calls_q.numel() // 4, 4, calls_k.numel() // 4, 4, 2, 2, 2, 2)  # bh A a B b c d e f
    keep = survives.reshape(shape).permute(0, 1, 7, 2, 5, 3, 8, 4, 6)  # bh A e a c B f b d
    keep = keep.reshape(len(head), 4 * calls_q.numel(), 4 * calls_k.numel())
    keep = keep[:, q0 - 16 * first_q :, k0 - 16 * first_k :][:, : q1 - q0, : k1 - k0]
    return keep.reshape(len(sequences), num_heads, q1 - q0, k1 - k0)
