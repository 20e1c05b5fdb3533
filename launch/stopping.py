"""Stopping a job after what it is doing, instead of in the middle of it: what the launcher asks,
and how ranks hear of it.

Through the job's folder, not by signals: mpirun ends its ranks a quarter of a second after a signal
(Open MPI 5), which no step and no checkpoint fit into. A program that can stop offers to, the
launcher asks, and the program leaves a last word with its exit code. Ranks hear signals as well:
those of a batch system, of a launcher of one's own, or of a terminal. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple, Self

from burst_rt.job.reports import job_folder

__all__ = [
    "SIGNALS",
    "LastWord",
    "StopRequests",
    "ask_to_stop",
    "leave_word",
    "listen",
    "read_word",
]

# SIGUSR1: what batch systems send some time before a job's end (`sbatch --signal`), and what mpirun
# passes on without ending the job.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

_LISTENS, _OFFER, _ASKED, _WORD = "listens", "stops-when-asked", "stop", "last-word"
# A launcher and a terminal may both send what is one wish.
_ONE_WISH_S = 1.0


class LastWord(NamedTuple):
    """What a stopped job has to say after all else, and its exit code."""

    text: str
    exit_code: int


def listen(job_dir: Path) -> None:
    """Promise the job's ranks that a last word will be read: without that none is left, and ranks
    speak for themselves.
    """
    (job_dir / _LISTENS).touch()


def ask_to_stop(job_dir: Path, number: int) -> bool:
    """Ask the job's ranks to stop because of a signal; False where they have not offered to."""
    if not (job_dir / _OFFER).exists():
        return False
    _write(job_dir / _ASKED, number)
    return True


def read_word(job_dir: Path) -> LastWord | None:
    """What the ranks have left to say, if they have."""
    path = job_dir / _WORD
    return LastWord(*json.loads(path.read_text())) if path.exists() else None


def leave_word(word: LastWord) -> bool:
    """Leave a last word to the launcher, who returns its exit code whatever the ranks' is; False
    where none listens on this host.
    """
    job_dir = job_folder()
    if job_dir is None or not (job_dir / _LISTENS).exists():
        return False
    _write(job_dir / _WORD, word)
    return True


@dataclass
class StopRequests:
    """While it is open (a context manager), signals to this process are noted, and the launcher may
    ask; `offer`: one rank does.

    Signals are noted on the main thread only; what this process was told to ignore stays ignored.
    Another one, a second or more after the first, has the effect that it would have had.
    """

    offer: bool
    _noted: signal.Signals | None = None
    _noted_at_s: float = 0.0
    _before: dict[int, object] = field(default_factory=dict)
    _job_dir: Path | None = None

    def votes(self) -> list[float]:
        """A number for each of SIGNALS, 1 for the one this rank has heard; ranks add them up to
        agree.
        """
        heard = self._noted
        if heard is None and self._job_dir is not None and (self._job_dir / _ASKED).exists():
            heard = signal.Signals(json.loads((self._job_dir / _ASKED).read_text()))
        return [float(number == heard) for number in SIGNALS]

    @staticmethod
    def heard(votes: Sequence[float]) -> signal.Signals | None:
        """What any rank has heard, from the sum of all ranks' votes."""
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
            (self._job_dir / _OFFER).touch()
        return self

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
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal gave it
        self._before = {}


def _write(path: Path, content: object) -> None:
    """So that a reader sees all of it or nothing; where the folder is gone the launcher is, and
    nobody reads.
    """
    partial = path.with_suffix(".partial")
    with suppress(FileNotFoundError):
        partial.write_text(json.dumps(content))
        os.replace(partial, path)
