"""What each method costs, from its schedule: FLOPs of its blocks, bytes and messages that arrive meanwhile.

A rank computes step n while the keys of step n + 1 arrive, in the backward also gradients of step n - 1:

    messages = latency + max(bytes / bandwidth, bytes of one peer / bandwidth of one peer)
    time = sum over steps of max(FLOPs / speed + taken * messages, messages) + publishing * messages + waiting

Bytes of other nodes come on top, at the speed between nodes.

`taken`: a GPU's messages are kernels, which hold some of its multiprocessors, also while they wait for a rank
that is late. `publishing` and `waiting`: ranks that read each other's memory copy there what others read, and
wait for each other. In the backward the rank's own work is the first and the last step. Ulysses adds two
exchanges of heads for tokens, each messages * (1 + publishing) + waiting, which nothing overlaps. Blocks are
taken to run at the speed of long sequences, and merging to be free.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewise.api import window_bounds
from tilewise.core.checks import check_flag, check_integers, shown
from tilewise.core.mask import Visibility
from tilewise.distributed.layout import Layout, joined, layout_of
from tilewise.distributed.network import BACKWARD_FLOPS, Network, check_network
from tilewise.distributed.ranks import Ranks
from tilewise.distributed.schedule import Message, Rules, Step, make_schedule, num_rows

EQUAL = 0.01  # times that differ by less, a forward's by twice that: the method that holds less is taken
MOST_RANKS = 4  # whose schedules are made: the first, the last and some between


class Sizes(NamedTuple):
    """Of the tensors of a call."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    itemsize: int
    gradient_itemsize: int  # of gradients of keys on their way back


def sizes_of(inputs: Any) -> Sizes:
    """Those of a call's query, key and value, (batch, tokens, heads, dim)."""
    query, key, value = inputs[:3]
    heads = query.shape[2], key.shape[2]
    return Sizes(query.shape[0], *heads, query.shape[3], value.shape[3], *itemsizes(query.dtype))


