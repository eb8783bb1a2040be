"""Rotary position embedding: each pair of coordinates is rotated by an angle that grows with position.

Pair `p` of a token at position `t` is rotated by `t * base^(-2p / rotary_dim)`: a query-key product depends
on the distance of the two tokens alone. Source: Su et al., RoFormer (2021), section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.core.checks import check_flag, check_number, check_tensors, shown

MAX_ROTARY_DIM = 1 << 16


def rotary_tables(
    positions: Tensor, rotary_dim: int, base: float = 10000.0, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, computed in float64.

    Args:
        positions: (..., seqlen) integers; each sequence may have its own.
        rotary_dim: how many coordinates of a head are rotated; even, at least 2.
        base: larger bases rotate more slowly.
        dtype: of the tables.

    Returns:
        cos, sin: (..., seqlen, rotary_dim / 2).

    Raises:
        ValueError, TypeError: positions, rotary_dim or base does not fit.

    Example:
        >>> cos, sin = rotary_tables(torch.tensor([0, 1]), rotary_dim=2)
        >>> cos.flatten().tolist()
        [1.0, 0.5403022766113281]
    """
    check_tensors(positions=positions)
    check_number("rotary_dim", rotary_dim)
    check_number("base", base)
    if not 2 <= rotary_dim <= MAX_ROTARY_DIM or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim} must be even and 2 to {MAX_ROTARY_DIM}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype={shown(dtype)} must be a floating-point dtype")
    if positions.dtype.is_complex or positions.dtype == torch.bool or positions.dtype.itemsize == 1:
        raise TypeError(f"positions.dtype={positions.dtype} must be an integer dtype")
    if not 0 < base < float("inf"):
        raise ValueError(f"base={base} must be a positive finite number")
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None] * float(base) ** (-pairs / rotary_dim)
    return torch.cos(angles).to(dtype), torch.sin(angles).to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first `2 * cos.shape[-1]` coordinates of every head; the others pass through.

    Computed in float32 (float64 for float64) and rounded once. Differentiable.

    Args:
        x: (..., seqlen, heads, head_dim), floating point.
        cos, sin: (seqlen, rotary_dim / 2), or with leading dimensions broadcastable to those of x.
        interleaved: pair coordinates (0, 1), (2, 3), ... as GPT-J does; otherwise coordinate `p` with
            `p + rotary_dim / 2`, as GPT-NeoX and Llama do.

    Returns:
        A new tensor like x.

    Raises:
        ValueError, TypeError: x, cos and sin do not fit.

    Example:
        >>> cos, sin = rotary_tables(torch.arange(3), rotary_dim=4)
        >>> x = torch.ones(1, 3, 1, 4)
        >>> apply_rotary(x, cos, sin)[0, 0, 0].tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    check_tensors(x=x, cos=cos, sin=sin)
    check_flag("interleaved", interleaved)
    if x.ndim < 3:
        raise ValueError(f"x.shape={tuple(x.shape)} must be (..., seqlen, heads, head_dim)")
    for name, t in (("x", x), ("cos", cos), ("sin", sin)):
        if not t.dtype.is_floating_point:
            raise TypeError(f"{name}.dtype={t.dtype} must be a floating-point dtype")
        if t.device != x.device:
            raise ValueError(f"{name}.device={t.device} must equal x.device={x.device}")
    rotary_dim = 2 * cos.shape[-1] if cos.ndim else 0
    if cos.ndim < 2 or cos.shape != sin.shape or not 2 <= rotary_dim <= x.shape[-1]:
        raise ValueError(
            f"cos.shape={tuple(cos.shape)} and sin.shape={tuple(sin.shape)} must both be (..., seqlen, "
            f"rotary_dim / 2) with rotary_dim from 2 to the head_dim of x, {x.shape[-1]}"
        )
    rows, tables = x.shape[:-2], cos.shape[:-1]
    fits = len(tables) <= len(rows) and all(
        a == 1 or a == b for a, b in zip(reversed(tables), reversed(rows), strict=False)
    )
    if not fits:
        raise ValueError(
            f"cos.shape={tuple(cos.shape)} without its last dimension must broadcast to x's "
            f"(..., seqlen)={tuple(rows)}: of longer tables pass the rows of x's positions, as cos[:seqlen]"
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(dtype)[..., None, :], sin.to(dtype)[..., None, :]  # one for all heads
    rotated, rest = x[..., :rotary_dim].to(dtype), x[..., rotary_dim:]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)
