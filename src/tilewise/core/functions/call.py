"""Functions in a call: from what users pass to what operators take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise.core.checks import check_tensors
from tilewise.core.functions.captured import check_indices, pack
from tilewise.core.functions.trace import trace
from tilewise.core.problem import Inputs, Options
from tilewise.core.torch_private import not_compiled

MaskFunction = Callable[[Any, Any, Any, Any], Any]
ScoreFunction = Callable[[Any, Any, Any, Any, Any], Any]


def with_functions(
    inputs: Inputs,
    options: Options,
    mask_mod: MaskFunction | None,
    score_mod: ScoreFunction | None,
) -> tuple[Inputs, Options]:
    """Inputs and options with the functions' captured tensors and expression. Compiled code breaks here.

    Raises:
        TypeError, NotImplementedError, IndexError, ValueError: a function is none that can be traced.
    """
    # Only compiled code needs what keeps the compiler out, which imports the compiler.
    add = _added_uncompiled if torch.compiler.is_compiling() else _added
    return add(inputs, options, mask_mod, score_mod)


def _added(
    inputs: Inputs, options: Options, mask_mod: MaskFunction | None, score_mod: ScoreFunction | None
) -> tuple[Inputs, Options]:
    check_tensors(query=inputs.query, key=inputs.key)
    found = trace(mask_mod, score_mod, torch.is_grad_enabled(), inputs.query.device)
    buffers = pack(found, inputs.query)
    if inputs.cu_seqlens_q is None and inputs.query.ndim == inputs.key.ndim == 4:
        batch, seqlen_q, heads, _ = inputs.query.shape
        check_indices(found, (batch, heads, seqlen_q, inputs.key.shape[1]))
    floats, integers, layout = buffers
    inputs = inputs._replace(captured_floats=floats, captured_integers=integers, captured_layout=layout)
    return inputs, options._replace(functions=found.functions.text)


_added_uncompiled = not_compiled(_added)
