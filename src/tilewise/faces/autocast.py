"""What autocast does to the arguments of PyTorch's own attention."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that autocast gives to matrix products, if it is on; float64 stays."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # the first has no autocast
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    is_cast = (t.dtype.is_floating_point and t.dtype != torch.float64 for t in tensors)
    return tuple(t.to(dtype) if cast else t for t, cast in zip(tensors, is_cast))
