"""A rank's flight record: the call and the task that it is in, where the launcher finds them when
the process is gone.

A small file in the job's folder, mapped into memory: what is written survives the process, however
it ends. Writing takes about a microsecond. There is a record only under `burst-rt run`, on the
launcher's own host, and one for a process: of several contexts the last writer's call stands in it.
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

# Number of the call (0: in none), then lengths and texts of what it is and of its task.
_HEAD = struct.Struct("<qHH")
_TEXT_BYTES = 250
_SIZE = _HEAD.size + 2 * _TEXT_BYTES


class Flight(NamedTuple):
    """Where a rank was: the number of its call, what call it is, and the name of its task (""
    between tasks).
    """

    number: int
    call: str
    task: str

    def __str__(self) -> str:
        return f"in call {self.number} ({self.call})" + (
            f", task {self.task!r}" if self.task else ""
        )


class FlightRecord:
    """This process's record. See the module."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            # All of it: on a full disk a file with holes is made all the same, and writing to it
            # kills the process.
            os.posix_fallocate(file.fileno(), 0, _SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._number = 0
        self._call = b""

    def enter(self, number: int, call: str) -> None:
        """The rank enters a call."""
        self._number, self._call = number, call.encode()[:_TEXT_BYTES]
        self.task("")

    def task(self, name: str) -> None:
        """The rank does this task of its call, or waits for it."""
        call, task = self._call, name.encode()[:_TEXT_BYTES]
        self._map[: _HEAD.size + len(call) + len(task)] = (
            _HEAD.pack(self._number, len(call), len(task)) + call + task
        )

    def leave(self) -> None:
        """The rank is out of the call."""
        _HEAD.pack_into(self._map, 0, 0, 0, 0)


@cache
def own_flight() -> FlightRecord | None:
    """The record of this process; None outside a job of `burst-rt run`."""
    folder, rank = job_folder(), launched.rank()
    if folder is not None and rank is not None:
        with suppress(OSError):
            return FlightRecord(_path(folder, rank))
    return None


def read_flight(folder: Path, rank: int) -> Flight | None:
    """Where a rank was; None where it was in no call, or has written nothing."""
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
