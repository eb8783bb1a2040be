"""The pieces that the kernels make are those by PyTorch operations.

On a GPU; with TRITON_INTERPRET=1 on the CPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from tilewise.core.problem import Inputs
from tilewise.integrations import chunks

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.sample(6)
@pytest.mark.parametrize("seqlen_q", [1, 2, 7, 16])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize(
    "kind, capacity, page, chunk",
    [
        *[("contiguous", 320, 320, chunk) for chunk in (16, 64, 50, 500)],
        *[("contiguous", 37, 37, chunk) for chunk in (16, 20)],
        *[("paged", 320, 64, chunk) for chunk in (16, 32, 48, 64, 128, 50)],
        *[("paged", 1600, 1, 777), ("batch_idx", 320, 320, 32), ("batch_idx", 45, 45, 32)],
    ],
)
def test_pieces(kind, capacity, page, chunk, is_padded, is_long, seqlen_q):
    batch = 5
    lengths = torch.tensor([capacity, 0, *torch.randint(0, capacity + 1, (3,))], device=DEVICE)
    leftpad = (lengths * torch.rand(batch, device=DEVICE)).int() if is_padded else None
    table = None
    if kind != "contiguous":
        table = torch.randperm(batch * capacity // page + 3, device=DEVICE)[: batch * capacity // page]
        table = table.view(batch, -1).to(torch.int64 if is_long else torch.int32)
    pages = batch if table is None else table.numel() + 3
    cache = torch.zeros(pages, page, 2, 8, device=DEVICE)
    inputs = Inputs(
        torch.zeros(batch, seqlen_q, 4, 8, device=DEVICE), cache, cache, leftpad_k=leftpad, page_table=table,
        seqlens_k=lengths if is_long else lengths.int(),
    )  # fmt: skip
    inputs, parts = chunks._in_pages(inputs, chunk)
    found, is_second = chunks._few_pieces_at_once(inputs, chunk, parts)
    expected, expected_second = chunks._few_pieces(chunks._with_table(inputs, parts), chunk)
    assert torch.equal(found.page_table, expected.page_table.int())
    assert torch.equal(found.seqlens_k, expected.seqlens_k.int())
    assert (found.leftpad_k is None) == (expected.leftpad_k is None)
    assert found.leftpad_k is None or torch.equal(found.leftpad_k, expected.leftpad_k.int())
    assert (is_second is None) == (expected_second is None) == (seqlen_q == 1)
    assert is_second is None or torch.equal(is_second, expected_second)


MANY = 300 if torch.cuda.is_available() else pytest.param(300, marks=pytest.mark.slow)  # minutes, interpreted


@pytest.mark.sample(3)
@pytest.mark.parametrize("batch", [1, 7, MANY])
@pytest.mark.parametrize("chunk", [1, 3, 16, 100])
def test_packed(batch, chunk):
    """Sequences without queries or keys, queries before the first key, and pieces left over.

    Several numbers of pieces one after another: nothing of an earlier launch may stay but its kernel.
    """
    from tilewise.gpu.triton.chunks import packed_starts

    for spare in (5, 0, 2 * batch, 1):
        counts = torch.randint(0, 14, (2, batch)) * torch.randint(0, 2, (2, batch))
        seqlen_q, seqlen_k = counts
        used = -(-seqlen_k // chunk) - (seqlen_k - seqlen_q).clamp(max=0).div(chunk, rounding_mode="floor")
        starts = [torch.cat((torch.zeros(1), row.cumsum(0))).to(DEVICE) for row in counts]
        arguments = (starts[0].int(), starts[1].long(), chunk, int(used.sum()) + spare)
        found, expected = packed_starts(*arguments), chunks._packed_starts(*arguments)
        for ours, theirs in zip(found, expected):
            assert torch.equal(ours, theirs.int())
