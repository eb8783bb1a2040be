"""Every name that Gluon changes between releases, under one name (Triton 3.6 to 3.9)."""

from typing import dataclass_transform

from triton._C.libtriton import ir as _ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin as _builtin
from triton.experimental.gluon.language.nvidia.ampere import mma_v2 as mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared as fence_async_shared,
    mbarrier as mbarrier,
    tma,
    warpgroup_mma as warpgroup_mma,
    warpgroup_mma_wait as warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor
from triton.language import core as _core

_shared = gl.shared_memory_descriptor
_reinterpret = _shared.reinterpret if hasattr(_shared, "reinterpret") else _shared._reinterpret
_aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else _core._aggregate
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
wait_for_stores = tma.store_wait

# Whether a warpgroup with dK and dV in 160 registers can start the next S beside them. What newer releases
# make of it needs more registers than there are, and ptxas would run all products one by one.
HOLDS_NEXT_S = gl.constexpr(not hasattr(tma, "async_load"))


@dataclass_transform()
def aggregate(cls):
    """Class decorator: values that go through a kernel under one name.

    The constructor takes one for each annotation, in their order.
    """
    kinds = cls.__annotations__
    names = gl.constexpr(tuple(kinds))  # a constexpr: so they count in Triton's cache keys

    def __init__(self, *values):
        for name, value in zip(names.value, values, strict=True):
            setattr(self, name, gl.constexpr(value) if kinds[name] is gl.constexpr else value)

    cls.__init__ = gluon.constexpr_function(__init__)
    # Its key has the names. Kernels would list those of all aggregates again, sorted by where they lie in
    # memory: in another order, and so with another key, in the next process.
    if cls.__init__.cache_key:
        cls.__init__.used_global_vals = {}
    return _aggregate(cls)


@gluon.jit
def as_blocks(smem, COUNT: gl.constexpr, desc):
    """Shared memory as COUNT blocks of a TMA descriptor."""
    return _reinterpret(smem, desc.dtype, [COUNT] + desc.block_shape, desc.layout)  # noqa: RUF005


@gluon.jit
def as_tiles(smem, COUNT: gl.constexpr, tile):
    """Shared memory as COUNT tiles like another."""
    return _reinterpret(smem, tile.dtype, [COUNT] + tile.shape, tile.layout)  # noqa: RUF005


