"""Which pages hold which sequence: the bookkeeping of paged caches, without their contents.

The host knows every length and page, so a wrong call is refused at once and nothing waits for the device.
What a kernel needs of it travels to the device as one block of integers for each batch: a `PagedBatch`.
"""

from __future__ import annotations

import itertools
import math
import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from tilewise.core.checks import shown
from tilewise.core.torch_private import compiles_here

PADDING = -1  # stands for a sequence where a batch has none
ALIGNED = 4  # integers of 16 bytes: for pointers aligned otherwise Triton would compile kernels anew


@dataclass(frozen=True)
class PagedBatch:
    """Some sequences of a cache with room for new tokens; all tensors int32 on the cache's device.

    New tokens are packed sequence after sequence; those of padding are written nowhere.
    """

    sequences: tuple[int, ...]  # `PADDING` for a row without one
    new_tokens: tuple[int, ...]  # of each
    lengths: Tensor  # (batch,) with the new tokens; 0 for padding
    cu_seqlens: Tensor  # (batch + 1,) each sequence's first new token, and the total
    page_table: Tensor  # (batch, pages)
    positions: Tensor  # (total new tokens,) each new token's place in its sequence
    slots: Tensor  # (total new tokens,) and in the storage: page * page_size + row; -1 for padding
    written: Tensor  # (written pages,) the pages that new tokens go to
    kept: Tensor  # (written pages,) rows of them that hold earlier tokens
    block: Tensor  # the memory of all these
    table: PageTable  # whose `reserve` this is of
    ends: tuple[int, ...]  # `lengths` as the host knows them
    changes: int  # the table's, when this was made
    uses: list[int]  # [how often `block` was filled], shared by all batches in that memory
    use: int  # which of them this is
    copies: tuple[tuple[int, int], ...]  # (source, copy): shared pages that the new tokens needed alone

    @property
    def total(self) -> int:
        return sum(self.new_tokens)

    @property
    def has_padding(self) -> bool:
        return PADDING in self.sequences


def integers(name: str, values: Iterable[int]) -> list[int]:
    """The values as a list; TypeError unless they are integers."""
    try:
        return [operator.index(n) for n in values]
    except TypeError:
        raise TypeError(f"{name}={shown(values)} must be a list of integers") from None


