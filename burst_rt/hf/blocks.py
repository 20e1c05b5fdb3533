"""Tokens that see each other in both directions: those of an image, say.

transformers numbers the tokens of a sequence: equal numbers see each other, and -1 is text. Each
model makes these numbers from the types of its tokens, in its own way, and of nothing else. So
models that do get the types of all tokens in the place of one rank's.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from burst_rt.batches import TOKEN_TYPES
from burst_rt.errors import InputError
from burst_rt.hf.shard import KEYWORD, ShardInfo
from burst_rt.planning.masks import Documents, Mask, Spans
from burst_rt.planning.masks.spans import END, Positions
from burst_rt.runtime.refusing import refuse

__all__ = ["give_token_types", "mask_of_blocks"]

_OF_IMAGES = TOKEN_TYPES[1]
# The types that models use for nothing but their masks, by `model_type`.
_TYPES = {
    "gemma3": "token_type_ids",
    "gemma4": "mm_token_type_ids",
    "molmo2": "mm_token_type_ids",
    "paligemma": "token_type_ids",
}


def give_token_types(model: torch.nn.Module) -> None:
    """Gives a model the types of all tokens from now on, if it knows images by them."""
    config: Any = getattr(model, "config", None)
    hook = _Types(_TYPES.get(getattr(config, "model_type", "")))
    # As for positions: some wrappers call the model's `forward` itself.
    for outer in {model, getattr(model, "base_model", model)}:
        outer.register_forward_pre_hook(hook, with_kwargs=True)


class _Types:
    """A hook before a model's call. name: of the types that it gets whole; None: of none."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Raises InputError, on every rank that waits for this one, for types that are not known
        whole, and for those of images that this model may use otherwise.
        """
        info = options.get(KEYWORD)
        if not isinstance(info, ShardInfo) or options.get(self._name or _OF_IMAGES) is None:
            return None
        if self._name is None:
            error = InputError(
                f"{_OF_IMAGES}: {type(module).__name__}: expected one of {', '.join(_TYPES)}, "
                "which use them for their masks alone, got a model that may count positions by "
                "them; leave images out, or give each sequence one rank"
            )
            refuse("hf", error, info.ctx.runtime)
        if self._name not in info.token_types:
            error = InputError(
                f"{self._name}: expected those of the whole batch, got some in the call alone; "
                "give them to burst_rt.hf.shard"
            )
            refuse("hf", error, info.ctx.runtime)
        return args, {**options, self._name: info.token_types[self._name]}


def mask_of_blocks(ids: torch.Tensor, documents: Mask) -> Mask:
    """A query sees the keys of its own block.

    ids: integers `[batch, tokens]`, below 0 for tokens of no block. documents: the batch's mask,
    with which the result is combined.
    """
    numbers = ids.cpu().numpy().astype(np.int64)
    in_block = numbers >= 0
    if isinstance(documents, Documents):
        # A block in several documents is several blocks, whose tokens are mostly neighbours.
        begins = documents.begins(np.arange(numbers.shape[1]))
        numbers = numbers + begins * (numbers.max() + 1)
    numbers = np.where(
        in_block, np.unique(numbers, return_inverse=True)[1].reshape(numbers.shape), -1
    )
    if (numbers == numbers[:1]).all():
        numbers = numbers[:1]
    runs = [row[np.flatnonzero(np.diff(row, prepend=row[0] - 1))] for row in numbers]
    blocks = [run[run >= 0] for run in runs]
    if all(len(np.unique(each)) == len(each) for each in blocks):
        return Documents(ids=numbers)
    return _Groups(numbers)


class _Groups(Mask):
    """`Documents` whose tokens need not be neighbours. ids: `[batch, tokens]`, -1: in no group."""

    def __init__(self, ids: Positions) -> None:
        self._ids = ids
        self._digest = hashlib.sha256(repr(ids.shape).encode() + ids.tobytes()).hexdigest()[:32]
        self._tables = [_table(row) for row in ids]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._digest == self._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"blocks({self._ids.shape[1]} tokens, digest {self._digest})"

    @property
    def batch(self) -> int:
        """See `Mask.batch`."""
        return len(self._ids)

    def refuses(self, q_len: int, kv_len: int, batch: int) -> str | None:
        """See `Mask.refuses`: the ids must be of as many tokens as the call has."""
        tokens = self._ids.shape[1]
        if (q_len, kv_len) != (tokens, tokens):
            return f"{self!r} is for {tokens} queries and keys, and there are {q_len} and {kv_len}"
        return super().refuses(q_len, kv_len, batch)

    def spans(self, q: Positions) -> Spans:
        """The runs of the query's group."""
        width = max(table.shape[2] for table in self._tables)
        bounds = np.full((2, len(self._ids), len(q), width), END)
        for number, (row, table) in enumerate(zip(self._ids, self._tables, strict=True)):
            bounds[:, number, :, : table.shape[2]] = table[:, row[q]]
        return Spans(bounds[0], bounds[1])


def _table(row: Positions) -> Positions:
    """`[2, groups + 1, width]`: where the runs of each group start and stop; -1 has none.

    Groups are numbered by their ids; END fills the table.
    """
    firsts = np.flatnonzero(np.diff(row, prepend=row[0] - 1))
    stops, named = np.append(firsts[1:], len(row)), row[firsts]
    counts = np.bincount(named[named >= 0], minlength=1)
    table = np.full((2, len(counts) + 1, counts.max()), END)
    seen = np.zeros(len(counts), np.int64)
    for group, start, stop in zip(named, firsts, stops, strict=True):
        if group >= 0:
            table[:, group, seen[group]] = start, stop
            seen[group] += 1
    return table
