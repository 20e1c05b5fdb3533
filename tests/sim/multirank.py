"""Several ranks' schedules in one process: real engines, and a driver that lets tasks end in an order drawn from a seed.

No clock: whatever can happen (a task ends, a message moves, a rank hears of what has ended) draws a number when it becomes possible,
and the smallest goes next. So any order that hardware could show has its chance, and tasks that outlast all others are common. Messages
move by rendezvous, each on its own. A free lane runs all that was issued at once; an ordered one runs its tasks one after another in the
order they were issued, and matches messages by their order alone. Payloads are integers that every task mixes up in a way that depends on
the order, so a result tells whether each value was made from the right ones.

A task that starts while another one under way uses its parts is a `BusyPart`: nothing here, but only the schedule, keeps them apart.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from burst_rt.scheduler import Engine, Event, Finish, Graph, Instruction, Issue, Schedule, Task, TaskDone

__all__ = ["BusyPart", "Deadlock", "EmptyPart", "Values", "reference", "simulate"]

# What each part of each rank holds; None: nothing that may be used.
Values = list[list[int | None]]

_MASK = (1 << 61) - 1


class BusyPart(AssertionError):
    """A task started that changes a part in use, or uses a part that is being changed."""


class EmptyPart(AssertionError):
    """A task uses a part that holds nothing yet."""


class Deadlock(AssertionError):
    """Not every task has ended, and nothing can happen any more."""


def reference(graphs: Sequence[Graph]) -> Values:
    """What all parts hold once every rank has performed its tasks one by one in program order."""
    values = _initial(graphs)
    mail: dict[tuple[int, int, int], deque[int | None]] = defaultdict(deque)

    def program(graph: Graph) -> Iterator[None]:
        own = values[graph.rank]
        for task in graph.tasks:
            for m in task.sends:
                mail[graph.rank, m.peer, m.tag].append(own[m.part])
            for m in task.recvs:
                while not mail[m.peer, graph.rank, m.tag]:
                    yield
                own[m.part] = mail[m.peer, graph.rank, m.tag].popleft()
            if not task.is_exchange:
                _compute(graph.rank, task, own)

    running = [program(graph) for graph in graphs]
    for _ in range(1 + sum(len(graph.tasks) for graph in graphs)):
        running = [p for p in running if next(p, StopIteration) is not StopIteration]
    assert not running, "the programs wait for each other"
    return values


def simulate(schedules: Sequence[Schedule], seed: int, *, validate: bool = False) -> Values:
    """Runs all ranks to their end in the order that `seed` gives; returns what all parts hold then.

    Raises BusyPart, EmptyPart, Deadlock, or whatever an engine raises.
    """
    return _Simulation(schedules, random.Random(seed), validate=validate).run()


def _mix(value: int, other: int) -> int:
    return (value * 6364136223846793005 + other * 1442695040888963407 + 1) & _MASK


def _known(value: int | None) -> int:
    if value is None:
        raise EmptyPart
    return value


def _initial(graphs: Sequence[Graph]) -> Values:
    return [[_mix(graph.rank, part.id) if part.initialised else None for part in graph.parts] for graph in graphs]


def _compute(rank: int, task: Task, values: list[int | None]) -> None:
    """What every computing task does: its own number and all it reads go into what it changes."""
    result = _mix(rank, task.id)
    for part in task.reads:
        result = _mix(result, _known(values[part]))
    for part in task.writes:
        values[part] = _mix(result, part)
    for part in task.accumulates:
        values[part] = _mix(_known(values[part]), result)


class _Side(NamedTuple):
    """One side of a message, posted: which rank's exchange it belongs to, and the part it moves."""

    rank: _Rank
    task: Task
    part: int


class _Rank:
    """One rank's engine, memory and lanes."""

    def __init__(self, schedule: Schedule, values: list[int | None], *, validate: bool) -> None:
        graph = schedule.graph
        self.number = graph.rank
        self.tasks = graph.tasks
        self.engine = Engine(schedule, validate=validate)
        self.values = values
        self.num_users = [0] * len(graph.parts)
        self.changing = [False] * len(graph.parts)
        self.num_open = [len(task.sends) + len(task.recvs) for task in graph.tasks]
        self.ended = [False] * len(graph.tasks)
        self.unheard: list[Event] = []
        self.finished = False
        # Of each ordered lane the tasks issued and not ended; the first one runs once it has seen the events it waits for.
        self.queues: dict[str, deque[tuple[Task, tuple[int, ...]]]] = {name: deque() for name, lane in graph.lanes.items() if lane.ordered}
        self.running: set[str] = set()

    def claim(self, task: Task) -> None:
        """The task starts: from now on it uses what it reads, and what it changes belongs to it alone."""
        changed = (*task.writes, *task.accumulates)
        for part in changed:
            if self.num_users[part] or self.changing[part]:
                raise BusyPart(f"rank {self.number}: {task.name!r} changes part {part}, which a task under way uses")
        for part in task.reads:
            if self.changing[part]:
                raise BusyPart(f"rank {self.number}: {task.name!r} uses part {part}, which a task under way changes")
            self.num_users[part] += 1
        for part in changed:
            self.changing[part] = True
        if task.is_exchange:
            for part in task.writes:
                self.values[part] = None

    def release(self, task: Task) -> None:
        """The task has ended."""
        for part in task.reads:
            self.num_users[part] -= 1
        for part in (*task.writes, *task.accumulates):
            self.changing[part] = False


