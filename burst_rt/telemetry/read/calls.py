"""Reads a record for its calls: each call with the spans of all ranks that have it.

Times are the hub's. Traces and summaries are made from these calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from burst_rt.telemetry.messages import Agreed, EndedCall, Group, PlanSummary
from burst_rt.telemetry.model.timeline import CallMatcher, WholeCall
from burst_rt.telemetry.read.record import Clocks, Record

__all__ = ["CallOfAll", "calls_of"]

# The plan of a call in which the ranks only agreed.
_AGREEMENT = PlanSummary(
    number=-1, group="", kind="agreement", tasks=[], explain="", predicted_s=None
)
# Maximum number of calls that wait for the rest of their ranks; beyond that the oldest is given as
# it is.
_MAX_OPEN = 2000
_MATCHED = 1000  # number of sets of plans that stay matched


@dataclass(kw_only=True)
class CallOfAll:
    """A call with the messages of each rank about it."""

    group: str
    number: int
    members: list[int]  # ranks of the job, by place in the group
    ranks: dict[int, tuple[PlanSummary, EndedCall]] = field(default_factory=dict)
    # Since the rank's call before this one had ended, in any group; without the rank's first call.
    between_s: dict[int, float] = field(default_factory=dict)
    whole: WholeCall | None = None  # None while some rank's part is missing

    @property
    def kind(self) -> str:
        """ "forward", "backward", "pipeline" or, without spans, "agreement"."""
        return next(iter(self.ranks.values()))[0].kind


class _Reader:
    """The calls that are not whole yet, and what their parts are read with."""

    def __init__(self) -> None:
        self.groups: dict[str, list[int]] = {}
        self.plans: dict[tuple[int, int], PlanSummary] = {}
        self.open: OrderedDict[tuple[str, int], CallOfAll] = OrderedDict()
        self._matcher = CallMatcher(_MATCHED)
        self._ended_s: dict[int, float] = {}  # end of each rank's last call, by the rank's clock

    def take(self, rank: int, message: EndedCall | Agreed, offset_s: float) -> CallOfAll | None:
        """Takes one rank's part; the call that is complete with it, or that has waited longest."""
        part = message if isinstance(message, EndedCall) else _without_spans(message)
        plan = _AGREEMENT if part is not message else self.plans.get((rank, part.plan))
        if plan is None:
            return None
        key, members = (part.group, part.number), self.groups[part.group]
        call = self.open.setdefault(
            key, CallOfAll(group=part.group, number=part.number, members=members)
        )
        started_s, ended_s = part.started_s + offset_s, part.ended_s + offset_s
        in_hub_time = msgspec.structs.replace(part, started_s=started_s, ended_s=ended_s)
        call.ranks[rank] = (plan, in_hub_time)
        if rank in self._ended_s:
            call.between_s[rank] = part.started_s - self._ended_s[rank]
        self._ended_s[rank] = part.ended_s
        if len(call.ranks) == len(members):
            plans, parts = zip(*(call.ranks[member] for member in members), strict=True)
            call.whole = self._matcher.whole(members, plans, parts)
            return self.open.pop(key)
        return self.open.popitem(last=False)[1] if len(self.open) > _MAX_OPEN else None


def calls_of(record: Record) -> Iterator[CallOfAll]:
    """The calls of a record, nearly in the order in which they ended."""
    reader, clocks = _Reader(), Clocks()
    for entry in record:
        rank, message = entry.rank, entry.message
        clocks.hear(entry)
        if isinstance(message, Group):
            reader.groups[message.name] = message.ranks
        elif isinstance(message, PlanSummary):
            reader.plans[rank, message.number] = message
        elif isinstance(message, EndedCall | Agreed) and rank in reader.groups.get(
            message.group, ()
        ):
            call = reader.take(rank, message, clocks.offset_s(rank))
            if call is not None:
                yield call
    yield from reader.open.values()


def _without_spans(call: Agreed) -> EndedCall:
    return EndedCall(
        group=call.group, number=call.number, plan=_AGREEMENT.number,
        started_s=call.started_s, ended_s=call.ended_s, compute_s=0.0, wait_s=0.0, spans=b"",
    )  # fmt: skip
