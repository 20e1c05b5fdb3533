"""The dashboard's routes: the page, the present as a stream, windows of the past, `/metrics`.

There are no others.

Files are read once, at the start: a request names numbers and things of the model, never a path.
All that is sent is data, and the page writes it as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from burst_rt.dashboard.compact import compact
from burst_rt.dashboard.exporter import CONTENT_TYPE, exposition
from burst_rt.dashboard.links import WINDOW_S, Links, LinkView
from burst_rt.dashboard.reader import Reader
from burst_rt.errors import BurstError, Stalled
from burst_rt.telemetry.metrics import METRICS, THROTTLE_REASONS
from burst_rt.telemetry.model.views import (
    EventView,
    JobView,
    ProgressView,
    RankView,
    Snapshot,
    SourceView,
)

__all__ = ["Dashboard", "make_app", "metrics_app"]

# Seconds between two snapshots, and between two computations of the links, which need spans.
_PERIOD_S = 0.5
_LINKS_PERIOD_S = 1.0
_LINKS_SPANS = 4000
_MAX_STREAMS = 32
_MAX_SPANS = 20_000
_MAX_ROWS = 2_000
_MAX_NAMES = 256
_MAX_RANK_DIGITS = 9
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Present(msgspec.Struct, kw_only=True):
    """The data that the page gets twice a second."""

    job: JobView
    progress: ProgressView
    ranks: list[RankView]
    sources: list[SourceView]
    links: list[LinkView]
    plans: int  # how many there are; `/api/plans` has them
    events: list[EventView]  # those that the page has not had


class Dashboard:
    """The data from which the routes answer. All viewers share one, so that ten viewers cost the
    hub what one does.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.closing = asyncio.Event()
        self.streams = 0
        self._links = Links()
        self._link_views: list[LinkView] = []
        self._links_at_s = -math.inf
        self._snapshot: Snapshot | None = None
        self._snapshot_at_s = -math.inf
        self._lock = asyncio.Lock()

    async def present(self, *, fresh: bool = False) -> tuple[Snapshot, list[LinkView]]:
        """The snapshot and the links, at most half a period old. fresh: they are made now."""
        async with self._lock:
            now_s = time.monotonic()
            if fresh or self._snapshot is None or now_s - self._snapshot_at_s > _PERIOD_S / 2:
                self._snapshot = await self.reader.snapshot()
                self._snapshot_at_s = now_s
                if now_s - self._links_at_s >= _LINKS_PERIOD_S:
                    self._links_at_s = now_s
                    self._links.look(await self.reader.timeline(-WINDOW_S, None, (), _LINKS_SPANS))
                self._link_views = self._links.now(self._snapshot)
            return self._snapshot, self._link_views

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events: the present, twice a second, until the viewer goes or the hub
        ends. A last event named "end" says that nothing more comes.
        """
        self.streams += 1
        told = 0
        closing = False
        try:
            while True:
                try:
                    snapshot, links = await self.present(fresh=closing)
                except Stalled:
                    continue  # the try took long enough: the next may begin at once
                events = [event for event in snapshot.events if event.number > told]
                told = max((event.number for event in events), default=told)
                yield self._event(snapshot, links, events)
                if closing:
                    break
                with contextlib.suppress(TimeoutError):
                    closing = await asyncio.wait_for(self.closing.wait(), _PERIOD_S)
        except BurstError:
            # The hub that this dashboard asks has ended: a viewer who comes now sees its last.
            if self._snapshot is not None and not told:
                yield self._event(self._snapshot, self._link_views, self._snapshot.events)
        finally:
            self.streams -= 1
        yield b"event: end\ndata: {}\n\n"

    def _event(self, snapshot: Snapshot, links: list[LinkView], events: list[EventView]) -> bytes:
        view = Present(
            job=snapshot.job,
            progress=snapshot.progress,
            ranks=snapshot.ranks,
            sources=snapshot.sources,
            links=links,
            plans=len(snapshot.plans),
            events=events,
        )
        return b"data: " + msgspec.json.encode(view) + b"\n\n"


def make_app(dashboard: Dashboard) -> Starlette:
    """The application, to be guarded (`guard.Guard`)."""
    reader = dashboard.reader

    async def events(request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if dashboard.streams >= _MAX_STREAMS:
            return PlainTextResponse("The dashboard has too many viewers; close one.\n", 503)
        return StreamingResponse(dashboard.stream(), media_type="text/event-stream")

    async def timeline(request: Request) -> Response:
        until_s = _number(request, "until", math.inf)
        ranks = _ranks(request)
        limit = _limit(request, 2000, _MAX_SPANS)
        snapshot, _ = await dashboard.present()
        view = await reader.timeline(
            _number(request, "since", -10.0),
            until_s if math.isfinite(until_s) else None,
            ranks,
            limit,
        )
        return _json(compact(view, snapshot.job.now_s))

    async def series(request: Request) -> Response:
        limit = _limit(request, 300, _MAX_ROWS)
        found = await reader.series(
            _words(request, "source"),
            _words(request, "metric"),
            _number(request, "since", -600.0),
            limit,
        )
        return _json(msgspec.json.encode(found))

    async def plans(request: Request) -> Response:
        snapshot, _ = await dashboard.present()
        rank = _number(request, "rank", math.inf)
        return _json(
            msgspec.json.encode([plan for plan in snapshot.plans if rank in (plan.rank, math.inf)])
        )

    async def names(request: Request) -> Response:
        told = {
            name: (metric.unit, metric.label, THROTTLE_REASONS if metric.unit == "bits" else {})
            for name, metric in METRICS.items()
        }
        return _json(msgspec.json.encode(told))

    async def metrics(request: Request) -> Response:
        return Response(exposition(*await dashboard.present()), media_type=CONTENT_TYPE)

    routes = [
        Route("/api/events", events),
        Route("/api/timeline", timeline),
        Route("/api/series", series),
        Route("/api/plans", plans),
        Route("/api/metrics", names),
        Route("/metrics", metrics),
        *_files(),
    ]
    return Starlette(routes=routes, exception_handlers={BurstError: _unavailable})


def metrics_app(dashboard: Dashboard) -> Starlette:
    """`/metrics` alone. It has a port of its own on loopback, and needs no token."""

    async def metrics(request: Request) -> Response:
        return Response(exposition(*await dashboard.present()), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[Route("/metrics", metrics)], exception_handlers={BurstError: _unavailable}
    )


def _files() -> list[Route]:
    """A route for each file of the page. The contents are held in memory."""
    routes = []
    for file in (resources.files("burst_rt.dashboard") / "assets").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            routes.append(
                Route(
                    "/" if file.name == "index.html" else f"/{file.name}",
                    _file(file.read_bytes(), kind),
                )
            )
    return routes


def _file(content: bytes, kind: str) -> Callable[[Request], Response]:
    return lambda request: Response(content, media_type=kind)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _unavailable(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", 503)


def _words(request: Request, name: str) -> list[str]:
    return request.query_params.getlist(name)[:_MAX_NAMES]


def _ranks(request: Request) -> list[int]:
    """The ranks that are named; words that are not numbers are left out. Raises HTTPException, 400,
    for a number that no rank can have.
    """
    words = [word for word in _words(request, "rank") if word.isascii() and word.isdigit()]
    for word in words:
        if len(word) > _MAX_RANK_DIGITS:
            raise HTTPException(
                400,
                f"rank: expected at most {_MAX_RANK_DIGITS} digits, got {len(word)}: "
                f"{word[:20]}; name a rank of the job\n",
            )
    return [int(word) for word in words]


def _number(request: Request, name: str, default: float) -> float:
    """A finite number; `default` for anything else."""
    try:
        value = float(request.query_params.get(name, default))
    except ValueError:
        return default
    return value if math.isfinite(value) else default


def _limit(request: Request, default: int, most: int) -> int:
    return int(min(most, max(1.0, _number(request, "limit", default))))
