"""Where a viewer reads: the model in its own process (the hub, a replay), or a hub elsewhere that it asks.

All three answer in the types of `telemetry.views`, so whatever shows a job works on any of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from burst_rt.errors import ConfigError
from burst_rt.telemetry.messages import Ask
from burst_rt.telemetry.state import State
from burst_rt.telemetry.views import SeriesView, Snapshot, TimelineView
from burst_rt.telemetry.wire import frame

__all__ = ["HubReader", "Reader", "StateReader"]

_DEADLINE_S = 5.0
_LENGTH = 4
# Of one answer: ten thousands of spans.
_MAX_ANSWER_BYTES = 128 << 20
_T = TypeVar("_T")


class Reader(Protocol):
    """Answers a viewer. Windows are seconds since the hub began; negative ones count back from now. May raise ConfigError."""

    async def snapshot(self) -> Snapshot:
        """The present."""
        ...

    async def series(self, sources: Sequence[str], metrics: Sequence[str], since_s: float, limit: int) -> list[SeriesView]:
        """Histories of sources (none: all) from `since_s` to now, at most `limit` rows each."""
        ...

    async def timeline(self, since_s: float, until_s: float | None, ranks: Sequence[int], limit: int) -> TimelineView:
        """Spans of a window, at most `limit`, the newest."""
        ...


class StateReader:
    """Reads a State of this process. now: the hub's clock; None for a replay, where time stands still."""

    def __init__(self, state: State, now: Callable[[], float] | None = None) -> None:
        self._state = state
        self._now = now

    async def snapshot(self) -> Snapshot:
        return self._current().snapshot()

    async def series(self, sources: Sequence[str], metrics: Sequence[str], since_s: float, limit: int) -> list[SeriesView]:
        state = self._current()
        known = [name for name in sources if name in state.sources] if sources else list(state.sources)
        return [state.series(name, metrics, since_s, None, limit) for name in known]

    async def timeline(self, since_s: float, until_s: float | None, ranks: Sequence[int], limit: int) -> TimelineView:
        return self._current().timeline(since_s, until_s, ranks, limit)

    def _current(self) -> State:
        if self._now is not None:
            self._state.advance(self._now())
        return self._state


class HubReader:
    """Asks the hub of a running job, over its socket. One question at a time; a broken connection is made anew by the next."""

    def __init__(self, address: str, secret: str) -> None:
        self._address = address
        self._secret = secret
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()

    async def snapshot(self) -> Snapshot:
        return await self._ask(Ask(self._secret, "snapshot"), Snapshot)

    async def series(self, sources: Sequence[str], metrics: Sequence[str], since_s: float, limit: int) -> list[SeriesView]:
        ask = Ask(self._secret, "series", since_s=since_s, sources=list(sources), metrics=list(metrics), limit=limit)
        return await self._ask(ask, list[SeriesView])

    async def timeline(self, since_s: float, until_s: float | None, ranks: Sequence[int], limit: int) -> TimelineView:
        return await self._ask(Ask(self._secret, "timeline", since_s, until_s, ranks=list(ranks), limit=limit), TimelineView)

    # Any: msgspec takes types and aliases of generic types alike.
    async def _ask(self, ask: Ask, answer: Any) -> Any:
        async with self._lock:
            try:
                return await asyncio.wait_for(self._exchange(ask, answer), _DEADLINE_S)
            except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
                if self._streams is not None:
                    self._streams[1].close()
                    self._streams = None
                raise ConfigError(f"the job's hub at {self._address} does not answer ({error!r}); the job has probably ended") from error

    async def _exchange(self, ask: Ask, answer: Any) -> Any:
        reader, writer = self._streams = self._streams or await self._connect()
        writer.write(frame(msgspec.msgpack.encode(ask)))
        await writer.drain()
        size = int.from_bytes(await reader.readexactly(_LENGTH), "little")
        if size > _MAX_ANSWER_BYTES:
            raise EOFError(f"an answer of {size:,} bytes")
        return msgspec.json.decode(await reader.readexactly(size), type=answer)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        kind, _, rest = self._address.partition(":")
        if kind == "unix":
            return await asyncio.open_unix_connection(rest)
        host, _, port = rest.rpartition(":")
        return await asyncio.open_connection(host, int(port))
