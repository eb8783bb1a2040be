"""The processes that share a sequence: a group of `torch.distributed`, or this process alone."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.core.checks import check_tensors, shown
from tilewise.core.device_errors import IS_DEBUG
from tilewise.core.torch_private import flat_mesh


@dataclass(frozen=True)
class Ranks:
    """Members of a process group, all or some, as the rest of the folder sees them."""

    group: Any  # a ProcessGroup; None: this process alone
    rank: int
    world: int
    peers: tuple[int, ...]  # the global rank of each, which point-to-point calls want

    @property
    def is_cpu(self) -> bool:
        """Whether the group moves tensors of the CPU, so that looking at numbers waits for nothing."""
        return self.group is None or "gloo" in str(dist.get_backend(self.group))

    @property
    def device(self) -> torch.device:
        """Where what the group moves lies, if no tensor says so."""
        return torch.device("cpu") if self.is_cpu else torch.device("cuda", torch.cuda.current_device())

    def exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[Any]:
        """Start messages (peer, tensor), all at once. What is returned has `wait()`."""
        operations = [dist.P2POp(dist.isend, t, self.peers[peer], self.group) for peer, t in sends]
        operations += [dist.P2POp(dist.irecv, t, self.peers[peer], self.group) for peer, t in receives]
        return dist.batch_isend_irecv(operations) if operations else []

    def let_messages_begin(self, device: torch.device) -> None:
        """Hold the current stream back for some microseconds, until messages just started are under way.

        A kernel of one device keeps all multiprocessors until it ends. Messages are kernels too: were they an
        instant later, they would come behind it instead of beside it.
        """
        if device.type != "cuda":
            return
        if device not in _detours:
            with torch.inference_mode(False):  # a tensor made in it could be written to in it only
                _detours[device] = torch.cuda.Stream(device), torch.zeros(1, device=device)
        (detour, scratch), stream = _detours[device], torch.cuda.current_stream(device)
        detour.wait_stream(stream)
        with on_stream(detour, stream):
            scratch.zero_()
        stream.wait_stream(detour)

    def some(self, members: tuple[int, ...]) -> Ranks:
        """Those of these ranks, this one among them, in the same group: for `exchange`.

        A group of their own would want all processes to have made as many groups before.
        """
        peers = tuple(self.peers[m] for m in members)
        return replace(self, rank=members.index(self.rank), world=len(members), peers=peers)

    def of_first(self, t: Tensor) -> Tensor:
        """A tensor as the first rank has it."""
        if self.world == 1:
            return t
        t = t.clone()
        dist.broadcast(t, self.peers[0], group=self.group)
        return t

    def connect(self, device: torch.device) -> None:
        """NCCL makes a communicator in the first call of a group, in which all ranks have to take part."""
        if self.group is not None and self.group not in _connected and not self.is_cpu:
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
            _connected.add(self.group)

    def grid(self, inner: int) -> tuple[Ranks, Ranks]:
        """(inner, outer) of a grid whose inner dimension, of that size, has ranks that follow each other."""
        if inner == 1:
            return self.some((self.rank,)), self
        first = self.rank // inner * inner
        columns = tuple(range(first, first + inner))
        rows = tuple(range(self.rank % inner, self.world, inner))
        return self.some(columns), self.some(rows)


@dataclass(frozen=True)
class MeshRanks(Ranks):
    """All members of a mesh of two dimensions, (ring, ulysses), each of which has groups of its own.

    Those of one host may read each other's memory where the whole mesh, of many hosts, cannot.
    """

    ring: Any
    ulysses: Any

    def grid(self, inner: int) -> tuple[Ranks, Ranks]:
        return ranks_of(self.ulysses), ranks_of(self.ring)


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream, current: torch.cuda.Stream) -> Iterator[None]:
    """As `torch.cuda.stream`, which asks for current streams, each of which takes as long as a launch."""
    device = torch.cuda.current_device()
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(current)
        if device != stream.device_index:
            torch.cuda.set_device(device)


_connected: set[Any] = set()
_detours: dict[torch.device, tuple[torch.cuda.Stream, Tensor]] = {}
ALONE = Ranks(None, 0, 1, (0,))


def ranks_of(group: Any = None, mesh: Any = None) -> Ranks:
    """The members of a group or of a one-dimensional mesh; of the default group if neither is given.

    Raises:
        TypeError, ValueError: both are given, they are of another kind, or this process is no member.
    """
    if mesh is not None:
        if group is not None:
            raise ValueError(f"mesh={shown(mesh)} must be None when group is given")
        if not hasattr(mesh, "get_group"):
            raise TypeError(f"mesh={shown(mesh)} must be a torch.distributed.DeviceMesh")
        if mesh.ndim != 1:
            raise ValueError(f"mesh.ndim={mesh.ndim} must be 1: mesh['name'] takes one dimension of it")
        group = mesh.get_group()
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group={shown(group)} must be a ProcessGroup of torch.distributed that has this rank"
        )
    peers = tuple(dist.get_process_group_ranks(group))
    return Ranks(group, dist.get_rank(group), len(peers), peers)


def mesh_degree(mesh: Any, method: str) -> int | None:
    """The ranks that exchange heads, of a mesh of two dimensions; None of any other."""
    if getattr(mesh, "ndim", 1) != 2:
        return None
    if method not in ("2d", "auto"):
        raise ValueError(f"mesh.ndim=2 must be 1 for method={method!r}: (ring, ulysses) is for '2d'")
    return int(mesh.size(1))


def flat_ranks(mesh: Any, group: Any) -> Ranks:
    if group is not None:
        raise ValueError(f"mesh={shown(mesh)} must be None when group is given")
    flat = ranks_of(mesh=flat_mesh(mesh))
    return MeshRanks(flat.group, flat.rank, flat.world, flat.peers, mesh.get_group(0), mesh.get_group(1))


def is_dtensor(t: Any) -> bool:
    """Whether it is a DTensor; asking imports nothing."""
    return isinstance(t, Tensor) and hasattr(t, "placements") and hasattr(t, "to_local")


def check_plain(**tensors: Any) -> None:
    """Raises TypeError unless all are tensors of this rank alone."""
    check_tensors(**tensors)
    for name, t in tensors.items():
        if is_dtensor(t):
            raise TypeError(f"{name} is a DTensor, must be a tensor of this rank alone: {name}.to_local()")


def to_device(t: Tensor, device: torch.device) -> Tensor:
    """A copy for later calls, by `kept_on_device`. A CUDA graph that is being captured cannot make it."""
    refuse_in_a_capture(device)
    with torch.inference_mode(False):  # a tensor made in it could not be saved for a backward
        return t.to(device)


def refuse_in_a_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture the first call of a group of ranks, nor the first with its lengths: "
            "make such a call first, outside of the capture"
        )


def gather(t: Tensor, ranks: Ranks) -> Tensor:
    """(world, ...) of equal tensors."""
    if ranks.group is None:
        return t[None]
    gathered = t.new_empty((ranks.world, *t.shape))
    # torch 2.13 gave it another name; a list of outputs would be copied once more
    into_one = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    into_one(gathered.view(-1), t.flatten(), group=ranks.group)
    return gathered


# ---- refusing a call together, instead of waiting for each other


class Disagreement(ValueError):
    """Ranks have called with different arguments, or one of them has refused its own."""


def agree(
    ranks: Ranks, facts: Callable[[], dict[str, Any]], error: Exception | None, device: torch.device
) -> None:
    """Raise on every rank if facts() differ between ranks, or if a rank has an error; `error` is this rank's.

    Checked in every call on CPU groups, and on others if TILEWISE_DEBUG=1. Without that only this rank
    raises.

    Raises:
        Disagreement: naming the argument, its values and their ranks.
    """
    if error is None and device.type == "meta" and ranks.world > 1:
        error = NotImplementedError("tensors on the meta device are not served over several ranks")
    if ranks.group is None or not (ranks.is_cpu or IS_DEBUG):
        if error is not None:
            raise error
        return
    said = {n: str(v) for n, v in facts().items()} if error is None else {"error": str(error)}
    text = repr(sorted(said.items()))
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    if ranks.is_cpu or device.type in ("cpu", "meta"):  # of an argument, which may be the wrong one
        device = ranks.device
    digests = gather(torch.tensor([digest, error is not None], device=device), ranks).tolist()
    if all(d == [digest, 0] for d in digests):
        return
    everyone: list[Any] = [None] * ranks.world
    dist.all_gather_object(everyone, said, group=ranks.group)
    if error is not None:
        raise error
    raise Disagreement(_sentence(everyone))


def _sentence(everyone: list[dict[str, str]]) -> str:
    for rank, facts in enumerate(everyone):
        if "error" in facts:
            return f"rank {rank} refused its arguments: {facts['error']}"
    lines = []
    for name in everyone[0]:
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            values.setdefault(facts.get(name, "not given"), []).append(rank)
        if len(values) > 1:
            given = ", ".join(
                f"{v} on rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}" for v, r in values.items()
            )
            lines.append(f"{name} must be the same on all ranks: {given}")
    return "; ".join(lines)
