"""The spans of the last minute, rank by rank, and what they say together: who sent what to whom,
and where a rank stood still and why.

A call is kept as it came (16 bytes a span); tasks' names and costs are in its plan. Only when all
ranks' spans of a call are here can idle time be told apart into exposed communication and skew
(`scheduler.waits`); that is worked out when somebody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from burst_rt.errors import BurstError
from burst_rt.scheduler import (
    Cost,
    Graph,
    Lane,
    Message,
    Op,
    Span,
    Task,
    Wait,
    match_messages,
    waits,
)
from burst_rt.scheduler.verify import Endpoint
from burst_rt.telemetry.messages import Plan

__all__ = ["KEPT_S", "SPAN", "Kept", "Recent", "Together", "match_plans", "spans_of", "together"]

KEPT_S = 60.0
# Seconds after the call's start: exact to 0.1 us in a call of a second, to 10 us in one of a minute
# and a half.
SPAN = np.dtype([("task", "<u4"), ("issued", "<f4"), ("started", "<f4"), ("ended", "<f4")])
# What a kept call takes beside its spans.
_CALL_BYTES = 400


class Kept(NamedTuple):
    """A call of one rank, in the hub's time. See `messages.Call`."""

    group: str
    number: int
    plan: int
    started_s: float
    ended_s: float
    wait_s: float
    spans: bytes

    @property
    def num_spans(self) -> int:
        return len(self.spans) // SPAN.itemsize


class Recent:
    """One rank's calls of the last minute, or fewer where they would take more than `limit_bytes`;
    oldest first.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._calls: deque[Kept] = deque()
        self._by_key: dict[tuple[str, int], Kept] = {}

    def add(self, call: Kept) -> None:
        """Appends a call and forgets those too old."""
        self._calls.append(call)
        self._by_key[call.group, call.number] = call
        self.size_bytes += _CALL_BYTES + len(call.spans)
        while self.size_bytes > self.limit_bytes or self._calls[0].ended_s < call.ended_s - KEPT_S:
            old = self._calls.popleft()
            self._by_key.pop((old.group, old.number), None)
            self.size_bytes -= _CALL_BYTES + len(old.spans)
            if not self._calls:
                return

    def get(self, group: str, number: int) -> Kept | None:
        """The call of that number, if it is still here."""
        return self._by_key.get((group, number))

    def newest_first(self, since_s: float, until_s: float) -> Iterator[Kept]:
        """Calls that have a part in the window."""
        for call in reversed(self._calls):
            if call.ended_s < since_s:
                return
            if call.started_s <= until_s:
                yield call


class Together(NamedTuple):
    """One call on all ranks of its group. matched: each receive's send. plans, traces, waits: by
    rank of the group.
    """

    matched: Mapping[Endpoint, Endpoint]
    plans: Sequence[Plan]
    traces: Sequence[Sequence[Span]]
    waits: Sequence[Sequence[Wait]]


def match_plans(plans: Sequence[Plan]) -> Mapping[Endpoint, Endpoint] | None:
    """Each receive's send in the plans of all ranks of a group, in their order; None where they do
    not fit each other.
    """
    try:
        return match_messages([_graph(plan, place, len(plans)) for place, plan in enumerate(plans)])
    except BurstError:
        return None


def _graph(plan: Plan, place: int, world_size: int) -> Graph:
    """A graph with the tasks of a plan, as far as telemetry knows them: no memory, no edges."""
    tasks = tuple(
        Task(
            id=i,
            name=t.name,
            lane=t.lane,
            op=Op(t.op),
            reads=(),
            writes=(),
            accumulates=(),
            sends=tuple(Message(0, *m) for m in t.sends),
            recvs=tuple(Message(0, *m) for m in t.recvs),
            cost=Cost(t.flops, t.size_bytes),
        )
        for i, t in enumerate(plan.tasks)
    )
    lanes = {t.lane: Lane(t.lane, ordered=t.ordered) for t in plan.tasks}
    return Graph(
        rank=place,
        world_size=world_size,
        lanes=lanes,
        parts=(),
        tasks=tasks,
        predecessors=(),
        successors=(),
    )


def spans_of(plan: Plan, call: Kept) -> list[Span]:
    """A call's spans, in the hub's time. What is on a stream counts as issued when the device comes
    to it.
    """
    spans = []
    for task, issued, started, ended in _unpack(call.spans).tolist():
        if task >= len(plan.tasks):
            continue  # of another version of this plan: nothing to draw
        t = plan.tasks[task]
        at = call.started_s + (started if t.ordered else issued)
        spans.append(
            Span(
                task,
                t.name,
                t.lane,
                at,
                call.started_s + started,
                call.started_s + ended,
                t.size_bytes,
                t.flops,
            )
        )
    return spans


def _unpack(raw: bytes) -> npt.NDArray[np.void]:
    return np.frombuffer(raw[: len(raw) // SPAN.itemsize * SPAN.itemsize], SPAN)


def together(
    plans: Sequence[Plan], calls: Sequence[Kept], matched: Mapping[Endpoint, Endpoint]
) -> Together | None:
    """A call of all ranks of a group, in their order, whose messages are `matched`; None where
    spans are missing.
    """
    traces = [spans_of(plan, call) for plan, call in zip(plans, calls, strict=True)]
    if any(
        len({span.task for span in trace}) != len(plan.tasks)
        for plan, trace in zip(plans, traces, strict=True)
    ):
        return None
    return Together(matched, plans, traces, waits(traces, matched))
