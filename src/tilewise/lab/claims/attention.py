"""Claims about attention alone: time and memory beside standard attention, and the speed of its kernels."""

from __future__ import annotations

import statistics
from functools import partial

import torch

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


def ratio(case: Case, setting: Setting, slow: str = "standard", fast: str = "tilewise") -> float:
    """How many times faster `fast` is: the median over rounds in which both take turns."""
    data, clock = Data(case, setting.device, seed=0), stopwatch(setting.device)
    prepared = []
    for peer in find_peers([slow, fast]):
        layout = "bhsd" if "bhsd" in peer.layouts(case) else peer.layouts(case)[0]
        prepared.append(peer.prepare(case, data, layout))
    for one in prepared:
        clock.warm_up(one.call)

    def seconds(one: Prepared) -> float:
        return statistics.median(clock.sample(one.call, 3))

    rounds = [[seconds(one) for one in prepared] for _ in range(ROUNDS)]
    return statistics.median(a / b for a, b in rounds)


def gain(setting: Setting, seqlen: int) -> Measured:
    case = sizes(setting, seqlen)
    return Measured(ratio(case, setting), f"forward and backward, {said(case)}")


claim(
    "attention-2k", "Attention at 2,048 tokens is 7.6 times faster than standard attention.", FA1, 7.6, "×"
)(partial(gain, seqlen=2048))
claim(
    "attention-1k", "Attention at 1,024 tokens is 2 to 4 times faster than standard attention.", FA1, 2, "×"
)(partial(gain, seqlen=1024))
claim("attention-long", "Long sequences are 9 times faster than with standard attention.", FA2, 9, "×")(
    lambda setting: gain(setting, 8192 if setting.is_gpu else 4096)
)


@claim("attention-short", "Below 256 tokens standard attention may be as fast.", TUTORIAL, 1, "×")
def attention_short(setting: Setting) -> Measured:
    found = {n: ratio(sizes(setting, n, "forward"), setting) for n in (32, 64, 128, 256)}
    each = ", ".join(f"{n}: {value:.1f}×" for n, value in found.items())
    return Measured(
        1 / min(found.values()), "standard over tilewise, forward, the shortest of 32 to 256 tokens", each
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
    extra = [_usual_memory(case, setting) for case in cases]
    tokens = f"from {lengths[0]:,} to {lengths[1]:,} and {lengths[2]:,} tokens"
    what = f"growth beyond inputs, outputs and gradients, {tokens}, {heads} heads of {dim}"
    note = ", ".join(f"{n:,}: {size / 2**20:.1f} MiB" for n, size in zip(lengths, extra, strict=True))
    return Measured((extra[2] - extra[1]) / max(extra[1] - extra[0], 1), what, note)


def _usual_memory(case: Case, setting: Setting) -> float:
    """The median of a few readings: a process may take memory that it has freed, or free what it had."""
    data = Data(case, setting.device, seed=0)
    return statistics.median(memory.measure(case, "tilewise", data) for _ in range(3))


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


@claim(
    "fa3-speed", "The forward in float16 reaches 740 TFLOP/s on an H100.", FA3, 740, "TFLOP/s", needs_gpu=True
)
def fa3_speed(setting: Setting) -> Measured:
    return Measured(rate(LONG, setting, "tilewise") / 1e12, f"forward, {said(LONG)}")


@claim("fa3-peak", "The forward in float16 reaches 75% of an H100's peak.", FA3, 75, "%", needs_gpu=True)
def fa3_peak(setting: Setting) -> Measured:
    peak = MACHINES["H100"].device.flops_per_second
    return Measured(100 * rate(LONG, setting, "tilewise") / peak, f"forward, {said(LONG)}")


@claim("fa3-over-fa2", "Warp specialisation makes the forward 2 times faster.", FA3, 2, "×", needs_gpu=True)
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
)
def fp8_speed(setting: Setting) -> Measured:
    data, clock = Data(LONG, setting.device, seed=0), stopwatch(setting.device)
    q, k, v = (t.bfloat16() for t in (data.query, data.key, data.value))

    def call() -> object:
        return tilewise.attention(q, k, v, precision="fp8")

    clock.warm_up(call)
    seconds = statistics.median(clock.sample(call, 20))
    return Measured(LONG.flops() / seconds / 1e12, "forward with quantising, 16,384 tokens, 16 heads of 128")


@claim("context", "Attention of 65,536 tokens trains on one GPU.", FA1, 65536, "tokens", needs_gpu=True)
def context(setting: Setting) -> Measured:
    """Doubles the length until standard attention, and then ours, no longer fits."""
    longest = {}
    for name, limit in (("standard", 1 << 20), ("tilewise", 1 << 20)):
        seqlen = 1 << 12
        while seqlen <= limit and _fits(name, seqlen):
            seqlen *= 2
        longest[name] = seqlen // 2
    note = f"standard attention: {longest['standard']:,}; not tried beyond {1 << 20:,}"
    return Measured(longest["tilewise"], "causal forward and backward, 16 heads of 64, float16", note)


def _fits(peer: str, seqlen: int) -> bool:
    case = dense("forward+backward", "float16", 64, 16, 1, seqlen, causal=True)
    try:
        (found,) = find_peers([peer])
        found.prepare(case, Data(case, "cuda", seed=0), found.layouts(case)[0]).call()
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()
    return True
