"""Every name that Gluon changes between releases, under one name (Triton 3.6 to 3.9)."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import core as _core

aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else _core._aggregate
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
wait_for_stores = tma.store_wait
TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

__all__ = [
    "TRITON_VERSION",
    "TensorDescriptor",
    "aggregate",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "store_tile",
    "wait_for_stores",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
