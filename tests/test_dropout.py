"""The generator against its published vectors, and the mask against its promises."""

import pytest
import torch

from tilewise.core.dropout import keep_mask, philox4x32, rate, threshold, with_origin

# Known-answer vectors of Philox4x32 with 10 and 7 rounds, from the Random123 distribution (kat_vectors).
ONES = (0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822
VECTORS = [
    (10, (0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, *ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    (7, (0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, *ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), VECTORS)
def test_known_answers(rounds, counter, key, expected):
    words = philox4x32(key, *(torch.tensor(c) for c in counter), rounds=rounds)
    assert tuple(int(w) for w in words) == expected


def test_a_weight_takes_the_byte_that_the_docstring_names():
    seed, p, heads, sequence = 2**62 + 12345, 0.3, 3, 5
    mask = keep_mask(torch.tensor(seed), p, range(sequence, sequence + 1), heads, 0, 50, 0, 70)[0]
    for head, i, j in [(0, 0, 0), (2, 49, 69), (1, 17, 30), (2, 11, 8), (0, 38, 57), (1, 5, 26)]:
        counter = (j // 16 * 4 + j % 8 // 2, i // 16 * 4 + i % 8 // 2, seed & 0xFFFFFFFF,
                   (seed >> 32) ^ (sequence * heads + head))  # fmt: skip
        words = philox4x32(0, *(torch.tensor(c) for c in counter))
        byte = int(words[2 * (i % 2) + j % 2]) >> 8 * (2 * (i // 8 % 2) + j // 8 % 2) & 255
        assert bool(mask[head, i, j]) == (byte >= threshold(p))


def test_a_tile_is_a_part_of_the_whole():
    seed = torch.tensor(1234567890123456789)
    whole = keep_mask(seed, 0.4, range(3), 2, 0, 39, 0, 43)
    for q0, q1, k0, k1 in [(0, 7, 0, 5), (3, 19, 6, 23), (18, 19, 22, 23), (5, 5, 1, 2), (16, 39, 33, 43)]:
        assert torch.equal(keep_mask(seed, 0.4, range(1, 3), 2, q0, q1, k0, k1), whole[1:3, :, q0:q1, k0:k1])


def test_a_part_of_a_call_draws_what_the_call_does():
    seed = torch.tensor(-1234567890123456789)
    whole = keep_mask(seed, 0.4, range(2), 5, 0, 80, 0, 90)
    part = keep_mask(with_origin(seed, 33, 17, 1, 5), 0.4, range(2), 3, 2, 40, 1, 60)
    assert torch.equal(part, whole[:, 1:4, 35:73, 18:77])


def test_rate_and_seed():
    a = keep_mask(torch.tensor(1), 0.3, range(2), 4, 0, 200, 0, 200)
    b = keep_mask(torch.tensor(2), 0.3, range(2), 4, 0, 200, 0, 200)
    assert abs(a.double().mean().item() - 0.7) < 5 * (0.21 / a.numel()) ** 0.5 + 1 / 512
    assert abs((a == b).double().mean().item() - 0.58) < 0.01  # independent: 0.7^2 + 0.3^2
    assert keep_mask(torch.tensor(1), 0.0, range(1), 1, 0, 9, 0, 9).all()


def test_p_is_rounded_to_256_steps_but_never_to_0_or_1():
    assert rate(0.0) == 0 and rate(1e-6) == 1 / 256 and rate(0.9999) == 255 / 256
    for p in (0.1, 0.25, 0.5, 0.9):
        assert abs(rate(p) - p) <= 1 / 512


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p):
    """No weight tells of one that is near it in query, key, head, sequence or seed, nor shares its byte."""
    n = 512
    seeds = [torch.tensor(s) for s in (7, 8, 7 + (1 << 32))]
    masks = torch.stack([keep_mask(s, p, range(2), 2, 0, n, 0, n) for s in seeds]).double()
    masks = (masks - (1 - rate(p))) / (rate(p) * (1 - rate(p))) ** 0.5  # mean 0, variance 1
    near = [(0, 0, 0, i, j) for i in (0, 1, 2, 8, 9, 16) for j in (0, 1, 2, 8, 9, 16) if i or j]
    for shift in [(1, 0, 0, 0, 0), (2, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), *near]:
        a, b = masks, masks
        for dim, offset in enumerate(shift):
            a, b = a.narrow(dim, 0, a.shape[dim] - offset), b.narrow(dim, offset, b.shape[dim] - offset)
        assert abs((a * b).mean().item()) < 5 / a.numel() ** 0.5, shift
    for dims in [(3,), (4,), (3, 4)]:  # rows, columns and heads keep as many as chance has it
        sums = masks.sum(dims) / torch.tensor(masks.shape)[list(dims)].prod() ** 0.5
        assert abs(sums.square().mean().item() - 1) < 5 * (2 / sums.numel()) ** 0.5, dims
