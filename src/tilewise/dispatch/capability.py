"""What each backend can do, as data: what `dispatch`, `explain`, the tests and the documents read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewise.core.functions.expression import LENGTH, decode, reads_by_score
from tilewise.core.problem import AttentionProblem
from tilewise.core.torch_private import cpu_backward, cpu_forward
from tilewise.gpu.functions.distances import of_distances

DEVICES = {  # of each backend; "tiled" serves everything
    "hopper": "Hopper GPUs",
    "triton": "GPUs",
    "llvm": "CPUs",
    "aten": "CPUs",
    "tiled": "any device",
}
BACKENDS = tuple(DEVICES)
KERNELS_OF_GPUS = {name for name, device in DEVICES.items() if device.endswith("GPUs")}


class Row(NamedTuple):
    """A feature, when a problem has it, and why a backend refuses it: by its name, or "name backward".

    A reason may use the problem's fields as `{p.dtype}`. Rare features are left out of the documents, and
    need no reason for backends that an earlier row refuses.
    """

    feature: str
    applies: Callable[[AttentionProblem], object]
    reasons: dict[str, str]
    is_rare: bool = False


def _has_mask(p: AttentionProblem) -> bool:
    return p.mask_shape is not None


def _has_map(p: AttentionProblem) -> bool:
    """What Hopper's kernels know as a tile map."""
    return _has_mask(p) or (p.functions is not None and decode(p.functions).mask is not None)


def _has_function_of_distance(p: AttentionProblem) -> bool:
    """A score function that kernels know as a bias."""
    return of_distances(p) is not None


def _has_unseen_guards(p: AttentionProblem) -> bool:
    """Indices that may be out of range, of a mask function or computed from the score."""
    functions = None if p.functions is None else decode(p.functions)
    if functions is None or not functions.guarded:
        return False
    return functions.mask is not None or reads_by_score(functions, wants_grad=False)


def _has_bias(p: AttentionProblem) -> bool:
    return p.bias_shape is not None


def _has_any_bias(p: AttentionProblem) -> bool:
    """A bias, or a function in its place."""
    return _has_bias(p) or p.has_score_function


def _has_both_score_terms(p: AttentionProblem) -> bool:
    """A function, but of the distance with ALiBi, beside another term of the scores."""
    has_other = _has_bias(p) or (p.has_alibi and not _has_function_of_distance(p))
    return p.has_score_function and has_other


def _is_broadcast_over_keys(p: AttentionProblem) -> bool:
    return bool(p.bias_shape) and p.bias_needs_grad and p.bias_shape[3] == 1 < p.seqlen_k  # type: ignore[index]


def _is_shared_with_padding(p: AttentionProblem) -> bool:
    """Sequences that share a bias have blocks of keys that differ by their left padding."""
    return bool(p.bias_shape) and p.bias_needs_grad and p.has_leftpad and p.bias_shape[0] < p.batch  # type: ignore[index]


def _has_captured_gradient(p: AttentionProblem) -> bool:
    return p.functions is not None and decode(p.functions).wants_grad


def _has_scattered_gradient(p: AttentionProblem) -> bool:
    """Not where it is summed by distance first, which needs no atomics."""
    return _has_captured_gradient(p) and not _has_function_of_distance(p)


def _has_large_captured_gradient(p: AttentionProblem) -> bool:
    """More than is worth a sum for each head's split of keys."""
    return _has_captured_gradient(p) and p.num_captured * p.batch * p.num_kv_heads > MOST_CAPTURED


def _has_gradient_by_score(p: AttentionProblem) -> bool:
    """At places that a backward does not know: its scores may differ from the forward's in the last bit."""
    return p.functions is not None and reads_by_score(decode(p.functions))


def _is_empty(p: AttentionProblem) -> bool:
    return 0 in (p.batch, p.seqlen_q, p.seqlen_k, p.num_heads, p.num_kv_heads)


MOST_CAPTURED = 1 << 22  # numbers in sums of 8 bytes, times the splits
NO_CACHE = "has no caches or pages"

