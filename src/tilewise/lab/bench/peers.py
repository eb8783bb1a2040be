"""What is measured side by side, by name."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.attention import SDPBackend

from tilewise.dispatch.choice import BACKENDS
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.external import FlashAttention2, FlashAttention3, FlashAttention4, Xformers
from tilewise.lab.bench.own import Tilewise
from tilewise.lab.bench.peer import Peer
from tilewise.lab.bench.torch_peers import Flex, Sdpa, Standard


def all_peers() -> dict[str, Peer]:
    """Every peer by name, in the order of the tables."""
    peers: list[Peer] = [
        Tilewise(),
        Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION),
        Sdpa("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
        Sdpa("sdpa-math", SDPBackend.MATH),
        Flex(),
        Standard(),
        FlashAttention2(),
        FlashAttention3(),
        FlashAttention4(),
        Xformers(),
    ]
    return {peer.name: peer for peer in peers}


def find_peers(names: Sequence[str]) -> list[Peer]:
    """The peers of these names; "tilewise:NAME" is tilewise with that backend, "all" is every peer.

    Raises:
        BenchError: a name is unknown.
    """
    known, found = all_peers(), {}
    for name in names:
        backend = name.removeprefix("tilewise:")
        if name == "all":
            found.update(known)
        elif name in known:
            found[name] = known[name]
        elif name != backend and backend in BACKENDS:
            found[name] = Tilewise(backend)
        else:
            backends = ", ".join(f"tilewise:{b}" for b in BACKENDS)
            raise BenchError(f"peer {name!r} is unknown, must be all, {', '.join(known)} or {backends}")
    return list(found.values())
