"""How a repeated call enters its kernel: machine code looks at query, key and value, not Python.

Their sizes, strides, types and addresses are some twenty look-ups in Python, which take longer than the
attention of one query. DLPack's exchange interface has a C function that fills a struct with all of them:

    for each of q, k, v:  tensor = exchange(object)
        if it is not like the one that the plan was made for: return
        address of the object -> address of its elements
    entered = 1;  the kernel, if it is so short that other threads may wait for Python's lock meanwhile
"""

from __future__ import annotations

import llvmlite.ir as ir

from tilewise.cpu.llvm.arguments import DLTENSOR, ENTERED, EXPECTED, EXPECTED_WORDS, WORD, NoConfig
from tilewise.cpu.llvm.compile import Target
from tilewise.cpu.llvm.control import when
from tilewise.cpu.llvm.memory import Ptr
from tilewise.cpu.llvm.tiles import Arguments
from tilewise.cpu.llvm.vector import I32, Value, as_int, builder, function


def build(config: NoConfig, target: Target) -> tuple[str, dict[str, int]]:
    """LLVM IR of the one function that there is."""
    with function("entry") as emitter:
        enter(Arguments(emitter), "qkv")
        return emitter.finish(), {}


def enter(args: Arguments, names: str) -> None:
    """Look at the first of the tensors, then at the rest; the kernel if there is none left."""
    block = args.block
    if not names:
        block[ENTERED].store(as_int(1))
        with when(args.kernel > 0):
            args.emitter.call(args.kernel, ir.VoidType(), block.address)
        return
    tensor, expected = block[DLTENSOR], block[EXPECTED + "qkv".index(names[0]) * EXPECTED_WORDS]
    data, head, sizes, strides = tensor, tensor[1], tensor[3], tensor[4]  # its words
    given = args.ptr(names[0], "i64")
    status = Value(args.emitter.call(args.exchange, I32, given.address, tensor.address))
    with when(status.equals(0) & are_equal(head, expected, 2)):
        sizes, strides = (Ptr(t.as_kind("ptr").load().raw, "i64") for t in (sizes, strides))
        with when(are_equal(sizes, expected[2], 4) & are_equal(strides, expected[6], 4)):
            block[WORD[names[0]]].store(data.load())
            enter(args, names[1:])


def are_equal(a: Ptr, b: Ptr, words: int) -> Value:
    whole = ir.IntType(64 * words)
    x, y = (Value(builder().load(p.address, typ=whole, align=8)) for p in (a, b))
    return x.equals(y)
