"""The one model of a job, which every viewer asks.

The hub of a running job feeds it with messages, or a replay does from a record.

`apply` takes each message once, in order; `snapshot`, `series` and `timeline` answer in the types
of `views`. Nothing here waits, starts threads or touches a socket, and only one thread uses a model
at a time. The size of a model is bounded (see `history` and `timeline`): only a record has what is
older.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec
import numpy as np

from burst_rt.scheduler import Span
from burst_rt.scheduler.verify import Endpoint
from burst_rt.telemetry.messages import (
    Agreed,
    Bye,
    Counters,
    EndedCall,
    FromRank,
    Group,
    Heartbeat,
    Hello,
    Item,
    JobReport,
    Note,
    PlanSummary,
    Presence,
    Sample,
    Severity,
    Source,
)
from burst_rt.telemetry.model.history import History
from burst_rt.telemetry.model.timeline import (
    KeptCall,
    Recent,
    WholeCall,
    match_plans,
    spans_of,
    whole_call,
)
from burst_rt.telemetry.model.views import (
    EventView,
    FlowView,
    JobView,
    Lost,
    PlanView,
    ProgressView,
    RankView,
    SeriesView,
    Snapshot,
    SourceView,
    SpanView,
    TimelineView,
    WaitView,
)

__all__ = ["SILENT_S", "JobModel"]

# Seconds until a rank is silent: four heartbeats are missing.
SILENT_S = 2.0
# Maximum size of the spans of all ranks.
_SPAN_BYTES = 16 << 20
_MAX_EVENTS = 1000
_SHOWN_EVENTS = 100
_MAX_PLANS = 256  # maximum number of a rank's plans
_MAX_METRICS = 64  # maximum number of a source's metrics: a job may report anything
# Seconds over which rates are means: a call counts when it ends, and a call may take longer than
# the time between two counts. A rate over less than _LEAST_S would mean nothing.
_RATE_OVER_S = 2.0
_LEAST_S = 0.05
_MAX_COUNTS = 64
# Number of plans that stay unpacked, in addition to two of each rank, forward and backward.
_DECODED_PLANS = 32
# Seconds after which a figure that has not come again says nothing about the present.
_STALE_S = 5.0
# Number of sets of plans, one plan a rank, that stay matched.
_MATCHED = 4
# Maximum number of spans for which the waits and messages of calls are worked out at a time, when
# somebody looks, and maximum number of entries of the results that are kept.
_JOINT_SPANS = 20_000
_JOINT_ENTRIES = 50_000
JOB = "job"

_WORTH_SAYING_S = 0.05
# Prefixes of the last words of a rank that failed because of another rank: "PeerLost: ...".
_SECONDARY = ("PeerLost:", "Stalled:")
# The heartbeat of a rank that is in no call.
_NOWHERE = Heartbeat(sent_s=0.0, offset_s=0.0, rtt_s=-1.0, group="", call=-1, doing="", since_s=0.0)


@dataclass(kw_only=True)
class _Rank:
    """The model's knowledge of one rank."""

    hello: Hello
    recent: Recent
    status: str = "live"
    status_since_s: float = 0.0
    heard_s: float = 0.0
    offset_s: float | None = None
    beat: Heartbeat = _NOWHERE
    counters: Counters = field(default_factory=Counters)
    # Earlier counts, oldest first, each as it was when a call had ended: rates count from these.
    counts: deque[Counters] = field(default_factory=lambda: deque(maxlen=_MAX_COUNTS))
    rates: dict[str, float] = field(default_factory=dict)
    exit_code: int | None = None
    ending: str = ""  # how the rank ended, in words
    # Group and number of the last call that is known to have ended.
    ended_call: tuple[str, int] = (
        "",
        -1,
    )
    # Plans stay packed: in a ring of 64 ranks every rank has its own, of hundreds of tasks.
    plans: OrderedDict[int, tuple[PlanView, bytes]] = field(default_factory=OrderedDict)

    def at(self, rank_s: float) -> float:
        """A time of the rank's clock by the hub's clock."""
        return rank_s + (self.offset_s or 0.0)

    @property
    def source(self) -> str:
        return f"rank:{self.hello.rank}"


