"""Which rows of a side are computed with rows of the other side, and so must be sent.

A strategy sends a row to the ranks that compute with it, and to no other. Rows travel in groups of
ROWS_TOGETHER rows of a block: a group goes to a rank if any of its rows meets any row of the rank.

All ranks' rows are asked about at once, because packed batches bring a new mask with every step:

1. Each side is taken in parts. A part is what one group has of one run, so that its positions are
   evenly spaced.
2. What the queries of a part see together is intervals of key positions (`_seen`).
3. An interval meets consecutive parts of the keys, once these are in order of position (`_Order`).

Under `BlockSparse` a query sees many intervals, the same ones as all queries of its label (a row of
the table). There step 3 is done once for a label, and not for each part that has rows of it
(`_mark_by_label`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise, product
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from burst_rt.planning.layouts import Block
from burst_rt.planning.masks import Mask, Relation, Rule
from burst_rt.planning.masks.spans import Positions, Spans, apart

__all__ = ["ROWS_TOGETHER", "Needed", "Needs", "Rows", "find_needs", "num_rows", "united"]

# Some rows of a block: (first, one after the last) of each range, ascending and apart.
Rows: TypeAlias = tuple[tuple[int, int], ...]
# By owner, block and rank: the rows of the owner's block that the rank computes with.
Needed: TypeAlias = tuple[tuple[tuple[Rows, ...], ...], ...]

_T = TypeVar("_T")
_Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

# Number of rows of a group. Kernels load blocks of rows, whose sizes divide this, and must find
# numbers in a whole block: what is hidden is multiplied by 0, and 0 times NaN is NaN.
ROWS_TOGETHER = 256
# Number of rows that are sampled to say how many spans rows have.
_SAMPLED_ROWS = 256
# Approximate number of elements of arrays that need not hold everything at once.
_SOME = 1 << 22
# If fewer than one in this many cells of a table is to be marked, cells are marked one by one.
_FEW = 8
# Maximum number of query parts that are looked at together. In a striped layout these may be parts
# of all ranks, which share their labels.
_SOME_PARTS = 128


class Needs(NamedTuple):
    """The rows that the two sides of a problem need from each other."""

    met: _Flags  # `[q runs, kv runs]`: whether two runs meet; runs are numbered rank by rank
    queries: Needed  # rows of queries that see a key of a rank
    keys: Needed  # rows of keys that a query of a rank sees


class _Intervals(NamedTuple):
    """Intervals of key positions, each seen by a part of the queries: int64 `[intervals]`."""

    part: Positions
    start: Positions
    stop: Positions


def find_needs(
    mask: Mask, queries: Sequence[Sequence[Block]], keys: Sequence[Sequence[Block]]
) -> Needs:
    """The rows that the ranks' blocks need from each other.

    queries, keys: the blocks of each rank, in positions as the mask sees them. Each rank has a run,
    which may be empty.

    A mask without spans is asked for `relation`, run by run; a block is then needed as a whole or
    not at all. The same holds for a block along which positions do not ascend, because kernels take
    such a block in parts.
    """
    q, kv = _Side(queries), _Side(keys)
    if not mask.has_spans:
        return _by_relation(mask, q, kv)
    if mask.rule is Rule.NOT_LATER:
        return _not_later(q, kv)
    order, by_label = _Order(kv), mask.by_label()
    in_order = np.zeros((len(q.runs), len(kv.part_run)), bool)
    needed = np.zeros((kv.num_ranks, len(q.part_run)), bool)
    if by_label and 1 in (by_label[0].batch, by_label[1].batch):
        _mark_by_label(*by_label, q, kv.end, order, in_order, needed)
    else:
        for seen in _seen(mask, q, kv.end):
            order.mark(in_order, needed, seen, q.part_run)
    met = np.empty_like(in_order)
    met[:, order.parts] = in_order
    return Needs(kv.of_runs(met), q.rows(needed), kv.rows(_by_rank(met, q)))


class _Side:
    """All blocks of a side, in parts, which are numbered block by block in local order."""

    def __init__(self, blocks: Sequence[Sequence[Block]]) -> None:
        some = ROWS_TOGETHER
        flat = [block for own in blocks for block in own]
        num_runs = [len(block) for block in flat]
        self.num_ranks, self.blocks_per_rank = len(blocks), len(blocks[0])
        self._disordered = [
            number for number, block in enumerate(flat) if not _ascend(list(filter(None, block)))
        ]
        # Runs.
        self.runs = [run for block in flat for run in block]
        numbers = [(run.start, run.step, len(run)) for run in self.runs]
        run_start, run_step, self.run_len = np.array(numbers, np.int64).T
        self.end = max((run[-1] + 1 for run in self.runs if run), default=0)
        block_of = np.repeat(np.arange(len(flat)), num_runs)
        self.run_rank = block_of // self.blocks_per_rank
        # Blocks.
        self.block_len = np.bincount(block_of, self.run_len, len(flat)).astype(np.int64)
        block_start = np.cumsum(self.block_len) - self.block_len
        # Where each run begins in its block.
        block_at = np.cumsum(self.run_len) - self.run_len - np.repeat(block_start, num_runs)
        # Groups are numbered so that one number is left out between two blocks.
        groups = -(-self.block_len // some) + 1
        self._first_group = np.cumsum(groups) - groups
        self._num_groups = int(groups.sum())
        # Parts.
        first = block_at // some
        last = (block_at + self.run_len - 1) // some
        count = np.where(self.run_len > 0, last + 1 - first, 0)
        self.run_part = np.cumsum(count) - count  # the first part of each run
        self.part_run = np.repeat(np.arange(len(self.runs)), count)
        of_run, at = self.part_run, block_at[self.part_run]
        group = first[of_run] + np.arange(len(of_run)) - self.run_part[of_run]
        self._part_group = self._first_group[block_of[of_run]] + group
        row = np.maximum(group * some - at, 0)  # counted from the start of the run
        self.part_len = np.minimum((group + 1) * some - at, self.run_len[of_run]) - row
        self.part_step = run_step[of_run]
        self.part_start = run_start[of_run] + self.part_step * row

    def places(self, parts: slice | Positions) -> tuple[Positions, Positions]:
        """The part, counted among `parts`, and the position of each row of some parts."""
        start, step, length = (x[parts] for x in (self.part_start, self.part_step, self.part_len))
        part = np.repeat(np.arange(len(length)), length)
        place = np.arange(len(part))
        place *= np.repeat(step, length)
        place += np.repeat(start - step * (np.cumsum(length) - length), length)
        return part, place

    def of_runs(self, parts: _Flags) -> _Flags:
        """`[n, parts]` to `[n, runs]`: whether any part of a run is marked."""
        found = np.zeros((len(parts), len(self.runs)), bool)
        there = np.flatnonzero(self.run_len)
        if len(there):
            found[:, there] = np.logical_or.reduceat(parts, self.run_part[there], axis=1)
        return found

    def rows(self, parts: _Flags, *, whole: bool = False) -> Needed:
        """The rows of the groups of which any part is marked for a rank; parts: `[ranks, parts]`.

        whole: whether blocks are needed whole, or not at all.
        """
        table = np.zeros((self.num_ranks, self._num_groups), bool)
        if len(self._part_group):
            firsts = np.flatnonzero(np.diff(self._part_group, prepend=-1))
            table[:, self._part_group[firsts]] = np.logical_or.reduceat(parts, firsts, axis=1)
        last = np.append(self._first_group[1:], self._num_groups) - 1
        for number in range(len(last)) if whole else self._disordered:
            groups = slice(self._first_group[number], last[number])
            table[:, groups] = table[:, groups].any(1, keepdims=True)
        # The number after a block's last group is never marked, so a range ends in its block.
        edges = np.diff(table.ravel().view(np.int8), prepend=np.int8(0))
        rank, first = np.divmod(np.flatnonzero(edges > 0), self._num_groups)
        stop = np.flatnonzero(edges < 0) % self._num_groups
        block = np.searchsorted(self._first_group, first, side="right") - 1
        first, stop = ((x - self._first_group[block]) * ROWS_TOGETHER for x in (first, stop))
        stop = np.minimum(stop, self.block_len[block])
        place = block * self.num_ranks + rank
        in_order = np.argsort(place, kind="stable")
        pairs = list(zip(first[in_order].tolist(), stop[in_order].tolist(), strict=True))
        count = np.bincount(place, minlength=len(self.block_len) * self.num_ranks)
        ends = [0, *np.cumsum(count).tolist()]
        # Most blocks have the same rows for many ranks, and so the same tuple.
        known: dict[Rows, Rows] = {}
        found = [known.setdefault(x, x) for x in (tuple(pairs[a:b]) for a, b in pairwise(ends))]
        by_block = _in_tuples(found, self.num_ranks)
        return _in_tuples(by_block, self.blocks_per_rank)


def _in_tuples(all_of: Sequence[_T], size: int) -> tuple[tuple[_T, ...], ...]:
    return tuple(tuple(all_of[at : at + size]) for at in range(0, len(all_of), size))


def _by_relation(mask: Mask, q: _Side, kv: _Side) -> Needs:
    met = np.zeros((len(q.runs), len(kv.runs)), bool)
    for i, j in product(*(np.flatnonzero(side.run_len).tolist() for side in (q, kv))):
        met[i, j] = mask.relation(q.runs[i], kv.runs[j]) is not Relation.EMPTY
    queries, keys = _by_rank(met.T, kv), _by_rank(met, q)
    return Needs(
        met,
        q.rows(queries[:, q.part_run], whole=True),
        kv.rows(keys[:, kv.part_run], whole=True),
    )


def _not_later(q: _Side, kv: _Side) -> Needs:
    """The needs under a causal mask: a part's last query and first key tell everything."""
    q_last, kv_first = q.part_start + q.part_step * (q.part_len - 1), kv.part_start
    far = np.iinfo(np.int64).max
    latest, earliest = np.full(q.num_ranks, -far), np.full(kv.num_ranks, far)
    np.maximum.at(latest, q.run_rank[q.part_run], q_last)
    np.minimum.at(earliest, kv.run_rank[kv.part_run], kv_first)
    last = np.array([run[-1] if run else -far for run in q.runs])
    first = np.array([run[0] if run else far for run in kv.runs])
    return Needs(
        last[:, None] >= first,
        q.rows(q_last >= earliest[:, None]),
        kv.rows(kv_first <= latest[:, None]),
    )


