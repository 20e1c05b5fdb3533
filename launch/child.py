"""What `burst-rt run` starts on every rank: runs the user's program as `__main__` and sees to it
that its failure ends the job.

Under plain `mpirun python script.py` an uncaught exception on one rank leaves the others waiting
for ever: the interpreter, on its way out, waits for them in MPI_Finalize. Here the failure is
reported to the launcher and the process ends at once, which ends the job. A program that leaves
with exit code 0 takes the usual way out: its contexts say goodbye at exit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.abc
import io
import os
import runpy
import stat
import sys
import time
import traceback
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType

from burst_rt.errors import BurstError
from burst_rt.job import launched
from burst_rt.job.ending import report_with
from burst_rt.job.reports import (
    RankReport,
    crash_path,
    job_folder,
    report_end,
    say_started,
    waiting_for,
)

__all__ = ["main"]


def main(argv: Sequence[str]) -> None:
    """Run `SCRIPT args...` or `-m MODULE args...`; returns where the program ended well, else does
    not return.
    """
    rank = launched.rank() or 0
    for stream in (sys.stdout, sys.stderr):
        # Whole lines: into mpirun's pipe Python would write blocks, late and lost where the job is
        # killed, or under PYTHONUNBUFFERED pieces of lines, which mix with those of other ranks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    # Open MPI leaves rank 0 an input that never ends: a program that reads it would wait for ever.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    job_dir = job_folder()
    if job_dir is not None:
        with contextlib.suppress(OSError):
            say_started(job_dir, rank)
    _catch_crashes(job_dir, rank)
    _set_rendezvous(rank)
    sys.meta_path.insert(0, _MpiFinder())
    # What a context's own thread finds, while the program waits for a device.
    report_with(lambda error: _say_why(_describe(error, rank), error))
    process = os.getpid()
    try:
        _run_program(argv)
    except BaseException as error:
        if os.getpid() != process:
            # a child that was forked ends as any other Python would, and says nothing for the rank
            raise
        if isinstance(error, SystemExit):
            _leave(RankReport(rank, time.time(), _exit_code(error), kind="SystemExit"))
        else:
            _leave(_describe(error, rank), error)
    else:
        if os.getpid() == process:
            _leave(RankReport(rank, time.time(), 0))


def _set_rendezvous(rank: int) -> None:
    """What torchrun would set, so that `torch.distributed.init_process_group()` works beside MPI.

    The launcher has set MASTER_ADDR and MASTER_PORT.
    """
    num_ranks = launched.mpi_ranks()
    local_rank, num_local = launched.local_rank(), launched.num_local_ranks()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    # A launcher that does not say leaves these two unset.
    if local_rank is not None:
        os.environ["LOCAL_RANK"] = str(local_rank)
    if num_local is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(num_local)


class _MpiFinder(importlib.abc.MetaPathFinder):
    """Finds `mpi4py.MPI` as the others do, with a loader that tells the launcher for whom it
    waits.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        found = (
            finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self
        )
        spec = next((spec for spec in found if spec is not None), None)
        # burst_rt.init imports it without starting MPI.
        if spec is not None and spec.loader is not None and sys.modules["mpi4py"].rc.initialize:
            spec.loader = _MpiLoader(spec.loader)
        return spec


class _MpiLoader(importlib.abc.Loader):
    """Loads `mpi4py.MPI`, which starts MPI: that waits until all ranks have come."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with waiting_for("MPI_Init", range(launched.mpi_ranks())):
            self._loader.exec_module(module)


def _catch_crashes(job_dir: Path | None, rank: int) -> None:
    # A bare descriptor, open until the process is gone: MPI_Finalize, at the very end, can crash
    # too.
    stderr = 2
    faulthandler.enable(
        stderr
        if job_dir is None
        else os.open(crash_path(job_dir, rank), os.O_WRONLY | os.O_CREAT, 0o600)
    )
    # What crashes in a child that was forked is not the rank.
    os.register_at_fork(after_in_child=partial(faulthandler.enable, stderr))


def _run_program(argv: Sequence[str]) -> None:
    # Ranks start with `python -P`, so that nothing in the current folder can stand in for a module
    # this file needs. The entry that plain Python would have put first goes in here.
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
    text = "".join(
        traceback.format_exception(type(error), error, _program_frames(error.__traceback__))
    )
    return RankReport(
        rank, time.time(), exit_code, kind=type(error).__name__, peer=peer, traceback=text
    )


def _program_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        frames = frames.tb_next
    return frames


def _leave(report: RankReport, error: BaseException | None = None) -> None:
    _say_why(report, error)
    if report.failed:
        # Not sys.exit, whose way out waits for threads and for MPI_Finalize, and so for the other
        # ranks. Nor MPI_Abort: mpirun ends the job for a non-zero exit as surely and says so in
        # fewer words, and Open MPI's abort leaves a NUL byte in the log.
        os._exit(report.exit_code)


def _say_why(report: RankReport, error: BaseException | None = None) -> None:
    """Reports the end to the launcher, and of a failure to telemetry and on stderr."""
    reported = report_end(report)
    if not report.failed:
        return
    # Telemetry, where the program has any, hears why; a light import stays light.
    telemetry = sys.modules.get("burst_rt.telemetry.joining")
    if telemetry is not None:
        telemetry.farewell(report.exit_code, error)
    if report.traceback:
        # The launcher prints the whole traceback of the failure that matters last; here one line
        # says that this rank is gone.
        print(
            f"burst-rt: rank {report.rank}: {report.headline}" if reported else report.traceback,
            file=sys.stderr,
        )
    _tidy_up()


def _tidy_up() -> None:
    """What the interpreter's own way out would do that others rely on: ends daemonic children,
    writes what files still hold back.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing is not None else ():
        child.terminate()
    # By type: to ask some libraries' objects what they are an instance of makes them warn.
    files = [
        x
        for x in gc.get_objects()
        if type(x) in (io.BufferedWriter, io.TextIOWrapper) and not x.closed
    ]
    for file in (*files, sys.stdout, sys.stderr):
        # Not into pipes of others, which may be full for ever.
        with contextlib.suppress(OSError, ValueError):
            if file in (sys.stdout, sys.stderr) or stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
