"""Where a viewer reads: from a model in its own process, or from a hub in another process.

A model in its own process is the hub's, or a replay's.

All of them answer in the types of `views`, so whatever shows a job works on any of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.model.views import SeriesView, Snapshot, TimelineView
from burst_rt.telemetry.read.viewer import Viewer

__all__ = ["HubReader", "ModelReader", "Reader"]


class Reader(Protocol):
    """Answers a viewer. Times are seconds since the hub began; negative ones count back from now.
    May raise ConfigError where the hub is gone, and Stalled where it is late.
    """

    async def snapshot(self) -> Snapshot:
        """The present."""
        ...

    async def series(
        self, sources: Sequence[str], metrics: Sequence[str], since_s: float, limit: int
    ) -> list[SeriesView]:
        """Histories of sources from `since_s` to now, at most `limit` rows each. sources, metrics:
        none named means all.
        """
        ...

    async def timeline(
        self, since_s: float, until_s: float | None, ranks: Sequence[int], limit: int
    ) -> TimelineView:
        """The spans of a window, at most `limit`, the newest. ranks: none named means all."""
        ...


class ModelReader:
    """Reads a model in this process. now: the hub's clock; None for a replay, where time does not
    pass.
    """

    def __init__(self, model: JobModel, now: Callable[[], float] | None = None) -> None:
        self._model = model
        self._now = now

    async def snapshot(self) -> Snapshot:
        return self._current().snapshot()

    async def series(
        self, sources: Sequence[str], metrics: Sequence[str], since_s: float, limit: int
    ) -> list[SeriesView]:
        model = self._current()
        known = (
            [name for name in sources if name in model.sources] if sources else list(model.sources)
        )
        return [model.series(name, metrics, since_s, None, limit) for name in known]

    async def timeline(
        self, since_s: float, until_s: float | None, ranks: Sequence[int], limit: int
    ) -> TimelineView:
        return self._current().timeline(since_s, until_s, ranks, limit)

    def _current(self) -> JobModel:
        if self._now is not None:
            self._model.advance(self._now())
        return self._model


class HubReader:
    """Asks the hub of a running job, one question at a time."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self._lock = asyncio.Lock()

    async def snapshot(self) -> Snapshot:
        async with self._lock:
            return await asyncio.to_thread(self._viewer.snapshot)

    async def series(
        self, sources: Sequence[str], metrics: Sequence[str], since_s: float, limit: int
    ) -> list[SeriesView]:
        async with self._lock:
            return await asyncio.to_thread(self._viewer.series, sources, metrics, since_s, limit)

    async def timeline(
        self, since_s: float, until_s: float | None, ranks: Sequence[int], limit: int
    ) -> TimelineView:
        async with self._lock:
            return await asyncio.to_thread(self._viewer.timeline, since_s, until_s, ranks, limit)
