"""Time, peak extra memory and error of each method over the sequence length."""

from __future__ import annotations

import functools
import math
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

import tilewise
from tilewise.lab.demo import memory
from tilewise.lab.demo.methods import METHODS, SDPA, STANDARD, TILEWISE, Method
from tilewise.lab.demo.scale import Scale
from tilewise.lab.demo.train import Advance

SAFE_SHARE = 0.25  # of the free memory, for standard attention
SCORE_MATRICES = {False: 3.25, True: 4.25}  # that it holds at once, forward and with backward, rounded up
TIMED_ONCE = 1.0  # seconds from which on the call that measures memory and error is also the timing
WARM_UP, WARM_UP_CALLS = 0.02, 5  # seconds and calls before the timing; of long calls fewer will do
SAMPLE = 2e-3  # seconds of a sample: shorter calls are timed several in a row
PASSES = {False: "forward", True: "forward + backward"}


@dataclass
class Cell:
    """One method at one length. Errors: largest |x - float64| over largest |float64|, over all results."""

    seconds: list[float] = field(default_factory=list)
    extra_bytes: int = 0
    error: float = 0.0
    skipped: str | None = None

    @property
    def time(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Table:
    """Cells by (length, is_backward, method)."""

    cells: dict[tuple[int, bool, str], Cell]
    lengths: tuple[int, ...]
    shape: str
    backends: str
    dtype: torch.dtype
    memory_how: str
    checked: str

    def series(self, is_backward: bool, method: str) -> dict[int, Cell]:
        """The cells that were measured, by length."""
        found = {n: self.cells[n, is_backward, method] for n in self.lengths}
        return {n: cell for n, cell in found.items() if cell.skipped is None}

    def bound(self, seqlen: int, is_backward: bool) -> float:
        """The error allowed: twice the larger one of the other methods, and 8 units of rounding."""
        others = (self.cells[seqlen, is_backward, name] for name in (STANDARD, SDPA))
        largest = max((cell.error for cell in others if cell.skipped is None), default=0.0)
        return 2 * largest + 8 * torch.finfo(self.dtype).eps

    @property
    def outside(self) -> list[tuple[int, bool]]:
        """Where tilewise's error is not within the bound; a NaN is not."""
        tilewise_cells = ((n, b, self.cells[n, b, TILEWISE]) for n in self.lengths for b in PASSES)
        return [(n, b) for n, b, cell in tilewise_cells if not cell.error <= self.bound(n, b)]


def measure(scale: Scale, device: torch.device, seed: int, advance: Advance) -> Table:
    cells: dict[tuple[int, bool, str], Cell] = {}
    backends: dict[str, None] = {}  # in order
    _warm_up(scale, device)
    for seqlen in scale.lengths:
        for is_backward in PASSES:
            data = Data(scale, seqlen, is_backward, device, seed)
            column = {}
            for name, method in METHODS.items():
                column[name] = _first_call(data, name, method)
                advance()
            _time(data, column, scale)
            cells |= {(seqlen, is_backward, name): cell for name, cell in column.items()}
        chosen = tilewise.explain(*data.inputs, causal=True)
        backends[f"{chosen.backend} (backward: {chosen.backward_backend})"] = None
    dtype = str(scale.table_dtype).removeprefix("torch.")
    return Table(
        cells,
        scale.lengths,
        f"batch 1, {scale.table_heads} heads of {scale.table_head_dim}, causal, {dtype}",
        ", then ".join(backends),
        scale.table_dtype,
        memory.HOW[device.type],
        f"{3 * scale.checked_rows} queries of each length and the gradients that they send back",
    )


class Data:
    """Random inputs of one length, and float64 results on slices of the queries.

    The checked output gradient is zero outside of the slices, so that float64 needs no N x N matrix.
    """

    def __init__(self, scale: Scale, seqlen: int, is_backward: bool, device: torch.device, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed + seqlen)
        shape = (1, seqlen, scale.table_heads, scale.table_head_dim)

        def draw() -> Tensor:
            return torch.randn(shape, generator=generator).to(device, scale.table_dtype)

        self.device, self.is_backward, self.seqlen = device, is_backward, seqlen
        self.score_bytes = scale.table_heads * seqlen**2 * scale.table_dtype.itemsize
        self.inputs = [draw().requires_grad_(is_backward) for _ in range(3)]
        self.dout, self.checked_dout = draw(), torch.zeros(shape, dtype=scale.table_dtype, device=device)
        rows = scale.checked_rows
        self.slices = [slice(start, start + rows) for start in (0, (seqlen - rows) // 2, seqlen - rows)]
        for checked in self.slices:
            self.checked_dout[:, checked] = self.dout[:, checked]

    def call(self, method: Method, dout: Tensor) -> tuple[Tensor, ...]:
        """(out,), or (out, dquery, dkey, dvalue)."""
        if not self.is_backward:
            with torch.no_grad():
                return (method(*self.inputs),)
        out = method(*self.inputs)
        return (out.detach(), *torch.autograd.grad(out, self.inputs, dout))

    @functools.cached_property
    def expected(self) -> list[Tensor]:
        """The rows of out that are checked and, with a backward, all rows of the three gradients; float64."""
        query, key, value = (t.detach() for t in self.inputs)
        outs, grads = [], [torch.zeros_like(t, dtype=torch.float64) for t in self.inputs]
        for checked in self.slices:
            seen = slice(0, checked.stop)
            part = (query[:, checked], key[:, seen], value[:, seen])
            outs.append(tilewise.reference.attention(*part, causal=True)[0])
            if self.is_backward:
                g = tilewise.reference.attention_backward(self.dout[:, checked], *part, causal=True)
                for total, rows, gradient in zip(grads, (checked, seen, seen), g[:3]):
                    total[:, rows] += gradient
        return [torch.cat(outs, 1), *(grads if self.is_backward else [])]

    def error(self, results: tuple[Tensor, ...]) -> float:
        out = torch.cat([results[0][:, checked] for checked in self.slices], 1)
        pairs = zip((out, *results[1:]), self.expected, strict=True)
        errors = [(x.double() - exact).abs().max() / exact.abs().max() for x, exact in pairs]
        return torch.stack(errors).max().item()


def _warm_up(scale: Scale, device: torch.device) -> None:
    """Thread pools, compilation and the profiler itself."""
    data = Data(scale, min(scale.lengths) // 2, True, device, 0)
    for method in METHODS.values():
        memory.peak_extra(lambda method=method: data.call(method, data.dout), device)  # type: ignore[misc]


def _first_call(data: Data, name: str, method: Method) -> Cell:
    """Memory and error; the time too if that is long."""
    needed = SCORE_MATRICES[data.is_backward] * data.score_bytes
    free = memory.free_bytes(data.device)
    if name == STANDARD and needed > SAFE_SHARE * free:
        reason = (
            f"its score matrices need about {needed / 2**30:.3g} GiB, more than {SAFE_SHARE:.0%} "
            f"of the {free / 2**30:.3g} GiB that are free"
        )
        return Cell(skipped=reason)
    cell = Cell()

    def call() -> tuple[Tensor, ...]:
        seconds, results = _clock(data, method, data.checked_dout)
        if seconds >= TIMED_ONCE:
            cell.seconds.append(seconds)
        return results

    results, cell.extra_bytes = memory.peak_extra(call, data.device)
    cell.error = data.error(results)
    return cell


def _time(data: Data, column: dict[str, Cell], scale: Scale) -> None:
    """Take turns, so that a drift of the clock hits all alike."""
    is_timed = {name: cell.skipped is not None or bool(cell.seconds) for name, cell in column.items()}
    counts = {name: _settle(data, METHODS[name]) for name in column if not is_timed[name]}
    for _ in range(scale.samples):
        for name, count in counts.items():
            cell = column[name]
            if count * sum(cell.seconds) < scale.seconds:
                cell.seconds.append(_clock(data, METHODS[name], data.dout, count)[0])


def _settle(data: Data, method: Method) -> int:
    """Call until plans, scratch and caches have settled; how many calls make a sample of `SAMPLE` seconds.

    Those that measured memory ran in a thread of their own, whose scratch this thread does not have.
    """
    times: list[float] = []
    while sum(times) < WARM_UP or (len(times) < WARM_UP_CALLS and sum(times) < 10 * WARM_UP):
        times.append(_clock(data, method, data.dout)[0])
    return max(1, math.ceil(SAMPLE / min(times)))


def _clock(data: Data, method: Method, dout: Tensor, count: int = 1) -> tuple[float, tuple[Tensor, ...]]:
    """The mean time of `count` calls in a row, and the results of the last."""
    _wait(data.device)
    start = time.perf_counter()
    for _ in range(count):
        results = data.call(method, dout)
    _wait(data.device)
    return (time.perf_counter() - start) / count, results


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