def itemsizes(dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a number and of a gradient that is still to be added to others: at least float32's."""
    return dtype.itemsize, max(4, dtype.itemsize)


@dataclass(frozen=True)
class Estimate:
    """Of one method, in the slowest of the ranks that were looked at."""

    method: str
    degree: int  # ranks that exchange heads for tokens
    seconds: float  # forward, with gradients also backward
    compute: float  # seconds of it if nothing were waited for
    efficiency: float  # time of one device / (world * seconds)
    bytes_received: int
    bytes_held: int  # keys and values of other ranks at once

    @property
    def limit(self) -> str:
        """What keeps it from an efficiency of 1: "messages", "uneven work" or, if it is near 1, "none"."""
        waiting = self.seconds - self.compute
        idle = self.compute * (1 - self.efficiency * self.seconds / self.compute) if self.compute else 0.0
        if max(waiting, idle) < EQUAL * self.seconds:
            return "none"
        return "messages" if waiting > idle else "uneven work"


@dataclass(frozen=True)
class Choice:
    """All methods that serve a call, and the one that `method="auto"` takes."""

    method: str
    estimates: tuple[Estimate, ...]

    @property
    def best(self) -> Estimate:
        return next(e for e in self.estimates if e.method == self.method)

    def __str__(self) -> str:
        lines = [f"{'method':12}{'ms':>10}{'efficiency':>12}{'MB received':>13}{'MB held':>10}  limit"]
        for e in self.estimates:
            name = f"{e.method}, {e.degree}" if e.method == "2d" else e.method
            lines.append(
                f"{name:12}{e.seconds * 1e3:10.3f}{e.efficiency:12.2f}{e.bytes_received / 1e6:13.1f}"
                f"{e.bytes_held / 1e6:10.1f}  {e.limit}"
            )
        lines.append(f"auto: {self.method} (the fastest; of equally fast ones, that with the least memory)")
        return "\n".join(lines)


def explain(
    seqlen: int | None = None,
    *,
    world: int,
    network: Network,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int = 128,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    balance: str = "zigzag",
    cu_seqlens: Sequence[int] | None = None,
    backward: bool = True,
) -> Choice:
    """What each method of `context_parallel_attention` would take on any number of devices; runs nothing.

    Args:
        seqlen: tokens in all; not needed with cu_seqlens.
        world: the number of ranks.
        network: the speed of messages and of one device.
        num_kv_heads: None is num_heads.
        backward: whether the backward counts too.

    Returns:
        Estimates of all methods that the heads allow, and which one is chosen. `print` shows a table.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> nvlink = Network(flops=600e12, bandwidth=300e9, latency=10e-6)
        >>> choice = explain(131072, world=8, network=nvlink, num_heads=16, causal=True)
        >>> choice.method, [e.method for e in choice.estimates]
        ('ring', ['ring', 'ulysses', '2d', 'all_gather'])
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_integers(1, world=world, batch=batch, num_heads=num_heads, num_kv_heads=kv_heads, head_dim=head_dim)
    if num_heads % kv_heads:
        raise ValueError(f"num_kv_heads={kv_heads} must divide num_heads={num_heads}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={shown(dtype)} must be a torch.dtype")
    check_flag("causal", causal)
    check_flag("backward", backward)
    check_network(network)
    layout = layout_of(Ranks(None, 0, world, ()), balance, seqlen, cu_seqlens)
    left, right = window_bounds(window)
    rules = Rules(left, 0 if causal else right, needs_tokens=False)
    sizes = Sizes(batch, num_heads, kv_heads, head_dim, head_dim, *itemsizes(dtype))
    return choose(layout, rules, sizes, network, backward)


@functools.lru_cache(maxsize=256)
def choose(
    layout: Layout, rules: Rules, sizes: Sizes, network: Network, backward: bool, may_swap: bool = True
) -> Choice:
    """The fastest method. `may_swap`: whether heads may be exchanged for tokens."""
    candidates = [("ring", 1)]
    if may_swap:
        degrees = [d for d in range(2, layout.world + 1) if layout.world % d == 0 and fits(d, sizes)]
        candidates += [("ulysses", layout.world)] if layout.world in degrees else []
        candidates += [("2d", max(inner))] if (inner := [d for d in degrees if d < layout.world]) else []
    candidates.append(("all_gather", 1))
    found = [estimate(*c, layout, rules, sizes, network, backward) for c in candidates]
    least = min(e.seconds for e in found)
    equals = [e for e in found if e.seconds <= least * (1 + EQUAL)]
    return Choice(min(equals, key=lambda e: e.bytes_held).method, tuple(found))


def fits(degree: int, sizes: Sizes) -> bool:
    """Whether so many ranks can share the heads."""
    heads, kv_heads = sizes.num_heads, sizes.num_kv_heads
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def estimate(
    method: str,
    degree: int,
    layout: Layout,
    rules: Rules,
    sizes: Sizes,
    network: Network,
    backward: bool,
) -> Estimate:
    """One method; `degree` ranks exchange heads for tokens."""
    groups, pattern = joined(layout, degree), "all_gather" if method == "all_gather" else "ring"
    ranks = sorted({(groups.world - 1) * n // max(1, MOST_RANKS - 1) for n in range(MOST_RANKS)})
    own = sizes._replace(
        num_heads=sizes.num_heads // degree, num_kv_heads=max(1, sizes.num_kv_heads // degree)
    )
    flops = _flops(own)
    numbers = sizes.batch * own.num_kv_heads * (sizes.head_dim + sizes.head_dim_v)
    rows = numbers * sizes.itemsize, numbers * sizes.gradient_itemsize
    exchange, moved = _exchange(layout, degree, sizes, network, backward)
    seconds = compute = 0.0
    received = held = 0
    for rank in ranks:
        walk = _Walk(rank, degree, *rows, network)
        schedules = [make_schedule(groups, rank, rules, pattern, b) for b in (False, True)[: 1 + backward]]
        passes = [walk.time(steps, flops, is_back) for steps, is_back in zip(schedules, (False, True))]
        rank_seconds, rank_compute = (sum(column) for column in zip(*passes, strict=True))
        if exchange + rank_seconds > seconds:
            seconds, compute = exchange + rank_seconds, rank_compute
        received = max(received, walk.received(schedules[0], backward) + moved)
        held = max(held, walk.held(schedules[0], pattern))
    whole = _flops(sizes) * _pairs(layout, rules)
    backward_flops = network.backward_flops or network.flops
    alone = whole / network.flops + backward * BACKWARD_FLOPS * whole / backward_flops
    efficiency = alone / (layout.world * seconds) if seconds else 1.0
    return Estimate(method, degree, seconds, compute, efficiency, received, held)


def _flops(sizes: Sizes) -> int:
    """Of the forward, for each visible pair."""
    return 2 * sizes.batch * sizes.num_heads * (sizes.head_dim + sizes.head_dim_v)


def _pairs(layout: Layout, rules: Rules) -> int:
    lengths = [b - a for a, b in itertools.pairwise(layout.starts)]
    return sum(Visibility(n, n, rules.left, rules.right).visible_pairs() for n in lengths)


class _Walk(NamedTuple):
    """The steps of one rank, in time."""

    rank: int
    degree: int  # ranks that exchange heads for tokens, and then are one of a schedule's
    row: int  # bytes of a key and its value
    gradient_row: int  # of their gradients
    network: Network

    def time(self, steps: tuple[Step, ...], flops: int, is_backward: bool) -> tuple[float, float]:
        """(seconds, seconds of computing alone). flops: of the forward, for each visible pair."""
        network, speed = self.network, self.network.flops
        if is_backward:
            flops, speed = int(BACKWARD_FLOPS * flops), network.backward_flops or speed
        computing = [flops * sum(b.pairs for b in step.blocks) / speed for step in steps]
        keys = [*(step.receives for step in steps[1:]), ()]
        back = [(), *(step.sends if is_backward else () for step in steps)]
        seconds = self.arrival((), back[-1])
        for work, *messages in zip(computing, keys, back[:-1], strict=True):
            travel = self.arrival(*messages)
            seconds += max(work + network.taken * travel, travel) + network.publishing * travel
            seconds += network.waiting if travel else 0.0
        return seconds, sum(computing)

    def arrival(self, keys: tuple[Message, ...], back: tuple[Message, ...]) -> float:
        """Seconds until messages are here, of keys and of gradients."""
        pairs = [(m, self.row) for m in keys] + [(m, self.gradient_row) for m in back]
        loads = [(m.peer * self.degree, row * num_rows(m.rows)) for m, row in pairs]
        return _seconds(self.network, self.rank * self.degree, loads)

    def received(self, steps: tuple[Step, ...], backward: bool) -> int:
        """Bytes: keys and values, in the backward again, and gradients of them."""
        keys = sum(step.keys for step in steps if not step.is_own)
        back = sum(num_rows(message.rows) for step in steps for message in step.sends)
        return self.row * keys * (1 + backward) + self.gradient_row * back * backward

    def held(self, steps: tuple[Step, ...], pattern: str) -> int:
        sizes = sorted(step.keys * self.row for step in steps[1:])
        return sum(sizes if pattern == "all_gather" else sizes[-2:])


def _seconds(network: Network, rank: int, loads: Sequence[tuple[int, float]]) -> float:
    """Seconds until what is sent to a rank at once is there: (peer, bytes) of each message."""
    near: dict[int, float] = {}
    latency = far = 0.0
    for peer, size in loads:
        is_far = network.per_node is not None and rank // network.per_node != peer // network.per_node
        of_peer = network.far_latency if is_far and network.far_latency else network.latency
        latency = max(latency, of_peer)
        if is_far and network.far_bandwidth:
            far += size
        else:
            near[peer] = near.get(peer, 0.0) + size
    of_one = max(near.values(), default=0.0) / (network.peer_bandwidth or network.bandwidth)
    seconds = latency + max(sum(near.values()) / network.bandwidth, of_one)
    return seconds + far / network.far_bandwidth if network.far_bandwidth else seconds


def _exchange(
    layout: Layout, degree: int, sizes: Sizes, network: Network, backward: bool
) -> tuple[float, int]:
    """(seconds, bytes) of heads for tokens and back; a backward does the same again.

    Gradients of KV heads that several ranks have are still to be added.
    """
    if degree == 1:
        return 0.0, 0
    tokens = max(layout.length(r) for r in (0, layout.world - 1)) * sizes.batch
    both = sizes.head_dim + sizes.head_dim_v
    of_gradients = sizes.gradient_itemsize if degree > sizes.num_kv_heads else sizes.itemsize
    seconds = moved = 0.0
    for itemsize in (sizes.itemsize, of_gradients)[: 1 + backward]:
        row = sizes.num_heads * both * sizes.itemsize + max(sizes.num_kv_heads, degree) * both * itemsize
        to_peer = tokens * row / degree
        travel = sum(  # of two exchanges: there, and back; together all bytes
            _seconds(network, 0, [(peer, size) for peer in range(1, degree)]) for size in (to_peer, 0.0)
        )
        seconds += travel * (1 + network.publishing) + 2 * network.waiting
        moved += to_peer * (degree - 1)
    return seconds, int(moved)
