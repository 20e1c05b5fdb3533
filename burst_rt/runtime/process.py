"""The runtimes of this process: which are open, which a thread has made, and how they end.

A rank that leaves must say so, or the other ranks wait for it until their deadlines. Therefore the
exit hooks close every open runtime. The hooks end the job (by MPI_Abort, or by an exit code that
torchrun sees) if a runtime is broken or the program failed: messages that are under way cannot be
recalled, and MPI_Finalize would wait for messages that never come. A job that is ended so runs no
exit hooks that were registered before these. `burst_rt.init` installs the hooks; importing the
package does not.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from burst_rt.errors import BurstError, PeerLost, Stalled
from burst_rt.job import launched
from burst_rt.job.ending import error_line, exit_code_of
from burst_rt.job.folders import report_failure, retire_flight
from burst_rt.job.parent import end_with_torchrun
from burst_rt.job.telling import (
    FIRST_WORD_S,
    in_full,
    in_one_line,
    is_of_another,
    shorten_text,
    tell,
)
from burst_rt.transport.start import start_mpi

__all__ = ["Member", "Process", "process"]

_log = logging.getLogger("burst_rt")
# Seconds until the other ranks have heard that this rank failed by itself, and have reported it.
_HEARD_AFTER_S = 1.3
# Seconds in which MPICH's mpirun forwards what a rank has written.
_FORWARDED_AFTER_S = 0.1
# Seconds for which a rank that fails before MPI_Init waits for the others to come there.
_ABORTED_AFTER_S = 3.0


class Member(Protocol):
    """A runtime, as its process knows it."""

    rank: int
    broken: BaseException | None

    @property
    def closed(self) -> bool:
        """Whether this rank has left the group."""

    def close(self, code: int = 0, error: str = "") -> None:
        """Leaves the group, and tells the other ranks. Does not wait for them."""


class Process:
    """The runtimes of this process. There is one object, `process`."""

    def __init__(self) -> None:
        # A runtime whose ranks are processes stays here until it is closed, and a broken runtime
        # stays for good: the other ranks count on it even if the program has let go of it.
        self.open: set[Member] = set()
        self._here = threading.local()
        self._made: list[weakref.ref[Member]] = []  # by all threads, in the order they were made
        self._farewells: list[Callable[[int, BaseException | None], None]] = []
        self._uncaught: list[BaseException] = []
        self._print_uncaught = sys.excepthook
        self._installed_in: int | None = None

    def install_exit_hooks(self) -> None:
        """Makes the end of the interpreter close all open runtimes.

        An uncaught error is noted from now on, and the end of torchrun ends this process. Calls
        after the first do nothing.
        """
        if self._installed_in is None:
            self._installed_in = os.getpid()
            self._print_uncaught, sys.excepthook = sys.excepthook, self._note_uncaught
            atexit.register(self._leave)
            end_with_torchrun()

    def say_at_end(self, farewell: Callable[[int, BaseException | None], None]) -> None:
        """Has `farewell(exit code, error or None)` called once, when the interpreter exits."""
        if farewell not in self._farewells:
            self._farewells.append(farewell)

    def add_here(self, member: Member) -> None:
        """Notes that this thread has made a runtime."""
        self._references().append(weakref.ref(member))
        self._made[:] = [r for r in self._made if r() is not None] + [weakref.ref(member)]

    def made_here(self) -> list[Member]:
        """The open runtimes that this thread has made, in the order they were made."""
        references = self._references()
        references[:] = [r for r in references if (made := r()) is not None and not made.closed]
        return [made for r in references if (made := r()) is not None]

    def made_for_here(self) -> list[Member]:
        """`made_here`; where this thread has made none, the open runtimes of this process's ranks.

        Autograd runs the backwards of a GPU in a thread of its own, for one that waits.
        """
        made = (reference() for reference in self._made)
        return self.made_here() or [
            x for x in made if x is not None and x in self.open and not x.closed
        ]

    def close_here(self, code: int, error: str) -> None:
        """Closes the runtimes that this thread has made and not closed. Waits for no other rank."""
        for made in self.made_here():
            made.close(code, error)

    @property
    def broken(self) -> BaseException | None:
        """The error that has broken one of this process's groups, caught or not; None: none is."""
        return next((member.broken for member in self.open if member.broken), None)

    def _references(self) -> list[weakref.ref[Member]]:
        references: list[weakref.ref[Member]] | None = getattr(self._here, "made", None)
        if references is None:
            references = self._here.made = []
        return references

    def _note_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Other code calls the hook, too, for errors that it has handled. And at an interactive
        # prompt the program goes on after the error.
        if getattr(sys, "last_value", None) is error and not hasattr(sys, "ps1"):
            self._uncaught.append(error)
        if is_of_another(error):
            time.sleep(FIRST_WORD_S)
        line = in_one_line(error)
        if line:
            tell(line)
            return
        with shorten_text(error):
            if not isinstance(error, BurstError):
                self._print_uncaught(kind, error, trace)
            elif self._print_uncaught is sys.__excepthook__:
                # Written at once: launchers pass on what ranks write as it comes.
                sys.stderr.write(in_full(error))
            else:
                self._print_uncaught(kind, error, error.__traceback__)

    def _leave(self) -> None:
        if os.getpid() != self._installed_in:
            return  # this process was forked: MPI belongs to its parent
        members = list(self.open)
        failure = self.broken or next(iter(self._uncaught[-1:]), None)
        code = 0 if failure is None else exit_code_of(failure) or 1
        for member in members:
            _close(member, code, error_line(failure))
        for farewell in self._farewells:
            farewell(code, failure)
        if failure is None:
            retire_flight()
        else:
            report_failure(failure, code)
        if failure is not None:
            _end_job(failure, code, has_members=bool(members))


def _close(member: Member, code: int, error: str) -> None:
    try:
        member.close(code, error)
    except Exception:  # noqa: BLE001  (whatever a library raises: the others are to hear of the end all the same)
        _log.warning("rank %d: closing a context failed", member.rank, exc_info=True)


def _end_job(failure: BaseException, code: int, *, has_members: bool) -> None:
    """Ends the job of a rank that failed, where the rank's launcher would not."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1:
        if has_members and not isinstance(failure, (PeerLost, Stalled)):
            time.sleep(_HEARD_AFTER_S)
        _flush()
        mpi.COMM_WORLD.Abort(code)
    elif max(launched.torchrun_ranks(), launched.mpi_ranks()) > 1 and (
        has_members or isinstance(failure, BurstError)
    ):
        # The launcher ends the other ranks when it sees the exit code, whatever the program has
        # caught. An uncaught error of ours has its exit code, even if its context is closed, or
        # MPI has not been started.
        _flush()
        if launched.by_hydra():
            _abort_unstarted(code)
        os._exit(code)


def _flush() -> None:
    """Lets go of all output. MPICH's mpirun drops what it has not forwarded when a rank aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    if launched.by_hydra():
        time.sleep(_FORWARDED_AFTER_S)


def _abort_unstarted(code: int) -> None:
    """Ends an MPI job in which this rank has not started MPI, if the others have come to MPI_Init.

    The mpirun of MPICH takes no notice of a rank that ends before MPI_Init, whatever its exit code.
    Blocks at most 3 s; then the process ends with the exit code.
    """
    timer = threading.Timer(_ABORTED_AFTER_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    with suppress(Exception):  # there may be no MPI library
        start_mpi(2 * _ABORTED_AFTER_S)
        sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)


process = Process()
