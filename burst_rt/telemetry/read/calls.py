"""Reads a record for its calls: each call with the spans of all ranks that have it."""

from __future__ import annotations

from collections.abc import Iterator

from burst_rt.telemetry.messages import Agreed, EndedCall, Group, PlanSummary
from burst_rt.telemetry.model.whole_calls import AGREEMENT, CallCollector, CallOfAll
from burst_rt.telemetry.read.record import Clocks, Record

__all__ = ["calls_of"]

# Maximum number of calls that wait for the rest of their ranks; beyond that the oldest is given as
# it is.
_MAX_OPEN = 2000
_MATCHED = 1000  # number of sets of plans that stay matched


def calls_of(record: Record) -> Iterator[CallOfAll]:
    """The calls of a record, nearly in the order in which they ended."""
    collector, clocks = CallCollector(max_open=_MAX_OPEN, matched=_MATCHED), Clocks()
    groups: dict[str, list[int]] = {}
    plans: dict[tuple[int, int], PlanSummary] = {}
    for entry in record:
        rank, message = entry.rank, entry.message
        clocks.hear(entry)
        if isinstance(message, Group):
            groups[message.name] = message.ranks
        elif isinstance(message, PlanSummary):
            plans[rank, message.number] = message
        elif isinstance(message, EndedCall | Agreed) and rank in groups.get(message.group, ()):
            plan = AGREEMENT if isinstance(message, Agreed) else plans.get((rank, message.plan))
            call = collector.take(rank, message, groups[message.group], plan, clocks.offset_s(rank))
            if call is not None:
                yield call
    yield from collector.open.values()
