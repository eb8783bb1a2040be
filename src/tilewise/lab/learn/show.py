"""Traces as readable sections, for `str()` and for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from rich.text import Text

    from tilewise.lab.learn.records import BackwardStep, BackwardTrace, Final, Step, Trace

DIGITS = 4


class Line(NamedTuple):
    """A quantity, where it comes from, and its value; each line of a matrix is one query (or key)."""

    name: str
    formula: str
    value: Tensor | str


class Section(NamedTuple):
    title: str
    lines: Sequence[Line] = ()
    note: str = ""


def forward_sections(trace: Trace) -> list[Section]:
    """One section a step, one for the end of each query tile, one for the whole result."""
    sections = [_heading(trace)]
    ends = {final.i: _final_section(final, trace.normalize) for final in trace.finals}
    last_step = {step.tile.i: step for step in trace.steps}
    for number, step in enumerate(trace.steps, 1):
        sections.append(_step_section(number, step))
        if trace.order == "fa2" and step is last_step[step.tile.i]:
            sections.append(ends.pop(step.tile.i))
    sections += ends.values()
    matrices = [
        Line("S", "the score tiles together", trace.scores()),
        Line("P", "exp(S - lse)", trace.weights()),
        Line("O", "softmax(S) V", trace.out),
        Line("lse", "m + log(l)", trace.lse),
        Line("reads", "elements from slow memory", _count(trace.loads())),
        Line("writes", "elements to slow memory", _count(trace.stores())),
    ]
    return [*sections, Section("forward: result", matrices)]


def backward_sections(trace: BackwardTrace) -> list[Section]:
    """D, one section a step, and the gradients."""
    sections = [Section("backward: before the tiles", [Line("D", "rowsum(dO * O)", trace.delta)])]
    sections += [_backward_step_section(number, step) for number, step in enumerate(trace.steps, 1)]
    matrices = [Line(f"d{name}", "the tiles together", trace.assemble(f"d{name.lower()}")) for name in "PS"]
    gradients = [Line("dQ", "scale dS K", trace.dq), Line("dK", "scale dS^T Q", trace.dk)]
    return [*sections, Section("backward: result", [*matrices, *gradients, Line("dV", "P^T dO", trace.dv)])]


def as_text(sections: Iterable[Section], digits: int = DIGITS) -> str:
    """Plain text, aligned."""
    return "\n\n".join(
        "\n".join("".join(text for text, _ in line).rstrip() for line in _layout(section, digits))
        for section in sections
    )


def as_rich(sections: Iterable[Section], digits: int = DIGITS) -> Iterator[Text]:
    """The same text with styles, for a rich console; print it with soft_wrap=True."""
    from rich.text import Text

    for section in sections:
        for line in _layout(section, digits):
            yield Text.assemble(*line)
        yield Text()


def _layout(section: Section, digits: int) -> Iterator[list[tuple[str, str]]]:
    """Lines of (text, style) pieces."""
    yield [(section.title, "bold")]
    if section.note:
        yield [(section.note, "")]
    name_width = max((len(line.name) for line in section.lines), default=0)
    formula_width = max((len(line.formula) for line in section.lines), default=0)
    for line in section.lines:
        name, formula = line.name, line.formula
        for row in _rows(line.value, digits):
            yield [(f"  {name:<{name_width}}  ", "cyan"), (f"{formula:<{formula_width}}  ", "dim"), (row, "")]
            name = formula = ""


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and what is counted.

    Example:
        >>> counted(1, "head"), counted(8, "head"), counted(2, "query", "queries")
        ('1 head', '8 heads', '2 queries')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _heading(trace: Trace) -> Section:
    outer = "keys outer, queries inner" if trace.order == "fa1" else "queries outer, keys inner"
    kept = "after each step" if trace.normalize == "each_step" else "once, at the end"
    skipped = ", ".join(f"({tile.i}, {tile.j})" for tile in trace.skipped)
    lines = [
        Line("order", trace.order, outer),
        Line("normalize", trace.normalize, kept),
        Line(
            "tiles",
            f"{trace.blocks.block_q} x {trace.blocks.block_k}",
            f"of {trace.shape[0]} x {trace.shape[1]}",
        ),
        Line("scale", "", f"{trace.scale:g}"),
        Line("causal", "", "yes" if trace.causal else "no"),
    ]
    if skipped:
        lines.append(Line("skipped", "no query sees a key", skipped))
    return Section("forward", lines)


def _step_section(number: int, step: Step) -> Section:
    if step.normalize == "end":
        outputs = [Line("acc (kept)", "c acc_old + p v", step.acc), Line("out so far", "acc / l", step.out)]
    else:
        kept = Line("out (kept)", "(c l_old out_old + p v) / l", step.out)
        outputs = [kept, Line("acc so far", "l out", step.acc)]
    lines = [
        Line("s", "scale q k^T", step.s),
        Line("m_tile", "rowmax(s)", step.m_tile[:, None]),
        Line("m", "max(m_old, m_tile)", step.m[:, None]),
        Line("c", "exp(m_old - m)", step.correction[:, None]),
        Line("p", "exp(s - m)", step.p),
        Line("l", "c l_old + rowsum(p)", step.l[:, None]),
        *outputs,
        Line("reads", "elements", _count(step.loads)),
    ]
    if step.stores:
        lines.append(Line("writes", "elements", _count(step.stores)))
    return Section(f"forward step {number}: {_place(step)}", lines)


def _final_section(final: Final, normalize: str) -> Section:
    how = "acc / l" if normalize == "end" else "already divided"
    lines = [
        Line("l", "", final.l[:, None]),
        *([Line("acc", "", final.kept)] if normalize == "end" else []),
        Line("out", how, final.out),
        Line("lse", "m + log(l)", final.lse[:, None]),
    ]
    return Section(f"final division, query tile {final.i}: queries {_span(final.rows)}", lines)


def _backward_step_section(number: int, step: BackwardStep) -> Section:
    lines = [
        Line("s", "scale q k^T, again", step.s),
        Line("p", "exp(s - lse)", step.p),
        Line("dp", "do v^T", step.dp),
        Line("ds", "p (dp - D)", step.ds),
        Line("dq so far", "dq_old + scale ds k", step.dq),
        Line("dk so far", "dk_old + scale ds^T q", step.dk),
        Line("dv so far", "dv_old + p^T do", step.dv),
    ]
    return Section(f"backward step {number}: {_place(step)}", lines)


def _place(step: Step | BackwardStep) -> str:
    tile = step.tile
    return f"tile ({tile.i}, {tile.j}), queries {_span(tile.rows)}, keys {_span(tile.cols)}"


def _span(span: range) -> str:
    return f"{span.start}" if len(span) == 1 else f"{span.start}-{span.stop - 1}"


def _count(traffic: Mapping[str, int]) -> str:
    parts = ", ".join(f"{name} {count}" for name, count in traffic.items())
    return f"{parts} (sum {sum(traffic.values())})" if len(traffic) > 1 else parts or "none"


def _rows(value: Tensor | str, digits: int) -> list[str]:
    """The lines of a value: a matrix by rows with its columns aligned, a vector in one line."""
    if isinstance(value, str):
        return [value]
    rows = [[_number(x, digits) for x in row] for row in (value[None] if value.ndim == 1 else value).tolist()]
    width = max((len(cell) for row in rows for cell in row), default=0)
    return ["  ".join(f"{cell:>{width}}" for cell in row) for row in rows] or [""]


def _number(x: float, digits: int) -> str:
    """Fixed digits; whole numbers bare; e-notation for what would round to 0 or be very long."""
    if abs(x) < 1e6 and x == round(x):
        return str(int(x))
    if abs(x) < 0.5 * 10.0**-digits or 1e6 <= abs(x) < float("inf"):
        return f"{x:.{max(0, digits - 1)}e}"
    return f"{x:.{digits}f}"
