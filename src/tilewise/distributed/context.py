"""`context_parallel`: attention calls of code that does not know it runs on a shard."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.autograd import functions
from tilewise.core.checks import shown
from tilewise.core.problem import Inputs, Options
from tilewise.core.signature import Request
from tilewise.core.torch_private import version_of
from tilewise.distributed.attention import Call, Where, attend
from tilewise.distributed.layout import Layout, Piece, check_dim, layout_of, shard, unshard
from tilewise.distributed.ranks import Ranks, agree, check_plain, is_dtensor, ranks_of
from tilewise.faces.sdpa import scaled_dot_product_attention


@contextlib.contextmanager
def context_parallel(
    mesh: Any = None,
    *,
    group: Any = None,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: set[Tensor] | None = None,
    seqlen: int | None = None,
    method: str = "auto",
    balance: str = "zigzag",
    cu_seqlens: Any = None,
) -> Iterator[None]:
    """Inside, every attention call takes its tensors for this rank's shards of one sequence.

    That goes for `tilewise.attention` and `attention_varlen`, for all faces, for transformers with
    `attn_implementation="tilewise"`, and for `torch.nn.functional.scaled_dot_product_attention`. (With "sdpa"
    transformers makes a mask where positions jump: that takes balance="contiguous".)

    Like PyTorch's `context_parallel`, it holds for all threads of the process. Run the backward inside: it
    may need buffers as they are in here (an embedding keeps its token ids), and activation checkpointing
    computes forwards again. Functions see positions in the whole sequence, or in the document. Dropout takes
    the seed that the group's first rank draws. A mask or bias has this rank's rows and all columns.

    Args:
        mesh, group: the ranks that share the sequence, as of `shard`.
        buffers: tensors with all tokens, the same on every rank, such as token ids, labels and positions: in
            here they hold this rank's tokens, in memory of their own: views of one batch may be among them.
            Without gradients.
        buffer_seq_dims: for each of them the dimension of the tokens.
        no_restore_buffers: those of them that need not be whole again afterwards.
        seqlen: the total number of tokens; None: that of the buffers, or as many on all ranks.
        method, balance, cu_seqlens: as of `context_parallel_attention`. Packed documents are told here: a
            call's own offsets may only cut a batch into rows, and a row where its positions jump.

    Raises:
        ValueError, TypeError: an argument does not fit, or ranks disagree: as `context_parallel_attention`.
        NotImplementedError: in a call: caches, block masks, attention_chunk, functions of packed calls,
            DTensors, or what `method` does not serve.

    Example:
        >>> import tilewise
        >>> tokens = torch.arange(6)[None]
        >>> with context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
        ...     x = tokens[..., None, None].float().expand(-1, -1, 2, 8)
        ...     out = tilewise.attention(x, x, x, causal=True)
    """
    ranks = ranks_of(group, mesh)
    kept = {id(b) for b in no_restore_buffers or ()}
    where = {"group": group, "mesh": mesh, "balance": balance, "cu_seqlens": cu_seqlens}
    error = layout = None
    try:
        total = _total(buffers, buffer_seq_dims, seqlen)
        if not kept <= {id(b) for b in buffers}:
            raise ValueError("no_restore_buffers must be some of buffers")
        if total is not None or cu_seqlens is not None:
            layout = layout_of(ranks, balance, total, cu_seqlens)
    except Exception as found:
        error = found

    def facts() -> dict[str, Any]:
        return {
            "method": method, "balance": balance, "seqlen": None if layout is None else layout.total,
            "cu_seqlens": None if layout is None or cu_seqlens is None else layout.starts,
            "buffers": [tuple(b.shape) for b in buffers], "buffer_seq_dims": list(buffer_seq_dims),
        }  # fmt: skip

    agree(ranks, facts, error, ranks.device)
    calls = _Calls(ranks, layout, method, balance, cu_seqlens is not None)
    whole = [b.detach() for b in buffers]
    shards = [shard(b, dim=dim, **where) for b, dim in zip(whole, buffer_seq_dims, strict=True)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    try:
        _replace(buffers, shards)
        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
        with functions.served_by(calls):
            yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = sdpa
        _replace(buffers, [b if id(b) in kept else t for b, t in zip(buffers, whole, strict=True)])


def _total(buffers: Sequence[Tensor], dims: Sequence[int], seqlen: int | None) -> int | None:
    if len(buffers) != len(dims):
        raise ValueError(
            f"buffer_seq_dims={shown(dims)} must name a dimension for each of {len(buffers)} buffers"
        )
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        name = f"buffers[{number}]"
        check_plain(**{name: buffer})
        if buffer.requires_grad:
            raise ValueError(f"{name} requires grad, must not: it is cut in place")
        if buffer.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"{name} was made in inference mode, must not outside of it: it is cut in place")
        check_dim(dim, buffer.ndim, f"buffer_seq_dims[{number}]")
        if seqlen is not None and buffer.shape[dim] != seqlen:
            raise ValueError(f"{name} has {buffer.shape[dim]} tokens, must have {seqlen} as all others")
        seqlen = buffer.shape[dim]
    return seqlen


@torch.no_grad()
def _replace(buffers: Sequence[Tensor], by: Sequence[Tensor]) -> None:
    """Give buffers other memory: what they had may be that of a batch, of which several are views."""
    for buffer, t in zip(buffers, by, strict=True):
        buffer.set_(t)  # type: ignore[call-overload]


_UNSERVED = ("seqlens_k", "leftpad_k", "page_table")


@dataclass
class _Calls:
    """What serves attention calls inside of `context_parallel`."""

    ranks: Ranks
    layout: Layout | None  # None: not known, and not packed
    method: str
    balance: str
    is_packed: bool  # documents, told to `context_parallel`
    # of a call, looked at, and their versions: all layers of a model have the same
    known_offsets: dict[str, tuple[Tensor, Any]] = field(default_factory=dict)

    def __call__(
        self, inputs: Inputs, options: Options, backend: str | None, request: Request
    ) -> tuple[Tensor, Any]:
        """As `autograd.functions.attention`."""

        def describe() -> Call:
            self._refuse(inputs, options)
            q, k, v = inputs[:3]
            if q.ndim == 3:
                rows = self._rows(inputs)
                q, k, v = (t.unflatten(0, (rows, len(t) // max(1, rows))) for t in (q, k, v))
            elif self.is_packed and len(q) > 1:
                raise ValueError(f"query.shape={tuple(q.shape)} must have a batch of 1 with cu_seqlens")
            of_rows = inputs._replace(query=q, key=k, value=v, cu_seqlens_q=None, cu_seqlens_k=None)
            tokens = layout_of(self.ranks, self.balance, self._seqlen, self._offsets, q.shape[1])
            return Call(of_rows, options._replace(max_seqlen_q=None, max_seqlen_k=None), tokens)

        where = Where(self.ranks, self.method, self.balance, self._seqlen, self.is_packed, backend=backend)
        out, lse = attend(where, describe, True, inputs.query.device)
        assert lse is not None
        if inputs.query.ndim == 3:
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        return out, lse if request.lse else None

    def refuse(self, error: Exception) -> None:
        """Raise an error of this rank's call, and let the others raise too, which wait for it."""
        agree(self.ranks, dict, error, self.ranks.device)

    def all_columns(self, mask: Tensor) -> Tensor:
        """A mask (..., tokens of the rank) for all keys. All ranks take part."""
        where = {"group": self.ranks.group, "balance": self.balance, "cu_seqlens": self._offsets}
        return unshard(mask, dim=-1, seqlen=self._seqlen, **where)

    @property
    def _seqlen(self) -> int | None:
        return None if self.layout is None else self.layout.total

    @property
    def _offsets(self) -> tuple[int, ...] | None:
        return self.layout.starts if self.layout is not None and self.is_packed else None

    def _refuse(self, inputs: Inputs, options: Options) -> None:
        if any(is_dtensor(t) for t in inputs[:3]):
            raise NotImplementedError(
                "DTensors are not served inside of context_parallel: context_parallel_attention takes them"
            )
        found = [name for name in _UNSERVED if getattr(inputs, name) is not None]
        if options.functions is not None and inputs.query.ndim == 3:
            found.append("mask_mod or score_mod of packed calls")
        if found:
            raise NotImplementedError(f"{found[0]} is not served inside of context_parallel")

    def _rows(self, inputs: Inputs) -> int:
        """How many rows of a batch a packed call has. Its offsets may only say where a row starts, and where
        the positions of a row jump: transformers takes such a jump for the start of another document."""
        if self.is_packed:
            return 1
        if self.layout is None:
            raise ValueError(
                "seqlen=None of context_parallel must be the total number of tokens for packed calls"
            )
        length, tokens = self.layout.length(self.ranks.rank), len(inputs.query)
        assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None
        for name, offsets in (("cu_seqlens_q", inputs.cu_seqlens_q), ("cu_seqlens_k", inputs.cu_seqlens_k)):
            version = 0 if offsets.is_inference() else version_of(offsets)
            known, known_version = self.known_offsets.get(name, (None, 0))
            if offsets is not known or version != known_version:
                self._check_offsets(name, offsets.tolist(), tokens, self.layout.pieces[self.ranks.rank])
                self.known_offsets[name] = offsets, version
        return tokens // length if length else len(inputs.cu_seqlens_q) - 1

    def _check_offsets(self, name: str, offsets: list[int], tokens: int, pieces: tuple[Piece, ...]) -> None:
        """Raises ValueError if they cut rows of these pieces where none begins."""
        *starts, length = itertools.accumulate((p.stop - p.start for p in pieces), initial=0)
        found, rows = set(offsets), range(0, tokens + 1, max(1, length))
        if tokens % max(1, length) or not set(rows) <= found <= {r + s for r in rows for s in (0, *starts)}:
            raise ValueError(
                f"{name}={shown(sorted(found))} must not cut rows of {length} tokens: "
                "context_parallel(cu_seqlens=...) takes documents"
            )
