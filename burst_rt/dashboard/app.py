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
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from burst_rt.dashboard.compact import compact
from burst_rt.dashboard.exporter import CONTENT_TYPE, exposition
from burst_rt.dashboard.last import last_answers
from burst_rt.dashboard.links import LinkStates, LinkView
from burst_rt.errors import BurstError, ConfigError, Stalled
from burst_rt.telemetry.metrics import METRICS, THROTTLE_REASONS
from burst_rt.telemetry.model.views import (
    EventView,
    JobView,
    ProgressView,
    RankView,
    Snapshot,
    SourceView,
)
from burst_rt.telemetry.read.compare import RecordComparison, compare_records
from burst_rt.telemetry.read.tape import TapeViewer
from burst_rt.telemetry.read.viewer import Viewer

__all__ = ["Dashboard", "make_app", "metrics_app"]

_PERIOD_S = 0.5  # seconds between two snapshots
_MAX_STREAMS = 32
_MAX_SPANS = 20_000
_MAX_ROWS = 2_000
_MAX_NAMES = 256
_MAX_RANK_DIGITS = 9
_T = TypeVar("_T")
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
    beside: bool  # there is another record to compare with


class Dashboard:
    """The data from which the routes answer. All people who look share one, so that ten cost the
    hub what one does. viewer: a `TapeViewer` is asked for any time of its record. beside: a record
    to compare with the viewer's.
    """

    def __init__(self, viewer: Viewer, beside: TapeViewer | None = None) -> None:
        self.viewer = viewer
        self.tapes = [tape for tape in (viewer, beside) if isinstance(tape, TapeViewer)]
        self.closing = asyncio.Event()
        self.streams = 0
        self._links = LinkStates()
        self._present: tuple[Snapshot, list[LinkView]] | None = None
        self._present_at_s = -math.inf
        self._asking = asyncio.Lock()
        self._making = asyncio.Lock()
        self._last: bytes | None = None  # see `last_answers`; None before the job's end
        self.scraped_s = -math.inf  # when Prometheus last came, by `time.monotonic`
        self._comparison: RecordComparison | None = None  # once it has been asked for

    async def ask(self, question: Callable[..., _T], *about: Any) -> _T:  # question's arguments
        """The viewer's answer. A model of this process is for the event loop's thread alone. A hub
        answers later: another thread waits for that, with one question at a time.
        """
        if not self.viewer.blocks:
            return question(*about)
        async with self._asking:
            if self._last is not None:
                raise ConfigError("the job has ended, and its hub with it")
            return await asyncio.to_thread(question, *about)

    def pick(self, record: float, at_s: float) -> Viewer:
        """The viewer of a record at a time; the one viewer where a job is shown."""
        if not self.tapes:
            return self.viewer
        return self.tapes[min(max(0, int(record)), len(self.tapes) - 1)].at(at_s)

    def compare(self) -> RecordComparison:
        """What differs between the two records. Reads both, the first time."""
        if self._comparison is None:
            self._comparison = compare_records(*(tape.record for tape in self.tapes))
        return self._comparison

    async def present(self, *, fresh: bool = False) -> tuple[Snapshot, list[LinkView]]:
        """The snapshot and the links, at most half a period old. fresh: they are made now."""
        async with self._making:
            now_s = time.monotonic()
            if fresh or self._present is None or now_s - self._present_at_s > _PERIOD_S / 2:
                self._present = await self.ask(self._links.read, self.viewer)
                self._present_at_s = now_s
            return self._present

    async def stream(self) -> AsyncIterator[bytes]:
        """Server-sent events: the present, twice a second, until the viewer goes or the hub
        ends. A last event named "end" says that nothing more comes, and brings `last_answers`;
        null where the hub has gone without a word.
        """
        self.streams += 1
        told = 0  # number of the last event that this viewer has
        sent = None
        closing = False
        try:
            # Another viewer's stream may have handed over before this one.
            while self._last is None:
                try:
                    sent = await self.present(fresh=closing)
                except Stalled:
                    continue  # the try took long enough: the next may begin at once
                yield self._event(*sent, told)
                told = max((event.number for event in sent[0].events), default=told)
                if closing or sent[0].job.ended:
                    await self._hand_over(sent[0])
                    break
                with contextlib.suppress(TimeoutError):
                    closing = await asyncio.wait_for(self.closing.wait(), _PERIOD_S)
        except BurstError:
            pass
        finally:
            self.streams -= 1
        if self._present is not None and self._present is not sent:
            yield self._event(*self._present, told)
        yield b"event: end\ndata: " + (self._last or b"null") + b"\n\n"

    async def _hand_over(self, snapshot: Snapshot) -> None:
        """Makes the last answers, once for all viewers, and lets the hub go."""
        async with self._making:
            if self._last is None:
                self._last = await self.ask(last_answers, self.viewer, snapshot)
                self.viewer.close()

    def _event(self, snapshot: Snapshot, links: list[LinkView], told: int) -> bytes:
        return b"data: " + _present(snapshot, links, told, beside=len(self.tapes) > 1) + b"\n\n"