@gluon.jit
def as_block(smem, desc):
    """Shared memory as one block of a TMA descriptor."""
    return _reinterpret(smem, desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def as_boxes(tiles, COUNT: gl.constexpr, desc):
    """Tiles [n, rows, columns] as boxes of a TMA descriptor: by tile, then by columns, then by rows.

    So they lie in swizzled shared memory, where up to 64 columns of 16 bits make a box of their own.
    """
    return as_blocks(tiles, COUNT, desc)


@gluon.jit
def as_boxes_by_rows(tiles, COUNT: gl.constexpr, desc):
    """Tiles of `layouts.row_groups_layout` as boxes: by tile, then by rows, then by columns."""
    return as_blocks(tiles, COUNT, desc)


@gluon.jit
def as_pages(tiles, COUNT: gl.constexpr, desc):
    """Such tiles as pages [groups of 8 rows, 1, halves of the columns, 8, 64]."""
    return as_blocks(tiles, COUNT, desc)


if hasattr(tma, "async_atomic_add"):
    add_tile = tma.async_atomic_add
else:

    @_builtin
    def add_tile(desc, coord, smem, _semantic=None):
        """TMA copy of a shared-memory tile to global memory that adds to what is there."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        kind = _ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, smem.handle)


@_builtin
def specialize(consumer, producer, cfg, _semantic=None, _generator=None):
    """Run (role, arguments) of a producer, and of a consumer for each warpgroup, whose number comes first."""
    (role, arguments), cfg = consumer, cfg.value
    consumers = [(role, (gl.constexpr(w), *arguments)) for w in range(cfg.WARPGROUPS)]
    compiler = {"_semantic": _semantic, "_generator": _generator}
    gl.warp_specialize([*consumers, producer], cfg.WARPS, cfg.REGISTERS, **compiler)


@gluon.constexpr_function
def _with_result(instructions):
    return instructions + " mov.b32 $0, 0;"


@gluon.jit
def _execute(INSTRUCTIONS: gl.constexpr, operand=0):
    """Run PTX instructions, which may read $1, where this stands; nothing comes of them."""
    ASM: gl.constexpr = _with_result(INSTRUCTIONS)
    gl.inline_asm_elementwise(ASM, "=r,r", [operand], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def unhoisted(x):
    """x, computed where this stands. Hoisted out of a loop of tiles, each integer takes a register."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bits_of(x):
    """The bits of float32 numbers, as integers."""
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def float_of(bits):
    """The float32 numbers of such bits."""
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def halves(words, dtype: gl.constexpr):
    """The lower and the upper 16 bits of words, numbers of a dtype, as float32."""
    if dtype == gl.bfloat16:
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    else:
        low = words.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def float_pair(words):
    """The lower and the upper 32 bits of words as float32."""
    return float_of(words.to(gl.int32)), float_of((words >> 32).to(gl.int32))


@gluon.jit
def wait_for_own_stores():
    """Wait until the TMA copies that this thread has started have been read from shared memory.

    Unlike `wait_for_stores` no barrier: other threads know it after the next one.
    """
    _execute("cp.async.bulk.wait_group.read 0;")


@gluon.jit
def wait_for_writes():
    """Wait until this thread's TMA copies to global memory are complete, not only read from shared memory."""
    _execute("cp.async.bulk.wait_group 0;")


@gluon.constexpr_function
def _barrier_of_two_warpgroups(operation, number):
    return f"bar.{operation} {number}, 256;"


@gluon.jit
def sync_warpgroups():
    """Wait until both warpgroups are here, and what they have stored in shared memory can be read by both.

    One instruction. A wait on an mbarrier is a loop, and a loop between the start and the end of a product
    with a register operand would make ptxas run all products one by one.
    """
    _execute(_barrier_of_two_warpgroups("sync", 8))


@gluon.constexpr_function
def _barrier(operation, number):
    return f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p bar.{operation} {number}, 160; }}"


@gluon.jit
def named_barrier_arrive(NUMBER: gl.constexpr, when=1):
    """Tell the other side, a warpgroup or a single warp, that all threads of this one have come so far.

    Barriers 0 to 7 are Triton's, 8 is that of `sync_warpgroups`. The ping-pong takes 8 and 9, in kernels
    without either. This is one instruction, too, and does not wait. `when` is 0 or not, in all threads alike.
    """
    _execute(_barrier("arrive", NUMBER), when)


@gluon.jit
def named_barrier_sync(NUMBER: gl.constexpr, when=1):
    """Wait for the other side's `named_barrier_arrive`; each is waited for once before the next."""
    _execute(_barrier("sync", NUMBER), when)


@gluon.jit
def pingpong_wait(W: gl.constexpr):
    """Warpgroup W (0 or 1) waits until the other one has let it start its products (ping-pong)."""
    _execute(_barrier_of_two_warpgroups("sync", 8 + W))


@gluon.jit
def pingpong_arrive(W: gl.constexpr):
    """Warpgroup W lets the other one start its products, and does not wait."""
    _execute(_barrier_of_two_warpgroups("arrive", 9 - W))


@gluon.jit
def start_next_kernel():
    """The stream's next kernel may start, up to its wait for this one, if it was launched to do so."""
    _execute("griddepcontrol.launch_dependents;")


@gluon.jit
def wait_for_previous_kernel():
    """Wait until the stream's previous kernel has ended and what it wrote can be read."""
    _execute("griddepcontrol.wait;")
