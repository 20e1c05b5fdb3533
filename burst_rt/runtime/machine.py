"""What a rank computes on and sends with: device, lanes, driver, and the slots of calls.

| device | transport | network lane | a message is |
|---|---|---|---|
| cpu | local, mpi, torch | of the host | host memory |
| cpu | staged | of the host, with copies in parallel | a chunk of host memory |
| cuda | nccl, torch (its NCCL) | a stream | device memory |
| cuda | mpi, local | of the host | device memory (an MPI that takes it: `burst-rt doctor` tells) |
| cuda | staged | of the host, copies on two streams | a pinned chunk of host memory |

A call takes its slots when it is issued, and gives the slots back with the event after which they
are free. On a device a call is issued before earlier calls have ended. The next call gets a set of
slots at once, and its work waits for the event on the device. On the host a call has ended when it
returns. Large slots are then freed, so that the program has its memory back. Small slots are kept,
because making them costs more than holding them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from burst_rt.drivers import (
    BaseDriver,
    CudaDriver,
    DriverOptions,
    HostDriver,
    flat_bytes,
    raw_bytes,
)
from burst_rt.drivers.device import DeviceEvent, Stream, StreamDevice, TorchDevice
from burst_rt.errors import ConfigError
from burst_rt.runtime.choosing import TransportChoice
from burst_rt.runtime.stats import Stats
from burst_rt.scheduler import DEVICE_LANES, HOST_LANES, NCCL_LANES, Graph, Lane, Schedule
from burst_rt.transport import Memory, OrderedTransport, Transport
from burst_rt.transport.staged import stage_graph

if TYPE_CHECKING:
    from burst_rt.scheduler.simulator import Hardware

__all__ = ["CallCounts", "Cluster", "Machine", "Mark", "SlotPool", "Slots"]

# Maximum size of a set of slots that is kept between calls on the host.
_SMALL_BYTES = 1 << 20
# Calls within which the idle slots of a device count as recent: a few kinds of layers take turns.
_RECENT = 16
# Number of calls that wait for their times to be read. Reading the times costs time, so it is put
# off until somebody asks for statistics; beyond that number each call reads those of one.
_UNREAD_UP_TO = 64


class Cluster(NamedTuple):
    """What is around a rank: its neighbours, and the machine to plan with."""

    # How many ranks each node has, if all have as many; else 1. A node is a host, or the hosts that
    # an NVLink domain joins.
    ranks_per_node: int = 1
    ranks_here: int = 1  # how many ranks this rank's host has
    hardware: Hardware | None = None  # if there is a file for it


_UNKNOWN = Cluster()


class Machine:
    """A rank's device and transport, and what follows from the two; see the module's table.

    choice: the transport, and why it was chosen.
    carrier: what carries the messages: an `OrderedTransport` where the choice's wire is NCCL, else
    the host's `Transport`.
    streams: the device's streams; tests give a double.
    """

    def __init__(
        self,
        device: torch.device,
        choice: TransportChoice,
        carrier: Transport | OrderedTransport,
        cluster: Cluster = _UNKNOWN,
        streams: StreamDevice | None = None,
    ) -> None:
        self.device = device
        self.choice = choice
        self.carrier = carrier
        self.ranks_per_node, self.ranks_here, self.hardware = cluster
        on_host = choice.wire == "host"
        # One of the two is None.
        self.transport = cast(Transport, carrier) if on_host else None
        self.wire = None if on_host else cast(OrderedTransport, carrier)
        self._streams = (
            TorchDevice(device) if streams is None and device.type == "cuda" else streams
        )
        self._pool = SlotPool(self._streams)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that graphs are built for."""
        if self._streams is None:
            return HOST_LANES
        return NCCL_LANES if self.wire is not None else DEVICE_LANES

    def lower(self, graph: Graph) -> Graph:
        """The graph that this machine runs, made from the graph that a strategy built.

        Raises ConfigError for more messages than the transport can tell apart.
        """
        lowered = stage_graph(graph) if self.choice.staged else graph
        self.check_tags(lowered)
        return lowered

    def check_tags(self, graph: Graph) -> None:
        """Raises ConfigError where the transport cannot take a message's tag."""
        most = None if self.transport is None else self.transport.max_tag
        if most is None:
            return
        largest = max((m.tag for t in graph.tasks for m in (*t.sends, *t.recvs)), default=0)
        if largest > most:
            raise ConfigError(
                f"a graph has message tags up to {largest}; this MPI allows {most}; use another "
                "MPI, or fewer ranks or parts"
            )

    def memory(self, tensor: torch.Tensor) -> Memory:
        """The bytes of a contiguous tensor, in the form that this machine's transport takes."""
        return raw_bytes(tensor) if tensor.device.type == "cpu" else flat_bytes(tensor)

    def caller(self) -> Stream | None:
        """The stream of the caller's work; None on the host."""
        return None if self._streams is None else self._streams.caller()

    def straight_stream(self) -> int | None:
        """The handle of the caller's stream, for work that needs no driver.

        None on the host, and where another device is the current one. Does not block.
        """
        streams = self._streams
        if streams is None or not streams.is_current():
            return None
        return streams.handle(streams.caller())

    def take(self, key: object, make: Callable[[], Slots]) -> Slots:
        """Slots for one call: idle slots of the same `key` (the very same object), or new slots.

        Does not block: on a device the caller's stream waits until idle slots are free.
        """
        return self._pool.take(key, make)

    def driver(self, schedule: Schedule, options: DriverOptions) -> BaseDriver:
        """A driver for one run. Raises ConfigError for a graph built for lanes of another kind."""
        graph = schedule.graph
        if (self.wire is None) in graph.network_kinds:
            raise ConfigError(
                "the graph must have the lanes of this context "
                f"({self.choice.name} on {self.device.type}), got others; pass ctx.lanes to "
                "GraphBuilder"
            )
        if self._streams is None or not graph.has_ordered_lanes:
            return HostDriver(graph, self.transport, options)
        return CudaDriver(schedule, self._streams, self.transport, self.wire, options)

    def enter(self) -> None:
        """Makes this rank's GPU, if the rank has one, the current GPU of the calling thread."""
        if self._streams is not None:
            self._streams.enter()

    def enter_to_watch(self) -> None:
        """Does what `enter` does, for a thread that only asks whether events have happened."""
        if self._streams is not None:
            self._streams.enter_to_watch()

    def join(self, driver: BaseDriver) -> DeviceEvent | None:
        """Makes the caller's stream wait for a run that has been issued. Does not block.

        Returns the event after which the run's memory is free; None where the memory is free
        already.
        """
        return driver.join() if isinstance(driver, CudaDriver) else None

    def give_back(
        self, key: object, slots: Slots, free: DeviceEvent | None, *, read_since: bool = False
    ) -> None:
        """Gives back what was taken for `key`: it may be used again after the event.

        On a device nothing is given back without an event. read_since: whether the caller's stream
        has been told to read the slots since the event.
        """
        if self._streams is None or free is not None:
            if read_since and self._streams is not None:
                free = self._streams.record(self._streams.caller())
            self._pool.give_back(key, slots, free)

    def forget(self) -> bool:
        """Lets go of the idle slots, and says whether there were any. Does not block."""
        return self._pool.forget()


