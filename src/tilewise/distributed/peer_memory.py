"""Memory of each rank that the others of its host read, where GPUs can: PyTorch's symmetric memory.

    memory.publish(tensors, stream)        # every rank's, which waits until all have come here
    memory.read(peer, slot, shape, dtype)  # a tensor where it lies in the peer's memory
    copy_beside(pairs, stream)             # by copy engines, beside kernels that keep all multiprocessors

Messages of NCCL are kernels: they hold multiprocessors, and each exchange takes the host longer than an
attention call.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.torch_private import share, symmetric_tensor
from tilewise.distributed.ranks import Ranks, gather, on_stream, ranks_of, refuse_in_a_capture

KEYS, GRADIENTS = "keys", "gradients"  # what is read while the other is published has memory of its own
IS_ALLOWED = os.environ.get("TILEWISE_PEER_MEMORY") != "0"
ALIGNMENT = 256  # bytes, of a slot
STEP = 32 << 20  # bytes by which a rank's memory grows
MOST_VIEWS = 256
BOOT = Path("/proc/sys/kernel/random/boot_id")

_can_read: dict[tuple[Any, torch.device], bool] = {}
_memories: dict[tuple[Any, torch.device, str], PeerMemory] = {}
_captured: list[PeerMemory] = []  # which a CUDA graph reads when it is replayed
_streams: dict[torch.device, torch.cuda.Stream] = {}
_made = 0  # memories, by this process


def can_read(ranks: Ranks, device: torch.device) -> bool:
    """Whether all ranks of a group are in one host, and their GPUs read each other's memory.

    All of them take part in the first call.
    """
    if ranks.group is None or device.type != "cuda":
        return False
    key = ranks.group, device
    if key not in _can_read:
        refuse_in_a_capture(device)
        with torch.inference_mode(False):
            _can_read[key] = _may_read(ranks_of(ranks.group), device)
    return _can_read[key]


def memory_of(ranks: Ranks, device: torch.device, purpose: str, sizes: Sequence[int]) -> PeerMemory | None:
    """Memory with slots of so many bytes, which ranks of a group read of each other; None where they cannot.

    All ranks of the group come here, in the same order and with the same sizes, and find the same.
    """
    if not can_read(ranks, device):
        return None
    key = ranks.group, device, purpose
    slots, size = slots_of(sizes)
    memory = _memories.get(key)
    if memory is None or memory.size < size:
        refuse_in_a_capture(device)
        if memory is not None:
            memory.leave()
            del _memories[key], memory
        memory = _new_memory(ranks_of(ranks.group), device, max(STEP, -(-size // STEP) * STEP))
        if memory is None:
            _can_read[ranks.group, device] = False
            for known in [known for known in _memories if known[:2] == (ranks.group, device)]:
                _memories.pop(known).leave()
            return None
        _memories[key] = memory
    memory.slots = slots
    return memory


def slots_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where slots of so many bytes begin, and where the last ends."""
    *slots, size = itertools.accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in sizes), initial=0)
    return slots, size


def _may_read(ranks: Ranks, device: torch.device) -> bool:
    boot = BOOT.read_text() if BOOT.exists() else ""
    host = zlib.crc32(f"{platform.node()} {boot}".encode())
    hosts, devices = gather(torch.tensor([host, device.index], device=device), ranks).T.tolist()
    may = IS_ALLOWED and len(set(hosts)) == 1 and len(set(devices)) == ranks.world
    may = may and max(devices) < torch.cuda.device_count()
    may = may and all(torch.cuda.can_device_access_peer(device, d) for d in devices if d != device.index)
    return _all_agree(may, ranks, device)


def _new_memory(ranks: Ranks, device: torch.device, size: int) -> PeerMemory | None:
    """None, and a warning, if it is not to be had on any rank.

    Ranks must have made as many memories: PyTorch, before its pull request 196350, counts them by process and
    not by group, and a rank that has made more waits for the others for ever.
    """
    global _made
    found, reason = None, "there is no room for it, or they have shared memory in other groups before"
    with torch.inference_mode(False):  # a tensor made in it could be written to in it only
        own = symmetric_tensor(size, device)
        counts = set(gather(torch.tensor(_made if own is not None else -1, device=device), ranks).tolist())
        if own is not None and len(counts) == 1:
            _made += 1
            try:
                found = share(own, ranks.group)
            except RuntimeError as error:
                reason = str(error)
            if not _all_agree(found is not None, ranks, device):
                found = None
    if found is None:
        warnings.warn(f"ranks do not read each other's memory but send messages: {reason}", stacklevel=2)
        return None
    return PeerMemory(ranks, device, size, *found)


def _all_agree(is_so: bool, ranks: Ranks, device: torch.device) -> bool:
    return bool(gather(torch.tensor(is_so, device=device), ranks).all())


class PeerMemory:
    """A part of each rank's memory, in which it publishes tensors."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        size: int,
        buffers: list[Tensor],
        wait_for_all: Callable[[], None],
    ) -> None:
        """buffers: uint8 (size,) of each rank. wait_for_all: holds the current stream until all are here."""
        self.ranks, self.device, self.size = ranks, device, size
        self.buffers, self.wait_for_all = buffers, wait_for_all
        self.slots: list[int] = []  # where each begins
        self.stream: torch.cuda.Stream | None = None
        self.is_captured = False
        self.views: dict[tuple[Any, ...], Tensor] = {}  # as short calls would make the same again

    def publish(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
        """Let all ranks read a tensor in each slot.

        What was published before is gone then: each rank has to have waited for what it read of it.

        stream: the current one; None on a CPU.
        """
        self._follow(stream)
        self.wait_for_all()
        for slot, t in enumerate(tensors):
            self.read(self.ranks.peers[self.ranks.rank], slot, t.shape, t.dtype).copy_(t)
        self.wait_for_all()

    def read(self, peer: int, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What a rank, by its number among all processes, has published in a slot; nothing is copied."""
        start = self.slots[slot]
        key = peer, start, tuple(shape), dtype
        if (found := self.views.get(key)) is None:
            if len(self.views) == MOST_VIEWS:
                self.views.clear()
            end = start + math.prod(shape) * dtype.itemsize
            with torch.inference_mode(False):
                found = self.buffers[self.ranks.peers.index(peer)][start:end].view(dtype).view(shape)
            self.views[key] = found
        return found

    def leave(self) -> None:
        """Wait until no rank reads it any more. All ranks take part."""
        self._follow(stream_of(self.device))
        self.wait_for_all()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.is_captured:
            _captured.append(self)

    def _follow(self, stream: torch.cuda.Stream | None) -> None:
        """Be behind the call before, should that have come from another stream."""
        if stream is None:
            return
        if torch.cuda.is_current_stream_capturing():
            self.is_captured = True
            return
        if self.stream is not None and self.stream != stream:
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


def copy_beside(pairs: Sequence[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> list[Any]:
    """Copy (source, target) while the current stream goes on. `wait` of what is returned completes it."""
    if stream is None:
        for source, target in pairs:
            target.copy_(source)
        return []
    if stream.device not in _streams:
        _streams[stream.device] = torch.cuda.Stream(stream.device)
    side = _streams[stream.device]
    side.wait_event(stream.record_event())
    with on_stream(side, stream):
        for source, target in pairs:
            target.copy_(source)
            target.record_stream(side)  # should an error free it before it is waited for
    return [Arrival(side.record_event(), stream)]
