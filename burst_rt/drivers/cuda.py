"""The CUDA driver: ordered lanes are streams, and edges between lanes are events.

The host waits only for what the host itself must know. With an ordered transport (NCCL) every task
goes onto a stream at once. For the host, the run ends when the last task has been issued: the
caller's stream is made to wait for the lanes, as it waits for any other kernel. With a transport of
the host (MPI, staged copies) the host polls events and messages. The next tiles are on the compute
stream before the present tile has ended.

Rules (see the lanes of `scheduler.engine`):

* A lane's first task waits for the caller's stream, so that inputs are there. The host waits for
  the caller's stream before its first message.
* A task waits for the events of its `after`.
* A stream is made current once for all tasks in a row that compute on it: to change the current
  stream takes longer than to start a kernel. Messages name their stream, and need none current.
* `join` makes the caller's stream wait for every lane that was used, so that outputs are there and
  memory may be reused.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from typing import NamedTuple

from burst_rt.drivers.base import BaseDriver, DriverOptions
from burst_rt.drivers.device import DeviceEvent, Stream, StreamDevice
from burst_rt.drivers.watch import Backoff
from burst_rt.errors import BurstError, InternalError, Stalled
from burst_rt.job.flight import ISSUED_ENTRY, TASK_ENTRY
from burst_rt.scheduler import Event, Schedule, Task, TaskDone, TaskFailed, overlap
from burst_rt.transport import OrderedTransport, Transport

__all__ = ["CudaDriver"]


class _Issued(NamedTuple):
    """A task that was put on a stream."""

    task: Task
    issued_s: float  # time of `time.perf_counter`
    started: DeviceEvent | None  # recorded before the task's work; None: no times are taken
    ended: DeviceEvent  # recorded after the task's work


class CudaDriver(BaseDriver):
    """Performs one run of a graph on a GPU; see `scheduler.Driver` and `BaseDriver`.

    transport, wire: for exchanges on lanes that are not ordered, and on ordered lanes; None if the
        graph has no such lanes.
    """

    ends_later = True

    def __init__(
        self,
        schedule: Schedule,
        device: StreamDevice,
        transport: Transport | None,
        wire: OrderedTransport | None,
        options: DriverOptions,
    ) -> None:
        super().__init__(schedule.graph, transport, options)
        self._device = device
        self._wire = wire
        # Tasks on lanes of another kind wait for these tasks, so the host must see these end. All
        # other tasks are done, for the host, once they are issued.
        self._observed = {task.id for task in self._graph.tasks if schedule.on_done[task.id]}
        self._streams: dict[str, tuple[Stream, int]] = {}  # by lane, each with its handle
        # What made a lane's stream the current one, until tasks of another lane come.
        self._inside: AbstractContextManager[object] | None = None
        self._inside_of: Stream | None = None
        self._issued: dict[int, _Issued] = {}
        self._under_way: list[int] = []
        self._num_told = 0  # issued tasks that the flight record has
        self._held: list[Task] = []  # exchanges of the host that wait for the caller's stream
        self._caller_done = False
        self._failed = False
        self.putting: Task | None = None  # the task being put on a stream; any thread may ask
        self._resolving = threading.Lock()  # the caller and telemetry may both want the trace
        # `_opened` cannot serve as the origin: it happens only when the caller's stream gets there.
        self.timed = options.timed
        self._origin: DeviceEvent = None
        self._origin_s = 0.0
        if self.timed:
            self._origin, self._origin_s = device.origin()
        self._caller = device.caller()
        self._opened = device.record(self._caller, timed=self.timed)

    def issue(self, task: Task, after: tuple[int, ...]) -> None:
        """Puts a task on a stream, or begins an exchange of the host; see `Driver.issue`.

        Does not block, except where NCCL connects two ranks at their first message.
        """
        if self._failed:
            return  # an earlier task has failed, and the engine has yet to hear of the failure
        lane = self._graph.lanes[task.lane]
        issued_s = self._issued_s[task.id] = time.perf_counter()
        if lane.ordered:
            self._put(task, lane.name, after, issued_s)
        elif task.is_exchange:
            self._held.append(task)
        elif task.lane == "control":
            self._open(task)
        else:
            raise InternalError(
                f"task {task.name!r} is on lane {task.lane!r}, which is not a stream; this driver "
                "computes on streams only"
            )

    def abort(self) -> None:
        """Cancels all messages; see `Driver.abort`. Work that is on the streams already runs on.

        So the caller must keep the memory of the run.
        """
        self._leave()
        super().abort()
        if self._wire is not None and not self.refused:
            self._wire.cancel()

    def join(self) -> DeviceEvent:
        """Makes the caller's stream wait for all lanes. Does not block.

        Returns the event after which the call's memory may be used again.
        """
        self._leave()
        for stream, _ in self._streams.values():
            self._device.wait(self._caller, self._device.record(stream))
        return self._device.record(self._caller)

    def begun(self) -> bool:
        """Whether the caller's stream has reached this run, past the caller's own work.

        Never blocks; any thread may ask.
        """
        return self._device.happened(self._opened)

    def unended(self) -> list[Task]:
        """The tasks on streams that have not ended, in the order they were issued.

        Never blocks; any thread may ask.
        """
        # The tasks are copied in one step, because the thread that makes the call adds more.
        issued = list(self._issued.values())
        return [each.task for each in issued if not self._device.happened(each.ended)]

    def settle(self, timeout_s: float) -> None:
        """Blocks until the device has ended the run, at most `timeout_s`; then raises Stalled."""
        backoff = Backoff()
        while not self.settled():
            if backoff.waited_s > timeout_s:
                raise self._stalled(next(iter(self._issued.values())).task, backoff.waited_s)
            backoff.pause()

    def settled(self) -> bool:
        """Whether the trace is complete; see `BaseDriver.settled`. Never blocks on the device."""
        with self._resolving:
            return self._resolve()

    def _resolve(self) -> bool:
        """Adds the spans of device tasks to the trace once all have ended; False until then.

        The device's events have their own clock. `StreamDevice.origin` relates it to the host's
        clock, so a span is exact to some microseconds.
        """
        if not all(self._device.happened(issued.ended) for issued in self._issued.values()):
            return False
        for issued in self._issued.values() if self.timed else ():
            start_s = self._origin_s + self._device.seconds(self._origin, issued.started)
            end_s = self._origin_s + self._device.seconds(self._origin, issued.ended)
            self._ended.append((issued.task, issued.issued_s, start_s, end_s))
            if issued.task.lane == "compute":
                self.compute_s += end_s - start_s
        if self._issued and self.timed:
            self.entered_s = self._origin_s + self._device.seconds(self._origin, self._opened)
            # The waits of the host say nothing here, so idle time is computed from the spans.
            transfer_s, hidden_s = overlap(list(self.trace))
            self.wait_s = transfer_s - hidden_s
        self._issued.clear()
        # Whoever holds the trace already sees these spans too.
        self.trace  # noqa: B018
        return True

    def _put(self, task: Task, lane: str, after: tuple[int, ...], issued_s: float) -> None:
        device = self._device
        stream, handle = self._streams.get(lane) or self._stream(lane)
        for other in after:
            device.wait(stream, self._issued[other].ended)
        started = device.record(stream, timed=True) if self.timed else None
        self.putting, flight, at = task, self._flight, 0
        if flight is not None:  # whatever ends this process in a launch, the record says where
            at = flight.add(8 * task.id + TASK_ENTRY, issued_s, issued_s)
        device.begin(task.name)
        try:
            failure = self._start(task, stream, handle)
        finally:
            device.end()
        self.putting = None
        if failure is not None:
            self._failed = True
            self._landed.append(failure)
            return
        if flight is not None:
            flight.take_back(at)
        self._issued[task.id] = _Issued(
            task, issued_s, started, device.record(stream, timed=self.timed)
        )
        if task.id in self._observed:
            self._under_way.append(task.id)
        else:
            self._landed.append(TaskDone(task.id))

    def _start(self, task: Task, stream: Stream, handle: int) -> TaskFailed | None:
        """Puts a task's work on its stream; the failure, if memory runs out."""
        if task.is_exchange:
            assert self._wire is not None
            sends = [(self._bytes_of(m), m.peer) for m in task.sends]
            recvs = [(self._bytes_of(m), m.peer) for m in task.recvs]
            self._wire.exchange(sends, recvs, handle)
            return None
        if self._inside_of is not stream:
            self._leave()
            self._inside = self._device.on(stream)
            self._inside.__enter__()
            self._inside_of, self.stream = stream, handle
        does = self._what_does(task)
        try:
            does(task.op)
        except (MemoryError, RuntimeError, BurstError) as error:
            return self._failure(task, error)
        return None

    def _leave(self) -> None:
        """Makes the stream current again that was current before the run."""
        inside, self._inside, self._inside_of, self.stream = self._inside, None, None, None
        if inside is not None:
            inside.__exit__(None, None, None)

    def _stream(self, lane: str) -> tuple[Stream, int]:
        stream = self._device.lane(lane)
        self._device.wait(stream, self._opened)
        found = self._streams[lane] = stream, self._device.handle(stream)
        return found

    def _poll(self) -> list[Event]:
        if self._held and (self._caller_done or self._device.happened(self._opened)):
            self._caller_done = True
            for task in self._held:
                self._exchange(task)
            self._held.clear()
        events = super()._poll()
        if self._flight is not None and len(self._issued) > self._num_told:
            # The tasks' own times are the device's, and come later if at all.
            self._num_told, last = len(self._issued), next(reversed(self._issued))
            self._flight.add(8 * last + ISSUED_ENTRY, 0.0, time.perf_counter())
        ended = [t for t in self._under_way if self._device.happened(self._issued[t].ended)]
        if ended:
            self._running = None  # what is waited for says `_waiting_for`
            self._under_way = [t for t in self._under_way if t not in ended]
            events.extend(TaskDone(t) for t in ended)
            if self._flight is not None:
                now_s = time.perf_counter()
                for t in ended:
                    issued_s = self._issued_s[t]
                    self._flight.add(8 * t + TASK_ENTRY, issued_s, issued_s, now_s)
        return events

    def _waiting_for(self) -> tuple[Task, float, bool] | None:
        if self._control is None and self._under_way:
            # A long tile must not look like a stall, so the other ranks must hear that this rank is
            # alive.
            self._running = self._graph.tasks[self._under_way[0]]
            self._say_alive(time.perf_counter())
            return self._running, self._options.timeout_s, True
        if self._held:
            # Nor must what the caller put on its stream before.
            self._say_alive(time.perf_counter())
            return self._held[0], self._options.timeout_s, True
        return super()._waiting_for()

    def _stalled(self, task: Task, silent_s: float) -> Stalled:
        if self._control is not None or (task.is_exchange and not self._held):
            return super()._stalled(task, silent_s)
        rank = self._graph.rank
        what = (
            "what the caller put on its stream before the call" if self._held else repr(task.name)
        )
        message = (
            f"rank {rank}: the device has not finished {what} for {silent_s:.1f} s (timeout_s). "
            "Look at the device (nvidia-smi; compute-sanitizer on a small input). If the device is "
            "only slow, raise timeout_s in burst_rt.init"
        )
        return Stalled(message, rank=rank, task=task.name, hop=task.hop, elapsed_s=silent_s)
