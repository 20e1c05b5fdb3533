"""Which rows of a side are computed with which rows of the other side, run by run.

A strategy sends a row to the ranks that compute with it, and to no other. So planning asks of every
run of queries and every run of keys what of them meets. All runs of a problem are asked about at
once, because packed batches bring a new mask with every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from burst_rt.planning.masks import Mask, Positions, Relation, Rule, Spans, sees_few, spans_of
from burst_rt.planning.masks.spans import BEGIN, END

__all__ = [
    "ROWS_TOGETHER",
    "Needs",
    "Rows",
    "find_needs",
    "num_rows",
    "of_shards",
    "rounded",
    "united",
]

# Some rows of a block: (first, one after the last) of each stretch, ascending and apart.
Rows: TypeAlias = tuple[tuple[int, int], ...]

# Rows travel in stretches of this many. Kernels load blocks of rows, whose sizes divide this, and
# must find numbers in a whole block: what is hidden is multiplied by 0, and 0 times NaN is NaN.
ROWS_TOGETHER = 256
# The rows of a run of queries are looked at in so many stretches at most; of all runs together, in
# so many (stretch of queries, run of keys) pairs at most, about.
_STRETCHES, _PAIRS = 256, 1 << 22


class Needs(NamedTuple):
    """What of a run of queries and a run of keys meets: int64 `[query runs, key runs, 2]`.

    The last dimension holds the first row and one after the last row; 0 and 0 where nothing meets.
    Rows between the two may be rows that meet nothing.
    """

    queries: Positions  # rows of the run of queries that see a key of the run of keys
    keys: Positions  # rows of the run of keys that a query of the run of queries sees


def find_needs(mask: Mask, q_runs: Sequence[range], kv_runs: Sequence[range]) -> Needs:
    """What of each two runs meets. The runs are ranges of positions as the mask sees them.

    Too many rows may be said to meet, never too few. A mask without spans, or with many spans a
    row, is asked for `relation`: runs that meet at all then meet as a whole.
    """
    lengths = np.array([len(run) for run in kv_runs], np.int64)
    there = np.flatnonzero(lengths).tolist()
    found = Needs(*np.zeros((2, len(q_runs), len(kv_runs), 2), np.int64))
    stretches = max(1, min(_STRETCHES, _PAIRS // (len(q_runs) * len(kv_runs))))
    if mask.rule is Rule.EVERYTHING:
        q_lengths = np.array([len(run) for run in q_runs], np.int64)
        meet = (q_lengths[:, None] > 0) & (lengths > 0)
        found.queries[..., 1] = meet * q_lengths[:, None]
        found.keys[..., 1] = meet * lengths
        return found
    kv = [kv_runs[other] for other in there]
    alike = _meet(spans_of(mask, range(1)), kv, 1) if mask.uniform else None
    for number, q in enumerate(q_runs):
        if not q:
            continue
        if alike is not None:
            rows, columns = alike
            found.queries[number, there], found.keys[number, there] = rows * len(q), columns
            continue
        if mask.has_spans and sees_few(mask, q):
            rows, columns = _meet(spans_of(mask, q), kv, stretches)
            found.queries[number, there], found.keys[number, there] = rows, columns
            continue
        for other in there:
            if mask.relation(q, kv_runs[other]) is not Relation.EMPTY:
                found.queries[number, other, 1] = len(q)
                found.keys[number, other, 1] = lengths[other]
    return found


def _meet(spans: Spans, kv: Sequence[range], stretches: int) -> tuple[Positions, Positions]:
    """The rows, and the columns of each run, that meet: `[runs, 2]` each.

    The rows are looked at in so many stretches, each as the hull of its rows.
    """
    num_rows = spans.starts.shape[1]
    step = -(-num_rows // stretches)
    edges = np.arange(0, num_rows, step)
    filled = spans.starts < spans.stops
    starts = np.minimum.reduceat(np.where(filled, spans.starts, END), edges, axis=1)
    stops = np.maximum.reduceat(np.where(filled, spans.stops, BEGIN), edges, axis=1)
    # `[stretches, batch rows x spans, 1]` beside `[runs]`.
    starts, stops = (np.moveaxis(x, 1, 0).reshape(len(edges), -1, 1) for x in (starts, stops))
    at, by, length = np.array([(run.start, run.step, len(run)) for run in kv]).T
    first, last = (np.clip(-((at - bound) // by), 0, length) for bound in (starts, stops))
    seen = first < last
    columns = np.stack(
        [np.where(seen, first, length).min((0, 1)), np.where(seen, last, 0).max((0, 1))], axis=-1
    )
    meet = seen.any(1)
    top, bottom = meet.argmax(0), len(edges) - meet[::-1].argmax(0)
    rows = np.stack([edges[top], np.minimum(bottom * step, num_rows)], axis=-1)
    nothing = ~meet.any(0)
    rows[nothing] = columns[nothing] = 0
    return rows, columns


def of_shards(table: Positions, first_runs: Sequence[int]) -> list[list[tuple[int, int]]]:
    """What of each run meets any run of a shard: (first row, one after the last), 0 if nothing.

    table: `Needs.queries`, or `Needs.keys` with its first two dimensions swapped; its second
    dimension are the runs of all shards. first_runs: the number of each shard's first run.
    """
    firsts = np.where(table[..., 1] > 0, table[..., 0], END)
    starts = np.minimum.reduceat(firsts, first_runs, axis=1)
    stops = np.maximum.reduceat(table[..., 1], first_runs, axis=1)
    return [
        list(zip(*row, strict=True)) for row in zip(starts.tolist(), stops.tolist(), strict=True)
    ]


def rounded(stretches: Iterable[tuple[int, int]], length: int) -> Rows:
    """Rows of a block of that length, in stretches that begin and end at ROWS_TOGETHER."""
    some = ROWS_TOGETHER
    return united((a // some * some, min(-(-b // some) * some, length)) for a, b in stretches)


def united(stretches: Iterable[tuple[int, int]]) -> Rows:
    """The rows that are in any of the stretches."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def num_rows(rows: Rows) -> int:
    """How many rows there are in all stretches together."""
    return sum(stop - start for start, stop in rows)
