"""What shapes, dtypes, devices and scalars of a call must be: every check that needs no values.

`problem.describe` makes all of them. Here `s` is a `problem.Inputs` that holds what each tensor shows without
its values (shape, dtype, device, needs_grad), `options` a `problem.Options`.
"""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from tilewise.core.signature import compute_dtype
from tilewise.core.torch_private import compiles_here, is_any_autocast_enabled, number, while_tracing

PRECISIONS = ("ieee", "tf32", "fp8", "int8")
EIGHT_BIT = ("fp8", "int8")  # query, key, weights and value are rounded to 8 bits
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 576
MAX_WINDOW = 1 << 40  # longer than any sequence
MIN_SOFTCAP = 1e-20  # by which float32 scores are divided
HUGE = 1 << 128


def check_dtypes_and_devices(s: Any) -> None:
    for name in ("query", "key", "value"):
        if getattr(s, name) is None:
            raise TypeError(f"{name}=None must be a torch.Tensor")
    if s.query.dtype not in DTYPES:
        raise TypeError(f"query.dtype={s.query.dtype} must be float64, float32, bfloat16 or float16")
    in_blocks = s.query_blocks is not None
    for name, t, scale in (("key", s.key, s.key_scale), ("value", s.value, s.value_scale)):
        scale = None if in_blocks else scale
        if scale is not None and t.dtype != torch.float8_e4m3fn:
            raise TypeError(f"{name}.dtype={t.dtype} must be float8_e4m3fn when {name}_scale is given")
        if scale is None and t.dtype != s.query.dtype:
            hint = ": cast one of them, as autocast does not" if is_any_autocast_enabled() else ""
            raise TypeError(f"{name}.dtype={t.dtype} must equal query.dtype={s.query.dtype}{hint}")
    for name, t in zip(s._fields, s, strict=True):
        if t is not None and name not in ("dropout_seed", "captured_layout") and t.device != s.query.device:
            raise ValueError(f"{name}.device={t.device} must equal query.device={s.query.device}")
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "leftpad_k", "page_table"):
        t = getattr(s, name)
        if t is not None and t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}.dtype={t.dtype} must be int32 or int64")
    if s.mask is not None and s.mask.dtype != torch.bool:
        raise TypeError(
            f"mask.dtype={s.mask.dtype} must be torch.bool (True = attend); pass additive scores as bias"
        )
    for name in ("bias", "alibi_slopes", "sinks"):
        t = getattr(s, name)
        if t is not None and (not t.dtype.is_floating_point or (name == "bias" and t.dtype.itemsize == 1)):
            raise TypeError(f"{name}.dtype={t.dtype} must be a floating-point dtype of 16 bits or more")


