"""The forward's rings fit shared memory at every head size; compiled kernels take what the sum says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.hopper.common.arguments import WARPGROUP_ROWS, ForwardConfig
from tilewise.gpu.hopper.forward.launch import forward_config

SHARED_BYTES = 227 << 10  # of a CTA on sm_90
REST = 1024  # mbarriers, messages and Triton's own: compiled kernels take 550 to 700
MASKS = (Options(), Options(causal=True), Options(window_left=100, window_right=0), Options(softcap=20.0))


def shared_bytes(cfg: ForwardConfig) -> int:
    """Rings of Q, K and V in 16 bits, and the flags of rows that failed, without `REST`."""
    queries = cfg.Q_SLOTS * WARPGROUP_ROWS * cfg.Q_CHUNKS * cfg.D_CHUNK
    keys = cfg.STAGES * cfg.BLOCK_N * (cfg.D_CHUNKS * cfg.D_CHUNK + cfg.BLOCK_DV)
    return 2 * (queries + keys) + 2 * cfg.WARPGROUPS * 128 * 4


def config(dim: int, dim_v: int, options: Options, seqlen: int = 512, heads: int = 4) -> ForwardConfig:
    q, v = (torch.empty(2, seqlen, heads, d, dtype=torch.bfloat16, device="meta") for d in (dim, dim_v))
    return forward_config(describe(Inputs(q, q, v), options))


@pytest.mark.parametrize("seqlen", [512, 8192])
def test_rings_fit_at_every_head_size(seqlen: int):
    sizes = range(8, 257, 8)
    for dim, dim_v, options in itertools.product(sizes, sizes, MASKS):
        if dim_v <= max(64, dim):
            cfg = config(dim, dim_v, options, seqlen, 32)
            taken = (shared_bytes(cfg) + REST) * cfg.CTAS_PER_SM
            assert taken <= SHARED_BYTES, (dim, dim_v, options, cfg)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "dims"), [("d64", (64, 64)), ("d256_128", (256, 128))])
def test_compiled_kernels_take_what_the_sum_says(
    case: str, dims: tuple[int, int], compiled_by: Callable[..., list[dict[str, Any]]]
):
    pytest.importorskip("triton")
    (row,) = compiled_by("compile_forward.py", case)
    rest = row["shared_bytes"] - shared_bytes(config(*dims, Options()))
    assert 0 < rest <= REST, row
