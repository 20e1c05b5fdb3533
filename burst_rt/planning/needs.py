"""Which rows of a side are computed with rows of the other side, and so must be sent.

A strategy sends a row to the ranks that compute with it, and to no other. Rows travel in groups of
ROWS_TOGETHER rows of a block: a group goes to a rank if any of its rows meets any row of the rank.

All ranks' rows are asked about at once, because packed batches bring a new mask with every step:

1. Each side is taken in parts. A part is what one group has of one run, so that its positions are
   evenly spaced.
2. What the queries of a part see together is intervals of key positions (`_seen`).
3. An interval meets consecutive parts of the keys, once these are in order of position (`Order`).

Under `BlockSparse` a query sees many intervals, the same ones as all queries of its label (a row of
the table). There step 3 is done once for a label, and not for each part that has rows of it
(`_mark_by_label`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from burst_rt.planning.intervals import SOME, Intervals, Order, intersections, slices
from burst_rt.planning.layouts import Block
from burst_rt.planning.masks import Mask, Relation, Rule
from burst_rt.planning.masks.spans import Positions, Spans
from burst_rt.planning.sides import ROWS_TOGETHER, Flags, Needed, Rows, Side, num_rows, union_of

__all__ = ["ROWS_TOGETHER", "Needed", "Needs", "Rows", "find_needs", "num_rows", "union_of"]

# Number of rows that are sampled to say how many spans rows have.
_SAMPLED_ROWS = 256
# Maximum number of query parts that are looked at together. In a striped layout these may be parts
# of all ranks, which share their labels.
_SOME_PARTS = 128


class Needs(NamedTuple):
    """The rows that the two sides of a problem need from each other."""

    met: Flags  # `[q runs, kv runs]`: whether two runs meet; runs are numbered rank by rank
    queries: Needed  # rows of queries that see a key of a rank
    keys: Needed  # rows of keys that a query of a rank sees


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
    q, kv = Side(queries), Side(keys)
    if not mask.has_spans:
        return _by_relation(mask, q, kv)
    if mask.rule is Rule.NOT_LATER:
        return _not_later(q, kv)
    order, by_label = Order(kv), mask.by_label()
    in_order = np.zeros((len(q.runs), len(kv.part_run)), bool)
    needed = np.zeros((kv.num_ranks, len(q.part_run)), bool)
    if by_label and 1 in (by_label[0].batch, by_label[1].batch):
        _mark_by_label(*by_label, q, kv.end, _Marks(order, in_order, needed))
    else:
        for seen in _seen(mask, q, kv.end):
            order.mark(in_order, needed, seen, q.part_run)
    met = np.empty_like(in_order)
    met[:, order.parts] = in_order
    return Needs(kv.of_runs(met), q.rows(needed), kv.rows(_by_rank(met, q)))


def _by_relation(mask: Mask, q: Side, kv: Side) -> Needs:
    met = np.zeros((len(q.runs), len(kv.runs)), bool)
    for i, j in product(*(np.flatnonzero(side.run_len).tolist() for side in (q, kv))):
        met[i, j] = mask.relation(q.runs[i], kv.runs[j]) is not Relation.EMPTY
    queries, keys = _by_rank(met.T, kv), _by_rank(met, q)
    return Needs(
        met,
        q.rows(queries[:, q.part_run], whole=True),
        kv.rows(keys[:, kv.part_run], whole=True),
    )


def _not_later(q: Side, kv: Side) -> Needs:
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


def _by_rank(met: Flags, side: Side) -> Flags:
    """`[runs, n]` to `[ranks, n]`: whether any run of a rank is marked."""
    found: Flags = np.logical_or.reduceat(
        met, np.searchsorted(side.run_rank, range(side.num_ranks))
    )
    return found


def _seen(mask: Mask, q: Side, end: int) -> Iterator[Intervals]:
    """The keys before a position that the queries of each part see together; some parts at a
    time.
    """
    if not len(q.part_len):
        return
    sampled = q.part_start[:: max(1, len(q.part_start) // _SAMPLED_ROWS)]
    width = mask.batch * mask.spans(sampled).width * ROWS_TOGETHER
    for group_slice in slices(len(q.part_len), width):
        part, places = q.places(group_slice)
        begins = np.diff(part, prepend=-1).astype(bool) | mask.changes(places)
        firsts = np.flatnonzero(begins)
        spans = mask.seen_together(places, firsts, end)
        group, number = np.nonzero(spans.starts[0] < spans.stops[0])
        bounds = (x[0, group, number] for x in spans)
        yield Intervals(group_slice.start + part[firsts][group], *bounds)


class _Marks(NamedTuple):
    """What is marked, and by which order of the keys; see `Order.mark`."""

    order: Order
    met: Flags
    needed: Flags


def _mark_by_label(labelled: Mask, others: Mask, q: Side, end: int, marks: _Marks) -> None:
    """Marks what `labelled & others` shows. labelled: a mask with labels.

    Keys that `others` shows to all rows of a label are marked once for the label, and then for the
    parts that have rows of it. Keys that it shows only to some of these rows are marked part by
    part: under a causal mask, the keys of the blocks on the diagonal.
    """
    order, met, needed = marks
    # Parts of the same positions come together: in a striped layout, parts of all ranks.
    by_position = np.argsort(q.part_start, kind="stable")
    todo = [by_position[some] for some in slices(len(by_position), ROWS_TOGETHER * _SOME_PARTS)]
    while todo:
        parts = todo.pop()
        part, places = q.places(parts)
        _, shown, label = np.unique(labelled.labels(places), return_index=True, return_inverse=True)
        # Labels x parts of keys are one table, and labels x spans another.
        width = labelled.spans(places[:1]).width
        if len(parts) > 1 and len(shown) * max(met.shape[1], width) > SOME:
            todo += np.array_split(parts, 2)
            continue
        begins = np.diff(part, prepend=-1).astype(bool) | (np.diff(label, prepend=-1) != 0)
        firsts = np.flatnonzero(begins)
        start, stop = _seen_by_all(others.spans(places), label, end)
        spans = labelled.spans(places[shown]).together(np.arange(len(shown)), end)
        sure = intersections(spans, np.arange(len(shown)), start, stop)
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
            rest = intersections(
                spans, label[alike[group]], first[group, number], last[group, number]
            )
            at = parts[part[alike[group[rest.part]]]]
            by_part = np.argsort(at, kind="stable")
            rest = Intervals(*(x[by_part] for x in (at, rest.start, rest.stop)))
            order.mark(met, needed, rest, q.part_run)


def _by_set(has: Flags, of_label: Flags) -> tuple[Flags, Positions]:
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


def _any(a: Flags, b: Flags) -> Flags:
    """The product of two matrices of booleans."""
    found: Flags = a.astype(np.float32) @ b.astype(np.float32) > 0
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