@dataclass(frozen=True)
class Slots:
    """The memory that one run of a plan receives into and packs in, by part."""

    storage: dict[int, torch.Tensor]  # raw bytes, uint8
    memory: dict[int, Memory]  # the same bytes, as the transport takes them
    home: Stream | None = None  # the stream they were allocated on; None on the host
    # Views of slots, by part and by the owner of the block in it; made when first used.
    views: dict[tuple[int, int], Any] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(slot.nbytes for slot in self.storage.values())


class SlotPool:
    """Idle sets of slots, by the object that they are for (by identity).

    Keeps the `capacity` sets that were given back last, and on a device all sets whose last use has
    not ended. Where a device needs a new set, sets that no recent call has taken are let go: masks
    that differ from step to step bring new plans, and the old plans do not come again. device: None
    on the host.
    """

    def __init__(self, device: StreamDevice | None, capacity: int = 4) -> None:
        self._device = device
        self._capacity = capacity
        self._num_taken = 0
        # With the number of sets that had been taken when this one came back.
        self._idle: list[tuple[object, Slots, DeviceEvent, int]] = []

    def take(self, key: object, make: Callable[[], Slots]) -> Slots:
        """A set for `key`: an idle set, or a new one. Does not block.

        The caller's stream is made to wait for the last use of an idle set.
        """
        self._num_taken += 1
        for i, (owner, slots, free, _) in enumerate(self._idle):
            if owner is key:
                del self._idle[i]
                if self._device is not None:
                    self._device.wait(self._device.caller(), free)
                return slots
        if self._device is not None:
            self._let_go(self._num_taken - _RECENT)
        return make()

    def give_back(self, key: object, slots: Slots, free: DeviceEvent) -> None:
        """Gives slots back: they may be used again after the event, on the host at once."""
        if self._device is None and slots.nbytes > _SMALL_BYTES:
            return
        self._idle.append((key, slots, free, self._num_taken))
        while len(self._idle) > self._capacity and (
            self._device is None or self._device.happened(self._idle[0][2])
        ):
            del self._idle[0]

    def forget(self) -> bool:
        """Lets go of all idle sets, and says whether there were any. Does not block."""
        had_any = bool(self._idle)
        self._let_go(self._num_taken)
        return had_any

    def _let_go(self, up_to: int) -> None:
        """Lets go of the sets that came back when so many had been taken, or fewer.

        A device's allocator hands their memory out again on the stream that they were allocated on.
        Their last use may have been in a call from another stream, so the first stream is made to
        wait for the last use.
        """
        while self._idle and self._idle[0][3] <= up_to:
            _, slots, free, _ = self._idle.pop(0)
            if self._device is not None:
                self._device.wait(slots.home, free)


