"""What queries see as columns of a tile, and at which other positions a mask shows the same."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from burst_rt.planning.masks.base import Mask, Rule, positions_of, spans_of
from burst_rt.planning.masks.spans import Positions, Spans, intersect

__all__ = ["columns_seen", "in_place_of"]


def columns_seen(mask: Mask, q: tuple[range, ...], kv: tuple[range, ...]) -> Spans:
    """The columns that queries at positions `q` see, among keys at positions `kv`; the first key is
    column 0.

    kv: ascending, along all the runs. Spans may touch. Some may be empty: these stop where they
    start, or before, and may lie between others. A mask with labels may have many spans; the spans
    of a label are made once for all its rows.
    """
    first, end = kv[0][0], kv[-1][-1] + 1
    apart = mask.by_label()
    if apart is None:
        return spans_of(mask, *q).meeting(first, end).columns(*kv)
    labelled, others = apart
    spans, label = _spans_by_label(labelled, *q)
    spans = spans.meeting(first, end).columns(*kv).packed()
    seen = Spans(*(bound[:, label] for bound in spans))
    if others.rule is Rule.EVERYTHING:
        return seen
    rest = columns_seen(others, q, kv)
    if rest.width > 1:
        return intersect(seen, rest)
    return Spans(np.maximum(seen.starts, rest.starts), np.minimum(seen.stops, rest.stops))


@lru_cache(maxsize=16)
def _spans_by_label(labelled: Mask, *q: range) -> tuple[Spans, Positions]:
    """The spans of each label of these queries; and for each query, which of these are its own."""
    places = np.concatenate([positions_of(run) for run in q])
    _, shown, label = np.unique(labelled.labels(places), return_index=True, return_inverse=True)
    return labelled.spans(places[shown]), label


def in_place_of(
    mask: Mask, q: tuple[range, ...], kv: tuple[range, ...]
) -> tuple[tuple[range, ...], tuple[range, ...]]:
    """Positions at which a mask shows the same cells as at these, by its `_period`.

    Most tiles of a striped layout get the same positions, so that tables of a mask's spans are made
    once for all of them. The cells may be other spans there: of two that touch, or of one.
    """
    step = q[0].step
    if step < 2 or any(run.step != step for run in (*q, *kv)):
        return q, kv
    if not mask.has_spans or mask._period % step:
        return q, kv
    places = [{run.start % step for run in side} for side in (q, kv)]
    if any(len(side) != 1 for side in places):
        return q, kv
    of_q, of_kv = (side.pop() for side in places)
    return _shifted(q, -of_q), _shifted(kv, int(of_kv > of_q) - of_kv)


def _shifted(runs: tuple[range, ...], distance: int) -> tuple[range, ...]:
    return tuple(range(run.start + distance, run.stop + distance, run.step) for run in runs)
