"""`tilewise learn`: one HTML file that explains attention with numbers of the code that runs.

The page's parts lie in `page/` as HTML, CSS and JavaScript modules; everything they show comes from `trace`,
`io_model`, `machines`, `kv_memory`, `pipeline`, `eight_bits` and `claims`, or is computed in the page by
their steps.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import resources
from typing import Any

from torch import Tensor

from tilewise import __version__
from tilewise.core.fp8 import hadamard
from tilewise.gpu.hopper.common.arguments import WARPGROUP_ROWS
from tilewise.lab.claims import report
from tilewise.lab.learn import eight_bits, io_model, kv_memory, trace as tracing
from tilewise.lab.learn.examples import EXAMPLES, Example, random_example
from tilewise.lab.learn.io_model import Cost, Shape
from tilewise.lab.learn.machines import MACHINES, Machine
from tilewise.lab.learn.pipeline import Pipeline, Span, Timeline

# A module comes after those that it imports.
SCRIPTS = (
    "arithmetic",
    "fp8",
    "elements",
    "walk_inputs",
    "tiles",
    "online",
    "memory",
    "backward",
    "pipeline",
    "cache",
    "eight",
    "main",
)
LENGTHS = tuple(2**n for n in range(7, 18))
CONTEXTS = tuple(2**n for n in range(8, 21))
HEAD_DIMS = (64, 128)
OUTLIERS = tuple(range(1, 33))
RANDOM = random_example(6, 6, 3, seed=2)
RANDOM_COMMAND = "tilewise trace --seqlen 6 --head-dim 3 --seed 2"


def build() -> str:
    """The page's HTML. It needs nothing else: no network, no other file.

    Example:
        >>> build().startswith("<!doctype html>")
        True
    """
    parts = {
        "STYLE": _part("style.css"),
        "DATA": json.dumps(page_data(), separators=(",", ":")).replace("<", "\\u003c"),
        "SCRIPT": script(),
        "CLAIMS": _claims(),
    }
    page = _part("page.html")
    for name, text in parts.items():
        page = page.replace(f"/*{name}*/", text, 1)
    return page


def _claims() -> str:
    """Tables of `tilewise claims`, from the results that come with the package."""

    def row(cells: Sequence[str], tag: str) -> str:
        texts = (html.escape(cell.replace("**", "").replace("`", "")) for cell in cells)
        return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

    tables = []
    for title, rows in report.sections(report.committed()):
        body = "".join(row(cells, "td") for cells in rows)
        head, label = row(report.HEADER, "th"), html.escape(title)
        tables.append(
            f'<h3>{label}</h3>\n<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
            f'<table class="facts claims"><thead>{head}</thead><tbody>{body}</tbody></table></div>'
        )
    return "\n".join(tables)


def script() -> str:
    """The JavaScript modules in one: each in a scope of its own, which returns what the module exports."""
    return "\n".join(_scoped(name, _part(f"{name}.js")) for name in SCRIPTS)


def _scoped(name: str, source: str) -> str:
    exports = re.findall(r"^export (?:const|function) (\w+)", source, flags=re.MULTILINE)
    body = re.sub(
        r'^import (\{.*\}) from "\./(\w+)\.js";$', r"const \1 = \2_module;", source, flags=re.MULTILINE
    )
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    return f"const {name}_module = (() => {{\n{body}return {{ {', '.join(exports)} }};\n}})();\n"


def page_data() -> dict[str, Any]:
    """Everything that the page does not compute itself."""
    examples = [EXAMPLES["tiling-4x4"], RANDOM, *(e for e in EXAMPLES.values() if e.name != "tiling-4x4")]
    return {
        "examples": [_example(example) for example in examples],
        "io": {
            "lengths": LENGTHS,
            "costs": {str(d): {str(n): _costs(n, d) for n in LENGTHS} for d in HEAD_DIMS},
        },
        "machines": [_machine(machine) for machine in MACHINES.values()],
        "pipeline": _pipeline(),
        "kv": {"contexts": CONTEXTS, "models": [_model(model) for model in kv_memory.MODELS.values()]},
        "fp8": _fp8(),
        "made": f"Made by tilewise learn from tilewise {__version__}. It loads nothing and sends nothing.",
    }


def _part(name: str) -> str:
    return (resources.files("tilewise.lab.learn") / "page" / name).read_text(encoding="utf-8")


def _example(example: Example) -> dict[str, Any]:
    """Inputs of one example, and Python's result for each order and mask."""
    query, key, value, dout = example.tensors()
    gradient = value.new_ones(len(query), value.shape[1]) if dout is None else dout
    blocks = (example.block_q, example.block_k)
    traces, gradients = {}, {}
    for order, causal in itertools.product(tracing.ORDERS, (False, True)):
        found = tracing.forward(query, key, value, *blocks, order=order, scale=example.scale, causal=causal)
        traces[f"{order} {str(causal).lower()}"] = {"out": found.out.tolist(), "lse": _finite(found.lse)}
    for causal in (False, True):
        back = tracing.backward(query, key, value, gradient, *blocks, scale=example.scale, causal=causal)
        names = {"dq": back.dq, "dk": back.dk, "dv": back.dv}
        gradients[str(causal).lower()] = {name: t.tolist() for name, t in names.items()}
    fields = ("name", "query", "key", "value", "dout", "block_q", "block_k", "scale")
    return {name: getattr(example, name) for name in fields} | {
        "command": RANDOM_COMMAND if example is RANDOM else f"tilewise trace --example {example.name}",
        "traces": traces,
        "gradients": gradients,
    }


