"""A cache whose sequences grow page by page, share pages, and come and go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from tilewise.cache.contiguous import Storage, has_kernels, layout_hint
from tilewise.cache.pages import PADDING, PagedBatch, PageTable, integers
from tilewise.cache.quantized_pages import dequantized, write_quantized
from tilewise.core.checks import DTYPES, check_integers, shown
from tilewise.core.device_errors import raise_errors
from tilewise.core.fp8 import FP8

PAGE_SIZES = (16, 64, 128, 256)


class PagedKVCache(Storage):
    """Keys and values in pages: (num_pages, page_size, num_kv_heads, head_dim), likewise for values.

    Sequences are numbers that `allocate` and `fork` return. The host knows every length, so a wrong call is
    refused before anything is written, without waiting for a GPU.

    The layers of a model have one cache each and may share the bookkeeping (`shares`): `reserve` once for all
    layers, then `write`, or `attention_with_cache(..., batch=...)`, in each.

    Args:
        num_pages: pages held; a sequence of n tokens uses ceil(n / page_size) of them.
        page_size: tokens in a page: 16, 64, 128 or 256.
        num_kv_heads: heads of the keys and values.
        head_dim: of the keys, 1 to 576.
        head_dim_v: of the values; None is head_dim.
        max_seqlen: refuse longer sequences; page tables then have one width. None: as long as pages last.
        dtype: float64, float32, bfloat16, float16, or float8_e4m3fn: 8 bits with a scale (a power of two) for
            each page and head, quantized when appended. A number x is then off by at most
            |x| / 16 + a / 114688, or 8e-31 if that is more; a is the largest magnitude that its page has held
            for its head.
        device: where it lives; None is torch's default device.
        value_in_key: the values are the keys' first head_dim_v coordinates, as in absorbed latent attention,
            and are stored and read once.
        shares: another layer's cache, whose sequences and pages are used. Sizes of pages must be equal.

    Attributes:
        key, value: the storage.
        key_scale, value_scale: (num_pages, num_kv_heads) float32 for float8_e4m3fn, else None.

    Raises:
        ValueError, TypeError: a size or dtype does not fit.

    Example:
        >>> cache = PagedKVCache(8, 16, 2, 4, dtype=torch.float32)
        >>> first = cache.allocate()
        >>> cache.append(torch.ones(1, 20, 2, 4), torch.ones(1, 20, 2, 4), [first])
        >>> second = cache.fork(first)  # shares both pages until one of them writes
        >>> cache.length(second), cache.free_pages
        (20, 6)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        max_seqlen: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        value_in_key: bool = False,
        shares: PagedKVCache | None = None,
    ) -> None:
        check_integers(0, num_pages=num_pages, num_kv_heads=num_kv_heads)
        if max_seqlen is not None:
            check_integers(0, max_seqlen=max_seqlen)
        if not isinstance(page_size, int) or page_size not in PAGE_SIZES:
            raise ValueError(f"page_size={shown(page_size)} must be 16, 64, 128 or 256")
        if dtype not in (*DTYPES, FP8):
            raise TypeError(
                f"dtype={shown(dtype)} must be float64, float32, bfloat16, float16 or float8_e4m3fn"
            )
        rows = (num_pages, page_size, num_kv_heads)
        super().__init__(rows, head_dim, head_dim_v, dtype, device, value_in_key)
        self._table = PageTable(num_pages, page_size, max_seqlen)
        if shares is not None:
            if not isinstance(shares, PagedKVCache):
                raise TypeError(f"shares={type(shares).__name__} must be a tilewise.PagedKVCache")
            table = shares._table
            if (table.num_pages, table.page_size) != (num_pages, page_size):
                raise ValueError(
                    f"shares has num_pages={table.num_pages}, page_size={table.page_size}, must have "
                    f"{num_pages}, {page_size}"
                )
            self._table = table
        self._table.layers.add(self)

    def __repr__(self) -> str:
        first = f"num_pages={len(self.key)}, page_size={self.key.shape[1]}"
        held = f"sequences={shown(self.sequences)}, free_pages={len(self._table.free_pages)}"
        return self._described(first, held)

    # ---- sequences

    @property
    def sequences(self) -> list[int]:
        """The sequences that live, oldest first."""
        return list(self._table.pages)

    @property
    def free_pages(self) -> int:
        return len(self._table.free_pages)

    @property
    def page_size(self) -> int:
        return self._table.page_size

    def length(self, sequence: int) -> int:
        """Tokens that a sequence holds."""
        self._table.check(sequence)
        return self._table.lengths[sequence]

    def allocate(self) -> int:
        """A new, empty sequence."""
        return self._table.allocate()

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens and pages; a page is copied when one of them writes to it.

        Tokens that were reserved are written first, in all layers: the sequence's batches are out of date
        from now on, as what they wrote would go to both sequences, or to the one that keeps the page.

        Raises:
            ValueError: the sequence does not live.
        """
        return self._table.fork(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget all but the first `length` tokens, as when drafted tokens are refused.

        Raises:
            ValueError: the sequence does not live or is shorter.
        """
        self._table.truncate(sequence, length)

    def free(self, sequence: int) -> None:
        """Give a sequence's pages back, but for those that others share.

        Raises:
            ValueError: the sequence does not live: it was freed before, or never existed.
        """
        self._table.free(sequence)

    def reset(self) -> None:
        """Free every sequence; the memory stays."""
        self._table.clear()

    # ---- tokens

    def reserve(
        self,
        sequences: Sequence[int] | None = None,
        new_tokens: int | Sequence[int] = 1,
        *,
        into: PagedBatch | None = None,
    ) -> PagedBatch:
        """Make room for new tokens of some sequences, in all layers; the tokens count from now on.

        Args:
            sequences: each at most once; -1 is padding: a row of the batch without a sequence. None: all.
            new_tokens: for each of them, or one number for all.
            into: an earlier batch of the same sizes, whose memory a captured CUDA graph reads: it is
                overwritten and serves again; the earlier object is out of date then.

        Raises:
            ValueError: a sequence does not live or occurs twice, or there is no room; or an earlier call on a
                GPU has found a wrong length or page, see `check_errors`. Nothing has changed.
            TypeError: something is no integer. Nothing has changed.
        """
        raise_errors()
        sequences = self.sequences if sequences is None else integers("sequences", sequences)
        if not isinstance(into, PagedBatch | None):
            raise TypeError(f"into={shown(into)} must be None or what reserve() returned")
        if isinstance(new_tokens, int | Integral):
            new_tokens = [int(new_tokens)] * len(sequences)
        counts = integers("new_tokens", new_tokens)
        if len(counts) != len(sequences):
            raise ValueError(
                f"new_tokens={counts} must be one number, or one for each of {len(sequences)} sequences"
            )
        copies = self._table.reserve(sequences, counts)
        try:
            batch = self._table.batch(sequences, counts, copies, self.key.device, into)
        except BaseException:
            self._table.undo(sequences, counts, copies)
            raise
        self._copy(copies)
        return batch

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        pages = torch.tensor(copies, device=self.key.device).unbind(1)
        for layer in self._table.layers:
            for t in layer._tensors():
                t[pages[1]] = t[pages[0]]

    def check_batch(self, batch: PagedBatch) -> None:
        """Raise ValueError unless the batch is this cache's and its pages still are its sequences'."""
        self._table.check_batch(batch)

    def undo(self, batch: PagedBatch) -> None:
        """Take back the last `reserve` of these sequences, whose tokens were not written."""
        self._table.check_batch(batch)
        self._table.check_last(batch)
        self._table.undo(batch.sequences, batch.new_tokens, batch.copies)
        batch.uses[0] += 1  # so that it can't be used any more

    def append(
        self,
        key: Tensor | Sequence[Tensor],
        value: Tensor | Sequence[Tensor] | None = None,
        sequences: Sequence[int] | None = None,
    ) -> None:
        """`reserve` and `write` in one step, for a cache of one layer.

        Args:
            key: (batch, new_tokens, num_kv_heads, head_dim), or a list with (new_tokens, num_kv_heads,
                head_dim) for each sequence.
            value: likewise with head_dim_v; None with `value_in_key`.
            sequences: one for each batch entry; None: all that live.

        Raises:
            ValueError, TypeError: as `reserve` and `write`, and where layers share the pages (`shares`).
                Nothing has changed then.
        """
        counts = _token_counts("key", key)
        if value is not None and counts != (held := _token_counts("value", value)):
            raise ValueError(f"value has {held} new tokens, must have as many as key: {counts}")
        packed = [t if t is None or isinstance(t, Tensor) else torch.cat(list(t)) for t in (key, value)]
        assert packed[0] is not None
        self.check_one_layer()
        self.check_new(packed[0], packed[1])
        batch = self.reserve(sequences, counts)
        self.write(packed[0], packed[1], batch)

    @torch.no_grad()
    def write(self, key: Tensor, value: Tensor | None, batch: PagedBatch) -> None:
        """Store the new tokens of a batch that `reserve` returned.

        Args:
            key: (batch, new_tokens, num_kv_heads, head_dim), or packed (total, num_kv_heads, head_dim). In
                the cache's dtype; any floating-point dtype if that is float8_e4m3fn.
            value: likewise with head_dim_v; None with `value_in_key`.

        Raises:
            ValueError, TypeError: key or value does not fit, or the batch is out of date: a sequence was
                freed, truncated or forked since, its memory given to a later batch (`into`), or more reserved
                behind it in 8-bit pages. Nothing is written then.
        """
        self.check_batch(batch)
        if self.key_scale is not None:
            self._table.check_last(batch)
        self.check_new(key, value, batch)
        if self.key_scale is not None and has_kernels(key):
            from tilewise.gpu.launch.eight_bit_pages import write_pages

            storages = self.key, None if value is None else self.value
            places = batch.slots, batch.written, batch.kept
            write_pages(storages, (self.key_scale, self.value_scale), (key, value), places)
            return
        real = _real_rows(batch).to(key.device) if batch.has_padding else None
        slots = (batch.slots if real is None else batch.slots[real]).long()
        for storage, scale, new in ((self.key, self.key_scale, key), (self.value, self.value_scale, value)):
            if new is None:
                continue
            new = new.flatten(0, -3) if real is None else new.flatten(0, -3)[real]
            if scale is None:
                storage.view(-1, *storage.shape[2:])[slots] = new
            else:
                write_quantized(storage, scale, new, slots, batch)

    def check_one_layer(self) -> None:
        """Raise ValueError if layers share the pages: each that reserved would count the tokens again."""
        if len(self._table.layers) > 1:
            raise ValueError(
                f"{len(self._table.layers)} layers share these pages (`shares`): reserve() once for all, "
                "then write(), or attention_with_cache(..., batch=what reserve() returned), in each"
            )

    def check_new(self, key: Tensor, value: Tensor | None, batch: PagedBatch | None = None) -> None:
        """Raise ValueError or TypeError unless key and value are new tokens of the batch for this cache."""
        self._check_tensors(key, value)
        for name, t, storage in (("key", key, self.key), ("value", value, self.value)):
            if t is None:
                continue
            if t.ndim not in (3, 4) or t.shape[-2:] != storage.shape[2:]:
                heads, dim = storage.shape[2:]
                raise ValueError(
                    f"{name}.shape={tuple(t.shape)} must be (total_new, {heads}, {dim}), or "
                    f"(batch, new_tokens, {heads}, {dim}){layout_hint(t, heads, dim)}"
                )
            if batch is not None:
                if t.ndim == 4 and batch.new_tokens:
                    fits = len(t) == len(batch.sequences) and all(n == t.shape[1] for n in batch.new_tokens)
                else:
                    fits = math.prod(t.shape[:-2]) == batch.total
                if not fits:
                    raise ValueError(
                        f"{name}.shape={tuple(t.shape)} must hold new_tokens={list(batch.new_tokens)}"
                    )
        if value is not None and key.shape[:-2] != value.shape[:-2]:
            raise ValueError(
                f"value.shape={tuple(value.shape)} must have as many tokens as key {tuple(key.shape)}"
            )

    def gather(self, sequence: int) -> tuple[Tensor, Tensor]:
        """A copy of a sequence's keys and values: (length, num_kv_heads, head_dim) and with head_dim_v.

        In the cache's dtype; float32 where that is float8_e4m3fn.

        Raises:
            ValueError: the sequence does not live.
        """
        self._table.check(sequence)
        pages = torch.tensor(self._table.pages[sequence], dtype=torch.int64, device=self.key.device)
        rows = []
        for storage, scale in ((self.key, self.key_scale), (self.value, self.value_scale)):
            t = storage[pages] if scale is None else dequantized(storage[pages], scale[pages])
            rows.append(t.flatten(0, 1)[: self._table.lengths[sequence]].clone())
        return rows[0], rows[1]

    # ---- memory

    def used_bytes(self) -> int:
        """Bytes of the pages in use; a shared page counts once."""
        return self.memory_bytes() // max(1, len(self.key)) * (len(self.key) - self.free_pages)

    def bytes_per_token(self) -> int:
        """Bytes of one token in this layer, without scales: heads * (head_dim + head_dim_v) * item size."""
        columns = self.key.shape[3] + (0 if self.value_in_key else self.value.shape[3])
        return self.key.shape[2] * columns * self.key.element_size()


