"""A claim about attention, what would confirm it, and the list of all claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TIMING_SLACK = 0.95  # a measurement that comes so near is counted as reached


@dataclass(frozen=True)
class Setting:
    """Where claims are measured: "cpu" with smaller sizes, or "cuda" with the papers' own.

    checkpoints: the folder where trainings keep theirs. budget: seconds after which one ends. say: what shows
    their progress.
    """

    device: str
    checkpoints: Path = Path()
    budget: float | None = None
    say: Callable[[str], None] = lambda line: None

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


class Measured(NamedTuple):
    """`value` in the claim's unit; `what` says sizes and dtype, `note` what else was seen.

    curves: by the name of an axis ("ms", "MiB", "loss"), of each peer what was measured at which x.
    """

    value: float
    what: str
    note: str = ""
    curves: Curves | None = None


Curves = dict[str, dict[str, dict[str, float]]]  # axis -> peer -> x -> y; x as text, as JSON has it
Measure = Callable[[Setting], Measured]


@dataclass(frozen=True)
class Claim:
    """`kind`: "at least" (a speedup or saving), "at most" (a growth) or "equal" (a figure to be computed).

    `needs_gpu`: the claim is about a GPU's kernels. `is_training`: it takes longer than all others together.
    `is_counted`: no clock or device has a part in it.
    `why`: where it does not hold, why.
    """

    name: str
    says: str
    source: str
    claimed: float
    unit: str
    kind: str
    measure: Measure
    needs_gpu: bool = False
    is_training: bool = False
    is_counted: bool = False
    why: str = ""

    def holds(self, value: float) -> bool:
        """Whether a measured value confirms the claim.

        Example:
            >>> claim = Claim("a", "", "", 2.0, "x", "at least", lambda setting: Measured(3.0, ""))
            >>> claim.holds(1.95), claim.holds(1.8)
            (True, False)
            >>> Claim("b", "", "", 1.18, "", "equal", lambda setting: Measured(1.3, "")).holds(1.184)
            True
        """
        if self.kind == "at least":
            return value >= TIMING_SLACK * self.claimed
        if self.kind == "at most":
            return value <= self.claimed / TIMING_SLACK
        digits = len(f"{self.claimed:.10g}".partition(".")[2])
        return round(value, digits) == self.claimed


CLAIMS: dict[str, Claim] = {}


def claim(
    name: str, says: str, source: str, claimed: float, unit: str, kind: str = "at least", **more: Any
) -> Callable[[Measure], Measure]:
    """Put a function that measures a claim on the list; `more` are the other fields of `Claim`."""

    def register(measure: Measure) -> Measure:
        CLAIMS[name] = Claim(name, says, source, claimed, unit, kind, measure, **more)
        return measure

    return register


FA1, FA2, FA3 = "FlashAttention (2022)", "FlashAttention-2 (2023)", "FlashAttention-3 (2024)"
TUTORIAL = "tutorials"
