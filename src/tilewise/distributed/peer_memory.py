"""Memory of each rank that the others of its host read, where GPUs can: PyTorch's symmetric memory.

    memory.publish(tensors, sizes)        # every rank's, which waits until all have come here
    memory.read(peer, place, shape, dtype)  # a tensor where it lies in the peer's memory
    copy_beside(pairs, device)            # by copy engines, beside kernels that keep all multiprocessors

Messages of NCCL are kernels: they hold multiprocessors, and each exchange takes the host longer than an
attention call.
"""

from __future__ import annotations

import contextlib
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

KEYS, GRADIENTS = "keys", "gradients"  # what is read while the other is published again has memory of its own
IS_ALLOWED = os.environ.get("TILEWISE_PEER_MEMORY") != "0"
ALIGNMENT = 256  # bytes, of a place
STEP = 32 << 20  # bytes by which a rank's memory grows
BOOT = Path("/proc/sys/kernel/random/boot_id")

_memories: dict[tuple[Any, torch.device, str], PeerMemory] = {}
_can_read: dict[tuple[Any, torch.device], bool] = {}
_streams: dict[torch.device, torch.cuda.Stream] = {}


class PeerMemory:
    """A part of each rank's memory, in which it publishes tensors. It grows to what is asked for."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.group, self.device = ranks.group, device
        self.members = dist.get_process_group_ranks(self.group)  # which ranks are known by
        self.rank = self.members.index(dist.get_rank())
        self.size = 0
        self.stream: torch.cuda.Stream | None = None

    def publish(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Let all ranks read tensors, each in a place of so many bytes, of which all ranks give the same.

        What was published before is gone then: each rank has to have waited for what it read of it.
        """
        ends = itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        *self.places, size = ends
        self._follow()
        if size > self.size:
            self._grow(size)
        self.wait_for_all()
        for place, t in enumerate(tensors):
            self.read(self.members[self.rank], place, t.shape, t.dtype).copy_(t)
        self.wait_for_all()

    def read(self, peer: int, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What a rank, by its number among all processes, has published in a place; nothing is copied."""
        start, size = self.places[place], math.prod(shape) * dtype.itemsize
        return self.buffers[self.members.index(peer)][start : start + size].view(dtype).view(shape)

    def _grow(self, size: int) -> None:
        size = -(-size // STEP) * STEP
        if self.size:  # nobody reads the old memory any more once all have come here
            _synchronize(self.device)
            dist.barrier(group=self.group)
        with torch.inference_mode(False):  # a tensor made in it could be written to in it only
            found = symmetric_memory(size, self.device, self.group)
        if found is None:
            raise RuntimeError(
                f"no {size} bytes that all ranks can read; TILEWISE_PEER_MEMORY=0 sends messages"
            )
        self.buffers, self.wait_for_all = found
        self.size = size

    def _follow(self) -> None:
        """Be behind the call before, should that have come from another stream."""
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        before, self.stream = self.stream, torch.cuda.current_stream(self.device)
        if before is not None and before != self.stream:
            self.stream.wait_stream(before)


def memory_of(ranks: Ranks, device: torch.device, purpose: str) -> PeerMemory | None:
    """What the ranks of a group read of each other; None where they cannot, so that messages serve.

    All ranks of the group take part, in the first call.
    """
    if not can_read(ranks, device):
        return None
    key = ranks.group, device, purpose
    if key not in _memories:
        _memories[key] = PeerMemory(ranks, device)
    return _memories[key]


def can_read(ranks: Ranks, device: torch.device) -> bool:
    """Whether all ranks of the group are in one host, and their GPUs read each other's memory."""
    if ranks.group is None:
        return False
    key = ranks.group, device
    if key not in _can_read:
        _can_read[key] = _try(ranks, device)
    return _can_read[key]


def _try(ranks: Ranks, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.inference_mode(False):
        boot = BOOT.read_text() if BOOT.exists() else ""
        host = zlib.crc32(f"{platform.node()} {boot}".encode())
        whole = Ranks(ranks.group, 0, dist.get_world_size(ranks.group), ())
        hosts, devices = gather(torch.tensor([host, device.index], device=device), whole).T.tolist()
        others = [d for d in devices if d != device.index]
        may = IS_ALLOWED and len(set(hosts)) == 1 and len(set(devices)) == whole.world
        may = may and max(devices) < torch.cuda.device_count()
        may = may and all(torch.cuda.can_device_access_peer(device, d) for d in others)
        if not _all_agree(may, whole, device):
            return False
        return _all_agree(symmetric_memory(ALIGNMENT, device, ranks.group) is not None, whole, device)


def _all_agree(is_so: bool, ranks: Ranks, device: torch.device) -> bool:
    return bool(gather(torch.tensor(is_so, device=device), ranks).all())


class Arrival(NamedTuple):
    """When copies on another stream are done."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """The current stream waits, not the host."""
        torch.cuda.current_stream().wait_event(self.event)


def copy_beside(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> list[Arrival]:
    """Copy (source, target) while the current stream goes on. `wait` of what is returned completes it."""
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            if device not in _streams:
                _streams[device] = torch.cuda.Stream(device)
            _streams[device].wait_stream(torch.cuda.current_stream(device))
            stack.enter_context(torch.cuda.stream(_streams[device]))
        for source, target in pairs:
            target.copy_(source)
        return [Arrival(_streams[device].record_event())] if device.type == "cuda" else []


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
