"""The simulator: the real engines of all ranks under one virtual clock.

A simulation is a run without the work: it has the same graphs, policies and engines, and instead of
devices and wires the times that a `Hardware` (or your own function) gives. Rules:

* a task of a free lane starts when it is issued; on an ordered lane one runs at a time, in the
  order they were issued, each once the tasks in `after` have ended;
* a message starts when both sides are posted, takes its path's latency, and then flows over the
  path's resources (`network.py`);
  an exchange has ended when all its messages have. On an ordered lane messages match by order
  alone;
* a control task (operation "agree") ends on all ranks at once: when all have reached it, plus the
  latency of an allreduce;
* where a machine says so, a message also takes its share of the time of its ranks' computing;
* a copy between device and host ("to host", "to device") flows like a message; anything else
  computes.

One input has one result, bit for bit: what happens at one instant happens in the order of ranks and
tasks.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from burst_rt.errors import BurstError, InputError, InternalError
from burst_rt.scheduler.engine import Engine, Finish, Instruction, Issue, Schedule, TaskDone
from burst_rt.scheduler.graph import Task
from burst_rt.scheduler.simulator.hardware import Hardware
from burst_rt.scheduler.simulator.network import Flow, Network, Path, Traffic
from burst_rt.scheduler.simulator.progress import (
    Happening,
    Kind,
    MessageFlow,
    Rotated,
    Side,
    SimulatedRank,
    TaskFlow,
    TaskTables,
)
from burst_rt.scheduler.trace import Span

__all__ = ["Deadlock", "RankTime", "Simulated", "Simulation", "simulate"]


class Deadlock(InternalError):
    """Not every task has ended, and nothing can happen any more."""


@dataclass(frozen=True)
class RankTime:
    """When a rank ended, how long it computed and did not, and what it sent."""

    end_s: float
    busy_s: float
    idle_s: float
    sent_bytes: int


@dataclass(frozen=True)
class Simulated:
    """A simulated run. spans: of each rank its tasks as they ended; empty where none were asked
    for.
    """

    ranks: tuple[RankTime, ...]
    spans: tuple[list[Span], ...]

    @property
    def end_s(self) -> float:
        """Seconds until the last rank ended."""
        return max(rank.end_s for rank in self.ranks)


def simulate(
    schedules: Sequence[Schedule | Rotated],
    hardware: Hardware | None = None,
    *,
    seconds: Callable[[Task], float] | None = None,
    engine: Callable[[Schedule], Engine] = Engine,
    spans: bool = False,
) -> Simulated:
    """Runs `schedules[r]` on rank r, for all ranks, and says how long it took.

    hardware: without one, transfers take no time. seconds: what a computing task takes; without it
    what the hardware's device says, or nothing. engine: makes each rank's engine. spans: keep them
    (one a task, of all ranks). Raises Deadlock, InputError, or what an engine raises.
    """
    simulation = Simulation(schedules, hardware, seconds=seconds, engine=engine, spans=spans)
    simulation.run()
    return simulation.result()


# The path of a message if no hardware is given.
_NO_PATH: Path = (0.0, ())


class Simulation:
    """All ranks and the queue of what happens next. It is a class so that `faults` can override the
    methods `_on_...`.
    """

    def __init__(
        self,
        schedules: Sequence[Schedule | Rotated],
        hardware: Hardware | None,
        *,
        seconds: Callable[[Task], float] | None,
        engine: Callable[[Schedule], Engine],
        spans: bool,
    ) -> None:
        if seconds is None:
            seconds = _no_time if hardware is None else hardware.device.seconds
        self._world_size = len(schedules)
        plans: dict[int, TaskTables] = {}
        self._ranks: list[SimulatedRank] = []
        for number, given in enumerate(schedules):
            turned = given if isinstance(given, Rotated) else Rotated(given)
            schedule, fold = turned.schedule, turned.stands_for
            graph, shift = schedule.graph, turned.shift // fold
            if (
                graph.world_size != len(schedules) * fold
                or (graph.rank // fold + shift) % len(schedules) != number
            ):
                raise InputError(
                    "simulate: expected the schedule of each rank of one world, in order; got at "
                    f"place {number} of {len(schedules)} the schedule of rank {graph.rank} of "
                    f"{graph.world_size}, shifted by {shift} ranks"
                )
            if id(schedule) not in plans:
                plans[id(schedule)] = TaskTables(schedule, seconds, fold)
            self._ranks.append(SimulatedRank(number, plans[id(schedule)], shift, engine(schedule)))
        self._network = None if hardware is None else Network(hardware, len(schedules))
        self._traffic = Traffic()
        self._spans: list[list[Span]] | None = [[] for _ in schedules] if spans else None
        self.now_s = 0.0
        # Happenings at each future instant; the heap holds each instant once.
        self._times: list[float] = []
        self._agenda: dict[float, list[Happening]] = {}
        # Ranks that receive news at this instant.
        self._hearing: list[SimulatedRank] = []
        self._num_flows = 0
        # Sides of messages that wait for the other one, by source, destination and tag.
        self._posted: dict[tuple[int, int, int], deque[Side]] = {}
        self._entered: list[list[tuple[SimulatedRank, int]]] = []

    def run(self) -> None:
        """Runs all ranks to their end. Raises Deadlock."""
        for rank in self._ranks:
            self._on_begin(rank)
        self._settle()
        times, agenda = self._times, self._agenda
        while times:
            self.now_s = heapq.heappop(times)
            batch = agenda.pop(self.now_s)
            if len(batch) > 1:
                batch.sort()
            for happening in batch:
                self._happen(happening)
            if self._hearing:
                self._hear_all()
            if self._traffic.changed:
                self._settle()
        stuck = [rank for rank in self._ranks if not rank.finished and self._should_end(rank)]
        if stuck:
            raise Deadlock("; ".join(self._stuck(rank) for rank in stuck[:4]), rank=stuck[0].number)

    def result(self) -> Simulated:
        """The return value of `simulate`."""
        times = tuple(
            RankTime(rank.end_s, rank.busy_s, rank.end_s - rank.busy_s, rank.sent_bytes)
            for rank in self._ranks
        )
        return Simulated(times, tuple(self._spans or ()))

    def _stuck(self, rank: SimulatedRank) -> str:
        tasks = rank.plan.tasks
        return (
            f"rank {rank.number} never ends tasks "
            f"{[tasks[t].name for t in rank.engine.unfinished()][:4]}"
        )

    # Methods that `faults` overrides.

    def _on_begin(self, rank: SimulatedRank) -> None:
        """The run begins: all ranks enter it at once."""
        self._obey(rank, rank.engine.start())

    def _on_start(self, rank: SimulatedRank, task: int) -> float:
        """The task starts; returns how much longer it takes."""
        return 0.0

    def _on_match(self, send: Side, recv: Side) -> float:
        """Both sides of a message are posted; returns how much later it leaves."""
        return 0.0

    def _on_move(self, send: Side, recv: Side) -> None:
        """The message has arrived."""

    def _on_end(self, rank: SimulatedRank, task: int) -> None:
        """The task has ended."""

    def _on_unheard(self, rank: SimulatedRank) -> None:
        """There is something for the rank to hear."""
        self._hearing.append(rank)

    def _on_abort(self, rank: SimulatedRank, error: BurstError) -> None:
        """The rank's engine gives up."""
        raise error

    def _should_end(self, rank: SimulatedRank) -> bool:
        """Whether it is a defect that the rank has not finished."""
        return True

    # Happenings.

    def _at(self, time_s: float, happening: Happening) -> None:
        batch = self._agenda.get(time_s)
        if batch is None:
            self._agenda[time_s] = [happening]
            heapq.heappush(self._times, time_s)
        else:
            batch.append(happening)

    def _happen(self, happening: Happening) -> None:
        number, task, _, version, flow = happening
        if flow is None:
            self._end(self._ranks[number], task)
        elif version != flow.version:
            return  # its rate has changed since
        elif not version and flow.resources:
            flow.since_s = self.now_s
            self._traffic.join(flow)
        else:
            self._traffic.leave(flow)
            self._arrive(flow)

    def _settle(self) -> None:
        now_s = self.now_s
        for flow in self._traffic.settle(now_s):
            number, task = flow.owner
            self._at(now_s + flow.left / flow.rate, (number, task, flow.number, flow.version, flow))

    def _hear_all(self) -> None:
        hearing, self._hearing = self._hearing, []
        if len(hearing) > 1:
            hearing.sort(key=_number)
        for rank in hearing:
            self._hear(rank)

    def _hear(self, rank: SimulatedRank) -> None:
        """The rank hears of all that has ended so far."""
        events, rank.unheard = rank.unheard, []
        if len(events) > 1:
            events.sort()
        self._obey(rank, rank.engine.handle(events))

    def _obey(self, rank: SimulatedRank, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Issue):
                task = instruction.task
                if self._spans is not None:
                    rank.issued_s[task] = self.now_s
                lane = rank.plan.ordered[task]
                if lane < 0:
                    self._start(rank, task)
                else:
                    rank.queues[lane].append(instruction)
                    if not rank.running[lane]:
                        self._try_first(rank, lane)
            elif isinstance(instruction, Finish):
                rank.finished = True
                rank.end_s = self.now_s
            else:
                self._on_abort(rank, instruction.error)

    def _try_first(self, rank: SimulatedRank, lane: int) -> None:
        """Starts the first task of a lane on which none runs, if all it waits for has ended."""
        task, after = rank.queues[lane][0]
        for other in after:
            if not rank.ended[other]:
                return
        rank.running[lane] = True
        self._start(rank, task)

    def _start(self, rank: SimulatedRank, task: int) -> None:
        plan = rank.plan
        more_s = self._on_start(rank, task)
        if self._spans is not None:
            rank.started_s[task] = self.now_s
        if plan.computes[task]:
            if not rank.num_computing:
                rank.computing_since_s = self.now_s
            rank.num_computing += 1
        kind = plan.kind[task]
        if kind is Kind.EXCHANGE:
            messages = plan.messages[task]
            rank.num_open[task] = len(messages)
            for outgoing, peer, tag, part, size in messages:
                self._post(
                    (outgoing, rank, task, part, size), (peer + rank.shift) % self._world_size, tag
                )
        elif kind is Kind.AGREE:
            self._enter(rank, task)
        elif self._network is not None and kind is Kind.COPY:
            latency_s, resources = self._network.to_or_from_host(rank.number, plan.to_host[task])
            size = plan.tasks[task].cost.size_bytes
            self._launch(
                TaskFlow(self._next_flow(), size, resources, float("inf"), rank, task),
                latency_s + more_s,
            )
        else:
            cores = None if self._network is None else self._network.cores(rank.number)
            if cores is None:
                self._at(self.now_s + plan.seconds[task] + more_s, (rank.number, task, 0, 0, None))
            else:
                self._launch(
                    TaskFlow(self._next_flow(), plan.seconds[task], (cores,), 1.0, rank, task),
                    more_s,
                )

    def _enter(self, rank: SimulatedRank, task: int) -> None:
        """The rank comes to its next control task; the last one to come lets all go on."""
        if rank.num_agreed == len(self._entered):
            self._entered.append([])
        entered = self._entered[rank.num_agreed]
        rank.num_agreed += 1
        entered.append((rank, task))
        if len(entered) == self._world_size:
            when_s = self.now_s + (0.0 if self._network is None else self._network.agree_s)
            for one, its in entered:
                self._at(when_s, (one.number, its, 0, 0, None))

    def _post(self, side: Side, peer: int, tag: int) -> None:
        outgoing, rank = side[0], side[1].number
        key = (rank, peer, tag) if outgoing else (peer, rank, tag)
        waiting = self._posted.get(key)
        if waiting is None:
            self._posted[key] = deque((side,))
        elif waiting[0][0] == outgoing:
            waiting.append(side)
        else:
            other = waiting.popleft()
            if not waiting:
                del self._posted[key]
            self._match(side, other) if outgoing else self._match(other, side)

    def _match(self, send: Side, recv: Side) -> None:
        more_s = self._on_match(send, recv)
        if self._network is None:
            latency_s, resources = _NO_PATH
        else:
            latency_s, resources = self._network.between(
                send[1].number, recv[1].number, send[1].plan.staged
            )
        self._launch(MessageFlow(self._next_flow(), resources, send, recv), latency_s + more_s)
        if self._network is not None and self._network.working:
            work_s = self._network.work_byte_s(send[1].number, recv[1].number) * send[4]
            for _, rank, task, _, _ in (send, recv) if work_s else ():
                cores = self._network.cores(rank.number)
                assert cores is not None
                work = Flow(self._next_flow(), (rank.number, task), work_s, (cores,), 1.0)
                self._launch(work, latency_s + more_s)

    def _next_flow(self) -> int:
        self._num_flows += 1
        return self._num_flows

    def _launch(self, flow: Flow, latency_s: float) -> None:
        """Lets a flow join the others `latency_s` from now; one without resources arrives then."""
        if latency_s or not flow.resources:
            number, task = flow.owner
            self._at(self.now_s + latency_s, (number, task, flow.number, 0, flow))
        else:
            flow.since_s = self.now_s
            self._traffic.join(flow)

    def _arrive(self, flow: Flow) -> None:
        if isinstance(flow, TaskFlow):
            self._end(flow.rank, flow.task)
        if not isinstance(flow, MessageFlow):
            return
        self._on_move(flow.send, flow.recv)
        flow.send[1].sent_bytes += flow.send[4]
        for _, rank, task, _, _ in (flow.send, flow.recv):
            left = rank.num_open[task] - 1
            if left:
                rank.num_open[task] = left
            else:
                del rank.num_open[task]
                self._end(rank, task)

    def _end(self, rank: SimulatedRank, task: int) -> None:
        plan = rank.plan
        if plan.computes[task]:
            rank.num_computing -= 1
            if not rank.num_computing:
                rank.busy_s += self.now_s - rank.computing_since_s
        self._on_end(rank, task)
        if self._spans is not None:
            self._spans[rank.number].append(
                Span.of(
                    plan.tasks[task],
                    issued_s=rank.issued_s.pop(task),
                    started_s=rank.started_s.pop(task),
                    ended_s=self.now_s,
                )
            )
        if not rank.unheard:
            self._on_unheard(rank)
        rank.unheard.append(TaskDone(task))
        if plan.num_ordered:
            rank.ended[task] = 1
            lane = plan.ordered[task]
            if lane >= 0:
                rank.queues[lane].popleft()
                rank.running[lane] = False
            for lane, queue in enumerate(rank.queues):
                if queue and not rank.running[lane]:
                    self._try_first(rank, lane)


def _number(rank: SimulatedRank) -> int:
    return rank.number


def _no_time(task: Task) -> float:
    return 0.0
