"""A context's calls as telemetry sees them: the present call, counts, and spans for viewers.

The counts miss nothing.

The calling thread only notes that a call began and ended, which takes a few microseconds; the
agent's thread makes messages of the call later. Where that thread cannot keep up, spans are dropped
and the loss is counted; counts are never dropped.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from burst_rt.drivers import BaseDriver
from burst_rt.runtime.observer import Description, Subject
from burst_rt.scheduler import Graph, Lane, Message, Schedule, Task, overlap
from burst_rt.telemetry.messages import (
    Agreed,
    Candidate,
    Counters,
    EndedCall,
    Group,
    LaneCounters,
    MessageInfo,
    PlanSummary,
    TaskInfo,
)

__all__ = ["NOTHING", "Activity", "CallLog", "Totals"]

# Maximum number of calls whose spans wait for the agent.
_MAX_WAITING = 256
# Number of schedules that a log knows before it forgets the deleted ones.
_MAX_KNOWN = 256
_PACK = struct.Struct("<Ifff").pack  # timeline.SPAN
_PIPELINE = Description(kind="pipeline", explain="custom task graph")


class Activity(NamedTuple):
    """The activity of a context: the fields of a `Heartbeat` that tell it."""

    call: int
    doing: str
    since_s: float
    hop: int


# The activity outside any call.
NOTHING = Activity(-1, "", 0.0, -1)


def _hop_number(task: Task) -> int:
    """A task's hop as messages say it."""
    return -1 if task.hop is None else task.hop


