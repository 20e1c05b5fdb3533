"""Reads flight records: what each rank of a job did last, by one clock.

A record may be read while its rank writes, after the rank's death, and with any part of its files
missing: tasks whose names are gone are told as unknown. No function blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from burst_rt.job.flight import (
    CALL_ENTRY,
    CLOSED_AT,
    ENTRIES_AT,
    ENTRY,
    ISSUED_ENTRY,
    MESSAGE_ENTRY,
    NAME_BITS,
    SIZE,
    TASK_ENTRY,
    flight_path,
    names_path,
)

__all__ = ["CallPlace", "Entry", "Flight", "OpenMessage", "TaskRow", "read_flight", "read_flights"]


class TaskRow(NamedTuple):
    """A task as the file of names has it. recvs, sends: (peer, bytes) of each message."""

    name: str
    hop: int | None
    recvs: tuple[tuple[int, int], ...]
    sends: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        hop = "" if self.hop is None else f" (hop {self.hop})"
        return f"task {self.name!r}{hop}" if self.name else "a task whose name is not kept"


_UNKNOWN = TaskRow("", None, (), ())


class Entry(NamedTuple):
    """An entry of a record. kind: `CALL_ENTRY` and so on, which say what the times mean.

    graph: of a call without one, the number of its name.
    """

    begun_s: float
    call: int
    graph: int
    task: int
    kind: int
    asked_s: float
    ended_s: float

    @property
    def at_s(self) -> float:
        """When it was last written to."""
        return max(self.begun_s, self.ended_s)


class CallPlace(NamedTuple):
    """A call that a rank is in."""

    number: int
    name: str
    entered_s: float

    def __str__(self) -> str:
        return f"call {self.number} ({self.name})"


class OpenMessage(NamedTuple):
    """A message that has been posted and has not ended."""

    task: TaskRow
    peer: int
    size_bytes: int
    is_recv: bool
    posted_s: float

    def __str__(self) -> str:
        way = "from" if self.is_recv else "to"
        return f"a message of {self.size_bytes:,} bytes {way} rank {self.peer} in {self.task}"


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A rank's flight record. All times are the rank's clock's; `wall` makes them seconds since the
    epoch.

    closed: whether the rank has left all its groups, and had not failed.
    """

    rank: int
    size: int
    pid: int
    host: str
    where: str  # `whereabouts()`: the same for processes that share a clock and process ids
    wall_s: float
    clock_s: float
    program: str
    closed: bool
    entries: list[Entry]  # in the order of their beginnings
    calls: dict[int, str]  # names of calls by number of their graph or name
    graphs: dict[int, list[TaskRow]]

    def wall(self, at_s: float) -> float:
        """A time of this rank's clock in seconds since the epoch."""
        return self.wall_s + at_s - self.clock_s

    def row(self, entry: Entry) -> TaskRow:
        """The task that an entry is about."""
        rows = self.graphs.get(entry.graph, [])
        return rows[entry.task] if 0 <= entry.task < len(rows) else _UNKNOWN

    @cached_property
    def last_s(self) -> float:
        """The last sign of this rank."""
        return max((entry.at_s for entry in self.entries), default=self.clock_s)

    @cached_property
    def _last(self) -> Entry | None:
        """The entry that was begun last, where it is of a call that goes on."""
        newest = max(self.entries, key=lambda entry: (entry.at_s, entry.begun_s), default=None)
        left = newest is None or (newest.kind == CALL_ENTRY and newest.ended_s)
        return None if left else newest

    @cached_property
    def in_call(self) -> list[Entry]:
        """The entries of the call that the rank is in."""
        last = self._last
        ended_s = max((x.ended_s for x in self.entries if x.kind == CALL_ENTRY), default=0.0)
        return [x for x in self.entries if last and x.call == last.call and x.begun_s >= ended_s]

    @cached_property
    def call(self) -> CallPlace | None:
        """The call that the rank is in; None where it is in none."""
        if self._last is None:
            return None
        name = self.calls.get(self._last.graph, "its name is not kept")
        return CallPlace(self._last.call, name, min(entry.begun_s for entry in self.in_call))

    @cached_property
    def last_call(self) -> int:
        """Number of the call that the rank has entered last; 0: none."""
        newest = max(self.entries, key=lambda entry: (entry.at_s, entry.begun_s), default=None)
        return 0 if newest is None else newest.call

    @cached_property
    def agreed(self) -> bool:
        """Whether the ranks have agreed on the call that this rank is in, as far as it is known."""
        return any(
            entry.kind == ISSUED_ENTRY
            or (entry.kind == CALL_ENTRY and entry.asked_s > 0)
            or self._is_exchange(entry)
            for entry in self.in_call
        )

    def _is_exchange(self, entry: Entry) -> bool:
        row = self.row(entry)
        return entry.kind == TASK_ENTRY and bool(row.recvs or row.sends)

    @cached_property
    def doing(self) -> TaskRow | None:
        """The task that the rank is in the middle of; None where it waits, or is between tasks."""
        rows = (
            self.row(entry)
            for entry in reversed(self.in_call)
            if entry.kind == TASK_ENTRY and not entry.ended_s and not self._is_exchange(entry)
        )
        return next(rows, None)

    @cached_property
    def issued(self) -> TaskRow | None:
        """The last task that is on a device's stream; None on a host, and before the first."""
        issued = (x for x in reversed(self.in_call) if x.kind == ISSUED_ENTRY)
        return next((self.row(entry) for entry in issued), None)

    @cached_property
    def under_way(self) -> list[OpenMessage]:
        """The messages that the rank waits for, in the order of their exchanges."""
        told = [entry for entry in self.in_call if entry.kind == MESSAGE_ENTRY]
        told_s = max((entry.begun_s for entry in told), default=0.0)
        still = {(entry.task, int(entry.asked_s)) for entry in told if entry.begun_s == told_s}
        exchanges = [x for x in self.in_call if self._is_exchange(x) and not x.ended_s]
        return [
            OpenMessage(row, peer, size_bytes, number < len(row.recvs), entry.begun_s)
            for entry in sorted(exchanges, key=lambda entry: entry.task)
            for row in [self.row(entry)]
            for number, (peer, size_bytes) in enumerate((*row.recvs, *row.sends))
            if entry.begun_s > told_s or (entry.task, number) in still
        ]

    @property
    def place(self) -> str:
        """The rank's last place, in words: its call, and its task or what it waited for."""
        if self.call is None:
            return "in no call"
        where = f"in {self.call}"
        if self.doing is not None:
            return f"{where}, {self.doing}"
        if self.under_way:
            return f"{where}, waiting for {self.under_way[0]}"
        if self.issued is not None:
            return f"{where}, whose tasks up to {self.issued} are on the device"
        return where if self.agreed else f"{where}, waiting for all ranks to enter it"


