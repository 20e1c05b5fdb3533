"""The hub: one process per job that all ranks are connected to.

It feeds the model (`JobModel`), keeps the record, and answers viewers.

The hub ends with the job: when its last rank has gone, and whoever started the hub has gone too. A
rank whose connection ends without a `Bye` is lost, and the hub knows that within milliseconds. The
process around it, which may serve a dashboard too, is `dashboard.hub_process`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from burst_rt.errors import ProtocolError
from burst_rt.job.postmortem import PostMortem
from burst_rt.telemetry.hub.jobs import announce
from burst_rt.telemetry.messages import (
    VERSION,
    Ask,
    Bye,
    FromRank,
    Hello,
    HubReport,
    Item,
    LogLine,
    Ping,
    Pong,
    PostMortemLines,
    Severity,
    Stopping,
    ToRank,
)
from burst_rt.telemetry.model.job_model import JobModel
from burst_rt.telemetry.model.views import EventView, Lost, SeriesView, Snapshot, TimelineView
from burst_rt.telemetry.read.record import Recorder
from burst_rt.telemetry.wire import MAX_FRAME_BYTES, Frames, frame, until_beat_s

__all__ = ["Hub", "HubService", "serve"]

# Seconds between two ticks: a multiple of the ranks' period, and on the same beat of the host's
# clock, so that one waking serves both.
_TICK_S = 0.4
# Maximum delay of a tick in seconds. A hub that was held up for longer could not hear its ranks:
# their silence is not their fault.
_STOOD_S = 1.0
# Seconds for which a hub without ranks stays: before the first has come, and after the last has
# gone. Ranks start at different times. A held hub uses neither: its starter knows when the job is
# over.
_EMPTY_S = 60.0
_LINGER_S = 1.0
# Limits of strangers, which are connections that have not sent the secret: seconds until they must
# send it, bytes that they may send before, and their number.
_SECRET_DEADLINE_S = 5.0
_STRANGER_BYTES = 64 << 10
_MAX_STRANGERS = 1024
# Maximum size of the answers that a viewer has not read.
_MAX_UNREAD_BYTES = 64 << 20
_MAX_CONNECTIONS = 8192
# Seconds that viewers may take, once the job has ended, to ask for what they want to keep, and the
# dashboard to hand that over to its pages. A viewer that has not asked for _ASKED_S does not count.
_CLOSING_S, _ASKED_S = 4.0, 2.5
_POLL_S = 0.05
# Bounds of a post-mortem that viewers get: its lines, and the characters of each.
_MAX_LINES, _LINE_WIDTH = 300, 1000

_log = logging.getLogger("burst_rt.telemetry")


class Hub:
    """The model, the record and the connections. record: the path of the record, for viewers.
    notify: warnings also go to the log of the first rank. lines: for the person who started
    the job. job_folder: where the job's ranks leave their traces; None: not known.
    """

    def __init__(
        self, secret: str, recorder: Recorder | None, record: str = "", *, notify: bool = False
    ) -> None:
        self.job_folder: Path | None = None
        self.model = JobModel(time.time(), record=record)
        self.recorder = recorder
        self.notify = notify
        self.lines: list[str] = []
        self._began_s = time.perf_counter()
        self._advanced_s = 0.0
        self.secret = secret
        self._logged = 0
        self.connections: set[_Connection] = set()
        self.ranks: dict[int, _Connection] = {}
        self.ever = False
        self.empty_since_s = 0.0

    def now_s(self) -> float:
        """Seconds since the hub began."""
        return time.perf_counter() - self._began_s

    def knows(self, secret: str) -> bool:
        """Whether it is the job's secret."""
        return hmac.compare_digest(secret.encode(), self.secret.encode())

    def apply(self, rank: int, message: Item, payload: bytes | None = None) -> None:
        """Brings one message into the model, the record and the log. payload: the message as it
        came.
        """
        now_s = self.now_s()
        self.model.apply(now_s, rank, message)
        if self.recorder is not None:
            if isinstance(message, Hello):
                # Whoever reads the record later must not learn the secret.
                payload = msgspec.msgpack.encode(msgspec.structs.replace(message, secret=""))
            if payload is None:
                self.recorder.add_message(now_s, rank, message)
            else:
                self.recorder.add(now_s, rank, payload)
        self._log_events()

    def answer(self, ask: Ask) -> Snapshot | Lost | TimelineView | list[SeriesView] | None:
        """The answer to a viewer's question. Raises ProtocolError for a question that there is
        not.
        """
        model = self.model
        self._advance()
        match ask.what:
            case "snapshot":
                return model.snapshot()
            case "first_lost":
                return model.first_lost
            case "series":
                return [
                    model.series(name, ask.metrics, ask.since_s, ask.until_s, ask.limit)
                    for name in ask.sources or model.sources
                ]
            case "timeline":
                return model.timeline(ask.since_s, ask.until_s, ask.ranks, ask.limit)
        raise ProtocolError(
            f"telemetry: a viewer asked for {ask.what!r}, expected snapshot, first_lost, series "
            "or timeline"
        )

    def tick(self) -> None:
        """Notices ranks that have fallen silent, writes the record, and turns strangers away."""
        self._advance()
        self._log_events()
        if self.recorder is not None:
            self.recorder.flush()
        latest_s = self.now_s() - _SECRET_DEADLINE_S
        for stranger in [c for c in self.connections if not c.known and c.since_s < latest_s]:
            stranger.abort()

    def conclude(self) -> None:
        """The job has ended: brings the post-mortem of one that failed into the model and the
        record.
        """
        self.model.ended = True
        if self.job_folder is None or not self.model.failed:
            return
        try:
            post_mortem = PostMortem(self.job_folder)
            # Without a flight record there is nothing to tell that the ranks have not told.
            if post_mortem.flights:
                told = PostMortemLines(
                    heading=_bounded(post_mortem.heading()),
                    advice=_bounded(post_mortem.advice()),
                    whole=_bounded(post_mortem.lines()),
                )
                self.apply(-1, told)
        except (OSError, ValueError, TypeError, LookupError) as error:
            _log.warning("no post-mortem for viewers: %s", error)

    def _advance(self) -> None:
        now_s = self.now_s()
        if now_s - self._advanced_s > _STOOD_S:
            self.model.excuse(now_s, now_s - self._advanced_s)
        self._advanced_s = now_s
        self.model.advance(now_s)

    def _log_events(self) -> None:
        for event in self.model.events_after(self._logged):
            self._logged = event.number
            _log.log(event.severity.level, "%s", event.line)
            if self.notify and event.severity is not Severity.INFO:
                self._tell(event)

    def _tell(self, event: EventView) -> None:
        for number in sorted(self.ranks):
            if number != event.rank:
                self.ranks[number].send(LogLine(event.severity, event.line))
                return


