"""What ranks run inside of `context_parallel`: code that knows of no ranks, models, an example."""

from __future__ import annotations

import importlib.util

import torch
from cases import close

from tilewise import Aux, attention, attention_varlen, flash_attn, flash_attn_3, flex_attention, reference
from tilewise.distributed import context_parallel, shard, unshard


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


def buffers_that_share_memory(group):
    """Token ids and labels as views of one batch, one of them named twice, and one row for all."""
    batch, row = torch.arange(18).view(2, 9), torch.arange(8).expand(2, 8)
    views = [batch[:, :-1], batch[:, 1:], batch[:, 1:], row]
    before = [t.clone() for t in (*views, batch)]
    own = [shard(t.clone(), group=group) for t in views]
    views[2] = views[1]
    with context_parallel(group=group, buffers=views, buffer_seq_dims=[1] * 4):
        assert all(map(torch.equal, views, own))
    assert all(map(torch.equal, (*views, batch), before))


def scores_in_context(group, face, kind):
    """A mask or a bias, by rows or of one row: this rank's rows, columns of the whole sequence."""
    torch.manual_seed(1)
    n, heads = 23, 4
    q, k, v, dout = (torch.randn(2, n, h, 8, dtype=torch.float64) for h in (heads, 2, 2, heads))
    mask = torch.rand(2, 1, n if "rows" in kind else 1, n) < 0.7
    mask[..., 0] = True
    scores = mask if "mask" in kind else torch.randn(2, heads, *mask.shape[2:], dtype=torch.float64)
    name = "mask" if "mask" in kind else "bias"
    exact = reference.attention(q, k, v, **{name: scores})[0]
    wanted = reference.attention_backward(dout, q, k, v, **{name: scores})
    where = {"group": group, "balance": "zigzag"}
    buffers, dims = [q, k, v, dout], [1] * 4
    if "rows" in kind:
        buffers, dims = [*buffers, scores], [*dims, 2]
    with context_parallel(buffers=buffers, buffer_seq_dims=dims, **where):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        if face == "sdpa":
            swapped = [t.transpose(1, 2) for t in leaves]
            out = torch.nn.functional.scaled_dot_product_attention(
                *swapped, attn_mask=scores.clone(), enable_gqa=True
            ).transpose(1, 2)
        else:
            out = attention(*leaves, **{name: scores.clone()})
        grads = torch.autograd.grad(out, leaves, dout.clone())
    close(unshard(out.detach(), seqlen=n, **where), exact, "out")
    for g, of in zip(grads, ("query", "key", "value")):
        close(unshard(g, seqlen=n, **where), getattr(wanted, of), f"d{of}")


