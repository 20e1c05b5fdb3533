"""What limits a job now: one verdict, from the calls of the last ten seconds and what is sampled.

A table of rules, each with what it costs: a share of the time. The dearest rule is the verdict.
Waits are told apart as in a record's summary (`model.account`).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from burst_rt.telemetry.messages import Agreed, EndedCall, PlanSummary
from burst_rt.telemetry.metrics import throttle_reasons
from burst_rt.telemetry.model.account import GroupAccount, Latecomer, TimesOfRanks, idles_of
from burst_rt.telemetry.model.ranks import Rank
from burst_rt.telemetry.model.timeline import num_spans
from burst_rt.telemetry.model.views import RankView, SourceView, Verdict
from burst_rt.telemetry.model.whole_calls import AGREEMENT, CallCollector

__all__ = ["RULES", "Evidence", "Limits", "verdict_on"]

_WINDOW_S = 10.0
_JUDGE_EVERY_S = 1.0
_MAX_OPEN, _MATCHED = 200, 8
# Numbers in the accounts of the groups that have called last: a job may open and close contexts.
_MAX_NUMBERS = 1 << 22
# Spans a second whose waits are worked out, which takes some 10 us each; calls beyond are left out.
_SPANS_A_SECOND = 3_000
# Minimum share of the time that a verdict is about.
_WORTH_SAYING = 0.05
# A host is full if its cores are busier than this, in percent.
_FULL_PERCENT = 90.0
# Ranks compute as much as each other if the most is at most so many times the mean.
_EVEN = 1.05
# Above this share, the time outside of calls is what limits a job that waits for nothing.
_MOST = 0.5
# A late rank's span explains it if the span is longer than the others' by this share of the delay.
_EXPLAINED = 0.5
# Spans that are verdicts of their own: kind, what takes the time, and what to do. Where a plan is
# made the runtime itself opens one.
_KNOWN_SPANS = {
    "checkpoint": ("checkpoint", "checkpoints take", "save less often, or in the background"),
    "data": (
        "input pipeline", "the input pipeline takes",
        "read ahead in other processes (num_workers, prefetch_factor of DataLoader)",
    ),
    "planning": (
        "planning", "planning takes",
        "masks, lengths and layouts that come again are planned once; round lengths up",
    ),
}  # fmt: skip
# The `THROTTLE_REASONS` that a healthy chip does not show.
_HELD_BACK = 0x8 | 0x20 | 0x40 | 0x80


class Limits:
    """The calls of the last seconds, as they end, and the verdicts so far."""

    def __init__(self) -> None:
        self._collector = CallCollector(max_open=_MAX_OPEN, matched=_MATCHED)
        self._left_out: deque[tuple[str, int]] = deque(maxlen=_MAX_OPEN)
        self._accounts: OrderedDict[str, GroupAccount] = OrderedDict()
        self._recent: deque[tuple[float, str, TimesOfRanks]] = deque()
        self._now_s = self._filled_s = 0.0
        self._began_s = math.inf
        self._spans_left = float(_SPANS_A_SECOND)
        self._judged_s = 0.0
        self._last: Verdict | None = None
        # By kind and rank: how often it was the verdict, and the last of these.
        self._counts: Counter[tuple[str, int]] = Counter()
        self._said: dict[tuple[str, int], Verdict] = {}

    def take(
        self, rank: Rank, message: EndedCall | Agreed, members: Sequence[int],
        plan_of: Callable[[int, int], PlanSummary | None],
    ) -> None:  # fmt: skip
        """A rank's part of a call has come. members: of the call's group. plan_of: the plan of a
        rank that has a number.
        """
        number = rank.view.rank
        self._now_s = max(self._now_s, rank.at(message.ended_s))
        self._began_s = min(self._began_s, rank.at(message.started_s))
        self._judged_s = self._judged_s or self._now_s
        if not self._affords(message, len(members)):
            self._collector.skip(number, message)
            return
        plan = AGREEMENT if isinstance(message, Agreed) else plan_of(number, message.plan)
        call = self._collector.take(number, message, members, plan, rank.view.offset_s)
        if call is None or call.whole is None:
            return
        account = self._accounts.get(call.group)
        if account is None or account.members != call.members:
            account = self._accounts[call.group] = GroupAccount(call.members)
            while (
                len(self._accounts) > 1
                and sum(x.num_numbers for x in self._accounts.values()) > _MAX_NUMBERS
            ):
                self._accounts.popitem(last=False)
        self._accounts.move_to_end(call.group)
        idles = [idles_of(call, place) for place in range(len(call.members))]
        self._recent.append((self._now_s, call.group, account.add(call, idles)))
        while self._recent[0][0] < self._now_s - _WINDOW_S:
            self._recent.popleft()

    def _affords(self, message: EndedCall | Agreed, num_ranks: int) -> bool:
        """Whether there is time for a call. The first of its ranks decides for all."""
        key = (message.group, message.number)
        if key in self._collector.open or key in self._left_out or isinstance(message, Agreed):
            return key not in self._left_out
        filled = _SPANS_A_SECOND * (self._now_s - self._filled_s)
        self._spans_left = min(self._spans_left + filled, 2.0 * _SPANS_A_SECOND)
        self._filled_s = self._now_s
        # A call of more spans than there is ever time for is taken, too, and paid for later.
        if self._spans_left < 0:
            self._left_out.append(key)
            return False
        self._spans_left -= num_spans(message) * num_ranks
        return True

    def due(self, now_s: float) -> bool:
        """Whether it is time to judge again."""
        return bool(self._recent) and now_s - self._judged_s >= _JUDGE_EVERY_S

    def advance(self, now_s: float, *, in_call: bool) -> None:
        """Time has passed. A job that is in no call, and has not been for ten seconds, is limited
        by nothing that is known here.
        """
        if not in_call and now_s > self._now_s + _WINDOW_S:
            self._last = None

    def since_s(self, now_s: float) -> float:
        """The beginning of the time that is judged: ten seconds, less at the beginning of a job."""
        return max(now_s - _WINDOW_S, min(self._began_s, now_s))

    def judge(
        self, now_s: float, ranks: Sequence[RankView], sources: Iterable[SourceView],
        spans: Mapping[int, Mapping[str, float]],
    ) -> None:  # fmt: skip
        """Makes the verdict on the time since `since_s`. spans: shares of it, by rank and name."""
        self._judged_s = now_s
        sums: dict[str, TimesOfRanks] = {}
        for at_s, group, times in self._recent:
            if at_s >= now_s - _WINDOW_S:
                sums.setdefault(group, TimesOfRanks(times.members)).add(times)
        if not sums:
            return
        by_name = {source.name: source for source in sources}
        new = verdict_on(Evidence(list(sums.values()), ranks, by_name, spans))
        last, cause = self._last, (new.kind, new.rank)
        same = last is not None and (last.kind, last.rank) == cause
        new.since_s = last.since_s if last is not None and same else now_s
        self._last, self._said[cause] = new, new
        self._counts[cause] += 1

    def verdict(self, *, ended: bool) -> Verdict | None:
        """What limits the job now, and where it has ended, what limited it for the longest time.

        None before the first verdict.
        """
        if not ended or not self._counts:
            return self._last
        return self._said[max(self._counts, key=self._counts.__getitem__)]


class Evidence(NamedTuple):
    """What rules look at: sums over calls, the last values of all sources by name, and the shares
    of the time in spans, by rank and name.
    """

    groups: Sequence[TimesOfRanks]
    ranks: Sequence[RankView]
    sources: Mapping[str, SourceView]
    spans: Mapping[int, Mapping[str, float]] = {}

    def share(self, name: str) -> float:
        """The part of all time in calls."""
        total_s = sum(times.total_s.sum() for times in self.groups)
        return float(sum(getattr(times, name).sum() for times in self.groups) / max(total_s, 1e-9))

    def view(self, number: int) -> RankView | None:
        """A rank's view, if it is known."""
        return next((rank for rank in self.ranks if rank.rank == number), None)

    def value(self, source: str, name: str) -> float | None:
        """The last value of a source, if there is one."""
        return self.sources[source].values.get(name) if source in self.sources else None


