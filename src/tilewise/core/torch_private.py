"""Everything of PyTorch that has no public name, with a plain way where it is missing.

Checked with torch 2.11 to 2.15. Where a name is missing, calls take more time and give the same:
`tests/test_private_names.py` hides them, and sees that none stands elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial, wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

P = ParamSpec("P")
Result = TypeVar("Result")

try:
    from torch.utils._pytree import tree_leaves, tree_map_only
except ImportError:  # of sequences and dicts, which are all that functions of tensors take

    def tree_leaves(tree: Any) -> list[Any]:  # type: ignore[misc]
        """What a nest of sequences and dicts holds, in order."""
        if isinstance(tree, dict):
            tree = tree.values()
        elif not isinstance(tree, (tuple, list)):
            return [tree]
        return [leaf for part in tree for leaf in tree_leaves(part)]

    def tree_map_only(kind: Any, function: Any, tree: Any) -> Any:  # type: ignore[no-redef]
        """The nest, with `function` of each leaf of a type in its place."""
        if isinstance(tree, dict):
            return {name: tree_map_only(kind, function, part) for name, part in tree.items()}
        if isinstance(tree, (tuple, list)):
            parts = [tree_map_only(kind, function, part) for part in tree]
            return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
        return function(tree) if isinstance(tree, kind) else tree


try:  # the public one imports the compiler, and Triton with it, where it decorates
    from torch._compile import _disable_dynamo as not_compiled
except ImportError:
    not_compiled = torch.compiler.disable


try:  # None but where the compiler looks at this thread's frames
    frame_callback: Any = importlib.import_module("torch._C._dynamo.eval_frame").get_eval_frame_callback
except (ImportError, AttributeError):
    frame_callback = partial(int, 0)


def between_graphs(function: Callable[P, Result]) -> Callable[P, Result]:
    """The function, at whose calls compiled code breaks. Only there it imports the compiler.

    Where a graph has broken, calls run as plain code, whose frames the compiler would take one by one.
    """
    uncompiled = not_compiled(function)

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> Result:
        return (uncompiled if is_compiling() or frame_callback() else function)(*arguments, **options)

    return call


def while_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo calls the function where it meets it. As `torch.compiler.assume_constant_result`, which imports
    Dynamo and Triton."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


PLAIN_TYPES = (Tensor, torch.nn.Parameter)

Ask = Callable[[], Any]  # in C, as every short call asks them all

try:
    from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack
    from torch._C._functorch import is_legacy_batchedtensor

    are_transforms_active: Ask = _are_functorch_transforms_active
    num_modes: Ask = _len_torch_dispatch_stack
    is_tracing: Ask = _get_tracing_state  # None if nothing traces
    forward_level: Ask = partial(getattr, forward_ad, "_current_level")  # of forward mode; below 0: off
    forward_level()
    CAN_TELL = True
except (ImportError, AttributeError):
    are_transforms_active = num_modes = is_tracing = forward_level = partial(int, 1)  # as if all were on
    CAN_TELL = False


try:
    from torch._C._functorch import TransformType, get_interpreter_stack

    @while_tracing
    def _has_derivatives() -> bool:
        """Whether a transform is on that takes derivatives."""
        return any(t.key() != TransformType.Vmap for t in get_interpreter_stack() or ())

except ImportError:  # PyTorch refuses those of reverse mode itself

    @while_tracing
    def _has_derivatives() -> bool:
        """Whether forward mode is on."""
        try:
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
        except RuntimeError:
            return False
        return True


def is_differentiated() -> bool:
    """Whether forward mode is on, or a transform that takes derivatives.

    Compiled code is guarded by both: by the first because Dynamo sees it read.
    """
    return getattr(forward_ad, "_current_level", -1) >= 0 or _has_derivatives()


try:  # which is there without the compiler
    _guards: Any = importlib.import_module("torch._C._dynamo.guards")
except ImportError:
    _guards = None
_TensorGuards = getattr(_guards, "TensorGuards", None)


def _empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")


# As compiled code does it: the public function takes twice as long. Sizes are plain tuples.
empty_strided_cpu = getattr(_guards, "_empty_strided_cpu", _empty_strided)


def compiles_here() -> bool:
    """Whether this thread compiles or exports. PyTorch's flag is one for all threads, and code that is
    compiled leaves out checks."""
    return is_compiling() and (is_dynamo_compiling() or num_modes() > 0)


def is_plain(query: Tensor) -> bool:
    """Whether no transform, tracing mode or tensor subclass has to see the operator; a compiler may."""
    watched = are_transforms_active() or num_modes() or is_tracing()
    return not watched and forward_level() < 0 and type(query) in PLAIN_TYPES


def is_fake(t: Tensor) -> bool:
    """Whether a tensor is of `FakeTensorMode`: its class, told by its name, has no public place."""
    return type(t).__name__ == "FakeTensor"


def is_plain_eager(query: Tensor) -> bool:
    """The same, and that nothing compiles: in no thread, as PyTorch has one flag for all."""
    return not is_compiling() and is_plain(query)


def alike(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Whether as many other tensors are like these, none given twice, in all but numbers and addresses: type,
    sizes, strides, dtype, device, requires_grad whatever the grad mode, and the bits of a negation.

    None where PyTorch cannot tell. It keeps no tensor.
    """
    if _TensorGuards is None:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards.check  # type: ignore[no-any-return]


def is_batched(t: Tensor | None) -> bool:
    """Whether PyTorch's older vmap has made t: `is_grads_batched`."""
    return t is not None and (not CAN_TELL or is_legacy_batchedtensor(t))


