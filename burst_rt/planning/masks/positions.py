"""Masks by position alone: everything, causal, windows, prefixes, chunks, first tokens.

In what follows i is the position of a query. Where there are as many queries as keys, i is the
query's index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from operator import index
from typing import Any

import numpy as np

from burst_rt.errors import InputError
from burst_rt.planning.masks.base import Mask, Relation, Rule, structured
from burst_rt.planning.masks.pieces import Piece, Shape
from burst_rt.planning.masks.spans import BEGIN, END, Positions, Spans, one_span

__all__ = [
    "BY_NUMBER",
    "Causal",
    "Chunked",
    "First",
    "Full",
    "Prefix",
    "SlidingWindow",
    "integer",
    "is_count",
]

# Maximum distance, more than between any query and any key; larger numbers mean the same.
_FAR = 1 << 60


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    rule = Rule.EVERYTHING

    @structured(steady=True, period=lambda mask: 0)
    def spans(self, q: Positions) -> Spans:
        """Every key."""
        return one_span(BEGIN, END, like=q)

    def relation(self, q: range, kv: range) -> Relation:
        """Always FULL."""
        return Relation.FULL

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        """Always true."""
        return (q_position == q_position) & (kv_position == kv_position)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees the key at its own position and all keys before it."""

    rule = Rule.NOT_LATER

    @structured(period=lambda mask: 0)
    def spans(self, q: Positions) -> Spans:
        """[0, i + 1)."""
        return one_span(BEGIN, q + 1, like=q)

    def seen_together(self, q: Positions, firsts: Positions, end: int) -> Spans:
        """See `Mask.seen_together`: what the last query of each group sees."""
        if self.rule is not Rule.NOT_LATER:  # a subclass, which may have other spans
            return super().seen_together(q, firsts, end)
        stops = np.clip(np.maximum.reduceat(q, firsts) + 1, 0, end)
        return one_span(0, stops, like=stops)

    def relation(self, q: range, kv: range) -> Relation:
        """Compares the first and last positions."""
        if kv[0] > q[-1]:
            return Relation.EMPTY
        return Relation.FULL if kv[-1] <= q[0] else Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        """key <= query."""
        return kv_position <= q_position

    def pieces(self, q: range, kv: range) -> tuple[Piece, ...]:
        """For ranges with the same step: at most one full rectangle, then one triangle.

        Worked example: q = range(4, 8), kv = range(2, 8). Row i sees columns j <= i + 2. All rows
        see columns 0 and 1 (a rectangle of 4 x 2); rows with j - 2 <= i see the columns j from 2 on
        (a triangle of 4 x 4).
        """
        if not q or not kv or q.step != kv.step or self.relation(q, kv) is not Relation.PARTIAL:
            return super().pieces(q, kv)
        # Row i sees column j when kv[0] + j * step <= q[0] + i * step.
        shift = (q.start - kv.start) // q.step
        first_row, first_column = max(0, -shift), max(0, shift)
        pieces = []
        rows = len(q) - first_row
        if first_column:
            box = (first_row, len(q), 0, first_column)
            pieces.append(Piece(*box, Shape.RECTANGLE, rows * first_column))
        columns = min(len(kv) - first_column, rows)
        num_cells = columns * (columns + 1) // 2 + (rows - columns) * columns
        box = (first_row, len(q), first_column, first_column + columns)
        pieces.append(Piece(*box, Shape.LOWER, num_cells))
        return tuple(pieces)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees `left` keys before its own position, the key there, and `right` keys after it.

    Counts as flash-attn's `window_size=(left, right)`: both ends included, -1 for no end. right: 0
    by default, so that the window is causal. Hugging Face's `sliding_window=w` counts the query's
    own position: it is SlidingWindow(w - 1). Its masks for both ways do not: SlidingWindow(w, w).
    Raises InputError for other numbers.
    """

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        for name, number in (("left", self.left), ("right", self.right)):
            object.__setattr__(self, name, integer(number, -1))
            if getattr(self, name) is None:
                raise InputError(
                    f"SlidingWindow: {name} must be a number of keys of at least 0, or -1 for no "
                    f"end, got {number!r}"
                )

    @structured(period=lambda mask: gcd(mask.left + 1, max(0, mask.right)))
    def spans(self, q: Positions) -> Spans:
        """[i - left, i + right + 1)."""
        starts = BEGIN if self.left == -1 else q - min(self.left, _FAR)
        stops = END if self.right == -1 else q + min(self.right, _FAR) + 1
        return one_span(starts, stops, like=q)

    def relation(self, q: range, kv: range) -> Relation:
        """Compares the first and last positions."""
        left = END if self.left == -1 else self.left
        right = END if self.right == -1 else self.right
        if kv[-1] < q[0] - left or kv[0] > q[-1] + right:
            return Relation.EMPTY
        full = kv[0] >= q[-1] - left and kv[-1] <= q[0] + right
        return Relation.FULL if full else Relation.PARTIAL


@dataclass(frozen=True)
class Prefix(Mask):
    """A query sees the first `length` keys, and all keys up to its own position (prefix LM).

    length: an int, or a tuple of one int for each batch row. Raises InputError for other values.
    """

    length: int | tuple[int, ...]

    def __post_init__(self) -> None:
        given: Any = self.length
        several = isinstance(given, Sequence) and not isinstance(given, str)
        lengths = tuple(integer(length, 0) for length in (given if several else (given,)))
        if not lengths or None in lengths:
            raise InputError(
                "Prefix: length must be a number of keys of at least 0, or a tuple of one for each "
                f"batch row, got {given!r}"
            )
        object.__setattr__(self, "length", lengths if several else lengths[0])

    @property
    def batch(self) -> int:
        """See `Mask.batch`."""
        return len(self._each)

    @property
    def _each(self) -> tuple[int, ...]:
        return self.length if isinstance(self.length, tuple) else (self.length,)

    @property
    def alike(self) -> Prefix:
        """A prefix of about the rows' mean length: of each octave, four lengths."""
        mean = sum(self._each) // len(self._each)
        step = 1 << max(0, mean.bit_length() - 3)
        return Prefix(-(-mean // step) * step)

    @structured(period=lambda mask: gcd(*mask._each))
    def spans(self, q: Positions) -> Spans:
        """[0, max(length, i + 1))."""
        lengths = np.array([min(length, _FAR) for length in self._each], np.int64)[:, None]
        stops = np.maximum(lengths, q + 1)
        return one_span(BEGIN, stops, like=stops)

    def relation(self, q: range, kv: range) -> Relation:
        """Compares the first and last positions with the shortest and the longest prefix."""
        each = self._each
        if kv[0] > q[-1] and kv[0] >= max(each):
            return Relation.EMPTY
        return Relation.FULL if kv[-1] <= q[0] or kv[-1] < min(each) else Relation.PARTIAL


@dataclass(frozen=True)
class First(Mask):
    """A query sees the first `count` keys. Made for `|`, as in `First(4) | SlidingWindow(1023)`.

    `Causal() & (First(4) | SlidingWindow(1023))` is StreamingLLM's mask (arXiv 2309.17453). Raises
    InputError for a count below 0.
    """

    count: int

    def __post_init__(self) -> None:
        count = integer(self.count, 0)
        if count is None:
            raise InputError(
                f"First: count must be a number of keys of at least 0, got {self.count!r}"
            )
        object.__setattr__(self, "count", count)

    @structured(steady=True, period=lambda mask: mask.count)
    def spans(self, q: Positions) -> Spans:
        """[0, count)."""
        return one_span(BEGIN, min(self.count, _FAR), like=q)

    def relation(self, q: range, kv: range) -> Relation:
        """Compares the positions of the keys with the count."""
        if kv[0] >= self.count:
            return Relation.EMPTY
        return Relation.FULL if kv[-1] < self.count else Relation.PARTIAL


@dataclass(frozen=True)
class Chunked(Mask):
    """A query sees the keys of its own chunk: positions [0, size), [size, 2 size), and so on.

    `Causal() & Chunked(8192)` is chunked attention as Llama 4 has it. Raises InputError for a size
    below 1.
    """

    size: int

    def __post_init__(self) -> None:
        size = integer(self.size, 1)
        if size is None:
            raise InputError(
                f"Chunked: size must be a number of keys of at least 1, got {self.size!r}"
            )
        object.__setattr__(self, "size", size)

    @structured(period=lambda mask: mask.size)
    def spans(self, q: Positions) -> Spans:
        """The query's chunk."""
        size = min(self.size, _FAR)
        starts = q // size * size
        return one_span(starts, starts + size, like=q)

    def relation(self, q: range, kv: range) -> Relation:
        """Compares the chunks of the first and last positions."""
        (first_q, last_q), (first_kv, last_kv) = (
            (positions[0] // self.size, positions[-1] // self.size) for positions in (q, kv)
        )
        if last_kv < first_q or first_kv > last_q:
            return Relation.EMPTY
        one = first_q == last_q == first_kv == last_kv
        return Relation.FULL if one else Relation.PARTIAL


# Masks that one number makes, by their word on a command line: "prefix:1024". `chunked` is causal
# there, as models have it.
BY_NUMBER: dict[str, Callable[[int], Mask]] = {
    "prefix": Prefix,
    "chunked": lambda size: Causal() & Chunked(size),
    "first": First,
}


def is_count(number: object, least: int) -> bool:
    """Whether this is an integer of at least `least`."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def integers(expected: str, value: Any, ndims: tuple[int, ...] = (1,)) -> Positions:
    """A list, an array or a tensor as an array of integers with so many dimensions, not empty.

    expected: the beginning of the InputError for anything else.
    """
    try:
        array = np.asarray(value.tolist() if hasattr(value, "new_tensor") else value)
    except (ValueError, RuntimeError):
        # Rows of different lengths; tensors without numbers, or sparse.
        array = np.empty((), object)
    if array.dtype.kind not in "iu" or array.ndim not in ndims or not array.size:
        raise InputError(
            f"{expected}, got {type(value).__name__} of shape {array.shape} and type {array.dtype}"
        )
    return array.astype(np.int64)


def integer(value: object, least: int) -> int | None:
    """The value as an int, or None if it is not an integer of at least `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        found = index(value)  # numpy's integers, too
    except (TypeError, RuntimeError):  # several numbers; a tensor without numbers
        return None
    return found if found >= least else None
