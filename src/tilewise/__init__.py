"""tilewise: exact attention, tile by tile."""

from tilewise import _renamed, nn, reference  # noqa: F401
from tilewise.api import attention, attention_varlen, attention_with_cache
from tilewise.cache.contiguous import KVCache
from tilewise.cache.paged import PagedKVCache
from tilewise.core.device_errors import check_errors
from tilewise.explain import Explanation, explain
from tilewise.faces import flash_attn, flash_attn_3
from tilewise.faces.sdpa import scaled_dot_product_attention
from tilewise.warmup import warmup

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "KVCache",
    "PagedKVCache",
    "attention",
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
