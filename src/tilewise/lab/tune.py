"""`tilewise tune`: time tiles of the Triton kernels on this GPU, print the fastest as rows of the table."""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Annotated

import torch
import typer

from tilewise.core.problem import AttentionProblem, Inputs, Options, describe
from tilewise.gpu.triton.tuning_table import KernelTile

KERNELS = ("forward", "dkdv", "dq")
APART = ("dk", "dv")  # when asked for: a launch for each gradient, where "dkdv" has to take small tiles
NAMES = (*KERNELS, *APART, "dbias")  # the last with --scores bias
SCORES = ("plain", "formula", "mask", "bias", "dropout")  # each has its rows in the table
MAX_REGISTERS = 232  # a thread's, for accumulators and scores; beyond, tiles spill
ROUNDS = 5

Measure = Callable[[str, KernelTile], float]


@dataclass(frozen=True)
class Row:
    """The fastest tile of a kernel, and what the table has now."""

    kernel: str
    head_dim: int
    is_causal: bool
    best: KernelTile
    seconds: float
    current: KernelTile | None
    current_seconds: float | None

    def __str__(self) -> str:
        name = f"{self.kernel}_causal" if self.is_causal else self.kernel
        now = "nothing" if self.current_seconds is None else f"{self.current_seconds * 1e3:.3f} ms"
        times = f"{self.seconds * 1e3:.3f} ms; now {now}"
        return f'"{name}": {{{self.head_dim}: {self.best}}},  # {times}'


def candidates(
    kernel: str, head_dim: int, element_size: int, shared_bytes: int, has_tma: bool = False
) -> Iterator[KernelTile]:
    """Tiles that can be expected to fit a block's shared memory and a thread's registers.

    Example:
        >>> tiles = list(candidates("dq", 128, 2, 227 << 10))
        >>> KernelTile(128, 64, 8, 3) in tiles, KernelTile(128, 128, 4, 3) in tiles
        (True, False)
    """
    sizes = (16, 32, 64, 128) if head_dim > 128 else (32, 64, 128)
    for m, n, warps, stages in itertools.product(sizes, sizes, (4, 8), (1, 2, 3, 4)):
        kept, loaded = (n, m) if kernel in ("dkdv", *APART) else (m, n)
        kept_tensors = 1 if kernel == "forward" else 2
        accumulators = kept * head_dim * (2 if kernel == "dkdv" else 1)
        if kernel == "dbias":  # nothing is kept but the gradient itself
            kept, loaded, accumulators = 0, m + n, m * n
        scores = m * n * (1 if kernel in ("forward", "dv") else 2)
        shared = (kept_tensors * kept + 2 * stages * loaded) * head_dim * element_size
        registers = (accumulators + scores) // (32 * warps)
        if shared <= shared_bytes and 64 <= registers <= MAX_REGISTERS:
            yield KernelTile(m, n, warps, stages, has_tma)


def fastest(
    tiles: Iterator[KernelTile], current: KernelTile | None, measure: Callable[[KernelTile], float]
) -> tuple[KernelTile, float, float | None]:
    """(tile, its seconds, seconds of `current`); tiles that do not compile or fit are passed over."""
    tried = dict.fromkeys(tiles if current is None else (current, *tiles))
    times = {tile: measure(tile) for tile in tried}
    best = min(times, key=times.__getitem__)
    return best, times[best], None if current is None else times[current]


