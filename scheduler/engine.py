"""The engine: a state machine that decides what may be issued; `Schedule` is made of a graph once.

It has no I/O, no clock, no thread and no tensor.

Events go in (past tense), instructions come out (imperative). Whoever holds the engine performs the
instructions and reports what happened; `loop.run` does so. One table lists the legal transitions
of a task; an impossible transition raises `InternalError` with the task's own story.

The lanes of u and v (see `Lane`) decide when an edge u -> v is satisfied:

* u and v are on one ordered lane: once u is issued;
* u and v are on two ordered lanes of one device: once u is issued; v is then issued with
  `after=(u,)`, by which the driver makes v's lane wait for u's event;
* in all other cases: once u is done.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, TypeAlias

from burst_rt.errors import BurstError, InternalError, PeerLost
from burst_rt.scheduler.graph import CONTROL, Graph, Lane
from burst_rt.scheduler.policy import Policy, critical_path

__all__ = [
    "TRANSITIONS",
    "Abort",
    "Batches",
    "Engine",
    "Event",
    "Finish",
    "Instruction",
    "Issue",
    "PeerGone",
    "Schedule",
    "TaskDone",
    "TaskFailed",
    "TaskState",
]


class TaskState(IntEnum):
    """The state of a task in a run."""

    WAITING = 0  # an edge into it is not satisfied
    READY = 1  # all edges into it are satisfied; its lane is full or has a better task
    ISSUED = 2  # handed to the driver
    DONE = 3
    FAILED = 4
    ABANDONED = 5  # the run was aborted


TRANSITIONS: dict[tuple[TaskState, str], TaskState] = {
    (TaskState.WAITING, "satisfied"): TaskState.READY,
    (TaskState.READY, "issued"): TaskState.ISSUED,
    (TaskState.ISSUED, "done"): TaskState.DONE,
    (TaskState.ISSUED, "failed"): TaskState.FAILED,
    (TaskState.WAITING, "abandoned"): TaskState.ABANDONED,
    (TaskState.READY, "abandoned"): TaskState.ABANDONED,
    (TaskState.ISSUED, "abandoned"): TaskState.ABANDONED,
}
_VERBS = sorted({verb for _, verb in TRANSITIONS})
_NUM_VERBS = len(_VERBS)
# The same table, arranged for the engine's look-ups: verb and old state give the new state and the
# verb's number in the log, or None where the transition is impossible.
_STEPS: dict[str, list[tuple[TaskState, int] | None]] = {
    verb: [None] * len(TaskState) for verb in _VERBS
}
for (_old, _verb), _new in TRANSITIONS.items():
    _STEPS[_verb][_old] = _new, _VERBS.index(_verb)


class TaskDone(NamedTuple):
    """The task has ended and its results can be read."""

    task: int


class TaskFailed(NamedTuple):
    """The task raised `error`."""

    task: int
    error: BurstError


class PeerGone(NamedTuple):
    """A rank has left or died. A task that still waits for that rank never ends."""

    peer: int
    reason: str


class Issue(NamedTuple):
    """Start the task. Its lane waits for the events of the tasks in `after` first."""

    task: int
    after: tuple[int, ...]


class Finish(NamedTuple):
    """Every task is done."""


class Abort(NamedTuple):
    """Stop: nothing further is issued. Whoever runs the engine raises `error`."""

    error: BurstError


Event: TypeAlias = "TaskDone | TaskFailed | PeerGone"
Instruction: TypeAlias = "Issue | Finish | Abort"


# Tasks in the order they are issued, each with the tasks whose events its lane waits for.
_Issues: TypeAlias = "list[tuple[int, tuple[int, ...]]]"
Batches: TypeAlias = "tuple[_Issues, _Issues]"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A graph and all that engines derive from it. It is derived once, and many engines (calls) run
    from one schedule. Every list but `limits` and `programs` has an entry for each task.
    """

    graph: Graph
    place: list[int]  # where the policy puts the task
    task_at: list[int]  # the inverse: the task at each place
    num_before: list[int]  # number of edges that lead to the task
    on_issue: list[list[int]]  # successors whose edge is satisfied once the task is issued
    on_done: list[list[int]]  # successors whose edge is satisfied once the task is done
    after: list[tuple[int, ...]]  # predecessors on other ordered lanes of the task's device
    lane_of: list[int]  # number of the task's lane, in the order of `graph.lanes`
    # For each lane: how many of its tasks may be under way, and its tasks where it is issued in
    # program order, else None.
    limits: list[int]
    programs: list[list[int] | None]
    # Where each task waits until the task before it is done, and nothing is left to decide: for
    # each task what a driver says at its end. None elsewhere.
    line: list[list[Event]] | None

    @cached_property
    def batches(self) -> Batches | None:
        """What an engine issues first, and what it issues once all of that is done: all the rest.

        So it is where tasks wait for each other on their streams, and the host for the agreement
        alone. None elsewhere. Waits that follow from earlier ones are left out: a lane that has
        waited for a task has waited for all tasks that its lane was given before.
        """
        tasks, lanes = self.graph.tasks, self.graph.lanes
        for node, awaited in zip(tasks, self.on_done, strict=True):
            lane = lanes[node.lane]
            if lane.max_in_flight is not None or (
                lane != CONTROL and (awaited or not lane.ordered)
            ):
                return None
        engine = Engine(self)
        first = _issues(engine.start())
        rest = _issues(engine.handle(TaskDone(task) for task, _ in first))
        if len(first) + len(rest) != len(tasks):
            return None
        needed = self._needed_waits([*first, *rest])
        return needed[: len(first)], needed[len(first) :]

    def _needed_waits(self, issues: _Issues) -> _Issues:
        """The same without waits that follow from earlier ones."""
        place = {task: number for number, (task, _) in enumerate(issues)}
        waited: dict[tuple[int, int], int] = {}  # by lane and lane waited for: up to which place
        fewer = []
        for task, after in issues:
            needed = []
            for other in sorted(after, key=place.__getitem__, reverse=True):
                between = self.lane_of[task], self.lane_of[other]
                if place[other] > waited.get(between, -1):
                    waited[between] = place[other]
                    needed.append(other)
            fewer.append((task, tuple(needed)))
        return fewer

    @classmethod
    def of(cls, graph: Graph, policy: Policy = critical_path) -> Schedule:
        """Derives the schedule. `policy` must return a permutation of the task ids."""
        place = policy(graph)
        num_tasks = len(graph.tasks)
        if sorted(place) != list(range(num_tasks)):
            raise InternalError(
                f"policy {policy!r} did not return a permutation of {num_tasks} tasks"
            )
        names = list(graph.lanes)
        lanes = list(graph.lanes.values())
        lane_of = [names.index(task.lane) for task in graph.tasks]
        on_issue, on_done, after = _edges(graph)
        num_before = [len(before) for before in graph.predecessors]
        task_at = sorted(range(num_tasks), key=place.__getitem__)
        is_line = all(task in on_done[task - 1] for task in range(1, num_tasks))
        programs: list[list[int] | None] = [[] if lane.in_program_order else None for lane in lanes]
        for task, lane_index in enumerate(lane_of):
            program = programs[lane_index]
            if program is not None:
                program.append(task)
        return cls(
            graph=graph,
            place=place,
            task_at=task_at,
            num_before=num_before,
            on_issue=on_issue,
            on_done=on_done,
            after=[tuple(tasks) for tasks in after],
            lane_of=lane_of,
            limits=[
                num_tasks + 1 if lane.max_in_flight is None else lane.max_in_flight
                for lane in lanes
            ],
            programs=programs,
            line=[[TaskDone(task)] for task in range(num_tasks)] if is_line else None,
        )


