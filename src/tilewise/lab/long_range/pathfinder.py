"""Drawings of dashed paths, two ends of which are marked: joined by one path, or ends of two."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

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
