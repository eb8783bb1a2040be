"""PyTorch's own attention, served by tilewise: one of the implementations that PyTorch lets be exchanged.

    tilewise.compat.torch.register()
    torch.nn.attention.activate_flash_attention_impl("tilewise")  # restore_flash_attention_impl() undoes it

From then on every call that PyTorch sends to FlashAttention on a CUDA device comes here: those of
`scaled_dot_product_attention` without a mask in bfloat16 and float16, and `torch.nn.attention.varlen_attn`,
of any model, eager or compiled. Calls with a mask and calls in float32 go to other kernels of PyTorch, and
stay there. `sdpa_kernel(SDPBackend.FLASH_ATTENTION)` makes PyTorch refuse what would.

The functions below have the arguments and results of PyTorch's operators, in the memory layout that PyTorch's
fakes promise to compiled code. Tensors are (batch, seqlen, heads, head_dim) or packed (total, heads,
head_dim); those of `_scaled_dot_product_flash_attention` (batch, heads, seqlen, head_dim). lse is float32,
(batch, heads, seqlen_q) or (heads, total_q); -inf where no key is seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library as torch_library

from tilewise.autograd.functions import obeying_torch
from tilewise.core.plan import Results
from tilewise.core.problem import Inputs, Options
from tilewise.core.signature import Request
from tilewise.core.torch_private import flash_operators
from tilewise.dispatch import plans
from tilewise.faces.flash_attn_3 import flash_attn_varlen_func

NAME = "tilewise"

Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # out, lse, rng_state, unused, debug_attn_mask


def register() -> None:
    """Make "tilewise" known to `torch.nn.attention.activate_flash_attention_impl`; safe to call twice.

    Nothing is exchanged yet: PyTorch leaves that to whoever calls `activate_flash_attention_impl`.

    Raises:
        NotImplementedError: torch is older than 2.11, and lets no implementation be exchanged.

    Example:
        >>> register()
        >>> "tilewise" in torch.nn.attention.list_flash_attention_impls()
        True
    """
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise NotImplementedError(
            f"torch {torch.__version__} lets no attention implementation be exchanged: 2.11 and newer do"
        )
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=override)


class Handle:
    """Keeps the operators exchanged until `remove` is called."""

    def __init__(self, library: torch_library.Library) -> None:
        self._library: torch_library.Library | None = library

    def remove(self) -> None:
        """PyTorch's own kernels serve again."""
        self._library = None  # a library takes its kernels with it


def override(dispatch_key: str = "CUDA") -> Handle:
    """Exchange the operators for one kind of device: what `activate_flash_attention_impl` calls."""
    library = torch_library.Library("aten", "IMPL")
    for what, operator in flash_operators().items():
        library.impl(operator, KERNELS[what], dispatch_key)
    return Handle(library)


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`aten::_scaled_dot_product_flash_attention`: out as query lies, lse, no offsets, lengths, the rest."""
    order = "bhsd" if query.stride(1) >= query.stride(2) else "bshd"
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    out, lse, rng_state, *rest = _forward(
        Inputs(q, k, v), _options(dropout_p, is_causal, scale), return_debug_mask, order
    )
    out = _laid_as(query, out.transpose(1, 2))
    return (out, lse, None, None, query.shape[2], key.shape[2], rng_state, *rest)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten::_scaled_dot_product_flash_attention_backward`: of query, key and value, each as it lies."""
    dout, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    options = _options(dropout_p, is_causal, scale)
    grads = _backward(Inputs(q, k, v), dout, o, logsumexp, options, philox_seed)
    dq, dk, dv = (_laid_as(t, g.transpose(1, 2)) for t, g in zip((query, key, value), grads))
    return dq, dk, dv


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Forward:
    """`aten::_flash_attention_forward`: dense, packed, or with a cache (seqused_k, with pages block_table).

    num_splits is a hint for other kernels. Raises NotImplementedError for packed keys of which seqused_k
    says how many count if ALiBi slopes are given too, and for return_debug_mask.
    """
    options = _options(dropout_p, is_causal, scale, window_size_left, window_size_right)
    if cum_seq_q is not None:
        options = options._replace(max_seqlen_q=max_q, max_seqlen_k=max_k)
    if seqused_k is not None and block_table is None and cum_seq_q is not None and cum_seq_k is not None:
        if alibi_slopes is not None or dropout_p:
            raise NotImplementedError("seqused_k of packed keys must come without alibi_slopes and dropout_p")
        left, right = (-1 if bound is None else bound for bound in (window_size_left, window_size_right))
        out, lse = flash_attn_varlen_func(
            query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, None, seqused_k, scale, is_causal,
            window_size=(left, right), return_attn_probs=True,
        )  # fmt: skip
        return _rest(_laid_as(query, out), lse, None, return_debug_mask)
    cum_seq_k = None if block_table is not None else cum_seq_k
    inputs = Inputs(
        query, key, value, cum_seq_q, cum_seq_k, seqused_k, page_table=block_table, alibi_slopes=alibi_slopes
    )
    out, *rest = _forward(inputs, options, return_debug_mask)
    return (_laid_as(query, out), *rest)  # type: ignore[return-value]


