"""What functions read besides numbers: traces are kept while it stays, and made again when it changes."""

from __future__ import annotations

import collections
import enum
import functools
import typing
from unittest import mock

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.core.functions import trace

X = torch.randn(1, 20, 2, 8)
FACTOR = 1


class Settings(dict):
    """A dictionary with attributes, or with items that are not stored."""

    width = 0

    def __missing__(self, name):
        return self.width


class Numbers(list):
    width = 0


class Number(int):
    width = 0


class Scaled(typing.NamedTuple):
    number: int

    @property
    def width(self):
        return self.number * FACTOR


class Kind(enum.Enum):
    LOCAL = 1

    @property
    def factor(self):
        return FACTOR


def with_width(holder, width):
    holder.width = width
    return lambda b, h, i, j: (i - j).abs() <= holder.width


def of_default(width):
    widths = collections.defaultdict(lambda: width)
    return lambda b, h, i, j: (i - j).abs() <= widths["any"]


def of_missing(width):
    widths = Settings()
    widths.width = width
    return lambda b, h, i, j: (i - j).abs() <= widths["any"]


def of_property(width):
    global FACTOR
    FACTOR, one = width, Scaled(1)
    return lambda b, h, i, j: (i - j).abs() <= one.width


def of_member(width):
    global FACTOR
    FACTOR, kind = width, Kind.LOCAL
    return lambda b, h, i, j: (i - j).abs() <= kind.factor


def of_globals(width):
    global FACTOR
    FACTOR = width
    return lambda b, h, i, j: (i - j).abs() <= globals()["FACTOR"]


def of_cycle(width):
    a, others = torch.zeros(3), [width]
    a.others, a.width = others, width
    others.append(others)
    return lambda b, h, i, j: (i - j).abs() <= a.width


FUNCTIONS = {
    "attribute of a dict": lambda width: with_width(Settings(), width),
    "attribute of a list": lambda width: with_width(Numbers([1]), width),
    "attribute of a number": lambda width: with_width(Number(1), width),
    "attribute of a tensor": lambda width: with_width(torch.zeros(3), width),
    "attribute of a parameter": lambda width: with_width(torch.nn.Parameter(torch.zeros(3)), width),
    "attribute of an enum's member": lambda width: with_width(Kind.LOCAL, width),
    "attribute of a partial": lambda width: with_width(functools.partial(print), width),
    "defaultdict": of_default,
    "missing item": of_missing,
    "property of a tuple": of_property,
    "property of an enum's member": of_member,
    "globals()": of_globals,
    "what holds itself": of_cycle,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_changes_is_seen(name):
    for width in (2, 7, 4):
        found = tilewise.attention(X, X, X, mask_mod=FUNCTIONS[name](width))
        torch.testing.assert_close(found, tilewise.attention(X, X, X, window=(width, width)))


def test_functions_that_share_a_tensor(monkeypatch):
    """They are traced once, whatever its values, and again where they read two."""
    traced = mock.Mock(wraps=trace._traced)
    monkeypatch.setattr(trace, "_traced", traced)

    def reading(first, second):
        return {
            "mask_mod": lambda b, h, i, j: first[i] == first[j],
            "score_mod": lambda s, b, h, i, j: s + 0.1 * second[j],
        }

    a, b, c = (torch.arange(20) % n for n in (3, 4, 5))
    for pair, times in (((a, a), 1), ((b, b), 1), ((a, b), 2), ((c, b), 2), ((c, c), 2)):
        options = reading(*pair)
        exact, _ = reference.attention(X, X, X, **options)
        torch.testing.assert_close(tilewise.attention(X, X, X, **options), exact.float())
        assert traced.call_count == times
