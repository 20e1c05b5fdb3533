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
import os, subprocess, sys
stderr = os.open(os.devnull, os.O_RDONLY) if sys.argv[2:] else None
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stderr=stderr)
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
_STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


@contextmanager
def _launched(
    then: str, limits: tuple[float, ...] = (0.0,), *options: str
) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A launcher, and its rank, which has a watcher and runs `then`."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, _RANK.format(limits=limits, then=then), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
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
        for pipe in (launcher.stdout, launcher.stderr):
            assert pipe is not None
            pipe.close()


def _watchers_of(rank: psutil.Process) -> list[psutil.Process]:
    """They are no children of the rank."""
    beginning = ["-I", "-S", stopped.__file__, str(rank.pid)]
    running = psutil.process_iter(["cmdline"])
    return [process for process in running if (process.info["cmdline"] or [])[1:5] == beginning]


def _watcher_of(rank: psutil.Process) -> psutil.Process:
    """Once there is one."""
    deadline_s = time.monotonic() + 10
    while len(found := _watchers_of(rank)) != 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return found[0]


def _end(launcher: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = launcher.communicate(timeout=30)
    return out.strip(), err


def test_a_rank_that_stays_stopped_is_killed() -> None:
    with _launched(_STOP) as (launcher, rank):
        assert _end(launcher) == (
            str(-signal.SIGKILL),
            f"burst-rt: rank 5: process {rank.pid} had been stopped by a signal (SIGSTOP, say) for "
            "1 s, longer than other ranks wait for it, and was killed; SIGCONT would have let it "
            "go on\n",
        )


@pytest.mark.parametrize(
    ("first", "then", "killed"),
    [
        ("echo SUSPENDED", "echo RUNNING", True),
        ("exit 1", "echo RUNNING", True),
        ("echo SUSPENDED", "echo SUSPENDED", False),
    ],
)
def test_slurm_is_asked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, then: str, *, killed: bool
) -> None:
    """`tests/all_hosts.py` has a job that Slurm suspends."""
    squeue, asked = tmp_path / "squeue", tmp_path / "asked"
    turn = f"case $(wc -l < {asked}) in 1) {first};; *) {then};; esac"
    squeue.write_text(f"#!/bin/sh\necho $* >> {asked}\n{turn}\n", encoding="utf-8")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with _launched(_STOP) as (launcher, rank):
        if killed:
            assert _end(launcher)[0] == str(-signal.SIGKILL)
        else:
            time.sleep(4.0)
            assert rank.status() == psutil.STATUS_STOPPED
    questions = asked.read_text(encoding="utf-8").splitlines()
    assert len(questions) >= 2
    assert set(questions) == {"--noheader --format=%T --jobs=17"}


def test_it_is_killed_where_there_is_no_slurm_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with _launched(_STOP) as (launcher, _):
        assert _end(launcher)[0] == str(-signal.SIGKILL)


def test_it_is_killed_where_nothing_can_be_told() -> None:
    with _launched(_STOP, (0.0,), "no standard error") as (launcher, _):
        assert _end(launcher) == (str(-signal.SIGKILL), "")


def test_a_rank_that_goes_on_in_time_is_left_alone() -> None:
    """The longest time of several calls counts, and there is one watcher."""
    with _launched(_STOP, (0.0, 60.0, 0.0)) as (launcher, rank):
        time.sleep(4.0)
        assert rank.status() == psutil.STATUS_STOPPED
        _watcher_of(rank)
        rank.resume()
        assert _end(launcher) == ("0", "")


def test_a_rank_that_runs_now_and_then_is_left_alone() -> None:
    """As one does that cpulimit slows."""
    with _launched("time.sleep(60)", (1.0,)) as (_, rank):
        _watcher_of(rank)
        until_s = time.monotonic() + 5
        while time.monotonic() < until_s:
            rank.suspend()
            time.sleep(0.49)
            rank.resume()
            time.sleep(0.01)
        assert rank.is_running()
        assert rank.status() != psutil.STATUS_ZOMBIE


def test_a_rank_whose_launcher_is_stopped_is_left_alone() -> None:
    with _launched(f"time.sleep(1.0); {_STOP}") as (launcher, rank):
        psutil.Process(launcher.pid).suspend()
        time.sleep(4.0)
        assert rank.status() == psutil.STATUS_STOPPED
        rank.resume()
        psutil.Process(launcher.pid).resume()
        assert _end(launcher) == ("0", "")


def test_a_watcher_ends_with_its_rank_and_holds_none_of_its_files() -> None:
    handled = "for name in ('HUP', 'INT', 'TERM', 'USR1'):\n"
    handled += "    signal.signal(signal.Signals['SIG' + name], lambda *_: None)\n"
    with _launched(f"{handled}print('ready', flush=True)\ntime.sleep(60)") as (launcher, rank):
        watcher = _watcher_of(rank)
        files = Path(f"/proc/{watcher.pid}/fd")
        deadline_s = time.monotonic() + 10
        # Standard error and that by which it is told are pipes; and there is the rank's process.
        held = ["/dev/null", "/dev/null", "anon_inode", "pipe", "pipe"]
        while sorted(map(_kind, files.iterdir())) != held:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        # Nobody takes it for a rank, which launchers tell by variables.
        assert watcher.environ().keys() <= {"LD_LIBRARY_PATH", "PWD"}
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        for name in ("HUP", "INT", "TERM", "USR1"):
            rank.send_signal(signal.Signals[f"SIG{name}"])
            watcher.send_signal(signal.Signals[f"SIG{name}"])
        time.sleep(1.0)
        assert watcher.status() != psutil.STATUS_ZOMBIE
        rank.kill()
        assert _end(launcher)[0].endswith(str(-signal.SIGKILL))
        watcher.wait(10)


def _kind(link: Path) -> str:
    try:
        return os.readlink(link).partition(":")[0]
    except FileNotFoundError:  # closed since it was listed; the caller looks again
        return "closed"


def test_a_program_that_waits_for_all_its_children_goes_on() -> None:
    wait = "if not os.fork():\n    os._exit(0)\n"
    wait += "try:\n    while True:\n        os.wait()\nexcept ChildProcessError:\n    pass"
    with _launched(wait) as (launcher, _):
        assert _end(launcher) == ("0", "")


def test_a_program_that_replaces_a_rank_is_not_watched() -> None:
    with _launched("os.execvp('sleep', ['sleep', '60'])") as (_, rank):
        deadline_s = time.monotonic() + 10
        while _watchers_of(rank):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("state", "switches"),
    [("T (stopped)", 7), ("S (sleeping)", -1), ("t (tracing stop)", -1)],
)
def test_a_process_that_a_debugger_holds_is_not_stopped(
    state: str, switches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = "voluntary_ctxt_switches:\t3\nnonvoluntary_ctxt_switches:\t4\n"
    said = f"Name:\tState: T\nState:\t{state}\n{counts}"
    monkeypatch.setattr("builtins.open", lambda *_, **__: io.StringIO(said))
    assert stopped._switches_if_stopped(7) == switches
