"""Check the main backward kernels on the CPU, run by `emulator`: a line a case, up to the first error."""

from __future__ import annotations

import itertools
import sys

import emulator
import torch

emulator.install()

from emulator import Descriptor, Pointer, run_grid  # noqa: E402

from tilewise import reference  # noqa: E402
from tilewise.hopper import (  # noqa: E402
    backward,
    backward_slim,
    backward_wide,
    backward_wide_queries,
    launch,
)
from tilewise.hopper.backward_arguments import CHUNK  # noqa: E402
from tilewise.hopper.backward_launch import NARROW, backward_config, kernel_sizes, score_factors  # noqa: E402
from tilewise.hopper.backward_wide_launch import keys_config, wide_config  # noqa: E402
from tilewise.problem import Inputs, Options, describe  # noqa: E402

# name: lengths of queries and keys (lists: packed), heads, key heads, head sizes, options
CASES = {
    "full": (130, 200, 2, 2, 128, 128, {}),
    "causal": (200, 200, 1, 1, 128, 128, {"causal": True}),
    "causal_d64": (300, 260, 2, 1, 64, 64, {"causal": True}),
    "more_keys": (70, 300, 1, 1, 128, 128, {"causal": True}),
    "more_queries": (300, 70, 1, 1, 64, 64, {"causal": True}),
    "window": (300, 280, 1, 1, 128, 128, {"window_left": 40, "window_right": 10}),
    "window_hides_keys": (65, 400, 1, 1, 64, 64, {"window_left": 20, "window_right": 0}),
    "softcap": (150, 150, 2, 1, 64, 64, {"softcap": 3.0, "causal": True}),
    "small_heads": (100, 130, 1, 1, 80, 40, {"causal": True}),
    "deterministic": (200, 300, 1, 1, 128, 128, {"deterministic": True}),
    "deterministic_window": (
        400,
        400,
        2,
        1,
        64,
        64,
        {"deterministic": True, "causal": True, "window_left": 90},
    ),
    # most keys seen by no query, worked on before the others, and after them
    "deterministic_unseen": (70, 600, 1, 1, 128, 128, {"deterministic": True, "window_left": 50}),
    "deterministic_unseen_causal": (
        70,
        600,
        2,
        1,
        64,
        64,
        {"deterministic": True, "causal": True, "window_left": 20},
    ),
    "packed": ([100, 0, 70, 1], [130, 20, 0, 7], 2, 1, 64, 64, {}),
    "packed_causal": ([100, 129, 1], [100, 200, 3], 2, 2, 128, 128, {"causal": True}),
    "wide": (130, 200, 2, 1, 256, 256, {"causal": True}),
    "wide_window": (200, 150, 2, 2, 192, 128, {"window_left": 40, "window_right": 10}),
    "slim_packed": ([100, 0, 170, 1], [130, 20, 0, 7], 2, 1, 192, 128, {"causal": True}),
    "slim_softcap": (100, 270, 2, 2, 160, 100, {"softcap": 3.0, "causal": True}),
    "wide_softcap": (100, 140, 1, 1, 160, 160, {"softcap": 3.0}),
    "wide_packed": ([100, 0, 70, 1], [130, 20, 0, 7], 2, 1, 256, 256, {"causal": True}),
    "packed_deterministic": (
        [100, 129, 1],
        [100, 200, 3],
        2,
        1,
        128,
        128,
        {"causal": True, "deterministic": True},
    ),
}


