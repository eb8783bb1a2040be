"""The work of one rank of 2, 4 or 8, on one device: its steps in order, as if the others were beside it.

First all ranks run, one after another, and what each publishes is kept. In the first round some have read
what was not there yet; a round more makes right what depends on one reading, and so on. Results of the last
round are checked as any peer's are. Then the rank that has most to do runs alone, and reads what was kept: by
the copies and kernels with which ranks of one host read each other's memory, as fast as the device's own.
Nobody is waited for. On a GPU its calls are one CUDA graph: a rank has its host for itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor

from tilewise.distributed import context_parallel_attention, peer_memory
from tilewise.distributed.layout import Layout, make_layout
from tilewise.distributed.peer_memory import PeerMemory
from tilewise.distributed.ranks import Ranks
from tilewise.distributed.schedule import Rules, make_schedule
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.peer import Data, Prepared, prepare_call
from tilewise.lab.distributed.peers import Group, Prepare, balance_of, check_heads, offsets, options_of

WORLDS = (2, 4, 8)
ROUNDS = {"2d": 5}  # until all that is read is right: heads, keys, out, gradients of keys, gradients of heads
FEWER_ROUNDS = 3


class SymmetricMemory:
    """What ranks that run one after another have published: of each purpose, by its number in a call."""

    def __init__(self, world: int) -> None:
        self.everyone = tuple(range(world))
        self.buffers: dict[str, list[list[Tensor]]] = {}
        self.begin()

    def begin(self) -> None:
        """A call begins: what it publishes first is the first of all."""
        self.memories: dict[tuple[int, str], Published] = {}

    def memory_of(self, ranks: Ranks, device: torch.device, purpose: str, sizes: Sequence[int]) -> Published:
        """In place of `peer_memory.memory_of`."""
        rank = ranks.peers[ranks.rank]
        memory = self.memories.get((rank, purpose))
        if memory is None:
            everyone = Ranks(None, rank, len(self.everyone), self.everyone)
            memory = Published(everyone, device, self.buffers.setdefault(purpose, []))
            self.memories[rank, purpose] = memory
        memory.slots, memory.size = peer_memory.slots_of(sizes)
        return memory


class Published(PeerMemory):
    """Memory that is another each time that something is published."""

    def __init__(self, ranks: Ranks, device: torch.device, by_number: list[list[Tensor]]) -> None:
        super().__init__(ranks, device, 0, [], lambda: None)
        self.by_number, self.number = by_number, 0

    def publish(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
        if self.number == len(self.by_number):
            empty = [torch.zeros(self.size, dtype=torch.uint8, device=self.device) for _ in self.ranks.peers]
            self.by_number.append(empty)
        self.buffers, self.views = self.by_number[self.number], {}
        self.number += 1
        super().publish(tensors, stream)


def one_rank_peers() -> dict[str, Prepare]:
    """By name; `ranks_of_peer` reads it."""
    return {
        f"{method}, 1 of {world}": _one_rank(method, world)
        for world in WORLDS
        for method in ("ring", "all_gather", "ulysses", *(("2d",) if world > 3 else ()))
    }


def ranks_of_peer(name: str) -> int:
    """How many ranks share the work of which a peer does one's."""
    return int(name.rpartition(" of ")[2]) if " of " in name else 1


def _one_rank(method: str, world: int) -> Prepare:
    def prepare(case: Case, data: Data, group: Group) -> Prepared:
        check_heads(method, case, world)
        dim = 0 if case.kind == "varlen" else 1
        starts, total = offsets(case), data.query.shape[dim]
        balance = balance_of(case)
        layout = make_layout(tuple(starts or (0, total)), world, balance)
        memory = SymmetricMemory(world)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            memory.begin()
            found = context_parallel_attention(
                query, key, value, method=method, balance=balance, seqlen=total, cu_seqlens=starts,
                **options_of(case),
            )  # fmt: skip
            assert isinstance(found, Tensor)
            return found

        def of_rank(rank: int) -> Prepared:
            tokens = layout.tokens(rank).to(data.query.device)
            whole = (data.query, data.key, data.value, data.dout)
            *tensors, dout = (None if t is None else t.index_select(dim, tokens) for t in whole)
            context = functools.partial(_as, Ranks(None, rank, world, memory.everyone), memory)
            return prepare_call(case, tensors, dout, attend, lambda t: t, context)  # type: ignore[arg-type]

        found = _run_all(of_rank, layout, dim, ROUNDS.get(method, FEWER_ROUNDS))
        prepared = of_rank(_busiest(layout, case))
        call = _captured(prepared) if group.device == "cuda" else prepared.call
        return Prepared(call, lambda: found, prepared.context)

    return prepare


def _captured(prepared: Prepared) -> Callable[[], object]:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with prepared.context():
        with torch.cuda.stream(stream):  # of both: a backward waits for that of its leaves
            right = prepared.call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            found = prepared.call()
    graph.replay()
    torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)

    def replay() -> object:
        graph.replay()
        return found, prepared  # the graph keeps none of the tensors that it reads

    return replay


@contextlib.contextmanager
def _as(ranks: Ranks, memory: SymmetricMemory) -> Iterator[None]:
    with (
        mock.patch("tilewise.distributed.attention.ranks_of", lambda *_: ranks),
        mock.patch.object(peer_memory, "can_read", lambda *_: True),
        mock.patch.object(peer_memory, "memory_of", memory.memory_of),
    ):
        yield


def _run_all(of_rank: Callable[[int], Prepared], layout: Layout, dim: int, rounds: int) -> dict[str, Tensor]:
    """Out and gradients of the whole sequence, after which all that is read is right."""
    whole: dict[str, Tensor] = {}
    for number in range(rounds):
        for rank in range(layout.world):
            prepared = of_rank(rank)
            with prepared.context():
                found = prepared.results()
            if number < rounds - 1:
                continue
            for name, t in found.items():
                shape = (*t.shape[:dim], layout.total, *t.shape[dim + 1 :])
                target = whole.setdefault(name, t.new_empty(shape))
                target.index_copy_(dim, layout.tokens(rank).to(t.device), t)
    return whole


def _busiest(layout: Layout, case: Case) -> int:
    """The rank with most pairs of queries and keys. (After an exchange of heads all have as many.)"""
    rules = Rules(*case.reach, False)

    def pairs(rank: int) -> int:
        steps = make_schedule(layout, rank, rules, "ring")
        return sum(block.pairs for step in steps for block in step.blocks)

    return max(range(layout.world), key=pairs)
