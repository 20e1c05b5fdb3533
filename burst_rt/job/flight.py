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

# The number of the call (0: in no call), the length of the call's text and of the task's text. The
# two texts follow.
_HEAD = struct.Struct("<qHH")
_TEXT_BYTES = 250
_SIZE = _HEAD.size + 2 * _TEXT_BYTES


class Flight(NamedTuple):
    """Where a rank was."""

    number: int  # of the call
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
        self._number = 0
        self._call = b""

    def enter(self, number: int, call: str) -> None:
        """Writes that the rank enters a call."""
        self._number, self._call = number, call.encode()[:_TEXT_BYTES]
        self.task("")

    def task(self, name: str) -> None:
        """Writes that the rank does this task of its call, or waits for the task."""
        call, task = self._call, name.encode()[:_TEXT_BYTES]
        self._map[: _HEAD.size + len(call) + len(task)] = (
            _HEAD.pack(self._number, len(call), len(task)) + call + task
        )

    def leave(self) -> None:
        """Writes that the rank is in no call."""
        _HEAD.pack_into(self._map, 0, 0, 0, 0)


@cache
def own_flight() -> FlightRecord | None:
    """The flight record of this process; None outside a job of `burst-rt run`."""
    folder, rank = job_folder(), launched.rank()
    if folder is not None and rank is not None:
        with suppress(OSError):
            return FlightRecord(_path(folder, rank))
    return None


def read_flight(folder: Path, rank: int) -> Flight | None:
    """Where a rank was; None where the rank was in no call, or has written nothing."""
    try:
        written = _path(folder, rank).read_bytes()
    except OSError:
        return None
    if len(written) < _SIZE:
        return None
    number, call, task = _HEAD.unpack_from(written)
    texts = written[_HEAD.size :]
    return (
        Flight(
            number,
            texts[:call].decode(errors="replace"),
            texts[call : call + task].decode(errors="replace"),
        )
        if number
        else None
    )


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.flight"
