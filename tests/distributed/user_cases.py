"""What ranks run that users write: DTensors, decoding, names of others, the benchmark."""

from __future__ import annotations

from unittest import mock

import torch
from cases import close

from tilewise import KVCache, PagedKVCache, attention_with_cache, reference
from tilewise.distributed import (
    attention_with_split_cache,
    context_parallel_attention,
    unshard,
)


def decode(group, seed, sinks, softcap):
    """A prompt whose keys lie in the ranks' caches, then steps whose tokens the ranks take in turn."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    torch.manual_seed(seed)
    prompt, steps = 2 * world - 1, (1, 1, 3, 1)  # of 2 prompts the last rank has nothing
    n = prompt + sum(steps)
    q, k, v = (torch.randn(2, n, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    options = {"softcap": softcap, "sinks": torch.randn(4, dtype=torch.float64) if sinks else None}
    exact, exact_lse = reference.attention(q, k, v, causal=True, **options)
    cache = KVCache(2, n, 2, 16, dtype=torch.float64)
    if rank < world - 1:
        own = slice(2 * rank, 2 * rank + 2)
        cache.append(k[:, own], v[:, own])
    start = prompt - 1
    for number, count in enumerate((1, *steps)):
        rows = slice(start, start + count)
        where = {"owner": number % world, "group": group}
        out, lse = attention_with_split_cache(
            q[:, rows], cache, k[:, rows], v[:, rows], **where, **options, return_lse=True
        )
        assert out.is_contiguous()
        close(out, exact[:, rows], f"out of step {number}")
        close(lse, exact_lse[..., rows], f"lse of step {number}")
        start += count


def compiled_steps(group):
    """Two steps in the middle of code that is compiled: out and the cache are as in eager mode."""
    x = torch.randn(2, 1, 2, 8, generator=torch.Generator().manual_seed(0))
    caches = [KVCache(2, 2, 2, 8, dtype=torch.float32) for _ in range(2)]

    def step_with(cache):
        return lambda x: attention_with_split_cache(x * 2, cache, x, x, group=group) * 3

    functions = torch.compile(step_with(caches[0]), backend="aot_eager"), step_with(caches[1])
    with torch.no_grad():
        outs = [torch.cat([function(x), function(x.sin())]) for function in functions]
    close(*outs, "out")
    assert caches[0].lengths.tolist() == caches[1].lengths.tolist()


def decode_in_16_bits(group, dtype):
    """The error of one rounding, as that of a single cache."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    torch.manual_seed(3)
    q, k, v = (torch.randn(4, n, h, 64).to(dtype) for n, h in ((1, 8), (60 * world, 2), (60 * world, 2)))
    own, whole = (KVCache(4, 60 * world, 2, 64, dtype=dtype) for _ in range(2))
    own.append(*(t[:, 60 * rank : 60 * rank + 60] for t in (k, v)))
    whole.append(k, v)
    out, alone = attention_with_split_cache(q, own, group=group), attention_with_cache(q, whole)
    exact = reference.attention(q, k, v)[0]
    ours, of_one = ((t.double() - exact).abs().mean() for t in (out, alone))
    assert out.dtype == dtype and ours <= 1.02 * of_one, (ours, of_one)


def overflow(group):
    cache, x = KVCache(1, 1, 1, 8, dtype=torch.float32), torch.ones(1, 2, 1, 8)
    try:
        attention_with_split_cache(x, cache, x, x, owner=1, group=group)
    except ValueError as error:
        return str(error)


def decode_apart(group, change, is_paged):
    """The last rank has another cache, or another argument."""
    is_last, x = torch.distributed.get_rank(group) == 1, torch.ones(1, 1, 2, 8)
    heads = 1 if change == "heads" and is_last else 2
    head_dim_v = 16 if change == "head_dim_v" and is_last else 8
    sizes = {"head_dim_v": head_dim_v, "dtype": torch.float32}
    own = cache = KVCache(1, 4, heads, 8, **sizes)
    if is_paged:
        own = cache = PagedKVCache(1, 16, heads, 8, **sizes)
        cache.allocate()
    value = None if change == "value" and is_last else x
    sinks = torch.ones(2) if change == "sinks" and is_last else None
    cache = None if change == "cache" and is_last else cache
    try:
        attention_with_split_cache(x, cache, x, value, sinks=sinks, group=group)
    except Exception as error:
        assert (own.length(0) if is_paged else own.lengths.item()) == 0
        return str(error)