class PageTable:
    """Pages of sequences, with sharing: a page is copied when a sequence that shares it writes to it."""

    def __init__(self, num_pages: int, page_size: int, max_seqlen: int | None) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.max_seqlen = max_seqlen
        self._next = 0
        # Batches hold pages that may be another sequence's, or shared, after one of these changes.
        self.changes = 0
        self.changed: dict[int, int] = {}  # which of them was a sequence's last
        self.layers: WeakSet[Any] = WeakSet()  # the caches that share the pages, as long as they are used
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"layers": list(self.layers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, layers=WeakSet(state["layers"]))

    def clear(self) -> None:
        self.changes += 1
        self.changed.clear()
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.references = [0] * self.num_pages
        self.free_pages = list(range(self.num_pages - 1, -1, -1))

    def allocate(self) -> int:
        sequence, self._next = self._next, self._next + 1
        self.pages[sequence], self.lengths[sequence] = [], 0
        return sequence

    def _outdate(self, sequence: int) -> None:
        """Batches of a sequence that were made before must not be used any more."""
        self.changes += 1
        self.changed[sequence] = self.changes

    def fork(self, sequence: int) -> int:
        self.check(sequence)
        other = self.allocate()
        self.pages[other], self.lengths[other] = list(self.pages[sequence]), self.lengths[sequence]
        for page in self.pages[other]:
            self.references[page] += 1
        self._outdate(sequence)  # what they would write is shared now
        return other

    def truncate(self, sequence: int, length: int) -> None:
        self.check(sequence)
        if not isinstance(length, Integral) or not 0 <= length <= self.lengths[sequence]:
            held = self.lengths[sequence]
            raise ValueError(
                f"length={shown(length)} must be an integer from 0 to the {held} tokens of {sequence=}"
            )
        if length < self.lengths[sequence]:
            self._outdate(sequence)
            self._shorten(sequence, int(length))

    def _shorten(self, sequence: int, length: int) -> None:
        pages, keep = self.pages[sequence], -(-length // self.page_size)
        for page in reversed(pages[keep:]):
            self._release(page)
        del pages[keep:]
        self.lengths[sequence] = length

    def free(self, sequence: int) -> None:
        self.truncate(sequence, 0)
        self.changes += 1
        self.changed.pop(sequence, None)
        del self.pages[sequence], self.lengths[sequence]

    def check(self, sequence: int) -> None:
        """Raises ValueError unless the sequence lives."""
        if not isinstance(sequence, Integral) or sequence not in self.pages:
            raise ValueError(
                f"sequence={shown(sequence)} is not in the cache: it was freed, or is none that allocate() "
                "or fork() returned"
            )

    def check_batch(self, batch: PagedBatch) -> None:
        """Raises ValueError unless the batch is of this table and its tokens still count."""
        if compiles_here():  # one graph serves all batches
            return
        if batch.table is not self:
            raise ValueError("batch is of another cache: it must be what reserve() of this one returned")
        if batch.use != batch.uses[0]:
            raise ValueError(
                "batch is out of date: reserve(into=batch) has overwritten it since, or undo() taken back; "
                "it must be what the last reserve() returned"
            )
        if batch.changes == self.changes:
            return
        for sequence in batch.sequences:
            if sequence == PADDING:
                continue
            if sequence not in self.lengths or self.changed.get(sequence, 0) > batch.changes:
                raise ValueError(
                    f"batch is out of date: {sequence=} was freed or truncated, forked or copied since; "
                    "write a batch before that, or reserve() again"
                )

    def check_last(self, batch: PagedBatch) -> None:
        """Raises ValueError if tokens were reserved behind the batch's."""
        if compiles_here():
            return
        for sequence, end in zip(batch.sequences, batch.ends):
            if sequence != PADDING and self.lengths[sequence] != end:
                raise ValueError(
                    f"batch ends at {end} tokens of {sequence=}, which has {self.lengths[sequence]}: 8-bit "
                    "pages are quantized as a whole, so it must be written before the next reserve()"
                )

    def reserve(self, sequences: Sequence[int], new_tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Lengthen the sequences; the (source, copy) pages that must be copied before tokens are written.

        Raises:
            ValueError: a sequence does not live or occurs twice, a count is negative, max_seqlen or the free
                pages do not suffice. Nothing has changed then.
        """
        self._check_room(sequences, new_tokens)
        copies = []
        for sequence, count in zip(sequences, new_tokens):
            if sequence == PADDING or count == 0:
                continue
            pages, length = self.pages[sequence], self.lengths[sequence]
            if length % self.page_size and self.references[pages[-1]] > 1:
                self._outdate(sequence)  # the page that it leaves may be freed and used again
                copies.append((pages[-1], self._take()))
                self.references[pages[-1]] -= 1
                pages[-1] = copies[-1][1]
            while len(pages) * self.page_size < length + count:
                pages.append(self._take())
            self.lengths[sequence] = length + count
        return copies

    def undo(
        self, sequences: Sequence[int], new_tokens: Sequence[int], copies: Sequence[tuple[int, int]]
    ) -> None:
        """Take back a `reserve` just made, whose batch nobody uses: pages that it copied are shared again."""
        sources = {copy: source for source, copy in copies}
        for sequence, count in reversed(list(zip(sequences, new_tokens))):
            if sequence == PADDING or count == 0:
                continue
            self._shorten(sequence, self.lengths[sequence] - count)
            pages = self.pages[sequence]
            if pages and pages[-1] in sources:
                self._release(pages[-1])
                pages[-1] = sources[pages[-1]]
                self.references[pages[-1]] += 1

    def _check_room(self, sequences: Sequence[int], new_tokens: Sequence[int]) -> None:
        living = [sequence for sequence in sequences if sequence != PADDING]
        for sequence in living:
            self.check(sequence)
        if len(set(living)) < len(living):
            raise ValueError(f"sequences={list(sequences)} must not name a sequence twice")
        needed = 0
        sharers: dict[int, int] = {}  # sequences that still share a page, as the copies are made
        for sequence, count in zip(sequences, new_tokens):
            if count < 0:
                raise ValueError(f"new_tokens={list(new_tokens)} must be at least 0")
            if sequence == PADDING or count == 0:
                continue
            pages, length = self.pages[sequence], self.lengths[sequence]
            if self.max_seqlen is not None and length + count > self.max_seqlen:
                raise ValueError(
                    f"{count} new tokens do not fit: {sequence=} has {length} of max_seqlen={self.max_seqlen}"
                )
            needed += -(-(length + count) // self.page_size) - len(pages)
            if length % self.page_size:  # the last of those that share a page keeps it
                left = sharers.get(pages[-1], self.references[pages[-1]])
                needed, sharers[pages[-1]] = needed + (left > 1), left - 1
        if needed > len(self.free_pages):
            raise ValueError(
                f"new_tokens={list(new_tokens)} need {needed} pages, {len(self.free_pages)} of "
                f"num_pages={self.num_pages} are free: free a sequence first"
            )

    def _take(self) -> int:
        page = self.free_pages.pop()
        self.references[page] = 1
        return page

    def _release(self, page: int) -> None:
        self.references[page] -= 1
        if self.references[page] == 0:
            self.free_pages.append(page)

    def batch(
        self,
        sequences: Sequence[int],
        new_tokens: Sequence[int],
        copies: Sequence[tuple[int, int]],
        device: torch.device,
        into: PagedBatch | None,
    ) -> PagedBatch:
        """The sequences after `reserve` (which gave `copies`), on the device; `into`: in the memory of an
        earlier batch.

        Raises:
            ValueError: the earlier batch has other sizes.
        """
        width = None if into is None else into.page_table.shape[1]
        fields, shapes = self._fields(sequences, new_tokens, width)
        on_host = torch.frombuffer(sum(fields.values(), array("i")), dtype=torch.int32)
        if into is None:
            # A later batch of the same sizes may write to more pages: `written` and `kept` come last.
            # A row of n tokens writes to at most n // page_size + 2 of them, and to no more than n.
            total = sum(new_tokens)
            most = min(total, total // self.page_size + 2 * len(new_tokens))
            spare = 2 * (most + -most % ALIGNED - len(fields["written"]))
            with torch.inference_mode(False):  # tensors of inference mode could not be changed outside of it
                block = torch.empty(len(on_host) + spare, dtype=torch.int32, device=device)
            uses = [0]
        else:
            block, uses = into.block, into.uses
            for name in ("lengths", "cu_seqlens", "page_table", "positions", "slots"):
                shape, wanted = shapes[name], tuple(getattr(into, name).shape)
                if shape != wanted:
                    raise ValueError(f"into.{name} has shape {wanted}, must have {shape} for this batch")
        used = block[: len(on_host)]
        # Pinned, so that the copy does not wait for the device.
        used.copy_(on_host.pin_memory() if device.type == "cuda" else on_host, non_blocking=True)
        uses[0] += 1
        parts = used.split([len(numbers) for numbers in fields.values()])
        ends = tuple(fields["lengths"][: len(sequences)])
        views = {
            name: part[: math.prod(shapes[name])].view(shapes[name]) for name, part in zip(fields, parts)
        }
        return PagedBatch(
            tuple(sequences), tuple(new_tokens), **views, block=block,
            table=self, ends=ends, changes=self.changes, uses=uses, use=uses[0],
            copies=tuple(copies),
        )  # fmt: skip

    def _fields(
        self, sequences: Sequence[int], new_tokens: Sequence[int], width: int | None
    ) -> tuple[dict[str, array[int]], dict[str, tuple[int, ...]]]:
        """The tensors of a `PagedBatch` as numbers one after the other, each filled up, and their shapes."""
        size = self.page_size
        lengths = array("i", [0 if s == PADDING else self.lengths[s] for s in sequences])
        rows = [[] if s == PADDING else self.pages[s] for s in sequences]
        longest = max(map(len, rows), default=0)
        if width is None or width < longest:
            # As wide as a sequence can become, or a power of two: few shapes.
            most = None if self.max_seqlen is None else -(-self.max_seqlen // size)
            width = min(1 << max(0, longest - 1).bit_length(), self.num_pages) if most is None else most
        table, positions, slots, written, kept = (array("i") for _ in range(5))
        for sequence, pages, length, count in zip(sequences, rows, lengths, new_tokens):
            table.extend(pages)
            table.extend(itertools.repeat(0, width - len(pages)))
            start = max(0, length - count)
            positions.extend(range(start, start + count))
            if sequence == PADDING:
                slots.extend(itertools.repeat(-1, count))
                continue
            for at in range(start // size, len(pages) if count else 0):
                first, end = max(start, at * size), min(length, (at + 1) * size)
                place = (pages[at] - at) * size
                slots.extend(range(place + first, place + end))
                written.append(pages[at])
                kept.append(first - at * size)
        starts = array("i", itertools.accumulate(new_tokens, initial=0))
        batch, total, changed = len(lengths), (len(positions),), (len(written),)
        shapes = {
            "lengths": (batch,), "cu_seqlens": (batch + 1,), "page_table": (batch, width),
            "positions": total, "slots": total, "written": changed, "kept": changed,
        }  # fmt: skip
        fields = dict(zip(shapes, (lengths, starts, table, positions, slots, written, kept)))
        for numbers in fields.values():
            numbers.extend(itertools.repeat(0, -len(numbers) % ALIGNED))
        return fields, shapes