ROWS = (
    Row("float64", lambda p: p.dtype == torch.float64, {
        "triton": "has no float64, only float32, bfloat16 and float16",
        "hopper": "takes bfloat16 and float16, not {p.dtype}",
    }),
    Row("float32", lambda p: p.dtype == torch.float32, {
        "hopper": "takes bfloat16 and float16, not {p.dtype}",
    }),
    Row("8-bit products", lambda p: p.is_8_bit, dict.fromkeys(
        ("triton", "llvm", "aten"), "has no 8-bit products"
    )),
    Row("8-bit pages", lambda p: p.is_quantized, {
        "llvm": "has no quantized caches", "aten": NO_CACHE,
    }),
    Row("packed sequences", lambda p: p.is_packed, {"aten": "has no packed sequences"}),
    Row("caches and pages", lambda p: p.is_cached, {
        "aten": NO_CACHE, "hopper backward": "has no gradient of keys in a cache",
    }),
    Row("gradient of keys in pages", lambda p: p.is_paged, {
        f"{name} backward": "has no gradient of keys in pages" for name in BACKENDS[:-1]
    }),
    Row("gradient of packed queries with a cache", lambda p: p.is_packed and p.is_cached, {
        f"{name} backward": "has no gradient of packed queries with a cache" for name in BACKENDS[:-1]
    }),
    Row("left padding of a cache", lambda p: p.has_leftpad, {"aten": NO_CACHE}),
    Row("mask", _has_mask, {}),
    Row("gradient with a mask, deterministic", lambda p: _has_map(p) and p.deterministic, {
        "hopper backward": "has no deterministic gradient with a mask",
    }, is_rare=True),
    Row("gradient with a mask, head_dim over 128", lambda p: _has_map(p) and p.head_dim > 128, {
        "hopper backward": "has gradients with a mask up to head_dim 128, not {p.head_dim}",
    }, is_rare=True),
    Row("mask with a cache or packed sequences", lambda p: _has_mask(p) and (p.is_cached or p.is_packed), {
        "hopper": "takes a mask in dense calls only",
    }, is_rare=True),
    Row("mask with 8-bit products", lambda p: _has_map(p) and p.is_8_bit, {
        "hopper": "does not take a mask with 8-bit products",
    }, is_rare=True),
    Row("8-bit products with a cache", lambda p: p.is_cached and p.is_8_bit, {
        "hopper": "does not take a cache with 8-bit products",
    }, is_rare=True),
    Row("bias", _has_bias, {}),
    Row("bias of another dtype", lambda p: _has_bias(p) and p.bias_dtype != p.dtype, {
        "hopper": "takes a bias in query's dtype, {p.dtype}, not {p.bias_dtype}",
    }, is_rare=True),
    Row("bias with a cache or packed sequences", lambda p: _has_bias(p) and (p.is_cached or p.is_packed), {
        "hopper": "takes a bias in dense calls only",
    }, is_rare=True),
    Row("bias with 8-bit products", lambda p: _has_any_bias(p) and p.is_8_bit, {
        "hopper": "takes neither a bias nor a score function with 8-bit products",
    }, is_rare=True),
    Row("gradient with a bias, head_dim over 128", lambda p: _has_any_bias(p) and p.head_dim > 128, {
        "hopper backward": "has gradients with a bias or score function up to head_dim 128, not {p.head_dim}",
    }, is_rare=True),
    Row("mask functions", lambda p: p.functions is not None, {"aten": "takes no mask or score functions"}),
    Row("score functions", lambda p: p.has_score_function, {"aten": "takes no mask or score functions"}),
    Row("score functions beside a bias or ALiBi", _has_both_score_terms, {
        "hopper": "takes a score function or a bias or ALiBi slopes, not two of them",
    }, is_rare=True),
    Row("mask functions that may read out of range", _has_unseen_guards, {
        "hopper": "takes a mask function, and an index that the score says, only if all indices into "
        "captured tensors are in range for certain",
    }, is_rare=True),
    Row("gradient of tensors that functions read, but by distance", _has_scattered_gradient, {
        "hopper backward": "has a gradient of tensors that a function reads only by distance",
    }, is_rare=True),
    Row("the same gradient, deterministic", lambda p: _has_scattered_gradient(p) and p.deterministic, {
        "triton backward": "adds gradients of tensors that a score function reads in any order",
    }, is_rare=True),
    Row("gradient of large tensors that score functions read", _has_large_captured_gradient, {
        "llvm backward": "has no gradient of {p.num_captured} numbers that a score function reads",
    }, is_rare=True),
    Row("gradient of tensors at an index that depends on the score", _has_gradient_by_score, dict.fromkeys(
        ("triton backward", "llvm backward"),
        "has no gradient of tensors that are read at an index that depends on the score",
    ), is_rare=True),
    Row("window", lambda p: p.has_window, {"aten": "has no window"}),
    Row("softcap", lambda p: p.softcap > 0, {"aten": "has no softcap"}),
    Row("scale of 0 or less", lambda p: p.scale <= 0, {
        "aten": "masks before it scales, by 0 or less", "hopper": "takes a positive scale, not {p.scale}",
    }, is_rare=True),
    Row("sinks", lambda p: p.has_sinks, {"aten": "has no sinks"}),
    Row("ALiBi with a cache", lambda p: p.has_alibi and p.is_cached, {"aten": "has no ALiBi"}),
    Row("ALiBi without a cache", lambda p: p.has_alibi and not p.is_cached, {"aten": "has no ALiBi"}),
    Row("ALiBi with 8-bit products", lambda p: p.has_alibi and p.is_8_bit, {
        "hopper": "does not take ALiBi slopes with 8-bit products",
    }, is_rare=True),
    Row("gradient with ALiBi, head_dim over 128", lambda p: p.has_alibi and p.head_dim > 128, {
        "hopper backward": "has gradients with ALiBi up to head_dim 128, not {p.head_dim}",
    }, is_rare=True),
    Row("dropout", lambda p: p.dropout_p > 0, {"aten": "has no reproducible dropout"}),
    Row("dropout with a cache", lambda p: p.dropout_p > 0 and p.is_cached, {
        "hopper": "does not take dropout with a cache",
    }, is_rare=True),
    Row("dropout of a part that begins at any query and key", lambda p: p.dropout_step == 1, dict.fromkeys(
        ("hopper", "llvm"), "has dropout of parts of a call only if they begin at multiples of 16"
    ), is_rare=True),
    Row("dropout with 8-bit products", lambda p: p.dropout_p > 0 and p.is_8_bit, {
        "hopper": "does not take dropout with 8-bit products",
    }, is_rare=True),
    Row("gradient with dropout, head_dim over 128", lambda p: p.dropout_p > 0 and p.head_dim > 128, {
        "hopper backward": "has gradients with dropout up to head_dim 128, not {p.head_dim}",
    }, is_rare=True),
    Row("head_dim_v other than head_dim", lambda p: p.head_dim != p.head_dim_v, {
        "aten": "needs head_dim == head_dim_v",
    }),
    Row("causal, bottom-right", lambda p: p.causal and p.seqlen_q != p.seqlen_k, {
        "aten": "aligns causal masks top-left",
    }),
    Row("mask and bias", lambda p: _has_mask(p) and _has_bias(p), {
        "aten": "takes a mask or a bias, not both",
    }),
    Row("gradient of a bias", lambda p: p.bias_needs_grad, {
        "aten": "has no bias gradient",
    }),
    Row("gradient of a bias that is broadcast over keys", _is_broadcast_over_keys, {
        "llvm": "has no gradient of a bias that is broadcast over keys",
    }, is_rare=True),
    Row("gradient of a bias that sequences with left padding share", _is_shared_with_padding, {
        "llvm": "has no gradient of a bias that sequences with left padding share",
    }, is_rare=True),
    Row("gradient of lse", lambda p: p.lse_needs_grad, {"aten": "has no lse gradient"}),
    Row("sequences of 2^30 tokens and more", lambda p: max(p.seqlen_q, p.seqlen_k) >= LENGTH, dict.fromkeys(
        ("triton", "llvm"), f"counts positions in 32 bits: sequences are to be shorter than {LENGTH}"
    ), is_rare=True),
    Row("empty tensors", _is_empty, {
        "aten": "fails on empty tensors", "hopper": "does not take empty dimensions",
    }, is_rare=True),
)  # fmt: skip


