"""Layouts of wgmma: who holds which element of a tile, and how one may lie in shared memory.

A warpgroup is four warps of 16 rows each; a thread holds, of two rows, columns 2t and 2t + 1 of every eight.
"""

from tilewise.gpu.hopper.common.compat import gl, gluon


@gluon.constexpr_function
def accumulator_layout(num_columns, depth=16):
    """Of a [64, num_columns] float32 accumulator; an instruction multiplies `depth` columns by rows."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, min(num_columns, 256), depth]
    )


@gluon.constexpr_function
def operand_layout(num_columns):
    """Of a 16-bit left operand in registers: an accumulator converted in place."""
    return gl.DotOperandLayout(0, accumulator_layout(num_columns), 2)


@gluon.constexpr_function
def operand_layout_8_bit(num_columns):
    """Of an 8-bit left operand in registers: a thread holds columns 4t to 4t + 3 of every sixteen."""
    return gl.DotOperandLayout(0, accumulator_layout(num_columns, 32), 4)


@gluon.constexpr_function
def row_layout(num_columns, depth=16):
    """Of one value a row."""
    return gl.SliceLayout(1, accumulator_layout(num_columns, depth))


@gluon.constexpr_function
def warp_layout():
    """Of accumulators [4, 16, columns] of mma, one a warp. As [64, columns] it is `accumulator_layout`."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def partial_layout():
    """Of [64, 4] values: each row has one in each of the four threads that share it."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.constexpr_function
def pair_layout():
    """Of [64, 4, 2] values: eight columns of an accumulator, two in each of the four threads of a row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 2],
    )


@gluon.constexpr_function
def call_layout(num_columns):
    """Of calls of the generator of dropout, one for four rows and columns of [64, num_columns] scores.

    Neighbouring calls of a row are in lanes, four of a square of 16 columns and then those of the next one.
    """
    columns = [[0, 8 << i] for i in range((num_columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=columns,
        lane_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[16, num_columns // 4],
    )


@gluon.constexpr_function
def along(dim, layout, num_dims):
    """The layout of one dimension of a tensor."""
    for other in range(num_dims - 1, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def row_groups_layout():
    """Of a 16-bit tile [64, 128] in shared memory: 8 rows after 8 rows, each time the left 64 columns first.

    So 8 rows have 2 KB to themselves, and any number of them arrives in one TMA copy. Each row of 64 columns
    is 128 bytes, swizzled as TMA does it.
    """
    columns = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32]]
    rows = [[1, 8], [2, 16], [4, 32]]
    return gl.SharedLinearLayout([*columns, *rows, [0, 64], [8, 0], [16, 0], [32, 0]], alignment=1024)


@gluon.constexpr_function
def tile_layout(shape, dtype, by_row_groups):
    """Of a tile of keys or values in shared memory."""
    return row_groups_layout() if by_row_groups else gl.NVMMASharedLayout.get_default_for(shape, dtype)
