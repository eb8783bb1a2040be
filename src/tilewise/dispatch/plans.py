"""The one way from a call to what serves it: its signature finds a plan, or makes one; the plan runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.core.plan import Plan, Results, Retry, Saves
from tilewise.core.problem import (
    AttentionProblem,
    Gradients,
    Inputs,
    Options,
    describe_signature,
    of_gradient,
)
from tilewise.core.signature import Request, Signature, look
from tilewise.core.values import check_values
from tilewise.dispatch.choice import choose, load
from tilewise.gpu.launch import launch_plan

MAX_PLANS = 2048
NO_REQUEST = Request()


class Entry:
    """A plan in the cache, and who made it.

    Attributes:
        plan: what serves calls of one signature.
        signature: that.
        backend: the name of the backend that made it.
        saves: what the backward reads of the results: of a forward's own, or of those given to a backward.
    """

    __slots__ = ("backend", "last_use", "plan", "saves", "signature")

    def __init__(self, plan: Plan, signature: Signature, backend: str, saves: Saves) -> None:
        self.plan, self.signature, self.backend, self.saves = plan, signature, backend, saves
        self.last_use = 0


_entries: dict[Signature, Entry] = {}
_clock = itertools.count()
_lock = threading.Lock()


def find(signature: Signature, make: Callable[[Signature], Entry]) -> Entry:
    """The plan of a signature. Those not used for the longest time make room for new ones."""
    try:
        entry = _entries.get(signature)
    except TypeError:  # an option that cannot be hashed is of a wrong type: the checks name it
        make(signature)
        raise
    if entry is None:
        entry = make(signature)
        with _lock:
            if len(_entries) >= MAX_PLANS:
                by_age = sorted(_entries, key=lambda s: _entries[s].last_use)
                for oldest in by_age[: MAX_PLANS // 8]:  # several at once, so that few calls sort
                    del _entries[oldest]
            _entries[signature] = entry
    entry.last_use = next(_clock)
    return entry


def clear() -> None:
    """Forget all plans, as after a change of what backends can serve."""
    with _lock:
        _entries.clear()
        launch_plan.clear()


def forward_plan(inputs: Inputs, options: Options, backend: str | None, request: Request) -> Entry:
    """The plan of a forward; it also gives what a backward needs, if gradients are asked for.

    Raises:
        ValueError, TypeError, NotImplementedError: the call is wrong, or the backend refuses it.
        LazyTensor, NoMemory: see `core.signature.look`.
    """
    tensors, shares_memory = look(inputs, torch.is_grad_enabled()), _share_memory(inputs)
    threads = torch.get_num_threads()
    signature = Signature(
        "forward", tensors, (), shares_memory, options, backend, request, False, threads
    )  # fmt: skip
    return find(signature, _make_forward)


def _make_forward(signature: Signature) -> Entry:
    problem = describe_signature(signature)
    name = choose(problem, signature.backend)
    saves = saved_for(problem, signature.backend) if problem.needs_grad else Saves(False)
    request = signature.request
    request = request._replace(lse=request.lse or saves.results, residual=request.residual or saves.residual)
    signature = signature._replace(request=request)
    return Entry(load(name).plan(problem, signature), signature, name, saves)


def saved_for(problem: AttentionProblem, backend: str | None) -> Saves:
    """What the backward of a problem reads of its forward's results, if lse gets no gradient."""
    backward = replace(of_gradient(problem), needs_grad=False, lse_needs_grad=False)
    return load(choose(backward, backend, is_backward=True)).saves(backward)  # type: ignore[no-any-return]


def backward_plan(
    inputs: Inputs,
    results: Results,
    dout: Tensor,
    dlse: Tensor | None,
    options: Options,
    backend: str | None,
    needs_bias_gradient: bool,
    is_partial: bool = False,
) -> Entry:
    """The plan of a backward. Raises as `forward_plan`, and if there is no gradient."""
    signature = Signature(
        "backward", look(inputs, False), look((*results, dout, dlse), False), _share_memory(inputs),
        options, backend, NO_REQUEST, needs_bias_gradient, torch.get_num_threads(), is_partial,
    )  # fmt: skip
    return find(signature, _make_backward)


def _share_memory(inputs: Inputs) -> bool:
    key, value = inputs.key, inputs.value
    return key is not None and value is not None and key.data_ptr() == value.data_ptr()


def _make_backward(signature: Signature) -> Entry:
    problem = describe_signature(signature)
    name = choose(problem, signature.backend, is_backward=True)
    module = load(name)
    return Entry(module.plan(problem, signature), signature, name, module.saves(problem))


def run(entry: Entry, *arguments: Any) -> Any:
    """`Results` (or `Watched`) of a forward, `Gradients` of a backward."""
    found = entry.plan.run(*arguments)
    while type(found) is Retry:
        plan = found.by
        if isinstance(plan, str):
            plan = load(plan).plan(entry.plan.problem, entry.signature)
        found = plan.run(*arguments)  # type: ignore[union-attr]
    return found


def attend(
    inputs: Inputs,
    options: Options,
    backend: str | None,
    request: Request = NO_REQUEST,
    are_values_known: bool = False,
) -> Results:
    """A forward, from its inputs. `are_values_known`: a cache has checked lengths and pages itself."""
    entry = forward_plan(inputs, options, backend, request)
    if entry.plan.problem.has_values and not are_values_known:
        check_values(entry.plan.problem, inputs, options)
    return run(entry, inputs)  # type: ignore[no-any-return]


def differentiate(
    inputs: Inputs,
    results: Results,
    dout: Tensor,
    dlse: Tensor | None,
    options: Options,
    backend: str | None,
    needs_bias_gradient: bool,
    is_partial: bool = False,
) -> Gradients:
    """A backward, from what its forward took and gave.

    `is_partial`: the call has some of the keys only, and results are those of all: its share of the
    gradients.
    """
    arguments = (dout, dlse, options, backend, needs_bias_gradient, is_partial)
    entry = backward_plan(inputs, results, *arguments)
    return run(entry, inputs, results, dout, dlse)  # type: ignore[no-any-return]