class _Plan:
    """A schedule that has run, and what one run of it counts on each lane."""

    def __init__(self, number: int, schedule: Schedule) -> None:
        self.number = number
        self.alive = weakref.ref(schedule)
        self.calls = 0
        self.lanes: dict[str, tuple[int, int, int]] = {}
        for task in schedule.graph.tasks:
            num, size, flops = self.lanes.get(task.lane, (0, 0, 0))
            self.lanes[task.lane] = (num + 1, size + task.cost.size_bytes, flops + task.cost.flops)

    def add_to(self, lanes: dict[str, LaneCounters]) -> None:
        """Adds what all runs of the schedule have counted."""
        calls = self.calls
        for name, (num, size, flops) in self.lanes.items():
            lane = lanes.get(name, LaneCounters(0, 0, 0))
            lanes[name] = LaneCounters(
                lane.tasks + calls * num, lane.size_bytes + calls * size, lane.flops + calls * flops
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """A call that has ended, whose spans wait to be sent."""

    number: int
    plan: _Plan
    graph: Graph
    subject: Subject | None
    driver: BaseDriver
    started_s: float
    ended_s: float
    in_step: bool
    after_gap: bool  # whether the rank's call before this one was dropped


class Totals:
    """The counts of a rank over all its contexts."""

    def __init__(self) -> None:
        self.counts = Counters()  # except for time, lanes and dropped messages: `message` adds them
        # Time in calls that ran a graph; `Counters.total_s` is of those that only agree, too. Not
        # of calls on a device, whose times are known only later.
        self.graph_s = 0.0
        self.in_step = False
        self.gap = False  # whether calls were dropped since the last that was kept
        self._num_later = 0
        self._later_s = [0.0, 0.0, 0.0]  # calls on a device: computing, waiting, all
        self.num_plans = 0
        self._plans: list[_Plan] = []
        self._deleted: dict[str, LaneCounters] = {}  # counters of deleted plans

    def add(self, schedule: Schedule) -> _Plan:
        """A schedule that runs for the first time."""
        plan = _Plan(self.num_plans, schedule)
        self.num_plans += 1
        self._plans.append(plan)
        return plan

    def count_times(
        self, compute_s: float, wait_s: float, total_s: float, *, in_step: bool
    ) -> None:
        """A call on a device has ended there: its times."""
        self._num_later += 1
        for i, took_s in enumerate((compute_s, wait_s, total_s)):
            self._later_s[i] += took_s
        self._add_times(compute_s, wait_s, total_s, in_step)

    def guess_times(self, *, in_step: bool) -> None:
        """A call on a device was dropped: it counts as the mean of the others."""
        compute_s, wait_s, total_s = (all_s / max(1, self._num_later) for all_s in self._later_s)
        self._add_times(compute_s, wait_s, total_s, in_step)

    def _add_times(self, compute_s: float, wait_s: float, total_s: float, in_step: bool) -> None:
        counts = self.counts
        counts.compute_s += compute_s
        counts.wait_s += wait_s
        counts.total_s += total_s
        if in_step:
            counts.step_call_s += total_s

    def message(self, dropped: int) -> Counters:
        """The counts as they are now. dropped: messages that found no room so far."""
        for plan in [plan for plan in self._plans if plan.alive() is None]:
            self._plans.remove(plan)
            plan.add_to(self._deleted)
        lanes = dict(self._deleted)
        for plan in list(self._plans):
            plan.add_to(lanes)
        return msgspec.structs.replace(
            self.counts, at_s=time.perf_counter(), lanes=lanes, dropped=dropped
        )


class CallLog:
    """The calls of one context: an `Observer` of its runtime. The methods of an observer are for
    the thread that calls, the rest is for the agent's. when_left: called by `left`. when_planned:
    called by `planned`. enter: called in the agent's thread, once, before it asks for a device's
    events (`Device.enter_to_watch`).
    """

    def __init__(
        self, group: Group, totals: Totals, when_left: Callable[[int], None] | None = None,
        when_planned: Callable[[float], None] = lambda started_s: None,
        enter: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.group = group
        self._enter: Callable[[], None] | None = enter
        self._when_left = when_left
        self.planned = when_planned
        self.totals = totals
        self.num_dropped = 0
        self.closed = False
        self.current: tuple[int, BaseDriver] | None = None
        self._started_s = 0.0
        self._stopped = False
        self._plans: dict[int, _Plan] = {}
        self._waiting: deque[_Call | Agreed] = deque()
        self._described: set[int] = set()  # numbers of the plans that have been sent

    def began(self, number: int, driver: BaseDriver) -> None:
        """A call begins."""
        self._started_s = time.perf_counter()
        self.current = (number, driver)

    def abandoned(self) -> None:
        """The call that began does not take place, because the ranks disagree."""
        self.current = None

    def ended(self, schedule: Schedule, driver: BaseDriver, subject: Subject | None) -> None:
        """The call that began has ended well."""
        assert self.current is not None
        (number, _), self.current = self.current, None
        now_s = time.perf_counter()
        plan = self._plans.get(id(schedule))
        if plan is None or plan.alive() is not schedule:
            plan = self._first_run(schedule)
        plan.calls += 1
        totals, took_s = self.totals, now_s - self._started_s
        totals.counts.calls += 1
        if not driver.ends_later:
            totals.counts.compute_s += driver.compute_s
            totals.counts.wait_s += driver.wait_s
            totals.counts.total_s += took_s
            totals.graph_s += took_s
        self._keep(
            _Call(
                number=number, plan=plan, graph=schedule.graph, subject=subject, driver=driver,
                started_s=self._started_s, ended_s=now_s, in_step=totals.in_step,
                after_gap=totals.gap,
            )
        )  # fmt: skip

    def agreed(self, number: int, entered_s: float) -> None:
        """The ranks have agreed in a call that runs no schedule."""
        now_s = time.perf_counter()
        self.totals.counts.total_s += now_s - entered_s
        self.totals.counts.wait_s += now_s - entered_s
        self._keep(Agreed(self.group.name, number, entered_s, now_s, self.totals.gap))

    def _keep(self, call: _Call | Agreed) -> None:
        if self._stopped:
            return
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(call)
            self.totals.gap = False
        else:
            self._drop(call)

    def _drop(self, call: _Call | Agreed) -> None:
        self.num_dropped += 1
        self.totals.gap = True
        if isinstance(call, _Call) and call.driver.ends_later:
            self.totals.guess_times(in_step=call.in_step)

    def left(self, code: int) -> None:
        """The context is closed; what the log still holds is sent. code: the exit code of a rank
        that ends with its context.
        """
        self.closed = True
        if self._when_left is not None:
            self._when_left(code)

    def stop(self) -> None:
        """Nobody listens any more: keeps nothing from here on."""
        self._stopped = True
        self._waiting.clear()

    @property
    def is_empty(self) -> bool:
        """Whether no ended call waits to be taken."""
        return not self._waiting

    def give_up(self) -> None:
        """Counts as dropped the calls that still wait: their device does not end them in time."""
        while self._waiting:
            self._drop(self._waiting.popleft())

    def doing(self) -> Activity:
        """The present activity of the context."""
        current = self.current
        if current is None:
            return NOTHING
        number, driver = current
        activity = driver.doing()
        if activity is None:
            return Activity(number, "", self._started_s, -1)
        task, since_s = activity
        return Activity(number, task.name, since_s, _hop_number(task))

    def take(self) -> list[PlanSummary | EndedCall | Agreed]:
        """Takes one ended call, after its plan if the plan is new. Nothing where no call has ended,
        or where a device has yet to end it.
        """
        if not self._waiting:
            return []
        call = self._waiting[0]
        try:
            if self._enter is not None:
                self._enter()
                self._enter = None
            if isinstance(call, _Call) and not call.driver.settled():
                return []
        except RuntimeError:  # a device that has failed ends nothing; the rank's own call says why
            self.give_up()
            return []
        self._waiting.popleft()
        if isinstance(call, Agreed):
            return [call]
        messages: list[PlanSummary | EndedCall | Agreed] = [self._ended_call(call)]
        if call.plan.number not in self._described:
            self._described.add(call.plan.number)
            messages.insert(0, self._plan_summary(call))
        return messages

    def _first_run(self, schedule: Schedule) -> _Plan:
        if len(self._plans) >= _MAX_KNOWN:
            alive = (item for item in self._plans.items() if item[1].alive() is not None)
            self._plans = dict(alive)
        plan = self._plans[id(schedule)] = self.totals.add(schedule)
        return plan

    def _plan_summary(self, call: _Call) -> PlanSummary:
        graph = call.graph
        tasks = [_task_info(task, graph.lanes[task.lane]) for task in graph.tasks]
        description = call.subject.describe() if call.subject is not None else _PIPELINE
        candidates = [Candidate(*candidate) for candidate in description.candidates]
        words = vars(description) | {"candidates": candidates}
        return PlanSummary(number=call.plan.number, group=self.group.name, tasks=tasks, **words)

    def _ended_call(self, call: _Call) -> EndedCall:
        driver, start, end = call.driver, call.started_s, call.ended_s
        trace = list(driver.trace)
        transfer_s, hidden_s = overlap(trace)
        counts = self.totals.counts
        counts.traced_calls += 1
        if driver.ends_later:
            # The host may be several calls ahead: a call begins and ends when its device does.
            start = max(start, driver.entered_s)
            end = max([start, *(span.ended_s for span in trace)]) if trace else max(start, end)
            self.totals.count_times(
                driver.compute_s, driver.wait_s, end - start, in_step=call.in_step
            )
        counts.transfer_s += transfer_s
        counts.overlap_s += hidden_s
        spans = (
            _PACK(s.task, s.issued_s - start, s.started_s - start, s.ended_s - start) for s in trace
        )
        return EndedCall(
            group=self.group.name, number=call.number, plan=call.plan.number,
            started_s=start, ended_s=end, after_gap=call.after_gap,
            compute_s=driver.compute_s, wait_s=driver.wait_s, spans=b"".join(spans),
        )  # fmt: skip


def _task_info(task: Task, lane: Lane) -> TaskInfo:
    return TaskInfo(
        name=task.name,
        lane=task.lane,
        op=task.op.name if task.op else "exchange",
        hop=_hop_number(task),
        size_bytes=task.cost.size_bytes,
        flops=task.cost.flops,
        ordered=lane.ordered,
        sends=_messages(task.sends),
        recvs=_messages(task.recvs),
    )


def _messages(of: Iterable[Message]) -> list[MessageInfo]:
    return [(m.peer, m.tag, m.size_bytes) for m in of]
