"""Calls in a process where PyTorch lacks some of its private names; run by test_private_names.py.

    python without_names.py GROUP...

The names are hidden while `core/torch_private` is imported, and from then on to that module. Each result is
held against the formula, or against PyTorch's own.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import torch
from torch import nn

import hidden_names

MODULES = {  # that are empty then
    "guards": "torch._C._dynamo.guards",
    "trees": "torch.utils._pytree",
    "compiler": "torch._compile",
}
FUNCTIONS = {  # of torch._C
    "modes": "_len_torch_dispatch_stack",
    "autocast": "_is_any_autocast_enabled",
}
ATTRIBUTES = {  # that `getattr` and `hasattr` do not find
    "streams": ("_cuda_getCurrentRawStream",),
    "versions": ("_version", "_base"),
    "zeros": ("_is_zerotensor",),
    "wrappers": ("_make_wrapper_subclass",),
    "nested": ("_ragged_idx",),
    "operators": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_flash_attention_backward",
    ),
}
GROUPS = (*MODULES, *FUNCTIONS, *ATTRIBUTES)


def hide(groups: list[str]) -> None:
    """Import the module with names hidden."""
    modules = {MODULES[g]: sys.modules.get(MODULES[g]) for g in groups if g in MODULES}
    functions = {FUNCTIONS[g]: getattr(torch._C, FUNCTIONS[g]) for g in groups if g in FUNCTIONS}
    sys.modules.update({name: types.ModuleType(name) for name in modules})
    for name in functions:
        delattr(torch._C, name)
    hidden_names.import_without(
        "core.torch_private", {name for group in groups for name in ATTRIBUTES.get(group, ())}
    )
    for name, function in functions.items():
        setattr(torch._C, name, function)
    for name, found in modules.items():
        if found is None:
            del sys.modules[name]
        else:
            sys.modules[name] = found


if __name__ == "__main__":
    hide(sys.argv[1:])

import tilewise  # noqa: E402
from tilewise import reference  # noqa: E402
from tilewise.compat import torch as compat_torch  # noqa: E402
from tilewise.core import kept, torch_private, values  # noqa: E402
from tilewise.dispatch import plans  # noqa: E402
from tilewise.faces import flex_attention  # noqa: E402


def same(found, expected) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


def dense() -> None:
    """The third call finds the plans of the first."""
    plans.clear()
    for turned in (False, True, False):
        q, k, v = (torch.randn(2, 3, 9, 8, requires_grad=True) for _ in range(3))
        given = [t.transpose(1, 2).contiguous().transpose(1, 2) if turned else t for t in (q, k, v)]
        out = tilewise.scaled_dot_product_attention(*given)
        wanted = nn.functional.scaled_dot_product_attention(*given)
        dout = torch.randn_like(out)
        same(out, wanted)
        for a, b in zip(*(torch.autograd.grad(t, (q, k, v), dout) for t in (out, wanted))):
            same(a, b)
    assert len(plans.entries()) == 4
    with torch.autocast("cpu"):
        out = tilewise.scaled_dot_product_attention(q, k, v)
        assert out.dtype == nn.functional.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16


def functions() -> None:
    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    table = torch.randn(20)
    options = {"score_mod": lambda s, b, h, i, j: torch.where(i > j, s + table[j], torch.add(s, h))}
    for _ in range(2):
        same(tilewise.attention(q, k, v, **options), reference.attention(q, k, v, **options)[0])
        table[3] += 1


def caches() -> None:
    for shares in (False, True):
        cache = tilewise.KVCache(2, 16, 2, 8, dtype=torch.float32, value_in_key=shares)
        tokens = torch.randn(2, 12, 2, 8)
        for first, last in ((0, 5), (5, 6), (4, 8), (8, 12)):
            if first == 4:
                cache.lengths.fill_(4)  # not seen but in its version
            cache.append(tokens[:, first:last], None if shares else tokens[:, first:last])
            query = torch.randn(2, 1, 2, 8)
            found = tilewise.attention_with_cache(query, cache)
            same(found, reference.attention(query, tokens[:, :last], tokens[:, :last])[0])
        assert cache.held() == [12, 12]


def numbers() -> None:
    """Results of values, which writes to them change."""
    t = torch.ones(3)
    sums = lambda x: kept.kept((x,), ("sum",), lambda: float(x.sum()), x.device)  # noqa: E731
    assert sums(t) == sums(t) == 3
    t.view(-1)[1:].zero_()
    assert sums(t) == sums(t[:1]) == 1
    t.data = torch.zeros(3)
    assert sums(t) == 0
    q = torch.randn(5, 2, 8)
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    inputs = tilewise.core.problem.Inputs(q, q, q, offsets, offsets)
    before = values._identity("problem", inputs)
    offsets[1] = 3
    assert values._identity("problem", inputs) != before


def lazy() -> None:
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    negated, zeros = torch._neg_view(v), torch._efficientzerotensor(1, 9, 2, 8)
    for backend in ("llvm", "tiled", None):
        for _ in range(2):
            same(tilewise.attention(q, k, negated, backend=backend), -reference.attention(q, k, v)[0])
            assert (tilewise.attention(q, k, zeros, backend=backend) == 0).all()


def block_masks() -> None:
    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    mask = flex_attention.create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu", BLOCK_SIZE=16
    )
    for is_causal in (True, False):
        expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        same(flex_attention.flex_attention(q, k, v, block_mask=mask), expected)
        mask.kv_num_blocks.zero_()
        mask.full_kv_num_blocks.fill_(4)
        mask.full_kv_indices.copy_(torch.arange(4).expand_as(mask.full_kv_indices))
    try:
        flex_attention.flex_attention(q, k, v, block_mask=mask[:, :1])
    except (ValueError, RuntimeError) as error:
        assert "slice" in str(error)


def nested() -> None:
    rows = [torch.randn(n, 2, 8) for n in (3, 5)]
    t = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    out = tilewise.scaled_dot_product_attention(t, t, t)
    for found, row in zip(out.transpose(1, 2).unbind(), rows, strict=True):
        same(found, reference.attention(row[None], row[None], row[None])[0][0])
    try:
        tilewise.scaled_dot_product_attention(*[t.transpose(1, 2)] * 3)
    except ValueError as error:
        assert "ragged" in str(error)


def masks_of_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        return
    from transformers import masking_utils

    from tilewise.faces.transformers_mask import PatternMask, visibility_mask

    mask = visibility_mask(2, 9, 9, 0, 0, masking_utils.causal_mask_function, allow_is_causal_skip=False)
    assert isinstance(mask, PatternMask) is (torch_private.wrapper_subclass is not None)
    assert (mask == torch.ones(9, 9).tril().bool()).all()


def operators() -> None:
    x = torch.randn(1, 5, 2, 8)
    try:
        tilewise.attention(x, x, x, backend="aten")
        assert torch_private.cpu_forward is not None
    except NotImplementedError as error:
        assert torch_private.cpu_forward is None and "operators that this PyTorch does not have" in str(error)
    assert ("backward" in torch_private.flash_operators()) is ("operators" not in sys.argv)
    compat_torch.override("CPU").remove()


if __name__ == "__main__":
    assert torch_private.CAN_TELL is ("modes" not in sys.argv)
    assert (torch_private.alike([torch.ones(1)]) is None) is ("guards" in sys.argv)
    for check in (dense, functions, caches, numbers, lazy, block_masks, nested, operators):
        check()
    if "wrappers" in sys.argv:
        masks_of_transformers()
    print("the same")
