"""Ranks that disagree on a call say so, all of them, instead of waiting for each other."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from tilewise.core.device_errors import IS_DEBUG
from tilewise.distributed.ranks import Ranks, gather


class Disagreement(ValueError):
    """Ranks have called with different arguments, or one of them has refused its own."""


def agree(ranks: Ranks, facts: dict[str, Any], error: Exception | None, device: torch.device) -> None:
    """Raise on every rank if facts differ between ranks, or if a rank has an error; `error` is this rank's.

    Checked in every call on CPU groups, and on others if TILEWISE_DEBUG=1. Without that only this rank
    raises.

    Raises:
        Disagreement: naming the argument, its values and their ranks.
    """
    if ranks.group is None or not (ranks.is_cpu or IS_DEBUG):
        if error is not None:
            raise error
        return
    if error is not None:
        facts = {"error": str(error)}
    text = repr(sorted((name, str(value)) for name, value in facts.items()))
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    digests = gather(torch.tensor([digest, error is not None], device=device), ranks).tolist()
    if all(d == [digest, 0] for d in digests):
        return
    everyone: list[Any] = [None] * ranks.world
    dist.all_gather_object(everyone, {n: str(v) for n, v in facts.items()}, group=ranks.group)
    if error is not None:
        raise error
    raise Disagreement(_sentence(everyone))


def _sentence(everyone: list[dict[str, str]]) -> str:
    for rank, facts in enumerate(everyone):
        if "error" in facts:
            return f"rank {rank} refused its arguments: {facts['error']}"
    lines = []
    for name in everyone[0]:
        values: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            values.setdefault(facts.get(name, "not given"), []).append(rank)
        if len(values) > 1:
            shown = ", ".join(
                f"{v} on rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}" for v, r in values.items()
            )
            lines.append(f"{name} must be the same on all ranks: {shown}")
    return "; ".join(lines)
