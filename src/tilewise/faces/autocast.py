"""What autocast does to the arguments of PyTorch's own attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def autocast(*arguments: Any) -> tuple[Any, ...]:
    """Tensors in the dtype that autocast gives to matrix products, if it is on.

    float64 stays as it is, and so does what is no tensor.
    """
    device_type = next((t.device.type for t in arguments if isinstance(t, Tensor)), "meta")
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # the first has no autocast
        return arguments
    dtype = torch.get_autocast_dtype(device_type)

    kept = dtype, torch.float64

    def is_cast(t: Any) -> bool:
        return isinstance(t, Tensor) and t.dtype not in kept and t.dtype.is_floating_point

    return tuple([t.to(dtype) if is_cast(t) else t for t in arguments])
