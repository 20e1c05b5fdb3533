"""A device as the CUDA driver sees it: streams, events, and nothing else.

`TorchDevice` is a real device; tests have a double that keeps books. Only the device knows what
streams and events are: the driver hands them back without looking into them.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, TypeAlias

import torch

__all__ = ["DeviceEvent", "Stream", "StreamDevice", "TorchDevice"]

# Opaque to the driver: torch.cuda.Stream and torch.cuda.Event here, other types in tests.
Stream: TypeAlias = Any
DeviceEvent: TypeAlias = Any

# Seconds until the device's and the host's clocks are compared again.
_ORIGIN_S = 10.0
# Maximum number of idle events that are kept, of each kind. A new event takes some microseconds.
_IDLE = 1024
# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h: captures of other threads do not concern this one.
_CAPTURE_THREAD_LOCAL = 1


class StreamDevice(Protocol):
    """A device with streams: work is put on a stream, and runs in the order it was put there.

    No method blocks, except `origin` for some microseconds.
    """

    def enter(self) -> None:
        """Makes this device the current device of the calling thread."""

    def enter_to_watch(self) -> None:
        """Does what `enter` does, for a thread that only asks whether events have happened."""

    def is_current(self) -> bool:
        """Whether this device is the current device of the calling thread."""

    def caller(self) -> Stream:
        """The stream of the caller's work."""

    def lane(self, name: str) -> Stream:
        """The stream of a lane; always the same stream for the same name."""

    def handle(self, stream: Stream) -> int:
        """The number by which libraries know the stream."""

    def record(self, stream: Stream, *, timed: bool = False) -> DeviceEvent:
        """An event that happens once all work that is on the stream now is done.

        timed: whether `seconds` will be asked about it.
        """

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """Makes work that is put on the stream from now on start after the event."""

    def happened(self, event: DeviceEvent) -> bool:
        """Whether the event has happened; if so, the host can read what the work gave."""

    def seconds(self, first: DeviceEvent, last: DeviceEvent) -> float:
        """Seconds between two timed events that have happened."""

    def origin(self) -> tuple[DeviceEvent, float]:
        """A recent timed event that has happened, and when it happened by `time.perf_counter`.

        The event is at most some seconds old.
        """

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside, work goes to the stream."""

    def begin(self, name: str) -> None:
        """From here to `end` work shows under this name in a profile."""

    def end(self) -> None:
        """Ends what `begin` began."""


class _PooledEvent:
    """An event of CUDA's that goes back to its pool once nobody holds this object.

    It may be recorded again before it has happened: who waits for it on a stream waits for what was
    recorded when the wait was put there, and who asks whether it has happened holds this object.
    """

    __slots__ = ("_pool", "event")

    def __init__(self, event: torch.cuda.Event, pool: deque[torch.cuda.Event]) -> None:
        self.event, self._pool = event, pool

    def __del__(self) -> None:
        self._pool.append(self.event)


class TorchDevice:
    """A CUDA device; see `StreamDevice`. Each lane of a context has its own stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[str, torch.cuda.Stream] = {}
        self._origin: tuple[_PooledEvent, float] | None = None
        # Events that nobody holds any more, without times and with them.
        self._idle: tuple[deque[torch.cuda.Event], ...] = (deque(maxlen=_IDLE), deque(maxlen=_IDLE))

    def enter(self) -> None:
        """Makes this device the thread's current device.

        A thread that has not called `enter` takes memory on the first device for any call of CUDA.
        """
        torch.cuda.set_device(self._device)

    def enter_to_watch(self) -> None:
        """Enters the device, and exempts the thread from captures of CUDA graphs.

        While the program captures a CUDA graph, CUDA by default takes a query of any event, from
        any thread, for an error of the capture. A thread may say that it has no part in captures.
        """
        self.enter()
        mode = ctypes.c_int(_CAPTURE_THREAD_LOCAL)
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def is_current(self) -> bool:
        """See `StreamDevice.is_current`."""
        return torch.cuda.current_device() == self._device.index

    def caller(self) -> torch.cuda.Stream:
        """torch's current stream in the calling thread."""
        return torch.cuda.current_stream(self._device)

    def lane(self, name: str) -> torch.cuda.Stream:
        """The stream of a lane.

        Transfers have priority over compute, because other ranks wait for transfers.
        """
        stream = self._lanes.get(name)
        if stream is None:
            stream = self._lanes[name] = torch.cuda.Stream(
                self._device, priority=0 if name == "compute" else -1
            )
        return stream

    def handle(self, stream: torch.cuda.Stream) -> int:
        """The CUDA handle of the stream, as a number."""
        return int(stream.cuda_stream)

    def record(self, stream: torch.cuda.Stream, *, timed: bool = False) -> _PooledEvent:
        """See `StreamDevice.record`. The event is an old one, if one is idle."""
        pool = self._idle[timed]
        try:
            event = pool.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return _PooledEvent(event, pool)

    def wait(self, stream: torch.cuda.Stream, event: _PooledEvent) -> None:
        """See `StreamDevice.wait`."""
        stream.wait_event(event.event)

    def happened(self, event: _PooledEvent) -> bool:
        """See `StreamDevice.happened`."""
        return bool(event.event.query())

    def seconds(self, first: _PooledEvent, last: _PooledEvent) -> float:
        """See `StreamDevice.seconds`."""
        return float(first.event.elapsed_time(last.event)) / 1e3

    def origin(self) -> tuple[_PooledEvent, float]:
        """A recent event and its time; blocks for some microseconds if it is recorded again.

        The event is recorded again every 10 s, because clocks drift. Its stream has no other work.
        """
        if self._origin is None or time.perf_counter() - self._origin[1] > _ORIGIN_S:
            event = self.record(self.lane("clock"), timed=True)
            event.event.synchronize()
            self._origin = event, time.perf_counter()
        return self._origin

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """See `StreamDevice.on`."""
        return torch.cuda.stream(stream)

    def begin(self, name: str) -> None:
        """Begins an NVTX range."""
        torch.cuda.nvtx.range_push(name)

    def end(self) -> None:
        """Ends it."""
        torch.cuda.nvtx.range_pop()