def _bounded(lines: Iterable[str]) -> list[str]:
    bounded = list(lines)
    if len(bounded) > _MAX_LINES:
        more = len(bounded) - _MAX_LINES + 1
        bounded[_MAX_LINES - 1 :] = [f"... and {more} lines more, which burst-rt postmortem prints"]
    return [x if len(x) <= _LINE_WIDTH else f"{x[: _LINE_WIDTH - 3]}..." for x in bounded]


class HubService(Protocol):
    """A service of the hub for people while it runs: a dashboard."""

    lines: list[str]  # for the person who started the job

    async def run(self) -> None:
        """Serves until `close`."""
        ...

    async def show_end(self) -> None:
        """Waits for those who come at intervals to see how the job ended, some seconds."""
        ...

    def close(self) -> None:
        """Ends serving; `run` returns soon after."""
        ...


class _Connection(asyncio.Protocol):
    """One connection. It is a rank's once it has said `Hello`, and a viewer's once it has asked;
    both say the secret with that.
    """

    decoder = msgspec.msgpack.Decoder(FromRank | Ping | Ask | Stopping)

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._frames = Frames(_STRANGER_BYTES)
        self._transport: asyncio.Transport | None = None
        self.since_s = hub.now_s()
        self.asked_s = -math.inf
        self.known = False
        self.rank: int | None = None
        self._left = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        strangers = sum(not connection.known for connection in self._hub.connections)
        if len(self._hub.connections) >= _MAX_CONNECTIONS or strangers >= _MAX_STRANGERS:
            transport.abort()
            return
        self._hub.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._receive(payload)
        except (ProtocolError, msgspec.DecodeError) as error:
            who = "an unknown peer" if self.rank is None else f"rank {self.rank}"
            # Strangers may come by the thousand, and the terminal is the training's.
            level = logging.WARNING if self.known else logging.DEBUG
            _log.log(level, "%.3f s connection of %s closed: %s", self._hub.now_s(), who, error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        hub = self._hub
        hub.connections.discard(self)
        hub.empty_since_s = hub.now_s()
        if self.rank is None or hub.ranks.get(self.rank) is not self:
            return
        del hub.ranks[self.rank]
        if not self._left:
            text = (
                "its connection closed unexpectedly"
                if error is None
                else f"its connection broke ({error})"
            )
            hub.apply(-1, HubReport(self.rank, "lost", text))

    def send(self, message: ToRank) -> None:
        """Sends to a rank. A rank that does not read what it was sent gets nothing more."""
        if self._transport is not None and self._transport.get_write_buffer_size() < 1 << 16:
            self._transport.write(frame(msgspec.msgpack.encode(message)))

    def abort(self) -> None:
        """Ends the connection now."""
        if self._transport is not None:
            self._transport.abort()

    def _receive(self, payload: bytes) -> None:
        message = self.decoder.decode(payload)
        hub = self._hub
        if isinstance(message, Ask):
            self._trust(message.secret)
            self.asked_s = hub.now_s()
            self._answer(hub.answer(message))
        elif isinstance(message, Stopping):
            self._trust(message.secret)
            hub.apply(-1, HubReport(-1, "stopping", message.signal))
            self._answer(None)
        elif isinstance(message, Hello):
            self._trust(message.secret)
            if message.version != VERSION:
                raise ProtocolError(
                    f"telemetry: rank {message.rank} speaks version {message.version}, this hub "
                    f"version {VERSION}; use the same burst_rt on every rank"
                )
            self.rank = message.rank
            hub.ranks[self.rank] = self
            hub.ever = True
            hub.apply(self.rank, message)
        elif isinstance(message, Ping):
            if self.known:
                self.send(Pong(message.sent_s, hub.now_s()))
        elif self.rank is not None:
            hub.apply(self.rank, message, payload)
            if isinstance(message, Bye):
                self._left = True
        else:
            raise ProtocolError("telemetry: expected a Hello first, got another message")

    def _trust(self, secret: str) -> None:
        if not self.known and not self._hub.knows(secret):
            raise ProtocolError("telemetry: an unknown peer gave a wrong secret")
        self.known = True
        self._frames.max_bytes = MAX_FRAME_BYTES

    def _answer(self, view: Snapshot | Lost | TimelineView | list[SeriesView] | None) -> None:
        assert self._transport is not None
        if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            raise ProtocolError("telemetry: a viewer does not read its answers")
        self._transport.write(frame(msgspec.json.encode(view)))


async def serve(
    hub: Hub, listen: str, folder: Path, *, held: bool, service: HubService | None = None
) -> None:
    """Serves until the job has ended; the address goes out as one line on standard output.

    listen: "unix" (a socket in `folder`), or the address to listen on with TCP. held: the starter
    of the hub holds the hub's standard input open, and the hub stays while it is open. service:
    what the hub serves in addition to its viewers.
    """
    server, address = await _listen(hub, listen, folder)
    ended, released = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    if held:
        os.set_blocking(0, False)
        asyncio.get_running_loop().add_reader(0, released.set)
    else:
        released.set()
    showing = asyncio.create_task(service.run()) if service is not None else None
    announced = _announce(address, hub)
    _tell_starter(address, [*hub.lines, *(service.lines if service is not None else ())])
    async with server:
        while not ended.is_set() and not _over(hub, released.is_set(), held):
            await asyncio.sleep(until_beat_s(_TICK_S))
            hub.tick()
        hub.conclude()
        if announced is not None:
            os.close(announced)
        if service is not None:
            if hub.model.failed:
                await service.show_end()
            service.close()
        await _let_go(hub, showing)


async def _let_go(hub: Hub, showing: asyncio.Task[None] | None) -> None:
    """Waits until viewers have gone and the service has ended, at most `_CLOSING_S`."""
    until_s = hub.now_s() + _CLOSING_S
    watched_s = hub.now_s() - _ASKED_S
    while hub.now_s() < until_s and (
        any(connection.asked_s > watched_s for connection in hub.connections)
        or not (showing is None or showing.done())
    ):
        await asyncio.sleep(_POLL_S)


async def _listen(hub: Hub, listen: str, folder: Path) -> tuple[asyncio.Server, str]:
    """The server, and the address at which ranks and viewers find it."""
    loop = asyncio.get_running_loop()
    if listen == "unix":
        path = folder / "hub"
        server = await loop.create_unix_server(lambda: _Connection(hub), path, backlog=512)
        return server, f"unix:{path}"
    server = await loop.create_server(lambda: _Connection(hub), listen, 0, backlog=512)
    name = listen if listen != "0.0.0.0" else socket.gethostname()
    return server, f"tcp:{name}:{server.sockets[0].getsockname()[1]}"


def _tell_starter(address: str, lines: Sequence[str]) -> None:
    """One line, for the process that started the hub; that process reads nothing more."""
    print("\t".join([address, *(" ".join(line.split()) for line in lines)]), flush=True)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _announce(address: str, hub: Hub) -> int | None:
    try:
        return announce(address, hub.secret)
    except OSError as error:
        _log.warning("this job cannot be found by --attach: %s", error)
        return None


def _over(hub: Hub, released: bool, held: bool) -> bool:
    alone_s = hub.now_s() - hub.empty_since_s
    # A viewer does not keep the hub, but may come before the first rank does.
    kept_by = hub.ranks if held or hub.ever else hub.connections
    return released and not kept_by and (held or alone_s > (_LINGER_S if hub.ever else _EMPTY_S))
