"""Who sends which keys to whom, and which blocks each rank computes when: data, made by a pure function.

A schedule is a list of steps. In the first a rank computes with its own keys. In each other it receives keys
from some ranks, those that a query of it can see and no others, while it computes the blocks of the step
before.

    method         keys of
    "ring"         one rank a step: at most two steps' keys are held
    "all_gather"   all ranks in two steps: most of them travel while some are computed with

Every rank makes the same schedule of all ranks, so both ends of a message agree on its rows. A block is a
call of one-device attention: rows of queries against rows of keys, with a window that is aligned at their
ends. The keys of a step lie in the order of the sequence, so that neighbouring blocks can be joined into few
long ones.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tilewise.core.mask import Visibility
from tilewise.distributed.layout import Layout, Piece, num_tokens

MOST_ASKED = 64  # ranks: of more it would take too long to see which of them need nothing of each other
Range = tuple[int, int]


def num_rows(ranges: tuple[Range, ...]) -> int:
    return sum(b - a for a, b in ranges)


class Message(NamedTuple):
    """Rows of keys from one rank to another. More than one range: they travel packed."""

    peer: int
    rows: tuple[Range, ...]  # of the sender's own keys, or of the receiver's keys in this step


class Block(NamedTuple):
    """Queries [q0, q1) of the rank against keys [k0, k1) of the step."""

    q0: int
    q1: int
    k0: int
    k1: int
    left: int | None  # the window, aligned at the last query and the last key, as `Options` has it
    right: int | None
    row: int  # the token of the first query
    column: int  # the token of the first key
    is_alone: bool = False  # none of its queries is in another block

    @property
    def window(self) -> tuple[int | None, int | None]:
        return self.left, self.right

    @property
    def pairs(self) -> int:
        """(query, key) pairs that are visible, for the cost model."""
        return Visibility(self.q1 - self.q0, self.k1 - self.k0, self.left, self.right).visible_pairs()


@dataclass(frozen=True, eq=False)  # schedules are cached, so that a step is found by its identity
class Step:
    """Keys that arrive together, and what is computed with them."""

    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    pieces: tuple[Piece, ...]  # the keys that arrive, or the rank's own, one behind the other
    blocks: tuple[Block, ...] = ()
    is_own: bool = False

    @functools.cached_property
    def keys(self) -> int:
        """How many."""
        return num_tokens(self.pieces)


class Rules(NamedTuple):
    """What of a call a schedule depends on."""

    left: int | None  # the window between tokens; causal is right=0
    right: int | None
    needs_tokens: bool  # scores depend on more of positions than the window: ALiBi, a bias, a mask
    has_alibi: bool = False
    multiple: int = 1  # blocks begin so many tokens, or a multiple of that, behind the begin of a piece


@functools.lru_cache(maxsize=128)
def make_schedule(
    layout: Layout, rank: int, rules: Rules, method: str, is_backward: bool = False
) -> tuple[Step, ...]:
    """The steps of one rank. `method`: "ring" or "all_gather".

    A backward also sends gradients back, the last of them when no keys of others are left to work with. So it
    keeps the rank's later queries and its own keys for the end.
    """
    steps = _steps_with_others(layout, rank, rules, method)
    length, pieces = layout.length(rank), layout.pieces[rank]
    if not is_backward:
        return Step((), (), pieces, _first_blocks(pieces, rules, steps), is_own=True), *steps
    cuts = (0, _half(pieces, rules.multiple), length) if steps else (0, length)
    own = [
        Step((), (), pieces, _own_blocks(pieces, rules, rows), is_own=True)
        for rows in itertools.pairwise(cuts)
    ]
    return (own[0], *steps, *own[1:])


def _first_blocks(pieces: tuple[Piece, ...], rules: Rules, steps: Sequence[Step]) -> tuple[Block, ...]:
    """All of a rank's queries and its own keys.

    Where most queries are in one block only, as with windows, these are cut from the others: their results
    are final, and are in 16 bits at once.
    """
    length = num_tokens(pieces)
    blocks = _own_blocks(pieces, rules, (0, length))
    others = [block for step in steps for block in step.blocks]
    alone = _alone(blocks, others, length)
    # ALiBi would have more blocks for each row that is cut off, dropout wants blocks that begin at multiples
    may_cut = alone == [(0, length)] or not (rules.has_alibi or rules.multiple > 1)
    if 2 * num_rows(tuple(alone)) <= length or not may_cut:
        return blocks
    found: list[Block] = []
    for rows in itertools.pairwise(sorted({0, length, *itertools.chain(*alone)})):
        blocks = _own_blocks(pieces, rules, rows)
        is_alone = rows in alone and sum(b.q1 - b.q0 for b in blocks) <= rows[1] - rows[0]
        found += [block._replace(is_alone=is_alone) for block in blocks]
    return tuple(found)


def _alone(own: Sequence[Block], others: Sequence[Block], length: int) -> list[Range]:
    """Rows that are in one block of a rank's own keys at most, and in none of others."""
    change = dict.fromkeys((0, length), 0)  # of a row's blocks from this row on; those of others count twice
    for block, weight in itertools.chain(zip(own, itertools.repeat(1)), zip(others, itertools.repeat(2))):
        change[block.q0] = change.get(block.q0, 0) + weight
        change[block.q1] = change.get(block.q1, 0) - weight
    alone: list[Range] = []
    rows, count = sorted(change), 0
    for a, b in itertools.pairwise(rows):
        count += change[a]
        if count <= 1:
            a = alone.pop()[0] if alone and alone[-1][1] == a else a
            alone.append((a, b))
    return alone


