"""The one way from a call to what serves it: its signature finds a plan, or makes one; the plan runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, is_inference_mode_enabled

from tilewise.core.kept import lock_for_forks
from tilewise.core.plan import Plan, Results, Retry, Saves, fitted
from tilewise.core.problem import (
    AttentionProblem,
    Gradients,
    Inputs,
    Options,
    describe_signature,
    of_gradient,
)
from tilewise.core.signature import (
    ALIGNMENT,
    NoMemory,
    Request,
    Signature,
    Tensors,
    TensorSignature,
    as_bshd,
    look,
    rows_dense,
)
from tilewise.core.torch_private import alike
from tilewise.core.values import check_values
from tilewise.dispatch.capability import KERNELS_OF_GPUS
from tilewise.dispatch.choice import BIAS_GRADIENTS, choose, load
from tilewise.gpu.functions.distances import with_bias_of_distances
from tilewise.gpu.launch import launch_plan

MAX_PLANS = 2048
NUM_INPUTS = len(Inputs._fields)
MASK = Inputs._fields.index("mask")
NO_REQUEST = Request()


class Entry:
    """A plan in the cache, and who made it.

    Attributes:
        plan: what serves calls of one signature.
        signature: that.
        backend: the name of the backend that made it.
        saves: what the backward reads of the results: of a forward's own, or of those given to a backward.
        has_values, needs_grad: of the plan's problem.
        is_new: it has not run, and may have kernels of GPUs to compile.
        matches: whether tensors have the signature.
        last_use: by a clock that counts calls.
    """

    __slots__ = (
        "backend", "has_values", "is_new", "last_use", "matches", "needs_grad", "plan", "saves", "signature",
    )  # fmt: skip

    def __init__(self, plan: Plan, signature: Signature, backend: str, saves: Saves) -> None:
        self.plan, self.signature, self.backend, self.saves = plan, signature, backend, saves
        self.has_values, self.needs_grad = plan.problem.has_values, plan.problem.needs_grad
        self.is_new, self.last_use = backend in KERNELS_OF_GPUS, 0
        self.matches: Callable[[Tensors], bool]


# By what is quickly asked of a call: those of calls that differ only in what `Entry.matches` asks.
_entries: dict[tuple[Any, ...], tuple[Entry, ...]] = {}
_count = 0  # of all entries
_kinds: set[Any] = set()  # of calls whose kernels are compiled
_clock = itertools.count()
_lock = lock_for_forks()


def find(
    direction: str, tensors: Tensors, call: tuple[Any, ...], make: Callable[[Signature], Entry]
) -> Entry:
    """The plan of a call. Those not used for the longest time make room for new ones.

    Args:
        tensors: of `Inputs`, and then the results of a signature.
        call: the rest of a `Signature`, from `options` on.

    Raises:
        LazyTensor, NoMemory: see `core.signature.look`.
    """
    try:
        # whether there is a mask: `matches` would compare a tensor with None, which takes 10 us
        # types of options: True equals 1 and 1.0, but what is refused must not find the plan of what is not
        key = (direction, is_grad_enabled(), tensors[0].shape, tensors[1].shape, tensors[MASK] is None, call,  # type: ignore[union-attr]
            type((o := call[0]).causal), type(o.softcap), type(o.scale), type(o.deterministic))  # fmt: skip
        for entry in _entries.get(key, ()):
            if entry.matches(tensors):
                entry.last_use = next(_clock)
                return entry
    except (AttributeError, RuntimeError, ValueError) as error:  # no tensor, NumPy's array, or a nested one
        raise NoMemory from error
    except TypeError:  # an option that cannot be hashed is of a wrong type: the checks name it
        make(_signature(direction, tensors, call))
        raise
    entry = make(signature := _signature(direction, tensors, call))
    seen = (*signature.inputs, *signature.results)
    entry.matches = matcher(tensors, seen, direction, signature.shares_memory)
    entry.last_use = next(_clock)
    with _lock:
        _keep(key, entry)
    return entry


def _keep(key: tuple[Any, ...], entry: Entry) -> None:
    """Add a plan. Where there are too many an eighth goes: several at once, so that few calls sort."""
    global _count
    if _count >= MAX_PLANS:
        oldest = set(sorted(entries(), key=lambda e: e.last_use)[: MAX_PLANS // 8])
        for other, held in list(_entries.items()):
            _entries[other] = tuple(e for e in held if e not in oldest)
            if not _entries[other]:
                del _entries[other]
        _count = sum(map(len, _entries.values()))  # anew, as an interrupt may have come between
    _entries[key] = (entry, *_entries.get(key, ()))
    _count += 1


def _sees_grad(direction: str) -> bool:
    """Whether autograd records: not in inference mode, even where gradients are enabled inside of it."""
    return direction == "forward" and is_grad_enabled() and not is_inference_mode_enabled()


def _signature(direction: str, tensors: Tensors, call: tuple[Any, ...]) -> Signature:
    inputs, results = tensors[:NUM_INPUTS], tensors[NUM_INPUTS:]
    seen = look(inputs, _sees_grad(direction)), look(results, False)
    if inputs[1] is None or inputs[2] is None:
        raise NoMemory
    return Signature(direction, *seen, inputs[1].data_ptr() == inputs[2].data_ptr(), *call)  # type: ignore[union-attr]


def matcher(
    tensors: Tensors, seen: Sequence[TensorSignature | None], direction: str, shares_memory: bool
) -> Callable[[Tensors], bool]:
    """A function: whether other tensors look as these do, in the same inference mode.

    Args:
        tensors: of `Inputs`, and the results of a backward.
        seen: what `look` has found, in the grad mode of now.
        direction: of the call.
        shares_memory: whether key and value begin at one address.
    """
    places: dict[int, int] = {}  # of each tensor, the first: `alike` takes none twice
    twice = []  # places of tensors that stand at an earlier one too, and that one
    for n, t in enumerate(tensors):
        if t is not None and places.setdefault(id(t), n) != n:
            twice.append((n, places[id(t)]))
    first = list(places.values())
    get_first: Callable[[Any], Any] = itemgetter(*first) if len(first) > 1 else itemgetter(slice(1))
    check = alike([tensors[n] for n in first])  # type: ignore[misc]
    absent = {n for n, t in enumerate(tensors) if t is None}  # never empty; most lie side by side
    starts, ends = sorted(absent - {n + 1 for n in absent}), sorted({n + 1 for n in absent} - absent)
    get_absent: Callable[[Any], Any] = itemgetter(*map(slice, starts, ends))
    nothing = get_absent(tensors)  # all None
    looks = {n: t for n, t in enumerate(seen) if t is not None}
    may_share = looks[1].shape[-1:] > looks[2].shape[-1:]  # values may be columns of the keys
    is_on_cpu = all(t.device.type == "cpu" for t in looks.values())
    offsets = None if is_on_cpu else [looks[n].misalignment for n in first]

    def matches(others: Tensors) -> bool:
        given = get_first(others)
        if not (check(*given) if check else look(others, _sees_grad(direction)) == seen):
            return False
        if get_absent(others) != nothing or (twice and any(others[n] is not others[m] for n, m in twice)):
            return False
        if offsets and [t.data_ptr() % ALIGNMENT for t in given] != offsets:
            return False
        return not may_share or (others[1].data_ptr() == others[2].data_ptr()) is shares_memory  # type: ignore[union-attr]

    return matches


def entries() -> list[Entry]:
    """All plans there are."""
    return [entry for held in list(_entries.values()) for entry in held]


def clear() -> None:
    """Forget all plans, as after a change of what backends can serve."""
    global _count
    with _lock:
        _entries.clear()
        _count = 0
        _kinds.clear()
        launch_plan.clear()


def forward_plan(
    inputs: Inputs, options: Options, backend: str | None, request: Request, layout: str = "bshd"
) -> Entry:
    """The plan of a forward; it also gives what a backward needs, if gradients are asked for.

    Raises:
        ValueError, TypeError, NotImplementedError: the call is wrong, or the backend refuses it.
        LazyTensor, NoMemory: see `core.signature.look`.
    """
    call = (options, backend, request, False, torch.get_num_threads(), layout, False, None)
    return find("forward", inputs, call, _make_forward)


def _make_forward(signature: Signature) -> Entry:
    signature = as_bshd(signature)
    problem = describe_signature(signature)
    name = choose(problem, signature.backend)
    saves = saved_for(problem, signature.backend) if problem.needs_grad else Saves(False)
    request = signature.request
    request = request._replace(lse=request.lse or saves.results, residual=request.residual or saves.residual)
    signature = signature._replace(request=request)
    return Entry(fitted(load(name).plan(problem, signature), signature), signature, name, saves)


def saved_for(problem: AttentionProblem, backend: str | None) -> Saves:
    """What the backward of a problem reads of its forward's results, if lse gets no gradient."""
    backward = replace(of_gradient(problem), needs_grad=False, lse_needs_grad=False)
    return load(choose(backward, backend, is_backward=True)).saves(backward)  # type: ignore[no-any-return]


