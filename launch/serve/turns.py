"""What ranks do in a turn, and rank 0's decisions on it: which requests are read and written.

A cache with a row for each request writes their next tokens together, and a cache of one sequence
reads prompts, a chunk in a turn. So a long prompt does not hold up the others for longer than a
chunk. A prompt that has been read takes its place in a row, by a copy on each rank. Rows keep their
tokens when a request has ended: a prompt that begins like one of them is read from there on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from burst_rt.errors import ConfigError
from burst_rt.launch.serve.sampling import Chosen, Sampler

__all__ = ["QueueFull", "Request", "Requests", "Turn"]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What all ranks do next, in this order; plain data.

    begin: (a row, and how many of its tokens the prompt begins with) where a prompt is begun. rows:
    for each row its next token, in a list, or no token. chunk: the next tokens of the prompt.
    place: the row that the prompt takes once its chunk has been read; -1: none yet. stop: a signal
    ends the job instead. over: all has been done instead.
    """

    begin: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    place: int = -1
    stop: str = ""
    over: bool = False


class QueueFull(Exception):
    """As many requests wait as may."""


@dataclass(eq=False, kw_only=True)
class Request:
    """A prompt, and what is wanted of it. `tell` gets each token, and then why there are no more:
    "stop" or "length", or "error: " and why. It may be called by any thread.
    """

    prompt: list[int]
    sampling: Sampler
    most_tokens: int
    ends: frozenset[int]  # tokens that end the text
    generator: torch.Generator
    tell: Callable[[Chosen | str], None]
    cancelled: bool = False  # set where nobody waits for it any more
    began_s: float = field(default_factory=time.monotonic)
    num_new: int = 0  # tokens that it has got


@dataclass(eq=False)
class _Row:
    """A row of the cache: the tokens that are in it, and the request whose they are, if it goes on,
    with the token that comes next.
    """

    tokens: list[int] = field(default_factory=list)
    request: Request | None = None
    coming: int = -1
    used_s: float = 0.0


@dataclass(eq=False)
class _Reading:
    """The prompt that is being read: how much of it has been, and the row that it will take."""

    request: Request
    done: int
    row: _Row


