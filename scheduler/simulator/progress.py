"""How far simulated ranks have come: tables of their tasks, and what is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from burst_rt.scheduler.engine import Engine, Event, Issue, Schedule
from burst_rt.scheduler.graph import COMPUTE, Task
from burst_rt.scheduler.simulator.network import Flow, Resource

__all__ = [
    "Happening",
    "Kind",
    "MessageFlow",
    "Rotated",
    "Side",
    "SimulatedRank",
    "TaskFlow",
    "TaskTables",
]  # fmt: skip


@dataclass(frozen=True)
class Rotated:
    """Rank 0's schedule on rank `shift` of a world in which all ranks do the same: its peers are
    rank 0's, `shift` further on, around.

    stands_for: so many consecutive ranks, which do the same at the same time. Only one of them is
    simulated: what they send each other it sends itself. `Hardware.folded` is its machine.
    """

    schedule: Schedule
    shift: int = 0
    stands_for: int = 1


class Kind(IntEnum):
    """The kind of activity that a task spends its time on."""

    WORK = 0
    EXCHANGE = 1
    AGREE = 2
    COPY = 3


_COPIES = ("to host", "to device")


class TaskTables:
    """The simulation's tables of a schedule's tasks; ranks with one schedule share them.

    ordered: its ordered lane, or -1. messages: (outgoing, peer, tag, part, size_bytes), receives
    first, as drivers post them.
    """

    def __init__(
        self, schedule: Schedule, seconds: Callable[[Task], float], stands_for: int = 1
    ) -> None:
        graph = schedule.graph
        lanes = [name for name, lane in graph.lanes.items() if lane.ordered]
        tasks = graph.tasks
        self.schedule = schedule
        self.tasks = tasks
        self.num_ordered = len(lanes)
        self.kind = [_kind(task) for task in tasks]
        self.seconds = [
            seconds(task) if kind is Kind.WORK else 0.0
            for task, kind in zip(tasks, self.kind, strict=True)
        ]
        self.ordered = [lanes.index(task.lane) if task.lane in lanes else -1 for task in tasks]
        self.computes = [task.lane == COMPUTE.name for task in tasks]
        self.to_host = [task.op is not None and task.op.name == "to host" for task in tasks]
        # Messages of a graph that copies to the host are the host's.
        self.staged = Kind.COPY in self.kind
        self.messages: list[list[tuple[bool, int, int, int, int]]] = []
        for task, ordered in zip(tasks, self.ordered, strict=True):
            posted = []
            for outgoing, messages in ((False, task.recvs), (True, task.sends)):
                for m in messages:
                    tag = 0 if ordered >= 0 else m.tag
                    posted.append((outgoing, m.peer // stands_for, tag, m.part, m.size_bytes))
            self.messages.append(posted)


def _kind(task: Task) -> Kind:
    if task.is_exchange:
        return Kind.EXCHANGE
    assert task.op is not None
    return (
        Kind.AGREE
        if task.op.name == "agree"
        else Kind.COPY
        if task.op.name in _COPIES
        else Kind.WORK
    )


class SimulatedRank:
    """One rank: its engine, what is under way, and what it has not heard of yet."""

    __slots__ = (
        "busy_s", "computing_since_s", "end_s", "ended", "engine", "finished", "issued_s",
        "num_agreed", "num_computing", "num_open",
        "number", "plan", "queues", "running", "sent_bytes", "shift", "started_s", "unheard",
    )  # fmt: skip

    def __init__(self, number: int, plan: TaskTables, shift: int, engine: Engine) -> None:
        self.number = number
        self.plan = plan
        self.shift = shift
        self.engine = engine
        self.unheard: list[Event] = []
        self.finished = False
        self.end_s = 0.0
        self.busy_s = 0.0
        self.computing_since_s = 0.0
        self.num_computing = 0
        self.num_agreed = 0
        self.sent_bytes = 0
        # Number of messages that have not moved, by exchange in progress.
        self.num_open: dict[int, int] = {}
        # The tasks that are issued and have not ended, by ordered lane. The first one runs once the
        # tasks it waits for have ended.
        self.queues: list[deque[Issue]] = [deque() for _ in range(plan.num_ordered)]
        self.running = [False] * plan.num_ordered
        self.ended = bytearray(len(plan.tasks)) if plan.num_ordered else bytearray()
        self.issued_s: dict[int, float] = {}
        self.started_s: dict[int, float] = {}


# One side of a message, posted: whether it sends, rank, task, part, bytes.
Side: TypeAlias = "tuple[bool, SimulatedRank, int, int, int]"


class MessageFlow(Flow):
    """A message under way; its two sides."""

    __slots__ = ("recv", "send")

    def __init__(
        self, number: int, resources: tuple[Resource, ...], send: Side, recv: Side
    ) -> None:
        super().__init__(number, (recv[1].number, recv[2]), send[4], resources)
        self.send = send
        self.recv = recv


class TaskFlow(Flow):
    """A task under way that shares something: cores, or the way to the host."""

    __slots__ = ("rank", "task")

    def __init__(
        self,
        number: int,
        amount: float,
        resources: tuple[Resource, ...],
        limit: float,
        rank: SimulatedRank,
        task: int,
    ) -> None:
        super().__init__(number, (rank.number, task), amount, resources, limit)
        self.rank = rank
        self.task = task


# Rank, task, flow's number and version (the four order what happens at one instant), and the flow:
# None where a task ends of itself.
Happening: TypeAlias = "tuple[int, int, int, int, Flow | None]"
