"""`tilewise doctor`: a sound machine passes; what is missing, too old, in conflict or wrong is named."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tilewise.testing
from tilewise.cli import _app
from tilewise.lab import doctor

CPU = torch.device("cpu")


def run():
    return CliRunner().invoke(_app(), ["doctor"])


def test_a_sound_machine_passes(monkeypatch):
    monkeypatch.setenv("TILEWISE_DEBUG", "1")
    done = run()
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert all(line.split()[0] in ("ok", "note") for line in lines)
    for name in doctor.CHECKS:
        assert sum(f" {name}: " in line and ", allowed " in line for line in lines) >= 1
    assert any("TILEWISE_DEBUG=1" in line for line in lines)


def test_a_wrong_result_is_found(monkeypatch):
    real = tilewise.testing.attention

    def wrong(*args, **options):
        out, lse = real(*args, **options)
        return out * 1.01, lse

    monkeypatch.setattr(tilewise.testing, "attention", wrong)
    monkeypatch.setattr(doctor, "CHECKS", {"float32": doctor.CHECKS["float32"]})
    done = run()
    assert done.exit_code == 1
    (line,) = (line for line in done.output.splitlines() if line.startswith("wrong"))
    assert "float32: AssertionError: out: max error" in line


def test_a_call_that_fails_is_found():
    def fail(device):
        raise RuntimeError("no\nspace")

    found = doctor.checked(CPU, "decoding", fail)
    assert found == ("wrong", "cpu", "decoding: RuntimeError: no space")


def test_the_random_state_stays():
    before = torch.get_rng_state()
    assert doctor.checked(CPU, "decoding", doctor.CHECKS["decoding bfloat16"]).status == "ok"
    assert torch.equal(before, torch.get_rng_state())


def test_every_package_that_tilewise_plugs_into_is_named():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    plugged = set(project["optional-dependencies"]) - {"cli", "docs", "dev"}
    assert plugged <= set(doctor.PACKAGES)


def test_packages(monkeypatch):
    installed = {"torch": "2.4.0", "llvmlite": "0.46.0", "triton": "4.0"}
    asked = {
        "tilewise": ["torch>=2.11", "llvmlite>=0.40; python_version > '3'", "triton<3.10; extra == 'dev'"],
        "numba": ["llvmlite<0.46,>=0.45"],
    }

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", asked.get)
    found = {package: doctor.package_finding(package, "less") for package in doctor.PACKAGES}
    assert found["torch"] == ("wrong", "torch", "2.4.0, but tilewise needs torch>=2.11")
    assert found["llvmlite"] == ("wrong", "llvmlite", "0.46.0, but numba needs llvmlite<0.46,>=0.45")
    assert found["triton"] == ("wrong", "triton", "4.0, but tilewise needs triton<3.10")
    assert found["transformers"] == ("note", "transformers", "not installed: less")
    del installed["llvmlite"]
    missing = doctor.package_finding("llvmlite", "less")
    assert missing == ("wrong", "llvmlite", "not installed (wanted: llvmlite>=0.40): less")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_triton_is_needed_where_a_gpu_is(monkeypatch, has_gpu):
    def version(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert doctor.package_finding("triton", "less").status == ("wrong" if has_gpu else "note")
