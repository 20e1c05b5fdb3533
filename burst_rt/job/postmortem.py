"""The post-mortem of a job that failed: who stopped first, where, and who waited for whom.

`burst-rt postmortem` prints it, and the dashboard shows it. It joins the traces in the job's
folder: the ranks' flight records, by one clock, the reports of their ends, the stacks of crashes,
and what `burst-rt run` has seen, if that was the launcher. Ranks of other hosts are in the folder
of the same name there.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import psutil

from burst_rt.job.flights import Flight, read_flights
from burst_rt.job.reports import (
    RankReport,
    crash_path,
    primary_failure,
    read_reports,
    read_resume,
    stderr_path,
    whereabouts,
)

__all__ = ["ChainLink", "LauncherNote", "PostMortem", "leave_note"]

_NUM_STDERR_LINES = 15
_LAUNCHED = "launched.json"


class LauncherNote(NamedTuple):
    """What `burst-rt run` leaves in the folder of a job that has failed."""

    program: list[str]
    num_ranks: int
    last_line: str  # the last line that it printed, about the rank that failed first

    @property
    def said(self) -> tuple[int, str] | None:
        """The rank that the last line names, and how it ended, in words; None: it names none."""
        line = re.match(r"burst-rt: rank (\d+) (.*?)( after \d.*|, in call .*)?$", self.last_line)
        return (int(line[1]), line[2]) if line else None


def leave_note(folder: Path, launched: LauncherNote) -> None:
    """Leaves what the launcher knows in the job's folder; on a full disk, nothing."""
    with suppress(OSError):
        (folder / _LAUNCHED).write_text(json.dumps(launched._asdict()), encoding="utf-8")


class ChainLink(NamedTuple):
    """A rank that could not go on without another one."""

    rank: int
    peer: int
    words: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.words}"


