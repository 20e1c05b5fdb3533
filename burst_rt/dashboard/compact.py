"""A timeline as a browser gets it, in few bytes.

Spans are beneath their call, each name is said once, and times are whole tenths of microseconds.
"""

from __future__ import annotations

from typing import Any

import msgspec

from burst_rt.telemetry.model.views import SpanView, TimelineView

__all__ = ["UNITS_PER_S", "compact"]

UNITS_PER_S = 1e7


class CallRows(msgspec.Struct, kw_only=True):
    """A call of a rank."""

    rank: int
    group: str
    call: int
    kind: str
    plan: int  # number of the rank's plan
    started_s: float
    # Rows of name and lane (places in `names`), hop, bits (1: sends, 2: receives), issued, started
    # and ended (in `1 / units_per_s` s after started_s), bytes, flops, task.
    spans: list[tuple[int, ...]]


class CompactTimeline(msgspec.Struct, kw_only=True):
    """A `TimelineView` in few bytes."""

    now_s: float  # when it was made
    since_s: float
    until_s: float
    units_per_s: float
    names: list[str]
    calls: list[CallRows]
    waits: list[Any]  # rows as in `telemetry.model.views`
    flows: list[Any]  # rows as in `telemetry.model.views`
    complete: int
    left_out: int


def compact(view: TimelineView, now_s: float) -> bytes:
    """The JSON of a `CompactTimeline`. now_s: the hub's time, for the page."""
    names: dict[str, int] = {}
    calls: dict[tuple[int, str, int], list[SpanView]] = {}
    for span in view.spans:
        calls.setdefault((span.rank, span.group, span.call), []).append(span)
    rows = []
    for (rank, group, call), spans in calls.items():
        start = min(span.issued_s for span in spans)
        cells = []
        for span in spans:
            bits = (span.sends > 0) | (span.receives > 0) << 1
            name = names.setdefault(span.name, len(names))
            lane = names.setdefault(span.lane, len(names))
            times = (
                round((at - start) * UNITS_PER_S)
                for at in (span.issued_s, span.started_s, span.ended_s)
            )
            cells.append(
                (name, lane, span.hop, bits, *times, span.size_bytes, span.flops, span.task)
            )
        rows.append(
            CallRows(
                rank=rank,
                group=group,
                call=call,
                kind=spans[0].kind,
                plan=spans[0].plan,
                started_s=start,
                spans=cells,
            )
        )
    made = CompactTimeline(
        now_s=now_s,
        since_s=view.since_s,
        until_s=view.until_s,
        units_per_s=UNITS_PER_S,
        names=list(names),
        calls=rows,
        waits=view.waits,
        flows=view.flows,
        complete=view.complete,
        left_out=view.left_out,
    )
    return msgspec.json.encode(made)
