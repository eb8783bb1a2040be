"""What is published: a wheel and an sdist that work without the rest of the tree, and who may publish."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
import torch

import tilewise

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
SMOKE = """
import sys
import torch, tilewise, tilewise.testing
from pathlib import Path
assert Path(tilewise.__file__).is_relative_to(sys.prefix), tilewise.__file__
assert (Path(tilewise.__file__).parent / "py.typed").exists()
q, k, v = torch.randn(3, 2, 50, 4, 32).unbind(0)
for backend in (None, "tiled"):
    tilewise.testing.check_attention(q, k, v, causal=True, window=(20, 0), backend=backend)
print(tilewise.__version__)
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Where both were built, as the workflow builds them."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_wheel_works_in_an_environment_of_its_own(dist, tmp_path):
    (wheel,) = dist.glob(f"tilewise-{tilewise.__version__}-py3-none-any.whl")
    assert wheel.stat().st_size < 1_000_000
    venv.create(tmp_path / "env", with_pip=True)
    scripts = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(scripts / "python"), "-I", *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "pip", "install", "--no-deps", "--no-index", str(wheel))
    site = Path(run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "torch_of_the_tests.pth").write_text(str(Path(torch.__file__).parents[1]))
    assert run("-c", SMOKE).strip() == tilewise.__version__
    assert "decoding" in run("-m", "tilewise", "doctor")


@pytest.mark.slow
def test_sdist_has_what_a_packager_needs(dist):
    (sdist,) = dist.glob("tilewise-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= names
    assert {"src/tilewise/api.py", "tests/test_attention.py", "src/tilewise/py.typed"} <= names
    assert not any(name.startswith((".venv", "build/", "dist/")) for name in names)


def test_everything_is_installed_as_constrained():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"].values()
    runs = [step["run"] for job in jobs for step in job["steps"] if "pip install" in step.get("run", "")]
    assert any(" torch " in run for run in runs)
    assert all("--constraint constraints/dev.txt" in run for run in runs), runs


def test_only_the_last_job_may_publish():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    (publish,) = (job for job in jobs.values() if "id-token" in job.get("permissions", {}))
    assert publish is list(jobs.values())[-1]
    assert set(publish["needs"]) == set(jobs) - {"publish"}
    assert "refs/tags/v" in publish["if"] and publish["environment"]
    assert not any("run" in step for step in publish["steps"])
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name) for name in used)


def test_the_workflow_tries_the_oldest_python():
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    yaml = pytest.importorskip("yaml")
    versions = yaml.safe_load(WORKFLOW.read_text())["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert oldest and versions[0] == oldest.group(1)


def test_the_checklist_installs_what_its_command_needs():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    (step,) = (line for line in guide.splitlines() if "then `tilewise doctor`" in line)
    assert "'tilewise[cli]==" in step
