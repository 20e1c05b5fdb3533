"""Traces: each task's span, and from them exposed communication, skew, overlap, and who waited.

A span is one task. Times are seconds of a monotonic clock. Traces of several ranks can be compared
if the ranks share that clock, as ranks of one host do.

A rank's compute lane is idle for one of two reasons. A transfer that it needs is on the wire: this
is exposed communication. Or a peer has not yet posted its side of the transfer: this is skew, for
which the network is not to blame. Only the traces of all ranks tell the two apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from burst_rt.errors import InputError
from burst_rt.scheduler.graph import Graph, Task
from burst_rt.scheduler.verify import Endpoint, match_messages

__all__ = ["Idle", "Span", "Trace", "Wait", "exposed", "overlap", "waits"]


class Span(NamedTuple):
    """One task of a run."""

    task: int
    name: str
    lane: str
    issued_s: float  # when it was handed to its lane
    started_s: float
    ended_s: float
    size_bytes: int  # sent, or moved in memory
    flops: int
    hop: int | None = None  # see `Task`

    @classmethod
    def of(cls, task: Task, *, issued_s: float, started_s: float, ended_s: float) -> Span:
        """The span of a task, with the graph's data about the task."""
        return cls(
            task=task.id,
            name=task.name,
            lane=task.lane,
            issued_s=issued_s,
            started_s=started_s,
            ended_s=ended_s,
            size_bytes=task.cost.size_bytes,
            flops=task.cost.flops,
            hop=task.hop,
        )


class Trace:
    """The last `capacity` spans of a run. Older spans are dropped, and counted."""

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
    """Seconds that a rank's compute lane was idle in a run."""

    exposed_s: float  # while a transfer that it needed was on the wire
    skew_s: float  # while a peer was late
    total_s: float  # the whole run, work included


class Wait(NamedTuple):
    """An interval in which a rank's compute lane waited for a message."""

    started_s: float
    ended_s: float
    on_wire: bool  # exposed communication; False: skew
    task: int  # the exchange that ended the wait, or the nearest one where none did
    peer: int  # the rank at the other side of that exchange's last message, sent or received
    posted_s: float  # when both sides of that message were posted


def exposed(
    graphs: Sequence[Graph], traces: Sequence[Iterable[Span]], compute_lane: str = "compute"
) -> list[Idle]:
    """Idle time of each rank's compute lane in one run, split into exposed communication and skew.

    `graphs[r]` and `traces[r]` belong to rank r. Raises InputError where a task has no span.
    """
    spans = [list(trace) for trace in traces]
    for graph, known in zip(graphs, spans, strict=True):
        if len({span.task for span in known}) != len(graph.tasks):
            raise InputError(
                f"exposed: rank {graph.rank} has {len(known)} spans for {len(graph.tasks)} tasks; "
                "trace the whole run"
            )
    idle = []
    for own, trace in zip(waits(spans, match_messages(graphs), compute_lane), spans, strict=True):
        exposed_s = sum(wait.ended_s - wait.started_s for wait in own if wait.on_wire)
        skew_s = sum(wait.ended_s - wait.started_s for wait in own if not wait.on_wire)
        start_s, stop_s = _whole(trace)
        idle.append(Idle(exposed_s, skew_s, stop_s - start_s))
    return idle


def overlap(
    trace: Iterable[Span], compute_lane: str = "compute", network_lane: str = "network"
) -> tuple[float, float]:
    """Seconds during which at least one transfer of a rank was in progress, and the part of these
    during which the rank's compute lane was busy.
    """
    busy: list[_Interval] = []
    moving: list[_Interval] = []
    for span in trace:
        if span.lane == compute_lane:
            busy.append((span.started_s, span.ended_s))
        elif span.lane == network_lane:
            moving.append((span.started_s, span.ended_s))
    transfers = _union(moving)
    return _total_s(transfers), _total_s(_cut(transfers, _union(busy)))


