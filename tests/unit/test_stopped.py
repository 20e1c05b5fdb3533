"""The process that watches a rank: what it ends, and what it leaves alone."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from burst_rt.job import stopped

# A launcher that waits for its rank and prints its exit code.
_LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
rank.wait()
print(rank.returncode, flush=True)
"""
_RANK = """
import os, signal, time
from burst_rt.job import stopped
stopped._MARGIN_S = 1.0
os.dup2(1, 77)
for limit_s in {limits}:
    stopped.end_if_stopped(limit_s, 5)
print(os.getpid(), flush=True)
{then}
"""


@contextmanager
def _launched(
    then: str, limits: tuple[float, ...] = (0.0,)
) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A launcher, and its rank, which has a watcher and runs `then`."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, _RANK.format(limits=limits, then=then)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert launcher.stdout is not None
    rank = psutil.Process(int(launcher.stdout.readline()))
    try:
        yield launcher, rank
    finally:
        launcher.kill()
        with suppress(psutil.NoSuchProcess):
            rank.kill()
        launcher.wait()


def _end(launcher: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = launcher.communicate(timeout=30)
    return out.strip(), err


def test_a_rank_that_stays_stopped_is_killed() -> None:
    with _launched("os.kill(os.getpid(), signal.SIGSTOP)") as (launcher, rank):
        assert _end(launcher) == (
            str(-signal.SIGKILL),
            f"burst-rt: rank 5: process {rank.pid} has been stopped by a signal (SIGSTOP, say) for "
            "1 s, longer than other ranks wait for it, and is killed; SIGCONT would have let it go "
            "on\n",
        )


def test_a_rank_that_goes_on_in_time_is_left_alone() -> None:
    """The longest time of several calls counts, and there is one watcher."""
    with _launched("os.kill(os.getpid(), signal.SIGSTOP)", (0.0, 60.0, 30.0)) as (launcher, rank):
        time.sleep(3.0)
        assert rank.status() == psutil.STATUS_STOPPED
        assert len(rank.children()) == 1
        rank.resume()
        assert _end(launcher) == ("0", "")


def test_a_rank_whose_launcher_is_stopped_is_left_alone() -> None:
    with _launched("time.sleep(1.0); os.kill(os.getpid(), signal.SIGSTOP)") as (launcher, rank):
        psutil.Process(launcher.pid).suspend()
        time.sleep(4.0)
        assert rank.status() == psutil.STATUS_STOPPED
        rank.resume()
        psutil.Process(launcher.pid).resume()
        assert _end(launcher) == ("0", "")


def test_a_watcher_ends_with_its_rank_and_holds_none_of_its_files() -> None:
    with _launched("time.sleep(60)") as (launcher, rank):
        (watcher,) = rank.children()
        files = Path(f"/proc/{watcher.pid}/fd")
        deadline_s = time.monotonic() + 10
        # Its own descriptor is that of the rank's process.
        while {path.name for path in files.iterdir()} != {"0", "1", "2", "3"}:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert os.readlink(files / "3") == "anon_inode:[pidfd]"
        # Nobody takes it for a rank, which launchers tell by variables.
        assert watcher.environ().keys() <= {"LD_LIBRARY_PATH"}
        rank.kill()
        assert _end(launcher)[0] == str(-signal.SIGKILL)
        watcher.wait(10)


@pytest.mark.parametrize(
    ("line", "is_so"),
    [("7 (a) b) T 1 2", True), ("7 (T) S 1 2", False), ("7 (python) t 1 2", False)],
)
def test_states_are_read_behind_the_name(
    line: str, is_so: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.open", lambda *_, **__: io.StringIO(line))
    assert stopped._is_stopped(7) is is_so
