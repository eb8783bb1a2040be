"""What each rank of `torchrun` does for `test_gpus.py`: every method against one device, in bfloat16.

torchrun --nproc-per-node gpu tests/distributed/gpu_ranks.py
torchrun --nproc-per-node 2 tests/distributed/gpu_ranks.py cpu  # the same over gloo
"""

from __future__ import annotations

import itertools
import os
import sys

import torch
import torch.distributed as dist

from tilewise import KVCache, attention, reference
from tilewise.distributed import (
    attention_with_split_cache,
    context_parallel_attention,
    peer_memory,
    shard,
    unshard,
)
from tilewise.testing import compare

METHODS = ("ring", "all_gather", "ulysses", "2d")
N, HEAD_DIM = 1203, 64
DOCUMENTS = [0, 130, 131, 700, N]
OPTIONS = {
    "causal": {"causal": True},
    "full": {"softcap": 20.0},
    "window": {"window": (100, 30)},
    "documents": {"causal": True, "cu_seqlens": DOCUMENTS},
}


def poisoned(size, device):
    """Symmetric memory with NaN in it, which nobody may read."""
    found = allocate(size, device)
    return found if found is None else found.fill_(255)


allocate = peer_memory.symmetric_tensor
peer_memory.symmetric_tensor = poisoned


def check(method: str, name: str, kv_heads: int, device: torch.device, seed: int) -> None:
    """Out and gradients of one call."""
    torch.manual_seed(seed)
    options, lead = dict(OPTIONS[name]), (1,)
    cu_seqlens = options.pop("cu_seqlens", None)
    where = {"cu_seqlens": cu_seqlens, "balance": "contiguous" if name == "window" else "zigzag"}
    if cu_seqlens:
        where["balance"], lead = "documents", ()
    dim = len(lead)
    q, dout = (torch.randn(*lead, N, 8, HEAD_DIM).to(device, torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(*lead, N, kv_heads, HEAD_DIM).to(device, torch.bfloat16) for _ in range(2))
    own = [shard(t, dim=dim, **where).requires_grad_() for t in (q, k, v)]
    out = context_parallel_attention(*own, method=method, seqlen=N, **where, **options)
    grads = torch.autograd.grad(out, own, shard(dout, dim=dim, **where))
    found = [unshard(t.detach(), dim=dim, seqlen=N, **where) for t in (out, *grads)]
    if cu_seqlens:
        starts = torch.tensor(cu_seqlens, device=device)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}

    def computed(dtype: torch.dtype) -> list[torch.Tensor]:
        out = reference.attention(q, k, v, **options, dtype=dtype)[0]
        return [out, *reference.attention_backward(dout, q, k, v, **options, dtype=dtype)[:3]]

    for what, *values in zip(("out", "dq", "dk", "dv"), found, computed(torch.float64), computed(q.dtype)):
        report = compare(what, *values)
        assert report.is_within, f"{method} {name} {kv_heads} KV heads: {report}"


def check_graph(method: str, device: torch.device) -> None:
    """A captured call gives the bits of an eager one, when it is replayed too."""
    own = [torch.randn(1, 512, 8, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        eager = context_parallel_attention(*own, method=method, causal=True)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = context_parallel_attention(*own, method=method, causal=True)
    for _ in range(3):
        held.fill_(float("nan"))
        graph.replay()
        assert torch.equal(held, eager), method


def check_decoding(rank: int, world: int, device: torch.device) -> None:
    """One new token, and a cache of which each rank has some keys."""
    torch.manual_seed(5)
    new = lambda n, heads: torch.randn(1, n, heads, HEAD_DIM).to(device, torch.bfloat16)  # noqa: E731
    q, k, v = new(1, 8), new(100 * world, 2), new(100 * world, 2)
    cache = KVCache(1, 128, 2, HEAD_DIM, dtype=torch.bfloat16, device=device)
    mine = slice(100 * rank, 100 * (rank + 1))
    with torch.no_grad():
        cache.append(k[:, mine], v[:, mine])
        found = attention_with_split_cache(q, cache)
    exact, base = (reference.attention(q, k, v, dtype=t)[0] for t in (torch.float64, torch.bfloat16))
    assert (report := compare("out", found, exact, base)).is_within, report
    assert compare("alone", attention(q, k, v), exact, base).is_within


def main() -> None:
    rank, world, kind = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), (sys.argv[1:] or ["cuda"])[0]
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    calls = [c for c in itertools.product(METHODS, OPTIONS, (8, 4)) if c[0] != "2d" or world > 3]
    for seed, (method, name, kv_heads) in enumerate(calls):
        check(method, name, kv_heads, device, seed)
    for method in METHODS if kind == "cuda" else ():
        check_graph(method, device)
    check_decoding(rank, world, device)
    reads = sorted({purpose for _, _, purpose in peer_memory._memories})
    dist.barrier()
    if rank == 0:
        print(f"{len(calls)} calls are right; memory that ranks read: {', '.join(reads) or 'none'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
