"""`ring_flash_attn`'s functions, argument for argument, served by `tilewise.distributed`.

Shards are cut as there: `ring_flash_attn_func` has contiguous ones, `zigzag_...` a chunk of the head and its
counterpart of the tail, of the sequence or of each document. Lengths that do not divide want
`context_parallel_attention`, which has more options and methods. Windows and dropout are served.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.core.checks import check_tensors
from tilewise.distributed import context_parallel_attention
from tilewise.distributed.layout import document_starts
from tilewise.distributed.ranks import agree, ranks_of
from tilewise.faces import flash_attn_call

Answer = Tensor | tuple[Tensor, Tensor, None]


def ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Answer:
    """Attention over a sequence of which each rank has a contiguous shard.

    Args:
        q, k, v: (batch, tokens of the rank, heads, head_dim); KV heads divide query heads.
        dropout_p: of attention weights; the first rank's random state draws the seed.
        softmax_scale: None is 1 / sqrt(head_dim).
        window_size: keys to the left and to the right; -1 is unbounded.
        group: the ranks; None is the default group.

    Returns:
        out; with return_attn_probs (out, lse (batch, heads, tokens of the rank), None).

    Raises:
        ValueError, TypeError, NotImplementedError: as `context_parallel_attention`.
    """
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    return _attend(q, k, v, "contiguous", None, options, return_attn_probs, group)


def zigzag_ring_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Answer:
    """`ring_flash_attn_func` on zigzag shards: chunks r and 2 * world - 1 - r of 2 * world equal ones."""
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    return _attend(q, k, v, "zigzag", None, options, return_attn_probs, group)


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Answer:
    """Packed documents, each zigzag over the ranks.

    Args:
        q, k, v: (tokens of the rank, heads, head_dim).
        cu_seqlens: offsets of this rank's parts, which are equal on all ranks: those of the documents divided
            by the number of ranks. A list or CPU tensor; reading a GPU tensor waits.
        max_seqlen: not needed.

    Returns:
        out; with return_attn_probs (out, lse (heads, tokens of the rank), None).

    Raises:
        ValueError: a document's length does not divide by 2 * world.
    """
    options = dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic
    return _attend(q, k, v, "documents", cu_seqlens, options, return_attn_probs, group)


def _starts(cu_seqlens: Any, world: int) -> list[int]:
    """The offsets of documents in the whole sequence, from those of a rank's parts."""
    starts = [start * world for start in document_starts(cu_seqlens)]
    if any(start % (2 * world) for start in starts):
        raise ValueError(f"cu_seqlens={starts} of all ranks must divide by {2 * world}, twice their number")
    return starts


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    balance: str,
    cu_seqlens: Any,
    options: tuple[Any, ...],
    return_attn_probs: bool,
    group: Any,
) -> Answer:
    """options: dropout_p, softmax_scale, causal, window_size, alibi_slopes and deterministic."""
    dropout_p, scale, causal, window_size, alibi_slopes, deterministic = options
    ranks, starts = ranks_of(group), None
    try:
        check_tensors(q=q, k=k, v=v)
        checked = flash_attn_call.options(scale, causal, window_size, softcap=0.0)
        if balance == "documents":
            starts = _starts(cu_seqlens, ranks.world)
    except (TypeError, ValueError) as error:  # the others have to hear of it
        agree(ranks, dict, error, ranks.device)
        raise
    out, lse = context_parallel_attention(
        q, k, v, group=group, method="ring", balance=balance, cu_seqlens=starts, causal=causal,
        window=(checked.window_left, checked.window_right), alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        scale=scale, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out
