"""Where mpiruns truly differ: what is known of a rank that ended without a report.

Seen with Open MPI 5.0.11, MPICH 5.0.2 and Intel MPI 2021.18.
"""

from __future__ import annotations

from dataclasses import dataclass

from burst_rt.launch.mpirun import find_launcher

__all__ = ["Mpirun", "mpirun"]


@dataclass(frozen=True)
class Mpirun:
    """One family. `how_*`: what `burst-rt run` says of such a rank, a pattern. `exited_3`: the
    job's exit code after a rank's `os._exit(3)`. `names_the_first`: whether the rank that is named
    is sure to be the one that ended first.
    """

    how_exited_0: str
    how_exited_3: str
    how_killed: str
    exited_3: int
    killed: int
    names_the_first: bool = True


def _no_report(code: str) -> str:
    return rf"ended without a report \(mpirun's exit code is {code}\)"


_BARE = "9, as of SIGKILL, by which mpirun may itself have ended this rank or another"
_FAMILIES = {
    "Open MPI": Mpirun(
        _no_report(r"[1-9]\d*"),
        _no_report("3"),
        "was killed by signal 9, SIGKILL",
        exited_3=3,
        killed=128 + 9,
    ),
    # It kills the others within 10 ms of a rank's end, and returns one of the ranks' codes or
    # signals, or 0.
    "MPICH": Mpirun(
        _no_report(f"(0|{_BARE})"),
        _no_report("3"),
        _no_report(_BARE),
        exited_3=3,
        killed=9,
        names_the_first=False,
    ),
    "Intel MPI": Mpirun(
        _no_report("255"), _no_report("255"), _no_report("255"), exited_3=255, killed=255
    ),
}


def mpirun() -> Mpirun:
    """What is known of the mpirun that `burst-rt run` takes here."""
    return _FAMILIES[find_launcher().family]
