"""torch.cuda: devices, streams and events. Work is done when it is put on a stream; see `books`."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch

from emulated.books import HOST, Books, Key, place

__all__ = [
    "BOOKS",
    "LAG_S",
    "Event",
    "Stream",
    "current",
    "index_of",
    "install",
    "library",
    "stream_of",
    "waits",
]

BOOKS = Books()
NUM_DEVICES = int(os.environ["EMULATED_GPUS"])
# How long devices now and then do nothing, and how often: what does not wait for them is too early.
LAG_S = float(os.environ.get("EMULATED_LAG_S", "0"))
_LAGS = 0.05
# Where the host waited for a device of late, and why.
waits: deque[str] = deque(maxlen=1000)
_CAPABILITY = (9, 0)
_MEMORY_BYTES = 80 << 30
# When the host sees that an event has happened.
_draw = random.Random(0)

library = ctypes.CDLL(os.environ["EMULATED_LIBRARY"])
library.emulated_stream.restype = ctypes.c_int64
library.emulated_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]


def index_of(device: Any) -> int:
    """The index of a device as torch's calls name it: None, a number, a name or a torch.device."""
    if device is None:
        return current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None or index < 0 else index


def current_device() -> int:
    """See torch.cuda."""
    return int(library.emulated_device())


def set_device(device: Any) -> None:
    """See torch.cuda."""
    index = index_of(device)
    if index >= NUM_DEVICES:
        raise RuntimeError("CUDA error: invalid device ordinal")
    library.emulated_set_device(index)


class _Item(NamedTuple):
    """Work that could not be done when it was put on its stream."""

    ready: Callable[[], bool]
    do: Callable[[], None]


