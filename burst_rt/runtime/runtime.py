"""A runtime: one rank's part of a group of ranks that make calls together.

The runtime agrees with the other ranks on each call, performs the call's schedule on this rank's
machine, and leaves the group. It does not know what a call is for: whoever makes a call hands in
the schedule, what each operation does, and the memory of each part.

One call at a time. A call that fails after messages have been sent breaks the runtime: messages
under way cannot be recalled, so no later call may be made, and the job ends when the program does.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, TypeVar

from burst_rt.drivers import BaseDriver, CudaDriver, Progress, SharedWatch, Watch, Watchdog
from burst_rt.drivers.device import DeviceEvent
from burst_rt.errors import (
    BurstError,
    ConfigError,
    ContractMismatch,
    PeerLost,
    Stalled,
)
from burst_rt.job.ending import end_job, exit_code_of, in_words, mpi_takes_threads
from burst_rt.job.flight import own_flight
from burst_rt.runtime.agreement import Agreement, digest_of
from burst_rt.runtime.machine import Machine
from burst_rt.runtime.observer import Observer
from burst_rt.runtime.process import process
from burst_rt.scheduler import Engine, Graph, Schedule, run
from burst_rt.transport import ControlGroup, LocalTransport, Memory, Pending

__all__ = ["Runtime", "Stats"]

# Calls on a device whose times are not looked up yet: to ask the device takes longer than to wait
# until somebody wants to know.
_UNCOUNTED_UP_TO = 64

_P = TypeVar("_P", bound=Pending)


class Stats(NamedTuple):
    """Cumulative counts of a context's attention calls, forward and backward. Times in seconds.

    wait_s: time the compute lane idled while a transfer was under way (exposed communication and
    late peers together).
    """

    calls: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    total_s: float = 0.0


class Runtime:
    """See the module. timeout_s: how long a peer may take to enter a call. stall_s: how long
    nothing may move inside a call. observer: hears of every call; None: nobody looks on.
    """

    def __init__(
        self, machine: Machine, control: ControlGroup, *, timeout_s: float, stall_s: float
    ) -> None:
        self.rank = control.rank
        self.world_size = control.size
        self.places = control.places
        self.device = machine.device
        self.machine = machine
        self.timeout_s = timeout_s
        self.stall_s = stall_s
        self.transport = machine.ends
        self.control = control
        self.observer: Observer | None = None
        self.watch = Watch(control) if machine.wire is None else SharedWatch(control)
        # With a wire of the device calls return before they have ended.
        self._watchdog: Watchdog | None = None
        if machine.wire is not None:
            self._watchdog = Watchdog(
                machine.wire, self.watch, timeout_s, machine.enter_to_watch, self._give_up
            )
        # What the last call ran: its graph, and the driver that has its trace.
        self.last_run: tuple[Graph, BaseDriver] | None = None
        self.broken: BaseException | None = None
        self._number = 0
        self._kept: list[object] = []  # memory of messages that may be under way for ever
        self._closed = False
        self._process_id = os.getpid()
        threads = isinstance(machine.ends, LocalTransport)
        self._flight = None if threads else own_flight()
        self._busy = threading.Lock()
        self._stats = Stats()
        self._uncounted: deque[BaseDriver] = deque()  # of calls whose times `_stats` lacks
        # Ranks that are threads are nobody's job but this process's.
        if not threads:
            process.open.add(self)
        process.add_here(self)

    @property
    def closed(self) -> bool:
        """Whether this rank has left the group; also in a child that was forked from it, which is
        no rank.
        """
        return self._closed or os.getpid() != self._process_id

    @property
    def usable(self) -> bool:
        """Whether a call may be made."""
        return not self.closed and self.broken is None

    def check_open(self) -> None:
        """Raises ConfigError where this rank has left the group, or the process is a child that was
        forked from it.
        """
        if os.getpid() != self._process_id:
            raise ConfigError(
                "this process was forked from a rank, and the context is that rank's: make the "
                "call there (a child may compute, load data and exit)",
                rank=self.rank,
            )
        if self._closed:
            raise ConfigError(
                "this context is closed; make another with burst_rt.init", rank=self.rank
            )

    def perform(
        self,
        call: str,
        schedule: Schedule,
        operations: Mapping[type, Callable[..., None]],
        memory: Mapping[int, Memory],
        *,
        description: Mapping[str, str],
        digest: int,
        progress: Progress,
        subject: object = None,
        takes: Callable[[], str] | None = None,
        agreed: bool = False,
    ) -> tuple[BaseDriver, DeviceEvent | None]:
        """Runs a schedule on all ranks, once they agree on it. Collective. Blocks until this rank's
        part is done, or, with ordered lanes alone, until all of it is issued.

        call: its name, for errors and the flight record. operations: what each type of operation
        does, called with the operation. memory: the bytes of each part that a message names.
        description, digest: what the ranks compare, and `digest_of` it. progress: what operations
        that take long call. subject: what observers are told of. takes: says what memory the call
        takes, for the error when there is none.
        agreed: the ranks have just agreed on the call, by `agree`; the schedule may then open with
        anything.

        Returns the driver, which has the trace, and the event of the device after which the call's
        memory is free (None: it is). Raises ContractMismatch or what another rank brought, before
        anything is sent; PeerLost, Stalled and DeviceError afterwards.
        """
        if not self._busy.acquire(blocking=False):
            raise self._in_another_call()
        try:
            if not agreed:
                self._enter()
            agreement = Agreement(self.control, self._number, description, digest)
            flight, observer = self._flight, self.observer
            driver = progress.driver = self.machine.driver(
                schedule, operations=operations, memory=memory, watch=self.watch,
                opening=agreement, timeout_s=self.timeout_s, stall_s=self.stall_s,
                takes=takes, flight=flight,
            )  # fmt: skip
            if flight is not None:
                flight.enter(self._number, call)
            if observer is not None:
                observer.began(self._number, driver)
            watched = None
            if self._watchdog is not None and isinstance(driver, CudaDriver):
                watched = self._watchdog.begin(self._number, call, driver)
            try:
                run(Engine(schedule), driver)
            except BaseException as error:
                if driver.refused and isinstance(error, ContractMismatch):
                    self._not_agreed(agreement, driver)
                # Messages may be under way: their memory must outlive this call.
                self._kept.append((memory, operations))
                self._break(error)
                if self._watchdog is not None:
                    # The driver has ended all messages, and this error is the one to be told.
                    self._watchdog.stop()
                raise
            finally:
                if watched is not None:
                    watched.issuing = False
            free = self.machine.join(driver)
            driver.forget()
            if flight is not None:
                flight.leave()
            if observer is not None:
                observer.ended(schedule, driver, subject)
            self.last_run = (schedule.graph, driver)
            return driver, free
        finally:
            self._busy.release()

    def agree(
        self,
        description: dict[str, str],
        error: BurstError | None = None,
        within_s: float | None = None,
    ) -> None:
        """Opens a collective that is not a schedule: every rank says what it is about to do. If one
        brings an error, all ranks raise it. Blocks at most `within_s`, by default `timeout_s`.
        """
        with self._exclusive():
            self._agree(description, error, within_s)

    def collective(
        self, description: dict[str, str], start: Callable[[], _P], within_s: float | None = None
    ) -> _P:
        """`agree`, then the control group's collective that `start` begins, to its end. Blocks at
        most `within_s` for each.
        """
        with self._exclusive():
            self._agree(description, None, within_s)
            with self._in_call(description["call"]), self._unbroken():
                pending = start()
                self.watch.wait_for(pending, within_s or self.timeout_s, description["call"])
            return pending

    def refuse(self, call: str, error: BurstError) -> NoReturn:
        """Tells every rank that this one cannot make the call; raises the error all of them raise.
        Blocks at most `timeout_s`. `refusing.refuse` does so where a rank is in several groups.
        """
        self.watch.look()
        if self.watch.left and self.usable:
            raise error  # no other can be waiting: their next call finds that a rank has left
        self.agree({"call": call}, error)
        raise error

    def stats(self) -> Stats:
        """What the counted calls have done so far; on a device, compute_s and wait_s are of calls
        that have ended.
        """
        while self._uncounted and self._uncounted[0].settled():
            s, driver = self._stats, self._uncounted.popleft()
            self._stats = s._replace(
                compute_s=s.compute_s + driver.compute_s, wait_s=s.wait_s + driver.wait_s
            )
        return self._stats

    def count(self, driver: BaseDriver, started_s: float, sent: int, received: int) -> None:
        """Counts a call that has been performed. started_s: when it began, by
        `time.perf_counter`; sent, received: the transport's counts of bytes at that time.
        """
        self._uncounted.append(driver)
        # On a device its work may not have ended.
        counts_now = self.device.type == "cpu" or len(self._uncounted) > _UNCOUNTED_UP_TO
        s = self.stats() if counts_now else self._stats
        self._stats = Stats(
            s.calls + 1,
            s.bytes_sent + self.transport.bytes_sent - sent,
            s.bytes_received + self.transport.bytes_received - received,
            s.compute_s,
            s.wait_s,
            s.total_s + time.perf_counter() - started_s,
        )

    def close(self, code: int = 0, error: str = "") -> None:
        """Leaves the group: tells the others, who can then enter no further call with this rank.
        Does not wait for them. Calls after the first do nothing, nor does a call in a child that
        was forked from a rank.

        code: other than 0 where this rank failed; error: of what, in words.
        """
        if self.closed:
            return
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.finish()
        self.watch.leave(code, error)
        if self.broken is None:
            # Where this rank failed, its device may have more to do than will ever end.
            (self.transport.cancel if code else self.transport.close)()
            self.machine.forget()
            self.last_run = None
            process.open.discard(self)
        if self.observer is not None:
            self.observer.left(code)

    def waiting_here(self) -> set[int]:
        """The ranks that have said, as far as their notices are read, that they wait for this one
        to enter its next call.
        """
        return {peer for peer, number in self.watch.entered.items() if number > self._number}

    def _enter(self) -> None:
        """The next call begins. Raises where it cannot."""
        self.check_open()
        if self.broken is not None:
            raise PeerLost(
                f"rank {self.rank}: this context broke in an earlier call ({self.broken}); start "
                "the job again",
                rank=self.rank,
            ) from self.broken
        try:
            self.watch.require_all()
        except BaseException as error:
            self._break(error)
            raise
        self._number += 1

    def _agree(
        self, description: dict[str, str], error: BurstError | None, within_s: float | None = None
    ) -> None:
        self._enter()
        if self.world_size == 1:
            if error:
                raise error
            return
        call, digest = description["call"], digest_of(description)
        agreement = Agreement(self.control, self._number, description, digest, error)
        with self._in_call(call), self._unbroken():
            agreement.start()
            self.watch.wait_for(agreement, within_s or self.timeout_s, call, self._number)
        if agreement.failure():
            self._settle(agreement)

    def _not_agreed(self, agreement: Agreement, driver: BaseDriver) -> NoReturn:
        """Nothing was sent: finds out with the others why, and raises it."""
        self.machine.join(driver)
        if self.observer is not None:
            self.observer.abandoned()
        try:
            self._settle(agreement)
        finally:
            if self._flight is not None and self.broken is None:
                self._flight.leave()

    def _settle(self, agreement: Agreement) -> NoReturn:
        with self._unbroken():
            error = agreement.settle(self.watch, self.timeout_s)
        raise error

    @contextmanager
    def _in_call(self, call: str) -> Iterator[None]:
        """Writes down that this rank is in the call, for who finds it dead."""
        flight = self._flight
        if flight is None:
            yield
            return
        flight.enter(self._number, call)
        try:
            yield
        finally:
            # A call that broke the runtime stands there still: it is what this rank was in when it
            # failed.
            if self.broken is None:
                flight.leave()

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Whatever goes wrong inside leaves the control group in an unknown state."""
        try:
            yield
        except BaseException as error:
            self._break(error)
            raise

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise self._in_another_call()
        try:
            yield
        finally:
            self._busy.release()

    def _in_another_call(self) -> ConfigError:
        return ConfigError(
            "one call at a time per context: another thread is in a call of this one; use a "
            "context each",
            rank=self.rank,
        )

    def _break(self, error: BaseException) -> None:
        """No later call may be made. The others must hear of what began on this rank, or they would
        wait for it until their deadlines.
        """
        self.broken = error
        if not isinstance(error, (PeerLost, Stalled)):
            # sys.exit(0) in the middle of a call is no good end
            self.watch.say_left(exit_code_of(error) or 1, in_words(error))

    def _give_up(self, error: BurstError) -> None:
        """In the watchdog's thread: a call that was issued cannot end. Ends the job."""
        if not self._closed and mpi_takes_threads():
            self._break(error)
        self.broken = error
        end_job(error, self.transport.cancel)
