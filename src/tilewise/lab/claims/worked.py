"""Claims that need no clock: the numbers of worked examples, traced, and of softmax in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
from torch import Tensor

from tilewise.lab.claims.arithmetic import counted
from tilewise.lab.claims.claim import TUTORIAL, Measured, Setting
from tilewise.lab.learn import trace
from tilewise.lab.learn.examples import EXAMPLES, naive_softmax, weight_update

TRACED = "traced in float64"
FOUR, SIX = EXAMPLES["tiling-4x4"], EXAMPLES["by-hand-1x6"]
THREE, LARGE, SMALL = (
    EXAMPLES[name] for name in ("scores-2-5-3", "overflow-100-90-80", "underflow-100-200-300")
)


@cache
def _forward(name: str) -> trace.Trace:
    example = EXAMPLES[name]
    t = example.tensors()
    return trace.forward(t.query, t.key, t.value, example.block_q, example.block_k, scale=example.scale)


@cache
def _four() -> trace.BackwardTrace:
    t = FOUR.tensors()
    assert t.dout is not None
    return trace.backward(t.query, t.key, t.value, t.dout, FOUR.block_q, FOUR.block_k, scale=FOUR.scale)


def _updated(name: str) -> Tensor:
    """A weight of the 4 × 4 example after its step."""
    t, gradients = FOUR.tensors(), _four()
    weight, gradient = {
        "q": (t.query, gradients.dq),
        "k": (t.key, gradients.dk),
        "v": (t.value, gradients.dv),
    }[name]
    assert FOUR.learning_rate is not None
    return weight_update(weight, torch.eye(len(weight), dtype=weight.dtype), gradient, FOUR.learning_rate)


def _tile(j: int) -> trace.Step:
    """The first query tile of the 4 × 4 example against key tile `j`."""
    return _four().forward.step(0, j)


def _six(j: int) -> trace.Step:
    return _forward(SIX.name).step(0, j)


def _six_values(j: int) -> Tensor:
    """The values of key tile `j` of the 1 × 6 example: one column, the other is the same."""
    cols = _six(j).tile.cols
    return SIX.tensors().value[cols.start : cols.stop, 0]


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def _right(
    setting: Setting, claimed: tuple[float, ...], digits: int, found: Callable[[], Tensor]
) -> Measured:
    """How many of the numbers are claimed as they round, and which are not."""
    pairs = list(zip(found().flatten().tolist(), claimed, strict=True))
    wrong = [(value, said) for value, said in pairs if round(value, digits) != said]
    apart = max(abs(value - said) for value, said in pairs)
    listed = ", ".join(f"{value:.{digits + 2}f} for {said:.{digits}f}" for value, said in wrong)
    note = f"largest difference {apart:.2g}" + (f": {listed}" if wrong else "")
    return Measured(len(pairs) - len(wrong), TRACED, note)


def _group(
    name: str, what: str, claimed: Iterable[float], digits: int, found: Callable[[], Tensor], why: str = ""
) -> None:
    """A claim that each of these numbers is right to so many digits after the point."""
    numbers = tuple(claimed)
    counted(name, f"{what}.", TUTORIAL, len(numbers), f"of {len(numbers)} numbers", "equal", why=why)(
        partial(_right, claimed=numbers, digits=digits, found=found)
    )


def _single(
    name: str, what: str, claimed: float, found: Callable[[], Tensor | float], why: str = "", unit: str = ""
) -> None:
    """A claim of one number, which is noted with two more digits than it has."""
    says = f"{what} is {claimed:.10g}{f' {unit}' if unit else ''}."
    digits = len(f"{claimed:.10g}".partition(".")[2]) + 2

    def measure(setting: Setting) -> Measured:
        value = float(found())
        return Measured(value, TRACED, f"{value:.{digits}f}")

    counted(name, says, TUTORIAL, claimed, unit, "equal", why=why)(measure)


ROUNDED = "It was computed from rounded numbers."
_in_4x4, _in_1x6 = "in the 4 × 4 example", "in the 1 × 6 example"

_single(
    "running-sum", "The running sum of the scores 2, 5 and 3", 1.19, lambda: _forward(THREE.name).steps[-1].l
)
_group(
    "running-terms", "Of the scores 2, 5 and 3, exponentials and the first sum are 0.05, 1, 1.05 and 0.14",
    (0.05, 1, 1.05, 0.14), 2,
    lambda: _joined(*(part for step in _forward(THREE.name).steps for part in (step.p, step.l)))[:4],
)  # fmt: skip

_group(
    "4x4-scores", f"S and dP {_in_4x4} are whole numbers, up to 2 and 58",
    (1, 0, 2, 0, 0, 1, 0, 2, 1, 0, 1, 0, 0, 1, 0, 1, *2 * (10, 26, 42, 58, 0, 0, 0, 0)), 0,
    lambda: _joined(_four().forward.scores(), _four().assemble("dp")),
)  # fmt: skip
_group(
    "4x4-exp", f"Exponentials of the first row {_in_4x4} are 2.718, 1 and 7.389, their sum 12.107",
    (2.718, 1, 7.389, 1, 12.107), 3,
    lambda: _joined(_four().forward.scores()[0].exp(), _four().forward.scores()[0].exp().sum()),
)  # fmt: skip
_single("4x4-p00", f"P[0, 0] {_in_4x4}", 0.224, lambda: _four().forward.weights()[0, 0], ROUNDED)
_group(
    "4x4-weights", f"Other weights {_in_4x4} are 0.083, 0.610, 0.366 and 0.134",
    (0.083, 0.610, 0.083, 0.366, 0.134, 0.366, 0.134), 3,
    lambda: _joined(_four().forward.weights()[0, 1:], _four().forward.weights()[2]),
)  # fmt: skip
_group(
    "4x4-out", f"The rows of the output {_in_4x4} begin with 7.20, 9.88, 6.08 and 7.92",
    (first + column for first in (7.20, 9.88, 6.08, 7.92) for column in range(4)), 2,
    lambda: _four().forward.out,
)  # fmt: skip
_group(
    "4x4-tile-p", f"The first tile {_in_4x4} has exponentials of 1 and 0.368 and sums of 1.368",
    (1, 0.368, 0.368, 1, 1.368, 1.368), 3, lambda: _joined(_tile(0).p, _tile(0).l),
)  # fmt: skip
_group(
    "4x4-tile-out", f"The first tile {_in_4x4} has outputs of 2.84 to 6.94 and 5.37 to 9.47, not normalized",
    (2.84, 4.21, 5.57, 6.94, 5.37, 6.74, 8.10, 9.47), 2, lambda: _tile(0).acc, "It was cut off, not rounded.",
)  # fmt: skip
_group(
    "4x4-tile-2", f"The second tile {_in_4x4} has exponentials of 1 and 0.135 and corrections of 0.368",
    (1, 0.135, 0.135, 1, 0.368, 0.368), 3, lambda: _joined(_tile(1).p, _tile(1).correction),
)  # fmt: skip
_single("4x4-sum", f"The sum of the first row's exponentials under its maximum {_in_4x4}", 1.638,
        lambda: _tile(1).l[0], ROUNDED)  # fmt: skip
_group(
    "4x4-acc", f"Outputs {_in_4x4} are 11.81 to 16.71 and 16.20 to 21.10 before the division",
    (11.81, 13.44, 15.08, 16.71, 16.20, 17.83, 19.47, 21.10), 2, lambda: _tile(1).acc,
    "Rounded numbers were used. 11.81 and 16.20 do not follow from those either.",
)  # fmt: skip
_group(
    "4x4-dv", f"The rows of dV {_in_4x4} are 0.590, 0.217, 0.976 and 0.217",
    (0.590, 0.217, 0.976, 0.217), 3, lambda: _four().dv[:, 0],
)  # fmt: skip
_single("delta-by-hand", f"The first row sum of dO ∘ O {_in_4x4}", 34.83, lambda: _four().delta[0], ROUNDED)
_group(
    "4x4-delta", f"The other row sums of dO ∘ O {_in_4x4} are 0, 30.30 and 0",
    (0, 30.30, 0), 2, lambda: _four().delta[1:],
)  # fmt: skip
_group(
    "4x4-ds", f"dS {_in_4x4} has -5.57, -0.73, 4.38 and 1.91 in row 0, -7.42 to 3.72 in row 2",
    (-5.57, -0.73, 4.38, 1.91, -7.42, -0.58, 4.28, 3.72), 2, lambda: _four().assemble("ds")[::2],
)  # fmt: skip
_single("dq-by-hand", f"dQ[0, 1] {_in_4x4}", 1.18, lambda: _four().dq[0, 1], ROUNDED)
_group(
    "4x4-dq", f"Other numbers of dQ {_in_4x4}: -1.19, 4.38 and 1.91, then -3.14, 3.14, 4.28 and 3.72",
    (-1.19, 4.38, 1.91, -3.14, 3.14, 4.28, 3.72), 2, lambda: _joined(_four().dq[0, [0, 2, 3]], _four().dq[2]),
    "They were computed from rounded numbers.",
)  # fmt: skip
_group(
    "4x4-dk", f"dK {_in_4x4} has -12.99, -1.31, 8.66 and 5.64 in column 0, -5.57 to 1.91 in column 2",
    (-12.99, 0, -5.57, 0, -1.31, 0, -0.73, 0, 8.66, 0, 4.38, 0, 5.64, 0, 1.91, 0), 2, lambda: _four().dk,
)  # fmt: skip
_group(
    "4x4-update-v", f"After a step the rows of W_V {_in_4x4} begin with 0.94, 4.98, 8.90 and 12.98",
    (first + column for first in (0.94, 4.98, 8.90, 12.98) for column in range(4)), 2, lambda: _updated("v"),
)  # fmt: skip
_group(
    "4x4-update-qk", f"After a step W_Q[0] {_in_4x4} is 1.12, -0.12, 0.56, -0.19, W_K[0] is 2.30, 0, 0.56, 0",
    (1.12, -0.12, 0.56, -0.19, 2.30, 0, 0.56, 0), 2, lambda: _joined(_updated("q")[0], _updated("k")[0]),
)  # fmt: skip

_group(
    "1x6-exp", f"The exponentials {_in_1x6} are 0.0067, 0.0183, 0.0498 and 1",
    (0.0067, 0.0183, 0.0498, 1, 0.0183, 0.0067), 4,
    lambda: (_forward(SIX.name).scores() - _forward(SIX.name).scores().amax()).exp(),
)  # fmt: skip
_group(
    "1x6-weights", f"The weights {_in_1x6} are 0.0061, 0.0167, 0.0453 and 0.9092",
    (0.0061, 0.0167, 0.0453, 0.9092, 0.0167, 0.0061), 4, lambda: _forward(SIX.name).weights(),
)  # fmt: skip
_group(
    "1x6-terms", f"Weights times values {_in_1x6} are 0.0061, 0.0334, 0.1359, 3.6368, 0.0835 and 0.0366",
    (0.0061, 0.0334, 0.1359, 3.6368, 0.0835, 0.0366), 4,
    lambda: _forward(SIX.name).weights()[0] * SIX.tensors().value[:, 0], "The weights were rounded before.",
)  # fmt: skip
_group(
    "1x6-tile-p", f"The first tile's exponentials {_in_1x6} are 0.1353, 0.3679 and 1",
    (0.1353, 0.3679, 1), 4, lambda: _six(0).p,
)  # fmt: skip
_group(
    "1x6-tile-terms",
    f"Exponentials times values in both tiles {_in_1x6} are 0.1353, 0.7358, 3, 4, 0.0915 and 0.0402",
    (0.1353, 0.7358, 3, 4, 0.0915, 0.0402), 4,
    lambda: _joined(*(_six(j).p * _six_values(j) for j in (0, 1))), "The exponentials were rounded before.",
)  # fmt: skip
for _name, _what, _claimed, _found, _why in (
    ("1x6-sum-1", "The first tile's sum", 1.5032, lambda: _six(0).l, ""),
    ("1x6-out-1", "The first tile's output", 3.8711, lambda: _six(0).acc[0, 0], ""),
    ("1x6-local-sum", "The second tile's own sum", 1.025, lambda: _six(1).p.sum(), ""),
    ("1x6-local-out", "The second tile's own output", 4.1317, lambda: _six(1).p[0] @ _six_values(1), ROUNDED),
    ("1x6-correction", "The correction", 0.04979, lambda: _six(1).correction, ""),
    ("1x6-old-sum", "The first tile's sum, corrected,", 0.0748, lambda: _six(1).correction * _six(0).l, ""),
    ("1x6-old-out", "The first tile's output, corrected,", 0.1927,
     lambda: (_six(1).correction * _six(0).acc)[0, 0], ""),
    ("1x6-sum", "The sum of the exponentials", 1.0998, lambda: _six(1).l, ROUNDED),
    ("1x6-acc", "The output before the division", 4.3244, lambda: _six(1).acc[0, 0], ROUNDED),
    ("1x6-out", "The output", 3.932, lambda: _forward(SIX.name).out[0, 0], ""),
    ("1x6-out-whole", "The output, as the sum of weights times values,", 3.9323,
     lambda: _forward(SIX.name).weights()[0] @ SIX.tensors().value[:, 0], ROUNDED),
):  # fmt: skip
    _single(_name, f"{_what} {_in_1x6}", _claimed, _found, _why)


@counted("tiles-8x8", "An 8 × 8 matrix has 16 tiles of 2 × 2.", TUTORIAL, 16, "tiles", "equal")
def tiles_8x8(setting: Setting) -> Measured:
    eye = torch.eye(8)
    steps = trace.forward(eye, eye, eye, 2, 2).steps
    return Measured(len(steps), "steps of the trace", f"each of {steps[0].s.numel()} scores")


FLOAT32 = torch.finfo(torch.float32)


@counted("exp-largest", "The largest exponential in float32 is e^88.7.", TUTORIAL, 88.7, "", "equal")
def exp_largest(setting: Setting) -> Measured:
    return Measured(math.log(FLOAT32.max), f"logarithm of float32's largest number, {FLOAT32.max:.4g}")


@counted(
    "exp-smallest", "Below e^-88 float32 has only 0.", TUTORIAL, -88, "", "equal",
    why="Subnormal numbers go on below the smallest normal one.",
)  # fmt: skip
def exp_smallest(setting: Setting) -> Measured:
    smallest = float(torch.nextafter(torch.zeros(()), torch.ones(())))
    normal = f"{math.log(FLOAT32.tiny):.1f} for the smallest normal number, {FLOAT32.tiny:.2g}"
    return Measured(math.log(smallest), f"logarithm of float32's smallest number, {smallest:.2g}", normal)


def _shown(weights: Tensor) -> str:
    return ", ".join(f"{weight:g}" for weight in weights.flatten().tolist())


def _logits(name: str) -> Tensor:
    return EXAMPLES[name].tensors().key.flatten().float()


@counted(
    "overflow", "Without its maximum subtracted, a softmax in float32 gives a score of 100 the weight NaN.",
    TUTORIAL, 1, "NaN", "equal",
)  # fmt: skip
def overflow(setting: Setting) -> Measured:
    logits = _logits(LARGE.name)
    weights = naive_softmax(logits)
    return Measured(int(weights[0].isnan()), f"scores {_shown(logits)}", f"weights {_shown(weights)}")


@counted(
    "underflow", "Without the maximum subtracted, the softmax of -100, -200 and -300 in float32 is NaN.",
    TUTORIAL, 3, "NaN", "equal",
    why="e^-100 is a subnormal number, not 0. Only where those are flushed to 0 are the weights NaN.",
)  # fmt: skip
def underflow(setting: Setting) -> Measured:
    logits = _logits(SMALL.name)
    weights, flushed = naive_softmax(logits), naive_softmax(logits, flush_subnormal=True)
    note = f"weights {_shown(weights)}; flushed to 0: {_shown(flushed)}"
    return Measured(int(weights.isnan().sum()), f"scores {_shown(logits)}", note)


_group(
    "safe-exp", "Of the scores 100, 90 and 80, e^-10 is 0.000045 and the sum under the maximum 1.000045",
    (0.000045, 1.000045), 6,
    lambda: _joined(torch.exp(_forward(LARGE.name).scores()[0, 1] - 100), _forward(LARGE.name).steps[-1].l),
)  # fmt: skip
_single(
    "safe-exp-20", "Of the scores 100, 90 and 80, e^-20", 2,
    lambda: torch.exp(_forward(LARGE.name).scores()[0, 2] - 100) * 1e9, unit="× 10⁻⁹",
)  # fmt: skip
_single(
    "safe-weight", "The weight of the score 100 beside 90 and 80", 0.9999,
    lambda: _forward(LARGE.name).weights()[0, 0], "It was cut off, not rounded.",
)  # fmt: skip
