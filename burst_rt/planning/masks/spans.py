"""Spans: which keys a query sees, as sorted runs of key positions; for many queries at once.

Every mask but a function of the user's own is spans. `intersect` and `unite` are what `&` and `|`
of masks do.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "BEGIN", "END", "Positions", "Spans", "apart", "beside", "intersect", "one_span", "unite",
]  # fmt: skip

Positions = np.ndarray[Any, np.dtype[np.int64]]

# Before every key and after every key: a span need not know how many keys there are.
BEGIN, END = -(1 << 62), 1 << 62
# Maximum number of pairs of spans that are compared at once.
_MOST_COMPARED = 1 << 20


class Spans(NamedTuple):
    """The keys that rows of queries see: key j of batch row b if starts <= j < stops of a span.

    starts and stops are int64 `[batch or 1, rows, width]`; 1: every batch row sees the same. The
    spans of a row are sorted, and neither overlap nor touch. A row with fewer spans than `width`
    ends with empty ones, which start and stop at END.
    """

    starts: Positions
    stops: Positions

    @property
    def width(self) -> int:
        """The most spans that a row may have."""
        return int(self.starts.shape[2])

    def sees(self, kv: Positions, like: Positions) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether the rows see the keys at these positions: bool, one more dimension in front.

        like: the rows' own positions, in a shape that broadcasts with `kv`.
        """
        seen = np.zeros((len(self.starts), *np.broadcast_shapes(like.shape, kv.shape)), bool)
        for number in range(self.width):
            start, stop = (bound[..., number].reshape(len(bound), *like.shape) for bound in self)
            seen |= (start <= kv) & (kv < stop)
        return seen

    def rows(self, at: slice) -> Spans:
        """The spans of some rows."""
        return Spans(self.starts[:, at], self.stops[:, at])

    def row(self, number: int) -> Spans:
        """The spans of one batch row."""
        at = number if len(self.starts) > 1 else 0
        return Spans(self.starts[at : at + 1], self.stops[at : at + 1])

    def meeting(self, start: int, stop: int) -> Spans:
        """The same rows, without the spans that have no key from `start` up to before `stop`."""
        if self.width == 1:
            return self
        first = np.count_nonzero(self.stops <= start, axis=-1)
        last = np.count_nonzero(self.starts < stop, axis=-1)
        width = max(1, int((last - first).max(initial=0)))
        if width >= self.width:
            return self
        at = first[..., None] + np.arange(width)
        there = at < last[..., None]
        at = np.minimum(at, self.width - 1)
        return Spans(*(np.where(there, np.take_along_axis(x, at, -1), END) for x in self))

    def columns(self, *kv: range) -> Spans:
        """The same rows, by columns instead of positions; `kv` are the positions of the columns, in
        order.

        kv: ascending, along all the runs. Spans may touch, or be empty, afterwards.
        """
        return Spans(*(_before(kv, bound) for bound in self))

    def packed(self) -> Spans:
        """The same rows without the spans that are empty, but those that come last."""
        return _packed(*(bound.copy() for bound in self))

    def merged(self) -> Spans:
        """The same rows as spans ought to be, if the arrays are bounds: sorted, with those that
        overlap or touch as one, and without empty ones.
        """
        starts, stops = self
        known = all(isinstance(x, np.ndarray) and x.ndim == 3 for x in self)
        if not known or starts.shape != stops.shape or (starts > stops).any():
            return self
        filled = starts < stops
        after = filled[..., 1:] & ((starts[..., 1:] <= stops[..., :-1]) | ~filled[..., :-1])
        if not after.any():
            return self
        return unite(self.packed(), Spans(*(np.full_like(x[..., :1], END) for x in self)))

    def together(self, firsts: Positions, end: int) -> Spans:
        """The keys before `end` that groups of rows see together; batch rows count together.

        firsts: the first row of each group, ascending from 0. Returns `[1, groups, width]`.
        """
        batch, rows, _ = self.starts.shape
        if batch == 1 and len(firsts) == rows:  # a row's own spans are apart already
            return _packed(*(np.clip(x, 0, end) for x in self))
        lengths = np.diff(firsts, append=rows)
        assert len(firsts) * (end + 1) < END  # number of places of the axis below
        # Row after row for each span: along the rows spans mostly ascend, and are sorted faster.
        starts, stops = (np.clip(x.transpose(2, 0, 1).ravel(), 0, end) for x in self)
        group = np.repeat(np.arange(len(firsts)), lengths)
        group = np.tile(group, len(starts) // max(1, len(group)))
        filled = starts < stops
        if not filled.all():
            group, starts, stops = group[filled], starts[filled], stops[filled]
        # One axis for all groups: no span reaches from one group into the next.
        starts, stops = apart(*(x + group * (end + 1) for x in (starts, stops)))
        group = starts // (end + 1)
        number = np.arange(len(group)) - np.searchsorted(group, group)
        shape = (1, len(firsts), int(number.max(initial=0)) + 1)
        found = Spans(*(np.full(shape, END) for _ in range(2)))
        found.starts[0, group, number] = starts - group * (end + 1)
        found.stops[0, group, number] = stops - group * (end + 1)
        return found

    def num_cells(self, kv: range) -> int:
        """Number of (row, key) pairs that are seen, among the keys at these positions.

        The mean over batch rows, rounded up.
        """
        starts, stops = self.columns(kv)
        return -(-int((stops - starts).sum()) // len(self.starts))


def apart(starts: Positions, stops: Positions) -> tuple[Positions, Positions]:
    """The starts and stops of ranges, in order, with overlapping and touching ones merged.

    starts, stops: of ranges that are not empty, in any order, int64 `[ranges]`.
    """
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    begins = np.append(True, starts[1:] > reach[:-1])[: len(starts)]
    first = np.flatnonzero(begins)
    return starts[first], reach[np.append(first[1:], len(starts))[: len(first)] - 1]


def one_span(starts: Positions | int, stops: Positions | int, like: Positions) -> Spans:
    """One span a row, empty where stop <= start.

    The arguments broadcast to `like`, which is `[rows]`, or `[batch, rows]`.
    """
    shape = (1, *like.shape) if like.ndim == 1 else like.shape
    first, last = (np.broadcast_to(bound, shape) for bound in (starts, stops))
    return Spans(*(np.where(first < last, x, END)[..., None] for x in (first, last)))


def beside(parts: Sequence[Spans], axis: int) -> Spans:
    """The spans of all parts. axis: 0, where the parts are batch rows; 1, where they are rows."""
    if len(parts) == 1:
        return parts[0]
    shape = list(parts[0].starts.shape)
    shape[axis] = sum(part.starts.shape[axis] for part in parts)
    shape[2] = max(part.width for part in parts)
    joined = Spans(*(np.full(shape, END) for _ in range(2)))
    for into, bounds in zip(joined, zip(*parts, strict=True), strict=True):
        rows = np.split(into, np.cumsum([x.shape[axis] for x in bounds[:-1]]), axis=axis)
        for some, bound in zip(rows, bounds, strict=True):
            some[..., : bound.shape[2]] = bound
    return joined


def intersect(a: Spans, b: Spans) -> Spans:
    """The keys that both see: at most `a.width + b.width - 1` spans a row.

    Every span is compared with every span, some rows at a time.
    """
    several = a.width > 1 and b.width > 1
    rows, some = a.starts.shape[1], max(1, _MOST_COMPARED // (a.width * b.width))
    if several and rows > some:
        slices = [slice(start, start + some) for start in range(0, rows, some)]
        return beside([intersect(a.rows(at), b.rows(at)) for at in slices], axis=1)
    if several:
        a, b = Spans(*(x[..., :, None] for x in a)), Spans(*(x[..., None, :] for x in b))
    starts, stops = np.maximum(a.starts, b.starts), np.minimum(a.stops, b.stops)
    # If there are no rows, numpy cannot tell what -1 would mean.
    starts, stops = (x.reshape(*x.shape[:2], prod(x.shape[2:])) for x in (starts, stops))
    # Two lists of disjoint spans meet in disjoint spans, which do not touch either.
    return _packed(starts, stops)


def unite(a: Spans, b: Spans) -> Spans:
    """The keys that either sees: at most `a.width + b.width` spans a row.

    Spans that overlap or touch become one.
    """
    spans = _sorted(*(_beside(x, y) for x, y in zip(a, b, strict=True)))
    starts, stops = spans
    reach = np.maximum.accumulate(np.where(starts == END, BEGIN, stops), axis=-1)
    # A span begins a new one where it starts beyond all that came before it.
    fresh = starts[..., 1:] > reach[..., :-1]
    number = np.concatenate([np.zeros_like(starts[..., :1]), np.cumsum(fresh, axis=-1)], axis=-1)
    merged_starts, merged_stops = np.full_like(starts, END), np.full_like(stops, END)
    for slot in reversed(range(spans.width)):  # the first of each group is written last
        _put(merged_starts, number, starts, slot)
    for slot in range(spans.width):  # the last of each group is written last
        _put(merged_stops, number, reach, slot)
    return _trimmed(merged_starts, np.where(merged_starts == END, END, merged_stops))


def _before(kv: Sequence[range], bound: Positions) -> Positions:
    """Number of keys before each of the bounds."""
    by_run = [np.clip(-((run.start - bound) // run.step), 0, len(run)) for run in kv]
    return sum(by_run[1:], by_run[0])


def _put(into: Positions, number: Positions, values: Positions, slot: int) -> None:
    np.put_along_axis(into, number[..., slot, None], values[..., slot, None], axis=-1)


def _beside(x: Positions, y: Positions) -> Positions:
    batch = max(x.shape[0], y.shape[0])
    parts: Sequence[Positions] = [np.broadcast_to(z, (batch, *z.shape[1:])) for z in (x, y)]
    return np.concatenate(parts, axis=-1)


def _packed(starts: Positions, stops: Positions) -> Spans:
    """The spans that are not empty, in order. Writes into the arrays."""
    empty = starts >= stops
    for bound in (starts, stops):
        np.copyto(bound, END, where=empty)
    return Spans(starts, stops) if starts.shape[-1] == 1 else _sorted(starts, stops)


def _sorted(starts: Positions, stops: Positions) -> Spans:
    if (starts[..., :-1] <= starts[..., 1:]).all():  # a test that takes far less time
        return _trimmed(starts, stops)
    order = np.argsort(starts, axis=-1, kind="stable")
    return _trimmed(*(np.take_along_axis(x, order, axis=-1) for x in (starts, stops)))


def _trimmed(starts: Positions, stops: Positions) -> Spans:
    """Without the columns of spans that are empty in every row."""
    width = max(1, int((starts != END).sum(-1).max(initial=0)))
    return Spans(starts[..., :width], stops[..., :width])
