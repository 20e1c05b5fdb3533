"""transformers' mask functions, read as masks.

transformers hands a mask function to every implementation: a closure over (batch, head, q, kv) that
its own combinators have made. The functions count in one rank's tokens, so none of them is ever
asked for a cell. What they are made of says which mask is meant; documents and padding come from
`shard`. A function that is not of transformers' own making is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from transformers import masking_utils

from burst_rt.errors import InputError
from burst_rt.planning.masks import Causal, Chunked, First, Full, Mask, SlidingWindow

__all__ = ["Handed", "MaskIsRead", "mask_of"]


class MaskIsRead(InputError, AttributeError):
    """A model does something else with its mask than to hand it on; `hasattr` says no."""


class Handed:
    """A mask on its way through a model, from its mask function to its attention."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_reading(name)

    def __getitem__(self, places: object) -> NoReturn:
        _refuse_reading("__getitem__")

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        _refuse_reading(func.__name__)


def _refuse_reading(name: str) -> NoReturn:
    raise MaskIsRead(
        f"attn_implementation='burst_rt': attention_mask.{name}: expected a model that hands its "
        "mask on to attention as it is, got one that looks into it or changes it; give each "
        "sequence one rank, or use a model such as Llama, Qwen, Mistral or Gemma"
    )


def mask_of(function: Callable[..., Any]) -> Mask:
    """The mask that a mask function of transformers means, for whole sequences. Raises InputError
    for one that is not known.
    """
    if function is masking_utils.causal_mask_function:
        return Causal()
    if function is masking_utils.bidirectional_mask_function:
        return Full()
    maker, _, _ = function.__qualname__.partition(".<locals>.")
    read = _READERS.get(maker) if function.__module__ == masking_utils.__name__ else None
    if read is None:
        raise InputError(
            f"attn_implementation='burst_rt': expected causal, windowed, chunked or full masks of "
            f"transformers, got a mask function {function.__module__}.{function.__qualname__}, "
            "which counts in one rank's tokens; call burst_attention in your attention layer, with "
            "a mask of your own"
        )
    return read(**inspect.getclosurevars(function).nonlocals)


def _all_of(mask_functions: tuple[Callable[..., Any], ...]) -> Mask:
    mask: Mask = Full()
    for function in mask_functions:
        mask = mask & mask_of(function)
    return mask


def _any_of(mask_functions: tuple[Callable[..., Any], ...]) -> Mask:
    first, *others = (each for each in map(mask_of, mask_functions) if each != _NOTHING)
    for other in others:
        first = first | other
    return first


def _window(sliding_window: int) -> Mask:
    return SlidingWindow(sliding_window - 1, -1)


def _window_both_ways(sliding_window: int) -> Mask:
    return SlidingWindow(sliding_window, sliding_window)


def _chunks(chunk_size: int, left_padding: Any) -> Mask:
    if left_padding.any():
        raise InputError(
            "attn_implementation='burst_rt': chunked attention begins its chunks after the "
            "padding; expected rows without padding before their tokens; pad them behind"
        )
    return Chunked(chunk_size)


def _images(block_sequence_ids: Any) -> Mask:
    """Tokens of an image see each other. The ids are one rank's; -1 is text."""
    if (block_sequence_ids >= 0).any():
        raise InputError(
            "attn_implementation='burst_rt': token_type_ids: tokens of an image see each other, in "
            "both directions, and those of one rank do not say which they are; expected 0 (text) "
            "for every token, got 1 for some; leave images out, or give each sequence one rank"
        )
    return _NOTHING


def _documents(packed_sequence_mask: Any) -> Mask:
    """Documents as one rank's positions show them, which is wrong; `shard` knows better."""
    return Full()


def _moved(mask_function: Callable[..., Any], position_ids: Any) -> Mask:
    """Positions that count from the beginning of their document: the same cells within it."""
    return mask_of(mask_function)


_NOTHING = First(0)
# By the function of `masking_utils` whose closure it is.
_READERS: dict[str, Callable[..., Mask]] = {
    "and_masks": _all_of,
    "or_masks": _any_of,
    "blockwise_overlay": _images,
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _window_both_ways,
    "chunked_overlay": _chunks,
    "packed_sequence_mask_function": _documents,
    "remap_positions_for_packed_sequence": _moved,
}