def verdict_on(evidence: Evidence) -> Verdict:
    """The dearest of what the rules say, if it costs 5 percent; else what there is to say of a job
    that waits for nothing.
    """
    said = [verdict for rule in RULES if (verdict := rule(evidence)) is not None]
    dear = [verdict for verdict in said if verdict.share >= _WORTH_SAYING]
    return max(dear, key=lambda verdict: verdict.share, default=None) or _nothing(evidence)


def _comes_late(evidence: Evidence) -> Verdict | None:
    late = max(
        filter(None, (times.latecomer() for times in evidence.groups)),
        key=lambda late: late.waited_s, default=None,
    )  # fmt: skip
    if late is None:
        return None
    name = _explains(evidence, late)
    if name in _KNOWN_SPANS:
        kind, takes, advice = _KNOWN_SPANS[name]
        return Verdict(
            kind=kind, rank=late.rank, share=late.waited_share,
            text=f"{takes} {late.beyond_s * 1e3:.1f} ms a call of rank {late.rank}, for which the "
            f"others wait {_percent(late.waited_share)} of their time in calls",
            advice=advice,
        )  # fmt: skip
    view = evidence.view(late.rank)
    where = f"py-spy dump --pid {view.pid}, on {view.host}" if view is not None else "py-spy dump"
    return Verdict(
        kind="late rank", rank=late.rank, share=late.waited_share,
        text=f"rank {late.rank} comes late: between calls it spends {late.beyond_s * 1e3:.1f} ms "
        f"more than the others{name and f' (most of it in its span {name!r})'}, who wait "
        f"{_percent(late.waited_share)} of their time in calls for it",
        advice=f"see what it does between calls: {where}",
    )  # fmt: skip


