"""Claims about attention alone: time and memory beside standard attention, kernels, orders of loops."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.lab.bench import memory
from tilewise.lab.bench.cases import Case, dense
from tilewise.lab.bench.peer import Data, Prepared
from tilewise.lab.bench.peers import find_peers
from tilewise.lab.bench.timing import stopwatch
from tilewise.lab.claims.claim import FA1, FA2, FA3, TUTORIAL, Measured, Setting, claim
from tilewise.lab.learn.machines import MACHINES

ROUNDS = 5


def sizes(setting: Setting, seqlen: int, direction: str = "forward+backward") -> Case:
    """GPT-2's heads: a batch of 8 in float16 on a GPU, one sequence in float32 on a CPU."""
    dtype, batch = ("float16", 8) if setting.is_gpu else ("float32", 1)
    return dense(direction, dtype, 64, 12, batch, seqlen)


def said(case: Case) -> str:
    return f"{case.seqlen_q:,} tokens, {case.batch} × {case.num_heads} heads of {case.head_dim}, {case.dtype}"


def rounds(case: Case, setting: Setting, *names: str) -> list[list[float]]:
    """Seconds of each peer, in rounds in which they take turns."""
    data, clock = Data(case, setting.device, seed=0), stopwatch(setting.device)
    prepared = []
    for peer in find_peers(names):
        layout = "bhsd" if "bhsd" in peer.layouts(case) else peer.layouts(case)[0]
        prepared.append(peer.prepare(case, data, layout))
    for one in prepared:
        clock.warm_up(one.call)

    def seconds(one: Prepared) -> float:
        return statistics.median(clock.sample(one.call, 3))

    return [[seconds(one) for one in prepared] for _ in range(ROUNDS)]


def ratio(case: Case, setting: Setting, slow: str = "standard", fast: str = "tilewise") -> float:
    """How many times faster `fast` is: the median over rounds."""
    return statistics.median(a / b for a, b in rounds(case, setting, slow, fast))


def fused(setting: Setting) -> str:
    """PyTorch's fused attention there."""
    return "sdpa-cudnn" if setting.is_gpu else "sdpa-flash"


def gain(setting: Setting, lengths: tuple[int, int]) -> Measured:
    case = sizes(setting, lengths[0] if setting.is_gpu else lengths[1])
    return Measured(ratio(case, setting), f"forward and backward, {said(case)}")


OTHER_BASE = (
    "Standard attention loses by the time for its scores' bytes, beside that for FLOPs. The papers' GPUs had "
    "other ratios, a CPU most of all, and PyTorch's standard attention is no longer theirs."
)
for _name, _what, _source, _times, _lengths in (  # lengths: on a GPU, on a CPU
    ("attention-2k", "Attention at 2,048 tokens is 7.6 times", FA1, 7.6, (2048, 2048)),
    ("attention-1k", "Attention at 1,024 tokens is 2 to 4 times", FA1, 2, (1024, 1024)),
    ("attention-long", "Attention of long sequences is 9 times", FA2, 9, (8192, 4096)),
):
    claim(_name, f"{_what} faster than standard attention.", _source, _times, "×", why=OTHER_BASE)(
        partial(gain, lengths=_lengths)
    )


SHORT = (32, 64, 128, 256)


@claim(
    "attention-short", "Below 256 tokens standard attention may be as fast.", TUTORIAL, 1, "×",
    why="A short call is bound by its launches, and standard attention has several kernels, not one.",
)  # fmt: skip
def attention_short(setting: Setting) -> Measured:
    names = "standard", fused(setting), "tilewise"
    curves: dict[str, dict[str, float]] = {name: {} for name in names}
    for seqlen in (*SHORT, *((1024, 4096, 8192) if setting.is_gpu else (1024, 2048))):
        found = rounds(sizes(setting, seqlen, "forward"), setting, *names)
        for name, taken in zip(names, zip(*found)):
            curves[name][str(seqlen)] = 1e3 * statistics.median(taken)
    each = {n: curves["standard"][str(n)] / curves["tilewise"][str(n)] for n in SHORT}
    return Measured(
        1 / min(each.values()),
        f"standard over tilewise, forward, the shortest of {SHORT[0]} to {SHORT[-1]} tokens",
        ", ".join(f"{n}: {value:.1f}×" for n, value in each.items()),
        {"ms": curves},
    )


def saving(setting: Setting, seqlen: int) -> Measured:
    case = sizes(setting, seqlen)
    data = Data(case, setting.device, seed=0)
    extra = {peer: memory.measure(case, peer, data) for peer in ("standard", "tilewise")}
    total = sum(t.nbytes for t in (data.query, data.key, data.value, data.query)) * 2
    note = " and ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in extra.items())
    return Measured(
        (extra["standard"] + total) / (extra["tilewise"] + total),
        f"peak with inputs, outputs and gradients, {said(case)}", f"beyond them: {note}",
    )  # fmt: skip


