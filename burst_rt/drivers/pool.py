"""Slots, used again by later calls: taken when a call is issued, given back with the event after
which they are free.

On a device calls are issued before earlier ones have ended; a set of slots goes to the next call at
once, whose work then waits, on the device, for the event. On the host a call has ended when it
returns; large slots are then simply freed, so that a program has its memory back, and small ones
kept, which cost more to make than to hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from burst_rt.drivers.device import Device, DeviceEvent, Stream
from burst_rt.transport import Memory

__all__ = ["SlotPool", "Slots"]

# The most that one set of slots may hold on the host between calls.
_SMALL_BYTES = 1 << 20


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
