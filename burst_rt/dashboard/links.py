"""The links of the ring: how many bytes a second each carries, and which is slow or silent.

How many bytes a rank sends is exact: counters say it. How these divide over the rank's peers, and
how fast a message moves once both ends have been posted, come from the spans of the last seconds,
as far as all ranks' spans are there.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import NamedTuple

import msgspec

from burst_rt.telemetry.model.views import RankView, Snapshot, TimelineView

__all__ = ["WINDOW_S", "LinkView", "Links"]

WINDOW_S = 5.0
# A link is slow if its messages move at less than this part of the median link's speed, over at
# least this number of messages.
_SLOW = 1 / 3
_MIN_MESSAGES = 4
# Seconds until a rank that waits for one message counts as stuck.
_SILENT_S = 2.0
_MAX_LINKS = 4096
_FLOOR_S = 1e-6


class LinkView(msgspec.Struct, kw_only=True):
    """The link from rank `sender` to rank `receiver`."""

    sender: int
    receiver: int
    bytes_per_s: float  # now
    moving_bytes_per_s: float | None  # while messages were on the wire; None where no spans say it
    # "ok"; "slow": the link's messages move at under a third of the median link's speed; "silent":
    # an end is lost, silent or stuck.
    state: str


class _Moved(NamedTuple):
    """Totals of the messages of one link."""

    size_bytes: int
    moving_s: float  # time in which at least one message was on the wire
    messages: int

    @property
    def speed(self) -> float:
        """Bytes a second."""
        return self.size_bytes / self.moving_s


class Links:
    """The links that there have been, so that a link that falls silent is still shown."""

    def __init__(self) -> None:
        self._shares: dict[tuple[int, int], float] = {}
        self._moved: dict[tuple[int, int], _Moved] = {}
        self._receives: set[str] = set()  # names of the tasks that receive

    def look(self, recent: TimelineView) -> None:
        """Takes the spans of the last WINDOW_S."""
        self._moved = _moved(recent)
        self._receives = {span.name for span in recent.spans if span.receives} or self._receives
        sent: dict[int, int] = defaultdict(int)
        for (sender, _), some in self._moved.items():
            sent[sender] += some.size_bytes
        # A rank that has sent may have other peers now: its former links count nothing.
        self._shares |= {link: 0.0 for link in self._shares if link[0] in sent}
        for link, some in self._moved.items():
            if link in self._shares or len(self._shares) < _MAX_LINKS:
                self._shares[link] = some.size_bytes / max(1, sent[link[0]])

    def now(self, snapshot: Snapshot) -> list[LinkView]:
        """The links of a snapshot."""
        ranks = {rank.rank: rank for rank in snapshot.ranks}
        total = {
            source.ranks[0]: source.values.get("sent_bytes_per_s", 0.0)
            for source in snapshot.sources
            if source.kind == "process"
        }
        stuck = {rank.rank for rank in snapshot.ranks if self._stuck(rank, snapshot.job.now_s)}
        usual = (
            statistics.median(some.speed for some in self._moved.values())
            if len(self._moved) > 1
            else 0.0
        )
        views = []
        for link, share in sorted(self._shares.items()):
            sender, receiver = link
            gone = (
                sender not in ranks
                or receiver not in ranks
                or {ranks[sender].status, ranks[receiver].status} & {"lost", "silent"}
            )
            # When a ring stalls, most ranks wait for the rank before them, and that one waits too.
            # The fault lies where the sender is not waiting. Where all wait, nothing tells the
            # links apart, and all are silent.
            silent = gone or (
                receiver in stuck and (sender not in stuck or len(stuck) == len(ranks))
            )
            moved = self._moved.get(link)
            slow = (
                moved is not None
                and moved.messages >= _MIN_MESSAGES
                and moved.speed < _SLOW * usual
            )
            # The last rate of a rank that has ceased to be live says nothing about the present.
            rate = (
                total.get(sender, 0.0) * share
                if not silent and ranks[sender].status == "live"
                else 0.0
            )
            views.append(
                LinkView(
                    sender=sender,
                    receiver=receiver,
                    bytes_per_s=rate,
                    moving_bytes_per_s=moved.speed if moved else None,
                    state="silent" if silent else "slow" if slow else "ok",
                )
            )
        return views

    def _stuck(self, rank: RankView, now_s: float) -> bool:
        return (
            rank.call >= 0
            and rank.doing in self._receives
            and now_s - rank.doing_since_s > _SILENT_S
        )


def _moved(recent: TimelineView) -> dict[tuple[int, int], _Moved]:
    posted = {(span.rank, span.group, span.call, span.task): span.issued_s for span in recent.spans}
    messages: dict[tuple[int, int], list[tuple[float, float, int]]] = defaultdict(list)
    for flow in recent.flows:
        # A message is on the wire from when both of its ends have been posted.
        begun_s = max(
            flow.sent_s,
            posted.get((flow.receiver, flow.group, flow.call, flow.receive_task), flow.sent_s),
        )
        messages[flow.sender, flow.receiver].append((begun_s, flow.received_s, flow.size_bytes))
    return {link: _moved_by(some) for link, some in messages.items()}


def _moved_by(messages: list[tuple[float, float, int]]) -> _Moved:
    moving_s, until_s = 0.0, -math.inf
    for begun_s, ended_s, _ in sorted(messages):
        moving_s += max(0.0, ended_s - max(begun_s, until_s))
        until_s = max(until_s, ended_s)
    return _Moved(sum(size for _, _, size in messages), max(_FLOOR_S, moving_s), len(messages))
