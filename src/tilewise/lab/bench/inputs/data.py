"""The numbers of a case: a kernel's speed should not depend on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NATS = 60.0  # by which scores differ from the first key to the last
HUGE = 40.0  # times a key of ordinary size
SPIKE = 8.0
SPIKE_EVERY = 128  # keys


def _scaled(factor: float) -> Callable[[Tensor, Tensor], None]:
    def change(query: Tensor, key: Tensor) -> None:
        query *= factor
        key *= factor

    return change


def _sloped(first: float, last: float) -> Callable[[Tensor, Tensor], None]:
    """Scores to which one coordinate adds `NATS` times first to last, from the first key to the last."""

    def change(query: Tensor, key: Tensor) -> None:
        step = (NATS * key.shape[-1] ** 0.5) ** 0.5
        query[..., 0] = step
        key[..., 0] = step * torch.linspace(first, last, key.shape[1], device=key.device)[:, None]

    return change


def _one_huge_key(where: float) -> Callable[[Tensor, Tensor], None]:
    def change(query: Tensor, key: Tensor) -> None:
        key[:, int(where * (key.shape[1] - 1))] *= HUGE

    return change


def _spikes(query: Tensor, key: Tensor) -> None:
    key[:, SPIKE_EVERY // 2 :: SPIKE_EVERY] *= SPIKE


def _sorted(query: Tensor, key: Tensor) -> None:
    """Keys by their score for one part of the query that all queries share."""
    query += 3.0 * query[:, :1]
    group = query.shape[2] // key.shape[2]
    order = (query[:, :1, ::group] * key).sum(-1).argsort(1)
    key.copy_(key.gather(1, order[..., None].expand_as(key)))


def _equal(query: Tensor, key: Tensor) -> None:
    key.copy_(key[:, :1].expand_as(key))


# name: what it makes of query and key of standard normal numbers (batch, seqlen, heads, dim), in place
DATA: dict[str, Callable[[Tensor, Tensor], None]] = {
    "randn": lambda query, key: None,
    "x3": _scaled(3.0),
    "x6": _scaled(6.0),
    "x12": _scaled(12.0),
    "growing": _sloped(0.0, 1.0),
    "falling": _sloped(1.0, 0.0),
    "huge-first": _one_huge_key(0.0),
    "huge-middle": _one_huge_key(0.5),
    "huge-last": _one_huge_key(1.0),
    "spikes": _spikes,
    "sorted": _sorted,
    "equal": _equal,
}