class Mark(NamedTuple):
    """The clock (`time.perf_counter`) and the transport's counts as a call begins."""

    started_s: float
    sent: int
    received: int


class CallCounts:
    """Adds up what `Stats` says. No method blocks."""

    def __init__(self, transport: Transport | OrderedTransport) -> None:
        self._transport = transport
        self._calls = self._sent = self._received = 0
        self._compute_s = self._wait_s = self._total_s = 0.0
        self._unread: deque[BaseDriver] = deque()  # drivers whose times are not added yet

    def mark(self) -> Mark:
        """What `count` is given once the call has been performed."""
        transport = self._transport
        return Mark(time.perf_counter(), transport.bytes_sent, transport.bytes_received)

    def count_alone(self, started_s: float) -> None:
        """Counts a call that needed no driver. started_s: the clock as it began."""
        self._calls += 1
        self._total_s += time.perf_counter() - started_s

    def count(self, driver: BaseDriver, mark: Mark) -> None:
        """Counts a call that has been performed."""
        self._calls += 1
        self._sent += self._transport.bytes_sent - mark.sent
        self._received += self._transport.bytes_received - mark.received
        self._total_s += time.perf_counter() - mark.started_s
        if not driver.ends_later:
            self._add(driver)
        elif driver.timed:
            self._unread.append(driver)
            if len(self._unread) > _UNREAD_UP_TO:
                self._read_first()

    def stats(self) -> Stats:
        """The counts so far. On a device, times cover only the calls that have ended."""
        self._read_times()
        return Stats(
            self._calls, self._sent, self._received, self._compute_s, self._wait_s, self._total_s
        )

    def _read_times(self) -> None:
        """Adds the times of the calls that have ended."""
        while self._unread and self._read_first():
            pass

    def _read_first(self) -> bool:
        """Adds the times of the first call, if it has ended."""
        if not self._unread[0].settled():
            return False
        self._add(self._unread.popleft())
        return True

    def _add(self, driver: BaseDriver) -> None:
        self._compute_s += driver.compute_s
        self._wait_s += driver.wait_s