def check(name: str) -> float:
    """Largest error of dq, dk and dv relative to their largest value."""
    lengths_q, lengths_k, heads, kv_heads, dim, dim_v, options = CASES[name]
    is_packed = isinstance(lengths_q, list)
    lead_q, lead_k = ((sum(n),) if is_packed else (1, n) for n in (lengths_q, lengths_k))
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(*lead, h, d).bfloat16()
        for lead, h, d in (
            (lead_q, heads, dim),
            (lead_k, kv_heads, dim),
            (lead_k, kv_heads, dim_v),
            (lead_q, heads, dim_v),
        )
    )
    packing = {}
    if is_packed:
        for side, lengths in (("q", lengths_q), ("k", lengths_k)):
            packing[f"cu_seqlens_{side}"] = torch.tensor(
                [0, *itertools.accumulate(lengths)], dtype=torch.int32
            )
    inputs, given = Inputs(q, k, v, **packing), Options(**options)
    problem = describe(inputs, given)
    dq, dk, dv = (emulate_wide if dim > NARROW else emulate)(problem, inputs, dout)
    plain = {key: x for key, x in options.items() if key in ("causal", "softcap")}
    if "window_left" in options:
        plain["window"] = (options["window_left"], options.get("window_right"))
    exact = reference.attention_backward(dout, q, k, v, **plain, **packing)
    pairs = ((dq, exact.query), (dk, exact.key), (dv, exact.value))
    return max(((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in pairs)


def emulate(problem, inputs, dout):
    cfg = backward_config(problem)
    query, key, value = inputs[:3]
    out, lse = reference_of(problem, inputs)
    tiles_q, starts, stats = row_statistics(problem, inputs, cfg, out, lse, dout)
    parts = cfg.BLOCK_M * cfg.BLOCK_D // CHUNK
    slots = problem.num_heads * (1 if problem.is_packed else problem.batch)
    turns = torch.zeros(stats.shape[0] + slots, dtype=torch.int32)
    sums = torch.full((stats.shape[0] * parts * 32, 128), float("nan"))
    dk, dv = (torch.full(t.shape, float("nan"), dtype=t.dtype) for t in (key, value))
    flat = lambda t, block: Descriptor(t, list(t.shape), [t.shape[1], 1], block)  # noqa: E731
    tile = lambda t, rows: describe_tensor(t, (rows, 1, cfg.BLOCK_D), problem.is_packed)  # noqa: E731
    num_slots = problem.num_kv_heads * (1 if problem.is_packed else problem.batch)
    order, first_tile = order_sequences(inputs, problem.batch)
    visibility = problem.visibility()
    pointer = lambda t: None if t is None else Pointer(t)  # noqa: E731
    run_grid(
        backward.attn_bwd_kernel,
        3,
        tile(query, cfg.BLOCK_M), tile(key, 64), tile(value, 64), tile(dout, cfg.BLOCK_M),
        flat(sums, [32, 128]), tile(dk, 64), tile(dv, 64), flat(stats, [1, 2 * cfg.BLOCK_M]),
        Pointer(turns),
        *(pointer(t) for t in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, order, first_tile)),
        Pointer(torch.zeros(2, dtype=torch.int32)),
        batch=problem.batch, seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k,
        group_size=problem.group_size,
        num_slots=num_slots, num_tiles=-(-problem.seqlen_k // 128), section=2, tiles_q=tiles_q,
        window_left=visibility.left if visibility.left is not None else 1 << 29,
        window_right=visibility.right if visibility.right is not None else 1 << 29,
        scale=problem.scale, scale_log2e=problem.scale * launch.LOG2_E,
        two_over_softcap_log2e=2 * launch.LOG2_E * problem.scale / (problem.softcap or 1.0),
        softcap_log2e=problem.softcap * launch.LOG2_E, cfg=cfg,
    )  # fmt: skip
    key_tiles = -(-problem.seqlen_k // 128) if first_tile is None else int(first_tile[-1])
    assert (turns[stats.shape[0] :][:num_slots] == (key_tiles if cfg.ENDS_UNEVENLY else 0)).all()
    sums.view(stats.shape[0], -1)[turns[: stats.shape[0]] == 0] = 0  # whoever comes first stores
    return gather_dq(problem, inputs, cfg, sums, tiles_q, starts), dk, dv


def emulate_wide(problem, inputs, dout):
    cfg = wide_config(problem)
    query, key, value = inputs[:3]
    _, _, stats = row_statistics(problem, inputs, cfg, *reference_of(problem, inputs), dout)
    gradients = [torch.full(t.shape, float("nan"), dtype=t.dtype) for t in inputs[:3]]
    tile = lambda t, width: describe_tensor(t, (64, 1, width), problem.is_packed)  # noqa: E731
    streams = [
        tile(query, cfg.PART_WIDTH),
        tile(key, cfg.PART_WIDTH),
        tile(value, cfg.BLOCK_DV),
        tile(dout, cfg.BLOCK_DV),
    ]
    keys = [tile(t, width) for t, width in zip(gradients[1:3], cfg.STORE_WIDTHS, strict=True)]
    keys_kernel = (
        backward_slim.attn_bwd_slim_keys_kernel if cfg.IS_SLIM else backward_wide.attn_bwd_wide_keys_kernel
    )
    rows = Descriptor(stats, list(stats.shape), [stats.shape[1], 1], [1, 128])
    for kernel, own_cfg, tensors, length, side, width in (
        (keys_kernel, keys_config(cfg), [*keys, rows], problem.seqlen_k, "k", keys_config(cfg).BLOCK_N),
        (
            backward_wide_queries.attn_bwd_wide_queries_kernel,
            cfg,
            [tile(gradients[0], cfg.PART_WIDTH), Pointer(stats)],
            problem.seqlen_q,
            "q",
            128,
        ),
    ):
        sizes = kernel_sizes(problem, query.shape[-3], -(-length // width), cfg)
        packing = [
            inputs.cu_seqlens_q,
            inputs.cu_seqlens_k,
            *order_sequences(inputs, problem.batch, side, width),
        ]
        pointers = [None if t is None else Pointer(t) for t in (*packing, torch.zeros(2, dtype=torch.int32))]
        run_grid(kernel, 3, *streams, *tensors, *pointers, *sizes, *score_factors(problem), cfg=own_cfg)
    return gradients


def reference_of(problem, inputs):
    visibility = problem.visibility()
    packing = {
        n: getattr(inputs, n) for n in ("cu_seqlens_q", "cu_seqlens_k") if getattr(inputs, n) is not None
    }
    options = {"softcap": problem.softcap} if problem.softcap else {}
    return reference.attention(
        *inputs[:3], window=(visibility.left, visibility.right), scale=problem.scale, **options, **packing
    )


def row_statistics(problem, inputs, cfg, out, lse, dout):
    """What the prepare kernel writes, and where each sequence's tiles start."""
    delta = (out.double() * dout.double()).sum(-1).transpose(-1, -2)
    if problem.is_packed:
        cu = inputs.cu_seqlens_q.tolist()
        tiles_q = cu[-1] // cfg.BLOCK_M + problem.batch
        starts = [(a, b, a // cfg.BLOCK_M + n) for n, (a, b) in enumerate(itertools.pairwise(cu))]
        lse, delta = lse[None], delta[None]
    else:
        tiles_q = -(-problem.seqlen_q // cfg.BLOCK_M)
        starts = [(0, problem.seqlen_q, 0)]
    rows = torch.zeros(2, lse.shape[0], problem.num_heads, tiles_q * cfg.BLOCK_M)
    rows[0] = float("inf")
    lse = torch.where(lse == -float("inf"), float("inf"), lse) * launch.LOG2_E
    for a, b, first in starts:
        rows[0, ..., first * cfg.BLOCK_M : first * cfg.BLOCK_M + b - a] = lse[..., a:b]
        rows[1, ..., first * cfg.BLOCK_M : first * cfg.BLOCK_M + b - a] = delta[..., a:b]
    rows = rows.view(2, -1, cfg.BLOCK_M).transpose(0, 1).reshape(-1, 2 * cfg.BLOCK_M)
    return tiles_q, starts, rows.contiguous()


def gather_dq(problem, inputs, cfg, sums, tiles_q, starts):
    """What the finish kernel writes."""
    parts = sums.view(-1, 8, 4, 8, 4, 2, 2).permute(0, 2, 5, 3, 1, 4, 6).reshape(-1, 64, 64)
    if cfg.BLOCK_M == 64:
        rows = parts.view(-1, 2, 64, 64).transpose(1, 2).reshape(-1, 64, 128)
    else:
        rows = parts.view(-1, 128, 64)
    rows = (
        rows.reshape(-1, problem.num_heads, tiles_q * cfg.BLOCK_M, cfg.BLOCK_D).transpose(1, 2)
        * problem.scale
    )
    pieces = [rows[:, f * cfg.BLOCK_M : f * cfg.BLOCK_M + b - a] for a, b, f in starts]
    dq = torch.cat(pieces, 1)[..., : problem.head_dim]
    return dq[0] if problem.is_packed else dq


def describe_tensor(t, block, is_packed):
    if not is_packed:
        return Descriptor(t, list(t.shape), list(t.stride()), [1, *block])
    shape = [0x7FFF0000, 0x7FFF0000, 1 << 30, *t.shape[1:]]
    return Descriptor(t, shape, [(1 << 34) - t.stride(0), t.stride(0), *t.stride()], [1, 1, *block])


def order_sequences(inputs, batch, side="k", width=128):
    if inputs.cu_seqlens_k is None:
        return None, None
    lengths = {"q": inputs.cu_seqlens_q.diff(), "k": inputs.cu_seqlens_k.diff()}
    order = torch.argsort(lengths["q" if side == "k" else "k"], descending=True, stable=True)
    tiles = (lengths[side][order] + width - 1) // width
    first_tile = torch.zeros(batch + 1, dtype=torch.int32)
    first_tile[1:] = tiles.cumsum(0)
    return order.int(), first_tile


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        for holds_next_s in (True, False) if "slim" in case else (True,):
            backward_slim.HOLDS_NEXT_S = holds_next_s
            error = check(case)
            print(f"{case}: {error:.1e}", flush=True)
            assert error < 2e-2, case
