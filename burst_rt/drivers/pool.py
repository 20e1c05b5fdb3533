"""Slots on a device, used again by later calls: taken when a call is issued, given back with the event after which they are free.

Calls are issued before earlier ones have ended; a set of slots goes to the next call at once, whose work then waits, on the device, for the
event. On the host a call has ended when it returns, and its slots are simply freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from burst_rt.drivers.device import Device, Event

__all__ = ["SlotPool"]

_T = TypeVar("_T")


class SlotPool:
    """Idle sets of slots by what they are for (an object, by identity); keeps the `capacity` given back last, and all in use."""

    def __init__(self, device: Device, capacity: int = 4) -> None:
        self._device = device
        self._capacity = capacity
        self._idle: list[tuple[object, object, Event]] = []

    def take(self, key: object, make: Callable[[], _T]) -> _T:
        """A set for `key`: an idle one, which the caller's stream is made to wait for, or a new one."""
        for i, (owner, slots, free) in enumerate(self._idle):
            if owner is key:
                del self._idle[i]
                self._device.wait(self._device.caller(), free)
                return slots  # type: ignore[return-value]  # what was given back for this key was taken for it
        return make()

    def give_back(self, key: object, slots: object, free: Event) -> None:
        """The slots may be used again after the event."""
        self._idle.append((key, slots, free))
        while len(self._idle) > self._capacity and self._device.happened(self._idle[0][2]):
            del self._idle[0]