def forward_inplace(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """`aten::_flash_attention_forward_no_dropout_inplace`: `forward` into out; returns lse."""
    result, lse, *_ = forward(*arguments, **options)
    out.copy_(result)
    return lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten::_flash_attention_backward`: the gradients of query, key and value, each as it lies."""
    options = _options(dropout_p, is_causal, scale, window_size_left, window_size_right)
    if cum_seq_q is not None:
        options = options._replace(max_seqlen_q=max_q, max_seqlen_k=max_k)
    inputs = Inputs(query, key, value, cum_seq_q, cum_seq_k)
    grads = _backward(inputs, grad_out, out, logsumexp, options, rng_state)
    dq, dk, dv = (_laid_as(t, g) for t, g in zip((query, key, value), grads))
    return dq, dk, dv


KERNELS = {
    "sdpa_forward": sdpa_forward,
    "sdpa_backward": sdpa_backward,
    "forward": forward,
    "forward_inplace": forward_inplace,
    "backward": backward,
}


def _options(
    dropout_p: float, is_causal: bool, scale: float | None, left: int | None = None, right: int | None = None
) -> Options:
    """PyTorch's scalars: a bound of -1 is none. Causal is aligned bottom-right in both libraries here."""
    left, right = (None if bound is None or bound < 0 else bound for bound in (left, right))
    return obeying_torch(Options(is_causal, left, right, dropout_p=dropout_p, scale=scale))


def _forward(inputs: Inputs, options: Options, return_debug_mask: bool, order: str = "bshd") -> Forward:
    query, value = inputs.query, inputs.value
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"value.shape[-1]={value.shape[-1]} must equal query.shape[-1]={query.shape[-1]}, as PyTorch's "
            "operator promises: tilewise.attention takes others"
        )
    seeds = None
    if options.dropout_p:
        seeds = torch.randint(2**63 - 1, (2,), device=query.device)
        inputs = inputs._replace(dropout_seed=seeds[0])
    with torch.no_grad():  # PyTorch differentiates the operator, by its backward
        results = plans.attend(inputs, options, None, Request(order=order))
    assert results.out is not None and results.lse is not None
    return _rest(results.out, results.lse, seeds, return_debug_mask)


def _rest(out: Tensor, lse: Tensor, seeds: Tensor | None, return_debug_mask: bool) -> Forward:
    """The operator's results: out, lse, two seeds of which the first is used, and two that nobody reads."""
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask=True must be False: the weights are never stored")
    if seeds is None:
        seeds = torch.empty(2, dtype=torch.int64, device=out.device)
    unused = torch.empty((), dtype=torch.uint64, device=out.device)
    return out, lse, seeds.view(torch.uint64), unused, out.new_empty(0)


def _backward(
    inputs: Inputs, dout: Tensor, out: Tensor, lse: Tensor, options: Options, rng_state: Tensor
) -> list[Tensor]:
    if options.dropout_p:
        inputs = inputs._replace(dropout_seed=rng_state.view(torch.int64)[0])
    grads = plans.differentiate(inputs, Results(out, lse), dout, None, options, None, False)
    return list(grads[:3])


def _laid_as(template: Tensor, t: Tensor) -> Tensor:
    """t with the strides that PyTorch's fakes say: those of `torch.empty_like(template)`."""
    wanted = torch.empty_like(template)
    return t if t.stride() == wanted.stride() else wanted.copy_(t)