def waits(
    traces: Sequence[Iterable[Span]],
    matched: Mapping[Endpoint, Endpoint],
    compute_lane: str = "compute",
) -> list[list[Wait]]:
    """The intervals in which each rank's compute lane waited for a message, and for which message.

    `traces[r]` belongs to rank r and has a span of every task. matched: the result of
    `match_messages` for the graphs.
    """
    spans = list(map(_by_task, traces))
    # An exchange that receives is on the wire from the moment when both sides of its last message
    # are posted until it ends. Kept for each: that moment, and the rank at the other side.
    posted: list[dict[int, tuple[float, int]]] = [{} for _ in spans]
    sent: list[tuple[Endpoint, float, int]] = []
    for end, source in matched.items():
        both = max(spans[end.rank][end.task].issued_s, spans[source.rank][source.task].issued_s)
        posted[end.rank][end.task] = max(
            (both, source.rank), posted[end.rank].get(end.task, (0.0, -1))
        )
        sent.append((source, both, end.rank))
    for source, both, receiver in sent:
        # The messages that an exchange sends hold it up too, until the receiver has posted them. A
        # transport that takes a message at once has ended the exchange by then.
        senders = posted[source.rank]
        if source.task in senders and both < spans[source.rank][source.task].ended_s:
            senders[source.task] = max((both, receiver), senders[source.task])
    return [
        _waits_of_rank(trace, exchanges, compute_lane)
        for trace, exchanges in zip(spans, posted, strict=True)
    ]


def _waits_of_rank(
    spans: Mapping[int, Span], posted: Mapping[int, tuple[float, int]], compute_lane: str
) -> list[Wait]:
    """posted: for each exchange that receives, when it was on the wire, and with which rank."""
    if not spans:
        return []
    start, stop = _whole(spans.values())
    tiles = (s for s in spans.values() if s.lane == compute_lane)
    gaps = _gaps(start, stop, sorted((s.started_s, s.ended_s) for s in tiles))
    wire = _union((both, spans[t].ended_s) for t, (both, _) in posted.items())
    early = _union((spans[t].issued_s, both) for t, (both, _) in posted.items())
    arrivals = sorted((spans[t].ended_s, t, peer, both) for t, (both, peer) in posted.items())
    meetings = sorted((both, t, peer, both) for t, (both, peer) in posted.items())
    exposed = [_wait(piece, True, arrivals) for piece in _cut(gaps, wire)]
    # A late peer counts only while nothing else is on the wire.
    alone = _cut(_cut(gaps, early), _gaps(start, stop, wire))
    return sorted(exposed + [_wait(piece, False, meetings) for piece in alone])


def _wait(
    piece: _Interval, on_wire: bool, moments: Sequence[tuple[float, int, int, float]]
) -> Wait:
    """A wait for the last moment within the piece, or else for the first moment after it."""
    i = bisect_right(moments, piece[1], key=itemgetter(0))
    if i == len(moments) or (i > 0 and moments[i - 1][0] > piece[0]):
        i -= 1
    _, task, peer, posted_s = moments[i]
    return Wait(*piece, on_wire, task, peer, posted_s)


_Interval = tuple[float, float]


def _by_task(trace: Iterable[Span]) -> dict[int, Span]:
    return {span.task: span for span in trace}


def _whole(spans: Collection[Span]) -> _Interval:
    """Times at which the first task was issued and the last one ended; 0 and 0 without tasks."""
    start = min((span.issued_s for span in spans), default=0.0)
    return start, max((span.ended_s for span in spans), default=0.0)


def _total_s(intervals: Iterable[_Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _gaps(start: float, stop: float, busy: Iterable[_Interval]) -> list[_Interval]:
    """The gaps between start and stop that none of the intervals covers; intervals are sorted."""
    gaps, at = [], start
    for begin, end in busy:
        if begin > at:
            gaps.append((at, begin))
        at = max(at, end)
    if stop > at:
        gaps.append((at, stop))
    return gaps


def _union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """The same times as sorted intervals that do not touch."""
    merged: list[_Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def _cut(first: Sequence[_Interval], second: Sequence[_Interval]) -> list[_Interval]:
    """The times that are in both; each list is sorted and free of overlaps."""
    both: list[_Interval] = []
    j = 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        i = j
        while i < len(second) and second[i][0] < end:
            both.append((max(begin, second[i][0]), min(end, second[i][1])))
            i += 1
    return both
