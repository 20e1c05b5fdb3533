"""Watches calls that were issued and have not ended; what keeps them from ending ends the job.

With an ordered transport (NCCL) a call returns once its work is on streams. If another rank then
fails, that work never ends. The program would wait for the work for ever, in code of its own such
as `.item()`. So a daemon thread of the context watches the oldest call on the device that has not
ended. Without such a call, the thread sleeps. The thread looks for these troubles:

* Another rank has said that it failed, while messages are open.
* NCCL reports an error, which NCCL does only when asked.
* A message could not be started for `timeout_s`: two ranks may still have to connect, on the host.
* No task of the call has ended for `timeout_s`. This time begins when the caller's stream has
  reached the call, because the caller's own work may take as long as it likes. The limit is the
  time that a rank may be late for a call: the stream of another rank may have work of its caller,
  too, and this rank's messages wait for that work.

While a job is suspended its devices go on, but nothing here counts (`RunningClock`).

Any of these ends the job (`fail`). To abort the messages and go on would give the program invalid
results.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from burst_rt.drivers.cuda import CudaDriver
from burst_rt.drivers.watch import Watch
from burst_rt.errors import BurstError, DeviceError, InternalError, Stalled
from burst_rt.job.clock import RunningClock
from burst_rt.job.ending import mpi_takes_threads
from burst_rt.scheduler import Task
from burst_rt.transport import OrderedTransport

__all__ = ["Watchdog", "WatchedCall"]

_PERIOD_S = 0.05


@dataclass(eq=False)
class WatchedCall:
    """A call of a context on its device."""

    number: int
    name: str
    driver: CudaDriver
    issuing: bool = True  # False once the thread that makes the call has issued all of it


class Watchdog:
    """The watchdog of a context; see the module. Its thread starts with the first call.

    watch: shared with the thread that makes the calls. enter: called first in the watchdog's thread
    (`Device.enter_to_watch`). fail: called once in the watchdog's thread, with the trouble that it
    saw; no call is watched after that.
    """

    def __init__(
        self,
        wire: OrderedTransport,
        watch: Watch,
        timeout_s: float,
        enter: Callable[[], None],
        fail: Callable[[BurstError], None],
    ) -> None:
        self._wire = wire
        self._watch = watch
        self._timeout_s = timeout_s
        self._enter = enter
        self._fail = fail
        self._calls: deque[WatchedCall] = deque()  # the oldest first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._over = False  # no further call comes
        self._stopped = False
        self._clock = RunningClock()

    def begin(self, number: int, name: str, driver: CudaDriver) -> WatchedCall:
        """Watches a call from now on. Does not block.

        The caller sets the call's `issuing` to False once all of the call is issued.
        """
        call = WatchedCall(number, name, driver)
        with self._changed:
            self._calls.append(call)
            if len(self._calls) == 1:
                self._changed.notify()
        if self._thread is None:
            name = f"burst_rt watchdog {self._wire.rank}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            # A thread that is inside CUDA while the interpreter exits would crash the process.
            atexit.register(self.stop)
            self._thread.start()
        return call

    def finish(self) -> None:
        """Says that no further call comes: the thread ends with the last call. Does not wait."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def stop(self) -> None:
        """Stops watching at once. Blocks until the thread has ended, at most a second."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        # An error of the device is suppressed here, because the next question to it raises again.
        with suppress(RuntimeError):
            self._enter()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._over or self._stopped)
                self._changed.wait_for(lambda: self._stopped, _PERIOD_S)
                if self._stopped or not self._calls:
                    break
            try:
                error = self._look()
            except Exception as unexpected:  # noqa: BLE001  (a call that nobody watches could wait for ever)
                error = InternalError(
                    f"rank {self._wire.rank}: the watchdog failed: {type(unexpected).__name__}: "
                    f"{unexpected}"
                )
            if error is not None:
                self._fail(error)
                break
        atexit.unregister(self.stop)

    def _oldest(self) -> tuple[WatchedCall, list[Task]] | None:
        """The oldest call that has not ended, and its tasks on streams that have not ended.

        Forgets the calls before it. None where all calls have ended.
        """
        while self._calls:
            call = self._calls[0]
            # `issuing` is read before the tasks: once a call is issued, no task is added to it.
            issuing, tasks = call.issuing, call.driver.unended()
            if issuing or tasks:
                return call, tasks
            with self._changed:
                self._calls.popleft()
        return None

    def _look(self) -> BurstError | None:
        """The trouble that ends the job, or None. Never blocks."""
        self._clock.read()
        try:
            oldest = self._oldest()
            begun = oldest is not None and oldest[0].driver.begun()
        except RuntimeError as error:  # torch's
            return self._error(DeviceError, self._calls[0], None, f"the device failed: {error}")
        if oldest is None:
            return None
        call, tasks = oldest
        inside_s, putting = self._wire.entered_s, call.driver.putting
        messages = [task for task in tasks if task.is_exchange]
        if inside_s is not None and putting is not None:
            messages.append(putting)
        if call.issuing and not messages:
            return None  # the thread that makes the call has deadlines of its own
        return (
            self._refusal(call, messages, tasks)
            or self._not_started(call, inside_s, putting)
            or self._no_progress(call, tasks, begun=begun)
        )

    def _refusal(
        self, call: WatchedCall, messages: Sequence[Task], tasks: Sequence[Task]
    ) -> BurstError | None:
        """The trouble that NCCL, or another rank, reports."""
        try:
            self._wire.check()
        except DeviceError as error:
            return self._error(DeviceError, call, (messages or tasks)[0], error.message)
        if messages and mpi_takes_threads():
            self._watch.look()
            lost = self._watch.lost(call.number)
            if lost is not None:
                return self._error(type(lost), call, messages[0], lost.message, peer=lost.peer)
        return None

    def _not_started(
        self, call: WatchedCall, inside_s: float | None, putting: Task | None
    ) -> BurstError | None:
        """A message that could not be started in time. inside_s: since when it is being started."""
        took_s = self._clock.holds_s("starting", inside_s)
        if inside_s is None or took_s <= self._timeout_s:
            return None
        return self._stalled(call, putting, "NCCL has not started its messages for", took_s)

    def _no_progress(
        self, call: WatchedCall, tasks: Sequence[Task], *, begun: bool
    ) -> BurstError | None:
        """A call of which no task has ended in time, once the caller's stream has reached it."""
        same_s = self._clock.holds_s("call", (begun, call, len(tasks)))
        if begun and tasks and same_s > self._timeout_s:
            return self._stalled(call, tasks[0], "no task of the call has ended for", same_s)
        return None

    def _stalled(
        self, call: WatchedCall, task: Task | None, what: str, elapsed_s: float
    ) -> BurstError:
        why = (
            f"{what} {elapsed_s:.1f} s (timeout_s). See what the other ranks are doing (py-spy "
            "dump, nvidia-smi). If a task may take so long, raise timeout_s in burst_rt.init"
        )
        return self._error(Stalled, call, task, why, elapsed_s=elapsed_s)

    # fields: BurstError's own
    def _error(
        self, kind: type[BurstError], call: WatchedCall, task: Task | None, why: str, **fields: Any
    ) -> BurstError:
        rank = self._wire.rank
        name, hop = (None, None) if task is None else (task.name, task.hop)
        at = "" if name is None else f", at {name!r}"
        said = why.removeprefix(f"rank {rank}: ")
        message = (
            f"rank {rank}: call {call.number} ({call.name}) was issued and has not "
            f"ended{at}: {said}"
        )
        return kind(message, rank=rank, task=name, hop=hop, **fields)
