"""Masks that cannot be made, that do not fit a call, or that differ from the other ranks'.

Calls are of 24 tokens, 1 batch row, 4 heads. `mpi/programs/attention_bad_input.py` makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from burst_rt import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    First,
    Mask,
    Prefix,
    PrefixTree,
    SlidingWindow,
    Spans,
)

__all__ = ["DIFFERENT", "MISFITS", "UNMADE"]

Make = Callable[[], Mask]


@dataclass(frozen=True)
class Crooked(Mask):
    """Spans that are not as they must be."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    dtype: str = "int64"

    def spans(self, q: Any) -> Spans:
        each = (np.tile(np.array(x, self.dtype), (1, len(q), 1)) for x in (self.starts, self.stops))
        return Spans(*each)


def _any(value: Any) -> Any:
    """A value of a type that the argument does not take."""
    return value


def _table(rows: int, columns: int, batch: int = 0) -> torch.Tensor:
    return torch.ones((batch, rows, columns) if batch else (rows, columns), dtype=torch.bool)


def _every(step: int, head_step: int = 0) -> Callable[[Any, Any, Any, Any], Any]:
    def function(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return (q + kv + head_step * head) % step == 0

    return function


def _of(function: Callable[[Any, Any, Any, Any], Any], **options: Any) -> Mask:
    return Mask.from_function(function, **options)


def _drawn(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return torch.rand((q - kv).shape) < 0.5


# Name -> how it is made; words of the InputError, which every rank raises by itself.
UNMADE: dict[str, tuple[Make, str]] = {
    "a window below 0": (lambda: SlidingWindow(-2), "left must be a number of keys"),
    "a right end below 0": (lambda: SlidingWindow(2, -3), "right must be a number of keys"),
    "half a window": (lambda: SlidingWindow(_any(2.5)), "got 2.5"),
    "a prefix below 0": (lambda: Prefix(-1), "got -1"),
    "a prefix of one row below 0": (lambda: Prefix((3, -1)), "got (3, -1)"),
    "no prefix": (lambda: Prefix(()), "length must be"),
    "the first -1": (lambda: First(-1), "count must be"),
    "chunks of 0": (lambda: Chunked(0), "size must be a number of keys of at least 1, got 0"),
    "no documents": (lambda: Documents(), "got none of them"),
    "documents told twice": (lambda: Documents([3], ids=[0, 0, 0]), "got lengths and ids"),
    "a length below 0": (lambda: Documents([25, -1]), "got -1 for document 1"),
    "lengths of half tokens": (lambda: Documents([1.5, 2.5]), "must be integers"),
    "rows of other totals": (lambda: Documents([[24], [12, 11]]), "got [24, 23]"),
    "sums that fall": (lambda: Documents(cu_seqlens=[0, 13, 12]), "never fall"),
    "sums that begin late": (lambda: Documents(cu_seqlens=[1, 24]), "must begin with 0"),
    "an id that returns": (lambda: Documents(ids=[0, 1, 0]), "document 0 returns"),
    "an id below -1": (lambda: Documents(ids=[0, -2]), "got -2"),
    "documents of one side": (lambda: Documents([1, 2], [3]), "got [2] and [1]"),
    "a table of numbers": (lambda: BlockSparse([[1, 0]], 4), "table must be booleans"),
    "a table of one dimension": (lambda: BlockSparse([True], 4), "table must be booleans"),
    "a ragged table": (lambda: BlockSparse([[True], [True, True]], 4), "table must be booleans"),
    "blocks of 0": (lambda: BlockSparse([[True]], 0), "block must be a number of tokens"),
    "a mask and a word": (lambda: Causal() & _any("full"), "expected another Mask, got str"),
    "two that move queries": (
        lambda: Documents([1, 2], [3, 4]) & Documents([3], [7]),
        "both say where queries stand",
    ),
    "rows of two numbers": (
        lambda: Prefix((1, 2)) & Documents([[3]] * 3),
        "different numbers of batch rows",
    ),
    "a tree that begins late": (lambda: PrefixTree([3, 4], [1, -1]), "number of an earlier node"),
    "a tree without a parent": (lambda: PrefixTree([3, 4], [-1]), "a parent for each node"),
    "a tree without tokens": (lambda: PrefixTree([0, 0], [-1, 0]), "not all of them 0"),
    "a tree of lists": (lambda: PrefixTree([[1], [1, 2]], [-1]), "a vector of integers"),
    "a tree in half tokens": (lambda: PrefixTree([1.5], [-1]), "a vector of integers"),
    "a tree beyond its row": (lambda: PrefixTree([3], [-1], tokens=2), "at least the 3"),
    "a tree with two windows": (
        lambda: PrefixTree([3], [-1]).window(1).window(2),
        "without another limit",
    ),
    "a function that is none": (lambda: _of(_any(3)), "expected a function of (batch, head"),
    "a function within a word": (lambda: _of(_every(2), within="causal"), "within must be a mask"),
    "an empty key": (lambda: _of(_every(2), key=""), "key must be a string"),
}
# Name -> the mask of the odd rank, while the others make a good call; words of the InputError.
MISFITS: dict[str, tuple[Make, str]] = {
    "lengths that are too few": (lambda: Documents([10, 13]), "has 23 keys, and kv_layout has 24"),
    "lengths that are too many": (lambda: Documents([10, 15]), "has 25 keys, and kv_layout has 24"),
    "sums that end early": (lambda: Documents(cu_seqlens=[0, 9, 20]), "has 20 keys"),
    "ids of too few tokens": (lambda: Documents(ids=[7] * 23), "has 23 keys"),
    "positions of too many tokens": (lambda: Documents(position_ids=range(25)), "has 25 keys"),
    "documents for more rows": (lambda: Documents([[24], [12, 12]]), "is for 2 batch rows"),
    "q_lengths that are too few": (
        lambda: Documents([10, 13], [12, 12]),
        "has 23 queries, and layout has 24 tokens",
    ),
    "kv_lengths that are too many": (lambda: Documents([12, 12], [12, 13]), "has 25 keys"),
    "both lengths, for more rows": (
        lambda: Documents([[24], [24]], [[24], [24]]),
        "is for 2 batch rows, and q has 1",
    ),
    "lengths that are too few, under causal": (lambda: Causal() & Documents([23]), "has 23 keys"),
    "lengths that are too few, or a window": (
        lambda: SlidingWindow(2) | Documents([23]),
        "has 23 keys",
    ),
    "prefixes for more rows": (lambda: Prefix((1, 2, 3)), "is for 3 batch rows, and q has 1"),
    "prefixes for more rows, in chunks": (
        lambda: Chunked(8) & Prefix((1, 2)),
        "is for 2 batch rows, and q has 1",
    ),
    "too few query blocks": (
        lambda: BlockSparse(_table(2, 3), 8),
        "has 2 query blocks, and 24 tokens make 3",
    ),
    "too many key blocks": (
        lambda: BlockSparse(_table(3, 4), 8),
        "has 4 key blocks, and 24 tokens make 3",
    ),
    "blocks of another size": (
        lambda: BlockSparse(_table(3, 3), 4),
        "has 3 query blocks, and 24 tokens make 6",
    ),
    "tables for more rows": (lambda: BlockSparse(_table(3, 3, 2), 8), "is for 2 batch rows"),
    "spans that end first": (lambda: Crooked((5,), (3,)), "which is not before it"),
    "more starts than stops": (lambda: Crooked((0, 5), (3,)), "must have a start and a stop"),
    "a tree of fewer tokens": (lambda: PrefixTree([9, 10, 4], [-1, 0, 0]), "is for 23 keys"),
    "spans of 32 bits": (lambda: Crooked((0,), (3,), "int32"), "of two int64 arrays"),
    "a function that raises": (
        lambda: _of(lambda b, h, q, kv: [][q]),
        "the function raised TypeError",
    ),
    "a function of two": (
        lambda: _of(_any(lambda q, kv: q >= kv)),
        "the function raised TypeError",
    ),
    "a function of numbers": (lambda: _of(lambda b, h, q, kv: q - kv), "got torch.int64 of shape"),
    "a function of one answer": (lambda: _of(lambda b, h, q, kv: True), "got True"),
    "a function of another shape": (
        lambda: _of(lambda b, h, q, kv: (q >= kv)[..., :3]),
        "that broadcasts to [4096]",
    ),
    "a function that draws": (lambda: _of(_drawn, key="drawn"), "must say the same each time"),
    "a function that looks around": (
        lambda: _of(lambda b, h, q, kv: q + 0 * kv >= q.float().mean()),
        "must decide on each cell by itself",
    ),
    "a function within other lengths": (
        lambda: _of(_every(2), within=Documents([10, 13])),
        "has 23 keys, and kv_layout has 24",
    ),
    "a function, and other lengths": (
        lambda: _of(_every(2)) & Documents([10, 13]),
        "has 23 keys, and kv_layout has 24",
    ),
}
# Name -> the mask of the odd rank and that of the others, each good on its own.
DIFFERENT: dict[str, tuple[Make, Make]] = {
    "other masks: documents": (lambda: Documents([10, 14]), lambda: Documents([11, 13])),
    "other masks: documents in another order": (
        lambda: Documents([10, 14]),
        lambda: Documents([14, 10]),
    ),
    "other masks: documents and padding": (
        lambda: Documents(ids=[0] * 20 + [-1] * 4),
        lambda: Documents([20, 4]),
    ),
    "other masks: documents of each side": (
        lambda: Documents([10, 14], [10, 14]),
        lambda: Documents([10, 14]),
    ),
    "other masks: documents of all but one token": (
        lambda: Documents([1] * 24),
        lambda: Documents([*[1] * 22, 2]),
    ),
    "other masks: no documents at all": (lambda: Causal(), lambda: Causal() & Documents([10, 14])),
    "other masks: parents": (
        lambda: PrefixTree([8, 8, 8], [-1, 0, 0]),
        lambda: PrefixTree([8, 8, 8], [-1, 0, 1]),
    ),
    "other masks: a window of a tree": (
        lambda: PrefixTree([24], [-1]).window(5),
        lambda: PrefixTree([24], [-1]).window(6),
    ),
    "other masks: a window": (lambda: SlidingWindow(5), lambda: SlidingWindow(6)),
    "other masks: a window's right end": (lambda: SlidingWindow(5, 1), lambda: SlidingWindow(5)),
    "other masks: a prefix": (lambda: Prefix(5), lambda: Prefix(6)),
    "other masks: a prefix by row": (lambda: Prefix((5,)), lambda: Prefix(5)),
    "other masks: chunks": (lambda: Chunked(5), lambda: Chunked(6)),
    "other masks: the first tokens": (lambda: First(5), lambda: First(6)),
    "other masks: a table": (
        lambda: BlockSparse(_table(3, 3), 8),
        lambda: BlockSparse(_table(3, 3).tril(), 8),
    ),
    "other masks: and for or": (lambda: Causal() & First(4), lambda: Causal() | First(4)),
    "other masks: a function": (lambda: _of(_every(2)), lambda: _of(_every(3))),
    "other masks: a function of heads": (lambda: _of(_every(3, 1)), lambda: _of(_every(3))),
    "other masks: a function's key": (
        lambda: _of(_every(2), key="a"),
        lambda: _of(_every(2), key="b"),
    ),
    "other masks: a key on one rank": (lambda: _of(_every(2), key="a"), lambda: _of(_every(2))),
    "other masks: what a function is within": (
        lambda: _of(_every(2), within=Causal()),
        lambda: _of(_every(2)),
    ),
}
