"""Keys and values of earlier tokens: contiguous, or in pages."""

from tilewise.cache.contiguous import KVCache
from tilewise.cache.paged import PagedKVCache

__all__ = ["KVCache", "PagedKVCache"]