def check_shapes(s: Any, is_packed: bool, is_paged: bool) -> int:
    """Check ranks, head_dim and heads; return the batch size."""
    ranks = {3: "(total, heads, head_dim)", 4: "(batch, seqlen, heads, head_dim)"}
    rank_k = 3 if s.cu_seqlens_k is not None else 4
    for name, rank in (("query", 3 if is_packed else 4), ("key", rank_k), ("value", rank_k)):
        t, shape = getattr(s, name), ranks[rank]
        if t.ndim != rank:
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} has {t.ndim} dimensions, must have {rank}: {shape}"
            )
    q, k, v = tuple(s.query.shape), tuple(s.key.shape), tuple(s.value.shape)
    for name, size in (("query", q[-1]), ("value", v[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}.shape[-1]={size} (head_dim) must be between 1 and {MAX_HEAD_DIM}")
    if k[-1] != q[-1]:
        raise ValueError(f"key.shape[-1]={k[-1]} (head_dim) must equal query.shape[-1]={q[-1]}")
    if v[:-1] != k[:-1]:
        raise ValueError(f"value.shape={v} must equal key.shape={k} in all but the last dimension")
    heads, kv_heads = q[-2], k[-2]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        is_by_head = not is_packed and k[1] > 0 and q[1] % k[1] == 0  # as of (batch, heads, seqlen, head_dim)
        hint = "; tensors (batch, heads, seqlen, head_dim) want layout='bhsd'" if is_by_head else ""
        raise ValueError(f"query heads {heads} must be divisible by KV heads {kv_heads}{hint}")
    if is_packed and (s.cu_seqlens_k is not None or s.seqlens_k is None):
        return _check_packed_shapes(s)
    batch = s.cu_seqlens_q.shape[0] - 1 if is_packed else q[0]
    if not is_paged and k[0] != batch:
        raise ValueError(f"key.shape[0]={k[0]} (batch) must equal query.shape[0]={batch}")
    if is_paged and (s.page_table.ndim != 2 or s.page_table.shape[0] != batch or k[1] < 1):
        raise ValueError(
            f"page_table.shape={tuple(s.page_table.shape)} must be (batch={batch}, pages a sequence) "
            f"and the page size {k[1]} at least 1"
        )
    if (is_paged or s.leftpad_k is not None) and s.seqlens_k is None:
        raise ValueError("seqlens_k=None must give each sequence's length with page_table or leftpad_k")
    for name in ("key_scale", "value_scale"):
        t = getattr(s, name)
        in_pages = t is not None and s.key_blocks is None
        if in_pages and (not is_paged or tuple(t.shape) != (k[0], kv_heads)):
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} must be (pages, KV heads)=({k[0]}, {kv_heads}), with pages"
            )
    if (s.key_scale is None) != (s.value_scale is None):
        raise ValueError("key_scale and value_scale must be given together, or neither")
    for name in ("seqlens_k", "leftpad_k"):
        t = getattr(s, name)
        if t is not None and tuple(t.shape) != (batch,):
            raise ValueError(f"{name}.shape={tuple(t.shape)} must be (batch,)=({batch},)")
    return batch


def _check_packed_shapes(s: Any) -> int:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        t = getattr(s, name)
        if t is None or t.ndim != 1 or t.shape[0] < 1:
            found = None if t is None else tuple(t.shape)
            raise ValueError(f"{name}.shape={found} must be (batch + 1,): offsets of each sequence's start")
    for name in ("seqlens_k", "leftpad_k", "page_table"):
        if getattr(s, name) is not None:
            raise ValueError(f"{name} must be None when keys are packed: it describes a cache")
    if s.cu_seqlens_q.shape != s.cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k.shape={tuple(s.cu_seqlens_k.shape)} must equal "
            f"cu_seqlens_q.shape={tuple(s.cu_seqlens_q.shape)}"
        )
    return s.cu_seqlens_q.shape[0] - 1


def shown(value: Any) -> str:
    """A value in the line of an error."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 80 else f"{line[:77]}..."


_FUNCTION_OF = {"mask": "mask_mod", "bias": "score_mod"}


def check_tensors(**tensors: Any) -> None:
    """Raises TypeError if something is no tensor, or one of another layout than strided."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            meant = _FUNCTION_OF.get(name) if callable(t) else None
            hint = f": pass a function as {meant}" if meant else ""
            raise TypeError(f"{name}={type(t).__name__} must be a torch.Tensor{hint}")
        if t.is_nested:
            kind = f"nested of layout={t.layout}"
            raise TypeError(
                f"{name} is {kind}, must not be nested: attention_varlen takes values() and offsets()"
            )
        if t.layout != torch.strided:
            raise TypeError(f"{name}.layout={t.layout} must be torch.strided: pass to_dense()")


def check_inputs(inputs: Any) -> None:
    """`check_tensors` of a `problem.Inputs`, all that are given, and those that must be."""
    needed = ("query", "key", "value")
    check_tensors(**{name: t for name, t in inputs._asdict().items() if t is not None or name in needed})


