"""What ranks run: a problem made from a seed, on this rank's shard, compared with the O(N^2) reference."""

from __future__ import annotations

import importlib.util
import random

import torch

from tilewise import Aux, KVCache, attention, attention_varlen, reference
from tilewise.distributed import (
    attention_with_split_cache,
    context_parallel,
    context_parallel_attention,
    positions,
    shard,
    unshard,
)
from tilewise.distributed.faults import Disagreement
from tilewise.testing import compare

WHOLE = ("sinks",)


def problem(seed: int, options: dict, n: int, heads: int, kv_heads: int, cu_seqlens=None):
    """Tensors of the whole sequence in float64, the same on every rank."""
    torch.manual_seed(seed)
    lead = () if cu_seqlens else (2,)
    new = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    tensors = {
        "query": new(*lead, n, heads, 16),
        "key": new(*lead, n, kv_heads, 16),
        "value": new(*lead, n, kv_heads, 8),
    }
    options = dict(options)
    if options.pop("sinks", False):
        tensors["sinks"] = new(heads)
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(heads, dtype=torch.float64)
    if shape := options.pop("bias", None):
        tensors["bias"] = new(2, heads, n if shape == "rows" else 1, n)
    if options.pop("mask", False):
        options["mask"] = torch.rand(2, 1, 1, n) < 0.7
    return tensors, options


