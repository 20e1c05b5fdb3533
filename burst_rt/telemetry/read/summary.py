"""A record's exposed communication, its longest stalls, and which ranks come late.

It says which ranks compute more than others, too.
A rank that waits for another rank, and not for the wire, does so for one of two reasons. The other
rank had more to compute in calls: skew. Or it spent more time outside of calls: late entry. A rank
that comes late need not be waited for at once. The others have tiles of their own to compute first,
and wait in the middle of the call, or in a later one. Lateness is therefore kept as an account: the
time that a rank spent outside of calls beyond another rank is due, until the other has waited for
it or the rank has caught up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from burst_rt.scheduler import Span, Wait, overlap
from burst_rt.telemetry.read.calls import CallOfAll, calls_of
from burst_rt.telemetry.read.record import Record

__all__ = ["IdleSpan", "RankSummary", "RecordSummary", "summarise"]

_NUM_STALLS = 3
# Minimum share of the others' time in calls for which they wait for a latecomer that is named.
_WORTH_SAYING = 0.01


@dataclass(frozen=True, kw_only=True)
class IdleSpan:
    """An interval in which a rank's compute lane was idle."""

    duration_s: float
    rank: int
    call: int
    kind: str
    started_s: float
    cause: str  # in words, with the rank and the transfer that was waited for


@dataclass(kw_only=True)
class RankSummary:
    """A rank's times, over the calls that all ranks have spans of."""

    rank: int
    calls: int = 0
    total_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0  # see `scheduler.Idle`
    skew_s: float = 0.0  # while a peer was late that had computed longer
    late_s: float = 0.0  # while a peer was late that had spent more time outside of calls
    between_s: float = 0.0  # outside of calls, from the first of them to the last
    transfer_s: float = 0.0
    hidden_s: float = 0.0  # part of the transfers during which the rank computed


@dataclass(frozen=True, kw_only=True)
class Latecomer:
    """The rank that costs the others most by coming late to the calls."""

    rank: int
    beyond_s: float  # seconds a call outside of calls, beyond the others' mean
    most_s: float  # the most of that before one call
    waited_s: float  # seconds that the others waited for it, all together
    waited_share: float  # share of the others' time in calls


@dataclass
class RecordSummary:
    """A summary of the run's communication, from a record."""

    ranks: list[RankSummary] = field(default_factory=list)  # in the order of their numbers
    stalls: list[IdleSpan] = field(default_factory=list)  # the longest ones, longest first
    incomplete: int = 0  # calls that are left out because some ranks have no spans of them
    latecomer: Latecomer | None = None  # None where no rank costs the others 1 % by late entry


class _Lateness:
    """The ranks of a group, by place: who is late for whom by time spent outside of calls."""

    def __init__(self, num_ranks: int) -> None:
        # due_s[r, p]: how much later p comes than r because of that, which r has not waited for
        # yet. The time before the group's first call is unknown, and counts as time outside.
        self.due_s: npt.NDArray[np.float64] = np.full((num_ranks, num_ranks), np.inf)
        self.waited_s = np.zeros(num_ranks)  # seconds that the others have waited for each rank
        self.beyond_s = np.zeros(num_ranks)
        self.most_s = np.zeros(num_ranks)
        self.num_calls = 0

    def enter(self, entered_s: Iterable[float], between_s: Iterable[float]) -> None:
        """The ranks enter a call. between_s: what each was outside of calls before; NaN where that
        is not known.
        """
        entered, between = np.fromiter(entered_s, float), np.fromiter(between_s, float)
        if np.isfinite(between).all():
            self.due_s += between[None, :] - between[:, None]
            others = max(1, len(between) - 1)
            beyond = between - (between.sum() - between) / others
            self.num_calls += 1
            self.beyond_s += beyond
            self.most_s = np.maximum(self.most_s, beyond)
        self.due_s = np.clip(self.due_s, 0.0, np.maximum(0.0, entered[None, :] - entered[:, None]))

    def wait(self, place: int, waited_s: float) -> float:
        """The part of a rank's waits for other ranks in the call that is due to late entry."""
        latest = int(self.due_s[place].argmax())
        late_s = min(waited_s, float(self.due_s[place, latest]))
        self.waited_s[latest] += late_s
        self.due_s[place] = np.maximum(0.0, self.due_s[place] - late_s)
        return late_s


def summarise(record: Record) -> RecordSummary:
    """Reads a record to its end."""
    ranks: dict[int, RankSummary] = {}
    groups: dict[str, tuple[list[int], _Lateness]] = {}
    longest: list[IdleSpan] = []
    incomplete = 0
    for call in calls_of(record):
        if call.whole is None:
            incomplete += 1
            continue
        members = call.members
        _, lateness = groups.setdefault(call.group, (members, _Lateness(len(members))))
        lateness.enter(
            (call.ranks[rank][1].started_s for rank in members),
            (call.between_s.get(rank, np.nan) for rank in members),
        )
        for place, rank in enumerate(members):
            into = ranks.setdefault(rank, RankSummary(rank=rank))
            stalls, waited_s = _add(into, call, place)
            late_s = lateness.wait(place, waited_s)
            into.late_s += late_s
            into.skew_s += waited_s - late_s
            longest = heapq.nlargest(
                _NUM_STALLS, [*longest, *stalls], key=lambda stall: stall.duration_s
            )
    return RecordSummary(
        [ranks[rank] for rank in sorted(ranks)],
        longest,
        incomplete,
        _latecomer(ranks, groups.values()),
    )