def plain_apply(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` for plain eager code: the public one takes 2 us to look for transforms."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def _unlike_any(t: Tensor) -> object:
    return object()


# A number that grows with each write to a tensor's memory; inference tensors have none. Where PyTorch tells
# none it is another each time, so that nothing that was read of a tensor passes for true still.
version_of: Callable[[Tensor], Any] = attrgetter("_version") if hasattr(Tensor, "_version") else _unlike_any


def base_and_version(t: Tensor) -> tuple[Tensor, Any]:
    """(the tensor whose memory t is a view of, or t; its version). Not of an inference tensor.

    Where PyTorch does not tell the base it is t: what was made of one view is made again of another.
    """
    base = getattr(t, "_base", None)
    return t if base is None else base, version_of(t)


if hasattr(Tensor, "_is_zerotensor"):

    def is_lazy(t: Tensor) -> bool:
        """Whether memory does not hold the numbers: they are negated, or all 0 and nowhere."""
        return t.is_neg() or t._is_zerotensor()  # type: ignore[attr-defined]

else:

    def is_lazy(t: Tensor) -> bool:
        """The same. What is all 0 has an address of 0; of other tensors PyTorch's dispatcher takes care."""
        if t.is_neg() or is_compiling() or type(t) not in PLAIN_TYPES:
            return t.is_neg()
        return t.layout == torch.strided and not t.is_meta and t.numel() > 0 and t.data_ptr() == 0


# A tensor of a subclass without memory; None where there is none.
wrapper_subclass: Any = getattr(Tensor, "_make_wrapper_subclass", None)


def ragged_dim(t: Tensor) -> int:
    """The ragged dimension of a nested tensor of layout `torch.jagged`."""
    found = getattr(t, "_ragged_idx", None)
    if found is not None:
        return int(found)
    return next(n for n, size in enumerate(t.shape) if isinstance(size, torch.SymInt))


def is_of_a_slice(mask_mod: Any) -> bool:
    """Whether that is the mask_mod of a sliced BlockMask; one of another name raises where it is called."""
    return getattr(mask_mod, "__name__", None) == "_sliced_mask_mod_error"


def mark_static(*tensors: Tensor | None) -> None:
    """Tell `torch.compile` that these stay where they are, so that mode="reduce-overhead" may write to them.

    As `torch._dynamo.mark_static_address` does without a guard; its import takes a second. A compiler that
    does not read it takes them for any others, and copies.
    """
    for t in tensors:
        if t is not None:
            t._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# The current CUDA stream of a device, by its index, as a number: the public object takes 3 us to make.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _current_stream)


def own_dtypes(device_type: str) -> AbstractContextManager[Any]:
    """Outside of autocast, which would change the dtypes of products in PyTorch operations."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


try:
    from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
except ImportError:

    def is_any_autocast_enabled() -> bool:
        """Whether autocast is on for some device: the public function asks for one."""
        return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


USUAL_TIMEOUT = timedelta(minutes=10)  # of NCCL


def symmetric_tensor(size: int, device: torch.device) -> Tensor | None:
    """uint8 (size,) that ranks may share by `share`; None where this PyTorch has none, or no room is left."""
    try:
        module = importlib.import_module("torch.distributed._symmetric_memory")
        if module.get_backend(device) not in ("CUDA", None):  # others have no barrier
            return None
        try:
            found: Tensor = module.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError:
            torch.cuda.empty_cache()  # what PyTorch keeps is not to be had for this
            found = module.empty(size, dtype=torch.uint8, device=device)
        return found
    except (ImportError, AttributeError, RuntimeError):
        return None


def share(own: Tensor, group: Any) -> tuple[list[Tensor], Callable[[], None]]:
    """That of each rank of a group, and a barrier. All ranks take part, each with one of `symmetric_tensor`.

    The barrier is a kernel that ends once the current streams of all ranks have come to it, and fails after
    the group's timeout.
    """
    handle = importlib.import_module("torch.distributed._symmetric_memory").rendezvous(own, group)
    buffers = [handle.get_buffer(rank, tuple(own.shape), own.dtype) for rank in range(handle.world_size)]
    buffers[handle.rank] = own
    try:
        timeout = group._get_backend(own.device).options._timeout
    except (AttributeError, RuntimeError):
        timeout = USUAL_TIMEOUT
    return buffers, partial(handle.barrier, 0, int(timeout.total_seconds() * 1000))


def flat_mesh(mesh: Any) -> Any:
    """A DeviceMesh of one dimension with all ranks of a mesh, which takes part in the first call."""
    flatten = getattr(mesh, "_flatten", None)
    return flatten() if flatten else type(mesh)(mesh.device_type, mesh.mesh.flatten())


def number(name: str, value: Any) -> Any:
    """A number of NumPy's as one of Python's in compiled code, which has an array for it; else as it is.

    Raises TypeError but for a float64, the only one that is a constant of the graph.
    """
    if not is_compiling() or type(value).__name__ != "ndarray":
        return value
    dtype = torch.as_tensor(value).dtype
    if dtype != torch.float64:
        kind = "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"
        raise TypeError(f"{name} of NumPy's {dtype} is an array to compiled code: pass it by {kind}()")
    return value.item()


# ---- operators

# PyTorch's attention on CPUs, with lse; None where there is none: other backends serve.
cpu_forward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
cpu_backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)

FLASH_OPERATORS = {  # for which others may be given, by what they compute
    "sdpa_forward": "_scaled_dot_product_flash_attention",
    "sdpa_backward": "_scaled_dot_product_flash_attention_backward",
    "forward": "_flash_attention_forward",
    "forward_inplace": "_flash_attention_forward_no_dropout_inplace",
    "backward": "_flash_attention_backward",
}


def flash_operators() -> dict[str, str]:
    """Those that this PyTorch has: it goes on with its own where a name is missing."""
    return {what: name for what, name in FLASH_OPERATORS.items() if hasattr(torch.ops.aten, name)}
