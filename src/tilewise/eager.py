"""Whether a call is plain eager code, which may take ways that PyTorch's dispatcher does not see."""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain_eager(query: Tensor) -> bool:
    """No transform, tracing mode or tensor subclass has to see the operator."""
    return (
        type(query) in PLAIN_TYPES
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and torch.autograd.forward_ad._current_level < 0
    )
