"""A context's calls as telemetry sees them: what it is doing now, counts that miss nothing, and
spans for whoever looks.

The calling thread only notes that a call began and ended (a few microseconds); the agent's thread
makes messages of it later. Where it cannot keep up, spans are dropped and counted, counts are not.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from burst_rt.scheduler import Graph, Schedule, Task, overlap
from burst_rt.telemetry.messages import (
    Call,
    Candidate,
    Counters,
    Group,
    LaneCounters,
    Plan,
    TaskInfo,
)

if TYPE_CHECKING:
    from burst_rt.drivers import BaseDriver

__all__ = ["NOTHING", "CallLog", "Described", "Doing", "Totals"]

# Calls whose spans wait for the agent.
_MAX_WAITING = 256
# Before those are looked through whose plans are no more.
_MAX_KNOWN = 256
_PACK = struct.Struct("<Ifff").pack  # timeline.SPAN


class Described(NamedTuple):
    """What a `Plan` says beside its tasks; see there."""

    kind: str
    explain: str
    predicted_s: float | None = None
    problem: str = ""
    strategy: str = ""
    candidates: tuple[Candidate, ...] = ()


class Doing(NamedTuple):
    """What a context is doing: the fields of a `Heartbeat` that say so."""

    call: int
    doing: str
    since_s: float
    hop: int


# Outside any call.
NOTHING = Doing(-1, "", 0.0, -1)


def _hop_number(task: Task) -> int:
    """A task's hop as messages say it."""
    return -1 if task.hop is None else task.hop


class _Known:
    """A schedule that has run: what one run of it counts."""

    def __init__(self, number: int, schedule: Schedule) -> None:
        self.number = number
        self.alive = weakref.ref(schedule)
        self.calls = 0
        self.lanes: dict[str, tuple[int, int, int]] = {}
        for task in schedule.graph.tasks:
            num, size, flops = self.lanes.get(task.lane, (0, 0, 0))
            self.lanes[task.lane] = (num + 1, size + task.cost.size_bytes, flops + task.cost.flops)

    def add_to(self, lanes: dict[str, LaneCounters]) -> None:
        """Adds all its runs."""
        calls = self.calls
        for name, (num, size, flops) in self.lanes.items():
            lane = lanes.get(name, LaneCounters(0, 0, 0))
            lanes[name] = LaneCounters(
                lane.tasks + calls * num, lane.size_bytes + calls * size, lane.flops + calls * flops
            )


class _Ended(NamedTuple):
    """A call whose spans wait to be sent; `describe` for a plan that has not been sent yet."""

    number: int
    known: _Known
    graph: Graph
    driver: BaseDriver
    started_s: float
    ended_s: float
    # Of its computing time and its waiting: a device knows better when it has ended.
    counted_s: float
    waited_s: float
    describe: Callable[[], Described]


class Totals:
    """Counts of a rank over all its contexts."""

    def __init__(self) -> None:
        self.calls = 0
        self.traced_calls = 0
        self.compute_s = 0.0
        self.wait_s = 0.0
        self.total_s = 0.0
        self.transfer_s = 0.0
        self.overlap_s = 0.0
        self.num_known = 0
        self._known: list[_Known] = []
        self._gone: dict[str, LaneCounters] = {}  # of plans that are no more

    def add(self, schedule: Schedule) -> _Known:
        """A schedule that runs for the first time."""
        known = _Known(self.num_known, schedule)
        self.num_known += 1
        self._known.append(known)
        return known

    def message(self, dropped: int) -> Counters:
        """As they are now."""
        for known in [known for known in self._known if known.alive() is None]:
            self._known.remove(known)
            known.add_to(self._gone)
        lanes = dict(self._gone)
        for known in list(self._known):
            known.add_to(lanes)
        return Counters(
            time.perf_counter(), self.calls, self.traced_calls, self.compute_s, self.wait_s,
            self.total_s, self.transfer_s, self.overlap_s,
            lanes, dropped,
        )  # fmt: skip


class CallLog:
    """The calls of one context. `began`, `ended` and `abandoned` are for the thread that calls, the
    rest for the agent's.
    """

    def __init__(self, group: Group, totals: Totals) -> None:
        self.group = group
        self.totals = totals
        self.num_dropped = 0
        self.closed = False
        self.current: tuple[int, BaseDriver] | None = None
        self._started_s = 0.0
        self._stopped = False
        self._known: dict[int, _Known] = {}
        self._waiting: deque[_Ended] = deque()
        self._described: set[int] = set()

    def began(self, number: int, driver: BaseDriver) -> None:
        """A call begins."""
        self._started_s = time.perf_counter()
        self.current = (number, driver)

    def abandoned(self) -> None:
        """The call that began does not take place: the ranks disagree."""
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
        totals = self.totals
        known.calls += 1
        totals.calls += 1
        totals.compute_s += driver.compute_s
        totals.wait_s += driver.wait_s
        totals.total_s += now_s - self._started_s
        if self._stopped:
            return
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append(
                _Ended(
                    number,
                    known,
                    schedule.graph,
                    driver,
                    self._started_s,
                    now_s,
                    driver.compute_s,
                    driver.wait_s,
                    describe,
                )
            )
        else:
            self.num_dropped += 1

    def stop(self) -> None:
        """Nobody listens any more: keeps nothing."""
        self._stopped = True
        self._waiting.clear()

    def doing(self) -> Doing:
        """What the context is doing now."""
        current = self.current
        if current is None:
            return NOTHING
        number, driver = current
        found = driver.doing()
        if found is None:
            return Doing(number, "", self._started_s, -1)
        task, since_s = found
        return Doing(number, task.name, since_s, _hop_number(task))

    def take(self) -> list[Plan | Call]:
        """One call that has ended, with its plan if that is new; none: nothing has, or a device has
        yet to end it.
        """
        if not self._waiting or not self._waiting[0].driver.settled():
            return []
        ended = self._waiting.popleft()
        messages: list[Plan | Call] = []
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

    def _plan(self, ended: _Ended) -> Plan:
        graph = ended.graph
        lanes = graph.lanes
        tasks = [
            TaskInfo(
                task.name, task.lane, task.op.name if task.op else "exchange", _hop_number(task),
                task.cost.size_bytes, task.cost.flops,
                lanes[task.lane].ordered, [(m.peer, m.tag, m.size_bytes) for m in task.sends],
                [(m.peer, m.tag, m.size_bytes) for m in task.recvs],
            )
            for task in graph.tasks
        ]  # fmt: skip
        told = ended.describe()
        return Plan(
            ended.known.number, self.group.name, told.kind, tasks, told.explain, told.predicted_s,
            told.problem, told.strategy,
            list(told.candidates),
        )  # fmt: skip

    def _call(self, ended: _Ended) -> Call:
        trace = list(ended.driver.trace)
        start = ended.started_s
        transfer_s, hidden_s = overlap(trace)
        totals = self.totals
        totals.traced_calls += 1
        totals.compute_s += ended.driver.compute_s - ended.counted_s
        totals.wait_s += ended.driver.wait_s - ended.waited_s
        totals.transfer_s += transfer_s
        totals.overlap_s += hidden_s
        spans = b"".join(
            [
                _PACK(s.task, s.issued_s - start, s.started_s - start, s.ended_s - start)
                for s in trace
            ]
        )
        return Call(
            self.group.name,
            ended.number,
            ended.known.number,
            start,
            ended.ended_s,
            ended.driver.compute_s,
            ended.driver.wait_s,
            spans,
        )