class Stream:
    """A stream. Work is done at once, but for work that waits for messages, and what follows it."""

    by_key: ClassVar[dict[Key, Stream]] = {}
    # Held while queues change; says when something has been done or has arrived.
    changed = threading.Condition()
    failed: ClassVar[list[BaseException]] = []
    thread: threading.Thread | None = None  # of the devices; made when it has work first
    ended = False

    def __init__(self, device: Any = None, priority: int = 0, handle: int | None = None) -> None:
        self.device_index, self.priority = index_of(device), priority
        self._queue: deque[_Item] = deque()
        self.num_put = self.num_done = 0  # of what has been in the queue
        # Events recorded here, and the last one that the host has seen happen.
        self.num_recorded = self.last_seen = 0
        with BOOKS.lock:
            self.cuda_stream = 1000 + len(Stream.by_key) if handle is None else handle
            self.stream_id = self.cuda_stream
            self.key: Key = (self.device_index, self.cuda_stream)
            Stream.by_key[self.key] = self

    @property
    def device(self) -> torch.device:
        """The device."""
        return torch.device("cuda", self.device_index)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def is_waiting(self) -> bool:
        """Whether work that is put on the stream now has to wait."""
        return self.num_done < self.num_put

    def put(self, do: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        """Has work done by the device's thread, once it is ready and all before it is done."""
        with Stream.changed:
            if Stream.thread is None:
                Stream.thread = threading.Thread(target=Stream.work, daemon=True)
                Stream.thread.start()
                # A thread that is in torch when Python ends would abort the process.
                atexit.register(Stream.end)
            self._queue.append(_Item(ready, do))
            self.num_put += 1
            Stream.changed.notify_all()

    def lag(self) -> None:
        """Now and then has all that comes next on the stream wait for a moment."""
        if LAG_S and _draw.random() < _LAGS:
            end_s = time.perf_counter() + LAG_S
            self.put(_do_nothing, lambda: time.perf_counter() >= end_s)

    def finish(self, number: int | None = None) -> None:
        """Waits until so much is done (None: all)."""
        number = self.num_put if number is None else number
        with Stream.changed:
            Stream.changed.wait_for(lambda: self.num_done >= number or Stream.failed)
        if Stream.failed:
            raise RuntimeError("work of an emulated GPU failed") from Stream.failed[0]

    def wait_event(self, event: Event) -> None:
        """See torch."""
        if not event.is_over():
            event.keeps_waiting(self)
        BOOKS.after(self.key, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        """See torch."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """See torch."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """See torch."""
        return self.record_event().query()

    def synchronize(self) -> None:
        """See torch."""
        self.record_event().synchronize()

    def wait_here(self, why: str) -> None:
        """Has the host wait for the stream, and notes where."""
        self.synchronize()
        waits.append(f"{why} at {place()}")

    @staticmethod
    def end() -> None:
        """Ends the device's thread. What is on the streams is lost."""
        with Stream.changed:
            Stream.ended = True
            Stream.changed.notify_all()
        assert Stream.thread is not None
        Stream.thread.join()

    @staticmethod
    def work() -> None:
        """The device's thread: does what is ready."""
        while not Stream.ended:
            with Stream.changed:
                streams = [*Stream.by_key.values()]
                ready = [stream for stream in streams if stream._queue and stream._queue[0].ready()]
                if not ready:
                    Stream.changed.wait(LAG_S or None)
                    continue
            for stream in ready:
                try:
                    with torch.inference_mode():  # which may write to all tensors
                        stream._queue[0].do()
                except BaseException as error:  # noqa: BLE001  (raised where the host waits)
                    Stream.failed.append(error)
                with Stream.changed:
                    stream._queue.popleft()
                    stream.num_done += 1
                    Stream.changed.notify_all()


class Event:
    """An event. Like CUDA's, one that was never recorded has happened."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timed, self.clock, self.at_s = enable_timing, dict[Key, int](), 0.0
        self._stream: Stream | None = None
        self._number = 0  # of the stream's work that comes before
        self._place = 0  # among the stream's events

    def record(self, stream: Stream | None = None) -> None:
        """See torch."""
        self._stream = stream = stream or current_stream()
        self._number, self.clock = stream.num_put, BOOKS.clock(stream.key)
        stream.num_recorded += 1
        self._place = stream.num_recorded
        self.at_s = time.perf_counter()

    def is_over(self) -> bool:
        """Whether what comes before has been done; the host does not learn of it by this."""
        return self._stream is None or self._stream.num_done >= self._number

    def keeps_waiting(self, waiting: Stream) -> None:
        """Has a stream wait for what is recorded now."""
        stream, number = self._stream, self._number
        waiting.put(_do_nothing, lambda: stream is None or stream.num_done >= number)

    def wait(self, stream: Stream | None = None) -> None:
        """See torch."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """See torch. When the host learns of it is drawn, unless it has seen a later one."""
        seen = self._stream is None or self._stream.last_seen >= self._place
        if not self.is_over() or (not seen and _draw.random() < 0.5):
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """See torch."""
        if self._stream is not None:
            self._stream.finish(self._number)
            self._stream.last_seen = max(self._stream.last_seen, self._place)
        BOOKS.after(HOST, self.clock)

    def elapsed_time(self, end: Event) -> float:
        """See torch."""
        if not (self.timed and end.timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return (end.at_s - self.at_s) * 1e3


def _do_nothing() -> None:
    pass


def stream_of(index: int, handle: int) -> Stream:
    """The stream of a device with a handle; that with handle 0 is its default stream."""
    with BOOKS.lock:
        return Stream.by_key.get((index, handle)) or Stream(index, handle=handle)


def current(index: int) -> Stream:
    """The calling thread's current stream of a device."""
    return stream_of(index, library.emulated_stream(index))


def current_stream(device: Any = None) -> Stream:
    """See torch.cuda."""
    return current(index_of(device))


def set_stream(stream: Stream) -> None:
    """See torch.cuda."""
    library.emulated_set_stream(stream.device_index, stream.cuda_stream)
    library.emulated_set_device(stream.device_index)


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    if stream is None:
        yield
        return
    device, former = current_device(), current(stream.device_index)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(former)
        library.emulated_set_device(device)


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    """torch.cuda.device."""
    former = current_device()
    if device is not None:
        set_device(device)
    try:
        yield
    finally:
        library.emulated_set_device(former)


def synchronize(device: Any = None) -> None:
    """See torch.cuda."""
    for key in BOOKS.streams(index_of(device)):
        stream_of(*key).synchronize()
    waits.append(f"synchronize at {place()}")


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="Emulated GPU",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        multi_processor_count=132,
        total_memory=_MEMORY_BYTES,
        L2_cache_size=50 << 20,
        warp_size=32,
        shared_memory_per_block_optin=227 << 10,
        uuid=f"{index_of(device):08d}-0000-0000-0000-000000000000",
    )


_RECORD = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
_BLOCK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
_of_autograd: list[Event] = []


def _record(index: int, handle: int) -> int:
    _of_autograd.append(stream_of(index, handle).record_event())
    return len(_of_autograd)


def _block(event: int, index: int, handle: int) -> None:
    stream_of(index, handle).wait_event(_of_autograd[event - 1])


# Kept: the library calls them as long as the process lives.
_CALLED = _RECORD(_record), _BLOCK(_block)


def install() -> None:
    """Puts all this in the place of torch's."""
    library.emulated_start(NUM_DEVICES, *_CALLED)
    names = {
        "_lazy_init": _gives(None),
        "init": _gives(None),
        "is_initialized": lambda: bool(Stream.by_key),
        "is_available": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "current_device": current_device,
        "set_device": set_device,
        "device": on_device,
        "Stream": Stream,
        "Event": Event,
        "ExternalStream": lambda handle, device=None: stream_of(index_of(device), handle),
        "current_stream": current_stream,
        "default_stream": lambda device=None: stream_of(index_of(device), 0),
        "set_stream": set_stream,
        "stream": on_stream,
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda device=None: "Emulated GPU",
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "is_bf16_supported": lambda *_: True,
        "mem_get_info": lambda device=None: (_MEMORY_BYTES, _MEMORY_BYTES),
        "empty_cache": _gives(None),
        "memory_allocated": _gives(0),
        "max_memory_allocated": _gives(0),
        "memory_reserved": _gives(0),
        "reset_peak_memory_stats": _gives(None),
        "manual_seed": _gives(None),
        "manual_seed_all": _gives(None),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state.clone()),
    }
    for name, stand_in in names.items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = _gives(None), _gives(None)


def _gives(value: int | None) -> Callable[..., int | None]:
    # A function of its own for each name: torch.compile keeps a list of what each one is.
    return lambda *_: value
