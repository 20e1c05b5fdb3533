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
from typing import TYPE_CHECKING, NamedTuple

import msgspec

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

if TYPE_CHECKING:
    from burst_rt.drivers import BaseDriver

__all__ = ["NOTHING", "CallLog", "Described", "Doing", "Totals"]

# Maximum number of calls whose spans wait for the agent.
_MAX_WAITING = 256
# Number of schedules that a log knows before it forgets the deleted ones.
_MAX_KNOWN = 256
_PACK = struct.Struct("<Ifff").pack  # timeline.SPAN


@dataclass(frozen=True, kw_only=True)
class Described:
    """The fields of a `PlanSummary` besides its tasks; see there."""

    kind: str
    explain: str
    predicted_s: float | None = None
    problem: str = ""
    strategy: str = ""
    candidates: tuple[Candidate, ...] = ()


class Doing(NamedTuple):
    """The activity of a context: the fields of a `Heartbeat` that tell it."""

    call: int
    doing: str
    since_s: float
    hop: int


# The activity outside any call.
NOTHING = Doing(-1, "", 0.0, -1)


def _hop_number(task: Task) -> int:
    """A task's hop as messages say it."""
    return -1 if task.hop is None else task.hop


class _Known:
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
class _Ended:
    """A call whose spans wait to be sent."""

    number: int
    known: _Known
    graph: Graph
    driver: BaseDriver
    started_s: float
    ended_s: float
    # The computing and the waiting that have been counted. On a device both are known only later,
    # when the call has ended there too; the rest is counted then.
    counted_s: float
    waited_s: float
    describe: Callable[[], Described]  # for a plan that has not been sent yet


class Totals:
    """The counts of a rank over all its contexts."""

    def __init__(self) -> None:
        self.counts = Counters()  # except for time, lanes and dropped messages: `message` adds them
        self.num_known = 0
        self._known: list[_Known] = []
        self._gone: dict[str, LaneCounters] = {}  # counters of deleted plans

    def add(self, schedule: Schedule) -> _Known:
        """A schedule that runs for the first time."""
        known = _Known(self.num_known, schedule)
        self.num_known += 1
        self._known.append(known)
        return known

    def message(self, dropped: int) -> Counters:
        """The counts as they are now. dropped: messages that found no room so far."""
        for known in [known for known in self._known if known.alive() is None]:
            self._known.remove(known)
            known.add_to(self._gone)
        lanes = dict(self._gone)
        for known in list(self._known):
            known.add_to(lanes)
        return msgspec.structs.replace(
            self.counts, at_s=time.perf_counter(), lanes=lanes, dropped=dropped
        )


class CallLog:
    """The calls of one context, as whoever performs them tells. `began`, `ended`, `abandoned`,
    `agreed` and `left` are for the thread that calls, the rest is for the agent's. when_left:
    called by `left`.
    """

    def __init__(
        self, group: Group, totals: Totals, when_left: Callable[[int], None] | None = None
    ) -> None:
        self.group = group
        self._when_left = when_left
        self.totals = totals
        self.num_dropped = 0
        self.closed = False
        self.current: tuple[int, BaseDriver] | None = None
        self._started_s = 0.0
        self._stopped = False
        self._known: dict[int, _Known] = {}
        self._waiting: deque[_Ended | Agreed] = deque()
        self._described: set[int] = set()

    def began(self, number: int, driver: BaseDriver) -> None:
        """A call begins."""
        self._started_s = time.perf_counter()
        self.current = (number, driver)

    def abandoned(self) -> None:
        """The call that began does not take place, because the ranks disagree."""
        self.current = None

    def ended(
        self, schedule: Schedule, driver: BaseDriver, describe: Callable[[], Described]
    ) -> None:
        """The call that began has ended well."""
        assert self.current is not None
        (number, _), self.current = self.current, None
        now_s = time.perf_counter()
        known = self._known.get(id(schedule))
        if known is None or known.alive() is not schedule:
            known = self._first_run(schedule)
        known.calls += 1
        counts = self.totals.counts
        counts.calls += 1
        counts.compute_s += driver.compute_s
        counts.wait_s += driver.wait_s
        counts.total_s += now_s - self._started_s
        if self._stopped:
            return
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(
                _Ended(
                    number=number,
                    known=known,
                    graph=schedule.graph,
                    driver=driver,
                    started_s=self._started_s,
                    ended_s=now_s,
                    counted_s=driver.compute_s,
                    waited_s=driver.wait_s,
                    describe=describe,
                )
            )
        else:
            self.num_dropped += 1

    def agreed(self, number: int, entered_s: float) -> None:
        """The ranks have agreed in a call that runs no schedule."""
        now_s = time.perf_counter()
        self.totals.counts.total_s += now_s - entered_s
        if self._stopped:
            return
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(Agreed(self.group.name, number, entered_s, now_s))
        else:
            self.num_dropped += 1

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

    def doing(self) -> Doing:
        """The present activity of the context."""
        current = self.current
        if current is None:
            return NOTHING
        number, driver = current
        found = driver.doing()
        if found is None:
            return Doing(number, "", self._started_s, -1)
        task, since_s = found
        return Doing(number, task.name, since_s, _hop_number(task))

    def take(self) -> list[PlanSummary | EndedCall | Agreed]:
        """Takes one ended call, after its plan if the plan is new. Nothing where no call has ended,
        or where a device has yet to end it.
        """
        if not self._waiting:
            return []
        ended = self._waiting[0]
        if isinstance(ended, Agreed):
            self._waiting.popleft()
            return [ended]
        if not ended.driver.settled():
            return []
        self._waiting.popleft()
        messages: list[PlanSummary | EndedCall | Agreed] = []
        if ended.known.number not in self._described:
            self._described.add(ended.known.number)
            messages.append(self._plan(ended))
        messages.append(self._call(ended))
        return messages

    def _first_run(self, schedule: Schedule) -> _Known:
        if len(self._known) >= _MAX_KNOWN:
            self._known = {
                key: known for key, known in self._known.items() if known.alive() is not None
            }
        known = self._known[id(schedule)] = self.totals.add(schedule)
        return known

    def _plan(self, ended: _Ended) -> PlanSummary:
        graph = ended.graph
        tasks = [_task_info(task, graph.lanes[task.lane]) for task in graph.tasks]
        told = ended.describe()
        return PlanSummary(
            number=ended.known.number,
            group=self.group.name,
            kind=told.kind,
            tasks=tasks,
            explain=told.explain,
            predicted_s=told.predicted_s,
            problem=told.problem,
            strategy=told.strategy,
            candidates=list(told.candidates),
        )

    def _call(self, ended: _Ended) -> EndedCall:
        trace = list(ended.driver.trace)
        start = ended.started_s
        transfer_s, hidden_s = overlap(trace)
        counts = self.totals.counts
        counts.traced_calls += 1
        counts.compute_s += ended.driver.compute_s - ended.counted_s
        counts.wait_s += ended.driver.wait_s - ended.waited_s
        counts.transfer_s += transfer_s
        counts.overlap_s += hidden_s
        spans = b"".join(
            [
                _PACK(s.task, s.issued_s - start, s.started_s - start, s.ended_s - start)
                for s in trace
            ]
        )
        return EndedCall(
            group=self.group.name,
            number=ended.number,
            plan=ended.known.number,
            started_s=start,
            ended_s=ended.ended_s,
            compute_s=ended.driver.compute_s,
            wait_s=ended.driver.wait_s,
            spans=spans,
        )


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
