"""One problem of a sequence: what is called and how, as plain data, and whether the answer is right.

This file needs PyTorch and tilewise alone: a failure is printed as this file, and a list of problems.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise import testing
from tilewise.core.problem import Inputs, Options, describe
from tilewise.tiled import backend as tiled

LEAVES = ("query", "key", "value", "bias", "sinks")
THREADS = 8
CHILD_SECONDS = 20


@dataclass(frozen=True)
class Problem:
    """A call of `attention`, or with `packed` of `attention_varlen`. Fields are literals."""

    seed: int = 0  # of all numbers
    dtype: str = "float32"
    batch: int = 1
    seqlen_q: int = 4
    seqlen_k: int = 4
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 8
    head_dim_v: int = 8
    packed: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # lengths of queries and of keys
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    mask: str = ""  # of "bhqk", the dimensions that are not broadcast; "1" broadcasts all
    bias: str = ""  # likewise
    bias_dtype: str = "float32"
    alibi: str = ""  # "h" or "bh"
    softcap: float = 0.0
    sinks: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    layout: str = "bshd"
    return_lse: bool = False
    deterministic: bool = False
    precision: str = "ieee"
    backend: str | None = None
    strides: tuple[str, str, str] = ("dense", "dense", "dense")  # of query, key, value
    dout_strides: str = "dense"
    grads: tuple[str, ...] = ()  # of LEAVES, those that require one
    mode: str = "plain"
    threads: int = 1  # of PyTorch
    device: str = "cpu"

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def laid_out(t: Tensor, how: str) -> Tensor:
    """The same numbers, or for "expanded" the first of them, in memory of another form."""
    if how == "heads first":
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if how == "slice":  # of a wider last dimension, at an offset
        wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), float("nan"))
        wide[..., 1 : 1 + t.shape[-1]] = t
        return wide[..., 1 : 1 + t.shape[-1]]
    if how == "every second":  # token
        wide = t.new_full((*t.shape[:-3], 2 * t.shape[-3] + 1, *t.shape[-2:]), float("nan"))
        wide[..., 1::2, :, :] = t
        return wide[..., 1::2, :, :]
    if how == "expanded":  # one head for all
        return t[..., :1, :].expand(t.shape)
    if how == "last":  # whose last dimension is not contiguous
        return t.transpose(-2, -1).contiguous().transpose(-2, -1)
    if how == "negative":
        return torch._neg_view(t.neg())
    assert how == "dense"
    return t


def broadcast(p: Problem, dims: str) -> tuple[int, ...]:
    full = {"b": p.batch, "h": p.heads, "q": p.seqlen_q, "k": p.seqlen_k}
    if p.packed is not None:
        full |= {"b": len(p.packed[0]), "q": max(p.packed[0]), "k": max(p.packed[1])}
    return tuple(size if name in dims else 1 for name, size in full.items())


class Call:
    """The tensors of a problem, what it must give, and what it gives."""

    def __init__(self, p: Problem) -> None:
        self.p, self.dtype = p, getattr(torch, p.dtype)
        generator = torch.Generator().manual_seed(p.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        rows_q, rows_k = (p.batch, p.seqlen_q), (p.batch, p.seqlen_k)
        if p.packed is not None:
            rows_q, rows_k = (sum(p.packed[0]),), (sum(p.packed[1]),)
        shapes = (
            (*rows_q, p.heads, p.head_dim),
            *((*rows_k, p.kv_heads, d) for d in (p.head_dim, p.head_dim_v)),
        )
        given = [normal(*shape).to(self.dtype).to(p.device) for shape in shapes]
        given = [laid_out(t, how) for t, how in zip(given, p.strides)]
        dout = normal(*rows_q, p.heads, p.head_dim_v).to(self.dtype).to(p.device)
        self.dout = self._in_layout(laid_out(dout, p.dout_strides))
        self.tensors = dict(zip(LEAVES, map(self._in_layout, given)))
        lse_shape = (p.heads, *rows_q) if p.packed is not None else (p.batch, p.heads, p.seqlen_q)
        self.dlse = normal(*lse_shape).to(torch.promote_types(self.dtype, torch.float32)).to(p.device)
        self.options: dict[str, Any] = {"causal": p.causal, "window": p.window, "softcap": p.softcap}
        self.options |= {"scale": p.scale, "dropout_p": p.dropout_p}
        if p.packed is not None:
            for name, lengths in zip(("cu_seqlens_q", "cu_seqlens_k"), p.packed):
                self.options[name] = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(p.device)
        else:
            self.options["layout"] = p.layout
        if p.mask:
            self.options["mask"] = (normal(*broadcast(p, p.mask)) > -0.5).to(p.device)
        if p.bias:
            self.options["bias"] = normal(*broadcast(p, p.bias)).to(getattr(torch, p.bias_dtype)).to(p.device)
        if p.alibi:
            shape = (self.sequences, p.heads) if p.alibi == "bh" else (p.heads,)
            self.options["alibi_slopes"] = (normal(*shape).abs() * 0.1).float().to(p.device)
        if p.sinks:
            self.options["sinks"] = normal(p.heads).to(self.dtype).to(p.device)
        self.how = {"deterministic": p.deterministic, "precision": p.precision, "backend": p.backend}

    @property
    def sequences(self) -> int:
        return self.p.batch if self.p.packed is None else len(self.p.packed[0])

    def _in_layout(self, t: Tensor) -> Tensor:
        return t.transpose(1, 2) if self.p.layout == "bhsd" and self.p.packed is None else t

    def __call__(self, *given: Tensor, return_lse: bool | None = None, **others: Tensor) -> Any:
        """The call itself."""
        given = given or tuple(self.tensors[name] for name in LEAVES[:3])
        options = self.options | others
        if self.p.dropout_p:
            options["generator"] = torch.Generator(self.p.device).manual_seed(self.p.seed)
        return_lse = self.p.return_lse if return_lse is None else return_lse
        face: Any = tilewise.attention if self.p.packed is None else tilewise.attention_varlen
        return face(*given, **options, **self.how, return_lse=return_lse)

    @functools.cached_property
    def formula(self) -> tuple[Any, ...]:
        """The arguments of the formula."""
        options = dict(self.options)
        if self.p.dropout_p:
            generator = torch.Generator(self.p.device).manual_seed(self.p.seed)
            seed = torch.randint(2**63 - 1, (), generator=generator, device=self.p.device)
            options["dropout_seed"] = seed
        given = [self.tensors[name] for name in LEAVES[:3]]
        dlse = self.dlse if self.p.return_lse else torch.zeros_like(self.dlse)
        return *given, self.dout, dlse, options

    @functools.cached_property
    def expected(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Each result by the formula, in float64 and in the inputs' own dtype."""
        exact, own = (testing._reference(dtype, *self.formula) for dtype in (torch.float64, self.dtype))
        return {name: (exact[name], own[name]) for name in exact}

    def judge(self, found: dict[str, Tensor]) -> list[str]:
        """What is over the error budget of `tilewise.testing`."""
        reports = [testing.compare(name, t, *self.expected[name]) for name, t in found.items()]
        exact = {name: self.expected[name][0] for name in found}
        reports = testing._in_other_orders(reports, found, exact, *self.formula)
        values = [self.dout, self.tensors["value"]]
        largest = math.prod(t.abs().max().item() if t.numel() else 0.0 for t in values)
        scale = self.p.head_dim**-0.5 if self.p.scale is None else self.p.scale
        steps = [t.abs().max().item() if t.numel() else 0.0 for t in (self.tensors[n] for n in LEAVES[:2])]
        everything = {"out": self.expected["out"][1]} | found
        magnitude = largest * max(1.0, *(abs(scale) * s for s in steps))
        reports = testing._allow_chance(reports, everything, magnitude, abs(scale) * math.prod(steps))
        bad = [report for report in reports if not report.is_within]
        if bad and self.p.packed is None and all(report.name.startswith("d") for report in bad):
            bad = self._worse_than_tiles(bad, found)
        return [str(report) for report in bad]

    def _worse_than_tiles(self, bad: list[testing.ErrorReport], found: dict[str, Tensor]) -> list[Any]:
        """Gradients that nearly cancel may be as far off as those of the same algorithm in PyTorch."""
        inputs = Inputs(*(self._in_layout(self.tensors[n]).resolve_neg() for n in LEAVES[:3]))
        o = self.options
        four = {n: o[n].reshape((1,) * (4 - o[n].ndim) + o[n].shape) for n in ("mask", "bias") if n in o}
        inputs = inputs._replace(**four, alibi_slopes=o.get("alibi_slopes"), sinks=o.get("sinks"))
        if self.p.dropout_p:
            return bad
        options = Options(self.p.causal, *(self.p.window or (None, None)), self.p.softcap, 0.0, self.p.scale)
        problem = describe(inputs, options)
        out, lse = tiled.forward(problem, inputs)
        dlse = self.dlse if self.p.return_lse else None
        grads = tiled.backward(problem, inputs, out, lse, self._in_layout(self.dout), dlse)
        largest = 0.0
        for name in LEAVES:
            t = getattr(grads, name)
            if t is not None:
                t = self._in_layout(t) if name in LEAVES[:3] else t
                report = testing.compare(name, t, *self.expected[f"d{name}"])
                largest = max(largest, report.max_error)
        return [report for report in bad if report.max_error > testing.MAX_FACTOR * largest]


