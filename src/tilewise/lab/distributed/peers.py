"""Who takes part in the suite "distributed": tilewise's methods, one device, a plain ring, PyTorch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.api import attention
from tilewise.distributed import context_parallel_attention, peer_memory, shard, unshard
from tilewise.distributed.ranks import Ranks
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import Refusal
from tilewise.lab.bench.peer import Data, Prepared, dense_tensors, prepare_call
from tilewise.varlen import attention_varlen

METHODS = ("auto", "ring", "all_gather", "ulysses")
ONE = "one-device"


class Group(NamedTuple):
    rank: int
    world: int
    device: str  # type

    @property
    def place(self) -> str:
        """This rank's device; a random generator wants it by number."""
        return f"cuda:{torch.cuda.current_device()}" if self.device == "cuda" else self.device


Prepare = Callable[[Case, Data, Group], Prepared | None]  # None: this rank has nothing to do


def peers(world: int) -> dict[str, Prepare]:
    """By name, ours first."""
    methods = (*METHODS, "2d") if world > 3 else METHODS
    found: dict[str, Prepare] = {f"tilewise:{method}": _context_parallel(method) for method in methods}
    return found | {
        ONE: _one_device,
        "plain-ring": _context_parallel("ring", "contiguous", overlaps=False),
        "zigzag-ring": _context_parallel("ring", overlaps=False),
        "torch-cp": _torch_context_parallel,
    }


def balance_of(case: Case) -> str:
    """The layout that makes the work of a case even."""
    if case.kind == "varlen":
        return "documents"
    return "contiguous" if case.window is not None or not case.causal else "zigzag"


def offsets(case: Case) -> list[int] | None:
    return [0, *itertools.accumulate(case.lengths)] if case.kind == "varlen" else None


def options_of(case: Case) -> dict[str, Any]:
    return {"causal": case.causal} | ({} if case.window is None else {"window": case.window})


def check_heads(method: str, case: Case, world: int) -> None:
    if method == "ulysses" and case.num_heads % world:
        raise Refusal(f"has {case.num_heads} heads for {world} ranks")


def _context_parallel(method: str, balance: str | None = None, overlaps: bool = True) -> Prepare:
    def prepare(case: Case, data: Data, group: Group) -> Prepared:
        check_heads(method, case, group.world)
        dim = 0 if case.kind == "varlen" else 1
        where: dict[str, Any] = {"balance": balance or balance_of(case), "cu_seqlens": offsets(case)}
        total = data.query.shape[dim]
        tensors = [shard(t, dim=dim, **where) for t in (data.query, data.key, data.value)]
        dout = None if data.dout is None else shard(data.dout, dim=dim, **where)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            options = where | options_of(case)
            found = context_parallel_attention(query, key, value, method=method, seqlen=total, **options)
            assert isinstance(found, Tensor)
            return found

        def whole(t: Tensor) -> Tensor:
            return unshard(t, dim=dim, seqlen=total, **where)

        context = contextlib.nullcontext if overlaps else _without_overlap
        return prepare_call(case, tensors, dout, attend, whole, context)

    return prepare


@contextlib.contextmanager
def _without_overlap() -> Iterator[None]:
    """Messages, and nothing is computed while they travel, as in ring-flash-attention's loop over steps."""
    exchange = Ranks.exchange

    def exchange_and_wait(ranks: Ranks, sends: Any, receives: Any) -> list[Any]:
        for work in exchange(ranks, sends, receives):
            work.wait()
        return []

    with (
        mock.patch.object(peer_memory, "can_read", lambda ranks, device: False),
        mock.patch.object(Ranks, "exchange", exchange_and_wait),
        mock.patch.object(Ranks, "let_messages_begin", lambda ranks, device: None),
    ):
        yield


def _one_device(case: Case, data: Data, group: Group) -> Prepared | None:
    if group.rank:
        return None
    tensors = (data.query, data.key, data.value)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options = options_of(case)
        if case.kind == "varlen":
            options |= {name: max(case.lengths) for name in ("max_seqlen_q", "max_seqlen_k")}
            found = attention_varlen(query, key, value, data.offsets, data.offsets, **options)
        else:
            found = attention(query, key, value, **options)
        assert isinstance(found, Tensor)
        return found

    return prepare_call(case, tensors, data.dout, attend, lambda t: t)


def _torch_context_parallel(case: Case, data: Data, group: Group) -> Prepared:
    """PyTorch's, by cuDNN; keys are all-gathered, which was its faster way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    if group.device != "cuda":
        raise Refusal("has no CPU path")
    if case.kind == "varlen" or case.window is not None:
        raise Refusal("has neither packed documents nor windows")
    mesh = init_device_mesh("cuda", (group.world,))
    tensors, dout = dense_tensors(data, "bhsd")
    buffers = [t.clone() for t in (*tensors, *(() if dout is None else (dout,)))]

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            context_parallel(mesh, buffers=[buffers[0]], buffer_seq_dims=[2]),
        ):
            yield

    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
        own = [t.clone() for t in buffers]
    own_dout = own[3] if dout is not None else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=case.causal)

    def whole(t: Tensor) -> Tensor:
        return context_parallel_unshard(mesh, [t.contiguous()], [2])[0].transpose(1, 2)

    return prepare_call(case, own[:3], own_dout, attend, whole, context)
