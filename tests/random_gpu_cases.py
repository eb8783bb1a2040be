"""Random attention problems on a GPU, forward and backward, by the project's error rule.

`python tests/random_gpu_cases.py hopper 1000 [first seed]` checks so many; `triton` likewise. `cache` checks
many queries on caches, forward only, by any kernels, and `decode` few, mostly on 8-bit pages.
"""

from __future__ import annotations

import random
import sys
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

import caches
import tilewise
from tilewise import reference
from tilewise.core.problem import Inputs, Options
from tilewise.core.signature import Request
from tilewise.dispatch import plans
from tilewise.testing import check_attention, compare

HEAD_DIMS = ((64, 64), (64, 64), (128, 128), (128, 128), (80, 80), (96, 96), (112, 112), (40, 40), (160, 160))
WIDE = ((192, 128), (192, 192), (256, 256), (128, 64))
EDGES = (1, 2, 15, 16, 31, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 257, 383, 385)
LENGTHS = (*EDGES, 500, 777, 1000, 1300)
CASES_A_KERNEL = 20
PAGE_SIZES = (None, None, 8, 16, 16, 32, 64, 128, 256)


def draw(seed: int, backend: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Any], float]:
    """query, key, value, options, and how much steeper than usual the scores are.

    What is compiled into a kernel changes every CASES_A_KERNEL seeds, so that a long run tests more than
    it compiles.
    """
    kernel_rng, rng = random.Random(seed // CASES_A_KERNEL), random.Random(seed)
    torch.manual_seed(seed)
    dtype = kernel_rng.choice((torch.bfloat16, torch.bfloat16, torch.float16))
    dim, dim_v = kernel_rng.choice(HEAD_DIMS + WIDE)
    is_packed, has_softcap, has_sinks = (kernel_rng.random() < share for share in (0.3, 0.2, 0.2))
    has_right, has_left = kernel_rng.random() < 0.6, kernel_rng.random() < 0.3
    kv_heads, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4, 8))
    heads, batch = kv_heads * group, rng.choice((1, 1, 2, 3))
    steepness = rng.choice((1.0, 1.0, 1.0, 4.0, 20.0))
    options: dict[str, Any] = {"scale": rng.choice((None, None, 0.3))}
    rows_q: tuple[int, ...]
    rows_k: tuple[int, ...]
    if is_packed:
        lengths = [[rng.choice((0, 5, *EDGES)) for _ in range(batch + 1)] for _ in range(2)]
        offsets = [torch.tensor([0, *n], device="cuda").cumsum(0) for n in lengths]
        offset_dtype = rng.choice((torch.int32, torch.int64))
        for name, starts in zip("qk", offsets, strict=True):
            starts[-1] = starts[-1].clamp(min=1)
            options[f"cu_seqlens_{name}"] = starts.to(offset_dtype)
        rows_q, rows_k = ((int(starts[-1]),) for starts in offsets)
    else:
        seqlen_q, seqlen_k = rng.choice(LENGTHS), rng.choice(LENGTHS)
        rows_q, rows_k = (batch, seqlen_q), (batch, seqlen_q if rng.random() < 0.4 else seqlen_k)
    q = _tensor(rng, (*rows_q, heads, dim), dtype) * steepness
    k, v = (_tensor(rng, (*rows_k, kv_heads, d), dtype) for d in (dim, dim_v))
    if has_softcap:
        options["softcap"] = rng.choice((2.0, 30.0))
    if has_sinks:
        options["sinks"] = torch.randn(heads, device="cuda")
    right = rng.choice((0, 0, 0, 3, 50, 300)) if has_right else None
    left = rng.choice((0, 5, 40, 200, 600)) if has_left else None
    if (left, right) == (None, 0):
        options["causal"] = True
    elif (left, right) != (None, None):
        options["window"] = (left, right)
    if backend == "triton" or max(dim, dim_v) <= 128:  # of wider heads Hopper's backward takes none of these
        options |= _terms_of_scores(kernel_rng, rng, q, k, is_packed)
    return q, k, v, options, steepness


def _terms_of_scores(
    kernel_rng: random.Random, rng: random.Random, q: Tensor, k: Tensor, is_packed: bool
) -> dict[str, Any]:
    """Masks, biases, ALiBi and dropout."""
    has_mask, has_bias, has_alibi, has_dropout = (kernel_rng.random() < 0.25 for _ in range(4))
    options: dict[str, Any] = {}
    if has_alibi:
        options["alibi_slopes"] = torch.rand(q.shape[-2], device="cuda") * 0.3
    if has_dropout:
        options["dropout_p"] = rng.choice((0.1, 0.5))
    if is_packed:
        return options
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if has_mask:
        options["mask"] = torch.rand(_broadcast(rng, full), device="cuda") < rng.choice((0.2, 0.8))
    if has_bias:
        options["bias"] = torch.randn(_broadcast(rng, full), device="cuda").to(q.dtype)
    return options


def _broadcast(rng: random.Random, full: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if rng.random() < 0.35 else n for n in full)


