"""`tilewise tune`: which tiles are tried, what is printed. Timing needs a GPU."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.gpu.triton.tuning_table import KernelTile, kernel_tile
from tilewise.lab import tune

H200_SHARED = 227 << 10


def is_valid(tile: KernelTile) -> bool:
    blocks_fit = all(n >= 16 and n & (n - 1) == 0 for n in (tile.block_m, tile.block_n))
    registers_fit = tile.max_registers is None or 24 <= tile.max_registers <= 255
    return blocks_fit and registers_fit and tile.num_warps in (1, 2, 4, 8, 16) and tile.num_stages >= 1


@pytest.mark.parametrize("kernel", tune.KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_the_table_holds_is_among_the_candidates(kernel, head_dim, is_causal):
    held = kernel_tile(kernel, (9, 0), None, head_dim, is_causal=is_causal)
    tiles = list(tune.candidates(kernel, head_dim, 2, H200_SHARED, held.has_tma))
    assert held in tiles
    assert len(tiles) == len(set(tiles)) < 60 and all(is_valid(tile) for tile in tiles)


def test_tiles_of_the_bias_gradient():
    tiles = list(tune.candidates("dbias", 128, 2, H200_SHARED, has_tma=True))
    held = kernel_tile("dbias", (9, 0), None, 128, "bias")
    assert held in tiles and len(tiles) == len(set(tiles)) and all(is_valid(tile) for tile in tiles)


def test_the_fastest_is_chosen_and_what_does_not_run_is_passed_over():
    seconds = {
        KernelTile(64, 64, 4, 2): 2.0,
        KernelTile(32, 64, 4, 2): 1.0,
        KernelTile(64, 32, 4, 2): float("inf"),
    }
    current = KernelTile(64, 64, 4, 2)
    best, time, current_time = tune.fastest(iter(seconds), current, seconds.__getitem__)
    assert (best, time, current_time) == (KernelTile(32, 64, 4, 2), 1.0, 2.0)
    assert tune.fastest(iter(seconds), None, seconds.__getitem__)[2] is None
    assert str(tune.Row("dk", 256, False, best, 1e-3, None, None)).endswith("# 1.000 ms; now nothing")
    row = tune.Row("dq", 128, True, best, 1e-3, current, 2e-3)
    assert str(row) == f'"dq_causal": {{128: {best}}},  # 1.000 ms; now 2.000 ms'


@pytest.mark.parametrize("kernel", tune.APART)
def test_one_gradient_alone_may_take_larger_tiles(kernel):
    together, apart = (set(tune.candidates(name, 256, 2, H200_SHARED)) for name in ("dkdv", kernel))
    assert max(t.block_n for t in together) < max(t.block_n for t in apart) == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "du"], "--kernel du must be one of"),
        (["--kernel", "dbias"], "--kernel dbias needs --scores bias"),
        (["--scores", "steep"], "--scores steep must be one of"),
        (["--dtype", "float64"], "--dtype float64 must be"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    result = CliRunner().invoke(_app(), ["tune", *arguments])
    assert result.exit_code == 2 and message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_without_a_gpu():
    result = CliRunner().invoke(_app(), ["tune"])
    assert result.exit_code == 2 and "needs a GPU" in result.output


@pytest.mark.parametrize("scores", tune.SCORES)
def test_the_problem_has_the_rows_it_is_timed_for(scores):
    problem, inputs = tune.drawn(64, True, 32, torch.bfloat16, scores, device="cpu")
    found = (problem.softcap > 0, problem.mask_shape, problem.bias_shape, problem.dropout_p > 0)
    assert [bool(f) for f in found] == [scores == name for name in tune.SCORES[1:]]
    assert problem.causal and problem.bias_needs_grad == (scores == "bias")
    assert not any(t is not None and t.requires_grad for t in inputs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel,scores", [("dq", name) for name in tune.SCORES] + [("dbias", "bias")])
def test_rows_on_this_gpu(kernel, scores, monkeypatch):
    few = [KernelTile(64, 64, 4, 1), KernelTile(32, 32, 4, 2)]
    monkeypatch.setattr(tune, "candidates", lambda *_: iter(few))
    (row,) = tune.rows(64, True, [kernel], 512, torch.bfloat16, scores=scores)
    assert is_valid(row.best) and 0 < row.seconds <= row.current_seconds < 0.1