claim("memory-2k", "At 2,048 tokens attention needs 10 times less memory.", FA1, 10, "×")(
    partial(saving, seqlen=2048)
)
claim("memory-4k", "At 4,096 tokens attention needs 20 times less memory.", FA1, 20, "×")(
    partial(saving, seqlen=4096)
)


@claim("memory-linear", "Twice the tokens take at most twice the memory.", FA1, 2, "×", "at most")
def memory_linear(setting: Setting) -> Measured:
    """What the second doubling adds over what the first does: some memory does not grow."""
    dtype = sizes(setting, 8192).dtype
    # On a CPU many heads, which need more than what else moves a process.
    lengths, heads, dim = ((8192, 16384, 32768), 4, 64) if setting.is_gpu else ((1024, 2048, 4096), 256, 16)
    cases = [dense("forward+backward", dtype, dim, heads, 1, seqlen) for seqlen in lengths]
    extra = [_usual_memory(case, setting, "tilewise") for case in cases]
    standard = [_usual_memory(case, setting, "standard") for case in cases[:2]]
    curves = {
        name: {str(n): size / 2**20 for n, size in zip(lengths, found)}
        for name, found in (("standard", standard), ("tilewise", extra))
    }
    tokens = f"from {lengths[0]:,} to {lengths[1]:,} and {lengths[2]:,} tokens"
    what = f"growth beyond inputs, outputs and gradients, {tokens}, {heads} heads of {dim}"
    note = ", ".join(f"{n:,}: {size / 2**20:.1f} MiB" for n, size in zip(lengths, extra, strict=True))
    return Measured((extra[2] - extra[1]) / max(extra[1] - extra[0], 1), what, note, {"MiB": curves})


def _usual_memory(case: Case, setting: Setting, peer: str) -> float:
    """The median of a few readings: a process may take memory that it has freed, or free what it had."""
    data = Data(case, setting.device, seed=0)
    return statistics.median(memory.measure(case, peer, data) for _ in range(3))


def rate(case: Case, setting: Setting, peer: str) -> float:
    """FLOPs a second, of the fastest layout's median."""
    (found,) = find_peers([peer])
    data, clock = Data(case, setting.device, seed=0), stopwatch(setting.device)
    best = 0.0
    for layout in found.layouts(case):
        prepared = found.prepare(case, data, layout)
        clock.warm_up(prepared.call)
        best = max(best, case.flops() / statistics.median(clock.sample(prepared.call, 20)))
    return best


LONG = dense("forward", "float16", 128, 16, 1, 16384)


@functools.cache
def long_rate(setting: Setting) -> float:
    """FLOPs a second of `LONG`: one reading for both claims of it."""
    return rate(LONG, setting, "tilewise")


@claim(
    "fa3-speed", "The forward in float16 reaches 740 TFLOP/s on an H100.", FA3, 740, "TFLOP/s", needs_gpu=True
)
def fa3_speed(setting: Setting) -> Measured:
    return Measured(long_rate(setting) / 1e12, f"forward, {said(LONG)}")


@claim("fa3-peak", "The forward in float16 reaches 75% of an H100's peak.", FA3, 75, "%", needs_gpu=True)
def fa3_peak(setting: Setting) -> Measured:
    peak = MACHINES["H100"].device.flops_per_second
    return Measured(100 * long_rate(setting) / peak, f"forward, {said(LONG)}")


@claim(
    "fa3-over-fa2", "FlashAttention-3 is 1.5 to 2 times faster than FlashAttention-2.", FA3, 1.5, "×",
    needs_gpu=True,
)  # fmt: skip
def fa3_over_fa2(setting: Setting) -> Measured:
    return Measured(
        ratio(LONG, setting, "tilewise:triton", "tilewise:hopper"),
        f"Hopper kernels over Triton kernels in FlashAttention-2's order, {said(LONG)}",
    )


@claim(
    "fp8-speed",
    "The forward in 8 bits reaches 1,200 TFLOP/s on an H100.",
    FA3,
    1200,
    "TFLOP/s",
    needs_gpu=True,
    why="Quantising counts here. And each tile's P V is added in float32, as tensor cores' own sums of 8-bit "
    "products lose digits.",
)
def fp8_speed(setting: Setting) -> Measured:
    data, clock = Data(LONG, setting.device, seed=0), stopwatch(setting.device)
    q, k, v = (t.bfloat16() for t in (data.query, data.key, data.value))

    def call() -> object:
        return tilewise.attention(q, k, v, precision="fp8")

    clock.warm_up(call)
    seconds = statistics.median(clock.sample(call, 20))
    what = f"forward of bfloat16 that is quantised first, {LONG.seqlen_q:,} tokens, {LONG.num_heads} heads"
    return Measured(LONG.flops() / seconds / 1e12, f"{what} of {LONG.head_dim}")


FIRST_TOKENS = 1 << 12


