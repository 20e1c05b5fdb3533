"""Masks beside what they must come to, cell by cell in plain loops.

The loops share no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from burst_rt import (
    BlockSparse,
    Causal,
    Chunked,
    Documents,
    First,
    Full,
    Mask,
    Prefix,
    PrefixTree,
    SlidingWindow,
)

__all__ = ["FUNCTIONS", "MASKS", "Sizes", "cells_of", "truth_of"]


class Sizes(NamedTuple):
    """Of one call."""

    q_len: int
    kv_len: int
    batch: int

    def at(self, i: int) -> int:
        """The position of query i: the last query stands at the last key."""
        return i + self.kv_len - self.q_len


class _Entry(NamedTuple):
    mask: Callable[[Sizes], Mask]
    sees: Callable[[Sizes, int, int, int], bool]  # batch row, query, key


def _cut(tokens: int, *weights: int) -> list[int]:
    """Lengths that add up to `tokens`; some are 0 where there are few tokens."""
    ends = [tokens * end // sum(weights) for end in accumulate(weights)]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def _document(lengths: list[int], token: int) -> int:
    """Which document a token is in."""
    return next(number for number, end in enumerate(accumulate(lengths)) if token < end)


_ROWS = ((3, 1, 4), (1, 1), (2, 0, 5, 1))
_PREFIXES = (0, 5, 2)


def _row_lengths(sizes: Sizes) -> list[list[int]]:
    return [_cut(sizes.kv_len, *_ROWS[row % 3]) for row in range(sizes.batch)]


def _packed(sizes: Sizes, i: int, j: int) -> bool:
    q, kv = _cut(sizes.q_len, 2, 3, 1), _cut(sizes.kv_len, 1, 2, 2)
    return _document(q, i) == _document(kv, j)


def _end_of(lengths: list[int], document: int) -> int:
    return sum(lengths[: document + 1])


def _place(sizes: Sizes, i: int) -> int:
    """Where query i stands: in its document the last query stands at the last key."""
    q, kv = _cut(sizes.q_len, 2, 3, 1), _cut(sizes.kv_len, 1, 2, 2)
    document = _document(q, i)
    return i + _end_of(kv, document) - _end_of(q, document)


def _table(sizes: Sizes, block: int) -> list[list[list[bool]]]:
    rows, columns = -(-sizes.q_len // block), -(-sizes.kv_len // block)
    return [
        [[(a * 5 + b * 3 + row) % 4 < 2 for b in range(columns)] for a in range(rows)]
        for row in range(sizes.batch)
    ]


def _padded_ids(sizes: Sizes) -> list[int]:
    """Two documents, padding before, between and after them."""
    runs = zip(_cut(sizes.kv_len, 1, 4, 1, 5, 1), (-1, 7, -1, 3, -1), strict=True)
    return [document for tokens, document in runs for _ in range(tokens)]


# The parents of nodes; the last one of its lengths is padding.
_PARENTS = (-1, 0, 1, 1, 0, -1, 5)


def _nodes(sizes: Sizes) -> list[int]:
    first, *others = _cut(sizes.kv_len - 1, 4, 2, 3, 1, 5, 2, 2, 1)
    return [first + 1, *others]


def _tree(sizes: Sizes) -> PrefixTree:
    return PrefixTree(_nodes(sizes)[:-1], _PARENTS, tokens=sizes.kv_len)


def _path(sizes: Sizes, token: int) -> list[int]:
    """The tokens up to this one along its path, itself included; none for padding."""
    node, path = _document(_nodes(sizes), token), [token]
    if node == len(_PARENTS):
        return []
    ends = list(accumulate(_nodes(sizes)))
    first = ends[node] - _nodes(sizes)[node]
    while True:
        path += range(token - 1, first - 1, -1)
        node = _PARENTS[node]
        if node < 0:
            return path[::-1]
        token, first = ends[node], ends[node] - _nodes(sizes)[node]


MASKS = {
    "full": _Entry(lambda s: Full(), lambda s, b, i, j: True),
    "causal": _Entry(lambda s: Causal(), lambda s, b, i, j: j <= s.at(i)),
    "window": _Entry(lambda s: SlidingWindow(6), lambda s, b, i, j: 0 <= s.at(i) - j <= 6),
    "window both ways": _Entry(
        lambda s: SlidingWindow(4, 3), lambda s, b, i, j: -3 <= s.at(i) - j <= 4
    ),
    "window to the end": _Entry(
        lambda s: SlidingWindow(2, -1), lambda s, b, i, j: j >= s.at(i) - 2
    ),
    "wide window": _Entry(lambda s: SlidingWindow(10_000), lambda s, b, i, j: j <= s.at(i)),
    "prefix": _Entry(lambda s: Prefix(9), lambda s, b, i, j: j < 9 or j <= s.at(i)),
    "prefix by row": _Entry(
        lambda s: Prefix(tuple(_PREFIXES[row % 3] for row in range(s.batch))),
        lambda s, b, i, j: j < _PREFIXES[b % 3] or j <= s.at(i),
    ),
    "first": _Entry(lambda s: First(3), lambda s, b, i, j: j < 3),
    "chunked": _Entry(
        lambda s: Causal() & Chunked(11),
        lambda s, b, i, j: j <= s.at(i) and s.at(i) // 11 == j // 11,
    ),
    "sinks": _Entry(
        lambda s: Causal() & (SlidingWindow(5) | First(4)),
        lambda s, b, i, j: j <= s.at(i) and (j < 4 or s.at(i) - j <= 5),
    ),
    "three pieces": _Entry(
        lambda s: First(2) | SlidingWindow(1, 1) | (Chunked(20) & SlidingWindow(9, -1)),
        lambda s, b, i, j: (
            j < 2 or abs(s.at(i) - j) <= 1 or (s.at(i) // 20 == j // 20 and j >= s.at(i) - 9)
        ),
    ),
    "documents": _Entry(
        lambda s: (
            Causal()
            & Documents(q_lengths=_cut(s.q_len, 2, 3, 1), kv_lengths=_cut(s.kv_len, 1, 2, 2))
        ),
        lambda s, b, i, j: _packed(s, i, j) and j <= _place(s, i),
    ),
    "window in documents": _Entry(
        lambda s: SlidingWindow(3) & Documents(_cut(s.q_len, 2, 3, 1), _cut(s.kv_len, 1, 2, 2)),
        lambda s, b, i, j: _packed(s, i, j) and 0 <= _place(s, i) - j <= 3,
    ),
    "blocks": _Entry(
        lambda s: BlockSparse(_table(s, 8)[0], 8),
        lambda s, b, i, j: _table(s, 8)[0][i // 8][j // 8],
    ),
    "blocks by row": _Entry(
        lambda s: Causal() & BlockSparse(torch.tensor(_table(s, 5)), 5),
        lambda s, b, i, j: _table(s, 5)[b][i // 5][j // 5] and j <= s.at(i),
    ),
}
# For as many queries as keys, or fewer.
_OF_KEYS = {
    "documents by row": _Entry(
        lambda s: Causal() & Documents(_row_lengths(s)),
        lambda s, b, i, j: (
            _document(_row_lengths(s)[b], s.at(i)) == _document(_row_lengths(s)[b], j)
            and j <= s.at(i)
        ),
    ),
    "one document": _Entry(
        lambda s: Causal() & Documents([s.kv_len]), lambda s, b, i, j: j <= s.at(i)
    ),
    "documents of one token": _Entry(
        lambda s: Documents([1] * s.kv_len), lambda s, b, i, j: j == s.at(i)
    ),
    "tree": _Entry(lambda s: Causal() & _tree(s), lambda s, b, i, j: j in _path(s, s.at(i))),
    "window in a tree": _Entry(
        lambda s: Causal() & _tree(s).window(3), lambda s, b, i, j: j in _path(s, s.at(i))[-4:]
    ),
    "chunks in a tree": _Entry(
        lambda s: Causal() & _tree(s).chunks(4),
        lambda s, b, i, j: j in _path(s, s.at(i))[(len(_path(s, s.at(i))) - 1) // 4 * 4 :],
    ),
    "padding": _Entry(
        lambda s: Documents(ids=_padded_ids(s)),
        lambda s, b, i, j: _padded_ids(s)[s.at(i)] == _padded_ids(s)[j] != -1,
    ),
}
MASKS |= _OF_KEYS


class _Function(NamedTuple):
    mask: Callable[[Sizes], Mask]
    sees: Callable[[Sizes, int, int, int, int], bool]  # batch row, head, query, key


def _every_third(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return ((q - kv) % 3 != 0) & (q % 7 != 3)


def _of_heads(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return (q + 2 * kv + 3 * head) % 5 < 3


def _of_rows_and_heads(batch: Any, head: Any, q: Any, kv: Any) -> Any:
    return (kv + batch) % (head + 2) != 0


# With rows that see nothing, and a function that looks at the keys only.
FUNCTIONS = {
    "function": _Function(
        lambda s: Mask.from_function(_every_third),
        lambda s, b, h, i, j: (s.at(i) - j) % 3 != 0 and s.at(i) % 7 != 3,
    ),
    "function of keys": _Function(
        lambda s: Causal() & Mask.from_function(lambda b, h, q, kv: kv % 4 == 1, key="fourth"),
        lambda s, b, h, i, j: j <= s.at(i) and j % 4 == 1,
    ),
    "function of heads": _Function(
        lambda s: Mask.from_function(_of_heads, within=SlidingWindow(9, 2)),
        lambda s, b, h, i, j: -2 <= s.at(i) - j <= 9 and (s.at(i) + 2 * j + 3 * h) % 5 < 3,
    ),
    "function of rows and heads": _Function(
        lambda s: First(2) | Mask.from_function(_of_rows_and_heads, within=Causal()),
        lambda s, b, h, i, j: j < 2 or (j <= s.at(i) and (j + b) % (h + 2) != 0),
    ),
    "function in documents": _Function(
        lambda s: Mask.from_function(
            _every_third,
            within=Causal() & Documents(_cut(s.q_len, 2, 3, 1), _cut(s.kv_len, 1, 2, 2)),
        ),
        lambda s, b, h, i, j: (
            _packed(s, i, j)
            and j <= _place(s, i)
            and (_place(s, i) - j) % 3 != 0
            and _place(s, i) % 7 != 3
        ),
    ),
}


def truth_of(name: str, sizes: Sizes, heads: int = 1) -> torch.Tensor | None:
    """Bool `[batch, Sq, Skv]`, or `[batch, heads, Sq, Skv]` of a function.

    None where the mask is not for so many queries.
    """
    queries, keys = range(sizes.q_len), range(sizes.kv_len)
    if name in FUNCTIONS:
        told = FUNCTIONS[name].sees
        return torch.tensor(
            [
                [[[told(sizes, b, h, i, j) for j in keys] for i in queries] for h in range(heads)]
                for b in range(sizes.batch)
            ]
        )
    if name in _OF_KEYS and sizes.q_len > sizes.kv_len:
        return None
    sees = MASKS[name].sees
    return torch.tensor(
        [[[sees(sizes, b, i, j) for j in keys] for i in queries] for b in range(sizes.batch)]
    )


def cells_of(mask: Mask, sizes: Sizes) -> torch.Tensor:
    """The same by the mask's own word."""
    bound = mask.bound(sizes.q_len, sizes.kv_len)
    q = torch.arange(sizes.q_len) + sizes.kv_len - sizes.q_len
    seen: torch.Tensor = bound.allows(q[:, None], torch.arange(sizes.kv_len)[None, :])
    return seen.expand(sizes.batch, sizes.q_len, sizes.kv_len)
