"""Random operations on both caches, against plain tensors of each sequence's tokens.

    python tests/torture/cache_model.py [SECONDS [SEED]]

Whatever a cache does is done to dictionaries of tensors as well. After every operation lengths, contents and
pages must be equal; attention is compared with the reference. The seed is printed: the same one with as many
steps does the same again.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise import reference
from tilewise.cache.pages import PagedBatch

HEADS, KV_HEADS, DIM, DIM_V, PAGE, PAGES = 4, 2, 8, 6, 16, 12
COUNTS = (0, 1, 1, 1, 2, 15, 16, 17, 40)


def tokens(*shape: int) -> tuple[Tensor, Tensor]:
    """Fresh keys and values."""
    return torch.randn(*shape, KV_HEADS, DIM), torch.randn(*shape, KV_HEADS, DIM_V)


def check_attention(out: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
    """out (n, heads, dim) of one sequence's last queries."""
    exact, _ = reference.attention(query[None], key[None], value[None], causal=True, **options)
    torch.testing.assert_close(out[None].double(), exact, rtol=1e-4, atol=1e-5)


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


class PagedModel:
    """A cache of two layers; `held` has each sequence's keys and values, NaN where none were written yet."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.cache = tilewise.PagedKVCache(
            PAGES, PAGE, KV_HEADS, DIM, head_dim_v=DIM_V, max_seqlen=100, dtype=torch.float32
        )
        self.twin = tilewise.PagedKVCache(
            PAGES, PAGE, KV_HEADS, DIM, head_dim_v=DIM_V, dtype=torch.float32, shares=self.cache
        )
        self.held: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of each layer
        self.dead: list[int] = []
        # (batch, whether each of its sequences is as it was then)
        self.batches: list[tuple[PagedBatch, dict[int, bool]]] = []

    @property
    def layers(self) -> tuple[tilewise.PagedKVCache, tilewise.PagedKVCache]:
        return self.cache, self.twin

    def some(self) -> int | None:
        return self.rng.choice(sorted(self.held)) if self.held else None

    def outdate(self, sequence: int) -> None:
        for _, alive in self.batches:
            if sequence in alive:
                alive[sequence] = False

    # ---- operations

    def allocate(self) -> None:
        if len(self.held) < 6:
            sequence = self.cache.allocate()
            assert sequence not in self.held and sequence not in self.dead
            self.held[sequence] = [tokens(0), tokens(0)]

    def fork(self) -> None:
        if (sequence := self.some()) is not None and len(self.held) < 6:
            other = self.cache.fork(sequence)
            self.held[other] = [(k.clone(), v.clone()) for k, v in self.held[sequence]]
            self.outdate(sequence)

    def truncate(self) -> None:
        if (sequence := self.some()) is not None:
            length = self.rng.randint(0, self.cache.length(sequence))
            if length < self.cache.length(sequence):
                self.outdate(sequence)
            self.cache.truncate(sequence, length)
            self.held[sequence] = [(k[:length], v[:length]) for k, v in self.held[sequence]]

    def free(self) -> None:
        if (sequence := self.some()) is not None:
            self.cache.free(sequence)
            self.outdate(sequence)
            self.dead.append(sequence)
            del self.held[sequence]

    def reset(self) -> None:
        if self.rng.random() < 0.1:
            self.cache.reset()
            for sequence in list(self.held):
                self.outdate(sequence)
                self.dead.append(sequence)
            self.held.clear()

    def reserve(self) -> None:
        """Room for tokens of some sequences, in new memory or an earlier batch's; they are written later."""
        chosen = self.rng.sample(sorted(self.held), self.rng.randint(0, min(3, len(self.held))))
        counts = [self.rng.choice(COUNTS) for _ in chosen]
        free = self.cache.free_pages
        lengths = {s: self.cache.length(s) for s in self.held}
        into = self.rng.choice(self.batches) if self.batches and self.rng.random() < 0.3 else None
        pages = {s: list(self.cache._table.pages[s]) for s in chosen}
        try:
            batch = self.cache.reserve(chosen, counts, into=into and into[0])
        except ValueError as error:
            assert any(word in str(error) for word in ("do not fit", "pages", "into.")), error
            assert self.cache.free_pages == free
            assert {s: self.cache.length(s) for s in self.held} == lengths
            self.forget(chosen)
            return
        self.outdate_copied(pages)
        if into is not None:  # all batches in this memory
            self.batches = [(b, alive) for b, alive in self.batches if b.block is not batch.block]
        for sequence, count in zip(chosen, counts):
            empty = (
                torch.full((count, KV_HEADS, DIM), torch.nan),
                torch.full((count, KV_HEADS, DIM_V), torch.nan),
            )
            self.held[sequence] = [
                (torch.cat((k, empty[0])), torch.cat((v, empty[1]))) for k, v in self.held[sequence]
            ]
        self.batches.append((batch, dict.fromkeys(chosen, True)))
        self.batches = self.batches[-8:]

    def outdate_copied(self, before: dict[int, list[int]]) -> None:
        """Sequences whose last page became their own have left the one that older batches name."""
        for sequence, pages in before.items():
            if self.cache._table.pages[sequence][: len(pages)] != pages:
                self.outdate(sequence)

    def forget(self, sequences: list[int]) -> None:
        """A refused step may outdate their batches: it has copied a page and shared it again."""
        self.batches = [(b, alive) for b, alive in self.batches if not set(sequences) & set(alive)]

    def write(self) -> None:
        """A batch of any age: written where it still may be, else refused; both layers take their own."""
        if not self.batches:
            return
        batch, alive = self.rng.choice(self.batches)
        layer = self.rng.randrange(2)
        cache = self.layers[layer]
        key, value = tokens(batch.total)
        if not all(alive.values()):
            assert refused(lambda: cache.write(key, value, batch)), "a batch out of date was written"
            return
        if self.rng.random() < 0.5:
            cache.write(key, value, batch)
        else:
            query = torch.randn(batch.total, HEADS, DIM)
            tilewise.attention_with_cache(query, cache, key, value, batch=batch)
        at = 0
        for sequence, count, end in zip(batch.sequences, batch.new_tokens, batch.ends):
            for own, new in zip(self.held[sequence][layer], (key, value)):
                own[end - count : end] = new[at : at + count]
            at += count

    def append(self) -> None:
        """What `append` does, in both layers: it is for a cache of one layer."""
        if (sequence := self.some()) is None:
            return
        count = self.rng.choice(COUNTS)
        pages = {sequence: list(self.cache._table.pages[sequence])}
        (key, value), length = tokens(count), self.cache.length(sequence)
        assert refused(lambda: self.cache.append(key[None], value[None], [sequence]))
        try:
            batch = self.cache.reserve([sequence], count)
        except ValueError:
            assert self.cache.length(sequence) == length
            self.forget([sequence])
            return
        self.outdate_copied(pages)
        for layer, cache in enumerate(self.layers):
            cache.write(key, value, batch)
            own = self.held[sequence][layer]
            self.held[sequence][layer] = tuple(torch.cat(pair) for pair in zip(own, (key, value)))  # type: ignore[call-overload]

    def attend(self) -> None:
        """Any sequence that is written whole, by its number or by a batch without new tokens."""
        sequence, layer = self.some(), self.rng.randrange(2)
        if sequence is None or self.held[sequence][layer][0].isnan().any():
            return
        key, value = self.held[sequence][layer]
        query = torch.randn(1, min(len(key), self.rng.randint(1, 3)), HEADS, DIM)
        where = [sequence] if self.rng.random() < 0.5 else self.cache.reserve([sequence], 0)
        out = tilewise.attention_with_cache(query, self.layers[layer], batch=where)
        check_attention(out[0], query[0], key, value)  # type: ignore[index]

    def misuse(self) -> None:
        """What is wrong is refused; `check` sees that nothing has changed."""
        wrong = self.rng.choice([*self.dead, 10**6, -1])
        calls = [
            lambda: self.cache.free(wrong),
            lambda: self.cache.fork(wrong),
            lambda: self.cache.truncate(wrong, 0),
            lambda: self.cache.gather(wrong),
            lambda: self.cache.reserve([10**6], 1),
        ]
        assert refused(self.rng.choice(calls))

    # ---- what must hold

    def check(self) -> None:
        assert self.cache.sequences == sorted(self.held)
        table, uses = self.cache._table, [0] * PAGES
        for sequence, layers in self.held.items():
            assert self.cache.length(sequence) == len(layers[0][0])
            for page in table.pages[sequence]:
                uses[page] += 1
            for cache, expected in zip(self.layers, layers):
                for found, own in zip(cache.gather(sequence), expected):
                    written = ~own.isnan()
                    assert torch.equal(found[written], own[written]), f"tokens of {sequence=} changed"
        assert uses == table.references
        assert sorted(table.free_pages) == [page for page in range(PAGES) if not uses[page]]


