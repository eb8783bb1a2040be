"""What ranks run: a problem made from a seed, on this rank's shard, compared with the O(N^2) reference."""

from __future__ import annotations

import contextlib
import functools
import random
import shutil
import tempfile
import time
import warnings
from datetime import timedelta
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

from tilewise import attention, attention_varlen, reference
from tilewise.distributed import (
    Network,
    context_parallel,
    context_parallel_attention,
    engine,
    network,
    peer_memory,
    positions,
    shard,
    unshard,
    wire,
)
from tilewise.distributed.ranks import Ranks, ranks_of
from tilewise.testing import MEAN_FACTOR, compare

WHOLE = ("sinks",)


def problem(seed: int, options: dict, n: int, heads: int, kv_heads: int, cu_seqlens=None):
    """Tensors of the whole sequence in float64, the same on every rank."""
    torch.manual_seed(seed)
    lead = () if cu_seqlens else (2,)
    new = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    tensors = {
        "query": new(*lead, n, heads, 16),
        "key": new(*lead, n, kv_heads, 16),
        "value": new(*lead, n, kv_heads, random.Random(seed).choice([8, 16])),
    }
    options = dict(options)
    if options.pop("sinks", False):
        tensors["sinks"] = new(heads)
    if alibi := options.pop("alibi", False):
        slopes = torch.rand(heads, dtype=torch.float64)
        options["alibi_slopes"] = slopes if alibi is True else slopes.to(alibi)
    if shape := options.pop("bias", None):
        tensors["bias"] = new(2, heads, n if shape == "rows" else 1, n)
    if "dropout_p" in options:
        options["dropout_seed"] = torch.randint(2**63 - 1, ())
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
    given = dict(options)
    if "dropout_seed" in options:  # that of the first rank counts
        given["dropout_seed"] = options["dropout_seed"] + torch.distributed.get_rank(group)
    out, lse = context_parallel_attention(**own, **given, **where, method=method, seqlen=n, return_lse=True)
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


class Late:
    """Copies that begin when they are waited for, as late as copy engines may be."""

    def __init__(self, pairs):
        self.pairs = pairs

    def wait(self):
        for source, target in self.pairs:
            target.copy_(source)


def reading(group, name, *arguments):
    """A function of this file, by ranks that read each other's memory: files stand in for that of GPUs."""
    with contextlib.ExitStack() as stack:
        for known in (peer_memory._memories, peer_memory._can_read):
            stack.enter_context(mock.patch.dict(known, clear=True))
        instead = {
            (peer_memory, "can_read"): lambda *_: True,
            (peer_memory, "symmetric_tensor"): lambda size, device: torch.full(
                (size,), 255, dtype=torch.uint8
            ),
            (peer_memory, "share"): files,
            (peer_memory, "STEP"): 512,
            (peer_memory, "_made"): 0,  # groups of other sizes have been before
            (wire, "copy_beside"): lambda pairs, stream: [Late(pairs)],
            (wire, "MOST_COPIES"): 8 if arguments[0] % 2 else 2,
            (Ranks, "exchange"): mock.Mock(side_effect=AssertionError("a message was sent")),
        }
        for (place, name_of), value in instead.items():
            stack.enter_context(mock.patch.object(place, name_of, value))
        found = globals()[name](group, *arguments)
        return found, sorted(purpose for _, _, purpose in peer_memory._memories)


def files(own, group):
    """As `core.torch_private.share`, for processes; NaN until something is published."""
    rank, folder = torch.distributed.get_rank(group), [None]
    if rank == 0:
        folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder, group_src=0, group=group)
    buffers = [
        torch.from_file(f"{folder[0]}/{r}", shared=True, size=len(own), dtype=torch.uint8)
        for r in range(torch.distributed.get_world_size(group))
    ]
    buffers[rank].copy_(own)
    torch.distributed.barrier(group)
    if rank == 0:
        shutil.rmtree(folder[0])
    return buffers, lambda: torch.distributed.barrier(group)


