"""`tilewise doctor`: what is installed, which backend serves what here, and whether the results are right."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import typer
from packaging.requirements import Requirement

import tilewise
from tilewise import reference
from tilewise.api import attention_with_cache
from tilewise.cache.contiguous import KVCache
from tilewise.core.problem import Inputs, Options, describe
from tilewise.device import processor_name
from tilewise.dispatch import choice
from tilewise.testing import check_attention, compare

OK, NOTE, WRONG = "ok", "note", "wrong"
PACKAGES = {  # what there is without each
    "torch": "nothing",
    "llvmlite": "no CPU kernels, PyTorch's operations serve",
    "triton": "no GPU kernels, PyTorch's operations serve",
    "transformers": 'no attn_implementation="tilewise"',
    "diffusers": 'no set_attention_backend("tilewise")',
    "vllm": "no --attention-backend CUSTOM",
    "sglang": "no --attention-backend tilewise",
    "kernels": "no tilewise as a repository of Hugging Face's kernels",
}
ENVIRONMENT = (
    "TILEWISE_CPU_ISA",
    "TILEWISE_CACHE_DIR",
    "TILEWISE_KERNELS",
    "TILEWISE_DEBUG",
    "TILEWISE_PEER_MEMORY",
    "TRITON_INTERPRET",
)
SEQLEN, HEADS, KV_HEADS, HEAD_DIM = 77, 4, 2, 64  # of the self-check; an odd length


class Finding(NamedTuple):
    """One line of the report."""

    status: str
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.status:<6}{self.subject:<14}{self.text}"


def doctor() -> None:
    """Say what is installed and served, and check it.

    Every result is held against float64. Exit status 1 if a line begins with "wrong".
    """
    is_wrong = False
    for finding in findings():
        is_wrong |= finding.status == WRONG
        typer.echo(str(finding))
    if is_wrong:
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    """One after the other, as they are found."""
    yield Finding(OK, "tilewise", f"{tilewise.__version__}, Python {platform.python_version()}")
    for package, without in PACKAGES.items():
        yield package_finding(package, without)
    for name in ENVIRONMENT:
        if name in os.environ:
            yield Finding(NOTE, "environment", f"{name}={os.environ[name]}")
    devices = [torch.device("cpu"), *(torch.device("cuda", n) for n in range(torch.cuda.device_count()))]
    for device in devices:
        yield device_finding(device)
        for name, check in CHECKS.items():
            yield checked(device, name, check)


# ---- what is installed


def package_finding(package: str, without: str) -> Finding:
    """A package's version, held against the range that this library states and that numba does."""
    requirement = _requirement("tilewise", package)
    is_required = requirement is not None and "extra" not in str(requirement.marker)
    wanted = str(requirement.specifier) if requirement is not None else ""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        is_needed = is_required or (package == "triton" and torch.cuda.is_available())
        needs = f" (wanted: {package}{wanted})" if wanted else ""
        return Finding(WRONG if is_needed else NOTE, package, f"not installed{needs}: {without}")
    for asker, asked in (("tilewise", requirement), ("numba", _requirement("numba", package))):
        if asked is not None and not asked.specifier.contains(version, prereleases=True):
            return Finding(WRONG, package, f"{version}, but {asker} needs {package}{asked.specifier}")
    return Finding(OK, package, version + (f" (wanted: {wanted})" if wanted else ""))


