"""The plans of a job, the calls of the last minute, and the timeline that is drawn of them.

Plans stay packed: in a ring of 64 ranks every rank has its own, of hundreds of tasks.
"""

from __future__ import annotations

import heapq
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from burst_rt.telemetry.messages import EndedCall, Group, Hello, PlanSummary, Severity
from burst_rt.telemetry.model.events import EventLog
from burst_rt.telemetry.model.ranks import Rank
from burst_rt.telemetry.model.timeline import (
    CallMatcher,
    RecentCalls,
    flow_views,
    num_spans,
    spans_of_calls,
    wait_views,
)
from burst_rt.telemetry.model.views import (
    CallView,
    FlowView,
    PlanView,
    SpanView,
    TimelineView,
    WaitView,
    shared_fields,
)

__all__ = ["Plans"]

# Maximum size of the spans of all ranks.
_SPAN_BYTES = 16 << 20
_MAX_GROUPS = 1 << 14  # maximum number of contexts that are known, those that have called last
_MAX_PLANS = 256  # maximum number of a rank's plans
# Number of plans that stay unpacked, in addition to two of each rank, forward and backward.
_DECODED_PLANS = 32
_MATCHED = 4  # number of sets of plans that stay matched
# Maximum number of spans for which the waits and messages of calls are worked out at a time, when
# somebody looks, and maximum number of entries of the results that are kept.
_JOINT_SPANS = 20_000
_JOINT_ENTRIES = 50_000


class _RankPlans(NamedTuple):
    """The plans and the recent calls of one rank."""

    recent: RecentCalls
    packed: OrderedDict[int, tuple[PlanView, bytes]]


class _Joint(NamedTuple):
    """The waits and messages of a call, from the spans of all ranks; none of either where the plans
    do not fit each other.
    """

    waits: list[WaitView]
    flows: list[FlowView]


