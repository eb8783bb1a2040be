"""Kernels for another processor: a cache of their own, and one thread if a test does not say more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "llvm")]  # the tests share qemu.py and random_cases.py


@pytest.fixture
def install(monkeypatch, tmp_path):
    """A function that gives all kernels of a test to a processor."""
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda processor: processor.install(monkeypatch, tmp_path)
    torch.set_num_threads(before)
