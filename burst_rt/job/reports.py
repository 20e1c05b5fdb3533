"""What ranks tell `burst-rt run` through the job's folder: that they are there, what they wait for,
how they ended.

A few small JSON files a rank, written whole or not at all. A rank that is killed leaves no report;
a rank that crashes in native code leaves its Python stack, which `faulthandler` writes. On other
hosts than the launcher's the folder does not exist, and nothing is written. Standard library only:
every rank imports this module before its program.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from burst_rt.job import launched

__all__ = [
    "JOB_DIR_VARIABLE",
    "RankReport",
    "Started",
    "Waiting",
    "crash_path",
    "job_folder",
    "primary_failure",
    "read_reports",
    "read_resume",
    "read_started",
    "read_waiting",
    "report_end",
    "say_resume",
    "say_started",
    "waiting_for",
    "whereabouts",
    "write_report",
]

# Names the job's folder to its ranks.
JOB_DIR_VARIABLE = "BURST_RT_JOB_DIR"

# What a rank raises because of another one: never the cause where there is anything else.
_SECONDARY_KINDS = frozenset({"PeerLost", "Stalled"})


@dataclass(frozen=True)
class RankReport:
    """The end of one rank's program.

    `ended_at_s` is in seconds since the epoch; `kind` is the class of the exception, or "" where
    the program simply ended; `peer` is the rank that a PeerLost or Stalled names; `traceback` is
    empty for `sys.exit`.
    """

    rank: int
    ended_at_s: float
    exit_code: int
    kind: str = ""
    peer: int | None = None
    traceback: str = ""

    @property
    def failed(self) -> bool:
        """Whether the rank left in any other way than with exit code 0."""
        return self.exit_code != 0

    @property
    def headline(self) -> str:
        """The exception's own line, which is the last that starts with its class; "" where there
        was none.
        """
        lines = [
            line
            for line in self.traceback.splitlines()
            if self.kind in line.partition(":")[0] and not line.startswith(" ")
        ]
        return lines[-1] if lines else self.kind

    @property
    def secondary(self) -> bool:
        """Whether it failed because another rank was gone or silent."""
        return self.kind in _SECONDARY_KINDS


class Started(NamedTuple):
    """A rank whose process is there. `where` is the same for processes that see each other's
    numbers (see `whereabouts`).
    """

    rank: int
    pid: int
    where: str


class Waiting(NamedTuple):
    """A rank waits in `what` ("MPI_Init" or "init") until all of `ranks` have come there too."""

    rank: int
    what: str
    ranks: list[int]


def job_folder() -> Path | None:
    """The job's folder, in a rank that `burst-rt run` has started on its own host; else None."""
    name = os.environ.get(JOB_DIR_VARIABLE)
    return Path(name) if name and Path(name).is_dir() else None


def write_report(job_dir: Path, report: RankReport) -> None:
    """Write one rank's report so that a reader sees all of it or nothing. Raises OSError where the
    folder cannot be written.
    """
    _write(job_dir / f"rank-{report.rank}.json", asdict(report))


def report_end(report: RankReport) -> bool:
    """Writes this rank's report to the job's folder; False where there is none or it cannot be
    written.
    """
    folder = job_folder()
    if folder is None:
        return False
    with suppress(OSError):
        write_report(folder, report)
        return True
    return False


def read_reports(job_dir: Path) -> list[RankReport]:
    """All reports there are, the earliest first."""
    reports = [
        RankReport(**json.loads(path.read_text(encoding="utf-8")))
        for path in job_dir.glob("rank-*.json")
    ]
    return sorted(reports, key=lambda report: (report.ended_at_s, report.rank))


def primary_failure(reports: Sequence[RankReport]) -> RankReport | None:
    """The earliest failure, a secondary one only where there is no other; None where no rank
    reported one.
    """
    failures = [report for report in reports if report.failed]
    return min(
        failures,
        key=lambda report: (report.secondary, report.ended_at_s, report.rank),
        default=None,
    )


def say_started(job_dir: Path, rank: int) -> None:
    """Tells the launcher this rank's process. Raises OSError where the folder cannot be written."""
    _write(job_dir / f"started-{rank}.json", Started(rank, os.getpid(), whereabouts())._asdict())


def whereabouts() -> str:
    """The running system and the namespace of processes: on hosts that share the job's folder a
    number means another process.
    """
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} "
            f"{os.stat('/proc/self/ns/pid').st_ino}"
        )
    except OSError:
        return socket.gethostname()


def read_started(job_dir: Path) -> list[Started]:
    """The ranks whose processes have said that they are there, in no order."""
    return [
        Started(**json.loads(path.read_text(encoding="utf-8")))
        for path in job_dir.glob("started-*.json")
    ]


@contextmanager
def waiting_for(what: str, ranks: Iterable[int]) -> Iterator[None]:
    """While inside, the launcher knows that this rank waits in `what` for `ranks`."""
    folder, rank = job_folder(), launched.rank()
    if folder is None or rank is None:
        yield
        return
    path = folder / f"waiting-{rank}.json"
    with suppress(OSError):
        _write(path, Waiting(rank, what, list(ranks))._asdict())
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_waiting(job_dir: Path) -> list[Waiting]:
    """The ranks that wait for others to join, in no order."""
    found = []
    for path in job_dir.glob("waiting-*.json"):
        # It may go at any moment.
        with suppress(FileNotFoundError):
            found.append(Waiting(**json.loads(path.read_text(encoding="utf-8"))))
    return found


def say_resume(command: str) -> None:
    """Tells the launcher how to go on with this run, should it fail from now on. Not said outside a
    job of `burst-rt run`.
    """
    folder = job_folder()
    if folder is not None:
        with suppress(OSError):
            _write(folder / "resume.json", command)


def read_resume(job_dir: Path) -> str:
    """What to run to go on; "" where no rank has said."""
    try:
        return str(json.loads((job_dir / "resume.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return ""


def crash_path(job_dir: Path, rank: int) -> Path:
    """Where `faulthandler` leaves the Python stack of a rank that crashes in native code."""
    return job_dir / f"rank-{rank}.crash"


def _write(path: Path, document: object) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(document), encoding="utf-8")
    os.replace(partial, path)
