"""A runtime: one rank's part of a group of ranks that make calls together.

The runtime agrees with the other ranks on each call, performs the call's schedule on this rank's
machine, and leaves the group. The runtime does not know what a call is for: the caller hands in the
schedule, the function of each operation, and the memory of each part.

A runtime makes one call at a time. A call that fails after messages have been sent breaks the
runtime: messages under way cannot be recalled, so no later call may be made, and the job ends when
the program does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn, TypeVar

from burst_rt.drivers import (
    BaseDriver,
    CudaDriver,
    DriverOptions,
    SharedWatch,
    Watch,
    Watchdog,
    as_device_error,
    failure_of,
)
from burst_rt.drivers.device import DeviceEvent
from burst_rt.errors import (
    BurstError,
    ContractMismatch,
    PeerLost,
    Stalled,
)
from burst_rt.job.ending import end_job, error_line, exit_code_of, mpi_takes_threads
from burst_rt.job.flight import FlightRecord
from burst_rt.job.folders import retire_flight
from burst_rt.runtime import unusable
from burst_rt.runtime.agreement import AgreedBefore, AgreedWhen, Agreement, Contract
from burst_rt.runtime.bound_schedule import BoundSchedule
from burst_rt.runtime.machine import CallCounts, Machine
from burst_rt.runtime.observer import Observer
from burst_rt.runtime.process import process
from burst_rt.runtime.stats import Stats
from burst_rt.scheduler import Graph, Task, run
from burst_rt.transport import ControlGroup, LocalTransport, Pending

__all__ = ["Runtime"]

_P = TypeVar("_P", bound=Pending)
# A task, and what puts its work onto the caller's stream.
_Step = tuple[Task, Callable[[], None]]


class _Exclusive:
    """Inside, this thread is the only one in a call. Raises ConfigError where another one is.

    At the end the flight record says that the rank has left the call.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._busy = threading.Lock()
        self._holder = 0  # the thread that is in a call

    def __enter__(self) -> None:
        if not self._busy.acquire(blocking=False):
            own = self._holder == threading.get_ident()
            raise unusable.busy(self._runtime.rank, by_this_thread=own)
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        flight = self._runtime.flight
        # A call that broke the runtime stays in the record, because this rank failed in it.
        if flight is not None and self._runtime.broken is None:
            flight.leave()
        self._busy.release()


class _BackwardOf:
    """Inside, the runtime's calls belong to the backward of the call with a number."""

    def __init__(self, runtime: Runtime, number: int) -> None:
        self._runtime, self._number = runtime, number

    def __enter__(self) -> None:
        self._before, self._runtime.forward = self._runtime.forward, self._number

    def __exit__(self, *_: object) -> None:
        self._runtime.forward = self._before


