"""Contexts on doubles of a device and of NCCL: issued calls end when a test says so, or never."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from fake_device import FakeDevice, FakeWire, _Event

from burst_rt.attention.state import AttentionState
from burst_rt.context import Context
from burst_rt.errors import DeviceError
from burst_rt.runtime.choosing import TransportChoice
from burst_rt.runtime.machine import Machine
from burst_rt.runtime.runtime import Runtime
from burst_rt.scheduler import CONTROL, NCCL_LANES, Graph, GraphBuilder, Op
from burst_rt.transport import ControlGroup

__all__ = ["HeldDevice", "HeldWire", "context_of", "exchange_graph"]


class HeldDevice(FakeDevice):
    """A device whose streams can be held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[str] = set()  # streams on which nothing ends
        self._streams: dict[int, tuple[_Event, str]] = {}

    def record(self, stream: str, *, timed: bool = False) -> _Event:
        event = super().record(stream, timed=timed)
        self._streams[id(event)] = event, stream
        return event

    def happened(self, event: _Event) -> bool:
        return self._streams[id(event)][1] not in self.held


class HeldWire(FakeWire):
    """An NCCL that can report an error, and hold whoever starts messages."""

    def __init__(self, device: HeldDevice, rank: int, size: int) -> None:
        super().__init__(device)
        self.rank, self.size = rank, size
        self.error: str = ""  # what `check` raises; "" for nothing
        # While it is not set, `exchange` does not return (for 60 s at most).
        self.inside = threading.Event()
        self.inside.set()
        self.cancelled = threading.Event()
        self.entered_once = threading.Event()

    def exchange(
        self, sends: Sequence[tuple[Any, int]], recvs: Sequence[tuple[Any, int]], stream: int
    ) -> None:
        self.entered_s = time.perf_counter()
        self.entered_once.set()
        self.inside.wait(60)
        self.entered_s = None

    def check(self) -> None:
        if self.error:
            raise DeviceError(
                f"rank {self.rank}: NCCL failed while moving data: {self.error}", rank=self.rank
            )

    def cancel(self) -> None:
        self.cancelled.set()
        self.inside.set()


def context_of(control: ControlGroup, timeout_s: float) -> tuple[Context, HeldDevice, HeldWire]:
    """A context over a control group, and the doubles of its device and of NCCL."""
    device = HeldDevice()
    wire = HeldWire(device, control.rank, control.size)
    machine = Machine(
        torch.device("cpu"), TransportChoice("nccl", "a double", wire="nccl"), wire, streams=device
    )
    runtime = Runtime(machine, control, timeout_s=timeout_s, stall_s=20.0)
    attention = AttentionState(runtime, kernel="auto", partials="exact", check_finite=False)
    return Context(runtime, attention), device, wire


def exchange_graph(rank: int, size: int) -> Graph:
    """A tile, a message to the next rank and one from the rank before, and a tile on what came."""
    g = GraphBuilder(rank, size, NCCL_LANES)
    agreed = g.buffer("agreed")
    mine, theirs = (g.buffer(name, size_bytes=8, initialised=True) for name in ("mine", "theirs"))
    g.compute("agree", Op("agree"), writes=[agreed], lane=CONTROL.name)
    g.compute("own tile", Op("work"), accumulates=[mine])
    sends, recvs = [(mine, (rank + 1) % size)], [(theirs, (rank - 1) % size)]
    g.exchange("hop 1", sends=sends, recvs=recvs, tag=0, reads=[agreed])
    g.compute("last tile", Op("work"), reads=[theirs], accumulates=[mine])
    return g.build()
