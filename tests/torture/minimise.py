"""A failing sequence made smaller, each attempt in a process of its own, and printed as a script."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

from tests.torture.problems import Problem

SECONDS = 120  # for one attempt
BUDGET = 300  # for all
Run = Callable[[list[Problem]], list[str]]


def outcome(run: Run, problems: list[Problem], seconds: float = SECONDS) -> str:
    """What a forked process says of the sequence: "" if all is right."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, "\n".join(run(problems))[:4000].encode())
        os._exit(0)
    os.close(writer)
    said = b""
    ready, _, _ = select.select([reader], [], [], seconds)
    if ready:
        said = os.read(reader, 4096)
    else:
        os.kill(child, 9)
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    return said.decode() or (f"the process ended with status {status}" if status else "")


def smaller(run: Run, problems: list[Problem]) -> list[Problem]:
    """The sequence with as few calls and as plain problems as still fail in any way."""
    end = time.monotonic() + BUDGET
    current, improved = problems, True
    while improved and time.monotonic() < end:
        improved = False
        for candidate in candidates(current):
            if time.monotonic() > end:
                break
            if outcome(run, candidate):
                current, improved = candidate, True
                break
    return current


def candidates(problems: list[Problem]) -> Iterator[list[Problem]]:
    """Smaller ones, the most hopeful first: without many calls, without one, with plainer fields."""
    size = len(problems) // 2
    while size:
        for start in range(0, len(problems), size):
            yield problems[:start] + problems[start + size :]
        size //= 2
    plain = Problem()
    for field in fields(Problem):
        default = getattr(plain, field.name)
        for p in dict.fromkeys(problems):
            value = getattr(p, field.name)
            for simple in simpler(value, default):
                if simple != value:
                    yield [replace(o, **{field.name: simple}) if o == p else o for o in problems]


def simpler(value: object, default: object) -> list[object]:
    """Values to try instead, of integers smaller ones only, so that trying ends."""
    if isinstance(value, bool) or not isinstance(value, int) or not isinstance(default, int):
        return [default]
    return [n for n in (default, 1, value // 2, value - 1) if min(1, default) <= n < value]


def script(problems: list[Problem]) -> str:
    """A program that shows the failure."""
    source = Path(__file__).with_name("problems.py").read_text()
    plain = Problem()
    lines = []
    for p in problems:
        changed = [
            f"{f.name}={v!r}" for f in fields(Problem) if (v := getattr(p, f.name)) != getattr(plain, f.name)
        ]
        lines.append(f"    Problem({', '.join(changed)}),")
    listed = "\n".join(lines)
    return (
        f"{source}\n\nwrong = run([\n{listed}\n])\nprint(*wrong, sep='\\n')\nraise SystemExit(bool(wrong))\n"
    )
