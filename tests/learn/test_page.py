"""The page as a file: complete, with Python's numbers. `test_page_browser.py` uses it."""

from __future__ import annotations

import json
import re
from html import escape
from importlib import resources

import pytest
from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.lab.claims import report
from tilewise.lab.learn import io_model, kv_memory, page
from tilewise.lab.learn.io_model import Shape
from tilewise.lab.learn.machines import MACHINES


@pytest.fixture(scope="module")
def html():
    return page.build()


@pytest.fixture(scope="module")
def data(html):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', html, re.S)[1])


def test_needs_nothing_else(html):
    assert not re.search(r"(src|href)=[\"'](?!#|data:,)", html)
    assert "url(" not in html and "@import" not in html
    assert not re.search(r"^\s*(import|export) ", html, re.M)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|sendBeacon)\b", html)
    assert "/*STYLE*/" not in html and "/*DATA*/" not in html and "/*SCRIPT*/" not in html


def test_every_module_is_in_the_page_after_those_it_imports():
    folder = resources.files("tilewise.lab.learn") / "page"
    present = {item.name.removesuffix(".js") for item in folder.iterdir() if item.name.endswith(".js")}
    assert present == set(page.SCRIPTS)
    for n, name in enumerate(page.SCRIPTS):
        source = (folder / f"{name}.js").read_text()
        imported = re.findall(r'from "\./(\w+)\.js"', source)
        assert set(imported) <= set(page.SCRIPTS[:n]), name
        assert len(source.splitlines()) < 250, name


def test_eight_sections(html):
    sections = re.findall(r'<section id="(\w+)" aria-labelledby="([\w-]+)"', html)
    names = ["tiles", "online", "memory", "backward", "pipeline", "cache", "eight", "claims"]
    assert [name for name, _ in sections] == names
    for _, label in sections:
        assert f'id="{label}"' in html


def test_claims_are_those_that_are_kept(html):
    """Every row of every section, and what is counted once."""
    part = html.split('<section id="claims"')[1].split("</section>")[0]
    for title, rows in report.sections(report.committed()):
        assert f"<h3>{title}</h3>" in part
        assert all(escape(cell.replace("**", "").replace("`", "")) in part for row in rows for cell in row)
    assert part.count("<tr>") == sum(1 + len(rows) for _, rows in report.sections(report.committed()))


def test_costs_are_the_models(data):
    for head_dim in page.HEAD_DIMS:
        for n in page.LENGTHS:
            found = data["io"]["costs"][str(head_dim)][str(n)]
            shape = Shape(n, n, head_dim)
            assert found["standard"]["slow_bytes"] == io_model.standard(shape).slow_bytes
            assert found["fa2"]["extra_bytes"] == io_model.fa2(shape).extra_bytes
            again = io_model.backward_recompute(shape)
            assert found["backward_recompute"]["matmul_flops"] == again.matmul_flops
            for name, machine in MACHINES.items():
                assert found["fa1"][name]["read"] == sum(
                    io_model.fa1(shape, machine.fast_level.bytes).reads.values()
                )


def test_models_and_machines_are_the_tables(data):
    assert [m["name"] for m in data["kv"]["models"]] == list(kv_memory.MODELS)
    assert [m["name"] for m in data["machines"]] == list(MACHINES)


def test_size(html):
    assert len(html.encode()) < 1_000_000


def test_command_writes_it(tmp_path):
    out = tmp_path / "page.html"
    result = CliRunner().invoke(_app(), ["learn", "--out", str(out)])
    assert result.exit_code == 0 and str(out) in result.output
    assert out.read_text().startswith("<!doctype html>")
    result = CliRunner().invoke(_app(), ["learn", "--out", str(tmp_path / "missing" / "page.html")])
    assert result.exit_code == 2 and "No such file" in re.sub("[│╭╮╰╯─]", " ", result.output)