class ContiguousModel:
    """A cache of three sequences, whose lengths the caller changes too."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.capacity = rng, 40
        self.cache = tilewise.KVCache(3, self.capacity, KV_HEADS, DIM, head_dim_v=DIM_V, dtype=torch.float32)
        self.held = [tokens(0) for _ in range(3)]

    def grow(self, key: Tensor, value: Tensor) -> None:
        self.held = [(torch.cat((k, key[n])), torch.cat((v, value[n]))) for n, (k, v) in enumerate(self.held)]

    def fits(self, count: int) -> bool:
        return max(len(k) for k, _ in self.held) + count <= self.capacity

    def append(self) -> None:
        key, value = tokens(3, self.rng.choice((0, 1, 1, 2, 7, 20)))
        if self.fits(key.shape[1]):
            self.cache.append(key, value)
            self.grow(key, value)
        else:
            assert refused(lambda: self.cache.append(key, value))

    def attend(self) -> None:
        """With new tokens or without, refused or not."""
        count = self.rng.choice((0, 1, 1, 3))
        key, value = tokens(3, count)
        query = torch.randn(3, max(1, count), HEADS, DIM)
        new = (key, value) if count else (None, None)
        softcap = self.rng.choice((0.0, 2.0, -1.0))

        def call() -> Tensor:
            return tilewise.attention_with_cache(query, self.cache, *new, softcap=softcap)  # type: ignore[return-value]

        if softcap < 0 or not self.fits(count):
            assert refused(call)
            return
        out = call()
        self.grow(key, value)
        for n, (own_k, own_v) in enumerate(self.held):
            if len(own_k) >= query.shape[1]:
                check_attention(out[n], query[n], own_k, own_v, softcap=softcap)

    def truncate(self) -> None:
        """The caller rolls back, in place or by new lengths."""
        kept = [self.rng.randint(0, len(k)) for k, _ in self.held]
        lengths = torch.tensor(kept, dtype=torch.int32)
        if self.rng.random() < 0.5:
            self.cache.lengths.copy_(lengths)
        else:
            self.cache.lengths = lengths
        self.held = [(k[:n], v[:n]) for n, (k, v) in zip(kept, self.held)]

    def reset(self) -> None:
        if self.rng.random() < 0.3:
            self.cache.reset()
            self.held = [tokens(0) for _ in range(3)]

    def check(self) -> None:
        assert self.cache.lengths.tolist() == [len(k) for k, _ in self.held]
        for n, pair in enumerate(self.held):
            for storage, own in zip((self.cache.key, self.cache.value), pair):
                assert torch.equal(storage[n, : len(own)], own), f"tokens of sequence {n} changed"


PAGED = (
    *("allocate", "allocate", "fork", "truncate", "free", "reset"),
    *("reserve", "reserve", "reserve", "write", "write", "write", "append", "append", "attend", "misuse"),
)
CONTIGUOUS = ("append", "append", "attend", "attend", "truncate", "reset")
STEPS_A_MODEL = 200  # then a new, empty one


@torch.no_grad()
def run(*, seconds: float | None = None, steps: int | None = None, seed: int | None = None) -> int:
    """Work for so long, or so many operations of each cache; the number of operations done.

    Raises:
        AssertionError: a cache and its model differ; the note names the seed and the operations before.
    """
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    print(f"cache_model: seed={seed}", flush=True)
    rng, end, done = random.Random(seed), time.monotonic() + (seconds or 0.0), 0
    torch.manual_seed(seed)
    while done < (steps or 0) or time.monotonic() < end:
        models = (PagedModel(rng), PAGED), (ContiguousModel(rng), CONTIGUOUS)
        log: list[str] = []
        for _ in range(STEPS_A_MODEL if steps is None else min(STEPS_A_MODEL, steps - done)):
            for model, operations in models:
                log.append(f"{type(model).__name__}.{rng.choice(operations)}")
                try:
                    getattr(model, log[-1].split(".")[1])()
                    model.check()  # type: ignore[attr-defined]
                except Exception as error:
                    error.add_note(f"seed={seed}, step {done}; the last operations: {', '.join(log[-30:])}")
                    raise
            done += 1
    return done


if __name__ == "__main__":
    arguments = sys.argv[1:]
    number = int(arguments[1]) if len(arguments) > 1 else None
    print(run(seconds=float(arguments[0]) if arguments else 60.0, seed=number), "steps")
