"""`tilewise io`, `tilewise roofline` and `tilewise kv-memory`: what attention moves, computes and keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.lab.bench.errors import BenchError
from tilewise.lab.learn import io_model, kv_memory, roofline
from tilewise.lab.learn.io_model import Cost, Shape
from tilewise.lab.learn.machines import MACHINES, Machine, find_machine, human_bytes
from tilewise.lab.learn.records import BlockSizes
from tilewise.lab.learn.show import counted, duration

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
LONGEST, MOST = 1 << 24, 1 << 20  # tokens, whose tiles are counted one by one; anything else
MANY = (512, 2048, 8192, 32768, 131072)

Seqlen = Annotated[
    int,
    typer.Option(min=1, max=LONGEST, help="Queries, and keys unless --seqlen-k says otherwise."),
]
SeqlenK = Annotated[int | None, typer.Option(min=1, max=LONGEST, help="Keys; default: as many as queries.")]
HeadDim = Annotated[int, typer.Option(min=1, max=MOST, help="Elements of a head.")]
Heads = Annotated[int, typer.Option(min=1, max=MOST, help="Query heads.")]
KvHeads = Annotated[int | None, typer.Option(min=1, max=MOST, help="KV heads; default: as many.")]
Batch = Annotated[int, typer.Option(min=1, max=MOST, help="Sequences.")]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(ITEMSIZES)}.")]
Causal = Annotated[bool, typer.Option("--causal", help="Mask the future.")]
Sram = Annotated[
    int,
    typer.Option(min=1, max=MOST, help="Fast memory M of FlashAttention-1, in KiB; an H100 has 227."),
]
BlockQ = Annotated[int, typer.Option(min=1, max=MOST, help="Queries in a tile of the other algorithms.")]
BlockK = Annotated[int, typer.Option(min=1, max=MOST, help="Keys in a tile of the other algorithms.")]
Splits = Annotated[int, typer.Option(min=1, max=MOST, help="Splits of the keys in decoding (split-KV).")]
DeviceName = Annotated[str, typer.Option(help=f"One of {', '.join(MACHINES)}, or cpu: measure this one.")]


def io(
    seqlen: Seqlen = 4096,
    seqlen_k: SeqlenK = None,
    head_dim: HeadDim = 128,
    heads: Heads = 1,
    kv_heads: KvHeads = None,
    batch: Batch = 1,
    dtype: Dtype = "bfloat16",
    causal: Causal = False,
    sram: Sram = 227,
    block_q: BlockQ = 128,
    block_k: BlockK = 128,
    splits: Splits = 1,
    detail: Annotated[bool, typer.Option("--detail", help="Every tensor's bytes.")] = False,
) -> None:
    """Count bytes and FLOPs of each algorithm.

    Reads, writes and products are counted in the loops; decoding is one new query for each sequence.
    """
    with _one_line_errors():
        keys, size = seqlen if seqlen_k is None else seqlen_k, _itemsize(dtype)
        shape = Shape(seqlen, keys, head_dim, None, heads, kv_heads, batch, size, causal)
        blocks = BlockSizes(block_q, block_k)
        found = costs(shape, sram * 1024, blocks, splits)
        passes = _passes(found, shape, sram * 1024, blocks)
    _print_table(
        f"{_describe(shape)}; M = {sram} KiB, tiles {block_q} x {block_k}",
        ["algorithm", "moved", "fast memory read", "FLOP", "exp, log, 1/x", "FLOP/byte", "extra", "theorem"],
        [_cost_row(cost, shape) for cost in found],
        "moved: bytes to and from slow memory; FLOP: of matrix products; extra: slow memory beyond inputs "
        "and outputs;\n  theorem: the paper's asymptotic form, and how many times that the loops move.\n"
        + passes,
    )
    if detail:
        for cost in found:
            both = [
                [name, human_bytes(cost.reads.get(name, 0)), human_bytes(cost.writes.get(name, 0))]
                for name in dict.fromkeys([*cost.reads, *cost.writes])
            ]
            _print_table(cost.algorithm, ["tensor", "read", "written"], both)


def roofline_command(
    seqlen: Seqlen = 4096,
    seqlen_k: SeqlenK = None,
    head_dim: HeadDim = 128,
    heads: Heads = 16,
    kv_heads: KvHeads = None,
    batch: Batch = 4,
    dtype: Dtype = "bfloat16",
    causal: Causal = False,
    sram: Sram = 227,
    block_q: BlockQ = 128,
    block_k: BlockK = 128,
    splits: Splits = 1,
    device: DeviceName = "H200",
    results: Annotated[
        list[Path] | None,
        typer.Option(help="Result files of bench: predicted against measured."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw into this file: the roofline, or the comparison.")
    ] = None,
) -> None:
    """Say what binds each algorithm, and its time.

    With --results, compare the bounds with measurements of `tilewise bench`.
    """
    with _one_line_errors():
        if results is not None:
            _compare(results, plot)
            return
        machine = find_machine(device)
        keys, size = seqlen if seqlen_k is None else seqlen_k, _itemsize(dtype)
        shape = Shape(seqlen, keys, head_dim, None, heads, kv_heads, batch, size, causal)
        found = costs(shape, sram * 1024, BlockSizes(block_q, block_k), splits)
        if plot is not None:
            roofline.under_the_roof(found, machine, plot)
    _print_machine(machine)
    _print_table(
        _describe(shape),
        [
            "algorithm",
            "FLOP/byte",
            "of the ridge",
            "bound by",
            "about" if machine.device.is_measured else "at least",
            "each resource alone",
        ],
        [_prediction_row(cost, machine) for cost in found],
        "FLOP/byte: products for each byte of main memory." + ("" if plot is None else f"\n  drew {plot}"),
    )


def kv_memory_command(
    model: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(kv_memory.MODELS)}; default: all.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, max=1 << 40, help="Tokens in the cache.")] = 4096,
    batch: Batch = 1,
    dtype: Dtype = "bfloat16",
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens of each sequence, as 37,9,62: the pages they take."),
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tokens a page, with --lengths; default: 16.")
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option(help="What a contiguous cache reserves, with --lengths; default: the longest."),
    ] = None,
) -> None:
    """Size of a KV cache by model and context.

    Beside it, the score matrices that standard attention would store. With --lengths, the pages that
    sequences take.
    """
    with _one_line_errors():
        if lengths is not None:
            _print_pages(lengths, page_size or 16, longest)
            return
        if (page_size, longest) != (None, None):
            raise ValueError("--page-size and --longest count pages of --lengths, which is missing")
        size = _itemsize(dtype)
        chosen = list(kv_memory.MODELS.values()) if model is None else [kv_memory.find_model(model)]
        rows = [_cache_row(known, context, batch, size) for known in chosen]
    beyond = [f"{m.name} {m.context}" for m in chosen if context > m.context]
    note = "with MHA: if every query head had keys and values of its own, and no layer a window."
    if beyond:
        note += f"\n  *: longer than the model's context: {', '.join(beyond)} tokens."
    header = ["model", "a token", "cache", "in GiB", "with MHA", "smaller"]
    sequences = counted(batch, "sequence")
    _print_table(f"KV cache of {sequences} of {counted(context, 'token')}, {dtype}", header, rows, note)
    matrix = [
        [
            str(n),
            f"{n * n}",
            human_bytes(b := kv_memory.score_matrix_bytes(n, 1, size)),
            f"{b / 2**20:.10g} MiB",
        ]
        for n in MANY
    ]
    header = ["N", "numbers", "bytes", "in MiB"]
    _print_table(f"N x N scores of one head, if they were stored, {dtype}", header, matrix)


def _cache_row(model: kv_memory.Model, context: int, batch: int, size: int) -> list[str]:
    count = model.cache_bytes(context, batch, size)
    every = model.with_every_head().cache_bytes(context, batch, size)
    return [
        model.name + (" *" if context > model.context else ""),
        human_bytes(model.bytes_per_token(size)),
        human_bytes(count),
        f"{count / 2**30:.4g} GiB",
        human_bytes(every),
        f"{every / count:.3g}x",
    ]


def costs(shape: Shape, sram_bytes: int, blocks: BlockSizes, splits: int) -> list[Cost]:
    """Every algorithm on one shape; decoding takes one query."""
    return [
        io_model.standard(shape, blocks),
        io_model.fa1(shape, sram_bytes),
        io_model.fa2(shape, blocks),
        io_model.backward_storing(shape, blocks),
        io_model.backward_recompute(shape, blocks),
        io_model.decode(replace(shape, seqlen_q=1), splits, blocks.block_k),
    ]


def _passes(found: Sequence[Cost], shape: Shape, sram_bytes: int, blocks: BlockSizes) -> str:
    """How often each order of loops reads what: why they move what they move."""
    standard, fa1, fa2 = found[:3]
    small = io_model.sram_blocks(shape, sram_bytes)
    keys, queries = -(-shape.seqlen_k // small.block_k), -(-shape.seqlen_q // blocks.block_q)
    skipping = ", but for tiles that the mask hides" if shape.causal else ""
    lines = [
        f"fa1 (keys outer) reads K and V once, reads Q and O and writes O {counted(keys, 'time')}: "
        f"once for each tile of {counted(small.block_k, 'key')}{skipping}.",
        f"fa2 (queries outer) reads Q and writes O once, reads K and V {counted(queries, 'time')}: "
        f"once for each tile of {counted(blocks.block_q, 'query', 'queries')}{skipping}. "
        f"Its tiles take {(fa2.sram_bytes or 0) / 1024:.4g} KiB of fast memory.",
    ]
    if fa1.slow_bytes > standard.slow_bytes:
        lines.append(
            "fa1 moves more than standard here: so small a fast memory gives it short key tiles. "
            "A larger --sram or a smaller --head-dim has longer ones."
        )
    return "\n".join(f"  {line}" for line in lines)


def _compare(files: Sequence[Path], plot: Path | None) -> None:
    points = roofline.load_points(files)
    _print_table("predicted against measured", roofline.COMPARED, roofline.compared(points))
    if plot is not None:
        roofline.measured_over_predicted(points, plot)
        typer.echo(f"drew {plot}")


def _print_pages(text: str, page_size: int, longest: int | None) -> None:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"lengths must be whole numbers with commas between, got {text!r}") from None
    paging = kv_memory.Paging(lengths, page_size, max(lengths) if longest is None else longest)
    rows = [
        [str(n), str(length), str(pages), str(pages * page_size - length)]
        for n, (length, pages) in enumerate(zip(lengths, paging.pages))
    ]
    _print_table(f"pages of {page_size} tokens", ["sequence", "tokens", "pages", "empty slots"], rows)
    in_pages, reserved = paging.paged - paging.used, paging.reserved - paging.used
    typer.echo(
        f"{paging.used} tokens lie in {paging.paged} slots, {in_pages} of them empty; "
        f"reserving {paging.longest} for each takes {paging.reserved}, {reserved} of them empty."
    )


def _itemsize(dtype: str) -> int:
    if dtype not in ITEMSIZES:
        raise ValueError(f"dtype must be one of {', '.join(ITEMSIZES)}, got {dtype!r}")
    return ITEMSIZES[dtype]


def _describe(shape: Shape) -> str:
    heads = counted(shape.num_heads, "query head")
    if shape.kv_heads != shape.num_heads:
        heads += f" and {counted(shape.kv_heads, 'KV head')}"
    mask = ", causal" if shape.causal else ""
    return (
        f"{counted(shape.batch, 'sequence')}, {shape.seqlen_q} x {counted(shape.seqlen_k, 'key')}, "
        f"{heads} of {shape.head_dim}, {counted(shape.itemsize, 'byte')} a number{mask}"
    )


def _cost_row(cost: Cost, shape: Shape) -> list[str]:
    formula, elements = cost.asymptotic
    return [
        cost.algorithm,
        human_bytes(cost.slow_bytes),
        human_bytes(cost.fast_read),
        f"{cost.matmul_flops:.3e}",
        f"{cost.special_ops:.3e}",
        f"{cost.intensity:.1f}",
        human_bytes(cost.extra_bytes),
        f"{formula}: {cost.slow_bytes / shape.itemsize / elements:.1f}x",
    ]


def _prediction_row(cost: Cost, machine: Machine) -> list[str]:
    prediction = roofline.predict(cost, machine)
    intensity = roofline.memory_intensity(cost, machine)
    side = "right" if roofline.is_compute_bound(intensity, machine.device) else "left"
    alone = ", ".join(f"{name} {duration(seconds)}" for name, seconds in prediction.times.items())
    return [cost.algorithm, f"{intensity:.1f}", side, prediction.bound, duration(prediction.seconds), alone]


def _print_machine(machine: Machine) -> None:
    device = machine.device
    rows = [
        [
            level.name,
            f"{human_bytes(level.bytes)} x {level.units}",
            "–" if level.bytes_per_second is None else f"{human_bytes(level.bytes_per_second)}/s",
            "–" if level.latency_cycles is None else f"{level.latency_cycles} cycles",
            level.source,
        ]
        for level in machine.levels
    ]
    _print_table(
        f"{machine.name}: {device.flops_per_second / 1e12:.4g} TFLOP/s / "
        f"{human_bytes(device.bytes_per_second)}/s = balance {device.balance:.1f} FLOP/byte; "
        f"{machine.special_per_second / 1e12:.3g} T special functions/s",
        ["level", "size", "bandwidth", "latency", "source"],
        rows,
    )


def _print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Aligned columns, text to the left and numbers to the right, each row on one line."""
    widths = [max(len(row[c]) for row in (header, *rows)) for c in range(len(header))]
    typer.secho(title, bold=True)
    for row in (header, *rows):
        cells = [
            f"{cell:<{w}}" if c == 0 or not _is_number(rows, c) else f"{cell:>{w}}"
            for c, (cell, w) in enumerate(zip(row, widths))
        ]
        typer.echo("  " + "  ".join(cells).rstrip())
    if note:
        typer.echo(f"  {note}")
    typer.echo("")


def _is_number(rows: Sequence[Sequence[str]], column: int) -> bool:
    return all(row[column][:1].isdigit() or row[column] == "–" for row in rows)


@contextmanager
def _one_line_errors() -> Iterator[Any]:
    try:
        yield
    except (ValueError, BenchError) as error:
        raise typer.BadParameter(str(error)) from None
