"""A record at any time of it, for viewers that go back and forth.

A model goes forward only. So a `Tape` keeps a few models of the same record, each at its own time,
and winds the nearest one on; where all are too late, it begins again. That takes as long as reading
the record up to there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from burst_rt.telemetry.messages import Recorded
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.model.views import SeriesView, Snapshot, TimelineView
from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.viewer import ModelViewer

__all__ = ["Tape", "TapeViewer", "replay"]

# Models kept, the end of the record not counted. Each is as large as a hub's.
_MODELS = 3


class _Reel:
    """A model, and the entries of the record that it has not had."""

    def __init__(self, record: Record) -> None:
        self.model = JobModel(record.header.began_at_s, record=str(record.path), replayed=True)
        self._entries: Iterator[Recorded] = iter(record)
        self._next = next(self._entries, None)

    def wind(self, until_s: float) -> None:
        """Goes forward to a time; to the last entry where that is infinite."""
        while self._next is not None and self._next.at_s <= until_s:
            entry = self._next
            self.model.advance(entry.at_s)
            self.model.apply(entry.at_s, entry.rank, entry.message)
            self._next = next(self._entries, None)
        if self._next is not None:
            self.model.advance(until_s)


def replay(record: Record, until_s: float | None = None) -> JobModel:
    """The model as it was `until_s` seconds after the hub began; without that, at the end."""
    reel = _Reel(record)
    reel.wind(math.inf if until_s is None else until_s)
    return reel.model


class Tape:
    """See the module. until_s: the record ends there for viewers; None: where it ends. Reads the
    record once to its end. Raises InputError, as `Record` does.
    """

    def __init__(self, record: Record, until_s: float | None = None) -> None:
        self.record = record
        self._end = replay(record, until_s)
        self.length_s = self._end.length_s = self._end.now_s
        self._reels: list[_Reel] = []  # the last used last

    def at(self, at_s: float) -> JobModel:
        """The model at a time, which must not be fed. A later call may take it further. Times
        beyond the ends are the ends.
        """
        if not at_s < self.length_s:
            return self._end
        before = [reel for reel in self._reels if reel.model.now_s <= at_s]
        reel = max(before, key=lambda reel: reel.model.now_s, default=None)
        if reel is None:
            reel = _Reel(self.record)
            reel.model.length_s = self.length_s
        else:
            self._reels.remove(reel)
        reel.wind(max(0.0, at_s))
        self._reels = [*self._reels[1 - _MODELS :], reel]
        return reel.model


class TapeViewer:
    """Shows a tape, at its end unless asked for another time (`at`). See `Viewer`."""

    # Winding takes long.
    blocks = True

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.record = tape.record
        self._end = self.at(math.inf)

    def at(self, at_s: float) -> ModelViewer:
        """What there was to see at a time. Blocks while the tape is wound, for as long as it takes
        to read the record.
        """
        return ModelViewer(self._tape.at(at_s))

    def snapshot(self) -> Snapshot:
        """See `Viewer`."""
        return self._end.snapshot()

    def series(
        self, sources: Sequence[str], metrics: Sequence[str], since_s: float, limit: int
    ) -> list[SeriesView]:
        """See `Viewer`."""
        return self._end.series(sources, metrics, since_s, limit)

    def timeline(
        self, since_s: float, until_s: float | None, ranks: Sequence[int], limit: int
    ) -> TimelineView:
        """See `Viewer`."""
        return self._end.timeline(since_s, until_s, ranks, limit)

    def close(self) -> None:
        """See `Viewer`. There is nothing to let go."""
