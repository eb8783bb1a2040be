"""tilewise: exact attention, tile by tile."""

import importlib
from types import ModuleType

from tilewise import _renamed, nn, reference
from tilewise.api import attention, attention_with_cache
from tilewise.cache.contiguous import KVCache
from tilewise.cache.paged import PagedKVCache
from tilewise.core.device_errors import check_errors
from tilewise.core.statistics import Aux, Statistics
from tilewise.explain import Explanation, explain
from tilewise.faces import flash_attn, flash_attn_3
from tilewise.faces.sdpa import scaled_dot_product_attention
from tilewise.statistics import attention_statistics
from tilewise.varlen import attention_varlen
from tilewise.warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "Aux",
    "Explanation",
    "KVCache",
    "PagedKVCache",
    "Statistics",
    "attention",
    "attention_statistics",
    "attention_varlen",
    "attention_with_cache",
    "check_errors",
    "explain",
    "flash_attn",
    "flash_attn_3",
    "nn",
    "reference",
    "scaled_dot_product_attention",
    "warmup",
]

_LAZY = ("compat", "distributed", "fp8", "testing")


def __getattr__(name: str) -> ModuleType:
    """Modules that are imported when first asked for, by earlier names too: `tilewise.rotary`."""
    if name not in _LAZY and f"tilewise.{name}" not in _renamed.MODULES:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    return importlib.import_module(f"tilewise.{name}")
