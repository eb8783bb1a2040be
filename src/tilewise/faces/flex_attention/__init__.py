"""`torch.nn.attention.flex_attention`, name for name: import from here instead.

A `BlockMask` of PyTorch's is taken here, and one made here is taken there.
"""

from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    and_masks,
    create_mask,
    noop_mask,
    or_masks,
)

from tilewise.faces.flex_attention.attention import flex_attention
from tilewise.faces.flex_attention.block_mask import BlockMask, create_block_mask

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]

if hasattr(theirs, "FlexKernelOptions"):  # not in every release
    FlexKernelOptions = theirs.FlexKernelOptions
    __all__ += ["FlexKernelOptions"]
