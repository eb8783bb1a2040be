"""Claims about the Long Range Arena: how much faster training is, and what it comes to."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial

from tilewise.lab.bench.errors import BenchError
from tilewise.lab.claims.claim import FA1, Measured, Setting, claim
from tilewise.lab.claims.models import EAGER, REST, faster
from tilewise.lab.long_range.tasks import TRAIN
from tilewise.lab.long_range.training import Progress, Settings, Training

BATCHES = {"listops": 32, "text": 16, "retrieval": 8, "pathfinder": 64, "path-x": 2}  # on a GPU
CPU_TOKENS = {"path-x": 64 * 64}  # standard attention of 16,384 needs more memory than most CPUs have


def _settings(task: str, setting: Setting) -> Settings:
    if setting.is_gpu:
        return Settings(task, batch=BATCHES[task], device="cuda", held_out=2048)
    return Settings(task, batch=1, layers=2, seqlen=CPU_TOKENS.get(task), held_out=512)


def _speed(setting: Setting, task: str) -> Measured:
    settings = _settings(task, setting)
    batch = settings.what.batch(TRAIN, 0, settings.batch, settings.tokens)

    def make(implementation: str) -> Callable[[], float]:
        name = "standard" if implementation == EAGER else implementation
        training = Training(dataclasses.replace(settings, attention=name))
        return lambda: float(training.step(batch))

    value, note, curves = faster(make)
    documents = "2 documents of " if settings.what.documents == 2 else ""
    return Measured(
        value,
        f"{documents}{settings.tokens:,} tokens, {settings.layers} layers, width {settings.width}, "
        f"batch {settings.batch}, beside the formula",
        note,
        curves,
    )


for _task, _what in {
    "listops": "ListOps", "text": "bytes of text", "retrieval": "retrieval", "pathfinder": "Pathfinder",
    "path-x": "Path-X",
}.items():  # fmt: skip
    claim(f"{_task}-step", f"Long Range Arena trains 2.4 times faster: {_what}.", FA1, 2.4, "×", why=REST)(
        partial(_speed, task=_task)
    )


SHORTER = "Trained for minutes, which ended before all steps were done."
STEPS = {"listops": 5_000, "pathfinder": 50_000, "path-x": 50_000}
TRAINED = {"listops": 32, "pathfinder": 128, "path-x": 8}  # examples of a step, on a GPU
EVERY = 100  # steps between checkpoints


def _accuracy(setting: Setting, task: str) -> Measured:
    """Of held-out examples, in percent, after a whole training."""
    settings = dataclasses.replace(_settings(task, setting), steps=STEPS[task], seconds=setting.budget)
    if setting.is_gpu:
        settings = dataclasses.replace(settings, batch=TRAINED[task], workers=min(14, os.cpu_count() or 1))

    def report(progress: Progress) -> None:
        setting.say(f"step {progress.steps:,} of {settings.steps:,}: loss {progress.losses[-1]:.4f}")

    if not setting.checkpoints.is_dir():
        raise BenchError(f"--checkpoints {setting.checkpoints} is not a folder")
    try:
        training = Training(settings, setting.checkpoints / f"{task}-{setting.device}.pt")
    except ValueError as error:  # of other settings
        raise BenchError(str(error)) from error
    progress = training.run(EVERY, report)
    assert progress.accuracy is not None
    return Measured(
        100 * progress.accuracy,
        f"{settings.tokens:,} tokens, {progress.steps:,} steps of {settings.batch}, "
        f"{settings.layers} layers, {progress.seconds / 3600:.2f} hours",
        f"by chance {100 / settings.what.classes:.0f}%; examples made here, not the arena's own",
    )


for _task, _what, _right in (
    ("listops", "ListOps", 37.6),
    ("pathfinder", "Pathfinder", 72.7),
    ("path-x", "Path-X at 16,384 tokens", 61.4),
):
    claim(
        _task, f"Trained on {_what}, {_right}% are right.", FA1, _right, "%", is_training=True, why=SHORTER
    )(partial(_accuracy, task=_task))
