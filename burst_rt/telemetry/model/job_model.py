"""The one model of a job, which every viewer asks.

The hub of a running job feeds it with messages, or a replay does from a record.

`apply` takes each message once, in order; `snapshot`, `series` and `timeline` answer in the types
of `views`. Nothing here waits, starts threads or touches a socket, and only one thread uses a model
at a time. The size of a model is bounded (see `history` and `timeline`): only a record has what is
older.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Sequence

from burst_rt.telemetry.messages import (
    Agreed,
    Bye,
    Counters,
    EndedCall,
    FromRank,
    Group,
    Heartbeat,
    Hello,
    HubReport,
    Item,
    JobReport,
    Note,
    PhaseEnded,
    PlanSummary,
    PostMortemLines,
    SourceInfo,
    SourceSample,
)
from burst_rt.telemetry.model.blame import Blame
from burst_rt.telemetry.model.events import EventLog
from burst_rt.telemetry.model.limits import Limits
from burst_rt.telemetry.model.phases import Phases, step_share
from burst_rt.telemetry.model.plans import Plans
from burst_rt.telemetry.model.ranks import JoinedRanks, Rank
from burst_rt.telemetry.model.sources import Sources
from burst_rt.telemetry.model.views import (
    EventView,
    JobView,
    Lost,
    PostMortemView,
    SeriesView,
    Snapshot,
    TimelineView,
    shared_fields,
)

__all__ = ["JobModel"]


class JobModel:
    """See the module. began_at_s: when the hub began, in seconds since the epoch. record: the file
    that the job is recorded to, for viewers. replayed: the messages come from a record.
    """

    def __init__(self, began_at_s: float, *, record: str = "", replayed: bool = False) -> None:
        self.began_at_s = began_at_s
        self.record = record
        self.replayed = replayed
        self.length_s: float | None = None  # that of the record, where one is replayed
        self.revision = 0  # grows with every message: a viewer can tell whether anything is new
        self._first: Hello | None = None  # what the first rank that joined said
        self._events = EventLog()
        self.ranks = JoinedRanks(self._events)
        self.sources = Sources(self._events)
        self.plans = Plans(self._events)
        self.phases = Phases()
        self._limits = Limits()
        self._blame = Blame(began_at_s, self.ranks, self._events)
        self._post_mortem: PostMortemView | None = None
        self.ended = False  # the hub goes, once viewers have asked what they want to keep

    def _from_rank(self, at_s: float, rank: Rank, message: FromRank) -> None:
        """Each message of a rank, and what it changes."""
        self.ranks.hear(at_s, rank)
        match message:
            case Heartbeat():
                rank.beat(at_s, message)
            case SourceInfo():
                self.sources.introduce(message, rank.sample_hz)
            case SourceSample():
                self.sources.sample(rank, message)
            case Counters():
                rank.count(message)
                self.sources.count(rank, message)
            case JobReport():
                self.sources.report(rank, message)
            case Group():
                self.plans.add_group(message)
            case PlanSummary():
                self.plans.add_plan(rank.view.rank, message)
            case EndedCall():
                rank.end_call(message)
                self.plans.add_call(rank, message)
                self._limit(rank, message)
            case Agreed():
                self._limit(rank, message)
            case PhaseEnded():
                self.phases.add(rank, message)
                self.sources.marks.phase(rank, message)
            case Note():
                self._events.add(rank.view.rank, message.severity, message.kind, message.text)
            case Bye():
                self._judge()
                self._blame.bye(rank, message)
            case Hello():
                raise AssertionError("a hello has its own way in")

    def _limit(self, rank: Rank, message: EndedCall | Agreed) -> None:
        group = self.plans.groups.get(message.group)
        if group is not None and rank.view.rank in group.ranks:
            self._limits.take(rank, message, group.ranks, self.plans.plan)
            if self._limits.due(self.now_s):
                self._judge()

    def _judge(self) -> None:
        ranks = [rank.view for rank in self.ranks.values()]
        spans = self.phases.shares(self._limits.since_s(self.now_s), self.now_s)
        self._limits.judge(self.now_s, ranks, self.sources.views(ranks), spans)

    @property
    def now_s(self) -> float:
        """The time, in seconds since the hub began."""
        return self._events.now_s

    @property
    def events(self) -> deque[EventView]:
        """The last events, oldest first."""
        return self._events.events

    @property
    def first_lost(self) -> Lost | None:
        """The first rank that was lost, or failed."""
        return self._blame.first_lost

    @property
    def failed(self) -> bool:
        """Whether a rank was lost, or failed, though nobody had stopped the job."""
        ended_badly = any(rank.view.ending for rank in self.ranks.values())
        return ended_badly and not self._blame.stopping

    def apply(self, at_s: float, rank: int, message: Item) -> None:
        """Takes one message. at_s: when the hub had it, in seconds since the hub began. rank: that
        it came from, -1 for the hub itself.
        """
        self.revision += 1
        self._events.now_s = max(self._events.now_s, at_s)
        if isinstance(message, HubReport):
            self._blame.observe(message)
        elif isinstance(message, PostMortemLines):
            self._post_mortem = PostMortemView(**shared_fields(message, PostMortemView))
        elif isinstance(message, Hello):
            if self._first is None or self._first.rank == message.rank:
                self._first = message
            self._blame.join(message.rank)
            again = message.rank in self.ranks
            self.sources.marks.join(self.now_s, message, again=again)
            self.ranks.join(at_s, message)
            self.sources.join(message)
            self.plans.join(message)
            self.phases.join(message)
        elif rank in self.ranks:
            self._from_rank(at_s, self.ranks[rank], message)

    def advance(self, now_s: float) -> None:
        """Time has passed. Notices ranks that have been silent for 2 s."""
        stopping = bool(self._blame.stopping)
        self.revision += self.ranks.advance(max(self.now_s, now_s), stopping=stopping)
        in_call = any(rank.view.alive and rank.view.call >= 0 for rank in self.ranks.values())
        self._limits.advance(self.now_s, in_call=in_call)

    def excuse(self, now_s: float, seconds: float) -> None:
        """Says that the hub was held up and could not listen for this number of seconds until
        now: these do not count as silence of any rank.
        """
        self.ranks.excuse(now_s, seconds)

    def events_after(self, number: int) -> list[EventView]:
        """The events that have a higher number, oldest first."""
        return self._events.after(number)

    def snapshot(self) -> Snapshot:
        """The present."""
        ranks = [copy.copy(self.ranks[number].view) for number in sorted(self.ranks)]
        first, lost = self._first, self.first_lost
        job = JobView(
            began_at_s=self.began_at_s,
            now_s=self.now_s,
            world_size=first.world_size if first else 0,
            command=first.command if first else "",
            package=first.package if first else "",
            record=self.record,
            dropped=sum(rank.dropped for rank in ranks),
            replayed=self.replayed,
            length_s=self.length_s,
            first_lost=lost.rank if lost is not None else -1,
            verdict=self._limits.verdict(ended=not any(rank.alive for rank in ranks)),
            ended=self.ended,
            post_mortem=self._post_mortem,
            step_share=step_share(ranks),
        )
        return Snapshot(
            revision=self.revision,
            job=job,
            progress=self.sources.progress,
            ranks=ranks,
            sources=self.sources.views(ranks),
            plans=self.plans.views(),
            events=self._events.shown(),
        )

    def series(
        self,
        source: str,
        metrics: Sequence[str] = (),
        since_s: float = -600.0,
        until_s: float | None = None,
        limit: int = 2000,
    ) -> SeriesView:
        """A window of a source's metrics, at most `limit` rows. metrics: none named means all.
        Negative times count back from now.
        """
        return self.sources.series(source, metrics, *self._window(since_s, until_s), limit)

    def timeline(
        self,
        since_s: float = -10.0,
        until_s: float | None = None,
        ranks: Iterable[int] = (),
        limit: int = 2000,
    ) -> TimelineView:
        """The tasks of a window, and the job's steps and spans, at most `limit` of each, the
        newest. ranks: none named means all. Negative times count back from now.
        """
        window, numbers = self._window(since_s, until_s), list(ranks)
        view = self.plans.timeline(*window, numbers, limit)
        view.phases, view.phases_left_out = self.phases.window(*window, numbers, limit)
        return view

    def _window(self, since_s: float, until_s: float | None) -> tuple[float, float]:
        now_s = self.now_s
        since_s = since_s if since_s >= 0 else max(0.0, now_s + since_s)
        if until_s is None:
            return since_s, now_s
        return since_s, until_s if until_s >= 0 else now_s + until_s
