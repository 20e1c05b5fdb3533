"""A device as the CUDA driver sees it: streams, events, and nothing else. `TorchDevice` is the real
one; tests have one that keeps books.

Streams and events are whatever the device says they are; the driver only hands them back.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, TypeAlias

import torch

__all__ = ["Device", "DeviceEvent", "Stream", "TorchDevice"]

# Opaque to the driver: torch.cuda.Stream and torch.cuda.Event here, other things in tests.
Stream: TypeAlias = Any
DeviceEvent: TypeAlias = Any

_ORIGIN_S = 10.0
# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL of cuda.h: captures of other threads do not concern this one.
_CAPTURE_THREAD_LOCAL = 1


class Device(Protocol):
    """What work can be put on, in order, without waiting for it. No method blocks (`origin` for
    some microseconds).
    """

    def enter(self) -> None:
        """Makes the device that of the thread which calls."""

    def enter_to_watch(self) -> None:
        """As `enter`, for a thread that only asks whether events have happened."""

    def caller(self) -> Stream:
        """The stream the caller's work is on."""

    def lane(self, name: str) -> Stream:
        """The stream of a lane; always the same for the same name."""

    def handle(self, stream: Stream) -> int:
        """The number by which libraries know the stream."""

    def record(self, stream: Stream) -> DeviceEvent:
        """An event that has happened once all that is on the stream now is done."""

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """What is put on the stream from now on starts after the event."""

    def happened(self, event: DeviceEvent) -> bool:
        """Whether it has; then its results can be read by the host."""

    def seconds(self, first: DeviceEvent, last: DeviceEvent) -> float:
        """Time between two events that have happened."""

    def origin(self) -> tuple[DeviceEvent, float]:
        """An event that has happened, at most some seconds ago, and when it did by
        `time.perf_counter`.
        """

    def on(self, stream: Stream, name: str) -> AbstractContextManager[object]:
        """Inside, work goes to the stream, and shows under `name` in a profile."""


class TorchDevice:
    """See `Device`. Streams of its own for each lane of one context on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes: dict[str, torch.cuda.Stream] = {}
        self._origin: tuple[torch.cuda.Event, float] | None = None

    def enter(self) -> None:
        """See `Device.enter`. A thread that has not called it takes memory on the first device
        for whatever it asks of CUDA."""
        torch.cuda.set_device(self._device)

    def enter_to_watch(self) -> None:
        """See `Device.enter_to_watch`. While the program captures a CUDA graph, CUDA by default
        takes a question about any event, from any thread, for an error of the capture; a thread
        may say that it has no part in it."""
        self.enter()
        mode = ctypes.c_int(_CAPTURE_THREAD_LOCAL)
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def caller(self) -> torch.cuda.Stream:
        """See `Device.caller`: torch's current stream, of the thread that asks."""
        return torch.cuda.current_stream(self._device)

    def lane(self, name: str) -> torch.cuda.Stream:
        """See `Device.lane`. Transfers have priority over compute: others wait for them."""
        stream = self._lanes.get(name)
        if stream is None:
            stream = self._lanes[name] = torch.cuda.Stream(
                self._device, priority=0 if name == "compute" else -1
            )
        return stream

    def handle(self, stream: torch.cuda.Stream) -> int:
        """See `Device.handle`."""
        return int(stream.cuda_stream)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """See `Device.record`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """See `Device.wait`."""
        stream.wait_event(event)

    def happened(self, event: torch.cuda.Event) -> bool:
        """See `Device.happened`."""
        return bool(event.query())

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """See `Device.seconds`."""
        return float(first.elapsed_time(last)) / 1e3

    def origin(self) -> tuple[torch.cuda.Event, float]:
        """See `Device.origin`. Made anew every 10 s, because clocks drift, on a stream where
        nothing else is.
        """
        if self._origin is None or time.perf_counter() - self._origin[1] > _ORIGIN_S:
            event = self.record(self.lane("clock"))
            event.synchronize()
            self._origin = event, time.perf_counter()
        return self._origin

    def on(self, stream: torch.cuda.Stream, name: str) -> AbstractContextManager[object]:
        """See `Device.on`; the name is an NVTX range."""
        return _Range(stream, name)


class _Range:
    """A stream made current, and an NVTX range around the launches."""

    def __init__(self, stream: torch.cuda.Stream, name: str) -> None:
        self._current = torch.cuda.stream(stream)
        self._name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._name)
        self._current.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._current.__exit__(*raised)
        torch.cuda.nvtx.range_pop()