def outputs(call: Call, result: Any) -> dict[str, Tensor]:
    out, lse = result if isinstance(result, tuple) else (result, None)
    return {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})


def differentiate(call: Call, attend: Any, times: int = 2) -> list[dict[str, Tensor]]:
    """Outputs, and the gradients of those tensors that want one, taken so many times."""
    every = call.tensors | {name: call.options[name] for name in LEAVES[3:] if name in call.options}
    wanted = [name for name in call.p.grads if name in every]
    leaves = {name: t.detach().requires_grad_(name in wanted) for name, t in every.items()}
    others = {name: leaves[name] for name in LEAVES[3:] if name in leaves}
    result = attend(*(leaves[name] for name in LEAVES[:3]), **others)
    found = [outputs(call, result)]
    if not wanted:
        return found
    results = result if isinstance(result, tuple) else (result,)
    for n in range(times):
        grads = torch.autograd.grad(
            results, [leaves[name] for name in wanted], (call.dout, call.dlse)[: len(results)],
            retain_graph=n + 1 < times, allow_unused=True,
        )  # fmt: skip
        found.append({f"d{name}": g for name, g in zip(wanted, grads) if g is not None})
        missing = [name for name, g in zip(wanted, grads) if g is None]
        if missing:
            raise AssertionError(f"no gradient of {missing}")
    return found


