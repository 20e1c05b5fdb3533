"""Watches calls that have been issued and have not ended.

With an ordered transport (NCCL) a call returns once its work is on streams. If another rank then
fails, that work never ends, and the program waits for it somewhere of its own, in `.item()` say,
for ever. So a daemon thread of the context watches the oldest call on the device that has not
ended; while there is none it sleeps. Of that call it sees:

* that another rank has failed, by its notice, while messages are open;
* that NCCL reports an error, which it does only to who asks;
* that a message could not be started for `timeout_s`: two ranks may still have to connect, on the
  host;
* that for `timeout_s` no task of it has ended. That time begins when the caller's stream has come
  to the call: work of the caller's may take as long as it likes. It is as long as a rank may be
  late for a call, because another rank's stream may have such work too, for which this rank's
  messages wait.

What it sees ends the job (`fail`). To abort the messages and go on would give the program
results that are none.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from burst_rt.drivers.cuda import CudaDriver
from burst_rt.drivers.watch import Watch
from burst_rt.errors import BurstError, DeviceError, InternalError, Stalled
from burst_rt.job.ending import mpi_takes_threads
from burst_rt.scheduler import Task
from burst_rt.transport import OrderedTransport

__all__ = ["Call", "Watchdog"]

_PERIOD_S = 0.05


@dataclass(eq=False)
class Call:
    """A call of a context on its device. issuing: the thread that makes it has not issued all of
    it yet."""

    number: int
    name: str
    driver: CudaDriver
    issuing: bool = True


class Watchdog:
    """See the module. One a context; its thread starts with the first call.

    watch: shared with the thread that makes the calls. enter: called first in the thread
    (`Device.enter_to_watch`). fail: called once, in the thread, with what has been seen; no call
    is watched after that.
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
        self._calls: deque[Call] = deque()  # the oldest first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._over = False  # no further call comes
        self._stopped = False
        self._known: tuple[object, ...] = ()
        self._since_s = 0.0

    def begin(self, number: int, name: str, driver: CudaDriver) -> Call:
        """Watches a call from now on. Its `issuing` is the caller's to end."""
        call = Call(number, name, driver)
        with self._changed:
            self._calls.append(call)
            if len(self._calls) == 1:
                self._changed.notify()
        if self._thread is None:
            name = f"burst_rt watchdog {self._wire.rank}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            # A thread inside CUDA while the interpreter goes takes the process down with it.
            atexit.register(self.stop)
            self._thread.start()
        return call

    def finish(self) -> None:
        """No further call comes: the thread ends with the last of them. Does not wait."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def stop(self) -> None:
        """Watches nothing any more. Blocks until the thread has ended, at most a second."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        # If the device is out of order, what is asked of it next says so.
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

    def _oldest(self) -> tuple[Call, list[Task]] | None:
        """The oldest call that has not ended, and its tasks on streams that have not; forgets
        those before it."""
        while self._calls:
            call = self._calls[0]
            # In this order: nothing comes to a call that has been issued.
            issuing, tasks = call.issuing, call.driver.unended()
            if issuing or tasks:
                return call, tasks
            with self._changed:
                self._calls.popleft()
        return None

    def _look(self) -> BurstError | None:
        """What ends the job, if there is anything."""
        try:
            found = self._oldest()
            begun = found is not None and found[0].driver.begun()
        except RuntimeError as error:  # torch's
            return self._error(DeviceError, self._calls[0], None, f"the device failed: {error}")
        if found is None:
            return None
        call, tasks = found
        inside_s, putting = self._wire.entered_s, call.driver.putting
        messages = [task for task in tasks if task.is_exchange]
        if inside_s is not None and putting is not None:
            messages.append(putting)
        if call.issuing and not messages:
            return None  # the thread that makes the call has deadlines of its own
        try:
            self._wire.check()
        except DeviceError as error:
            return self._error(DeviceError, call, (messages or tasks)[0], error.message)
        if messages and mpi_takes_threads():
            self._watch.look()
            lost = self._watch.lost(())
            if lost is not None:
                return self._error(type(lost), call, messages[0], lost.message, peer=lost.peer)
        now_s = time.perf_counter()
        if inside_s is not None and now_s - inside_s > self._timeout_s:
            return self._stalled(
                call, putting, "NCCL has not started its messages for", now_s - inside_s
            )
        known = (call, len(tasks))
        if not begun or known != self._known:
            self._known, self._since_s = known, now_s
        if tasks and now_s - self._since_s > self._timeout_s:
            return self._stalled(
                call, tasks[0], "no task of it has ended for", now_s - self._since_s
            )
        return None

    def _stalled(self, call: Call, task: Task | None, what: str, elapsed_s: float) -> BurstError:
        why = (
            f"{what} {elapsed_s:.1f} s (timeout_s). See what the other ranks are doing (py-spy "
            "dump, nvidia-smi), or raise "
            "timeout_s in burst_rt.init if that may take so long"
        )
        return self._error(Stalled, call, task, why, elapsed_s=elapsed_s)

    # fields: BurstError's own
    def _error(
        self, kind: type[BurstError], call: Call, task: Task | None, why: str, **fields: Any
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
