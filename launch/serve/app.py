"""The server: routes, keys, bounds, and streams."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from burst_rt.launch.serve.desk import Desk, Talk
from burst_rt.launch.serve.protocol import (
    ParsedRequest,
    Refusal,
    error_body,
    read_chat,
    read_completion,
)
from burst_rt.launch.serve.turns import QueueFull

__all__ = ["LOOPBACK", "Admission", "make_routes"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Who may ask, and how much.

    keys: of which a client has to give one; none: no key. hosts: names that a Host header may have;
    None: any.
    """

    most_bytes: int
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = LOOPBACK


def make_routes(desk: Desk, admission: Admission) -> Starlette:
    """The application. Its routes run in one event loop, and rank 0's turns in another thread."""

    async def chat(http: HttpRequest) -> Response:
        return await _answer(desk, admission, http, read_chat)

    async def complete(http: HttpRequest) -> Response:
        return await _answer(desk, admission, http, read_completion)

    async def models(http: HttpRequest) -> Response:
        _check(admission, http)
        about = {"id": desk.model, "object": "model", "created": 0, "owned_by": "burst_rt"}
        return JSONResponse({"object": "list", "data": [about]})

    async def health(http: HttpRequest) -> Response:
        ready = {"status": "ok" if desk.ready else "ending"}
        return JSONResponse(ready, 200 if desk.ready else 503)

    async def metrics(http: HttpRequest) -> Response:
        _check(admission, http)
        return PlainTextResponse(generate_latest(desk.figures.registry))

    async def refused(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        desk.figures.requests.labels("refused" if error.status < 500 else "error").inc()
        return JSONResponse(error_body(error), error.status)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={Refusal: refused},
    )


def _check(admission: Admission, http: HttpRequest) -> None:
    """Raises Refusal for a client without a key, or for a page of another site."""
    # A page that a browser shows can send to loopback, too, under a name of its own.
    if admission.hosts is not None and http.url.hostname not in admission.hosts:
        raise Refusal(421, f"expected a Host of {', '.join(admission.hosts)}", code="wrong_host")
    given = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
    # All are compared, so that the time says nothing of which comes near.
    known = [hmac.compare_digest(given, key.encode()) for key in admission.keys]
    if admission.keys and not any(known):
        raise Refusal(
            401, "expected a key of the server's as a bearer token", code="invalid_api_key"
        )


async def _answer(
    desk: Desk,
    admission: Admission,
    http: HttpRequest,
    read: Callable[[dict[str, Any]], ParsedRequest],
) -> Response:
    _check(admission, http)
    asked = read(await _body(admission, http))
    if not desk.ready:
        raise Refusal(503, "the server is ending")
    try:
        talk = await desk.open(asked)
    except QueueFull:
        raise Refusal(429, "too many requests wait (--queue); try again later") from None
    if asked.streams:
        return StreamingResponse(_stream(talk, asked), media_type="text/event-stream")
    ending = asyncio.ensure_future(_gone(http))
    reading = asyncio.ensure_future(talk.read())
    try:
        await asyncio.wait({ending, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            desk.figures.requests.labels("cancelled").inc()
            return Response(status_code=499)  # nobody reads it
        await reading
    finally:
        talk.request.cancelled = True
        ending.cancel()
        reading.cancel()
    return JSONResponse(talk.answer.whole())


async def _gone(http: HttpRequest) -> None:
    """Returns when the client is gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _stream(talk: Talk, asked: ParsedRequest) -> AsyncIterator[str]:
    answer, told = talk.answer, 0
    try:
        async for text in talk.texts():
            # Tokens whose characters are not whole yet go with the next text.
            if text or answer.ended:
                yield _event(answer.part(text, told))
                told = answer.num_new
        if asked.tells_usage:
            yield _event(answer.last_part())
        yield "data: [DONE]\n\n"
    except Refusal as refused:
        yield _event(error_body(refused))
    finally:
        # Also where the client has left, and the stream is closed in its middle.
        if not answer.ended:
            talk.desk.figures.requests.labels("cancelled").inc()
        talk.request.cancelled = True


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _body(admission: Admission, http: HttpRequest) -> dict[str, Any]:
    """The JSON that was sent. Raises Refusal."""
    # Other types of content need no leave of the server, where a browser sends them for a page.
    if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refusal(415, "expected content-type: application/json")
    raw = bytearray()
    try:
        async for part in http.stream():
            raw += part
            if len(raw) > admission.most_bytes:
                raise Refusal(413, f"expected a body of at most {admission.most_bytes:,} bytes")
    except ClientDisconnect:
        raise Refusal(400, "the client has left") from None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"expected JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, f"expected a JSON object, got {type(body).__name__}")
    return body
