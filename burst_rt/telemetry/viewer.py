"""A viewer in a process of its own: asks a running hub, over its socket. One in the hub's process asks its `State` itself."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from burst_rt.errors import ConfigError
from burst_rt.telemetry.messages import Ask
from burst_rt.telemetry.views import SeriesView, Snapshot, TimelineView
from burst_rt.telemetry.wire import Frames, connect, frame

__all__ = ["Viewer"]

_View = TypeVar("_View")


class Viewer:
    """A connection to a hub. address, secret: as ranks have them (BURST_RT_TELEMETRY, BURST_RT_TELEMETRY_SECRET).

    Every question blocks at most `timeout_s`. Raises ConfigError where the hub does not answer.
    """

    def __init__(self, address: str, secret: str, timeout_s: float = 5.0) -> None:
        self._secret = secret
        self._frames = Frames(max_bytes=256 << 20)
        try:
            self._socket = connect(address, timeout_s)
        except OSError as error:
            raise ConfigError(f"no telemetry hub at {address}: {error}. A hub ends with its job") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def snapshot(self) -> Snapshot:
        """See `State.snapshot`."""
        return self._ask("snapshot", Snapshot)

    def series(
        self, sources: Sequence[str] = (), metrics: Sequence[str] = (), since_s: float = -600.0, limit: int = 2000
    ) -> list[SeriesView]:
        """See `State.series`; of several sources (none named: all)."""
        return self._ask("series", list[SeriesView], sources=list(sources), metrics=list(metrics), since_s=since_s, limit=limit)

    def timeline(self, since_s: float = -10.0, until_s: float | None = None, ranks: Sequence[int] = (), limit: int = 2000) -> TimelineView:
        """See `State.timeline`."""
        return self._ask("timeline", TimelineView, since_s=since_s, until_s=until_s, ranks=list(ranks), limit=limit)

    def _ask(self, what: str, kind: type[_View], **options: Any) -> _View:  # those of Ask
        try:
            self._socket.sendall(frame(msgspec.msgpack.encode(Ask(self._secret, what, **options))))
            while data := self._socket.recv(1 << 16):
                for payload in self._frames.feed(data):
                    return msgspec.json.decode(payload, type=kind)
        except OSError as error:
            raise ConfigError(f"the telemetry hub does not answer: {error}") from error
        raise ConfigError("the telemetry hub closed the connection: another secret, or the job is over")