def _tensor(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers, in one of the memory layouts that callers have."""
    how = rng.choice(("dense", "dense", "heads first", "slice"))
    if how == "slice":
        return torch.randn((*shape[:-1], shape[-1] + 8), device="cuda").to(dtype)[..., 8:]
    if how == "heads first":
        order = [*range(len(shape) - 3), len(shape) - 2, len(shape) - 3]
        return torch.randn([shape[i] for i in order] + [shape[-1]], device="cuda").to(dtype).transpose(-2, -3)
    return torch.randn(shape, device="cuda").to(dtype)


def check(seed: int, backend: str) -> None:
    """Forward and backward; the forward alone where steep scores make gradients nearly cancel."""
    q, k, v, options, steepness = draw(seed, backend)
    if steepness == 1.0:
        check_attention(q, k, v, backend=backend, seed=seed, holds_mean=False, **options)
        return
    options = {name: option for name, option in options.items() if option is not None}
    options.pop("dropout_p", None)
    run: Any = tilewise.attention_varlen if "cu_seqlens_q" in options else tilewise.attention
    out, lse = run(q, k, v, return_lse=True, backend=backend, **options)
    exact, baseline = (reference.attention(q, k, v, dtype=t, **options) for t in (torch.float64, q.dtype))
    for name, found, e, b in zip(("out", "lse"), (out, lse), exact, baseline, strict=True):
        report = compare(name, found, e, b)
        assert report.max_error <= report.max_budget, str(report)


def draw_cache(seed: int, is_decoding: bool) -> tuple[Inputs, Options, list[Tensor], list[int], list[int]]:
    """Inputs, whose cache is NaN behind each sequence; options, keys and values, lengths, ends of queries."""
    kernel_rng, rng = random.Random(seed // CASES_A_KERNEL), random.Random(seed)
    torch.manual_seed(seed)
    dtype = kernel_rng.choice((torch.bfloat16, torch.bfloat16, torch.float16))
    dims, page_size = kernel_rng.choice(HEAD_DIMS + WIDE), kernel_rng.choice(PAGE_SIZES)
    is_packed, has_softcap, has_sinks = (kernel_rng.random() < share for share in (0.5, 0.2, 0.2))
    has_right, has_left = kernel_rng.random() < 0.7, kernel_rng.random() < 0.3
    kv_heads, group, batch = rng.choice((1, 2, 3)), rng.choice((1, 2, 4, 8, 3)), rng.choice((1, 2, 3, 5))
    capacity, steepness = rng.choice((256, 512, 1536)), rng.choice((1.0, 1.0, 1.0, 4.0, 20.0))
    lengths = [min(rng.choice((0, 5, *LENGTHS, capacity)), capacity) for _ in range(batch)]
    same = rng.choice([n for n in LENGTHS if (n <= 16) == is_decoding])
    is_packed = is_packed and not is_decoding
    ends = [0, *accumulate(rng.choice((0, 5, *EDGES)) if is_packed else same for _ in lengths)]
    q = _tensor(rng, (max(1, ends[-1]), kv_heads * group, dims[0]), dtype) * steepness
    ends[-1] = len(q)
    tokens = [_tensor(rng, (batch, capacity, kv_heads, d), dtype) for d in dims]
    stored, tensors = caches.cached(tokens, lengths, page_size=page_size)
    tensors["seqlens_k"] = tensors["seqlens_k"].to(rng.choice((torch.int32, torch.int64)))
    if page_size is not None and kernel_rng.random() < (0.8 if is_decoding else 0.3):
        factor = rng.choice((1.0, 0.37))
        scales = [factor * 2.0 ** torch.randint(-3, 4, (len(t), kv_heads), device="cuda") for t in stored]
        stored, tokens = caches.in_8_bits(stored, scales, tensors["page_table"])
        tensors |= dict(zip(("key_scale", "value_scale"), scales))
    if is_packed:
        tensors["cu_seqlens_q"] = torch.tensor(ends, dtype=torch.int32, device="cuda")
    else:
        q = q.unflatten(0, (batch, same))
    if has_sinks:
        tensors["sinks"] = torch.randn(kv_heads * group, device="cuda")
    options = Options(
        window_left=rng.choice((0, 5, 40, 200, 600)) if has_left else None,
        window_right=rng.choice((0, 0, 0, 3, 50)) if has_right else None,
        softcap=rng.choice((2.0, 30.0)) if has_softcap else 0.0,
        scale=rng.choice((None, None, 0.3)),
    )
    return Inputs(q, *stored, **tensors), options, tokens, lengths, ends


def check_cache(seed: int, is_decoding: bool) -> None:
    """The forward by itself, sequence by sequence, all of them within one budget."""
    inputs, options, (k, v), lengths, ends = draw_cache(seed, is_decoding)
    out, lse, _ = plans.attend(inputs, options, None, Request(), are_values_known=True)
    assert out is not None and lse is not None
    found = out.flatten(0, -3), lse if lse.ndim == 2 else lse.transpose(0, 1).flatten(1)
    q, window = inputs.query.flatten(0, -3), (options.window_left, options.window_right)
    parts = []
    for dtype in (torch.float64, q.dtype):
        results = [
            reference.attention(
                q[None, start:end], k[b : b + 1, :length], v[b : b + 1, :length], dtype=dtype, window=window,
                softcap=options.softcap, scale=options.scale, sinks=inputs.sinks,
            )
            for b, ((start, end), length) in enumerate(zip(pairwise(ends), lengths, strict=True))
        ]  # fmt: skip
        parts.append((torch.cat([r[0][0] for r in results]), torch.cat([r[1][0] for r in results], 1)))
    for name, *tensors in zip(("out", "lse"), found, *parts, strict=True):
        report = compare(name, *tensors)
        assert report.max_error <= report.max_budget, str(report)


def main() -> None:
    backend, count = sys.argv[1], int(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialized memory with NaN
    failures = 0
    for seed in range(first, first + count):
        try:
            is_cached = backend in ("cache", "decode")
            check_cache(seed, backend == "decode") if is_cached else check(seed, backend)
        except (AssertionError, RuntimeError) as problem:
            failures += 1
            print(f"seed {seed}: {problem!r}", flush=True)
        done = seed - first + 1
        if done % 10 == 0 or done == count:
            print(f"{done} cases from seed {first}, {failures} failures", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