def _issues(instructions: Iterable[Instruction]) -> _Issues:
    return [(each.task, each.after) for each in instructions if isinstance(each, Issue)]


_Tasks: TypeAlias = list[list[int]]  # for each task, other tasks


def _edges(graph: Graph) -> tuple[_Tasks, _Tasks, _Tasks]:
    """For each task: the tasks that may follow when it is issued, and when it is done, and its
    predecessors on other ordered lanes of its device.
    """
    tasks, lanes = graph.tasks, graph.lanes
    on_issue: _Tasks = [[] for _ in tasks]
    on_done: _Tasks = [[] for _ in tasks]
    after: _Tasks = [[] for _ in tasks]
    for v, before in enumerate(graph.predecessors):
        for u in before:
            first, second = lanes[tasks[u].lane], lanes[tasks[v].lane]
            if _passes_at(first, second) is TaskState.DONE:
                on_done[u].append(v)
                continue
            on_issue[u].append(v)
            if first is not second:
                after[v].append(u)
    return on_issue, on_done, after


def _passes_at(first: Lane, second: Lane) -> TaskState:
    """The state that a task on `first` must have reached before a task on `second` that depends on
    it may be issued.
    """
    same_device = first.device is not None and first.device == second.device
    return (
        TaskState.ISSUED
        if first.ordered and second.ordered and (first is second or same_device)
        else TaskState.DONE
    )


