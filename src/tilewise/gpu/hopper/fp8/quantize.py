"""Q, K and V in 8 bits for `fp8.kernel`, in the blocks of `core.quantized`.

Factors of float8_e4m3fn are powers of two (`core.fp8.round_rows`): they round nothing. Where NaN or infinity
is among a block's rows, its factor is NaN.
"""

import triton
import triton.language as tl

from tilewise.gpu.launch.entry import entry

BLOCK_ROWS = tl.constexpr(128)
TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: float32 numbers about as large are integers


@triton.jit
def rows_of(block, cu_seqlens, batch, seqlen, IS_PACKED: tl.constexpr):
    """(sequence, row of the tensor, rows) of a block; at most 0 rows if it belongs to no sequence."""
    if IS_PACKED:
        low = 0
        high = batch
        while high - low > 1:  # the last sequence whose first block is not after this one
            middle = (low + high) // 2
            if tl.load(cu_seqlens + middle).to(tl.int32) // BLOCK_ROWS + middle <= block:
                low = middle
            else:
                high = middle
        start = tl.load(cu_seqlens + low).to(tl.int32)
        end = tl.load(cu_seqlens + low + 1).to(tl.int32)
        row = start + (block - start // BLOCK_ROWS - low) * BLOCK_ROWS
        b = low
    else:
        blocks = (seqlen + BLOCK_ROWS - 1) // BLOCK_ROWS
        b = block // blocks
        row = block % blocks * BLOCK_ROWS
        end = seqlen
    return b, row, end - row


@triton.jit
def first_row(x, b, row, head, stride_b, stride_s, stride_h):
    """Pointer to a row of a head; packed sequences have no stride from one to the next."""
    return x + b.to(tl.int64) * stride_b + row.to(tl.int64) * stride_s + head.to(tl.int64) * stride_h


@triton.jit
def factor_of(largest):
    """(factor, 1 / factor) of a block whose largest magnitude has the bits `largest`: it becomes at most 448.

    448 is 1.75 * 2^8: a mantissa above that of 1.75 takes one more power of two.
    """
    exponent = ((largest + 0x1FFFFF) >> 23) - 8
    exponent = tl.where(largest == 0, 127, tl.maximum(exponent, 1))
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest >= 0x7F800000, float("nan"), factor), inverse


@triton.jit
def integer_factor_of(largest):
    """(factor, 1 / factor) of a block whose largest magnitude has the bits `largest`: it becomes 127."""
    factor = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0), 2.0**-126)
    factor = tl.where(largest == 0, 1.0, factor)
    return tl.where(largest >= 0x7F800000, float("nan"), factor), tl.div_rn(1.0, factor)


@triton.jit
def rounded(y, inverse, dtype: tl.constexpr):
    """y / factor in 8 bits, to the nearest, of two the even one."""
    if dtype == tl.int8:
        y = ((y * inverse + TO_INTEGER) - TO_INTEGER).to(tl.int8)
    else:
        y = (y * inverse).to(dtype)
    return y


@triton.jit
def largest_of(y):
    """Bits of the largest magnitude; as integers NaN comes after infinity, and that after all numbers."""
    return tl.max(tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)


@triton.jit
def combined(chunks):
    """The chunks of x H, where H is [[H', H'], [H', -H']], and so once more, from those of x times H'."""
    if len(chunks) == 2:
        chunks = (chunks[0] + chunks[1], chunks[0] - chunks[1])
    elif len(chunks) == 4:
        a, b, c, d = (
            chunks[0] + chunks[1],
            chunks[0] - chunks[1],
            chunks[2] + chunks[3],
            chunks[2] - chunks[3],
        )
        chunks = (a + c, b + d, a - c, b - d)
    return chunks