def check_known(
    function: Callable[..., Any], arguments: dict[str, Any], others: tuple[str, ...] = ()
) -> None:
    """Raises TypeError for the first that `function` does not take, with what it may have meant.

    others: what it takes besides its named parameters.
    """
    if not arguments:
        return
    known = (*_parameters(function), *others)
    for name, value in arguments.items():
        if name not in known:
            given = name if compiles_here() else f"{name}={shown(value)}"
            raise TypeError(f"{given} is no argument of {function.__name__}: {_meant(name, known)}")


@while_tracing
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)


@while_tracing
def _meant(name: str, known: tuple[str, ...]) -> str:
    """What an unknown argument is called here: by its name elsewhere, or the name most like it."""
    ours, note = _ALSO_CALLED.get(name, (name, ""))
    if ours in known:
        return f"did you mean {ours}{note}?"
    same = [other for other in known if _ALSO_CALLED.get(other, ("",))[0] == ours]  # a drop-in's own name
    lower = {other.lower(): other for other in known}
    nearest = same or [lower[n] for n in difflib.get_close_matches(name.lower(), lower, 1)]
    if nearest:
        return f"did you mean {nearest[0]}?"
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    return f"it has {', '.join(known)}"


_VARLEN = "packed sequences are attention_varlen's, with cu_seqlens_q and cu_seqlens_k, or cache.reserve's"
_ALSO_CALLED = {  # the name elsewhere: the name here, and how the two differ
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling", "scale_factor"), ("scale", "")),
    "is_causal": ("causal", " (bottom-right aligned)"),
    "window_size": ("window", ", (left, right) with None for unbounded"),
    "sliding_window": ("window", ", (keys before, keys after) each query"),
    **dict.fromkeys(("soft_cap", "logit_softcap", "logits_soft_cap", "logit_soft_cap"), ("softcap", "")),
    **dict.fromkeys(
        ("attn_mask", "attention_mask"), ("mask", " (True = attend), or bias for additive scores")
    ),
    "key_padding_mask": ("mask", ", as mask[:, None, None, :] with True = attend"),
    **dict.fromkeys(("attn_bias", "attention_bias"), ("bias", "")),
    **dict.fromkeys(("s_aux", "sink", "attention_sinks", "learnable_sink"), ("sinks", "")),
    **dict.fromkeys(("dropout", "attention_dropout"), ("dropout_p", "")),
    **dict.fromkeys(("return_softmax_lse", "return_attn_probs"), ("return_lse", "")),
    **dict.fromkeys(("cos", "rotary_cosine"), ("rotary_cos", "")),
    **dict.fromkeys(("sin", "rotary_sine"), ("rotary_sin", "")),
    "block_mask": ("mask_mod", ""),
    **dict.fromkeys(("q", "queries"), ("query", "")),
    **dict.fromkeys(("k", "keys"), ("key", "")),
    **dict.fromkeys(("v", "values"), ("value", "")),
}
_ELSEWHERE = {
    "enable_gqa": "leave it out, as key and value may always have fewer heads than query",
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), _VARLEN),
}