def _explains(evidence: Evidence, late: Latecomer) -> str:
    """The span in which a late rank spends most of the time by which it is late, if there is
    one.
    """
    others = [spans for rank, spans in evidence.spans.items() if rank != late.rank]
    beyond = {
        name: share - sum(spans.get(name, 0.0) for spans in others) / max(1, len(others))
        for name, share in evidence.spans.get(late.rank, {}).items()
    }
    name = max(beyond, key=beyond.__getitem__, default="")
    times = next(times for times in evidence.groups if late.rank in times.members)
    place = list(times.members).index(late.rank)
    all_s = float(times.total_s[place] + times.between_s[place])
    explained = name and beyond[name] >= _EXPLAINED * late.beyond_s * times.num_calls / all_s
    return name if explained else ""


def _in_spans(evidence: Evidence) -> Verdict | None:
    """Spans in which a rank does not compute: the others do the same meanwhile, or wait for it."""
    share, name, rank = max(
        (
            (share, name, rank)
            for rank, spans in evidence.spans.items()
            for name, share in spans.items()
            if name in _KNOWN_SPANS
        ),
        default=(0.0, "", -1),
    )
    if not name:
        return None
    kind, takes, advice = _KNOWN_SPANS[name]
    text = f"{takes} {_percent(share)} of the time of rank {rank}"
    return Verdict(kind=kind, rank=rank, share=share, text=text, advice=advice)


def _wire(evidence: Evidence) -> Verdict | None:
    share = evidence.share("exposed_s")
    times = max(evidence.groups, key=lambda times: float(times.exposed_s.max()))
    place = int(times.exposed_s.argmax())
    most = _percent(times.exposed_s[place] / max(times.total_s[place], 1e-9))
    return Verdict(
        kind="transfers", rank=-1, share=share,
        text=f"ranks wait {_percent(share)} of their time in calls for bytes on the wire; rank "
        f"{times.members[place]} most, {most}",
        advice="see which links are slow (Traffic), and ask `burst-rt plan` for a strategy or for "
        "fewer ranks",
    )  # fmt: skip


