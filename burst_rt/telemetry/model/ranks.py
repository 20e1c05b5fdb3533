"""The ranks of a job: what each is doing, and which of them are silent."""

from __future__ import annotations

from dataclasses import dataclass

from burst_rt.telemetry.messages import Counters, EndedCall, Heartbeat, Hello, Severity
from burst_rt.telemetry.model.events import EventLog
from burst_rt.telemetry.model.views import RankView, shared_fields, update

__all__ = ["SILENT_S", "JoinedRanks", "Rank"]

# Seconds until a rank is silent: four heartbeats are missing.
SILENT_S = 2.0
# A task that has taken less than this many seconds is told without them.
_WORTH_SAYING_S = 0.05
# The heartbeat of a rank that is in no call.
_NOWHERE = Heartbeat(sent_s=0.0, offset_s=0.0, rtt_s=-1.0, group="", call=-1, doing="", since_s=0.0)


@dataclass(kw_only=True)
class Rank:
    """One rank: its view, and what keeps the view true."""

    view: RankView
    sample_hz: float
    # When the rank last told what it does, by the hub's clock; None before that.
    told_s: float | None = None
    ended_group: str = ""  # group of the last call that is known to have ended

    def at(self, rank_s: float) -> float:
        """A time of the rank's clock by the hub's clock."""
        return rank_s + self.view.offset_s

    def beat(self, at_s: float, beat: Heartbeat) -> None:
        """The rank tells what it does. at_s: when the hub had that."""
        view = self.view
        update(view, beat)
        if beat.rtt_s < 0:
            view.offset_s = at_s - beat.sent_s
        view.doing_since_s = self.at(beat.since_s)
        self.told_s = self.at(beat.sent_s)
        self._leave_call()

    def end_call(self, call: EndedCall) -> None:
        """A call has ended."""
        self.view.last_call, self.ended_group = call.number, call.group
        self._leave_call()

    def count(self, counts: Counters) -> None:
        """The rank tells its counts."""
        view = self.view
        update(view, counts)
        view.at_s = self.at(counts.at_s)
        view.overlap = counts.overlap_s / counts.transfer_s if counts.transfer_s > 0 else None

    def leave(self) -> None:
        """The rank has ended by itself, and does nothing any more."""
        offset_s = self.view.offset_s
        update(self.view, _NOWHERE)
        self.view.offset_s, self.told_s = offset_s, None
        self._leave_call()

    def _leave_call(self) -> None:
        """Outside of calls there is nothing to do. A heartbeat may be older than its call's end."""
        view = self.view
        if view.group == self.ended_group and view.last_call >= view.call:
            view.call = -1
        if view.call < 0:
            view.doing, view.hop, view.doing_since_s = "", -1, 0.0

    @property
    def seen_s(self) -> float:
        """When the rank was known to do what its view says."""
        view, told_s = self.view, self.told_s
        return told_s if told_s is not None and view.call >= 0 else view.heard_s

    def activity(self, now_s: float) -> str:
        """The last known activity of the rank, and how long ago that is. "" if nothing is known."""
        view = self.view
        if self.told_s is None:
            return ""
        if view.call >= 0:
            for_s = self.seen_s - view.doing_since_s
            how_long = f", for {for_s:.1f} s" if for_s >= _WORTH_SAYING_S else ""
            what = f"in call {view.call}, {view.doing or 'between tasks'}{how_long}"
        else:
            what = f"after call {view.last_call}" if view.last_call >= 0 else "in no call"
        return f"last heard {max(0.0, now_s - self.seen_s):.1f} s before, {what}"


class JoinedRanks(dict[int, Rank]):
    """All ranks that have joined, by number."""

    def __init__(self, events: EventLog) -> None:
        self._events = events

    def join(self, at_s: float, hello: Hello) -> Rank:
        """A rank joins, or joins again."""
        view = RankView(
            **shared_fields(hello, RankView),
            source=f"rank:{hello.rank}",
            status_since_s=at_s,
            heard_s=at_s,
        )
        rank = self[hello.rank] = Rank(view=view, sample_hz=hello.sample_hz)
        text = f"a job of {hello.world_size} ranks, on {hello.host}, {hello.device}"
        self._events.add(hello.rank, Severity.INFO, "joined", text)
        return rank

    def hear(self, at_s: float, rank: Rank) -> None:
        """A message of the rank has come."""
        rank.view.heard_s = at_s
        if rank.view.status == "silent":
            self.set_status(rank, "live", Severity.INFO, "heard again", kind="back")

    def advance(self, now_s: float, *, stopping: bool) -> int:
        """Time passes until `now_s`; the number of ranks that have fallen silent. stopping: silence
        is no surprise.
        """
        events, count = self._events, 0
        for rank in sorted(self.values(), key=lambda rank: rank.view.heard_s):
            silent_s = rank.view.heard_s + SILENT_S
            if rank.view.status == "live" and now_s > silent_s:
                count += 1
                # In a replay the next message may be a minute away: the event gets its own time.
                events.now_s = max(events.now_s, min(now_s, silent_s))
                activity = rank.activity(events.now_s)
                text = f"nothing heard for {SILENT_S:g} s{f'; {activity}' if activity else ''}"
                severity = Severity.INFO if stopping else Severity.WARNING
                self.set_status(rank, "silent", severity, text)
        events.now_s = now_s
        return count

    def excuse(self, now_s: float, seconds: float) -> None:
        """The hub could not listen for so long: that is no rank's silence."""
        for rank in self.values():
            rank.view.heard_s = max(rank.view.heard_s, min(now_s, rank.view.heard_s + seconds))

    def set_status(
        self, rank: Rank, status: str, severity: Severity, text: str, kind: str = ""
    ) -> None:
        """The rank has another status from now on, which is an event. kind: of the event."""
        rank.view.status, rank.view.status_since_s = status, self._events.now_s
        self._events.add(rank.view.rank, severity, kind or status, text)