def refused(group, rank_without):
    """A rank has no room: what memory all of them then have, and what they are told."""
    own = torch.zeros(8, dtype=torch.uint8) if torch.distributed.get_rank(group) != rank_without else None
    ranks, device = ranks_of(group), torch.device("cpu")
    with contextlib.ExitStack() as stack:
        for known in (peer_memory._memories, peer_memory._can_read):
            stack.enter_context(mock.patch.dict(known, clear=True))
        peer_memory._can_read[group, device] = True
        instead = {"can_read": can_read_cpu, "share": files, "STEP": 8, "_made": 0}
        for name, value in instead.items():
            stack.enter_context(mock.patch.object(peer_memory, name, value))
        symmetric = stack.enter_context(mock.patch.object(peer_memory, "symmetric_tensor"))
        symmetric.return_value = torch.zeros(8, dtype=torch.uint8)
        first = peer_memory.memory_of(ranks, device, "keys", [8])
        symmetric.return_value = own
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = peer_memory.memory_of(ranks, device, "gradients", [8])
            again = peer_memory.memory_of(ranks, device, "keys", [8])
        return first is None, found is None, again is None, [str(w.message) for w in caught]


def on_a_mesh(group, seed, can_flatten=True):
    """A ring of two groups, each of two ranks that exchange heads, of a mesh that has groups for both."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    tensors, n = problem(seed, {}, 37, 4, 2)[0], 37
    own = {name: shard(t, group=group).requires_grad_() for name, t in tensors.items()}
    with contextlib.nullcontext() if can_flatten else mock.patch.object(DeviceMesh, "_flatten", None):
        out = context_parallel_attention(**own, mesh=mesh, method="2d", seqlen=n, causal=True)
    torch.manual_seed(seed + 1)
    dout = torch.randn(unshard(out.detach(), group=group, seqlen=n).shape, dtype=torch.float64)
    grads = torch.autograd.grad(out, tuple(own.values()), shard(dout, group=group))
    exact = reference.attention(**tensors, causal=True)
    wanted = reference.attention_backward(dout, **tensors, causal=True)
    close(unshard(out.detach(), group=group, seqlen=n), exact[0], "out")
    for name, g, w in zip(own, grads, wanted):
        close(unshard(g, group=group, seqlen=n), w, f"d{name}")


def other_counts(group):
    """The first rank has made a memory with others before: all ranks send messages, none waits for ever."""
    rank, ranks = torch.distributed.get_rank(group), ranks_of(group)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(peer_memory._can_read, clear=True))
        instead = {"can_read": lambda *_: True, "symmetric_tensor": mock.Mock(), "_made": int(rank == 0)}
        for name, value in instead.items():
            stack.enter_context(mock.patch.object(peer_memory, name, value))
        shared = stack.enter_context(mock.patch.object(peer_memory, "share"))
        with warnings.catch_warnings(record=True):
            found = peer_memory.memory_of(ranks, torch.device("cpu"), "keys", [8])
        return found is None and not shared.called


def can_read_cpu(ranks, device):
    return peer_memory._can_read[ranks.group, device]


def dropout_by_a_kernel(group, method, balance, options):
    """A kernel asked for by name draws one device's mask where all pieces begin at multiples of 16."""
    world = torch.distributed.get_world_size(group)
    options = {"dropout_p": 0.3, "backend": "llvm"} | options
    n = 64 * world
    tensors, where = problem(0, {}, n, 12, 12)[0], {"group": group, "balance": balance}
    own = [shard(t, **where).requires_grad_() for t in tensors.values()]
    torch.manual_seed(7 + torch.distributed.get_rank(group))
    drawn = torch.Generator().manual_seed(1 + torch.distributed.get_rank(group))
    out = context_parallel_attention(*own, **options, **where, method=method, generator=drawn)
    grads = torch.autograd.grad(out.square().sum(), own)
    alone = [t.clone().requires_grad_() for t in tensors.values()]
    exact = attention(*alone, **options, generator=torch.Generator().manual_seed(1))
    close(unshard(out.detach(), **where), exact.detach(), "out")
    for name, g, w in zip(tensors, grads, torch.autograd.grad(exact.square().sum(), alone)):
        close(unshard(g, **where), w, f"d{name}")
    odd = [shard(t[:, :-5], **where) for t in tensors.values()]
    try:
        context_parallel_attention(*odd, **options, **where, method=method, seqlen=n - 5)
    except NotImplementedError as error:
        return str(error)
    return None


def close(found, exact, name):
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}: {m}")