def check(group, seed, method, balance, options, n, heads, kv_heads, cu_seqlens=None):
    """Forward, lse and every gradient."""
    tensors, options = problem(seed, options, n, heads, kv_heads, cu_seqlens)
    dim = 0 if cu_seqlens else 1
    where = {"group": group, "balance": balance, "cu_seqlens": cu_seqlens}
    own = {}
    for name, t in tensors.items():
        if name == "sinks" or (name == "bias" and t.shape[2] == 1):
            own[name] = t.clone()
        else:
            own[name] = shard(t, dim=2 if name == "bias" else dim, **where)
    own = {name: t.requires_grad_() for name, t in own.items()}
    out, lse = context_parallel_attention(**own, **options, **where, method=method, seqlen=n, return_lse=True)
    torch.manual_seed(seed + 1)
    q, v = tensors["query"], tensors["value"]
    dout = torch.randn(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    dlse = torch.randn(*q.shape[:-3], q.shape[-2], n, dtype=torch.float64)
    given = shard(dout, dim=dim, **where), shard(dlse, dim=-1, **where)
    grads = torch.autograd.grad((out, lse), tuple(own.values()), given)
    packed = {}
    if cu_seqlens:
        starts = torch.tensor(cu_seqlens)
        packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    exact = reference.attention(**tensors, **options, **packed)
    wanted = reference.attention_backward(dout, **tensors, dlse=dlse, **options, **packed)._asdict()
    close(unshard(out.detach(), dim=dim, **where), exact[0], "out")
    close(unshard(lse.detach(), dim=-1, **where), exact[1], "lse")
    for name, g in zip(own, grads):
        assert g.is_contiguous() or name in ("sinks", "bias"), name
        if name == "sinks" or (name == "bias" and tensors[name].shape[2] == 1):
            torch.distributed.all_reduce(g, group=group)
        else:
            g = unshard(g, dim=2 if name == "bias" else dim, **where)
        close(g, wanted[name], f"d{name}")


def close(found, exact, name):
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")


def random_check(group, seed):
    """A problem drawn at random, the same on every rank."""
    draw = random.Random(seed)
    n, kv_heads = draw.randint(1, 70), draw.choice([1, 2, 4, 12])
    options = {"causal": draw.random() < 0.6}
    if draw.random() < 0.4:
        options["window"] = draw.choice([(5, 0), (9, 3), (None, 4), (0, 0), (33, None)])
    if draw.random() < 0.3:
        options["softcap"] = 3.0
    options |= {name: True for name in ("sinks", "alibi") if draw.random() < 0.3}
    cu_seqlens = None
    if draw.random() < 0.5:
        cu_seqlens = [0, *sorted(draw.randint(0, n) for _ in range(draw.randint(0, 5))), n]
    method = draw.choice(["ring", "all_gather", "ulysses", "2d", "auto"])
    balance = draw.choice(["contiguous", "zigzag", "documents"])
    if method in ("ulysses", "2d"):
        kv_heads = 12
    call = (seed, method, balance, options, n, 12, kv_heads, cu_seqlens)
    try:
        check(group, *call)
    except Exception as error:
        raise AssertionError(f"check{call}") from error


def round_trip(group, n, balance, cu_seqlens):
    x = torch.arange(2 * n * 3.0).view(2, n, 3)
    where = {"group": group, "balance": balance, "cu_seqlens": cu_seqlens}
    own = shard(x, **where)
    assert torch.equal(unshard(own, **where), x)
    starts = torch.tensor(cu_seqlens or [0, n])
    token = torch.arange(n)
    position = token - starts[torch.searchsorted(starts, token, right=True) - 1]
    assert torch.equal(positions(n, **where), shard(position, dim=0, **where))
    return own.shape[1]


def disagree(group, change):
    rank = torch.distributed.get_rank(group)
    q = torch.ones(1, 4, 2, 8)
    options = {"causal": True}
    if rank == 1:
        q = q.double() if change == "dtype" else q[:, :3] if change == "length" else q
        options = {"causal": False} if change == "option" else options
        options |= {"window": (-1, 0)} if change == "error" else {}
    options |= {"backend": "hopper"} if change == "backend" else {}
    try:
        context_parallel_attention(q, q, q, group=group, **options)
    except (Disagreement, ValueError, NotImplementedError) as error:
        return str(error)
    return None


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
        close(out, exact[:, rows], f"out of step {number}")
        close(lse, exact_lse[..., rows], f"lse of step {number}")
        start += count


def overflow(group):
    cache, x = KVCache(1, 1, 1, 8, dtype=torch.float32), torch.ones(1, 2, 1, 8)
    try:
        attention_with_split_cache(x, cache, x, x, owner=1, group=group)
    except ValueError as error:
        return str(error)


def inside_context(group, seed, face, balance, cu_seqlens):
    """Code that knows of no ranks, in `context_parallel`: forward and gradients."""
    draw = torch.Generator().manual_seed(seed)
    n = 43
    q, dout = (torch.randn(1, n, 4, 16, dtype=torch.float64, generator=draw) for _ in range(2))
    k, v = (torch.randn(1, n, 2, 16, dtype=torch.float64, generator=draw) for _ in range(2))
    wanted = [q.clone(), k.clone(), v.clone()]
    where = {"group": group, "balance": balance, "cu_seqlens": cu_seqlens}
    buffers = [q, k, v, dout]
    with context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, -3, 1], no_restore_buffers={dout}, **where):
        leaves = [t.clone().requires_grad_() for t in buffers[:3]]
        assert leaves[0].shape[1] < n
        if face == "sdpa":
            heads_first = [t.transpose(1, 2) for t in leaves]
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads_first, is_causal=True, enable_gqa=True
            )
            out = out.transpose(1, 2)
        elif face == "varlen":
            ends = torch.tensor([0, leaves[0].shape[1]])
            out = attention_varlen(*(t[0] for t in leaves), ends, ends, causal=True)[None]
        else:
            out, _ = attention(*leaves, causal=True, return_lse=True)
        own = dout.clone()
    grads = torch.autograd.grad(out, leaves, own)
    for t, before in zip((q, k, v), wanted):
        assert torch.equal(t, before)
    assert dout.shape[1] < n
    whole = unshard(dout, seqlen=n, **where)
    starts = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    packed = {} if starts is None else {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    tensors = wanted if starts is None else [t[0] for t in wanted]
    lead = (lambda t: t) if starts is None else (lambda t: t[None])
    exact = reference.attention(*tensors, causal=True, **packed)[0]
    close(unshard(out.detach(), seqlen=n, **where), lead(exact), "out")
    dout = whole if starts is None else whole[0]
    gradients = reference.attention_backward(dout, *tensors, causal=True, **packed)
    for g, name in zip(grads, ("query", "key", "value")):
        close(unshard(g, seqlen=n, **where), lead(getattr(gradients, name)), f"d{name}")


def refused_in_context(group, change):
    x = torch.ones(1, 5, 2, 8)
    ends = torch.tensor([0, 2, 5])
    calls = {
        "dropout": lambda: attention(x, x, x, dropout_p=0.5),
        "documents": lambda: attention_varlen(x[0], x[0], x[0], ends, ends),
        "function": lambda: attention(x, x, x, mask_mod=lambda b, h, q, k: q >= k),
        "statistics": lambda: attention(x, x, x, return_aux=Aux(entropy=True)),
    }
    try:
        with context_parallel(group=group, seqlen=10):
            calls[change]()
    except (NotImplementedError, ValueError) as error:
        assert attention(x, x, x).shape == x.shape  # outside all is as before
        return str(error)
    return None


def transformers_model(group, implementation):
    """A model whose layers have a window, on shards of a batch of two: logits and gradients."""
    from transformers import MistralConfig, MistralForCausalLM

    from tilewise.integrations.transformers import register

    register()
    torch.manual_seed(0)
    window = 5 if implementation == "tilewise" else None
    config = MistralConfig(
        vocab_size=11, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window, attn_implementation=implementation,
    )  # fmt: skip
    model = MistralForCausalLM(config).double()
    n = 21
    tokens = torch.randint(11, (2, n))
    places = torch.arange(n).expand(2, -1).clone()
    exact = model(input_ids=tokens).logits
    wanted = torch.autograd.grad(exact.square().sum(), list(model.parameters()))
    where = {"group": group, "balance": "zigzag" if implementation == "tilewise" else "contiguous"}
    with context_parallel(buffers=[tokens, places], buffer_seq_dims=[1, 1], **where):
        logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits
        grads = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    close(unshard(logits.detach(), seqlen=n, **where), exact.detach(), "logits")
    for (name, _), g, w in zip(model.named_parameters(), grads, wanted):
        torch.distributed.all_reduce(g, group=group)
        close(g, w, name)


def long_context(group, path):
    """The example on the ranks of the pool, all of them: its losses."""
    spec = importlib.util.spec_from_file_location("long_context", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    sizes = "--seqlen 99 --width 16 --heads 2 --layers 2 --steps 6 --lr 0.03 --alone"
    return example.main(sizes.split(), torch.device("cpu"))


def bench_suite(group):
    """The benchmark's own loop on the ranks of the pool, all of them: what the first rank writes."""
    from tilewise.lab.bench.cases import dense, packed
    from tilewise.lab.bench.run import Settings
    from tilewise.lab.distributed.bench import run
    from tilewise.lab.distributed.peers import Group

    cases = [
        dense("forward", "float32", 16, 4, 1, 130, causal=True),
        packed("forward+backward", "float32", 16, 4, (70, 1, 60), True),
        dense("forward+backward", "float32", 16, 4, 1, 128, window=(20, 0)),
    ]
    ranks = Group(torch.distributed.get_rank(), torch.distributed.get_world_size(), "cpu")
    return run(Settings("distributed", rounds=2), cases, ranks)


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
    other = distribute_tensor(swap(whole[0]).contiguous(), mesh, [Replicate(), Shard(places[1].dim)])
    try:
        context_parallel_attention(other, other, other, layout=layout, cu_seqlens=ends)
    except ValueError as error:
        return str(error)
    return None


def rounding(group, seed, method, dtype):
    """Errors of a 16-bit call against those of PyTorch in that dtype, by the rule of `tilewise.testing`."""
    torch.manual_seed(seed)
    n, heads = 300, 4
    q, k, v, dout = (torch.randn(1, n, heads, 32).to(dtype) for _ in range(4))
    own = [shard(t, group=group).requires_grad_() for t in (q, k, v)]
    out = context_parallel_attention(*own, group=group, method=method, causal=True, seqlen=n)
    grads = torch.autograd.grad(out, own, shard(dout, group=group))
    found = [unshard(t.detach(), group=group, seqlen=n) for t in (out, *grads)]
    right, base = (
        [
            reference.attention(q, k, v, causal=True, dtype=t)[0],
            *reference.attention_backward(dout, q, k, v, causal=True, dtype=t)[:3],
        ]
        for t in (torch.float64, dtype)
    )
    for name, f, x, b in zip(("out", "dq", "dk", "dv"), found, right, base):
        report = compare(name, f, x, b)
        assert f.dtype == dtype and report.is_within, report


def with_functions(group, seed, method, balance, options):
    """Functions that read captured tensors by position, head and batch entry: forward, all gradients."""
    torch.manual_seed(seed)
    n, heads, new = 37, 4, lambda *shape: torch.randn(*shape, dtype=torch.float64)
    q, k, v, dout = new(2, n, heads, 8), new(2, n, 2, 8), new(2, n, 2, 8), new(2, n, heads, 8)
    table, prefix = new(heads, n).requires_grad_(), torch.tensor([5, 30])

    def score_mod(score, b, h, i, j):
        return torch.tanh(score) * 2 + table[h, i] * (i - j) * 0.1

    def mask_mod(b, h, i, j):
        return (i >= j) | (j < prefix[b]) | (h == 2)

    functions = {"score_mod": score_mod, "mask_mod": mask_mod}
    functions = functions if seed % 2 else {"mask_mod": mask_mod}
    captured = (table,) if seed % 2 else ()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    exact, exact_lse = attention(*leaves, **functions, **options, return_lse=True)
    wanted = torch.autograd.grad(exact, (*leaves, *captured), dout)
    where = {"group": group, "balance": balance}
    own = [shard(t, **where).requires_grad_() for t in (q, k, v)]
    out, lse = context_parallel_attention(
        *own, **functions, **options, **where, method=method, seqlen=n, return_lse=True
    )
    grads = torch.autograd.grad(out, (*own, *captured), shard(dout, **where))
    close(unshard(out.detach(), seqlen=n, **where), exact.detach(), "out")
    close(unshard(lse.detach(), dim=-1, seqlen=n, **where), exact_lse.detach(), "lse")
    for g, w in zip(grads[:3], wanted):
        close(unshard(g, seqlen=n, **where), w, "gradient")
    for g, w in zip(grads[3:], wanted[3:]):
        torch.distributed.all_reduce(g, group=group)
        close(g, w, "captured")


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
    options = {"causal": True, "window_size": (9, -1), "return_attn_probs": True, "group": group}
    out, lse, probs = getattr(ring_flash_attn, name)(*map(cut, whole), *local, **options)
    close(out, cut(exact), "out")
    close(lse, cut(exact_lse.transpose(-1, -2)).transpose(-1, -2), "lse")
    assert probs is None