def functional_gradients(call: Call) -> list[dict[str, Tensor]]:
    def loss(*given: Tensor) -> Tensor:
        out = call(*given, return_lse=False)
        return (out * call.dout).sum()

    given = tuple(call.tensors[name] for name in LEAVES[:3])
    grads = torch.func.grad(loss, argnums=(0, 1, 2))(*given)
    return [{f"d{name}": g for name, g in zip(LEAVES, grads)}]


def mapped(call: Call) -> list[dict[str, Tensor]]:
    """Over the batch, each sequence a batch of one."""

    def one(*given: Tensor) -> Tensor:
        return call(*(t[None] for t in given), return_lse=False)[0]

    return [{"out": torch.func.vmap(one)(*(call.tensors[name] for name in LEAVES[:3]))}]


def check_tangent(call: Call) -> list[dict[str, Tensor]]:
    """In float64: the tangent of out along a direction, against the gradients along it."""
    given = tuple(call.tensors[name] for name in LEAVES[:3])
    directions = tuple(torch.randn_like(t) for t in given)
    out, dot = torch.func.jvp(lambda *t: call(*t, return_lse=False), given, directions)
    pairs = zip(LEAVES[:3], directions)
    expected = sum((call.expected[f"d{name}"][0] * d).sum() for name, d in pairs)
    torch.testing.assert_close((call.dout * dot).sum(), expected, rtol=1e-9, atol=1e-9)
    return [{"out": out}]


def by_mode(call: Call, attend: Any) -> list[dict[str, Tensor]]:
    mode = call.p.mode
    if mode == "functional":
        return functional_gradients(call)
    if mode == "vmap":
        return mapped(call)
    if mode == "jvp":
        return check_tangent(call)
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    if mode in contexts:
        with contexts[mode]():
            return [outputs(call, attend())]
    autocast = (
        torch.autocast(call.p.device, torch.bfloat16) if mode == "autocast" else contextlib.nullcontext()
    )
    with autocast:
        return differentiate(call, attend)


def check(p: Problem) -> list[str]:
    """What is wrong with the library's answer."""
    torch.set_num_threads(1)  # small formulas are slower on several
    call = Call(p)
    _ = call.expected
    torch.set_num_threads(p.threads)
    attend: Any = call
    if p.mode == "compile":
        torch._dynamo.reset()
        attend = torch.compile(call.__call__, backend="aot_eager")
    if p.mode != "threads":
        every = by_mode(call, attend)
        torch.set_num_threads(1)
        return [line for found in every for line in call.judge(found)]
    wrong: list[str] = []

    def work() -> None:
        try:
            for found in by_mode(call, attend):
                wrong.extend(call.judge(found))
        except Exception as error:
            wrong.extend(said(p, error))

    workers = [threading.Thread(target=work) for _ in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return wrong


def said(p: Problem, error: Exception) -> list[str]:
    """An error as a failure, unless it is the refusal of a backend that was asked for."""
    is_refusal = isinstance(error, NotImplementedError) and f"backend={p.backend!r} " in str(error)
    return [] if is_refusal else [f"{type(error).__name__}: {error}"]


def in_child(p: Problem) -> list[str]:
    """Whether a forked process gets it right, whatever this one has called before.

    PyTorch's own threads do not survive a fork, so the child has one, and the parent computes the formula.
    """
    call = Call(p)
    _ = call.expected
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_SECONDS)
        torch.set_num_threads(1)
        try:
            wrong = any(call.judge(found) for found in by_mode(call, call))
        except Exception as error:
            wrong = bool(said(p, error))
        os._exit(int(wrong))
    status = os.waitpid(child, 0)[1]
    return [f"a forked child ended with status {status}"] if status else []


def run(problems: list[Problem]) -> list[str]:
    """What goes wrong first in a sequence of calls; empty if all is right."""
    for n, p in enumerate(problems):
        try:
            wrong = in_child(p) if p.mode == "fork" else check(p)
        except Exception as error:
            wrong = said(p, error)
        if wrong:
            return [f"call {n}: {line}" for line in wrong]
    return []
