"""Areas of sums in a backward: set to zero, added to, scaled, and handed from work item to work item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.cpu.dsl.control import either, loop, wait_until, when
from tilewise.cpu.dsl.memory import Halves, Ptr, Rows
from tilewise.cpu.dsl.vector import BYTES, Operand, Scalar, Value, Var, as_kind, maximum
from tilewise.cpu.kernels.common.tiles import Shape, column_chunks, store_rows


def fill_zero(shape: Shape, area: Rows, count: Value | int) -> None:
    for r in loop(0, count):
        for c in range(0, area.stride, shape.lanes):
            area[r, c].store(shape.constant(0.0))


def add_to(shape: Shape, target: Rows, part: list[list[Var]]) -> None:
    for r, row in enumerate(part):
        for v, x in enumerate(row):
            cell = target[r, v * shape.lanes]
            cell.store(cell.load(shape.lanes) + x)


def add_row(shape: Shape, row: Ptr, terms: Rows, begin: Scalar, end: Value) -> None:
    """row[j] += terms[0, j] for begin <= j < end; added in the type of the terms."""
    vectors_end = maximum(begin, begin + ((end - begin) & -shape.lanes))
    for start, stop, lanes in ((begin, vectors_end, shape.lanes), (vectors_end, end, None)):
        for j in loop(start, stop, lanes or 1):
            total = as_kind(row[j].load(lanes), shape.kind) + terms[0, j].load(lanes)
            row[j].store(as_kind(total, "f64" if row.kind == "f64" else "f32"))


def sum_bytes(shape: Shape, rows: int) -> int:
    """What a tile's sums of dq need beside the place where dq will be: of 16 bits half of their bits."""
    return 0 if shape.kind_of("dq") == shape.kind else rows * shape.pad * BYTES["i16"]


def add_in_turn(
    kernel: Any, target: Callable[[Any], Ptr], tile: Value, n: Scalar, place: Value, is_last: Value
) -> None:
    """Add n rows of dq to a tile's sums when `place` work items have; the last one writes scale * sums."""
    shape, args, dq = kernel.shape, kernel.args, kernel.dq
    dim, ticket = shape.config.head_dim, args.ptr("ticket", "i64")[tile]
    sums: Callable[[Any], Any] = target
    if size := kernel.facts()["sum_bytes"]:
        slot = args.ptr("dq_sum", "i16")[tile % args.sum_tiles * (size // BYTES["i16"])]
        lower = Rows(slot, shape.pad)

        def sums(i: Any) -> Halves:
            return Halves(target(i), lower[i, 0])

    with when(place > 0):
        wait_until(ticket, place)
        for i in loop(0, n):
            row = sums(i)
            for c, width in column_chunks(0, dim, shape.lanes):
                dq[i, c].store(dq[i, c].load(width) + row[c].load(width))
    with either(is_last) as (write, pass_on):
        with write:
            scale_rows(shape, dq, n, args.vector("scale", shape))
            store_rows(shape, target, dq, n, dim)
        with pass_on:
            store_rows(shape, sums, dq, n, dim)
            ticket.store_release(place + 1)


def scale_rows(shape: Shape, area: Rows, count: Scalar, factor: Operand) -> None:
    for r in loop(0, count):
        for c in range(0, area.stride, shape.lanes):
            area[r, c].store(area[r, c].load(shape.lanes) * factor)
