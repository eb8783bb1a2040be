"""Fresh randomness for every test, poisoned memory, scripts of tests, and hypothesis profiles."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # tests share backends.py

settings.register_profile(
    "tilewise",
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("quick", settings.get_profile("tilewise"), max_examples=5)


# They take longest, so they start first: else one worker would be left alone with them. One worker has all
# that share the processes of `distributed`.
LONGEST = (
    "distributed", "gpu_triton/test_interpreted.py", "gpu_triton/test_compile.py",
    "hopper/test_backward_compile.py", "hopper/test_compile.py", "hopper/test_emulated.py", "cpu",
    "test_flex_attention.py", "claims", "demo", "integrations/test_transformers_paged.py", "torture",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", default=None, help="seed of the cases drawn of tests marked `sample`")
    parser.addoption(
        "--draws", type=int, default=1, help="cases that a test of compiled kernels draws at least"
    )
    parser.addoption(
        "--emulate",
        choices=("avx512", "avx512_bf16", "amx"),
        help="instruction set whose CPU kernels run in software: see cpu/emulated.py",
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Scripts beside tests have no doctests, and importing one may put an emulator in a kernel's place."""
    is_test = collection_path.is_dir() or collection_path.name.startswith("test_")
    return True if collection_path.is_relative_to(Path(__file__).parent) and not is_test else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Iterator[Any]:
    """Tests have no doctests, whose collector would skip a file that cannot be imported."""
    collectors = yield
    return [c for c in collectors if type(c) is pytest.Module]


def pytest_configure(config: pytest.Config) -> None:
    shared = getattr(config, "workerinput", {}).get("sample")
    settings.load_profile("quick" if config.getoption("-m") == "not slow" else "tilewise")
    config.option.sample = shared or config.getoption("--sample") or os.urandom(4).hex()
    if config.getoption("--emulate"):
        from cpu import emulated

        emulated.install(config.getoption("--emulate"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now is no garbage: the collector need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All of xdist's workers draw the same cases."""
    node.workerinput["sample"] = node.config.option.sample


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus:
        terminalreporter.write_line(f"cases drawn by --sample={config.option.sample}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What this machine can run; of a test marked `sample(n)`, n cases drawn at random.

    All cases with `-m ''`, or if a test is asked for by name, as `FILE::TEST`.
    """
    left_out = {item for item in items if _needs_gpu(item)}
    if config.getoption("--emulate"):
        left_out |= {item for item in items if item.get_closest_marker("native")}
    if config.getoption("-m") == "not slow" and not any("::" in argument for argument in config.args):
        for (path, name), found in _sampled(items).items():
            (count,) = found[0].get_closest_marker("sample").args  # type: ignore[union-attr]
            order = random.Random(f"{config.option.sample}/{path.name}/{name}").sample(found, len(found))
            left_out |= set(order[count:])
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = sorted((item for item in items if item not in left_out), key=_place)


def _place(item: pytest.Item) -> int:
    """In `LONGEST`, or behind it."""
    tests = Path(__file__).parent
    return next((n for n, name in enumerate(LONGEST) if item.path.is_relative_to(tests / name)), len(LONGEST))


def _sampled(items: list[pytest.Item]) -> dict[tuple[Path, str], list[pytest.Item]]:
    """The cases of each test to draw from."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases.setdefault((item.path, item.originalname), []).append(item)  # type: ignore[attr-defined]
    return cases


def _needs_gpu(item: pytest.Item) -> bool:
    """Whether this machine lacks the GPU that a test asks for."""
    conditions = [mark for mark in item.iter_markers("skipif") if mark.args and mark.args[0] is True]
    return any("GPU" in mark.kwargs.get("reason", "") for mark in conditions)


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors are slower on several threads, and xdist's workers share the cores.

    A test may take another number: it is put back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _poison_uninitialized_memory():
    """`torch.empty` returns NaN, so that an element nobody wrote cannot pass for a result."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def load_example() -> Callable[[str], ModuleType]:
    """A script of examples/ as a module, by its name."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parents[1] / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{name}_example", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look their annotations up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def run_script(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """Runs a script beside the test in a process of its own; the lines that it prints.

    In its own, since here Triton's interpreter may be on, or a real driver in use.
    """

    def run(name: str, *arguments: str) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, str(request.path.with_name(name)), *arguments],
            capture_output=True,
            text=True,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.splitlines()

    return run


@pytest.fixture(scope="module")
def compiled_by(
    run_script: Callable[..., list[str]], request: pytest.FixtureRequest
) -> Callable[..., list[dict[str, Any]]]:
    """Runs a script that compiles kernels; what it says of each. `make test` draws some of the cases."""

    def run(name: str, *arguments: str, draw: int | None = None) -> list[dict[str, Any]]:
        if draw is not None and request.config.getoption("-m") == "not slow":
            count = max(draw, request.config.getoption("--draws"))
            arguments = ("--draw", str(count), request.config.option.sample)
        return [json.loads(line) for line in run_script(name, *arguments)]

    return run