def bench_suite(group):
    """The benchmark's own loop on the ranks of the pool, all of them: what the first rank writes."""
    from tilewise.lab.bench.cases import dense, packed
    from tilewise.lab.bench.run import Settings
    from tilewise.lab.bench.timing import CpuStopwatch
    from tilewise.lab.distributed.bench import run
    from tilewise.lab.distributed.peers import Group

    cases = [
        dense("forward", "float32", 16, 4, 1, 130, causal=True),
        packed("forward+backward", "float32", 16, 4, (70, 1, 60), True),
    ]
    ranks = Group(torch.distributed.get_rank(), torch.distributed.get_world_size(), "cpu")
    with mock.patch.object(CpuStopwatch, "most", 3):  # samples a round, each of which all ranks wait for
        return run(Settings("distributed", rounds=2), cases, ranks)


def bench_with_faults(group):
    """The first rank finds a peer wrong, then fails at another: all ranks leave both, and time the next."""
    from tilewise.lab.bench import gate
    from tilewise.lab.bench.cases import dense
    from tilewise.lab.bench.run import Settings
    from tilewise.lab.bench.timing import CpuStopwatch
    from tilewise.lab.distributed.bench import run
    from tilewise.lab.distributed.peers import Group

    answers = [gate.Verdict(9.0, 1.0, "off"), MemoryError("full"), gate.Verdict(0.0, 1.0, None)]
    ranks = Group(torch.distributed.get_rank(), torch.distributed.get_world_size(), "cpu")
    peers = ("tilewise:ring", "tilewise:all_gather", "zigzag-ring")
    case = dense("forward", "float32", 16, 4, 1, 130, causal=True)
    with mock.patch.object(CpuStopwatch, "most", 3), mock.patch.object(gate, "check", side_effect=answers):
        found = run(Settings("distributed", rounds=2, peers=peers), [case], ranks)
    return {name: entry["status"] for name, entry in found["cases"][0]["peers"].items()}


