"""8-bit attention with and without the rotation, step by step, by the functions of `tilewise.fp8`.

Scores and sums are in float64, so that every error shown is one of rounding to 8 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tilewise.core import fp8
from tilewise.lab.learn.show import Line, Section, as_text

ROWS, HEAD_DIM, SEED = 16, 64, 4
GRID = 256  # the example's numbers are multiples of 1/256, so that float32 rotates them without rounding
SHOWN = 8  # columns that are printed


def example(
    outlier: float = 8.0, rows: int = ROWS, head_dim: int = HEAD_DIM, seed: int = SEED
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k and v (rows, head_dim), float32; column 0 of q and k is multiplied by `outlier`.

    Example:
        >>> plain, (q, k, v) = example(1)[0], example(8)
        >>> torch.equal(q[:, 0], 8 * plain[:, 0]), torch.equal(q[:, 1:], plain[:, 1:])
        (True, True)
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = ((torch.randn(rows, head_dim, generator=generator) * GRID).round() / GRID for _ in range(3))
    q[:, 0] *= outlier
    k[:, 0] *= outlier
    return q, k, v


@dataclass(frozen=True, eq=False)
class Way:
    """Attention whose products take 8-bit numbers of q and k, as they are or rotated."""

    q: Tensor  # float32 (seqlen_q, dim), what is rounded
    k: Tensor  # float32 (seqlen_k, dim)
    value: Tensor
    scale: float  # of q k^T
    dtype: torch.dtype = fp8.FP8  # of q and k in 8 bits

    @cached_property
    def q8(self) -> fp8.Rounded:
        return fp8.round_rows(self.q, self.dtype)

    @cached_property
    def k8(self) -> fp8.Rounded:
        return fp8.round_rows(self.k, self.dtype)

    @cached_property
    def scores(self) -> Tensor:
        """scale q8 k8^T (seqlen_q, seqlen_k), without an error of its own."""
        return self.scale * (self.q8.dequantize().double() @ self.k8.dequantize().double().T)

    @cached_property
    def weights(self) -> Tensor:
        """exp(scores - their maximum), the largest of a query is 1."""
        return torch.exp(self.scores - self.scores.amax(-1, keepdim=True))

    @cached_property
    def out(self) -> Tensor:
        """8-bit weights times 8-bit values, over the sum of the weights."""
        p8, v8 = fp8.round_weights(self.weights.float()).double(), fp8.round_rows(self.value).dequantize()
        return p8 @ v8.double() / self.weights.sum(-1, keepdim=True)

    def error_shares(self) -> Tensor:
        """Of the scores' squared errors, product by product: what each column has in them (dim,)."""

        def products(q: Tensor, k: Tensor) -> Tensor:
            return q.double().T[:, :, None] * k.double().T[:, None]

        errors = products(self.q8.dequantize(), self.k8.dequantize()) - products(self.q, self.k)
        squares = errors.square().sum((1, 2))
        return squares / squares.sum().clamp(min=torch.finfo(torch.float64).tiny)


@dataclass(frozen=True, eq=False)
class Walk:
    """All ways beside exact attention. `str()` prints the first query's numbers."""

    plain: Way
    rotated: Way
    integers: Way  # rotated, q and k in int8
    scores: Tensor  # float64 (seqlen_q, seqlen_k), exact
    out: Tensor  # float64 (seqlen_q, dim_v), exact

    def rms_errors(self) -> dict[str, float]:
        """Root mean squares of the errors of the scores and of the output, each way."""
        ways = {"plain": self.plain, "rotated": self.rotated, "integers": self.integers}
        scores = {f"{name} scores": rms(way.scores - self.scores) for name, way in ways.items()}
        return scores | {f"{name} out": rms(way.out - self.out) for name, way in ways.items()}

    def __str__(self) -> str:
        return as_text(sections(self))


def walk(query: Tensor, key: Tensor, value: Tensor) -> Walk:
    """8-bit attention of one head, scale 1 / sqrt(head_dim), at most 128 rows: one block with one factor.

    Args:
        query: (seqlen_q, head_dim), taken in float32, as are the others.
        key: (seqlen_k, head_dim).
        value: (seqlen_k, head_dim_v).

    Raises:
        ValueError: they do not fit together, or are longer than a block.

    Example:
        >>> errors = walk(*example(outlier=8)).rms_errors()
        >>> errors["plain scores"] > 2 * errors["rotated scores"]
        True
    """
    query, key, value = (x.detach().float() for x in (query, key, value))
    _check(query, key, value)
    scale, dim = query.shape[-1] ** -0.5, fp8.padded_dim(query.shape[-1])
    plain = Way(query, key, value, scale)
    turned = fp8.rotate(query), fp8.rotate(key), value, scale / dim
    rotated, integers = Way(*turned), Way(*turned, torch.int8)
    scores = scale * (query.double() @ key.double().T)
    return Walk(plain, rotated, integers, scores, torch.softmax(scores, -1) @ value.double())


