"""Serves the dashboard: binds a port, tells the link, and runs uvicorn.

uvicorn's event loop belongs to the hub or to a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from burst_rt.dashboard.app import Dashboard, make_app, metrics_app
from burst_rt.dashboard.guard import Guard
from burst_rt.errors import ConfigError, InputError
from burst_rt.telemetry.hub.starting import is_port
from burst_rt.telemetry.read.tape import TapeViewer
from burst_rt.telemetry.read.viewer import Viewer

__all__ = ["DEFAULT_PORT", "RunningDashboard", "Where"]

DEFAULT_PORT = 8870
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MAX_CONNECTIONS = 128
# Maximum number of connections that have not asked for anything yet; beyond it the one that has
# been silent longest is closed. Deadline for a complete request.
_MAX_MUTE = 64
_REQUEST_DEADLINE_S = 10.0
# Seconds that streams may take to hand over what their pages keep; the hub waits longer.
_CLOSING_S = 3
# A Prometheus scrapes every 5 s, as `prometheus.yml` says: seconds to wait for it after the end,
# and for which it counts as one that scrapes.
_SCRAPE_S, _SCRAPING_S = 6.0, 20.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Where:
    """Where to serve."""

    host: str = "127.0.0.1"
    port: int | None = None  # None takes 8870 or, where that is taken, any; 0 takes any

    @classmethod
    def parse(cls, at: str) -> Where:
        """Reads "" or "1" (the default), PORT or HOST:PORT ([HOST]:PORT for IPv6). Raises
        InputError.
        """
        host, colon, port = at.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if colon else cls.host
        if at in ("", "1"):
            return cls()
        if not host or not is_port(port):
            raise InputError(f"--dashboard-at: expected PORT or HOST:PORT, got {at!r}")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in _LOOPBACK

    @property
    def warning(self) -> str:
        """The warning for a person who serves on another address than loopback; "" on loopback."""
        if self.is_loopback:
            return ""
        return (
            f"WARNING: the dashboard listens on {self.host}; whoever reaches it and has the link "
            "sees this job, and the link travels "
            "unencrypted. A tunnel to 127.0.0.1 is safer: ssh -L PORT:127.0.0.1:PORT HOST"
        )


class _Connection(H11Protocol):
    """A connection that asks in time, or ends: a stranger who opens many and says nothing must not
    keep out the person who has the token.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._await_request()
        mute = {
            connection: connection._deadline.when()
            for connection in self.connections
            if isinstance(connection, _Connection) and connection._deadline is not None
        }
        if len(mute) > _MAX_MUTE:
            longest = min(mute, key=mute.__getitem__)
            longest._stop_waiting()
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._deadline is None:
            self._await_request()  # a part of the next request has come

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_request(self) -> None:
        self._deadline = self.loop.call_later(_REQUEST_DEADLINE_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """Leaves signals to the owner of the event loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RunningDashboard:
    """A dashboard that listens, or a part of it. For the person who started it there are `link`,
    which carries the token, and `lines` to print.
    """

    def __init__(
        self,
        viewer: Viewer,
        where: Where | None,
        token: str | None = None,
        *,
        metrics_port: int | None = None,
        beside: TapeViewer | None = None,
    ) -> None:
        """Binds the ports. Raises ConfigError where that fails. where: of the page, None for none.
        metrics_port: a port for `/metrics` without a token, on loopback; None: no such port; 0:
        any. beside: see `Dashboard`.
        """
        self.token = token or secrets.token_urlsafe(24)
        self.link, self.lines = "", list[str]()
        self._dashboard = Dashboard(viewer, beside)
        self._servers: list[tuple[_Server, socket.socket]] = []
        if where is not None:
            self._show_page(where)
        if metrics_port is not None:
            self._show_metrics(metrics_port, alone=where is None)

    def _show_page(self, where: Where) -> None:
        bound = _bind(where.host, where.port)
        port = bound.getsockname()[1]
        host = where.host if where.host not in ("0.0.0.0", "::") else socket.gethostname()
        self.link = f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={self.token}"
        hosts = (
            frozenset()
            if where.is_loopback
            else frozenset({where.host, socket.gethostname().lower(), socket.getfqdn().lower()})
        )
        self._servers.append((_server(Guard(make_app(self._dashboard), self.token, hosts)), bound))
        self.lines += [*([where.warning] if where.warning else []), f"dashboard {self.link}"]

    def _show_metrics(self, port: int, *, alone: bool) -> None:
        try:
            bound = _bind("127.0.0.1", port)
        except ConfigError as error:
            if alone:
                raise
            self.lines.append(f"no metrics: {error}")
            return
        self.lines.append(f"metrics http://127.0.0.1:{bound.getsockname()[1]}/metrics")
        self._servers.append((_server(Guard(metrics_app(self._dashboard), None)), bound))

    async def run(self) -> None:
        """Serves until `close`."""
        await asyncio.gather(*(server.serve([bound]) for server, bound in self._servers))

    async def show_end(self) -> None:
        """Blocks until a Prometheus that scrapes has seen how the job ended, at most 6 s."""
        ended_s = time.monotonic()
        if self._dashboard.scraped_s < ended_s - _SCRAPING_S:
            return
        while self._dashboard.scraped_s <= ended_s and time.monotonic() < ended_s + _SCRAPE_S:
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """Ends streams and serving; `run` returns within a second or so."""
        self._dashboard.closing.set()
        for server, _ in self._servers:
            server.should_exit = True


def _server(app: ASGIApp) -> _Server:
    # At a lower level uvicorn would write a line for each malformed request into the terminal of
    # the training.
    config = uvicorn.Config(
        app, http=_Connection, log_config=None, log_level="error", access_log=False,
        server_header=False, lifespan="off",
        limit_concurrency=_MAX_CONNECTIONS, timeout_graceful_shutdown=_CLOSING_S, ws="none",
    )  # fmt: skip
    return _Server(config)


def _bind(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (port,) if port is not None else (DEFAULT_PORT, 0):
        try:
            return socket.create_server((host, number), family=family)
        except OSError as error:
            if port is not None or number == 0:
                raise ConfigError(
                    f"cannot listen on {host} port {number}: {error}; choose another "
                    "port, or 0 for any"
                ) from error
    raise AssertionError("the last port is 0")
