"""What a page is handed when its dashboard goes: all that its tabs would have asked for.

A tab asks when it is opened, and a job that ends takes its dashboard with it. A page holds this
instead (`ask.js`). Its size is bounded: some megabytes for the largest jobs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from burst_rt.dashboard.compact import compact
from burst_rt.telemetry.model.timeline import KEPT_S
from burst_rt.telemetry.model.views import PlanView, SeriesView, Snapshot
from burst_rt.telemetry.read.viewer import Viewer

__all__ = ["last_answers"]

# The ranges that the page's History has, in seconds, and the rows that it asks for of each.
_RANGES_S = (86_400.0, 3_600.0, 600.0, 60.0)
_MAX_ROWS = 300
# Maximum number of values of all histories together: jobs of many sources get fewer rows.
_MAX_VALUES = 200_000
_MAX_SPANS = 20_000


class _Last(msgspec.Struct, kw_only=True):
    timeline: msgspec.Raw  # a `CompactTimeline`
    series: list[SeriesView]  # the newer a part is, the finer
    plans: list[PlanView]


def last_answers(viewer: Viewer, snapshot: Snapshot) -> bytes:
    """The JSON of all that is held of the job's past. Blocks as the viewer does. Raises ConfigError
    where the hub is gone, and Stalled where it is late.
    """
    timeline = viewer.timeline(-KEPT_S, None, [], _MAX_SPANS)
    num_columns = sum(len(source.metrics) for source in snapshot.sources)
    limit = max(1, min(_MAX_ROWS, _MAX_VALUES // (len(_RANGES_S) * max(1, num_columns))))
    series = viewer.series([], [], -_RANGES_S[0], limit)
    for range_s in _RANGES_S[1:]:
        finer = {view.source: view for view in viewer.series([], [], -range_s, limit)}
        series = [_refined(view, finer.get(view.source)) for view in series]
    last = _Last(
        timeline=msgspec.Raw(compact(timeline, snapshot.job.now_s)),
        series=series,
        plans=snapshot.plans,
    )
    return msgspec.json.encode(last)


def _refined(view: SeriesView, finer: SeriesView | None) -> SeriesView:
    """A series whose newer part is replaced by finer rows."""
    if finer is None or not finer.times:
        return view
    count = bisect_left(view.times, finer.times[0])
    values = {
        name: [*_column(view, name)[:count], *_column(finer, name)]
        for name in (view.values | finer.values)
    }
    return SeriesView(view.source, [*view.times[:count], *finer.times], values, view.marks)


def _column(view: SeriesView, name: str) -> Sequence[float | None]:
    return view.values.get(name) or [None] * len(view.times)
