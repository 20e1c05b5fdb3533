"""The spans of the last minute, rank by rank: who sent what to whom, and who waited for whom.

They say where a rank had to wait, and why.

A call is kept as it came, at 16 bytes a span; the names and costs of its tasks are in its plan.
Idle time is either exposed communication or skew (`scheduler.waits`), and only the spans of all
ranks can tell which. That is worked out when somebody looks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

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
from burst_rt.telemetry.messages import EndedCall, MessageInfo, PlanSummary, TaskInfo
from burst_rt.telemetry.model.views import FlowView, WaitView

__all__ = [
    "KEPT_S",
    "SPAN",
    "CallMatcher",
    "EntryWait",
    "RecentCalls",
    "WholeCall",
    "entry_wait",
    "flow_views",
    "num_spans",
    "spans_of_calls",
    "wait_views",
]

KEPT_S = 60.0
# Times are seconds after the call's start. A float32 is exact to 0.1 us in a call of a second, and
# to 10 us in a call of a minute and a half.
SPAN = np.dtype([("task", "<u4"), ("issued", "<f4"), ("started", "<f4"), ("ended", "<f4")])
# Number of bytes that a kept call takes in addition to its spans.
_CALL_BYTES = 400


def num_spans(call: EndedCall) -> int:
    """Number of the spans that a call has brought."""
    return len(call.spans) // SPAN.itemsize


class RecentCalls:
    """One rank's calls of the last minute, in the hub's time, oldest first; fewer where those would
    take more than `limit_bytes`.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._calls: deque[EndedCall] = deque()
        self._by_key: dict[tuple[str, int], EndedCall] = {}

    def add(self, call: EndedCall) -> None:
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

    def get(self, group: str, number: int) -> EndedCall | None:
        """The group's call of that number, if it is still here."""
        return self._by_key.get((group, number))

    def newest_first(self, since_s: float, until_s: float) -> Iterator[EndedCall]:
        """Calls that have a part in the window, the newest first."""
        for call in reversed(self._calls):
            if call.ended_s < since_s:
                return
            if call.started_s <= until_s:
                yield call


class WholeCall(NamedTuple):
    """One call on all ranks of its group."""

    group: str
    number: int
    members: Sequence[int]  # ranks of the job, by rank of the group
    matched: Mapping[Endpoint, Endpoint]  # each receive's send
    # Indexed by rank of the group.
    plans: Sequence[PlanSummary]
    traces: Sequence[Sequence[Span]]
    waits: Sequence[Sequence[Wait]]