def first_call_in_inference_mode(group):
    """What a first call keeps serves calls with gradients."""
    for key in [key for key in network._measured if key[0] == group]:
        del network._measured[key]
    q = shard(torch.randn(1, 24, 2, 8, generator=torch.Generator().manual_seed(0)), group=group)
    with torch.inference_mode():
        context_parallel_attention(q, q, q, group=group, causal=True)
    q = q.clone().requires_grad_()
    context_parallel_attention(q, q, q, group=group, causal=True).sum().backward()
    assert q.grad is not None


def first_call_in_a_checkpoint(group):
    """Its forward measures, which the one computed again does not: what is saved must be the same."""
    q = torch.randn(1, 8, 2, 8)
    grads = []
    for wrapped in (functools.partial(checkpoint, use_reentrant=False), lambda f, x: f(x)):
        leaf = q.clone().requires_grad_()
        with mock.patch.dict(network._measured, clear=True):
            call = lambda x: context_parallel_attention(x, x, x, group=group, causal=True)  # noqa: E731
            wrapped(call, leaf).sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def order(group, method):
    """What a rank does in a forward and a backward: messages are given time to begin before work."""
    done = []

    def noted(name, function):
        return lambda *a, **k: (done.append(name), function(*a, **k))[1]

    q = shard(torch.randn(1, 24, 2, 8), group=group).requires_grad_()
    with contextlib.ExitStack() as stack:
        for place, name in [(Ranks, "exchange"), (Ranks, "let_messages_begin")]:
            stack.enter_context(mock.patch.object(place, name, noted(name, getattr(place, name))))
        for name in ("attend", "differentiate"):
            stack.enter_context(mock.patch.object(engine, name, noted(name, getattr(engine, name))))
        context_parallel_attention(q, q, q, group=group, method=method, causal=True).sum().backward()
    return done


def sent_together(group, head_dim_v):
    """The number of tensors that a rank sends in each exchange of Ulysses."""
    where = {"group": group, "balance": "contiguous"}
    q, v = (shard(torch.randn(1, 24, 4, d), **where).requires_grad_() for d in (8, head_dim_v))
    with mock.patch.object(Ranks, "exchange", autospec=True, side_effect=Ranks.exchange) as exchange:
        out = context_parallel_attention(q, q, v, **where, method="ulysses", causal=True)
        out.sum().backward()
    return [len(call.args[1]) for call in exchange.call_args_list]


def chosen(group, wants_gradient):
    """What "auto" takes where a ring's forward is faster, and Ulysses with its backward."""
    slow = Network(1e10, 1e7, 0.0)
    q = shard(torch.randn(1, 256, 4, 16), group=group).requires_grad_(wants_gradient)
    stop = mock.patch("tilewise.distributed.attention._run", side_effect=KeyError("stopped"))
    with stop as run, contextlib.suppress(KeyError):
        context_parallel_attention(q, q, q, group=group, network=slow, causal=True)
    return run.call_args.args[3]


def messages(group, seed, balance, options, cu_seqlens=None):
    """The number of tensors that a rank sends in each exchange of `all_gather`."""
    with mock.patch.object(Ranks, "exchange", autospec=True, side_effect=Ranks.exchange) as exchange:
        check(group, seed, "all_gather", balance, options, 61, 4, 2, cu_seqlens)
    return [len(call.args[1]) for call in exchange.call_args_list]


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
    if draw.random() < 0.3:
        options["dropout_p"] = 0.4
    cu_seqlens = None
    if draw.random() < 0.5:
        cu_seqlens = [0, *sorted(draw.randint(0, n) for _ in range(draw.randint(0, 5))), n]
    method = draw.choice(["ring", "all_gather", "ulysses", "2d", "auto"])
    balance = draw.choice(["contiguous", "zigzag", "documents"])
    world = torch.distributed.get_world_size(group)
    if method in ("ulysses", "2d") and kv_heads % world and world % kv_heads:
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


def twice_through_unshard(group):
    """The penalty of a gradient that has come through `unshard`."""
    x = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own, world = shard(x, group=group).requires_grad_(), torch.distributed.get_world_size(group)
    whole = unshard(own, group=group, seqlen=7)
    (grad,) = torch.autograd.grad(whole.pow(3).sum(), own, create_graph=True)
    close(grad.detach(), 3 * world * shard(x, group=group) ** 2, "gradient")
    (found,) = torch.autograd.grad(grad.square().sum(), own)
    close(found, 36 * world**2 * shard(x, group=group) ** 3, "second derivative")


