"""The time of a model, and what happened until then."""

from __future__ import annotations

from collections import deque
from itertools import islice

from burst_rt.telemetry.messages import Severity
from burst_rt.telemetry.model.views import EventView

__all__ = ["EventLog"]

_MAX_EVENTS = 1000
_SHOWN_EVENTS = 100


class EventLog:
    """The last events, oldest first, and the model's time, which each new event gets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events: deque[EventView] = deque(maxlen=_MAX_EVENTS)
        self._count = 0  # ever added

    def add(self, rank: int, severity: Severity, kind: str, text: str) -> None:
        """Something happens now. rank: -1 means the whole job."""
        self._count += 1
        event = EventView(
            number=self._count, at_s=self.now_s, rank=rank, severity=severity, kind=kind, text=text
        )
        self.events.append(event)

    def after(self, number: int) -> list[EventView]:
        """The events that have a higher number, oldest first."""
        return self._last(max(0, self._count - number))

    def shown(self) -> list[EventView]:
        """The events of a snapshot, oldest first."""
        return self._last(_SHOWN_EVENTS)

    def _last(self, count: int) -> list[EventView]:
        return list(islice(self.events, max(0, len(self.events) - count), None))
