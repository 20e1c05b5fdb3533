"""What `burst-rt run` starts on every rank: runs the user's program; its failure ends the job.

Under plain `mpirun python script.py` an uncaught exception on one rank leaves the other ranks
waiting for ever: the failed rank's interpreter, on its way out, waits for them in MPI_Finalize.
Here the failure is reported to the launcher and the process ends at once, which ends the job. A
program that ends with exit code 0 exits as usual, and its contexts say goodbye at exit.
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
from typing import TYPE_CHECKING

from burst_rt.errors import BurstError
from burst_rt.job import launched
from burst_rt.job.ending import report_with
from burst_rt.job.reports import (
    RankReport,
    crash_path,
    job_folder,
    report_end,
    say_started,
    stderr_path,
    waiting_for,
)
from burst_rt.job.telling import FIRST_WORD_S, is_of_another, shorten_text, tell

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

__all__ = ["main"]

_KEPT_BYTES = 2**14


def main(argv: Sequence[str]) -> None:
    """Run `SCRIPT args...` or `-m MODULE args...` as `__main__`; blocks until the program ends.

    Returns where the program ended well; otherwise ends the process.
    """
    rank = launched.process_rank() or 0
    for stream in (sys.stdout, sys.stderr):
        # Write whole lines. Into mpirun's pipe Python would write blocks, which come late and are
        # lost where the job is killed, or under PYTHONUNBUFFERED pieces of lines, which mix with
        # pieces from other ranks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    # Open MPI gives rank 0 an input that never ends: a program that reads it would wait for ever.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    job_dir = job_folder()
    if job_dir is not None:
        with contextlib.suppress(OSError):
            say_started(job_dir, rank)
        with contextlib.suppress(OSError):
            _keep_stderr(stderr_path(job_dir, rank))
    _catch_crashes(job_dir, rank)
    _set_rendezvous(rank)
    sys.meta_path.insert(0, _MpiFinder())
    # A context's own thread may find an error while the program waits for a device.
    report_with(lambda error: _say_why(_describe(error, rank), error))
    process = os.getpid()
    try:
        _run_program(argv)
    except BaseException as error:
        if os.getpid() != process:
            # a forked child ends as any Python process does, and reports nothing for the rank
            raise
        if isinstance(error, SystemExit):
            _leave(RankReport(rank, time.time(), _exit_code(error), kind="SystemExit"))
        else:
            _leave(_describe(error, rank), error)
    else:
        if os.getpid() == process:
            failure = _unresolved()
            if failure is None:
                _leave(RankReport(rank, time.time(), 0))
            else:
                _say_why(_describe(failure, rank), failure)  # the exit code comes with the exit


def _unresolved() -> BaseException | None:
    """The error that has broken a context and was caught: the rank ends with its exit code."""
    module = sys.modules.get("burst_rt.runtime.process")
    return module.process.broken if module is not None else None


class _KeptStderr(io.RawIOBase):
    """Standard error, whose last bytes are kept in a file, too."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)

    def fileno(self) -> int:
        return 2

    def isatty(self) -> bool:
        return os.isatty(2)

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        num_written = os.write(2, data)
        with contextlib.suppress(OSError):
            if self._file.tell() > 4 * _KEPT_BYTES:
                self._file.seek(-_KEPT_BYTES, os.SEEK_END)
                last = self._file.read()
                self._file.seek(0)
                self._file.truncate()
                self._file.write(last)
            self._file.write(memoryview(data)[:num_written])
        return num_written


def _keep_stderr(path: Path) -> None:
    """Keeps the last lines that Python writes to stderr. What native code writes passes it by."""
    kept = io.BufferedWriter(_KeptStderr(path))
    sys.stderr = io.TextIOWrapper(
        kept, sys.stderr.encoding, "backslashreplace", line_buffering=True
    )


