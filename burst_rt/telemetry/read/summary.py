"""A record's exposed communication, its longest stalls, and which ranks come late.

It says which ranks compute more than others, too. How waits are told apart: `model.account`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from burst_rt.scheduler import Span, Wait
from burst_rt.telemetry.messages import Counters
from burst_rt.telemetry.model.account import (
    GroupAccount,
    IdleTime,
    Latecomer,
    TimesOfRanks,
    idles_of,
)
from burst_rt.telemetry.model.whole_calls import CallOfAll
from burst_rt.telemetry.read.calls import calls_of
from burst_rt.telemetry.read.record import Record

__all__ = ["IdleSpan", "RankSummary", "RecordSummary", "summarise"]

_NUM_STALLS = 3


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
    """A rank's times, over the calls that all ranks have spans of; see `TimesOfRanks`."""

    rank: int
    calls: int = 0
    total_s: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    skew_s: float = 0.0
    late_s: float = 0.0
    between_s: float = 0.0
    transfer_s: float = 0.0
    hidden_s: float = 0.0

    def add(self, times: TimesOfRanks, place: int) -> None:
        """Adds what a group's calls took. place: of the rank in the group."""
        for name, value in vars(self).items():
            if name != "rank":
                setattr(self, name, value + getattr(times, name)[place].item())


@dataclass
class RecordSummary:
    """A summary of the run's communication, from a record."""

    ranks: list[RankSummary] = field(default_factory=list)  # in the order of their numbers
    stalls: list[IdleSpan] = field(default_factory=list)  # the longest ones, longest first
    incomplete: int = 0  # calls that are left out because some ranks have no spans of them
    dropped: int = 0  # messages that found no room: most are calls
    latecomer: Latecomer | None = None  # None where no rank costs the others 1 % by late entry


def summarise(record: Record) -> RecordSummary:
    """Reads a record to its end."""
    groups: dict[str, tuple[GroupAccount, TimesOfRanks]] = {}
    longest: list[IdleSpan] = []
    incomplete = 0
    for call in calls_of(record):
        if call.whole is None:
            incomplete += 1
            continue
        members = call.members
        if call.group not in groups:
            groups[call.group] = GroupAccount(members), TimesOfRanks(members)
        account, times = groups[call.group]
        idles = [idles_of(call, place) for place in range(len(members))]
        times.add(account.add(call, idles))
        stalls = (_stall(call, place, idle) for place, of in enumerate(idles) for idle in of)
        longest = heapq.nlargest(
            _NUM_STALLS, [*longest, *stalls], key=lambda stall: stall.duration_s
        )
    dropped: dict[int, int] = {}
    for entry in record:
        if isinstance(entry.message, Counters):
            dropped[entry.rank] = entry.message.dropped
    return RecordSummary(
        _ranks(groups.values()), longest, incomplete, sum(dropped.values()),
        _latecomer(groups.values()),
    )  # fmt: skip


_Groups = Iterable[tuple[GroupAccount, TimesOfRanks]]


def _ranks(groups: _Groups) -> list[RankSummary]:
    ranks: dict[int, RankSummary] = {}
    for _, times in groups:
        for place, rank in enumerate(times.members):
            ranks.setdefault(rank, RankSummary(rank=rank)).add(times, place)
    return [ranks[rank] for rank in sorted(ranks)]


def _latecomer(groups: _Groups) -> Latecomer | None:
    found = filter(None, (times.latecomer() for _, times in groups))
    return max(found, key=lambda late: late.waited_s, default=None)


def _stall(call: CallOfAll, place: int, idle: IdleTime) -> IdleSpan:
    rank, wait = call.members[place], idle.wait
    if wait is None:
        later_ms = (idle.entered_s - idle.started_s) * 1e3
        cause = f"rank {idle.last} entered the call {later_ms:.1f} ms later"
    else:
        cause = (_wire if wait.on_wire else _late)(call, place, wait)
    return IdleSpan(
        duration_s=idle.took_s, rank=rank, call=call.number, kind=call.kind,
        started_s=idle.started_s, cause=cause,
    )  # fmt: skip


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