def check_number(name: str, value: Any) -> None:
    """Raises TypeError if value is no number; a tensor is none, as it can change after it was looked at, and
    neither is a bool."""
    if isinstance(value, bool) or not isinstance(number(name, value), Real | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{name}={shown(value)} must be a number")
    if isinstance(value, Integral) and abs(int(value)) >= HUGE:  # which no floating-point number is
        raise ValueError(f"{name}={shown(value)} must be of at most 128 bits")


def check_integers(least: int, most: int | None = None, /, **values: Any) -> None:
    """Raises ValueError unless all are integers of at least `least`, and at most `most`."""
    for name, value in values.items():
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < least or (most is not None and value > most):
            bound = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{name}={shown(value)} must be an integer {bound}")


def check_flag(name: str, value: Any) -> None:
    """Raises TypeError if value is neither true nor false; None is false."""
    is_flag = value is None or isinstance(number(name, value), bool | torch.SymBool)
    is_flag = is_flag or type(value).__name__ in ("bool", "bool_")  # NumPy's, of 2 and of 1
    if not is_flag and not (isinstance(value, Integral) and value in (0, 1)):
        raise TypeError(f"{name}={shown(value)} must be True or False")


def window_bound(bound: Any) -> Any:
    """A bound of a window; one that no sequence reaches is none, as kernels compute with 64 bits."""
    if bound is None or isinstance(bound, torch.SymInt):
        return bound
    return int(bound) if bound < MAX_WINDOW else None


def check_scalars(options: Any, has_seed: bool, dtype: torch.dtype) -> None:
    for name in ("softcap", "dropout_p"):
        check_number(name, getattr(options, name))
    if options.scale is not None:
        check_number("scale", options.scale)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        value = getattr(options, name)
        if value is not None and not isinstance(value, Integral | torch.SymInt):
            raise TypeError(f"{name}={shown(value)} must be an integer")
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} must be at least 0")
    if not isinstance(options.precision, str):
        raise TypeError(f"precision={shown(options.precision)} must be a string")
    for name in ("causal", "deterministic"):
        check_flag(name, getattr(options, name))
    largest = torch.finfo(compute_dtype(dtype)).max
    for name in ("scale", "softcap"):
        value = getattr(options, name)
        if value is not None and math.isfinite(value) and abs(value) > largest:
            raise ValueError(f"{name}={value} must be at most {largest:.3g}, the largest number of scores")
    for name, bound in (("left", options.window_left), ("right", options.window_right)):
        if bound is not None and bound < 0:
            raise ValueError(f"window {name}={bound} must be None (unbounded) or at least 0")
    if not (math.isfinite(options.softcap) and options.softcap >= 0):
        raise ValueError(f"softcap={options.softcap} must be 0 (off) or a positive finite number")
    if 0 < options.softcap < MIN_SOFTCAP:
        raise ValueError(f"softcap={options.softcap} must be 0 (off) or at least {MIN_SOFTCAP}")
    if not 0 <= options.dropout_p < 1:
        raise ValueError(f"dropout_p={options.dropout_p} must be in [0, 1)")
    if options.dropout_p > 0 and not has_seed:
        raise ValueError(f"dropout_seed=None must be a () int64 tensor when dropout_p={options.dropout_p}")
    if options.scale is not None and not math.isfinite(options.scale):
        raise ValueError(f"scale={options.scale} must be a finite number, or None for 1/sqrt(head_dim)")
    if options.precision not in PRECISIONS:
        raise ValueError(f"precision={options.precision!r} must be 'ieee', 'tf32', 'fp8' or 'int8'")


def check_8_bit(s: Any, precision: str) -> None:
    """What 8-bit products are not made of."""
    if s.query.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"query.dtype={s.query.dtype} must be bfloat16 or float16 when precision={precision!r}"
        )
    if s.page_table is not None and s.key_scale is not None and s.leftpad_k is not None:
        raise NotImplementedError(
            f"precision={precision!r} takes no left padding of 8-bit pages: 'ieee' does"
        )


def check_blocks(s: Any, precision: str) -> None:
    """What tensors in 8 bits (`core.quantized.Quantized`) go with."""
    rounded = "int8" if s.query_blocks.dtype == torch.int8 else "fp8"
    if precision != rounded:
        raise ValueError(
            f"precision={precision!r} must be {rounded!r}, as the tensors were quantized, or left out"
        )
    parts = [
        getattr(s, f"{name}_{part}") for name in ("query", "key", "value") for part in ("blocks", "scale")
    ]
    if any(t is None for t in parts):
        raise TypeError("query, key and value must all be Quantized, or none")
    for name in ("query", "key", "value"):
        t, scale = getattr(s, f"{name}_blocks"), getattr(s, f"{name}_scale")
        heads = getattr(s, name).shape[-2]
        if t.ndim != 4 or t.shape[0] != heads or tuple(scale.shape) != tuple(t.shape[:2]):
            raise ValueError(
                f"{name}_blocks.shape={tuple(t.shape)} and {name}_scale.shape={tuple(scale.shape)} must be "
                f"(heads={heads}, blocks, rows, columns) and (heads, blocks)"
            )
    if s.seqlens_k is not None:
        raise NotImplementedError("a cache takes no Quantized query: attention_with_cache takes tensors")
    if any(t is not None and t.needs_grad for t in s):
        raise NotImplementedError(
            "Quantized tensors give no gradients: precision='fp8' does, of bfloat16 and float16 tensors"
        )


