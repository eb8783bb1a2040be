"""The generator against its published vectors, and the mask against its promises."""

import pytest
import torch

from tilewise.core.dropout import keep_mask, philox4x32

# Known-answer vectors of Philox4x32-10, from the Random123 distribution (kat_vectors).
VECTORS = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter, key, expected):
    words = philox4x32(key, *(torch.tensor(c) for c in counter))
    assert tuple(int(w) for w in words) == expected


def test_a_tile_is_a_part_of_the_whole():
    seed = torch.tensor(1234567890123456789)
    whole = keep_mask(seed, 0.4, range(3), 2, 0, 19, 0, 23)
    for q0, q1, k0, k1 in [(0, 7, 0, 5), (3, 19, 6, 23), (18, 19, 22, 23), (5, 5, 1, 2)]:
        assert torch.equal(keep_mask(seed, 0.4, range(1, 3), 2, q0, q1, k0, k1), whole[1:3, :, q0:q1, k0:k1])


def test_rate_and_seed():
    a = keep_mask(torch.tensor(1), 0.3, range(2), 4, 0, 200, 0, 200)
    b = keep_mask(torch.tensor(2), 0.3, range(2), 4, 0, 200, 0, 200)
    assert abs(a.double().mean().item() - 0.7) < 5 * (0.21 / a.numel()) ** 0.5
    assert abs((a == b).double().mean().item() - 0.58) < 0.01  # independent: 0.7^2 + 0.3^2
    assert keep_mask(torch.tensor(1), 0.0, range(1), 1, 0, 9, 0, 9).all()