def _present(snapshot: Snapshot, links: list[LinkView], told: int, *, beside: bool) -> bytes:
    """The JSON of a `Present`. told: number of the last event that the page has."""
    view = Present(
        job=snapshot.job,
        progress=snapshot.progress,
        ranks=snapshot.ranks,
        sources=snapshot.sources,
        links=links,
        plans=len(snapshot.plans),
        events=[event for event in snapshot.events if event.number > told],
        beside=beside,
    )
    return msgspec.json.encode(view)


def make_app(dashboard: Dashboard) -> Starlette:
    """The application, to be guarded (`guard.Guard`)."""

    async def of(request: Request, question: Callable[[Viewer], _T]) -> _T:
        """What is asked of a record is asked of the record and the time that the request names."""
        where = _number(request, "record", 0.0), _number(request, "at", math.inf)
        return await dashboard.ask(lambda: question(dashboard.pick(*where)))

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
        window = _number(request, "since", -10.0), until_s if math.isfinite(until_s) else None
        view = await of(request, lambda viewer: viewer.timeline(*window, ranks, limit))
        return _json(compact(view, (await snapshot_of(request)).job.now_s))

    async def snapshot_of(request: Request) -> Snapshot:
        """The snapshot; that of a running job is at most half a period old."""
        if dashboard.tapes:
            return await of(request, lambda viewer: viewer.snapshot())
        return (await dashboard.present())[0]

    async def present(request: Request) -> Response:
        if dashboard.tapes:
            seen = await of(request, lambda viewer: LinkStates().read(viewer))
        else:
            seen = await dashboard.present()
        return _json(_present(*seen, 0, beside=len(dashboard.tapes) > 1))

    async def differences(request: Request) -> Response:
        compared = await dashboard.ask(dashboard.compare) if len(dashboard.tapes) > 1 else None
        return _json(msgspec.json.encode(compared))  # null without two records

    async def series(request: Request) -> Response:
        limit = _limit(request, 300, _MAX_ROWS)
        names = _words(request, "source"), _words(request, "metric")
        since_s = _number(request, "since", -600.0)
        views = await of(request, lambda viewer: viewer.series(*names, since_s, limit))
        return _json(msgspec.json.encode(views))

    async def plans(request: Request) -> Response:
        snapshot = await snapshot_of(request)
        rank = _number(request, "rank", math.inf)
        return _json(
            msgspec.json.encode([plan for plan in snapshot.plans if rank in (plan.rank, math.inf)])
        )

    async def names(request: Request) -> Response:
        metrics = {
            name: (metric.unit, metric.label, THROTTLE_REASONS if metric.unit == "bits" else {})
            for name, metric in METRICS.items()
        }
        return _json(msgspec.json.encode(metrics))

    routes = [
        Route("/api/events", events),
        Route("/api/timeline", timeline),
        Route("/api/series", series),
        Route("/api/plans", plans),
        Route("/api/present", present),
        Route("/api/compare", differences),
        Route("/api/metrics", names),
        _metrics(dashboard),
        *_files(),
    ]
    return Starlette(routes=routes, exception_handlers={BurstError: _unavailable})


def metrics_app(dashboard: Dashboard) -> Starlette:
    """`/metrics` alone. It has a port of its own on loopback, and needs no token."""
    return Starlette(routes=[_metrics(dashboard)], exception_handlers={BurstError: _unavailable})


def _metrics(dashboard: Dashboard) -> Route:
    async def metrics(request: Request) -> Response:
        dashboard.scraped_s = time.monotonic()
        return Response(exposition(*await dashboard.present()), media_type=CONTENT_TYPE)

    return Route("/metrics", metrics)


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
    """Raises HTTPException, 400, for too many."""
    words = request.query_params.getlist(name)
    if len(words) > _MAX_NAMES:
        raise HTTPException(
            400, f"{name}: expected at most {_MAX_NAMES}, got {len(words):,}; ask in parts\n"
        )
    return words


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
