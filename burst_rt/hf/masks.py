"""transformers' mask functions, read as masks.

transformers hands a mask function to every implementation: a closure over (batch, head, q, kv) that
its own combinators have made. The functions count in one rank's tokens, so none of them is ever
asked for a cell. Their parts say which mask they are; documents, padding and the starts of chunks
come from `shard`. A function that is not of transformers' own making is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from transformers import masking_utils

from burst_rt.batches import ShardedBatch
from burst_rt.errors import InputError
from burst_rt.hf.release import unknown_release
from burst_rt.planning.masks import Causal, Chunked, First, Full, Mask, SlidingWindow

__all__ = ["MaskHandover", "MaskIsRead", "mask_of"]


class MaskIsRead(InputError, AttributeError):
    """A model does something else with its mask than to hand it on; `hasattr` says no."""


# A mask of chunks: of their size, and of the left padding of each row, as transformers has it.
Chunks: TypeAlias = Callable[[int, Any], Mask]


class MaskHandover:
    """A mask on its way through a model, from its mask function to its attention."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._masks: dict[ShardedBatch | None, Mask] = {}

    def mask(self, batch: ShardedBatch | None) -> Mask:
        """The mask for whole sequences of a batch, or for the sequences of a cache (None).

        Raises InputError for chunks behind padding in a cache.
        """
        if batch not in self._masks:
            chunks = _unpadded_chunks if batch is None else lambda size, _: batch.chunks(size)
            self._masks[batch] = mask_of(self._function, chunks)
        return self._masks[batch]

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


def _unpadded_chunks(size: int, left_padding: Any) -> Mask:
    """Chunks of rows without padding before their tokens; for others InputError."""
    if left_padding.any():
        raise InputError(
            "attn_implementation='burst_rt': chunked attention over a cache with left padding is "
            "not done, because its chunks begin after the padding; expected rows of one length; "
            "generate for each row by itself"
        )
    return Chunked(size)


def mask_of(function: Callable[..., Any], chunks: Chunks = _unpadded_chunks) -> Mask:
    """The mask that a mask function of transformers means, for whole sequences.

    chunks: makes the masks of chunks, which depend on more than distance. Raises InputError for a
    function that is not known, and ConfigError for one that a later transformers has.
    """
    if function is masking_utils.causal_mask_function:
        return Causal()
    if function is masking_utils.bidirectional_mask_function:
        return Full()
    maker, _, _ = function.__qualname__.partition(".<locals>.")
    own = function.__module__ == masking_utils.__name__
    read = _READERS.get(maker) if own else None
    if own and maker not in _READERS.keys() | _REFUSED:
        raise unknown_release(
            "attn_implementation='burst_rt'",
            f"a mask made of {', '.join(sorted(_READERS))}",
            f"one made of {maker}",
        )
    if read is None:
        raise InputError(
            f"attn_implementation='burst_rt': expected causal, windowed, chunked or full masks of "
            f"transformers, got a mask function {function.__module__}.{function.__qualname__}, "
            "which counts in one rank's tokens; call burst_attention in your attention layer, with "
            "a mask of your own"
        )
    return read(chunks, **inspect.getclosurevars(function).nonlocals)


def _all_of(chunks: Chunks, mask_functions: tuple[Callable[..., Any], ...]) -> Mask:
    mask: Mask = Full()
    for function in mask_functions:
        mask = mask & mask_of(function, chunks)
    return mask


def _any_of(chunks: Chunks, mask_functions: tuple[Callable[..., Any], ...]) -> Mask:
    masks = (mask_of(function, chunks) for function in mask_functions)
    first, *others = (each for each in masks if each != _NOTHING)
    for other in others:
        first = first | other
    return first


def _window(chunks: Chunks, sliding_window: int) -> Mask:
    return SlidingWindow(sliding_window - 1, -1)


def _window_both_ways(chunks: Chunks, sliding_window: int) -> Mask:
    return SlidingWindow(sliding_window, sliding_window)


def _chunks(chunks: Chunks, chunk_size: int, left_padding: Any) -> Mask:
    return chunks(chunk_size, left_padding)


def _images(chunks: Chunks, block_sequence_ids: Any) -> Mask:
    """Tokens of an image see each other. The ids are one rank's; -1 is text."""
    if (block_sequence_ids >= 0).any():
        raise InputError(
            "attn_implementation='burst_rt': token_type_ids: tokens of an image see each other, in "
            "both directions, and those of one rank do not say which they are; expected 0 (text) "
            "for every token, got 1 for some; leave images out, or give each sequence one rank"
        )
    return _NOTHING


def _documents(chunks: Chunks, packed_sequence_mask: Any) -> Mask:
    """Documents as one rank's positions show them, which is wrong; `shard` knows better."""
    return Full()


def _moved(chunks: Chunks, mask_function: Callable[..., Any], position_ids: Any) -> Mask:
    """Positions that count from the beginning of their document.

    A mask that depends on distance has the same cells within a document; `chunks` knows where
    chunks begin.
    """
    return mask_of(mask_function, chunks)


_NOTHING = First(0)
# Readers of closures, by the function of `masking_utils` that makes them. All these masks see by
# distance, except chunks, which have edges.
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
# Names of mask functions that depend on one rank's padding or cache.
_REFUSED = frozenset({"padding_mask_function", "add_offsets_to_mask_function"})
