"""The clock by which ranks count how long they have waited. Standard library only."""

from __future__ import annotations

import time

__all__ = ["RunningClock"]

# A process that does not read its clock for longer was stopped meanwhile, or starved.
_LONGEST_PAUSE_S = 0.5


class RunningClock:
    """A clock of the time in which this process runs, for deadlines.

    A batch system suspends a job with SIGSTOP, and no deadline may pass meanwhile. So the time
    between two readings counts as at most 0.5 s. Whoever waits must read the clock more often.
    """

    def __init__(self) -> None:
        self.elapsed_s = 0.0  # at the last reading
        self._read_s = time.perf_counter()
        self._facts: dict[str, tuple[object, float]] = {}

    def read(self) -> float:
        """Seconds since the clock was made. Does not block."""
        now_s = time.perf_counter()
        self.elapsed_s += min(now_s - self._read_s, _LONGEST_PAUSE_S)
        self._read_s = now_s
        return self.elapsed_s

    def holds_s(self, what: str, fact: object) -> float:
        """Seconds for which this has been the fact, as far as it was asked about, until the last
        reading. what: a name for the facts of which one holds at a time.
        """
        known, since_s = self._facts.get(what, (None, 0.0))
        if known != fact:
            self._facts[what] = fact, self.elapsed_s
            return 0.0
        return self.elapsed_s - since_s
