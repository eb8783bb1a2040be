"""One step of a cache's sequences: what `attention_with_cache` has to do for each kind of cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewise.cache.contiguous import KVCache, has_kernels
from tilewise.cache.paged import PagedKVCache
from tilewise.cache.pages import PADDING, PagedBatch, integers
from tilewise.cache.rotary import apply_rotary
from tilewise.core.functions.call import Cached
from tilewise.core.problem import Inputs
from tilewise.core.torch_private import compiles_here
from tilewise.core.values import check_coverage


def cached_step(
    cache: KVCache | PagedKVCache,
    batch: PagedBatch | Sequence[int] | None,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
) -> Step[Any]:
    """Check the new tokens and make room for them.

    Raises:
        ValueError, TypeError: they do not fit. The cache is unchanged.
    """
    if isinstance(cache, KVCache):
        if batch is not None:
            raise ValueError("batch must be None for a KVCache: its sequences are the rows of query")
        if key is not None:
            cache.check_new(key, value)
            _check_queries(query, key)
        return ContiguousStep(cache, 0 if key is None else key.shape[1])
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache={type(cache).__name__} must be a tilewise.KVCache or tilewise.PagedKVCache")
    if key is not None:
        cache.check_new(key, value, batch if isinstance(batch, PagedBatch) else None)
        _check_queries(query, key)
    if isinstance(batch, PagedBatch):
        cache.check_batch(batch)
        if query.ndim == 3 and len(query) != batch.total:
            raise ValueError(
                f"query.shape={tuple(query.shape)} must hold the batch's new_tokens={list(batch.new_tokens)}"
            )
        return PagedStep(cache, batch, is_reserved=True)
    if query.ndim != 4 or (key is not None and key.ndim != 4):
        raise ValueError(
            f"batch must be what cache.reserve() returned for packed tokens: query.shape={tuple(query.shape)}"
        )
    if key is not None:
        cache.check_one_layer()
    sequences = cache.sequences if batch is None else integers("batch", batch)
    if len(sequences) != len(query) or (key is not None and len(key) != len(query)):
        raise ValueError(
            f"query.shape[0]={len(query)} must be the number of sequences, {len(sequences)}, and key's"
        )
    return PagedStep(cache, cache.reserve(sequences, 0 if key is None else key.shape[1]), is_reserved=False)


def _check_queries(query: Tensor, key: Tensor) -> None:
    """Raises ValueError if there are more queries than new keys: the first would stand before them."""
    if query.ndim == key.ndim == 4 and query.shape[1] > key.shape[1]:
        raise ValueError(
            f"query.shape[1]={query.shape[1]} must be at most key.shape[1]={key.shape[1]}, the new tokens"
        )


class Rotary(NamedTuple):
    """Tables (positions, rotary_dim / 2), and which coordinates are pairs."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


C = TypeVar("C", KVCache, PagedKVCache)


class Step(ABC, Generic[C]):
    """Room is made; tokens are not written yet."""

    cache: C

    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest sequence, new ones included; 0 where that is not known to the host."""

    @abstractmethod
    def are_lengths_known(self) -> bool:
        """Whether the cache itself has set all lengths and pages, so that they need no check."""

    def positions(self, x: Tensor) -> Tensor:
        """The place in its sequence of every token of x, which are each sequence's last: x.shape[:-2]."""
        return self.first_queries(x)[:, None] + torch.arange(x.shape[1], device=x.device)

    @abstractmethod
    def first_queries(self, query: Tensor) -> Tensor:
        """(batch,) int64: the place in its sequence of each one's first query."""

    def standing(self, query: Tensor) -> Cached:
        """What mask and score functions are to know."""
        return Cached(self.first_queries(query).long(), self.longest())

    @abstractmethod
    def inputs(self, inputs: Inputs) -> Inputs:
        """The call's tensors with the cache's lengths and pages."""

    @abstractmethod
    def write(self, key: Tensor, value: Tensor | None) -> None:
        """Store the new tokens."""

    @abstractmethod
    def fused_write(self, query: Tensor, key: Tensor, value: Tensor | None, rotary: Rotary | None) -> Tensor:
        """Rotate query and key and store the new tokens on a GPU, in one launch, or two for 8-bit pages.

        Returns query as it is to be used.
        """

    def undo(self) -> None:
        """Leave the cache as it was before the step; pages that the caller reserved stay so."""

    def check_rotary(self, rotary: Rotary) -> None:
        """Raise ValueError or TypeError unless the tables fit."""
        cos, sin, _ = rotary
        storage, most = self.cache.key, self.cache.key.shape[-1] // 2
        for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
            if not isinstance(t, Tensor):
                raise TypeError(
                    f"{name}={type(t).__name__} must be a torch.Tensor: the tables are given together"
                )
            if not t.dtype.is_floating_point:
                raise TypeError(f"{name}.dtype={t.dtype} must be a floating-point dtype")
            if t.device != storage.device:
                raise ValueError(f"{name}.device={t.device} must equal the cache's device={storage.device}")
        positions = max(1, self.longest())
        if cos.ndim != 2 or cos.shape != sin.shape or len(cos) < positions or not 1 <= cos.shape[1] <= most:
            raise ValueError(
                f"rotary_cos.shape={tuple(cos.shape)} and rotary_sin.shape={tuple(sin.shape)} must both be "
                f"(positions, rotary_dim / 2) with at least {positions} positions and 1 to {most} pairs"
            )

    def store(self, query: Tensor, key: Tensor | None, value: Tensor | None, rotary: Rotary | None) -> Tensor:
        """Rotate query and key by their positions and store key and value; query as it is to be used."""
        if key is not None and self._is_fusible(query, key, value, rotary):
            return self.fused_write(query, key, value, rotary)
        if rotary is not None:
            query = self._rotated(query, rotary)
            key = None if key is None else self._rotated(key, rotary)
        if key is not None:
            self.write(key, value)
        return query

    def _rotated(self, x: Tensor, rotary: Rotary) -> Tensor:
        at = self.positions(x).clamp(0, len(rotary.cos) - 1)  # padding has none
        return apply_rotary(x, rotary.cos[at], rotary.sin[at], interleaved=rotary.interleaved)

    def _is_fusible(self, query: Tensor, key: Tensor, value: Tensor | None, rotary: Rotary | None) -> bool:
        """Whether Triton kernels can do it: they read whole rows."""
        rows_dense = all(t is None or t.stride(-1) == 1 for t in (query, key, value))
        same_tokens = rotary is None or query.shape[:-2] == key.shape[:-2]
        return has_kernels(key) and not query.requires_grad and rows_dense and same_tokens


