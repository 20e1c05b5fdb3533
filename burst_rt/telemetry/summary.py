"""What a record says about a run's communication: how much of it was exposed, which ranks compute
more than others, and the longest stalls.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from burst_rt.scheduler import Span, overlap
from burst_rt.telemetry.reading import CallOfAll, calls_of
from burst_rt.telemetry.record import Record

__all__ = ["IdleSpan", "RankSummary", "RecordSummary", "summarise"]

_NUM_STALLS = 3


@dataclass(frozen=True, kw_only=True)
class IdleSpan:
    """A rank's compute lane stood still."""

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
    skew_s: float = 0.0  # see `scheduler.Idle`
    late_s: float = 0.0  # idle until the last rank had entered the call
    transfer_s: float = 0.0
    hidden_s: float = 0.0  # part of the transfers during which the rank computed


@dataclass
class RecordSummary:
    """What a record says of the run's communication."""

    ranks: list[RankSummary] = field(default_factory=list)  # in the order of their numbers
    stalls: list[IdleSpan] = field(default_factory=list)  # the longest ones, longest first
    incomplete: int = 0  # calls that are left out because some ranks have no spans of them


def summarise(record: Record) -> RecordSummary:
    """Reads a record to its end."""
    ranks: dict[int, RankSummary] = {}
    longest: list[IdleSpan] = []
    incomplete = 0
    for call in calls_of(record):
        if call.whole is None:
            incomplete += 1
            continue
        for place, rank in enumerate(call.members):
            stalls = _add(ranks.setdefault(rank, RankSummary(rank=rank)), call, place)
            longest = heapq.nlargest(
                _NUM_STALLS, [*longest, *stalls], key=lambda stall: stall.duration_s
            )
    return RecordSummary([ranks[rank] for rank in sorted(ranks)], longest, incomplete)


def _add(into: RankSummary, call: CallOfAll, place: int) -> list[IdleSpan]:
    assert call.whole is not None
    trace, rank = call.whole.traces[place], call.members[place]
    _, kept = call.ranks[rank]
    transfer_s, hidden_s = overlap(trace)
    into.calls += 1
    into.total_s += kept.ended_s - kept.started_s
    into.compute_s += sum(s.ended_s - s.started_s for s in trace if s.lane == "compute")
    into.transfer_s += transfer_s
    into.hidden_s += hidden_s
    stalls = []
    for wait in call.whole.waits[place]:
        took_s = wait.ended_s - wait.started_s
        if wait.on_wire:
            into.exposed_s += took_s
            cause = _wire(call, place, wait.task, wait.peer)
        else:
            into.skew_s += took_s
            cause = _late(call, place, wait.task, wait.peer, wait.started_s, wait.ended_s)
        stalls.append(
            IdleSpan(
                duration_s=took_s,
                rank=rank,
                call=call.number,
                kind=call.kind,
                started_s=wait.started_s,
                cause=cause,
            )
        )
    # Nothing is sent until the last rank has entered the call.
    last_s, last = max((call.ranks[member][1].started_s, member) for member in call.members)
    idle_s = (
        last_s
        - kept.started_s
        - sum(max(0.0, min(s.ended_s, last_s) - s.started_s) for s in trace if s.lane == "compute")
    )
    if last != rank and idle_s > 0:
        into.late_s += idle_s
        cause = f"rank {last} entered the call {(last_s - kept.started_s) * 1e3:.1f} ms later"
        stalls.append(
            IdleSpan(
                duration_s=idle_s,
                rank=rank,
                call=call.number,
                kind=call.kind,
                started_s=kept.started_s,
                cause=cause,
            )
        )
    return stalls


def _wire(call: CallOfAll, place: int, task: int, peer: int) -> str:
    assert call.whole is not None
    size = sum(size for _, _, size in call.whole.plans[place].tasks[task].recvs)
    span = next(s for s in call.whole.traces[place] if s.task == task)
    took_s = max(1e-9, span.ended_s - span.started_s)
    return (
        f"{span.name!r} from rank {call.members[peer]} was on the wire: {size:,} bytes in "
        f"{took_s * 1e3:.1f} ms"
    )


def _late(
    call: CallOfAll, place: int, task: int, peer: int, started_s: float, ended_s: float
) -> str:
    """A late peer as the cause, with what the peer did meanwhile."""
    assert call.whole is not None

    def shared_s(span: Span) -> float:
        return min(span.ended_s, ended_s) - max(span.started_s, started_s)

    name = call.whole.plans[place].tasks[task].name
    busy = max(
        (s for s in call.whole.traces[peer] if s.lane == "compute"), key=shared_s, default=None
    )
    doing = f"was still in {busy.name!r} and " if busy is not None and shared_s(busy) > 0 else ""
    return f"rank {call.members[peer]} {doing}had not reached {name!r}"
