"""What is sampled: GPUs, hosts, processes and the job, with their histories; rates of counts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from burst_rt.telemetry.messages import (
    Counters,
    Hello,
    JobReport,
    LaneCounters,
    Severity,
    SourceInfo,
    SourceSample,
)
from burst_rt.telemetry.model.events import EventLog
from burst_rt.telemetry.model.history import SourceHistory
from burst_rt.telemetry.model.marks import Marks
from burst_rt.telemetry.model.ranks import Rank
from burst_rt.telemetry.model.views import (
    ProgressView,
    RankView,
    SeriesView,
    SourceView,
    shared_fields,
    update,
)

__all__ = ["Sources"]

_JOB = "job"
# Maximum number of a source's metrics: a job may report anything. Its step is one, too.
_MAX_METRICS = 65
# Seconds over which rates are means: a call counts when it ends, and a call may take longer than
# the time between two counts. A rate over less than _LEAST_S would mean nothing.
_RATE_OVER_S = 2.0
_LEAST_S = 0.05
_MAX_COUNTS = 64
# Seconds after which a figure that has not come again says nothing about the present.
_STALE_S = 5.0
_NO_LANE = LaneCounters(0, 0, 0)


@dataclass(kw_only=True)
class _Sampled:
    """One source: its view, its past, and when each of its values came."""

    view: SourceView
    history: SourceHistory
    times: dict[str, float] = field(default_factory=dict)

    def add(self, at_s: float, values: dict[str, float]) -> None:
        """Values have come. at_s: by the hub's clock; time does not go back."""
        view, names = self.view, self.history.metrics
        new = [name for name in values if name not in names]
        for name in new[max(0, _MAX_METRICS - len(names)) :]:
            values = {other: value for other, value in values.items() if other != name}
        view.at_s = max(at_s, view.at_s)
        view.values |= values
        self.times |= dict.fromkeys(values, view.at_s)
        self.history.add(view.at_s, values)


class _Rates:
    """A rank's rates, from its counts."""

    def __init__(self) -> None:
        self._last = Counters()
        # Earlier counts, oldest first, each as it was when a call had ended: rates begin there.
        self._counts: deque[Counters] = deque(maxlen=_MAX_COUNTS)
        self.values: dict[str, float] = {}

    def count(self, new: Counters, *, in_call: bool) -> dict[str, float]:
        """The rates after these counts; none where there is nothing new to say."""
        last, self._last = self._last, new
        counts = self._counts
        if counts and (new.calls, new.traced_calls) == (last.calls, last.traced_calls):
            if not in_call and new.at_s - counts[-1].at_s >= _RATE_OVER_S:
                # No call has ended for a while: the next one counts from here.
                self.values = {name: 100.0 * (name == "outside_percent") for name in self.values}
                counts.clear()
                counts.append(new)
            # Rates change only when a call ends. A call under way, which may take minutes, has
            # counted nothing yet.
            return self.values
        while len(counts) > 1 and counts[1].at_s <= new.at_s - _RATE_OVER_S:
            counts.popleft()
        # The first counts say how much there was before; a rate needs two, some time apart.
        old = counts[0] if counts else new
        counts.append(new)
        if new.at_s - old.at_s < _LEAST_S:
            return {}
        self.values = _rates_between(old, new)
        return self.values


