"""Rows of several tensors put together by one launch."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (IS_INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from tilewise.gpu.launch.take import MOST, take  # noqa: E402

DEVICE = "cpu" if IS_INTERPRETED else "cuda"


@pytest.mark.parametrize("tokens, parts, count", [(70, 1, 3), (33, 4, 4), (1, 2, 1), (50, 3, MOST)])
@pytest.mark.parametrize(
    "heads, dim, dtype",
    [(2, 16, torch.float16), (3, 40, torch.bfloat16), (1, 1, torch.float32), (9, 256, torch.float32)],
)
def test_rows_are_put_together(heads, dim, dtype, tokens, parts, count):
    """Some heads of wider tensors, into some heads of a wider one: the rest stays as it is."""
    wide = [torch.randn(20 + n, 2, heads + 3, dim, device=DEVICE).to(dtype) for n in range(count)]
    sources = [t[:, :, 1 : 1 + heads] for t in wide]
    which = torch.randint(count, (tokens, parts), dtype=torch.int32, device=DEVICE)
    row = torch.randint(20, (tokens, parts), dtype=torch.int32, device=DEVICE)
    target = torch.full((2, tokens, parts, heads + 1, dim), 7.0, device=DEVICE).to(dtype)
    take(target.permute(1, 2, 0, 3, 4)[..., :heads, :], sources, which, row)
    for i in range(tokens):
        for c in range(parts):
            assert torch.equal(target[:, i, c, :heads], sources[which[i, c]][row[i, c]]), (i, c)
    assert (target[..., heads, :] == 7).all()


def test_numbers_of_rows_may_be_the_same_for_all_parts():
    sources = [torch.randn(9, 1, 2, 4, device=DEVICE) for _ in range(3)]
    which = torch.arange(3, dtype=torch.int32, device=DEVICE).expand(5, 3)
    row = torch.tensor([[4], [0], [8], [1], [4]], dtype=torch.int32, device=DEVICE).expand(5, 3)
    target = torch.full((5, 3, 1, 2, 4), float("nan"), device=DEVICE)
    take(target, sources, which, row)
    assert torch.equal(target, torch.stack([source[row[:, 0]] for source in sources], 1))
