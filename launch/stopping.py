"""Stopping a job between two steps: how the launcher asks, and how the ranks hear of the request.

The request goes through the job's folder, not by signals: mpirun (Open MPI 5) ends its ranks a
quarter of a second after a signal, which is too short for a step or a checkpoint. A program that
can stop offers to stop, the launcher asks, and the program leaves a last word and an exit code.
Ranks also hear signals from a batch system, from the user's own launcher, or from a terminal.
Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

from burst_rt.job.reports import job_folder

__all__ = [
    "SIGNALS",
    "LastWord",
    "StopRequests",
    "StopVotes",
    "ask_to_stop",
    "leave_word",
    "listen",
    "put_back",
    "read_word",
]

# SIGUSR1: batch systems send it some time before a job's end (`sbatch --signal`), and mpirun passes
# it on without ending the job.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

_LISTENS, _OFFER, _ASKED, _WORD = "listens", "stops-when-asked", "stop", "last-word"
# Seconds within which a repeated signal is the same request: a launcher and a terminal may both
# send one.
_ONE_WISH_S = 1.0


# For each of SIGNALS the number of ranks that have heard it: of one rank 0 or 1. These are floats,
# so that they can ride in a sum of other figures that ranks make anyway: to agree on a stop then
# costs no round of messages.
StopVotes: TypeAlias = list[float]


class LastWord(NamedTuple):
    """The line that a stopped job prints after everything else, and its exit code."""

    text: str
    exit_code: int


def listen(job_dir: Path) -> None:
    """Promise the job's ranks that the launcher will read a last word.

    Without this promise the ranks leave no last word and print for themselves.
    """
    (job_dir / _LISTENS).touch()


def ask_to_stop(job_dir: Path, number: int) -> bool:
    """Ask the job's ranks to stop because of a signal; False where none has offered to stop.

    Does not block: the ranks look for the request when they can stop.
    """
    if not (job_dir / _OFFER).exists():
        return False
    listen(job_dir)  # the folder may have been cleaned since
    _write(job_dir / _ASKED, number)
    return True


def read_word(job_dir: Path) -> LastWord | None:
    """The last word that the ranks have left; None where they have left none."""
    path = job_dir / _WORD
    return LastWord(*json.loads(path.read_text())) if path.exists() else None


def leave_word(word: LastWord) -> bool:
    """Leave a last word to the launcher; False where no launcher listens on this host.

    The launcher returns the word's exit code, whatever the ranks' exit codes are.
    """
    job_dir = job_folder()
    if job_dir is None or not (job_dir / _LISTENS).exists():
        return False
    _write(job_dir / _WORD, word)
    return True


def put_back(handlers: Mapping[Any, Any]) -> None:
    """Give signals the handlers that `signal.signal` returned for them.

    It returns None for a handler that Python did not set, as UCX's of SIGHUP where UCX is
    preloaded. Python cannot put that one back: the signal then ends the process.
    """
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@dataclass
class StopRequests:
    """A context manager that notes requests to stop: signals to this process, and the launcher's.

    Signals are noted on the main thread only. A signal that this process was told to ignore stays
    ignored. A second signal, a second or more after the first, has the effect that it would have
    had outside this block.
    """

    # Whether this rank offers to stop when the launcher asks; one rank of a job does.
    offer: bool
    _noted: signal.Signals | None = None
    _noted_at_s: float = 0.0
    _before: dict[int, Any] = field(default_factory=dict)
    _job_dir: Path | None = None

    def votes(self) -> StopVotes:
        """This rank's votes, which the ranks add up to agree. Does not block."""
        heard = self._noted
        if self._job_dir is not None:
            if heard is None and (self._job_dir / _ASKED).exists():
                heard = signal.Signals(json.loads((self._job_dir / _ASKED).read_text()))
            self._offer(self._job_dir)
        return [float(number == heard) for number in SIGNALS]

    @staticmethod
    def heard(votes: StopVotes) -> signal.Signals | None:
        """The signal that any rank has heard, from the sum of all ranks' votes; None if none."""
        return next((number for number, count in zip(SIGNALS, votes, strict=True) if count), None)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            numbers = [
                number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
            ]
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        if self.offer:
            self._job_dir = job_folder()
        if self._job_dir is not None:
            self._offer(self._job_dir)
        return self

    @staticmethod
    def _offer(job_dir: Path) -> None:
        """Makes the offer, and makes it again where the folder has been cleaned."""
        if not (job_dir / _OFFER).exists():
            with suppress(OSError):
                job_folder()
                (job_dir / _OFFER).touch()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._job_dir is not None:
            (self._job_dir / _OFFER).unlink(missing_ok=True)
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._noted is None:
            self._noted, self._noted_at_s = signal.Signals(number), now_s
        elif now_s - self._noted_at_s > _ONE_WISH_S:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        put_back(self._before)
        self._before = {}


def _write(path: Path, content: object) -> None:
    """Write a file that a reader sees whole or not at all.

    Where the folder is gone, the launcher is gone too, and nobody would read the file.
    """
    partial = path.with_suffix(".partial")
    with suppress(FileNotFoundError):
        partial.write_text(json.dumps(content))
        os.replace(partial, path)
