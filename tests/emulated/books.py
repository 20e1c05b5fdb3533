"""Who used which bytes of a device when, by vector clocks (Lamport; Mattern).

Every stream has a clock, and the host has one. Work on a stream comes after earlier work there and
after all that the host had seen when it put the work there. An event carries the clock of its
stream; a stream that waits for it, or a host that sees it happen, takes that clock over.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

__all__ = ["HOST", "Books", "Key", "Race", "Span", "place"]

Key = tuple[int, int]  # of a stream: its device, and its handle
Clock = dict[Key, int]
HOST: Key = (-1, -1)
# Files whose lines say nothing about the program.
_INNER = ("/tests/emulated/", "/site-packages/", "/lib/python", "<")


class Race(AssertionError):
    """Two uses of the same bytes that nothing orders, where at least one use writes."""


class Span(NamedTuple):
    """Bytes of a memory: from `first` up to `end`, not including it; `base` is where it begins."""

    base: int
    first: int
    end: int


class _Use(NamedTuple):
    span: Span
    stream: Key
    time: int  # on the stream's clock
    writes: bool
    what: str

    def meets(self, other: Span) -> bool:
        return self.span.first < other.end and other.first < self.span.end

    def lies_in(self, other: Span) -> bool:
        return other.first <= self.span.first and self.span.end <= other.end

    def __str__(self) -> str:
        return f"{self.what} {'writes' if self.writes else 'reads'} on {self.stream}"


def place(depth: int = 3) -> str:
    """The lines of the program that are being run, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    lines = list[str]()
    while frame is not None and len(lines) < depth:
        name = frame.f_code.co_filename
        if not any(part in name for part in _INNER[:-1]) and not name.startswith(_INNER[-1]):
            lines.append(f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


class Books:
    """The books of all devices. Every method may be called by any thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._clocks: dict[Key, Clock] = defaultdict(dict)
        self._uses: dict[int, list[_Use]] = {}  # by where the memory begins
        self._sizes: dict[int, int] = {}  # of memory that is in use, likewise
        # By stream: sizes of memory that has gone back, with uses that its next work may overtake.
        self._gone: dict[Key, list[tuple[int, list[_Use]]]] = defaultdict(list)

    def clock(self, stream: Key) -> Clock:
        """What has happened once all that is on the stream now is done."""
        with self.lock:
            return _merged(self._clocks[stream], self._clocks[HOST])

    def after(self, stream: Key, clock: Clock) -> None:
        """Puts whatever comes next on the stream (or on HOST) after all that the clock says."""
        with self.lock:
            self._clocks[stream] = _merged(self._clocks[stream], clock)

    def streams(self, device: int) -> list[Key]:
        """The streams of a device that have had work."""
        with self.lock:
            return [key for key in self._clocks if key[0] == device]

    def begin(self, base: int, size: int, stream: Key) -> None:
        """Notes new memory. It may be any that has gone back to the stream, and is as large."""
        with self.lock:
            self._sizes[base], self._uses[base] = size, []
            former, self._gone[stream] = self._gone[stream], []
            for size_of_former, uses in former:
                left = [use for use in uses if not self._is_before(use, stream)]
                if left:
                    self._gone[stream].append((size_of_former, left))
                if size_of_former >= size:
                    whole = Span(base, base, base + size)
                    self._uses[base] += [use._replace(span=whole) for use in left]

    def end(self, base: int, stream: Key) -> None:
        """Notes that memory goes back to the stream that it was allocated on.

        Like CUDA's memory in torch it may be used again at once, by what comes next on that stream.
        """
        with self.lock:
            uses = [use for use in self._uses.pop(base, ()) if not self._is_before(use, stream)]
            self._gone[stream].append((self._sizes.pop(base, 0), uses))

    def _is_before(self, use: _Use, stream: Key) -> bool:
        """Whether what comes next on a stream comes after a use."""
        return use.stream == stream or self.clock(stream).get(use.stream, 0) >= use.time

    def keep(self, base: int, stream: Key) -> None:
        """Memory does not go back before what is on the stream now is done (`record_stream`)."""
        with self.lock:
            self._uses[base] = [use for use in self._uses[base] if use.stream != stream]

    def span(self, address: int, size: int) -> Span:
        """The memory that an address lies in."""
        with self.lock:
            base = max(base for base in self._sizes if base <= address)
            if address + size > base + self._sizes[base]:
                raise Race(f"{size} bytes at {address:#x} are no memory of a device")
            return Span(base, address, address + size)

    def size(self, base: int) -> int:
        """The number of bytes of a memory."""
        return self._sizes[base]

    def use(self, stream: Key, reads: Iterable[Span], writes: Iterable[Span], what: str) -> None:
        """Notes work on a stream. Raises Race."""
        with self.lock:
            clock = self._clocks[stream] = self.clock(stream)
            clock[stream] = now = clock.get(stream, 0) + 1
            for spans, write in ((reads, False), (writes, True)):
                for span in spans:
                    self._use(_Use(span, stream, now, write, what), clock)

    def _use(self, new: _Use, clock: Clock) -> None:
        left = []
        for use in self._uses.setdefault(new.span.base, []):
            if use.meets(new.span):
                if (new.writes or use.writes) and clock.get(use.stream, 0) < use.time:
                    raise Race(f"{new}, and nothing puts it after {use}")
                # What is ordered after the new use is ordered after these, too.
                if use.lies_in(new.span) and (
                    new.writes or (use.stream == new.stream and not use.writes)
                ):
                    continue
            left.append(use)
        self._uses[new.span.base] = [*left, new]


def _merged(a: Clock, b: Clock) -> Clock:
    return {key: max(a.get(key, 0), b.get(key, 0)) for key in (*a, *b)}
