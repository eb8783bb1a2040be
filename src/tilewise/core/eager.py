"""Whether a call is plain eager code, which may take ways that PyTorch's dispatcher does not see."""

from __future__ import annotations

import torch
from torch import Tensor

# By name, as every short call asks all of them, twice with gradients.
from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain_eager(query: Tensor) -> bool:
    """No transform, tracing mode or tensor subclass has to see the operator."""
    return (
        type(query) in PLAIN_TYPES
        and not is_compiling()
        and not _are_functorch_transforms_active()
        and _len_torch_dispatch_stack() == 0
        and _get_tracing_state() is None
        and forward_ad._current_level < 0
    )
