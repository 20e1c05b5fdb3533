"""A failed job again: how often it is started, and when it is not.

A mistake of the user's is made again by every start, so a job that ended by one is not started
again. Nor is a job that was stopped, or one that failed twice alike without getting further.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from burst_rt.errors import ConfigError, InputError
from burst_rt.job.telling import tell

__all__ = ["ONCE", "JobResult", "Restarts"]

# From here on: exit codes of jobs that a signal has ended. MPICH's mpirun returns the signal's own
# number where it was one of the others.
_SIGNALS = 128
_BARE_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
_MISTAKES = (InputError.exit_code, ConfigError.exit_code)
# Seconds, times of the day and numbers of processes differ from one start to the next.
_CHANGING = re.compile(r"\d+(\.\d+)? (s|ms|us)\b|\d\d:\d\d:\d\d|(pid|process) \d+")


class JobResult(NamedTuple):
    """How a job ended."""

    exit_code: int
    words: str  # the last words on it
    stopped: bool = False  # whether somebody had asked it to stop


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often a job is started again.

    times: how often at most, since the job last ran for `window_s` seconds; None: in all. progress:
    says how far the job has got, such as its newest checkpoint. min_ranks: with how few ranks it
    may be started again, where a host is gone; None: with all.

    A job is not started again after a mistake (InputError, ConfigError), after it was stopped, and
    after it failed twice with the same words and the same progress. A signal without progress does
    not count as the same.
    """

    times: int = 0
    window_s: float | None = None
    progress: Callable[[], object] = lambda: None
    min_ranks: int | None = None

    def run(self, start: Callable[[int], JobResult]) -> int:
        """Starts a job until it ends well, or is not to be started again. Returns its exit code.

        start: runs the job once; is told how often it was started before.
        """
        made = since = 0
        before: tuple[str, object] | None = None
        while True:
            started_s = time.monotonic()
            result = start(made)
            if not result.exit_code or result.stopped or result.exit_code in _MISTAKES:
                return result.exit_code
            if self.window_s is not None and time.monotonic() - started_s >= self.window_s:
                since, before = 0, None
            if since >= self.times:
                return result.exit_code
            failed = _CHANGING.sub("", result.words), self.progress()
            # A signal does not say where the program was.
            by_signal = result.exit_code >= _SIGNALS or result.exit_code in _BARE_SIGNALS
            told = not by_signal or failed[1] is not None
            if told and failed == before:
                _say("it failed again in the same way and got no further: it is not started again")
                return result.exit_code
            before = failed
            made, since = made + 1, since + 1
            _say(f"restart {since} of {self.times}")


# No restarts.
ONCE = Restarts()


def _say(text: str) -> None:
    tell(f"burst-rt: {text}")
