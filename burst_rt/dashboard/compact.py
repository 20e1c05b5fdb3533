"""A timeline as a browser gets it, in few bytes.

Each name is said once, and times are whole tenths of microseconds.
"""

from __future__ import annotations

import msgspec

from burst_rt.telemetry.model.views import (
    CallView,
    FlowView,
    PhaseView,
    TimelineView,
    WaitView,
    shared_fields,
)

__all__ = ["UNITS_PER_S", "compact"]

UNITS_PER_S = 1e7


class CallRows(msgspec.Struct, kw_only=True):
    """A `CallView` in few bytes."""

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
    waits: list[WaitView]
    flows: list[FlowView]
    complete: int
    left_out: int
    phases: list[PhaseView]
    phases_left_out: int


def compact(view: TimelineView, now_s: float) -> bytes:
    """The JSON of a `CompactTimeline`. now_s: the hub's time, for the page."""
    names: dict[str, int] = {}
    timeline = CompactTimeline(
        **shared_fields(view, CompactTimeline)
        | {"calls": [_rows(call, names) for call in view.calls]},
        now_s=now_s,
        units_per_s=UNITS_PER_S,
        names=list(names),
    )
    return msgspec.json.encode(timeline)


def _rows(call: CallView, names: dict[str, int]) -> CallRows:
    """names: the place of each name; takes new ones."""
    start_s = min(span.issued_s for span in call.spans)
    rows = []
    for span in call.spans:
        times = (
            round((at_s - start_s) * UNITS_PER_S)
            for at_s in (span.issued_s, span.started_s, span.ended_s)
        )
        name, lane = (names.setdefault(word, len(names)) for word in (span.name, span.lane))
        bits = (span.sends > 0) | (span.receives > 0) << 1
        rows.append((name, lane, span.hop, bits, *times, span.size_bytes, span.flops, span.task))
    return CallRows(**shared_fields(call, CallRows) | {"spans": rows}, started_s=start_s)