def _half(pieces: tuple[Piece, ...], multiple: int) -> int:
    """A row near the middle of a rank's rows, a multiple behind the first of its piece."""
    half = num_tokens(pieces) // 2
    first = max((row for _, row in _with_offsets(pieces) if row <= half), default=0)
    return half - (half - first) % multiple


@functools.lru_cache(maxsize=128)
def _steps_with_others(layout: Layout, rank: int, rules: Rules, method: str) -> tuple[Step, ...]:
    own = _with_offsets(layout.pieces[rank])
    return tuple(
        replace(step, blocks=_blocks(own, _with_offsets(step.pieces), rules))
        for step in traffic(layout, rank, rules, method)
    )


@functools.lru_cache(maxsize=128)
def traffic(layout: Layout, rank: int, rules: Rules, method: str) -> tuple[Step, ...]:
    """The steps with others, without their blocks."""
    found = []
    for distances in _rounds(layout, rules, method):
        sources, targets = (sorted((rank + n * sign) % layout.world for n in distances) for sign in (-1, 1))
        needed = {source: _needed(layout, rank, source, rules) for source in sources}
        wanted = {target: _needed(layout, target, rank, rules) for target in targets}
        pieces = tuple(sorted(itertools.chain(*needed.values())))
        own = layout.pieces[rank]
        found.append(Step(_messages(pieces, needed), _messages(own, wanted), pieces))
    return tuple(found)


