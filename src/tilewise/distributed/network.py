"""How fast messages and attention are: given, or measured once for each group."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tilewise.api import attention
from tilewise.core.checks import check_integers, check_number, shown
from tilewise.distributed import peer_memory
from tilewise.distributed.peer_memory import KEYS, PeerMemory, copy_beside, stream_of
from tilewise.distributed.ranks import Ranks

BACKWARD_FLOPS = 2.5  # of those of the forward: five products instead of two
TAKEN_BY_NCCL = 0.6  # fitted to runs on two and on four GPUs
PUBLISHING, WAITING = 0.8, 3e-5  # fitted likewise, where ranks read each other's memory


class Network(NamedTuple):
    """How fast messages are, and attention on one rank."""

    flops: float  # FLOP/s of the forward on one rank
    bandwidth: float  # bytes/s into a rank from all others of its node together
    latency: float  # seconds of messages that start at once, besides their bytes
    per_node: int | None = None  # ranks of a node; None: all
    far_bandwidth: float | None = None  # bytes/s into a rank from other nodes; None: as from its own
    far_latency: float | None = None
    backward_flops: float | None = None  # FLOP/s of the backward on one rank; None: as of the forward
    peer_bandwidth: float | None = None  # bytes/s into a rank from one other of its node; None: bandwidth
    taken: float = 0.0  # the share of a rank's speed that messages take while they travel
    publishing: float = 0.0  # seconds, for each second of reading, of copying it there
    waiting: float = 0.0  # seconds until all ranks may read, each time


_measured: dict[tuple[Any, torch.dtype, torch.device], Network] = {}
ROUNDS = 5


def measured(ranks: Ranks, dtype: torch.dtype, device: torch.device) -> Network:
    """The network as it is, measured in the first call of a group, in which all ranks take part.

    The slowest rank counts, so that all ranks choose the same method.
    """
    key = (ranks.group, dtype, device)
    if key not in _measured:
        # Inference mode's tensors have no gradients; a checkpoint around the call counts what is saved.
        as_it_is = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with torch.inference_mode(False), as_it_is:
            _measured[key] = _measure(ranks, dtype, device)
    return _measured[key]


def _measure(ranks: Ranks, dtype: torch.dtype, device: torch.device) -> Network:
    is_cpu = device.type == "cpu"
    tokens, heads, head_dim = (512, 4, 64) if is_cpu else (8192, 16, 128)
    small, large = (1, 1 << 22) if is_cpu else (1 << 24, 1 << 26)  # bytes of a message
    numbers = torch.arange(tokens * heads * head_dim, device=device).sin()  # not of the caller's generator
    x = numbers.to(dtype).view(1, tokens, heads, head_dim)
    leaf = x.clone().requires_grad_()
    message = torch.zeros(large, dtype=torch.uint8, device=device)
    after, before = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    others = [rank for rank in range(ranks.world) if rank != ranks.rank]

    def forward_and_backward() -> None:
        with torch.enable_grad():
            torch.autograd.grad(attention(leaf, leaf, leaf), leaf, x)  # type: ignore[arg-type]

    if (memory := peer_memory.memory_of(ranks, device, KEYS, [large])) is not None:
        memory.publish([message], stream_of(device))

    def exchange(size: int, targets: list[int], sources: list[int]) -> Callable[[], object]:
        if memory is not None:
            return functools.partial(_read_bytes, ranks, memory, size, sources)
        return functools.partial(_exchange_bytes, ranks, message[:size], targets, sources)

    calls: list[Callable[[], object]] = [functools.partial(attention, x, x, x), forward_and_backward]
    calls += [exchange(small, [after], [before]), exchange(large, [after], [before])]
    calls.append(exchange(large // max(1, len(others)), others, others))
    times = torch.tensor([_fastest(call, calls[0], device) for call in calls], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=ranks.group)
    forward, both, of_small, of_one, of_all = times.tolist()
    latency = (of_small * large - of_one * small) / (large - small)  # where a line through both begins
    latency = min(max(latency, 0.0), of_small)
    flops = 4 * heads * head_dim * tokens**2
    return Network(
        flops / forward,
        large / max(min(of_one, of_all) - latency, 1e-9),
        latency,
        backward_flops=BACKWARD_FLOPS * flops / max(both - forward, 1e-9),
        peer_bandwidth=large / max(of_one - latency, 1e-9),
        taken=0.0 if is_cpu or memory is not None else TAKEN_BY_NCCL,
        publishing=0.0 if memory is None else PUBLISHING,
        waiting=0.0 if memory is None else WAITING,
    )


def _exchange_bytes(ranks: Ranks, message: torch.Tensor, targets: list[int], sources: list[int]) -> None:
    """A message to each target, and one from each source."""
    sends = [(peer, message) for peer in targets]
    for work in ranks.exchange(sends, [(peer, torch.empty_like(message)) for peer in sources]):
        work.wait()


def _read_bytes(ranks: Ranks, memory: PeerMemory, size: int, sources: list[int]) -> None:
    """As many from each source."""
    reads = [memory.read(ranks.peers[p], 0, (size,), torch.uint8) for p in sources]
    for arrival in copy_beside([(read, torch.empty_like(read)) for read in reads], stream_of(memory.device)):
        arrival.wait()


def _fastest(call: Callable[[], object], busy: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call; on a GPU its own, as the host issues it while the GPU is busy with another."""
    seconds = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            busy()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize(device)
            seconds.append(start.elapsed_time(end) * 1e-3)
        else:
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def check_network(network: Any) -> None:
    """Raises TypeError or ValueError unless it is a `Network` of positive speeds."""
    if not isinstance(network, Network):
        raise TypeError(f"network={shown(network)} must be a tilewise.distributed.Network")
    for name, value in network._asdict().items():
        if value is None and name in Network._field_defaults:
            continue
        if name == "per_node":
            check_integers(1, **{"network.per_node": value})
        else:
            check_number(f"network.{name}", value)
            may_be_0 = name.endswith("latency") or name in ("taken", "publishing", "waiting")
            if not (value >= 0 if may_be_0 else value > 0) or value == float("inf"):
                bound = "at least 0" if may_be_0 else "positive"
                raise ValueError(f"network.{name}={value} must be finite and {bound}")
