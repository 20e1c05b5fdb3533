"""Calls put together: what each rank of a group tells of a call becomes one call of all.

Times are the hub's. Traces, summaries and the verdict on what limits a job are made from them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from burst_rt.telemetry.messages import Agreed, EndedCall, PlanSummary
from burst_rt.telemetry.model.timeline import CallMatcher, WholeCall

__all__ = ["AGREEMENT", "CallCollector", "CallOfAll"]

# The plan of a call in which the ranks only agreed.
AGREEMENT = PlanSummary(
    number=-1, group="", kind="agreement", tasks=[], explain="", predicted_s=None
)


@dataclass(kw_only=True)
class CallOfAll:
    """A call with the messages of each rank about it."""

    group: str
    number: int
    members: Sequence[int]  # ranks of the job, by place in the group
    ranks: dict[int, tuple[PlanSummary, EndedCall]] = field(default_factory=dict)
    # Since the rank's call before this one had ended, in any group; without the rank's first call.
    between_s: dict[int, float] = field(default_factory=dict)
    whole: WholeCall | None = None  # None while some rank's part is missing

    @property
    def kind(self) -> str:
        """ "forward", "backward", "pipeline" or, without spans, "agreement"."""
        return next(iter(self.ranks.values()))[0].kind


class CallCollector:
    """The calls that are not whole yet, at most `max_open`. matched: see `CallMatcher`."""

    def __init__(self, *, max_open: int, matched: int) -> None:
        self._max_open = max_open
        self.open: OrderedDict[tuple[str, int], CallOfAll] = OrderedDict()
        self._matcher = CallMatcher(matched)
        self._ended_s: dict[int, float] = {}  # end of each rank's last call, by the rank's clock

    def take(
        self, rank: int, message: EndedCall | Agreed, members: Sequence[int],
        plan: PlanSummary | None, offset_s: float,
    ) -> CallOfAll | None:  # fmt: skip
        """Takes one rank's part; the call that is complete with it, or that has waited longest.

        members: of the call's group. plan: of the part, None where it is not known. offset_s: from
        the rank's clock to the hub's.
        """
        part = message if isinstance(message, EndedCall) else _without_spans(message)
        if plan is None:
            return None
        key = (part.group, part.number)
        call = self.open.setdefault(
            key, CallOfAll(group=part.group, number=part.number, members=members)
        )
        started_s, ended_s = part.started_s + offset_s, part.ended_s + offset_s
        in_hub_time = msgspec.structs.replace(part, started_s=started_s, ended_s=ended_s)
        call.ranks[rank] = (plan, in_hub_time)
        before_s = self._ended_s.get(rank)
        if before_s is not None and not part.after_gap:
            # The host agrees while a device may still work on calls before.
            call.between_s[rank] = max(0.0, part.started_s - before_s)
        self._ended_s[rank] = max(part.ended_s, before_s or part.ended_s)
        if len(call.ranks) == len(members):
            plans, parts = zip(*(call.ranks[member] for member in members), strict=True)
            call.whole = self._matcher.whole(members, plans, parts)
            return self.open.pop(key)
        return self.open.popitem(last=False)[1] if len(self.open) > self._max_open else None

    def skip(self, rank: int, message: EndedCall | Agreed) -> None:
        """Leaves out a rank's part of a call; the time until its next call begins with its end."""
        self._ended_s[rank] = message.ended_s


def _without_spans(call: Agreed) -> EndedCall:
    return EndedCall(
        group=call.group, number=call.number, plan=AGREEMENT.number,
        started_s=call.started_s, ended_s=call.ended_s, compute_s=0.0, wait_s=0.0, spans=b"",
        after_gap=call.after_gap,
    )  # fmt: skip
