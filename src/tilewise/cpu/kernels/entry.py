"""How a repeated call enters its kernel: machine code looks at the tensors it is given, not Python.

Their sizes, strides, types and addresses are some twenty look-ups in Python, which take longer than the
attention of one query. DLPack's exchange interface has a C function that fills a struct with all of them:

    for each of q, k, v (backward: and out, lse, do):  tensor = exchange(object)
        if it is not like the one that the plan was made for: return
        address of the object -> address of its elements
    entered = 1;  zeros where the kernel counts
    the kernel, if it is so short that other threads may wait for Python's lock meanwhile
"""

from __future__ import annotations

import llvmlite.ir as ir

from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.memory import Ptr
from tilewise.cpu.dsl.vector import I32, I64, Value, as_int, builder, function
from tilewise.cpu.host.arguments import DLTENSOR, ENTERED, EXPECTED, EXPECTED_WORDS, WORD, EntryConfig
from tilewise.cpu.host.compile import Target
from tilewise.cpu.kernels.tiles import Arguments


def build(config: EntryConfig, target: Target) -> tuple[str, dict[str, int]]:
    """LLVM IR of the function for tensors of these names."""
    with function("entry") as emitter:
        enter(Arguments(emitter), config.names, 0)
        return emitter.finish(), {}


def enter(args: Arguments, names: tuple[str, ...], n: int) -> None:
    """Look at the tensor `names[n]`, then at the rest; the kernel if there is none left."""
    block = args.block
    if n == len(names):
        block[ENTERED].store(as_int(1))
        zeros = args.ptr("turn", "i64")
        for i in loop(0, args.zeroed, 4):  # of the scratch, in whole lines
            zeros[i].store(Value(ir.Constant(ir.VectorType(I64, 4), [0] * 4)))
        with when(args.kernel > 0):
            args.emitter.call(args.kernel, ir.VoidType(), block.address)
        return
    name, dimensions = names[n], 3 if names[n] == "lse" else 4
    tensor, expected = block[DLTENSOR], block[EXPECTED + n * EXPECTED_WORDS]
    data, head, sizes, strides = tensor, tensor[1], tensor[3], tensor[4]  # its words
    given = args.ptr(name, "i64")
    status = Value(args.emitter.call(args.exchange, I32, given.address, tensor.address))
    with when(status.equals(0) & are_equal(head, expected, 2)):
        sizes, strides = (Ptr(t.as_kind("ptr").load().raw, "i64") for t in (sizes, strides))
        same_sizes = are_equal(sizes, expected[2], dimensions)
        with when(same_sizes & are_equal(strides, expected[2 + dimensions], dimensions)):
            block[WORD[name]].store(data.load())
            enter(args, names, n + 1)


def are_equal(a: Ptr, b: Ptr, words: int) -> Value:
    whole = ir.IntType(64 * words)
    x, y = (Value(builder().load(p.address, typ=whole, align=8)) for p in (a, b))
    return x.equals(y)
