"""Requests of a file, answered as the server would: the lines of OpenAI's batch files.

After https://platform.openai.com/docs/guides/batch: each line has a `custom_id`, the `url` of a
route, and the `body` that would be sent there; each answer has the same `custom_id`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burst_rt.context import Context
from burst_rt.errors import ConfigError
from burst_rt.launch.generate.loop import no_tokenizer, open_model
from burst_rt.launch.generate.models import longest_text
from burst_rt.launch.generate.options import GenerateOptions
from burst_rt.launch.serve.desk import Desk
from burst_rt.launch.serve.loop import RowCaches, take_turns
from burst_rt.launch.serve.protocol import (
    ParsedRequest,
    Refusal,
    error_body,
    read_chat,
    read_completion,
)
from burst_rt.launch.serve.turns import Requests
from burst_rt.launch.serve.vocabulary import Vocabulary

__all__ = ["FileRequest", "answer_file", "read_lines"]

Json = dict[str, Any]
_ROUTES: dict[str, Callable[[Json], ParsedRequest]] = {
    "/v1/chat/completions": read_chat,
    "/v1/completions": read_completion,
}
_CHUNK = 2048  # tokens of a prompt between two tokens of the others


@dataclass(frozen=True)
class FileRequest:
    """A request of the file, or why it is refused."""

    custom_id: str
    asked: ParsedRequest | Refusal


def answer_file(world: Context, options: GenerateOptions) -> None:
    """Print an answer to each line of `options.requests`, on rank 0, as they come.

    Collective; blocks. Raises ConfigError for a file that cannot be read, and as `RowCaches` and
    `take_turns` do.
    """
    assert options.requests is not None
    _, folder, model = open_model(world, options)
    if folder is None:
        raise no_tokenizer("--requests")
    path, vocabulary = options.requests, Vocabulary(folder, model)
    lines, most = list[FileRequest](), longest_text(folder) or sys.maxsize

    def longest() -> int:
        lines[:] = [
            _measured(line, vocabulary, most) for line in read_lines(path, options.max_new_tokens)
        ]
        return max(
            (
                len(line.asked.tokens or ()) + (line.asked.most_tokens or 0)
                for line in lines
                if isinstance(line.asked, ParsedRequest)
            ),
            default=1,
        )

    capacity = world.first(longest)
    num_rows = min(options.rows, world.first(lambda: len(lines)))
    rows = RowCaches(world, model, options.dtype, num_rows=num_rows, capacity=capacity)
    requests = Requests(
        num_rows,
        capacity=capacity,
        chunk=_CHUNK,
        most_waiting=len(lines),
        within_s=float("inf"),
        keep_states=rows.keep_states,
    )
    desk = Desk(model=folder.path.name, vocabulary=vocabulary, requests=requests)
    answers = _Answers(desk, lines) if world.rank == 0 else None
    take_turns(world, rows, requests, answers)
    world.first(lambda: answers.check() if answers else None)


def read_lines(path: Path, most_new: int) -> list[FileRequest]:
    """The requests of a file. Raises ConfigError for a file that has others than such lines."""
    lines, known = list[FileRequest](), set[str]()
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--requests: {error}; give a file that can be read.") from error
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        where = f"--requests: line {number} of {path}"
        try:
            line = json.loads(text)
            custom_id, url, body = (line.get(name) for name in ("custom_id", "url", "body"))
        except (ValueError, RecursionError, AttributeError) as error:
            raise ConfigError(f"{where}: expected a JSON object: {error}; mend it.") from error
        if not isinstance(custom_id, str) or custom_id in known:
            got = f"{custom_id!r:.80}" + (" again" if custom_id in known else "")
            raise ConfigError(f"{where}: custom_id: expected a text of its own, got {got}.")
        if url not in _ROUTES or not isinstance(body, dict):
            raise ConfigError(
                f"{where}: expected a url of {' or '.join(_ROUTES)} and a body, an object; got "
                f"{url!r:.80} and {body!r:.80}."
            )
        known.add(custom_id)
        lines.append(FileRequest(custom_id, _read(url, body, most_new)))
    if not lines:
        raise ConfigError(f"--requests: {path} has no requests; write one on each line.")
    return lines


def _read(url: str, body: Json, most_new: int) -> ParsedRequest | Refusal:
    try:
        asked = _ROUTES[url](body)
        if asked.streams:
            raise Refusal(400, "stream is not done in files; leave it out", "stream")
    except Refusal as refused:
        return refused
    unsaid = body.get("max_tokens") is None and body.get("max_completion_tokens") is None
    return replace(asked, most_tokens=most_new) if unsaid else asked


def _measured(line: FileRequest, vocabulary: Vocabulary, most: int) -> FileRequest:
    """The same line, whose prompt is tokens. most: tokens that the model was made for."""
    if isinstance(line.asked, Refusal):
        return line
    try:
        tokens, new = vocabulary.encode(line.asked), line.asked.most_tokens or 0
        if len(tokens) + new > most:
            raise Refusal(
                400, f"the model was made for {most:,} tokens; the prompt has {len(tokens):,}, and "
                f"{new:,} more are asked for", None, "context_length_exceeded",
            )  # fmt: skip
    except Refusal as refused:
        return replace(line, asked=refused)
    return replace(line, asked=replace(line.asked, tokens=tokens))


class _Answers:
    """Puts all requests, and prints their answers; rank 0's, in a thread of its own."""

    def __init__(self, desk: Desk, lines: list[FileRequest]) -> None:
        self._desk, self._lines = desk, lines
        self._num_prompt = self._num_new = self._num_refused = 0
        self._began_s = time.monotonic()
        self._pool = ThreadPoolExecutor(1, "burst_rt answers")
        self._done: Future[None] | None = None

    def start(self) -> None:
        self._done = self._pool.submit(self._run)

    def end(self, why: str) -> None:
        self._desk.requests.close()  # else one that is put from now on would wait for nobody
        self._desk.requests.fail(why)
        self._pool.shutdown()

    def check(self) -> None:
        """Raises what has kept an answer from being printed, such as a pipe that nobody reads."""
        assert self._done is not None
        self._done.result()

    def _run(self) -> None:
        try:
            asyncio.run(self._answer_all())
        finally:
            self._desk.requests.close()

    async def _answer_all(self) -> None:
        await asyncio.gather(*map(self._answer, self._lines))
        took_s = time.monotonic() - self._began_s
        print(
            f"answered {len(self._lines) - self._num_refused:,} of {len(self._lines):,} requests "
            f"in {took_s:.1f} s: {self._num_prompt:,} tokens read, {self._num_new:,} written "
            f"({self._num_new / took_s:.1f} tokens/s)", file=sys.stderr, flush=True,
        )  # fmt: skip

    async def _answer(self, line: FileRequest) -> None:
        status, body = 200, dict[str, Any]()
        try:
            if isinstance(line.asked, Refusal):
                raise line.asked
            talk = await self._desk.open(line.asked)
            try:
                await talk.read()
            finally:
                talk.request.cancelled = True
            body = talk.answer.whole()
            self._num_prompt += talk.answer.num_prompt
            self._num_new += talk.answer.num_new
        except Refusal as refused:
            status, body = refused.status, error_body(refused)
            self._num_refused += 1
        response = {"status_code": status, "body": body}
        answer = {"custom_id": line.custom_id, "response": response, "error": None}
        print(json.dumps(answer), flush=True)
