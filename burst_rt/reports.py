"""How a rank's program ended: written by the rank, read by `burst-rt run`.

One small JSON file per rank in the job's folder. A rank that is killed writes none; a rank that crashes in native code leaves its
Python stack in a second file, which `faulthandler` fills. Standard library only: every rank imports this before its program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["JOB_DIR_VARIABLE", "RankReport", "crash_path", "primary_failure", "read_reports", "write_report"]

# Names the job's folder to its ranks.
JOB_DIR_VARIABLE = "BURST_RT_JOB_DIR"

# What a rank raises because of another one: never the cause where there is anything else.
_SECONDARY_KINDS = frozenset({"PeerLost", "Stalled"})


@dataclass(frozen=True)
class RankReport:
    """The end of one rank's program.

    `ended_at_s` is in seconds since the epoch; `kind` is the class of the exception, or "" where the program simply ended; `peer` is the
    rank that a PeerLost or Stalled names; `traceback` is empty for `sys.exit`.
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
    def secondary(self) -> bool:
        """Whether it failed because another rank was gone or silent."""
        return self.kind in _SECONDARY_KINDS


def write_report(job_dir: Path, report: RankReport) -> None:
    """Write one rank's report so that a reader sees all of it or nothing. Raises OSError where the folder cannot be written."""
    partial = job_dir / f"rank-{report.rank}.partial"
    partial.write_text(json.dumps(asdict(report)), encoding="utf-8")
    os.replace(partial, job_dir / f"rank-{report.rank}.json")


def read_reports(job_dir: Path) -> list[RankReport]:
    """All reports there are, the earliest first."""
    reports = [RankReport(**json.loads(path.read_text(encoding="utf-8"))) for path in job_dir.glob("rank-*.json")]
    return sorted(reports, key=lambda report: (report.ended_at_s, report.rank))


def primary_failure(reports: Sequence[RankReport]) -> RankReport | None:
    """The earliest failure, a secondary one only where there is no other; None where no rank reported one."""
    failures = [report for report in reports if report.failed]
    return min(failures, key=lambda report: (report.secondary, report.ended_at_s, report.rank), default=None)


def crash_path(job_dir: Path, rank: int) -> Path:
    """Where `faulthandler` leaves the Python stack of a rank that crashes in native code."""
    return job_dir / f"rank-{rank}.crash"
