"""The folders of jobs: where a job's ranks leave their traces, and which of them are kept.

`burst-rt run` makes its job's folder. Under other launchers the ranks do: rank 0 says the name, and
the ranks of each host share a folder of that name. A folder goes when its job has ended well; the
newest ten of the others stay, for `burst-rt postmortem`. Whoever works in a folder holds a lock on
it until the end of its process, so a folder without a lock belongs to a job that has ended.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from burst_rt.errors import BurstError
from burst_rt.job.flight import FlightRecord, flight_path
from burst_rt.job.flights import read_flights
from burst_rt.job.reports import RankReport, job_folder, write_report
from burst_rt.job.telling import shorten_text

__all__ = [
    "NUM_KEPT", "SHARED_MEMORY", "ended_jobs", "hold_folder", "jobs_folder", "new_job_name",
    "open_flight", "prune_jobs", "release_folder", "report_failure", "retire_flight",
    "shared_memory_of",
]  # fmt: skip

NUM_KEPT = 10
# Where Open MPI's ranks share memory under `burst-rt run`.
SHARED_MEMORY = Path("/dev/shm")

_own: FlightRecord | None = None
_held: dict[Path, int] = {}  # descriptors with locks, by the folder


def jobs_folder() -> Path:
    """The folder of this user's jobs on this host. Raises OSError where it cannot be made, or is
    somebody else's.
    """
    # Hosts may share the folder, and locks on it may be each host's own.
    name = f"burst-rt-jobs-{os.geteuid()}-{socket.gethostname()}"
    folder = Path(tempfile.gettempdir()) / name
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    _require_own(folder)
    return folder


def _require_own(folder: Path) -> None:
    # Anybody may make folders in the temporary folder, and links to folders.
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is not a folder of this user")


def new_job_name() -> str:
    """A name for a job's folder. Names sort by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def hold_folder(name: str) -> Path:
    """Makes the folder of a job, where it is not there yet, and holds its lock until
    `release_folder`, or the end of this process. Does not block. Raises OSError as `jobs_folder`
    does.
    """
    folder = jobs_folder() / name
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    _require_own(folder)
    _held[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    # File systems without locks keep no folder from being pruned.
    with suppress(OSError):
        fcntl.flock(_held[folder], fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder


def release_folder(folder: Path, *, delete: bool) -> None:
    """Lets go of a folder that `hold_folder` has made, and deletes it if asked. Does not block."""
    if delete:
        shutil.rmtree(folder, ignore_errors=True)
    os.close(_held.pop(folder))


def ended_jobs() -> list[Path]:
    """The folders of jobs that have ended, the newest first. Does not block."""
    folders: list[Path] = []
    with suppress(OSError):
        folders = sorted((x for x in jobs_folder().iterdir() if x.is_dir()), reverse=True)
    return [folder for folder in folders if not _is_held(folder)]


def _is_held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True  # gone meanwhile
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def shared_memory_of(job: str) -> Path:
    """The folder in shared memory of a job of this user."""
    return SHARED_MEMORY / f"burst-rt-{os.geteuid()}-{job}"


def prune_jobs(num_kept: int = NUM_KEPT) -> None:
    """Deletes the folders of ended jobs but the newest, and what killed launchers left in shared
    memory. Does not block.
    """
    for number, folder in enumerate(ended_jobs()):
        shutil.rmtree(shared_memory_of(folder.name), ignore_errors=True)
        if number >= num_kept:
            shutil.rmtree(folder, ignore_errors=True)


def open_flight(name: str, rank: int, size: int) -> FlightRecord | None:
    """This process's flight record; None where it cannot be made. Does not block.

    It lies in the folder of `burst-rt run`, or else in that of the job's name. A process that has
    a record keeps it. rank, size: see `FlightRecord`.
    """
    global _own
    if _own is not None and flight_path(_own.folder, rank).exists():
        _own.close(closed=False)
    else:
        if _own is not None and _own.folder in _held:
            release_folder(_own.folder, delete=False)  # another rank has deleted it
        _own = None
        with suppress(OSError):
            folder = job_folder()
            if folder is None:
                prune_jobs(NUM_KEPT - 1)
                folder = hold_folder(name)
            _own = FlightRecord(folder, rank, size)
    return _own


def retire_flight() -> None:
    """Notes that this process has left all its groups, and none of them failed.

    Where the ranks have made the folder, and all have left, deletes it. Does not block.
    """
    global _own
    if _own is None:
        return
    _own.close(closed=True)
    folder = _own.folder
    if folder in _held and all(flight.closed for flight in read_flights(folder).values()):
        _own = None
        release_folder(folder, delete=True)


def report_failure(error: BaseException, code: int) -> None:
    """Leaves a report beside this process's flight record, for a process that ends by an error.

    Under `burst-rt run` the rank's program reports by itself. code: the exit code.
    """
    if _own is None or job_folder() is not None:
        return
    with shorten_text(error):
        text = "".join(traceback.format_exception(error))
    peer = error.peer if isinstance(error, BurstError) else None
    report = RankReport(
        _own.rank, time.time(), code, kind=type(error).__name__, peer=peer, traceback=text
    )
    with suppress(OSError):
        write_report(_own.folder, report)
