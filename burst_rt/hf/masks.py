"""transformers' mask functions, read as masks.

transformers hands a mask function to every implementation: a closure over (batch, head, q, kv) that
its own combinators have made. The functions count in one rank's tokens, so none of them is ever
asked for a cell. Their parts say which mask they are; documents, padding, the starts of chunks and
images come from `shard`. A function that is not of transformers' own making is read by `functions`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
from transformers import masking_utils

from burst_rt.batches import ShardedBatch
from burst_rt.errors import InputError
from burst_rt.hf.blocks import mask_of_blocks
from burst_rt.hf.functions import mask_of_function
from burst_rt.hf.release import unknown_release
from burst_rt.planning.masks import (
    Causal,
    Chunked,
    Documents,
    First,
    Full,
    Mask,
    PrefixTree,
    SlidingWindow,
)

__all__ = ["MaskHandover", "MaskIsRead", "mask_of"]


class MaskIsRead(InputError, AttributeError):
    """A model does something else with its mask than to hand it on; `hasattr` says no."""


class _Sequences:
    """What mask functions count in, whole: what they enclose is one rank's tokens. Here it is not
    known yet, and the masks are as good as any that hide something.
    """

    def chunks(self, size: int, left_padding: Any) -> Mask:
        """left_padding: of each row, as transformers has it."""
        return Chunked(size)

    def window(self, left: int, right: int) -> Mask:
        """right: -1 where there is no limit."""
        return SlidingWindow(left, right)

    def blocks(self, ids: Any) -> Mask:
        """ids: of each token; those with equal ones see each other. -1 is text."""
        return _NOTHING if bool((ids < 0).all()) else Causal()

    def places(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """By which number a function of the model's own knows each token; None: its index."""
        return None


