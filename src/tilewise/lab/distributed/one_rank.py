"""The work of one rank of 2, 4 or 8, on one device: its steps in order, with copies in place of messages.

First all ranks run, one after another, and each message is kept. In the first round nothing has arrived yet,
so what a rank sends may be wrong; a round more makes right what depends on one message, and so on. Results of
the last round are checked as any peer's are. Then the rank that has most to do runs alone, and receives what
was kept: by copies on a stream of their own, as fast as the device's memory. On a GPU its calls are one CUDA
graph: a rank has its host for itself, and messages that are Python's here are not timed.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tilewise.distributed import context_parallel_attention
from tilewise.distributed.layout import Layout, make_layout
from tilewise.distributed.peer_memory import Arrival
from tilewise.distributed.ranks import Ranks
from tilewise.distributed.schedule import Rules, make_schedule
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.peer import Data, Prepared, prepare_call
from tilewise.lab.distributed.peers import Group, Prepare, balance_of, check_heads, offsets, options_of

WORLDS = (2, 4, 8)
ROUNDS = {"2d": 5}  # until all messages are right: heads, keys, out, gradients of keys, gradients of heads
FEWER_ROUNDS = 3


class Post:
    """The messages of ranks that run one after another: of each pair, in the order in which they are sent."""

    def __init__(self, device: str) -> None:
        self.kept: dict[tuple[int, int], list[Tensor]] = {}
        self.is_kept = True  # what is sent from now on
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.begin()

    def begin(self) -> None:
        """A call begins: its first messages are the first of all."""
        self.sent: Counter[tuple[int, int]] = Counter()
        self.received: Counter[tuple[int, int]] = Counter()

    def send(self, pair: tuple[int, int], t: Tensor) -> None:
        number, kept = self.sent[pair], self.kept.setdefault(pair, [])
        self.sent[pair] += 1
        if number == len(kept):
            kept.append(t.clone())
        else:
            kept[number].copy_(t)

    def receive(self, pair: tuple[int, int], t: Tensor) -> None:
        number, kept = self.received[pair], self.kept.get(pair, [])
        self.received[pair] += 1
        if number < len(kept):
            t.copy_(kept[number])
        else:
            t.zero_()

    def forget(self, rank: int) -> None:
        """Keep from now on what this rank receives, and nothing else."""
        self.kept = {pair: kept for pair, kept in self.kept.items() if pair[1] == rank}
        self.is_kept = False


@dataclass(frozen=True)
class OneRank(Ranks):
    """A rank among others that are not there."""

    post: Post

    def exchange(self, sends: list[tuple[int, Tensor]], receives: list[tuple[int, Tensor]]) -> list[Any]:
        me, post = self.peers[self.rank], self.post
        if post.is_kept:
            for peer, t in sends:
                post.send((me, self.peers[peer]), t)
        if post.stream is None:
            for peer, t in receives:
                post.receive((self.peers[peer], me), t)
            return []
        current = torch.cuda.current_stream()
        post.stream.wait_stream(current)
        with torch.cuda.stream(post.stream):
            for peer, t in receives:
                post.receive((self.peers[peer], me), t)
            return [Arrival(post.stream.record_event(), current)]


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
        post = Post(group.device)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            post.begin()
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
            ranks = OneRank(None, rank, world, tuple(range(world)), post)
            context = functools.partial(_as, ranks)
            return prepare_call(case, tensors, dout, attend, lambda t: t, context)  # type: ignore[arg-type]

        found = _run_all(of_rank, layout, dim, ROUNDS.get(method, FEWER_ROUNDS))
        busiest = _busiest(layout, case)
        post.forget(busiest)
        prepared = of_rank(busiest)
        call = prepared.call if post.stream is None else _captured(prepared)
        return Prepared(call, lambda: found, prepared.context)

    return prepare


def _captured(prepared: Prepared) -> Callable[[], object]:
    """The replay of a graph of the call."""
    graph = torch.cuda.CUDAGraph()
    with prepared.context():
        right = prepared.call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = prepared.call()
    graph.replay()
    torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)

    def replay() -> object:
        graph.replay()
        return found, prepared  # the graph keeps none of the tensors that it reads

    return replay


@contextlib.contextmanager
def _as(ranks: Ranks) -> Iterator[None]:
    with mock.patch("tilewise.distributed.attention.ranks_of", lambda *_: ranks):
        yield


def _run_all(of_rank: Callable[[int], Prepared], layout: Layout, dim: int, rounds: int) -> dict[str, Tensor]:
    """Out and gradients of the whole sequence, after which all messages are right."""
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
    left, right = case.window or (None, None)
    rules = Rules(left, 0 if case.causal else right, False)

    def pairs(rank: int) -> int:
        steps = make_schedule(layout, rank, rules, "ring")
        return sum(block.pairs for step in steps for block in step.blocks)

    return max(range(layout.world), key=pairs)