def _by_rank(met: _Flags, side: _Side) -> _Flags:
    """`[runs, n]` to `[ranks, n]`: whether any run of a rank is marked."""
    found: _Flags = np.logical_or.reduceat(
        met, np.searchsorted(side.run_rank, range(side.num_ranks))
    )
    return found


def _seen(mask: Mask, q: _Side, end: int) -> Iterator[_Intervals]:
    """The keys before a position that the queries of each part see together; some parts at a
    time.
    """
    if not len(q.part_len):
        return
    sampled = q.part_start[:: max(1, len(q.part_start) // _SAMPLED_ROWS)]
    width = mask.batch * mask.spans(sampled).width * ROWS_TOGETHER
    for some in _slices(len(q.part_len), width):
        part, places = q.places(some)
        begins = np.diff(part, prepend=-1).astype(bool) | mask.changes(places)
        firsts = np.flatnonzero(begins)
        spans = mask.seen_together(places, firsts, end)
        group, number = np.nonzero(spans.starts[0] < spans.stops[0])
        bounds = (x[0, group, number] for x in spans)
        yield _Intervals(some.start + part[firsts][group], *bounds)


def _mark_by_label(
    labelled: Mask, others: Mask, q: _Side, end: int, order: _Order, met: _Flags, needed: _Flags
) -> None:
    """Marks what `labelled & others` shows; see `_Order.mark`. labelled: a mask with labels.

    Keys that `others` shows to all rows of a label are marked once for the label, and then for the
    parts that have rows of it. Keys that it shows only to some of these rows are marked part by
    part: under a causal mask, the keys of the blocks on the diagonal.
    """
    # Parts of the same positions come together: in a striped layout, parts of all ranks.
    by_position = np.argsort(q.part_start, kind="stable")
    todo = [by_position[some] for some in _slices(len(by_position), ROWS_TOGETHER * _SOME_PARTS)]
    while todo:
        parts = todo.pop()
        part, places = q.places(parts)
        _, shown, label = np.unique(labelled.labels(places), return_index=True, return_inverse=True)
        # Labels x parts of keys are one table, and labels x spans another.
        width = labelled.spans(places[:1]).width
        if len(parts) > 1 and len(shown) * max(met.shape[1], width) > _SOME:
            todo += np.array_split(parts, 2)
            continue
        begins = np.diff(part, prepend=-1).astype(bool) | (np.diff(label, prepend=-1) != 0)
        firsts = np.flatnonzero(begins)
        start, stop = _seen_by_all(others.spans(places), label, end)
        spans = labelled.spans(places[shown]).together(np.arange(len(shown)), end)
        sure = _meeting(spans, np.arange(len(shown)), start, stop)
        of_label = np.zeros((len(shown), met.shape[1]), bool)
        order.mark(of_label, None, sure, np.arange(len(shown)))
        has = np.zeros((len(parts), len(shown)), bool)
        has[part[firsts], label[firsts]] = True
        of_set, set_of = _by_set(has, of_label)
        needed[:, parts] |= _any(of_set, order.of_rank)[set_of].T
        for run, marked in zip(q.part_run[parts].tolist(), of_set[set_of], strict=True):
            met[run] |= marked

        alike = np.flatnonzero(begins | others.changes(places))  # the first rows of groups
        together = others.seen_together(places, alike, end)
        a, b = (x[label[alike]][:, None] for x in (start, stop))
        for first, last in (
            (together.starts[0], np.minimum(together.stops[0], a)),
            (np.maximum(together.starts[0], b), together.stops[0]),
        ):
            group, number = np.nonzero(first < last)
            rest = _meeting(spans, label[alike[group]], first[group, number], last[group, number])
            at = parts[part[alike[group[rest.part]]]]
            by_part = np.argsort(at, kind="stable")
            rest = _Intervals(*(x[by_part] for x in (at, rest.start, rest.stop)))
            order.mark(met, needed, rest, q.part_run)


def _by_set(has: _Flags, of_label: _Flags) -> tuple[_Flags, Positions]:
    """The marks of any label of a set of labels, `[sets, n]`; and for each part, its set.

    has: `[parts, labels]`, which labels a part has. In a striped layout many parts have the same
    labels.
    of_label: `[labels, n]`.
    """
    sets: dict[bytes, int] = {}
    set_of = np.array([sets.setdefault(row.tobytes(), len(sets)) for row in has])
    of_set = np.zeros((len(sets), of_label.shape[1]), bool)
    for own, marked in zip(sets, of_set, strict=True):
        for number in np.flatnonzero(np.frombuffer(own, bool)).tolist():
            marked |= of_label[number]
    return of_set, set_of


def _any(a: _Flags, b: _Flags) -> _Flags:
    """The product of two matrices of booleans."""
    found: _Flags = a.astype(np.float32) @ b.astype(np.float32) > 0
    return found


def _seen_by_all(spans: Spans, label: Positions, end: int) -> tuple[Positions, Positions]:
    """The keys that all rows of a label see, by label: (start, stop), where stop may be start."""
    in_order = np.argsort(label, kind="stable")
    firsts = np.flatnonzero(np.diff(label[in_order], prepend=-1))
    if spans.width > 1:
        return np.zeros_like(firsts), np.zeros_like(firsts)
    start, stop = (np.clip(x[:, in_order, 0], 0, end) for x in spans)
    start = np.maximum.reduceat(start.max(0), firsts)
    return start, np.maximum(np.minimum.reduceat(stop.min(0), firsts), start)


def _meeting(spans: Spans, row: Positions, start: Positions, stop: Positions) -> _Intervals:
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
    found = []
    for number, at in _pairs(first, np.where(start < stop, last, first)):
        begin = np.maximum(starts[at] - row[number] * far, start[number])
        found.append((number, begin, np.minimum(stops[at] - row[number] * far, stop[number])))
    if not found:
        return _Intervals(*(np.zeros(0, np.int64) for _ in range(3)))
    return _Intervals(*map(np.concatenate, zip(*found, strict=True)))


class _Order:
    """The parts of the keys in such an order that an interval meets consecutive ones.

    The parts whose positions are `step` apart are in order of their first positions. An interval of
    at least `step` positions meets every part that it reaches far enough into, so only the parts at
    its two ends are looked at one by one.
    """

    def __init__(self, kv: _Side) -> None:
        order = self.parts = np.lexsort((kv.part_start, kv.part_step))
        self._step, self._low = kv.part_step[order], kv.part_start[order]
        self._high = self._low + self._step * (kv.part_len[order] - 1)
        self._rank = kv.run_rank[kv.part_run[order]]
        self.of_rank = self._rank[:, None] == np.arange(kv.num_ranks)  # [parts, ranks]
        # Number of parts of each rank among the first n parts, at index n.
        self._count = np.zeros((kv.num_ranks, len(order) + 1), np.int32)
        np.cumsum(self.of_rank.T, axis=1, dtype=np.int32, out=self._count[:, 1:])

    def mark(self, met: _Flags, needed: _Flags | None, seen: _Intervals, run_of: Positions) -> None:
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
                for some in _slices(len(first), len(self._count)):
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

    def _mark(self, met: _Flags, q_run: Positions, first: Positions, last: Positions) -> None:
        """Marks in `met` that runs of queries meet the parts from one place to another."""
        there = np.flatnonzero(first < last)
        q_run, first, last = q_run[there], first[there], last[there]
        if (last - first).sum() * _FEW < met.size:
            for number, place in _pairs(first, last):
                met[q_run[number], place] = True
            return
        places = len(self.parts) + 1
        for some in _slices(len(met), places):
            a, b = np.searchsorted(q_run, (some.start, some.stop))
            if a == b:
                continue
            num_runs = q_run[b - 1] + 1 - some.start
            at = (q_run[a:b] - some.start) * places
            bounds = np.stack(apart(at + first[a:b], at + last[a:b]), -1).ravel()
            # Up to the first bound nothing is met, then everything up to the next, and so on.
            lengths = np.diff(bounds, prepend=0, append=num_runs * places)
            meets = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
            met[some.start : some.start + num_runs] |= meets.reshape(-1, places)[:, :-1]


def _pairs(first: Positions, last: Positions) -> Iterator[tuple[Positions, Positions]]:
    """All pairs (n, place) with first[n] <= place < last[n], some at a time."""
    count = np.maximum(last - first, 0)
    ends = np.cumsum(count)
    begin = 0
    while begin < len(count):
        done = ends[begin] - count[begin]
        stop = max(begin + 1, int(np.searchsorted(ends, done + _SOME, side="right")))
        here = slice(begin, stop)
        number = np.repeat(np.arange(begin, stop), count[here])
        starts = np.repeat(first[here] - (ends[here] - count[here] - done), count[here])
        yield number, np.arange(len(number)) + starts
        begin = stop


def _slices(length: int, width: int) -> Iterator[slice]:
    """All of `length` rows of `width` numbers each, about _SOME numbers at a time."""
    step = max(1, _SOME // max(1, width))
    return (slice(at, at + step) for at in range(0, length if width else 0, step))


def _ascend(runs: Sequence[range]) -> bool:
    return all(a[-1] < b[0] for a, b in pairwise(runs))


def united(row_ranges: Iterable[tuple[int, int]]) -> Rows:
    """The rows that are in any of the ranges."""
    rows: list[tuple[int, int]] = []
    for start, stop in sorted(row_ranges):
        if rows and start <= rows[-1][1]:
            rows[-1] = (rows[-1][0], max(stop, rows[-1][1]))
        else:
            rows.append((start, stop))
    return tuple(rows)


def num_rows(rows: Rows) -> int:
    """Number of rows in all ranges together."""
    return sum(stop - start for start, stop in rows)
