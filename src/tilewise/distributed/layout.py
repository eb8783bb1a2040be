"""Which tokens of a sequence each rank holds.

A layout cuts the tokens into chunks and gives each rank some of them. With two ranks:

    "contiguous"   0 0 0 0 1 1 1 1     causal: the last rank has most of the work
    "zigzag"       0 0 1 1 1 1 0 0     head and tail: causal work is even
    "documents"    0 1 1 0|0 0 1 1 1 1 0 0     each document zigzag: even for packed documents too

Lengths need not divide by anything: the shards of two ranks differ by at most one token, with "documents" by
at most two. A shard holds its tokens in the order of the sequence.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.checks import shown
from tilewise.distributed.ranks import Ranks, agree, check_plain, gather, is_dtensor, ranks_of

BALANCES = ("contiguous", "zigzag", "documents")
DIMENSIONS = {"bshd": "bshd", "bhsd": "bhsd", "packed": "shd"}
LSE = {"bshd": "bhs", "bhsd": "bhs", "packed": "hs"}


class Piece(NamedTuple):
    """Tokens [start, stop) of the sequence, all of one document."""

    document: int
    start: int
    stop: int


def numbers_in(ranges: Iterable[tuple[int, int]]) -> Tensor:
    """int64, on the CPU: the numbers of ranges, one range behind the other."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.cat([none, *(torch.arange(a, b, device="cpu") for a, b in ranges)])


def num_tokens(pieces: Sequence[Piece]) -> int:
    return sum(p.stop - p.start for p in pieces)


@dataclass(frozen=True)
class Layout:
    """The pieces of each rank, in the order of the sequence."""

    starts: tuple[int, ...]  # of the documents, and the total: (0, total) for a single one
    pieces: tuple[tuple[Piece, ...], ...]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.starts, self.pieces))

    def __hash__(self) -> int:
        return self._hash

    @property
    def total(self) -> int:
        return self.starts[-1]

    @property
    def world(self) -> int:
        return len(self.pieces)

    @functools.cached_property
    def _lengths(self) -> tuple[int, ...]:
        return tuple(map(num_tokens, self.pieces))

    def length(self, rank: int) -> int:
        return self._lengths[rank]

    def tokens(self, rank: int) -> Tensor:
        """int64 (length,): the tokens of a rank."""
        return numbers_in((p.start, p.stop) for p in self.pieces[rank])

    def is_cut_at(self, multiple: int) -> bool:
        """Whether all pieces begin at a multiple of this number of tokens in their documents."""
        starts = ((p.start - self.starts[p.document]) % multiple for own in self.pieces for p in own)
        return not any(starts)


@functools.lru_cache(maxsize=64)
def joined(layout: Layout, inner: int) -> Layout:
    """The layout of groups of `inner` ranks that follow each other, each in the order of the sequence."""
    groups = [layout.pieces[first : first + inner] for first in range(0, layout.world, inner)]
    return Layout(layout.starts, tuple(_join(sorted(itertools.chain(*g))) for g in groups))


