"""Simulated runs with delays, stalled ranks and lost ranks, from a seed.

`rehearse` runs real engines on integers in place of tensors (`simulated_memory.py`). Every task,
message and piece of news takes as long as the seed says, spread over powers of ten, so that any
order that hardware could show has its chance and tasks that outlast all others are common. In
addition, a rank may stall for a time or for ever, or be lost. The rules by which other ranks learn
of it are the drivers' rules:

* a rank that is lost, or gives up, is gone; the others learn it a while later, and take it for
  `PeerLost` once they wait for that rank (or for the agreement that opens a call);
* a rank that has waited `stall_s` without any rank computing or anything of its own moving gives up
  with `Stalled` (`timeout_s` for the agreement).

However it goes, every run ends, and each rank that is still there has its right result or one of
these two errors: `verdict` says so. A rank that needs nothing more of a lost one may well finish.
A seed always gives the same run, bit for bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulated_memory import Memory, Values

from burst_rt.errors import BurstError, PeerLost, Stalled
from burst_rt.scheduler.engine import Engine, Event, PeerGone, Schedule, TaskFailed
from burst_rt.scheduler.simulator.hardware import Hardware
from burst_rt.scheduler.simulator.progress import Happening, Kind, MessageFlow, Side, SimulatedRank
from burst_rt.scheduler.simulator.simulate import Simulation
from burst_rt.scheduler.trace import Span

__all__ = ["Faults", "Loss", "Rehearsal", "Stall", "rehearse", "verdict"]

_NEVER_S = float("inf")
# Delays lie between 10 ** _SHORTEST and 10 ** (_SHORTEST + _DECADES) seconds.
_SHORTEST = -5.0
_DECADES = 6.0
# Factor by which one kind of event is quicker than the others in some runs.
_QUICKER = 1e-3
# Far above the sum of a run's delays: a rank that waits this long waits for something that never
# comes.
_STALL_S = 1e6
_TIMEOUT_S = 1e7


@dataclass(frozen=True)
class Stall:
    """From at_s on, for for_s (infinite: for ever), nothing ends on the rank, it issues nothing and
    none of its messages moves.
    """

    rank: int
    at_s: float
    for_s: float


@dataclass(frozen=True)
class Loss:
    """The loss of a rank at time `at_s`."""

    rank: int
    at_s: float


@dataclass(frozen=True)
class Faults:
    """The faults of a run. seed: all delays are drawn from it. Without deadlines (infinite ones) a
    run may end in Deadlock.
    """

    seed: int
    stalls: tuple[Stall, ...] = ()
    losses: tuple[Loss, ...] = ()
    stall_s: float = _NEVER_S
    timeout_s: float = _NEVER_S

    @classmethod
    def draw(cls, seed: int, world_size: int) -> Faults:
        """Faults for a world: always delays; in half of the cases one or two ranks also stall or
        are lost.
        """
        rng = random.Random(seed)
        stalls, losses = [], []
        for _ in range(rng.choice((0, 0, 1, 2))):
            # The fault happens at the very start, or somewhere in the run.
            rank, at_s = (
                rng.randrange(world_size),
                rng.choice((_delay_s(rng), rng.uniform(0.0, 10.0))),
            )
            if rng.random() < 0.5:
                losses.append(Loss(rank, at_s))
            else:
                stalls.append(
                    Stall(rank, at_s, rng.choice((_delay_s(rng), 3 * _STALL_S, _NEVER_S)))
                )
        return cls(seed, tuple(stalls), tuple(losses), _STALL_S, _TIMEOUT_S)

    @property
    def harmless(self) -> bool:
        """Whether all ranks have to finish all the same."""
        return not self.losses and sum(stall.for_s for stall in self.stalls) < self.stall_s

    def gone(self) -> set[int]:
        """Ranks of which nothing is to be expected: lost, or stalled for ever."""
        stalled = {stall.rank for stall in self.stalls if stall.for_s == _NEVER_S}
        return stalled.union(loss.rank for loss in self.losses)


@dataclass(frozen=True)
class Rehearsal:
    """The outcome of a run: the contents of all parts, the ranks that finished, the errors of the
    others (None: none), the tasks that ended.
    """

    values: Values
    finished: tuple[bool, ...]
    errors: tuple[BurstError | None, ...]
    spans: tuple[list[Span], ...]


def rehearse(
    schedules: Sequence[Schedule],
    faults: Faults,
    hardware: Hardware | None = None,
    *,
    engine: Callable[[Schedule], Engine] = Engine,
    spans: bool = False,
) -> Rehearsal:
    """Runs `schedules[r]` on rank r under the faults; delays come on top of the hardware's times.
    Raises Deadlock, BusyPart, EmptyPart.

    engine: makes each rank's engine. spans: keep them.
    """
    run = _Run(schedules, faults, hardware, engine, spans=spans)
    run.run()
    return run.rehearsal()


def verdict(rehearsal: Rehearsal, faults: Faults, expected: Values) -> str:
    """The faults in the way a run ended; empty if there are none. `expected` is the graphs'
    `reference`.
    """
    gone = faults.gone()
    for rank, (values, finished, error) in enumerate(
        zip(rehearsal.values, rehearsal.finished, rehearsal.errors, strict=True)
    ):
        if finished and values != expected[rank]:
            wrong = [
                part
                for part, (value, right) in enumerate(zip(values, expected[rank], strict=True))
                if value != right
            ]
            return f"rank {rank} finished with wrong values in parts {wrong}"
        if not finished and faults.harmless:
            return f"rank {rank} did not finish, although no fault was harmful: {error}"
        if not finished and rank not in gone and not isinstance(error, PeerLost | Stalled):
            return f"rank {rank} neither finished nor raised PeerLost or Stalled: {error!r}"
    return ""


# The queue holds other events than ends of tasks, too. They have these numbers instead of a task's:
# a rank enters the run, hears what has ended, checks whether it has waited too long, is lost, and
# learns that another one is gone.
_ENTER, _HEAR, _LOOK, _LOSE, _LEARN = -1, -2, -3, -4, -5


class _Run(Simulation):
    """One rehearsal."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        faults: Faults,
        hardware: Hardware | None,
        engine: Callable[[Schedule], Engine],
        *,
        spans: bool,
    ) -> None:
        super().__init__(schedules, hardware, seconds=None, engine=engine, spans=spans)
        self._rng = random.Random(faults.seed)
        # In some runs nearly all messages are quicker than any work, in others the news of them, or
        # the other way round.
        self._work, self._message, self._news = (
            self._rng.choice((1.0, _QUICKER)) for _ in range(3)
        )
        self._faults = faults
        self._never_back = faults.gone()
        self._memory = [Memory(schedule.graph) for schedule in schedules]
        self._errors: list[BurstError | None] = [None] * len(schedules)
        self._gone: dict[int, str] = {}  # rank -> why
        self._knows_gone: list[set[int]] = [set() for _ in schedules]
        self._num_working = [0] * len(schedules)
        self._agreeing: list[int | None] = [None] * len(schedules)
        self._heard_s = [0.0] * len(schedules)
        self._worked_s = 0.0
        for loss in faults.losses:
            self._at(loss.at_s, (loss.rank, _LOSE, 0, 0, None))

    def rehearsal(self) -> Rehearsal:
        """The outcome of the run."""
        values = [memory.values for memory in self._memory]
        return Rehearsal(
            values,
            tuple(rank.finished for rank in self._ranks),
            tuple(self._errors),
            self.result().spans,
        )

    def _should_end(self, rank: SimulatedRank) -> bool:
        return rank.number not in self._gone and rank.number not in self._never_back

    def _on_begin(self, rank: SimulatedRank) -> None:
        self._at(_delay_s(self._rng, self._news), (rank.number, _ENTER, 0, 0, None))

    def _on_start(self, rank: SimulatedRank, task: int) -> float:
        number, node = rank.number, rank.plan.tasks[task]
        self._memory[number].claim(node)
        kind = rank.plan.kind[task]
        if kind is Kind.EXCHANGE or kind is Kind.AGREE:
            if kind is Kind.AGREE:
                self._agreeing[number] = task
            # A rank takes the losses that it already knows for PeerLost only once it waits.
            for other in sorted(self._knows_gone[number]):
                self._at(self.now_s, (number, _LEARN, other, 0, None))
            return 0.0
        self._num_working[number] += 1
        return _delay_s(self._rng, self._work)

    def _on_match(self, send: Side, recv: Side) -> float:
        return _delay_s(self._rng, self._message)

    def _on_move(self, send: Side, recv: Side) -> None:
        self._memory[recv[1].number].receive(recv[3], self._memory[send[1].number].value(send[3]))

    def _on_end(self, rank: SimulatedRank, task: int) -> None:
        memory, node = self._memory[rank.number], rank.plan.tasks[task]
        kind = rank.plan.kind[task]
        if kind is not Kind.EXCHANGE:
            memory.compute(node)
        memory.release(node)
        if kind is Kind.AGREE:
            self._agreeing[rank.number] = None
        elif kind is not Kind.EXCHANGE:
            self._num_working[rank.number] -= 1
            self._worked_s = self.now_s

    def _on_unheard(self, rank: SimulatedRank) -> None:
        self._at(self.now_s + _delay_s(self._rng, self._news), (rank.number, _HEAR, 0, 0, None))

    def _on_abort(self, rank: SimulatedRank, error: BurstError) -> None:
        self._errors[rank.number] = error
        self._leave(rank.number, "it gave up")

    def _happen(self, happening: Happening) -> None:
        number, task, third, _, _ = happening
        if task == _LOSE:
            if number not in self._gone and not self._ranks[number].finished:
                self._leave(number, "it was lost")
        elif (self._gone or self._faults.stalls) and self._held(happening):
            return
        elif task >= 0:
            super()._happen(happening)
        elif task == _HEAR:
            self._hear(self._ranks[number])
        elif task == _ENTER:
            self._look_later(number, self.now_s + self._faults.stall_s)
            self._obey(self._ranks[number], self._ranks[number].engine.start())
        elif task == _LOOK:
            self._look(self._ranks[number])
        else:
            self._learn(self._ranks[number], third)

    def _held(self, happening: Happening) -> bool:
        """Whether a rank that takes part in it is gone or stalled; if so, it happens later or
        never.
        """
        *_, version, flow = happening
        ranks = (
            (flow.send[1].number, flow.recv[1].number)
            if isinstance(flow, MessageFlow)
            else (happening[0],)
        )
        if any(rank in self._gone for rank in ranks):
            if flow is not None and version and version == flow.version:
                self._traffic.leave(flow)
            return True
        until_s = max(map(self._stalled_until_s, ranks))
        if self.now_s < until_s < _NEVER_S:
            self._at(until_s, happening)
        return until_s > self.now_s

    def _hear(self, rank: SimulatedRank) -> None:
        events, rank.unheard = rank.unheard, []
        self._rng.shuffle(events)
        self._heard_s[rank.number] = self.now_s
        self._obey(rank, rank.engine.handle(events))

    def _stalled_until_s(self, number: int) -> float:
        now_s = self.now_s
        ends = [
            stall.at_s + stall.for_s
            for stall in self._faults.stalls
            if stall.rank == number and stall.at_s <= now_s
        ]
        return max((end_s for end_s in ends if now_s < end_s), default=0.0)

    def _leave(self, number: int, why: str) -> None:
        self._gone[number] = why
        for rank in self._ranks:
            if rank.number != number and not rank.finished and rank.number not in self._gone:
                self._at(self.now_s + _delay_s(self._rng), (rank.number, _LEARN, number, 0, None))

    def _learn(self, rank: SimulatedRank, gone: int) -> None:
        if rank.finished:
            return
        self._knows_gone[rank.number].add(gone)
        waits_for = {
            m.peer
            for task in rank.num_open
            for m in (*rank.plan.tasks[task].sends, *rank.plan.tasks[task].recvs)
        }
        if self._agreeing[rank.number] is not None or gone in waits_for:
            self._tell(rank, PeerGone(gone, self._gone[gone]))

    def _look(self, rank: SimulatedRank) -> None:
        """Gives up if the rank has waited too long; else looks again when that could be."""
        number, agreeing = rank.number, self._agreeing[rank.number]
        if rank.finished:
            return
        waits_for = agreeing if agreeing is not None else min(rank.num_open, default=None)
        if self._num_working[number] or rank.unheard:
            self._look_later(number, self.now_s + self._faults.stall_s)
        elif waits_for is not None:
            limit_s = self._faults.stall_s if agreeing is None else self._faults.timeout_s
            working = any(
                n and one not in self._gone and self._stalled_until_s(one) <= self.now_s
                for one, n in enumerate(self._num_working)
            )
            due_s = limit_s + (
                self.now_s if working else max(self._heard_s[number], self._worked_s)
            )
            if due_s > self.now_s:
                self._look_later(number, due_s)
            else:
                task = rank.plan.tasks[waits_for]
                stalled = Stalled(
                    f"rank {number}: nothing moved for {limit_s:g} s in {task.name!r}",
                    rank=number,
                    task=task.name,
                    hop=task.hop,
                    elapsed_s=limit_s,
                )
                self._tell(rank, TaskFailed(waits_for, stalled))

    def _look_later(self, number: int, when_s: float) -> None:
        if when_s < _NEVER_S:
            self._at(when_s, (number, _LOOK, 0, 0, None))

    def _tell(self, rank: SimulatedRank, event: Event) -> None:
        self._obey(rank, rank.engine.handle([event]))


def _delay_s(rng: random.Random, quicker: float = 1.0) -> float:
    return quicker * math.pow(10.0, _SHORTEST + _DECADES * rng.random())
