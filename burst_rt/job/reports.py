"""What ranks tell `burst-rt run`: that they are there, what they wait for, and how they ended.

Each rank writes a few small JSON files to the job's folder, each file whole or not at all. A rank
that is killed leaves no report. A rank that crashes in native code leaves its Python stack, which
`faulthandler` writes. On other hosts than the launcher's the folder does not exist, and nothing is
written. No function waits for another process. Standard library only: every rank imports this
module before its program.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from burst_rt.job import launched
from burst_rt.job.telling import OF_ONE_RANK, named_once, tell

__all__ = [
    "JOB_DIR_VARIABLE",
    "RankReport",
    "RankStart",
    "RankWait",
    "crash_path",
    "job_folder",
    "pipe_path",
    "primary_failure",
    "read_reports",
    "read_resume",
    "read_started",
    "read_waiting",
    "report_end",
    "say_resume",
    "say_started",
    "stderr_path",
    "waiting_for",
    "whereabouts",
    "write_report",
]

# The environment variable that names the job's folder to its ranks.
JOB_DIR_VARIABLE = "BURST_RT_JOB_DIR"

# Errors that a rank raises because of another rank. They are the cause only where no rank raised
# any other error.
_SECONDARY_KINDS = frozenset({"PeerLost", "Stalled"})
_seen: set[str] = set()  # job folders that were there


@dataclass(frozen=True)
class RankReport:
    """The end of one rank's program."""

    rank: int
    ended_at_s: float  # seconds since the epoch
    exit_code: int
    kind: str = ""  # class of the exception; "" where the program simply ended
    peer: int | None = None  # the rank that a PeerLost or Stalled names
    traceback: str = ""  # empty for `sys.exit`

    @property
    def failed(self) -> bool:
        """Whether the rank ended with another exit code than 0."""
        return self.exit_code != 0

    @property
    def headline(self) -> str:
        """The exception's own line, for a sentence that names the rank; "" without an exception.

        It is the last line of the traceback that starts with the exception's class.
        """
        lines = [
            line
            for line in self.traceback.splitlines()
            if self.kind in line.partition(":")[0] and not line.startswith(" ")
        ]
        if not lines:
            return self.kind
        kind, _, message = lines[-1].partition(": ")
        return named_once(kind, message, self.rank) if message else kind

    @property
    def secondary(self) -> bool:
        """Whether the rank failed because another rank was gone or silent."""
        return self.kind in _SECONDARY_KINDS


class RankStart(NamedTuple):
    """A rank whose process has started."""

    rank: int
    pid: int
    where: str  # `whereabouts()`: the same for processes that see each other's pids


class RankWait(NamedTuple):
    """A rank that waits until other ranks reach the same place."""

    rank: int
    what: str  # the place: "MPI_Init" or "burst_rt.init"
    ranks: list[int]  # all that must come to the place


def job_folder() -> Path | None:
    """The job's folder, in a rank that `burst-rt run` started on its own host; else None."""
    name = os.environ.get(JOB_DIR_VARIABLE)
    if not name:
        return None
    folder = Path(name)
    if not folder.is_dir() and name not in _seen:
        return None
    _seen.add(name)
    # What is old goes from temporary folders, on some hosts, and a job may take weeks.
    with suppress(OSError):
        folder.parent.mkdir(0o700, exist_ok=True)
        if folder.parent.stat().st_uid == os.geteuid():
            folder.mkdir(0o700, exist_ok=True)
    return folder


def write_report(job_dir: Path, report: RankReport) -> None:
    """Writes one rank's report, so that a reader sees the whole report or no report.

    Replaces what the rank has reported itself. Raises OSError where the folder cannot be written.
    """
    _write(_report_path(job_dir, report.rank), asdict(report))


def report_end(report: RankReport) -> bool:
    """Writes this rank's report to the job's folder, unless the launcher has done so.

    Returns False if the folder is missing or cannot be written. The launcher takes a rank without a
    report for lost, so a folder that cannot be written is told on stderr.
    """
    folder = job_folder()
    if folder is None:
        return False
    if _report_path(folder, report.rank).exists():
        # A stopped rank that was given up goes on while the job is being ended: a process whose
        # parent, mpirun, is killed gets SIGCONT.
        return True
    try:
        write_report(folder, report)
    except OSError as error:
        tell(f"burst-rt: rank {report.rank} cannot report its end: {error}")
        return False
    return True


