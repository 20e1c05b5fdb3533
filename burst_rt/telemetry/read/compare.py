"""Two records side by side: the same steps and the same calls of both, and what has changed.

A call of one record is the same as a call of the other if group, number and direction are equal; a
step, if its number is. Figures are medians over what both records have, so that a longer run does
not differ by its length. How the time of a call is divided: `model.account`.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from burst_rt.telemetry.messages import JobReport, PhaseEnded, PlanSummary
from burst_rt.telemetry.metrics import METRICS
from burst_rt.telemetry.model.account import GroupAccount, TimesOfRanks, idles_of
from burst_rt.telemetry.model.whole_calls import CallOfAll
from burst_rt.telemetry.read.calls import calls_of
from burst_rt.telemetry.read.record import Clocks, Record

__all__ = ["Difference", "RecordComparison", "SameCall", "SameStep", "compare_records"]

# Maximum number of a record's calls, and of its steps, that are compared: the first.
_MOST = 100_000
# The calls and steps that are named: those that changed most.
_NAMED = 10
# How a rank's time in a call divides, in words.
_PARTS = {
    "compute_s": "computes", "exposed_s": "waits for transfers", "skew_s": "waits for late peers",
    "late_s": "waits for a late entry",
}  # fmt: skip
_CallKey: TypeAlias = tuple[str, int, str]  # group, number, direction


class Difference(msgspec.Struct, kw_only=True):
    """A figure of both records; words or numbers, None where a record lacks it."""

    name: str
    unit: str  # "s", "%", "B", "1", "1/s"; "" for words
    before: float | str | None
    after: float | str | None
    change: str  # in percent; "" where there is none to tell


class SameCall(msgspec.Struct, kw_only=True):
    """A call of both records. Pairs are of the first record and of the second."""

    group: str
    number: int
    kind: str
    started_s: tuple[float, float]  # seconds since each record's hub began
    took_s: tuple[float, float]  # from the first rank's entry to the last rank's end
    change: str  # what changed most, in words

    @property
    def name(self) -> str:
        """The call in words."""
        return f"{self.kind} call {self.number}"


class SameStep(msgspec.Struct, kw_only=True):
    """A step of both records, of its slowest rank. Pairs are as in `SameCall`."""

    step: int
    started_s: tuple[float, float]
    took_s: tuple[float, float]
    change: str

    @property
    def name(self) -> str:
        """The step in words."""
        return f"step {self.step}"


class RecordComparison(msgspec.Struct, kw_only=True):
    """What has changed from one record to another. calls, steps: those that changed most, first."""

    names: tuple[str, str]  # files
    differences: list[Difference]
    calls: list[SameCall]
    steps: list[SameStep]
    num_calls: int  # that both records have
    num_steps: int


class _Call(NamedTuple):
    started_s: float
    took_s: float
    ranks: list[int]
    parts: dict[str, list[float]]  # seconds, by rank
    size_bytes: int  # sent by all ranks


class _Step(NamedTuple):
    started_s: float
    took_s: float
    spans: dict[str, float]  # seconds, of the same rank


class _Told(NamedTuple):
    """What is compared of a record."""

    calls: dict[_CallKey, _Call]
    steps: dict[int, _Step]
    reports: dict[str, dict[int, float]]  # by name and step
    plans: dict[str, PlanSummary]  # rank 0's last, by direction


_Both: TypeAlias = tuple[_Told, _Told]


def compare_records(before: Record, after: Record) -> RecordComparison:
    """Reads both records to their ends, twice. Raises InputError, as `Record` does."""
    told = _told(before), _told(after)
    calls = [_same_call(key, told) for key in told[0].calls if key in told[1].calls]
    steps = [_same_step(number, told) for number in told[0].steps if number in told[1].steps]
    return RecordComparison(
        names=(str(before.path), str(after.path)),
        differences=[*_of_steps(told, steps), *_of_calls(told, calls), *_of_reports(told)],
        calls=heapq.nlargest(_NAMED, calls, key=_change_s),
        steps=heapq.nlargest(_NAMED, steps, key=_change_s),
        num_calls=len(calls),
        num_steps=len(steps),
    )


def _change_s(same: SameCall | SameStep) -> float:
    return abs(same.took_s[1] - same.took_s[0])


def _told(record: Record) -> _Told:
    accounts: dict[str, GroupAccount] = {}
    calls: dict[_CallKey, _Call] = {}
    for call in calls_of(record):
        if call.whole is None or len(calls) >= _MOST:
            continue
        account = accounts.setdefault(call.group, GroupAccount(call.members))
        idles = [idles_of(call, place) for place in range(len(call.members))]
        times = account.add(call, idles)
        if times.calls.any():  # agreements have no tasks
            calls[call.group, call.number, call.kind] = _call(call, times)
    return _Told(calls, *_phases_and_reports(record))


def _call(call: CallOfAll, times: TimesOfRanks) -> _Call:
    assert call.whole is not None
    parts = [call.ranks[rank][1] for rank in call.members]
    started_s = min(part.started_s for part in parts)
    sent = sum(
        size for plan in call.whole.plans for task in plan.tasks for _, _, size in task.sends
    )
    return _Call(
        started_s,
        max(part.ended_s for part in parts) - started_s,
        list(call.members),
        {name: getattr(times, name).tolist() for name in _PARTS},
        sent,
    )


def _phases_and_reports(
    record: Record,
) -> tuple[dict[int, _Step], dict[str, dict[int, float]], dict[str, PlanSummary]]:
    clocks = Clocks()
    steps: dict[int, _Step] = {}
    reports: dict[str, dict[int, float]] = defaultdict(dict)
    plans: dict[str, PlanSummary] = {}
    open_spans: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for entry in record:
        clocks.hear(entry)
        match entry.message:
            case PhaseEnded(name="", step=step) as phase if len(steps) < _MOST or step in steps:
                took_s = phase.ended_s - phase.started_s
                spans = open_spans.pop((entry.rank, step), {})
                if step not in steps or took_s > steps[step].took_s:  # the slowest rank counts
                    started_s = phase.started_s + clocks.offset_s(entry.rank)
                    steps[step] = _Step(started_s, took_s, dict(spans))
            case PhaseEnded(step=step) as phase if phase.depth == 1 and step >= 0:
                # A step's end takes its spans away, so few are open.
                open_spans[entry.rank, step][phase.name] += phase.ended_s - phase.started_s
            case JobReport() as report:
                for name, value in report.values.items():
                    by_step = reports[name]
                    if math.isfinite(value) and (len(by_step) < _MOST or report.step in by_step):
                        by_step[report.step] = value
            case PlanSummary() as plan if entry.rank == 0:
                plans[plan.kind] = plan
    return steps, reports, plans


def _same_call(key: _CallKey, told: _Both) -> SameCall:
    before, after = (one.calls[key] for one in told)
    changes = (
        (now_s - then_s, f"rank {rank} {words}")
        for part, words in _PARTS.items()
        for rank, then_s, now_s in zip(
            before.ranks, before.parts[part], after.parts[part], strict=False
        )
    )
    group, number, kind = key
    return SameCall(
        group=group,
        number=number,
        kind=kind,
        started_s=(before.started_s, after.started_s),
        took_s=(before.took_s, after.took_s),
        change=_most(changes),
    )


def _same_step(number: int, told: _Both) -> SameStep:
    before, after = (one.steps[number] for one in told)
    spans = [
        step.spans | {"the rest": step.took_s - sum(step.spans.values())}
        for step in (before, after)
    ]
    names = dict.fromkeys([*spans[0], *spans[1]])
    changes = (
        (spans[1].get(name, 0.0) - spans[0].get(name, 0.0), f"{name} takes") for name in names
    )
    return SameStep(
        step=number,
        started_s=(before.started_s, after.started_s),
        took_s=(before.took_s, after.took_s),
        change=_most(changes),
    )


def _most(changes: Iterable[tuple[float, str]]) -> str:
    """The greatest change in words."""
    by_s, words = max(changes, key=lambda change: abs(change[0]), default=(0.0, ""))
    return f"{words} {abs(by_s) * 1e3:.2f} ms {'longer' if by_s > 0 else 'less'}" if words else ""


def _of_steps(told: _Both, steps: Sequence[SameStep]) -> Iterator[Difference]:
    if not steps:
        return
    pairs = [[one.steps[same.step] for same in steps] for one in told]
    yield _medians("step", "s", *([step.took_s for step in of] for of in pairs))
    for name in dict.fromkeys(name for of in pairs for step in of for name in step.spans):
        yield _medians(name, "s", *([step.spans.get(name, 0.0) for step in of] for of in pairs))


def _of_calls(told: _Both, calls: Sequence[SameCall]) -> Iterator[Difference]:
    for kind in dict.fromkeys(call.kind for call in calls):
        keys = [(call.group, call.number, kind) for call in calls if call.kind == kind]
        pairs = [[one.calls[key] for key in keys] for one in told]
        plans = [one.plans.get(kind) for one in told]
        for what in ("strategy", "problem"):
            then, now = (getattr(plan, what) if plan else None for plan in plans)
            if then != now:
                yield _difference(f"{kind}: {what}", "", then, now)
        yield _medians(f"{kind} call", "s", *([call.took_s for call in of] for of in pairs))
        for part, words in _PARTS.items():
            means = ([statistics.fmean(call.parts[part]) for call in of] for of in pairs)
            yield _medians(f"{kind}: a rank {words}", "s", *means)
        uneven = ([_unevenness(call) for call in of] for of in pairs)
        yield _medians(f"{kind}: slowest rank computes / mean", "1", *uneven)
        sent = ([float(call.size_bytes) for call in of] for of in pairs)
        yield _medians(f"{kind}: bytes sent", "B", *sent)


def _unevenness(call: _Call) -> float:
    computes = call.parts["compute_s"]
    return max(computes) / max(statistics.fmean(computes), 1e-9)


def _of_reports(told: _Both) -> Iterator[Difference]:
    for name, then in told[0].reports.items():
        now = told[1].reports.get(name, {})
        steps = [step for step in then if step in now]
        if not steps:
            continue
        if "loss" in name:  # a median over a training says nothing
            last = max(steps)
            yield _difference(f"{name} at step {last}", "1", then[last], now[last])
        else:
            unit = METRICS[name].unit if name in METRICS else "1"
            yield _medians(name, unit, *([of[step] for step in steps] for of in (then, now)))


def _medians(name: str, unit: str, before: list[float], after: list[float]) -> Difference:
    return _difference(name, unit, statistics.median(before), statistics.median(after))


def _difference(
    name: str, unit: str, before: float | str | None, after: float | str | None
) -> Difference:
    change = "changed" if isinstance(before, str) and before != after else ""
    if isinstance(before, float) and isinstance(after, float) and before:
        change = f"{100 * (after / before - 1):+.1f} %"
    return Difference(name=name, unit=unit, before=before, after=after, change=change)
