"""Q, K and V in 8 bits for `hopper.forward_fp8`: heads apart, in slots of 128 rows with a factor each.

    Q, K   [heads, slots, 128, BLOCK_D]     rotated: x H, H = +-1 (`tilewise.fp8.hadamard`)
    V      [kv heads, slots, BLOCK_DV, 128]  transposed, its keys permuted: see `stored_key`

A sequence begins with a slot of its own: slot b * ceil(seqlen / 128) of a dense tensor, and of a packed one
cu_seqlens[b] // 128 + b, also if it is empty. What a slot has beyond its sequence is zeros, and so are
columns beyond the head. Factors are powers of two (`tilewise.fp8.quantize`): they round nothing. Where NaN or
infinity is among its rows, a factor is NaN.
"""

import triton
import triton.language as tl

SLOT = tl.constexpr(128)


@triton.jit
def place_of(slot, cu_seqlens, batch, seqlen, IS_PACKED: tl.constexpr):
    """(sequence, row of the tensor, rows) of a slot; at most 0 rows if it belongs to no sequence."""
    if IS_PACKED:
        low = 0
        high = batch
        while high - low > 1:  # the last sequence whose first slot is not after this one
            middle = (low + high) // 2
            if tl.load(cu_seqlens + middle).to(tl.int32) // SLOT + middle <= slot:
                low = middle
            else:
                high = middle
        start = tl.load(cu_seqlens + low).to(tl.int32)
        end = tl.load(cu_seqlens + low + 1).to(tl.int32)
        row = start + (slot - start // SLOT - low) * SLOT
        b = low
    else:
        slots = (seqlen + SLOT - 1) // SLOT
        b = slot // slots
        row = slot % slots * SLOT
        end = seqlen
    return b, row, end - row


@triton.jit
def first_row(x, b, row, head, stride_b, stride_s, stride_h):
    """Pointer to a row of a head; packed sequences have no stride from one to the next."""
    return x + b.to(tl.int64) * stride_b + row.to(tl.int64) * stride_s + head.to(tl.int64) * stride_h


@triton.jit
def factor_of(largest):
    """(factor, 1 / factor) of a slot whose largest magnitude has the bits `largest`: it becomes at most 448.

    448 is 1.75 * 2^8: a mantissa above that of 1.75 takes one more power of two.
    """
    exponent = ((largest + 0x1FFFFF) >> 23) - 8
    exponent = tl.where(largest == 0, 127, tl.maximum(exponent, 1))
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest >= 0x7F800000, float("nan"), factor), inverse


@triton.jit
def largest_of(y):
    """Bits of the largest magnitude; as integers NaN comes after infinity, and that after all numbers."""
    return tl.max(tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)


@triton.jit(do_not_specialize=["batch", "seqlen"])
def quantize_rows_kernel(
    x, matrix, values, factors, cu_seqlens, batch, seqlen, stride_b, stride_s, stride_h, dim,
    BLOCK_D: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """One slot of one head of Q or K. H of 256 is [[H', H'], [H', -H']] up to signs, which `matrix` has."""
    WIDTH: tl.constexpr = min(BLOCK_D, 128)
    slot, head = tl.program_id(0), tl.program_id(1)
    b, row, rows = place_of(slot, cu_seqlens, batch, seqlen, IS_PACKED)
    i = tl.arange(0, SLOT)
    d = tl.arange(0, WIDTH)
    ptr_x = first_row(x, b, row, head, stride_b, stride_s, stride_h)
    ptr_x = ptr_x + i[:, None].to(tl.int64) * stride_s + d[None, :]
    ptr_h = matrix + d[:, None] * BLOCK_D + d[None, :]
    ptr = values + (head * tl.num_programs(0) + slot).to(tl.int64) * SLOT * BLOCK_D
    ptr = ptr + i[:, None] * BLOCK_D + d[None, :]
    mask = (i < rows)[:, None]
    y = tl.dot(tl.load(ptr_x, mask=mask & (d < dim)[None, :], other=0.0), tl.load(ptr_h))
    if BLOCK_D > WIDTH:
        right = tl.load(ptr_x + WIDTH, mask=mask & (d + WIDTH < dim)[None, :], other=0.0)
        z = tl.dot(right, tl.load(ptr_h + WIDTH * BLOCK_D))
        factor, inverse = factor_of(tl.maximum(largest_of(y + z), largest_of(y - z)))
        tl.store(ptr, ((y + z) * inverse).to(tl.float8e4nv))
        tl.store(ptr + WIDTH, ((y - z) * inverse).to(tl.float8e4nv))
    else:
        factor, inverse = factor_of(largest_of(y))
        tl.store(ptr, (y * inverse).to(tl.float8e4nv))
    tl.store(factors + head * tl.num_programs(0) + slot, factor)


@triton.jit
def stored_key(position):
    """The key of a slot that stands at a position of V^T: see `forward_fp8.as_operand`."""
    t, c, b = position % 16 // 4, position % 4 // 2, position % 2
    return position // 16 * 16 + 8 * c + 2 * t + b


@triton.jit(do_not_specialize=["batch", "seqlen"])
def quantize_values_kernel(
    x, values, factors, cu_seqlens, batch, seqlen, stride_b, stride_s, stride_h, dim,
    BLOCK_D: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """One slot of one head of V."""
    slot, head = tl.program_id(0), tl.program_id(1)
    b, row, rows = place_of(slot, cu_seqlens, batch, seqlen, IS_PACKED)
    position = tl.arange(0, SLOT)
    d = tl.arange(0, BLOCK_D)
    key = stored_key(position)
    ptr_x = first_row(x, b, row, head, stride_b, stride_s, stride_h)
    mask = (key < rows)[:, None] & (d < dim)[None, :]
    y = tl.load(ptr_x + key[:, None].to(tl.int64) * stride_s + d[None, :], mask=mask, other=0.0)
    y = y.to(tl.float32)
    factor, inverse = factor_of(largest_of(y))
    ptr = values + (head * tl.num_programs(0) + slot).to(tl.int64) * SLOT * BLOCK_D
    tl.store(ptr + d[:, None] * SLOT + position[None, :], tl.trans((y * inverse).to(tl.float8e4nv)))
    tl.store(factors + head * tl.num_programs(0) + slot, factor)