class CallMatcher:
    """Makes whole calls. The messages of plans are matched once, and stay so for the `limit` sets
    of plans, one plan a rank, that came last.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._matched: OrderedDict[
            tuple[tuple[int, int], ...], Mapping[Endpoint, Endpoint] | None
        ] = OrderedDict()

    def whole(
        self,
        members: Sequence[int],
        plans: Sequence[PlanSummary | None],
        calls: Sequence[EndedCall],
    ) -> WholeCall | None:
        """A call on all ranks of a group. members, plans, calls: in the group's order. None where a
        plan or spans are missing, or where the plans do not fit each other.
        """
        complete = [plan for plan in plans if plan is not None]
        matched = self._match(members, complete) if len(complete) == len(members) else None
        if matched is None:
            return None
        traces = [spans_of_calls(plan, call) for plan, call in zip(complete, calls, strict=True)]
        for plan, trace in zip(complete, traces, strict=True):
            if len({span.task for span in trace}) != len(plan.tasks):
                return None
        group, number = calls[0].group, calls[0].number
        return WholeCall(group, number, members, matched, complete, traces, waits(traces, matched))

    def _match(
        self, members: Sequence[int], plans: Sequence[PlanSummary]
    ) -> Mapping[Endpoint, Endpoint] | None:
        key = tuple((rank, plan.number) for rank, plan in zip(members, plans, strict=True))
        if key not in self._matched:
            self._matched[key] = _match_plans(plans)
            if len(self._matched) > self._limit:
                self._matched.popitem(last=False)
        return self._matched[key]


class EntryWait(NamedTuple):
    """A rank computes nothing until the last rank has entered a call."""

    until_s: float
    took_s: float
    last: int  # rank of the job
    entered_s: float  # when it entered


def entry_wait(whole: WholeCall, parts: Sequence[EndedCall], place: int) -> EntryWait | None:
    """How a rank waited for the last one to enter a call, if it did. parts: of all ranks, in the
    group's order, in the hub's time. place: of the rank in its group.
    """
    trace, part = whole.traces[place], parts[place]
    # Nothing is sent until the last rank has entered the call and the ranks have agreed.
    entered_s, last = max((other.started_s, at) for at, other in enumerate(parts))
    agreed_s = max((span.ended_s for span in trace if span.lane == "control"), default=0.0)
    until_s = min(entered_s, agreed_s if whole.plans[place].tasks else part.ended_s)
    tiles = (span for span in trace if span.lane == "compute")
    computed_s = sum(max(0.0, min(s.ended_s, until_s) - s.started_s) for s in tiles)
    idle_s = until_s - part.started_s - computed_s
    if last == place or idle_s <= 0:
        return None
    return EntryWait(until_s, idle_s, whole.members[last], entered_s)


def wait_views(whole: WholeCall, parts: Sequence[EndedCall]) -> list[WaitView]:
    """Who waited, and for whom. parts: see `entry_wait`."""
    entries = ((rank, entry_wait(whole, parts, at)) for at, rank in enumerate(whole.members))
    return [
        WaitView(
            rank=rank, call=whole.number, cause="late entry", started_s=wait.until_s - wait.took_s,
            ended_s=wait.until_s, peer=wait.last, task="the last rank's entry", group=whole.group,
        )
        for rank, wait in entries
        if wait is not None
    ] + [
        WaitView(
            rank=rank, call=whole.number, cause="exposed" if wait.on_wire else "skew",
            started_s=wait.started_s, ended_s=wait.ended_s, peer=whole.members[wait.peer],
            task=plan.tasks[wait.task].name, group=whole.group,
        )
        for rank, plan, waits in zip(whole.members, whole.plans, whole.waits, strict=True)
        for wait in waits
    ]  # fmt: skip


def flow_views(whole: WholeCall) -> list[FlowView]:
    """Who sent what to whom."""
    spans = [{span.task: span for span in trace} for trace in whole.traces]
    members, plans = whole.members, whole.plans
    return [
        FlowView(
            call=whole.number,
            sender=members[send.rank], send_task=send.task,
            sent_s=spans[send.rank][send.task].issued_s,
            receiver=members[end.rank], receive_task=end.task,
            received_s=spans[end.rank][end.task].ended_s,
            size_bytes=plans[end.rank].tasks[end.task].recvs[end.number][2],
            group=whole.group, number=end.number,
        )
        for end, send in whole.matched.items()
    ]  # fmt: skip


def _match_plans(plans: Sequence[PlanSummary]) -> Mapping[Endpoint, Endpoint] | None:
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


def _messages(infos: Sequence[MessageInfo]) -> tuple[Message, ...]:
    return tuple(Message(0, peer, tag, size_bytes) for peer, tag, size_bytes in infos)


def spans_of_calls(plan: PlanSummary, call: EndedCall) -> list[Span]:
    """A call's spans, in the call's time, with hops as messages say them (-1: none). A task on a
    stream counts as issued when the device comes to it.
    """
    rows = np.frombuffer(call.spans[: num_spans(call) * SPAN.itemsize], SPAN).tolist()
    spans = []
    for task, issued, started, ended in rows:
        if task >= len(plan.tasks):
            continue  # a span of another version of this plan: there is nothing to draw
        t, start_s = plan.tasks[task], call.started_s
        issued_s, started_s = start_s + (started if t.ordered else issued), start_s + started
        times = issued_s, started_s, start_s + ended
        spans.append(Span(task, t.name, t.lane, *times, t.size_bytes, t.flops, t.hop))
    return spans