def longest_that(fits: Callable[[int], bool], most: int) -> int:
    """The last length that fits: 4,096 and its doubles up to `most` are tried; 2,048 if none does.

    Example:
        >>> longest_that(lambda tokens: tokens < 20_000, 65_536)
        16384
    """
    seqlen = FIRST_TOKENS
    while seqlen <= most and fits(seqlen):
        seqlen *= 2
    return seqlen // 2


def in_memory(step: Callable[[], Any]) -> bool:
    """Whether a step runs within the GPU's memory, of which it leaves nothing in use."""
    try:
        step()
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()  # models have cycles
        torch.cuda.empty_cache()
    return True


MOST_TOKENS = 1 << 19  # a step of twice as many takes 15 s on an H200


@claim("context", "Attention of 65,536 tokens trains on one GPU.", FA1, 65536, "tokens", needs_gpu=True)
def context(setting: Setting) -> Measured:
    """Doubles the length until a step no longer fits."""
    names = ("standard", fused(setting), "tilewise")
    longest = {name: longest_that(partial(_fits, name), MOST_TOKENS) for name in names}
    others = ", ".join(f"{name}: {tokens:,}" for name, tokens in longest.items() if name != "tilewise")
    note = f"{others}; nothing was tried beyond {MOST_TOKENS:,}"
    return Measured(longest["tilewise"], "causal forward and backward, 16 heads of 64, float16", note)


def _fits(peer: str, seqlen: int) -> bool:
    case = dense("forward+backward", "float16", 64, 16, 1, seqlen, causal=True)
    (found,) = find_peers([peer])
    return in_memory(lambda: found.prepare(case, Data(case, "cuda", seed=0), found.layouts(case)[0]).call())


BLOCK, ORDER_ROUNDS = 128, 7  # of the two orders of loops

# No kernel of the first order exists here. Written with the same PyTorch operations, the orders differ in
# what they rescale and in what they write and read again.


def keys_outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention's order: each tile of keys meets all queries, whose O, m and l lie in memory.

    Args:
        q, k, v: (heads, seqlen, dim).
    """
    out = torch.zeros_like(q)
    m, l = q.new_full((*q.shape[:2], 1), float("-inf")), q.new_zeros((*q.shape[:2], 1))
    scale = q.shape[-1] ** -0.5
    for keys, values in zip(k.split(BLOCK, 1), v.split(BLOCK, 1)):
        tiles = (x.split(BLOCK, 1) for x in (q, out, m, l))
        for queries, o, m_tile, l_tile in zip(*tiles):  # views: what is written stays
            s = queries @ keys.mT * scale
            m_new = torch.maximum(m_tile, s.amax(-1, keepdim=True))
            p, before = torch.exp(s - m_new), l_tile * torch.exp(m_tile - m_new)
            l_new = before + p.sum(-1, keepdim=True)
            o.copy_((before * o + p @ values) / l_new)
            m_tile.copy_(m_new)
            l_tile.copy_(l_new)
    return out


def queries_outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-2's order: each tile of queries meets all keys; O is divided once, at the end."""
    found, scale = [], q.shape[-1] ** -0.5
    for queries in q.split(BLOCK, 1):
        o = torch.zeros_like(queries)
        m, l = (queries.new_full((*queries.shape[:2], 1), start) for start in (float("-inf"), 0.0))
        for keys, values in zip(k.split(BLOCK, 1), v.split(BLOCK, 1)):
            s = queries @ keys.mT * scale
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, alpha = torch.exp(s - m_new), torch.exp(m - m_new)
            l = l * alpha + p.sum(-1, keepdim=True)
            o, m = o * alpha + p @ values, m_new
        found.append(o / l)
    return torch.cat(found, 1)


@claim(
    "fa2-over-fa1", "FlashAttention-2 is 2 times faster than FlashAttention.", FA2, 2, "×",
    why="The orders alone differ by less. The rest is that FlashAttention-2 divides a head's queries among "
    "multiprocessors and warps, which both orders leave to PyTorch here.",
)  # fmt: skip
def fa2_over_fa1(setting: Setting) -> Measured:
    heads, seqlen, dim = (96, 4096, 64) if setting.is_gpu else (12, 2048, 64)
    q, k, v = (torch.randn(heads, seqlen, dim, device=setting.device) for _ in range(3))
    clock = stopwatch(setting.device)
    calls = [lambda order=order: order(q, k, v) for order in (keys_outside, queries_outside)]  # type: ignore[misc]
    for call in calls:
        clock.warm_up(call)
    taken = [[statistics.median(clock.sample(call, 1)) for call in calls] for _ in range(ORDER_ROUNDS)]
    return Measured(
        statistics.median(first / second for first, second in taken),
        f"forward in the two orders, in PyTorch operations on tiles of {BLOCK} × {BLOCK}, {seqlen:,} tokens, "
        f"{heads} heads of {dim}, float32",
    )