def measured(problem: AttentionProblem, inputs: Inputs) -> Measure:
    """A stopwatch for one kernel with one tile: seconds by CUDA events, infinite if it cannot run."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    from tilewise.gpu.triton import launch
    from tilewise.gpu.triton.bias.launch import shared_dbias, unshared_dbias

    out, lse = launch.forward(problem, inputs)
    grads = (torch.empty_like(out) for _ in range(3))
    statistics_of_rows = launch.new_statistics(problem, lse)
    results = launch.Results(out, lse, None, torch.randn_like(out), None, *statistics_of_rows, *grads)
    results = results._replace(dbias=unshared_dbias(problem, inputs))
    launch.run(launch._prepare_launch, problem, (*inputs, *results))
    without = {"dk": results._replace(dv=None), "dv": results._replace(dk=None)}

    def once(kernel: str, tile: KernelTile) -> None:
        if kernel == "forward":
            launch.forward(problem, inputs, tile)
        elif kernel == "dbias":
            shared_dbias(problem, inputs, results, tile)
        else:
            build = launch._dq_launch if kernel == "dq" else launch._dkdv_launch
            launch.run(build, problem, (*inputs, *without.get(kernel, results)), tile)

    def seconds(kernel: str, tile: KernelTile) -> float:
        times = []
        try:
            once(kernel, tile)
        except (OutOfResources, PTXASError, CompilationError):
            return float("inf")
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            once(kernel, tile)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        return statistics.median(times)

    return seconds


def tune(
    head_dim: Annotated[
        list[int] | None, typer.Option(help="May be repeated; default: 64, 128, 256.")
    ] = None,
    kernel: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(NAMES)}.")] = None,
    scores: Annotated[str, typer.Option(help=f"What changes scores: of {', '.join(SCORES)}.")] = "plain",
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="Default: both.")] = None,
    seqlen: Annotated[int, typer.Option(help="Queries and keys of each of 4 sequences.", min=16)] = 4096,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    tma: Annotated[bool, typer.Option("--tma", help="Tiles that the GPU's copy engine loads.")] = False,
) -> None:
    """Time tiles of the Triton kernels on a GPU.

    Prints the fastest as rows of tuning_table.py.
    """
    if unknown := set(kernel or ()) - set(NAMES):
        raise typer.BadParameter(f"--kernel {unknown.pop()} must be one of {', '.join(NAMES)}")
    if scores not in SCORES:
        raise typer.BadParameter(f"--scores {scores} must be one of {', '.join(SCORES)}")
    if "dbias" in (kernel or ()) and scores != "bias":
        raise typer.BadParameter(f"--kernel dbias needs --scores bias, not {scores}")
    if dtype not in ("bfloat16", "float16"):
        raise typer.BadParameter(f"--dtype {dtype} must be bfloat16 or float16")
    if not torch.cuda.is_available():
        typer.echo("tilewise tune: needs a GPU", err=True)
        raise typer.Exit(2)
    import triton

    properties = torch.cuda.get_device_properties(0)
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    command = " ".join(["tilewise", *sys.argv[1:]])
    typer.echo(f"# {properties.name}, {date.today()}, {versions}, `{command}`")
    masks = (False, True) if causal is None else (causal,)
    for d, is_causal in itertools.product(head_dim or (64, 128, 256), masks):
        for row in rows(d, is_causal, kernel or KERNELS, seqlen, getattr(torch, dtype), tma, scores):
            typer.echo(str(row))


def rows(
    d: int,
    is_causal: bool,
    kernels: list[str] | tuple[str, ...],
    seqlen: int,
    dtype: torch.dtype,
    has_tma: bool = False,
    scores: str = "plain",
) -> Iterator[Row]:
    """The fastest tile of each kernel for 4 sequences of 2048 / d heads."""
    from tilewise.gpu.triton.call import padded_dim, table_tile

    problem, inputs = drawn(d, is_causal, seqlen, dtype, scores)
    properties = torch.cuda.get_device_properties(0)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 99 << 10)
    seconds = measured(problem, inputs)
    padded = padded_dim(d)
    for kernel in kernels:
        current = table_tile(kernel, problem, inputs.query.device)
        tiles = candidates(kernel, padded, dtype.itemsize, shared_bytes, has_tma)
        best, time, current_time = fastest(tiles, current, functools.partial(seconds, kernel))
        yield Row(kernel, padded, is_causal, best, time, current, current_time)


def drawn(
    d: int, is_causal: bool, seqlen: int, dtype: torch.dtype, scores: str, device: str = "cuda"
) -> tuple[AttentionProblem, Inputs]:
    """A random problem whose scores are of a kind: a mask of all heads, a bias that sequences share."""
    heads = max(1, 2048 // d)
    inputs = Inputs(*(torch.randn(4, seqlen, heads, d, device=device).to(dtype) for _ in range(3)))
    options = Options(causal=is_causal)
    if scores == "formula":
        options = options._replace(softcap=30.0)
    elif scores == "mask":
        inputs = inputs._replace(mask=torch.rand(1, 1, seqlen, seqlen, device=device) > 0.1)
    elif scores == "bias":
        bias = torch.randn(1, heads, seqlen, seqlen, device=device).to(dtype)
        inputs = inputs._replace(bias=bias.requires_grad_())
    elif scores == "dropout":
        inputs = inputs._replace(dropout_seed=torch.tensor(0, device=device))
        options = options._replace(dropout_p=0.1)
    problem = describe(inputs, options)
    return problem, inputs._replace(bias=None if inputs.bias is None else inputs.bias.detach())
