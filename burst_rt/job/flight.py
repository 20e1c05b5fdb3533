"""A rank's flight record: its last 4,096 steps, readable however its process ends.

The record is a file in the job's folder, mapped into memory: what is written survives the process.
An entry is written when something begins, and its end is added when it ends. That is numbers alone,
because names would take longer than what they name: the names are in a second file, to which the
tasks of a graph are added when a process runs it first. Both files are bounded. A process has one
record, which its contexts share. `flights` reads it.

Times are those of `time.perf_counter`, on Linux the clock CLOCK_MONOTONIC, which all processes of a
host share. The header has it once beside the wall clock, so that hosts can be compared.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from burst_rt.job.reports import whereabouts

__all__ = [
    "CALL_ENTRY", "CLOSED_AT", "ENTRIES_AT", "ENTRY", "ISSUED_ENTRY", "MESSAGE_ENTRY",
    "NAME_BITS", "NUM_ENTRIES", "SIZE", "TASK_ENTRY", "FlightRecord", "flight_path", "names_path",
]  # fmt: skip

# The kinds of entries.
#
# A call. Written when it has ended; while it goes on, where a wait in it takes long, where it
# fails, and where it has no graph. Asked for: when the ranks agreed on it; 0: they have not.
CALL_ENTRY = 1
# A task of the call. An exchange begins when it is issued.
TASK_ENTRY = 2
# A message of an exchange that is still under way, by its place there (receives first), which is in
# the place of when it was asked for. Written whenever a wait finds others under way than before.
# Never ends.
MESSAGE_ENTRY = 3
# A task up to which all are on a device's streams, whose times the host lacks.
ISSUED_ENTRY = 4

NUM_ENTRIES = 4096
# When it began (0: the entry is being written), the number of the call and below it that of the
# graph or the call's name, the task and below it the kind (3 bits), when it was asked for, when it
# ended (0: it has not).
ENTRY = struct.Struct("=dqqdd")
NAME_BITS = 32
CLOSED_AT = 2048  # a word that is 1 once the rank has left all its groups; JSON is before it
ENTRIES_AT = CLOSED_AT + 8
SIZE = ENTRIES_AT + NUM_ENTRIES * ENTRY.size
_FIRST, _LAST = ENTRIES_AT // 8, (SIZE - ENTRY.size) // 8
# Numbers of names begin here, and numbers of graphs end here.
_NAMES_FROM = 2**31
# The file of names is begun anew at either limit, and the one before is kept.
_MAX_NAMES_BYTES = 2**21
_MAX_GRAPHS = 128
_MAX_ARGUMENTS = 300  # characters of the program's command line


class FlightRecord:
    """This process's flight record; see the module. Raises OSError where the file cannot be made.

    rank, size: the rank's number in the job, and how many ranks the job has. No method blocks.
    """

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder = folder
        self.rank = rank
        header = {
            "rank": rank, "size": size, "pid": os.getpid(), "host": socket.gethostname(),
            "where": whereabouts(), "wall_s": time.time(), "clock_s": time.perf_counter(),
        }  # fmt: skip
        program = " ".join(sys.argv)[:_MAX_ARGUMENTS]
        while len(text := _encoded(header | {"program": program})) > CLOSED_AT:
            program = program[: len(program) // 2]
        with flight_path(folder, rank).open("w+b") as file:
            # Allocates the whole file. On a full disk a file with holes could be made, too, but
            # writing to the holes would kill the process.
            os.posix_fallocate(file.fileno(), 0, SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        # Writes all of it, because the first write to a page takes 0.1 ms.
        self._map[:] = text.ljust(SIZE, b"\0")
        # Eight bytes are written at a time, which takes half as long as `struct` does where its
        # code is not in the processor's cache; so it is in the middle of a program.
        self.times, self._words = memoryview(self._map).cast("d"), memoryview(self._map).cast("q")
        self._at = _FIRST
        self._names_bytes = 0
        self._graphs: set[int] = set()
        self._calls: dict[str, int] = {}
        self._where = 0  # the present call and its graph; 0: in no call
        self._entered_s = self.agreed_s = 0.0

    def enter(self, number: int, call: str, now_s: float, graph: Any = None) -> None:
        """Says what the next entries belong to. Writes the names of the call's tasks at first.

        graph: a `Graph` of the scheduler, which is above this floor. None: the call has none, and
        an entry is added for it at once.
        """
        self._entered_s, self.agreed_s = now_s, 0.0
        if graph is None:
            name = self._calls.get(call) or self._add_call(call)
            self._where = number << NAME_BITS | name
            self.note_call()
            return
        if graph.number not in self._graphs:
            self._add_graph(call, graph)
        self._where = number << NAME_BITS | graph.number

    def leave(self) -> None:
        """Adds the entry of the present call, if there is one, with its end."""
        if self._where:
            self.add(CALL_ENTRY, self.agreed_s, self._entered_s, time.perf_counter())
            self._where = 0

    def note_call(self) -> None:
        """Adds an entry for the present call, if there is one, which goes on."""
        if self._where:
            self.add(CALL_ENTRY, self.agreed_s, self._entered_s)

    def add(self, what: int, asked_s: float, begun_s: float, ended_s: float = 0.0) -> int:
        """Adds an entry to the present call; returns the place of its end in `times`.

        what: the kind, and 8 times the task's number.
        """
        times, words, at = self.times, self._words, self._at
        self._at = at + 5 if at < _LAST else _FIRST
        times[at] = 0.0
        words[at + 1] = self._where
        words[at + 2] = what
        times[at + 3] = asked_s
        times[at + 4] = ended_s
        times[at] = begun_s
        return at + 4

    def take_back(self, end: int) -> None:
        """Removes an entry. end: the place of its end in `times`."""
        at = end - 4
        self.times[at] = 0.0
        if self._at == (at + 5 if at < _LAST else _FIRST):  # it is the last one
            self._at = at

    def close(self, *, closed: bool) -> None:
        """Notes whether the rank has left all its groups, and none of them failed."""
        self._map[CLOSED_AT] = closed

    def _add_call(self, call: str) -> int:
        name = _NAMES_FROM + len(self._calls)
        self._write({"number": name, "call": call})
        self._calls[call] = name
        return name

    def _add_graph(self, call: str, graph: Any) -> None:
        rows = [
            (
                task.name, task.hop,
                [(m.peer, m.size_bytes) for m in task.recvs],
                [(m.peer, m.size_bytes) for m in task.sends],
            )
            for task in graph.tasks
        ]  # fmt: skip
        self._write({"number": graph.number, "call": call, "tasks": rows})
        self._graphs.add(graph.number)

    def _write(self, row: dict[str, Any]) -> None:
        """Adds a line to the file of names. What a full disk does not take is missing."""
        line = json.dumps(row).encode()
        if len(line) > _MAX_NAMES_BYTES // 2:
            return
        path, lines = names_path(self.folder, self.rank), [line]
        with suppress(OSError):
            if self._names_bytes + len(line) > _MAX_NAMES_BYTES or len(self._graphs) >= _MAX_GRAPHS:
                os.replace(path, names_path(self.folder, self.rank, before=True))
                self._names_bytes = 0
                self._graphs.clear()
                calls = ({"number": name, "call": call} for call, name in self._calls.items())
                lines += [json.dumps(each).encode() for each in calls]
            # Each line has its end before it, too: one that a full disk has cut spoils no other.
            text = b"".join(b"\n%b\n" % each for each in lines)
            with path.open("ab", buffering=0) as file:
                file.write(text)
            self._names_bytes += len(text)


def _encoded(header: dict[str, Any]) -> bytes:
    """The first words of a record. Arguments of other encodings than UTF-8 get question marks."""
    return json.dumps(header, ensure_ascii=False).encode(errors="replace")


def flight_path(folder: Path, rank: int) -> Path:
    """The path of a rank's flight record in its job's folder."""
    return folder / f"rank-{rank}.flight"


def names_path(folder: Path, rank: int, *, before: bool = False) -> Path:
    """The path of the names that a flight record needs; of the older ones before these."""
    return folder / f"rank-{rank}.names{'-before' * before}"
