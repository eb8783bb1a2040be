"""Fresh randomness for every test, poisoned memory, and hypothesis profiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tilewise",
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("tilewise")


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors are slower on several threads, and xdist's workers share the cores."""
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
