"""The server: routes, keys, limits, and a request's way from HTTP to rank 0's loop and back."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from burst_rt.launch.serve.protocol import (
    ParsedRequest,
    Refusal,
    Reply,
    error_body,
    read_chat,
    read_completion,
)
from burst_rt.launch.serve.sampling import Chosen
from burst_rt.launch.serve.text import TextOfTokens
from burst_rt.launch.serve.turns import QueueFull, Request, Requests

__all__ = ["LOOPBACK", "Desk", "Figures", "make_routes"]

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Figures:
    """What `/metrics` shows."""

    def __init__(self, requests: Requests) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"burst_rt_serve_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            made = Gauge(f"burst_rt_serve_{name}", text, registry=self.registry)
            made.set_function(value)

        def seconds(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            name = f"burst_rt_serve_{name}_seconds"
            return Histogram(name, text, buckets=buckets, registry=self.registry)

        self.requests = counter("requests", "Requests, by how they ended.", ["ended"])
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.new_tokens = counter("new_tokens", "Tokens that were written.")
        self.first_token = seconds(
            "time_to_first_token", "From a request to its first token.",
            (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )  # fmt: skip
        self.token = seconds(
            "time_per_token", "Between two tokens of a request.",
            (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
        )  # fmt: skip
        gauge("waiting_requests", "Requests that wait for a row.", lambda: requests.num_waiting)
        gauge("active_requests", "Requests that are read or written.", lambda: requests.num_active)
        gauge("cached_tokens", "Tokens in the cache.", lambda: requests.num_cached)
        gauge(
            "reused_prompt_tokens", "Tokens of prompts that were in the cache.",
            lambda: requests.num_reused,
        )  # fmt: skip


@dataclass(kw_only=True)
class Desk:
    """What the routes need. encode, decode and render (a chat as text) are of the tokenizer.

    ends: tokens that end a text. keys: of which a client has to give one; none: no key. hosts:
    names that a Host header may have; None: any.
    """

    model: str
    requests: Requests
    encode: Callable[[str, bool], list[int]]  # a text; whether it begins as the tokenizer begins
    decode: Callable[[list[int]], str]
    render: Callable[[list[dict[str, Any]]], str]
    ends: frozenset[int]
    num_words: int
    most_bytes: int
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = LOOPBACK
    ready: bool = True
    figures: Figures = field(init=False)

    def __post_init__(self) -> None:
        self.figures = Figures(self.requests)

    def tokens_of(self, asked: ParsedRequest) -> list[int]:
        """The prompt's tokens. Raises Refusal."""
        if asked.messages is not None:
            try:
                # The template writes what the tokenizer would put before a text.
                tokens = self.encode(self.render(asked.messages), False)
            except Exception as error:  # a template is a program of the model's
                why = f"messages: the model's chat template refuses them: {error}"
                raise Refusal(400, why, "messages") from error
        else:
            tokens = asked.tokens or self.encode(asked.prompt or "", True)
        if max(tokens, default=0) >= self.num_words:
            raise Refusal(400, f"prompt: tokens must be below {self.num_words}", "prompt")
        most = self.requests.capacity - 1
        if not 0 < len(tokens) <= most:
            raise Refusal(
                400, f"the prompt has {len(tokens):,} tokens; expected 1 to {most:,}, for which "
                "the server has room (--capacity)", None, "context_length_exceeded",
            )  # fmt: skip
        return tokens