def _finite(x: Tensor) -> list[float | None]:
    """JSON has no infinity: -inf is null."""
    return [None if math.isinf(number) else number for number in x.tolist()]


def _costs(seqlen: int, head_dim: int) -> dict[str, Any]:
    shape = Shape(seqlen, seqlen, head_dim)
    costs = (
        io_model.standard(shape),
        io_model.fa2(shape),
        io_model.backward_storing(shape),
        io_model.backward_recompute(shape),
    )
    fa1 = {name: _cost(io_model.fa1(shape, m.fast_level.bytes)) for name, m in MACHINES.items()}
    return {cost.algorithm: _cost(cost) for cost in costs} | {"fa1": fa1}


def _cost(cost: Cost) -> dict[str, Any]:
    names = dict.fromkeys([*cost.reads, *cost.writes])
    return {
        "moved": {name: cost.reads.get(name, 0) + cost.writes.get(name, 0) for name in names},
        "read": sum(cost.reads.values()),
        "written": sum(cost.writes.values()),
        "slow_bytes": cost.slow_bytes,
        "extra_bytes": cost.extra_bytes,
        "matmul_flops": cost.matmul_flops,
        "intensity": cost.intensity,
    }


def _machine(machine: Machine) -> dict[str, Any]:
    return {
        "name": machine.name,
        "bytes_per_second": machine.device.bytes_per_second,
        "clock_hz": machine.clock_hz,
        "fast_kib": machine.fast_level.bytes // 1024,
        "levels": [asdict(level) for level in machine.levels],
    }


def _model(model: kv_memory.Model) -> dict[str, Any]:
    sizes = {"numbers_per_token": model.numbers_per_token, "bytes_per_token": model.bytes_per_token()}
    return asdict(model) | sizes


def _fp8() -> dict[str, Any]:
    """Inputs without outliers, the rotation's signs, and Python's errors for each size of the outliers."""
    errors = {n: eight_bits.walk(*eight_bits.example(n)).rms_errors() for n in OUTLIERS}
    return {
        **{name: t.tolist() for name, t in zip(("query", "key", "value"), eight_bits.example(outlier=1))},
        "signs": hadamard(eight_bits.HEAD_DIM)[:, 0].int().tolist(),
        "outliers": OUTLIERS,
        "errors": errors,
    }


def _pipeline() -> dict[str, Any]:
    """Schedules around the kernel's own configuration of each head_dim."""
    kernels = {head_dim: Pipeline.of_kernel(head_dim) for head_dim in HEAD_DIMS}
    warpgroups = sorted({1, 2, 3, *(kernel.warpgroups for kernel in kernels.values())})
    depths = sorted({1, 2, 3, *(kernel.stages for kernel in kernels.values())})
    timelines = [
        replace(kernel, warpgroups=groups, stages=stages, overlap=overlap, ping_pong=ping_pong).run()
        for kernel in kernels.values()
        for groups, stages, overlap, ping_pong in itertools.product(
            warpgroups, depths, (True, False), (False, True)
        )
    ]
    spans = [span for timeline in timelines for span in timeline.spans]
    lanes = list(dict.fromkeys(span.lane for span in spans))
    kinds = list(dict.fromkeys(span.kind for span in spans))

    def numbers(span: Span) -> tuple[float, ...]:
        places = lanes.index(span.lane), kinds.index(span.kind), span.tile
        return *places, round(span.start, 1), round(span.end, 1)

    return {
        "kernel": {head_dim: _summary(kernel.run()) for head_dim, kernel in kernels.items()},
        "rows": WARPGROUP_ROWS,
        "lanes": lanes,
        "kinds": kinds,
        "schedules": [_summary(t) | {"spans": [numbers(span) for span in t.spans]} for t in timelines],
    }


def _summary(timeline: Timeline) -> dict[str, Any]:
    names = ("head_dim", "block_n", "warpgroups", "stages", "overlap", "ping_pong", "key_tiles")
    settings = {name: getattr(timeline.pipeline, name) for name in names}
    return settings | {"cycles": timeline.cycles, "tensor_core_use": timeline.tensor_core_use}
