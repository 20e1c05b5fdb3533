"""The steps and spans of a job's own code: those of the last minute, rank by rank.

Their number is bounded; the counts of `messages.Counts` miss none.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Iterable
from itertools import takewhile

from burst_rt.telemetry.messages import Hello, PhaseEnded
from burst_rt.telemetry.model.ranks import Rank
from burst_rt.telemetry.model.timeline import KEPT_S
from burst_rt.telemetry.model.views import PhaseView, RankView, shared_fields

__all__ = ["Phases", "step_share"]

_MOST = 1 << 16  # maximum number of all ranks' together, some 200 bytes each


class Phases:
    """See the module."""

    def __init__(self) -> None:
        self._by_rank: dict[int, deque[PhaseView]] = {}

    def join(self, hello: Hello) -> None:
        """A rank joins, or joins again: what was known of it is of another process."""
        share = _MOST // max(1, hello.world_size, len(self._by_rank))
        self._by_rank[hello.rank] = deque(maxlen=max(1, share))

    def add(self, rank: Rank, phase: PhaseEnded) -> None:
        """A step or a span has ended on a rank."""
        kept = self._by_rank[rank.view.rank]
        times = {"started_s": rank.at(phase.started_s), "ended_s": rank.at(phase.ended_s)}
        view = PhaseView(**shared_fields(phase, PhaseView) | times, rank=rank.view.rank)
        view.name = sys.intern(view.name)
        kept.append(view)
        while kept[0].ended_s < view.ended_s - KEPT_S:
            kept.popleft()

    def window(
        self, since_s: float, until_s: float, ranks: Iterable[int], limit: int
    ) -> tuple[list[PhaseView], int]:
        """What has a part in the window, in the order of its ends: at most `limit`, the newest; and
        how many are left out. ranks: none named means all.
        """
        visible = [number for number in (ranks or self._by_rank) if number in self._by_rank]
        inside = [
            phase
            for number in visible
            for phase in self._by_rank[number]
            if phase.ended_s >= since_s and phase.started_s <= until_s
        ]
        newest = heapq.nlargest(max(0, limit), inside, key=lambda phase: phase.ended_s)
        return newest[::-1], len(inside) - len(newest)

    def shares(self, since_s: float, until_s: float) -> dict[int, dict[str, float]]:
        """By rank and name: the part of the window in spans of the rank's own thread, at most 1."""
        shares: dict[int, dict[str, float]] = {}
        for number, kept in self._by_rank.items():
            sums = shares[number] = {}
            counted_s: dict[str, float] = {}  # since when a name's time has been counted
            for phase in takewhile(lambda phase: phase.ended_s > since_s, reversed(kept)):
                if phase.name and not phase.aside:
                    # Spans of one name may lie in each other.
                    ended_s = min(phase.ended_s, counted_s.get(phase.name, until_s))
                    took_s = ended_s - max(phase.started_s, since_s)
                    sums[phase.name] = sums.get(phase.name, 0.0) + max(0.0, took_s)
                    counted_s[phase.name] = min(ended_s, phase.started_s)
            for name, took_s in sums.items():
                sums[name] = min(1.0, took_s / max(until_s - since_s, 1e-9))
        return shares


def step_share(ranks: Iterable[RankView]) -> float | None:
    """Attention's part of the ranks' time in steps; None without a step."""
    times = [(rank.step_call_s, rank.step_s) for rank in ranks]
    step_s = sum(took_s for _, took_s in times)
    return sum(call_s for call_s, _ in times) / step_s if step_s > 0 else None
