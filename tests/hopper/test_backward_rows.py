"""The kernels before and after the main one, by Triton's interpreter, against the formulas."""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import pytest
import torch

from tilewise.gpu.hopper.backward.arguments import FinishSizes, RowSizes, Splits
from tilewise.gpu.launch.entry import fields_of

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


def run(kernel: Any, programs: int, *arguments: Any) -> None:
    kernel[(programs,)](*fields_of(arguments))


@pytest.mark.sample(3)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("block_m", "block_d", "dim"), [(64, 128, 128), (128, 64, 40), (64, 128, 96)])
def test_statistics_and_sums(block_m: int, block_d: int, dim: int, is_packed: bool):
    from tilewise.gpu.hopper.backward import rows as backward_rows

    starts = [0, 70, 70, 200, 205] if is_packed else [0, 205]
    lead, heads, batch, total = (() if is_packed else (2,)), 2, len(starts) - 1 if is_packed else 2, 205
    cu_seqlens = torch.tensor(starts, dtype=torch.int32) if is_packed else None
    tiles_q = total // block_m + batch if is_packed else -(-total // block_m)
    slots = heads if is_packed else 2 * heads
    out, dout = (torch.randn(*lead, total, heads, dim) for _ in range(2))
    lse, dlse = (torch.randn(*lead, heads, total) for _ in range(2))
    lse[..., 3] = -math.inf
    strides = (0, *out.stride()[:2]) if is_packed else out.stride()[:3]
    stats = torch.full((slots, tiles_q, 2, block_m), math.nan)
    shifts = torch.full((slots, tiles_q, block_m), math.nan)
    semaphores = torch.full((slots * tiles_q + slots + 1,), -1, dtype=torch.int32)
    sizes = RowSizes(tiles_q, heads, total, batch, total)
    run(
        backward_rows.attn_bwd_prepare_kernel, slots * tiles_q,
        (out, *strides), (dout, *strides), lse, None, dlse, stats, shifts, semaphores, cu_seqlens, sizes,
        0.125, 1.0, dim, block_d, block_m, True, False,
    )  # fmt: skip
    assert (semaphores == 0).all()
    assert (shifts == 0).all()

    x = torch.randn(slots * tiles_q, block_m, block_d)
    parts = x.view(-1, block_m // 64, 64, block_d // 64, 64).transpose(2, 3).reshape(-1, 4, 2, 8, 8, 4, 2)
    registers = parts.permute(0, 4, 1, 3, 5, 2, 6).contiguous()
    dq = torch.full_like(out, math.nan)
    semaphores = torch.arange(slots * tiles_q, dtype=torch.int32) % 3
    was_written = (semaphores > 0).view(-1, 1, 1)
    sums = registers.view(len(semaphores), -1, 1).where(was_written, math.nan).view_as(registers)
    key_tiles = torch.tensor([3] * (batch + 1), dtype=torch.int32)
    counters = torch.cat([semaphores, key_tiles[:1].expand(slots)])
    run(
        backward_rows.attn_bwd_finish_kernel, len(parts),
        sums, counters, key_tiles if is_packed else None, (dq, *strides), cu_seqlens, 0.5,
        FinishSizes(tiles_q, heads, total, batch, 0, 1, 3, len(semaphores), 0),
        None, None, Splits(0, 0, None), dim, dim, block_d, block_m, False, False,
    )  # fmt: skip

    delta = (out * dout).sum(-1).transpose(-1, -2) - dlse
    exact = torch.where(lse == -math.inf, math.inf, lse) / math.log(2)
    rows = x.where(was_written, 0.0).view(slots, tiles_q * block_m, block_d)
    found = dq.transpose(-2, -3).reshape(slots, total, dim)
    for n, (a, b) in enumerate(itertools.pairwise(starts)):
        first = (a // block_m + n) * block_m
        here, there = slice(first, first + b - a), slice(a, b)
        torch.testing.assert_close(
            stats[:, :, 0].reshape(slots, -1)[:, here], exact.reshape(slots, -1)[:, there]
        )
        torch.testing.assert_close(
            stats[:, :, 1].reshape(slots, -1)[:, here], delta.reshape(slots, -1)[:, there]
        )
        torch.testing.assert_close(found[:, there], rows[:, here, :dim] * 0.5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("has_own_shifts", [False, True])
@pytest.mark.parametrize("largest", [40.0, 60.0, 1e6, 1e9])
def test_two_floats_have_a_large_lse(largest: float, has_own_shifts: bool):
    """lse + residual = scale * shift + low * log(2), in tiles with a large lse."""
    from tilewise.gpu.hopper.backward import rows as backward_rows

    total, block_m, scale = 150, 64, 0.3
    tiles = -(-total // block_m)
    out, dout = torch.randn(2, 1, total, 1, 64).unbind()
    lse = torch.randn(1, 1, total)
    lse[..., 70], lse[..., 75], lse[..., 80] = largest, -largest, -math.inf
    residual = torch.where(lse.isfinite(), lse * 2**-25, 0)
    stats = torch.full((tiles, 2 if has_own_shifts else 4, block_m), math.nan)
    shifts = torch.full((tiles, block_m), math.nan)
    rows = [(t, *t.stride()[:3]) for t in (out, dout)]
    run(
        backward_rows.attn_bwd_prepare_kernel, tiles,
        *rows, lse, residual, None, stats, shifts if has_own_shifts else None, None, None,
        RowSizes(tiles, 1, total, 1, total), scale, 1.0, 64, 64, block_m, True, False,
    )  # fmt: skip
    shift, low = (shifts if has_own_shifts else stats[:, 2]).flatten()[:total], stats[:, 0].flatten()[:total]
    is_large = torch.arange(total) // block_m == 1
    if largest > 44:
        assert stats[1, 0, 0] > 128 and (shift[is_large] != 0).all()
        assert (low[is_large] > 128).all()
    else:
        assert not shift.any()
    assert not shift[~is_large].any() and (low[~is_large] < 128).all()
    exact = (lse.double() + residual).flatten()
    seen = exact.isfinite()
    rounded = torch.tensor(scale).double() * shift.double() + low.double() * math.log(2)
    torch.testing.assert_close(rounded[seen], exact[seen], rtol=2**-36, atol=4e-5)
    assert torch.equal(low[~seen], torch.full((1,), math.inf))
    assert (stats[-1, 0, total % block_m :] == math.inf).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_evenly_split", [False, True])
@pytest.mark.parametrize(("block_d", "dim", "dim_v"), [(64, 64, 40), (128, 128, 104)])
def test_keys_in_pieces(block_d: int, dim: int, dim_v: int, is_evenly_split: bool):
    """Of 12 tiles of keys the last five, of 3 query tiles x 2 heads each, in units of 7, 2 and 6 steps.

    Or the first seven, of all heads, in that many parts each.
    """
    from tilewise.gpu.hopper.backward import rows as backward_rows

    batch, kv_heads, group_size, tiles_q, key_tiles, border, seqlen_k = 2, 2, 2, 3, 3, 7, 300
    slots = batch * kv_heads
    steps = tiles_q * group_size
    order = [divmod(n, key_tiles) for n in range(slots * key_tiles)]  # (slot, tile)
    if is_evenly_split:
        order = [(n % slots, n // slots) for n in range(slots * key_tiles)]
    shared = order[:border] if is_evenly_split else order[border:]
    for unit in (7, 2, 6):
        splits = torch.full((len(shared) * 7 + 10, 4, 64, block_d), math.nan)
        exact = torch.zeros(len(shared), 4, 64, block_d)
        for start in range(len(shared) * (unit if is_evenly_split else steps)):
            number = start if is_evenly_split else start // unit + start // steps
            if is_evenly_split or start % steps == 0 or start % unit == 0:
                splits[number] = torch.randn(4, 64, block_d)
                exact[start // (unit if is_evenly_split else steps)] += splits[number]
        sums = splits.view(-1, 4, 4, 2, 8, block_d // 8, 4, 2).permute(0, 1, 5, 2, 4, 6, 3, 7).contiguous()
        dk, dv = (torch.full((batch, seqlen_k, kv_heads, d), math.nan) for d in (dim, dim_v))
        lengths = (0, batch, seqlen_k)
        run(
            backward_rows.attn_bwd_finish_kernel, len(shared) * block_d // 4,
            None, None, None, (None, 0, 0, 0), None, 0.5,
            FinishSizes(tiles_q, kv_heads * group_size, *lengths, group_size, key_tiles, 0, 0),
            dk, dv, Splits(border, unit, sums), dim, dim_v, block_d, 64, False, is_evenly_split,
        )  # fmt: skip
        for slot, tile in order:
            rows = min(128, seqlen_k - tile * 128)
            for part, grad in enumerate((dk, dv)):
                found = grad[slot // kv_heads, tile * 128 : tile * 128 + rows, slot % kv_heads]
                if (slot, tile) not in shared:  # the main kernel's
                    assert found.isnan().all()
                    continue
                wanted = exact[shared.index((slot, tile))].view(2, 2, 64, block_d)[:, part]
                torch.testing.assert_close(found, wanted.reshape(128, block_d)[:rows, : grad.shape[-1]])


def test_dq_that_holds_pieces_is_written_after_they_are_merged():
    """Five splits in 320 rows of dq: the first sequence, and the first tiles of the second one."""
    from tilewise.gpu.hopper.backward import rows as backward_rows

    batch, heads, seqlen_q, seqlen_k, dim, tiles_q = 3, 4, 200, 100, 64, 2
    num_tiles = batch * heads * tiles_q
    dq, dk, dv = (torch.full((batch, n, heads, dim), math.nan) for n in (seqlen_q, seqlen_k, seqlen_k))
    splits = dq.view(-1)[: 5 * 4 * 64 * dim].view(5, 2, 2, 64 * dim)
    splits.copy_(torch.randn(5, 2, 2, 1).expand(splits.shape))
    splits[2] = math.nan  # not in use
    wanted = [(splits[a] + splits[b])[..., 0].clone() for a, b in ((0, 1), (3, 4))]
    sums = torch.arange(2.0 * num_tiles).repeat_interleave(4096)
    semaphores = torch.ones(num_tiles + batch * heads + 1, dtype=torch.int32)
    semaphores[-1] = 0
    run(
        backward_rows.attn_bwd_finish_kernel, 2 * num_tiles + 2 * 16,
        sums, semaphores, None, (dq, *dq.stride()[:3]), None, 0.5,
        FinishSizes(tiles_q, heads, seqlen_q, batch, seqlen_k, 1, 1, num_tiles, 3),
        dk, dv, Splits(batch * heads - 2, 1, splits), dim, dim, dim, 128, False, False,
    )  # fmt: skip
    part = torch.arange(2.0 * num_tiles).view(batch, heads, -1).repeat_interleave(64, -1)[..., :seqlen_q]
    assert torch.equal(dq, 0.5 * part.transpose(1, 2)[..., None].expand(dq.shape))
    for head, by_warpgroup in zip((2, 3), wanted):
        rows = by_warpgroup.repeat_interleave(64, 0)[:seqlen_k]
        for n, grad in enumerate((dk, dv)):
            assert torch.equal(grad[-1, :, head], rows[:, n, None].expand(-1, dim))
    assert semaphores[-1] == 32


@pytest.mark.sample(2)
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (70, 9))])
@pytest.mark.parametrize("lengths", [(130, 201), (201, 67)])
def test_a_bias_is_copied_into_aligned_rows(
    lengths: tuple[int, int], causal: bool, window: tuple[int, int] | None
):
    """As it is or transposed, from any layout: all that is visible, and 0 behind the columns."""
    from tilewise.core.problem import Inputs, Options, describe
    from tilewise.gpu.hopper.common.host import extras_of

    q, k = (torch.empty(2, n, h, 64, dtype=torch.bfloat16) for n, h in zip(lengths, (6, 3)))
    left, right = window or (None, None)
    options = Options(causal=causal, window_left=left, window_right=right)
    for batch, heads in ((2, 6), (1, 6), (2, 1)):
        bias = torch.randn(batch, heads, *lengths).bfloat16()
        for given, is_transposed in itertools.product((bias, bias.mT.contiguous().mT), (False, True)):
            problem = describe(Inputs(q, k, k, bias=given), options)
            found = extras_of(problem, Inputs(q, k, k, bias=given), is_transposed)[2].view(torch.bfloat16)
            visible = problem.visibility().tile_mask(0, lengths[0], 0, lengths[1])
            exact, visible = (t.mT if is_transposed else t for t in (given, visible))
            columns = exact.shape[3]
            assert found.shape[3] % 2 == 0
            assert torch.equal(torch.where(visible, found[..., :columns], 0), exact.where(visible, 0))
            assert not found[:, :, visible[:, -1], columns:].any()