def _token_counts(name: str, new: Tensor | Sequence[Tensor]) -> list[int]:
    """New tokens of each sequence."""
    right = f"{name} must be (batch, new_tokens, heads, dim), or a list of (new_tokens, heads, dim)"
    if isinstance(new, Tensor) and new.ndim == 0:
        raise ValueError(f"{right}, not a number")
    if not isinstance(new, Tensor | list | tuple) or not all(isinstance(t, Tensor) for t in new):
        raise TypeError(f"{right}, not {type(new).__name__}")
    if not len(new):
        raise ValueError(f"{right}, not of no sequences")
    if any(t.ndim != 3 for t in new):
        raise ValueError(f"{right}, not of shapes {[tuple(t.shape) for t in new]}")
    if len({(t.shape[1:], t.dtype, t.device) for t in new}) > 1:
        raise ValueError(f"{right}, of the same heads, dim, dtype and device")
    return [len(t) for t in new]


def _real_rows(batch: PagedBatch) -> Tensor:
    """Which new tokens belong to a sequence, as indices."""
    is_real = torch.tensor([s != PADDING for s in batch.sequences], device="cpu")
    counts = torch.tensor(batch.new_tokens, device="cpu")
    return torch.repeat_interleave(is_real, counts).nonzero().flatten()
