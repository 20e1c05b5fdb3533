"""Intervals of key positions, and the parts of the keys that they meet.

An interval meets consecutive parts, once these are in the right order (`Order`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from burst_rt.planning.masks.spans import Positions, Spans, apart
from burst_rt.planning.sides import Flags, Side

__all__ = ["SOME", "Intervals", "Order", "intersections", "slices"]

# Approximate number of elements of arrays that need not hold everything at once.
SOME = 1 << 22
# If fewer than one in this many cells of a table is to be marked, cells are marked one by one.
_FEW = 8


class Intervals(NamedTuple):
    """Intervals of key positions, each seen by a part of the queries: int64 `[intervals]`."""

    part: Positions
    start: Positions
    stop: Positions


def intersections(spans: Spans, row: Positions, start: Positions, stop: Positions) -> Intervals:
    """The intersections of ranges of keys with the spans of a row; `part` is the range's
    number.

    row, start, stop: of each range. spans: `[1, rows, width]`.
    """
    far = int(stop.max(initial=0)) + 1
    there = spans.starts[0] < spans.stops[0]
    axis = np.arange(len(there))[:, None] * far
    starts, stops = ((np.minimum(x[0], far - 1) + axis)[there] for x in spans)
    first = np.searchsorted(stops, start + row * far, side="right")
    last = np.searchsorted(starts, stop + row * far)
    parts = []
    for number, at in _pairs(first, np.where(start < stop, last, first)):
        begin = np.maximum(starts[at] - row[number] * far, start[number])
        parts.append((number, begin, np.minimum(stops[at] - row[number] * far, stop[number])))
    if not parts:
        return Intervals(*(np.zeros(0, np.int64) for _ in range(3)))
    return Intervals(*map(np.concatenate, zip(*parts, strict=True)))


class Order:
    """The parts of the keys in such an order that an interval meets consecutive ones.

    The parts whose positions are `step` apart are in order of their first positions. An interval of
    at least `step` positions meets every part that it reaches far enough into, so only the parts at
    its two ends are looked at one by one.
    """

    def __init__(self, kv: Side) -> None:
        order = self.parts = np.lexsort((kv.part_start, kv.part_step))
        self._step, self._low = kv.part_step[order], kv.part_start[order]
        self._high = self._low + self._step * (kv.part_len[order] - 1)
        self._rank = kv.run_rank[kv.part_run[order]]
        self.of_rank = self._rank[:, None] == np.arange(kv.num_ranks)  # [parts, ranks]
        # Number of parts of each rank among the first n parts, at index n.
        self._count = np.zeros((kv.num_ranks, len(order) + 1), np.int32)
        np.cumsum(self.of_rank.T, axis=1, dtype=np.int32, out=self._count[:, 1:])

    def mark(self, met: Flags, needed: Flags | None, seen: Intervals, run_of: Positions) -> None:
        """Marks what intervals meet: in `met` `[q runs, kv parts]`, whose columns are in this
        order, and in `needed` `[ranks, q parts]`.

        The intervals are in order of their parts. run_of: the run of each part of the queries.
        """
        q_run = run_of[seen.part]
        sets = np.flatnonzero(np.diff(self._step, prepend=0, append=0)).tolist()
        for begin, end in pairwise(sets):
            step, low, high = self._step[begin], self._low[begin:end], self._high[begin:end]
            # Other parts end before the interval, or begin after it.
            a = begin + np.searchsorted(np.maximum.accumulate(high), seen.start)
            b = begin + np.searchsorted(low, seen.stop)
            if step == 1 and (high[:-1] <= high[1:]).all():  # it meets all others in this case
                first, last = a, b
            else:
                # These have `step` positions in common with it, or lie inside it.
                no_later_ends_before = np.minimum.accumulate(high[::-1])[::-1]
                first = begin + np.searchsorted(no_later_ends_before, seen.start + step - 1)
                last = begin + np.searchsorted(low, seen.stop - step, side="right")
                last = np.where(seen.stop - seen.start >= step, np.maximum(first, last), first)
            self._mark(met, q_run, first, last)
            if needed is not None:
                for some in slices(len(first), len(self._count)):
                    meets = self._count[:, first[some]] < self._count[:, last[some]]
                    rank, number = np.nonzero(meets)
                    needed[rank, seen.part[some][number]] = True
            # A part of the rest meets the interval if the part's first position that does not lie
            # before the interval lies in it.
            for number, place in chain(_pairs(a, np.minimum(first, b)), _pairs(last, b)):
                before = np.maximum(seen.start[number] - self._low[place], 0)
                at = self._low[place] + step * -(-before // step)
                meet = (at < seen.stop[number]) & (at <= self._high[place])
                number, place = number[meet], place[meet]
                met[q_run[number], place] = True
                if needed is not None:
                    needed[self._rank[place], seen.part[number]] = True

    def _mark(self, met: Flags, q_run: Positions, first: Positions, last: Positions) -> None:
        """Marks in `met` that runs of queries meet the parts from one place to another."""
        there = np.flatnonzero(first < last)
        q_run, first, last = q_run[there], first[there], last[there]
        if (last - first).sum() * _FEW < met.size:
            for number, place in _pairs(first, last):
                met[q_run[number], place] = True
            return
        places = len(self.parts) + 1
        for group in slices(len(met), places):
            a, b = np.searchsorted(q_run, (group.start, group.stop))
            if a == b:
                continue
            num_runs = q_run[b - 1] + 1 - group.start
            at = (q_run[a:b] - group.start) * places
            bounds = np.stack(apart(at + first[a:b], at + last[a:b]), -1).ravel()
            # Up to the first bound nothing is met, then everything up to the next, and so on.
            lengths = np.diff(bounds, prepend=0, append=num_runs * places)
            meets = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
            met[group.start : group.start + num_runs] |= meets.reshape(-1, places)[:, :-1]


def _pairs(first: Positions, last: Positions) -> Iterator[tuple[Positions, Positions]]:
    """All pairs (n, place) with first[n] <= place < last[n], some at a time."""
    count = np.maximum(last - first, 0)
    ends = np.cumsum(count)
    begin = 0
    while begin < len(count):
        done = ends[begin] - count[begin]
        stop = max(begin + 1, int(np.searchsorted(ends, done + SOME, side="right")))
        here = slice(begin, stop)
        number = np.repeat(np.arange(begin, stop), count[here])
        starts = np.repeat(first[here] - (ends[here] - count[here] - done), count[here])
        yield number, np.arange(len(number)) + starts
        begin = stop


def slices(length: int, width: int) -> Iterator[slice]:
    """All of `length` rows of `width` numbers each, about SOME numbers at a time."""
    step = max(1, SOME // max(1, width))
    return (slice(at, at + step) for at in range(0, length if width else 0, step))