def _requirement(distribution: str, package: str) -> Requirement | None:
    """What an installed distribution asks of a package here, in an extra or without one."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return None
    for requirement in map(Requirement, lines):
        extras = ("", "dev", package)
        marker = requirement.marker
        if requirement.name == package and (
            marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
        ):
            return requirement
    return None


# ---- which backend serves what


def device_finding(device: torch.device) -> Finding:
    """What a device is called, and what its kernels are compiled for."""
    if device.type == "cpu":
        from tilewise.cpu.host.compile import target, unavailable

        missing = unavailable()
        kernels = f"no kernels: {missing}" if missing else f"kernels for {target().isa}"  # type: ignore[union-attr]
        threads = torch.get_num_threads()
        return Finding(NOTE if missing else OK, "cpu", f"{processor_name()}, {threads} threads, {kernels}")
    properties = torch.cuda.get_device_properties(device)
    text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    if torch.version.hip is not None:
        return Finding(NOTE, str(device), f"{text}, ROCm {torch.version.hip}, which is experimental")
    return Finding(OK, str(device), f"{text}, compute capability {properties.major}.{properties.minor}")


class Checked(NamedTuple):
    """A call that was right: who served it, and its largest error beside what was allowed."""

    backends: str
    error: float
    budget: float


def checked(device: torch.device, name: str, check: Callable[[torch.device], Checked]) -> Finding:
    """One kind of call on one device: who serves it, and its error. Whatever it raises is the finding."""
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            done = check(device)
    except Exception as error:
        reason = " ".join(str(error).split())
        return Finding(WRONG, str(device), f"{name}: {type(error).__name__}: {reason}")
    errors = f"error {done.error:.1e}, allowed {done.budget:.1e}"
    return Finding(OK, str(device), f"{name}: {done.backends}; {errors}")


def _tensors(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(2, SEQLEN, h, HEAD_DIM, device=device, dtype=dtype) for h in heads]


def _training(
    device: torch.device,
    dtype: torch.dtype,
    causal: bool = False,
    has_bias: bool = False,
    is_packed: bool = False,
) -> Checked:
    """Forward and backward of a dense call, or of the same tokens as two packed sequences."""
    q, k, v = _tensors(device, dtype)
    options: dict[str, Any] = {"causal": causal}
    if has_bias:
        options["bias"] = torch.randn(1, HEADS, SEQLEN, SEQLEN, device=device, dtype=dtype)
    if is_packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        options["cu_seqlens_q"] = options["cu_seqlens_k"] = torch.tensor([0, 13, 2 * SEQLEN], device=device)
    given = {"query": q, "key": k, "value": v} | {n: t for n, t in options.items() if n != "causal"}
    inputs = Inputs(**{n: t.detach().requires_grad_(t.is_floating_point()) for n, t in given.items()})
    problem = describe(inputs, Options(causal=causal))
    names = [choice.choose(problem, is_backward=is_backward) for is_backward in (False, True)]
    reports = check_attention(q, k, v, lse_gradient=False, **options)
    worst = max(reports, key=lambda report: report.max_error / (report.max_budget or 1.0))
    return Checked(f"{names[0]}, backward {names[1]}", worst.max_error, worst.max_budget)


def _decoding(device: torch.device) -> Checked:
    """One token for each sequence of a cache."""
    q, k, v = _tensors(device, torch.bfloat16)
    q = q[:, -1:]
    cache = KVCache(2, 2 * SEQLEN, KV_HEADS, HEAD_DIM, dtype=q.dtype, device=device)
    cache.append(k[:, :-1], v[:, :-1])
    out, _ = attention_with_cache(q, cache, k[:, -1:], v[:, -1:], return_lse=True)
    problem = describe(Inputs(q, cache.key, cache.value, seqlens_k=cache.lengths), Options(causal=True))
    expected = (reference.attention(q, k, v, dtype=dtype)[0] for dtype in (torch.float64, q.dtype))
    report = compare("out", out, *expected)
    assert report.is_within, str(report)
    return Checked(choice.choose(problem), report.max_error, report.max_budget)


CHECKS: dict[str, Callable[[torch.device], Checked]] = {
    "float32": lambda device: _training(device, torch.float32),
    "bfloat16 causal": lambda device: _training(device, torch.bfloat16, causal=True),
    "bias with its gradient": lambda device: _training(device, torch.float32, has_bias=True),
    "packed bfloat16": lambda device: _training(device, torch.bfloat16, causal=True, is_packed=True),
    "decoding bfloat16": _decoding,
}