def _read_all(job_dir: Path, pattern: str) -> Iterator[dict[str, Any]]:
    """What these files hold. A host may clean its temporary folders meanwhile."""
    for path in job_dir.glob(pattern):
        with suppress(FileNotFoundError):
            yield json.loads(path.read_text(encoding="utf-8"))


def read_reports(job_dir: Path) -> list[RankReport]:
    """All reports that have been written, the earliest end first."""
    reports = [RankReport(**told) for told in _read_all(job_dir, "rank-*.json")]
    return sorted(reports, key=lambda report: (report.ended_at_s, report.rank))


def primary_failure(reports: Sequence[RankReport]) -> RankReport | None:
    """The earliest failure; None where no rank reported a failure.

    A secondary failure is returned only where all failures are secondary.
    """
    failures = [report for report in reports if report.failed]
    return min(
        failures,
        key=lambda report: (
            report.secondary,
            # An error that one rank made is raised by all.
            report.kind not in OF_ONE_RANK and report.peer not in (None, report.rank),
            report.ended_at_s,
            report.rank,
        ),
        default=None,
    )


def say_started(job_dir: Path, rank: int) -> None:
    """Tells the launcher the process id of this rank, and by a pipe when its files are closed.

    Raises OSError where the folder cannot be written.
    """
    with suppress(OSError):
        # Open until the process is gone. Its children do not keep it open.
        pipe = os.open(pipe_path(job_dir, rank), os.O_WRONLY | os.O_NONBLOCK)
        os.register_at_fork(after_in_child=partial(_close, pipe, os.fstat(pipe).st_ino))
    _write(job_dir / f"started-{rank}.json", RankStart(rank, os.getpid(), whereabouts())._asdict())


def _close(descriptor: int, inode: int) -> None:
    """Closes a file, unless the program has closed it, and the number is another file's now."""
    with suppress(OSError):
        if os.fstat(descriptor).st_ino == inode:
            os.close(descriptor)


def whereabouts() -> str:
    """The running system and its namespace of processes, in one string.

    Hosts may share the job's folder, and the same process id means another process on each host.
    """
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.stat('/proc/self/ns/pid').st_ino}"
        )
    except OSError:
        return socket.gethostname()


def read_started(job_dir: Path) -> list[RankStart]:
    """The ranks whose processes have said that they have started, in no order."""
    return [RankStart(**told) for told in _read_all(job_dir, "started-*.json")]


@contextmanager
def waiting_for(what: str, ranks: Iterable[int]) -> Iterator[None]:
    """While inside, the launcher knows that this rank waits in `what` for `ranks`."""
    folder, rank = job_folder(), launched.rank()
    if folder is None or rank is None:
        yield
        return
    path = folder / f"waiting-{rank}.json"
    with suppress(OSError):
        _write(path, RankWait(rank, what, list(ranks))._asdict())
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_waiting(job_dir: Path) -> list[RankWait]:
    """The ranks that wait for others to join, in no order."""
    waiting = []
    for path in job_dir.glob("waiting-*.json"):
        # The rank may remove the file at any moment.
        with suppress(FileNotFoundError):
            waiting.append(RankWait(**json.loads(path.read_text(encoding="utf-8"))))
    return waiting


def say_resume(command: str) -> None:
    """Tells the launcher the command that resumes this run, should the run fail from now on.

    Does nothing outside a job of `burst-rt run`.
    """
    folder = job_folder()
    if folder is not None:
        with suppress(OSError):
            _write(folder / "resume.json", command)


def read_resume(job_dir: Path) -> str:
    """The command that resumes the run; "" where no rank has told one."""
    try:
        return str(json.loads((job_dir / "resume.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ""


def crash_path(job_dir: Path, rank: int) -> Path:
    """The path at which `faulthandler` leaves the Python stack of a rank that crashes in native
    code.
    """
    return job_dir / f"rank-{rank}.crash"


def stderr_path(job_dir: Path, rank: int) -> Path:
    """The path at which a rank keeps the last lines that it writes to stderr."""
    return job_dir / f"rank-{rank}.stderr"


def pipe_path(job_dir: Path, rank: int) -> Path:
    """The pipe that a rank holds open and the launcher reads."""
    return job_dir / f"rank-{rank}.pipe"


def _report_path(job_dir: Path, rank: int) -> Path:
    return job_dir / f"rank-{rank}.json"


def _write(path: Path, document: object) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(document), encoding="utf-8")
    os.replace(partial, path)
