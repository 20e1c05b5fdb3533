"""What a rank computes on and sends with: its device, the lanes that graphs are built for, and the
driver that runs them; and the slots that calls receive into.

| device | transport | network lane | a message is |
|---|---|---|---|
| cpu | local, mpi | of the host | host memory |
| cpu | staged | of the host, copies beside it | a chunk of host memory (staging without a GPU) |
| cuda | nccl | a stream | device memory |
| cuda | mpi, local | of the host | device memory (an MPI that takes it: `burst-rt doctor` tells) |
| cuda | staged | of the host, copies on two streams | a pinned chunk of host memory |

Slots are taken when a call is issued, and given back with the event after which they are free. On a
device calls are issued before earlier ones have ended: a set of slots goes to the next call at
once, whose work then waits, on the device, for the event. On the host a call has ended when it
returns: large slots are then freed, so that a program has its memory back, and small ones are kept,
which cost more to make than to hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from burst_rt.drivers import BaseDriver, CudaDriver, HostDriver, flat_bytes, raw_bytes
from burst_rt.drivers.device import Device, DeviceEvent, Stream, TorchDevice
from burst_rt.errors import ConfigError
from burst_rt.scheduler import DEVICE_LANES, HOST_LANES, NCCL_LANES, Graph, Lane, Schedule
from burst_rt.scheduler.simulator import Hardware
from burst_rt.transport import Memory, OrderedTransport, Transport
from burst_rt.transport.staged import staged

__all__ = ["Machine", "SlotPool", "Slots"]

# The most that one set of slots may hold on the host between calls.
_SMALL_BYTES = 1 << 20


class Machine:
    """See the module's table. taken: the transport's name and why; transport: of the host, or None
    with NCCL; wire: NCCL, or None. ranks_per_node: ranks of a host, where all hosts have as many;
    else 1. hardware: what to plan with, if there is a file for it. streams: the device's, which
    tests have of their own.
    """

    def __init__(
        self,
        device: torch.device,
        taken: tuple[str, str],
        transport: Transport | None,
        wire: OrderedTransport | None = None,
        ranks_per_node: int = 1,
        hardware: Hardware | None = None,
        streams: Device | None = None,
    ) -> None:
        self.device = device
        self.transport_name, self.reason = taken
        self.transport = transport
        self.ranks_per_node = ranks_per_node
        self.hardware = hardware
        self.wire = wire
        self._streams = (
            TorchDevice(device) if streams is None and device.type == "cuda" else streams
        )
        self._pool = SlotPool(self._streams)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """What graphs are built for."""
        if self._streams is None:
            return HOST_LANES
        return NCCL_LANES if self.wire is not None else DEVICE_LANES

    @property
    def ends(self) -> Transport | OrderedTransport:
        """The transport that counts the bytes."""
        ends = self.wire if self.wire is not None else self.transport
        assert ends is not None
        return ends

    def lower(self, graph: Graph) -> Graph:
        """The graph this machine runs, from the one a strategy built."""
        return staged(graph) if self.transport_name == "staged" else graph

    def memory(self, tensor: torch.Tensor) -> Memory:
        """The bytes of a contiguous tensor, as this machine's transport takes them."""
        return raw_bytes(tensor) if tensor.device.type == "cpu" else flat_bytes(tensor)

    def caller(self) -> Stream | None:
        """The stream that the caller's work is on; None on the host."""
        return None if self._streams is None else self._streams.caller()

    def take(self, key: object, make: Callable[[], Slots]) -> Slots:
        """Memory for one call: used before for the same `key` (the very same object), or new."""
        return self._pool.take(key, make)

    def driver(self, schedule: Schedule, **options: Any) -> BaseDriver:  # BaseDriver's own
        """A driver for one run. Raises ConfigError for a graph whose messages this machine cannot
        send.
        """
        graph = schedule.graph
        if any(
            graph.lanes[lane].ordered is not (self.wire is not None) for lane in graph.network_lanes
        ):
            raise ConfigError(
                f"the graph was built for other lanes than this machine's ({self.transport_name} "
                f"on {self.device.type}); pass ctx.lanes to "
                "GraphBuilder"
            )
        if self._streams is None or not any(lane.ordered for lane in graph.lanes.values()):
            return HostDriver(graph, transport=self.transport, **options)
        return CudaDriver(
            schedule, device=self._streams, wire=self.wire, transport=self.transport, **options
        )

    def enter(self) -> None:
        """Makes this rank's GPU, if it has one, that of the thread which calls."""
        if self._streams is not None:
            self._streams.enter()

    def enter_to_watch(self) -> None:
        """As `enter`, for a thread that only asks whether events have happened."""
        if self._streams is not None:
            self._streams.enter_to_watch()

    def join(self, driver: BaseDriver) -> DeviceEvent | None:
        """After a run: the caller's stream waits for it. Returns the event after which the run's
        memory is free (None: it is).
        """
        return driver.join() if isinstance(driver, CudaDriver) else None

    def give_back(self, key: object, slots: Slots, free: DeviceEvent | None) -> None:
        """What was taken for `key` may be used again after the event; nothing on a device is given
        back without one.
        """
        if self._streams is None or free is not None:
            self._pool.give_back(key, slots, free)

    def forget(self) -> None:
        """Lets go of what was kept for later calls; there will be none."""
        self._pool.forget()


@dataclass(frozen=True)
class Slots:
    """What one run of a plan receives into and packs in, by part: raw bytes, and the same as the
    transport takes them. `home`: the stream they were allocated on (None on the host). `views`: of
    slots, by part and the owner of what is in it, as they were first used.
    """

    storage: dict[int, torch.Tensor]
    memory: dict[int, Memory]
    home: Stream | None = None
    views: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


class SlotPool:
    """Idle sets of slots by what they are for (an object, by identity); keeps the `capacity` given
    back last, and all in use.

    device: None on the host.
    """

    def __init__(self, device: Device | None, capacity: int = 4) -> None:
        self._device = device
        self._capacity = capacity
        self._idle: list[tuple[object, Slots, DeviceEvent]] = []

    def take(self, key: object, make: Callable[[], Slots]) -> Slots:
        """A set for `key`: an idle one, which the caller's stream is made to wait for, or a new
        one.
        """
        for i, (owner, slots, free) in enumerate(self._idle):
            if owner is key:
                del self._idle[i]
                if self._device is not None:
                    self._device.wait(self._device.caller(), free)
                return slots
        return make()

    def give_back(self, key: object, slots: Slots, free: DeviceEvent) -> None:
        """The slots may be used again after the event (on the host: now)."""
        if (
            self._device is None
            and sum(slot.nbytes for slot in slots.storage.values()) > _SMALL_BYTES
        ):
            return
        self._idle.append((key, slots, free))
        while len(self._idle) > self._capacity and (
            self._device is None or self._device.happened(self._idle[0][2])
        ):
            del self._idle[0]

    def forget(self) -> None:
        """Lets go of all idle sets. On a device too: its allocator hands their memory out again
        on the stream that they were allocated on, which is made to wait for their last use; that
        may have been in a call from another stream."""
        if self._device is not None:
            for _, slots, free in self._idle:
                self._device.wait(slots.home, free)
        self._idle.clear()
