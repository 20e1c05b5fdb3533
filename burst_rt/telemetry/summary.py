"""What a record says about a run's communication: how much of it was exposed, who computes more
than others, and the longest stalls.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from burst_rt.scheduler import Span, overlap
from burst_rt.telemetry.reading import CallOfAll, calls_of
from burst_rt.telemetry.record import Record

__all__ = ["RankSummary", "Stall", "Summary", "summarise"]

_NUM_STALLS = 3


class Stall(NamedTuple):
    """A rank's compute lane stood still. cause: in words, with the rank and the transfer it waited
    for.
    """

    duration_s: float
    rank: int
    call: int
    kind: str
    started_s: float
    cause: str


@dataclass
class RankSummary:
    """Of the calls that all ranks have spans of. exposed_s, skew_s: see `scheduler.Idle`; late_s:
    idle until the last rank had entered.
    """

    rank: int
    calls: int = 0
    total_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    skew_s: float = 0.0
    late_s: float = 0.0
    transfer_s: float = 0.0
    hidden_s: float = 0.0


@dataclass
class Summary:
    """ranks: in order. stalls: the longest, longest first. incomplete: calls that some ranks have
    no spans of, and that are left out.
    """

    ranks: list[RankSummary] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    incomplete: int = 0


def summarise(record: Record) -> Summary:
    """Reads a record to its end."""
    ranks: dict[int, RankSummary] = {}
    longest: list[Stall] = []
    incomplete = 0
    for call in calls_of(record):
        if call.whole is None:
            incomplete += 1
            continue
        for place, rank in enumerate(call.members):
            stalls = _add(ranks.setdefault(rank, RankSummary(rank)), call, place)
            longest = heapq.nlargest(_NUM_STALLS, [*longest, *stalls])
    return Summary([ranks[rank] for rank in sorted(ranks)], longest, incomplete)


def _add(into: RankSummary, call: CallOfAll, place: int) -> list[Stall]:
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
        stalls.append(Stall(took_s, rank, call.number, call.kind, wait.started_s, cause))
    # Until the last rank has entered nothing is sent.
    last_s, last = max((call.ranks[member][1].started_s, member) for member in call.members)
    idle_s = (
        last_s
        - kept.started_s
        - sum(max(0.0, min(s.ended_s, last_s) - s.started_s) for s in trace if s.lane == "compute")
    )
    if last != rank and idle_s > 0:
        into.late_s += idle_s
        cause = f"rank {last} entered the call {(last_s - kept.started_s) * 1e3:.1f} ms later"
        stalls.append(Stall(idle_s, rank, call.number, call.kind, kept.started_s, cause))
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
    """What the peer did meanwhile."""
    assert call.whole is not None

    def shared_s(span: Span) -> float:
        return min(span.ended_s, ended_s) - max(span.started_s, started_s)

    name = call.whole.plans[place].tasks[task].name
    busy = max(
        (s for s in call.whole.traces[peer] if s.lane == "compute"), key=shared_s, default=None
    )
    doing = (
        f"still in {busy.name!r}" if busy is not None and shared_s(busy) > 0 else "not there yet"
    )
    return f"rank {call.members[peer]} was {doing}, and had not come to {name!r}"
