"""Starting MPI under a deadline, and naming the ranks that are missing.

MPI_Init waits for every rank of the job and has no deadline of its own. Importing `mpi4py.MPI`
calls MPI_Init while the thread holds the interpreter's lock, so that no other thread could end the
wait. Here mpi4py is imported without starting MPI, and MPI_Init_thread is called with the lock
released, while a thread watches the time. A program that imports `mpi4py.MPI` before it calls
`burst_rt.init` starts MPI by itself, without a deadline.

The process that starts MPI also ends it, at exit. A child that was forked does not: its
MPI_Finalize would disturb its parent's. (mpi4py's own does.)
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from burst_rt.errors import ConfigError, Stalled
from burst_rt.job import launched, reports
from burst_rt.job.clock import RunningClock
from burst_rt.job.telling import tell

__all__ = ["start_mpi", "who_is_missing"]

_LOOK_S = 0.2
# The id of the process that has started MPI here and must end it; empty if there is none.
_started_by: set[int] = set()


def start_mpi(deadline_s: float) -> None:
    """Starts MPI, unless it runs already. Blocks until all ranks of the job have come.

    After `deadline_s` it prints which ranks are missing, as far as this host can know, and ends the
    process with the exit code of `Stalled`, which ends the job: MPI_Init cannot be left in any
    other way. Raises ImportError or RuntimeError without an MPI library, and ConfigError if mpi4py
    is told not to start MPI.
    """
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized():
        return
    import mpi4py

    by_import, finalize = mpi4py.rc.initialize, mpi4py.rc.finalize
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = by_import, finalize
    if MPI.Is_initialized():
        return
    if not by_import:
        raise ConfigError(
            "init: mpi4py.rc.initialize is False, and MPI has not been started; call "
            "MPI.Init_thread() before burst_rt.init()"
        )
    levels = {
        "single": MPI.THREAD_SINGLE,
        "funneled": MPI.THREAD_FUNNELED,
        "serialized": MPI.THREAD_SERIALIZED,
    }
    level = (
        levels.get(mpi4py.rc.thread_level, MPI.THREAD_MULTIPLE)
        if mpi4py.rc.threads
        else MPI.THREAD_SINGLE
    )
    start = getattr(ctypes.CDLL(MPI.__file__), "MPI_Init_thread")  # noqa: B009  (a name of the library's, not of a class)
    provided = ctypes.c_int()
    everyone = range(launched.mpi_ranks())
    with reports.waiting_for("MPI_Init", everyone), _deadline(deadline_s):
        code = start(None, None, level, ctypes.byref(provided))
    if code:
        raise RuntimeError(f"MPI_Init_thread failed: {MPI.Get_error_string(code)}")
    if finalize is not False:
        _started_by.add(os.getpid())
    # Does what mpi4py does after starting MPI: errors become exceptions, unless the program has
    # chosen otherwise.
    if mpi4py.rc.errors == "exception":
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
            comm.Set_errhandler(MPI.ERRORS_RETURN)


@atexit.register
def _finalize() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or os.getpid() not in _started_by or mpi.Is_finalized():
        return
    # MPI is ended later than this hook: other exit hooks of the program may still use MPI, and so
    # may objects that are destroyed last. mpi4py registers its own MPI_Finalize in the same way.
    library = ctypes.CDLL(mpi.__file__)
    register = ctypes.pythonapi.Py_AtExit
    register.argtypes = [ctypes.c_void_p]
    register(ctypes.cast(library.MPI_Finalize, ctypes.c_void_p))


def who_is_missing() -> str:
    """Words for a Stalled message: the ranks of this host that have ended, or that all are
    alive.
    """
    running, expected = launched.ranks_here(), launched.num_local_ranks()
    rank_here = launched.rank()
    if rank_here is None or expected is None or rank_here not in running:
        return "Which rank is missing is not known here"
    pids = ", ".join(
        f"rank {rank}: {pid}" for rank, pid in sorted(running.items()) if rank != rank_here
    )
    if len(running) < expected:
        return (
            f"{expected - len(running)} of this host's {expected} ranks have ended; still running: "
            f"ranks {sorted(running)}. Every rank must call burst_rt.init, or none"
        )
    return (
        f"All {expected} ranks of this host are alive; see what they are doing (py-spy dump --pid; "
        f"{pids or 'there is no other'})"
    )


@contextmanager
def _deadline(deadline_s: float) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        clock = RunningClock()
        while clock.read() < deadline_s:
            if over.wait(_LOOK_S):
                return
        rank = launched.rank() or 0
        message = (
            f"burst_rt.errors.Stalled: rank {rank} of {launched.mpi_ranks()} waited {deadline_s:g} "
            "s in MPI_Init for the other "
            f"ranks of the job to start MPI (join_s). {who_is_missing()}\n"
        )
        reports.report_end(
            reports.RankReport(
                rank, time.time(), Stalled.exit_code, kind="Stalled", traceback=message
            )
        )
        tell(message, end="")
        os._exit(Stalled.exit_code)

    threading.Thread(target=watch, name="burst_rt MPI_Init deadline", daemon=True).start()
    try:
        yield
    finally:
        over.set()