class _Batch(_Sequences):
    """A batch that is cut."""

    def __init__(self, batch: ShardedBatch) -> None:
        self._batch = batch

    def chunks(self, size: int, left_padding: Any) -> Mask:
        return self._batch.chunks(size)

    def window(self, left: int, right: int) -> Mask:
        return self._batch.window(left, right)

    def blocks(self, ids: Any) -> Mask:
        """Raises InputError for those of one rank's tokens, and in a tree."""
        if bool((ids < 0).all()):
            return _NOTHING
        if isinstance(self._batch.mask, PrefixTree):
            raise _not_in_a_tree("images")
        tokens = self._batch.layout.seq_len
        if ids.shape[-1] != tokens:
            raise InputError(
                "attn_implementation='burst_rt': token_type_ids: tokens of an image see each "
                f"other, in both directions; expected the types of all {tokens} tokens, got those "
                f"of {ids.shape[-1]}, which do not say which they are; use a model whose types "
                "burst_rt.hf knows (Gemma 3 and 4, PaliGemma, Molmo2), leave images out, or give "
                "each sequence one rank"
            )
        return mask_of_blocks(ids, self._batch.mask)

    def places(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """In packed rows without padding transformers counts within each document.

        Raises InputError in a tree.
        """
        mask = self._batch.mask
        if isinstance(mask, PrefixTree):
            raise _not_in_a_tree("mask functions of the model's own")
        packed = isinstance(mask, Documents) and not mask.padded and mask.counts.max() > 1
        return self._batch.places if packed else None


def _not_in_a_tree(what: str) -> InputError:
    return InputError(
        f"attn_implementation='burst_rt': prefix_tree: expected causal, windowed or chunked masks "
        f"of transformers, got {what}; give the sequences one by one, packed"
    )


class _Cached(_Sequences):
    """Sequences of a cache."""

    def chunks(self, size: int, left_padding: Any) -> Mask:
        """Raises InputError for rows with padding before their tokens."""
        if left_padding.any():
            raise InputError(
                "attn_implementation='burst_rt': chunked attention over a cache with left padding "
                "is not done, because its chunks begin after the padding; expected rows of one "
                "length; generate for each row by itself"
            )
        return Chunked(size)

    def blocks(self, ids: Any) -> Mask:
        """Raises InputError, except for text alone."""
        if bool((ids < 0).all()):
            return _NOTHING
        raise InputError(
            "attn_implementation='burst_rt': token_type_ids: tokens of an image see each other, in "
            "both directions, which is not done with a cache; expected text alone; leave images "
            "out, or generate on one process"
        )

    def places(self) -> NoReturn:
        """Raises InputError."""
        raise InputError(
            "attn_implementation='burst_rt': a mask function of the model's own is not done with a "
            "cache; expected causal, windowed, chunked or full masks of transformers; generate on "
            "one process"
        )


_WHOLE = (slice(None), slice(0, None))


class MaskHandover:
    """A mask on its way through a model, from its mask function to its attention.

    A model that makes its masks itself hands them to its text model, which hands them to
    `create_causal_mask` again: there a mask of four dimensions is made already.
    """

    ndim = 4

    def __init__(self, function: Callable[..., Any], shape: tuple[int, ...] = (1, 1, 1, 1)) -> None:
        self._function, self.shape = function, shape
        self._masks: dict[ShardedBatch | None, Mask] = {}

    def mask(self, batch: ShardedBatch | None) -> Mask:
        """The mask for whole sequences of a batch, or for the sequences of a cache (None).

        Raises InputError for what is not done.
        """
        if batch not in self._masks:
            sequences = _Cached() if batch is None else _Batch(batch)
            self._masks[batch] = mask_of(self._function, sequences)
        return self._masks[batch]

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_reading(name)

    def __getitem__(self, places: object) -> MaskHandover:
        """All of it; models with layers that share keys ask for the queries from the first one on.

        Raises MaskIsRead for a part.
        """
        if not isinstance(places, tuple) or any(place not in _WHOLE for place in places):
            _refuse_reading("__getitem__")
        return self

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> NoReturn:
        _refuse_reading(func.__name__)


def _refuse_reading(name: str) -> NoReturn:
    raise MaskIsRead(
        f"attn_implementation='burst_rt': attention_mask.{name}: expected a model that hands its "
        "mask on to attention as it is, got one that looks into it or changes it; give each "
        "sequence one rank, or use a model such as Llama, Qwen, Mistral or Gemma"
    )


def mask_of(function: Callable[..., Any], sequences: _Sequences | None = None) -> Mask:
    """The mask that a mask function of transformers means, for whole sequences.

    sequences: None where they are not known yet. Raises InputError for a function that is not known
    and does not say what it computes, and ConfigError for one that a later transformers has.
    """
    sequences = sequences or _Sequences()
    if function is masking_utils.causal_mask_function:
        return Causal()
    if function is masking_utils.bidirectional_mask_function:
        return Full()
    maker, _, _ = getattr(function, "__qualname__", "").partition(".<locals>.")
    own = function.__module__ == masking_utils.__name__
    read = _READERS.get(maker) if own else None
    if own and maker not in _READERS.keys() | _REFUSED:
        raise unknown_release(
            "attn_implementation='burst_rt'",
            f"a mask made of {', '.join(sorted(_READERS))}",
            f"one made of {maker}",
        )
    if read is None:
        return mask_of_function(function, sequences.places())
    return read(sequences, **inspect.getclosurevars(function).nonlocals)


def _all_of(sequences: _Sequences, mask_functions: tuple[Callable[..., Any], ...]) -> Mask:
    mask: Mask = Full()
    for function in mask_functions:
        mask = mask & mask_of(function, sequences)
    return mask


def _any_of(sequences: _Sequences, mask_functions: tuple[Callable[..., Any], ...]) -> Mask:
    masks = (mask_of(function, sequences) for function in mask_functions)
    first, *others = (each for each in masks if each != _NOTHING)
    for other in others:
        first = first | other
    return first


def _window(sequences: _Sequences, sliding_window: int) -> Mask:
    return sequences.window(sliding_window - 1, -1)


def _window_both_ways(sequences: _Sequences, sliding_window: int) -> Mask:
    return sequences.window(sliding_window, sliding_window)


def _chunks(sequences: _Sequences, chunk_size: int, left_padding: Any) -> Mask:
    return sequences.chunks(chunk_size, left_padding)


def _images(sequences: _Sequences, block_sequence_ids: Any) -> Mask:
    return sequences.blocks(block_sequence_ids)


def _documents(sequences: _Sequences, packed_sequence_mask: Any) -> Mask:
    """Documents as one rank's positions show them, which is wrong; `shard` knows better."""
    return Full()


def _moved(sequences: _Sequences, mask_function: Callable[..., Any], position_ids: Any) -> Mask:
    """Positions that count from the beginning of their document.

    A mask that depends on distance has the same cells within a document; chunks, blocks and
    functions of the model's own are known by all tokens.
    """
    return mask_of(mask_function, sequences)


_NOTHING = First(0)
# Readers of closures, by the function of `masking_utils` that makes them. All these masks see by
# distance, except chunks, which have edges, and images.
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
