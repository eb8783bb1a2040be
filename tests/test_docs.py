"""The site: its Python runs, its commands exist, its references hold, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tilewise
from tilewise.cli import _app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTER = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
PROSE = [*(ROOT / name for name in OUTER), *PAGES]
QUICK = {"trace", "fp8", "io", "roofline", "kv-memory", "learn", "mask"}


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load("site_hooks")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def with_python() -> list[Path]:
    return [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", with_python(), ids=lambda page: page.stem)
def test_python(page):
    """The blocks of a page run one after another, as a reader would type them."""
    for package in ("transformers", "diffusers"):
        if package in page.read_text() and importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    scope: dict[str, object] = {}
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), scope)


def commands() -> list[str]:
    """Every `tilewise ...` of the pages, in blocks and in running text."""
    text = [page.read_text() for page in PAGES]
    lines = [line for page in PAGES for code in blocks(page, "sh") for line in code.splitlines()]
    inline = re.findall(r"`(tilewise [a-z][^`]*)`", "\n".join(text))
    found = [line.split("#")[0].strip() for line in [*lines, *inline] if line.startswith("tilewise ")]
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_command(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    if words[0] not in QUICK or "FILE" in words:  # those that measure for minutes: their options exist
        help_text = CliRunner().invoke(_app(), [words[0], "--help"]).output
        assert all(word in help_text for word in words if word.startswith("--")), help_text
        return
    result = CliRunner().invoke(_app(), words)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_on_pages_is_the_trees(page):
    assert page.read_text() == hooks.with_sources(page.read_text()), "run make readme"


@pytest.mark.parametrize("backend", ["cpu", "triton", "hopper"])
def test_notes_on_a_backends_kernels_are_short(backend):
    pages = list(DOCS.glob(f"kernels-{backend}*.md"))
    assert pages and sum(len(page.read_text().split()) for page in pages) <= 2000


def sentences(markdown: str) -> list[str]:
    """Those of running text, lists and table cells; code counts as one word, headings are left out."""
    text = re.sub(r"<!--.*?-->|^```.*?^```|^#.*?$", "\n\n", markdown, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "Code", text))
    text = re.sub(r"^\s*(?:[-*]|\d+\.)\s|\s*\|\s*", "\n\n", text, flags=re.MULTILINE)
    ends = r"(?<=[.!?])[)*\"]*\s+(?=[*(\"]*[A-Z0-9])"
    found = [part for block in re.split(r"\n\s*\n", text) for part in re.split(ends, " ".join(block.split()))]
    return [part for part in found if re.search(r"[.!?:][)*\"]*$", part)]


def words(sentence: str) -> int:
    return len(re.findall(r"[^\W_][\w'’.,×/-]*", sentence))


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.stem)
def test_sentences_are_short(page):
    lengths = {sentence: words(sentence) for sentence in sentences(page.read_text())}
    assert sum(lengths.values()) < 20 * len(lengths)
    assert not [sentence for sentence, count in lengths.items() if count > 28]


def test_sentences_are_found():
    text = "# A title.\n\nOne\ntwo `a b` (3.5 µs). **Four** five: six!\n- Seven; [e.](x)f\n\n| a | Nine. |"
    assert sentences(text) == ["One two Code (3.5 µs).", "**Four** five: six!", "Nine."]
    assert [words(sentence) for sentence in sentences(text)] == [5, 3, 1]


def test_references_hold():
    for page in PAGES:
        for name in re.findall(r"<!-- source: (\S+) -->", page.read_text()):
            assert hooks.source(name).startswith('```python title="src/tilewise/')
        for title in re.findall(r"<!-- readme: (.+?) -->", page.read_text()):
            assert hooks.readme_section(title)


def test_source_is_the_trees():
    import inspect

    from tilewise.tiled import backend as tiled

    assert inspect.getsource(tiled.online_softmax_step).strip() in hooks.source(
        "tilewise.tiled.backend.online_softmax_step"
    )
    method = hooks.source("tilewise.cpu.kernels.forward.ForwardKernel.attend_block")
    assert "\ndef attend_block(" in method and "@gluon.jit\ndef mma_role(" in hooks.source(
        "tilewise.gpu.hopper.forward.kernel.mma_role"
    )


@pytest.mark.parametrize(
    "name", ["tilewise.tiled.backend.no_such_step", "tilewise.no_such_module.f", "tilewise"]
)
def test_a_reference_to_nothing_fails(name):
    with pytest.raises(LookupError):
        hooks.source(name)
    with pytest.raises(LookupError):
        hooks.readme_section(name)


def test_pages_read_well_in_the_repository():
    """Nothing shows that only the site understands, and what is linked exists."""
    for page in PAGES:
        text = re.sub(
            r"<!--.*?-->|^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
        )
        assert "\n:::" not in text, page
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (page.parent / target).exists(), (page, target)


def test_what_only_the_site_shows():
    found = hooks.SITE.sub(lambda found: found[1], "a\n<!-- site:\n::: x\n    y\n-->\n<!-- site: ![b](c) -->")
    assert found == "a\n::: x\n    y\n![b](c)"
    links = "[a](../README.md#limits) [b](index.md) [c](https://d) [e](#f)"
    assert hooks.without_outer_links(links, DOCS) == "a [b](index.md) [c](https://d) [e](#f)"


def test_tables_hold_every_result():
    text = hooks.tables()
    for path in hooks.RESULTS.rglob("*.json"):
        assert f"`{path.relative_to(hooks.RESULTS).as_posix()}`" in text


@pytest.mark.slow
def test_builds_without_a_warning(tmp_path):
    for package in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed: pip install '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    api = (site / "api" / "index.html").read_text()
    for name in tilewise.__all__:
        assert f'id="tilewise.{name}"' in api or f'id="tilewise.{name}.{name}"' in api
    assert "online_softmax_step" in (site / "how-it-works" / "index.html").read_text()
    assert (site / "learn-page.html").read_text().startswith("<!doctype html>")
    for page in site.rglob("*.html"):  # nothing is loaded from elsewhere
        loaded = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
        assert loaded == [], page
