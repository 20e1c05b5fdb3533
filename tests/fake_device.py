"""A device that does no work, and records by vector clocks which use of memory precedes which.

Every stream, every message under way and the host has a vector clock (Lamport; Mattern). Work on a
stream comes after earlier work on the stream, and after everything that the host had done and seen
when it put the work there. An event carries the clock of its stream. Clocks merge when a stream
waits for an event, and when the host sees that an event has happened or a message has ended.

Two uses of one part, where at least one use writes, must be ordered; otherwise `Race` is raised.
Hardware would get such uses wrong now and then.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from burst_rt.transport import Completion

__all__ = ["FakeDevice", "FakeMessages", "FakeWire", "Part", "Race"]

Clock = dict[str, int]


class Race(AssertionError):
    """Two uses of one part that nothing orders, where at least one use writes."""


@dataclass(frozen=True)
class Part:
    """Memory of one part, as a driver hands it to a transport."""

    name: object

    def __getitem__(self, _: slice) -> Part:
        return self

    def __len__(self) -> int:
        return 8


@dataclass
class _Uses:
    """The last write of a part, and its reads since. A use is (whose clock, time on that clock)."""

    written: tuple[str, int] | None = None
    read: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class _Event:
    """A mark on a stream."""

    clock: Clock  # what the stream had done when the event was recorded
    seen: bool = False  # whether the host has seen the event happen; stays true


class FakeDevice:
    """A `drivers.device.Device`. When the host sees an event happen is drawn from the seed."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self.current = "caller"
        self.num_uses = 0
        self.streams: dict[int, str] = {}  # by handle
        self._uses: dict[object, _Uses] = defaultdict(_Uses)

    def enter(self) -> None:
        pass

    def enter_to_watch(self) -> None:
        pass

    def is_current(self) -> bool:
        return True

    def caller(self) -> str:
        return self.current

    def lane(self, name: str) -> str:
        return name

    def handle(self, stream: str) -> int:
        self.streams[hash(stream)] = stream
        return hash(stream)

    def record(self, stream: str, *, timed: bool = False) -> _Event:
        return _Event(_merged(self.clocks[stream], self.clocks["host"]))

    def wait(self, stream: str, event: _Event) -> None:
        self.merge(stream, event.clock)

    def happened(self, event: _Event) -> bool:
        if not event.seen and self.random.random() < 0.5:
            return False
        event.seen = True
        self.wait("host", event)
        return True

    def seconds(self, first: _Event, last: _Event) -> float:
        return float(sum(last.clock.values()) - sum(first.clock.values()))

    def origin(self) -> tuple[_Event, float]:
        return _Event({}), time.perf_counter()

    def merge(self, stream: str, clock: Clock) -> None:
        """Puts whatever comes next on the stream after everything that the clock says."""
        self.clocks[stream] = _merged(self.clocks[stream], clock)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        outer, self.current = self.current, stream
        yield
        self.current = outer

    def begin(self, name: str) -> None:
        pass

    def end(self) -> None:
        pass

    def use(
        self, reads: Iterable[object], writes: Iterable[object], stream: str | None = None
    ) -> None:
        """Records work on a stream (None: the current one) that reads and writes these parts."""
        stream = self.current if stream is None else stream
        clock = self.clocks[stream] = _merged(self.clocks[stream], self.clocks["host"])
        clock[stream] = clock.get(stream, 0) + 1
        now = (stream, clock[stream])
        self.num_uses += 1
        for part in reads:
            self._require(clock, [self._uses[part].written], f"{stream} reads {part}")
            self._uses[part].read.append(now)
        for part in writes:
            uses = self._uses[part]
            self._require(
                clock,
                [uses.written, *(r for r in uses.read if r != now)],
                f"{stream} writes {part}",
            )
            self._uses[part] = _Uses(now)

    def _require(self, clock: Clock, before: Iterable[tuple[str, int] | None], what: str) -> None:
        for use in before:
            if use is not None and clock.get(use[0], 0) < use[1]:
                raise Race(f"{what}, and nothing puts it after what {use[0]} does at its {use[1]}")


class FakeMessages:
    """A transport of the host, whose messages take times drawn from the device's seed."""

    def __init__(self, device: FakeDevice) -> None:
        self.rank, self.size = 0, 3
        self.bytes_sent = self.bytes_received = 0
        self.max_tag = None
        self._device = device
        self._open: list[int] = []
        self._num = 0

    def isend(self, buffer: Part, peer: int, tag: int) -> int:
        return self._start([buffer.name], [])

    def irecv(self, buffer: Part, peer: int, tag: int) -> int:
        return self._start([], [buffer.name])

    def poll(self) -> list[Completion]:
        done = [handle for handle in self._open if self._device.random.random() < 0.5]
        for handle in done:
            self._open.remove(handle)
            self._device.merge("host", self._device.clocks[f"message {handle}"])
        return [Completion(handle) for handle in done]

    def cancel(self) -> None:
        self._open.clear()

    def close(self) -> None:
        self.cancel()

    def _start(self, reads: list[object], writes: list[object]) -> int:
        self._num += 1
        self._device.use(reads, writes, f"message {self._num}")
        self._open.append(self._num)
        return self._num


class FakeWire:
    """An ordered transport: messages are work on the stream."""

    def __init__(self, device: FakeDevice) -> None:
        self.rank, self.size = 0, 3
        self.bytes_sent = self.bytes_received = 0
        self.entered_s: float | None = None
        self._device = device

    def check(self) -> None:
        pass

    def exchange(
        self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]], stream: int
    ) -> None:
        self._device.use(
            [part.name for part, _ in sends],
            [part.name for part, _ in recvs],
            self._device.streams[stream],
        )

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        pass


def _merged(a: Clock, b: Clock) -> Clock:
    return {name: max(a.get(name, 0), b.get(name, 0)) for name in (*a, *b)}
