"""Bar charts of a result file: one figure a head_dim, mask and direction, one bar a peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.lab.bench import results
from tilewise.lab.bench.cases import SHORT_DIRECTIONS, SHORT_DTYPES, Case
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.report import Record, peer_names, scale_and_unit, speed
from tilewise.lab.bench.results import Results, is_measured

COLOURS = {
    "tilewise": "#d1495b",
    "sdpa-cudnn": "#76b041",
    "sdpa-flash": "#3d6cb9",
    "sdpa-efficient": "#8e6bbf",
    "sdpa-math": "#9a8f7a",
    "flex": "#e0993a",
    "standard": "#b8bec6",
    "flash-attn-2": "#1f3f77",
    "flash-attn-3": "#12877f",
    "flash-attn-4": "#0b5563",
    "xformers": "#7a4419",
}
OTHER_COLOURS = ("#f08a9b", "#7d1f2d", "#f4b6c0", "#555555")


def plots(found: Results, folder: Path) -> list[Path]:
    """Draw every figure of a result file into `folder`; the files written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--plots {folder}: {error.strerror or error}") from error
    figures: dict[str, list[Record]] = {}
    for record in found["cases"]:
        figures.setdefault(_figure_name(results.case_of(record)), []).append(record)
    written = []
    for name, records in figures.items():
        path = folder / f"{name}.png"
        if records[0]["case"]["kind"] == "memory":
            _memory_lines(found, records, path)
        else:
            _bars(found, records, path)
        written.append(path)
    return written


def _figure_name(case: Case) -> str:
    dims = case.head_label.split("-")[0]
    if case.kind == "decode":
        what = "paged" if case.page_size is not None else "queries" if case.seqlen_q > 1 else "contiguous"
        return f"decode-{SHORT_DTYPES[case.dtype]}-{dims}-h{case.num_heads}kv{case.num_kv_heads}-{what}"
    kind = "" if case.kind == "dense" else f"{case.kind}-"
    direction = SHORT_DIRECTIONS[case.direction]
    heads = f"-h{case.num_heads}kv{case.num_kv_heads}" if case.num_heads != case.num_kv_heads else ""
    return f"{kind}{direction}-{SHORT_DTYPES[case.dtype]}-{dims}{heads}-{case.mask_label}"


def _title(found: Results, case: Case) -> str:
    dims = str(case.head_dim) if case.head_dim == case.head_dim_v else f"{case.head_dim}/{case.head_dim_v}"
    mask = {"causal": "causal", "full": "not causal"}.get(case.mask_label, case.mask_label)
    what = "Decoding" if case.kind == "decode" else f"Attention {case.direction}"
    heads = f", {case.num_heads}/{case.num_kv_heads} heads" if case.num_heads != case.num_kv_heads else ""
    tail = "" if case.kind == "decode" else f", {mask}"
    return f"{what}, {SHORT_DTYPES[case.dtype]}, head_dim {dims}{heads}{tail}\n{found['device']['name']}"


def tick(case: Case) -> str:
    def short(n: int) -> str:
        return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)

    if case.kind == "varlen":
        return f"{len(case.lengths)} documents,\n{short(sum(case.lengths))} tokens"
    if case.kind == "decode":
        page = "" if case.page_size is None else f"\npage {case.page_size}"
        return f"{case.batch} × {short(case.seqlen_k)}" + f"\nq {case.seqlen_q}" + page
    return short(case.seqlen_q)


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each peer, the same in every figure."""
    spare = iter(OTHER_COLOURS * 10)
    return {name: COLOURS.get(name) or next(spare) for name in names}


def _bars(found: Results, records: list[Record], path: Path) -> None:
    measured = [n for n in peer_names(found) if any(is_measured(r["peers"].get(n)) for r in records)]
    scale, unit = scale_and_unit(records)
    values = {
        name: [speed(r, e) / scale if is_measured(e := r["peers"].get(name)) else 0.0 for r in records]
        for name in measured
    }
    top = max((v for row in values.values() for v in row), default=1.0)
    bars = max(1, len(measured) * len(records))
    width, figure_width = 0.84 / max(1, len(measured)), min(24.0, max(7.0, 0.42 * bars + 2))
    size = min(8.0, max(4.5, 44 * figure_width * 0.8 / bars / 2.2))
    figure, axes = _figure(figure_width)
    for index, (name, colour) in enumerate(colours(measured).items()):
        offsets = [x + (index - (len(measured) - 1) / 2) * width for x in range(len(records))]
        axes.bar(offsets, values[name], width * 0.94, label=name, color=colour)
        for x, height in zip(offsets, values[name]):
            if height:
                label = f"{height:.{0 if height >= 10 else 1 if height >= 1 else 2}f}"
                axes.text(x, height + top * 0.008, label, ha="center", fontsize=size)
    axes.set_xticks(range(len(records)), [tick(results.case_of(r)) for r in records])
    is_plain = records[0]["case"]["kind"] == "dense"
    axes.set_xlabel("Sequence length" if is_plain else "batch × keys, queries" if unit == "GB/s" else "")
    axes.set_ylabel(f"Speed ({unit})")
    axes.set_ylim(0, top * 1.12)
    axes.set_title(_title(found, results.case_of(records[0])))
    _finish(figure, axes, path, max(1, len(measured)))


def _memory_lines(found: Results, records: list[Record], path: Path) -> None:
    figure, axes = _figure(7)
    names = peer_names(found)
    for name, colour in colours(names).items():
        points = [
            (r["case"]["seqlen_q"], max(results.median(e), 1024) / 2**20)
            for r in records
            if is_measured(e := r["peers"].get(name))
        ]
        if points:
            axes.plot(*zip(*points), marker="o", label=name, color=colour)
    lengths = [r["case"]["seqlen_q"] for r in records]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [tick(results.case_of(r)) for r in records])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1024 else f"{value / 1024:g}k")
    axes.set_xlabel("Sequence length")
    axes.set_ylabel("Peak extra memory (MiB)")
    axes.set_title(f"Peak memory beyond inputs and outputs\n{_title(found, results.case_of(records[0]))}")
    _finish(figure, axes, path, 5)


def _figure(width: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 5))
    return figure, figure.subplots()


def _finish(figure: Any, axes: Any, path: Path, columns: int) -> None:
    bare(axes)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="lower center", ncols=min(columns, 6), frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=130)


def bare(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
