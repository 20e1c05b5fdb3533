"""What `burst-rt run` starts on every rank: runs the user's program as `__main__` and sees to it that its failure ends the job.

Under plain `mpirun python script.py` an uncaught exception on one rank leaves the others waiting for ever: the interpreter, on its way
out, waits for them in MPI_Finalize. Here the failure is reported to the launcher and the process ends at once, which ends the job. A
program that leaves with exit code 0 takes the usual way out: its contexts say goodbye at exit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import runpy
import stat
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from burst_rt.ending import report_with
from burst_rt.errors import BurstError
from burst_rt.launch.reports import JOB_DIR_VARIABLE, RankReport, crash_path, write_report

__all__ = ["main"]

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def main(argv: Sequence[str]) -> None:
    """Run `SCRIPT args...` or `-m MODULE args...`; returns where the program ended well, else does not return."""
    rank = _rank()
    for stream in (sys.stdout, sys.stderr):
        # Whole lines: into mpirun's pipe Python would write blocks, late and lost where the job is killed, or under PYTHONUNBUFFERED
        # pieces of lines, which mix with those of other ranks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    # Open MPI leaves rank 0 an input that never ends: a program that reads it would wait for ever.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    job_dir = _job_dir()
    _catch_crashes(job_dir, rank)
    # What a context's own thread finds, while the program waits for a device.
    report_with(lambda error: _say_why(_describe(error, rank), job_dir, error))
    try:
        _run_program(argv)
    except SystemExit as stop:
        _leave(RankReport(rank, time.time(), _exit_code(stop), kind="SystemExit"), job_dir)
    except BaseException as error:  # noqa: BLE001 - the one place where any failure of the program ends the job
        _leave(_describe(error, rank), job_dir, error)
    else:
        _leave(RankReport(rank, time.time(), 0), job_dir)


def _rank() -> int:
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def _job_dir() -> Path | None:
    # On another host than the launcher's the folder does not exist.
    name = os.environ.get(JOB_DIR_VARIABLE)
    return Path(name) if name and Path(name).is_dir() else None


def _catch_crashes(job_dir: Path | None, rank: int) -> None:
    # A bare descriptor, open until the process is gone: MPI_Finalize, at the very end, can crash too.
    stderr = 2
    faulthandler.enable(stderr if job_dir is None else os.open(crash_path(job_dir, rank), os.O_WRONLY | os.O_CREAT, 0o600))


def _run_program(argv: Sequence[str]) -> None:
    # Ranks start with `python -P`, so that nothing in the current folder can stand in for a module this file needs. The entry that
    # plain Python would have put first goes in here.
    if argv[0] == "-m":
        module, sys.argv = argv[1], list(argv[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    script, sys.argv = Path(argv[0]).absolute(), list(argv)
    if script.is_file():
        sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _describe(error: BaseException, rank: int) -> RankReport:
    if isinstance(error, BurstError):
        exit_code, peer = error.exit_code, error.peer
    else:
        exit_code, peer = (130 if isinstance(error, KeyboardInterrupt) else 1), None
    text = "".join(traceback.format_exception(type(error), error, _program_frames(error.__traceback__)))
    return RankReport(rank, time.time(), exit_code, kind=type(error).__name__, peer=peer, traceback=text)


def _program_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames


def _leave(report: RankReport, job_dir: Path | None, error: BaseException | None = None) -> None:
    _say_why(report, job_dir, error)
    if report.failed:
        # Not sys.exit, whose way out waits for threads and for MPI_Finalize, and so for the other ranks. Nor MPI_Abort: mpirun ends the
        # job for a non-zero exit as surely and says so in fewer words, and Open MPI's abort leaves a NUL byte in the log.
        os._exit(report.exit_code)


def _say_why(report: RankReport, job_dir: Path | None, error: BaseException | None = None) -> None:
    """Reports the end to the launcher, and of a failure to telemetry and on stderr."""
    reported = False
    if job_dir is not None:
        with contextlib.suppress(OSError):
            write_report(job_dir, report)
            reported = True
    if not report.failed:
        return
    # Telemetry, where the program has any, hears why; a light import stays light.
    telemetry = sys.modules.get("burst_rt.telemetry.joining")
    if telemetry is not None:
        telemetry.farewell(report.exit_code, error)
    if report.traceback:
        # The launcher prints the whole traceback of the failure that matters last; here one line says that this rank is gone.
        print(_headline(report) if reported else report.traceback, file=sys.stderr)
    _tidy_up()


def _tidy_up() -> None:
    """What the interpreter's own way out would do that others rely on: ends daemonic children, writes what files still hold back."""
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing is not None else ():
        child.terminate()
    # By type: to ask some libraries' objects what they are an instance of makes them warn.
    files = [x for x in gc.get_objects() if type(x) in (io.BufferedWriter, io.TextIOWrapper) and not x.closed]
    for file in (*files, sys.stdout, sys.stderr):
        # Not into pipes of others, which may be full for ever.
        with contextlib.suppress(OSError, ValueError):
            if file in (sys.stdout, sys.stderr) or stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.flush()


def _headline(report: RankReport) -> str:
    # The exception's own line is the last one that starts with its class; a message may go on over more lines.
    lines = [line for line in report.traceback.splitlines() if report.kind in line.partition(":")[0] and not line.startswith(" ")]
    return f"burst-rt: rank {report.rank}: {lines[-1] if lines else report.kind}"


if __name__ == "__main__":
    main(sys.argv[1:])