def bits(x: float) -> str:
    """Sign, exponent and fraction of an e4m3 number.

    Example:
        >>> bits(0.3125), bits(-448), bits(2**-9)
        ('0 0101 010', '1 1111 110', '0 0000 001')
    """
    byte = int(torch.tensor(x).to(fp8.FP8).view(torch.uint8))
    return f"{byte >> 7} {byte >> 3 & 15:04b} {byte & 7:03b}"


def rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def sections(walk: Walk, query: int = 0) -> list[Section]:
    """What `tilewise fp8` prints: the numbers of one query in 8 bits each way, and the errors of all."""
    return [
        _way("q and k as they are", "q", walk.plain, walk, query),
        _way("rotated: q H and k H, random signs times a Hadamard matrix", "q H", walk.rotated, walk, query),
        _integers(walk, query),
        _unchanged(walk),
        _weights(walk.rotated, query),
        Section("root mean square errors of all queries", [*_errors(walk, "scores"), *_errors(walk, "out")]),
    ]


def _errors(walk: Walk, name: str) -> list[Line]:
    exact, errors = rms(getattr(walk, name)), walk.rms_errors()
    plain, rotated = errors[f"plain {name}"], errors[f"rotated {name}"]
    compared = f"{plain:.4g} as they are, {rotated:.4g} rotated: {_gain(plain, rotated)}"
    in_integers = errors[f"integers {name}"]
    others = f"{rotated:.4g} rotated, {in_integers:.4g} in integers: {_gain(rotated, in_integers)}"
    return [Line(name, f"of {exact:.4g}", compared), Line("", "", others)]


def _gain(plain: float, rotated: float) -> str:
    if plain == rotated:
        return "the same"
    small, large = sorted((plain, rotated))
    return f"{large / small if small else math.inf:.2f} times {'less' if plain > rotated else 'more'}"


def _way(title: str, name: str, way: Way, walk: Walk, query: int) -> Section:
    row = way.q8.values[query].float()
    scaled = Line(f"{name} / factor", f"query {query}", way.q[query, :SHOWN] / way.q8.factors)
    lines = [
        Line("factors", "of q and of k", f"{way.q8.factors.item():g}, {way.k8.factors.item():g}"),
        Line("max |column|", "of q, over the factor", (way.q.abs().amax(0) / way.q8.factors)[:SHOWN]),
        Line("", "of k, over the factor", (way.k.abs().amax(0) / way.k8.factors)[:SHOWN]),
        scaled,
        Line("e4m3", "4 significant bits", row[:SHOWN]),
        Line("bits", "sign, exponent, fraction", ", ".join(bits(x) for x in row[:SHOWN].tolist())),
        Line("scores", "exact", walk.scores[query]),
        Line("", "of 8-bit numbers", way.scores[query]),
        Line("errors", "", way.scores[query] - walk.scores[query]),
        Line("squared errors", "largest share of one column", f"{way.error_shares().max().item():.1%}"),
    ]
    return Section(title, lines, f"columns 0 to {min(SHOWN, way.q.shape[1]) - 1} of {way.q.shape[1]}")


def _integers(walk: Walk, query: int) -> Section:
    way = walk.integers
    lines = [
        Line("factors", "of q and of k", f"{way.q8.factors.item():.4g}, {way.k8.factors.item():.4g}"),
        Line("int8", "of q H / factor", way.q8.values[query, :SHOWN].float()),
        Line("errors", "of the scores", way.scores[query] - walk.scores[query]),
    ]
    return Section('rotated, q and k in integers: precision="int8"', lines)


def _unchanged(walk: Walk) -> Section:
    way = walk.rotated
    again = way.scale * (way.q.double() @ way.k.double().T)
    difference = (again - walk.scores).abs().max().item()
    dim = way.q.shape[1]
    line = Line("difference", f"of (q H)(k H)^T / {dim} from q k^T, largest", f"{difference:.1e}")
    return Section("what the rotation leaves unchanged", [line])


def _weights(way: Way, query: int) -> Section:
    p = way.weights[query]
    lines = [
        Line("p", "exp(s - m), rotated", p),
        Line("e4m3", "of p", p.float().to(fp8.FP8).float()),
        Line("e4m3", "of 256 p, over 256", fp8.round_weights(p.float())),
    ]
    return Section("weights in 8 bits", lines)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    if any(x.ndim != 2 for x in (query, key, value)):
        raise ValueError("query, key and value must be 2-D (seqlen, head_dim)")
    if query.shape[1] != key.shape[1] or len(key) != len(value):
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value do not fit together: {shapes}")
    if not 1 <= len(query) <= fp8.BLOCK_ROWS or not 1 <= len(key) <= fp8.BLOCK_ROWS:
        raise ValueError(f"rows must be 1 to {fp8.BLOCK_ROWS}, one block; got {len(query)} and {len(key)}")
