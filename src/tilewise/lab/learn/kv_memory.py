"""How large a key/value cache gets: by model, context, batch and page size."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Model:
    """What decides the size of a model's cache.

    A layer caches K and V of `kv_heads` heads of `head_dim`; with `latent` it caches one vector of so many
    numbers for all heads instead (multi-head latent attention). `windowed` of the layers see `window` tokens.
    `context` is the longest sequence that the model was made for.

    Example:
        >>> MODELS["llama-2-70b"].cache_bytes(context=4096)
        1342177280
        >>> MODELS["llama-2-70b"].with_every_head().cache_bytes(context=4096)
        10737418240
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    latent: int | None = None
    windowed: int = 0
    window: int = 0

    @property
    def numbers_per_token(self) -> int:
        """Of one layer."""
        return self.latent if self.latent is not None else 2 * self.kv_heads * self.head_dim

    def bytes_per_token(self, itemsize: int = 2) -> int:
        """Of all layers, for a token that every layer can still see."""
        return self.layers * self.numbers_per_token * itemsize

    def cache_bytes(self, context: int, batch: int = 1, itemsize: int = 2) -> int:
        """Of `batch` sequences of `context` tokens each, in a cache that keeps no more than is seen."""
        for name, value in (("context", context), ("batch", batch), ("itemsize", itemsize)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        tokens = (self.layers - self.windowed) * context + self.windowed * min(context, self.window)
        return batch * tokens * self.numbers_per_token * itemsize

    def with_every_head(self) -> Model:
        """The same model if every query head had keys and values of its own (multi-head attention)."""
        name = f"{self.name}, every head its own"
        return replace(self, name=name, kv_heads=self.heads, latent=None, windowed=0, window=0)

    @property
    def sharing(self) -> float:
        """How many times smaller the cache is than with keys and values for every query head."""
        return 2 * self.heads * self.head_dim / self.numbers_per_token


MODELS = {
    model.name: model
    for model in (
        Model("gpt-2", 12, 12, 12, 64, 1024),
        Model("gpt-3-175b", 96, 96, 96, 128, 2048),
        Model("llama-2-7b", 32, 32, 32, 128, 4096),
        Model("llama-2-13b", 40, 40, 40, 128, 4096),
        Model("llama-2-70b", 80, 64, 8, 128, 4096),
        Model("llama-3.1-8b", 32, 32, 8, 128, 131072),
        Model("llama-3.1-70b", 80, 64, 8, 128, 131072),
        Model("llama-3.1-405b", 126, 128, 8, 128, 131072),
        Model("mistral-7b-v0.1", 32, 32, 8, 128, 32768, windowed=32, window=4096),
        Model("mixtral-8x7b", 32, 32, 8, 128, 32768),
        Model("qwen2.5-7b", 28, 28, 4, 128, 131072),
        Model("gemma-2-27b", 46, 32, 16, 128, 8192, windowed=23, window=4096),
        Model("falcon-7b", 32, 71, 1, 64, 2048),
        # a head has 128 + 64 for K and 128 for V: 2 x 160
        Model("deepseek-v3", 61, 128, 128, 160, 131072, latent=512 + 64),
    )
}


def find_model(name: str) -> Model:
    """A model of `MODELS` by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name.lower() not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name.lower()]


def score_matrix_bytes(seqlen: int, num_heads: int = 1, itemsize: int = 2) -> int:
    """Of the N x N matrix that standard attention stores for each head.

    Example:
        >>> [score_matrix_bytes(n) for n in (512, 131072)]
        [524288, 34359738368]
    """
    return num_heads * seqlen * seqlen * itemsize


def projections(tokens: int, cached: bool) -> int:
    """How many times a token's K and V are computed while `tokens` are generated one by one.

    Example:
        >>> projections(100, cached=False), projections(100, cached=True)
        (5050, 100)
    """
    return tokens if cached else tokens * (tokens + 1) // 2


@dataclass(frozen=True)
class Paging:
    """A paged cache against one that reserves `longest` tokens for each sequence. Counts are tokens.

    Example:
        >>> Paging(lengths=(100, 30), page_size=16, longest=256).pages
        (7, 2)
    """

    lengths: tuple[int, ...]
    page_size: int
    longest: int

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {self.page_size}")
        for length in self.lengths:
            if not 0 <= length <= self.longest:
                raise ValueError(f"lengths must be from 0 to longest={self.longest}, got {length}")

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(-(-length // self.page_size) for length in self.lengths)

    @property
    def used(self) -> int:
        return sum(self.lengths)

    @property
    def paged(self) -> int:
        """Slots taken: only a sequence's last page has empty ones."""
        return sum(self.pages) * self.page_size

    @property
    def reserved(self) -> int:
        """Slots that a contiguous cache takes."""
        return len(self.lengths) * self.longest
