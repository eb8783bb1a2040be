"""Memory of each rank that the others of its host read, where GPUs can: PyTorch's symmetric memory.

    memory.publish(tensors)                 # every rank's, which waits until all have come here
    memory.read(peer, place, shape, dtype)  # a tensor where it lies in the peer's memory
    copy_beside(pairs, device)              # by copy engines, beside kernels that keep all multiprocessors

Messages of NCCL are kernels: they hold multiprocessors, and each exchange takes the host longer than an
attention call.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.core.torch_private import symmetric_memory
from tilewise.distributed.ranks import Ranks, gather

KEYS, GRADIENTS = "keys", "gradients"  # what is read while the other is published has memory of its own
IS_ALLOWED = os.environ.get("TILEWISE_PEER_MEMORY") != "0"
ALIGNMENT = 256  # bytes, of a place
STEP = 32 << 20  # bytes by which a rank's memory grows
MOST_VIEWS = 256
BOOT = Path("/proc/sys/kernel/random/boot_id")

_memories: dict[tuple[Any, torch.device, str], PeerMemory] = {}
_without: set[tuple[Any, torch.device]] = set()  # groups that cannot
_streams: dict[torch.device, torch.cuda.Stream] = {}
_made = 0  # memories, by this process


def may_be(ranks: Ranks, device: torch.device) -> bool:
    """Whether `memory_of` may find some; asking costs nothing."""
    return ranks.group is not None and device.type == "cuda" and (ranks.group, device) not in _without


def memory_of(ranks: Ranks, device: torch.device, purpose: str, sizes: Sequence[int]) -> PeerMemory | None:
    """Memory with places of so many bytes, which ranks of a group read of each other; None where they cannot.

    All ranks of the group come here, in the same order and with the same sizes, and find the same.
    """
    if not may_be(ranks, device):
        return None
    key = ranks.group, device, purpose
    *places, size = itertools.accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in sizes), initial=0)
    memory = _memories.get(key)
    if memory is None or memory.size < size:
        size = -(-size // STEP) * STEP
        if memory is not None:  # nobody reads the old one any more
            memory.wait_for_all()
            _synchronize(device)
            del _memories[key], memory
        memory = _new_memory(ranks, device, size)
        if memory is None:
            _without.add((ranks.group, device))
            return None
        _memories[key] = memory
    memory.places = places
    return memory


def _new_memory(ranks: Ranks, device: torch.device, size: int) -> PeerMemory | None:
    """None if this, or whatever any other rank lacks, stands against it."""
    global _made
    members = tuple(dist.get_process_group_ranks(ranks.group))
    whole = Ranks(ranks.group, members.index(dist.get_rank()), len(members), members)
    with torch.inference_mode(False):  # a tensor made in it could be written to in it only
        if not _may_read(whole, device):
            return None
        _made += 1
        found = symmetric_memory(size, device, ranks.group)
        if not _all_agree(found is not None, whole, device):
            return None
    assert found is not None
    return PeerMemory(whole, device, size, *found)


def _may_read(ranks: Ranks, device: torch.device) -> bool:
    """Whether all ranks are in one host, and their GPUs read each other's memory.

    Ranks must have made as many memories: PyTorch, before its pull request 196350, counts them by process and
    not by group, and a rank that has made more waits for the others for ever.
    """
    boot = BOOT.read_text() if BOOT.exists() else ""
    host = zlib.crc32(f"{platform.node()} {boot}".encode())
    mine = torch.tensor([host, _made, device.index], device=device)
    hosts, counts, devices = gather(mine, ranks).T.tolist()
    may = IS_ALLOWED and len(set(hosts)) == len(set(counts)) == 1 and len(set(devices)) == ranks.world
    may = may and max(devices) < torch.cuda.device_count()
    may = may and all(torch.cuda.can_device_access_peer(device, d) for d in devices if d != device.index)
    return _all_agree(may, ranks, device)


def _all_agree(is_so: bool, ranks: Ranks, device: torch.device) -> bool:
    return bool(gather(torch.tensor(is_so, device=device), ranks).all())


class PeerMemory:
    """A part of each rank's memory, in which it publishes tensors."""

    def __init__(
        self, ranks: Ranks, device: torch.device, size: int, buffers: list[Tensor], wait_for_all: Any
    ) -> None:
        """buffers: uint8 (size,) of each rank. wait_for_all: holds the current stream until all are here."""
        self.ranks, self.device, self.size = ranks, device, size
        self.buffers, self.wait_for_all = buffers, wait_for_all
        self.places: list[int] = []  # where each begins
        self.stream: torch.cuda.Stream | None = None
        self.views: dict[tuple[Any, ...], Tensor] = {}  # as short calls would make the same again

    def publish(self, tensors: Sequence[tuple[Tensor, ...]], stream: torch.cuda.Stream | None) -> None:
        """Let all ranks read a tensor in each place: none, one, or several side by side in dimension 2.

        What was published before is gone then: each rank has to have waited for what it read of it.

        stream: the current one; None on a CPU.
        """
        if stream != self.stream:
            self._follow(stream)
        self.wait_for_all()
        for place, parts in enumerate(tensors):
            if not parts:
                continue
            first, shape = parts[0], list(parts[0].shape)
            if len(parts) > 1:
                shape[2] = sum(t.shape[2] for t in parts)
            target = self.read(self.ranks.peers[self.ranks.rank], place, shape, first.dtype)
            torch.cat(parts, 2, out=target) if len(parts) > 1 else target.copy_(first)
        self.wait_for_all()

    def read(self, peer: int, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What a rank, by its number among all processes, has published in a place; nothing is copied."""
        start = self.places[place]
        key = peer, start, tuple(shape), dtype
        if (found := self.views.get(key)) is None:
            if len(self.views) == MOST_VIEWS:
                self.views.clear()
            end = start + math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):
                found = self.buffers[self.ranks.peers.index(peer)][start:end].view(dtype).view(shape)
            self.views[key] = found
        return found

    def _follow(self, stream: torch.cuda.Stream | None) -> None:
        """Be behind the call before, which came from another stream."""
        if stream is None or torch.cuda.is_current_stream_capturing():
            return
        if self.stream is not None:
            stream.wait_stream(self.stream)
        self.stream = stream


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """The current stream; asking takes as long as a copy, so a call asks once. None on a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class Arrival(NamedTuple):
    """When copies on another stream are done."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream

    def wait(self) -> None:
        """The stream waits, not the host."""
        self.stream.wait_event(self.event)


def copy_beside(pairs: Sequence[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> list[Arrival]:
    """Copy (source, target) while the current stream goes on. `wait` of what is returned completes it."""
    side = None
    if stream is not None:
        if stream.device not in _streams:
            _streams[stream.device] = torch.cuda.Stream(stream.device)
        side = _streams[stream.device]
        side.wait_event(stream.record_event())
        torch.cuda.set_stream(side)
    try:
        for source, target in pairs:
            target.copy_(source)
    finally:
        if stream is not None:
            torch.cuda.set_stream(stream)
    return [] if side is None or stream is None else [Arrival(side.record_event(), stream)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
