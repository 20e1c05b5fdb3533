"""A rank's flight record: the rank's present call and task, readable after the process has died.

The record is a small file in the job's folder, mapped into memory: what is written survives the
process, however the process ends. Writing takes about a microsecond. There are records only under
`burst-rt run`, on the launcher's own host. A process has one record: with several contexts, the
record holds the call that was written last.
"""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from burst_rt.job import launched
from burst_rt.job.reports import job_folder

__all__ = ["Flight", "FlightRecord", "own_flight", "read_flight"]

# The number of the call (0: in no call). The texts of the call and of the task follow, each with a
# byte 0 behind it.
_NUMBER = struct.Struct("<q")
_TEXT_BYTES = 250
_CALL_AT = _NUMBER.size
_TASK_AT = _CALL_AT + _TEXT_BYTES + 1
_SIZE = _TASK_AT + _TEXT_BYTES + 1


class Flight(NamedTuple):
    """Where a rank was."""

    number: int  # number of the call
    call: str  # the call's name
    task: str  # the task's name; "" between tasks

    def __str__(self) -> str:
        return f"in call {self.number} ({self.call})" + (
            f", task {self.task!r}" if self.task else ""
        )


class FlightRecord:
    """This process's flight record; see the module. Raises OSError where the file cannot be made.

    No method blocks.
    """

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            # Allocates the whole file. On a full disk a file with holes could be made, too, but
            # writing to the holes would kill the process.
            os.posix_fallocate(file.fileno(), 0, _SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)

    def enter(self, number: int, call: str) -> None:
        """Writes that the rank enters a call."""
        self._map[_TASK_AT] = 0
        text = call.encode()[:_TEXT_BYTES] + b"\0"
        self._map[: _CALL_AT + len(text)] = _NUMBER.pack(number) + text

    def task(self, name: str) -> None:
        """Writes that the rank does this task of its call, or waits for the task."""
        text = name.encode()[:_TEXT_BYTES] + b"\0"
        self._map[_TASK_AT : _TASK_AT + len(text)] = text

    def leave(self) -> None:
        """Writes that the rank is in no call."""
        _NUMBER.pack_into(self._map, 0, 0)


@cache
def own_flight() -> FlightRecord | None:
    """The flight record of this process; None outside a job of `burst-rt run`."""
    folder, rank = job_folder(), launched.rank()
    if folder is not None and rank is not None:
        with suppress(OSError):
            return FlightRecord(_path(folder, rank))
    return None


def read_flight(folder: Path, rank: int) -> Flight | None:
    """The last place of a rank in its program; None where the rank was in no call, or has written
    nothing.
    """
    try:
        written = _path(folder, rank).read_bytes()
    except OSError:
        return None
    if len(written) < _SIZE:
        return None
    (number,) = _NUMBER.unpack_from(written)
    call, task = (written[at:].partition(b"\0")[0] for at in (_CALL_AT, _TASK_AT))
    return (
        Flight(number, call.decode(errors="replace"), task.decode(errors="replace"))
        if number
        else None
    )


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.flight"
