"""The attention backend of tilewise for SGLang, found by it through the entry point `sglang.srt.plugins`.

    python -m sglang.launch_server --model-path MODEL --attention-backend tilewise

`attention` has the backend; nothing here imports SGLang before it is asked to.
"""

from __future__ import annotations

import logging
from typing import Any

from tilewise.compat import Package

NAME = "tilewise"
PACKAGE = Package(("sglang",), "0.5.23 is tested")

logger = logging.getLogger(__name__)


def register() -> None:
    """Make "tilewise" an attention backend of SGLang; safe to call twice. No server uses it yet.

    Raises:
        ImportError: SGLang is not installed.
        NotImplementedError: this SGLang has other interfaces; the message names versions that fit.
    """
    registry, choices = PACKAGE.modules(
        "sglang.srt.layers.attention.attention_registry", "sglang.srt.arg_groups.choices"
    )
    registry.register_attention_backend(NAME)(make)
    if NAME not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([NAME])


def plugin() -> None:
    """What SGLang calls in each of its processes. One that does not fit works on, with a warning."""
    try:
        register()
    except (ImportError, AttributeError, NotImplementedError) as error:
        logger.warning("tilewise is no attention backend here: %s", error)


def make(runner: Any) -> Any:
    """The backend of a model runner: what SGLang calls for the name."""
    from tilewise.compat.sglang.attention import TilewiseAttnBackend

    return TilewiseAttnBackend(runner)
