"""Compile the Triton kernels for one GPU without having it, and print what ptxas says of each, as JSON.

    python tests/gpu_triton/compile_kernels.py CAPABILITY [CASE ...]
    python tests/gpu_triton/compile_kernels.py CAPABILITY lengths     # how often new lengths compile

The launch code runs unchanged on meta tensors, as `tilewise warmup` has it run.
"""

from __future__ import annotations

import functools
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewise.core.functions.captured import check_indices
from tilewise.core.functions.trace import trace
from tilewise.core.plan import Results
from tilewise.core.problem import Inputs, Options, describe
from tilewise.core.signature import Gpu
from tilewise.core.statistics import Aux
from tilewise.gpu.launch import combine, eight_bit_pages, launcher, take
from tilewise.gpu.triton import backward, forward, launch
from tilewise.gpu.triton.statistics.plan import StatisticsPlan

STATISTICS = Aux(
    max_logit=True, entropy=True, column_sum=True, expected_distance=True, block_sum=128, top_k=8
)


@dataclass(frozen=True)
class Case:
    """One call; extras and packing are made for the default lengths."""

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    heads: int = 4
    kv_heads: int = 4
    seqlen_q: int = 512
    seqlen_k: int = 512
    batch: int = 2
    page_size: int = 16


def _functions(heads: int) -> str:
    """A mask and a score function, of every kind of load: one number a head, of a table, guarded."""
    slopes, table = torch.empty(heads), torch.empty(heads, 64)
    found = trace(
        lambda b, h, i, j: (j <= i) & ((i // 64 - j // 64) % 3 != h),
        lambda s, b, h, i, j: (
            8 * torch.tanh(s / 8) * slopes[h] + table[h, (i - j).clamp(0, 63)] + table[h, i]
        ),
    )
    return check_indices(found, (2, heads, 512, 512)).text


def _learned(heads: int, reads_each: bool) -> str:
    """A score function with gradients: of one number a head, of diagonals, perhaps of keys and any place."""
    slopes, table = (torch.empty(n, requires_grad=True) for n in ((heads,), (heads, 64)))

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = s * slopes[h] + table[h, (i - j).clamp(0, 63)]
        return s + table[0, j % 64] + table[h, (i + j) // 8 % 64] if reads_each else s

    return trace(None, score_mod).functions.text


MASK_ALONE = trace(lambda b, h, i, j: j <= i, None).functions.text
ELEMENTARY = trace(None, lambda s, *_: torch.fmod(torch.erf(s), 0.5)).functions.text
CASES = {
    "functions_d64": Case(64, 64, options={"functions": _functions(4)}, extras=("captured",)),
    "functions_d128": Case(128, 128, options={"functions": _functions(4)}, extras=("captured",), kv_heads=2),
    "functions_elementary": Case(64, 64, options={"functions": ELEMENTARY}),
    "functions_mask": Case(64, 64, options={"functions": MASK_ALONE}),
    "functions_packed": Case(
        128, 128, options={"functions": _functions(4)}, extras=("captured", "packed", "bias", "sinks")
    ),
    "learned_d64": Case(64, 64, options={"functions": _learned(4, True)}, extras=("captured",)),
    "learned_d128": Case(128, 128, options={"functions": _learned(4, False)}, extras=("captured",)),
    "d64": Case(64, 64),
    "d64_causal": Case(64, 64, options={"causal": True}),
    "d128": Case(128, 128),
    "d128_causal": Case(128, 128, options={"causal": True}),
    "d128_fp16_gqa_window": Case(
        128, 128, torch.float16, {"window_left": 128, "window_right": 64}, kv_heads=2
    ),
    "d256_causal": Case(256, 256, options={"causal": True}),
    "mla_192_128": Case(192, 128, options={"causal": True}),
    "absorbed_576_512": Case(576, 512, kv_heads=1),
    "d40": Case(40, 24),
    "d512": Case(512, 512),
    "d256_mask_dropout": Case(256, 256, options={"causal": True, "dropout_p": 0.1}, extras=("mask",)),
    "d512_mask_dropout": Case(512, 512, options={"dropout_p": 0.1}, extras=("mask",)),
    "float32_d64": Case(64, 64, torch.float32),
    "float32_d128": Case(128, 128, torch.float32, {"causal": True}),
    "float32_d80": Case(80, 80, torch.float32),
    "float32_128_80": Case(128, 80, torch.float32),
    "float32_everything": Case(
        128,
        128,
        torch.float32,
        {"causal": True, "softcap": 20.0, "dropout_p": 0.1},
        ("mask", "bias", "alibi", "sinks"),
    ),
    "float32_d256": Case(256, 256, torch.float32),
    "tf32_d64": Case(64, 64, torch.float32, {"causal": True, "precision": "tf32"}),
    "tf32_d128": Case(128, 128, torch.float32, {"precision": "tf32"}),
    "tf32_d256": Case(256, 256, torch.float32, {"causal": True, "precision": "tf32"}),
    "tf32_everything": Case(
        128,
        128,
        torch.float32,
        {"causal": True, "softcap": 20.0, "dropout_p": 0.1, "precision": "tf32"},
        ("mask", "bias", "alibi", "sinks"),
    ),
    "everything": Case(
        64,
        64,
        options={"causal": True, "softcap": 20.0, "dropout_p": 0.1},
        extras=("mask", "bias", "alibi", "sinks"),
    ),
    "dropout_part": Case(128, 128, options={"dropout_p": 0.1, "dropout_step": 16}),
    "dropout_odd_part": Case(128, 128, options={"dropout_p": 0.1, "dropout_step": 1}),
    "packed": Case(128, 128, options={"causal": True}, extras=("packed",)),
    "float32_results": Case(128, 128, options={"causal": True}, kv_heads=2),
    "cache": Case(128, 128, options={"causal": True}, extras=("lengths",), seqlen_q=8),
    "paged": Case(128, 128, options={"causal": True}, extras=("paged",), seqlen_q=1),
    "paged_8_bits": Case(128, 128, options={"causal": True}, extras=("paged", "8 bits"), seqlen_q=200),
    "decode_d64": Case(64, 64, extras=("lengths",), seqlen_q=1, kv_heads=1),
    "decode_d128": Case(128, 128, extras=("lengths",), seqlen_q=1, kv_heads=1),
    "decode_long": Case(128, 128, extras=("lengths",), seqlen_q=1, kv_heads=4, batch=16, seqlen_k=8192),
    "decode_rows": Case(128, 128, extras=("lengths",), seqlen_q=16, kv_heads=1),
    "decode_rows_paged": Case(128, 128, extras=("paged",), seqlen_q=16, kv_heads=1),
    "decode_d256": Case(256, 256, extras=("lengths",), seqlen_q=1, kv_heads=1),
    "decode_float32": Case(128, 128, torch.float32, extras=("paged",), seqlen_q=4, kv_heads=1),
    "decode_absorbed": Case(576, 512, extras=("lengths", "in_key"), heads=16, kv_heads=1, seqlen_q=1),
    "decode_absorbed_paged": Case(576, 512, extras=("paged", "in_key"), heads=16, kv_heads=1, seqlen_q=1),
    "decode_576_512": Case(576, 512, extras=("lengths",), heads=16, kv_heads=1, seqlen_q=1),
    "decode_8_bits": Case(128, 128, extras=("paged", "8 bits"), seqlen_q=1, kv_heads=2, batch=16),
    "decode_8_bits_fp16_d64": Case(
        64, 64, torch.float16, extras=("paged", "8 bits"), seqlen_q=8, kv_heads=1, page_size=64
    ),
    "decode_8_bits_float32": Case(
        128, 128, torch.float32, extras=("paged", "8 bits"), seqlen_q=1, kv_heads=2
    ),
    "decode_8_bits_absorbed": Case(
        576, 512, extras=("paged", "8 bits", "in_key"), heads=16, kv_heads=1, seqlen_q=1
    ),
    "decode_everything": Case(
        128,
        128,
        options={"causal": True, "softcap": 20.0, "window_left": 64},
        extras=("paged", "mask", "alibi", "sinks"),
        seqlen_q=4,
    ),
}


def case_inputs(case: Case) -> Inputs:
    make = functools.partial(torch.empty, device="meta")
    heads = {"q": case.heads, "k": case.kv_heads, "v": case.kv_heads}
    dims = {"q": case.head_dim, "k": case.head_dim, "v": case.head_dim_v}
    lengths = {"q": case.seqlen_q, "k": case.seqlen_k, "v": case.seqlen_k}
    lead: dict[str, tuple[int, ...]] = {n: (case.batch, lengths[n]) for n in "qkv"}
    fields: dict[str, torch.Tensor] = {}
    if "packed" in case.extras:
        lead = dict.fromkeys("qkv", (1024,))
        offsets = torch.int64 if "int64" in case.extras else torch.int32
        fields |= {f"cu_seqlens_{n}": make(3, dtype=offsets) for n in "qk"}
    if "packed_queries" in case.extras:
        lead["q"] = (1024,)
        fields["cu_seqlens_q"] = make(case.batch + 1, dtype=torch.int32)
    if "paged" in case.extras:
        lead |= dict.fromkeys("kv", (1024 // case.page_size, case.page_size))
        fields["page_table"] = make(case.batch, 512 // case.page_size, dtype=torch.int32)
    if "lengths" in case.extras or "paged" in case.extras:
        fields["seqlens_k"] = make(case.batch, dtype=torch.int32)
    if "leftpad" in case.extras:
        fields["leftpad_k"] = make(case.batch, dtype=torch.int32)
    if "mask" in case.extras:
        fields["mask"] = make(2, 1, lengths["q"], 512, dtype=torch.bool)
    if "bias" in case.extras:
        fields["bias"] = make(1, case.heads, lengths["q"], 512, dtype=case.dtype).requires_grad_()
    if "alibi" in case.extras:
        fields["alibi_slopes"] = make(case.heads)
    if "captured" in case.extras:  # slopes and table of `_functions` and `_learned`
        fields["captured_floats"] = make(case.heads * 65)
        fields["captured_layout"] = torch.tensor([0, case.heads, case.heads, case.heads, 64])
    if "sinks" in case.extras:
        fields["sinks"] = make(case.heads, dtype=case.dtype)
    if case.options.get("dropout_p"):
        fields["dropout_seed"] = make((5,) if "dropout_step" in case.options else (), dtype=torch.int64)
    dtypes = dict.fromkeys("qkv", case.dtype)
    if "8 bits" in case.extras:
        dtypes |= dict.fromkeys("kv", torch.float8_e4m3fn)
        fields |= {f"{name}_scale": make(lead["k"][0], case.kv_heads) for name in ("key", "value")}
    q, k, v = (make(*lead[n], heads[n], dims[n], dtype=dtypes[n]) for n in "qkv")
    if "in_key" in case.extras:
        v = k[..., : case.head_dim_v]
    return Inputs(q, k, v, **fields)


def compile_case(name: str, capability: int) -> list[dict[str, Any]]:
    if name == "combine":
        return compile_combine(capability)
    if name == "take":
        return compile_take(capability)
    if name == "write":
        return compile_write(capability)
    case = CASES[name]
    inputs = case_inputs(case)
    problem = replace(describe(inputs, Options(**case.options)), has_wide_results=name == "float32_results")

    def run() -> None:
        out, lse, residual = launch.forward(problem, inputs, residual=True)
        if not name.startswith("decode") and name != "lengths" and problem.functions is None:
            # Tiles of packed sequences are as many as the longest has, which offsets on "meta" do not say.
            asked = replace(STATISTICS, block_sum=0) if problem.is_packed else STATISTICS
            StatisticsPlan(problem, asked).run(inputs, Results(None, lse, residual))
        if not name.startswith("decode") and "paged" not in case.extras:
            out = out.to(case.dtype)
            launch.backward(problem, inputs, Results(out, lse, residual), out, lse)

    return compiled_rows(name, run, capability)


def compile_combine(capability: int) -> list[dict[str, Any]]:
    """Results of disjoint keys merged, and gradients added, into both dtypes that they are kept in."""
    make = functools.partial(torch.empty, device="meta")

    def run() -> None:
        for dtype, count in ((torch.bfloat16, 3), (torch.float32, 2), (torch.bfloat16, 6)):
            for lse in (make(1, 16, 512), None):
                target = make(1, 512, 16, 128, dtype=dtype)
                parts = ((0, target, lse),) * count
                combine.combine(target, lse, parts, 3, 500)

    return compiled_rows("combine", run, capability)


def compile_take(capability: int) -> list[dict[str, Any]]:
    """Heads of tokens of 4 ranks, and tokens of their heads; a head of latent attention, and lse, of many."""
    make = functools.partial(torch.empty, device="meta")
    shapes = ((1, 4, 128, 4), (4, 4, 128, 4), (1, 1, 576, take.MOST), (take.MOST, 1, 1, take.MOST))

    def run() -> None:
        for parts, heads, dim, count in shapes:
            which = make(1, parts, dtype=torch.int32).expand(512, -1)
            row = make(512, 1, dtype=torch.int32).expand(-1, parts)
            dtype = torch.float32 if dim == 1 else torch.bfloat16
            target = make(512, parts, 1, heads, dim, dtype=dtype)
            sources = [make(128, 1, heads * count, dim, dtype=dtype)[:, :, :heads]] * count
            take.take(target, sources, which, row)

    return compiled_rows("take", run, capability)


def compile_write(capability: int) -> list[dict[str, Any]]:
    """New tokens into 8-bit pages: with values, and of latent attention, whose values lie in the keys."""
    make = functools.partial(torch.empty, device="meta")

    def run() -> None:
        for page_size, heads, *dims in ((16, 8, 128, 128), (256, 8, 64, 64), (64, 1, 576)):
            pages = [make(32, page_size, heads, d, dtype=torch.float8_e4m3fn) for d in dims]
            new = [make(4, 2, heads, d, dtype=torch.bfloat16) for d in dims]
            slots, written, kept = (make(n, dtype=torch.int32) for n in (8, 4, 4))
            without = [None] * (2 - len(dims))
            eight_bit_pages.write_pages(
                pages + without, [make(32, heads)] * 2, new + without, (slots, written, kept)
            )

    return compiled_rows("write", run, capability)


def compiled_rows(
    case: str, run: Callable[[], object], capability: int, num_sms: int = 132
) -> list[dict[str, Any]]:
    """A report of each kernel that `run` launches, compiled for a GPU that need not be here."""
    rows: list[dict[str, Any]] = []

    def add(compiled: Any) -> None:
        asked = compiled.metadata
        row = {"case": case, "kernel": asked.name, "is_early": asked.launch_pdl}
        tile = {"warps": asked.num_warps, "stages": asked.num_stages}
        rows.append(row | tile | report(compiled, capability))

    with launcher.compiling_for(Gpu("a GPU not here", divmod(capability, 10), num_sms), add):
        run()
    return rows


def report(compiled: Any, capability: int) -> dict[str, Any]:
    """Registers, spills and shared memory of a compiled kernel, from ptxas."""
    ptx = compiled.asm["ptx"]
    arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        from triton.backends.nvidia.compiler import get_ptxas

        ptxas = get_ptxas(capability)
        command = [getattr(ptxas, "path", ptxas), "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),  # type: ignore[index]
        "spill_bytes": int(re.search(r"(\d+) bytes spill stores", said)[1]),  # type: ignore[index]
        "shared_bytes": compiled.metadata.shared,
        "is_serialized": "wgmma.mma_async instructions are serialized" in said,
        "matrix_instructions": len(re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", ptx)),
        "waits_for_kernel_before": "griddepcontrol.wait" in ptx,
        "cut_operands": _cut_operands(compiled.asm["ttgir"]),
        "barriers": len(re.findall(r"bar(?:rier)?\.sync", ptx)),
        "proxy_fences": len(re.findall(r"fence\.proxy\.async", ptx)),
        "warpgroup_instructions": len(re.findall(r"wgmma\.mma_async|tcgen05\.mma", ptx)),
    }


def _cut_operands(ttgir: str) -> int:
    """How many operands of `mma.sync` give a thread more neighbours along the sum than there are for four.

    Triton 3.6 and 3.7 then read some twice and others never.
    """
    operand = r"tensor<(\d+)x(\d+)x\w+, #ttg\.dot_op<\{opIdx = (\d), parent = #mma\d*, kWidth = (\d+)\}>>"
    found = [tuple(map(int, numbers)) for numbers in re.findall(operand, ttgir)]
    return sum(4 * width > (rows if is_right else columns) for rows, columns, is_right, width in found)


def variants_over_lengths(capability: int) -> dict[str, int]:
    """Compiled variants of each kernel after calls of several batch sizes and lengths."""
    CASES["lengths"] = CASES["d64_causal"]
    for batch, seqlen_q, seqlen_k in ((2, 512, 512), (1, 17, 1), (3, 999, 333), (16, 70000, 65536)):
        CASES["lengths"] = replace(CASES["lengths"], batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        compile_case("lengths", capability)
    kernels = (forward.attn_fwd_kernel, backward.attn_bwd_dkdv_kernel, backward.attn_bwd_dq_kernel)
    return {
        kernel.__name__: sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels
    }


def print_rows(
    compile_case: Callable[[str], list[dict[str, Any]]], cases: Iterable[str], arguments: list[str]
) -> None:
    """The reports of the cases named, as JSON; of all, or after `--draw N SEED` of N of them."""
    names = arguments or list(cases)
    if arguments[:1] == ["--draw"]:
        names = list(cases)
        names = random.Random(arguments[2]).sample(names, min(int(arguments[1]), len(names)))
    for name in names:
        for row in compile_case(name):
            print(json.dumps(row), flush=True)


def main() -> None:
    capability = int(sys.argv[1])
    if sys.argv[2:] == ["lengths"]:
        print(json.dumps(variants_over_lengths(capability)))
    else:
        print_rows(
            lambda name: compile_case(name, capability), [*CASES, "combine", "take", "write"], sys.argv[2:]
        )


if __name__ == "__main__":
    main()
