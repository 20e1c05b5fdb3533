"""Integers in place of tensors: they show whether each value of a run was made from the right ones.

Every computing task mixes its own number and all it reads into what it changes, in a way that
depends on the order; a message carries a part as it is, and what several messages of one exchange
bring to a part is added up. `reference` is what program order gives; a run whose parts hold
anything else has done something wrong. A task that starts while another under way uses its parts is
a `BusyPart`: nothing in a simulated run, but only the schedule, keeps the two apart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from burst_rt.errors import InternalError
from burst_rt.scheduler.graph import Graph, Task

__all__ = ["BusyPart", "EmptyPart", "Memory", "Values", "reference"]

# The contents of each part of each rank; None: nothing that may be used.
Values: TypeAlias = "list[list[int | None]]"

_MASK = (1 << 61) - 1


class BusyPart(InternalError):
    """A task started that changes a part in use, or uses a part that is being changed."""


class EmptyPart(InternalError):
    """A task uses a part that holds nothing yet."""


class Memory:
    """The parts of one rank: what each holds, and which tasks under way use it."""

    def __init__(self, graph: Graph) -> None:
        self._rank = graph.rank
        self._parts = graph.parts
        self.values = [
            _mix(graph.rank, part.id) if part.initialised else None for part in graph.parts
        ]
        self._num_users = [0] * len(graph.parts)
        self._changing = [False] * len(graph.parts)

    def claim(self, task: Task) -> None:
        """The task starts: from now on it uses what it reads, and what it changes belongs to it
        alone. Raises BusyPart.
        """
        changed = (*task.writes, *task.accumulates)
        for part in changed:
            if self._num_users[part] or self._changing[part]:
                raise self._busy(task, part, "changes", "uses")
        for part in task.reads:
            if self._changing[part]:
                raise self._busy(task, part, "uses", "changes")
            self._num_users[part] += 1
        for part in changed:
            self._changing[part] = True
        if task.is_exchange:
            self.clear(task)

    def clear(self, task: Task) -> None:
        """The parts that an exchange receives into hold nothing until messages arrive."""
        for part in task.writes:
            self.values[part] = None

    def receive(self, part: int, value: int) -> None:
        """A message arrives."""
        self.values[part] = (value + (self.values[part] or 0)) & _MASK

    def release(self, task: Task) -> None:
        """The task has ended."""
        for part in task.reads:
            self._num_users[part] -= 1
        for part in (*task.writes, *task.accumulates):
            self._changing[part] = False

    def compute(self, task: Task) -> None:
        """Does what every computing task does. Raises EmptyPart."""
        result = _mix(self._rank, task.id)
        for part in task.reads:
            result = _mix(result, self.value(part))
        for part in task.writes:
            self.values[part] = _mix(result, part)
        for part in task.accumulates:
            self.values[part] = _mix(self.value(part), result)

    def value(self, part: int) -> int:
        """The number that a part holds. Raises EmptyPart."""
        value = self.values[part]
        if value is None:
            raise EmptyPart(
                f"rank {self._rank}: {self._parts[part].name} is used before it was written",
                rank=self._rank,
            )
        return value

    def _busy(self, task: Task, part: int, does: str, meets: str) -> BusyPart:
        return BusyPart(
            f"rank {self._rank}: {task.name!r} {does} {self._parts[part].name}, which a task "
            f"under way {meets}",
            rank=self._rank,
            task=task.name,
            hop=task.hop,
        )


def reference(graphs: Sequence[Graph]) -> Values:
    """The contents of all parts once every rank has performed its tasks one by one in program
    order. Raises InternalError if they cannot.
    """
    memories = [Memory(graph) for graph in graphs]
    mail: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)

    def program(graph: Graph) -> Iterator[None]:
        own = memories[graph.rank]
        for task in graph.tasks:
            for m in task.sends:
                mail[graph.rank, m.peer, m.tag].append(own.value(m.part))
            if task.is_exchange:
                own.clear(task)
            for m in task.recvs:
                while not mail[m.peer, graph.rank, m.tag]:
                    yield
                own.receive(m.part, mail[m.peer, graph.rank, m.tag].popleft())
            if not task.is_exchange:
                own.compute(task)

    running = [program(graph) for graph in graphs]
    for _ in range(1 + sum(len(graph.tasks) for graph in graphs)):
        running = [p for p in running if next(p, StopIteration) is not StopIteration]
    if running:
        raise InternalError("in program order the ranks wait for each other for ever")
    return [memory.values for memory in memories]


def _mix(value: int, other: int) -> int:
    return (value * 6364136223846793005 + other * 1442695040888963407 + 1) & _MASK
