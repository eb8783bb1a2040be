"""Bad arguments, made from the signatures of public functions: refused by name, or harmless."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import torch

import tilewise
from tilewise import flash_attn, flash_attn_3
from tilewise.integrations.sdpa import scaled_dot_product_attention
from tilewise.merge import merge
from tilewise.rotary import apply_rotary, rotary_tables

Good = Callable[[], dict[str, Any]]


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _starts() -> torch.Tensor:
    return torch.tensor([0, 2, 5], dtype=torch.int32)


def _rows(*names: str) -> Good:
    return lambda: {name: _x(2, 4, 2, 8) for name in names}


def _packed(*names: str) -> Good:
    lengths = {"max_seqlen_q": 3, "max_seqlen_k": 3}
    return lambda: {n: _x(5, 2, 8) for n in names} | {f"cu_seqlens_{s}": _starts() for s in "qk"} | lengths


def _with_cache() -> dict[str, Any]:
    cache = tilewise.KVCache(2, 16, 2, 8, dtype=torch.float32)
    return _rows("query", "key", "value")() | {"cache": cache}


def _flash_cache() -> dict[str, Any]:
    caches = {name: _x(2, 16, 2, 8) for name in ("k_cache", "v_cache")}
    return _rows("q", "k", "v")() | caches | {"cache_seqlens": torch.tensor([3, 5], dtype=torch.int32)}


FUNCTIONS: dict[str, tuple[Callable[..., Any], Good]] = {
    "attention": (tilewise.attention, _rows("query", "key", "value")),
    "attention_varlen": (tilewise.attention_varlen, _packed("query", "key", "value")),
    "attention_with_cache": (tilewise.attention_with_cache, _with_cache),
    "scaled_dot_product_attention": (scaled_dot_product_attention, _rows("query", "key", "value")),
    "flash_attn_func": (flash_attn.flash_attn_func, _rows("q", "k", "v")),
    "flash_attn_varlen_func": (flash_attn.flash_attn_varlen_func, _packed("q", "k", "v")),
    "flash_attn_with_kvcache": (flash_attn.flash_attn_with_kvcache, _flash_cache),
    "flash_attn_3.flash_attn_func": (flash_attn_3.flash_attn_func, _rows("q", "k", "v")),
    "flash_attn_3.flash_attn_varlen_func": (flash_attn_3.flash_attn_varlen_func, _packed("q", "k", "v")),
    "flash_attn_3.flash_attn_with_kvcache": (flash_attn_3.flash_attn_with_kvcache, _flash_cache),
    "rotary_tables": (rotary_tables, lambda: {"positions": torch.arange(4), "rotary_dim": 8}),
    "apply_rotary": (apply_rotary, lambda: {"x": _x(2, 4, 2, 8), "cos": _x(4, 4), "sin": _x(4, 4)}),
    "merge": (merge, lambda: {"parts": [(_x(2, 4, 2, 8), _x(2, 2, 4))]}),
    "KVCache": (
        tilewise.KVCache,
        lambda: {"batch": 2, "max_seqlen": 4, "num_kv_heads": 1, "head_dim": 8, "dtype": torch.float32},
    ),
    "FlashAttention": (tilewise.nn.FlashAttention, lambda: {"d_model": 16, "num_heads": 2}),
}
MINE = (ValueError, TypeError, NotImplementedError)
SIZES = {
    "batch",
    "max_seqlen",
    "num_kv_heads",
    "head_dim",
    "head_dim_v",
    "d_model",
    "num_heads",
    "rotary_dim",
}


def bad_value(rng: random.Random, given: Any) -> Any:
    """Something that does not fit where `given` does, or seldom does."""
    scalars = (
        -1, 0, 2**31, 2**63, 2**64, 10**400, -(2**63), 1.5, -0.5, float("nan"), float("inf"), float("-inf"),
        1e300, 1e-300, True, None, "x", b"x", [], [1.0], {}, (1,), (None, -1), (2**64, 2**64), object(),
        1j, int,
    )  # fmt: skip
    tensors = (
        torch.tensor(1.0), torch.tensor([1, 2]), torch.zeros(0), _x(2, 4, 2, 8).int(), _x(3, 4, 2, 8),
        _x(2, 4, 2, 9),
        _x(2, 4, 2, 0), _x(8), _x(1, 2, 4, 2, 8), _x(2, 4, 2, 8).double(), _x(2, 4, 2, 8).to("meta"),
        _x(2, 4, 2, 8).to_sparse(), torch.zeros(2, 4, 2, 8, dtype=torch.complex64), _x(2, 4, 2, 8).bool(),
        torch.tensor([0, 9, 5]), torch.tensor([-3, 4], dtype=torch.int32), torch.tensor([[0, 2, 5]]),
        torch.zeros(2, 4, 2, 8).to(torch.float8_e4m3fn), _x(0, 4, 2, 8), _x(2, 4, 3, 8), _x(5, 3, 8),
    )  # fmt: skip
    if isinstance(given, torch.Tensor) and rng.random() < 0.7:
        return rng.choice(tensors)
    return rng.choice((*scalars, *tensors) if rng.random() < 0.3 else scalars)


def attempt(rng: random.Random) -> tuple[str, str] | None:
    """Call some function with one bad argument; what is wrong with its answer, and a script that shows it."""
    name = rng.choice(list(FUNCTIONS))
    function, good = FUNCTIONS[name]
    torch.manual_seed(0)
    arguments = good()
    parameters = [
        n
        for n, p in inspect.signature(function).parameters.items()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    argument = rng.choice(parameters)
    value = bad_value(rng, arguments.get(argument))
    if argument == "device":  # PyTorch says what it knows
        return None
    if argument in SIZES and isinstance(value, int) and value >= 2**31:
        return None  # PyTorch is asked for memory, and refuses in its own words
    shown = f"{name}({argument}={tilewise.core.checks.shown(value)})"
    try:
        result = function(**arguments | {argument: value})
    except MINE as error:
        return (
            None
            if _names(str(error), argument)
            else (f"{shown}: {type(error).__name__} does not name it", str(error))
        )
    except Exception as error:
        return f"{shown}: {type(error).__name__}", str(error)
    return _harm(shown, result, arguments.get(argument), value)


def _names(message: str, argument: str) -> bool:
    """Whether the message names the argument, or the one that it does not fit to."""
    words = {argument, argument.split("_")[0], *ALIASES.get(argument, ())}
    return "\n" not in message and any(word in message for word in words)


# The faces call some arguments by the library's names, where both are the same thing.
ALIASES = {
    "q": ("query", "k_cache"), "k": ("key",), "v": ("value",), "softmax_scale": ("scale",),
    "window_size": ("window",),
    "attn_mask": ("mask", "bias"), "is_causal": ("causal",), "cu_seqlens_q": ("max_seqlen_q",),
    "cu_seqlens_k": ("max_seqlen_k",),
    "cu_seqlens_k_new": ("k.shape",), "key": ("query",), "value": ("key",),
}  # fmt: skip


def _harm(shown: str, result: Any, given: Any, value: Any) -> tuple[str, str] | None:
    """A call that went through must have a finite answer where the numbers given are finite."""
    first = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(first, torch.Tensor) or first.is_meta or isinstance(value, torch.Tensor):
        return None
    if first.isnan().any():
        return f"{shown}: NaN without a word", ""
    return None