def refuse_other_derivatives(precision: str) -> None:
    """Raises NotImplementedError if products of this precision have first gradients only."""
    if precision in EIGHT_BIT:
        raise NotImplementedError(
            f"precision={precision!r} has gradients in reverse mode, once: 'ieee' has more derivatives"
        )


def check_broadcastable(full: tuple[int | None, ...], **tensors: Any) -> None:
    """Raises ValueError unless each tensor's shape is broadcastable to full.

    None in full is any size: lengths of packed sequences are known only to `values.check_values`. Here as
    elsewhere, no size is looked for with `in`: Dynamo does not find a constant among symbols.
    """
    for name, t in tensors.items():
        shape = tuple(getattr(t, "shape", ()))  # what is no tensor is named by others
        padded = (1,) * (len(full) - len(shape)) + shape
        if len(shape) > len(full) or any(b is not None and 1 != a != b for a, b in zip(padded, full)):
            is_padding = padded[-2:] == (full[0], full[3]) and padded[:-2] == (1, 1)
            is_headless = len(shape) == 3 and shape == (full[0], *full[2:])
            hint = f"; of padding (batch, seqlen_k) pass {name}[:, None, None, :]" if is_padding else ""
            hint = f"; of (batch, seqlen_q, seqlen_k) pass {name}[:, None]" if is_headless else hint
            sizes = ", ".join("any" if n is None else str(n) for n in full)
            raise ValueError(
                f"{name}.shape={shape} must be broadcastable to "
                f"(batch, heads, seqlen_q, seqlen_k)=({sizes}){hint}"
            )


def warn_of_two_meanings(mask: Tensor | None, full: tuple[int, int, int, int]) -> None:
    """Warns of a mask (seqlen_q, seqlen_k) that may be padding (batch, seqlen_k). `full`: all four sizes."""
    shape = tuple(getattr(mask, "shape", ()))
    if shape == (full[0], full[3]) == full[2:] != (1, 1) and not compiles_here():
        warnings.warn(
            f"mask.shape={shape} is taken as (seqlen_q, seqlen_k), which mask[None, None] says; "
            "of padding (batch, seqlen_k), as large here, pass mask[:, None, None, :]",
            stacklevel=4,
        )


LEARNED_SLOPES = (
    "has a gradient in attention, and in attention_varlen where cu_seqlens_q and cu_seqlens_k are one "
    "tensor; here pass -slope * distance as bias"
)


def check_score_tensors(
    s: Any, batch: int, heads: int, seqlen_q: int, seqlen_k: int, is_packed: bool
) -> None:
    """mask, bias, alibi_slopes and sinks: everything that changes scores."""
    full = (batch, heads, None, None) if is_packed else (batch, heads, seqlen_q, seqlen_k)
    check_broadcastable(full, mask=s.mask, bias=s.bias)
    if s.alibi_slopes is not None:
        if tuple(s.alibi_slopes.shape) not in ((heads,), (batch, heads)):
            raise ValueError(
                f"alibi_slopes.shape={tuple(s.alibi_slopes.shape)} must be "
                f"(heads,)=({heads},) or (batch, heads)=({batch}, {heads})"
            )
        if s.alibi_slopes.needs_grad:
            raise NotImplementedError(f"alibi_slopes.requires_grad=True {LEARNED_SLOPES}")
    if s.sinks is not None and tuple(s.sinks.shape) != (heads,):
        raise ValueError(f"sinks.shape={tuple(s.sinks.shape)} must be (heads,)=({heads},): one logit a head")