def _join(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Pieces that follow each other within a document become one."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].document == piece.document and joined[-1].stop == piece.start:
            joined[-1] = joined[-1]._replace(stop=piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)


@functools.lru_cache(maxsize=64)
def make_layout(starts: tuple[int, ...], world: int, balance: str) -> Layout:
    """The layout of documents that start at `starts[:-1]` and end at `starts[-1]`.

    Example:
        >>> [[(p.start, p.stop) for p in pieces] for pieces in make_layout((0, 9), 2, "zigzag").pieces]
        [[(0, 3), (7, 9)], [(3, 7)]]
    """
    chunks = world if balance == "contiguous" else 2 * world
    owner = [min(c, chunks - 1 - c) if chunks > world else c for c in range(chunks)]
    pieces: list[list[Piece]] = [[] for _ in range(world)]
    spans = list(itertools.pairwise(starts))
    ranges, extra = (spans if balance == "documents" else [(0, starts[-1])]), 0
    document = 0
    for first, end in ranges:
        sizes = [(end - first) // chunks] * chunks
        for n in range((end - first) % chunks):  # what is left over goes on where the last document's ended
            sizes[(extra + n) % chunks] += 1
        extra += (end - first) % chunks
        for chunk, (a, b) in enumerate(itertools.pairwise(itertools.accumulate(sizes, initial=first))):
            while a < b:
                while spans[document][1] <= a:
                    document += 1
                stop = min(b, spans[document][1])
                pieces[owner[chunk]].append(Piece(document, a, stop))
                a = stop
    return Layout(starts, tuple(_join(p) for p in pieces))


def layout_of(
    ranks: Ranks, balance: str, seqlen: int | None, cu_seqlens: Any, local: int | None = None
) -> Layout:
    """The layout that these arguments mean; `local`, this rank's tokens, is checked against it.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    if balance not in BALANCES:
        raise ValueError(f"balance={shown(balance)} must be one of {', '.join(map(repr, BALANCES))}")
    if seqlen is not None and (not isinstance(seqlen, int) or isinstance(seqlen, bool) or seqlen < 0):
        raise ValueError(f"seqlen={shown(seqlen)} must be the total number of tokens, at least 0")
    starts = None if cu_seqlens is None else document_starts(cu_seqlens)
    if starts is not None and seqlen is not None and starts[-1] != seqlen:
        raise ValueError(f"seqlen={seqlen} must be cu_seqlens[-1]={starts[-1]}, or None")
    if starts is None:
        if seqlen is None:
            if local is None:
                raise ValueError("seqlen=None must be the total number of tokens when cu_seqlens is None")
            seqlen = local * ranks.world
        starts = (0, seqlen)
    layout = make_layout(starts, ranks.world, balance)
    if local is not None and layout.length(ranks.rank) != local:
        raise ValueError(
            f"{local} tokens on rank {ranks.rank} must be {layout.length(ranks.rank)}: with "
            f"balance={balance!r}, {ranks.world} ranks share {layout.total}"
        )
    return layout


def document_starts(cu_seqlens: Any) -> tuple[int, ...]:
    """Offsets as a tuple. A tensor of a GPU is read, which waits: a list or a CPU tensor costs nothing."""
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"cu_seqlens of {cu_seqlens.dtype} and shape {tuple(cu_seqlens.shape)} must be int32 or "
                "int64, (documents + 1,)"
            )
        cu_seqlens = cu_seqlens.tolist()
    starts = tuple(cu_seqlens) if isinstance(cu_seqlens, Sequence) else None
    if starts is None or not all(isinstance(s, int) for s in starts):
        raise TypeError(f"cu_seqlens={shown(cu_seqlens)} must be a tensor or a sequence of integers")
    if not starts or starts[0] != 0 or any(b < a for a, b in itertools.pairwise(starts)):
        raise ValueError(f"cu_seqlens={shown(starts)} must begin with 0 and never decrease")
    return starts if len(starts) > 1 else (0, 0)


def shard(
    x: Tensor,
    *,
    dim: int = 1,
    group: Any = None,
    mesh: Any = None,
    balance: str = "zigzag",
    cu_seqlens: Any = None,
) -> Tensor:
    """This rank's tokens of a tensor that every rank has. Differentiable.

    Args:
        x: tokens in dimension `dim`: (batch, seqlen, ...), or packed with dim=0.
        group, mesh: who shares the sequence: a process group or a one-dimensional DeviceMesh; None is the
            default group, and this process alone where there is none.
        balance: "contiguous", "zigzag" or "documents", see `tilewise.distributed.layout`.
        cu_seqlens: of packed documents: (documents + 1,) offsets, the same on every rank.

    Returns:
        x with the tokens of this rank only, in the order of the sequence; contiguous.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> shard(torch.arange(6)[None]).tolist()  # without a process group: all tokens
        [[0, 1, 2, 3, 4, 5]]
    """
    check_plain(x=x)
    ranks = ranks_of(group, mesh)
    check_dim(dim, x.ndim)
    layout = layout_of(ranks, balance, x.shape[dim], cu_seqlens)
    pieces = [x.narrow(dim, p.start, p.stop - p.start) for p in layout.pieces[ranks.rank]]
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0).clone()


def unshard(
    x: Tensor,
    *,
    dim: int = 1,
    group: Any = None,
    mesh: Any = None,
    balance: str = "zigzag",
    cu_seqlens: Any = None,
    seqlen: int | None = None,
) -> Tensor:
    """The whole tensor, on every rank, from the shards of all.

    Differentiable, any number of times: gradients are summed over ranks.

    Args:
        x: this rank's tokens, as `shard` gives them; the other arguments as there.
        seqlen: the total number of tokens; None asks the other ranks.

    Returns:
        x with all tokens in dimension `dim`.

    Raises:
        ValueError, TypeError: an argument does not fit, or ranks disagree: as `context_parallel_attention`.

    Example:
        >>> unshard(shard(torch.arange(6)[None])).tolist()
        [[0, 1, 2, 3, 4, 5]]
    """
    ranks = ranks_of(group, mesh)
    error = layout = None
    try:
        check_plain(x=x)
        check_dim(dim, x.ndim)
        if seqlen is not None or cu_seqlens is not None:
            layout = layout_of(ranks, balance, seqlen, cu_seqlens, x.shape[dim])
    except Exception as found:
        error = found

    def facts() -> dict[str, Any]:
        sizes = list(x.shape)
        sizes[dim] = -1
        starts = None if layout is None else layout.starts
        return {"x but its tokens": f"{x.dtype} {sizes}", "balance": balance, "seqlen or cu_seqlens": starts}

    agree(ranks, facts, error, x.device if isinstance(x, Tensor) else ranks.device)
    if layout is None:
        lengths = gather(torch.tensor(x.shape[dim], device=x.device), ranks).tolist()
        for rank, length in enumerate(lengths):  # all find the same fault
            layout = layout_of(replace(ranks, rank=rank), balance, sum(lengths), None, length)
    return _Unshard.apply(x.movedim(dim, 0), layout, ranks).movedim(0, dim)  # type: ignore[no-any-return]


class _Unshard(torch.autograd.Function):
    """(tokens of a rank, ...) -> (all tokens, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, ranks: Ranks) -> Tensor:  # type: ignore[override]
        ctx.call = layout, ranks
        longest = max(layout.length(r) for r in range(ranks.world))
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: len(x)] = x
        whole = x.new_empty((layout.total, *x.shape[1:]))
        for rank, rows in enumerate(gather(padded, ranks)):
            end = 0
            for piece in layout.pieces[rank]:
                start, end = end, end + piece.stop - piece.start
                whole[piece.start : piece.stop] = rows[start:end]
        return whole

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        layout, ranks = ctx.call
        if ranks.group is not None:
            from torch.distributed.nn.functional import all_reduce  # which has a derivative

            g = all_reduce(g, group=ranks.group)
        return g[layout.tokens(ranks.rank).to(g.device)], None, None


def positions(
    seqlen: int | None = None,
    *,
    group: Any = None,
    mesh: Any = None,
    balance: str = "zigzag",
    cu_seqlens: Any = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position of each of this rank's tokens in its document: what RoPE rotates by.

    Args:
        seqlen: the total number of tokens; not needed with cu_seqlens.
        group, mesh, balance, cu_seqlens: as of `shard`.

    Returns:
        int64 (tokens of this rank,).

    Raises:
        ValueError, TypeError: an argument does not fit.

    Example:
        >>> positions(cu_seqlens=[0, 2, 5]).tolist()
        [0, 1, 0, 1, 2]
    """
    ranks = ranks_of(group, mesh)
    layout = layout_of(ranks, balance, seqlen, cu_seqlens)
    pieces = layout.pieces[ranks.rank]
    starts = [layout.starts[p.document] for p in pieces]
    found = numbers_in((p.start - start, p.stop - start) for p, start in zip(pieces, starts))
    return found.to(device) if device is not None else found


def check_dim(dim: int, ndim: int, name: str = "dim") -> None:
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise ValueError(f"{name}={shown(dim)} must be a dimension of a tensor that has {ndim}")


Wrap = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def group_of(query: Any, layout: str) -> Any:
    """The ranks that share the sequence of a DTensor, of its mesh."""
    mesh, names = query.device_mesh, DIMENSIONS[layout]
    if mesh.ndim == 1:
        return mesh.get_group()
    return mesh.get_group(_sharded(query, names).index("s"))


def _sharded(query: Any, names: str) -> list[str]:
    """What each dimension of the mesh shards: a letter of names, or ""."""
    shards = [names[p.dim % query.ndim] if p.is_shard() else "" for p in query.placements]
    if shards.count("s") != 1 or "d" in shards or any(p.is_partial() for p in query.placements):
        raise ValueError(
            f"query.placements={tuple(query.placements)} must shard the sequence, dimension "
            f"{names.index('s')}, along one dimension of the mesh, and along others batch, heads or nothing"
        )
    return shards


def shards_of(query: Any, key: Any, value: Any, layout: str) -> tuple[Tensor, Tensor, Tensor, int, Wrap]:
    """What a call takes instead of DTensors that lie on one mesh alike. `layout` may be "packed".

    Returns:
        The shards of query, key and value, the length of the sequence, and what makes DTensors of out
        and lse.

    Raises:
        ValueError, TypeError: they are not all DTensors, are placed differently, or no mesh dimension shards
            the sequence.
    """
    mesh, placements = query.device_mesh, tuple(query.placements)
    for name, t in (("key", key), ("value", value)):
        if not is_dtensor(t):
            raise TypeError(f"{name}={shown(t)} must be a DTensor, as query is")
        if t.device_mesh != mesh or tuple(t.placements) != placements:
            raise ValueError(
                f"{name}.placements={t.placements} must be those of query, {placements}, on its mesh"
            )
    names = DIMENSIONS[layout]
    shards = _sharded(query, names)

    sizes = dict(zip(names, query.shape)) | {"d": value.shape[-1]}

    def placed(t: Tensor, names: str) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        found = [Shard(names.index(n)) if n else Replicate() for n in shards]
        shape = torch.Size([sizes[n] for n in names])  # not the world's size times that of the shard
        stride, step = [0] * t.ndim, 1
        for n in sorted(range(t.ndim), key=lambda n: (t.stride(n), -n)):
            stride[n], step = step, step * shape[n]
        return DTensor.from_local(t, mesh, found, run_check=False, shape=shape, stride=tuple(stride))

    def wrap(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return placed(out, names), None if lse is None else placed(lse, LSE[layout])

    seqlen = query.shape[names.index("s")]
    return query.to_local(), key.to_local(), value.to_local(), seqlen, wrap
