"""What a group's ranks spent their time on, call by call, and who was late for whom.

A rank that waits for another rank, and not for the wire, does so for one of two reasons. The other
rank had more to compute in calls: skew. Or it spent more time outside of calls: late entry. A rank
that comes late need not be waited for at once. The others have tiles of their own to compute first,
and wait in the middle of the call, or in a later one. Lateness is therefore kept as an account: the
time that a rank spent outside of calls beyond another rank is due, until the other has waited for
it or the rank has caught up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from burst_rt.scheduler import Span, Wait, overlap
from burst_rt.telemetry.messages import PlanSummary
from burst_rt.telemetry.model.timeline import entry_wait
from burst_rt.telemetry.model.whole_calls import CallOfAll

__all__ = ["GroupAccount", "IdleTime", "Latecomer", "TimesOfRanks", "idles_of"]

# Lanes of tasks that only bring ranks together, or move memory.
_CARRYING = ("control", "d2h", "h2d")
# Minimum share of the others' time in calls for which they wait for a latecomer that is named.
_WORTH_SAYING = 0.01


class IdleTime(NamedTuple):
    """An interval in which a rank's compute lane was idle."""

    started_s: float
    took_s: float
    wait: Wait | None  # None: until the last rank had entered the call
    last: int = -1  # that rank
    entered_s: float = 0.0  # when it entered


@dataclass(frozen=True, kw_only=True)
class Latecomer:
    """The rank that costs the others most by coming late to the calls."""

    rank: int
    beyond_s: float  # seconds a call outside of calls, beyond the others' mean
    most_s: float  # the most of that before one call
    waited_s: float  # seconds that the others waited for it, all together
    waited_share: float  # share of the others' time in calls


class TimesOfRanks:
    """Sums over calls. Each array has an entry for each rank of the group, in seconds."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.num_calls = 0  # before which all ranks' time outside of calls is known
        self.calls: npt.NDArray[np.int64] = np.zeros(len(members), np.int64)  # with tasks
        # exposed: see `scheduler.Idle`. skew: while a peer was late that had computed longer.
        # late: while one was late that had spent more time outside of calls. between: outside of
        # calls. hidden: the part of the transfers during which the rank computed.
        (
            self.total_s, self.compute_s, self.exposed_s, self.skew_s, self.late_s, self.between_s,
            self.transfer_s, self.hidden_s,
            self.awaited_s,  # while others waited for the rank, because it had come late
            self.beyond_s,  # outside of calls, beyond the others' mean
            self.most_s,  # the most of that before one call
        ) = np.zeros((11, len(members)))  # fmt: skip

    def add(self, other: TimesOfRanks) -> None:
        """Adds another's sums, of the same group."""
        for name, value in vars(other).items():
            if name == "most_s":
                self.most_s = np.maximum(self.most_s, value)
            elif name != "members":
                setattr(self, name, getattr(self, name) + value)

    def latecomer(self) -> Latecomer | None:
        """None where no rank alone costs the others 1 % by late entry."""
        place = int(self.awaited_s.argmax())
        waited_s, beyond_s = float(self.awaited_s[place]), float(self.beyond_s[place])
        others_s = float(self.total_s.sum() - self.total_s[place])
        # Where ranks come late in turns, none of them spends more time outside than the others.
        alone = 2 * beyond_s * (len(self.members) - 1) > waited_s
        if not self.num_calls or not alone or waited_s <= _WORTH_SAYING * others_s:
            return None
        return Latecomer(
            rank=self.members[place], beyond_s=beyond_s / self.num_calls,
            most_s=float(self.most_s[place]), waited_s=waited_s,
            waited_share=waited_s / others_s,
        )  # fmt: skip


class GroupAccount:
    """The ranks of a group: who is late for whom by time spent outside of calls."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        # due_s[r, p]: how much later p comes than r because of that, which r has not waited for
        # yet. The time before the group's first call is unknown, and counts as time outside.
        self._due_s: npt.NDArray[np.float64] = np.full((len(members), len(members)), np.inf)
        self.num_numbers = self._due_s.size

    def add(self, call: CallOfAll, idles: Sequence[Sequence[IdleTime]]) -> TimesOfRanks:
        """The times of a whole call. idles: of each rank; see `idles_of`."""
        assert call.whole is not None
        times = TimesOfRanks(self.members)
        self._enter(call, times)
        for place, rank in enumerate(self.members):
            plan, part = call.ranks[rank]
            trace = call.whole.traces[place]
            times.calls[place] = bool(plan.tasks)
            times.total_s[place] = part.ended_s - part.started_s
            times.between_s[place] = call.between_s.get(rank, 0.0)
            times.compute_s[place] = _computing_s(plan, trace)
            times.transfer_s[place], times.hidden_s[place] = overlap(trace)
            waited_s = 0.0
            for idle in idles[place]:
                if idle.wait is not None and idle.wait.on_wire:
                    times.exposed_s[place] += idle.took_s
                else:
                    waited_s += idle.took_s
            late_s = self._wait(place, waited_s, times)
            times.late_s[place] = late_s
            times.skew_s[place] = waited_s - late_s
        return times

    def _enter(self, call: CallOfAll, times: TimesOfRanks) -> None:
        """The ranks enter a call."""
        entered = np.array([call.ranks[rank][1].started_s for rank in self.members])
        between = np.array([call.between_s.get(rank, np.nan) for rank in self.members])
        if np.isfinite(between).all():
            self._due_s += between[None, :] - between[:, None]
            others = max(1, len(between) - 1)
            times.num_calls = 1
            times.beyond_s = between - (between.sum() - between) / others
            times.most_s = np.maximum(0.0, times.beyond_s)
        later_s = np.maximum(0.0, entered[None, :] - entered[:, None])
        self._due_s = np.clip(self._due_s, 0.0, later_s)

    def _wait(self, place: int, waited_s: float, times: TimesOfRanks) -> float:
        """The part of a rank's waits for other ranks in the call that is due to late entry."""
        latest = int(self._due_s[place].argmax())
        late_s = min(waited_s, float(self._due_s[place, latest]))
        times.awaited_s[latest] += late_s
        self._due_s[place] = np.maximum(0.0, self._due_s[place] - late_s)
        return late_s


def _computing_s(plan: PlanSummary, trace: Iterable[Span]) -> float:
    """Seconds in tasks that compute. A pipeline of one's own may have several lanes for them."""
    carrying = {i for i, task in enumerate(plan.tasks) if task.sends or task.recvs}
    computing = (s for s in trace if s.lane not in _CARRYING and s.task not in carrying)
    total_s, until_s = 0.0, -math.inf
    for span in sorted(computing, key=lambda span: span.started_s):
        total_s += max(0.0, span.ended_s - max(span.started_s, until_s))
        until_s = max(until_s, span.ended_s)
    return total_s


def idles_of(call: CallOfAll, place: int) -> list[IdleTime]:
    """When a rank's compute lane was idle in a whole call. place: of the rank in its group."""
    assert call.whole is not None
    parts = [call.ranks[member][1] for member in call.members]
    idles = [
        IdleTime(wait.started_s, wait.ended_s - wait.started_s, wait)
        for wait in call.whole.waits[place]
    ]
    entry = entry_wait(call.whole, parts, place)
    if entry is not None:
        started_s = parts[place].started_s
        idles.append(IdleTime(started_s, entry.took_s, None, entry.last, entry.entered_s))
    return idles
