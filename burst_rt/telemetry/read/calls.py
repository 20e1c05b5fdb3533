"""Reads a record for its calls: each call with the spans of all ranks that have it.

Times are the hub's. Traces and summaries are made from these calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from burst_rt.scheduler.verify import Endpoint
from burst_rt.telemetry.messages import Agreed, EndedCall, Group, Heartbeat, PlanSummary
from burst_rt.telemetry.model.timeline import KeptCall, WholeCall, match_plans, whole_call
from burst_rt.telemetry.read.record import Record

__all__ = ["CallOfAll", "calls_of"]

# The plan of a call in which the ranks only agreed.
_AGREEMENT = PlanSummary(
    number=-1, group="", kind="agreement", tasks=[], explain="", predicted_s=None
)
# Maximum number of calls that wait for the rest of their ranks; beyond that the oldest is given as
# it is.
_MAX_OPEN = 2000


@dataclass(kw_only=True)
class CallOfAll:
    """A call with the messages of each rank about it."""

    group: str
    number: int
    members: list[int]  # ranks of the job, by place in the group
    ranks: dict[int, tuple[PlanSummary, KeptCall]] = field(default_factory=dict)
    # Since the rank's call before this one had ended, in any group; without the rank's first call.
    between_s: dict[int, float] = field(default_factory=dict)
    whole: WholeCall | None = None  # None while some rank's part is missing

    @property
    def kind(self) -> str:
        """ "forward", "backward", "pipeline" or, without spans, "agreement"."""
        return next(iter(self.ranks.values()))[0].kind


def calls_of(record: Record) -> Iterator[CallOfAll]:
    """The calls of a record, nearly in the order in which they ended."""
    groups: dict[str, list[int]] = {}
    plans: dict[tuple[int, int], PlanSummary] = {}
    fitted: dict[tuple[tuple[int, int], ...], Mapping[Endpoint, Endpoint] | None] = {}
    offsets: dict[int, float] = {}
    waiting: OrderedDict[tuple[str, int], CallOfAll] = OrderedDict()
    ended_s: dict[int, float] = {}  # end of each rank's last call, on the rank's own clock

    def finished(call: CallOfAll) -> CallOfAll:
        if len(call.ranks) == len(call.members):
            whole = [call.ranks[rank] for rank in call.members]
            own = [plan for plan, _ in whole]
            key = tuple((rank, plan.number) for rank, plan in zip(call.members, own, strict=True))
            if key not in fitted:
                fitted[key] = match_plans(own)
            matched = fitted[key]
            call.whole = (
                whole_call(own, [kept for _, kept in whole], matched)
                if matched is not None
                else None
            )
        return call

    for entry in record:
        rank, message = entry.rank, entry.message
        if isinstance(message, Heartbeat):
            offsets[rank] = message.offset_s if message.rtt_s >= 0 else entry.at_s - message.sent_s
        elif isinstance(message, Group):
            groups[message.name] = message.ranks
        elif isinstance(message, PlanSummary):
            plans[rank, message.number] = message
        elif isinstance(message, EndedCall | Agreed) and rank in groups.get(message.group, ()):
            ran = message if isinstance(message, EndedCall) else None
            plan = _AGREEMENT if ran is None else plans.get((rank, ran.plan))
            if plan is None:
                continue
            key, offset_s = (message.group, message.number), offsets.get(rank, 0.0)
            call = waiting.setdefault(
                key,
                CallOfAll(
                    group=message.group, number=message.number, members=groups[message.group]
                ),
            )
            kept = KeptCall(
                group=message.group,
                number=message.number,
                plan=plan.number,
                started_s=message.started_s + offset_s,
                ended_s=message.ended_s + offset_s,
                wait_s=0.0 if ran is None else ran.wait_s,
                spans=b"" if ran is None else ran.spans,
            )
            call.ranks[rank] = (plan, kept)
            if rank in ended_s:
                call.between_s[rank] = message.started_s - ended_s[rank]
            ended_s[rank] = message.ended_s
            if len(call.ranks) == len(call.members):
                yield finished(waiting.pop(key))
            elif len(waiting) > _MAX_OPEN:
                yield waiting.popitem(last=False)[1]
    yield from waiting.values()
