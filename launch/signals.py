"""The signals that `burst-rt run` gets: it asks the ranks to stop, or hands the signal on."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from burst_rt.launch.mpirun import kill_job
from burst_rt.launch.stopping import SIGNALS, ask_to_stop, put_back
from burst_rt.telemetry.hub.starting import RunningHub

__all__ = ["Stop", "forward_signals"]

# Seconds that ranks that offer to stop by themselves may take to stop: a step and a checkpoint.
_STOPPING_DEADLINE_S = 30.0
# Seconds within which a repeated signal is the same wish: a terminal that closes, or a program that
# ends this process and its group, may send one signal twice.
_ONE_WISH_S = 0.3


@dataclass
class Stop:
    """Passes the first signal on to the ranks or to mpirun; kills the whole job at a second one."""

    received: int | None = None
    asked: bool = False  # whether the ranks were asked to stop, and may still be stopping
    _received_at_s: float = 0.0
    _asked_at_s: float = 0.0
    _mpirun: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _job_dir: Path | None = None
    _hub: RunningHub | None = None

    def attach(
        self, mpirun: subprocess.Popen[bytes], job_dir: Path, hub: RunningHub | None
    ) -> None:
        self._mpirun, self._job_dir, self._hub = mpirun, job_dir, hub
        if self.received is not None:
            mpirun.terminate()

    def due(self) -> bool:
        """Whether mpirun has been told to end the job.

        Where the ranks were asked to stop, mpirun is told once the ranks' time is up. Does not
        block.
        """
        if self.asked and time.monotonic() - self._asked_at_s > _STOPPING_DEADLINE_S:
            self.asked = False
            self._pass_on()
        return self.received is not None and not self.asked

    def handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if number == self.received and now_s - self._received_at_s < _ONE_WISH_S:
            return
        offered = self._job_dir is not None and ask_to_stop(self._job_dir, number)
        if number == signal.SIGUSR1 and (self.received is not None or not offered):
            # A batch system's notice: the program's own affair, or of a stop that is under way.
            if self.received is None and self._mpirun is not None:
                self._mpirun.send_signal(number)
            return
        again, self.received, self._received_at_s = self.received is not None, number, now_s
        if self._mpirun is None or self._job_dir is None:
            return
        if not again and self._hub is not None:
            # Ranks that end now are not lost.
            self._hub.stopping(signal.Signals(number).name)
        if again:
            self.asked = False
            kill_job(self._mpirun)
        elif offered:
            self.asked, self._asked_at_s = True, time.monotonic()
            # Begin a new line: the terminal has written ^C, perhaps after a progress bar.
            note = (
                f"burst-rt: stopping after this step, within {_STOPPING_DEADLINE_S:.0f} s; the "
                "same signal again ends the job at once\n"
            )
            with suppress(OSError):  # a pipe's reader, or the terminal, may be gone by now
                os.write(2, ("\n" * os.isatty(2) + note).encode())
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        assert self._mpirun is not None
        assert self.received is not None
        self._mpirun.send_signal(
            self.received if self.received == signal.SIGINT else signal.SIGTERM
        )


@contextmanager
def forward_signals() -> Iterator[Stop]:
    """Inside, SIGINT, SIGTERM, SIGHUP and SIGUSR1 are a `Stop`'s; in other threads than the main
    one nothing changes.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals to the main thread only, and lets no other thread handle them.
        yield stop
        return
    # Signals that this process was started to ignore (nohup) stay ignored.
    numbers = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop.handle) for number in numbers}
    try:
        yield stop
    finally:
        put_back(before)
