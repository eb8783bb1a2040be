"""What is computed (`Shape`) and what it takes (`Cost`): the counts of `io_model`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tilewise.core.mask import Visibility


@dataclass(frozen=True)
class Shape:
    """What is computed. `num_kv_heads` None is as many as query heads, `head_dim_v` None is head_dim.

    Example:
        >>> Shape(4096, 4096, 128, num_heads=32).pairs
        536870912
    """

    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int | None = None
    num_heads: int = 1
    num_kv_heads: int | None = None
    batch: int = 1
    itemsize: int = 2
    causal: bool = False

    def __post_init__(self) -> None:
        sizes = ("seqlen_q", "seqlen_k", "head_dim", "dim_v", "num_heads", "kv_heads", "batch", "itemsize")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads={self.kv_heads}, got {self.num_heads}"
            )

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def visibility(self) -> Visibility:
        return Visibility(self.seqlen_q, self.seqlen_k, None, 0 if self.causal else None)

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs over the batch and all heads."""
        return self.batch * self.num_heads * self.visibility.visible_pairs()


class Asymptotic(NamedTuple):
    """Elements to and from slow memory as a paper's theorem has them, without constants."""

    formula: str
    elements: float


@dataclass(frozen=True)
class Cost:
    """The counts of one call: see the head of `io_model`. All are over the batch and all heads."""

    algorithm: str
    reads: Mapping[str, int]
    writes: Mapping[str, int]
    once_bytes: int
    fast_read: int
    fast_written: int
    matmul_flops: int
    vector_flops: int
    special_ops: int
    extra_bytes: int  # slow memory beyond inputs and outputs
    sram_bytes: int | None  # fast memory that the tiles of one worker take; None: as large as it takes
    asymptotic: Asymptotic

    @property
    def slow_bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.vector_flops + self.special_ops

    @property
    def intensity(self) -> float:
        """FLOPs of matrix products per byte to and from slow memory."""
        return self.matmul_flops / self.slow_bytes


@dataclass
class Tally:
    """Counts while they add up, of one head."""

    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)
    once: int | None = None  # bytes; None: nothing is moved twice
    fast_read: int = 0
    fast_written: int = 0
    matmul_flops: int = 0
    vector_flops: int = 0
    special_ops: int = 0

    def load(self, size: int, **elements: int) -> None:
        """From slow memory into fast memory."""
        for name, count in elements.items():
            self.reads[name] += count * size
            self.fast_written += count * size

    def store(self, size: int, **elements: int) -> None:
        """From registers to slow memory."""
        for name, count in elements.items():
            self.writes[name] += count * size

    def cost(self, algorithm: str, times: int, extra: int, sram: int | None, asymptotic: Asymptotic) -> Cost:
        """The whole call: `times` heads like this one; `extra` bytes a head."""

        def scaled(counts: Counter[str]) -> dict[str, int]:
            return {name: count * times for name, count in counts.items()}

        moved = sum(self.reads.values()) + sum(self.writes.values())
        names = ("fast_read", "fast_written", "matmul_flops", "vector_flops", "special_ops")
        return Cost(
            algorithm,
            scaled(self.reads),
            scaled(self.writes),
            once_bytes=(moved if self.once is None else self.once) * times,
            **{name: getattr(self, name) * times for name in names},
            extra_bytes=extra * times,
            sram_bytes=sram,
            asymptotic=Asymptotic(asymptotic.formula, asymptotic.elements * times),
        )