@dataclass(kw_only=True)
class _Source:
    """The model's knowledge of one sampled source."""

    info: Source
    history: History
    at_s: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)  # when each value came
    details: dict[str, list[float]] = field(default_factory=dict)


class _Joint(NamedTuple):
    """The waits and messages of a call, from the spans of all ranks."""

    waits: list[WaitView]
    flows: list[FlowView]


class JobModel:
    """See the module. began_at_s: when the hub began, in seconds since the epoch. record: the file
    that the job is recorded to, for viewers. replayed: the messages come from a record.
    """

    def __init__(self, began_at_s: float, *, record: str = "", replayed: bool = False) -> None:
        self.began_at_s = began_at_s
        self.record = record
        self.replayed = replayed
        self.now_s = 0.0
        self.revision = 0  # grows with every message: a viewer can tell whether anything is new
        self.ranks: dict[int, _Rank] = {}
        self.sources: dict[str, _Source] = {}
        self.groups: dict[str, Group] = {}
        self.events: deque[EventView] = deque(maxlen=_MAX_EVENTS)
        self.first_lost: Lost | None = None  # the first rank that was lost, or failed
        self._stopping = ""  # the signal by which the job is being ended
        self._num_events = 0
        self._progress = ProgressView(None, 0, {})
        self._not_finite: set[str] = set()  # values whose last report was no finite number
        self._decoded: OrderedDict[tuple[int, int], PlanSummary] = OrderedDict()
        self._matched: OrderedDict[
            tuple[tuple[int, int], ...], Mapping[Endpoint, Endpoint] | None
        ] = OrderedDict()
        self._joint: OrderedDict[tuple[str, int], _Joint] = OrderedDict()
        self._num_joint = 0
        self._joint_spans = 0

    def apply(self, at_s: float, rank: int, message: Item) -> None:
        """Takes one message. at_s: when the hub had it, in seconds since the hub began. rank: that
        it came from, -1 for the hub itself.
        """
        self.revision += 1
        self.now_s = max(self.now_s, at_s)
        if isinstance(message, Presence):
            self._presence(at_s, message)
        elif isinstance(message, Hello):
            self._hello(at_s, message)
        elif rank in self.ranks:
            self._from_rank(at_s, self.ranks[rank], message)

    def advance(self, now_s: float) -> None:
        """Time has passed. Notices ranks that have been silent for 2 s."""
        end_s = max(self.now_s, now_s)
        for rank in sorted(self.ranks.values(), key=lambda rank: rank.heard_s):
            if rank.status == "live" and end_s - rank.heard_s > SILENT_S:
                self.revision += 1
                # In a replay the next message may be a minute away: the event gets its own time.
                self.now_s = max(self.now_s, min(end_s, rank.heard_s + SILENT_S))
                severity = Severity.INFO if self._stopping else Severity.WARNING
                self._set_status(
                    rank,
                    "silent",
                    severity,
                    _joined(f"nothing heard for {SILENT_S:g} s", self._known(rank)),
                )
        self.now_s = end_s

    def excuse(self, seconds: float) -> None:
        """Says that the hub was held up and could not listen for this number of seconds: these do
        not count as silence of any rank.
        """
        for rank in self.ranks.values():
            rank.heard_s += seconds

    def events_after(self, number: int) -> list[EventView]:
        """The events that have a higher number, oldest first."""
        newer = self._num_events - number
        return (
            list(islice(self.events, max(0, len(self.events) - newer), None)) if newer > 0 else []
        )

    # Questions of viewers.

    def snapshot(self) -> Snapshot:
        """The present."""
        ranks = [self._rank_view(number, self.ranks[number]) for number in sorted(self.ranks)]
        first = next(iter(self.ranks.values()), None)
        job = JobView(
            began_at_s=self.began_at_s,
            now_s=self.now_s,
            world_size=first.hello.world_size if first else 0,
            command=first.hello.command if first else "",
            package=first.hello.package if first else "",
            record=self.record,
            dropped=sum(rank.dropped for rank in ranks),
            replayed=self.replayed,
            first_lost=self.first_lost.rank if self.first_lost is not None else -1,
        )
        sources = [self._source_view(source) for source in self.sources.values()]
        plans = [
            view for number in sorted(self.ranks) for view, _ in self.ranks[number].plans.values()
        ]
        events = list(islice(self.events, max(0, len(self.events) - _SHOWN_EVENTS), None))
        return Snapshot(
            revision=self.revision,
            job=job,
            progress=self._progress,
            ranks=ranks,
            sources=sources,
            plans=plans,
            events=events,
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
        since, until = self._window(since_s, until_s)
        known = self.sources.get(source)
        if known is None:
            return SeriesView(source, [], {})
        times, values = known.history.window(since, until, metrics, limit)
        plain = {name: _without_nan(column.tolist()) for name, column in values.items()}
        return SeriesView(source, times.tolist(), plain)

    def timeline(
        self,
        since_s: float = -10.0,
        until_s: float | None = None,
        ranks: Iterable[int] = (),
        limit: int = 2000,
    ) -> TimelineView:
        """The tasks of a window, at most `limit`, the newest. ranks: none named means all. Negative
        times count back from now.
        """
        since, until = self._window(since_s, until_s)
        wanted = [
            number for number in (sorted(ranks) or sorted(self.ranks)) if number in self.ranks
        ]
        calls = heapq.merge(
            *(self._newest_first(number, since, until) for number in wanted),
            key=lambda item: item[:2],
        )
        view = TimelineView(since_s=since, until_s=until)
        seen: dict[tuple[str, int], _Joint | None] = {}
        self._joint_spans = 0
        for _, number, call in calls:
            plan = (
                self.plan(number, call.plan) if len(view.spans) + call.num_spans <= limit else None
            )
            if plan is None:
                view.left_out += call.num_spans
                continue
            key = (call.group, call.number)
            view.spans += [_span_view(number, call, plan, span) for span in spans_of(plan, call)]
            if key not in seen:
                seen[key] = self._joint_call(*key)
        shown = set(wanted)
        for joint in seen.values():
            if joint is not None:
                view.complete += 1
                view.waits += [wait for wait in joint.waits if wait.rank in shown]
                view.flows += [
                    flow for flow in joint.flows if flow.sender in shown and flow.receiver in shown
                ]
        view.spans.reverse()
        return view

    def _newest_first(
        self, number: int, since_s: float, until_s: float
    ) -> Iterator[tuple[float, int, KeptCall]]:
        for call in self.ranks[number].recent.newest_first(since_s, until_s):
            yield -call.ended_s, number, call

    def plan(self, rank: int, number: int) -> PlanSummary | None:
        """A rank's plan with its tasks; None where it is not known."""
        key = (rank, number)
        plan = self._decoded.get(key)
        if plan is None:
            known = self.ranks[rank].plans.get(number) if rank in self.ranks else None
            if known is None:
                return None
            plan = self._decoded[key] = msgspec.msgpack.decode(
                zlib.decompress(known[1]), type=PlanSummary
            )
            if len(self._decoded) > _DECODED_PLANS + 2 * len(self.ranks):
                self._decoded.popitem(last=False)
        else:
            self._decoded.move_to_end(key)
        return plan

    def _joint_call(self, group: str, number: int) -> _Joint | None:
        """The waits and messages of a call, from the spans of all ranks. None where spans of some
        rank are missing, or where enough has been worked out for one view.
        """
        key = (group, number)
        if key in self._joint:
            return self._joint[key]
        members = self.groups[group].ranks if group in self.groups else []
        calls = [
            self.ranks[rank].recent.get(group, number) if rank in self.ranks else None
            for rank in members
        ]
        here = [call for call in calls if call is not None]
        self._joint_spans += sum(call.num_spans for call in here)
        if not here or len(here) < len(members) or self._joint_spans > _JOINT_SPANS:
            return None
        plans = [self.plan(rank, call.plan) for rank, call in zip(members, here, strict=True)]
        known = [plan for plan in plans if plan is not None]
        matched = self._match(members, known) if len(known) == len(plans) else None
        whole = whole_call(known, here, matched) if matched is not None else None
        joint = self._joint[key] = _join(group, members, number, whole)
        self._num_joint += 1 + len(joint.waits) + len(joint.flows)
        while self._num_joint > _JOINT_ENTRIES:
            _, old = self._joint.popitem(last=False)
            self._num_joint -= 1 + len(old.waits) + len(old.flows)
        return joint

    def _match(
        self, members: Sequence[int], plans: Sequence[PlanSummary]
    ) -> Mapping[Endpoint, Endpoint] | None:
        key = tuple((rank, plan.number) for rank, plan in zip(members, plans, strict=True))
        if key not in self._matched:
            self._matched[key] = match_plans(plans)
            if len(self._matched) > _MATCHED:
                self._matched.popitem(last=False)
        return self._matched[key]

    # Effects of messages.

    def _hello(self, at_s: float, hello: Hello) -> None:
        if self.first_lost is not None and self.first_lost.rank == hello.rank:
            self.first_lost = None  # the rank is back
        limit = _SPAN_BYTES // max(1, hello.world_size, len(self.ranks))
        rank = self.ranks[hello.rank] = _Rank(
            hello=hello, recent=Recent(limit), status_since_s=at_s, heard_s=at_s
        )
        for number in [key for key in self._decoded if key[0] == hello.rank]:
            del self._decoded[number]
        source = Source(
            name=rank.source,
            kind="process",
            host=hello.host,
            metrics=[],
            about={"pid": str(hello.pid)},
        )
        self.sources[rank.source] = _Source(info=source, history=History(hello.sample_hz))
        self._event(
            hello.rank,
            Severity.INFO,
            "joined",
            f"a job of {hello.world_size} ranks, on {hello.host}, {hello.device}",
        )

    def _presence(self, at_s: float, seen: Presence) -> None:
        rank = self.ranks.get(seen.rank)
        if seen.status == "stopping":
            self._stopping = seen.text
            self._event(-1, Severity.INFO, seen.status, f"by {seen.text}")
        elif rank is None:
            self._event(seen.rank, Severity.WARNING, seen.status, seen.text)
        elif rank.exit_code is None:
            self._end(rank, "lost", _joined(seen.text, self._known(rank)))

    def _from_rank(self, at_s: float, rank: _Rank, message: FromRank) -> None:
        rank.heard_s = at_s
        number = rank.hello.rank
        if rank.status == "silent":
            self._set_status(rank, "live", Severity.INFO, "heard again", kind="back")
        match message:
            case Heartbeat():
                rank.beat = message
                rank.offset_s = message.offset_s if message.rtt_s >= 0 else at_s - message.sent_s
            case Sample():
                self._sample(rank, message)
            case EndedCall():
                start, end = rank.at(message.started_s), rank.at(message.ended_s)
                if message.plan in rank.plans:
                    rank.plans.move_to_end(message.plan)  # plans that run are not forgotten
                rank.ended_call = (message.group, message.number)
                rank.recent.add(
                    KeptCall(
                        group=message.group,
                        number=message.number,
                        plan=message.plan,
                        started_s=start,
                        ended_s=end,
                        wait_s=message.wait_s,
                        spans=message.spans,
                    )
                )
            case Counters():
                self._count(rank, message)
            case PlanSummary():
                self._add_plan(rank, message)
            case Group():
                self.groups[message.name] = message
            case Source():
                known = self.sources.get(message.name)
                if known is None:
                    self.sources[message.name] = _Source(
                        info=message, history=History(rank.hello.sample_hz)
                    )
                else:
                    known.info = message
            case JobReport():
                self._report(rank, message)
            case Note():
                self._event(number, message.severity, message.kind, message.text)
            case Bye():
                rank.exit_code = message.code
                if message.code == 0:
                    rank.beat = _NOWHERE
                    self._set_status(rank, "left", Severity.INFO, "exit code 0")
                else:
                    why = f": {message.text}" if message.text else ""
                    self._end(rank, "left", f"exit code {message.code}{why}", message.text)
            case Agreed():
                pass  # it has no spans; a summary of the record reads it
            case Hello():
                raise AssertionError("a hello has its own way in")

    def _sample(self, rank: _Rank, sample: Sample) -> None:
        source = self.sources.get(sample.source)
        if source is None:
            return
        if sample.values:
            at_s = max(rank.at(sample.at_s), source.at_s)
            self._add(source, at_s, sample.values)
        if sample.details:
            source.details = sample.details

    def _add(self, source: _Source, at_s: float, values: dict[str, float]) -> None:
        names = source.history.metrics
        if len(names) + len(values) > _MAX_METRICS:
            values = {name: value for name, value in values.items() if name in names}
        source.at_s = max(at_s, source.at_s)
        source.values |= values
        source.times |= dict.fromkeys(values, source.at_s)
        source.history.add(source.at_s, values)

    def _count(self, rank: _Rank, new: Counters) -> None:
        last, rank.counters = rank.counters, new
        counts = rank.counts
        ended = not counts or (new.calls, new.traced_calls) != (last.calls, last.traced_calls)
        if not ended:
            if rank.beat.call < 0 and new.at_s - counts[-1].at_s >= _RATE_OVER_S:
                # No call has ended for a while: the next one counts from here.
                rank.rates = {name: 100.0 * (name == "outside_percent") for name in rank.rates}
                counts.clear()
                counts.append(new)
            # Rates change only when a call ends. A call under way, which may take minutes, has
            # counted nothing yet.
            if rank.rates:
                self._add(self.sources[rank.source], rank.at(new.at_s), rank.rates)
            return
        while len(counts) > 1 and counts[1].at_s <= new.at_s - _RATE_OVER_S:
            counts.popleft()
        # The first counts say how much there was before; a rate needs two, some time apart.
        old = counts[0] if counts else new
        counts.append(new)
        elapsed_s = new.at_s - old.at_s
        if elapsed_s >= _LEAST_S:
            transfer_s = new.transfer_s - old.transfer_s
            rates = rank.rates = {
                "flops_per_s": (_flops(new) - _flops(old)) / elapsed_s,
                "sent_bytes_per_s": (_sent(new) - _sent(old)) / elapsed_s,
                "calls_per_s": (new.calls - old.calls) / elapsed_s,
                "compute_percent": min(100.0, 100 * (new.compute_s - old.compute_s) / elapsed_s),
                "wait_percent": min(100.0, 100 * (new.wait_s - old.wait_s) / elapsed_s),
                "outside_percent": max(0.0, 100 - 100 * (new.total_s - old.total_s) / elapsed_s),
            }
            if transfer_s > 0:
                rates["overlap_percent"] = min(
                    100.0, 100 * (new.overlap_s - old.overlap_s) / transfer_s
                )
            self._add(self.sources[rank.source], rank.at(new.at_s), rates)

    def _add_plan(self, rank: _Rank, plan: PlanSummary) -> None:
        number = rank.hello.rank
        view = PlanView(
            rank=number,
            number=plan.number,
            group=plan.group,
            kind=plan.kind,
            num_tasks=len(plan.tasks),
            explain=plan.explain,
            predicted_s=plan.predicted_s,
            problem=plan.problem,
            strategy=plan.strategy,
            candidates=plan.candidates,
        )
        rank.plans[plan.number] = (view, zlib.compress(msgspec.msgpack.encode(plan), 1))
        self._decoded.pop((number, plan.number), None)
        if len(rank.plans) > _MAX_PLANS:
            rank.plans.popitem(last=False)
        if number == min(self.ranks):
            self._event(
                number,
                Severity.INFO,
                "plan",
                f"{plan.kind}: {len(plan.tasks)} tasks on rank {number}",
            )

    def _report(self, rank: _Rank, report: JobReport) -> None:
        at_s = rank.at(report.at_s)
        if JOB not in self.sources:
            self.sources[JOB] = _Source(
                info=Source(name=JOB, kind="job", host=rank.hello.host, metrics=[], about={}),
                history=History(),
            )
        finite = {name: value for name, value in report.values.items() if np.isfinite(value)}
        odd = {name: value for name, value in report.values.items() if name not in finite}
        self._not_finite -= finite.keys()
        for name, value in odd.items():
            if name not in self._not_finite and len(self._not_finite) < _MAX_METRICS:
                self._not_finite.add(name)
                self._event(
                    rank.hello.rank,
                    Severity.WARNING,
                    "not finite",
                    f"the job reports {name} = {value} at step {report.step}",
                )
        shown = {name: value for name, value in self._progress.values.items() if name not in odd}
        for name, value in finite.items():
            # A job may report ever new names, so there is a bound.
            if name in shown or len(shown) < _MAX_METRICS:
                shown[name] = value
        self._add(self.sources[JOB], at_s, finite)
        self._progress = ProgressView(at_s, report.step, shown)

    def _end(self, rank: _Rank, status: str, text: str, said: str = "") -> None:
        """A rank was lost, or failed. The first such rank counts as the cause; the ranks after it
        have merely ended. said: the rank's own reason.
        """
        if self._stopping:
            status, severity, text = "stopped", Severity.INFO, f"by {self._stopping}; {text}"
        elif self.first_lost is not None:
            status, severity, text = (
                "ended",
                Severity.INFO,
                f"after rank {self.first_lost.rank}; {text}",
            )
        else:
            severity = Severity.ERROR
            if not said.startswith(_SECONDARY):
                self.first_lost = self._lost(rank, said)
                for other in self.ranks.values():
                    if other.exit_code and other is not rank:
                        # It failed because this one was lost, and was heard sooner.
                        other.status = "ended"
        rank.ending = text
        self._set_status(rank, status, severity, text)

    def _lost(self, rank: _Rank, said: str) -> Lost:
        call, task, hop, at_s = self._last_seen(rank)
        return Lost(
            rank=rank.hello.rank,
            at_s=self.began_at_s + self.now_s,
            call=call,
            task=task,
            hop=hop,
            age_s=max(0.0, self.now_s - at_s),
            last_call=rank.ended_call[1],
            known=self._known(rank),
            exit_code=rank.exit_code,
            said=said,
        )

    def _set_status(
        self, rank: _Rank, status: str, severity: Severity, text: str, kind: str = ""
    ) -> None:
        rank.status, rank.status_since_s = status, self.now_s
        self._event(rank.hello.rank, severity, kind or status, text)

    def _event(self, rank: int, severity: Severity, kind: str, text: str) -> None:
        self._num_events += 1
        self.events.append(
            EventView(
                number=self._num_events,
                at_s=self.now_s,
                rank=rank,
                severity=severity,
                kind=kind,
                text=text,
            )
        )

    def _last_seen(self, rank: _Rank) -> tuple[int, str, int, float]:
        """A rank's call (-1: none), the call's task, the task's hop (-1: none), and when that was
        so. A rank tells this only now and then.
        """
        beat = rank.beat
        if beat.call < 0 or (rank.ended_call[0] == beat.group and rank.ended_call[1] >= beat.call):
            return -1, "", -1, rank.heard_s
        return beat.call, beat.doing, beat.hop, rank.at(beat.sent_s)

    def _known(self, rank: _Rank) -> str:
        """The last known activity of a rank, and how long ago that is. "" if nothing is known."""
        if rank.beat is _NOWHERE:
            return ""
        call, task, _, at_s = self._last_seen(rank)
        if call >= 0:
            for_s = at_s - rank.at(rank.beat.since_s)
            how_long = f", for {for_s:.1f} s" if for_s >= _WORTH_SAYING_S else ""
            what = f"in call {call}, {task or 'between tasks'}{how_long}"
        else:
            what = f"after call {rank.ended_call[1]}" if rank.ended_call[1] >= 0 else "in no call"
        return f"last heard {max(0.0, self.now_s - at_s):.1f} s before, {what}"

    def _window(self, since_s: float, until_s: float | None) -> tuple[float, float]:
        since, until = since_s, self.now_s if until_s is None else until_s
        return since if since >= 0 else max(
            0.0, self.now_s + since
        ), until if until >= 0 else self.now_s + until

    def _rank_view(self, number: int, rank: _Rank) -> RankView:
        hello, beat, counts = rank.hello, rank.beat, rank.counters
        call, doing, hop, _ = self._last_seen(rank)
        overlap = counts.overlap_s / counts.transfer_s if counts.transfer_s > 0 else None
        counted = msgspec.structs.asdict(counts) | {"at_s": rank.at(counts.at_s)}
        return RankView(
            **counted,
            rank=number,
            host=hello.host,
            pid=hello.pid,
            device=hello.device,
            source=rank.source,
            gpu=hello.gpu,
            status=rank.status,
            status_since_s=rank.status_since_s,
            exit_code=rank.exit_code,
            group=beat.group,
            call=call,
            hop=hop,
            doing=doing,
            doing_since_s=rank.at(beat.since_s) if call >= 0 else 0.0,
            heard_s=rank.heard_s,
            offset_s=rank.offset_s or 0.0,
            rtt_s=beat.rtt_s,
            overlap=overlap,
            last_call=rank.ended_call[1],
            ending=rank.ending,
        )

    def _source_view(self, source: _Source) -> SourceView:
        info = source.info
        users = [
            number
            for number, rank in sorted(self.ranks.items())
            if info.name in (rank.source, rank.hello.gpu)
            or (info.kind == "host" and info.host == rank.hello.host)
        ]
        values, details = source.values, source.details
        if info.kind != "job":
            values = {
                name: value
                for name, value in values.items()
                if self.now_s - source.times[name] <= _STALE_S
            }
            details = details if values else {}
        return SourceView(
            name=info.name,
            kind=info.kind,
            host=info.host,
            ranks=users,
            about=info.about,
            at_s=source.at_s,
            metrics=list(source.history.metrics),
            values=values,
            details=details,
        )


def _decode(packed: bytes) -> PlanSummary:
    return msgspec.msgpack.decode(zlib.decompress(packed), type=PlanSummary)


def _joined(text: str, more: str) -> str:
    return f"{text}; {more}" if more else text


def _flops(counters: Counters) -> int:
    return sum(lane.flops for lane in counters.lanes.values())


def _sent(counters: Counters) -> int:
    lane = counters.lanes.get("network")
    return lane.size_bytes if lane else 0


def _without_nan(values: list[float]) -> list[float | None]:
    """The values, with None instead of NaN, which JSON does not have."""
    return [None if math.isnan(value) else value for value in values]


def _by_task(trace: Sequence[Span]) -> dict[int, Span]:
    return {span.task: span for span in trace}


def _span_view(rank: int, call: KeptCall, plan: PlanSummary, s: Span) -> SpanView:
    task = plan.tasks[s.task]
    return SpanView(
        rank=rank,
        group=call.group,
        call=call.number,
        kind=plan.kind,
        task=s.task,
        name=s.name,
        lane=s.lane,
        op=task.op,
        hop=task.hop,
        issued_s=s.issued_s,
        started_s=s.started_s,
        ended_s=s.ended_s,
        size_bytes=s.size_bytes,
        flops=s.flops,
        plan=call.plan,
        sends=len(task.sends),
        receives=len(task.recvs),
    )


def _join(group: str, members: Sequence[int], call: int, whole: WholeCall | None) -> _Joint:
    """The waits and the messages of a call; none of either where they cannot be told."""
    joint = _Joint([], [])
    if whole is None:
        return joint
    for rank, plan, waits in zip(members, whole.plans, whole.waits, strict=True):
        for wait in waits:
            cause = "exposed" if wait.on_wire else "skew"
            peer, task = members[wait.peer], plan.tasks[wait.task].name
            joint.waits.append(
                WaitView(
                    rank=rank,
                    call=call,
                    cause=cause,
                    started_s=wait.started_s,
                    ended_s=wait.ended_s,
                    peer=peer,
                    task=task,
                    group=group,
                )
            )
    known = [_by_task(trace) for trace in whole.traces]
    for end, source in whole.matched.items():
        sent, received = known[source.rank][source.task], known[end.rank][end.task]
        size = whole.plans[end.rank].tasks[end.task].recvs[end.number][2]
        sender, receiver, number = members[source.rank], members[end.rank], end.number
        joint.flows.append(
            FlowView(
                call=call,
                sender=sender,
                send_task=source.task,
                sent_s=sent.issued_s,
                receiver=receiver,
                receive_task=end.task,
                received_s=received.ended_s,
                size_bytes=size,
                group=group,
                number=number,
            )
        )
    return joint