def _make_backward(signature: Signature) -> Entry:
    signature = as_bshd(signature)
    problem = describe_signature(signature)
    name = choose(problem, signature.backend, is_backward=True)
    module = load(name)
    plan = fitted(module.plan(problem, signature), signature)
    if with_bias_of_distances(problem).bias_needs_grad and name in BIAS_GRADIENTS:
        other = load(BIAS_GRADIENTS[name])
        of_bias = fitted(other.plan(problem, signature._replace(direction="bias")), signature)
        plan = WithBiasGradient(problem, plan.layout, plan, of_bias)
    return Entry(plan, signature, name, module.saves(problem))


@dataclass(frozen=True)
class WithBiasGradient:
    """A backward without the gradient of the bias, and another backend's plan for that alone."""

    problem: AttentionProblem
    layout: str
    plan: Plan
    of_bias: Plan

    def run(self, *given: Any) -> Gradients:
        gradients: Any = self.plan.run(*given)
        left: Any = self.of_bias.run(*given)
        return gradients._replace(**left._asdict())


def run(
    entry: Entry,
    inputs: Inputs,
    results: Results | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Any:
    """`Results` (or `Watched`) of a forward, `Gradients` of a backward."""
    if entry.is_new:
        _compile(entry, inputs, results, dout, dlse)
    found = entry.plan.run(inputs, results, dout, dlse)
    while type(found) is Retry:
        found = _other_plan(entry, found.by).run(inputs, results, dout, dlse)
    return found


def _other_plan(entry: Entry, by: Plan | str) -> Plan:
    """Of the same call: see `Retry`."""
    plan = load(by).plan(entry.plan.problem, entry.signature) if isinstance(by, str) else by
    return fitted(plan, entry.signature)


def _compile(entry: Entry, inputs: Inputs, *rest: Any) -> None:
    """Compile the kernels of a GPU's first call side by side, unless others differ from it in lengths alone.

    Kernels know no lengths. A few are chosen by them: what is then new is compiled at its launch.
    """
    entry.is_new = False
    if not inputs.query.is_cuda:
        return
    problem, signature = entry.plan.problem, entry.signature
    shapes = [shape and tuple(n == 1 for n in shape) for shape in (problem.mask_shape, problem.bias_shape)]
    kind = replace(
        problem, batch=0, seqlen_q=0, seqlen_k=0, num_captured=0, mask_shape=shapes[0], bias_shape=shapes[1]
    )
    key = (signature.direction, signature.request, inputs.query.device, kind)
    if key not in _kinds:
        if len(_kinds) >= MAX_PLANS:
            _kinds.clear()
        _kinds.add(key)
        launch_plan.compile_together(entry.plan.run, inputs.query, inputs, *rest)


def attend(
    inputs: Inputs,
    options: Options,
    backend: str | None,
    request: Request = NO_REQUEST,
    are_values_known: bool = False,
) -> Results:
    """A forward, from its inputs. `are_values_known`: a cache has checked lengths and pages itself."""
    entry = forward_plan(inputs, options, backend, request)
    if entry.has_values and not are_values_known:
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
    layout: str = "bshd",
    request: Request = NO_REQUEST,
) -> Gradients:
    """A backward, from what its forward took and gave.

    `is_partial`: the call has some of the keys only, and results are those of all: its share of the
    gradients.

    Raises as `forward_plan`, and if there is no gradient.
    """
    dout = rows_dense(dout)  # that of a sum is one number, which no kernel reads in place
    threads = torch.get_num_threads()
    call = (options, backend, request, needs_bias_gradient, threads, layout, is_partial, None)
    entry = find("backward", (*inputs, *results, dout, dlse), call, _make_backward)
    return run(entry, inputs, results, dout, dlse)  # type: ignore[no-any-return]
