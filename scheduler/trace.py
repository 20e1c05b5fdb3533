"""Traces: what each task of a run did and when, and what follows from it.

A span is one task. Times are seconds of one monotonic clock; traces of several ranks can be compared when they share that clock (one
host). `exposed` needs the traces of all ranks, because a transfer is on the wire only once both sides have been posted; what a rank idles
before that is `skew`: it waits for a late peer, not for the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from burst_rt.errors import InputError
from burst_rt.scheduler.graph import Graph
from burst_rt.scheduler.verify import match_messages

__all__ = ["Idle", "Span", "Trace", "exposed"]


class Span(NamedTuple):
    """One task: issued (handed to its lane), started, ended; bytes sent or moved; floating-point operations."""

    task: int
    name: str
    lane: str
    issued_s: float
    started_s: float
    ended_s: float
    size_bytes: int
    flops: int


class Trace:
    """The last `capacity` spans; older ones are dropped and counted."""

    def __init__(self, capacity: int = 100_000) -> None:
        if capacity < 1:
            raise InputError(f"Trace: capacity must be at least 1 span, got {capacity}")
        self._spans: deque[Span] = deque(maxlen=capacity)
        self.num_dropped = 0

    def add(self, span: Span) -> None:
        """Appends a span."""
        if len(self._spans) == self._spans.maxlen:
            self.num_dropped += 1
        self._spans.append(span)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)


class Idle(NamedTuple):
    """Idle time of a rank's compute lane in seconds: while a needed transfer was on the wire, while a peer was late, and the whole run."""

    exposed_s: float
    skew_s: float
    total_s: float


def exposed(graphs: Sequence[Graph], traces: Sequence[Iterable[Span]], compute_lane: str = "compute") -> list[Idle]:
    """Idle time of each rank's compute lane over one run, split into exposed communication and skew.

    `graphs[r]` and `traces[r]` belong to rank r; every task of the graph must have its span.
    """
    spans: list[Mapping[int, Span]] = [{span.task: span for span in trace} for trace in traces]
    for graph, known in zip(graphs, spans, strict=True):
        if len(known) != len(graph.tasks):
            raise InputError(f"exposed: rank {graph.rank} has {len(known)} spans for {len(graph.tasks)} tasks; trace the whole run")
    # A receive is on the wire from the moment both sides are posted until it ends.
    posted: list[dict[int, float]] = [{} for _ in graphs]
    for end, source in match_messages(graphs).items():
        both = max(spans[end.rank][end.task].issued_s, spans[source.rank][source.task].issued_s)
        posted[end.rank][end.task] = max(both, posted[end.rank].get(end.task, 0.0))
    result = []
    for graph, known in zip(graphs, spans, strict=True):
        if not known:
            result.append(Idle(0.0, 0.0, 0.0))
            continue
        start, stop = min(s.issued_s for s in known.values()), max(s.ended_s for s in known.values())
        gaps = _gaps(start, stop, sorted((s.started_s, s.ended_s) for s in known.values() if s.lane == compute_lane))
        wire = _union((posted[graph.rank][t], known[t].ended_s) for t in posted[graph.rank])
        early = _union((known[t].issued_s, posted[graph.rank][t]) for t in posted[graph.rank])
        on_wire = _overlap(gaps, wire)
        result.append(Idle(on_wire, max(0.0, _overlap(gaps, _union([*wire, *early])) - on_wire), stop - start))
    return result


_Interval = tuple[float, float]


def _gaps(start: float, stop: float, busy: Iterable[_Interval]) -> list[_Interval]:
    gaps, at = [], start
    for begin, end in busy:
        if begin > at:
            gaps.append((at, begin))
        at = max(at, end)
    if stop > at:
        gaps.append((at, stop))
    return gaps


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    merged: list[_Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def _overlap(first: Sequence[_Interval], second: Sequence[_Interval]) -> float:
    total, j = 0.0, 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        i = j
        while i < len(second) and second[i][0] < end:
            total += min(end, second[i][1]) - max(begin, second[i][0])
            i += 1
    return total
