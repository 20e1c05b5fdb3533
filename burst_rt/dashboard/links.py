"""The links of the ring: how many bytes a second each carries, and which is slow or silent.

How many bytes a rank sends is exact: counters say it. How these divide over the rank's peers, and
how fast a message moves once both ends have been posted, come from the spans of the last seconds,
as far as all ranks' spans are there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from typing import NamedTuple, TypeAlias

import msgspec

from burst_rt.telemetry.model.views import RankView, Snapshot, TimelineView
from burst_rt.telemetry.read.viewer import Viewer

__all__ = ["WINDOW_S", "LinkStates", "LinkView"]

WINDOW_S = 5.0
# A link is slow if its messages move at less than this part of the median link's speed, over at
# least this number of messages.
_SLOW = 1 / 3
_MIN_MESSAGES = 4
# Seconds until a rank that waits for one message counts as stuck.
_SILENT_S = 2.0
_MAX_LINKS = 4096
# Seconds between two readings of spans, and maximum number of them.
_PERIOD_S = 1.0
_MAX_SPANS = 4000
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


_Link: TypeAlias = tuple[int, int]  # sender, receiver


class _Moved(NamedTuple):
    """Totals of the messages of one link."""

    size_bytes: int
    moving_s: float  # time in which at least one message was on the wire
    messages: int

    @property
    def speed(self) -> float:
        """Bytes a second."""
        return self.size_bytes / self.moving_s


class LinkStates:
    """The links that there have been, so that a link that falls silent is still shown."""

    def __init__(self) -> None:
        self._shares: dict[_Link, float] = {}
        self._moved: dict[_Link, _Moved] = {}
        self._receives: set[str] = set()  # names of the tasks that receive
        self._read_s = -math.inf

    def read(self, viewer: Viewer) -> tuple[Snapshot, list[LinkView]]:
        """The present of a job, and its links. Blocks as the viewer does. Spans are asked for once
        a second, however often this is called.
        """
        snapshot = viewer.snapshot()
        now_s = time.monotonic()
        if now_s - self._read_s >= _PERIOD_S:
            self._read_s = now_s
            self.look(viewer.timeline(-WINDOW_S, None, (), _MAX_SPANS))
        return snapshot, self.now(snapshot)

    def look(self, recent: TimelineView) -> None:
        """Takes the spans of the last WINDOW_S."""
        self._moved = _moved(recent)
        spans = (span for call in recent.calls for span in call.spans)
        self._receives = {span.name for span in spans if span.receives} or self._receives
        sent: dict[int, int] = defaultdict(int)
        for (sender, _), moved in self._moved.items():
            sent[sender] += moved.size_bytes
        # A rank that has sent may have other peers now: its former links count nothing.
        self._shares |= {link: 0.0 for link in self._shares if link[0] in sent}
        for link, moved in self._moved.items():
            if link in self._shares or len(self._shares) < _MAX_LINKS:
                self._shares[link] = moved.size_bytes / max(1, sent[link[0]])

    def now(self, snapshot: Snapshot) -> list[LinkView]:
        """The links of a snapshot."""
        live = {rank.rank for rank in snapshot.ranks if rank.status == "live"}
        silent, slow = self._silent(snapshot), self._slow()
        rates = {
            source.ranks[0]: source.values.get("sent_bytes_per_s", 0.0)
            for source in snapshot.sources
            if source.kind == "process"
        }
        views = []
        for link, share in sorted(self._shares.items()):
            sender, receiver = link
            state = "silent" if link in silent else "slow" if link in slow else "ok"
            # The last rate of a rank that has ceased to be live says nothing about the present.
            moves = state != "silent" and sender in live
            views.append(
                LinkView(
                    sender=sender,
                    receiver=receiver,
                    bytes_per_s=rates.get(sender, 0.0) * share if moves else 0.0,
                    moving_bytes_per_s=self._moved[link].speed if link in self._moved else None,
                    state=state,
                )
            )
        return views

    def _silent(self, snapshot: Snapshot) -> set[_Link]:
        """The links that have an end which is lost, silent or stuck."""
        ranks, now_s = snapshot.ranks, snapshot.job.now_s
        present = {rank.rank for rank in ranks if rank.status not in ("lost", "silent")}
        stuck = {rank.rank for rank in ranks if self._is_stuck(rank, now_s)}
        # When a ring stalls, most ranks wait for the rank before them, and that one waits too. The
        # fault lies where the sender is not waiting. Where all wait, nothing tells the links apart,
        # and all are silent.
        waiting = stuck if len(stuck) < len(ranks) else set()
        return {
            (sender, receiver)
            for sender, receiver in self._shares
            if not {sender, receiver} <= present or (receiver in stuck and sender not in waiting)
        }

    def _slow(self) -> set[_Link]:
        """The links whose messages move at less than `_SLOW` of the median link's speed."""
        speeds = [moved.speed for moved in self._moved.values()]
        usual = statistics.median(speeds) if len(speeds) > 1 else 0.0
        return {
            link
            for link, moved in self._moved.items()
            if moved.messages >= _MIN_MESSAGES and moved.speed < _SLOW * usual
        }

    def _is_stuck(self, rank: RankView, now_s: float) -> bool:
        return (
            rank.call >= 0
            and rank.doing in self._receives
            and now_s - rank.doing_since_s > _SILENT_S
        )


def _moved(recent: TimelineView) -> dict[_Link, _Moved]:
    posted_s = {
        (call.rank, call.group, call.call, span.task): span.issued_s
        for call in recent.calls
        for span in call.spans
    }
    messages: dict[_Link, list[tuple[float, float, int]]] = defaultdict(list)
    for flow in recent.flows:
        # A message is on the wire from when both of its ends have been posted.
        receive = flow.receiver, flow.group, flow.call, flow.receive_task
        begun_s = max(flow.sent_s, posted_s.get(receive, flow.sent_s))
        messages[flow.sender, flow.receiver].append((begun_s, flow.received_s, flow.size_bytes))
    return {link: _moved_by(its_messages) for link, its_messages in messages.items()}


def _moved_by(messages: list[tuple[float, float, int]]) -> _Moved:
    moving_s, until_s = 0.0, -math.inf
    for begun_s, ended_s, _ in sorted(messages):
        moving_s += max(0.0, ended_s - max(begun_s, until_s))
        until_s = max(until_s, ended_s)
    return _Moved(sum(size for _, _, size in messages), max(_FLOOR_S, moving_s), len(messages))
