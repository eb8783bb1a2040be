"""DTensors sharded along the sequence: their shards in, a DTensor out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.core.checks import shown

DIMENSIONS = {"bshd": "bshd", "bhsd": "bhsd", "packed": "shd"}
LSE = {"bshd": "bhs", "bhsd": "bhs", "packed": "hs"}


class Shards(NamedTuple):
    """What a call takes instead of DTensors, and how its results become one."""

    query: Tensor
    key: Tensor
    value: Tensor
    group: Any
    seqlen: int
    wrap: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def is_dtensor(t: Any) -> bool:
    """Whether it is a DTensor; asking imports nothing."""
    return isinstance(t, Tensor) and hasattr(t, "placements") and hasattr(t, "to_local")


def shards_of(query: Any, key: Any, value: Any, layout: str) -> Shards:
    """The shards of query, key and value, which lie on one mesh alike. `layout` may be "packed".

    Raises:
        ValueError, TypeError: they are not all DTensors, are placed differently, or no mesh dimension shards
            the sequence.
    """
    mesh, placements = query.device_mesh, tuple(query.placements)
    for name, t in (("key", key), ("value", value)):
        if not is_dtensor(t):
            raise TypeError(f"{name}={shown(t)} must be a DTensor, as query is")
        if t.device_mesh != mesh or tuple(t.placements) != placements:
            raise ValueError(
                f"{name}.placements={t.placements} must be those of query, {placements}, on its mesh"
            )
    names = DIMENSIONS[layout]
    shards = [names[p.dim % query.ndim] if p.is_shard() else "" for p in placements]
    partial = any(p.is_partial() for p in placements)
    if shards.count("s") != 1 or partial or "d" in shards:
        raise ValueError(
            f"query.placements={placements} must shard the sequence, dimension {names.index('s')}, along one "
            "dimension of the mesh, and along others batch, heads or nothing"
        )
    group = mesh.get_group(shards.index("s"))

    def placed(t: Tensor, names: str) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        found = [Shard(names.index(n)) if n else Replicate() for n in shards]
        return DTensor.from_local(t, mesh, found, run_check=False)

    def wrap(out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return placed(out, names), None if lse is None else placed(lse, LSE[layout])

    seqlen = query.shape[names.index("s")]
    return Shards(query.to_local(), key.to_local(), value.to_local(), group, seqlen, wrap)