def on_dtensors(group, layout, packed):
    """Heads over two ranks, the sequence over two others, out and gradients as DTensors again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "heads"))
    torch.manual_seed(0)
    shape = (12, 4, 8) if packed else (2, 12, 4, 8)
    whole = [torch.randn(shape, dtype=torch.float64) for _ in range(4)]
    ends = torch.tensor([0, 5, 12]) if packed else None
    starts = {"cu_seqlens_q": ends, "cu_seqlens_k": ends} if packed else {}
    exact = reference.attention(*whole[:3], causal=True, **starts)
    wanted = reference.attention_backward(whole[3], *whole[:3], causal=True, **starts)
    swap = (lambda t: t.transpose(1, 2)) if layout == "bhsd" else (lambda t: t)
    places = (
        [Shard(0), Shard(1)] if packed else [Shard(2), Shard(1)] if layout == "bhsd" else [Shard(1), Shard(2)]
    )
    q, k, v, dout = (distribute_tensor(swap(t).contiguous(), mesh, places) for t in whole)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = context_parallel_attention(
        *leaves, causal=True, layout=layout, cu_seqlens=ends, return_lse=True, method="ring"
    )
    assert isinstance(out, DTensor) and list(out.placements) == places and out.shape == q.shape
    close(swap(out.full_tensor()), exact[0], "out")
    close(lse.full_tensor(), exact[1], "lse")
    for g, name in zip(torch.autograd.grad(out, leaves, dout), ("query", "key", "value")):
        close(swap(g.full_tensor()), getattr(wanted, name), f"d{name}")
    try:
        context_parallel_attention(q, k, v, layout=layout, cu_seqlens=ends, dropout_p=0.1)
    except NotImplementedError as error:
        assert "mesh of 2 dimensions" in str(error)
    else:
        raise AssertionError("replicas would have had masks of their own")
    other = distribute_tensor(swap(whole[0]).contiguous(), mesh, [Replicate(), Shard(places[1].dim)])
    try:
        context_parallel_attention(other, other, other, layout=layout, cu_seqlens=ends)
    except ValueError as error:
        return str(error)
    return None


def on_odd_dtensors(group, layout):
    """11 tokens of two ranks, query and value of other sizes: out and lse are of all 11 on both."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    lead = () if layout == "packed" else (2,)
    whole = [torch.randn(*lead, 11, h, d, dtype=torch.float64) for h, d in ((4, 8), (2, 8), (2, 6), (4, 6))]
    ends = torch.tensor([0, 4, 11]) if layout == "packed" else None
    starts = {} if ends is None else {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    exact = reference.attention(*whole[:3], causal=True, **starts)
    wanted = reference.attention_backward(whole[3], *whole[:3], causal=True, **starts)
    swap = (lambda t: t.transpose(1, 2)) if layout == "bhsd" else (lambda t: t)
    places = [Shard({"packed": 0, "bshd": 1, "bhsd": 2}[layout])]
    *leaves, dout = (distribute_tensor(swap(t).contiguous(), mesh, places) for t in whole)
    leaves = [t.requires_grad_() for t in leaves]
    form = "bhsd" if layout == "bhsd" else "bshd"
    out, lse = context_parallel_attention(
        *leaves, causal=True, layout=form, cu_seqlens=ends, return_lse=True, method="ring"
    )
    assert out.shape == swap(exact[0]).shape and lse.shape == exact[1].shape
    assert out.stride() == swap(torch.empty(exact[0].shape)).stride()
    close(swap(out.full_tensor()), exact[0], "out")
    close(lse.full_tensor(), exact[1], "lse")
    for g, name in zip(torch.autograd.grad(out, leaves, dout), ("query", "key", "value")):
        close(swap(g.full_tensor()), getattr(wanted, name), f"d{name}")
    found = []
    for change in ({"layout": "sbhd"}, {"seqlen": 10}, {"sinks": dout}):
        try:
            context_parallel_attention(*leaves, **{"layout": form, "cu_seqlens": ends} | change)
        except (TypeError, ValueError) as error:
            found.append(str(error))
    try:
        unshard(dout, group=group)
    except TypeError as error:
        found.append(str(error))
    return found


def ring_flash_attn_names(group, name):
    """Shards cut as users of ring_flash_attn cut them."""
    from tilewise.compat import ring_flash_attn

    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    torch.manual_seed(3)
    lengths = (4 * world, 8 * world) if "varlen" in name else (12 * world,)
    lead = () if "varlen" in name else (2,)
    whole = [torch.randn(*lead, sum(lengths), heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    dim = len(lead)

    def cut(t):
        parts = []
        for document in t.split(lengths, dim):
            chunks = document.chunk(2 * world, dim)
            own = (rank, 2 * world - 1 - rank) if "zigzag" in name else (2 * rank, 2 * rank + 1)
            parts += [chunks[n] for n in own]
        return torch.cat(parts, dim)

    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends} if "varlen" in name else {}
    exact, exact_lse = reference.attention(*whole, causal=True, window=(9, None), **packed)
    local = (ends // world, max(lengths) // world) if packed else ()
    options = {"causal": True, "window_size": (9, -2), "return_attn_probs": True, "group": group}
    out, lse, probs = getattr(ring_flash_attn, name)(*map(cut, whole), *local, **options)
    close(out, cut(exact), "out")
    close(lse, cut(exact_lse.transpose(-1, -2)).transpose(-1, -2), "lse")
    assert probs is None
    for change in ({"window_size": 9}, {"cu_seqlens": [0, 3]} if packed else {"k": None}):
        given = dict(zip(("q", "k", "v", "cu_seqlens", "max_seqlen"), (*map(cut, whole), *local))) | options
        try:
            getattr(ring_flash_attn, name)(**given | (change if rank == 0 else {}))
        except (TypeError, ValueError) as error:
            assert next(iter(change)) in str(error) and (rank == 0 or "rank 0" in str(error))
        else:
            raise AssertionError(f"{change} was taken")


def sink_of_no_weight(group):
    """Sinks of -inf, and queries that see no key: every gradient is a number, and the sinks' is 0."""
    x = torch.randn(1, 4, 2, 8, requires_grad=True)
    sinks = torch.full((2,), -torch.inf, requires_grad=True)
    mask = torch.zeros(1, 1, 4, 8, dtype=torch.bool)
    out = context_parallel_attention(x, x, x, mask=mask, sinks=sinks, group=group)
    out.sum().backward()
    assert not out.any() and not x.grad.any() and torch.equal(sinks.grad, torch.zeros(2))


def gradient_penalty(group, method):
    """What a second derivative is told, of a sum, whose gradient is constant; the first is as without it."""
    x = torch.randn(1, 8, 2, 8, requires_grad=True)
    out = context_parallel_attention(x, x, x, group=group, method=method, causal=True)
    (plain,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert torch.equal(grad, plain)
    try:
        (out.sum() + grad.square().sum()).backward()
    except RuntimeError as error:  # NotImplementedError is one
        return str(error)
    return None