@entry(triton.jit)
def quantize_rows_kernel(
    x, matrix, values, factors, cu_seqlens, batch: int, seqlen: int, stride_b, stride_s, stride_h, dim,
    blocks: int, heads: int,
    BLOCK_D: tl.constexpr, IS_QUERY: tl.constexpr, IS_PACKED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks of Q or K, one after the other: the next one's rows are on their way while one is computed.

    Each chunk of 64 columns is multiplied by its own 64 rows of `matrix`, which has the signs: that is a
    quarter of the products and of the matrix at head size 256. A query's factor is over BLOCK_D, as H H^T is
    BLOCK_D times the identity.
    """
    WIDTH: tl.constexpr = 64
    CHUNKS: tl.constexpr = BLOCK_D // WIDTH
    i = tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, WIDTH)
    ptr_h = matrix + d[:, None] * BLOCK_D + d[None, :]
    h = ()
    for chunk in tl.static_range(CHUNKS):
        h = h + (tl.load(ptr_h + chunk * WIDTH * BLOCK_D),)  # type: ignore[assignment]  # noqa: RUF005
    for index in tl.range(tl.program_id(0), blocks * heads, tl.num_programs(0), num_stages=STAGES):
        block, head = index // heads, index % heads
        b, row, rows = rows_of(block, cu_seqlens, batch, seqlen, IS_PACKED)
        ptr_x = first_row(x, b, row, head, stride_b, stride_s, stride_h)
        ptr_x = ptr_x + i[:, None].to(tl.int64) * stride_s + d[None, :]
        mask = (i < rows)[:, None]
        y = ()
        for chunk in tl.static_range(CHUNKS):
            x_chunk = tl.load(
                ptr_x + chunk * WIDTH, mask=mask & (d + chunk * WIDTH < dim)[None, :], other=0.0
            )
            y = y + (tl.dot(x_chunk, h[chunk]),)  # type: ignore[assignment]  # noqa: RUF005
        y = combined(y)
        largest = tl.zeros([BLOCK_ROWS, WIDTH], tl.int32)
        for chunk in tl.static_range(CHUNKS):
            largest = tl.maximum(largest, y[chunk].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        largest = tl.max(tl.max(largest, 1), 0)
        if values.dtype.element_ty == tl.int8:
            factor, inverse = integer_factor_of(largest)
        else:
            factor, inverse = factor_of(largest)
        ptr = values + (head * blocks + block).to(tl.int64) * BLOCK_ROWS * BLOCK_D
        ptr = ptr + i[:, None] * BLOCK_D + d[None, :]
        for chunk in tl.static_range(CHUNKS):
            tl.store(ptr + chunk * WIDTH, rounded(y[chunk], inverse, values.dtype.element_ty))
        tl.store(factors + head * blocks + block, factor * (1 / BLOCK_D) if IS_QUERY else factor)


@triton.jit
def stored_key(position):
    """The key of a block that stands at a position of V^T: `core.quantized.key_order`."""
    t, c, b = position % 16 // 4, position % 4 // 2, position % 2
    return position // 16 * 16 + 8 * c + 2 * t + b


@entry(triton.jit)
def quantize_values_kernel(
    x, values, factors, cu_seqlens, batch: int, seqlen: int, stride_b, stride_s, stride_h, dim,
    BLOCK_D: tl.constexpr, IS_PACKED: tl.constexpr,
):  # fmt: skip
    """One block of one head of V."""
    block, head = tl.program_id(0), tl.program_id(1)
    b, row, rows = rows_of(block, cu_seqlens, batch, seqlen, IS_PACKED)
    position = tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)
    key = stored_key(position)
    ptr_x = first_row(x, b, row, head, stride_b, stride_s, stride_h)
    mask = (key < rows)[:, None] & (d < dim)[None, :]
    y = tl.load(ptr_x + key[:, None].to(tl.int64) * stride_s + d[None, :], mask=mask, other=0.0)
    y = y.to(tl.float32)
    factor, inverse = factor_of(largest_of(y))
    ptr = values + (head * tl.num_programs(0) + block).to(tl.int64) * BLOCK_ROWS * BLOCK_D
    tl.store(ptr + d[:, None] * BLOCK_ROWS + position[None, :], tl.trans((y * inverse).to(tl.float8e4nv)))
    tl.store(factors + head * tl.num_programs(0) + block, factor)
