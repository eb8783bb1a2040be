"""Random problems, and sequences of them in which what was called before should not matter."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.torture.problems import LEAVES, Problem

LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 40, 65)
HEAD_DIMS = (1, 3, 8, 8, 16, 16, 24, 32, 40, 64, 64)
WIDE = (96, 128, 192, 256, 576)
GPU_HEAD_DIMS = (16, 64, 64, 128, 128, 40, 192)
HALF = ("bfloat16", "bfloat16", "float16")
DTYPES = {"cpu": ("float64", "float32", "float32", "float32", *HALF), "cuda": (*HALF, *HALF, "float32")}
STRIDES = ("dense", "dense", "dense", "heads first", "slice", "every second", "expanded", "last", "negative")
BACKENDS = {
    "cpu": (None, None, None, "llvm", "llvm", "aten", "tiled"),
    "cuda": (None, "hopper", "triton", "triton"),
}
# Weights: compiling takes seconds, a fork a tenth of one.
MODES = {
    "plain": 60,
    "no_grad": 12,
    "inference": 8,
    "autocast": 6,
    "functional": 5,
    "vmap": 3,
    "jvp": 3,
    "threads": 3,
}
MODES |= {"fork": 0.4, "compile": 0.15}
KEPT_BY_MODE = {"functional", "vmap", "jvp"}
SEQUENCES_A_KERNEL = 500
KERNELS = 2  # at once


def problem(rng: random.Random, kernels: random.Random, device: str = "cpu") -> Problem:
    """Any options at once, each with its own chance.

    `kernels` draws what is compiled into a kernel. It is the same for many sequences, as compiling takes
    longer than calling.
    """
    dim, dim_v, dtype, group, scores = _kernel(kernels, device)
    p = Problem(
        seed=rng.randrange(1 << 31),
        dtype=dtype,
        batch=rng.choice((1, 1, 2, 3)),
        seqlen_q=rng.choice(LENGTHS),
        seqlen_k=rng.choice(LENGTHS),
        kv_heads=rng.choice((1, 1, 2, 3)),
        group=group,
        head_dim=dim,
        head_dim_v=dim_v,
        layout=rng.choice(("bshd", "bshd", "bhsd")),
        return_lse=rng.random() < 0.4,
        deterministic=rng.random() < 0.2,
        precision=rng.choice(("ieee", "ieee", "ieee", "tf32")) if device == "cpu" else "ieee",
        backend=rng.choice(BACKENDS[device]),
        threads=rng.choice((1, 1, 1, 1, 1, 2, 4)),
        device=device,
    )
    p = replace(p, **(scores if rng.random() < 0.7 else {}), **_visible(rng))
    if rng.random() < 0.5:
        p = replace(p, seqlen_q=p.seqlen_k)
    if rng.random() < 0.2:
        p = _packed(rng, p)
    p = replace(p, **_memory(rng))
    return _in_mode(rng, p)


def _kernel(rng: random.Random, device: str) -> tuple[int, int, str, int, dict[str, Any]]:
    """Head sizes, dtype, heads a key head, and the options that change scores: often none, sometimes many."""
    sizes = HEAD_DIMS if device == "cpu" else GPU_HEAD_DIMS
    dim = rng.choice(sizes) if rng.random() < 0.95 else rng.choice(WIDE)
    dim_v = dim if rng.random() < 0.7 else rng.choice(sizes)
    share = rng.choice((0.0, 0.1, 0.1, 0.4))
    options = {
        "mask": _dims(rng),
        "bias": _dims(rng),
        "alibi": rng.choice(("h", "bh")),
        "softcap": rng.choice((2.0, 30.0)),
        "sinks": True,
        "dropout_p": rng.choice((0.1, 0.5)),
    }
    scores = {name: option for name, option in options.items() if rng.random() < share}
    scores["bias_dtype"] = rng.choice(("float32", "float32", "float16", "bfloat16", "float64"))
    return dim, dim_v, rng.choice(DTYPES[device]), rng.choice((1, 1, 1, 2, 4)), scores


def _visible(rng: random.Random) -> dict[str, Any]:
    window = (rng.choice((None, 0, 2, 9)), rng.choice((None, 0, 3, 20)))
    return {
        "causal": rng.random() < 0.4,
        "window": window if rng.random() < 0.2 else None,
        "scale": rng.choice((None, None, None, 0.3, 1, -0.2, 0.0)),
    }


def _dims(rng: random.Random) -> str:
    return "".join(name for name in "bhqk" if rng.random() < 0.6) or "1"


def _memory(rng: random.Random) -> dict[str, Any]:
    strides = tuple(rng.choice(STRIDES) if rng.random() < 0.5 else "dense" for _ in range(3))
    grads = rng.choice(
        ((), LEAVES, LEAVES, ("query",), ("key", "value"), ("query", "bias"), ("value", "sinks"))
    )
    dout = rng.choice(("dense", "dense", "heads first", "last", "negative", "slice"))
    return {"strides": strides, "grads": grads, "dout_strides": dout}


def _packed(rng: random.Random, p: Problem) -> Problem:
    count = rng.choice((1, 2, 3))
    lengths = [tuple(rng.choice((0, *LENGTHS[:10])) for _ in range(count)) for _ in range(2)]
    if rng.random() < 0.4:
        lengths[1] = lengths[0]
    return replace(p, packed=tuple(lengths), batch=1, seqlen_q=4, seqlen_k=4)


def _in_mode(rng: random.Random, p: Problem) -> Problem:
    mode = rng.choices(list(MODES), list(MODES.values()))[0]
    if mode in ("fork", "autocast") and p.device == "cuda":
        mode = "plain"
    if mode in KEPT_BY_MODE:  # which are of query, key and value
        p = replace(p, return_lse=False, packed=None, bias="", sinks=False, dropout_p=0.0, mask="", alibi="")
        p = replace(p, backend=None if p.backend == "aten" else p.backend)
    if mode == "fork":
        p = replace(p, backend=None)
    if mode == "jvp":
        order = [
            how if how in ("heads first", "last") else "dense" for how in p.strides
        ]  # PyTorch's own limit
        p = replace(p, dtype="float64", strides=tuple(order))
    return replace(p, mode=mode)


def sequence(seed: int, worker: int, number: int, device: str = "cpu") -> list[Problem]:
    """Two or three problems, some near others, in turns: calls of one kind become short from the third on."""
    rng = random.Random(f"{seed}/{worker}/{number}")

    def new() -> Problem:
        kernels = random.Random(f"{seed}/{number // SEQUENCES_A_KERNEL}/{rng.randrange(KERNELS)}")
        return problem(rng, kernels, device)

    problems = [new() for _ in range(rng.choice((1, 2)))]
    if rng.random() < 0.7:
        problems.append(neighbour(rng, rng.choice(problems), new()))
    order = [p for p in problems for _ in range(rng.choice((1, 1, 2, 3)))]
    rng.shuffle(order)
    heavy = [p for p in problems if p.mode in ("compile", "fork", "threads")]
    return [p for n, p in enumerate(order) if p not in heavy or order.index(p) == n]


def neighbour(rng: random.Random, p: Problem, other: Problem) -> Problem:
    """The same shapes, and something of another that a plan must not forget."""
    names = (
        "bias_dtype", "strides", "dout_strides", "grads", "layout", "return_lse", "threads", "mode", "scale",
        "causal", "window", "mask", "bias", "alibi", "sinks", "dropout_p", "softcap", "dtype", "backend",
    )  # fmt: skip
    changed = {name: getattr(other, name) for name in rng.sample(names, rng.choice((1, 1, 2, 3)))}
    if p.mode in (*KEPT_BY_MODE, "compile") or changed.get("mode") in KEPT_BY_MODE:
        changed = {"threads": other.threads} | ({} if p.mode == "jvp" else {"strides": other.strides})
    return replace(p, **changed, seed=other.seed)
