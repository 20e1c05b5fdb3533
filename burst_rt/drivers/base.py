"""What the drivers share: the agreement that opens a call, messages, and deadlines.

Every wait has a deadline: `timeout_s` for the other ranks to enter the call, `stall_s` without a
sign of progress inside the call. A rank that computes for long tells its peers so
(`Watch.say_alive`). Therefore `stall_s` may be shorter than a tile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from burst_rt.drivers.watch import Backoff, Watch
from burst_rt.errors import BurstError, ContractMismatch, DeviceError, InternalError, Stalled
from burst_rt.job.flight import MESSAGE_ENTRY, TASK_ENTRY, FlightRecord
from burst_rt.scheduler import Event, Graph, Message, Span, Task, TaskDone, TaskFailed, Trace
from burst_rt.transport import Memory, Transport

__all__ = [
    "BaseDriver", "DriverOptions", "Opening", "Progress", "as_device_error", "failure_of",
    "is_out_of_memory",
]  # fmt: skip


# Seconds until a rank that waits for messages asks whether their senders are in a later call.
_ASKS_AFTER_S = 1.0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python found no memory, on a device or on the host."""
    # torch has an exception class for devices only; on the host torch raises a RuntimeError.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError)
        and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def as_device_error(error: BaseException, rank: int) -> BaseException:
    """The error itself, or a DeviceError instead of torch's error for a device that has failed."""
    if not isinstance(error, torch.AcceleratorError):
        return error
    return DeviceError(f"rank {rank}: the device failed: {error}", rank=rank)


def failure_of(
    task: Task, error: BaseException, rank: int, takes: Callable[[], str] | None
) -> DeviceError | None:
    """The error of a task that ran out of memory; None for all other errors.

    An error of this package gets the task's name. takes: `DriverOptions.takes`.
    """
    if is_out_of_memory(error):
        need = f"; {takes()}" if takes else ""
        why = f"rank {rank}: out of memory in {task.name!r}{need} ({error})"
        return DeviceError(why, rank=rank, task=task.name, hop=task.hop)
    if isinstance(error, BurstError):
        _name_task(error, task)
    return None


class Opening(Protocol):
    """The ranks' agreement on the call, for which a control task waits."""

    number: int  # number of the call

    def start(self) -> None:
        """Begins the agreement. Never blocks."""

    def test(self) -> bool:
        """True once the agreement is decided. Never blocks."""

    def failure(self) -> BurstError | None:
        """Why the call may not go on, or None. To be called once `test` is True."""


@dataclass(kw_only=True)
class DriverOptions:
    """Everything that a driver needs for one run besides the graph and the transports. The driver
    owns it.
    """

    operations: Mapping[type, Callable[..., None]]  # by type; called with the task's operation
    memory: Mapping[int, Memory]  # bytes of each part that a message names
    watch: Watch  # this rank's knowledge of the other ranks
    opening: Opening  # the agreement for which control tasks wait
    timeout_s: float  # seconds that the other ranks may take to enter the call
    stall_s: float  # seconds for which nothing may move inside the call
    # Says how much memory the call takes, for the error when memory runs out.
    takes: Callable[[], str] | None = None
    flight: FlightRecord | None = None  # the record that the run is written to
    # Whether the times of the tasks on a device are taken. A host's are always taken.
    timed: bool = True
    # Whether it is one of several runs that the ranks agreed on at once: a rank that has not come
    # to it may have gone on to another call.
    one_of_several: bool = False