class Requests:
    """Rank 0's requests, and its decisions. Only `put` and `close` may be called by other threads.

    num_rows: how many are written at a time. capacity: tokens of a row. chunk: tokens of a prompt
    in a turn. most_waiting: how many may wait for a row. within_s: when a request is given up.
    keep_states: rows have states, of all of their tokens: no prompt goes on from a part of a row.
    """

    def __init__(
        self, num_rows: int, *, capacity: int, chunk: int, most_waiting: int, within_s: float,
        keep_states: bool = False,
    ) -> None:  # fmt: skip
        self.capacity, self._chunk, self._within_s = capacity, chunk, within_s
        self._keep_states = keep_states
        self._waiting: deque[Request] = deque()
        self._most_waiting = most_waiting
        self._closed = False
        self._change = threading.Condition()
        self._rows = [_Row() for _ in range(num_rows)]
        self._reading: _Reading | None = None
        self._num_read = 0  # tokens of prompts since rows were written
        self.num_reused = 0  # tokens of prompts that were not read again

    @property
    def num_waiting(self) -> int:
        """How many wait to be read."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """How many are read or written."""
        return sum(row.request is not None for row in self._rows) + (self._reading is not None)

    @property
    def num_cached(self) -> int:
        """Tokens in all rows, of ended requests too."""
        return sum(len(row.tokens) for row in self._rows)

    def put(self, request: Request) -> None:
        """Takes a request, or raises QueueFull. One that comes after `close` is told an error."""
        with self._change:
            if self._closed:
                request.tell("error: no more requests are taken")
                return
            if len(self._waiting) >= self._most_waiting:
                self._drop_waiting()
            if len(self._waiting) >= self._most_waiting:
                raise QueueFull
            self._waiting.append(request)
            self._change.notify()

    def close(self) -> None:
        """No more requests come: once those that there are have ended, all is over."""
        with self._change:
            self._closed = True
            self._change.notify()

    def next_turn(self, wait_s: float) -> Turn:
        """What the ranks do next; nothing where no request came within `wait_s`."""
        self._give_up()
        with self._change:
            self._drop_waiting()
        begin = self._begin_next(0.0 if self.num_active else wait_s)
        if self._closed and not self.num_active and not self._waiting:
            return Turn(over=True)
        chunk, place = [], -1
        if reading := self._reading:
            chunk = reading.request.prompt[reading.done :][: self._chunk]
            if reading.done + len(chunk) == len(reading.request.prompt):
                place = self._rows.index(reading.row)
        # Several short prompts are read between two tokens of the others, as long as a chunk is.
        waits = 0 < len(chunk) <= self._chunk - self._num_read
        self._num_read = len(chunk) + (self._num_read if waits else 0)
        rows = [[row.coming] if row.request is not None and not waits else [] for row in self._rows]
        return Turn(rows=rows, begin=begin, chunk=chunk, place=place)

    def took(self, turn: Turn, of_rows: Tensor | None, of_chunk: Tensor | None) -> None:
        """A turn has been taken, with these scores: [rows, vocabulary] and [vocabulary]."""
        for number, (row, new) in enumerate(zip(self._rows, turn.rows, strict=True)):
            if new and row.request is not None:
                assert of_rows is not None
                row.tokens += new
                self._go_on(row, row.request, of_rows[number])
        reading = self._reading
        if reading is None:
            return
        reading.done += len(turn.chunk)
        if turn.place >= 0:
            assert of_chunk is not None
            row, request = reading.row, reading.request
            row.tokens, row.request, self._reading = list(request.prompt), request, None
            self._go_on(row, request, of_chunk)

    def fail(self, why: str) -> None:
        """Ends all requests."""
        for row in self._rows:
            if row.request is not None:
                self._end(row, f"error: {why}")
        with self._change:
            others = [*self._waiting, *([self._reading.request] if self._reading else [])]
            self._waiting.clear()
            self._reading = None
        for request in others:
            request.tell(f"error: {why}")

    def _go_on(self, row: _Row, request: Request, scores_V: Tensor) -> None:
        """A request gets its next token."""
        try:
            chosen = request.sampling.choose(scores_V, request.generator)
        except ConfigError as error:
            self._end(row, f"error: {error.message}")
            return
        if chosen.token in request.ends:
            self._end(row, "stop")
            return
        request.num_new += 1
        request.tell(chosen)
        row.coming = chosen.token
        if request.num_new >= request.most_tokens or len(row.tokens) >= self.capacity:
            self._end(row, "length")

    def _end(self, row: _Row, why: str) -> None:
        assert row.request is not None
        request, row.request, row.used_s = row.request, None, time.monotonic()
        request.tell(why)

    def _give_up(self) -> None:
        """Lets go of requests that nobody waits for, or that have taken too long."""
        for row in self._rows:
            if row.request is not None and (why := self._why_not(row.request)):
                self._end(row, why)
        if self._reading is not None and (why := self._why_not(self._reading.request)):
            self._reading.request.tell(why)
            self._reading = None

    def _why_not(self, request: Request) -> str:
        if request.cancelled:
            return "error: cancelled"
        if time.monotonic() - request.began_s > self._within_s:
            return f"error: it took longer than {self._within_s:g} s"
        return ""

    def _drop_waiting(self) -> None:
        """Lets go of requests that wait, and that nobody waits for. With the lock held."""
        for request in [*self._waiting]:
            if why := self._why_not(request):
                self._waiting.remove(request)
                request.tell(why)

    def _begin_next(self, wait_s: float) -> list[int]:
        """Begins to read the next prompt, if none is being read and there is a row for it.

        Returns a row that begins like it, and for how many tokens; nothing if none is begun.
        """
        free = [row for row in self._rows if row.request is None]
        if self._reading is not None or not free:
            return []
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closed, wait_s)
            self._drop_waiting()  # who came meanwhile may have gone
            if not self._waiting:
                return []
            request = self._waiting.popleft()
        alike = [_num_alike(row.tokens, request.prompt) for row in self._rows]
        if self._keep_states:
            alike = [n * (n == len(row.tokens)) for n, row in zip(alike, self._rows, strict=True)]
        source = alike.index(max(alike))
        # The row that begins like it goes on, unless it has much more than that; else the one that
        # was used longest ago.
        row = self._rows[source]
        if row.request is not None or 2 * alike[source] < len(row.tokens):
            row = min(free, key=lambda row: (bool(row.tokens), row.used_s))
        self._reading = _Reading(request, alike[source], row)
        self.num_reused += alike[source]
        return [source, alike[source]]


def _num_alike(tokens: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens both begin with, but for the prompt's last, whose scores are wanted."""
    most = min(len(tokens), len(prompt) - 1)
    differ = np.flatnonzero(np.asarray(tokens[:most]) != np.asarray(prompt[:most]))
    return int(differ[0]) if len(differ) else most
