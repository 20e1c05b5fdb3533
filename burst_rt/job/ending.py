"""How a process ends: exit codes, last words, and ending the job from any thread.

A thread that is not the program's cannot raise an error where the program would see it. So such a
thread ends the job. Standard library only: `burst-rt run` imports this module before the program.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from burst_rt.errors import BurstError
from burst_rt.job.folders import report_failure
from burst_rt.job.telling import named_once, tell

__all__ = ["end_job", "error_line", "exit_code_of", "mpi_takes_threads", "report_with"]

# Seconds until the process ends, whatever else holds up its end.
_LAST_RESORT_S = 10.0
# Seconds that `end_job` waits for `abort`.
_ABORT_S = 0.1

_report: Callable[[BurstError], None] | None = None


def exit_code_of(error: BaseException) -> int:
    """The exit code that a process ends with for an error; 0 for sys.exit() without one."""
    if isinstance(error, SystemExit):
        # The system keeps 8 bits of it.
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    return error.exit_code if isinstance(error, BurstError) else 1


def error_line(error: BaseException | None) -> str:
    """An error in one line, for the other ranks; "" for a program that ended well."""
    if error is None or not exit_code_of(error):
        return ""
    rank = error.rank if isinstance(error, BurstError) else None
    return named_once(type(error).__name__, " ".join(str(error).split()), rank)


def report_with(report: Callable[[BurstError], None]) -> None:
    """Sets what `end_job` calls to say why the process ends.

    With a report set, `end_job` does not call MPI_Abort: the launcher ends the job when it sees a
    non-zero exit code.
    """
    global _report
    _report = report


def end_job(error: BurstError, abort: Callable[[], None]) -> NoReturn:
    """Ends this process and its MPI job with the error's exit code. For any thread; never returns.

    Says why first, in a line on stderr or by `report_with`. The process is gone after 10 s at the
    latest. abort: ends the work on the device. After that the program could go on with invalid
    results, so `abort` is called last, and waited for at most 0.1 s.
    """
    last_resort = threading.Timer(_LAST_RESORT_S, os._exit, (error.exit_code,))
    last_resort.daemon = True
    last_resort.start()
    (_report or _say)(error)
    aborting = threading.Thread(target=abort, daemon=True)
    aborting.start()
    aborting.join(_ABORT_S)
    if _report is None:
        _abort_mpi(error.exit_code)
    os._exit(error.exit_code)


def _say(error: BurstError) -> None:
    tell(f"burst-rt: {type(error).__name__}: {error.message}")
    report_failure(error, error.exit_code)
    telemetry = sys.modules.get("burst_rt.telemetry.rank.joining")
    if telemetry is not None:
        telemetry.farewell(error.exit_code, error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def mpi_takes_threads() -> bool:
    """Whether any thread of this process may call MPI now; True where the process does not use MPI.

    False where MPI was started for one thread only, and before MPI_Init and after MPI_Finalize.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return True
    running = bool(mpi.Is_initialized() and not mpi.Is_finalized())
    return running and bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def _abort_mpi(code: int) -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    # Where MPI_Abort cannot be called, the launcher ends the job because of the exit code.
    if mpi is not None and mpi_takes_threads() and mpi.COMM_WORLD.size > 1:
        mpi.COMM_WORLD.Abort(code)