def _rounds(layout: Layout, rules: Rules, method: str) -> list[tuple[int, ...]]:
    """For each step after the first, the distances over which keys travel.

    Zigzag, causal work is even in each: all ranks are done with a step at the same time.
    """
    distances = _distances(layout, rules)
    if method == "all_gather":
        few = max(1, len(distances) // 3)  # they travel beside the rank's own work, the others beside theirs
        return [group for group in (distances[:few], distances[few:]) if group]
    return [(n,) for n in distances]


@functools.lru_cache(maxsize=128)
def _distances(layout: Layout, rules: Rules) -> tuple[int, ...]:
    """The distances over which any rank needs keys of another.

    All ranks take the same steps, also those in which some have nothing to send: messages of two steps that
    came in another order on two ranks would wait for each other.
    """
    world, everything = layout.world, tuple(range(1, layout.world))
    if world > MOST_ASKED or (rules.left is None and len(layout.starts) == 2):  # all need keys of all
        return everything
    ranks = range(world)
    return tuple(n for n in everything if any(_needed(layout, r, (r - n) % world, rules) for r in ranks))


def _visible(a: int, b: int, c: int, d: int, rules: Rules) -> tuple[int, int, int, int]:
    """Queries [a, b) and keys [c, d) without those that see, or are seen by, none of the others."""
    query, key = a, c
    if rules.left is not None:
        c = max(c, a - rules.left)
    if rules.right is not None:
        d = min(d, b + rules.right)
    if c >= d:
        return a, a, c, c
    if rules.right is not None:
        a = max(a, c - rules.right)
    if rules.left is not None:
        b = min(b, d + rules.left)
    if a >= b:
        return a, a, c, c
    return a - (a - query) % rules.multiple, b, c - (c - key) % rules.multiple, d


def _block(q: Piece, k: Piece, rows: int, keys: int, rules: Rules) -> Block | None:
    """The block of two pieces of a document, whose first rows are `rows` and `keys`; None if it is empty."""
    a, b, c, d = _visible(q.start, q.stop, k.start, k.stop, rules)
    if a == b:
        return None
    left = right = None
    if rules.left is not None and c < b - 1 - rules.left:
        left = rules.left - (b - d)
    if rules.right is not None and d - 1 > a + rules.right:
        right = rules.right + (b - d)
    q0, k0 = rows + a - q.start, keys + c - k.start
    return Block(q0, q0 + b - a, k0, k0 + d - c, left, right, a, c)


def _with_offsets(pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
    """Each piece, and its first row where all lie one behind the other."""
    offsets = itertools.accumulate((p.stop - p.start for p in pieces), initial=0)
    return list(zip(pieces, offsets))


def _own_blocks(pieces: tuple[Piece, ...], rules: Rules, rows: Range) -> tuple[Block, ...]:
    """Some of a rank's queries and its own keys. As far as only order counts, a document is one block."""
    placed = _with_offsets(pieces)
    if rules.needs_tokens or rules.left is not None or rules.right not in (None, 0):
        keys = placed
        if rules.has_alibi:  # which wants keys to be all before, all behind, or exactly the queries
            end = num_tokens(pieces)
            keys = [k for span in ((0, rows[0]), rows, (rows[1], end)) for k in _within(placed, span)]
        return _blocks(_within(placed, rows), keys, rules)
    blocks = []
    for _, group in itertools.groupby(placed, lambda p: p[0].document):
        keys = list(group)
        queries = _within(keys, rows)
        if not queries:
            continue
        (first, q0), (last, row), k0 = queries[0], queries[-1], keys[0][1]
        q1 = k1 = row + last.stop - last.start
        if rules.right is None:
            last, row = keys[-1]
            k1 = row + last.stop - last.start
        right = rules.right if q1 - q0 > 1 else None
        blocks.append(Block(q0, q1, k0, k1, None, right, first.start, keys[0][0].start))
    return tuple(blocks)


def _within(placed: list[tuple[Piece, int]], rows: Range) -> list[tuple[Piece, int]]:
    """What of the pieces lies in some rows."""
    found = []
    for piece, row in placed:
        a, b = max(rows[0], row), min(rows[1], row + piece.stop - piece.start)
        if a < b:
            found.append((piece._replace(start=piece.start + a - row, stop=piece.start + b - row), a))
    return found


def _blocks(
    queries: list[tuple[Piece, int]], keys: list[tuple[Piece, int]], rules: Rules
) -> tuple[Block, ...]:
    by_document = {
        document: list(group) for document, group in itertools.groupby(keys, lambda k: k[0].document)
    }
    found = [
        block
        for q, rows in queries
        for k, first in by_document.get(q.document, [])
        if (block := _block(q, k, rows, first, rules)) is not None
    ]
    return _joined(found, rules)


def _joined(blocks: list[Block], rules: Rules) -> tuple[Block, ...]:
    """Blocks without a window that touch become one: along the keys first, then along the queries."""
    for along_keys in (True, False):
        done: dict[tuple[int, ...], Block] = {}
        for number, block in enumerate(blocks):
            if block.window != (None, None):
                done[(number,)] = block
                continue
            same = (block.q0, block.q1) if along_keys else (block.k0, block.k1)
            end = block.k0 if along_keys else block.q0
            before = done.pop((*same, end), None)
            if before is not None and _touch(before, block, along_keys, rules):
                block = block._replace(q0=before.q0, k0=before.k0, row=before.row, column=before.column)
            elif before is not None:
                done[(-1, number)] = before
            done[(*same, block.k1 if along_keys else block.q1)] = block
        blocks = list(done.values())
    return tuple(blocks)


def _touch(before: Block, block: Block, along_keys: bool, rules: Rules) -> bool:
    """Whether two blocks that are neighbours in memory may be one."""
    if not rules.needs_tokens:
        return True
    if along_keys:
        is_next = before.column + before.k1 - before.k0 == block.column
        return is_next and (not rules.has_alibi or _side(before) == _side(block))
    return before.row + before.q1 - before.q0 == block.row and before.column == block.column


def _side(block: Block) -> int:
    """Whether keys are before (-1) or behind (1) the queries, or are the queries (0)."""
    return (block.column > block.row) - (block.column < block.row)


@functools.lru_cache(maxsize=4096)
def _needed(layout: Layout, rank: int, source: int, rules: Rules) -> tuple[Piece, ...]:
    """What of a source's keys some query of a rank can see."""
    queries: dict[int, list[Piece]] = {}
    for piece in layout.pieces[rank]:
        queries.setdefault(piece.document, []).append(piece)
    needed: list[Piece] = []
    for k in layout.pieces[source]:
        seen = sorted(
            (c, d)
            for q in queries.get(k.document, [])
            for a, b, c, d in [_visible(q.start, q.stop, k.start, k.stop, rules)]
            if a < b
        )
        for c, d in seen:
            if needed and needed[-1].document == k.document and c <= needed[-1].stop:
                last = needed[-1]
                needed[-1] = last._replace(stop=max(last.stop, d))
            else:
                needed.append(Piece(k.document, c, d))
    return tuple(needed)


def _messages(pieces: tuple[Piece, ...], parts: dict[int, tuple[Piece, ...]]) -> tuple[Message, ...]:
    """For each peer those parts of the pieces that it sends or receives, if there are any."""
    return tuple(Message(peer, rows_of(pieces, found)) for peer, found in parts.items() if found)


def rows_of(pieces: tuple[Piece, ...], parts: tuple[Piece, ...]) -> tuple[Range, ...]:
    """Where parts of pieces lie that are one behind the other; rows that touch are one range."""
    placed = _with_offsets(pieces)
    starts = [p.start for p in pieces]
    rows: list[Range] = []
    for part in parts:
        piece, row = placed[bisect.bisect_right(starts, part.start) - 1]
        start, end = row + part.start - piece.start, row + part.stop - piece.start
        if rows and rows[-1][1] == start:
            start = rows.pop()[0]
        rows.append((start, end))
    return tuple(rows)
