"""The spans of the last minute, rank by rank: who sent what to whom, and who waited for whom.

They say where a rank had to wait, and why.

A call is kept as it came, at 16 bytes a span; the names and costs of its tasks are in its plan.
Idle time is either exposed communication or skew (`scheduler.waits`), and only the spans of all
ranks can tell which. That is worked out when somebody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from burst_rt.telemetry.messages import MessageInfo, PlanSummary, TaskInfo

__all__ = [
    "KEPT_S",
    "SPAN",
    "KeptCall",
    "Recent",
    "WholeCall",
    "match_plans",
    "spans_of",
    "whole_call",
]

KEPT_S = 60.0
# Times are seconds after the call's start. A float32 is exact to 0.1 us in a call of a second, and
# to 10 us in a call of a minute and a half.
SPAN = np.dtype([("task", "<u4"), ("issued", "<f4"), ("started", "<f4"), ("ended", "<f4")])
# Number of bytes that a kept call takes in addition to its spans.
_CALL_BYTES = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCall:
    """A call of one rank, in the hub's time. See `messages.EndedCall`."""

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
    """One rank's calls of the last minute, oldest first; fewer where those would take more than
    `limit_bytes`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._calls: deque[KeptCall] = deque()
        self._by_key: dict[tuple[str, int], KeptCall] = {}

    def add(self, call: KeptCall) -> None:
        """Appends a call, and forgets calls that are too old."""
        self._calls.append(call)
        self._by_key[call.group, call.number] = call
        self.size_bytes += _CALL_BYTES + len(call.spans)
        while self.size_bytes > self.limit_bytes or self._calls[0].ended_s < call.ended_s - KEPT_S:
            old = self._calls.popleft()
            self._by_key.pop((old.group, old.number), None)
            self.size_bytes -= _CALL_BYTES + len(old.spans)
            if not self._calls:
                return

    def get(self, group: str, number: int) -> KeptCall | None:
        """The group's call of that number, if it is still here."""
        return self._by_key.get((group, number))

    def newest_first(self, since_s: float, until_s: float) -> Iterator[KeptCall]:
        """Calls that have a part in the window, the newest first."""
        for call in reversed(self._calls):
            if call.ended_s < since_s:
                return
            if call.started_s <= until_s:
                yield call


class WholeCall(NamedTuple):
    """One call on all ranks of its group."""

    matched: Mapping[Endpoint, Endpoint]  # each receive's send
    # Indexed by rank of the group.
    plans: Sequence[PlanSummary]
    traces: Sequence[Sequence[Span]]
    waits: Sequence[Sequence[Wait]]


def match_plans(plans: Sequence[PlanSummary]) -> Mapping[Endpoint, Endpoint] | None:
    """Each receive's send. plans: of all ranks of a group, in the group's order. None where the
    plans do not fit each other.
    """
    try:
        return match_messages([_graph(plan, place, len(plans)) for place, plan in enumerate(plans)])
    except BurstError:
        return None


def _graph(plan: PlanSummary, place: int, world_size: int) -> Graph:
    """A graph with the tasks of a plan, as far as telemetry knows them: no buffers, no edges."""
    tasks = tuple(_task(number, info) for number, info in enumerate(plan.tasks))
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


def _task(number: int, info: TaskInfo) -> Task:
    return Task(
        id=number,
        name=info.name,
        lane=info.lane,
        op=Op(info.op),
        reads=(),
        writes=(),
        accumulates=(),
        sends=_messages(info.sends),
        recvs=_messages(info.recvs),
        cost=Cost(info.flops, info.size_bytes),
    )


def _messages(told: Sequence[MessageInfo]) -> tuple[Message, ...]:
    return tuple(Message(0, peer, tag, size_bytes) for peer, tag, size_bytes in told)


def spans_of(plan: PlanSummary, call: KeptCall) -> list[Span]:
    """A call's spans, in the hub's time. A task on a stream counts as issued when the device comes
    to it.
    """
    spans = []
    for task, issued, started, ended in _unpack(call.spans).tolist():
        if task >= len(plan.tasks):
            continue  # a span of another version of this plan: there is nothing to draw
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


def whole_call(
    plans: Sequence[PlanSummary], calls: Sequence[KeptCall], matched: Mapping[Endpoint, Endpoint]
) -> WholeCall | None:
    """A call on all ranks of a group. plans, calls: in the group's order. matched: as from
    `match_plans`. None where spans are missing.
    """
    traces = [spans_of(plan, call) for plan, call in zip(plans, calls, strict=True)]
    for plan, trace in zip(plans, traces, strict=True):
        traced = {span.task for span in trace}
        if len(traced) != len(plan.tasks):
            return None
    return WholeCall(matched, plans, traces, waits(traces, matched))
