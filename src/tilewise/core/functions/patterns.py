"""What options say of mask and score functions: causal, window, softcap, bias, ALiBi, found in an expression.

mask     rest & (j <= i + right) & (j >= i - left), in any spelling
score    softcap * tanh(score / softcap) + bias[b, h, i, j] - slope * |i - j|, as a whole
         where(visible, score, -inf): what is visible is part of the mask
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from tilewise.core.checks import MIN_SOFTCAP
from tilewise.core.functions.expression import BOOL, FLOAT, INDICES, Functions
from tilewise.core.functions.trace import MAX_TRACES

BEHIND, AHEAD = (1, -1), (-1, 1)  # the factors of i and j in i - j and j - i
MAX_SOFTCAP = torch.finfo(torch.float32).max
NO_BOUNDS = (math.inf, math.inf, None)
Term = tuple[int, bool]  # a node, and whether it is its negation that is meant


class Alibi(NamedTuple):
    """-slope * |i - j|; `is_causal`: -slope * (i - j), which is the same where no key is ahead."""

    slope: int  # its node: a load at [h] or [b, h], or computed from h
    is_negated: bool  # the slope is the node's negative
    is_causal: bool


class Score(NamedTuple):
    softcap: float | None
    bias: int | None  # its node: a load at some of b, h, i and j, and at numbers
    alibi: Alibi | None


class Said(NamedTuple):
    """What options say of some functions.

    Attributes:
        left, right: a query sees keys from i - left to i + right; infinite where nothing is hidden.
        score: what becomes of it; None if no option says that.
        masked: the functions that are left without the window; these functions, if they have none.
        rest: those that are left without the score function too.
    """

    left: float
    right: float
    score: Score | None
    masked: Functions
    rest: Functions


@functools.lru_cache(maxsize=MAX_TRACES)
def said(functions: Functions) -> Said | None:
    """None if no option says anything of them."""
    return Reader(functions).said()


class Reader:
    """Of each node, what it reads, and whether it is linear in i and j."""

    def __init__(self, functions: Functions) -> None:
        self.functions, self.graph = functions, functions.graph.copy()  # nodes keep their numbers
        self.nodes = self.graph.nodes
        self.linear: dict[int, tuple[float, float, float]] = {}  # x, y, z of x * i + y * j + z
        self.reads: dict[int, set[str]] = {}  # of score, b, h, i, j and load
        for n in self.graph.reachable(functions.roots):
            op, args, *_ = self.nodes[n]
            own = {op} if op in ("score", "load", *INDICES) else set()
            self.reads[n] = own.union(*(self.reads[a] for a in args))
            form = self._linear(n)
            if form is not None:
                self.linear[n] = form

    def said(self) -> Said | None:
        score, mask = self.functions.score, self.functions.mask
        left, right, rest = NO_BOUNDS if mask is None else self._window((mask, False))
        while score is not None and (visible := self._visible_score(score)):
            score, condition = visible
            window = self._window(condition)
            left, right = min(left, window[0]), min(right, window[1])
            rest = self._both(rest, window[2])
        found, masked = self._score(score), self.functions
        if (mask, score) != (rest, self.functions.score):
            masked = self._left(score, rest)
        elif found is None:
            return None
        return Said(left, right, found, masked, self._left(None, rest))

    def _left(self, score: int | None, mask: int | None) -> Functions:
        return Functions(self.graph, score, mask, self.functions.tensors)

    def _linear(self, n: int) -> tuple[float, float, float] | None:
        op, args, kind, value = self.nodes[n]
        if op == "const":
            return (0, 0, value) if math.isfinite(value) else None
        if op in ("i", "j"):
            return (1, 0, 0) if op == "i" else (0, 1, 0)
        forms = [self.linear[a] for a in args if a in self.linear]
        if not args or len(forms) < len(args):
            return None
        a, b = forms[0], forms[-1]
        if op == FLOAT:
            return a
        if op == "neg":
            return (-a[0], -a[1], -a[2])
        if op in ("add", "sub"):
            sign = 1 if op == "add" else -1
            return (a[0] + sign * b[0], a[1] + sign * b[1], a[2] + sign * b[2])
        factors = [(x, y) for x, y in ((a, b), (b, a)) if x[:2] == (0, 0)]
        if op == "mul" and kind != FLOAT and factors:
            (_, _, factor), other = factors[0]
            return (factor * other[0], factor * other[1], factor * other[2])
        return None

    def _window(self, term: Term) -> tuple[float, float, int | None]:
        """(left, right, the rest): of a conjunction, the bounds, and the conjunction of the others."""
        left = right = math.inf
        others: list[int] = []
        waiting, seen = [term], {term}
        while waiting:
            n, is_negated = waiting.pop()
            op, args, kind, _ = self.nodes[n]
            parts: list[Term] = []
            if op == "not" and kind == BOOL:
                parts = [(args[0], not is_negated)]
            elif op == ("or" if is_negated else "and") and kind == BOOL:
                parts = [(a, is_negated) for a in args]
            if parts:
                waiting += [part for part in dict.fromkeys(parts[::-1]) if part not in seen]
                seen.update(parts)
                continue
            bounds = self._bounds(n, is_negated)
            if bounds is None:
                others.append(self.graph.add("not", n) if is_negated else n)
            else:
                left, right = min(left, bounds[0]), min(right, bounds[1])
        if left == right == math.inf and others:
            return left, right, self.graph.add("not", term[0]) if term[1] else term[0]
        return left, right, functools.reduce(self._both, others, None)

    def _both(self, a: int | None, b: int | None) -> int | None:
        return b if a is None else a if b is None else self.graph.add("and", a, b)

    def _bounds(self, n: int, is_negated: bool) -> tuple[float, float] | None:
        """(left, right) of a comparison; None if it bounds neither i - j nor j - i alone."""
        op, args, _, value = self.nodes[n]
        if value is True and not is_negated:
            return math.inf, math.inf
        if op not in ("lt", "le"):
            return None
        (low, high), is_strict = (args[::-1] if is_negated else args), (op == "lt") != is_negated
        is_abs = self.nodes[low].op == "abs"
        low = self.nodes[low].args[0] if is_abs else low
        if low not in self.linear or high not in self.linear:
            return None
        bounds: dict[tuple[float, float], float] = {BEHIND: math.inf, AHEAD: math.inf}
        for sign in (1, -1)[: 1 + is_abs]:
            x, y, z = (sign * a - b for a, b in zip(self.linear[low], self.linear[high]))
            if (x, y) not in bounds:  # x * i + y * j <= -z
                return None
            bounds[x, y] = min(bounds[x, y], math.ceil(-z) - 1 if is_strict else math.floor(-z))
        return bounds[BEHIND], bounds[AHEAD]

    def _visible_score(self, n: int) -> tuple[int, Term] | None:
        """(score, visible) of where(visible, score, -inf), either way round; None of anything else.

        What the score itself decides is no mask.
        """
        if self.nodes[n].op != "where":
            return None
        condition, *sides = self.nodes[n].args
        hidden = [self.graph.value(side) == -math.inf for side in sides]
        if sum(hidden) != 1 or "score" in self.reads[condition]:
            return None
        return sides[hidden[0]], (condition, hidden[0])

    def _score(self, n: int | None) -> Score | None:
        if n is None:
            return None
        inner, terms = self.sum_with_score(n)
        alibi: Alibi | None = None
        bias: int | None = None
        for term, sign in terms:
            penalty = self._penalty(term, sign)
            if penalty is not None and alibi is None:
                alibi = penalty
            elif bias is None and sign > 0 and self._is_bias(term):
                bias = term
            else:
                return None
        softcap = self._softcap(inner)
        return Score(softcap, bias, alibi) if softcap or self.nodes[inner].op == "score" else None

    def sum_with_score(self, n: int) -> tuple[int, list[tuple[int, int]]]:
        """(what reads the score, [(a term that does not, its sign)]) of a sum."""
        terms: list[tuple[int, int]] = []
        while self.nodes[n].op in ("add", "sub"):
            op, (first, second), *_ = self.nodes[n]
            is_first, is_second = ("score" in self.reads[side] for side in (first, second))
            if is_first == is_second or (is_second and op == "sub"):
                break
            n, term = (first, second) if is_first else (second, first)
            terms.append((term, 1 if op == "add" else -1))
        return n, terms

    def _is_bias(self, n: int) -> bool:
        op, args, kind, value = self.nodes[n]
        if op != "load" or kind != FLOAT:
            return False
        at = [self.nodes[a].op for a in args if self.graph.value(a) is None]
        if self.functions.tensors[value].wants_grad and "j" not in at:
            return False  # not all kernels have the gradient of such a bias
        return 0 < len(at) == len(set(at)) and set(at) <= set(INDICES)

    def _softcap(self, n: int) -> float | None:
        if self.nodes[n].op != "mul":
            return None
        for factor, tanh in (self.nodes[n].args, self.nodes[n].args[::-1]):
            value = self.graph.value(factor)
            if value is None or not MIN_SOFTCAP <= value <= MAX_SOFTCAP or self.nodes[tanh].op != "tanh":
                continue
            op, args, *_ = self.nodes[self.nodes[tanh].args[0]]
            if op not in ("div", "mul"):
                continue
            args = args[::-1] if op == "mul" and self.nodes[args[0]].op == "const" else args
            divisor = value if op == "div" else 1 / value
            if self.nodes[args[0]].op == "score" and self.graph.value(args[1]) == divisor:
                return float(value)
        return None

    def _penalty(self, n: int, sign: int) -> Alibi | None:
        """sign * n as one."""
        sign, n = self._signed(n, sign)
        if self.nodes[n].op != "mul":
            return None
        for slope, distance in (self.nodes[n].args, self.nodes[n].args[::-1]):
            both, slope = self._signed(slope, sign)
            both, distance = self._signed(distance, both)
            is_abs = self.nodes[distance].op == "abs"
            form = self.linear.get(self.nodes[distance].args[0] if is_abs else distance)
            if form not in ((*BEHIND, 0), (*AHEAD, 0)) or not self._is_slope(slope):
                continue
            is_ahead = form == (*AHEAD, 0) and not is_abs
            return Alibi(slope, (both > 0) != is_ahead, not is_abs)
        return None

    def _signed(self, n: int, sign: int) -> tuple[int, int]:
        while self.nodes[n].op in ("neg", FLOAT):
            sign, n = (-sign if self.nodes[n].op == "neg" else sign), self.nodes[n].args[0]
        return sign, n

    def _is_slope(self, n: int) -> bool:
        op, args, kind, value = self.nodes[n]
        if op != "load":
            return self.reads[n] <= {"h"}
        at = [self.nodes[a].op for a in args]
        return kind == FLOAT and not self.functions.tensors[value].wants_grad and at in (["h"], ["b", "h"])
