from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import Pool


@pytest.fixture(scope="session")
def pool():
    found = Pool()
    yield found
    found.close()