def read_flight(folder: Path, rank: int) -> Flight | None:
    """A rank's flight record; None where there is none that can be read."""
    try:
        written = flight_path(folder, rank).read_bytes()
        about = json.loads(written[:CLOSED_AT].rstrip(b"\0"))
    except (OSError, ValueError):
        return None
    if len(written) < SIZE:
        return None
    calls, graphs = _read_names(folder, rank)
    entries = sorted(_entries(written), key=lambda entry: entry.begun_s)
    closed = bool(written[CLOSED_AT])
    return Flight(**about, closed=closed, entries=entries, calls=calls, graphs=graphs)


def read_flights(folder: Path) -> dict[int, Flight]:
    """All flight records of a job's folder that can be read, by rank; none of one that is gone."""
    paths: list[Path] = []
    with suppress(FileNotFoundError):  # the last rank of a job that ends well deletes its folder
        paths = list(folder.glob("rank-*.flight"))
    names = (path.stem.removeprefix("rank-") for path in paths)
    flights = [read_flight(folder, rank) for rank in sorted(int(x) for x in names if x.isdigit())]
    return {flight.rank: flight for flight in flights if flight is not None}


def _entries(written: bytes) -> Iterator[Entry]:
    for begun_s, where, what, *times in ENTRY.iter_unpack(written[ENTRIES_AT:SIZE]):
        # Others have never been written, or half.
        if begun_s:
            call, graph = where >> NAME_BITS, where & 2**NAME_BITS - 1
            yield Entry(begun_s, call, graph, what >> 3, what & 7, *times)


def _read_names(folder: Path, rank: int) -> tuple[dict[int, str], dict[int, list[TaskRow]]]:
    calls: dict[int, str] = {}
    graphs: dict[int, list[TaskRow]] = {}
    for before in (True, False):
        lines: list[bytes] = []
        with suppress(OSError):
            lines = names_path(folder, rank, before=before).read_bytes().splitlines()
        for line in lines:
            # A full disk may have cut a line.
            with suppress(ValueError):
                row: dict[str, Any] = json.loads(line)
                calls[row["number"]] = row["call"]
                graphs[row["number"]] = [_task_row(*task) for task in row.get("tasks", ())]
    return calls, graphs


def _task_row(
    name: str, hop: int | None, recvs: list[list[int]], sends: list[list[int]]
) -> TaskRow:
    pairs = [tuple((peer, size) for peer, size in messages) for messages in (recvs, sends)]
    return TaskRow(name, hop, *pairs)
