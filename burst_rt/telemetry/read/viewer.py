"""Where a viewer reads: from a model in its own process, or from a hub in another process.

A model in its own process is the hub's, or a replay's. All viewers answer in the types of `views`,
so whatever shows a job works on any of them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import msgspec

from burst_rt.errors import ConfigError, Stalled
from burst_rt.telemetry.messages import Ask, Stopping
from burst_rt.telemetry.model.views import Lost, SeriesView, Snapshot, TimelineView
from burst_rt.telemetry.wire import Frames, connect_to_hub, frame

if TYPE_CHECKING:
    # A launcher asks a hub, and needs no model.
    from burst_rt.telemetry.model.job_model import JobModel

__all__ = ["HubViewer", "ModelViewer", "Viewer"]

_View = TypeVar("_View")


class Viewer(Protocol):
    """Answers questions about a job. Times are seconds since the hub began; negative ones count
    back from now. May raise ConfigError where the hub is gone, and Stalled where it is late.
    """

    @property
    def blocks(self) -> bool:
        """Whether an answer may take long: another process gives it."""

    def snapshot(self) -> Snapshot:
        """The present."""

    def series(
        self, sources: Sequence[str], metrics: Sequence[str], since_s: float, limit: int
    ) -> list[SeriesView]:
        """Histories of sources from `since_s` to now, at most `limit` rows each. sources, metrics:
        none named means all.
        """

    def timeline(
        self, since_s: float, until_s: float | None, ranks: Sequence[int], limit: int
    ) -> TimelineView:
        """The spans of a window, at most `limit`, the newest. ranks: none named means all."""

    def close(self) -> None:
        """Lets a hub go that has ended. Another question begins again."""


class ModelViewer:
    """Reads a model in this process. now: the hub's clock; None for a replay, where time does not
    pass.
    """

    blocks = False

    def __init__(self, model: JobModel, now: Callable[[], float] | None = None) -> None:
        self._model = model
        self._now = now

    def snapshot(self) -> Snapshot:
        """See `Viewer`."""
        return self._current().snapshot()

    def series(
        self, sources: Sequence[str], metrics: Sequence[str], since_s: float, limit: int
    ) -> list[SeriesView]:
        """See `Viewer`."""
        model = self._current()
        names = [name for name in sources or model.sources if name in model.sources]
        return [model.series(name, metrics, since_s, None, limit) for name in names]

    def timeline(
        self, since_s: float, until_s: float | None, ranks: Sequence[int], limit: int
    ) -> TimelineView:
        """See `Viewer`."""
        return self._current().timeline(since_s, until_s, ranks, limit)

    def close(self) -> None:
        """See `Viewer`. There is nothing to let go."""

    def _current(self) -> JobModel:
        if self._now is not None:
            self._model.advance(self._now())
        return self._model


class HubViewer:
    """A connection to a hub. address, secret: as ranks have them (BURST_RT_TELEMETRY,
    BURST_RT_TELEMETRY_SECRET).

    Every question blocks at most `timeout_s`. It raises Stalled where the hub has not answered by
    then (the viewer may ask again), and ConfigError where the hub is gone.
    """

    blocks = True

    def __init__(self, address: str, secret: str, timeout_s: float = 5.0) -> None:
        self._address = address
        self._secret = secret
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection. Another question begins a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def snapshot(self) -> Snapshot:
        """See `Viewer`."""
        return self._ask("snapshot", Snapshot)

    def first_lost(self) -> Lost | None:
        """See `JobModel.first_lost`."""
        return self._ask("first_lost", Lost | None)  # type: ignore[arg-type]  # a union is not a type to mypy

    def stopping(self, signal_name: str) -> None:
        """Tells the hub that the job is being ended; returns once the hub knows."""
        self._exchange(Stopping(self._secret, signal_name), type(None))

    def series(
        self,
        sources: Sequence[str] = (),
        metrics: Sequence[str] = (),
        since_s: float = -600.0,
        limit: int = 2000,
    ) -> list[SeriesView]:
        """See `Viewer`."""
        return self._ask(
            "series", list[SeriesView],
            sources=list(sources), metrics=list(metrics), since_s=since_s, limit=limit,
        )  # fmt: skip

    def timeline(
        self,
        since_s: float = -10.0,
        until_s: float | None = None,
        ranks: Sequence[int] = (),
        limit: int = 2000,
    ) -> TimelineView:
        """See `Viewer`."""
        return self._ask(
            "timeline", TimelineView,
            since_s=since_s, until_s=until_s, ranks=list(ranks), limit=limit,
        )  # fmt: skip

    def _connect(self) -> socket.socket:
        if self._socket is None:
            self._frames = Frames(max_bytes=256 << 20)
            try:
                self._socket = connect_to_hub(self._address, self._timeout_s)
            except TimeoutError as error:
                raise self._late() from error
            except OSError as error:
                raise ConfigError(
                    f"no telemetry hub at {self._address}: {error}. A hub ends with its job"
                ) from error
        return self._socket

    def _ask(self, what: str, kind: type[_View], **options: Any) -> _View:  # fields of Ask
        return self._exchange(Ask(secret=self._secret, what=what, **options), kind)

    def _exchange(self, question: Ask | Stopping, kind: type[_View]) -> _View:
        peer = self._connect()
        try:
            peer.sendall(frame(msgspec.msgpack.encode(question)))
            while data := peer.recv(1 << 16):
                for payload in self._frames.feed(data):
                    return msgspec.json.decode(payload, type=kind)
        except TimeoutError as error:
            self.close()  # a late answer would be taken for the next question's
            raise self._late() from error
        except OSError as error:
            self.close()
            raise ConfigError(f"the telemetry hub does not answer: {error}") from error
        self.close()
        raise ConfigError(
            "the telemetry hub closed the connection: the secret is wrong, or the job has ended"
        )

    def _late(self) -> Stalled:
        return Stalled(
            f"the telemetry hub at {self._address} has not answered for {self._timeout_s:g} s",
            elapsed_s=self._timeout_s,
        )
