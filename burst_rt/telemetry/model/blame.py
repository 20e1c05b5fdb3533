"""How ranks end, and which of them is the cause: the first that was lost, or failed."""

from __future__ import annotations

from burst_rt.telemetry.messages import Bye, HubReport, Severity
from burst_rt.telemetry.model.events import EventLog
from burst_rt.telemetry.model.ranks import JoinedRanks, Rank
from burst_rt.telemetry.model.views import Lost

__all__ = ["Blame"]

# Error prefixes that mark a failure as a consequence of another rank's failure.
_SECONDARY = ("PeerLost:", "Stalled:")


class Blame:
    """began_at_s: when the hub began, in seconds since the epoch."""

    def __init__(self, began_at_s: float, ranks: JoinedRanks, events: EventLog) -> None:
        self._began_at_s = began_at_s
        self._ranks = ranks
        self._events = events
        self.first_lost: Lost | None = None  # the first rank that was lost, or failed
        self.stopping = ""  # the signal by which the job is being ended

    def join(self, number: int) -> None:
        """A rank joins; one that was lost is back."""
        if self.first_lost is not None and self.first_lost.rank == number:
            self.first_lost = None

    def observe(self, report: HubReport) -> None:
        """The hub has seen a rank's connection end, or the job being stopped."""
        rank = self._ranks.get(report.rank)
        if report.status == "stopping":
            self.stopping = report.text
            self._events.add(-1, Severity.INFO, report.status, f"by {report.text}")
        elif rank is None:
            self._events.add(report.rank, Severity.WARNING, report.status, report.text)
        elif rank.view.exit_code is None:
            activity = rank.activity(self._events.now_s)
            self._end(rank, "lost", f"{report.text}; {activity}" if activity else report.text)

    def bye(self, rank: Rank, bye: Bye) -> None:
        """The rank ends by itself."""
        rank.view.exit_code = bye.code
        if bye.code == 0:
            rank.leave()
            self._ranks.set_status(rank, "left", Severity.INFO, "exit code 0")
        else:
            why = f": {bye.text}" if bye.text else ""
            self._end(rank, "left", f"exit code {bye.code}{why}", bye.text)

    def _end(self, rank: Rank, status: str, text: str, reason: str = "") -> None:
        """A rank was lost, or failed. The first such rank counts as the cause; the ranks after it
        have merely ended. reason: the rank's own reason.
        """
        severity = Severity.INFO
        if self.stopping:
            status, text = "stopped", f"by {self.stopping}; {text}"
        elif self.first_lost is not None:
            status, text = "ended", f"after rank {self.first_lost.rank}; {text}"
        else:
            severity = Severity.ERROR
            if not reason.startswith(_SECONDARY):
                self.first_lost = self._lost(rank, reason)
                for other in self._ranks.values():
                    if other.view.exit_code and other is not rank:
                        # It failed because this one was lost, and was heard sooner.
                        other.view.status = "ended"
        rank.view.ending = text
        self._ranks.set_status(rank, status, severity, text)

    def _lost(self, rank: Rank, reason: str) -> Lost:
        view, now_s = rank.view, self._events.now_s
        return Lost(
            rank=view.rank, at_s=self._began_at_s + now_s,
            call=view.call, task=view.doing, hop=view.hop, age_s=max(0.0, now_s - rank.seen_s),
            last_call=view.last_call, activity=rank.activity(now_s),
            exit_code=view.exit_code, reason=reason,
        )  # fmt: skip
