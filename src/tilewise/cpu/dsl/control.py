"""Loops, branches and waiting in the machine code, written as Python's `for` and `with`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from tilewise.cpu.dsl.memory import Ptr
from tilewise.cpu.dsl.vector import I32, Operand, Scalar, Value, Var, as_int, builder, emitter


def loop(start: Scalar, stop: Scalar, step: Scalar = 1) -> Iterator[Value]:
    """for i in range(start, stop, step), in the machine code. No break, no continue."""
    b, make_block = builder(), builder().append_basic_block
    body, done = make_block("loop"), make_block("done")
    first, end = as_int(start), as_int(stop).raw
    index = Var(first)
    if isinstance(start, int) and isinstance(stop, int) and start < stop:
        b.branch(body)
    else:
        b.cbranch(b.icmp_signed("<", first.raw, end), body, done)
    b.position_at_end(body)
    current = Value(index.raw)
    yield current
    following = current + step
    index.set(following)
    b.cbranch(b.icmp_signed("<", following.raw, end), body, done)
    b.position_at_end(done)


def wait_until(counter: Ptr, value: Operand) -> None:
    """Wait until the integer reaches value, letting other threads run; see what its writer wrote before."""
    b = builder()
    again, done = b.append_basic_block("wait"), b.append_basic_block("done")
    b.branch(again)
    b.position_at_end(again)
    is_early = counter.load_acquire() < value
    if os.name == "posix":
        emitter().intrinsic("sched_yield", I32)
    b.cbranch(is_early.raw, again, done)
    b.position_at_end(done)


def claim(counter: Ptr, total: Operand) -> Iterator[Value]:
    """Each index below total goes to exactly one of the threads that run this."""
    b = builder()
    ask, work, done = (b.append_basic_block(name) for name in ("ask", "work", "done"))
    b.branch(ask)
    b.position_at_end(ask)
    item = counter.fetch_add(1)
    b.cbranch((item < total).raw, work, done)
    b.position_at_end(work)
    yield item
    b.branch(ask)
    b.position_at_end(done)


def when(condition: Operand) -> AbstractContextManager[Any]:
    """if condition: ..."""
    return builder().if_then(condition.raw)  # type: ignore[no-any-return]


def either(condition: Operand) -> AbstractContextManager[tuple[Any, Any]]:
    """if ... else ...: `with either(c) as (then, otherwise): with then: ... with otherwise: ...`"""
    return builder().if_else(condition.raw)  # type: ignore[no-any-return]