def _uneven(evidence: Evidence) -> Verdict | None:
    share = evidence.share("skew_s")
    times = max(evidence.groups, key=lambda times: float(times.skew_s.sum()))
    place, mean_s = int(times.compute_s.argmax()), float(times.compute_s.mean())
    number, most = times.members[place], float(times.compute_s[place] / max(mean_s, 1e-9))
    view = evidence.view(number)
    slow = _held_back(evidence, view) if view is not None and view.gpu else ""
    if slow:
        return Verdict(
            kind="throttled GPU", rank=number, share=share,
            text=f"the GPU of rank {number} is held back ({slow}), and the others wait "
            f"{_percent(share)} of their time in calls",
            advice="see its temperature and power (Overview)",
        )  # fmt: skip
    if most <= _EVEN:
        text = f"ranks wait {_percent(share)} of their time in calls for each other, in turns"
        return Verdict(
            kind="uneven ranks", rank=-1, share=share, text=text,
            advice="see on the timeline who is late in which task",
        )  # fmt: skip
    return Verdict(
        kind="uneven ranks", rank=number, share=share,
        text=f"rank {number} computes {most:.2f} times as long as the mean, and the others wait "
        f"{_percent(share)} of their time in calls",
        advice="layout=\"balanced\" evens out what a mask leaves; if it is even, rank "
        f"{number}'s device is slower",
    )  # fmt: skip


def _overhead(evidence: Evidence) -> Verdict | None:
    """What of the time in calls is neither in tasks nor in waits."""
    names = ("compute_s", "exposed_s", "skew_s", "late_s")
    share = 1.0 - sum(map(evidence.share, names))
    return Verdict(
        kind="overhead", rank=-1, share=max(0.0, share),
        text=f"calls spend {_percent(share)} of their time neither computing nor waiting: they "
        "are small",
        advice="longer sequences make more of a call",
    )  # fmt: skip


def _full_host(evidence: Evidence) -> Verdict | None:
    """Ranks on CPUs that compute for longer than they have a core."""
    verdicts = []
    for host in {rank.host for rank in evidence.ranks if rank.status == "live"}:
        source = f"host:{host}"
        if (evidence.value(source, "cpu_percent") or 0.0) < _FULL_PERCENT:
            continue
        ranks = [rank for rank in evidence.ranks if (rank.host, rank.device) == (host, "cpu")]
        pairs = [
            (
                evidence.value(rank.source, "compute_percent"),
                evidence.value(rank.source, "process_percent"),
            )
            for rank in ranks
        ]
        known = [(busy, got) for busy, got in pairs if busy is not None and got is not None]
        if not known:
            continue
        share = sum(max(0.0, busy - got) for busy, got in known) / len(known) / 100
        got = sum(got for _, got in known) / len(known)
        cores = evidence.sources[source].about.get("cores", "?")
        text = f"host {host} is full: {len(ranks)} ranks on {cores} cores, each gets {got:.0f} % "
        advice = "start as many ranks as there are cores, or end what else runs there (top)"
        full = Verdict(kind="full host", rank=-1, share=share, text=f"{text}of one", advice=advice)
        verdicts.append(full)
    return max(verdicts, key=lambda verdict: verdict.share, default=None)


def _held_back(evidence: Evidence, rank: RankView) -> str:
    bits = int(evidence.value(rank.gpu, "throttle_bits") or 0)
    return ", ".join(throttle_reasons(bits & _HELD_BACK))


def _nothing(evidence: Evidence) -> Verdict:
    between_s = sum(float(times.between_s.sum()) for times in evidence.groups)
    total_s = sum(float(times.total_s.sum()) for times in evidence.groups)
    share = between_s / max(between_s + total_s, 1e-9)
    if share > _MOST:
        return Verdict(
            kind="outside", rank=-1, share=share,
            text=f"{_percent(share)} of the time is outside of calls: the rest of the step limits "
            "the job, not attention",
            advice="profile the rest (torch.profiler)",
        )  # fmt: skip
    computing = _percent(evidence.share("compute_s"))
    text = f"no wait is worth mentioning: ranks compute {computing} of their time in calls"
    return Verdict(kind="nothing", rank=-1, share=0.0, text=text, advice="")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# What may limit a job.
RULES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    _comes_late,
    _in_spans,
    _full_host,
    _wire,
    _uneven,
    _overhead,
)