class Plans:
    """See the module."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.ranks: dict[int, _RankPlans] = {}
        self.groups: OrderedDict[str, Group] = OrderedDict()
        self._decoded: OrderedDict[tuple[int, int], PlanSummary] = OrderedDict()
        self._matcher = CallMatcher(_MATCHED)
        self._joint: OrderedDict[tuple[str, int], _Joint] = OrderedDict()
        self._num_joint = 0
        self._told: set[str] = set()  # kinds of plans with an event

    def join(self, hello: Hello) -> None:
        """A rank joins, or joins again: what was known of it is of another process."""
        limit_bytes = _SPAN_BYTES // max(1, hello.world_size, len(self.ranks))
        self.ranks[hello.rank] = _RankPlans(RecentCalls(limit_bytes), OrderedDict())
        for key in [key for key in self._decoded if key[0] == hello.rank]:
            del self._decoded[key]

    def add_group(self, group: Group) -> None:
        """There is a context of these ranks."""
        self.groups[group.name] = group
        self.groups.move_to_end(group.name)
        if len(self.groups) > _MAX_GROUPS:
            self.groups.popitem(last=False)

    def add_plan(self, number: int, plan: PlanSummary) -> None:
        """A rank tells a plan. number: of the rank."""
        packed = self.ranks[number].packed
        view = PlanView(**shared_fields(plan, PlanView), rank=number, num_tasks=len(plan.tasks))
        packed[plan.number] = (view, zlib.compress(msgspec.msgpack.encode(plan), 1))
        self._decoded.pop((number, plan.number), None)
        if len(packed) > _MAX_PLANS:
            packed.popitem(last=False)
        # Packed documents make plans in each step, which would push other events out of sight.
        if number == min(self.ranks) and plan.kind not in self._told:
            self._told.add(plan.kind)
            text = f"{plan.kind}: {len(plan.tasks)} tasks on rank {number}"
            self._events.add(number, Severity.INFO, "plan", text)

    def add_call(self, rank: Rank, call: EndedCall) -> None:
        """A call has ended on a rank."""
        if call.group in self.groups:
            self.groups.move_to_end(call.group)  # contexts that call are not forgotten
        recent, packed = self.ranks[rank.view.rank]
        if call.plan in packed:
            packed.move_to_end(call.plan)  # plans that run are not forgotten
        started_s, ended_s = rank.at(call.started_s), rank.at(call.ended_s)
        recent.add(msgspec.structs.replace(call, started_s=started_s, ended_s=ended_s))

    def views(self) -> list[PlanView]:
        """All plans, rank by rank."""
        packed = (self.ranks[number].packed for number in sorted(self.ranks))
        return [view for plans in packed for view, _ in plans.values()]

    def timeline(
        self, since_s: float, until_s: float, ranks: Sequence[int], limit: int
    ) -> TimelineView:
        """See `JobModel.timeline`."""
        visible = {number for number in (ranks or self.ranks) if number in self.ranks}
        view = TimelineView(since_s=since_s, until_s=until_s)
        room, budget = limit, _JOINT_SPANS
        joints: dict[tuple[str, int], _Joint | None] = {}
        for number, call in self._newest_first(sorted(visible), since_s, until_s):
            plan = self.plan(number, call.plan) if num_spans(call) <= room else None
            if plan is None:
                view.left_out += num_spans(call)
                continue
            part = _call_view(number, call, plan)
            if part.spans:
                view.calls.append(part)
                room -= len(part.spans)
            key = (call.group, call.number)
            if key not in joints:
                joints[key], budget = self._joint_call(*key, budget)
        for joint in filter(None, joints.values()):
            view.complete += 1
            view.waits += [wait for wait in joint.waits if wait.rank in visible]
            view.flows += [flow for flow in joint.flows if {flow.sender, flow.receiver} <= visible]
        view.calls.reverse()
        return view

    def _newest_first(
        self, ranks: Sequence[int], since_s: float, until_s: float
    ) -> Iterator[tuple[int, EndedCall]]:
        """The calls of several ranks that have a part in the window, each with its rank."""

        def calls_of(number: int) -> Iterator[tuple[float, int, EndedCall]]:
            for call in self.ranks[number].recent.newest_first(since_s, until_s):
                yield -call.ended_s, number, call

        for _, number, call in heapq.merge(*map(calls_of, ranks), key=lambda item: item[:2]):
            yield number, call

    def plan(self, rank: int, number: int) -> PlanSummary | None:
        """A rank's plan with its tasks; None where it is not known."""
        key = (rank, number)
        plan = self._decoded.get(key)
        if plan is not None:
            self._decoded.move_to_end(key)
        elif rank in self.ranks and number in self.ranks[rank].packed:
            packed = zlib.decompress(self.ranks[rank].packed[number][1])
            plan = self._decoded[key] = msgspec.msgpack.decode(packed, type=PlanSummary)
            if len(self._decoded) > _DECODED_PLANS + 2 * len(self.ranks):
                self._decoded.popitem(last=False)
        return plan

    def _joint_call(self, group: str, number: int, budget: int) -> tuple[_Joint | None, int]:
        """The waits and messages of a call, from the spans of all ranks, and how many spans may
        still be worked out for this view. None where spans of some rank are missing, or where
        there are more than `budget`.
        """
        key = (group, number)
        if key in self._joint:
            return self._joint[key], budget
        members = self.groups[group].ranks if group in self.groups else []
        parts = [self.ranks[rank].recent.get(*key) for rank in members if rank in self.ranks]
        calls = [call for call in parts if call is not None]
        budget -= sum(map(num_spans, calls))
        if not calls or len(calls) < len(members) or budget < 0:
            return None, budget
        plans = [self.plan(rank, call.plan) for rank, call in zip(members, calls, strict=True)]
        whole = self._matcher.whole(members, plans, calls)
        joint = (
            _Joint([], []) if whole is None else _Joint(wait_views(whole, calls), flow_views(whole))
        )
        self._joint[key] = joint
        self._num_joint += 1 + len(joint.waits) + len(joint.flows)
        while self._num_joint > _JOINT_ENTRIES:
            _, old = self._joint.popitem(last=False)
            self._num_joint -= 1 + len(old.waits) + len(old.flows)
        return joint, budget


def _call_view(rank: int, call: EndedCall, plan: PlanSummary) -> CallView:
    spans = []
    for span in spans_of_calls(plan, call):
        task = plan.tasks[span.task]
        messages = len(task.sends), len(task.recvs)
        spans.append(SpanView(*span, *messages))  # type: ignore[arg-type]  # a tuple of many types
    return CallView(
        rank=rank, group=call.group, call=call.number, kind=plan.kind, plan=call.plan, spans=spans
    )