@dataclass(frozen=True)
class PostMortem:
    """A job that has ended, as its folder tells it. Reads nothing before it is asked."""

    folder: Path

    @cached_property
    def flights(self) -> dict[int, Flight]:
        """The flight records, by rank."""
        return read_flights(self.folder)

    @cached_property
    def reports(self) -> dict[int, RankReport]:
        """What ranks have said about their ends, by rank, the earliest first."""
        return {report.rank: report for report in read_reports(self.folder)}

    @cached_property
    def launched(self) -> LauncherNote | None:
        """What `burst-rt run` has left; None under another launcher, or where it was killed."""
        with suppress(OSError, ValueError):
            return LauncherNote(**json.loads((self.folder / _LAUNCHED).read_text(encoding="utf-8")))
        return None

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of the job, as far as they are known."""
        sizes = (flight.size for flight in self.flights.values())
        return self.launched.num_ranks if self.launched else max(sizes, default=0)

    def _waits_of(self, rank: int) -> list[ChainLink]:
        flight, report = self.flights[rank], self.reports.get(rank)
        waits: list[ChainLink] = []
        if flight.call is not None and flight.doing is None:
            waits = [
                ChainLink(rank, message.peer, f"waited for rank {message.peer}: {message}")
                for message in flight.under_way
            ]
            behind = (x.rank for x in self.flights.values() if x.last_call < flight.call.number)
            waits += [
                ChainLink(rank, peer, f"waited for rank {peer} to enter {flight.call}")
                for peer in behind
                if not flight.agreed
            ]
        if not waits and report is not None and report.secondary and report.peer is not None:
            waits = [ChainLink(rank, report.peer, f"had lost rank {report.peer}")]
        return waits

    @cached_property
    def waits(self) -> dict[int, ChainLink]:
        """Each waiting rank's wait: for the rank among those it waits for that stopped first."""

        def last_s(wait: ChainLink) -> float:
            peer = self.flights.get(wait.peer)
            return 0.0 if peer is None else peer.wall(peer.last_s)

        waits = {rank: self._waits_of(rank) for rank in self.flights}
        return {rank: min(several, key=last_s) for rank, several in waits.items() if several}

    @cached_property
    def chain(self) -> list[ChainLink]:
        """The longest chain of ranks that each waited for the next one. Where it is a circle, the
        last wait is for the first rank.
        """

        def chain_from(rank: int) -> list[ChainLink]:
            links: list[ChainLink] = []
            while rank in self.waits and rank not in {wait.rank for wait in links}:
                links.append(self.waits[rank])
                rank = links[-1].peer
            return links

        return max(map(chain_from, self.waits), key=len, default=[])

    @cached_property
    def head(self) -> int | None:
        """The rank at the head of the chain; None where there is none, or a circle."""
        head = self.chain[-1].peer if self.chain else None
        return None if head in self.waits else head

    @cached_property
    def first(self) -> int | None:
        """The rank that stopped first; None where nothing says it."""
        failure = primary_failure(list(self.reports.values()))
        launcher = self.launched.said[0] if self.launched and self.launched.said else None
        if failure is not None and not failure.secondary:
            # The launcher knows when processes ended, and so which error was only a consequence.
            return failure.rank if launcher is None else launcher
        crashed = [rank for rank in range(self.num_ranks) if self._crash(rank)]
        peer = failure.peer if failure is not None else None
        known = (*crashed[:1], self.head, launcher, peer)
        return next((rank for rank in known if rank is not None), None)

    def _crash(self, rank: int) -> str:
        try:
            return crash_path(self.folder, rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def place(self, rank: int) -> str:
        """The rank's last place, and when it was last written to, in words."""
        flight = self.flights.get(rank)
        if flight is None:
            return "no flight record of it is here"
        at_s = flight.wall(flight.last_s)
        when = f"{time.strftime('%H:%M:%S', time.localtime(at_s))}.{int(at_s % 1 * 1e3):03}"
        return f"{flight.place}; last sign at {when} on {flight.host}"

    def _state(self, flight: Flight) -> str:
        """The state of a rank's process that is still there; "" for one that is gone."""
        if flight.where != whereabouts():
            return ""
        try:
            process = psutil.Process(flight.pid)
            # Another process may have the number by now.
            ours = process.create_time() < flight.wall_s + 1
            return process.status() if ours and process.status() != psutil.STATUS_ZOMBIE else ""
        except psutil.Error:
            return ""

    def how(self, rank: int) -> tuple[str, str]:
        """How the rank ended, and what to do next, in words."""
        report, flight = self.reports.get(rank), self.flights.get(rank)
        crash, state = self._crash(rank), "" if flight is None else self._state(flight)
        launched = self.launched
        if crash:
            number = next(
                (x for x in signal.Signals if f": {signal.strsignal(x)}\n" in crash), None
            )
            how = f"signal {number}, {number.name}" if number else "a signal"
            return (
                f"crashed in native code ({how})",
                f"the Python stack of the crash is in {crash_path(self.folder, rank)}",
            )
        if report is not None and report.failed:
            what = report.headline or "sys.exit"
            where = "; its traceback is in the post-mortem" if report.traceback else ""
            return f"failed with {what} (exit code {report.exit_code})", f"mend this error{where}"
        if report is not None or (flight is not None and flight.closed):
            return (
                "left with exit code 0 while other ranks went on",
                f"see why the program of rank {rank} ended: every rank must make the same calls",
            )
        if state and flight is not None:
            return (
                f"still there: process {flight.pid} is {state}",
                f"see where it is: py-spy dump --pid {flight.pid}; if it is stopped, kill -CONT "
                f"{flight.pid}; then end it: kill -KILL {flight.pid}",
            )
        if launched is not None and launched.said is not None and launched.said[0] == rank:
            killed = [advice for name, advice in _WHO_KILLS.items() if name in launched.said[1]]
            if killed:
                return launched.said[1], killed[0]
        if self._reported_stall(rank):
            return (
                "gave no sign, and no word of its end: it was stopped, stuck, or killed",
                "see where it is next time: py-spy dump --pid PID before the deadline; is the host "
                "frozen, or swapping?",
            )
        return "gave no word of its end: it was killed by a signal, or left by os._exit", _LOOK

    def _reported_stall(self, rank: int) -> bool:
        return any(x.kind == "Stalled" and x.peer == rank for x in self.reports.values())

    def _stderr(self, rank: int) -> Iterator[str]:
        path = stderr_path(self.folder, rank)
        if not path.exists():
            yield f"the stderr of rank {rank} was not kept: its launcher has printed it"
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        yield f"the last lines that rank {rank} wrote to stderr" + (":" if lines else ": none")
        yield from (f"  | {line}" for line in lines[-_NUM_STDERR_LINES:])

    def heading(self) -> Iterator[str]:
        """Who stopped first, and the chain of waits, in lines."""
        if self.first is not None:
            how, _ = self.how(self.first)
            yield f"first to stop: rank {self.first}, {how}; {self.place(self.first)}"
        else:
            yield "nothing here says which rank stopped first"
        yield from map(str, self.chain)
        if self.chain and self.head is None:
            yield "so they waited in a circle"

    def lines(self) -> Iterator[str]:
        """The whole post-mortem, in lines."""
        programs = [flight.program for flight in self.flights.values()]
        program = " ".join(self.launched.program) if self.launched else next(iter(programs), "?")
        yield f"job {self.folder.name}: {program} on {self.num_ranks} ranks"
        yield from self.heading()
        yield ""
        yield from (f"rank {rank}: {self._end(rank)}" for rank in range(self.num_ranks))
        if self.launched is not None:
            yield f"burst-rt run said: {self.launched.last_line.removeprefix('burst-rt: ')}"
        if self.first is not None:
            yield ""
            if self.first in self.reports and self.reports[self.first].traceback:
                yield from self.reports[self.first].traceback.rstrip().splitlines()
            yield from self._stderr(self.first)
        yield from self.advice()

    def advice(self) -> Iterator[str]:
        """What to do next, in lines."""
        if self.first is not None:
            yield f"what to do next: {self.how(self.first)[1]}"
        resume = read_resume(self.folder)
        if resume:
            yield f"resume with: {resume}"

    def _end(self, rank: int) -> str:
        how, what_next = self.how(rank)
        if what_next == _LOOK and rank != self.first:
            how = "gave no word of its end: launchers end the other ranks after the first"
        return f"{self.place(rank)}; {how}"


_LOOK = "look at its launcher's output, the batch system's log and dmesg of its host"
_WHO_KILLS = {
    "SIGKILL": (
        "SIGKILL comes from outside: for lack of memory (dmesg | grep -i oom; memory.events of its "
        "cgroup), from a batch system at a limit, or by hand"
    ),
    "SIGTERM": "SIGTERM comes from outside: from a batch system at a limit, or by hand",
}
