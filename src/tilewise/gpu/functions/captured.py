"""The captured tensors of a call as kernels take them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.kept import integers_on


class Captured(NamedTuple):
    """What mask and score functions read: see `core.functions.captured`. `layout` is on the GPU here."""

    floats: Any
    integers: Any
    layout: Any
    errors: Any  # flags: an index is out of range


def layout_on(layout: Tensor | None, device: torch.device) -> Tensor | None:
    """The layout of captured tensors on a GPU."""
    return None if layout is None else integers_on(tuple(layout.tolist()), device)
