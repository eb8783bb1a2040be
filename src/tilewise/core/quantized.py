"""Tensors in 8 bits as kernels take them: heads apart, in blocks of 128 rows with a scale each.

    query, key   [heads, blocks, 128, width]      rotated: x H, see `tilewise.core.fp8`
    value        [KV heads, blocks, width, 128]   transposed, as 8-bit operands have the summed dimension last

`width` is `fp8.padded_dim(head_dim)`. A sequence begins with a block of its own: block b * ceil(seqlen / 128)
of a dense tensor, and of packed ones cu_seqlens[b] // 128 + b, also if it is empty. What a block has beyond
its sequence is zeros, and so are columns beyond the head. In a value's block the keys of every sixteen stand
in the order in which a thread of Hopper's tensor cores holds its weights: `key_order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.core import fp8
from tilewise.core.fp8 import BLOCK_ROWS
from tilewise.core.problem import Inputs
from tilewise.core.torch_private import own_dtypes

KINDS = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class Quantized:
    """A query, key or value in 8 bits, which `tilewise.attention` takes in the place of the tensor.

    Attributes:
        blocks: float8_e4m3fn or, of a query or key, int8 [heads, blocks, 128, width]; of a value [KV heads,
            blocks, width, 128].
        scale: float32 [heads, blocks], what a block's numbers are to be multiplied by. A rotated query's are
            over its width, so that scores need no other factor.
        shape: of the tensor: (batch, seqlen, heads, head_dim), packed (total, heads, head_dim).
        dtype: of the tensor, bfloat16 or float16; out will have it.
        kind: "query", "key" or "value".
        is_rotated: of a query or key, whether its blocks hold x H.
        cu_seqlens: (batch + 1,) of packed sequences.
    """

    blocks: Tensor
    scale: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    is_rotated: bool
    cu_seqlens: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    def dequantize(self) -> Tensor:
        """What the 8-bit numbers stand for, float32 in `shape`; a query or key is rotated back."""
        rows = in_key_order(self.blocks) if self.kind == "value" else self.blocks
        numbers = from_blocks(rows.float() * self.scale[..., None, None], self.shape, self.cu_seqlens)
        if self.is_rotated:  # H H^T is width times the identity, by which a query's scale is divided already
            with own_dtypes(self.device.type):
                numbers = numbers @ fp8.hadamard(numbers.shape[-1], self.device).T
            numbers = numbers if self.kind == "query" else numbers / numbers.shape[-1]
        return numbers[..., : self.shape[-1]].contiguous()

    def stand_in(self) -> Tensor:
        """Shape, dtype and device of what this stands for, over the memory of one NaN."""
        return torch.full((1,), float("nan"), dtype=self.dtype, device=self.device).expand(self.shape)


def round_tensor(kind: str, x: Tensor, cu_seqlens: Tensor | None = None, precision: str = "fp8") -> Quantized:
    """x (batch, seqlen, heads, dim), packed (total, heads, dim), in 8 bits, by PyTorch operations.

    Args:
        precision: "fp8" or "int8".

    Example:
        >>> x = torch.ones(1, 200, 2, 64, dtype=torch.bfloat16)
        >>> k = round_tensor("key", x)
        >>> k.blocks.shape, k.scale.shape, torch.equal(k.dequantize(), x.float())
        (torch.Size([2, 2, 128, 64]), torch.Size([2, 2]), True)
    """
    is_rotated = kind != "value"
    width = fp8.padded_dim(x.shape[-1])
    rows = torch.nn.functional.pad(x.detach(), (0, width - x.shape[-1]))
    dtype = fp8.OPERANDS[precision] if is_rotated else fp8.FP8
    values, factors = fp8.round_rows(to_blocks(fp8.rotate(rows) if is_rotated else rows, cu_seqlens), dtype)
    if kind == "value":
        values = in_stored_order(values)
    scale = factors[..., 0] / (width if kind == "query" else 1)
    return Quantized(values, scale, tuple(x.shape), x.dtype, kind, is_rotated, cu_seqlens)


def arrange(
    kind: str, x: Tensor, scale: Tensor | None, dtype: torch.dtype, cu_seqlens: Tensor | None = None
) -> Quantized:
    """float8_e4m3fn x in blocks as it stands, with one scale for each sequence and head.

    Args:
        x: (batch, seqlen, heads, dim), packed (total, heads, dim).
        scale: float32 (batch, heads); None is 1.
        dtype: of the output.
    """
    heads, width = x.shape[-2], fp8.padded_dim(x.shape[-1])
    padded = torch.nn.functional.pad(x.detach().view(torch.uint8), (0, width - x.shape[-1]))
    values = to_blocks(padded, cu_seqlens).view(fp8.FP8)
    if scale is None:
        factors = torch.ones(values.shape[:2], dtype=torch.float32, device=x.device)
    else:
        sequence = _sequences(x.shape, values.shape[1], cu_seqlens, x.device)
        factors = scale.detach()[sequence].T.contiguous() if len(scale) else scale.new_ones(heads, 0)
        signs = (factors < 0).to(torch.uint8) << 7  # a scale is positive: the numbers take its sign
        values = (values.view(torch.uint8) ^ signs[..., None, None]).view(fp8.FP8)
        factors = factors.abs()
    values = in_stored_order(values) if kind == "value" else values
    return Quantized(values, factors, tuple(x.shape), dtype, kind, False, cu_seqlens)


# ---- rows and blocks


def num_blocks(shape: Sequence[int], cu_seqlens: Tensor | None) -> int:
    """Of all sequences of a tensor (batch, seqlen, heads, dim), packed (total, heads, dim)."""
    if cu_seqlens is None:
        return shape[0] * -(-shape[1] // BLOCK_ROWS)
    return shape[0] // BLOCK_ROWS + len(cu_seqlens) - 1


def to_blocks(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[heads, blocks, 128, dim] of x (batch, seqlen, heads, dim), packed (total, heads, dim)."""
    if cu_seqlens is None:
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % BLOCK_ROWS))
        blocks = padded.unflatten(1, (-1, BLOCK_ROWS))  # [batch, blocks, 128, heads, dim]
        return blocks.permute(3, 0, 1, 2, 4).flatten(1, 2).contiguous()
    count = num_blocks(x.shape, cu_seqlens)
    sequence = _sequences(x.shape, count, cu_seqlens, x.device)
    starts = cu_seqlens.long()
    first = starts // BLOCK_ROWS + torch.arange(len(starts), device=x.device)
    block = torch.arange(count, device=x.device)
    row = starts[sequence] + (block - first[sequence]) * BLOCK_ROWS
    row = row[:, None] + torch.arange(BLOCK_ROWS, device=x.device)  # [blocks, 128]
    is_row = row < starts[1:][sequence][:, None]
    rows = x[row.clamp(max=max(0, len(x) - 1))] if len(x) else x.new_zeros((*row.shape, *x.shape[1:]))
    return rows.masked_fill(~is_row[..., None, None], 0).permute(2, 0, 1, 3).contiguous()


