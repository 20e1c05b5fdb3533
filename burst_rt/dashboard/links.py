"""The links of the ring: how many bytes a second each carries, and which is slow or silent. For: the ring of the dashboard, `top`, `/metrics`.

Bytes of a rank are exact (counters); how they divide over its peers, and how fast a message moves while both ends have been posted, come
from the spans of the last seconds, as far as they are whole.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import NamedTuple

import msgspec

from burst_rt.telemetry.views import RankView, Snapshot, TimelineView

__all__ = ["WINDOW_S", "LinkView", "Links"]

WINDOW_S = 5.0
# Slow: its messages move at less than this part of the median link's speed, over at least so many messages.
_SLOW = 1 / 3
_MIN_MESSAGES = 4
# A receiver that has been at one task for so long, in a call with this sender, hears nothing.
_SILENT_S = 2.0
_MAX_LINKS = 4096
_FLOOR_S = 1e-6


class LinkView(msgspec.Struct):
    """From rank `sender` to `receiver`. bytes_per_s: now; moving_bytes_per_s: while messages were on the wire, None where no spans say.

    state: "ok", "slow" (its messages move at under a third of the median link's speed), "silent" (an end is lost, silent or stuck).
    """

    sender: int
    receiver: int
    bytes_per_s: float
    moving_bytes_per_s: float | None
    state: str


class _Moved(NamedTuple):
    size_bytes: int
    moving_s: float
    messages: int


class Links:
    """Remembers which links there are, so that one that falls silent is still shown."""

    def __init__(self) -> None:
        self._shares: dict[tuple[int, int], float] = {}
        self._speeds: dict[tuple[int, int], float] = {}

    def update(self, snapshot: Snapshot, recent: TimelineView) -> list[LinkView]:
        """The links now. `recent`: the spans of the last WINDOW_S."""
        moved = _moved(recent)
        sent: dict[int, int] = defaultdict(int)
        for (sender, _), some in moved.items():
            sent[sender] += some.size_bytes
        for sender in sent:
            # Its peers may be others now.
            for link in [link for link in self._shares if link[0] == sender]:
                self._shares[link] = 0.0
        for link, some in moved.items():
            if link in self._shares or len(self._shares) < _MAX_LINKS:
                self._shares[link] = some.size_bytes / max(1, sent[link[0]])
                self._speeds[link] = some.size_bytes / max(_FLOOR_S, some.moving_s)
        ranks = {rank.rank: rank for rank in snapshot.ranks}
        total = {source.ranks[0]: source.values.get("sent_bytes_per_s", 0.0) for source in snapshot.sources if source.kind == "process"}
        usual = statistics.median(self._speeds[link] for link in moved) if len(moved) > 1 else 0.0
        views = []
        for link, share in sorted(self._shares.items()):
            sender, receiver = link
            silent = _silent(ranks.get(sender), ranks.get(receiver), snapshot.job.now_s)
            known = moved.get(link)
            slow = known is not None and known.messages >= _MIN_MESSAGES and self._speeds[link] < _SLOW * usual
            rate = 0.0 if silent else total.get(sender, 0.0) * share
            views.append(LinkView(sender, receiver, rate, self._speeds.get(link), "silent" if silent else "slow" if slow else "ok"))
        return views


def _moved(recent: TimelineView) -> dict[tuple[int, int], _Moved]:
    posted = {(span.rank, span.call, span.task): span.issued_s for span in recent.spans}
    found: dict[tuple[int, int], _Moved] = {}
    for flow in recent.flows:
        link = (flow.sender, flow.receiver)
        begun_s = max(flow.sent_s, posted.get((flow.receiver, flow.call, flow.receive_task), flow.sent_s))
        old = found.get(link, _Moved(0, 0.0, 0))
        moving_s = max(_FLOOR_S, flow.received_s - begun_s)
        found[link] = _Moved(old.size_bytes + flow.size_bytes, old.moving_s + moving_s, old.messages + 1)
    return found


def _silent(sender: RankView | None, receiver: RankView | None, now_s: float) -> bool:
    if sender is None or receiver is None or {sender.status, receiver.status} & {"lost", "silent"}:
        return True
    # Both are in one call, the receiver is stuck in a transfer, the sender in something else.
    same = sender.group == receiver.group and sender.call == receiver.call >= 0
    return same and "recv" in receiver.doing and now_s - receiver.doing_since_s > _SILENT_S