def compiled(group):
    """A call in the middle of code that is compiled: results and gradients are those of eager mode."""

    def call(x):
        x = x * 2
        return context_parallel_attention(x, x, x, group=group, causal=True, layout="bhsd", seqlen=9) * 3

    x = torch.randn(1, 2, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaf = shard(x, dim=2, group=group).requires_grad_()
    outs = [function(leaf) for function in (torch.compile(call, backend="aot_eager"), call)]
    grads = [torch.autograd.grad(out.square().sum(), leaf)[0] for out in outs]
    close(*outs, "out")
    close(*grads, "gradient")


def shards_that_differ(group, change):
    """What each rank is told by `unshard` where the last calls it differently; the next call is served."""
    is_last = torch.distributed.get_rank(group) == torch.distributed.get_world_size(group) - 1
    x, options = torch.ones(1, 4, 2), {}
    if is_last and change in ("balance", "dim"):
        options = {"balance": "contiguous"} if change == "balance" else {"dim": 5}
    elif is_last and change in ("heads", "dtype", "length", "kind"):
        changed = {"heads": torch.ones(1, 4, 3), "dtype": x.double(), "length": x[:, :1], "kind": None}
        x = changed[change]
    elif change in ("seqlen", "documents"):
        options = {"seqlen": 9 if is_last else 8}
        options = {"cu_seqlens": [0, 3 + is_last, 8]} if change == "documents" else options
    try:
        unshard(x, group=group, **options)
    except (ValueError, TypeError) as error:
        assert unshard(torch.ones(1, 3), group=group).shape == (1, 6)
        return str(error)


def few_tokens(group, kind, method, n):
    """Of 3 ranks some have one token or none: gradients of what all ranks have, masks by rows, refusals."""
    torch.manual_seed(7)
    q = torch.randn(1, n, 6, 8, dtype=torch.float64)
    table, slopes = torch.rand(n, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    where, given = {"group": group, "seqlen": n, "method": method}, shard(q, group=group)
    if kind == "mask":
        mask = torch.rand(1, 1, n, n) < 0.7
        exact = reference.attention(q, q, q, mask=mask)[0]
        try:
            out = context_parallel_attention(
                given, given, given, mask=shard(mask, dim=2, group=group), **where
            )
        except (NotImplementedError, ValueError) as error:
            return str(error)
        return close(unshard(out, group=group, seqlen=n), exact, "out")
    found = []
    for is_shared in (False, True):
        learned = [t.clone().requires_grad_() for t in (table, slopes)]
        read = learned[0]
        options = {"alibi_slopes": learned[1], "score_mod": lambda s, b, h, i, j, read=read: s + read[i] * s}
        if is_shared:
            out = context_parallel_attention(given, given, given, **where, **options)
        else:
            out = attention(q, q, q, **options)
        out.square().sum().backward()
        assert all(t.grad is not None for t in learned)
        found.append([t.grad for t in learned])
    for wanted, share in zip(*found):
        torch.distributed.all_reduce(share, group=group)
        close(share, wanted, "gradient")
    return None


def second_call(group, method, cu_seqlens):
    """A call like one before looks nothing up but what that found; one that differs is checked."""
    n, lead = 32, () if cu_seqlens else (1,)
    where = {"group": group, "cu_seqlens": cu_seqlens}
    new = lambda: shard(torch.randn(*lead, n, 2, 8), dim=0 if cu_seqlens else 1, **where)  # noqa: E731

    def call(q, **options):
        return context_parallel_attention(q, q, q, method=method, causal=True, **where, **options)

    for needs_grad in (False, True):
        call(new().requires_grad_(needs_grad))
    slow = ["faults.describe_tensors", "cost.estimate", "schedule._rounds", "heads.joined", "parts._packed"]
    with contextlib.ExitStack() as stack:
        for name in slow:
            error = AssertionError(f"{name} was called again")
            stack.enter_context(mock.patch(f"tilewise.distributed.{name}", side_effect=error))
        call(new())
        call(new().requires_grad_())
    wrong = ({"softcap": -1.0}, {"window": (0, -3)}, {"backend": "none"}, {"scale": [1.0]})
    for options in (*wrong, {"dropout_seed": 1, "dropout_p": 0.1}):
        try:
            call(new(), **options)
        except (ValueError, TypeError) as error:
            assert next(iter(options)) in str(error), error
        else:
            raise AssertionError(f"{options} was taken")


def disagree(group, change):
    rank = torch.distributed.get_rank(group)
    q = torch.ones(1, 4, 2, 8)
    options = {"causal": True}
    if rank == 1:
        q = q.double() if change == "dtype" else q[:, :3] if change == "length" else q
        q = q.requires_grad_() if change == "requires_grad" else q
        options = {"causal": False} if change == "option" else options
        options |= {"window": (-1, 0)} if change == "error" else {}
        q = q[0, 0, 0] if change == "dimensions" else q
        q = q.to("meta") if change == "meta" else q
        options |= {"mask_mod": lambda b, h, i, j: (i > j) & [][0]} if change == "function" else {}
    options |= {"backend": "hopper"} if change == "backend" else {}
    try:
        context_parallel_attention(q, q, q, group=group, **options)
    except (ValueError, TypeError, NotImplementedError, LookupError) as error:
        return str(error)
    return None


def silent_rank(group, when):
    """The last of four ranks does not come, or comes and then stops: what the others are told, and when."""
    short = torch.distributed.new_group(range(4), timeout=timedelta(seconds=1))
    is_silent = torch.distributed.get_rank(group) == 3
    q = shard(torch.ones(1, 40, 2, 8), group=short)
    stop = mock.patch("tilewise.distributed.engine.run", side_effect=KeyError("stopped"))
    start, message = time.monotonic(), None
    try:
        with stop if is_silent and when == "within" else contextlib.nullcontext():
            if not is_silent or when == "within":
                context_parallel_attention(q, q, q, group=short, method="ring", causal=True)
    except (RuntimeError, KeyError) as error:
        message = str(error)
    if is_silent:
        time.sleep(3)  # alive, so that others wait for it
    return message, time.monotonic() - start


def learned_slopes(group, method, balance, with_score):
    """ALiBi whose slopes have a gradient, by itself or before a score function; the same in one call."""
    torch.manual_seed(2)
    n, new = 37, lambda *shape: torch.randn(*shape, dtype=torch.float64)
    tensors = [new(2, n, heads, 8) for heads in (4, 2, 2)]
    slopes, dout = torch.rand(2, 4, dtype=torch.float64), new(2, n, 4, 8)
    options = {"causal": True}
    if with_score:
        options["score_mod"] = lambda score, b, h, i, j: torch.tanh(score) + 0.01 * (i - 2 * j)
    results = []
    for slopes in (slopes.clone().requires_grad_() for _ in range(2)):
        if not results:
            leaves = [t.clone().requires_grad_() for t in tensors]
            out, given = attention(*leaves, alibi_slopes=slopes, **options), dout
        else:
            where = {"group": group, "balance": balance}
            leaves, given = [shard(t, **where).requires_grad_() for t in tensors], shard(dout, **where)
            out = context_parallel_attention(
                *leaves, alibi_slopes=slopes, method=method, seqlen=n, **where, **options
            )
        results.append([out.detach(), *torch.autograd.grad(out, (*leaves, slopes), given)])
    (*exact, wanted), (*found, share) = results
    torch.distributed.all_reduce(share, group=group)
    close(share, wanted, "dslopes")
    for f, e in zip(found, exact):
        close(unshard(f, seqlen=n, **where), e, "out and gradients")


def rounding(group, seed, method, dtype):
    """Errors of a 16-bit call, by the rule of `tilewise.testing` for those of PyTorch, and of one device."""
    torch.manual_seed(seed)
    n, heads = 300, 4
    q, k, v, dout = (torch.randn(1, n, h, 32).to(dtype) for h in (heads, 1, 1, heads))
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
    for options in ({"causal": True}, {"sinks": torch.full((heads,), 3.0)}, {"window": (9, 0)}):
        out = context_parallel_attention(*own, group=group, method=method, seqlen=n, **options)
        outs = unshard(out.detach(), group=group, seqlen=n), attention(q, k, v, **options)
        exact = reference.attention(q, k, v, **options)[0]
        ours, of_one = ((t.double() - exact).abs().mean() for t in outs)
        assert ours <= 1.02 * of_one, (options, ours, of_one)  # rounded once, however many ranks there are
    alone = [t.clone().requires_grad_() for t in (q, k, v)]
    of_one = torch.autograd.grad(attention(*alone, causal=True), alone, dout)
    for name, *grads, exact in zip(("dq", "dk", "dv"), found[1:], of_one, right[1:]):
        ours, one = ((g.double() - exact).abs().mean() for g in grads)
        assert ours <= MEAN_FACTOR * one, (name, ours, one)


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


def biases_by_function(group, in_context):
    """Score functions that add a tensor's numbers by position: a bias on one device, not of shards."""
    torch.manual_seed(6)
    n, new = 13, lambda *shape: torch.randn(*shape, dtype=torch.float64)
    q, rows, columns, both = new(1, n, 2, 8), new(n), new(n), new(2, n, n)
    for score_mod in (
        lambda s, b, h, i, j: s + rows[i],
        lambda s, b, h, i, j: s + columns[j],
        lambda s, b, h, i, j: s + both[h, i, j],
    ):
        exact = reference.attention(q, q, q, score_mod=score_mod, causal=True)
        own, options = shard(q, group=group), {"score_mod": score_mod, "causal": True, "return_lse": True}
        if in_context:
            with context_parallel(group=group, seqlen=n, method="ring"):
                out, lse = attention(own, own, own, **options)
        else:
            where = {"group": group, "seqlen": n, "method": "ring"}
            out, lse = context_parallel_attention(own, own, own, **options, **where)
        close(unshard(out, group=group, seqlen=n), exact[0], "out")
        close(unshard(lse, dim=-1, group=group, seqlen=n), exact[1], "lse")


def window_by_function(group):
    """A mask function that says a window is one: keys that it hides do not travel."""
    q = torch.randn(1, 80, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    where = {"group": group, "balance": "contiguous"}
    own = shard(q, **where)
    window = lambda b, h, i, j: (i >= j) & (i - j < 5)  # noqa: E731
    with mock.patch("tilewise.distributed.engine.run", wraps=engine.run) as run:
        out = context_parallel_attention(own, own, own, mask_mod=window, method="ring", **where)
    close(unshard(out, **where), attention(q, q, q, causal=True, window=(4, None)), "out")
    return [step.keys for step in run.call_args.args[0].steps]


def functions_of_documents(group, method, balance, cu_seqlens, options):
    """Functions that read the document, the head and places in the document, and slopes that are learned."""
    torch.manual_seed(4)
    n, heads, new = cu_seqlens[-1], 4, lambda *shape: torch.randn(*shape, dtype=torch.float64)
    tensors = [new(n, heads, 8), new(n, 2, 8), new(n, 2, 8)]
    dout, table = new(n, heads, 8), new(len(cu_seqlens) - 1, n)
    slopes, hidden = torch.rand(heads, dtype=torch.float64), torch.randint(n, (len(cu_seqlens) - 1,))
    ends = torch.tensor(cu_seqlens, dtype=torch.int32)
    where = {"group": group, "balance": balance, "cu_seqlens": cu_seqlens}
    results = []
    for is_shared in (False, True):
        read, own_slopes = (t.clone().requires_grad_() for t in (table, slopes))
        functions = {
            "score_mod": lambda s, b, h, i, j, read=read: torch.tanh(s) * 2 + read[b, i] * (h - j) * 0.1,
            "mask_mod": lambda b, h, i, j: (j != hidden[b]) | (h == 1),
            "alibi_slopes": own_slopes,
        }
        leaves = [(shard(t, dim=0, **where) if is_shared else t.clone()).requires_grad_() for t in tensors]
        if is_shared:
            out = context_parallel_attention(*leaves, method=method, **functions, **options, **where)
        else:
            out = attention_varlen(
                *leaves, ends, ends, max_seqlen_q=n, max_seqlen_k=n, **functions, **options
            )
        given = shard(dout, dim=0, **where) if is_shared else dout
        results.append([out.detach(), *torch.autograd.grad(out, (*leaves, read, own_slopes), given)])
    for number, (exact, found) in enumerate(zip(*results)):
        if number < 4:
            found = unshard(found, dim=0, **where)
        else:
            torch.distributed.all_reduce(found, group=group)
        close(found, exact, ("out", "dq", "dk", "dv", "dtable", "dslopes")[number])
