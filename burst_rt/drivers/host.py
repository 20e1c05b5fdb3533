"""The host driver: tasks run on this rank's CPU, messages go through a transport.

One compute task runs at a time, concurrently with transfers. A compute task runs inside `wait`, in
the calling thread. A long task calls `progress` between its parts, so that messages keep moving
and new ones leave.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from burst_rt.drivers.base import BaseDriver, DriverOptions
from burst_rt.errors import BurstError
from burst_rt.job.flight import TASK_ENTRY
from burst_rt.scheduler import Event, Graph, Task, TaskDone
from burst_rt.transport import Transport

__all__ = ["HostDriver", "flat_bytes", "raw_bytes"]

# A task waits so many seconds for each of its operations, and at most so many seconds, for ranks to
# agree on the call. A core does an operation in 10 to 100e-12 s.
_PATIENCE_S, _MOST_PATIENCE_S = 2e-12, 5e-3


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as transports take it.

    The view keeps the memory alive.
    """
    # The view is made from the address. Through numpy this takes four times as long, and a call
    # makes a dozen views.
    block: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    block.owner = tensor
    return memoryview(block).cast("B")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8."""
    # view(-1) will not do: a tensor of one element keeps its stride, whatever the stride is, and a
    # tensor with another stride than 1 has no view as bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class HostDriver(BaseDriver):
    """Performs one run of a graph on the CPU; see `scheduler.Driver` and `BaseDriver`."""

    def __init__(self, graph: Graph, transport: Transport | None, options: DriverOptions) -> None:
        super().__init__(graph, transport, options)
        self._queue: list[Task] = []

    def issue(self, task: Task, after: tuple[int, ...]) -> None:
        """Queues a task or begins its exchange; see `Driver.issue`. Does not block.

        `after` is empty, because no lane of a host is ordered.
        """
        self._issued_s[task.id] = time.perf_counter()
        if task.lane == "control":
            self._open(task)
        elif task.is_exchange:
            self._exchange(task)
        else:
            self._queue.append(task)

    def progress(self) -> None:
        """See `BaseDriver.progress`. Messages that may leave now do not wait for the task's end."""
        events = self._poll()
        ends = [event for event in events if isinstance(event, TaskDone)]
        if self.on_events is not None and len(ends) == len(events):
            if ends:
                self.on_events(ends)
        else:
            self._landed = events
        self._say_alive(time.perf_counter())

    def _waits_to_agree(self, task: Task) -> bool:
        """Whether a task does not begin yet: messages leave once the ranks have agreed, which takes
        several rounds, and a long task looks after them only between its parts.
        """
        if self._control is None:
            return False
        patience_s = min(task.cost.flops * _PATIENCE_S, _MOST_PATIENCE_S)
        return time.perf_counter() - self._issued_s[self._control.id] < patience_s

    def _work(self) -> list[Event]:
        if not self._queue or self._waits_to_agree(self._queue[0]):
            return []
        task = self._queue.pop(0)
        self._running = task
        started_s = time.perf_counter()
        flight, at = self._flight, 0
        if flight is not None:
            at = flight.add(8 * task.id + TASK_ENTRY, self._issued_s[task.id], started_s)
        does, failure = self._what_does(task), None
        try:
            does(task.op)
        except (MemoryError, RuntimeError, BurstError) as error:
            failure = self._failure(task, error)
        ended_s = self._finish(task, started_s)
        if flight is not None and failure is None:
            flight.times[at] = ended_s
        # Short tasks need not call `progress`, and many of them may follow each other.
        self._say_alive(ended_s)
        self._running = None
        self.compute_s += ended_s - started_s
        self._landed.append(failure or TaskDone(task.id))
        return self._poll()
