"""Random mask and score functions, drawn as trees of operations, against the reference and every element."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import tilewise
from tilewise import reference
from tilewise.core.functions.captured import pack, wide_integers
from tilewise.core.functions.evaluate import Buffers, Evaluator, Values
from tilewise.core.functions.expression import BOOL, FLOAT, INT, Captured, Functions, Graph
from tilewise.core.functions.interval import Blocks, Intervals, Ranges
from tilewise.core.functions.tile_map import EMPTY, FULL, edges, refined, tile_kinds
from tilewise.core.functions.trace import trace

BATCH, HEADS, LENGTH = 2, 2, 21
torch.manual_seed(0)
NUMBERS = torch.randint(-9, 10, (LENGTH,))
TABLE = torch.randn(HEADS, 7, dtype=torch.double, requires_grad=True)


class Call:
    """A node of a tree: a function of (score, b, h, i, j), printed as its operations."""

    def __init__(self, name, function, *args):
        self.name, self.function, self.args = name, function, args

    def __call__(self, *at):
        return self.function(at, *(a(*at) for a in self.args))

    def __repr__(self):
        return self.name + (f"({', '.join(map(repr, self.args))})" if self.args else "")


def calls(name, function, *args):
    return st.builds(lambda *drawn: Call(name, lambda at, *x: function(*x), *drawn), *args)


def leaf(name, place):
    return st.just(Call(name, lambda at: at[place]))


def constants(values):
    return values.map(lambda c: Call(str(c), lambda at: c))


def integers(below):
    positive = constants(st.integers(1, 9))
    return st.one_of(
        *(calls(op, getattr(operator, op), below, below) for op in ("add", "sub")),
        calls("mul", operator.mul, below, constants(st.integers(-3, 3))),
        calls("floordiv", operator.floordiv, below, positive),
        calls("mod", operator.mod, below, positive),
        calls("load", lambda n: NUMBERS[abs(n) % LENGTH], below),
        calls("where", torch.where, booleans(below), below, below),
    )


def booleans(numbers):
    compared = st.one_of(
        *(calls(op, getattr(operator, op), numbers, numbers) for op in ("lt", "le", "gt", "ge", "eq", "ne"))
    )
    return st.one_of(
        compared, calls("not", operator.invert, compared),
        *(calls(op, getattr(operator, op), compared, compared) for op in ("and_", "or_", "xor")),
    )  # fmt: skip


def floats(below):
    return st.one_of(
        *(calls(op, getattr(operator, op), below, below) for op in ("add", "sub", "mul")),
        *(calls(op, getattr(torch, op), below) for op in ("tanh", "sin", "cos")),
        calls("decay", lambda x: torch.exp(-x.abs()), below),
        calls("table", lambda h, n: TABLE[h, abs(n) % 7], leaf("h", 2), INTEGERS),
        calls("scaled", lambda n: n * 0.125, INTEGERS),
        calls("where", torch.where, booleans(INTEGERS), below, below),
    )


INDICES = st.one_of(*(leaf(name, n + 1) for n, name in enumerate("bhij")))
INTEGERS = st.recursive(INDICES, integers, max_leaves=5)
MASKS = booleans(INTEGERS)
SCORES = st.recursive(leaf("score", 0), floats, max_leaves=6)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def as_mask(tree):
    return lambda b, h, i, j: tree(None, b, h, i, j)


def as_score(tree):
    return lambda s, b, h, i, j: tree(s, b, h, i, j)


@FEW
@given(MASKS)
def test_tile_maps(tree):
    """EMPTY and FULL are certain; refined, PARTIAL is too."""
    functions = trace(as_mask(tree), None)
    spans = [edges(n, step) for n, step in ((BATCH, 1), (HEADS, 1), (LENGTH, 4), (LENGTH, 4))]
    buffers = pack(functions, torch.empty(0))
    kinds = tile_kinds(functions.functions, buffers, *spans)
    exact = refined(kinds, functions.functions, buffers, *spans)
    indices = torch.meshgrid(*(torch.arange(n) for n in (BATCH, HEADS, LENGTH, LENGTH)), indexing="ij")
    visible = as_mask(tree)(*indices)
    padding = (0, -LENGTH % 4, 0, -LENGTH % 4)
    some, hidden = (
        torch.nn.functional.pad(x, padding).unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).any(5).any(3)
        for x in (visible, ~visible)
    )
    true = some.to(torch.uint8) + (some & ~hidden)
    kinds, exact = kinds.expand(true.shape), exact.expand(true.shape)
    assert torch.equal(exact.long(), true.long())
    assert ((kinds != EMPTY) | (true == EMPTY)).all() and ((kinds != FULL) | (true == FULL)).all()


@FEW
@given(MASKS, SCORES)
def test_results_and_gradients(mask, score):
    options = {"mask_mod": as_mask(mask), "score_mod": as_score(score)}
    leaves = [torch.randn(BATCH, LENGTH, HEADS, 4, dtype=torch.double, requires_grad=True) for _ in range(3)]
    out, lse = tilewise.attention(*leaves, return_lse=True, backend="tiled", **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad(
        (out, lse), (*leaves, TABLE), (dout, dlse), allow_unused=True, materialize_grads=True
    )
    with torch.no_grad():
        exact = reference.attention(*leaves, **options)
        grads = reference.attention_backward(dout, *leaves, dlse=dlse, captured=(TABLE,), **options)
    for ours, theirs in zip((out, lse, *found), (*exact, *grads[:3], *grads.captured), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


WHOLE = (0, 1, -1, 2, 3, -3, 7, 31, 63, 70, 2**24 + 1, 2**40 + 3, -(2**40), 2**62, 2**63 - 1, -(2**62))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.1, -0.3, 3.7, 1e-40, 1e20, -1e30, 3e38, torch.inf, -torch.inf, torch.nan)
OPERATIONS = {  # by the kind and the number of what they take
    (INT, 2): ("add", "sub", "mul", "minimum", "maximum", "and", "or", "xor", "shl", "shr", "lt", "le", "eq"),
    (INT, 1): ("neg", "abs", "not", "floordiv", "mod", "load", FLOAT, BOOL),
    (FLOAT, 2): ("add", "sub", "mul", "div", "minimum", "maximum", "lt", "le", "eq", "ne"),
    (FLOAT, 1): (
        *("neg", "abs", "exp", "expm1", "log", "log1p", "tanh", "sqrt", "erf", "atan", "sinh"),
        *("floor", "round", "sin", "cos", INT, BOOL),
    ),
    (BOOL, 2): ("and", "or", "xor", "where"),
    (BOOL, 1): ("not", INT, FLOAT),
}


def random_graph(draw: random.Random) -> Graph:
    """Of nodes of every operation, whose first argument is no constant; many read one of the last nodes."""
    graph = Graph()
    *_, i, j = (graph.add(name, kind=INT) for name in "bhij")
    graph.add("lt", i, graph.cast(j, FLOAT))
    for value in (*draw.sample(WHOLE, 4), *draw.sample(FLOATS, 4)):
        graph.const(value)

    def pick(kind, ops=()):
        found = [n for n, node in enumerate(graph.nodes) if node.kind == kind and node.op not in ops]
        return draw.choice(found[-draw.choice((4, 99)) :])

    for _ in range(12):
        kind, count = draw.choice(list(OPERATIONS))
        op, args = draw.choice(OPERATIONS[kind, count]), [pick(kind, ("const",)), pick(kind)][:count]
        if op in ("floordiv", "mod"):
            args.append(draw.choice((i, j, *map(graph.const, (-3, 1, 2, 7)))))
        if op == "load":
            table = draw.randrange(2)
            graph.load(table, [graph.add("mod", *args, graph.const(9))], (FLOAT, INT)[table])
        elif op == "where":
            kind = draw.choice((INT, FLOAT))
            graph.add(op, args[0], pick(kind), pick(kind))
        else:
            graph.add(op, *args)
    return graph


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_number_is_in_its_interval(dtype):
    """Of every node of random graphs, at every position of random ranges."""
    tables = (Captured(FLOAT, 1), Captured(INT, 1))
    for _ in range(150):
        seed = random.randrange(1 << 30)
        draw = random.Random(seed)
        graph = random_graph(draw)
        functions = Functions(graph, None, None, tables)
        buffers = Buffers(torch.randn(9).to(dtype), torch.randint(-9, 10, (9,)), torch.tensor([0, 9, 0, 9]))
        starts = [torch.tensor(draw.choice((0, 1, 8, 2**24))) for _ in range(4)]
        sizes = [draw.choice((1, 1, 2, 5)) for _ in range(4)]
        ranges = [Blocks(a, a if n == 1 else a + n - 1, int(a) + n, n) for a, n in zip(starts, sizes)]
        positions = torch.meshgrid(*(a + torch.arange(n) for a, n in zip(starts, sizes)), indexing="ij")
        intervals = Intervals(graph, functions, buffers, Ranges(*ranges))
        evaluate = Evaluator(graph, functions, buffers, Values(None, *positions, dtype))
        for n, node in enumerate(graph.nodes):
            (low, high), found = intervals(n), evaluate(n)
            is_inside = (found >= low) & (found <= high) | low.isnan() | high.isnan()
            if node.kind == BOOL:
                is_inside = (found | ~low) & (~found | high)
            assert is_inside.all(), (seed, n, node)


def test_tile_maps_of_integers_up_to_64_bits():
    """Of hashes, whose products and sums wrap; what is shifted of them may take more than 32 bits."""
    ranges = [edges(n, step) for n, step in ((1, 1), (1, 1), (40, 4), (40, 4))]
    i, j = torch.arange(40)[:, None], torch.arange(40)
    big = torch.randint(2**61, 2**63 - 1, (40,)) * (1 - 2 * (j % 2))
    for mask_mod in (
        lambda b, h, i, j: ((i * 40 + j + 1) * 0x5851F42D4C957F2D).abs() < 2**62 + 2**61,
        lambda b, h, i, j: (((i * 40 + j + 1) * 0x5851F42D4C957F2D) >> 31) < 2**31,
        lambda b, h, i, j: (big[j] + i) % 10 < 7,
        lambda b, h, i, j: torch.maximum(big[j], i) // 3 > 2**60,
    ):
        found = trace(mask_mod, None)
        kinds = tile_kinds(found.functions, pack(found, torch.empty(0)), *ranges)[0, 0].expand(10, 10)
        visible = mask_mod(0, 0, i, j).expand(40, 40).unflatten(1, (10, 4)).unflatten(0, (10, 4))
        assert not (visible.any(3).any(1) & (kinds == EMPTY)).any()
        assert not (~visible.all(3).all(1) & (kinds == FULL)).any()
        graph = found.functions.graph
        wide = wide_integers(graph, found.functions)
        assert not {"shr", "floordiv"} & {node.op for n, node in enumerate(graph.nodes) if n not in wide}


def test_shifts_by_any_number():
    """As PyTorch's, whose processors don't say what becomes of negative ones."""
    x = torch.randn(1, 40, 1, 4, dtype=torch.double)
    for mask_mod in (
        lambda b, h, i, j: ((j + 8) << (i - 5)) >= 8,
        lambda b, h, i, j: ((j - 8) << (i * 3)) >= 8,
        lambda b, h, i, j: ((j - 8) >> (i - 5)) >= 1,
        lambda b, h, i, j: ((j - 8) >> (i * 3)) >= 0,
        lambda b, h, i, j: (i << (j - 20)) % 7 == 0,
    ):
        exact, _ = reference.attention(x, x, x, mask_mod=mask_mod)
        for backend in ("llvm", "tiled"):
            found = tilewise.attention(x, x, x, mask_mod=mask_mod, backend=backend)
            torch.testing.assert_close(found, exact)


def test_integers_that_float32_rounds():
    """Quotients towards 0 and their rests, of both signs."""
    x, i, j = torch.randn(1, 40, 1, 4), torch.arange(40)[:, None], torch.arange(40)
    big, divisors = 2**40 + 12345 * torch.arange(40), torch.tensor([-3, -2, -1, 1, 2, 5])
    for mask_mod in (
        lambda b, h, i, j: torch.div(i * 1000003 + j, 7, rounding_mode="trunc") % 2 == 0,
        lambda b, h, i, j: torch.div((i - j) * 1000003, -7, rounding_mode="trunc") % 2 == 0,
        lambda b, h, i, j: torch.fmod(big[j], 3) == 1,
        lambda b, h, i, j: torch.fmod((i - j) * big[j], divisors[i % 6]) >= 0,
    ):
        exact = tilewise.attention(x, x, x, mask=mask_mod(0, 0, i, j))
        for backend in ("llvm", "tiled"):
            found = tilewise.attention(x, x, x, mask_mod=mask_mod, backend=backend)
            torch.testing.assert_close(found, exact)


def test_shifts_of_numbers_extremes_of_two_and_nan():
    x, j = torch.randn(1, 40, 2, 4), torch.arange(40)
    h, i = torch.arange(2)[:, None, None], j[:, None]
    numbers = torch.where(j % 7 == 0, torch.nan, j * 0.1)
    numbers[24:] = torch.nan
    for mask_mod in (
        lambda b, h, i, j: (i - j) % (2 << h) == 0,
        lambda b, h, i, j: (32 >> h) <= i + j,
        lambda b, h, i, j: torch.max(i - j, j) % 3 == 0,
        lambda b, h, i, j: torch.min(i - j, other=j).max(h) % 3 == 0,
        lambda b, h, i, j: torch.isnan(numbers[j]) | (i == j),
        lambda b, h, i, j: ~(numbers[j] - i).isnan() | (i == j),
    ):
        exact = tilewise.attention(x, x, x, mask=mask_mod(0, h, i, j).expand(1, 2, 40, 40))
        for backend in ("llvm", "tiled"):
            found = tilewise.attention(x, x, x, mask_mod=mask_mod, backend=backend)
            torch.testing.assert_close(found, exact)