class _Simulation:
    """All ranks, and the list of what could happen next."""

    def __init__(self, schedules: Sequence[Schedule], rng: random.Random, *, validate: bool) -> None:
        self._draw = rng.random
        values = _initial([schedule.graph for schedule in schedules])
        self._ranks = [_Rank(schedule, own, validate=validate) for schedule, own in zip(schedules, values, strict=True)]
        # A heap; the second number only keeps functions from being compared.
        self._possible: list[tuple[float, int, Callable[[], None]]] = []
        self._num_possible = 0
        # Sends (True) and receives that wait for their other side, by source, destination and tag.
        self._posted: dict[tuple[bool, int, int, int], deque[_Side]] = defaultdict(deque)

    def run(self) -> Values:
        for rank in self._ranks:
            self._obey(rank, rank.engine.start())
        while self._possible:
            heapq.heappop(self._possible)[-1]()
        stuck = [
            f"rank {rank.number}: {[rank.tasks[t].name for t in rank.engine.unfinished()]}" for rank in self._ranks if not rank.finished
        ]
        if stuck:
            raise Deadlock("; ".join(stuck))
        return [rank.values for rank in self._ranks]

    def _may(self, happen: Callable[[], None]) -> None:
        self._num_possible += 1
        heapq.heappush(self._possible, (self._draw(), self._num_possible, happen))

    def _hear(self, rank: _Rank) -> None:
        """The rank hears of all that has ended so far."""
        events, rank.unheard = rank.unheard, []
        self._obey(rank, rank.engine.handle(events))

    def _obey(self, rank: _Rank, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Issue):
                task = rank.tasks[instruction.task]
                if task.lane in rank.queues:
                    rank.queues[task.lane].append((task, instruction.after))
                    self._try_first(rank, task.lane)
                else:
                    self._start(rank, task)
            else:
                assert isinstance(instruction, Finish), instruction
                rank.finished = True

    def _try_first(self, rank: _Rank, lane: str) -> None:
        queue = rank.queues[lane]
        if queue and lane not in rank.running and all(rank.ended[t] for t in queue[0][1]):
            rank.running.add(lane)
            self._start(rank, queue[0][0])

    def _start(self, rank: _Rank, task: Task) -> None:
        rank.claim(task)
        if not task.is_exchange:
            self._may(partial(self._compute, rank, task))
        by_order_alone = task.lane in rank.queues
        for m in task.recvs:
            self._post(False, m.peer, rank.number, 0 if by_order_alone else m.tag, _Side(rank, task, m.part))
        for m in task.sends:
            self._post(True, rank.number, m.peer, 0 if by_order_alone else m.tag, _Side(rank, task, m.part))

    def _post(self, outgoing: bool, source: int, destination: int, tag: int, side: _Side) -> None:
        waiting = self._posted[not outgoing, source, destination, tag]
        if waiting:
            other = waiting.popleft()
            self._may(partial(self._move, side, other) if outgoing else partial(self._move, other, side))
        else:
            self._posted[outgoing, source, destination, tag].append(side)

    def _compute(self, rank: _Rank, task: Task) -> None:
        _compute(rank.number, task, rank.values)
        self._end(rank, task)

    def _move(self, send: _Side, recv: _Side) -> None:
        recv.rank.values[recv.part] = _known(send.rank.values[send.part])
        for rank, task, _ in (send, recv):
            rank.num_open[task.id] -= 1
            if not rank.num_open[task.id]:
                self._end(rank, task)

    def _end(self, rank: _Rank, task: Task) -> None:
        rank.release(task)
        rank.ended[task.id] = True
        if not rank.unheard:
            self._may(partial(self._hear, rank))
        rank.unheard.append(TaskDone(task.id))
        if task.lane in rank.queues:
            rank.queues[task.lane].popleft()
            rank.running.remove(task.lane)
        for lane in rank.queues:
            self._try_first(rank, lane)
