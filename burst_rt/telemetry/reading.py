"""Reading a record for its calls: each call with the spans of all ranks that have it, in the hub's time. For traces and summaries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from burst_rt.scheduler import Graph
from burst_rt.telemetry.messages import Call, Group, Heartbeat, Plan
from burst_rt.telemetry.record import Record
from burst_rt.telemetry.timeline import Kept, Together, graph_of, together

__all__ = ["CallOfAll", "calls_of"]

# Calls that wait for the rest of their ranks; the oldest is then given as it is.
_MAX_OPEN = 2000


@dataclass
class CallOfAll:
    """A call. members: ranks of the job, by place in the group. ranks: what there is of each; whole: where all is there."""

    group: str
    number: int
    members: list[int]
    ranks: dict[int, tuple[Plan, Kept]] = field(default_factory=dict)
    whole: Together | None = None

    @property
    def kind(self) -> str:
        """ "forward", "backward" or "pipeline"."""
        return next(iter(self.ranks.values()))[0].kind


def calls_of(record: Record) -> Iterator[CallOfAll]:
    """The calls of a record, about in the order in which they ended."""
    groups: dict[str, list[int]] = {}
    plans: dict[tuple[int, int], Plan] = {}
    graphs: dict[tuple[int, int], Graph] = {}
    offsets: dict[int, float] = {}
    waiting: OrderedDict[tuple[str, int], CallOfAll] = OrderedDict()

    def finished(call: CallOfAll) -> CallOfAll:
        if len(call.ranks) == len(call.members):
            keys = [(rank, call.ranks[rank][1].plan) for rank in call.members]
            for place, key in enumerate(keys):
                if key not in graphs:
                    graphs[key] = graph_of(plans[key], place, len(keys))
            whole = [call.ranks[rank] for rank in call.members]
            call.whole = together([plan for plan, _ in whole], [kept for _, kept in whole], [graphs[key] for key in keys])
        return call

    for entry in record:
        rank, message = entry.rank, entry.message
        if isinstance(message, Heartbeat):
            offsets[rank] = message.offset_s if message.rtt_s >= 0 else entry.at_s - message.sent_s
        elif isinstance(message, Group):
            groups[message.name] = message.ranks
        elif isinstance(message, Plan):
            plans[rank, message.number] = message
        elif isinstance(message, Call) and (rank, message.plan) in plans and message.group in groups:
            key, offset_s = (message.group, message.number), offsets.get(rank, 0.0)
            call = waiting.setdefault(key, CallOfAll(*key, groups[message.group]))
            kept = Kept(*key, message.plan, message.started_s + offset_s, message.ended_s + offset_s, message.wait_s, message.spans)
            call.ranks[rank] = (plans[rank, message.plan], kept)
            if len(call.ranks) == len(call.members):
                yield finished(waiting.pop(key))
            elif len(waiting) > _MAX_OPEN:
                yield waiting.popitem(last=False)[1]
    yield from waiting.values()