class Sources(dict[str, _Sampled]):
    """All that is sampled, by name, and the job's last report."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self.marks = Marks(events)
        self._rates: dict[int, _Rates] = {}
        self._not_finite: set[str] = set()  # values whose last report was no finite number
        self.progress = ProgressView(None, 0, {})

    def join(self, hello: Hello) -> None:
        """A rank joins: its process is a source."""
        self._rates[hello.rank] = _Rates()
        name, about = f"rank:{hello.rank}", {"pid": str(hello.pid)}
        process = SourceInfo(name=name, kind="process", host=hello.host, metrics=[], about=about)
        self._put(process, SourceHistory(hello.sample_hz))

    def introduce(self, source: SourceInfo, rows_per_s: float) -> None:
        """There is this source, or more is known about it."""
        if source.name in self:
            update(self[source.name].view, source)
        else:
            self._put(source, SourceHistory(rows_per_s))

    def _put(self, source: SourceInfo, history: SourceHistory) -> None:
        self[source.name] = _Sampled(
            view=SourceView(**shared_fields(source, SourceView)), history=history
        )

    def sample(self, rank: Rank, sample: SourceSample) -> None:
        """A rank has sampled a source."""
        source = self.get(sample.source)
        if source is None:
            return
        if sample.values:
            source.add(rank.at(sample.at_s), sample.values)
        if sample.details:
            source.view.details = sample.details

    def count(self, rank: Rank, counts: Counters) -> None:
        """The rates of a rank's counts are figures of its process."""
        values = self._rates[rank.view.rank].count(counts, in_call=rank.view.call >= 0)
        if values:
            self[rank.view.source].add(rank.at(counts.at_s), values)

    def report(self, rank: Rank, report: JobReport) -> None:
        """The job reports its progress."""
        if _JOB not in self:
            job = SourceInfo(name=_JOB, kind="job", host=rank.view.host, metrics=[], about={})
            self._put(job, SourceHistory())
        finite = {name: value for name, value in report.values.items() if math.isfinite(value)}
        odd = {name: value for name, value in report.values.items() if name not in finite}
        self._not_finite -= finite.keys()
        for name, value in odd.items():
            if name not in self._not_finite and len(self._not_finite) < _MAX_METRICS:
                self._not_finite.add(name)
                text = f"the job reports {name} = {value} at step {report.step}"
                self._events.add(rank.view.rank, Severity.WARNING, "not finite", text)
        last = self.progress.values
        values_shown = {name: value for name, value in last.items() if name not in odd}
        for name, value in finite.items():
            # A job may report ever new names, so there is a bound.
            if name in values_shown or len(values_shown) < _MAX_METRICS:
                values_shown[name] = value
        at_s = rank.at(report.at_s)
        self.marks.report(at_s, report, finite)
        # The step is a metric, too: by it curves are drawn.
        self[_JOB].add(at_s, finite | {"step": float(report.step)})
        self.progress = ProgressView(at_s, report.step, values_shown)

    def views(self, ranks: Iterable[RankView]) -> list[SourceView]:
        """The present. ranks: all, in order; a source tells which of them use it."""
        ranks, now_s = list(ranks), self._events.now_s
        views = []
        for sampled in self.values():
            view, values, details = sampled.view, sampled.view.values, sampled.view.details
            users = [
                rank.rank
                for rank in ranks
                if view.name in (rank.source, rank.gpu)
                or (view.kind == "host" and view.host == rank.host)
            ]
            if view.kind != "job":
                times = sampled.times
                values = {k: v for k, v in values.items() if now_s - times[k] <= _STALE_S}
                details = details if values else {}
            metrics = list(sampled.history.metrics)
            views.append(
                msgspec.structs.replace(
                    view, ranks=users, metrics=metrics, values=dict(values), details=details
                )
            )
        return views

    def series(
        self, source: str, metrics: Sequence[str], since_s: float, until_s: float, limit: int
    ) -> SeriesView:
        """See `JobModel.series`."""
        if source not in self:
            return SeriesView(source, [], {})
        times, values = self[source].history.window(since_s, until_s, metrics, limit)
        # JSON has no NaN.
        columns = {
            name: [None if math.isnan(value) else value for value in column.tolist()]
            for name, column in values.items()
        }
        marks = self.marks.window(since_s, until_s) if source == _JOB else []
        return SeriesView(source, times.tolist(), columns, marks)


def _rates_between(old: Counters, new: Counters) -> dict[str, float]:
    elapsed_s = new.at_s - old.at_s
    transfer_s = new.transfer_s - old.transfer_s
    rates = {
        "flops_per_s": (_flops(new) - _flops(old)) / elapsed_s,
        "sent_bytes_per_s": (_sent(new) - _sent(old)) / elapsed_s,
        "calls_per_s": (new.calls - old.calls) / elapsed_s,
        "compute_percent": min(100.0, 100 * (new.compute_s - old.compute_s) / elapsed_s),
        "wait_percent": min(100.0, 100 * (new.wait_s - old.wait_s) / elapsed_s),
        "outside_percent": max(0.0, 100 - 100 * (new.total_s - old.total_s) / elapsed_s),
    }
    if transfer_s > 0:
        rates["overlap_percent"] = min(100.0, 100 * (new.overlap_s - old.overlap_s) / transfer_s)
    return rates


def _flops(counts: Counters) -> int:
    return sum(lane.flops for lane in counts.lanes.values())


def _sent(counts: Counters) -> int:
    return counts.lanes.get("network", _NO_LANE).size_bytes
