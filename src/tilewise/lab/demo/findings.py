"""What a run measured, and the sentences that say it. Every figure in them is computed here."""

from __future__ import annotations

import datetime
import math
import os
import platform
import shlex
import sys
from dataclasses import dataclass

import torch

from tilewise.device import processor_name
from tilewise.lab.demo.generate import SCORE_BOUND, Generation
from tilewise.lab.demo.lengths import PASSES, Cell, Table
from tilewise.lab.demo.methods import SDPA, STANDARD, TILEWISE
from tilewise.lab.demo.train import BOUND_SHARE, FIRST_BOUND, Training
from tilewise.lab.learn.show import duration


@dataclass(frozen=True)
class Findings:
    facts: dict[str, str]  # where, when and with what the run was made
    model: str
    training: Training
    generation: Generation
    table: Table
    seconds: float

    @property
    def holds(self) -> bool:
        """The curves coincide, the tokens are the same and the errors are within their bound."""
        return all(check for _, check in self.sentences().values())

    def sentences(self) -> dict[str, tuple[str, bool]]:
        """One a plot, by the plot's name, and whether what it must show is so."""
        return {
            "loss": (loss_sentence(self.training), self.training.coincides),
            "generation": (generation_sentence(self.generation), self.generation.agrees),
            "time": (time_sentence(self.table), True),
            "memory": (memory_sentence(self.table), True),
            "error": (error_sentence(self.table), not self.table.outside),
        }


def facts(device: torch.device, text: str) -> dict[str, str]:
    import tilewise

    versions = (
        f"tilewise {tilewise.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    return {
        "Device": _device_name(device),
        "Versions": f"{versions}, {platform.system()} {platform.release()}",
        "Date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "Command": shlex.join(["tilewise", *sys.argv[1:]]),
        "Text": text,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} (CUDA {torch.version.cuda})"
    return f"{processor_name()}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"


def loss_sentence(training: Training) -> str:
    t, s = training.tilewise, training.standard
    verdict = "so the curves coincide" if training.coincides else "so the curves DO NOT coincide"
    return (
        f"Over {len(t.losses)} steps from the same seed and batches the loss goes from {t.losses[0]:.3f} to "
        f"{t.losses[-1]:.3f} nats a byte with tilewise and from {s.losses[0]:.3f} to {s.losses[-1]:.3f} with "
        f"standard attention (held-out: {t.valid_after:.4f} and {s.valid_after:.4f}); the two differ by "
        f"{figure(training.differences[0])} before the first update and by at most "
        f"{figure(training.largest_difference)}, {verdict} (bounds: {figure(FIRST_BOUND)}; then "
        f"{figure(training.bound)}, {BOUND_SHARE:.0%} of the fall of the held-out loss)."
    )


def why_differences(training: Training) -> str:
    """Why two exact methods differ at all; empty if they do not, or differ by more than that explains."""
    if training.largest_difference == 0 or not training.coincides:
        return ""
    return (
        "Both methods are exact, but add up the same products in another order, and each addition rounds. "
        "Every update carries the rounding of all earlier steps on, so the difference drifts."
    )


def generation_sentence(generation: Generation) -> str:
    cached, recomputed = generation.cached, generation.recomputed
    count, first = len(cached.tokens), generation.first_difference
    if first is not None:
        verdict = f"the tokens DIFFER from number {first + 1} on"
    elif generation.agrees:
        verdict = f"all {count} tokens are the same"
    else:
        verdict = f"all {count} tokens are the same, but their scores DIFFER"
    return (
        f"Generating {count} tokens takes {duration(cached.seconds)} with the KV cache "
        f"({mebibytes(generation.cache_bytes)}) and {duration(recomputed.seconds)} without it, "
        f"{times(recomputed.seconds / cached.seconds)} as long; {verdict} (scores lie at most "
        f"{figure(generation.score_difference)} apart, {figure(SCORE_BOUND)} is allowed; the closest choice "
        f"was won by {figure(generation.closest_choice)})."
    )


def time_sentence(table: Table) -> str:
    parts = []
    for is_backward, name in PASSES.items():
        ours, theirs = table.series(is_backward, TILEWISE), table.series(is_backward, SDPA)
        longest = max(ours)
        mine, torch_time = ours[longest].time, theirs[longest].time
        parts.append(
            f"{name} at {longest} tokens takes tilewise {duration(mine)} and torch SDPA "
            f"{duration(torch_time)} ({times(torch_time / mine)} tilewise's)"
            + _standard_time(table, is_backward, ours)
        )
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _standard_time(table: Table, is_backward: bool, ours: dict[int, Cell]) -> str:
    standard = table.series(is_backward, STANDARD)
    if not standard:
        return ""
    longest = max(standard)
    ratio = standard[longest].time / ours[longest].time
    return f", and at {longest} standard attention {duration(standard[longest].time)} ({times(ratio)})"


def memory_sentence(table: Table) -> str:
    ours, standard = table.series(True, TILEWISE), table.series(True, STANDARD)
    most = mebibytes(ours[max(ours)].extra_bytes)
    text = (
        f"Forward and backward at {max(ours)} tokens, tilewise needs {most} beyond inputs, output and "
        f"gradients, growing like N^{growth(ours):.1f}"
    )
    if not standard:
        return text + "; standard attention did not fit at any length."
    longest = max(standard)
    text += (
        f"; standard attention needs {mebibytes(standard[longest].extra_bytes)} at {longest}, growing like "
        f"N^{growth(standard):.1f}"
    )
    if ours[longest].extra_bytes:
        text += f", {times(standard[longest].extra_bytes / ours[longest].extra_bytes)} tilewise's there"
    return text + "."


def error_sentence(table: Table) -> str:
    worst = {
        name: max(cell.error for b in PASSES for cell in table.series(b, name).values())
        for name in (TILEWISE, SDPA, STANDARD)
        if table.series(False, name)
    }
    named = ", ".join(f"{name} {figure(error)}" for name, error in worst.items())
    if table.outside:
        where = ", ".join(f"{n} {PASSES[b]}" for n, b in table.outside)
        verdict = f"tilewise's is OUTSIDE of the bound at {where}"
    else:
        verdict = "tilewise's is within the bound at every length"
    return (
        f"Against float64 the largest error, relative to the largest value, is {named} "
        f"({table.checked}); {verdict} (twice the larger error of the other two, and 8 roundings)."
    )


def growth(series: dict[int, Cell]) -> float:
    """The exponent e of memory ~ N^e between the two longest lengths."""
    *_, (n0, a), (n1, b) = [(0, Cell()), *sorted(series.items())]
    if not (n0 and a.extra_bytes and b.extra_bytes):
        return math.nan
    return math.log(b.extra_bytes / a.extra_bytes) / math.log(n1 / n0)


def times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 100 else f"{ratio:.3g} times"


def mebibytes(count: int) -> str:
    if count >= 1 << 30:
        return f"{count / 2**30:.3g} GiB"
    return f"{count / 2**20:.3g} MiB" if count >= 1 << 20 else f"{count / 2**10:.3g} KiB"


def figure(x: float) -> str:
    return "0" if x == 0 else f"{x:.1e}"