class BaseDriver:
    """One driver performs one run of a graph. timed: whether its trace has all times.

    ends_later: whether tasks may end after the run, for the host.

    transport: for exchanges on lanes that are not ordered; None: there are none.
    """

    ends_later: ClassVar[bool] = False

    def __init__(self, graph: Graph, transport: Transport | None, options: DriverOptions) -> None:
        self._graph = graph
        self._transport = transport
        self._options = options
        self._watch, self._opening = options.watch, options.opening
        self._flight = options.flight
        # Messages that the record has as under way, by handle. None: no wait has taken long yet.
        self._told: frozenset[int] | None = None
        # Tasks that have ended: (task, issued, started, ended). Spans are made only when asked for.
        self._ended: deque[tuple[Task, float, float, float]] = deque()
        self._trace: Trace | None = None
        self.on_events: Callable[[Sequence[TaskDone]], object] | None = None
        self._control: Task | None = None
        # By handle of a message under way: its task, its peer, its place in the exchange, and the
        # exchange's in the flight record.
        self._about: dict[int, tuple[Task, int, int, int]] = {}
        self._num_open: dict[int, int] = {}
        self._issued_s: dict[int, float] = {}
        self._landed: list[Event] = []
        self._running: Task | None = None
        self._last_beat_s = time.perf_counter()
        self.compute_s = 0.0
        self.wait_s = 0.0
        self.entered_s = 0.0  # when the caller's stream came to the run, on a device
        self.timed = True
        # The handle of the stream that the present task's work goes to; None on a host.
        self.stream: int | None = None
        self.refused = False  # True: the ranks did not agree on the call, and nothing was sent

    @property
    def trace(self) -> Trace:
        """The spans of the tasks that have ended; more may come while a device is at work. Does not
        block. Any thread may ask.
        """
        if self._trace is None:
            self._trace = Trace(max(1, len(self._graph.tasks)))
        trace = self._trace
        while self._ended:
            try:
                task, issued_s, started_s, ended_s = self._ended.popleft()
            except IndexError:  # another thread was quicker
                break
            span = Span.of(task, issued_s=issued_s, started_s=started_s, ended_s=ended_s)
            trace.add(span)
        return trace

    def wait(self) -> Sequence[Event]:
        """Does this driver's own work, or blocks until an event has happened; see `Driver.wait`.

        A deadline that passes is returned as a TaskFailed, and not raised.
        """
        backoff: Backoff | None = None
        transfers = slept = False
        while True:
            events = self._poll() or self._work()
            if events:
                if backoff and transfers:
                    self.wait_s += backoff.elapsed_s()
                return events
            backoff = backoff or Backoff()
            transfers = bool(self._num_open) or self._control is not None
            failure = self._overdue(backoff) if slept else None
            if failure:
                return [failure]
            slept = backoff.pause()

    def issue(self, task: Task, after: tuple[int, ...]) -> None:
        """Begins a task; see `Driver.issue`. Does not block."""
        raise NotImplementedError

    def progress(self) -> None:
        """Keeps messages moving while a compute task runs. Never blocks.

        Kernels call `progress` between their parts. It also tells the other ranks that this rank is
        alive.
        """
        if self._about:
            self._landed += self._moved()
        if self._control is not None:
            self._opening.test()
        self._say_alive(time.perf_counter())

    def forget(self) -> None:
        """Lets go of the run's memory, and keeps the trace. To be called after the run."""
        self._options.operations, self._options.memory = {}, {}

    def settle(self, timeout_s: float) -> None:
        """Blocks until the trace of the run is complete, at most `timeout_s`."""

    def settled(self) -> bool:
        """Whether the trace of the run is complete. Never blocks.

        Any thread may ask after the run.
        """
        return True

    def doing(self) -> tuple[Task, float] | None:
        """The task that runs or is waited for, and since when; None between tasks. Never blocks.

        Any thread may ask. The time is by `time.perf_counter`.
        """
        task = self._running or self._control
        if task is None:
            still_open = list(self._num_open)
            if not still_open:
                return None
            task = self._graph.tasks[still_open[0]]
        return task, self._issued_s.get(task.id, 0.0)

    def abort(self) -> None:
        """Cancels the messages of a run that has failed; see `Driver.abort`."""
        if self._transport is not None and not self.refused:
            self._transport.cancel()

    def _work(self) -> list[Event]:
        """Does work of the driver's own, and returns what has happened. Blocks while a task runs.

        Returns an empty list if there is nothing to do.
        """
        return []

    def _open(self, task: Task) -> None:
        """Starts a control task."""
        self._control = task
        self._opening.start()

    def _say_alive(self, now_s: float) -> None:
        if now_s - self._last_beat_s > self._options.stall_s / 4:
            self._last_beat_s = now_s
            self._watch.say_alive(-1 if self._running is None else self._running.id)

    def _exchange(self, task: Task) -> None:
        assert self._transport is not None
        # Receives are posted first: a message that finds its receive posted needs no extra copy.
        self._num_open[task.id] = len(task.recvs) + len(task.sends)
        at, issued_s = 0, self._issued_s[task.id]
        if self._flight is not None:
            at = self._flight.add(8 * task.id + TASK_ENTRY, issued_s, issued_s)
        for number, m in enumerate(task.recvs):
            handle = self._transport.irecv(self._bytes_of(m), m.peer, m.tag)
            self._about[handle] = task, m.peer, number, at
        for number, m in enumerate(task.sends, len(task.recvs)):
            handle = self._transport.isend(self._bytes_of(m), m.peer, m.tag)
            self._about[handle] = task, m.peer, number, at

    def _bytes_of(self, message: Message) -> Memory:
        memory, start = self._options.memory[message.part], message.offset
        # A device's memory is a tensor, of which a slice takes longer than the rest of a message.
        if start == 0 and len(memory) == message.size_bytes:
            return memory
        return memory[start : start + message.size_bytes]

    def _what_does(self, task: Task) -> Callable[..., None]:
        """The function for the task's operation.

        Raises InternalError for an operation without a function.
        """
        does = self._options.operations.get(type(task.op))
        if does is None:
            known = sorted(each.__name__ for each in self._options.operations)
            raise InternalError(
                f"task {task.name!r} asks for operation {task.op!r}; this driver has {known}",
                task=task.name,
                hop=task.hop,
            )
        return does

    def _failure(self, task: Task, error: Exception) -> TaskFailed:
        """The TaskFailed for a task that ran out of memory. Raises all other errors.

        An error of this package gets the task's name first.
        """
        failure = failure_of(task, error, self._graph.rank, self._options.takes)
        if failure is None:
            raise error
        return _failed(task, failure)

    def _poll(self) -> list[Event]:
        events, self._landed = self._landed, []
        if self._about:
            events += self._moved()
        if self._control is not None and self._opening.test():
            task, self._control = self._control, None
            ended_s = self._finish(task, self._issued_s[task.id])
            if self._flight is not None:
                self._flight.agreed_s = ended_s
            failure = self._opening.failure()
            self.refused = failure is not None
            events.append(_failed(task, failure) if failure else TaskDone(task.id))
        return events

    def _moved(self) -> list[Event]:
        """The exchanges that have ended since it was asked last. There are messages under way."""
        assert self._transport is not None
        events: list[Event] = []
        for done in self._transport.poll():
            task, _, _, at = self._about.pop(done.handle)
            self._num_open[task.id] -= 1
            if not self._num_open[task.id]:
                del self._num_open[task.id]
                ended_s = self._finish(task, self._issued_s[task.id])
                if self._flight is not None:
                    self._flight.times[at] = ended_s
                events.append(TaskDone(task.id))
        return events

    def _finish(self, task: Task, started_s: float) -> float:
        ended_s = time.perf_counter()
        issued_s = self._issued_s[task.id]
        self._ended.append((task, issued_s, started_s, ended_s))
        return ended_s

    def _waiting_for(self) -> tuple[Task, float, bool] | None:
        """The awaited task or message: (task, seconds it may be silent, whether for its own
        device).

        None where nothing is under way.
        """
        if self._control is not None:
            return self._control, self._options.timeout_s, False
        return (
            (self._graph.tasks[min(self._num_open)], self._options.stall_s, False)
            if self._num_open
            else None
        )

    def _overdue(self, backoff: Backoff) -> TaskFailed | None:
        """The TaskFailed that ends a wait: a rank is lost or a deadline has passed. None otherwise.

        Never blocks.
        """
        self._watch.look()
        waiting = self._waiting_for()
        if waiting is None:
            raise InternalError("the driver was asked to wait with nothing under way")
        task, limit_s, is_local = waiting
        if self._flight is not None and self._told != self._about.keys():
            self._told, now_s = frozenset(self._about), time.perf_counter()
            self._flight.note_call()
            for of, _, number, _ in self._about.values():
                self._flight.add(8 * of.id + MESSAGE_ENTRY, number, now_s)
        if self._control is not None:
            self._watch.say_entered(self._opening.number, backoff.waited_s, limit_s)
        several = self._options.one_of_several
        awaited = {peer for _, peer, *_ in self._about.values()} if several else ()
        lost = self._watch.lost(self._opening.number, awaited)
        if lost is None and several and not is_local:
            lost = self._gone_on(backoff)
        if lost:
            return _failed(task, lost)
        # The last sign of life of any rank counts as progress. It says nothing about this rank's
        # own device.
        heard_s = (
            0.0 if is_local else max((when for when, _ in self._watch.alive.values()), default=0.0)
        )
        silent_s = backoff.clock.holds_s("heard", heard_s)
        return None if silent_s <= limit_s else _failed(task, self._stalled(task, silent_s))

    def _gone_on(self, backoff: Backoff) -> ContractMismatch | None:
        """The error for a rank that is awaited here and waits in a later call; or None."""
        number = self._opening.number
        if backoff.waited_s < _ASKS_AFTER_S:
            return None
        awaited = {peer for _, peer, *_ in self._about.values()}
        self._watch.ask(awaited, number)
        rank = self._graph.rank
        peer = min(
            (peer for peer in awaited if self._watch.entered.get(peer, 0) > number), default=rank
        )
        # Its messages of this call may still be on their way.
        if peer == rank or backoff.clock.holds_s("later", peer) < _ASKS_AFTER_S:
            return None
        error = self._watch.errors[peer]
        return ContractMismatch(
            f"rank {rank}: rank {peer} left this step, of which call {number} is the agreement, "
            f"and waits in call {self._watch.entered[peer]}{f' with {error}' if error else ''}. "
            f"Look at the error of rank {peer}; every rank must call all layers of a step, in one "
            "order",
            rank=rank,
            peer=peer,
        )

    def _stalled(self, task: Task, silent_s: float) -> Stalled:
        rank, watch = self._graph.rank, self._watch
        if self._control is not None:
            number = self._opening.number
            missing = watch.absent(number)
            peer = missing.only
            message = (
                f"rank {rank}: waited {silent_s:.1f} s (timeout_s) for the other ranks to enter "
                f"call {number}"
                f"{f': {missing} not entered it' if missing.ranks else ''}. "
                "See what the other ranks are doing (py-spy dump)"
            )
        else:
            # A rank whose messages have all come is not the one that is stuck.
            waited_for = {peer for about, peer, *_ in self._about.values() if about is task}
            peers = sorted(waited_for or {m.peer for m in (*task.sends, *task.recvs)})
            peer = peers[0]
            said = {p: f"task {watch.alive[p][1]}" for p in peers if p in watch.alive}
            message = (
                f"rank {rank}: nothing moved for {silent_s:.1f} s (stall_s) in task {task.name!r}, "
                f"which waits for rank {' and rank '.join(map(str, peers))}; last sign of life: "
                f"{said or 'none'}. See what these ranks are doing (py-spy dump), or raise stall_s "
                "in burst_rt.init"
            )
        return Stalled(
            message, rank=rank, peer=peer, task=task.name, hop=task.hop, elapsed_s=silent_s
        )


def _failed(task: Task, error: BurstError) -> TaskFailed:
    """The event that tells the engine that a task ended in an error."""
    _name_task(error, task)
    return TaskFailed(task.id, error)


def _name_task(error: BurstError, task: Task) -> None:
    """Adds the task's name and hop to an error that names no task yet."""
    if error.task is None:
        error.task, error.hop = task.name, task.hop


class Progress:
    """The function that kernels call between their parts: `BaseDriver.progress`. Never blocks.

    A `Progress` is made before its driver, because the driver needs the call's memory.
    """

    driver: BaseDriver | None = None

    def __call__(self) -> None:
        if self.driver is not None:
            self.driver.progress()
