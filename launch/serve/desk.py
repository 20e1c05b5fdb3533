"""A request's way to rank 0's loop, and its answer's way back; and the figures of both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from burst_rt.launch.serve.protocol import ParsedRequest, Refusal, Reply
from burst_rt.launch.serve.sampling import Chosen
from burst_rt.launch.serve.text import TextOfTokens
from burst_rt.launch.serve.turns import Request, Requests
from burst_rt.launch.serve.vocabulary import Vocabulary

__all__ = ["Desk", "Talk"]

# Tokens of a prompt that its completion is decoded behind: one may be a part of a character.
_BEHIND = 5


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
    """Where requests come in: the model's name and vocabulary, and rank 0's loop."""

    model: str
    vocabulary: Vocabulary
    requests: Requests
    ready: bool = True
    figures: Figures = field(init=False)

    def __post_init__(self) -> None:
        self.figures = Figures(self.requests)
        # A prompt of a million tokens takes seconds. Tokenizers need not bear two calls at once.
        self._encoder = ThreadPoolExecutor(1, "burst_rt tokens")

    async def open(self, asked: ParsedRequest) -> Talk:
        """A request's way to the loop. Other answers go on while its prompt is turned into tokens.

        Raises Refusal, and QueueFull.
        """
        if asked.model not in ("", self.model):
            why = f"model: expected {self.model!r}, got {asked.model!r:.80}"
            raise Refusal(404, why, "model", "model_not_found")
        began_s, running = time.monotonic(), asyncio.get_running_loop()
        prompt = await running.run_in_executor(self._encoder, self._encode, asked)
        return Talk(self, asked, prompt, began_s)

    def _encode(self, asked: ParsedRequest) -> list[int]:
        tokens, most = self.vocabulary.encode(asked), self.requests.capacity - 1
        if not 0 < len(tokens) <= most:
            raise Refusal(
                400, f"the prompt has {len(tokens):,} tokens; expected 1 to {most:,}, for which "
                "the server has room (--capacity)", None, "context_length_exceeded",
            )  # fmt: skip
        return tokens


class Talk:
    """A request under way, on the side of who asked, since began_s. prompt: its tokens.

    Raises QueueFull.
    """

    def __init__(self, desk: Desk, asked: ParsedRequest, prompt: list[int], began_s: float) -> None:
        self.desk, self._asked = desk, asked
        self._heard: asyncio.Queue[Chosen | str] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        room = desk.requests.capacity - len(prompt)
        generator = torch.Generator()
        if asked.seed is None:
            generator.seed()
        else:
            generator.manual_seed(asked.seed % 2**63)

        def tell(news: Chosen | str) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody hears any more
                loop.call_soon_threadsafe(self._heard.put_nowait, news)

        self.request = Request(
            prompt=prompt, sampling=asked.sampling,
            most_tokens=min(room, asked.most_tokens or room), ends=desk.vocabulary.ends,
            generator=generator, tell=tell, began_s=began_s,
        )  # fmt: skip
        self.answer = Reply(
            asked=asked, model=desk.model, num_prompt=len(prompt),
            word=desk.vocabulary.word, bytes_of=desk.vocabulary.bytes_of,
        )  # fmt: skip
        desk.requests.put(self.request)
        desk.figures.prompt_tokens.inc(len(prompt))

    async def texts(self) -> AsyncIterator[str]:
        """The answer's text in parts, "" among them, until it has ended. Raises Refusal."""
        desk, answer = self.desk, self.answer
        # A prompt and its completion are one text, in which a first space counts. An answer is not.
        behind = [] if self._asked.is_chat else self.request.prompt[-_BEHIND:]
        text, since_s = (
            TextOfTokens(desk.vocabulary.decode, self._asked.stops, behind),
            self.request.began_s,
        )
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

    async def read(self) -> None:
        """Waits until the answer is whole. Raises Refusal."""
        async for _ in self.texts():
            pass