def _latecomer(
    ranks: dict[int, RankSummary], groups: Iterable[tuple[list[int], _Lateness]]
) -> Latecomer | None:
    latecomers = []
    for members, lateness in groups:
        place = int(lateness.waited_s.argmax())
        waited_s, num_calls = float(lateness.waited_s[place]), lateness.num_calls
        others_s = sum(ranks[rank].total_s for rank in members if rank != members[place])
        beyond_s = float(lateness.beyond_s[place])
        # Where ranks come late in turns, none of them spends more time outside than the others.
        alone = 2 * beyond_s * (len(members) - 1) > waited_s
        if num_calls and alone and waited_s > _WORTH_SAYING * others_s:
            latecomers.append(
                Latecomer(
                    rank=members[place],
                    beyond_s=beyond_s / num_calls,
                    most_s=float(lateness.most_s[place]),
                    waited_s=waited_s,
                    waited_share=waited_s / others_s,
                )
            )
    return max(latecomers, key=lambda late: late.waited_s, default=None)


def _add(into: RankSummary, call: CallOfAll, place: int) -> tuple[list[IdleSpan], float]:
    """Adds the call to its rank; the stalls of the rank, and how long it waited for other ranks."""
    assert call.whole is not None
    trace, rank = call.whole.traces[place], call.members[place]
    plan, part = call.ranks[rank]
    transfer_s, hidden_s = overlap(trace)
    into.calls += bool(plan.tasks)
    into.total_s += part.ended_s - part.started_s
    into.between_s += call.between_s.get(rank, 0.0)
    into.compute_s += sum(s.ended_s - s.started_s for s in trace if s.lane == "compute")
    into.transfer_s += transfer_s
    into.hidden_s += hidden_s
    stalls, waited_s = [], 0.0

    def stalled(started_s: float, took_s: float, cause: str) -> None:
        stalls.append(
            IdleSpan(
                duration_s=took_s,
                rank=rank,
                call=call.number,
                kind=call.kind,
                started_s=started_s,
                cause=cause,
            )
        )

    for wait in call.whole.waits[place]:
        took_s = wait.ended_s - wait.started_s
        if wait.on_wire:
            into.exposed_s += took_s
            stalled(wait.started_s, took_s, _wire(call, place, wait))
        else:
            waited_s += took_s
            stalled(wait.started_s, took_s, _late(call, place, wait))
    # Nothing is sent until the last rank has entered the call and the ranks have agreed.
    last_s, last = max((call.ranks[member][1].started_s, member) for member in call.members)
    agreed_s = max((s.ended_s for s in trace if s.lane == "control"), default=0.0)
    until_s = min(last_s, agreed_s if plan.tasks else part.ended_s)
    idle_s = until_s - part.started_s - _computed_s(trace, until_s)
    if last != rank and idle_s > 0:
        waited_s += idle_s
        cause = f"rank {last} entered the call {(last_s - part.started_s) * 1e3:.1f} ms later"
        stalled(part.started_s, idle_s, cause)
    return stalls, waited_s


def _computed_s(trace: Iterable[Span], until_s: float) -> float:
    """Seconds that a rank computed up to a time."""
    tiles = (s for s in trace if s.lane == "compute")
    return sum(max(0.0, min(s.ended_s, until_s) - s.started_s) for s in tiles)


def _wire(call: CallOfAll, place: int, wait: Wait) -> str:
    """The wire as the cause: for how long, once all sides were there, and what was on it."""
    assert call.whole is not None
    task = call.whole.plans[place].tasks[wait.task]
    span = next(s for s in call.whole.traces[place] if s.task == wait.task)
    moved = [
        f"{sum(size for other, _, size in messages if other == peer):,} bytes {way} rank "
        f"{call.members[peer]}"
        for way, messages in (("from", task.recvs), ("to", task.sends))
        for peer in sorted({other for other, _, _ in messages})
    ]
    took_ms = (span.ended_s - wait.posted_s) * 1e3
    return f"{task.name!r} was on the wire for {took_ms:.1f} ms: {', '.join(moved)}"


def _late(call: CallOfAll, place: int, wait: Wait) -> str:
    """A late peer as the cause, with what the peer did meanwhile, and whether it came late."""
    assert call.whole is not None

    def shared_s(span: Span) -> float:
        return min(span.ended_s, wait.ended_s) - max(span.started_s, wait.started_s)

    name = call.whole.plans[place].tasks[wait.task].name
    busy = max(
        (s for s in call.whole.traces[wait.peer] if s.lane == "compute"), key=shared_s, default=None
    )
    doing = f"was still in {busy.name!r} and " if busy is not None and shared_s(busy) > 0 else ""
    ranks = call.members[place], call.members[wait.peer]
    entered_s, peer_entered_s = (call.ranks[rank][1].started_s for rank in ranks)
    late_s = peer_entered_s - entered_s
    entered = f", having entered the call {late_s * 1e3:.1f} ms later"
    # A cause that explains less than half of the wait is not reported.
    after = entered if 2 * late_s > wait.ended_s - wait.started_s else ""
    return f"rank {call.members[wait.peer]} {doing}had not reached {name!r}{after}"
