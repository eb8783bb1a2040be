"""What the site shows by reference: source code, sections of the README, results, the learn page.

<!-- source: tilewise.tiled.backend.online_softmax_step -->   a function or method, as it is in the tree
<!-- readme: Limits -->                                       a section of README.md
<!-- results -->                                              every file of benchmarks/results/, as tables
<!-- public names -->                                         the reference of everything in tilewise.__all__
<!-- site: text -->                                           text that only the site shows

Links to the repository's files outside of `docs` are text on the site.

Source code also stands in the repository's pages, below its reference: `python docs/site_hooks.py`, or
`make readme`, renews it, and a test compares.
"""

from __future__ import annotations

import ast
import re
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
SITE = re.compile(r"<!-- site:\s(.*?)\s*-->", re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
SOURCE = re.compile(r'<!-- source: (\S+) -->(?:\n\n```python title="[^"]*"\n.*?\n```)?', re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Pages and figures that are made, not written."""
    from mkdocs.structure.files import File

    from tilewise.lab.learn import page

    files.append(File.generated(config, "learn-page.html", content=page.build()))
    with tempfile.TemporaryDirectory() as folder:
        for figure in draw(Path(folder)):
            files.append(File.generated(config, f"images/{figure.name}", content=figure.read_bytes()))
    return files


def draw(folder: Path) -> list[Path]:
    """Predicted against measured, and the roofline of an H200."""
    from tilewise.lab.learn import roofline
    from tilewise.lab.learn.cost_commands import costs
    from tilewise.lab.learn.io_model import BLOCKS, Shape
    from tilewise.lab.learn.machines import MACHINES

    compared, roof = folder / "predicted-against-measured.svg", folder / "roofline.svg"
    roofline.measured_over_predicted(roofline.load_points(_gpu_results()), compared)
    shape = Shape(4096, 4096, 128, num_heads=16, batch=4)
    roofline.under_the_roof(costs(shape, 96 * 1024, BLOCKS, splits=1), MACHINES["H200"], roof)
    return [compared, roof]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = SITE.sub(lambda found: found[1], with_sources(markdown))
    markdown = without_outer_links(markdown, (DOCS / page.file.src_path).parent)
    markdown = re.sub(r"<!-- readme: (.+?) -->", lambda found: readme_section(found[1]), markdown)
    for mark, make in (("<!-- results -->", tables), ("<!-- public names -->", public_names)):
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def without_outer_links(markdown: str, folder: Path) -> str:
    """Text in place of the links of a page in `folder` that lead out of `docs`."""

    def shown(found: re.Match[str]) -> str:
        target = (folder / found[2].split("#")[0]).resolve()
        return found[0] if target.is_relative_to(DOCS) else found[1]

    return LINK.sub(shown, markdown)


def with_sources(markdown: str) -> str:
    """The code that each reference names, below it; in place of what stands there."""
    return SOURCE.sub(lambda found: f"<!-- source: {found[1]} -->\n\n{source(found[1])}", markdown)


def source(name: str) -> str:
    """A fenced block with the source of `package.module.function` or `package.module.Class.method`.

    Raises:
        LookupError: there is no such thing: the build fails.
    """
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        path = ROOT / "src" / Path(*parts[:split]).with_suffix(".py")
        if path.is_file():
            text = path.read_text()
            node = _find(ast.parse(text), parts[split:], name)
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            code = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
            where = path.relative_to(ROOT).as_posix()
            return f'```python title="{where}"\n{_dedent(code)}\n```'
    raise LookupError(f"{name}: no such module below src")


def _find(tree: Any, names: list[str], full: str) -> Any:
    for name in names:
        nodes = [n for n in tree.body if getattr(n, "name", None) == name]
        if not nodes:
            raise LookupError(f"{full}: {name} is not there")
        tree = nodes[0]
    return tree


def _dedent(code: str) -> str:
    import textwrap

    return textwrap.dedent(code)


def readme_section(title: str) -> str:
    """The text under a heading of README.md, up to the next one; its links lead to the repository's files."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"README.md has no section {title!r}")
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", found[1]).strip()


def tables() -> str:
    """Every result file as tables, the newest first."""
    from tilewise.lab.bench import report, results

    def made(path: Path) -> str:
        name = path.relative_to(RESULTS).as_posix()
        return f"`{name}`\n\n" + report.tables(results.load(path))

    return "\n\n".join(made(path) for path in sorted(RESULTS.rglob("*.json"), reverse=True))


def public_names() -> str:
    """Functions and classes, then modules, for mkdocstrings."""
    import types

    import tilewise

    def path(name: str) -> str:
        """A function in a module of its own name is to be had as an attribute of that module."""
        is_module = (ROOT / "src" / "tilewise" / f"{name}.py").is_file()
        hides = is_module and not isinstance(getattr(tilewise, name), types.ModuleType)
        return f"tilewise.{name}.{name}" if hides else f"tilewise.{name}"

    modules = [n for n in tilewise.__all__ if isinstance(getattr(tilewise, n), types.ModuleType)]
    others = sorted(set(tilewise.__all__) - set(modules), key=lambda n: (n[0].isupper(), n))
    blocks = ["\n\n".join(f"::: {path(name)}" for name in names) for names in (others, modules)]
    return f"## Functions and classes\n\n{blocks[0]}\n\n## Modules\n\n{blocks[1]}"


def _gpu_results() -> list[Path]:
    from tilewise.lab.bench import results

    found = sorted(RESULTS.rglob("*.json"))
    return [path for path in found if results.load(path)["device"]["type"] == "cuda"]


if __name__ == "__main__":
    for page in sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(with_sources(page.read_text()))
