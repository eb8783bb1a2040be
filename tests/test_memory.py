"""Extra memory: within the stated bounds at 16384 tokens, and linear in the number of tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import json, sys, torch, tilewise
seqlen, direction, backend, heads = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
backend = None if backend == "auto" else backend

def status(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))

def run(q, k, v, do):
    if direction == "forward":
        return [tilewise.attention(q, k, v, backend=backend)]
    out = tilewise.attention(q, k, v, backend=backend)
    return [out, *torch.autograd.grad(out, (q, k, v), do)]

def inputs(n):
    return [torch.randn(1, n, heads, 64, requires_grad=direction != "forward" and i < 3) for i in range(4)]

run(*inputs(512))  # code, thread pools and scratch that stay for good
tensors = inputs(seqlen)
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # start a new peak
before = status("VmRSS")
results = run(*tensors)
kept = sum(t.nbytes for t in results)
print(json.dumps(status("VmHWM") - before - kept))
"""


def peak_extra_mib(seqlen: int, direction: str, backend: str, heads: int, **environment: str) -> float:
    command = [sys.executable, "-c", PROBE, str(seqlen), direction, backend, str(heads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    return json.loads(done.stdout) / 2**20


pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


# One head's scores would be 1 GiB.
BACKENDS = pytest.mark.parametrize(
    ("backend", "heads"),
    [
        ("auto", 1),
        *(pytest.param(name, n, marks=pytest.mark.slow) for name, n in (("auto", 4), ("tiled", 1))),
    ],
)


@BACKENDS
def test_forward_at_16384_tokens(backend, heads):
    assert peak_extra_mib(16384, "forward", backend, heads) <= 64


@BACKENDS
def test_forward_and_backward_at_16384_tokens(backend, heads):
    assert peak_extra_mib(16384, "both", backend, heads) <= 128


def test_dq_is_summed_where_it_will_be():
    """A copy of dq would take 4 MiB."""
    assert peak_extra_mib(4096, "both", "llvm", 4, MALLOC_MMAP_THRESHOLD_="65536") <= 3


BROADCAST = """
import json, torch, tilewise
def status(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))

def run(n):
    q, k, v = (torch.randn(1, n, 8, 16, requires_grad=True) for _ in range(3))
    bias, mask = torch.randn(1, 8, n, 1), torch.rand(1, 1, n, 1) > 0.1
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = status("VmRSS")
    out = tilewise.attention(q, k, v, bias=bias, mask=mask, causal=True)
    out.sum().backward()
    return status("VmHWM") - before

run(300)
print(json.dumps(run(3000)))
"""


def test_a_bias_that_is_broadcast_over_keys_stays_as_it_is():
    """Expanded, (1, 8, 3000, 1) would take 288 MB."""
    done = subprocess.run([sys.executable, "-c", BROADCAST], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) <= 64 << 20


FUNCTIONS = """
import json, torch, tilewise
def status(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith(field))

def run(n):
    q, k, v = (torch.randn(1, n, 1, 16, requires_grad=True) for _ in range(3))
    document = torch.arange(n) // 500
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    before = status("VmRSS")
    out = tilewise.attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s - 0.01 * (i - j),
        mask_mod=lambda b, h, i, j: (document[i] == document[j]) & (j <= i),
    )
    out.sum().backward()
    return status("VmHWM") - before

run(600)
print(json.dumps(run(65536)))
"""


def test_functions_make_no_mask():
    """Of 65,536 tokens it would take 4 GB; their tile map takes 0.7 MB, and its intervals come in parts."""
    done = subprocess.run([sys.executable, "-c", FUNCTIONS], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) <= 128 << 20


def test_growth_is_linear():
    """Standard attention's scores would grow by 4 * (3072^2 - 1024^2) * 4 bytes, 128 MiB.

    glibc's malloc keeps a changing share of freed blocks for later; under a fixed threshold it returns each to the
    system at once, so the peak is what the call asked for and repeats to 0.2 MiB.
    """
    small, large = (
        peak_extra_mib(n, "both", "tiled", 4, MALLOC_MMAP_THRESHOLD_="65536") for n in (1024, 3072)
    )
    inputs_growth = 2048 * 4 * 64 * 4 / 2**20  # one query-sized tensor: 2 MiB
    assert large - small <= 4 * inputs_growth