def compiled_in_context(group, face):
    """Code compiled outside, and code compiled inside: results and gradients are those of eager mode."""

    def call(q):
        q = q * 2
        if face == "sdpa":
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True) * 3
        return attention(q, q, q, causal=True, layout="bhsd") * 3

    x = torch.randn(1, 2, 21, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    calls = [*(torch.compile(call, backend="aot_eager") for _ in range(2)), call]
    calls[0](x)
    with context_parallel(group=group, buffers=[x], buffer_seq_dims=[2]):
        leaf = x.clone().requires_grad_()
        outs = [function(leaf) for function in calls]
        grads = [torch.autograd.grad(out, leaf, leaf.detach())[0] for out in outs]
    assert outs[0].shape[2] < x.shape[2]
    for out, grad in zip(outs[:2], grads[:2]):
        close(out, outs[2], "out")
        close(grad, grads[2], "gradient")


def packed_call_of_few_tokens(group, n):
    """Of 3 ranks some have no token: as many rows of a batch on them as on the others."""
    x = torch.randn(2, n, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = shard(x, group=group)
    ends = torch.arange(3) * own.shape[1]
    with context_parallel(group=group, seqlen=n):
        out = attention_varlen(*[own.flatten(0, 1)] * 3, ends, ends, causal=True)
    exact = reference.attention(x, x, x, causal=True)[0]
    close(unshard(out.view(own.shape), group=group, seqlen=n), exact, "out")


def refused_in_context(group, change):
    x, written = torch.ones(1, 5, 2, 8), torch.tensor([0, 5, 5])
    ends, unequal = torch.tensor([0, 2, 5]), lambda b, h, q, k: q != k
    calls = {
        "documents": lambda: attention_varlen(x[0], x[0], x[0], ends, ends),
        "documents of keys": lambda: attention_varlen(x[0], x[0], x[0], ends[::2], ends),
        "documents written": lambda: (
            attention_varlen(x[0], x[0], x[0], written, written),
            attention_varlen(x[0], x[0], x[0], written.copy_(ends), written),
        ),
        "function": lambda: attention_varlen(x[0], x[0], x[0], ends[::2], ends[::2], mask_mod=unequal),
        "statistics": lambda: attention(x, x, x, return_aux=Aux(entropy=True)),
        "chunks": lambda: flash_attn_3.flash_attn_func(x, x, x, causal=True, attention_chunk=6),
        "weights": lambda: flash_attn.flash_attn_func(x, x, x, 0.5, return_attn_probs=True),
        "cache": lambda: flash_attn.flash_attn_with_kvcache(x, cache, cache, x, x, cache_seqlens=0),
        "block mask": lambda: flex_attention.flex_attention(*heads_first, block_mask=blocks),
    }
    cache, heads_first = torch.zeros_like(x), [x.transpose(1, 2)] * 3
    blocks = flex_attention.create_block_mask(unequal, None, None, 5, 5, device="cpu")
    try:
        with context_parallel(group=group, seqlen=10):
            calls[change]()
    except (NotImplementedError, ValueError) as error:
        assert attention(x, x, x).shape == x.shape  # outside all is as before
        assert not cache.any()
        return str(error)
    return None


def refused_on_a_rank(group, change):
    """What each rank is told where the last refuses a call, or the context; the next call is served."""
    is_last, x = torch.distributed.get_rank(group) == 1, torch.ones(1, 5, 2, 8)
    ends, sdpa = torch.tensor([0, 2, 5]), "scaled_dot_product_attention"
    calls = {
        "window": lambda: attention(x, x, x, window=(-7, 2) if is_last else (7, 2)),
        "statistics": lambda: attention(x, x, x, return_aux=Aux(entropy=True) if is_last else None),
        "name": lambda: attention(x, x, x, **{"casual" if is_last else "causal": True}),
        "mask": lambda: attention(x, x, x, mask=torch.ones(1, 1, 1, 7 if is_last else 10).bool()),
        "dimensions": lambda: attention(*[x[0, 0] if is_last else x] * 3),
        "documents": lambda: attention_varlen(x[0], x[0], x[0], *[ends if is_last else ends[::2]] * 2),
        "dropout": lambda: getattr(torch.nn.functional, sdpa)(
            *[x.transpose(1, 2)] * 3, dropout_p=2.0 if is_last else 0.0
        ),
        "flash": lambda: flash_attn.flash_attn_func(x, x, x, window_size=5 if is_last else (-1, -1)),
        "flash 3": lambda: flash_attn_3.flash_attn_func(x, x, x, attention_chunk=-1 if is_last else 0),
        "flex": lambda: flex_attention.flex_attention(
            *[x.transpose(1, 2)] * 3, kernel_options=is_last or None
        ),
        "dtensor": lambda: attention(*[_on_one_mesh(x) if is_last else x] * 3),
    }
    contexts = {
        "balance": lambda: {"balance": "even" if is_last else "zigzag"},
        "other balance": lambda: {"balance": "contiguous" if is_last else "zigzag"},
        "seqlen": lambda: {"seqlen": -1 if is_last else 10},
        "buffers": lambda: {"buffers": [torch.ones(1, 10)], "buffer_seq_dims": [9 if is_last else 1]},
    }
    found = []
    try:
        with context_parallel(group=group, **({"seqlen": 10} | contexts.get(change, dict)())):
            calls[change]()
    except Exception as error:
        found.append(str(error))
    with context_parallel(group=group, seqlen=10):
        if change in calls:
            try:
                calls[change]()
            except Exception as error:
                found.append(str(error))
        assert attention(x, x, x).shape == x.shape
    return found


def _on_one_mesh(x):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(torch.distributed.new_group([1], use_local_synchronization=True), "cpu")
    return DTensor.from_local(x, mesh, [Shard(1)])


def functions_in_context(group, method, cu_seqlens):
    """Functions of a call that knows of no ranks, with learned slopes; documents are told to the context."""
    torch.manual_seed(8)
    n, new = cu_seqlens[-1], lambda *shape: torch.randn(*shape, dtype=torch.float64)
    x, dout, table, slopes = new(1, n, 4, 8), new(1, n, 4, 8), new(n), torch.rand(4, dtype=torch.float64)
    learned = [t.requires_grad_() for t in (table, slopes)]
    functions = {
        "score_mod": lambda s, b, h, i, j: s + table[i] * (j - h) * 0.1,
        "mask_mod": lambda b, h, i, j: ((i >= j) & (i - j < 30)) | (j == 2),
        "alibi_slopes": slopes,
    }
    is_one = len(cu_seqlens) == 2
    leaf = x.clone().requires_grad_()
    ends = torch.tensor(cu_seqlens, dtype=torch.int32)
    lengths = {"max_seqlen_q": n, "max_seqlen_k": n}
    if is_one:
        out = attention(leaf, leaf, leaf, **functions)
    else:
        out = attention_varlen(leaf[0], leaf[0], leaf[0], ends, ends, **lengths, **functions)[None]
    exact = [out.detach(), *torch.autograd.grad(out, (leaf, *learned), dout)]
    where = {"group": group, "cu_seqlens": None if is_one else cu_seqlens}
    with context_parallel(buffers=[x, dout], buffer_seq_dims=[1, 1], method=method, **where):
        leaf = x.clone().requires_grad_()
        out = attention(leaf, leaf, leaf, **functions)
        found = [out.detach(), *torch.autograd.grad(out, (leaf, *learned), dout.clone())]
    for number, (f, e) in enumerate(zip(found, exact)):
        if number < 2:
            f = unshard(f, seqlen=n, **where)
        else:
            torch.distributed.all_reduce(f, group=group)
        close(f, e, ("out", "dx", "dtable", "dslopes")[number])


def slopes_before_a_function_in_context(group):
    """A score function that is not a sum of what ALiBi has added to the scores."""
    torch.manual_seed(9)
    x, slopes = torch.randn(1, 37, 2, 8, dtype=torch.float64), torch.rand(2, dtype=torch.float64)
    options = {"score_mod": lambda s, b, h, i, j: s.tanh(), "alibi_slopes": slopes, "causal": True}
    exact, own = attention(x, x, x, **options), x.clone()
    with context_parallel(group=group, buffers=[own], buffer_seq_dims=[1], method="ring"):
        out = attention(own, own, own, **options)
    close(unshard(out, group=group, seqlen=37), exact, "out")


def dropout_in_context(group):
    """Two calls in a row, with the first rank's random state."""
    n, rank = 21, torch.distributed.get_rank(group)
    torch.manual_seed(5)
    x = torch.randn(1, n, 2, 8, dtype=torch.float64)
    torch.manual_seed(11)
    exact = [attention(x, x, x, dropout_p=0.4) for _ in range(2)]
    own = x.clone()
    torch.manual_seed(11 + rank)
    with context_parallel(group=group, buffers=[own], buffer_seq_dims=[1]):
        found = [attention(own, own, own, dropout_p=0.4) for _ in range(2)]
    for f, e in zip(found, exact):
        close(unshard(f, group=group, seqlen=n), e, "out")


def transformers_model(group, implementation):
    """A model whose layers have a window, on shards of a batch of two: logits and gradients."""
    from transformers import MistralConfig, MistralForCausalLM

    from tilewise.integrations.transformers import register

    register()
    torch.manual_seed(0)
    window = {"tilewise": 5, "wide": 14}.get(implementation)
    implementation = "sdpa" if implementation == "sdpa" else "tilewise"
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


def padded_model(group, n, causal):
    """Padding at either end: a rank without any, one of nothing else, shards of one token."""
    from transformers import BertConfig, BertModel, MistralConfig, MistralModel

    from tilewise.integrations.transformers import register

    register()
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 11, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 4, "attn_implementation": "tilewise",
    }  # fmt: skip
    if causal:
        model = MistralModel(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=7)).double()
    else:
        model = BertModel(BertConfig(**sizes), add_pooling_layer=False).double().eval()
    tokens, mask = torch.randint(11, (2, n)), torch.ones(2, n, dtype=torch.int64)
    mask[0, : n // 3], mask[1, n - n // 3 :] = 0, 0
    places = torch.arange(n).expand(2, -1).clone()
    real = mask[..., None].double()
    exact = model(input_ids=tokens, attention_mask=mask, position_ids=places).last_hidden_state * real
    wanted = torch.autograd.grad(exact.square().sum(), list(model.parameters()))
    where = {"group": group, "balance": "contiguous"}
    buffers = [tokens, mask, places, real]
    options = {"use_cache": False} if causal else {}
    with context_parallel(buffers=buffers, buffer_seq_dims=[1] * 4, **where):
        out = model(input_ids=tokens, attention_mask=mask, position_ids=places, **options).last_hidden_state
        out = out * real.clone()
        grads = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    close(unshard(out.detach(), seqlen=n, **where), exact.detach(), "out")
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