class Engine:
    """One run of a schedule: call `start()` once, then `handle(events)` until it returns `Finish`
    or `Abort`.

    validate: every step checks the engine's invariants, which is slow and only for tests.
    """

    def __init__(self, schedule: Schedule, *, validate: bool = False) -> None:
        graph = schedule.graph
        self.schedule = schedule
        self.state: list[TaskState] = [TaskState.WAITING] * len(graph.tasks)
        self._missing = list(schedule.num_before)
        num_lanes = len(graph.lanes)
        self._in_flight = [0] * num_lanes
        # For each lane a heap: of places in the policy's order, or of task ids where the lane is
        # issued in program order.
        self._ready: list[list[int]] = [[] for _ in range(num_lanes)]
        # For each lane that is issued in program order: how many tasks have been issued.
        self._issued_of = [0] * num_lanes
        self._num_left = len(graph.tasks)
        # Every transition as one number, task * _NUM_VERBS + verb, because a world of a thousand
        # ranks makes millions of transitions.
        self._log = array("q")
        self._started = False
        self._ended = False
        self._validate = validate

    def start(self) -> list[Instruction]:
        """Returns the first instructions: they issue the tasks that wait for nothing."""
        if self._started:
            raise InternalError("Engine.start was called twice; an engine runs its schedule once")
        self._started = True
        for task, missing in enumerate(self._missing):
            if not missing:
                self._make_ready(task)
        return self._issue()

    def handle(self, events: Iterable[Event]) -> list[Instruction]:
        """Takes what happened and returns what to do next. An empty list means: wait for more
        events.
        """
        if not self._started or self._ended:
            raise InternalError("Engine.handle was called before start or after the run had ended")
        for event in events:
            if isinstance(event, PeerGone):
                lost = PeerLost(
                    f"rank {event.peer} was lost: {event.reason}",
                    rank=self.schedule.graph.rank,
                    peer=event.peer,
                )
                return self._abort(lost)
            if not 0 <= event.task < len(self.state):
                raise InternalError(
                    f"{event} names no task of this graph: task ids are 0 to {len(self.state) - 1}"
                )
            if isinstance(event, TaskFailed):
                self._move(event.task, "failed")
                return self._abort(event.error)
            self._done(event.task)
        return self._issue()

    def story(self, task: int) -> str:
        """The history of a task so far, for an error message."""
        node = self.schedule.graph.tasks[task]
        steps = [
            f"step {i}: {_VERBS[entry % _NUM_VERBS]}"
            for i, entry in enumerate(self._log)
            if entry // _NUM_VERBS == task
        ]
        before = [f"{p} ({self.state[p].name})" for p in self.schedule.graph.predecessors[task]]
        return (
            f"task {task} {node.name!r} on lane {node.lane!r} is {self.state[task].name}; "
            f"[{'; '.join(steps)}]; waits for {before}"
        )

    def unfinished(self) -> list[int]:
        """Ids of the tasks that are issued and not done, ascending."""
        return [t for t, state in enumerate(self.state) if state is TaskState.ISSUED]

    def _move(self, task: int, verb: str) -> None:
        step = _STEPS[verb][self.state[task]]
        if step is None:
            node = self.schedule.graph.tasks[task]
            raise InternalError(
                f"impossible transition {verb!r}: {self.story(task)}", task=node.name, hop=node.hop
            )
        self.state[task], number = step
        self._log.append(task * _NUM_VERBS + number)

    def _make_ready(self, task: int) -> None:
        self._move(task, "satisfied")
        lane = self.schedule.lane_of[task]
        heapq.heappush(
            self._ready[lane],
            self.schedule.place[task] if self.schedule.programs[lane] is None else task,
        )

    def _satisfy(self, tasks: Iterable[int]) -> None:
        missing = self._missing
        for task in tasks:
            missing[task] -= 1
            if not missing[task]:
                self._make_ready(task)

    def _done(self, task: int) -> None:
        self._move(task, "done")
        self._in_flight[self.schedule.lane_of[task]] -= 1
        self._num_left -= 1
        self._satisfy(self.schedule.on_done[task])

    def _issue(self) -> list[Instruction]:
        out: list[Instruction] = []
        in_flight, limit, on_issue, after = (
            self._in_flight,
            self.schedule.limits,
            self.schedule.on_issue,
            self.schedule.after,
        )
        progressed = True
        while progressed:
            # Issuing on one ordered lane can make tasks of another ready, hence the outer loop.
            progressed = False
            for lane, ready in enumerate(self._ready):
                while ready and in_flight[lane] < limit[lane]:
                    task = self._take(lane)
                    if task is None:
                        break
                    self._move(task, "issued")
                    in_flight[lane] += 1
                    out.append(Issue(task, after[task]))
                    if on_issue[task]:
                        self._satisfy(on_issue[task])
                        progressed = True
        if not self._num_left:
            self._ended = True
            out.append(Finish())
        if self._validate:
            self._check()
        return out

    def _take(self, lane: int) -> int | None:
        ready = self._ready[lane]
        program = self.schedule.programs[lane]
        if program is None:
            return self.schedule.task_at[heapq.heappop(ready)]
        if ready[0] != program[self._issued_of[lane]]:
            return None
        self._issued_of[lane] += 1
        return heapq.heappop(ready)

    def _abort(self, error: BurstError) -> list[Instruction]:
        for task, state in enumerate(self.state):
            if (state, "abandoned") in TRANSITIONS:
                self._move(task, "abandoned")
        self._ended = True
        return [Abort(error)]

    def _check(self) -> None:
        graph = self.schedule.graph
        running = [0] * len(self._in_flight)
        lanes = [graph.lanes[task.lane] for task in graph.tasks]
        for task, state in enumerate(self.state):
            if state is TaskState.ISSUED:
                running[self.schedule.lane_of[task]] += 1
            if state >= TaskState.ISSUED and any(
                self.state[p] < _passes_at(lanes[p], lanes[task]) for p in graph.predecessors[task]
            ):
                raise InternalError(
                    f"a task was issued before its edges were satisfied: {self.story(task)}"
                )
        if running != self._in_flight or any(
            n > limit for n, limit in zip(running, self.schedule.limits, strict=True)
        ):
            raise InternalError(
                f"lane counts are wrong: counted {running}, kept {self._in_flight}, limits "
                f"{self.schedule.limits}"
            )
        if not self._ended and not any(running) and self._num_left:
            raise InternalError("nothing is running and tasks are left: the graph cannot end")
