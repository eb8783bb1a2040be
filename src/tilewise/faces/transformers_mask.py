"""The masks of transformers models: recognized by their pattern where they have one.

`visibility_mask` is what transformers calls once a forward pass to learn which keys each query may see:

    None                causal (if the module is) or full attention describes everything
    PatternMask         causal, window, padding, cache length and packing, as a description: O(batch * seqlen)
    a plain bool mask   anything else: (batch, 1, seqlen_q, seqlen_k), True = attend

so tiles are skipped and no N x N mask is stored wherever the mask has a known shape. A window is always told
by the mask and never left to the layer's `sliding_window` argument: not all models pass it.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewise.autograd import functions
from tilewise.core.kept import kept
from tilewise.core.torch_private import compiles_here, tree_map_only, wrapper_subclass

Bounds = tuple[int | None, int | None]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Query `i` sees key `j` when `i + shift - left <= j <= i + shift + right`, `j` is no padding, and both
    lie in the same packed sequence. A bound of None is no bound."""

    seqlen_q: int
    seqlen_k: int
    shift: int = 0  # the first query's position among the keys: how many of them a cache held before
    left: int | None = None
    right: int | None = None
    padding: Tensor | None = None  # bool (batch, seqlen_k), True = a real token
    sequence_ids: Tensor | None = None  # int (batch, seqlen): equal for the tokens of one packed sequence

    @property
    def used_k(self) -> int:
        """Keys up to the last one that a query sees; a static cache has free ones behind it."""
        if self.right is None:
            return self.seqlen_k
        return max(0, min(self.seqlen_k, self.shift + self.seqlen_q + self.right))

    @property
    def window(self) -> Bounds:
        """The bounds as `tilewise.attention` counts them for `used_k` keys; None where they hide nothing."""
        if functions.is_served():  # of a shard: all ranks have to say the same
            return self.left, self.right
        ahead = self.shift + self.seqlen_q - self.used_k  # of the bottom-right aligned position
        left = None if self.left is None else self.left - ahead
        right = None if self.right is None else self.right + ahead
        left = None if left is not None and left >= self.used_k - 1 else left
        return left, None if right is not None and right >= self.seqlen_q - 1 else right

    @functools.cached_property
    def key_mask(self) -> Tensor | None:
        """(batch, 1, 1, seqlen_k): the padding as a mask; inside of `context_parallel` of all ranks' keys."""
        return None if self.padding is None else functions.all_columns(self.padding[:, None, None])

    @functools.cached_property
    def cu_seqlens(self) -> Tensor:
        """(sequences + 1,) offsets of the packed sequences in the flattened (batch * seqlen) tokens."""
        ids = self.sequence_ids
        assert ids is not None
        is_start = torch.ones_like(ids, dtype=torch.bool)
        is_start[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = is_start.flatten().nonzero().flatten()
        return torch.cat([starts, starts.new_tensor([ids.numel()])])


def packed_starts(position_ids: Any, batch: int, seqlen: int) -> Tensor | None:
    """Offsets of the sequences that position ids (1, seqlen) number, each from their minimum; None of one.

    As transformers' flash-attention does it, for models whose mask does not say so: with a cache transformers
    looks for no packing. Positions that leave gaps or repeat are one sequence's, as of pruned prompts and
    pictures. Read once for all layers; not in compiled code or captured graphs.
    """
    if compiles_here() or functions.is_served():
        return None
    if not isinstance(position_ids, Tensor) or batch != 1 or tuple(position_ids.shape) != (1, seqlen):
        return None
    if position_ids.is_meta or (position_ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return kept((position_ids,), ("packed starts",), lambda: _starts(position_ids), position_ids.device)


def _starts(position_ids: Tensor) -> Tensor | None:
    starts = (position_ids[0, 1:] == position_ids.min()).nonzero().flatten() + 1
    if len(starts) == 0:
        return None
    return nn.functional.pad(nn.functional.pad(starts, (1, 0)), (0, 1), value=position_ids.shape[1])


class PatternMask(Tensor):
    """A bool mask (batch, 1, seqlen_q, seqlen_k), True = attend, that is a `Pattern` until it is used.

    Any operation turns it into the full mask, for good: models that slice, combine or overwrite masks stay
    right and only lose the advantage.
    """

    _pattern: Pattern
    _build: Callable[[], Tensor]
    _full: Tensor | None

    @staticmethod
    def __new__(cls, pattern: Pattern, build: Callable[[], Tensor], batch: int, device: Any) -> PatternMask:
        shape = (batch, 1, pattern.seqlen_q, pattern.seqlen_k)
        mask = wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask._pattern, mask._build, mask._full = pattern, build, None
        return mask

    @property
    def pattern(self) -> Pattern | None:
        """None once the mask is a full one, whose values may since have changed."""
        return self._pattern if self._full is None else None

    def full(self) -> Tensor:
        """The mask as a plain tensor, the same one at each call."""
        if self._full is None:
            self._full = self._build().contiguous()
        return self._full

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PatternMask({self._pattern if self._full is None else self._full})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.full().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default and args[0].pattern is not None:  # activation checkpointing
            return PatternMask(args[0]._pattern, args[0]._build, args[0].shape[0], args[0].device)
        args, kwargs = tree_map_only(PatternMask, PatternMask.full, (args, kwargs or {}))
        return func(*args, **kwargs)


def visibility_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    mask_function: Callable,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask function: takes what its `sdpa_mask` takes, and documents.

    Returns:
        None where full attention over all keys says everything and the caller allows it, in traced code also
        where causal attention does; otherwise a bool mask (batch_size, 1, q_length, kv_length), True =
        attend, which is a `PatternMask` if possible.

    Raises:
        NotImplementedError: the layers of this model would add the mask to scores of their own.
    """
    config = type(kwargs.get("config"))
    if _has_own_code(config):
        raise NotImplementedError(
            f"attn_implementation of {config.__name__} must be 'eager': its layers ask none"
        )
    # each by name: Dynamo of torch 2.11 refuses the lazy module that `from transformers import` starts from
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    build = functools.partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        device=device,
        **kwargs,
    )
    is_offset_known = not isinstance(q_offset, Tensor)
    if is_tracing(attention_mask):  # values cannot be read, and compiled graphs take plain masks
        may_skip = attention_mask is None and is_offset_known
        if mask_function is causal_mask_function:
            may_skip &= allow_is_causal_skip and bool(q_offset + q_length == kv_offset + kv_length)
        else:
            may_skip &= allow_is_bidirectional_skip and mask_function is bidirectional_mask_function
        return None if may_skip else build()

    terms = _terms(mask_function)
    is_2d = attention_mask is None or attention_mask.ndim == 2
    if terms is None or not is_2d or (q_length == 1 and not is_offset_known):
        return build()
    first_key = int(kv_offset)
    pattern = Pattern(q_length, kv_length, int(q_offset) - first_key, **terms._asdict())
    if attention_mask is not None:
        pattern = _with_padding(pattern, attention_mask, first_key)
    left, right = pattern.window
    is_causal = pattern.right == 0
    hides_keys = pattern.padding is not None or pattern.sequence_ids is not None or pattern.used_k < kv_length
    may_skip = allow_is_causal_skip if is_causal else allow_is_bidirectional_skip
    # A causal pattern is said here: decoders that were written with masks alone have is_causal=False.
    if may_skip and not hides_keys and (left, right) == (None, None):
        return None
    if (q_length == 1 and not functions.is_served()) or min(left or 0, right or 0) < 0:
        return build()  # one row costs nothing, and decoding may be compiled
    return build() if wrapper_subclass is None else PatternMask(pattern, build, batch_size, device)


@torch.compiler.assume_constant_result
def _has_own_code(config: type) -> bool:
    """Whether layers of a model of transformers' own multiply queries and keys themselves."""
    module = sys.modules.get(config.__module__.replace(".configuration_", ".modeling_"))
    if module is None or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return False
    is_theirs = module.__name__.startswith("transformers.models.")
    classes = (t for t in vars(module).values() if getattr(t, "__module__", None) == module.__name__)
    return is_theirs and any("Attention" in t.__name__ for t in classes)


class _Terms(NamedTuple):
    """What a mask function says of a `Pattern`."""

    left: int | None = None
    right: int | None = None
    sequence_ids: Tensor | None = None


def _terms(mask_function: Any) -> _Terms | None:
    """What a mask function of transformers asks of a key; None if that is more than a `Pattern` can say."""
    kind = _mask_function_kinds().get(getattr(mask_function, "__code__", None))
    argument: Any = mask_function.__closure__[0].cell_contents if kind and mask_function.__closure__ else None
    match kind:
        case "full":
            return _Terms()
        case "causal":
            return _Terms(right=0)
        case "window":  # of w keys, the query's own among them
            return _Terms(left=argument - 1)
        case "window both ways":
            return _Terms(left=argument, right=argument)
        case "packed":
            return _Terms(sequence_ids=argument)
        case "own positions":  # of packed sequences, in which they are consecutive: nothing but that moves
            return _terms(argument)
        case "and":
            return _intersection([_terms(part) for part in argument])
    return None


def _intersection(parts: list[_Terms | None]) -> _Terms | None:
    known = [part for part in parts if part is not None]
    packings = [part.sequence_ids for part in known if part.sequence_ids is not None]
    if len(known) < len(parts) or len(packings) > 1:
        return None
    lefts = [part.left for part in known if part.left is not None]
    rights = [part.right for part in known if part.right is not None]
    return _Terms(min(lefts, default=None), min(rights, default=None), *packings)


@functools.cache
def _mask_function_kinds() -> dict[CodeType | None, str]:
    """The code of the mask functions that transformers' factories make, by which they are recognized."""
    from transformers import masking_utils as hf

    zeros = torch.zeros(1, 1, dtype=torch.int32, device="cpu")
    own = getattr(hf, "remap_positions_for_packed_sequence", None)  # from 5.23 on
    kinds = {own(hf.causal_mask_function, zeros).__code__: "own positions"} if own else {}
    return kinds | {
        hf.bidirectional_mask_function.__code__: "full",
        hf.causal_mask_function.__code__: "causal",
        hf.sliding_window_overlay(1).__code__: "window",
        hf.sliding_window_bidirectional_overlay(1).__code__: "window both ways",
        hf.packed_sequence_mask_function(zeros).__code__: "packed",
        hf.and_masks(hf.causal_mask_function).__code__: "and",
    }


def _with_padding(pattern: Pattern, attention_mask: Tensor, kv_offset: int) -> Pattern:
    """Add what a (batch, tokens) attention mask says, if it hides a key that is in use.

    Of a shard it is always added: one that hides nothing here may hide keys on another rank.

    Raises:
        ValueError: the mask is not one of the shard.
    """
    if functions.is_served():
        if attention_mask.shape[1] != pattern.seqlen_k:
            raise ValueError(
                f"attention_mask.shape={tuple(attention_mask.shape)} must have the {pattern.seqlen_k} tokens "
                "of this rank inside of context_parallel: give it as one of its buffers"
            )
        return dataclasses.replace(pattern, padding=attention_mask.bool())
    missing = kv_offset + pattern.seqlen_k - attention_mask.shape[1]  # a static cache is longer
    padding = nn.functional.pad(attention_mask.bool(), (0, max(0, missing)))
    padding = padding[:, kv_offset : kv_offset + pattern.seqlen_k]
    if bool(padding[:, : pattern.used_k].all()):
        return pattern
    return dataclasses.replace(pattern, padding=padding)
