"""One small call of each GPU kernel, for NVIDIA's compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # so that a tensor ends where its memory does
    compute-sanitizer --tool memcheck python tests/sanitized_kernels.py triton

Tools: memcheck, racecheck. Names of cases after the backend run those alone. A first run without the tool
compiles.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.rotary import rotary_tables


def draw(*shape: int) -> Tensor:
    """Drawn on the CPU: only our own kernels and copies run under the tool."""
    return torch.randn(*shape).bfloat16().cuda()


def dense(
    dim: int,
    backend: str,
    seqlen_q: int = 133,
    seqlen_k: int = 150,
    dim_v: int | None = None,
    **options: Any,
) -> None:
    """Forward and backward of two query heads on one key head; lengths are no multiples of a tile."""
    shapes = ((seqlen_q, 2, dim), (seqlen_k, 1, dim), (seqlen_k, 1, dim_v or dim))
    leaves = [draw(1, *shape).requires_grad_() for shape in shapes]
    if "bias" in options:
        leaves.append(options["bias"].requires_grad_())
    out = tilewise.attention(*leaves[:3], backend=backend, **options)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def packed(dim: int, backend: str) -> None:
    starts = torch.tensor([0, 70, 70, 200], dtype=torch.int32).cuda()
    leaves = [draw(200, 2, dim).requires_grad_() for _ in range(3)]
    offsets = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    out = tilewise.attention_varlen(*leaves, **offsets, causal=True, backend=backend)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def cached(dim: int, backend: str) -> None:
    """New tokens turned and appended in one launch, then decoding."""
    cache = tilewise.KVCache(2, 512, 2, dim, dtype=torch.bfloat16, device="cuda")
    cache.append(draw(2, 300, 2, dim), draw(2, 300, 2, dim))
    cos, sin = rotary_tables(torch.arange(512), dim)
    query, key, value = (draw(2, 1, heads, dim) for heads in (4, 2, 2))
    turned = {"rotary_cos": cos.cuda(), "rotary_sin": sin.cuda()}
    tilewise.attention_with_cache(query, cache, key, value, **turned, backend=backend)


def paged(
    dim: int,
    backend: str,
    lengths: Sequence[int] = (333, 5, 261),
    queries: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Several queries on pages of 16, of sequences that end anywhere in a page."""
    pages = sum((length + queries) // 16 + 2 for length in lengths)
    cache = tilewise.PagedKVCache(pages, 16, 2, dim, dtype=dtype, device="cuda")
    sequences = [cache.allocate() for _ in lengths]
    cache.append(*([draw(length, 2, dim) for length in lengths] for _ in range(2)))
    query, key, value = (draw(len(lengths), queries, heads, dim) for heads in (8, 2, 2))
    tilewise.attention_with_cache(query, cache, key, value, batch=sequences, backend=backend)


def ragged(dim: int, backend: str) -> None:
    """So many sequences that a worker has several pieces, whole ones and parts."""
    paged(dim, backend, lengths=[5 + 97 * n % 411 for n in range(24)], queries=8)


def latent(dim: int, backend: str) -> None:
    """Two blocks of heads and two queries on pages of 64 whose keys hold the values."""
    cache = tilewise.PagedKVCache(
        24, 64, 1, dim + 64, head_dim_v=dim, dtype=torch.bfloat16, device="cuda", value_in_key=True
    )
    lengths = (333, 5, 261)
    sequences = [cache.allocate() for _ in lengths]
    cache.append([draw(length, 1, dim + 64) for length in lengths])
    tilewise.attention_with_cache(draw(3, 2, 96, dim + 64), cache, batch=sequences, backend=backend)


def prefill(dim: int, backend: str) -> None:
    paged(dim, backend, queries=130)


def hostile(dim: int, backend: str) -> None:
    """Lengths and pages that lead far outside: nothing there is touched, and every call is reported."""
    far = 1 << 30
    heads, page = (2, 64) if dim <= 256 else (1, 64)
    for lengths, places in (
        ([300, -1, 385, far], {}),
        ([300, 40, 385 - 1, 7], {(0, 4): -1, (1, 0): 24, (2, 5): far, (3, 0): -far}),
    ):
        table = torch.arange(24, dtype=torch.int32).view(4, 6)
        for place, number in places.items():
            table[place] = number
        for queries in (1, 4, 70):
            if dim > 256 and queries > 4:
                continue
            k, v = draw(24, page, heads, dim), draw(24, page, heads, dim)
            query, key, value = (draw(4, queries, n, dim) for n in (8, heads, heads))
            held = torch.tensor(lengths, dtype=torch.int32).cuda()
            tilewise.flash_attn.flash_attn_with_kvcache(
                query, k, v, key, value, cache_seqlens=held, block_table=table.cuda(), causal=True
            )
            out = tilewise.flash_attn.flash_attn_with_kvcache(
                query, k, v, cache_seqlens=held, block_table=table.cuda(), causal=True
            )
            torch.cuda.synchronize()
            assert out[1].isnan().all() or places  # type: ignore[index]
            try:
                tilewise.check_errors()
            except ValueError:
                continue
            raise AssertionError("nothing was reported")


def hostile_rows(dim: int, backend: str) -> None:
    """The same of a cache without pages, in a full one too, and of rows by `cache_batch_idx`."""
    for lengths, index in (([-5, 300, 1 << 30], None), ([10, 300, 20], [0, -3, 1 << 30])):
        k, v = draw(3, 300, 2, dim), draw(3, 300, 2, dim)
        for queries in (1, 70):
            query, key, value = (draw(3, queries, n, dim) for n in (8, 2, 2))
            tilewise.flash_attn.flash_attn_with_kvcache(
                query, k, v, key, value, cache_seqlens=torch.tensor(lengths, dtype=torch.int32).cuda(),
                cache_batch_idx=None if index is None else torch.tensor(index, dtype=torch.int32).cuda(),
                causal=True,
            )  # fmt: skip
            try:
                tilewise.check_errors()
            except ValueError:
                continue
            raise AssertionError("nothing was reported")


def eight_bit(dim: int, backend: str) -> None:
    paged(dim, backend, dtype=torch.float8_e4m3fn)


def functions(dim: int, backend: str, length: int = 133) -> None:
    """Of rows, columns and both; captured tensors end where their indices do."""
    rows, columns = torch.randn(length).cuda(), torch.randn(length + 17).cuda()
    documents = torch.arange(length + 17).cuda() // 40
    index = torch.randint(0, 7, (length, length + 17), dtype=torch.int32).cuda()
    table = torch.randn(2, 7).cuda()
    query, key, value = (
        draw(2, n, heads, dim) for n, heads in ((length, 2), (length + 17, 1), (length + 17, 1))
    )
    for given in (
        {"mask_mod": lambda b, h, i, j: (documents[i] == documents[j]) & (j <= i + 17 * h)},
        {"score_mod": lambda s, b, h, i, j: s * (1 + rows[i] * columns[j]), "causal": True},
        {"score_mod": lambda s, b, h, i, j: s + table[h, index[i, j]], "softcap": 5.0, "dropout_p": 0.2},
        {"score_mod": lambda s, b, h, i, j: s + table[h, (j - i).clamp(-3, 3) + 3]},
    ):
        leaves = [t.requires_grad_() for t in (query, key, value)]
        out = tilewise.attention(*leaves, backend=backend, **given)  # type: ignore[arg-type]
        torch.autograd.grad(out, leaves, torch.ones_like(out))  # type: ignore[arg-type, type-var]


def inlined(dim: int, backend: str) -> None:
    """Mask functions in the attention kernels, as those of long sequences are."""
    from tilewise.gpu.hopper.common import functions as hopper_functions

    before, hopper_functions.MOST_BITS = hopper_functions.MOST_BITS, 0
    try:
        functions(dim, backend, length=150)
    finally:
        hopper_functions.MOST_BITS = before


def statistics(dim: int, backend: str) -> None:
    query, key, value = (draw(2, n, heads, dim) for n, heads in ((133, 4), (150, 2), (150, 2)))
    asked = [tilewise.Aux(row_max=True, entropy=True), tilewise.Aux(column_sum=True), tilewise.Aux(top_k=8)]
    asked.append(tilewise.Aux(max_logit=True))
    asked.append(tilewise.Aux(block_sum=128, expected_distance=backend == "triton"))
    for aux in asked:
        tilewise.attention(query, key, value, causal=True, return_aux=aux, backend=backend)


def masked(dim: int, backend: str) -> None:
    """Masks whose memory ends with the last score, of every broadcast shape."""
    for shape in ((1, 2, 133, 150), (1, 1, 1, 150), (1, 2, 133, 1)):
        dense(dim, backend, mask=(torch.rand(shape) > 0.3).cuda(), causal=True)


def run(name: str, backend: str) -> None:
    if name in SMALL:
        globals()[name](64, backend)
    elif name in ("packed", "cached", "paged", "ragged", "prefill", "eight_bit", "hostile", "hostile_rows"):
        globals()[name](128 if backend == "hopper" else 64, backend)
    elif name == "latent":
        latent(512, backend)
    elif name == "slim":
        dense(192, backend, dim_v=128, causal=True)
    elif name == "deterministic":
        dense(128, backend, window=(50, 10), deterministic=True)
    elif name == "fp8":
        query, key, value = draw(1, 133, 2, 128), draw(1, 150, 1, 128), draw(1, 150, 1, 128)
        tilewise.attention(query, key, value, precision="fp8", backend=backend)
    elif name == "bias":
        dense(64, backend, bias=draw(1, 1, 133, 150))
    elif name == "options":
        mask = (torch.rand(1, 2, 133, 150) > 0.3).cuda()
        options = {"bias": draw(1, 2, 133, 150), "sinks": torch.randn(2).cuda(), "mask": mask}
        dense(64, backend, dropout_p=0.1, **options)
    else:
        dim, _, kind = name.partition("_")
        dense(int(dim[1:]), backend, causal=kind == "causal")


SMALL = ("functions", "inlined", "statistics", "masked")
CASES = {
    "triton": (
        "d64_causal",
        "d128_full",
        "d256_causal",
        "bias",
        "options",
        "packed",
        "cached",
        "paged",
        "ragged",
        "eight_bit",
        "latent",
        "hostile",
        "hostile_rows",
        "functions",
        "statistics",
        "masked",
    ),
    "hopper": (
        "d64_causal",
        "d128_full",
        "d128_causal",
        "d256_causal",
        "slim",
        "deterministic",
        "packed",
        "cached",
        "paged",
        "ragged",
        "latent",
        "prefill",
        "fp8",
        "hostile",
        "hostile_rows",
        "functions",
        "inlined",
        "statistics",
        "masked",
        "options",
        "bias",
    ),
}


def main() -> None:
    backend = sys.argv[1]
    for name in sys.argv[2:] or CASES[backend]:
        run(name, backend)
        torch.cuda.synchronize()
        print(f"ran {backend} {name}", flush=True)


if __name__ == "__main__":
    main()