class Runtime:
    """One rank's part of a group of ranks; see the module.

    timeout_s: seconds that a peer may take to enter a call. stall_s: seconds for which nothing may
    move inside a call. flight: this process's flight record, if it has one. observer: hears of
    every call; None without telemetry.
    """

    def __init__(
        self, machine: Machine, control: ControlGroup, *, timeout_s: float, stall_s: float,
        flight: FlightRecord | None = None,
    ) -> None:  # fmt: skip
        self.rank = control.rank
        self.world_size = control.size
        self.places = control.places
        self.device = machine.device
        self.machine = machine
        self.timeout_s = timeout_s
        self.stall_s = stall_s
        self.transport = machine.carrier
        self.control = control
        self.observer: Observer | None = None
        self.watch = Watch(control) if machine.wire is None else SharedWatch(control)
        # With a wire (NCCL) calls return before they have ended, so they must be watched.
        self._watchdog: Watchdog | None = None
        if machine.wire is not None:
            self._watchdog = Watchdog(
                machine.wire, self.watch, timeout_s, machine.enter_to_watch, self._give_up
            )
        # The graph that the last call ran, and the driver that has the trace.
        # Without a driver where the call needed none.
        self.last_run: tuple[Graph, BaseDriver | None] | None = None
        # Whether somebody has asked for the times of calls on a device: they cost each call.
        self.timed = False
        self.broken: BaseException | None = None
        self._number = 0
        self.forward = 0  # in a backward the number of the call that is differentiated
        self._kept: list[object] = []  # memory of messages that may be under way for ever
        self._closed = False
        self._process_id = os.getpid()
        threads = isinstance(machine.carrier, LocalTransport)
        self.flight = flight
        self._exclusive = _Exclusive(self)
        self._counts = CallCounts(self.transport)
        # How many `together` and `first` this rank is in the middle of, and how many the deepest
        # rank was when the ranks last disagreed.
        self.depth = self.deepest = 0
        self._heard: BurstError | None = None  # the error that all ranks raised last
        # Ranks that are threads need no farewell at exit: no other process waits for them.
        if not threads:
            process.open.add(self)
        process.add_here(self)

    @property
    def closed(self) -> bool:
        """Whether this rank has left the group. True, too, in a process forked from the rank."""
        return self._closed or os.getpid() != self._process_id

    @property
    def usable(self) -> bool:
        """Whether a call may be made."""
        return not self.closed and self.broken is None

    def check_open(self) -> None:
        """Raises ConfigError where `closed` is true, and says why. Does not block."""
        if os.getpid() != self._process_id:
            raise unusable.in_child(self.rank)
        if self._closed:
            raise unusable.after_close(self.rank)

    def check_usable(self) -> None:
        """Raises ConfigError where the runtime is closed, PeerLost where an earlier call broke it.

        Does not block.
        """
        self.check_open()
        if self.broken is not None:
            raise unusable.after_failure(self.rank, self.broken) from self.broken

    def perform(
        self, contract: Contract, bound: BoundSchedule, agreed: AgreedWhen = AgreedWhen.OPENING
    ) -> tuple[BaseDriver, DeviceEvent | None]:
        """Runs a schedule on all ranks, once the ranks agree on it. Collective.

        Blocks until this rank's part is done. Where all lanes are ordered (NCCL), blocks until all
        of it is issued. Other ranks may take `timeout_s` to enter; inside, something must move
        every `stall_s`.

        contract: the call in words, which the ranks compare.
        agreed: when the ranks agree on the call. Unless they do so at its opening, the schedule
            need not open with an agreement, and one that it opens with is done at once.

        Returns the driver, which has the trace, and the device event after which the call's memory
        is free, or None where the memory is free already. Raises ContractMismatch, or the error
        that another rank brought, before anything is sent; PeerLost, Stalled and DeviceError
        afterwards.
        """
        with self._exclusive:
            if agreed is AgreedWhen.OPENING:
                self._enter()
            else:
                self.check_usable()
            several = agreed is AgreedWhen.WITH_OTHERS
            mark = self._counts.mark()
            opening: Agreement | AgreedBefore = (
                Agreement(self.control, self._number, contract, forward=self.forward)
                if agreed is AgreedWhen.OPENING
                else AgreedBefore(self._number)
            )
            options = DriverOptions(
                operations=bound.operations, memory=bound.memory, watch=self.watch,
                opening=opening, timeout_s=self.timeout_s,
                stall_s=self.timeout_s if several else self.stall_s, takes=bound.takes,
                flight=self.flight, one_of_several=several,
                timed=self.takes_times or not bound.counted,
            )  # fmt: skip
            schedule, observer = bound.schedule, self.observer
            if self.flight is not None:
                self.flight.enter(self._number, contract.call, mark.started_s, schedule.graph)
            driver = self.machine.driver(schedule, options)
            if bound.progress is not None:
                bound.progress.driver = driver
            if observer is not None:
                observer.began(self._number, driver)
            issued = None
            if self._watchdog is not None and isinstance(driver, CudaDriver):
                issued = self._watchdog.begin(self._number, contract.call, driver)
            try:
                run(schedule, driver)
                free = self.machine.join(driver)
            except BaseException as raised:
                error = self._failure(bound, driver, opening, raised)
                if error is not raised:
                    raise error from raised
                raise
            finally:
                if issued is not None:
                    issued.issuing = False
            driver.forget()
            if observer is not None:
                observer.ended(schedule, driver, bound.subject)
            self.last_run = (schedule.graph, driver)
            if bound.counted:
                self._counts.count(driver, mark)
            return driver, free

    @property
    def takes_times(self) -> bool:
        """Whether the times of a call's tasks are taken on a device. A host's always are."""
        return self.timed or self.observer is not None

    def perform_straight(
        self, contract: Contract, graph: Graph, steps: Sequence[_Step], takes: Callable[[], str]
    ) -> None:
        """Performs a call of a rank that is alone, where nothing is sent and nothing awaited.

        Does not block: the steps put their work onto the caller's stream, and take no times.

        steps: the tasks of the graph, each with what it does. takes: see `BoundSchedule.takes`.
        Raises what `perform` raises.
        """
        with self._exclusive:
            self._enter()
            started_s = time.perf_counter()
            if self.flight is not None:
                self.flight.enter(self._number, contract.call, started_s)
            for task, does in steps:
                try:
                    does()
                except BaseException as raised:
                    failure = failure_of(task, raised, self.rank, takes)
                    error = failure or as_device_error(raised, self.rank)
                    self._kept.append(steps)
                    self._break(error)
                    if error is not raised:
                        raise error from raised
                    raise
            self.last_run = (graph, None)
            self._counts.count_alone(started_s)

    def _failure(
        self,
        bound: BoundSchedule,
        driver: BaseDriver,
        opening: Agreement | AgreedBefore,
        raised: BaseException,
    ) -> BaseException:
        """The error of a call that failed, which breaks the runtime.

        Where the ranks do not agree on the call, nothing is broken, and the common error is raised.
        """
        error = as_device_error(raised, self.rank)
        if driver.refused and isinstance(error, ContractMismatch):
            assert isinstance(opening, Agreement)  # nothing else refuses a call
            self._not_agreed(opening, driver)
        # Messages may be under way, so their memory must outlive this call.
        self._kept.append((bound.memory, bound.operations))
        self._break(error)
        if self._watchdog is not None:
            # The driver has ended all messages. This error is to be reported, and not what the
            # watchdog would see next.
            self._watchdog.stop()
        return error

    def agree(
        self,
        description: Mapping[str, str],
        error: BurstError | None = None,
        within_s: float | None = None,
    ) -> None:
        """Has the ranks agree on what they do next. Opens a collective that is not a schedule.

        Collective; blocks at most `within_s`, by default `timeout_s`. If a rank brings an error,
        all ranks raise it. Raises ContractMismatch if descriptions differ; Stalled and PeerLost.
        """
        with self._exclusive:
            self._agree(description, error, within_s)

    def collective(
        self, description: Mapping[str, str], start: Callable[[], _P], within_s: float | None = None
    ) -> _P:
        """Has the ranks agree, then runs the collective of the control group that `start` begins.

        Blocks at most `within_s` for each of the two, by default `timeout_s`. Raises what `agree`
        raises.
        """
        call = description["call"]
        with self._exclusive:
            self._agree(description, None, within_s)
            # The collective has a number of its own. Ranks that wait in it tell each other so, and
            # a rank that stops between the agreement and the collective is known by its silence.
            self._number += 1
            if self.flight is not None:
                self.flight.enter(self._number, call, time.perf_counter())
            with self._unbroken():
                pending = start()
                self.watch.wait_for(pending, within_s or self.timeout_s, call, self._number)
            return pending

    def refuse(self, call: str, error: BurstError) -> NoReturn:
        """Tells every rank that this rank cannot make the call, and raises the common error.

        Where the others were in another call, and the ranks cannot agree, this rank raises its own
        error, and the runtime is broken.

        Blocks at most `timeout_s` for the others to come to the call. `refusing.refuse` is for
        ranks that are in several groups.
        """
        self.watch.look()
        if self.watch.left and self.usable:
            raise error  # no other rank can be waiting: its next call finds that a rank has left
        try:
            self.agree({"call": call}, error)
        except (PeerLost, Stalled) as lost:
            if self.usable:
                raise  # the ranks have agreed: it is the error that this rank brought
            raise error from lost  # the others were elsewhere, and this rank's own error says why
        raise error

    def fail(self, error: BurstError) -> NoReturn:
        """Raises an error of this rank in the middle of calls that the ranks agreed on at once.

        The other ranks are in the call, or will be: they are told, and raise PeerLost, or
        DeviceError for a DeviceError. No later call may be made here. Does not block.
        """
        self._break(error)
        raise error

    def stats(self) -> Stats:
        """Counts and times of the counted calls so far. Does not block.

        On a device, compute_s and wait_s cover only the calls that have ended, and that were made
        after `stats` was called first.
        """
        self.timed = True
        return self._counts.stats()

    def close(self, code: int = 0, error: str = "") -> None:
        """Leaves the group, and tells the other ranks. Does not wait for them.

        The other ranks can then enter no further call with this rank. code: 0, or the exit code
        where this rank failed. error: the error in words. Calls after the first do nothing, and so
        do calls in a process that was forked from a rank.
        """
        if self.closed:
            return
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.finish()
        self.watch.leave(code, error, self._number)
        if self.broken is None:
            # Where this rank failed, the device may have work that will never end.
            (self.transport.cancel if code else self.transport.close)()
            self.machine.forget()
            self.last_run = None
            process.open.discard(self)
            if not code and not process.open:
                retire_flight()
        if self.observer is not None:
            self.observer.left(code)

    @property
    def number(self) -> int:
        """The number of the last call, the same on every rank after it."""
        return self._number

    def backward_of(self, number: int) -> AbstractContextManager[None]:
        """Inside, calls belong to the backward of the call with this number.

        Ranks compare the numbers, because backwards of equal calls are told apart by nothing else.
        Does not block.
        """
        return _BackwardOf(self, number)

    def waiting_here(self) -> set[int]:
        """The ranks that have said that they wait for this rank to enter its next call.

        Only notices that `watch.look` has read count.
        """
        return {peer for peer, number in self.watch.entered.items() if number > self._number}

    def _enter(self) -> None:
        """Begins the next call: counts it. Does not block.

        Raises ConfigError where the runtime is closed, PeerLost where it is broken or a rank has
        left.
        """
        self.check_usable()
        if self.world_size > 1:
            try:
                self.watch.require_all()
            except BaseException as error:
                self._break(error)
                raise
        self._number += 1

    def _agree(
        self,
        description: Mapping[str, str],
        error: BurstError | None,
        within_s: float | None = None,
    ) -> None:
        self._enter()
        if self.world_size == 1:
            if error:
                raise error
            return
        contract = Contract(description)
        agreement = Agreement(self.control, self._number, contract, error, self.forward)
        entered_s = time.perf_counter()
        if self.flight is not None:
            self.flight.enter(self._number, contract.call, entered_s)
        with self._unbroken():
            agreement.start()
            self.watch.wait_for(
                agreement,
                within_s or self.timeout_s,
                contract.call,
                self._number,
                error_line(error),
            )
        if agreement.failure():
            self._settle(agreement)
        if self.observer is not None:
            self.observer.agreed(self._number, entered_s)

    def _not_agreed(self, agreement: Agreement, driver: BaseDriver) -> NoReturn:
        """Finds out with the other ranks why they do not agree, and raises it; nothing was sent.

        Blocks at most `timeout_s`.
        """
        self.machine.join(driver)
        if self.observer is not None:
            self.observer.abandoned()
        self._settle(agreement)

    def _settle(self, agreement: Agreement) -> NoReturn:
        with self._unbroken():
            error = agreement.settle(self.watch, self.timeout_s, self.depth, self._heard)
        self._heard, self.deepest = error, agreement.deepest
        # The error replaces the one that is being handled, if any. Its cause is kept: an exception
        # of a user's mask, say.
        raise error from agreement.cause

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Inside, any error breaks the runtime: it leaves the control group in an unknown state."""
        try:
            yield
        except BaseException as error:
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        """Marks the runtime as broken: no later call may be made. Does not block.

        The other ranks hear of it; otherwise they would wait for this rank until their deadlines. A
        rank that comes late, after this one has given up, would take this rank's word for the call
        as an agreement. They hear of a PeerLost from the lost rank.
        """
        self.broken = error
        if self.flight is not None:
            self.flight.note_call()
        if not isinstance(error, PeerLost):
            # Even sys.exit(0) is a failure in the middle of a call.
            self.watch.say_left(exit_code_of(error) or 1, error_line(error))

    def _give_up(self, error: BurstError) -> None:
        """Ends the job, because an issued call cannot end. Runs in the watchdog's thread."""
        if not self._closed and mpi_takes_threads():
            self._break(error)
        self.broken = error
        end_job(error, self.transport.cancel)