def table() -> str:
    """`ROWS` in Markdown: what each backend serves."""
    header = (f"`{name}`: {device}" for name, device in DEVICES.items())
    lines = [f"| | {' | '.join(header)} |", f"|---|{':---:|' * len(BACKENDS)}"]
    for row in (row for row in ROWS if not row.is_rare):
        cells = [
            "–" if name in row.reasons else "forward" if f"{name} backward" in row.reasons else "✓"
            for name in BACKENDS
        ]
        lines.append(f"| {row.feature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def refusal(name: str, problem: AttentionProblem, is_backward: bool = False) -> str | None:
    """Why a backend does not serve a problem: what the machine lacks, what the table says, or which shapes
    its kernels do not take. None if it serves."""
    if lacks := _machine(name, problem):
        return lacks
    for row in ROWS:
        reason = row.reasons.get(name)
        if reason is None and is_backward:
            reason = row.reasons.get(f"{name} backward")
        if reason is not None and row.applies(problem):
            return reason.format(p=problem)
    if name != "hopper":
        return None
    from tilewise.gpu.hopper.plan import unserved_shape

    return unserved_shape(problem)


def _machine(name: str, problem: AttentionProblem) -> str | None:
    """What the package or the device lacks, whatever the problem."""
    if DEVICES[name] == "CPUs" and problem.device_type != "cpu":
        return "runs on the CPU only"
    if name == "aten" and None in (cpu_forward, cpu_backward):
        return "needs operators that this PyTorch does not have"
    if name == "llvm":
        from tilewise.cpu.host.compile import unavailable

        return unavailable()
    if name in ("triton", "hopper"):
        from tilewise.gpu.launch.launch_plan import HAS_TRITON, is_interpreted

        if not HAS_TRITON:
            return "needs the package triton, which is not installed"
        if name == "hopper":
            from tilewise.gpu.hopper.plan import missing_device

            return missing_device(problem)
        if problem.device_type != "cuda" and not (is_interpreted() and problem.device_type == "cpu"):
            return f"runs on GPUs, not on device type {problem.device_type!r}"
    return None
