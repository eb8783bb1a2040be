"""Tasks in the manner of the Long Range Arena, made here: no download, and no example that repeats.

An example is drawn from its task, its split and its number, so runs see the same ones in the same order. Held
out are other draws, of texts other files.

    listops         nested operations on digits, to be evaluated: 10 classes
    text            bytes of a source file: which package of the standard library is it from?
    retrieval       two such texts: are they from one package?
    pathfinder      a drawing of 32 × 32 pixels: does one dashed path join the two marked ends?
    path-x          the same with 128 × 128 pixels, 16,384 tokens
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

TRAIN, HELD_OUT = "train", "held out"
PADDING = 0

Example = tuple[list[Sequence[int]], int]  # the tokens of each document, and the class


class Batch(NamedTuple):
    """tokens: (batch, documents, seqlen) int64, `PADDING` behind the last; labels: (batch,)."""

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Task:
    """`draw(random, split, seqlen)` makes an example; `seqlen` is the most tokens that a document has."""

    name: str
    seqlen: int
    vocabulary: int
    classes: int
    draw: Callable[[random.Random, str, int], Example]
    documents: int = 1

    def batch(self, split: str, first: int, size: int, seqlen: int | None = None) -> Batch:
        """The examples from number `first` on.

        Example:
            >>> batch = TASKS["listops"].batch(TRAIN, 0, 3, seqlen=64)
            >>> batch.tokens.shape, batch.labels.shape
            (torch.Size([3, 1, 64]), torch.Size([3]))
        """
        seqlen = seqlen or self.seqlen
        tokens = torch.full((size, self.documents, seqlen), PADDING)
        labels = torch.empty(size, dtype=torch.int64)
        for row in range(size):
            numbers = random.Random(f"{self.name} {split} {first + row}")
            documents, labels[row] = self.draw(numbers, split, seqlen)
            for place, document in zip(tokens[row], documents, strict=True):
                place[: len(document)] = torch.tensor(document)
        return Batch(tokens, labels)


OPERATIONS: tuple[Callable[[list[int]], int], ...] = (
    min, max, lambda values: int(statistics.median(values)), lambda values: sum(values) % 10,
)  # fmt: skip
DIGIT, OPEN, CLOSE = 1, 11, 15  # the first token of each sort; as many operations open as there are
MOST_DEPTH, MOST_ARGUMENTS, NESTED = 10, 10, 0.25
FEW = 4  # an expression has more than this part of the tokens that it may have
LEAST_TOKENS = 16


def listops(numbers: random.Random, split: str, seqlen: int) -> Example:
    """An expression such as [max 2 [min 5 7] 0]; its class is its value."""
    if seqlen < LEAST_TOKENS:
        raise ValueError(f"seqlen={seqlen} must be {LEAST_TOKENS} or more, to hold an expression")
    while True:
        tokens: list[int] = []
        value = _expression(numbers, tokens, 1, seqlen)
        if seqlen // FEW < len(tokens) <= seqlen:
            return [tokens], value


def _expression(numbers: random.Random, tokens: list[int], depth: int, most: int) -> int:
    """Append an operation and its arguments; its value. One that grows longer than `most` is not finished."""
    operation = numbers.randrange(len(OPERATIONS))
    tokens.append(OPEN + operation)
    values = []
    for _ in range(numbers.randint(2, MOST_ARGUMENTS)):
        if depth < MOST_DEPTH and (depth == 1 or numbers.random() < NESTED) and len(tokens) <= most:
            values.append(_expression(numbers, tokens, depth + 1, most))
        else:
            values.append(numbers.randrange(10))
            tokens.append(DIGIT + values[-1])
    tokens.append(CLOSE)
    return OPERATIONS[operation](values)


PACKAGES = ("asyncio", "email", "encodings", "http", "importlib", "multiprocessing", "unittest", "xml")
HELD_OUT_FILES = 5  # every fifth


@functools.cache
def _files(package: str, split: str) -> tuple[bytes, ...]:
    """The package's sources of some length.

    Raises:
        ValueError: there are too few, as where the standard library is stripped.
    """
    folder = Path(sysconfig.get_path("stdlib")) / package
    contents = [c for path in sorted(folder.rglob("*.py")) if len(c := path.read_bytes()) > 500]
    files = tuple(c for n, c in enumerate(contents) if (n % HELD_OUT_FILES == 0) == (split == HELD_OUT))
    if not files:
        raise ValueError(f"{folder} holds no Python sources to read as text")
    return files


def _passage(numbers: random.Random, package: str, split: str, seqlen: int) -> list[int]:
    files = _files(package, split)
    content = numbers.choices(files, weights=[len(c) for c in files])[0]
    first = numbers.randrange(max(1, len(content) - seqlen + 1))
    return [1 + byte for byte in content[first : first + seqlen]]


def text(numbers: random.Random, split: str, seqlen: int) -> Example:
    label = numbers.randrange(len(PACKAGES))
    return [_passage(numbers, PACKAGES[label], split, seqlen)], label


def retrieval(numbers: random.Random, split: str, seqlen: int) -> Example:
    label = numbers.randrange(2)
    first = numbers.choice(PACKAGES)
    second = first if label else numbers.choice([p for p in PACKAGES if p != first])
    return [_passage(numbers, package, split, seqlen) for package in (first, second)], label


EMPTY, PATH, MARK = 0, 1, 2
TURN = 0.35  # radians, the most by which a path turns from one pixel to the next
GAP = 4  # pixels between paths, at least: more than a space, so that no two dashes could be joined wrongly
DASH, SPACE = 3, 2  # pixels drawn and left out, along a path
TRIES = 200
LEAST_SIDE = 28  # smaller squares have no room for two long paths

Point = tuple[int, int]


def drawing(numbers: random.Random, side: int, is_joined: bool) -> list[int]:
    """The pixels of a square, row by row: `EMPTY`, `PATH` or `MARK`.

    Two long paths, and half as long ones that distract. The two marks are the ends of one long path if
    `is_joined`, otherwise one end of each.

    Example:
        >>> pixels = drawing(random.Random(0), 32, is_joined=True)
        >>> len(pixels), sorted(set(pixels))
        (1024, [0, 1, 2])
    """
    while True:
        paths = _paths(numbers, side)
        if paths is not None:
            first, second = paths[:2]
            ends = (first[0], first[-1]) if is_joined else (first[0], second[-1])
            if max(abs(a - b) for a, b in zip(*ends)) > 2 * GAP:
                break
    pixels = [EMPTY] * (side * side)
    for path in paths:
        for n, (x, y) in enumerate(path):
            if n % (DASH + SPACE) < DASH:
                pixels[y * side + x] = PATH
    for end in ends:
        for x, y in _around([end], 1):
            pixels[y * side + x] = MARK
    return pixels


def _paths(numbers: random.Random, side: int) -> list[list[Point]] | None:
    """Two long paths and some short ones that keep apart; None if there was no room for the long ones."""
    long = round(0.8 * side)
    taken: set[Point] = set()
    paths: list[list[Point]] = []
    for number, length in enumerate([long] * 2 + [long // 2] * (side // 12)):
        found = next((p for _ in range(TRIES) if (p := _walk(numbers, side, length, taken))), None)
        if found is not None:
            paths.append(found)
            taken |= _around(found, GAP)
        elif number < 2:
            return None
    return paths


def _walk(numbers: random.Random, side: int, length: int, taken: set[Point]) -> list[Point] | None:
    """A smooth path of `length` pixels that meets neither the edge nor what is taken; None if it does."""
    x, y = (numbers.uniform(2, side - 3) for _ in range(2))
    angle = numbers.uniform(0, 2 * math.pi)
    bend = 0.0
    path: list[Point] = []
    while len(path) < length:
        point = round(x), round(y)
        if not (2 <= point[0] < side - 2 and 2 <= point[1] < side - 2) or point in taken:
            return None
        if not path or point != path[-1]:
            path.append(point)
        bend = 0.8 * bend + numbers.uniform(-TURN, TURN) / 2  # turns slowly: a curve, not a scribble
        angle += max(-TURN, min(TURN, bend))
        x, y = x + math.cos(angle), y + math.sin(angle)
    return path if len(set(path)) == len(path) else None


def _around(points: Iterable[Point], distance: int) -> set[Point]:
    steps = range(-distance, distance + 1)
    return {(x + dx, y + dy) for x, y in points for dx in steps for dy in steps}


def pathfinder(numbers: random.Random, split: str, seqlen: int) -> Example:
    label = numbers.randrange(2)
    side = math.isqrt(seqlen)
    if side * side != seqlen or side < LEAST_SIDE:
        raise ValueError(f"seqlen={seqlen} must be the square of a drawing's side, {LEAST_SIDE} or more")
    return [[1 + pixel for pixel in drawing(numbers, side, is_joined=bool(label))]], label


TASKS = {
    task.name: task
    for task in (
        Task("listops", 2048, CLOSE + 1, 10, listops),
        Task("text", 4096, 257, len(PACKAGES), text),
        Task("retrieval", 4096, 257, 2, retrieval, documents=2),
        Task("pathfinder", 32 * 32, 4, 2, pathfinder),
        Task("path-x", 128 * 128, 4, 2, pathfinder),
    )
}