class _Talk:
    """A request under way, on the side of HTTP."""

    def __init__(self, desk: Desk, asked: ParsedRequest) -> None:
        self.desk, self._asked = desk, asked
        self._heard: asyncio.Queue[Chosen | str] = asyncio.Queue()
        loop, prompt = asyncio.get_running_loop(), desk.tokens_of(asked)
        room = desk.requests.capacity - len(prompt)
        generator = torch.Generator()
        if asked.seed is None:
            generator.seed()
        else:
            generator.manual_seed(asked.seed % 2**63)

        def tell(news: Chosen | str) -> None:
            loop.call_soon_threadsafe(self._heard.put_nowait, news)

        self.request = Request(
            prompt=prompt, sampling=asked.sampling,
            most_tokens=min(room, asked.most_tokens or room), ends=desk.ends,
            generator=generator, tell=tell,
        )  # fmt: skip
        self.answer = Reply(
            asked=asked, model=desk.model, num_prompt=len(prompt),
            word=lambda token: desk.decode([token]),
        )  # fmt: skip
        desk.requests.put(self.request)
        desk.figures.prompt_tokens.inc(len(prompt))

    async def texts(self) -> AsyncIterator[str]:
        """The answer's text in parts, "" among them, until it has ended. Raises Refusal."""
        desk, answer = self.desk, self.answer
        text, since_s = TextOfTokens(desk.decode, self._asked.stops), self.request.began_s
        while True:
            news = await self._heard.get()
            if isinstance(news, str):
                if news.startswith("error: "):
                    raise Refusal(500, news.removeprefix("error: "))
                answer.ended, part = news, text.end()
                if text.stopped:
                    answer.ended = "stop"
            else:
                now_s = time.monotonic()
                (desk.figures.token if answer.num_new else desk.figures.first_token).observe(
                    now_s - since_s
                )
                since_s = now_s
                desk.figures.new_tokens.inc()
                answer.num_new += 1
                if self._asked.sampling.num_likely is not None:
                    answer.chosen.append(news)
                part = text.put(news.token)
                if text.stopped:
                    answer.ended, self.request.cancelled = "stop", True
            answer.text += part
            yield part
            if answer.ended:
                desk.figures.requests.labels(answer.ended).inc()
                return


def make_routes(desk: Desk) -> Starlette:
    """The application. Its routes run in one event loop, and rank 0's turns in another thread."""

    async def chat(http: HttpRequest) -> Response:
        return await _answer(desk, http, read_chat)

    async def complete(http: HttpRequest) -> Response:
        return await _answer(desk, http, read_completion)

    async def models(http: HttpRequest) -> Response:
        _check(desk, http)
        about = {"id": desk.model, "object": "model", "created": 0, "owned_by": "burst_rt"}
        return JSONResponse({"object": "list", "data": [about]})

    async def health(http: HttpRequest) -> Response:
        ready = {"status": "ok" if desk.ready else "ending"}
        return JSONResponse(ready, 200 if desk.ready else 503)

    async def metrics(http: HttpRequest) -> Response:
        _check(desk, http)
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


def _check(desk: Desk, http: HttpRequest) -> None:
    """Raises Refusal for a client without a key, or for a page of another site."""
    # A page that a browser shows can send to loopback, too, under a name of its own.
    if desk.hosts is not None and http.url.hostname not in desk.hosts:
        raise Refusal(421, f"expected a Host of {', '.join(desk.hosts)}", code="wrong_host")
    given = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
    # All are compared, so that the time says nothing of which comes near.
    known = [hmac.compare_digest(given, key.encode()) for key in desk.keys]
    if desk.keys and not any(known):
        raise Refusal(
            401, "expected a key of the server's as a bearer token", code="invalid_api_key"
        )


async def _answer(
    desk: Desk, http: HttpRequest, read: Callable[[dict[str, Any]], ParsedRequest]
) -> Response:
    _check(desk, http)
    asked = read(await _body(desk, http))
    if asked.model not in ("", desk.model):
        why = f"model: expected {desk.model!r}, got {asked.model!r:.80}"
        raise Refusal(404, why, "model", "model_not_found")
    if not desk.ready:
        raise Refusal(503, "the server is ending")
    try:
        talk = _Talk(desk, asked)
    except QueueFull:
        raise Refusal(429, "too many requests wait (--queue); try again later") from None
    if asked.streams:
        return StreamingResponse(_stream(talk, asked), media_type="text/event-stream")
    ending = asyncio.ensure_future(_gone(http))
    reading = asyncio.ensure_future(_read(talk))
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


async def _read(talk: _Talk) -> None:
    async for _ in talk.texts():
        pass


async def _gone(http: HttpRequest) -> None:
    """Returns when the client is gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _stream(talk: _Talk, asked: ParsedRequest) -> AsyncIterator[str]:
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


async def _body(desk: Desk, http: HttpRequest) -> dict[str, Any]:
    """The JSON that was sent. Raises Refusal."""
    # Other types of content need no leave of the server, where a browser sends them for a page.
    if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Refusal(415, "expected content-type: application/json")
    raw = bytearray()
    try:
        async for part in http.stream():
            raw += part
            if len(raw) > desk.most_bytes:
                raise Refusal(413, f"expected a body of at most {desk.most_bytes:,} bytes")
    except ClientDisconnect:
        raise Refusal(400, "the client has left") from None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"expected JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, f"expected a JSON object, got {type(body).__name__}")
    return body
