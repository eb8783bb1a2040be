"""A short run of the random operations on caches; `cache_model.run` takes longer ones."""

import pytest
from cache_model import PagedModel, run

from tilewise.cache.pages import PageTable


def test_caches_do_what_plain_tensors_do():
    assert run(steps=600) == 600


@pytest.mark.parametrize("broken", ["check_batch", "_outdate"])
def test_the_model_finds_batches_that_are_accepted_too_late(broken, monkeypatch):
    monkeypatch.setattr(PageTable, broken, lambda *_: None)
    monkeypatch.setattr(PagedModel, "outdate_copied", lambda *_: None)
    with pytest.raises((AssertionError, KeyError)):
        run(steps=4000, seed=1)
