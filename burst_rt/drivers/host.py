"""The host driver: tasks on the CPU of this rank, messages through a transport. One compute task at
a time, transfers beside it.

A compute task runs inside `wait`, in the calling thread; long ones call `progress` between their
parts so that messages keep moving.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from burst_rt.drivers.base import BaseDriver
from burst_rt.errors import BurstError
from burst_rt.scheduler import Task, TaskDone

__all__ = ["HostDriver", "flat_bytes", "raw_bytes"]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as transports take it; it stays alive with the
    view.
    """
    # From its address: through numpy it takes four times as long, and a call has a dozen.
    block: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    block.owner = tensor
    return memoryview(block).cast("B")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8."""
    # Not view(-1): a single element keeps any stride it has, and such a tensor has no bytes view.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class HostDriver(BaseDriver):
    """See `scheduler.Driver` and `BaseDriver`."""

    def __init__(self, *args: Any, **options: Any) -> None:  # BaseDriver's own
        super().__init__(*args, **options)
        self._queue: list[Task] = []

    def issue(self, task: Task, after: tuple[int, ...]) -> None:
        """See `Driver.issue`. `after` is empty: no lane of a host is ordered."""
        self._issued_s[task.id] = time.perf_counter()
        if task.lane == "control":
            self._open(task)
        elif task.is_exchange:
            self._exchange(task)
        else:
            self._queue.append(task)

    def _work(self) -> bool:
        if not self._queue:
            return False
        task = self._queue.pop(0)
        self._running = task
        started_s = time.perf_counter()
        does, failure = self._what_does(task), None
        try:
            does(task.op)
        except (MemoryError, RuntimeError, BurstError) as error:
            failure = self._failure(task, error)
        ended_s = self._finish(task, started_s)
        # Short tasks need not call `progress`, and there may be many of them.
        self._say_alive(ended_s)
        self._running = None
        self.compute_s += ended_s - started_s
        self._landed.append(failure or TaskDone(task.id))
        return True