def from_blocks(blocks: Tensor, shape: Sequence[int], cu_seqlens: Tensor | None) -> Tensor:
    """The rows of blocks [heads, blocks, 128, dim]: `shape`, but for the last dimension."""
    if cu_seqlens is None:
        batch, seqlen = shape[:2]
        by_batch = blocks.unflatten(1, (batch, -(-seqlen // BLOCK_ROWS)))
        return by_batch.flatten(2, 3)[:, :, :seqlen].permute(1, 2, 0, 3)
    starts = cu_seqlens.long()
    token = torch.arange(shape[0], device=blocks.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    place = token - starts[sequence]
    first = starts[sequence] // BLOCK_ROWS + sequence
    return blocks[:, first + place // BLOCK_ROWS, place % BLOCK_ROWS].transpose(0, 1)


def _sequences(shape: Sequence[int], count: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """The sequence that each block belongs to: the last whose first block is not after it."""
    block = torch.arange(count, device=device)
    if cu_seqlens is None:
        return block // max(1, -(-shape[1] // BLOCK_ROWS))
    batch = len(cu_seqlens) - 1
    first = cu_seqlens[:-1].long() // BLOCK_ROWS + torch.arange(batch, device=device)
    return torch.searchsorted(first, block, right=True) - 1


def key_order() -> Tensor:
    """The key of a value's block that stands at each of its 128 places.

    Of every sixteen columns of weights a thread t holds 2t, 2t + 1, 8 + 2t and 9 + 2t as an accumulator, and
    4t to 4t + 3 as an operand: so key 8c + 2t + b stands at place 4t + 2c + b, and no weight has to move.
    """
    place = torch.arange(BLOCK_ROWS, device="cpu")
    t, c, b = place % 16 // 4, place % 4 // 2, place % 2
    return place // 16 * 16 + 8 * c + 2 * t + b


def in_stored_order(values: Tensor) -> Tensor:
    """[heads, blocks, 128, width] transposed, with the keys in `key_order`."""
    order = key_order().to(values.device)
    return values.view(torch.uint8)[:, :, order].transpose(2, 3).contiguous().view(values.dtype)


def in_key_order(values: Tensor) -> Tensor:
    """What `in_stored_order` was made of."""
    order = key_order().argsort().to(values.device)
    return values.view(torch.uint8)[..., order].transpose(2, 3).contiguous().view(values.dtype)


# ---- in the place of tensors


def is_quantized(*tensors: object) -> bool:
    """Whether one of them is a `Quantized`."""
    return any(type(t) is Quantized for t in tensors)


def inputs_of(query: object, key: object, value: object) -> Inputs:
    """The `Inputs` of an 8-bit call: stand-ins, blocks and scales.

    Raises:
        TypeError: one is no `Quantized`, or of another dtype.
        ValueError: one was quantized as something else, or only one of query and key is rotated.
    """
    given = dict(zip(KINDS, (query, key, value)))
    for kind, t in given.items():
        if not isinstance(t, Quantized):
            raise TypeError(f"{kind}={type(t).__name__} must be Quantized, as the others are")
        if t.kind != kind:
            raise ValueError(f"{kind} was quantized as a {t.kind}: pass quantize(query, key, value) in order")
    q, k, v = given.values()
    assert isinstance(q, Quantized) and isinstance(k, Quantized) and isinstance(v, Quantized)
    if q.blocks.dtype != k.blocks.dtype:
        raise TypeError(f"key.blocks.dtype={k.blocks.dtype} must equal query.blocks.dtype={q.blocks.dtype}")
    if q.is_rotated != k.is_rotated:
        raise ValueError(f"query.is_rotated={q.is_rotated} must equal key.is_rotated={k.is_rotated}")
    return Inputs(
        q.stand_in(), k.stand_in(), v.stand_in(),
        query_blocks=q.blocks, key_blocks=k.blocks, value_blocks=v.blocks,
        query_scale=q.scale, key_scale=k.scale, value_scale=v.scale,
    )  # fmt: skip


def check_offsets(**given: tuple[object, Tensor | None]) -> None:
    """Raises ValueError unless tensors were quantized with the offsets of the call.

    Other tensors of the same numbers are compared, which waits for a GPU.
    """
    for name, (t, cu_seqlens) in given.items():
        if not isinstance(t, Quantized) or t.cu_seqlens is None or t.cu_seqlens is cu_seqlens:
            continue  # dense tensors are refused by their rank
        if cu_seqlens is None or not torch.equal(t.cu_seqlens, cu_seqlens):
            raise ValueError(f"{name} must be the offsets that the tensors were quantized with")
