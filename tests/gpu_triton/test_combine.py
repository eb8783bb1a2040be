"""Results of disjoint keys put together by one launch, against `tilewise.merge` and sums in float64."""

from __future__ import annotations

import os

import pytest
import torch

from tilewise.merge import merge

pytest.importorskip("triton")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (IS_INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from tilewise.distributed import parts  # noqa: E402
from tilewise.gpu.launch.combine import MOST, combine  # noqa: E402

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
NEG_INF = float("-inf")
TOKENS, HEADS = 70, 2


def operands(spans, dim, dtype, with_lse):
    """Strided as gradients of a wider tensor are; some rows have seen no key."""
    found = []
    for start, stop in spans:
        out = torch.randn(2, stop - start, HEADS, dim + 3, device=DEVICE).to(dtype)[..., :dim]
        lse = torch.randn(2, HEADS, stop - start, device=DEVICE) * 20
        lse[..., ::5] = NEG_INF
        out = out.masked_fill((lse == NEG_INF).transpose(1, 2)[..., None] & with_lse, 0.0)
        found.append(parts.Share(start, out, lse if with_lse else None))
    return found


def whole(operand, fill):
    """An operand in all rows, in float64."""
    out = torch.zeros(2, TOKENS, *operand.out.shape[2:], dtype=torch.float64, device=DEVICE)
    rows = slice(operand.start, operand.start + operand.out.shape[1])
    out[:, rows] = operand.out.double()
    lse = torch.full((2, HEADS, TOKENS), fill, dtype=torch.float64, device=DEVICE)
    if operand.lse is not None:
        lse[..., rows] = operand.lse.double()
    return out, lse


SPANS = [
    [(0, 70), (3, 41)],
    [(0, 33), (33, 60)],
    [(0, 70), (64, 65), (10, 70)],
    [(0, 33), (33, 70), (5, 9), (0, 70), (40, 69)],
    [(30, 70)] * 6,
]


def test_a_launch_takes_all_parts_that_wait():
    assert parts.MOST == MOST == max(map(len, SPANS))


@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("dim, dtype", [(16, torch.float32), (24, torch.float16)])
def test_rows_are_merged_or_added(dim, dtype, spans, with_lse):
    given = operands(spans, dim, dtype, with_lse)
    parts = [whole(o, NEG_INF) for o in given]
    exact, exact_lse = merge(parts) if with_lse else (sum(out for out, _ in parts), None)
    target = torch.full((2, TOKENS, HEADS, dim), float("nan"), device=DEVICE)
    lse = torch.full((2, HEADS, TOKENS), float("nan"), device=DEVICE) if with_lse else None
    combine(target, lse, tuple(given), 0, TOKENS)
    torch.testing.assert_close(target.double(), exact, rtol=1e-5, atol=1e-5)
    if with_lse:
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


def test_a_target_that_is_an_operand_changes_in_its_rows_only():
    first, second = operands([(0, TOKENS), (20, 50)], 16, torch.float16, True)
    exact, exact_lse = merge([whole(o, NEG_INF) for o in (first, second)])
    before = first.out.clone()
    combine(first.out, first.lse, (first, second), 20, 50)
    torch.testing.assert_close(first.out.double(), exact, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(first.lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(first.out[:, :20], before[:, :20]) and torch.equal(first.out[:, 50:], before[:, 50:])


@pytest.mark.parametrize("count", [2, 5])
def test_no_warp_overwrites_what_another_has_not_read(count, repeats=2 if IS_INTERPRETED else 50):
    """The target is an operand of many programs, whose warps read lse of the same rows."""
    tokens = 64 if IS_INTERPRETED else 8192
    for _ in range(repeats):
        outs = torch.randn(count, 1, tokens, 16, 128, device=DEVICE, dtype=torch.bfloat16)
        lses = torch.randn(count, 1, 16, tokens, device=DEVICE) * 3
        exact, exact_lse = merge([(o.float(), lse) for o, lse in zip(outs, lses)])
        given = [parts.Share(0, o, lse) for o, lse in zip(outs, lses)]
        combine(given[0].out, given[0].lse, tuple(given), 0, tokens)
        torch.testing.assert_close(given[0].out.float(), exact, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(given[0].lse, exact_lse, rtol=1e-5, atol=1e-5)
