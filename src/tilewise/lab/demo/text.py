"""Real text that every machine has: the sources of Python's own standard library."""

from __future__ import annotations

import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 10  # every tenth file is kept out of training
LEAST_BYTES = 200_000


class NoText(Exception):
    """The machine has no readable standard library sources."""


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held out, both (n,) uint8 on the CPU; `source` says whose they are."""

    train: Tensor
    valid: Tensor
    source: str


def standard_library(folders: list[Path] | None = None) -> Text:
    """The modules at the top of the standard library, in order of their names.

    The same Python version gives the same bytes, wherever it is installed.

    Raises:
        NoText: there are fewer than 200 kB of sources, as where they are zipped or stripped.
    """
    if folders is None:
        folders = [Path(sysconfig.get_path("stdlib")), Path(os.__file__).parent]
    files = next((found for folder in folders if (found := sorted(folder.glob("*.py")))), [])
    contents = [path.read_bytes() for path in files]
    train = b"".join(c for n, c in enumerate(contents) if n % HELD_OUT)
    valid = b"".join(c for n, c in enumerate(contents) if n % HELD_OUT == 0)
    if len(train) + len(valid) < LEAST_BYTES:
        raise NoText(
            f"found {len(train) + len(valid)} bytes of standard library sources in "
            f"{' and '.join(map(str, folders))}; the demo trains on at least {LEAST_BYTES}"
        )
    return Text(
        torch.frombuffer(bytearray(train), dtype=torch.uint8),
        torch.frombuffer(bytearray(valid), dtype=torch.uint8),
        f"{len(files)} modules of Python {platform.python_version()}'s standard library: "
        f"{len(train) / 1e6:.2f} MB to train on, {len(valid) / 1e6:.2f} MB held out",
    )


def sample(data: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows: bytes and the bytes that follow them, each (batch, context) int64."""
    starts = torch.randint(len(data) - context, (batch,), generator=generator)
    return _windows(data, starts, context)


def spread(data: Tensor, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Evenly spaced windows, as `sample`."""
    starts = torch.linspace(0, len(data) - context - 1, batch).long()
    return _windows(data, starts, context)


def _windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    rows = data[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]