def _set_rendezvous(rank: int) -> None:
    """Set torchrun's variables, so that `torch.distributed.init_process_group()` works under MPI,
    too.

    The launcher has set MASTER_ADDR and MASTER_PORT.
    """
    if launched.rank() is None and launched.by_launcher():
        return  # torchrun has set them itself
    num_ranks = launched.mpi_ranks()
    local_rank, num_local = launched.local_rank(), launched.num_local_ranks()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    # Where the launcher does not say the local ranks, these two stay unset.
    if local_rank is not None:
        os.environ["LOCAL_RANK"] = str(local_rank)
    if num_local is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(num_local)


class _MpiFinder(importlib.abc.MetaPathFinder):
    """Finds `mpi4py.MPI` as other finders do, with a loader that tells the launcher of its wait."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        specs = (
            finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self
        )
        spec = next((spec for spec in specs if spec is not None), None)
        # burst_rt.init imports mpi4py.MPI without starting MPI: then nothing waits.
        if spec is not None and spec.loader is not None and sys.modules["mpi4py"].rc.initialize:
            spec.loader = _MpiLoader(spec.loader)
        return spec


class _MpiLoader(importlib.abc.Loader):
    """Loads `mpi4py.MPI`, which starts MPI and so blocks until all ranks have come."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with waiting_for("MPI_Init", range(launched.mpi_ranks())):
            self._loader.exec_module(module)


def _catch_crashes(job_dir: Path | None, rank: int) -> None:
    # A bare descriptor stays open until the process is gone: MPI_Finalize, at the very end, can
    # crash too.
    stderr = 2
    faulthandler.enable(
        stderr
        if job_dir is None
        else os.open(crash_path(job_dir, rank), os.O_WRONLY | os.O_CREAT, 0o600)
    )
    # A crash in a forked child is not a crash of the rank.
    os.register_at_fork(after_in_child=partial(faulthandler.enable, stderr))


def _run_program(argv: Sequence[str]) -> None:
    # Ranks start with `python -P`, so that nothing in the current folder can shadow a module that
    # this file needs. Here sys.path gets the entry that plain Python would have put first.
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
    tell(str(stop.code))
    return 1


def _describe(error: BaseException, rank: int) -> RankReport:
    if isinstance(error, BurstError):
        exit_code, peer = error.exit_code, error.peer
    else:
        exit_code, peer = (130 if isinstance(error, KeyboardInterrupt) else 1), None
    with shorten_text(error):
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
    if is_of_another(error):
        time.sleep(FIRST_WORD_S)
    _say_why(report, error)
    if report.failed:
        # sys.exit would wait for threads and in MPI_Finalize, and so for the other ranks. MPI_Abort
        # is not needed: at a non-zero exit mpirun ends the job as surely and in fewer words, and
        # Open MPI's abort leaves a NUL byte in the log.
        os._exit(report.exit_code)


def _say_why(report: RankReport, error: BaseException | None = None) -> None:
    """Reports the end to the launcher; a failure also to telemetry and on stderr."""
    reported = report_end(report)
    if not report.failed:
        return
    # Looked up instead of imported: a program without telemetry does not load it to end.
    telemetry = sys.modules.get("burst_rt.telemetry.rank.joining")
    if telemetry is not None:
        telemetry.farewell(report.exit_code, error)
    if report.traceback:
        # The launcher prints the traceback of the failure that matters at the end of the job. Here
        # one line says that this rank is gone.
        tell(f"burst-rt: rank {report.rank}: {report.headline}" if reported else report.traceback)
    _tidy_up()


def _tidy_up() -> None:
    """Does what others rely on at the interpreter's exit: ends daemonic children, flushes files."""
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing is not None else ():
        child.terminate()
    # Compare types: isinstance makes the objects of some libraries warn.
    files = [
        x
        for x in gc.get_objects()
        if type(x) in (io.BufferedWriter, io.TextIOWrapper) and not x.closed
    ]
    for file in (*files, sys.stdout, sys.stderr):
        # Pipes to other processes are left out: they may be full for ever.
        with contextlib.suppress(OSError, ValueError):
            if file in (sys.stdout, sys.stderr) or stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
