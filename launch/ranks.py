"""The processes of a job's ranks on this host: which have ended, and in which order.

This is the launcher's view. Ranks are mpirun's children, not the launcher's. Each rank reports its
process id when it starts, and the kernel reports the end of that process at once, through a file
descriptor (pidfd, Linux 5.3). MPICH's mpirun kills the other ranks before that: it sees that the
rank's files are closed. So each rank holds a pipe of the launcher's open, whose end tells when.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from burst_rt.errors import Stalled
from burst_rt.job.processes import open_process, signal_process
from burst_rt.job.reports import (
    RankReport,
    RankWait,
    pipe_path,
    read_reports,
    read_started,
    read_waiting,
    whereabouts,
    write_report,
)

__all__ = ["Ranks"]

# Seconds for which a stopped rank may be the only one that has not come to its end.
_STOPPED_S = 30.0


class Ranks:
    """The ranks that have started on this host. A context manager."""

    def __init__(self, job_dir: Path, num_ranks: int) -> None:
        # By rank: when its process was seen to have ended, in seconds since the epoch.
        self.ended_at_s: dict[int, float] = {}
        # Other hosts may not see the job's folder, so only these ranks are sure to report.
        self.started_here: set[int] = set()
        self._job_dir = job_dir
        self._num_ranks = num_ranks
        self._seen: set[int] = set()
        self._where = whereabouts()
        self._ranks: dict[int, int] = {}  # by the descriptor of the rank's process
        self._closed_at_s: dict[int, float] = {}  # by rank: when its pipe was seen to be closed
        self._pids: dict[int, int] = {}  # by rank
        self._stopped_since_s: float | None = None
        self._poller = select.poll()
        self._pipes: dict[int, int] = {}  # ranks by the descriptor of their pipe
        for rank in range(num_ranks):
            # A rank without a pipe is seen to end by its process alone: where this process may open
            # no more files, or the folder takes no pipes.
            with suppress(OSError):
                os.mkfifo(pipe_path(job_dir, rank), 0o600)
                pipe = os.open(pipe_path(job_dir, rank), os.O_RDONLY | os.O_NONBLOCK)
                self._pipes[pipe] = rank
                self._poller.register(pipe, select.POLLHUP)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in (*self._ranks, *self._pipes):
            os.close(descriptor)

    def wait(self, timeout_s: float) -> None:
        """Blocks until a rank has ended, at most `timeout_s`."""
        if len(self._seen) < self._num_ranks:
            self._look_for_more()
        ready = [descriptor for descriptor, _ in self._poller.poll(timeout_s * 1e3)]
        now_s = time.time()
        for descriptor in ready:
            self._poller.unregister(descriptor)
            os.close(descriptor)
        for descriptor in ready:
            if descriptor in self._pipes:
                self._closed_at_s[self._pipes.pop(descriptor)] = now_s
        for descriptor in ready:
            if descriptor in self._ranks:
                rank = self._ranks.pop(descriptor)
                self.ended_at_s[rank] = self._closed_at_s.get(rank, now_s)

    def settle(self) -> None:
        """Takes up the ranks that ended together with mpirun. Does not block."""
        self.wait(0.0)
        # A process may take longer to go than mpirun.
        self.ended_at_s = self._closed_at_s | self.ended_at_s

    def stuck(self) -> tuple[RankWait, int] | None:
        """A rank that waits to join ranks of which one has ended; None where there is none.

        Returns the wait, and the awaited rank that ended first. Does not block.
        """
        ended = {
            report.rank: report.ended_at_s for report in read_reports(self._job_dir)
        } | self.ended_at_s
        for waiting in read_waiting(self._job_dir):
            until_s = ended.get(waiting.rank, math.inf)
            gone = [rank for rank in waiting.ranks if ended.get(rank, math.inf) < until_s]
            if gone:
                return waiting, min(gone, key=lambda rank: ended[rank])
        return None

    def report_stopped(self) -> None:
        """Reports a failure for a rank that has been stopped for 30 s, where no other rank is left.

        A rank that a signal stops (SIGSTOP) in a call is missed by the other ranks. Nobody misses
        one that has left its context: the others are at their ends. Does not block.
        """
        ended = {report.rank for report in read_reports(self._job_dir)} | self.ended_at_s.keys()
        alive = set(self._ranks.values())
        stopped = [rank for rank in sorted(alive) if ended and _is_stopped(self._pids[rank])]
        if not stopped or alive - ended - set(stopped):
            self._stopped_since_s = None
            return
        now_s = time.monotonic()
        self._stopped_since_s = self._stopped_since_s or now_s
        if now_s - self._stopped_since_s > _STOPPED_S:
            text = (
                f"burst_rt.errors.Stalled: rank {stopped[0]}: process {self._pids[stopped[0]]} has "
                f"been stopped by a signal (SIGSTOP, say) for {_STOPPED_S:g} s, and the other "
                "ranks have come to their ends; SIGCONT would have let it go on\n"
            )
            code = Stalled.exit_code
            report = RankReport(stopped[0], time.time(), code, kind="Stalled", traceback=text)
            write_report(self._job_dir, report)

    def first_silent(self, reported: Collection[int]) -> list[int]:
        """The rank that ended first without a report; several ranks where they ended at once."""
        silent = {rank: at_s for rank, at_s in self.ended_at_s.items() if rank not in reported}
        return [rank for rank, at_s in silent.items() if at_s == min(silent.values())]

    def kill(self) -> None:
        """Kills the ranks that still run, once mpirun, which would have ended them, is gone."""
        self._look_for_more()
        for descriptor in self._ranks:
            with suppress(ProcessLookupError):
                signal_process(descriptor, signal.SIGKILL)

    def _look_for_more(self) -> None:
        for rank, pid, where in read_started(self._job_dir):
            if rank in self._seen:
                continue
            self._seen.add(rank)
            if where != self._where:
                continue  # on another host that has the job's folder too
            self.started_here.add(rank)
            try:
                descriptor = open_process(pid)
            except ProcessLookupError:
                self.ended_at_s[rank] = self._closed_at_s.get(rank, time.time())
            except OSError:
                continue  # a kernel without pidfd
            else:
                self._ranks[descriptor], self._pids[rank] = rank, pid
                self._poller.register(descriptor, select.POLLIN)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; one that a debugger holds is not."""
    with suppress(OSError):
        # The state follows the name, which may have any characters.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False