class ContiguousStep(Step[KVCache]):
    def __init__(self, cache: KVCache, new_tokens: int) -> None:
        self.cache, self.new_tokens, self.written = cache, new_tokens, 0
        self.held: list[int] | None = None  # before tokens were written

    def longest(self) -> int:
        return max(self.cache.held() or [0]) + self.new_tokens

    def are_lengths_known(self) -> bool:
        return self.cache.is_mirrored

    def first_queries(self, query: Tensor) -> Tensor:
        return self.cache.lengths + (self.new_tokens - query.shape[1])

    def inputs(self, inputs: Inputs) -> Inputs:
        return inputs._replace(seqlens_k=self.cache.lengths)

    def write(self, key: Tensor, value: Tensor | None) -> None:
        self.held = self.cache.held() if self.cache.is_mirrored else None
        self.cache.write(key, value)
        self.written = self.new_tokens

    def undo(self) -> None:
        if self.held is not None:  # an interrupt may have come before the tokens were counted, or since
            self.cache.restore(self.held)
        elif self.written:
            self.cache.advance(-self.written)

    def fused_write(self, query: Tensor, key: Tensor, value: Tensor | None, rotary: Rotary | None) -> Tensor:
        from tilewise.gpu.triton.append import Tokens, append

        held, lengths = self.cache.held(), self.cache.lengths
        storage = self.cache.key, None if value is None else self.cache.value
        tokens = Tokens(None, None, lengths, new_lengths=lengths, arrivals=self.cache.arrivals)
        query = append(query, key, value, *storage, tokens, rotary)
        self.cache.mirror(held, self.new_tokens)
        return query


class PagedStep(Step[PagedKVCache]):
    def __init__(self, cache: PagedKVCache, batch: PagedBatch, is_reserved: bool) -> None:
        self.cache, self.batch, self.is_reserved = cache, batch, is_reserved
        self.before: list[tuple[Tensor, Tensor]] = []  # memory, and what its written pages held

    def longest(self) -> int:
        if compiles_here():  # the graph serves all lengths
            return 0
        return max((self.cache.length(s) for s in self.batch.sequences if s != PADDING), default=0)

    def are_lengths_known(self) -> bool:
        return True

    def positions(self, x: Tensor) -> Tensor:
        return self.batch.positions if x.ndim == 3 else super().positions(x)

    def first_queries(self, query: Tensor) -> Tensor:
        return self.batch.lengths - (self.batch.cu_seqlens.diff() if query.ndim == 3 else query.shape[1])

    def inputs(self, inputs: Inputs) -> Inputs:
        if inputs.query.ndim == 3 and not compiles_here():
            capacity = self.batch.page_table.shape[1] * self.cache.page_size
            check_coverage(inputs, max(self.batch.new_tokens, default=0), capacity)
        return inputs._replace(
            cu_seqlens_q=self.batch.cu_seqlens if inputs.query.ndim == 3 else None,
            seqlens_k=self.batch.lengths,
            page_table=self.batch.page_table,
            key_scale=self.cache.key_scale,
            value_scale=self.cache.value_scale,
        )

    def write(self, key: Tensor, value: Tensor | None) -> None:
        if self.cache.key_scale is not None and not compiles_here():
            pages = self.batch.written.long()  # whose earlier tokens are rounded anew beside larger ones
            self.before = [(t, t[pages]) for t in self.cache._tensors()]
        self.cache.write(key, value, self.batch)

    def fused_write(self, query: Tensor, key: Tensor, value: Tensor | None, rotary: Rotary | None) -> Tensor:
        from tilewise.gpu.triton.append import Tokens, append

        if self.cache.key_scale is None:
            storage = self.cache.key, None if value is None else self.cache.value
            tokens = Tokens(self.batch.slots, self.batch.positions, None)
            return append(query, key, value, *storage, tokens, rotary)
        if rotary is not None:
            rotated = torch.empty_like(key, memory_format=torch.contiguous_format)
            tokens = Tokens(None, self.batch.positions, None)
            query = append(query, key, None, rotated.view(1, -1, *key.shape[-2:]), None, tokens, rotary)
            key = rotated
        self.cache.write(key, value, self.batch)
        return query

    def undo(self) -> None:
        for t, held in self.before:
            t[self.batch.written.long()] = held
        if not self.is_reserved:
            self.cache.undo(self.batch)
